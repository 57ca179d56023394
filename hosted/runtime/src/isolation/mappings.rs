//! The mappings of a process, and their comparison with the guest's page tables.

use std::{collections::BTreeMap, ops::Range};

use crate::{layout::PAGE, memory::Rights};

/// Pages that are adjacent in the process and in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    length: u64,
    physical: u64,
    rights: Rights,
}

/// A change to a range after which the process has no more than the page tables allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub address: u64,
    /// The length in bytes.
    pub length: u64,
    /// The rights that remain. Without any the range is unmapped.
    pub rights: Option<Rights>,
}

/// A change to a range after which the process has the mappings of other page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    pub address: u64,
    /// The length in bytes.
    pub length: u64,
    /// The new frame and its rights. Without them the range is unmapped.
    pub to: Option<(u64, Rights)>,
}

/// The mappings of a process, by address.
#[derive(Debug, Default)]
pub struct Mappings {
    runs: BTreeMap<u64, Run>,
    /// Large pages of the guest of which a part was mapped: their beginnings and sizes.
    large: BTreeMap<u64, u64>,
}

impl Mappings {
    /// Returns about the number of mappings that the host has for the process.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.runs.len() as u64
    }

    pub fn clear(&mut self) {
        self.runs.clear();
        self.large.clear();
    }

    /// Records that a mapped address is part of a large page of the guest.
    pub fn insert_large_page(&mut self, address: u64, size: u64) {
        self.large.insert(address & !(size - 1), size);
    }

    /// Drops the large page of an address whose translation the guest has dropped (SDM 3A
    /// 4.10.4.1). Returns the mapped parts of it, with their lengths.
    pub fn drop_large_page(&mut self, address: u64) -> Vec<(u64, u64)> {
        const SIZES: [u64; 2] = [2 << 20, 1 << 30];
        let mut pieces = Vec::new();
        for size in SIZES {
            let start = address & !(size - 1);
            if self.large.get(&start) != Some(&size) {
                continue;
            }
            self.large.remove(&start);
            let end = start + size;
            let before = self.runs.range(..start).next_back().map(|(at, run)| (*at, run.length));
            let inside = self.runs.range(start..end).map(|(at, run)| (*at, run.length));
            for (at, length) in before.into_iter().chain(inside) {
                let (from, to) = (at.max(start), (at + length).min(end));
                if from < to {
                    pieces.push((from, to - from));
                }
            }
        }
        for (at, length) in &pieces {
            self.remove(*at, *length);
        }
        pieces
    }

    /// Returns the frame of a page, and its rights.
    #[must_use]
    pub fn page(&self, page: u64) -> Option<(u64, Rights)> {
        let (&start, run) = self.runs.range(..=page).next_back()?;
        (page - start < run.length).then(|| (run.physical + (page - start), run.rights))
    }

    /// Records a mapping, over any earlier one.
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

    /// Records that a range was unmapped.
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

    /// Keeps the rest of a run from an address on.
    fn insert_rest(&mut self, start: u64, run: Run, from: u64) {
        let gone = from - start;
        if gone < run.length {
            let (length, physical) = (run.length - gone, run.physical + gone);
            self.runs.insert(from, Run { length, physical, ..run });
        }
    }

    /// Returns the number of mapped pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.runs.values().map(|run| run.length / PAGE).sum()
    }

    /// Returns the frames of writable mappings.
    pub fn writable(&self) -> impl Iterator<Item = Range<u64>> {
        let writable = self.runs.values().filter(|run| run.rights.write);
        writable.map(|run| run.physical..run.physical + run.length)
    }

    /// Compares all pages with other page tables, and changes the record. `translate` returns the frame
    /// and rights of a page there. Equal pages stay. The first `most` pieces that lead elsewhere
    /// are to be mapped as there. All other pages are to be unmapped, in ranges without a kept page
    /// that do not cross `border`.
    pub fn exchange(
        &mut self,
        most: usize,
        border: u64,
        mut translate: impl FnMut(u64) -> Option<(u64, Rights)>,
    ) -> Vec<Exchange> {
        let mut all = Exchanges { most, border, changes: Vec::new(), after: BTreeMap::new(), is_open: false };
        for (&start, run) in &self.runs {
            for offset in (0..run.length).step_by(PAGE as usize) {
                let (at, physical) = (start + offset, run.physical + offset);
                match translate(at) {
                    Some((to, now)) if to == physical && run.rights.are_within(now) => {
                        all.keep(at, physical, run.rights);
                    }
                    there => all.change(at, there),
                }
            }
        }
        self.runs = all.after;
        all.changes
    }

    /// Compares all pages with the page tables, and changes the record. `translate` returns the frame
    /// and rights of a page there. Returns the changes that the process needs.
    pub fn revalidate(&mut self, mut translate: impl FnMut(u64) -> Option<(u64, Rights)>) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::new();
        for (&start, run) in &self.runs {
            for offset in (0..run.length).step_by(PAGE as usize) {
                let found =
                    translate(start + offset).filter(|(physical, _)| *physical == run.physical + offset);
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

/// The result of a comparison with other page tables, page by page in order.
struct Exchanges {
    /// The number of pieces that may still be mapped elsewhere.
    most: usize,
    border: u64,
    changes: Vec<Exchange>,
    /// The mappings after the changes.
    after: BTreeMap<u64, Run>,
    /// True if the last page was changed.
    is_open: bool,
}

impl Exchanges {
    fn keep(&mut self, at: u64, physical: u64, rights: Rights) {
        self.is_open = false;
        if let Some(mut last) = self.after.last_entry() {
            let (start, run) = (*last.key(), last.get_mut());
            let is_next = start + run.length == at && run.physical + run.length == physical;
            if is_next && run.rights == rights {
                run.length += PAGE;
                return;
            }
        }
        self.after.insert(at, Run { length: PAGE, physical, rights });
    }

    fn change(&mut self, at: u64, there: Option<(u64, Rights)>) {
        let is_below = at < self.border;
        let last =
            self.changes.last_mut().filter(|last| self.is_open && (last.address < self.border) == is_below);
        let follows = last.as_ref().is_some_and(|last| {
            let goes_on = |(from, rights): (u64, Rights)| (from + (at - last.address), rights);
            last.address + last.length == at && last.to.is_some() && there == last.to.map(goes_on)
        });
        let to = there.filter(|_| follows || self.most > 0);
        match last {
            Some(last) if follows => last.length += PAGE,
            Some(Exchange { address, length, to: None }) if to.is_none() => {
                *length = at + PAGE - *address;
            }
            _ => {
                self.most -= usize::from(to.is_some());
                self.changes.push(Exchange { address: at, length: PAGE, to });
            }
        }
        if let Some((physical, rights)) = to {
            self.keep(at, physical, rights);
        }
        self.is_open = true;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const READ: Rights = Rights { write: false, execute: false };
    const WRITE: Rights = Rights { write: true, execute: false };

    #[test]
    fn a_large_page_goes_as_a_whole() {
        const LARGE: u64 = 2 << 20;
        let mut mappings = Mappings::default();
        mappings.insert(LARGE - PAGE, 2 * LARGE, 0x100 * LARGE - PAGE, WRITE);
        assert!(mappings.drop_large_page(LARGE).is_empty());
        mappings.insert_large_page(LARGE + 5 * PAGE, LARGE);
        mappings.remove(LARGE + 7 * PAGE, PAGE);
        let pieces = mappings.drop_large_page(2 * LARGE - 1);
        assert_eq!(pieces, [(LARGE, 7 * PAGE), (LARGE + 8 * PAGE, LARGE - 8 * PAGE)]);
        assert!(mappings.page(LARGE - PAGE).is_some() && mappings.page(2 * LARGE).is_some());
        assert_eq!(mappings.pages(), 512);
        assert!(mappings.drop_large_page(LARGE).is_empty());
        // All pieces of a page of 1 GiB go.
        mappings.insert(3 << 30, PAGE, 0, READ);
        mappings.insert((3 << 30) + LARGE, PAGE, 0, READ);
        mappings.insert_large_page((3 << 30) + LARGE, 1 << 30);
        assert_eq!(mappings.drop_large_page((3 << 30) + 77 * LARGE).len(), 2);
    }

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
    fn mappings_follow_revoked_rights() {
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
        // More rights than before remove nothing.
        assert!(mappings.revalidate(|page| Some((page + 0x7000, WRITE))).is_empty());
    }

    #[test]
    fn changed_pages_are_exchanged_and_the_rest_removed_together() {
        let mut mappings = Mappings::default();
        mappings.insert(0x1000, 0x4000, 0x8000, WRITE);
        mappings.insert(0x6000, 0x1000, 0x4000, READ);
        mappings.insert(0x9000, 0x1000, 0x4000, READ);
        let translate = |page| match page {
            0x1000 => Some((0x8000, WRITE)),
            0x2000 | 0x3000 => Some((page + 0x10_0000, READ)),
            _ => None,
        };
        let exchange = |address, length, to| Exchange { address, length, to };
        let pieces = [exchange(0x2000, 0x2000, Some((0x10_2000, READ))), exchange(0x4000, 0x3000, None)];
        let changes = mappings.exchange(1, 0x8000, translate);
        assert_eq!(changes, [&pieces[..], &[exchange(0x9000, 0x1000, None)]].concat());
        assert_eq!(pages(&mappings).into_keys().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(mappings.page(0x3000), Some((0x10_3000, READ)));
        assert!(mappings.exchange(1, 0x8000, translate).is_empty());
    }

    #[test]
    fn no_change_goes_across_the_border() {
        let translate = |page: u64| Some((page + 0x10_0000, READ));
        for most in [0, 2] {
            let mut mappings = Mappings::default();
            mappings.insert(0x1000, 0x4000, 0x8000, READ);
            let changes = mappings.exchange(most, 0x3000, translate);
            let ends: Vec<(u64, u64)> =
                changes.iter().map(|change| (change.address, change.length)).collect();
            assert_eq!(ends, [(0x1000, 0x2000), (0x3000, 0x2000)]);
        }
    }

    proptest! {
        #[test]
        fn after_an_exchange_it_is_what_the_tables_say(
            ranges in prop::collection::vec((0..48_u64, 1..12_u64, 0..64_u64, any::<bool>()), 1..20),
            there in prop::collection::btree_map(0..64_u64, (0..4_u64, any::<bool>()), 0..64),
            most in 0..5_usize
        ) {
            const BORDER: u64 = 24 * PAGE;
            let mut mappings = Mappings::default();
            for (at, count, to, write) in ranges {
                mappings.insert(at * PAGE, count * PAGE, to * PAGE, Rights { write, execute: false });
            }
            let before = pages(&mappings);
            // Many pages keep their frame.
            let translate = |page: u64| {
                let &(move_by, write) = there.get(&(page / PAGE))?;
                let physical = before.get(&(page / PAGE)).map_or(0, |(to, _)| to + move_by / 2 * 64 * PAGE);
                Some((physical, Rights { write, execute: false }))
            };
            // Applies the changes to a model of the process.
            let mut process = before.clone();
            let changes = mappings.exchange(most, BORDER, translate);
            for change in &changes {
                let range = change.address / PAGE..(change.address + change.length) / PAGE;
                prop_assert!(range.start >= 24 || range.end <= 24);
                for (number, page) in range.enumerate() {
                    match change.to {
                        Some((to, rights)) => process.insert(page, (to + number as u64 * PAGE, rights)),
                        None => process.remove(&page),
                    };
                }
            }
            prop_assert!(changes.iter().filter(|change| change.to.is_some()).count() <= most);
            prop_assert_eq!(&pages(&mappings), &process);
            for (page, (to, rights)) in process {
                let allowed = translate(page * PAGE);
                prop_assert!(allowed.is_some_and(|(at, allowed)| at == to && rights.are_within(allowed)));
            }
            // Pages that are equal there have stayed.
            for (&page, &(to, rights)) in &before {
                let is_same = |(at, now): (u64, Rights)| at == to && rights.are_within(now);
                let stays = translate(page * PAGE).is_some_and(is_same);
                prop_assert!(!stays || mappings.page(page * PAGE) == Some((to, rights)));
            }
        }

        #[test]
        fn mappings_equal_a_model_of_single_pages(
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
                        // Some pages have gone, others have become read-only.
                        let translate = |page: u64| match page / PAGE % 5 {
                            0 => None,
                            1 => model.get(&(page / PAGE)).map(|(to, _)| (*to, READ)),
                            _ => model.get(&(page / PAGE)).copied(),
                        };
                        let changes = mappings.revalidate(translate);
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
