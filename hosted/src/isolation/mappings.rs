//! What one program's process has mapped of the guest's memory, and whether the guest's page tables still allow it.

use std::collections::BTreeMap;

use crate::{layout::PAGE, memory::Rights};

/// Pages that lie beside each other, there and in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    length: u64,
    physical: u64,
    rights: Rights,
}

/// What has to be done to a range, so that the process has no more than the page tables allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Where it begins.
    pub address: u64,
    /// Its bytes.
    pub length: u64,
    /// What is left of its rights. If nothing is, it is not mapped any more.
    pub rights: Option<Rights>,
}

/// All that is mapped, by address.
#[derive(Debug, Default)]
pub struct Mappings {
    runs: BTreeMap<u64, Run>,
}

impl Mappings {
    /// How many mappings the host has for it, about.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.runs.len() as u64
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.runs.clear();
    }

    /// Where a page leads, and what may be done with it.
    #[must_use]
    pub fn page(&self, page: u64) -> Option<(u64, Rights)> {
        let (&start, run) = self.runs.range(..=page).next_back()?;
        (page - start < run.length).then(|| (run.physical + (page - start), run.rights))
    }

    /// A range was mapped, over what was there.
    pub fn insert(&mut self, address: u64, length: u64, physical: u64, rights: Rights) {
        self.remove(address, length);
        let mut run = Run { length, physical, rights };
        let mut start = address;
        if let Some((&before, &other)) = self.runs.range(..address).next_back()
            && before + other.length == address
            && other.physical + other.length == physical
            && other.rights == rights
        {
            start = before;
            run.physical = other.physical;
            run.length += other.length;
        }
        if let Some(&other) = self.runs.get(&(address + length))
            && physical + length == other.physical
            && other.rights == rights
        {
            run.length += other.length;
            self.runs.remove(&(address + length));
        }
        self.runs.insert(start, run);
    }

    /// A range is not mapped any more.
    pub fn remove(&mut self, address: u64, length: u64) {
        let end = address + length;
        if let Some((&before, &run)) = self.runs.range(..address).next_back()
            && before + run.length > address
        {
            self.runs.insert(before, Run { length: address - before, ..run });
            self.insert_rest(before, run, end);
        }
        let inside: Vec<(u64, Run)> = self.runs.range(address..end).map(|(at, run)| (*at, *run)).collect();
        for (at, run) in inside {
            self.runs.remove(&at);
            self.insert_rest(at, run, end);
        }
    }

    /// What is left of a run from an address on.
    fn insert_rest(&mut self, start: u64, run: Run, from: u64) {
        let gone = from - start;
        if gone < run.length {
            let (length, physical) = (run.length - gone, run.physical + gone);
            self.runs.insert(from, Run { length, physical, ..run });
        }
    }

    /// Compares all pages with the page tables, of which `look` says where a page leads and what may be done with it, and
    /// says what has to change. It is changed here already.
    pub fn revalidate(&mut self, mut look: impl FnMut(u64) -> Option<(u64, Rights)>) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::new();
        for (&start, run) in &self.runs {
            for offset in (0..run.length).step_by(PAGE as usize) {
                let found = look(start + offset).filter(|(physical, _)| *physical == run.physical + offset);
                let rights = found.map(|(_, now)| Rights {
                    write: run.rights.write && now.write,
                    execute: run.rights.execute && now.execute,
                });
                if rights == Some(run.rights) {
                    continue;
                }
                match changes.last_mut() {
                    Some(last)
                        if last.address + last.length == start + offset
                            && last.rights == rights
                            && last.address >= start =>
                    {
                        last.length += PAGE;
                    }
                    _ => changes.push(Change { address: start + offset, length: PAGE, rights }),
                }
            }
        }
        for change in &changes {
            match (change.rights, self.page(change.address)) {
                (Some(rights), Some((physical, _))) => {
                    self.insert(change.address, change.length, physical, rights);
                }
                _ => self.remove(change.address, change.length),
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const READ: Rights = Rights { write: false, execute: false };
    const WRITE: Rights = Rights { write: true, execute: false };

    fn pages(mappings: &Mappings) -> BTreeMap<u64, (u64, Rights)> {
        (0..64).filter_map(|number| Some((number, mappings.page(number * PAGE)?))).collect()
    }

    #[test]
    fn neighbours_become_one() {
        let mut mappings = Mappings::default();
        mappings.insert(0x1000, 0x1000, 0x8000, READ);
        mappings.insert(0x3000, 0x1000, 0xA000, READ);
        mappings.insert(0x2000, 0x1000, 0x9000, READ);
        assert_eq!((mappings.count(), mappings.page(0x3000)), (1, Some((0xA000, READ))));
        mappings.insert(0x4000, 0x1000, 0xB000, WRITE);
        assert_eq!(mappings.count(), 2);
    }

    #[test]
    fn what_the_tables_do_not_allow_any_more_is_taken_away() {
        let mut mappings = Mappings::default();
        mappings.insert(0x1000, 0x4000, 0x8000, WRITE);
        let changes = mappings.revalidate(|page| match page {
            0x1000 => Some((0x8000, WRITE)),
            0x2000 | 0x3000 => Some((page + 0x7000, READ)),
            _ => Some((0, WRITE)),
        });
        let change = |address, length, rights| Change { address, length, rights };
        assert_eq!(changes, [change(0x2000, 0x2000, Some(READ)), change(0x4000, 0x1000, None)]);
        assert_eq!(mappings.page(0x2000), Some((0x9000, READ)));
        assert_eq!(mappings.page(0x4000), None);
        // More than before is nothing to take away.
        assert!(mappings.revalidate(|page| Some((page + 0x7000, WRITE))).is_empty());
    }

    proptest! {
        #[test]
        fn it_is_what_a_list_of_pages_would_be(
            steps in prop::collection::vec((0..48_u64, 1..12_u64, 0..64_u64, any::<bool>(), 0..3_u8), 1..60)
        ) {
            let mut mappings = Mappings::default();
            let mut model: BTreeMap<u64, (u64, Rights)> = BTreeMap::new();
            for (at, count, to, write, what) in steps {
                let rights = Rights { write, execute: false };
                match what {
                    0 => {
                        mappings.insert(at * PAGE, count * PAGE, to * PAGE, rights);
                        model.extend((0..count).map(|n| (at + n, ((to + n) * PAGE, rights))));
                    }
                    1 => {
                        mappings.remove(at * PAGE, count * PAGE);
                        model.retain(|page, _| !(at..at + count).contains(page));
                    }
                    _ => {
                        // Some pages have gone, some cannot be written to.
                        let look = |page: u64| match page / PAGE % 5 {
                            0 => None,
                            1 => model.get(&(page / PAGE)).map(|(to, _)| (*to, READ)),
                            _ => model.get(&(page / PAGE)).copied(),
                        };
                        let changes = mappings.revalidate(look);
                        let changed: u64 = changes.iter().map(|change| change.length / PAGE).sum();
                        let before = model.clone();
                        model.retain(|page, _| page % 5 != 0);
                        for (_, found) in model.iter_mut().filter(|(page, _)| *page % 5 == 1) {
                            found.1 = READ;
                        }
                        let differ = before.iter().filter(|(page, was)| model.get(page) != Some(was)).count();
                        prop_assert_eq!(changed, differ as u64);
                    }
                }
                prop_assert_eq!(pages(&mappings), model.clone());
            }
        }
    }
}
