//! The driver's hypercalls: the only exits that a working machine has while it is attached, and those
//! that a switch waits for.
//!
//! The world switch comes here before it saves vector registers, so nothing below may use one: copies go
//! field by field, and a test looks at the machine code (`lab/tests/image.rs`).

use mercury_abi::MERCURY_ABI_VERSION;
use mercury_abi::code::Code;
#[cfg(feature = "fault-injection")]
use mercury_abi::gate::FaultPoint;
use mercury_abi::gate::{HYPERCALL_MAGIC, Hypercall};
use mercury_abi::shared::{ExitReason, LogKind};

use super::vmcb::{TLB_FLUSH_ALL, TLB_KEEP, event, exit_code};
use super::{Area, capture, exits, run};
use crate::x86::{Hardware, Processor, RFLAGS_TF};
use crate::{fault, machine_check, publish};

const RCX: usize = 1;
const RDX: usize = 2;

/// What follows.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quick {
    /// Leave through the gate.
    Leave = 0,
    /// Enter the guest.
    Run = 1,
    /// Not a case for here: nothing has been changed.
    Slow = 2,
}

/// Answers a hypercall of the driver, if it is one.
///
/// # Safety
/// `area` is this CPU's own, and GIF is 0: nobody else uses it until this returns.
pub unsafe extern "C" fn quick_exit(area: *mut Area) -> Quick {
    // SAFETY: the world switch passes this CPU's area; nothing else uses it while GIF = 0.
    let area = unsafe { &mut *area };
    let quick = answer(area, &mut Processor);
    if quick == Quick::Leave {
        run::return_extended_state(area);
    }
    quick
}

#[inline]
pub(super) fn answer(area: &mut Area, hardware: &mut impl Hardware) -> Quick {
    const PING: u64 = Hypercall::Ping as u64;
    const DETACH: u64 = Hypercall::Detach as u64;
    const FLUSH: u64 = Hypercall::Flush as u64;
    if !is_plain_hypercall(area) {
        return Quick::Slow;
    }
    let (flush, value) = match area.control.rax {
        PING => (TLB_KEEP, u64::from(MERCURY_ABI_VERSION)),
        FLUSH => (TLB_FLUSH_ALL, 0),
        DETACH => return detach(area, hardware),
        _ => return Quick::Slow,
    };
    #[cfg(feature = "fault-injection")]
    if fault::fires(area, FaultPoint::QuickPageFault) {
        fault::real::page_fault_with_live_vectors(&mut area.cpu.xmm);
    }
    area.control.tlb_control = flush;
    area.cpu.gate.outward.registers[RDX] = value;
    finish(area);
    Quick::Run
}

/// Whether this exit is a hypercall of the driver and nothing besides.
#[inline]
fn is_plain_hypercall(area: &Area) -> bool {
    let control = &area.control;
    control.exit_code == exit_code::VMMCALL
        && control.cpl == 0
        && area.cpu.gate.outward.registers[RCX] == HYPERCALL_MAGIC
        && control.exit_event & event::VALID == 0
        && control.rflags & RFLAGS_TF == 0
        && area.cpu.leave_pending == 0
        && area.cpu.on_snapshot == 0
        && !machine_check::is_noted(area)
        && !fault::is_armed_beyond_quick(area)
}

/// Counts the hypercall and moves past it.
#[inline]
fn finish(area: &mut Area) {
    area.cpu.entered = 1;
    area.own.entry_state_valid = 0;
    publish::count(area, ExitReason::Hypercall);
    exits::skip(area, exits::VMMCALL_LENGTH);
    area.control.rax = Code::Ok as u64;
}

#[inline]
fn detach(area: &mut Area, hardware: &mut impl Hardware) -> Quick {
    finish(area);
    let tsc = hardware.tsc();
    publish::departed(area, Code::Ok);
    publish::log(area, LogKind::Detached, tsc, [0; 5]);
    capture::put_back(area, hardware);
    Quick::Leave
}
