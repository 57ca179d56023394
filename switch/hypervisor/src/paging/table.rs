//! Walk, map and split, for any [`Format`].
//!
//! Every change of a table that may be in use is one store of one entry, and a new table is complete
//! before it is linked: a processor that walks meanwhile sees the old or the new state.

use core::marker::PhantomData;
use core::sync::atomic::{Ordering, compiler_fence};

use crate::address::{Address, HostPhys, PageSize, TABLE_ENTRIES};
use crate::mtrr::MemoryType;
use crate::paging::format::{Format, Permission};

/// One page of a tree: 512 entries.
pub type Table = [u64; TABLE_ENTRIES];

/// Source of table pages, and access to their content.
pub trait TablePages {
    /// Returns an unused page with any content; `None` if there is none.
    fn allocate(&mut self) -> Option<HostPhys>;

    /// Returns the table at `phys`, which came from [`TablePages::allocate`].
    fn table(&mut self, phys: HostPhys) -> &mut Table;
}

/// There was no page for a table. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

/// Number of levels (APM volume 2, 5.3; five where CR4.LA57 is set, APM volume 2, 15.25.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Four levels: 48 bits of address.
    Four,
    /// Five levels: 57 bits of address.
    Five,
}

impl Depth {
    /// Returns the span of an entry of the root.
    #[must_use]
    pub const fn root_entry(self) -> PageSize {
        match self {
            Self::Four => PageSize::Size512G,
            Self::Five => PageSize::Size256T,
        }
    }

    /// Returns the number of address bits that the root covers.
    #[must_use]
    pub const fn address_bits(self) -> u32 {
        match self {
            Self::Four => 48,
            Self::Five => 57,
        }
    }
}

/// An entry of a table, at which a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Table that holds the entry.
    pub table: HostPhys,
    /// Index of the entry in it.
    pub index: usize,
    /// Span of the entry, in bytes of address.
    pub size: PageSize,
    /// Value of the entry when it was read.
    pub entry: u64,
}

/// Translation of one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Address that the translation leads to.
    pub phys: HostPhys,
    /// Size of the page that maps it.
    pub size: PageSize,
    /// True if the page can be written.
    pub writable: bool,
    /// Memory type in the entry; write-back where the format has none.
    pub memory_type: MemoryType,
}

/// A tree of page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTable<F> {
    root: HostPhys,
    depth: Depth,
    format: PhantomData<F>,
}

impl<F: Format> PageTable<F> {
    /// Returns an empty tree.
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for the root.
    pub fn new(pages: &mut impl TablePages, depth: Depth) -> Result<Self, Exhausted> {
        let root = pages.allocate().ok_or(Exhausted)?;
        pages.table(root).fill(0);
        Ok(Self { root, depth, format: PhantomData })
    }

    /// Returns the tree of this root, which [`PageTable::new`] made.
    #[must_use]
    pub const fn at(root: HostPhys, depth: Depth) -> Self {
        Self { root, depth, format: PhantomData }
    }

    /// Returns the root: the address in nCR3 or in the EPT pointer.
    #[must_use]
    pub const fn root(&self) -> HostPhys {
        self.root
    }

    /// Returns the number of levels.
    #[must_use]
    pub const fn depth(&self) -> Depth {
        self.depth
    }

    /// Follows `address` down to the first entry that is absent, maps a page, or spans `target`.
    pub fn walk(&self, pages: &mut impl TablePages, address: F::Address, target: PageSize) -> Slot {
        let mut table = self.root;
        let mut size = self.depth.root_entry();
        loop {
            let index = address.index_at(size);
            let slot = Slot { table, index, size, entry: entry_of(pages, table, index) };
            match size.smaller() {
                Some(smaller) if size > target && Self::leads_on(slot) => size = smaller,
                _ => return slot,
            }
            table = F::address(slot.entry);
        }
    }

    /// Returns the translation of `address`; `None` if it is not mapped.
    pub fn lookup(&self, pages: &mut impl TablePages, address: F::Address) -> Option<Mapping> {
        let slot = self.walk(pages, address, PageSize::Size4K);
        Self::is_page(slot).then(|| Mapping {
            phys: F::address(slot.entry).saturating_add(address.offset_in(slot.size)),
            size: slot.size,
            writable: F::permission(slot.entry) == Permission::Full,
            memory_type: F::memory_type(slot.entry),
        })
    }

    /// Maps one page of `size` at `address`, whatever was there: absent tables are made, larger pages
    /// are split. A table in the place of the page is unlinked and not reclaimed. The caller flushes.
    ///
    /// # Errors
    /// [`Exhausted`] if a table is missing; what was made stays and is used by the next call.
    pub fn map(
        &self,
        pages: &mut impl TablePages,
        address: F::Address,
        size: PageSize,
        leaf: u64,
    ) -> Result<(), Exhausted> {
        loop {
            let slot = self.walk(pages, address, size);
            if slot.size <= size {
                Self::store(pages, slot, leaf);
                return Ok(());
            }
            self.descend(pages, slot)?;
        }
    }

    /// Makes a table one level below `slot`: of the same translation if a page is mapped there, an
    /// empty one otherwise.
    fn descend(&self, pages: &mut impl TablePages, slot: Slot) -> Result<(), Exhausted> {
        if Self::is_page(slot) {
            return self.split(pages, slot);
        }
        let child = pages.allocate().ok_or(Exhausted)?;
        pages.table(child).fill(0);
        Self::link(pages, slot, child);
        Ok(())
    }

    /// Replaces the page at `slot` by a table of the same translation. Anything but a large page is left
    /// alone.
    ///
    /// While processors use the tables this is right on AMD after a flush. Intel's may machine-check on an
    /// executable page (instruction TLB multihit). There the caller unlinks the page, flushes, and only then
    /// links the table of [`PageTable::prepare_split`].
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for the table.
    pub fn split(&self, pages: &mut impl TablePages, slot: Slot) -> Result<(), Exhausted> {
        if let Some(child) = self.prepare_split(pages, slot)? {
            Self::link(pages, slot, child);
        }
        Ok(())
    }

    /// Makes the table that could replace the page at `slot`, and does not link it; `None` if there is no
    /// large page.
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for the table.
    pub fn prepare_split(
        &self,
        pages: &mut impl TablePages,
        slot: Slot,
    ) -> Result<Option<HostPhys>, Exhausted> {
        let Some(smaller) = slot.size.smaller().filter(|_| Self::is_page(slot)) else { return Ok(None) };
        let child = pages.allocate().ok_or(Exhausted)?;
        let (mut phys, permission) = (F::address(slot.entry), F::permission(slot.entry));
        for entry in pages.table(child) {
            *entry = F::leaf(phys, smaller, permission, F::memory_type(slot.entry));
            phys = phys.saturating_add(smaller.bytes());
        }
        Ok(Some(child))
    }

    /// Lets `slot` lead to the table `child`, which is complete.
    pub fn link(pages: &mut impl TablePages, slot: Slot, child: HostPhys) {
        Self::store(pages, slot, F::table(child));
    }

    /// Writes the entry at `slot`, after everything that was written before.
    pub fn store(pages: &mut impl TablePages, slot: Slot, entry: u64) {
        compiler_fence(Ordering::Release);
        pages.table(slot.table)[slot.index % TABLE_ENTRIES] = entry;
    }

    /// Returns true if a page is mapped at `slot`.
    #[must_use]
    pub fn is_page(slot: Slot) -> bool {
        F::is_present(slot.entry) && F::is_leaf(slot.entry, slot.size)
    }

    /// Returns true if `slot` leads to a table.
    #[must_use]
    pub fn leads_on(slot: Slot) -> bool {
        F::is_present(slot.entry) && !F::is_leaf(slot.entry, slot.size)
    }
}

/// Reads one entry of a table.
fn entry_of(pages: &mut impl TablePages, table: HostPhys, index: usize) -> u64 {
    pages.table(table)[index % TABLE_ENTRIES]
}
