//! The signals that ask a guest to end. A thread waits for them, so that they come at no other moment.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::signals::start_thread;
use mercury_guest::run::Handle;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Signals that end the program, or its guest.
pub const SIGNALS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The signals, blocked in this thread and in all that it starts.
pub struct Signals {
    set: libc::sigset_t,
    /// Those that end a guest that runs. The others are for the time before.
    ending: &'static [libc::c_int],
}

impl Signals {
    /// Blocks them.
    ///
    /// # Errors
    /// The host does not.
    pub fn block(ending: &'static [libc::c_int]) -> Result<Self> {
        // SAFETY: The set is filled before it is used.
        let (set, refused) = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            SIGNALS.iter().for_each(|signal| {
                libc::sigaddset(&raw mut set, *signal);
            });
            (set, libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()))
        };
        if refused != 0 {
            return Err(Error::new(Exit::Failed, "cannot block signals")
                .hint("let the monitor call rt_sigprocmask(2): a filter of system calls forbids it"));
        }
        Ok(Self { set, ending })
    }

    /// Starts the thread. Until a guest is handed over, a signal ends the program: nothing has gone on.
    ///
    /// # Errors
    /// The host has no room for a thread.
    pub fn watch(self) -> Result<Stopping> {
        let stopping = Stopping::default();
        let guest = Arc::clone(&stopping.0);
        start_thread("signals", move || {
            loop {
                let mut signal = 0;
                // SAFETY: The set was made by `block`.
                unsafe { libc::sigwait(&raw const self.set, &raw mut signal) };
                match &*guest.lock().unwrap_or_else(PoisonError::into_inner) {
                    Some(guest) if self.ending.contains(&signal) => guest.stop(),
                    Some(_) => {}
                    // The folder of the guest has a process that removes it.
                    None => std::process::exit(Exit::Interrupted as i32),
                }
            }
        })
        .map_err(|error| {
            Error::new(Exit::Failed, format!("cannot start a thread for signals: {error}"))
                .hint(mercury_guest::SHORT_OF)
        })?;
        Ok(stopping)
    }
}

/// The guest that a signal ends.
#[derive(Clone, Default)]
pub struct Stopping(Arc<Mutex<Option<Handle>>>);

impl Stopping {
    /// Holds signals back while this value lives. A guest that is handed over by it is ended by a signal of
    /// that time.
    pub fn hold(&self) -> Held<'_> {
        Held(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Signals that are held back.
pub struct Held<'a>(MutexGuard<'a, Option<Handle>>);

impl Held<'_> {
    /// Lets signals end this guest from now on.
    pub fn hand_over(mut self, guest: Handle) {
        *self.0 = Some(guest);
    }
}
