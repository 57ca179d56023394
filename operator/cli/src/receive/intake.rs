//! What comes of a machine, by one stream or by several: each has a thread of its own that decrypts, unpacks, puts pages
//! where they belong, and hashes what lies there then.
//!
//! The first stream is [`super::serve`]'s. Others are let in while pages are taken, as many as were offered, and each once.
//! It is for them to come to their end before the end that the first one names is believed.

use super::spare::Memory;
use crate::{
    error::{Error, Result},
    migrate::link::{HANDSHAKE, Heard, Link},
};
use mercury_abi::restart::{LoadEntry, MERCURY_LOAD_DATA, MERCURY_LOAD_ZERO};
use mercury_migration::{
    hail::Secret,
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

/// So many who have not shown yet that they may are heard at once.
const STRANGERS: usize = 16;

/// Why there will be no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A stream has ended before its end.
    Gone(String),
    /// What came by it cannot be.
    Breach(String),
}

/// Another stream than the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    /// Nobody has opened it.
    Awaited,
    /// Pages come by it.
    Open,
    /// All have come by it, and this is the digest of all.
    Ended(Digest),
}

/// How far the streams besides the first are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Something is still to come.
    Open,
    /// All have ended, with this digest; if there are others at all.
    Ended(Option<Digest>),
    /// There will be no more.
    Broken(Broken),
}

/// Whose streams they are.
#[derive(Clone, Copy, Debug)]
pub struct Whose {
    /// The attempt.
    pub attempt: Attempt,
    /// What went with its offer.
    pub secret: Secret,
    /// How many streams there are in all.
    pub streams: u32,
}

/// What all of them have.
struct Shared {
    whose: Whose,
    memory: Arc<dyn Memory>,
    ledger: Mutex<Ledger>,
    pages: AtomicU64,
    /// Something has come since it was looked at.
    is_alive: AtomicBool,
    /// Those besides the first.
    streams: Mutex<(Vec<Stream>, Option<Broken>)>,
    /// Readable when one of them has ended, or broken.
    bell: OwnedFd,
    /// How long one may be silent in the midst of something.
    patience: Duration,
}

/// What has come so far.
pub struct Intake {
    shared: Arc<Shared>,
    threads: Vec<(TcpStream, JoinHandle<()>)>,
}

fn breach(what: &str) -> Error {
    Error::fault(what)
}

impl Intake {
    /// Of a machine with this memory, into that of this one.
    ///
    /// # Errors
    /// If there is nothing to be woken by.
    pub fn new(whose: Whose, memory: Arc<dyn Memory>, ledger: Ledger, patience: Duration) -> Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::system("something to be woken by", errno))?;
        let others = vec![Stream::Awaited; whose.streams.saturating_sub(1) as usize];
        let shared = Shared {
            whose,
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

    /// Pages that came by the first stream.
    ///
    /// # Errors
    /// If they cannot be.
    pub fn load(&self, pages: &Pages) -> Result<()> {
        self.shared.load(0, pages)
    }

    /// What lies where.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.shared.ledger()
    }

    /// How many pages have come.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.shared.pages.load(Ordering::Relaxed)
    }

    /// Whether something has come by other streams than the first since this was asked last.
    #[must_use]
    pub fn was_alive(&self) -> bool {
        self.shared.is_alive.swap(false, Ordering::Relaxed)
    }

    /// How far the other streams are.
    #[must_use]
    pub fn state(&self) -> State {
        // It rings again for what is not seen now.
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
                State::Broken(Broken::Breach("its streams do not end alike".into()))
            }
            _ => State::Open,
        }
    }

    /// Whether one that was offered is not open yet.
    #[must_use]
    pub fn awaits_streams(&self) -> bool {
        self.shared.streams().0.contains(&Stream::Awaited)
    }

    /// Takes who is at the door for one who opens another stream.
    pub fn let_in(&mut self, receiver: &Receiver, socket: TcpStream, from: SocketAddr) {
        self.threads.retain(|(_, thread)| !thread.is_finished());
        let known = self.shared.whose.streams as usize;
        let (Ok(kept), Ok(own)) = (socket.try_clone(), socket.try_clone()) else { return };
        if self.threads.len() >= known + STRANGERS {
            return;
        }
        let (receiver, shared) = (receiver.clone(), Arc::clone(&self.shared));
        let thread = thread::Builder::new().spawn(move || {
            shared.take(&receiver, socket, from);
            // It is open elsewhere, too, and the other end would wait.
            let _ = rustix::net::shutdown(&own, Shutdown::Both);
        });
        // Where there can be no thread its end is gone, and who came knows it.
        self.threads.extend(thread.ok().map(|thread| (kept, thread)));
    }
}

impl AsFd for Intake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

/// Nobody puts pages anywhere behind it.
impl Drop for Intake {
    fn drop(&mut self) {
        for (socket, thread) in self.threads.drain(..) {
            let _ = rustix::net::shutdown(&socket, Shutdown::Both);
            // What it had to say it has said.
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

    /// The life of another stream.
    fn take(&self, receiver: &Receiver, socket: TcpStream, from: SocketAddr) {
        let linked = Link::accept(receiver, socket, HANDSHAKE).map_err(|error| error.to_string());
        let opened = linked.and_then(|mut link| {
            link.admit(self.whose.attempt, self.patience, |stream, shown, binding| {
                self.open(stream, shown, binding)
            })
            .map(|stream| (link, stream))
        });
        let (mut link, stream) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                eprintln!("mercury: {from} was refused: {why}");
                return;
            }
        };
        eprintln!("mercury: {from} is connected: stream {stream} of {}", self.whose.streams);
        let ended = self.listen(&mut link, stream);
        let (streams, broken) = &mut *self.streams();
        match ended {
            Ok(digest) => streams[stream as usize - 1] = Stream::Ended(digest),
            Err(why) => *broken = broken.take().or(Some(why)),
        }
        // It only counts.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Whether whoever shows this may open this stream; it is open then.
    fn open(&self, stream: u32, shown: &Proof, binding: &[u8; 32]) -> Result<(), &'static str> {
        let Whose { attempt, secret, .. } = &self.whose;
        if !is_proof(shown, &proof(secret, *attempt, stream, binding)) {
            return Err("it does not show that it may");
        }
        let mut streams = self.streams();
        let number = (stream as usize).checked_sub(1).ok_or("the first stream is another one")?;
        let found = streams.0.get_mut(number).ok_or("no such stream was offered")?;
        if *found != Stream::Awaited {
            return Err("this stream is open already");
        }
        *found = Stream::Open;
        Ok(())
    }

    /// Takes what comes by a stream, to its end.
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
                        "stream {stream} carries what is none of its business"
                    )));
                }
                // Where nothing is written nothing has to come.
                Heard::Nothing => {}
                Heard::Gone(why) => return Err(Broken::Gone(format!("stream {stream}: {why}"))),
            }
        }
    }

    /// Puts pages where they belong, and notes what lies there then.
    fn load(&self, stream: u32, pages: &Pages) -> Result<()> {
        let mut data = Vec::with_capacity(pages.len() * PAGE);
        let mut entries = Vec::with_capacity(pages.len());
        {
            let ledger = self.ledger();
            for Page { phys, content } in pages.iter() {
                if !ledger.has_room_for(phys) {
                    return Err(breach("a page came that does not lie in the memory that was offered"));
                }
                if stream_of(phys, self.whose.streams) != stream {
                    return Err(breach("a page came by another stream than its own"));
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

/// The hash of a page, if it is not all zeros.
fn hash_of_any(page: &[u8; PAGE]) -> Option<[u8; 16]> {
    page.iter().any(|byte| *byte != 0).then(|| hash_of(page))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends hash alike, however a page came.
    #[test]
    fn zeros_hash_like_zeros() {
        let mut ledger = Ledger::new(vec![0..4096, 8192..12288]);
        assert_eq!(ledger.note(Page { phys: 0, content: Content::Zero }), Ok(true));
        assert_eq!(ledger.note_hash(0, hash_of(&[0; PAGE])), Ok(false));
        assert_eq!(ledger.note(Page { phys: 0, content: Content::Data(&[0; PAGE]) }), Ok(false));
    }
}
