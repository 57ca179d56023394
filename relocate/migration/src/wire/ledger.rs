//! What each page of the machine was when it was last sent, and the digest of all of it.

use std::ops::Range;

use super::pages::{Content, PAGE, Page};
use crate::protocol::{Attempt, Digest};

const ZEROS: [u8; PAGE] = [0; PAGE];
const WORD: usize = u64::BITS as usize;
/// Pages whose part of the digest is kept together: 2 MiB.
const REGION: usize = 512;

/// Both ends have one. The destination's is made from what lies in its memory, not from what came: so the
/// digest also says that every page was put where it belongs. It takes 16 bytes for each page of the machine.
///
/// The digest is that of the digests of regions, and a region's is kept until one of its pages is another one: while the
/// machine stands still, only what has changed since [`Self::settle`] is hashed, however much memory there is.
#[derive(Clone, Debug)]
pub struct Ledger {
    /// Ascending, with the number of the first page of each.
    ranges: Vec<(Range<u64>, usize)>,
    hashes: Vec<[u8; 16]>,
    /// A bit for each page that was noted.
    noted: Vec<u64>,
    count: usize,
    /// Of [`REGION`] pages each, by their numbers; `None` where one has changed since it was made.
    regions: Vec<Option<[u8; 32]>>,
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
            regions: vec![None; pages.div_ceil(REGION)],
            zero: hash_of(&ZEROS),
        }
    }

    /// How much memory it takes, besides what it has for each range.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.hashes[..]) + size_of_val(&self.noted[..]) + size_of_val(&self.regions[..])
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
        if is_other {
            self.regions[number / REGION] = None;
        }
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

    /// Makes the digests of regions that have changed since theirs was made, and says how many these were. Whoever does so
    /// when there is time makes [`Self::digest`] short.
    pub fn settle(&mut self) -> usize {
        let stale: Vec<usize> =
            (0..self.regions.len()).filter(|region| self.regions[*region].is_none()).collect();
        let mut bytes = Vec::with_capacity(REGION * 24);
        for region in &stale {
            bytes.clear();
            let numbers = region * REGION..self.hashes.len().min((region + 1) * REGION);
            for number in numbers.filter(|number| self.noted[number / WORD] & 1 << (number % WORD) != 0) {
                bytes.extend_from_slice(&self.phys(number).to_le_bytes());
                bytes.extend_from_slice(&self.hashes[number]);
            }
            self.regions[*region] = Some(*blake3::hash(&bytes).as_bytes());
        }
        stale.len()
    }

    /// Where the page of a number that there is lies.
    fn phys(&self, number: usize) -> u64 {
        let next = self.ranges.partition_point(|(_, first)| *first <= number);
        let (range, first) = &self.ranges[next - 1];
        range.start + ((number - first) * PAGE) as u64
    }

    /// The digest of all pages, in order of their addresses, in this attempt.
    pub fn digest(&mut self, attempt: Attempt) -> Digest {
        self.settle();
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"mercury migration 2").update(&attempt.0);
        for region in self.regions.iter().flatten() {
            hasher.update(region);
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
