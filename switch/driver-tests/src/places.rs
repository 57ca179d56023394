//! Places of frames until the landing: whole restores against a model of memory, and the tables of the
//! landing.
//!
//! `mercury_restore_virt` is the test's: it hands out pages of a model of memory, and none that this kernel
//! occupies. The landing itself is the loop of `resume.S`, written in Rust.

use mercury_abi::{
    code::Code,
    restart::{
        LANDING_LIST_MAX, LandingList, LoadEntry, MERCURY_LOAD_DATA, MERCURY_LOAD_ZERO, MERCURY_RANGE_FREE,
        MERCURY_RANGE_KEPT, RestartRange,
    },
};
use proptest::prelude::*;
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    ffi::c_ulong,
    mem::offset_of,
    ptr,
};

use crate::{
    PAGE,
    landing::{LARGE, Memory, Plan, Planned, memory, mercury_plan_aside},
};

const WORDS: usize = 512;
type Page = [u64; WORDS];

/// `struct mercury_copies`.
#[repr(C)]
struct Copies {
    first: u64,
    virt: *mut LandingList,
}

/// `struct mercury_places`.
#[repr(C)]
struct Places {
    plan: Plan,
    again: bool,
    loaded: *mut c_ulong,
    empty: *mut c_ulong,
    loaded_count: u64,
    waiting: *mut u64,
    zero_frames: u64,
    reserve: u64,
    copies: Copies,
    zeros: Copies,
}

unsafe extern "C" {
    static mercury_host_places_size: usize;
    static mercury_host_places_zeros: usize;

    fn mercury_places_begin(places: *mut Places) -> u32;
    fn mercury_places_reserved(places: *mut Places) -> u64;
    fn mercury_places_load(places: *mut Places, entry: *const LoadEntry, page: *mut *mut Page) -> u32;
    fn mercury_places_loaded(places: *mut Places, phys: u64);
    fn mercury_places_content(places: *const Places, phys: u64) -> *const Page;
    fn mercury_places_finish(places: *mut Places) -> u64;
    fn mercury_places_map(
        places: *mut Places,
        root: *mut u64,
        top: i32,
        resume_virt: u64,
        resume_phys: *const [u64; 2],
    ) -> u32;
}

/// A model of memory from page 0 on, or of pages that lie far above all memory.
struct Ram {
    first: u64,
    pages: Vec<Page>,
    /// Pages that can be reached before the landing.
    windows: Vec<bool>,
}

thread_local! {
    static RAM: RefCell<Ram> =
        const { RefCell::new(Ram { first: 0, pages: Vec::new(), windows: Vec::new() }) };
}

/// Returns the page at an address; null if there is no window to it.
#[unsafe(no_mangle)]
extern "C" fn mercury_restore_virt(phys: u64) -> *mut Page {
    assert_eq!(phys % PAGE, 0, "{phys:x}");
    RAM.with_borrow_mut(|ram| {
        let at = usize::try_from((phys / PAGE).wrapping_sub(ram.first)).expect("64 bits");
        if ram.windows.get(at) == Some(&true) { &raw mut ram.pages[at] } else { ptr::null_mut() }
    })
}

/// Returns a copy of a page, whether there is a window to it or not.
fn page(phys: u64) -> Page {
    RAM.with_borrow(|ram| ram.pages[usize::try_from(phys / PAGE - ram.first).expect("64 bits")])
}

fn write(phys: u64, content: Page) {
    RAM.with_borrow_mut(|ram| {
        let at = usize::try_from(phys / PAGE - ram.first).expect("64 bits");
        ram.pages[at] = content;
    });
}

/// What a page holds before the restore: something, and something else in each page.
fn garbage(page: u64) -> Page {
    [0xdead_0000 + page; WORDS]
}

/// Content of a frame by the time that it is loaded.
fn data(frame: u64, round: u64) -> Page {
    let mut content = [0xda7a_0000_0000 + (round << 16) + frame; WORDS];
    content[0] = !frame;
    content
}

/// What is loaded into a frame.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Data,
    Zero,
    /// The content of this frame.
    Twin(u64),
}

/// A restore, with the arrays that it points to.
struct Restore {
    memory: Memory,
    _planned: Box<Planned>,
    _arrays: [Vec<u64>; 3],
    places: Places,
    /// The content of each frame that is loaded, as the machine that goes on must find it.
    model: BTreeMap<u64, Page>,
    /// Frames that were loaded as zeros and cannot be a twin.
    empty: BTreeSet<u64>,
    /// Pages in which frames can wait, and destinations for which one has been used.
    room: u64,
    waiting: BTreeSet<u64>,
}

impl Restore {
    /// Begins a restore; `None` if there is no room for the landing. Memory has `end` pages.
    fn begin(memory: Memory, end: u64, again: bool) -> Option<Self> {
        let mut planned = Box::new(memory.planned());
        let occupied = memory.occupied_pages();
        let all: BTreeSet<u64> =
            [MERCURY_RANGE_KEPT, MERCURY_RANGE_FREE].iter().flat_map(|kind| memory.pages_of(*kind)).collect();
        RAM.with_borrow_mut(|ram| {
            ram.first = 0;
            ram.pages.clear();
            ram.pages.extend((0..end).map(garbage));
            ram.windows.clear();
            ram.windows.extend((0..end).map(|page| all.contains(&page) && !occupied.contains(&page)));
        });
        let words = |bits: u64| usize::try_from(bits.div_ceil(64)).expect("64 bits");
        let waiting = usize::try_from(planned.plan.occupied_pages).expect("64 bits");
        let pages = planned.plan.page_count;
        let mut arrays = [vec![0; words(pages)], vec![0; words(pages)], vec![0; waiting]];
        let aside = {
            // SAFETY: plan() returns a plan whose arrays have `range_count` elements.
            unsafe { mercury_plan_aside(planned.plan()) }
        };
        let places = Places {
            // SAFETY: the copy points to the arrays of `planned`, which is kept beside it.
            plan: unsafe { planned.plan().read() },
            again,
            loaded: arrays[0].as_mut_ptr().cast(),
            empty: arrays[1].as_mut_ptr().cast(),
            loaded_count: 0,
            waiting: arrays[2].as_mut_ptr(),
            zero_frames: 0,
            reserve: 0,
            copies: Copies { first: 0, virt: ptr::null_mut() },
            zeros: Copies { first: 0, virt: ptr::null_mut() },
        };
        let free = memory.pages_of(MERCURY_RANGE_FREE);
        let unused = free.iter().filter(|page| !occupied.contains(page)).count() as u64;
        let needed =
            memory.pages_of(MERCURY_RANGE_KEPT).iter().filter(|page| occupied.contains(page)).count();
        let mut restore = Self {
            memory,
            _planned: planned,
            _arrays: arrays,
            places,
            model: BTreeMap::new(),
            empty: BTreeSet::new(),
            room: unused.saturating_sub(aside),
            waiting: BTreeSet::new(),
        };
        // SAFETY: all arrays of the places are as long as the plan says.
        let code = unsafe { mercury_places_begin(&raw mut restore.places) };
        let fits = unused >= aside + if again { needed as u64 } else { 0 };
        assert_eq!(code, if fits { Code::Ok } else { Code::RestoreRoom } as u32, "{:?}", restore.memory);
        fits.then_some(restore)
    }

    /// Loads a frame. Returns false if there is no room for it, which the model expects too.
    fn load(&mut self, frame: u64, source: Source, round: u64) -> bool {
        let word = match source {
            Source::Data => MERCURY_LOAD_DATA,
            Source::Zero => MERCURY_LOAD_ZERO,
            Source::Twin(of) => of * PAGE,
        };
        let entry = LoadEntry { frame_phys: frame * PAGE, source: word };
        let mut to = ptr::null_mut();
        // SAFETY: begin() made the places.
        let code = unsafe { mercury_places_load(&raw mut self.places, &raw const entry, &raw mut to) };
        let expected = self.expected(frame, source);
        assert_eq!(code, expected as u32, "{frame} of {source:?} in {:?}", self.memory);
        if expected != Code::Ok {
            return false;
        }
        let content = match source {
            Source::Data => data(frame, round),
            Source::Zero => [0; WORDS],
            Source::Twin(of) => self.model[&of],
        };
        assert_eq!(to.is_null(), source != Source::Data);
        if !to.is_null() {
            // SAFETY: mercury_restore_virt() returned the page, and memory has not changed since.
            unsafe { *to = content };
        }
        // SAFETY: as above.
        unsafe { mercury_places_loaded(&raw mut self.places, frame * PAGE) };
        self.model.insert(frame, content);
        true
    }

    /// Returns the code that loading this frame must have, and notes the room that it takes.
    fn expected(&mut self, frame: u64, source: Source) -> Code {
        let is_kept = self.memory.pages_of(MERCURY_RANGE_KEPT).contains(&frame);
        if !is_kept || (self.model.contains_key(&frame) && !self.places.again) {
            return Code::RestoreFrame;
        }
        if let Source::Twin(of) = source
            && (!self.model.contains_key(&of) || self.empty.contains(&of))
        {
            return Code::RestoreFrame;
        }
        let is_occupied = self.memory.occupied_pages().contains(&frame);
        if source == Source::Zero && !self.places.again {
            self.empty.insert(frame);
            self.room += u64::from(!is_occupied);
        } else if is_occupied && self.waiting.insert(frame) {
            if self.room == 0 {
                self.waiting.remove(&frame);
                return Code::RestoreRoom;
            }
            self.room -= 1;
        }
        Code::Ok
    }

    /// Compares what the driver hands back with what was loaded.
    fn check_contents(&self) {
        for frame in self.memory.pages_of(MERCURY_RANGE_KEPT) {
            // SAFETY: begin() made the places.
            let content = unsafe { mercury_places_content(&raw const self.places, frame * PAGE) };
            let known = self.model.get(&frame).filter(|_| !self.empty.contains(&frame));
            assert_eq!(content.is_null(), known.is_none(), "{frame} in {:?}", self.memory);
            if let Some(known) = known {
                // SAFETY: the page is one of the model's, and is not null.
                assert!(unsafe { *content == *known }, "{frame} in {:?}", self.memory);
            }
        }
    }

    /// Lands: the pages that the landing needs are there, and then all frames are in their destinations.
    fn land(&mut self) {
        let resume = self.memory.pages_of(MERCURY_RANGE_KEPT).first().map_or(0, |page| page * PAGE);
        // SAFETY: begin() made the places.
        let own = unsafe { [(); 3].map(|()| mercury_places_reserved(&raw mut self.places)) };
        assert!(own.iter().all(|page| *page != 0), "{:?}", self.memory);
        write(own[2], [0; WORDS]);
        let virt = 0xffff_ffff_c000_0000;
        // SAFETY: as above; the root is a page.
        let code = unsafe {
            let root = mercury_restore_virt(own[2]).cast();
            mercury_places_map(&raw mut self.places, root, 48, virt, &raw const *&[resume, resume])
        };
        assert_eq!(code, Code::Ok as u32, "{:?}", self.memory);
        let kept = self.memory.pages_of(MERCURY_RANGE_KEPT);
        let tables: Vec<(u64, Page)> = self.reserve_pages(&own).map(|phys| (phys, page(phys))).collect();
        // SAFETY: as above.
        let mut list = unsafe { mercury_places_finish(&raw mut self.places) };
        self.check_untouched();
        while list != 0 {
            let words = page(list);
            assert!(!kept.contains(&(list / PAGE)), "a list in a destination");
            for copy in words[2..].chunks(2).take(usize::try_from(words[1]).expect("64 bits")) {
                write(copy[0], if copy[1] == 0 { [0; WORDS] } else { page(copy[1]) });
            }
            assert!(words[1] <= LANDING_LIST_MAX as u64);
            list = words[0];
        }
        for (frame, content) in &self.model {
            assert!(page(frame * PAGE) == *content, "frame {frame} of {:?}", self.memory);
        }
        assert_eq!(self.model.len(), kept.len());
        assert_eq!(self.places.loaded_count, kept.len() as u64);
        assert!(tables.iter().all(|(phys, content)| page(*phys) == *content), "a table was written over");
    }

    /// The tables of the landing, from the root in `own` on.
    fn reserve_pages(&self, own: &[u64]) -> impl Iterator<Item = u64> {
        let mut tables = vec![own[2]];
        let mut levels = vec![(own[2], 4)];
        while let Some((table, level)) = levels.pop() {
            for entry in page(table).into_iter().filter(|entry| entry & 1 != 0 && entry & 0x80 == 0) {
                if level > 0 {
                    tables.push(entry & 0x000f_ffff_ffff_f000);
                    levels.push((entry & 0x000f_ffff_ffff_f000, level - 1));
                }
            }
        }
        tables.into_iter()
    }

    /// Before the landing nothing that this kernel occupies has changed, nor memory that is not the image's.
    fn check_untouched(&self) {
        RAM.with_borrow(|ram| {
            for (at, content) in ram.pages.iter().enumerate().filter(|(at, _)| !ram.windows[*at]) {
                assert!(*content == garbage(at as u64), "page {at} of {:?}", self.memory);
            }
        });
    }
}

/// Walks the tables of a landing: pages by their address, and the size of each.
fn mapped(root: u64, top: i32) -> BTreeMap<u64, (u64, u64)> {
    let mut found = BTreeMap::new();
    let mut tables = vec![(root, top, 0)];
    while let Some((table, shift, virt)) = tables.pop() {
        for (number, entry) in (0..).zip(page(table)).filter(|(_, entry)| entry & 1 != 0) {
            let (at, phys) = (virt | number << shift, entry & 0x000f_ffff_ffff_f000);
            if shift == 12 || entry & 0x80 != 0 {
                assert_eq!(entry & 0xfff & !0x80, 0x63);
                assert!(shift == 12 || shift == 21);
                found.insert(at, (phys, 1 << shift));
            } else {
                assert_eq!(entry & 0xfff, 0x23);
                tables.push((phys, shift - 9, at));
            }
        }
    }
    found
}

/// Maps memory with this many pages for tables, far above all memory. Returns the code and the mapping.
fn map(memory: &Memory, room: u64, top: i32, virt: u64, text: [u64; 2]) -> (u32, BTreeMap<u64, (u64, u64)>) {
    const FIRST: u64 = 1 << 34;
    let mut planned = memory.planned();
    let count = usize::try_from(room + 1).expect("64 bits");
    RAM.with_borrow_mut(|ram| {
        *ram = Ram { first: FIRST, pages: vec![[0xff; WORDS]; count], windows: vec![true; count] };
        ram.pages[0] = [0; WORDS];
        // Each page that is set aside holds the address of the next.
        for at in 1..count {
            ram.pages[at][0] = if at + 1 < count { (FIRST + at as u64 + 1) * PAGE } else { 0 };
        }
    });
    let mut places = Places {
        // SAFETY: the copy points to the arrays of `planned`, which outlives it.
        plan: unsafe { planned.plan().read() },
        again: false,
        loaded: ptr::null_mut(),
        empty: ptr::null_mut(),
        loaded_count: 0,
        waiting: ptr::null_mut(),
        zero_frames: 0,
        reserve: if room == 0 { 0 } else { (FIRST + 1) * PAGE },
        copies: Copies { first: 0, virt: ptr::null_mut() },
        zeros: Copies { first: 0, virt: ptr::null_mut() },
    };
    // SAFETY: the root is a page, and mapping uses the plan and the reserve only.
    let code = unsafe {
        let root = mercury_restore_virt(FIRST * PAGE).cast();
        mercury_places_map(&raw mut places, root, top, virt, &raw const text)
    };
    (code, mapped(FIRST * PAGE, top))
}

/// The pages at which the mapping leads from an address to the same address.
fn identity(mapped: &BTreeMap<u64, (u64, u64)>) -> BTreeSet<u64> {
    let same = mapped.iter().filter(|(virt, _)| **virt < 1 << 47);
    same.flat_map(|(virt, (phys, size))| {
        assert_eq!(virt, phys);
        virt / PAGE..(virt + size) / PAGE
    })
    .collect()
}

fn all_pages(memory: &Memory) -> BTreeSet<u64> {
    [MERCURY_RANGE_KEPT, MERCURY_RANGE_FREE].iter().flat_map(|kind| memory.pages_of(*kind)).collect()
}

const TEXT: u64 = 0xffff_ffff_c123_4000;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn enough_is_set_aside_to_map_all_memory_and_no_more(
        memory in memory(3000, 400_000),
        five in any::<bool>(),
    ) {
        let mut planned = memory.planned();
        // SAFETY: plan() returns a plan whose arrays have `range_count` elements.
        let aside = unsafe { mercury_plan_aside(planned.plan()) };
        let lists = 2 * planned.plan.occupied_pages.div_ceil(LANDING_LIST_MAX as u64);
        // Without the lists, the landing, its code and the root.
        let top = if five { 48 } else { 39 };
        let (code, mapped) = map(&memory, aside - lists - 3, top, TEXT + 5, [PAGE, 2 * PAGE]);
        prop_assert_eq!(code, Code::Ok as u32);
        let all = all_pages(&memory);
        prop_assert!(identity(&mapped) == all);
        // A large page wherever there can be one.
        for (virt, (_, size)) in mapped.iter().filter(|(virt, _)| **virt < 1 << 47) {
            let first = virt / PAGE / LARGE * LARGE;
            prop_assert_eq!(*size != PAGE, (first..first + LARGE).all(|page| all.contains(&page)));
        }
        let top = if five { u64::MAX << 57 } else { u64::MAX << 48 };
        let text = [0, PAGE].map(|by| (TEXT + by) & !top);
        prop_assert_eq!(mapped.get(&text[0]), Some(&(PAGE, PAGE)));
        prop_assert_eq!(mapped.get(&text[1]), Some(&(2 * PAGE, PAGE)));
    }

    #[test]
    fn a_machine_lands_with_the_content_that_was_loaded(
        memory in memory(20, 4),
        again in any::<bool>(),
        loads in
            prop::collection::vec((any::<prop::sample::Index>(), 0..4, any::<prop::sample::Index>()), 0..60),
    ) {
        let (memory, end) = with_tail(memory, 60);
        let kept = memory.pages_of(MERCURY_RANGE_KEPT);
        prop_assume!(!kept.is_empty());
        let Some(mut restore) = Restore::begin(memory, end, again) else { return Ok(()) };
        for (round, (which, how, of)) in (1..).zip(loads) {
            let source = match how {
                0 => Source::Zero,
                1 => Source::Twin(kept[of.index(kept.len())]),
                _ => Source::Data,
            };
            restore.load(kept[which.index(kept.len())], source, round);
        }
        restore.check_contents();
        let is_complete = kept.iter().all(|frame| {
            restore.model.contains_key(frame) || restore.load(*frame, Source::Data, 0)
        });
        restore.check_contents();
        if is_complete {
            restore.land();
        } else {
            restore.check_untouched();
        }
    }
}

/// Adds so many free pages after all memory. Returns the end of memory as well.
fn with_tail(mut memory: Memory, pages: u64) -> (Memory, u64) {
    let end = memory.ranges.last().map_or(1, |range| range.start_phys / PAGE + range.pages);
    let occupied = memory.occupied_pages().last().map_or(0, |page| page + 1);
    let first = end.max(occupied);
    if pages > 0 {
        memory.ranges.push(RestartRange { start_phys: first * PAGE, pages, kind: MERCURY_RANGE_FREE });
    }
    (memory, first + pages)
}

/// All restores of a few frames: where each lies, what it is loaded with, in which order, and with how much
/// room.
mod exhaustive {
    use super::*;

    const FRAMES: u64 = 4;
    /// Not in the image, free, or kept and loaded with data, zeros or a twin.
    const STATES: u64 = 5;

    fn memory_of(mut number: u64) -> (Memory, Vec<(u64, u64)>) {
        let mut memory = Memory { ranges: Vec::new(), occupied: Vec::new() };
        let mut kept = Vec::new();
        for frame in 1..=FRAMES {
            let (state, is_occupied) = (number % STATES, number / STATES % 2 == 1);
            number /= 2 * STATES;
            let kind = if state == 1 { MERCURY_RANGE_FREE } else { MERCURY_RANGE_KEPT };
            if state > 0 {
                memory.ranges.push(RestartRange { start_phys: frame * PAGE, pages: 1, kind });
            }
            if state > 1 {
                kept.push((frame, state));
            }
            if is_occupied {
                memory.occupied.push((frame * PAGE, (frame + 1) * PAGE));
            }
        }
        (memory, kept)
    }

    /// Restores the machine. Twins are those of the frame that was loaded before.
    fn restore(memory: Memory, kept: &[(u64, u64)], tail: u64, again: bool) {
        let (memory, end) = with_tail(memory, tail);
        let Some(mut restore) = Restore::begin(memory, end, again) else { return };
        let mut before = kept.last().map_or(0, |(frame, _)| *frame);
        let mut is_complete = true;
        for (frame, state) in kept {
            let source =
                [Source::Data, Source::Zero, Source::Twin(before)][usize::try_from(state - 2).expect("few")];
            is_complete &= restore.load(*frame, source, 1) || restore.load(*frame, Source::Data, 2);
            before = *frame;
        }
        if again && is_complete {
            // A second round exchanges zeros and data.
            for (frame, state) in kept {
                let source = if *state == 2 { Source::Zero } else { Source::Data };
                is_complete &= restore.load(*frame, source, 3);
            }
            assert!(is_complete, "{:?}", restore.memory);
        }
        restore.check_contents();
        if is_complete && !kept.is_empty() {
            restore.land();
        } else {
            restore.check_untouched();
        }
    }

    #[test]
    fn every_restore_of_a_few_frames() {
        // All restores need as many pages aside, but for two per stretch of memory.
        const ASIDE: u64 = 2 + 16 + 2;
        for number in 0..(2 * STATES).pow(u32::try_from(FRAMES).expect("a few")) {
            for (again, tail) in [false, true]
                .into_iter()
                .flat_map(|again| (ASIDE - 1..ASIDE + 6).map(move |tail| (again, tail)))
            {
                let (memory, mut kept) = memory_of(number);
                restore(memory.clone(), &kept, tail, again);
                kept.reverse();
                restore(memory, &kept, tail, again);
            }
        }
    }
}

#[test]
fn the_layout_is_that_of_c() {
    // SAFETY: both are constants.
    let found = unsafe { (mercury_host_places_size, mercury_host_places_zeros) };
    assert_eq!(found, (size_of::<Places>(), offset_of!(Places, zeros)));
}

#[test]
fn a_frame_of_zeros_is_no_twin() {
    let ranges = [1, 2].map(|at| RestartRange { start_phys: at * PAGE, pages: 1, kind: MERCURY_RANGE_KEPT });
    let (memory, end) = with_tail(Memory { ranges: ranges.to_vec(), occupied: Vec::new() }, 30);
    let mut restore = Restore::begin(memory, end, false).expect("room");
    assert!(restore.load(1, Source::Zero, 1));
    // The frame may hold a link to another frame of zeros, or a frame that waits.
    assert!(!restore.load(2, Source::Twin(1), 1));
    assert!(restore.load(2, Source::Data, 1));
    restore.land();
}

#[test]
fn tables_without_room_are_refused() {
    let ranges = [RestartRange { start_phys: 3 << 21, pages: 1, kind: MERCURY_RANGE_KEPT }];
    let memory = Memory { ranges: ranges.to_vec(), occupied: Vec::new() };
    // Three tables for the page, and three for the text.
    for room in 0..8 {
        let (code, _) = map(&memory, room, 39, TEXT, [PAGE, 2 * PAGE]);
        assert_eq!(code == Code::Ok as u32, room >= 6, "{room}");
    }
}
