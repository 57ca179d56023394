//! A stream: frames, one after another.

use std::io::{self, Read, Write};

use super::{
    chunks::{self, Chunks},
    error::{Error, Place, Result},
    pages::{PACKED_MAX, Pages},
};
use crate::{
    protocol::{Attempt, Digest, Message, Word},
    streams::Proof,
};

/// First bytes of a stream. The last two of them detect a transfer as text.
pub const MAGIC: [u8; 8] = *b"\x89MMove\r\n";
/// Version of the format.
pub const VERSION: u32 = 4;
/// Largest text of a message in bytes: the description of a machine, or the reasons for a refusal.
pub const TEXT_MAX: usize = 1 << 20;

const GREETING: usize = 32;
const HEADER: usize = 32;
const CHECKED: usize = 16;
/// Size of a word and a digest in bytes.
const MESSAGE: usize = 1 + 32;

const KIND_MESSAGE: u32 = 1;
const KIND_ROUND: u32 = 2;
const KIND_PAGES: u32 = 3;
const KIND_PROOF: u32 = 4;
const KIND_CHUNKS: u32 = 5;

/// A frame of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message, and the text that goes with it.
    Message(Message, Vec<u8>),
    /// The beginning of a round.
    Round(u64),
    /// Pages of memory.
    Pages(Pages),
    /// The proof that the opener may open this stream.
    Proof(Proof),
    /// Chunks of a disk.
    Chunks(Chunks),
}

fn greeting(attempt: Attempt, stream: u32) -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&stream.to_le_bytes());
    bytes[16..].copy_from_slice(&attempt.0);
    bytes
}

fn checksum(greeting: &[u8], checked: &[u8], payload: &[u8]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(greeting).update(checked).update(payload);
    let mut half = [0; 16];
    half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    half
}

fn word_bytes(word: Word) -> (u8, [u8; 32]) {
    let number = match word {
        Word::Final(Digest(digest)) => return (2, digest),
        Word::Verified(Digest(digest)) => return (7, digest),
        Word::Offer => 1,
        Word::Cancel => 3,
        Word::Commit => 4,
        Word::Accept => 5,
        Word::Refuse => 6,
        Word::Started => 8,
        Word::Discarded => 9,
        Word::Lost => 10,
        Word::Unknown => 11,
    };
    (number, [0; 32])
}

fn word_of(number: u8, digest: [u8; 32]) -> Option<Word> {
    let word = match number {
        1 => Word::Offer,
        2 => Word::Final(Digest(digest)),
        3 => Word::Cancel,
        4 => Word::Commit,
        5 => Word::Accept,
        6 => Word::Refuse,
        7 => Word::Verified(Digest(digest)),
        8 => Word::Started,
        9 => Word::Discarded,
        10 => Word::Lost,
        11 => Word::Unknown,
        _ => return None,
    };
    (word_bytes(word) == (number, digest)).then_some(word)
}

/// The writing end of a stream.
#[derive(Debug)]
pub struct Writer<W> {
    to: W,
    greeting: [u8; GREETING],
    next: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a stream.
    ///
    /// # Errors
    /// Writing fails.
    pub fn begin(mut to: W, attempt: Attempt, stream: u32) -> Result<Self> {
        let greeting = greeting(attempt, stream);
        to.write_all(&greeting)?;
        Ok(Self { to, greeting, next: 0 })
    }

    /// Writes a message of this stream's attempt.
    ///
    /// # Errors
    /// Writing fails, or the text is too long.
    pub fn say(&mut self, word: Word, text: &[u8]) -> Result<()> {
        if text.len() > TEXT_MAX {
            return Err(Error::Io(io::Error::new(io::ErrorKind::InvalidInput, "the text is too long")));
        }
        let (number, digest) = word_bytes(word);
        self.frame(KIND_MESSAGE, &[&[number], &digest[..], text].concat())
    }

    /// Begins a round.
    ///
    /// # Errors
    /// Writing fails.
    pub fn round(&mut self, number: u64) -> Result<()> {
        self.frame(KIND_ROUND, &number.to_le_bytes())
    }

    /// Writes the record that [`Pages::pack`] has made.
    ///
    /// # Errors
    /// Writing fails.
    pub fn pages(&mut self, packed: &[u8]) -> Result<()> {
        self.frame(KIND_PAGES, packed)
    }

    /// Writes the record that [`Chunks::pack`] has made.
    ///
    /// # Errors
    /// Writing fails.
    pub fn chunks(&mut self, packed: &[u8]) -> Result<()> {
        self.frame(KIND_CHUNKS, packed)
    }

    /// Writes the proof that this end may open the stream.
    ///
    /// # Errors
    /// Writing fails.
    pub fn prove(&mut self, proof: &Proof) -> Result<()> {
        self.frame(KIND_PROOF, proof)
    }

    /// Flushes everything that was written.
    ///
    /// # Errors
    /// Writing fails.
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.to.flush()?)
    }

    /// Returns the underlying connection, to read the other end's answer from it.
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.to
    }

    /// Returns the underlying connection.
    pub fn into_inner(self) -> W {
        self.to
    }

    fn frame(&mut self, kind: u32, payload: &[u8]) -> Result<()> {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        header[8..16].copy_from_slice(&self.next.to_le_bytes());
        let sum = checksum(&self.greeting, &header[..CHECKED], payload);
        header[CHECKED..].copy_from_slice(&sum);
        self.to.write_all(&header)?;
        self.to.write_all(payload)?;
        self.next += 1;
        Ok(())
    }
}

/// The reading end of a stream, which trusts nothing. After an error it cannot be used any more.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    greeting: [u8; GREETING],
    attempt: Attempt,
    place: Place,
    next_round: u64,
    is_broken: bool,
}

impl<R: Read> Reader<R> {
    /// Begins to read a stream. The stream names its attempt; the caller decides if that attempt is
    /// wanted.
    ///
    /// # Errors
    /// The connection carries no stream, or another version.
    pub fn open(mut from: R) -> Result<Self> {
        let mut bytes = [0; GREETING];
        from.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Error::NotAStream,
            _ => Error::Io(error),
        })?;
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[..8] != MAGIC {
            return Err(Error::NotAStream);
        }
        if number(8) != VERSION {
            return Err(Error::Version(number(8)));
        }
        let mut attempt = Attempt([0; 16]);
        attempt.0.copy_from_slice(&bytes[16..]);
        let place = Place { stream: number(12), frame: 0, offset: GREETING as u64 };
        Ok(Self { from, greeting: bytes, attempt, place, next_round: 0, is_broken: false })
    }

    /// Refuses a stream of another attempt or number.
    ///
    /// # Errors
    /// The stream is another one.
    pub fn expect(self, attempt: Attempt, stream: u32) -> Result<Self> {
        if (self.attempt, self.place.stream) == (attempt, stream) { Ok(self) } else { Err(Error::Other) }
    }

    /// Returns the attempt of the stream.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Returns the number of the stream.
    #[must_use]
    pub fn stream(&self) -> u32 {
        self.place.stream
    }

    /// Returns the place of the next frame.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Returns the next frame; `None` if the stream ends between two frames.
    ///
    /// # Errors
    /// The bytes are not those of a [`Writer`].
    pub fn next_frame(&mut self) -> Result<Option<Frame>> {
        if self.is_broken {
            return Err(Error::Damaged(self.place, "it was refused already"));
        }
        let frame = self.frame();
        self.is_broken = frame.is_err();
        frame
    }

    fn frame(&mut self) -> Result<Option<Frame>> {
        let mut header = [0; HEADER];
        let mut begun = 0;
        while begun < HEADER {
            match self.from.read(&mut header[begun..]) {
                Ok(0) if begun == 0 => return Ok(None),
                Ok(0) => return Err(Error::Torn(self.place)),
                Ok(read) => begun += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        let (kind, length) = self.header(&header)?;
        let mut payload = vec![0; length];
        self.from.read_exact(&mut payload).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Error::Torn(self.place),
            _ => Error::Io(error),
        })?;
        if checksum(&self.greeting, &header[..CHECKED], &payload) != header[CHECKED..] {
            return Err(self.damaged("its checksum is wrong"));
        }
        let frame = self.payload(kind, &payload).map_err(|what| self.damaged(what))?;
        self.place.frame += 1;
        self.place.offset += (HEADER + length) as u64;
        Ok(Some(frame))
    }

    fn damaged(&self, what: &'static str) -> Error {
        Error::Damaged(self.place, what)
    }

    /// Returns the kind and the length of a frame, after a check of their bounds.
    fn header(&self, header: &[u8; HEADER]) -> Result<(u32, usize)> {
        let number =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (kind, length) = (number(0), number(4) as usize);
        let sequence = u64::from(number(8)) | u64::from(number(12)) << 32;
        if sequence != self.place.frame {
            return Err(self.damaged("it does not belong at this place of the stream"));
        }
        let (least, most) = match kind {
            KIND_MESSAGE => (MESSAGE, MESSAGE + TEXT_MAX),
            KIND_ROUND => (8, 8),
            KIND_PAGES => (4, PACKED_MAX),
            KIND_PROOF => (size_of::<Proof>(), size_of::<Proof>()),
            KIND_CHUNKS => (4, chunks::PACKED_MAX),
            _ => return Err(self.damaged("it is of an unknown kind")),
        };
        if length < least || length > most {
            return Err(self.damaged("it is too long or too short for its kind"));
        }
        Ok((kind, length))
    }

    fn payload(&mut self, kind: u32, payload: &[u8]) -> Result<Frame, &'static str> {
        match kind {
            KIND_MESSAGE => self.message(payload),
            KIND_ROUND => self.round(payload),
            KIND_PROOF => self.proof(payload),
            KIND_PAGES => Pages::unpack(payload).map(Frame::Pages),
            _ => Chunks::unpack(payload).map(Frame::Chunks),
        }
    }

    fn message(&self, payload: &[u8]) -> Result<Frame, &'static str> {
        let (head, text) = payload.split_first_chunk::<MESSAGE>().ok_or("it is too short")?;
        let mut digest = [0; 32];
        digest.copy_from_slice(&head[1..]);
        let word = word_of(head[0], digest).ok_or("it is an unknown word")?;
        Ok(Frame::Message(Message { attempt: self.attempt, word }, text.to_vec()))
    }

    fn proof(&self, payload: &[u8]) -> Result<Frame, &'static str> {
        if self.place.stream == 0 || self.place.frame != 0 {
            return Err("a proof does not belong at this place of the stream");
        }
        payload.first_chunk().map(|proof| Frame::Proof(*proof)).ok_or("it is too short")
    }

    fn round(&mut self, payload: &[u8]) -> Result<Frame, &'static str> {
        let number =
            payload.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).ok_or("it is too short")?;
        if number != self.next_round {
            return Err("it is not the next round");
        }
        self.next_round = number.saturating_add(1);
        Ok(Frame::Round(number))
    }
}
