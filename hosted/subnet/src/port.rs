//! A machine's rings together: a switch that learns where addresses are.
//!
//! Each machine switches for itself. A frame to a known address goes to one ring, a frame to a group or to an
//! unknown address to all machines that are there.

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use vm_memory::{Bytes, VolatileSlice};

use crate::{
    Address, MOST,
    memory::{Access, Memory},
    offload::Offload,
    ring::{self, Frame, Reader, Ring, Writer, Written},
    table::{Table, is_group},
};

/// The longest wait for a machine that does not read what it is sent. After that its frames are dropped
/// until it has read most of what it has.
pub const PATIENCE: Duration = Duration::from_millis(200);

/// The size of one machine's rings in the file of all rings, in bytes.
const ROW: usize = MOST * ring::SIZE;
/// The size of the file of all rings.
pub(crate) const RINGS: u64 = (MOST * ROW) as u64;

/// The page by which the keeper tells who is there.
pub(crate) mod directory {
    /// A bit for each slot that has a machine.
    pub const PRESENT: usize = 0;
    /// A number that changes with each machine that comes or goes.
    pub const EPOCH: usize = 8;
    /// Size of the page.
    pub const SIZE: usize = 4096;
}

/// The things that the keeper hands to a machine that joins.
#[derive(Debug)]
pub struct Membership {
    pub slot: usize,
    pub address: Address,
    pub(crate) rings: OwnedFd,
    pub(crate) directory: OwnedFd,
    pub(crate) bell: OwnedFd,
    /// The other machines' bells, by slot.
    pub(crate) bells: Vec<OwnedFd>,
    /// The connection by whose end the keeper learns of the machine's end.
    pub(crate) connection: OwnedFd,
    /// The lock by which the next keeper learns that there are machines of a former one.
    pub(crate) lock: Option<File>,
}

/// The fate of a frame that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is on its way, or lost as on any network.
    Done,
    /// Its receiver has no room: the frame has to be sent again, later.
    Later,
}

/// An end of a ring that is made at its first use: before that, no page of the ring is touched.
#[derive(Debug)]
struct End<T> {
    ring: Ring,
    made: Option<T>,
}

impl<T> End<T> {
    fn new(memory: &Arc<Memory>, at: usize) -> rustix::io::Result<Self> {
        let ring = Ring::new(memory, at).ok_or(rustix::io::Errno::INVAL)?;
        Ok(Self { ring, made: None })
    }

    fn get(&mut self, make: impl FnOnce(Ring) -> T) -> &mut T {
        self.made.get_or_insert_with(|| make(self.ring.clone()))
    }
}

/// A machine's end of a subnet.
#[derive(Debug)]
pub struct Port {
    slot: usize,
    writers: Vec<End<Writer>>,
    readers: Vec<End<Reader>>,
    directory: Memory,
    epoch: u64,
    table: Table,
    bell: OwnedFd,
    bells: Vec<OwnedFd>,
    /// The slot that a frame waits for, and since when.
    waits: Option<(usize, Instant)>,
    /// Machines that have not read for too long, a bit for each.
    stalled: u64,
    /// The slot to read from next.
    turn: usize,
    _connection: OwnedFd,
    _lock: Option<File>,
}

impl Port {
    /// Maps the rings of a machine: those that it reads, and those that it writes. No other can be mapped
    /// afterwards.
    ///
    /// # Errors
    /// If the host refuses a mapping.
    pub fn new(membership: Membership) -> rustix::io::Result<Self> {
        let Membership { slot, rings, directory, bell, bells, connection, lock, .. } = membership;
        let row = Memory::map(&rings, (slot * ROW) as u64, ROW, Access::Write)?;
        let row = Arc::new(row);
        let readers = (0..MOST).map(|from| End::new(&row, from * ring::SIZE));
        let writers = (0..MOST).map(|to| {
            let at = to * ROW + slot * ring::SIZE;
            let memory = Memory::map(&rings, at as u64, ring::SIZE, Access::Write)?;
            End::new(&Arc::new(memory), 0)
        });
        Ok(Self {
            slot,
            readers: readers.collect::<rustix::io::Result<_>>()?,
            writers: writers.collect::<rustix::io::Result<_>>()?,
            directory: Memory::map(&directory, 0, directory::SIZE, Access::Read)?,
            epoch: 0,
            table: Table::default(),
            bell,
            bells,
            waits: None,
            stalled: 0,
            turn: 0,
            _connection: connection,
            _lock: lock,
        })
    }

    /// Returns the descriptor that can be read when this machine has to look at its rings.
    #[must_use]
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Returns the slots of the other machines, a bit for each.
    fn others(&mut self) -> u64 {
        let number = |at: usize| self.directory.number::<AtomicU64>(at).load(Ordering::Acquire);
        let (epoch, present) = (number(directory::EPOCH), number(directory::PRESENT));
        if std::mem::replace(&mut self.epoch, epoch) != epoch {
            self.table.clear();
            self.stalled = 0;
        }
        present & !bit(self.slot)
    }

    /// Returns true if a frame waits until its receiver has room.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.waits.is_some()
    }

    /// Sends a frame. `fill` copies the frame's bytes, once for each receiver.
    pub fn send(
        &mut self,
        to: Address,
        length: usize,
        offload: Offload,
        mut fill: impl FnMut(&VolatileSlice<'_>),
    ) -> Sent {
        let others = self.others();
        let known = self.table.find(to).filter(|&slot| others & bit(slot) != 0 && !is_group(to));
        let Some(slot) = known else {
            slots(others).for_each(|slot| {
                self.write(slot, length, offload, &mut fill);
            });
            return Sent::Done;
        };
        if self.stalled & bit(slot) != 0 && self.writers[slot].get(Writer::new).has_room() {
            self.stalled &= !bit(slot);
        }
        loop {
            if self.write(slot, length, offload, &mut fill) {
                self.waits = None;
                return Sent::Done;
            }
            if self.stalled & bit(slot) != 0 {
                return Sent::Done;
            }
            if self.is_out_of_patience(slot) {
                self.waits = None;
                self.stalled |= bit(slot);
                return Sent::Done;
            }
            if self.writers[slot].get(Writer::new).wait() {
                return Sent::Later;
            }
        }
    }

    /// Writes a frame into a ring, and wakes its reader. Returns false if the ring is full.
    fn write(
        &mut self,
        slot: usize,
        length: usize,
        offload: Offload,
        fill: &mut impl FnMut(&VolatileSlice<'_>),
    ) -> bool {
        match self.writers[slot].get(Writer::new).write(length, offload, fill) {
            Written::Full => return false,
            Written::Done { wake: true } => self.wake(slot),
            Written::Done { wake: false } => {}
        }
        true
    }

    /// Begins to wait for a machine, and says whether the wait has been too long.
    fn is_out_of_patience(&mut self, slot: usize) -> bool {
        match self.waits {
            Some((waited, since)) if waited == slot => since.elapsed() >= PATIENCE,
            _ => {
                self.waits = Some((slot, Instant::now()));
                false
            }
        }
    }

    fn wake(&self, slot: usize) {
        if let Some(bell) = self.bells.get(slot) {
            ring_bell(bell);
        }
    }

    /// Returns the slot of a machine from which a frame has come, in turns.
    pub fn choose(&mut self) -> Option<usize> {
        let others = self.others();
        let has_frame = |slot: &usize| self.readers[*slot].get(Reader::new).front().is_some();
        let found = slots_from(others, self.turn).find(has_frame)?;
        self.turn = (found + 1) % MOST;
        self.learn(found);
        Some(found)
    }

    fn learn(&mut self, slot: usize) {
        const SOURCE: usize = 6;
        let mut source = [0; 6];
        let Some(frame) = self.frame(slot) else { return };
        if frame.bytes.read_slice(&mut source, SOURCE).is_ok() {
            self.table.learn(source, slot);
        }
    }

    /// Returns the frame that has come from a machine.
    pub fn frame(&mut self, slot: usize) -> Option<Frame<'_>> {
        self.readers.get_mut(slot)?.get(Reader::new).front()
    }

    /// Drops the frame that has come from a machine.
    pub fn release(&mut self, slot: usize) {
        if self.readers.get_mut(slot).is_some_and(|end| end.get(Reader::new).release()) {
            self.wake(slot);
        }
    }

    /// Asks all machines to ring this one's bell at their next frame. Returns false if there is one already.
    pub fn sleep(&mut self) -> bool {
        let others = self.others();
        let mut sleeps = true;
        for slot in slots(others) {
            sleeps &= self.readers[slot].get(Reader::new).sleep();
        }
        sleeps
    }
}

/// Rings a machine's bell. If it is full of rings, it rings already.
pub(crate) fn ring_bell(bell: impl AsFd) {
    let _ = rustix::io::write(bell, &[1]);
}

/// Silences this machine's bell.
pub fn silence(bell: impl AsFd) {
    let _ = rustix::io::read(bell, &mut [0; 4096]);
}

pub(crate) fn bit(slot: usize) -> u64 {
    1 << slot
}

/// Returns the slots of a set.
pub(crate) fn slots(set: u64) -> impl Iterator<Item = usize> {
    slots_from(set, 0)
}

/// Returns the slots of a set, those from the first one on before the others.
fn slots_from(set: u64, first: usize) -> impl Iterator<Item = usize> {
    let mut left = set.rotate_right(first as u32);
    std::iter::from_fn(move || {
        let next = (left != 0).then_some(left.trailing_zeros() as usize)?;
        left &= left - 1;
        Some((first + next) % MOST)
    })
}
