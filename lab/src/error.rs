//! The lab's errors. Each names the place and carries the evidence.

use std::{fmt, io, path::PathBuf, time::Duration};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The lab's errors. `Debug` prints them in full too, so that a failed test shows what a person
/// needs.
#[derive(thiserror::Error)]
pub enum Error {
    /// The host's operating system refused a request.
    #[error("cannot {what}: {source}")]
    Io {
        /// The action, which completes the sentence "cannot …".
        what: String,
        source: io::Error,
    },
    /// A program on the host failed.
    #[error("{what}: {program} failed ({status}); the whole log is {}\n{tail}", log.display())]
    Program {
        /// The purpose of the program's run.
        what: String,
        program: String,
        status: String,
        /// The file with the program's whole output.
        log: PathBuf,
        /// The last lines of the program's output.
        tail: String,
    },
    /// The host lacks something, or has it in a form that the lab does not know.
    #[error("{0}")]
    Host(String),
    /// The machine's description contradicts itself.
    #[error("the machine's description contradicts itself: {0}")]
    Spec(String),
    /// The chosen emulator cannot run this test. A test that ends with this error counts as
    /// skipped.
    #[error("{}{reason}", Error::SKIPPED)]
    Unsupported {
        /// The feature that the emulator lacks.
        reason: &'static str,
    },
    #[error("QEMU refuses {command}: {answer}")]
    Monitor { command: String, answer: String },
    /// An event did not happen in time.
    #[error("{what}: no result within {} s", limit.as_secs_f32())]
    Timeout {
        /// The event.
        what: String,
        /// The limit, in wall time.
        limit: Duration,
    },
    /// The machine has ended.
    #[error("{0}: the machine has gone")]
    Gone(String),
    /// The emulator crashed before anything of Mercury's was in the machine.
    #[error("the emulator crashed while the machine booted ({0})")]
    Crashed(String),
    /// The agent could not carry out a request.
    #[error("the machine could not {what}: {reason}")]
    Agent {
        /// The request, which completes the sentence "the machine could not …".
        what: String,
        /// The agent's reason.
        reason: String,
    },
    /// A command in the machine did not succeed.
    #[error("`{command}` {ended}\n{output}")]
    Command {
        command: String,
        /// The way in which the command ended.
        ended: String,
        /// The command's output.
        output: String,
    },
    /// A check of the machine's health failed.
    #[error("a check of the machine failed: {0}")]
    Unhealthy(String),
    /// An error with the machine on which it happened.
    #[error("{source}\n{scene}")]
    Scene {
        source: Box<Error>,
        /// The machine's description, and the last lines of its serial console.
        scene: String,
    },
    /// A subcommand of `lab` that does not exist yet.
    #[error("`lab {0}` is not built yet")]
    NotBuilt(&'static str),
}

impl Error {
    /// The first word of the message of [`Error::Unsupported`].
    pub const SKIPPED: &'static str = "skipped: ";

    /// Returns the error without the scene.
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

/// Adds the action to an error of the operating system, which only gives the reason.
pub trait Context<T> {
    /// Turns an error of the operating system into [`Error::Io`]. `what` completes the sentence
    /// "cannot …".
    ///
    /// # Errors
    /// The same error, with the action.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Error::Io { what: what(), source: error.into() })
    }
}

/// Waits until `ready` returns a value, for at most `limit`.
///
/// # Errors
/// If the limit passes, or `ready` fails.
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
