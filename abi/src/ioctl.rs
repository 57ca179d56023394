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
