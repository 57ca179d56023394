//! The terminal. A thread of its own reads it, and interrupts the guest when a person types.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    mem::ManuallyDrop,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
    ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mercury_devices::{
    signals::{Waker, start_thread},
    terminal::{self, Keys},
};

use super::signal_waker;
use crate::error::{Error, Result};

/// Written out at the latest then.
const FULL: usize = 4096;

#[derive(Debug, Default)]
struct Typed {
    bytes: Mutex<VecDeque<u8>>,
    ended: AtomicBool,
    /// True while the thread takes bytes from the terminal.
    is_reading: AtomicBool,
    /// True while it must not begin to.
    is_paused: AtomicBool,
}

/// The time between two looks if the console may be read again.
const MOMENT: Duration = Duration::from_millis(20);
/// The time in which the thread has taken the bytes that are there.
const PAUSE_AT_MOST: Duration = Duration::from_secs(1);

/// The size from which a log is shortened, and what is kept of it.
const LOG_MOST: u64 = 4 << 20;
const LOG_KEPT: u64 = 1 << 20;
/// The number of bytes after which a log's size is looked at again.
const LOG_PIECE: u64 = 256 << 10;

/// A file to which this process appends the guest's output, and which it may read: the log of a machine in
/// the background. The host's memory holds it, so the older part of it goes when it is long. The machine does
/// that itself, because it may outlive all others.
#[derive(Debug)]
pub struct Log {
    file: ManuallyDrop<File>,
    /// The bytes that were written since the size was looked at.
    unseen: u64,
}

impl Log {
    /// Returns the log if standard output is one.
    #[must_use]
    pub fn of_output() -> Option<Self> {
        // SAFETY: The process has its standard output for as long as it lives, and this does not close it.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDOUT_FILENO) });
        Self::of(file)
    }

    fn of(file: ManuallyDrop<File>) -> Option<Self> {
        const BOTH: libc::c_int = libc::O_RDWR | libc::O_APPEND;
        // SAFETY: It takes a descriptor and a number.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        let is_log = flags >= 0 && flags & (libc::O_ACCMODE | libc::O_APPEND) == BOTH;
        // One that a machine before has left may be long.
        let log = Self { unseen: LOG_PIECE, file };
        (is_log && log.file.metadata().is_ok_and(|of| of.is_file())).then_some(log)
    }

    /// Notes that so many bytes were written.
    fn wrote(&mut self, bytes: usize) {
        self.unseen += bytes as u64;
        if self.unseen >= LOG_PIECE {
            self.unseen = 0;
            // A log that cannot be read goes on as it is.
            let _ = self.shorten();
        }
    }

    fn shorten(&self) -> io::Result<()> {
        let mut file: &File = &self.file;
        // All is written at the end, wherever the position is.
        let length = file.seek(SeekFrom::End(0))?;
        if length <= LOG_MOST {
            return Ok(());
        }
        let mut tail = vec![0; LOG_KEPT as usize];
        file.read_exact_at(&mut tail, length - LOG_KEPT)?;
        let line = tail.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        file.set_len(0)?;
        file.write_all(b"mercury disco: older lines were removed here\n")?;
        file.write_all(&tail[line..])
    }
}

/// The terminal.
#[derive(Debug)]
pub struct Console {
    typed: Arc<Typed>,
    output: Vec<u8>,
    log: Option<Log>,
}

impl Console {
    /// Makes the terminal deliver every key, and begins to listen. The calling thread gets SIGUSR1
    /// for input.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn open(log: Option<Log>) -> Result<Self> {
        let typed = Arc::new(Typed::default());
        let is_terminal = terminal::make_raw();
        let (shared, waker) = (Arc::clone(&typed), signal_waker());
        // SAFETY: The process has its standard input for as long as it lives, and this does not close it.
        let input = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDIN_FILENO) });
        start_thread("console", move || listen(&input, &shared, is_terminal, &waker))
            .map_err(|error| Error::new(format!("cannot start a thread for the console: {error}")))
            .map_err(|error| error.hint("the host limits your processes and threads: raise ulimit -u"))?;
        Ok(Self { typed, output: Vec::new(), log })
    }

    /// Takes the typed bytes, at most so many.
    pub fn take(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = self.typed.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let count = most.min(bytes.len());
        bytes.drain(..count).collect()
    }

    /// Returns the typed bytes that were not taken.
    #[must_use]
    pub fn typed(&self) -> Vec<u8> {
        self.typed.bytes.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// Leaves all that is typed from now on where it is. Returns false if the thread does not stop in time.
    #[must_use]
    pub fn pause(&self) -> bool {
        self.typed.is_paused.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while self.typed.is_reading.load(Ordering::SeqCst) {
            if start.elapsed() > PAUSE_AT_MOST {
                self.go_on();
                return false;
            }
            thread::yield_now();
        }
        true
    }

    /// Takes again what is typed.
    pub fn go_on(&self) {
        self.typed.is_paused.store(false, Ordering::SeqCst);
    }

    /// Puts bytes before all that is typed from now on.
    pub fn type_again(&mut self, bytes: &[u8]) {
        let mut typed = self.typed.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.iter().rev().for_each(|byte| typed.push_front(*byte));
    }

    /// Returns true if the person at the terminal has asked for the machine's end.
    #[must_use]
    pub fn was_ended(&self) -> bool {
        self.typed.ended.load(Ordering::Acquire)
    }

    /// Shows what the guest has sent, when a line is complete or the guest sleeps.
    pub fn put(&mut self, bytes: &[u8]) {
        self.output.extend(bytes);
        if bytes.contains(&b'\n') || self.output.len() >= FULL {
            self.flush();
        }
    }

    /// Writes all of the output now.
    pub fn flush(&mut self) {
        if !self.output.is_empty() {
            // The reader of the output may be gone; the machine runs on.
            let _ = io::stdout().write_all(&self.output);
            let _ = io::stdout().flush();
            if let Some(log) = &mut self.log {
                log.wrote(self.output.len());
            }
            self.output.clear();
        }
    }

    /// Gives the terminal back as it was.
    pub fn restore(&mut self) {
        self.flush();
        terminal::restore();
    }
}

/// Takes what is typed. The input has no buffer of its own, because what is in one would be waited for until
/// the next key.
fn listen(mut input: &File, typed: &Typed, is_terminal: bool, waker: &Waker) {
    let mut buffer = [0; 1024];
    let mut keys = Keys::default();
    loop {
        await_input(input);
        typed.is_reading.store(true, Ordering::SeqCst);
        if typed.is_paused.load(Ordering::SeqCst) {
            typed.is_reading.store(false, Ordering::SeqCst);
            thread::park_timeout(MOMENT);
            continue;
        }
        let Ok(count @ 1..) = input.read(&mut buffer) else {
            typed.is_reading.store(false, Ordering::SeqCst);
            return;
        };
        let read = &buffer[..count];
        let (read, leaves) = if is_terminal { keys.read(read) } else { (read.to_vec(), false) };
        typed.bytes.lock().unwrap_or_else(PoisonError::into_inner).extend(read);
        if leaves {
            typed.ended.store(true, Ordering::Release);
        }
        typed.is_reading.store(false, Ordering::SeqCst);
        waker();
    }
}

/// Waits until there is something to read, or the end.
fn await_input(input: &File) {
    let mut ready = libc::pollfd { fd: input.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: There is one descriptor. The C library's other function makes a call that is forbidden here.
    unsafe { libc::ppoll(&raw mut ready, 1, ptr::null(), ptr::null()) };
}

#[cfg(test)]
mod tests {
    use std::{os::fd::OwnedFd, sync::mpsc};

    use super::*;

    /// A machine whose template has ended writes without end.
    #[test]
    fn a_log_is_short_however_much_is_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("console.log");
        let open = |is_read: bool| {
            let file = File::options().create(true).append(true).read(is_read).open(&path);
            ManuallyDrop::new(file.expect("the log"))
        };
        assert!(Log::of(open(false)).is_none(), "a file of the user's stays as it is");
        let (mut log, mut writer) = (Log::of(open(true)).expect("a log"), open(true));
        let mut longest = 0;
        for piece in 0..3000 {
            let text: String = (0..200).map(|line| format!("piece {piece}, line {line}\n")).collect();
            writer.write_all(text.as_bytes()).expect("the log");
            log.wrote(text.len());
            longest = longest.max(path.metadata().expect("the log").len());
        }
        assert!((LOG_MOST..LOG_MOST + 2 * LOG_PIECE).contains(&longest), "{longest}");
        let text = std::fs::read_to_string(&path).expect("the log");
        let (first, rest) = text.split_once('\n').expect("lines");
        assert_eq!(first, "mercury disco: older lines were removed here");
        assert!(rest.starts_with("piece ") && rest.ends_with("piece 2999, line 199\n"));
    }

    /// Somebody pastes more than is read at a time, and types nothing after it.
    #[test]
    fn all_of_a_long_paste_is_taken() {
        let pasted: Vec<u8> = (0..3000_u32).map(|number| (number % 251) as u8).collect();
        let (reader, mut writer) = io::pipe().expect("a pipe");
        writer.write_all(&pasted).expect("room in the pipe");
        let typed = Arc::new(Typed::default());
        let (wake, woken) = mpsc::channel();
        let shared = Arc::clone(&typed);
        let listener = thread::spawn(move || {
            let waker: Waker = Arc::new(move || wake.send(()).unwrap_or(()));
            listen(&OwnedFd::from(reader).into(), &shared, false, &waker);
        });
        let count = || typed.bytes.lock().expect("the bytes").len();
        while count() < pasted.len() {
            woken.recv_timeout(Duration::from_secs(10)).expect("the rest of the paste");
        }
        drop(writer);
        listener.join().expect("the thread's end");
        assert_eq!(*typed.bytes.lock().expect("the bytes"), pasted);
    }
}
