//! The part of a processor that a process has not: control registers, descriptor tables, model-specific registers.

/// A descriptor table's register.
#[derive(Clone, Copy, Debug, Default)]
pub struct Table {
    /// Where.
    pub base: u64,
    /// Its last byte's offset.
    pub limit: u16,
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Vcpu {
    /// CR0
    pub cr0: u64,
    /// CR3
    pub cr3: u64,
    /// CR4
    pub cr4: u64,
    /// CR8
    pub cr8: u64,
    /// Debug registers, which nothing heeds.
    pub debug: [u64; 8],
    /// Of descriptors.
    pub gdt: Table,
    /// Of gates.
    pub idt: Table,
    /// The local table's selector.
    pub ldt: u16,
    /// The task's selector.
    pub task: u16,
    /// The task's segment.
    pub task_base: u64,
    /// Their selectors.
    pub star: u64,
    /// Flags that they clear.
    pub syscall_mask: u64,
    /// EFER
    pub efer: u64,
    /// The first extended control register.
    pub xcr0: u64,
}

/// The selector of programs' code. Linux has it at the same place on all machines, the host too.
pub const USER_CODE: u16 = 0x33;
/// The selector of programs' code of 32 bits.
pub const USER_CODE_32: u16 = 0x23;
/// The selector of programs' stack.
pub const USER_STACK: u16 = 0x2B;
/// EFLAGS.TF: a trap after each instruction.
pub const TRAP: u64 = 1 << 8;
/// EFLAGS.NT
pub const NESTED: u64 = 1 << 14;
/// EFLAGS.RF
const RESUME: u64 = 1 << 16;
/// EFLAGS.AC: a fault at an access that is not aligned.
pub const ALIGNMENT: u64 = 1 << 18;
/// EFLAGS.ID
pub const IDENTIFICATION: u64 = 1 << 21;
/// Flags that a program can have, and that interrupts and exceptions clear for the kernel.
pub const PROGRAMS_OWN: u64 = TRAP | NESTED | RESUME;
/// DR6 if it says nothing.
pub const DEBUG_STATUS: u64 = 0xFFFF_0FF0;
/// DR6.BS: a trap by [`TRAP`].
pub const DEBUG_STEP: u64 = 1 << 14;

/// CR0: protected mode, paging, write protection, and what goes with them.
pub const CR0: u64 = 0x8005_0033;
/// CR4: PAE and global pages.
pub const CR4: u64 = 0xA0;
/// CR4.PGE
pub const CR4_GLOBAL: u64 = 1 << 7;
/// CR4.OSXSAVE
pub const CR4_XSAVE: u64 = 1 << 18;
/// EFER: system calls, long mode, no-execute.
pub const EFER: u64 = 0xD01;
