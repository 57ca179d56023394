//! The pages of a machine, by one stream or by several. Each stream has a thread that decrypts,
//! unpacks, puts pages to their addresses, and hashes the data that can be read there then.
//!
//! The first stream belongs to [`super::serve`]. The others are accepted while pages arrive: as
//! many as were offered, each once. The end that the first stream names is believed only when all
//! others have ended.

use super::{serve::TAKEN, spare::Memory};
use crate::migrate::link::{HANDSHAKE, Heard, Link};
use mercury_abi::restart::{LoadEntry, MERCURY_LOAD_DATA, MERCURY_LOAD_ZERO};
use mercury_control::error::{Error, Result};
use mercury_migration::{
    announcement::Secret,
    protocol::{Attempt, Digest, Message, Word},
    session::Receiver,
    streams::{Proof, is_proof, proof, stream_of},
    wire::{Content, Frame, Ledger, PAGE, Page, Pages, hash_of},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    net::Shutdown,
};
use std::{
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// Number of peers without a proof yet that may be connected at once.
const STRANGERS: usize = 16;

/// The reason why no more pages will arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A stream was cut off before its end.
    Gone(String),
    /// A stream carried impossible data.
    Breach(String),
}

/// The state of a stream other than the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    /// No peer has opened the stream.
    Awaited,
    /// Pages arrive on the stream.
    Open,
    /// All pages of the stream have arrived, and this is its digest of all memory.
    Ended(Digest),
}

/// The state of all streams other than the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Pages are still to arrive.
    Open,
    /// All streams have ended, with this digest; `None` if there are no others.
    Ended(Option<Digest>),
    /// No more pages will arrive.
    Broken(Broken),
}

/// The attempt that streams must belong to.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedStreams {
    pub attempt: Attempt,
    /// Secret of the attempt's offer.
    pub secret: Secret,
    /// Number of streams, with the first.
    pub streams: u32,
}

/// The data that all streams share.
struct Shared {
    expected: ExpectedStreams,
    memory: Arc<dyn Memory>,
    ledger: Mutex<Ledger>,
    pages: AtomicU64,
    /// True if data has arrived since the last check.
    is_alive: AtomicBool,
    /// The states of the streams other than the first, and the reason if one is broken.
    streams: Mutex<(Vec<Stream>, Option<Broken>)>,
    /// An event descriptor, readable when a stream has ended or broken.
    bell: OwnedFd,
    /// Time for which a stream may be silent in the middle of a frame.
    patience: Duration,
}

/// The arriving memory.
pub struct Intake {
    shared: Arc<Shared>,
    threads: Vec<(TcpStream, JoinHandle<()>)>,
}

fn breach(what: &str) -> Error {
    Error::fault(what)
}

impl Intake {
    /// Makes the intake of a machine with this ledger into this memory.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel gives no event descriptor.
    pub fn new(
        expected: ExpectedStreams,
        memory: Arc<dyn Memory>,
        ledger: Ledger,
        patience: Duration,
    ) -> Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::system("making an event descriptor", errno))?;
        let others = vec![Stream::Awaited; expected.streams.saturating_sub(1) as usize];
        let shared = Shared {
            expected,
            memory,
            ledger: Mutex::new(ledger),
            pages: AtomicU64::new(0),
            is_alive: AtomicBool::new(false),
            streams: Mutex::new((others, None)),
            bell,
            patience,
        };
        Ok(Self { shared: Arc::new(shared), threads: Vec::new() })
    }

    /// Loads pages of the first stream.
    ///
    /// # Errors
    ///
    /// Returns an error if they are wrong or cannot be loaded.
    pub fn load(&self, pages: &Pages) -> Result<()> {
        self.shared.load(0, pages)
    }

    /// Returns the ledger, with the hash of each page that has arrived.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.shared.ledger()
    }

    /// Returns the number of pages that have arrived.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.shared.pages.load(Ordering::Relaxed)
    }

    /// Returns true if data has arrived on streams other than the first since the last call.
    #[must_use]
    pub fn was_alive(&self) -> bool {
        self.shared.is_alive.swap(false, Ordering::Relaxed)
    }

    /// Returns the state of the other streams.
    #[must_use]
    pub fn state(&self) -> State {
        // The descriptor becomes readable again for later events.
        let _ = rustix::io::read(&self.shared.bell, &mut [0; 8]);
        let (streams, broken) = &*self.shared.streams();
        if let Some(broken) = broken {
            return State::Broken(broken.clone());
        }
        let mut digests = streams.iter().map(|stream| match stream {
            Stream::Ended(digest) => Some(*digest),
            Stream::Awaited | Stream::Open => None,
        });
        let Some(first) = digests.next() else { return State::Ended(None) };
        match first {
            Some(digest) if digests.clone().all(|other| other == first) => State::Ended(Some(digest)),
            Some(_) if digests.all(|other| other.is_some()) => {
                State::Broken(Broken::Breach("the digests of its streams differ".into()))
            }
            _ => State::Open,
        }
    }

    /// Returns true if an offered stream is not open yet.
    #[must_use]
    pub fn awaits_streams(&self) -> bool {
        self.shared.streams().0.contains(&Stream::Awaited)
    }

    /// Starts a thread for a peer that connects, which may open another stream.
    pub fn let_in(&mut self, receiver: &Receiver, socket: TcpStream, from: SocketAddr) {
        self.threads.retain(|(_, thread)| !thread.is_finished());
        let known = self.shared.expected.streams as usize;
        let (Ok(kept), Ok(own)) = (socket.try_clone(), socket.try_clone()) else { return };
        if self.threads.len() >= known + STRANGERS {
            return;
        }
        let (receiver, shared) = (receiver.clone(), Arc::clone(&self.shared));
        let thread = thread::Builder::new().spawn(move || {
            shared.take(&receiver, socket, from);
            // The socket has a duplicate, so closing this one would not end the connection.
            let _ = rustix::net::shutdown(&own, Shutdown::Both);
        });
        // If no thread starts, the closure drops the socket and the peer sees the end.
        self.threads.extend(thread.ok().map(|thread| (kept, thread)));
    }
}

impl AsFd for Intake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

/// After the drop no thread loads pages any more.
impl Drop for Intake {
    fn drop(&mut self) {
        for (socket, thread) in self.threads.drain(..) {
            let _ = rustix::net::shutdown(&socket, Shutdown::Both);
            // The thread has reported its result in the shared state.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn streams(&self) -> MutexGuard<'_, (Vec<Stream>, Option<Broken>)> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a connection of another stream from its start to its end.
    fn take(&self, receiver: &Receiver, socket: TcpStream, from: SocketAddr) {
        let linked =
            Link::accept(receiver, socket, HANDSHAKE, Some(TAKEN)).map_err(|error| error.to_string());
        let opened = linked.and_then(|mut link| {
            link.admit(self.expected.attempt, self.patience, |stream, shown, binding| {
                self.open(stream, shown, binding)
            })
            .map(|stream| (link, stream))
        });
        let (mut link, stream) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                note!("mercury: {from} was refused: {why}");
                return;
            }
        };
        note!("mercury: {from} is connected: stream {stream} of {}", self.expected.streams);
        let ended = self.listen(&mut link, stream);
        let (streams, broken) = &mut *self.streams();
        match ended {
            Ok(digest) => streams[stream as usize - 1] = Stream::Ended(digest),
            Err(why) => *broken = broken.take().or(Some(why)),
        }
        // The event descriptor only counts.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Opens a stream for a peer with this proof. Returns the reason if the peer may not.
    fn open(&self, stream: u32, shown: &Proof, binding: &[u8; 32]) -> Result<(), &'static str> {
        let ExpectedStreams { attempt, secret, .. } = &self.expected;
        if !is_proof(shown, &proof(secret, *attempt, stream, binding)) {
            return Err("the peer does not prove that it may open a stream");
        }
        let mut streams = self.streams();
        let number = (stream as usize).checked_sub(1).ok_or("the first stream is open already")?;
        let found = streams.0.get_mut(number).ok_or("no such stream was offered")?;
        if *found != Stream::Awaited {
            return Err("this stream is open already");
        }
        *found = Stream::Open;
        Ok(())
    }

    /// Loads the pages of a stream up to its end.
    fn listen(&self, link: &mut Link, stream: u32) -> Result<Digest, Broken> {
        loop {
            match link.hear(self.patience) {
                Heard::Frame(Frame::Pages(pages)) => {
                    self.is_alive.store(true, Ordering::Relaxed);
                    self.load(stream, &pages).map_err(|error| Broken::Breach(error.message))?;
                }
                Heard::Frame(Frame::Message(Message { word: Word::Final(digest), .. }, _)) => {
                    return Ok(digest);
                }
                Heard::Frame(_) => {
                    return Err(Broken::Breach(format!(
                        "stream {stream} carries a frame that does not belong there"
                    )));
                }
                // Silence between frames is allowed: unchanged memory needs no pages.
                Heard::Nothing => {}
                Heard::Gone(why) => return Err(Broken::Gone(format!("stream {stream}: {why}"))),
            }
        }
    }

    /// Puts pages to their addresses, and records the hashes of the data that can be read there
    /// then.
    fn load(&self, stream: u32, pages: &Pages) -> Result<()> {
        let mut data = Vec::with_capacity(pages.len() * PAGE);
        let mut entries = Vec::with_capacity(pages.len());
        {
            let ledger = self.ledger();
            for Page { phys, content } in pages.iter() {
                if !ledger.contains(phys) {
                    return Err(breach("a page has arrived outside the memory that was offered"));
                }
                if stream_of(phys, self.expected.streams) != stream {
                    return Err(breach("a page has arrived by another stream than its own"));
                }
                let source = match content {
                    Content::Data(bytes) => {
                        data.extend_from_slice(bytes);
                        MERCURY_LOAD_DATA
                    }
                    Content::Zero => MERCURY_LOAD_ZERO,
                };
                entries.push(LoadEntry { frame_phys: phys, source });
            }
        }
        self.memory.load(&entries, &data)?;
        let there = self.memory.read_back(&entries)?;
        let (there, _) = there.as_chunks::<PAGE>();
        let hashes: Vec<_> = there.iter().map(hash_of_any).collect();
        let mut ledger = self.ledger();
        for (entry, hash) in entries.iter().zip(hashes) {
            let noted = match hash {
                Some(hash) => ledger.note_hash(entry.frame_phys, hash),
                None => ledger.note(Page { phys: entry.frame_phys, content: Content::Zero }),
            };
            noted.map_err(breach)?;
        }
        self.pages.fetch_add(entries.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns the hash of a page, or `None` if it is all zeros.
fn hash_of_any(page: &[u8; PAGE]) -> Option<[u8; 16]> {
    page.iter().any(|byte| *byte != 0).then(|| hash_of(page))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends hash a page alike, however it was sent.
    #[test]
    fn zeros_hash_like_zeros() {
        let mut ledger = Ledger::new(vec![0..4096, 8192..12288]);
        assert_eq!(ledger.note(Page { phys: 0, content: Content::Zero }), Ok(true));
        assert_eq!(ledger.note_hash(0, hash_of(&[0; PAGE])), Ok(false));
        assert_eq!(ledger.note(Page { phys: 0, content: Content::Data(&[0; PAGE]) }), Ok(false));
    }
}
