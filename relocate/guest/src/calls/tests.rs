use super::*;
use mercury_abi::snapshot::MAP_BITS;
use proptest::prelude::*;
use std::{
    sync::{Arc, atomic::AtomicBool, atomic::Ordering},
    thread,
};
use vm_memory::GuestAddress;

/// Distance between virtual and physical addresses of the guest.
const VIRT: u64 = 0xFFFF_8880_0000_0000;
const PIECE: u64 = MAP_BITS as u64 / 8;
/// Places in the guest's memory: an argument, lists of pieces, pieces, and what is read.
const ARGUMENT: u64 = 0x1000;
const LISTS: [u64; 3] = [0x2000, 0x3000, 0x4000];
const PIECES: [u64; 3] = [0x10_0000, 0x10_0000 + PIECE, 0x10_0000 + 2 * PIECE];
const TO: u64 = 0x8000;
const END: u64 = 0x40_0000;
/// A second region of memory, whose first page is not the first of a word of a map.
const SECOND: u64 = 0x1_0000_3000;

/// A log in which a test puts pages.
#[derive(Default)]
struct Fake {
    is_on: AtomicBool,
    written: Mutex<Vec<(u32, usize)>>,
}

impl WriteLog for Arc<Fake> {
    fn switch(&self, is_on: bool) -> io::Result<()> {
        self.is_on.store(is_on, Ordering::SeqCst);
        Ok(())
    }

    fn take(&self, slot: u32, bytes: usize) -> io::Result<Vec<u64>> {
        assert!(self.is_on.load(Ordering::SeqCst), "a log that was not begun");
        let mut bits = vec![0; bytes.div_ceil(PAGE_BYTES as usize * 64)];
        self.written.lock().unwrap().retain(|&(in_slot, page)| {
            if in_slot == slot {
                bits[page / 64] |= 1 << (page % 64);
            }
            in_slot != slot
        });
        Ok(bits)
    }
}

struct Guest {
    calls: Calls,
    log: Arc<Fake>,
}

fn translate(virt: u64) -> Option<u64> {
    virt.checked_sub(VIRT)
}

impl Guest {
    fn new() -> Self {
        let view =
            View::from_ranges(&[(GuestAddress(0), END as usize), (GuestAddress(SECOND), 0x10_0000)]).unwrap();
        let log = Arc::new(Fake::default());
        let guest = Self { calls: Calls::new(view, Box::new(Arc::clone(&log))).unwrap(), log };
        // Each map has its second piece only where the second region lies.
        for (list, piece) in LISTS.into_iter().zip(PIECES) {
            guest.put(list, &[VIRT + piece, VIRT + piece]);
        }
        guest
    }

    fn put(&self, at: u64, words: &[u64]) {
        for (number, word) in (0..).zip(words) {
            write(&self.calls.view, at + number * 8, &word.to_le_bytes()).unwrap();
        }
    }

    fn at(&self, at: u64) -> u64 {
        self.calls.get(at).unwrap()
    }

    fn call(&self, call: SnapshotCall) -> Code {
        self.calls.call(call as u16, (ARGUMENT / PAGE_BYTES) as u32, &translate)
    }

    fn set(&self, offset: usize, value: u64) {
        self.put(ARGUMENT + offset as u64, &[value]);
    }

    fn begin(&self, cpus: u64) -> Code {
        write(&self.calls.view, ARGUMENT, &[0; size_of::<SnapshotSetup>()]).unwrap();
        self.set(offset_of!(SnapshotSetup, free_virt), VIRT + LISTS[0]);
        self.set(offset_of!(SnapshotSetup, free_count), 1);
        self.set(offset_of!(SnapshotSetup, cpus), cpus);
        self.call(SnapshotCall::Begin)
    }

    fn begin_log(&self) -> Code {
        self.set(offset_of!(LogSetup, written_virt), VIRT + LISTS[1]);
        self.set(offset_of!(LogSetup, collected_virt), VIRT + LISTS[2]);
        self.set(offset_of!(LogSetup, map_count), 2);
        self.call(SnapshotCall::LogBegin)
    }

    fn collect(&self) -> u64 {
        self.put(ARGUMENT, &[0, 0]);
        assert_eq!(self.call(SnapshotCall::LogCollect), Code::Ok);
        assert_eq!(self.at(ARGUMENT), u64::MAX);
        self.at(ARGUMENT + offset_of!(LogCollect, pages) as u64)
    }

    fn read(&self, frames: &[u64]) -> Code {
        self.put(ARGUMENT, &[frames.len() as u64, u64::MAX]);
        for (number, frame) in (0..).zip(frames) {
            let entry = ARGUMENT + offset_of!(ReadList, entries) as u64 + number * 16;
            self.put(entry, &[*frame, TO + number * PAGE_BYTES]);
        }
        self.call(SnapshotCall::Read)
    }
}

#[test]
fn frames_are_read_as_they_were_when_all_processors_had_come() {
    let guest = Guest::new();
    // Page 0x30 is free.
    guest.put(PIECES[0], &[1 << 0x30]);
    guest.put(0x20_0000, &[1]);
    guest.put(0x3_0000, &[2]);
    guest.put(SECOND + 0x1000, &[3]);
    assert_eq!((guest.begin(2), guest.read(&[0x20_0000])), (Code::Ok, Code::NoSnapshot));
    thread::scope(|scope| {
        let first = scope.spawn(|| guest.call(SnapshotCall::Enter));
        thread::sleep(Duration::from_millis(50));
        assert!(!first.is_finished(), "a processor that waited for no other");
        // Until the last processor has come.
        guest.put(0x20_0000, &[4]);
        assert_eq!(guest.call(SnapshotCall::Enter), Code::Ok);
        assert_eq!(first.join().unwrap(), Code::Ok);
    });
    guest.put(0x20_0000, &[5]);
    guest.put(SECOND + 0x1000, &[6]);
    assert_eq!(guest.read(&[0x20_0000, 0x3_0000, SECOND + 0x1000]), Code::Ok);
    let read: Vec<u64> = (0..3).map(|number| guest.at(TO + number * PAGE_BYTES)).collect();
    assert_eq!((read, guest.at(ARGUMENT + offset_of!(ReadList, read_before) as u64)), (vec![4, 0, 3], 0));
    assert_eq!(guest.call(SnapshotCall::Status), Code::Ok);
    assert_eq!(guest.at(ARGUMENT), 1 << 32 | 1);
    assert_eq!(guest.at(ARGUMENT + offset_of!(SnapshotStatus, invalid_because) as u64), 0);

    for call in [SnapshotCall::Leave, SnapshotCall::End, SnapshotCall::End] {
        assert_eq!(guest.call(call), Code::Ok);
    }
    assert_eq!(guest.read(&[0x20_0000]), Code::NoSnapshot);
    // And again.
    assert_eq!((guest.begin(1), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::Ok));
    assert_eq!((guest.read(&[0x20_0000]), guest.at(TO)), (Code::Ok, 5));
}

#[test]
fn the_log_has_what_processors_and_the_driver_have_noted() {
    let guest = Guest::new();
    assert_eq!(guest.begin_log(), Code::Ok);
    assert!(guest.log.is_on.load(Ordering::SeqCst));
    *guest.log.written.lock().unwrap() = vec![(0, 0x7F), (1, 0), (1, 64), (0, 5)];
    // The driver has noted pages 5 and 9.
    guest.put(PIECES[1], &[1 << 5 | 1 << 9]);
    assert_eq!(guest.collect(), 5);
    // Both regions have the same piece here: the second one begins at page 3 of its piece.
    assert_eq!((guest.at(PIECES[2]), guest.at(PIECES[2] + 8)), (1 << 5 | 1 << 9 | 1 << 3, 1 << 63 | 1 << 3));
    assert_eq!((guest.at(PIECES[1]), guest.collect()), (0, 0));
    guest.put(PIECES[2], &[0, 0]);
    assert_eq!(guest.begin(1), Code::Ok);
    guest.log.written.lock().unwrap().push((0, 7));
    assert_eq!(guest.call(SnapshotCall::Enter), Code::Ok);
    assert!(!guest.log.is_on.load(Ordering::SeqCst), "a log that goes on after the instant");
    assert_eq!((guest.collect(), guest.at(PIECES[2])), (1, 1 << 7));
    assert_eq!(guest.call(SnapshotCall::End), Code::Ok);
    // A log without an instant ends too.
    assert_eq!((guest.begin_log(), guest.call(SnapshotCall::End)), (Code::Ok, Code::Ok));
    assert!(!guest.log.is_on.load(Ordering::SeqCst));
}

#[test]
fn what_the_guest_says_is_checked() {
    let guest = Guest::new();
    let unknown =
        [SnapshotCall::Rollback, SnapshotCall::Hold, SnapshotCall::ReadDead, SnapshotCall::DropDead];
    for call in unknown {
        assert_eq!(guest.call(call), Code::UnknownOperation, "{call:?}");
    }
    assert_eq!(guest.calls.call(31, 1, &translate), Code::UnknownOperation);
    assert_eq!(guest.call(SnapshotCall::Enter), Code::NoSnapshot);
    assert_eq!(guest.call(SnapshotCall::Status), Code::NoSnapshot);
    assert_eq!(guest.call(SnapshotCall::LogCollect), Code::NoSnapshot);
    // An argument outside of memory.
    for call in [SnapshotCall::Begin, SnapshotCall::LogBegin, SnapshotCall::Donate] {
        assert_eq!(guest.calls.call(call as u16, u32::MAX, &translate), Code::BadArgument, "{call:?}");
    }
    // A snapshot that is kept, one with hashes, and one with a log after it.
    for (offset, value) in [
        (offset_of!(SnapshotSetup, keep_virt), VIRT),
        (offset_of!(SnapshotSetup, hashes_virt), VIRT),
        (offset_of!(SnapshotSetup, cpus), 1 << 32 | 1),
    ] {
        guest.begin(1);
        guest.call(SnapshotCall::End);
        guest.set(offset, value);
        assert_eq!(guest.call(SnapshotCall::Begin), Code::UnknownOperation);
        guest.set(offset, 0);
    }
    // Maps that are not in memory, not on a page's boundary, and without end.
    let list = offset_of!(SnapshotSetup, free_virt);
    for piece in [VIRT + END - PAGE_BYTES, VIRT + PIECES[0] + 8, 0x1000, u64::MAX] {
        guest.put(LISTS[0], &[piece]);
        assert_eq!(guest.begin(1), Code::BadArgument, "{piece:#x}");
    }
    guest.put(LISTS[0], &[VIRT + PIECES[0]]);
    for address in [VIRT + END, 0x1000, u64::MAX] {
        guest.set(list, address);
        assert_eq!(guest.call(SnapshotCall::Begin), Code::BadArgument, "{address:#x}");
    }
    guest.set(list, VIRT + LISTS[0]);
    guest.set(offset_of!(SnapshotSetup, free_count), u64::MAX);
    assert_eq!(guest.call(SnapshotCall::Begin), Code::BadArgument);

    assert_eq!((guest.begin(1), guest.begin(1)), (Code::Ok, Code::SnapshotLive));
    assert_eq!(guest.begin_log(), Code::SnapshotLive);
    assert_eq!(guest.call(SnapshotCall::Enter), Code::Ok);
    assert_eq!(guest.read(&[END]), Code::BadArgument);
    assert_eq!(guest.read(&[END - PAGE_BYTES / 2]), Code::BadArgument);
    assert_eq!(guest.read(&[0; READ_LIST_MAX + 1]), Code::BadArgument);
    assert_eq!((guest.read(&[0; READ_LIST_MAX]), guest.read(&[])), (Code::Ok, Code::Ok));
    assert_eq!((guest.call(SnapshotCall::GiveUp), guest.read(&[0])), (Code::Ok, Code::SnapshotPool));
    assert_eq!(guest.call(SnapshotCall::Status), Code::Ok);
    assert_eq!(guest.at(ARGUMENT), 1);
}

#[test]
fn processors_that_miss_the_instant_end_it_for_all() {
    let guest = Guest::new();
    assert_eq!((guest.begin(2), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::SnapshotMissed));
    assert_eq!(guest.call(SnapshotCall::Enter), Code::SnapshotMissed);
    assert_eq!((guest.read(&[0]), guest.call(SnapshotCall::End)), (Code::NoSnapshot, Code::Ok));
}

#[test]
fn a_copy_of_the_monitor_that_was_killed_ends_the_snapshot() {
    let guest = Guest::new();
    assert_eq!((guest.begin(1), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::Ok));
    guest.calls.keeper().signal(libc::SIGKILL);
    assert_eq!(guest.read(&[0]), Code::SnapshotLost);
    assert_eq!((guest.read(&[0]), guest.call(SnapshotCall::End)), (Code::SnapshotLost, Code::Ok));
    // Neither the request that the copy has not read nor the word for its end reaches the next copy.
    assert_eq!((guest.begin(1), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::Ok));
    assert_eq!((guest.read(&[0]), guest.call(SnapshotCall::End)), (Code::Ok, Code::Ok));
}

/// A copy that dies while nobody reads is found out by the end alone.
#[test]
fn a_snapshot_follows_one_whose_copy_has_died_unnoticed() {
    let guest = Guest::new();
    for is_killed in [true, false] {
        assert_eq!((guest.begin(1), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::Ok));
        assert_eq!(guest.read(&[0]), Code::Ok);
        if is_killed {
            guest.calls.keeper().signal(libc::SIGKILL);
        }
        assert_eq!(guest.call(SnapshotCall::End), Code::Ok);
    }
}

/// A processor of the guest waits for the copy's end. A copy that is stopped must not hold it up for ever.
#[test]
fn a_copy_that_is_stopped_holds_the_guest_up_for_a_limited_time() {
    let guest = Guest::new();
    assert_eq!((guest.begin(1), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::Ok));
    guest.calls.keeper().be_impatient();
    guest.calls.keeper().signal(libc::SIGSTOP);
    assert_eq!(guest.call(SnapshotCall::End), Code::Ok);
    assert_eq!((guest.begin(1), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::SnapshotLive));
    assert_eq!((guest.read(&[0]), guest.call(SnapshotCall::End)), (Code::NoSnapshot, Code::Ok));
    guest.calls.keeper().signal(libc::SIGCONT);
    let begins = |_| {
        thread::sleep(Duration::from_millis(10));
        (guest.begin(1), guest.call(SnapshotCall::Enter)) == (Code::Ok, Code::Ok)
            || guest.call(SnapshotCall::End) != Code::Ok
    };
    assert!((0..500).any(begins), "no copy can be made again");
    assert_eq!((guest.read(&[0]), guest.call(SnapshotCall::End)), (Code::Ok, Code::Ok));
}

/// Words that an argument may have: counts, addresses in memory and at its end, and others.
fn word() -> impl Strategy<Value = u64> {
    let known = vec![0, 1, 2, 1 << 32, VIRT + LISTS[0], VIRT + PIECES[1], VIRT + END - 8, END, u64::MAX];
    prop_oneof![proptest::sample::select(known), any::<u64>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_argument_does_more_than_a_call_may(
        calls in proptest::collection::vec(
            (0_u16..32, any::<bool>(), proptest::collection::vec(word(), 40)),
            1..20,
        ),
    ) {
        let guest = Guest::new();
        guest.put(0x20_0000, &[7]);
        for (number, at_end, words) in calls {
            // It would wait for processors that do not come.
            if number == SnapshotCall::Enter as u16 {
                continue;
            }
            guest.put(ARGUMENT, &words);
            let page = if at_end { END / PAGE_BYTES - 1 } else { ARGUMENT / PAGE_BYTES };
            guest.calls.call(number, page as u32, &translate);
        }
        guest.call(SnapshotCall::End);
        for (list, piece) in LISTS.into_iter().zip(PIECES) {
            guest.put(list, &[VIRT + piece]);
        }
        prop_assert_eq!((guest.begin(1), guest.call(SnapshotCall::Enter)), (Code::Ok, Code::Ok));
        guest.put(0x20_0000, &[8]);
        prop_assert_eq!((guest.read(&[0x20_0000]), guest.at(TO)), (Code::Ok, 7));
    }
}
