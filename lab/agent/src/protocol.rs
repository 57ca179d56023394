//! The protocol between the host and the agent in a lab machine, version 1.
//!
//! The protocol runs over one virtio-serial port, a reliable byte stream. Either side may lose the
//! stream and find it again: the machine is reset, or its state is loaded from a snapshot.
//!
//! ```text
//! frame    magic   "MLAB"    4 bytes   where a reader finds its place again
//!          length  u32 LE    4 bytes   of the payload, at most MAX_PAYLOAD
//!          crc32   u32 LE    4 bytes   of the payload
//!          payload postcard  length    one `Request` (to the machine) or `Event` (from it)
//! ```
//!
//! - The agent opens with [`Event::Hello`]. A second hello means that the machine has started again
//!   and that all earlier jobs are gone. A host that speaks another version gives up with that
//!   reason.
//! - The host numbers every job. A job ends with exactly one of [`Event::Exited`], [`Event::Done`]
//!   and [`Event::Failed`]. The job's output comes before that, in order.
//! - A reader that finds no frame skips to the next magic. Payloads above [`MAX_PAYLOAD`] are
//!   refused. Data travels in pieces of at most [`CHUNK`] bytes.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The version that both sides must speak.
pub const VERSION: u16 = 1;
/// The largest payload of a frame, in bytes.
pub const MAX_PAYLOAD: usize = 1 << 20;
/// The largest piece of data in one message, in bytes.
pub const CHUNK: usize = 1 << 15;

const MAGIC: [u8; 4] = *b"MLAB";
const HEADER: usize = 12;

/// A request from the host to the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Say hello again: the host has connected or reconnected.
    Hello,
    /// Start a program as a job.
    Exec(Exec),
    /// Bytes for a job's standard input; an empty piece closes it.
    Stdin { id: u32, data: Vec<u8> },
    /// Send a signal to a job's process group.
    Kill { id: u32, signal: i32 },
    /// Write a piece of a file; the first piece creates it.
    Put {
        id: u32,
        path: String,
        /// Permission bits of a new file.
        mode: u32,
        /// The place in the file, in bytes. At 0 an old file is truncated.
        offset: u64,
        data: Vec<u8>,
        /// The mark of the last piece.
        end: End,
    },
    /// Read a whole file.
    Get { id: u32, path: String },
}

/// A program to start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    pub id: u32,
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Variables added to the agent's own environment.
    pub env: Vec<(String, String)>,
    /// The working directory; `/root` if `None`.
    pub cwd: Option<String>,
    /// The time in milliseconds of the machine's time after which the process group is killed.
    pub timeout_ms: Option<u64>,
}

/// The mark of a file's last piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// More pieces follow.
    More,
    Last,
}

/// A message from the machine to the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The agent's introduction.
    Hello(Hello),
    /// A job's process has started.
    Started {
        id: u32,
        /// Its process ID in the machine.
        pid: u32,
    },
    /// Bytes from a job's standard output.
    Stdout { id: u32, data: Vec<u8> },
    /// Bytes from a job's standard error.
    Stderr { id: u32, data: Vec<u8> },
    /// A job's process has ended.
    Exited { id: u32, exit: Exit },
    /// A piece of a requested file.
    Data { id: u32, data: Vec<u8> },
    /// A file job is complete.
    Done { id: u32 },
    /// A job that could not be done.
    Failed {
        id: u32,
        /// The reason, for a person.
        error: String,
    },
}

impl Event {
    /// Returns the job of the event; a hello belongs to none.
    #[must_use]
    pub fn job(&self) -> Option<u32> {
        match self {
            Self::Hello(_) => None,
            Self::Started { id, .. }
            | Self::Stdout { id, .. }
            | Self::Stderr { id, .. }
            | Self::Exited { id, .. }
            | Self::Data { id, .. }
            | Self::Done { id }
            | Self::Failed { id, .. } => Some(*id),
        }
    }
}

/// The agent's introduction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The agent's [`VERSION`].
    pub version: u16,
    /// The running kernel's release.
    pub kernel: String,
    /// The kernel's boot ID: another ID means another boot.
    pub boot_id: String,
}

/// The way in which a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// An exit by itself, with this code.
    Code(i32),
    Signal(i32),
    /// A kill by the agent after the time limit.
    TimedOut,
}

/// The reason for which a frame could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The stream failed.
    #[error("cannot write to the port")]
    Io(#[from] io::Error),
    #[error("cannot encode a message")]
    Encode(#[from] postcard::Error),
    /// The message is larger than a frame may be.
    #[error("a message of {0} bytes is larger than a frame")]
    TooLarge(usize),
}

/// Sends one message as one frame.
///
/// # Errors
/// If the stream fails, or the message is too large for a frame.
pub fn send<M: Serialize>(out: &mut impl Write, message: &M) -> Result<(), SendError> {
    out.write_all(&encode(message)?)?;
    out.flush()?;
    Ok(())
}

/// Returns the bytes of a message's frame.
///
/// # Errors
/// If the message is too large for a frame.
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, SendError> {
    let payload = postcard::to_allocvec(message)?;
    if payload.len() > MAX_PAYLOAD {
        return Err(SendError::TooLarge(payload.len()));
    }
    let length = u32::try_from(payload.len()).map_err(|_| SendError::TooLarge(payload.len()))?;
    let mut frame = Vec::with_capacity(HEADER + payload.len());
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&crc32fast::hash(&payload).to_le_bytes());
    frame.extend_from_slice(&payload);
    Ok(frame)
}

/// A decoder that finds messages in a stream of bytes, whatever is lost or mixed in between.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Takes bytes as they arrive.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next whole message, if there is one. Other bytes are skipped.
    pub fn next_message<M: DeserializeOwned>(&mut self) -> Option<M> {
        loop {
            self.skip_to_magic();
            match self.frame()? {
                Some((message, used)) => {
                    self.buffer.drain(..used);
                    return Some(message);
                }
                None => drop(self.buffer.drain(..1)),
            }
        }
    }

    /// Reads a frame. `None`: more bytes are needed. `Some(None)`: there is no frame here.
    fn frame<M: DeserializeOwned>(&self) -> Option<Option<(M, usize)>> {
        let word = |at: usize| -> Option<u32> {
            let bytes = self.buffer.get(at..at + 4)?;
            Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        let (length, crc) = (word(4)? as usize, word(8)?);
        if length > MAX_PAYLOAD {
            return Some(None);
        }
        let payload = self.buffer.get(HEADER..HEADER + length)?;
        if crc32fast::hash(payload) != crc {
            return Some(None);
        }
        Some(postcard::from_bytes(payload).ok().map(|message| (message, HEADER + length)))
    }

    fn skip_to_magic(&mut self) {
        let found = self.buffer.windows(MAGIC.len()).position(|window| window == MAGIC);
        let keep = found.unwrap_or_else(|| {
            let tail = self.buffer.len().min(MAGIC.len() - 1);
            self.buffer.len() - tail
        });
        self.buffer.drain(..keep);
    }
}

/// A receiver that reads messages from a stream until the stream ends.
#[derive(Debug)]
pub struct Receiver<R> {
    stream: R,
    decoder: Decoder,
}

impl<R: Read> Receiver<R> {
    pub fn new(stream: R) -> Self {
        Self { stream, decoder: Decoder::default() }
    }

    /// Returns the next message, or `None` at the end of the stream.
    ///
    /// # Errors
    /// If the stream fails.
    pub fn receive<M: DeserializeOwned>(&mut self) -> io::Result<Option<M>> {
        let mut piece = [0; 4096];
        loop {
            if let Some(message) = self.decoder.next_message() {
                return Ok(Some(message));
            }
            match self.stream.read(&mut piece) {
                Ok(0) => return Ok(None),
                Ok(count) => self.decoder.feed(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message() -> impl Strategy<Value = Event> {
        let data = proptest::collection::vec(any::<u8>(), 0..300);
        prop_oneof![
            (any::<u32>(), data.clone()).prop_map(|(id, data)| Event::Stdout { id, data }),
            (any::<u32>(), data).prop_map(|(id, data)| Event::Data { id, data }),
            (any::<u32>(), any::<i32>()).prop_map(|(id, code)| Event::Exited { id, exit: Exit::Code(code) }),
            (any::<u32>(), ".*").prop_map(|(id, error)| Event::Failed { id, error }),
        ]
    }

    fn drain(decoder: &mut Decoder) -> Vec<Event> {
        std::iter::from_fn(|| decoder.next_message()).collect()
    }

    proptest! {
        #[test]
        fn messages_survive_any_cutting(
            messages in proptest::collection::vec(message(), 0..8),
            cut in 1_usize..64,
        ) {
            let bytes: Vec<u8> = messages.iter().flat_map(|m| encode(m).unwrap()).collect();
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.feed(piece);
                got.extend(drain(&mut decoder));
            }
            prop_assert_eq!(got, messages);
        }

        #[test]
        fn a_message_is_found_after_garbage(
            garbage in proptest::collection::vec(any::<u8>(), 0..200),
            message in message(),
        ) {
            let mut decoder = Decoder::default();
            decoder.feed(&garbage);
            decoder.feed(&encode(&message).unwrap());
            // Garbage that looks like the head of a long frame may delay the decoder until that
            // many bytes have come, and no longer.
            let mut got = drain(&mut decoder);
            if got.is_empty() {
                decoder.feed(&vec![0; MAX_PAYLOAD + HEADER]);
                got = drain(&mut decoder);
            }
            prop_assert_eq!(got, vec![message]);
        }

        #[test]
        fn a_torn_frame_does_not_hide_the_next(message in message(), lost in 1_usize..12) {
            let frame = encode(&message).unwrap();
            let mut decoder = Decoder::default();
            decoder.feed(&frame[..frame.len() - lost.min(frame.len() - 1)]);
            decoder.feed(&frame);
            decoder.feed(&vec![0; 512]);
            prop_assert!(drain(&mut decoder).contains(&message));
        }
    }

    #[test]
    fn a_flipped_bit_is_no_message() {
        let mut frame = encode(&Event::Done { id: 7 }).unwrap();
        *frame.last_mut().unwrap() ^= 1;
        let mut decoder = Decoder::default();
        decoder.feed(&frame);
        assert_eq!(drain(&mut decoder), []);
    }

    #[test]
    fn a_message_too_large_for_a_frame_is_refused() {
        let event = Event::Data { id: 1, data: vec![0; MAX_PAYLOAD + 1] };
        assert!(matches!(encode(&event), Err(SendError::TooLarge(_))));
    }

    #[test]
    fn the_receiver_ends_with_its_stream() {
        let bytes = encode(&Event::Done { id: 3 }).unwrap();
        let mut receiver = Receiver::new(bytes.as_slice());
        assert_eq!(receiver.receive::<Event>().unwrap(), Some(Event::Done { id: 3 }));
        assert_eq!(receiver.receive::<Event>().unwrap(), None);
    }
}
