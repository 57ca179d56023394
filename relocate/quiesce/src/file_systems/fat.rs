//! The ranges of a FAT file system that change with each write. FAT has no journal. A file that is
//! overwritten in place leaves no trace except the time in its folder. So the ranges are everything
//! in use: tables, folders and files. Such file systems are small on machines that are
//! checkpointed: the firmware's own.
//!
//! systemd-boot writes there at the start of every system, also of the restore environment: the
//! seed of random numbers in `/loader/random-seed`, in place, and its time. These ranges are left
//! out. The kernel's stale copy of them does no harm, because a program that writes the seed in
//! Linux writes all of it.
//!
//! Microsoft's "FAT: General Overview of On-Disk Format", 1.03.

use std::{io, ops::Range};

/// Bytes of files and folders that are read while applications stand still; a file system with more
/// has no fingerprint.
const MOST: u64 = 256 << 20;
/// Size of an entry in a folder.
const ENTRY: u64 = 32;
/// Ranges within an entry: its name, its attributes, the number of its first cluster, and its
/// length.
const NAME: Range<usize> = 0..11;
const ATTRIBUTES: usize = 11;
const CLUSTER_HIGH: Range<usize> = 20..22;
const CLUSTER_LOW: Range<usize> = 26..28;
/// Range from the attributes, which have a bit for each write, up to the end of the times.
const TIMES: Range<u64> = 11..26;
/// Attributes of an entry: of a folder, of a part of a long name.
const IS_FOLDER: u8 = 0x10;
const IS_LONG_NAME: u8 = 0x0F;
/// Names of the seed's folder and file.
const LOADER: &[u8; 11] = b"LOADER     ";
const SEED: &str = "random-seed";
/// Numbers of data clusters below which an entry of the table has 12 bits, and 16.
const SMALL: [u64; 2] = [4085, 65525];

/// Positions of the parts on the device, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    /// The first of the tables, which are copies of each other.
    table: Range<u64>,
    /// All tables, with the root folder that FAT12 and FAT16 have after them.
    tables: Range<u64>,
    /// Range of the clusters, from cluster 2 on.
    data: Range<u64>,
    cluster: u64,
    /// The root folder: on FAT32 its first cluster, on others its range.
    root: Root,
}

#[derive(Debug, PartialEq, Eq)]
enum Root {
    Cluster(u64),
    Fixed(Range<u64>),
}

impl Layout {
    /// Parses the first sector.
    pub fn new(first: &[u8]) -> Option<Self> {
        let word = |at: usize, bytes: usize| {
            let bytes = first.get(at..at + bytes)?;
            Some(bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte)))
        };
        // A second field of four bytes holds numbers that are too large for two.
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
            root: if entries == 0 { Root::Cluster(word(44, 4)?) } else { Root::Fixed(behind..data) },
        })
    }

    fn clusters(&self) -> u64 {
        (self.data.end - self.data.start) / self.cluster
    }

    /// Returns the ranges that change, in order, after the device's beginning; `read` gives bytes
    /// of the device.
    ///
    /// # Errors
    ///
    /// Returns an error if the device cannot be read, or there is too much data.
    pub fn changing(
        &self,
        beginning: Range<u64>,
        read: impl Fn(Range<u64>) -> io::Result<Vec<u8>>,
    ) -> io::Result<Vec<Range<u64>>> {
        let mut ranges = vec![beginning, self.tables.clone()];
        let table = read(self.table.clone())?;
        let clusters = self.clusters();
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
        let seed = self.seed(&table, read)?;
        Ok(without(ranges, &seed))
    }

    /// Returns the ranges that a boot loader writes at each start; empty if there is no such file.
    fn seed(
        &self,
        table: &[u8],
        read: impl Fn(Range<u64>) -> io::Result<Vec<u8>>,
    ) -> io::Result<Vec<Range<u64>>> {
        let root = match &self.root {
            Root::Cluster(first) => self.chain(table, *first),
            Root::Fixed(range) => vec![range.clone()],
        };
        let loader = folder(&root, &read)?.into_iter().find(|entry| entry.is_folder(LOADER));
        let Some(loader) = loader else { return Ok(Vec::new()) };
        let entries = folder(&self.chain(table, loader.cluster()), &read)?;
        let named = entries.windows(2).find(|pair| pair[0].is_whole_name(SEED) && pair[1].is_file());
        let Some([_, seed]) = named else { return Ok(Vec::new()) };
        let times = seed.at + TIMES.start..seed.at + TIMES.end;
        Ok(std::iter::once(times).chain(self.chain(table, seed.cluster())).collect())
    }

    /// Returns the ranges of a file or a folder from its first cluster on.
    fn chain(&self, table: &[u8], first: u64) -> Vec<Range<u64>> {
        let clusters = self.clusters();
        let next = |number: &u64| entry(table, clusters, *number);
        let numbers =
            std::iter::successors(Some(first), next).take_while(|number| (2..clusters + 2).contains(number));
        let place = |number: u64| self.data.start + (number - 2) * self.cluster;
        // The limit ends a chain that contains itself.
        let numbers = numbers.take(usize::try_from(MOST / self.cluster).unwrap_or(usize::MAX));
        numbers.map(|number| place(number)..place(number) + self.cluster).collect()
    }
}

#[derive(Debug)]
struct Entry {
    /// Position on the device.
    at: u64,
    bytes: Vec<u8>,
}

impl Entry {
    fn is_folder(&self, name: &[u8; 11]) -> bool {
        self.bytes[NAME] == name[..] && self.bytes[ATTRIBUTES] & IS_FOLDER != 0
    }

    fn is_file(&self) -> bool {
        self.bytes[ATTRIBUTES] & IS_FOLDER == 0 && self.bytes[ATTRIBUTES] != IS_LONG_NAME
    }

    /// Returns true if the entry is the only part of a long name, and the name is this one.
    fn is_whole_name(&self, name: &str) -> bool {
        const ONLY: u8 = 0x41;
        let parts = [1..11, 14..26, 28..32].map(|part: Range<usize>| &self.bytes[part]).concat();
        let letters = parts.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let found = letters.take_while(|letter| *letter != 0);
        self.bytes[0] == ONLY && self.bytes[ATTRIBUTES] == IS_LONG_NAME && found.eq(name.encode_utf16())
    }

    fn cluster(&self) -> u64 {
        let word = |at: Range<usize>| {
            u64::from(u16::from_le_bytes([self.bytes[at.start], self.bytes[at.start + 1]]))
        };
        word(CLUSTER_HIGH) << 16 | word(CLUSTER_LOW)
    }
}

/// Reads the entries of a folder in these ranges, up to its end.
fn folder(places: &[Range<u64>], read: impl Fn(Range<u64>) -> io::Result<Vec<u8>>) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for place in places {
        let bytes = read(place.clone())?;
        for (at, bytes) in (place.start..).step_by(ENTRY as usize).zip(bytes.chunks_exact(ENTRY as usize)) {
            if bytes[0] == 0 {
                return Ok(entries);
            }
            entries.push(Entry { at, bytes: bytes.to_vec() });
        }
    }
    Ok(entries)
}

/// Removes parts from ranges.
fn without(ranges: Vec<Range<u64>>, parts: &[Range<u64>]) -> Vec<Range<u64>> {
    let cut = |ranges: Vec<Range<u64>>, part: &Range<u64>| -> Vec<Range<u64>> {
        let rest = |range: Range<u64>| {
            [range.start..range.end.min(part.start), range.start.max(part.end)..range.end]
        };
        ranges.into_iter().flat_map(rest).filter(|range| !range.is_empty()).collect()
    };
    parts.iter().fold(ranges, cut)
}

/// Returns true if a cluster is in use; `None` if the table ends before it.
fn is_used(table: &[u8], clusters: u64, number: u64) -> Option<bool> {
    entry(table, clusters, number).map(|entry| entry != 0)
}

/// Returns the table's entry for a cluster; `None` if the table ends before it.
fn entry(table: &[u8], clusters: u64, number: u64) -> Option<u64> {
    let number = usize::try_from(number).ok()?;
    let word = |at: usize, count: usize| {
        let bytes = table.get(at..at + count)?;
        Some(bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte)))
    };
    if clusters < SMALL[0] {
        let pair = word(number + number / 2, 2)?;
        return Some(if number % 2 == 0 { pair & 0xFFF } else { pair >> 4 });
    }
    if clusters < SMALL[1] {
        return word(number * 2, 2);
    }
    // The four highest bits are reserved.
    Some(word(number * 4, 4)? & 0x0FFF_FFFF)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Makes the first sector of a file system: its type's name; the sectors in all, of each table
    /// and of a cluster; entries of its root folder.
    pub fn first_sector(kind: &[u8; 8], total: u32, table: u16, cluster: u8, root_entries: u16) -> Vec<u8> {
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
            // FAT32 has other fields there.
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
    fn clusters_in_use_are_among_the_ranges_that_change() {
        // Clusters 2, 3 and 6 are in use; an odd and an even one of 12 bits, and free ones that
        // look used beside them.
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
            let found = layout.changing(0..512, read).expect("told");
            assert_eq!(found, [0..512, layout.tables.start..start + 2 * size, six..six + size], "{kind:?}");
            // A table that ends early, and one of a file system that is full.
            assert!(layout.changing(0..512, |_| Ok(vec![0; 3])).is_err());
        }
        let large = Layout::new(&first_sector(b"FAT32   ", 1 << 20, 1024, 8, 0)).expect("known");
        let error = large.changing(0..512, |_| Ok(vec![1; 1 << 20])).expect_err("too much");
        assert!(error.to_string().contains("more than 256 MiB"), "{error}");
    }

    /// Makes an entry of a folder, with the part of a long name before it if there is one.
    fn entries(long: &str, short: &[u8; 11], attributes: u8, cluster: u16) -> Vec<u8> {
        let mut part = vec![0xFF; 32];
        (part[0], part[ATTRIBUTES], part[12], part[13]) = (0x41, IS_LONG_NAME, 0, 0);
        part[26..28].fill(0);
        let places = (1..11).chain(14..26).chain(28..32);
        let letters = long.encode_utf16().chain([0]).flat_map(u16::to_le_bytes);
        places.zip(letters).for_each(|(at, byte)| part[at] = byte);
        let mut entry = vec![0xAA; 32];
        entry[NAME].copy_from_slice(short);
        entry[ATTRIBUTES] = attributes;
        entry[CLUSTER_HIGH].fill(0);
        entry[CLUSTER_LOW].copy_from_slice(&cluster.to_le_bytes());
        if long.is_empty() { entry } else { [part, entry].concat() }
    }

    #[test]
    fn the_seed_of_a_boot_loader_is_left_out() {
        let mut first = first_sector(b"FAT32   ", 1 << 20, 1024, 8, 0);
        first[44] = 2;
        let layout = Layout::new(&first).expect("known");
        let (start, size) = (layout.data.start, layout.cluster);
        let end = 0x0FFF_FFFF_u32;
        // The root folder, the loader's in two clusters, another file, and the seed's.
        let table = [0, 0, end, 4, end, end, end].map(u32::to_le_bytes).concat();
        let padding = entries("", b"\xE5OTHER     ", 0x20, 5).repeat(size as usize / 32);
        let place = |number: u64| start + (number - 2) * size;
        let found = |name: &str, attributes: u8| {
            let folders = [
                [entries("vmlinuz", b"VMLINUZ    ", 0x20, 5), entries("loader", LOADER, IS_FOLDER, 3)]
                    .concat(),
                padding.clone(),
                [
                    entries("random-thing", b"RANDOM~2   ", 0x20, 5),
                    entries(name, b"RANDOM~1   ", attributes, 6),
                ]
                .concat(),
            ];
            let read = |range: Range<u64>| {
                let mut bytes = if range == layout.table {
                    table.clone()
                } else {
                    folders[usize::try_from((range.start - start) / size).expect("small")].clone()
                };
                bytes.resize((range.end - range.start) as usize, 0);
                Ok(bytes)
            };
            layout.changing(0..512, read).expect("told")
        };
        let whole = [0..512, layout.tables.start..place(7)];
        let at = place(4) + 3 * ENTRY;
        assert_eq!(
            found(SEED, 0x20),
            [0..512, layout.tables.start..at + 11, at + 26..place(6)],
            "its times and its cluster"
        );
        for (name, attributes) in [("random-sees", 0x20), ("random-seed2", 0x20), (SEED, IS_FOLDER)] {
            assert_eq!(found(name, attributes), whole, "{name}");
        }
    }

    #[test]
    fn parts_are_cut_out() {
        let cut = |parts: &[Range<u64>]| without(vec![0..10, 10..20, 30..40], parts);
        assert_eq!(cut(&[]), [0..10, 10..20, 30..40]);
        assert_eq!(cut(&[5..12, 35..36]), [0..5, 12..20, 30..35, 36..40]);
        assert_eq!(cut(&[10..20, 0..1, 39..50]), [1..10, 30..39]);
    }
}
