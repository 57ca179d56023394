//! Quick answers to the driver's hypercalls, and to its question for the mode. Those are the only exits of
//! a working machine that is attached, and the ones that a switch waits for.
//!
//! The world switch comes here before it saves vector registers, so no code below may use one. Copies go
//! field by field, and a test reads the machine code (`lab/tests/image.rs`).

use mercury_abi::MERCURY_ABI_VERSION;
use mercury_abi::code::Code;
use mercury_abi::gate::{EFER_ATTACHED, HYPERCALL_MAGIC, Hypercall};
use mercury_abi::shared::ExitReason;

use super::vmcb::{TLB_FLUSH_ALL, TLB_KEEP, event, exit_code};
use super::{Area, capture, exits, guests, msr};
use crate::quick::{Quick, publish_detach};
use crate::x86::msr::EFER;
use crate::x86::{Hardware, Processor, RFLAGS_TF};
use crate::{fault, machine_check, publish};

const RCX: usize = 1;
const RDX: usize = 2;
const RSI: usize = 6;

/// Answers a hypercall of the driver, or its question for the mode; no other exit. The world switch gives the
/// system its extended state back.
///
/// # Safety
/// `area` is this CPU's own, and GIF is 0: no other code uses the area until this returns.
pub unsafe extern "C" fn quick_exit(area: *mut Area) -> Quick {
    // SAFETY: the world switch passes this CPU's area; nothing else uses it while GIF = 0.
    answer(unsafe { &mut *area }, &mut Processor)
}

#[inline]
pub(super) fn answer(area: &mut Area, hardware: &mut impl Hardware) -> Quick {
    const PING: u64 = Hypercall::Ping as u64;
    const DETACH: u64 = Hypercall::Detach as u64;
    const FLUSH: u64 = Hypercall::Flush as u64;
    debug_assert!(area.cpu.on_snapshot == 0, "the world switch does not come here beneath a snapshot");
    if !is_plain(area) {
        return Quick::Slow;
    }
    if !is_hypercall(area) {
        return if asks_for_mode(area) { answer_mode(area) } else { Quick::Slow };
    }
    let (flush, value) = match area.control.rax {
        PING => (TLB_KEEP, u64::from(MERCURY_ABI_VERSION)),
        FLUSH => (TLB_FLUSH_ALL, 0),
        // KVM goes on natively: there is more to do.
        DETACH if guests::has_svm(area) => return Quick::Slow,
        DETACH => return detach(area, hardware),
        _ => return Quick::Slow,
    };
    fault::in_quick_answer(area);
    area.control.tlb_control = flush;
    area.cpu.gate.outward.registers[RDX] = value;
    finish(area, exits::VMMCALL_LENGTH, Code::Ok as u64);
    Quick::Run
}

#[inline]
fn is_hypercall(area: &Area) -> bool {
    area.control.exit_code == exit_code::VMMCALL && area.cpu.gate.outward.registers[RCX] == HYPERCALL_MAGIC
}

/// Returns true if the driver asks for the mode of this CPU: it reads EFER, with the hypercall's magic
/// number in RSI.
#[inline]
pub(super) fn asks_for_mode(area: &Area) -> bool {
    let registers = &area.cpu.gate.outward.registers;
    area.control.exit_code == exit_code::MSR
        && area.control.exit_info1 == 0
        && registers[RCX] as u32 == EFER
        && registers[RSI] == HYPERCALL_MAGIC
}

/// Returns EFER as it is shown, with the bit that says that the CPU is attached.
#[inline]
pub(super) fn efer_with_mode(area: &mut Area) -> u64 {
    msr::shown_efer(area) | EFER_ATTACHED
}

#[inline(always)]
fn answer_mode(area: &mut Area) -> Quick {
    fault::in_quick_answer(area);
    let value = efer_with_mode(area);
    area.control.tlb_control = TLB_KEEP;
    area.cpu.gate.outward.registers[RDX] = value >> 32;
    finish(area, exits::MSR_LENGTH, value & 0xFFFF_FFFF);
    Quick::Run
}

/// Returns true if this exit is the kernel's own, and no other work is pending.
#[inline]
fn is_plain(area: &Area) -> bool {
    let control = &area.control;
    control.cpl == 0
        && control.exit_event & event::VALID == 0
        && control.rflags & RFLAGS_TF == 0
        && area.cpu.leave_pending == 0
        && !machine_check::is_noted(area)
        && !fault::is_armed_beyond_quick(area)
}

/// Counts the hypercall and moves past it, with this value in RAX: no single step, as [`is_plain`] has seen,
/// and no prefix (the driver's has none).
#[inline(always)]
fn finish(area: &mut Area, length: u64, rax: u64) {
    area.cpu.entered = 1;
    area.own.entry_state_valid = 0;
    publish::count(area, ExitReason::Hypercall);
    area.control.rip = area.control.rip.wrapping_add(length);
    area.control.interrupt_shadow = 0;
    area.control.rax = rax;
}

#[inline(always)]
fn detach(area: &mut Area, hardware: &mut impl Hardware) -> Quick {
    finish(area, exits::VMMCALL_LENGTH, Code::Ok as u64);
    publish_detach(area, hardware);
    capture::put_back_without_svm(area, hardware);
    Quick::Leave
}
