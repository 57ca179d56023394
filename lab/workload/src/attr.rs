//! The structure `perf_event_attr`, as far as the workloads use it (linux/perf_event.h, size of
//! version 7).

/// Kinds of events.
pub mod kind {
    /// Events that the processor counts.
    pub const HARDWARE: u32 = 0;
    /// Events that the kernel counts.
    pub const SOFTWARE: u32 = 1;
    /// Hits of the debug registers.
    pub const BREAKPOINT: u32 = 5;
}

pub const HARDWARE_CYCLES: u64 = 0;
/// The CPU's clock, by a timer.
pub const SOFTWARE_CPU_CLOCK: u64 = 0;
/// Bits of [`Attr::flags`].
pub mod flag {
    /// The event is off until it is enabled.
    pub const DISABLED: u64 = 1 << 0;
    /// The kernel is left out.
    pub const EXCLUDE_KERNEL: u64 = 1 << 5;
    /// Hypervisors are left out.
    pub const EXCLUDE_HV: u64 = 1 << 6;
    /// The value of `sample_period` is a frequency.
    pub const FREQUENCY: u64 = 1 << 10;
}
/// A bit of [`Attr::sample_type`]: the instruction.
pub const SAMPLE_IP: u64 = 1 << 0;
/// A bit of [`Attr::sample_type`]: the CPU.
pub const SAMPLE_CPU: u64 = 1 << 7;
/// A value of [`Attr::breakpoint_type`]: stores.
pub const BREAKPOINT_WRITE: u32 = 2;
/// A value of [`Attr::breakpoint_type`]: instructions.
pub const BREAKPOINT_EXECUTE: u32 = 4;

/// The description of an event to be counted or sampled.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Attr {
    /// A value of [`kind`].
    pub kind: u32,
    /// The size of this structure.
    pub size: u32,
    /// The event, in numbers that depend on the kind.
    pub config: u64,
    /// The period or frequency of samples.
    pub sample_period: u64,
    /// The contents of a sample.
    pub sample_type: u64,
    /// The contents of a read.
    pub read_format: u64,
    /// Bits of [`flag`].
    pub flags: u64,
    /// Samples until a wake-up.
    pub wakeup_events: u32,
    /// The accesses that a breakpoint counts.
    pub breakpoint_type: u32,
    /// The address of a breakpoint.
    pub breakpoint_addr: u64,
    /// The length of a breakpoint, in bytes.
    pub breakpoint_len: u64,
    pub rest: [u64; 7],
}

const _: () = assert!(size_of::<Attr>() == 128);
