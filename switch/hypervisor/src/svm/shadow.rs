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
    // SAFETY: the window's page is a control block of KVM's, which no other code uses while this CPU is between VMRUN and the
    // guest; all of its fields are integers.
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
    // SAFETY: in memory that the driver has mapped for the snapshot, all of which stays; aligned, and only ever
    // accessed atomically by KVM and the processor, too.
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
        // Where it cannot be followed, the machine goes on and the snapshot does not.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::paging::table::TablePages;
    use crate::snapshot::live;
    use crate::snapshot::tests::{Machine, Page, phys};
    use crate::snapshot::view::Access;

    /// First address of the guest whose entries are in KVM's last table.
    const GUEST: u64 = 0x4060_0000;
    /// Pages of the machine's memory: KVM's tables from the root down, and the guest's.
    const LAST: usize = 3;
    const FIRST_OF_GUEST: usize = 4;
    const FULL: u64 = bit::PRESENT | bit::WRITE | bit::USER;

    struct Host {
        machine: Machine<AmdNested>,
        shadow: Tables,
        guest: Guest,
    }

    fn entry(page: &mut Page, index: usize) -> &mut [u8] {
        &mut page.0[8 * index..8 * index + 8]
    }

    fn set(page: &mut Page, index: usize, value: u64) {
        entry(page, index).copy_from_slice(&value.to_le_bytes());
    }

    impl Host {
        fn new(pool: usize) -> Self {
            Self::on(live::ON_SNAPSHOT, pool)
        }

        /// Returns a host with a snapshot or a dirty log.
        fn on(beneath: u32, pool: usize) -> Self {
            let mut machine = Machine::new(pool);
            let tables: Vec<u64> = machine.memory.iter().map(phys).collect();
            let address = GuestPhys::new(GUEST);
            let sizes = [PageSize::Size512G, PageSize::Size1G, PageSize::Size2M];
            machine.memory[..FIRST_OF_GUEST].iter_mut().for_each(|page| page.0.fill(0));
            for (level, size) in sizes.into_iter().enumerate() {
                set(&mut machine.memory[level], address.index_at(size), tables[level + 1] | FULL);
            }
            let begun = if beneath == live::ON_LOG { machine.begin_log() } else { machine.begin() };
            begun.expect("tables");
            let shadow = Tables::new(machine.live.pool(), Depth::Four).expect("a root");
            let guest = Guest { root: tables[0], depth: Depth::Four, physical_bits: 48, beneath };
            Self { machine, shadow, guest }
        }

        /// Has KVM give the guest this page of memory.
        fn give(&mut self, index: usize, page: usize, flags: u64) {
            let table = GuestPhys::new(phys(&self.machine.memory[LAST]));
            self.system_writes(table);
            let at = phys(&self.machine.memory[page]);
            set(&mut self.machine.memory[LAST], index, if flags == 0 { 0 } else { at | flags });
        }

        /// Writes to a page as any task does above the tables of the snapshot, or of the dirty log.
        fn system_writes(&mut self, page: GuestPhys) {
            let live = &mut self.machine.live;
            let answered = match self.guest.beneath {
                live::ON_LOG => live.permit_on_log(page, Access::Write),
                _ => live.permit_on_snapshot(page, Access::Write),
            };
            assert!(answered);
        }

        /// Forgets the CPU's translations.
        fn flush(&mut self) {
            let mut shadow = Shadow { root: self.shadow.root().as_u64(), ..Shadow::default() };
            shadow.drop_all(self.machine.live.pool(), Depth::Four);
            self.shadow = Tables::new(self.machine.live.pool(), Depth::Four).expect("a root");
        }

        fn access(&mut self, index: usize, qualification: u64) -> Fault {
            let address = GuestPhys::new(GUEST + index as u64 * 4096 + 0x123);
            fill(&mut self.machine.live, self.shadow, self.guest, address, qualification)
        }

        /// Returns the page that the shadow leads to, and true if it can be written.
        fn translated(&mut self, index: usize) -> Option<(u64, bool)> {
            let address = GuestPhys::new(GUEST + index as u64 * 4096);
            let mapping = self.shadow.lookup(self.machine.live.pool(), address)?;
            Some((mapping.phys.as_u64(), mapping.writable))
        }

        fn last(&mut self, index: usize) -> u64 {
            u64::from_le_bytes(entry(&mut self.machine.memory[LAST], index).try_into().expect("a word"))
        }
    }

    const FILLED: Fault = Fault::Filled { wait: 0 };

    #[test]
    fn a_page_is_copied_before_its_guest_writes() {
        let mut host = Host::new(64);
        let frame = phys(&host.machine.memory[5]);
        host.give(2, 5, FULL);
        assert_eq!(host.access(2, 1 << 2), FILLED);
        assert_eq!(host.translated(2), Some((frame, false)));
        assert_eq!(host.last(2) & (bit::ACCESSED | bit::DIRTY), bit::ACCESSED);
        let copied = host.machine.live.pool().table(HostPhys::new(frame))[0];
        assert_eq!(host.access(2, info::WRITE | info::PRESENT), FILLED);
        assert_eq!(host.translated(2), Some((frame, true)));
        assert_eq!(host.last(2) & bit::DIRTY, bit::DIRTY);
        host.machine.memory[5].0.fill(0xEE);
        assert_eq!(host.machine.content(5).expect("kept").0[..8], copied.to_le_bytes());
        // KVM's table is as it was, too.
        assert_eq!(host.machine.content(LAST).expect("kept").0, [0; 4096]);
    }

    #[test]
    fn what_kvms_table_does_not_have_is_kvms() {
        let mut host = Host::new(64);
        let denied = info::WRITE | 1 << 32;
        assert_eq!(host.access(1, denied), Fault::Guests(denied));
        host.give(1, 5, bit::PRESENT | bit::USER);
        assert_eq!(host.access(1, denied), Fault::Guests(denied | info::PRESENT));
        assert_eq!(host.access(1, info::FETCH), FILLED);
        host.give(1, 5, FULL | bit::NO_EXECUTE);
        assert_eq!(host.access(1, info::FETCH), Fault::Guests(info::FETCH | info::PRESENT));
        // How KVM marks what it emulates.
        host.give(1, 5, FULL | 1 << 51);
        assert_eq!(host.access(1, denied), Fault::Guests(denied | info::PRESENT | info::RESERVED));
        assert!(host.machine.live.is_exact());
        host.guest.root = 0x7000;
        assert_eq!(host.access(1, denied), Fault::Wait, "a root outside of memory");
        assert!(!host.machine.live.is_exact());
        assert_eq!(host.translated(3), None);
    }

    #[test]
    fn large_pages_come_in_pieces() {
        let mut host = Host::new(64);
        let index = GuestPhys::new(GUEST).index_at(PageSize::Size2M);
        // Not the system's memory: nothing of it is kept.
        let device = 0xC000_0000 | FULL | bit::PAT | bit::PAT_OF_LARGE | bit::CACHE | bit::NO_EXECUTE;
        set(&mut host.machine.memory[2], index, device);
        assert_eq!(host.access(6, info::WRITE), FILLED);
        assert_eq!(host.translated(6), Some((0xC000_6000, true)));
        let slot =
            host.shadow.walk(host.machine.live.pool(), GuestPhys::new(GUEST + 0x6000), PageSize::Size4K);
        let kind = bit::PAT | bit::CACHE | bit::NO_EXECUTE;
        assert_eq!(slot.entry & (kind | bit::PAT_OF_LARGE), kind);
    }

    #[test]
    fn without_pages_the_system_waits_and_nothing_is_lost() {
        let mut host = Host::new(64);
        host.give(2, 5, FULL);
        while host.machine.live.pool().allocate().is_some() {}
        assert_eq!(host.access(2, info::WRITE), Fault::Wait);
        assert_eq!(host.translated(2), None);
        assert!(host.machine.live.is_exact());
    }

    #[test]
    fn what_is_dropped_goes_back_to_the_pool() {
        let mut host = Host::new(64);
        host.give(2, 5, FULL);
        assert_eq!(host.access(2, info::WRITE), FILLED);
        let count = |live: &mut Live<AmdNested>| {
            let mut pages = Vec::new();
            pages.extend(core::iter::from_fn(|| live.pool().allocate()));
            pages.iter().for_each(|page| live.pool().release(*page));
            pages.len()
        };
        let before = count(&mut host.machine.live);
        let mut shadow = Shadow { root: host.shadow.root().as_u64(), ..Shadow::default() };
        shadow.drop_all(host.machine.live.pool(), Depth::Four);
        assert!(!shadow.is_there());
        assert_eq!(count(&mut host.machine.live), before + 4);
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Give {
            index: usize,
            page: usize,
            flags: u64,
        },
        Access {
            index: usize,
            write: bool,
        },
        /// A collection begins, or its end is acknowledged: with a snapshot nothing.
        Collect,
    }

    fn op() -> impl Strategy<Value = Op> {
        let flags = prop_oneof![Just(0), Just(FULL), Just(bit::PRESENT | bit::USER), Just(FULL | bit::DIRTY)];
        prop_oneof![
            (0..4_usize, FIRST_OF_GUEST..8, flags).prop_map(|(index, page, flags)| Op::Give {
                index,
                page,
                flags
            }),
            (0..4_usize, any::<bool>()).prop_map(|(index, write)| Op::Access { index, write }),
            Just(Op::Collect),
        ]
    }

    proptest! {
        /// Whatever KVM maps and the guest does: the snapshot holds what memory held, and the guest reaches what KVM
        /// gave it and nothing else.
        #[test]
        fn snapshots_are_exact_beneath_guests(ops in prop::collection::vec(op(), 1..40)) {
            let mut host = Host::new(256);
            let before: Vec<Page> = host.machine.memory.to_vec();
            let mut given = [(0, 0); 4];
            for op in ops {
                match op {
                    Op::Give { index, page, flags } => {
                        host.give(index, page, flags);
                        given[index] = (page, flags);
                        // KVM does.
                        host.flush();
                    }
                    Op::Access { index, write } => {
                        let (page, flags) = given[index];
                        let may = flags & bit::PRESENT != 0 && (!write || flags & bit::WRITE != 0);
                        let fault = host.access(index, if write { info::WRITE } else { 0 });
                        prop_assert_eq!(fault == FILLED, may);
                        if may {
                            let (at, writable) = host.translated(index).expect("filled");
                            prop_assert_eq!(at, phys(&host.machine.memory[page]));
                            prop_assert!(writable || !write);
                            if write {
                                host.machine.memory[page].0[..4].fill(0xEE);
                            }
                        }
                    }
                    Op::Collect => {}
                }
            }
            for (number, page) in before.iter().enumerate() {
                let taken = host.machine.content(number).expect("kept");
                prop_assert!(taken.0 == page.0, "page {}", number);
            }
        }

        /// Whatever KVM maps and the guest does, by what it has not forgotten yet as well: what was not in the log is what it
        /// was when it was read last, and the guest's tables are KVM's.
        #[test]
        fn the_log_misses_nothing_beneath_guests(ops in prop::collection::vec(op(), 1..60)) {
            let mut host = Host::on(live::ON_LOG, 256);
            let mut read: Vec<Page> = host.machine.memory.to_vec();
            let mut given = [(0, 0); 4];
            let mut collected = None;
            let mut value = 0_u32;
            for op in ops.into_iter().chain([Op::Collect; 3]) {
                match op {
                    Op::Give { index, page, flags } => {
                        host.give(index, page, flags);
                        given[index] = (page, flags);
                        host.flush();
                    }
                    Op::Access { index, write } => {
                        let (page, flags) = given[index];
                        let may = flags & bit::PRESENT != 0 && (!write || flags & bit::WRITE != 0);
                        let known = host.translated(index).is_some_and(|(_, writable)| writable || !write);
                        let qualification = if write { info::WRITE } else { 0 };
                        let goes_on = known || host.access(index, qualification) == FILLED;
                        prop_assert_eq!(goes_on, may);
                        if may && write {
                            value += 1;
                            host.machine.memory[page].0[..4].copy_from_slice(&value.to_le_bytes());
                        }
                    }
                    Op::Collect => match collected.take() {
                        None => collected = Some(host.machine.collect().expect("the log is whole")),
                        Some(pages) => {
                            host.flush();
                            for page in pages {
                                read[page] = host.machine.memory[page].clone();
                            }
                        }
                    },
                }
                // The instant could be now, with what is written since the collection, and until it is read.
                if collected.is_none() {
                    let last = host.machine.collect().expect("the log is whole");
                    host.flush();
                    for (number, page) in host.machine.memory.iter().enumerate() {
                        prop_assert!(last.contains(&number) || read[number].0 == page.0, "page {}", number);
                    }
                    for page in last {
                        read[page] = host.machine.memory[page].clone();
                    }
                }
            }
        }
    }
}
