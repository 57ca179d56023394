//! Exits of Intel's processors: translates the processor's report into the words of [`crate::exit`], and
//! the answer back.

use core::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::gate::{FaultPoint, HYPERCALL_MAGIC};
use mercury_abi::shared::{EXIT_CODE_VMX, ExitReason, LogKind};
use mercury_preflight::bits::{cr0, cr4};
use mercury_preflight::vmx::{primary, secondary};

use super::capture::{self, feature, privilege};
use super::vmcs::{self, blocking, event, reason};
use super::{Area, msr, refusal, reset, rollback, run};
use crate::cpu::{Interrupted, Phase};
use crate::exit::{Answer, Fault};
use crate::host::entry::Next;
use crate::nested;
use crate::snapshot::view::Access;
use crate::vendor::LastExit;
use crate::x86::{Hardware, Processor, RFLAGS_RF, RFLAGS_TF, msr::EFER_LMA};
use crate::{emergency, exit, fault, machine_check, publish};

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RBX: usize = 3;
const RSP: usize = 4;
const RSI: usize = 6;
const RDI: usize = 7;

/// Bits of an EPT violation's qualification (SDM, table "Exit qualification for EPT violations").
const VIOLATION_WRITE: u64 = 1 << 1;
const VIOLATION_EXECUTE: u64 = 1 << 2;
const VIOLATION_MAPPED: u64 = 0b111 << 3;
/// NMIs were unblocked by the IRET that exited: the block must be there when it runs again.
const NMI_UNBLOCKED_BY_IRET: u64 = 1 << 12;
/// Pending debug exception: single step ("Guest non-register state").
const PENDING_BS: u64 = 1 << 14;
/// Access rights of a segment: 64-bit code.
const CS_LONG: u64 = 1 << 13;
/// IA32_DEBUGCTL.BTF: single steps are of branches.
const DEBUGCTL_BTF: u64 = 1 << 1;

/// Answers the exits that [`super::run`] and [`super::quick`] do not. The world switch has saved all of the
/// system's registers.
///
/// # Safety
/// `area` is this CPU's own, and interrupts are off: no other code uses the area until this returns, but
/// for the handler of NMIs, which touches the gate's NMI block only.
pub unsafe extern "C" fn vmx_exit(area: *mut Area) -> Next {
    // SAFETY: the world switch passes this CPU's area; nothing else uses it in an exit.
    let area = unsafe { &mut *area };
    let hardware = &mut Processor;
    area.cpu.phase = Phase::Exit;
    begin(area, hardware);
    let next = handle(area, hardware);
    let ticks = hardware.tsc().wrapping_sub(area.cpu.exit_tsc);
    publish::add_ticks(area, ticks);
    if next == Next::Leave {
        run::restore_extended_state(area);
    }
    machine_check::finish(area, hardware, next)
}

/// Notes the registers with which the system goes on if this exit fails, and that the guest has run.
pub fn begin(area: &mut Area, hardware: &mut impl Hardware) {
    area.cpu.exit_tsc = hardware.tsc();
    note_exit(area, hardware);
    let registers = &area.cpu.gate.outward.registers;
    let (rax, rdx) = (registers[RAX], registers[RDX]);
    area.cpu.interrupted = Interrupted { rip: hardware.vmread(vmcs::GUEST_RIP), rax, rdx };
    if !entry_failed(area.own.exit.code as u32) {
        area.cpu.entered = 1;
    }
}

/// Returns true if the processor refused to enter.
#[must_use]
pub const fn entry_failed(reason: u32) -> bool {
    reason & (reason::ENTRY_FAILED | reason::INSTRUCTION_FAILED) != 0
}

/// Copies the processor's report of the exit, and the system's registers: for the handler, and for the
/// record of a crash.
pub fn note_exit(area: &mut Area, hardware: &mut impl Hardware) {
    let mut registers = area.cpu.gate.outward.registers;
    registers[RSP] = hardware.vmread(vmcs::GUEST_RSP);
    let (code, info1) = if area.own.failed != 0 {
        let error =
            if area.own.failed_invalid != 0 { 0 } else { hardware.vmread(vmcs::VM_INSTRUCTION_ERROR) };
        (u64::from(reason::INSTRUCTION_FAILED), error)
    } else {
        (hardware.vmread(vmcs::EXIT_REASON) & 0xFFFF_FFFF, hardware.vmread(vmcs::EXIT_QUALIFICATION))
    };
    area.own.failed = 0;
    let vectoring = if entry_failed(code as u32) { 0 } else { hardware.vmread(vmcs::VECTORING) };
    area.own.exit = LastExit {
        code,
        info1,
        info2: hardware.vmread(vmcs::GUEST_PHYSICAL_ADDRESS),
        event: vectoring | hardware.vmread(vmcs::VECTORING_ERROR_CODE) << 32,
        rflags: hardware.vmread(vmcs::GUEST_RFLAGS),
        cr0: hardware.vmread(vmcs::GUEST_CR0),
        cr2: hardware.cr2(),
        cr3: hardware.vmread(vmcs::GUEST_CR3),
        cr4: hardware.vmread(vmcs::GUEST_CR4),
        cs: hardware.vmread(vmcs::GUEST_CS_SELECTOR) as u16,
        ss: hardware.vmread(vmcs::GUEST_SS_SELECTOR) as u16,
        registers,
    };
}

/// Answers one exit of the system.
pub fn handle(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    let reason = area.own.exit.code as u32;
    machine_check::exit_begins(area, hardware);
    if area.own.turned_back != 0 {
        let answer = rollback::turned_back(area, hardware);
        return apply(area, hardware, answer);
    }
    if entry_failed(reason) {
        return not_entered(area, hardware);
    }
    keep_nmis_blocked(area, hardware);
    if area.cpu.leave_pending != 0 && can_leave(area, hardware) {
        return leave_now(area, hardware);
    }
    #[cfg(feature = "fault-injection")]
    super::faults::in_exit(area);
    hand_over_event(area, hardware);
    if fault::fires(area, FaultPoint::ExitUnknown) {
        return unknown(area, hardware);
    }
    let answer = match reason & 0xFFFF {
        reason::VMCALL => vmcall(area, hardware),
        reason::CPUID => cpuid(area, hardware),
        reason::RDMSR | reason::WRMSR => msr_access(area, hardware, reason & 0xFFFF),
        reason::EPT_VIOLATION if is_explained(area.own.exit.info1, area.cpu.on_snapshot != 0) => {
            nested_fault(area, hardware)
        }
        reason::XSETBV => xsetbv(area, hardware),
        reason::INVD => invd(area, hardware),
        reason::VMXOFF | reason::VMXON if privilege(hardware) == 0 => owner(area, hardware, reason & 0xFFFF),
        reason::GETSEC if area.own.exit.cr4 & CR4_SMXE != 0 => return unknown(area, hardware),
        reason::VMCLEAR..=reason::VMWRITE
        | reason::VMXOFF
        | reason::VMXON
        | reason::INVEPT
        | reason::INVVPID
        | reason::GETSEC => undefined(area),
        reason::CONTROL_REGISTER => control_register(area, hardware),
        reason::MONITOR_TRAP | reason::NMI_WINDOW => other(area, Answer::Retry),
        reason::NMI if area.own.watched != 0 => rollback::nmi(area, hardware),
        // An event that still waits for a window asks again.
        reason::INTERRUPT_WINDOW if area.own.awaits_window != 0 => {
            await_window(area, hardware, false);
            other(area, Answer::Retry)
        }
        reason::INIT => return reset::init(area, hardware),
        reason::SIPI => return reset::start_up(area, hardware),
        reason::TRIPLE_FAULT => match rollback::triple_fault(area, hardware) {
            Ok(()) => other(area, Answer::RetryFlushed),
            Err(_) => return reset::shut_down(area, hardware),
        },
        _ => return unknown(area, hardware),
    };
    apply(area, hardware, answer)
}

const CR4_SMXE: u64 = 1 << 14;

fn other(area: &mut Area, answer: Answer) -> Answer {
    publish::count(area, ExitReason::Other);
    answer
}

/// Answers an instruction that is #UD on a processor that is not in VMX operation.
fn undefined(area: &mut Area) -> Answer {
    publish::count(area, ExitReason::VirtInstruction);
    Answer::Inject(Fault::InvalidOpcode)
}

/// Answers VMXOFF and VMXON of the kernel. It sees CR4.VMXE set, so it may believe that VMX is its own.
/// 6.1's crash path then executes VMXOFF, which is a detach (HARDWARE L-3). VMXON finds the hardware taken
/// and faults, for which KVM has a fix-up (L-2). A CPU that a rollback is to fetch stays.
fn owner(area: &mut Area, hardware: &mut impl Hardware, reason: u32) -> Answer {
    publish::count(area, ExitReason::VirtInstruction);
    if reason != reason::VMXOFF {
        return Answer::Inject(Fault::GeneralProtection);
    }
    // VMsucceed ("Conventions").
    const STATUS_FLAGS: u64 = 0x8D5;
    let rflags = hardware.vmread(vmcs::GUEST_RFLAGS);
    hardware.vmwrite(vmcs::GUEST_RFLAGS, rflags & !STATUS_FLAGS);
    if area.cpu.is_held != 0 { Answer::Skip } else { Answer::Released(Code::VmxReleased) }
}

fn vmcall(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    let registers = &area.cpu.gate.outward.registers;
    if registers[RCX] != HYPERCALL_MAGIC || privilege(hardware) != 0 {
        publish::count(area, ExitReason::ForeignHypercall);
        return Answer::Inject(Fault::InvalidOpcode);
    }
    let (number, first, second) = (registers[RAX], registers[RDI], registers[RSI]);
    publish::count(area, ExitReason::Hypercall);
    exit::hypercall(area, hardware, number, first, second)
}

/// Answers CPUID as [`super::run`] does, in the cases that are not answered there.
fn cpuid(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Cpuid);
    let registers = &area.cpu.gate.outward.registers;
    let (leaf, subleaf) = (registers[RAX] as u32, registers[RCX] as u32);
    let [eax, ebx, mut ecx, mut edx] = hardware.cpuid(leaf, subleaf);
    let guest_cr4 = area.own.exit.cr4;
    match (leaf, subleaf) {
        (1, _) => ecx = ecx & !(1 << 27) | u32::from(guest_cr4 & cr4::OSXSAVE != 0) << 27,
        (7, 0) => ecx = ecx & !(1 << 4) | u32::from(guest_cr4 & cr4::PKE != 0) << 4,
        (0x8000_0001, _) if hardware.vmread(vmcs::GUEST_CS_RIGHTS) & CS_LONG == 0 => edx &= !(1 << 11),
        _ => {}
    }
    let registers = &mut area.cpu.gate.outward.registers;
    (registers[RAX], registers[RBX]) = (u64::from(eax), u64::from(ebx));
    (registers[RCX], registers[RDX]) = (u64::from(ecx), u64::from(edx));
    Answer::Skip
}

fn msr_access(area: &mut Area, hardware: &mut impl Hardware, reason: u32) -> Answer {
    let registers = &area.cpu.gate.outward.registers;
    let index = registers[RCX] as u32;
    if reason == reason::RDMSR {
        return msr::read(area, hardware, index);
    }
    let value = registers[RDX] << 32 | registers[RAX] & 0xFFFF_FFFF;
    msr::write(area, hardware, index, value)
}

/// Answers XSETBV, which always exits. It is executed for real, on values that the processor judges. Bochs
/// exits before it checks the CPL.
fn xsetbv(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Xsetbv);
    if area.own.exit.cr4 & cr4::OSXSAVE == 0 {
        return Answer::Inject(Fault::InvalidOpcode);
    }
    let registers = &area.cpu.gate.outward.registers;
    let value = registers[RDX] << 32 | registers[RAX] & 0xFFFF_FFFF;
    let index = registers[RCX] as u32;
    if privilege(hardware) != 0 || !hardware.xsetbv(index, value) {
        return Answer::Inject(Fault::GeneralProtection);
    }
    Answer::Skip
}

/// Answers INVD, which always exits. Dropping caches would drop the hypervisor's own lines too, so caches
/// are written back first. On a machine with devices no software can tell that from INVD (HARDWARE I-15).
fn invd(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    if privilege(hardware) != 0 {
        return other(area, Answer::Inject(Fault::GeneralProtection));
    }
    hardware.write_back_caches();
    other(area, Answer::Skip)
}

/// Returns true if the tables explain an EPT violation: no page is mapped there yet, or a page was written
/// that cannot be. Beneath a snapshot a page may also have been executed that cannot be. Any other
/// violation would come again and again.
const fn is_explained(qualification: u64, on_snapshot: bool) -> bool {
    qualification & VIOLATION_MAPPED == 0
        || qualification & VIOLATION_WRITE != 0
        || on_snapshot && qualification & VIOLATION_EXECUTE != 0
}

fn nested_fault(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    let (address, rip) = (area.own.exit.info2, area.cpu.interrupted.rip);
    let access = match area.own.exit.info1 {
        violation if violation & VIOLATION_WRITE != 0 => Some(Access::Write),
        violation if violation & VIOLATION_EXECUTE != 0 => Some(Access::Execute),
        _ => None,
    };
    let answer = nested::fault(area, hardware, address, access);
    exit::nested_fault(area, hardware, answer, [address, rip])
}

/// Answers a write to CR0 or CR4 that differs from the shadow in a bit of ours: NE or VMXE, or CD while
/// MTRRs are disabled. All other writes are native.
fn control_register(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    const MOVE_TO: u64 = 0;
    let qualification = area.own.exit.info1;
    let (register, kind) = (qualification & 15, qualification >> 4 & 3);
    let source = (qualification >> 8 & 15) as usize;
    let value = area.own.exit.registers[source];
    match (register, kind) {
        (0, MOVE_TO) if msr::disables_mtrrs(hardware, value) => {
            other(area, Answer::Depart(Code::MtrrChanged))
        }
        (0, MOVE_TO) => other(area, reset::write_cr0(hardware, value)),
        (4, MOVE_TO) => {
            let answer = write_cr4(area, hardware, value);
            other(area, answer)
        }
        _ => Answer::Depart(Code::UnknownExit),
    }
}

/// Answers a write to CR4. The guest may clear and set VMXE, in the shadow (HARDWARE I-4). A kernel that
/// gives the hardware up executes VMXOFF before. A kernel that only clears VMXE is on the way to another
/// kernel (6.12's `relocate_kernel`, on tables of its own): from then on the CPU does not leave by itself.
fn write_cr4(area: &mut Area, hardware: &mut impl Hardware, value: u64) -> Answer {
    let current = area.own.exit.cr4;
    let long_mode = hardware.vmread(vmcs::GUEST_EFER) & EFER_LMA != 0;
    let changed = value ^ current;
    let illegal = value & !area.own.cr4_allowed != 0
        || long_mode && (value & cr4::PAE == 0 || changed & cr4::LA57 != 0)
        || changed & value & cr4::PCIDE != 0 && (!long_mode || area.own.exit.cr3 & 0xFFF != 0);
    if illegal {
        return Answer::Inject(Fault::GeneralProtection);
    }
    if value & cr4::VMXE == 0 {
        area.own.foreign = 1;
        msr::watch_caches(hardware, false);
    }
    hardware.vmwrite(vmcs::GUEST_CR4, value | cr4::VMXE);
    hardware.vmwrite(vmcs::CR4_SHADOW, value);
    flush(area, hardware);
    Answer::Skip
}

/// Flushes this CPU's translations of the guest.
pub fn flush(area: &Area, hardware: &mut impl Hardware) {
    hardware.flush_guests(area.own.controls.secondary & secondary::VPID != 0);
}

/// Carries an answer out.
fn apply(area: &mut Area, hardware: &mut impl Hardware, answer: Answer) -> Next {
    match answer {
        Answer::Retry => {}
        Answer::RetryFlushed => flush(area, hardware),
        Answer::Skip => skip(hardware),
        Answer::Value(value) => {
            skip(hardware);
            put_pair(area, value & 0xFFFF_FFFF, value >> 32);
        }
        Answer::Hypercall(code, value) => {
            skip(hardware);
            put_pair(area, u64::from(code as u32), value);
        }
        Answer::HypercallFlushed => {
            flush(area, hardware);
            skip(hardware);
            put_pair(area, 0, 0);
        }
        Answer::NewTables(root) => {
            hardware.vmwrite(vmcs::EPT_POINTER, capture::ept_pointer(root, nested::depth()));
            return apply(area, hardware, Answer::HypercallFlushed);
        }
        Answer::Inject(fault) => inject(hardware, fault),
        Answer::Detach => return detach(area, hardware),
        Answer::Released(because) => {
            skip(hardware);
            return finish(area, hardware, because);
        }
        Answer::Depart(because) => return depart(area, hardware, because),
    }
    enter_again(area, hardware)
}

fn put_pair(area: &mut Area, rax: u64, rdx: u64) {
    area.cpu.gate.outward.registers[RAX] = rax;
    area.cpu.gate.outward.registers[RDX] = rdx;
}

/// Enters the guest, if its CR4 has only known bits.
fn enter_again(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    let foreign = hardware.vmread(vmcs::GUEST_CR4) & !capture::CR4_CARRIED != 0;
    if foreign && can_leave(area, hardware) {
        return leave_with_foreign_state(area, hardware);
    }
    enter(area, hardware)
}

/// Enters the guest. The monitor trap flag has done its work. If an NMI still has to wait, the entry sets
/// the flag again.
fn enter(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    if area.cpu.features & feature::MONITOR_TRAP != 0 {
        let window = if area.own.awaits_window != 0 { primary::INTERRUPT_WINDOW_EXITING } else { 0 };
        let nmi = if area.own.nmi_waits != 0 { rollback::give_nmi(area, hardware) } else { 0 };
        hardware.vmwrite(vmcs::PRIMARY_CONTROLS, u64::from(area.own.controls.primary | window | nmi));
    }
    #[cfg(feature = "fault-injection")]
    super::faults::before_entry(area, hardware);
    Next::Run
}

/// Moves past the instruction that exited as the processor would: no interrupt shadow, no RF, and a single
/// step raises #DB (HARDWARE I-33).
#[inline]
pub fn skip(hardware: &mut impl Hardware) {
    let length = hardware.vmread(vmcs::EXIT_INSTRUCTION_LENGTH);
    let rip = hardware.vmread(vmcs::GUEST_RIP);
    let next = rip.wrapping_add(length);
    hardware.vmwrite(vmcs::GUEST_RIP, next);
    if (next ^ rip) >> 32 != 0 {
        wrap_rip(hardware);
    }
    let blocked = hardware.vmread(vmcs::GUEST_INTERRUPTIBILITY);
    if blocked & (blocking::STI | blocking::MOV_SS) != 0 {
        hardware.vmwrite(vmcs::GUEST_INTERRUPTIBILITY, blocked & !(blocking::STI | blocking::MOV_SS));
    }
    let rflags = hardware.vmread(vmcs::GUEST_RFLAGS);
    if rflags & RFLAGS_RF != 0 {
        hardware.vmwrite(vmcs::GUEST_RFLAGS, rflags & !RFLAGS_RF);
    }
    if rflags & RFLAGS_TF != 0 && hardware.vmread(vmcs::GUEST_DEBUGCTL) & DEBUGCTL_BTF == 0 {
        let pending = hardware.vmread(vmcs::GUEST_PENDING_DEBUG);
        hardware.vmwrite(vmcs::GUEST_PENDING_DEBUG, pending | PENDING_BS);
    }
}

/// Cuts RIP to 32 bits outside 64-bit code: an entry with more is refused (SDM, "Checks on guest RIP,
/// RFLAGS").
#[cold]
#[inline(never)]
fn wrap_rip(hardware: &mut impl Hardware) {
    if hardware.vmread(vmcs::GUEST_CS_RIGHTS) & CS_LONG == 0 {
        let rip = hardware.vmread(vmcs::GUEST_RIP);
        hardware.vmwrite(vmcs::GUEST_RIP, rip & 0xFFFF_FFFF);
    }
}

/// Injects a fault. It has RF in the RFLAGS that it pushes (SDM, "Saving and loading of RFLAGS").
fn inject(hardware: &mut impl Hardware, fault: Fault) {
    let rflags = hardware.vmread(vmcs::GUEST_RFLAGS);
    hardware.vmwrite(vmcs::GUEST_RFLAGS, rflags | RFLAGS_RF);
    let event = match fault {
        Fault::InvalidOpcode => event::INVALID_OPCODE,
        // In real mode there are no error codes.
        Fault::GeneralProtection if hardware.vmread(vmcs::GUEST_CR0) & cr0::PE == 0 => {
            event::GENERAL_PROTECTION & !event::HAS_ERROR_CODE
        }
        Fault::GeneralProtection => {
            hardware.vmwrite(vmcs::ENTRY_ERROR_CODE, 0);
            event::GENERAL_PROTECTION
        }
    };
    hardware.vmwrite(vmcs::ENTRY_INTERRUPTION, event);
}

pub(super) fn is_event_pending(hardware: &mut impl Hardware) -> bool {
    hardware.vmread(vmcs::ENTRY_INTERRUPTION) & event::VALID != 0
}

/// Blocks NMIs again after an IRET that faulted. It has unblocked them already, and will run again (SDM,
/// "Information for VM exits due to ... IRET"; HARDWARE I-8). The bit means nothing where an event was
/// being delivered.
fn keep_nmis_blocked(area: &Area, hardware: &mut impl Hardware) {
    let unblocked = area.own.exit.code as u32 == reason::EPT_VIOLATION
        && area.own.exit.info1 & NMI_UNBLOCKED_BY_IRET != 0
        && area.own.exit.event & event::VALID == 0;
    if unblocked {
        let blocked = hardware.vmread(vmcs::GUEST_INTERRUPTIBILITY);
        hardware.vmwrite(vmcs::GUEST_INTERRUPTIBILITY, blocked | blocking::NMI);
    }
}

/// Delivers an event again that was being delivered when the exit struck. An NMI in delivery has blocked
/// NMIs, which would refuse its injection.
fn hand_over_event(area: &mut Area, hardware: &mut impl Hardware) {
    let Some(event) = event_again(area) else { return };
    area.own.exit.event = 0;
    if event & event::TYPE == event::NMI {
        let blocked = hardware.vmread(vmcs::GUEST_INTERRUPTIBILITY);
        hardware.vmwrite(vmcs::GUEST_INTERRUPTIBILITY, blocked & !blocking::NMI);
    }
    if event & event::HAS_ERROR_CODE != 0 {
        hardware.vmwrite(vmcs::ENTRY_ERROR_CODE, event >> 32);
    }
    hardware.vmwrite(vmcs::ENTRY_INTERRUPTION, event & 0xFFFF_FFFF);
    let code = EXIT_CODE_VMX | area.own.exit.code;
    let tsc = hardware.tsc();
    publish::log(area, LogKind::Reinjected, tsc, [event, code, 0, 0, 0]);
}

/// Returns the event that was being delivered when the exit struck, if it has to be delivered again (SDM,
/// "Information for VM exits that occur during event delivery"). Software interrupts and exceptions have
/// not: their instruction runs again.
const fn event_again(area: &Area) -> Option<u64> {
    const FIELDS: u64 = event::VALID | event::HAS_ERROR_CODE | event::TYPE | 0xFF;
    let event = area.own.exit.event;
    let by_instruction =
        matches!(event & event::TYPE, event::SOFTWARE | event::PRIVILEGED | event::SOFTWARE_EXCEPTION);
    if event & event::VALID == 0 || by_instruction {
        return None;
    }
    let error_code = if event & event::HAS_ERROR_CODE != 0 { event & !0xFFFF_FFFF } else { 0 };
    Some(event & FIELDS | error_code)
}

fn detach(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    skip(hardware);
    area.cpu.gate.outward.registers[RAX] = 0;
    fault::in_detach(area);
    exit::departs(area, Code::Ok);
    publish::log(area, LogKind::Detached, area.cpu.exit_tsc, [0; 5]);
    put_back(area, hardware);
    Next::Leave
}

/// Prepares the way out. CR2 is the value at the exit: a fault of the hypervisor's own may have changed it
/// since.
fn put_back(area: &mut Area, hardware: &mut impl Hardware) {
    rollback::unwatch(area);
    capture::put_back(area, hardware);
    area.cpu.gate.outward.cr2 = area.own.exit.cr2;
}

/// Returns true if the gate can go where the guest is: in long mode, with tables that map the gate.
fn can_leave(area: &Area, hardware: &mut impl Hardware) -> bool {
    hardware.vmread(vmcs::GUEST_EFER) & EFER_LMA != 0 && has_gate(area, hardware)
}

/// Returns true if the guest's tables map the gate. Those of another kernel do not, nor do user mode's own
/// under page-table isolation. The kernel's first instructions run on user mode's tables too, which are the
/// upper page of two.
fn has_gate(area: &Area, hardware: &mut impl Hardware) -> bool {
    const USER_TABLES: u64 = 1 << 12;
    let isolated = area.cpu.features & feature::ISOLATED != 0
        && (privilege(hardware) == 3 || hardware.vmread(vmcs::GUEST_CR3) & USER_TABLES != 0);
    area.own.foreign == 0 && !isolated
}

/// Has this CPU leave by itself: it executes the exit's instruction natively. An event to deliver has no
/// native counterpart. With one, or where the gate cannot go, the guest is entered once more, and the CPU
/// leaves at its next exit.
pub fn depart(area: &mut Area, hardware: &mut impl Hardware, because: Code) -> Next {
    let interrupted = area.cpu.interrupted;
    hardware.vmwrite(vmcs::GUEST_RIP, interrupted.rip);
    area.cpu.gate.outward.registers[RAX] = interrupted.rax;
    area.cpu.gate.outward.registers[RDX] = interrupted.rdx;
    // A failure may have struck before the event was handed over.
    hand_over_event(area, hardware);
    if is_event_pending(hardware) {
        return leave_later(area, hardware, because);
    }
    if !can_leave(area, hardware) {
        return stay(area, hardware, because);
    }
    finish(area, hardware, because)
}

/// Keeps a CPU that cannot leave here. The exit without an answer is tried once more. Then user mode gets
/// #UD, and a kernel is reset, as it would be by an event that it cannot handle. A kernel that is still
/// booting is reset at once.
fn stay(area: &mut Area, hardware: &mut impl Hardware, because: Code) -> Next {
    let (user, again) = (privilege(hardware) == 3, area.own.refused_to_leave != 0);
    if !user && (again || hardware.vmread(vmcs::GUEST_EFER) & EFER_LMA == 0) {
        return reset::shut_down(area, hardware);
    }
    area.cpu.leave_pending = because as u32;
    if again {
        inject(hardware, Fault::InvalidOpcode);
    }
    area.own.refused_to_leave ^= 1;
    enter(area, hardware)
}

/// Enters the guest with an event. The CPU leaves at the guest's next exit: as soon as it takes interrupts
/// again.
fn leave_later(area: &mut Area, hardware: &mut impl Hardware, because: Code) -> Next {
    area.cpu.leave_pending = because as u32;
    await_window(area, hardware, true);
    enter(area, hardware)
}

/// Asks for an exit as soon as the guest can take interrupts, or takes the request back. The monitor trap
/// flag stays as it is.
pub fn await_window(area: &mut Area, hardware: &mut impl Hardware, wanted: bool) {
    const WINDOW: u64 = primary::INTERRUPT_WINDOW_EXITING as u64;
    area.own.awaits_window = u32::from(wanted);
    let controls = hardware.vmread(vmcs::PRIMARY_CONTROLS);
    hardware.vmwrite(vmcs::PRIMARY_CONTROLS, if wanted { controls | WINDOW } else { controls & !WINDOW });
}

/// Answers the exit after an event was handed over by a CPU that wants to leave. If the delivery itself
/// made the exit, and the tables have the cure, the event is delivered once more: natively nothing would
/// deliver it.
fn leave_now(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    if event_again(area).is_some() {
        if let Some(answer) = cure(area, hardware) {
            hand_over_event(area, hardware);
            return apply(area, hardware, answer);
        }
        lose_event(area, hardware);
    }
    let because = Code::from_number(area.cpu.leave_pending).unwrap_or(Code::UnknownExit);
    finish(area, hardware, because)
}

/// Returns the answer to a nested fault that lets the guest go on.
fn cure(area: &mut Area, hardware: &mut impl Hardware) -> Option<Answer> {
    if area.own.exit.code as u32 != reason::EPT_VIOLATION
        || !is_explained(area.own.exit.info1, area.cpu.on_snapshot != 0)
    {
        return None;
    }
    let answer = nested_fault(area, hardware);
    (!matches!(answer, Answer::Depart(_))).then_some(answer)
}

/// Drops an event that cannot be delivered any more. The gate raises an NMI.
fn lose_event(area: &mut Area, hardware: &mut impl Hardware) {
    let Some(event) = event_again(area) else { return };
    area.own.exit.event = 0;
    if event & event::TYPE != event::NMI {
        return exit::lose_event(area, hardware, event);
    }
    note_nmi(area);
}

/// Notes an NMI that the system has yet to receive, as the handler of NMIs does.
pub(super) fn note_nmi(area: &mut Area) {
    let pending = &raw mut area.cpu.gate.nmi.pending;
    // SAFETY: a field of this CPU's own, aligned; the handler of NMIs changes it in one instruction, and so
    // does this.
    let _ = unsafe { AtomicU64::from_ptr(pending) }.fetch_add(1, Ordering::Relaxed);
}

fn finish(area: &mut Area, hardware: &mut impl Hardware, because: Code) -> Next {
    area.cpu.leave_pending = 0;
    area.own.refused_to_leave = 0;
    let exit = &area.own.exit;
    let rip = hardware.vmread(vmcs::GUEST_RIP);
    let exit = [EXIT_CODE_VMX | exit.code, rip, exit.info1, exit.info2];
    exit::departs_at(area, because, exit);
    put_back(area, hardware);
    Next::Leave
}

/// Records an exit that the hypervisor has no answer for. The CPU runs on natively.
fn unknown(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    emergency::record_unknown_exit(area);
    depart(area, hardware, Code::UnknownExit)
}

/// Answers an entry that the processor refused. Right after an attach no instruction of the guest has run:
/// the driver gets the reason. Later the VMCS was corrupted: the CPU leaves with all state that is still
/// good, after the instruction that was answered. Of CR4 it keeps the known bits.
fn invalid(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    let (refusal, value) = refusal::of_entry(area, hardware);
    let detail = [refusal as u64, value];
    area.cpu.gate.detail = detail;
    let tsc = hardware.tsc();
    publish::log(area, LogKind::InvalidState, tsc, [detail[0], detail[1], 0, 0, 0]);
    if area.cpu.entered == 0 {
        exit::departs(area, Code::InvalidGuestState);
        capture::put_back_native(area, hardware, Code::InvalidGuestState);
        return Next::Leave;
    }
    let cr4 = hardware.vmread(vmcs::GUEST_CR4);
    hardware.vmwrite(vmcs::GUEST_CR4, cr4 & capture::CR4_CARRIED);
    emergency::record_refusal(area, refusal, value);
    // An entry that failed has not delivered what it was to inject.
    area.own.exit.event = hardware.vmread(vmcs::ENTRY_INTERRUPTION);
    lose_event(area, hardware);
    if !has_gate(area, hardware) {
        return enter_repaired(area, hardware);
    }
    finish(area, hardware, Code::InvalidGuestState)
}

/// Repairs the fields that are known to be wrong, where the gate cannot go, so that the CPU leaves at a
/// later exit. If that does not help, nothing does.
fn enter_repaired(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    if area.own.refused_to_leave != 0 {
        return reset::shut_down(area, hardware);
    }
    area.own.refused_to_leave = 1;
    area.cpu.leave_pending = Code::InvalidGuestState as u32;
    hardware.vmwrite(vmcs::ENTRY_INTERRUPTION, 0);
    wrap_rip(hardware);
    enter(area, hardware)
}

/// Has the CPU leave, after the instruction that was answered, because the system has set a bit of CR4 that
/// Mercury does not know. The processor took the bit, so this is no corruption. But its meaning for an
/// attached CPU is unknown.
fn leave_with_foreign_state(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    // The CPU may have wanted to leave before.
    let because = Code::from_number(area.cpu.leave_pending).filter(|code| *code != Code::Ok);
    let because = because.unwrap_or(Code::Cr4Unsupported);
    if is_event_pending(hardware) {
        return leave_later(area, hardware, because);
    }
    finish(area, hardware, because)
}

/// Answers an entry that failed: VMLAUNCH or VMRESUME did, or the processor came back before the guest. If
/// a machine check was the cause (SDM, "Machine-check events during VM entry"), it is the system's, and
/// nothing else is wrong.
fn not_entered(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    if area.own.exit.code as u32 == reason::ENTRY_FAILED | reason::MACHINE_CHECK {
        machine_check::note(area, hardware, false);
        if area.cpu.entered != 0 {
            publish::count(area, ExitReason::Other);
            return enter(area, hardware);
        }
    }
    invalid(area, hardware)
}

const _: () = assert!(primary::MONITOR_TRAP_FLAG & primary::RESERVED_ONES == 0);
