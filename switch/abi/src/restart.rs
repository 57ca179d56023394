//! The restart of a machine from an image: the registers of its CPUs, and the way from the kernel
//! that loaded the image into the kernel that the image holds.
//!
//! At the instant of a snapshot every CPU stores a [`SavedCpu`] in memory that the snapshot keeps.
//! An image therefore holds it too. To bring the machine back, a small kernel in low memory writes
//! each frame of the image to its destination frame. Some destination frames are occupied by that
//! kernel itself: their content waits in memory that the image leaves out. Then all CPUs land: each
//! jumps to a [`Landing`], which lies outside of every destination frame. There the code of one
//! page copies the waiting frames to their destinations. Each CPU then goes on in `mercury_resume`,
//! in the text of the system that the image holds.

use crate::gate::DescriptorTable;

/// The registers that a CPU needs before C code can restore the rest. Offsets are for assembler.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedCpu {
    /// Kernel virtual address of this structure, in the system of the image.
    pub virt: u64,
    /// CR0 of this CPU at the instant.
    pub cr0: u64,
    /// CR3 of this CPU at the instant: host-physical root and flags.
    pub cr3: u64,
    /// CR4 of this CPU at the instant, without the bits that hardware virtualization sets.
    pub cr4: u64,
    /// Kernel virtual address at which the CPU goes on, with 1 in RAX.
    pub rip: u64,
    /// RSP at that address: kernel virtual.
    pub rsp: u64,
    /// RFLAGS at that address.
    pub rflags: u64,
    /// Callee-saved registers: RBX, RBP, R12 to R15.
    pub registers: [u64; 6],
    /// Base of FS, virtual.
    pub fs_base: u64,
    /// Base of GS, virtual: the kernel's per-CPU base.
    pub gs_base: u64,
    /// Base that SWAPGS loads into GS for user mode, virtual.
    pub kernel_gs_base: u64,
    /// GDTR of this CPU at the instant.
    pub gdtr: DescriptorTable,
    /// IDTR of this CPU at the instant.
    pub idtr: DescriptorTable,
    /// Selectors DS and ES, in this order.
    pub data_selectors: [u64; 2],
    /// Zeros in the image. The restore environment puts random bytes here, so that two machines
    /// from one image do not share their random numbers.
    pub seed: [u64; 4],
    /// Linux's number of the thread that ran on this CPU, for debuggers.
    pub thread: u64,
}

/// The control structure of a landing. The landing code reads it at its physical address: its page
/// tables map all memory at virtual addresses equal to the physical ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Landing {
    /// Physical address of the root of these page tables.
    pub root_phys: u64,
    /// Physical address of the first [`LandingList`] of copies; 0: no copies.
    pub list_phys: u64,
    /// Physical address of an array: for each CPU the physical address of its [`SavedCpu`].
    pub cpus_phys: u64,
    /// Kernel virtual address of `mercury_resume` in the system of the image.
    pub resume_virt: u64,
    /// Number of CPUs that will land.
    pub cpus: u32,
    /// Number of CPUs that have landed.
    pub arrived: u32,
    /// 1 after all waiting frames were copied to their destinations, else 0.
    pub copied: u32,
    /// Reserved; zero on both sides.
    pub reserved: u32,
}

/// Largest [`Landing::cpus`]: the array at [`Landing::cpus_phys`] lies in the page of the [`Landing`].
pub const LANDING_CPUS_MAX: usize = 506;

const _: () = assert!((4096 - size_of::<Landing>()) / size_of::<u64>() == LANDING_CPUS_MAX);

/// Number of entries of a [`LandingList`].
pub const LANDING_LIST_MAX: usize = 255;

/// A page of frames that the landing code has to copy.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LandingList {
    /// Physical address of the next list; 0: this list is the last.
    pub next_phys: u64,
    /// Number of entries in use, at most [`LANDING_LIST_MAX`].
    pub count: u64,
    /// Pairs of physical addresses: the destination frame, and the frame where its content waits. 0
    /// as the second: the content is all zeros.
    pub copies: [u64; 2 * LANDING_LIST_MAX],
}

/// A CPU of the machine that an image holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartCpu {
    /// Linux's number of this CPU.
    pub cpu: u32,
    /// Identifier of the CPU's local APIC.
    pub apic_id: u32,
    /// Physical address of the CPU's [`SavedCpu`].
    pub saved_phys: u64,
}

/// Value of [`RestartRange::kind`]: memory that the image holds.
pub const MERCURY_RANGE_KEPT: u64 = 0;
/// Value of [`RestartRange::kind`]: memory of the machine that the image leaves out.
pub const MERCURY_RANGE_FREE: u64 = 1;

/// A range of physical memory of the machine that an image holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartRange {
    /// Physical address of the first byte, page-aligned.
    pub start_phys: u64,
    /// Length in pages of 4 KiB.
    pub pages: u64,
    /// One of `MERCURY_RANGE_*`.
    pub kind: u64,
}

/// Flag: the kernel of the image uses five-level paging.
pub const MERCURY_RESTART_FIVE_LEVEL: u64 = 1 << 0;
/// Flag: the local APICs are in x2APIC mode (SDM volume 3, "Extended xAPIC").
pub const MERCURY_RESTART_X2APIC: u64 = 1 << 1;

/// Flag of the transfer, not of the machine: a frame may be loaded more than once. The last load
/// determines its content.
pub const MERCURY_RESTART_AGAIN: u64 = 1 << 8;

/// Value of [`LoadEntry::source`]: the content is the next page of the data.
pub const MERCURY_LOAD_DATA: u64 = 1;
/// Value of [`LoadEntry::source`]: the content is all zeros.
pub const MERCURY_LOAD_ZERO: u64 = 2;

/// One frame to be loaded into its destination.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadEntry {
    /// Physical address of the destination frame.
    pub frame_phys: u64,
    /// One of `MERCURY_LOAD_*`, or the physical address of a destination frame that was loaded
    /// before with the same content.
    pub source: u64,
}
