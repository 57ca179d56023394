//! Guests of the system above while a snapshot or a dirty log is live.
//!
//! A guest reaches memory through KVM's own nested table, round the tables that protect the snapshot. So as
//! long as there is a snapshot, the guest runs on a *shadow* of that table. The shadow is empty at first,
//! and filled fault by fault from KVM's table, 4 KiB at a time. A page is writable there only if its
//! content at the instant is safe, or if the dirty log has the page.
//!
//! A collection of the dirty log takes permissions back. The shadow expires when its CPU forgets
//! translations for the collection, and frames are read after that ([`crate::snapshot::dirty_log`]).
//!
//! A shadow follows the rules of a processor's translations (APM vol. 2, 15.25). It may be forgotten at any
//! time. It sets accessed and dirty bits in KVM's entries before it uses them. KVM flushes it as it would
//! flush translations: by TLB_CONTROL, by another identifier, or by another root. A fault that KVM's table
//! explains is KVM's, and KVM sees it as the processor would have shown it.
//!
//! The processor writes the guest's control block, and this code writes KVM's table: the pages of both are
//! copied, or noted, first.

#[cfg(test)]
mod tests;

use core::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::code::Code;

use super::vmcb::{TLB_FLUSH_ALL, TLB_KEEP};
use super::{Area, Svm, guests};
use crate::address::{Address, GuestPhys, HostPhys, PageSize, TABLE_ENTRIES};
use crate::mtrr::MemoryType;
use crate::paging::format::{AmdNested, Format, Permission};
use crate::paging::table::{Depth, PageTable};
use crate::snapshot::Pool;
use crate::snapshot::live::{Live, WritePermit};
use crate::snapshot::system_memory::page;
use crate::vendor::Vendor;

type Tables = PageTable<AmdNested>;

/// Levels of tables, at most.
const LEVELS: usize = 5;
/// [`super::vmcb::Vmcb::nested_control`]: nested paging is on.
const NESTED_PAGING: u64 = 1 << 0;

/// Bits of an entry of KVM's (APM vol. 2, 5.4).
mod bit {
    pub const PRESENT: u64 = 1 << 0;
    pub const WRITE: u64 = 1 << 1;
    pub const USER: u64 = 1 << 2;
    pub const CACHE: u64 = 1 << 3 | 1 << 4;
    pub const ACCESSED: u64 = 1 << 5;
    pub const DIRTY: u64 = 1 << 6;
    /// PAT in an entry of the last level, and in one that maps a larger page.
    pub const PAT: u64 = 1 << 7;
    pub const PAT_OF_LARGE: u64 = 1 << 12;
    pub const NO_EXECUTE: u64 = 1 << 63;
}

/// Bits of a nested fault's first qualification (APM vol. 2, 15.25.6).
pub mod info {
    /// KVM's table has the page.
    pub const PRESENT: u64 = 1 << 0;
    /// The access was a write.
    pub const WRITE: u64 = 1 << 1;
    /// Reserved bits are set in an entry.
    pub const RESERVED: u64 = 1 << 3;
    /// The access was an instruction fetch.
    pub const FETCH: u64 = 1 << 4;
}

/// One CPU's shadow, and the guest that it belongs to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shadow {
    /// Root of the shadow, host-physical; 0: there is none.
    root: u64,
    /// Control block of the guest, host-physical.
    block: u64,
    /// Root of KVM's table, host-physical.
    nested_cr3: u64,
    /// Address-space identifier of the guest.
    asid: u64,
}

impl Shadow {
    /// Forgets the shadow. Its pages belong to the snapshot's pool, and go with that.
    pub const fn forget(&mut self) {
        self.root = 0;
    }

    /// Marks the content as not to be used any more: the next guest gets another shadow, and flushes.
    pub const fn expire(&mut self) {
        self.block = guests::NO_BLOCK;
    }

    /// Returns true if there is a shadow.
    #[must_use]
    pub const fn is_there(&self) -> bool {
        self.root != 0
    }

    fn drop_all(&mut self, pool: &mut impl Pool, depth: Depth) {
        if self.root != 0 {
            release(pool, HostPhys::new(self.root), depth.root_entry());
            self.root = 0;
        }
    }
}

/// Gives the shadow of this CPU back to the pool of a snapshot that stays.
pub(super) fn release_own(area: &mut Area) {
    if area.own.shadow.is_there()
        && let Some(mut guard) = Svm::tables().lock()
        && let Some(nested) = guard.as_mut()
        && let Some(depth) = nested.tables().map(|tables| tables.depth())
    {
        area.own.shadow.drop_all(nested.live.pool(), depth);
    }
}

/// Gives a table and all beneath it back to the pool.
fn release(pool: &mut impl Pool, table: HostPhys, size: PageSize) {
    for index in 0..TABLE_ENTRIES {
        let entry = pool.table(table)[index];
        if let Some(smaller) = size.smaller().filter(|_| AmdNested::is_present(entry)) {
            release(pool, AmdNested::address(entry), smaller);
        }
    }
    pool.release(table);
}

/// Way of entering a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepared {
    /// On KVM's own table: no page must be kept any more.
    InPlace,
    /// On the shadow, whose root is in the block now.
    Shadowed,
    /// Not now: no page is free for a copy of the block. The system executes VMRUN again.
    Wait,
    /// Not now: no page is free for the shadow. The system does other work first.
    WaitOutside,
    /// Never: the guest would write pages that must be kept.
    Impossible,
}

/// Prepares the entry of the guest whose block the window shows.
pub fn prepare(area: &mut Area) -> Prepared {
    let phys = area.own.block_phys;
    let block = guests::block(area);
    let Some(mut guard) = Svm::tables().lock() else { return Prepared::Impossible };
    let Some(nested) = guard.as_mut() else { return Prepared::Impossible };
    let Some(depth) = nested.tables().map(|tables| tables.depth()) else { return Prepared::Impossible };
    let live = &mut nested.live;
    match live.permit_write(GuestPhys::new(phys), area.cpu.on_snapshot) {
        WritePermit::Granted => {}
        WritePermit::Wait => return Prepared::Wait,
        WritePermit::Foreign => return Prepared::Impossible,
    }
    // SAFETY: the window's page is a control block of KVM's, which no other code uses while this CPU is
    // between VMRUN and the guest; all of its fields are integers.
    let block = unsafe { &mut *block };
    let shadow = &mut area.own.shadow;
    if !live.watches(area.cpu.on_snapshot) {
        if shadow.is_there() {
            block.tlb_control = TLB_FLUSH_ALL;
        }
        shadow.drop_all(live.pool(), depth);
        return Prepared::InPlace;
    }
    if block.nested_control & NESTED_PAGING == 0 {
        return Prepared::Impossible;
    }
    let wanted =
        Shadow { root: shadow.root, block: phys, nested_cr3: block.nested_cr3, asid: block.asid.into() };
    if *shadow != wanted || block.tlb_control != TLB_KEEP {
        shadow.drop_all(live.pool(), depth);
        // The pages of the old tables have another use now.
        block.tlb_control = TLB_FLUSH_ALL;
    }
    if !shadow.is_there() {
        let Ok(tables) = Tables::new(live.pool(), depth) else {
            live.starve();
            return Prepared::WaitOutside;
        };
        *shadow = Shadow { root: tables.root().as_u64(), ..wanted };
    }
    area.own.guest_nested_cr3 = block.nested_cr3;
    block.nested_cr3 = shadow.root;
    Prepared::Shadowed
}

/// Answer to a nested fault of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The fault was the shadow's: the guest goes on.
    Filled {
        /// TSC ticks to wait before, because the pool runs low.
        wait: u64,
    },
    /// The fault is KVM's, with this qualification.
    Guests(u64),
    /// No page is free: the system does other work first.
    Wait,
}

/// Answers a nested fault of the guest that runs on the shadow.
pub fn fault(area: &mut Area, address: u64, qualification: u64, physical_bits: u32) -> Fault {
    let Some(mut guard) = Svm::tables().lock() else { return Fault::Wait };
    let Some(nested) = guard.as_mut() else { return Fault::Wait };
    let Some(depth) = nested.tables().map(|tables| tables.depth()) else { return Fault::Wait };
    let own = &area.own;
    let shadow = Tables::at(HostPhys::new(own.shadow.root), depth);
    let guest = Guest { root: own.guest_nested_cr3, depth, physical_bits, beneath: area.cpu.on_snapshot };
    fill(&mut nested.live, shadow, guest, GuestPhys::new(address), qualification)
}

/// The guest's own tables, and the tables that its CPU runs on.
#[derive(Clone, Copy, Debug)]
struct Guest {
    /// Root of KVM's table, host-physical.
    root: u64,
    depth: Depth,
    physical_bits: u32,
    /// Tables that the CPU runs on: [`crate::cpu::Cpu::on_snapshot`].
    beneath: u32,
}

/// An entry of KVM's table: its host-physical address and its value.
type Step = (u64, u64);

/// Result of a walk through KVM's table.
enum Walk {
    /// A page, with the entries that led there. The last one is its own.
    Page { steps: [Step; LEVELS], count: usize, size: PageSize },
    /// No page, with the bits of the qualification that say why.
    None(u64),
    /// A table outside of the snapshot's memory: in pages that were the pool's.
    Unknown,
}

/// Follows KVM's table, which other CPUs may change meanwhile, as a processor does.
fn walk(live: &Live<AmdNested>, guest: Guest, address: GuestPhys) -> Walk {
    let reserved = AmdNested::address(u64::MAX).as_u64() & !((1 << guest.physical_bits.min(52)) - 1);
    let (mut table, mut size) = (AmdNested::address(guest.root), guest.depth.root_entry());
    let mut steps = [(0, 0); LEVELS];
    let mut count = 0;
    loop {
        if !live.is_memory(GuestPhys::new(table.as_u64())) {
            return Walk::Unknown;
        }
        let at = table.as_u64() + 8 * address.index_at(size) as u64;
        let entry = word(at).load(Ordering::Acquire);
        if entry & bit::PRESENT == 0 {
            return Walk::None(0);
        }
        if entry & reserved != 0 {
            return Walk::None(info::PRESENT | info::RESERVED);
        }
        steps[count] = (at, entry);
        count += 1;
        match size.smaller() {
            Some(smaller) if !AmdNested::is_leaf(entry, size) => size = smaller,
            _ => return Walk::Page { steps, count, size },
        }
        table = AmdNested::address(entry);
    }
}

/// Returns a word of memory that other CPUs write as well.
fn word(phys: u64) -> &'static AtomicU64 {
    let page = page::<AtomicU64>(HostPhys::new(phys & !0xFFF));
    // SAFETY: in memory that the driver has mapped for the snapshot, all of which stays; aligned, and only
    // ever accessed atomically by KVM and the processor, too.
    unsafe { &*page.add(phys as usize % 4096 / 8) }
}

/// Answers a fault from KVM's table.
fn fill(
    live: &mut Live<AmdNested>,
    shadow: Tables,
    guest: Guest,
    address: GuestPhys,
    qualification: u64,
) -> Fault {
    let guests = |bits| Fault::Guests(qualification & !(info::PRESENT | info::RESERVED) | bits);
    let (steps, count, size) = match walk(live, guest, address) {
        Walk::Page { steps, count, size } => (steps, count, size),
        Walk::None(why) => return guests(why),
        // The table cannot be followed there: the machine goes on, and the snapshot is invalid.
        Walk::Unknown => {
            live.invalidate(Code::SnapshotGuest);
            return Fault::Wait;
        }
    };
    let steps = &steps[..count];
    let all = |bit: u64| steps.iter().all(|(_, entry)| entry & bit != 0);
    let no_execute = steps.iter().any(|(_, entry)| entry & bit::NO_EXECUTE != 0);
    let write = qualification & info::WRITE != 0;
    let denied = !all(bit::USER) || write && !all(bit::WRITE);
    if denied || no_execute && qualification & info::FETCH != 0 {
        return guests(info::PRESENT);
    }
    let (_, leaf) = steps[count - 1];
    let start = AmdNested::address(leaf).align_down(size);
    let frame = start.saturating_add(address.offset_in(size)).align_down(PageSize::Size4K);
    if write {
        match live.permit_write(GuestPhys::new(frame.as_u64()), guest.beneath) {
            WritePermit::Granted => {}
            WritePermit::Wait => return Fault::Wait,
            WritePermit::Foreign => return guests(info::PRESENT),
        }
    }
    for (number, &(at, entry)) in steps.iter().enumerate() {
        let used = if write && number + 1 == count { bit::ACCESSED | bit::DIRTY } else { bit::ACCESSED };
        if entry & used == used {
            continue;
        }
        match live.permit_write(GuestPhys::new(at), guest.beneath) {
            WritePermit::Granted => {}
            WritePermit::Wait | WritePermit::Foreign => return Fault::Wait,
        }
        // Another CPU has changed the entry: the guest faults again.
        if word(at).compare_exchange(entry, entry | used, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Fault::Filled { wait: 0 };
        }
    }
    let pat = if size == PageSize::Size4K { bit::PAT } else { bit::PAT_OF_LARGE };
    let kind = leaf & bit::CACHE | if leaf & pat != 0 { bit::PAT } else { 0 };
    let permission = if write { Permission::Full } else { Permission::ReadOnly };
    let no_execute = if no_execute { bit::NO_EXECUTE } else { 0 };
    let entry =
        AmdNested::leaf(frame, PageSize::Size4K, permission, MemoryType::WriteBack) | kind | no_execute;
    let place = address.align_down(PageSize::Size4K);
    if shadow.map(live.pool(), place, PageSize::Size4K, entry).is_err() {
        live.starve();
        return Fault::Wait;
    }
    Fault::Filled { wait: if write { live.throttle() } else { 0 } }
}
