//! The world switch (APM vol. 2, 15.5 and 15.6).
//!
//! On #VMEXIT the processor has loaded the hypervisor's RSP, RAX and segments, and has cleared GIF. Every
//! other general register is still the guest's. The top of the stack holds the address of the area.
//!
//! [`super::quick`] answers the driver's own hypercalls and touches no vector register. So vector registers
//! are saved only for other exits, and by an exception that strikes there and ends the attachment.
//!
//! A user can force exits with VMMCALL. Those never reach compiled code. They are answered below in
//! straight-line code that has no return and no indirect branch, and that touches only this CPU's own pages
//! (HARDWARE A-18). Beneath a snapshot or a dirty log a user can also force nested faults, which compiled
//! code answers. Predictions are forgotten before its first call ([`crate::speculation`]).
//!
//! VMRUN and STGI of a system that uses SVM itself are answered here as well, if no other work is pending:
//! [`super::guests`] says how.

use core::arch::asm;

use super::Area;

#[cfg(feature = "image")]
pub use switch::{mercury_entry_svm, run};

#[cfg(feature = "image")]
mod switch {
    use core::arch::naked_asm;
    use core::mem::offset_of;

    use mercury_abi::gate::{AREA_SIZE, GateBlock, Outward};
    use mercury_abi::shared::{ExitReason, SharedCpu};

    use crate::cpu::Cpu;
    use crate::host::entry;
    use crate::machine_check;
    use crate::speculation::{self, forget_predictions};
    use crate::svm::vmcb::{self, Vmcb, event, exit_code};
    use crate::svm::{Area, Own, guests};
    use crate::x86::{DR7_CLEAR, RFLAGS_IF, RFLAGS_TF, msr};

    const CONTROL: usize = offset_of!(Area, control);
    const OWN: usize = offset_of!(Area, own);
    const REGISTERS: usize =
        offset_of!(Cpu, gate) + offset_of!(GateBlock, outward) + offset_of!(Outward, registers);
    const MACHINE_CHECK: usize = offset_of!(Cpu, gate) + offset_of!(GateBlock, machine_check);

    const INJECT: usize = CONTROL + offset_of!(Vmcb, inject_event);
    const TLB_CONTROL: usize = CONTROL + offset_of!(Vmcb, tlb_control);
    const SHARED_VIRT: usize = offset_of!(Cpu, gate) + offset_of!(GateBlock, shared_virt);

    /// Returns the offset of a counter in the CPU's shared block.
    const fn counter(reason: ExitReason) -> usize {
        offset_of!(SharedCpu, exits) + 8 * reason as usize
    }

    entry::native_entry_point!(mercury_entry_svm, crate::svm::Svm, svm_native, run_first);

    /// Carries out the driver's operations: see [`crate::native::enter`].
    ///
    /// # Safety
    /// `area` is this CPU's own, and GIF is 0: no other code uses the area until this returns.
    unsafe extern "C" fn svm_native(area: *mut Area) -> entry::Next {
        // SAFETY: the gate passes this CPU's area; the driver does not touch it while the CPU is in here.
        crate::native::enter(unsafe { &mut *area })
    }

    /// Loads the registers that compiled code may change, but for RAX and RDI; RDI = the CPU's area.
    macro_rules! load_scratch_registers {
        () => {
            concat!(
                "mov rcx, [rdi + {registers} + 8]\n",
                "mov rdx, [rdi + {registers} + 16]\n",
                "mov rsi, [rdi + {registers} + 48]\n",
                "mov r8, [rdi + {registers} + 64]\n",
                "mov r9, [rdi + {registers} + 72]\n",
                "mov r10, [rdi + {registers} + 80]\n",
                "mov r11, [rdi + {registers} + 88]",
            )
        };
    }

    /// Enters the system after an attach, RDI = the CPU's area; does not return. The system goes on in the
    /// gate, which takes the caller's registers from the stack: the others have no meaning there.
    #[unsafe(naked)]
    extern "C" fn run_first() -> ! {
        naked_asm!(
            "call {restore_sse}",
            "lea rsp, [rdi + {area_size}]",
            "push rdi",
            "mov rax, [rdi + {control_phys}]",
            "vmload rax",
            "jmp .Lsvm_enter",
            restore_sse = sym entry::restore_sse,
            area_size = const AREA_SIZE,
            control_phys = const offset_of!(Cpu, control_phys),
        )
    }

    /// Enters the system, RDI = the CPU's area; does not return.
    ///
    /// The labels are local to the object file, in which [`kvm`] is as well: that one goes on at `enter`
    /// and at `exit`, and this one goes there for VMRUN and STGI of the system.
    #[unsafe(naked)]
    pub extern "C" fn run() -> ! {
        naked_asm!(
            ".Lsvm_load:",
            "call {restore_sse}",
            "lea rsp, [rdi + {area_size}]",
            "push rdi",
            "mov rax, [rdi + {control_phys}]",
            "vmload rax",
            "mov rbx, [rdi + {registers} + 24]",
            "mov rbp, [rdi + {registers} + 40]",
            "mov r12, [rdi + {registers} + 96]",
            "mov r13, [rdi + {registers} + 104]",
            "mov r14, [rdi + {registers} + 112]",
            "mov r15, [rdi + {registers} + 120]",
            load_scratch_registers!(),
            "cmp dword ptr [rdi + {enter_guest}], 0",
            "jne .Lkvm_enter_from_compiled",
            "mov rdi, [rdi + {registers} + 56]",
            // RAX = address of the control block, the stack's top = the area.
            ".Lsvm_enter:",
            "vmrun rax",
            // The guest's RDI to the stack, the area to RDI.
            "xchg rdi, [rsp]",
            "cmp dword ptr [rdi + {exit_code}], {vmmcall}",
            "jne {kvm}",
            "cmp byte ptr [rdi + {cpl}], 0",
            "je .Lsvm_exit",
            // Compiled code decides about a machine check.
            "cmp qword ptr [rdi + {machine_check}], {no_machine_check}",
            "jne .Lsvm_exit",
            // VMMCALL in user mode is #UD, as it is natively.
            "mov dword ptr [rdi + {inject}], {invalid_opcode}",
            "mov dword ptr [rdi + {inject} + 4], 0",
            // A machine check that has struck since goes first, and VMMCALL is executed again. One that
            // strikes from here on replaces the #UD itself.
            "cmp qword ptr [rdi + {machine_check}], {no_machine_check}",
            "je .Lsvm_inject",
            "mov dword ptr [rdi + {inject}], {machine_check_event}",
            ".Lsvm_inject:",
            "mov dword ptr [rdi + {tlb_control}], 0",
            "mov rax, [rdi + {shared_virt}]",
            "inc qword ptr [rax + {foreign_counter}]",
            "mov rax, [rdi + {control_phys}]",
            "xchg rdi, [rsp]",
            "jmp .Lsvm_enter",
            // RDI = the area, the stack's top = the guest's RDI: all other exits go to compiled code.
            ".Lsvm_exit:",
            "mov [rdi + {registers} + 8], rcx",
            "mov [rdi + {registers} + 16], rdx",
            "mov [rdi + {registers} + 24], rbx",
            "mov [rdi + {registers} + 40], rbp",
            "mov [rdi + {registers} + 48], rsi",
            "pop qword ptr [rdi + {registers} + 56]",
            "mov [rdi + {registers} + 64], r8",
            "mov [rdi + {registers} + 72], r9",
            "mov [rdi + {registers} + 80], r10",
            "mov [rdi + {registers} + 88], r11",
            "mov [rdi + {registers} + 96], r12",
            "mov [rdi + {registers} + 104], r13",
            "mov [rdi + {registers} + 112], r14",
            "mov [rdi + {registers} + 120], r15",
            "mov rax, [rdi + {control_phys}]",
            "vmsave rax",
            "mov rax, [rdi + {host_phys}]",
            "vmload rax",
            "cld",
            "cmp dword ptr [rdi + {on_snapshot}], 0",
            "jne .Lsvm_forget",
            // No mispredicted branch comes any further, to returns that user mode has trained.
            "lfence",
            "call {quick}",
            "lea rdi, [rsp - {area_size}]",
            "cmp eax, {quick_run}",
            "ja .Lsvm_handle",
            "mov rax, [rdi + {control_phys}]",
            "vmload rax",
            "jb {leave_quickly}",
            // All other registers are as the system left them: compiled code preserves them.
            "push rdi",
            load_scratch_registers!(),
            "mov rdi, [rdi + {registers} + 56]",
            "jmp .Lsvm_enter",
            ".Lsvm_handle:",
            "call {save_sse}",
            "call {handle}",
            "lea rdi, [rsp - {area_size}]",
            "test eax, eax",
            "jz {leave}",
            // Empties the buffers that some processors leak from (TSA). On others VERW does nothing.
            "verw word ptr [rip + {verw}]",
            "jmp .Lsvm_load",
            // Beneath a snapshot or a dirty log compiled code may map the system's memory.
            ".Lsvm_forget:",
            forget_predictions!(),
            "jmp .Lsvm_handle",
            area_size = const AREA_SIZE,
            control_phys = const offset_of!(Cpu, control_phys),
            host_phys = const offset_of!(Cpu, host_phys),
            registers = const REGISTERS,
            exit_code = const CONTROL + offset_of!(Vmcb, exit_code),
            vmmcall = const exit_code::VMMCALL,
            kvm = sym kvm,
            cpl = const CONTROL + offset_of!(Vmcb, cpl),
            inject = const INJECT,
            invalid_opcode = const event::INVALID_OPCODE,
            machine_check = const MACHINE_CHECK,
            no_machine_check = const machine_check::NONE,
            machine_check_event = const event::MACHINE_CHECK,
            tlb_control = const TLB_CONTROL,
            shared_virt = const SHARED_VIRT,
            foreign_counter = const counter(ExitReason::ForeignHypercall),
            enter_guest = const OWN + offset_of!(Own, enter_guest),
            restore_sse = sym entry::restore_sse,
            save_sse = sym entry::save_sse,
            quick = sym crate::svm::quick::quick_exit,
            quick_run = const crate::quick::Quick::Run as u32,
            leave_quickly = sym entry::leave_quickly,
            handle = sym crate::svm::exits::svm_exit,
            leave = sym entry::leave,
            on_snapshot = const offset_of!(Cpu, on_snapshot),
            barriers = const offset_of!(Cpu, barriers),
            ibpb = const speculation::IBPB,
            pred_cmd = const msr::PRED_CMD,
            return_entries = const speculation::RETURN_ENTRIES,
            verw = sym entry::VERW_SELECTOR,
        )
    }

    /// Answers VMRUN and STGI of a system that uses SVM itself, and runs its guest, if no other work has to
    /// be done ([`crate::svm::guests`]).
    ///
    /// RDI = the CPU's area, the stack's top = the system's RDI; all other registers are the system's. Goes
    /// on at `enter` of [`run`] with the system, or at its `exit` with an exit for compiled code.
    #[unsafe(naked)]
    extern "C" fn kvm() -> ! {
        naked_asm!(
            "cmp dword ptr [rdi + {quick_guests}], 0",
            "je .Lsvm_exit",
            "cmp qword ptr [rdi + {machine_check}], {no_machine_check}",
            "jne .Lsvm_exit",
            // A single step is for compiled code.
            "test byte ptr [rdi + {rflags} + 1], {trap_flag}",
            "jnz .Lsvm_exit",
            // VMRUN, if the window shows the guest's block.
            "cmp dword ptr [rdi + {exit_code}], {vmrun_code}",
            "jne .Lkvm_stgi",
            "mov rax, [rdi + {guest_rax}]",
            "cmp rax, [rdi + {block_phys}]",
            "jne .Lsvm_exit",
            "mov rax, [rdi + {window_virt}]",
            "test byte ptr [rax + {block_nested_control}], {encrypted}",
            "jnz .Lsvm_exit",
            "test byte ptr [rax + {block_virtual_interrupt} + 3], {virtual_apic}",
            "jnz .Lsvm_exit",
            "mov eax, [rax + {block_asid}]",
            "cmp eax, [rdi + {asid}]",
            "je .Lsvm_exit",
            "mov rax, [rdi + {shared_virt}]",
            "inc qword ptr [rax + {run_counter}]",
            "add qword ptr [rdi + {rip}], 3",
            "mov dword ptr [rdi + {shadow}], 0",
            "mov dword ptr [rdi + {tlb_control}], 0",
            "mov dword ptr [rdi + {entered}], 1",
            "mov dword ptr [rdi + {entry_state_valid}], 0",
            // In place. The system's IF is the one that masks interrupts meanwhile. GIF is 0, so none comes
            // here.
            ".Lkvm_enter:",
            "mov rax, [rdi + {guest_rax}]",
            "cmp dword ptr [rdi + {around_guest}], 0",
            "jne .Lkvm_lend",
            ".Lkvm_mask:",
            "test byte ptr [rdi + {rflags} + 1], {interrupt_flag}",
            "jz .Lkvm_run",
            "sti",
            ".Lkvm_run:",
            "xchg rdi, [rsp]",
            "vmrun rax",
            "cli",
            "xchg rdi, [rsp]",
            "cmp dword ptr [rdi + {around_guest}], 0",
            "jne .Lkvm_take_back",
            // The guest's exit as the system sees it (APM vol. 2, 15.6): breakpoints are off, and GIF is 0.
            // IF is cleared for Bochs, which heeds it in spite of V_INTR_MASKING; KVM's next instruction is
            // CLI.
            ".Lkvm_exited:",
            "mov qword ptr [rdi + {dr7}], {no_breakpoints}",
            "and byte ptr [rdi + {rflags} + 1], {all_but_interrupt_flag}",
            "mov dword ptr [rdi + {gif_is_clear}], 1",
            "or byte ptr [rdi + {virtual_interrupt} + 3], {masking}",
            "or dword ptr [rdi + {misc1}], {intercept_nmi}",
            "or dword ptr [rdi + {misc2}], {intercept_stgi}",
            "mov rax, [rdi + {control_phys}]",
            "xchg rdi, [rsp]",
            "jmp .Lsvm_enter",
            // From compiled code, which has answered VMRUN: RDI = the area, the stack's top is to be the
            // system's RDI.
            ".Lkvm_enter_from_compiled:",
            "mov dword ptr [rdi + {enter_guest}], 0",
            "mov rax, [rdi + {registers} + 56]",
            "mov [rsp], rax",
            "jmp .Lkvm_enter",
            // Where the processor has a SPEC_CTRL for guests (APM vol. 2, 15.35), a guest of the system
            // runs with the system's value besides. The processor has that value only while the guest runs.
            ".Lkvm_lend:",
            "test dword ptr [rdi + {around_guest}], {lent}",
            "jz .Lkvm_mask",
            "push rcx",
            "push rdx",
            "mov ecx, {spec_ctrl_msr}",
            "mov rax, [rdi + {spec_ctrl}]",
            "mov rdx, rax",
            "shr rdx, 32",
            "wrmsr",
            "pop rdx",
            "pop rcx",
            "mov rax, [rdi + {guest_rax}]",
            "jmp .Lkvm_mask",
            ".Lkvm_take_back:",
            "test dword ptr [rdi + {around_guest}], {lent}",
            "jz .Lkvm_shadowed",
            "push rcx",
            "push rdx",
            "mov ecx, {spec_ctrl_msr}",
            "xor eax, eax",
            "xor edx, edx",
            "wrmsr",
            "pop rdx",
            "pop rcx",
            // Beneath a snapshot the exit may be the shadow's. Compiled code decides.
            ".Lkvm_shadowed:",
            "test dword ptr [rdi + {around_guest}], {shadowed}",
            "jz .Lkvm_exited",
            "mov dword ptr [rdi + {guest_exited}], 1",
            "jmp .Lsvm_exit",
            // STGI after a guest.
            ".Lkvm_stgi:",
            "cmp dword ptr [rdi + {exit_code}], {stgi_code}",
            "jne .Lsvm_exit",
            "cmp dword ptr [rdi + {gif_is_clear}], 0",
            "je .Lsvm_exit",
            "mov rax, [rdi + {shared_virt}]",
            "inc qword ptr [rax + {end_counter}]",
            "add qword ptr [rdi + {rip}], 3",
            "mov dword ptr [rdi + {shadow}], 0",
            "mov dword ptr [rdi + {tlb_control}], 0",
            "mov dword ptr [rdi + {entry_state_valid}], 0",
            "mov dword ptr [rdi + {gif_is_clear}], 0",
            "and byte ptr [rdi + {virtual_interrupt} + 3], {all_but_masking}",
            "and dword ptr [rdi + {misc1}], {all_but_nmi}",
            "and dword ptr [rdi + {misc2}], {all_but_stgi}",
            "cmp dword ptr [rdi + {nmi_held}], 0",
            "je .Lkvm_open",
            "mov dword ptr [rdi + {nmi_held}], 0",
            "mov dword ptr [rdi + {inject}], {nmi_event}",
            "mov dword ptr [rdi + {inject} + 4], 0",
            ".Lkvm_open:",
            "mov rax, [rdi + {control_phys}]",
            "xchg rdi, [rsp]",
            "jmp .Lsvm_enter",
            control_phys = const offset_of!(Cpu, control_phys),
            registers = const REGISTERS,
            exit_code = const CONTROL + offset_of!(Vmcb, exit_code),
            inject = const INJECT,
            machine_check = const MACHINE_CHECK,
            no_machine_check = const machine_check::NONE,
            tlb_control = const TLB_CONTROL,
            shared_virt = const SHARED_VIRT,
            run_counter = const counter(ExitReason::GuestRun),
            end_counter = const counter(ExitReason::GuestEnd),
            enter_guest = const OWN + offset_of!(Own, enter_guest),
            quick_guests = const OWN + offset_of!(Own, quick_guests),
            gif_is_clear = const OWN + offset_of!(Own, gif_is_clear),
            nmi_held = const OWN + offset_of!(Own, nmi_held),
            block_phys = const OWN + offset_of!(Own, block_phys),
            entry_state_valid = const OWN + offset_of!(Own, entry_state_valid),
            around_guest = const OWN + offset_of!(Own, around_guest),
            guest_exited = const OWN + offset_of!(Own, guest_exited),
            lent = const guests::LENT,
            shadowed = const guests::SHADOWED,
            entered = const offset_of!(Cpu, entered),
            window_virt = const offset_of!(Cpu, gate) + offset_of!(GateBlock, window_virt),
            vmrun_code = const exit_code::VMRUN,
            stgi_code = const exit_code::STGI,
            guest_rax = const CONTROL + offset_of!(Vmcb, rax),
            rip = const CONTROL + offset_of!(Vmcb, rip),
            rflags = const CONTROL + offset_of!(Vmcb, rflags),
            trap_flag = const RFLAGS_TF >> 8,
            interrupt_flag = const RFLAGS_IF >> 8,
            all_but_interrupt_flag = const !(RFLAGS_IF as u32 >> 8) as u8,
            shadow = const CONTROL + offset_of!(Vmcb, interrupt_shadow),
            dr7 = const CONTROL + offset_of!(Vmcb, dr7),
            no_breakpoints = const DR7_CLEAR,
            asid = const CONTROL + offset_of!(Vmcb, asid),
            block_asid = const offset_of!(Vmcb, asid),
            block_nested_control = const offset_of!(Vmcb, nested_control),
            block_virtual_interrupt = const offset_of!(Vmcb, virtual_interrupt),
            virtual_apic = const vmcb::VIRTUAL_APIC >> 24,
            encrypted = const vmcb::NESTED_CONTROL_ENCRYPTED,
            virtual_interrupt = const CONTROL + offset_of!(Vmcb, virtual_interrupt),
            masking = const vmcb::VIRTUAL_MASKING >> 24,
            all_but_masking = const !((vmcb::VIRTUAL_MASKING >> 24) as u8),
            misc1 = const CONTROL + offset_of!(Vmcb, intercept_misc1),
            misc2 = const CONTROL + offset_of!(Vmcb, intercept_misc2),
            intercept_nmi = const vmcb::INTERCEPT_NMI,
            all_but_nmi = const !vmcb::INTERCEPT_NMI as i32,
            intercept_stgi = const vmcb::INTERCEPT_STGI,
            all_but_stgi = const !vmcb::INTERCEPT_STGI as i32,
            nmi_event = const guests::NMI,
            spec_ctrl = const CONTROL + offset_of!(Vmcb, spec_ctrl),
            spec_ctrl_msr = const msr::SPEC_CTRL,
        )
    }
}

/// Saves the system's FS, GS, TR, LDTR and syscall MSRs to the control block and loads the
/// hypervisor's.
pub fn save_extended_state(area: &Area) {
    // SAFETY: EFER.SVME is set, and both addresses are those of this CPU's own pages. The hypervisor's code
    // uses none of the registers that change, but for TR, which becomes valid.
    unsafe {
        asm!("vmsave rax", in("rax") area.cpu.control_phys, options(nostack, preserves_flags));
        asm!("vmload rax", in("rax") area.cpu.host_phys, options(nostack, preserves_flags));
    }
}

/// Gives the system its FS, GS, TR, LDTR and syscall MSRs back.
pub fn restore_extended_state(area: &Area) {
    // SAFETY: as above; from here to the gate nothing may fault, for TR is the system's.
    unsafe { asm!("vmload rax", in("rax") area.cpu.control_phys, options(nostack, preserves_flags)) };
}
