//! The instant of a snapshot: all CPUs meet in the hypervisor, the last one copies the persistent DMA
//! memory, and they all go on with the snapshot's tables.
//!
//! No CPU is trusted to come: each waits for the others for a bounded time.

use core::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::snapshot::{MAP_BITS, SnapshotSetup};

use super::free::Piece;
use super::live::{Live, ON_SNAPSHOT};
use super::rendezvous::{Arrival, Rendezvous};
use super::rollback::{self, Watch};
use super::system_memory::with_memory;
use super::view::Access;
use crate::address::{GuestPhys, HostPhys, PAGE_SIZE};
use crate::argument::array;
use crate::cpu::Area;
use crate::exit::Answer;
use crate::paging::format::Format;
use crate::vendor::Vendor;
use crate::x86::Hardware;

/// TSC ticks that a CPU waits for the others: one to a few seconds.
const PATIENCE: u64 = 1 << 32;

static RENDEZVOUS: Rendezvous = Rendezvous::new();
/// TSC ticks that the last CPU to come spent in [`enter`].
static ENTER_TICKS: AtomicU64 = AtomicU64::new(0);

/// The driver's setup of the instant, and the costs of its copies.
#[derive(Debug)]
pub(super) struct Instant {
    /// Number of CPUs that take part.
    cpus: u32,
    /// Bitmaps of the persistent DMA memory: a bit for each page that the snapshot keeps, in their order.
    persistent: &'static [Option<&'static Piece>],
    /// Number of pages copied at the instant.
    persistent_pages: u64,
    /// TSC ticks that the copies took.
    persistent_ticks: u64,
}

/// Times and pages of the instant, for the driver.
pub(super) struct Costs {
    /// TSC ticks of the last CPU to come.
    pub enter_ticks: u64,
    /// Pages of persistent DMA memory that were copied.
    pub persistent_pages: u64,
    /// TSC ticks that the copies took.
    pub persistent_ticks: u64,
}

impl Instant {
    /// Returns the instant of no snapshot.
    pub(super) const fn new() -> Self {
        Self { cpus: 0, persistent: &[], persistent_pages: 0, persistent_ticks: 0 }
    }

    /// Reads the setup of a snapshot that keeps so many pages.
    #[inline(never)]
    pub(super) fn of(setup: &SnapshotSetup, pages: u64) -> Result<Self, Code> {
        let count = pages.div_ceil(MAP_BITS as u64);
        // SAFETY: the driver keeps the array of `Begin`, and a bit for each page in the bitmaps that it
        // leads to, until `End`, in memory that it has mapped.
        let persistent = unsafe { array(setup.persistent_virt, count) }?;
        Ok(Self { cpus: setup.cpus, persistent, ..Self::new() })
    }

    /// Returns what the instant took.
    pub(super) fn costs(&self) -> Costs {
        Costs {
            enter_ticks: ENTER_TICKS.load(Ordering::Relaxed),
            persistent_pages: self.persistent_pages,
            persistent_ticks: self.persistent_ticks,
        }
    }
}

impl<F: Format<Address = GuestPhys>> Live<F> {
    /// Copies the persistent DMA memory, to which devices write at any time. An empty pool makes the
    /// snapshot invalid.
    #[inline(never)]
    pub(super) fn copy_persistent(&mut self) {
        let persistent = self.instant.persistent;
        self.instant.persistent_pages = 0;
        let mut first = 0;
        for range in self.memory.ranges {
            let end = first + range.pages as usize;
            let mut from = first;
            while let Some(number) = next_set(persistent, from, end) {
                let page = (number - first) as u64;
                self.permit_on_snapshot(GuestPhys::new(range.start_phys + page * PAGE_SIZE), Access::Write);
                if self.ledger.is_starved() {
                    return self.invalidate(Code::SnapshotPool);
                }
                self.instant.persistent_pages += 1;
                from = number + 1;
            }
            first = end;
        }
    }
}

/// Returns the number of the first bit at or after `from`, and before `end`, that is set.
fn next_set(pieces: &[Option<&Piece>], from: usize, end: usize) -> Option<usize> {
    let mut number = from;
    while number < end {
        let piece = *pieces.get(number / MAP_BITS)?;
        let piece_end = (number / MAP_BITS + 1) * MAP_BITS;
        let Some(piece) = piece else {
            number = piece_end;
            continue;
        };
        while number < end.min(piece_end) {
            let rest = piece[number % MAP_BITS / 64] >> (number % 64);
            if rest != 0 {
                let found = number + rest.trailing_zeros() as usize;
                return (found < end).then_some(found);
            }
            number = (number / 64 + 1) * 64;
        }
    }
    None
}

/// Prepares the rendezvous of a snapshot that begins.
pub(super) fn begin() {
    RENDEZVOUS.begin();
}

/// Has no CPU wait for the instant any more: one has failed, perhaps the one at work. Memory is as it was.
pub(super) fn give_up() {
    RENDEZVOUS.give_up();
}

/// Takes part in the instant: when the last CPU is here, none of them is in the system, and all go on with
/// the new tables. [`mercury_abi::snapshot::SnapshotCall::Enter`].
pub(super) fn enter<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Answer {
    let begun = hardware.tsc();
    let refused = |code| Answer::Hypercall(code, 0);
    let Some(Wanted { root, cpus, kept }) = wanted::<V>() else { return refused(Code::NoSnapshot) };
    let arrival = RENDEZVOUS.arrive(cpus);
    let met = match arrival {
        Arrival::Last => {
            with_memory(area, hardware, |_, hardware| at_the_instant::<V>(hardware));
            RENDEZVOUS.open();
            true
        }
        Arrival::Early => RENDEZVOUS.wait(hardware, cpus, PATIENCE),
        Arrival::Late => false,
    };
    if !met {
        return refused(Code::SnapshotMissed);
    }
    area.cpu.on_snapshot = ON_SNAPSHOT;
    if kept {
        rollback::watch(area, hardware, Watch::On);
    }
    if arrival == Arrival::Last {
        ENTER_TICKS.store(hardware.tsc().wrapping_sub(begun), Ordering::Relaxed);
    }
    Answer::NewTables(root)
}

/// Does the work of the last CPU, while none is in the system.
fn at_the_instant<V: Vendor>(hardware: &mut impl Hardware) {
    let Some(mut guard) = V::tables().lock() else { return };
    let Some(nested) = guard.as_mut() else { return };
    #[cfg(feature = "fault-injection")]
    nested.live.hash_memory();
    let begun = hardware.tsc();
    rollback::note_instant(begun);
    nested.live.copy_persistent();
    nested.live.instant.persistent_ticks = hardware.tsc().wrapping_sub(begun);
}

/// Data that a CPU needs to take part.
struct Wanted {
    /// Host-physical root of the snapshot's tables.
    root: HostPhys,
    /// Number of CPUs that are to come.
    cpus: u32,
    /// True if the machine can be put back to the snapshot.
    kept: bool,
}

fn wanted<V: Vendor>() -> Option<Wanted> {
    let guard = V::tables().lock()?;
    let live = &guard.as_ref()?.live;
    let root = live.snapshot.as_ref()?.root();
    Some(Wanted { root, cpus: live.instant.cpus, kept: live.target.is_some() })
}
