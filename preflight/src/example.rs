//! Facts of a good machine, for tests: an EPYC of family 19h under Debian's 6.1.

use mercury_abi::{
    Header,
    facts::{CpuFacts, CpuidLeaf, TableRegister},
};

const fn leaf(eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidLeaf {
    CpuidLeaf { eax, ebx, ecx, edx }
}

/// Facts of CPU `cpu`: every check passes and nothing is worth a note.
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
