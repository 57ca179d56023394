//! One number for each frame of memory, in a tree of tables that has only what was set.

use super::Pool;
use crate::address::{Address, GuestPhys, HostPhys, PageSize, TABLE_ENTRIES};
use crate::paging::table::{Depth, Exhausted, TablePages};

/// Numbers of frames; 0 where none was set.
#[derive(Clone, Copy, Debug)]
pub struct FrameMap {
    root: HostPhys,
    top: PageSize,
}

impl FrameMap {
    /// Returns a map without numbers. It covers the addresses of nested tables of `depth`.
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for the root.
    pub fn new(pages: &mut impl TablePages, depth: Depth) -> Result<Self, Exhausted> {
        Ok(Self { root: empty_table(pages)?, top: depth.root_entry() })
    }

    /// Returns the number of a frame.
    pub fn get(&self, pages: &mut impl TablePages, frame: GuestPhys) -> u64 {
        let (mut table, mut size) = (self.root, self.top);
        loop {
            let value = pages.table(table)[frame.index_at(size) % TABLE_ENTRIES];
            match size.smaller() {
                Some(smaller) if value != 0 => (table, size) = (HostPhys::new(value), smaller),
                _ => return value,
            }
        }
    }

    /// Sets the number of a frame.
    ///
    /// # Errors
    /// [`Exhausted`] if there is no page for a table: never where a number has been set before.
    pub fn set(&self, pages: &mut impl TablePages, frame: GuestPhys, value: u64) -> Result<(), Exhausted> {
        let (mut table, mut size) = (self.root, self.top);
        while let Some(smaller) = size.smaller() {
            let index = frame.index_at(size) % TABLE_ENTRIES;
            let mut child = pages.table(table)[index];
            if child == 0 {
                child = empty_table(pages)?.as_u64();
                pages.table(table)[index] = child;
            }
            (table, size) = (HostPhys::new(child), smaller);
        }
        pages.table(table)[frame.index_at(PageSize::Size4K) % TABLE_ENTRIES] = value;
        Ok(())
    }

    /// Returns the first frame at or after `from` that has a number, and the number.
    pub fn next(&self, pages: &mut impl TablePages, from: GuestPhys) -> Option<(GuestPhys, u64)> {
        let mut frame = from.align_down(PageSize::Size4K);
        let end = self.top.bytes().saturating_mul(TABLE_ENTRIES as u64);
        while frame.as_u64() < end {
            let (mut table, mut size) = (self.root, self.top);
            let value = loop {
                let value = pages.table(table)[frame.index_at(size) % TABLE_ENTRIES];
                match size.smaller() {
                    Some(smaller) if value != 0 => (table, size) = (HostPhys::new(value), smaller),
                    _ => break value,
                }
            };
            if value != 0 {
                return Some((frame, value));
            }
            frame = frame.block_end(size);
        }
        None
    }

    /// Forgets every number. All tables but the root go back to the pool.
    pub fn clear(&self, pool: &mut impl Pool) {
        for level in [PageSize::Size2M, PageSize::Size1G, PageSize::Size512G, PageSize::Size256T] {
            self.release_tables(pool, level);
        }
    }

    /// Gives the map up, with its root.
    pub fn release(self, pool: &mut impl Pool) {
        self.clear(pool);
        pool.release(self.root);
    }

    /// Releases the tables to which entries of this span lead. The tables below are gone already.
    fn release_tables(&self, pool: &mut impl Pool, level: PageSize) {
        let mut frame = GuestPhys::new(0);
        let end = self.top.bytes().saturating_mul(TABLE_ENTRIES as u64);
        while frame.as_u64() < end {
            let (mut table, mut size) = (self.root, self.top);
            loop {
                let index = frame.index_at(size) % TABLE_ENTRIES;
                let value = pool.table(table)[index];
                if size == level && value != 0 {
                    pool.table(table)[index] = 0;
                    pool.release(HostPhys::new(value));
                }
                match size.smaller().filter(|_| size > level && value != 0) {
                    Some(smaller) => (table, size) = (HostPhys::new(value), smaller),
                    None => break,
                }
            }
            frame = frame.block_end(size);
        }
    }
}

fn empty_table(pages: &mut impl TablePages) -> Result<HostPhys, Exhausted> {
    let table = pages.allocate().ok_or(Exhausted)?;
    pages.table(table).fill(0);
    Ok(table)
}
