//! The dirty log against a model: a processor that writes, also by translations that it has not forgotten
//! yet, while the log is collected piece by piece. A page that was not collected has not changed since it
//! was read last.
#![allow(missing_docs)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use common::{GIB, MIB, Pool, mtrrs};
use mercury_abi::gate::OwnedRange;
use mercury_hypervisor::address::{GuestPhys, HostPhys};
use mercury_hypervisor::mtrr::MemoryType;
use mercury_hypervisor::paging::format::{AmdNested, Format, IntelExtended};
use mercury_hypervisor::paging::identity::{IdentityMap, Step};
use mercury_hypervisor::paging::plan::{LargestPage, Layout};
use mercury_hypervisor::paging::table::{Depth, PageTable};
use mercury_hypervisor::snapshot::Outcome;
use mercury_hypervisor::snapshot::dirty_log::{Budget, DirtyLog, Piece, WrittenMap};
use mercury_hypervisor::snapshot::view::Access;
use proptest::collection::vec;
use proptest::prelude::*;

/// A ragged start, a part over the edge of two GiB, and one that is beside hidden memory.
const MEMORY: [OwnedRange; 3] = [
    OwnedRange { start_phys: 0x10_0000, pages: 0x50 },
    OwnedRange { start_phys: 0x15_3000, pages: 0x280 },
    OwnedRange { start_phys: GIB - 2 * MIB, pages: 0x500 },
];
const HIDDEN: [OwnedRange; 1] = [OwnedRange { start_phys: 0x15_0000, pages: 3 }];

fn frames() -> Vec<u64> {
    MEMORY.iter().flat_map(|range| (0..range.pages).map(|page| range.start_phys + 4096 * page)).collect()
}

/// Returns an empty map, which is never freed.
fn map() -> WrittenMap<'static> {
    let piece: Box<Piece> = vec![0; size_of::<Piece>() / 8]
        .into_iter()
        .map(AtomicU64::new)
        .collect::<Vec<_>>()
        .try_into()
        .expect("the number of words");
    WrittenMap(Box::leak(Box::new([Some(&*Box::leak(piece)), None])))
}

fn drain(map: WrittenMap<'_>) -> BTreeSet<u64> {
    let mut set = BTreeSet::new();
    for (number, word) in map.0[0].expect("a piece").iter().enumerate() {
        let bits = word.swap(0, Ordering::Relaxed);
        set.extend((0..64).filter(|bit| bits >> bit & 1 != 0).map(|bit| (number as u64 * 64 + bit) * 4096));
    }
    set
}

struct Machine<F> {
    pages: Pool,
    base: PageTable<F>,
    log: DirtyLog<F>,
    written: WrittenMap<'static>,
    collected: WrittenMap<'static>,
    /// Translations that permit writing.
    known: BTreeSet<u64>,
    content: BTreeMap<u64, u64>,
    read: BTreeMap<u64, u64>,
}

impl<F: Format<Address = GuestPhys>> Machine<F> {
    fn new(largest: LargestPage) -> Self {
        let mut pages = Pool::with(10_000);
        let layout = Layout {
            physical_bits: 40,
            depth: Depth::Four,
            largest,
            eager_end: GuestPhys::new(5 * GIB),
            complete_pages: 0,
            zero_page: HostPhys::new(0x1234_5000),
        };
        let mut map_of_all = IdentityMap::<F>::new(layout, mtrrs(MemoryType::WriteBack, &[], 40));
        assert_eq!(map_of_all.build_step(&mut pages, &HIDDEN, 100_000), Step::Done);
        let base = map_of_all.tables().expect("tables");
        let log = DirtyLog::new(&mut pages, base, &MEMORY).expect("a root");
        let content: BTreeMap<_, _> = frames().into_iter().map(|frame| (frame, 0)).collect();
        let read = content.clone();
        Self { pages, base, log, written: map(), collected: map(), known: BTreeSet::new(), content, read }
    }

    fn write(&mut self, frame: u64) {
        let gpa = GuestPhys::new(frame);
        for _ in 0..10 {
            let maps = self.log.view().lookup(&mut self.pages, gpa).is_some_and(|mapping| mapping.writable);
            if maps || self.known.contains(&frame) {
                self.known.insert(frame);
                *self.content.get_mut(&frame).expect("a frame") += 1;
                return;
            }
            let outcome = self.log.fault(&mut self.pages, &MEMORY, self.written, gpa, Access::Write);
            assert_eq!(outcome, Outcome::Open);
        }
        panic!("{frame:#x} cannot be written");
    }

    /// Collects the log, with writes between its pieces.
    fn collect(&mut self, meanwhile: &[u64]) -> BTreeSet<u64> {
        let mut from = Some(GuestPhys::new(0));
        let mut writes = meanwhile.iter();
        while let Some(at) = from {
            let budget = Budget { words: 1 << 12, pages: 3 };
            from = self.log.collect(&mut self.pages, self.written, self.collected, at, budget).1;
            writes.next().into_iter().for_each(|frame| self.write(*frame));
        }
        self.known.clear();
        drain(self.collected)
    }

    fn read(&mut self, frames: &BTreeSet<u64>) {
        for frame in frames {
            self.read.insert(*frame, self.content[frame]);
        }
    }

    fn finish(mut self) {
        let last = self.collect(&[]);
        self.read(&last);
        assert_eq!(self.read, self.content);
        // The identity map is what it was.
        for frame in frames() {
            let mapping = self.base.lookup(&mut self.pages, GuestPhys::new(frame)).expect("memory");
            assert!(mapping.writable && mapping.phys.as_u64() == frame, "{frame:#x}");
        }
    }
}

fn run<F: Format<Address = GuestPhys>>(largest: LargestPage, rounds: &[(Vec<usize>, Vec<usize>)]) {
    let frames = frames();
    let of = |numbers: &[usize]| -> Vec<u64> {
        numbers.iter().map(|number| frames[number % frames.len()]).collect()
    };
    let mut machine = Machine::<F>::new(largest);
    for (before, meanwhile) in rounds {
        of(before).iter().for_each(|frame| machine.write(*frame));
        let collected = machine.collect(&of(meanwhile));
        machine.read(&collected);
    }
    machine.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn written_frames_are_collected(
        rounds in vec((vec(0_usize..3000, 0..40), vec(0_usize..3000, 0..10)), 1..5),
    ) {
        run::<AmdNested>(LargestPage::OneGibibyte, &rounds);
        run::<IntelExtended>(LargestPage::TwoMebibytes, &rounds);
    }
}

/// A page that is written again and again is in every collection, and others are not.
#[test]
fn a_page_is_noted_anew_when_it_was_collected() {
    let mut machine = Machine::<AmdNested>::new(LargestPage::OneGibibyte);
    for _ in 0..3 {
        machine.write(0x10_0000);
        assert_eq!(machine.collect(&[]), BTreeSet::from([0x10_0000]));
    }
    assert_eq!(machine.collect(&[]), BTreeSet::new());
}

/// Without room for a table the log is incomplete, and every page can be written.
#[test]
fn a_log_without_room_does_not_stop_writers() {
    let mut machine = Machine::<AmdNested>::new(LargestPage::OneGibibyte);
    machine.pages.available = 0;
    let gpa = GuestPhys::new(0x10_0000);
    let fault = |machine: &mut Machine<AmdNested>| {
        machine.log.fault(&mut machine.pages, &MEMORY, machine.written, gpa, Access::Write)
    };
    assert_eq!(fault(&mut machine), Outcome::Exhausted);
    machine.log.invalidate();
    assert_eq!(fault(&mut machine), Outcome::Open);
    machine.write(0x10_0000);
}
