//! Snapshots of memory, between driver and hypervisor: [`crate::gate::Hypercall::Snapshot`] with a
//! [`SnapshotCall`] in RDI and the address of its argument in RSI.
//!
//! The calls come in this order:
//!
//! 1. [`SnapshotCall::Tables`], [`SnapshotCall::Donate`] as often as it takes,
//!    [`SnapshotCall::Begin`] once.
//! 2. [`SnapshotCall::Enter`] on every CPU at the same time, with interrupts off: that rendezvous
//!    is the instant.
//! 3. [`SnapshotCall::Read`] on any CPU, until all frames have been read.
//! 4. [`SnapshotCall::Leave`] on every CPU, then [`SnapshotCall::End`]: the donated pages belong to
//!    the driver again.
//!
//! The frames of a *kept* snapshot ([`SnapshotSetup::keep_virt`]) are not read.
//! [`SnapshotCall::Rollback`] on any CPU, or a triple fault, puts the machine back to the snapshot.
//! Each CPU then goes on where it left its [`crate::restart::SavedCpu`], with
//! [`MERCURY_ROLLED_BACK`] in RAX, still attached and as after [`SnapshotCall::Enter`]: the snapshot
//! is kept for the next life too. [`SnapshotCall::ReadDead`] reads the memory of the life that ended,
//! until [`SnapshotCall::DropDead`] or the next rollback.
//!
//! Arguments, donated pages and all kept memory lie at direct-map addresses, which the hypervisor's
//! own tables do not map. For the time of a snapshot the driver makes page tables that map them and
//! everything that the hypervisor's own tables map. (Its own tables are hidden from the driver on
//! an attached CPU.)

/// A request of the driver about a snapshot or a dirty log.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotCall {
    /// Gives pages to the pool; argument: a [`PageList`]. After a snapshot has begun, the
    /// hypervisor accepts a page of the kept memory only if its frame has been read. The list then
    /// holds the pages that it did not accept.
    Donate = 0,
    /// Prepares a snapshot; argument: a [`SnapshotSetup`].
    Begin = 1,
    /// Waits on this CPU for the other CPUs, then runs it on the snapshot's tables. No argument.
    Enter = 2,
    /// Reads frames; argument: a [`ReadList`]. The value is 1 if the pool runs low.
    Read = 3,
    /// Runs this CPU on the identity map again. No argument.
    Leave = 4,
    /// Forgets the snapshot and every donated page. No argument.
    End = 5,
    /// Fills a [`SnapshotStatus`], the argument.
    Status = 6,
    /// Names page tables that also map the system's memory; argument: the host-physical address of
    /// their root. The hypervisor loads them whenever it needs that memory, until the end.
    Tables = 7,
    /// Puts the machine back to the kept snapshot; argument in place of an address: a
    /// [`RollbackReason`], and in bits 63:32 the signature of the death, which is the same for the
    /// same death. Returns only if that fails.
    Rollback = 8,
    /// Declares the snapshot invalid; argument: a [`crate::code::Code`] in place of an address. The
    /// machine runs on.
    GiveUp = 9,
    /// Holds this CPU, which a panicking kernel stops, for a rollback. No argument. If a snapshot
    /// is kept, the CPU does not leave the hypervisor any more when the kernel switches
    /// virtualization off. In a handler of NMIs it waits for the rollback.
    Hold = 10,
    /// Returns free pages to the driver; argument: a [`PageList`] whose `count` limits their
    /// number. The hypervisor returns at most half of the free pages, and the list then holds them.
    Reclaim = 11,
    /// Prepares a dirty log of the writes of CPUs from [`SnapshotCall::LogEnter`] on; argument: a
    /// [`LogSetup`].
    LogBegin = 12,
    /// Logs the writes of this CPU from here on. On a CPU that is logged already, flushes every
    /// translation. No argument.
    LogEnter = 13,
    /// Moves the log into the map of collected frames; argument: a [`LogCollect`]. The driver
    /// repeats the call until the cursor is at its end. Then it makes [`SnapshotCall::LogEnter`] on
    /// every CPU, and reads frames only after that: a CPU with cached translations writes to
    /// collected frames unseen.
    LogCollect = 14,
    /// Reads frames of a kept snapshot as the life had them that ended last; argument: a
    /// [`ReadList`].
    ReadDead = 15,
    /// Gives back the pages that hold the memory of that life. No argument.
    DropDead = 16,
}

/// Value of RAX with which each CPU goes on in a machine that was put back.
pub const MERCURY_ROLLED_BACK: u64 = 2;

/// The reason of a rollback.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollbackReason {
    /// No rollback took place.
    None = 0,
    /// The operator asked for it.
    Command = 1,
    /// The kernel panicked on this CPU.
    Panic = 2,
    /// The kernel panicked on another CPU, and stops this one.
    Stop = 3,
    /// A CPU shut down: a triple fault.
    TripleFault = 4,
    /// A CPU hung.
    Hang = 5,
    /// The kernel met an exception of its own: an oops.
    Oops = 6,
}

impl RollbackReason {
    /// Every reason with its name.
    pub const NAMES: [(RollbackReason, &'static str); 7] = [
        (RollbackReason::None, "none"),
        (RollbackReason::Command, "command"),
        (RollbackReason::Panic, "panic"),
        (RollbackReason::Stop, "panic elsewhere"),
        (RollbackReason::TripleFault, "triple fault"),
        (RollbackReason::Hang, "hang"),
        (RollbackReason::Oops, "oops"),
    ];

    /// Returns the reason with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        Self::NAMES.iter().map(|(reason, _)| *reason).find(|reason| u64::from(*reason as u32) == number)
    }
}

/// The report of the last rollback.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RollbackReport {
    /// Number of rollbacks since load.
    pub count: u64,
    /// [`RollbackReason`] of the last rollback.
    pub reason: u32,
    /// Linux's number of the CPU that asked for it.
    pub cpu: u32,
    /// RIP of the system on that CPU: kernel virtual.
    pub rip_virt: u64,
    /// Number of pages that were put back.
    pub pages: u64,
    /// Number of PCI functions that were silenced.
    pub functions: u64,
    /// TSC ticks from the request until the rendezvous of all CPUs.
    pub rendezvous_ticks: u64,
    /// TSC ticks from the rendezvous until all memory was in place.
    pub work_ticks: u64,
    /// Number of pages compared with their content at the instant (fault-injection builds only).
    pub compared: u64,
    /// Number of those pages that differed.
    pub different: u64,
    /// Guest-physical address of the first page that differed.
    pub different_phys: u64,
    /// TSC ticks of the life that ended, from the instant or the rollback before.
    pub lived_ticks: u64,
    /// [`hash`] of the hashes of all pages in the life that ended, in their order (fault-injection
    /// builds only).
    pub dead_hash: u64,
    /// Number of deaths in a row of the same cause, the last one included. 0: the machine went back on
    /// command.
    pub same: u64,
}

/// Number of entries of a [`PageList`].
pub const PAGE_LIST_MAX: usize = 511;

/// Pages for the pool, or pages from it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PageList {
    /// Number of entries in use, at most [`PAGE_LIST_MAX`].
    pub count: u64,
    /// Host-physical addresses of the pages, page-aligned.
    pub pages_phys: [u64; PAGE_LIST_MAX],
}

/// Number of bits in one bitmap of pages: one bit per page of 4 GiB.
pub const MAP_BITS: usize = 1 << 20;

/// The memory and the CPUs of a snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotSetup {
    /// Virtual address of an array of [`crate::gate::OwnedRange`], ascending: the memory to keep.
    /// The array stays until the end.
    pub memory_virt: u64,
    /// Number of entries at `memory_virt`.
    pub memory_count: u64,
    /// Virtual address of an array of virtual addresses of bitmaps, of [`MAP_BITS`] each, with a
    /// bit for each kept page, in their order. A set bit: the page is persistent DMA memory, and is
    /// copied at the instant. 0: no such pages.
    pub persistent_virt: u64,
    /// Virtual address of an array of `free_count` virtual addresses of bitmaps, of [`MAP_BITS`]
    /// each, with a bit for each page of the address space. An address of 0 stands for a bitmap of
    /// zeros. A set bit: the page was free at the instant, its content does not matter, and it is
    /// read as zeros.
    pub free_virt: u64,
    /// Number of entries at `free_virt`.
    pub free_count: u64,
    /// Virtual address of an array of one hash for each kept page, in their order. The hypervisor
    /// fills it at the instant; 0: none (fault-injection builds only).
    pub hashes_virt: u64,
    /// Number of CPUs that will enter.
    pub cpus: u32,
    /// 1 to keep a dirty log from the instant on, else 0.
    pub log: u32,
    /// 1 if the machine goes back once only, else 0.
    pub once: u32,
    /// Reserved; zero.
    pub reserved: u32,
    /// Virtual address of an array of [`crate::restart::RestartCpu`], one for each of these CPUs;
    /// the array stays until the end. Not 0: the snapshot is kept for a rollback. 0: its frames are
    /// read.
    pub keep_virt: u64,
    /// TSC ticks that devices get to finish before memory is put back.
    pub settle_ticks: u64,
    /// Bit mask of the PCI buses, 0 to 255, whose devices are silenced at a rollback.
    pub buses: [u64; 4],
    /// Virtual address of an array of [`EndedCpu`], one for each CPU at `keep_virt`; the array stays
    /// until the end. 0: none.
    pub ended_virt: u64,
    /// TSC ticks in which the machine goes back no more than twice from the same death.
    pub repeat_ticks: u64,
}

/// State of a CPU when the machine was put back: the end of a life. The hypervisor fills all but the
/// first fields.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndedCpu {
    /// Linux's number of this CPU.
    pub cpu: u32,
    /// Reserved; zero.
    pub reserved: u32,
    /// Kernel virtual address of this CPU's pointer to its task.
    pub task_virt: u64,
    /// General registers, in the processor's order: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub registers: [u64; 16],
    /// RIP of the system on this CPU.
    pub rip: u64,
    /// RFLAGS of the system.
    pub rflags: u64,
    /// CR2 of the system: its last page fault.
    pub cr2: u64,
    /// CR3 of the system: root of its tables.
    pub cr3: u64,
    /// Selector in CS of the system.
    pub cs: u64,
    /// Selector in SS of the system.
    pub ss: u64,
}

/// The dirty log of the writes of CPUs before a snapshot's instant. The log of a CPU ends when the
/// CPU enters the snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSetup {
    /// Virtual address of the ranges, as [`SnapshotSetup::memory_virt`]; the snapshot must have the
    /// same.
    pub memory_virt: u64,
    /// Number of entries at `memory_virt`.
    pub memory_count: u64,
    /// Virtual address of an array of `map_count` virtual addresses of bitmaps, as
    /// [`SnapshotSetup::free_virt`]. A set bit: the page may have been written since the last
    /// collection. Driver and hypervisor set bits by locked instructions.
    pub written_virt: u64,
    /// Virtual address of a second such array, with bitmaps in the same places. A set bit: the page
    /// is collected. The hypervisor only sets bits.
    pub collected_virt: u64,
    /// Number of entries at `written_virt` and at `collected_virt`.
    pub map_count: u64,
}

/// The progress of a collection of the dirty log.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCollect {
    /// In: guest-physical address at which to begin. Out: address at which to continue; all ones
    /// after the last frame.
    pub next_phys: u64,
    /// Out: number of frames that were moved, added to the value on entry.
    pub pages: u64,
}

/// Number of entries of a [`ReadList`]. So many pages are copied with interrupts off.
pub const READ_LIST_MAX: usize = 16;

/// One frame to be read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadEntry {
    /// Guest-physical address of the frame, page-aligned.
    pub frame_phys: u64,
    /// Host-physical address of the page that receives the content. The page must not be kept
    /// memory.
    pub to_phys: u64,
}

/// Frames to be read, best in ascending order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadList {
    /// Number of entries in use, at most [`READ_LIST_MAX`].
    pub count: u32,
    /// Reserved; zero on both sides.
    pub reserved: u32,
    /// Written by the hypervisor: bit n is set if the frame of entry n had been read before.
    pub read_before: u64,
    /// The frames, and the pages that receive their content.
    pub entries: [ReadEntry; READ_LIST_MAX],
}

/// The state and the cost of a snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotStatus {
    /// 1 while there is a snapshot, else 0.
    pub live: u32,
    /// 1 if the snapshot holds the complete memory of the instant; 0 if it is invalid.
    pub exact: u32,
    /// Number of free pages in the pool.
    pub free_pages: u64,
    /// Number of copies that the pool holds.
    pub copies: u64,
    /// Number of copies made since the begin.
    pub copied: u64,
    /// Number of frames read since the begin.
    pub taken: u64,
    /// [`crate::code::Code`] that tells why the snapshot is invalid; 0 while it is exact.
    pub invalid_because: u32,
    /// 1 if the snapshot is kept for a rollback, else 0.
    pub kept: u32,
    /// 1 if the memory of the life that ended last is known: see [`SnapshotCall::ReadDead`].
    pub dead: u32,
    /// Reserved; zero.
    pub reserved: u32,
    /// Number of pages of the pool that hold memory of that life.
    pub dead_pages: u64,
    /// Number of pages copied at the instant, or after the last rollback: persistent DMA memory.
    pub persistent_pages: u64,
    /// TSC ticks that copying them took.
    pub persistent_ticks: u64,
    /// TSC ticks of the instant in the hypervisor, on the CPU that came last. They include
    /// `persistent_ticks`.
    pub enter_ticks: u64,
    /// Number of [`SnapshotCall::Read`] calls that reported a low pool.
    pub hurries: u64,
    /// Number of times that a writer waited for free pool pages.
    pub waits: u64,
    /// Report of this machine's last rollback.
    pub rollback: RollbackReport,
}

/// Durations of the instant's steps in TSC ticks, one step after the other, on the CPU that leads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstantTicks {
    /// Step until tasks are frozen and devices are quiesced.
    pub quiesce: u64,
    /// Step until all CPUs stand still, with interrupts off.
    pub gather: u64,
    /// Step until the core of the system is suspended.
    pub suspend: u64,
    /// Step until all CPUs have searched for persistent DMA memory and for free pages.
    pub search: u64,
    /// Step until the state of this CPU is saved.
    pub save: u64,
    /// Step until this CPU is back from the hypervisor and has written for the first time.
    pub enter: u64,
    /// Step until the core of the system goes on.
    pub resume: u64,
    /// Step until all CPUs go on.
    pub release: u64,
    /// Step until devices and tasks go on.
    pub thaw: u64,
}

/// Returns a hash of a page's words (FNV-1a, 64 bits at a time). Tests compare it to prove that a
/// page is unchanged.
#[must_use]
pub fn hash(words: &[u64]) -> u64 {
    const BASIS: u64 = 0xCBF2_9CE4_8422_2325;
    const PRIME: u64 = 0x100_0000_01B3;
    words.iter().fold(BASIS, |hash, word| (hash ^ word).wrapping_mul(PRIME))
}
