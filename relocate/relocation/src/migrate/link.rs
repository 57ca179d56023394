//! The connection between the two machines: TLS on TCP, with the frames of the protocol in it. Both
//! ends use it.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::{
    protocol::{Attempt, Message, Word},
    session::{self, MachineKey, MachineName, PairingToken, Receiver},
    streams::Proof,
    wire::{Error as WireError, Frame, Reader, Writer},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use std::{
    cell::{Cell, RefCell},
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

/// Time for the other end to accept a connection and to identify itself.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// Total time for a connecting peer to identify itself. The destination serves no other peer
/// meanwhile.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
const CLOSED: &str = "the other end has closed the connection";
/// Number of the first stream, which carries all words.
const STREAM: u32 = 0;

/// A TLS session of either end.
trait Session: Read + Write {
    /// Returns true if the session holds data that has left the socket already.
    fn has_more(&mut self) -> bool;
    /// Returns a value that both ends of the session can derive, and no third party.
    fn binding(&self) -> io::Result<[u8; 32]>;
}

impl Session for StreamOwned<ClientConnection, TcpStream> {
    fn has_more(&mut self) -> bool {
        self.conn.process_new_packets().is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
    }

    fn binding(&self) -> io::Result<[u8; 32]> {
        session::binding(&self.conn)
    }
}

impl Session for StreamOwned<ServerConnection, Timed> {
    fn has_more(&mut self) -> bool {
        self.conn.process_new_packets().is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
    }

    fn binding(&self) -> io::Result<[u8; 32]> {
        session::binding(&self.conn)
    }
}

/// The deadline of all current reads, if there is one. A peer that sends a byte now and then gets
/// no more time.
type Due = Rc<Cell<Option<Instant>>>;

/// A socket with that deadline.
struct Timed {
    socket: TcpStream,
    due: Due,
}

impl Timed {
    fn keep_to_it(&self) -> io::Result<()> {
        let Some(due) = self.due.get() else { return Ok(()) };
        let left = Some(due.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
        let left = left.ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "the peer takes too long"))?;
        self.socket.set_read_timeout(Some(left))?;
        self.socket.set_write_timeout(Some(left))
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.keep_to_it()?;
        self.socket.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.keep_to_it()?;
        self.socket.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// The session, shared by reader and writer.
#[derive(Clone)]
struct Shared(Rc<RefCell<Box<dyn Session>>>);

impl Read for Shared {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.borrow_mut().read(buffer)
    }
}

impl Write for Shared {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.borrow_mut().flush()
    }
}

/// A connection between two ends that have identified each other.
pub struct Link {
    session: Shared,
    /// The session's socket, to wait on.
    socket: OwnedFd,
    writer: Option<Writer<Shared>>,
    reader: Option<Reader<Shared>>,
    attempt: Option<Attempt>,
    due: Due,
    /// Number of signs of life that were sent.
    signs: u64,
    /// Bytes of pages that were written.
    pub sent: u64,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({:?})", self.attempt)
    }
}

/// The result of reading.
#[derive(Debug)]
pub enum Heard {
    Frame(Frame),
    /// No frame in the given time.
    Nothing,
    /// The connection is gone, for this reason.
    Gone(String),
}

fn prepare(socket: &TcpStream, patience: Duration) -> io::Result<OwnedFd> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(patience))?;
    socket.set_write_timeout(Some(patience))?;
    socket.as_fd().try_clone_to_owned()
}

impl Link {
    fn new(session: Box<dyn Session>, socket: OwnedFd, due: Due) -> Self {
        let session = Shared(Rc::new(RefCell::new(session)));
        Self { session, socket, writer: None, reader: None, attempt: None, due, signs: 0, sent: 0 }
    }

    /// Connects the source to the receiver that has printed the pairing token.
    ///
    /// # Errors
    ///
    /// Returns an error if the receiver is not there, is another one, or refuses this machine.
    pub fn connect(to: SocketAddr, token: &PairingToken, patience: Duration) -> Result<Self> {
        let (session, made) = connect(to, token, patience)?;
        Ok(Self::new(Box::new(session), made, Due::default()))
    }

    /// Accepts a source that has the pairing token, within [`HANDSHAKE`]: the destination's end.
    /// The name of its attempt must arrive within `patience`.
    ///
    /// # Errors
    ///
    /// Returns an error if the peer has no such token, or is silent.
    pub fn accept(
        receiver: &Receiver,
        socket: TcpStream,
        patience: Duration,
        no_token: Option<&str>,
    ) -> Result<Self> {
        let made = prepare(&socket, HANDSHAKE).map_err(|error| unprepared(&error))?;
        let due = Due::new(Cell::new(Some(Instant::now() + HANDSHAKE)));
        let socket = Timed { socket, due: Rc::clone(&due) };
        let session = match no_token {
            None => receiver.accept(socket),
            Some(why) => receiver.accept_holder(socket, why),
        };
        let session = session.map_err(|error| refused(&error))?;
        due.set(Some(Instant::now() + patience));
        Ok(Self::new(Box::new(session), made, due))
    }

    /// Refuses a source that has the pairing token, within [`HANDSHAKE`], and tells it the reason:
    /// the destination's end.
    ///
    /// # Errors
    ///
    /// Returns an error if the peer has no such token.
    pub fn turn_away(receiver: &Receiver, socket: TcpStream, why: &str) -> Result<()> {
        prepare(&socket, HANDSHAKE).map_err(|error| unprepared(&error))?;
        let due = Due::new(Cell::new(Some(Instant::now() + HANDSHAKE)));
        receiver.turn_away(Timed { socket, due }, why).map_err(|error| refused(&error))
    }

    /// Selects another congestion control of the kernel's for TCP (tcp(7), `TCP_CONGESTION`).
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel has none of that name.
    pub fn control_congestion(&self, name: &str) -> Result<()> {
        control_congestion(&self.socket, name)
    }

    /// Sets the time for which the other end may be silent in the middle of a frame.
    pub fn be_patient(&self, patience: Duration) {
        be_patient(&self.socket, patience);
    }

    /// Closes the connection without waiting for the other end's machine.
    pub fn abandon(self) {
        do_not_linger(&self.socket);
    }

    /// Begins an attempt: the source's end.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn begin(&mut self, attempt: Attempt) -> io::Result<()> {
        self.attempt = Some(attempt);
        self.writer = Some(Writer::begin(self.session.clone(), attempt, STREAM).map_err(io_error)?);
        self.session.flush()
    }

    /// Reads the name of the other end's attempt, and answers in the same attempt: the
    /// destination's end. From then on the other end may be silent for `patience` in the middle of
    /// a frame.
    ///
    /// # Errors
    ///
    /// Returns an error if the other end names no attempt, or the connection is gone.
    pub fn learn(&mut self, patience: Duration) -> mercury_migration::wire::Result<Attempt> {
        let reader = Reader::open(self.session.clone())?;
        let attempt = reader.attempt();
        self.reader = Some(reader.expect(attempt, STREAM)?);
        self.begin(attempt)?;
        self.due.set(None);
        self.be_patient(patience);
        Ok(attempt)
    }

    /// Makes this connection another stream of an attempt if `may` accepts its number, its proof,
    /// and the value that binds the proof to this session. Returns the number. From then on the
    /// other end may be silent for `patience` in the middle of a frame.
    ///
    /// # Errors
    ///
    /// Returns the reason if the stream is refused, or the connection is gone.
    pub fn admit(
        &mut self,
        attempt: Attempt,
        patience: Duration,
        may: impl FnOnce(u32, &Proof, &[u8; 32]) -> Result<(), &'static str>,
    ) -> Result<u32, String> {
        let said = |error: WireError| error.to_string();
        let mut reader = Reader::open(self.session.clone()).map_err(said)?;
        let stream = reader.stream();
        if reader.attempt() != attempt {
            return Err(said(WireError::Other));
        }
        let Some(Frame::Proof(proof)) = reader.next_frame().map_err(said)? else {
            return Err("the peer does not prove that it may join".into());
        };
        let binding = self.session.0.borrow().binding().map_err(|error| error.to_string())?;
        may(stream, &proof, &binding)?;
        self.reader = Some(reader);
        self.attempt = Some(attempt);
        self.writer = Some(Writer::begin(self.session.clone(), attempt, stream).map_err(said)?);
        self.session.flush().map_err(|error| error.to_string())?;
        self.due.set(None);
        self.be_patient(patience);
        Ok(stream)
    }

    /// Returns the attempt of this connection.
    #[must_use]
    pub fn attempt(&self) -> Option<Attempt> {
        self.attempt
    }

    /// Sends a word, and the text that belongs to it.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn say(&mut self, word: Word, text: &[u8]) -> io::Result<()> {
        let writer = self.writer.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        writer.say(word, text).map_err(io_error)?;
        self.session.flush()
    }

    /// Begins a round.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn round(&mut self, number: u64) -> io::Result<()> {
        let writer = self.writer.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        writer.round(number).map_err(io_error)
    }

    /// Tells the source that this end works and has no word to say yet: the destination's end. If the
    /// connection is gone, the next read reports that.
    pub fn sign_of_life(&mut self) {
        let number = self.signs;
        self.signs += 1;
        let _ = self.round(number).and_then(|()| self.flush());
    }

    /// Sends packed pages.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn pages(&mut self, packed: &[u8]) -> io::Result<()> {
        let writer = self.writer.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        writer.pages(packed).map_err(io_error)?;
        self.sent += packed.len() as u64;
        Ok(())
    }

    /// Sends packed chunks of a disk.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn chunks(&mut self, packed: &[u8]) -> io::Result<()> {
        let writer = self.writer.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        writer.chunks(packed).map_err(io_error)
    }

    /// Flushes the connection.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        self.session.flush()
    }

    /// Returns true if something can be read now.
    #[must_use]
    pub fn is_readable(&mut self) -> bool {
        self.wait(&[], Duration::ZERO)
    }

    /// Waits until something can be read here, or from one of `others`. Returns true if it is here.
    pub fn wait(&mut self, others: &[BorrowedFd<'_>], limit: Duration) -> bool {
        if self.session.0.borrow_mut().has_more() {
            return true;
        }
        let here = PollFd::new(&self.socket, PollFlags::IN);
        let others = others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN));
        let mut all: Vec<_> = std::iter::once(here).chain(others).collect();
        wait_for(&mut all, limit);
        !all[0].revents().is_empty()
    }

    /// Reads the next frame, if one comes in time.
    pub fn hear(&mut self, limit: Duration) -> Heard {
        if !self.wait(&[], limit) {
            return Heard::Nothing;
        }
        if self.reader.is_none() {
            let opened = match self.attempt {
                Some(attempt) => {
                    Reader::open(self.session.clone()).and_then(|reader| reader.expect(attempt, STREAM))
                }
                None => return Heard::Gone("the other end has named no attempt".into()),
            };
            match opened {
                Ok(reader) => self.reader = Some(reader),
                Err(error) => return Heard::Gone(error.to_string()),
            }
        }
        match self.reader.as_mut().map(Reader::next_frame) {
            Some(Ok(Some(frame))) => Heard::Frame(frame),
            Some(Ok(None)) | None => Heard::Gone(CLOSED.into()),
            // A machine that is gone does not close its TLS session.
            Some(Err(mercury_migration::wire::Error::Io(error)))
                if error.kind() == io::ErrorKind::UnexpectedEof =>
            {
                Heard::Gone(CLOSED.into())
            }
            Some(Err(error)) => Heard::Gone(error.to_string()),
        }
    }

    /// Reads the next message, if one comes in time; skips pages and rounds.
    pub fn hear_message(&mut self, limit: Duration) -> Result<Option<(Message, Vec<u8>)>, String> {
        match self.hear(limit) {
            Heard::Frame(Frame::Message(message, text)) => Ok(Some((message, text))),
            Heard::Frame(_) | Heard::Nothing => Ok(None),
            Heard::Gone(why) => Err(why),
        }
    }
}

/// Connects to the receiver that has printed the pairing token; returns the session and its socket.
///
/// # Errors
///
/// Fails as [`Link::connect`] does.
pub(super) fn connect(
    to: SocketAddr,
    token: &PairingToken,
    patience: Duration,
) -> Result<(StreamOwned<ClientConnection, TcpStream>, OwnedFd)> {
    let (socket, made) = reach(to, patience)?;
    let session = session::connect(token, socket).map_err(|error| refused(&error))?;
    Ok((session, made))
}

fn reach(to: SocketAddr, patience: Duration) -> Result<(TcpStream, OwnedFd)> {
    let socket = TcpStream::connect_timeout(&to, CONNECT_PATIENCE.min(patience)).map_err(|error| {
        Error::new(Exit::Failed, format!("no connection with {to}: {error}"))
            .hint("check that `mercury receive` waits there, and that no firewall keeps this machine from it")
    })?;
    let made = prepare(&socket, patience).map_err(|error| unprepared(&error))?;
    Ok((socket, made))
}

/// Asks a destination that knows this machine for its pairing token.
///
/// # Errors
///
/// Returns an error if the destination is not there, is another one, does not know this machine, or receives
/// another one.
pub(super) fn introduce(
    to: SocketAddr,
    key: &MachineKey,
    name: &MachineName,
    patience: Duration,
) -> Result<PairingToken> {
    let (socket, _) = reach(to, patience)?;
    session::ask(key, name, socket).map_err(|error| match error {
        session::Error::Refused(_) => Error::new(Exit::Failed, error.to_string()).hint(
            "does that machine wait in `mercury receive --source`, with this machine's name? Is --spare its \
             name? `mercury identity` prints a machine's name on it; their clocks may differ by a day",
        ),
        error => refused(&error),
    })
}

/// Sets the congestion control. See [`Link::control_congestion`].
pub(super) fn control_congestion(socket: impl AsFd, name: &str) -> Result<()> {
    rustix::net::sockopt::set_tcp_congestion(socket, name).map_err(|error| {
        Error::new(Exit::Usage, format!("no congestion control {name}: {error}")).hint(
            "/proc/sys/net/ipv4/tcp_available_congestion_control lists the loaded ones; `modprobe \
             tcp_NAME` loads another",
        )
    })
}

/// Sets the timeouts of a socket. See [`Link::be_patient`].
pub(super) fn be_patient(socket: impl AsFd, patience: Duration) {
    for which in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
        // If this fails the earlier timeout remains.
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, which, Some(patience));
    }
}

/// Returns the number of bytes that were sent by a socket and that the other end's system has not taken yet.
pub(super) fn waiting_bytes(socket: impl AsFd) -> u64 {
    let mut count: libc::c_int = 0;
    // SAFETY: There is room for the answer.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    if result == 0 { u64::try_from(count).unwrap_or(0) } else { 0 }
}

/// Tells by the bytes that wait in this system if the other end takes what was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taking {
    waiting: u64,
}

impl Taking {
    /// So many bytes are progress. A connection with less in a time of patience is as good as silent.
    const STEP: u64 = 1 << 20;

    /// Begins with so many bytes that wait.
    pub fn begin(waiting: u64) -> Self {
        Self { waiting }
    }

    /// Returns true if a step, or the last of the bytes, has been taken since this function last said so.
    pub fn has_taken(&mut self, waiting: u64) -> bool {
        let is_progress = waiting + Self::STEP <= self.waiting || (waiting == 0 && self.waiting > 0);
        if is_progress {
            self.waiting = waiting;
        }
        is_progress
    }
}

/// Makes a socket close at once. See [`Link::abandon`].
pub(super) fn do_not_linger(socket: impl AsFd) {
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits until one of the sockets can be read.
pub fn wait_for(all: &mut [PollFd<'_>], limit: Duration) {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // A signal ends the wait early; the caller checks for it.
    let _ = poll(all, Some(&limit));
}

/// Makes the error for an open connection whose options cannot be set.
fn unprepared(error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("the connection could not be set up: {error}"))
        .hint("try again; `dmesg` may say what is wrong with the network")
}

fn refused(error: &session::Error) -> Error {
    let (exit, hint) = match error {
        session::Error::PairingToken(_) => {
            (Exit::Usage, "paste the whole pairing token that `mercury receive` has printed")
        }
        session::Error::Refused(_) => (
            Exit::Failed,
            "is it the pairing token of the `mercury receive` that waits there now? Each one prints another",
        ),
        session::Error::Introduced => (Exit::Failed, "the machine connects again, with the pairing token"),
        session::Error::NotNow(_) => (Exit::Busy, "wait until that is over, or move to another machine"),
        session::Error::Local(_) => (Exit::Failed, "`dmesg` may say more"),
    };
    Error::new(exit, error.to_string()).hint(hint)
}

/// Converts an error for a caller that waits.
pub(super) fn io_error(error: mercury_migration::wire::Error) -> io::Error {
    match error {
        mercury_migration::wire::Error::Io(error) if error.kind() == io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "the other end accepts no data any more")
        }
        mercury_migration::wire::Error::Io(error) => error,
        error => io::Error::other(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{net::TcpListener, thread};

    #[test]
    fn both_ends_talk_and_end() {
        let (receiver, token) = Receiver::new(Duration::from_secs(60)).expect("a receiver");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = listener.local_addr().expect("its address");
        let patience = Duration::from_secs(30);
        let attempt = Attempt([7; 16]);
        thread::scope(|scope| {
            scope.spawn(move || {
                let (socket, _) = listener.accept().expect("a sender");
                let mut link = Link::accept(&receiver, socket, patience, None).expect("let in");
                assert_eq!(link.learn(patience).expect("an attempt"), attempt);
                let (message, text) = link.hear_message(patience).expect("there").expect("said");
                assert_eq!((message.word, &text[..]), (Word::Offer, &b"it"[..]));
                link.say(Word::Refuse, b"no").expect("said");
            });
            let mut link = Link::connect(to, &token, patience).expect("a link");
            link.begin(attempt).expect("begun");
            link.say(Word::Offer, b"it").expect("said");
            let (message, text) = link.hear_message(patience).expect("there").expect("said");
            assert_eq!((message.word, &text[..]), (Word::Refuse, &b"no"[..]));
            assert!(link.hear_message(patience).is_err(), "it is gone");
        });
    }

    #[test]
    fn bytes_wait_until_the_other_end_takes_them() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut socket = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        let (mut other, _) = listener.accept().expect("connected");
        assert_eq!(waiting_bytes(&socket), 0);
        socket.set_nonblocking(true).expect("set");
        let mut sent = 0;
        while let Ok(count) = socket.write(&[0; 65536]) {
            sent += count;
        }
        let mut taking = Taking::begin(waiting_bytes(&socket));
        assert!(waiting_bytes(&socket) > 0 && !taking.has_taken(waiting_bytes(&socket)));
        other.read_exact(&mut vec![0; sent]).expect("all of it");
        while waiting_bytes(&socket) > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(taking.has_taken(0) && !taking.has_taken(0));
    }

    #[test]
    fn a_few_bytes_are_no_progress() {
        let mut taking = Taking::begin(5 << 20);
        assert!(!taking.has_taken((5 << 20) - 1000) && taking.has_taken(4 << 20));
        assert!(!taking.has_taken((4 << 20) - 1000), "the step begins anew");
        assert!(taking.has_taken(1000) && !taking.has_taken(999) && taking.has_taken(0));
    }

    #[test]
    fn a_known_machine_is_let_in_without_a_token_of_the_operators() {
        let (own, source) = (MachineKey::new().expect("a key"), MachineKey::new().expect("a key"));
        let (receiver, token) = Receiver::new(Duration::from_secs(60)).expect("a receiver");
        let sources = vec![source.name().expect("a name")];
        let receiver = receiver.introducing(session::Introducer { key: own.clone(), sources });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = listener.local_addr().expect("its address");
        let patience = Duration::from_secs(30);
        let stranger = MachineKey::new().expect("a key");
        thread::scope(|scope| {
            scope.spawn(move || {
                for _ in 0..2 {
                    let refused =
                        Link::accept(&receiver, listener.accept().expect("a peer").0, patience, None);
                    assert!(refused.is_err());
                }
                Link::accept(&receiver, listener.accept().expect("a peer").0, patience, None)
                    .expect("let in");
            });
            let name = own.name().expect("a name");
            let refused = introduce(to, &stranger, &name, patience).expect_err("a stranger");
            assert!(refused.hint.is_some_and(|hint| hint.contains("mercury identity")));
            let told = introduce(to, &source, &name, patience).expect("the token");
            assert_eq!(told, token);
            Link::connect(to, &told, patience).expect("a link");
        });
    }

    #[test]
    fn congestion_controls_have_names() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = TcpStream::connect(listener.local_addr().expect("its address")).expect("a socket");
        let (receiver, token) = Receiver::new(Duration::from_secs(60)).expect("a receiver");
        thread::scope(|scope| {
            scope.spawn(move || receiver.accept(listener.accept().expect("a sender").0).map(drop));
            let made = prepare(&socket, HANDSHAKE).expect("prepared");
            let session = session::connect(&token, socket).expect("known");
            let link = Link::new(Box::new(session), made, Due::default());
            link.control_congestion("reno").expect("every kernel has it");
            let error = link.control_congestion("nonesuch").expect_err("refused");
            assert!(error.message.contains("nonesuch"), "{}", error.message);
        });
    }

    /// A stranger that sends a byte now and then gets no more time by that.
    #[test]
    fn a_stranger_has_little_time() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut stranger = TcpStream::connect(listener.local_addr().expect("its address")).expect("a socket");
        let (socket, _) = listener.accept().expect("a socket");
        let within = Duration::from_millis(300);
        let due = Due::new(Cell::new(Some(Instant::now() + within)));
        let mut timed = Timed { socket, due: Rc::clone(&due) };
        thread::spawn(move || {
            while stranger.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let begun = Instant::now();
        assert!(timed.read_exact(&mut [0; 1000]).is_err());
        assert!(begun.elapsed() >= within && begun.elapsed() < Duration::from_secs(10));
        due.set(None);
        timed.socket.set_read_timeout(None).expect("set");
        timed.read_exact(&mut [0; 3]).expect("who is known has time");
    }
}
