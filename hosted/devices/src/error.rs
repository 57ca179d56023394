//! Errors, in words for the person who starts a machine.

use std::{fmt, io, path::Path};

/// An error: the step that failed, the reason, and the remedy if there is one.
#[derive(Debug)]
pub struct Error {
    message: String,
    hint: Option<String>,
    is_hosts: bool,
}

/// The result of a function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error with a text of its own.
    pub fn new(text: impl Into<String>) -> Self {
        Self { message: text.into(), hint: None, is_hosts: false }
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Makes an error that only a mistake in this program causes.
    pub fn bug(text: impl Into<String>) -> Self {
        Self::new(text).hint("this is a bug: please report it, with the command and the kernel's version")
    }

    /// Makes an error about a thread that the host refuses.
    pub fn thread(what: &str, error: &io::Error) -> Self {
        Self::new(format!("cannot start a thread for {what}: {error}"))
            .hint("the host limits your processes and threads: raise ulimit -u")
    }

    /// Makes an error about a part of a machine's saved state.
    pub fn state(what: impl fmt::Display) -> Self {
        Self::new(format!("the saved state of {what} makes no sense"))
            .hint("restore the file with the version of this program that has saved it, or copy it again")
    }

    /// Puts a subject before the text.
    #[must_use]
    pub fn about(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Makes an error about something that this host cannot do as it is.
    pub fn host(text: impl Into<String>) -> Self {
        Self { is_hosts: true, ..Self::new(text) }
    }

    /// Returns true if the host as it is causes the error, and not the request.
    #[must_use]
    pub fn is_hosts(&self) -> bool {
        self.is_hosts
    }

    /// Makes an error about a file.
    pub fn file(what: &str, path: &Path, error: impl fmt::Display) -> Self {
        Self::new(format!("cannot {what} {}: {error}", path.display()))
    }

    /// Makes an error about a call that the host's kernel refused.
    #[must_use]
    pub fn system(what: &str) -> Self {
        Self::host(format!("cannot {what}: {}", io::Error::last_os_error()))
    }

    /// Returns the step that failed, and the reason.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hint {
            Some(hint) => write!(f, "{}\n  {hint}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}
