//! The identity and the state of one processor: the input of every preflight check, and both sides
//! of the comparison before and after a switch.
//!
//! Sources of the layouts: MSRs in AMD's Architecture Programmer's Manual (APM) volume 2, appendix
//! A, and in Intel's Software Developer's Manual (SDM) volume 4; CPUID leaves in APM volume 3,
//! appendix E, and SDM volume 2, "CPUID"; VMX capabilities in SDM volume 3, appendix A. Registers
//! are raw, as the processor returns them.

use crate::Header;

/// Bits of `CpuFacts::readable`, one for each MSR that a processor may lack. A clear bit: reading
/// it faulted.
pub mod readable {
    /// VM_CR (C001_0114h): SVM enabled, locked, INIT redirected (AMD).
    pub const VM_CR: u64 = 1 << 0;
    /// VM_HSAVE_PA (C001_0117h): host-physical address of the host save area (AMD).
    pub const VM_HSAVE_PA: u64 = 1 << 1;
    /// SYSCFG (C001_0010h): memory encryption and MTRR options (AMD).
    pub const SYSCFG: u64 = 1 << 2;
    /// SPEC_CTRL (48h): speculation controls.
    pub const SPEC_CTRL: u64 = 1 << 3;
    /// TSC_RATIO (C000_0104h): scale of a guest's TSC (AMD).
    pub const TSC_RATIO: u64 = 1 << 4;
    /// DEBUGCTL (1D9h): recording of branches.
    pub const DEBUGCTL: u64 = 1 << 5;
    /// S_CET (6A2h): control-flow enforcement of the supervisor.
    pub const S_CET: u64 = 1 << 6;
    /// ISST_ADDR (6A8h): table of interrupt shadow stacks.
    pub const ISST_ADDR: u64 = 1 << 7;
    /// XSS (DA0h): supervisor components of the extended state.
    pub const XSS: u64 = 1 << 8;
    /// MCG_STATUS (17Ah): state of a machine check.
    pub const MCG_STATUS: u64 = 1 << 9;
    /// PAT (277h): page attribute table.
    pub const PAT: u64 = 1 << 10;
    /// MTRRdefType (2FFh) and all other MTRRs, which the digest covers.
    pub const MTRR: u64 = 1 << 11;
    /// TSC_AUX (C000_0103h): the value that RDTSCP returns in ECX.
    pub const TSC_AUX: u64 = 1 << 12;
    /// MCA_CTL of SMCA bank 0 (C000_2000h): scalable machine checks (AMD).
    pub const SMCA: u64 = 1 << 13;
    /// HWCR (C001_0015h): hardware configuration (AMD).
    pub const HWCR: u64 = 1 << 14;
    /// Revision of the microcode (8Bh).
    pub const MICROCODE: u64 = 1 << 15;
    /// IA32_FEATURE_CONTROL (3Ah): VMX enabled and locked (Intel).
    pub const FEATURE_CONTROL: u64 = 1 << 16;
    /// The capability MSRs of VMX (480h to 492h), as far as CPUID and IA32_VMX_BASIC announce them
    /// (Intel).
    pub const VMX: u64 = 1 << 17;
    /// IA32_RTIT_CTL (570h): processor trace (Intel).
    pub const RTIT_CTL: u64 = 1 << 18;
    /// IA32_PEBS_ENABLE (3F1h): event-based sampling (Intel).
    pub const PEBS_ENABLE: u64 = 1 << 19;
}

/// Bits of `CpuFacts::system`: properties of the running kernel.
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
    /// KVM is loaded, and may keep its hold on the hardware while CPUs are attached (AMD).
    pub const KVM_MAY: u64 = 1 << 5;
    /// The kernel was started without mitigations of its processor's vulnerabilities
    /// (`mitigations=off`).
    pub const MITIGATIONS_OFF: u64 = 1 << 6;
}

/// The four registers that CPUID returns for one leaf.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidLeaf {
    /// Value of EAX after CPUID.
    pub eax: u32,
    /// Value of EBX after CPUID.
    pub ebx: u32,
    /// Value of ECX after CPUID.
    pub ecx: u32,
    /// Value of EDX after CPUID.
    pub edx: u32,
}

/// A descriptor-table register (GDTR or IDTR).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRegister {
    /// Linear address of the table: a kernel virtual address.
    pub base_virt: u64,
    /// Limit of the table: its size in bytes less one, at most FFFFh.
    pub limit: u64,
}

/// The registers and CPUID leaves of one CPU. Leaves and MSRs that the CPU lacks are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuFacts {
    /// Size and version of this structure.
    pub header: Header,
    /// In: the CPU to read, by Linux's number, and `MERCURY_FACTS_REGISTERS`. Out: the CPU.
    pub cpu: u32,
    /// Initial identifier of the local APIC.
    pub apic_id: u32,
    /// Bits of [`readable`]: the MSRs that could be read.
    pub readable: u64,
    /// Bits of [`system`]: properties of the kernel.
    pub system: u64,
    /// Host-physical address of the last byte that RAM or a device occupies, by the kernel's
    /// resource tree.
    pub iomem_end_phys: u64,
    /// Linux's version code: major << 16 | minor << 8.
    pub kernel_version: u64,

    /// CPUID 0: highest leaf and the vendor's name.
    pub cpuid_0: CpuidLeaf,
    /// CPUID 1: family, model and features. EBX holds the APIC identifier and is not compared
    /// between CPUs.
    pub cpuid_1: CpuidLeaf,
    /// CPUID 7, subleaf 0: extended features.
    pub cpuid_7_0: CpuidLeaf,
    /// CPUID 7, subleaf 1: further extended features.
    pub cpuid_7_1: CpuidLeaf,
    /// CPUID Dh, subleaf 1: properties of XSAVE.
    pub cpuid_d_1: CpuidLeaf,
    /// CPUID 4000_0000h: name of a hypervisor below, if CPUID 1 ECX bit 31 announces one.
    pub cpuid_4000_0000: CpuidLeaf,
    /// CPUID 8000_0000h: highest extended leaf.
    pub cpuid_8000_0000: CpuidLeaf,
    /// CPUID 8000_0001h: extended features, among them SVM.
    pub cpuid_8000_0001: CpuidLeaf,
    /// CPUID 8000_0008h: address widths.
    pub cpuid_8000_0008: CpuidLeaf,
    /// CPUID 8000_000Ah: revision and features of SVM (AMD).
    pub cpuid_8000_000a: CpuidLeaf,
    /// CPUID 8000_001Fh: features of memory encryption (AMD).
    pub cpuid_8000_001f: CpuidLeaf,
    /// CPUID 8000_0021h: further extended features (AMD).
    pub cpuid_8000_0021: CpuidLeaf,

    /// CR0 while the driver reads it.
    pub cr0: u64,
    /// CR3 of the task that the reading interrupts: host-physical root of its page tables, and
    /// flags.
    pub cr3: u64,
    /// CR4 while the driver reads it.
    pub cr4: u64,
    /// XCR0: enabled components of the extended state. Zero where CR4.OSXSAVE is clear.
    pub xcr0: u64,
    /// DR6: status of debug exceptions.
    pub dr6: u64,
    /// DR7: armed breakpoints.
    pub dr7: u64,
    /// RFLAGS in the driver's reading function.
    pub rflags: u64,
    /// GDTR: the global descriptor table.
    pub gdtr: TableRegister,
    /// IDTR: the interrupt descriptor table.
    pub idtr: TableRegister,
    /// Selector in TR, bits 15:0.
    pub tr: u64,
    /// Selector in LDTR, bits 15:0.
    pub ldtr: u64,
    /// Selector in CS, bits 15:0.
    pub cs: u64,
    /// Selector in SS, bits 15:0.
    pub ss: u64,
    /// Limit in bytes of the task-state segment, as LSL returns it for the selector in TR.
    pub tr_limit: u64,

    /// EFER (C000_0080h): long mode, no-execute and SVM.
    pub efer: u64,
    /// STAR (C000_0081h): selectors of SYSCALL.
    pub star: u64,
    /// LSTAR (C000_0082h): kernel virtual address of SYSCALL's entry.
    pub lstar: u64,
    /// CSTAR (C000_0083h): the same for compatibility mode.
    pub cstar: u64,
    /// SFMASK (C000_0084h): flags that SYSCALL clears.
    pub sfmask: u64,
    /// SYSENTER_CS (174h): selector of SYSENTER.
    pub sysenter_cs: u64,
    /// SYSENTER_ESP (175h): kernel virtual address of its stack.
    pub sysenter_esp: u64,
    /// SYSENTER_EIP (176h): kernel virtual address of its entry.
    pub sysenter_eip: u64,
    /// Base of GS (C000_0101h): the kernel's per-CPU base, virtual.
    pub gs_base: u64,
    /// APIC_BASE (1Bh): mode and host-physical address of the local APIC.
    pub apic_base: u64,
    /// PAT (277h): eight memory types.
    pub pat: u64,
    /// VM_CR (C001_0114h; APM volume 2, section 15.30.1).
    pub vm_cr: u64,
    /// VM_HSAVE_PA (C001_0117h; APM volume 2, section 15.30.4): host-physical.
    pub vm_hsave_pa: u64,
    /// SYSCFG (C001_0010h), zero on Intel.
    pub syscfg: u64,
    /// SPEC_CTRL (48h): speculation controls.
    pub spec_ctrl: u64,
    /// TSC_RATIO (C000_0104h): 1.0 is 1 << 32 (AMD).
    pub tsc_ratio: u64,
    /// DEBUGCTL (1D9h): recording of branches.
    pub debugctl: u64,
    /// S_CET (6A2h): control-flow enforcement of the supervisor.
    pub s_cet: u64,
    /// ISST_ADDR (6A8h): table of interrupt shadow stacks, virtual.
    pub isst_addr: u64,
    /// XSS (DA0h): supervisor components of the extended state.
    pub xss: u64,
    /// MCG_STATUS (17Ah): bit 2 is set during a machine check.
    pub mcg_status: u64,
    /// TSC_AUX (C000_0103h): Linux keeps the CPU's number there.
    pub tsc_aux: u64,
    /// HWCR (C001_0015h): hardware configuration (AMD).
    pub hwcr: u64,
    /// Revision of the microcode, as MSR 8Bh returns it.
    pub microcode: u64,
    /// MCA_CTL of SMCA bank 0 (C000_2000h; AMD).
    pub smca_ctl0: u64,
    /// IA32_FEATURE_CONTROL (3Ah): lock and enable bits of VMX (Intel).
    pub feature_control: u64,
    /// MTRRdefType (2FFh): default memory type, and bits that enable the MTRRs.
    pub mtrr_def_type: u64,
    /// FNV-1a digest over all MTRRs, by which CPUs are compared.
    pub mtrr_digest: u64,

    /// IA32_VMX_BASIC (480h; Intel, SDM volume 3, appendix A.1).
    pub vmx_basic: u64,
    /// IA32_VMX_TRUE_PINBASED_CTLS (48Dh), or IA32_VMX_PINBASED_CTLS (481h) where IA32_VMX_BASIC
    /// bit 55 is clear. Bits 31:0: controls that must be 1; bits 63:32: controls that may be 1
    /// (appendix A.3.1).
    pub vmx_pin_controls: u64,
    /// IA32_VMX_TRUE_PROCBASED_CTLS (48Eh) or IA32_VMX_PROCBASED_CTLS (482h), by the same rule
    /// (appendix A.3.2).
    pub vmx_primary_controls: u64,
    /// IA32_VMX_PROCBASED_CTLS2 (48Bh; appendix A.3.3).
    pub vmx_secondary_controls: u64,
    /// IA32_VMX_PROCBASED_CTLS3 (492h; appendix A.3.4): each set bit may be 1.
    pub vmx_tertiary_controls: u64,
    /// IA32_VMX_TRUE_EXIT_CTLS (48Fh) or IA32_VMX_EXIT_CTLS (483h; appendix A.4).
    pub vmx_exit_controls: u64,
    /// IA32_VMX_TRUE_ENTRY_CTLS (490h) or IA32_VMX_ENTRY_CTLS (484h; appendix A.5).
    pub vmx_entry_controls: u64,
    /// IA32_VMX_MISC (485h; appendix A.6).
    pub vmx_misc: u64,
    /// IA32_VMX_CR0_FIXED0 (486h; appendix A.7): bits of CR0 that must be 1.
    pub vmx_cr0_fixed0: u64,
    /// IA32_VMX_CR0_FIXED1 (487h; appendix A.7): bits of CR0 that may be 1.
    pub vmx_cr0_fixed1: u64,
    /// IA32_VMX_CR4_FIXED0 (488h; appendix A.8): bits of CR4 that must be 1.
    pub vmx_cr4_fixed0: u64,
    /// IA32_VMX_CR4_FIXED1 (489h; appendix A.8): bits of CR4 that may be 1.
    pub vmx_cr4_fixed1: u64,
    /// IA32_VMX_EPT_VPID_CAP (48Ch; appendix A.10).
    pub vmx_ept_vpid: u64,
    /// IA32_RTIT_CTL (570h): bit 0 is set while processor trace runs (Intel).
    pub rtit_ctl: u64,
    /// IA32_PEBS_ENABLE (3F1h), or 0 on a CPU without PEBS (Intel).
    pub pebs_enable: u64,
}
