//! Layers of the guest's memory: pages that many machines have in common, and the machine's own pages.
//!
//! Each page of the guest is in one of several files, at the same offset. The file's number is the page's
//! *level*. The lowest levels are sealed: nobody can write to them, and other machines have them, too. The
//! machine's own file is the highest level. This is Disco's pmap (paper 002, section 4.2), kept as a byte for
//! each page. A page becomes the machine's own at its first write: the monitor copies it, maps the own file
//! there, and writes the page's number to a log. All processes of the machine share the levels and the log.
//! Each process maps what is new in the log before it runs the guest, so nobody reads a page that has
//! become old.
//!
//! A fork of the running machine ([`Layers::freeze`]) makes a level of the own file. The next file is the
//! machine's own from then on, and the log begins anew. Each process follows ([`Layers::follow`]): it maps
//! the pages of the former own file again, for reading. A process that waits for its turn is woken for it.
//! The former own file can be sealed when all processes have followed.
//!
//! Images of disks ([`super::disks`]) have levels of their own, from [`disks::LEVEL`] on. A page of an image
//! has another offset in its file than in the memory. An image has fewer pages than the memory, and nobody
//! writes to it through the memory.
//!
//! A region is such a level, too. But machines write to its pages as to their own: no page is copied.
//!
//! Two kinds of writes make a page the machine's own. Writes of the guest fault, and reach
//! [`Machine::page_fault`](crate::machine::Machine::page_fault). The monitor writes through a mapping of its
//! own, the *window*, and calls [`Layers::make_own`] before. Only devices write there by themselves: their
//! writes fault, and the handler of signals calls [`own_at`]. The host's kernel does not fault but returns an
//! error, so buffers are touched before they are given to the host ([`mercury_devices::memory::buffer`]).

use std::{
    ops::Range,
    os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd},
    ptr,
    sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering},
};

use super::{
    Rights, blocks,
    disks::{self, Disks},
    holes, map_over, new_file, read_at,
};
use crate::{
    error::{Error, Result},
    layout::PAGE,
    process::{Common, map_common},
};

/// The level of each page is a byte, and this many are in a word. One process at a time changes words.
const PER_WORD: u64 = 8;
/// A word with this number of times a level has that level for all of its pages.
const ALL: u64 = 0x0101_0101_0101_0101;
/// If the own pages are in too many pieces, a whole region of so many pages becomes the machine's own.
const REGION: u64 = 512;
/// The number of pages that are looked at together for pages of zeros: 8 MiB, in a few milliseconds.
const LOOKED_AT: u64 = 2048;
/// The number of files that a machine has for its own pages, one after the other.
const OWN_FILES: usize = 8;
/// The number of times that a machine can be forked.
pub const MOST_FORKS: usize = OWN_FILES - 1;

/// The layers of this process's memory, for the handler of signals.
static LAYERS: AtomicPtr<Layers> = AtomicPtr::new(ptr::null_mut());

/// Pages that follow each other and have the same level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub pages: Range<u64>,
    pub level: u8,
}

/// A file of the memory, which is never closed.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// By this descriptor nobody can map the file for writing, also if it is not sealed. A negative number if
    /// the host does not give one: then the machine cannot be forked.
    readable: RawFd,
    /// The same as `readable` for a sealed file.
    writable: RawFd,
}

/// A disk's image.
#[derive(Clone, Debug)]
struct Image {
    file: RawFd,
    /// The pages of the image, and of the disk.
    pages: Range<u64>,
    end: u64,
    is_private: bool,
    /// True if all machines that have it write to the same pages.
    is_region: bool,
}

impl Image {
    /// Returns true if the file ends before the last page that is the image's.
    fn is_cut_off(&self) -> bool {
        // SAFETY: It takes a descriptor and numbers. Nobody reads the file at its position.
        let length = unsafe { libc::lseek(self.file, 0, libc::SEEK_END) };
        let pages = self.pages.end - self.pages.start;
        u64::try_from(length).is_ok_and(|length| length.div_ceil(PAGE) < pages)
    }
}

/// The files of the guest's memory, and where each page is.
#[derive(Debug)]
pub struct Layers {
    files: Vec<Level>,
    images: Vec<Image>,
    /// The size of the memory, in pages.
    pages: u64,
    /// The address of the monitor's own mapping.
    window: usize,
    /// The address of the kernel's direct map.
    direct: u64,
    shared: &'static Shared,
    /// The level of each page, in words.
    levels: &'static [AtomicU64],
    log: &'static [AtomicU32],
    /// The number of pieces of own pages from which regions are made own.
    most_pieces: u32,
    /// The level of the machine's own file when this process last mapped its pages.
    followed: AtomicU8,
}

/// The numbers that all processes of the machine share.
#[derive(Debug, Default)]
struct Shared {
    /// The level of the machine's own file.
    own: AtomicU8,
    /// The number of pages in the log.
    logged: AtomicU32,
    /// The number of pieces in which pages above the lowest level are.
    pieces: AtomicU32,
}

/// The machine's memory at an instant. The descriptors stay those of the machine.
#[derive(Debug)]
pub struct Frozen {
    /// The file that was the machine's own.
    pub file: RawFd,
    /// Where each page is, as for [`Layers::new`].
    pub runs: Vec<Run>,
    /// The number of files below the one that is the machine's own from now on.
    pub below: u8,
}

impl Layers {
    /// Maps sealed files and images of disks, which stay open, and the machine's own file over parts of them.
    /// Pages that are in no run have the lowest level. Pages whose level is the number of files are the
    /// machine's own from the beginning: they are zero, or as in `own`. At `direct` the lowest file must be
    /// mapped. The layers are never dropped.
    ///
    /// # Errors
    /// If the host refuses memory or a mapping.
    pub fn new(
        files: impl Iterator<Item = RawFd>,
        (direct, size): (u64, u64),
        runs: &[Run],
        disks: &Disks,
        most_pieces: u32,
        own: Option<OwnedFd>,
    ) -> Result<&'static Self> {
        let pages = size / PAGE;
        let mut files: Vec<Level> = files.map(|file| Level { readable: file, writable: file }).collect();
        let level = files.len() as u8;
        let window = map_window(files[0].readable, size)?;
        files.push(own.map_or_else(|| make_file(size), |own| Ok(with_readable(own)))?);
        for _ in 1..OWN_FILES {
            files.push(make_file(size)?);
        }
        let images = disks.iter().map(|disk| Image {
            file: disk.descriptor(),
            pages: disk.pages(),
            end: disk.end(),
            is_private: disk.is_private(),
            is_region: disk.is_region(),
        });
        let (levels, log) = (words(pages.div_ceil(PER_WORD))?, words(pages)?);
        let shared = Common::new(Shared::default())?.share();
        shared.own.store(level, Ordering::Relaxed);
        let layers = Self {
            files,
            images: images.collect(),
            pages,
            window,
            direct,
            shared,
            levels,
            log,
            most_pieces,
            followed: AtomicU8::new(level),
        };
        for Run { pages, level } in runs {
            layers.set_where(pages, 0, *level);
        }
        let runs = layers.runs();
        shared.pieces.store(Self::pieces_of(&runs), Ordering::Relaxed);
        if !layers.map(&runs, 1, true) {
            return Err(Error::system("map the machine's own memory"));
        }
        let layers = Box::leak(Box::new(layers));
        LAYERS.store(layers, Ordering::Release);
        Ok(layers)
    }

    /// Returns the descriptors of all files.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + Clone {
        let files = self.files.iter().flat_map(|file| [file.readable, file.writable]);
        files.filter(|file| *file >= 0).chain(self.images.iter().map(|image| image.file))
    }

    /// Returns the address of the monitor's own mapping.
    #[must_use]
    pub fn window(&self) -> usize {
        self.window
    }

    fn own_level(&self) -> u8 {
        self.shared.own.load(Ordering::Acquire)
    }

    fn word(&self, page: u64) -> Option<&AtomicU64> {
        self.levels.get((page / PER_WORD) as usize).filter(|_| page < self.pages)
    }

    fn level(&self, page: u64) -> u8 {
        let shift = page % PER_WORD * 8;
        self.word(page).map_or_else(|| self.own_level(), |word| (word.load(Ordering::Acquire) >> shift) as u8)
    }

    /// Returns true if a page can be written to where it is: it is in the machine's own file, or in a region.
    #[must_use]
    pub fn is_own(&self, page: u64) -> bool {
        let level = self.level(page);
        level == self.own_level() || self.image(level).is_some_and(|image| image.is_region)
    }

    fn set(&self, page: u64, level: u8) {
        let shift = page % PER_WORD * 8;
        if let Some(word) = self.word(page) {
            let others = word.load(Ordering::Relaxed) & !(0xFF << shift);
            word.store(others | u64::from(level) << shift, Ordering::Release);
        }
    }

    /// Changes the level of all pages of a range that have another one.
    fn set_where(&self, pages: &Range<u64>, from: u8, to: u8) {
        let mut page = pages.start;
        while page < pages.end {
            let is_whole = page.is_multiple_of(PER_WORD) && page + PER_WORD <= pages.end;
            let word = self
                .word(page)
                .filter(|word| is_whole && word.load(Ordering::Relaxed) == u64::from(from) * ALL);
            if let Some(word) = word {
                word.store(u64::from(to) * ALL, Ordering::Release);
                page += PER_WORD;
                continue;
            }
            if self.level(page) == from {
                self.set(page, to);
            }
            page += 1;
        }
    }

    /// Returns the first page from one on, up to an end, that does not have a level.
    fn end_of(&self, level: u8, page: u64, end: u64) -> u64 {
        let mut at = page;
        while at < end {
            let is_whole = at.is_multiple_of(PER_WORD) && at + PER_WORD <= end;
            let word = self.word(at).filter(|_| is_whole).map(|word| word.load(Ordering::Acquire));
            if word == Some(u64::from(level) * ALL) {
                at += PER_WORD;
            } else if self.level(at) == level {
                at += 1;
            } else {
                break;
            }
        }
        at
    }

    /// Returns the number of pages from one on, up to an end, that are in the same file as that one.
    #[must_use]
    pub fn same(&self, page: u64, end: u64) -> u64 {
        self.end_of(self.level(page), page, end).saturating_sub(page)
    }

    /// Returns the pages before one, down to a start, that are in the same file as that one.
    #[must_use]
    pub fn same_before(&self, page: u64, start: u64) -> u64 {
        let level = self.level(page);
        (start..page).rev().take_while(|page| self.level(*page) == level).count() as u64
    }

    /// Returns all pages, in order.
    fn runs(&self) -> Vec<Run> {
        let (mut runs, mut at) = (Vec::new(), 0);
        while at < self.pages {
            // The process that has the turn may change levels meanwhile, so each is read once.
            let (start, level) = (at, self.level(at));
            at = self.end_of(level, start + 1, self.pages);
            runs.push(Run { pages: start..at, level });
        }
        runs
    }

    /// Returns the number of pieces in which pages above the lowest level are, about.
    fn pieces_of(runs: &[Run]) -> u32 {
        (runs.len() / 2) as u32
    }

    /// Returns the file of a page, the page's offset there in bytes, and the rights that a mapping may have.
    #[must_use]
    pub fn place(&self, page: u64, rights: Rights) -> (RawFd, u64, Rights) {
        self.place_at(self.level(page), page, rights)
    }

    fn place_at(&self, level: u8, page: u64, rights: Rights) -> (RawFd, u64, Rights) {
        let for_reading = Rights { write: false, ..rights };
        if let Some(image) = self.image(level) {
            let rights = if image.is_region { rights } else { for_reading };
            return (image.file, page.saturating_sub(image.pages.start) * PAGE, rights);
        }
        let file = self.files[usize::from(level)];
        match level == self.own_level() {
            true => (file.writable, page * PAGE, rights),
            false => (file.readable, page * PAGE, for_reading),
        }
    }

    fn image(&self, level: u8) -> Option<&Image> {
        self.images.get(usize::from(level.checked_sub(disks::LEVEL)?))
    }

    /// Says why the host has not this page, or an unknown one.
    fn why_missing(&self, page: Option<u64>) -> &'static str {
        // A region is memory, and its size is sealed.
        let mut images = self.images.iter().filter(|image| !image.is_region);
        match page {
            Some(page) => match self.image(self.level(page)).filter(|image| !image.is_region) {
                None => NO_MEMORY,
                Some(image) if image.is_cut_off() => CUT_OFF,
                Some(_) => MEDIUM_FAILS,
            },
            None if self.images.iter().all(|image| image.is_region) => NO_MEMORY,
            None if images.any(Image::is_cut_off) => CUT_OFF,
            None => NO_PAGE,
        }
    }

    /// Returns true if a page is as it is in the image of a disk.
    #[must_use]
    pub fn is_of_image(&self, page: u64) -> bool {
        self.image(self.level(page)).is_some()
    }

    /// Returns true if the guest may not write to a page: it is on a disk that is shared.
    #[must_use]
    pub fn is_read_only(&self, page: u64) -> bool {
        self.images.iter().any(|image| {
            !image.is_private && !image.is_region && (image.pages.start..image.end).contains(&page)
        })
    }

    /// Makes a page the machine's own, in this process's window and in the log. Returns false if the page
    /// must not be written to, or the host has no room for the mapping. A handler of signals may call it: it
    /// takes no lock and no memory of a heap.
    pub fn make_own(&self, page: u64) -> bool {
        page < self.pages && (self.is_own(page) || !self.is_read_only(page) && self.make_own_now(page))
    }

    /// Does the work of [`Self::make_own`]. It is not part of its callers, in which its room on the stack
    /// would be touched, too: each process has a stack of its own.
    #[cold]
    #[inline(never)]
    fn make_own_now(&self, page: u64) -> bool {
        let is_whole = self.shared.pieces.load(Ordering::Relaxed) >= self.most_pieces;
        if !is_whole && self.take(page) {
            return true;
        }
        // The host has a limit of mappings, so a region becomes one piece.
        let start = page & !(REGION - 1);
        (start..(start + REGION).min(self.pages))
            .filter(|page| !self.is_own(*page) && !self.is_read_only(*page))
            .all(|page| self.take(page))
    }

    /// Copies a page to the own file, and records it.
    fn take(&self, page: u64) -> bool {
        let at = ptr::with_exposed_provenance_mut::<u8>(self.window + (page * PAGE) as usize);
        let mut content = [0_u8; PAGE as usize];
        // SAFETY: The window has the page, which nobody can write to now.
        unsafe { super::copy(content.as_mut_ptr(), at, content.len()) };
        if !self.map_window(page, PAGE) {
            return false;
        }
        // SAFETY: The window has the page of the own file now, and all of it may be written to.
        unsafe { super::copy(at, content.as_ptr(), content.len()) };
        let neighbours = [page.wrapping_sub(1), page + 1];
        let level = self.own_level();
        let own =
            neighbours.iter().filter(|at| **at < self.pages && self.level(**at) == level).count() as u32;
        // Alone it is a new piece, and between two pieces it joins them.
        self.shared.pieces.fetch_add(1_u32.wrapping_sub(own), Ordering::Relaxed);
        let index = self.shared.logged.load(Ordering::Relaxed);
        if let Some(place) = self.log.get(index as usize) {
            place.store(page as u32, Ordering::Relaxed);
        }
        self.set(page, self.own_level());
        self.shared.logged.store(index + 1, Ordering::Release);
        true
    }

    /// Returns the memory that the machine has of its own, in bytes: the pages of all files that are or were
    /// its own. It asks the host, in less than a microsecond for each file.
    #[must_use]
    pub fn used(&self) -> u64 {
        const BLOCK: u64 = 512;
        let (first, last) = (self.files.len() - OWN_FILES, usize::from(self.own_level()));
        let files = self.files.get(first..=last).unwrap_or(&[]);
        files.iter().map(|file| blocks(file.writable) * BLOCK).sum()
    }

    /// Returns the number of pages in the log.
    #[must_use]
    pub fn logged(&self) -> u32 {
        self.shared.logged.load(Ordering::Acquire)
    }

    /// Returns the ranges of pages in a part of the log, in order, joined where they touch.
    #[must_use]
    pub fn since(&self, from: u32, to: u32) -> Vec<Range<u64>> {
        let logged = self.log.get(from as usize..to as usize).unwrap_or(&[]);
        let mut pages: Vec<u32> = logged.iter().map(|page| page.load(Ordering::Relaxed)).collect();
        pages.sort_unstable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for page in pages.into_iter().map(u64::from) {
            match ranges.last_mut() {
                Some(last) if last.end == page => last.end += 1,
                _ => ranges.push(page..page + 1),
            }
        }
        ranges
    }

    /// Makes a level of the machine's own pages: the machine and its copies write to other files from now on.
    /// No process may write to the memory meanwhile. This process and all others must follow.
    ///
    /// # Errors
    /// The reason for which the machine cannot be forked, as a sentence.
    pub fn freeze(&self) -> std::result::Result<Frozen, &'static str> {
        let level = self.own_level();
        let file = self.files[usize::from(level)];
        if usize::from(level) + 1 == self.files.len() {
            return Err("this machine has been forked as often as it can be: fork one of its copies");
        }
        if file.readable < 0 {
            return Err("the host has no /proc, without which the machine's memory cannot be shared");
        }
        let own = level + 1;
        // The pages that were never used cost no copy later.
        for pages in holes(file.writable, self.pages * PAGE) {
            self.set_where(&pages, level, own);
        }
        self.shared.logged.store(0, Ordering::Relaxed);
        self.shared.own.store(own, Ordering::Release);
        let mut runs = self.runs();
        self.shared.pieces.store(Self::pieces_of(&runs), Ordering::Relaxed);
        runs.retain(|run| run.level > 0);
        Ok(Frozen { file: file.writable, runs, below: own })
    }

    /// Makes holes in the own file where whole pages of the machine's own are zero, from a page on. This
    /// process must have mapped all own pages in its window, and no process may write to the memory
    /// meanwhile. Looks at [`LOOKED_AT`] pages at most. Returns the page from which there may be more, which
    /// is the largest number at the end, and the number of pages that are holes now.
    #[must_use]
    pub fn trim(&self, from: u64) -> (u64, u64) {
        let own = self.own_level();
        let file = self.files[usize::from(own)].writable;
        let (mut at, mut looked_at, mut removed) = (from, 0, 0);
        let mut content = [0; PAGE as usize];
        loop {
            if looked_at == LOOKED_AT {
                return (at, removed);
            }
            let Some(page) = next_data(file, at * PAGE).map(|data| data / PAGE).filter(|at| *at < self.pages)
            else {
                return (u64::MAX, removed);
            };
            (at, looked_at) = (page + 1, looked_at + 1);
            let is_zero = self.level(page) == own
                && read_at(file, page * PAGE, &mut content).is_ok()
                && content.iter().all(|byte| *byte == 0);
            if is_zero && punch(self.window + (page * PAGE) as usize) {
                removed += 1;
            }
        }
    }

    /// Returns true if the machine was forked since this process last mapped its own pages.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.followed.load(Ordering::Relaxed) != self.own_level()
    }

    /// Returns the level of the machine's own file, and from where on in the log its pages are not mapped by
    /// a process that follows to that level now.
    #[must_use]
    pub fn now(&self) -> (u8, u32) {
        // In this order: a log that is newer than the level is followed from its beginning.
        let level = self.own_level();
        (level, self.logged())
    }

    /// Maps the pages that were the machine's own for reading, up to a level of [`Self::now`]. Without
    /// `direct` the direct map loses its own pages instead: the guest does not run in this process. Returns
    /// false if the host has no room.
    #[must_use]
    pub fn follow(&self, level: u8, direct: bool) -> bool {
        let followed = self.followed.swap(level, Ordering::Relaxed);
        if !direct {
            let (file, at, rights) = self.place_at(0, 0, Rights { write: true, execute: true });
            if !map(self.direct, at, self.pages * PAGE, rights, file) {
                return false;
            }
        }
        self.map(&self.runs(), followed, direct)
    }

    /// Maps all pages from a level on, in the window and perhaps in the direct map.
    fn map(&self, runs: &[Run], level: u8, direct: bool) -> bool {
        runs.iter().filter(|run| run.level >= level).all(|Run { pages, level }| {
            let (file, at, rights) =
                self.place_at(*level, pages.start, Rights { write: true, execute: true });
            let length = (pages.end - pages.start) * PAGE;
            let window = Rights { execute: false, ..rights };
            map(self.window as u64 + pages.start * PAGE, at, length, window, file)
                && (!direct || map(self.direct + pages.start * PAGE, at, length, rights, file))
        })
    }

    /// Maps own pages in the monitor's window. Returns true if the host has done so.
    #[must_use]
    pub fn map_window(&self, page: u64, length: u64) -> bool {
        let (file, at, rights) =
            self.place_at(self.own_level(), page, Rights { write: true, execute: false });
        map(self.window as u64 + page * PAGE, at, length, rights, file)
    }

    /// Maps own pages in the kernel's direct map. Returns true if the host has done so.
    #[must_use]
    pub fn map_direct(&self, page: u64, length: u64) -> bool {
        let (file, at, rights) = self.place_at(self.own_level(), page, Rights { write: true, execute: true });
        map(self.direct + page * PAGE, at, length, rights, file)
    }
}

/// Returns the offset of the next data of a file, from one on.
fn next_data(file: RawFd, at: u64) -> Option<u64> {
    // SAFETY: It takes a descriptor and numbers.
    u64::try_from(unsafe { libc::lseek(file, at.cast_signed(), libc::SEEK_DATA) }).ok()
}

/// Makes a hole of the page of a file that is mapped at an address. Returns true if the host has done so.
fn punch(address: usize) -> bool {
    let page = ptr::with_exposed_provenance_mut(address);
    // SAFETY: The window has the page of the own file there, which is zero before and after.
    unsafe { libc::madvise(page, PAGE as usize, libc::MADV_REMOVE) == 0 }
}

/// Makes a file for own pages.
fn make_file(size: u64) -> Result<Level> {
    new_file(c"mercury-hosted", size, libc::MFD_ALLOW_SEALING).map(with_readable)
}

/// Opens a file a second time, for reading.
fn with_readable(file: OwnedFd) -> Level {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let readable = std::fs::File::open(path).map_or(-1, |file| file.into_raw_fd());
    Level { readable, writable: file.into_raw_fd() }
}

/// Maps pages of a file in the window or in the direct map. Returns true if the host has done so.
fn map(address: u64, offset: u64, length: u64, rights: Rights, file: RawFd) -> bool {
    // SAFETY: The address is in the window or the direct map, which have this page there already.
    unsafe { map_over(address, length, rights, file, offset) }
}

/// Makes the page at an address of the monitor's window the machine's own. Returns false if the address is
/// not there, or the page is the machine's own already. The handler of signals calls this function when the
/// monitor has written.
#[must_use]
pub fn own_at(address: u64) -> bool {
    // SAFETY: The layers are never dropped, and they have no part that is not shared.
    let Some(layers) = (unsafe { LAYERS.load(Ordering::Acquire).as_ref() }) else { return false };
    let Some(offset) = address.checked_sub(layers.window as u64) else { return false };
    let page = offset / PAGE;
    page < layers.pages && !layers.is_own(page) && layers.make_own(page)
}

/// The messages for a page of the guest's memory that the host does not have.
const NO_MEMORY: &str = "the host has no memory for a page of the guest's: end other programs or machines, \
    or give machines less memory";
const CUT_OFF: &str = "the image of a disk was cut off: nobody may change an image that is a part of \
    machines' memory";
const MEDIUM_FAILS: &str = "the host cannot read the image of a disk: its medium may fail";
const NO_PAGE: &str = "the host has no page of the guest's memory: it has no memory left, or cannot read the \
    image of a disk";

/// Returns the page of the guest's memory that the monitor has at an address.
#[must_use]
pub fn page_at(address: u64) -> Option<u64> {
    // SAFETY: The layers are never dropped, and they have no part that is not shared.
    let layers = unsafe { LAYERS.load(Ordering::Acquire).as_ref() }?;
    let page = address.checked_sub(layers.window as u64)? / PAGE;
    (page < layers.pages).then_some(page)
}

/// Says why the host has not this page of the guest's memory, or an unknown one.
#[must_use]
pub fn why_missing(page: Option<u64>) -> &'static str {
    // SAFETY: As above.
    let layers = unsafe { LAYERS.load(Ordering::Acquire).as_ref() };
    layers.map_or(NO_MEMORY, |layers| layers.why_missing(page))
}

fn map_window(file: RawFd, size: u64) -> Result<usize> {
    // SAFETY: A new mapping where the host likes.
    let window =
        unsafe { libc::mmap(ptr::null_mut(), size as usize, libc::PROT_READ, libc::MAP_SHARED, file, 0) };
    if window == libc::MAP_FAILED {
        return Err(Error::system("map the memory that machines share"));
    }
    Ok(window.expose_provenance())
}

/// Maps so many numbers that all processes of the machine share, which are zero.
fn words<T: Number>(count: u64) -> Result<&'static [T]> {
    let words = map_common(count as usize * size_of::<T>())?;
    // SAFETY: The memory stays, is as long, and zero, which is a valid value of these types; all of it is
    // atomic.
    Ok(unsafe { std::slice::from_raw_parts(words.cast::<T>(), count as usize) })
}

/// An atomic number, for which zero bytes are zero.
trait Number {}
impl Number for AtomicU32 {}
impl Number for AtomicU64 {}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs::File,
        os::{fd::BorrowedFd, unix::fs::FileExt},
    };

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 1200;
    const SIZE: u64 = PAGES * PAGE;

    /// Makes a sealed file in which each page begins with its number, and layers over it.
    fn layers(most_pieces: u32) -> &'static Layers {
        let base = File::from(new_file(c"test", SIZE, 0).unwrap());
        (0..PAGES).for_each(|page| base.write_all_at(&(page + 1).to_le_bytes(), page * PAGE).unwrap());
        over(vec![base.into()], &[], &Disks::default(), most_pieces)
    }

    /// The pages of a disk of the machine's own, with its end, and of one that is shared.
    const PRIVATE: (Range<u64>, u64) = (500..850, 900);
    const SHARED: (Range<u64>, u64) = (900..1000, 1024);

    /// Makes layers as [`layers`] does, in which disks have some of the pages. The file of all pages has
    /// other content there.
    fn layers_with_disks(most_pieces: u32) -> (&'static Layers, &'static Disks) {
        let base = File::from(new_file(c"test", SIZE, 0).unwrap());
        let disks = [(PRIVATE, true), (SHARED, false)].map(|((pages, end), is_private)| {
            let size = (pages.end - pages.start) * PAGE;
            (File::from(new_file(c"test", size, 0).unwrap()), pages, end, is_private)
        });
        for page in 0..PAGES {
            let on_disk = disks.iter().find(|(_, pages, ..)| pages.contains(&page));
            let word = if on_disk.is_some() { u64::MAX } else { page + 1 };
            base.write_all_at(&word.to_le_bytes(), page * PAGE).unwrap();
            if let Some((file, pages, ..)) = on_disk {
                file.write_all_at(&(page + 1).to_le_bytes(), (page - pages.start) * PAGE).unwrap();
            }
        }
        // The layers keep the numbers of the files.
        let disks: &Disks = Box::leak(Box::new(Disks::of_files(disks.into(), SIZE)));
        (over(vec![base.into()], &disks.runs(), disks, most_pieces), disks)
    }

    fn over(files: Vec<OwnedFd>, runs: &[Run], disks: &Disks, most_pieces: u32) -> &'static Layers {
        let direct = map_window(files[0].as_raw_fd(), SIZE).unwrap() as u64;
        let files = files.into_iter().map(IntoRawFd::into_raw_fd);
        Layers::new(files, (direct, SIZE), runs, disks, most_pieces, None).unwrap()
    }

    fn word(layers: &Layers, page: u64) -> u64 {
        let at = ptr::with_exposed_provenance::<u64>(layers.window + (page * PAGE) as usize);
        // SAFETY: The window has the page.
        unsafe { at.read_volatile() }
    }

    /// Writes as the monitor does.
    fn write(layers: &Layers, page: u64, word: u64) {
        assert!(layers.make_own(page));
        let at = ptr::with_exposed_provenance_mut::<u64>(layers.window + (page * PAGE) as usize);
        // SAFETY: The window has the page, which is the machine's own.
        unsafe { at.write_volatile(word) };
    }

    /// Returns a copy of a descriptor, as another process gets it.
    fn copy_of(file: RawFd) -> OwnedFd {
        // SAFETY: The layers never close it.
        unsafe { BorrowedFd::borrow_raw(file) }.try_clone_to_owned().unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]
        /// Several processes follow the log at times of their own. When one has caught up, it knows all
        /// pages.
        #[test]
        fn whoever_has_caught_up_knows_all_pages(
            steps in prop::collection::vec((0..PAGES, 0..4_usize, any::<bool>()), 1..200), most in 1..20_u32,
        ) {
            let layers = layers(most);
            let mut known: [(u32, Vec<bool>); 4] = std::array::from_fn(|_| (0, vec![false; PAGES as usize]));
            let mut model = vec![false; PAGES as usize];
            for (page, process, breaks) in steps {
                let (caught_up, pages) = &mut known[process];
                for range in layers.since(*caught_up, layers.logged()) {
                    range.for_each(|page| {
                        assert!(!pages[page as usize], "a page came twice");
                        pages[page as usize] = true;
                    });
                }
                *caught_up = layers.logged();
                prop_assert_eq!(&*pages, &model);
                if breaks {
                    prop_assert!(layers.make_own(page));
                    model[page as usize] = true;
                }
                // A whole region may have become the machine's own.
                (0..PAGES).for_each(|page| {
                    assert!(layers.is_own(page) || !model[page as usize]);
                    model[page as usize] = layers.is_own(page);
                });
            }
            let begins = |page: &u64| layers.is_own(*page) && (*page == 0 || !layers.is_own(page - 1));
            let pieces = (0..PAGES).filter(begins);
            prop_assert_eq!(layers.shared.pieces.load(Ordering::Relaxed) as usize, pieces.count());
            prop_assert_eq!(layers.logged() as usize, model.iter().filter(|own| **own).count());
            for page in 0..PAGES {
                prop_assert_eq!(word(layers, page), page + 1, "the content stays");
                let mut there = [0; 8];
                own_file(layers).read_exact_at(&mut there, page * PAGE).unwrap();
                let expected = if layers.is_own(page) { page + 1 } else { 0 };
                prop_assert_eq!(u64::from_le_bytes(there), expected);
            }
        }

        /// Machines write to memory and disks, and are forked, as are their copies. Each has what it wrote,
        /// or what its ancestor had at the fork. Images stay as they are.
        #[test]
        fn each_machine_has_its_own_memory(
            steps in prop::collection::vec((0..4_usize, 0..PAGES, 1..40_u64, any::<u8>()), 1..60),
            most in 1..300_u32,
        ) {
            let (first, disks) = layers_with_disks(most);
            let mut machines = vec![(first, (1..=PAGES).collect::<Vec<u64>>())];
            for (which, page, count, what) in steps {
                let which = which % machines.len();
                let (layers, model) = &mut machines[which];
                let layers = *layers;
                if what % 5 != 0 {
                    for page in page..(page + count).min(PAGES) {
                        if (SHARED.0.start..SHARED.1).contains(&page) {
                            assert!(!layers.make_own(page) && layers.is_read_only(page));
                            continue;
                        }
                        model[page as usize] = u64::from(what) << 32 | page;
                        write(layers, page, model[page as usize]);
                    }
                    continue;
                }
                let model = model.clone();
                let Ok(frozen) = layers.freeze() else {
                    prop_assert_eq!(usize::from(layers.own_level()) + 1, layers.files.len());
                    continue;
                };
                prop_assert!(layers.is_behind());
                prop_assert!(layers.follow(layers.now().0, what % 2 == 0) && !layers.is_behind());
                prop_assert_eq!(layers.logged(), 0);
                let below = layers.files.iter().take(layers.own_level().into());
                let files: Vec<OwnedFd> = below.map(|file| copy_of(file.writable)).collect();
                // Nobody has the former own file mapped for writing any more.
                crate::memory::seal(files.last().unwrap()).unwrap();
                let machine = (over(files, &frozen.runs, disks, most), model);
                match machines.len() {
                    4 => machines[(which + 1) % 4] = machine,
                    _ => machines.push(machine),
                }
            }
            for (layers, model) in machines {
                for page in 0..PAGES {
                    assert_eq!(word(layers, page), model[page as usize], "{page}");
                    let is_on_disk = disks.iter().any(|disk| disk.pages().contains(&page));
                    assert!(is_on_disk || !layers.is_of_image(page));
                    assert!(!layers.is_of_image(page) || word(layers, page) == page + 1);
                }
            }
            for disk in disks.iter() {
                let file = File::from(copy_of(disk.descriptor()));
                for page in disk.pages() {
                    let mut there = [0; 8];
                    file.read_exact_at(&mut there, (page - disk.pages().start) * PAGE).unwrap();
                    prop_assert_eq!(u64::from_le_bytes(there), page + 1);
                }
            }
        }
    }

    /// Returns the machine's own file.
    fn own_file(layers: &Layers) -> File {
        copy_of(layers.files[usize::from(layers.own_level())].writable).into()
    }

    #[test]
    fn a_machine_counts_what_it_has() {
        let layers = layers(u32::MAX);
        assert_eq!(layers.used(), 0);
        (0..10).for_each(|page| write(layers, page, 7));
        assert_eq!(layers.used(), 10 * PAGE);
        layers.freeze().unwrap();
        assert!(layers.follow(layers.now().0, true));
        write(layers, 3, 8);
        assert_eq!(layers.used(), 11 * PAGE, "those of a fork are still its own");
    }

    #[test]
    fn many_pieces_become_one() {
        let layers = layers(8);
        for page in (0..PAGES).step_by(2) {
            assert!(layers.make_own(page));
        }
        // Each piece beyond the limit takes its region along.
        assert_eq!((u64::from(layers.logged()), layers.shared.pieces.load(Ordering::Relaxed)), (PAGES, 1));
    }

    #[test]
    fn ranges_of_one_file_are_found() {
        let layers = layers(u32::MAX);
        [10, 11, 12, 20].into_iter().for_each(|page| assert!(layers.make_own(page)));
        assert_eq!((layers.same(10, 100), layers.same(13, 100), layers.same(13, 15)), (3, 7, 2));
        assert_eq!(
            (layers.same_before(12, 0), layers.same_before(20, 0), layers.same_before(19, 0)),
            (2, 0, 6)
        );
        let all = Rights { write: true, execute: true };
        let read = Rights { write: false, execute: true };
        assert_eq!(layers.place(11, all), (layers.files[1].writable, 11 * PAGE, all));
        assert_eq!(layers.place(13, all), (layers.files[0].readable, 13 * PAGE, read));
        assert!(layers.is_own(PAGES + 1000), "pages outside are nobody's base");
        assert!(!layers.make_own(PAGES));
    }

    /// Pages of zeros become holes, and are zero before and after. Pages that are not zero stay, and so do
    /// those of the base.
    #[test]
    fn pages_of_zeros_become_holes() {
        let layers = layers(u32::MAX);
        let blocks = || std::os::unix::fs::MetadataExt::blocks(&own_file(layers).metadata().unwrap());
        (10..30).for_each(|page| write(layers, page, 0));
        write(layers, 15, 7);
        assert_eq!((layers.trim(0), blocks()), ((u64::MAX, 19), 8), "one page is left");
        assert_eq!((layers.trim(0), blocks()), ((u64::MAX, 0), 8));
        for page in 0..PAGES {
            let expected = match page {
                15 => 7,
                10..30 => 0,
                _ => page + 1,
            };
            assert_eq!(word(layers, page), expected, "{page}");
        }
        write(layers, 12, 8);
        // The host gives a hole a page when it is read.
        assert_eq!((layers.trim(13).1, layers.trim(0).1), (16, 2));
        assert_eq!((word(layers, 12), word(layers, 15)), (8, 7), "holes can be written to");
    }

    /// The host has no page where one was touched: its memory is full, or a disk's image is not there.
    #[test]
    fn a_page_that_the_host_does_not_have_is_explained() {
        let plain = layers(u32::MAX);
        assert_eq!([Some(5), None].map(|page| plain.why_missing(page)), [NO_MEMORY; 2]);
        let (layers, disks) = layers_with_disks(u32::MAX);
        write(layers, 501, 7);
        let why = || [5, 501, 502, 900].map(|page| layers.why_missing(Some(page)));
        assert_eq!(why(), [NO_MEMORY, NO_MEMORY, MEDIUM_FAILS, MEDIUM_FAILS]);
        assert_eq!(layers.why_missing(None), NO_PAGE);
        let second = disks.iter().nth(1).unwrap();
        let file = File::from(copy_of(second.descriptor()));
        file.set_len(PAGE).unwrap();
        assert_eq!(why(), [NO_MEMORY, NO_MEMORY, MEDIUM_FAILS, CUT_OFF]);
        assert_eq!(layers.why_missing(None), CUT_OFF);
        let file = File::from(new_file(c"test", 100 * PAGE, 0).unwrap());
        let region: &Disks = Box::leak(Box::new(Disks::of_region(file, 600..700, SIZE)));
        let base = new_file(c"test", SIZE, 0).unwrap();
        let layers = over(vec![base], &region.runs(), region, u32::MAX);
        assert_eq!([Some(650), None].map(|page| layers.why_missing(page)), [NO_MEMORY; 2]);
    }

    /// Two machines and a fork write to the pages of a region, which never become their own. Pages beside the
    /// region do.
    #[test]
    fn machines_write_to_one_region() {
        const REGION: Range<u64> = 600..700;
        let file = File::from(new_file(c"test", (REGION.end - REGION.start) * PAGE, 0).unwrap());
        let base = File::from(new_file(c"test", SIZE, 0).unwrap());
        let of_region = || -> &'static Disks {
            Box::leak(Box::new(Disks::of_region(file.try_clone().unwrap(), REGION, SIZE)))
        };
        let (one, two) = (of_region(), of_region());
        let start = |disks: &Disks| over(vec![base.try_clone().unwrap().into()], &disks.runs(), disks, 8);
        let (first, second) = (start(one), start(two));
        write(first, 600, 7);
        write(second, 699, 8);
        for layers in [first, second] {
            assert_eq!([600, 650, 699].map(|page| word(layers, page)), [7, 0, 8]);
            assert_eq!((layers.logged(), layers.shared.pieces.load(Ordering::Relaxed)), (0, 1));
            assert!(layers.is_own(650) && layers.is_of_image(650) && !layers.is_read_only(650));
            let all = Rights { write: true, execute: false };
            let (_, offset, rights) = layers.place(601, all);
            assert_eq!((offset, rights), (PAGE, all));
        }
        write(first, 599, 9);
        write(first, 700, 9);
        assert_eq!((first.logged(), word(second, 599), word(second, 700)), (2, 0, 0));
        // Many pieces around the region become one, and the region stays as it is.
        (512..600).step_by(2).chain((700..1000).step_by(2)).for_each(|page| write(first, page, 9));
        assert!(first.is_of_image(600) && first.is_of_image(699));
        let frozen = first.freeze().unwrap();
        assert!(first.follow(first.now().0, true));
        let below = first.files.iter().take(first.own_level().into());
        let files = below.map(|file| copy_of(file.writable)).collect();
        let fork = over(files, &frozen.runs, one, 8);
        write(fork, 650, 10);
        write(first, 651, 11);
        write(fork, 599, 12);
        for layers in [first, second, fork] {
            assert_eq!([600, 650, 651, 699].map(|page| word(layers, page)), [7, 10, 11, 8]);
        }
        assert_eq!([first, second, fork].map(|layers| word(layers, 599)), [9, 0, 12]);
    }

    #[test]
    fn a_machine_is_forked_so_often_and_no_more() {
        let layers = layers(u32::MAX);
        for number in 0..MOST_FORKS as u64 {
            write(layers, number, 7);
            let frozen = layers.freeze().unwrap();
            assert!(layers.follow(layers.now().0, false));
            // What was never used is the machine's own again, and costs no copy.
            assert!(
                layers.is_own(PAGES / 2) == frozen.runs.iter().any(|run| run.pages.contains(&(PAGES / 2)))
            );
        }
        assert!(layers.freeze().unwrap_err().contains("fork one of its copies"));
        write(layers, 3, 9);
        assert_eq!((word(layers, 3), word(layers, 0)), (9, 7), "it goes on");
    }
}
