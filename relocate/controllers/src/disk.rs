//! A disk, and the one in a file or a block device.

use std::{
    fs::File,
    io,
    ops::{Deref, DerefMut},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, FileTypeExt},
    },
};

/// Largest number of zeros that are written at once where the host cannot make zeros by itself.
const ZEROS: usize = 128 << 10;

/// The content of a disk.
pub trait Disk {
    /// Returns true if the disk cannot be written to.
    fn is_read_only(&self) -> bool;
    /// Reads from a position.
    ///
    /// # Errors
    /// The host's.
    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes to a position.
    ///
    /// # Errors
    /// The host's.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes all earlier writes last.
    ///
    /// # Errors
    /// The host's.
    fn flush(&mut self) -> io::Result<()>;
    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// The host's.
    fn zero(&mut self, at: u64, length: u64) -> io::Result<()>;
    /// Gives the content of a range up, if the host can.
    ///
    /// # Errors
    /// The host's.
    fn discard(&mut self, at: u64, length: u64) -> io::Result<()>;
}

/// A disk that remembers a failed flush until its driver has learned of a failure.
///
/// The host's kernel reports that writes are lost only once. A flush that a driver does not wait for, as at a
/// reset, would take the report away from the driver's next one.
pub(crate) struct Lasting {
    disk: Box<dyn Disk + Send>,
    lost: Option<io::Error>,
    /// True if the command that is executed has failed for it.
    is_in_answer: bool,
}

impl Lasting {
    pub fn new(disk: Box<dyn Disk + Send>) -> Self {
        Self { disk, lost: None, is_in_answer: false }
    }

    /// Makes all earlier writes last. Fails as well if writes were lost before, and the driver has not
    /// learned of a failure.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.disk.is_read_only() {
            return Ok(());
        }
        if let Err(error) = self.disk.flush() {
            self.lost = Some(error);
        }
        let Some(error) = &self.lost else { return Ok(()) };
        self.is_in_answer = true;
        Err(error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error))
    }

    /// Notes that a command begins.
    pub fn begin(&mut self) {
        self.is_in_answer = false;
    }

    /// Notes that the driver has the answer to the command.
    pub fn answer(&mut self) {
        if std::mem::take(&mut self.is_in_answer) {
            self.lost = None;
        }
    }
}

impl Deref for Lasting {
    type Target = dyn Disk + Send;

    fn deref(&self) -> &Self::Target {
        &*self.disk
    }
}

impl DerefMut for Lasting {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.disk
    }
}

/// A raw image in a file, or a block device.
#[derive(Debug)]
pub struct RawDisk {
    file: File,
    is_device: bool,
    is_read_only: bool,
}

impl RawDisk {
    /// Takes an open file.
    ///
    /// # Errors
    /// The host does not say what it is.
    pub fn new(file: File, is_read_only: bool) -> io::Result<Self> {
        let is_device = file.metadata()?.file_type().is_block_device();
        Ok(Self { file, is_device, is_read_only })
    }

    /// Calls fallocate. Returns false if the file has no such operation.
    fn allocate(&self, mode: i32, at: u64, length: u64) -> io::Result<bool> {
        let (at, length) = (at.cast_signed(), length.cast_signed());
        // SAFETY: It takes numbers.
        if unsafe { libc::fallocate(self.file.as_raw_fd(), mode, at, length) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL) => Ok(false),
            _ => Err(error),
        }
    }

    /// Discards a range of a block device, whose content becomes unknown.
    fn discard_device(&self, at: u64, length: u64) -> io::Result<()> {
        const BLKDISCARD: libc::c_ulong = 0x1277;
        let range = [at, length];
        // SAFETY: The kernel reads two numbers.
        if unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD, range.as_ptr()) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::EINVAL) => Ok(()),
            _ => Err(error),
        }
    }
}

impl Disk for RawDisk {
    fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn zero(&mut self, at: u64, length: u64) -> io::Result<()> {
        if self.allocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, at, length)? {
            return Ok(());
        }
        let zeros = vec![0; ZEROS.min(usize::try_from(length).unwrap_or(ZEROS))];
        let mut done = 0;
        while done < length {
            let part = (length - done).min(zeros.len() as u64);
            self.write(at + done, &zeros[..part as usize])?;
            done += part;
        }
        Ok(())
    }

    fn discard(&mut self, at: u64, length: u64) -> io::Result<()> {
        if self.is_device {
            return self.discard_device(at, length);
        }
        self.allocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, at, length)?;
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn ranges_are_zeroed_and_given_up_in_a_file() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &vec![7; 1 << 20]).unwrap();
        let seen = file.try_clone().unwrap();
        let mut disk = RawDisk::new(file, false).unwrap();
        assert!(!disk.is_read_only());
        disk.write(4096, &[1; 4096]).unwrap();
        disk.zero(8192, 4096 + 512).unwrap();
        disk.flush().unwrap();
        let before = seen.metadata().unwrap().blocks();
        disk.discard(512 << 10, 512 << 10).unwrap();
        let mut bytes = vec![0; 1 << 20];
        disk.read(0, &mut bytes).unwrap();
        assert_eq!([0, 4096, 8192, 12_288 + 511, 12_288 + 512].map(|at| bytes[at]), [7, 1, 0, 0, 7]);
        assert_eq!(seen.metadata().unwrap().len(), 1 << 20, "the size stays");
        let after = seen.metadata().unwrap().blocks();
        assert!(after < before || bytes[1 << 19] == 7, "{after} of {before} blocks are left");
        assert_eq!(disk.read((1 << 20) - 4, &mut [0; 8]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn the_host_s_refusal_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let mut disk = RawDisk::new(File::open(file.path()).unwrap(), true).unwrap();
        assert!(disk.is_read_only());
        assert!(disk.write(0, &[1]).is_err());
        assert!(disk.zero(0, 4096).is_err());
    }
}
