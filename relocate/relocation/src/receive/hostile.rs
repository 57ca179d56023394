//! Hostile-peer tests of a destination. A peer with the pairing token may still lie. The
//! destination's real loop runs against sources that say anything, in any order, cut short,
//! damaged, repeated, or not at all. The machine of the test checks each start. A start is right
//! only if all offered pages are at their addresses as the source's last word described them, and
//! after its `Commit`.

use super::{
    serve::Host,
    spare::{Memory, Progress, Spare},
};
use crate::{
    migrate::{
        link::Link,
        offer::{Offer, OfferedDisk},
    },
    operator::Operator,
    restore::fit,
};
use mercury_abi::restart::{LoadEntry, MERCURY_LOAD_DATA};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_image::{FileSystem, Kind, Machine, Range};
use mercury_migration::{
    announcement::{Announcer, Secret, Speaker},
    protocol::{Attempt, Digest, Message, Patience, Word},
    session::{self, PairingToken, Receiver},
    wire::{Chunks, Content, Ledger, PAGE, Page, Pages, Writer, pack_text},
};
use mercury_quiesce::ethernet::Card;
use proptest::prelude::*;
use std::{
    collections::{HashMap, VecDeque},
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Time for which a source may be silent in tests of silence.
const SILENCE: Duration = Duration::from_secs(1);
/// Time limit for an answer on a host that may be busy.
const LIMIT: Duration = Duration::from_secs(60);
/// Number of pages of the offered machine.
const PAGES: u64 = 6;
const START: u64 = 0x10_0000;
const SECRET: Secret = [9; 32];

fn memory(seed: u8) -> Vec<(u64, [u8; PAGE])> {
    (0..PAGES).map(|number| (START + number * PAGE as u64, [seed.wrapping_mul(number as u8); PAGE])).collect()
}

fn offer() -> Offer {
    let range = Range { start_phys: START, pages: PAGES, kind: Kind::Kept };
    let machine = Machine { host: "hostile".into(), ranges: vec![range], ..Machine::default() };
    Offer { machine, cpus: 1, disks: Vec::new(), secret: SECRET, streams: 1, is_guest: false }
}

fn digest_of(memory: &[(u64, [u8; PAGE])], attempt: Attempt) -> Digest {
    let mut ledger = Ledger::new(offer().memory());
    for (phys, page) in memory {
        ledger.note(Page { phys: *phys, content: Content::Data(page) }).expect("it lies in there");
    }
    ledger.digest(attempt)
}

fn packed(pages: &[(u64, [u8; PAGE])]) -> Vec<u8> {
    let mut all = Pages::default();
    pages.iter().for_each(|(phys, page)| all.add(*phys, page));
    all.pack(1).expect("packed")
}

/// The observations of a test's machine, and its orders.
#[derive(Debug, Default)]
struct Seen {
    memory: HashMap<u64, [u8; PAGE]>,
    offered: Vec<std::ops::Range<u64>>,
    prepared: u32,
    released: u32,
    started: u32,
    /// Room for pages; no limit if `None`.
    room: Option<usize>,
    changed_disks: Vec<String>,
    to_all: Vec<Vec<u8>>,
    from_all: VecDeque<Vec<u8>>,
    /// Words to the destination, noted before they are sent.
    said: Vec<(Attempt, Word)>,
    broken: Vec<String>,
    /// Progress of a machine that is started beside the destination's system; `None`: no machine starts.
    progress: Option<Progress>,
    /// The operator's word from another command.
    typed: Option<&'static str>,
    /// Machines that were complete.
    complete: u32,
    /// True if the operator has ended the wait.
    is_over: bool,
}

impl Seen {
    /// Checks that the protocol allows a start.
    fn judge(&mut self) {
        self.started += 1;
        let mut ledger = Ledger::new(self.offered.clone());
        for (phys, page) in &self.memory {
            if ledger.note(Page { phys: *phys, content: Content::Data(page) }).is_err() {
                self.broken.push(format!("{phys:#x} was not offered"));
            }
        }
        if !ledger.is_complete() || ledger.is_empty() {
            self.broken.push("started without all of its memory".into());
        }
        let mut is_right = |attempt: &Attempt| {
            self.said.contains(&(*attempt, Word::Final(ledger.digest(*attempt))))
                && self.said.contains(&(*attempt, Word::Commit))
        };
        if !self.said.iter().any(|(attempt, _)| is_right(attempt)) {
            self.broken.push("started without a verdict on what lies here".into());
        }
    }
}

/// The memory of the test's machine. It accepts the pages that the driver would accept.
impl Memory for Mutex<Seen> {
    fn load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()> {
        let mut seen = self.lock().expect("no panic");
        let (mut data, _) = data.as_chunks::<PAGE>();
        for entry in entries {
            if seen.prepared == seen.released
                || !seen.offered.iter().any(|range| range.contains(&entry.frame_phys))
            {
                seen.broken.push(format!("{:#x} was loaded and was not offered", entry.frame_phys));
            }
            let page = if entry.source == MERCURY_LOAD_DATA {
                let (first, rest) = data.split_first().expect("a page for each");
                data = rest;
                *first
            } else {
                [0; PAGE]
            };
            seen.memory.insert(entry.frame_phys, page);
            if seen.room.is_some_and(|room| seen.memory.len() > room) {
                return Err(Error::new(Exit::Failed, "there is no room left"));
            }
        }
        Ok(())
    }

    fn read_back(&self, entries: &[LoadEntry]) -> Result<Vec<u8>> {
        let seen = self.lock().expect("no panic");
        Ok(entries.iter().flat_map(|entry| seen.memory[&entry.frame_phys]).collect())
    }
}

/// The test's machine.
struct Fake(Arc<Mutex<Seen>>);

impl Fake {
    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.0.lock().expect("no panic")
    }
}

impl Spare for Fake {
    fn prepare(&mut self, offer: &Offer) -> Result<(), String> {
        let _ = fit::differences(&offer.machine, &Machine::default());
        let mut seen = self.seen();
        let mut offered = offer.memory();
        offered.sort_by_key(|range| range.start);
        let pages: u64 =
            offered.iter().map(|range| (range.end - range.start) / PAGE as u64).fold(0, u64::saturating_add);
        let apart = offered.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let aligned =
            offered.iter().all(|range| range.start.is_multiple_of(PAGE as u64) && range.end < 1 << 52);
        if pages == 0 || pages > 64 || !apart || !aligned {
            return Err("it does not fit here".into());
        }
        seen.prepared += 1;
        seen.offered = offered;
        Ok(())
    }

    fn memory(&self) -> Arc<dyn Memory> {
        Arc::<Mutex<Seen>>::clone(&self.0)
    }

    fn write_disk(&mut self, _: &Chunks) -> Result<()> {
        // No test offers a disk that is accepted.
        Err(Error::new(Exit::Failed, "no disk was offered"))
    }

    fn complete_disks(&mut self, offered: &[OfferedDisk], _: Attempt) -> Result<(), String> {
        if offered.is_empty() { Ok(()) } else { Err("no disk was given".into()) }
    }

    fn go(&mut self) -> Result<()> {
        let mut seen = self.seen();
        seen.judge();
        if seen.progress.is_some() { Ok(()) } else { Err(Error::new(Exit::Failed, "this is only a test")) }
    }

    fn word(&mut self, words: &[&'static str]) -> Option<&'static str> {
        self.seen().typed.take().filter(|word| words.contains(word))
    }

    fn note_complete(&mut self) {
        self.seen().complete += 1;
    }

    fn is_over(&self) -> bool {
        self.seen().is_over
    }

    fn progress(&self) -> Progress {
        self.seen().progress.unwrap_or(Progress::Starting)
    }

    fn release(&mut self) -> Result<()> {
        let mut seen = self.seen();
        seen.released = seen.prepared;
        seen.memory.clear();
        Ok(())
    }

    fn changed_disks(&self, _: &[FileSystem]) -> Vec<String> {
        self.seen().changed_disks.clone()
    }

    fn cards(&self) -> Vec<Card> {
        Vec::new()
    }

    fn announce(&self, frame: &[u8]) {
        self.seen().to_all.push(frame.to_vec());
    }

    fn hear(&self) -> Option<Vec<u8>> {
        self.seen().from_all.pop_front()
    }

    fn ear(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A running destination, stopped when it is dropped.
struct Destination {
    seen: Arc<Mutex<Seen>>,
    token: PairingToken,
    to: SocketAddr,
    end: Arc<AtomicBool>,
    host: Option<JoinHandle<()>>,
}

impl Destination {
    fn new() -> Self {
        Self::patient(LIMIT, LIMIT)
    }

    /// Starts a destination with this patience, and with `hold` for the verdict.
    fn patient(patience: Duration, hold: Duration) -> Self {
        let (receiver, token) = Receiver::new(Duration::from_secs(600)).expect("a receiver");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = listener.local_addr().expect("its address");
        let (seen, end) = (Arc::<Mutex<Seen>>::default(), Arc::<AtomicBool>::default());
        let (spare, ended) = (Fake(Arc::clone(&seen)), Arc::clone(&end));
        let host = thread::spawn(move || {
            let patience =
                Patience { running: patience, frozen: patience, hold: Some(hold), ..Patience::default() };
            let mut host = Host::new(receiver, listener, Box::new(spare), patience, Operator::default());
            while !ended.load(Ordering::Relaxed) {
                host.turn(Duration::from_millis(2)).expect("it goes on");
            }
        });
        Self { seen, token, to, end, host: Some(host) }
    }

    /// Starts a destination whose system goes on beside the machine.
    fn beside(progress: Progress) -> Self {
        Self::beside_that_ends(progress, None)
    }

    /// Starts one whose wait ends in this way.
    fn beside_that_ends(progress: Progress, ends: Option<Exit>) -> Self {
        let (receiver, token) = Receiver::new(Duration::from_secs(600)).expect("a receiver");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = listener.local_addr().expect("its address");
        let seen = Arc::<Mutex<Seen>>::default();
        let spare = Fake(Arc::clone(&seen));
        spare.seen().progress = Some(progress);
        let host = thread::spawn(move || {
            let patience = Patience { running: LIMIT, frozen: LIMIT, hold: None, ..Patience::default() };
            let host = Host::new(receiver, listener, Box::new(spare), patience, Operator::default());
            let served = host.serve_beside();
            assert_eq!(served.err().map(|error| error.exit), ends);
        });
        Self { seen, token, to, end: Arc::default(), host: Some(host) }
    }

    fn connect(&self, attempt: u8) -> Source<'_> {
        let mut link = Link::connect(self.to, &self.token, LIMIT).expect("taken");
        let attempt = Attempt([attempt; 16]);
        link.begin(attempt).expect("begun");
        Source { at: self, link, attempt }
    }

    /// Sends bytes of a stream inside a session, and returns the answer up to its end.
    fn tell(&self, bytes: &[u8]) -> Vec<u8> {
        let socket = TcpStream::connect(self.to).expect("there");
        socket.set_read_timeout(Some(LIMIT)).expect("set");
        let mut session = session::connect(&self.token, socket).expect("taken");
        // The destination may end the session early.
        let _ = session.write_all(bytes).and_then(|()| session.flush());
        session.conn.send_close_notify();
        let _ = session.flush();
        let mut said = Vec::new();
        let _ = session.read_to_end(&mut said);
        said
    }

    fn seen<T>(&self, look: impl FnOnce(&mut Seen) -> T) -> T {
        look(&mut self.seen.lock().expect("no panic"))
    }

    /// Waits until the condition holds.
    fn until(&self, what: &str, is_so: impl Fn(&Seen) -> bool) {
        let end = Instant::now() + LIMIT;
        while !self.seen(|seen| is_so(seen)) {
            assert!(Instant::now() < end, "{what}: {:?}", self.seen(|seen| seen.broken.clone()));
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the destination. Checks that every start was right, and returns the number of starts.
    fn end(mut self) -> u32 {
        self.stop();
        self.seen(|seen| {
            assert_eq!(seen.broken, Vec::<String>::new());
            seen.started
        })
    }

    fn stop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(host) = self.host.take() {
            host.join().expect("the destination does not panic");
        }
    }

    /// Checks that the destination still accepts an honest machine, and starts only that one.
    fn takes_the_next(self) {
        let started = self.seen(|seen| {
            (seen.room, seen.changed_disks) = (None, Vec::new());
            seen.started
        });
        assert_eq!(started, 0, "a hostile source's machine was started");
        let mut source = self.connect(0xee);
        source.moves();
        self.until("an honest machine is started", |seen| seen.started == 1);
        drop(source);
        assert_eq!(self.end(), 1);
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
    }
}

struct Source<'a> {
    at: &'a Destination,
    link: Link,
    attempt: Attempt,
}

impl Source<'_> {
    /// Sends a word; the destination may be gone.
    fn say(&mut self, word: Word) {
        let text = match word {
            Word::Offer | Word::Final(_) => offer().pack().expect("packed"),
            _ => Vec::new(),
        };
        self.say_with(word, &text);
    }

    fn say_with(&mut self, word: Word, text: &[u8]) {
        self.at.seen(|seen| seen.said.push((self.attempt, word)));
        let _ = self.link.say(word, text);
    }

    fn send(&mut self, pages: &[(u64, [u8; PAGE])]) {
        let _ = self.link.pages(&packed(pages));
        let _ = self.link.flush();
    }

    /// Reads the next word; returns nothing after the end.
    fn hear(&mut self) -> Option<(Word, String)> {
        let end = Instant::now() + LIMIT;
        while Instant::now() < end {
            match self.link.hear_message(Duration::from_millis(50)) {
                Ok(Some((message, text))) => {
                    return Some((message.word, String::from_utf8_lossy(&text).into()));
                }
                Ok(None) => {}
                Err(_) => return None,
            }
        }
        panic!("it neither answers nor ends");
    }

    /// Waits until the destination discards the machine, and returns the reason.
    fn discarded(&mut self) -> String {
        match self.hear() {
            Some((Word::Discarded, why)) => why,
            other => panic!("{other:?}"),
        }
    }

    fn is_accepted(&mut self) {
        self.say(Word::Offer);
        assert_eq!(self.hear().map(|(word, _)| word), Some(Word::Accept));
    }

    /// Runs an honest source up to the verdict.
    fn is_verified(&mut self) -> Digest {
        self.is_accepted();
        self.send(&memory(3));
        let digest = digest_of(&memory(3), self.attempt);
        self.say(Word::Final(digest));
        assert_eq!(self.hear().map(|(word, _)| word), Some(Word::Verified(digest)));
        digest
    }

    fn moves(&mut self) {
        self.is_verified();
        self.say(Word::Commit);
    }
}

fn announcer(token: &PairingToken, attempt: Attempt) -> Announcer {
    let mut announcer = Announcer::new(token);
    announcer.know(attempt, &SECRET);
    announcer
}

/// The other tests would prove nothing if an honest machine could not be started.
#[test]
fn an_honest_machine_is_started() {
    let destination = Destination::new();
    let mut source = destination.connect(1);
    source.moves();
    assert_eq!(source.discarded(), "this is only a test");
    drop(source);
    assert_eq!(destination.end(), 1);
}

#[test]
fn pages_out_of_turn_end_it() {
    let destination = Destination::new();
    let mut early = destination.connect(1);
    early.send(&memory(3));
    // Before an offer, nothing is loaded and no answer is given.
    early.say(Word::Offer);
    drop(early);
    let mut late = destination.connect(2);
    late.is_verified();
    late.send(&memory(4));
    assert_eq!(late.discarded(), "pages have arrived that were not asked for");
    late.say(Word::Commit);
    assert_eq!(late.discarded(), "", "the promise holds");
    drop(late);
    destination.takes_the_next();
}

#[test]
fn pages_of_other_memory_end_it() {
    for phys in [0, START - PAGE as u64, START + PAGES * PAGE as u64, 1 << 51, !0xfff] {
        let destination = Destination::new();
        let mut source = destination.connect(1);
        source.is_accepted();
        source.send(&[(START, [1; PAGE]), (phys, [1; PAGE])]);
        assert!(source.discarded().contains("outside the memory that was offered"), "{phys:#x}");
        drop(source);
        destination.takes_the_next();
    }
}

#[test]
fn wrong_last_words_end_it() {
    let mut other = offer();
    other.machine.ranges[0].pages -= 1;
    let other = other.pack().expect("packed");
    for (pages, seed, text, why) in [
        (PAGES, 4, offer().pack().expect("packed"), "its memory differs from the data that was sent"),
        (PAGES - 1, 3, offer().pack().expect("packed"), "not all of its memory has arrived"),
        (PAGES, 3, other, "it is another machine than the offered one"),
        (PAGES, 3, b"{}".to_vec(), "the last word"),
        (PAGES, 3, Vec::new(), "the last word"),
    ] {
        let destination = Destination::new();
        let mut source = destination.connect(1);
        source.is_accepted();
        source.send(&memory(3)[..pages as usize]);
        source.say_with(Word::Final(digest_of(&memory(seed), source.attempt)), &text);
        assert!(source.discarded().contains(why), "{why}");
        source.say(Word::Commit);
        drop(source);
        destination.takes_the_next();
    }
}

/// The digest of the same memory differs between attempts.
#[test]
fn a_digest_is_of_its_attempt() {
    let destination = Destination::new();
    let mut source = destination.connect(1);
    source.is_accepted();
    source.send(&memory(3));
    source.say(Word::Final(digest_of(&memory(3), Attempt([2; 16]))));
    assert_eq!(source.discarded(), "its memory differs from the data that was sent");
    drop(source);
    destination.takes_the_next();
}

#[test]
fn words_out_of_turn_end_it() {
    let digest = digest_of(&memory(3), Attempt([1; 16]));
    let destinations_own = [
        Word::Accept,
        Word::Refuse,
        Word::Verified(digest),
        Word::Started,
        Word::Discarded,
        Word::Lost,
        Word::Unknown,
    ];
    for word in destinations_own.into_iter().chain([Word::Commit, Word::Cancel]) {
        let destination = Destination::new();
        let mut source = destination.connect(1);
        source.is_accepted();
        source.send(&memory(3));
        source.say(word);
        source.discarded();
        source.say(Word::Final(digest));
        source.say(Word::Commit);
        drop(source);
        destination.takes_the_next();
    }
}

/// A second offer changes nothing, not even with another machine.
#[test]
fn a_second_offer_is_none() {
    let destination = Destination::new();
    let mut source = destination.connect(1);
    source.is_accepted();
    let mut larger = offer();
    larger.machine.ranges[0].pages = 60;
    source.say_with(Word::Offer, &larger.pack().expect("packed"));
    source.send(&[(START + PAGES * PAGE as u64, [1; PAGE])]);
    assert!(source.discarded().contains("outside the memory that was offered"));
    drop(source);
    destination.takes_the_next();
}

#[test]
fn absurd_offers_are_refused() {
    let of = |ranges: Vec<Range>| {
        let machine = Machine { ranges, ..offer().machine };
        Offer { machine, ..offer() }.pack().expect("packed")
    };
    let range = |start_phys, pages| Range { start_phys, pages, kind: Kind::Kept };
    let mut firmware = offer();
    let last_phys = u64::MAX;
    firmware.machine.firmware =
        vec![mercury_image::FirmwareRange { start_phys: 0, last_phys, kind: "System RAM".into() }; 3];
    firmware.machine.ranges.clear();
    for text in [
        Vec::new(),
        b"{}".to_vec(),
        pack_text(b"[]").expect("packed"),
        pack_text(&b"[".repeat(1 << 20)).expect("packed"),
        firmware.pack().expect("packed"),
        of(Vec::new()),
        of(vec![range(0, u64::MAX)]),
        of(vec![range(u64::MAX - 4095, 1 << 60)]),
        of(vec![range(1, 1)]),
        of(vec![range(START, 2), range(START, 2)]),
        of(vec![range(0, 1 << 40); 1000]),
    ] {
        let destination = Destination::new();
        let mut source = destination.connect(1);
        source.say_with(Word::Offer, &text);
        assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Refuse));
        source.send(&memory(3));
        source.say(Word::Commit);
        drop(source);
        destination.takes_the_next();
    }
}

/// A machine that goes on beside the destination's system is said to have started when it gives a sign, and
/// to be lost if it ends. The source hears it on its connection, and again when it asks.
#[test]
fn a_machine_beside_the_system_has_an_answer() {
    let destination = Destination::beside(Progress::Starting);
    let mut source = destination.connect(1);
    source.is_verified();
    source.say(Word::Commit);
    destination.until("it is started", |seen| seen.started == 1);
    thread::sleep(Duration::from_millis(50));
    destination.seen(|seen| seen.progress = Some(Progress::Running));
    assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Started));
    source.say(Word::Commit);
    assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Started));
    // Another peer is being turned away, and says nothing. Nothing of it is left when the destination
    // returns: its process gives up system calls then.
    let mut silent = TcpStream::connect(destination.to).expect("there");
    silent.set_read_timeout(Some(LIMIT)).expect("set");
    thread::sleep(Duration::from_millis(200));
    destination.seen(|seen| seen.progress = Some(Progress::Ended));
    assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Lost));
    drop(source);
    assert_eq!(destination.end(), 1);
    silent.set_nonblocking(true).expect("set");
    let left = silent.read(&mut [0]);
    assert!(
        left.as_ref().is_ok_and(|count| *count == 0)
            || left.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
    );

    let destination = Destination::beside(Progress::Ended);
    let mut source = destination.connect(2);
    source.is_verified();
    source.say(Word::Commit);
    assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Lost));
    drop(source);
    assert_eq!(destination.end(), 1);
}

/// Another command's `adopt` counts only when the source is silent.
#[test]
fn a_machine_whose_source_speaks_is_not_adopted() {
    let destination = Destination::beside(Progress::Starting);
    let mut source = destination.connect(1);
    source.is_verified();
    destination.seen(|seen| seen.typed = Some("adopt"));
    destination.until("the word is read", |seen| seen.typed.is_none());
    thread::sleep(Duration::from_millis(100));
    assert_eq!(destination.seen(|seen| seen.started), 0);
    source.say(Word::Commit);
    destination.until("it is started", |seen| seen.started == 1);
    destination.seen(|seen| seen.progress = Some(Progress::Ended));
    assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Lost));
    assert_eq!(destination.end(), 1);
}

/// A command that is asked to end while a complete machine waits for its silent source discards it in order:
/// a source that comes back hears it. No other machine is accepted then.
#[test]
fn a_wait_that_ends_says_so_to_the_source() {
    let destination = Destination::beside_that_ends(Progress::Starting, Some(Exit::Interrupted));
    let mut source = destination.connect(1);
    source.is_accepted();
    source.send(&memory(3));
    assert_eq!(destination.seen(|seen| seen.complete), 0);
    let digest = digest_of(&memory(3), source.attempt);
    source.say(Word::Final(digest));
    assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Verified(digest)));
    assert_eq!(destination.seen(|seen| seen.complete), 1);
    destination.seen(|seen| (seen.is_over, seen.typed) = (true, Some("discard")));
    source.discarded();
    source.say(Word::Commit);
    assert_eq!(source.hear().map(|(word, _)| word), Some(Word::Discarded));
    assert_eq!(destination.end(), 0);
}

#[test]
fn memory_that_runs_out_ends_it() {
    let destination = Destination::new();
    destination.seen(|seen| seen.room = Some(3));
    let mut source = destination.connect(1);
    source.is_accepted();
    source.send(&memory(3));
    assert_eq!(source.discarded(), "there is no room left");
    drop(source);
    destination.takes_the_next();
}

#[test]
fn disks_that_have_changed_end_it() {
    let destination = Destination::new();
    destination.seen(|seen| seen.changed_disks = vec!["the disk is gone".into()]);
    let mut source = destination.connect(1);
    source.is_accepted();
    source.send(&memory(3));
    source.say(Word::Final(digest_of(&memory(3), source.attempt)));
    assert!(source.discarded().contains("the disk is gone"));
    drop(source);
    destination.takes_the_next();
}

/// A source is given up after silence between two frames, in the middle of a frame, and after the
/// verdict.
#[test]
fn a_silent_source_is_given_up() {
    let destination = Destination::patient(SILENCE, SILENCE);
    let mut source = destination.connect(1);
    source.is_accepted();
    source.discarded();
    drop(source);

    let mut half = recording(2);
    half.truncate(half.len() / 2);
    let begun = Instant::now();
    let socket = TcpStream::connect(destination.to).expect("there");
    let mut session = session::connect(&destination.token, socket).expect("taken");
    session.write_all(&half).and_then(|()| session.flush()).expect("said");
    destination.until("the half is thrown away", |seen| seen.released == 2 && seen.prepared == 2);
    assert!(begun.elapsed() >= SILENCE);
    drop(session);

    let mut source = destination.connect(3);
    source.is_verified();
    source.discarded();
    source.say(Word::Commit);
    source.discarded();
    drop(source);
    destination.takes_the_next();
}

/// Another peer does not delay the source: not a stranger, nor a silent one. A peer with the
/// pairing token is told the reason.
#[test]
fn a_second_source_is_turned_away() {
    let destination = Destination::patient(SILENCE, SILENCE);
    let mut source = destination.connect(1);
    source.is_accepted();
    let error = Link::connect(destination.to, &destination.token, LIMIT).expect_err("not now");
    assert!(
        error.exit == Exit::Busy && error.message.contains("another machine is on its way there"),
        "{error}"
    );
    let (_, other) = Receiver::new(LIMIT).expect("another one");
    assert!(Link::connect(destination.to, &other, LIMIT).is_err());
    let silent = TcpStream::connect(destination.to).expect("there");
    let begun = Instant::now();
    while begun.elapsed() < 2 * SILENCE {
        source.send(&memory(3));
        thread::sleep(SILENCE / 8);
    }
    source.say(Word::Final(digest_of(&memory(3), source.attempt)));
    assert!(matches!(source.hear(), Some((Word::Verified(_), _))));
    source.say(Word::Commit);
    assert_eq!(source.discarded(), "this is only a test");
    drop((source, silent));
    assert_eq!(destination.end(), 1);
}

/// A source loses its connection when its machine has arrived. Another one that has the token, too, may
/// connect meanwhile and say anything.
#[test]
fn another_source_has_no_say_in_what_becomes_of_an_arrival() {
    let destination = Destination::new();
    let mut source = destination.connect(1);
    source.is_verified();
    source.link.abandon();
    for _ in 0..3 {
        let mut other = destination.connect(2);
        other.send(&memory(4));
        other.say(Word::Cancel);
        assert_eq!(other.hear(), None, "it is let go");
    }
    let mut again = destination.connect(1);
    again.say(Word::Commit);
    assert_eq!(again.discarded(), "this is only a test");
    drop(again);
    assert_eq!(destination.end(), 1);
}

/// Announcements: a peer that has only the pairing token decides nothing. Words that were announced
/// once, in this attempt or another, may be repeated.
#[test]
fn announcements_decide_only_decided_things() {
    let destination = Destination::new();
    let commit = |attempt| Message { attempt, word: Word::Commit };
    let (first, second) = (Attempt([1; 16]), Attempt([2; 16]));
    let mut source = destination.connect(1);
    source.is_accepted();
    source.say(Word::Cancel);
    source.discarded();
    drop(source);

    let mut source = destination.connect(2);
    source.is_verified();
    let answers = destination.seen(|seen| seen.to_all.len());
    let forged = Announcer::new(&destination.token);
    let mut wrong = Announcer::new(&destination.token);
    wrong.know(second, &[8; 32]);
    let of_the_first = announcer(&destination.token, first).say(Speaker::Source, commit(first));
    destination.seen(|seen| {
        seen.from_all.extend([
            forged.say(Speaker::Source, commit(second)).to_vec(),
            forged.say_to_restarted(Speaker::Source, commit(second)).to_vec(),
            wrong.say(Speaker::Source, commit(second)).to_vec(),
            announcer(&destination.token, second).say(Speaker::Destination, commit(second)).to_vec(),
            of_the_first.to_vec(),
            vec![0; 7],
        ]);
    });
    destination.until("the first attempt's is answered", |seen| seen.to_all.len() > answers);
    let answer = destination.seen(|seen| seen.to_all[answers].clone());
    let heard = announcer(&destination.token, first).hear(Speaker::Destination, &answer);
    assert_eq!(heard, Some(Message { attempt: first, word: Word::Discarded }));
    assert_eq!(destination.seen(|seen| seen.started), 0);

    // The source's own announcement decides, once.
    let own = announcer(&destination.token, second).say(Speaker::Source, commit(second)).to_vec();
    destination.seen(|seen| {
        seen.said.push((second, Word::Commit));
        seen.from_all.extend([own.clone(), own]);
    });
    destination.until("it is started", |seen| seen.started == 1);
    destination.until("the second is answered", |seen| seen.from_all.is_empty());
    drop(source);
    assert_eq!(destination.end(), 1);
}

/// Records the bytes of an honest source in a session.
fn recording(attempt: u8) -> Vec<u8> {
    let attempt = Attempt([attempt; 16]);
    let text = offer().pack().expect("packed");
    let mut writer = Writer::begin(Vec::new(), attempt, 0).expect("begun");
    writer.say(Word::Offer, &text).expect("said");
    writer.round(0).expect("begun");
    writer.pages(&packed(&memory(3))).expect("sent");
    writer.say(Word::Final(digest_of(&memory(3), attempt)), &text).expect("said");
    writer.say(Word::Commit, &[]).expect("said");
    writer.into_inner()
}

/// Damage to a recording.
#[derive(Clone, Debug)]
enum Damage {
    Flip(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Leave(prop::sample::Index, usize),
    Again(prop::sample::Index, usize),
    Length(prop::sample::Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        (index(), 0..8_u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        index().prop_map(Damage::Cut),
        (index(), 1..200_usize).prop_map(|(at, length)| Damage::Leave(at, length)),
        (index(), 1..200_usize).prop_map(|(at, length)| Damage::Again(at, length)),
        index().prop_map(Damage::Length),
    ]
}

fn damaged(mut bytes: Vec<u8>, damage: &Damage) -> Vec<u8> {
    let length = bytes.len();
    match damage {
        Damage::Flip(at, bit) => bytes[at.index(length)] ^= 1 << bit,
        Damage::Cut(at) => bytes.truncate(at.index(length)),
        Damage::Leave(at, count) => {
            let at = at.index(length);
            bytes.drain(at..(at + count).min(length));
        }
        Damage::Again(at, count) => {
            let at = at.index(length);
            let again = bytes[at..(at + count).min(length)].to_vec();
            bytes.splice(at..at, again);
        }
        Damage::Length(at) => {
            let at = at.index(length - 4);
            bytes[at..at + 4].fill(0xff);
        }
    }
    bytes
}

/// An act of a lying source that has the pairing token and tries everything to be started.
#[derive(Clone, Debug)]
enum Lie {
    Say(Word),
    Send(u64, u8),
    SendAll,
    Round(u64),
    Announce(Word),
    Again,
}

fn lies() -> impl Strategy<Value = Vec<Lie>> {
    let right = digest_of(&memory(3), Attempt([1; 16]));
    let words = prop::sample::select(vec![
        Word::Offer,
        Word::Offer,
        Word::Final(right),
        Word::Final(right),
        Word::Final(Digest([5; 32])),
        Word::Cancel,
        Word::Commit,
        Word::Commit,
        Word::Accept,
        Word::Verified(right),
        Word::Started,
        Word::Discarded,
        Word::Unknown,
    ]);
    let announcements =
        prop::sample::select(vec![Word::Commit, Word::Cancel, Word::Started, Word::Discarded]);
    let lie = prop_oneof![
        4 => words.prop_map(Lie::Say),
        2 => (0..PAGES + 2, any::<u8>()).prop_map(|(page, seed)| Lie::Send(page, seed)),
        3 => Just(Lie::SendAll),
        1 => (0..3_u64).prop_map(Lie::Round),
        1 => announcements.prop_map(Lie::Announce),
        1 => Just(Lie::Again),
    ];
    // A source that was accepted can get further.
    (any::<bool>(), prop::collection::vec(lie, 1..12)).prop_map(|(begins, mut lies)| {
        if begins {
            lies.splice(0..0, [Lie::Say(Word::Offer), Lie::SendAll]);
        }
        lies
    })
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(96))]

    /// A damaged recording of an honest source starts nothing. Its remains are discarded, and the
    /// next machine is accepted.
    #[test]
    fn no_damage_is_started(damage in damage()) {
        let whole = recording(1);
        let bytes = damaged(whole.clone(), &damage);
        prop_assume!(bytes != whole);
        // If the verdict is damaged, the destination waits for it.
        let destination = Destination::patient(LIMIT, SILENCE);
        destination.seen(|seen| {
            let digest = digest_of(&memory(3), Attempt([1; 16]));
            seen.said.extend([(Attempt([1; 16]), Word::Final(digest)), (Attempt([1; 16]), Word::Commit)]);
        });
        destination.tell(&bytes);
        destination.until("what came is thrown away", |seen| seen.released == seen.prepared);
        // Data after a complete recording comes too late to matter.
        let is_whole = bytes.starts_with(&whole);
        if is_whole {
            destination.until("it is started", |seen| seen.started == 1);
            prop_assert_eq!(destination.end(), 1);
        } else {
            destination.takes_the_next();
        }
    }

    /// Lies of a source, in any order, start nothing except the machine of its last word, after a
    /// commit.
    #[test]
    fn no_lie_is_started(lies in lies()) {
        let destination = Destination::new();
        let mut source = destination.connect(1);
        for lie in &lies {
            match lie {
                Lie::Say(word) => source.say(*word),
                Lie::Send(page, seed) => source.send(&[(START + page * PAGE as u64, [*seed; PAGE])]),
                Lie::SendAll => source.send(&memory(3)),
                Lie::Round(number) => {
                    let _ = source.link.round(*number).and_then(|()| source.link.flush());
                }
                Lie::Announce(word) => {
                    let frame = announcer(&destination.token, source.attempt)
                        .say(Speaker::Source, Message { attempt: source.attempt, word: *word });
                    destination.seen(|seen| {
                        seen.said.push((source.attempt, *word));
                        seen.from_all.push_back(frame.to_vec());
                    });
                }
                Lie::Again => {
                    drop(source);
                    // A new source may be refused until the destination has seen the end of this
                    // one.
                    let end = Instant::now() + LIMIT;
                    let link = loop {
                        match Link::connect(destination.to, &destination.token, LIMIT) {
                            Ok(link) => break link,
                            Err(error) => {
                                prop_assert!(error.exit == Exit::Busy && Instant::now() < end, "{error}");
                            }
                        }
                    };
                    source = Source { at: &destination, link, attempt: Attempt([1; 16]) };
                    source.link.begin(source.attempt).expect("begun");
                }
            }
        }
        drop(source);
        let mut destination = destination;
        thread::sleep(Duration::from_millis(10));
        destination.stop();
        destination.seen(|seen| assert_eq!(seen.broken, Vec::<String>::new()));
    }
}
