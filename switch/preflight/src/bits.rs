//! The bits that the checks know, with the section that defines them. APM: AMD64 Architecture
//! Programmer's Manual, volume 2 (and volume 3, appendix E, for CPUID). SDM: Intel's Software Developer's Manual.

/// CR0 (APM 3.1.1).
pub mod cr0 {
    /// Protected mode.
    pub const PE: u64 = 1 << 0;
    /// Monitor coprocessor.
    pub const MP: u64 = 1 << 1;
    /// Extension type, always 1.
    pub const ET: u64 = 1 << 4;
    /// Numeric error.
    pub const NE: u64 = 1 << 5;
    /// Write protect.
    pub const WP: u64 = 1 << 16;
    /// Alignment mask.
    pub const AM: u64 = 1 << 18;
    /// Cache disable.
    pub const CD: u64 = 1 << 30;
    /// Paging.
    pub const PG: u64 = 1 << 31;

    /// What may be set. Not EM or TS: no 64-bit Linux leaves them set, and the hypervisor runs with
    /// the CR0 it found. Not NW or CD: caches are off, so the kernel is in the middle of something.
    pub const KNOWN: u64 = PE | MP | ET | NE | WP | AM | PG;
    /// What must be set: the hypervisor runs with these.
    pub const REQUIRED: u64 = PE | PG | WP;
}

/// CR4 (APM 3.1.3).
pub mod cr4 {
    /// Virtual-8086 extensions.
    pub const VME: u64 = 1 << 0;
    /// Protected-mode virtual interrupts.
    pub const PVI: u64 = 1 << 1;
    /// Time-stamp disable: differs from task to task.
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
    /// RDPMC in user mode: differs from task to task.
    pub const PCE: u64 = 1 << 8;
    /// FXSAVE and SSE.
    pub const OSFXSR: u64 = 1 << 9;
    /// Unmasked SSE exceptions.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// User-mode instruction prevention.
    pub const UMIP: u64 = 1 << 11;
    /// Five-level paging.
    pub const LA57: u64 = 1 << 12;
    /// Intel VMX is on.
    pub const VMXE: u64 = 1 << 13;
    /// RDFSBASE and friends.
    pub const FSGSBASE: u64 = 1 << 16;
    /// Process-context identifiers.
    pub const PCIDE: u64 = 1 << 17;
    /// XSAVE.
    pub const OSXSAVE: u64 = 1 << 18;
    /// Supervisor-mode execution prevention.
    pub const SMEP: u64 = 1 << 20;
    /// Supervisor-mode access prevention.
    pub const SMAP: u64 = 1 << 21;
    /// User protection keys.
    pub const PKE: u64 = 1 << 22;
    /// Control-flow enforcement: user shadow stacks live in registers that no world switch touches (APM
    /// 18.9); for the kernel's own see [`super::s_cet`].
    pub const CET: u64 = 1 << 23;
    /// Flexible return and event delivery.
    pub const FRED: u64 = 1 << 32;

    /// What may be set. Refused by being absent: SMXE, KL, PKS, UINTR, LASS, LAM_SUP and whatever
    /// comes. VMXE and FRED have codes of their own.
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
    /// What must be set: long mode's paging.
    pub const REQUIRED: u64 = PAE;
    /// In what CPUs may differ: TSD and PCE change with the task; PSE means nothing in long mode
    /// (APM 5.3), and Linux sets it only on the CPU that boots.
    pub const MAY_DIFFER: u64 = TSD | PCE | PSE;
}

/// EFER (APM 3.1.7).
pub mod efer {
    /// SYSCALL.
    pub const SCE: u64 = 1 << 0;
    /// Long mode enabled.
    pub const LME: u64 = 1 << 8;
    /// Long mode active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute.
    pub const NXE: u64 = 1 << 11;
    /// SVM is on.
    pub const SVME: u64 = 1 << 12;
    /// Fast FXSAVE.
    pub const FFXSR: u64 = 1 << 14;
    /// Translation-cache extension.
    pub const TCE: u64 = 1 << 15;
    /// Long-mode segment limits.
    pub const LMSLE: u64 = 1 << 13;
    /// MCOMMIT.
    pub const MCOMMIT: u64 = 1 << 17;
    /// Interruptible WBINVD.
    pub const INTWB: u64 = 1 << 18;
    /// Upper-address ignore.
    pub const UAIE: u64 = 1 << 20;
    /// Automatic IBRS.
    pub const AUTOIBRS: u64 = 1 << 21;

    /// What may be set. Refused by being absent: [`FOREIGN`] and whatever comes. SVME has a code of its
    /// own.
    pub const KNOWN: u64 = SCE | LME | LMA | NXE | FFXSR | TCE | INTWB | AUTOIBRS;
    /// What the manual defines and Mercury does not carry: a kernel that sets one runs natively.
    pub const FOREIGN: u64 = LMSLE | MCOMMIT | UAIE;
    /// What must be set: the hypervisor's own tables use no-execute.
    pub const REQUIRED: u64 = LME | LMA | NXE;
}

/// Extended-state components (APM 11.5.2; volume 3, E.3.8). No world switch touches any of them:
/// the list says which ones that was thought about for.
pub mod xstate {
    /// XCR0: x87, SSE, AVX, MPX (3, 4), AVX-512 (5 to 7), PKRU (9), AMX (17, 18).
    pub const XCR0_KNOWN: u64 = 0b111 | 0b11 << 3 | 0b111 << 5 | 1 << 9 | 0b11 << 17;
    /// XSS: PASID (10), user and supervisor shadow-stack state (11, 12), last-branch records (15).
    pub const XSS_KNOWN: u64 = 1 << 10 | 0b11 << 11 | 1 << 15;
}

/// S_CET, MSR 6A2h (SDM volume 1, "Control-flow enforcement technology").
pub mod s_cet {
    /// The kernel's indirect branches are tracked. Entries and exits of VMX carry that; SVM has nothing for it,
    /// and AMD's processors have no tracking.
    pub const ENDBR_EN: u64 = 1 << 2;
}

/// RFLAGS (APM 3.1.6).
pub mod rflags {
    /// Single step.
    pub const TF: u64 = 1 << 8;
}

/// VM_CR, MSR C001_0114h (APM 15.30.1).
pub mod vm_cr {
    /// INIT becomes #SX.
    pub const R_INIT: u64 = 1 << 1;
    /// SVMDIS is locked.
    pub const LOCK: u64 = 1 << 3;
    /// EFER.SVME cannot be set.
    pub const SVMDIS: u64 = 1 << 4;
}

/// SYSCFG, MSR C001_0010h (APM 3.2.1).
pub mod syscfg {
    /// Memory encryption is enabled: physical addresses get narrower (APM 7.10.1).
    pub const MEM_ENCRYPTION: u64 = 1 << 23;
    /// Secure nested paging is enabled (APM 15.36.2).
    pub const SNP: u64 = 1 << 24;
}

/// MCG_STATUS, MSR 17Ah (APM 9.3.1).
pub mod mcg_status {
    /// Machine check in progress.
    pub const MCIP: u64 = 1 << 2;
}

/// MTRRdefType, MSR 2FFh (APM 7.7.2).
pub mod mtrr_def_type {
    /// MTRRs are enabled.
    pub const E: u64 = 1 << 11;
}

/// DEBUGCTL, MSR 1D9h (APM 13.1.1.6).
pub mod debugctl {
    /// Last-branch recording.
    pub const LBR: u64 = 1 << 0;
    /// Single step on branches.
    pub const BTF: u64 = 1 << 1;
    /// Intel: branch-trace messages, and their storage in memory (SDM volume 3, "Branch trace store").
    pub const BTS: u64 = 0b11 << 6;
    /// All that a processor may have: LBR, BTF, bus lock detection, TR to FREEZE_WHILE_SMM and RTM (SDM volume 4,
    /// table 2-2).
    pub const KNOWN: u64 = LBR | BTF | 1 << 2 | BTS | 0x7F << 8 | 1 << 15;
}

/// DR7 (APM 13.1.1.4).
pub mod dr7 {
    /// L0 to G3: any breakpoint is armed.
    pub const ARMED: u64 = 0xff;
    /// General detect.
    pub const GD: u64 = 1 << 13;
}

/// IA32_FEATURE_CONTROL, MSR 3Ah (SDM volume 4, table 2-2).
pub mod feature_control {
    /// The register is locked until reset; VMXON faults before.
    pub const LOCK: u64 = 1 << 0;
    /// VMXON works outside of SMX.
    pub const VMX_OUTSIDE_SMX: u64 = 1 << 2;
}

/// IA32_VMX_MISC, MSR 485h (SDM volume 3, appendix A.6).
pub mod vmx_misc {
    /// Processor trace may run in VMX operation.
    pub const TRACE_IN_VMX: u64 = 1 << 14;
}

/// IA32_RTIT_CTL, MSR 570h (SDM volume 4, table 2-2).
pub mod rtit_ctl {
    /// A trace is running.
    pub const TRACE_EN: u64 = 1 << 0;
}

/// CPUID feature bits (APM volume 3, appendix E; SDM volume 2, CPUID).
pub mod cpuid {
    /// Leaf 1 ECX: VMX.
    pub const LEAF1_ECX_VMX: u32 = 1 << 5;
    /// Leaf 1 ECX: a hypervisor is present.
    pub const LEAF1_ECX_HYPERVISOR: u32 = 1 << 31;
    /// Leaf 1 EDX: MTRRs.
    pub const LEAF1_EDX_MTRR: u32 = 1 << 12;
    /// Leaf 1 EDX: machine-check architecture.
    pub const LEAF1_EDX_MCA: u32 = 1 << 14;
    /// Leaf 7 EBX: INVPCID.
    pub const LEAF7_EBX_INVPCID: u32 = 1 << 10;
    /// Leaf 7 ECX: TPAUSE, UMONITOR, UMWAIT.
    pub const LEAF7_ECX_WAITPKG: u32 = 1 << 5;
    /// Leaf 7 ECX: RDPID.
    pub const LEAF7_ECX_RDPID: u32 = 1 << 22;
    /// Leaf 7 EDX: PCONFIG.
    pub const LEAF7_EDX_PCONFIG: u32 = 1 << 18;
    /// Leaf 7, subleaf 1, EAX: RDMSRLIST and WRMSRLIST.
    pub const LEAF71_EAX_MSRLIST: u32 = 1 << 27;
    /// Leaf 7, subleaf 1, EDX: URDMSR and UWRMSR.
    pub const LEAF71_EDX_USER_MSR: u32 = 1 << 15;
    /// Leaf 7 ECX: shadow stacks.
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
    /// Leaf 8000_001F EAX: SME.
    pub const ENC_EAX_SME: u32 = 1 << 0;
    /// Leaf 8000_001F EAX: SEV.
    pub const ENC_EAX_SEV: u32 = 1 << 1;
}
