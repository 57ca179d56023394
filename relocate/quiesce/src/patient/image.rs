//! Images, which may be on a disk or a server that goes away while they are read or written.

use super::{CHUNK, Disk, FILE, Progress, Server, no_answer_of, serve, writeback::Writeback};
use mercury_control::sysroot::Sysroot;
use std::{
    ffi::c_void,
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    mem::ManuallyDrop,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd},
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::Path,
    time::Duration,
};

/// Time for a disk or a server to answer one request for data of an image. It is less than the
/// silence after which the undo process releases the machine.
pub const PATIENCE: Duration = Duration::from_secs(45);

/// Names the file of a request that was given up.
fn named(name: &str, error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::TimedOut { no_answer_of(name, PATIENCE) } else { error }
}

/// A file or a device that is read from its beginning to its end.
#[derive(Debug)]
pub struct Source {
    disk: Disk,
    name: String,
    at: u64,
}

impl Source {
    /// Opens a regular file or a block device.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be opened, or does not answer.
    pub fn open(path: &Path) -> io::Result<Self> {
        let name = path.display().to_string();
        let disk = Disk::open_with(path, 0, PATIENCE).map_err(|error| named(&name, error))?;
        Ok(Self { disk, name, at: 0 })
    }
}

impl Read for Source {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read =
            self.disk.read_at(self.at, to.len().min(CHUNK)).map_err(|error| named(&self.name, error))?;
        to[..read.len()].copy_from_slice(&read);
        self.at += read.len() as u64;
        Ok(read.len())
    }
}

impl Seek for Source {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(_) => return Err(io::ErrorKind::Unsupported.into()),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// Request that makes a file durable. Other requests write as many bytes as their first number
/// says.
const FINISH: u64 = u64::MAX;

/// A file or a device that is written from its beginning to its end. Written data leaves memory
/// ([`Writeback`]).
#[derive(Debug)]
pub struct Sink {
    server: Server,
    name: String,
    /// The path alone, without the file: a device that this process writes is known by it.
    _place: File,
    /// Number of its disk.
    device: u64,
}

impl Sink {
    /// Passes an open file to the child that writes it. Only the child holds the file afterwards:
    /// closing a file can wait for a server, too.
    ///
    /// # Errors
    ///
    /// Returns an error if the child cannot be started.
    pub fn new(file: File, path: &Path) -> io::Result<Self> {
        let found = file.metadata()?;
        let device = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
        let place = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(link_of(&file))?;
        // SAFETY: `write` makes system calls.
        let server = unsafe { Server::start(Some(file.as_fd()), write) }?;
        Ok(Self { server, name: path.display().to_string(), _place: place, device })
    }

    /// Returns the number of the child, which must not stand still while it is needed.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.server.child.number
    }

    /// Makes the file durable. The amount of data of other files that a disk writes first is
    /// unknown, so progress means that the disk has finished a request lately.
    ///
    /// # Errors
    ///
    /// Returns an error if that fails, or the disk or the server does not answer.
    pub fn finish(&mut self) -> io::Result<()> {
        self.server.request([FINISH, 0])?;
        let (mut disk, sysroot) = (Progress::of(self.device), Sysroot::default());
        let get_on = |elapsed: Duration| disk.goes_on(elapsed, PATIENCE, &sysroot);
        self.server.answer(get_on).map(drop).map_err(|error| named(&self.name, error))
    }
}

/// Returns a path that leads to an open file.
fn link_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.server.shared.fill(bytes);
        self.server.request([length as u64, 0])?;
        let written = self.server.answer(|elapsed| elapsed < PATIENCE);
        written.map(|written| written as usize).map_err(|error| named(&self.name, error))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs the child of a [`Sink`].
fn write(buffer: *mut c_void) {
    // SAFETY: the descriptor is the child's file, which stays open until the child ends.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(FILE) });
    let mut writeback = Writeback::default();
    serve(|[length, _]| {
        let outcome = match length {
            FINISH => file.sync_all().map(|()| {
                writeback.finish(&file);
                0
            }),
            _ => write_some(&file, buffer, length as usize, &mut writeback),
        };
        // A text would have to be allocated: all these errors are the kernel's.
        outcome
            .map_or_else(|error| -i64::from(error.raw_os_error().unwrap_or(libc::EIO)), |count| count as i64)
    });
}

fn write_some(
    file: &File,
    buffer: *mut c_void,
    length: usize,
    writeback: &mut Writeback,
) -> io::Result<usize> {
    // SAFETY: the buffer has CHUNK bytes, and the parent does not touch it before the answer.
    let written = unsafe { libc::write(FILE, buffer, length.min(CHUNK)) };
    let written = usize::try_from(written).map_err(|_| io::Error::last_os_error())?;
    writeback.add(file, written)?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, io::BufReader};

    #[test]
    fn written_bytes_are_read_again() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("image");
        let bytes: Vec<u8> = (0..3 * CHUNK + 5000).map(|at| (at * 7 % 251) as u8).collect();
        let mut sink = Sink::new(File::create(&path).expect("a file"), &path).expect("a child");
        assert_ne!(sink.process(), std::process::id());
        sink.write_all(&bytes).expect("written");
        sink.finish().expect("durable");
        drop(sink);
        assert!(fs::read(&path).expect("read") == bytes);
        let mut source = BufReader::new(Source::open(&path).expect("opened"));
        let mut read = Vec::new();
        source.read_to_end(&mut read).expect("read");
        assert!(read == bytes);
        source.seek(SeekFrom::Start(7)).expect("there");
        source.seek_relative(3).expect("there");
        let mut some = [0; 5];
        source.read_exact(&mut some).expect("read");
        assert_eq!(some, bytes[10..15]);
    }

    #[test]
    fn errors_of_the_kernel_come_back() {
        let full = Path::new("/dev/full");
        let mut sink = Sink::new(File::create(full).expect("a file"), full).expect("a child");
        assert_eq!(sink.write(&[1]).expect_err("full").raw_os_error(), Some(libc::ENOSPC));
        let gone = Source::open(Path::new("/no/such/image")).expect_err("none");
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_silence_has_a_name() {
        let silent = named("/mnt/image", io::ErrorKind::TimedOut.into());
        assert_eq!(silent.to_string(), "/mnt/image has not answered for 45 s");
        let other = named("/mnt/image", io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(other.raw_os_error(), Some(libc::EIO));
    }
}
