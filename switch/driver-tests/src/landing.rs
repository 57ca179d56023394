//! Arithmetic of a landing: where frames wait, what is mapped, and how many pages the landing needs.

use mercury_abi::{
    code::Code,
    restart::{MERCURY_RANGE_FREE, MERCURY_RANGE_KEPT, RestartRange},
};
use proptest::prelude::*;
use std::{cell::RefCell, collections::BTreeSet, mem::offset_of, ptr};

use crate::PAGE;

const OCCUPIED_MAX: usize = 64;
/// Pages in a large page.
pub const LARGE: u64 = 512;

/// `struct mercury_occupied`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Occupied {
    start: u64,
    end: u64,
    before: u64,
}

/// `struct mercury_plan`.
#[repr(C)]
pub struct Plan {
    pub ranges: *const RestartRange,
    pub numbers: *mut u64,
    range_count: u32,
    pub page_count: u64,
    top: u64,
    occupied: [Occupied; OCCUPIED_MAX],
    occupied_count: u32,
    pub occupied_pages: u64,
    next_range: u32,
    next_page: u64,
}

unsafe extern "C" {
    static mercury_host_plan_size: usize;
    static mercury_host_plan_next_page: usize;

    fn mercury_plan_count(plan: *mut Plan, limit: u64) -> u32;
    fn mercury_plan_occupy(plan: *mut Plan, start: u64, end: u64) -> bool;
    fn mercury_plan_occupied_number(plan: *const Plan, phys: u64) -> u64;
    fn mercury_plan_number(plan: *const Plan, phys: u64) -> u64;
    fn mercury_plan_unused_page(plan: *mut Plan) -> u64;
    fn mercury_plan_stretch_end(plan: *const Plan, next: *mut u32) -> u64;
    pub fn mercury_plan_aside(plan: *const Plan) -> u64;
    pub fn mercury_plan_has_room(plan: *const Plan, aside: u64) -> bool;
    pub fn mercury_plan_windows(plan: *const Plan, add: extern "C" fn(u64, u64) -> u32) -> u32;
}

/// A plan with the arrays that it points to.
pub struct Planned {
    ranges: Vec<RestartRange>,
    numbers: Vec<u64>,
    pub plan: Plan,
}

impl Planned {
    /// A plan of these ranges, not counted yet. No memory is occupied.
    fn new(ranges: Vec<RestartRange>) -> Self {
        let numbers = vec![u64::MAX; ranges.len()];
        let plan = Plan {
            ranges: ptr::null(),
            numbers: ptr::null_mut(),
            range_count: u32::try_from(ranges.len()).expect("a few ranges"),
            page_count: 0,
            top: 0,
            occupied: [Occupied::default(); OCCUPIED_MAX],
            occupied_count: 0,
            occupied_pages: 0,
            next_range: 0,
            next_page: 0,
        };
        Self { ranges, numbers, plan }
    }

    pub fn plan(&mut self) -> *mut Plan {
        self.plan.ranges = self.ranges.as_ptr();
        self.plan.numbers = self.numbers.as_mut_ptr();
        &raw mut self.plan
    }

    fn count(&mut self, limit: u64) -> u32 {
        // SAFETY: plan() returns a plan whose arrays have `range_count` elements.
        unsafe { mercury_plan_count(self.plan(), limit) }
    }

    fn occupy(&mut self, start: u64, end: u64) -> bool {
        // SAFETY: as in count().
        unsafe { mercury_plan_occupy(self.plan(), start, end) }
    }
}

/// Memory of an image, kept and left out, and memory that this kernel occupies.
#[derive(Clone, Debug)]
pub struct Memory {
    pub ranges: Vec<RestartRange>,
    /// Stretches in bytes, ascending, as the kernel tells of them: their ends need not be pages.
    pub occupied: Vec<(u64, u64)>,
}

impl Memory {
    pub fn planned(&self) -> Planned {
        let mut planned = Planned::new(self.ranges.clone());
        assert_eq!(planned.count(u64::MAX / 2), Code::Ok as u32);
        for (start, end) in &self.occupied {
            assert!(planned.occupy(*start, *end));
        }
        planned
    }

    pub fn pages_of(&self, kind: u64) -> Vec<u64> {
        let all = self.ranges.iter().filter(|range| range.kind == kind);
        all.flat_map(|range| range.start_phys / PAGE..range.start_phys / PAGE + range.pages).collect()
    }

    pub fn occupied_pages(&self) -> BTreeSet<u64> {
        self.occupied.iter().flat_map(|(start, end)| start / PAGE..end.div_ceil(PAGE)).collect()
    }
}

/// Ranges of up to `pages` pages with gaps of up to `gap`, and stretches between them.
pub fn memory(pages: u64, gap: u64) -> impl Strategy<Value = Memory> {
    let range = (0..gap, 1..pages, prop_oneof![Just(MERCURY_RANGE_KEPT), Just(MERCURY_RANGE_FREE)]);
    let stretch = (0..2 * pages * PAGE, 1..pages * PAGE);
    (prop::collection::vec(range, 1..10), prop::collection::vec(stretch, 0..8)).prop_map(|(pieces, gaps)| {
        // Page 0 is never free memory.
        let mut at = 1;
        let mut ranges = Vec::new();
        for (gap, pages, kind) in pieces {
            ranges.push(RestartRange { start_phys: (at + gap) * PAGE, pages, kind });
            at += gap + pages;
        }
        let mut end = 0;
        let occupied = gaps.iter().map(|(gap, length)| {
            let start = end + gap;
            end = start + length;
            (start, end)
        });
        Memory { ranges, occupied: occupied.collect() }
    })
}

thread_local! {
    static WINDOWS: RefCell<Vec<(u64, u64)>> = const { RefCell::new(Vec::new()) };
}

extern "C" fn add_window(start: u64, end: u64) -> u32 {
    WINDOWS.with_borrow_mut(|windows| windows.push((start, end)));
    Code::Ok as u32
}

extern "C" fn refuse_window(start: u64, end: u64) -> u32 {
    add_window(start, end);
    Code::RestoreOverlap as u32
}

proptest! {
    #[test]
    fn pages_have_their_numbers(memory in memory(20, 4), phys in 0..200 * PAGE) {
        let mut planned = memory.planned();
        let kept = memory.pages_of(MERCURY_RANGE_KEPT);
        let occupied = memory.occupied_pages();
        prop_assert_eq!(planned.plan.page_count, kept.len() as u64);
        prop_assert_eq!(planned.plan.occupied_pages, occupied.len() as u64);
        let position = |found: Option<usize>| found.map_or(u64::MAX, |number| number as u64);
        // SAFETY: plan() returns a plan whose arrays have `range_count` elements.
        let (number, waits) = unsafe {
            (mercury_plan_number(planned.plan(), phys), mercury_plan_occupied_number(planned.plan(), phys))
        };
        prop_assert_eq!(number, position(kept.iter().position(|page| *page == phys / PAGE)));
        prop_assert_eq!(waits, position(occupied.iter().position(|page| *page == phys / PAGE)));
    }

    #[test]
    fn each_page_that_is_left_out_is_used_once(memory in memory(20, 4)) {
        let mut planned = memory.planned();
        // SAFETY: as above.
        let found = std::iter::repeat_with(|| unsafe { mercury_plan_unused_page(planned.plan()) });
        let found: Vec<u64> = found.take_while(|phys| *phys != 0).map(|phys| phys / PAGE).collect();
        let occupied = memory.occupied_pages();
        let is_unused = |page: &u64| !occupied.contains(page);
        let expected: Vec<u64> = memory.pages_of(MERCURY_RANGE_FREE).into_iter().filter(is_unused).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn room_is_for_each_frame_that_waits(memory in memory(20, 4), aside in 0_u64..60) {
        let mut planned = memory.planned();
        let occupied = memory.occupied_pages();
        let is_occupied = |page: &&u64| occupied.contains(*page);
        let waiting = memory.pages_of(MERCURY_RANGE_KEPT).iter().filter(is_occupied).count() as u64;
        let free = memory.pages_of(MERCURY_RANGE_FREE);
        let unused = (free.len() - free.iter().filter(is_occupied).count()) as u64;
        // SAFETY: as above.
        let has_room = unsafe { mercury_plan_has_room(planned.plan(), aside) };
        prop_assert_eq!(has_room, waiting + aside <= unused);
    }

    #[test]
    fn windows_cover_what_is_not_occupied(memory in memory(1500, 600)) {
        let mut planned = memory.planned();
        WINDOWS.take();
        // SAFETY: as above.
        let code = unsafe { mercury_plan_windows(planned.plan(), add_window) };
        prop_assert_eq!(code, Code::Ok as u32);
        let windows = WINDOWS.take();
        prop_assert!(windows.len() <= 2 * (memory.ranges.len() + OCCUPIED_MAX));
        let mapped: Vec<u64> = windows.iter().flat_map(|(start, end)| start / PAGE..end / PAGE).collect();
        let occupied = memory.occupied_pages();
        let mut expected = memory.pages_of(MERCURY_RANGE_KEPT);
        expected.extend(memory.pages_of(MERCURY_RANGE_FREE));
        expected.retain(|page| !occupied.contains(page));
        expected.sort_unstable();
        prop_assert_eq!(mapped, expected);
        for (start, end) in windows {
            let large = (start / PAGE).next_multiple_of(LARGE);
            prop_assert!(start / PAGE == large || end / PAGE <= large, "{start:x} to {end:x}");
        }
    }

    #[test]
    fn stretches_are_ranges_that_touch(memory in memory(20, 2)) {
        let mut planned = memory.planned();
        let mut next = 0;
        while (next as usize) < memory.ranges.len() {
            let first = next as usize;
            // SAFETY: as above; `next` is the number of a range.
            let end = unsafe { mercury_plan_stretch_end(planned.plan(), &raw mut next) };
            let mut at = memory.ranges[first].start_phys;
            for range in &memory.ranges[first..next as usize] {
                prop_assert_eq!(range.start_phys, at);
                at += range.pages * PAGE;
            }
            prop_assert_eq!(at, end);
            prop_assert!(memory.ranges.get(next as usize).is_none_or(|range| range.start_phys != end));
        }
    }

    #[test]
    fn ranges_that_are_wrong_are_refused(
        memory in memory(20, 4),
        which in any::<prop::sample::Index>(),
        how in 0..7,
    ) {
        let mut ranges = memory.ranges;
        let mut limit = 1 << 40;
        let at = which.index(ranges.len());
        match how {
            0 => ranges[at].start_phys += 1,
            1 => ranges[at].pages = 0,
            2 => ranges[at].kind = MERCURY_RANGE_FREE + 1,
            3 => ranges[at].pages = u64::MAX / PAGE,
            4 => ranges[0] = RestartRange { start_phys: 0, pages: 1, kind: MERCURY_RANGE_FREE },
            5 => limit = ranges[ranges.len() - 1].start_phys + (ranges[ranges.len() - 1].pages - 1) * PAGE,
            _ => {
                let twice = ranges[at];
                ranges.insert(at, twice);
            }
        }
        prop_assert_eq!(Planned::new(ranges).count(limit), Code::BadArgument as u32);
    }
}

#[test]
fn the_layout_is_that_of_c() {
    // SAFETY: both are constants.
    let found = unsafe { (mercury_host_plan_size, mercury_host_plan_next_page) };
    assert_eq!(found, (size_of::<Plan>(), offset_of!(Plan, next_page)));
}

#[test]
fn there_is_an_end_to_what_can_be_occupied() {
    let mut planned = Planned::new(Vec::new());
    for stretch in 0..OCCUPIED_MAX as u64 {
        assert!(planned.occupy(2 * stretch * PAGE, (2 * stretch + 1) * PAGE));
    }
    assert!(!planned.occupy(1 << 30, (1 << 30) + PAGE));
}

#[test]
fn a_window_that_is_refused_is_the_last() {
    let ranges = [0, 8].map(|at| RestartRange { start_phys: at * PAGE, pages: 4, kind: MERCURY_RANGE_KEPT });
    let mut planned = Memory { ranges: ranges.to_vec(), occupied: Vec::new() }.planned();
    WINDOWS.take();
    // SAFETY: plan() returns a plan whose arrays have `range_count` elements.
    let code = unsafe { mercury_plan_windows(planned.plan(), refuse_window) };
    assert_eq!(code, Code::RestoreOverlap as u32);
    assert_eq!(WINDOWS.take(), [(0, 4 * PAGE)]);
}

/// All memory of a few pages: each page has a state, and is occupied or not.
mod exhaustive {
    use super::*;

    const PAGES: u64 = 5;
    /// The first page. Page 0 is never free memory.
    const FIRST: u64 = 1;
    /// States of a page: not in the image, or the first or a later page of a kept or free range.
    const STATES: u64 = 5;

    /// Returns the memory with this number; `None` if a range would have no first page.
    fn memory_of(mut number: u64) -> Option<Memory> {
        let mut memory = Memory { ranges: Vec::new(), occupied: Vec::new() };
        let mut last = 0;
        for page in FIRST..FIRST + PAGES {
            let (state, is_occupied) = (number % STATES, number / STATES % 2 == 1);
            number /= 2 * STATES;
            let kind = if state <= 2 { MERCURY_RANGE_KEPT } else { MERCURY_RANGE_FREE };
            match state {
                0 => {}
                1 | 3 => memory.ranges.push(RestartRange { start_phys: page * PAGE, pages: 1, kind }),
                _ if last != state && last != state - 1 => return None,
                _ => memory.ranges.last_mut()?.pages += 1,
            }
            last = state;
            let (start, end) = (page * PAGE, (page + 1) * PAGE);
            match memory.occupied.last_mut() {
                Some(stretch) if is_occupied && stretch.1 == start => stretch.1 = end,
                _ if is_occupied => memory.occupied.push((start, end)),
                _ => {}
            }
        }
        Some(memory)
    }

    fn check(memory: &Memory) {
        let mut planned = memory.planned();
        let plan = planned.plan();
        let kept = memory.pages_of(MERCURY_RANGE_KEPT);
        let free = memory.pages_of(MERCURY_RANGE_FREE);
        let occupied: Vec<u64> = memory.occupied_pages().into_iter().collect();
        for page in 0..FIRST + PAGES + 2 {
            let number =
                |pages: &[u64]| pages.iter().position(|at| *at == page).map_or(u64::MAX, |at| at as u64);
            for phys in [page * PAGE, (page + 1) * PAGE - 1] {
                // SAFETY: plan() returns a plan whose arrays have `range_count` elements.
                let found =
                    unsafe { (mercury_plan_number(plan, phys), mercury_plan_occupied_number(plan, phys)) };
                assert_eq!(found, (number(&kept), number(&occupied)), "{memory:?}");
            }
        }
        let waiting = kept.iter().filter(|page| occupied.contains(page)).count();
        let unused: Vec<u64> = free.into_iter().filter(|page| !occupied.contains(page)).collect();
        for aside in 0..=PAGES {
            let fits = waiting as u64 + aside <= unused.len() as u64;
            // SAFETY: as above.
            assert_eq!(unsafe { mercury_plan_has_room(plan, aside) }, fits, "{memory:?} with {aside}");
        }
        for page in unused {
            // SAFETY: as above.
            assert_eq!(unsafe { mercury_plan_unused_page(plan) }, page * PAGE, "{memory:?}");
        }
        // SAFETY: as above.
        assert_eq!(unsafe { mercury_plan_unused_page(plan) }, 0, "{memory:?}");
        WINDOWS.take();
        // SAFETY: as above.
        assert_eq!(unsafe { mercury_plan_windows(plan, add_window) }, Code::Ok as u32);
        let mapped: Vec<u64> = WINDOWS.take().iter().flat_map(|(from, to)| from / PAGE..to / PAGE).collect();
        let all = memory.ranges.iter().flat_map(|range| {
            let first = range.start_phys / PAGE;
            first..first + range.pages
        });
        assert_eq!(mapped, all.filter(|page| !occupied.contains(page)).collect::<Vec<_>>(), "{memory:?}");
    }

    #[test]
    fn every_plan_of_a_few_pages() {
        let all = (0..(2 * STATES).pow(u32::try_from(PAGES).expect("a few"))).filter_map(memory_of);
        assert_eq!(all.inspect(check).count(), EXPECTED);
    }

    /// The number of plans, counted by hand: a later page of a range follows a page of that range only.
    const EXPECTED: usize = 18_272;
}
