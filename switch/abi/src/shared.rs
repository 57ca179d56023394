//! What the hypervisor publishes: one [`SharedCpu`] of [`SHARED_CPU_SIZE`] bytes per possible CPU,
//! in the order of Linux's CPU numbers, mapped read-only by user space at offset 0 of
//! `/dev/mercury`.
//!
//! Each block has one writer, the hypervisor on that CPU, but for what the driver says in
//! [`SharedCpu::kvm_may`]. It never reads back what it wrote to decide anything: these pages are ordinary
//! memory of the system above. A reader takes
//! [`LogRecord::sequence`] before and after it copies a record and discards it if they differ.

/// Bytes of one CPU's block: two pages.
pub const SHARED_CPU_SIZE: usize = 8192;

/// "MERCURY1" in ASCII, little-endian.
pub const SHARED_MAGIC: u64 = 0x3159_5255_4352_454d;

/// Set in an exit code that is VMX's exit reason (bits 31:0); one of SVM has it clear or is negative.
pub const EXIT_CODE_VMX: u64 = 1 << 32;

/// Number of [`ExitReason`]s that have a counter.
pub const EXIT_REASONS: usize = 24;

/// Records in one CPU's log ring.
pub const LOG_RECORDS: usize = 64;

/// Why a CPU came into the hypervisor: index into [`SharedCpu::exits`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitReason {
    /// A hypercall of the driver.
    Hypercall = 0,
    /// A hypercall instruction in user mode, or one that the driver did not make: answered with #UD.
    ForeignHypercall = 1,
    /// EFER.
    MsrEfer = 2,
    /// VM_HSAVE_PA.
    MsrHsave = 3,
    /// PAT.
    MsrPat = 4,
    /// The microcode trigger.
    MsrMicrocode = 5,
    /// An MSR outside the permission bitmap (AMD's SMCA banks), or an MTRR (Intel), executed for real.
    MsrPassThrough = 6,
    /// A virtualization instruction of the system above: answered with #UD.
    VirtInstruction = 7,
    /// A nested fault that extended the identity map.
    NestedFill = 8,
    /// A write to hidden memory: dropped.
    HiddenWrite = 9,
    /// CPUID (Intel only).
    Cpuid = 10,
    /// XSETBV (Intel only).
    Xsetbv = 11,
    /// Anything else that is known.
    Other = 12,
    /// Anything unknown: the CPU was detached.
    Unknown = 13,
    /// The first write to a page beneath a snapshot: it was copied, or no copy was needed any more.
    SnapshotWrite = 14,
    /// VMRUN of the system above: its guest ran in place (AMD).
    GuestRun = 15,
    /// STGI of the system above, after a guest of its own (AMD).
    GuestEnd = 16,
    /// An NMI that struck while the system above had GIF = 0 (AMD).
    HeldNmi = 17,
}

impl ExitReason {
    /// Every reason with its name, in the order of the counters.
    pub const NAMES: [(ExitReason, &'static str); 18] = [
        (ExitReason::Hypercall, "hypercall"),
        (ExitReason::ForeignHypercall, "foreign-hypercall"),
        (ExitReason::MsrEfer, "msr-efer"),
        (ExitReason::MsrHsave, "msr-hsave"),
        (ExitReason::MsrPat, "msr-pat"),
        (ExitReason::MsrMicrocode, "msr-microcode"),
        (ExitReason::MsrPassThrough, "msr-pass-through"),
        (ExitReason::VirtInstruction, "virt-instruction"),
        (ExitReason::NestedFill, "nested-fill"),
        (ExitReason::HiddenWrite, "hidden-write"),
        (ExitReason::Cpuid, "cpuid"),
        (ExitReason::Xsetbv, "xsetbv"),
        (ExitReason::Other, "other"),
        (ExitReason::Unknown, "unknown"),
        (ExitReason::SnapshotWrite, "snapshot-write"),
        (ExitReason::GuestRun, "guest-run"),
        (ExitReason::GuestEnd, "guest-end"),
        (ExitReason::HeldNmi, "held-nmi"),
    ];
}

/// What a [`LogRecord`] reports.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogKind {
    /// Empty slot.
    None = 0,
    /// The CPU was attached. No arguments.
    Attached = 1,
    /// The CPU was detached by the driver. No arguments.
    Detached = 2,
    /// The CPU left by itself: code, exit code, guest RIP, detail.
    Left = 3,
    /// An MSR was executed for the system: MSR, value, 1 if written, 1 if it faulted.
    Msr = 4,
    /// The nested map was extended: guest-physical address, guest RIP.
    NestedFill = 5,
    /// A write to hidden memory was dropped: guest-physical address, guest RIP.
    HiddenWrite = 6,
    /// An event in delivery was handed over again: event, exit code.
    Reinjected = 7,
    /// The hypervisor crashed on this CPU: code, vector or exit code, host RIP, guest RIP.
    Crash = 8,
    /// VMRUN refused the control block: named check, value.
    InvalidState = 9,
    /// The CPU left while an event was in delivery that could not be handed over again: event, exit code.
    EventLost = 10,
    /// The machine was put back to a snapshot: reason, CPU that asked, pages, ticks, guest RIP.
    RolledBack = 11,
}

/// One entry of the log, 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogRecord {
    /// Number of this record on this CPU, counting from 1; 0 while it is being written.
    pub sequence: u64,
    /// TSC when it was written.
    pub tsc: u64,
    /// [`LogKind`] as a number.
    pub kind: u32,
    /// Linux's CPU number.
    pub cpu: u32,
    /// Meaning by kind.
    pub arguments: [u64; 5],
}

/// Registers of the interrupted system, in the order of the instruction encoding: RAX, RCX, RDX,
/// RBX, RSP, RBP, RSI, RDI, R8 to R15.
pub type Registers = [u64; 16];

/// The epitaph: what was known when the hypervisor gave up on this CPU. It stays until unload.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashRecord {
    /// [`crate::code::Code`] as a number; 0: no crash.
    pub code: u32,
    /// Exception vector, or `u32::MAX` where there was none.
    pub vector: u32,
    /// TSC at the crash.
    pub tsc: u64,
    /// Hypervisor RIP, relative to the image's start (`addr2line` takes it).
    pub host_rip_offset: u64,
    /// Hypervisor RSP, virtual.
    pub host_rsp_virt: u64,
    /// Exception error code.
    pub error_code: u64,
    /// CR2 in the hypervisor.
    pub host_cr2: u64,
    /// Exit code of the last exit, as the processor gave it; on Intel with [`EXIT_CODE_VMX`].
    pub exit_code: u64,
    /// First exit qualification.
    pub exit_info1: u64,
    /// Second exit qualification.
    pub exit_info2: u64,
    /// Event in delivery at the exit.
    pub exit_event: u64,
    /// Guest RIP, virtual.
    pub guest_rip: u64,
    /// Guest RFLAGS.
    pub guest_rflags: u64,
    /// Guest CR0.
    pub guest_cr0: u64,
    /// Guest CR2.
    pub guest_cr2: u64,
    /// Guest CR3.
    pub guest_cr3: u64,
    /// Guest CR4.
    pub guest_cr4: u64,
    /// Guest CS and SS selectors: CS in bits 15:0, SS in bits 31:16.
    pub guest_cs_ss: u64,
    /// Guest registers.
    pub guest_registers: Registers,
    /// Panic message or name of the fault point, NUL-padded.
    pub message: [u8; 120],
}

/// One CPU's block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SharedCpu {
    /// [`SHARED_MAGIC`] once the hypervisor is loaded.
    pub magic: u64,
    /// Linux's CPU number.
    pub cpu: u32,
    /// 1 while this CPU is attached, as far as the hypervisor knows; the truth is asked of the CPU.
    pub attached: u32,
    /// Exits by [`ExitReason`] since load.
    pub exits: [u64; EXIT_REASONS],
    /// TSC ticks spent in the hypervisor by exits since load.
    pub exit_ticks: u64,
    /// Attaches since load.
    pub attaches: u64,
    /// Detaches since load, of whatever kind.
    pub detaches: u64,
    /// [`crate::code::Code`] of the last departure that was not a detach; 0 if there was none.
    pub left_because: u64,
    /// Records ever written to `log`.
    pub log_written: u64,
    /// The last crash.
    pub crash: CrashRecord,
    /// Written by the driver: 1 while KVM may use SVM above the hypervisor. Otherwise EFER shows the
    /// hypervisor's own SVME, and to clear it is to leave.
    pub kvm_may: u32,
    /// Padding to the second page.
    pub reserved: [u32; 865],
    /// The ring; record `n` (from 1) is at index `(n - 1) % LOG_RECORDS`.
    pub log: [LogRecord; LOG_RECORDS],
}

const _: () = assert!(size_of::<LogRecord>() == 64);
const _: () = assert!(size_of::<SharedCpu>() == SHARED_CPU_SIZE);
const _: () = assert!(core::mem::offset_of!(SharedCpu, log) == 4096);
