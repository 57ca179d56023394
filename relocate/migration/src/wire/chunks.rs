//! Records of chunks of disks, and the ledger of each disk's chunks as they were last sent.

use super::ledger::Ledger;
use super::packed;
use super::pages::PAGE;
use crate::protocol::{Attempt, Digest};

/// Least size of a chunk, as a power of two in bytes. Only a disk's last chunk may be shorter.
pub const CHUNK_SHIFT_MIN: u32 = 16;
/// Largest size of a chunk, as a power of two in bytes.
pub const CHUNK_SHIFT_MAX: u32 = 20;
/// Number of chunks of a disk that the choice of their size stays below, where it can.
const CHUNKS_WANTED: u64 = 4 << 20;
/// Largest number of chunks in a record.
pub const CHUNKS_MAX: usize = 256;
/// Largest number of data bytes in a record.
pub const CHUNKS_BYTES_MAX: usize = 1 << CHUNK_SHIFT_MAX;
const HEAD: usize = 8;
const ENTRY: usize = 12;
const RAW_MAX: usize = HEAD + CHUNKS_MAX * ENTRY + CHUNKS_BYTES_MAX;
/// Largest size of a record on the wire, in bytes.
pub const PACKED_MAX: usize = packed::longest(RAW_MAX);

const SECTOR: u64 = 512;
const DATA: u64 = 1;
const ZERO: u64 = 2;
const KIND: u64 = SECTOR - 1;

/// Returns the size of a disk's chunks, as a power of two: small ones, but not too many.
#[must_use]
pub fn chunk_shift(bytes: u64) -> u32 {
    (CHUNK_SHIFT_MIN..CHUNK_SHIFT_MAX)
        .find(|shift| bytes >> shift <= CHUNKS_WANTED)
        .unwrap_or(CHUNK_SHIFT_MAX)
}

/// A chunk of a disk, in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// Offset of its first byte on the disk.
    pub offset: u64,
    /// Length of the chunk in bytes.
    pub length: usize,
    /// Content of the chunk; `None`: zeros.
    pub data: Option<&'a [u8]>,
}

/// Chunks of one disk that go over the wire together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chunks {
    /// Number of the disk in the offer.
    pub disk: u32,
    entries: Vec<(u64, u32)>,
    data: Vec<u8>,
}

impl Chunks {
    /// Returns an empty record for a disk.
    #[must_use]
    pub fn of(disk: u32) -> Self {
        Self { disk, ..Self::default() }
    }

    /// Returns true if the record is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds a chunk. Returns true if it is all zeros, which take no room.
    ///
    /// # Panics
    /// There is no room, or the chunk does not begin and end with a sector.
    pub fn add(&mut self, offset: u64, bytes: &[u8]) -> bool {
        let is_zero = bytes.iter().all(|byte| *byte == 0);
        let room = if is_zero { 0 } else { bytes.len() };
        assert!(
            self.entries.len() < CHUNKS_MAX
                && self.data.len() + room <= CHUNKS_BYTES_MAX
                && is_length(bytes.len()),
            "no room, or no chunk"
        );
        assert!(offset & KIND == 0, "it begins within a sector");
        if !is_zero {
            self.data.extend_from_slice(bytes);
        }
        self.entries.push((offset | if is_zero { ZERO } else { DATA }, bytes.len() as u32));
        is_zero
    }

    /// Returns the chunks, in their order.
    pub fn iter(&self) -> impl Iterator<Item = Chunk<'_>> {
        let mut rest = &self.data[..];
        self.entries.iter().map(move |(entry, length)| {
            let length = *length as usize;
            let data = (entry & KIND == DATA).then(|| {
                // The data have the sum of all lengths, or the record would have been refused.
                let (data, behind) = rest.split_at(length.min(rest.len()));
                rest = behind;
                data
            });
            Chunk { offset: entry & !KIND, length, data }
        })
    }

    /// Returns the record as it goes over the wire.
    ///
    /// # Errors
    /// zstd fails.
    pub fn pack(&self, level: i32) -> std::io::Result<Vec<u8>> {
        let mut raw = Vec::with_capacity(HEAD + self.entries.len() * ENTRY + self.data.len());
        raw.extend_from_slice(&self.disk.to_le_bytes());
        raw.extend_from_slice(&(self.entries.len() as u32).to_le_bytes());
        for (entry, length) in &self.entries {
            raw.extend_from_slice(&entry.to_le_bytes());
            raw.extend_from_slice(&length.to_le_bytes());
        }
        raw.extend_from_slice(&self.data);
        packed::pack(&raw, level)
    }

    /// Parses a record that came over the wire. Its checksum is right; the record may be hostile
    /// all the same.
    pub(super) fn unpack(payload: &[u8]) -> Result<Self, &'static str> {
        let raw = packed::unpack(payload, RAW_MAX, "it is longer than chunks can be")?;
        let (disk, rest) = raw.split_first_chunk().ok_or("it is too short")?;
        let (count, rest) = rest.split_first_chunk().ok_or("it is too short")?;
        let count = u32::from_le_bytes(*count) as usize;
        if count == 0 || count > CHUNKS_MAX || rest.len() < count * ENTRY {
            return Err("its number of chunks is impossible");
        }
        let (entries, data) = rest.split_at(count * ENTRY);
        let (entries, _) = entries.as_chunks::<ENTRY>();
        let entries: Vec<_> = entries.iter().map(entry_of).collect();
        let is_right =
            |(entry, length): &(u64, u32)| matches!(entry & KIND, DATA | ZERO) && is_length(*length as usize);
        if !entries.iter().all(is_right) {
            return Err("one of its chunks is invalid");
        }
        let with_data = entries.iter().filter(|(entry, _)| entry & KIND == DATA);
        if data.len() != with_data.map(|(_, length)| *length as usize).sum::<usize>() {
            return Err("its data do not match its chunks");
        }
        Ok(Self { disk: u32::from_le_bytes(*disk), entries, data: data.to_vec() })
    }
}

fn is_length(length: usize) -> bool {
    length > 0 && length <= CHUNKS_BYTES_MAX && length.is_multiple_of(SECTOR as usize)
}

fn entry_of(bytes: &[u8; ENTRY]) -> (u64, u32) {
    let [a, b, c, d, e, f, g, h, rest @ ..] = *bytes;
    (u64::from_le_bytes([a, b, c, d, e, f, g, h]), u32::from_le_bytes(rest))
}

/// The ledger of a disk: the hash of each chunk as it was last sent, or as it lies on the
/// destination's disk, and the digest of all chunks.
#[derive(Clone, Debug)]
pub struct DiskLedger {
    bytes: u64,
    shift: u32,
    /// The ledger of the chunks. It addresses each chunk like a page.
    ledger: Ledger,
}

impl DiskLedger {
    /// Returns the ledger of a disk of this size in bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let shift = chunk_shift(bytes);
        let chunks = bytes.div_ceil(1 << shift);
        let all = std::iter::once(0..chunks.saturating_mul(PAGE as u64));
        Self { bytes, shift, ledger: Ledger::new(all.collect()) }
    }

    /// Returns the size of the chunks, as a power of two in bytes.
    #[must_use]
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// Returns the number of chunks of the disk.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.bytes.div_ceil(1 << self.shift)
    }

    /// Returns the offset and the length of a chunk. The last chunk may be shorter.
    #[must_use]
    pub fn place(&self, number: u64) -> (u64, usize) {
        let start = number << self.shift;
        (start, self.bytes.saturating_sub(start).min(1 << self.shift) as usize)
    }

    /// Returns the number of the chunk with this offset and length.
    fn number(&self, offset: u64, length: usize) -> Option<u64> {
        let number = offset >> self.shift;
        (number < self.chunks() && self.place(number) == (offset, length)).then_some(number)
    }

    /// Returns true if the disk has a chunk with this offset and length.
    #[must_use]
    pub fn contains(&self, offset: u64, length: usize) -> bool {
        self.number(offset, length).is_some()
    }

    /// Notes the hash of a chunk. Returns true if it differs from the hash noted before, or if
    /// there was none.
    ///
    /// # Errors
    /// The disk has no such chunk, and nothing may be written there.
    pub fn note(&mut self, offset: u64, length: usize, hash: [u8; 16]) -> Result<bool, &'static str> {
        let number =
            self.number(offset, length).ok_or("one of its chunks is not on the disk that was offered")?;
        self.ledger.note_hash(number * PAGE as u64, hash)
    }

    /// Returns true if every chunk was noted.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.ledger.is_complete()
    }

    /// Computes as much of the digest as is possible before the end.
    pub fn settle(&mut self) {
        self.ledger.settle();
    }

    /// Returns the digest of all chunks, in this attempt.
    pub fn digest(&mut self, attempt: Attempt) -> Digest {
        self.ledger.digest(attempt)
    }
}

/// Returns the hash that a [`DiskLedger`] keeps of a chunk.
#[must_use]
pub fn hash_of_chunk(bytes: &[u8]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    half
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Makes a record of raw bytes, as an attacker does.
    fn record(disk: u32, entries: &[(u64, u32)], data: &[u8]) -> Vec<u8> {
        Chunks { disk, entries: entries.to_vec(), data: data.to_vec() }.pack(1).expect("packed")
    }

    #[test]
    fn chunks_come_back() {
        let mut chunks = Chunks::of(3);
        chunks.add(1 << 16, &[7; 1 << 16]);
        chunks.add(0, &[0; 1 << 16]);
        chunks.add(5 << 16, &[9; 512]);
        let found = Chunks::unpack(&chunks.pack(3).expect("packed")).expect("unpacked");
        assert_eq!(found, chunks);
        let all: Vec<_> = found
            .iter()
            .map(|chunk| (chunk.offset >> 16, chunk.length, chunk.data.map(|data| data[0])))
            .collect();
        assert_eq!(all, [(1, 1 << 16, Some(7)), (0, 1 << 16, None), (5, 512, Some(9))]);
    }

    #[test]
    fn impossible_chunks_are_refused() {
        let sector = [1; 512];
        assert!(Chunks::unpack(&record(0, &[(512 | DATA, 512)], &sector)).is_ok());
        for (entries, data) in [
            (&[][..], &[][..]),
            (&[(DATA, 512)], &[]),
            (&[(DATA, 512)], &[1; 513]),
            (&[(ZERO, 512)], &sector),
            (&[(3, 512)], &sector),
            (&[(DATA | 256, 512)], &sector),
            (&[(DATA, 511)], &sector[..511]),
            (&[(ZERO, 0)], &[]),
            (&[(ZERO, 2 << 20)], &[]),
            (&[(ZERO, 512); CHUNKS_MAX + 1], &[]),
        ] {
            assert!(Chunks::unpack(&record(0, entries, data)).is_err(), "{entries:?}");
        }
        let mut long = record(0, &[(DATA, 512)], &sector);
        long[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Chunks::unpack(&long), Err("it is longer than chunks can be"));
        assert!(Chunks::unpack(&[0; 3]).is_err() && Chunks::unpack(&[0; 4]).is_err());
    }

    #[test]
    fn chunks_are_those_of_the_disk() {
        // Two whole chunks, and a sector.
        let mut ledger = DiskLedger::new((2 << 16) + 512);
        assert_eq!((ledger.chunks(), ledger.place(2)), (3, (2 << 16, 512)));
        for (offset, length) in
            [(0, 512), (512, 1 << 16), (2 << 16, 1 << 16), (3 << 16, 512), (u64::MAX << 16, 1 << 16)]
        {
            assert!(!ledger.contains(offset, length) && ledger.note(offset, length, [1; 16]).is_err());
        }
        assert_eq!(ledger.note(0, 1 << 16, [1; 16]), Ok(true));
        assert_eq!(ledger.note(0, 1 << 16, [1; 16]), Ok(false));
        assert_eq!(ledger.note(1 << 16, 1 << 16, [2; 16]), Ok(true));
        assert!(!ledger.is_complete());
        assert_eq!(ledger.note(2 << 16, 512, [3; 16]), Ok(true));
        assert!(ledger.is_complete());
        let digest = ledger.digest(Attempt([1; 16]));
        assert_ne!(digest, ledger.digest(Attempt([2; 16])));
        assert_eq!(ledger.note(0, 1 << 16, [9; 16]), Ok(true));
        assert_ne!(digest, ledger.digest(Attempt([1; 16])));
    }

    #[test]
    fn large_disks_have_large_chunks() {
        assert_eq!([0, 1 << 30, 256 << 30, 257 << 30, 16 << 40].map(chunk_shift), [16, 16, 16, 17, 20]);
    }

    proptest! {
        /// No input is taken for another disk's bytes, and no input causes a panic.
        #[test]
        fn nonsense_is_refused_or_chunks(payload in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Chunks::unpack(&payload);
        }

        #[test]
        fn raw_nonsense_is_refused_or_chunks(raw in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut payload = (raw.len() as u32).to_le_bytes().to_vec();
            payload.extend(zstd::bulk::compress(&raw, 1).expect("compressed"));
            if let Ok(chunks) = Chunks::unpack(&payload) {
                let is_whole = |data: &[u8], length| data.len() == length;
                for chunk in chunks.iter() {
                    prop_assert!(chunk.data.is_none_or(|data| is_whole(data, chunk.length)));
                }
            }
        }
    }
}
