//! Reading an image from its first byte to its last, with progress, and an end where somebody wants one.

use crate::{
    checkpoint::stream::image_error,
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::bytes,
    progress,
};
use mercury_image::{Chunk, Commit, Identity, Machine, Reader};
use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
    time::{Duration, Instant},
};

const BUFFER: usize = 1 << 20;
/// How often the line of progress changes.
const INTERVAL: Duration = Duration::from_millis(500);

/// An image that is open; what it says of its machine has been read.
pub struct Image {
    reader: Reader<Box<dyn Read>>,
    /// Bytes of all of it, where that is known.
    length: Option<u64>,
}

impl Image {
    /// Opens one; `-` is standard input.
    ///
    /// # Errors
    /// If it cannot be read, or is no image.
    pub fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Self::begin(Box::new(io::stdin()), None);
        }
        let file = File::open(path).map_err(|error| unreadable(path, &error))?;
        // A block device is longer than what is on it.
        let length = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|found| found.len());
        Self::begin(Box::new(BufReader::with_capacity(BUFFER, file)), length)
    }

    fn begin(from: Box<dyn Read>, length: Option<u64>) -> Result<Self> {
        Ok(Self { reader: Reader::open(from).map_err(image_error)?, length })
    }

    /// The machine in it.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        self.reader.machine()
    }

    /// Its own.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.reader.identity()
    }

    /// Bytes read so far.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.reader.offset()
    }

    /// What it says at its end, once that has been read.
    #[must_use]
    pub fn commit(&self) -> Option<&Commit> {
        self.reader.commit()
    }

    /// Gives all that is in it to `each`. It is whole if this succeeds.
    ///
    /// # Errors
    /// If it is damaged, `each` fails, or a signal asks for an end.
    pub fn read(
        &mut self,
        doing: &str,
        deferred: &Deferred,
        mut each: impl FnMut(Chunk) -> Result<()>,
    ) -> Result<()> {
        let mut shown = Instant::now();
        while let Some(chunk) = self.reader.next_chunk().map_err(image_error)? {
            each(chunk)?;
            if deferred.requested() {
                progress::line("");
                return Err(Error::new(Exit::Interrupted, "interrupted; nothing was changed"));
            }
            if shown.elapsed() >= INTERVAL {
                shown = Instant::now();
                progress::line(&how_far(doing, self.offset(), self.length));
            }
        }
        progress::line("");
        Ok(())
    }
}

fn how_far(doing: &str, offset: u64, length: Option<u64>) -> String {
    let of = length.map(|length| format!(" of {} ({} %)", bytes(length), offset * 100 / length.max(1)));
    format!("{doing}: {}{}", bytes(offset), of.unwrap_or_default())
}

/// What is wrong with one of several images.
pub fn named(path: &Path, error: mercury_image::Error) -> Error {
    let Error { message, hint, .. } = image_error(error);
    let hint = hint.unwrap_or_default();
    Error::new(Exit::Failed, format!("{}: {message}", path.display())).hint(hint)
}

/// Refuses an image that is not all of a machine.
///
/// # Errors
/// If it needs others.
pub fn refuse_incremental(path: &Path, machine: &Machine) -> Result<()> {
    let Some(parent) = machine.parents.last() else { return Ok(()) };
    let path = path.display();
    Err(Error::new(Exit::Failed, format!("{path} is an incremental image: it needs image {parent}")).hint(
        format!(
            "put it together with those that it was made on: `mercury merge OUT FULL … {path}`, and name OUT"
        ),
    ))
}

/// An image's file that cannot be read.
pub fn unreadable(path: &Path, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("{} cannot be read: {error}", path.display()))
        .hint("name the file or the device that `mercury checkpoint` wrote")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_says_of_how_much() {
        assert_eq!(how_far("checking", 1 << 20, Some(4 << 20)), "checking: 1.00 MiB of 4.00 MiB (25 %)");
        assert_eq!(how_far("checking", 1 << 20, None), "checking: 1.00 MiB");
    }
}
