//! What can go wrong in the lab, each with the place and with what there is to look at.

use std::{fmt, io, path::PathBuf, time::Duration};

/// The lab's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The lab's errors. Printed in full by `Debug` too, so that a failed test shows what a person needs.
#[derive(thiserror::Error)]
pub enum Error {
    /// The host's system refused something.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it did not work.
        source: io::Error,
    },
    /// A program of the host's failed.
    #[error("{what}: {program} failed ({status}); the whole log is {}\n{tail}", log.display())]
    Program {
        /// What was being done.
        what: String,
        /// The program.
        program: String,
        /// Its exit status.
        status: String,
        /// All that it said.
        log: PathBuf,
        /// The last that it said.
        tail: String,
    },
    /// The host lacks something, or has it in a shape that the lab does not know.
    #[error("{0}")]
    Host(String),
    /// The machine's description contradicts itself.
    #[error("no such machine: {0}")]
    Spec(String),
    /// The emulator that was chosen cannot do this: a test that ends so counts as skipped.
    #[error("{}{reason}", Error::SKIPPED)]
    Unsupported {
        /// What it lacks.
        reason: &'static str,
    },
    /// QEMU's monitor answered with an error.
    #[error("QEMU refuses {command}: {answer}")]
    Monitor {
        /// What was asked.
        command: String,
        /// What came back.
        answer: String,
    },
    /// Something did not happen in time.
    #[error("{what}: not within {} s", limit.as_secs_f32())]
    Timeout {
        /// What was waited for.
        what: String,
        /// For how long, in wall time.
        limit: Duration,
    },
    /// The machine is not there any more.
    #[error("{0}: the machine has gone")]
    Gone(String),
    /// The emulator has crashed before anything of Mercury's was in the machine.
    #[error("the emulator crashed while the machine booted ({0})")]
    Crashed(String),
    /// The agent could not do what it was asked.
    #[error("the machine could not {what}: {reason}")]
    Agent {
        /// What it was asked.
        what: String,
        /// What it says.
        reason: String,
    },
    /// A command in the machine did not succeed.
    #[error("`{command}` {ended}\n{output}")]
    Command {
        /// The command.
        command: String,
        /// How it ended.
        ended: String,
        /// What it printed.
        output: String,
    },
    /// Something in the machine is not as it must be.
    #[error("the machine is not well: {0}")]
    Unhealthy(String),
    /// Any of these, with the machine that it happened on.
    #[error("{source}\n{scene}")]
    Scene {
        /// What happened.
        source: Box<Error>,
        /// What was booted, and the last of its serial console.
        scene: String,
    },
    /// Not built yet.
    #[error("`lab {0}` is not built yet")]
    NotBuilt(&'static str),
}

impl Error {
    /// How [`Error::Unsupported`] begins.
    pub const SKIPPED: &'static str = "skipped: ";

    /// What happened, without the scene.
    #[must_use]
    pub fn cause(&self) -> &Self {
        match self {
            Self::Scene { source, .. } => source.cause(),
            cause => cause,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Says what was tried, where the system only says why not.
pub trait Context<T> {
    /// `what` completes the sentence "cannot …".
    ///
    /// # Errors
    /// The same one, with the place.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Error::Io { what: what(), source: error.into() })
    }
}

/// Waits until `ready` gives something, for at most `limit`.
///
/// # Errors
/// When the time is up, or when `ready` fails.
pub fn wait_for<T>(what: &str, limit: Duration, mut ready: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = std::time::Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            return Err(Error::Timeout { what: what.to_owned(), limit });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
