//! The signals that ask a guest to end. A thread waits for them, so that they come at no other moment.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::signals::start_thread;
use mercury_guest::run::Handle;
use mercury_guests::Name;
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

    /// Starts the thread. A signal ends the program until a machine is complete: nothing has gone on.
    ///
    /// # Errors
    /// The host has no room for a thread.
    pub fn watch(self) -> Result<Stopping> {
        let stopping = Stopping::default();
        let course = Arc::clone(&stopping.0);
        start_thread("signals", move || {
            loop {
                let mut signal = 0;
                // SAFETY: The set was made by `block`.
                unsafe { libc::sigwait(&raw const self.set, &raw mut signal) };
                let mut course = course.lock().unwrap_or_else(PoisonError::into_inner);
                match course.reaction(signal, self.ending) {
                    // The folder of the guest has a process that removes it.
                    Reaction::Exit => std::process::exit(Exit::Interrupted as i32),
                    Reaction::Stop(guest) => guest.stop(),
                    Reaction::Say(text) => note!("mercury: {text}"),
                    Reaction::Nothing => {}
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

/// The stage of a machine, on which the meaning of a signal depends.
#[derive(Default)]
enum Stage {
    /// No machine is here, or one that is not complete.
    #[default]
    Before,
    /// A machine has arrived that no instruction has run of. Its source may be lost.
    Complete(Name),
    Running(Handle),
}

#[derive(Default)]
struct Course {
    stage: Stage,
    /// True if a signal has asked for the end while a machine was complete.
    is_over: bool,
}

/// The consequence of a signal.
enum Reaction {
    /// The program ends.
    Exit,
    Stop(Handle),
    Say(String),
    Nothing,
}

impl Course {
    fn reaction(&mut self, signal: libc::c_int, ending: &[libc::c_int]) -> Reaction {
        match &self.stage {
            Stage::Before => Reaction::Exit,
            Stage::Running(guest) if ending.contains(&signal) => Reaction::Stop(guest.clone()),
            Stage::Running(_) => Reaction::Nothing,
            Stage::Complete(name) => match signal {
                libc::SIGTERM => {
                    self.is_over = true;
                    Reaction::Say(format!("{name} is discarded: this command was asked to end"))
                }
                libc::SIGINT => Reaction::Say(format!(
                    "{name} has arrived whole, and its source may be lost: Ctrl-C does not end it. `mercury \
                     guests discard {name}` discards it, and `mercury guests adopt {name}` starts it"
                )),
                // The terminal ends, and not the only copy of a machine.
                _ => Reaction::Nothing,
            },
        }
    }
}

/// The machine that a signal is for.
#[derive(Clone, Default)]
pub struct Stopping(Arc<Mutex<Course>>);

impl Stopping {
    /// Holds signals back while this value lives. A guest that is handed over by it is ended by a signal of
    /// that time.
    pub fn hold(&self) -> Held<'_> {
        Held(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns true if a signal has asked for the end while a machine was complete. The machine is then to
    /// be discarded in order, so that its source hears of it.
    pub fn is_over(&self) -> bool {
        self.hold().0.is_over
    }
}

/// Signals that are held back.
pub struct Held<'a>(MutexGuard<'a, Course>);

impl Held<'_> {
    /// Keeps a complete machine from signals other than SIGTERM, which discards it.
    pub fn protect(mut self, name: Name) {
        self.0.stage = Stage::Complete(name);
    }

    /// Lets any signal end the program again: the machine that was complete is no more.
    pub fn release(mut self) {
        self.0.stage = Stage::Before;
    }

    /// Lets signals end this guest from now on. A start that has overtaken a signal counts: the source has
    /// given the machine up.
    pub fn hand_over(mut self, guest: Handle) {
        if std::mem::take(&mut self.0.is_over) {
            note!("mercury: its source has just said that it is to start: it goes on, and the wait with it");
        }
        self.0.stage = Stage::Running(guest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The terminal, its Ctrl-C, and a logout must not take the only copy of a machine. `guests stop` sends
    /// SIGTERM, and discards it in order.
    #[test]
    fn no_signal_takes_a_complete_machine_away_at_once() {
        let stopping = Stopping::default();
        let reaction = |signal| stopping.hold().0.reaction(signal, &[libc::SIGTERM]);
        assert!(SIGNALS.iter().all(|signal| matches!(reaction(*signal), Reaction::Exit)));
        stopping.hold().protect(Name::of_machine("node7"));
        assert!(matches!(reaction(libc::SIGHUP), Reaction::Nothing));
        let Reaction::Say(text) = reaction(libc::SIGINT) else { panic!("Ctrl-C says nothing") };
        assert!(text.contains("guests discard node7") && text.contains("guests adopt node7"), "{text}");
        assert!(!stopping.is_over());
        assert!(matches!(reaction(libc::SIGTERM), Reaction::Say(_)));
        assert!(stopping.is_over());
        stopping.hold().release();
        assert!(matches!(reaction(libc::SIGHUP), Reaction::Exit));
    }
}
