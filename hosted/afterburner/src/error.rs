//! Errors, as texts for the developer who builds a kernel.

use std::{fmt, io, path::Path};

/// An error: the action that failed, and the reason.
#[derive(Debug)]
pub struct Error(String);

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns an error with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns an error of an action on a file.
    pub fn file(what: &str, path: &Path, error: impl fmt::Display) -> Self {
        Self(format!("cannot {what} {}: {error}", path.display()))
    }

    /// Returns an error of a program that could not be started.
    pub fn start(program: &Path, error: &io::Error) -> Self {
        Self(format!("cannot start {}: {error}", program.display()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}
