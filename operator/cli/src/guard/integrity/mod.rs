//! Integrity: code and constants of the kernel and of its modules are compared with a copy, and mended. CPUs'
//! registers are compared with what they were.
//!
//! * [`memory`]: the kernel's memory; [`layout`]: the places of code and constants;
//! * [`copy`]: the copy; [`sites`]: changes that the kernel makes itself; [`pokes`]: its locks and records
//!   while it makes them; [`look`]: a close look at what differs;
//! * [`stores`]: stores to code and constants, seen while they are made; [`frames`]: the physical memory of
//!   both;
//! * [`registers`]: registers of the CPUs; [`scrub`]: a pass over all; [`report`]: what was found.
//!
//! All of it runs in user space. The driver writes the bytes that are mended (`switch/driver/watch/mend.c`).

pub mod copy;
pub mod frames;
pub mod layout;
pub mod look;
pub mod memory;
pub mod pokes;
pub mod registers;
pub mod report;
pub mod scrub;
pub mod sites;
pub mod stores;

use mercury_abi::code::Code;
use mercury_control::error::{Error, Result};
use report::State;
use scrub::Scrubber;
use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Opens the copy, or takes it.
///
/// # Errors
///
/// Returns an error if the kernel's memory cannot be read.
pub fn open() -> Result<Scrubber> {
    Scrubber::open(Path::new(copy::FOLDER)).map_err(unreadable)
}

/// Gives the copy up.
///
/// # Errors
///
/// Returns an error if it cannot be removed.
pub fn forget() -> Result<()> {
    stores::leave();
    match std::fs::remove_dir_all(copy::FOLDER) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(unreadable(error)),
        _ => Ok(()),
    }
}

/// Returns what the passes so far have found; none if there is no copy.
#[must_use]
pub fn state() -> Option<State> {
    State::read(Path::new(copy::FOLDER))
}

/// Converts an error of a pass.
fn unreadable(error: io::Error) -> Error {
    Error::coded(Code::IntegrityUnreadable, format!("the kernel's code cannot be compared: {error}"))
        .hint("`mercury explain integrity-unreadable` has the reasons")
}

/// The passes of a daemon, in a thread of their own.
#[derive(Debug)]
pub struct Passes {
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
    said: Receiver<Said>,
}

/// News of the passes.
#[derive(Debug)]
pub enum Said {
    /// The copy is there.
    Begun(State),
    Found(report::Finding),
    Failed(String),
}

/// Interval at which the end is looked for.
const NAP: Duration = Duration::from_millis(100);
/// Interval at which stores are looked for.
const GLANCE: Duration = Duration::from_millis(500);

impl Passes {
    /// Starts the passes.
    #[must_use]
    pub fn begin(mends: bool, stores: bool, every: Duration) -> Self {
        let (say, said) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        let thread = thread::spawn(move || run(mends, stores, every, &say, &stops));
        Self { thread, stop, said }
    }

    /// Returns the news.
    pub fn news(&self) -> impl Iterator<Item = Said> {
        self.said.try_iter()
    }

    /// Ends the passes. The copy stays, so that the next daemon compares with the same.
    pub fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
    }
}

/// Makes passes until it is told to stop, or the copy is given up.
fn run(mends: bool, stores: bool, every: Duration, say: &Sender<Said>, stop: &AtomicBool) {
    // A daemon that ends listens no more.
    let say = |said| say.send(said).unwrap_or_default();
    let opened = open().and_then(|mut scrubber| scrubber.prepare().map(|()| scrubber));
    let mut scrubber = match opened {
        Ok(scrubber) => scrubber,
        Err(error) => return say(Said::Failed(error.to_string())),
    };
    if stores {
        scrubber.watch_stores();
    }
    say(Said::Begun(scrubber.state().clone()));
    let mut failed = false;
    while !stop.load(Ordering::Relaxed) && scrubber.is_there() {
        let began = Instant::now();
        let found = scrubber.pass(mends);
        let failed_before = std::mem::replace(&mut failed, found.is_err());
        match found {
            Ok(findings) => findings.into_iter().for_each(|finding| say(Said::Found(finding))),
            // Each run of failures once.
            Err(error) if !failed_before && scrubber.is_there() => say(Said::Failed(error.to_string())),
            Err(_) => {}
        }
        let mut glance = Instant::now();
        while began.elapsed() < every && !stop.load(Ordering::Relaxed) {
            thread::sleep(NAP);
            if glance.elapsed() >= GLANCE {
                if scrubber.has_stores() {
                    break;
                }
                glance = Instant::now();
            }
        }
    }
    // After `mercury guard off` there is no state to write.
    let _ = scrubber.leave_stores();
    if !stop.load(Ordering::Relaxed) {
        say(Said::Failed("the copy of code and constants was removed, and nothing is compared".into()));
    }
}
