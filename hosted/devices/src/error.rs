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
