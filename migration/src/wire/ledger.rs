//! What each page of the machine was when it was last sent, and the digest of all of it.

use std::ops::Range;

use super::pages::{Content, PAGE, Page};
use crate::protocol::{Attempt, Digest};

const ZEROS: [u8; PAGE] = [0; PAGE];
const WORD: usize = u64::BITS as usize;

/// Both ends have one. The destination's is made from what lies in its memory, not from what came: so the
/// digest also says that every page was put where it belongs. It takes 16 bytes for each page of the machine.
#[derive(Clone, Debug)]
pub struct Ledger {
    /// Ascending, with the number of the first page of each.
    ranges: Vec<(Range<u64>, usize)>,
    hashes: Vec<[u8; 16]>,
    /// A bit for each page that was noted.
    noted: Vec<u64>,
    count: usize,
    zero: [u8; 16],
}

impl Ledger {
    /// That of a machine whose memory lies at these physical addresses.
    #[must_use]
    pub fn new(mut ranges: Vec<Range<u64>>) -> Self {
        ranges.sort_by_key(|range| range.start);
        let mut pages = 0;
        let numbered = ranges.into_iter().map(|range| {
            let first = pages;
            pages += (range.end.saturating_sub(range.start) / PAGE as u64) as usize;
            (range, first)
        });
        let ranges = numbered.collect();
        Self {
            ranges,
            hashes: vec![[0; 16]; pages],
            noted: vec![0; pages.div_ceil(WORD)],
            count: 0,
            zero: hash_of(&ZEROS),
        }
    }

    /// The number of a page that lies in the machine's memory.
    fn number(&self, phys: u64) -> Option<usize> {
        let next = self.ranges.partition_point(|(range, _)| range.start <= phys);
        let (range, first) = self.ranges.get(next.checked_sub(1)?)?;
        let number = (phys - range.start) / PAGE as u64;
        let fits = phys.checked_add(PAGE as u64)? <= range.end;
        (fits && phys.is_multiple_of(PAGE as u64)).then_some(first + number as usize)
    }

    /// Whether a page lies in the machine's memory.
    #[must_use]
    pub fn has_room_for(&self, phys: u64) -> bool {
        self.number(phys).is_some()
    }

    /// Notes what a page holds now; whether that is something else than what was noted before, if anything was.
    ///
    /// # Errors
    /// If it does not lie in the machine's memory: nothing may be written there.
    pub fn note(&mut self, page: Page<'_>) -> Result<bool, &'static str> {
        let hash = match page.content {
            Content::Data(bytes) => hash_of(bytes),
            Content::Zero => self.zero,
        };
        self.note_hash(page.phys, hash)
    }

    /// The same where the [hash](hash_of) of what it holds is there already.
    ///
    /// # Errors
    /// As [`Self::note`].
    pub fn note_hash(&mut self, phys: u64, hash: [u8; 16]) -> Result<bool, &'static str> {
        let number = self.number(phys).ok_or("a page of it does not lie in the memory that was offered")?;
        let (word, bit) = (number / WORD, 1 << (number % WORD));
        let is_new = self.noted[word] & bit == 0;
        let is_other = is_new || self.hashes[number] != hash;
        self.noted[word] |= bit;
        self.count += usize::from(is_new);
        self.hashes[number] = hash;
        Ok(is_other)
    }

    /// Whether a page was noted, ever.
    #[must_use]
    pub fn has(&self, phys: u64) -> bool {
        self.number(phys).is_some_and(|number| self.noted[number / WORD] & 1 << (number % WORD) != 0)
    }

    /// How many pages were noted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether none was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether every page of the machine was noted.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.count == self.hashes.len()
    }

    /// The digest of all pages, in order of their addresses, in this attempt.
    #[must_use]
    pub fn digest(&self, attempt: Attempt) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"mercury migration 1").update(&attempt.0);
        for (range, first) in &self.ranges {
            for (phys, number) in range.clone().step_by(PAGE).zip(*first..) {
                if self.noted.get(number / WORD).is_some_and(|word| word & 1 << (number % WORD) != 0) {
                    hasher.update(&phys.to_le_bytes()).update(&self.hashes[number]);
                }
            }
        }
        Digest(*hasher.finalize().as_bytes())
    }
}

/// What a [`Ledger`] keeps of a page.
#[must_use]
pub fn hash_of(page: &[u8; PAGE]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&blake3::hash(page).as_bytes()[..16]);
    half
}
