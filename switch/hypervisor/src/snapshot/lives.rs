//! Lives of a machine that goes back to its snapshot. At a rollback the pages that were written and their
//! copies are swapped. So memory is as it was at the instant, and what were copies hold the life that ended:
//! the *dead* one. All of memory is protected again, before the next life begins.
//!
//! The next life leaves what the dead one had in memory in one of three places:
//!
//! 1. a page of the pool, where the dead life had written;
//! 2. the copy of the instant, where only the next life has written;
//! 3. the frame itself, where neither has.
//!
//! A frame that was free at the instant has no copy, and the dead life's content stays in it after the
//! rollback. So it moves to a page of the pool before the next life writes there.

use super::frames::FrameMap;
use super::{Memory, Pool, Snapshot, next_with, of_memory, state};
use crate::address::{Address, GuestPhys, HostPhys, PageSize};
use crate::paging::format::Format;
use crate::paging::table::{Depth, Exhausted};

/// Pages of the dead life that are given back at a time when the pool is empty.
pub(super) const SHED: u64 = 256;

/// The life that ended last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dead {
    /// By frame: [`state::COPY`] is the page with the dead life's content.
    pages: FrameMap,
    /// True once pages were given back.
    is_lost: bool,
    /// End of the frames whose pages were given back.
    shed: GuestPhys,
}

impl<F: Format<Address = GuestPhys>> Snapshot<F> {
    /// Puts memory back to the instant, keeps what it held as the dead life's, and protects it again. The
    /// caller keeps all CPUs and devices from writing meanwhile, and has CPUs forget their translations.
    /// Returns the number of pages; `None`, without any change, if the snapshot is not complete.
    pub fn put_back(&mut self, pool: &mut impl Pool, memory: Memory<'_>) -> Option<u64> {
        if self.invalid || self.counts.read != 0 {
            return None;
        }
        self.drop_dead(pool);
        let (pages, differing) = swap_copies(&self.frames, pool);
        self.dead = bury(&mut self.frames, pool, self.view.depth());
        self.counts.copies = 0;
        self.counts.dead = if self.dead.is_some() { differing } else { 0 };
        self.view.renew(pool, &|block, size| of_memory(memory.ranges, block, size));
        Some(pages)
    }

    /// Returns true if the life that ended last is known.
    #[must_use]
    pub fn has_dead(&self) -> bool {
        !self.invalid && self.dead.is_some_and(|dead| !dead.is_lost)
    }

    /// Returns the page that holds what the life that ended last had in a frame. `None` if that life is not
    /// known: there was none, it was dropped, or it gave way to the snapshot.
    pub fn dead_content(&self, pool: &mut impl Pool, frame: GuestPhys) -> Option<HostPhys> {
        self.dead.filter(|_| self.has_dead()).map(|dead| dead.content(pool, &self.frames, frame))
    }

    /// Copies what the dead life had in a frame that was free at the instant, before the first write to it.
    pub(super) fn keep_dead(&mut self, pool: &mut impl Pool, frame: GuestPhys) -> Result<(), Exhausted> {
        let Some(dead) = self.dead.filter(|_| self.has_dead()) else { return Ok(()) };
        let known = dead.pages.get(pool, frame);
        if known & state::COPY != 0 {
            return Ok(());
        }
        // The number first: it may need a table.
        dead.pages.set(pool, frame, known | state::WRITTEN)?;
        let page = pool.allocate().ok_or(Exhausted)?;
        pool.copy(frame.identity(), page);
        dead.pages.set(pool, frame, state::WRITTEN | page.as_u64())?;
        self.counts.dead += 1;
        Ok(())
    }

    /// Gives all pages of the dead life back.
    pub fn drop_dead(&mut self, pool: &mut impl Pool) {
        let Some(dead) = self.dead.take() else { return };
        dead.release(pool);
        self.counts.dead = 0;
    }

    /// Gives back at most so many pages of the dead life, which is lost with the first of them. Returns false
    /// if there is none.
    pub fn shed_dead(&mut self, pool: &mut impl Pool, most: u64) -> bool {
        let Some(dead) = self.dead.as_mut() else { return false };
        let shed = dead.shed(pool, most);
        self.counts.dead -= shed;
        if shed < most {
            self.drop_dead(pool);
        }
        true
    }
}

// What follows is the same for each format of the nested tables, and is compiled once.

impl Dead {
    /// Returns the page with the content of a frame. `frames` are those of the snapshot.
    #[inline(never)]
    fn content(&self, pool: &mut impl Pool, frames: &FrameMap, frame: GuestPhys) -> HostPhys {
        let places = [self.pages.get(pool, frame), frames.get(pool, frame)];
        let page = places.into_iter().map(|known| known & state::COPY).find(|page| *page != 0);
        page.map_or_else(|| frame.identity(), HostPhys::new)
    }

    /// Gives back at most so many pages, and returns their number. The life is lost with the first of them.
    #[inline(never)]
    fn shed(&mut self, pool: &mut impl Pool, most: u64) -> u64 {
        self.is_lost = true;
        for count in 0..most {
            let Some((frame, known)) = next_with(&self.pages, pool, self.shed, state::COPY) else {
                return count;
            };
            let _ = self.pages.set(pool, frame, 0);
            pool.release(HostPhys::new(known & state::COPY));
            self.shed = frame.block_end(PageSize::Size4K);
        }
        most
    }

    /// Gives all pages back, and the map.
    #[inline(never)]
    fn release(self, pool: &mut impl Pool) {
        release_pages(&self.pages, pool);
        self.pages.release(pool);
    }
}

/// Swaps every page that has a copy with that copy. Returns the number of the pages, and of those that
/// differed. Other copies go back to the pool.
#[inline(never)]
fn swap_copies(frames: &FrameMap, pool: &mut impl Pool) -> (u64, u64) {
    let (mut from, mut pages, mut differing) = (GuestPhys::new(0), 0, 0);
    while let Some((frame, known)) = next_with(frames, pool, from, state::COPY) {
        let copy = HostPhys::new(known & state::COPY);
        if pool.swap(copy, frame.identity()) {
            differing += 1;
        } else {
            // The dead life had the same there. A frame that has a number needs no page for another.
            let _ = frames.set(pool, frame, 0);
            pool.release(copy);
        }
        from = frame.block_end(PageSize::Size4K);
        pages += 1;
    }
    (pages, differing)
}

/// Makes the copies, which hold the dead life now, the dead life's pages, and leaves an empty map. Without a
/// page for that they go back to the pool.
#[inline(never)]
fn bury(frames: &mut FrameMap, pool: &mut impl Pool, depth: Depth) -> Option<Dead> {
    let Ok(empty) = FrameMap::new(pool, depth) else {
        release_pages(frames, pool);
        frames.clear(pool);
        return None;
    };
    let pages = core::mem::replace(frames, empty);
    Some(Dead { pages, is_lost: false, shed: GuestPhys::new(0) })
}

/// Gives the pages of a map back, and leaves their numbers.
fn release_pages(map: &FrameMap, pool: &mut impl Pool) {
    let mut from = GuestPhys::new(0);
    while let Some((frame, known)) = next_with(map, pool, from, state::COPY) {
        pool.release(HostPhys::new(known & state::COPY));
        from = frame.block_end(PageSize::Size4K);
    }
}
