//! The ioctls of `/dev/mercury`.
//!
//! The device is openable by root only. At most one file description may be open for writing at a
//! time (a second gets EBUSY): the controller. [`MERCURY_IOC_SYSTEM`], [`MERCURY_IOC_FACTS`] and
//! [`MERCURY_IOC_STATUS`] work on a read-only descriptor too; everything else needs the controller.
//!
//! An operation that is refused returns an errno *and* fills [`Outcome`], whose code says why.
//! Mapping: offset 0, read-only, shared; see [`crate::shared`].

use crate::{Header, facts::CpuFacts};

/// The ioctl type byte of every request.
pub const MERCURY_IOC_TYPE: u32 = 0xF5;

const fn iowr<T>(number: u32) -> u32 {
    (3 << 30) | ((size_of::<T>() as u32) << 16) | (MERCURY_IOC_TYPE << 8) | number
}

/// Fills a [`SystemInfo`].
pub const MERCURY_IOC_SYSTEM: u32 = iowr::<SystemInfo>(0);
/// Fills a [`CpuFacts`] for its `cpu`; ENXIO if that CPU is offline.
pub const MERCURY_IOC_FACTS: u32 = iowr::<CpuFacts>(1);
/// Pre-caches the hypervisor. Takes a [`LoadRequest`].
pub const MERCURY_IOC_LOAD: u32 = iowr::<LoadRequest>(2);
/// Frees the pre-cached hypervisor; all CPUs must be native. Takes a [`LoadRequest`].
pub const MERCURY_IOC_UNLOAD: u32 = iowr::<LoadRequest>(3);
/// Attaches CPUs. Takes a [`SwitchRequest`]. CPUs that are attached already stay so.
pub const MERCURY_IOC_ATTACH: u32 = iowr::<SwitchRequest>(4);
/// Detaches CPUs. Takes a [`SwitchRequest`]. CPUs that are native already stay so.
pub const MERCURY_IOC_DETACH: u32 = iowr::<SwitchRequest>(5);
/// Fills an array of [`CpuStatus`]. Takes a [`StatusRequest`].
pub const MERCURY_IOC_STATUS: u32 = iowr::<StatusRequest>(6);
/// Measures hypercall round trips. Takes a [`MeasureRequest`].
pub const MERCURY_IOC_MEASURE: u32 = iowr::<MeasureRequest>(7);
/// Arms a fault point; ENOTTY in builds without fault injection. Takes a [`FaultRequest`].
pub const MERCURY_IOC_FAULT: u32 = iowr::<FaultRequest>(8);

/// Begins a snapshot of memory: all CPUs must be attached. Takes a [`SnapshotRequest`], the same as for
/// [`MERCURY_IOC_SNAPSHOT_PREPARE`] if that was before it.
pub const MERCURY_IOC_SNAPSHOT_BEGIN: u32 = iowr::<SnapshotRequest>(9);
/// Takes frames of the snapshot. Takes a [`SnapshotTakeRequest`].
pub const MERCURY_IOC_SNAPSHOT_TAKE: u32 = iowr::<SnapshotTakeRequest>(10);
/// Ends the snapshot. Takes a [`SnapshotRequest`].
pub const MERCURY_IOC_SNAPSHOT_END: u32 = iowr::<SnapshotRequest>(11);

/// Describes the machine of the snapshot, or of one that is only prepared. Takes a [`RestartRequest`].
pub const MERCURY_IOC_SNAPSHOT_MACHINE: u32 = iowr::<RestartRequest>(12);
/// Makes everything ready for a snapshot, so that it needs no time at the instant. Takes a [`SnapshotRequest`].
pub const MERCURY_IOC_SNAPSHOT_PREPARE: u32 = iowr::<SnapshotRequest>(16);

/// Puts the machine back to the snapshot that is kept; returns only if that fails. Takes a [`SnapshotRequest`].
pub const MERCURY_IOC_ROLLBACK: u32 = iowr::<SnapshotRequest>(17);

/// Prepares to bring a machine back in place of this one. Takes a [`RestartRequest`].
pub const MERCURY_IOC_RESTORE_BEGIN: u32 = iowr::<RestartRequest>(13);
/// Loads frames of it. Takes a [`LoadFramesRequest`].
pub const MERCURY_IOC_RESTORE_LOAD: u32 = iowr::<LoadFramesRequest>(14);
/// Goes on in it; returns only if that fails. Takes a [`LoadRequest`].
pub const MERCURY_IOC_RESTORE_GO: u32 = iowr::<LoadRequest>(15);

/// Lets no packet through from the instant of the next snapshot on. Takes a [`FenceRequest`].
pub const MERCURY_IOC_FENCE: u32 = iowr::<FenceRequest>(18);

/// Reads frames of a snapshot that is only prepared, as they are now. Each may change meanwhile: whoever wants what they
/// held at one instant compares then. Takes a [`SnapshotTakeRequest`].
pub const MERCURY_IOC_SNAPSHOT_LOOK: u32 = iowr::<SnapshotTakeRequest>(24);
/// Reads frames that were loaded, from where they lie. Takes a [`LoadFramesRequest`], whose data is written.
pub const MERCURY_IOC_RESTORE_READ: u32 = iowr::<LoadFramesRequest>(25);

/// Begins a log of what is written, by CPUs and devices, before the instant of a snapshot that is only prepared, with
/// [`MERCURY_SNAPSHOT_TRACK`]. Takes a [`LogRequest`].
pub const MERCURY_IOC_LOG_BEGIN: u32 = iowr::<LogRequest>(26);
/// Collects what may have been written since the last time, or since the begin: what [`MERCURY_TAKE_LOGGED`] means from
/// here on. After the instant: what may have been written until then. Takes a [`LogRequest`].
pub const MERCURY_IOC_LOG_COLLECT: u32 = iowr::<LogRequest>(27);

/// Keeps a log of what is written to a disk. Takes a [`DiskLogRequest`].
pub const MERCURY_IOC_DISK_LOG: u32 = iowr::<DiskLogRequest>(28);

/// [`DiskLogRequest::what`]: begin one. All that is written from here on is in it; it ends with the controller.
pub const MERCURY_DISK_LOG_BEGIN: u32 = 0;
/// Take what may have been written since the last time, or since the begin.
pub const MERCURY_DISK_LOG_COLLECT: u32 = 1;
/// End it.
pub const MERCURY_DISK_LOG_END: u32 = 2;
/// So many disks can have a log at the same time.
pub const MERCURY_DISK_LOGS_MAX: u32 = 16;
/// [`DiskLogRequest::chunk_shift`] at least: 64 KiB.
pub const MERCURY_DISK_CHUNK_SHIFT_MIN: u32 = 16;
/// At most: 1 MiB.
pub const MERCURY_DISK_CHUNK_SHIFT_MAX: u32 = 20;

/// Arguments of the log of what is written to a disk.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskLogRequest {
    /// Size and version.
    pub header: Header,
    /// `MERCURY_DISK_LOG_*`.
    pub what: u32,
    /// A descriptor of the disk: a whole one.
    pub disk_fd: u32,
    /// Begin: a chunk is of two to the power of so many bytes.
    pub chunk_shift: u32,
    /// Zero.
    pub reserved: u32,
    /// Collect: user-space address of an array of words, with a bit for each chunk.
    pub map_addr: u64,
    /// Words in it.
    pub map_words: u64,
    /// Out: chunks of the disk; of a collection, those that are in it.
    pub chunks: u64,
    /// Out.
    pub outcome: Outcome,
}

/// [`SnapshotRequest::flags`]: keep a log of what is written from the instant on.
pub const MERCURY_SNAPSHOT_LOG: u64 = 1 << 0;
/// Hash every page at the instant (fault-injection builds only).
pub const MERCURY_SNAPSHOT_HASH: u64 = 1 << 1;
/// Keep it, to go back to: it outlives the process, until it is ended, all CPUs are detached, or the machine was put
/// back to it.
pub const MERCURY_SNAPSHOT_KEEP: u64 = 1 << 2;

/// Make room for a log of what is written before the instant.
pub const MERCURY_SNAPSHOT_TRACK: u64 = 1 << 3;

/// [`SnapshotRequest::swap_pages`]: every swap area that is on lies in memory, as zram does.
pub const MERCURY_SWAP_IN_MEMORY: u64 = u64::MAX;

/// [`SnapshotTakeRequest::flags`]: only frames that the log had when it was collected last.
pub const MERCURY_TAKE_LOGGED: u64 = 1 << 0;
/// No frames that were free at the instant.
pub const MERCURY_TAKE_USED: u64 = 1 << 1;

/// [`SystemInfo::features`]: this build has fault points.
pub const MERCURY_FEATURE_FAULT_INJECTION: u64 = 1 << 0;

/// [`SystemInfo::state`] and `Status`: the driver is loaded, the hypervisor is not.
pub const MERCURY_STATE_UNLOADED: u32 = 0;
/// The hypervisor is pre-cached; every CPU is native.
pub const MERCURY_STATE_LOADED: u32 = 1;
/// At least one CPU is meant to be attached.
pub const MERCURY_STATE_ATTACHED: u32 = 2;
/// The hypervisor crashed; unload and load it before the next attach.
pub const MERCURY_STATE_CRASHED: u32 = 3;

/// What the driver and the machine are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SystemInfo {
    /// Size and version.
    pub header: Header,
    /// `MERCURY_STATE_*`.
    pub state: u32,
    /// Number of possible CPUs: the range of Linux's CPU numbers.
    pub possible_cpus: u32,
    /// Process that controls Mercury, 0 if none (in the reader's PID namespace).
    pub controller_pid: u32,
    /// Number of CPUs that are meant to be attached.
    pub wanted_cpus: u32,
    /// `MERCURY_FEATURE_*`.
    pub features: u64,
    /// TSC frequency in kHz.
    pub tsc_khz: u64,
    /// Memory held by the pre-cached hypervisor, in bytes, without the per-CPU part.
    pub memory_fixed: u64,
    /// Memory held per possible CPU, in bytes.
    pub memory_per_cpu: u64,
    /// Size in bytes of what can be mapped at offset 0; 0 while unloaded.
    pub shared_size: u64,
    /// The hypervisor's version, NUL-padded ASCII.
    pub version: [u8; 32],
    /// The snapshot, if there is one.
    pub snapshot: crate::snapshot::SnapshotStatus,
}

/// How an operation ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// [`crate::code::Code`] as a number; 0 is success.
    pub code: u32,
    /// The CPU it concerns, or `u32::MAX` where it concerns none in particular.
    pub cpu: u32,
    /// What the code's explanation refers to: the offending register, field or address.
    pub detail: [u64; 2],
}

/// Arguments of load and unload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadRequest {
    /// Size and version.
    pub header: Header,
    /// Must be zero.
    pub flags: u64,
    /// Out.
    pub outcome: Outcome,
}

/// Arguments of attach and detach.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchRequest {
    /// Size and version.
    pub header: Header,
    /// `MERCURY_SWITCH_*`.
    pub flags: u64,
    /// User-space address of a CPU bit mask in 64-bit words, or 0 for all online CPUs.
    pub mask_addr: u64,
    /// Number of 64-bit words in the mask.
    pub mask_words: u32,
    /// In: number of entries at `results_addr`; out: number of CPUs that switched.
    pub results_count: u32,
    /// User-space address of an array of [`SwitchResult`], or 0.
    pub results_addr: u64,
    /// Out.
    pub outcome: Outcome,
}

/// What one CPU's switch took.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchResult {
    /// Linux's CPU number.
    pub cpu: u32,
    /// [`crate::code::Code`] as a number.
    pub code: u32,
    /// TSC ticks that the switch kept interrupts off on this CPU.
    pub ticks: u64,
}

/// Arguments of a snapshot's begin and end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// Size and version.
    pub header: Header,
    /// In, at the begin: `MERCURY_SNAPSHOT_*`.
    pub flags: u64,
    /// In, at the begin: pages of the pool.
    pub pool_pages: u64,
    /// In, at the begin: pages of all swap areas that are on. If fewer are free at the instant, memory is swapped out, and
    /// the driver refuses. [`MERCURY_SWAP_IN_MEMORY`]: the driver does not look.
    pub swap_pages: u64,
    /// Out: pages of memory that the snapshot holds.
    pub memory_pages: u64,
    /// Out, at the begin: 1 in a machine that was brought back from an image of this snapshot. There is none any
    /// more, and the hypervisor is unloaded.
    pub restored: u64,
    /// Out, at the begin: 1 in a machine that was put back to this snapshot. There is none any more;
    /// [`crate::snapshot::SnapshotStatus::rollback`] says how it came to that.
    pub rolled_back: u64,
    /// Out, then: what the kernel said last, NUL-padded text.
    pub message: [u64; 16],
    /// Out: pages that were added to the pool because it ran low.
    pub added_pages: u64,
    /// Out: pages of the pool that the system got back because it had no memory left.
    pub returned_pages: u64,
    /// Out: what it has cost so far.
    pub status: crate::snapshot::SnapshotStatus,
    /// Out, at the begin.
    pub instant: crate::snapshot::InstantTicks,
    /// Out.
    pub outcome: Outcome,
}

/// Arguments of a take.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotTakeRequest {
    /// Size and version.
    pub header: Header,
    /// In: where to begin, guest-physical. Out: where to go on; all ones behind the last frame.
    pub cursor_phys: u64,
    /// In: no frame from here on.
    pub end_phys: u64,
    /// In: room for so many frames. Out: frames taken.
    pub count: u64,
    /// User-space address of an array of guest-physical addresses: the frames.
    pub frames_addr: u64,
    /// User-space address of their content, one page after the other.
    pub data_addr: u64,
    /// User-space address of an array of what [`MERCURY_SNAPSHOT_HASH`] found, or 0.
    pub hashes_addr: u64,
    /// Out: 1 if the pool runs low. Whoever takes should hurry: writers have to wait soon.
    pub low: u64,
    /// `MERCURY_TAKE_*`.
    pub flags: u64,
    /// Out.
    pub outcome: Outcome,
}

/// What a log of writes has come to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogRequest {
    /// Size and version.
    pub header: Header,
    /// Out: frames that were collected.
    pub pages: u64,
    /// Out: of these, those that are there only because a device may still write to them, or may have at the instant.
    pub device_pages: u64,
    /// Out.
    pub outcome: Outcome,
}

/// The machine of a snapshot or of an image, without its memory's content.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartRequest {
    /// Size and version.
    pub header: Header,
    /// `MERCURY_RESTART_*`.
    pub flags: u64,
    /// Address of `mercury_resume` in that system.
    pub resume_virt: u64,
    /// Physical addresses of the page that it lies in, and of the next.
    pub resume_phys: [u64; 2],
    /// User-space address of an array of [`crate::restart::RestartCpu`].
    pub cpus_addr: u64,
    /// User-space address of an array of [`crate::restart::RestartRange`].
    pub ranges_addr: u64,
    /// Entries at `cpus_addr`; where they are asked for, in: room for so many, out: how many there are.
    pub cpus_count: u32,
    /// Entries at `ranges_addr`, likewise.
    pub ranges_count: u32,
    /// Out.
    pub outcome: Outcome,
}

/// [`FenceRequest::flags`]: take the fence away.
pub const MERCURY_FENCE_DOWN: u64 = 1 << 0;
/// [`FenceRequest::flags`]: the fence that is up stays when the controller goes, until one takes it away.
pub const MERCURY_FENCE_STAYS: u64 = 1 << 1;
/// [`FenceRequest::flags`]: the fence is closed in a machine that comes back to the instant, for all peers, until it is taken
/// away there.
pub const MERCURY_FENCE_RETURN: u64 = 1 << 2;
/// [`FenceRequest::flags`]: the fence stays open in the machine that goes on.
pub const MERCURY_FENCE_OPEN_HERE: u64 = 1 << 3;
/// [`FenceRequest::flags`], with [`MERCURY_FENCE_DOWN`]: end IPsec's security associations in all network namespaces before
/// the fence is taken away.
pub const MERCURY_FENCE_FORGET: u64 = 1 << 4;
/// [`FenceRequest::peers_count`] at most.
pub const MERCURY_FENCE_PEERS_MAX: u32 = 64;

/// Arguments of the fence. It goes by itself when the controller does, unless it is to stay, and is not in the image.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FenceRequest {
    /// Size and version.
    pub header: Header,
    /// `MERCURY_FENCE_*`.
    pub flags: u64,
    /// User-space address of an array of [`FencePeer`]: who may still talk to this machine.
    pub peers_addr: u64,
    /// Entries in it.
    pub peers_count: u32,
    /// Zero.
    pub reserved: u32,
    /// Out: packets that were stopped so far.
    pub stopped: u64,
    /// Out.
    pub outcome: Outcome,
}

/// A peer that the fence lets through.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FencePeer {
    /// Its address, in the order of the network; of IPv4 the first four bytes.
    pub address: [u8; 16],
    /// 4 or 6.
    pub version: u32,
    /// Its TCP or UDP port, or 0: all it says.
    pub port: u32,
}

/// Arguments of loading frames.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadFramesRequest {
    /// Size and version.
    pub header: Header,
    /// User-space address of an array of [`crate::restart::LoadEntry`].
    pub entries_addr: u64,
    /// Entries in it.
    pub count: u64,
    /// User-space address of pages, one for each entry that has data.
    pub data_addr: u64,
    /// Out.
    pub outcome: Outcome,
}

/// Arguments of status.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusRequest {
    /// Size and version.
    pub header: Header,
    /// `MERCURY_STATE_*`, out.
    pub state: u32,
    /// In: number of entries at `cpus_addr`; out: entries filled (one per possible CPU).
    pub cpus_count: u32,
    /// User-space address of an array of [`CpuStatus`].
    pub cpus_addr: u64,
}

/// [`CpuStatus::mode`]: the CPU is offline.
pub const MERCURY_MODE_OFFLINE: u32 = 0;
/// The CPU answered that it runs on the bare hardware.
pub const MERCURY_MODE_NATIVE: u32 = 1;
/// The CPU answered from beneath: the hypervisor runs below it.
pub const MERCURY_MODE_ATTACHED: u32 = 2;

/// The mode of one CPU, as a fact asked of it, and its history.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuStatus {
    /// Linux's CPU number.
    pub cpu: u32,
    /// `MERCURY_MODE_*`: asked of the CPU just now.
    pub mode: u32,
    /// 1 if the CPU is meant to be attached.
    pub wanted: u32,
    /// [`crate::code::Code`] of how it last left the hypervisor other than by a detach; 0 if it never did.
    pub left_because: u32,
    /// Attaches since load.
    pub attaches: u64,
    /// Detaches since load.
    pub detaches: u64,
    /// TSC ticks with interrupts off of the last attach.
    pub attach_ticks: u64,
    /// TSC ticks with interrupts off of the last detach.
    pub detach_ticks: u64,
}

/// Arguments of measure: hypercall round trips on one attached CPU with interrupts off.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasureRequest {
    /// Size and version.
    pub header: Header,
    /// Linux's CPU number.
    pub cpu: u32,
    /// Round trips, 1 to 1,000.
    pub count: u32,
    /// Out: TSC ticks of all round trips together.
    pub ticks: u64,
    /// Out: TSC ticks of the same loop without the hypercall.
    pub overhead_ticks: u64,
    /// Out.
    pub outcome: Outcome,
}

/// Arguments of fault injection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRequest {
    /// Size and version.
    pub header: Header,
    /// [`crate::gate::FaultPoint`] as a number; 0 disarms all.
    pub point: u32,
    /// The CPU on which it fires, or `u32::MAX`: once on each.
    pub cpu: u32,
    /// It fires at the n-th passage, counting from 1.
    pub passage: u32,
    /// For [`crate::gate::FaultPoint::Facts`]: byte offset in [`CpuFacts`], a multiple of 4.
    pub offset: u32,
    /// For [`crate::gate::FaultPoint::Facts`]: the 32-bit word to put there.
    pub value: u32,
    /// Zero.
    pub reserved: u32,
    /// Out: how often armed points have fired since load.
    pub fired: u32,
}

/// [`SwitchRequest::flags`]: stop at preflight; switch nothing.
pub const MERCURY_SWITCH_CHECK_ONLY: u64 = 1 << 0;
