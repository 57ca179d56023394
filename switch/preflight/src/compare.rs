//! The comparison of two CPUs. They must be equal in everything that the hypervisor relies on.

use crate::{
    Finding, Findings, Severity,
    bits::{cr4, efer, vmx_misc},
    fields::{FIELDS, Field},
};
use mercury_abi::{
    code::Code,
    facts::{CpuFacts, system},
};

/// One quantity in which CPUs must agree.
struct Rule {
    /// Name of the quantity's [`Field`].
    field: &'static str,
    /// Bits of it that are compared.
    mask: u64,
    /// Severity of a difference.
    severity: Severity,
}

const fn refuse(field: &'static str) -> Rule {
    Rule { field, mask: u64::MAX, severity: Severity::Refuse }
}

const fn warn(field: &'static str) -> Rule {
    Rule { field, mask: u64::MAX, severity: Severity::Warn }
}

/// The quantities that are compared. The APIC identifiers in leaf 1 EBX and the topology in
/// 8000_0008 ECX differ by nature, and are left out. So are the bits that the kernel changes with
/// the task.
const RULES: &[Rule] = &[
    refuse("cpuid_0.ebx"),
    refuse("cpuid_0.ecx"),
    refuse("cpuid_0.edx"),
    refuse("cpuid_1.ecx"),
    refuse("cpuid_1.edx"),
    refuse("cpuid_7_0.ebx"),
    refuse("cpuid_7_0.ecx"),
    refuse("cpuid_7_0.edx"),
    refuse("cpuid_7_1.eax"),
    refuse("cpuid_d_1.eax"),
    refuse("cpuid_8000_0001.ecx"),
    refuse("cpuid_8000_0001.edx"),
    refuse("cpuid_8000_0008.eax"),
    refuse("cpuid_8000_0008.ebx"),
    refuse("cpuid_8000_000a.ebx"),
    refuse("cpuid_8000_000a.edx"),
    refuse("cpuid_8000_001f.eax"),
    refuse("cpuid_8000_001f.ebx"),
    refuse("cpuid_8000_0021.eax"),
    refuse("readable"),
    // KVM may be loaded, and enable one CPU after the other, at any time. Each CPU's own EFER tells
    // if it has SVM on.
    Rule { field: "system", mask: !system::KVM_MAY, severity: Severity::Refuse },
    Rule { field: "cr4", mask: !cr4::MAY_DIFFER, severity: Severity::Refuse },
    Rule { field: "efer", mask: !efer::SVME, severity: Severity::Refuse },
    refuse("xcr0"),
    refuse("xss"),
    refuse("syscfg"),
    refuse("feature_control"),
    refuse("vmx_basic"),
    refuse("vmx_pin_controls"),
    refuse("vmx_primary_controls"),
    refuse("vmx_secondary_controls"),
    refuse("vmx_tertiary_controls"),
    refuse("vmx_exit_controls"),
    refuse("vmx_entry_controls"),
    // The rate of the timer and the sizes of unused features are left out.
    Rule { field: "vmx_misc", mask: MISC_USED, severity: Severity::Refuse },
    refuse("vmx_cr0_fixed0"),
    refuse("vmx_cr0_fixed1"),
    refuse("vmx_cr4_fixed0"),
    refuse("vmx_cr4_fixed1"),
    refuse("vmx_ept_vpid"),
    // Linux sets it after a CPU has come online when it wakes from suspend.
    warn("pat"),
    warn("cpuid_1.eax"),
    warn("microcode"),
    warn("mtrr_def_type"),
    warn("mtrr_digest"),
];

/// Activity states, bits 8:6, processor trace, and writes to read-only fields, bit 29 (SDM,
/// "Miscellaneous data").
const MISC_USED: u64 = 0b111 << 6 | vmx_misc::TRACE_IN_VMX | 1 << 29;

const _: () = assert!(RULES.len() <= Findings::CAPACITY);

/// Returns the differences between `other` and `reference`. Detail of a [`Code::CpusDiffer`] (or,
/// for the MTRRs, [`Code::MtrrInconsistent`]): the field for [`compared_field`], and the bits that
/// differ.
#[must_use]
pub fn compare(reference: &CpuFacts, other: &CpuFacts) -> Findings {
    (0..).zip(RULES).filter_map(|(number, rule)| apply(number, rule, reference, other)).collect()
}

/// Returns the name of the field for which a difference's first detail stands.
#[must_use]
pub fn compared_field(number: u64) -> Option<&'static str> {
    RULES.get(usize::try_from(number).ok()?).map(|rule| rule.field)
}

fn apply(number: u64, rule: &Rule, reference: &CpuFacts, other: &CpuFacts) -> Option<Finding> {
    let field = find(rule.field)?;
    let differing = ((field.get)(reference) ^ (field.get)(other)) & rule.mask;
    let code = if rule.field.starts_with("mtrr") { Code::MtrrInconsistent } else { Code::CpusDiffer };
    (differing != 0).then_some(Finding { code, severity: rule.severity, detail: [number, differing] })
}

fn find(name: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_comes_while_a_cpu_is_offline() {
        let before = crate::example::good_epyc(0);
        let mut later = crate::example::good_epyc(1);
        (later.system, later.efer) = (later.system | system::KVM_MAY, later.efer | efer::SVME);
        assert_eq!(compare(&before, &later).first_refusal(), None);
    }

    #[test]
    fn every_rule_names_a_field() {
        assert!(RULES.iter().all(|rule| find(rule.field).is_some()));
    }
}
