//! The firmware's memory: what a kernel may read of it where the machine goes on with other firmware.
//!
//! The kernel reads ACPI's tables all the time, because its interpreter runs out of them. Beside them lie
//! data that the firmware left for it: ACPI's non-volatile storage, the first page, the extended BIOS data
//! area, and the BIOS itself. Memory that the kernel uses as its own is in the image anyway.

use mercury_control::sysroot::Sysroot;
use mercury_image::{FirmwareMemory, FirmwareRange, PAGE};
use std::{collections::BTreeMap, ops::Range};

const PAGE_BYTES: u64 = PAGE as u64;
/// Memory of each PC's firmware: interrupt vectors and the BIOS's data, option ROMs, and the BIOS.
const LEGACY: [Range<u64>; 2] = [0..PAGE_BYTES, 0xC_0000..0x10_0000];
/// Place of the segment of the extended BIOS data area, and the addresses that it can have.
const EXTENDED_AT: u64 = 0x40E;
const EXTENDED: Range<u64> = 0x8_0000..0xA_0000;
/// Place of ACPI's root pointer if the firmware is a BIOS, besides the first KiB of the extended data area.
const ROOT_IN_BIOS: Range<u64> = 0xE_0000..0x10_0000;
/// Place of ACPI's root pointer in the kernel's boot parameters.
const ROOT_AT: usize = 0x70;
/// Kinds of ranges that ACPI has for itself, as the kernel names them.
const ACPI_KINDS: [&str; 2] = ["ACPI Tables", "ACPI Non-volatile Storage"];
/// Largest size of a reserved range that is read whole because it has a table in it.
const RESERVED_MOST: u64 = 1 << 20;
const HEADER: u64 = 36;

/// Returns a page of the firmware's memory; `None` if the page is none.
pub type ReadPage<'a> = &'a dyn Fn(u64) -> Result<Option<Vec<u8>>, String>;

/// Reads everything that a kernel may read.
///
/// # Errors
///
/// Names what is missing.
pub fn read(
    map: &[FirmwareRange],
    sysroot: &Sysroot,
    read: ReadPage<'_>,
) -> Result<Vec<FirmwareMemory>, String> {
    let mut memory = Memory { map, read, pages: BTreeMap::new() };
    LEGACY.into_iter().try_for_each(|range| memory.take(range))?;
    if let Some(extended) = memory.extended()? {
        memory.take(extended)?;
    }
    for range in map.iter().filter(|range| ACPI_KINDS.contains(&range.kind.as_str())) {
        memory.take(whole(range))?;
    }
    let root = match root_of(sysroot) {
        Some(root) => root,
        None => memory.search_root()?.ok_or("ACPI's root pointer was not found")?,
    };
    memory.tables(root)?;
    memory.ranges()
}

/// Asks the kernel for ACPI's root pointer. It knows it if the firmware is UEFI, or the boot loader told it.
fn root_of(sysroot: &Sysroot) -> Option<u64> {
    let systab = sysroot.text("sys/firmware/efi/systab").unwrap_or_default();
    let entry = |name: &str| systab.lines().find_map(|line| line.strip_prefix(name));
    let efi = entry("ACPI20=0x").or_else(|| entry("ACPI=0x"));
    if let Some(root) = efi.and_then(|digits| u64::from_str_radix(digits, 16).ok()) {
        return Some(root);
    }
    let parameters = sysroot.bytes("sys/kernel/boot_params/data")?;
    let root = word(&parameters, ROOT_AT, 8)?;
    (root != 0).then_some(root)
}

/// Returns the pages of a range.
fn whole(range: &FirmwareRange) -> Range<u64> {
    pages(range.start_phys..range.last_phys.saturating_add(1))
}

fn pages(range: Range<u64>) -> Range<u64> {
    range.start / PAGE_BYTES * PAGE_BYTES..range.end.div_ceil(PAGE_BYTES).saturating_mul(PAGE_BYTES)
}

/// Reads a number of up to 8 bytes.
fn word(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..length].copy_from_slice(bytes.get(at..at + length)?);
    Some(u64::from_le_bytes(word))
}

/// The firmware's memory as far as it has been read.
struct Memory<'a> {
    map: &'a [FirmwareRange],
    read: ReadPage<'a>,
    /// By address. `None`: it is the kernel's.
    pages: BTreeMap<u64, Option<Vec<u8>>>,
}

impl Memory<'_> {
    /// Reads the pages of a range.
    fn take(&mut self, range: Range<u64>) -> Result<(), String> {
        if range.end.saturating_sub(range.start) > FirmwareMemory::LENGTH_MAX {
            let mib = FirmwareMemory::LENGTH_MAX >> 20;
            return Err(format!("the firmware's memory at {:#x} is larger than {mib} MiB", range.start));
        }
        pages(range).step_by(PAGE).try_for_each(|page| self.page(page).map(drop))
    }

    fn page(&mut self, phys: u64) -> Result<Option<&[u8]>, String> {
        if !self.pages.contains_key(&phys) {
            let page = (self.read)(phys).map_err(|why| format!("memory at {phys:#x}: {why}"))?;
            self.pages.insert(phys, page);
        }
        Ok(self.pages[&phys].as_deref())
    }

    /// Returns bytes of a table. ACPI's tables are never in the kernel's own memory.
    fn bytes(&mut self, phys: u64, length: u64) -> Result<Vec<u8>, String> {
        let end = phys.checked_add(length).ok_or_else(|| format!("no table can be at {phys:#x}"))?;
        self.take(phys..end)?;
        let mut bytes = Vec::new();
        for page in pages(phys..end).step_by(PAGE) {
            let content = self.page(page)?;
            let content =
                content.ok_or_else(|| format!("ACPI's table at {phys:#x} is not the firmware's"))?;
            bytes.extend_from_slice(content);
        }
        let skipped = (phys % PAGE_BYTES) as usize;
        Ok(bytes[skipped..skipped + length as usize].to_vec())
    }

    /// Returns the extended BIOS data area.
    fn extended(&mut self) -> Result<Option<Range<u64>>, String> {
        let first = self.page(0)?.unwrap_or_default();
        let start = word(first, EXTENDED_AT as usize, 2).unwrap_or(0) << 4;
        Ok(EXTENDED.contains(&start).then_some(start..EXTENDED.end))
    }

    /// Searches ACPI's root pointer as the standard tells for a BIOS.
    fn search_root(&mut self) -> Result<Option<u64>, String> {
        let extended = self.extended()?.map(|range| range.start..range.start + 1024);
        for range in extended.into_iter().chain([ROOT_IN_BIOS]) {
            for phys in range.step_by(16) {
                let page = self.page(phys / PAGE_BYTES * PAGE_BYTES)?.unwrap_or_default();
                let at = (phys % PAGE_BYTES) as usize;
                // 20 bytes are summed up: a pointer at the end of a page would lie in two.
                if page.get(at..at + 20).is_some_and(is_root) {
                    return Ok(Some(phys));
                }
            }
        }
        Ok(None)
    }

    /// Reads the tables below a root pointer, and reserved ranges that hold them.
    fn tables(&mut self, root: u64) -> Result<(), String> {
        let pointer = self.bytes(root, HEADER)?;
        let address = |at, length| word(&pointer, at, length).filter(|address| *address != 0);
        let (old, new) = (address(16, 4), address(24, 8).filter(|_| pointer[15] >= 2));
        if old.or(new).is_none() {
            return Err(format!("ACPI's root pointer at {root:#x} names no table"));
        }
        for (list, size) in [(old, 4), (new, 8)] {
            let Some(list) = list else { continue };
            let content = self.table(list)?;
            for entry in content.get(HEADER as usize..).unwrap_or_default().chunks_exact(size) {
                let table = word(entry, 0, size).unwrap_or(0);
                if table != 0 {
                    self.table_and_below(table)?;
                }
            }
        }
        Ok(())
    }

    /// Reads a table, and those to which the fixed table (FADT) leads.
    fn table_and_below(&mut self, phys: u64) -> Result<(), String> {
        let table = self.table(phys)?;
        if !table.starts_with(b"FACP") {
            return Ok(());
        }
        let below = [(36, 4), (40, 4), (132, 8), (140, 8)];
        let below = below.into_iter().filter_map(|(at, length)| word(&table, at, length));
        below.filter(|phys| *phys != 0).try_for_each(|phys| self.table(phys).map(drop))
    }

    /// Reads a table, with all of the reserved range that holds it if that is small.
    fn table(&mut self, phys: u64) -> Result<Vec<u8>, String> {
        let header = self.bytes(phys, 8)?;
        let length = word(&header, 4, 4).unwrap_or(0);
        let holds = |range: &&FirmwareRange| {
            let whole = whole(range);
            range.kind == "Reserved" && whole.contains(&phys) && whole.end - whole.start <= RESERVED_MOST
        };
        if let Some(range) = self.map.iter().find(holds) {
            self.take(whole(range))?;
        }
        self.bytes(phys, length)
    }

    /// Returns what was read, in ranges.
    fn ranges(self) -> Result<Vec<FirmwareMemory>, String> {
        let mut ranges: Vec<(u64, Vec<u8>)> = Vec::new();
        for (phys, page) in self.pages {
            let Some(page) = page else { continue };
            match ranges.last_mut() {
                Some((start, content))
                    if *start + content.len() as u64 == phys
                        && (content.len() as u64) < FirmwareMemory::LENGTH_MAX =>
                {
                    content.extend(page);
                }
                _ => ranges.push((phys, page)),
            }
        }
        let pack = |(start, content): (u64, Vec<u8>)| FirmwareMemory::new(start, &content);
        ranges.into_iter().map(pack).collect::<Result<_, _>>().map_err(|error| error.to_string())
    }
}

/// Returns true for 20 bytes of a root pointer.
fn is_root(bytes: &[u8]) -> bool {
    bytes.starts_with(b"RSD PTR ") && bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of a made-up machine: its content by page.
    #[derive(Default)]
    struct Made(BTreeMap<u64, Vec<u8>>);

    impl Made {
        fn put(&mut self, phys: u64, bytes: &[u8]) {
            for (at, byte) in (phys..).zip(bytes) {
                let page = self.0.entry(at / PAGE_BYTES * PAGE_BYTES).or_insert_with(|| vec![0; PAGE]);
                page[(at % PAGE_BYTES) as usize] = *byte;
            }
        }

        fn table(&mut self, phys: u64, name: &[u8; 4], rest: &[u8]) {
            let length = HEADER as u32 + rest.len() as u32;
            let mut bytes = [&name[..], &length.to_le_bytes(), &[0; 28]].concat();
            bytes.extend(rest);
            self.put(phys, &bytes);
        }

        fn root(&mut self, phys: u64, old: u32, new: u64) {
            let mut bytes = [&b"RSD PTR \0made--\x02"[..], &old.to_le_bytes(), &[36, 0, 0, 0]].concat();
            bytes.extend(new.to_le_bytes());
            bytes.extend([0; 4]);
            let sum = bytes[..20].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
            bytes[8] = sum.wrapping_neg();
            self.put(phys, &bytes);
        }

        fn read(&self, map: &[FirmwareRange]) -> Result<Vec<(u64, Vec<u8>)>, String> {
            let root = tempfile::tempdir().expect("a folder");
            self.read_with(map, &Sysroot::at(root.path()))
        }

        fn read_with(&self, map: &[FirmwareRange], sysroot: &Sysroot) -> Result<Vec<(u64, Vec<u8>)>, String> {
            let page = |phys| Ok(self.0.get(&phys).cloned());
            let content = |memory: FirmwareMemory| (memory.start_phys, memory.content().expect("unpacked"));
            Ok(read(map, sysroot, &page)?.into_iter().map(content).collect())
        }
    }

    fn range(start_phys: u64, end: u64, kind: &str) -> FirmwareRange {
        FirmwareRange { start_phys, last_phys: end - 1, kind: kind.into() }
    }

    /// A PC whose tables lie at the end of memory, as SeaBIOS makes them.
    fn pc() -> Made {
        let mut made = Made::default();
        made.put(EXTENDED_AT, &0x9FC0_u16.to_le_bytes());
        made.put(0x9_F000, &[1; 0x1000]);
        made.put(0xC_0000, &[2; 0x4_0000]);
        made.root(0xF_5AC0, 0x7FE_1000, 0);
        made.table(
            0x7FE_1000,
            b"RSDT",
            &[0x7FE_2000_u32.to_le_bytes(), 0x7FE_3FF0_u32.to_le_bytes()].concat(),
        );
        let mut fixed = vec![0; 240];
        fixed[0..4].copy_from_slice(&0x7FE_0000_u32.to_le_bytes());
        fixed[4..8].copy_from_slice(&0x7FE_6000_u32.to_le_bytes());
        made.table(0x7FE_2000, b"FACP", &fixed);
        made.table(0x7FE_0000, b"FACS", &[0; 28]);
        made.table(0x7FE_3FF0, b"APIC", &[3; 100]);
        made.table(0x7FE_6000, b"DSDT", &[4; 0x1800]);
        made
    }

    #[test]
    fn tables_and_legacy_areas_are_read() {
        let found = pc().read(&[range(0, 0x9_FC00, "System RAM")]).expect("all of it");
        let lengths: Vec<_> = found.iter().map(|(start, content)| (*start, content.len())).collect();
        let page = PAGE;
        assert_eq!(
            lengths,
            [
                (0, page),
                (0x9_F000, page),
                (0xC_0000, 64 * page),
                (0x7FE_0000, 5 * page),
                (0x7FE_6000, 2 * page)
            ]
        );
        assert_eq!(found[4].1[HEADER as usize..][..0x1800], [4; 0x1800]);
    }

    /// A kernel also uses what lies beside the tables, such as the room for error records.
    #[test]
    fn a_small_reserved_range_around_tables_is_read_whole() {
        let mut made = pc();
        made.put(0x7FE_9000, &[5; 1]);
        made.put(0x7FE_F000, &[6; 1]);
        let reserved = range(0x7FE_0000, 0x7FF_0000, "Reserved");
        let starts =
            |found: Vec<(u64, Vec<u8>)>| found.into_iter().map(|(start, _)| start).collect::<Vec<_>>();
        let found = starts(made.read(&[reserved]).expect("all of it"));
        assert_eq!(found[3..], [0x7FE_0000, 0x7FE_6000, 0x7FE_9000, 0x7FE_F000]);
        let large = range(0x700_0000, 0x800_0000, "Reserved");
        let found = starts(made.read(&[large]).expect("all of it"));
        assert_eq!(found[3..], [0x7FE_0000, 0x7FE_6000], "the tables alone");
    }

    #[test]
    fn acpi_s_own_ranges_are_read_whole() {
        let mut made = pc();
        made.put(0x600_0000, &[7; 0x3000]);
        let found =
            made.read(&[range(0x600_0000, 0x600_2800, "ACPI Non-volatile Storage")]).expect("all of it");
        assert_eq!(found[3], (0x600_0000, vec![7; 0x3000]));
        let error = made.read(&[range(0x600_0000, 0x800_0000, "ACPI Tables")]).expect_err("32 MiB");
        assert!(error.contains("0x6000000 is larger than 16 MiB"), "{error}");
    }

    #[test]
    fn uefi_and_boot_loaders_name_the_root() {
        let mut made = pc();
        made.put(0xF_5AC0, &[0; 36]);
        assert_eq!(made.read(&[]).expect_err("no root"), "ACPI's root pointer was not found");
        made.root(0x7FE_1800, 0, 0x7FE_1900);
        made.table(0x7FE_1900, b"XSDT", &0x7FE_6000_u64.to_le_bytes());
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        let file = |path: &str, bytes: &[u8]| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, bytes).expect("a file");
        };
        let mut parameters = vec![0; 4096];
        file("sys/kernel/boot_params/data", &parameters);
        assert!(made.read_with(&[], &sysroot).is_err(), "a boot loader that does not know it");
        parameters[ROOT_AT..ROOT_AT + 4].copy_from_slice(&0x7FE_1800_u32.to_le_bytes());
        file("sys/kernel/boot_params/data", &parameters);
        assert_eq!(made.read_with(&[], &sysroot).expect("all of it")[4].0, 0x7FE_6000);
        file("sys/firmware/efi/systab", b"SMBIOS=0x1\nACPI20=0x7fe6000\nACPI=0x1\n");
        let error = made.read_with(&[], &sysroot).expect_err("the root is a DSDT here");
        assert!(error.contains("0x"), "{error}");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let made = pc();
        let root = tempfile::tempdir().expect("a folder");
        let page = |phys| match phys {
            0x7FE_6000 => Err("the kernel is locked down".to_owned()),
            0x7FE_3000 => Ok(None),
            _ => Ok(made.0.get(&phys).cloned()),
        };
        let error = read(&[], &Sysroot::at(root.path()), &page).expect_err("one page");
        assert_eq!(error, "memory at 0x7fe6000: the kernel is locked down");
        let page = |phys| Ok(made.0.get(&phys).cloned().filter(|_| phys != 0x7FE_3000));
        let error = read(&[], &Sysroot::at(root.path()), &page).expect_err("one page");
        assert_eq!(error, "ACPI's table at 0x7fe3ff0 is not the firmware's");
    }

    #[test]
    fn mad_tables_end_the_search() {
        let mut made = pc();
        made.put(0x7FE_6004, &u32::MAX.to_le_bytes());
        assert!(made.read(&[]).expect_err("4 GiB").contains("larger than 16 MiB"));
        let mut made = pc();
        made.root(0xF_5AC0, 0, 0);
        assert!(made.read(&[]).expect_err("nothing").contains("names no table"));
        let mut made = pc();
        made.root(0xF_5AC0, 0, u64::MAX - 3);
        assert!(made.read(&[]).expect_err("the end").contains("no table can be at"));
    }
}
