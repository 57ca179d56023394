//! The ways between guest and monitor, in assembler.
//!
//! - From a slot: [`hosted_exit`] keeps the registers in the block, takes the monitor's stack and
//!   base of FS, and calls [`handle_exit`](crate::machine::handle_exit). The guest's stack is not
//!   touched, because it may be a program's.
//! - By a signal: [`hosted_signal`] runs on the signal stack. The registers are in the signal's
//!   frame.
//! - Back: [`hosted_resume`]. A signal between its last check for waiting interrupts and its jump
//!   makes it begin again. Until then it has only read.
//!
//! While the guest runs, the selector of Syscall User Dispatch says that system calls are the
//! guest's own. The call in [`hosted_restorer`], which returns from a signal, is excepted.

use std::arch::global_asm;

use crate::{
    block::at,
    vcpu::{ALIGNMENT, IDENTIFICATION, NESTED, TRAP, USER_CODE_32},
};

unsafe extern "C" {
    /// Leaves the guest. Slots jump here.
    pub fn hosted_exit();
    /// Resumes the guest from the block.
    pub fn hosted_resume();
    /// Marks the start of the part of `hosted_resume` that may begin again.
    pub fn hosted_resume_start();
    /// Marks the end of that part.
    pub fn hosted_resume_end();
    /// Begins `hosted_resume` again, after waiting events are answered.
    pub fn hosted_resume_pending();
    /// Goes on with a program that runs in a process of its own. Its registers are in the block,
    /// except the floating-point registers.
    pub fn hosted_enter_program();
    /// Handles all signals.
    pub fn hosted_signal();
    /// Returns from a signal.
    pub fn hosted_restorer();
    /// Marks the end of `hosted_restorer`.
    pub fn hosted_restorer_end();
    /// Saves the floating-point registers at an address.
    pub fn hosted_save_extended(area: u64);
}

/// Loads all general registers from the block, except the stack's.
macro_rules! load_registers {
    () => {
        concat!(
            "mov rax, qword ptr [{regs}]\n",
            "mov rcx, qword ptr [{regs} + 8]\n",
            "mov rdx, qword ptr [{regs} + 16]\n",
            "mov rbx, qword ptr [{regs} + 24]\n",
            "mov rbp, qword ptr [{regs} + 40]\n",
            "mov rsi, qword ptr [{regs} + 48]\n",
            "mov rdi, qword ptr [{regs} + 56]\n",
            "mov r8, qword ptr [{regs} + 64]\n",
            "mov r9, qword ptr [{regs} + 72]\n",
            "mov r10, qword ptr [{regs} + 80]\n",
            "mov r11, qword ptr [{regs} + 88]\n",
            "mov r12, qword ptr [{regs} + 96]\n",
            "mov r13, qword ptr [{regs} + 104]\n",
            "mov r14, qword ptr [{regs} + 112]\n",
            "mov r15, qword ptr [{regs} + 120]\n",
        )
    };
}

global_asm!(
    ".pushsection .text.hosted,\"ax\",@progbits",
    ".p2align 6",
    ".global hosted_exit",
    "hosted_exit:",
    "mov qword ptr [{regs} + 32], rsp",
    "mov qword ptr [{regs}], rax",
    "mov qword ptr [{regs} + 8], rcx",
    "mov qword ptr [{regs} + 16], rdx",
    "mov qword ptr [{regs} + 24], rbx",
    "mov qword ptr [{regs} + 40], rbp",
    "mov qword ptr [{regs} + 48], rsi",
    "mov qword ptr [{regs} + 56], rdi",
    "mov qword ptr [{regs} + 64], r8",
    "mov qword ptr [{regs} + 72], r9",
    "mov qword ptr [{regs} + 80], r10",
    "mov qword ptr [{regs} + 88], r11",
    "mov qword ptr [{regs} + 96], r12",
    "mov qword ptr [{regs} + 104], r13",
    "mov qword ptr [{regs} + 112], r14",
    "mov qword ptr [{regs} + 120], r15",
    "mov rsp, qword ptr [{stack}]",
    "pushfq",
    "pop qword ptr [{rflags}]",
    "cld",
    "mov byte ptr [{selector}], 0",
    "rdfsbase rax",
    "mov qword ptr [{fs}], rax",
    "rdgsbase rax",
    "mov qword ptr [{gs}], rax",
    "mov rax, qword ptr [{monitor_fs}]",
    "wrfsbase rax",
    "mov rdi, qword ptr [{extended}]",
    "call hosted_save_extended",
    "call {handle_exit}",
    ".global hosted_resume",
    "hosted_resume:",
    "mov rsp, qword ptr [{stack}]",
    "mov rdi, qword ptr [{extended}]",
    "mov eax, -1",
    "mov edx, -1",
    "xrstor64 [rdi]",
    ".global hosted_resume_start",
    "hosted_resume_start:",
    "cmp byte ptr [{called}], 0",
    "jne hosted_resume_pending",
    "cmp byte ptr [{pending}], 0",
    "je 1f",
    "test byte ptr [{if_byte}], 2",
    "jnz hosted_resume_pending",
    "1:",
    "mov rax, qword ptr [{fs}]",
    "wrfsbase rax",
    "mov rax, qword ptr [{gs}]",
    "wrgsbase rax",
    "mov byte ptr [{selector}], 1",
    "test byte ptr [{rflags} + 1], {trap_of_byte}",
    "jnz 2f",
    "cmp word ptr [{segments}], {code_32}",
    "je 2f",
    "push qword ptr [{rflags}]",
    "popfq",
    load_registers!(),
    "mov rsp, qword ptr [{regs} + 32]",
    "jmp qword ptr [{rip}]",
    // A stepped program must not be trapped before its own instruction, and 32-bit code needs its
    // selector.
    "2:",
    "movzx eax, word ptr [{segments} + 2]",
    "push rax",
    "push qword ptr [{regs} + 32]",
    "push qword ptr [{rflags}]",
    "movzx eax, word ptr [{segments}]",
    "push rax",
    "push qword ptr [{rip}]",
    load_registers!(),
    "iretq",
    ".global hosted_resume_end",
    "hosted_resume_end:",
    ".global hosted_resume_pending",
    "hosted_resume_pending:",
    "mov byte ptr [{selector}], 0",
    "mov rsp, qword ptr [{stack}]",
    "mov rax, qword ptr [{monitor_fs}]",
    "wrfsbase rax",
    "cld",
    "call {handle_pending}",
    "jmp hosted_resume",
    "",
    ".global hosted_enter_program",
    "hosted_enter_program:",
    "mov byte ptr [{selector}], 0",
    "mov rsp, qword ptr [{stack}]",
    "mov rax, qword ptr [{monitor_fs}]",
    "wrfsbase rax",
    "cld",
    "mov rdi, qword ptr [{extended}]",
    "call hosted_save_extended",
    "call {handle_program}",
    "jmp hosted_resume",
    "",
    ".global hosted_save_extended",
    "hosted_save_extended:",
    "mov eax, -1",
    "mov edx, -1",
    "xsave64 [rdi]",
    "ret",
    "",
    ".global hosted_signal",
    "hosted_signal:",
    "push rbx",
    "push r12",
    "push r13",
    // The host leaves the flags unchanged, except two. The monitor's accesses are not always
    // aligned, so AC must be clear.
    "pushfq",
    "and qword ptr [rsp], {no_programs_flags}",
    "popfq",
    "rdfsbase rbx",
    "mov r12b, byte ptr [{selector}]",
    "mov byte ptr [{selector}], 0",
    "mov rax, qword ptr [{monitor_fs}]",
    "wrfsbase rax",
    "mov rcx, rbx",
    "movzx r8d, r12b",
    "call {handle_signal}",
    "test eax, eax",
    "jnz 1f",
    "wrfsbase rbx",
    "mov byte ptr [{selector}], r12b",
    "jmp 2f",
    "1:",
    "mov rax, qword ptr [{fs}]",
    "wrfsbase rax",
    "mov rax, qword ptr [{gs}]",
    "wrgsbase rax",
    "mov byte ptr [{selector}], 1",
    // The return from the signal leaves these flags as they are now.
    "push qword ptr [{rflags}]",
    "and qword ptr [rsp], {kept_flags}",
    "popfq",
    "2:",
    "pop r13",
    "pop r12",
    "pop rbx",
    "ret",
    ".p2align 6",
    ".global hosted_restorer",
    "hosted_restorer:",
    "mov eax, 15",
    "syscall",
    "ud2",
    ".global hosted_restorer_end",
    "hosted_restorer_end:",
    ".popsection",
    regs = const at::REGISTERS,
    rip = const at::RIP,
    rflags = const at::RFLAGS,
    segments = const at::SEGMENTS,
    code_32 = const USER_CODE_32,
    trap_of_byte = const TRAP >> 8,
    no_programs_flags = const !(ALIGNMENT | NESTED).cast_signed(),
    kept_flags = const NESTED | IDENTIFICATION,
    stack = const at::STACK,
    selector = const at::SELECTOR,
    pending = const at::PENDING,
    called = const at::CALLED,
    if_byte = const at::IF_BYTE,
    fs = const at::FS,
    gs = const at::GS,
    monitor_fs = const at::MONITOR_FS,
    extended = const at::EXTENDED,
    handle_exit = sym crate::machine::handle_exit,
    handle_pending = sym crate::machine::handle_pending,
    handle_program = sym crate::machine::handle_program,
    handle_signal = sym crate::signal::handle_signal,
);
