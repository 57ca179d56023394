//! Tests of Intel's list: one altered field leads to exactly one finding. Tests of the choice of
//! controls.

use super::*;
use crate::{
    example::good_xeon,
    vmx::{self, Controls, Word, entry, ept_vpid, exit, primary, secondary},
};

#[track_caller]
fn refused(code: Code, alter: impl Fn(&mut CpuFacts)) {
    let mut facts = good_xeon(0);
    alter(&mut facts);
    let found: Vec<_> = check(&facts).iter().map(|finding| finding.code).collect();
    assert_eq!(found, vec![code]);
    assert_eq!(first_refusal(&facts).map(|finding| finding.code), Some(code));
}

#[track_caller]
fn accepted(alter: impl Fn(&mut CpuFacts)) {
    let mut facts = good_xeon(0);
    alter(&mut facts);
    assert_eq!(check(&facts).iter().copied().collect::<Vec<_>>(), vec![]);
}

const fn may(control: u32) -> u64 {
    (control as u64) << 32
}

#[test]
fn a_good_machine_has_no_findings() {
    accepted(|_| ());
    assert!(compare(&good_xeon(0), &good_xeon(5)).is_empty());
}

#[test]
fn firmware() {
    refused(Code::VmxDisabled, |f| f.feature_control = 0);
    refused(Code::VmxDisabled, |f| f.feature_control = 1);
    refused(Code::VmxDisabled, |f| f.feature_control = 4);
    // VMXON is allowed within SMX only.
    refused(Code::VmxDisabled, |f| f.feature_control = 3);
    accepted(|f| f.feature_control = 0x6_0005);
}

#[test]
fn missing_features_are_refused() {
    refused(Code::NoVmx, |f| f.cpuid_1.ecx &= !(1 << 5));
    refused(Code::NoEpt, |f| f.vmx_secondary_controls &= !may(secondary::EPT));
    refused(Code::NoEpt, |f| f.vmx_primary_controls &= !may(primary::ACTIVATE_SECONDARY));
    refused(Code::NoUnrestrictedGuest, |f| f.vmx_secondary_controls &= !may(secondary::UNRESTRICTED_GUEST));
    for bit in
        [ept_vpid::WALK_4, ept_vpid::WRITE_BACK, ept_vpid::PAGE_2M, ept_vpid::INVEPT, ept_vpid::INVEPT_ALL]
    {
        refused(Code::EptUnsupported, |f| f.vmx_ept_vpid &= !bit);
    }
    accepted(|f| f.vmx_ept_vpid &= !ept_vpid::PAGE_1G);
    refused(Code::FactUnreadable, |f| f.readable &= !readable::VMX);
    refused(Code::FactUnreadable, |f| f.readable &= !readable::MTRR);
    refused(Code::FactUnreadable, |f| f.readable &= !readable::FEATURE_CONTROL);
}

#[test]
fn no_vmx_speaks_only_of_vmx() {
    refused(Code::NoVmx, |f| {
        f.cpuid_1.ecx &= !(1 << 5);
        f.readable &= !(readable::VMX | readable::FEATURE_CONTROL);
        f.feature_control = 0;
        f.vmx_basic = 0;
        f.vmx_ept_vpid = 0;
        f.vmx_cr0_fixed1 = 0;
        f.vmx_cr4_fixed1 = 0;
    });
}

#[test]
fn state() {
    refused(Code::VirtualizationInUse, |f| f.cr4 |= 1 << 13);
    refused(Code::EferUnsupported, |f| f.efer |= 1 << 22);
    refused(Code::Fred, |f| f.cr4 |= 1 << 32);
    refused(Code::Cr4Unsupported, |f| f.cr4 |= 1 << 25);
    refused(Code::SupervisorCet, |f| f.s_cet = 1);
    refused(Code::SupervisorCet, |f| f.s_cet = 5);
    accepted(|f| f.s_cet = 4);
    refused(Code::VmxFixedBits, |f| f.cr0 &= !(1 << 5));
    refused(Code::VmxFixedBits, |f| f.vmx_cr4_fixed1 &= !(1 << 20));
    refused(Code::VmxFixedBits, |f| f.vmx_cr4_fixed1 &= !(1 << 13));
    accepted(|f| f.system |= system::PTI);
    refused(Code::MemoryBeyondMap, |f| f.iomem_end_phys = 1 << 46);
    refused(Code::MemoryBeyondMap, |f| {
        (f.cpuid_8000_0008.eax, f.iomem_end_phys) = (0x3934, 1 << 48);
        f.cr4 |= 1 << 12;
    });
    accepted(|f| {
        (f.cpuid_8000_0008.eax, f.iomem_end_phys) = (0x3934, 1 << 48);
        f.vmx_ept_vpid |= ept_vpid::WALK_5;
    });
}

#[test]
fn regions_and_traces() {
    refused(Code::VmxRegion, |f| f.vmx_basic &= !(0xf << 50));
    refused(Code::VmxRegion, |f| f.vmx_basic |= 1 << 48);
    accepted(|f| {
        f.vmx_basic |= 1 << 48;
        f.iomem_end_phys = 0xffff_ffff;
    });
    accepted(|f| f.rtit_ctl = 1);
    refused(Code::ProcessorTrace, |f| (f.rtit_ctl, f.vmx_misc) = (1, 0));
    refused(Code::DebugStore, |f| f.pebs_enable = 1 << 32);
    refused(Code::DebugStore, |f| f.debugctl = 1 << 6);
}

/// Alder Lake and Sapphire Rapids have last-branch records in the extended state, servers PASID as well.
#[test]
fn extended_state_of_recent_processors() {
    accepted(|f| f.xss = 1 << 10 | 1 << 11 | 1 << 12 | 1 << 15);
    refused(Code::XstateUnsupported, |f| f.xss |= 1 << 14);
}

#[test]
fn controls_that_are_missing_or_forced() {
    refused(Code::VmxControlMissing, |f| f.vmx_primary_controls &= !may(primary::USE_MSR_BITMAPS));
    for control in [exit::SAVE_PAT, exit::LOAD_PAT, exit::SAVE_EFER, exit::LOAD_EFER, exit::SAVE_DEBUG] {
        refused(Code::VmxControlMissing, |f| f.vmx_exit_controls &= !may(control));
    }
    for control in [entry::LOAD_PAT, entry::LOAD_EFER, entry::LOAD_DEBUG] {
        refused(Code::VmxControlMissing, |f| f.vmx_entry_controls &= !may(control));
    }
    // Without the TRUE capability MSRs every access to CR3 exits.
    refused(Code::VmxControlForced, |f| f.vmx_primary_controls |= 0b11 << 15);
    refused(Code::VmxControlForced, |f| f.vmx_pin_controls |= 1);
    // User mode may have shadow stacks, and exits would lose them.
    refused(Code::VmxControlMissing, |f| {
        f.cr4 |= 1 << 23;
        f.vmx_cr4_fixed1 |= 1 << 23;
    });
    accepted(|f| {
        f.cr4 |= 1 << 23;
        f.vmx_cr4_fixed1 |= 1 << 23;
        f.vmx_exit_controls |= may(exit::LOAD_CET);
        f.vmx_entry_controls |= may(entry::LOAD_CET);
    });
}

#[test]
fn instructions_that_would_be_lost() {
    for control in [secondary::RDTSCP, secondary::INVPCID, secondary::XSAVES] {
        refused(Code::VmxInstructionLost, |f| f.vmx_secondary_controls &= !may(control));
    }
    refused(Code::VmxInstructionLost, |f| {
        f.cpuid_7_0.ecx |= 1 << 5;
        f.vmx_secondary_controls &= !may(secondary::USER_WAIT);
    });
    refused(Code::VmxInstructionLost, |f| f.cpuid_7_1.eax |= 1 << 27);
    refused(Code::VmxInstructionLost, |f| f.cpuid_7_1.edx |= 1 << 15);
    accepted(|f| {
        f.cpuid_7_1.eax |= 1 << 27;
        f.vmx_tertiary_controls = vmx::tertiary::MSR_LIST;
        f.vmx_primary_controls |= may(primary::ACTIVATE_TERTIARY);
    });
}

#[test]
fn the_controls_of_a_good_machine() {
    let chosen = vmx::choose(&good_xeon(0));
    let expected = Controls {
        pin: 0x16,
        primary: 0x9400_6172,
        secondary: 0x0018_10aa,
        exit: 0x013f_6fff,
        entry: 0x0002_d3ff,
        reserved: 0,
        tertiary: 0,
    };
    assert_eq!(chosen, Ok(expected));
    let without_vpid = CpuFacts { vmx_ept_vpid: 0x0673_4141, ..good_xeon(0) };
    assert_eq!(vmx::choose(&without_vpid).map(|all| all.secondary & secondary::VPID), Ok(0));
}

proptest! {
    /// The choice respects all capabilities and demands of the processor. It holds all needed
    /// controls, and none that is neither wanted nor demanded. Or it names a bit that is really
    /// missing or demanded.
    #[test]
    fn controls_are_legal(
        pin in any::<u64>(), primary in any::<u64>(), secondary in any::<u64>(), exit in any::<u64>(),
        entry in any::<u64>(), features in any::<(u32, u32, u32)>(), sane in any::<bool>(),
    ) {
        let good = good_xeon(0);
        // Completely random words are hardly ever acceptable.
        let near = |random: u64, good: u64| {
            if sane { good | random & random >> 7 & 0xffff_ffff << 32 } else { random }
        };
        let mut facts = CpuFacts {
            vmx_pin_controls: near(pin, good.vmx_pin_controls),
            vmx_primary_controls: near(primary, good.vmx_primary_controls),
            vmx_secondary_controls: near(secondary, good.vmx_secondary_controls),
            vmx_exit_controls: near(exit, good.vmx_exit_controls),
            vmx_entry_controls: near(entry, good.vmx_entry_controls),
            ..good
        };
        (facts.cpuid_7_0.ebx, facts.cpuid_7_0.ecx, facts.cpuid_7_0.edx) = features;
        let words = |chosen: Controls| [
            (u64::from(chosen.pin), facts.vmx_pin_controls),
            (u64::from(chosen.primary), facts.vmx_primary_controls),
            (u64::from(chosen.secondary), facts.vmx_secondary_controls),
            (u64::from(chosen.exit), facts.vmx_exit_controls),
            (u64::from(chosen.entry), facts.vmx_entry_controls),
        ];
        match vmx::choose(&facts) {
            Ok(chosen) => {
                for (word, capability) in words(chosen) {
                    prop_assert_eq!(word & !(capability >> 32), 0, "a bit that may not be 1");
                    prop_assert_eq!(capability & 0xffff_ffff & !word, 0, "a bit that must be 1");
                }
                prop_assert_eq!(chosen.pin & 0b10_1001, 0, "no event exits");
                let needed = secondary::EPT | secondary::UNRESTRICTED_GUEST;
                prop_assert_eq!(chosen.secondary & needed, needed);
                let invpcid = facts.cpuid_7_0.ebx >> 10 & 1 == 1;
                prop_assert!(!invpcid || chosen.secondary & secondary::INVPCID != 0);
            }
            Err(refusal) => {
                let capability = match refusal.word {
                    Word::Pin => facts.vmx_pin_controls,
                    Word::Primary => facts.vmx_primary_controls,
                    Word::Secondary => facts.vmx_secondary_controls,
                    Word::Tertiary => facts.vmx_tertiary_controls << 32,
                    Word::Exit => facts.vmx_exit_controls,
                    Word::Entry => facts.vmx_entry_controls,
                };
                if refusal.code == Code::VmxControlForced {
                    prop_assert_eq!(refusal.bits & !capability, 0);
                } else {
                    prop_assert_eq!(refusal.bits & capability >> 32, 0);
                }
            }
        }
    }
}

/// P and E cores may differ in the unused parts of a word.
#[test]
fn unused_bits_may_differ_between_cpus() {
    let mut other = good_xeon(1);
    other.vmx_misc ^= 0x1F | 0b111 << 25;
    assert!(compare(&good_xeon(0), &other).is_empty());
    for used in [6, 14, 29] {
        let mut other = good_xeon(1);
        other.vmx_misc ^= 1 << used;
        assert!(!compare(&good_xeon(0), &other).is_empty(), "bit {used}");
    }
}
