//! What can go wrong, in words for whoever starts a machine.

use std::{fmt, io, path::Path};

/// An error: what was tried, why it failed, and what to do if something can be done.
#[derive(Debug)]
pub struct Error {
    message: String,
    hint: Option<String>,
    is_hosts: bool,
}

/// This crate's results.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// With a text of its own.
    pub fn new(text: impl Into<String>) -> Self {
        Self { message: text.into(), hint: None, is_hosts: false }
    }

    /// The same with a way out.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same, with something before it.
    #[must_use]
    pub fn about(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Something that this host cannot do as it is.
    pub fn host(text: impl Into<String>) -> Self {
        Self { is_hosts: true, ..Self::new(text) }
    }

    /// Whether it is for this host as it is, and not for what was asked.
    #[must_use]
    pub fn is_hosts(&self) -> bool {
        self.is_hosts
    }

    /// Something that was done to a file.
    pub fn file(what: &str, path: &Path, error: impl fmt::Display) -> Self {
        Self::new(format!("cannot {what} {}: {error}", path.display()))
    }

    /// Something that the host's kernel refused.
    #[must_use]
    pub fn system(what: &str) -> Self {
        Self::host(format!("cannot {what}: {}", io::Error::last_os_error()))
    }

    /// What was tried and why it failed.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do.
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
