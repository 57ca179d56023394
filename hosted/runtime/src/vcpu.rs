//! The parts of a processor that a process lacks: control registers, descriptor tables,
//! model-specific registers.

use crate::machine::Step;

/// A descriptor table's register.
#[derive(Clone, Copy, Debug, Default)]
pub struct Table {
    pub base: u64,
    /// The offset of the table's last byte.
    pub limit: u16,
}

/// The processor's registers that are not in the block.
#[derive(Clone, Debug, Default)]
pub struct Vcpu {
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub cr8: u64,
    /// Debug registers. They have an effect on programs only.
    pub debug: [u64; 8],
    /// The program's instruction that runs while breakpoints are set. The guest was left if it is the
    /// default.
    pub step: Step,
    /// The table of segment descriptors.
    pub gdt: Table,
    /// The table of interrupt gates.
    pub idt: Table,
    /// The selector of the local descriptor table.
    pub ldt: u16,
    /// The selector of the task's segment.
    pub task: u16,
    /// The address of the task's segment.
    pub task_base: u64,
    /// The selectors that system calls and their returns load.
    pub star: u64,
    /// The flags that a system call clears.
    pub syscall_mask: u64,
    pub efer: u64,
    /// The first extended control register, XCR0.
    pub xcr0: u64,
}

/// The selector of programs' code. Linux has it at the same place on all machines, the host too.
pub const USER_CODE: u16 = 0x33;
/// The selector of programs' 32-bit code.
pub const USER_CODE_32: u16 = 0x23;
/// The selector of programs' stack.
pub const USER_STACK: u16 = 0x2B;
/// EFLAGS.TF: a trap after each instruction.
pub const TRAP: u64 = 1 << 8;
/// EFLAGS.NT: a nested task.
pub const NESTED: u64 = 1 << 14;
/// EFLAGS.RF: no breakpoint at the next instruction.
pub const RESUME: u64 = 1 << 16;
/// EFLAGS.AC: a fault at an unaligned access.
pub const ALIGNMENT: u64 = 1 << 18;
/// EFLAGS.ID: free for programs to change.
pub const IDENTIFICATION: u64 = 1 << 21;
/// Flags that a program can have, and that interrupts and exceptions clear for the kernel.
pub const PROGRAMS_OWN: u64 = TRAP | NESTED | RESUME;
/// DR6 without any condition set.
pub const DEBUG_STATUS: u64 = 0xFFFF_0FF0;
/// DR6.BS: a trap by [`TRAP`].
pub const DEBUG_STEP: u64 = 1 << 14;

/// CR0: protected mode, paging, write protection, and the bits that belong to them.
pub const CR0: u64 = 0x8005_0033;
/// CR4: PAE and global pages.
pub const CR4: u64 = 0xA0;
/// CR4.PGE: global pages.
pub const CR4_GLOBAL: u64 = 1 << 7;
/// CR4.OSXSAVE: the kernel uses XSAVE.
pub const CR4_XSAVE: u64 = 1 << 18;
/// EFER: system calls, long mode, no-execute.
pub const EFER: u64 = 0xD01;
