//! The addresses at which a process has pages of the base mapped, by page.
//!
//! When a page becomes the machine's own, its old mappings must go. The direct map has each page at one
//! address. Other addresses of the kernel and those of programs are recorded here when they are mapped. A
//! record may be out of date, because the guest has mapped something else there since. Then a mapping goes
//! that the guest's next fault brings back.

use std::collections::HashMap;

use crate::layout::PAGE;

/// The number of pages of the guest's memory whose mappings are kept together.
const REGION: u64 = 512;
/// The number of records of a region from which double ones are removed.
const MANY: usize = 256;

/// Pages that are adjacent in the guest's memory and in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Run {
    page: u64,
    address: u64,
    count: u64,
}

/// The recorded mappings, by region of the guest's memory.
#[derive(Debug, Default)]
pub struct Reverse {
    regions: HashMap<u64, Vec<Run>>,
    recorded: usize,
}

impl Reverse {
    /// Records that pages from one on are mapped at an address.
    pub fn note(&mut self, mut page: u64, mut address: u64, mut count: u64) {
        while count > 0 {
            let part = count.min(REGION - page % REGION);
            let region = self.regions.entry(page / REGION).or_default();
            if region.last().is_none_or(|last| (last.page, last.address) != (page, address)) {
                region.push(Run { page, address, count: part });
                self.recorded += 1;
            } else if let Some(last) = region.last_mut() {
                last.count = last.count.max(part);
            }
            if region.len().is_power_of_two() && region.len() >= MANY {
                let before = region.len();
                region.sort_unstable();
                region.dedup();
                self.recorded -= before - region.len();
            }
            (page, address, count) = (page + part, address + part * PAGE, count - part);
        }
    }

    /// Returns the addresses at which a page may be mapped.
    pub fn addresses(&self, page: u64) -> Vec<u64> {
        let Some(region) = self.regions.get(&(page / REGION)) else { return Vec::new() };
        let within = region.iter().filter(|run| (run.page..run.page + run.count).contains(&page));
        let mut found: Vec<u64> = within.map(|run| run.address + (page - run.page) * PAGE).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Returns the number of records.
    pub fn recorded(&self) -> usize {
        self.recorded
    }

    /// Forgets all, because nothing is mapped any more besides the direct map.
    pub fn clear(&mut self) {
        self.regions.clear();
        self.recorded = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_address_of_a_page_is_found(
            runs in prop::collection::vec((0..1500_u64, 0..64_u64, 1..700_u64), 1..40), page in 0..2200_u64,
        ) {
            let mut reverse = Reverse::default();
            let mut model = BTreeSet::new();
            for (first, at, count) in runs {
                reverse.note(first, at * PAGE, count);
                if (first..first + count).contains(&page) {
                    model.insert((at + page - first) * PAGE);
                }
            }
            prop_assert_eq!(reverse.addresses(page), model.into_iter().collect::<Vec<u64>>());
        }
    }

    #[test]
    fn the_same_mapping_made_again_and_again_takes_no_memory() {
        let mut reverse = Reverse::default();
        for round in 0..100_000 {
            reverse.note(round % 7, (round % 7) * PAGE, 3);
        }
        assert!(reverse.regions[&0].len() < 2 * MANY);
        assert_eq!(reverse.recorded(), reverse.regions[&0].len());
        reverse.clear();
        assert!(reverse.recorded() == 0 && reverse.addresses(1).is_empty());
    }
}
