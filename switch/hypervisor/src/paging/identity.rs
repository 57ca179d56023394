//! The identity map between an attached system and its memory.
//!
//! Every address means itself, in the largest pages whose memory type is uniform, over the whole physical
//! address width. Only the hypervisor's own memory is replaced by one page of zeros. The map is built in
//! three phases, each in steps of bounded work that can be interrupted anywhere:
//!
//! 1. everything below the eager end, in full;
//! 2. the 1 GiB entries of the rest, if there are such pages and they are affordable;
//! 3. the owned ranges, hidden one 2 MiB block after the other.
//!
//! Addresses that the phases left out are filled when the system first touches them
//! ([`IdentityMap::fill`]). The unit of work is one table, which is filled completely before it is linked.
//! If a page for it is missing, nothing has changed, and the step can be done again. An entry is absent
//! only where its table has yet to be made, or beyond the physical address width.

use mercury_abi::gate::OwnedRange;

use crate::address::{Address, GuestPhys, HostPhys, PageSize, TABLE_ENTRIES};
use crate::mtrr::Mtrrs;
use crate::paging::format::{Format, Permission};
use crate::paging::plan::{Layout, Plan};
use crate::paging::sink::{Sunk, SunkPages};
use crate::paging::table::{Exhausted, Mapping, PageTable, Slot, TablePages};

/// Progress of `build_step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The map is complete and all ranges are hidden.
    Done,
    /// The budget is used up: call again.
    More,
    /// There was no page. With this many more the map can be completed: an upper bound.
    NeedPages(usize),
}

/// There was no page for a lazily filled table; with this many more it can be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeedPages(pub usize);

/// Outcome of [`IdentityMap::fill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillOutcome {
    /// The address is mapped now.
    Filled,
    /// It was mapped already: another CPU was faster, or the fault has another cause.
    Present,
    /// It lies beyond the physical address width.
    OutOfRange,
}

/// Outcome of [`IdentityMap::sink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkOutcome {
    /// Writes to the page go to the sink now.
    Sunk,
    /// The page can be written already.
    Writable,
    /// The address is not mapped.
    Absent,
}

/// Phases of the build, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Eager,
    Complete,
    Hide,
}

/// Progress of one unit of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Worked,
    Finished,
}

/// The identity map and how far it is built.
#[derive(Clone, Copy, Debug)]
pub struct IdentityMap<F> {
    plan: Plan,
    tables: Option<PageTable<F>>,
    zero_table: Option<HostPhys>,
    phase: Phase,
    /// End of the addresses for which the phase is done.
    cursor: GuestPhys,
    /// Number of owned ranges that are hidden.
    hidden: usize,
    pages_used: usize,
    pages_lazy: usize,
    sunk: SunkPages,
}

impl<F: Format<Address = GuestPhys>> IdentityMap<F> {
    /// Returns a map of which nothing is built.
    #[must_use]
    pub const fn new(layout: Layout, mtrrs: Mtrrs) -> Self {
        Self {
            plan: Plan::new(layout, mtrrs),
            tables: None,
            zero_table: None,
            phase: Phase::Eager,
            cursor: GuestPhys::new(0),
            hidden: 0,
            pages_used: 0,
            pages_lazy: 0,
            sunk: SunkPages::new(),
        }
    }

    /// Returns the root, once there is one: nCR3 (APM volume 2, 15.25.3) or the EPT pointer's address.
    #[must_use]
    pub fn root(&self) -> Option<HostPhys> {
        self.tables.as_ref().map(PageTable::root)
    }

    /// Returns the tables, once there are some.
    #[must_use]
    pub const fn tables(&self) -> Option<PageTable<F>> {
        self.tables
    }

    /// Returns the MTRRs that the map was planned with.
    #[must_use]
    pub const fn mtrrs(&self) -> &Mtrrs {
        self.plan.mtrrs()
    }

    /// Returns the number of table pages in use.
    #[must_use]
    pub const fn pages_used(&self) -> usize {
        self.pages_used
    }

    /// Returns an upper bound of the table pages that `build_step` takes in all.
    #[must_use]
    pub fn pages_bound(&self, owned: &[OwnedRange]) -> usize {
        self.plan.pages_bound(owned)
    }

    /// Returns the translation of `gpa`; `None` where nothing is mapped yet.
    pub fn lookup(&self, pages: &mut impl TablePages, gpa: GuestPhys) -> Option<Mapping> {
        if gpa >= self.plan.limit() {
            return None;
        }
        self.tables.as_ref()?.lookup(pages, gpa)
    }

    /// Builds and hides `owned`, touching at most `budget` table pages (at least one). Between two calls,
    /// also after [`Step::Done`], ranges may be appended to `owned` but not changed. Hiding tightens the
    /// map: if a processor runs on it already, the caller flushes afterwards.
    pub fn build_step(&mut self, pages: &mut impl TablePages, owned: &[OwnedRange], budget: usize) -> Step {
        for _ in 0..budget.max(1) {
            match self.work(pages, owned) {
                Ok(Progress::Worked) => {}
                Ok(Progress::Finished) => return Step::Done,
                Err(Exhausted) => return Step::NeedPages(self.missing(owned)),
            }
        }
        Step::More
    }

    /// Maps `gpa` after a fault for want of a translation. No flush is needed: absent entries are not
    /// cached (APM volume 2, 5.5.1; SDM volume 3, 30.4.2).
    ///
    /// # Errors
    /// [`NeedPages`] if there is no page for a table. What was made stays.
    pub fn fill(&mut self, pages: &mut impl TablePages, gpa: GuestPhys) -> Result<FillOutcome, NeedPages> {
        if gpa >= self.plan.limit() {
            return Ok(FillOutcome::OutOfRange);
        }
        let before = self.pages_used;
        let filled = self.fill_down(pages, gpa);
        self.pages_lazy += self.pages_used - before;
        match filled {
            Ok(()) if self.pages_used == before => Ok(FillOutcome::Present),
            Ok(()) => Ok(FillOutcome::Filled),
            Err(missing) => Err(missing),
        }
    }

    /// Lets writes to a hidden page go to `sink` after a fault, and its reads come from there. Hidden pages
    /// may share an entry, and then they share the sink. No flush is needed beyond the fault's own: the entry
    /// gets looser. The oldest of more than [`MAX_SUNK`] pages is armed again. A processor that still has its
    /// translation goes on writing to the sink, which does no harm.
    ///
    /// [`MAX_SUNK`]: crate::paging::sink::MAX_SUNK
    pub fn sink(&mut self, pages: &mut impl TablePages, gpa: GuestPhys, sink: HostPhys) -> SinkOutcome {
        let Some(slot) = self.page_slot(pages, gpa) else { return SinkOutcome::Absent };
        if !self.is_hidden(slot) {
            return SinkOutcome::Writable;
        }
        let entry = self.plan.standing_in::<F>(sink, Permission::Full);
        PageTable::<F>::store(pages, slot, entry);
        if let Some(evicted) = self.sunk.push(Sunk { page: gpa, sink }) {
            self.hide_again(pages, evicted);
        }
        SinkOutcome::Sunk
    }

    /// Does one unit of work of the present phase.
    fn work(&mut self, pages: &mut impl TablePages, owned: &[OwnedRange]) -> Result<Progress, Exhausted> {
        let Some(tables) = self.tables else {
            return self.tables_or_new(pages).map(|_| Progress::Worked);
        };
        match self.phase {
            Phase::Eager if self.cursor < self.plan.eager_end() => self.map_next(pages, tables)?,
            Phase::Eager => self.phase = Phase::Complete,
            Phase::Complete if self.cursor < self.plan.complete_end() => self.complete_next(pages, tables)?,
            Phase::Complete => self.enter(Phase::Hide),
            Phase::Hide => match owned.get(self.hidden) {
                Some(range) => self.hide_next(pages, tables, range)?,
                None => return Ok(Progress::Finished),
            },
        }
        Ok(Progress::Worked)
    }

    /// Starts a phase from address 0.
    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.cursor = GuestPhys::new(0);
    }

    /// Moves the cursor over what is mapped, or makes the table that it points at.
    fn map_next(&mut self, pages: &mut impl TablePages, tables: PageTable<F>) -> Result<(), Exhausted> {
        let slot = tables.walk(pages, self.cursor, PageSize::Size4K);
        self.cursor = if F::is_present(slot.entry) {
            skip_present::<F>(pages, slot, self.cursor)
        } else {
            let hole = self.make_child(pages, slot, self.cursor)?;
            hole.unwrap_or_else(|| self.cursor.block_end(slot.size))
        };
        Ok(())
    }

    /// Makes the next table of 1 GiB entries, or one on the way to it.
    fn complete_next(&mut self, pages: &mut impl TablePages, tables: PageTable<F>) -> Result<(), Exhausted> {
        let slot = tables.walk(pages, self.cursor, PageSize::Size1G);
        if slot.size > PageSize::Size1G {
            self.make_child(pages, slot, self.cursor)?;
        }
        if slot.size <= PageSize::Size512G {
            self.cursor = self.cursor.block_end(PageSize::Size512G);
        }
        Ok(())
    }

    /// Hides the next 2 MiB block of `range`, or makes one of the tables that this takes. The cursor
    /// stands in the range or, before its first block, below.
    fn hide_next(
        &mut self,
        pages: &mut impl TablePages,
        tables: PageTable<F>,
        range: &OwnedRange,
    ) -> Result<(), Exhausted> {
        let (start, end) = self.plan.covered(range);
        let from = self.cursor.max(start);
        if from >= end {
            self.hidden += 1;
            self.cursor = GuestPhys::new(0);
            return Ok(());
        }
        let block_end = from.block_end(PageSize::Size2M);
        let whole = from.is_aligned(PageSize::Size2M) && block_end <= end;
        let slot = tables.walk(pages, from, PageSize::Size2M);
        if slot.size > PageSize::Size2M {
            return self.descend(pages, tables, slot, from);
        }
        if PageTable::<F>::leads_on(slot) {
            self.hide_entries(pages, slot, from, end);
        } else if whole {
            let zero_table = self.zero_table_or_new(pages)?;
            PageTable::<F>::link(pages, slot, zero_table);
        } else {
            return self.descend(pages, tables, slot, from);
        }
        self.cursor = block_end;
        Ok(())
    }

    /// Hides `from..end` as far as it lies in the page table at `slot`.
    fn hide_entries(&self, pages: &mut impl TablePages, slot: Slot, from: GuestPhys, end: GuestPhys) {
        let child = F::address(slot.entry);
        if self.zero_table == Some(child) {
            return;
        }
        let first = from.index_at(PageSize::Size4K);
        let last = end.min(from.block_end(PageSize::Size2M));
        let count = last.frame().saturating_sub(from.frame()) as usize;
        let entry = self.plan.hidden_entry::<F>();
        pages.table(child).iter_mut().skip(first).take(count).for_each(|slot| *slot = entry);
    }

    /// Makes a table one level below `slot`.
    fn descend(
        &mut self,
        pages: &mut impl TablePages,
        tables: PageTable<F>,
        slot: Slot,
        gpa: GuestPhys,
    ) -> Result<(), Exhausted> {
        if !PageTable::<F>::is_page(slot) {
            return self.make_child(pages, slot, gpa).map(|_| ());
        }
        tables.split(pages, slot)?;
        self.pages_used += 1;
        Ok(())
    }

    /// Makes the table for the absent entry `slot` of `gpa`. Answers the first block in it that needs a
    /// table of its own.
    fn make_child(
        &mut self,
        pages: &mut impl TablePages,
        slot: Slot,
        gpa: GuestPhys,
    ) -> Result<Option<GuestPhys>, Exhausted> {
        let Some(smaller) = slot.size.smaller() else { return Ok(None) };
        let child = self.allocate(pages)?;
        let hole = self.plan.fill::<F>(pages.table(child), gpa.align_down(slot.size), smaller);
        PageTable::<F>::link(pages, slot, child);
        Ok(hole)
    }

    /// Makes tables for `gpa` until a page is mapped there: at most one for each level.
    fn fill_down(&mut self, pages: &mut impl TablePages, gpa: GuestPhys) -> Result<(), NeedPages> {
        let depth = levels(self.plan.layout().depth.root_entry());
        let tables = self.tables_or_new(pages).map_err(|Exhausted| NeedPages(depth + 1))?;
        for _ in 0..=depth {
            let slot = tables.walk(pages, gpa, PageSize::Size4K);
            if F::is_present(slot.entry) {
                break;
            }
            self.make_child(pages, slot, gpa).map_err(|Exhausted| NeedPages(levels(slot.size)))?;
        }
        Ok(())
    }

    /// Returns the slot of the 4 KiB page that is mapped at `gpa`, or of the larger one.
    fn page_slot(&self, pages: &mut impl TablePages, gpa: GuestPhys) -> Option<Slot> {
        let tables = self.tables.as_ref().filter(|_| gpa < self.plan.limit())?;
        Some(tables.walk(pages, gpa, PageSize::Size4K)).filter(|slot| PageTable::<F>::is_page(*slot))
    }

    fn is_hidden(&self, slot: Slot) -> bool {
        slot.size == PageSize::Size4K && slot.entry == self.plan.hidden_entry::<F>()
    }

    /// Takes the sink away from a page, if it still has it.
    fn hide_again(&self, pages: &mut impl TablePages, sunk: Sunk) {
        let Some(slot) = self.page_slot(pages, sunk.page) else { return };
        let sunk_entry = self.plan.standing_in::<F>(sunk.sink, Permission::Full);
        if slot.size == PageSize::Size4K && slot.entry == sunk_entry {
            PageTable::<F>::store(pages, slot, self.plan.hidden_entry::<F>());
        }
    }

    /// Returns the tables, begun if there are none.
    fn tables_or_new(&mut self, pages: &mut impl TablePages) -> Result<PageTable<F>, Exhausted> {
        if let Some(tables) = self.tables {
            return Ok(tables);
        }
        let tables = PageTable::new(pages, self.plan.layout().depth)?;
        self.pages_used += 1;
        self.tables = Some(tables);
        Ok(tables)
    }

    /// Returns the page table that all wholly hidden 2 MiB blocks share.
    fn zero_table_or_new(&mut self, pages: &mut impl TablePages) -> Result<HostPhys, Exhausted> {
        if let Some(table) = self.zero_table {
            return Ok(table);
        }
        let table = self.allocate(pages)?;
        *pages.table(table) = [self.plan.hidden_entry::<F>(); TABLE_ENTRIES];
        self.zero_table = Some(table);
        Ok(table)
    }

    fn allocate(&mut self, pages: &mut impl TablePages) -> Result<HostPhys, Exhausted> {
        let page = pages.allocate().ok_or(Exhausted)?;
        self.pages_used += 1;
        Ok(page)
    }

    /// Returns the number of pages that the rest of the build can take.
    fn missing(&self, owned: &[OwnedRange]) -> usize {
        let built = self.pages_used - self.pages_lazy;
        self.pages_bound(owned).saturating_sub(built).max(1)
    }
}

/// Returns the first block after `gpa`, in the table of `slot`, that is not a mapped page; otherwise the
/// first address after that table.
fn skip_present<F: Format>(pages: &mut impl TablePages, slot: Slot, gpa: GuestPhys) -> GuestPhys {
    let entries = pages.table(slot.table).iter().skip(slot.index);
    let is_page = |entry: &&u64| F::is_present(**entry) && F::is_leaf(**entry, slot.size);
    let count = entries.take_while(is_page).count() as u64;
    gpa.align_down(slot.size).saturating_add(count << slot.size.shift())
}

/// Returns the number of table levels below an entry that spans `size`, down to 4 KiB pages.
fn levels(size: PageSize) -> usize {
    let mut count = 0;
    let mut below = size.smaller();
    while let Some(size) = below {
        count += 1;
        below = size.smaller();
    }
    count
}
