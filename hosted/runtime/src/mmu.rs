//! Walks the guest's page tables as the processor would: four levels, pages of 4 KiB, 2 MiB and 1 GiB.

use crate::{
    layout::PAGE,
    memory::{Memory, Rights},
};

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    Execute,
}

/// The privilege of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    Kernel,
    User,
}

/// Bits of a page table's entry (SDM 3A 4.5).
pub mod bits {
    pub const PRESENT: u64 = 1;
    pub const WRITE: u64 = 1 << 1;
    pub const USER: u64 = 1 << 2;
    pub const ACCESSED: u64 = 1 << 5;
    pub const DIRTY: u64 = 1 << 6;
    /// The entry maps a large page.
    pub const LARGE: u64 = 1 << 7;
    pub const NO_EXECUTE: u64 = 1 << 63;
    /// The bits of the physical address.
    pub const ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;
}

/// Bits of a page fault's error code (SDM 3A 4.7).
mod error {
    pub const PRESENT: u32 = 1;
    pub const WRITE: u32 = 2;
    pub const USER: u32 = 4;
    pub const FETCH: u32 = 16;
}

/// The result of a walk through the page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    pub physical: u64,
    /// The size of the page, in bytes.
    pub size: u64,
    /// The physical address of the last entry.
    pub entry: u64,
    /// True if all levels allow writes and the entry is marked dirty.
    pub write: bool,
    /// True if all levels allow writes.
    pub may_write: bool,
    /// True if all levels allow code.
    pub execute: bool,
}

/// Translates an address and marks the entries used.
///
/// # Errors
/// The error code of the page fault that the guest gets.
pub fn walk(
    memory: &Memory,
    root: u64,
    address: u64,
    access: Access,
    privilege: Privilege,
) -> Result<Translation, u32> {
    loop {
        // The entry was changed by another processor in between, so the walk begins again.
        if let Some(found) = try_walk(memory, root, address, access, privilege) {
            return found;
        }
    }
}

/// Walks the tables once. Returns nothing if the last entry was changed meanwhile.
fn try_walk(
    memory: &Memory,
    root: u64,
    address: u64,
    access: Access,
    privilege: Privilege,
) -> Option<Result<Translation, u32>> {
    let code = code(access, privilege);
    if address >> 47 != 0 {
        return Some(Err(code));
    }
    let mut table = root & bits::ADDRESS;
    let (mut write, mut user, mut execute) = (true, true, true);
    for shift in [39, 30, 21, 12] {
        let entry_at = table + (address >> shift & 511) * 8;
        let entry = memory.read_long(entry_at).unwrap_or(0);
        if entry & bits::PRESENT == 0 {
            return Some(Err(code));
        }
        write &= entry & bits::WRITE != 0;
        user &= entry & bits::USER != 0;
        execute &= entry & bits::NO_EXECUTE == 0;
        let is_leaf = shift == 12 || (shift < 39 && entry & bits::LARGE != 0);
        if !is_leaf {
            table = entry & bits::ADDRESS;
            continue;
        }
        let denied = (privilege == Privilege::User && !user)
            || (access == Access::Write && !write)
            || (access == Access::Execute && !execute);
        if denied {
            return Some(Err(code | error::PRESENT));
        }
        let mark = if access == Access::Write { bits::ACCESSED | bits::DIRTY } else { bits::ACCESSED };
        if entry & mark != mark && memory.contains(entry_at, 8) && !memory.mark(entry_at, entry, mark) {
            return None;
        }
        let size = 1 << shift;
        let base = entry & bits::ADDRESS & !(size - 1);
        return Some(Ok(Translation {
            physical: base + (address & (size - 1)),
            size,
            entry: entry_at,
            write: write && (entry | mark) & bits::DIRTY != 0,
            may_write: write,
            execute,
        }));
    }
    Some(Err(code))
}

/// A reader of page tables that says what programs may do with pages. It marks no entries. Pages in
/// order are read fast.
#[derive(Debug)]
pub struct TableReader<'a> {
    memory: &'a Memory,
    root: u64,
    /// The last table with the rights of the levels above it, and the 2 MiB that it covers.
    table: Option<(u64, Option<Upper>)>,
}

#[derive(Clone, Copy, Debug)]
struct Upper {
    /// The entry of a table or of a large page.
    entry: u64,
    size: u64,
    write: bool,
    execute: bool,
}

impl<'a> TableReader<'a> {
    /// Makes a reader for one address space.
    #[must_use]
    pub fn new(memory: &'a Memory, root: u64) -> Self {
        Self { memory, root, table: None }
    }

    /// Returns the frame to which a page leads, and its rights. The page counts as writable if its
    /// entry is marked dirty, and as mapped if its entry is marked used.
    pub fn page(&mut self, page: u64) -> Option<(u64, Rights)> {
        const USED: u64 = bits::PRESENT | bits::USER | bits::ACCESSED;
        let of = page >> 21;
        let upper = match self.table {
            Some((known, upper)) if known == of => upper,
            _ => {
                let upper = self.upper(page);
                self.table = Some((of, upper));
                upper
            }
        }?;
        let entry = match upper.size {
            PAGE => self.memory.read_long((upper.entry & bits::ADDRESS) + (page >> 12 & 511) * 8)?,
            _ => upper.entry,
        };
        if entry & USED != USED {
            return None;
        }
        let within = page & (upper.size - 1) & !(PAGE - 1);
        Some((
            (entry & bits::ADDRESS & !(upper.size - 1)) + within,
            Rights {
                write: upper.write && entry & bits::WRITE != 0 && entry & bits::DIRTY != 0,
                execute: upper.execute && entry & bits::NO_EXECUTE == 0,
            },
        ))
    }

    fn upper(&self, page: u64) -> Option<Upper> {
        const NEEDED: u64 = bits::PRESENT | bits::USER;
        let mut upper = Upper { entry: self.root, size: PAGE, write: true, execute: true };
        for shift in [39, 30, 21] {
            let at = (upper.entry & bits::ADDRESS) + (page >> shift & 511) * 8;
            let entry = self.memory.read_long(at)?;
            if entry & NEEDED != NEEDED {
                return None;
            }
            upper.entry = entry;
            if shift < 39 && entry & bits::LARGE != 0 {
                return Some(Upper { size: 1 << shift, ..upper });
            }
            upper.write &= entry & bits::WRITE != 0;
            upper.execute &= entry & bits::NO_EXECUTE == 0;
        }
        Some(upper)
    }
}

/// Returns the error code of a program's fault where its kernel has mapped nothing.
#[must_use]
pub fn missing(access: Access) -> u32 {
    code(access, Privilege::User)
}

fn code(access: Access, privilege: Privilege) -> u32 {
    let access = match access {
        Access::Read => 0,
        Access::Write => error::WRITE,
        Access::Execute => error::FETCH,
    };
    access | if privilege == Privilege::User { error::USER } else { 0 }
}

/// Returns the number of pages before a page of 4 KiB, and from the page on, that its table maps
/// alike to adjacent memory. These pages are marked used, as a processor may mark them that reads
/// ahead.
#[must_use]
pub fn neighbours(memory: &Memory, of: &Translation, most: u64) -> (u64, u64) {
    const SAME: u64 = bits::PRESENT | bits::WRITE | bits::USER | bits::NO_EXECUTE | bits::LARGE;
    let own = memory.read_long(of.entry).unwrap_or(0);
    let index = of.entry / 8 % 512;
    let follows = |step: i64| {
        let at = of.entry.wrapping_add_signed(step * 8);
        let Some(entry) = memory.read_long(at) else { return false };
        let physical = (own & bits::ADDRESS).wrapping_add_signed(step * PAGE.cast_signed());
        let dirty = !of.write || entry & bits::DIRTY != 0;
        let same = entry & SAME == own & SAME && entry & bits::ADDRESS == physical && dirty;
        let is_used = entry & bits::ACCESSED != 0;
        same && memory.contains(physical, PAGE) && (is_used || memory.mark(at, entry, bits::ACCESSED))
    };
    let after = (1..(512 - index).min(most)).take_while(|&step| follows(step.cast_signed())).count() as u64;
    let before = (1..=index.min(most)).take_while(|&step| follows(-step.cast_signed())).count() as u64;
    (before, after + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::with_memory;

    /// One table of each level, and an address whose entries are the first in each.
    const TABLES: [u64; 4] = [0x8_0000, 0x8_1000, 0x8_2000, 0x8_3000];
    const PAGES: u64 = 8;
    const LARGE_PAGE: u64 = 2 << 20;
    const ANY: u64 =
        bits::PRESENT | bits::WRITE | bits::USER | bits::ACCESSED | bits::DIRTY | bits::NO_EXECUTE;

    /// Bits of an entry. Most of the bits that allow more are set.
    fn flags() -> impl Strategy<Value = u64> {
        const MOST: u64 = ANY & !bits::NO_EXECUTE;
        (any::<u64>(), any::<u64>()).prop_map(|(one, other)| MOST ^ (one & other & ANY))
    }

    proptest! {
        /// The rights that survive a change of the address space are those that a processor uses
        /// without changing an entry.
        #[test]
        fn lookup_without_marking_agrees_with_a_processor(
            upper in prop::array::uniform3(flags()),
            leaves in prop::collection::vec((flags(), 0..16_u64), PAGES as usize),
            large in flags(),
        ) {
            with_memory(|memory| {
                for level in 0..3 {
                    memory.write_long(TABLES[level], TABLES[level + 1] | upper[level]).expect("a table");
                }
                memory.write_long(TABLES[2] + 8, bits::LARGE | large).expect("a large page");
                for (index, (flags, frame)) in (0..).zip(&leaves) {
                    memory.write_long(TABLES[3] + index * 8, (frame * PAGE) | flags).expect("an entry");
                }
                let mut tables = TableReader::new(memory, TABLES[0]);
                for page in (0..PAGES).map(|number| number * PAGE).chain([LARGE_PAGE + 3 * PAGE]) {
                    let is_small = page < LARGE_PAGE;
                    let entry_at = if is_small { TABLES[3] + page / PAGE * 8 } else { TABLES[2] + 8 };
                    let was = memory.read_long(entry_at);
                    // The frame that the processor reaches if the entry stays unchanged.
                    let goes = |access| {
                        let found = walk(memory, TABLES[0], page, access, Privilege::User).ok();
                        let is_marked = memory.read_long(entry_at) != was;
                        memory.write_long(entry_at, was.unwrap_or(0)).expect("the entry");
                        found.filter(|_| !is_marked).map(|found| found.physical)
                    };
                    let rights = Rights {
                        write: goes(Access::Write).is_some(),
                        execute: goes(Access::Execute).is_some(),
                    };
                    let expected = goes(Access::Read).map(|physical| (physical, rights));
                    prop_assert_eq!(tables.page(page), expected, "{:#x}", page);
                }
                Ok(())
            })?;
        }
    }
}
