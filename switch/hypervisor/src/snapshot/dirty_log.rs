//! A log of what CPUs write while the machine runs, collected again and again: what live migration copies once more.
//!
//! The machine runs on a [`View`] of its own in which nothing that is kept can be written at first. The first write to a
//! page is noted, and the page can be written from then on, until it is collected. Nothing is copied.
//!
//! The view's permissions shrink when it is collected, which processors learn of only when they flush their
//! translations. Until then one of them may write to a page that was collected, unseen: so such a page is read only when
//! all of them have flushed. Whatever is written after that is noted anew.
//!
//! A page that was free and is somebody's now needs nothing of its own: who takes it writes to it, or has a device do so.

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

/// A bit for each page, by address, in pieces, of which those may be missing that have no memory. The driver sets bits
/// as well.
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

/// How much of a collection is done with interrupts off.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Words of the map that are looked at.
    pub words: usize,
    /// Pages that are moved, and then as many as one word has.
    pub pages: u64,
}

/// The log.
#[derive(Clone, Copy, Debug)]
pub struct DirtyLog<F> {
    view: View<F>,
    given_up: bool,
}

impl<F: Format<Address = GuestPhys>> DirtyLog<F> {
    /// A log of writes to these ranges. A processor takes part once it has loaded [`DirtyLog::root`].
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for its root.
    pub fn new(
        pages: &mut impl TablePages,
        base: PageTable<F>,
        ranges: &[OwnedRange],
    ) -> Result<Self, Exhausted> {
        let keeps = |block, size| of_memory(ranges, block, size);
        Ok(Self { view: View::new(pages, base, &keeps)?, given_up: false })
    }

    /// What nCR3 or the EPT pointer takes.
    #[must_use]
    pub const fn root(&self) -> HostPhys {
        self.view.root()
    }

    /// The view.
    #[must_use]
    pub const fn view(&self) -> &View<F> {
        &self.view
    }

    /// Whether it has everything that was written.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        !self.given_up
    }

    /// Nothing is in the way of a write any more, and nothing is noted.
    pub const fn give_up(&mut self) {
        self.given_up = true;
    }

    /// Answers a fault at `gpa`; never [`Outcome::Copied`].
    pub fn fault(
        &self,
        pages: &mut impl TablePages,
        ranges: &[OwnedRange],
        written: WrittenMap<'_>,
        gpa: GuestPhys,
        access: Access,
    ) -> Outcome {
        let keeps = |block: GuestPhys, size: PageSize| match self.given_up {
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

    /// Moves what was written from `from` on to `to`: how many pages, and where to go on, if not all is done.
    pub fn collect(
        &self,
        pages: &mut impl TablePages,
        written: WrittenMap<'_>,
        to: WrittenMap<'_>,
        from: GuestPhys,
        budget: Budget,
    ) -> (u64, Option<GuestPhys>) {
        let mut number = (from.as_u64() / PAGE_SIZE) as usize / WORD_BITS;
        let (mut moved, mut looked) = (0, 0);
        while number < written.0.len() * WORDS {
            if looked == budget.words || moved >= budget.pages {
                return (moved, Some(address_of(number)));
            }
            looked += 1;
            let (Some(word), Some(taken)) = (written.word(number), to.word(number)) else {
                number = (number / WORDS + 1) * WORDS;
                continue;
            };
            // Most are 0, and need not become this CPU's.
            let mut bits =
                if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::Relaxed) };
            taken.fetch_or(bits, Ordering::Relaxed);
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

/// The first page of a word.
fn address_of(number: usize) -> GuestPhys {
    GuestPhys::new((number * WORD_BITS) as u64 * PAGE_SIZE)
}
