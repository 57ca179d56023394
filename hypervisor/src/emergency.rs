//! When the hypervisor itself fails: a record, and the CPU leaves with the system's state intact.
//!
//! On a native CPU that is a return to the driver with a code. In an exit it is a departure at the
//! instruction that caused the exit. The stack is abandoned; nothing of it is needed any more. A second
//! failure on the way stops the CPU: there is nothing left to trust.

use core::fmt::{self, Write};

use mercury_abi::code::Code;
use mercury_abi::shared::{CrashRecord, LogKind};

use crate::cpu::{Area, Interrupted, Phase};
use crate::host::entry::{self, Next};
use crate::host::exceptions::Frame;
use crate::publish;
use crate::svm::{capture, exits, machine_check, run};
use crate::x86::{Hardware, Processor};

const NO_VECTOR: u32 = u32::MAX;
const RAX: usize = 0;
const RDX: usize = 2;
const RSP: usize = 4;

/// Ends here: an exception in the hypervisor's code.
#[cfg_attr(not(feature = "image"), allow(dead_code, reason = "only the image has exceptions"))]
pub fn after_exception(area: &mut Area, frame: &Frame) -> ! {
    let phase = enter(area);
    let mut crash = describe(area, phase, Code::HostException);
    crash.vector = frame.vector as u32;
    crash.host_rip_offset = frame.rip.wrapping_sub(crate::native::image_virt());
    crash.host_rsp_virt = frame.rsp;
    crash.error_code = frame.error_code;
    crash.host_cr2 = Processor.cr2();
    record(area, crash, format_args!("exception {} in the hypervisor", frame.vector));
    leave(area, phase, Code::HostException)
}

/// Ends here: a panic in the hypervisor's code.
pub fn after_panic(area: &mut Area, info: &core::panic::PanicInfo<'_>) -> ! {
    let phase = enter(area);
    let crash = describe(area, phase, Code::HostPanic);
    record(area, crash, format_args!("{info}"));
    leave(area, phase, Code::HostPanic)
}

/// The record of an exit that nobody knows.
pub fn record_unknown_exit(area: &mut Area) {
    let crash = describe(area, Phase::Exit, Code::UnknownExit);
    let exit_code = crash.exit_code;
    record(area, crash, format_args!("unknown exit {exit_code:#x}"));
}

/// The record of a control block that VMRUN refused after the guest had run.
pub fn record_invalid_state(area: &mut Area) {
    let [check, value] = area.cpu.gate.detail;
    let crash = describe(area, Phase::Exit, Code::InvalidGuestState);
    record(area, crash, format_args!("VMRUN refused the control block: check {check}, value {value:#x}"));
}

/// The phase in which it happened. A failure in the emergency path stops the CPU.
fn enter(area: &mut Area) -> Phase {
    let phase = area.cpu.phase;
    if phase == Phase::Emergency {
        stop();
    }
    area.cpu.phase = Phase::Emergency;
    if phase == Phase::Outside {
        note_interrupted(area);
    }
    phase
}

/// The world switch and the driver's hypercalls note nothing when they begin: what they leave in the
/// control block is a state to go on from at any moment.
fn note_interrupted(area: &mut Area) {
    let (rip, rax) = (area.control.rip, area.control.rax);
    area.cpu.interrupted = Interrupted { rip, rax, rdx: area.cpu.gate.outward.registers[RDX] };
    area.cpu.exit_tsc = Processor.tsc();
}

/// Publishes a record, with its message, and logs it.
fn record(area: &mut Area, mut crash: CrashRecord, message: fmt::Arguments<'_>) {
    let _ = Message::new(&mut crash.message).write_fmt(message);
    let cause = if crash.vector == NO_VECTOR { crash.exit_code } else { u64::from(crash.vector) };
    let arguments = [u64::from(crash.code), cause, crash.host_rip_offset, crash.guest_rip, 0];
    publish::log(area, LogKind::Crash, crash.tsc, arguments);
    area.shared().crash = crash;
}

/// What is known of the system above and of why it was left.
fn describe(area: &Area, phase: Phase, code: Code) -> CrashRecord {
    let known = CrashRecord {
        code: code as u32,
        vector: NO_VECTOR,
        tsc: Processor.tsc(),
        host_rip_offset: 0,
        host_rsp_virt: 0,
        error_code: 0,
        host_cr2: 0,
        exit_code: 0,
        exit_info1: 0,
        exit_info2: 0,
        exit_event: 0,
        guest_rip: 0,
        guest_rflags: 0,
        guest_cr0: 0,
        guest_cr2: 0,
        guest_cr3: 0,
        guest_cr4: 0,
        guest_cs_ss: 0,
        guest_registers: [0; 16],
        message: [0; 120],
    };
    if phase == Phase::Native { describe_native(area, known) } else { describe_exit(area, known) }
}

/// There was no exit, and the system's general registers are on its own stack.
fn describe_native(area: &Area, known: CrashRecord) -> CrashRecord {
    let inward = &area.cpu.gate.inward;
    let mut guest_registers = [0; 16];
    guest_registers[RSP] = inward.rsp;
    CrashRecord {
        guest_rip: inward.rip,
        guest_rflags: inward.rflags,
        guest_cr0: area.cpu.guest_cr0,
        guest_cr3: inward.cr3,
        guest_cr4: inward.cr4,
        guest_cs_ss: u64::from(inward.cs.selector) | u64::from(inward.ss.selector) << 16,
        guest_registers,
        ..known
    }
}

fn describe_exit(area: &Area, known: CrashRecord) -> CrashRecord {
    let control = &area.control;
    let mut guest_registers = area.cpu.gate.outward.registers;
    guest_registers[RAX] = area.cpu.interrupted.rax;
    guest_registers[RDX] = area.cpu.interrupted.rdx;
    guest_registers[RSP] = control.rsp;
    CrashRecord {
        exit_code: control.exit_code,
        exit_info1: control.exit_info1,
        exit_info2: control.exit_info2,
        exit_event: control.exit_event,
        guest_rip: area.cpu.interrupted.rip,
        guest_rflags: control.rflags,
        guest_cr0: control.cr0,
        guest_cr2: control.cr2,
        guest_cr3: control.cr3,
        guest_cr4: control.cr4,
        guest_cs_ss: u64::from(control.cs.selector) | u64::from(control.ss.selector) << 16,
        guest_registers,
        ..known
    }
}

fn leave(area: &mut Area, phase: Phase, code: Code) -> ! {
    let hardware = &mut Processor;
    let next = if phase == Phase::Native {
        area.cpu.gate.detail = [u64::from(code as u32), 0];
        publish::native(area, Code::FaultInSwitch);
        capture::put_back_native(area, hardware, Code::FaultInSwitch);
        Next::Leave
    } else {
        exits::depart(area, hardware, code)
    };
    if next == Next::Leave {
        run::return_extended_state(area);
    }
    let next = machine_check::finish(area, next);
    abandon_stack(area, next)
}

/// Jumps to the world switch or to the gate with a fresh stack.
fn abandon_stack(area: &mut Area, next: Next) -> ! {
    #[cfg(feature = "image")]
    let target = match next {
        Next::Leave => entry::leave as extern "C" fn() -> !,
        Next::Run => run::run,
    };
    #[cfg(not(feature = "image"))]
    let target: extern "C" fn() -> ! = {
        let _ = (next, entry::EXCEPTION_STUB_SIZE);
        stop
    };
    // SAFETY: both targets take the area in RDI, set their own stack pointer and never return; what lies
    // on this stack is not used again.
    unsafe {
        core::arch::asm!("jmp {}", in(reg) target, in("rdi") core::ptr::from_mut(area), options(noreturn));
    }
}

/// Stops this CPU for good.
extern "C" fn stop() -> ! {
    loop {
        // SAFETY: GIF = 0 and interrupts are off; nothing follows.
        unsafe { core::arch::asm!("cli", "hlt") };
    }
}

/// Text into a fixed field; what does not fit is cut off.
struct Message<'a> {
    bytes: &'a mut [u8],
    used: usize,
}

impl<'a> Message<'a> {
    fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, used: 0 }
    }
}

impl Write for Message<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            let Some(slot) = self.bytes.get_mut(self.used) else { break };
            *slot = byte;
            self.used += 1;
        }
        Ok(())
    }
}
