//! Bits of page-table entries, for each processor.

use crate::address::{Address, GuestPhys, HostPhys, PageSize};
use crate::mtrr::MemoryType;

/// Address bits of an entry in every format here (APM volume 2, 5.3.3; SDM volume 3, 30.3.2).
const ADDRESS_BITS: u64 = 0x000f_ffff_ffff_f000;
/// PS: a directory's entry maps a page (APM volume 2, 5.4.1; SDM volume 3, tables 30-3 and 30-5).
const LARGE: u64 = 1 << 7;

/// Accesses that a page permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Reads only; writes fault.
    ReadOnly,
    /// Everything, execution included.
    Full,
}

/// One format of page-table entries.
pub trait Format: Copy {
    /// Kind of the addresses that are translated.
    type Address: Address;

    /// Returns an entry that points at a table and restricts nothing.
    fn table(child: HostPhys) -> u64;

    /// Returns an entry that maps a page of `size`, at most [`PageSize::Size1G`]. Formats whose entries have
    /// no memory type ignore it.
    fn leaf(phys: HostPhys, size: PageSize, permission: Permission, memory_type: MemoryType) -> u64;

    /// Returns true if the entry translates or leads on.
    fn is_present(entry: u64) -> bool;

    /// Returns the accesses that a present leaf permits.
    fn permission(entry: u64) -> Permission;

    /// Returns the memory type of a present leaf; write-back where the format has none.
    fn memory_type(entry: u64) -> MemoryType;

    /// Returns true if a present entry that spans `size` maps a page.
    #[must_use]
    fn is_leaf(entry: u64, size: PageSize) -> bool {
        match size {
            PageSize::Size4K => true,
            PageSize::Size2M | PageSize::Size1G => entry & LARGE != 0,
            PageSize::Size512G | PageSize::Size256T => false,
        }
    }

    /// Returns a present entry, table or page, without any restriction.
    fn loosened(entry: u64) -> u64;

    /// Returns a present entry through which nothing can be written.
    fn read_only(entry: u64) -> u64;

    /// Returns a present entry of more than 4 KiB through which nothing can be written, and which a table may
    /// replace while other processors have its translation. It must not permit execution where processors
    /// machine-check on that (SDM volume 3, IA32_ARCH_CAPABILITIES.IF_PSCHANGE_MC_NO).
    fn replaceable(entry: u64) -> u64;

    /// Returns true if [`Format::loosened`] would change a present entry.
    #[must_use]
    fn is_restricted(entry: u64) -> bool {
        Self::loosened(entry) != entry
    }

    /// Returns the address that a present entry points at: a table or the start of a page.
    #[must_use]
    fn address(entry: u64) -> HostPhys {
        HostPhys::new(entry & ADDRESS_BITS)
    }
}

/// Returns the bits of a leaf: address, and the bit of a large page.
fn leaf_bits(phys: HostPhys, size: PageSize) -> u64 {
    let address = phys.align_down(size).as_u64() & ADDRESS_BITS;
    if size == PageSize::Size4K { address } else { address | LARGE }
}

/// AMD's nested tables (APM volume 2, 15.25): the ordinary long-mode format. Every nested walk is a
/// user access, so U is set; A and D are preset so that the processor never writes a table. PWT, PCD
/// and PAT are 0, which selects the host PAT's first entry, WB; NX is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmdNested;

impl AmdNested {
    const PRESENT: u64 = 1 << 0;
    const WRITE: u64 = 1 << 1;
    const USER: u64 = 1 << 2;
    const ACCESSED: u64 = 1 << 5;
    const DIRTY: u64 = 1 << 6;
    const ALL: u64 = Self::PRESENT | Self::WRITE | Self::USER | Self::ACCESSED | Self::DIRTY;
}

impl Format for AmdNested {
    type Address = GuestPhys;

    fn table(child: HostPhys) -> u64 {
        (child.as_u64() & ADDRESS_BITS) | Self::ALL
    }

    fn leaf(phys: HostPhys, size: PageSize, permission: Permission, _: MemoryType) -> u64 {
        let flags = match permission {
            Permission::Full => Self::ALL,
            Permission::ReadOnly => Self::ALL & !Self::WRITE,
        };
        leaf_bits(phys, size) | flags
    }

    fn is_present(entry: u64) -> bool {
        entry & Self::PRESENT != 0
    }

    fn loosened(entry: u64) -> u64 {
        entry | Self::WRITE
    }

    fn read_only(entry: u64) -> u64 {
        entry & !Self::WRITE
    }

    fn replaceable(entry: u64) -> u64 {
        Self::read_only(entry)
    }

    fn permission(entry: u64) -> Permission {
        if entry & Self::WRITE != 0 { Permission::Full } else { Permission::ReadOnly }
    }

    fn memory_type(_: u64) -> MemoryType {
        MemoryType::WriteBack
    }
}

/// Intel's extended page tables (SDM volume 3, 30.3.2): R, W, X in bits 2:0, the memory type of a leaf
/// in bits 5:3. IPAT (bit 6) is 0, so that the guest's PAT applies; accessed and dirty flags are off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntelExtended;

impl IntelExtended {
    const READ: u64 = 1 << 0;
    const WRITE: u64 = 1 << 1;
    const EXECUTE: u64 = 1 << 2;
    const ALL: u64 = Self::READ | Self::WRITE | Self::EXECUTE;
    const TYPE_SHIFT: u32 = 3;
}

impl Format for IntelExtended {
    type Address = GuestPhys;

    fn table(child: HostPhys) -> u64 {
        (child.as_u64() & ADDRESS_BITS) | Self::ALL
    }

    fn leaf(phys: HostPhys, size: PageSize, permission: Permission, memory_type: MemoryType) -> u64 {
        let flags = match permission {
            Permission::Full => Self::ALL,
            Permission::ReadOnly => Self::READ,
        };
        leaf_bits(phys, size) | (memory_type as u64) << Self::TYPE_SHIFT | flags
    }

    fn is_present(entry: u64) -> bool {
        entry & Self::ALL != 0
    }

    fn loosened(entry: u64) -> u64 {
        entry | Self::WRITE | Self::EXECUTE
    }

    fn read_only(entry: u64) -> u64 {
        entry & !Self::WRITE
    }

    fn replaceable(entry: u64) -> u64 {
        entry & !(Self::WRITE | Self::EXECUTE)
    }

    fn permission(entry: u64) -> Permission {
        if entry & Self::WRITE != 0 { Permission::Full } else { Permission::ReadOnly }
    }

    fn memory_type(entry: u64) -> MemoryType {
        MemoryType::from_bits(entry >> Self::TYPE_SHIFT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHYS: HostPhys = HostPhys::new(0x000f_ffff_c000_0000);

    #[test]
    fn amd_constants() {
        let leaf = |size, permission| AmdNested::leaf(PHYS, size, permission, MemoryType::Uncacheable);
        assert_eq!(AmdNested::table(HostPhys::new(0x5000)), 0x5067);
        assert_eq!(leaf(PageSize::Size4K, Permission::Full), PHYS.as_u64() | 0x67);
        assert_eq!(leaf(PageSize::Size2M, Permission::Full), PHYS.as_u64() | 0xe7);
        assert_eq!(leaf(PageSize::Size1G, Permission::Full), PHYS.as_u64() | 0xe7);
        assert_eq!(leaf(PageSize::Size4K, Permission::ReadOnly), PHYS.as_u64() | 0x65);
    }

    #[test]
    fn intel_constants() {
        let leaf = |size, permission, kind| IntelExtended::leaf(PHYS, size, permission, kind) ^ PHYS.as_u64();
        assert_eq!(IntelExtended::table(HostPhys::new(0x5000)), 0x5007);
        assert_eq!(leaf(PageSize::Size4K, Permission::Full, MemoryType::WriteBack), 0x37);
        assert_eq!(leaf(PageSize::Size2M, Permission::Full, MemoryType::WriteBack), 0xb7);
        assert_eq!(leaf(PageSize::Size1G, Permission::Full, MemoryType::Uncacheable), 0x87);
        assert_eq!(leaf(PageSize::Size4K, Permission::ReadOnly, MemoryType::WriteBack), 0x31);
    }

    fn reads_back<F: Format>(kind: MemoryType, expected: MemoryType) {
        for size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
            for permission in [Permission::ReadOnly, Permission::Full] {
                let entry = F::leaf(PHYS, size, permission, kind);
                assert!(F::is_present(entry) && F::is_leaf(entry, size));
                assert_eq!(F::address(entry), PHYS);
                assert_eq!(F::permission(entry), permission);
                assert_eq!(F::memory_type(entry), expected);
            }
        }
        assert!(!F::is_present(0));
        assert!(!F::is_leaf(F::table(PHYS), PageSize::Size1G));
        assert!(!F::is_leaf(F::table(PHYS), PageSize::Size512G));
    }

    fn restrictions<F: Format>() {
        for size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
            let full = F::leaf(PHYS, size, Permission::Full, MemoryType::WriteBack);
            assert!(!F::is_restricted(full));
            for restricted in [F::read_only(full), F::replaceable(full)] {
                assert!(F::is_restricted(restricted) && F::is_present(restricted));
                assert_eq!(F::permission(restricted), Permission::ReadOnly);
                assert_eq!((F::loosened(restricted), F::address(restricted)), (full, PHYS));
            }
        }
        let table = F::table(PHYS);
        assert_eq!(F::loosened(F::replaceable(table)), table);
    }

    #[test]
    fn restricted_entries_can_be_loosened() {
        restrictions::<AmdNested>();
        restrictions::<IntelExtended>();
        // An Intel processor may machine-check on a changed size of a page that it executes.
        assert_eq!(IntelExtended::replaceable(0xb7), 0xb1);
        assert_eq!(IntelExtended::read_only(0x37), 0x35);
        assert_eq!(AmdNested::replaceable(0xe7), 0xe5);
    }

    #[test]
    fn entries_read_back() {
        for bits in [0, 1, 4, 5, 6] {
            let kind = MemoryType::from_bits(bits);
            reads_back::<AmdNested>(kind, MemoryType::WriteBack);
            reads_back::<IntelExtended>(kind, kind);
        }
    }
}
