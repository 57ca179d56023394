//! The errors of a stream, and their place in it.

use std::{fmt, io};

/// A place in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the stream, from 0.
    pub stream: u32,
    /// Number of the frame in the stream, from 0.
    pub frame: u64,
    /// Offset in bytes of the frame's first byte.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}, frame {} at byte {}", self.stream, self.frame, self.offset)
    }
}

/// The reason why a stream is refused.
#[derive(Debug)]
pub enum Error {
    /// Reading or writing failed.
    Io(io::Error),
    /// The connection does not begin like a stream.
    NotAStream,
    /// The stream has another version of the format.
    Version(u32),
    /// The stream belongs to another attempt, or has another number than expected.
    Other,
    /// The stream ends within a frame.
    Torn(Place),
    /// A part of the stream is not valid.
    Damaged(Place, &'static str),
}

/// A result with this module's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::NotAStream => f.write_str("the peer does not send a machine that moves"),
            Self::Version(found) => {
                write!(f, "the other end speaks version {found}; this one speaks {}", super::VERSION)
            }
            Self::Other => f.write_str("the stream belongs to another attempt"),
            Self::Torn(place) => write!(f, "{place}: the connection ended in the middle of the frame"),
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
