//! Address spaces and the processes that show them, when there are fewer processes than address spaces.

use crate::mmu::bits;

/// The largest number of processes.
pub const MOST: usize = 48;
/// The bits of CR3 that hold the process-context identifier.
const IDENTIFIER: u64 = 0xFFF;

/// The address space of a process, and the translations that the process may have kept.
#[derive(Clone, Copy, Debug, Default)]
struct Tag {
    /// The page tables of the address space.
    root: Option<u64>,
    /// The identifier by which the processor would know the kept translations.
    identifier: Option<u64>,
    /// True if the mappings must be compared with the page tables before the process runs.
    is_stale: bool,
    used: u64,
}

/// The tags of all processes.
#[derive(Debug)]
pub struct Tags {
    /// An array, because processes may share the tags.
    tags: [Tag; MOST],
    count: usize,
    time: u64,
}

/// The process for an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Own(usize),
    /// A process that another address space has had.
    Other(usize),
}

impl Tags {
    /// Makes tags for so many processes, [`MOST`] at most.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self { tags: [Tag::default(); MOST], count: count.min(MOST), time: 0 }
    }

    /// Gives up all but the first processes, which are the ones that were chosen first.
    pub fn limit(&mut self, count: usize) {
        self.count = count.min(self.count);
    }

    /// Returns the index of an address space's process, if it has one.
    #[must_use]
    pub fn own(&self, cr3: u64) -> Option<usize> {
        let root = cr3 & bits::ADDRESS;
        self.tags[..self.count].iter().position(|tag| tag.root == Some(root))
    }

    /// Records a write of CR3. Translations are kept unless `flush` is set.
    pub fn load(&mut self, cr3: u64, flush: bool) {
        let (root, identifier) = (cr3 & bits::ADDRESS, cr3 & IDENTIFIER);
        for tag in &mut self.tags[..self.count] {
            let is_root = tag.root == Some(root);
            let is_known = tag.identifier == Some(identifier);
            // From now on this identifier finds no translation of another address space, and no
            // older one.
            if is_known && (flush || !is_root) || is_root && !is_known {
                tag.is_stale = true;
                tag.identifier = None;
            }
            if is_root {
                tag.identifier = Some(identifier);
            }
        }
    }

    /// Records that all translations were dropped.
    pub fn flush_all(&mut self) {
        self.tags.iter_mut().for_each(|tag| tag.is_stale = true);
    }

    /// Chooses the process for an address space: its own, or the one that was not used for longest.
    pub fn choose(&mut self, cr3: u64) -> Found {
        self.time += 1;
        let (found, index) = match self.own(cr3) {
            Some(index) => (Found::Own(index), index),
            None => {
                let oldest = self.tags[..self.count].iter().enumerate().min_by_key(|(_, tag)| tag.used);
                let index = oldest.map_or(0, |(index, _)| index);
                (Found::Other(index), index)
            }
        };
        let tag = &mut self.tags[index];
        if let Found::Other(_) = found {
            let (root, identifier) = (Some(cr3 & bits::ADDRESS), Some(cr3 & IDENTIFIER));
            *tag = Tag { root, identifier, ..Tag::default() };
        }
        tag.used = self.time;
        found
    }

    /// Marks a process whose mappings must be compared before it runs.
    pub fn make_stale(&mut self, index: usize) {
        self.tags[index].is_stale = true;
    }

    /// Returns true if the mappings of a process must be compared before it runs.
    #[must_use]
    pub fn is_stale(&self, index: usize) -> bool {
        self.tags[index].is_stale
    }

    /// Returns true if the mappings of a process must be compared now. The caller then compares
    /// them.
    pub fn take_stale(&mut self, index: usize) -> bool {
        std::mem::take(&mut self.tags[index].is_stale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0x10_0000;
    const B: u64 = 0x20_0000;

    fn stale(tags: &mut Tags, cr3: u64) -> bool {
        let Found::Own(index) = tags.choose(cr3) else { panic!("{cr3:#x} has none") };
        tags.take_stale(index)
    }

    fn two() -> Tags {
        let mut tags = Tags::new(3);
        for cr3 in [A | 1, B | 2] {
            tags.load(cr3, true);
            assert!(matches!(tags.choose(cr3), Found::Other(_)));
        }
        tags
    }

    #[test]
    fn translations_that_a_processor_may_keep_are_kept() {
        let mut tags = two();
        for cr3 in [A | 1, B | 2, A | 1] {
            tags.load(cr3, false);
            assert!(!stale(&mut tags, cr3));
        }
    }

    #[test]
    fn translations_that_a_processor_must_drop_are_compared() {
        let mut tags = two();
        tags.load(A | 1, true);
        assert!(stale(&mut tags, A | 1) && !stale(&mut tags, A | 1));
        // Another identifier does not find the translations of the first one.
        tags.load(A | 3, false);
        assert!(stale(&mut tags, A | 3));
        tags.load(A | 1, false);
        assert!(stale(&mut tags, A | 1));
        tags.flush_all();
        assert!(stale(&mut tags, A | 1) && stale(&mut tags, B | 2));
    }

    #[test]
    fn an_identifier_that_another_gets_is_lost() {
        let mut tags = two();
        tags.load(B | 1, true);
        assert!(stale(&mut tags, B | 1));
        tags.load(A | 1, false);
        assert!(stale(&mut tags, A | 1));
        // The translations of the first one were dropped though it was not loaded.
        tags.load(B | 1, true);
        tags.load(A | 1, true);
        assert!(stale(&mut tags, A | 1));
    }

    #[test]
    fn processes_are_chosen_in_order_and_given_up_from_the_end() {
        let mut tags = Tags::new(3);
        let roots = [A, B, 0x30_0000];
        assert_eq!(roots.map(|root| tags.choose(root)), [0, 1, 2].map(Found::Other));
        tags.limit(2);
        assert_eq!(roots.map(|root| tags.own(root)), [Some(0), Some(1), None]);
        assert_eq!(tags.choose(roots[2]), Found::Other(0));
    }

    #[test]
    fn the_one_that_was_not_used_for_longest_is_taken_over() {
        let mut tags = Tags::new(2);
        for cr3 in [A, B, A] {
            tags.choose(cr3);
        }
        let third = 0x30_0000;
        let Found::Other(index) = tags.choose(third) else { panic!("there are two") };
        assert_eq!(tags.own(third), Some(index));
        assert!(tags.own(A).is_some() && tags.own(B).is_none());
    }
}
