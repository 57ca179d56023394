//! Names of VMX's exit reasons (SDM volume 3, appendix C), for people.

use mercury_abi::shared::EXIT_CODE_VMX;

const REASONS: &[(u32, &str)] = &[
    (0, "EXCEPTION_NMI"),
    (1, "EXTERNAL_INTERRUPT"),
    (2, "TRIPLE_FAULT"),
    (3, "INIT"),
    (4, "SIPI"),
    (7, "INTERRUPT_WINDOW"),
    (8, "NMI_WINDOW"),
    (9, "TASK_SWITCH"),
    (10, "CPUID"),
    (11, "GETSEC"),
    (12, "HLT"),
    (13, "INVD"),
    (14, "INVLPG"),
    (15, "RDPMC"),
    (16, "RDTSC"),
    (17, "RSM"),
    (18, "VMCALL"),
    (19, "VMCLEAR"),
    (20, "VMLAUNCH"),
    (21, "VMPTRLD"),
    (22, "VMPTRST"),
    (23, "VMREAD"),
    (24, "VMRESUME"),
    (25, "VMWRITE"),
    (26, "VMXOFF"),
    (27, "VMXON"),
    (28, "CR_ACCESS"),
    (29, "DR_ACCESS"),
    (30, "IO"),
    (31, "RDMSR"),
    (32, "WRMSR"),
    (33, "INVALID_STATE"),
    (34, "MSR_LOADING"),
    (36, "MWAIT"),
    (37, "MONITOR_TRAP"),
    (39, "MONITOR"),
    (40, "PAUSE"),
    (41, "MACHINE_CHECK"),
    (43, "TPR_BELOW_THRESHOLD"),
    (44, "APIC_ACCESS"),
    (45, "VIRTUALIZED_EOI"),
    (46, "GDTR_IDTR"),
    (47, "LDTR_TR"),
    (48, "EPT_VIOLATION"),
    (49, "EPT_MISCONFIGURATION"),
    (50, "INVEPT"),
    (51, "RDTSCP"),
    (52, "PREEMPTION_TIMER"),
    (53, "INVVPID"),
    (54, "WBINVD"),
    (55, "XSETBV"),
    (56, "APIC_WRITE"),
    (57, "RDRAND"),
    (58, "INVPCID"),
    (59, "VMFUNC"),
    (60, "ENCLS"),
    (61, "RDSEED"),
    (62, "PML_FULL"),
    (63, "XSAVES"),
    (64, "XRSTORS"),
    (67, "UMWAIT"),
    (68, "TPAUSE"),
];

/// A code of Mercury, not of the processor: VMLAUNCH or VMRESUME failed.
const INSTRUCTION_FAILED: u32 = 1 << 30;

/// Returns the name of an exit code that has [`EXIT_CODE_VMX`]: `EXIT_EPT_VIOLATION`.
#[must_use]
pub fn exit_name(code: u64) -> Option<String> {
    if code >> 32 != EXIT_CODE_VMX >> 32 {
        return None;
    }
    let reason = code as u32;
    if reason & INSTRUCTION_FAILED != 0 {
        return Some("VMLAUNCH or VMRESUME".into());
    }
    let failed = if reason >> 31 == 1 { "failed entry, " } else { "" };
    let number = reason & 0xffff;
    let name = REASONS.iter().find(|(known, _)| *known == number);
    Some(match name {
        Some((_, name)) => format!("{failed}EXIT_{name}"),
        None => format!("{failed}exit reason {number}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(exit_name(EXIT_CODE_VMX | 48).as_deref(), Some("EXIT_EPT_VIOLATION"));
        assert_eq!(exit_name(EXIT_CODE_VMX | 99).as_deref(), Some("exit reason 99"));
        assert_eq!(
            exit_name(EXIT_CODE_VMX | 0x8000_0021).as_deref(),
            Some("failed entry, EXIT_INVALID_STATE")
        );
        assert_eq!(exit_name(0x400), None);
        assert_eq!(exit_name(u64::MAX), None);
    }
}
