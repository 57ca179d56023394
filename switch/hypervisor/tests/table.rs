//! Mapping and splitting against a model.
#![allow(missing_docs)]

mod common;

use std::collections::BTreeMap;

use common::Pool;
use mercury_hypervisor::address::{Address, GuestPhys, HostPhys, PageSize};
use mercury_hypervisor::mtrr::MemoryType;
use mercury_hypervisor::paging::format::{AmdNested, Format, IntelExtended, Permission};
use mercury_hypervisor::paging::table::{Depth, Exhausted, PageTable};
use proptest::collection::vec;
use proptest::prelude::*;

fn any_size() -> impl Strategy<Value = PageSize> {
    prop_oneof![Just(PageSize::Size4K), Just(PageSize::Size2M), Just(PageSize::Size1G)]
}

fn any_permission() -> impl Strategy<Value = Permission> {
    prop_oneof![Just(Permission::Full), Just(Permission::ReadOnly)]
}

/// Addresses that meet often: few blocks of each size.
fn any_gpa() -> impl Strategy<Value = GuestPhys> {
    (0..2_u64, 0..2_u64, 0..3_u64, 0..3_u64)
        .prop_map(|(a, b, c, d)| GuestPhys::new(a << 47 | b << 30 | c << 21 | d << 12))
}

/// Maps in `order`, splits everything at the end, and compares with the last mapping of each address.
fn maps_like_a_model<F: Format<Address = GuestPhys>>(order: &[(GuestPhys, PageSize, Permission, u64)]) {
    let mut pool = Pool::with(usize::MAX);
    let tables = PageTable::<F>::new(&mut pool, Depth::Five).expect("a page");
    let mut model = BTreeMap::new();
    for (gpa, size, permission, target) in order {
        let phys = HostPhys::new(target << 30);
        let leaf = F::leaf(phys, *size, *permission, MemoryType::WriteBack);
        tables.map(&mut pool, *gpa, *size, leaf).expect("enough pages");
        let start = gpa.align_down(*size);
        for probe in probes().filter(|probe| probe.align_down(*size) == start) {
            model.insert(probe, (phys.saturating_add(probe.offset_in(*size)), *permission));
        }
    }
    for probe in probes() {
        let found = tables.lookup(&mut pool, probe).map(|page| (page.phys, page.writable));
        let expected = model.get(&probe).map(|(phys, kind)| (*phys, *kind == Permission::Full));
        assert_eq!(found, expected, "{probe:?}");
    }
}

fn probes() -> impl Iterator<Item = GuestPhys> {
    let numbers = (0..2_u64).flat_map(|a| (0..2_u64).map(move |b| a << 47 | b << 30));
    let numbers = numbers.flat_map(|ab| (0..3_u64).map(move |c| ab | c << 21));
    numbers.flat_map(|abc| (0..3_u64).map(move |d| GuestPhys::new(abc | d << 12)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn amd_maps(order in vec((any_gpa(), any_size(), any_permission(), 0..1000_u64), 0..30)) {
        maps_like_a_model::<AmdNested>(&order);
    }

    #[test]
    fn intel_maps(order in vec((any_gpa(), any_size(), any_permission(), 0..1000_u64), 0..30)) {
        maps_like_a_model::<IntelExtended>(&order);
    }

    /// A split changes the size and nothing else.
    #[test]
    fn split_keeps_the_translation(
        permission in any_permission(),
        bits in 0..8_u64,
        offset in 0..1_u64 << 30,
    ) {
        let kind = MemoryType::from_bits(bits);
        let mut pool = Pool::with(usize::MAX);
        let tables = PageTable::<IntelExtended>::new(&mut pool, Depth::Four).expect("a page");
        let leaf = IntelExtended::leaf(HostPhys::new(7 << 30), PageSize::Size1G, permission, kind);
        tables.map(&mut pool, GuestPhys::new(3 << 30), PageSize::Size1G, leaf).expect("pages");
        let gpa = GuestPhys::new((3 << 30) + offset);
        let whole = tables.lookup(&mut pool, gpa).expect("mapped");
        for size in [PageSize::Size2M, PageSize::Size4K] {
            let slot = tables.walk(&mut pool, gpa, PageSize::Size4K);
            tables.split(&mut pool, slot).expect("pages");
            let page = tables.lookup(&mut pool, gpa).expect("still mapped");
            prop_assert_eq!((page.phys, page.writable, page.memory_type, page.size),
                            (whole.phys, whole.writable, whole.memory_type, size));
        }
        let slot = tables.walk(&mut pool, gpa, PageSize::Size4K);
        prop_assert_eq!(tables.prepare_split(&mut pool, slot), Ok(None));
    }
}

#[test]
fn exhaustion_changes_nothing_and_can_be_continued() {
    let mut pool = Pool::default();
    assert_eq!(PageTable::<AmdNested>::new(&mut pool, Depth::Four), Err(Exhausted));
    pool.available = 1;
    let tables = PageTable::<AmdNested>::new(&mut pool, Depth::Four).expect("a page");
    let gpa = GuestPhys::new(0x1234_5000);
    let leaf = AmdNested::leaf(gpa.identity(), PageSize::Size4K, Permission::Full, MemoryType::WriteBack);
    for _ in 0..3 {
        assert_eq!(tables.map(&mut pool, gpa, PageSize::Size4K, leaf), Err(Exhausted));
        assert_eq!(tables.lookup(&mut pool, gpa), None);
        pool.available = 1;
    }
    assert_eq!(tables.map(&mut pool, gpa, PageSize::Size4K, leaf), Ok(()));
    assert_eq!(pool.tables.len(), 4);
    assert_eq!(tables.lookup(&mut pool, gpa).map(|page| page.phys), Some(gpa.identity()));
}
