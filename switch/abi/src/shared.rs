//! The memory that the hypervisor publishes: one [`SharedCpu`] of [`SHARED_CPU_SIZE`] bytes per
//! possible CPU, in the order of Linux's CPU numbers. User space maps it read-only at offset 0 of
//! `/dev/mercury`.
//!
//! Each block has one writer, the hypervisor on that CPU; only [`SharedCpu::kvm_may`] is written by
//! the driver. The hypervisor bases no decision on values that it wrote here, because these pages
//! are ordinary memory of the system. A reader compares [`LogRecord::sequence`] before and after it
//! copies a record, and discards the copy if they differ.

/// Size of one CPU's block in bytes: two pages.
pub const SHARED_CPU_SIZE: usize = 8192;

/// "MERCURY1" in ASCII, little-endian: the first word of a block.
pub const SHARED_MAGIC: u64 = 0x3159_5255_4352_454d;

/// Bit of an exit code that marks VMX's exit reason in bits 31:0 (SDM volume 3, appendix C). SVM's
/// exit codes have the bit clear or are negative (APM volume 2, appendix C).
pub const EXIT_CODE_VMX: u64 = 1 << 32;

/// Number of exit counters: room for more than the [`ExitReason`]s of today.
pub const EXIT_REASONS: usize = 24;

/// Number of records in one CPU's log ring.
pub const LOG_RECORDS: usize = 64;

/// [`SharedCpu::read_only`]: no page is read-only for integrity.
pub const READ_ONLY_NONE: u64 = 0;
/// [`SharedCpu::read_only`]: the CPU runs on the tables of a snapshot or of a dirty log, and no page is
/// read-only for integrity until they end.
pub const READ_ONLY_LATER: u64 = 1;

/// The reason of an exit: index into [`SharedCpu::exits`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitReason {
    /// A hypercall that the driver made.
    Hypercall = 0,
    /// A hypercall instruction in user mode, or one that the driver did not make. The hypervisor
    /// answers with #UD.
    ForeignHypercall = 1,
    /// An access to EFER (C000_0080h).
    MsrEfer = 2,
    /// An access to VM_HSAVE_PA (C001_0117h).
    MsrHsave = 3,
    /// An access to PAT (277h).
    MsrPat = 4,
    /// A write to the MSR that loads microcode.
    MsrMicrocode = 5,
    /// An MSR outside the permission bitmap (AMD's SMCA banks), or an MTRR (Intel). The hypervisor
    /// executes the access.
    MsrPassThrough = 6,
    /// A virtualization instruction of the system. The hypervisor answers with #UD.
    VirtInstruction = 7,
    /// A nested page fault that extended the identity map.
    NestedFill = 8,
    /// A write to hidden memory, which the hypervisor dropped.
    HiddenWrite = 9,
    /// The CPUID instruction (Intel only).
    Cpuid = 10,
    /// The XSETBV instruction (Intel only).
    Xsetbv = 11,
    /// Any other exit that the hypervisor knows.
    Other = 12,
    /// An exit that the hypervisor does not know: the CPU was detached.
    Unknown = 13,
    /// The first write to a page beneath a snapshot. The page was copied, or no copy was needed any
    /// more.
    SnapshotWrite = 14,
    /// VMRUN of the system: its guest ran in place (AMD).
    GuestRun = 15,
    /// STGI of the system, after it ran a guest of its own (AMD).
    GuestEnd = 16,
    /// An NMI that struck while the system had GIF = 0 (AMD).
    HeldNmi = 17,
    /// A store of the kernel to its own code, which is read-only in the nested tables, or the end of
    /// that (AMD).
    TextPoke = 18,
    /// A store to a page that is read-only in the nested tables, by other code (AMD).
    ForeignStore = 19,
}

impl ExitReason {
    /// Every reason with its name, in the order of the counters.
    pub const NAMES: [(ExitReason, &'static str); 20] = [
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
        (ExitReason::TextPoke, "text-poke"),
        (ExitReason::ForeignStore, "foreign-store"),
    ];
}

/// The event that a [`LogRecord`] reports.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogKind {
    /// No event: the slot is empty.
    None = 0,
    /// The CPU was attached. No arguments.
    Attached = 1,
    /// The CPU was detached by the driver. No arguments.
    Detached = 2,
    /// The CPU left by itself. Arguments: code, exit code, guest RIP, detail.
    Left = 3,
    /// The hypervisor executed an MSR access for the system. Arguments: MSR, value, 1 if written, 1
    /// if it faulted, guest RIP.
    Msr = 4,
    /// The nested map was extended. Arguments: guest-physical address, guest RIP.
    NestedFill = 5,
    /// A write to hidden memory was dropped. Arguments: guest-physical address, guest RIP.
    HiddenWrite = 6,
    /// An event in delivery was injected again. Arguments: event, exit code.
    Reinjected = 7,
    /// The hypervisor crashed on this CPU. Arguments: code, vector or exit code, host RIP, guest
    /// RIP.
    Crash = 8,
    /// VMRUN refused the control block. Arguments: number of the failed check, value.
    InvalidState = 9,
    /// The CPU left while an event was in delivery that could not be injected again. Arguments:
    /// event, exit code.
    EventLost = 10,
    /// The machine was put back to a snapshot. Arguments: reason, CPU that asked, pages, ticks,
    /// guest RIP.
    RolledBack = 11,
    /// A page that is read-only in the nested tables was written to. Arguments: guest-physical
    /// address, guest RIP, and three return addresses of the guest's stack, the last call first.
    ForeignStore = 12,
}

/// One entry of the log ring, 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogRecord {
    /// Number of this record on this CPU, counting from 1; 0 while the hypervisor writes it.
    pub sequence: u64,
    /// TSC at the time of the event.
    pub tsc: u64,
    /// [`LogKind`] as a number.
    pub kind: u32,
    /// Linux's number of the CPU that wrote the record.
    pub cpu: u32,
    /// Arguments of the event, by its kind.
    pub arguments: [u64; 5],
}

/// Registers of the interrupted system, in the order of the instruction encoding: RAX, RCX, RDX,
/// RBX, RSP, RBP, RSI, RDI, R8 to R15.
pub type Registers = [u64; 16];

/// The crash record: the CPU's state when the hypervisor gave up on this CPU. It stays until
/// unload.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashRecord {
    /// [`crate::code::Code`] as a number; 0: no crash.
    pub code: u32,
    /// Exception vector, 0 to 31; `u32::MAX` if there was no exception.
    pub vector: u32,
    /// TSC at the time of the crash.
    pub tsc: u64,
    /// RIP of the hypervisor in bytes from the image's start, as `addr2line` wants it.
    pub host_rip_offset: u64,
    /// RSP of the hypervisor: host-virtual.
    pub host_rsp_virt: u64,
    /// Error code of the exception, 0 if it has none.
    pub error_code: u64,
    /// CR2 of the hypervisor: host-virtual address of its page fault.
    pub host_cr2: u64,
    /// Exit code of the last exit, as the processor gave it; on Intel with [`EXIT_CODE_VMX`].
    pub exit_code: u64,
    /// EXITINFO1 of that exit (AMD: APM volume 2, section 15.6), or the exit qualification (Intel).
    pub exit_info1: u64,
    /// EXITINFO2 of that exit (AMD), or the guest-physical address (Intel).
    pub exit_info2: u64,
    /// Event in delivery at the exit, in the format of the control block.
    pub exit_event: u64,
    /// RIP of the system: its virtual address.
    pub guest_rip: u64,
    /// RFLAGS of the system.
    pub guest_rflags: u64,
    /// CR0 of the system.
    pub guest_cr0: u64,
    /// CR2 of the system: linear address of its last page fault.
    pub guest_cr2: u64,
    /// CR3 of the system: guest-physical root and flags.
    pub guest_cr3: u64,
    /// CR4 of the system.
    pub guest_cr4: u64,
    /// Selectors of the system: CS in bits 15:0, SS in bits 31:16.
    pub guest_cs_ss: u64,
    /// General registers of the system.
    pub guest_registers: Registers,
    /// Panic message or name of the fault point, NUL-padded.
    pub message: [u8; 120],
}

impl CrashRecord {
    /// No crash.
    pub const NONE: Self = Self {
        code: 0,
        vector: u32::MAX,
        tsc: 0,
        host_rip_offset: 0,
        host_rsp_virt: 0,
        error_code: 0,
        host_cr2: 0,
        exit_code: 0,
        exit_info1: 0,
        exit_info2: 0,
        exit_event: 0,
        guest_rip: 0,
        guest_rflags: 0,
        guest_cr0: 0,
        guest_cr2: 0,
        guest_cr3: 0,
        guest_cr4: 0,
        guest_cs_ss: 0,
        guest_registers: [0; 16],
        message: [0; 120],
    };
}

/// The block of one CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SharedCpu {
    /// [`SHARED_MAGIC`] while the hypervisor is loaded.
    pub magic: u64,
    /// Linux's number of this CPU.
    pub cpu: u32,
    /// 1 while this CPU is attached, by the hypervisor's last write. Only the CPU itself can answer
    /// for certain.
    pub attached: u32,
    /// Number of exits since load, by [`ExitReason`].
    pub exits: [u64; EXIT_REASONS],
    /// TSC ticks that exits spent in the hypervisor since load.
    pub exit_ticks: u64,
    /// Number of attaches of this CPU since load.
    pub attaches: u64,
    /// Number of detaches of this CPU since load, of every kind.
    pub detaches: u64,
    /// [`crate::code::Code`] of the last departure that was not a detach; 0 if there was none.
    pub left_because: u64,
    /// Number of records ever written to `log`.
    pub log_written: u64,
    /// The last crash on this CPU.
    pub crash: CrashRecord,
    /// 1 while KVM may use SVM above the hypervisor, else 0; written by the driver. At 0 the system
    /// sees the hypervisor's own SVME in EFER, and the CPU is detached when the system clears it.
    pub kvm_may: u32,
    /// Zero.
    pub reserved0: u32,
    /// Pages that are read-only beneath this CPU, while it is attached: the number that
    /// [`crate::gate::IntegrityCall::Begin`] gave them, [`READ_ONLY_NONE`] or [`READ_ONLY_LATER`]. From an attach
    /// to the next [`crate::gate::IntegrityCall::Enter`] it is [`READ_ONLY_NONE`], even if they are.
    pub read_only: u64,
    /// Padding to the second page, zeros.
    pub reserved: [u32; 862],
    /// The log ring; record `n` (from 1) is at index `(n - 1) % LOG_RECORDS`.
    pub log: [LogRecord; LOG_RECORDS],
}

const _: () = assert!(size_of::<LogRecord>() == 64);
const _: () = assert!(size_of::<SharedCpu>() == SHARED_CPU_SIZE);
const _: () = assert!(core::mem::offset_of!(SharedCpu, log) == 4096);
