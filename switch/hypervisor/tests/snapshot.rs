//! A snapshot against a model: a machine that writes anywhere, a reader that reads frames in any order, a
//! pool of any size that is filled up or not. The reader gets the content of memory at the instant, or the
//! snapshot reports that it is not exact. As long as no frame was read, memory can be put back to the
//! snapshot.
#![allow(missing_docs)]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{GIB, MIB, mtrrs, range};
use mercury_abi::gate::OwnedRange;
use mercury_hypervisor::address::{Address, GuestPhys, HostPhys, PageSize};
use mercury_hypervisor::mtrr::MemoryType;
use mercury_hypervisor::paging::format::{AmdNested, Format, IntelExtended};
use mercury_hypervisor::paging::identity::{FillOutcome, IdentityMap, SinkOutcome, Step};
use mercury_hypervisor::paging::plan::{LargestPage, Layout};
use mercury_hypervisor::paging::table::{Depth, Table, TablePages};
use mercury_hypervisor::snapshot::free::{FreeMap, Piece};
use mercury_hypervisor::snapshot::view::Access;
use mercury_hypervisor::snapshot::{Memory as Held, Outcome, Pool, Snapshot, Tracking};
use proptest::collection::vec;
use proptest::prelude::*;

const ZERO: HostPhys = HostPhys::new(0x1234_5000);
const SINK: HostPhys = HostPhys::new(0x1234_6000);
/// Page that a frame is read into.
const BUFFER: HostPhys = HostPhys::new(0x1234_7000);
const POOL: u64 = 0x7_0000_0000;

/// Ranges of system memory: two that share a 2 MiB block, one over the edge of two GiB, one above 4 GiB.
const MEMORY: [OwnedRange; 4] = [
    OwnedRange { start_phys: 0, pages: 0x9F },
    OwnedRange { start_phys: 0x10_0000, pages: 0x280 },
    OwnedRange { start_phys: GIB - 2 * MIB, pages: 0x500 },
    OwnedRange { start_phys: 4 * GIB, pages: 0x133 },
];
/// Inside the second range, a whole 2 MiB block of the third, and a ragged end.
const HIDDEN: [OwnedRange; 2] =
    [OwnedRange { start_phys: 0x15_0000, pages: 3 }, OwnedRange { start_phys: GIB, pages: 0x210 }];
/// Parts of the memory that are not hidden.
const VISIBLE: [OwnedRange; 6] = [
    MEMORY[0],
    OwnedRange { start_phys: 0x10_0000, pages: 0x50 },
    OwnedRange { start_phys: 0x15_3000, pages: 0x280 - 0x53 },
    OwnedRange { start_phys: GIB - 2 * MIB, pages: 0x200 },
    OwnedRange { start_phys: GIB + 0x21_0000, pages: 0x500 - 0x410 },
    MEMORY[3],
];
/// A device, below and beyond what is mapped from the start.
const DEVICES: [u64; 3] = [0xA_0000, 3 * GIB, 1 << 37];

/// Table pages, copies, and what every page holds.
struct Memory {
    tables: Vec<Box<Table>>,
    free: Vec<HostPhys>,
    available: usize,
    content: BTreeMap<u64, u64>,
}

impl Memory {
    fn index(phys: HostPhys) -> usize {
        usize::try_from((phys.as_u64() - POOL) / 4096).expect("an index")
    }

    fn content(&self, phys: HostPhys) -> u64 {
        self.content.get(&phys.as_u64()).copied().unwrap_or(0)
    }
}

impl TablePages for Memory {
    fn allocate(&mut self) -> Option<HostPhys> {
        self.available = self.available.checked_sub(1)?;
        let page = self.free.pop().unwrap_or_else(|| {
            self.tables.push(Box::new([0; 512]));
            HostPhys::new(POOL + 4096 * (self.tables.len() as u64 - 1))
        });
        self.table(page).fill(0xdead_beef_dead_beef);
        Some(page)
    }

    fn table(&mut self, phys: HostPhys) -> &mut Table {
        &mut self.tables[Self::index(phys)]
    }
}

impl Pool for Memory {
    fn release(&mut self, page: HostPhys) {
        self.content.remove(&page.as_u64());
        self.available += 1;
        self.free.push(page);
    }

    fn copy(&mut self, from: HostPhys, to: HostPhys) {
        self.content.insert(to.as_u64(), self.content(from));
    }

    fn clear(&mut self, page: HostPhys) {
        self.content.insert(page.as_u64(), 0);
    }

    fn swap(&mut self, one: HostPhys, other: HostPhys) -> bool {
        let (first, second) = (self.content(one), self.content(other));
        self.content.insert(one.as_u64(), second);
        self.content.insert(other.as_u64(), first);
        first != second
    }
}

fn frames() -> Vec<u64> {
    let hidden = |frame: &u64| {
        HIDDEN.iter().any(|range| (range.start_phys..range.start_phys + 4096 * range.pages).contains(frame))
    };
    let all = MEMORY.iter().flat_map(|range| (0..range.pages).map(|page| range.start_phys + 4096 * page));
    all.filter(|frame| !hidden(frame)).collect()
}

/// Returns the map of free pages.
fn free_map(free: &BTreeSet<u64>) -> FreeMap<'static> {
    const BITS: u64 = 1 << 20;
    // Never freed, as it belongs to a test.
    let piece = |first: u64| -> Option<&'static Piece> {
        let numbers = free.iter().map(|frame| frame / 4096).filter(|number| number / BITS == first);
        let mut piece = Box::new([0; BITS as usize / 64]);
        numbers.for_each(|number| piece[(number % BITS / 64) as usize] |= 1 << (number % 64));
        Some(Box::leak(piece))
    };
    FreeMap(if free.is_empty() { &[] } else { Box::leak(Box::new([piece(0), piece(1)])) })
}

/// A machine, its snapshot, and what the snapshot must be.
struct Machine<F> {
    memory: Memory,
    map: IdentityMap<F>,
    snapshot: Snapshot<F>,
    frames: Vec<u64>,
    held: Held<'static>,
    free: BTreeSet<u64>,
    instant: BTreeMap<u64, u64>,
    written: BTreeSet<u64>,
    contents: BTreeMap<u64, u64>,
    /// Of those: there may have been no page for the note.
    unnoted: BTreeSet<u64>,
    /// What memory held when it was put back last.
    dead: Option<BTreeMap<u64, u64>>,
    gives_up: bool,
    /// Of `frames`: all before have been read.
    next: usize,
}

impl<F: Format<Address = GuestPhys>> Machine<F> {
    fn new(
        layout: &(LargestPage, Depth),
        pool: usize,
        log: Tracking,
        gives_up: bool,
        free: &[(usize, usize)],
    ) -> Self {
        let mut memory =
            Memory { tables: Vec::new(), free: Vec::new(), available: 10_000, content: BTreeMap::new() };
        let layout = Layout {
            physical_bits: 40,
            depth: layout.1,
            largest: layout.0,
            eager_end: GuestPhys::new(5 * GIB),
            complete_pages: 0,
            zero_page: ZERO,
        };
        let types = mtrrs(MemoryType::WriteBack, &[range(MemoryType::Uncacheable, 3, 30, 40)], 40);
        let mut map = IdentityMap::<F>::new(layout, types);
        assert_eq!(map.build_step(&mut memory, &HIDDEN, 100_000), Step::Done);
        let frames = frames();
        memory.content.extend(frames.iter().map(|frame| (*frame, frame ^ 0x5555)));
        let free: BTreeSet<u64> =
            free.iter().flat_map(|(first, count)| frames.iter().skip(*first).take(*count)).copied().collect();
        let mut instant = memory.content.clone();
        instant.extend(free.iter().map(|frame| (*frame, 0)));
        let held = Held { ranges: &MEMORY, free: free_map(&free) };
        // Pages that a snapshot cannot do without.
        memory.available = pool + 2;
        let tables = map.tables().expect("tables");
        let snapshot = Snapshot::new(&mut memory, tables, held, log).expect("a root");
        let (written, contents, unnoted) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
        Self {
            memory,
            map,
            snapshot,
            frames,
            held,
            free,
            instant,
            written,
            contents,
            unnoted,
            dead: None,
            gives_up,
            next: 0,
        }
    }

    /// Returns the number of pages that the pool has given.
    fn used(&self) -> usize {
        self.memory.tables.len() - self.memory.free.len()
    }

    /// As the hypervisor answers a nested fault.
    fn fault(&mut self, gpa: GuestPhys, access: Access) {
        match self.snapshot.fault(&mut self.memory, self.held, gpa, access) {
            Outcome::Copied | Outcome::Open => {}
            Outcome::Hidden => {
                let sunk = self.map.sink(&mut self.memory, gpa, SINK);
                assert_ne!(sunk, SinkOutcome::Absent);
                self.snapshot.adopt(&mut self.memory, gpa);
            }
            Outcome::Absent => {
                let available = std::mem::replace(&mut self.memory.available, 10);
                assert!(matches!(
                    self.map.fill(&mut self.memory, gpa),
                    Ok(FillOutcome::Filled | FillOutcome::Present)
                ));
                self.memory.available = available;
                self.snapshot.adopt(&mut self.memory, gpa);
            }
            Outcome::Exhausted if self.gives_up => self.snapshot.invalidate(),
            Outcome::Exhausted => self.memory.available += 1,
        }
    }

    /// Writes as a processor does, with nothing in its TLB.
    fn write(&mut self, gpa: u64, value: u64) {
        let address = GuestPhys::new(gpa);
        for _ in 0..40 {
            match self.snapshot.view().lookup(&mut self.memory, address) {
                Some(mapping) if mapping.writable => {
                    let stands_in = mapping.phys == SINK;
                    assert!(stands_in || mapping.phys.as_u64() == gpa, "{gpa:#x} is at {mapping:?}");
                    self.memory.content.insert(mapping.phys.as_u64(), value);
                    if !stands_in {
                        self.written.insert(gpa);
                    }
                    return;
                }
                _ => self.fault(address, Access::Write),
            }
        }
        panic!("{gpa:#x} cannot be written");
    }

    fn read(&mut self, frame: u64) {
        let (exact, known) = (self.snapshot.is_exact(), self.contents.contains_key(&frame));
        let page = GuestPhys::new(frame);
        match self.snapshot.read(&mut self.memory, self.held, page, BUFFER) {
            true => {
                // Once more only where there was no page for a note.
                assert!(exact && (!known || self.unnoted.contains(&frame)));
                if self.memory.available == 0 {
                    self.unnoted.insert(frame);
                }
                let content = self.memory.content(BUFFER);
                assert_eq!(content, self.instant[&frame], "{frame:#x}");
                self.contents.insert(frame, content);
            }
            // A reader in ascending order passes over free frames.
            false if self.free.contains(&frame) => drop(self.contents.insert(frame, 0)),
            false => assert!(known || !exact, "{frame:#x} is not to be had"),
        }
    }

    fn take_next(&mut self) {
        while self.frames.get(self.next).is_some_and(|frame| self.contents.contains_key(frame)) {
            self.next += 1;
        }
        if let Some(frame) = self.frames.get(self.next).copied() {
            self.read(frame);
            assert!(self.contents.contains_key(&frame) || !self.snapshot.is_exact());
        }
    }

    fn act(&mut self, action: &Action) {
        let frame = |frames: &[u64], index: usize| frames[index % frames.len()];
        match *action {
            Action::Write(index, value) => self.write(frame(&self.frames, index), value),
            Action::Run(index, count) => {
                (index..index + count).for_each(|index| self.write(frame(&self.frames, index), 1));
            }
            Action::WriteDevice(index) => self.write(DEVICES[index % DEVICES.len()], 7),
            Action::WriteHidden(page) => {
                self.write(HIDDEN[page % 2].start_phys + 4096 * (page as u64 % 3), 8)
            }
            Action::Execute(index) => {
                let page = GuestPhys::new(frame(&self.frames, index));
                self.fault(page, Access::Execute);
            }
            Action::TakeNext(count) => (0..count).for_each(|_| self.take_next()),
            Action::ReadAny(index) => self.read(frame(&self.frames, index)),
            Action::TakeCopy => {
                if let Some(copy) = self.snapshot.next_copy(&mut self.memory, GuestPhys::new(0)) {
                    self.read(copy.as_u64());
                }
            }
            Action::Donate(count) => self.memory.available += count,
            Action::PutBack => self.put_back(),
            Action::Use(index) => {
                let page = frame(&self.frames, index);
                let wanted = self.snapshot.is_wanted(&mut self.memory, self.held, GuestPhys::new(page));
                let gone = self.contents.contains_key(&page) || self.free.contains(&page);
                // A frame without a note of its reading is kept.
                if !self.unnoted.contains(&page) {
                    assert_eq!(wanted, self.snapshot.is_exact() && !gone, "{page:#x}");
                }
                // No page is donated to a snapshot that the machine goes back to.
                if !wanted && self.dead.is_none() {
                    self.memory.content.insert(page, 0xbad);
                }
            }
        }
    }

    /// Asserts that memory goes back to the instant, unless part of that is gone: then nothing has happened.
    fn put_back(&mut self) {
        self.check_dead();
        let before = self.memory.content.clone();
        let whole = self.snapshot.is_exact() && self.contents.is_empty() && self.next == 0;
        let copies = self.snapshot.counts().copies;
        let pages = self.snapshot.put_back(&mut self.memory, self.held);
        assert_eq!(pages, whole.then_some(copies));
        if !whole {
            assert_eq!(self.memory.content, before);
            return;
        }
        for frame in &self.frames {
            let expected = if self.free.contains(frame) { before[frame] } else { self.instant[frame] };
            assert_eq!(self.memory.content[frame], expected, "{frame:#x}");
            let mapping = self.snapshot.view().lookup(&mut self.memory, GuestPhys::new(*frame));
            assert!(mapping.is_some_and(|mapping| !mapping.writable), "{frame:#x} is protected again");
        }
        self.written.clear();
        self.dead = Some(before);
        self.check_dead();
    }

    /// Asserts that the life that ended last is as it was, whatever was written since. Nothing of a snapshot
    /// that the machine goes back to is read.
    fn check_dead(&mut self) {
        let Some(dead) = self.dead.as_ref().filter(|_| self.snapshot.has_dead()) else { return };
        if !self.contents.is_empty() {
            return;
        }
        for frame in &self.frames {
            let page = self.snapshot.dead_content(&mut self.memory, GuestPhys::new(*frame));
            let content = page.map(|page| self.memory.content(page));
            assert_eq!(content, Some(dead[frame]), "{frame:#x}");
        }
    }

    /// Takes the rest, and compares.
    fn finish(mut self, log: Tracking) {
        self.check_dead();
        while self.snapshot.is_exact() && self.contents.len() < self.frames.len() {
            self.take_next();
        }
        if self.snapshot.is_exact() {
            assert_eq!(self.contents, self.instant);
            // A frame without a note of its reading may have been copied since.
            self.memory.available += 10_000;
            std::mem::take(&mut self.unnoted).into_iter().for_each(|frame| {
                if self.snapshot.read(&mut self.memory, self.held, GuestPhys::new(frame), BUFFER) {
                    assert_eq!(self.memory.content(BUFFER), self.instant[&frame]);
                }
            });
            assert_eq!(self.snapshot.counts().copies, 0);
            assert_eq!(self.snapshot.next_copy(&mut self.memory, GuestPhys::new(0)), None);
            if log == Tracking::On {
                self.check_log();
            }
        }
        // The machine runs on after any end of the snapshot, without a free page.
        self.memory.available = if self.snapshot.is_exact() { 10_000 } else { 0 };
        for index in (0..self.frames.len()).step_by(97) {
            self.write(self.frames[index], 9);
        }
        self.check_identity();
    }

    fn check_log(&mut self) {
        let mut logged = BTreeSet::new();
        let mut from = GuestPhys::new(0);
        while let Some(frame) = self.snapshot.next_written(&mut self.memory, from) {
            logged.insert(frame.as_u64());
            from = frame.block_end(PageSize::Size4K);
        }
        let memory: BTreeSet<_> = self.frames.iter().copied().collect();
        assert_eq!(logged, self.written.intersection(&memory).copied().collect());
    }

    /// Asserts that the identity map has not changed.
    fn check_identity(&mut self) {
        for frame in &self.frames {
            let mapping = self.map.lookup(&mut self.memory, GuestPhys::new(*frame)).expect("a mapping");
            assert_eq!((mapping.phys.as_u64(), mapping.writable), (*frame, true));
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Write(usize, u64),
    Run(usize, usize),
    WriteDevice(usize),
    WriteHidden(usize),
    Execute(usize),
    TakeNext(usize),
    ReadAny(usize),
    TakeCopy,
    Donate(usize),
    PutBack,
    /// Donates a page of memory to the pool.
    Use(usize),
}

fn any_action() -> impl Strategy<Value = Action> {
    let index = 0..0x700_usize;
    prop_oneof![
        8 => (index.clone(), any::<u64>()).prop_map(|(index, value)| Action::Write(index, value)),
        2 => (index.clone(), 1..300_usize).prop_map(|(index, count)| Action::Run(index, count)),
        1 => (0..3_usize).prop_map(Action::WriteDevice),
        1 => (0..6_usize).prop_map(Action::WriteHidden),
        1 => index.clone().prop_map(Action::Execute),
        3 => (1..300_usize).prop_map(Action::TakeNext),
        2 => index.clone().prop_map(Action::Use),
        2 => index.prop_map(Action::ReadAny),
        2 => Just(Action::TakeCopy),
        1 => (0..300_usize).prop_map(Action::Donate),
        4 => Just(Action::PutBack),
    ]
}

fn any_layout() -> impl Strategy<Value = (LargestPage, Depth)> {
    let largest = prop_oneof![Just(LargestPage::TwoMebibytes), Just(LargestPage::OneGibibyte)];
    (largest, prop_oneof![Just(Depth::Four), Just(Depth::Five)])
}

fn run<F: Format<Address = GuestPhys>>(
    layout: &(LargestPage, Depth),
    pool: usize,
    log: Tracking,
    gives_up: bool,
    free: &[(usize, usize)],
    actions: &[Action],
) {
    let mut machine = Machine::<F>::new(layout, pool, log, gives_up, free);
    actions.iter().for_each(|action| machine.act(action));
    machine.finish(log);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn frames_are_read_as_they_were(
        layout in any_layout(),
        pool in prop_oneof![0..60_usize, 0..2500_usize],
        log in prop_oneof![Just(Tracking::Off), Just(Tracking::On)],
        gives_up in any::<bool>(),
        free in vec((0..0x900_usize, 1..700_usize), 0..4),
        actions in vec(any_action(), 0..60),
    ) {
        run::<AmdNested>(&layout, pool, log, gives_up, &free, &actions);
        run::<IntelExtended>(&layout, pool, log, gives_up, &free, &actions);
    }
}

const SMALL: (LargestPage, Depth) = (LargestPage::OneGibibyte, Depth::Four);

/// To freeze is to load another root: two pages, whatever the memory.
#[test]
fn a_snapshot_begins_with_two_pages() {
    let machine = Machine::<AmdNested>::new(&SMALL, 0, Tracking::Off, false, &[]);
    assert_eq!(machine.memory.available, 0);
    assert_eq!(machine.snapshot.counts(), Default::default());
}

#[test]
fn without_a_page_nothing_begins() {
    let mut machine = Machine::<AmdNested>::new(&SMALL, 1, Tracking::Off, false, &[]);
    let tables = machine.map.tables().expect("tables");
    assert!(Snapshot::new(&mut machine.memory, tables, machine.held, Tracking::Off).is_err());
}

/// Devices' registers are not memory: writing to them costs no copy, and no page once the way is open.
#[test]
fn devices_are_not_kept() {
    let mut machine = Machine::<AmdNested>::new(&SMALL, 100, Tracking::Off, false, &[]);
    machine.write(3 * GIB, 1);
    let left = machine.memory.available;
    machine.write(3 * GIB + MIB, 1);
    assert_eq!((machine.memory.available, machine.snapshot.counts().copied), (left, 0));
}

/// Frames that were read in ascending order are given back in large pages, without tables: from any start,
/// and with any frames between that were free or read before.
#[test]
fn frames_read_in_order_cost_nothing() {
    for first in [0, 0x400] {
        let free = [(first + 0x40, 5), (first + 0x80, 1)];
        let mut machine = Machine::<AmdNested>::new(&SMALL, 1, Tracking::Off, false, &free);
        // Nothing of it is hidden.
        machine.held.ranges = &VISIBLE;
        let frames = machine.frames[first..].to_vec();
        let wanted = frames.iter().filter(|frame| !machine.free.contains(frame));
        wanted.copied().collect::<Vec<_>>().into_iter().for_each(|frame| machine.read(frame));
        machine.memory.available = 0;
        for frame in frames {
            machine.write(frame, 3);
        }
        assert_eq!((machine.memory.available, machine.snapshot.counts().copied), (0, 0));
        assert!(machine.snapshot.is_exact());
    }
}

/// A pool that has no page left is no reason not to take what is there.
#[test]
fn frames_are_read_without_room_for_a_note() {
    let mut machine = Machine::<AmdNested>::new(&SMALL, 0, Tracking::Off, false, &[]);
    machine.memory.available = 0;
    for frame in [GIB, 0x10_0000, 4 * GIB, 0] {
        let frame = machine.frames.iter().copied().find(|known| *known >= frame).expect("a frame");
        machine.read(frame);
        assert!(machine.contents.contains_key(&frame));
    }
    machine.finish(Tracking::Off);
}

/// A free page costs no copy, and a block that is all free costs no table.
#[test]
fn free_pages_cost_nothing() {
    // The third range begins with a block that is free.
    let first = frames().iter().position(|frame| *frame == GIB - 2 * MIB).expect("a frame");
    let mut machine = Machine::<AmdNested>::new(&SMALL, 3, Tracking::Off, false, &[(first, 512)]);
    for page in 0..512 {
        machine.write(GIB - 2 * MIB + 4096 * page, 1);
    }
    let left = machine.memory.available;
    assert_eq!((left, machine.snapshot.counts().copied), (1, 0));
    machine.write(0x10_0000, 1);
    assert_eq!(machine.snapshot.counts().copied, 1);
    machine.finish(Tracking::Off);
}

/// A machine dies as often as it likes: each life has the same memory, and costs the same pages. What was
/// free at the instant keeps what the dead life had there until the next life ends.
#[test]
fn lives_follow_one_another_without_a_leak() {
    let first = frames().iter().position(|frame| *frame == GIB - 2 * MIB).expect("a frame");
    let free = [(first, 512), (0x20, 40)];
    let mut machine = Machine::<AmdNested>::new(&SMALL, 5000, Tracking::Off, false, &free);
    let mut used = None;
    for life in 0..40_usize {
        for write in 0..50 {
            machine.act(&Action::Write(life * 131 + write * 37, (life * 50 + write) as u64));
        }
        machine.act(&Action::WriteDevice(life));
        machine.put_back();
        assert!(machine.snapshot.has_dead());
        if life % 4 == 3 {
            machine.snapshot.drop_dead(&mut machine.memory);
            // The view's root, and the map's.
            assert_eq!(machine.used(), *used.get_or_insert(machine.used()), "in life {life}");
        }
    }
    assert_eq!(machine.snapshot.counts().dead, 0);
}

/// The last page of the pool is the snapshot's, and not the dead life's.
#[test]
fn a_dead_life_gives_way_page_by_page() {
    let mut machine = Machine::<AmdNested>::new(&SMALL, 5000, Tracking::Off, true, &[(0x100, 50)]);
    (0..0x300).for_each(|index| machine.act(&Action::Write(index, 1)));
    machine.put_back();
    machine.memory.available = 0;
    (0..0x280).for_each(|index| machine.act(&Action::Write(index, 2)));
    assert!(machine.snapshot.is_exact() && !machine.snapshot.has_dead());
    machine.put_back();
}
