//! The end of a workload: a deadline, a file that appears, SIGTERM or SIGINT, whichever comes
//! first.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

static SIGNALLED: AtomicBool = AtomicBool::new(false);

/// The ways to end a workload.
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// End after this many seconds
    #[arg(long, global = true)]
    seconds: Option<f64>,
    /// End when this file exists
    #[arg(long, global = true, value_name = "FILE")]
    until_file: Option<PathBuf>,
}

/// The state of a workload's end.
#[derive(Debug)]
pub struct Stop {
    deadline: Option<Instant>,
    file: Option<PathBuf>,
    seen: AtomicBool,
}

extern "C" fn on_signal(_signal: i32) {
    SIGNALLED.store(true, Ordering::Relaxed);
}

impl Stop {
    /// Handles SIGTERM and SIGINT from now on.
    pub fn new(args: &StopArgs) -> Self {
        let handler: extern "C" fn(i32) = on_signal;
        for signal in [libc::SIGTERM, libc::SIGINT] {
            // SAFETY: the handler only stores to an atomic.
            unsafe { libc::signal(signal, handler as libc::sighandler_t) };
        }
        let deadline = args.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
        Self { deadline, file: args.until_file.clone(), seen: AtomicBool::new(false) }
    }

    /// Returns true if the workload is to end. Checks all ways, with a system call or two.
    pub fn now(&self) -> bool {
        let now = self.is_set()
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
            || self.file.as_ref().is_some_and(|file| file.exists());
        if now {
            self.set();
        }
        now
    }

    /// Returns true if a thread has found that the workload is to end. Makes no system call.
    pub fn is_set(&self) -> bool {
        self.seen.load(Ordering::Relaxed) || SIGNALLED.load(Ordering::Relaxed)
    }

    /// Ends the workload for all threads.
    pub fn set(&self) {
        self.seen.store(true, Ordering::Relaxed);
    }

    /// Waits for the end, and checks ten times a second.
    pub fn wait(&self) {
        while !self.now() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}
