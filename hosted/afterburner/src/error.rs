//! What can go wrong, in words for whoever builds a kernel.

use std::{fmt, io, path::Path};

/// An error: what was tried, and why it failed.
#[derive(Debug)]
pub struct Error(String);

/// This crate's results.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// With a text of its own.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Something that was done to a file.
    pub fn file(what: &str, path: &Path, error: impl fmt::Display) -> Self {
        Self(format!("cannot {what} {}: {error}", path.display()))
    }

    /// A program that could not be started.
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
