//! What can be wrong with a stream, and where.

use std::{fmt, io};

/// A place in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the stream.
    pub stream: u32,
    /// Number of the frame.
    pub frame: u64,
    /// Byte at which it begins.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}, frame {} at byte {}", self.stream, self.frame, self.offset)
    }
}

/// Why a stream is refused.
#[derive(Debug)]
pub enum Error {
    /// Reading or writing failed.
    Io(io::Error),
    /// It does not begin like one.
    NotAStream,
    /// It is of another version of the format.
    Version(u32),
    /// It belongs to another attempt, or is another stream than the one that was expected.
    Other,
    /// It ends in the midst of something.
    Torn(Place),
    /// Something in it cannot be.
    Damaged(Place, &'static str),
}

/// A result with this module's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::NotAStream => f.write_str("this is no machine that moves"),
            Self::Version(found) => {
                write!(f, "the other end speaks version {found}; this one speaks {}", super::VERSION)
            }
            Self::Other => f.write_str("the stream belongs to another attempt"),
            Self::Torn(place) => write!(f, "{place}: the connection ended in the midst of it"),
            Self::Damaged(place, what) => write!(f, "{place}: {what}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
