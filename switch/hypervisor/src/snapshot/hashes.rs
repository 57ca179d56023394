//! Hashes of all memory at the instant, with which tests prove what was read and what was put back
//! (fault-injection builds only).

use core::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::snapshot::{RollbackReport, hash};

use super::Memory;
use super::free::FreeMap;
use super::live::Live;
use super::system_memory::page;
use crate::address::{GuestPhys, HostPhys, PAGE_SIZE, PageSize};
use crate::argument::array;
use crate::paging::format::Format;

const PAGE_WORDS: usize = PAGE_SIZE as usize / size_of::<u64>();

/// One hash for each page that the snapshot keeps, in their order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hashes(&'static [AtomicU64]);

impl Hashes {
    /// Returns a set without hashes.
    pub(super) const fn new() -> Self {
        Self(&[])
    }

    /// Checks the driver's array for so many pages; none if the address is 0.
    pub(super) fn of(address: u64, pages: u64) -> Result<Self, Code> {
        // SAFETY: the driver keeps a word for each page until `End`, in memory that it has mapped, and
        // reads them only after the instant.
        unsafe { array(address, pages) }.map(Self)
    }

    /// Visits each page: its guest-physical address, the hash of the instant, and its hash now.
    fn each(self, memory: Memory<'_>, mut visit: impl FnMut(u64, &AtomicU64, u64)) {
        let mut hashes = self.0.iter();
        for range in memory.ranges {
            for (number, slot) in (0..range.pages).zip(&mut hashes) {
                let phys = range.start_phys + number * PAGE_SIZE;
                visit(phys, slot, hash_now(memory, phys));
            }
        }
    }
}

/// Hashes a page; one that was free at the instant counts as zeros.
fn hash_now(memory: Memory<'_>, phys: u64) -> u64 {
    if memory.free.has(GuestPhys::new(phys), PageSize::Size4K) {
        return hash(&[0; PAGE_WORDS]);
    }
    // SAFETY: memory that the driver has mapped, while no CPU writes to it.
    hash(unsafe { core::slice::from_raw_parts(page::<u64>(HostPhys::new(phys)), PAGE_WORDS) })
}

impl<F: Format<Address = GuestPhys>> Live<F> {
    /// Hashes every page, at the instant.
    pub(super) fn hash_memory(&self) {
        self.hashes.each(self.memory, |_, slot, found| slot.store(found, Ordering::Relaxed));
    }

    /// Hashes the hashes of all pages as they are, at the end of a life; 0 without hashes.
    pub(super) fn hash_dead(&self) -> u64 {
        let none = Memory { free: FreeMap(&[]), ..self.memory };
        let mut all = 0;
        self.hashes.each(none, |_, _, found| all = hash(&[all, found]));
        all
    }

    /// Compares every page with its hash of the instant, after a rollback.
    pub(super) fn compare_memory(&mut self) {
        let report = &mut RollbackReport { compared: 0, different: 0, ..self.report };
        self.hashes.each(self.memory, |phys, slot, found| {
            report.compared += 1;
            if slot.load(Ordering::Relaxed) != found {
                report.different_phys = if report.different == 0 { phys } else { report.different_phys };
                report.different += 1;
            }
        });
        self.report = *report;
    }
}
