//! Arithmetic on page frames: numbers of kept pages, memory without holes, and frames that a read wants.

use mercury_abi::{code::Code, gate::OwnedRange, snapshot::MAP_BITS};
use proptest::prelude::*;
use std::{cell::RefCell, collections::BTreeSet, ffi::c_ulong, ptr};

use crate::PAGE;

/// `struct mercury_wanted`.
#[repr(C)]
struct Wanted {
    collected: *const *const c_ulong,
    free: *const *const c_ulong,
    count: c_ulong,
}

unsafe extern "C" {
    fn mercury_frames_by_start(left: *const OwnedRange, right: *const OwnedRange) -> i32;
    fn mercury_frames_number(ranges: *const OwnedRange, numbers: *const u64, count: u32, phys: u64) -> i64;
    fn mercury_frames_without(
        start: u64,
        end: u64,
        holes: *const OwnedRange,
        count: u32,
        keep: extern "C" fn(u64, u64) -> u32,
    ) -> u32;
    fn mercury_frames_next(wanted: *const Wanted, frame: u64, end: u64) -> u64;
}

fn range(first: u64, pages: u64) -> OwnedRange {
    OwnedRange { start_phys: first * PAGE, pages }
}

/// Ranges that ascend and do not overlap; some touch.
fn ranges() -> impl Strategy<Value = Vec<OwnedRange>> {
    prop::collection::vec((0_u64..4, 1_u64..5), 0..12).prop_map(|pieces| {
        let mut at = 0;
        let mut ranges = Vec::new();
        for (gap, pages) in pieces {
            ranges.push(range(at + gap, pages));
            at += gap + pages;
        }
        ranges
    })
}

thread_local! {
    static KEPT: RefCell<Vec<(u64, u64)>> = const { RefCell::new(Vec::new()) };
}

extern "C" fn keep(start: u64, end: u64) -> u32 {
    KEPT.with_borrow_mut(|kept| kept.push((start, end)));
    Code::Ok as u32
}

extern "C" fn refuse(start: u64, end: u64) -> u32 {
    keep(start, end);
    Code::NoMemory as u32
}

/// A map by page frame number, in pieces.
struct Map {
    /// The words that the pointers lead to.
    pieces: Vec<Vec<c_ulong>>,
    pointers: Vec<*const c_ulong>,
}

impl Map {
    const PIECES: usize = 3;

    /// A map in which these bits are set. The piece in the middle is not there if it has none.
    fn new(bits: &BTreeSet<u64>, may_lack: bool) -> Self {
        let pieces: Vec<_> = (0..Self::PIECES)
            .map(|piece| {
                let mut words = vec![0; MAP_BITS / 64];
                let all = (piece * MAP_BITS) as u64..((piece + 1) * MAP_BITS) as u64;
                for bit in bits.range(all) {
                    let bit = usize::try_from(*bit).expect("a small number") % MAP_BITS;
                    words[bit / 64] |= 1 << (bit % 64);
                }
                words
            })
            .collect();
        let is_empty = |words: &Vec<c_ulong>| words.iter().all(|word| *word == 0);
        let pointers = pieces
            .iter()
            .map(|words| if may_lack && is_empty(words) { ptr::null() } else { words.as_ptr() })
            .collect();
        Self { pieces, pointers }
    }

    fn as_ptr(&self) -> *const *const c_ulong {
        assert_eq!(self.pieces.len(), self.pointers.len());
        self.pointers.as_ptr()
    }
}

/// Numbers near the edges of the pieces.
fn frames() -> impl Strategy<Value = BTreeSet<u64>> {
    let piece = MAP_BITS as u64;
    let near = prop_oneof![0_u64..80, piece - 70..piece + 70, 2 * piece - 70..2 * piece + 70];
    prop::collection::btree_set(near, 0..60)
}

fn next(collected: Option<&Map>, free: Option<&Map>, frame: u64, end: u64) -> u64 {
    let wanted = Wanted {
        collected: collected.map_or(ptr::null(), Map::as_ptr),
        free: free.map_or(ptr::null(), Map::as_ptr),
        count: Map::PIECES as c_ulong,
    };
    // SAFETY: both maps have `count` pieces of MAP_BITS bits or a null pointer, and outlive the call.
    unsafe { mercury_frames_next(&raw const wanted, frame * PAGE, end * PAGE) / PAGE }
}

proptest! {
    #[test]
    fn each_page_has_its_number(ranges in ranges(), phys in 0_u64..80 * PAGE) {
        let mut numbers = Vec::new();
        let mut pages = Vec::new();
        for range in &ranges {
            numbers.push(pages.len() as u64);
            pages.extend((0..range.pages).map(|page| range.start_phys / PAGE + page));
        }
        // SAFETY: both arrays have as many elements as the count says.
        let number = unsafe {
            mercury_frames_number(ranges.as_ptr(), numbers.as_ptr(), u32::try_from(ranges.len())?, phys)
        };
        let expected = pages.iter().position(|page| *page == phys / PAGE);
        prop_assert_eq!(usize::try_from(number).ok(), expected);
    }

    #[test]
    fn memory_is_kept_without_its_holes(
        mut holes in
            prop::collection::vec((0_u64..40, 1_u64..6).prop_map(|(at, pages)| range(at, pages)), 0..10),
        start in 0_u64..40,
        pages in 0_u64..20,
    ) {
        holes.sort_by_key(|hole| hole.start_phys);
        let end = start + pages;
        KEPT.take();
        // SAFETY: the array has as many elements as the count says.
        let code = unsafe {
            let count = u32::try_from(holes.len())?;
            mercury_frames_without(start * PAGE, end * PAGE, holes.as_ptr(), count, keep)
        };
        prop_assert_eq!(code, Code::Ok as u32);
        // A part may be empty: it ends before it begins when holes overlap.
        let kept: Vec<u64> = KEPT.take().iter().flat_map(|(from, to)| from / PAGE..to / PAGE).collect();
        let is_hole = |page: &u64| holes.iter().any(|hole| {
            (hole.start_phys / PAGE..hole.start_phys / PAGE + hole.pages).contains(page)
        });
        let expected: Vec<u64> = (start..end).filter(|page| !is_hole(page)).collect();
        prop_assert_eq!(kept, expected);
    }

    #[test]
    fn the_next_frame_is_written_and_not_free(
        written in frames(),
        free in frames(),
        starts in frames(),
        by_log in any::<bool>(),
        used in any::<bool>(),
    ) {
        let collected = Map::new(&written, true);
        let unused = Map::new(&free, false);
        let end = 2 * MAP_BITS as u64 + 90;
        for frame in starts {
            let found = next(by_log.then_some(&collected), used.then_some(&unused), frame, end);
            let is_wanted =
                |page: &u64| (!by_log || written.contains(page)) && (!used || !free.contains(page));
            // Whatever is beyond the given bits is neither written nor free.
            let expected = if by_log {
                written.range(frame..).find(|page| is_wanted(page)).copied().unwrap_or(end).min(end)
            } else {
                (frame..end).find(is_wanted).unwrap_or(end)
            };
            prop_assert_eq!(found, expected, "from {}", frame);
        }
    }
}

#[test]
fn ranges_are_ordered_by_their_start() {
    let starts = [0, 1, 1 << 31, 1 << 32, u64::MAX];
    for (left, right) in starts.into_iter().flat_map(|left| starts.map(|right| (left, right))) {
        let ranges = [left, right].map(|start_phys| OwnedRange { start_phys, pages: 1 });
        // SAFETY: both are ranges.
        let order = unsafe { mercury_frames_by_start(&raw const ranges[0], &raw const ranges[1]) };
        assert_eq!(order.cmp(&0), left.cmp(&right));
    }
}

#[test]
fn the_first_refusal_ends_the_walk() {
    let holes = [range(2, 1), range(5, 1)];
    KEPT.take();
    // SAFETY: there are two holes.
    let code = unsafe { mercury_frames_without(0, 8 * PAGE, holes.as_ptr(), 2, refuse) };
    assert_eq!(code, Code::NoMemory as u32);
    assert_eq!(KEPT.take(), [(0, 2 * PAGE)]);
}

/// All input up to a small size.
mod exhaustive {
    use super::*;

    const PAGES: u64 = 6;

    #[test]
    fn every_set_of_ranges_has_its_numbers() {
        // Each page is in no range, the first of one, or a later one.
        let mut count = 0;
        for mut code in 0..3_u64.pow(6) {
            let (mut ranges, mut numbers, mut pages) = (Vec::<OwnedRange>::new(), Vec::new(), Vec::new());
            for page in 0..PAGES {
                match (code % 3, pages.last() == Some(&page.wrapping_sub(1))) {
                    (0, _) => {}
                    (2, true) => ranges.last_mut().expect("a range").pages += 1,
                    _ => {
                        ranges.push(range(page, 1));
                        numbers.push(pages.len() as u64);
                    }
                }
                pages.extend((code % 3 != 0).then_some(page));
                code /= 3;
            }
            for phys in (0..=PAGES).flat_map(|page| [page * PAGE, page * PAGE + PAGE - 1]) {
                let length = u32::try_from(ranges.len()).expect("a few");
                // SAFETY: both arrays have as many elements as the count says.
                let number =
                    unsafe { mercury_frames_number(ranges.as_ptr(), numbers.as_ptr(), length, phys) };
                let expected = pages.iter().position(|page| *page == phys / PAGE);
                assert_eq!(usize::try_from(number).ok(), expected, "{phys:x} in {ranges:?}");
                count += 1;
            }
        }
        assert_eq!(count, 729 * 14);
    }

    /// All holes of up to `PAGES` pages, and an empty one.
    fn holes() -> Vec<OwnedRange> {
        (0..PAGES).flat_map(|at| (0..=PAGES - at).map(move |pages| range(at, pages))).collect()
    }

    #[test]
    fn every_three_holes_are_left_out() {
        let holes = holes();
        for (first, a) in holes.iter().enumerate() {
            for (second, b) in holes.iter().enumerate().skip(first) {
                for c in &holes[second..] {
                    let three = [*a, *b, *c];
                    let is_hole = |page: u64| {
                        three.iter().any(|hole| {
                            (hole.start_phys / PAGE..hole.start_phys / PAGE + hole.pages).contains(&page)
                        })
                    };
                    for (start, end) in [(0, PAGES), (1, PAGES - 1), (2, 2), (2, 3), (0, PAGES + 1)] {
                        KEPT.take();
                        // SAFETY: there are three holes.
                        let code = unsafe {
                            mercury_frames_without(start * PAGE, end * PAGE, three.as_ptr(), 3, keep)
                        };
                        assert_eq!(code, Code::Ok as u32);
                        let kept: Vec<_> =
                            KEPT.take().iter().flat_map(|(from, to)| from / PAGE..to / PAGE).collect();
                        let expected: Vec<_> = (start..end).filter(|page| !is_hole(*page)).collect();
                        assert_eq!(kept, expected, "{start}..{end} without {three:?}");
                    }
                }
            }
        }
    }

    /// All maps of a few frames around an edge of a word or a piece, with a written frame soon after them.
    fn find_around(edge: u64) {
        const FRAMES: u64 = 5;
        let first = edge.saturating_sub(2);
        let after = first + FRAMES + 66;
        let bits =
            |number: u64| (0..FRAMES).filter(move |bit| number >> bit & 1 == 1).map(move |bit| first + bit);
        for written in (0..1 << FRAMES).map(|number| bits(number).chain([after]).collect::<BTreeSet<_>>()) {
            let collected = Map::new(&written, true);
            for free in (0..1 << FRAMES).map(|number| bits(number).collect::<BTreeSet<_>>()) {
                let unused = Map::new(&free, false);
                for (by_log, by_use) in [(true, true), (true, false), (false, true), (false, false)] {
                    let is_wanted =
                        |page: &u64| (!by_log || written.contains(page)) && (!by_use || !free.contains(page));
                    for (from, end) in (first..first + FRAMES)
                        .flat_map(|from| (from..=first + FRAMES).map(move |end| (from, end)))
                    {
                        let found = next(by_log.then_some(&collected), by_use.then_some(&unused), from, end);
                        assert_eq!(found, (from..end).find(is_wanted).unwrap_or(end), "{from}..{end}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_map_around_an_edge_is_searched() {
        for edge in [0, 64, MAP_BITS as u64, 2 * MAP_BITS as u64] {
            find_around(edge);
        }
    }
}
