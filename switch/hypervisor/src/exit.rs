//! Exits above the vendor boundary: the possible answers to an exit, and hypercalls.

use mercury_abi::MERCURY_ABI_VERSION;
use mercury_abi::code::Code;
use mercury_abi::gate::Hypercall;
use mercury_abi::shared::{ExitReason, LogKind};

use crate::address::HostPhys;
use crate::cpu::Area;
use crate::nested::NestedAnswer;
use crate::snapshot::{dispatch, live};
use crate::vendor::Vendor;
use crate::x86::Hardware;
use crate::{event, integrity, machine_check, publish};

/// An exception for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// #UD, invalid opcode.
    InvalidOpcode,
    /// #GP with error code 0.
    GeneralProtection,
}

/// Answer to an exit, which the vendor carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Execute the same instruction again.
    Retry,
    /// As `Retry`, with every translation of the guest flushed.
    RetryFlushed,
    /// The instruction is done.
    Skip,
    /// The instruction is done; this is its 64-bit result (EDX:EAX).
    Value(u64),
    /// The instruction is done; code in RAX, value in RDX.
    Hypercall(Code, u64),
    /// As `Hypercall(Ok, 0)`, with every translation of the guest flushed.
    HypercallFlushed,
    /// As `HypercallFlushed`, and the guest runs on these nested tables from here on.
    NewTables(HostPhys),
    /// The instruction faults.
    Inject(Fault),
    /// The instruction is done and this CPU is native from here on.
    Detach,
    /// As `Detach`, and the system above has asked for it.
    Released(Code),
    /// This CPU is native from here on and executes the instruction itself.
    Depart(Code),
}

/// Answers a hypercall of the driver.
#[inline]
pub fn hypercall<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    number: u64,
    first: u64,
    second: u64,
) -> Answer {
    const SNAPSHOT: u64 = Hypercall::Snapshot as u64;
    const PING: u64 = Hypercall::Ping as u64;
    const DETACH: u64 = Hypercall::Detach as u64;
    const FLUSH: u64 = Hypercall::Flush as u64;
    const INTEGRITY: u64 = Hypercall::Integrity as u64;
    const ARM_FAULT: u64 = Hypercall::ArmFault as u64;
    match number {
        PING => Answer::Hypercall(Code::Ok, u64::from(MERCURY_ABI_VERSION)),
        DETACH => Answer::Detach,
        FLUSH => Answer::HypercallFlushed,
        SNAPSHOT => dispatch::call(area, hardware, first, second),
        INTEGRITY => integrity::call(area, first, second),
        ARM_FAULT => Answer::Hypercall(crate::fault::arm(area, first, second), 0),
        _ => Answer::Hypercall(Code::UnknownOperation, 0),
    }
}

/// Notes that this CPU leaves, other than by the quick answer. `because` is `Ok` for a detach that the
/// driver asked for. A snapshot does not see the CPU's writes from here on.
pub fn departs<V: Vendor>(area: &mut Area<V>, because: Code) {
    if area.cpu.on_snapshot != 0 {
        live::leave(area);
    }
    publish::departed(area, because);
}

/// Logs the exit at which this CPU leaves, and notes that it does. The exit has its code, RIP, and two fields
/// of information.
pub fn departs_at<V: Vendor>(area: &mut Area<V>, because: Code, [code, rip, info1, info2]: [u64; 4]) {
    let arguments = [u64::from(because as u32), code, rip, info1, info2];
    publish::log(area, LogKind::Left, area.cpu.exit_tsc, arguments);
    departs(area, because);
}

/// Counts and logs a nested fault, with its guest-physical address and the instruction's, and returns the
/// answer.
pub fn nested_fault<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    nested: NestedAnswer,
    [address, rip]: [u64; 2],
) -> Answer {
    let (reason, kind, answer) = nested_answer(nested);
    publish::count(area, reason);
    if kind != LogKind::None {
        let tsc = hardware.tsc();
        publish::log(area, kind, tsc, [address, rip, 0, 0, 0]);
    }
    if let NestedAnswer::Kept { wait } = nested {
        hold_back(hardware, wait);
    }
    answer
}

/// Has the CPU that wrote wait so many TSC ticks, because the pool runs low.
pub fn hold_back(hardware: &mut impl Hardware, wait: u64) {
    if wait == 0 {
        return;
    }
    let start = hardware.tsc();
    while hardware.tsc().wrapping_sub(start) < wait {
        core::hint::spin_loop();
    }
}

/// Returns counter, log record and answer of a nested fault. A cached translation must be flushed, even a
/// read-only one. An absent entry is cached nowhere.
const fn nested_answer(answer: NestedAnswer) -> (ExitReason, LogKind, Answer) {
    match answer {
        NestedAnswer::Filled => (ExitReason::NestedFill, LogKind::NestedFill, Answer::Retry),
        NestedAnswer::Kept { .. } => (ExitReason::SnapshotWrite, LogKind::None, Answer::Retry),
        NestedAnswer::Raced => (ExitReason::NestedFill, LogKind::NestedFill, Answer::RetryFlushed),
        NestedAnswer::HiddenWrite => (ExitReason::HiddenWrite, LogKind::HiddenWrite, Answer::RetryFlushed),
        NestedAnswer::Exhausted => {
            (ExitReason::Other, LogKind::NestedFill, Answer::Depart(Code::NestedMapExhausted))
        }
    }
}

/// Drops an event that a CPU cannot deliver any more because it leaves. The gate raises a machine check,
/// and the instruction raises other exceptions.
pub fn lose_event<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, event: u64) {
    if event == event::MACHINE_CHECK {
        return machine_check::note(area, hardware, false);
    }
    if event::is_raised_again(event) {
        return;
    }
    let exit_code = V::last_exit(area).code;
    let tsc = hardware.tsc();
    publish::log(area, LogKind::EventLost, tsc, [event, exit_code, 0, 0, 0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor that still knows a page as read-only would fault on it for ever.
    #[test]
    fn a_page_that_was_cached_is_flushed() {
        let answer = |nested| nested_answer(nested).2;
        assert_eq!(answer(NestedAnswer::Raced), Answer::RetryFlushed);
        assert_eq!(answer(NestedAnswer::HiddenWrite), Answer::RetryFlushed);
        assert_eq!(answer(NestedAnswer::Filled), Answer::Retry);
    }
}
