//! Tests of AMD's list: one altered field leads to exactly one finding, and no input panics.

extern crate std;

#[path = "tests_intel.rs"]
mod intel;

use crate::{
    Finding, KernelSupport, Severity, as_if_native, check, compare, compared_field, example::good_epyc,
    fields::FIELDS, first_refusal, kernel_support, physical_bits, state_difference,
};
use mercury_abi::{
    code::Code,
    facts::{CpuFacts, readable, system},
};
use proptest::prelude::*;
use std::{vec, vec::Vec};

fn findings(alter: impl Fn(&mut CpuFacts)) -> Vec<Finding> {
    let mut facts = good_epyc(0);
    alter(&mut facts);
    check(&facts).iter().copied().collect()
}

/// Asserts that `alter` leads to `code` with `severity` and to no other finding.
#[track_caller]
fn only(code: Code, severity: Severity, alter: impl Fn(&mut CpuFacts)) {
    let found: Vec<_> = findings(&alter).iter().map(|finding| (finding.code, finding.severity)).collect();
    assert_eq!(found, vec![(code, severity)]);
    let mut facts = good_epyc(0);
    alter(&mut facts);
    assert_eq!(
        first_refusal(&facts).map(|finding| finding.code),
        (severity == Severity::Refuse).then_some(code)
    );
}

#[track_caller]
fn refused(code: Code, alter: impl Fn(&mut CpuFacts)) {
    only(code, Severity::Refuse, alter);
}

#[track_caller]
fn accepted(alter: impl Fn(&mut CpuFacts)) {
    assert_eq!(findings(alter), vec![]);
}

#[test]
fn a_good_machine_has_no_findings() {
    accepted(|_| ());
    assert_eq!(first_refusal(&good_epyc(3)), None);
}

#[test]
fn processors() {
    refused(Code::VendorUnsupported, |f| f.cpuid_0.ebx = 0);
    refused(Code::FamilyUnsupported, |f| f.cpuid_1.eax = 0x0060_0f20);
    refused(Code::FamilyUnsupported, |f| f.cpuid_1.eax = 0x623);
    accepted(|f| f.cpuid_1.eax = 0x0080_0f12);
    refused(Code::NoSvm, |f| f.cpuid_8000_0001.ecx &= !4);
    refused(Code::NoNestedPaging, |f| f.cpuid_8000_000a.edx &= !1);
    refused(Code::NoAsids, |f| f.cpuid_8000_000a.ebx = 1);
    refused(Code::NoAsids, |f| f.cpuid_8000_000a.ebx = 0);
}

#[test]
fn no_svm_speaks_only_of_svm() {
    refused(Code::NoSvm, |f| {
        f.cpuid_8000_0001.ecx &= !4;
        f.cpuid_8000_000a = Default::default();
        f.readable &= !(readable::VM_CR | readable::VM_HSAVE_PA);
        f.vm_cr = 0;
    });
}

#[test]
fn svm_state() {
    refused(Code::SvmDisabled, |f| f.vm_cr = 1 << 4);
    refused(Code::SvmDisabled, |f| f.vm_cr = 1 << 4 | 1 << 3);
    refused(Code::InitRedirected, |f| f.vm_cr = 1 << 1);
    refused(Code::VirtualizationInUse, |f| f.efer |= 1 << 12);
    refused(Code::VirtualizationInUse, |f| f.cr4 |= 1 << 13);
    only(Code::HsaveInUse, Severity::Warn, |f| f.vm_hsave_pa = 0x1000);
    // KVM keeps its hold on the hardware.
    accepted(|f| (f.efer, f.vm_hsave_pa, f.system) = (f.efer | 1 << 12, 0x1000, system::KVM_MAY));
    refused(Code::TscRatio, |f| f.tsc_ratio = 1 << 31);
    accepted(|f| {
        f.cpuid_8000_000a.edx &= !(1 << 4);
        f.tsc_ratio = 0;
    });
}

#[test]
fn control_registers() {
    for bit in [2, 3, 29, 30, 32, 63] {
        refused(Code::Cr0Unsupported, |f| f.cr0 |= 1 << bit);
    }
    refused(Code::Cr0Unsupported, |f| f.cr0 &= !(1 << 16));
    for bit in [14, 15, 19, 24, 25, 27, 28, 33, 63] {
        refused(Code::Cr4Unsupported, |f| f.cr4 |= 1 << bit);
    }
    for bit in [2, 8, 11, 12, 17, 23] {
        accepted(|f| f.cr4 |= 1 << bit);
    }
    refused(Code::Fred, |f| f.cr4 |= 1 << 32);
    for bit in [13, 17, 20, 22, 63] {
        refused(Code::EferUnsupported, |f| f.efer |= 1 << bit);
    }
    for bit in [14, 15, 18, 21] {
        accepted(|f| f.efer |= 1 << bit);
    }
    refused(Code::EferUnsupported, |f| f.efer &= !(1 << 11));
    for bit in [48, 51, 61, 62] {
        refused(Code::Cr3Unsupported, |f| f.cr3 |= 1 << bit);
    }
    accepted(|f| f.cr3 |= 0xfff);
}

#[test]
fn extended_state() {
    refused(Code::XstateUnsupported, |f| f.xcr0 |= 1 << 10);
    refused(Code::XstateUnsupported, |f| f.xss |= 1 << 14);
    accepted(|f| f.xcr0 = 0x6_02ff);
    refused(Code::SupervisorCet, |f| f.s_cet = 1);
    refused(Code::SupervisorCet, |f| f.s_cet = 4);
}

#[test]
fn memory() {
    refused(Code::PatUnsupported, |f| f.pat = 0);
    refused(Code::MemoryBeyondMap, |f| f.iomem_end_phys = 1 << 48);
    accepted(|f| f.iomem_end_phys = (1 << 48) - 1);
    refused(Code::MemoryBeyondMap, |f| {
        f.cpuid_8000_0008.eax = 0x34;
        f.iomem_end_phys = 1 << 48;
    });
    accepted(|f| {
        f.cpuid_8000_0008.eax = 0x34;
        f.cr4 |= 1 << 12;
        f.iomem_end_phys = 1 << 48;
    });
    refused(Code::MemoryEncryption, |f| f.system |= system::SME);
    refused(Code::SnpEnabled, |f| f.syscfg |= 1 << 24);
    only(Code::MtrrInconsistent, Severity::Warn, |f| f.mtrr_def_type = 0);
}

#[test]
fn encryption_bit_in_the_page_tables() {
    let found = findings(|f| {
        f.syscfg |= 1 << 23;
        f.cr3 |= 1 << 51;
    });
    assert_eq!(found.first().map(|finding| finding.code), Some(Code::MemoryEncryption));
}

#[test]
fn encryption_narrows_the_addresses() {
    let mut facts = good_epyc(0);
    assert_eq!(physical_bits(&facts), 48);
    facts.syscfg |= 1 << 23;
    assert_eq!(physical_bits(&facts), 43);
    facts.cpuid_8000_001f = Default::default();
    assert_eq!(physical_bits(&facts), 48);
    facts.cpuid_8000_0008.eax = 0;
    assert_eq!(physical_bits(&facts), 36);
}

#[test]
fn system_state() {
    refused(Code::SingleStep, |f| f.rflags |= 1 << 8);
    refused(Code::MachineCheckInProgress, |f| f.mcg_status = 1 << 2);
    refused(Code::PageTableIsolation, |f| f.system |= system::PTI);
    refused(Code::PrivilegedLayer, |f| f.system |= system::PRIVILEGED_LAYER);
    refused(Code::InvlpgbInUse, |f| f.system |= system::INVLPGB);
    refused(Code::ErapsInUse, |f| f.system |= system::ERAPS);
    accepted(|f| f.cpuid_8000_0021.eax |= 1 << 24);
    only(Code::InsideHypervisor, Severity::Warn, |f| f.cpuid_1.ecx |= 1 << 31);
    only(Code::DebugActive, Severity::Note, |f| f.dr7 |= 1);
    only(Code::DebugActive, Severity::Note, |f| f.debugctl = 2);
    only(Code::KernelUntested, Severity::Warn, |f| f.kernel_version = 6 << 16 | 5 << 8);
}

#[test]
fn unreadable_registers() {
    let needed = [
        readable::VM_CR,
        readable::VM_HSAVE_PA,
        readable::SYSCFG,
        readable::SPEC_CTRL,
        readable::TSC_RATIO,
        readable::S_CET,
        readable::ISST_ADDR,
        readable::XSS,
        readable::MCG_STATUS,
        readable::PAT,
        readable::MTRR,
    ];
    for bit in needed {
        refused(Code::FactUnreadable, |f| f.readable &= !bit);
    }
    for bit in [readable::DEBUGCTL, readable::TSC_AUX, readable::SMCA, readable::HWCR, readable::MICROCODE] {
        accepted(|f| f.readable &= !bit);
    }
}

#[test]
fn kernels() {
    let version = |major: u64, minor: u64| kernel_support(major << 16 | minor << 8);
    assert_eq!(version(6, 1), KernelSupport::Tested);
    assert_eq!(version(6, 12), KernelSupport::Tested);
    assert_eq!(version(6, 11), KernelSupport::Untested);
    assert_eq!(version(5, 10), KernelSupport::Unknown);
    assert_eq!(version(7, 1), KernelSupport::Unknown);
}

#[test]
fn equal_cpus_compare_equal() {
    assert!(compare(&good_epyc(0), &good_epyc(7)).is_empty());
}

#[test]
fn tasks_do_not_make_cpus_differ() {
    let mut other = good_epyc(1);
    other.cr4 |= 1 << 2 | 1 << 8;
    other.cr4 &= !(1 << 4);
    other.cr3 = 0x5000;
    other.dr7 = 0x401;
    assert!(compare(&good_epyc(0), &other).is_empty());
}

#[test]
fn different_cpus_are_named() {
    let mut other = good_epyc(1);
    other.efer |= 1 << 14;
    other.microcode += 1;
    other.mtrr_digest = 0;
    let found: Vec<_> = compare(&good_epyc(0), &other)
        .iter()
        .map(|finding| (finding.code, finding.severity, compared_field(finding.detail[0])))
        .collect();
    assert_eq!(
        found,
        vec![
            (Code::CpusDiffer, Severity::Refuse, Some("efer")),
            (Code::CpusDiffer, Severity::Warn, Some("microcode")),
            (Code::MtrrInconsistent, Severity::Warn, Some("mtrr_digest")),
        ]
    );
    assert_eq!(compared_field(u64::MAX), None);
}

#[test]
fn state_differences_are_named() {
    let before = good_epyc(0);
    let mut after = before;
    (after.cr3, after.rflags, after.lstar, after.dr7) = (1, 2, 3, 4);
    let found: Vec<_> = state_difference(&before, &after).map(|d| (d.name, d.after, d.per_task)).collect();
    assert_eq!(found, vec![("dr7", 4, true), ("lstar", 3, false)]);
}

#[test]
fn attached_may_differ_in_what_is_the_hypervisors() {
    let before = good_epyc(0);
    let mut attached = before;
    attached.efer |= 1 << 12;
    attached.cr4 |= 1 << 13;
    assert_eq!(state_difference(&before, &as_if_native(&attached)).next(), None);
    attached.pat = 0;
    attached.vm_hsave_pa = 0x1000;
    let names: Vec<_> = state_difference(&before, &as_if_native(&attached)).map(|d| d.name).collect();
    assert_eq!(names, vec!["pat", "vm_hsave_pa"]);
}

/// Generates arbitrary facts of an AMD processor (another vendor ends the checks at once) or of any
/// processor.
fn any_facts() -> impl Strategy<Value = CpuFacts> {
    (proptest::collection::vec(any::<u64>(), FIELDS.len()), any::<bool>()).prop_map(|(values, amd)| {
        let mut facts = CpuFacts::default();
        for (field, value) in FIELDS.iter().zip(values) {
            (field.set)(&mut facts, value);
        }
        if amd {
            facts.cpuid_0 = good_epyc(0).cpuid_0;
        }
        facts
    })
}

/// Generates the facts of a good machine with a few fields replaced by arbitrary values.
fn nearly_good_facts() -> impl Strategy<Value = CpuFacts> {
    proptest::collection::vec((0..FIELDS.len(), any::<u64>()), 0..4).prop_map(|changes| {
        let mut facts = good_epyc(0);
        for (index, value) in changes {
            (FIELDS[index].set)(&mut facts, value);
        }
        facts
    })
}

proptest! {
    #[test]
    fn arbitrary_facts_do_not_panic(facts in any_facts(), other in any_facts()) {
        let all = check(&facts);
        prop_assert_eq!(all.first_refusal().copied(), first_refusal(&facts));
        prop_assert!((32..=52).contains(&physical_bits(&facts)));
        let _ = compare(&facts, &other).iter().count();
        let _ = state_difference(&facts, &other).count();
    }

    #[test]
    fn a_refusal_is_stable(facts in nearly_good_facts()) {
        prop_assert_eq!(first_refusal(&facts), first_refusal(&facts.clone()));
        prop_assert_eq!(first_refusal(&facts), check(&facts).first_refusal().copied());
    }

    #[test]
    fn comparison_is_symmetric(facts in nearly_good_facts(), other in nearly_good_facts()) {
        let one: Vec<_> = compare(&facts, &other).iter().copied().collect();
        let two: Vec<_> = compare(&other, &facts).iter().copied().collect();
        prop_assert_eq!(one, two);
    }
}
