//! The state of a snapshot, call by call, on a machine with a memory of eight pages.

use std::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::gate::OwnedRange;
use mercury_abi::restart::RestartCpu;
use mercury_abi::snapshot::{
    LogCollect, LogSetup, MAP_BITS, PAGE_LIST_MAX, PageList, ReadEntry, ReadList, SnapshotSetup,
};

use super::ledger::Ledger;
use super::live::Live;
use super::rollback::Target;
use super::view::Access;
use super::{dirty_log, free, pool};
use crate::address::{GuestPhys, HostPhys, PAGE_SIZE};
use crate::mtrr::Mtrrs;
use crate::paging::format::{AmdNested, Format, IntelExtended};
use crate::paging::identity::{IdentityMap, Step};
use crate::paging::plan::{LargestPage, Layout};
use crate::paging::table::{Depth, PageTable, TablePages};
use crate::x86::{Hardware, Processor};

/// Root of the page tables that map memory, on the model of a processor.
pub const WIDE: u64 = 0x88_8000;

#[repr(C, align(4096))]
#[derive(Clone)]
pub struct Page(pub [u8; 4096]);

/// Returns memory that stays. The direct map of tests begins at 0, so an address is its own frame.
fn leaked(count: usize) -> &'static mut [Page] {
    vec![Page([0; 4096]); count].leak()
}

pub fn phys(page: &Page) -> u64 {
    core::ptr::from_ref(page).expose_provenance() as u64
}

/// A rollback of no CPUs.
const TARGET: Target = Target {
    root: HostPhys::new(0),
    once: false,
    cpus: &[],
    settle_ticks: 0,
    buses: [0; 4],
    ended_virt: 0,
    repeat_ticks: 1000,
};

fn list(pages: &[Page]) -> PageList {
    let mut list = PageList { count: pages.len() as u64, pages_phys: [0; PAGE_LIST_MAX] };
    list.pages_phys.iter_mut().zip(pages).for_each(|(slot, page)| *slot = phys(page));
    list
}

/// With a memory of eight pages, filled with their numbers.
pub struct Machine<F> {
    pub live: Live<F>,
    base: PageTable<F>,
    pub memory: &'static mut [Page],
    buffer: &'static mut [Page],
    setup: SnapshotSetup,
}

impl<F: Format<Address = GuestPhys>> Machine<F> {
    pub fn new(pool: usize) -> Self {
        let (memory, buffer) = (leaked(8), leaked(1));
        memory.iter_mut().zip(1..).for_each(|(page, number)| page.0.fill(number));
        let mut live = Live::<F>::new();
        live.donate(&mut list(leaked(64)));
        let layout = Layout {
            physical_bits: 48,
            depth: Depth::Four,
            largest: LargestPage::OneGibibyte,
            eager_end: GuestPhys::new(1 << 32),
            complete_pages: 0,
            zero_page: HostPhys::new(0x1000),
        };
        let mut map = IdentityMap::new(layout, Mtrrs::from_registers(0, [0; 11], &[], 48, None));
        assert_eq!(map.build_step(&mut live.ledger, &[], 1000), Step::Done);
        for page in memory.iter() {
            assert!(map.fill(&mut live.ledger, GuestPhys::new(phys(page))).is_ok());
        }
        let base = map.tables().expect("tables");
        // The identity map has what it needs; the snapshot gets its own.
        live.ledger = Ledger::new();
        live.donate(&mut list(leaked(pool)));
        let range = OwnedRange { start_phys: phys(&memory[0]), pages: memory.len() as u64 };
        let ranges: &[OwnedRange] = vec![range].leak();
        let memory_virt = ranges.as_ptr().expose_provenance() as u64;
        let setup = SnapshotSetup {
            memory_virt,
            memory_count: 1,
            hashes_virt: 0,
            persistent_virt: 0,
            cpus: 1,
            log: 0,
            ..SnapshotSetup::default()
        };
        Self { live, base, memory, buffer, setup }
    }

    pub fn begin(&mut self) -> Result<(), Code> {
        self.live.begin(self.base, &self.setup)
    }

    /// Begins a dirty log, with its two maps.
    pub fn begin_log(&mut self) -> Result<(), Code> {
        let pages = self.memory.iter().map(|page| (phys(page) / PAGE_SIZE) as usize / MAP_BITS);
        let map = || -> &'static [Option<&'static dirty_log::Piece>] {
            let mut map = vec![None; pages.clone().max().unwrap_or(0) + 1];
            for piece in pages.clone() {
                map[piece].get_or_insert_with(|| {
                    &*Box::leak(Box::new([const { AtomicU64::new(0) }; MAP_BITS / 64]))
                });
            }
            map.leak()
        };
        let (written, collected) = (map(), map());
        let setup = LogSetup {
            memory_virt: self.setup.memory_virt,
            memory_count: self.setup.memory_count,
            written_virt: written.as_ptr().expose_provenance() as u64,
            collected_virt: collected.as_ptr().expose_provenance() as u64,
            map_count: written.len() as u64,
        };
        self.live.begin_log(self.base, &setup)
    }

    /// Returns the pages that the dirty log has had since the last call.
    pub fn collect(&mut self) -> Result<Vec<usize>, Code> {
        // One call reads many more pages than there are.
        let mut collect = LogCollect { next_phys: phys(&self.memory[0]), ..LogCollect::default() };
        self.live.collect_log(&mut collect)?;
        let collected = self.live.recording.as_ref().expect("a dirty log").collected;
        let take = |page: &Page| {
            let number = (phys(page) / PAGE_SIZE) as usize;
            let piece = collected.0[number / MAP_BITS].expect("a piece");
            let bit = 1 << (number % 64);
            piece[number % MAP_BITS / 64].fetch_and(!bit, Ordering::Relaxed) & bit != 0
        };
        Ok((0..self.memory.len()).filter(|page| take(&self.memory[*page])).collect())
    }

    /// As a guest: the first write to a page faults.
    fn write(&mut self, page: usize, value: u8) {
        assert!(self.live.permit_on_snapshot(GuestPhys::new(phys(&self.memory[page])), Access::Write));
        self.memory[page].0.fill(value);
    }

    /// Returns the content of a page at the instant.
    pub fn content(&mut self, page: usize) -> Option<Page> {
        self.read(page).expect("a snapshot").map(|_| self.buffer[0].clone())
    }

    fn read_dead(&mut self, page: usize) -> Result<u8, Code> {
        let entry = ReadEntry { frame_phys: phys(&self.memory[page]), to_phys: phys(&self.buffer[0]) };
        // The list still has the answer of an older call.
        let mut list = ReadList { count: 1, read_before: !0, ..ReadList::default() };
        list.entries[0] = entry;
        self.live.read_dead(&mut list)?;
        assert_eq!(list.read_before, 0);
        Ok(self.buffer[0].0[4095])
    }

    fn read(&mut self, page: usize) -> Result<Option<u8>, Code> {
        let entry = ReadEntry { frame_phys: phys(&self.memory[page]), to_phys: phys(&self.buffer[0]) };
        let mut list = ReadList { count: 1, read_before: !0, ..ReadList::default() };
        list.entries[0] = entry;
        self.live.read(&mut list)?;
        Ok((list.read_before == 0).then_some(self.buffer[0].0[4095]))
    }
}

fn what_was<F: Format<Address = GuestPhys>>() {
    let mut machine = Machine::<F>::new(64);
    assert_eq!(machine.read(0), Err(Code::NoSnapshot));
    assert_eq!(machine.begin(), Ok(()));
    assert_eq!(machine.begin(), Err(Code::SnapshotLive));
    machine.write(3, 0xEE);
    machine.write(3, 0xFF);
    assert_eq!((machine.live.status().copies, machine.live.status().exact), (1, 1));
    for page in 0..8 {
        assert_eq!(machine.read(page), Ok(Some(page as u8 + 1)));
        assert_eq!(machine.read(page), Ok(None), "only once");
        machine.write(page, 0);
    }
    let status = machine.live.status();
    assert_eq!((status.copies, status.copied, status.taken), (0, 1, 8));
}

#[test]
fn frames_are_read_as_they_were() {
    what_was::<AmdNested>();
    what_was::<IntelExtended>();
}

/// The machine runs on without its snapshot, and the reader gets the reason.
#[test]
fn a_pool_that_is_too_small_invalidates_the_snapshot() {
    let mut machine = Machine::<AmdNested>::new(1);
    assert_eq!(machine.begin(), Err(Code::SnapshotPool));
    let mut machine = Machine::<AmdNested>::new(2);
    assert_eq!(machine.begin(), Ok(()));
    // The snapshot does not become invalid at once: the driver may be about to donate pages.
    for _ in 0..256 {
        machine.write(5, 6);
        assert_eq!(machine.live.status().exact, 1);
    }
    // A writer that comes much later begins a new row.
    let ago = |ticks| Processor.tsc() - ticks;
    machine.live.ledger.set_starved(ago(4 * pool::PATIENCE), ago(3 * pool::PATIENCE));
    machine.write(5, 6);
    assert_eq!(machine.live.status().exact, 1);
    machine.live.ledger.set_starved(ago(2 * pool::PATIENCE), ago(0));
    machine.write(5, 1);
    assert_eq!(machine.live.status().exact, 0);
    assert_eq!(machine.read(0), Err(Code::SnapshotPool));
    machine.write(6, 1);
}

/// Memory that has been read can be donated. Memory cannot that is still to be read, or belongs to a target
/// of a rollback.
#[test]
fn a_pool_grows_by_frames_that_were_read() {
    let mut machine = Machine::<AmdNested>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    assert_eq!(machine.read(0), Ok(Some(1)));
    let free = machine.live.status().free_pages;
    let mut offer = list(&machine.memory[..2]);
    machine.live.donate(&mut offer);
    assert_eq!((offer.count, offer.pages_phys[0]), (1, phys(&machine.memory[1])));
    assert_eq!(machine.live.status().free_pages, free + 1);
    // The page that came last goes first.
    machine.write(2, 0xEE);
    assert_eq!(machine.read(2), Ok(Some(3)));
    assert_eq!(machine.read(1), Ok(Some(2)));
    machine.live.target = Some(TARGET);
    machine.live.donate(&mut offer);
    assert_eq!(offer.count, 1);
}

#[test]
fn a_pool_gives_half_of_what_is_free() {
    let mut machine = Machine::<AmdNested>::new(64);
    let mut list = list(&[]);
    for left in [32, 16, 8] {
        list.count = PAGE_LIST_MAX as u64;
        machine.live.reclaim(&mut list);
        assert_eq!(
            (list.count, machine.live.ledger.free_pages(), *machine.live.ledger.donated()),
            (left, left, left)
        );
    }
    list.count = 1;
    machine.live.reclaim(&mut list);
    assert_eq!(list.count, 1);
}

/// Its copies are of no use any more, and a write needs no page.
#[test]
fn an_invalid_snapshot_gives_all_of_its_pool() {
    let mut machine = Machine::<AmdNested>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    (0..5).for_each(|page| machine.write(page, 0xEE));
    let free = machine.live.status().free_pages;
    machine.live.invalidate(Code::SnapshotPool);
    let mut list = list(&[]);
    for expected in [3, free + 2] {
        list.count = expected;
        machine.live.reclaim(&mut list);
        assert_eq!(list.count, expected);
        let given = &list.pages_phys[..expected as usize];
        assert!(machine.memory.iter().all(|page| !given.contains(&phys(page))));
    }
    assert_eq!((machine.live.status().copies, machine.live.status().free_pages), (0, 0));
    list.count = 9;
    machine.live.reclaim(&mut list);
    assert_eq!(list.count, 0);
    (0..8).for_each(|page| machine.write(page, 0xFF));
}

/// Writers wait, and the reader is told to hurry.
#[test]
fn a_pool_that_runs_low_makes_the_reader_hurry() {
    let mut machine = Machine::<AmdNested>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    machine.write(2, 0);
    let mut none = ReadList::default();
    assert_eq!((machine.live.read(&mut none), machine.live.throttle()), (Ok(false), 0));
    *machine.live.ledger.donated() *= 100;
    assert_eq!(machine.live.read(&mut none), Ok(true));
    assert_eq!(
        (machine.live.status().hurries, machine.live.status().waits),
        (1, 0),
        "the reader hurries first"
    );
    assert!(machine.live.throttle() > 0);
    assert_eq!(machine.live.status().waits, 1);
    machine.live.target = Some(TARGET);
    assert_eq!(machine.live.throttle(), 0, "no reader comes");
    machine.live.target = None;
    machine.live.invalidate(Code::SnapshotLost);
    assert_eq!(machine.live.throttle(), 0, "no writer waits in vain");
    assert_eq!(machine.live.status().waits, 1);
}

/// Pages that were written get their old content, life after life, and the pool stays as large as it was.
fn put_back<F: Format<Address = GuestPhys>>() {
    let mut machine = Machine::<F>::new(64);
    assert_eq!(machine.live.put_back(), Err(Code::NoSnapshot));
    assert_eq!(machine.begin(), Ok(()));
    assert_eq!(machine.live.target().map(|_| ()), Err(Code::NoSnapshot), "it is for a reader");
    let cpus: &[RestartCpu] = vec![RestartCpu { cpu: 3, ..RestartCpu::default() }].leak();
    machine.live.target = Some(Target { cpus, ..TARGET });
    assert_eq!(machine.live.target().map(|target| target.cpus), Ok(cpus));
    let mut after_first = 0;
    for life in 1..1000_u32 {
        machine.write(2, 0xE0 | (life as u8 % 16));
        machine.write(life as usize % 8, 0xEE);
        let pages = if life % 8 == 2 { 1 } else { 2 };
        assert_eq!(machine.live.put_back(), Ok(pages));
        let content: Vec<u8> = machine.memory.iter().map(|page| page.0[4095]).collect();
        assert_eq!(content, [1, 2, 3, 4, 5, 6, 7, 8]);
        let status = machine.live.status();
        assert_eq!((status.exact, status.copies, status.dead, status.dead_pages), (1, 0, 1, pages));
        after_first = if life == 1 { status.free_pages + pages } else { after_first };
        assert_eq!(status.free_pages + pages, after_first, "no page is lost in life {life}");
    }
}

#[test]
fn written_pages_are_put_back() {
    put_back::<AmdNested>();
    put_back::<IntelExtended>();
}

/// The next life does not change what the dead one had.
#[test]
fn a_dead_life_stays_as_it_was() {
    let mut machine = Machine::<AmdNested>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    assert_eq!(machine.read_dead(0), Err(Code::NoSnapshot));
    machine.live.target = Some(TARGET);
    assert_eq!(machine.read_dead(0), Err(Code::NoPostMortem));
    machine.write(2, 0xE2);
    machine.write(3, 0xE3);
    // Written with what was there: there is nothing to keep.
    machine.write(4, 5);
    assert_eq!(machine.live.put_back(), Ok(3));
    assert_eq!(machine.live.status().dead_pages, 2);
    machine.write(2, 0xF2);
    machine.write(6, 0xF6);
    let dead: Vec<_> = (0..8).map(|page| machine.read_dead(page)).collect();
    assert_eq!(dead, [1, 2, 0xE2, 0xE3, 5, 6, 7, 8].map(Ok));
    machine.live.drop_dead();
    assert_eq!(machine.read_dead(2), Err(Code::NoPostMortem));
    assert_eq!((machine.live.status().dead, machine.live.status().dead_pages), (0, 0));
    assert_eq!(machine.live.put_back(), Ok(2));
    assert_eq!(machine.memory[2].0[0], 3);
}

/// A snapshot that needs a page is worth more than the life that ended.
#[test]
fn a_dead_life_gives_way_to_the_snapshot() {
    let mut machine = Machine::<AmdNested>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    machine.live.target = Some(TARGET);
    (0..4).for_each(|page| machine.write(page, 0xEE));
    assert_eq!(machine.live.put_back(), Ok(4));
    machine.write(7, 0xFF);
    while machine.live.ledger.allocate().is_some() {}
    machine.write(0, 0xFF);
    let status = machine.live.status();
    assert_eq!((status.exact, status.dead, status.copies), (1, 0, 2));
    assert_eq!(machine.read_dead(1), Err(Code::NoPostMortem));
    assert_eq!(machine.live.put_back(), Ok(2));
    assert_eq!(machine.memory.iter().map(|page| page.0[0]).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8]);
}

/// Without an end, a machine would die of the same for ever.
#[test]
fn the_same_death_again_and_again_takes_its_course() {
    let mut machine = Machine::<AmdNested>::new(64);
    let mut die = |signature, tsc| {
        if machine.live.snapshot.is_none() {
            assert_eq!(machine.begin(), Ok(()));
            machine.live.target = Some(TARGET);
        }
        machine.live.die((signature, tsc))
    };
    let deaths = [(7, 100), (7, 600), (8, 700), (7, 800), (7, 900), (9, 1000), (9, 1100), (9, 2000)];
    let same = deaths.map(|(signature, tsc)| die(signature, tsc));
    assert_eq!(same, [1, 2, 1, 1, 2, 1, 2, 2].map(Ok));
    (0..9).for_each(|tsc| assert_eq!(die(0, 2001 + tsc), Ok(0), "on command"));
    assert_eq!([die(5, 3000), die(5, 3900)], [Ok(1), Ok(2)]);
    assert_eq!(die(5, 3999), Err(Code::RollbackRepeated));
    assert_eq!(machine.live.put_back(), Err(Code::RollbackRepeated));
    // Neither is another snapshot of that machine a beginning.
    machine.live.end();
    machine.live.target = Some(TARGET);
    assert_eq!(machine.live.die((5, 3999)), Err(Code::RollbackRepeated));
}

/// In the memory of the instant the pages are the pool's: the driver gives them to nobody else.
#[test]
fn pages_that_a_life_got_back_are_the_pools_again() {
    let mut machine = Machine::<AmdNested>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    machine.live.target = Some(TARGET);
    let free = machine.live.status().free_pages;
    for _ in 0..20 {
        let mut list = list(&[]);
        list.count = 10;
        machine.live.reclaim(&mut list);
        assert_eq!(list.count, 10);
        assert_eq!(machine.live.put_back(), Ok(0));
        // The dead life's empty map stays.
        assert_eq!(machine.live.status().free_pages, free - 1);
    }
}

/// Half of the machine put back would be worse than none of it.
#[test]
fn an_invalid_snapshot_is_not_put_back() {
    let mut machine = Machine::<AmdNested>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    machine.write(2, 0xEE);
    machine.live.invalidate(Code::SnapshotPool);
    assert_eq!(machine.live.put_back(), Err(Code::SnapshotPool));
    assert_eq!(machine.memory[2].0[0], 0xEE);
}

/// Persistent DMA memory is copied before any CPU writes.
#[test]
fn persistent_dma_memory_is_copied_at_the_instant() {
    let mut machine = Machine::<AmdNested>::new(64);
    let mut piece: Box<free::Piece> = vec![0; MAP_BITS / 64].try_into().expect("the number of words");
    piece[..2].copy_from_slice(&[0b1001_0010, u64::MAX]);
    let pieces: &[Option<&free::Piece>] = vec![Some(&*Box::leak(piece))].leak();
    machine.setup.persistent_virt = pieces.as_ptr().expose_provenance() as u64;
    assert_eq!(machine.begin(), Ok(()));
    machine.live.copy_persistent();
    assert_eq!(machine.live.status().copies, 3, "and nothing behind the last page");
    assert_eq!(machine.live.status().persistent_pages, 3);
    machine.memory.iter_mut().for_each(|page| page.0.fill(0xEE));
    for page in [1, 4, 7] {
        assert_eq!(machine.read(page), Ok(Some(page as u8 + 1)));
    }
    assert_eq!(machine.read(0), Ok(Some(0xEE)), "a device's write, which no fault shows");
}

#[test]
fn a_cpu_that_left_invalidates_the_snapshot() {
    let mut machine = Machine::<IntelExtended>::new(64);
    assert_eq!(machine.begin(), Ok(()));
    machine.live.invalidate(Code::SnapshotLost);
    assert_eq!(machine.read(0), Err(Code::SnapshotLost));
}
