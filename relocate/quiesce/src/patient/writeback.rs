//! Written data of an image must not stay in memory. The kernel would put it into free pages of the
//! machine. Then the snapshot would have to copy those pages first, and the next image would have
//! to hold this data, because memory has changed.
//!
//! So only little data at a time is on its way to the disk, and written data leaves memory. The
//! end, for which everything may stand still, then has little left to write as well.

use rustix::fs::{Advice, fadvise};
use std::{fs::File, io, num::NonZeroU64, os::fd::AsRawFd};

/// Bytes that are gathered while the same number of bytes is on its way.
const WINDOW: u64 = 2 << 20;

/// The progress of a file that is written from its beginning to its end.
#[derive(Debug, Default)]
pub struct Writeback {
    written: u64,
    /// Offset up to which data is on its way.
    sent: u64,
    /// Offset up to which data has left memory.
    gone: u64,
}

impl Writeback {
    /// Counts bytes that were added to the file.
    ///
    /// # Errors
    ///
    /// Returns an error if earlier bytes could not be written.
    pub fn add(&mut self, file: &File, bytes: usize) -> io::Result<()> {
        self.written += bytes as u64;
        if self.written - self.sent < WINDOW {
            return Ok(());
        }
        sync_range(file, self.sent, self.written - self.sent, libc::SYNC_FILE_RANGE_WRITE)?;
        let whole = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        sync_range(file, self.gone, self.sent - self.gone, whole)?;
        forget(file, self.gone, self.sent - self.gone);
        (self.gone, self.sent) = (self.sent, self.written);
        Ok(())
    }

    /// Drops all data from memory, which is durable now.
    pub fn finish(&self, file: &File) {
        forget(file, self.gone, self.written - self.gone);
    }
}

fn sync_range(file: &File, offset: u64, bytes: u64, flags: u32) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the descriptor is open, and no memory of this process is touched.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, bytes as i64, flags) };
    let error = if result == 0 { return Ok(()) } else { io::Error::last_os_error() };
    // A file that cannot do this keeps its pages.
    let unable = matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE));
    if unable { Ok(()) } else { Err(error) }
}

fn forget(file: &File, offset: u64, bytes: u64) {
    if let Some(bytes) = NonZeroU64::new(bytes) {
        // This is advice, on which nothing depends.
        let _ = fadvise(file, offset, Some(bytes), Advice::DontNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::unix::fs::FileExt};

    #[test]
    fn everything_is_written_and_what_is_far_behind_is_gone() {
        let mut file = tempfile::tempfile().expect("a file");
        let mut writeback = Writeback::default();
        let block = vec![7; 1 << 20];
        for number in 1..=20_u64 {
            file.write_all(&block).expect("written");
            writeback.add(&file, block.len()).expect("on its way");
            assert_eq!(writeback.written, number << 20);
            assert!(writeback.written - writeback.gone < 3 * WINDOW, "{writeback:?}");
        }
        assert_eq!((writeback.sent, writeback.gone), (20 << 20, 18 << 20));
        writeback.finish(&file);
        let mut found = vec![0; block.len()];
        for number in 0..20 {
            file.read_exact_at(&mut found, number << 20).expect("read");
            assert_eq!(found, block, "block {number}");
        }
    }
}
