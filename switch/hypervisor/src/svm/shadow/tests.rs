//! Shadows against a model of KVM's table.

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
fn faults_of_kvms_own_table_go_to_kvm() {
    let mut host = Host::new(64);
    let denied = info::WRITE | 1 << 32;
    assert_eq!(host.access(1, denied), Fault::Guests(denied));
    host.give(1, 5, bit::PRESENT | bit::USER);
    assert_eq!(host.access(1, denied), Fault::Guests(denied | info::PRESENT));
    assert_eq!(host.access(1, info::FETCH), FILLED);
    host.give(1, 5, FULL | bit::NO_EXECUTE);
    assert_eq!(host.access(1, info::FETCH), Fault::Guests(info::FETCH | info::PRESENT));
    // KVM marks the entries of emulated devices so.
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
    let slot = host.shadow.walk(host.machine.live.pool(), GuestPhys::new(GUEST + 0x6000), PageSize::Size4K);
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
fn pages_of_dropped_shadows_return_to_the_pool() {
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
    /// Whatever KVM maps and the guest does: the snapshot holds what memory held, and the guest reaches
    /// what KVM gave it and nothing else.
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

    /// Whatever KVM maps and the guest does, by what it has not forgotten yet as well: what was not in the
    /// log is what it was when it was read last, and the guest's tables are KVM's.
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
