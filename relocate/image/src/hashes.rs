//! Hashes of frames. An image holds the hashes of all its frames, so that the next image can leave
//! out unchanged ones.
//!
//! A hash is half as long as BLAKE3's, which saves half of its cost. An attacker cannot search for
//! two pages with the same hash: hashes depend on a key, random for each full image, that never
//! leaves the images made on it.

use crate::{
    error::{Error, Place, Result},
    record::{Compressed, PAGE, RAW_MAX, RecordKind, decompress, is_run, word},
};

/// The hash of a frame: the first 16 bytes of its keyed BLAKE3. The hash of a frame of zeros is
/// zeros.
pub type Hash = [u8; HASH];
/// Size of a hash in bytes.
pub const HASH: usize = 16;
const ZERO: Hash = [0; HASH];
const KEY: usize = 32;
const RUN: usize = 16;
/// Largest number of hashes in a record. It is small, so that a record appears now and then even if
/// nothing has changed.
pub const HASHES_MAX: usize = 1 << 12;

const _: () = assert!((KEY + 8 + HASHES_MAX * (RUN + HASH)) as u64 <= RAW_MAX);

/// The key of an image's hashes, 32 random bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Key(pub [u8; KEY]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Returns the hash of a page.
    #[must_use]
    pub fn hash(&self, page: &[u8]) -> Hash {
        let mut hash = ZERO;
        if !page.chunks_exact(8).all(|word| word == [0; 8]) {
            hash.copy_from_slice(&blake3::keyed_hash(&self.0, page).as_bytes()[..HASH]);
        }
        hash
    }
}

/// Returns true if `hash` is that of a frame of zeros.
#[must_use]
pub fn is_zero(hash: &Hash) -> bool {
    *hash == ZERO
}

/// Returns the rank of a frame in an image. Frames and hashes stand in ascending rank. Low memory,
/// where a restoring kernel has to lie, comes last.
#[must_use]
pub fn order(phys: u64) -> u64 {
    phys.wrapping_sub(crate::LOW_END_PHYS)
}

/// A run of adjacent frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Physical address of the first frame.
    pub start_phys: u64,
    /// Number of frames of 4 KiB.
    pub pages: u64,
}

impl Run {
    /// Returns the index of a frame in the run, if the run holds the frame.
    #[must_use]
    pub fn index_of(&self, phys: u64) -> Option<u64> {
        let index = phys.checked_sub(self.start_phys)? / PAGE as u64;
        (index < self.pages).then_some(index)
    }
}

/// Hashes of frames, in the order of the frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hashes {
    /// The key that made the hashes.
    pub key: Key,
    /// The frames, as runs.
    pub runs: Vec<Run>,
    /// The hashes, one for each frame.
    pub hashes: Vec<Hash>,
}

impl Hashes {
    /// Returns true if the hashes should be written before one is added.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.hashes.len() >= HASHES_MAX
    }

    /// Adds the hash of a frame.
    pub fn add(&mut self, phys: u64, hash: Hash) {
        let end_phys = |run: &Run| run.start_phys + run.pages * PAGE as u64;
        match self.runs.last_mut() {
            Some(run) if end_phys(run) == phys => run.pages += 1,
            _ => self.runs.push(Run { start_phys: phys, pages: 1 }),
        }
        self.hashes.push(hash);
    }

    /// Returns each frame with its hash.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Hash)> {
        let frames = self.runs.iter();
        let frames = frames.flat_map(|run| (0..run.pages).map(|page| run.start_phys + page * PAGE as u64));
        frames.zip(self.hashes.iter().copied())
    }

    /// Compresses the hashes, at a level of zstd. Only hashes of zeros get smaller.
    pub(crate) fn compress(&self, level: i32) -> Result<Compressed> {
        let mut raw = Vec::with_capacity(KEY + 8 + self.runs.len() * RUN + self.hashes.len() * HASH);
        raw.extend_from_slice(&self.key.0);
        raw.extend_from_slice(&(self.runs.len() as u64).to_le_bytes());
        for run in &self.runs {
            raw.extend_from_slice(&run.start_phys.to_le_bytes());
            raw.extend_from_slice(&run.pages.to_le_bytes());
        }
        raw.extend_from_slice(self.hashes.as_flattened());
        Ok(Compressed {
            kind: RecordKind::Hashes,
            payload: zstd::bulk::compress(&raw, level)?,
            raw_length: raw.len() as u64,
            frames: 0,
            zeros: 0,
            duplicates: 0,
            unchanged: 0,
        })
    }

    /// Parses the hashes of a record whose checksum is right. The record may be hostile all the
    /// same.
    pub(crate) fn expand(payload: &[u8], raw_length: u64, place: Place) -> Result<Self> {
        let damaged = |what: &str| Error::Damaged(place, what.to_owned());
        let raw = decompress(payload, raw_length, place)?;
        let (key, rest) = raw.split_first_chunk().ok_or_else(|| damaged("it is too short"))?;
        let (count, rest) = rest.split_first_chunk().ok_or_else(|| damaged("it is too short"))?;
        let count = u64::from_le_bytes(*count);
        if count > HASHES_MAX as u64 || rest.len() < count as usize * RUN {
            return Err(damaged("it has more entries than allowed"));
        }
        let (runs, hashes) = rest.split_at(count as usize * RUN);
        let runs: Vec<_> =
            runs.chunks(RUN).map(|run| Run { start_phys: word(run, 0), pages: word(run, 8) }).collect();
        let is_sound =
            |run: &Run| run.start_phys.is_multiple_of(PAGE as u64) && is_run(run.start_phys, run.pages);
        if !runs.iter().all(is_sound) {
            return Err(damaged("one of its entries is invalid"));
        }
        let pages = runs.iter().map(|run| run.pages).fold(0, u64::saturating_add);
        let (hashes, more) = hashes.as_chunks();
        if pages != hashes.len() as u64 || !more.is_empty() || hashes.len() > HASHES_MAX {
            return Err(damaged("its hashes do not match its entries"));
        }
        Ok(Self { key: Key(*key), runs, hashes: hashes.to_vec() })
    }

    /// Returns the first frame and the last one.
    pub(crate) fn ends(&self) -> Option<(u64, u64)> {
        let (first, last) = (self.runs.first()?, self.runs.last()?);
        Some((first.start_phys, last.start_phys + (last.pages - 1) * PAGE as u64))
    }

    /// Returns true if the frames stand in [`order`], each once.
    pub(crate) fn is_ordered(&self) -> bool {
        let last = |run: &Run| order(run.start_phys + (run.pages - 1) * PAGE as u64);
        self.runs.iter().all(|run| last(run) >= order(run.start_phys))
            && self.runs.is_sorted_by(|run, next| last(run) < order(next.start_phys))
    }
}
