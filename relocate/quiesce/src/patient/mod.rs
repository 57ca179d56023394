//! System calls that may never return. A disk, or its server, may not answer, and the kernel waits
//! for it without a limit and without handling signals. So a child process makes these calls. If
//! the child makes no progress it is left behind, and its caller gets an error that names the
//! device.
//!
//! The child is made by fork() without exec(), so that nothing has to be read from a disk. Between
//! the two it may make system calls only, because a lock that another thread held at the fork stays
//! locked in the child.

mod files;
mod image;
mod program;
mod progress;
mod writeback;

pub use files::{create, exists, make_folder, read_whole, read_within, remove_folder};
pub use image::{Sink, Source};
pub use program::{PROGRAM_PATIENCE, output};
pub use progress::Progress;

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    mm::{MapFlags, ProtFlags},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions},
};
use std::{
    ffi::{CString, c_void},
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileTypeExt, net::UnixStream},
    },
    path::Path,
    ptr::{self, NonNull},
    time::{Duration, Instant},
};

/// Time for a device to answer one request. A healthy device answers within milliseconds, a disk
/// that spins up within seconds.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Makes the error for a silence of this length.
fn no_answer(patience: Duration) -> io::Error {
    no_answer_of("it", patience)
}

fn no_answer_of(who: &str, patience: Duration) -> io::Error {
    let text = format!("{who} has not answered for {} s", patience.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// Descriptors of a child: its connection with this process, and the file of the request.
const CONNECTION: i32 = 0;
const FILE: i32 = 1;

/// A child process with two descriptors. All others are closed in it, so that a child that is left
/// behind holds no resource of another process.
#[derive(Debug)]
struct Child {
    process: OwnedFd,
    number: u32,
}

impl Child {
    /// Starts `work` in a child.
    ///
    /// # Safety
    ///
    /// `work` makes system calls only: it neither allocates nor takes a lock.
    unsafe fn start(
        connection: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        work: impl FnOnce(),
    ) -> io::Result<Self> {
        // Duplicates with higher numbers, so that they do not collide with the child's numbers.
        let [connection, file] = [connection, file].map(|one| rustix::io::fcntl_dupfd_cloexec(one, FILE + 1));
        let (connection, file) = (connection?, file?);
        // SAFETY: the child makes system calls only, as the caller promises for `work`, and ends
        // without running anything that is registered for the end of this process.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                // SAFETY: descriptors of the child are its own.
                unsafe {
                    libc::dup2(connection.as_raw_fd(), CONNECTION);
                    libc::dup2(file.as_raw_fd(), FILE);
                    libc::syscall(libc::SYS_close_range, FILE + 1, u32::MAX, 0);
                }
                work();
                // SAFETY: ends the child.
                unsafe { libc::_exit(0) }
            }
            pid => {
                let number = pid.unsigned_abs();
                let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
                Ok(Self { process: rustix::process::pidfd_open(pid, PidfdFlags::empty())?, number })
            }
        }
    }

    /// Reaps the child without waiting long: one that waits for a device stays.
    fn forget(&self) {
        let patience = Timespec { tv_sec: 1, tv_nsec: 0 };
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        if rustix::event::poll(&mut polled, Some(&patience)).is_ok_and(|ready| ready > 0) {
            let _ = rustix::process::waitid(WaitId::PidFd(self.process.as_fd()), WaitIdOptions::EXITED);
        }
    }
}

/// Sends a number from a child to its parent; returns true if the parent receives it. Rust's
/// programs ignore the signal of a closed connection.
fn tell(number: i64) -> bool {
    // SAFETY: the number is there, and the descriptor is the child's connection.
    unsafe { libc::write(CONNECTION, ptr::from_ref(&number).cast(), size_of::<i64>()) > 0 }
}

/// Returns the number of the last error, as a child sends it.
fn failed() -> i64 {
    -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Decodes a child's number.
fn told(bytes: [u8; 8]) -> io::Result<u64> {
    let number = i64::from_ne_bytes(bytes);
    u64::try_from(number).map_err(|_| io::Error::from_raw_os_error(number.unsigned_abs() as i32))
}

/// Makes a few system calls in a child. `get_on` is asked each second if they may take longer. If
/// they are given up and succeed later, the child calls `undo`.
///
/// # Errors
///
/// Returns the error with the negative number that `work` returned, or one of the kind
/// [`io::ErrorKind::TimedOut`].
///
/// # Safety
///
/// `work` and `undo` make system calls only: they neither allocate nor take a lock.
unsafe fn call(
    file: Option<BorrowedFd<'_>>,
    get_on: impl FnMut(Duration) -> bool,
    work: impl FnOnce() -> i64,
    undo: impl FnOnce(),
) -> io::Result<()> {
    // SAFETY: as the caller promises.
    unsafe { call_until(file, None, get_on, work, undo) }
}

/// Does the same, and sends `signal` to the child when the calls are given up.
///
/// # Safety
///
/// As for [`call`].
unsafe fn call_until(
    file: Option<BorrowedFd<'_>>,
    signal: Option<Signal>,
    mut get_on: impl FnMut(Duration) -> bool,
    work: impl FnOnce() -> i64,
    undo: impl FnOnce(),
) -> io::Result<()> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let body = || {
        let number = work();
        if !tell(number) && number >= 0 {
            undo();
        }
    };
    // SAFETY: as the caller promises; the code around them makes a system call.
    let child = unsafe { Child::start(theirs.as_fd(), file.unwrap_or(theirs.as_fd()), body) }?;
    drop(theirs);
    ours.set_read_timeout(Some(Duration::from_secs(1)))?;
    let begun = Instant::now();
    let mut bytes = [0; 8];
    while let Err(error) = ours.read_exact(&mut bytes) {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error);
        }
        if get_on(begun.elapsed()) {
            continue;
        }
        ours.shutdown(Shutdown::Both)?;
        // A signal that has no handler may end the child before it can call `undo`.
        signal.map(|signal| rustix::process::pidfd_send_signal(&child.process, signal));
        // The child may have ended just now.
        if ours.read_exact(&mut bytes).is_err() {
            return Err(no_answer(begun.elapsed()));
        }
        break;
    }
    child.forget();
    told(bytes).map(drop)
}

/// Makes an ioctl without an argument. `undo` is the request that takes it back if it is given up
/// and succeeds later.
///
/// # Errors
///
/// Returns the error of the request, or a time-out after `patience`.
pub fn ioctl(
    file: BorrowedFd<'_>,
    request: libc::c_ulong,
    undo: libc::c_ulong,
    patience: Duration,
) -> io::Result<()> {
    let ask = |request| {
        // SAFETY: the callers' requests have no argument, and the descriptor is the child's file.
        if unsafe { libc::ioctl(FILE, request, 0) } < 0 { failed() } else { 0 }
    };
    // SAFETY: `ask` makes a system call.
    unsafe { call(Some(file), |elapsed| elapsed < patience, || ask(request), || _ = ask(undo)) }
}

/// Thaws a frozen file system, by an open folder on it. With `times` it then gives the folder these times,
/// and writes them to the device.
///
/// # Errors
///
/// Returns the error of the last request, or a time-out after `patience`. The child goes on then.
pub fn thaw(
    folder: BorrowedFd<'_>,
    thaw: libc::c_ulong,
    times: Option<[libc::timespec; 2]>,
    patience: Duration,
) -> io::Result<()> {
    let work = || {
        // SAFETY: The request has no argument, the times outlive the calls, and the descriptor is the child's
        // file.
        unsafe {
            // It fails if another process has thawed it, which is fine.
            libc::ioctl(FILE, thaw, 0);
            match &times {
                Some(times) if libc::futimens(FILE, times.as_ptr()) < 0 || libc::syncfs(FILE) < 0 => failed(),
                _ => 0,
            }
        }
    };
    // SAFETY: `work` makes system calls, and there is nothing to undo.
    unsafe { call(Some(folder), |elapsed| elapsed < patience, work, || ()) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Writes all data of a file system to its device, by a path in it, as long as `get_on` returns
/// true.
///
/// # Errors
///
/// Returns an error if the data cannot be written, or the call is given up.
pub fn sync(path: &Path, get_on: impl FnMut(Duration) -> bool) -> io::Result<()> {
    let path = c_path(path)?;
    let work = || {
        // SAFETY: the path is a string that ends with NUL and outlives the call; the descriptor is the
        // child's.
        unsafe {
            let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_NONBLOCK);
            if file < 0 || libc::syncfs(file) < 0 { failed() } else { 0 }
        }
    };
    // SAFETY: `work` makes system calls, and there is nothing to undo.
    unsafe { call(None, get_on, work, || ()) }
}

/// Switches a swap area off, as long as `get_on` returns true: the kernel reads back its pages.
///
/// # Errors
///
/// Returns an error if the kernel refuses, or the call is given up. The area stays on then, unless
/// the kernel reads back the last page just now.
pub fn swap_off(path: &Path, get_on: impl FnMut(Duration) -> bool) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: the path is a string that ends with NUL and outlives the call.
    let work = || if unsafe { libc::swapoff(path.as_ptr()) } < 0 { failed() } else { 0 };
    // SAFETY: as for `work`.
    let undo = || _ = unsafe { libc::swapon(path.as_ptr(), 0) };
    // SAFETY: both make a system call. The kernel ends swapoff(2) at a signal between two pages.
    unsafe { call_until(None, Some(Signal::INT), get_on, work, undo) }
}

/// Switches a swap area on, with the flags of swapon(2).
///
/// # Errors
///
/// Returns an error if the kernel refuses, or the disk does not answer within [`PATIENCE`].
pub fn swap_on(path: &Path, flags: i32) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: as in `swap_off`.
    let work = || if unsafe { libc::swapon(path.as_ptr(), flags) } < 0 { failed() } else { 0 };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < PATIENCE, work, || ()) }
}

/// Removes a file.
///
/// # Errors
///
/// Returns an error if that fails, or takes longer than [`PATIENCE`]; the file may go later then.
pub fn remove(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: as in `swap_off`.
    let work = || if unsafe { libc::unlink(path.as_ptr()) } < 0 { failed() } else { 0 };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < PATIENCE, work, || ()) }
}

/// Renames a file within its folder, and makes the folder durable.
///
/// # Errors
///
/// Returns an error if that fails, or takes longer than [`image::PATIENCE`].
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (from, to, folder) = (c_path(from)?, c_path(to)?, c_path(folder)?);
    let work = || {
        // SAFETY: the paths are strings that end with NUL and outlive the calls.
        unsafe {
            if libc::rename(from.as_ptr(), to.as_ptr()) < 0 {
                return failed();
            }
            let file = libc::open(folder.as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY);
            if file < 0 || libc::fsync(file) < 0 { failed() } else { 0 }
        }
    };
    // SAFETY: `work` makes system calls. A late success is as good as one in time.
    unsafe { call(None, |elapsed| elapsed < image::PATIENCE, work, || ()) }
}

/// Checks that a file or a device answers: opens it, and reads from its beginning.
///
/// # Errors
///
/// Returns an error if that fails, or takes longer than [`PATIENCE`].
pub fn answers(path: &Path) -> io::Result<()> {
    let is_device = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    let flags = if is_device { libc::O_DIRECT } else { 0 };
    Disk::open_with(path, flags, PATIENCE)?.read_at(0, 4096).map(drop)
}

/// Reads a file of the kernel, `length` bytes at the most.
///
/// # Errors
///
/// Returns an error if it cannot be read, or a request takes longer than `patience`.
pub fn read_file(path: &Path, length: usize, patience: Duration) -> io::Result<Vec<u8>> {
    Disk::open_with(path, 0, patience)?.read_at(0, length)
}

/// Writes all cached file data to disks and servers, within `patience`.
///
/// # Errors
///
/// Returns an error if it takes longer, because one of them does not answer.
pub fn sync_everything(patience: Duration) -> io::Result<()> {
    let work = || {
        // SAFETY: the call has no argument.
        unsafe { libc::sync() };
        0
    };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < patience, work, || ()) }
}

/// Writes a word to a file of the kernel.
///
/// # Errors
///
/// Returns an error if the kernel refuses the word, or takes longer than [`PATIENCE`].
pub fn write(path: &Path, word: &str) -> io::Result<()> {
    let path = c_path(path)?;
    let work = || {
        // SAFETY: path and word outlive the call, and the descriptor is the child's.
        unsafe {
            let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_TRUNC);
            if file < 0 || libc::write(file, word.as_ptr().cast(), word.len()) < 0 { failed() } else { 0 }
        }
    };
    // SAFETY: `work` makes system calls, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < PATIENCE, work, || ()) }
}

/// Checks that a file's server answers, by asking it for the file's folder.
///
/// # Errors
///
/// Returns an error if it takes longer than [`PATIENCE`]. A missing folder is reported when the
/// file is opened.
pub fn reach(file: &Path) -> Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(path) = c_path(folder) else { return Ok(()) };
    let work = || {
        // SAFETY: the path is a string that ends with NUL and outlives the call.
        unsafe { libc::access(path.as_ptr(), libc::F_OK) };
        0
    };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < PATIENCE, work, || ()) }.map_err(|error| {
        let text = format!("{} cannot be reached: {error}", file.display());
        Error::new(Exit::Failed, text)
            .hint("nothing was changed; make its disk or its server answer again, and try again")
    })
}

/// Asks a file system for its free space, which a server of files has to tell.
///
/// # Errors
///
/// Returns the kernel's error, or a time-out after `patience`.
pub fn ask_server(at: &Path, patience: Duration) -> io::Result<()> {
    let path = c_path(at)?;
    let work = || {
        // SAFETY: all fields of the structure are numbers.
        let mut space: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the path is a string that ends with NUL, and both outlive the call.
        if unsafe { libc::statfs(path.as_ptr(), &raw mut space) } < 0 { failed() } else { 0 }
    };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < patience, work, || ()) }
}

/// Opens a block device as its only owner, and closes it.
///
/// # Errors
///
/// Returns EBUSY if the device is claimed, another error of the kernel, or a time-out after
/// [`PATIENCE`].
pub fn claim(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let work = || {
        // SAFETY: as in `sync`.
        let file = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_EXCL | libc::O_NONBLOCK) };
        if file < 0 { failed() } else { 0 }
    };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < PATIENCE, work, || ()) }
}

/// Length of the beginning that [`read_beginning`] and [`write_beginning`] handle.
pub const BEGINNING: usize = 4096;

/// Reads the beginning of an open device or file.
///
/// # Errors
///
/// Returns an error if it cannot be read, is shorter, or takes longer than [`PATIENCE`].
pub fn read_beginning(file: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let shared = Shared::new()?;
    let buffer = shared.0.as_ptr();
    let work = || {
        // SAFETY: the buffer has CHUNK bytes, and the descriptor is the child's file.
        match unsafe { libc::pread(FILE, buffer, BEGINNING, 0) } {
            read if read == BEGINNING as isize => 0,
            read if read < 0 => failed(),
            _ => -i64::from(libc::EIO),
        }
    };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(Some(file), |elapsed| elapsed < PATIENCE, work, || ()) }?;
    Ok(shared.copy(BEGINNING))
}

/// Writes the beginning of an open device or file, and makes it durable.
///
/// # Errors
///
/// Returns an error if that fails, or takes longer than [`PATIENCE`]; it may be written later then.
pub fn write_beginning(file: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let shared = Shared::new()?;
    let (buffer, length) = (shared.0.as_ptr(), shared.fill(bytes));
    let work = || {
        // SAFETY: the buffer has CHUNK bytes, and the descriptor is the child's file.
        unsafe {
            match libc::pwrite(FILE, buffer, length, 0) {
                written if written < 0 => failed(),
                written if written as usize != length => -i64::from(libc::EIO),
                _ if libc::fdatasync(FILE) < 0 => failed(),
                _ => 0,
            }
        }
    };
    // SAFETY: `work` makes system calls. A late write is as good as one in time.
    unsafe { call(Some(file), |elapsed| elapsed < PATIENCE, work, || ()) }
}

/// Bytes of one request.
const CHUNK: usize = 1 << 20;

/// Memory that a child reads a device into.
#[derive(Debug)]
struct Shared(NonNull<c_void>);

// SAFETY: only this process unmaps the memory, and only the owner of the disk reads it.
unsafe impl Send for Shared {}

impl Shared {
    fn new() -> io::Result<Self> {
        // SAFETY: a new mapping replaces no other.
        let at = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                CHUNK,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        }?;
        NonNull::new(at).map(Self).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Puts bytes there for a child, at most [`CHUNK`]; returns their number.
    fn fill(&self, bytes: &[u8]) -> usize {
        let length = bytes.len().min(CHUNK);
        // SAFETY: the mapping has CHUNK bytes. The child reads them when it gets a request.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_ptr().cast(), length) };
        length
    }

    /// Copies the bytes that a child has reported.
    fn copy(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length.min(CHUNK)];
        // SAFETY: the mapping has CHUNK bytes. The child that writes there has answered, and gets
        // no other request meanwhile.
        unsafe { ptr::copy_nonoverlapping(self.0.as_ptr().cast(), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: nothing in this process refers to the memory any more; a child that was left
        // behind has a mapping of its own.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr(), CHUNK) };
    }
}

/// A child that answers requests of two numbers, and shares memory for data.
#[derive(Debug)]
struct Server {
    child: Child,
    connection: UnixStream,
    shared: Shared,
}

impl Server {
    /// Starts `serve` in a child, with the shared memory.
    ///
    /// # Safety
    ///
    /// `serve` makes system calls only: it neither allocates nor takes a lock.
    unsafe fn start(file: Option<BorrowedFd<'_>>, serve: impl FnOnce(*mut c_void)) -> io::Result<Self> {
        let shared = Shared::new()?;
        let (connection, theirs) = UnixStream::pair()?;
        let buffer = shared.0.as_ptr();
        // SAFETY: as the caller promises.
        let child =
            unsafe { Child::start(theirs.as_fd(), file.unwrap_or(theirs.as_fd()), || serve(buffer)) }?;
        Ok(Self { child, connection, shared })
    }

    fn request(&self, numbers: [u64; 2]) -> io::Result<()> {
        (&self.connection).write_all(&numbers.map(u64::to_ne_bytes).concat())
    }

    /// Waits for the answer as long as `get_on`, asked each second, returns true.
    fn answer(&self, mut get_on: impl FnMut(Duration) -> bool) -> io::Result<u64> {
        self.connection.set_read_timeout(Some(Duration::from_secs(1)))?;
        let (begun, mut bytes) = (Instant::now(), [0; 8]);
        loop {
            match (&self.connection).read_exact(&mut bytes) {
                Ok(()) => return told(bytes),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if get_on(begun.elapsed()) => {}
                Err(_) => return Err(no_answer(begun.elapsed())),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.connection.shutdown(Shutdown::Both);
        self.child.forget();
    }
}

/// Passes requests to `answer` in a child, until the connection ends.
fn serve(mut answer: impl FnMut([u64; 2]) -> i64) {
    loop {
        let mut request = [0_u64; 2];
        let size = size_of_val(&request);
        // SAFETY: the array has room for `size` bytes. A request arrives whole, because it is
        // smaller than the limit for atomic writes.
        let read = unsafe { libc::read(CONNECTION, request.as_mut_ptr().cast(), size) };
        if read != size as isize || !tell(answer(request)) {
            return;
        }
    }
}

/// A device or a file that a child reads.
#[derive(Debug)]
pub struct Disk {
    server: Server,
    patience: Duration,
}

impl Disk {
    /// Opens a device, which is read directly, past the page cache.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be opened, or does not answer.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_with(path, libc::O_DIRECT, PATIENCE)
    }

    /// Opens a device or a file, with flags of open(2), and a limit for each request.
    fn open_with(path: &Path, flags: i32, patience: Duration) -> io::Result<Self> {
        let path = c_path(path)?;
        // SAFETY: `read` makes system calls.
        let server = unsafe { Server::start(None, |buffer| read(&path, flags, buffer)) }?;
        let disk = Self { server, patience };
        disk.answer()?;
        Ok(disk)
    }

    fn answer(&self) -> io::Result<u64> {
        self.server.answer(|elapsed| elapsed < self.patience)
    }

    /// Reads at most `length` bytes, and fewer at the device's end. Offset and length are multiples
    /// of 4 KiB for a device.
    ///
    /// # Errors
    ///
    /// Returns an error if the device cannot be read, or does not answer.
    pub fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut read = Vec::new();
        while read.len() < length {
            let wanted = (length - read.len()).min(CHUNK);
            self.server.request([offset + read.len() as u64, wanted as u64])?;
            match self.answer()? as usize {
                0 => break,
                count => read.extend(self.server.shared.copy(count)),
            }
        }
        Ok(read)
    }
}

/// Runs the child of a [`Disk`]: reads requested ranges into `buffer`.
fn read(path: &CString, flags: i32, buffer: *mut c_void) {
    // SAFETY: the path is a string that ends with NUL.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | flags) };
    if file < 0 {
        tell(failed());
        return;
    }
    tell(0);
    serve(|[offset, length]| {
        let length = (length as usize).min(CHUNK);
        // SAFETY: the buffer has CHUNK bytes, and is page-aligned as direct reads need it.
        let read = unsafe { libc::pread(file, buffer, length, offset as i64) };
        if read < 0 { failed() } else { read as i64 }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_thawed_file_system_has_its_first_write() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let open = fs::File::open(folder.path()).expect("open");
        let stays = libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT };
        let times = [stays, libc::timespec { tv_sec: 77, tv_nsec: 0 }];
        // A request that no file system knows: nothing is frozen here.
        let thawed = |times| thaw(open.as_fd(), 0, times, Duration::from_secs(20));
        let changed = || std::os::unix::fs::MetadataExt::mtime(&open.metadata().expect("metadata"));
        let before = changed();
        thawed(None).expect("nothing is written");
        assert_eq!(changed(), before);
        thawed(Some(times)).expect("a write");
        assert_eq!(changed(), 77);
    }

    #[test]
    fn a_file_is_read_as_it_is() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        let bytes: Vec<u8> = (0..CHUNK + 5000).map(|at| (at * 7 % 251) as u8).collect();
        fs::write(file.path(), &bytes).expect("written");
        let disk = Disk::open(file.path()).expect("open");
        assert_eq!(disk.read_at(0, CHUNK + 8192).expect("read"), bytes);
        assert_eq!(disk.read_at(4096, 4096).expect("read"), bytes[4096..8192]);
        assert!(disk.read_at(2 << 20, 4096).expect("read").is_empty());
        assert_eq!(disk.read_at(1, 4096).expect_err("not aligned").raw_os_error(), Some(libc::EINVAL));
        let error = Disk::open(Path::new("/no/such/disk")).expect_err("none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    /// Opening a pipe for reading blocks without a writer, as a device that does not answer blocks.
    #[test]
    fn a_device_that_does_not_answer_is_left_behind() {
        let root = tempfile::tempdir().expect("a folder");
        let pipe = root.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        let path = c_path(&pipe).expect("a path");
        let begun = Instant::now();
        let undone = root.path().join("undone");
        let mark = c_path(&undone).expect("a path");
        // SAFETY: both make system calls only.
        let result = unsafe {
            call(
                None,
                |elapsed| elapsed < Duration::from_secs(1),
                || i64::from(libc::open(path.as_ptr(), libc::O_RDONLY)),
                || _ = libc::mkdir(mark.as_ptr(), 0o700),
            )
        };
        let error = result.expect_err("no answer");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().starts_with("it has not answered for "), "{error}");
        assert!(begun.elapsed() < PATIENCE);
        // The child answers too late, and its change is undone.
        assert!(!undone.exists());
        drop(fs::OpenOptions::new().write(true).open(&pipe).expect("its other end"));
        while !undone.exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing was undone");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_beginning_is_written_again() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        let fd = file.as_file().as_fd();
        assert_eq!(read_beginning(fd).expect_err("empty").raw_os_error(), Some(libc::EIO));
        file.as_file().set_len(10_000).expect("longer");
        write_beginning(fd, &[7; BEGINNING]).expect("written");
        assert_eq!(read_beginning(fd).expect("read"), [7; BEGINNING]);
        assert_eq!(file.as_file().metadata().expect("metadata").len(), 10_000);
        let null = fs::File::open("/dev/null").expect("a file");
        let error = write_beginning(null.as_fd(), &[0; BEGINNING]).expect_err("not open for writing");
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn errors_come_back() {
        let error = claim(Path::new("/no/such/disk")).expect_err("none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let error = sync(Path::new("/no/such/place"), |_| true).expect_err("none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(sync(Path::new(env!("CARGO_MANIFEST_DIR")), |elapsed| elapsed < PATIENCE * 6).is_ok());
        let null = fs::File::open("/dev/null").expect("a file");
        let error = ioctl(null.as_fd(), 0x1234, 0x1234, PATIENCE).expect_err("no such request");
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
