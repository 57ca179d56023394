//! The format of records. Each record is compressed and checked by itself.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Place, Result},
    hashes::Hashes,
};

/// First bytes of an image. The last three of them detect a transfer as text.
pub const MAGIC: [u8; 16] = *b"\x89MercuryImage\r\n\x1a";
/// Version of the format that is written.
pub const VERSION: u32 = 3;
/// The oldest version that is read. It has no hashes and no parents. Up to version 2 a fingerprint
/// was called a mark.
pub const VERSION_OLDEST: u32 = 1;
/// Size of a page in bytes.
pub const PAGE: usize = 4096;
/// Size of a record's header in bytes.
pub const HEADER: usize = 80;
/// Number of header bytes that the checksum covers.
pub const CHECKED: usize = 48;
/// Largest number of entries in a record of frames.
pub const ENTRIES_MAX: usize = 4096;
/// Largest number of data pages in a record of frames.
pub const PAGES_MAX: usize = 256;
const ENTRY: usize = 16;
/// Largest size in bytes of a record of frames before compression.
pub const RAW_MAX: u64 = (8 + ENTRIES_MAX * ENTRY + PAGES_MAX * PAGE) as u64;
/// Largest size in bytes of every other record.
pub const TEXT_MAX: u64 = 256 << 20;

const RECORD: [u8; 4] = *b"MREC";

/// An image's identity, random. As text it has 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Identity(pub [u8; 16]);

impl From<Identity> for String {
    fn from(identity: Identity) -> Self {
        identity.to_string()
    }
}

impl TryFrom<String> for Identity {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        number.map(|number| Self(number.to_be_bytes())).ok_or_else(|| format!("{text} is no identity"))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// The description of the machine.
    Machine = 1,
    /// Frames, and the content of some.
    Frames = 2,
    /// The commit record, which ends an image.
    Commit = 3,
    /// Hashes of frames.
    Hashes = 4,
}

impl RecordKind {
    fn of(number: u32) -> Option<Self> {
        let kinds = [Self::Machine, Self::Frames, Self::Commit, Self::Hashes];
        kinds.into_iter().find(|kind| *kind as u32 == number)
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the record.
    pub kind: RecordKind,
    /// Number of the record, from 0.
    pub number: u64,
    /// Identity of the image.
    pub identity: Identity,
    /// Length of the payload in bytes.
    pub length: u64,
    /// Length of the payload in bytes before compression.
    pub raw_length: u64,
    /// BLAKE3 of the fields above and of the payload.
    pub checksum: [u8; 32],
}

pub fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

impl Header {
    /// Returns the header for a payload.
    pub fn new(kind: RecordKind, number: u64, identity: Identity, payload: &[u8], raw_length: u64) -> Self {
        let length = payload.len() as u64;
        let mut header = Self { kind, number, identity, length, raw_length, checksum: [0; 32] };
        header.checksum = header.checksum_with(payload);
        header
    }

    fn checked(&self) -> [u8; CHECKED] {
        let mut bytes = [0; CHECKED];
        bytes[0..4].copy_from_slice(&RECORD);
        bytes[4..8].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.identity.0);
        bytes[32..40].copy_from_slice(&self.length.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.raw_length.to_le_bytes());
        bytes
    }

    /// Returns the checksum that the header needs with `payload`.
    pub fn checksum_with(&self, payload: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.checked()).update(payload);
        *hasher.finalize().as_bytes()
    }

    /// Returns the header as it is written.
    pub fn bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..CHECKED].copy_from_slice(&self.checked());
        bytes[CHECKED..].copy_from_slice(&self.checksum);
        bytes
    }

    /// Returns the place of the record that follows.
    pub fn next(&self, place: Place) -> Place {
        Place { record: place.record + 1, offset: place.offset + HEADER as u64 + self.length }
    }

    /// Parses a header. Only the bounds of its fields are checked.
    pub fn parse(bytes: &[u8; HEADER], place: Place) -> Result<Self> {
        let damaged = |what: &str| Err(Error::Damaged(place, what.to_owned()));
        if bytes[0..4] != RECORD {
            return damaged("no record begins here");
        }
        let mut number = [0; 4];
        number.copy_from_slice(&bytes[4..8]);
        let Some(kind) = RecordKind::of(u32::from_le_bytes(number)) else {
            return damaged("it is of an unknown kind");
        };
        let (length, raw_length) = (word(bytes, 32), word(bytes, 40));
        let most = match kind {
            RecordKind::Frames | RecordKind::Hashes => RAW_MAX,
            RecordKind::Machine | RecordKind::Commit => TEXT_MAX,
        };
        // zstd adds little to a payload that it cannot compress.
        if raw_length > most || length > most + most / 128 + 1024 {
            return damaged("it is longer than records can be");
        }
        let mut header = Self {
            kind,
            number: word(bytes, 8),
            identity: Identity::default(),
            length,
            raw_length,
            checksum: [0; 32],
        };
        header.identity.0.copy_from_slice(&bytes[16..32]);
        header.checksum.copy_from_slice(&bytes[CHECKED..]);
        if header.number != place.record {
            return damaged("it does not belong at this place of the image");
        }
        Ok(header)
    }
}

/// The source of a frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The next page of the record's data.
    Data,
    /// No source: the content is all zeros.
    Zero,
    /// An earlier frame, at this physical address.
    Frame(u64),
    /// The parent, for so many frames from this one on.
    Parent(u64),
}

/// A frame of memory, or several that are unchanged since the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Physical address of the first frame.
    pub phys: u64,
    /// Source of the content.
    pub source: Source,
}

const SOURCE_DATA: u64 = 1;
const SOURCE_ZERO: u64 = 2;
/// Low bits of a source word that refers to the parent. The number of frames stands above them.
const SOURCE_PARENT: u64 = 3;
const SOURCE_BITS: u32 = 12;

impl Frame {
    /// Returns the number of frames that the entry covers.
    #[must_use]
    pub fn pages(self) -> u64 {
        if let Source::Parent(pages) = self.source { pages } else { 1 }
    }

    /// Returns the source as it is written.
    #[must_use]
    pub fn source_word(self) -> u64 {
        match self.source {
            Source::Data => SOURCE_DATA,
            Source::Zero => SOURCE_ZERO,
            Source::Frame(phys) => phys,
            Source::Parent(pages) => pages << SOURCE_BITS | SOURCE_PARENT,
        }
    }

    fn parse(phys: u64, source: u64) -> Option<Self> {
        let aligned = |address: u64| address.is_multiple_of(PAGE as u64);
        let source = match source {
            SOURCE_DATA => Source::Data,
            SOURCE_ZERO => Source::Zero,
            frame if aligned(frame) => Source::Frame(frame),
            run if run % PAGE as u64 == SOURCE_PARENT => Source::Parent(run >> SOURCE_BITS),
            _ => return None,
        };
        let frame = Self { phys, source };
        (aligned(phys) && is_run(phys, frame.pages())).then_some(frame)
    }
}

/// Returns true if memory can have `pages` frames from `phys` on.
pub fn is_run(phys: u64, pages: u64) -> bool {
    pages > 0 && pages.checked_mul(PAGE as u64).and_then(|bytes| phys.checked_add(bytes)).is_some()
}

/// Returns the payload before compression.
pub fn decompress(payload: &[u8], raw_length: u64, place: Place) -> Result<Vec<u8>> {
    let damaged = |what: String| Error::Damaged(place, what);
    let raw = zstd::bulk::decompress(payload, raw_length as usize)
        .map_err(|error| damaged(format!("it cannot be decompressed ({error})")))?;
    if raw.len() as u64 != raw_length {
        return Err(damaged("its length is not the one that it names".into()));
    }
    Ok(raw)
}

/// Frames of a record, and the content of those that have data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// The frames, in [`order`](crate::order).
    pub frames: Vec<Frame>,
    /// Content of the frames whose source is [`Source::Data`], in their order, a page each.
    pub data: Vec<u8>,
}

/// A part of an image: the content of any record but the first and the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Frames, and the content of some.
    Frames(Chunk),
    /// Hashes of frames.
    Hashes(Hashes),
}

impl Part {
    /// Compresses the part, at a level of zstd.
    ///
    /// # Errors
    /// zstd fails.
    pub fn compress(&self, level: i32) -> Result<Compressed> {
        match self {
            Self::Frames(chunk) => chunk.compress(level),
            Self::Hashes(hashes) => hashes.compress(level),
        }
    }
}

/// A part that is ready to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compressed {
    pub(crate) kind: RecordKind,
    pub(crate) payload: Vec<u8>,
    pub(crate) raw_length: u64,
    pub(crate) frames: u64,
    pub(crate) zeros: u64,
    pub(crate) duplicates: u64,
    pub(crate) unchanged: u64,
}

impl Compressed {
    /// Returns the number of frames in the part.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames
    }
}

impl Chunk {
    /// Returns true if the chunk should be written before a frame is added.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.frames.len() >= ENTRIES_MAX || self.data.len() >= PAGES_MAX * PAGE
    }

    /// Compresses the chunk, at a level of zstd.
    ///
    /// # Errors
    /// zstd fails.
    pub fn compress(&self, level: i32) -> Result<Compressed> {
        let mut raw = Vec::with_capacity(8 + self.frames.len() * ENTRY + self.data.len());
        raw.extend_from_slice(&(self.frames.len() as u64).to_le_bytes());
        for frame in &self.frames {
            raw.extend_from_slice(&frame.phys.to_le_bytes());
            raw.extend_from_slice(&frame.source_word().to_le_bytes());
        }
        raw.extend_from_slice(&self.data);
        let count = |wanted: fn(&Source) -> bool| {
            self.frames.iter().filter(|frame| wanted(&frame.source)).count() as u64
        };
        Ok(Compressed {
            kind: RecordKind::Frames,
            payload: zstd::bulk::compress(&raw, level)?,
            raw_length: raw.len() as u64,
            frames: self.pages(),
            zeros: count(|source| *source == Source::Zero),
            duplicates: count(|source| matches!(source, Source::Frame(_))),
            unchanged: self.unchanged(),
        })
    }

    /// Returns the number of frames in the chunk.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.frames.iter().map(|frame| frame.pages()).fold(0, u64::saturating_add)
    }

    /// Returns the number of frames that are unchanged since the parent.
    #[must_use]
    pub fn unchanged(&self) -> u64 {
        let runs = self.frames.iter().filter(|frame| matches!(frame.source, Source::Parent(_)));
        runs.map(|frame| frame.pages()).fold(0, u64::saturating_add)
    }

    /// Parses the chunk of a record whose checksum is right. The record may be hostile all the
    /// same.
    pub(crate) fn expand(payload: &[u8], raw_length: u64, place: Place) -> Result<Self> {
        let damaged = |what: &str| Error::Damaged(place, what.to_owned());
        let raw = decompress(payload, raw_length, place)?;
        if raw.len() < 8 {
            return Err(damaged("it is too short"));
        }
        let count = word(&raw, 0);
        if count > ENTRIES_MAX as u64 || raw.len() < 8 + count as usize * ENTRY {
            return Err(damaged("it has more entries than allowed"));
        }
        let (entries, data) = raw[8..].split_at(count as usize * ENTRY);
        let frames: Option<Vec<_>> =
            entries.chunks(ENTRY).map(|entry| Frame::parse(word(entry, 0), word(entry, 8))).collect();
        let frames = frames.ok_or_else(|| damaged("one of its entries is invalid"))?;
        let with_data = frames.iter().filter(|frame| frame.source == Source::Data).count();
        if data.len() != with_data * PAGE {
            return Err(damaged("its data do not match its entries"));
        }
        Ok(Self { frames, data: data.to_vec() })
    }
}

/// The commit record: the numbers of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// Number of records before this one.
    pub records: u64,
    /// Number of frames in the image.
    pub frames: u64,
    /// Number of frames that are all zeros.
    pub zeros: u64,
    /// Number of frames that equal an earlier one.
    pub duplicates: u64,
    /// Number of frames that are unchanged since the parent.
    #[serde(default)]
    pub unchanged: u64,
    /// BLAKE3 of the checksums of all records before this one, in hexadecimal digits.
    pub checksum: String,
}
