//! The identity map against a model: MTRRs, owned ranges, budgets and donations of any kind.
#![allow(missing_docs)]

mod common;

use std::cell::Cell;

use common::{GIB, MIB, Pool, any_mtrrs, contiguous, mtrrs, range, scattered};
use mercury_abi::gate::OwnedRange;
use mercury_hypervisor::address::{Address, GuestPhys, HostPhys, PageSize};
use mercury_hypervisor::mtrr::{MemoryType, Mtrrs};
use mercury_hypervisor::paging::format::{AmdNested, Format, IntelExtended};
use mercury_hypervisor::paging::identity::{FillOutcome, IdentityMap, NeedPages, SinkOutcome, Step};
use mercury_hypervisor::paging::plan::{LargestPage, Layout};
use mercury_hypervisor::paging::sink::MAX_SUNK;
use mercury_hypervisor::paging::table::{Depth, Mapping, Table};
use proptest::collection::vec;
use proptest::prelude::*;

const ZERO: HostPhys = HostPhys::new(0x1234_5000);
const SINK: HostPhys = HostPhys::new(0x1234_6000);

#[derive(Clone, Debug)]
struct Machine {
    layout: Layout,
    mtrrs: Mtrrs,
    owned: Vec<OwnedRange>,
}

impl Machine {
    fn limit(&self) -> u64 {
        1 << self.layout.physical_bits.min(self.layout.depth.address_bits())
    }

    fn eager_end(&self) -> u64 {
        self.layout.eager_end.as_u64().min(self.limit())
    }

    fn hides(&self, gpa: u64, size: u64) -> bool {
        let overlaps =
            |range: &OwnedRange| gpa < range.start_phys + range.pages * 4096 && range.start_phys < gpa + size;
        self.owned.iter().filter(|range| range.pages > 0).any(overlaps)
    }

    /// Returns true if a block may be one page.
    fn may_be_page(&self, gpa: u64, size: PageSize) -> bool {
        size <= self.layout.largest.size()
            && (gpa >= 2 * MIB || size == PageSize::Size4K)
            && self.mtrrs.uniform_type(HostPhys::new(gpa), size.bytes()).is_some()
    }

    /// Asserts that the mapping of a page that starts at `gpa` is right.
    fn check(&self, gpa: u64, mapping: Mapping, has_types: bool) {
        let size = mapping.size.bytes();
        assert_eq!(gpa % size, 0);
        let kind = |phys| if has_types { self.mtrrs.type_at(phys) } else { MemoryType::WriteBack };
        if self.hides(gpa, size) {
            assert_eq!((mapping.phys, mapping.writable), (ZERO, false), "hidden {gpa:#x}");
            assert_eq!((mapping.size, mapping.memory_type), (PageSize::Size4K, kind(ZERO)));
            return;
        }
        assert_eq!((mapping.phys.as_u64(), mapping.writable), (gpa, true));
        assert!(self.may_be_page(gpa, mapping.size), "{gpa:#x} {mapping:?}");
        assert_eq!(mapping.memory_type, kind(mapping.phys));
        self.check_largest(gpa, mapping.size);
    }

    /// Asserts that a page is smaller than the largest only for a reason.
    fn check_largest(&self, gpa: u64, size: PageSize) {
        let larger = match size {
            PageSize::Size4K => PageSize::Size2M,
            _ => PageSize::Size1G,
        };
        let block = GuestPhys::new(gpa).align_down(larger).as_u64();
        let reason =
            size == PageSize::Size1G || !self.may_be_page(block, larger) || self.hides(block, larger.bytes());
        assert!(reason, "{gpa:#x} could be in a larger page than {size:?}");
    }
}

type Map<F> = IdentityMap<F>;

/// Builds to the end; `budget` and `donation` are asked for each step.
fn build<F: Format<Address = GuestPhys>>(
    machine: &Machine,
    pool: &mut Pool,
    mut budget: impl FnMut() -> usize,
    mut donation: impl FnMut(usize) -> usize,
) -> Map<F> {
    let mut map = Map::<F>::new(machine.layout, machine.mtrrs);
    loop {
        match map.build_step(pool, &machine.owned, budget()) {
            Step::Done => return map,
            Step::More => {}
            Step::NeedPages(needed) => {
                assert!(pool.available == 0 && needed > 0);
                pool.available = donation(needed);
            }
        }
    }
}

fn build_at_once<F: Format<Address = GuestPhys>>(machine: &Machine) -> (Map<F>, Pool) {
    let mut pool = Pool::default();
    let donations = Cell::new(0);
    let map = build::<F>(
        machine,
        &mut pool,
        || usize::MAX,
        |needed| {
            donations.set(donations.get() + 1);
            needed
        },
    );
    assert_eq!(donations.get(), 1, "the first answer was no upper bound");
    (map, pool)
}

/// Checks all pages of `start..end`.
fn check_all<F: Format<Address = GuestPhys>>(
    machine: &Machine,
    map: &Map<F>,
    pool: &mut Pool,
    has_types: bool,
    (start, end): (u64, u64),
) {
    let mut gpa = start;
    while gpa < end {
        let mapping = map.lookup(pool, GuestPhys::new(gpa)).unwrap_or_else(|| panic!("no {gpa:#x}"));
        machine.check(gpa, mapping, has_types);
        gpa += mapping.size.bytes();
    }
}

fn check_build<F: Format<Address = GuestPhys>>(machine: &Machine, has_types: bool) {
    let (map, mut pool) = build_at_once::<F>(machine);
    assert_eq!(map.pages_used(), pool.tables.len());
    assert!(map.pages_used() <= map.pages_bound(&machine.owned));
    check_all(machine, &map, &mut pool, has_types, (0, machine.eager_end()));
    for range in &machine.owned {
        let end = (range.start_phys + range.pages * 4096).min(machine.limit());
        check_all(machine, &map, &mut pool, has_types, (range.start_phys, end));
    }
    assert_eq!(map.lookup(&mut pool, GuestPhys::new(machine.limit())), None);
}

fn owned_range(space: u64) -> impl Strategy<Value = OwnedRange> {
    let start = prop_oneof![0..space / 4096, (0..space / (2 * MIB)).prop_map(|block| block * 512)];
    let pages = prop_oneof![0..20_u64, 0..2000_u64, Just(512), Just(1024), 1..0x5_0000_u64];
    (start, pages).prop_map(|(start, pages)| OwnedRange { start_phys: start * 4096, pages })
}

fn any_layout() -> impl Strategy<Value = Layout> {
    let depth = prop_oneof![Just(Depth::Four), Just(Depth::Five)];
    let largest = prop_oneof![Just(LargestPage::OneGibibyte), Just(LargestPage::TwoMebibytes)];
    let eager_end = prop_oneof![0..6 * GIB, (0..8_u64).prop_map(|gib| gib * GIB)];
    let complete_pages = prop_oneof![Just(0), Just(600)];
    (31..43_u32, depth, largest, eager_end, complete_pages).prop_map(
        |(physical_bits, depth, largest, eager_end, complete_pages)| Layout {
            physical_bits,
            depth,
            largest,
            eager_end: GuestPhys::new(eager_end),
            complete_pages,
            zero_page: ZERO,
        },
    )
}

fn any_machine() -> impl Strategy<Value = Machine> {
    any_layout().prop_flat_map(|layout| {
        let bits = layout.physical_bits;
        let ranges = prop_oneof![4 => contiguous(bits, 12), 1 => scattered(bits, 27)];
        let top = proptest::option::of(3 * GIB..7 * GIB);
        let owned = vec(owned_range(1 << bits.min(33)), 0..5);
        (Just(layout), any_mtrrs(ranges, bits, top), owned).prop_map(|(layout, mtrrs, owned)| Machine {
            layout,
            mtrrs,
            owned,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn amd_map_is_right(machine in any_machine()) {
        check_build::<AmdNested>(&machine, false);
    }

    #[test]
    fn intel_map_is_right(machine in any_machine()) {
        check_build::<IntelExtended>(&machine, true);
    }

    /// Wherever a step ends, for lack of budget or of pages, the tables are the same.
    #[test]
    fn interruptions_change_nothing(
        machine in any_machine(),
        budgets in vec(0..7_usize, 1..20),
        donations in vec(1..9_usize, 1..20),
    ) {
        let (whole, whole_pool) = build_at_once::<AmdNested>(&machine);
        let mut pool = Pool::default();
        let (mut budgets, mut donations) = (budgets.into_iter().cycle(), donations.into_iter().cycle());
        let pieces = build::<AmdNested>(
            &machine,
            &mut pool,
            || budgets.next().unwrap_or(1),
            |needed| donations.next().unwrap_or(1).min(needed),
        );
        prop_assert_eq!(pieces.root(), whole.root());
        prop_assert_eq!(pieces.pages_used(), whole.pages_used());
        prop_assert_eq!(pool.tables, whole_pool.tables);
    }

    /// Ranges that turn up later are hidden as if they had been there from the start.
    #[test]
    fn later_ranges_are_hidden(machine in any_machine(), known in 0..5_usize) {
        let (whole, whole_pool) = build_at_once::<IntelExtended>(&machine);
        let owned = machine.owned[..known.min(machine.owned.len())].to_vec();
        let first = Machine { owned, ..machine.clone() };
        let (mut map, mut pool) = build_at_once::<IntelExtended>(&first);
        pool.available = usize::MAX;
        prop_assert_eq!(map.build_step(&mut pool, &machine.owned, usize::MAX), Step::Done);
        prop_assert_eq!(map.pages_used(), whole.pages_used());
        prop_assert_eq!(pool.tables, whole_pool.tables);
    }

    /// Addresses that the build left out are filled on demand, before and after its end.
    #[test]
    fn the_rest_is_filled(
        machine in any_machine(),
        steps in 0..20_usize,
        gpas in vec(prop_oneof![0..8 * GIB, 0..1_u64 << 43], 1..20),
    ) {
        let mut pool = Pool::with(usize::MAX);
        let mut map = Map::<IntelExtended>::new(machine.layout, machine.mtrrs);
        map.build_step(&mut pool, &[], steps);
        for gpa in gpas.iter().map(|gpa| GuestPhys::new(*gpa)) {
            fill_and_check(&machine, &mut map, &mut pool, gpa);
        }
        while map.build_step(&mut pool, &machine.owned, 50) != Step::Done {}
        check_all(&machine, &map, &mut pool, true, (0, machine.eager_end()));
        for gpa in gpas.iter().map(|gpa| GuestPhys::new(*gpa)) {
            let outcome = map.fill(&mut pool, gpa);
            prop_assert_ne!(outcome, Ok(FillOutcome::Filled));
        }
    }

    /// Without pages `fill` says how many, and with so many it succeeds.
    #[test]
    fn fill_names_its_need(machine in any_machine(), gpa in 0..1_u64 << 31) {
        let gpa = GuestPhys::new(gpa);
        let (mut map, mut pool) = build_at_once::<AmdNested>(
            &Machine { layout: Layout { eager_end: GuestPhys::new(0), ..machine.layout }, ..machine.clone() },
        );
        pool.available = 0;
        let mut needed = 0;
        while let Err(NeedPages(more)) = map.fill(&mut pool, gpa) {
            prop_assert!(needed == 0 || more < needed);
            needed = more;
            pool.available = 1;
        }
        prop_assert!(map.lookup(&mut pool, gpa).is_some());
    }

    /// Writes sink a page, and only the last of them stay sunk.
    #[test]
    fn sinks_come_and_go(machine in any_machine(), writes in vec((0..5_usize, any::<u64>()), 1..200)) {
        let (mut map, mut pool) = build_at_once::<AmdNested>(&machine);
        let before = pool.tables.clone();
        for (number, page) in writes {
            let Some(range) = machine.owned.get(number).filter(|range| range.pages > 0) else { continue };
            let gpa = GuestPhys::new(range.start_phys + page % range.pages * 4096 + 8);
            if gpa.as_u64() >= machine.limit() {
                prop_assert_eq!(map.sink(&mut pool, gpa, SINK), SinkOutcome::Absent);
                continue;
            }
            prop_assert_ne!(map.sink(&mut pool, gpa, SINK), SinkOutcome::Absent);
            let mapping = map.lookup(&mut pool, gpa).expect("a hidden page is mapped");
            prop_assert_eq!((mapping.phys.as_u64(), mapping.writable), (SINK.as_u64() + 8, true));
            prop_assert_eq!(map.sink(&mut pool, gpa, SINK), SinkOutcome::Writable);
        }
        let entries = |tables: &[Box<Table>]| tables.iter().flat_map(|table| **table).collect::<Vec<u64>>();
        let (before, after) = (entries(&before), entries(&pool.tables));
        let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        prop_assert!(before.len() == after.len() && changed <= MAX_SUNK, "{changed} entries");
    }

    /// Layouts and ranges with any contents: an answer, no panic.
    #[test]
    fn garbage_is_answered(
        machine in any_machine(),
        physical_bits in any::<u32>(),
        eager_end in any::<u64>(),
        ranges in vec(any::<(u64, u64)>(), 0..4),
        gpa in any::<u64>(),
    ) {
        let eager_end = GuestPhys::new(eager_end);
        let layout = Layout { physical_bits, eager_end, ..machine.layout };
        let owned: Vec<_> =
            ranges.into_iter().map(|(start_phys, pages)| OwnedRange { start_phys, pages }).collect();
        let mut map = Map::<AmdNested>::new(layout, machine.mtrrs);
        let mut pool = Pool::with(200);
        for _ in 0..10 {
            map.build_step(&mut pool, &owned, 100);
        }
        let gpa = GuestPhys::new(gpa);
        if let Ok(FillOutcome::Filled) = map.fill(&mut pool, gpa) {
            prop_assert!(map.lookup(&mut pool, gpa).is_some());
        }
        map.sink(&mut pool, gpa, SINK);
    }
}

fn fill_and_check(machine: &Machine, map: &mut Map<IntelExtended>, pool: &mut Pool, gpa: GuestPhys) {
    let before = map.lookup(pool, gpa);
    let outcome = map.fill(pool, gpa).expect("enough pages");
    if gpa.as_u64() >= machine.limit() {
        assert_eq!(outcome, FillOutcome::OutOfRange);
        return;
    }
    assert_eq!(outcome == FillOutcome::Present, before.is_some());
    let mapping = map.lookup(pool, gpa).expect("filled");
    let unhidden = Machine { owned: Vec::new(), ..machine.clone() };
    let page = HostPhys::new(gpa.align_down(mapping.size).as_u64());
    unhidden.check(page.as_u64(), Mapping { phys: page, ..mapping }, true);
}

/// Returns a server: 3 GiB and `above` GiB of RAM, write-back by two ranges and TOP_MEM2, the hypervisor in
/// a contiguous 8 MiB, and areas for 64 CPUs.
fn server(physical_bits: u32, above: u64) -> Machine {
    let ranges = [
        range(MemoryType::WriteBack, 0, 31, physical_bits),
        range(MemoryType::WriteBack, 2, 30, physical_bits),
    ];
    let mut mtrrs = mtrrs(MemoryType::Uncacheable, &ranges, physical_bits);
    let end = 4 * GIB + above * GIB;
    mtrrs.top_of_memory_2 = Some(end);
    let areas = (0..64).map(|cpu| OwnedRange { start_phys: 5 * GIB + cpu * 0x8000, pages: 8 });
    let owned = std::iter::once(OwnedRange { start_phys: 5 * GIB + 32 * MIB, pages: 2048 }).chain(areas);
    let layout = Layout {
        physical_bits,
        depth: Depth::Four,
        largest: LargestPage::OneGibibyte,
        eager_end: GuestPhys::new(end),
        complete_pages: 600,
        zero_page: ZERO,
    };
    Machine { layout, mtrrs, owned: owned.collect() }
}

#[test]
fn pages_of_a_48_bit_server() {
    let machine = server(48, 61);
    let (map, mut pool) = build_at_once::<AmdNested>(&machine);
    assert!(map.pages_used() < 600, "{}", map.pages_used());
    check_all(&machine, &map, &mut pool, false, (0, 1 << 48));
}

#[test]
fn pages_of_a_40_bit_machine() {
    let machine = server(40, 61);
    let (map, mut pool) = build_at_once::<AmdNested>(&machine);
    assert!(map.pages_used() < 40, "{}", map.pages_used());
    check_all(&machine, &map, &mut pool, false, (0, 1 << 40));
}

#[test]
fn beyond_48_bits_is_lazy() {
    let mut machine = server(52, 61);
    machine.layout.depth = Depth::Five;
    let (mut map, mut pool) = build_at_once::<IntelExtended>(&machine);
    check_all(&machine, &map, &mut pool, true, (0, 1 << 48));
    let gpa = GuestPhys::new((1 << 52) - 4096);
    assert_eq!(map.lookup(&mut pool, gpa), None);
    pool.available = 0;
    assert_eq!(map.fill(&mut pool, gpa), Err(NeedPages(4)));
    pool.available = 2;
    assert_eq!(map.fill(&mut pool, gpa), Ok(FillOutcome::Filled));
    assert_eq!(map.lookup(&mut pool, gpa).map(|mapping| mapping.phys), Some(gpa.identity()));
    assert_eq!(map.fill(&mut pool, GuestPhys::new(1 << 52)), Ok(FillOutcome::OutOfRange));
}

/// The completion is left out where it is not affordable.
#[test]
fn completion_has_a_price() {
    let mut machine = server(48, 61);
    machine.layout.complete_pages = 511;
    let (map, mut pool) = build_at_once::<AmdNested>(&machine);
    assert!(map.pages_used() > 511);
    machine.layout.complete_pages = 510;
    let (map, mut small) = build_at_once::<AmdNested>(&machine);
    assert!(map.pages_used() < 20);
    assert_eq!(map.lookup(&mut small, GuestPhys::new(1 << 47)), None);
    check_all(&machine, &map, &mut pool, false, (0, machine.eager_end()));
}

/// No step allocates or links more than one table for each unit of its budget.
#[test]
fn work_is_bounded() {
    let machine = server(48, 61);
    let mut map = Map::<AmdNested>::new(machine.layout, machine.mtrrs);
    let mut pool = Pool::with(usize::MAX);
    loop {
        let before = pool.tables.len();
        let step = map.build_step(&mut pool, &machine.owned, 3);
        assert!(pool.tables.len() <= before + 3);
        if step == Step::Done {
            return;
        }
    }
}

/// Exact entries: HARDWARE.
#[test]
fn entries_of_the_first_tables() {
    let machine = server(40, 61);
    let (map, mut pool) = build_at_once::<AmdNested>(&machine);
    let root = *pool.tables[0];
    assert_eq!(map.root(), Some(HostPhys::new(0x7_0000_0000)));
    assert_eq!(root[0], 0x7_0000_1067);
    let pointers = *pool.tables[1];
    assert_eq!(pointers[0] & 0xfff, 0x67);
    assert_eq!(pointers[1], 0x4000_00e7);
    let directory = *pool.tables[2];
    assert_eq!((directory[0] & 0xfff, directory[1]), (0x67, 0x20_00e7));
    let first = *pool.tables[3];
    assert_eq!((first[0], first[0xa0], first[511]), (0x67, 0xa_0067, 0x1f_f067));
    assert_eq!(map.lookup(&mut pool, GuestPhys::new(5 * GIB)).map(|page| page.phys), Some(ZERO));
}
