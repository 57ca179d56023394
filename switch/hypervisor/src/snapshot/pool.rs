//! Free pages of the pool: a list through the pages themselves. It takes no memory of its own, and any
//! number of pages can come and go.

use crate::address::HostPhys;

/// Access to the content of a free page.
pub trait Words {
    /// Returns the first word of a page.
    fn first_word(&mut self, page: HostPhys) -> &mut u64;
}

/// Pages of the pool that are free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeList {
    first: u64,
    count: u64,
}

impl FreeList {
    /// Returns a list without pages.
    #[must_use]
    pub const fn new() -> Self {
        Self { first: 0, count: 0 }
    }

    /// Returns the number of pages.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Adds a page, which is not the one at address 0.
    pub fn push(&mut self, words: &mut impl Words, page: HostPhys) {
        *words.first_word(page) = self.first;
        self.first = page.as_u64();
        self.count += 1;
    }

    /// Removes the page that was added last.
    pub fn pop(&mut self, words: &mut impl Words) -> Option<HostPhys> {
        if self.count == 0 {
            return None;
        }
        let page = HostPhys::new(self.first);
        self.first = *words.first_word(page);
        self.count -= 1;
        Some(page)
    }
}

/// Longest wait of a writer in TSC ticks: less than a millisecond, for interrupts wait with the writer.
const WAIT_MAX: u64 = 1 << 21;

/// TSC ticks for which writers may find no page before the snapshot becomes invalid: about a fifth of a
/// second, for one waiting CPU or for all.
pub const PATIENCE: u64 = 1 << 29;

/// Returns true if the reader should hurry.
#[must_use]
pub const fn is_low(free: u64, all: u64) -> bool {
    free < all / 4
}

/// Returns the TSC ticks that a writer waits after its page was copied. The wait is 0 while there are
/// enough pages, and grows as they become few, so that the reader keeps up.
#[must_use]
pub const fn wait(free: u64, all: u64) -> u64 {
    let little = all / 8;
    if free >= little { 0 } else { (little - free) * WAIT_MAX / little }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::address::{Address, PAGE_SIZE};

    #[derive(Default)]
    struct Memory(BTreeMap<HostPhys, u64>);

    impl Words for Memory {
        fn first_word(&mut self, page: HostPhys) -> &mut u64 {
            self.0.entry(page).or_insert(0xdead)
        }
    }

    #[test]
    fn writers_wait_when_little_is_left() {
        assert!(is_low(249, 1000) && !is_low(250, 1000));
        assert_eq!((wait(125, 1000), wait(1000, 1000), wait(0, 0)), (0, 0, 0));
        assert_eq!(wait(0, 1000), WAIT_MAX);
        assert!((1..WAIT_MAX).contains(&wait(100, 1000)) && wait(50, 1000) > wait(100, 1000));
    }

    #[test]
    fn added_pages_come_back_once() {
        let (mut memory, mut list) = (Memory::default(), FreeList::new());
        assert_eq!(list.pop(&mut memory), None);
        let page = |number: u64| HostPhys::new(0).saturating_add(number * PAGE_SIZE);
        (1..=3).for_each(|number| list.push(&mut memory, page(number)));
        assert_eq!(list.count(), 3);
        // The content of a page while it was in use does not matter.
        let popped = [list.pop(&mut memory), list.pop(&mut memory)];
        assert_eq!(popped, [Some(page(3)), Some(page(2))]);
        list.push(&mut memory, page(3));
        assert_eq!(
            [list.pop(&mut memory), list.pop(&mut memory), list.pop(&mut memory)],
            [Some(page(3)), Some(page(1)), None]
        );
        assert_eq!(list.count(), 0);
    }
}
