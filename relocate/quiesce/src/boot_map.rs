//! The memory map that the boot loader gave to the kernel: Documentation/arch/x86/zero-page.rst.

use mercury_control::sysroot::Sysroot;
use mercury_image::FirmwareRange;

/// Offset of the number of entries in the kernel's boot parameters, and of the entries.
const COUNT_AT: usize = 0x1E8;
const TABLE_AT: usize = 0x2D0;
/// Size of an entry: start and length with 8 bytes each, and 4 bytes for the type.
const ENTRY: usize = 20;
/// Type of `setup_data` that holds further entries (`SETUP_E820_EXT`).
const FURTHER: &str = "0x1";

/// Memory that the boot loader described to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    start_phys: u64,
    bytes: u64,
}

impl Given {
    /// Returns true if the memory has a byte in common with a range of the map that the kernel
    /// shows.
    #[must_use]
    pub fn overlaps(&self, range: &FirmwareRange) -> bool {
        let end = self.start_phys.saturating_add(self.bytes);
        self.start_phys <= range.last_phys && range.start_phys < end
    }
}

/// Returns the map of the running kernel; empty if the kernel does not show its boot parameters.
#[must_use]
pub fn of(sysroot: &Sysroot) -> Vec<Given> {
    let Some(parameters) = sysroot.bytes("sys/kernel/boot_params/data") else { return Vec::new() };
    let count = parameters.get(COUNT_AT).copied().map_or(0, usize::from);
    let mut map: Vec<_> = parameters.get(TABLE_AT..).into_iter().flat_map(entries).take(count).collect();
    for number in sysroot.names("sys/kernel/boot_params/setup_data") {
        let folder = format!("sys/kernel/boot_params/setup_data/{number}");
        if sysroot.text(&format!("{folder}/type")).as_deref() == Some(FURTHER) {
            map.extend(entries(&sysroot.bytes(&format!("{folder}/data")).unwrap_or_default()));
        }
    }
    map
}

fn entries(table: &[u8]) -> Vec<Given> {
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let entry = |entry: &[u8]| Given { start_phys: word(&entry[..8]), bytes: word(&entry[8..16]) };
    table.chunks_exact(ENTRY).map(entry).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::fs;

    /// Makes boot parameters with a map of these starts and lengths.
    pub fn parameters(map: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[COUNT_AT] = u8::try_from(map.len()).expect("a short map");
        bytes.splice(TABLE_AT..TABLE_AT + map.len() * ENTRY, table(map));
        bytes
    }

    fn table(map: &[(u64, u64)]) -> Vec<u8> {
        let entry = |(start, length): &(u64, u64)| {
            [&start.to_le_bytes()[..], &length.to_le_bytes(), &1_u32.to_le_bytes()].concat()
        };
        map.iter().flat_map(entry).collect()
    }

    #[test]
    fn a_map_has_as_many_entries_as_it_says() {
        let root = tempfile::tempdir().expect("a folder");
        let file = |path: &str, bytes: &[u8]| {
            let path = root.path().join("sys/kernel/boot_params").join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, bytes).expect("a file");
        };
        let found = || of(&Sysroot::at(root.path()));
        assert_eq!(found(), []);
        file("data", &parameters(&[(0, 0x9_FC00), (0x10_0000, 0x7FF0_0000)]));
        let given = |start_phys, bytes| Given { start_phys, bytes };
        assert_eq!(found(), [given(0, 0x9_FC00), given(0x10_0000, 0x7FF0_0000)]);
        file("setup_data/0/type", b"0x9\n");
        file("setup_data/0/data", &table(&[(7, 7)]));
        file("setup_data/1/type", b"0x1\n");
        file("setup_data/1/data", &table(&[(1 << 32, 1 << 30)]));
        assert_eq!(found()[2..], [given(1 << 32, 1 << 30)]);
    }

    #[test]
    fn ranges_overlap_by_a_byte() {
        let given = Given { start_phys: 0x1000, bytes: 0x1000 };
        let range = |start_phys, last_phys| FirmwareRange { start_phys, last_phys, kind: String::new() };
        assert!(given.overlaps(&range(0x1FFF, 0x5000)) && given.overlaps(&range(0, 0x1000)));
        assert!(!given.overlaps(&range(0x2000, 0x5000)) && !given.overlaps(&range(0, 0xFFF)));
    }
}
