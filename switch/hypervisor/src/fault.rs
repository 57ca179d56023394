//! Fault points. They are built in only with the `fault-injection` feature. Without it every call here
//! compiles to nothing.

use mercury_abi::code::Code;
use mercury_abi::gate::FaultPoint;

use crate::cpu::Area;
use crate::vendor::Vendor;

/// Returns true if this passage of `point` is the armed one, and disarms the point.
#[inline]
#[must_use]
pub fn fires<V: Vendor>(area: &mut Area<V>, point: FaultPoint) -> bool {
    if !cfg!(feature = "fault-injection") {
        return false;
    }
    let armed = &mut area.cpu.gate.fault;
    if armed.point != point as u32 || armed.passage == 0 {
        return false;
    }
    armed.passage -= 1;
    if armed.passage > 0 {
        return false;
    }
    armed.point = 0;
    area.cpu.gate.fault_fired += 1;
    true
}

/// Returns true if a point is armed that lies beyond the vendor's `quick`, so that the next exit must take
/// the long way.
#[inline]
#[must_use]
pub fn is_armed_beyond_quick<V: Vendor>(area: &Area<V>) -> bool {
    const NONE: u32 = FaultPoint::None as u32;
    const QUICK_PAGE_FAULT: u32 = FaultPoint::QuickPageFault as u32;
    cfg!(feature = "fault-injection") && !matches!(area.cpu.gate.fault.point, NONE | QUICK_PAGE_FAULT)
}

/// Arms a point on this CPU.
#[must_use]
pub fn arm<V: Vendor>(area: &mut Area<V>, point: u64, passage: u64) -> Code {
    if !cfg!(feature = "fault-injection") {
        return Code::UnknownOperation;
    }
    let (Ok(point), Ok(passage)) = (u32::try_from(point), u32::try_from(passage)) else {
        return Code::BadArgument;
    };
    area.cpu.gate.fault.point = point;
    area.cpu.gate.fault.passage = passage;
    Code::Ok
}

/// Returns the word that [`FaultPoint::RunField`] damages, by its offset or encoding, and the bits to flip.
#[must_use]
pub fn field_and_bits<V: Vendor>(area: &Area<V>) -> (u32, u64) {
    let armed = &area.cpu.gate.fault;
    (armed.offset & 0xFFFF, u64::from(armed.value) << (armed.offset >> 16 & 63))
}

/// Fails with an error code where an armed point fires.
///
/// # Errors
/// [`Code::InjectedFault`].
#[inline]
pub fn check<V: Vendor>(area: &mut Area<V>, point: FaultPoint) -> Result<(), Code> {
    if fires(area, point) { Err(Code::InjectedFault) } else { Ok(()) }
}

/// Passes the points of a quick answer.
#[inline]
pub fn in_quick_answer<V: Vendor>(area: &mut Area<V>) {
    #[cfg(feature = "fault-injection")]
    if fires(area, FaultPoint::QuickPageFault) {
        real::page_fault_with_live_vectors(&mut area.cpu.xmm);
    }
    let _ = area;
}

/// Passes the points of a detach that takes the long way.
#[inline]
pub fn in_detach<V: Vendor>(area: &mut Area<V>) {
    assert!(!fires(area, FaultPoint::DetachPanic), "injected: detach");
    #[cfg(feature = "fault-injection")]
    if fires(area, FaultPoint::DetachPageFault) {
        real::page_fault();
    }
}

/// Passes the points of an exit at which the hypervisor itself fails.
///
/// # Panics
/// On demand.
#[cfg(feature = "fault-injection")]
pub fn in_exit<V: Vendor>(area: &mut Area<V>) {
    if fires(area, FaultPoint::ExitPageFault) {
        real::page_fault();
    }
    if fires(area, FaultPoint::ExitGeneralProtection) {
        real::general_protection();
    }
    if fires(area, FaultPoint::ExitInvalidOpcode) {
        real::invalid_opcode();
    }
    if fires(area, FaultPoint::ExitStackOverflow) {
        core::hint::black_box(real::stack_overflow(0));
    }
    assert!(!fires(area, FaultPoint::ExitPanic), "injected: exit");
}

/// Returns an interrupt whose delivery an exit is to have interrupted, as [`crate::event`] has it, if that
/// point fires. With this RFLAGS the guest must take interrupts: an entry that injects one otherwise is
/// refused (SDM, "Checks on guest RIP, RFLAGS").
#[cfg(feature = "fault-injection")]
pub fn interrupted_event<V: Vendor>(area: &mut Area<V>, rflags: u64) -> Option<u64> {
    use crate::event;
    /// Linux's vector for rescheduling. Its handler does nothing if no CPU has sent the interrupt.
    const RESCHEDULE: u64 = 0xFD;
    let takes_interrupts = rflags & crate::x86::RFLAGS_IF != 0;
    (takes_interrupts && fires(area, FaultPoint::ExitEvent))
        .then_some(event::VALID | event::EXTERNAL | RESCHEDULE)
}

/// Real faults of the hypervisor itself, on demand.
#[cfg(feature = "fault-injection")]
pub mod real {
    /// Writes to an address that the hypervisor does not map.
    pub fn page_fault() {
        // SAFETY: it is the point that this faults; nothing is mapped there.
        unsafe { core::ptr::without_provenance_mut::<u8>(0x1234_5000).write_volatile(1) };
    }

    /// Writes to an address that the hypervisor does not map, while the vector registers are still the
    /// system's. The registers that an earlier exit has saved are overwritten before, so that a wrong restore
    /// shows.
    pub fn page_fault_with_live_vectors(stale: &mut crate::cpu::Xmm) {
        // SAFETY: fills the array; and it is the point that the write faults, for nothing is mapped there.
        // Both by hand: compiled code might use a vector register.
        unsafe {
            core::arch::asm!(
                "rep stosb",
                "mov byte ptr [0x12345000], 1",
                inout("rdi") stale => _,
                inout("rcx") size_of_val(stale) => _,
                in("al") 0xA5_u8,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Writes to a non-canonical address.
    pub fn general_protection() {
        // SAFETY: it is the point that this faults.
        unsafe {
            const ADDRESS: u64 = 0x8000_0000_0000_0000;
            core::arch::asm!("mov rax, [{}]", in(reg) ADDRESS, out("rax") _, options(nostack));
        }
    }

    /// Executes an undefined instruction.
    pub fn invalid_opcode() {
        // SAFETY: it is the point that this faults.
        unsafe { core::arch::asm!("ud2") };
    }

    /// Calls itself until the stack reaches the guard page.
    pub fn stack_overflow(depth: u64) -> u64 {
        let mut frame = [depth; 64];
        core::hint::black_box(&mut frame);
        if depth == u64::MAX {
            0
        } else {
            stack_overflow(depth + 1).wrapping_add(frame[(depth % 64) as usize])
        }
    }
}
