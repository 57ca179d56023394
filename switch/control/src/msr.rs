//! Names of model-specific registers, as Linux's msr-index.h and the manuals of AMD and Intel have them.

/// Registers by their numbers, in ascending order.
const NAMES: [(u32, &str); 79] = [
    (0x10, "TSC"),
    (0x1b, "APIC_BASE"),
    (0x3a, "FEATURE_CONTROL"),
    (0x3b, "TSC_ADJUST"),
    (0x48, "SPEC_CTRL"),
    (0x49, "PRED_CMD"),
    (0x79, "BIOS_UPDT_TRIG"),
    (0x8b, "PATCH_LEVEL"),
    (0xe7, "MPERF"),
    (0xe8, "APERF"),
    (0xfe, "MTRRcap"),
    (0x10a, "ARCH_CAPABILITIES"),
    (0x10b, "FLUSH_CMD"),
    (0x122, "TSX_CTRL"),
    (0x174, "SYSENTER_CS"),
    (0x175, "SYSENTER_ESP"),
    (0x176, "SYSENTER_EIP"),
    (0x179, "MCG_CAP"),
    (0x17a, "MCG_STATUS"),
    (0x17b, "MCG_CTL"),
    (0x1a0, "MISC_ENABLE"),
    (0x1d9, "DEBUGCTL"),
    (0x1db, "LASTBRANCHFROMIP"),
    (0x1dc, "LASTBRANCHTOIP"),
    (0x1dd, "LASTINTFROMIP"),
    (0x1de, "LASTINTTOIP"),
    (0x250, "MTRRfix64K_00000"),
    (0x258, "MTRRfix16K_80000"),
    (0x259, "MTRRfix16K_A0000"),
    (0x268, "MTRRfix4K_C0000"),
    (0x269, "MTRRfix4K_C8000"),
    (0x26a, "MTRRfix4K_D0000"),
    (0x26b, "MTRRfix4K_D8000"),
    (0x26c, "MTRRfix4K_E0000"),
    (0x26d, "MTRRfix4K_E8000"),
    (0x26e, "MTRRfix4K_F0000"),
    (0x26f, "MTRRfix4K_F8000"),
    (0x277, "PAT"),
    (0x2ff, "MTRRdefType"),
    (0x38f, "PERF_GLOBAL_CTRL"),
    (0x3f1, "PEBS_ENABLE"),
    (0x480, "VMX_BASIC"),
    (0x600, "DS_AREA"),
    (0x6a0, "U_CET"),
    (0x6a2, "S_CET"),
    (0x6e0, "TSC_DEADLINE"),
    (0xda0, "XSS"),
    (0x4000_0000, "HV_GUEST_OS_ID"),
    (0x4000_0001, "HV_HYPERCALL"),
    (0x4b56_4d00, "KVM_WALL_CLOCK_NEW"),
    (0x4b56_4d01, "KVM_SYSTEM_TIME_NEW"),
    (0xc000_0080, "EFER"),
    (0xc000_0081, "STAR"),
    (0xc000_0082, "LSTAR"),
    (0xc000_0083, "CSTAR"),
    (0xc000_0084, "SYSCALL_MASK"),
    (0xc000_0100, "FS_BASE"),
    (0xc000_0101, "GS_BASE"),
    (0xc000_0102, "KERNEL_GS_BASE"),
    (0xc000_0103, "TSC_AUX"),
    (0xc000_0104, "TSC_RATIO"),
    (0xc001_0010, "SYSCFG"),
    (0xc001_0015, "HWCR"),
    (0xc001_0016, "IORR_BASE0"),
    (0xc001_001a, "TOP_MEM"),
    (0xc001_001d, "TOP_MEM2"),
    (0xc001_0020, "PATCH_LOADER"),
    (0xc001_0064, "PSTATE0"),
    (0xc001_0111, "SMBASE"),
    (0xc001_0112, "SMM_ADDR"),
    (0xc001_0113, "SMM_MASK"),
    (0xc001_0114, "VM_CR"),
    (0xc001_0115, "IGNNE"),
    (0xc001_0116, "SMM_CTL"),
    (0xc001_0117, "VM_HSAVE_PA"),
    (0xc001_0118, "SVM_LOCK_KEY"),
    (0xc001_011f, "VIRT_SPEC_CTRL"),
    (0xc001_0131, "SEV_STATUS"),
    (0xc001_1029, "DE_CFG"),
];

/// Returns the name of a register; `None` if it is not known.
#[must_use]
pub fn name(number: u32) -> Option<String> {
    if let Ok(at) = NAMES.binary_search_by_key(&number, |(known, _)| *known) {
        return Some(NAMES[at].1.to_owned());
    }
    match number {
        0x200..=0x21f if number.is_multiple_of(2) => Some(format!("MTRRphysBase{}", (number - 0x200) / 2)),
        0x200..=0x21f => Some(format!("MTRRphysMask{}", (number - 0x200) / 2)),
        0x400..=0x47f => {
            const PARTS: [&str; 4] = ["CTL", "STATUS", "ADDR", "MISC"];
            Some(format!("MC{}_{}", (number - 0x400) / 4, PARTS[number as usize % 4]))
        }
        0x800..=0x83f => Some(format!("x2APIC register {:#x}", (number - 0x800) << 4)),
        _ => None,
    }
}

/// Returns name and number of a register.
#[must_use]
pub fn named(number: u64) -> String {
    let known = u32::try_from(number).ok().and_then(name);
    known.map_or_else(|| format!("MSR {number:#x}"), |name| format!("MSR {name} ({number:#x})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_in_order_and_named_once() {
        assert!(NAMES.is_sorted_by(|one, other| one.0 < other.0));
        let mut names = NAMES.map(|(_, name)| name);
        names.sort_unstable();
        assert!(names.is_sorted_by(|one, other| one < other), "a name is there twice");
    }

    #[test]
    fn numbers_have_names() {
        for (number, expected) in [
            (0xc000_0080, "MSR EFER (0xc0000080)"),
            (0x205, "MSR MTRRphysMask2 (0x205)"),
            (0x409, "MSR MC2_STATUS (0x409)"),
            (0x830, "MSR x2APIC register 0x300 (0x830)"),
            (0xc000_2000, "MSR 0xc0002000"),
            (0x1_0000_0010, "MSR 0x100000010"),
        ] {
            assert_eq!(named(number), expected);
        }
    }
}
