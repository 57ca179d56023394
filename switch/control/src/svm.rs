//! Names of SVM's exit codes (APM volume 2, appendix C) and of exception vectors, for people.

/// Exit codes with names of their own.
const EXITS: &[(u64, &str)] = &[
    (0x60, "INTR"),
    (0x61, "NMI"),
    (0x62, "SMI"),
    (0x63, "INIT"),
    (0x64, "VINTR"),
    (0x65, "CR0_SEL_WRITE"),
    (0x66, "IDTR_READ"),
    (0x67, "GDTR_READ"),
    (0x68, "LDTR_READ"),
    (0x69, "TR_READ"),
    (0x6a, "IDTR_WRITE"),
    (0x6b, "GDTR_WRITE"),
    (0x6c, "LDTR_WRITE"),
    (0x6d, "TR_WRITE"),
    (0x6e, "RDTSC"),
    (0x6f, "RDPMC"),
    (0x70, "PUSHF"),
    (0x71, "POPF"),
    (0x72, "CPUID"),
    (0x73, "RSM"),
    (0x74, "IRET"),
    (0x75, "SWINT"),
    (0x76, "INVD"),
    (0x77, "PAUSE"),
    (0x78, "HLT"),
    (0x79, "INVLPG"),
    (0x7a, "INVLPGA"),
    (0x7b, "IOIO"),
    (0x7c, "MSR"),
    (0x7d, "TASK_SWITCH"),
    (0x7e, "FERR_FREEZE"),
    (0x7f, "SHUTDOWN"),
    (0x80, "VMRUN"),
    (0x81, "VMMCALL"),
    (0x82, "VMLOAD"),
    (0x83, "VMSAVE"),
    (0x84, "STGI"),
    (0x85, "CLGI"),
    (0x86, "SKINIT"),
    (0x87, "RDTSCP"),
    (0x88, "ICEBP"),
    (0x89, "WBINVD"),
    (0x8a, "MONITOR"),
    (0x8b, "MWAIT"),
    (0x8c, "MWAIT_CONDITIONAL"),
    (0x8d, "XSETBV"),
    (0x8e, "RDPRU"),
    (0x8f, "EFER_WRITE_TRAP"),
    (0xa0, "INVLPGB"),
    (0xa1, "INVLPGB_ILLEGAL"),
    (0xa2, "INVPCID"),
    (0xa3, "MCOMMIT"),
    (0xa4, "TLBSYNC"),
    (0xa5, "BUSLOCK"),
    (0xa6, "IDLE_HLT"),
    (0x400, "NPF"),
    (0x401, "AVIC_INCOMPLETE_IPI"),
    (0x402, "AVIC_NOACCEL"),
    (0x403, "VMGEXIT"),
    (u64::MAX, "INVALID"),
    (u64::MAX - 1, "BUSY"),
    (u64::MAX - 2, "IDLE_REQUIRED"),
];

const VECTORS: [&str; 22] = [
    "#DE",
    "#DB",
    "NMI",
    "#BP",
    "#OF",
    "#BR",
    "#UD",
    "#NM",
    "#DF",
    "coprocessor overrun",
    "#TS",
    "#NP",
    "#SS",
    "#GP",
    "#PF",
    "reserved",
    "#MF",
    "#AC",
    "#MC",
    "#XF",
    "#VE",
    "#CP",
];

/// Returns the name of an exit code of either vendor: `VMEXIT_NPF`.
#[must_use]
pub fn exit_name(code: u64) -> String {
    if let Some(name) = crate::vmx::exit_name(code) {
        return name;
    }
    match code {
        0x00..=0x0f => format!("VMEXIT_CR{code}_READ"),
        0x10..=0x1f => format!("VMEXIT_CR{}_WRITE", code - 0x10),
        0x20..=0x2f => format!("VMEXIT_DR{}_READ", code - 0x20),
        0x30..=0x3f => format!("VMEXIT_DR{}_WRITE", code - 0x30),
        0x40..=0x5f => format!("VMEXIT_EXCP{} ({})", code - 0x40, vector_name((code - 0x40) as u32)),
        // Some processors leave the upper half of the field clear.
        0xffff_ffff => "VMEXIT_INVALID".into(),
        code => match EXITS.iter().find(|(number, _)| *number == code) {
            Some((_, name)) => format!("VMEXIT_{name}"),
            None => format!("exit {code:#x}"),
        },
    }
}

/// Returns the name of an exception vector: `#GP`.
#[must_use]
pub fn vector_name(vector: u32) -> String {
    match VECTORS.get(vector as usize) {
        Some(name) => (*name).to_string(),
        None => format!("vector {vector}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(exit_name(0x400), "VMEXIT_NPF");
        assert_eq!(exit_name(0x14), "VMEXIT_CR4_WRITE");
        assert_eq!(exit_name(0x4e), "VMEXIT_EXCP14 (#PF)");
        assert_eq!(exit_name(u64::MAX), "VMEXIT_INVALID");
        assert_eq!(exit_name(0x999), "exit 0x999");
        assert_eq!(vector_name(13), "#GP");
        assert_eq!(vector_name(u32::MAX), "vector 4294967295");
    }
}
