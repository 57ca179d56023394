//! Disks that go along: each is sent while everything runs, then what the driver's log says was written since, and what is
//! left when its file systems are held still. As with memory, a chunk that holds what was sent of it is not sent again.

use super::{
    copy::{From, Pass, Stopped, give_way, keep_to},
    disk::{Buffer, Disk, memory},
    link::Link,
    offer::OfferedDisk,
};
use crate::{
    checkpoint::disks::Mounted,
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

/// The other end may take silence for an end: something is sent so often.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// What was under way when file systems were held still is done after so many looks, or somebody goes on writing.
const LAST_LOOKS: usize = 20;

/// One of them.
#[derive(Debug)]
struct Source<'a> {
    /// The driver, which has the log.
    device: &'a Device,
    sysroot: &'a Sysroot,
    disk: Disk,
    file: File,
    ledger: DiskLedger,
    /// All of it has been sent once.
    is_begun: bool,
}

/// The disks that go along.
#[derive(Debug, Default)]
pub struct Mirror<'a> {
    sources: Vec<Source<'a>>,
}

/// How a pass goes on.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// zstd's level.
    pub level: i32,
    /// How many threads read, hash and compress.
    pub workers: usize,
    /// Whether applications run.
    pub from: From,
    /// What the operator allows.
    pub limits: Limits,
}

impl<'a> Mirror<'a> {
    /// With these disks.
    ///
    /// # Errors
    /// If one of them cannot be mirrored.
    pub fn open(paths: &[PathBuf], device: &'a Device, sysroot: &'a Sysroot) -> Result<Self> {
        let mut sources: Vec<Source<'a>> = Vec::new();
        for path in paths {
            let refused = |why: String| {
                Error::new(Exit::Impossible, why).hint(
                    "--with-disk takes whole disks on SATA, SCSI, NVMe or virtio; what is made of them goes along with them",
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

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.disk.bytes).sum()
    }

    /// What the small system of the other end needs to remember of them, in MiB.
    #[must_use]
    pub fn memory_there(&self) -> u64 {
        memory(&self.sources.iter().map(|source| source.disk.bytes).collect::<Vec<_>>())
    }

    /// What goes with the offer: the disks, and which of these file systems are on them.
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

    /// All that is written to them is noted from here on.
    ///
    /// # Errors
    /// If the driver cannot do that.
    pub fn watch(&self) -> Result<()> {
        self.sources.iter().try_for_each(|source| {
            source
                .log()
                .begin()
                .map_err(|error| error.hint("--with-disk takes whole disks on SATA, SCSI, NVMe or virtio"))
        })
    }

    /// Nothing is noted any more.
    pub fn unwatch(&self) {
        for source in &self.sources {
            // Where there is no log, none ends.
            let _ = source.log().end();
        }
    }

    /// Sends of each disk what may not be as it was sent: all of it the first time. `watch` is told how far it is, in pages,
    /// and says whether to go on.
    ///
    /// # Errors
    /// If it came to no end.
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
                // The digest is short at the end.
                source.ledger.settle();
            }
        }
        total.took = begun.elapsed();
        Ok(total)
    }

    /// The last passes, when nobody may write any more: until nothing is in the logs.
    ///
    /// # Errors
    /// If it came to no end, or somebody goes on writing.
    pub fn finish(
        &mut self,
        how: &How,
        link: &mut Link,
        watch: &mut dyn FnMut(&Pass, &mut Link) -> bool,
    ) -> std::result::Result<Pass, Stopped> {
        let mut all = Pass::default();
        for _ in 0..LAST_LOOKS {
            let done = self.pass(how, link, watch)?;
            all.looked += done.looked;
            all.sent += done.sent;
            all.bytes += done.bytes;
            all.took += done.took;
            if done.looked == 0 {
                return Ok(all);
            }
        }
        Err(Stopped::Failed(not_still()))
    }

    /// Checks that what was sent last is what the disks hold: after the instant.
    ///
    /// # Errors
    /// If somebody has written, or a disk is not what it was.
    pub fn is_still(&self) -> Result<()> {
        for source in &self.sources {
            if !source.log().collect()?.is_empty() {
                return Err(not_still());
            }
            let disk = &source.disk;
            let now = Disk::find(&disk.path, source.sysroot);
            if now.as_ref() != Ok(disk) {
                let why = format!("{} is not the disk that it was any more", disk.path.display());
                return Err(Error::new(Exit::Failed, why)
                    .hint("leave the disks as they are while the machine moves, and try again"));
            }
        }
        Ok(())
    }

    /// What the disks are, in their order, as digits.
    #[must_use]
    pub fn digests(&mut self, attempt: Attempt) -> Vec<String> {
        self.sources.iter_mut().map(|source| source.ledger.digest(attempt).to_string()).collect()
    }

    /// Bytes of the chunks that were written to since the begin of the logs, or the last look.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn written(&self) -> Result<u64> {
        let bytes = |source: &Source<'_>| {
            let found = source.log().collect()?;
            Ok(found.iter().map(|chunk| source.ledger.place(*chunk).1 as u64).sum::<u64>())
        };
        self.sources.iter().map(bytes).sum()
    }
}

fn not_still() -> Error {
    Error::new(Exit::Failed, "a disk is written to although its file systems are held still")
        .hint("whatever writes to it past them (RAID, a virtual machine, dd) must stop; this machine runs on")
}

/// What goes out of a worker.
struct Record {
    packed: Vec<u8>,
    looked: u64,
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
            // Whoever still has something to send ends by that.
            drop(records);
            sent
        })
    }
}

/// Chunks of a disk that are to be looked at, by several threads.
struct Work<'a> {
    number: u32,
    disk: &'a Disk,
    file: &'a File,
    chunks: &'a [u64],
    next: AtomicUsize,
    ledger: Mutex<&'a mut DiskLedger>,
    /// Send a chunk as it is: for a sign of life.
    hurry: AtomicBool,
    stop: AtomicBool,
    level: i32,
}

impl<'a> Work<'a> {
    fn work(&self, out: &SyncSender<Result<Record>>) {
        let mut buffer = Buffer::new(CHUNKS_BYTES_MAX);
        let chunk = self.lock().place(0).1.max(1);
        // As many as fit one record.
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
        let mut record = Record { packed: Vec::new(), looked: at.div_ceil(PAGE) as u64, sent: 0, zeros: 0 };
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
            .hint("the machine has not moved, and runs on; is the disk still there?")
    }
}

/// Sends what the workers have made.
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
        total.looked += record.looked;
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
