//! What one processor is and what state it is in: the input of every preflight check, and both
//! sides of the before/after comparison.

use crate::Header;

/// `CpuFacts::readable` bit of each MSR that may be missing; bit clear: reading it faulted.
pub mod readable {
    /// VM_CR (C001_0114h).
    pub const VM_CR: u64 = 1 << 0;
    /// VM_HSAVE_PA (C001_0117h).
    pub const VM_HSAVE_PA: u64 = 1 << 1;
    /// SYSCFG (C001_0010h).
    pub const SYSCFG: u64 = 1 << 2;
    /// SPEC_CTRL (48h).
    pub const SPEC_CTRL: u64 = 1 << 3;
    /// TSC_RATIO (C000_0104h).
    pub const TSC_RATIO: u64 = 1 << 4;
    /// DEBUGCTL (1D9h).
    pub const DEBUGCTL: u64 = 1 << 5;
    /// S_CET (6A2h).
    pub const S_CET: u64 = 1 << 6;
    /// ISST_ADDR (6A8h).
    pub const ISST_ADDR: u64 = 1 << 7;
    /// XSS (DA0h).
    pub const XSS: u64 = 1 << 8;
    /// MCG_STATUS (17Ah).
    pub const MCG_STATUS: u64 = 1 << 9;
    /// PAT (277h).
    pub const PAT: u64 = 1 << 10;
    /// MTRRdefType and the rest of the MTRRs.
    pub const MTRR: u64 = 1 << 11;
    /// TSC_AUX (C000_0103h).
    pub const TSC_AUX: u64 = 1 << 12;
    /// MCA_CTL of SMCA bank 0 (C000_2000h).
    pub const SMCA: u64 = 1 << 13;
    /// HWCR (C001_0015h).
    pub const HWCR: u64 = 1 << 14;
    /// MICROCODE revision (8Bh).
    pub const MICROCODE: u64 = 1 << 15;
    /// IA32_FEATURE_CONTROL (3Ah).
    pub const FEATURE_CONTROL: u64 = 1 << 16;
    /// The capability MSRs of VMX (480h to 492h), those that CPUID and IA32_VMX_BASIC promise.
    pub const VMX: u64 = 1 << 17;
    /// IA32_RTIT_CTL (570h).
    pub const RTIT_CTL: u64 = 1 << 18;
    /// IA32_PEBS_ENABLE (3F1h).
    pub const PEBS_ENABLE: u64 = 1 << 19;
}

/// `CpuFacts::system` bits: what the kernel says of itself.
pub mod system {
    /// Page-table isolation is on (X86_FEATURE_PTI).
    pub const PTI: u64 = 1 << 0;
    /// The kernel runs with memory encryption (`sme_me_mask` is not zero).
    pub const SME: u64 = 1 << 1;
    /// The kernel runs as a Xen guest.
    pub const PRIVILEGED_LAYER: u64 = 1 << 2;
    /// The kernel uses INVLPGB for TLB shootdowns.
    pub const INVLPGB: u64 = 1 << 3;
    /// The kernel relies on the return predictor's own protection (ERAPS).
    pub const ERAPS: u64 = 1 << 4;
    /// KVM is loaded, and what it has of the hardware it may keep (AMD).
    pub const KVM_MAY: u64 = 1 << 5;
    /// The kernel was started without mitigations of its processor's vulnerabilities (`mitigations=off`).
    pub const MITIGATIONS_OFF: u64 = 1 << 6;
}

/// One CPUID leaf as the processor returned it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidLeaf {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

/// A descriptor-table register: linear base address and limit in bytes minus one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRegister {
    /// Linear address.
    pub base_virt: u64,
    /// Limit.
    pub limit: u64,
}

/// Everything that is read of one CPU. Leaves and MSRs that the CPU lacks are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuFacts {
    /// Size and version.
    pub header: Header,
    /// In: the CPU to read. Linux's number.
    pub cpu: u32,
    /// Initial local APIC identifier.
    pub apic_id: u32,
    /// [`readable`] bits.
    pub readable: u64,
    /// [`system`] bits.
    pub system: u64,
    /// Highest address in use by RAM or devices according to the kernel's resource tree, inclusive,
    /// host-physical.
    pub iomem_end_phys: u64,
    /// Linux version code: major << 16 | minor << 8.
    pub kernel_version: u64,

    /// CPUID 0.
    pub cpuid_0: CpuidLeaf,
    /// CPUID 1 (EBX holds the APIC identifier and is not compared between CPUs).
    pub cpuid_1: CpuidLeaf,
    /// CPUID 7, subleaf 0.
    pub cpuid_7_0: CpuidLeaf,
    /// CPUID 7, subleaf 1.
    pub cpuid_7_1: CpuidLeaf,
    /// CPUID Dh, subleaf 1.
    pub cpuid_d_1: CpuidLeaf,
    /// CPUID 4000_0000h, if CPUID 1 ECX bit 31 is set.
    pub cpuid_4000_0000: CpuidLeaf,
    /// CPUID 8000_0000h.
    pub cpuid_8000_0000: CpuidLeaf,
    /// CPUID 8000_0001h.
    pub cpuid_8000_0001: CpuidLeaf,
    /// CPUID 8000_0008h.
    pub cpuid_8000_0008: CpuidLeaf,
    /// CPUID 8000_000Ah: SVM.
    pub cpuid_8000_000a: CpuidLeaf,
    /// CPUID 8000_001Fh: memory encryption.
    pub cpuid_8000_001f: CpuidLeaf,
    /// CPUID 8000_0021h.
    pub cpuid_8000_0021: CpuidLeaf,

    /// CR0.
    pub cr0: u64,
    /// CR3 of whatever was running.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// XCR0, zero where CR4.OSXSAVE is clear.
    pub xcr0: u64,
    /// DR6.
    pub dr6: u64,
    /// DR7.
    pub dr7: u64,
    /// RFLAGS in the reading function.
    pub rflags: u64,
    /// GDTR.
    pub gdtr: TableRegister,
    /// IDTR.
    pub idtr: TableRegister,
    /// TR selector.
    pub tr: u64,
    /// LDTR selector.
    pub ldtr: u64,
    /// CS selector.
    pub cs: u64,
    /// SS selector.
    pub ss: u64,
    /// TSS limit as LSL reports it for the TR selector.
    pub tr_limit: u64,

    /// EFER (C000_0080h).
    pub efer: u64,
    /// STAR.
    pub star: u64,
    /// LSTAR.
    pub lstar: u64,
    /// CSTAR.
    pub cstar: u64,
    /// SFMASK.
    pub sfmask: u64,
    /// SYSENTER_CS.
    pub sysenter_cs: u64,
    /// SYSENTER_ESP.
    pub sysenter_esp: u64,
    /// SYSENTER_EIP.
    pub sysenter_eip: u64,
    /// GS base (the kernel's per-CPU base).
    pub gs_base: u64,
    /// APIC_BASE (1Bh).
    pub apic_base: u64,
    /// PAT.
    pub pat: u64,
    /// VM_CR.
    pub vm_cr: u64,
    /// VM_HSAVE_PA.
    pub vm_hsave_pa: u64,
    /// SYSCFG.
    pub syscfg: u64,
    /// SPEC_CTRL.
    pub spec_ctrl: u64,
    /// TSC_RATIO.
    pub tsc_ratio: u64,
    /// DEBUGCTL.
    pub debugctl: u64,
    /// S_CET.
    pub s_cet: u64,
    /// ISST_ADDR.
    pub isst_addr: u64,
    /// XSS.
    pub xss: u64,
    /// MCG_STATUS.
    pub mcg_status: u64,
    /// TSC_AUX.
    pub tsc_aux: u64,
    /// HWCR.
    pub hwcr: u64,
    /// Microcode revision.
    pub microcode: u64,
    /// MCA_CTL of SMCA bank 0.
    pub smca_ctl0: u64,
    /// IA32_FEATURE_CONTROL (Intel).
    pub feature_control: u64,
    /// MTRRdefType (2FFh).
    pub mtrr_def_type: u64,
    /// FNV-1a digest over all MTRRs, to compare CPUs.
    pub mtrr_digest: u64,

    /// IA32_VMX_BASIC (480h; Intel).
    pub vmx_basic: u64,
    /// IA32_VMX_TRUE_PINBASED_CTLS (48Dh), or IA32_VMX_PINBASED_CTLS (481h) where IA32_VMX_BASIC bit 55 is clear:
    /// bits 31:0 must be 1, bits 63:32 may be 1.
    pub vmx_pin_controls: u64,
    /// IA32_VMX_TRUE_PROCBASED_CTLS (48Eh) or IA32_VMX_PROCBASED_CTLS (482h).
    pub vmx_primary_controls: u64,
    /// IA32_VMX_PROCBASED_CTLS2 (48Bh).
    pub vmx_secondary_controls: u64,
    /// IA32_VMX_PROCBASED_CTLS3 (492h): each bit may be 1.
    pub vmx_tertiary_controls: u64,
    /// IA32_VMX_TRUE_EXIT_CTLS (48Fh) or IA32_VMX_EXIT_CTLS (483h).
    pub vmx_exit_controls: u64,
    /// IA32_VMX_TRUE_ENTRY_CTLS (490h) or IA32_VMX_ENTRY_CTLS (484h).
    pub vmx_entry_controls: u64,
    /// IA32_VMX_MISC (485h).
    pub vmx_misc: u64,
    /// IA32_VMX_CR0_FIXED0 (486h): bits of CR0 that must be 1.
    pub vmx_cr0_fixed0: u64,
    /// IA32_VMX_CR0_FIXED1 (487h): bits of CR0 that may be 1.
    pub vmx_cr0_fixed1: u64,
    /// IA32_VMX_CR4_FIXED0 (488h): bits of CR4 that must be 1.
    pub vmx_cr4_fixed0: u64,
    /// IA32_VMX_CR4_FIXED1 (489h): bits of CR4 that may be 1.
    pub vmx_cr4_fixed1: u64,
    /// IA32_VMX_EPT_VPID_CAP (48Ch).
    pub vmx_ept_vpid: u64,
    /// IA32_RTIT_CTL (570h): processor trace.
    pub rtit_ctl: u64,
    /// IA32_PEBS_ENABLE (3F1h); 0 where there is none.
    pub pebs_enable: u64,
}
