//! Splits of pages, and tables of a frozen machine, for all input up to a bound: each format and depth, each
//! level, each entry of a table or each edge of it, and each combination of flags that the hypervisor makes.
#![allow(missing_docs)]

mod common;

use common::Pool;
use mercury_hypervisor::address::{Address, GuestPhys, HostPhys, PageSize, TABLE_ENTRIES};
use mercury_hypervisor::mtrr::MemoryType;
use mercury_hypervisor::paging::format::{AmdNested, Format, IntelExtended, Permission};
use mercury_hypervisor::paging::table::{Depth, Exhausted, PageTable, Slot};
use mercury_hypervisor::snapshot::view::{Access, Found, Keep, View};

/// Bits of an address that an entry can hold.
const ADDRESS_END: u64 = 1 << 52;
/// Edges of a table: its ends, and where a bit of the index changes that all lower bits carry into.
const EDGES: [u64; 6] = [0, 1, 255, 256, 510, 511];
const TYPES: [u64; 5] = [0, 1, 4, 5, 6];
const PERMISSIONS: [Permission; 2] = [Permission::Full, Permission::ReadOnly];
const DEPTHS: [Depth; 2] = [Depth::Four, Depth::Five];

fn entries() -> impl Iterator<Item = u64> {
    0..TABLE_ENTRIES as u64
}

/// Entries that a page of this size can have. Pages of a view are restricted by `replaceable`.
fn leaves<F: Format>(phys: HostPhys, size: PageSize) -> Vec<u64> {
    let all = PERMISSIONS.into_iter().flat_map(|permission| TYPES.map(|bits| (permission, bits)));
    all.flat_map(|(permission, bits)| {
        let leaf = F::leaf(phys, size, permission, MemoryType::from_bits(bits));
        [leaf, F::loosened(leaf), F::replaceable(leaf)]
    })
    .collect()
}

/// Splits the page at `slot` with this entry, and compares each entry of the new table with its part of the
/// page.
fn splits<F: Format<Address = GuestPhys>>(tables: PageTable<F>, pool: &mut Pool, slot: Slot, entry: u64) {
    PageTable::<F>::store(pool, slot, entry);
    let before = *table(pool, slot.table);
    let slot = Slot { entry, ..slot };
    tables.split(pool, slot).expect("a page");
    let smaller = slot.size.smaller().expect("a large page");
    let link = table(pool, slot.table)[slot.index];
    assert_eq!(link, F::table(F::address(link)), "{slot:?}");
    let child = *table(pool, F::address(link));
    for (number, part) in (0..).zip(child) {
        let phys = F::address(entry).saturating_add(number * smaller.bytes());
        assert!(F::is_present(part) && F::is_leaf(part, smaller), "{slot:?} {number}");
        assert_eq!(F::address(part), phys, "{slot:?} {number}");
        assert_eq!(F::permission(part), F::permission(entry), "{slot:?} {number}");
        assert_eq!(F::memory_type(part), F::memory_type(entry), "{slot:?} {number}");
        assert_eq!(part, F::leaf(phys, smaller, F::permission(entry), F::memory_type(entry)));
    }
    // The other entries of the table are as before.
    let mut after = *table(pool, slot.table);
    after[slot.index] = before[slot.index];
    assert!(after == before, "{slot:?}");
    // What is no large page is left alone.
    for (size, entry) in [(slot.size, link), (slot.size, 0), (PageSize::Size4K, child[0])] {
        let count = pool.tables.len();
        assert_eq!(tables.prepare_split(pool, Slot { size, entry, ..slot }), Ok(None));
        assert_eq!(pool.tables.len(), count);
    }
    pool.tables.pop();
}

fn table(pool: &mut Pool, phys: HostPhys) -> &mut [u64; TABLE_ENTRIES] {
    use mercury_hypervisor::paging::table::TablePages;
    pool.table(phys)
}

fn splits_everywhere<F: Format<Address = GuestPhys>>() {
    let mut count = 0;
    for (depth, size) in
        DEPTHS.into_iter().flat_map(|depth| [(depth, PageSize::Size1G), (depth, PageSize::Size2M)])
    {
        for (upper, index) in EDGES.into_iter().flat_map(|upper| entries().map(move |index| (upper, index))) {
            let gpa = GuestPhys::new(upper << 39 | index << size.shift());
            let mut pool = Pool::with(usize::MAX);
            let tables = PageTable::<F>::new(&mut pool, depth).expect("a page");
            tables.map(&mut pool, gpa, size, 0).expect("pages");
            let slot = tables.walk(&mut pool, gpa, size);
            assert_eq!((slot.size, slot.index as u64), (size, index));
            // The identity, and the last page that an entry can hold.
            for phys in [gpa.as_u64(), ADDRESS_END - size.bytes()] {
                let mut chosen = leaves::<F>(HostPhys::new(phys), size);
                // Each combination of flags at the edges, and one of them at each other index.
                if !EDGES.contains(&index) {
                    chosen = vec![chosen[slot.index % chosen.len()]];
                }
                for entry in chosen {
                    splits(tables, &mut pool, slot, entry);
                    count += 1;
                }
            }
        }
    }
    assert_eq!(count, 2 * 2 * 6 * 2 * (6 * 30 + 506));
}

#[test]
fn every_split_keeps_the_translation() {
    splits_everywhere::<AmdNested>();
    splits_everywhere::<IntelExtended>();
}

/// Frames whose content must be kept: `from..to` without `without`.
#[derive(Clone, Copy, Debug)]
struct Kept {
    from: u64,
    to: u64,
    without: Option<u64>,
}

impl Kept {
    fn has(self, frame: u64) -> bool {
        (self.from..self.to).contains(&frame) && self.without != Some(frame)
    }

    fn keeps(self, start: GuestPhys, size: PageSize) -> Keep {
        let (first, count) = (start.frame(), size.bytes() / 4096);
        let both = self.to.min(first + count).saturating_sub(self.from.max(first));
        match both
            - u64::from(self.without.is_some_and(|frame| both > 0 && (first..first + count).contains(&frame)))
        {
            0 => Keep::Nothing,
            kept if kept == count => Keep::Everything,
            _ => Keep::Something,
        }
    }

    /// Nothing, the page, the page before, its block of each size, and that block without the page.
    fn all(frame: u64) -> Vec<Self> {
        let kept = |from, to, without| Self { from, to, without };
        let mut all =
            vec![kept(0, 0, None), kept(frame, frame + 1, None), kept(frame.max(1) - 1, frame.max(1), None)];
        for shift in [9, 18, 27] {
            let start = frame >> shift << shift;
            all.extend([None, Some(frame)].map(|without| kept(start, start + (1 << shift), without)));
        }
        all
    }
}

/// A view of the identity, with a page of this size at `gpa`.
struct Frozen<F> {
    pool: Pool,
    base: PageTable<F>,
    view: View<F>,
    kept: Kept,
}

impl<F: Format<Address = GuestPhys>> Frozen<F> {
    fn new(depth: Depth, gpa: GuestPhys, size: PageSize, kept: Kept) -> Self {
        let mut pool = Pool::with(usize::MAX);
        let base = PageTable::<F>::new(&mut pool, depth).expect("a page");
        let map = |pool: &mut Pool, at: GuestPhys, size| {
            let leaf = F::leaf(at.identity(), size, Permission::Full, MemoryType::WriteBack);
            base.map(pool, at, size, leaf).expect("pages");
        };
        for number in entries() {
            let directory = gpa.align_down(PageSize::Size512G);
            map(&mut pool, directory.saturating_add(number << 30), PageSize::Size1G);
        }
        if size != PageSize::Size1G {
            map(&mut pool, gpa.align_down(size), size);
        }
        let view = View::new(&mut pool, base, &|start, size| kept.keeps(start, size)).expect("a page");
        Self { pool, base, view, kept }
    }

    fn open(&mut self, gpa: GuestPhys, access: Access) -> Result<Found, Exhausted> {
        let kept = self.kept;
        self.view.open(&mut self.pool, gpa, access, &|start, size| kept.keeps(start, size))
    }

    /// Entries of the view on the way to `gpa`.
    fn path(&mut self, gpa: GuestPhys) -> Vec<Slot> {
        let own = PageTable::<F>::at(self.view.root(), self.base.depth());
        let mut sizes = vec![self.base.depth().root_entry()];
        while let Some(smaller) = sizes.last().and_then(|size| size.smaller()) {
            sizes.push(smaller);
        }
        let mut path: Vec<Slot> = sizes.into_iter().map(|size| own.walk(&mut self.pool, gpa, size)).collect();
        path.dedup();
        path
    }

    /// All that may change is a permission: no frame moves, the identity map stays, and nothing kept can be
    /// written but `permitted`. Pages that can be reached are at all edges of the tables on the way to `gpa`.
    fn check(&mut self, gpa: GuestPhys, permitted: Option<GuestPhys>) {
        let page = gpa.align_down(PageSize::Size4K);
        for size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
            let larger = page.align_down(match size {
                PageSize::Size4K => PageSize::Size2M,
                PageSize::Size2M => PageSize::Size1G,
                _ => PageSize::Size512G,
            });
            for at in EDGES.map(|edge| larger.saturating_add(edge << size.shift())).into_iter().chain([page])
            {
                let found = self.view.lookup(&mut self.pool, at).expect("mapped");
                assert_eq!((found.phys, found.memory_type), (at.identity(), MemoryType::WriteBack), "{at:?}");
                let is_kept = self.kept.has(at.frame()) && permitted != Some(at);
                assert!(!found.writable || !is_kept, "{at:?} of {:?} can be written", self.kept);
                // A table may replace each restricted entry while processors use it.
                for slot in self.path(at).into_iter().filter(|slot| slot.size != PageSize::Size4K) {
                    let is_replaceable = slot.entry == F::replaceable(slot.entry);
                    assert_eq!(is_replaceable, F::is_restricted(slot.entry), "{slot:?}");
                }
                let base = self.base.lookup(&mut self.pool, at).expect("mapped");
                assert_eq!((base.phys, base.writable), (at.identity(), true), "{at:?}");
            }
        }
    }
}

fn opens_everywhere<F: Format<Address = GuestPhys>>() {
    let indices =
        EDGES.into_iter().flat_map(|a| EDGES.into_iter().flat_map(move |b| EDGES.map(|c| (a, b, c))));
    for (a, b, c) in indices {
        let gpa = GuestPhys::new(a << 30 | b << 21 | c << 12);
        for size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
            for kept in Kept::all(gpa.frame()) {
                let depth = DEPTHS[usize::from(c & 1 == 1)];
                let mut frozen = Frozen::<F>::new(depth, gpa, size, kept);
                frozen.check(gpa, None);
                assert_eq!(frozen.open(gpa, Access::Execute), Ok(Found::Open), "{gpa:?} {kept:?}");
                frozen.check(gpa, None);
                let only_writes =
                    |entry| entry == F::loosened(entry) || entry == F::read_only(F::loosened(entry));
                assert!(frozen.path(gpa).into_iter().all(|slot| only_writes(slot.entry)), "{gpa:?} {kept:?}");
                opens_for_a_write(&mut frozen, gpa);
            }
        }
    }
}

/// Writes to a page: one that is kept has to be permitted, and can be restricted again.
fn opens_for_a_write<F: Format<Address = GuestPhys>>(frozen: &mut Frozen<F>, gpa: GuestPhys) {
    let found = frozen.open(gpa, Access::Write).expect("pages");
    if !frozen.kept.has(gpa.frame()) {
        assert_eq!(found, Found::Open, "{gpa:?} {:?}", frozen.kept);
        assert!(frozen.view.lookup(&mut frozen.pool, gpa).expect("mapped").writable);
        return frozen.check(gpa, None);
    }
    let Found::Kept(slot) = found else { panic!("{found:?} at {gpa:?} {:?}", frozen.kept) };
    assert_eq!((slot.size, F::address(slot.entry)), (PageSize::Size4K, gpa.identity()));
    frozen.check(gpa, None);
    frozen.view.permit(&mut frozen.pool, slot);
    assert!(frozen.view.lookup(&mut frozen.pool, gpa).expect("mapped").writable);
    assert_eq!(frozen.open(gpa, Access::Write), Ok(Found::Open));
    frozen.check(gpa, Some(gpa));
    frozen.view.restrict(&mut frozen.pool, gpa);
    frozen.check(gpa, None);
}

#[test]
fn a_view_of_amds_tables_opens_what_need_not_be_kept() {
    opens_everywhere::<AmdNested>();
}

#[test]
fn a_view_of_intels_tables_opens_what_need_not_be_kept() {
    opens_everywhere::<IntelExtended>();
}
