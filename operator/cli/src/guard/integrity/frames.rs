//! The physical memory of code and constants, by the kernel's own page tables.

use super::{
    layout::{PAGE, Part},
    memory::{Memory, number},
};
use mercury_abi::gate::MERCURY_INTEGRITY_WRITERS;
use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Error},
};

/// Bits of an entry of a page table.
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;
/// Bytes of a table's half that all processes share.
const HALF: usize = 2048;
/// Words of a process' description that are searched for its page tables.
const WORDS: u64 = 128;
/// Functions that write new code.
const WRITERS: [&str; 11] = [
    "__text_poke",
    "text_poke_memcpy",
    "text_poke_memset",
    "memcpy",
    "__memcpy",
    "memcpy_orig",
    "memcpy_erms",
    "memset",
    "__memset",
    "memset_orig",
    "memset_erms",
];

/// Start and size of a page's virtual address, and its physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    pub phys: u64,
    pub is_writable: bool,
}

/// The kernel's page tables.
#[derive(Debug)]
pub struct PageTables<'a, M> {
    memory: &'a M,
    /// Address of the root table.
    root: u64,
    /// Kernel address of physical address 0.
    direct_map: u64,
    levels: u32,
    /// Tables that were read, by their physical addresses.
    read: HashMap<u64, Vec<u8>>,
}

/// The way in which the kernel changes its own code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Poking {
    /// Physical root of the page tables that are loaded for it.
    pub root: u64,
    /// Start and end of the code that writes.
    pub writers: Vec<(u64, u64)>,
}

impl<'a, M: Memory> PageTables<'a, M> {
    /// Finds the kernel's page tables, of four levels or of five.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel hides its symbols.
    pub fn new(memory: &'a M, symbols: &str, levels: u32) -> io::Result<Self> {
        let root = address_of(symbols, "init_top_pgt")?;
        let direct_map = word(memory, address_of(symbols, "page_offset_base")?)?;
        Ok(Self { memory, root, direct_map, levels, read: HashMap::new() })
    }

    /// Returns the page at an address; none where nothing is mapped.
    ///
    /// # Errors
    ///
    /// Returns an error if a table cannot be read.
    pub fn page(&mut self, address: u64) -> io::Result<Option<Page>> {
        let mut shift = 12 + 9 * (self.levels - 1);
        let mut entry = word(self.memory, self.root + 8 * (address >> shift & 511))?;
        let mut is_writable = true;
        loop {
            if entry & PRESENT == 0 {
                return Ok(None);
            }
            is_writable &= entry & WRITABLE != 0;
            if shift == 12 || shift <= 30 && entry & LARGE != 0 {
                let inside = (1 << shift) - 1;
                let phys = entry & ADDRESS & !inside | address & inside & !(PAGE - 1);
                return Ok(Some(Page { phys, is_writable }));
            }
            shift -= 9;
            entry = self.entry(entry & ADDRESS, address >> shift & 511)?;
        }
    }

    fn entry(&mut self, table: u64, index: u64) -> io::Result<u64> {
        if !self.read.contains_key(&table) {
            let mut bytes = vec![0; PAGE as usize];
            self.memory.read(self.direct_map + table, &mut bytes)?;
            self.read.insert(table, bytes);
        }
        Ok(number(&self.read[&table], usize::try_from(8 * index).map_err(Error::other)?))
    }

    /// Returns physical pages of parts that the kernel maps read-only, with their addresses and parts.
    ///
    /// # Errors
    ///
    /// Returns an error if a table cannot be read.
    pub fn frames<'b>(
        &mut self,
        parts: impl Iterator<Item = &'b Part>,
    ) -> io::Result<BTreeMap<u64, (u64, String)>> {
        let mut frames = BTreeMap::new();
        for part in parts {
            for range in &part.ranges {
                let pages = (range.start & !(PAGE - 1)..range.end).step_by(PAGE as usize);
                for address in pages {
                    if let Some(page) = self.page(address)?.filter(|page| !page.is_writable) {
                        frames.insert(page.phys, (address, part.name.clone()));
                    }
                }
            }
        }
        Ok(frames)
    }

    /// Finds out how the kernel changes its own code.
    ///
    /// # Errors
    ///
    /// Returns an error if it does so in an unknown way.
    pub fn poking(&mut self, symbols: &str) -> io::Result<Poking> {
        let process = word(self.memory, address_of(symbols, "poking_mm")?)?;
        let half = |address| {
            let mut bytes = vec![0; HALF];
            self.memory.read(address, &mut bytes).map(|()| bytes)
        };
        let kernel = half(self.root + HALF as u64)?;
        let mut found = None;
        for at in 0..WORDS {
            let table = word(self.memory, process + 8 * at)?;
            let is_table = table >= self.direct_map && table.is_multiple_of(PAGE);
            // What the kernel has added later may be missing in it.
            let shares = |bytes: Vec<u8>| bytes[HALF - 8..] == kernel[HALF - 8..];
            if is_table && half(table + HALF as u64).is_ok_and(shares) {
                found = Some(table);
                break;
            }
        }
        let table =
            found.ok_or_else(|| Error::other("the page tables for changes of code were not found"))?;
        let page = self.page(table)?.ok_or_else(|| Error::other("page tables that are not mapped"))?;
        Ok(Poking { root: page.phys, writers: writers(symbols)? })
    }
}

/// Returns start and end of the code that writes new code.
fn writers(symbols: &str) -> io::Result<Vec<(u64, u64)>> {
    let found = functions(symbols, &WRITERS);
    if found.len() <= MERCURY_INTEGRITY_WRITERS {
        return Ok(found);
    }
    let names: Vec<_> = own(symbols).map(|(_, name)| name).filter(|name| WRITERS.contains(name)).collect();
    Err(Error::other(format!(
        "the kernel changes its code from {} places, and the hypervisor knows {MERCURY_INTEGRITY_WRITERS} at \
         most: {}",
        found.len(),
        names.join(", ")
    )))
}

fn word(memory: &impl Memory, address: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    memory.read(address, &mut bytes).map(|()| u64::from_le_bytes(bytes))
}

/// Returns the address and the name of each of the kernel's own symbols.
fn own(symbols: &str) -> impl Iterator<Item = (u64, &str)> {
    symbols.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (address, _, name, None) = (words.next()?, words.next()?, words.next()?, words.next()) else {
            return None;
        };
        Some((u64::from_str_radix(address, 16).ok().filter(|address| *address != 0)?, name))
    })
}

fn address_of(symbols: &str, name: &str) -> io::Result<u64> {
    let found = own(symbols).find(|(_, known)| *known == name);
    found.map(|(address, _)| address).ok_or_else(|| Error::other(format!("the kernel hides {name}")))
}

/// Returns start and end of functions. Neighbours are one.
fn functions(symbols: &str, names: &[&str]) -> Vec<(u64, u64)> {
    let mut starts: Vec<_> =
        own(symbols).filter(|(_, name)| names.contains(name)).map(|(address, _)| address).collect();
    starts.sort_unstable();
    starts.dedup();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for start in starts {
        // Padding before a function (Linux 6.12) is never executed. It counts as the end of the one before.
        let others = own(symbols).filter(|(address, name)| *address > start && !name.starts_with("__pfx_"));
        let end = others.map(|(address, _)| address).min().unwrap_or(start + 1);
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => ranges.push((start, end)),
        }
    }
    ranges
}

/// Returns runs of neighbouring frames: the first and the number of each. No run crosses a block of 2 MiB.
pub fn runs(frames: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
    const BLOCK: u64 = 2 << 20;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for frame in frames {
        match runs.last_mut() {
            Some((start, count)) if *start + *count * PAGE == frame && frame % BLOCK != 0 => *count += 1,
            _ => runs.push((frame, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::{super::layout::Range, *};

    const DIRECT: u64 = 0xFFFF_8880_0000_0000;
    const TEXT: u64 = 0xFFFF_FFFF_8100_0000;
    const MODULE: u64 = 0xFFFF_FFFF_C000_0000;

    /// Physical memory, at the direct map's addresses.
    struct Machine(Vec<u8>);

    impl Memory for Machine {
        fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
            let at = address.checked_sub(DIRECT).and_then(|at| usize::try_from(at).ok());
            let bytes = at.and_then(|at| self.0.get(at..at + to.len()));
            to.copy_from_slice(bytes.ok_or_else(|| Error::other("no memory"))?);
            Ok(())
        }
    }

    /// Text in a page of 2 MiB, a module in two of 4 KiB, and a process with page tables of its own.
    fn machine() -> (Machine, String) {
        let mut memory = vec![0; 0x1_0000];
        let mut put = |at: usize, word: u64| memory[at..at + 8].copy_from_slice(&word.to_le_bytes());
        let index = |address: u64, shift: u32| 8 * (address >> shift & 511) as usize;
        for root in [0x1000, 0x8000] {
            put(root + index(TEXT, 39), 0x2000 | 3);
            put(root + index(DIRECT, 39), 0x7000 | 3);
        }
        put(0x2000 + index(TEXT, 30), 0x3000 | 3);
        put(0x3000 + index(TEXT, 21), 0x2000_0000 | 0x81);
        put(0x2000 + index(MODULE, 30), 0x4000 | 3);
        put(0x4000 + index(MODULE, 21), 0x5000 | 3);
        put(0x5000 + index(MODULE, 12), 0x1234_5000 | 1);
        put(0x5000 + index(MODULE, 12) + 8, 0x1234_6000 | 3);
        put(0x7000 + index(DIRECT, 30), 0x83);
        put(0x6000, DIRECT);
        put(0x6008, DIRECT + 0x9000);
        // The process: a page that is none of tables, and the tables.
        put(0x9010, DIRECT + 0x3000);
        put(0x9018, DIRECT + 0x8000);
        let at = |offset: u64| DIRECT + offset;
        let symbols = format!(
            "{:x} D init_top_pgt\n{:x} D page_offset_base\n{:x} d poking_mm\n\
             {TEXT:x} t __text_poke\n{:x} t other\n{:x} T memcpy\n{:x} t memcpy_orig\n{:x} t end\n",
            at(0x1000),
            at(0x6000),
            at(0x6008),
            TEXT + 0x80,
            TEXT + 0x100,
            TEXT + 0x120,
            TEXT + 0x200,
        );
        (Machine(memory), symbols)
    }

    /// The hypervisor has room for four ranges.
    #[test]
    fn functions_with_padding_between_them_are_one_range() {
        let symbols = "1000 T __pfx_memcpy\n1010 T memcpy\n1010 T __memcpy\n1040 t __pfx_memcpy_orig\n\
            1050 t memcpy_orig\n1180 T __pfx_other\n1190 T other\n2010 t __text_poke\n2100 t next\n";
        assert_eq!(functions(symbols, &WRITERS), [(0x1010, 0x1190), (0x2010, 0x2100)]);
    }

    #[test]
    fn a_fifth_range_is_refused_by_name() {
        let line = |number: usize, name: &str| {
            format!("{:x}000 t {name}\n{:x}100 t other\n", number + 1, number + 1)
        };
        let symbols = |count: usize| -> String {
            WRITERS[..count].iter().enumerate().map(|(number, name)| line(number, name)).collect()
        };
        assert_eq!(writers(&symbols(4)).expect("room").len(), 4);
        let refused = writers(&symbols(5)).expect_err("no room").to_string();
        assert!(refused.contains("from 5 places") && refused.contains("text_poke_memset, memcpy, __memcpy"));
    }

    #[test]
    fn pages_are_found_by_the_kernels_tables() {
        let (memory, symbols) = machine();
        let mut tables = PageTables::new(&memory, &symbols, 4).expect("tables");
        let page = |phys, is_writable| Some(Page { phys, is_writable });
        assert_eq!(tables.page(TEXT + 0x1F_F123).expect("a page"), page(0x201F_F000, false));
        assert_eq!(tables.page(MODULE + 0x1008).expect("a page"), page(0x1234_6000, true));
        assert_eq!(tables.page(MODULE + 0x2000).expect("no page"), None);
        let range = Range { start: MODULE + 0x10, end: MODULE + 0x1800, is_code: true };
        let part = Part { name: "some@7".into(), ranges: vec![range], jumps: (0, 0), calls: (0, 0) };
        let frames = tables.frames([&part].into_iter()).expect("frames");
        assert_eq!(frames, BTreeMap::from([(0x1234_5000, (MODULE, "some@7".to_owned()))]), "read-only alone");
    }

    #[test]
    fn the_kernels_way_to_change_code() {
        let (memory, symbols) = machine();
        let poking = PageTables::new(&memory, &symbols, 4).expect("tables").poking(&symbols);
        let writers = vec![(TEXT, TEXT + 0x80), (TEXT + 0x100, TEXT + 0x200)];
        assert_eq!(poking.expect("a way"), Poking { root: 0x8000, writers });
        let hidden = symbols.replace("poking_mm", "poking");
        let mut tables = PageTables::new(&memory, &symbols, 4).expect("tables");
        assert!(tables.poking(&hidden).expect_err("hidden").to_string().contains("poking_mm"));
    }

    #[test]
    fn runs_end_with_their_block() {
        assert_eq!(runs([].into_iter()), []);
        let frames = [0x1F_E000, 0x1F_F000, 0x20_0000, 0x20_1000, 0x20_3000];
        assert_eq!(runs(frames.into_iter()), [(0x1F_E000, 2), (0x20_0000, 2), (0x20_3000, 1)]);
    }
}
