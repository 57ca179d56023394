//! Moves by several streams, over this machine's loopback and into a table; and hostile-peer tests
//! of streams.
#![allow(clippy::unwrap_used)]

use super::{
    serve::Host,
    spare::{Memory, Spare},
};
use crate::{
    migrate::{
        copy::{self, Reading, Ways, pass},
        link::Link,
        offer::{Offer, OfferedDisk},
        page_stream::{AttemptStreams, PageStream},
    },
    operator::Operator,
};
use mercury_abi::restart::{LoadEntry, MERCURY_LOAD_ZERO};
use mercury_control::{
    device::{Cursor, Frames},
    error::{Error, Result},
    exit::Exit,
};
use mercury_image::{FileSystem, Kind, Machine, Range};
use mercury_migration::{
    protocol::{Attempt, Digest, Patience, Word},
    rounds::Limits,
    session::{self, PairingToken, Receiver},
    streams::{STRIPE, proof, stream_of},
    wire::{Chunks, Ledger, PAGE, Pages, Reader, Writer},
};
use mercury_quiesce::ethernet::Card;
use std::{
    collections::HashMap,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(20);
const ATTEMPT: Attempt = Attempt([7; 16]);
const SECRET: [u8; 32] = [3; 32];
const DIGEST: Digest = Digest([1; 32]);

/// Memory as a table.
#[derive(Debug, Default)]
struct Shelf(Mutex<HashMap<u64, Vec<u8>>>);

impl Memory for Shelf {
    fn load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()> {
        let mut data = data.chunks(PAGE);
        let mut pages = self.0.lock().unwrap();
        for entry in entries {
            let is_zero = entry.source == MERCURY_LOAD_ZERO;
            let page = if is_zero { vec![0; PAGE] } else { data.next().unwrap().to_vec() };
            pages.insert(entry.frame_phys, page);
        }
        Ok(())
    }

    fn read_back(&self, entries: &[LoadEntry]) -> Result<Vec<u8>> {
        let pages = self.0.lock().unwrap();
        Ok(entries.iter().flat_map(|entry| pages[&entry.frame_phys].clone()).collect())
    }
}

/// A destination that accepts everything.
struct Table(Arc<Shelf>);

impl Spare for Table {
    fn prepare(&mut self, _: &Offer) -> Result<(), String> {
        Ok(())
    }

    fn memory(&self) -> Arc<dyn Memory> {
        Arc::<Shelf>::clone(&self.0)
    }

    fn write_disk(&mut self, _: &Chunks) -> Result<()> {
        Err(Error::new(Exit::Failed, "a table has no disks"))
    }

    fn complete_disks(&mut self, offered: &[OfferedDisk], _: Attempt) -> Result<(), String> {
        if offered.is_empty() { Ok(()) } else { Err("a table has no disks".into()) }
    }

    fn go(&mut self) -> Result<()> {
        Err(Error::new(Exit::Failed, "a table goes nowhere"))
    }

    fn release(&mut self) -> Result<()> {
        // No other thread may load pages any more.
        assert_eq!(Arc::strong_count(&self.0), 2, "a thread still loads pages");
        self.0.0.lock().unwrap().clear();
        Ok(())
    }

    fn changed_disks(&self, _: &[FileSystem]) -> Vec<String> {
        Vec::new()
    }

    fn cards(&self) -> Vec<Card> {
        Vec::new()
    }

    fn announce(&self, _: &[u8]) {}

    fn hear(&self) -> Option<Vec<u8>> {
        None
    }

    fn ear(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A destination that waits until it is dropped.
struct Scene {
    to: SocketAddr,
    token: PairingToken,
    shelf: Arc<Shelf>,
    stop: Arc<AtomicBool>,
    host: Option<JoinHandle<()>>,
}

impl Scene {
    fn new(running: Duration) -> Self {
        let (receiver, token) = Receiver::new(Duration::from_secs(600)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let (shelf, stop) = (Arc::<Shelf>::default(), Arc::<AtomicBool>::default());
        let (table, stopped) = (Arc::clone(&shelf), Arc::clone(&stop));
        let host = thread::spawn(move || {
            let patience = Patience { running, ..Patience::default() };
            let spare = Box::new(Table(table));
            let mut host = Host::new(receiver, listener, spare, patience, Operator::default());
            while !stopped.load(Ordering::Relaxed) {
                host.turn(Duration::from_millis(100)).unwrap();
            }
        });
        Self { to, token, shelf, stop, host: Some(host) }
    }

    fn attempt_streams(&self) -> AttemptStreams<'_> {
        AttemptStreams { to: self.to, token: &self.token, attempt: ATTEMPT, secret: &SECRET }
    }

    fn page_stream(&self, stream: u32) -> PageStream {
        PageStream::open(&self.attempt_streams(), stream, PATIENCE, None).unwrap()
    }

    /// Offers a machine of so many stripes by so many streams; it is accepted.
    fn offer(&self, stripes: u64, streams: u32) -> Sender {
        let mut sender = self.begin(stripes, streams);
        assert_eq!(sender.answer().0, Word::Accept);
        sender
    }

    fn begin(&self, stripes: u64, streams: u32) -> Sender {
        let range = Range { start_phys: 0, pages: stripes * STRIPE / PAGE as u64, kind: Kind::Kept };
        let machine = Machine { ranges: vec![range], ..Machine::default() };
        let offer = Offer { machine, cpus: 1, disks: Vec::new(), secret: SECRET, streams, is_guest: false };
        let mut link = Link::connect(self.to, &self.token, PATIENCE).unwrap();
        link.begin(ATTEMPT).unwrap();
        link.say(Word::Offer, &offer.pack().unwrap()).unwrap();
        Sender { link, ledger: Ledger::new(offer.memory()), offer }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.host.take().map(JoinHandle::join);
        assert!(thread::panicking() || ended.is_none_or(|ended| ended.is_ok()));
    }
}

/// The source's end.
struct Sender {
    link: Link,
    ledger: Ledger,
    offer: Offer,
}

impl Sender {
    /// Reads the next word, and its text.
    fn answer(&mut self) -> (Word, String) {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some((message, text)) = self.link.hear_message(Duration::from_millis(100)).unwrap() {
                return (message.word, String::from_utf8_lossy(&text).into_owned());
            }
        }
        panic!("no answer");
    }

    /// Sends all pages that have changed since they were sent.
    fn pass(&mut self, memory: &[u8], page_streams: &[PageStream], workers: usize) -> u64 {
        let read = |cursor: &mut Cursor, count: usize| {
            let at = cursor.next_phys as usize;
            let end = (at + count * PAGE).min(memory.len());
            cursor.next_phys = if end == memory.len() { u64::MAX } else { end as u64 };
            let phys = (at..end).step_by(PAGE).map(|phys| phys as u64).collect();
            Ok(Frames { phys, data: memory[at..end].to_vec(), hurry: false })
        };
        let reading = Reading { read: &read, from: copy::From::Instant, level: 1, workers };
        let ways = Ways { link: &mut self.link, page_streams };
        let done = pass(&reading, &mut self.ledger, &Limits::default(), ways, &mut |_, _| true);
        done.unwrap().sent
    }

    /// Ends each stream, the first one last; returns the answer.
    fn end(&mut self, page_streams: &[PageStream]) -> (Word, String) {
        let word = Word::Final(self.ledger.digest(ATTEMPT));
        page_streams.iter().for_each(|page_stream| page_stream.end(word).unwrap());
        self.link.say(word, &self.offer.pack().unwrap()).unwrap();
        self.answer()
    }
}

/// Makes memory that is zeros in part, repeats itself in part, and is noise that compresses a
/// little in the rest.
fn memory(stripes: u64, seed: u64) -> Vec<u8> {
    let mut noise = seed | 1;
    let mut next = move || {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        noise
    };
    let page = |number: u64| match number % 8 {
        0 => vec![0; PAGE],
        1 => vec![number as u8; PAGE],
        _ => (0..PAGE / 16).flat_map(|_| [next().to_le_bytes(), [number as u8; 8]].concat()).collect(),
    };
    (0..stripes * STRIPE / PAGE as u64).flat_map(page).collect()
}

/// Makes a record of one page.
fn page(phys: u64) -> Vec<u8> {
    let mut pages = Pages::default();
    pages.add(phys, &[9; PAGE]);
    pages.pack(1).unwrap()
}

/// Returns the first stripe of a stream.
fn home(stream: u32, streams: u32) -> u64 {
    (0..).map(|stripe| stripe * STRIPE).find(|phys| stream_of(*phys, streams) == stream).unwrap()
}

#[test]
fn machines_come_by_several_streams() {
    for streams in [1, 2, 3, 16] {
        let scene = Scene::new(PATIENCE);
        let mut sender = scene.offer(40, streams);
        let page_streams: Vec<_> = (1..streams).map(|stream| scene.page_stream(stream)).collect();
        let mut memory = memory(40, 1);
        assert_eq!(sender.pass(&memory, &page_streams, 3), 40 * STRIPE / PAGE as u64);
        // A page that is written again and again arrives as it was last.
        for again in 0..20 {
            memory.chunks_mut(5 * PAGE).for_each(|page| page[..8].fill(again));
            assert!(sender.pass(&memory, &page_streams, 3) > 0);
        }
        let (word, _) = sender.end(&page_streams);
        assert_eq!(word, Word::Verified(sender.ledger.digest(ATTEMPT)), "by {streams} streams");
        let there = scene.shelf.0.lock().unwrap();
        assert!(memory.chunks(PAGE).enumerate().all(|(at, page)| there[&((at * PAGE) as u64)] == page));
    }
}

/// A peer that opens a stream that was not offered fails, and disturbs no other peer.
#[test]
fn streams_without_a_source_are_refused() {
    let scene = Scene::new(PATIENCE);
    let mut sender = scene.offer(8, 3);
    let right = scene.attempt_streams();
    for (whose, stream) in [
        (AttemptStreams { secret: &[4; 32], ..right }, 1),
        (AttemptStreams { attempt: Attempt([8; 16]), ..right }, 1),
        (right, 0),
        (right, 3),
        (right, u32::MAX),
    ] {
        assert!(PageStream::open(&whose, stream, PATIENCE, None).is_err(), "{whose:?} {stream}");
    }
    let first = scene.page_stream(1);
    assert!(PageStream::open(&right, 1, PATIENCE, None).is_err(), "one stream was opened twice");
    // A proof of another session is wrong in this one, and without a proof there is no stream.
    let open = || session::connect(&scene.token, TcpStream::connect(scene.to).unwrap()).unwrap();
    let of_another = session::binding(&open().conn).unwrap();
    let replayed = proof(&SECRET, ATTEMPT, 2, &of_another);
    for shown in [Some(replayed), None] {
        let mut writer = Writer::begin(open(), ATTEMPT, 2).unwrap();
        match shown {
            Some(proof) => writer.prove(&proof).unwrap(),
            None => writer.pages(&page(home(2, 3))).unwrap(),
        }
        writer.flush().unwrap();
        assert!(Reader::open(writer.get_mut()).is_err(), "taken by {shown:?}");
    }
    let page_streams = [first, scene.page_stream(2)];
    // All streams are open.
    assert!(PageStream::open(&right, 2, Duration::from_secs(1), None).is_err());
    sender.pass(&memory(8, 2), &page_streams, 2);
    assert!(matches!(sender.end(&page_streams).0, Word::Verified(_)));
}

/// A source whose streams are wrong ends its attempt.
#[test]
fn hostile_peers_are_discarded() {
    type Lie = fn(&Scene, &mut Sender);
    let lies: [(&str, Lie); 7] = [
        ("another stream than its own", |scene, _| {
            let page_stream = scene.page_stream(1);
            let _ = page_stream.pages(&page(home(2, 3))).and_then(|()| page_stream.flush());
            thread::sleep(Duration::from_millis(500));
        }),
        ("another stream than its own", |_, sender| {
            sender.link.pages(&page(home(1, 3))).and_then(|()| sender.link.flush()).unwrap();
        }),
        ("the memory that was offered", |scene, _| {
            let page_stream = scene.page_stream(1);
            let _ = page_stream.pages(&page(home(1, 3) + 3 * 8 * STRIPE)).and_then(|()| page_stream.flush());
            thread::sleep(Duration::from_millis(500));
        }),
        ("stream 2", |scene, _| drop(scene.page_stream(2))),
        ("does not belong there", |scene, _| {
            let page_stream = scene.page_stream(1);
            let _ = page_stream.end(Word::Commit);
            thread::sleep(Duration::from_millis(500));
        }),
        ("not opened all", |scene, sender| {
            let page_stream = scene.page_stream(1);
            page_stream.end(Word::Final(DIGEST)).unwrap();
            sender.link.say(Word::Final(DIGEST), &[]).unwrap();
            thread::sleep(Duration::from_millis(500));
        }),
        ("digests of its streams differ", |scene, sender| {
            let page_streams = [scene.page_stream(1), scene.page_stream(2)];
            page_streams[0].end(Word::Final(DIGEST)).unwrap();
            page_streams[1].end(Word::Final(Digest([2; 32]))).unwrap();
            sender.link.say(Word::Final(DIGEST), &[]).unwrap();
            thread::sleep(Duration::from_millis(500));
        }),
    ];
    for (reason, lie) in lies {
        let scene = Scene::new(PATIENCE);
        let mut sender = scene.offer(8, 3);
        lie(&scene, &mut sender);
        let (word, why) = sender.answer();
        assert!(word == Word::Discarded && why.contains(reason), "{reason}: {word:?} {why}");
    }
}

/// A stream without an end is waited for until the time is up; then the pages are discarded.
#[test]
fn a_stream_without_an_end_is_waited_for_in_vain() {
    let scene = Scene::new(Duration::from_secs(2));
    let mut sender = scene.offer(8, 2);
    let page_streams = [scene.page_stream(1)];
    sender.pass(&memory(8, 3), &page_streams, 2);
    let (word, _) = sender.end(&[]);
    assert_eq!(word, Word::Discarded);
    assert!(scene.shelf.0.lock().unwrap().is_empty());
}

#[test]
fn no_more_streams_are_offered_than_are_taken() {
    for streams in [0, 17, u32::MAX] {
        let scene = Scene::new(PATIENCE);
        let (word, why) = scene.begin(8, streams).answer();
        assert!(word == Word::Refuse && why.contains("1 to 16 are accepted"), "{word:?} {why}");
    }
}

/// Returns the CPU time of this process.
fn used() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Returns the CPU time of each thread of this process.
fn used_by_threads() -> HashMap<String, Duration> {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let used = |path: &std::path::Path| {
        let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    threads
        .filter_map(|thread| Some((thread.file_name().into_string().ok()?, used(&thread.path())?)))
        .collect()
}

/// Measures the benefit of streams if both ends share this machine's processors, and nothing is
/// read from or written to a driver: `cargo test --release -p mercury-cli --lib
/// throughput_by_number_of_streams -- --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn throughput_by_number_of_streams() {
    const STRIPES: u64 = 4096;
    let memory = memory(STRIPES, 4);
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    println!("{} MiB, both ends on {cpus} CPUs", memory.len() >> 20);
    for streams in [1, 2, 4, 1, 2, 4, 1, 2, 4] {
        let scene = Scene::new(PATIENCE);
        let mut sender = scene.offer(STRIPES, streams);
        let page_streams: Vec<_> = (1..streams).map(|stream| scene.page_stream(stream)).collect();
        let (begun, before, threads) = (Instant::now(), used(), used_by_threads());
        sender.pass(&memory, &page_streams, cpus);
        while scene.shelf.0.lock().unwrap().len() < memory.len() / PAGE {
            thread::sleep(Duration::from_millis(10));
        }
        // The threads that hash and compress are gone; there are as many of them as CPUs anyway.
        let of_one =
            |(name, now): (&String, &Duration)| *now - threads.get(name).copied().unwrap_or_default();
        let busiest = used_by_threads().iter().map(of_one).max().unwrap_or_default().as_secs_f64();
        assert!(matches!(sender.end(&page_streams).0, Word::Verified(_)));
        let (took, cost) = (begun.elapsed().as_secs_f64(), (used() - before).as_secs_f64());
        println!(
            "{streams} streams: {:.0} MiB/s, {took:.2} s, in which both ends used processors for {cost:.2} \
             s, and the busiest end of a stream for {busiest:.2} s: no more than {:.0} MiB/s with any number \
             of processors",
            (memory.len() >> 20) as f64 / took,
            (memory.len() >> 20) as f64 / busiest
        );
    }
}
