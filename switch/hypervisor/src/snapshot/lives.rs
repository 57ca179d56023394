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
use crate::paging::table::Exhausted;

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
        let (mut from, mut pages) = (GuestPhys::new(0), 0);
        while let Some((frame, known)) = self.next_with(pool, from, state::COPY) {
            let copy = HostPhys::new(known & state::COPY);
            if !pool.swap(copy, frame.identity()) {
                // The dead life had the same there. A frame that has a number needs no page for another.
                let _ = self.frames.set(pool, frame, 0);
                self.drop_copy(pool, copy);
            }
            from = frame.block_end(PageSize::Size4K);
            pages += 1;
        }
        self.bury(pool);
        self.view.renew(pool, &|block, size| of_memory(memory.ranges, block, size));
        Some(pages)
    }

    /// Makes the copies, which hold the dead life now, the dead life's pages. Without a page for an empty map
    /// they go back to the pool.
    fn bury(&mut self, pool: &mut impl Pool) {
        let count = core::mem::take(&mut self.counts.copies);
        if let Ok(empty) = FrameMap::new(pool, self.view.depth()) {
            let pages = core::mem::replace(&mut self.frames, empty);
            self.dead = Some(Dead { pages, is_lost: false, shed: GuestPhys::new(0) });
            self.counts.dead = count;
            return;
        }
        release_pages(&self.frames, pool);
        self.frames.clear(pool);
    }

    /// Returns true if the life that ended last is known.
    #[must_use]
    pub fn has_dead(&self) -> bool {
        !self.invalid && self.dead.is_some_and(|dead| !dead.is_lost)
    }

    /// Returns the page that holds what the life that ended last had in a frame. `None` if that life is not
    /// known: there was none, it was dropped, or it gave way to the snapshot.
    pub fn dead_content(&self, pool: &mut impl Pool, frame: GuestPhys) -> Option<HostPhys> {
        let dead = self.dead.filter(|_| self.has_dead())?;
        let places = [dead.pages.get(pool, frame), self.frames.get(pool, frame)];
        let page = places.into_iter().map(|known| known & state::COPY).find(|page| *page != 0);
        Some(page.map_or_else(|| frame.identity(), HostPhys::new))
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
        release_pages(&dead.pages, pool);
        dead.pages.release(pool);
        self.counts.dead = 0;
    }

    /// Gives back at most so many pages of the dead life, which is lost with the first of them. Returns false
    /// if there is none.
    pub fn shed_dead(&mut self, pool: &mut impl Pool, most: u64) -> bool {
        let Some(dead) = self.dead.as_mut() else { return false };
        dead.is_lost = true;
        for _ in 0..most {
            let Some((frame, known)) = next_with(&dead.pages, pool, dead.shed, state::COPY) else {
                self.drop_dead(pool);
                return true;
            };
            let _ = dead.pages.set(pool, frame, 0);
            pool.release(HostPhys::new(known & state::COPY));
            dead.shed = frame.block_end(PageSize::Size4K);
            self.counts.dead -= 1;
        }
        true
    }
}

/// Gives the pages of a map back, and leaves their numbers.
fn release_pages(map: &FrameMap, pool: &mut impl Pool) {
    let mut from = GuestPhys::new(0);
    while let Some((frame, known)) = next_with(map, pool, from, state::COPY) {
        pool.release(HostPhys::new(known & state::COPY));
        from = frame.block_end(PageSize::Size4K);
    }
}
