//! `struct perf_event_attr`, as far as it is used here (linux/perf_event.h, size of version 7).

/// Kinds of events.
pub mod kind {
    /// Counted by the processor.
    pub const HARDWARE: u32 = 0;
    /// Counted by the kernel.
    pub const SOFTWARE: u32 = 1;
    /// Debug registers.
    pub const BREAKPOINT: u32 = 5;
}

/// Processor cycles.
pub const HARDWARE_CYCLES: u64 = 0;
/// The CPU's clock, by a timer.
pub const SOFTWARE_CPU_CLOCK: u64 = 0;
/// Bits of [`Attr::flags`].
pub mod flag {
    /// Off until enabled.
    pub const DISABLED: u64 = 1 << 0;
    /// Not in the kernel.
    pub const EXCLUDE_KERNEL: u64 = 1 << 5;
    /// Not in a hypervisor.
    pub const EXCLUDE_HV: u64 = 1 << 6;
    /// `sample_period` is a frequency.
    pub const FREQUENCY: u64 = 1 << 10;
}
/// [`Attr::sample_type`]: the instruction.
pub const SAMPLE_IP: u64 = 1 << 0;
/// The CPU.
pub const SAMPLE_CPU: u64 = 1 << 7;
/// [`Attr::breakpoint_type`]: stores.
pub const BREAKPOINT_WRITE: u32 = 2;
/// Instructions.
pub const BREAKPOINT_EXECUTE: u32 = 4;

/// What is to be counted or sampled.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Attr {
    /// [`kind`].
    pub kind: u32,
    /// Of this structure.
    pub size: u32,
    /// Depends on the kind.
    pub config: u64,
    /// Period or frequency.
    pub sample_period: u64,
    /// What a sample holds.
    pub sample_type: u64,
    /// What a read returns.
    pub read_format: u64,
    /// [`flag`].
    pub flags: u64,
    /// Samples until a wake-up.
    pub wakeup_events: u32,
    /// For breakpoints.
    pub breakpoint_type: u32,
    /// For breakpoints: the address.
    pub breakpoint_addr: u64,
    /// For breakpoints: how many bytes.
    pub breakpoint_len: u64,
    /// Not used here.
    pub rest: [u64; 7],
}

const _: () = assert!(size_of::<Attr>() == 128);
