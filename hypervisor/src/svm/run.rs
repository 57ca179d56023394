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
//! CPU's own pages (HARDWARE A-18).

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
    use crate::svm::Area;
    use crate::svm::vmcb::{Vmcb, event, exit_code};

    const CONTROL: usize = offset_of!(Area, control);
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
            "mov rdi, [rdi + {registers} + 56]",
            "3:",
            "vmrun rax",
            // The guest's RDI to the stack, the area to RDI.
            "xchg rdi, [rsp]",
            "cmp dword ptr [rdi + {exit_code}], {vmmcall}",
            "jne 4f",
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
            // Nor does a mispredicted branch come any further, to returns that user mode has trained.
            "lfence",
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
            "call {quick}",
            "mov rdi, rbx",
            "cmp eax, {quick_run}",
            "je 5b",
            "jb {leave_quickly}",
            "call {save_sse}",
            "call {handle}",
            "mov rdi, rbx",
            "test eax, eax",
            "jnz 2b",
            "jmp {leave}",
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
            restore_sse = sym entry::restore_sse,
            save_sse = sym entry::save_sse,
            quick = sym crate::svm::quick::quick_exit,
            quick_run = const crate::svm::quick::Quick::Run as u32,
            leave_quickly = sym entry::leave_quickly,
            handle = sym crate::svm::exits::svm_exit,
            leave = sym entry::leave,
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
