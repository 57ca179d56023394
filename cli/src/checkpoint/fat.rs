//! What changes on a FAT file system with whatever is written to it. It has no journal, and notes nothing when a file is
//! written over in place but the time, in its folder; so that is everything that is in use: tables, folders and files.
//! Such file systems are small where machines are checkpointed: the firmware's own.
//!
//! Microsoft's "FAT: General Overview of On-Disk Format", 1.03.

use std::{io, ops::Range};

/// Bytes of files and folders that are read while applications stand still; a file system with more has no mark.
const MOST: u64 = 256 << 20;
/// Bytes of an entry in a folder.
const ENTRY: u64 = 32;
/// Data clusters below which an entry of the table has 12 bits, and 16.
const SMALL: [u64; 2] = [4085, 65525];

/// Where things are on the device, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The first of the tables, which are each other's copies.
    table: Range<u64>,
    /// All of them, with the root folder that FAT12 and FAT16 have behind them.
    tables: Range<u64>,
    /// Where cluster 2 begins, and where there are no more.
    data: Range<u64>,
    cluster: u64,
}

impl Layout {
    /// From the first sector.
    pub(super) fn new(first: &[u8]) -> Option<Self> {
        let word = |at: usize, bytes: usize| {
            let bytes = first.get(at..at + bytes)?;
            Some(bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte)))
        };
        // Where a field of two bytes is too small, there is another one of four.
        let wide = |small: usize, large: usize| match word(small, 2)? {
            0 => word(large, 4),
            length => Some(length),
        };
        let (sector, cluster) = (word(11, 2)?, word(13, 1)?);
        let (reserved, tables, entries) = (word(14, 2)?, word(16, 1)?, word(17, 2)?);
        let (length, total) = (wide(22, 36)?, wide(19, 32)?);
        if sector == 0 || cluster == 0 || tables == 0 || length == 0 {
            return None;
        }
        let start = reserved * sector;
        let behind = start + tables * length * sector;
        let data = behind + (entries * ENTRY).next_multiple_of(sector);
        let clusters = (total * sector).checked_sub(data)? / (cluster * sector);
        Some(Self {
            table: start..start + length * sector,
            tables: start..data,
            data: data..data + clusters * cluster * sector,
            cluster: cluster * sector,
        })
    }

    /// What changes, in order; `table` gives bytes of the device.
    ///
    /// # Errors
    /// If it cannot be read, or is too much.
    pub(super) fn changing(
        &self,
        read: impl FnOnce(Range<u64>) -> io::Result<Vec<u8>>,
    ) -> io::Result<Vec<Range<u64>>> {
        let mut ranges = vec![self.tables.clone()];
        let table = read(self.table.clone())?;
        let clusters = (self.data.end - self.data.start) / self.cluster;
        let mut used = 0;
        for number in 0..clusters {
            if !is_used(&table, clusters, number + 2).ok_or(io::ErrorKind::UnexpectedEof)? {
                continue;
            }
            used += self.cluster;
            let start = self.data.start + number * self.cluster;
            match ranges.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end += self.cluster,
                None => ranges.push(start..start + self.cluster),
            }
        }
        if used > MOST {
            return Err(io::Error::other(format!(
                "it holds more than {} MiB, which a FAT file system may change without a trace",
                MOST >> 20
            )));
        }
        Ok(ranges)
    }
}

/// Whether a cluster is anybody's; `None` if the table ends before it.
fn is_used(table: &[u8], clusters: u64, number: u64) -> Option<bool> {
    let number = usize::try_from(number).ok()?;
    let bytes = |at: usize, count: usize| table.get(at..at + count);
    if clusters < SMALL[0] {
        let pair = bytes(number + number / 2, 2)?;
        let pair = u16::from_le_bytes([pair[0], pair[1]]);
        let entry = if number % 2 == 0 { pair & 0xFFF } else { pair >> 4 };
        return Some(entry != 0);
    }
    if clusters < SMALL[1] {
        return Some(bytes(number * 2, 2)? != [0, 0]);
    }
    let entry = bytes(number * 4, 4)?;
    // The four highest bits are nobody's.
    Some(entry[..3] != [0, 0, 0] || entry[3] & 0xF != 0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The first sector of one: its type's name, sectors in all, of each table and of a cluster, entries of its root folder.
    pub(crate) fn first_sector(
        kind: &[u8; 8],
        total: u32,
        table: u16,
        cluster: u8,
        root_entries: u16,
    ) -> Vec<u8> {
        let mut sector = vec![0; 512];
        let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
        // 512 bytes a sector, 40 of them reserved, two tables.
        put(11, &512_u16.to_le_bytes());
        put(13, &[cluster]);
        put(14, &40_u16.to_le_bytes());
        put(16, &[2]);
        put(17, &root_entries.to_le_bytes());
        put(32, &total.to_le_bytes());
        if kind.starts_with(b"FAT32") {
            put(36, &u32::from(table).to_le_bytes());
            put(0x43, &[1, 2, 3, 4]);
            put(0x52, kind);
        } else {
            put(22, &table.to_le_bytes());
            // What FAT32 has there is something else.
            put(36, &[0x80, 0, 0x29]);
            put(0x27, &[0xAB, 0xCD, 0xEF, 0x01]);
            put(0x36, kind);
        }
        sector
    }

    #[test]
    fn layouts_of_each_size_are_known() {
        let wide = Layout::new(&first_sector(b"FAT32   ", 1 << 20, 1000, 8, 0)).expect("known");
        assert_eq!((wide.table, wide.tables.clone()), (20480..532_480, 20480..1_044_480));
        assert_eq!((wide.data.start, wide.cluster), (1_044_480, 4096));
        assert!(wide.data.end <= 1 << 29 && wide.data.end > (1 << 29) - 4096);
        let small = Layout::new(&first_sector(b"FAT12   ", 2880, 9, 1, 224)).expect("known");
        assert_eq!((small.tables, small.data), (20480..36864, 36864..2880 * 512));
        assert_eq!((Layout::new(&[0; 512]), Layout::new(&[1; 30])), (None, None));
        // Tables that do not fit.
        assert_eq!(Layout::new(&first_sector(b"FAT32   ", 100, 1000, 8, 0)), None);
    }

    #[test]
    fn what_is_in_use_changes() {
        // Clusters 2, 3 and 6 are in use; an odd and an even one of 12 bits, and free ones that look used beside them.
        let twelve = vec![0xF0, 0xFF, 0xFF, 0xFF, 0x0F, 0xF0, 0, 0, 0, 0xFF, 0x0F, 0];
        let tables = [
            (b"FAT12   ", 2880, 9, 1, twelve),
            (
                b"FAT16   ",
                30000,
                128,
                1,
                [0xFFF8_u16, 0xFFFF, 0x0100, 1, 0, 0, 0xFFFF].map(u16::to_le_bytes).concat(),
            ),
            (
                b"FAT32   ",
                1 << 20,
                1024,
                8,
                [0x0FFF_FFF8_u32, u32::MAX, 0x0100_0000, 1, 0xF000_0000, 0, 9].map(u32::to_le_bytes).concat(),
            ),
        ];
        for (kind, total, length, cluster, mut table) in tables {
            let layout = Layout::new(&first_sector(kind, total, length, cluster, 0)).expect("known");
            table.resize(usize::from(length) * 512, 0);
            let read = |range: Range<u64>| {
                assert_eq!(range, layout.table);
                Ok(table.clone())
            };
            let (start, size) = (layout.data.start, layout.cluster);
            let six = start + 4 * size;
            let found = layout.changing(read).expect("told");
            assert_eq!(found, [layout.tables.start..start + 2 * size, six..six + size], "{kind:?}");
            // A table that ends early, and one of a file system that is full.
            assert!(layout.changing(|_| Ok(vec![0; 3])).is_err());
        }
        let large = Layout::new(&first_sector(b"FAT32   ", 1 << 20, 1024, 8, 0)).expect("known");
        let error = large.changing(|_| Ok(vec![1; 1 << 20])).expect_err("too much");
        assert!(error.to_string().contains("more than 256 MiB"), "{error}");
    }
}
