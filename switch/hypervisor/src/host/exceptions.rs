//! Exceptions inside the hypervisor. An expected one continues at its recovery address. A machine check is
//! handed to the system above. Any other exception ends this CPU's attachment.

#[cfg(feature = "image")]
use crate::{
    cpu::{Area, Cpu, area_of_stack},
    vendor::{self, Vendor, Visitor},
};

/// Stack frame of an exception: the registers that the stub has pushed, below those that the processor has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// R15 to RAX, in the order of the stub's pushes reversed.
    pub registers: [u64; 15],
    /// Exception vector, 0 to 31.
    pub vector: u64,
    /// Error code of the exception; 0 if it has none.
    pub error_code: u64,
    /// RIP of the interrupted code, virtual.
    pub rip: u64,
    /// CS of the interrupted code.
    pub cs: u64,
    /// RFLAGS of the interrupted code.
    pub rflags: u64,
    /// RSP of the interrupted code, virtual.
    pub rsp: u64,
    /// SS of the interrupted code.
    pub ss: u64,
}

/// Vector of #GP, general protection.
pub const GENERAL_PROTECTION: u64 = 13;
/// Vector of NMIs in the IDT.
pub const NMI: u64 = 2;
/// Vector of #MC, machine check.
pub const MACHINE_CHECK: u64 = 18;

/// Returns the address to continue at after the exception in `frame`, or 0 if there is none.
///
/// # Safety
/// On an exception's own stack, with the frame that the stub pushed there.
#[cfg(feature = "image")]
pub unsafe extern "C" fn recover(frame: *const Frame) -> u64 {
    // SAFETY: the stub passes its own frame.
    let frame = unsafe { &*frame };
    match frame.vector {
        GENERAL_PROTECTION => crate::x86::msr::recovery_of(frame.rip).unwrap_or(0),
        // Taken on purpose: there is none while GIF = 0. Without an IRET others stay blocked, as they are
        // to be in the handler of the system above (APM vol. 2, 8.2.3).
        NMI => frame.rip,
        MACHINE_CHECK => hand_over_machine_check(frame),
        _ => 0,
    }
}

/// Hands a machine check while GIF = 0 to the system above. The interrupted code goes on if its instruction
/// stream is intact (MCG_STATUS.RIPV). Otherwise this CPU leaves.
#[cfg(feature = "image")]
fn hand_over_machine_check(frame: &Frame) -> u64 {
    use crate::x86::msr;
    const MCG_STATUS_RIPV: u64 = 1;
    let intact = msr::read(msr::MCG_STATUS).is_some_and(|status| status & MCG_STATUS_RIPV != 0);
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

/// Records the exception, and has this CPU leave.
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
