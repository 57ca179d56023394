//! The world switch (APM vol. 2, 15.5 and 15.6).
//!
//! On #VMEXIT the processor has loaded the hypervisor's RSP, RAX and segments and cleared GIF; every
//! other general register still is the guest's. The top of the stack holds the address of the area.
//!
//! The driver's own hypercalls are answered by [`super::quick`], which touches no vector register, so that
//! those are saved only for the other exits, and by an exception that strikes there and is the end.
//!
//! A user can force exits with VMMCALL. Those never reach compiled code: they are answered below in
//! straight-line code that has no return and no indirect branch, and that touches nothing but this
//! CPU's own pages (HARDWARE A-18). Beneath a snapshot or a dirty log a user can also force nested faults, which compiled
//! code answers: predictions are forgotten before its first call ([`crate::speculation`]).
//!
//! VMRUN and STGI of a system that uses SVM itself are answered there as well, if nothing besides is to be done:
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

    entry::native_entry_point!(mercury_entry_svm, crate::svm::Svm, svm_native, run);

    /// The driver's operations: see [`crate::native::enter`].
    ///
    /// # Safety
    /// `area` is this CPU's own, and GIF is 0: nobody else uses it until this returns.
    unsafe extern "C" fn svm_native(area: *mut Area) -> entry::Next {
        // SAFETY: the gate passes this CPU's area; the driver does not touch it while the CPU is in here.
        crate::native::enter(unsafe { &mut *area })
    }

    /// Enters the guest, RDI = the CPU's area; does not return.
    #[unsafe(naked)]
    pub extern "C" fn run() -> ! {
        naked_asm!(
            "2:",
            "call {restore_sse}",
            "5:",
            "lea rsp, [rdi + {area_size}]",
            "push rdi",
            "mov rax, [rdi + {control_phys}]",
            "vmload rax",
            "mov rcx, [rdi + {registers} + 8]",
            "mov rdx, [rdi + {registers} + 16]",
            "mov rbx, [rdi + {registers} + 24]",
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
            "cmp dword ptr [rdi + {enter_guest}], 0",
            "jne 7f",
            "mov rdi, [rdi + {registers} + 56]",
            "3:",
            "vmrun rax",
            // The guest's RDI to the stack, the area to RDI.
            "xchg rdi, [rsp]",
            "cmp dword ptr [rdi + {exit_code}], {vmmcall}",
            "jne 8f",
            "cmp byte ptr [rdi + {cpl}], 0",
            "je 4f",
            // What becomes of a machine check is for compiled code to say.
            "cmp qword ptr [rdi + {machine_check}], {no_machine_check}",
            "jne 4f",
            // VMMCALL in user mode is #UD, as it is natively.
            "mov dword ptr [rdi + {inject}], {invalid_opcode}",
            "mov dword ptr [rdi + {inject} + 4], 0",
            // One that has struck since goes first; VMMCALL is then executed again. One that strikes from
            // here on replaces the #UD itself.
            "cmp qword ptr [rdi + {machine_check}], {no_machine_check}",
            "je 6f",
            "mov dword ptr [rdi + {inject}], {machine_check_event}",
            "6:",
            "mov dword ptr [rdi + {tlb_control}], 0",
            "mov rax, [rdi + {shared_virt}]",
            "inc qword ptr [rax + {foreign_counter}]",
            "mov rax, [rdi + {control_phys}]",
            "xchg rdi, [rsp]",
            "jmp 3b",
            "4:",
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
            "mov rbx, rdi",
            "cld",
            "cmp dword ptr [rdi + {on_snapshot}], 0",
            "jne 30f",
            // No mispredicted branch comes any further, to returns that user mode has trained.
            "lfence",
            "call {quick}",
            "mov rdi, rbx",
            "cmp eax, {quick_run}",
            "je 5b",
            "jb {leave_quickly}",
            "31:",
            "call {save_sse}",
            "call {handle}",
            "mov rdi, rbx",
            "test eax, eax",
            "jz {leave}",
            // Empties the buffers that some processors leak from (TSA); on others it does nothing.
            "verw word ptr [rip + {verw}]",
            "jmp 2b",
            // Beneath a snapshot or a log compiled code may map the system's memory.
            "30:",
            forget_predictions!(),
            "jmp 31b",
            // Does the system use SVM itself? Its VMRUN, if the block is the one that the window shows.
            "8:",
            "cmp dword ptr [rdi + {quick_guests}], 0",
            "je 4b",
            "cmp qword ptr [rdi + {machine_check}], {no_machine_check}",
            "jne 4b",
            // A single step is for compiled code.
            "test byte ptr [rdi + {rflags} + 1], {trap_flag}",
            "jnz 4b",
            "cmp dword ptr [rdi + {exit_code}], {vmrun_code}",
            "jne 20f",
            "mov rax, [rdi + {guest_rax}]",
            "cmp rax, [rdi + {block_phys}]",
            "jne 4b",
            "mov rax, [rdi + {window_virt}]",
            "test byte ptr [rax + {block_nested_control}], {encrypted}",
            "jnz 4b",
            "test byte ptr [rax + {block_virtual_interrupt} + 3], {virtual_apic}",
            "jnz 4b",
            "mov eax, [rax + {block_asid}]",
            "cmp eax, [rdi + {asid}]",
            "je 4b",
            "mov rax, [rdi + {shared_virt}]",
            "inc qword ptr [rax + {run_counter}]",
            "add qword ptr [rdi + {rip}], 3",
            "mov dword ptr [rdi + {shadow}], 0",
            "mov dword ptr [rdi + {tlb_control}], 0",
            "mov dword ptr [rdi + {entered}], 1",
            "mov dword ptr [rdi + {entry_state_valid}], 0",
            // In place. The system's IF is the one that masks interrupts meanwhile; GIF is 0, so none comes here.
            "10:",
            "mov rax, [rdi + {guest_rax}]",
            "cmp dword ptr [rdi + {around_guest}], 0",
            "jne 13f",
            "11:",
            "test byte ptr [rdi + {rflags} + 1], {interrupt_flag}",
            "jz 12f",
            "sti",
            "12:",
            "xchg rdi, [rsp]",
            "vmrun rax",
            "cli",
            "xchg rdi, [rsp]",
            "cmp dword ptr [rdi + {around_guest}], 0",
            "jne 14f",
            // The guest's exit as the system sees it (APM vol. 2, 15.6): breakpoints are off, and GIF is 0. IF is cleared
            // for Bochs, which looks at it in spite of V_INTR_MASKING; KVM's next instruction is CLI.
            "15:",
            "mov qword ptr [rdi + {dr7}], {no_breakpoints}",
            "and byte ptr [rdi + {rflags} + 1], {all_but_interrupt_flag}",
            "mov dword ptr [rdi + {gif_is_clear}], 1",
            "or byte ptr [rdi + {virtual_interrupt} + 3], {masking}",
            "or dword ptr [rdi + {misc1}], {intercept_nmi}",
            "or dword ptr [rdi + {misc2}], {intercept_stgi}",
            "mov rax, [rdi + {control_phys}]",
            "xchg rdi, [rsp]",
            "jmp 3b",
            // From compiled code: RDI is the area, the stack's top to be the system's RDI.
            "7:",
            "mov dword ptr [rdi + {enter_guest}], 0",
            "mov rax, [rdi + {registers} + 56]",
            "mov [rsp], rax",
            "jmp 10b",
            // Where the processor has a SPEC_CTRL for guests (APM vol. 2, 15.35), a guest of the system runs with what the
            // system has besides, which the processor has only while that runs.
            "13:",
            "test dword ptr [rdi + {around_guest}], {lent}",
            "jz 11b",
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
            "jmp 11b",
            "14:",
            "test dword ptr [rdi + {around_guest}], {lent}",
            "jz 16f",
            "push rcx",
            "push rdx",
            "mov ecx, {spec_ctrl_msr}",
            "xor eax, eax",
            "xor edx, edx",
            "wrmsr",
            "pop rdx",
            "pop rcx",
            // Beneath a snapshot the exit may be the shadow's: compiled code says.
            "16:",
            "test dword ptr [rdi + {around_guest}], {shadowed}",
            "jz 15b",
            "mov dword ptr [rdi + {guest_exited}], 1",
            "jmp 4b",
            // Its STGI after a guest.
            "20:",
            "cmp dword ptr [rdi + {exit_code}], {stgi_code}",
            "jne 4b",
            "cmp dword ptr [rdi + {gif_is_clear}], 0",
            "je 4b",
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
            "je 21f",
            "mov dword ptr [rdi + {nmi_held}], 0",
            "mov dword ptr [rdi + {inject}], {nmi_event}",
            "mov dword ptr [rdi + {inject} + 4], 0",
            "21:",
            "mov rax, [rdi + {control_phys}]",
            "xchg rdi, [rsp]",
            "jmp 3b",
            area_size = const AREA_SIZE,
            control_phys = const offset_of!(Cpu, control_phys),
            host_phys = const offset_of!(Cpu, host_phys),
            registers = const REGISTERS,
            exit_code = const CONTROL + offset_of!(Vmcb, exit_code),
            vmmcall = const exit_code::VMMCALL,
            cpl = const CONTROL + offset_of!(Vmcb, cpl),
            inject = const CONTROL + offset_of!(Vmcb, inject_event),
            invalid_opcode = const event::INVALID_OPCODE,
            machine_check = const MACHINE_CHECK,
            no_machine_check = const machine_check::NONE,
            machine_check_event = const event::MACHINE_CHECK,
            tlb_control = const CONTROL + offset_of!(Vmcb, tlb_control),
            shared_virt = const offset_of!(Cpu, gate) + offset_of!(GateBlock, shared_virt),
            foreign_counter =
                const offset_of!(SharedCpu, exits) + 8 * ExitReason::ForeignHypercall as usize,
            run_counter = const offset_of!(SharedCpu, exits) + 8 * ExitReason::GuestRun as usize,
            end_counter = const offset_of!(SharedCpu, exits) + 8 * ExitReason::GuestEnd as usize,
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
            restore_sse = sym entry::restore_sse,
            save_sse = sym entry::save_sse,
            quick = sym crate::svm::quick::quick_exit,
            quick_run = const crate::svm::quick::Quick::Run as u32,
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
}

/// Saves the system's FS, GS, TR, LDTR and syscall MSRs to the control block and loads the
/// hypervisor's.
pub fn take_extended_state(area: &Area) {
    // SAFETY: EFER.SVME is set, both addresses are those of this CPU's own pages; the hypervisor's code
    // uses none of the registers that change, but for TR, which becomes valid by it.
    unsafe {
        asm!("vmsave rax", in("rax") area.cpu.control_phys, options(nostack, preserves_flags));
        asm!("vmload rax", in("rax") area.cpu.host_phys, options(nostack, preserves_flags));
    }
}

/// Gives the system its FS, GS, TR, LDTR and syscall MSRs back.
pub fn return_extended_state(area: &Area) {
    // SAFETY: as above; from here to the gate nothing may fault, for TR is the system's.
    unsafe { asm!("vmload rax", in("rax") area.cpu.control_phys, options(nostack, preserves_flags)) };
}
