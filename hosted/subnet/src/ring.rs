//! A ring of frames in shared memory: a writer and a reader, in processes that do not trust each other.
//!
//! | from | content | written by |
//! |---|---|---|
//! | 0 | head: bytes that the writer has written since the ring was made | the writer |
//! | 64 | tail: bytes that the reader has read | the reader |
//! | 72 | awake: 0 if the writer has to wake the reader | both |
//! | 76 | waiting: 1 if the reader has to wake the writer when there is room | both |
//! | 128 | records, again and again from the front | the writer |
//!
//! A record is a frame: its length (4 bytes), its [`Offload`] (10), two bytes of nothing, and its bytes. All
//! records begin at multiples of 16. A frame lies in one piece: if the rest of the ring is too short, the
//! length `SKIP` says that the next record is at the front. A writer that finds the ring empty begins at
//! the front sooner. So little traffic uses few pages of memory.
//!
//! The reader keeps its own position, and reads each record's beginning once. If a head, a length or an
//! offload cannot be right, the reader drops what is in the ring and goes on at the head. The writer keeps
//! its own position, and takes a tail that cannot be right for a full ring. So the other process can lose
//! frames of this one ring, and nothing else.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use vm_memory::VolatileSlice;

use crate::{memory::Memory, offload::Offload};

/// Size of a ring in memory, in bytes.
pub const SIZE: usize = 256 << 10;
/// The longest frame: the longest packet of IP, after Ethernet's addresses.
pub const LONGEST: usize = 65535 + 14;
/// The shortest frame: its addresses and its type.
pub const SHORTEST: usize = 14;

const HEAD: usize = 0;
const TAIL: usize = 64;
const AWAKE: usize = 72;
const WAITING: usize = 76;
const RECORDS: usize = 128;
/// Bytes of records.
const CAPACITY: u64 = (SIZE - RECORDS) as u64;
/// The beginning of a record, and the boundary that records begin at.
const UNIT: u64 = 16;
/// In place of a length: the next record is at the front.
const SKIP: u32 = u32::MAX;
/// A writer that finds the ring empty begins at the front with a small record after [`NEAR`] bytes, and with
/// a large one after half of the ring. The bytes before that are all that it may use until the reader
/// follows.
const SMALL: u64 = 2048;
const NEAR: u64 = 16 << 10;
/// A reader wakes a waiting writer when so little is left to read that each frame has room, even after the
/// longest skip.
const ROOM_FROM: u64 = CAPACITY - 2 * record(LONGEST);

const _: () = assert!(CAPACITY.is_multiple_of(UNIT) && CAPACITY > 3 * record(LONGEST));

/// The memory of a ring: [`SIZE`] bytes of mapped memory.
#[derive(Clone, Debug)]
pub struct Ring {
    memory: Arc<Memory>,
    at: usize,
}

impl Ring {
    /// Returns the ring at an offset of the memory. `None` if the memory ends before the ring's end, or the
    /// offset is no multiple of 64.
    #[must_use]
    pub fn new(memory: &Arc<Memory>, at: usize) -> Option<Self> {
        let fits = memory.all().subslice(at, SIZE).is_ok() && at.is_multiple_of(64);
        fits.then(|| Self { memory: Arc::clone(memory), at })
    }

    fn head(&self) -> &AtomicU64 {
        self.memory.number(self.at + HEAD)
    }

    fn tail(&self) -> &AtomicU64 {
        self.memory.number(self.at + TAIL)
    }

    fn awake(&self) -> &AtomicU32 {
        self.memory.number(self.at + AWAKE)
    }

    fn waiting(&self) -> &AtomicU32 {
        self.memory.number(self.at + WAITING)
    }

    /// Empties the ring of a reader that has gone, for the next one.
    pub(crate) fn clear(&self) {
        self.tail().store(self.head().load(Ordering::Acquire) & !(UNIT - 1), Ordering::Release);
        self.awake().store(0, Ordering::Relaxed);
        self.waiting().store(0, Ordering::Relaxed);
    }

    /// Returns a half of a record's beginning.
    fn word(&self, offset: u64, half: usize) -> &AtomicU64 {
        self.memory.number(self.at + RECORDS + offset as usize + 8 * half)
    }

    /// Returns the bytes of a frame whose record is at an offset. The caller has checked the range.
    fn bytes(&self, offset: u64, length: usize) -> Option<VolatileSlice<'_>> {
        let start = self.at + RECORDS + (offset + UNIT) as usize;
        self.memory.all().subslice(start, length).ok()
    }
}

/// Returns the bytes that a frame takes in a ring.
const fn record(length: usize) -> u64 {
    UNIT + (length as u64).next_multiple_of(UNIT)
}

/// The result of writing a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The frame is in the ring. If the reader sleeps, the writer has to wake it.
    Done { wake: bool },
    /// There is no room.
    Full,
}

/// The writing end of a ring.
#[derive(Debug)]
pub struct Writer {
    ring: Ring,
    head: u64,
}

impl Writer {
    /// Goes on where the ring's last writer has ended.
    #[must_use]
    pub fn new(ring: Ring) -> Self {
        let head = ring.head().load(Ordering::Acquire) & !(UNIT - 1);
        // The last writer may have ended before it woke the reader.
        ring.awake().store(0, Ordering::Relaxed);
        Self { ring, head }
    }

    /// Writes a frame. `fill` gets the place for the bytes of it.
    pub fn write(
        &mut self,
        length: usize,
        offload: Offload,
        fill: impl FnOnce(&VolatileSlice<'_>),
    ) -> Written {
        if !(SHORTEST..=LONGEST).contains(&length) {
            return Written::Done { wake: false };
        }
        let Some((skip, offset)) = self.place(record(length)) else { return Written::Full };
        let Some(bytes) = self.ring.bytes(offset, length) else { return Written::Full };
        fill(&bytes);
        if skip > 0 {
            let here = self.head % CAPACITY;
            self.ring.word(here, 0).store(SKIP.into(), Ordering::Relaxed);
        }
        let [low, high] = begin(length, offload);
        self.ring.word(offset, 0).store(low, Ordering::Relaxed);
        self.ring.word(offset, 1).store(high, Ordering::Relaxed);
        self.head = self.head.wrapping_add(skip + record(length));
        self.ring.head().store(self.head, Ordering::Release);
        fence(Ordering::SeqCst);
        let awake = self.ring.awake();
        Written::Done { wake: awake.load(Ordering::Relaxed) == 0 && awake.swap(1, Ordering::Relaxed) == 0 }
    }

    /// Returns the bytes to skip and the offset of a record after that, if there is room for the record.
    fn place(&self, needed: u64) -> Option<(u64, u64)> {
        let used = self.used()?;
        let here = self.head % CAPACITY;
        let to_end = CAPACITY - here;
        let fronts =
            needed > to_end || used == 0 && here >= if needed <= SMALL { NEAR } else { CAPACITY / 2 };
        let (skip, offset) = if fronts { (to_end, 0) } else { (0, here) };
        (used + skip + needed <= CAPACITY).then_some((skip, offset))
    }

    /// Returns the bytes that are not read yet. `None` if the reader's position cannot be right.
    fn used(&self) -> Option<u64> {
        let used = self.head.wrapping_sub(self.ring.tail().load(Ordering::Acquire));
        (used <= CAPACITY && used.is_multiple_of(UNIT)).then_some(used)
    }

    /// Asks the reader to wake this writer when there is room. Returns false if there is room already.
    pub fn wait(&self) -> bool {
        self.ring.waiting().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let has_room = self.has_room();
        if has_room {
            self.ring.waiting().store(0, Ordering::Relaxed);
        }
        !has_room
    }

    /// Returns true if each frame has room.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.used().is_some_and(|used| used <= ROOM_FROM)
    }
}

/// Returns a record's beginning.
fn begin(length: usize, offload: Offload) -> [u64; 2] {
    let mut bytes = [0; UNIT as usize];
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[4..14].copy_from_slice(&offload.to_bytes());
    halves(bytes)
}

fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let both = u128::from_le_bytes(bytes);
    [both as u64, (both >> 64) as u64]
}

/// A frame in a ring. The writer may change the bytes at any time, but not what is said of them here.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    pub bytes: VolatileSlice<'a>,
    pub offload: Offload,
}

/// A record whose beginning was read and checked.
#[derive(Clone, Copy, Debug)]
struct Record {
    offset: u64,
    length: usize,
    offload: Offload,
}

/// The reading end of a ring.
#[derive(Debug)]
pub struct Reader {
    ring: Ring,
    tail: u64,
    current: Option<Record>,
    damaged: u64,
}

impl Reader {
    /// Goes on where the ring's last reader has ended.
    #[must_use]
    pub fn new(ring: Ring) -> Self {
        let tail = ring.tail().load(Ordering::Acquire) & !(UNIT - 1);
        Self { ring, tail, current: None, damaged: 0 }
    }

    /// Returns the next frame, which stays the next one until [`Self::release`].
    pub fn front(&mut self) -> Option<Frame<'_>> {
        if self.current.is_none() {
            self.current = self.find();
        }
        let Record { offset, length, offload } = self.current?;
        Some(Frame { bytes: self.ring.bytes(offset, length)?, offload })
    }

    /// Finds the next record. A writer that skips again and again is one that has gone wrong.
    fn find(&mut self) -> Option<Record> {
        let head = self.ring.head().load(Ordering::Acquire);
        for _ in 0..2 {
            let ready = head.wrapping_sub(self.tail);
            if ready == 0 {
                return None;
            }
            let offset = self.tail % CAPACITY;
            let to_end = CAPACITY - offset;
            if ready > CAPACITY || !ready.is_multiple_of(UNIT) {
                break;
            }
            let word = self.ring.word(offset, 0).load(Ordering::Relaxed);
            if word as u32 == SKIP {
                if to_end > ready {
                    break;
                }
                self.advance(to_end);
                continue;
            }
            let length = word as u32 as usize;
            let is_frame = (SHORTEST..=LONGEST).contains(&length) && record(length) <= ready.min(to_end);
            let offload = self.offload(offset, word).checked(length);
            let (true, Some(offload)) = (is_frame, offload) else { break };
            return Some(Record { offset, length, offload });
        }
        self.damaged += 1;
        self.drop_all(head);
        None
    }

    fn offload(&self, offset: u64, low: u64) -> Offload {
        let high = self.ring.word(offset, 1).load(Ordering::Relaxed);
        let both = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
        let mut bytes = [0; Offload::SIZE];
        bytes.copy_from_slice(&both[4..14]);
        Offload::from_bytes(bytes)
    }

    /// Gives up what is in the ring.
    fn drop_all(&mut self, head: u64) {
        self.current = None;
        self.tail = head & !(UNIT - 1);
        self.ring.tail().store(self.tail, Ordering::Release);
    }

    fn advance(&mut self, bytes: u64) {
        self.tail = self.tail.wrapping_add(bytes);
        self.ring.tail().store(self.tail, Ordering::Release);
    }

    /// Drops the next frame, which was read. Returns true if the writer waits and has to be woken.
    pub fn release(&mut self) -> bool {
        let Some(found) = self.current.take() else { return false };
        self.advance(record(found.length));
        fence(Ordering::SeqCst);
        let waiting = self.ring.waiting();
        if waiting.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let left = self.ring.head().load(Ordering::Relaxed).wrapping_sub(self.tail);
        left <= ROOM_FROM && waiting.swap(0, Ordering::Relaxed) != 0
    }

    /// Asks the writer to wake this reader at the next frame. Returns false if there is a frame already.
    pub fn sleep(&mut self) -> bool {
        let awake = self.ring.awake();
        if awake.load(Ordering::Relaxed) != 0 {
            awake.store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let is_empty = self.current.is_none() && self.ring.head().load(Ordering::Relaxed) == self.tail;
        if !is_empty {
            self.ring.awake().store(1, Ordering::Relaxed);
        }
        is_empty
    }

    /// Returns how often the writer has written what cannot be right.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        self.damaged
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{collections::VecDeque, sync::mpsc, thread, time::Duration};

    use proptest::prelude::*;
    use vm_memory::Bytes;

    use super::*;
    use crate::memory::{Access, make_file};

    fn ring() -> Ring {
        let file = make_file("mercury-test-ring", SIZE as u64).unwrap();
        Ring::new(&Arc::new(Memory::map(&file, 0, SIZE, Access::Write).unwrap()), 0).unwrap()
    }

    fn frame(length: usize, seed: u64) -> Vec<u8> {
        (0..length).map(|at| (at as u64 * 7 + seed * 13) as u8).collect()
    }

    fn write(writer: &mut Writer, bytes: &[u8]) -> Written {
        writer.write(bytes.len(), Offload::default(), |to| to.write_slice(bytes, 0).unwrap())
    }

    fn read(reader: &mut Reader) -> Option<Vec<u8>> {
        let found = reader.front()?;
        let mut bytes = vec![0; found.bytes.len()];
        found.bytes.read_slice(&mut bytes, 0).unwrap();
        Some(bytes)
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(usize),
        Read,
        Peek,
        Sleep,
        Wait,
        NewWriter,
        NewReader,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (SHORTEST..=LONGEST).prop_map(Step::Write),
            4 => (SHORTEST..200_usize).prop_map(Step::Write),
            8 => Just(Step::Read),
            2 => Just(Step::Peek),
            2 => Just(Step::Sleep),
            2 => Just(Step::Wait),
            1 => Just(Step::NewWriter),
            1 => Just(Step::NewReader),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

        /// Compares a ring with a queue, step by step: order, bytes, and each wake that is owed.
        #[test]
        fn a_ring_is_a_queue(steps in proptest::collection::vec(step(), 1..150)) {
            let ring = ring();
            let (mut writer, mut reader) = (Writer::new(ring.clone()), Reader::new(ring.clone()));
            let mut model: VecDeque<Vec<u8>> = VecDeque::new();
            let (mut sleeps, mut waits) = (true, false);
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Write(length) => {
                        let bytes = frame(length, number as u64);
                        match write(&mut writer, &bytes) {
                            Written::Full => {
                                let queued: u64 = model.iter().map(|one| record(one.len())).sum();
                                // After a skip to the front these bytes at least may be used.
                                prop_assert!(queued + 2 * record(length) > NEAR);
                                prop_assert!(!model.is_empty());
                            }
                            Written::Done { wake } => {
                                prop_assert_eq!(wake, sleeps);
                                sleeps = false;
                                model.push_back(bytes);
                            }
                        }
                    }
                    Step::Read => {
                        prop_assert_eq!(read(&mut reader), model.pop_front());
                        if reader.release() {
                            prop_assert!(waits && writer.has_room());
                            waits = false;
                        }
                        prop_assert!(!waits || !writer.has_room());
                    }
                    Step::Peek => prop_assert_eq!(read(&mut reader), model.front().cloned()),
                    Step::Sleep => {
                        let slept = reader.sleep();
                        prop_assert_eq!(slept, model.is_empty());
                        sleeps = slept;
                    }
                    Step::Wait => waits = writer.wait(),
                    Step::NewWriter => {
                        writer = Writer::new(ring.clone());
                        sleeps = true;
                    }
                    Step::NewReader => reader = Reader::new(ring.clone()),
                }
                prop_assert_eq!(reader.damaged(), 0);
            }
        }

        /// Follows arbitrary bytes with either end.
        #[test]
        fn no_other_end_makes_one_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            crate::fuzz::run(&bytes);
        }
    }

    #[test]
    fn seeds_of_the_fuzz_target_are_sound() {
        crate::fuzz::SEEDS.iter().for_each(|seed| crate::fuzz::run(seed));
    }

    /// Two threads wake each other only as the ring says. A lost wake ends the test by its time limit.
    #[test]
    fn no_wake_is_lost_between_two_threads() {
        const FRAMES: u64 = 60_000;
        const LIMIT: Duration = Duration::from_secs(20);
        let ring = ring();
        let (mut writer, mut reader) = (Writer::new(ring.clone()), Reader::new(ring));
        let (to_reader, reader_bell) = mpsc::channel();
        let (to_writer, writer_bell) = mpsc::channel();
        let length = |number: u64| match number % 7 {
            0 => LONGEST - (number % 1000) as usize,
            _ => SHORTEST + (number * 97 % 3000) as usize,
        };
        let writing = thread::spawn(move || {
            for number in 0..FRAMES {
                let bytes = frame(length(number), number);
                loop {
                    match write(&mut writer, &bytes) {
                        Written::Done { wake } => {
                            if wake {
                                to_reader.send(()).unwrap();
                            }
                            break;
                        }
                        Written::Full if writer.wait() => writer_bell.recv_timeout(LIMIT).unwrap(),
                        Written::Full => {}
                    }
                }
            }
            // A late wake of the reader finds the receiver there.
            writer_bell
        });
        let mut number = 0;
        while number < FRAMES {
            let Some(bytes) = read(&mut reader) else {
                if reader.sleep() {
                    reader_bell.recv_timeout(LIMIT).unwrap();
                }
                continue;
            };
            assert!(bytes == frame(length(number), number), "frame {number}");
            number += 1;
            if reader.release() {
                to_writer.send(()).unwrap();
            }
        }
        drop(writing.join().unwrap());
        assert_eq!(reader.damaged(), 0);
    }

    #[test]
    fn a_writer_that_dies_within_a_frame_leaves_only_whole_ones() {
        let ring = ring();
        let (mut writer, mut reader) = (Writer::new(ring.clone()), Reader::new(ring.clone()));
        write(&mut writer, &frame(100, 1));
        // The bytes of the second one are there, and its record, but not the head.
        ring.bytes(writer.head, 100).unwrap().write_slice(&frame(100, 2), 0).unwrap();
        ring.word(writer.head, 0).store(100, Ordering::Relaxed);
        drop(writer);
        let mut next = Writer::new(ring);
        write(&mut next, &frame(50, 3));
        assert_eq!(read(&mut reader), Some(frame(100, 1)));
        reader.release();
        assert_eq!(read(&mut reader), Some(frame(50, 3)));
        reader.release();
        assert!(read(&mut reader).is_none() && reader.damaged() == 0);
    }

    #[test]
    fn a_writer_that_writes_nonsense_loses_its_own_frames_only() {
        let ring = ring();
        let (mut writer, mut reader) = (Writer::new(ring.clone()), Reader::new(ring.clone()));
        write(&mut writer, &frame(100, 1));
        for (word, head) in [
            // Too short, too long, longer than what is there, a skip over more than is there, a head far off.
            (13, 128),
            (LONGEST as u64 + 1, 128),
            (200, 128),
            (SKIP.into(), 128),
            (100, u64::MAX),
            (100, CAPACITY + 16),
            (100, 8),
        ] {
            let before = reader.damaged();
            ring.tail().store(0, Ordering::Relaxed);
            (reader.tail, reader.current) = (0, None);
            ring.word(0, 0).store(word, Ordering::Relaxed);
            ring.head().store(head, Ordering::Relaxed);
            assert!(read(&mut reader).is_none(), "{word:x} {head:x}");
            assert_eq!(reader.damaged(), before + 1, "{word:x} {head:x}");
            let mut next = Writer::new(ring.clone());
            write(&mut next, &frame(70, 2));
            assert_eq!(read(&mut reader), Some(frame(70, 2)), "{word:x} {head:x}");
            reader.release();
        }
    }

    #[test]
    fn a_reader_that_lies_stops_its_own_writer_only() {
        let ring = ring();
        let mut writer = Writer::new(ring.clone());
        for tail in [1, 16, u64::MAX, 1 << 40] {
            ring.tail().store(tail, Ordering::Relaxed);
            assert_eq!(write(&mut writer, &frame(60, 1)), Written::Full, "{tail:x}");
            assert!(!writer.has_room());
        }
        ring.tail().store(0, Ordering::Relaxed);
        assert_eq!(write(&mut writer, &frame(60, 1)), Written::Done { wake: true });
    }

    /// Little traffic stays in the first pages.
    #[test]
    fn an_empty_ring_begins_at_the_front() {
        let ring = ring();
        let (mut writer, mut reader) = (Writer::new(ring.clone()), Reader::new(ring.clone()));
        for number in 0..20_000 {
            write(&mut writer, &frame(60 + number % 1400, number as u64));
            assert_eq!(read(&mut reader), Some(frame(60 + number % 1400, number as u64)));
            reader.release();
        }
        const FIRST: usize = 5 * 4096;
        let mut bytes = vec![0; SIZE - FIRST];
        ring.memory.all().read_slice(&mut bytes, FIRST).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
    }
}
