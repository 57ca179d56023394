//! The guest's physical addresses: where it has memory, and where the monitor has its own.

use crate::fit::{Unfit, unfit};
use mercury_image::{Machine, PAGE};
use std::ops::Range;

/// Size of a page in bytes.
pub const PAGE_BYTES: u64 = PAGE as u64;
/// Memory of the monitor: the page with the description of its devices, and the page tables with which a
/// processor begins. No PC has RAM there.
pub const MONITOR: Range<u64> = 0xFEF0_0000..0xFEF8_0000;
/// Registers of virtio devices, a page each.
pub const WINDOWS: Range<u64> = 0xFEF8_0000..0xFEF9_0000;
/// Pages that KVM needs on Intel's processors for a task and for identical addresses.
pub const KVM_PAGES: Range<u64> = 0xFEFB_C000..0xFEFC_0000;
/// Text and graphics memory of the display. The monitor shows neither.
const DISPLAY: Range<u64> = 0xA_0000..0xC_0000;
/// Registers that KVM serves, and addresses of the monitor: no memory of the machine may lie there.
pub const TAKEN: [Range<u64>; 2] = [0xFEC0_0000..0xFEC0_1000, 0xFEE0_0000..0xFF00_0000];
/// Largest number of ranges. A real machine has some dozen.
const RANGES_MAX: usize = 4096;
/// Largest physical address of a machine: Linux maps 64 TiB with four levels of page tables.
const END_MAX: u64 = 1 << 46;

/// The ranges of the guest's memory, in ascending order, with gaps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout(Vec<Range<u64>>);

impl Layout {
    /// Returns the memory of a machine: all that its kernel may read.
    ///
    /// # Errors
    /// The description has addresses that no machine has.
    pub fn of(machine: &Machine) -> Result<Self, Unfit> {
        let named = machine.ranges.iter().map(|range| {
            let bytes = range.pages.saturating_mul(PAGE_BYTES);
            (range.start_phys, range.start_phys.saturating_add(bytes))
        });
        let ram = machine.firmware.iter().filter(|range| range.kind == "System RAM");
        let ram = ram.map(|range| whole_pages(range.start_phys, range.last_phys));
        let firmware = machine
            .firmware_memory
            .iter()
            .map(|one| (one.start_phys, one.start_phys.saturating_add(one.length)));
        let all = named.chain(ram).chain(firmware).chain([(DISPLAY.start, DISPLAY.end)]);
        let all: Vec<Range<u64>> =
            all.map(|(start, end)| checked(start, end)).collect::<Result<_, Unfit>>()?;
        if all.len() > RANGES_MAX {
            return Err(unfit(format!("it has {} ranges of memory", all.len())));
        }
        Ok(Self(joined(all)))
    }

    #[must_use]
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Returns the size of the memory in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns true if all of a range is memory.
    #[must_use]
    pub fn contains(&self, start: u64, bytes: u64) -> bool {
        let Some(end) = start.checked_add(bytes) else { return false };
        self.0.iter().any(|range| range.start <= start && end <= range.end)
    }
}

/// Returns the pages that hold a range, from its first to its last byte.
fn whole_pages(first: u64, last: u64) -> (u64, u64) {
    (first & !(PAGE_BYTES - 1), (last | (PAGE_BYTES - 1)).saturating_add(1))
}

fn checked(start: u64, end: u64) -> Result<Range<u64>, Unfit> {
    let is_aligned = start.is_multiple_of(PAGE_BYTES) && end.is_multiple_of(PAGE_BYTES);
    if start >= end || !is_aligned || end > END_MAX {
        return Err(unfit(format!("it has memory from {start:#x} to {end:#x}")));
    }
    if let Some(taken) = TAKEN.iter().find(|taken| start < taken.end && taken.start < end) {
        let what = "where the interrupt controllers and the monitor are";
        return Err(unfit(format!("it has memory at {:#x}, {what}", taken.start.max(start))));
    }
    Ok(start..end)
}

/// Sorts ranges, and joins those that touch.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{FirmwareRange, Kind, Range as ImageRange};
    use proptest::prelude::*;

    fn machine(ranges: &[(u64, u64)]) -> Machine {
        let range = |&(start_phys, pages)| ImageRange { start_phys, pages, kind: Kind::Kept };
        Machine { ranges: ranges.iter().map(range).collect(), ..Machine::default() }
    }

    #[test]
    fn memory_is_what_the_firmware_and_the_image_name_in_whole_pages() {
        let ram =
            |start_phys, last_phys, kind: &str| FirmwareRange { start_phys, last_phys, kind: kind.into() };
        let mut machine = machine(&[(0x1000, 0x9E), (0x10_0000, 0x100)]);
        machine.firmware = vec![
            ram(0, 0x9_FBFF, "System RAM"),
            ram(0x9_FC00, 0x9_FFFF, "Reserved"),
            ram(0x10_0000, 0x2F_FFFF, "System RAM"),
        ];
        let layout = Layout::of(&machine).expect("a layout");
        assert_eq!(layout.ranges(), [0..0xC_0000, 0x10_0000..0x30_0000]);
        assert_eq!(layout.bytes(), 0xC_0000 + 0x20_0000);
        assert!(layout.contains(0xB_FFF0, 16) && !layout.contains(0xB_FFF0, 17));
        assert!(!layout.contains(u64::MAX, 2));
    }

    #[test]
    fn addresses_that_no_machine_has_are_refused() {
        for (start, pages) in [
            (0x800, 1),
            (0x1000, 0),
            (u64::MAX - 0xFFF, 1),
            (0x1000, u64::MAX),
            (END_MAX, 1),
            (0xFEE0_0000, 1),
            (0xFEC0_0000, 1),
            (0xFE00_0000, 0x2000),
            (MONITOR.start, 1),
            (WINDOWS.start, 1),
        ] {
            let unfit = Layout::of(&machine(&[(start, pages)])).expect_err("refused");
            assert!(unfit.0.contains("it has memory"), "{unfit}");
        }
    }

    proptest! {
        #[test]
        fn ranges_are_in_order_with_gaps(all in proptest::collection::vec((0_u64..200, 1_u64..20), 0..20)) {
            let ranges: Vec<_> = all.iter().map(|&(start, pages)| (start * PAGE_BYTES, pages)).collect();
            let layout = Layout::of(&machine(&ranges)).expect("a layout");
            prop_assert!(layout.ranges().windows(2).all(|pair| pair[0].end < pair[1].start));
            prop_assert!(ranges.iter().all(|&(start, pages)| layout.contains(start, pages * PAGE_BYTES)));
        }
    }
}
