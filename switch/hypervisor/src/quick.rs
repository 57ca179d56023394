//! Quick answers of both vendors: [`crate::svm::quick`] and [`crate::vmx::quick`] recognize the driver's
//! hypercalls. Those are the only exits of a working machine, and a switch waits for them.
//!
//! The world switch comes here before it saves vector registers, so no code here may use one. Copies go
//! field by field, and a test reads the machine code (`lab/tests/image.rs`).

use mercury_abi::code::Code;
use mercury_abi::shared::LogKind;

use crate::cpu::Area;
use crate::publish;
use crate::vendor::Vendor;
use crate::x86::Hardware;

/// Next step of the world switch after a quick answer. The world switch compares the numbers.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quick {
    /// Leave through the gate.
    Leave = 0,
    /// Enter the guest again.
    Run = 1,
    /// Take the long way: the exit is of another kind, and nothing has been changed.
    Slow = 2,
}

/// Publishes a detach that the driver asked for.
#[inline]
pub fn publish_detach<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) {
    let tsc = hardware.tsc();
    publish::departed(area, Code::Ok);
    publish::log(area, LogKind::Detached, tsc, [0; 5]);
}
