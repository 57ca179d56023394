//! The host's end of a network card: frames to and from a descriptor that was opened before the
//! guest ran. A thread of its own waits for the descriptor, and calls the waker when frames have
//! come.
//!
//! No frame is dropped here. A frame that the guest does not take stays with the host's end, and
//! the other way round.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, ErrorKind, Read, Write},
    os::fd::{AsRawFd, OwnedFd},
    ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    bell::Bell,
    error::{Error, Result},
    signals::{Waker, start_thread},
};

/// The longest frame, without its checksum: the longest packet of IP, after Ethernet's addresses.
pub const LONGEST: usize = 65535 + 14;
/// A frame's least: its addresses.
const SHORTEST: usize = 14;
/// So many bytes wait for the guest, at most one reading more.
const FULL: usize = 1 << 20;
/// The size of one read, in bytes.
const BUFFER: usize = 128 << 10;
/// Before each frame of a stream: its length.
const PREFIX: usize = 4;

/// The separation of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Each read and write is one.
    Packets,
    /// Each has its length before it, four bytes, the most significant first (as passt and QEMU have it).
    Stream,
}

#[derive(Debug)]
struct Shared {
    received: Mutex<Received>,
    /// Set while the guest waits until the descriptor takes more.
    wants_room: AtomicBool,
    ended: AtomicBool,
    bell: Bell,
}

#[derive(Debug, Default)]
struct Received {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Shared {
    fn received(&self) -> MutexGuard<'_, Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host's end of a network card.
#[derive(Debug)]
pub struct Link {
    file: File,
    framing: Framing,
    shared: Arc<Shared>,
    /// The frame whose sending has begun, with its length before it, and the number of bytes sent.
    unsent: Vec<u8>,
    sent: usize,
}

impl Link {
    /// Begins to listen to a descriptor that does not block. The waker is called when frames have
    /// come.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start(descriptor: OwnedFd, framing: Framing, waker: Waker) -> Result<Self> {
        let wrong = |error: io::Error| Error::thread("the network", &error);
        let file = File::from(descriptor);
        let shared = Arc::new(Shared {
            received: Mutex::default(),
            wants_room: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            bell: Bell::new()?,
        });
        let mut listening = Listening {
            file: file.try_clone().map_err(wrong)?,
            framing,
            shared: Arc::clone(&shared),
            buffer: vec![0; BUFFER],
            filled: 0,
            waker,
        };
        start_thread("network", move || listening.listen()).map_err(wrong)?;
        Ok(Self { file, framing, shared, unsent: Vec::new(), sent: 0 })
    }

    /// Returns the next frame that was received.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let mut received = self.shared.received();
        let frame = received.frames.pop_front()?;
        let was_full = received.bytes >= FULL;
        received.bytes -= frame.len();
        if was_full && received.bytes < FULL {
            self.shared.bell.ring();
        }
        Some(frame)
    }

    /// Returns true if the other end is gone.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Acquire)
    }

    /// Sends the rest of the last frame. Returns true if another one may begin. Otherwise the
    /// waker is called when there is room.
    pub fn flush(&mut self) -> bool {
        while self.sent < self.unsent.len() && !self.has_ended() {
            match self.file.write(&self.unsent[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.shared.wants_room.store(true, Ordering::Release);
                    self.shared.bell.ring();
                    return false;
                }
                // The interface is down, or does not like this frame.
                Err(_) if self.framing == Framing::Packets => break,
                Err(_) => self.shared.ended.store(true, Ordering::Release),
            }
        }
        self.unsent.clear();
        self.sent = 0;
        true
    }

    /// Begins a frame. [`Self::send`] sends the bytes that the caller appends.
    pub fn begin(&mut self) -> &mut Vec<u8> {
        self.unsent.clear();
        self.sent = 0;
        if self.framing == Framing::Stream {
            self.unsent.extend([0; PREFIX]);
        }
        &mut self.unsent
    }

    /// Sends the frame that was begun, if it is one.
    pub fn send(&mut self) {
        let prefix = if self.framing == Framing::Stream { PREFIX } else { 0 };
        let length = self.unsent.len().saturating_sub(prefix);
        if !(SHORTEST..=LONGEST).contains(&length) {
            self.unsent.clear();
            return;
        }
        self.unsent[..prefix].copy_from_slice(&(length as u32).to_be_bytes()[..prefix]);
        self.flush();
    }
}

/// The descriptor is closed when the thread has noticed.
impl Drop for Link {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.shared.bell.ring();
    }
}

/// The thread that waits.
struct Listening {
    file: File,
    framing: Framing,
    shared: Arc<Shared>,
    buffer: Vec<u8>,
    filled: usize,
    waker: Waker,
}

impl Listening {
    fn listen(&mut self) {
        const GONE: i16 = libc::POLLHUP | libc::POLLERR;
        while !self.shared.ended.load(Ordering::Acquire) {
            let is_full = self.shared.received().bytes >= FULL;
            let wants_room = self.shared.wants_room.load(Ordering::Acquire);
            let events = if is_full { 0 } else { libc::POLLIN } | if wants_room { libc::POLLOUT } else { 0 };
            let happened = self.wait(events);
            if happened & libc::POLLOUT != 0 {
                self.shared.wants_room.store(false, Ordering::Release);
                (self.waker)();
            }
            let ended = match is_full {
                true => happened & GONE != 0,
                false => happened & (libc::POLLIN | GONE) != 0 && self.receive().is_err(),
            };
            if ended {
                self.shared.ended.store(true, Ordering::Release);
                (self.waker)();
            }
        }
    }

    /// Waits for these events of the descriptor, or for the bell.
    fn wait(&self, events: i16) -> i16 {
        // A descriptor that nothing is wanted of would report its end again and again.
        let file = if events == 0 { -1 } else { self.file.as_raw_fd() };
        let mut polled = [
            libc::pollfd { fd: file, events, revents: 0 },
            libc::pollfd { fd: self.shared.bell.as_raw_fd(), events: libc::POLLIN, revents: 0 },
        ];
        // SAFETY: There are two, and no time limit.
        unsafe { libc::ppoll(polled.as_mut_ptr(), 2, ptr::null(), ptr::null()) };
        if polled[1].revents != 0 {
            self.shared.bell.silence();
        }
        polled[0].revents
    }

    /// Reads until there is nothing more, or enough for now.
    fn receive(&mut self) -> io::Result<()> {
        loop {
            match self.file.read(&mut self.buffer[self.filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            let frames = match self.framing {
                Framing::Packets => vec![self.buffer[..std::mem::take(&mut self.filled)].to_vec()],
                Framing::Stream => {
                    let (frames, left) = split(&self.buffer[..self.filled])?;
                    self.buffer.copy_within(self.filled - left..self.filled, 0);
                    self.filled = left;
                    frames
                }
            };
            if self.keep(frames) {
                return Ok(());
            }
        }
    }

    /// Keeps frames for the guest, and tells it if it had none. Says whether it is enough for now.
    fn keep(&self, frames: Vec<Vec<u8>>) -> bool {
        if frames.is_empty() {
            return false;
        }
        let mut received = self.shared.received();
        let had_none = received.frames.is_empty();
        received.bytes += frames.iter().map(Vec::len).sum::<usize>();
        received.frames.extend(frames);
        let is_full = received.bytes >= FULL;
        drop(received);
        if had_none {
            (self.waker)();
        }
        is_full
    }
}

/// Returns the whole frames of a stream's bytes, and the number of bytes that are left after them.
///
/// # Errors
/// If a length is invalid: nothing after it can be understood.
fn split(mut bytes: &[u8]) -> io::Result<(Vec<Vec<u8>>, usize)> {
    let mut frames = Vec::new();
    while let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX>() {
        let length = u32::from_be_bytes(*prefix) as usize;
        if !(SHORTEST..=LONGEST).contains(&length) {
            return Err(ErrorKind::InvalidData.into());
        }
        let Some((frame, behind)) = rest.split_at_checked(length) else { break };
        frames.push(frame.to_vec());
        bytes = behind;
    }
    Ok((frames, bytes.len()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_stream_is_split_into_its_frames_wherever_it_is_cut(
            lengths in proptest::collection::vec(SHORTEST..3000_usize, 1..20),
            cut in any::<prop::sample::Index>(),
        ) {
            let numbered = lengths.iter().enumerate();
            let frames: Vec<Vec<u8>> = numbered.map(|(at, &length)| vec![at as u8; length]).collect();
            let prefixed = frames.iter().flat_map(|frame| {
                (frame.len() as u32).to_be_bytes().into_iter().chain(frame.iter().copied())
            });
            let stream: Vec<u8> = prefixed.collect();
            let cut = cut.index(stream.len());
            let (mut found, left) = split(&stream[..cut]).unwrap();
            let (rest, nothing) = split(&stream[cut - left..]).unwrap();
            found.extend(rest);
            prop_assert_eq!((found, nothing), (frames, 0));
        }

        #[test]
        fn no_stream_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = split(&bytes);
        }
    }

    #[test]
    fn a_length_that_is_none_ends_the_stream() {
        assert!(split(&[0, 0, 0, 13]).is_err());
        assert!(split(&[0, 1, 0, 13]).is_ok());
        assert!(split(&[0, 1, 0, 14]).is_err());
        assert!(split(&[0xFF; 4]).is_err());
    }
}
