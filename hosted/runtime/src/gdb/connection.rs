//! The socket to which gdb connects. A thread of its own waits for it. It accepts one connection
//! after the other, and interrupts the guest when gdb sends something while the guest runs.

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener},
    os::{
        fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
        unix::{
            fs::{FileTypeExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    ptr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mercury_devices::signals::start_thread;
use mercury_hosted_options::gdb::{Address, GdbOption};

use crate::{
    error::{Error, Result},
    signal::is_end_wanted,
};

/// The time after which a signal that may have been missed is sent again.
const AGAIN: Duration = Duration::from_millis(100);

/// A socket that is open, without a thread that listens.
#[derive(Debug)]
pub struct Opened {
    socket: OwnedFd,
    /// True if the machine waits for gdb before its first instruction.
    pub waits: bool,
}

/// Opens the socket.
///
/// # Errors
/// If the address is not to be had.
pub fn open(option: &GdbOption) -> Result<Opened> {
    let socket = match &option.address {
        Address::Path(path) => listen_at(path)?,
        Address::Port(port) => TcpListener::bind((Ipv4Addr::LOCALHOST, *port))
            .map_err(|error| {
                Error::new(format!("cannot listen at port {port}: {error}"))
                    .hint("choose a free port above 1023, or the path of a socket")
            })?
            .into(),
    };
    Ok(Opened { socket, waits: option.waits })
}

/// The owner of the connection.
#[derive(Debug)]
enum State {
    Disconnected,
    /// It has come, and the processor has not taken it yet.
    New(Connection),
    /// The guest runs; the thread listens.
    Running,
    /// The guest is stopped; the processor listens.
    Stopped,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    has_changed: Condvar,
    is_wanted: AtomicBool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.state() = state;
        self.has_changed.notify_all();
    }
}

/// The processor's part of the socket.
#[derive(Debug)]
pub struct Listener {
    socket: RawFd,
    shared: Arc<Shared>,
}

impl Listener {
    /// Begins to listen.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn new(opened: Opened) -> Result<Self> {
        let socket = opened.socket;
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Disconnected),
            has_changed: Condvar::new(),
            is_wanted: AtomicBool::new(false),
        });
        // SAFETY: It takes nothing.
        let (process, listener) = unsafe { (libc::getpid(), libc::gettid()) };
        let number = socket.as_raw_fd();
        let waiting = Waiting { socket, shared: Arc::clone(&shared), process, listener };
        start_thread("gdb", move || waiting.wait()).map_err(|error| Error::thread("gdb", &error))?;
        Ok(Self { socket: number, shared })
    }

    pub fn descriptor(&self) -> RawFd {
        self.socket
    }

    /// Returns true if gdb has connected, or has sent something while the guest ran.
    pub fn is_wanted(&self) -> bool {
        self.shared.is_wanted.load(Ordering::Acquire)
    }

    /// Waits until gdb has connected or sent something, or until a signal asks for the machine's
    /// end. Returns a new connection, which is the processor's from now on.
    pub fn accept(&self) -> Option<Connection> {
        let mut state = self.shared.state();
        while !self.is_wanted() && !is_end_wanted() {
            let waited = self.shared.has_changed.wait_timeout(state, AGAIN);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.shared.is_wanted.store(false, Ordering::Release);
        let before = std::mem::replace(&mut *state, State::Stopped);
        drop(state);
        self.shared.has_changed.notify_all();
        if let State::New(connection) = before { Some(connection) } else { None }
    }

    /// Records that the guest has stopped by itself.
    pub fn stop(&self) {
        self.shared.set(State::Stopped);
    }

    /// Records that the guest runs again, with gdb or without.
    pub fn go_on(&self, is_connected: bool) {
        self.shared.set(if is_connected { State::Running } else { State::Disconnected });
    }
}

/// Opens a socket with a name, to which only its user may connect. An abandoned one is replaced.
pub(crate) fn listen_at(path: &Path) -> Result<OwnedFd> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        let _ = std::fs::remove_file(path);
    }
    let listener = UnixListener::bind(path).map_err(|error| Error::file("listen at", path, error))?;
    let own = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(path, own).map_err(|error| Error::file("keep others from", path, error))?;
    Ok(listener.into())
}

/// A connection. What is sent is collected.
#[derive(Debug)]
pub struct Connection {
    file: Option<File>,
    received: Vec<u8>,
    taken: usize,
    unsent: Vec<u8>,
}

impl Connection {
    pub(super) fn new(file: File) -> Self {
        Self { file: Some(file), received: Vec::new(), taken: 0, unsent: Vec::new() }
    }

    /// Returns the next byte, or nothing at the end.
    pub fn read(&mut self) -> Option<u8> {
        while self.taken == self.received.len() {
            self.received.resize(4096, 0);
            self.taken = 0;
            let read = self.file.as_mut()?.read(&mut self.received);
            self.received.truncate(*read.as_ref().unwrap_or(&0));
            match read {
                Ok(1..) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted && !is_end_wanted() => {}
                _ => return None,
            }
        }
        self.taken += 1;
        Some(self.received[self.taken - 1])
    }

    /// The next byte, if there is one now.
    ///
    /// # Errors
    /// At the end.
    pub fn read_now(&mut self) -> io::Result<Option<u8>> {
        let there = self.taken < self.received.len()
            || self.file.as_ref().is_some_and(|file| is_readable(file.as_raw_fd(), Some(Duration::ZERO)));
        match there.then(|| self.read()) {
            None => Ok(None),
            Some(None) => Err(ErrorKind::UnexpectedEof.into()),
            Some(byte) => Ok(byte),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // The library's own function first checks if the descriptor is open, by a forbidden
            // call. SAFETY: The descriptor has no other owner any more.
            unsafe { libc::close(file.into_raw_fd()) };
        }
    }
}

/// Waits until there is something to read, or the end, but not longer than this.
fn is_readable(descriptor: RawFd, most: Option<Duration>) -> bool {
    let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    let most = most.map(|time| libc::timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() });
    let most = most.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: There is one, and the time lives until the call returns.
    unsafe { libc::ppoll(&raw mut polled, 1, most, ptr::null()) > 0 }
}

impl gdbstub::conn::Connection for Connection {
    type Error = io::Error;

    fn write(&mut self, byte: u8) -> io::Result<()> {
        self.unsent.push(byte);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let sent = self.file.as_mut().map_or(Ok(()), |file| file.write_all(&self.unsent));
        self.unsent.clear();
        sent
    }
}

/// The thread that waits.
struct Waiting {
    socket: OwnedFd,
    shared: Arc<Shared>,
    process: libc::pid_t,
    listener: libc::pid_t,
}

impl Waiting {
    fn wait(&self) {
        loop {
            // SAFETY: The address of the other end is not wanted.
            let descriptor = unsafe {
                libc::accept4(self.socket.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC)
            };
            if descriptor < 0 {
                // Not now: too many are open, or it is gone again.
                is_readable(-1, Some(AGAIN));
                continue;
            }
            // SAFETY: The descriptor was made above and has no other owner. Until the state is
            // `Disconnected` again it is not closed, so the number stays its own.
            let file = File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
            *self.shared.state() = State::New(Connection::new(file));
            self.want();
            self.follow(descriptor);
        }
    }

    /// Watches a connection until it ends.
    fn follow(&self, descriptor: RawFd) {
        loop {
            let mut state = self.shared.state();
            while matches!(*state, State::Stopped | State::New(_)) {
                state = self.shared.has_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let is_running = matches!(*state, State::Running);
            drop(state);
            if !is_running {
                return;
            }
            // The guest may come to a breakpoint meanwhile, and go on; then this looks again.
            if is_readable(descriptor, Some(AGAIN)) {
                self.want();
            }
        }
    }

    /// Makes the processor stop if it has not.
    fn want(&self) {
        let mut held = self.shared.state();
        if matches!(*held, State::Stopped | State::Disconnected) {
            return;
        }
        self.shared.is_wanted.store(true, Ordering::Release);
        self.shared.has_changed.notify_all();
        while self.shared.is_wanted.load(Ordering::Acquire) {
            // One signal may come when it is no use, while the guest takes no interrupts.
            // SAFETY: The thread lives as long as the process.
            unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.listener, libc::SIGUSR1) };
            let waited = self.shared.has_changed.wait_timeout(held, AGAIN);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
