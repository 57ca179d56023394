//! The parsers of outside bytes in this crate, as functions of bytes for `lab/fuzz`.
//!
//! Each function must return for every input. A panic is a finding, and so is a hang.

use crate::{
    acpi::{Firmware, Tables},
    entry,
    layout::Layout,
    memory,
};
use mercury_devices::memory as guest_memory;
use mercury_image::{Cpu, Kind, Machine, PAGE, Range};

/// Inputs to begin with: the firmware's tables of a PC, and a machine with some ranges.
pub const SEEDS: &[&[u8]] =
    &[include_bytes!("fuzz/tables"), &[1, 0, 0x10, 0x40, 0, 1, 0, 0x20, 7, 0, 0, 1, 0, 0xFF, 0xFF]];

/// Address of the input as the firmware's memory.
const FIRMWARE: u64 = 0xF_0000;

/// Searches the input for ACPI's tables, and makes a machine of it. Returns a number for what was found.
#[must_use]
pub fn run(input: &[u8]) -> u64 {
    let tables = Tables::find(&Firmware::new(vec![(FIRMWARE, input.to_vec())]));
    let found = tables.map_or(0, |tables| {
        let ports = &tables.ports;
        let counts =
            [ports.events.len(), ports.controls.len(), ports.general.len(), tables.configuration.len()];
        counts.iter().fold(1, |number, count| number << 2 | (*count as u64).min(3))
    });
    found << 2 | machine(input)
}

/// Makes the layout, the memory and the page tables of a machine that the input describes. Returns the last
/// step that was done.
fn machine(input: &[u8]) -> u64 {
    let mut words =
        input.chunks(3).map(|bytes| bytes.iter().fold(0_u64, |word, byte| word << 8 | u64::from(*byte)));
    let mut next = |scale: u64| words.next().unwrap_or(0).wrapping_mul(scale);
    let mut described = Machine::default();
    for _ in 0..next(1) % 4 {
        described.ranges.push(Range { start_phys: next(PAGE as u64), pages: next(1) % 64, kind: Kind::Kept });
    }
    for cpu in 0..(next(1) % 3) as u32 {
        described.cpus.push(Cpu { cpu, apic_id: cpu, saved_phys: next(0x1_0001) });
    }
    described.resume.virt = next(1).wrapping_neg();
    described.resume.phys = [next(PAGE as u64), next(PAGE as u64)];
    let Ok(layout) = Layout::of(&described) else { return 0 };
    let Ok(view) = memory::map(&layout) else { return 1 };
    for range in layout.ranges() {
        assert!(guest_memory::contains(&view, range.start, range.end - range.start));
    }
    if entry::Tables::make(&view, &described).is_ok() { 3 } else { 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_seed_is_a_pc_and_the_second_a_machine() {
        let firmware = Firmware::new(vec![(FIRMWARE, SEEDS[0].to_vec())]);
        let tables = Tables::find(&firmware).expect("tables");
        assert_eq!((tables.ports.interrupt, tables.configuration.len()), (9, 1));
        assert_ne!(run(SEEDS[0]), run(SEEDS[1]));
    }
}
