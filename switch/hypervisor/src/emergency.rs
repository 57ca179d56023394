//! Failures of the hypervisor itself: a record, and the CPU leaves with the system's state intact.
//!
//! On a native CPU that is a return to the driver with a code. In an exit it is a departure at the
//! instruction that caused the exit. The stack is abandoned, for nothing on it is needed any more. A second
//! failure on the way stops the CPU: there is nothing left to trust.

use core::fmt::{self, Write};

use mercury_abi::code::Code;
use mercury_abi::refusal::Refusal;
use mercury_abi::shared::{CrashRecord, ExitReason, LogKind};

use crate::cpu::{Area, Cpu, Phase, area_of_stack};
use crate::host::entry::{self, Next};
use crate::host::exceptions::Frame;
use crate::machine_check;
use crate::publish;
use crate::snapshot::rollback;
use crate::vendor::{self, LastExit, Vendor, Visitor};
use crate::x86::{Hardware, Processor};

const NO_VECTOR: u32 = u32::MAX;
const RAX: usize = 0;
const RDX: usize = 2;
const RSP: usize = 4;

/// Ends this CPU's attachment after an exception in the hypervisor's code.
///
/// # Safety
/// `area` is this CPU's, prepared, and whatever used it will not run again.
pub unsafe fn after_exception(area: *mut Cpu, frame: &Frame) -> ! {
    // SAFETY: the caller's promise.
    match unsafe { vendor::visit(area, Failure::Exception(frame)) } {}
}

/// Ends this CPU's attachment after a panic in the hypervisor's code.
///
/// # Safety
/// On a stack of the hypervisor's; whatever used its area will not run again.
pub unsafe fn after_panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: the stack lies in this CPU's area, which was prepared before any code could panic.
    match unsafe { vendor::visit(area_of_stack(), Failure::Panic(info)) } {}
}

/// The failure that ended the hypervisor's own work.
enum Failure<'a> {
    Exception(&'a Frame),
    Panic(&'a core::panic::PanicInfo<'a>),
}

impl Visitor for Failure<'_> {
    type Output = core::convert::Infallible;

    fn visit<V: Vendor>(self, area: &mut Area<V>) -> Self::Output {
        match self {
            Self::Exception(frame) => exception(area, frame),
            Self::Panic(info) => panic(area, info),
        }
    }
}

fn exception<V: Vendor>(area: &mut Area<V>, frame: &Frame) -> ! {
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

fn panic<V: Vendor>(area: &mut Area<V>, info: &core::panic::PanicInfo<'_>) -> ! {
    let phase = enter(area);
    let crash = describe(area, phase, Code::HostPanic);
    record(area, crash, format_args!("{info}"));
    leave(area, phase, Code::HostPanic)
}

/// Counts and records an exit that the hypervisor has no answer for.
pub fn record_unknown_exit<V: Vendor>(area: &mut Area<V>) {
    publish::count(area, ExitReason::Unknown);
    let crash = describe(area, Phase::Exit, Code::UnknownExit);
    let exit_code = crash.exit_code;
    record(area, crash, format_args!("unknown exit {exit_code:#x}"));
}

/// Records a control block that the processor refused after the guest had run.
pub fn record_invalid_state<V: Vendor>(area: &mut Area<V>) {
    let [check, value] = area.cpu.gate.detail;
    let crash = describe(area, Phase::Exit, Code::InvalidGuestState);
    record(area, crash, format_args!("refused control block: check {check}, value {value:#x}"));
}

/// Records a refusal whose reason has words, as [`record_invalid_state`] does.
pub fn record_refusal<V: Vendor>(area: &mut Area<V>, refusal: Refusal, value: u64) {
    let crash = describe(area, Phase::Exit, Code::InvalidGuestState);
    record(area, crash, format_args!("refused entry: {} ({value:#x})", refusal.text()));
}

/// Returns the phase of the failure. A failure in the emergency path stops the CPU.
fn enter<V: Vendor>(area: &mut Area<V>) -> Phase {
    let phase = area.cpu.phase;
    if phase == Phase::Emergency {
        stop();
    }
    rollback::cpu_failed(area, &mut Processor);
    area.cpu.phase = Phase::Emergency;
    if phase == Phase::Outside {
        note_interrupted(area);
    }
    phase
}

/// Notes where the system goes on. The world switch and the quick answers note nothing when they begin: at
/// any moment they leave the control block in a state to go on from.
fn note_interrupted<V: Vendor>(area: &mut Area<V>) {
    area.cpu.interrupted = V::interrupted(area);
    area.cpu.exit_tsc = Processor.tsc();
}

/// Publishes a record, with its message, and logs it.
fn record<V: Vendor>(area: &mut Area<V>, mut crash: CrashRecord, message: fmt::Arguments<'_>) {
    let _ = Message::new(&mut crash.message).write_fmt(message);
    let cause = if crash.vector == NO_VECTOR { crash.exit_code } else { u64::from(crash.vector) };
    let arguments = [u64::from(crash.code), cause, crash.host_rip_offset, crash.guest_rip, 0];
    publish::log(area, LogKind::Crash, crash.tsc, arguments);
    area.shared().crash = crash;
}

/// Describes the system above, and the reason that it was left.
fn describe<V: Vendor>(area: &Area<V>, phase: Phase, code: Code) -> CrashRecord {
    let known = CrashRecord { code: code as u32, tsc: Processor.tsc(), ..CrashRecord::NONE };
    if phase == Phase::Native { describe_native(area, known) } else { describe_exit(area, known) }
}

/// Describes a CPU in a native operation: there was no exit, and the system's general registers are on its
/// own stack.
fn describe_native<V: Vendor>(area: &Area<V>, known: CrashRecord) -> CrashRecord {
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

fn describe_exit<V: Vendor>(area: &Area<V>, known: CrashRecord) -> CrashRecord {
    let exit: LastExit = V::last_exit(area);
    let mut guest_registers = exit.registers;
    guest_registers[RAX] = area.cpu.interrupted.rax;
    guest_registers[RDX] = area.cpu.interrupted.rdx;
    CrashRecord {
        exit_code: exit.code,
        exit_info1: exit.info1,
        exit_info2: exit.info2,
        exit_event: exit.event,
        guest_rip: area.cpu.interrupted.rip,
        guest_rflags: exit.rflags,
        guest_cr0: exit.cr0,
        guest_cr2: exit.cr2,
        guest_cr3: exit.cr3,
        guest_cr4: exit.cr4,
        guest_cs_ss: u64::from(exit.cs) | u64::from(exit.ss) << 16,
        guest_registers,
        ..known
    }
}

fn leave<V: Vendor>(area: &mut Area<V>, phase: Phase, code: Code) -> ! {
    let hardware = &mut Processor;
    let next = if phase == Phase::Native {
        area.cpu.gate.detail = [u64::from(code as u32), 0];
        publish::native(area, Code::FaultInSwitch);
        V::put_back_native(area, hardware, Code::FaultInSwitch);
        Next::Leave
    } else {
        V::depart(area, hardware, code)
    };
    if next == Next::Leave {
        V::restore_extended_state(area);
    }
    let next = machine_check::finish(area, hardware, next);
    abandon_stack(area, next)
}

/// Jumps to the world switch or to the gate with a fresh stack.
fn abandon_stack<V: Vendor>(area: &mut Area<V>, next: Next) -> ! {
    #[cfg(feature = "image")]
    let target = match next {
        Next::Leave => entry::leave as extern "C" fn() -> !,
        Next::Run => V::run(),
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
        // SAFETY: interrupts are off; nothing follows.
        unsafe { core::arch::asm!("cli", "hlt") };
    }
}

/// Text in a field of fixed size. A longer text is cut off.
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
