//! The world switch (SDM volume 3, chapters "VM entries" and "VM exits").
//!
//! An exit has loaded the hypervisor's RSP, RIP, segments, CR3 and descriptor tables. Every general
//! register but RSP is still the guest's.
//!
//! There is no global interrupt flag: an NMI can strike between any two instructions below. It comes to the
//! driver's handler in the gate page, on the stack in use, and is noted ([`mercury_abi::gate::NmiBlock`]).
//! The last step before an entry reads that note. If an NMI strikes after that, the handler returns to the
//! read: the window's restart label.
//!
//! CPUID is a system's most frequent exit, and a user can force exits with VMX's own instructions. Both are
//! answered here, in straight-line code that has no return and no indirect branch, and that touches only
//! this CPU's own pages (HARDWARE A-18, I-14, I-22, I-23). Beneath a snapshot or a dirty log a user can
//! force nested faults as well, which compiled code answers. Predictions are forgotten before its first
//! call ([`crate::speculation`]).
//!
//! VERW before each entry empties the buffers that some processors leak from (I-22). On others VERW does
//! nothing. [`super::quick`] answers the driver's own hypercalls and touches no vector register.

use core::mem::offset_of;

use mercury_abi::gate::AREA_SIZE;

use super::{Area, LeaveGdt};
use crate::host::tables::HOST_TR;
use crate::x86::vmx;

#[cfg(feature = "image")]
pub use switch::{mercury_entry_vmx, run};

/// Offset in the area at which the stack of an exit begins: two words below the end. The first takes the
/// guest's RDI. The address is aligned as compiled code demands.
pub const HOST_RSP_OFFSET: usize = AREA_SIZE - 16;

#[cfg(feature = "image")]
mod switch {
    use core::arch::naked_asm;
    use core::mem::offset_of;

    use mercury_abi::gate::{GateBlock, NmiBlock, Outward};
    use mercury_abi::shared::{ExitReason, SharedCpu};
    use mercury_preflight::vmx::primary;

    use super::HOST_RSP_OFFSET;
    use crate::cpu::Cpu;
    use crate::host::entry;
    use crate::speculation::{self, forget_predictions};
    use crate::vmx::capture::feature;
    use crate::vmx::vmcs::{self, blocking, event, reason};
    use crate::vmx::{Area, Own};
    use crate::x86::msr;

    const REGISTERS: usize =
        offset_of!(Cpu, gate) + offset_of!(GateBlock, outward) + offset_of!(Outward, registers);
    const PENDING: usize = offset_of!(Cpu, gate) + offset_of!(GateBlock, nmi) + offset_of!(NmiBlock, pending);
    const OWN: usize = offset_of!(Area, own);

    entry::native_entry_point!(mercury_entry_vmx, crate::vmx::Vmx, vmx_native, run_first);

    /// Carries out the driver's operations: see [`crate::native::enter`].
    ///
    /// # Safety
    /// `area` is this CPU's own, and interrupts are off: no other code uses the area until this returns, but
    /// for the handler of NMIs, which touches the gate's NMI block only.
    unsafe extern "C" fn vmx_native(area: *mut Area) -> entry::Next {
        // SAFETY: the gate passes this CPU's area; the driver does not touch it while the CPU is in here.
        crate::native::enter(unsafe { &mut *area })
    }

    /// Enters the guest after an attach, RDI = the CPU's area; does not return. The guest goes on in the
    /// gate, which takes the caller's registers from the stack: the others have no meaning there.
    #[unsafe(naked)]
    extern "C" fn run_first() -> ! {
        naked_asm!(
            "call {restore_sse}",
            "lea rsp, [rdi + {host_rsp}]",
            "jmp {enter}",
            restore_sse = sym entry::restore_sse,
            host_rsp = const HOST_RSP_OFFSET,
            enter = sym enter,
        )
    }

    /// Enters the guest, RDI = the CPU's area; does not return.
    #[unsafe(naked)]
    pub extern "C" fn run() -> ! {
        naked_asm!(
            "call {restore_sse}",
            "jmp {load}",
            restore_sse = sym entry::restore_sse,
            load = sym load,
        )
    }

    /// Loads the registers that the CPUID path leaves alone. RDI = the CPU's area.
    #[unsafe(naked)]
    extern "C" fn load() -> ! {
        naked_asm!(
            "lea rsp, [rdi + {host_rsp}]",
            "mov rbp, [rdi + {registers} + 40]",
            "mov rsi, [rdi + {registers} + 48]",
            "mov r8, [rdi + {registers} + 64]",
            "mov r9, [rdi + {registers} + 72]",
            "mov r10, [rdi + {registers} + 80]",
            "mov r11, [rdi + {registers} + 88]",
            "mov r12, [rdi + {registers} + 96]",
            "mov r13, [rdi + {registers} + 104]",
            "mov r14, [rdi + {registers} + 112]",
            "mov r15, [rdi + {registers} + 120]",
            "jmp {enter}",
            host_rsp = const HOST_RSP_OFFSET,
            registers = const REGISTERS,
            enter = sym enter,
        )
    }

    /// Takes the last steps before the guest, RDI = the CPU's area, RSP = the exit's. Begins again where an
    /// NMI strikes in it: until the entry itself nothing is lost, for the block has every register that it
    /// loads. After a machine check it begins again too: see [`super::resume_at`].
    ///
    /// An NMI is injected, except in three cases: another event is to be injected, the guest cannot take it
    /// (SDM, "Checks on guest non-register state"), or a single step has yet to be reported, which the NMI
    /// would replace ("Delivery of pending debug exceptions after VM entry"). Then the monitor trap flag
    /// brings the guest back after its next instruction or delivered event.
    ///
    /// Beneath a snapshot that is kept the NMI may have come to fetch this CPU. Then compiled code answers it
    /// like an exit, with the registers that the guest still has to get.
    #[unsafe(naked)]
    extern "C" fn enter() -> ! {
        naked_asm!(
            ".globl mercury_vmx_window_start",
            "mercury_vmx_window_start:",
            "cmp qword ptr [rdi + {pending}], 0",
            "jne 4f",
            "2: verw word ptr [rip + {verw}]",
            "cmp dword ptr [rdi + {launched}], 0",
            "mov rax, [rdi + {registers}]",
            "mov rcx, [rdi + {registers} + 8]",
            "mov rdx, [rdi + {registers} + 16]",
            "mov rbx, [rdi + {registers} + 24]",
            "mov rdi, [rdi + {registers} + 56]",
            "je 3f",
            "vmresume",
            "jmp {failed}",
            "3: vmlaunch",
            ".globl mercury_vmx_window_end",
            "mercury_vmx_window_end:",
            "jmp {failed}",
            ".globl mercury_vmx_restart",
            "mercury_vmx_restart:",
            "lea rdi, [rsp - {host_rsp}]",
            "jmp mercury_vmx_window_start",
            // An NMI is pending; they are blocked, so that none strikes here.
            "4: cmp dword ptr [rdi + {watched}], 0",
            "jne 6f",
            "mov eax, {entry_interruption}",
            "vmread rcx, rax",
            "test ecx, ecx",
            "js 5f",
            "mov eax, {interruptibility}",
            "vmread rcx, rax",
            "test ecx, {blocked}",
            "jnz 5f",
            "mov eax, {activity}",
            "vmread rcx, rax",
            "cmp ecx, 1",
            "ja 5f",
            "mov eax, {pending_debug}",
            "vmread rcx, rax",
            "test ecx, ecx",
            "jnz 5f",
            "mov eax, {entry_interruption}",
            "mov ecx, {inject_nmi}",
            "vmwrite rax, rcx",
            ".globl mercury_vmx_nmi_given",
            "mercury_vmx_nmi_given:",
            "dec qword ptr [rdi + {pending}]",
            "jmp mercury_vmx_window_start",
            "5: test dword ptr [rdi + {features}], {monitor_trap}",
            "jz 2b",
            "mov eax, {primary}",
            "vmread rcx, rax",
            "or ecx, {monitor_trap_flag}",
            "vmwrite rax, rcx",
            "jmp 2b",
            "6: mov rax, [rdi + {registers} + 56]",
            "mov [rsp], rax",
            "mov dword ptr [rdi + {turned_back}], 1",
            "jmp {save}",
            ".globl mercury_vmx_enter_end",
            "mercury_vmx_enter_end:",
            pending = const PENDING,
            verw = sym entry::VERW_SELECTOR,
            launched = const OWN + offset_of!(Own, launched),
            registers = const REGISTERS,
            failed = sym failed,
            watched = const OWN + offset_of!(Own, watched),
            turned_back = const OWN + offset_of!(Own, turned_back),
            save = sym save,
            host_rsp = const HOST_RSP_OFFSET,
            entry_interruption = const vmcs::ENTRY_INTERRUPTION,
            interruptibility = const vmcs::GUEST_INTERRUPTIBILITY,
            blocked = const blocking::STI | blocking::MOV_SS | blocking::NMI,
            activity = const vmcs::GUEST_ACTIVITY,
            pending_debug = const vmcs::GUEST_PENDING_DEBUG,
            inject_nmi = const event::INJECT_NMI,
            features = const offset_of!(Cpu, features),
            monitor_trap = const feature::MONITOR_TRAP,
            primary = const vmcs::PRIMARY_CONTROLS,
            monitor_trap_flag = const primary::MONITOR_TRAP_FLAG,
        )
    }

    /// Notes that VMLAUNCH or VMRESUME failed and fell through. The registers are the guest's, as after an
    /// exit, and the flags tell the kind of failure.
    #[unsafe(naked)]
    extern "C" fn failed() -> ! {
        naked_asm!(
            "mov [rsp], rdi",
            "lea rdi, [rsp - {host_rsp}]",
            "mov [rdi + {registers}], rax",
            "mov [rdi + {registers} + 8], rcx",
            "mov [rdi + {registers} + 16], rdx",
            "mov [rdi + {registers} + 24], rbx",
            "setc byte ptr [rdi + {invalid}]",
            "mov byte ptr [rdi + {failed}], 1",
            "jmp {save}",
            host_rsp = const HOST_RSP_OFFSET,
            registers = const REGISTERS,
            invalid = const OWN + offset_of!(Own, failed_invalid),
            failed = const OWN + offset_of!(Own, failed),
            save = sym save,
        )
    }

    /// Takes over from the processor at an exit. CPUID is answered here, and VMX's instructions in user mode
    /// get #UD. All other exits go on to [`save`].
    ///
    /// CPUID is executed for real. It shows the hypervisor's CR4 in two bits, which are taken from the
    /// guest's (SDM volume 2, CPUID: leaf 1, OSXSAVE, and leaf 7, OSPKE), and always 64-bit mode in a third
    /// (leaf 8000_0001h, SYSCALL). Cases that need more than a step over the instruction go on too: a single
    /// step or RF, an interrupt shadow, a CPU that wants to leave.
    #[unsafe(naked)]
    pub extern "C" fn exit() -> ! {
        naked_asm!(
            "mov [rsp], rdi",
            "lea rdi, [rsp - {host_rsp}]",
            "mov [rdi + {registers}], rax",
            "mov [rdi + {registers} + 8], rcx",
            "mov [rdi + {registers} + 16], rdx",
            "mov [rdi + {registers} + 24], rbx",
            "mov dword ptr [rdi + {launched}], 1",
            "mov eax, {exit_reason}",
            "vmread rax, rax",
            "cmp eax, {cpuid}",
            "jne 7f",
            "mov eax, {rflags}",
            "vmread rcx, rax",
            "test ecx, {tf_rf}",
            "jnz {save}",
            "mov eax, {interruptibility}",
            "vmread rcx, rax",
            "test ecx, {shadow}",
            "jnz {save}",
            "cmp dword ptr [rdi + {leave_pending}], 0",
            "jne {save}",
            // Over the end of 4 GiB only 64-bit code goes on.
            "mov eax, {length}",
            "vmread rcx, rax",
            "mov eax, {rip}",
            "vmread rdx, rax",
            "add rcx, rdx",
            "xor rdx, rcx",
            "shr rdx, 32",
            "jnz {save}",
            "vmwrite rax, rcx",
            "mov dword ptr [rdi + {entered}], 1",
            "mov rbx, [rsp]",
            "mov [rdi + {registers} + 56], rbx",
            "mov rbx, [rdi + {shared_virt}]",
            "inc qword ptr [rbx + {counter}]",
            "mov eax, [rdi + {registers}]",
            "mov ecx, [rdi + {registers} + 8]",
            "cmp eax, 1",
            "je 3f",
            "cmp eax, 7",
            "je 4f",
            "cmp eax, 0x80000001",
            "je 5f",
            "cpuid",
            "2:",
            "mov [rdi + {registers}], rax",
            "mov [rdi + {registers} + 8], rcx",
            "mov [rdi + {registers} + 16], rdx",
            "mov [rdi + {registers} + 24], rbx",
            "jmp {enter}",
            // Leaf 1: OSXSAVE (ECX bit 27) is CR4 bit 18.
            "3: cpuid",
            "mov [rdi + {registers}], rax",
            "mov eax, {cr4}",
            "vmread rax, rax",
            "and eax, 1 << 18",
            "shl eax, 9",
            "and ecx, ~(1 << 27)",
            "or ecx, eax",
            "mov eax, [rdi + {registers}]",
            "jmp 2b",
            // Leaf 7, subleaf 0: OSPKE (ECX bit 4) is CR4 bit 22.
            "4: test ecx, ecx",
            "jnz 6f",
            "cpuid",
            "mov [rdi + {registers}], rax",
            "mov eax, {cr4}",
            "vmread rax, rax",
            "and eax, 1 << 22",
            "shr eax, 18",
            "and ecx, ~(1 << 4)",
            "or ecx, eax",
            "mov eax, [rdi + {registers}]",
            "jmp 2b",
            // Leaf 8000_0001h: SYSCALL (EDX bit 11) only where CS.L (access rights, bit 13) is set.
            "5: cpuid",
            "mov [rdi + {registers}], rax",
            "mov eax, {cs_rights}",
            "vmread rax, rax",
            "shr eax, 2",
            "or eax, ~(1 << 11)",
            "and edx, eax",
            "mov eax, [rdi + {registers}]",
            "jmp 2b",
            "6: cpuid",
            "jmp 2b",
            // VMX instructions: #UD in user mode, as natively.
            "7: lea ecx, [rax - {vmcall}]",
            "cmp ecx, {vmxon} - {vmcall}",
            "jbe 8f",
            "cmp eax, {invept}",
            "je 8f",
            "cmp eax, {invvpid}",
            "jne {save}",
            "8: mov ecx, {ss_rights}",
            "vmread rcx, rcx",
            "not ecx",
            "test ecx, 3 << 5",
            "jnz {save}",
            "cmp dword ptr [rdi + {leave_pending}], 0",
            "jne {save}",
            "mov dword ptr [rdi + {entered}], 1",
            "mov rbx, [rsp]",
            "mov [rdi + {registers} + 56], rbx",
            // A fault has RF in the RFLAGS that it pushes.
            "mov ecx, {rflags}",
            "vmread rdx, rcx",
            "or edx, {rf}",
            "vmwrite rcx, rdx",
            "mov ecx, {entry_interruption}",
            "mov edx, {invalid_opcode}",
            "vmwrite rcx, rdx",
            // A machine check since the exit goes first. One that strikes now replaces #UD.
            "cmp qword ptr [rdi + {machine_check}], 0",
            "jne {save}",
            "mov rbx, [rdi + {shared_virt}]",
            "inc qword ptr [rbx + {foreign_counter}]",
            "jmp {enter}",
            host_rsp = const HOST_RSP_OFFSET,
            registers = const REGISTERS,
            launched = const OWN + offset_of!(Own, launched),
            exit_reason = const vmcs::EXIT_REASON,
            cpuid = const reason::CPUID,
            save = sym save,
            rflags = const vmcs::GUEST_RFLAGS,
            tf_rf = const crate::x86::RFLAGS_TF | crate::x86::RFLAGS_RF,
            rf = const crate::x86::RFLAGS_RF,
            entered = const offset_of!(Cpu, entered),
            interruptibility = const vmcs::GUEST_INTERRUPTIBILITY,
            shadow = const blocking::STI | blocking::MOV_SS,
            leave_pending = const offset_of!(Cpu, leave_pending),
            shared_virt = const offset_of!(Cpu, gate) + offset_of!(GateBlock, shared_virt),
            counter = const offset_of!(SharedCpu, exits) + 8 * ExitReason::Cpuid as usize,
            length = const vmcs::EXIT_INSTRUCTION_LENGTH,
            rip = const vmcs::GUEST_RIP,
            cr4 = const vmcs::GUEST_CR4,
            cs_rights = const vmcs::GUEST_CS_RIGHTS,
            enter = sym enter,
            vmcall = const reason::VMCALL,
            vmxon = const reason::VMXON,
            invept = const reason::INVEPT,
            invvpid = const reason::INVVPID,
            ss_rights = const vmcs::GUEST_SS_RIGHTS,
            entry_interruption = const vmcs::ENTRY_INTERRUPTION,
            invalid_opcode = const event::INVALID_OPCODE,
            machine_check = const offset_of!(Cpu, gate) + offset_of!(GateBlock, machine_check),
            foreign_counter =
                const offset_of!(SharedCpu, exits) + 8 * ExitReason::ForeignHypercall as usize,
        )
    }

    /// Saves the rest of the registers to the block, and calls compiled code.
    #[unsafe(naked)]
    extern "C" fn save() -> ! {
        naked_asm!(
            "mov rax, [rsp]",
            "mov [rdi + {registers} + 40], rbp",
            "mov [rdi + {registers} + 48], rsi",
            "mov [rdi + {registers} + 56], rax",
            "mov [rdi + {registers} + 64], r8",
            "mov [rdi + {registers} + 72], r9",
            "mov [rdi + {registers} + 80], r10",
            "mov [rdi + {registers} + 88], r11",
            "mov [rdi + {registers} + 96], r12",
            "mov [rdi + {registers} + 104], r13",
            "mov [rdi + {registers} + 112], r14",
            "mov [rdi + {registers} + 120], r15",
            "cmp dword ptr [rdi + {on_snapshot}], 0",
            "jne 30f",
            // No mispredicted branch comes any further, to returns that user mode has trained.
            "lfence",
            "call {quick}",
            "lea rdi, [rsp - {host_rsp}]",
            "cmp eax, {quick_run}",
            "ja 31f",
            "jb {leave_quickly}",
            // RBP and R12 to R15 are as the system left them: compiled code preserves them.
            "mov rsi, [rdi + {registers} + 48]",
            "mov r8, [rdi + {registers} + 64]",
            "mov r9, [rdi + {registers} + 72]",
            "mov r10, [rdi + {registers} + 80]",
            "mov r11, [rdi + {registers} + 88]",
            "jmp {enter}",
            "31:",
            "call {save_sse}",
            "call {handle}",
            "lea rdi, [rsp - {host_rsp}]",
            "test eax, eax",
            "jnz {run}",
            "jmp {leave}",
            // Beneath a snapshot or a dirty log compiled code may map the system's memory.
            "30:",
            forget_predictions!(),
            "jmp 31b",
            registers = const REGISTERS,
            quick = sym crate::vmx::quick::quick_exit,
            quick_run = const crate::quick::Quick::Run as u32,
            host_rsp = const HOST_RSP_OFFSET,
            enter = sym enter,
            leave_quickly = sym entry::leave_quickly,
            save_sse = sym entry::save_sse,
            handle = sym crate::vmx::exits::vmx_exit,
            run = sym run,
            leave = sym entry::leave,
            on_snapshot = const offset_of!(Cpu, on_snapshot),
            barriers = const offset_of!(Cpu, barriers),
            ibpb = const speculation::IBPB,
            pred_cmd = const msr::PRED_CMD,
            return_entries = const speculation::RETURN_ENTRIES,
        )
    }
}

/// Returns the virtual address of the exit's first instruction.
#[cfg(feature = "image")]
#[must_use]
pub fn exit_virt() -> u64 {
    switch::exit as *const () as u64
}

/// Returns 0: tests have no exit.
#[cfg(not(feature = "image"))]
#[must_use]
pub fn exit_virt() -> u64 {
    0xFFFF_8880_0000_1000
}

/// Returns start and end of the window in which an NMI must begin again, and the address to begin at.
#[cfg(feature = "image")]
pub fn nmi_window() -> [u64; 3] {
    unsafe extern "C" {
        static mercury_vmx_window_start: u8;
        static mercury_vmx_window_end: u8;
        static mercury_vmx_restart: u8;
    }
    // Labels in `switch::enter`; only their addresses count.
    [&raw const mercury_vmx_window_start, &raw const mercury_vmx_window_end, &raw const mercury_vmx_restart]
        .map(|label| label as u64)
}

/// Returns an empty window: tests have none.
#[cfg(not(feature = "image"))]
pub fn nmi_window() -> [u64; 3] {
    [0; 3]
}

/// Returns the address to go on at after a machine check that struck at `rip`. On the way into the guest
/// that is the beginning of the way: an NMI may have been noted meanwhile, and the values that the way has
/// read of the VMCS may have changed. The way does not begin again where an NMI has been given to the guest
/// but not yet taken from the note.
#[cfg(feature = "image")]
pub fn resume_at(rip: u64) -> u64 {
    unsafe extern "C" {
        static mercury_vmx_nmi_given: u8;
        static mercury_vmx_enter_end: u8;
    }
    let [start, _, restart] = nmi_window();
    // Labels in `switch::enter`, as those.
    let [given, end] =
        [&raw const mercury_vmx_nmi_given, &raw const mercury_vmx_enter_end].map(|label| label as u64);
    if rip >= start && rip < end && rip != given { restart } else { rip }
}

/// Returns `rip`: tests have no way into a guest.
#[cfg(not(feature = "image"))]
pub fn resume_at(rip: u64) -> u64 {
    rip
}

/// Loads the hypervisor's task state, on a native CPU: exits load it by themselves.
pub fn save_extended_state(area: &mut Area) {
    area.cpu.gdt.release_task_state();
    // SAFETY: the hypervisor's GDT is in GDTR, it can be written, and the segment was just marked available.
    unsafe { vmx::ltr(HOST_TR) };
}

/// Gives the system its TR and LDTR, from descriptors made of the processor's own values: the system's GDT
/// cannot be written and says that TR is busy (HARDWARE I-11). From here to the gate nothing may fault, for
/// interrupt stacks are the system's.
pub fn restore_extended_state(area: &mut Area) {
    let (tr, ldtr) = (area.own.tr.selector, area.own.ldtr.selector);
    let has_tr = area.host.release(tr);
    // SAFETY: the table is this CPU's own, stays, and has code, data and the two segments where they
    // belong; the gate loads the system's afterwards.
    unsafe {
        vmx::lgdt(&area.own.leave_gdtr);
        if has_tr {
            vmx::ltr(tr);
        }
        vmx::lldt(if ldtr != 0 && area.own.ldtr.is_usable() { ldtr } else { 0 });
    }
}

/// Returns true if a descriptor for this selector can stand in [`LeaveGdt`].
#[must_use]
pub const fn can_be_given_back(selector: u16) -> bool {
    LeaveGdt::index(selector).is_some() || selector & !3 == 0
}

const _: () = assert!(offset_of!(Area, host).is_multiple_of(4096));
