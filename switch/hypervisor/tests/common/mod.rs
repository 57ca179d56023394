//! Strategies and a machine's memory for the tests of MTRRs and page tables.
#![allow(dead_code, missing_docs)]

use mercury_hypervisor::address::HostPhys;
use mercury_hypervisor::mtrr::{MAX_VARIABLE, MemoryType, Mtrrs, VariableRange};
use mercury_hypervisor::paging::table::{Table, TablePages};
use proptest::collection::vec;
use proptest::prelude::*;

pub const GIB: u64 = 1 << 30;
pub const MIB: u64 = 1 << 20;
pub const VALID: u64 = 1 << 11;

/// Table pages from a pool that can run dry. They start with garbage.
#[derive(Default)]
pub struct Pool {
    pub tables: Vec<Box<Table>>,
    pub available: usize,
}

impl Pool {
    const BASE: u64 = 0x7_0000_0000;

    pub fn with(available: usize) -> Self {
        Self { tables: Vec::new(), available }
    }

    fn index(phys: HostPhys) -> usize {
        usize::try_from((phys.as_u64() - Self::BASE) / 4096).expect("an index")
    }
}

impl TablePages for Pool {
    fn allocate(&mut self) -> Option<HostPhys> {
        self.available = self.available.checked_sub(1)?;
        self.tables.push(Box::new([0xdead_beef_dead_beef; 512]));
        Some(HostPhys::new(Self::BASE + 4096 * (self.tables.len() as u64 - 1)))
    }

    fn table(&mut self, phys: HostPhys) -> &mut Table {
        &mut self.tables[Self::index(phys)]
    }
}

/// Returns a range of `1 << log2` bytes at the `index`th multiple of that.
pub fn range(kind: MemoryType, index: u64, log2: u32, physical_bits: u32) -> VariableRange {
    let space = (1_u64 << physical_bits) - 1;
    let size = 1_u64 << log2;
    VariableRange { base: ((index * size) & space) | kind as u64, mask: (!(size - 1) & space) | VALID }
}

pub fn mtrrs(default_type: MemoryType, ranges: &[VariableRange], physical_bits: u32) -> Mtrrs {
    let mut variable = [VariableRange::default(); MAX_VARIABLE];
    variable[..ranges.len()].copy_from_slice(ranges);
    Mtrrs {
        default_type,
        enabled: true,
        fixed_enabled: true,
        fixed: [0x0606_0606_0606_0606; 11],
        variable,
        physical_bits,
        top_of_memory_2: None,
    }
}

pub fn any_type() -> impl Strategy<Value = MemoryType> {
    (0..8_u64).prop_map(MemoryType::from_bits)
}

pub fn contiguous(physical_bits: u32, smallest: u32) -> impl Strategy<Value = VariableRange> {
    let log2 = prop_oneof![smallest..physical_bits, 20.max(smallest)..physical_bits];
    (any_type(), any::<u64>(), log2, prop::bool::weighted(0.9)).prop_map(move |(kind, index, log2, valid)| {
        let mut range = range(kind, index >> log2, log2, physical_bits);
        range.mask &= if valid { u64::MAX } else { !VALID };
        range
    })
}

pub fn scattered(physical_bits: u32, smallest: u32) -> impl Strategy<Value = VariableRange> {
    (any_type(), any::<u64>(), any::<u64>(), any::<u64>()).prop_map(move |(kind, base, mask, more)| {
        let space = ((1_u64 << physical_bits) - 1) & !((1 << smallest) - 1);
        VariableRange { base: (base & space) | kind as u64, mask: ((mask | more) & space) | VALID }
    })
}

pub fn any_mtrrs(
    range: impl Strategy<Value = VariableRange>,
    physical_bits: u32,
    top: impl Strategy<Value = Option<u64>>,
) -> impl Strategy<Value = Mtrrs> {
    let switches = (prop::bool::weighted(0.95), any::<bool>());
    let fixed = prop::array::uniform11(prop_oneof![Just(0x0606_0606_0606_0606_u64), any::<u64>()]);
    (any_type(), vec(range, 0..6), switches, fixed, top).prop_map(
        move |(default_type, ranges, (enabled, fixed_enabled), fixed, top_of_memory_2)| Mtrrs {
            enabled,
            fixed_enabled,
            fixed,
            top_of_memory_2,
            ..mtrrs(default_type, &ranges, physical_bits)
        },
    )
}
