//! Facts that CPUID alone gives about the processor: enough to refuse it without a driver.

use crate::error::Error;
use mercury_abi::{
    code::Code,
    facts::{CpuFacts, CpuidLeaf},
};
use mercury_preflight::Severity;
use std::arch::x86_64::__cpuid_count;

/// Codes of findings that need nothing but CPUID.
const BY_CPUID: [Code; 8] = [
    Code::VendorUnsupported,
    Code::FamilyUnsupported,
    Code::IntelUnsupported,
    Code::NoSvm,
    Code::NoVmx,
    Code::NoAsids,
    Code::NoNestedPaging,
    Code::InsideHypervisor,
];

/// Returns true if CPUID alone decides this finding, so that no driver is needed.
#[must_use]
pub fn is_decided_by_cpuid(code: Code) -> bool {
    BY_CPUID.contains(&code)
}

/// Refuses a processor on which attach can never work, by CPUID alone, because nothing else is
/// known without a driver.
#[must_use]
pub fn refused_processor(cpuid: &CpuFacts, action: &str) -> Option<Error> {
    let checks = mercury_preflight::check(cpuid);
    let found = checks
        .iter()
        .find(|finding| finding.severity == Severity::Refuse && is_decided_by_cpuid(finding.code));
    found.map(|finding| Error::refused(action, finding.code, None, finding.detail))
}

/// Reads CPUID without a driver. Everything else stays zero.
#[must_use]
pub fn cpuid_facts() -> CpuFacts {
    let leaf = |number: u32, subleaf: u32| {
        let found = __cpuid_count(number, subleaf);
        CpuidLeaf { eax: found.eax, ebx: found.ebx, ecx: found.ecx, edx: found.edx }
    };
    let basic = leaf(0, 0);
    let extended = leaf(0x8000_0000, 0);
    let upto = |number: u32| if number <= extended.eax { leaf(number, 0) } else { CpuidLeaf::default() };
    CpuFacts {
        cpuid_0: basic,
        cpuid_1: leaf(1, 0),
        cpuid_4000_0000: leaf(0x4000_0000, 0),
        cpuid_8000_0000: extended,
        cpuid_8000_0001: upto(0x8000_0001),
        cpuid_8000_0008: upto(0x8000_0008),
        cpuid_8000_000a: upto(0x8000_000a),
        ..CpuFacts::default()
    }
}
