//! Calls of the driver in the guest, which the monitor answers in place of a hypervisor when the guest moves
//! away: the dirty log of what processors write, and memory as it was at the instant.
//!
//! A call is a [`SnapshotCall`] (`switch/abi/src/snapshot.rs`). Its argument is a page of the guest's memory.
//! All that it says comes from the guest, and is checked against the guest's memory.

mod keeper;
mod maps;

use crate::layout::PAGE_BYTES;
use keeper::Keeper;
use maps::Maps;
use mercury_abi::{
    code::Code,
    gate::OwnedRange,
    guest::{MERCURY_GUEST_ANSWER, MERCURY_GUEST_PORTS},
    snapshot::{
        LogCollect, LogSetup, PageList, READ_LIST_MAX, ReadEntry, ReadList, SnapshotCall, SnapshotSetup,
        SnapshotStatus,
    },
};
use mercury_devices::memory::{View, contains, pointer, read, write};
use std::{
    io,
    mem::offset_of,
    ops::Range,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// Ports of the calls. No PC has a device there.
pub const PORTS: Range<u16> = 0x4D00..0x4D00 + MERCURY_GUEST_PORTS;

/// The port among them that takes what the guest answers to its host.
pub const ANSWER: u16 = PORTS.start + MERCURY_GUEST_ANSWER;

/// Time for all processors to come to the instant. The driver holds them with interrupts off.
const PATIENCE: Duration = Duration::from_secs(5);

/// KVM's log of the pages that processors write, by slots of memory.
pub trait WriteLog: Send + Sync {
    /// Begins or ends the log of all slots.
    ///
    /// # Errors
    /// KVM refuses.
    fn switch(&self, is_on: bool) -> io::Result<()>;

    /// Returns a bit for each page of a slot that was written since the last call, and forgets them.
    ///
    /// # Errors
    /// KVM refuses.
    fn take(&self, slot: u32, bytes: usize) -> io::Result<Vec<u64>>;
}

/// Finds the physical address of a virtual one, as the processor has it that makes the call.
pub type Translate<'a> = &'a dyn Fn(u64) -> Option<u64>;

/// Memory that was free at the instant, and the processors that come to it.
#[derive(Debug)]
struct Instant {
    free: Maps,
    cpus: u32,
    arrived: u32,
    /// The result of the instant, when it has come or cannot come any more.
    result: Option<Code>,
}

/// A log that was begun.
#[derive(Debug)]
struct Log {
    written: Maps,
    collected: Maps,
    /// KVM's log up to the instant. `None`: the instant is still to come.
    last: Option<Vec<Vec<u64>>>,
}

#[derive(Debug, Default)]
struct State {
    instant: Option<Instant>,
    log: Option<Log>,
    /// The reason for which the snapshot is not what memory was.
    lost: Option<Code>,
}

/// The state of the calls.
pub struct Calls {
    view: View,
    log: Box<dyn WriteLog>,
    keeper: Mutex<Keeper>,
    state: Mutex<State>,
    has_come: Condvar,
}

impl std::fmt::Debug for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Calls").field("state", &self.state).finish_non_exhaustive()
    }
}

/// The result of a step; an error is the code of a call that fails.
type Step<T = ()> = Result<T, Code>;

impl Calls {
    /// Prepares the answers, while the monitor still has all rights.
    ///
    /// # Errors
    /// The host has no room for a page or a socket.
    pub fn new(view: View, log: Box<dyn WriteLog>) -> io::Result<Self> {
        let keeper = Mutex::new(Keeper::new(READ_LIST_MAX)?);
        Ok(Self { view, log, keeper, state: Mutex::default(), has_come: Condvar::new() })
    }

    /// Returns the number of the call that a write to a port makes. `None`: it is another port.
    #[must_use]
    pub fn number(port: u16) -> Option<u16> {
        (PORTS.contains(&port) && port != ANSWER).then(|| port - PORTS.start)
    }

    /// Makes a call, on the thread of the processor that wants it. `page` is the page number of the argument.
    pub fn call(&self, number: u16, page: u32, translate: Translate<'_>) -> Code {
        let at = u64::from(page) * PAGE_BYTES;
        self.answer(number, at, translate).err().unwrap_or(Code::Ok)
    }

    fn answer(&self, number: u16, at: u64, translate: Translate<'_>) -> Step {
        let is = |call: SnapshotCall| number == call as u16;
        match number {
            _ if is(SnapshotCall::Begin) => self.begin(at, translate),
            _ if is(SnapshotCall::Enter) => self.enter(),
            _ if is(SnapshotCall::Read) => self.read(at),
            _ if is(SnapshotCall::End) => self.end(),
            _ if is(SnapshotCall::Status) => self.status(at),
            _ if is(SnapshotCall::GiveUp) => self.give_up(),
            // The monitor needs no pages of the guest's, and so has none to give back.
            _ if is(SnapshotCall::Donate) || is(SnapshotCall::Reclaim) => {
                self.put(at + offset_of!(PageList, count) as u64, 0)
            }
            _ if is(SnapshotCall::LogBegin) => self.begin_log(at, translate),
            _ if is(SnapshotCall::LogCollect) => self.collect(at),
            _ if is(SnapshotCall::Tables) || is(SnapshotCall::Leave) || is(SnapshotCall::LogEnter) => Ok(()),
            _ => Err(Code::UnknownOperation),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, at: u64) -> Step<u64> {
        let mut bytes = [0; 8];
        read(&self.view, at, &mut bytes).map(|()| u64::from_le_bytes(bytes)).ok_or(Code::BadArgument)
    }

    fn put(&self, at: u64, value: u64) -> Step {
        write(&self.view, at, &value.to_le_bytes()).ok_or(Code::BadArgument)
    }

    /// Reads a map of the driver's, whose address and count of pieces are fields of an argument.
    fn maps(&self, address: u64, count: u64, translate: Translate<'_>) -> Step<Maps> {
        Maps::find(&self.view, self.get(address)?, self.get(count)?, translate).ok_or(Code::BadArgument)
    }

    fn begin(&self, at: u64, translate: Translate<'_>) -> Step {
        let field = |offset: usize| self.get(at + offset as u64);
        let (cpus, log) = {
            let both = field(offset_of!(SnapshotSetup, cpus))?;
            (both as u32, both >> 32)
        };
        let is_kept = field(offset_of!(SnapshotSetup, keep_virt))? != 0;
        if is_kept || log != 0 || field(offset_of!(SnapshotSetup, hashes_virt))? != 0 {
            return Err(Code::UnknownOperation);
        }
        let free = self.maps(
            at + offset_of!(SnapshotSetup, free_virt) as u64,
            at + offset_of!(SnapshotSetup, free_count) as u64,
            translate,
        )?;
        let mut state = self.state();
        if state.instant.is_some() {
            return Err(Code::SnapshotLive);
        }
        state.instant = Some(Instant { free, cpus, arrived: 0, result: None });
        state.lost = None;
        Ok(())
    }

    /// Waits for all processors. The last one keeps memory as it is.
    fn enter(&self) -> Step {
        let mut state = self.state();
        let State { instant: Some(instant), log, .. } = &mut *state else { return Err(Code::NoSnapshot) };
        instant.arrived += 1;
        if instant.result.is_none() && instant.arrived == instant.cpus {
            let kept = self.keep(log.as_mut());
            instant.result = Some(kept.err().unwrap_or(Code::Ok));
            self.has_come.notify_all();
        }
        let waits = |state: &mut State| state.instant.as_ref().is_some_and(|one| one.result.is_none());
        let (mut state, _) =
            self.has_come.wait_timeout_while(state, PATIENCE, waits).unwrap_or_else(PoisonError::into_inner);
        let instant = state.instant.as_mut().ok_or(Code::NoSnapshot)?;
        match *instant.result.get_or_insert(Code::SnapshotMissed) {
            Code::Ok => Ok(()),
            code => Err(code),
        }
    }

    /// Takes the end of the log, and lets a copy of this process keep memory. No processor runs.
    fn keep(&self, log: Option<&mut Log>) -> Step {
        if let Some(log) = log {
            log.last = Some(self.take_log()?);
            self.log.switch(false).map_err(|_| Code::SnapshotLost)?;
        }
        self.keeper().start().map_err(|error| match error.kind() {
            // The copy of an earlier snapshot did not end.
            io::ErrorKind::AlreadyExists => Code::SnapshotLive,
            _ => Code::NoMemory,
        })
    }

    fn take_log(&self) -> Step<Vec<Vec<u64>>> {
        let slots = (0..).zip(self.view.iter());
        let taken = slots.map(|(slot, region)| self.log.take(slot, region.len() as usize));
        taken.collect::<io::Result<_>>().map_err(|_| Code::SnapshotLost)
    }

    /// Reads frames as they were at the instant. A free one reads as zeros.
    fn read(&self, at: u64) -> Step {
        let mut state = self.state();
        if let Some(code) = state.lost {
            return Err(code);
        }
        let Some(Instant { result: Some(Code::Ok), free, .. }) = &state.instant else {
            return Err(Code::NoSnapshot);
        };
        let count = self.get(at + offset_of!(ReadList, count) as u64)? as u32 as usize;
        if count > READ_LIST_MAX {
            return Err(Code::BadArgument);
        }
        self.put(at + offset_of!(ReadList, read_before) as u64, 0)?;
        let mut frames = Vec::with_capacity(count);
        let mut targets = Vec::with_capacity(count);
        for entry in 0..count {
            let entry = at + (offset_of!(ReadList, entries) + entry * size_of::<ReadEntry>()) as u64;
            let frame = self.get(entry + offset_of!(ReadEntry, frame_phys) as u64)?;
            let to = self.get(entry + offset_of!(ReadEntry, to_phys) as u64)?;
            let from = pointer(&self.view, frame, PAGE_BYTES).ok_or(Code::BadArgument)?;
            if !contains(&self.view, to, PAGE_BYTES) {
                return Err(Code::BadArgument);
            }
            frames.push(if free.has(frame / PAGE_BYTES) { None } else { Some(from.cast_const()) });
            targets.push(to);
        }
        let put = |number: usize, page: &[u8]| write(&self.view, targets[number], page);
        let done = self.keeper().read(&frames, put);
        done.map_err(|_| *state.lost.insert(Code::SnapshotLost))
    }

    /// Ends the snapshot and the log.
    fn end(&self) -> Step {
        let mut state = self.state();
        let had_log = state.log.take().is_some_and(|log| log.last.is_none());
        *state = State::default();
        self.keeper().end();
        if had_log {
            self.log.switch(false).map_err(|_| Code::SnapshotLost)?;
        }
        Ok(())
    }

    fn status(&self, at: u64) -> Step {
        let state = self.state();
        let live = state.instant.as_ref().is_some_and(|one| one.result == Some(Code::Ok));
        if !live {
            return Err(Code::NoSnapshot);
        }
        let field = |offset: usize| at + offset as u64;
        write(&self.view, at, &[0; size_of::<SnapshotStatus>()]).ok_or(Code::BadArgument)?;
        let exact = u64::from(state.lost.is_none());
        self.put(field(offset_of!(SnapshotStatus, live)), 1 | exact << 32)?;
        // The host has room for copies. The pool is never low, and the driver need not let it grow.
        self.put(field(offset_of!(SnapshotStatus, free_pages)), u64::MAX)?;
        self.put(field(offset_of!(SnapshotStatus, invalid_because)), state.lost.map_or(0, |code| code as u64))
    }

    /// The guest has no memory left, and a snapshot is not worth a process of its.
    fn give_up(&self) -> Step {
        self.state().lost = Some(Code::SnapshotPool);
        Ok(())
    }

    fn begin_log(&self, at: u64, translate: Translate<'_>) -> Step {
        let field = |offset: usize| at + offset as u64;
        let count = field(offset_of!(LogSetup, map_count));
        let written = self.maps(field(offset_of!(LogSetup, written_virt)), count, translate)?;
        let collected = self.maps(field(offset_of!(LogSetup, collected_virt)), count, translate)?;
        let mut state = self.state();
        if state.instant.is_some() {
            return Err(Code::SnapshotLive);
        }
        self.log.switch(true).map_err(|_| Code::LogUnsupported)?;
        state.log = Some(Log { written, collected, last: None });
        Ok(())
    }

    /// Moves all that was written into the map of collected pages.
    fn collect(&self, at: u64) -> Step {
        let mut state = self.state();
        let log = state.log.as_mut().ok_or(Code::NoSnapshot)?;
        let taken = match &mut log.last {
            Some(last) => std::mem::take(last),
            None => self.take_log()?,
        };
        let mut pages = log.written.drain_into(&log.collected);
        for (region, bits) in self.view.iter().zip(taken) {
            pages += log.collected.add(region.start_addr().0 / PAGE_BYTES, &bits);
        }
        let counted = at + offset_of!(LogCollect, pages) as u64;
        self.put(counted, self.get(counted)?.saturating_add(pages))?;
        self.put(at + offset_of!(LogCollect, next_phys) as u64, u64::MAX)
    }
}

const _: () = assert!(offset_of!(SnapshotSetup, log) == offset_of!(SnapshotSetup, cpus) + 4);
const _: () = assert!(offset_of!(SnapshotStatus, exact) == offset_of!(SnapshotStatus, live) + 4);
// What follows is zero.
const _: () = assert!(offset_of!(SnapshotStatus, kept) == offset_of!(SnapshotStatus, invalid_because) + 4);
const _: () = assert!(size_of::<OwnedRange>() == 16);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
