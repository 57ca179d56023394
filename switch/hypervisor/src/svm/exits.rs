//! Exits of AMD's processors: translates the processor's report into the words of [`crate::exit`], and the
//! answer back.

use mercury_abi::code::Code;
use mercury_abi::gate::{FaultPoint, HYPERCALL_MAGIC};
use mercury_abi::shared::{ExitReason, LogKind};
use mercury_preflight::bits::cr4;

use super::capture::{self, feature};
use super::vmcb::{GuestState, TLB_FLUSH_ALL, TLB_KEEP, event, exit_code};
use super::{Area, guests, msr, quick, refusal, rollback, run, stores};
use crate::cpu::{Interrupted, Phase};
use crate::exit::{Answer, Fault};
use crate::host::entry::Next;
use crate::nested;
use crate::snapshot::view::Access;
use crate::x86::{DR6_BS, Hardware, Processor, RFLAGS_RF, RFLAGS_TF};
use crate::{emergency, exit, fault, integrity, machine_check, publish};

/// Length of VMMCALL in bytes.
pub const VMMCALL_LENGTH: u64 = 3;
/// Length of RDMSR and WRMSR in bytes.
pub const MSR_LENGTH: u64 = 2;
const STGI_LENGTH: u64 = 3;
const CLGI_LENGTH: u64 = 3;
const VMRUN_LENGTH: u64 = 3;
const VMSAVE_LENGTH: u64 = 3;
/// Bits of a nested fault's first qualification (APM vol. 2, 15.25.6).
const NESTED_FAULT_PRESENT: u64 = 1 << 0;
const NESTED_FAULT_WRITE: u64 = 1 << 1;
const NESTED_FAULT_RESERVED: u64 = 1 << 3;
const RCX: usize = 1;
const RDX: usize = 2;
const RSI: usize = 6;
const RDI: usize = 7;

/// Answers the exits that [`super::quick`] does not. The world switch has saved all of the system's
/// registers and loaded the hypervisor's extended state.
///
/// # Safety
/// `area` is this CPU's own, and GIF is 0: no other code uses the area until this returns.
pub unsafe extern "C" fn svm_exit(area: *mut Area) -> Next {
    // SAFETY: the world switch passes this CPU's area; nothing else uses it while GIF = 0.
    let area = unsafe { &mut *area };
    let hardware = &mut Processor;
    let control = &mut area.control;
    control.tlb_control = TLB_KEEP;
    area.cpu.phase = Phase::Exit;
    area.cpu.interrupted =
        Interrupted { rip: control.rip, rax: control.rax, rdx: area.cpu.gate.outward.registers[RDX] };
    area.cpu.exit_tsc = hardware.tsc();
    if area.control.exit_code != exit_code::INVALID {
        area.cpu.entered = 1;
    }
    let next = match area.own.guest_exited {
        0 => handle(area, hardware),
        _ => guests::exited(area, hardware),
    };
    guests::settle(area, next);
    let ticks = hardware.tsc().wrapping_sub(area.cpu.exit_tsc);
    publish::add_ticks(area, ticks);
    if next == Next::Leave {
        run::restore_extended_state(area);
    }
    machine_check::finish(area, hardware, next)
}

/// Answers one exit of the system.
pub fn handle(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    machine_check::exit_begins(area, hardware);
    if area.cpu.leave_pending != 0 {
        return leave_now(area, hardware);
    }
    #[cfg(feature = "fault-injection")]
    super::faults::in_exit(area);
    hand_over_event(area, hardware);
    if fault::fires(area, FaultPoint::ExitUnknown) {
        return unknown(area, hardware);
    }
    let (answer, length) = match area.control.exit_code {
        exit_code::VMMCALL => (vmmcall(area, hardware), VMMCALL_LENGTH),
        exit_code::MSR => (msr_access(area, hardware), MSR_LENGTH),
        exit_code::NPF if is_explained(area.control.exit_info1) => (nested_fault(area, hardware), 0),
        exit_code::STGI if area.cpu.is_held != 0 => (Answer::Skip, STGI_LENGTH),
        exit_code::VMRUN if guests::has_svm(area) => (guests::run(area, hardware), VMRUN_LENGTH),
        exit_code::STGI if guests::has_svm(area) => (guests::set_gif(area), STGI_LENGTH),
        exit_code::CLGI if guests::has_svm(area) => (guests::clear_gif(area), CLGI_LENGTH),
        exit_code::VMSAVE if guests::has_svm(area) => (guests::save_state(area, hardware), VMSAVE_LENGTH),
        exit_code::INVLPGA | exit_code::VMRUN | exit_code::VMLOAD..=exit_code::SKINIT => {
            publish::count(area, ExitReason::VirtInstruction);
            (Answer::Inject(Fault::InvalidOpcode), 0)
        }
        exit_code::VINTR if area.control.awaits_window() => {
            publish::count(area, ExitReason::Other);
            (Answer::Retry, 0)
        }
        exit_code::CR3_WRITE => (stores::poke_ends(area), 0),
        exit_code::NMI => (rollback::nmi(area, hardware), 0),
        exit_code::IRET => (rollback::nmi_ends(area, hardware), 0),
        exit_code::SHUTDOWN if area.cpu.on_snapshot != 0 => match rollback::shutdown(area, hardware) {
            Ok(answer) => (answer, 0),
            Err(next) => return next,
        },
        exit_code::INVALID => return invalid(area, hardware),
        _ => return unknown(area, hardware),
    };
    apply(area, hardware, answer, length)
}

fn vmmcall(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    let registers = &area.cpu.gate.outward.registers;
    if registers[RCX] != HYPERCALL_MAGIC || area.control.cpl != 0 {
        publish::count(area, ExitReason::ForeignHypercall);
        return Answer::Inject(Fault::InvalidOpcode);
    }
    let (first, second) = (registers[RDI], registers[RSI]);
    publish::count(area, ExitReason::Hypercall);
    exit::hypercall(area, hardware, area.control.rax, first, second)
}

fn msr_access(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    let registers = &area.cpu.gate.outward.registers;
    let index = registers[RCX] as u32;
    if quick::asks_for_mode(area) {
        publish::count(area, ExitReason::MsrEfer);
        return Answer::Value(quick::efer_with_mode(area));
    }
    if area.control.exit_info1 == 0 {
        return msr::read(area, hardware, index);
    }
    let value = registers[RDX] << 32 | area.control.rax & 0xFFFF_FFFF;
    msr::write(area, hardware, index, value)
}

/// Returns true if the tables explain a nested fault: no page is mapped there yet, or a page was written
/// that cannot be. Any other fault would come again and again.
const fn is_explained(info: u64) -> bool {
    info & NESTED_FAULT_RESERVED == 0 && (info & NESTED_FAULT_PRESENT == 0 || info & NESTED_FAULT_WRITE != 0)
}

fn nested_fault(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    let address = area.control.exit_info2;
    let access = (area.control.exit_info1 & NESTED_FAULT_WRITE != 0).then_some(Access::Write);
    let rip = area.control.rip;
    if access.is_some()
        && let Some(answer) = stores::answer(area, hardware, address)
    {
        return answer;
    }
    let answer = nested::fault(area, hardware, address, access);
    exit::nested_fault(area, hardware, answer, [address, rip])
}

/// Carries an answer out. `length` is that of the intercepted instruction, for processors that do not save
/// the next RIP.
fn apply(area: &mut Area, hardware: &mut impl Hardware, answer: Answer, length: u64) -> Next {
    match answer {
        Answer::Retry => {}
        Answer::RetryFlushed => area.control.tlb_control = TLB_FLUSH_ALL,
        Answer::Skip => skip(area, length),
        Answer::Value(value) => {
            skip(area, length);
            area.control.rax = value & 0xFFFF_FFFF;
            area.cpu.gate.outward.registers[RDX] = value >> 32;
        }
        Answer::Hypercall(code, value) => {
            skip(area, length);
            area.control.rax = u64::from(code as u32);
            area.cpu.gate.outward.registers[RDX] = value;
        }
        Answer::HypercallFlushed => {
            area.control.tlb_control = TLB_FLUSH_ALL;
            return apply(area, hardware, Answer::Hypercall(Code::Ok, 0), length);
        }
        Answer::NewTables(root) => {
            area.control.nested_cr3 = root.as_u64();
            area.own.shadow.expire();
            integrity::publish(area);
            return apply(area, hardware, Answer::HypercallFlushed, length);
        }
        Answer::Inject(fault) => inject(area, fault),
        Answer::Detach => return detach(area, hardware, length),
        Answer::Released(because) | Answer::Depart(because) => return depart(area, hardware, because),
    }
    enter_again(area, hardware)
}

/// Enters the guest, if VMRUN will take its control block.
fn enter_again(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    if !refusal::none(&area.control) {
        if refusal::is_foreign(&area.control) {
            return leave_with_foreign_state(area, hardware);
        }
        return invalid(area, hardware);
    }
    area.own.entry_state = GuestState::of(&area.control);
    area.own.entry_state_valid = 1;
    #[cfg(feature = "fault-injection")]
    super::faults::before_entry(area);
    Next::Run
}

/// Moves past the intercepted instruction as the processor would: no interrupt shadow, and a single
/// step raises #DB (HARDWARE 0.9). The next RIP is the processor's where it saves one.
#[inline]
pub fn skip(area: &mut Area, length: u64) {
    let control = &mut area.control;
    let saved = area.cpu.features & feature::NEXT_RIP != 0 && control.next_rip != 0;
    control.rip = if saved { control.next_rip } else { control.rip.wrapping_add(length) };
    control.interrupt_shadow = 0;
    if control.rflags & RFLAGS_TF != 0 && control.inject_event & event::VALID == 0 {
        control.dr6 |= DR6_BS;
        control.inject_event = event::DEBUG;
    }
}

/// Injects a fault. It has RF in the RFLAGS that it pushes (APM vol. 2, "Resume flag").
fn inject(area: &mut Area, fault: Fault) {
    area.control.rflags |= RFLAGS_RF;
    area.control.inject_event = match fault {
        Fault::InvalidOpcode => event::INVALID_OPCODE,
        Fault::GeneralProtection => event::GENERAL_PROTECTION,
    };
}

/// Delivers an event again that was being delivered when the exit struck (APM vol. 2, 15.7.2). Software
/// interrupts and the exceptions of INT3 and INTO are not delivered again: their instruction runs again.
/// QEMU reports external interrupts and NMIs as exceptions. No exception has a vector above 31.
fn hand_over_event(area: &mut Area, hardware: &mut impl Hardware) {
    let event = area.control.exit_event;
    if event & event::VALID == 0 {
        return;
    }
    let Some(again) = event_again(event) else { return };
    area.control.inject_event = again;
    area.control.exit_event = 0;
    let exit_code = area.control.exit_code;
    let tsc = hardware.tsc();
    publish::log(area, LogKind::Reinjected, tsc, [event, exit_code, 0, 0, 0]);
}

/// Returns the event to inject for an interrupted delivery; `None` if the instruction raises it again by
/// itself.
pub(super) fn event_again(event: u64) -> Option<u64> {
    let vector = event & 0xFF;
    match (event & event::TYPE, vector) {
        (event::SOFTWARE, _) | (event::EXCEPTION, 3 | 4) => None,
        (event::EXCEPTION, 2) => Some(event::VALID | event::NMI | 2),
        (event::EXCEPTION, 32..) => Some(event::VALID | event::EXTERNAL | vector),
        _ => Some(event),
    }
}

fn detach(area: &mut Area, hardware: &mut impl Hardware, length: u64) -> Next {
    skip(area, length);
    area.control.rax = 0;
    fault::in_detach(area);
    exit::departs(area, Code::Ok);
    publish::log(area, LogKind::Detached, area.cpu.exit_tsc, [0; 5]);
    capture::put_back(area, hardware);
    Next::Leave
}

/// Has this CPU leave by itself: it executes the exit's instruction natively. An event to deliver has no
/// native counterpart. With one the guest is entered once more, and leaves at its next exit.
pub fn depart(area: &mut Area, hardware: &mut impl Hardware, because: Code) -> Next {
    let interrupted = area.cpu.interrupted;
    area.control.rip = interrupted.rip;
    area.control.rax = interrupted.rax;
    area.cpu.gate.outward.registers[RDX] = interrupted.rdx;
    // A failure may have struck before the event was handed over.
    hand_over_event(area, hardware);
    if area.control.inject_event & event::VALID != 0 {
        return leave_later(area, because);
    }
    finish(area, hardware, because)
}

/// Enters the guest with an event. The CPU leaves at the guest's next exit: as soon as it takes interrupts
/// again.
fn leave_later(area: &mut Area, because: Code) -> Next {
    area.cpu.leave_pending = because as u32;
    area.control.await_window(true);
    Next::Run
}

/// Answers the exit after an event was handed over by a CPU that wants to leave. If the delivery itself
/// made the exit, and the tables have the cure, the event is delivered once more: natively nothing would
/// deliver it.
fn leave_now(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    let event = area.control.exit_event;
    if let Some(again) = event_again(event).filter(|_| event & event::VALID != 0) {
        if let Some(answer) = cure(area, hardware) {
            hand_over_event(area, hardware);
            return apply(area, hardware, answer, 0);
        }
        exit::lose_event(area, hardware, again);
    }
    let because = Code::from_number(area.cpu.leave_pending).unwrap_or(Code::UnknownExit);
    if area.control.exit_code == exit_code::INVALID {
        area.control.cr4 &= cr4::KNOWN;
    }
    finish(area, hardware, because)
}

/// Returns the answer to a nested fault that lets the guest go on.
fn cure(area: &mut Area, hardware: &mut impl Hardware) -> Option<Answer> {
    if area.control.exit_code != exit_code::NPF || !is_explained(area.control.exit_info1) {
        return None;
    }
    let answer = nested_fault(area, hardware);
    (!matches!(answer, Answer::Depart(_))).then_some(answer)
}

fn finish(area: &mut Area, hardware: &mut impl Hardware, because: Code) -> Next {
    area.cpu.leave_pending = 0;
    let control = &area.control;
    let exit = [control.exit_code, control.rip, control.exit_info1, control.exit_info2];
    exit::departs_at(area, because, exit);
    capture::put_back(area, hardware);
    Next::Leave
}

/// Records an exit that the hypervisor has no answer for. The CPU runs on natively.
fn unknown(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    emergency::record_unknown_exit(area);
    depart(area, hardware, Code::UnknownExit)
}

/// Answers a control block that VMRUN refused, or will. Right after an attach no instruction of the guest
/// has run: the driver gets the failing check. Later the block was corrupted: the CPU leaves with all state
/// that is still good, after the instruction that was answered. Of CR4 it keeps the known bits.
fn invalid(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    let check = refusal::first(&area.control);
    let detail = [check as u64, refusal::value(&area.control, check)];
    area.cpu.gate.detail = detail;
    let tsc = hardware.tsc();
    publish::log(area, LogKind::InvalidState, tsc, [detail[0], detail[1], 0, 0, 0]);
    if area.cpu.entered == 0 {
        exit::departs(area, Code::InvalidGuestState);
        capture::put_back_native(area, hardware, Code::InvalidGuestState);
        return Next::Leave;
    }
    if area.control.exit_code == exit_code::INVALID && area.own.entry_state_valid != 0 {
        let entry_state = area.own.entry_state;
        entry_state.put(&mut area.control);
        let (rip, rax) = (area.control.rip, area.control.rax);
        area.cpu.interrupted = Interrupted { rip, rax, ..area.cpu.interrupted };
    }
    area.control.cr4 &= cr4::KNOWN;
    emergency::record_invalid_state(area);
    finish(area, hardware, Code::InvalidGuestState)
}

/// Has the CPU leave, after the instruction that was answered, because the system has set a bit of CR4 that
/// Mercury does not know. The processor took the bit, so this is no corruption. But its meaning for an
/// attached CPU is unknown.
fn leave_with_foreign_state(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    // The CPU may have wanted to leave before.
    let because = Code::from_number(area.cpu.leave_pending).filter(|code| *code != Code::Ok);
    let because = because.unwrap_or(Code::Cr4Unsupported);
    if area.control.inject_event & event::VALID != 0 {
        return leave_later(area, because);
    }
    finish(area, hardware, because)
}
