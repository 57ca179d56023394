//! File systems on block devices: they are frozen for the instant, and get a fingerprint, so that a
//! restore can tell if they have changed.
//!
//! Memory must never be restored beside a disk that has changed since. A frozen file system has
//! written everything to its device. Each later write changes a few known blocks, whose hash is the
//! fingerprint.

use super::{
    block_devices::{
        self, ReadAt, begins_with_its_disk, device_file, head, is_composed, read, read_exactly, readable,
    },
    claims,
    file_systems::Kind,
    layers,
    mounts::{self, Mounted, Table, has_own_numbers, holder, mount, mounted},
    patient::{self, Disk, Progress},
    reachable,
};
use crate::undo::{Undo, UndoProcess};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_image::{DiskPart, FileSystem, Piece};
use std::{
    collections::BTreeSet,
    fs::File,
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

/// Alignment of a file system's structures.
const SECTOR: u64 = 512;
/// Bytes at the beginning of a device that identify its contents.
const BEGINNING: usize = 128 << 10;
/// Time for a file system to freeze. Little is left to be written then, and everything stands
/// still.
const FREEZE_PATIENCE: Duration = Duration::from_secs(15);
/// Time for which a device may do nothing while its file system waits for it.
const SYNC_PATIENCE: Duration = Duration::from_secs(30);

/// Lists all file systems on disks. Refuses a machine with others that cannot be frozen, because
/// only other mount namespaces have them (containers, services with mounts of their own), or no
/// mount table at all ([`claims`]).
///
/// # Errors
///
/// Returns an error that names those.
pub fn all(sysroot: &Sysroot) -> Result<Vec<Mounted>> {
    let mounts = mounted(sysroot)?;
    let found = elsewhere(&mounts, sysroot);
    if found.is_empty() {
        claims::refuse(&mounts, sysroot)?;
        return Ok(mounts);
    }
    let text =
        format!("file systems are mounted where this command cannot hold them still: {}", found.join(", "));
    Err(Error::coded(Code::DisksUnheld, text)
        .hint("stop those processes, or mount the file systems in the system's own namespace as well"))
}

/// Returns the file systems on disks that do not move with the machine ([`reachable::goes_along`]).
/// At the destination they must be present and unchanged.
#[must_use]
pub fn to_be_compared(mounts: &[Mounted], sysroot: &Sysroot) -> Vec<Mounted> {
    // btrfs may use more devices than the mounted one.
    let stays =
        |mount: &&Mounted| has_own_numbers(&mount.kind) || !reachable::goes_along(&mount.device, sysroot);
    mounts.iter().filter(stays).cloned().collect()
}

/// Refuses if mounts have changed.
///
/// # Errors
///
/// Returns an error if they have.
pub fn are_still(mounts: &[Mounted], sysroot: &Sysroot) -> Result<()> {
    let now = all(sysroot)?;
    let numbers =
        |mounts: &[Mounted]| mounts.iter().map(|mount| mount.number.clone()).collect::<BTreeSet<_>>();
    if numbers(mounts) == numbers(&now) {
        return Ok(());
    }
    Err(Error::new(Exit::Failed, "a file system was mounted or unmounted meanwhile").hint("try again"))
}

/// Lists disks that only other mount namespaces have, such as "/data (/dev/sdb1) of process 77".
fn elsewhere(mounts: &[Mounted], sysroot: &Sysroot) -> Vec<String> {
    let mut numbers: BTreeSet<_> = mounts.iter().map(|mount| mount.number.clone()).collect();
    let mut found = Vec::new();
    for Table { who, text } in mounts::tables(sysroot) {
        let Some(who) = who else { continue };
        for mount in text.lines().filter_map(mount) {
            if numbers.insert(mount.number.clone()) {
                found.push(format!("{} ({}) of {who}", mount.at.display(), mount.device.display()));
            }
        }
    }
    found
}

/// File systems that are frozen until this is dropped.
#[derive(Debug, Default)]
pub struct Still {
    held: Vec<Root>,
}

/// A frozen file system.
#[derive(Debug)]
struct Root {
    folder: File,
    at: PathBuf,
    /// True if its first write after the thaw may leave the fingerprint unchanged for a while.
    is_lazy: bool,
}

impl Still {
    /// Freezes the writable file systems, in reverse order of mounting; the undo process thaws them
    /// if this process does not.
    ///
    /// # Errors
    ///
    /// Returns an error if one cannot be frozen; those that were are thawed again.
    pub fn hold(mounts: &[Mounted], guard: &mut UndoProcess) -> Result<Self> {
        let mut still = Self::default();
        for mount in mounts.iter().filter(|mount| mount.writable).rev() {
            let named = |error: io::Error| {
                let text =
                    format!("the file system at {} could not be held still: {error}", mount.at.display());
                Error::new(Exit::Failed, text).hint("unmount it, or mount it read-only")
            };
            if mount.kind == "fuseblk" {
                return Err(named(io::Error::other("its server is a process that stands still itself")));
            }
            let file = File::open(&mount.at).map_err(named)?;
            let found = Found::at(&file).map_err(named)?;
            if found.covers(mount) {
                return Err(named(io::Error::other("another file system is mounted over it")));
            }
            guard.will(&Undo::Thaw(mount.at.clone())).map_err(named)?;
            match freeze(&file) {
                // Some types cannot be frozen, such as that of the firmware's variables.
                // Applications that might write there stand still.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    patient::sync(&mount.at, |elapsed| elapsed < FREEZE_PATIENCE).map_err(named)?;
                }
                result => {
                    result.map_err(named)?;
                    still.held.push(Root {
                        folder: file,
                        at: mount.at.clone(),
                        is_lazy: Kind::of(&mount.kind).is_some_and(Kind::is_lazy),
                    });
                }
            }
        }
        Ok(still)
    }
}

/// The file system to which a mount point leads.
#[derive(Clone, Copy, Debug)]
struct Found {
    /// Number of the device, as stat(2) returns it.
    device: u64,
    is_btrfs: bool,
}

impl Found {
    fn at(folder: &File) -> io::Result<Self> {
        let is_btrfs = rustix::fs::fstatfs(folder)?.f_type == libc::BTRFS_SUPER_MAGIC;
        Ok(Self { device: folder.metadata()?.dev(), is_btrfs })
    }

    /// Returns true if this is another file system than the mounted one, and covers it. Volumes of btrfs
    /// have numbers of their own, so another btrfs is not noticed.
    fn covers(self, mount: &Mounted) -> bool {
        let number = format!("{}:{}", libc::major(self.device), libc::minor(self.device));
        if has_own_numbers(&mount.kind) { !self.is_btrfs } else { mount.number != number }
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        while let Some(root) = self.held.pop() {
            let wakes = patient::thaw(root.folder.as_fd(), FITHAW, root.first_write(), FREEZE_PATIENCE);
            // Of the write other errors do not matter: other writes fail, too.
            if wakes.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
                eprintln!(
                    "mercury: the disk of {} does not answer: the file system stands still until it does",
                    root.at.display()
                );
            }
        }
    }
}

impl Root {
    /// Returns times for a first, unimportant write after the thaw, by which the fingerprint changes before
    /// any other program writes. `None`: any write changes it.
    fn first_write(&self) -> Option<[libc::timespec; 2]> {
        let metadata = self.folder.metadata().ok().filter(|_| self.is_lazy)?;
        let stays = libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT };
        Some([stays, libc::timespec { tv_sec: metadata.mtime(), tv_nsec: metadata.mtime_nsec() }])
    }
}

/// Describes a file system for an image, as it is now.
#[must_use]
pub fn describe(mount: &Mounted) -> FileSystem {
    let named = name(mount);
    let fingerprint = fingerprint_named(&named).ok();
    FileSystem { frozen: mount.writable, fingerprint, ..named }
}

/// Describes all of them at the same time.
#[must_use]
pub fn describe_all(mounts: &[Mounted]) -> Vec<FileSystem> {
    std::thread::scope(|scope| {
        let all: Vec<_> = mounts.iter().map(|mount| scope.spawn(|| describe(mount))).collect();
        let joined = all.into_iter().map(|one| one.join());
        joined.map(|one| one.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

fn fingerprint_named(named: &FileSystem) -> std::result::Result<String, String> {
    if named.pieces.is_empty() {
        return fingerprint(Path::new(&named.device), &named.kind).map_err(|error| error.to_string());
    }
    fingerprint_of(&named.pieces, &Sysroot::default())
}

/// Refuses file systems that were described without a fingerprint, because a restore would always
/// refuse them.
///
/// # Errors
///
/// Returns an error that names the first of them, and the reason.
pub fn refuse_without_fingerprint(described: &[FileSystem]) -> Result<()> {
    let Some(without) = described.iter().find(|one| one.fingerprint.is_none()) else { return Ok(()) };
    let why = fingerprint_named(without).err().map(|why| format!(": {why}")).unwrap_or_default();
    let FileSystem { kind, mounted_at, device, .. } = without;
    let text = format!(
        "the {kind} file system of {mounted_at} ({device}) has no fingerprint, so that a restore could \
         not tell if it has changed{why}"
    );
    Err(Error::coded(Code::DisksUncomparable, text))
}

/// Writes all data of a file's file system to its final place. Boot loaders read it there without
/// replaying the journal.
///
/// # Errors
///
/// Returns an error if that fails.
pub fn settle(path: &Path, sysroot: &Sysroot) -> Result<()> {
    let mounts = mounted(sysroot)?;
    let named = |error: io::Error| {
        Error::new(
            Exit::Failed,
            format!("the file system of {} could not be settled: {error}", path.display()),
        )
        .hint("unmount it, or restart the machine in an orderly way, before you rely on the boot menu")
    };
    match holder(&mounts, path, sysroot) {
        Some(mount) => sync_one(mount, sysroot)?,
        None => patient::sync(path, |elapsed| elapsed < SYNC_PATIENCE).map_err(named)?,
    }
    let needs_freeze = |mount: &&Mounted| Kind::of(&mount.kind).is_some_and(Kind::empties_log_in_freeze);
    let held = holder(&mounts, path, sysroot).filter(needs_freeze);
    if let Some(mount) = held {
        let mut guard = UndoProcess::start()?;
        drop(Still::hold(std::slice::from_ref(mount), &mut guard)?);
    }
    Ok(())
}

const FIFREEZE: libc::c_ulong = 0xC004_5877;
const FITHAW: libc::c_ulong = 0xC004_5878;

/// Freezes a file system, or gives up. A freeze that succeeds later, when its device answers again,
/// is undone.
fn freeze(file: &File) -> io::Result<()> {
    patient::ioctl(file.as_fd(), FIFREEZE, FITHAW, FREEZE_PATIENCE)
}

/// Writes cached data of file systems to their devices while everything runs, so that little is
/// left when everything stands still. All file systems at the same time.
///
/// # Errors
///
/// Returns an error that names one that makes no progress.
pub fn sync(mounts: &[Mounted], sysroot: &Sysroot) -> Result<()> {
    std::thread::scope(|scope| {
        let writable = mounts.iter().filter(|mount| mount.writable);
        let all: Vec<_> = writable.map(|mount| scope.spawn(|| sync_one(mount, sysroot))).collect();
        let mut joined = all.into_iter().map(|one| one.join());
        joined.try_for_each(|one| one.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Writes back one file system. The amount of data is unknown, so progress means that the device
/// has finished a request lately.
fn sync_one(mount: &Mounted, sysroot: &Sysroot) -> Result<()> {
    let device = std::fs::metadata(&mount.device).map(|found| found.rdev()).unwrap_or(0);
    let mut disk = Progress::of(device);
    let get_on = |elapsed: Duration| disk.goes_on(elapsed, SYNC_PATIENCE, sysroot);
    patient::sync(&mount.at, get_on).map_err(|error| {
        let (at, device) = (mount.at.display(), mount.device.display());
        Error::new(Exit::Failed, format!("the file system at {at} ({device}) could not be written: {error}"))
            .hint(
                "nothing was changed; make its disk answer again, or unmount it (umount -f -l), and try \
                again",
            )
    })
}

/// Describes a file system without its fingerprint, which exists only during a freeze.
#[must_use]
pub fn name(mount: &Mounted) -> FileSystem {
    FileSystem {
        mounted_at: mount.at.to_string_lossy().into_owned(),
        kind: mount.kind.clone(),
        device: mount.device.to_string_lossy().into_owned(),
        uuid: identity(&mount.device, &mount.kind).unwrap_or_default(),
        frozen: false,
        fingerprint: None,
        pieces: pieces(mount, &Sysroot::default()).unwrap_or_default(),
        place: block_devices::place(&mount.device, &Sysroot::default()),
        goes_along: reachable::goes_along(&mount.device, &Sysroot::default()),
    }
}

/// Thaws a file system, by an open file on it.
///
/// # Errors
///
/// Returns an error if it is not frozen.
pub fn thaw(file: &File) -> io::Result<()> {
    ask(file, FITHAW)
}

fn ask(file: &File, request: libc::c_ulong) -> io::Result<()> {
    // SAFETY: both requests ignore their argument and touch no memory of this process.
    let result = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(file), request, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the identity of a file system in hexadecimal digits; `None` if its type has no known
/// identity, or its device cannot be read.
///
/// # Errors
///
/// Returns an error if the device does not answer.
fn identity(device: &Path, kind: &str) -> std::result::Result<Option<String>, String> {
    Ok(head(device, BEGINNING)?.and_then(|first| Kind::of(kind)?.identity_in(&first)))
}

/// Finds the device of an image's file system now: devices have other names after each boot.
///
/// # Errors
///
/// Returns an error if it is nowhere, or several devices have its identity.
pub fn find(file_system: &FileSystem, sysroot: &Sysroot) -> std::result::Result<PathBuf, String> {
    if file_system.uuid.is_none() {
        return Err("it has no known identity".into());
    }
    only(claimants(file_system, sysroot)?)
}

/// Lists devices with this file system's identity.
///
/// # Errors
///
/// Returns an error that names a device that does not answer: it might be one of them.
fn claimants(file_system: &FileSystem, sysroot: &Sysroot) -> std::result::Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for name in readable(sysroot) {
        let device = device_file(&name);
        if !begins_with_its_disk(&name, sysroot) && identity(&device, &file_system.kind)? == file_system.uuid
        {
            found.push(device);
        }
    }
    Ok(found)
}

fn only(found: Vec<PathBuf>) -> std::result::Result<PathBuf, String> {
    match &found[..] {
        [] => Err("no disk here has it".into()),
        [device] => Ok(device.clone()),
        several => Err(format!("{} disks have its identity", several.len())),
    }
}

/// Returns the fingerprint: the hash of all ranges that change on a device with each write to its
/// file system.
///
/// # Errors
///
/// Returns an error if the device cannot be read.
pub fn fingerprint(device: &Path, kind: &str) -> io::Result<String> {
    fingerprint_from(&Disk::open(device)?, kind)
}

/// Returns the fingerprint of a file system with this content.
fn fingerprint_from(content: &dyn ReadAt, kind: &str) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let ranges = ranges(content, kind)?;
    // If the ranges leave something out, their limits count to the byte.
    let exactly = ranges.iter().any(|range| range.start % SECTOR != 0);
    for range in ranges {
        hash(&mut hasher, content, range, exactly)?;
    }
    Ok(hasher.finalize().to_string())
}

/// Returns the fingerprint of an image's file system on the contents of its machine's disks, which another
/// machine has. `content` returns that of a disk, by the name that the image's machine gave it.
///
/// # Errors
///
/// Returns the reason if a disk is unknown or missing, or cannot be read.
pub fn fingerprint_elsewhere<'a>(
    file_system: &FileSystem,
    content: &dyn Fn(&str) -> Option<&'a dyn ReadAt>,
) -> std::result::Result<String, String> {
    let part = |place: &Option<DiskPart>| {
        let place =
            place.as_ref().ok_or("an earlier Mercury made the image, which does not name its disk")?;
        let content = content(&place.disk).ok_or_else(|| format!("the disk {} is not here", place.disk))?;
        Ok::<_, String>(Part { content, offset: place.offset, length: place.length })
    };
    let unread = |error: io::Error| format!("it cannot be read: {error}");
    if file_system.pieces.is_empty() {
        return fingerprint_from(&part(&file_system.place)?, &file_system.kind).map_err(unread);
    }
    let mut hasher = blake3::Hasher::new();
    for piece in &file_system.pieces {
        let range = piece.offset..piece.offset.saturating_add(piece.length);
        hash(&mut hasher, &part(&piece.place)?, range, true).map_err(unread)?;
    }
    Ok(hasher.finalize().to_string())
}

/// A part of a disk.
struct Part<'a> {
    content: &'a dyn ReadAt,
    offset: u64,
    length: u64,
}

impl ReadAt for Part<'_> {
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let length = self.length.saturating_sub(offset).min(length as u64) as usize;
        self.content.read_at(self.offset.saturating_add(offset), length)
    }
}

/// Returns the fingerprint of a file system whose device is made of others.
fn fingerprint_of(pieces: &[Piece], sysroot: &Sysroot) -> std::result::Result<String, String> {
    let mut hasher = blake3::Hasher::new();
    let mut disk: Option<(&str, Disk)> = None;
    for piece in pieces {
        let (_, file) = match disk.take().filter(|(name, _)| *name == piece.disk) {
            Some(same) => disk.insert(same),
            None => {
                let path = layers::find(&piece.disk, sysroot)?;
                let file = Disk::open(&path)
                    .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
                disk.insert((&piece.disk, file))
            }
        };
        hash(&mut hasher, file, piece.offset..piece.offset.saturating_add(piece.length), true)
            .map_err(|error| format!("a part of it, {}, cannot be read: {error}", piece.disk))?;
    }
    Ok(hasher.finalize().to_string())
}

/// Returns the fingerprint of an image's file system, as it is now.
///
/// # Errors
///
/// Returns the reason if it is nowhere, several devices have its identity, or it cannot be read.
pub fn fingerprint_now(file_system: &FileSystem, sysroot: &Sysroot) -> std::result::Result<String, String> {
    if !file_system.pieces.is_empty() {
        return fingerprint_of(&file_system.pieces, sysroot);
    }
    let device = find(file_system, sysroot)?;
    fingerprint(&device, &file_system.kind).map_err(|error| format!("it cannot be read: {error}"))
}

/// Checks if a file system of an image is here, with all its disks.
///
/// # Errors
///
/// Returns the reason if it is nowhere, or several devices have its identity.
pub fn is_here(file_system: &FileSystem, sysroot: &Sysroot) -> std::result::Result<(), String> {
    let mut disks: Vec<_> = file_system.pieces.iter().map(|piece| &piece.disk).collect();
    if disks.is_empty() {
        return find(file_system, sysroot).map(drop);
    }
    disks.dedup();
    disks.into_iter().try_for_each(|disk| layers::find(disk, sysroot).map(drop))
}

/// Refuses file systems whose fingerprints the restore environment could not compare.
///
/// # Errors
///
/// Returns an error that names the first of them, and the reason.
pub fn refuse_unreadable(mounts: &[Mounted], sysroot: &Sysroot) -> Result<()> {
    for mount in mounts {
        if let Err(why) = is_comparable(mount, sysroot) {
            let text = format!(
                "{} is on {}, where the restore environment could not tell if it has changed: {why}",
                mount.at.display(),
                mount.device.display()
            );
            return Err(Error::coded(Code::DisksUncomparable, text));
        }
    }
    Ok(())
}

/// Checks if the restore environment can compare a file system's fingerprint. Returns the reason as
/// a clause if it cannot.
fn is_comparable(mount: &Mounted, sysroot: &Sysroot) -> std::result::Result<(), String> {
    let reached = |device: &Path| match reachable::obstacle(device, sysroot) {
        Some(why) => Err(format!("{} {why}", device.display())),
        None => Ok(()),
    };
    let pieces = pieces(mount, sysroot)?;
    if !pieces.is_empty() {
        let disks: BTreeSet<_> = pieces.iter().map(|piece| &piece.disk).collect();
        return disks.into_iter().try_for_each(|disk| reached(&layers::find(disk, sysroot)?));
    }
    reached(&mount.device)?;
    let ranges = Disk::open(&mount.device).and_then(|file| ranges(&file, &mount.kind));
    ranges.map_err(|error| error.to_string())?;
    let named = name(mount);
    if named.uuid.is_none() {
        return Err("it has no known identity".into());
    }
    let mut found = claimants(&named, sysroot)?;
    found.retain(|device| reached(device).is_ok());
    only(found).map(drop)
}

/// Returns the disks and ranges that hold the changing ranges of a file system whose device is made
/// of others.
fn pieces(mount: &Mounted, sysroot: &Sysroot) -> std::result::Result<Vec<Piece>, String> {
    if !is_composed(&mount.device, sysroot) {
        return Ok(Vec::new());
    }
    let ranges = Disk::open(&mount.device).and_then(|file| ranges(&file, &mount.kind));
    let ranges = ranges.map_err(|error| format!("it cannot be read: {error}"))?;
    layers::pieces(&mount.device, &ranges, sysroot)
}

/// Returns the byte ranges that change with every write to the file system.
fn ranges(file: &dyn ReadAt, kind: &str) -> io::Result<Vec<Range<u64>>> {
    let first = read(file, 0, BEGINNING)?;
    let unknown = || io::Error::other(format!("the ranges that change in {kind} are unknown"));
    let kind = Kind::of(kind).ok_or_else(unknown)?;
    kind.changing(&first, |range| read_exactly(file, range))?.ok_or_else(unknown)
}

/// Hashes a range; if `exactly`, without the rest of its last block.
fn hash(hasher: &mut blake3::Hasher, file: &dyn ReadAt, range: Range<u64>, exactly: bool) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let wanted = (range.end - at).min(1 << 20) as usize;
        let part =
            if exactly { read_exactly(file, at..at + wanted as u64)? } else { read(file, at, wanted)? };
        if part.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        hasher.update(&part);
        at += part.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_covered_mount_is_recognized() {
        let line = "36 35 259:3 / /data rw,noatime master:1 - ext4 /dev/nvme0n1p3 rw";
        let below = mount(line).expect("a mount");
        let found = |device, is_btrfs| Found { device, is_btrfs };
        let (own, other) = (libc::makedev(259, 3), libc::makedev(0, 41));
        assert!(!found(own, false).covers(&below) && found(other, false).covers(&below));
        let volume = mount(&line.replace("259:3", "0:40").replace("ext4", "btrfs")).expect("a mount");
        assert!(!found(other, true).covers(&volume) && found(other, false).covers(&volume));
        let here = File::open(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let here = Found::at(&here).expect("a file system");
        let number = format!("{}:{}", libc::major(here.device), libc::minor(here.device));
        assert!(!here.covers(&mount(&line.replace("259:3", &number)).expect("a mount")));
    }

    #[test]
    fn mounts_of_other_namespaces_are_named() {
        let root = tempfile::tempdir().expect("a folder");
        let thread = |name: &str, namespace: &str, table: &str| {
            let folder = root.path().join("proc").join(name);
            std::fs::create_dir_all(folder.join("ns")).expect("folders");
            std::fs::write(folder.join("mountinfo"), table).expect("a file");
            std::os::unix::fs::symlink(namespace, folder.join("ns/mnt")).expect("a link");
        };
        let process = |name: &str, namespace: &str, table: &str| {
            thread(&format!("{name}/task/{name}"), namespace, table);
        };
        let ours = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n";
        thread("self", "mnt:[1]", ours);
        process("7", "mnt:[1]", ours);
        process("77", "mnt:[2]", &format!("{ours}2 1 0:5 / /tmp rw - tmpfs tmpfs rw\n"));
        let sysroot = Sysroot::at(root.path());
        let mounts = all(&sysroot).expect("nothing else");
        assert!(are_still(&mounts, &sysroot).is_ok());
        process("78", "mnt:[3]", &format!("{ours}3 1 8:17 / /data rw - xfs /dev/sdb1 rw\n"));
        process("79", "mnt:[3]", "");
        thread("7/task/8", "mnt:[4]", "4 1 8:33 / /more rw - xfs /dev/sdc1 rw\n");
        let error = all(&sysroot).expect_err("refused");
        assert!(error.message.ends_with("of process 78 [disks-unheld]"), "{}", error.message);
        let thread_of_7 = ": /more (/dev/sdc1) of thread 8 of process 7, /data (/dev/sdb1) of";
        assert!(error.message.contains(thread_of_7), "{}", error.message);
        assert!(are_still(&mounts, &sysroot).is_err());
        std::fs::remove_dir_all(root.path().join("proc/7/task/8")).expect("gone");
        assert!(all(&sysroot).is_err());
        std::fs::remove_dir_all(root.path().join("proc/78")).expect("gone");
        std::fs::write(root.path().join("proc/self/mountinfo"), ours.replace("8:1", "8:2")).expect("a file");
        std::fs::write(root.path().join("proc/77/task/77/mountinfo"), "").expect("a file");
        std::fs::write(root.path().join("proc/7/task/7/mountinfo"), "").expect("a file");
        assert!(are_still(&mounts, &sysroot).is_err());
    }

    #[test]
    fn a_file_system_without_a_fingerprint_is_refused() {
        let file_system = |mounted_at: &str, fingerprint: Option<&str>| FileSystem {
            mounted_at: mounted_at.into(),
            kind: "iso9660".into(),
            device: "/dev/no-such-disk".into(),
            fingerprint: fingerprint.map(Into::into),
            ..FileSystem::default()
        };
        let (with, without) = (file_system("/", Some("1")), file_system("/media", None));
        assert!(refuse_without_fingerprint(std::slice::from_ref(&with)).is_ok());
        let error = refuse_without_fingerprint(&[with, without]).expect_err("refused");
        assert!(error.message.contains("of /media (/dev/no-such-disk) has no fingerprint"), "{error}");
        assert!(error.message.contains("No such file"), "{error}");
    }

    /// The content of a disk in memory.
    struct Content(Vec<u8>);

    impl ReadAt for Content {
        fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
            let from = self.0.get(offset as usize..).ok_or(io::ErrorKind::UnexpectedEof)?;
            Ok(from[..length.min(from.len())].to_vec())
        }
    }

    #[test]
    fn a_fingerprint_is_the_same_on_a_part_of_a_disk_elsewhere() {
        let partition: Vec<u8> = (0..300 << 10).map(|at| (at / 7 % 251) as u8).collect();
        let whole = [vec![9; 1 << 20], partition.clone(), vec![9; 4096]].concat();
        let (alone, whole) = (Content(partition.clone()), Content(whole));
        let place = |length| Some(DiskPart { disk: "nvme0n1".into(), offset: 1 << 20, length });
        let content = |disk: &str| (disk == "nvme0n1").then_some(&whole as &dyn ReadAt);
        let ext4 = FileSystem { kind: "ext4".into(), place: place(300 << 10), ..FileSystem::default() };
        let expected = fingerprint_from(&alone, "ext4").expect("a fingerprint");
        assert_eq!(fingerprint_elsewhere(&ext4, &content), Ok(expected.clone()));
        // Fewer bytes than the beginning: nothing after the partition counts.
        let small = FileSystem { place: place(8 << 10), ..ext4.clone() };
        let beginning = fingerprint_from(&Content(partition[..8 << 10].to_vec()), "ext4");
        assert_eq!(fingerprint_elsewhere(&small, &content).ok(), beginning.ok());
        let missing = FileSystem { place: None, ..ext4.clone() };
        assert!(fingerprint_elsewhere(&missing, &content).expect_err("unknown").contains("earlier Mercury"));
        let nowhere = |_: &str| None;
        assert!(fingerprint_elsewhere(&ext4, &nowhere).expect_err("missing").contains("nvme0n1 is not here"));

        let piece = |offset, length| Piece { place: place(300 << 10), offset, length, ..Piece::default() };
        let volume = FileSystem { pieces: vec![piece(100, 5000), piece(20_000, 1)], ..ext4 };
        let mut hasher = blake3::Hasher::new();
        hasher.update(&partition[100..5100]).update(&partition[20_000..20_001]);
        assert_eq!(fingerprint_elsewhere(&volume, &content), Ok(hasher.finalize().to_string()));
    }

    #[test]
    fn one_disk_alone_may_claim_to_be_it() {
        assert!(only(Vec::new()).is_err_and(|why| why.contains("no disk")));
        assert_eq!(only(vec!["/dev/a".into()]), Ok("/dev/a".into()));
        assert!(only(vec!["/dev/a".into(), "/dev/b".into()]).is_err_and(|why| why.starts_with("2 disks")));
    }
}
