//! The host's end of a serial port: the terminal, or a socket to which one client at a time connects. A
//! thread of its own carries the bytes, so that no processor of the guest waits for a reader.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::{
    Bell,
    signals::{Waker, start_thread},
    terminal::Keys,
};
use std::{
    collections::VecDeque,
    fs,
    io::{self, ErrorKind, IsTerminal, Read, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// The answer to a client that comes to a private socket while another one is there.
const BUSY: &[u8] = b"{\"error\":{\"message\":\"another order is being carried out\",\"busy\":true,\
    \"hint\":\"wait until the other `mercury guests migrate` has ended\"}}\n";
/// So many bytes wait in each direction. Of more, the guest's oldest are lost, and a client waits.
const FULL: usize = 64 << 10;

#[derive(Debug, Default)]
struct Buffers {
    /// From the host to the guest.
    received: VecDeque<u8>,
    /// From the guest to the host.
    sent: VecDeque<u8>,
    /// Number of times that a client has come or gone, if each one has the wire for itself.
    client: u64,
}

/// The host's end of a serial port.
#[derive(Debug)]
pub struct Wire {
    buffers: Mutex<Buffers>,
    bell: Option<Bell>,
    /// The socket that clients connect to.
    listener: Option<RawFd>,
    /// True while the other end may still read what is sent.
    is_open: AtomicBool,
    /// True after the person at the terminal has left the guest.
    was_left: AtomicBool,
    /// True if the thread that carries the bytes has to end.
    is_closed: AtomicBool,
}

/// Wires whose threads end with this value.
#[derive(Debug, Default)]
pub struct Wires(Vec<Arc<Wire>>);

impl Wires {
    /// Keeps a wire, and returns it.
    pub fn add(&mut self, wire: Arc<Wire>) -> Arc<Wire> {
        self.0.push(Arc::clone(&wire));
        wire
    }

    /// Returns the wires, in the order in which they were added.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<Wire>> {
        self.0.iter()
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        self.iter().for_each(|wire| wire.close());
    }
}

impl Wire {
    /// Makes a wire that leads nowhere.
    #[must_use]
    pub fn loose() -> Self {
        Self {
            buffers: Mutex::default(),
            bell: None,
            listener: None,
            is_open: AtomicBool::new(false),
            was_left: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Connects standard input and output. The waker is called when bytes have come.
    ///
    /// # Errors
    /// The host has no room for a thread.
    pub fn terminal(waker: Waker) -> Result<Arc<Self>> {
        Self::start(End::Terminal { reads: true, keys: terminal_keys() }, waker)
    }

    /// Makes a socket at a path. The waker is called when bytes have come.
    ///
    /// # Errors
    /// There can be no socket.
    pub fn socket(path: &Path, waker: Waker) -> Result<Arc<Self>> {
        Self::listen(path, waker, false)
    }

    /// Makes a socket at a path, whose clients neither get what was sent to others nor go on with what others
    /// have written.
    ///
    /// # Errors
    /// There can be no socket.
    pub fn private_socket(path: &Path, waker: Waker) -> Result<Arc<Self>> {
        Self::listen(path, waker, true)
    }

    fn listen(path: &Path, waker: Waker, is_private: bool) -> Result<Arc<Self>> {
        let wrong = |error: io::Error| {
            let text = format!("cannot make the socket {}: {error}", path.display());
            Error::new(Exit::Failed, text).hint(crate::FOLDER)
        };
        let _ = fs::remove_file(path);
        let listener = UnixListener::bind(path).map_err(wrong)?;
        listener.set_nonblocking(true).map_err(wrong)?;
        let kind = if is_private { Kind::Private { turned_away: None } } else { Kind::Shared };
        Self::start(End::Socket { listener, client: None, kind }, waker)
    }

    fn start(mut end: End, waker: Waker) -> Result<Arc<Self>> {
        let wrong = |why: String| {
            Error::new(Exit::Failed, format!("cannot start a console: {why}")).hint(crate::SHORT_OF)
        };
        let bell = Bell::new().map_err(|error| wrong(error.message().to_owned()))?;
        let is_open = AtomicBool::new(matches!(end, End::Terminal { .. }));
        let wire = Arc::new(Self {
            buffers: Mutex::default(),
            bell: Some(bell),
            listener: end.listener(),
            is_open,
            was_left: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        });
        let shared = Arc::clone(&wire);
        start_thread("console", move || {
            while !shared.is_closed.load(Ordering::Acquire) {
                end.carry(&shared, &waker);
            }
        })
        .map_err(|error| wrong(error.to_string()))?;
        Ok(wire)
    }

    /// Returns the descriptor of the socket that clients connect to.
    #[must_use]
    pub fn listener(&self) -> Option<RawFd> {
        self.listener
    }

    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }

    /// Takes bytes for the guest, at most so many.
    pub fn take(&self, most: usize) -> Vec<u8> {
        self.take_of_client(most).1
    }

    /// Takes bytes for the guest, at most so many, with a number that differs for each client of a private
    /// socket.
    pub fn take_of_client(&self, most: usize) -> (u64, Vec<u8>) {
        let mut buffers = self.buffers();
        let client = buffers.client;
        let count = most.min(buffers.received.len());
        let was_full = buffers.received.len() >= FULL;
        let bytes = buffers.received.drain(..count).collect();
        drop(buffers);
        if was_full && count > 0 {
            self.ring();
        }
        (client, bytes)
    }

    /// Sends bytes of the guest.
    pub fn send(&self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let mut buffers = self.buffers();
        buffers.sent.extend(bytes);
        let lost = buffers.sent.len().saturating_sub(FULL);
        buffers.sent.drain(..lost);
        drop(buffers);
        self.ring();
    }

    /// Receives bytes for the guest.
    pub fn receive(&self, bytes: &[u8]) {
        self.buffers().received.extend(bytes);
    }

    /// Forgets the bytes of one client before the next.
    fn forget(&self) {
        let mut buffers = self.buffers();
        buffers.received.clear();
        buffers.sent.clear();
        buffers.client += 1;
    }

    /// Ends the thread that carries the bytes. The socket is closed when the thread has noticed.
    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.ring();
    }

    /// Returns true if the person at the terminal has left the guest.
    pub fn was_left(&self) -> bool {
        self.was_left.load(Ordering::Acquire)
    }

    /// Waits until a reader has what was sent, at most so long.
    pub fn finish(&self, patience: Duration) {
        let start = Instant::now();
        while self.is_open.load(Ordering::Acquire)
            && !self.buffers().sent.is_empty()
            && start.elapsed() < patience
        {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns what a guest has sent on a wire that leads nowhere.
    #[cfg(test)]
    pub fn sent(&self) -> Vec<u8> {
        self.buffers().sent.iter().copied().collect()
    }
}

/// The other end.
#[derive(Debug)]
enum End {
    /// `keys` is there if it is a terminal indeed, and not a file or a pipe.
    Terminal {
        reads: bool,
        keys: Option<Keys>,
    },
    Socket {
        listener: UnixListener,
        client: Option<UnixStream>,
        kind: Kind,
    },
}

/// The clients of a socket.
#[derive(Debug)]
enum Kind {
    /// One after the other, and one waits for the other's end.
    Shared,
    /// Each for itself.
    Private {
        /// The last client that came while another one was there. It reads its answer, and may still write.
        turned_away: Option<UnixStream>,
    },
}

impl End {
    fn listener(&self) -> Option<RawFd> {
        match self {
            Self::Terminal { .. } => None,
            Self::Socket { listener, .. } => Some(listener.as_raw_fd()),
        }
    }

    /// Waits for one event, and carries what is there.
    fn carry(&mut self, wire: &Wire, waker: &Waker) {
        let (is_full, has_sent) = {
            let buffers = wire.buffers();
            (buffers.received.len() >= FULL, !buffers.sent.is_empty())
        };
        let reading = if is_full { 0 } else { libc::POLLIN };
        let writing = if has_sent { libc::POLLOUT } else { 0 };
        let bell = wire.bell.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let (input, output) = self.descriptors();
        let entry = |fd: RawFd, events: i16| libc::pollfd { fd, events, revents: 0 };
        // A descriptor of -1 is left out; a client that only hangs up is seen by its input.
        let output = if writing == 0 { -1 } else { output };
        let input = if reading == 0 { -1 } else { input };
        let mut polled = [
            entry(bell, libc::POLLIN),
            entry(input, libc::POLLIN),
            entry(output, libc::POLLOUT),
            entry(self.newcomers(), libc::POLLIN),
        ];
        // SAFETY: The list has four entries.
        unsafe { libc::poll(polled.as_mut_ptr(), 4, -1) };
        let [rang, can_read, can_write, comes] = polled.map(|one| one.revents != 0);
        if rang && let Some(bell) = &wire.bell {
            bell.silence();
        }
        if can_write {
            self.write(wire);
        }
        if can_read && self.read(wire) {
            waker();
        }
        // After the end of the client before, the one that comes is not turned away.
        if comes {
            self.turn_away();
        }
    }

    /// Returns the descriptor by which clients come that are turned away; -1 if there is none.
    fn newcomers(&self) -> RawFd {
        match self {
            Self::Socket { listener, client: Some(_), kind: Kind::Private { .. } } => listener.as_raw_fd(),
            _ => -1,
        }
    }

    /// Answers a client of a private socket that comes while another one is there.
    fn turn_away(&mut self) {
        let Self::Socket { listener, client: Some(_), kind: Kind::Private { turned_away } } = self else {
            return;
        };
        let Ok((mut stream, _)) = listener.accept() else { return };
        // A socket that is new has room for it.
        let _ = stream.set_nonblocking(true);
        let _ = stream.write(BUSY);
        *turned_away = Some(stream);
    }

    /// Returns the descriptors of input and output; -1 if there is none.
    fn descriptors(&self) -> (RawFd, RawFd) {
        match self {
            Self::Terminal { reads, .. } => {
                (if *reads { libc::STDIN_FILENO } else { -1 }, libc::STDOUT_FILENO)
            }
            Self::Socket { client: Some(client), .. } => (client.as_raw_fd(), client.as_raw_fd()),
            Self::Socket { listener, client: None, .. } => (listener.as_raw_fd(), -1),
        }
    }

    /// Reads bytes, or takes a client in. Returns true if the guest has got some.
    fn read(&mut self, wire: &Wire) -> bool {
        let mut bytes = [0; 4096];
        let count = match self {
            Self::Terminal { reads, keys } => {
                let count = io::stdin().lock().read(&mut bytes);
                *reads = matches!(count, Ok(1..)) || is_temporary(&count);
                if let (Some(keys), Ok(count)) = (keys, &count) {
                    let (typed, leaves) = keys.read(&bytes[..*count]);
                    wire.receive(&typed);
                    wire.was_left.fetch_or(leaves, Ordering::Release);
                    return true;
                }
                count
            }
            Self::Socket { client: Some(stream), .. } => {
                let count = stream.read(&mut bytes);
                if !matches!(count, Ok(1..)) && !is_temporary(&count) {
                    self.lose(wire);
                }
                count
            }
            Self::Socket { listener, client, kind } => {
                *client = listener.accept().ok().map(|(stream, _)| stream);
                if let Some(stream) = client {
                    if let Kind::Private { turned_away } = kind {
                        *turned_away = None;
                        wire.forget();
                    }
                    let _ = stream.set_nonblocking(true);
                    wire.is_open.store(true, Ordering::Release);
                }
                return false;
            }
        };
        let Ok(count @ 1..) = count else { return false };
        wire.receive(&bytes[..count]);
        true
    }

    fn write(&mut self, wire: &Wire) {
        let bytes: Vec<u8> = wire.buffers().sent.iter().take(4096).copied().collect();
        let count = match self {
            Self::Terminal { .. } => io::stdout().lock().write(&bytes).and_then(|count| {
                io::stdout().flush()?;
                Ok(count)
            }),
            Self::Socket { client: Some(client), .. } => client.write(&bytes),
            Self::Socket { .. } => return,
        };
        match count {
            Ok(count) => {
                let mut buffers = wire.buffers();
                let count = count.min(buffers.sent.len());
                buffers.sent.drain(..count);
            }
            Err(_) if is_temporary(&count) => {}
            // No client reads any more, and the guest runs on.
            Err(_) => match self {
                Self::Terminal { .. } => wire.buffers().sent.clear(),
                Self::Socket { .. } => self.lose(wire),
            },
        }
    }

    fn lose(&mut self, wire: &Wire) {
        if let Self::Socket { client, kind, .. } = self {
            *client = None;
            if matches!(kind, Kind::Private { .. }) {
                wire.forget();
            }
            wire.is_open.store(false, Ordering::Release);
        }
    }
}

/// Returns what reads the keys of a person, if standard input is a terminal.
fn terminal_keys() -> Option<Keys> {
    io::stdin().is_terminal().then(Keys::default)
}

fn is_temporary(result: &io::Result<usize>) -> bool {
    let kind = result.as_ref().err().map(io::Error::kind);
    matches!(kind, Some(ErrorKind::WouldBlock | ErrorKind::Interrupted))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn wait_for(mut is_done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_done() {
            assert!(start.elapsed() < PATIENCE, "nothing comes");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_client_gets_what_was_sent_before_it_came_and_another_one_follows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.sock");
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        let wire = Wire::socket(
            &path,
            Arc::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            }),
        )
        .unwrap();
        wire.send(b"before");
        for turn in 0..2 {
            let mut client = UnixStream::connect(&path).unwrap();
            let mut bytes = [0; 6];
            if turn == 0 {
                client.read_exact(&mut bytes).unwrap();
                assert_eq!(&bytes, b"before");
            }
            client.write_all(b"typed").unwrap();
            let mut got = Vec::new();
            wait_for(|| {
                got.extend(wire.take(3));
                got.len() == 5
            });
            assert_eq!(got, b"typed");
            wire.send(b"answer");
            client.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"answer");
            wire.finish(PATIENCE);
        }
        assert!(woken.load(Ordering::SeqCst) >= 2);
    }

    #[test]
    fn a_socket_that_cannot_be_made_has_a_remedy_that_exists() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gone/console.sock");
        let error = Wire::socket(&path, Arc::new(|| {})).map(drop).unwrap_err();
        assert!(error.hint.is_some_and(|hint| hint.contains("/run") && !hint.contains("--")));
    }

    #[test]
    fn a_client_of_a_private_socket_gets_nothing_of_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("orders.sock");
        let wire = Wire::private_socket(&path, Arc::new(|| {})).unwrap();
        wire.send(b"to nobody");
        let mut seen = Vec::new();
        for answer in [b"first ", b"second"] {
            let mut client = UnixStream::connect(&path).unwrap();
            wait_for(|| wire.is_open.load(Ordering::Acquire));
            wire.send(answer);
            let mut bytes = [0; 6];
            client.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, answer);
            client.write_all(b"typed").unwrap();
            wait_for(|| wire.buffers().received.len() == 5);
            let (number, bytes) = wire.take_of_client(2);
            assert_eq!(bytes, b"ty");
            seen.push(number);
            drop(client);
            wait_for(|| !wire.is_open.load(Ordering::Acquire));
            assert_eq!(wire.take(5), b"");
            wire.send(b"too late");
        }
        assert_ne!(seen[0], seen[1]);
    }

    #[test]
    fn a_client_of_a_private_socket_that_comes_meanwhile_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("orders.sock");
        let wire = Wire::private_socket(&path, Arc::new(|| {})).unwrap();
        let mut first = UnixStream::connect(&path).unwrap();
        wait_for(|| wire.is_open.load(Ordering::Acquire));
        for _ in 0..2 {
            let mut other = UnixStream::connect(&path).unwrap();
            other.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut answer = vec![0; BUSY.len()];
            other.read_exact(&mut answer).unwrap();
            assert_eq!(answer, BUSY);
            other.write_all(b"an order").unwrap();
        }
        wire.send(b"answer");
        let mut bytes = [0; 6];
        first.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"answer");
        assert_eq!(wire.take(9), b"", "nobody else's order");
        drop(first);
        wait_for(|| !wire.is_open.load(Ordering::Acquire));
        let _third = UnixStream::connect(&path).unwrap();
        wait_for(|| wire.is_open.load(Ordering::Acquire));
    }

    #[test]
    fn a_wire_that_is_dropped_leaves_no_thread_and_no_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.sock");
        let mut wires = Wires::default();
        let weak = Arc::downgrade(&wires.add(Wire::socket(&path, Arc::new(|| {})).unwrap()));
        let client = UnixStream::connect(&path).unwrap();
        wait_for(|| weak.upgrade().is_some_and(|wire| wire.is_open.load(Ordering::Acquire)));
        drop(wires);
        wait_for(|| weak.upgrade().is_none());
        wait_for(|| UnixStream::connect(&path).is_err());
        drop(client);
    }

    #[test]
    fn the_oldest_bytes_are_lost_while_nobody_reads() {
        let wire = Wire::loose();
        wire.send(&[1; FULL]);
        wire.send(&[2; 10]);
        let sent = wire.sent();
        assert_eq!((sent.len(), sent[0], sent[FULL - 10]), (FULL, 1, 2));
    }

    #[test]
    fn a_client_that_types_too_much_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.sock");
        let wire = Wire::socket(&path, Arc::new(|| {})).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        let all = 40 * FULL;
        let writer = std::thread::spawn(move || client.write_all(&vec![7; all]).map(|()| client));
        wait_for(|| wire.buffers().received.len() >= FULL);
        std::thread::sleep(Duration::from_millis(50));
        assert!(wire.buffers().received.len() < FULL + 4096);
        let mut got = 0;
        wait_for(|| {
            got += wire.take(1000).len();
            got == all
        });
        writer.join().unwrap().unwrap();
    }
}
