//! MTRRs against a model that asks for every page.
#![allow(missing_docs)]

mod common;

use common::{MIB, VALID, any_mtrrs, any_type, contiguous, mtrrs, range, scattered};
use mercury_hypervisor::address::HostPhys;
use mercury_hypervisor::mtrr::MemoryType::{
    self, Uncacheable, WriteBack, WriteCombining, WriteProtect, WriteThrough,
};
use mercury_hypervisor::mtrr::{Mtrrs, VariableRange};
use proptest::prelude::*;

/// 16 MiB of physical space: 4096 pages.
const BITS: u32 = 24;
const PAGES: u64 = 1 << (BITS - 12);
const FOUR_GIB: u64 = 1 << 32;

fn at(mtrrs: &Mtrrs, address: u64) -> MemoryType {
    mtrrs.type_at(HostPhys::new(address))
}

fn uniform(mtrrs: &Mtrrs, start: u64, size: u64) -> Option<MemoryType> {
    mtrrs.uniform_type(HostPhys::new(start), size)
}

/// Types of the 4 KiB pages of a range.
fn page_types(mtrrs: &Mtrrs, start: u64, size: u64) -> Vec<MemoryType> {
    (start..start + size).step_by(4096).map(|address| at(mtrrs, address)).collect()
}

/// Returns the type by the same rule, written down a second time in another way.
fn model(mtrrs: &Mtrrs, address: u64) -> MemoryType {
    if !mtrrs.enabled {
        return Uncacheable;
    }
    if mtrrs.fixed_enabled && address < MIB {
        let sizes = std::iter::repeat_n(0x1_0000_u64, 8)
            .chain(std::iter::repeat_n(0x4000, 16))
            .chain(std::iter::repeat_n(0x1000, 64));
        let mut end = 0;
        let number = sizes
            .take_while(|size| {
                end += size;
                end <= address
            })
            .count();
        return MemoryType::from_bits(mtrrs.fixed[number / 8].to_le_bytes()[number % 8].into());
    }
    let matches = |range: &&VariableRange| {
        range.mask & VALID != 0 && (address ^ range.base) & range.mask & 0xf_ffff_ffff_f000 == 0
    };
    let hits: Vec<_> = mtrrs.variable.iter().filter(matches).map(|range| range.base & 7).collect();
    let default = match mtrrs.top_of_memory_2 {
        Some(top) if address >= FOUR_GIB && address < top & !(8 * MIB - 1) => WriteBack,
        _ => mtrrs.default_type,
    };
    match hits.as_slice() {
        [] => default,
        [first, rest @ ..] if rest.iter().all(|kind| kind == first) => MemoryType::from_bits(*first),
        kinds if kinds.iter().all(|kind| [4, 6].contains(kind)) => WriteThrough,
        _ => Uncacheable,
    }
}

fn pieces(types: &[MemoryType]) -> usize {
    types.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn contiguous_is_exact(
        mtrrs in any_mtrrs(contiguous(BITS, 12), BITS, Just(None)),
        start in 0..PAGES,
        pages in 1..PAGES,
    ) {
        let (start, size) = (start * 4096, pages.min(PAGES - start) * 4096);
        let types = page_types(&mtrrs, start, size);
        let expected = (pieces(&types) == 0).then(|| types[0]);
        prop_assert_eq!(uniform(&mtrrs, start, size), expected);
    }

    #[test]
    fn aligned_blocks_are_exact(
        mtrrs in any_mtrrs(contiguous(BITS, 12), BITS, Just(None)),
        log2 in 12..=BITS,
    ) {
        for start in (0..1 << BITS).step_by(1 << log2) {
            let types = page_types(&mtrrs, start, 1 << log2);
            let expected = (pieces(&types) == 0).then(|| types[0]);
            prop_assert_eq!(uniform(&mtrrs, start, 1 << log2), expected);
        }
    }

    /// Exact unless more than 256 stripes of the same type follow each other.
    #[test]
    fn scattered_is_never_wrong(
        mtrrs in any_mtrrs(scattered(BITS, 12), BITS, Just(None)),
        start in 0..PAGES,
        log2 in 0..12_u32,
    ) {
        let (start, size) = ((start >> log2 << log2) * 4096, 4096 << log2);
        let types = page_types(&mtrrs, start, size);
        let expected = (pieces(&types) == 0).then(|| types[0]);
        let answer = uniform(&mtrrs, start, size);
        prop_assert!(answer == expected || (answer.is_none() && size > 128 * 4096));
    }

    #[test]
    fn types_follow_the_model(
        mtrrs in any_mtrrs(prop_oneof![contiguous(33, 12), scattered(33, 12)], 33,
                           proptest::option::of(FOUR_GIB - MIB..FOUR_GIB * 2)),
        addresses in proptest::collection::vec(prop_oneof![0..MIB, 0..2 * FOUR_GIB], 64),
    ) {
        for address in addresses {
            prop_assert_eq!(at(&mtrrs, address), model(&mtrrs, address));
        }
    }

    /// Around 4 GiB and TOP_MEM2.
    #[test]
    fn top_of_memory_is_exact(
        mtrrs in any_mtrrs(
            contiguous(33, 20),
            33,
            proptest::option::of(FOUR_GIB - 8 * MIB..FOUR_GIB + 40 * MIB),
        ),
        start in 0..64_u64,
        size in 1..64_u64,
    ) {
        let (start, size) = (FOUR_GIB - 16 * MIB + start * MIB, size * MIB);
        let types = page_types(&mtrrs, start, size);
        let expected = (pieces(&types) == 0).then(|| types[0]);
        prop_assert_eq!(uniform(&mtrrs, start, size), expected);
    }

    #[test]
    fn overlap_is_a_lattice(a in any_type(), b in any_type(), c in any_type()) {
        prop_assert_eq!(a.overlap(b), b.overlap(a));
        prop_assert_eq!(a.overlap(a), a);
        prop_assert_eq!(a.overlap(b).overlap(c), a.overlap(b.overlap(c)));
        prop_assert_eq!(a.overlap(Uncacheable), Uncacheable);
    }

    /// Registers with any contents, any question: an answer, no panic.
    #[test]
    fn garbage_is_answered(
        registers in any::<[u64; 11]>(),
        default in any::<u64>(),
        ranges in proptest::collection::vec(any::<(u64, u64)>(), 0..40),
        bits in any::<u32>(),
        top in any::<Option<u64>>(),
        (start, size) in any::<(u64, u64)>(),
    ) {
        let ranges: Vec<_> = ranges.into_iter().map(|(base, mask)| VariableRange { base, mask }).collect();
        let mtrrs = Mtrrs::from_registers(default, registers, &ranges, bits, top);
        if let Some(kind) = uniform(&mtrrs, start, size) {
            prop_assert_eq!(at(&mtrrs, start), kind);
        }
    }
}

#[test]
fn precedence() {
    let kinds = [
        (WriteBack, WriteThrough, WriteThrough),
        (WriteBack, Uncacheable, Uncacheable),
        (WriteThrough, Uncacheable, Uncacheable),
        (WriteCombining, WriteBack, Uncacheable),
        (WriteProtect, WriteBack, Uncacheable),
        (WriteCombining, WriteCombining, WriteCombining),
    ];
    for (a, b, expected) in kinds {
        let mtrrs = mtrrs(WriteProtect, &[range(a, 1, 30, 36), range(b, 2, 29, 36)], 36);
        assert_eq!(at(&mtrrs, 0x4000_0000), expected);
        assert_eq!(at(&mtrrs, 0x6000_0000), a);
        assert_eq!(at(&mtrrs, 0x8000_0000), WriteProtect);
    }
}

#[test]
fn fixed_ranges_win_below_one_mebibyte() {
    let mut mtrrs = mtrrs(Uncacheable, &[range(WriteThrough, 0, 30, 36)], 36);
    mtrrs.fixed[2] = 0x0101_0101_0101_0100;
    assert_eq!(at(&mtrrs, 0xa_0000), Uncacheable);
    assert_eq!(at(&mtrrs, 0xa_4000), WriteCombining);
    assert_eq!(at(&mtrrs, 0xf_ffff), WriteBack);
    assert_eq!(at(&mtrrs, 0x10_0000), WriteThrough);
    mtrrs.fixed_enabled = false;
    assert_eq!(at(&mtrrs, 0xa_0000), WriteThrough);
    mtrrs.enabled = false;
    assert_eq!(at(&mtrrs, 0x10_0000), Uncacheable);
    assert_eq!(uniform(&mtrrs, 0, 1 << 36), Some(Uncacheable));
}

/// Bits 4:3 of AMD's fixed ranges route accesses and are no part of the type.
#[test]
fn fixed_routing_bits_are_ignored() {
    let mut mtrrs = mtrrs(Uncacheable, &[], 36);
    mtrrs.fixed[0] = 0x1e;
    assert_eq!(at(&mtrrs, 0), WriteBack);
}

/// Firmware of a machine with memory encryption sets mask bits above the reduced width, and some
/// firmware forgets bits below it: the range then repeats.
#[test]
fn masks_of_another_width() {
    let wide = range(Uncacheable, 3, 30, 48);
    assert_eq!(wide.bounds(43), Some((3 << 30, (4 << 30) - 1)));
    let narrow = mtrrs(WriteBack, &[range(Uncacheable, 3, 30, 36)], 40);
    assert_eq!(at(&narrow, (1 << 36) | 3 << 30), Uncacheable);
    assert_eq!(uniform(&narrow, (1 << 36) | 2 << 30, 1 << 30), Some(WriteBack));
    assert_eq!(uniform(&narrow, (1 << 36) | 2 << 30, 2 << 30), None);
}

#[test]
fn registers_as_read() {
    let ranges = [VariableRange { base: 0x8000_0000, mask: 0xf_8000_0800 }];
    let mtrrs = Mtrrs::from_registers(0xc06, [0; 11], &ranges, 36, None);
    assert!(mtrrs.enabled && mtrrs.fixed_enabled);
    assert_eq!(uniform(&mtrrs, 0x10_0000, 0x7ff0_0000), Some(WriteBack));
    assert_eq!(uniform(&mtrrs, 0x8000_0000, 0x8000_0000), Some(Uncacheable));
    assert_eq!(at(&mtrrs, 0x1_0000_0000), WriteBack);
}

/// Six bits of an address are a key: CPUID says 52, and the masks have 46.
#[test]
fn masks_without_key_bits() {
    let ranges = [VariableRange { base: 0x8000_0000, mask: 0x3fff_8000_0800 }];
    let mtrrs = Mtrrs::from_registers(0xc06, [0; 11], &ranges, 52, None);
    assert_eq!(mtrrs.variable[0].bounds(52), Some((0x8000_0000, 0xffff_ffff)));
    assert_eq!(uniform(&mtrrs, 1 << 32, (1 << 50) - (1 << 32)), Some(WriteBack));
}
