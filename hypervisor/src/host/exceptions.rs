//! Exceptions inside the hypervisor: an expected one continues at its recovery address, a machine
//! check is handed to the system above, everything else is the end of this CPU's attachment.

#[cfg(feature = "image")]
use crate::{
    cpu::{Area, Cpu, area_of_stack},
    vendor::{self, Vendor, Visitor},
};

/// What the exception stubs push.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// R15 to RAX, in the order of the stub's pushes reversed.
    pub registers: [u64; 15],
    /// Exception vector.
    pub vector: u64,
    /// Error code, or 0.
    pub error_code: u64,
    /// RIP.
    pub rip: u64,
    /// CS.
    pub cs: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// RSP.
    pub rsp: u64,
    /// SS.
    pub ss: u64,
}

/// #GP.
pub const GENERAL_PROTECTION: u64 = 13;
/// #MC.
pub const MACHINE_CHECK: u64 = 18;

/// Where to continue after the exception in `frame`, or 0 if there is nowhere.
///
/// # Safety
/// Called by the exception stubs only, with their own frame.
#[cfg(feature = "image")]
pub unsafe extern "C" fn recover(frame: *const Frame) -> u64 {
    // SAFETY: the stub passes its own frame.
    let frame = unsafe { &*frame };
    match frame.vector {
        GENERAL_PROTECTION => crate::x86::msr::recovery_of(frame.rip).unwrap_or(0),
        MACHINE_CHECK => hand_over_machine_check(frame),
        _ => 0,
    }
}

/// A machine check in the hypervisor's window (GIF = 0; held or taken as the family has it, APM vol. 2,
/// 15.17): where the interrupted instruction stream is intact (MCG_STATUS.RIPV), the system above gets
/// the exception at its next instruction and reads the banks itself; otherwise this CPU leaves.
#[cfg(feature = "image")]
fn hand_over_machine_check(frame: &Frame) -> u64 {
    const MCG_STATUS: u32 = 0x17A;
    const MCG_STATUS_RIPV: u64 = 1;
    let intact = crate::x86::msr::read(MCG_STATUS).is_some_and(|status| status & MCG_STATUS_RIPV != 0);
    if !intact {
        return 0;
    }
    // SAFETY: exception stacks lie in the area; the interrupted code uses what this changes only at its end.
    let pending = unsafe { vendor::visit(area_of_stack(), PendMachineCheck) };
    if pending { frame.rip } else { 0 }
}

#[cfg(feature = "image")]
struct PendMachineCheck;

#[cfg(feature = "image")]
impl Visitor for PendMachineCheck {
    type Output = bool;

    fn visit<V: Vendor>(self, area: &mut Area<V>) -> bool {
        V::pend_machine_check(area)
    }
}

/// The end: record and leave.
///
/// # Safety
/// Called by the exception stubs only, with this CPU's area and their own frame.
#[cfg(feature = "image")]
pub unsafe extern "C" fn fatal(area: *mut Cpu, frame: *const Frame) -> ! {
    // SAFETY: the stub passes this CPU's area and its own frame on the exception stack; whatever used
    // the area before will not run again.
    unsafe { crate::emergency::after_exception(area, &*frame) }
}
