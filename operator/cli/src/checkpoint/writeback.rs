//! What has been written of an image must not stay in memory: the kernel would put it where the machine has its free
//! pages. Then the snapshot has to copy those first, and the next image has to hold this one, for it has changed memory.
//!
//! So little at a time is on its way to the disk, and what has arrived leaves memory. The end, for which everything
//! may stand still, finds little left to write as well.

use rustix::fs::{Advice, fadvise};
use std::{fs::File, io, num::NonZeroU64, os::fd::AsRawFd};

/// So many bytes are gathered, as many more are on their way.
const WINDOW: u64 = 2 << 20;

/// How far a file has got that is written from its beginning to its end.
#[derive(Debug, Default)]
pub struct Writeback {
    written: u64,
    /// Up to here it is on its way.
    sent: u64,
    /// Up to here it has left memory.
    gone: u64,
}

impl Writeback {
    /// So many bytes more are in the file.
    ///
    /// # Errors
    /// If some before could not be written.
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

    /// All of it is safe now.
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
    // What cannot do this keeps its pages.
    let unable = matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE));
    if unable { Ok(()) } else { Err(error) }
}

fn forget(file: &File, offset: u64, bytes: u64) {
    if let Some(bytes) = NonZeroU64::new(bytes) {
        // Advice: nothing depends on it.
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
