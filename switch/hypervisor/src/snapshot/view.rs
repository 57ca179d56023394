//! The nested tables of a frozen machine: the identity map's, seen through a root of their own.
//!
//! A view begins with a copy of the root whose entries are restricted. Everything beneath is shared with
//! the identity map, which is never changed. So freezing all of memory is to load another root, whatever
//! its size.
//!
//! The first write beneath a restricted entry gives the view a table of its own there. The entries of that
//! table are restricted in their turn, one level after the other down to 4 KiB. To end the view is to load
//! the old root.
//!
//! Permissions only grow while a view is in use, and a frame never moves. A processor that still has an
//! older translation faults once more. No other processor needs to be told.

use core::marker::PhantomData;

use super::Pool;
use crate::address::{Address, GuestPhys, HostPhys, PageSize, TABLE_ENTRIES};
use crate::paging::format::{Format, Permission};
use crate::paging::table::{Depth, Exhausted, Mapping, PageTable, Slot, TablePages};

/// Access of the guest that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A write to memory.
    Write,
    /// An instruction fetch.
    Execute,
}

/// Part of a block whose content must be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// No page of it: the block is not restricted.
    Nothing,
    /// Some pages of it, and not others.
    Something,
    /// Every page of the block.
    Everything,
}

/// Outcome of [`View::open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A page that must be kept before it is written: see [`View::permit`].
    Kept(Slot),
    /// The access is not restricted, or not any more.
    Open,
    /// The identity map does not have the page: it stands in for the hypervisor's memory.
    Hidden,
    /// No page is mapped there.
    Absent,
}

/// Tables over those of an identity map.
#[derive(Clone, Copy, Debug)]
pub struct View<F> {
    base: PageTable<F>,
    own: PageTable<F>,
    format: PhantomData<F>,
}

impl<F: Format<Address = GuestPhys>> View<F> {
    /// Returns a view over `base`. `keeps` says which part of a block must be kept.
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for the root.
    pub fn new(
        pages: &mut impl TablePages,
        base: PageTable<F>,
        keeps: &impl Fn(GuestPhys, PageSize) -> Keep,
    ) -> Result<Self, Exhausted> {
        let own = PageTable::new(pages, base.depth())?;
        let block =
            Block { start: GuestPhys::new(0), entry: base.depth().root_entry(), keep: Keep::Something };
        block.restrict::<F>(pages, base.root(), own.root(), keeps);
        Ok(Self { base, own, format: PhantomData })
    }

    /// Returns the root: the address in nCR3 or in the EPT pointer.
    #[must_use]
    pub const fn root(&self) -> HostPhys {
        self.own.root()
    }

    /// Returns the number of levels.
    #[must_use]
    pub const fn depth(&self) -> Depth {
        self.own.depth()
    }

    /// Returns the translation of `gpa`. It counts as writable if the path to it lets writes through.
    pub fn lookup(&self, pages: &mut impl TablePages, gpa: GuestPhys) -> Option<Mapping> {
        let mapping = self.own.lookup(pages, gpa)?;
        let mut writable = mapping.writable;
        let mut size = Some(self.own.depth().root_entry());
        while let Some(level) = size.filter(|level| *level > mapping.size) {
            let slot = self.own.walk(pages, gpa, level);
            writable &= F::permission(slot.entry) == Permission::Full;
            size = level.smaller();
        }
        Some(Mapping { writable, ..mapping })
    }

    /// Removes restrictions that are in the way of an access, as far as no content must be kept. Restricted
    /// tables and large pages get tables of the view's own.
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for one. What was made stays.
    pub fn open(
        &self,
        pages: &mut impl TablePages,
        gpa: GuestPhys,
        access: Access,
        keeps: &impl Fn(GuestPhys, PageSize) -> Keep,
    ) -> Result<Found, Exhausted> {
        let mut table = self.own.root();
        let mut size = self.own.depth().root_entry();
        loop {
            let slot = slot_of(pages, table, gpa, size);
            if !F::is_present(slot.entry) {
                return Ok(Found::Absent);
            }
            let Some(smaller) = size.smaller() else {
                return Ok(Self::at_page(pages, slot, gpa, access, keeps));
            };
            table = if F::is_restricted(slot.entry) {
                let start = gpa.align_down(size);
                let keep = keeps(start, size);
                if keep == Keep::Nothing {
                    PageTable::<F>::store(pages, slot, F::loosened(slot.entry));
                    return Ok(Found::Open);
                }
                self.own_table(pages, slot, Block { start, entry: smaller, keep }, keeps)?
            } else if F::is_leaf(slot.entry, size) {
                return Ok(Found::Open);
            } else {
                F::address(slot.entry)
            };
            size = smaller;
        }
    }

    /// Lets a page be written that [`View::open`] found, after its content has been kept.
    pub fn permit(&self, pages: &mut impl TablePages, kept: Slot) {
        PageTable::<F>::store(pages, kept, F::loosened(kept.entry));
    }

    /// Takes back the permission that [`View::permit`] gave. A processor that has the translation writes on
    /// until it is flushed.
    pub fn restrict(&self, pages: &mut impl TablePages, gpa: GuestPhys) {
        let own = self.own.walk(pages, gpa, PageSize::Size4K);
        if own.size != PageSize::Size4K || !F::is_present(own.entry) || !is_identity::<F>(own, gpa) {
            return;
        }
        // A table that is the identity map's as well was never opened by a fault: what leads there is
        // restricted.
        if self.base.walk(pages, gpa, PageSize::Size4K).table != own.table {
            PageTable::<F>::store(pages, own, F::read_only(own.entry));
        }
    }

    /// Restricts the page of this size at `gpa`, for integrity. Nothing else of the view is restricted.
    /// Returns `false` if smaller pages are mapped there. The caller flushes.
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for a table of the view's own. What was made stays.
    pub fn protect(
        &self,
        pages: &mut impl TablePages,
        gpa: GuestPhys,
        size: PageSize,
    ) -> Result<bool, Exhausted> {
        let mut table = self.own.root();
        let mut level = self.own.depth().root_entry();
        loop {
            let slot = slot_of(pages, table, gpa, level);
            let is_page = PageTable::<F>::is_page(slot);
            if !F::is_present(slot.entry) || is_page && F::permission(slot.entry) == Permission::ReadOnly {
                return Ok(true);
            }
            if level == size {
                if is_page && is_identity::<F>(slot, gpa) {
                    PageTable::<F>::store(pages, slot, F::read_only(slot.entry));
                }
                return Ok(is_page);
            }
            let Some(smaller) = level.smaller() else { return Ok(true) };
            let start = gpa.align_down(level);
            table = if is_page || self.shares(pages, slot, gpa) {
                let block = Block { start, entry: smaller, keep: Keep::Nothing };
                self.own_table(pages, slot, block, &|_, _| Keep::Nothing)?
            } else {
                F::address(slot.entry)
            };
            level = smaller;
        }
    }

    /// Returns true if [`View::protect`] has restricted the page at `gpa`.
    pub fn is_protected(&self, pages: &mut impl TablePages, gpa: GuestPhys) -> bool {
        let slot = self.own.walk(pages, gpa, PageSize::Size4K);
        PageTable::<F>::is_page(slot)
            && F::permission(slot.entry) == Permission::ReadOnly
            && is_identity::<F>(slot, gpa)
    }

    /// Takes the restriction back from the 4 KiB page at `gpa`. Where there is no page for the table that
    /// this takes, a larger page loses it.
    pub fn unprotect(&self, pages: &mut impl TablePages, gpa: GuestPhys) {
        loop {
            let slot = self.own.walk(pages, gpa, PageSize::Size4K);
            if slot.size == PageSize::Size4K || self.own.split(pages, slot).is_err() {
                return self.permit(pages, slot);
            }
        }
    }

    /// Returns true if the table that `slot` leads to is the identity map's as well.
    fn shares(&self, pages: &mut impl TablePages, slot: Slot, gpa: GuestPhys) -> bool {
        let base = self.base.walk(pages, gpa, slot.size);
        base.size == slot.size && F::address(base.entry) == F::address(slot.entry)
    }

    /// Begins again, as [`View::new`] does: nothing can be written that must be kept. All tables but the root
    /// go back to the pool. No processor uses the view, and each forgets its translations before it does.
    pub fn renew(&self, pool: &mut impl Pool, keeps: &impl Fn(GuestPhys, PageSize) -> Keep) {
        for level in [PageSize::Size2M, PageSize::Size1G, PageSize::Size512G, PageSize::Size256T] {
            self.release_tables(pool, level);
        }
        let block =
            Block { start: GuestPhys::new(0), entry: self.own.depth().root_entry(), keep: Keep::Something };
        block.restrict::<F>(pool, self.base.root(), self.own.root(), keeps);
    }

    /// Releases the view's own tables to which entries of this span lead. Those below are gone already.
    #[inline(never)]
    fn release_tables(&self, pool: &mut impl Pool, level: PageSize) {
        let end = self.own.depth().root_entry().bytes().saturating_mul(TABLE_ENTRIES as u64);
        let mut at = GuestPhys::new(0);
        while level <= self.own.depth().root_entry() && at.as_u64() < end {
            let own = self.own.walk(pool, at, level);
            let base = self.base.walk(pool, at, own.size);
            let is_shared = base.table == own.table
                || base.size == own.size && F::address(base.entry) == F::address(own.entry);
            if own.size == level && PageTable::<F>::leads_on(own) && !is_shared {
                PageTable::<F>::store(pool, own, 0);
                pool.release(F::address(own.entry));
            }
            at = at.block_end(own.size);
        }
    }

    /// Takes over a change of the identity map at `gpa`, where the view has a table of its own. Something was
    /// mapped, or a hidden page got a sink. The new entry is not restricted.
    pub fn adopt(&self, pages: &mut impl TablePages, gpa: GuestPhys) {
        let own = self.own.walk(pages, gpa, PageSize::Size4K);
        let base = self.base.walk(pages, gpa, own.size);
        let shared = base.table == own.table;
        if shared || base.size != own.size || !F::is_present(base.entry) {
            return;
        }
        let stands_in = own.size == PageSize::Size4K && !is_identity::<F>(base, gpa);
        if !F::is_present(own.entry) || stands_in {
            PageTable::<F>::store(pages, own, base.entry);
        }
    }

    fn at_page(
        pages: &mut impl TablePages,
        slot: Slot,
        gpa: GuestPhys,
        access: Access,
        keeps: &impl Fn(GuestPhys, PageSize) -> Keep,
    ) -> Found {
        if access == Access::Execute || F::permission(slot.entry) == Permission::Full {
            return Found::Open;
        }
        if !is_identity::<F>(slot, gpa) {
            return Found::Hidden;
        }
        if keeps(gpa.align_down(PageSize::Size4K), PageSize::Size4K) != Keep::Nothing {
            return Found::Kept(slot);
        }
        PageTable::<F>::store(pages, slot, F::loosened(slot.entry));
        Found::Open
    }

    /// Gives the view a table of its own beneath a restricted entry.
    fn own_table(
        &self,
        pages: &mut impl TablePages,
        slot: Slot,
        block: Block,
        keeps: &impl Fn(GuestPhys, PageSize) -> Keep,
    ) -> Result<HostPhys, Exhausted> {
        let split = self.own.prepare_split(pages, Slot { entry: F::loosened(slot.entry), ..slot })?;
        let (child, source) = match split {
            Some(child) => (child, child),
            None => (pages.allocate().ok_or(Exhausted)?, F::address(slot.entry)),
        };
        block.restrict::<F>(pages, source, child, keeps);
        PageTable::<F>::link(pages, slot, child);
        Ok(child)
    }
}

/// Addresses that one table covers.
struct Block {
    start: GuestPhys,
    /// Span of an entry of the table.
    entry: PageSize,
    /// Part of the block that must be kept.
    keep: Keep,
}

impl Block {
    /// Copies the table `from` to `to`, which may be the same, and restricts what must be kept. Entry by
    /// entry: a table is a third of the stack.
    fn restrict<F: Format<Address = GuestPhys>>(
        &self,
        pages: &mut impl TablePages,
        from: HostPhys,
        to: HostPhys,
        keeps: &impl Fn(GuestPhys, PageSize) -> Keep,
    ) {
        // No pointer to one of the two functions: user mode can force this, so there is no indirect branch.
        let restrict = |entry| match self.entry {
            PageSize::Size4K => F::read_only(entry),
            _ => F::replaceable(entry),
        };
        let mut start = self.start;
        for index in 0..TABLE_ENTRIES {
            let entry = pages.table(from)[index];
            let keep = self.keep == Keep::Everything || keeps(start, self.entry) != Keep::Nothing;
            pages.table(to)[index] = if F::is_present(entry) && keep { restrict(entry) } else { entry };
            start = start.saturating_add(self.entry.bytes());
        }
    }
}

fn is_identity<F: Format>(slot: Slot, gpa: GuestPhys) -> bool {
    F::address(slot.entry) == gpa.align_down(slot.size).identity()
}

fn slot_of(pages: &mut impl TablePages, table: HostPhys, gpa: GuestPhys, size: PageSize) -> Slot {
    let index = gpa.index_at(size);
    Slot { table, index, size, entry: pages.table(table)[index % TABLE_ENTRIES] }
}
