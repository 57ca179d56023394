//! Errors, as texts for the developer who builds a kernel.

use std::{fmt, io, path::Path};

/// An error: the action that failed, the reason, and what to do.
#[derive(Debug)]
pub struct Error {
    message: String,
    hint: Option<String>,
}

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns an error with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { message: text.into(), hint: None }
    }

    /// Adds what to do.
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

    /// Returns the action that failed, and the reason.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns what to do.
    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Returns an error of an action on a file.
    pub fn file(what: &str, path: &Path, error: impl fmt::Display) -> Self {
        Self::new(format!("cannot {what} {}: {error}", path.display()))
            .hint("make sure that the path is right, that you may use it, and that its disk has room")
    }

    /// Returns an error of a program that could not be started.
    pub fn start(program: &Path, error: &io::Error) -> Self {
        Self::new(format!("cannot start {}: {error}", program.display()))
            .hint("install it, or put its directory into PATH")
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
