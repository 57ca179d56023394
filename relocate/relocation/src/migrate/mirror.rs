//! Disks that move with the machine. Each disk is sent while everything runs, then the chunks that
//! the driver's dirty log names, and the last chunks when its file systems are held still. As with
//! memory, a chunk with the contents that were sent before is not sent again.

use super::{
    copy::{From, Pass, Stopped, give_way, keep_to},
    disk::{Buffer, Disk, memory},
    link::Link,
    offer::OfferedDisk,
};
use mercury_control::{
    device::{Device, DiskLog},
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_migration::{
    protocol::Attempt,
    rounds::Limits,
    wire::{CHUNKS_BYTES_MAX, Chunks, DiskLedger, PAGE, hash_of_chunk},
};
use mercury_quiesce::mounts::Mounted;
use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::PathBuf,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Interval of signs of life: without them the other end may take silence for an end.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// Passes at most after file systems were held still. Requests under way then are done after so
/// many passes, or a program goes on writing.
const LAST_LOOKS: usize = 20;

/// A disk that moves.
#[derive(Debug)]
struct Source<'a> {
    /// The driver, which has the dirty log.
    device: &'a Device,
    sysroot: &'a Sysroot,
    disk: Disk,
    file: File,
    ledger: DiskLedger,
    /// True if the whole disk has been sent once.
    is_begun: bool,
}

/// The disks that move with the machine.
#[derive(Debug, Default)]
pub struct Mirror<'a> {
    sources: Vec<Source<'a>>,
}

/// The settings of a pass.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub level: i32,
    /// Threads that read, hash and compress.
    pub workers: usize,
    /// Tells if applications run.
    pub from: From,
    /// Limits of the operator.
    pub limits: Limits,
}

impl<'a> Mirror<'a> {
    /// Opens these disks.
    ///
    /// # Errors
    ///
    /// Returns an error if one of them cannot be copied.
    pub fn open(paths: &[PathBuf], device: &'a Device, sysroot: &'a Sysroot) -> Result<Self> {
        let mut sources: Vec<Source<'a>> = Vec::new();
        for path in paths {
            let refused = |why: String| {
                Error::new(Exit::Impossible, why).hint(
                    "--with-disk needs whole disks on SATA, SCSI, NVMe or virtio; devices that are made \
                     of them move with them",
                )
            };
            let disk = Disk::find(path, sysroot).map_err(refused)?;
            if sources.iter().any(|source| source.disk.place == disk.place) {
                return Err(refused(format!("{} is named twice", path.display())));
            }
            let file = disk.open(false).map_err(|error| refused(format!("{}: {error}", path.display())))?;
            let ledger = DiskLedger::new(disk.bytes);
            sources.push(Source { device, sysroot, ledger, disk, file, is_begun: false });
        }
        Ok(Self { sources })
    }

    /// Returns true if there are no disks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Returns the size of all disks in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.disk.bytes).sum()
    }

    /// Returns the memory in MiB that the destination's restore environment needs to remember the
    /// chunks.
    #[must_use]
    pub fn memory_there(&self) -> u64 {
        memory(&self.sources.iter().map(|source| source.disk.bytes).collect::<Vec<_>>())
    }

    /// Describes the disks for the offer, and tells which of these file systems are on them.
    #[must_use]
    pub fn offered(&self, mounts: &[Mounted]) -> Vec<OfferedDisk> {
        let on = |Source { disk, sysroot, .. }: &Source<'_>, mount: &&Mounted| {
            fs::metadata(&mount.device).is_ok_and(|found| disk.holds(found.rdev(), sysroot))
        };
        let offered = |source: &Source<'_>| OfferedDisk {
            disk: source.disk.clone(),
            file_systems: mounts
                .iter()
                .filter(|mount| on(source, mount))
                .map(|mount| mount.device.to_string_lossy().into_owned())
                .collect(),
            digest: String::new(),
        };
        self.sources.iter().map(offered).collect()
    }

    /// Begins the dirty log of each disk.
    ///
    /// # Errors
    ///
    /// Returns an error if the driver cannot begin one.
    pub fn watch(&self) -> Result<()> {
        self.sources.iter().try_for_each(|source| {
            source
                .log()
                .begin()
                .map_err(|error| error.hint("--with-disk needs whole disks on SATA, SCSI, NVMe or virtio"))
        })
    }

    /// Ends the dirty logs.
    pub fn unwatch(&self) {
        for source in &self.sources {
            // Ending a log that never began fails, which does not matter.
            let _ = source.log().end();
        }
    }

    /// Sends the chunks of each disk that may differ from what was sent: all chunks the first time.
    /// Reports progress in pages to `watch`, and stops if `watch` says so.
    ///
    /// # Errors
    ///
    /// Returns the reason if the pass was broken off.
    pub fn pass(
        &mut self,
        how: &How,
        link: &mut Link,
        watch: &mut dyn FnMut(&Pass, &mut Link) -> bool,
    ) -> std::result::Result<Pass, Stopped> {
        let begun = Instant::now();
        let mut total = Pass::default();
        for (number, source) in (0..).zip(&mut self.sources) {
            let written = source.log().collect().map_err(Stopped::Failed)?;
            let chunks = if source.is_begun { written } else { (0..source.ledger.chunks()).collect() };
            source.is_begun = true;
            source.send(number, &chunks, how, (link, begun), &mut total, watch)?;
            if how.from == From::Now {
                // Settling now keeps the computation of the digest short at the end.
                source.ledger.settle();
            }
        }
        total.took = begun.elapsed();
        Ok(total)
    }

    /// Runs the last passes, after file systems were held still, until the dirty logs are empty.
    ///
    /// # Errors
    ///
    /// Returns the reason if a pass was broken off, or a program goes on writing.
    pub fn finish(
        &mut self,
        how: &How,
        link: &mut Link,
        watch: &mut dyn FnMut(&Pass, &mut Link) -> bool,
    ) -> std::result::Result<Pass, Stopped> {
        let mut all = Pass::default();
        for _ in 0..LAST_LOOKS {
            let done = self.pass(how, link, watch)?;
            all.scanned += done.scanned;
            all.sent += done.sent;
            all.bytes += done.bytes;
            all.took += done.took;
            if done.scanned == 0 {
                return Ok(all);
            }
        }
        Err(Stopped::Failed(not_still()))
    }

    /// Checks after the instant that the disks hold what was sent last.
    ///
    /// # Errors
    ///
    /// Returns an error if a program has written to a disk, or a disk was replaced.
    pub fn is_still(&self) -> Result<()> {
        for source in &self.sources {
            if !source.log().collect()?.is_empty() {
                return Err(not_still());
            }
            let disk = &source.disk;
            let now = Disk::find(&disk.path, source.sysroot);
            if now.as_ref() != Ok(disk) {
                let why = format!("{} is no longer the same disk", disk.path.display());
                return Err(Error::new(Exit::Failed, why)
                    .hint("leave the disks as they are while the machine moves, and try again"));
            }
        }
        Ok(())
    }

    /// Returns the digests of the disks in their order, as text.
    #[must_use]
    pub fn digests(&mut self, attempt: Attempt) -> Vec<String> {
        self.sources.iter_mut().map(|source| source.ledger.digest(attempt).to_string()).collect()
    }

    /// Returns the bytes of chunks that were written to since the logs began, or since the last
    /// call.
    ///
    /// # Errors
    ///
    /// Returns an error if the driver does not report the chunks.
    pub fn written(&self) -> Result<u64> {
        let bytes = |source: &Source<'_>| {
            let found = source.log().collect()?;
            Ok(found.iter().map(|chunk| source.ledger.place(*chunk).1 as u64).sum::<u64>())
        };
        self.sources.iter().map(bytes).sum()
    }
}

fn not_still() -> Error {
    Error::new(Exit::Failed, "a disk is written to although its file systems are held still").hint(
        "stop the program that writes past the file systems (RAID, a virtual machine, dd), and try \
            again; this machine runs on",
    )
}

/// The output of a worker.
struct Record {
    packed: Vec<u8>,
    scanned: u64,
    sent: u64,
    zeros: u64,
}

impl Source<'_> {
    fn log(&self) -> DiskLog<'_> {
        self.device.disk_log(&self.file, self.ledger.shift(), self.ledger.chunks())
    }

    fn send(
        &mut self,
        number: u32,
        chunks: &[u64],
        how: &How,
        (link, begun): (&mut Link, Instant),
        total: &mut Pass,
        watch: &mut dyn FnMut(&Pass, &mut Link) -> bool,
    ) -> std::result::Result<(), Stopped> {
        let work = Work {
            number,
            disk: &self.disk,
            file: &self.file,
            chunks,
            next: AtomicUsize::new(0),
            ledger: Mutex::new(&mut self.ledger),
            hurry: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            level: how.level,
        };
        thread::scope(|scope| {
            let (out, records) = sync_channel(how.workers);
            for _ in 0..how.workers {
                let (out, work) = (out.clone(), &work);
                scope.spawn(move || {
                    give_way(how.from);
                    work.work(&out);
                });
            }
            drop(out);
            let sent = forward(&records, &work.hurry, how, (link, begun), total, watch);
            work.stop.store(true, Ordering::Relaxed);
            // A worker that still has something to send stops because of the closed channel.
            drop(records);
            sent
        })
    }
}

/// The chunks of a disk for several threads to read.
struct Work<'a> {
    number: u32,
    disk: &'a Disk,
    file: &'a File,
    chunks: &'a [u64],
    next: AtomicUsize,
    ledger: Mutex<&'a mut DiskLedger>,
    /// Send the next chunk even if it has not changed, as a sign of life.
    hurry: AtomicBool,
    stop: AtomicBool,
    level: i32,
}

impl<'a> Work<'a> {
    fn work(&self, out: &SyncSender<Result<Record>>) {
        let mut buffer = Buffer::new(CHUNKS_BYTES_MAX);
        let chunk = self.lock().place(0).1.max(1);
        // As many chunks as fit one record.
        let count = (CHUNKS_BYTES_MAX / chunk).max(1);
        while !self.stop.load(Ordering::Relaxed) {
            let at = self.next.fetch_add(count, Ordering::Relaxed);
            let Some(part) =
                self.chunks.get(at..(at + count).min(self.chunks.len())).filter(|part| !part.is_empty())
            else {
                break;
            };
            if out.send(self.record(part, &mut buffer)).is_err() {
                break;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, &'a mut DiskLedger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, part: &[u64], buffer: &mut Buffer) -> Result<Record> {
        let places: Vec<_> = {
            let ledger = self.lock();
            part.iter().map(|number| ledger.place(*number)).collect()
        };
        let (mut at, mut slices) = (0, Vec::new());
        let bytes = buffer.bytes();
        for run in places.chunk_by(|left, right| left.0 + left.1 as u64 == right.0) {
            let length: usize = run.iter().map(|(_, length)| length).sum();
            self.file
                .read_exact_at(&mut bytes[at..at + length], run[0].0)
                .map_err(|error| self.lost(&error))?;
            for (offset, length) in run {
                slices.push((*offset, at..at + length));
                at += length;
            }
        }
        let hashes: Vec<_> = slices.iter().map(|(_, range)| hash_of_chunk(&bytes[range.clone()])).collect();
        let mut record = Record { packed: Vec::new(), scanned: at.div_ceil(PAGE) as u64, sent: 0, zeros: 0 };
        let mut chunks = Chunks::of(self.number);
        for ((offset, range), hash) in slices.into_iter().zip(hashes) {
            let noted = self.lock().note(offset, range.len(), hash);
            let is_other = noted.map_err(Error::fault)?;
            if is_other || self.hurry.swap(false, Ordering::Relaxed) {
                let chunk = &bytes[range];
                let pages = chunk.len().div_ceil(PAGE) as u64;
                record.sent += pages;
                if chunks.add(offset, chunk) {
                    record.zeros += pages;
                }
            }
        }
        if !chunks.is_empty() {
            let packed = chunks.pack(self.level);
            record.packed = packed.map_err(|error| Error::fault(error.to_string()))?;
        }
        Ok(record)
    }

    fn lost(&self, error: &std::io::Error) -> Error {
        let text = format!("{} cannot be read: {error}", self.disk.path.display());
        Error::new(Exit::Failed, text)
            .hint("check that the disk is still there; the machine has not moved, and runs on")
    }
}

/// Sends the output of the workers.
fn forward(
    records: &Receiver<Result<Record>>,
    hurry: &AtomicBool,
    how: &How,
    (link, begun): (&mut Link, Instant),
    total: &mut Pass,
    watch: &mut dyn FnMut(&Pass, &mut Link) -> bool,
) -> std::result::Result<(), Stopped> {
    let mut sent_at = Instant::now();
    let gone = |error: std::io::Error| Stopped::Gone(error.to_string());
    loop {
        if !watch(total, link) {
            return Err(Stopped::Wanted);
        }
        let record = match records.recv_timeout(Duration::from_millis(100)) {
            Ok(record) => record.map_err(Stopped::Failed)?,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        total.scanned += record.scanned;
        if record.packed.is_empty() {
            if sent_at.elapsed() > SIGN_OF_LIFE {
                hurry.store(true, Ordering::Relaxed);
            }
            continue;
        }
        link.chunks(&record.packed).map_err(gone)?;
        sent_at = Instant::now();
        total.sent += record.sent;
        total.changed += record.sent;
        total.zeros += record.zeros;
        total.bytes += record.packed.len() as u64;
        if how.from == From::Now && !keep_to(&how.limits, begun, total, &mut |total| watch(total, link)) {
            return Err(Stopped::Wanted);
        }
    }
    link.flush().map_err(gone)
}
