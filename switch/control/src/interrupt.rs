//! Ctrl-C and SIGTERM as a request to stop at the next safe point.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

static REQUESTED: AtomicBool = AtomicBool::new(false);

const SIGNALS: [i32; 2] = [libc::SIGINT, libc::SIGTERM];

extern "C" fn remember(_: i32) {
    REQUESTED.store(true, Ordering::Relaxed);
}

/// A guard during whose life Ctrl-C and SIGTERM are remembered instead of ending the process.
#[derive(Debug)]
pub struct Deferred {
    before: [libc::sigaction; 2],
}

impl Deferred {
    /// Begins to defer the signals.
    #[must_use]
    pub fn begin() -> Self {
        Self { before: SIGNALS.map(|signal| replace(signal, &remembering())) }
    }

    /// Returns true after one of the signals.
    #[must_use]
    pub fn requested(&self) -> bool {
        requested()
    }

    /// Sleeps for `time`, or until one of the signals has come.
    pub fn sleep(&self, time: Duration) {
        let begun = Instant::now();
        while !self.requested() && begun.elapsed() < time {
            thread::sleep(Duration::from_millis(50).min(time));
        }
    }
}

/// Returns true after one of the signals came while they were deferred.
#[must_use]
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

impl Drop for Deferred {
    fn drop(&mut self) {
        for (signal, before) in SIGNALS.iter().zip(&self.before) {
            replace(*signal, before);
        }
    }
}

fn remembering() -> libc::sigaction {
    // SAFETY: all zeroes is a valid sigaction: default handler, empty mask, no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = remember as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    action
}

fn replace(signal: i32, action: &libc::sigaction) -> libc::sigaction {
    // SAFETY: as in `remembering`.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: both references are valid. The only handler installed here stores to an atomic, which
    // is async-signal-safe. The action that is put back later is the one that the kernel returned.
    let result = unsafe { libc::sigaction(signal, action, &mut before) };
    debug_assert_eq!(result, 0);
    before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_remembered() {
        let deferred = Deferred::begin();
        // SAFETY: raises a signal for which a handler has just been installed.
        unsafe { libc::raise(libc::SIGTERM) };
        assert!(deferred.requested());
        let begun = Instant::now();
        deferred.sleep(Duration::from_secs(100));
        assert!(begun.elapsed() < Duration::from_secs(50));
    }
}
