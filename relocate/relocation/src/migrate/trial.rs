//! A move on trial. The source's real loop ([`super::mover`]) runs over TCP and TLS on this host,
//! between a machine of the test, which reports every broken condition, and another end that
//! follows a script.

use super::{
    doubt::{Air, Announcements, Doubt},
    link::Link,
    log::Log,
    mirror::Mirror,
    mover::{Departure, Mover, Outcome},
    offer::Offer,
    report::MoveEvent,
    system::{After, Memory, System},
};
use crate::operator::Operator;
use crate::options::MigrateOptions;
use mercury_abi::ioctl::MERCURY_READ_LOGGED;
use mercury_control::{
    device::{Cursor, Frames},
    error::{Error, Result},
    exit::Exit,
};
use mercury_image::{FileSystem, Kind, Machine, Range};
use mercury_migration::{
    announcement::{Announcer, Secret, Speaker},
    protocol::{Attempt, Digest, Message, Patience, Tombstone, Word},
    session::{PairingToken, Receiver},
    wire::{Content, Frame, Ledger, PAGE, Page, Pages, Reader, Writer},
};
use mercury_quiesce::ethernet::Card;
use proptest::prelude::prop;
use rustls::{ServerConnection, StreamOwned};
use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap, VecDeque},
    fs::File,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixStream},
    rc::Rc,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Time for which either end may be silent in these tests.
pub const SILENCE: Duration = Duration::from_millis(150);
/// Time limit for an event that must come, on a host that may be busy.
pub const LIMIT: Duration = Duration::from_secs(60);
pub const OURS: Attempt = Attempt([1; 16]);
/// Number of pages of the machine.
pub const PAGES: u64 = 8;
pub const START: u64 = 0x10_0000;
pub const SECRET: Secret = [9; 32];

pub fn offer() -> Offer {
    let range = Range { start_phys: START, pages: PAGES, kind: Kind::Kept };
    let machine = Machine { host: "one".into(), ranges: vec![range], ..Machine::default() };
    Offer { machine, cpus: 1, disks: Vec::new(), secret: SECRET, streams: 1, is_guest: false }
}

/// The observations of a test's machine.
#[derive(Default)]
pub struct Seen {
    pages: Vec<[u8; PAGE]>,
    /// Memory as it was at the instant, until it is given up.
    instant: Option<Vec<[u8; PAGE]>>,
    /// Digest of that memory.
    digest: Option<Digest>,
    written: BTreeSet<u64>,
    collected: BTreeSet<u64>,
    pub is_fenced: bool,
    pub is_still: bool,
    /// True if only a process that knows the end of the move may let the machine go on.
    pub is_committed: bool,
    /// The tombstone, as far as it is known.
    pub tombstone: Option<Tombstone>,
    /// True if `Committed` may be in the tombstone.
    may_be_marked: bool,
    pub is_interrupted: bool,
    /// The calls of the loop, in order.
    pub did: Vec<String>,
    /// The call at which Ctrl-C comes.
    pub interrupted_at: Option<String>,
    /// The calls that fail.
    pub failing: Vec<String>,
    /// True if a tombstone whose write fails is there anyway.
    pub is_there_all_the_same: bool,
    /// True if the machine that has arrived goes on after the instant.
    pub arrives: bool,
    /// The announcements of this end, and then of the other end.
    pub to_all: Vec<Word>,
    pub from_all: VecDeque<Vec<u8>>,
    /// The words of the other end, on either way.
    pub said: Vec<Word>,
    /// True if the other end has said the digest of this machine's memory.
    pub is_verified: bool,
    pub typed: Vec<&'static str>,
    pub told: Vec<String>,
    pub broken: Vec<String>,
}

impl Seen {
    fn new() -> Self {
        let pages = (0..PAGES).map(|number| [number as u8; PAGE]).collect();
        Self { pages, ..Self::default() }
    }

    fn check(&mut self, is_so: bool, what: &str) {
        if !is_so {
            self.broken.push(format!("{what} (after {:?})", self.did));
        }
    }

    fn does(&mut self, what: &str) -> Result<()> {
        self.did.push(what.into());
        if self.interrupted_at.as_deref() == Some(what) {
            self.is_interrupted = true;
        }
        if self.failing.iter().any(|failing| failing == what) {
            return Err(Error::new(Exit::Failed, format!("{what} fails")));
        }
        Ok(())
    }

    pub fn has_done(&self, what: &str) -> bool {
        self.did.iter().any(|did| did == what)
    }

    pub fn has_said(&self, word: Word) -> bool {
        self.to_all.contains(&word)
    }

    fn frames(&self, from: &[[u8; PAGE]], cursor: &mut Cursor, count: usize, only: u64) -> Frames {
        let first = cursor.next_phys.max(START);
        let end = START + PAGES * PAGE as u64;
        let wanted = |phys: &u64| only != MERCURY_READ_LOGGED || self.collected.contains(phys);
        let phys: Vec<_> = (first..end).step_by(PAGE).filter(wanted).take(count).collect();
        let data = phys.iter().flat_map(|phys| from[((phys - START) / PAGE as u64) as usize]).collect();
        let next = phys.last().map(|last| last + PAGE as u64).filter(|next| *next < end);
        cursor.next_phys = next.unwrap_or(u64::MAX);
        Frames { phys, data, hurry: false }
    }
}

/// The observations, shared by both ends of a test.
#[derive(Clone)]
pub struct Stage(Arc<Mutex<Seen>>);

impl Stage {
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Seen::new())))
    }

    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().expect("no panic")
    }
}

impl Memory for Stage {
    fn scan(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames> {
        let mut seen = self.seen();
        let is_still = seen.is_still;
        seen.check(!is_still, "memory is read as it is now though it stands still");
        seen.does("scan")?;
        let frames = seen.frames(&seen.pages, cursor, count, only);
        // The load goes on writing.
        let number = seen.did.len() as u64 % PAGES;
        seen.pages[number as usize][7] ^= 0x55;
        seen.written.insert(START + number * PAGE as u64);
        Ok(frames)
    }

    fn read(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames> {
        let mut seen = self.seen();
        seen.does("read")?;
        let Some(pages) = seen.instant.clone() else {
            seen.check(false, "memory of an instant that was not taken");
            return Err(Error::new(Exit::Failed, "there is no instant"));
        };
        Ok(seen.frames(&pages, cursor, count, only))
    }

    fn read_hashed(&self, _: &mut Cursor, _: usize, _: u64) -> Result<(Frames, Vec<u64>)> {
        Err(Error::new(Exit::Failed, "there is no hypervisor"))
    }

    fn begin_log(&self) -> Result<()> {
        let mut seen = self.seen();
        seen.written.clear();
        seen.does("begin the log")
    }

    fn collect_log(&self) -> Result<()> {
        let mut seen = self.seen();
        seen.collected = std::mem::take(&mut seen.written);
        seen.does("collect the log")
    }
}

impl System for Stage {
    fn is_interrupted(&self) -> bool {
        self.seen().is_interrupted
    }

    fn is_alive(&mut self) {}

    fn tell(&mut self, told: &MoveEvent) {
        self.seen().told.push(serde_json::to_string(told).expect("JSON"));
    }

    fn show(&self, _: &str) {}

    fn begin_sync(&mut self) -> JoinHandle<()> {
        thread::spawn(|| ())
    }

    fn hold_back(&mut self, _: u8) -> Result<()> {
        self.seen().does("hold back")
    }

    fn fence_off(&mut self, _: SocketAddr) -> Result<()> {
        let mut seen = self.seen();
        let is_still = seen.is_still;
        seen.check(is_still, "it is fenced off from files that it asks for yet");
        seen.is_fenced = true;
        seen.does("fence off")
    }

    fn hold_still(&mut self) -> Result<()> {
        let mut seen = self.seen();
        seen.is_still = true;
        seen.does("hold still")
    }

    fn file_systems(&mut self) -> Vec<FileSystem> {
        Vec::new()
    }

    fn take_instant(&mut self) -> Result<After> {
        let mut seen = self.seen();
        let is_quiet = seen.is_still && seen.is_fenced;
        seen.check(is_quiet, "an instant while something runs");
        seen.instant = Some(seen.pages.clone());
        let mut ledger = Ledger::new(offer().memory());
        for (number, page) in seen.pages.iter().enumerate() {
            let phys = START + (number * PAGE) as u64;
            ledger.note(Page { phys, content: Content::Data(page) }).expect("it lies in there");
        }
        seen.digest = Some(ledger.digest(OURS));
        seen.does("take the instant")?;
        Ok(if seen.arrives { After::Arrived } else { After::Source })
    }

    fn end_instant(&mut self) -> Result<()> {
        let mut seen = self.seen();
        seen.instant = None;
        seen.does("end the instant")
    }

    fn commit(&mut self, doubt: Doubt, _: Option<File>) -> Result<()> {
        let mut seen = self.seen();
        let may = seen.is_still && seen.is_fenced && seen.is_verified && !seen.is_committed;
        seen.check(may, "it commits to an unverified machine, or runs");
        seen.check(doubt.attempt == OURS.0 && doubt.secret == SECRET, "another doubt");
        seen.is_committed = true;
        seen.does("commit")
    }

    fn tombstone(&mut self, tombstone: Tombstone) -> Result<(), String> {
        let mut seen = self.seen();
        let is_in_order = tombstone != Tombstone::Committed || seen.is_committed;
        seen.check(is_in_order, "a tombstone without a process that could follow");
        seen.may_be_marked |= tombstone == Tombstone::Committed;
        let done = seen.does(&format!("tombstone {tombstone:?}")).map_err(|error| error.message);
        if done.is_ok() || seen.is_there_all_the_same {
            seen.tombstone = Some(tombstone);
        }
        done
    }

    fn go_on(&mut self) {
        let mut seen = self.seen();
        seen.did.push("go on".into());
        // A failed tombstone must not stay without a promise.
        let is_promised = seen.said.contains(&Word::Discarded) || seen.typed.contains(&"resume");
        let never_said = !seen.to_all.contains(&Word::Commit);
        let is_cleared = !seen.may_be_marked || seen.tombstone == Some(Tombstone::Cleared);
        seen.check(is_promised || never_said && is_cleared, "it goes on though it may run elsewhere");
        (seen.is_still, seen.is_fenced, seen.is_committed) = (false, false, false);
    }
}

/// Frames to all, between the two ends.
struct TestAir {
    stage: Stage,
    announcer: Announcer,
}

impl std::fmt::Debug for TestAir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TestAir")
    }
}

impl Air for TestAir {
    fn say(&self, _: &Card, frame: &[u8]) {
        let Some(message) = self.announcer.hear(Speaker::Source, frame) else { return };
        let mut seen = self.stage.seen();
        let may = message.word != Word::Commit || seen.has_done("tombstone Committed") && seen.is_verified;
        seen.check(may, "a commit without a tombstone");
        seen.to_all.push(message.word);
    }

    fn hear(&self) -> Option<Vec<u8>> {
        self.stage.seen().from_all.pop_front()
    }
}

pub fn announcer(token: &PairingToken) -> Announcer {
    let mut announcer = Announcer::new(token);
    announcer.know(OURS, &SECRET);
    announcer
}

pub fn args(options: &str) -> MigrateOptions {
    MigrateOptions::of(options)
}

/// The end of the source.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    Arrived,
    GivenUp,
    Resumed(String),
}

/// Runs the loop, with a destination at this address.
pub fn moves(
    stage: &Stage,
    (to, token): (SocketAddr, PairingToken),
    offer: Offer,
    patience: Duration,
    console: UnixStream,
) -> Ended {
    let link = Link::connect(to, &token, LIMIT).expect("taken");
    link.be_patient(patience);
    let air = TestAir { stage: stage.clone(), announcer: announcer(&token) };
    let card = Card { up: true, ..Card::default() };
    console.set_nonblocking(true).expect("set");
    let departure = Departure {
        attempt: OURS,
        to,
        announcements: Announcements::by(Box::new(air), &token, OURS, &SECRET, vec![card]),
        token,
        link,
        offer,
        bridges: Vec::new(),
        memory: stage,
        log: Log::Prepared,
        proof: None,
        mirror: Mirror::default(),
        operator: Operator::at_test(File::from(OwnedFd::from(console))),
    };
    let patience = Patience { running: patience, frozen: patience, doubt: patience, hold: None };
    let (args, mut system) = (args(""), stage.clone());
    let mut mover = Mover::new(&args, &mut system, patience, departure).expect("begun");
    let outcome = mover.run();
    let why = mover.into_remains().failure.map(|failure| failure.message).unwrap_or_default();
    match outcome {
        Outcome::Arrived(_) => Ended::Arrived,
        Outcome::GivenUp => Ended::GivenUp,
        Outcome::Resumed => Ended::Resumed(why),
    }
}

/// An act of the other end. Acts are carried out in order.
#[derive(Clone, Debug)]
pub enum Act {
    /// Waits until the source has said the word on the connection; its fields do not count.
    Await(Word),
    /// Waits until the machine has done the call.
    AwaitDone(&'static str),
    /// Says the word on the connection, with so many bytes of text.
    Say(Word, usize),
    /// Says the digest of the data that has arrived.
    SayVerified,
    /// Announces the word to all.
    Announce(Word),
    Round,
    Pages,
    /// Sends bytes as they are.
    Raw(Vec<u8>),
    /// Turns this bit in the next word, at a position in it; or cuts it there, if the number is no
    /// bit.
    Damage(prop::sample::Index, u8),
    Close,
    /// Waits in silence for so many milliseconds.
    Wait(u64),
    /// Does this for a minute, or until the source's end.
    Flood(Box<Self>),
    /// Ctrl-C at the source.
    Interrupt,
    /// The operator at the source types this.
    Type(&'static str),
}

/// Returns the acts of an honest destination.
pub fn honest() -> Vec<Act> {
    vec![
        Act::Await(Word::Offer),
        Act::Say(Word::Accept, 0),
        Act::Await(Word::Final(Digest([0; 32]))),
        Act::SayVerified,
        Act::Await(Word::Commit),
        Act::Say(Word::Started, 0),
    ]
}

type Tls = StreamOwned<ServerConnection, TcpStream>;

/// The session, shared by reader and writer.
#[derive(Clone)]
struct Shared(Rc<RefCell<Tls>>);

impl Read for Shared {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.borrow_mut().read(buffer)
    }
}

struct Peer {
    stage: Stage,
    session: Option<Shared>,
    reader: Option<Reader<Shared>>,
    writer: Writer<Vec<u8>>,
    /// Number of the next round.
    round: u64,
    announcer: Announcer,
    console: UnixStream,
    came: HashMap<u64, [u8; PAGE]>,
    damage: Option<(prop::sample::Index, u8)>,
    is_over: Arc<AtomicBool>,
}

impl Peer {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Await(word) => self.until(std::mem::discriminant(word)),
            Act::AwaitDone(what) => {
                while !self.is_over() && !self.stage.seen().has_done(what) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            Act::Say(word, length) => {
                self.notes(*word);
                self.writer.say(*word, &vec![0xff; *length]).expect("written");
                self.flush();
            }
            Act::SayVerified => {
                let digest = self.digest();
                self.act(&Act::Say(Word::Verified(digest), 0));
            }
            Act::Announce(word) => {
                self.notes(*word);
                let frame = self.announcer.say(Speaker::Destination, Message { attempt: OURS, word: *word });
                self.stage.seen().from_all.push_back(frame.to_vec());
            }
            Act::Round => {
                self.writer.round(self.round).expect("written");
                self.round += 1;
                self.flush();
            }
            Act::Pages => {
                let mut pages = Pages::default();
                pages.add(START, &[1; PAGE]);
                self.writer.pages(&pages.pack(1).expect("packed")).expect("written");
                self.flush();
            }
            Act::Raw(bytes) => self.put(bytes),
            Act::Damage(at, bit) => self.damage = Some((*at, *bit)),
            Act::Close => (self.session, self.reader) = (None, None),
            Act::Wait(ms) => thread::sleep(Duration::from_millis(*ms)),
            Act::Flood(act) => {
                let end = Instant::now() + LIMIT;
                while !self.is_over() && Instant::now() < end {
                    self.act(act);
                    thread::sleep(SILENCE / 4);
                }
            }
            Act::Interrupt => self.stage.seen().is_interrupted = true,
            Act::Type(word) => self.types(word),
        }
    }

    fn types(&mut self, word: &'static str) {
        self.stage.seen().typed.push(word);
        let _ = writeln!(self.console, "{word}");
    }

    /// Notes a word before it is said.
    fn notes(&self, word: Word) {
        let mut seen = self.stage.seen();
        seen.is_verified |= matches!(word, Word::Verified(digest) if Some(digest) == seen.digest);
        seen.said.push(word);
    }

    fn flush(&mut self) {
        let mut bytes = std::mem::take(self.writer.get_mut());
        match self.damage.take().map(|(at, bit)| (at.index(bytes.len()), bit)) {
            Some((at, bit)) if bit < 8 => bytes[at] ^= 1 << bit,
            Some((at, _)) => bytes.truncate(at),
            None => {}
        }
        self.put(&bytes);
    }

    /// Sends bytes; the other end may be gone.
    fn put(&mut self, bytes: &[u8]) {
        if let Some(session) = &self.session {
            let mut session = session.0.borrow_mut();
            let _ = session.write_all(bytes).and_then(|()| session.flush());
        }
    }

    fn digest(&self) -> Digest {
        let mut ledger = Ledger::new(offer().memory());
        for (phys, page) in &self.came {
            let _ = ledger.note(Page { phys: *phys, content: Content::Data(page) });
        }
        if ledger.is_complete() { ledger.digest(OURS) } else { Digest([0; 32]) }
    }

    /// Reads until this word is said, or the connection ends.
    fn until(&mut self, wanted: std::mem::Discriminant<Word>) {
        let Some(session) = &self.session else { return };
        if self.reader.is_none() {
            let opened = Reader::open(session.clone()).and_then(|reader| reader.expect(OURS, 0));
            self.reader = opened.ok();
        }
        while let Some(Ok(Some(frame))) = self.reader.as_mut().map(Reader::next_frame) {
            match frame {
                Frame::Message(message, _) => {
                    self.hears(message.word);
                    if std::mem::discriminant(&message.word) == wanted {
                        return;
                    }
                }
                Frame::Pages(pages) => {
                    for Page { phys, content } in pages.iter() {
                        let page = match content {
                            Content::Data(bytes) => *bytes,
                            Content::Zero => [0; PAGE],
                        };
                        self.came.insert(phys, page);
                    }
                }
                _ => {}
            }
        }
        (self.session, self.reader) = (None, None);
    }

    fn hears(&self, word: Word) {
        let digest = self.digest();
        let mut seen = self.stage.seen();
        match word {
            Word::Final(said) => {
                let is_so = said == digest && Some(said) == seen.digest;
                seen.check(is_so, "what has come is not what was there at the instant");
            }
            Word::Commit => {
                let may = seen.has_done("tombstone Committed") && seen.is_verified;
                seen.check(may, "a commit without a tombstone");
            }
            _ => {}
        }
    }

    /// Waits for the end of the source. When nothing else can end it, the operator does.
    fn rest(mut self, last_word: &'static str) {
        let begun = Instant::now();
        while !self.is_over() {
            if begun.elapsed() > SILENCE * 4 {
                self.types(last_word);
            }
            let Some(session) = &self.session else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            let mut session = session.0.borrow_mut();
            let _ = session.sock.set_read_timeout(Some(Duration::from_millis(5)));
            let _ = session.read(&mut [0; 4096]);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Runs a source with another end that carries out `acts`, in a session. If nothing else ends the
/// source, its operator types `last_word`.
pub fn plays(stage: &Stage, acts: &[Act], patience: Duration, last_word: &'static str) -> Ended {
    plays_by(stage, offer(), acts, patience, last_word)
}

/// Runs the same with another offer. Only one connection is accepted.
pub fn plays_by(
    stage: &Stage,
    offer: Offer,
    acts: &[Act],
    patience: Duration,
    last_word: &'static str,
) -> Ended {
    let (receiver, token) = Receiver::new(LIMIT).expect("a receiver");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let to = listener.local_addr().expect("its address");
    let (console, terminal) = UnixStream::pair().expect("a pair");
    let is_over = Arc::<AtomicBool>::default();
    let ended = thread::scope(|scope| {
        let (peer_over, peer_stage, announcer) = (Arc::clone(&is_over), stage.clone(), announcer(&token));
        let peer = scope.spawn(move || {
            let (socket, _) = listener.accept().expect("a source");
            drop(listener);
            socket.set_read_timeout(Some(LIMIT)).expect("set");
            let session = receiver.accept(socket).expect("it has the token");
            let mut peer = Peer {
                stage: peer_stage,
                session: Some(Shared(Rc::new(RefCell::new(session)))),
                reader: None,
                writer: Writer::begin(Vec::new(), OURS, 0).expect("begun"),
                round: 0,
                announcer,
                console: terminal,
                came: HashMap::new(),
                damage: None,
                is_over: peer_over,
            };
            acts.iter().for_each(|act| peer.act(act));
            peer.rest(last_word);
        });
        let ended = moves(stage, (to, token), offer, patience, console);
        is_over.store(true, Ordering::Relaxed);
        peer.join().expect("the other end does not panic");
        ended
    });
    judge(stage, &ended);
    ended
}

/// Checks the conditions that hold in the end, whatever was said and whatever has failed.
pub fn judge(stage: &Stage, ended: &Ended) {
    let mut seen = stage.seen();
    match ended {
        Ended::Resumed(_) => {
            let runs = !seen.is_still && !seen.is_fenced && !seen.is_committed && seen.has_done("go on");
            seen.check(runs, "it has resumed and does not run");
        }
        Ended::GivenUp => {
            let may = seen.said.contains(&Word::Started) || seen.typed.contains(&"abandon");
            let is_right =
                may && seen.is_still && seen.is_fenced && seen.is_committed && !seen.has_done("go on");
            seen.check(is_right, "it is given up although no answer says that it runs elsewhere");
        }
        Ended::Arrived => {
            let is_right = seen.arrives && seen.to_all.is_empty() && !seen.is_committed;
            seen.check(is_right, "it has arrived and takes itself for the source");
        }
    }
    assert_eq!(seen.broken, Vec::<String>::new(), "{ended:?}: said {:?}, typed {:?}", seen.said, seen.typed);
}
