//! Memory types of physical addresses, from the memory type range registers.
//!
//! One function answers for both vendors ([`Mtrrs::type_at`]). AMD's nested tables only need to know where
//! the type changes, because the type there still comes from the MTRRs. On Intel the type in an EPT entry
//! replaces them (APM volume 2, 7.7 and 15.25.8; SDM volume 3, 12.11 and 30.3.7.2).

use crate::address::{Address, HostPhys};

/// Memory type; the numbers are those of the MTRRs, the PAT and EPT (APM volume 2, table 7-5).
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryType {
    /// UC, uncacheable: the type of devices.
    Uncacheable = 0,
    /// WC, write-combining: the type of frame buffers.
    WriteCombining = 1,
    /// WT, write-through: reads are cached.
    WriteThrough = 4,
    /// WP, write-protect: reads are cached, writes are not.
    WriteProtect = 5,
    /// WB, write-back: the type of ordinary memory.
    WriteBack = 6,
}

impl MemoryType {
    /// Returns the type with this encoding. Reserved encodings are uncacheable. Only bits 2:0 count: bits 4:3
    /// of AMD's fixed ranges route accesses (APM volume 2, 7.9.1).
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        match bits & 7 {
            1 => Self::WriteCombining,
            4 => Self::WriteThrough,
            5 => Self::WriteProtect,
            6 => Self::WriteBack,
            _ => Self::Uncacheable,
        }
    }

    /// Returns the type where variable ranges of both types overlap. UC wins, and WT wins over WB.
    /// Combinations that the manuals leave undefined are UC (APM volume 2, 7.7.2; SDM volume 3, 12.11.4.1).
    #[must_use]
    pub const fn overlap(self, other: Self) -> Self {
        match (self, other) {
            (Self::WriteCombining, Self::WriteCombining) => Self::WriteCombining,
            (Self::WriteProtect, Self::WriteProtect) => Self::WriteProtect,
            (Self::WriteBack, Self::WriteBack) => Self::WriteBack,
            (Self::WriteThrough, Self::WriteThrough | Self::WriteBack)
            | (Self::WriteBack, Self::WriteThrough) => Self::WriteThrough,
            _ => Self::Uncacheable,
        }
    }
}

/// Most variable ranges that are read (IA32_MTRRCAP counts 8 on AMD, about 10 on Intel).
pub const MAX_VARIABLE: usize = 32;

/// Address bits of MTRRphysBase and MTRRphysMask (APM volume 2, 7.7.2).
const ADDRESS_BITS: u64 = 0x000f_ffff_ffff_f000;
/// V of MTRRphysMask: the range is in use.
const MASK_VALID: u64 = 1 << 11;
/// E of MTRRdefType: MTRRs are enabled (APM volume 2, 7.7.2).
pub const DEFAULT_ENABLE: u64 = 1 << 11;
/// FE of MTRRdefType: the fixed ranges are enabled.
const DEFAULT_FIXED_ENABLE: u64 = 1 << 10;
/// End of the fixed ranges: 1 MiB.
const FIXED_END: u64 = 0x10_0000;
/// Start of the memory whose end is TOP_MEM2.
const FOUR_GIB: u64 = 1 << 32;
/// Address bits of TOP_MEM2: 8 MiB units (APM volume 2, 7.9.4).
const TOP_OF_MEMORY_BITS: u64 = 0x000f_ffff_ff80_0000;
/// Changes of type or of the responsible register that [`Mtrrs::uniform_run`] follows. Contiguous
/// masks cannot exceed it: two for each range, 88 fixed ranges, and TOP_MEM2's two.
const MAX_CHANGES: usize = 256;
const _: () = assert!(MAX_CHANGES >= 2 * MAX_VARIABLE + 88 + 2);

/// A pair of variable-range registers, as read (APM volume 2, 7.7.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VariableRange {
    /// MTRRphysBase: address in bits 51:12, type in bits 7:0.
    pub base: u64,
    /// MTRRphysMask: mask in bits 51:12, valid in bit 11.
    pub mask: u64,
}

impl VariableRange {
    /// Returns the memory type of the range.
    const fn memory_type(self) -> MemoryType {
        MemoryType::from_bits(self.base)
    }

    /// Returns true if the range is in use.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        self.mask & MASK_VALID != 0
    }

    const fn address_mask(self) -> u64 {
        self.mask & ADDRESS_BITS
    }

    /// Returns the bits that an address must have under the mask.
    const fn pattern(self) -> u64 {
        self.base & self.address_mask()
    }

    const fn contains(self, address: u64) -> bool {
        self.is_valid() && address & self.address_mask() == self.pattern()
    }

    /// Returns the first and the last address, if the mask selects one contiguous block among addresses of
    /// `physical_bits`.
    #[must_use]
    pub const fn bounds(self, physical_bits: u32) -> Option<(u64, u64)> {
        let selected = self.address_mask() | !below(physical_bits);
        let free = !selected;
        if free & free.wrapping_add(1) != 0 {
            return None;
        }
        Some((self.pattern(), self.pattern() | free))
    }

    /// Returns the first address after `address` at which the range begins or ends; `u64::MAX` if there is
    /// none.
    const fn next_change(self, address: u64, physical_bits: u32) -> u64 {
        if !self.is_valid() {
            return u64::MAX;
        }
        match self.bounds(physical_bits) {
            Some((first, _)) if address < first => first,
            Some((_, last)) if address <= last => last.saturating_add(1),
            Some(_) => u64::MAX,
            None if self.contains(address) => self.scattered_end(address),
            None => self.scattered_start(address),
        }
    }

    /// Returns the end of the block that contains `address`: the lowest mask bit flips there.
    const fn scattered_end(self, address: u64) -> u64 {
        let unit = self.address_mask() & self.address_mask().wrapping_neg();
        (address | unit.wrapping_sub(1)).saturating_add(1)
    }

    /// Returns the smallest address above `address` under a non-contiguous mask. It equals `address` above
    /// some bit, has 1 there where `address` has 0, and is as small as the pattern allows below.
    const fn scattered_start(self, address: u64) -> u64 {
        let (mask, pattern) = (self.address_mask(), self.pattern());
        let mut bit = 1 << 12;
        while bit & (ADDRESS_BITS | 1 << 52) != 0 {
            let upper = (address & !(bit | (bit - 1))) | bit;
            let agrees = (upper ^ pattern) & mask & !(bit - 1) == 0;
            if address & bit == 0 && agrees {
                return upper | (pattern & (bit - 1));
            }
            bit <<= 1;
        }
        u64::MAX
    }
}

/// A stretch of addresses of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeRun {
    /// Type of all its addresses.
    pub memory_type: MemoryType,
    /// First address after the stretch.
    pub end: HostPhys,
}

/// The memory type range registers of one CPU; firmware sets them alike on all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtrrs {
    /// Type where no range applies: MTRRdefType bits 7:0 (APM volume 2, 7.7.2).
    pub default_type: MemoryType,
    /// MTRRdefType.E. All is uncacheable without it.
    pub enabled: bool,
    /// MTRRdefType.FE: fixed ranges decide below 1 MiB.
    pub fixed_enabled: bool,
    /// MSRs 0x250, 0x258, 0x259, 0x268–0x26F in this order (APM volume 2, table 7-9).
    pub fixed: [u64; 11],
    /// MSRs 0x200–0x23F in pairs. Unused ones are 0.
    pub variable: [VariableRange; MAX_VARIABLE],
    /// Physical address width: mask bits above it count as set.
    pub physical_bits: u32,
    /// TOP_MEM2, if SYSCFG has MtrrTom2En and Tom2ForceMemTypeWB: the default type from 4 GiB up to it
    /// is write-back (APM volume 2, 7.9.4). `None` on Intel.
    pub top_of_memory_2: Option<u64>,
}

impl Mtrrs {
    /// Returns the MTRRs with these register values: MTRRdefType, the fixed ranges in the order of
    /// [`Mtrrs::fixed`], and the variable ranges. Those beyond [`MAX_VARIABLE`] are ignored.
    ///
    /// Upper bits that no valid mask has count as set in all. Where the upper part of an address is a key
    /// identifier, masks do not have it, and CPUID does not report that (SDM volume 3, "Memory encryption").
    #[must_use]
    pub fn from_registers(
        default: u64,
        fixed: [u64; 11],
        variable: &[VariableRange],
        physical_bits: u32,
        top_of_memory_2: Option<u64>,
    ) -> Self {
        let mut ranges = [VariableRange::default(); MAX_VARIABLE];
        let valid = variable.iter().filter(|range| range.is_valid());
        let known = valid.fold(0, |bits, range| bits | range.address_mask());
        let unknown = known.checked_ilog2().map_or(0, |top| ADDRESS_BITS & !below(top + 1));
        for (slot, range) in ranges.iter_mut().zip(variable) {
            let filled = if range.is_valid() { unknown } else { 0 };
            *slot = VariableRange { base: range.base, mask: range.mask | filled };
        }
        Self {
            default_type: MemoryType::from_bits(default),
            enabled: default & DEFAULT_ENABLE != 0,
            fixed_enabled: default & DEFAULT_FIXED_ENABLE != 0,
            fixed,
            variable: ranges,
            physical_bits,
            top_of_memory_2,
        }
    }

    /// Returns the memory type of one address (APM volume 2, 7.7.2 and 7.7.3; SDM volume 3, 12.11.4.1).
    #[must_use]
    pub fn type_at(&self, address: HostPhys) -> MemoryType {
        let address = address.as_u64();
        if !self.enabled {
            return MemoryType::Uncacheable;
        }
        if self.fixed_decides(address) {
            return self.fixed_type(address);
        }
        let matching = self.variable.iter().filter(|range| range.contains(address));
        let variable = matching.map(|range| range.memory_type()).reduce(MemoryType::overlap);
        variable.unwrap_or_else(|| self.default_at(address))
    }

    /// Returns the type of all `size` bytes from `start`, or `None` where there is more than one. A striped
    /// pattern of more than 256 pieces counts as not uniform. Only non-contiguous masks make one.
    #[must_use]
    pub fn uniform_type(&self, start: HostPhys, size: u64) -> Option<MemoryType> {
        let end = start.saturating_add(size);
        let run = self.uniform_run(start, end);
        (run.end >= end).then_some(run.memory_type)
    }

    /// Returns the type at `start`, and the end of the stretch that is known to have it, at most `end`.
    #[must_use]
    pub fn uniform_run(&self, start: HostPhys, end: HostPhys) -> TypeRun {
        let memory_type = self.type_at(start);
        let mut address = self.next_change(start.as_u64());
        for _ in 0..MAX_CHANGES {
            if address >= end.as_u64() || self.type_at(HostPhys::new(address)) != memory_type {
                break;
            }
            address = self.next_change(address);
        }
        TypeRun { memory_type, end: end.min(HostPhys::new(address)) }
    }

    /// Returns TOP_MEM2 in the units of the register, where it matters.
    #[must_use]
    pub fn top_of_memory(&self) -> Option<u64> {
        self.top_of_memory_2.map(|top| top & TOP_OF_MEMORY_BITS).filter(|top| *top > FOUR_GIB)
    }

    /// Returns the first address after `address` where another register may become responsible.
    fn next_change(&self, address: u64) -> u64 {
        if !self.enabled {
            return u64::MAX;
        }
        if self.fixed_decides(address) {
            let (_, _, unit) = fixed_position(address);
            return (address | (unit - 1)) + 1;
        }
        let changes = self.variable.iter().map(|range| range.next_change(address, self.physical_bits));
        changes.min().unwrap_or(u64::MAX).min(self.next_default_change(address))
    }

    const fn fixed_decides(&self, address: u64) -> bool {
        self.fixed_enabled && address < FIXED_END
    }

    fn fixed_type(&self, address: u64) -> MemoryType {
        let (register, byte, _) = fixed_position(address);
        let value = self.fixed.get(register).copied().unwrap_or(0);
        MemoryType::from_bits(value >> (8 * byte))
    }

    fn default_at(&self, address: u64) -> MemoryType {
        match self.top_of_memory() {
            Some(top) if (FOUR_GIB..top).contains(&address) => MemoryType::WriteBack,
            _ => self.default_type,
        }
    }

    fn next_default_change(&self, address: u64) -> u64 {
        match self.top_of_memory() {
            Some(_) if address < FOUR_GIB => FOUR_GIB,
            Some(top) if address < top => top,
            _ => u64::MAX,
        }
    }
}

/// Returns the register, the byte in it, and the bytes per range for an address below 1 MiB (APM volume 2,
/// table 7-9).
const fn fixed_position(address: u64) -> (usize, u64, u64) {
    let (first, start, unit) = match address {
        0..0x8_0000 => (0, 0, 0x1_0000),
        0x8_0000..0xc_0000 => (1, 0x8_0000, 0x4000),
        _ => (3, 0xc_0000, 0x1000),
    };
    let range = (address - start) / unit;
    (first + (range / 8) as usize, range % 8, unit)
}

/// Returns a mask of all bits below `bit`.
const fn below(bit: u32) -> u64 {
    match 1_u64.checked_shl(bit) {
        Some(value) => value - 1,
        None => u64::MAX,
    }
}
