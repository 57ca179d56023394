//! Facts of good machines, for tests: an EPYC of family 19h and a Xeon of Ice Lake's kind, under Debian's
//! 6.1.

use mercury_abi::{
    Header,
    facts::{CpuFacts, CpuidLeaf, TableRegister, readable},
};

const fn leaf(eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidLeaf {
    CpuidLeaf { eax, ebx, ecx, edx }
}

/// Returns the facts of CPU `cpu` of an EPYC: every check passes, and none makes a note.
#[must_use]
pub fn good_epyc(cpu: u32) -> CpuFacts {
    CpuFacts {
        header: Header::of::<CpuFacts>(),
        cpu,
        apic_id: cpu * 2,
        readable: 0xffff,
        system: 0,
        iomem_end_phys: 0x107f_ffff_ffff,
        kernel_version: 6 << 16 | 1 << 8,
        cpuid_0: leaf(0x10, 0x6874_7541, 0x444d_4163, 0x6974_6e65),
        cpuid_1: leaf(0x00a0_0f11, cpu << 25, 0x7efa_320b, 0x178b_fbff),
        cpuid_7_0: leaf(0, 0x219c_95a9, 0x0040_069c, 0x10),
        cpuid_d_1: leaf(0xf, 0x358, 0x1800, 0),
        cpuid_8000_0000: leaf(0x8000_0023, 0x6874_7541, 0x444d_4163, 0x6974_6e65),
        cpuid_8000_0001: leaf(0x00a0_0f11, 0x4000_0000, 0x75c2_37ff, 0x2fd3_fbff),
        cpuid_8000_0008: leaf(0x3030, 0x91be_f75f, 0x707f, 0x1_0007),
        cpuid_8000_000a: leaf(1, 0x8000, 0, 0x119b_9cff),
        cpuid_8000_001f: leaf(0x0101_fd3f, 0x4173, 0x1fd, 1),
        cpuid_8000_0021: leaf(0x45, 0, 0, 0),
        cr0: 0x8005_0033,
        cr3: 0x1_2345_6000,
        cr4: 0x37_06f0,
        xcr0: 0x207,
        dr6: 0xffff_0ff0,
        dr7: 0x400,
        rflags: 0x46,
        gdtr: TableRegister { base_virt: 0xffff_fe00_0000_1000, limit: 0x7f },
        idtr: TableRegister { base_virt: 0xffff_fe00_0000_0000, limit: 0xfff },
        tr: 0x40,
        cs: 0x10,
        ss: 0x18,
        tr_limit: 0x4087,
        efer: 0xd01,
        star: 0x23_0010_0000_0000,
        lstar: 0xffff_ffff_81e0_0080,
        gs_base: 0xffff_8880_0000_0000,
        apic_base: 0xfee0_0c00,
        pat: 0x0407_0506_0007_0106,
        vm_cr: 0x8,
        syscfg: 0x74_0000,
        tsc_ratio: 1 << 32,
        tsc_aux: u64::from(cpu),
        microcode: 0x0a00_11d5,
        mtrr_def_type: 0xc00,
        mtrr_digest: 0x1234,
        ..CpuFacts::default()
    }
}

/// Returns the facts of CPU `cpu` of a Xeon: every check passes, and none makes a note.
#[must_use]
pub fn good_xeon(cpu: u32) -> CpuFacts {
    CpuFacts {
        readable: readable::PAT
            | readable::MTRR
            | readable::MCG_STATUS
            | readable::XSS
            | readable::DEBUGCTL
            | readable::SPEC_CTRL
            | readable::TSC_AUX
            | readable::MICROCODE
            | readable::FEATURE_CONTROL
            | readable::VMX
            | readable::RTIT_CTL,
        iomem_end_phys: 0x3fff_ffff_ffff,
        cpuid_0: leaf(0x1b, 0x756e_6547, 0x6c65_746e, 0x4965_6e69),
        cpuid_1: leaf(0x0006_06a6, cpu << 25, 0x7ffe_fbff, 0xbfeb_fbff),
        cpuid_7_0: leaf(0, 0xf3bf_a7eb, 0x40_4f5e, 0xbc00_0400),
        cpuid_8000_0000: leaf(0x8000_0008, 0, 0, 0),
        cpuid_8000_0001: leaf(0, 0, 0x121, 0x2c10_0800),
        cpuid_8000_0008: leaf(0x302e, 0, 0, 0),
        cpuid_8000_000a: leaf(0, 0, 0, 0),
        cpuid_8000_001f: leaf(0, 0, 0, 0),
        cpuid_8000_0021: leaf(0, 0, 0, 0),
        vm_cr: 0,
        syscfg: 0,
        tsc_ratio: 0,
        feature_control: 0x5,
        microcode: 0x0d00_03a5,
        vmx_basic: 0x00da_0400_0000_0004,
        vmx_pin_controls: 0x0000_00ff_0000_0016,
        vmx_primary_controls: 0xfff9_fffe_0400_6172,
        vmx_secondary_controls: 0x1f7f_ffff_0000_0000,
        vmx_exit_controls: 0x01ff_ffff_0003_6dfb,
        vmx_entry_controls: 0x0003_ffff_0000_11fb,
        vmx_misc: 0x2004_c1e7,
        vmx_cr0_fixed0: 0x8000_0021,
        vmx_cr0_fixed1: 0xffff_ffff,
        vmx_cr4_fixed0: 0x2000,
        vmx_cr4_fixed1: 0x0077_7fff,
        vmx_ept_vpid: 0x0000_0f01_0673_4141,
        ..good_epyc(cpu)
    }
}
