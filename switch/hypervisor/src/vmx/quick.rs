//! Quick answers to the driver's hypercalls, for which a switch waits.
//!
//! The world switch comes here before it saves vector registers, so no code below may use one. Copies go
//! field by field, and a test reads the machine code (`lab/tests/image.rs`).

use mercury_abi::MERCURY_ABI_VERSION;
use mercury_abi::code::Code;
use mercury_abi::gate::{HYPERCALL_MAGIC, Hypercall};
use mercury_abi::shared::ExitReason;

use super::vmcs::{self, blocking, event, reason};
use super::{Area, capture, run};
use crate::quick::{Quick, publish_detach};
use crate::x86::{Hardware, Processor, RFLAGS_RF, RFLAGS_TF};
use crate::{fault, machine_check, publish};

/// Length of VMCALL in bytes.
const VMCALL_LENGTH: u64 = 3;
const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;

/// Answers a hypercall of the driver; no other exit.
///
/// # Safety
/// `area` is this CPU's own, and interrupts are off: no other code uses the area until this returns, but
/// for the handler of NMIs, which touches the gate's NMI block only.
pub unsafe extern "C" fn quick_exit(area: *mut Area) -> Quick {
    // SAFETY: the world switch passes this CPU's area; nothing else uses it in an exit.
    let area = unsafe { &mut *area };
    let quick = answer(area, &mut Processor);
    if quick == Quick::Leave {
        run::restore_extended_state(area);
    }
    quick
}

#[inline]
pub(super) fn answer(area: &mut Area, hardware: &mut impl Hardware) -> Quick {
    const PING: u64 = Hypercall::Ping as u64;
    const DETACH: u64 = Hypercall::Detach as u64;
    debug_assert!(area.cpu.on_snapshot == 0, "the world switch does not come here beneath a snapshot");
    if !is_plain_hypercall(area, hardware) {
        return Quick::Slow;
    }
    match area.cpu.gate.outward.registers[RAX] {
        PING => {
            fault::in_quick_answer(area);
            finish(area, hardware);
            area.cpu.gate.outward.registers[RDX] = u64::from(MERCURY_ABI_VERSION);
            Quick::Run
        }
        DETACH => {
            finish(area, hardware);
            publish_detach(area, hardware);
            capture::put_back(area, hardware);
            Quick::Leave
        }
        _ => Quick::Slow,
    }
}

/// Returns true if this exit is a hypercall of the driver, and no other work is pending.
#[inline]
fn is_plain_hypercall(area: &Area, hardware: &mut impl Hardware) -> bool {
    area.own.failed == 0
        && area.cpu.leave_pending == 0
        && !machine_check::is_noted(area)
        && !fault::is_armed_beyond_quick(area)
        && area.cpu.gate.outward.registers[RCX] == HYPERCALL_MAGIC
        && hardware.vmread(vmcs::EXIT_REASON) as u32 == reason::VMCALL
        && capture::privilege(hardware) == 0
        && hardware.vmread(vmcs::GUEST_RFLAGS) & (RFLAGS_TF | RFLAGS_RF) == 0
        && hardware.vmread(vmcs::VECTORING) & event::VALID == 0
        && hardware.vmread(vmcs::GUEST_INTERRUPTIBILITY) & (blocking::STI | blocking::MOV_SS) == 0
}

/// Counts the hypercall and moves past it: no single step, no shadow, no prefix (the driver's has none).
#[inline]
fn finish(area: &mut Area, hardware: &mut impl Hardware) {
    area.cpu.entered = 1;
    publish::count(area, ExitReason::Hypercall);
    let rip = hardware.vmread(vmcs::GUEST_RIP);
    hardware.vmwrite(vmcs::GUEST_RIP, rip.wrapping_add(VMCALL_LENGTH));
    area.cpu.gate.outward.registers[RAX] = Code::Ok as u64;
}
