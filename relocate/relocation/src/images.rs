//! Reading an image from its first byte to its last, with progress, and with an early end after a
//! signal.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::bytes,
    progress,
};
use mercury_image::{Chunk, Commit, Identity, Machine, Reader};
use mercury_quiesce::patient::{self, Source};
use std::{
    fs::File,
    io::{self, BufReader, Read},
    os::unix::fs::FileTypeExt,
    path::Path,
    time::{Duration, Instant},
};

const BUFFER: usize = 1 << 20;
/// Interval at which the line of progress changes.
const INTERVAL: Duration = Duration::from_millis(500);

/// An open image, whose description of its machine has been read.
pub struct Image {
    reader: Reader<Box<dyn Read>>,
    /// Length of the image in bytes, if it is known.
    length: Option<u64>,
}

impl Image {
    /// Opens an image; `-` is standard input.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be read, or is no image.
    pub fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Self::begin(Box::new(io::stdin()), None);
        }
        let found = patient::reach(path).map(|()| std::fs::metadata(path).ok())?;
        // A block device is longer than the image on it.
        let length = found.as_ref().filter(|found| found.is_file()).map(std::fs::Metadata::len);
        let is_device = found.is_some_and(|found| found.file_type().is_block_device());
        let from: io::Result<Box<dyn Read>> = match length.is_some() || is_device {
            true => Source::open(path).map(|source| Box::new(source) as Box<dyn Read>),
            false => File::open(path).map(|file| Box::new(file) as Box<dyn Read>),
        };
        let from = from.map_err(|error| unreadable(path, &error))?;
        Self::begin(Box::new(BufReader::with_capacity(BUFFER, from)), length)
    }

    fn begin(from: Box<dyn Read>, length: Option<u64>) -> Result<Self> {
        Ok(Self { reader: Reader::open(from).map_err(image_error)?, length })
    }

    /// Returns the description of the machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        self.reader.machine()
    }

    /// Returns the image's identity.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.reader.identity()
    }

    /// Returns true if its machine has come back from it.
    #[must_use]
    pub fn was_restored(&self) -> bool {
        self.reader.was_restored()
    }

    /// Returns the number of bytes read so far.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.reader.offset()
    }

    /// Returns the commit record at the end, if it has been read.
    #[must_use]
    pub fn commit(&self) -> Option<&Commit> {
        self.reader.commit()
    }

    /// Passes all chunks to `each`. The image is intact if this succeeds.
    ///
    /// # Errors
    ///
    /// Returns an error if the image is damaged, `each` fails, or a signal asks for an end.
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

/// Tells the operator if the machine of an image has come back from it before.
pub fn tell_of_return(image: &Image) {
    if image.was_restored() {
        eprintln!(
            "note: a machine has come back from this image before, and used its connections and keys since; \
             this one ends connections with other machines, and security associations of IPsec"
        );
    }
}

/// Makes the error for one of several images.
pub fn named(path: &Path, error: mercury_image::Error) -> Error {
    let Error { message, hint, .. } = image_error(error);
    let hint = hint.unwrap_or_default();
    Error::new(Exit::Failed, format!("{}: {message}", path.display())).hint(hint)
}

/// Refuses an image that is only a part of a machine.
///
/// # Errors
///
/// Returns an error if the image needs others.
pub fn refuse_incremental(path: &Path, machine: &Machine) -> Result<()> {
    let Some(parent) = machine.parents.last() else { return Ok(()) };
    let path = path.display();
    Err(Error::new(Exit::Failed, format!("{path} is an incremental image: it needs image {parent}")).hint(
        format!("merge it with those that it was made on: `mercury merge OUT FULL … {path}`, and name OUT"),
    ))
}

/// Makes the error for an image's file that cannot be read.
pub fn unreadable(path: &Path, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("{} cannot be read: {error}", path.display()))
        .hint("name the file or the device that `mercury checkpoint` wrote")
}

/// Converts an image's error into one of the command.
pub fn image_error(error: mercury_image::Error) -> Error {
    match error {
        mercury_image::Error::Io(error) => {
            let full = error.raw_os_error() == Some(libc::ENOSPC);
            let hint = if full { "make room, or write to another place" } else { "`dmesg` may say more" };
            Error::new(Exit::Failed, format!("the image could not be read or written: {error}")).hint(hint)
        }
        error => {
            let hint = match error {
                mercury_image::Error::Unfit(_) => "name the images in their order, the full one first",
                _ => "nothing was changed; use another image",
            };
            Error::new(Exit::Failed, format!("the image is refused: {error}")).hint(hint)
        }
    }
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
