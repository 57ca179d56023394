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
/// NMI.
pub const NMI: u64 = 2;
/// #MC.
pub const MACHINE_CHECK: u64 = 18;

/// Where to continue after the exception in `frame`, or 0 if there is nowhere.
///
/// # Safety
/// On an exception's own stack, with the frame that the stub pushed there.
#[cfg(feature = "image")]
pub unsafe extern "C" fn recover(frame: *const Frame) -> u64 {
    // SAFETY: the stub passes its own frame.
    let frame = unsafe { &*frame };
    match frame.vector {
        GENERAL_PROTECTION => crate::x86::msr::recovery_of(frame.rip).unwrap_or(0),
        // Taken on purpose: there is none while GIF = 0. Without an IRET others stay blocked, as they are to be in
        // the handler of the system above (APM vol. 2, 8.2.3).
        NMI => frame.rip,
        MACHINE_CHECK => hand_over_machine_check(frame),
        _ => 0,
    }
}

/// A machine check while GIF = 0: the system above gets it in any case. What was interrupted goes on if its
/// instruction stream is intact (MCG_STATUS.RIPV); otherwise this CPU leaves.
#[cfg(feature = "image")]
fn hand_over_machine_check(frame: &Frame) -> u64 {
    const MCG_STATUS: u32 = 0x17A;
    const MCG_STATUS_RIPV: u64 = 1;
    let intact = crate::x86::msr::read(MCG_STATUS).is_some_and(|status| status & MCG_STATUS_RIPV != 0);
    // SAFETY: exception stacks lie in the area; what `note` changes, the interrupted code reads as volatile
    // or does not use any more.
    let resume = unsafe { vendor::visit(area_of_stack(), HandOver { intact, rip: frame.rip }) };
    if intact { resume } else { 0 }
}

#[cfg(feature = "image")]
struct HandOver {
    intact: bool,
    rip: u64,
}

#[cfg(feature = "image")]
impl Visitor for HandOver {
    type Output = u64;

    fn visit<V: Vendor>(self, area: &mut Area<V>) -> u64 {
        crate::machine_check::note(area, &mut crate::x86::Processor, self.intact);
        V::resume_at(self.rip)
    }
}

/// The end: record and leave.
///
/// # Safety
/// `area` is this CPU's own, with the system's vector registers saved in it, and `frame` is on one of its
/// exception stacks. Whatever used the area before will not run again.
#[cfg(feature = "image")]
pub unsafe extern "C" fn fatal(area: *mut Cpu, frame: *const Frame) -> ! {
    // SAFETY: the stub passes this CPU's area and its own frame on the exception stack; whatever used
    // the area before will not run again.
    unsafe { crate::emergency::after_exception(area, &*frame) }
}
