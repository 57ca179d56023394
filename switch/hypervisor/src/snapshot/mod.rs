//! A snapshot of memory: the content of every page at one instant, while the machine writes on.
//!
//! From the instant on the machine runs on a [`view::View`], in which no page can be written whose content
//! must be kept. A page is copied into the pool before the first write to it. The reader, who streams the
//! snapshot out ([`Snapshot::read`]), gets the copy where there is one, and the page itself where there is
//! none. A frame that has been read needs no copy any more. If the pool is too small, the snapshot is given
//! up and the machine runs on: never the other way round.
//!
//! Instead of being read, a snapshot may be the target of rollbacks ([`Snapshot::put_back`]). The memory of
//! the life that ended last is kept as well ([`Snapshot::dead_content`]).
//!
//! With a dirty log, the frames that were written since the instant are known ([`Snapshot::next_written`]).
//! The next snapshot must hold those.
//!
//! The caller holds one lock around everything here, and no function waits.

pub mod dirty_log;
pub mod dispatch;
pub mod frames;
pub mod free;
#[cfg(feature = "fault-injection")]
mod hashes;
mod instant;
mod ledger;
pub mod live;
mod lives;
pub mod pool;
mod recording;
pub mod rendezvous;
pub mod rollback;
pub(crate) mod system_memory;
#[cfg(test)]
pub(crate) mod tests;
pub mod view;

use core::ops::Range;

use crate::address::{Address, GuestPhys, HostPhys, PAGE_SIZE, PageSize};
use crate::argument::array;
use crate::paging::format::Format;
use crate::paging::table::{Exhausted, PageTable, TablePages};
use frames::FrameMap;
use free::FreeMap;
use lives::Dead;
use mercury_abi::code::Code;
use mercury_abi::gate::OwnedRange;
use view::{Access, Found, Keep, View};

/// The pool of pages, and access to the memory that the snapshot keeps.
pub trait Pool: TablePages {
    /// Gives a page back that came from [`TablePages::allocate`].
    fn release(&mut self, page: HostPhys);

    /// Copies a page from one address to another.
    fn copy(&mut self, from: HostPhys, to: HostPhys);

    /// Makes a page all zeros.
    fn clear(&mut self, page: HostPhys);

    /// Swaps the content of two pages. Returns true if it differed.
    fn swap(&mut self, one: HostPhys, other: HostPhys) -> bool;
}

/// Memory of the system that a snapshot keeps. It does not change while there is a snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory<'a> {
    /// Ranges of pages, ascending.
    pub ranges: &'a [OwnedRange],
    /// Pages that were free at the instant.
    pub free: FreeMap<'a>,
}

impl Memory<'static> {
    /// No memory, as long as there is no snapshot.
    pub(crate) const NONE: Self = Self { ranges: &[], free: FreeMap(&[]) };

    /// Checks the arrays that the driver passes: ranges, and pieces of the map of free pages.
    ///
    /// # Safety
    /// As for [`array`], until the memory is not used any more.
    #[inline(never)]
    unsafe fn of(ranges: u64, range_count: u64, free: u64, free_count: u64) -> Result<Self, Code> {
        // SAFETY: the caller's promise.
        unsafe { Ok(Self { ranges: array(ranges, range_count)?, free: FreeMap(array(free, free_count)?) }) }
    }

    /// Returns the number of pages.
    fn pages(&self) -> u64 {
        self.ranges.iter().map(|range| range.pages).sum()
    }
}

/// Outcome of a nested fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The page was copied, and can be written.
    Copied,
    /// The access can be made without a copy.
    Open,
    /// The page stands in for the hypervisor's memory: see [`crate::paging::identity::IdentityMap::sink`],
    /// and then [`Snapshot::adopt`].
    Hidden,
    /// No page is mapped: see [`crate::paging::identity::IdentityMap::fill`], and then [`Snapshot::adopt`].
    Absent,
    /// The pool is empty, and nothing has changed. The caller donates pages and tries again, or calls
    /// [`Snapshot::invalidate`].
    Exhausted,
}

/// State of a frame, as a number in the [`FrameMap`]. An untouched frame has 0.
mod state {
    /// The frame was written since the instant.
    pub const WRITTEN: u64 = 1 << 0;
    /// The frame has been read.
    pub const READ: u64 = 1 << 1;
    /// Host-physical address of the copy.
    pub const COPY: u64 = 0x000f_ffff_ffff_f000;
}

/// Restriction of pages at the instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracking {
    /// Only pages are restricted whose content must be copied.
    Off,
    /// All pages are restricted, until the first write to each, which the dirty log notes.
    On,
}

/// Most blocks that one call passes over. Interrupts are off meanwhile.
const STEPS: usize = 1 << 14;

/// Costs of the snapshot so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Copies that are in the pool now.
    pub copies: u64,
    /// Copies made in all.
    pub copied: u64,
    /// Number of frames that were read.
    pub read: u64,
    /// Pages in the pool that hold memory of the life that ended last.
    pub dead: u64,
}

/// A snapshot over the tables of an identity map.
#[derive(Clone, Debug)]
pub struct Snapshot<F> {
    view: View<F>,
    frames: FrameMap,
    /// The life that ended last, after a rollback.
    dead: Option<Dead>,
    tracking: Tracking,
    /// True once the snapshot has lost content of the instant.
    invalid: bool,
    /// Frames that were read in ascending order, from any start. All frames of it have been read, or were
    /// free.
    streamed: Range<GuestPhys>,
    /// End of the frames without copies, once the snapshot is invalid.
    dropped: GuestPhys,
    counts: Counts,
}

impl<F: Format<Address = GuestPhys>> Snapshot<F> {
    /// Prepares a snapshot over the tables of the identity map. The instant is when all processors have
    /// loaded [`Snapshot::root`] and forgotten older translations, with none of them in the system in
    /// between.
    ///
    /// # Errors
    /// [`Exhausted`] if the pool has not enough pages to begin with.
    pub fn new(
        pool: &mut impl Pool,
        base: PageTable<F>,
        memory: Memory<'_>,
        tracking: Tracking,
    ) -> Result<Self, Exhausted> {
        let keeps = |block, size| of_memory(memory.ranges, block, size);
        let view = View::new(pool, base, &keeps)?;
        let frames = FrameMap::new(pool, base.depth())?;
        let streamed = GuestPhys::new(0)..GuestPhys::new(0);
        let dropped = GuestPhys::new(0);
        Ok(Self {
            view,
            frames,
            dead: None,
            tracking,
            invalid: false,
            streamed,
            dropped,
            counts: Counts::default(),
        })
    }

    /// Returns the root of the view: the address in nCR3 or in the EPT pointer.
    #[must_use]
    pub const fn root(&self) -> HostPhys {
        self.view.root()
    }

    /// Returns the view that CPUs run on.
    #[must_use]
    pub const fn view(&self) -> &View<F> {
        &self.view
    }

    /// Returns the costs so far.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns true if the snapshot holds all that memory held at the instant.
    #[must_use]
    pub const fn is_exact(&self) -> bool {
        !self.invalid
    }

    /// Answers a nested fault at `gpa`. Where the pool is empty, the dead life gives way to the snapshot.
    pub fn fault(
        &mut self,
        pool: &mut impl Pool,
        memory: Memory<'_>,
        gpa: GuestPhys,
        access: Access,
    ) -> Outcome {
        loop {
            let outcome = self.answer(pool, memory, gpa, access);
            if outcome != Outcome::Exhausted || !self.shed_dead(pool, lives::SHED) {
                return outcome;
            }
        }
    }

    fn answer(
        &mut self,
        pool: &mut impl Pool,
        memory: Memory<'_>,
        gpa: GuestPhys,
        access: Access,
    ) -> Outcome {
        let (streamed, tracking, invalid) = (&self.streamed, self.tracking, self.invalid);
        let has_dead = self.has_dead();
        let keeps = |block: GuestPhys, size: PageSize| {
            let read = if tracking == Tracking::Off { part_of(streamed, block, size) } else { Part::None };
            let is_free = tracking == Tracking::Off && !has_dead && memory.free.has(block, size);
            match (of_memory(memory.ranges, block, size), read) {
                _ if invalid || is_free => Keep::Nothing,
                (_, Part::Whole) => Keep::Nothing,
                (Keep::Everything, Part::Some) => Keep::Something,
                (keep, _) => keep,
            }
        };
        match self.view.open(pool, gpa, access, &keeps) {
            Ok(Found::Open) => Outcome::Open,
            Ok(Found::Hidden) => Outcome::Hidden,
            Ok(Found::Absent) => Outcome::Absent,
            Ok(Found::Kept(slot)) => match self.keep(pool, memory, gpa.align_down(PageSize::Size4K)) {
                Ok(outcome) => {
                    self.view.permit(pool, slot);
                    outcome
                }
                Err(Exhausted) => Outcome::Exhausted,
            },
            Err(Exhausted) => Outcome::Exhausted,
        }
    }

    /// Copies a frame if the snapshot still needs its content, and notes that the frame is written.
    fn keep(
        &mut self,
        pool: &mut impl Pool,
        memory: Memory<'_>,
        frame: GuestPhys,
    ) -> Result<Outcome, Exhausted> {
        let known = self.frames.get(pool, frame);
        let is_free = memory.free.has(frame, PageSize::Size4K);
        let is_kept = known & (state::READ | state::COPY) != 0 || self.streamed.contains(&frame) || is_free;
        if is_free {
            self.keep_dead(pool, frame)?;
        }
        self.frames.set(pool, frame, known | state::WRITTEN)?;
        if is_kept {
            return Ok(Outcome::Open);
        }
        let Some(copy) = pool.allocate() else {
            self.frames.set(pool, frame, known)?;
            return Err(Exhausted);
        };
        pool.copy(frame.identity(), copy);
        self.frames.set(pool, frame, state::WRITTEN | copy.as_u64())?;
        self.counts.copies += 1;
        self.counts.copied += 1;
        Ok(Outcome::Copied)
    }

    /// Returns the page that holds the content of a frame at the instant. `None` in three cases: the frame
    /// has been read; it was free and the reader, in ascending order, has passed it; the snapshot was given
    /// up.
    pub fn content(&self, pool: &mut impl Pool, frame: GuestPhys) -> Option<HostPhys> {
        let known = self.frames.get(pool, frame);
        if self.invalid || known & state::READ != 0 || self.streamed.contains(&frame) {
            return None;
        }
        let copy = HostPhys::new(known & state::COPY);
        Some(if known & state::COPY != 0 { copy } else { frame.identity() })
    }

    /// Returns true if the frame belongs to `memory`, its content at the instant matters, and it has not been
    /// read yet.
    pub fn is_wanted(&self, pool: &mut impl Pool, memory: Memory<'_>, frame: GuestPhys) -> bool {
        next_of_memory(memory.ranges, frame) == Some(frame)
            && !memory.free.has(frame, PageSize::Size4K)
            && self.content(pool, frame).is_some()
    }

    /// Copies the content of a frame at the instant to `to`, zeros if the frame was free. From here on the
    /// frame can be written without a copy. Returns `false` if there is no content ([`Snapshot::content`]).
    ///
    /// In ascending order, from any start, reading costs no page. In another order the snapshot notes the
    /// frame. Where the pool has no page for the note, the frame can be read once more.
    pub fn read(&mut self, pool: &mut impl Pool, memory: Memory<'_>, frame: GuestPhys, to: HostPhys) -> bool {
        self.reach(pool, memory, frame);
        let Some(source) = self.content(pool, frame) else { return false };
        let known = self.frames.get(pool, frame);
        let in_order = frame == self.streamed.end;
        if in_order {
            self.streamed.end = frame.block_end(PageSize::Size4K);
        }
        if known != 0 || !in_order {
            // A frame that has a number has room for another one.
            let _ = self.frames.set(pool, frame, known & state::WRITTEN | state::READ);
        }
        match memory.free.has(frame, PageSize::Size4K) {
            true => pool.clear(to),
            false => pool.copy(source, to),
        }
        self.counts.read += 1;
        if known & state::COPY != 0 {
            self.drop_copy(pool, source);
        }
        true
    }

    /// Moves the end of the streamed to `frame` if all frames between were read or free; or as far as
    /// [`STEPS`] go.
    fn reach(&mut self, pool: &mut impl Pool, memory: Memory<'_>, frame: GuestPhys) {
        if self.streamed.is_empty() {
            self.streamed = frame..frame;
            return;
        }
        for _ in 0..STEPS {
            let next = next_of_memory(memory.ranges, self.streamed.end);
            let Some(at) = next.filter(|at| *at <= frame) else { return };
            let large = at.is_aligned(PageSize::Size2M)
                && at.block_end(PageSize::Size2M) <= frame
                && memory.free.has(at, PageSize::Size2M);
            let passes = |pool| self.frames.get(pool, at) & state::READ != 0;
            self.streamed.end = match large {
                _ if at == frame => at,
                true => at.block_end(PageSize::Size2M),
                false if memory.free.has(at, PageSize::Size4K) || passes(pool) => {
                    at.block_end(PageSize::Size4K)
                }
                false => return,
            };
            if at == frame {
                return;
            }
        }
    }

    /// Gives a copy back to the pool.
    fn drop_copy(&mut self, pool: &mut impl Pool, copy: HostPhys) {
        pool.release(copy);
        self.counts.copies -= 1;
    }

    /// Returns the first frame at or after `from` that has a copy. The reader takes those first when the pool
    /// runs low.
    pub fn next_copy(&self, pool: &mut impl Pool, from: GuestPhys) -> Option<GuestPhys> {
        self.next_with(pool, from, state::COPY).map(|(frame, _)| frame)
    }

    /// Returns the first frame at or after `from` that was written since the instant, with a dirty log.
    pub fn next_written(&self, pool: &mut impl Pool, from: GuestPhys) -> Option<GuestPhys> {
        self.next_with(pool, from, state::WRITTEN).map(|(frame, _)| frame)
    }

    fn next_with(&self, pool: &mut impl Pool, from: GuestPhys, bits: u64) -> Option<(GuestPhys, u64)> {
        next_with(&self.frames, pool, from, bits)
    }

    /// Makes the snapshot invalid: no write is held up any more, and the machine runs on. The copies go
    /// back to the pool by [`Snapshot::drop_copies`], or with all of the pool at the end.
    pub fn invalidate(&mut self) {
        self.invalid = true;
    }

    /// Gives back at most so many copies of an invalid snapshot.
    pub fn drop_copies(&mut self, pool: &mut impl Pool, most: u64) {
        for _ in 0..most {
            let next = self.next_with(pool, self.dropped, state::COPY);
            let Some((frame, known)) = next.filter(|_| self.invalid) else { return };
            // A frame that has a number needs no page for another one.
            let _ = self.frames.set(pool, frame, known & !state::COPY);
            self.drop_copy(pool, HostPhys::new(known & state::COPY));
            self.dropped = frame.block_end(PageSize::Size4K);
        }
    }

    /// Takes over a change of the identity map at `gpa`.
    pub fn adopt(&self, pool: &mut impl Pool, gpa: GuestPhys) {
        self.view.adopt(pool, gpa);
    }
}

/// Returns the first frame at or after `from` whose number has one of these bits.
fn next_with(map: &FrameMap, pool: &mut impl Pool, from: GuestPhys, bits: u64) -> Option<(GuestPhys, u64)> {
    let mut from = from;
    loop {
        let (frame, known) = map.next(pool, from)?;
        if known & bits != 0 {
            return Some((frame, known));
        }
        from = frame.block_end(PageSize::Size4K);
    }
}

/// Returns the part of a block that lies in the ranges.
fn of_memory(memory: &[OwnedRange], block: GuestPhys, size: PageSize) -> Keep {
    let (start, end) = (block.as_u64(), block.block_end(size).as_u64());
    let next = memory.partition_point(|range| end_of(range) <= start);
    match memory.get(next) {
        Some(range) if range.start_phys <= start && end <= end_of(range) => Keep::Everything,
        Some(range) if range.start_phys < end => Keep::Something,
        _ => Keep::Nothing,
    }
}

/// Part of a block that has been read.
enum Part {
    None,
    Some,
    Whole,
}

fn part_of(streamed: &Range<GuestPhys>, block: GuestPhys, size: PageSize) -> Part {
    let end = block.block_end(size);
    match streamed {
        streamed if streamed.start <= block && end <= streamed.end => Part::Whole,
        streamed if streamed.start < end && block < streamed.end => Part::Some,
        _ => Part::None,
    }
}

/// Returns the first page of the ranges at or after `from`.
fn next_of_memory(memory: &[OwnedRange], from: GuestPhys) -> Option<GuestPhys> {
    let next = memory.get(memory.partition_point(|range| end_of(range) <= from.as_u64()))?;
    Some(from.max(GuestPhys::new(next.start_phys)))
}

fn end_of(range: &OwnedRange) -> u64 {
    range.start_phys.saturating_add(range.pages.saturating_mul(PAGE_SIZE))
}
