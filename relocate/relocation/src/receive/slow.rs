//! A destination that is slow, and the real loops of both ends: [`super::serve`] here, and the source's over
//! TCP and TLS on this host. The destination has no announcements, as a user without CAP_NET_RAW: only the
//! connection carries words. Whatever is slow, the machine runs at one end, or an operator decides.

use super::{
    serve::Host,
    spare::{Memory, Progress, Spare},
};
use crate::{
    migrate::{
        offer::{Offer, OfferedDisk},
        trial::{self, Ended, Stage},
    },
    operator::Operator,
};
use mercury_abi::restart::{LoadEntry, MERCURY_LOAD_DATA};
use mercury_control::error::{Error, Result};
use mercury_image::{FileSystem, Machine};
use mercury_migration::{
    protocol::{Attempt, Patience, Word},
    session::Receiver,
    wire::{Chunks, PAGE},
};
use mercury_quiesce::ethernet::Card;
use std::{
    collections::HashMap,
    io::Write,
    net::TcpListener,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A tenth of the time for which a source is silent while applications stand still.
const SILENCE: Duration = Duration::from_secs(2);

/// What is slow.
#[derive(Clone, Copy, Debug, Default)]
struct Slow {
    /// Time that the disks take to make writes last.
    disks: Duration,
    /// Time for which this end does nothing at all before that.
    hangs: Duration,
    /// Time until the started machine says that it runs; `None`: never.
    start: Option<Duration>,
    /// Time until the started machine ends; `None`: never.
    end: Option<Duration>,
    /// Time for which a bare destination stands still in a start that fails; `None`: the host is in use.
    bare: Option<Duration>,
}

/// The memory that has arrived.
#[derive(Default)]
struct Shelf(Mutex<HashMap<u64, Vec<u8>>>);

impl Memory for Shelf {
    fn load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()> {
        let mut pages = data.chunks(PAGE);
        for entry in entries {
            let is_data = entry.source == MERCURY_LOAD_DATA;
            let page = if is_data { pages.next().expect("data").to_vec() } else { vec![0; PAGE] };
            self.0.lock().expect("no panic").insert(entry.frame_phys, page);
        }
        Ok(())
    }

    fn read_back(&self, entries: &[LoadEntry]) -> Result<Vec<u8>> {
        let pages = self.0.lock().expect("no panic");
        Ok(entries.iter().flat_map(|entry| pages[&entry.frame_phys].clone()).collect())
    }
}

/// A destination's machine that is slow.
struct Fake {
    slow: Slow,
    stage: Stage,
    shelf: Arc<Shelf>,
    started: Arc<Mutex<Option<Instant>>>,
}

impl Spare for Fake {
    fn prepare(&mut self, _: &Offer) -> Result<(), String> {
        Ok(())
    }

    fn memory(&self) -> Arc<dyn Memory> {
        Arc::<Shelf>::clone(&self.shelf)
    }

    fn write_disk(&mut self, _: &Chunks) -> Result<()> {
        Err(Error::fault("no disk was offered"))
    }

    fn describe(&mut self, _: &Machine) {
        thread::sleep(self.slow.hangs);
    }

    fn complete_disks(&mut self, _: &[OfferedDisk], _: Attempt) -> Result<(), String> {
        thread::sleep(self.slow.disks);
        // The loop has compared the memory before.
        self.stage.seen().is_verified = true;
        Ok(())
    }

    fn go(&mut self) -> Result<()> {
        if let Some(time) = self.slow.bare {
            thread::sleep(time);
            return Err(Error::fault("its CPUs have not met"));
        }
        *self.started.lock().expect("no panic") = Some(Instant::now());
        self.stage.seen().said.push(Word::Started);
        Ok(())
    }

    fn progress(&self) -> Progress {
        let Some(at) = *self.started.lock().expect("no panic") else { return Progress::Starting };
        let is_over = |time: Option<Duration>| time.is_some_and(|time| at.elapsed() >= time);
        match (is_over(self.slow.end), is_over(self.slow.start)) {
            (true, _) => Progress::Ended,
            (_, true) => Progress::Running,
            _ => Progress::Starting,
        }
    }

    fn release(&mut self) -> Result<()> {
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

/// The end of a move to a slow destination.
struct Played {
    ended: Ended,
    /// True if the machine was started at the destination.
    is_started: bool,
    told: String,
}

/// Moves a machine to a slow destination. Types `word` at the source after `after`, if the move has not ended.
fn plays(slow: Slow, silence: Duration, (after, word): (Duration, &'static str)) -> Played {
    let (receiver, token) = Receiver::new(trial::LIMIT).expect("a receiver");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let to = listener.local_addr().expect("its address");
    let (stage, started) = (Stage::new(), Arc::<Mutex<_>>::default());
    let (is_over, stops) = (AtomicBool::new(false), AtomicBool::new(false));
    let fake = Fake { slow, stage: stage.clone(), shelf: Arc::default(), started: Arc::clone(&started) };
    let (console, mut terminal) = UnixStream::pair().expect("a pair");
    let ended = thread::scope(|scope| {
        let (is_over, stops, stage) = (&is_over, &stops, &stage);
        scope.spawn(move || {
            let patience = Patience { frozen: silence, ..Patience::default() };
            let host = Host::new(receiver, listener, Box::new(fake), patience, Operator::default());
            host.serve_while(&|| !stops.load(Ordering::Relaxed)).expect("it goes on");
        });
        scope.spawn(move || {
            let end = Instant::now() + after;
            while !is_over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(20));
                if Instant::now() > end {
                    stage.seen().typed.push(word);
                    let _ = writeln!(terminal, "{word}");
                }
            }
        });
        let ended = trial::moves(stage, (to, token), trial::offer(), silence, console);
        is_over.store(true, Ordering::Relaxed);
        // A destination that is still at work comes to its own end first.
        thread::sleep(slow.disks.min(SILENCE * 3));
        stops.store(true, Ordering::Relaxed);
        ended
    });
    trial::judge(&stage, &ended);
    let is_started = started.lock().expect("no panic").is_some();
    let told = stage.seen().told.join("\n");
    Played { ended, is_started, told }
}

/// The operator, if nothing else ends the move.
const NEVER: (Duration, &str) = (trial::LIMIT, "resume");

/// A disk takes three times as long as a destination may be silent: 60 s of 20 s in a real move. The move
/// goes on.
#[test]
fn a_slow_disk_is_waited_for() {
    let slow = Slow { disks: SILENCE * 3, start: Some(Duration::ZERO), ..Slow::default() };
    let played = plays(slow, SILENCE, NEVER);
    assert!(played.ended == Ended::GivenUp && played.is_started, "{:?}", played.ended);
    assert!(!played.told.contains("does not answer"), "{}", played.told);
}

/// A disk takes longer than six times of silence: the machine goes on at its source, and is not started
/// when the disk has answered.
#[test]
fn a_disk_that_is_too_slow_ends_the_move_at_its_source() {
    let silence = SILENCE / 2;
    let slow = Slow { disks: silence * 8, start: Some(Duration::ZERO), ..Slow::default() };
    let Played { ended, is_started, .. } = plays(slow, silence, NEVER);
    assert!(matches!(&ended, Ended::Resumed(why) if why.contains("has not verified its disks")), "{ended:?}");
    assert!(!is_started);
}

/// A destination that hangs gives no sign, and is not waited for.
#[test]
fn a_destination_that_hangs_is_not_waited_for() {
    let silence = SILENCE / 2;
    let slow = Slow { hangs: silence * 3, start: Some(Duration::ZERO), ..Slow::default() };
    let Played { ended, is_started, .. } = plays(slow, silence, NEVER);
    assert!(matches!(&ended, Ended::Resumed(why) if why.contains("does not answer")), "{ended:?}");
    assert!(!is_started);
}

/// A guest starts later than a silent connection is kept, and its host can announce nothing.
#[test]
fn a_slow_start_is_heard_on_the_connection() {
    let slow = Slow { start: Some(Duration::from_secs(7)), ..Slow::default() };
    let played = plays(slow, SILENCE, NEVER);
    assert!(played.ended == Ended::GivenUp && played.is_started, "{:?}", played.ended);
    assert!(!played.told.contains("does not"), "the operator had nothing to decide: {}", played.told);
}

/// A guest never says that it runs: the operator is told where to look, and decides.
#[test]
fn a_start_without_end_asks_the_operator() {
    let played = plays(Slow::default(), SILENCE / 2, (SILENCE * 5, "abandon"));
    assert!(played.ended == Ended::GivenUp && played.is_started, "{:?}", played.ended);
    assert!(played.told.contains("does not say yet that it runs"), "{}", played.told);
    assert!(played.told.contains("mercury guests stop NAME"), "{}", played.told);
}

/// A guest ends before it says that it runs: the operator is told that it is lost, and decides.
#[test]
fn a_guest_that_ends_in_its_start_is_lost() {
    let slow = Slow { end: Some(Duration::from_secs(1)), ..Slow::default() };
    let played = plays(slow, SILENCE, (SILENCE * 2, "resume"));
    assert!(matches!(played.ended, Ended::Resumed(_)) && played.is_started, "{:?}", played.ended);
    assert!(played.told.contains("was then restarted"), "{}", played.told);
}

/// A bare destination hangs in the start for longer than the connection is kept. The operator is told that it
/// has begun, and decides. The start fails then, so nothing runs there.
#[test]
fn a_bare_destination_that_hangs_in_its_start_is_told_of() {
    let slow = Slow { bare: Some(Duration::from_secs(9)), ..Slow::default() };
    let played = plays(slow, SILENCE * 3, (Duration::from_secs(15), "resume"));
    assert!(matches!(played.ended, Ended::Resumed(_)) && !played.is_started, "{:?}", played.ended);
    assert!(played.told.contains("has confirmed that it begins the start"), "{}", played.told);
}
