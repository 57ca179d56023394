//! The fields of [`CpuFacts`] by name, so that differences can be reported by name.

use mercury_abi::facts::CpuFacts;

/// One 64-bit quantity of the facts.
pub(crate) struct Field {
    /// Name of the field in [`CpuFacts`].
    pub name: &'static str,
    /// Reads the field's value.
    pub get: fn(&CpuFacts) -> u64,
    /// Sets the field's value (tests only).
    #[cfg(test)]
    pub set: fn(&mut CpuFacts, u64),
}

macro_rules! field {
    ($name:expr, $($path:ident).+) => {
        Field {
            name: $name,
            get: |facts| u64::from(facts.$($path).+),
            #[cfg(test)]
            #[allow(clippy::unnecessary_cast)]
            set: |facts, value| facts.$($path).+ = value as _,
        }
    };
}

macro_rules! fields {
    (leaves: $($leaf:ident)*; tables: $($table:ident)*; plain: $($plain:ident)*;) => {
        /// All fields: CPUID leaves, descriptor tables, registers.
        pub(crate) const FIELDS: &[Field] = &[
            $(
                field!(concat!(stringify!($leaf), ".eax"), $leaf.eax),
                field!(concat!(stringify!($leaf), ".ebx"), $leaf.ebx),
                field!(concat!(stringify!($leaf), ".ecx"), $leaf.ecx),
                field!(concat!(stringify!($leaf), ".edx"), $leaf.edx),
            )*
            $(
                field!(concat!(stringify!($table), ".base_virt"), $table.base_virt),
                field!(concat!(stringify!($table), ".limit"), $table.limit),
            )*
            $(field!(stringify!($plain), $plain),)*
        ];
    };
}

fields! {
    leaves: cpuid_0 cpuid_1 cpuid_7_0 cpuid_7_1 cpuid_d_1 cpuid_4000_0000 cpuid_8000_0000
        cpuid_8000_0001 cpuid_8000_0008 cpuid_8000_000a cpuid_8000_001f cpuid_8000_0021;
    tables: gdtr idtr;
    plain: cpu apic_id readable system iomem_end_phys kernel_version cr0 cr3 cr4 xcr0 dr6 dr7 rflags tr
        ldtr cs ss tr_limit efer star lstar cstar sfmask sysenter_cs sysenter_esp sysenter_eip gs_base
        apic_base pat vm_cr vm_hsave_pa syscfg spec_ctrl tsc_ratio debugctl s_cet isst_addr xss
        mcg_status tsc_aux hwcr microcode smca_ctl0 feature_control mtrr_def_type mtrr_digest vmx_basic
        vmx_pin_controls vmx_primary_controls vmx_secondary_controls vmx_tertiary_controls vmx_exit_controls
        vmx_entry_controls vmx_misc vmx_cr0_fixed0 vmx_cr0_fixed1 vmx_cr4_fixed0 vmx_cr4_fixed1 vmx_ept_vpid
        rtit_ctl pebs_enable;
}

// The sizes add up, so that no field is forgotten: the header (8 bytes), two words packed in one
// u64, and four words packed in two.
const _: () = {
    let leaves = 12 * 16;
    let words = (FIELDS.len() - 12 * 4 - 2) * 8;
    assert!(size_of::<CpuFacts>() == 8 + 8 + leaves + words);
};
