//! The files of a host in use for the disks that come with a machine. A monitor shows their contents to the
//! machine later.

use super::disks::{Target, Targets};
use crate::migrate::{disk::Disk, offer::OfferedDisk};
use mercury_control::{error::Result, output::bytes};
use mercury_migration::{protocol::Attempt, wire::Chunks};
use rustix::{fs::FallocateFlags, io::Errno};
use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// Size that reads and writes past the kernel's cache have a multiple of, on all file systems.
const BLOCK: u64 = 4096;
/// Mode of a new file: the content of a machine's disk is for its owner alone.
const MODE: u32 = 0o600;

/// The contents of a machine's disks while they arrive. Files that were made for them go with this value,
/// unless they are kept.
#[derive(Debug)]
pub struct Files {
    targets: Targets,
    folder: PathBuf,
    /// The kernel's name of each disk, and its file.
    places: Vec<(String, PathBuf)>,
    made: Vec<PathBuf>,
}

impl Files {
    /// Makes a file for each disk, in a folder. A file that is there already must have the disk's size and
    /// hold nothing, and nobody else may write to it. It may be a link to a block device.
    ///
    /// # Errors
    ///
    /// Returns every reason why a disk has no place. The files that were made are gone then.
    pub fn make(folder: &Path, offered: &[OfferedDisk]) -> std::result::Result<Self, String> {
        // Before a size is believed.
        lack(folder, offered)?;
        let targets = Targets::opened(Vec::new());
        let mut files = Self { targets, folder: folder.to_owned(), places: Vec::new(), made: Vec::new() };
        let mut names = BTreeSet::new();
        let (mut reasons, mut open) = (Vec::new(), Vec::new());
        for OfferedDisk { disk, .. } in offered {
            let name = name_of(disk).filter(|name| names.insert(name.clone()));
            let opened = match name {
                Some(name) => files.open(folder, name, disk),
                None => Err("it has no name that a file could have, or was offered twice".into()),
            };
            match opened {
                Ok(target) => open.push(target),
                Err(why) => reasons.push(format!("its disk {} has no place: {why}", disk.path.display())),
            }
        }
        if !reasons.is_empty() {
            return Err(reasons.join("; "));
        }
        files.targets = Targets::opened(open);
        Ok(files)
    }

    fn open(&mut self, folder: &Path, name: String, disk: &Disk) -> std::result::Result<Target, String> {
        let path = folder.join(&name);
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(MODE);
        match options.clone().create_new(true).open(&path) {
            Ok(file) => {
                self.made.push(path.clone());
                reserve(&file, disk.bytes).map_err(failed)?;
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
        // Past the kernel's cache, where the file system can: nothing is left to be written when applications
        // stand still.
        let is_even = disk.bytes.is_multiple_of(BLOCK);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        let file = direct.ok().filter(|_| is_even).map_or_else(|| options.open(&path), Ok).map_err(failed)?;
        let here = Disk { path: path.clone(), ..disk.clone() };
        self.check(&here, &file)?;
        self.places.push((name, path));
        Ok(Target::new(here, file))
    }

    /// Refuses a file of another size, one that others may change, or one that holds data.
    fn check(&self, disk: &Disk, mut file: &File) -> std::result::Result<(), String> {
        let path = disk.path.display();
        let about = file.metadata().map_err(|error| format!("{path}: {error}"))?;
        if about.is_file() && !is_own(about.uid(), about.mode()) {
            return Err(format!(
                "{path} belongs to another user, or others may write to it: remove it, or change its mode"
            ));
        }
        let found = file.seek(SeekFrom::End(0)).map_err(|error| format!("{path}: {error}"))?;
        if found != disk.bytes {
            return Err(format!("{path} has {found} bytes, and the disk has {}", disk.bytes));
        }
        if self.made.contains(&disk.path) {
            return Ok(());
        }
        let is_empty = if about.is_file() { holds_nothing(file, &about) } else { disk.is_empty() };
        if !is_empty.map_err(|error| format!("{path}: {error}"))? {
            return Err(format!(
                "{path} holds data, perhaps of an arrival that was cut off: move it away, or remove it"
            ));
        }
        Ok(())
    }

    /// Returns the kernel's name of each disk at the source, and the file with its content.
    #[must_use]
    pub fn places(&self) -> &[(String, PathBuf)] {
        &self.places
    }

    /// Writes chunks.
    ///
    /// # Errors
    ///
    /// Returns an error if their disk was not offered, or cannot be written.
    pub fn write(&mut self, chunks: &Chunks) -> Result<()> {
        self.targets.write(chunks)
    }

    /// Begins to make what was written last, without waiting for the end.
    pub fn begin_sync(&mut self) {
        self.targets.begin_sync();
    }

    /// Checks if the files hold the data that was sent, and completes them.
    ///
    /// # Errors
    ///
    /// Returns the reason if they do not.
    pub fn complete(&mut self, offered: &[OfferedDisk], attempt: Attempt) -> std::result::Result<(), String> {
        self.targets.complete(offered, attempt)?;
        // The source ends when it hears of this. The names must then outlast a power cut like the content.
        let done = File::open(&self.folder).and_then(|folder| folder.sync_all());
        done.map_err(|error| format!("{}: {error}", self.folder.display()))
    }

    /// Keeps the files: the machine goes on with them.
    pub fn keep(mut self) {
        self.made.clear();
        self.targets = Targets::opened(Vec::new());
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.targets.release();
        for path in &self.made {
            if let Err(error) = fs::remove_file(path) {
                note!("mercury: {} could not be removed: {error}", path.display());
            }
        }
    }
}

/// Gives a new file its size, and reserves room for all of it where the file system can. Other files may take
/// all that is free while the machine runs.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)?;
    if bytes == 0 {
        return Ok(());
    }
    let reserved =
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes));
    match reserved {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        reserved => Ok(reserved?),
    }
}

/// Refuses disks for whose new files the folder has no room.
fn lack(folder: &Path, offered: &[OfferedDisk]) -> std::result::Result<(), String> {
    let disks = offered.iter().map(|offered| &offered.disk);
    let is_new = |disk: &&Disk| name_of(disk).is_some_and(|name| !folder.join(name).exists());
    let needed = disks.filter(is_new).map(|disk| disk.bytes).fold(0, u64::saturating_add);
    let found = rustix::fs::statvfs(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if needed <= free {
        return Ok(());
    }
    let (needed, free) = (bytes(needed), bytes(free));
    Err(format!("its disks have {needed}, and {} has {free} free", folder.display()))
}

/// Returns true if nothing was ever written to a file: also zeros are data.
fn holds_nothing(file: &File, about: &fs::Metadata) -> io::Result<bool> {
    if about.blocks() == 0 {
        return Ok(true);
    }
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)) {
        // The file has nothing but holes, and room that is reserved.
        Err(Errno::NXIO) => Ok(true),
        found => Ok(found.map(|_| false)?),
    }
}

/// Returns true if a file is this user's or root's, and nobody else may write to it.
fn is_own(owner: u32, mode: u32) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&owner) && mode & 0o022 == 0
}

/// Returns the kernel's name of a disk, in the characters that such names have.
fn name_of(disk: &Disk) -> Option<String> {
    let name = disk.path.file_name()?.to_str()?;
    let is_name = name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    is_name.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_migration::wire::{DiskLedger, hash_of_chunk};
    use std::os::unix::fs::PermissionsExt;

    const BYTES: u64 = 3 << 16;

    fn offered(path: &str, bytes: u64) -> OfferedDisk {
        let disk = Disk { place: path.into(), path: path.into(), bytes, sector: 512 };
        OfferedDisk { disk, ..OfferedDisk::default() }
    }

    fn refused(folder: &Path, disks: &[OfferedDisk]) -> String {
        Files::make(folder, disks).expect_err("refused")
    }

    /// A raw image may begin and end with zeros, and hold a file system in between.
    #[test]
    fn a_file_with_data_anywhere_is_not_overwritten() {
        use std::os::unix::fs::FileExt;
        const LARGE: u64 = 8 << 20;
        let folder = tempfile::tempdir().expect("a folder");
        let disks = [offered("/dev/nvme0n1", LARGE)];
        let file = File::create(folder.path().join("nvme0n1")).expect("a file");
        file.set_len(LARGE).expect("a size");
        drop(Files::make(folder.path(), &disks).expect("nothing is in it"));
        reserve(&file, LARGE).expect("reserved");
        drop(Files::make(folder.path(), &disks).expect("only room is in it"));
        file.write_all_at(b"data", 4 << 20).expect("written");
        let text = refused(folder.path(), &disks);
        assert!(text.contains("holds data") && text.contains("remove it"), "{text}");
        assert_eq!(names(folder.path()), 1);
    }

    fn names(folder: &Path) -> usize {
        fs::read_dir(folder).expect("a folder").count()
    }

    #[test]
    fn a_disk_arrives_in_a_file_that_stays_only_if_it_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let content = vec![7; BYTES as usize];
        let mut ledger = DiskLedger::new(BYTES);
        let mut chunks = Chunks::of(0);
        for (at, chunk) in (0..).step_by(1 << 16).zip(content.chunks(1 << 16)) {
            ledger.note(at, chunk.len(), hash_of_chunk(chunk)).expect("noted");
            chunks.add(at, chunk);
        }
        let attempt = Attempt([3; 16]);
        let mut last = vec![offered("/dev/nvme0n1", BYTES)];
        for is_kept in [false, true] {
            let mut files = Files::make(folder.path(), &last).expect("files");
            let file = folder.path().join("nvme0n1");
            assert_eq!(files.places(), [("nvme0n1".to_owned(), file.clone())]);
            files.write(&chunks).expect("written");
            assert!(files.complete(&last, attempt).is_err(), "no digest");
            drop(files);
            assert_eq!(names(folder.path()), 0);
            last[0].digest = ledger.digest(attempt).to_string();
            let mut files = Files::make(folder.path(), &last).expect("files");
            files.write(&chunks).expect("written");
            assert_eq!(files.complete(&last, attempt), Ok(()));
            if is_kept {
                files.keep()
            } else {
                drop(files)
            }
            assert_eq!(fs::read(&file).ok(), is_kept.then(|| content.clone()));
            last[0].digest.clear();
        }
        let text = refused(folder.path(), &last);
        assert!(text.contains("nvme0n1 holds data"), "{text}");
    }

    #[test]
    fn a_new_file_has_room_for_all_of_its_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let probe = tempfile::tempfile_in(folder.path()).expect("a file");
        let files = Files::make(folder.path(), &[offered("/dev/sda", BYTES)]).expect("files");
        let about = fs::metadata(folder.path().join("sda")).expect("a file");
        // The unit of `blocks` is 512 bytes on all file systems.
        if rustix::fs::fallocate(&probe, FallocateFlags::empty(), 0, BYTES).is_ok() {
            assert!(about.blocks() * 512 >= BYTES, "{} blocks", about.blocks());
        }
        assert_eq!(about.len(), BYTES);
        drop(files);
        reserve(&probe, 0).expect("an empty disk needs no room");
    }

    #[test]
    fn a_file_of_the_operator_s_stays_and_must_fit() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("sda");
        existing(&file, 0o644);
        drop(Files::make(folder.path(), &[offered("/dev/sda", BYTES)]).expect("files"));
        assert_eq!(names(folder.path()), 1);
        let text = refused(folder.path(), &[offered("/dev/sda", BYTES + 512), offered("/dev/sdb", BYTES)]);
        assert!(text.contains("/dev/sda has no place") && text.contains("196608 bytes"), "{text}");
        assert_eq!(names(folder.path()), 1, "the other file is gone again");
    }

    fn existing(path: &Path, mode: u32) {
        File::create(path).and_then(|made| made.set_len(BYTES)).expect("a file");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
    }

    #[test]
    fn nobody_else_reads_a_new_file_or_writes_to_one_that_is_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let umask = rustix::process::umask(rustix::fs::Mode::empty());
        let files = Files::make(folder.path(), &[offered("/dev/sda", BYTES)]);
        rustix::process::umask(umask);
        let mode = fs::metadata(folder.path().join("sda")).expect("a file").mode();
        assert_eq!(mode & 0o7777, 0o600);
        drop(files.expect("files"));
        for (mode, is_fine) in [(0o666, false), (0o620, false), (0o602, false), (0o600, true)] {
            existing(&folder.path().join("sda"), mode);
            let made = Files::make(folder.path(), &[offered("/dev/sda", BYTES)]);
            assert_eq!(made.is_ok(), is_fine, "{mode:o}");
            assert!(made.err().is_none_or(|why| why.contains("others may write to it")), "{mode:o}");
        }
        let own = rustix::process::geteuid().as_raw();
        assert!(is_own(own, 0o644) && is_own(0, 0o600) && !is_own(own + 1, 0o600));
    }

    #[test]
    fn names_that_could_leave_the_folder_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        for path in ["/dev/..", "", "/dev/.x", "/dev/a b", "/dev/Sda"] {
            let text = refused(folder.path(), &[offered(path, BYTES)]);
            assert!(text.contains("has no name"), "{path}: {text}");
        }
        let twice = refused(folder.path(), &[offered("/dev/sda", BYTES), offered("/dev/sda", BYTES)]);
        assert!(twice.contains("was offered twice"), "{twice}");
        let large = refused(folder.path(), &[offered("/dev/sda", 1 << 62)]);
        assert!(large.contains("free"), "{large}");
        assert_eq!(names(folder.path()), 0);
    }
}
