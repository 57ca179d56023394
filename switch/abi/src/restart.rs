//! What brings a machine back from an image: what of its CPUs is not in memory, and the way from the kernel that
//! loaded the image into the one that was in it.
//!
//! At the instant of a snapshot every CPU of the system leaves a [`SavedCpu`] in memory that the snapshot keeps, so an
//! image holds it too. To bring the machine back, a small kernel in low memory puts every frame of the image at its
//! home, but for those whose home it occupies itself: they wait elsewhere, in memory that the image leaves out. Then
//! all its CPUs land: they leave for a [`Landing`] outside of every home, where code of one page copies those frames
//! home and has each CPU go on in `mercury_resume`, in the text of the system that was in the image.

use crate::gate::DescriptorTable;

/// What has to be in a processor's registers before C code can restore the rest. Offsets are for assembler.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedCpu {
    /// This structure's own address in the kernel.
    pub virt: u64,
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4, without what is there for hardware virtualization.
    pub cr4: u64,
    /// Where to go on, with 1 in RAX.
    pub rip: u64,
    /// The stack there.
    pub rsp: u64,
    /// RFLAGS there.
    pub rflags: u64,
    /// Callee-saved registers: RBX, RBP, R12 to R15.
    pub registers: [u64; 6],
    /// FS base.
    pub fs_base: u64,
    /// GS base: the kernel's.
    pub gs_base: u64,
    /// GS base of user mode, while the kernel runs.
    pub kernel_gs_base: u64,
    /// GDTR.
    pub gdtr: DescriptorTable,
    /// IDTR.
    pub idtr: DescriptorTable,
    /// DS and ES.
    pub data_selectors: [u64; 2],
    /// Zeros; whoever brings the machine back puts random bytes here, so that two machines from one image do not
    /// share what they think is random.
    pub seed: [u64; 4],
    /// The thread that ran there, by Linux's number: for debuggers.
    pub thread: u64,
}

/// Where CPUs land. Read at its physical address, on tables that map all memory at its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Landing {
    /// Root of these tables.
    pub root_phys: u64,
    /// First page of what is to be copied: a [`LandingList`]; 0: nothing.
    pub list_phys: u64,
    /// An array of the physical address of each CPU's [`SavedCpu`].
    pub cpus_phys: u64,
    /// Address of `mercury_resume` in the system of the image.
    pub resume_virt: u64,
    /// CPUs that will land.
    pub cpus: u32,
    /// CPUs that have landed.
    pub arrived: u32,
    /// 1 once everything is at home.
    pub copied: u32,
    /// Zero.
    pub reserved: u32,
}

/// Entries of a [`LandingList`].
pub const LANDING_LIST_MAX: usize = 255;

/// A page of copies to make.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LandingList {
    /// Physical address of the next one; 0: none.
    pub next_phys: u64,
    /// Entries in use.
    pub count: u64,
    /// Physical addresses: a frame's home, and where its content waits; 0: it is all zeros.
    pub copies: [u64; 2 * LANDING_LIST_MAX],
}

/// A CPU of the machine in an image.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartCpu {
    /// Linux's CPU number.
    pub cpu: u32,
    /// Its local APIC's ID.
    pub apic_id: u32,
    /// Physical address of its [`SavedCpu`].
    pub saved_phys: u64,
}

/// [`RestartRange::kind`]: memory that the image holds.
pub const MERCURY_RANGE_KEPT: u64 = 0;
/// Memory that the machine of the image has and the image does not need.
pub const MERCURY_RANGE_FREE: u64 = 1;

/// A range of physical memory, in an image.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartRange {
    /// Its start.
    pub start_phys: u64,
    /// Its length in pages.
    pub pages: u64,
    /// `MERCURY_RANGE_*`.
    pub kind: u64,
}

/// The kernel pages tables in five levels.
pub const MERCURY_RESTART_FIVE_LEVEL: u64 = 1 << 0;
/// Local APICs are in x2APIC mode.
pub const MERCURY_RESTART_X2APIC: u64 = 1 << 1;

/// Not of the machine, but of how it comes: each frame may be loaded again, and holds then what it was loaded with last.
pub const MERCURY_RESTART_AGAIN: u64 = 1 << 8;

/// What one frame is loaded from: the next page of the data.
pub const MERCURY_LOAD_DATA: u64 = 1;
/// All zeros.
pub const MERCURY_LOAD_ZERO: u64 = 2;

/// One frame to be put home.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadEntry {
    /// Its home, physical.
    pub frame_phys: u64,
    /// `MERCURY_LOAD_*`, or the home of a frame that was loaded before and has the same content.
    pub source: u64,
}
