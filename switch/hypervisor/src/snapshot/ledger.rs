//! The pool ledger: pages that the driver has donated, and how long writers have waited for one.

use super::system_memory::page;
use super::{
    Pool,
    pool::{self, FreeList, Words},
};
use crate::address::{HostPhys, PAGE_SIZE};
use crate::paging::table::{Table, TablePages};
use crate::x86::{Hardware, Processor};

/// Donated pages, at their direct-map addresses.
#[derive(Debug)]
pub(crate) struct Ledger {
    free: FreeList,
    /// Number of pages that the driver has donated and not reclaimed.
    donated: u64,
    /// First and last time in a row that no page was free, in TSC ticks; `None` since a page was copied.
    starved: Option<(u64, u64)>,
    /// Number of calls of the reader that were told to hurry.
    hurries: u64,
    /// Number of times that a writer waited for a page.
    waits: u64,
}

struct Direct;

impl Words for Direct {
    fn first_word(&mut self, free: HostPhys) -> &mut u64 {
        // SAFETY: a free page of the pool. The driver mapped it for the hypervisor alone, and the lock around
        // `Live` makes this the only reference.
        unsafe { &mut *page::<u64>(free) }
    }
}

impl TablePages for Ledger {
    fn allocate(&mut self) -> Option<HostPhys> {
        self.free.pop(&mut Direct)
    }

    fn table(&mut self, phys: HostPhys) -> &mut Table {
        // SAFETY: a table of the pool or of the identity map, mapped for the hypervisor alone. The lock
        // around both makes this the only reference.
        unsafe { &mut *page::<Table>(phys) }
    }
}

impl Pool for Ledger {
    fn release(&mut self, unused: HostPhys) {
        self.free.push(&mut Direct, unused);
    }

    fn copy(&mut self, from: HostPhys, to: HostPhys) {
        // SAFETY: one is the pool's or a buffer of the driver's, the other a page of the memory that the
        // driver has mapped for the snapshot: they do not overlap. The system may write to its page
        // meanwhile only where the content does not matter any more.
        unsafe { crate::x86::copy_page(page(from), page(to)) };
    }

    fn clear(&mut self, unused: HostPhys) {
        // SAFETY: a buffer of the driver's, mapped for the hypervisor; no reference to it exists.
        unsafe { core::ptr::write_bytes(page::<u8>(unused), 0, PAGE_SIZE as usize) };
    }

    fn swap(&mut self, one: HostPhys, other: HostPhys) -> bool {
        // SAFETY: as in `copy`, and no CPU runs in the system: these are the only references.
        let (one, other) = unsafe { (&mut *page::<Table>(one), &mut *page::<Table>(other)) };
        let mut differ = 0;
        for (one, other) in one.iter_mut().zip(other) {
            differ |= *one ^ *other;
            core::mem::swap(one, other);
        }
        differ != 0
    }
}

impl Ledger {
    /// Returns the ledger of an empty pool.
    pub(super) const fn new() -> Self {
        Self { free: FreeList::new(), donated: 0, starved: None, hurries: 0, waits: 0 }
    }

    /// Adds a page that the driver donates.
    pub(super) fn donate(&mut self, page: HostPhys) {
        self.free.push(&mut Direct, page);
        self.donated += 1;
    }

    /// Gives a free page back to the driver.
    pub(super) fn reclaim(&mut self) -> Option<HostPhys> {
        let page = self.free.pop(&mut Direct)?;
        self.donated -= 1;
        Some(page)
    }

    /// Returns the number of free pages.
    pub(super) const fn free_pages(&self) -> u64 {
        self.free.count()
    }

    /// Returns how often the reader was told to hurry, and how often a writer waited.
    pub(super) const fn hurries_and_waits(&self) -> (u64, u64) {
        (self.hurries, self.waits)
    }

    /// Returns true if the pool runs low, so that the reader should hurry.
    pub(super) fn tells_to_hurry(&mut self) -> bool {
        let is_low = pool::is_low(self.free.count(), self.donated);
        self.hurries += u64::from(is_low);
        is_low
    }

    /// Returns the TSC ticks that a CPU has to wait after its write: see [`pool::wait`].
    pub(super) fn throttle(&mut self) -> u64 {
        let wait = pool::wait(self.free.count(), self.donated);
        self.waits += u64::from(wait > 0);
        wait
    }

    /// Notes that no page was free. Returns true if writers have waited for one longer than
    /// [`pool::PATIENCE`].
    #[inline(never)]
    pub(super) fn starve(&mut self) -> bool {
        let now = Processor.tsc();
        self.waits += 1;
        // A CPU that wrote may never write there again, and another one much later: that is a new row.
        let in_a_row = self.starved.filter(|(_, last)| now.wrapping_sub(*last) < pool::PATIENCE / 2);
        let first = in_a_row.map_or(now, |(first, _)| first);
        self.starved = Some((first, now));
        now.wrapping_sub(first) > pool::PATIENCE
    }

    /// Notes that a page was found.
    pub(super) const fn feed(&mut self) {
        self.starved = None;
    }

    /// Returns true if the last writer found no page.
    pub(super) const fn is_starved(&self) -> bool {
        self.starved.is_some()
    }
}

#[cfg(test)]
impl Ledger {
    /// Pretends that writers have found no page from `first` to `last`, in TSC ticks.
    pub(super) const fn set_starved(&mut self, first: u64, last: u64) {
        self.starved = Some((first, last));
    }

    /// Returns the number of pages that were donated, to be read or changed.
    pub(super) const fn donated(&mut self) -> &mut u64 {
        &mut self.donated
    }
}
