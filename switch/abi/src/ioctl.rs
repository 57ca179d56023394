//! The ioctls of `/dev/mercury`.
//!
//! Only root may open the device. At most one file description may be open for writing at a time:
//! the *controller*. A second open for writing gets EBUSY. [`MERCURY_IOC_SYSTEM`],
//! [`MERCURY_IOC_FACTS`] and [`MERCURY_IOC_STATUS`] work on a read-only descriptor too; every other
//! request needs the controller.
//!
//! A refused operation returns an errno *and* fills [`Outcome`], whose code gives the reason. A
//! read-only, shared mapping at offset 0 shows the memory of [`crate::shared`].

use crate::{Header, facts::CpuFacts};

/// The type byte of every request (bits 15:8 of its number).
pub const MERCURY_IOC_TYPE: u32 = 0xF5;

const fn iowr<T>(number: u32) -> u32 {
    (3 << 30) | ((size_of::<T>() as u32) << 16) | (MERCURY_IOC_TYPE << 8) | number
}

/// Fills a [`SystemInfo`].
pub const MERCURY_IOC_SYSTEM: u32 = iowr::<SystemInfo>(0);
/// Fills a [`CpuFacts`] for the CPU that it names. Returns ENXIO if that CPU is offline.
pub const MERCURY_IOC_FACTS: u32 = iowr::<CpuFacts>(1);
/// Bit of [`CpuFacts::cpu`], in: control and table registers and the MSRs of system calls alone. Reading
/// these causes no exit of an attached CPU. All other fields are zero.
pub const MERCURY_FACTS_REGISTERS: u32 = 1 << 31;
/// Pre-caches the hypervisor in memory. Argument: a [`LoadRequest`].
pub const MERCURY_IOC_LOAD: u32 = iowr::<LoadRequest>(2);
/// Frees the pre-cached hypervisor; all CPUs must be native. Argument: a [`LoadRequest`].
pub const MERCURY_IOC_UNLOAD: u32 = iowr::<LoadRequest>(3);
/// Attaches CPUs; attached CPUs stay so. Argument: a [`SwitchRequest`].
pub const MERCURY_IOC_ATTACH: u32 = iowr::<SwitchRequest>(4);
/// Detaches CPUs; native CPUs stay so. Argument: a [`SwitchRequest`].
pub const MERCURY_IOC_DETACH: u32 = iowr::<SwitchRequest>(5);
/// Fills an array of [`CpuStatus`]. Argument: a [`StatusRequest`].
pub const MERCURY_IOC_STATUS: u32 = iowr::<StatusRequest>(6);
/// Measures hypercall round trips. Argument: a [`MeasureRequest`].
pub const MERCURY_IOC_MEASURE: u32 = iowr::<MeasureRequest>(7);
/// Arms a fault point. Returns ENOTTY in builds without fault injection. Argument: a
/// [`FaultRequest`].
pub const MERCURY_IOC_FAULT: u32 = iowr::<FaultRequest>(8);

/// Begins a snapshot of memory; all CPUs must be attached. Argument: a [`SnapshotRequest`], with
/// the same input as [`MERCURY_IOC_SNAPSHOT_PREPARE`] if that came before.
pub const MERCURY_IOC_SNAPSHOT_BEGIN: u32 = iowr::<SnapshotRequest>(9);
/// Reads frames of the snapshot. Argument: a [`SnapshotReadRequest`].
pub const MERCURY_IOC_SNAPSHOT_READ: u32 = iowr::<SnapshotReadRequest>(10);
/// Ends the snapshot. Argument: a [`SnapshotRequest`].
pub const MERCURY_IOC_SNAPSHOT_END: u32 = iowr::<SnapshotRequest>(11);

/// Describes the machine of the snapshot, begun or prepared. Argument: a [`RestartRequest`].
pub const MERCURY_IOC_SNAPSHOT_MACHINE: u32 = iowr::<RestartRequest>(12);
/// Allocates everything that a snapshot needs, so that the instant spends no time on it. Argument:
/// a [`SnapshotRequest`].
pub const MERCURY_IOC_SNAPSHOT_PREPARE: u32 = iowr::<SnapshotRequest>(16);

/// Puts the machine back to the kept snapshot. Returns only if that fails. Argument: a
/// [`SnapshotRequest`].
pub const MERCURY_IOC_ROLLBACK: u32 = iowr::<SnapshotRequest>(17);

/// Prepares the restart of another machine in place of this one. Argument: a [`RestartRequest`].
pub const MERCURY_IOC_RESTORE_BEGIN: u32 = iowr::<RestartRequest>(13);
/// Loads frames of that machine. Argument: a [`LoadFramesRequest`].
pub const MERCURY_IOC_RESTORE_LOAD: u32 = iowr::<LoadFramesRequest>(14);
/// Stops this system and starts that machine. Returns only if that fails. Argument: a
/// [`LoadRequest`].
pub const MERCURY_IOC_RESTORE_GO: u32 = iowr::<LoadRequest>(15);

/// Drops all packets from the instant of the next snapshot on. Argument: a [`FenceRequest`].
pub const MERCURY_IOC_FENCE: u32 = iowr::<FenceRequest>(18);

/// Reads frames of a prepared snapshot, as they are now. A frame may change meanwhile: a caller
/// that needs its content at one instant compares afterwards. Argument: a [`SnapshotReadRequest`].
pub const MERCURY_IOC_SNAPSHOT_READ_PRESENT: u32 = iowr::<SnapshotReadRequest>(24);
/// Reads loaded frames back, from where they lie. Argument: a [`LoadFramesRequest`], whose data is
/// written.
pub const MERCURY_IOC_RESTORE_READ: u32 = iowr::<LoadFramesRequest>(25);

/// Begins a dirty log of the writes of CPUs and devices, before the instant of a prepared snapshot
/// with [`MERCURY_SNAPSHOT_TRACK`]. Argument: a [`LogRequest`].
pub const MERCURY_IOC_LOG_BEGIN: u32 = iowr::<LogRequest>(26);
/// Collects the frames that may have been written since the last collection, or since the log
/// began. From here on [`MERCURY_READ_LOGGED`] refers to them. After the instant: the frames that
/// may have been written before it. Argument: a [`LogRequest`].
pub const MERCURY_IOC_LOG_COLLECT: u32 = iowr::<LogRequest>(27);

/// Begins, collects or ends a dirty log of a disk. Argument: a [`DiskLogRequest`].
pub const MERCURY_IOC_DISK_LOG: u32 = iowr::<DiskLogRequest>(28);

/// Reads a page of the firmware's memory. Argument: a [`FirmwareRequest`].
pub const MERCURY_IOC_FIRMWARE: u32 = iowr::<FirmwareRequest>(29);

/// Starts the watch, changes its acts, or stops it. Argument: a [`WatchRequest`].
pub const MERCURY_IOC_WATCH: u32 = iowr::<WatchRequest>(30);
/// Fills a [`WatchRequest`] with the state of the watch.
pub const MERCURY_IOC_WATCH_STATUS: u32 = iowr::<WatchRequest>(31);

/// Bit of [`WatchRequest::acts`]: CPUs are watched. Every other bit needs it.
pub const MERCURY_WATCH_ON: u32 = 1 << 0;
/// Bit of [`WatchRequest::acts`]: a hang becomes a panic if there is no snapshot to go back to.
/// Without this bit a hang is reported.
pub const MERCURY_WATCH_PANIC: u32 = 1 << 1;
/// Bit of [`WatchRequest::acts`]: an oops puts the machine back to its snapshot if the kernel is
/// likely to die of it: in a kernel thread, in an interrupt, or with a spinlock held.
pub const MERCURY_WATCH_OOPS_FATAL: u32 = 1 << 2;
/// Bit of [`WatchRequest::acts`]: every oops puts the machine back to its snapshot.
pub const MERCURY_WATCH_OOPS: u32 = 1 << 3;
/// All bits of [`WatchRequest::acts`].
pub const MERCURY_WATCH_ACTS: u32 =
    MERCURY_WATCH_ON | MERCURY_WATCH_PANIC | MERCURY_WATCH_OOPS_FATAL | MERCURY_WATCH_OOPS;
/// Bit of [`WatchRequest::tiers`]: the HPET sends NMIs to all CPUs.
pub const MERCURY_WATCH_TIER_HPET: u32 = 1 << 0;
/// Bit of [`WatchRequest::tiers`]: each CPU's counter of cycles sends it NMIs.
pub const MERCURY_WATCH_TIER_PERF: u32 = 1 << 1;

/// Arguments of the watch, and its state.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// Reserved; must be zero.
    pub flags: u64,
    /// In: bits of `MERCURY_WATCH_*`, 0 to stop the watch. Out: the bits in force.
    pub acts: u32,
    /// Out: bits of `MERCURY_WATCH_TIER_*`: the sources of NMIs in use.
    pub tiers: u32,
    /// Out: [`crate::code::Code`] that tells why the HPET is not used; 0 if it is.
    pub hpet_code: u32,
    /// Out: [`crate::code::Code`] that tells why counters of cycles are not used; 0 if they are.
    pub perf_code: u32,
    /// Out: number of CPUs that are watched.
    pub cpus: u32,
    /// Reserved; must be zero.
    pub reserved: u32,
    /// Out: number of NMIs of the HPET since the driver was loaded.
    pub ticks: u64,
    /// Out: number of hangs that were noticed.
    pub alarms: u64,
    /// Out: the longest time for which a CPU has been seen frozen, in milliseconds.
    pub longest_ms: u64,
    /// Out: the last alarm in words, up to the first zero byte.
    pub message: [u8; 128],
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Mends memory that the kernel maps read-only, while all CPUs stand still. Argument: a
/// [`MendRequest`].
pub const MERCURY_IOC_MEND: u32 = iowr::<MendRequest>(33);

/// Size of the largest part of memory that one request mends.
pub const MEND_MAX: usize = 32;

/// Arguments of a mend.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MendRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: the kernel's address of the first byte, in its text or in a module's.
    pub address: u64,
    /// In: number of bytes, which lie in one page.
    pub size: u32,
    /// Reserved; must be zero.
    pub reserved: u32,
    /// In: the bytes that have to be there. Nothing is written if others are.
    pub expected: [u8; MEND_MAX],
    /// In: the bytes to write.
    pub wanted: [u8; MEND_MAX],
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Has the hypervisor execute an [`crate::gate::IntegrityCall`] on a CPU. Argument: an
/// [`IntegrityRequest`].
pub const MERCURY_IOC_INTEGRITY: u32 = iowr::<IntegrityRequest>(34);

/// A request about pages that are read-only in the nested tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntegrityRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: the [`crate::gate::IntegrityCall`] in bits 63:56, and its first argument.
    pub call: u64,
    /// In: its second argument.
    pub argument: u64,
    /// In: Linux's number of the CPU.
    pub cpu: u32,
    /// Reserved; must be zero.
    pub reserved: u32,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Describes the life that ended last, whose memory [`MERCURY_IOC_SNAPSHOT_READ`] reads, or gives that
/// memory back. Argument: a [`PostmortemRequest`].
pub const MERCURY_IOC_POSTMORTEM: u32 = iowr::<PostmortemRequest>(32);

/// Flag of [`PostmortemRequest::flags`]: give the memory back.
pub const MERCURY_POSTMORTEM_DROP: u64 = 1 << 0;

/// Arguments of a post-mortem.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PostmortemRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: bits of `MERCURY_POSTMORTEM_*`.
    pub flags: u64,
    /// In: user-space address of an array of [`crate::snapshot::EndedCpu`].
    pub cpus_addr: u64,
    /// In: number of entries at `cpus_addr`; out: number of CPUs.
    pub cpus_count: u32,
    /// Out: offset of a task's name in the task; it has 16 bytes.
    pub comm_offset: u32,
    /// Out: offset of a task's number, a 32-bit word.
    pub pid_offset: u32,
    /// Out: offset of the time at which a task was started, in nanoseconds since the boot, a 64-bit word.
    pub started_offset: u32,
    /// Out: the last words of that life, NUL-padded text.
    pub message: [u64; 16],
    /// Out: state of the snapshot, and report of the rollback.
    pub status: crate::snapshot::SnapshotStatus,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Value of [`DiskLogRequest::what`]: begin a log. It holds all writes from here on, and ends with
/// the controller.
pub const MERCURY_DISK_LOG_BEGIN: u32 = 0;
/// Value of [`DiskLogRequest::what`]: collect the chunks that may have been written since the last
/// collection, or since the begin.
pub const MERCURY_DISK_LOG_COLLECT: u32 = 1;
/// Value of [`DiskLogRequest::what`]: end the log.
pub const MERCURY_DISK_LOG_END: u32 = 2;
/// Largest number of disks that can have a log at the same time.
pub const MERCURY_DISK_LOGS_MAX: u32 = 16;
/// Least [`DiskLogRequest::chunk_shift`]: chunks of 64 KiB.
pub const MERCURY_DISK_CHUNK_SHIFT_MIN: u32 = 16;
/// Largest [`DiskLogRequest::chunk_shift`]: chunks of 1 MiB.
pub const MERCURY_DISK_CHUNK_SHIFT_MAX: u32 = 20;

/// Arguments of a disk's dirty log.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskLogRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: one of `MERCURY_DISK_LOG_*`.
    pub what: u32,
    /// In: a file descriptor of the disk, a whole one and not a partition.
    pub disk_fd: u32,
    /// In, at the begin: a chunk has two to the power of this value bytes.
    pub chunk_shift: u32,
    /// Reserved; must be zero.
    pub reserved: u32,
    /// In, at a collection: user-space address of an array of 64-bit words, with one bit for each
    /// chunk.
    pub map_addr: u64,
    /// In: number of 64-bit words at `map_addr`.
    pub map_words: u64,
    /// Out: number of chunks of the disk; at a collection, number of chunks in the log.
    pub chunks: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Arguments of reading the firmware's memory. Refused with [`crate::code::Code::BadArgument`]: a page
/// that is the kernel's own memory, or that the firmware's map does not have above the first MiB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FirmwareRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: physical address of the page.
    pub page_phys: u64,
    /// In: user-space address of a page that gets the content.
    pub data_addr: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Flag of [`SnapshotRequest::flags`]: keep a dirty log from the instant on.
pub const MERCURY_SNAPSHOT_LOG: u64 = 1 << 0;
/// Flag of [`SnapshotRequest::flags`]: hash every page at the instant (fault-injection builds
/// only).
pub const MERCURY_SNAPSHOT_HASH: u64 = 1 << 1;
/// Flag of [`SnapshotRequest::flags`]: keep the snapshot for a rollback. It outlives the process.
/// It ends on request, or when all CPUs are detached.
pub const MERCURY_SNAPSHOT_KEEP: u64 = 1 << 2;
/// Flag of [`SnapshotRequest::flags`], with [`MERCURY_SNAPSHOT_KEEP`]: the snapshot ends when the
/// machine was put back to it.
pub const MERCURY_SNAPSHOT_ONCE: u64 = 1 << 4;

/// Flag of [`SnapshotRequest::flags`]: reserve memory for a dirty log before the instant.
pub const MERCURY_SNAPSHOT_TRACK: u64 = 1 << 3;

/// Value of [`SnapshotRequest::swap_pages`]: every active swap area lies in memory, as zram does.
pub const MERCURY_SWAP_IN_MEMORY: u64 = u64::MAX;

/// Flag of [`SnapshotReadRequest::flags`]: read only frames that the last collection of the dirty
/// log found.
pub const MERCURY_READ_LOGGED: u64 = 1 << 0;
/// Flag of [`SnapshotReadRequest::flags`]: skip frames that were free at the instant.
pub const MERCURY_READ_USED: u64 = 1 << 1;

/// Bit of [`SystemInfo::features`]: this build has fault points.
pub const MERCURY_FEATURE_FAULT_INJECTION: u64 = 1 << 0;
/// Bit of [`SystemInfo::features`]: this machine is a guest, and its monitor stands in for the hypervisor at
/// a snapshot that is read while no CPU is attached and the hypervisor is not loaded.
pub const MERCURY_FEATURE_MONITOR: u64 = 1 << 1;

/// Value of [`SystemInfo::state`] and [`StatusRequest::state`]: the driver is loaded, the
/// hypervisor is not.
pub const MERCURY_STATE_UNLOADED: u32 = 0;
/// State: the hypervisor is pre-cached; every CPU is native.
pub const MERCURY_STATE_LOADED: u32 = 1;
/// State: at least one CPU is meant to be attached.
pub const MERCURY_STATE_ATTACHED: u32 = 2;
/// State: the hypervisor crashed. Unload and load it before the next attach.
pub const MERCURY_STATE_CRASHED: u32 = 3;

/// Properties of the driver and of the machine.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SystemInfo {
    /// Size and version of this structure.
    pub header: Header,
    /// Out: one of `MERCURY_STATE_*`.
    pub state: u32,
    /// Out: number of possible CPUs, the range of Linux's CPU numbers.
    pub possible_cpus: u32,
    /// Out: process that holds the controller, in the reader's PID namespace; 0: none.
    pub controller_pid: u32,
    /// Out: number of CPUs that are meant to be attached.
    pub wanted_cpus: u32,
    /// Out: bits of `MERCURY_FEATURE_*`.
    pub features: u64,
    /// Out: frequency of the TSC in kHz.
    pub tsc_khz: u64,
    /// Out: memory in bytes that the pre-cached hypervisor holds, without the per-CPU part.
    pub memory_fixed: u64,
    /// Out: memory in bytes that it holds per possible CPU.
    pub memory_per_cpu: u64,
    /// Out: size in bytes of the mapping at offset 0; 0 while unloaded.
    pub shared_size: u64,
    /// Out: the hypervisor's version, NUL-padded ASCII.
    pub version: [u8; 32],
    /// Out: state of the snapshot; zeros if there is none.
    pub snapshot: crate::snapshot::SnapshotStatus,
}

/// The result of an operation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// [`crate::code::Code`] as a number; 0 is success.
    pub code: u32,
    /// Linux's number of the CPU that the code concerns; `u32::MAX` if it concerns no single CPU.
    pub cpu: u32,
    /// Values to which the code's explanation refers: the offending register, field or address.
    pub detail: [u64; 2],
}

/// Arguments of a load and of an unload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: flags; must be zero.
    pub flags: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Arguments of an attach and of a detach.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: bits of `MERCURY_SWITCH_*`.
    pub flags: u64,
    /// In: user-space address of a CPU bit mask in 64-bit words; 0: all online CPUs.
    pub mask_addr: u64,
    /// In: number of 64-bit words in the mask.
    pub mask_words: u32,
    /// In: number of entries at `results_addr`; out: number of CPUs that switched.
    pub results_count: u32,
    /// In: user-space address of an array of [`SwitchResult`]; 0: none.
    pub results_addr: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// The result of one CPU's switch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchResult {
    /// Linux's number of the CPU.
    pub cpu: u32,
    /// [`crate::code::Code`] as a number.
    pub code: u32,
    /// TSC ticks during which the switch kept interrupts off on this CPU.
    pub ticks: u64,
}

/// Arguments of a snapshot's begin, preparation and end, and of a rollback.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In, at the begin: bits of `MERCURY_SNAPSHOT_*`.
    pub flags: u64,
    /// In, at the begin: size of the pool in pages of 4 KiB.
    pub pool_pages: u64,
    /// In, at the begin: pages in all active swap areas. If fewer pages are free at the instant,
    /// memory is swapped out, and the driver refuses. With [`MERCURY_SWAP_IN_MEMORY`] the driver
    /// does not compare.
    pub swap_pages: u64,
    /// Out: pages of memory that the snapshot holds.
    pub memory_pages: u64,
    /// Out, at the begin: 1 in a machine that was restored from an image of this snapshot. There
    /// the snapshot is gone, and the hypervisor is unloaded.
    pub restored: u64,
    /// Out, at the begin: 1 in a machine that was put back to this snapshot.
    /// [`crate::snapshot::SnapshotStatus::rollback`] gives the reason, and
    /// [`crate::snapshot::SnapshotStatus::kept`] is 1 if the machine can go back once more.
    pub rolled_back: u64,
    /// Out, after a rollback: the last words of the kernel's log, NUL-padded text.
    pub message: [u64; 16],
    /// Out: pages added to the pool because it ran low.
    pub added_pages: u64,
    /// Out: pages of the pool that the driver returned because the system had no memory left.
    pub returned_pages: u64,
    /// Out: state and cost of the snapshot so far.
    pub status: crate::snapshot::SnapshotStatus,
    /// Out, at the begin: duration of the instant's steps.
    pub instant: crate::snapshot::InstantTicks,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Arguments of reading frames.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotReadRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: guest-physical address of the first frame to read. Out: address at which to continue;
    /// all ones after the last frame.
    pub cursor_phys: u64,
    /// In: guest-physical address at which to stop, exclusive.
    pub end_phys: u64,
    /// In: frames for which the arrays have room. Out: frames that were read.
    pub count: u64,
    /// In: user-space address of an array of 64-bit words: gets the guest-physical addresses of the
    /// frames.
    pub frames_addr: u64,
    /// In: user-space address of an array of pages: gets the content of the frames.
    pub data_addr: u64,
    /// In: user-space address of an array of the hashes that [`MERCURY_SNAPSHOT_HASH`] made; 0: none.
    pub hashes_addr: u64,
    /// Out: 1 if the pool runs low. The caller should hurry, because writers have to wait soon.
    pub low: u64,
    /// In: bits of `MERCURY_READ_*`.
    pub flags: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Arguments of a dirty log of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// Out: number of frames that were collected.
    pub pages: u64,
    /// Out: number of those that are collected for devices alone: a device may still write to them,
    /// or might have at the instant.
    pub device_pages: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// The machine of a snapshot or of an image, without the content of its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// Bits of `MERCURY_RESTART_*`.
    pub flags: u64,
    /// Kernel virtual address of `mercury_resume` in that machine's system.
    pub resume_virt: u64,
    /// Physical addresses of the two pages that hold `mercury_resume`.
    pub resume_phys: [u64; 2],
    /// User-space address of an array of [`crate::restart::RestartCpu`].
    pub cpus_addr: u64,
    /// User-space address of an array of [`crate::restart::RestartRange`].
    pub ranges_addr: u64,
    /// Entries at `cpus_addr`. In a request for them: in, room in entries; out, number of entries.
    pub cpus_count: u32,
    /// Entries at `ranges_addr`, by the same rule.
    pub ranges_count: u32,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Flag of [`FenceRequest::flags`]: take the fence away.
pub const MERCURY_FENCE_DOWN: u64 = 1 << 0;
/// Flag of [`FenceRequest::flags`]: the active fence outlives its controller, until a controller
/// takes it away.
pub const MERCURY_FENCE_STAYS: u64 = 1 << 1;
/// Flag of [`FenceRequest::flags`]: in a machine that comes back to the instant, the fence is
/// closed for all peers until a controller there takes it away.
pub const MERCURY_FENCE_RETURN: u64 = 1 << 2;
/// Flag of [`FenceRequest::flags`]: the fence stays open in the machine that goes on.
pub const MERCURY_FENCE_OPEN_HERE: u64 = 1 << 3;
/// Flag of [`FenceRequest::flags`], with [`MERCURY_FENCE_DOWN`]: end IPsec's security associations
/// in all network namespaces before the fence is taken away.
pub const MERCURY_FENCE_FORGET: u64 = 1 << 4;
/// Largest [`FenceRequest::peers_count`].
pub const MERCURY_FENCE_PEERS_MAX: u32 = 64;

/// Arguments of the fence. The fence disappears with its controller, unless a flag says otherwise.
/// No image contains it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FenceRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: bits of `MERCURY_FENCE_*`.
    pub flags: u64,
    /// In: user-space address of an array of [`FencePeer`]: the peers that may still exchange
    /// packets with this machine.
    pub peers_addr: u64,
    /// In: number of entries at `peers_addr`.
    pub peers_count: u32,
    /// Reserved; must be zero.
    pub reserved: u32,
    /// Out: number of packets that the fence has dropped so far.
    pub stopped: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// A peer whose packets the fence lets through.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FencePeer {
    /// The peer's IP address in network byte order; IPv4 uses the first four bytes.
    pub address: [u8; 16],
    /// Version of IP: 4 or 6.
    pub version: u32,
    /// The peer's TCP or UDP port; 0: all its packets.
    pub port: u32,
}

/// Arguments of loading frames, and of reading them back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadFramesRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: user-space address of an array of [`crate::restart::LoadEntry`].
    pub entries_addr: u64,
    /// In: number of entries at `entries_addr`.
    pub count: u64,
    /// In: user-space address of an array of pages, one for each entry that has data.
    pub data_addr: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Arguments of the status request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// Out: one of `MERCURY_STATE_*`.
    pub state: u32,
    /// In: number of entries at `cpus_addr`; out: entries filled (one per possible CPU).
    pub cpus_count: u32,
    /// In: user-space address of an array of [`CpuStatus`].
    pub cpus_addr: u64,
}

/// Value of [`CpuStatus::mode`]: the CPU is offline.
pub const MERCURY_MODE_OFFLINE: u32 = 0;
/// Value of [`CpuStatus::mode`]: the CPU answered that it runs on the bare hardware.
pub const MERCURY_MODE_NATIVE: u32 = 1;
/// Value of [`CpuStatus::mode`]: the CPU answered that the hypervisor runs below it.
pub const MERCURY_MODE_ATTACHED: u32 = 2;

/// The mode of one CPU, and its history since load.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuStatus {
    /// Linux's number of the CPU.
    pub cpu: u32,
    /// One of `MERCURY_MODE_*`, asked of the CPU just now.
    pub mode: u32,
    /// 1 if the CPU is meant to be attached, else 0.
    pub wanted: u32,
    /// [`crate::code::Code`] of the CPU's last departure other than by a detach; 0 if there was
    /// none.
    pub left_because: u32,
    /// Number of attaches since load.
    pub attaches: u64,
    /// Number of detaches since load.
    pub detaches: u64,
    /// TSC ticks with interrupts off in the last attach.
    pub attach_ticks: u64,
    /// TSC ticks with interrupts off in the last detach.
    pub detach_ticks: u64,
}

/// Arguments of a measurement: hypercall round trips on one attached CPU with interrupts off.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasureRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: Linux's number of the CPU.
    pub cpu: u32,
    /// In: number of round trips, 1 to 1,000.
    pub count: u32,
    /// Out: TSC ticks of all round trips together.
    pub ticks: u64,
    /// Out: TSC ticks of the same loop without the hypercall.
    pub overhead_ticks: u64,
    /// Out: how the operation ended.
    pub outcome: Outcome,
}

/// Arguments of an injected fault.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRequest {
    /// Size and version of this structure.
    pub header: Header,
    /// In: [`crate::gate::FaultPoint`] as a number; 0 disarms all.
    pub point: u32,
    /// In: Linux's number of the CPU; `u32::MAX`: once on each CPU.
    pub cpu: u32,
    /// In: the point fires at the n-th passage, counting from 1.
    pub passage: u32,
    /// In, for [`crate::gate::FaultPoint::Facts`]: byte offset in [`CpuFacts`], a multiple of 4.
    pub offset: u32,
    /// In, for [`crate::gate::FaultPoint::Facts`]: the new 32-bit word.
    pub value: u32,
    /// Reserved; must be zero.
    pub reserved: u32,
    /// Out: number of times that armed points have fired since load.
    pub fired: u32,
}

/// Flag of [`SwitchRequest::flags`]: run the preflight checks and switch no CPU.
pub const MERCURY_SWITCH_CHECK_ONLY: u64 = 1 << 0;
/// Flag of [`SwitchRequest::flags`] for a detach: CPUs that come online later attach as before. Otherwise a
/// detach leaves them native.
pub const MERCURY_SWITCH_FOR_NOW: u64 = 1 << 1;
