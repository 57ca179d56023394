//! Whole disks, as both ends of a move see their own: place in the machine, size, contents. The
//! drivers of a machine that has arrived are bound to the cards of the source, so the disk at the
//! same place is its disk.

use mercury_control::sysroot::Sysroot;
use mercury_migration::wire::{CHUNKS_BYTES_MAX, DiskLedger};
use mercury_quiesce::{mounts, patient, reachable};
use rustix::fs::{major, minor};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

/// Alignment of buffers for direct reads and writes.
const ALIGN: usize = 4096;
/// Bytes of a disk's beginning and of its end that are read to find out if it is empty.
const ENDS: u64 = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Place of the disk: the PCI address of its card, and its position there.
    pub place: String,
    /// Device file on this machine.
    pub path: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
    /// Size of a logical sector.
    pub sector: u32,
}

impl Disk {
    /// Finds the disk with this name.
    ///
    /// # Errors
    ///
    /// Returns the reason if the path is no disk, or one that cannot be copied.
    pub fn find(path: &Path, sysroot: &Sysroot) -> Result<Self, String> {
        let named = |why: &str| format!("{} {why}", path.display());
        let found = fs::metadata(path).map_err(|error| named(&format!("cannot be opened: {error}")))?;
        if !found.file_type().is_block_device() {
            return Err(named("is not a disk"));
        }
        let folder = folder_of(found.rdev(), sysroot).ok_or_else(|| named("is not a disk"))?;
        if folder.join("partition").exists() {
            return Err(named("is a part of a disk: name the whole disk"));
        }
        if let Some(why) = reachable::obstacle(path, sysroot) {
            return Err(named(&why));
        }
        Self::at(&folder).ok_or_else(|| named("has a place that the destination could not find again"))
    }

    /// Returns the disk with this folder in sysfs.
    fn at(folder: &Path) -> Option<Self> {
        let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
        Some(Self {
            place: place(folder)?,
            path: Path::new("/dev").join(folder.file_name()?),
            bytes: number("size")? * 512,
            sector: u32::try_from(number("queue/logical_block_size")?).ok()?,
        })
    }

    /// Returns the disk at this place.
    #[must_use]
    pub fn at_place(place: &str, sysroot: &Sysroot) -> Option<Self> {
        let folders = sysroot.names("sys/block").into_iter();
        let mut all = folders
            .filter_map(|name| Self::at(&fs::canonicalize(sysroot.path(&format!("sys/block/{name}"))).ok()?));
        all.find(|disk| disk.place == place)
    }

    /// Opens the disk past the kernel's cache.
    ///
    /// # Errors
    ///
    /// Returns the error of open(2), or one if the disk does not answer.
    pub fn open(&self, write: bool) -> io::Result<File> {
        patient::answers(&self.path)?;
        let mut options = OpenOptions::new();
        options.read(true).write(write).custom_flags(libc::O_DIRECT).open(&self.path)
    }

    /// Returns true if a device, by its number, is on this disk and on no other: the disk itself, a
    /// part of it, or a device made of such.
    #[must_use]
    pub fn holds(&self, number: u64, sysroot: &Sysroot) -> bool {
        let Some(folder) = folder_of(number, sysroot) else { return false };
        let Some(own) = fs::metadata(&self.path).ok().and_then(|found| folder_of(found.rdev(), sysroot))
        else {
            return false;
        };
        is_within(&folder, &own)
    }

    /// Describes what is on the disk: file systems, swap, devices made of it, and any other
    /// contents.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk cannot be read.
    pub fn uses(&self, sysroot: &Sysroot) -> io::Result<Vec<String>> {
        let is_here = |path: &Path| fs::metadata(path).is_ok_and(|found| self.holds(found.rdev(), sysroot));
        let mounts = mounts::mounted(sysroot).map_err(|error| io::Error::other(error.message))?;
        let mounted = mounts.iter().filter(|mount| is_here(&mount.device));
        let mut found: Vec<_> =
            mounted.map(|mount| format!("{} is mounted from it", mount.at.display())).collect();
        let swaps = sysroot.text("proc/swaps").unwrap_or_default();
        let swaps = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
        found.extend(swaps.filter(|path| is_here(Path::new(path))).map(|path| format!("{path} is swap")));
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let holders = |name: &str| sysroot.names(&format!("sys/class/block/{name}/holders"));
        let parts =
            sysroot.names(&format!("sys/block/{name}")).into_iter().filter(|part| part.starts_with(&name));
        let parts: Vec<_> = parts.collect();
        let users = parts.iter().chain([&name]).flat_map(|part| holders(part));
        found.extend(users.map(|user| format!("{user} is made of it")));
        if !parts.is_empty() {
            found.push(format!("it has {} partitions", parts.len()));
        } else if found.is_empty() && !self.is_empty()? {
            found.push("it holds data".into());
        }
        Ok(found)
    }

    /// Returns true if its beginning and its end are zeros.
    pub(crate) fn is_empty(&self) -> io::Result<bool> {
        let file = patient::Disk::open(&self.path)?;
        for offset in [0, self.bytes.saturating_sub(ENDS)] {
            let bytes = file.read_at(offset, self.bytes.min(ENDS) as usize)?;
            if bytes.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the memory in MiB that the restore environment needs to remember the chunks of disks of
/// these sizes.
#[must_use]
pub fn memory(sizes: &[u64]) -> u64 {
    let chunks: u64 = sizes.iter().map(|bytes| DiskLedger::new(*bytes).chunks()).sum();
    // A hash for each chunk, and room for those under way.
    let needed = if sizes.is_empty() { 0 } else { (chunks * 17 + 4 * CHUNKS_BYTES_MAX as u64) >> 20 };
    needed.next_multiple_of(16)
}

/// Makes the kernel read the partition table of a disk again. A file has none for the kernel.
pub fn reread_partitions(file: &File) {
    const BLKRRPART: libc::c_ulong = 0x125F;
    // A disk that another process is about to probe is busy.
    for _ in 0..20 {
        // SAFETY: the request has no argument.
        let is_done = unsafe { libc::ioctl(file.as_raw_fd(), BLKRRPART, 0) } == 0;
        if is_done || io::Error::last_os_error().raw_os_error() != Some(libc::EBUSY) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// Returns the folder of a block device in sysfs.
fn folder_of(number: u64, sysroot: &Sysroot) -> Option<PathBuf> {
    fs::canonicalize(sysroot.path(&format!("sys/dev/block/{}:{}", major(number), minor(number)))).ok()
}

/// Returns true if a device is within a disk. A device that is made of others is within it if all
/// of those are.
fn is_within(folder: &Path, disk: &Path) -> bool {
    if folder.starts_with(disk) {
        return true;
    }
    let below = fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten();
    let below: Vec<_> = below.filter_map(|entry| fs::canonicalize(entry.path()).ok()).collect();
    !below.is_empty() && below.iter().all(|folder| is_within(folder, disk))
}

/// Returns the place of a disk, without numbers that depend on the order of probing: the address of
/// its card, the port, SCSI's numbers behind the controller, the number of NVMe's namespace.
fn place(folder: &Path) -> Option<String> {
    let all: Vec<_> = folder.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let card = all.iter().rposition(|part| is_pci_address(part))?;
    let (behind, name) = all[card + 1..].split_last().map(|(name, behind)| (behind, name))?;
    let mut place = all[card].clone();
    for (index, part) in behind.iter().enumerate() {
        let numbered = |word: &str| {
            part.strip_prefix(word)
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
        };
        match part.as_str() {
            "block" | "nvme" => {}
            _ if numbered("virtio") || numbered("host") || numbered("nvme") || part.starts_with("target") => {
            }
            _ if numbered("ata") => {
                let above: PathBuf = all[..=card + 1 + index].iter().collect();
                let port = fs::read_to_string(above.join("ata_port").join(part).join("port_no")).ok()?;
                place += &format!("-ata{}", port.trim());
            }
            // Host, channel, target, unit.
            _ if part.split(':').count() == 4 => place += &format!("-{}", part.split_once(':')?.1),
            _ => return None,
        }
    }
    if name.starts_with("nvme") {
        place += &format!("-n{}", fs::read_to_string(folder.join("nsid")).ok()?.trim());
    }
    Some(place)
}

/// Returns true for text such as 0000:00:1f.2.
fn is_pci_address(text: &str) -> bool {
    let parts: Vec<_> = text.split([':', '.']).map(str::len).collect();
    parts == [4, 2, 2, 1] && text.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
}

/// A buffer aligned for direct reads and writes.
#[derive(Debug)]
pub struct Buffer {
    all: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    /// Makes a buffer of this length.
    #[must_use]
    pub fn new(length: usize) -> Self {
        let all = vec![0; length + ALIGN];
        let start = all.as_ptr().align_offset(ALIGN);
        Self { all, start, length }
    }

    /// Returns the bytes of the buffer.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.all[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Computes the place of a disk with this folder in /sys/devices, with these files there.
    fn place_of(folder: &str, files: &[(&str, &str)]) -> Option<String> {
        let root = tempfile::tempdir().expect("a folder");
        for (name, text) in files.iter().chain(&[("pci0000:00/uevent", "")]) {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, text).expect("a file");
        }
        place(&root.path().join(folder))
    }

    #[test]
    fn places_are_found_again() {
        let of = |folder: &str, files: &[(&str, &str)]| place_of(folder, files).unwrap_or_default();
        for number in [1, 9] {
            let virtio = format!("pci0000:00/0000:00:04.0/virtio{number}/block/vd{number}");
            assert_eq!(of(&virtio, &[]), "0000:00:04.0");
        }
        let sata = "pci0000:00/0000:00:1f.2/ata3/host2/target2:0:0/2:0:0:0/block/sda";
        let port = ("pci0000:00/0000:00:1f.2/ata3/ata_port/ata3/port_no", "1\n");
        assert_eq!(of(sata, &[port]), "0000:00:1f.2-ata1-0:0:0");
        let scsi = "pci0000:00/0000:00:1c.0/0000:03:00.0/virtio4/host6/target6:0:2/6:0:2:1/block/sdb";
        assert_eq!(of(scsi, &[]), "0000:03:00.0-0:2:1");
        let nvme = "pci0000:00/0000:00:02.0/nvme/nvme7/nvme7n1";
        assert_eq!(of(nvme, &[(&format!("{nvme}/nsid"), "1\n")]), "0000:00:02.0-n1");
        assert_eq!(
            place_of("pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/host3/target3:0:0/3:0:0:0/block/sdc", &[]),
            None
        );
        assert_eq!(place_of("virtual/block/dm-0", &[]), None);
    }

    #[test]
    fn a_volume_is_on_the_disks_below_it() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = |name: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(&path).expect("folders");
            path
        };
        let (disk, part, other) = (folder("a/sda"), folder("a/sda/sda1"), folder("a/sdb"));
        let (within, both) = (folder("virtual/dm-0"), folder("virtual/dm-1"));
        for (made, of) in [(&within, &part), (&both, &part), (&both, &other)] {
            fs::create_dir_all(made.join("slaves")).expect("a folder");
            symlink(of, made.join("slaves").join(of.file_name().expect("a name"))).expect("a link");
        }
        assert!(is_within(&disk, &disk) && is_within(&part, &disk) && is_within(&within, &disk));
        assert!(!is_within(&other, &disk) && !is_within(&both, &disk));
    }

    #[test]
    fn buffers_are_aligned() {
        let mut buffer = Buffer::new(100);
        assert_eq!((buffer.bytes().len(), buffer.bytes().as_ptr().align_offset(ALIGN)), (100, 0));
    }
}
