//! Disks that are a part of the guest's memory: their images are layers of it ([`super::layers`]).
//!
//! The guest's kernel has the image at physical addresses above its memory (virtio-pmem), and a file system
//! with DAX uses the image's pages in place. So the pages exist once on the host, in its page cache, for all
//! machines. A write makes a page the machine's own, as with other memory that machines share.
//!
//! The image must not change while a machine has it. The host's kernel has two means for that:
//!
//! - A *lease* (`F_SETLEASE` of `fcntl(2)`). It is refused while another program has the file open for
//!   writing. Later such a program, or one that truncates the file, waits until the machine has ended: the
//!   machine gets a signal, and ends. Only the file's owner and root may have one.
//! - A file that nobody can change: immutable (`chattr +i`), or with fs-verity.
//!
//! A *region* ([`crate::region`]) is a disk in the same place. But its file is memory that all machines with
//! the region write to: no page of it becomes a machine's own.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use mercury_devices::{Pmem, open_disk, time_of_change};
use mercury_hosted_options::region::RegionOption;

use super::layers::Run;
use crate::{
    error::{Error, Result},
    layout::PAGE,
    region::{self, Region},
    run::{DiskAccess, DiskOption},
    smp::apic,
};

/// The level of the first disk's image. Levels below are those of files of the machine's memory.
pub const LEVEL: u8 = 0xE0;
/// The kernel maps its memory in sections of this size. A disk begins with a section.
const SECTION: u64 = 128 << 20;
/// The size of a disk is a multiple of this, or the kernel does not take it.
const UNIT: u64 = 2 << 20;

/// A disk.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    file: File,
    /// The pages of the guest's memory that are the image's.
    pages: Range<u64>,
    /// The first page after the disk. Pages from the image's end on are zero at first.
    end: u64,
    access: Access,
}

/// The use of a disk's pages.
#[derive(Debug)]
enum Access {
    /// The guest only reads them.
    Shared,
    /// The guest may write to pages of its own.
    Private,
    /// The guest writes to them. A region's keeper is connected.
    Region(OwnedFd),
}

impl Disk {
    /// Returns the pages of the guest's memory that are the image's.
    #[must_use]
    pub fn pages(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// Returns the first page after the disk.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    #[must_use]
    pub fn is_private(&self) -> bool {
        matches!(self.access, Access::Private)
    }

    /// Returns true if all machines that have it write to the same pages.
    #[must_use]
    pub fn is_region(&self) -> bool {
        matches!(self.access, Access::Region(_))
    }

    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the image again: a machine that begins as a copy of another process has a lease of its own.
    fn again(&self) -> Result<Self> {
        let wrong = |error| Error::file("open again", &self.path, error);
        let access = match &self.access {
            Access::Shared => Access::Shared,
            Access::Private => Access::Private,
            Access::Region(connection) => {
                let access = Access::Region(connection.try_clone().map_err(wrong)?);
                let file = self.file.try_clone().map_err(wrong)?;
                return Ok(Self {
                    path: self.path.clone(),
                    file,
                    pages: self.pages.clone(),
                    access,
                    ..*self
                });
            }
        };
        let path = format!("/proc/self/fd/{}", self.descriptor());
        let file = File::open(path).map_err(wrong)?;
        keep_unchanged(&file, &self.path)?;
        Ok(Self { path: self.path.clone(), file, pages: self.pages.clone(), access, ..*self })
    }
}

/// The disks in a guest's memory, in their order.
#[derive(Debug, Default)]
pub struct Disks {
    all: Vec<Disk>,
    /// The size of the guest's memory without the disks, in bytes.
    ram: u64,
}

impl Disks {
    /// Returns no disks.
    #[must_use]
    pub fn none(ram: u64) -> Self {
        Self { all: Vec::new(), ram }
    }

    /// Opens the images among a machine's disks, and takes its regions.
    ///
    /// # Errors
    /// If an image cannot be opened, or can be changed by others, or a region has another size.
    pub fn open(options: &[DiskOption], regions: &[RegionOption], ram: u64) -> Result<Self> {
        let mut disks = Self { all: Vec::new(), ram };
        for DiskOption { path, access } in options.iter().filter(|disk| disk.access.is_memory()) {
            let (file, bytes) = open_image(path)?;
            let access = if *access == DiskAccess::Private { Access::Private } else { Access::Shared };
            disks.add(path.clone(), file, bytes, access);
        }
        for option in regions {
            let Region { file, connection } = region::take(option)?;
            let path = format!("the region {}", option.name).into();
            disks.add(path, file, option.bytes, Access::Region(connection));
        }
        Ok(disks)
    }

    fn add(&mut self, path: PathBuf, file: File, bytes: u64, access: Access) {
        let start = place(self.size(), bytes);
        let pages = start / PAGE..(start + bytes).div_ceil(PAGE);
        let end = (start + bytes.next_multiple_of(UNIT)) / PAGE;
        self.all.push(Disk { path, file, pages, end, access });
    }

    /// Makes disks of files, at pages of the memory.
    #[cfg(test)]
    pub fn of_files(files: Vec<(File, Range<u64>, u64, bool)>, ram: u64) -> Self {
        let disk = |(file, pages, end, is_private)| {
            let access = if is_private { Access::Private } else { Access::Shared };
            Disk { path: PathBuf::new(), file, pages, end, access }
        };
        Self { all: files.into_iter().map(disk).collect(), ram }
    }

    /// Makes a region of a file, at pages of the memory.
    #[cfg(test)]
    pub fn of_region(file: File, pages: Range<u64>, ram: u64) -> Self {
        let access = Access::Region(file.try_clone().expect("a descriptor").into());
        let end = pages.end;
        Self { all: vec![Disk { path: PathBuf::new(), file, pages, end, access }], ram }
    }

    /// Opens the images again.
    ///
    /// # Errors
    /// If others write to an image meanwhile.
    pub fn again(&self) -> Result<Self> {
        Ok(Self { all: self.all.iter().map(Disk::again).collect::<Result<_>>()?, ram: self.ram })
    }

    /// Checks that no other program has asked for writing to an image since it was opened.
    ///
    /// # Errors
    /// If one has.
    pub fn check(&self) -> Result<()> {
        match self.all.iter().find(|disk| !disk.is_region() && is_lease_broken(&disk.file)) {
            Some(disk) => Err(Error::new(format!("another program writes to {}", disk.path.display()))
                .hint("no program may write to an image that is a part of machines' memory")),
            None => Ok(()),
        }
    }

    /// Returns true if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the size of the guest's memory without the disks, in bytes.
    #[must_use]
    pub fn ram(&self) -> u64 {
        self.ram
    }

    /// Returns the size of the guest's memory with the disks, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.all.last().map_or(self.ram, |disk| disk.end * PAGE)
    }

    /// Returns the images' files, and their inodes.
    #[must_use]
    pub fn images(&self) -> Vec<(PathBuf, u64)> {
        let image = |disk: &Disk| {
            let inode = disk.file.metadata().map_or(0, |of| of.ino());
            (disk.path.canonicalize().unwrap_or_else(|_| disk.path.clone()), inode)
        };
        self.all.iter().filter(|disk| !disk.is_region()).map(image).collect()
    }

    /// Returns the descriptors of the images and regions, and of the connections to regions' keepers.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + Clone {
        let connections = self.all.iter().filter_map(|disk| match &disk.access {
            Access::Region(connection) => Some(connection.as_raw_fd()),
            Access::Shared | Access::Private => None,
        });
        self.all.iter().map(Disk::descriptor).chain(connections)
    }

    /// Returns all disks.
    pub fn iter(&self) -> std::slice::Iter<'_, Disk> {
        self.all.iter()
    }

    /// Returns where the images are, each with a level of its own.
    #[must_use]
    pub fn runs(&self) -> Vec<Run> {
        self.all.iter().zip(LEVEL..).map(|(disk, level)| Run { pages: disk.pages(), level }).collect()
    }

    /// Returns the disks as the guest's devices.
    #[must_use]
    pub fn devices(&self) -> Vec<Pmem> {
        let device = |disk: &Disk| Pmem {
            start: disk.pages.start * PAGE,
            size: (disk.end - disk.pages.start) * PAGE,
            changed: if disk.is_region() { [0; 2] } else { time_of_change(&disk.file) },
        };
        self.all.iter().map(device).collect()
    }
}

/// Returns the address of a disk above memory of a size. There is none at the addresses of interrupt
/// controllers.
fn place(size: u64, bytes: u64) -> u64 {
    let start = size.next_multiple_of(SECTION);
    let controllers = apic::BASE..apic::BASE + apic::SIZE;
    let is_free = start >= controllers.end || start + bytes.next_multiple_of(UNIT) <= controllers.start;
    if is_free { start } else { controllers.end.next_multiple_of(SECTION) }
}

/// Opens an image, and makes sure that nobody changes it. Returns its size in bytes as well.
fn open_image(path: &Path) -> Result<(File, u64)> {
    let wrong = |error: io::Error| Error::file("open the disk", path, error);
    let kind = std::fs::metadata(path).map_err(wrong)?.file_type();
    if !kind.is_file() {
        return Err(Error::new(format!("the disk {} is no file", path.display()))
            .hint("only the image in a file can be a part of machines' memory: use `,ro` for a device"));
    }
    let (file, bytes) = open_disk(path, true)?;
    keep_unchanged(&file, path)?;
    if is_without_execution(&file) {
        return Err(Error::new(format!(
            "{} is on a file system that is mounted with noexec",
            path.display()
        ))
        .hint("programs on the disk run in place: put the image on a file system without noexec"));
    }
    Ok((file, bytes))
}

/// Makes sure that nobody changes an image while it is open.
fn keep_unchanged(file: &File, path: &Path) -> Result<()> {
    // The signal may come before its handler is there. `Disks::check` notices that.
    // SAFETY: There is no handler.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    // SAFETY: It takes a descriptor and numbers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    let name = path.display();
    if error.raw_os_error() == Some(libc::EAGAIN) {
        return Err(Error::new(format!("another program has {name} open for writing"))
            .hint("no program may write to an image that is a part of machines' memory"));
    }
    if cannot_change(file) {
        return Ok(());
    }
    Err(Error::new(format!("cannot keep other programs from writing to {name}: {error}")).hint(
        "use a file of your own, or have root make the file immutable (`chattr +i`). `,ro` takes any file",
    ))
}

/// Returns true if a program has asked for writing to a file with a lease.
fn is_lease_broken(file: &File) -> bool {
    // SAFETY: It takes a descriptor and a number.
    let lease = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) };
    lease != libc::F_RDLCK && !cannot_change(file)
}

/// Returns true if the file system lets nobody change a file.
fn cannot_change(file: &File) -> bool {
    const GET_FLAGS: libc::c_ulong = 0x8008_6601;
    const IMMUTABLE: libc::c_long = 0x10;
    const VERITY: libc::c_long = 0x10_0000;
    let mut flags: libc::c_long = 0;
    // SAFETY: There is room for the flags.
    let asked = unsafe { libc::ioctl(file.as_raw_fd(), GET_FLAGS as _, &raw mut flags) };
    asked == 0 && flags & (IMMUTABLE | VERITY) != 0
}

/// Returns the bytes of a file that are in the host's page cache.
///
/// # Errors
/// If the host does not say so: it tells the file's owner and those who may write to it.
pub fn cached(path: &Path) -> io::Result<u64> {
    /// The number of bytes that are mapped at once.
    const PIECE: u64 = 1 << 30;
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut pages = 0;
    for at in (0..length).step_by(PIECE as usize) {
        let piece = PIECE.min(length - at) as usize;
        let (rights, offset) = (libc::PROT_READ, at.cast_signed());
        // SAFETY: A new mapping where the host likes, from which nothing is read.
        let mapped = unsafe {
            libc::mmap(std::ptr::null_mut(), piece, rights, libc::MAP_SHARED, file.as_raw_fd(), offset)
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut states = vec![0_u8; piece.div_ceil(PAGE as usize)];
        // SAFETY: The range was mapped above, and there is a byte for each of its pages.
        let asked = unsafe { libc::mincore(mapped, piece, states.as_mut_ptr()) };
        let error = io::Error::last_os_error();
        // SAFETY: The mapping was made above.
        unsafe { libc::munmap(mapped, piece) };
        if asked != 0 {
            return Err(error);
        }
        pages += states.iter().filter(|state| **state & 1 != 0).count() as u64;
    }
    Ok(pages * PAGE)
}

fn is_without_execution(file: &File) -> bool {
    // SAFETY: All zeros are a valid structure, which the library fills.
    let mut of: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: There is room for the answer.
    unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut of) == 0 && of.f_flag & libc::ST_NOEXEC != 0 }
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs::{self, OpenOptions},
        io::Write,
        os::unix::fs::OpenOptionsExt,
    };

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn option(path: &Path, access: DiskAccess) -> DiskOption {
        DiskOption { path: path.to_owned(), access }
    }

    fn image(directory: &Path, name: &str, bytes: u64) -> PathBuf {
        let path = directory.join(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    #[test]
    fn disks_lie_above_the_memory_and_name_their_use() {
        let directory = tempfile::tempdir().unwrap();
        let [a, b, c] = [("a", 512), ("b", 3 * MIB), ("c", MIB)]
            .map(|(name, bytes)| image(directory.path(), name, bytes));
        let options =
            [option(&a, DiskAccess::Shared), option(&b, DiskAccess::Private), option(&c, DiskAccess::Read)];
        let disks = Disks::open(&options, &[], 64 * MIB).unwrap();
        let places: Vec<_> = disks.iter().map(|disk| (disk.pages(), disk.end(), disk.is_private())).collect();
        let (first, second) = (128 * MIB / PAGE, 256 * MIB / PAGE);
        assert_eq!(
            places,
            [(first..first + 1, first + 512, false), (second..second + 768, second + 1024, true)]
        );
        assert_eq!((disks.ram(), disks.size()), (64 * MIB, 260 * MIB));
        let sizes: Vec<_> = disks.devices().iter().map(|disk| (disk.start, disk.size)).collect();
        assert_eq!(sizes, [(128 * MIB, 2 * MIB), (256 * MIB, 4 * MIB)]);
        let again = disks.again().unwrap();
        assert_eq!(again.size(), disks.size());
    }

    #[test]
    fn an_image_that_others_write_to_is_refused_and_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(directory.path(), "image", 4096);
        let open = || Disks::open(&[option(&path, DiskAccess::Shared)], &[], MIB);
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        assert!(open().unwrap_err().message().contains("open for writing"));
        drop(writer);
        let disks = open().unwrap();
        let again = disks.again().unwrap();
        disks.check().unwrap();
        // A program that does not want to wait until the machines have ended.
        let other = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        assert_eq!(other.unwrap_err().raw_os_error(), Some(libc::EWOULDBLOCK));
        for disks in [&disks, &again] {
            assert!(disks.check().unwrap_err().message().contains("writes to"));
        }
        drop((disks, again));
        OpenOptions::new().write(true).open(&path).unwrap().write_all(b"x").unwrap();
    }

    #[test]
    fn the_cache_of_a_file_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        fs::write(&path, vec![1; 3 * PAGE as usize]).unwrap();
        assert_eq!(cached(&path).unwrap(), 3 * PAGE);
        File::options().write(true).open(&path).unwrap().set_len(MIB).unwrap();
        assert!(cached(&path).unwrap() < MIB);
    }

    #[test]
    fn only_files_with_something_in_them_are_images() {
        let directory = tempfile::tempdir().unwrap();
        let refuse = |path: &Path, word: &str| {
            let error = Disks::open(&[option(path, DiskAccess::Private)], &[], MIB).unwrap_err();
            assert!(error.message().contains(word), "{error}");
        };
        refuse(directory.path(), "is no file");
        refuse(&directory.path().join("nowhere"), "nowhere");
        refuse(Path::new("/dev/null"), "is no file");
        refuse(&image(directory.path(), "empty", 0), "is empty");
        refuse(&image(directory.path(), "odd", 1000), "no whole sectors");
        let path = directory.path().join("qcow");
        fs::write(&path, [b"QFI\xFB".to_vec(), vec![0; 508]].concat()).unwrap();
        refuse(&path, "qcow2");
    }

    proptest! {
        #[test]
        fn no_disk_covers_interrupt_controllers(size in 0..(8_u64 << 30), bytes in 1..(8_u64 << 30)) {
            let start = place(size, bytes);
            let end = start + bytes.next_multiple_of(UNIT);
            prop_assert!(start >= size && start.is_multiple_of(SECTION));
            prop_assert!(start >= apic::BASE + apic::SIZE || end <= apic::BASE);
        }
    }
}
