//! The disks that a machine may bring: the disks of this machine that are given for them, and the
//! writes to them.
//!
//! Each disk of the source is written to the disk at the same place here. Its first chunk is
//! written last, when the rest is complete and correct. Until then zeros are in its place, so that
//! no system takes an incomplete disk for a good one.

use crate::migrate::{
    disk::{Buffer, Disk, reread_partitions},
    offer::OfferedDisk,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::bytes,
    sysroot::Sysroot,
};
use mercury_migration::{
    protocol::Attempt,
    wire::{CHUNKS_BYTES_MAX, Chunk, Chunks, DiskLedger, hash_of_chunk},
};
use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Time for a disk to appear in the restore environment.
const PATIENCE: Duration = Duration::from_secs(10);

/// Checks the given disks, and says what will be overwritten.
///
/// # Errors
///
/// Returns an error if a path is no suitable disk, or if it is in use and the operator has not
/// forced it.
pub fn give(paths: &[PathBuf], force: bool, sysroot: &Sysroot) -> Result<Vec<Disk>> {
    let mut given: Vec<Disk> = Vec::new();
    for path in paths {
        let refused = |why: String| Error::new(Exit::Impossible, why).hint("nothing was changed");
        let disk = Disk::find(path, sysroot).map_err(refused)?;
        if given.iter().any(|other| other.place == disk.place) {
            return Err(refused(format!("{} is named twice", path.display())));
        }
        let uses = disk.uses(sysroot).map_err(|error| refused(format!("{}: {error}", path.display())))?;
        if !uses.is_empty() && !force {
            let text = format!("{} would be overwritten: {}", path.display(), uses.join("; "));
            return Err(Error::new(Exit::Impossible, text)
                .hint("nothing was changed; --force-disk gives the disk anyway, and its contents are lost"));
        }
        let what = if uses.is_empty() { "it is empty".into() } else { uses.join("; ") };
        eprintln!(
            "a machine that arrives may overwrite {} ({}, at {}), all of it: {what}",
            disk.path.display(),
            bytes(disk.bytes),
            disk.place
        );
        given.push(disk);
    }
    Ok(given)
}

/// A disk that is written.
#[derive(Debug)]
pub(super) struct Target {
    disk: Disk,
    /// Shared with the thread that makes writes last.
    file: Arc<File>,
    ledger: DiskLedger,
    /// The first chunk, which is held back.
    first: Option<Vec<u8>>,
    /// True if the disk was written to.
    is_touched: bool,
}

/// The given disks, and the state of those that are written.
#[derive(Debug)]
pub struct Targets {
    given: Vec<Disk>,
    open: Vec<Target>,
    buffer: Buffer,
    sync: Sync,
}

/// The thread that makes writes last while more arrive, and what it has found. The kernel reports an error to
/// one caller alone, so the error is kept.
#[derive(Debug, Default)]
struct Sync {
    thread: Option<JoinHandle<io::Result<()>>>,
    error: Option<io::Error>,
}

impl Sync {
    /// Syncs files in a thread. Does nothing while an earlier thread is at work: the next call is for what
    /// arrives meanwhile. Without a thread, all is left to be done at the end.
    fn begin(&mut self, files: Vec<Arc<File>>) {
        if self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return;
        }
        self.wait();
        let sync = move || files.iter().try_for_each(|file| file.sync_data());
        self.thread = thread::Builder::new().name("sync".into()).spawn(sync).ok();
    }

    /// Waits for the thread's end.
    fn wait(&mut self) {
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(error)) = ended.map(|ended| ended.unwrap_or_else(|_| Err(failed_thread()))) {
            self.error.get_or_insert(error);
        }
    }

    /// Refuses more work after an error.
    fn refuse_failed(&mut self) -> std::result::Result<(), String> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.wait();
        }
        match &self.error {
            Some(error) => Err(format!("a disk of this machine does not take what has arrived: {error}")),
            None => Ok(()),
        }
    }
}

fn failed_thread() -> io::Error {
    io::Error::other("the thread that syncs has failed: this is a bug")
}

impl Targets {
    /// Makes the targets of these disks.
    #[must_use]
    pub fn new(given: Vec<Disk>) -> Self {
        Self { given, open: Vec::new(), buffer: Buffer::new(CHUNKS_BYTES_MAX), sync: Sync::default() }
    }

    /// Makes the targets of an offer, which are open already.
    pub(super) fn opened(open: Vec<Target>) -> Self {
        Self { open, ..Self::new(Vec::new()) }
    }

    /// Checks if the offered disks fit; nothing is written yet.
    ///
    /// # Errors
    ///
    /// Returns every reason why they do not.
    pub fn prepare(&mut self, offered: &[OfferedDisk], sysroot: &Sysroot) -> Result<(), Vec<String>> {
        self.open.clear();
        self.sync = Sync::default();
        let mut reasons = Vec::new();
        for OfferedDisk { disk, .. } in offered {
            match self.open_for(disk, sysroot) {
                Ok(target) if self.open.iter().any(|other| other.disk.place == target.disk.place) => {
                    reasons.push(format!("{} was offered twice", disk.path.display()));
                }
                Ok(target) => self.open.push(target),
                Err(why) => reasons.push(format!("its disk {} has no place: {why}", disk.path.display())),
            }
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }

    fn open_for(&self, wanted: &Disk, sysroot: &Sysroot) -> Result<Target, String> {
        let given = self.given.iter().find(|given| given.place == wanted.place).ok_or_else(|| {
            format!("`mercury receive --disk` gave none at {}, the place of the source's disk", wanted.place)
        })?;
        if (given.bytes, given.sector) != (wanted.bytes, wanted.sector) {
            return Err(format!(
                "{} has {} bytes in sectors of {}, it has {} in sectors of {}",
                given.path.display(),
                given.bytes,
                given.sector,
                wanted.bytes,
                wanted.sector
            ));
        }
        let end = Instant::now() + PATIENCE;
        let here = loop {
            match Disk::at_place(&given.place, sysroot) {
                Some(disk) if disk.bytes > 0 => break disk,
                _ if Instant::now() > end => return Err(format!("there is no disk at {}", given.place)),
                _ => thread::sleep(Duration::from_millis(100)),
            }
        };
        if (here.bytes, here.sector) != (given.bytes, given.sector) {
            return Err(format!("the disk at {} is not the one that was given", given.place));
        }
        let file = here.open(true).map_err(|error| format!("{}: {error}", here.path.display()))?;
        Ok(Target::new(here, file))
    }

    /// Writes chunks, and records the hashes of the data then on disk.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk was not offered, or cannot be written.
    pub fn write(&mut self, chunks: &Chunks) -> Result<()> {
        let failed = |why: String| Error::fault(why);
        self.sync.refuse_failed().map_err(|why| {
            Error::new(Exit::Failed, why)
                .hint("replace the disk, or give the machine another one with --disk")
        })?;
        let target = self.open.get_mut(chunks.disk as usize);
        let target =
            target.ok_or_else(|| failed("a chunk of a disk that was not offered has arrived".into()))?;
        for chunk in chunks.iter() {
            target.put(&chunk, &mut self.buffer).map_err(|error| {
                failed(format!("{} at byte {}: {error}", target.disk.path.display(), chunk.offset))
            })?;
        }
        Ok(())
    }

    /// Begins to make what was written last, in the background.
    pub fn begin_sync(&mut self) {
        let touched = self.open.iter().filter(|target| target.is_touched);
        self.sync.begin(touched.map(|target| Arc::clone(&target.file)).collect());
    }

    /// Checks if all disks hold the data that was sent, and completes them.
    ///
    /// # Errors
    ///
    /// Returns the reason if they do not.
    pub fn complete(&mut self, offered: &[OfferedDisk], attempt: Attempt) -> Result<(), String> {
        if offered.len() != self.open.len() {
            return Err("these are other disks than those that were offered".into());
        }
        self.sync.wait();
        self.sync.refuse_failed()?;
        for (target, OfferedDisk { digest, disk, .. }) in self.open.iter_mut().zip(offered) {
            let name = disk.path.display();
            if target.disk.place != disk.place || target.disk.bytes != disk.bytes {
                return Err(format!("{name} is another disk than the offered one"));
            }
            if !target.ledger.is_complete() {
                return Err(format!("the disk {name} has not arrived completely"));
            }
            target
                .put_first(&mut self.buffer)
                .map_err(|error| format!("{}: {error}", target.disk.path.display()))?;
            if target.ledger.digest(attempt).to_string() != *digest {
                return Err(format!("the disk {name} differs from the data that was sent"));
            }
            reread_partitions(&target.file);
        }
        Ok(())
    }

    /// Forgets the data that has arrived, and clears the beginning of each disk that was written,
    /// so that no system takes it for a good one.
    pub fn release(&mut self) {
        for mut target in std::mem::take(&mut self.open) {
            if target.is_touched {
                let cleared = target.clear_first(&mut self.buffer).and_then(|()| target.file.sync_data());
                let how = match cleared {
                    Ok(()) => "its beginning is zeros now".into(),
                    Err(error) => format!("its beginning could not be cleared ({error}): do not use it"),
                };
                eprintln!(
                    "mercury: {} holds a part of a machine that did not arrive completely; {how}",
                    target.disk.path.display()
                );
                reread_partitions(&target.file);
            }
        }
    }
}

impl Target {
    /// Takes the open file of a disk that has nothing on it.
    pub(super) fn new(disk: Disk, file: File) -> Self {
        let ledger = DiskLedger::new(disk.bytes);
        Self { disk, file: Arc::new(file), ledger, first: None, is_touched: false }
    }

    fn put(&mut self, chunk: &Chunk<'_>, buffer: &mut Buffer) -> io::Result<()> {
        if !self.ledger.contains(chunk.offset, chunk.length) {
            return Err(io::Error::other("the chunk is not on the disk that was offered"));
        }
        if !self.is_touched {
            self.is_touched = true;
            self.clear_first(buffer)?;
        }
        if chunk.offset == 0 {
            let data = chunk.data.map_or_else(|| vec![0; chunk.length], <[u8]>::to_vec);
            self.note(0, &data)?;
            self.first = Some(data);
            return Ok(());
        }
        let room = &mut buffer.bytes()[..chunk.length];
        if chunk.data.is_none() {
            // Zeros need not be written to an empty disk.
            self.file.read_exact_at(room, chunk.offset)?;
            if room.iter().all(|byte| *byte == 0) {
                return self.note(chunk.offset, room);
            }
        }
        self.write(chunk.offset, chunk.data, room)
    }

    /// Writes a chunk, and records the hash of the data that can be read there then.
    fn write(&mut self, offset: u64, data: Option<&[u8]>, room: &mut [u8]) -> io::Result<()> {
        match data {
            Some(data) => room.copy_from_slice(data),
            None => room.fill(0),
        }
        self.file.write_all_at(room, offset)?;
        self.file.read_exact_at(room, offset)?;
        self.note(offset, room)
    }

    fn note(&mut self, offset: u64, found: &[u8]) -> io::Result<()> {
        self.ledger.note(offset, found.len(), hash_of_chunk(found)).map(drop).map_err(io::Error::other)
    }

    fn clear_first(&mut self, buffer: &mut Buffer) -> io::Result<()> {
        let room = &mut buffer.bytes()[..self.ledger.place(0).1];
        room.fill(0);
        self.file.write_all_at(room, 0)
    }

    /// Writes the first chunk, when the rest is on the disk.
    fn put_first(&mut self, buffer: &mut Buffer) -> io::Result<()> {
        self.file.sync_data()?;
        let first = self.first.take().ok_or_else(|| io::Error::other("its beginning has not arrived"))?;
        self.write(0, Some(&first), &mut buffer.bytes()[..first.len()])?;
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    const CHUNK: usize = 1 << 16;

    /// Makes targets of a file in place of a disk, with data in it.
    fn targets(folder: &std::path::Path) -> Targets {
        let disk = Disk {
            place: "here".into(),
            path: folder.join("disk"),
            bytes: 2 * CHUNK as u64 + 512,
            sector: 512,
        };
        std::fs::write(&disk.path, vec![7; 2 * CHUNK + 512]).expect("a file");
        let file = OpenOptions::new().read(true).write(true).open(&disk.path).expect("a file");
        let target = Target::new(disk.clone(), file);
        Targets { given: vec![disk], ..Targets::opened(vec![target]) }
    }

    fn chunks(of: &[(u64, &[u8])]) -> Chunks {
        let mut chunks = Chunks::of(0);
        for (offset, bytes) in of {
            chunks.add(*offset, bytes);
        }
        chunks
    }

    fn offered(targets: &Targets, digest: &str) -> Vec<OfferedDisk> {
        vec![OfferedDisk { disk: targets.given[0].clone(), digest: digest.into(), ..OfferedDisk::default() }]
    }

    /// Returns the digest that a source sends for a disk with this content.
    fn digest(bytes: &[u8]) -> String {
        let mut ledger = DiskLedger::new(bytes.len() as u64);
        for (number, chunk) in (0..).zip(bytes.chunks(CHUNK)) {
            ledger.note(number * CHUNK as u64, chunk.len(), hash_of_chunk(chunk)).expect("noted");
        }
        ledger.digest(Attempt([1; 16])).to_string()
    }

    #[test]
    fn a_disk_is_complete_when_all_of_it_is_right() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut targets = targets(folder.path());
        let found = || std::fs::read(folder.path().join("disk")).expect("a file");
        let mut wanted = vec![1; 2 * CHUNK + 512];
        wanted[CHUNK..2 * CHUNK].fill(0);
        wanted[2 * CHUNK..].fill(3);
        let is_complete = |targets: &mut Targets, digest: &str| {
            let offered = offered(targets, digest);
            targets.complete(&offered, Attempt([1; 16]))
        };
        targets.write(&chunks(&[(0, &[9; CHUNK])])).expect("written");
        targets.write(&chunks(&[(2 * CHUNK as u64, &[3; 512]), (0, &[1; CHUNK])])).expect("written");
        let why = is_complete(&mut targets, &digest(&wanted)).expect_err("a chunk is missing");
        assert!(why.contains("has not arrived completely"), "{why}");
        targets.write(&chunks(&[(CHUNK as u64, &[0; CHUNK])])).expect("written");
        // No system takes the disk for a good one yet.
        assert_eq!(found()[..CHUNK], [0; CHUNK]);
        assert_eq!(is_complete(&mut targets, &digest(&wanted)), Ok(()));
        assert_eq!(found(), wanted);
        targets.release();
        assert_eq!(found()[..CHUNK], [0; CHUNK]);
    }

    /// Writes are made to last while more arrive. An error that the kernel reports to that thread alone ends
    /// the arrival.
    #[test]
    fn writes_last_early_and_their_loss_is_not_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut all = targets(folder.path());
        all.begin_sync();
        assert_eq!(all.sync.refuse_failed(), Ok(()), "nothing was written");
        all.write(&chunks(&[(0, &[1; CHUNK]), (CHUNK as u64, &[1; CHUNK])])).expect("written");
        all.begin_sync();
        all.write(&chunks(&[(2 * CHUNK as u64, &[1; 512])])).expect("written");
        let offered = offered(&all, &digest(&vec![1; 2 * CHUNK + 512]));
        assert_eq!(all.complete(&offered, Attempt([1; 16])), Ok(()));

        let mut all = targets(folder.path());
        all.write(&chunks(&[(0, &[1; CHUNK]), (CHUNK as u64, &[1; CHUNK])])).expect("written");
        // A file that cannot be synced stands in for a disk that loses what was written.
        let (end, _other) = io::pipe().expect("a pipe");
        all.sync.begin(vec![Arc::new(File::from(std::os::fd::OwnedFd::from(end)))]);
        all.sync.wait();
        let error = all.write(&chunks(&[(2 * CHUNK as u64, &[1; 512])])).expect_err("refused");
        assert!(error.message.contains("does not take what has arrived"), "{error}");
        all.begin_sync();
        let why = all.complete(&offered, Attempt([1; 16])).expect_err("refused");
        assert!(why.contains("does not take what has arrived"), "{why}");
    }

    #[test]
    fn chunks_outside_the_disk_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut targets = targets(folder.path());
        for wrong in
            [chunks(&[(3 * CHUNK as u64, &[1; 512])]), chunks(&[(512, &[1; 512])]), chunks(&[(0, &[1; 512])])]
        {
            assert!(targets.write(&wrong).is_err());
        }
        let mut other = chunks(&[(0, &[1; CHUNK])]);
        other.disk = 1;
        assert!(targets.write(&other).is_err());
        assert_eq!(std::fs::read(folder.path().join("disk")).expect("a file"), vec![7; 2 * CHUNK + 512]);
        // A disk that was not written to keeps its contents.
        targets.release();
        assert_eq!(std::fs::read(folder.path().join("disk")).expect("a file"), vec![7; 2 * CHUNK + 512]);
    }

    #[test]
    fn another_disk_is_told_from_this_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut targets = targets(folder.path());
        targets.write(&chunks(&[(0, &[1; CHUNK]), (CHUNK as u64, &[2; CHUNK])])).expect("written");
        targets.write(&chunks(&[(2 * CHUNK as u64, &[2; 512])])).expect("written");
        let offered = offered(&targets, &digest(&vec![2; 2 * CHUNK + 512]));
        let why = targets.complete(&offered, Attempt([1; 16])).expect_err("another one");
        assert!(why.ends_with("differs from the data that was sent"), "{why}");
        assert!(targets.complete(&[], Attempt([1; 16])).is_err());
    }
}
