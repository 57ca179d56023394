//! Locks between processes: advisory locks on files under `target/lab/locks/`. The kernel releases
//! a lock when its owner ends, however it ends.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::{
    error::{Context, Error, Result},
    paths, testing,
};

/// A lock that is held as long as this value lives.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock called `name`.
    ///
    /// # Errors
    /// If the lock's file cannot be made.
    pub fn wait(name: &str) -> Result<Self> {
        let file = open(&paths::lab_dir("locks")?.join(name))?;
        flock(&file, FlockOperation::LockExclusive).context(|| format!("lock {name}"))?;
        Ok(Self { _file: file })
    }

    /// Takes the lock on the file at `path`, unless another process holds it.
    ///
    /// # Errors
    /// If the lock's file cannot be made.
    pub fn take(path: &Path) -> Result<Option<Self>> {
        let file = open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error).context(|| format!("lock {}", path.display())),
        }
    }
}

fn open(path: &Path) -> Result<File> {
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .context(|| format!("open {}", path.display()))
}

/// The number of machines that may run at once from one checkout, whichever processes start them.
const SLOTS: usize = 2;

/// The right to run a number of machines at once. [`Reservation::times`] records how long each was
/// held.
#[derive(Debug)]
pub struct Reservation {
    _slots: Vec<Lock>,
    since: Instant,
}

impl Reservation {
    /// Waits until `count` more machines may run. `MERCURY_LAB_SLOTS` changes the number of slots.
    ///
    /// A test of several machines takes all its slots in one call, so that two such tests cannot
    /// wait for each other. A `count` above the number of slots takes all of them.
    ///
    /// # Errors
    /// If the locks cannot be made. [`Error::Unsupported`] if the time that all tests have together
    /// is up.
    pub fn wait(count: usize) -> Result<Self> {
        let dir = paths::lab_dir("locks")?;
        let all = slots();
        let _turn = Lock::wait("slots")?;
        let mut taken = Vec::new();
        loop {
            for slot in 0..all {
                if taken.len() < count.min(all) {
                    taken.extend(Lock::take(&dir.join(format!("slot-{slot}")))?);
                }
            }
            if time_is_up() {
                return Err(Error::Unsupported {
                    reason: "the time for all tests was up before this test began",
                });
            }
            if taken.len() >= count.min(all) {
                return Ok(Self { _slots: taken, since: Instant::now() });
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the file that records how long each reservation was held. A line is the seconds, a
    /// space, and the thread's name, which in tests is the test's.
    ///
    /// # Errors
    /// If the file's directory cannot be made.
    pub fn times() -> Result<PathBuf> {
        Ok(paths::lab_dir("log")?.join("reservations"))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let seconds = self.since.elapsed().as_secs();
        let line = format!("{seconds} {}\n", thread::current().name().unwrap_or("main"));
        let Ok(path) = Self::times() else { return };
        let _ = File::options()
            .create(true)
            .append(true)
            .open(path)
            .map(|mut file| file.write_all(line.as_bytes()));
    }
}

/// Returns true if no further test should begin.
fn time_is_up() -> bool {
    let deadline = std::env::var(testing::DEADLINE).ok().and_then(|text| text.parse().ok());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    deadline.is_some_and(|second: u64| now.as_secs() > second)
}

fn slots() -> usize {
    let set = std::env::var("MERCURY_LAB_SLOTS").ok().and_then(|text| text.parse().ok());
    set.filter(|slots| *slots > 0).unwrap_or(SLOTS)
}
