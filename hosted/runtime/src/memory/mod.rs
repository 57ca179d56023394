//! The guest's memory: a file without a name. It is mapped once as the kernel's direct map, and in
//! parts at the addresses in the guest's page tables. A clone has several files, of which it shares some with
//! other machines ([`layers`]).
//!
//! Other processors of the guest, which are other processes, the host's kernel and a disk's ring
//! write to the memory at any time. So Rust has no reference to it. The monitor copies out of it
//! and into it, as if each byte were accessed atomically ([`Memory::read`]). It uses the entries of
//! page tables as atomic numbers.

pub mod disks;
pub mod layers;
pub mod reverse;

use std::{
    ffi::CStr,
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

use crate::{
    error::{Error, Result},
    layout::{self, DIRECT_MAP, PAGE},
    process,
    saved::Kind,
};
use disks::Disks;
use layers::{Layers, Run};

/// The rights to mapped memory. Reading is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    pub write: bool,
    pub execute: bool,
}

impl Rights {
    /// Returns true if these rights are no more than others.
    #[must_use]
    pub fn are_within(self, others: Self) -> bool {
        self.write <= others.write && self.execute <= others.execute
    }

    fn flags(self) -> i32 {
        let write = if self.write { libc::PROT_WRITE } else { 0 };
        let execute = if self.execute { libc::PROT_EXEC } else { 0 };
        libc::PROT_READ | write | execute
    }
}

/// The guest's memory.
#[derive(Debug)]
pub struct Memory {
    file: OwnedFd,
    size: u64,
    /// The address of the monitor's own mapping, which may write to pages that are read-only for
    /// the kernel.
    window: usize,
    /// None if all of it is in one file.
    layers: Option<&'static Layers>,
    disks: Arc<Disks>,
}

impl Memory {
    /// Makes the memory, and maps it at the addresses of [`crate::layout`].
    ///
    /// # Errors
    /// If the host does not have so much memory, or the addresses are taken.
    #[cfg(not(miri))]
    pub fn new(size: u64) -> Result<Self> {
        Self::with_flags(c"mercury-hosted", size, 0)
    }

    /// Makes memory with disks, whose pages are the machine's own when it writes to them.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn with_disks(disks: Arc<Disks>, most_pieces: u32) -> Result<Self> {
        let (ram, size) = (disks.ram() / PAGE, disks.size());
        // All of the memory is the machine's own, so this file stays empty.
        let base = new_file(c"mercury-base", size, libc::MFD_ALLOW_SEALING)?;
        seal(&base)?;
        let runs: Vec<Run> = std::iter::once(Run { pages: 0..ram, level: 1 }).chain(disks.runs()).collect();
        let files = std::iter::once(base.as_raw_fd());
        let memory = Self::over(files, size, &runs, disks, most_pieces, None)?;
        // It stays open in this process and those that begin as copies of it.
        std::mem::forget(base);
        Ok(memory)
    }

    /// Makes memory that can become a base ([`Self::into_base`]). It has room for changed pages of disks.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn for_base(disks: Arc<Disks>) -> Result<Self> {
        let memory = Self::with_flags(c"mercury-base", disks.size(), libc::MFD_ALLOW_SEALING)?;
        Ok(Self { disks, ..memory })
    }

    /// Makes a base of the memory: nobody can write to it any more. Its mappings go.
    ///
    /// # Errors
    /// If the host refuses, because another process has the memory mapped.
    pub fn into_base(self) -> Result<OwnedFd> {
        for address in [DIRECT_MAP as usize, self.window] {
            // SAFETY: It is this memory's own mapping, and nothing points into it any more.
            unsafe { libc::munmap(ptr::with_exposed_provenance_mut(address), self.size as usize) };
        }
        seal(&self.file).map(|()| self.file)
    }

    #[cfg_attr(miri, expect(unused))]
    fn with_flags(name: &CStr, size: u64, flags: libc::c_uint) -> Result<Self> {
        let file = new_file(name, size, flags)?;
        let mut memory = Self { file, size, window: 0, layers: None, disks: no_disks(size) };
        memory.map_new(DIRECT_MAP, size, memory.descriptor(), Rights { write: true, execute: true })?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let file = memory.descriptor();
        // SAFETY: A new mapping where the host likes.
        let window = unsafe { libc::mmap(ptr::null_mut(), size as usize, rights, libc::MAP_SHARED, file, 0) };
        if window == libc::MAP_FAILED {
            return Err(Error::system("map the guest's memory for the monitor").hint(
                "the guest's memory is mapped twice: give the guest less with --memory, or raise ulimit -v",
            ));
        }
        memory.window = window.expose_provenance();
        Ok(memory)
    }

    /// Makes memory over sealed files that other machines have, too. The files must be at least as large, and
    /// stay open. `runs`, `most_pieces` and `own` are those of [`Layers::new`].
    ///
    /// # Errors
    /// If the host does not have so much memory, or the addresses are taken.
    pub fn over(
        files: impl Iterator<Item = RawFd> + Clone,
        size: u64,
        runs: &[Run],
        disks: Arc<Disks>,
        most_pieces: u32,
        own: Option<OwnedFd>,
    ) -> Result<Self> {
        let lowest = files.clone().next().unwrap_or(-1);
        // SAFETY: The caller's files stay open.
        let file = unsafe { BorrowedFd::borrow_raw(lowest) }.try_clone_to_owned();
        // The lowest file stands for all where a descriptor is enough.
        let file = file.map_err(|_| Error::system("keep the guest's memory"))?;
        let mut memory = Self { file, size, window: 0, layers: None, disks };
        memory.map_new(DIRECT_MAP, size, memory.descriptor(), Rights { write: false, execute: true })?;
        let layers = Layers::new(files, (DIRECT_MAP, size), runs, &memory.disks, most_pieces, own)?;
        (memory.window, memory.layers) = (layers.window(), Some(layers));
        Ok(memory)
    }

    /// Makes the memory of the program's own: Miri knows no mappings. Only the monitor's mapping
    /// exists.
    ///
    /// # Errors
    /// If the host does not open `/dev/null`, which stands for the file.
    #[cfg(miri)]
    pub fn new(size: u64) -> Result<Self> {
        let file = std::fs::File::open("/dev/null")
            .map_err(|error| Error::file("open", std::path::Path::new("/dev/null"), error))?;
        let window = without_host(size as usize).expose_provenance();
        Ok(Self { file: file.into(), size, window, layers: None, disks: no_disks(size) })
    }

    #[cfg_attr(miri, expect(unused))]
    fn map_new(&self, address: u64, length: u64, file: RawFd, rights: Rights) -> Result<()> {
        if process::map_free(address, length, rights.flags(), libc::MAP_SHARED, (file, 0)) {
            return Ok(());
        }
        let what = format!("map the guest's memory at {address:#x}");
        Err(Error::system(&what).hint(
            "another mapping of this process is there, or the host forbids memory that can be \
            written and executed (SELinux: deny_execmem)",
        ))
    }

    /// Maps a part of the memory at an address of the guest's choice, over any mapping there. Pages that are
    /// not the machine's own cannot be written to there, whatever the rights are. Returns the ranges of
    /// physical addresses of such pages.
    ///
    /// # Errors
    /// The error of the host. Then a part may be mapped.
    pub fn map(
        &self,
        address: u64,
        length: u64,
        physical: u64,
        rights: Rights,
    ) -> io::Result<Vec<Range<u64>>> {
        debug_assert!(layout::is_translated(address) && self.contains(physical, length));
        let Some(layers) = self.layers else {
            return Self::map_file(address, length, physical, rights, self.descriptor()).map(|()| Vec::new());
        };
        let mut base = Vec::new();
        let (mut at, end) = (physical, physical + length);
        while at < end {
            let length = layers.same(at / PAGE, end.div_ceil(PAGE)) * PAGE;
            let (file, offset, rights) = layers.place(at / PAGE, rights);
            Self::map_file(address + (at - physical), length, offset, rights, file)?;
            if !layers.is_own(at / PAGE) {
                base.push(at..at + length);
            }
            at += length;
        }
        Ok(base)
    }

    fn map_file(address: u64, length: u64, offset: u64, rights: Rights, file: RawFd) -> io::Result<()> {
        // SAFETY: The addresses are the guest's own, of which the monitor keeps nothing (layout).
        match unsafe { map_over(address, length, rights, file, offset) } {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    }

    /// Maps the machine's pages again after a fork, in a process that has mapped nothing else of them.
    ///
    /// # Errors
    /// If the host has no room for the mappings.
    pub fn follow(&self) -> Result<()> {
        let behind = self.layers.filter(|layers| layers.is_behind());
        match behind.is_none_or(|layers| layers.follow(layers.now().0, true)) {
            true => Ok(()),
            false => Err(Error::system("map the guest's memory after a fork")),
        }
    }

    /// Returns the layers of the memory of a clone.
    #[must_use]
    pub fn layers(&self) -> Option<&'static Layers> {
        self.layers
    }

    /// Returns the part of a range of physical addresses around a page that is in the same file as the page.
    #[must_use]
    pub fn same_file(&self, page: u64, range: Range<u64>) -> Range<u64> {
        let Some(layers) = self.layers else { return range };
        let number = page / PAGE;
        let before = layers.same_before(number, range.start / PAGE);
        let after = layers.same(number, range.end / PAGE);
        page - before * PAGE..page + after * PAGE
    }

    /// Removes mappings of a range that the guest translates. The host may have no room for the
    /// remains on both sides. Then all mappings between the same borders go, and the guest's faults
    /// bring back the pages that it uses.
    ///
    /// # Panics
    /// If the host removes nothing: the guest must not go on with these mappings.
    pub fn unmap(&self, address: u64, length: u64) {
        debug_assert!(layout::is_translated(address));
        let all = self.translated_around(address);
        let is_done = unmap(address, length) || unmap(all.start, all.end - all.start);
        assert!(is_done, "the host does not unmap {address:#x}: {}", io::Error::last_os_error());
    }

    /// Returns the range around an address that the guest translates.
    fn translated_around(&self, address: u64) -> Range<u64> {
        match address {
            layout::USER_START..layout::THUNKS => layout::USER_START..layout::THUNKS,
            layout::FIXMAP..layout::POINTERS => layout::FIXMAP..layout::POINTERS,
            ..layout::USER_END => DIRECT_MAP + self.size..layout::USER_END,
            _ => layout::VMALLOC..layout::ENTRY_AREA_END,
        }
    }

    /// Reads the files themselves, where pages that were never used stay so. Other processes must not write.
    /// Pages that are as in a disk's image are read as zeros.
    ///
    /// # Errors
    /// The error of the host.
    pub fn read_file(&self, physical: u64, into: &mut [u8]) -> io::Result<()> {
        let Some(layers) = self.layers else { return read_at(self.descriptor(), physical, into) };
        let mut done = 0;
        while done < into.len() {
            let at = physical + done as u64;
            let end = into.len().min(done + Self::rest_of_page(at) as usize);
            let none = Rights { write: false, execute: false };
            match layers.is_of_image(at / PAGE) {
                true => into[done..end].fill(0),
                false => read_at(layers.place(at / PAGE, none).0, at, &mut into[done..end])?,
            }
            done = end;
        }
        Ok(())
    }

    /// Returns the kind of a page, for a file of the machine.
    #[must_use]
    pub fn kind(&self, page: u64) -> Kind {
        match self.layers.filter(|_| self.disks.iter().any(|disk| disk.pages().contains(&page))) {
            None => Kind::Memory,
            Some(layers) if layers.is_of_image(page) => Kind::Image,
            Some(_) => Kind::Changed,
        }
    }

    /// Makes all of the memory zero, as it was at first. The guest must not have run.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn erase(&self) -> Result<()> {
        const HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let all = Rights { write: true, execute: false };
        // The guest's first page is the machine's own, or the memory is in one file.
        let file = self.layers.map_or(self.descriptor(), |layers| layers.place(0, all).0);
        // SAFETY: It takes a descriptor and numbers.
        match unsafe { libc::fallocate(file, HOLE, 0, self.size.cast_signed()) } {
            0 => Ok(()),
            _ => Err(Error::system("make the guest's memory empty")),
        }
    }

    /// Returns true if the guest has this memory.
    #[must_use]
    pub fn contains(&self, physical: u64, length: u64) -> bool {
        physical < self.size && length <= self.size - physical
    }

    /// Returns the descriptor of the file in this process if all of the memory is in one.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns the descriptors of all files of the memory.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + Clone {
        std::iter::once(self.descriptor()).chain(self.layers.into_iter().flat_map(Layers::descriptors))
    }

    /// Returns the address of guest memory in the monitor's own mapping.
    #[must_use]
    pub fn pointer(&self, physical: u64, length: u64) -> Option<*mut u8> {
        self.contains(physical, length)
            .then(|| ptr::with_exposed_provenance_mut(self.window + physical as usize))
    }

    /// Returns the address of guest memory in the monitor's own mapping, for a write: the pages of a clone
    /// become its own. Returns nothing if the range is outside, or the host has no room.
    fn target(&self, physical: u64, length: u64) -> Option<*mut u8> {
        let at = self.pointer(physical, length)?;
        if let Some(layers) = self.layers {
            let mut pages = physical / PAGE..(physical + length).div_ceil(PAGE);
            pages.all(|page| layers.make_own(page)).then_some(())?;
        }
        Some(at)
    }

    /// Returns the physical address of an address in the direct map.
    #[must_use]
    pub fn direct(&self, address: u64) -> Option<u64> {
        let physical = address.checked_sub(DIRECT_MAP)?;
        self.contains(physical, 1).then_some(physical)
    }

    /// Returns true if all of a large page lies at addresses that the guest translates. Its direct
    /// map may end in the middle of one.
    #[must_use]
    pub fn has_room(&self, address: u64, size: u64) -> bool {
        let is_free = |at| layout::is_translated(at) && self.direct(at).is_none();
        is_free(address) && is_free(address + size - 1)
    }

    /// Returns the size in bytes, with disks.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the size without disks, in bytes.
    #[must_use]
    pub fn ram(&self) -> u64 {
        self.disks.ram()
    }

    /// Returns the disks in the memory.
    #[must_use]
    pub fn disks(&self) -> &Arc<Disks> {
        &self.disks
    }

    /// Copies into the memory. Returns nothing if the range is outside. Another processor that
    /// reads meanwhile may see a part of the copy; of a range aligned to eight bytes it sees each
    /// word whole.
    #[must_use]
    pub fn write(&self, physical: u64, bytes: &[u8]) -> Option<()> {
        let to = self.target(physical, bytes.len() as u64)?;
        // SAFETY: The range was checked, and stays mapped.
        unsafe { store(to, bytes) };
        Some(())
    }

    /// Copies out of the memory, as [`Self::write`] copies into it. Returns nothing if the range is
    /// outside.
    #[must_use]
    pub fn read(&self, physical: u64, into: &mut [u8]) -> Option<()> {
        let from = self.pointer(physical, into.len() as u64)?;
        // SAFETY: The range was checked, and stays mapped.
        unsafe { load(from, into) };
        Some(())
    }

    /// Copies from one range of the memory to another, from the lowest address on. Returns nothing
    /// if a range is outside.
    #[must_use]
    pub fn copy(&self, to: u64, from: u64, length: u64) -> Option<()> {
        let (to, from) = (self.target(to, length)?, self.pointer(from, length)?);
        // SAFETY: Both ranges were checked, and stay mapped.
        unsafe { copy(to, from, length as usize) };
        Some(())
    }

    /// Fills a range with zeros. Returns nothing if the range is outside.
    #[must_use]
    pub fn clear(&self, physical: u64, length: u64) -> Option<()> {
        let to = self.target(physical, length)?;
        // SAFETY: The range was checked, and stays mapped.
        unsafe { clear(to, length as usize) };
        Some(())
    }

    /// Returns the number of bytes before the first zero of a range, or its length if it has no
    /// zero. Returns nothing if the range is outside.
    #[must_use]
    pub fn before_zero(&self, physical: u64, length: u64) -> Option<u64> {
        self.pointer(physical, length)?;
        let mut piece = [0; 64];
        let mut done = 0;
        while done < length {
            let some = (length - done).min(piece.len() as u64) as usize;
            self.read(physical + done, &mut piece[..some])?;
            if let Some(at) = piece[..some].iter().position(|&byte| byte == 0) {
                return Some(done + at as u64);
            }
            done += some as u64;
        }
        Some(length)
    }

    /// Returns a number of 64 bits, read at once if its address is aligned.
    #[must_use]
    pub fn read_long(&self, physical: u64) -> Option<u64> {
        if let Some(word) = self.word(physical) {
            return Some(word.load(Ordering::Relaxed));
        }
        let mut bytes = [0; 8];
        self.read(physical, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Writes a number of 64 bits, at once if its address is aligned.
    #[must_use]
    pub fn write_long(&self, physical: u64, value: u64) -> Option<()> {
        self.write(physical, &value.to_le_bytes())
    }

    /// Returns a word of the memory. Returns nothing if the address is outside or not aligned.
    fn word(&self, physical: u64) -> Option<&AtomicU64> {
        // SAFETY: `pointer` has checked the range, which stays mapped as long as this lives.
        self.pointer(physical, 8).and_then(|at| unsafe { word(at) })
    }

    /// Sets bits of a page table's entry if the entry is unchanged: other processors may clear it
    /// at any time. Returns true if it was unchanged.
    #[must_use]
    pub fn mark(&self, physical: u64, was: u64, bits: u64) -> bool {
        let (Some(_), Some(entry)) = (self.target(physical, 8), self.word(physical)) else { return false };
        entry.compare_exchange(was, was | bits, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Returns the number of bytes from an address to the end of its page.
    #[must_use]
    pub fn rest_of_page(address: u64) -> u64 {
        PAGE - address % PAGE
    }
}

/// Returns the disks of memory that has none.
fn no_disks(ram: u64) -> Arc<Disks> {
    Arc::new(Disks::none(ram))
}

/// Maps a file from an offset on, over any mapping at an address. Returns true if the host has done so.
///
/// # Safety
/// The address is the guest's own, or that of a mapping of the same memory.
unsafe fn map_over(address: u64, length: u64, rights: Rights, file: RawFd, offset: u64) -> bool {
    // SAFETY: The caller vouches for the address.
    let mapped = unsafe {
        libc::mmap(
            ptr::with_exposed_provenance_mut(address as usize),
            length as usize,
            rights.flags(),
            libc::MAP_SHARED | libc::MAP_FIXED,
            file,
            offset.cast_signed(),
        )
    };
    mapped != libc::MAP_FAILED
}

/// Reads a file at an offset.
///
/// # Errors
/// The error of the host.
pub(crate) fn read_at(file: RawFd, at: u64, into: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        let rest = &mut into[done..];
        let offset = (at + done as u64).cast_signed();
        // SAFETY: There is room for so many bytes.
        let read = unsafe { libc::pread(file, rest.as_mut_ptr().cast(), rest.len(), offset) };
        match usize::try_from(read) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Returns the size of a file in memory, in blocks of 512 bytes. It is zero if the host does not tell.
pub(crate) fn blocks(file: RawFd) -> u64 {
    // SAFETY: All zeros are a valid value.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    // The library's function may use another call, which the sandbox does not allow.
    // SAFETY: There is room for the answer.
    match unsafe { libc::syscall(libc::SYS_fstat, file, &raw mut about) } {
        0 => about.st_blocks.cast_unsigned(),
        _ => 0,
    }
}

/// Makes sure that nobody writes to a file any more.
///
/// # Errors
/// If the host refuses, because a process has the file mapped for writing.
pub fn seal(file: &OwnedFd) -> Result<()> {
    const SEALS: i32 = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: It takes a descriptor and numbers.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } {
        0 => Ok(()),
        _ => Err(Error::system("seal the memory that machines share")),
    }
}

/// Returns true if nobody writes to a file any more.
#[must_use]
pub fn is_sealed(file: &OwnedFd) -> bool {
    // SAFETY: It takes a descriptor and a number.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_WRITE != 0
}

/// Holes of a file that are shorter are not worth a mapping.
const LEAST_HOLE: u64 = 64;
/// The largest number of holes that are.
const MOST_HOLES: usize = 64;

/// Returns the pages of the largest holes of a file, in order.
pub(crate) fn holes(file: RawFd, size: u64) -> Vec<Range<u64>> {
    // SAFETY: It takes a descriptor and numbers.
    let seek = |at: u64, what| u64::try_from(unsafe { libc::lseek(file, at.cast_signed(), what) }).ok();
    let mut found = Vec::new();
    let mut at = 0;
    while at < size {
        let start = seek(at, libc::SEEK_HOLE).unwrap_or(size);
        // There is no data after the last hole.
        let end = seek(start, libc::SEEK_DATA).unwrap_or(size).min(size);
        found.push(start.div_ceil(PAGE)..end / PAGE);
        at = end.max(at + PAGE);
    }
    found.retain(|hole| hole.end >= hole.start + LEAST_HOLE);
    found.sort_by_key(|hole| std::cmp::Reverse(hole.end - hole.start));
    found.truncate(MOST_HOLES);
    found.sort_by_key(|hole| hole.start);
    found
}

/// Makes a file of zeros that is in no folder. The name is for `/proc`, and `flags` are those of
/// `memfd_create(2)`.
///
/// # Errors
/// If the host refuses it, or its size.
pub fn new_file(name: &CStr, size: u64, flags: libc::c_uint) -> Result<OwnedFd> {
    let file = create(name, flags).map_err(|_| Error::system("make the guest's memory"))?;
    // SAFETY: It takes a descriptor and a number.
    if unsafe { libc::ftruncate(file.as_raw_fd(), size.cast_signed()) } != 0 {
        return Err(Error::system("give the guest its memory")
            .hint("give the guest less with --memory, or raise ulimit -f"));
    }
    Ok(file)
}

/// Makes an empty file that is in no folder.
///
/// # Errors
/// If the host refuses it.
pub(crate) fn create(name: &CStr, flags: libc::c_uint) -> io::Result<OwnedFd> {
    with_allowed_flags(flags, |flags| {
        // SAFETY: The name is a string with its end.
        let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | flags) };
        // SAFETY: The descriptor was made above and has no other owner.
        if file < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(file) }) }
    })
}

/// Makes a file. Hosts with Linux 6.3 to 6.5 may refuse files from which a program could be started
/// (vm.memfd_noexec=2). No program is, and mappings may have code all the same. Older hosts do not know the
/// flag.
fn with_allowed_flags<T>(flags: libc::c_uint, make: impl Fn(libc::c_uint) -> io::Result<T>) -> io::Result<T> {
    match make(flags) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => make(flags | libc::MFD_NOEXEC_SEAL),
        made => made,
    }
}

/// Returns zeroed memory that stays, for Miri.
#[cfg(miri)]
pub(crate) fn without_host(length: usize) -> *mut u8 {
    let layout = std::alloc::Layout::from_size_align(length.max(1), PAGE as usize);
    // SAFETY: The size is not zero.
    unsafe { std::alloc::alloc_zeroed(layout.expect("a size")) }
}

/// Longer copies are left to the processor's own instruction, which takes dozens of cycles to begin.
const SHORT: usize = 64;

/// Returns the word at a place of the guest's memory, if the place is aligned.
///
/// # Safety
/// The guest's memory has eight bytes there.
unsafe fn word<'a>(at: *mut u8) -> Option<&'a AtomicU64> {
    // SAFETY: The caller vouches for the place, which stays mapped; Rust has no other kind of
    // reference to it.
    at.addr().is_multiple_of(8).then(|| unsafe { AtomicU64::from_ptr(at.cast()) })
}

/// Returns the byte at a place of the guest's memory.
///
/// # Safety
/// The guest's memory has that byte.
unsafe fn byte<'a>(at: *mut u8) -> &'a AtomicU8 {
    // SAFETY: As for `word`.
    unsafe { AtomicU8::from_ptr(at) }
}

/// Copies out of the guest's memory.
///
/// # Safety
/// The guest's memory has so many bytes there.
unsafe fn load(from: *mut u8, into: &mut [u8]) {
    if into.len() > SHORT && !cfg!(miri) {
        // SAFETY: The caller vouches for the source; the target is a slice.
        return unsafe { copy(into.as_mut_ptr(), from, into.len()) };
    }
    let aligned = if from.addr().is_multiple_of(8) { into.len() & !7 } else { 0 };
    for (index, to) in into[..aligned].as_chunks_mut::<8>().0.iter_mut().enumerate() {
        // SAFETY: The caller vouches for the place.
        let word = unsafe { word(from.wrapping_add(index * 8)) };
        *to = word.map_or(0, |word| word.load(Ordering::Relaxed)).to_ne_bytes();
    }
    for (index, to) in into.iter_mut().enumerate().skip(aligned) {
        // SAFETY: The caller vouches for the place.
        *to = unsafe { byte(from.wrapping_add(index)) }.load(Ordering::Relaxed);
    }
}

/// Copies into the guest's memory.
///
/// # Safety
/// As for [`load`].
unsafe fn store(to: *mut u8, bytes: &[u8]) {
    if bytes.len() > SHORT && !cfg!(miri) {
        // SAFETY: The caller vouches for the target; the source is a slice.
        return unsafe { copy(to, bytes.as_ptr(), bytes.len()) };
    }
    let aligned = if to.addr().is_multiple_of(8) { bytes.len() & !7 } else { 0 };
    for (index, from) in bytes[..aligned].as_chunks::<8>().0.iter().enumerate() {
        // SAFETY: The caller vouches for the place.
        if let Some(word) = unsafe { word(to.wrapping_add(index * 8)) } {
            word.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
        }
    }
    for (index, from) in bytes.iter().enumerate().skip(aligned) {
        // SAFETY: The caller vouches for the place.
        unsafe { byte(to.wrapping_add(index)) }.store(*from, Ordering::Relaxed);
    }
}

/// Copies bytes by an instruction that the compiler cannot see into. So the compiler assumes
/// nothing about the content and keeps no copy of it. Single bytes are copied, each atomically,
/// from the lowest address on.
///
/// # Safety
/// Both ranges are mapped, and each is the guest's memory or the caller's.
#[cfg(not(miri))]
unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: The caller vouches for both ranges; the direction flag is clear in Rust's code.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") length => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies bytes of the guest's memory for Miri, which knows no instructions.
///
/// # Safety
/// Both ranges are the guest's memory.
#[cfg(miri)]
unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    for at in 0..length {
        // SAFETY: The caller vouches for both places.
        let (to, from) = unsafe { (byte(to.wrapping_add(at)), byte(from.cast_mut().wrapping_add(at))) };
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Fills bytes with zeros, as [`copy`] copies.
///
/// # Safety
/// The range is the guest's memory.
#[cfg(not(miri))]
unsafe fn clear(to: *mut u8, length: usize) {
    // SAFETY: The caller vouches for the range; the direction flag is clear in Rust's code.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") length => _,
            inout("rdi") to => _,
            in("al") 0_u8,
            options(nostack, preserves_flags)
        );
    }
}

/// Fills bytes with zeros for Miri.
///
/// # Safety
/// The range is the guest's memory.
#[cfg(miri)]
unsafe fn clear(to: *mut u8, length: usize) {
    for at in 0..length {
        // SAFETY: The caller vouches for the place.
        unsafe { byte(to.wrapping_add(at)) }.store(0, Ordering::Relaxed);
    }
}

/// Removes mappings of addresses that the guest translates. Returns true if the host did.
fn unmap(address: u64, length: u64) -> bool {
    // SAFETY: The addresses are the guest's own, of which the monitor keeps nothing (layout).
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(address as usize), length as usize) == 0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{env, fs, os::unix::fs::FileExt, process::Command};

    use proptest::prelude::*;

    use super::*;
    use crate::testing::with_memory;

    /// Returns true if the host has a mapping at an address.
    fn is_mapped(address: u64) -> bool {
        let maps = fs::read_to_string("/proc/self/maps").expect("the host's list");
        maps.lines().any(|line| {
            let mut ends =
                line.split(['-', ' ']).map(|text| u64::from_str_radix(text, 16).expect("a number"));
            let (start, end) = (ends.next().expect("a start"), ends.next().expect("an end"));
            (start..end).contains(&address)
        })
    }

    /// Uses up all mappings that the host allows this process: pages that cannot be joined with
    /// their neighbours.
    fn take_all_mappings() {
        let rights = [libc::PROT_READ, libc::PROT_NONE];
        for count in 0.. {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: A new mapping where the host likes.
            let mapped =
                unsafe { libc::mmap(ptr::null_mut(), PAGE as usize, rights[count % 2], flags, -1, 0) };
            if mapped == libc::MAP_FAILED {
                return;
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        /// Tries every alignment, and lengths on both sides of the limit for the processor's own
        /// instruction.
        #[test]
        fn copies_change_only_their_own_bytes(
            at in 0_u64..24, bytes in proptest::collection::vec(any::<u8>(), 0..200), to in 1000_u64..1024,
        ) {
            with_memory(|memory| {
                let length = bytes.len() as u64;
                memory.clear(0, 2048).unwrap();
                memory.write(at, &bytes).unwrap();
                memory.copy(to, at, length).unwrap();
                let mut all = [0; 2048];
                memory.read(0, &mut all).unwrap();
                let mut expected = [0; 2048];
                for start in [at as usize, to as usize] {
                    expected[start..start + bytes.len()].copy_from_slice(&bytes);
                }
                assert!(all == expected);
                let mut part = vec![0; bytes.len()];
                memory.read(to, &mut part).unwrap();
                assert_eq!(part, bytes);
                let zero = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
                assert_eq!(memory.before_zero(at, length), Some(zero as u64));
                memory.clear(at, length).unwrap();
                assert!(memory.read(at, &mut part).is_some() && part.iter().all(|&byte| byte == 0));
            });
        }
    }

    /// Stands for other processors that write to page tables while the monitor walks them.
    #[test]
    fn a_word_is_read_and_written_whole_while_another_thread_does_the_same() {
        const ROUNDS: u64 = if cfg!(miri) { 200 } else { 200_000 };
        const AT: u64 = 0x800;
        with_memory(|memory| {
            memory.write_long(AT, 0).unwrap();
            let window = memory.window;
            let is_whole = |word: u64| word.to_le_bytes().iter().all(|&byte| byte == word as u8);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let memory = Memory {
                        file: memory.file.try_clone().unwrap(),
                        size: memory.size,
                        window,
                        layers: None,
                        disks: Arc::clone(&memory.disks),
                    };
                    (0..ROUNDS).for_each(|round| memory.write(AT, &[round as u8; 8]).unwrap());
                });
                for round in 0..ROUNDS {
                    assert!(is_whole(memory.read_long(AT).unwrap()));
                    let mut bytes = [0; 24];
                    memory.read(AT - 8, &mut bytes).unwrap();
                    assert!(is_whole(u64::from_le_bytes(bytes[8..16].try_into().unwrap())));
                    memory.write_long(AT, u64::from_le_bytes([round as u8; 8])).unwrap();
                }
            });
        });
    }

    #[test]
    fn large_holes_are_found() {
        const SIZE: u64 = 1000 * PAGE;
        let file = fs::File::from(new_file(c"test", SIZE, 0).unwrap());
        assert_eq!(holes(file.as_raw_fd(), SIZE), std::iter::once(0..1000).collect::<Vec<_>>());
        for page in [10, 11, 80, 500, 999] {
            file.write_all_at(&[1], page * PAGE + 7).unwrap();
        }
        assert_eq!(holes(file.as_raw_fd(), SIZE), [12..80, 81..500, 501..999]);
        file.write_all_at(&vec![1; SIZE as usize], 0).unwrap();
        assert!(holes(file.as_raw_fd(), SIZE).is_empty());
    }

    /// Stands for hosts with Linux 6.3 to 6.5, where the setting is stricter, and for older ones.
    #[test]
    fn a_file_without_programs_is_made_where_others_are_refused() {
        let (asked, most) = (std::cell::RefCell::new(Vec::new()), libc::MFD_ALLOW_SEALING);
        let refuse = |error: i32| {
            asked.borrow_mut().clear();
            with_allowed_flags(most, |flags| {
                asked.borrow_mut().push(flags);
                let is_allowed = flags & libc::MFD_NOEXEC_SEAL != 0;
                if is_allowed { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
            })
        };
        assert!(refuse(libc::EACCES).is_ok());
        assert_eq!(*asked.borrow(), [most, most | libc::MFD_NOEXEC_SEAL]);
        assert!(refuse(libc::EMFILE).is_err());
        assert_eq!(*asked.borrow(), [most]);
    }

    /// Runs in a process of its own, with a setting of the host's that only processes there have.
    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no settings")]
    fn a_host_that_forbids_programs_in_memory_has_memory_for_machines() {
        const NAME: &str = "memory::tests::a_host_that_forbids_programs_in_memory_has_memory_for_machines";
        const INSIDE: &str = "MERCURY_TEST_WITHOUT_PROGRAMS";
        const LEFT_OUT: i32 = 77;
        if env::var_os(INSIDE).is_none() {
            let program = env::current_exe().expect("this program");
            let script =
                format!("echo 2 > /proc/sys/vm/memfd_noexec || exit {LEFT_OUT}; exec \"$0\" --exact {NAME}");
            let mut again = Command::new("unshare");
            again.args(["--pid", "--fork", "--mount-proc", "sh", "-c", &script]).arg(program);
            let output = again.env(INSIDE, "1").output().expect("the test");
            let is_left_out = [1, LEFT_OUT].map(Some).contains(&output.status.code())
                && !String::from_utf8_lossy(&output.stdout).contains("running");
            assert!(output.status.success() || is_left_out, "{output:?}");
            if is_left_out {
                println!("left out: the setting needs root, and a kernel from 6.3 on");
            }
            return;
        }
        let memory = Memory::new(1 << 20).expect("memory");
        memory.map(0x10_0000_0000, PAGE, 0, Rights { write: true, execute: true }).expect("a mapping");
        let base = new_file(c"mercury-base", PAGE, libc::MFD_ALLOW_SEALING).expect("a file");
        seal(&base).expect("a seal");
        assert!(is_sealed(&base));
    }

    /// Runs in a process of its own, because it leaves the host no mapping.
    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no mappings")]
    fn a_page_goes_though_the_host_has_no_room_for_the_rest() {
        const NAME: &str = "memory::tests::a_page_goes_though_the_host_has_no_room_for_the_rest";
        const INSIDE: &str = "MERCURY_TEST_WITHOUT_MAPPINGS";
        const AT: u64 = 0x10_0000_0000;
        if env::var_os(INSIDE).is_none() {
            let program = env::current_exe().expect("this program");
            let mut again = Command::new(program);
            let output = again.args(["--exact", NAME]).env(INSIDE, "1").output().expect("the test");
            assert!(output.status.success(), "{output:?}");
            return;
        }
        let memory = Memory::new(1 << 20).expect("memory");
        let rights = Rights { write: true, execute: false };
        memory.map(AT, 3 * PAGE, 0, rights).expect("a mapping");
        memory.map(layout::VMALLOC, PAGE, 0, rights).expect("a mapping");
        take_all_mappings();
        assert!(!unmap(AT + PAGE, PAGE), "the host had room");
        memory.unmap(AT + PAGE, PAGE);
        assert!(!is_mapped(AT + PAGE) && is_mapped(layout::VMALLOC) && is_mapped(DIRECT_MAP));
    }
}
