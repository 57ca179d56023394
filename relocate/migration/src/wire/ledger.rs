//! The ledger of a machine: the hash of each page as it was last sent, and the digest of all pages.

use std::ops::Range;

use super::pages::{Content, PAGE, Page};
use crate::protocol::{Attempt, Digest};

const ZEROS: [u8; PAGE] = [0; PAGE];
const WORD: usize = u64::BITS as usize;
/// Number of pages whose part of the digest is kept together: 2 MiB.
const REGION: usize = 512;

/// The hashes of a machine's pages. Both ends have a ledger. The destination makes its own from the
/// content of its memory, not from the data that came, so that the digest also proves the place of
/// every page. A ledger takes 16 bytes for each page of the machine.
///
/// The digest is that of the digests of regions. A region's digest is kept until one of its pages
/// changes. While the machine is stopped, only the changes since [`Self::settle`] are hashed,
/// however much memory there is.
#[derive(Clone, Debug)]
pub struct Ledger {
    /// Ranges of physical addresses, ascending, each with the number of its first page.
    ranges: Vec<(Range<u64>, usize)>,
    hashes: Vec<[u8; 16]>,
    /// One bit for each page: set if the page was noted.
    noted: Vec<u64>,
    count: usize,
    /// Digests of the regions of [`REGION`] pages, by page number; `None` if a page has changed
    /// since.
    regions: Vec<Option<[u8; 32]>>,
    zero: [u8; 16],
}

impl Ledger {
    /// Returns the ledger of a machine whose memory lies at these physical addresses.
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

    /// Returns the ledger's own size in bytes, without the list of ranges.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.hashes[..]) + size_of_val(&self.noted[..]) + size_of_val(&self.regions[..])
    }

    /// Returns the number of a page in the machine's memory.
    fn number(&self, phys: u64) -> Option<usize> {
        let next = self.ranges.partition_point(|(range, _)| range.start <= phys);
        let (range, first) = self.ranges.get(next.checked_sub(1)?)?;
        let number = (phys - range.start) / PAGE as u64;
        let fits = phys.checked_add(PAGE as u64)? <= range.end;
        (fits && phys.is_multiple_of(PAGE as u64)).then_some(first + number as usize)
    }

    /// Returns true if a page lies in the machine's memory.
    #[must_use]
    pub fn contains(&self, phys: u64) -> bool {
        self.number(phys).is_some()
    }

    /// Notes the content of a page. Returns true if it differs from the content noted before, or if
    /// there was none.
    ///
    /// # Errors
    /// The page lies outside of the machine's memory, and nothing may be written there.
    pub fn note(&mut self, page: Page<'_>) -> Result<bool, &'static str> {
        let hash = match page.content {
            Content::Data(bytes) => hash_of(bytes),
            Content::Zero => self.zero,
        };
        self.note_hash(page.phys, hash)
    }

    /// Notes the [hash](hash_of) of a page, where the caller has it already.
    ///
    /// # Errors
    /// As [`Self::note`].
    pub fn note_hash(&mut self, phys: u64, hash: [u8; 16]) -> Result<bool, &'static str> {
        let number = self.number(phys).ok_or("one of its pages is outside the memory that was offered")?;
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

    /// Returns true if the page was ever noted.
    #[must_use]
    pub fn has(&self, phys: u64) -> bool {
        self.number(phys).is_some_and(|number| self.noted[number / WORD] & 1 << (number % WORD) != 0)
    }

    /// Returns the number of noted pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns true if no page was noted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns true if every page of the machine was noted.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.count == self.hashes.len()
    }

    /// Makes the missing digests of regions, and returns their number. A caller with time to spare
    /// so shortens [`Self::digest`].
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

    /// Returns the physical address of an existing page number.
    fn phys(&self, number: usize) -> u64 {
        let next = self.ranges.partition_point(|(_, first)| *first <= number);
        let (range, first) = &self.ranges[next - 1];
        range.start + ((number - first) * PAGE) as u64
    }

    /// Returns the digest of all pages in the order of their addresses, in this attempt.
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

/// Returns the hash that a [`Ledger`] keeps of a page.
#[must_use]
pub fn hash_of(page: &[u8; PAGE]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&blake3::hash(page).as_bytes()[..16]);
    half
}
