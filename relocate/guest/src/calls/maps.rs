//! Maps of pages in the guest's memory: a bit for each page, by address, in pieces that may be missing.

use crate::layout::PAGE_BYTES;
use mercury_abi::snapshot::MAP_BITS;
use mercury_devices::memory::{View, pointer, read};
use std::sync::atomic::{AtomicU64, Ordering};

use super::Translate;

const PIECE_BYTES: u64 = MAP_BITS as u64 / 8;
/// Largest number of pieces: as many as there are in the largest address space of a machine.
const PIECES_MAX: u64 = 1 << 14;

/// Words of a piece. Both sides change them by atomic instructions.
#[derive(Clone, Copy, Debug)]
struct Piece(*mut u64);

// SAFETY: The words are accessed as atomics only, and the view keeps them mapped.
unsafe impl Send for Piece {}

impl Piece {
    fn word(&self, number: usize) -> &AtomicU64 {
        assert!(number < MAP_BITS / 64, "a word of another piece");
        // SAFETY: The piece was found in the guest's memory with all its words, on a page's boundary. The
        // view in `Maps` keeps it mapped.
        unsafe { AtomicU64::from_ptr(self.0.add(number)) }
    }

    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        (0..MAP_BITS / 64).map(|number| self.word(number))
    }
}

/// A map of the driver's.
#[derive(Debug)]
pub struct Maps {
    pieces: Vec<Option<Piece>>,
    _view: View,
}

impl Maps {
    /// Finds a map by the virtual address of the list of its pieces. Returns `None` if it is not all in the
    /// guest's memory.
    pub fn find(view: &View, list: u64, count: u64, translate: Translate<'_>) -> Option<Self> {
        // A driver without such a map says so.
        let count = if list == 0 { 0 } else { count };
        let list = if count == 0 { 0 } else { translate(list)? };
        let pieces = (0..count.min(PIECES_MAX + 1)).map(|number| {
            let mut bytes = [0; 8];
            read(view, list.checked_add(number * 8)?, &mut bytes)?;
            match u64::from_le_bytes(bytes) {
                0 => Some(None),
                piece => {
                    let phys = translate(piece).filter(|phys| phys.is_multiple_of(PAGE_BYTES))?;
                    pointer(view, phys, PIECE_BYTES).map(|at| Some(Piece(at.cast())))
                }
            }
        });
        let pieces = pieces.collect::<Option<Vec<_>>>().filter(|_| count <= PIECES_MAX)?;
        Some(Self { pieces, _view: view.clone() })
    }

    fn word(&self, page: u64) -> Option<(&AtomicU64, u64)> {
        let piece = self.pieces.get(usize::try_from(page / MAP_BITS as u64).ok()?)?.as_ref()?;
        let bit = page % MAP_BITS as u64;
        Some((piece.word(bit as usize / 64), 1 << (bit % 64)))
    }

    /// Returns true if a page is in the map.
    pub fn has(&self, page: u64) -> bool {
        self.word(page).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Adds the pages of a bitmap that begins at a page. Returns how many are new in the map.
    pub fn add(&self, first: u64, bits: &[u64]) -> u64 {
        let mut added = 0;
        for (number, word) in (0..).zip(bits) {
            let mut left = *word;
            while left != 0 {
                let page = first + number * 64 + u64::from(left.trailing_zeros());
                if let Some((word, bit)) = self.word(page) {
                    added += u64::from(word.fetch_or(bit, Ordering::Relaxed) & bit == 0);
                }
                left &= left - 1;
            }
        }
        added
    }

    /// Moves the pages of the map to another one. Returns how many are new there.
    pub fn drain_into(&self, other: &Self) -> u64 {
        let both = self.pieces.iter().zip(&other.pieces);
        let both = both.filter_map(|(from, to)| Some((from.as_ref()?, to.as_ref()?)));
        let words = both.flat_map(|(from, to)| from.words().zip(to.words()));
        words
            .map(|(from, to)| {
                if from.load(Ordering::Relaxed) == 0 {
                    return 0;
                }
                let bits = from.swap(0, Ordering::Relaxed);
                u64::from((bits & !to.fetch_or(bits, Ordering::Relaxed)).count_ones())
            })
            .sum()
    }
}
