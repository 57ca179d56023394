//! Reservations of machines: only a few machines run at once from one checkout, whichever processes start
//! them. Everything that a machine is made of is built before it is reserved, because others wait for it.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::{
    artefacts, emulator,
    error::{Error, Result},
    kernel::Kernel,
    lock::Lock,
    paths, testing,
};

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
    /// Builds what machines with these kernels are made of. Then waits until `count` more machines may
    /// run. `MERCURY_LAB_SLOTS` changes the number of slots.
    ///
    /// A test of several machines takes all its slots in one call, so that two such tests cannot
    /// wait for each other. A `count` above the number of slots takes all of them.
    ///
    /// # Errors
    /// If something does not build, or the locks cannot be made. [`Error::Unsupported`] if the time that
    /// all tests have together is up.
    pub fn of(count: usize, kernels: &[Kernel]) -> Result<Self> {
        let build = || {
            kernels.iter().try_for_each(|kernel| artefacts::ensure(kernel.release()).map(drop))?;
            emulator::ensure()
        };
        Self::after(build, &paths::lab_dir("locks")?, count.min(slots()), slots())
    }

    /// Waits until one more machine may run, whose parts are built.
    ///
    /// # Errors
    /// As for [`Reservation::of`].
    pub(crate) fn of_built() -> Result<Self> {
        Self::after(|| Ok(()), &paths::lab_dir("locks")?, 1, slots())
    }

    fn after(build: impl FnOnce() -> Result<()>, dir: &Path, count: usize, all: usize) -> Result<Self> {
        build()?;
        let _turn = Lock::at(&dir.join("slots"))?;
        let mut taken = Vec::new();
        loop {
            for slot in 0..all {
                if taken.len() < count {
                    taken.extend(Lock::take(&dir.join(format!("slot-{slot}")))?);
                }
            }
            if time_is_up() {
                return Err(Error::Unsupported {
                    reason: "the time for all tests was up before this test began",
                });
            }
            if taken.len() >= count {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_reserved_while_parts_are_built() {
        let dir = std::env::temp_dir().join(format!("mercury-lab-slots-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let free = || {
            let taken = ["slot-0", "slot-1"].map(|slot| Lock::take(&dir.join(slot)).unwrap());
            taken.iter().flatten().count()
        };
        let build = || {
            assert_eq!(free(), 2);
            assert!(Lock::take(&dir.join("slots")).unwrap().is_some(), "it is nobody's turn");
            Ok(())
        };
        let reserved = Reservation::after(build, &dir, 1, 2).unwrap();
        assert_eq!(free(), 1);
        drop(reserved);
        // A process that another test starts has this one's locks until it executes its program.
        let is_free = (0..100).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            free() == 2
        });
        assert!(is_free);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
