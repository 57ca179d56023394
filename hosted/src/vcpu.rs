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
