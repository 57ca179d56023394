//! The details of codes in words: bits, register, vendor.

use mercury_abi::{code::Code, facts::readable, refusal::Refusal};

/// Names of VMX's control words, by [`mercury_preflight::vmx::Word`].
const WORDS: [&str; 6] = ["pin-based", "primary", "secondary", "tertiary", "exit", "entry"];

type Names = &'static [(u32, &'static str)];

const CR0: Names =
    &[(0, "PE"), (2, "EM"), (3, "TS"), (5, "NE"), (16, "WP"), (29, "NW"), (30, "CD"), (31, "PG")];

const CR4: Names = &[
    (5, "PAE"),
    (13, "VMXE"),
    (14, "SMXE"),
    (19, "KL"),
    (23, "CET"),
    (24, "PKS"),
    (25, "UINTR"),
    (27, "LASS"),
    (28, "LAM_SUP"),
    (32, "FRED"),
];

const EFER: Names =
    &[(8, "LME"), (10, "LMA"), (11, "NXE"), (12, "SVME"), (13, "LMSLE"), (17, "MCOMMIT"), (20, "UAIE")];

const XCR0: Names = &[(19, "APX"), (62, "LWP")];

const XSS: Names = &[(8, "PT"), (10, "PASID"), (13, "HDC"), (14, "UINTR"), (15, "LBR"), (16, "HWP")];

const EPT_VPID: Names = &[
    (6, "tables of four levels"),
    (14, "write-back tables"),
    (16, "2 MiB pages"),
    (20, "INVEPT"),
    (26, "INVEPT of all contexts"),
];

const READABLE: Names = &[
    (readable::VM_CR.trailing_zeros(), "VM_CR"),
    (readable::VM_HSAVE_PA.trailing_zeros(), "VM_HSAVE_PA"),
    (readable::SYSCFG.trailing_zeros(), "SYSCFG"),
    (readable::SPEC_CTRL.trailing_zeros(), "SPEC_CTRL"),
    (readable::TSC_RATIO.trailing_zeros(), "TSC_RATIO"),
    (readable::S_CET.trailing_zeros(), "S_CET"),
    (readable::ISST_ADDR.trailing_zeros(), "ISST_ADDR"),
    (readable::XSS.trailing_zeros(), "XSS"),
    (readable::MCG_STATUS.trailing_zeros(), "MCG_STATUS"),
    (readable::PAT.trailing_zeros(), "PAT"),
    (readable::MTRR.trailing_zeros(), "MTRRs"),
    (readable::DEBUGCTL.trailing_zeros(), "DEBUGCTL"),
    (readable::FEATURE_CONTROL.trailing_zeros(), "IA32_FEATURE_CONTROL"),
    (readable::VMX.trailing_zeros(), "VMX capabilities"),
];

/// Describes a code with its detail, in a sentence without a full stop.
#[must_use]
pub fn describe(code: Code, detail: [u64; 2]) -> String {
    let [first, second] = detail;
    match code {
        Code::VendorUnsupported => {
            format!("the processor is from \"{}\", not from AMD or Intel", letters(&[first, second]))
        }
        Code::FamilyUnsupported => format!("an AMD processor of family {first:#x}; 0x17 (Zen) is the oldest"),
        Code::SvmDisabled if first == 1 => "SVM is disabled by firmware, and the setting is locked".into(),
        Code::SvmDisabled => "SVM is disabled by firmware".into(),
        Code::VmxDisabled if first == 1 => "VMX is disabled by firmware, and the setting is locked".into(),
        Code::VmxDisabled => format!("VMX is not enabled: IA32_FEATURE_CONTROL is {second:#x}"),
        Code::EptUnsupported => format!("extended page tables lack {}", names(EPT_VPID, first)),
        Code::VmxControlForced | Code::VmxControlMissing | Code::VmxInstructionLost => {
            let word = usize::try_from(first).ok().and_then(|word| WORDS.get(word)).unwrap_or(&"unknown");
            let meaning = crate::explain::entry(code).meaning;
            format!("{meaning}: {} of the {word} controls", names(&[], second))
        }
        Code::VmxFixedBits => {
            let known = if first == 0 { CR0 } else { CR4 };
            format!("VMX does not allow CR{first} as it is: {}", names(known, second))
        }
        Code::NoAsids => format!("the processor has {first} address-space identifiers; 2 are needed"),
        Code::Cr0Unsupported => registers("CR0", CR0, first, second),
        Code::Cr4Unsupported => registers("CR4", CR4, first, second),
        Code::EferUnsupported => registers("EFER", EFER, first, second),
        Code::Cr3Unsupported => format!("CR3 is {second:#x}, with bits above the physical address width"),
        Code::XstateUnsupported if second == 0 => format!("XCR0 enables {}", names(XCR0, first)),
        Code::XstateUnsupported => format!("XSS enables {}", names(XSS, first)),
        Code::FactUnreadable => format!("reading {} faulted", names(READABLE, first)),
        Code::PatUnsupported => format!("entry 0 of the PAT is {first}, not write-back (PAT {second:#x})"),
        Code::TscRatio => format!("the TSC ratio is {first:#x}, not {second:#x} (1.0)"),
        Code::MemoryBeyondMap => {
            format!(
                "memory or devices end at {first:#x}, beyond the {second} bits that the nested map covers"
            )
        }
        Code::RestoreMemory => {
            format!("a restore environment does not find the memory from {first:#x} to {second:#x}")
        }
        Code::InsideHypervisor => {
            format!("this machine is itself a virtual machine ({})", letters(&[first, second]))
        }
        Code::VirtualizationInUse => "hardware virtualization is in use already".into(),
        Code::HsaveInUse => "VM_HSAVE_PA is not zero: another hypervisor used SVM before".into(),
        Code::CpusDiffer | Code::MtrrInconsistent => differing(code, first, second),
        Code::KernelUntested => format!(
            "kernel series {}.{} is not among those that Mercury is tested on (6.1 and 6.12)",
            first >> 16,
            first >> 8 & 0xff
        ),
        Code::DebugActive => format!("debugging is active (DR7 {first:#x}, DEBUGCTL {second:#x})"),
        Code::AbiMismatch if first != 0 => {
            format!("the driver speaks version {first} of the interface, this command another")
        }
        Code::InvalidGuestState if Refusal::from_number(first).is_some() => {
            let refusal = Refusal::from_number(first).map_or("", Refusal::text);
            format!("{}: {refusal} ({second:#x})", crate::explain::entry(code).meaning)
        }
        Code::InvalidGuestState | Code::StateChanged | Code::FaultInSwitch | Code::WrongMode => {
            format!("{} (detail {first:#x}, {second:#x})", crate::explain::entry(code).meaning)
        }
        code => crate::explain::entry(code).meaning.into(),
    }
}

fn differing(code: Code, field: u64, bits: u64) -> String {
    match mercury_preflight::compared_field(field) {
        Some(name) => format!("{name} differs from the first CPU's (bits {bits:#x})"),
        None => crate::explain::entry(code).meaning.into(),
    }
}

/// Formats `CR4 is 0x…, with the unsupported bit PKS`.
fn registers(register: &str, known: Names, fault: u64, value: u64) -> String {
    let (unexpected, missing) = (fault & value, fault & !value);
    let mut text = format!("{register} is {value:#x}");
    if unexpected != 0 {
        text += &format!(", with {} set, which Mercury does not carry over", names(known, unexpected));
    }
    if missing != 0 {
        text += &format!(", without {}, which Mercury needs", names(known, missing));
    }
    text
}

/// Names the bits that are set: `PKS, bit 33`.
fn names(known: Names, bits: u64) -> String {
    let name = |bit: u32| match known.iter().find(|(number, _)| *number == bit) {
        Some((_, name)) => (*name).to_string(),
        None => format!("bit {bit}"),
    };
    let set: Vec<_> = (0..64).filter(|bit| bits >> bit & 1 != 0).map(name).collect();
    set.join(", ")
}

/// Converts letters packed into words, as CPUID returns them.
#[must_use]
pub fn letters(words: &[u64]) -> String {
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    let text: String = bytes.filter(|byte| *byte != 0).map(printable).collect();
    text.trim().to_string()
}

fn printable(byte: u8) -> char {
    if byte.is_ascii_graphic() || byte == b' ' { char::from(byte) } else { '?' }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vmx_has_words() {
        let text = describe(Code::InvalidGuestState, [1121, 0x500]);
        assert!(text.ends_with("EFER.LMA differs from the IA-32e-mode control (0x500)"), "{text}");
        let text = describe(Code::VmxControlMissing, [4, 1 << 20]);
        assert!(text.ends_with("bit 20 of the exit controls"), "{text}");
        let text = describe(Code::VmxFixedBits, [4, 1 << 13]);
        assert_eq!(text, "VMX does not allow CR4 as it is: VMXE");
    }

    #[test]
    fn bits_have_names() {
        assert_eq!(
            describe(Code::Cr4Unsupported, [1 << 24 | 1 << 33, 1 << 24 | 1 << 33 | 0x20]),
            "CR4 is 0x201000020, with PKS, bit 33 set, which Mercury does not carry over"
        );
        assert_eq!(
            describe(Code::EferUnsupported, [1 << 11, 0x501]),
            "EFER is 0x501, without NXE, which Mercury needs"
        );
        assert_eq!(describe(Code::FactUnreadable, [1 << 10, 0]), "reading PAT faulted");
    }

    #[test]
    fn vendors_are_read_from_registers() {
        let kvm = u64::from_le_bytes(*b"KVMKVMKV");
        assert_eq!(letters(&[kvm, 0x4d]), "KVMKVMKVM");
        assert_eq!(letters(&[0x1b00]), "?");
    }

    #[test]
    fn every_code_describes_itself() {
        for code in Code::ALL {
            for detail in [[0, 0], [1, 1], [u64::MAX, u64::MAX]] {
                let text = describe(*code, detail);
                assert!(!text.is_empty() && !text.ends_with('.'), "{code:?}: {text}");
            }
        }
    }
}
