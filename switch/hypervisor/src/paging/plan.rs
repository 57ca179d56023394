//! Content of the identity map, computed and never stored: the entry for any block, and the number of pages
//! that the tables can take.

use mercury_abi::gate::OwnedRange;

use crate::address::{Address, GuestPhys, HostPhys, PAGE_SIZE, PageSize, TABLE_ENTRIES};
use crate::mtrr::{MemoryType, Mtrrs, TypeRun, VariableRange};
use crate::paging::format::{Format, Permission};
use crate::paging::table::Depth;

/// Largest page that the processor has in nested tables (CPUID 8000_0001h EDX bit 26 on AMD,
/// IA32_VMX_EPT_VPID_CAP bit 17 on Intel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LargestPage {
    /// 2 MiB, which every processor has.
    TwoMebibytes,
    /// 1 GiB, where the processor has them.
    OneGibibyte,
}

impl LargestPage {
    /// Returns the largest page as a page size.
    #[must_use]
    pub const fn size(self) -> PageSize {
        match self {
            Self::TwoMebibytes => PageSize::Size2M,
            Self::OneGibibyte => PageSize::Size1G,
        }
    }
}

/// Shape of the identity map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Physical address width, less what memory encryption takes (APM volume 2, 15.25.5). From 30 to
    /// 52; other values are taken for the nearest.
    pub physical_bits: u32,
    /// Number of levels of tables.
    pub depth: Depth,
    /// Largest page that an entry may map.
    pub largest: LargestPage,
    /// End, exclusive, of the addresses that `build_step` maps in full.
    pub eager_end: GuestPhys,
    /// Most table pages for building the rest up to 2^48 too. Only where there are 1 GiB pages.
    pub complete_pages: usize,
    /// Page of zeros that stands in for everything hidden.
    pub zero_page: HostPhys,
}

/// Layout and memory types: all that an entry depends on.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    layout: Layout,
    mtrrs: Mtrrs,
}

impl Plan {
    /// Returns the plan of a machine.
    #[must_use]
    pub const fn new(layout: Layout, mtrrs: Mtrrs) -> Self {
        Self { layout, mtrrs }
    }

    /// Returns the memory types of the machine.
    #[must_use]
    pub const fn mtrrs(&self) -> &Mtrrs {
        &self.mtrrs
    }

    /// Returns the layout of the map.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the end of the addresses that can be mapped: the physical address width, or the reach of the
    /// tables.
    #[must_use]
    pub fn limit(&self) -> GuestPhys {
        let bits = self.layout.physical_bits.clamp(30, 52).min(self.layout.depth.address_bits());
        GuestPhys::new(1 << bits)
    }

    /// Returns the end of the addresses that are built in full.
    #[must_use]
    pub fn eager_end(&self) -> GuestPhys {
        self.layout.eager_end.min(self.limit())
    }

    /// Returns the end of the addresses that are built down to the 1 GiB entries.
    #[must_use]
    pub fn complete_end(&self) -> GuestPhys {
        let end = self.limit().min(GuestPhys::new(PageSize::Size256T.bytes()));
        let built = PageSize::Size512G.blocks(0, self.eager_end().as_u64());
        let missing = PageSize::Size512G.blocks(0, end.as_u64()).saturating_sub(built);
        let affordable = missing <= self.layout.complete_pages as u64;
        if self.layout.largest == LargestPage::OneGibibyte && affordable { end } else { GuestPhys::new(0) }
    }

    /// Fills a table whose entries span `size`, for the addresses from `start`: pages where a page may
    /// be, 0 where a table must stand and beyond the limit. Answers where the first of these starts.
    #[must_use]
    pub fn fill<F: Format>(
        &self,
        table: &mut [u64; TABLE_ENTRIES],
        start: GuestPhys,
        size: PageSize,
    ) -> Option<GuestPhys> {
        let mut types = BlockTypes::new(&self.mtrrs, start.saturating_add(size.bytes() << 9).identity());
        let mut hole = None;
        let mut block = start;
        for entry in table {
            let memory_type = if self.may_be_page(block, size) { types.of(block, size) } else { None };
            if memory_type.is_none() {
                hole = hole.or(Some(block));
            }
            *entry = memory_type
                .map_or(0, |memory_type| F::leaf(block.identity(), size, Permission::Full, memory_type));
            block = block.saturating_add(size.bytes());
        }
        hole
    }

    /// Returns true if a page of `size` may stand at `block`, as far as the memory types allow it. Below 2
    /// MiB lie the fixed ranges, always with 4 KiB pages (HARDWARE A-12).
    fn may_be_page(&self, block: GuestPhys, size: PageSize) -> bool {
        let above_fixed = size == PageSize::Size4K || block.as_u64() >= PageSize::Size2M.bytes();
        size <= self.layout.largest.size() && block < self.limit() && above_fixed
    }

    /// Returns the entry of a hidden page: the page of zeros, not writable.
    #[must_use]
    pub fn hidden_entry<F: Format>(&self) -> u64 {
        self.standing_in::<F>(self.layout.zero_page, Permission::ReadOnly)
    }

    /// Returns the entry of a 4 KiB page that stands in for a hidden one.
    #[must_use]
    pub fn standing_in<F: Format>(&self, page: HostPhys, permission: Permission) -> u64 {
        F::leaf(page, PageSize::Size4K, permission, self.mtrrs.type_at(page))
    }

    /// Returns the part of an owned range that the map covers: start and end of whole pages.
    #[must_use]
    pub fn covered(&self, range: &OwnedRange) -> (GuestPhys, GuestPhys) {
        let end = range.start_phys.saturating_add(range.pages.saturating_mul(PAGE_SIZE));
        let limit = self.limit();
        let start = GuestPhys::new(range.start_phys).align_down(PageSize::Size4K);
        (start.min(limit), GuestPhys::new(end).min(limit))
    }

    /// Returns an upper bound of the table pages that the map takes with these ranges hidden, without the
    /// pages that are filled lazily.
    #[must_use]
    pub fn pages_bound(&self, hidden: &[OwnedRange]) -> usize {
        let ranges = hidden.iter().map(|range| self.hiding_bound(range)).fold(0, u64::saturating_add);
        let zero_table = 1;
        let total = self.directories_bound() + self.splits_bound();
        usize::try_from(total.saturating_add(ranges).saturating_add(zero_table)).unwrap_or(usize::MAX)
    }

    /// Returns the number of tables that are there with any memory types: the upper levels and those of the
    /// first 2 MiB.
    fn directories_bound(&self) -> u64 {
        let end = self.eager_end().max(self.complete_end()).as_u64();
        let upper = 1 + self.upper_tables(0, end);
        match self.layout.largest {
            LargestPage::OneGibibyte => upper + 2,
            LargestPage::TwoMebibytes => upper + PageSize::Size1G.blocks(0, self.eager_end().as_u64()) + 1,
        }
    }

    /// Returns the number of tables between the root and the 1 GiB entries of `start..end`.
    fn upper_tables(&self, start: u64, end: u64) -> u64 {
        let pointers = PageSize::Size512G.blocks(start, end);
        match self.layout.depth {
            Depth::Four => pointers,
            Depth::Five => pointers + PageSize::Size256T.blocks(start, end),
        }
    }

    /// Returns the number of tables that changes of the memory type can cost. It is never more than the
    /// number of blocks.
    fn splits_bound(&self) -> u64 {
        let end = self.eager_end().as_u64();
        let all = PageSize::Size1G.blocks(0, end) + PageSize::Size2M.blocks(0, end);
        let variable = self.mtrrs.variable.iter().map(|range| self.range_bound(range));
        let ranges = variable.fold(0, u64::saturating_add);
        let top = self.mtrrs.top_of_memory().map_or(0, tables_at);
        ranges.saturating_add(top).min(all)
    }

    /// Returns the number of tables that one variable range can cost.
    fn range_bound(&self, range: &VariableRange) -> u64 {
        if !range.is_valid() {
            return 0;
        }
        match range.bounds(self.mtrrs.physical_bits) {
            Some((first, last)) => tables_at(first) + tables_at(last.saturating_add(1)),
            None => u64::MAX,
        }
    }

    /// Returns the number of tables that hiding one range can cost: its directories, and page tables at
    /// ragged ends.
    fn hiding_bound(&self, range: &OwnedRange) -> u64 {
        let (start, end) = self.covered(range);
        let ragged =
            u64::from(!start.is_aligned(PageSize::Size2M)) + u64::from(!end.is_aligned(PageSize::Size2M));
        let (start, end) = (start.as_u64(), end.as_u64());
        let lazy = start.max(self.eager_end().max(self.complete_end()).as_u64());
        let upper = self.upper_tables(lazy, end);
        PageSize::Size1G.blocks(start, end) + ragged.min(PageSize::Size2M.blocks(start, end)) + upper
    }
}

/// Memory types of consecutive blocks: asks the MTRRs once for each stretch, not for each block.
struct BlockTypes<'a> {
    mtrrs: &'a Mtrrs,
    end: HostPhys,
    run: Option<TypeRun>,
}

impl<'a> BlockTypes<'a> {
    const fn new(mtrrs: &'a Mtrrs, end: HostPhys) -> Self {
        Self { mtrrs, end, run: None }
    }

    /// Returns the type of a block that does not start before the last one; `None` if it is not uniform.
    fn of(&mut self, block: GuestPhys, size: PageSize) -> Option<MemoryType> {
        let end = block.saturating_add(size.bytes()).identity();
        let known = self.run.filter(|run| end <= run.end);
        let run = known.unwrap_or_else(|| self.mtrrs.uniform_run(block.identity(), self.end));
        self.run = Some(run);
        (end <= run.end).then_some(run.memory_type)
    }
}

/// Returns the number of tables that a change of type at `address` costs: one for each size of page that
/// straddles it.
fn tables_at(address: u64) -> u64 {
    let address = GuestPhys::new(address);
    u64::from(!address.is_aligned(PageSize::Size1G)) + u64::from(!address.is_aligned(PageSize::Size2M))
}
