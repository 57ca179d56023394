//! Addresses by kind. No operator mixes kinds, and none turns a number into an address unseen. The only
//! ways across are [`GuestPhys::identity`], [`HostPhys::identity`], [`HostPhys::in_direct_map`] and its
//! reverse, [`HostVirt::of_direct_map`].

/// Bytes of the smallest page (APM volume 2, 5.1).
pub const PAGE_SIZE: u64 = 4096;
/// Entries of one page-table page (APM volume 2, 5.3).
pub const TABLE_ENTRIES: usize = 512;

/// Bytes that an entry of one paging level spans (APM volume 2, 5.3; SDM volume 3, 4.5). Entries up to
/// [`PageSize::Size1G`] can map a page. The two larger ones are directories only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageSize {
    /// 4 KiB: an entry of a page table.
    Size4K,
    /// 2 MiB: an entry of a page directory.
    Size2M,
    /// 1 GiB: an entry of a page-directory-pointer table.
    Size1G,
    /// 512 GiB: an entry of a level-4 table, never a page.
    Size512G,
    /// 256 TiB: an entry of a level-5 table, never a page.
    Size256T,
}

impl PageSize {
    /// Returns the binary logarithm of the size in bytes.
    #[must_use]
    pub const fn shift(self) -> u32 {
        match self {
            Self::Size4K => 12,
            Self::Size2M => 21,
            Self::Size1G => 30,
            Self::Size512G => 39,
            Self::Size256T => 48,
        }
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// Returns the span of an entry one level further down; `None` below the last level.
    #[must_use]
    pub const fn smaller(self) -> Option<Self> {
        match self {
            Self::Size4K => None,
            Self::Size2M => Some(Self::Size4K),
            Self::Size1G => Some(Self::Size2M),
            Self::Size512G => Some(Self::Size1G),
            Self::Size256T => Some(Self::Size512G),
        }
    }

    /// Returns the number of blocks of this size that the bytes `start..end` touch.
    #[must_use]
    pub const fn blocks(self, start: u64, end: u64) -> u64 {
        if start >= end {
            return 0;
        }
        ((end - 1) >> self.shift()) - (start >> self.shift()) + 1
    }
}

/// Arithmetic that all kinds of addresses share.
pub trait Address: Copy + Eq + Ord {
    /// Returns the address with this number.
    fn from_u64(address: u64) -> Self;
    /// Returns the address as a number.
    fn to_u64(self) -> u64;

    /// Returns the start of the block of `size` that contains the address.
    #[must_use]
    fn align_down(self, size: PageSize) -> Self {
        Self::from_u64(self.to_u64() & !(size.bytes() - 1))
    }

    /// Returns the first address after the block of `size` that contains the address, or the last address of
    /// all if there is none.
    #[must_use]
    fn block_end(self, size: PageSize) -> Self {
        Self::from_u64(self.align_down(size).to_u64().saturating_add(size.bytes()))
    }

    /// Returns true if the address starts a block of `size`.
    #[must_use]
    fn is_aligned(self, size: PageSize) -> bool {
        self.to_u64() & (size.bytes() - 1) == 0
    }

    /// Returns the distance from the start of the block of `size` that contains the address, in bytes.
    #[must_use]
    fn offset_in(self, size: PageSize) -> u64 {
        self.to_u64() & (size.bytes() - 1)
    }

    /// Returns the index of the entry for this address in a table whose entries span `size`. It is below
    /// [`TABLE_ENTRIES`].
    #[must_use]
    fn index_at(self, size: PageSize) -> usize {
        (self.to_u64() >> size.shift()) as usize & (TABLE_ENTRIES - 1)
    }

    /// Returns the address `bytes` further on, or the last address of all.
    #[must_use]
    fn saturating_add(self, bytes: u64) -> Self {
        Self::from_u64(self.to_u64().saturating_add(bytes))
    }

    /// Returns the number of the 4 KiB frame or page that contains the address.
    #[must_use]
    fn frame(self) -> u64 {
        self.to_u64() / PAGE_SIZE
    }
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// Returns the address with this number.
            #[must_use]
            pub const fn new(address: u64) -> Self {
                Self(address)
            }

            /// Returns the address as a number.
            #[must_use]
            pub const fn as_u64(self) -> u64 {
                self.0
            }
        }

        impl Address for $name {
            fn from_u64(address: u64) -> Self {
                Self(address)
            }

            fn to_u64(self) -> u64 {
                self.0
            }
        }
    };
}

address! {
    /// An address in the memory that the system sees: its own page tables point at it, and the nested tables
    /// translate it (APM volume 2, 15.25: guest-physical).
    GuestPhys
}
address! {
    /// An address in the memory of the machine (APM volume 2, 15.25: system-physical).
    HostPhys
}
address! {
    /// A linear address in the hypervisor's own tables. It need not be canonical.
    HostVirt
}

impl GuestPhys {
    /// Returns the same number in the machine: the translation of the identity map.
    #[must_use]
    pub const fn identity(self) -> HostPhys {
        HostPhys(self.0)
    }
}

impl HostPhys {
    /// Returns the same number as the system sees it.
    #[must_use]
    pub const fn identity(self) -> GuestPhys {
        GuestPhys(self.0)
    }

    /// Returns the address in the direct map that starts at `base`. All that the driver gives lies there. An
    /// address beyond the end of the address space wraps around.
    #[must_use]
    pub const fn in_direct_map(self, base: HostVirt) -> HostVirt {
        HostVirt(base.0.wrapping_add(self.0))
    }
}

impl HostVirt {
    /// Returns the memory at this address of the direct map that starts at `base`. All of the hypervisor's
    /// own memory lies there: its image and its areas.
    #[must_use]
    pub const fn of_direct_map(self, base: Self) -> HostPhys {
        HostPhys(self.0.wrapping_sub(base.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_512_of_the_next() {
        let mut size = PageSize::Size256T;
        while let Some(smaller) = size.smaller() {
            assert_eq!(size.bytes(), smaller.bytes() * TABLE_ENTRIES as u64);
            size = smaller;
        }
        assert_eq!(size.bytes(), PAGE_SIZE);
    }

    #[test]
    fn alignment() {
        let address = GuestPhys::new(0x4020_1234);
        assert_eq!(address.align_down(PageSize::Size2M), GuestPhys::new(0x4020_0000));
        assert_eq!(address.block_end(PageSize::Size1G), GuestPhys::new(0x8000_0000));
        assert_eq!(address.offset_in(PageSize::Size4K), 0x234);
        assert_eq!(address.index_at(PageSize::Size1G), 1);
        assert_eq!(address.index_at(PageSize::Size2M), 1);
        assert_eq!(address.frame(), 0x40201);
        assert!(!address.is_aligned(PageSize::Size4K));
        assert_eq!(GuestPhys::new(u64::MAX).block_end(PageSize::Size4K).as_u64(), u64::MAX);
    }

    #[test]
    fn blocks_touched() {
        assert_eq!(PageSize::Size2M.blocks(0x1f_f000, 0x20_1000), 2);
        assert_eq!(PageSize::Size2M.blocks(0x20_0000, 0x40_0000), 1);
        assert_eq!(PageSize::Size2M.blocks(5, 5), 0);
    }

    #[test]
    fn direct_map() {
        let base = HostVirt::new(0xffff_8880_0000_0000);
        let page = HostVirt::new(0xffff_8880_0000_1000);
        assert_eq!(HostPhys::new(0x1000).in_direct_map(base), page);
        assert_eq!(page.of_direct_map(base), HostPhys::new(0x1000));
    }
}
