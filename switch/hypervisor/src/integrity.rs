//! Integrity: pages of the system that are read-only in the nested tables, so that a store to code or
//! constants is seen.
//!
//! The system runs on a [`View`] of the identity map, in which those pages are restricted. Everything else
//! is shared with the identity map, so that nothing but a store to such a page exits. Large pages stay large
//! as far as they are restricted as a whole.
//!
//! The kernel changes its own code by a second mapping, with page tables that it loads for that alone. A
//! store with these tables, from the code that makes such changes, is let through: this CPU runs on the
//! identity map until it loads other page tables. Others run on, restricted as before.
//!
//! Any other store is foreign. It is logged, and its page can be written from then on. Whoever reads the log
//! mends the page and restricts it again: so a page that the kernel uses for something else by now costs one
//! exit, and breaks nothing.
//!
//! Beneath a snapshot or a dirty log a CPU runs on their tables, and no page is restricted for integrity.

use core::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::gate::{
    IntegrityCall, MERCURY_INTEGRITY_SHIFT, MERCURY_INTEGRITY_WRITERS as WRITERS, Vendor as Kind,
};
use mercury_abi::shared::{READ_ONLY_LATER, READ_ONLY_NONE};

use crate::address::{Address, GuestPhys, HostPhys, PAGE_SIZE, PageSize};
use crate::cpu::Area;
use crate::exit::Answer;
use crate::nested::{self, Nested};
use crate::paging::format::Format;
use crate::paging::table::{Exhausted, PageTable, TablePages};
use crate::snapshot::view::{Keep, View};
use crate::vendor::Vendor;

/// Address bits of CR3 (APM volume 2, 5.3.2).
const ROOT_BITS: u64 = 0x000f_ffff_ffff_f000;

/// Number of the pages that are restricted beneath CPUs on [`nested::root`].
static READ_ONLY: AtomicU64 = AtomicU64::new(READ_ONLY_NONE);

/// Restricted pages, and the code that may write to them.
#[derive(Debug)]
pub(crate) struct Integrity<F> {
    view: Option<View<F>>,
    /// Host-physical root of the page tables for changes of code.
    poking_root: u64,
    /// Start and end of code that makes such changes, virtual.
    writers: [(u64, u64); WRITERS],
    /// Number that the driver has given the restricted pages.
    number: u64,
}

/// A store to a restricted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// The kernel changes its own code: this CPU goes on with these tables until it loads another CR3.
    Own(HostPhys),
    /// It is foreign, and the page can be written now.
    Foreign,
}

impl<F: Format<Address = GuestPhys>> Integrity<F> {
    /// Returns the state without restricted pages.
    pub(crate) const fn new() -> Self {
        Self { view: None, poking_root: 0, writers: [(0, 0); WRITERS], number: READ_ONLY_NONE }
    }

    /// Takes over a change of the identity map at an address.
    pub(crate) fn adopt(&self, pages: &mut impl TablePages, address: GuestPhys) {
        if let Some(view) = self.view.as_ref() {
            view.adopt(pages, address);
        }
    }

    /// Begins anew. The view of an earlier time stays, with its restrictions.
    fn begin(
        &mut self,
        pages: &mut impl TablePages,
        base: PageTable<F>,
        poking_root: u64,
        number: u64,
    ) -> Result<(), Code> {
        if self.view.is_none() {
            let view = View::new(pages, base, &|_, _| Keep::Nothing);
            self.view = Some(view.map_err(|Exhausted| Code::NestedMapExhausted)?);
        }
        *self = Self { view: self.view, poking_root, number, ..Self::new() };
        Ok(())
    }

    fn add_writer(&mut self, start: u64, end: u64) -> Result<(), Code> {
        let free = self.writers.iter_mut().find(|(_, end)| *end == 0).ok_or(Code::BadArgument)?;
        *free = (start, end);
        Ok(())
    }

    /// Restricts pages of one block of 2 MiB.
    fn protect(&self, pages: &mut impl TablePages, start: GuestPhys, count: u64) -> Result<(), Code> {
        let view = self.view.ok_or(Code::BadArgument)?;
        let block = PageSize::Size2M;
        let end = start.saturating_add(count.saturating_mul(PAGE_SIZE));
        if !start.is_aligned(PageSize::Size4K) || end > start.block_end(block) {
            return Err(Code::BadArgument);
        }
        let restrict = |pages: &mut _, at, size| {
            view.protect(pages, at, size).map_err(|Exhausted| Code::NestedMapExhausted)
        };
        let whole = start.is_aligned(block) && end == start.block_end(block);
        if whole && restrict(pages, start, block)? {
            return Ok(());
        }
        let mut at = start;
        while at < end {
            restrict(pages, at, PageSize::Size4K)?;
            at = at.block_end(PageSize::Size4K);
        }
        Ok(())
    }

    /// Answers a store at an address; `None` if its page is not restricted.
    fn store(
        &self,
        pages: &mut impl TablePages,
        base: PageTable<F>,
        address: GuestPhys,
        [cr3, rip]: [u64; 2],
    ) -> Option<Store> {
        let view = self.view?;
        if !view.is_protected(pages, address) {
            return None;
        }
        let is_writer = self.writers.iter().any(|(start, end)| (*start..*end).contains(&rip));
        if is_writer && cr3 & ROOT_BITS == self.poking_root {
            return Some(Store::Own(base.root()));
        }
        view.unprotect(pages, address);
        Some(Store::Foreign)
    }
}

/// Answers a store of this CPU, which runs on no snapshot, to a page at `address`; `None` if the page is not
/// restricted. `place` is CR3 and RIP of the store.
#[inline(never)]
pub fn store<V: Vendor>(area: &Area<V>, address: u64, place: [u64; 2]) -> Option<Store> {
    if area.cpu.on_snapshot != 0 {
        return None;
    }
    let mut guard = V::tables().lock()?;
    let Nested { map, pool, integrity, .. } = guard.as_mut()?;
    integrity.store(pool, map.tables()?, GuestPhys::new(address), place)
}

/// Publishes which pages are restricted beneath this CPU, which begins to run on other tables.
#[inline]
pub fn publish<V: Vendor>(area: &mut Area<V>) {
    let is_later = area.cpu.on_snapshot != 0;
    let number = READ_ONLY.load(Ordering::Relaxed);
    area.shared().read_only = if is_later { READ_ONLY_LATER } else { number };
}

/// Answers a call of the driver.
#[cold]
#[inline(never)]
pub fn call<V: Vendor>(area: &Area<V>, call: u64, argument: u64) -> Answer {
    if V::KIND != Kind::Amd {
        return Answer::Hypercall(Code::UnknownOperation, 0);
    }
    match change::<V>(call, argument) {
        Ok(Some(root)) if area.cpu.on_snapshot == 0 => Answer::NewTables(root),
        Ok(_) => Answer::Hypercall(Code::Ok, 0),
        Err(code) => Answer::Hypercall(code, 0),
    }
}

/// Carries a call out. Returns the root with which this CPU goes on, if it is another one.
fn change<V: Vendor>(call: u64, argument: u64) -> Result<Option<HostPhys>, Code> {
    const BEGIN: u64 = IntegrityCall::Begin as u64;
    const WRITER: u64 = IntegrityCall::Writer as u64;
    const PROTECT: u64 = IntegrityCall::Protect as u64;
    const ENTER: u64 = IntegrityCall::Enter as u64;
    const LEAVE: u64 = IntegrityCall::Leave as u64;
    let first = call & ((1 << MERCURY_INTEGRITY_SHIFT) - 1);
    let mut guard = V::tables().lock().ok_or(Code::Crashed)?;
    let Nested { map, pool, integrity, .. } = guard.as_mut().ok_or(Code::NotLoaded)?;
    let base = map.tables().ok_or(Code::NotLoaded)?;
    match call >> MERCURY_INTEGRITY_SHIFT {
        BEGIN => integrity.begin(pool, base, first, argument)?,
        WRITER => integrity.add_writer(sign_extended(first), argument)?,
        PROTECT => integrity.protect(pool, GuestPhys::new(first), argument)?,
        ENTER => {
            let root = integrity.view.ok_or(Code::BadArgument)?.root();
            READ_ONLY.store(integrity.number, Ordering::Relaxed);
            return Ok(Some(nested::set_root(root)));
        }
        // Until another CPU comes here too, it runs on the view, whose stores are answered as before.
        LEAVE => {
            READ_ONLY.store(READ_ONLY_NONE, Ordering::Relaxed);
            return Ok(Some(nested::set_root(base.root())));
        }
        _ => return Err(Code::UnknownOperation),
    }
    Ok(None)
}

/// Returns an address of the upper half from its lower 56 bits.
const fn sign_extended(first: u64) -> u64 {
    const ABOVE: u32 = 64 - MERCURY_INTEGRITY_SHIFT;
    ((first << ABOVE).cast_signed() >> ABOVE).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nested::NestedAnswer;
    use crate::nested::tests::{HIDDEN, small};
    use crate::paging::format::{AmdNested, IntelExtended};

    const ROOT: u64 = 0x1234_5000;
    const POKE: [u64; 2] = [ROOT | 0x801, 0xFFFF_FFFF_8100_0010];
    const OTHER: [u64; 2] = [0x777_7000, 0xFFFF_FFFF_8100_0010];
    /// A block of 2 MiB.
    const BLOCK: u64 = 0x4000_0000;
    /// Address whose tables are filled lazily.
    const UNTOUCHED: u64 = 1 << 39;

    fn begun<F: Format<Address = GuestPhys>>() -> Nested<F> {
        let mut nested = small::<F>();
        let base = nested.map.tables().expect("tables");
        assert_eq!(nested.integrity.begin(&mut nested.pool, base, ROOT, 7), Ok(()));
        assert_eq!(nested.integrity.add_writer(0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_0100), Ok(()));
        nested
    }

    fn protect<F: Format<Address = GuestPhys>>(
        nested: &mut Nested<F>,
        at: u64,
        count: u64,
    ) -> Result<(), Code> {
        nested.integrity.protect(&mut nested.pool, GuestPhys::new(at), count)
    }

    fn store<F: Format<Address = GuestPhys>>(
        nested: &mut Nested<F>,
        at: u64,
        place: [u64; 2],
    ) -> Option<Store> {
        let base = nested.map.tables().expect("tables");
        nested.integrity.store(&mut nested.pool, base, GuestPhys::new(at), place)
    }

    /// Returns the size of the page at an address, and true if it can be written.
    fn page<F: Format<Address = GuestPhys>>(nested: &mut Nested<F>, at: u64) -> (PageSize, bool) {
        let view = nested.integrity.view.expect("a view");
        let page = view.lookup(&mut nested.pool, GuestPhys::new(at)).expect("a page");
        assert_eq!(page.phys.as_u64(), at, "the identity");
        (page.size, page.writable)
    }

    fn pages_are_restricted_alone<F: Format<Address = GuestPhys>>() {
        let mut nested = begun::<F>();
        assert_eq!(protect(&mut nested, BLOCK, 512), Ok(()));
        assert_eq!(protect(&mut nested, BLOCK + 0x20_0000, 3), Ok(()));
        assert_eq!(page(&mut nested, BLOCK + 0x1F_F000), (PageSize::Size2M, false), "it stays large");
        for (at, writable) in [(0x20_0000, false), (0x20_2000, false), (0x20_3000, true), (0x3F_F000, true)] {
            assert_eq!(page(&mut nested, BLOCK + at), (PageSize::Size4K, writable), "{at:#x}");
        }
        assert_eq!(page(&mut nested, BLOCK + 0x40_0000), (PageSize::Size2M, true));
        assert!(page(&mut nested, BLOCK + 0x4000_0000).1);
        // The identity map is as it was.
        let base = nested.map.tables().expect("tables");
        let of_base = base.lookup(&mut nested.pool, GuestPhys::new(BLOCK)).expect("a page");
        assert_eq!((of_base.size, of_base.writable), (PageSize::Size1G, true));
        assert_eq!(protect(&mut nested, BLOCK + 0x1000, 512), Err(Code::BadArgument), "two blocks");
        assert_eq!(protect(&mut nested, BLOCK + 1, 1), Err(Code::BadArgument));
    }

    fn a_foreign_store_opens_its_page<F: Format<Address = GuestPhys>>() {
        let mut nested = begun::<F>();
        assert_eq!(protect(&mut nested, BLOCK, 512), Ok(()));
        assert_eq!(store(&mut nested, BLOCK + 0x20_0000, OTHER), None, "it is not restricted");
        assert_eq!(store(&mut nested, BLOCK + 0x5123, OTHER), Some(Store::Foreign));
        assert_eq!(store(&mut nested, BLOCK + 0x5123, OTHER), None, "another CPU comes later");
        assert_eq!(page(&mut nested, BLOCK + 0x5000), (PageSize::Size4K, true));
        assert_eq!(page(&mut nested, BLOCK + 0x6000), (PageSize::Size4K, false));
        // The page is mended, and restricted again.
        assert_eq!(protect(&mut nested, BLOCK, 512), Ok(()));
        assert_eq!(page(&mut nested, BLOCK + 0x5000), (PageSize::Size4K, false));
    }

    fn the_kernels_own_stores_go_round<F: Format<Address = GuestPhys>>() {
        let mut nested = begun::<F>();
        assert_eq!(protect(&mut nested, BLOCK, 512), Ok(()));
        let base = nested.map.tables().expect("tables").root();
        assert_eq!(store(&mut nested, BLOCK + 8, POKE), Some(Store::Own(base)));
        assert_eq!(page(&mut nested, BLOCK), (PageSize::Size2M, false), "it stays restricted");
        // Other code with the same tables, and the same code with others.
        for place in [[POKE[0], 0xFFFF_FFFF_8100_0100], [OTHER[0], POKE[1]]] {
            let mut nested = begun::<F>();
            assert_eq!(protect(&mut nested, BLOCK, 512), Ok(()));
            assert_eq!(store(&mut nested, BLOCK + 8, place), Some(Store::Foreign));
        }
    }

    /// Without a page for a table the store goes through all the same.
    fn without_pages_a_large_page_opens<F: Format<Address = GuestPhys>>() {
        let mut nested = begun::<F>();
        assert_eq!(protect(&mut nested, BLOCK, 512), Ok(()));
        while nested.pool.allocate().is_some() {}
        assert_eq!(protect(&mut nested, BLOCK + 0x20_0000, 3), Err(Code::NestedMapExhausted));
        assert_eq!(store(&mut nested, BLOCK + 8, OTHER), Some(Store::Foreign));
        assert_eq!(page(&mut nested, BLOCK), (PageSize::Size2M, true));
    }

    /// A change of the identity map reaches the view's own tables, and hidden pages stay hidden.
    fn changes_of_the_map_are_adopted<F: Format<Address = GuestPhys>>() {
        let mut nested = begun::<F>();
        assert_eq!(protect(&mut nested, HIDDEN.as_u64() + 0x1000, 2), Ok(()));
        let view = nested.integrity.view.expect("a view");
        let hidden = view.lookup(&mut nested.pool, HIDDEN).expect("a page");
        assert!(!hidden.writable && hidden.phys.as_u64() != HIDDEN.as_u64());
        assert_eq!(protect(&mut nested, HIDDEN.as_u64(), 1), Ok(()));
        assert_eq!(store(&mut nested, HIDDEN.as_u64(), OTHER), None);
        assert_eq!(nested.answer(HIDDEN, true), NestedAnswer::HiddenWrite);
        assert!(view.lookup(&mut nested.pool, HIDDEN).expect("the sink").writable);
        assert_eq!(view.lookup(&mut nested.pool, GuestPhys::new(UNTOUCHED)), None);
        assert_eq!(nested.answer(GuestPhys::new(UNTOUCHED), true), NestedAnswer::Filled);
        assert!(view.lookup(&mut nested.pool, GuestPhys::new(UNTOUCHED)).is_some());
    }

    #[test]
    fn both_formats() {
        pages_are_restricted_alone::<AmdNested>();
        pages_are_restricted_alone::<IntelExtended>();
        a_foreign_store_opens_its_page::<AmdNested>();
        a_foreign_store_opens_its_page::<IntelExtended>();
        the_kernels_own_stores_go_round::<AmdNested>();
        the_kernels_own_stores_go_round::<IntelExtended>();
        without_pages_a_large_page_opens::<AmdNested>();
        without_pages_a_large_page_opens::<IntelExtended>();
        changes_of_the_map_are_adopted::<AmdNested>();
        changes_of_the_map_are_adopted::<IntelExtended>();
    }

    #[test]
    fn a_begin_forgets_the_writers() {
        let mut nested = begun::<AmdNested>();
        let base = nested.map.tables().expect("tables");
        for _ in 1..WRITERS {
            assert_eq!(nested.integrity.add_writer(1, 2), Ok(()));
        }
        assert_eq!(nested.integrity.add_writer(1, 2), Err(Code::BadArgument));
        assert_eq!(protect(&mut nested, BLOCK, 512), Ok(()));
        assert_eq!(nested.integrity.begin(&mut nested.pool, base, ROOT, 7), Ok(()));
        assert_eq!(store(&mut nested, BLOCK, POKE), Some(Store::Foreign));
    }

    /// What each CPU publishes is what its tables are.
    #[test]
    fn a_cpu_publishes_the_pages_that_are_restricted_beneath_it() {
        let mut cpu = crate::model::Attached::new();
        let mut published = |on_snapshot| {
            cpu.area.cpu.on_snapshot = on_snapshot;
            publish(&mut cpu.area);
            cpu.area.shared().read_only
        };
        READ_ONLY.store(7, Ordering::Relaxed);
        assert_eq!([published(0), published(1), published(2), published(0)], [7, 1, 1, 7]);
        READ_ONLY.store(READ_ONLY_NONE, Ordering::Relaxed);
        assert_eq!([published(0), published(1)], [0, 1]);
    }

    #[test]
    fn kernel_addresses_come_back() {
        for address in [0xFFFF_FFFF_8100_0010, 0x7FFF_1234, 0xFF00_0000_0000_0001 | 1 << 55] {
            assert_eq!(sign_extended(address & ((1 << MERCURY_INTEGRITY_SHIFT) - 1)), address);
        }
    }
}
