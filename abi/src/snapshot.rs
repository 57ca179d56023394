//! Snapshots of memory, between driver and hypervisor: [`crate::gate::Hypercall::Snapshot`] with a
//! [`SnapshotCall`] in RDI and the address of its argument in RSI.
//!
//! The order: [`SnapshotCall::Tables`], [`SnapshotCall::Donate`] as often as it takes, [`SnapshotCall::Begin`] once, then
//! [`SnapshotCall::Enter`] on every CPU at the same time, with interrupts off: that is the instant. From there on
//! [`SnapshotCall::Take`], on any CPU, until everything has been taken. At the end [`SnapshotCall::Leave`] on every
//! CPU, then [`SnapshotCall::End`]: what was donated is the driver's again.
//!
//! Arguments, donated pages and all memory that is kept lie at direct-map addresses, which the hypervisor does not map
//! otherwise: the driver makes page tables for the time, which map what its own do besides. (Those are hidden from the
//! driver on an attached CPU.)

/// What to do.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotCall {
    /// Gives pages: a [`PageList`].
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
    /// The hypervisor's page tables until the end: host-physical address of their root, instead of an argument's.
    Tables = 7,
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

/// What is to be kept.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotSetup {
    /// Address of an array of [`crate::gate::OwnedRange`], ascending: the memory to keep. It stays until the end.
    pub memory_virt: u64,
    /// Number of entries in it.
    pub memory_count: u64,
    /// Address of a bitmap with a bit for each page that is kept, in their order: those that devices write all the
    /// time, copied at the instant. 0: none.
    pub lasting_virt: u64,
    /// Address of an array of one hash for each page that is kept, in their order, filled at the instant; 0: none
    /// (fault-injection builds only).
    pub hashes_virt: u64,
    /// CPUs that will enter.
    pub cpus: u32,
    /// 1 to keep a log of what is written from the instant on.
    pub log: u32,
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
}

/// A hash of a page's words (FNV-1a, 64 bits at a time): what proves in tests that a page is what it was.
#[must_use]
pub fn hash(words: &[u64]) -> u64 {
    const BASIS: u64 = 0xCBF2_9CE4_8422_2325;
    const PRIME: u64 = 0x100_0000_01B3;
    words.iter().fold(BASIS, |hash, word| (hash ^ word).wrapping_mul(PRIME))
}
