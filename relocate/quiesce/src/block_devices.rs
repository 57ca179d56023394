//! Block devices, and direct reads of them.

use super::patient::Disk;
use mercury_control::sysroot::Sysroot;
use mercury_image::DiskPart;
use std::{
    io,
    ops::Range,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Alignment of buffers, offsets and lengths for direct reads.
const ALIGN: usize = 4096;

/// The content of a device.
pub trait ReadAt {
    /// Reads at most `length` bytes, and fewer at the end. Offset and length are multiples of 4 KiB.
    ///
    /// # Errors
    ///
    /// Returns an error if the content cannot be read.
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>>;
}

impl ReadAt for Disk {
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        Disk::read_at(self, offset, length)
    }
}

/// Lists all disks that are real devices, whether mounted or not.
#[must_use]
pub fn real(sysroot: &Sysroot) -> Vec<PathBuf> {
    let mut names = sysroot.names("sys/block");
    names.retain(|name| sysroot.exists(&format!("sys/block/{name}/device")));
    names.iter().map(|name| Path::new("/dev").join(name)).collect()
}

/// Returns true if a device is made of others: device mapper, RAID. The restore environment
/// assembles none.
#[must_use]
pub fn is_composed(device: &Path, sysroot: &Sysroot) -> bool {
    let Ok(found) = std::fs::metadata(device) else { return true };
    let link =
        format!("sys/dev/block/{}:{}", rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    let place = std::fs::canonicalize(sysroot.path(&link)).unwrap_or_default();
    place.starts_with("/sys/devices/virtual/block")
}

/// Lists block devices that may hold data, by the kernel's names. Devices without a size hold none.
/// Suspended device-mapper devices are left out, because reads of them wait until they are resumed.
pub fn readable(sysroot: &Sysroot) -> Vec<String> {
    let mut names = sysroot.names("sys/class/block");
    names.retain(|name| {
        let of = |what: &str| sysroot.text(&format!("sys/class/block/{name}/{what}"));
        let is = |what: &str, value: &str| of(what).is_some_and(|text| text == value);
        !is("size", "0") && !is("dm/suspended", "1") && !is("hidden", "1")
    });
    names
}

/// Returns the place of a device that is a disk or a partition.
#[must_use]
pub fn place(device: &Path, sysroot: &Sysroot) -> Option<DiskPart> {
    let found = std::fs::metadata(device).ok()?.rdev();
    let link = format!("sys/dev/block/{}:{}", rustix::fs::major(found), rustix::fs::minor(found));
    let folder = std::fs::canonicalize(sysroot.path(&link)).ok()?;
    if folder.to_string_lossy().contains("/devices/virtual/block/") {
        return None;
    }
    place_of(folder.file_name()?.to_str()?, sysroot)
}

/// Returns the place of a disk or a partition with this kernel name.
pub(super) fn place_of(name: &str, sysroot: &Sysroot) -> Option<DiskPart> {
    const SECTOR: u64 = 512;
    let folder = format!("sys/class/block/{name}");
    let number = |what: &str| sysroot.text(&format!("{folder}/{what}"))?.trim().parse::<u64>().ok();
    let length = number("size")?.checked_mul(SECTOR)?;
    if !sysroot.exists(&format!("{folder}/partition")) {
        return Some(DiskPart { disk: name.to_owned(), offset: 0, length });
    }
    let folder = std::fs::canonicalize(sysroot.path(&folder)).ok()?;
    let disk = folder.parent()?.file_name()?.to_str()?.to_owned();
    Some(DiskPart { disk, offset: number("start")?.checked_mul(SECTOR)?, length })
}

/// Returns the file of a device with this kernel name, in which an exclamation mark stands for a
/// slash.
pub fn device_file(name: &str) -> PathBuf {
    Path::new("/dev").join(name.replace('!', "/"))
}

/// Returns true if a device is a partition from its disk's first sector on, such as mkfs.vfat
/// makes: its contents are the disk's.
pub(super) fn begins_with_its_disk(name: &str, sysroot: &Sysroot) -> bool {
    let of = |what: &str| sysroot.text(&format!("sys/class/block/{name}/{what}"));
    of("partition").is_some() && of("start").is_some_and(|start| start.trim() == "0")
}

/// Reads the first bytes of a device; `None` if they cannot be read.
///
/// # Errors
///
/// Returns an error if the device does not answer.
pub fn head(device: &Path, length: usize) -> std::result::Result<Option<Vec<u8>>, String> {
    match Disk::open(device).and_then(|disk| read(&disk, 0, length)) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(format!("{} cannot be read: {error}", device.display()))
        }
        result => Ok(result.ok()),
    }
}

/// Reads a range that may begin anywhere.
pub(super) fn read_exactly(file: &dyn ReadAt, range: Range<u64>) -> io::Result<Vec<u8>> {
    let start = range.start & !(ALIGN as u64 - 1);
    let mut bytes = read(file, start, (range.end - start) as usize)?;
    bytes.truncate((range.end - start) as usize);
    if (bytes.len() as u64) < range.end - start {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.drain(..(range.start - start) as usize);
    Ok(bytes)
}

/// Reads directly, because the kernel's cache of a device may differ from the device.
pub(super) fn read(file: &dyn ReadAt, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    file.read_at(offset, length.next_multiple_of(ALIGN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_that_begins_with_its_disk_is_the_disk() {
        let root = tempfile::tempdir().expect("a folder");
        for (name, file, text) in [
            ("sda", "start", "0\n"),
            ("sda1", "partition", "1\n"),
            ("sda1", "start", "0\n"),
            ("sda2", "partition", "2\n"),
            ("sda2", "start", "2048\n"),
        ] {
            let folder = root.path().join("sys/class/block").join(name);
            std::fs::create_dir_all(&folder).expect("folders");
            std::fs::write(folder.join(file), text).expect("a file");
        }
        let sysroot = Sysroot::at(root.path());
        std::fs::write(root.path().join("sys/class/block/sda2/size"), "8\n").expect("a file");
        std::fs::write(root.path().join("sys/class/block/sda/size"), "4096\n").expect("a file");
        let places = ["sda", "sda1", "sda2"].map(|name| place_of(name, &Sysroot::at(root.path())));
        let place = |disk: &str, offset, length| Some(DiskPart { disk: disk.into(), offset, length });
        // In this tree the partitions are not below their disk.
        assert_eq!(places, [place("sda", 0, 2 << 20), None, place("block", 1 << 20, 4096)]);
        let found = ["sda", "sda1", "sda2", "sdb"].map(|name| begins_with_its_disk(name, &sysroot));
        assert_eq!(found, [false, true, false, false]);
    }
}
