//! Errors, in words for the person who starts a machine.

use std::{fmt, io, path::Path};

/// An error, and the remedy if there is one.
#[derive(Debug)]
pub struct Error {
    message: String,
    hint: Option<String>,
}

/// The result of a function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Makes an error about a file.
    pub(crate) fn file(what: &str, path: &Path, error: impl Into<io::Error>) -> Self {
        Self::new(format!("cannot {what} {}: {}", path.display(), error.into()))
    }

    /// Makes a function that makes an error of a call.
    pub(crate) fn call<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::new(format!("cannot {what}: {}", error.into()))
    }

    /// Returns the step that failed, and the reason.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns what to do.
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
