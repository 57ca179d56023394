//! The ports of a machine's platform, from the firmware's tables (ACPI 6.5, 5.2).

use crate::fit::{Unfit, unfit};
use std::ops::Range;

/// Signature of the root pointer, and the alignment at which it lies.
const ROOT: &[u8; 8] = b"RSD PTR ";
const ROOT_STEP: usize = 16;
/// Length of the root pointer's first version, which its first checksum covers.
const ROOT_LENGTH: usize = 20;
const HEADER: usize = 36;
/// Largest length of a table.
const TABLE_MAX: usize = 16 << 20;
/// Address space of ports in a generic address.
const PORTS: u8 = 1;
/// Alignment of the HPET's registers.
const HPET_ALIGNED: u64 = 1 << 10;
/// Flags of the fixed description: the timer has 32 bits; there is a reset register; the hardware has no
/// fixed ports.
const TIMER_32: u32 = 1 << 8;
const HAS_RESET: u32 = 1 << 10;
const REDUCED: u32 = 1 << 20;

/// The firmware's memory: ranges with their content.
#[derive(Clone, Debug, Default)]
pub struct Firmware(Vec<(u64, Vec<u8>)>);

impl Firmware {
    /// Makes it of ranges with their content.
    #[must_use]
    pub fn new(ranges: Vec<(u64, Vec<u8>)>) -> Self {
        Self(ranges)
    }

    /// Returns the ranges with their content.
    #[must_use]
    pub fn ranges(&self) -> &[(u64, Vec<u8>)] {
        &self.0
    }

    fn bytes(&self, phys: u64, length: usize) -> Option<&[u8]> {
        self.0.iter().find_map(|(start, bytes)| {
            let at = usize::try_from(phys.checked_sub(*start)?).ok()?;
            bytes.get(at..at.checked_add(length)?)
        })
    }

    /// Returns a table whose checksum is right.
    fn table(&self, phys: u64) -> Option<&[u8]> {
        let header = self.bytes(phys, HEADER)?;
        let length = number(header, 4, 4)? as usize;
        let table = (HEADER..=TABLE_MAX).contains(&length).then(|| self.bytes(phys, length))??;
        is_summed(table).then_some(table)
    }

    /// Returns the addresses of all tables.
    fn tables(&self) -> Option<Vec<u64>> {
        let aligned = self
            .0
            .iter()
            .flat_map(|(_, bytes)| (0..bytes.len()).step_by(ROOT_STEP).map(move |at| &bytes[at..]));
        let is_root =
            |bytes: &&[u8]| bytes.starts_with(ROOT) && bytes.get(..ROOT_LENGTH).is_some_and(is_summed);
        let root = aligned.into_iter().find(is_root)?;
        let is_second = root[15] >= 2;
        let extended = if is_second { number(root, 24, 8).filter(|at| *at != 0) } else { None };
        let (list, width) = match extended.and_then(|at| self.table(at)) {
            Some(list) => (list, 8),
            None => (self.table(number(root, 16, 4)?)?, 4),
        };
        Some((HEADER..list.len()).step_by(width).filter_map(|at| number(list, at, width)).collect())
    }

    fn find(&self, signature: &[u8; 4]) -> Option<&[u8]> {
        let tables = self.tables()?;
        tables.into_iter().filter_map(|at| self.table(at)).find(|table| table.starts_with(signature))
    }
}

/// Returns a little-endian number of up to 8 bytes.
fn number(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let mut word = [0; 8];
    word.get_mut(..length)?.copy_from_slice(bytes.get(at..at.checked_add(length)?)?);
    Some(u64::from_le_bytes(word))
}

fn is_summed(bytes: &[u8]) -> bool {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) == 0
}

/// Ports of the machine's power management, as the fixed description has them. An empty range: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports {
    /// Status and enable registers of fixed events, up to two blocks.
    pub events: Vec<Range<u16>>,
    /// Control registers, up to two blocks.
    pub controls: Vec<Range<u16>>,
    /// Status and enable registers of general events, up to two blocks.
    pub general: Vec<Range<u16>>,
    pub timer: Range<u16>,
    /// True if the timer has 32 bits instead of 24.
    pub timer_32: bool,
    /// The port by which the kernel calls the firmware.
    pub firmware_call: Option<u16>,
    /// The port and the value that reset the machine.
    pub reset: Option<(u16, u8)>,
    /// Interrupt of all these events, a global system interrupt.
    pub interrupt: u32,
    /// Types of sleep, in a control register, from which the machine wakes up with its memory.
    pub naps: Vec<u8>,
}

/// The machine's platform.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Ports of the power management.
    pub ports: Ports,
    /// Address of the IOAPIC that has interrupt 0.
    pub ioapic_phys: Option<u64>,
    /// Global system interrupts that the firmware describes otherwise than as a PC's.
    pub overridden: Vec<u32>,
    /// Addresses of PCI's configuration space.
    pub configuration: Vec<Range<u64>>,
    /// Address of the HPET's registers.
    pub hpet_phys: Option<u64>,
}

impl Tables {
    /// Finds the tables in the firmware's memory.
    ///
    /// # Errors
    /// The firmware's memory has no such tables, or they are not a PC's.
    pub fn find(firmware: &Firmware) -> Result<Self, Unfit> {
        let missing = |name: &str| {
            unfit(format!("the firmware's memory in the image has no table “{name}” of ACPI that is whole"))
        };
        let fixed = firmware.find(b"FACP").ok_or_else(|| missing("FACP"))?;
        let mut ports = Ports::of(fixed)?;
        ports.naps = naps(firmware, fixed);
        let interrupts = firmware.find(b"APIC").ok_or_else(|| missing("APIC"))?;
        let mut tables = Self { ports, ..Self::default() };
        for entry in entries(interrupts) {
            match entry {
                [1, 12, ..] if number(entry, 8, 4) == Some(0) => tables.ioapic_phys = number(entry, 4, 4),
                [2, 10, ..] => tables.overridden.extend(number(entry, 4, 4).map(|gsi| gsi as u32)),
                _ => {}
            }
        }
        let spaces = firmware.find(b"MCFG").unwrap_or_default();
        tables.configuration =
            spaces.get(44..).unwrap_or_default().chunks_exact(16).filter_map(space).collect();
        let timer = firmware.find(b"HPET").and_then(|table| number(table, 44, 8));
        tables.hpet_phys = timer.filter(|phys| *phys != 0 && phys.is_multiple_of(HPET_ALIGNED));
        Ok(tables)
    }
}

/// Returns the types of sleep from which the machine wakes up with its memory: S1 and S3. A type that powers
/// the machine off as well is none of them.
fn naps(firmware: &Firmware, fixed: &[u8]) -> Vec<u8> {
    let main = number(fixed, 140, 8).filter(|phys| *phys != 0).or_else(|| number(fixed, 40, 4));
    let Some(main) = main.and_then(|phys| firmware.table(phys)) else { return Vec::new() };
    let off = [sleep_type(main, b"_S4_"), sleep_type(main, b"_S5_")];
    let naps = [sleep_type(main, b"_S1_"), sleep_type(main, b"_S3_")];
    naps.into_iter().flatten().filter(|nap| !off.contains(&Some(*nap))).collect()
}

/// Finds the type of a sleep state in AML: a name, and a package whose first number is the type (ACPI 6.5,
/// 20.2).
fn sleep_type(aml: &[u8], name: &[u8; 4]) -> Option<u8> {
    const PACKAGE: u8 = 0x12;
    const BYTE: u8 = 0x0A;
    let at = aml.windows(4).position(|bytes| bytes == name)? + 4;
    let package = aml.get(at..)?.strip_prefix(&[PACKAGE])?;
    // The first byte of the length says how many follow. After the length comes the number of elements.
    let length = 1 + usize::from(package.first()? >> 6);
    match package.get(length + 1..)? {
        [BYTE, number, ..] | [number @ (0 | 1), ..] => Some(*number),
        _ => None,
    }
}

/// Returns the addresses of an entry of the table of configuration spaces: a MiB for each bus.
fn space(entry: &[u8]) -> Option<Range<u64>> {
    let start = number(entry, 0, 8)?;
    let bus = |at: usize| u64::from(entry[at]) << 20;
    let (first, end) = (start.checked_add(bus(10))?, start.checked_add(bus(11) + (1 << 20))?);
    (first < end).then_some(first..end)
}

/// Returns the entries of the table of interrupt controllers, each with its type and length.
fn entries(table: &[u8]) -> Vec<&[u8]> {
    let mut rest = table.get(44..).unwrap_or_default();
    let mut entries = Vec::new();
    while let Some(&length) = rest.get(1)
        && let Some((entry, behind)) = rest.split_at_checked(usize::from(length).max(2))
    {
        entries.push(entry);
        rest = behind;
    }
    entries
}

impl Ports {
    fn of(table: &[u8]) -> Result<Self, Unfit> {
        let byte = |at: usize| table.get(at).copied().unwrap_or(0);
        let word = |at| number(table, at, 4).unwrap_or(0);
        let flags = word(112) as u32;
        if flags & REDUCED != 0 {
            return Err(unfit("its firmware has no fixed hardware (“hardware-reduced ACPI”)"));
        }
        // The old field, the field of a generic address that replaces it, and the length of both.
        let block = |old: usize, new: usize, length: u8| {
            let port = generic(table, new).unwrap_or_else(|| word(old));
            let start = u16::try_from(port).ok()?;
            let end = start.checked_add(u16::from(length))?;
            (start != 0 && length != 0).then_some(start..end)
        };
        let some = |blocks: [Option<Range<u16>>; 2]| blocks.into_iter().flatten().collect();
        let reset = generic(table, 116).and_then(|port| u16::try_from(port).ok());
        Ok(Self {
            events: some([block(56, 148, byte(88)), block(60, 160, byte(88))]),
            controls: some([block(64, 172, byte(89)), block(68, 184, byte(89))]),
            general: some([block(80, 220, byte(92)), block(84, 232, byte(93))]),
            timer: block(76, 208, byte(91)).unwrap_or_default(),
            timer_32: flags & TIMER_32 != 0,
            firmware_call: u16::try_from(word(48)).ok().filter(|port| *port != 0),
            reset: reset.filter(|_| flags & HAS_RESET != 0).map(|port| (port, byte(128))),
            interrupt: number(table, 46, 2).unwrap_or(9) as u32,
            naps: Vec::new(),
        })
    }
}

/// Returns the port in a generic address, if the address is one.
fn generic(table: &[u8], at: usize) -> Option<u64> {
    let port = number(table, at + 4, 8)?;
    (table.get(at) == Some(&PORTS) && port != 0).then_some(port)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum(bytes: &mut [u8], at: usize) {
        bytes[at] = 0;
        bytes[at] = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    }

    fn table(signature: &[u8; 4], length: usize, fields: &[(usize, &[u8])]) -> Vec<u8> {
        let mut table = vec![0; length];
        table[..4].copy_from_slice(signature);
        table[4..8].copy_from_slice(&(length as u32).to_le_bytes());
        for (at, bytes) in fields {
            table[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        sum(&mut table, 9);
        table
    }

    const PACKAGE: u8 = 0x12;

    /// Returns the firmware's memory of a PC like QEMU's Q35.
    pub fn firmware() -> Firmware {
        let generic = |port: u16| [&[1, 16, 0, 2][..], &u64::from(port).to_le_bytes()].concat();
        let fixed = table(
            b"FACP",
            244,
            &[
                (40, &0x7FE_0C00_u32.to_le_bytes()),
                (46, &9_u16.to_le_bytes()),
                (48, &0xB2_u32.to_le_bytes()),
                (56, &0x600_u32.to_le_bytes()),
                (64, &0x604_u32.to_le_bytes()),
                (76, &0x608_u32.to_le_bytes()),
                (80, &0x620_u32.to_le_bytes()),
                (88, &[4, 2, 0, 4, 16, 0]),
                (112, &(HAS_RESET | 0x84A5).to_le_bytes()),
                (116, &generic(0xCF9)),
                (128, &[0x0F]),
                (172, &generic(0x604)),
            ],
        );
        let interrupts = [
            &[0, 8, 0, 0, 1, 0, 0, 0][..],
            &[1, 12, 0, 0, 0, 0, 0xC0, 0xFE, 0, 0, 0, 0],
            &[2, 10, 0, 0, 2, 0, 0, 0, 0, 0],
            &[2, 10, 0, 5, 5, 0, 0, 0, 13, 0],
            &[4, 6, 0xFF, 0, 0, 1],
        ];
        let interrupts = table(b"APIC", 44 + 46, &[(44, &interrupts.concat())]);
        let base = 0x7FE_0000_u64;
        let at = |place: u64| (base + place).to_le_bytes();
        let spaces = [&0xB000_0000_u64.to_le_bytes()[..], &[0, 0, 0, 0xFF, 0, 0, 0, 0]].concat();
        let spaces = table(b"MCFG", 60, &[(44, &spaces)]);
        let states = [
            &[8][..],
            b"_S3_",
            &[PACKAGE, 6, 4, 1, 1, 0, 0],
            &[8][..],
            b"_S4_",
            &[PACKAGE, 8, 4, 0x0A, 2, 0x0A, 2, 0, 0],
            &[8][..],
            b"_S5_",
            &[PACKAGE, 0x46, 0, 4, 0, 0, 0, 0],
        ];
        let states = table(b"DSDT", 36 + 39, &[(36, &states.concat())]);
        let timer = table(b"HPET", 56, &[(44, &0xFED0_0000_u64.to_le_bytes())]);
        let list = table(
            b"XSDT",
            36 + 32,
            &[(36, &at(0x400)), (44, &at(0x800)), (52, &at(0xA00)), (60, &at(0xB00))],
        );
        let mut tables = vec![0; 0x1000];
        for (place, bytes) in [
            (0x100, list),
            (0x400, fixed),
            (0x800, interrupts),
            (0xA00, spaces),
            (0xB00, timer),
            (0xC00, states),
        ] {
            tables[place..place + bytes.len()].copy_from_slice(&bytes);
        }
        let mut bios = vec![0; 0x1000];
        let mut root = vec![0; 36];
        root[..8].copy_from_slice(ROOT);
        root[15] = 2;
        root[24..32].copy_from_slice(&at(0x100));
        sum(&mut root[..20], 8);
        bios[0x520..0x520 + 36].copy_from_slice(&root);
        Firmware::new(vec![(0xF_0000, bios), (base, tables)])
    }

    #[test]
    fn the_ports_of_a_pc_are_found() {
        let tables = Tables::find(&firmware()).unwrap();
        assert_eq!(
            tables.ports,
            Ports {
                events: vec![0x600..0x604],
                controls: vec![0x604..0x606],
                general: vec![0x620..0x630],
                timer: 0x608..0x60C,
                timer_32: false,
                firmware_call: Some(0xB2),
                reset: Some((0xCF9, 0x0F)),
                interrupt: 9,
                naps: vec![1],
            }
        );
        assert_eq!((tables.ioapic_phys, tables.overridden), (Some(0xFEC0_0000), vec![2, 5]));
        assert_eq!(tables.configuration, [0xB000_0000..0xC000_0000]);
        assert_eq!(tables.hpet_phys, Some(0xFED0_0000));
    }

    #[test]
    fn firmware_without_whole_tables_is_refused() {
        let refused = |firmware: &Firmware| Tables::find(firmware).unwrap_err().0;
        assert!(refused(&Firmware::default()).contains("FACP"));
        let mut damaged = firmware();
        damaged.0[1].1[0x400 + 60] ^= 1;
        assert!(refused(&damaged).contains("FACP"));
        let mut damaged = firmware();
        damaged.0[1].1[0x800 + 60] ^= 1;
        assert!(refused(&damaged).contains("“APIC”"));
    }

    #[test]
    fn a_type_of_sleep_that_is_no_number_is_none() {
        assert_eq!(sleep_type(&[b'_', b'S', b'5', b'_', PACKAGE, 4, 1, 0x0A, 7], b"_S5_"), Some(7));
        for aml in [
            &b"_S5_"[..],
            b"_S5_\x12",
            b"_S5_\x12\x04\x01",
            b"_S5_\x12\xC6\0\0\0",
            b"_S5_\x12\x04\x01\x0C",
            b"S5",
        ] {
            assert_eq!(sleep_type(aml, b"_S5_"), None, "{aml:?}");
        }
    }

    proptest! {
        #[test]
        fn no_table_makes_it_panic(
            changes in proptest::collection::vec((0_usize..0x1000, any::<u8>()), 0..40),
        ) {
            let mut firmware = firmware();
            for (at, byte) in changes {
                firmware.0[1].1[at] = byte;
            }
            let tables = [(0x100, 68), (0x400, 244), (0x800, 90), (0xA00, 60), (0xB00, 56), (0xC00, 75)];
            for (place, length) in tables {
                sum(&mut firmware.0[1].1[place..place + length], 9);
            }
            let _ = Tables::find(&firmware);
        }
    }
}
