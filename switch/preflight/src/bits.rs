//! The register bits that the checks know, each group with the section that defines it.
//!
//! APM: AMD64 Architecture Programmer's Manual, volume 2 (and volume 3, appendix E, for CPUID).
//! SDM: Intel's Software Developer's Manual.

/// Bits of CR0 (APM 3.1.1).
pub mod cr0 {
    /// Protected mode is enabled.
    pub const PE: u64 = 1 << 0;
    /// Monitor coprocessor: WAIT obeys TS.
    pub const MP: u64 = 1 << 1;
    /// Extension type, always 1.
    pub const ET: u64 = 1 << 4;
    /// Numeric errors raise #MF.
    pub const NE: u64 = 1 << 5;
    /// Write protection holds for the supervisor.
    pub const WP: u64 = 1 << 16;
    /// Alignment mask: user mode may get #AC.
    pub const AM: u64 = 1 << 18;
    /// Caches are disabled.
    pub const CD: u64 = 1 << 30;
    /// Paging is enabled.
    pub const PG: u64 = 1 << 31;

    /// Bits that may be set. EM and TS are missing: no 64-bit Linux leaves them set, and the
    /// hypervisor runs with the CR0 that it found. NW and CD are missing: with caches off the
    /// kernel is in the middle of a change.
    pub const KNOWN: u64 = PE | MP | ET | NE | WP | AM | PG;
    /// Bits that must be set, because the hypervisor runs with them.
    pub const REQUIRED: u64 = PE | PG | WP;
}

/// Bits of CR4 (APM 3.1.3).
pub mod cr4 {
    /// Virtual-8086 extensions.
    pub const VME: u64 = 1 << 0;
    /// Protected-mode virtual interrupts.
    pub const PVI: u64 = 1 << 1;
    /// Time-stamp disable; differs from task to task.
    pub const TSD: u64 = 1 << 2;
    /// Debugging extensions.
    pub const DE: u64 = 1 << 3;
    /// Page-size extensions.
    pub const PSE: u64 = 1 << 4;
    /// Physical-address extensions.
    pub const PAE: u64 = 1 << 5;
    /// Machine-check enable.
    pub const MCE: u64 = 1 << 6;
    /// Page-global enable.
    pub const PGE: u64 = 1 << 7;
    /// RDPMC is allowed in user mode; differs from task to task.
    pub const PCE: u64 = 1 << 8;
    /// FXSAVE and SSE are enabled.
    pub const OSFXSR: u64 = 1 << 9;
    /// Unmasked SSE exceptions are enabled.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// User-mode instruction prevention.
    pub const UMIP: u64 = 1 << 11;
    /// Five-level paging is enabled.
    pub const LA57: u64 = 1 << 12;
    /// VMX operation is enabled (Intel).
    pub const VMXE: u64 = 1 << 13;
    /// RDFSBASE, WRFSBASE and their likes are enabled.
    pub const FSGSBASE: u64 = 1 << 16;
    /// Process-context identifiers.
    pub const PCIDE: u64 = 1 << 17;
    /// XSAVE and XCR0 are enabled.
    pub const OSXSAVE: u64 = 1 << 18;
    /// Supervisor-mode execution prevention.
    pub const SMEP: u64 = 1 << 20;
    /// Supervisor-mode access prevention.
    pub const SMAP: u64 = 1 << 21;
    /// User protection keys.
    pub const PKE: u64 = 1 << 22;
    /// Control-flow enforcement. User shadow stacks live in registers that no world switch touches
    /// (APM 18.9); for the kernel's own shadow stack see [`super::s_cet`].
    pub const CET: u64 = 1 << 23;
    /// Flexible return and event delivery.
    pub const FRED: u64 = 1 << 32;

    /// Bits that may be set. SMXE, KL, PKS, UINTR, LASS, LAM_SUP and all future bits are missing,
    /// and therefore refused. VMXE and FRED have codes of their own.
    pub const KNOWN: u64 = VME
        | PVI
        | TSD
        | DE
        | PSE
        | PAE
        | MCE
        | PGE
        | PCE
        | OSFXSR
        | OSXMMEXCPT
        | UMIP
        | LA57
        | FSGSBASE
        | PCIDE
        | OSXSAVE
        | SMEP
        | SMAP
        | PKE
        | CET;
    /// Bits that must be set: long mode's paging.
    pub const REQUIRED: u64 = PAE;
    /// Bits in which CPUs may differ. TSD and PCE change with the task. PSE means nothing in long
    /// mode (APM 5.3), and Linux sets it only on the CPU that boots.
    pub const MAY_DIFFER: u64 = TSD | PCE | PSE;
}

/// Bits of EFER, MSR C000_0080h (APM 3.1.7).
pub mod efer {
    /// SYSCALL and SYSRET are enabled.
    pub const SCE: u64 = 1 << 0;
    /// Long mode is enabled.
    pub const LME: u64 = 1 << 8;
    /// Long mode is active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute pages are enabled.
    pub const NXE: u64 = 1 << 11;
    /// SVM is on.
    pub const SVME: u64 = 1 << 12;
    /// FXSAVE may skip the SSE registers.
    pub const FFXSR: u64 = 1 << 14;
    /// Translation-cache extension.
    pub const TCE: u64 = 1 << 15;
    /// Long mode checks segment limits.
    pub const LMSLE: u64 = 1 << 13;
    /// MCOMMIT is enabled in user mode.
    pub const MCOMMIT: u64 = 1 << 17;
    /// WBINVD is interruptible.
    pub const INTWB: u64 = 1 << 18;
    /// Upper address bits are ignored.
    pub const UAIE: u64 = 1 << 20;
    /// IBRS applies automatically.
    pub const AUTOIBRS: u64 = 1 << 21;

    /// Bits that may be set. [`FOREIGN`] and all future bits are missing, and therefore refused.
    /// SVME has a code of its own.
    pub const KNOWN: u64 = SCE | LME | LMA | NXE | FFXSR | TCE | INTWB | AUTOIBRS;
    /// Bits that the manual defines and Mercury does not carry over: a kernel that sets one stays
    /// native.
    pub const FOREIGN: u64 = LMSLE | MCOMMIT | UAIE;
    /// Bits that must be set: the hypervisor's own tables use no-execute.
    pub const REQUIRED: u64 = LME | LMA | NXE;
}

/// Extended-state components (APM 11.5.2; volume 3, E.3.8). No world switch touches any of them.
/// The lists name the components for which that was considered.
pub mod xstate {
    /// Components of XCR0: x87, SSE, AVX, MPX (3, 4), AVX-512 (5 to 7), PKRU (9), AMX (17, 18).
    pub const XCR0_KNOWN: u64 = 0b111 | 0b11 << 3 | 0b111 << 5 | 1 << 9 | 0b11 << 17;
    /// Components of XSS: PASID (10), user and supervisor shadow-stack state (11, 12), last-branch
    /// records (15).
    pub const XSS_KNOWN: u64 = 1 << 10 | 0b11 << 11 | 1 << 15;
}

/// Bits of S_CET, MSR 6A2h (SDM volume 1, "Control-flow enforcement technology").
pub mod s_cet {
    /// The kernel's indirect branches are tracked. Entries and exits of VMX carry that state. SVM
    /// has no field for it, and AMD's processors have no tracking.
    pub const ENDBR_EN: u64 = 1 << 2;
}

/// Bits of RFLAGS (APM 3.1.6).
pub mod rflags {
    /// Each instruction ends in a debug exception.
    pub const TF: u64 = 1 << 8;
}

/// Bits of VM_CR, MSR C001_0114h (APM 15.30.1).
pub mod vm_cr {
    /// INIT is turned into #SX.
    pub const R_INIT: u64 = 1 << 1;
    /// SVMDIS is locked until reset.
    pub const LOCK: u64 = 1 << 3;
    /// EFER.SVME cannot be set.
    pub const SVMDIS: u64 = 1 << 4;
}

/// Bits of SYSCFG, MSR C001_0010h (APM 3.2.1).
pub mod syscfg {
    /// Memory encryption is enabled: physical addresses lose bits (APM 7.10.1).
    pub const MEM_ENCRYPTION: u64 = 1 << 23;
    /// Secure nested paging is enabled (APM 15.36.2).
    pub const SNP: u64 = 1 << 24;
}

/// Bits of MCG_STATUS, MSR 17Ah (APM 9.3.1).
pub mod mcg_status {
    /// A machine check is in progress.
    pub const MCIP: u64 = 1 << 2;
}

/// Bits of MTRRdefType, MSR 2FFh (APM 7.7.2).
pub mod mtrr_def_type {
    /// MTRRs are enabled.
    pub const E: u64 = 1 << 11;
}

/// Bits of DEBUGCTL, MSR 1D9h (APM 13.1.1.6).
pub mod debugctl {
    /// Last branches are recorded.
    pub const LBR: u64 = 1 << 0;
    /// Single-stepping stops at branches only.
    pub const BTF: u64 = 1 << 1;
    /// Branch-trace messages, and their storage in memory (Intel; SDM volume 3, "Branch trace
    /// store").
    pub const BTS: u64 = 0b11 << 6;
    /// Bits that a processor may have: LBR, BTF, bus lock detection, TR to FREEZE_WHILE_SMM and RTM
    /// (SDM volume 4, table 2-2).
    pub const KNOWN: u64 = LBR | BTF | 1 << 2 | BTS | 0x7F << 8 | 1 << 15;
}

/// Bits of DR7 (APM 13.1.1.4).
pub mod dr7 {
    /// L0 to G3: a breakpoint is armed.
    pub const ARMED: u64 = 0xff;
    /// General detect: an access to a debug register faults.
    pub const GD: u64 = 1 << 13;
}

/// Bits of IA32_FEATURE_CONTROL, MSR 3Ah (SDM volume 4, table 2-2).
pub mod feature_control {
    /// The register is locked until reset. VMXON faults while it is not.
    pub const LOCK: u64 = 1 << 0;
    /// VMXON is allowed outside of SMX.
    pub const VMX_OUTSIDE_SMX: u64 = 1 << 2;
}

/// Bits of IA32_VMX_MISC, MSR 485h (SDM volume 3, appendix A.6).
pub mod vmx_misc {
    /// Processor trace may run in VMX operation.
    pub const TRACE_IN_VMX: u64 = 1 << 14;
}

/// Bits of IA32_RTIT_CTL, MSR 570h (SDM volume 4, table 2-2).
pub mod rtit_ctl {
    /// Processor trace is running.
    pub const TRACE_EN: u64 = 1 << 0;
}

/// Feature bits of CPUID (APM volume 3, appendix E; SDM volume 2, CPUID).
pub mod cpuid {
    /// Leaf 1 ECX: VMX exists.
    pub const LEAF1_ECX_VMX: u32 = 1 << 5;
    /// Leaf 1 ECX: a hypervisor is present.
    pub const LEAF1_ECX_HYPERVISOR: u32 = 1 << 31;
    /// Leaf 1 EDX: MTRRs exist.
    pub const LEAF1_EDX_MTRR: u32 = 1 << 12;
    /// Leaf 1 EDX: machine-check architecture.
    pub const LEAF1_EDX_MCA: u32 = 1 << 14;
    /// Leaf 7 EBX: INVPCID exists.
    pub const LEAF7_EBX_INVPCID: u32 = 1 << 10;
    /// Leaf 7 ECX: TPAUSE, UMONITOR, UMWAIT.
    pub const LEAF7_ECX_WAITPKG: u32 = 1 << 5;
    /// Leaf 7 ECX: RDPID exists.
    pub const LEAF7_ECX_RDPID: u32 = 1 << 22;
    /// Leaf 7 EDX: PCONFIG exists.
    pub const LEAF7_EDX_PCONFIG: u32 = 1 << 18;
    /// Leaf 7, subleaf 1, EAX: RDMSRLIST and WRMSRLIST.
    pub const LEAF71_EAX_MSRLIST: u32 = 1 << 27;
    /// Leaf 7, subleaf 1, EDX: URDMSR and UWRMSR.
    pub const LEAF71_EDX_USER_MSR: u32 = 1 << 15;
    /// Leaf 7 ECX: shadow stacks exist.
    pub const LEAF7_ECX_CET_SS: u32 = 1 << 7;
    /// Leaf Dh, subleaf 1, EAX: XSAVES and XSS.
    pub const LEAFD1_EAX_XSAVES: u32 = 1 << 3;
    /// Leaf 8000_0001 ECX: SVM.
    pub const EXT1_ECX_SVM: u32 = 1 << 2;
    /// Leaf 8000_0001 EDX: RDTSCP.
    pub const EXT1_EDX_RDTSCP: u32 = 1 << 27;
    /// Leaf 8000_0001 EDX: 1 GiB pages.
    pub const EXT1_EDX_PAGE_1G: u32 = 1 << 26;
    /// Leaf 8000_000A EDX: nested paging.
    pub const SVM_EDX_NP: u32 = 1 << 0;
    /// Leaf 8000_000A EDX: the next instruction's address is saved.
    pub const SVM_EDX_NRIPS: u32 = 1 << 3;
    /// Leaf 8000_000A EDX: the TSC ratio MSR exists.
    pub const SVM_EDX_TSC_RATE: u32 = 1 << 4;
    /// Leaf 8000_000A EDX: flushes by address-space identifier.
    pub const SVM_EDX_FLUSH_BY_ASID: u32 = 1 << 6;
    /// Leaf 8000_000A EDX: VMRUN swaps supervisor shadow-stack state.
    pub const SVM_EDX_SSS: u32 = 1 << 19;
    /// Leaf 8000_000A EDX: SPEC_CTRL is virtualized.
    pub const SVM_EDX_SPEC_CTRL: u32 = 1 << 20;
    /// Leaf 8000_001F EAX: SME exists.
    pub const ENC_EAX_SME: u32 = 1 << 0;
    /// Leaf 8000_001F EAX: SEV exists.
    pub const ENC_EAX_SEV: u32 = 1 << 1;
}
