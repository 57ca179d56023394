//! A place for a tombstone on a disk, for a machine without UEFI. It is a file of two blocks on a
//! local file system. The tombstone is written to the blocks of the device, because the file system
//! may be frozen or not be mounted at that time. The positions of the blocks are found when the
//! file is made, and proven by reading them there.

use super::record::{self, Record};
use mercury_control::sysroot::Sysroot;
use mercury_image::FileSystem;
use mercury_quiesce::{disks, mounts, reachable};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
};

/// Size of a block of the file, which holds one record.
const BLOCK: usize = 4096;

/// The position of a tombstone's two copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    /// Identity of the file system that holds the file.
    pub uuid: String,
    /// Type of the file system.
    pub kind: String,
    /// Path of the file, for people.
    pub file: String,
    /// Positions of both copies, in bytes from the device's beginning.
    pub offsets: [u64; 2],
}

impl Spot {
    /// Returns the name in /dev of the device that holds the place now.
    ///
    /// # Errors
    ///
    /// Returns the reason if the device is not here.
    pub fn device(&self, sysroot: &Sysroot) -> Result<String, String> {
        let wanted =
            FileSystem { uuid: Some(self.uuid.clone()), kind: self.kind.clone(), ..FileSystem::default() };
        let path = disks::find(&wanted, sysroot)?;
        let name = path.file_name().ok_or("the disk has no name")?;
        Ok(name.to_string_lossy().into_owned())
    }
}

/// A block, aligned in memory as devices need it.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// The two blocks on their device.
#[derive(Debug)]
pub struct Blocks {
    device: File,
    offsets: [u64; 2],
}

impl Blocks {
    /// Opens the blocks of the device with this name in a folder.
    ///
    /// # Errors
    ///
    /// Returns an error if the device cannot be opened.
    pub fn open(folder: impl AsFd, name: &str, offsets: [u64; 2]) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::DSYNC | OFlags::CLOEXEC;
        let device = rustix::fs::openat(folder, name, flags, Mode::empty())?;
        Ok(Self { device: File::from(device), offsets })
    }

    /// Returns the record that the blocks hold.
    ///
    /// # Errors
    ///
    /// Returns the reason if they cannot be read.
    pub fn read(&self) -> Result<Option<Record>, String> {
        let copies = self.offsets.map(|offset| {
            let bytes = self.read_block(offset).map_err(|error| error.to_string())?;
            Record::unpack(&bytes[..record::LENGTH])
        });
        record::newest(&copies)
    }

    /// Writes a record into one block after the other, so that one of them is whole at all times.
    /// The record survives a power cut when this returns.
    ///
    /// # Errors
    ///
    /// Returns an error if the record may be lost; one of the blocks may have it.
    pub fn write(&self, bytes: &[u8; record::LENGTH]) -> io::Result<()> {
        let mut block = Block([0; BLOCK]);
        block.0[..bytes.len()].copy_from_slice(bytes);
        for offset in self.offsets {
            self.device.write_all_at(&block.0, offset)?;
            self.device.sync_data()?;
            if self.read_block(offset)? != block.0 {
                return Err(io::Error::other("the disk does not hold the data that was written to it"));
            }
        }
        Ok(())
    }

    fn read_block(&self, offset: u64) -> io::Result<[u8; BLOCK]> {
        let mut block = Block([0; BLOCK]);
        self.device.read_exact_at(&mut block.0, offset)?;
        Ok(block.0)
    }
}

/// Makes the file, and finds the positions of its blocks. Both copies hold `record` then.
///
/// # Errors
///
/// Returns the reason if the file cannot be made, or its blocks cannot be found at the device.
pub fn prepare(file: &Path, record: &Record, sysroot: &Sysroot) -> Result<Spot, String> {
    let of_file = |error: io::Error| format!("{}: {error}", file.display());
    let bytes = record.pack()?;
    let mut block = vec![0; BLOCK];
    block[..bytes.len()].copy_from_slice(&bytes);
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let mut made = options.open(file).map_err(of_file)?;
    made.write_all(&[&block[..], &block].concat()).and_then(|()| made.sync_all()).map_err(of_file)?;
    let path = fs::canonicalize(file).map_err(of_file)?;
    let mounts = mounts::mounted(sysroot).map_err(|error| error.message)?;
    let holder = mounts::holder(&mounts, &path, sysroot)
        .ok_or_else(|| format!("{} is on no local disk", file.display()))?;
    if let Some(obstacle) = reachable::obstacle(&holder.device, sysroot) {
        return Err(format!("{} {obstacle}: a starting system may not reach it", holder.device.display()));
    }
    let uuid = disks::name(holder).uuid;
    let uuid = uuid.ok_or_else(|| format!("a file system of type {} has no identity", holder.kind))?;
    let extents = extents(&made).map_err(|error| format!("{}: its blocks: {error}", file.display()))?;
    let offsets = [place_of(0, &extents)?, place_of(BLOCK as u64, &extents)?];
    let spot = Spot { uuid, kind: holder.kind.clone(), file: path.display().to_string(), offsets };
    let name = spot.device(sysroot)?;
    let devices = File::open(sysroot.path("dev")).map_err(of_file)?;
    let blocks = Blocks::open(&devices, &name, offsets).map_err(|error| format!("/dev/{name}: {error}"))?;
    match blocks.read()? {
        Some(found) if found == *record => Ok(spot),
        _ => Err(format!(
            "{} is not at the position that its file system reports; use another file system",
            file.display()
        )),
    }
}

/// An extent of a file: its offset in the file, its offset on the device, its length, its flags.
type Extent = (u64, u64, u64, u32);

/// Returns the position of a block, if the extents have its bytes unchanged.
fn place_of(at: u64, extents: &[Extent]) -> Result<u64, String> {
    /// The flags for the last extent and for a merged one. All other flags say that the file's
    /// bytes are encoded or elsewhere.
    const HARMLESS: u32 = 0x1001;
    let within = |(logical, _, length, _): &&Extent| {
        *logical <= at && at + BLOCK as u64 <= logical.saturating_add(*length)
    };
    let Some((logical, physical, _, flags)) = extents.iter().find(within) else {
        return Err("the file's blocks are not in one piece on the disk; use another file system".into());
    };
    if flags & !HARMLESS != 0 {
        return Err("the file system stores the file's bytes in another form; use another file system".into());
    }
    Ok(physical + (at - logical))
}

/// Returns the extents of a file (`FS_IOC_FIEMAP`).
fn extents(file: &File) -> io::Result<Vec<Extent>> {
    const FIEMAP: libc::c_ulong = 0xC020_660B;
    const SYNC: u32 = 1;
    const COUNT: usize = 16;

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Piece {
        logical: u64,
        physical: u64,
        length: u64,
        reserved: [u64; 2],
        flags: u32,
        reserved_too: [u32; 3],
    }

    #[repr(C)]
    #[derive(Default)]
    struct Map {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        count: u32,
        reserved: u32,
        pieces: [Piece; COUNT],
    }

    const _: () = assert!(size_of::<Piece>() == 56 && size_of::<Map>() == 32 + 56 * COUNT);

    let mut map = Map { length: 2 * BLOCK as u64, flags: SYNC, count: COUNT as u32, ..Map::default() };
    // SAFETY: the map has room for the number of extents that it names, and its layout is the
    // kernel's, which is asserted.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &raw mut map) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let found = map.pieces.iter().take(map.mapped as usize);
    Ok(found.map(|piece| (piece.logical, piece.physical, piece.length, piece.flags)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::record::{State, tests::record};
    use super::*;

    /// Makes a file in place of a device, with data before and after the blocks.
    fn device() -> (tempfile::TempDir, Blocks) {
        // Some file systems refuse direct reads: the crate's own folder is on one that allows them.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        fs::write(folder.path().join("disk"), [0x5A; 8 * BLOCK]).expect("a file");
        let opened = File::open(folder.path()).expect("the folder");
        let blocks = Blocks::open(&opened, "disk", [3 * BLOCK as u64, 5 * BLOCK as u64]).expect("a device");
        (folder, blocks)
    }

    #[test]
    fn only_its_blocks_are_written() {
        let (folder, blocks) = device();
        assert_eq!(blocks.read(), Ok(None));
        for (state, number) in [(State::Cleared, 1), (State::Committed, 2)] {
            let tombstone = record(state, number);
            blocks.write(&tombstone.pack().expect("it fits")).expect("written");
            assert_eq!(blocks.read(), Ok(Some(tombstone)));
        }
        let bytes = fs::read(folder.path().join("disk")).expect("a file");
        for (index, block) in bytes.chunks(BLOCK).enumerate() {
            assert_eq!(block.iter().all(|byte| *byte == 0x5A), ![3, 5].contains(&index), "{index}");
        }
        // The power fails in the middle of the first copy.
        let file = File::options().write(true).open(folder.path().join("disk")).expect("a file");
        file.write_all_at(&[0; 100], 3 * BLOCK as u64 + 40).expect("written");
        assert_eq!(blocks.read(), Ok(Some(record(State::Committed, 2))));
        file.write_all_at(&[0; 100], 5 * BLOCK as u64 + 40).expect("written");
        assert!(blocks.read().is_err());
    }

    #[test]
    fn a_disk_that_ends_before_is_an_error() {
        let (folder, blocks) = device();
        File::options()
            .write(true)
            .open(folder.path().join("disk"))
            .expect("a file")
            .set_len(4096)
            .expect("cut");
        assert!(blocks.read().is_err());
    }

    #[test]
    fn blocks_that_do_not_lie_as_they_are_are_refused() {
        let block = BLOCK as u64;
        assert_eq!(place_of(0, &[(0, 1 << 20, 2 * block, 1)]), Ok(1 << 20));
        assert_eq!(place_of(block, &[(0, 1 << 20, 2 * block, 1)]), Ok((1 << 20) + block));
        assert_eq!(place_of(block, &[(0, 1 << 20, block, 0), (block, 1 << 30, block, 1)]), Ok(1 << 30));
        // Missing; in two extents; encoded, inline, unwritten.
        assert!(place_of(0, &[]).is_err());
        assert!(place_of(0, &[(0, 1 << 20, 1024, 0), (1024, 1 << 30, 7168, 1)]).is_err());
        for flag in [2, 4, 8, 0x80, 0x100, 0x200, 0x400, 0x800, 0x2000] {
            assert!(place_of(0, &[(0, 1 << 20, 2 * block, 1 | flag)]).is_err(), "{flag:#x}");
        }
    }

    #[test]
    fn the_kernel_says_where_a_file_lies() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let mut file = File::create_new(folder.path().join("file")).expect("a file");
        file.write_all(&[7; 2 * BLOCK]).and_then(|()| file.sync_all()).expect("written");
        match extents(&file) {
            Ok(found) => assert!(!found.is_empty() && found[0].0 == 0, "{found:?}"),
            // Not all file systems report extents.
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}"),
        }
    }
}
