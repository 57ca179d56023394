//! The errors of an image, and their place in it.

use std::{fmt, io};

/// A place in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the record, from 0.
    pub record: u64,
    /// Offset in bytes of the record's first byte in the file.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "record {} at byte {}", self.record, self.offset)
    }
}

/// The reason why an image cannot be used or made.
#[derive(Debug)]
pub enum Error {
    /// Reading or writing failed.
    Io(io::Error),
    /// The file does not begin like an image.
    NotAnImage,
    /// The image has another version of the format.
    Version(u32),
    /// The image ends before its commit record.
    Torn(Place),
    /// A part of the image is not what was written.
    Damaged(Place, String),
    /// The image is whole, but does not belong to the others.
    Unfit(String),
}

/// A result with this module's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::NotAnImage => f.write_str("this is no image of a machine"),
            Self::Version(found) => {
                let (oldest, newest) = (crate::VERSION_OLDEST, crate::VERSION);
                write!(f, "it is of version {found} of the format; this command knows {oldest} to {newest}")
            }
            Self::Torn(place) => write!(f, "it ends in the middle of {place}, so it was never finished"),
            Self::Damaged(place, what) => write!(f, "{place}: {what}"),
            Self::Unfit(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
