//! Dispatch of [`mercury_abi::gate::Hypercall::Snapshot`]: each call of the driver is decoded and checked
//! once, and then carried out.

use mercury_abi::code::Code;
use mercury_abi::snapshot::{
    LogCollect, LogSetup, PageList, ReadList, RollbackReason, SnapshotCall, SnapshotSetup, SnapshotStatus,
};

use super::live::Live;
use super::rollback::{self, Watch};
use super::system_memory::{self, with_memory};
use super::{instant, recording};
use crate::address::GuestPhys;
use crate::argument::Argument;
use crate::cpu::Area;
use crate::exit::Answer;
use crate::nested::{self, Nested};
use crate::paging::format::Format;
use crate::paging::table::PageTable;
use crate::vendor::Vendor;
use crate::x86::Hardware;

/// Answers a call of the driver. Not inlined: an exit of another kind needs no such stack.
#[cold]
#[inline(never)]
pub fn call<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, call: u64, argument: u64) -> Answer {
    const ENTER: u64 = SnapshotCall::Enter as u64;
    const LEAVE: u64 = SnapshotCall::Leave as u64;
    const TABLES: u64 = SnapshotCall::Tables as u64;
    const ROLLBACK: u64 = SnapshotCall::Rollback as u64;
    const HOLD: u64 = SnapshotCall::Hold as u64;
    const LOG_ENTER: u64 = SnapshotCall::LogEnter as u64;
    match call {
        ENTER => instant::enter(area, hardware),
        LOG_ENTER => recording::enter(area),
        ROLLBACK => {
            let number = argument & u64::from(u32::MAX);
            let reason = RollbackReason::from_number(number).unwrap_or(RollbackReason::Command);
            match rollback::ask(area, hardware, reason, argument >> 32) {
                Ok(()) => Answer::RetryFlushed,
                Err(code) => Answer::Hypercall(code, 0),
            }
        }
        HOLD => match rollback::hold(area, hardware) {
            Ok(true) => Answer::RetryFlushed,
            held => Answer::Hypercall(held.err().unwrap_or(Code::Ok), 0),
        },
        LEAVE => {
            rollback::watch(area, hardware, Watch::Off);
            area.cpu.on_snapshot = 0;
            area.cpu.is_held = 0;
            Answer::NewTables(nested::root())
        }
        TABLES => {
            system_memory::set_tables(argument);
            Answer::Hypercall(Code::Ok, 0)
        }
        _ if !system_memory::has_tables() => Answer::Hypercall(Code::NoSnapshot, 0),
        _ => match with_memory(area, hardware, |area, _| change(area, call, argument)) {
            Ok(value) => Answer::Hypercall(Code::Ok, value),
            Err(code) => Answer::Hypercall(code, 0),
        },
    }
}

/// A call that changes or reads the state of the snapshot or of the dirty log.
enum Change {
    Donate(Argument<PageList>),
    Reclaim(Argument<PageList>),
    Begin(Argument<SnapshotSetup>),
    Read(Argument<ReadList>),
    ReadDead(Argument<ReadList>),
    DropDead,
    End,
    Status(Argument<SnapshotStatus>),
    GiveUp(Code),
    BeginLog(Argument<LogSetup>),
    CollectLog(Argument<LogCollect>),
}

impl Change {
    /// Decodes a call, and checks its argument.
    ///
    /// # Errors
    /// [`Code::UnknownOperation`] or [`Code::BadArgument`].
    ///
    /// # Safety
    /// The driver made the call, and the page tables that map the system's memory are loaded while the
    /// result lives.
    unsafe fn decode(call: u64, argument: u64) -> Result<Self, Code> {
        const DONATE: u64 = SnapshotCall::Donate as u64;
        const RECLAIM: u64 = SnapshotCall::Reclaim as u64;
        const BEGIN: u64 = SnapshotCall::Begin as u64;
        const READ: u64 = SnapshotCall::Read as u64;
        const READ_DEAD: u64 = SnapshotCall::ReadDead as u64;
        const DROP_DEAD: u64 = SnapshotCall::DropDead as u64;
        const END: u64 = SnapshotCall::End as u64;
        const STATUS: u64 = SnapshotCall::Status as u64;
        const GIVE_UP: u64 = SnapshotCall::GiveUp as u64;
        const BEGIN_LOG: u64 = SnapshotCall::LogBegin as u64;
        const COLLECT_LOG: u64 = SnapshotCall::LogCollect as u64;
        // SAFETY: with each call the driver passes the address of the argument that `SnapshotCall` names,
        // made of integers, in memory that it has mapped. It waits for the answer before it uses the
        // argument again.
        unsafe {
            Ok(match call {
                DONATE => Self::Donate(Argument::at(argument)?),
                RECLAIM => Self::Reclaim(Argument::at(argument)?),
                BEGIN => Self::Begin(Argument::at(argument)?),
                READ => Self::Read(Argument::at(argument)?),
                READ_DEAD => Self::ReadDead(Argument::at(argument)?),
                DROP_DEAD => Self::DropDead,
                END => Self::End,
                STATUS => Self::Status(Argument::at(argument)?),
                GIVE_UP => {
                    let because = u32::try_from(argument).ok().and_then(Code::from_number);
                    Self::GiveUp(because.unwrap_or(Code::SnapshotLost))
                }
                BEGIN_LOG => Self::BeginLog(Argument::at(argument)?),
                COLLECT_LOG => Self::CollectLog(Argument::at(argument)?),
                _ => return Err(Code::UnknownOperation),
            })
        }
    }
}

/// Carries a call out, with the system's memory mapped. Returns the call's value.
fn change<V: Vendor>(area: &Area<V>, call: u64, argument: u64) -> Result<u64, Code> {
    let mut guard = V::tables().lock().ok_or(Code::Crashed)?;
    let nested: &mut Nested<V::Format> = guard.as_mut().ok_or(Code::NotLoaded)?;
    let base = nested.tables().ok_or(Code::NotLoaded)?;
    // SAFETY: a call of the driver's, from within `with_memory`.
    let change = unsafe { Change::decode(call, argument) }?;
    if let Change::Begin(setup) = &change
        && setup.keep_virt != 0
        && !V::rolls_back(area)
    {
        return Err(Code::RollbackUnsupported);
    }
    nested.live.change(base, change)
}

impl<F: Format<Address = GuestPhys>> Live<F> {
    fn change(&mut self, base: PageTable<F>, change: Change) -> Result<u64, Code> {
        match change {
            Change::Donate(mut list) => self.donate(&mut list),
            Change::Reclaim(mut list) => self.reclaim(&mut list),
            Change::Begin(setup) => {
                self.begin(base, &setup)?;
                instant::begin();
                rollback::begin();
            }
            Change::Read(mut list) => return self.read(&mut list).map(u64::from),
            Change::ReadDead(mut list) => self.read_dead(&mut list)?,
            Change::DropDead => self.drop_dead(),
            Change::End => {
                self.end();
                system_memory::forget_tables();
            }
            Change::Status(mut status) => *status = self.status(),
            Change::GiveUp(because) => self.invalidate(because),
            Change::BeginLog(setup) => self.begin_log(base, &setup)?,
            Change::CollectLog(mut collect) => self.collect_log(&mut collect)?,
        }
        Ok(0)
    }
}
