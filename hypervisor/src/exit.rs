//! Exits above the vendor boundary: what an exit can be answered with, and hypercalls.

use mercury_abi::MERCURY_ABI_VERSION;
use mercury_abi::code::Code;
use mercury_abi::gate::Hypercall;

use crate::cpu::Area;
use crate::vendor::Vendor;

/// An exception for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// #UD.
    InvalidOpcode,
    /// #GP with error code 0.
    GeneralProtection,
}

/// What becomes of an exit.
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
    /// The instruction faults.
    Inject(Fault),
    /// The instruction is done and this CPU is native from here on.
    Detach,
    /// Likewise, and the system above wanted it so.
    Released(Code),
    /// This CPU is native from here on and executes the instruction itself.
    Depart(Code),
}

/// A hypercall of the driver.
#[inline]
pub fn hypercall<V: Vendor>(area: &mut Area<V>, number: u64, first: u64, second: u64) -> Answer {
    const PING: u64 = Hypercall::Ping as u64;
    const DETACH: u64 = Hypercall::Detach as u64;
    const FLUSH: u64 = Hypercall::Flush as u64;
    const ARM_FAULT: u64 = Hypercall::ArmFault as u64;
    match number {
        PING => Answer::Hypercall(Code::Ok, u64::from(MERCURY_ABI_VERSION)),
        DETACH => Answer::Detach,
        FLUSH => Answer::HypercallFlushed,
        ARM_FAULT => Answer::Hypercall(crate::fault::arm(area, first, second), 0),
        _ => Answer::Hypercall(Code::UnknownOperation, 0),
    }
}
