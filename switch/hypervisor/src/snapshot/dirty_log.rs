//! A dirty log: pages that CPUs write while the machine runs, collected again and again. Live migration
//! copies those once more.
//!
//! The machine runs on a [`View`] of its own in which no page of the log can be written at first. The first
//! write to a page is noted. From then on the page can be written, until it is collected. Nothing is
//! copied.
//!
//! A collection takes permissions of the view back, and a processor learns of that only when it flushes its
//! translations. Until then it may write unseen to a page that was collected. So a page is read only after
//! all processors have flushed. Every write after that is noted anew.
//!
//! A page that was free and is allocated now needs no note of its own: the new owner writes to it, or has a
//! device do so.

use core::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::gate::OwnedRange;
use mercury_abi::snapshot::MAP_BITS;

use super::view::{Access, Found, Keep, View};
use super::{Outcome, of_memory};
use crate::address::{Address, GuestPhys, HostPhys, PAGE_SIZE, PageSize};
use crate::paging::format::Format;
use crate::paging::table::{Exhausted, PageTable, TablePages};

const WORDS: usize = MAP_BITS / WORD_BITS;
const WORD_BITS: usize = 64;

/// A piece of a map: a bit for each page of a stretch of addresses.
pub type Piece = [AtomicU64; WORDS];

/// A bit for each page, by address, in pieces, of which those may be missing that have no memory. The
/// driver sets bits as well.
#[derive(Clone, Copy, Debug, Default)]
pub struct WrittenMap<'a>(pub &'a [Option<&'a Piece>]);

impl<'a> WrittenMap<'a> {
    fn word(&self, number: usize) -> Option<&'a AtomicU64> {
        (*self.0.get(number / WORDS)?)?.get(number % WORDS)
    }

    fn note(&self, frame: GuestPhys) {
        let number = (frame.as_u64() / PAGE_SIZE) as usize;
        if let Some(word) = self.word(number / WORD_BITS) {
            word.fetch_or(1 << (number % WORD_BITS), Ordering::Relaxed);
        }
    }
}

/// Most work of one call of [`DirtyLog::collect`], for interrupts are off.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Words of the map that are read.
    pub words: usize,
    /// Pages that are moved, and then as many as one word has.
    pub pages: u64,
}

/// A log over the tables of an identity map.
#[derive(Clone, Copy, Debug)]
pub struct DirtyLog<F> {
    view: View<F>,
    incomplete: bool,
}

impl<F: Format<Address = GuestPhys>> DirtyLog<F> {
    /// Returns a dirty log of these ranges. A processor takes part once it has loaded [`DirtyLog::root`].
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for its root.
    pub fn new(
        pages: &mut impl TablePages,
        base: PageTable<F>,
        ranges: &[OwnedRange],
    ) -> Result<Self, Exhausted> {
        let keeps = |block, size| of_memory(ranges, block, size);
        Ok(Self { view: View::new(pages, base, &keeps)?, incomplete: false })
    }

    /// Returns the root of the view: the address in nCR3 or in the EPT pointer.
    #[must_use]
    pub const fn root(&self) -> HostPhys {
        self.view.root()
    }

    /// Returns the view that CPUs run on.
    #[must_use]
    pub const fn view(&self) -> &View<F> {
        &self.view
    }

    /// Returns true if the log has every write.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        !self.incomplete
    }

    /// Makes the log incomplete: no write is held up any more, and none is noted.
    pub const fn invalidate(&mut self) {
        self.incomplete = true;
    }

    /// Answers a nested fault at `gpa`, never by [`Outcome::Copied`].
    pub fn fault(
        &self,
        pages: &mut impl TablePages,
        ranges: &[OwnedRange],
        written: WrittenMap<'_>,
        gpa: GuestPhys,
        access: Access,
    ) -> Outcome {
        let keeps = |block: GuestPhys, size: PageSize| match self.incomplete {
            true => Keep::Nothing,
            false => of_memory(ranges, block, size),
        };
        match self.view.open(pages, gpa, access, &keeps) {
            Ok(Found::Kept(slot)) => {
                written.note(gpa);
                self.view.permit(pages, slot);
                Outcome::Open
            }
            Ok(Found::Open) => Outcome::Open,
            Ok(Found::Hidden) => Outcome::Hidden,
            Ok(Found::Absent) => Outcome::Absent,
            Err(Exhausted) => Outcome::Exhausted,
        }
    }

    /// Moves noted pages from `from` on to `to`. Returns the number of pages, and the address to go on at, if
    /// some are left.
    pub fn collect(
        &self,
        pages: &mut impl TablePages,
        written: WrittenMap<'_>,
        to: WrittenMap<'_>,
        from: GuestPhys,
        budget: Budget,
    ) -> (u64, Option<GuestPhys>) {
        let mut number = (from.as_u64() / PAGE_SIZE) as usize / WORD_BITS;
        let (mut moved, mut scanned) = (0, 0);
        while number < written.0.len() * WORDS {
            if scanned == budget.words || moved >= budget.pages {
                return (moved, Some(address_of(number)));
            }
            scanned += 1;
            let (Some(word), Some(collected)) = (written.word(number), to.word(number)) else {
                number = (number / WORDS + 1) * WORDS;
                continue;
            };
            // Most are 0, and their cache lines need not move to this CPU.
            let mut bits =
                if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::Relaxed) };
            collected.fetch_or(bits, Ordering::Relaxed);
            moved += u64::from(bits.count_ones());
            while bits != 0 {
                let page = u64::from(bits.trailing_zeros());
                self.view.restrict(pages, address_of(number).saturating_add(page * PAGE_SIZE));
                bits &= bits - 1;
            }
            number += 1;
        }
        (moved, None)
    }
}

/// Returns the first page of a word.
fn address_of(number: usize) -> GuestPhys {
    GuestPhys::new((number * WORD_BITS) as u64 * PAGE_SIZE)
}
