//! Pages that were free at the instant. Their content does not matter: the reader gets zeros, and a write
//! needs no copy.

use crate::address::{GuestPhys, PAGE_SIZE, PageSize};
use mercury_abi::snapshot::MAP_BITS;

const WORDS: usize = MAP_BITS / 64;

/// A piece of the map: a bit for each page of a stretch of addresses.
pub type Piece = [u64; WORDS];

/// A bit for each page that was free, by address, in pieces. A piece without any bit may be missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct FreeMap<'a>(pub &'a [Option<&'a Piece>]);

impl FreeMap<'_> {
    /// Returns the words of the map that belong to a block. A page has a part of one.
    fn words(&self, block: GuestPhys, count: usize) -> Option<&[u64]> {
        let number = usize::try_from(block.as_u64() / PAGE_SIZE).ok()?;
        let piece = (*self.0.get(number / MAP_BITS)?)?;
        let first = number % MAP_BITS / 64;
        piece.get(first..first + count)
    }

    /// Returns true if all of a block was free. Returns false for one larger than 2 MiB, whose parts are
    /// asked instead.
    #[must_use]
    pub fn has(&self, block: GuestPhys, size: PageSize) -> bool {
        match size {
            PageSize::Size4K => {
                let bit = block.as_u64() / PAGE_SIZE % 64;
                self.words(block, 1).is_some_and(|words| words[0] >> bit & 1 != 0)
            }
            PageSize::Size2M => {
                self.words(block, 8).is_some_and(|words| words.iter().all(|word| *word == u64::MAX))
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_free_if_all_of_them_is() {
        let mut piece = [0; WORDS];
        piece[..8].fill(u64::MAX);
        piece[8] = 1 << 3;
        let pieces = [None, Some(&piece)];
        let map = FreeMap(&pieces);
        let start = (MAP_BITS as u64) * PAGE_SIZE;
        let has = |offset: u64, size| map.has(GuestPhys::new(start + offset), size);
        assert!(has(0, PageSize::Size4K) && has(0x1F_F000, PageSize::Size4K) && has(0, PageSize::Size2M));
        assert!(!has(0x20_0000, PageSize::Size4K) && has(0x20_3000, PageSize::Size4K));
        assert!(!has(0x20_0000, PageSize::Size2M) && !has(0, PageSize::Size1G));
        assert!(!map.has(GuestPhys::new(0), PageSize::Size4K));
        assert!(!map.has(GuestPhys::new(1 << 50), PageSize::Size4K));
    }
}
