//! Snapshots of memory, between driver and hypervisor: [`crate::gate::Hypercall::Snapshot`] with a
//! [`SnapshotCall`] in RDI and the address of its argument in RSI.
//!
//! The order: [`SnapshotCall::Tables`], [`SnapshotCall::Donate`] as often as it takes, [`SnapshotCall::Begin`] once, then
//! [`SnapshotCall::Enter`] on every CPU at the same time, with interrupts off: that is the instant. From there on
//! [`SnapshotCall::Take`], on any CPU, until everything has been taken. At the end [`SnapshotCall::Leave`] on every
//! CPU, then [`SnapshotCall::End`]: what was donated is the driver's again.
//!
//! A snapshot that is *kept* ([`SnapshotSetup::keep`]) is not taken: [`SnapshotCall::Rollback`] on any CPU, or a triple
//! fault, puts the machine back to it. Each CPU then goes on where it left its [`crate::restart::SavedCpu`], with
//! [`MERCURY_ROLLED_BACK`] in RAX, still attached and as after [`SnapshotCall::Leave`].
//!
//! Arguments, donated pages and all memory that is kept lie at direct-map addresses, which the hypervisor does not map
//! otherwise: the driver makes page tables for the time, which map what its own do besides. (Those are hidden from the
//! driver on an attached CPU.)

/// What to do.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotCall {
    /// Gives pages: a [`PageList`]. Once there is a snapshot, those of the memory that it keeps can be used only if they
    /// have been taken: the others are left in the list.
    Donate = 0,
    /// Prepares a snapshot: a [`SnapshotSetup`].
    Begin = 1,
    /// This CPU waits for the others, and then runs on the snapshot's tables. No argument.
    Enter = 2,
    /// Takes frames: a [`TakeList`]. The value is 1 if the pool runs low.
    Take = 3,
    /// This CPU runs on the identity map again. No argument.
    Leave = 4,
    /// The snapshot is forgotten, and every donated page with it. No argument.
    End = 5,
    /// Fills a [`SnapshotStatus`].
    Status = 6,
    /// Page tables that map the system's memory besides, which the hypervisor loads while it needs that, until the end:
    /// host-physical address of their root, instead of an argument's.
    Tables = 7,
    /// Puts the machine back to the snapshot that is kept: a [`RollbackReason`] instead of an address. Returns only if
    /// that fails.
    Rollback = 8,
    /// The snapshot is not exact any more: a [`crate::code::Code`] instead of an address. The machine runs on.
    GiveUp = 9,
    /// This CPU is stopped by a kernel that panics, and is to be fetched from where it stops: if there is a snapshot to
    /// go back to, it does not leave the hypervisor any more when the kernel switches virtualization off. In a handler of
    /// NMIs it waits for the rollback. No argument.
    Hold = 10,
    /// Takes free pages back, at most as many as a [`PageList`] says, and half of what is free: the list has them then.
    Reclaim = 11,
    /// Prepares a log of what CPUs write from [`SnapshotCall::LogEnter`] on: a [`LogSetup`].
    LogBegin = 12,
    /// From here on what this CPU writes is in the log; where it is already, every translation is flushed. No argument.
    LogEnter = 13,
    /// Moves what was written into the other map: a [`LogCollect`], again and again until that is at its end. Then
    /// [`SnapshotCall::LogEnter`] on every CPU, and only then the frames may be read: a CPU that has not forgotten its
    /// translations yet writes to them unseen.
    LogCollect = 14,
}

/// What a CPU of a machine that was put back finds in RAX where it goes on.
pub const MERCURY_ROLLED_BACK: u64 = 2;

/// Why a machine is put back.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollbackReason {
    /// It was not.
    None = 0,
    /// Somebody asked for it.
    Command = 1,
    /// The kernel panicked.
    Panic = 2,
    /// The kernel panicked, and stops this CPU.
    Stop = 3,
    /// A CPU shut down: a triple fault.
    TripleFault = 4,
}

impl RollbackReason {
    /// All of them, with their names.
    pub const NAMES: [(RollbackReason, &'static str); 5] = [
        (RollbackReason::None, "none"),
        (RollbackReason::Command, "command"),
        (RollbackReason::Panic, "panic"),
        (RollbackReason::Stop, "panic elsewhere"),
        (RollbackReason::TripleFault, "triple fault"),
    ];

    /// The reason with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        Self::NAMES.iter().map(|(reason, _)| *reason).find(|reason| u64::from(*reason as u32) == number)
    }
}

/// How a machine was put back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RollbackReport {
    /// How often since load.
    pub count: u64,
    /// [`RollbackReason`] of the last time.
    pub reason: u32,
    /// The CPU that asked for it.
    pub cpu: u32,
    /// Where that was: the system's RIP.
    pub rip_virt: u64,
    /// Pages that were copied back.
    pub pages: u64,
    /// PCI functions that were silenced.
    pub functions: u64,
    /// TSC ticks from the request until all CPUs were there.
    pub meet_ticks: u64,
    /// TSC ticks from there until everything was in place.
    pub work_ticks: u64,
    /// Pages that were compared with what they held at the instant (fault-injection builds only).
    pub compared: u64,
    /// Those that were different.
    pub different: u64,
    /// The first of them, guest-physical.
    pub different_phys: u64,
}

/// Pages of a [`PageList`].
pub const PAGE_LIST_MAX: usize = 511;

/// Pages for the pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PageList {
    /// How many.
    pub count: u64,
    /// Host-physical addresses.
    pub pages_phys: [u64; PAGE_LIST_MAX],
}

/// Bits of a piece of a map of pages: for 4 GiB.
pub const MAP_BITS: usize = 1 << 20;

/// What is to be kept.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotSetup {
    /// Address of an array of [`crate::gate::OwnedRange`], ascending: the memory to keep. It stays until the end.
    pub memory_virt: u64,
    /// Number of entries in it.
    pub memory_count: u64,
    /// Address of an array of addresses of bitmaps, of [`MAP_BITS`] each: a bit for each page that is kept, in their
    /// order, set for those that are copied at the instant. 0: none.
    pub lasting_virt: u64,
    /// Address of an array of `free_count` addresses of such bitmaps, or 0 where no bit is set: a bit for each page of the
    /// address space, set for those that were free at the instant. What they held does not matter: they are taken as
    /// zeros.
    pub free_virt: u64,
    /// Number of entries in it.
    pub free_count: u64,
    /// Address of an array of one hash for each page that is kept, in their order, filled at the instant; 0: none
    /// (fault-injection builds only).
    pub hashes_virt: u64,
    /// CPUs that will enter.
    pub cpus: u32,
    /// 1 to keep a log of what is written from the instant on.
    pub log: u32,
    /// Address of an array of [`crate::restart::RestartCpu`] of these CPUs, for a snapshot that is to be kept; it stays
    /// until the end. 0: it is to be taken.
    pub keep_virt: u64,
    /// TSC ticks that devices are given to come to rest before memory is put back.
    pub settle_ticks: u64,
    /// PCI buses with devices that are to be silenced then, a bit for each.
    pub buses: [u64; 4],
}

/// A log of what CPUs write before a snapshot's instant. It ends for each CPU when that enters the snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSetup {
    /// As [`SnapshotSetup::memory_virt`]; the snapshot's must be the same.
    pub memory_virt: u64,
    /// Number of entries in it.
    pub memory_count: u64,
    /// Address of an array of `map_count` addresses of bitmaps as of [`SnapshotSetup::free_virt`]: what has been written
    /// since it was collected last. Both sides set bits in them, by locked instructions.
    pub written_virt: u64,
    /// Address of another such array, with bitmaps in the same places: what is collected. Bits are only set.
    pub collected_virt: u64,
    /// Number of entries in each.
    pub map_count: u64,
}

/// How far a collection of the log is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCollect {
    /// In: where to begin, guest-physical. Out: where to go on; all ones behind the last frame.
    pub next_phys: u64,
    /// Out: frames that were moved, added to what was there.
    pub pages: u64,
}

/// Entries of a [`TakeList`]: so many pages are copied with interrupts off.
pub const TAKE_LIST_MAX: usize = 16;

/// One frame to be taken.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakeEntry {
    /// The frame, guest-physical.
    pub frame_phys: u64,
    /// Page that gets its content, host-physical: none that is kept.
    pub to_phys: u64,
}

/// Frames to be taken, best in ascending order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakeList {
    /// How many.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
    /// Written by the hypervisor: bit n is set if entry n had been taken before.
    pub taken_before: u64,
    /// The frames.
    pub entries: [TakeEntry; TAKE_LIST_MAX],
}

/// What a snapshot costs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotStatus {
    /// 1 while there is one.
    pub live: u32,
    /// 1 if it holds all that memory held at the instant.
    pub exact: u32,
    /// Pages of the pool that are free.
    pub free_pages: u64,
    /// Copies in the pool.
    pub copies: u64,
    /// Copies ever made.
    pub copied: u64,
    /// Frames taken.
    pub taken: u64,
    /// [`crate::code::Code`] of why it is not exact.
    pub spoilt: u32,
    /// 1 if it is kept.
    pub kept: u32,
    /// Pages that were copied at the instant: what devices have for good.
    pub lasting: u64,
    /// TSC ticks that this took.
    pub lasting_ticks: u64,
    /// TSC ticks of the instant, in the hypervisor, on the CPU that came last: those are part of it.
    pub enter_ticks: u64,
    /// Calls of [`SnapshotCall::Take`] that were told that the pool runs low.
    pub hurries: u64,
    /// Times that a writer waited, because little of the pool was left or nothing.
    pub waits: u64,
    /// How this machine was put back last.
    pub rollback: RollbackReport,
}

/// What the instant took, in TSC ticks: one step after the other, on the CPU that leads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstantTicks {
    /// Until tasks are frozen and devices are quiesced.
    pub quiesce: u64,
    /// Until all CPUs stand still, with interrupts off.
    pub gather: u64,
    /// Until the core of the system is suspended.
    pub suspend: u64,
    /// Until all of them have looked for what devices have for good, and for what is free.
    pub search: u64,
    /// Until the state of this CPU is saved.
    pub save: u64,
    /// Until this CPU is back from the hypervisor, and has written for the first time.
    pub enter: u64,
    /// Until the core of the system goes on.
    pub resume: u64,
    /// Until all CPUs go on.
    pub release: u64,
    /// Until devices and tasks go on.
    pub thaw: u64,
}

/// A hash of a page's words (FNV-1a, 64 bits at a time): what proves in tests that a page is what it was.
#[must_use]
pub fn hash(words: &[u64]) -> u64 {
    const BASIS: u64 = 0xCBF2_9CE4_8422_2325;
    const PRIME: u64 = 0x100_0000_01B3;
    words.iter().fold(BASIS, |hash, word| (hash ^ word).wrapping_mul(PRIME))
}
