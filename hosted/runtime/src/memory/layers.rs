//! Layers of the guest's memory: a base that many machines have in common, and the machine's own pages.
//!
//! Each page of the guest is in one of two files, at the same offset: in the *base*, which nobody can
//! write to, or in the machine's own file. This is Disco's pmap (paper 002, section 4.2), kept as a bit for
//! each page. A page becomes the machine's own at its first write: the monitor copies it, maps the own file
//! there, and writes the page's number to a log. All processes of the machine share the bits and the log.
//! Each process maps what is new in the log before it runs the guest, so nobody reads a page that has
//! become old. A page becomes the machine's own once, so the log has room for each page and never wraps
//! around.
//!
//! Two kinds of writes make a page the machine's own. Writes of the guest fault, and reach
//! [`Machine::page_fault`](crate::machine::Machine::page_fault). The monitor writes through a mapping of its
//! own, the *window*, and calls [`Layers::make_own`] before. Only devices write there by themselves: their
//! writes fault, and the handler of signals calls [`own_at`]. The host's kernel does not fault but returns an
//! error, so buffers are touched before they are given to the host ([`mercury_devices::memory::buffer`]).

use std::{
    ops::Range,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    ptr,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use super::Rights;
use crate::{
    error::{Error, Result},
    layout::{DIRECT_MAP, PAGE},
    process::{Common, map_common},
};

const PER_WORD: u64 = u64::BITS as u64;
/// If the own pages are in too many pieces, a whole region of so many pages becomes the machine's own.
const REGION: u64 = 512;

/// The layers of this process's memory, for the handler of signals.
static LAYERS: AtomicPtr<Layers> = AtomicPtr::new(ptr::null_mut());

/// The two files of the guest's memory, and where each page is.
#[derive(Debug)]
pub struct Layers {
    base: OwnedFd,
    own: RawFd,
    /// The size of the memory, in pages.
    pages: u64,
    /// The address of the monitor's own mapping.
    window: usize,
    shared: &'static Shared,
    /// A bit for each page: it is in the machine's own file.
    bits: &'static [AtomicU64],
    log: &'static [AtomicU32],
    /// The number of pieces of own pages from which regions are made own.
    most_pieces: u32,
}

/// The numbers that all processes of the machine share.
#[derive(Debug, Default)]
struct Shared {
    /// The number of pages in the log.
    logged: AtomicU32,
    /// The number of pieces in which the own pages are.
    pieces: AtomicU32,
}

impl Layers {
    /// Maps a base, and the machine's own file over parts of it. `first` are the pages that are the machine's
    /// own from the beginning: they are zero in both files. The layers are never dropped.
    ///
    /// # Errors
    /// If the host refuses memory or a mapping.
    pub fn new(
        base: OwnedFd,
        own: RawFd,
        size: u64,
        first: &[Range<u64>],
        most_pieces: u32,
    ) -> Result<&'static Self> {
        let pages = size / PAGE;
        let window = map_window(&base, size)?;
        let (bits, log) = (words(pages.div_ceil(PER_WORD))?, words(pages)?);
        let shared = Common::new(Shared::default())?.share();
        let layers = Self { base, own, pages, window, shared, bits, log, most_pieces };
        for range in first {
            layers.set_first(range)?;
        }
        let layers = Box::leak(Box::new(layers));
        LAYERS.store(layers, Ordering::Release);
        Ok(layers)
    }

    /// Makes a range the machine's own before any other process exists.
    fn set_first(&self, range: &Range<u64>) -> Result<()> {
        let length = (range.end - range.start) * PAGE;
        let is_mapped = self.map_direct(range.start, length) && self.map_window(range.start, length);
        if !is_mapped {
            return Err(Error::system("map the machine's own memory"));
        }
        range.clone().for_each(|page| self.set(page));
        self.shared.pieces.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the descriptor of the base.
    #[must_use]
    pub fn base(&self) -> RawFd {
        self.base.as_raw_fd()
    }

    /// Returns the address of the monitor's own mapping.
    #[must_use]
    pub fn window(&self) -> usize {
        self.window
    }

    /// Returns true if a page is in the machine's own file.
    #[must_use]
    pub fn is_own(&self, page: u64) -> bool {
        let word = self.bits.get((page / PER_WORD) as usize);
        word.is_none_or(|word| word.load(Ordering::Acquire) & (1 << (page % PER_WORD)) != 0)
    }

    fn set(&self, page: u64) {
        if let Some(word) = self.bits.get((page / PER_WORD) as usize) {
            word.fetch_or(1 << (page % PER_WORD), Ordering::Release);
        }
    }

    /// Returns the number of pages from one on, up to an end, that are in the same file as that one.
    #[must_use]
    pub fn same(&self, page: u64, end: u64) -> u64 {
        let is_own = self.is_own(page);
        (page..end).take_while(|page| self.is_own(*page) == is_own).count() as u64
    }

    /// Returns the pages before one, down to a start, that are in the same file as that one.
    #[must_use]
    pub fn same_before(&self, page: u64, start: u64) -> u64 {
        let is_own = self.is_own(page);
        (start..page).rev().take_while(|page| self.is_own(*page) == is_own).count() as u64
    }

    /// Returns the file of a page, and the rights that a mapping of it may have.
    #[must_use]
    pub fn file(&self, page: u64, rights: Rights) -> (RawFd, Rights) {
        match self.is_own(page) {
            true => (self.own, rights),
            false => (self.base.as_raw_fd(), Rights { write: false, ..rights }),
        }
    }

    /// Makes a page the machine's own, in this process's window and in the log. Returns false if the host has
    /// no room for the mapping. A handler of signals may call it: it takes no lock and no memory of a heap.
    pub fn make_own(&self, page: u64) -> bool {
        page < self.pages && (self.is_own(page) || self.make_own_now(page))
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
            .filter(|page| !self.is_own(*page))
            .all(|page| self.take(page))
    }

    /// Copies a page of the base to the own file, and records it.
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
        let own = neighbours.iter().filter(|at| **at < self.pages && self.is_own(**at)).count() as u32;
        // Alone it is a new piece, and between two pieces it joins them.
        self.shared.pieces.fetch_add(1_u32.wrapping_sub(own), Ordering::Relaxed);
        let index = self.shared.logged.load(Ordering::Relaxed);
        if let Some(place) = self.log.get(index as usize) {
            place.store(page as u32, Ordering::Relaxed);
        }
        self.set(page);
        self.shared.logged.store(index + 1, Ordering::Release);
        true
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

    /// Maps own pages in the monitor's window. Returns true if the host has done so.
    #[must_use]
    pub fn map_window(&self, page: u64, length: u64) -> bool {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        self.map_own(self.window as u64 + page * PAGE, page, length, rights)
    }

    /// Maps own pages in the kernel's direct map. Returns true if the host has done so.
    #[must_use]
    pub fn map_direct(&self, page: u64, length: u64) -> bool {
        let rights = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        self.map_own(DIRECT_MAP + page * PAGE, page, length, rights)
    }

    fn map_own(&self, address: u64, page: u64, length: u64, rights: i32) -> bool {
        // SAFETY: The address is in the window or the direct map, which have this page there already.
        let mapped = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(address as usize),
                length as usize,
                rights,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.own,
                (page * PAGE).cast_signed(),
            )
        };
        mapped != libc::MAP_FAILED
    }
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

fn map_window(base: &OwnedFd, size: u64) -> Result<usize> {
    let file = base.as_raw_fd();
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
    use std::{fs::File, os::unix::fs::FileExt};

    use proptest::prelude::*;

    use super::*;
    use crate::memory::new_file;

    const PAGES: u64 = 1200;
    const SIZE: u64 = PAGES * PAGE;

    /// Makes a base in which each page begins with its number, and layers over it, with the own file.
    fn layers(most_pieces: u32) -> (&'static Layers, File) {
        let base = File::from(new_file(c"test", SIZE, 0).unwrap());
        (0..PAGES).for_each(|page| base.write_all_at(&(page + 1).to_le_bytes(), page * PAGE).unwrap());
        let own = new_file(c"test", SIZE, 0).unwrap();
        let file = File::from(own.try_clone().unwrap());
        let descriptor = own.as_raw_fd();
        std::mem::forget(own);
        (Layers::new(base.into(), descriptor, SIZE, &[], most_pieces).unwrap(), file)
    }

    fn word(layers: &Layers, page: u64) -> u64 {
        let at = ptr::with_exposed_provenance::<u64>(layers.window + (page * PAGE) as usize);
        // SAFETY: The window has the page.
        unsafe { at.read_volatile() }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]
        /// Several processes follow the log at times of their own. When one has caught up, it knows all
        /// pages.
        #[test]
        fn whoever_has_caught_up_knows_all_pages(
            steps in prop::collection::vec((0..PAGES, 0..4_usize, any::<bool>()), 1..200), most in 1..20_u32,
        ) {
            let (layers, own) = layers(most);
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
                own.read_exact_at(&mut there, page * PAGE).unwrap();
                let expected = if layers.is_own(page) { page + 1 } else { 0 };
                prop_assert_eq!(u64::from_le_bytes(there), expected);
            }
        }
    }

    #[test]
    fn many_pieces_become_one() {
        let (layers, _own) = layers(8);
        for page in (0..PAGES).step_by(2) {
            assert!(layers.make_own(page));
        }
        // Each piece beyond the limit takes its region along.
        assert_eq!((u64::from(layers.logged()), layers.shared.pieces.load(Ordering::Relaxed)), (PAGES, 1));
    }

    #[test]
    fn ranges_of_one_file_are_found() {
        let (layers, _own) = layers(u32::MAX);
        [10, 11, 12, 20].into_iter().for_each(|page| assert!(layers.make_own(page)));
        assert_eq!((layers.same(10, 100), layers.same(13, 100), layers.same(13, 15)), (3, 7, 2));
        assert_eq!(
            (layers.same_before(12, 0), layers.same_before(20, 0), layers.same_before(19, 0)),
            (2, 0, 6)
        );
        let all = Rights { write: true, execute: true };
        assert_eq!(layers.file(11, all), (layers.own, all));
        assert_eq!(layers.file(13, all), (layers.base(), Rights { write: false, execute: true }));
        assert!(layers.is_own(PAGES + 1000), "pages outside are nobody's base");
        assert!(!layers.make_own(PAGES));
    }
}
