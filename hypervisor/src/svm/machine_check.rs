//! Machine checks that strike in the hypervisor, on processors that do not hold them while GIF = 0 (APM
//! vol. 2, 15.17; HARDWARE A-33, L-23). Each is the system's: it gets one #MC and reads the banks itself.
//!
//! It is noted in the gate's block. If the guest is entered next it is injected, before a fault that the
//! guest's instruction raises again and after an event that nothing raises again; if the CPU leaves, the
//! gate raises it. MCG_STATUS.MCIP stays set until the system has seen it, so there is never a second.
//!
//! What is left are the few instructions that run on the hypervisor's IDT with the system's task state, or
//! the other way round (around VMRUN, and in the gate): there a machine check is a shutdown.

use core::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use super::vmcb::{INTERCEPT_VINTR, event, exit_code};
use crate::cpu::{Area, Phase};
use crate::host::entry::Next;

/// [`mercury_abi::gate::GateBlock::machine_check`]: there is none.
pub const NONE: u64 = 0;
/// One that is nowhere else.
const NOTED: u64 = 1;
/// One that the next VMRUN delivers.
const INJECTED: u64 = 2;

/// Whether the system has yet to get one, as far as is known.
#[inline]
#[must_use]
pub fn is_noted(area: &Area) -> bool {
    word(area).load(Ordering::Relaxed) != NONE
}

/// One has struck: called by its handler, which has interrupted the hypervisor anywhere. `resumable`: what
/// was interrupted goes on.
pub fn note(area: &mut Area, resumable: bool) {
    word(area).store(NOTED, Ordering::Relaxed);
    // On the way to VMRUN nobody looks any more.
    if resumable && area.cpu.phase == Phase::Outside {
        hand_over(area);
    }
}

/// An exit begins: what VMRUN has taken is the guest's.
pub fn exit_begins(area: &mut Area) {
    let control = &area.control;
    let taken = control.exit_code != exit_code::INVALID && control.inject_event & event::VALID == 0;
    let next = if taken { NONE } else { NOTED };
    // In one instruction: one that strikes here is noted over what was injected, and must stay so.
    if word(area).compare_exchange(INJECTED, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        area.control.inject_event = 0;
    }
}

/// The hypervisor's work is done: from here on [`note`] acts by itself, and what it noted before is handed
/// over here.
#[inline]
pub fn finish(area: &mut Area, next: Next) -> Next {
    area.cpu.phase = Phase::Outside;
    compiler_fence(Ordering::SeqCst);
    if next == Next::Run && is_noted(area) {
        hand_over(area);
    }
    next
}

/// Whether this exit is the one that [`hand_over`] asked for.
#[must_use]
pub fn is_awaited(area: &Area) -> bool {
    area.control.intercept_misc1 & INTERCEPT_VINTR != 0
}

/// To the guest with the next VMRUN; after an event that comes first, with the exit that the processor makes
/// as soon as the guest takes interrupts again (APM vol. 2, 15.21.4).
fn hand_over(area: &mut Area) {
    let control = &mut area.control;
    if is_lost_if_replaced(control.inject_event) {
        control.await_window();
        return;
    }
    // A CPU that wants to leave still waits for it.
    if area.cpu.leave_pending == 0 {
        control.forget_window();
    }
    control.inject_event = event::MACHINE_CHECK;
    word(area).store(INJECTED, Ordering::Relaxed);
}

/// Whether nothing raises this event again: all but the faults of intercepted instructions.
const fn is_lost_if_replaced(pending: u64) -> bool {
    pending & event::VALID != 0
        && !matches!(pending, event::INVALID_OPCODE | event::GENERAL_PROTECTION | event::MACHINE_CHECK)
}

/// The state: what the handler of vector 18 changes at any moment. Only this CPU does.
fn word(area: &Area) -> &AtomicU64 {
    let word = (&raw const area.cpu.gate.machine_check).cast_mut();
    // SAFETY: a field behind a reference, aligned; the hypervisor touches it nowhere else, and the gate does
    // while the hypervisor does not run.
    unsafe { AtomicU64::from_ptr(word) }
}
