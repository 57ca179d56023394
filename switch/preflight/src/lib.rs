//! The checks before an attach, and the comparison after a detach.
//!
//! The same code runs in two places: in the hypervisor, on each CPU just before the switch, and in
//! `mercury doctor`, on facts that the driver read. The verdict of `doctor` is therefore the
//! verdict of `attach`.
//!
//! - [`check`]: all reasons against attaching one CPU. The vendors' lists stand side by side
//!   (`amd`, `intel`); `common` holds the checks for both.
//! - [`vmx`]: the controls that the hypervisor sets on Intel, so that a missing control is known
//!   before.
//! - [`compare`]: the comparison of two CPUs in everything that the hypervisor relies on.
//! - [`state_difference`]: the difference in architectural state between two readings of one CPU.
//!
//! All lists are white lists: a bit that this crate does not name is a refusal. The crate depends
//! on the interface (`mercury-abi`) alone, allocates nothing, formats nothing and cannot panic.

#![no_std]
#![forbid(unsafe_code)]

mod amd;
pub mod bits;
mod common;
mod compare;
#[cfg(any(test, feature = "example"))]
pub mod example;
mod fields;
mod findings;
mod intel;
mod state;
#[cfg(test)]
mod tests;
pub mod vmx;

pub use common::{KernelSupport, Vendor, kernel_support, vendor};
pub use compare::{compare, compared_field};
pub use findings::{Finding, Findings, Severity};
pub use state::{Difference, as_if_native, named_values, state_difference};

use mercury_abi::{code::Code, facts::CpuFacts};

/// One check. It returns `None` if it has nothing to report.
type Check = fn(&CpuFacts) -> Option<Finding>;

/// Returns all findings about an attach of this CPU, refusals and warnings alike.
#[must_use]
pub fn check(facts: &CpuFacts) -> Findings {
    applicable(facts).filter_map(|check| check(facts)).collect()
}

/// Returns the first reason not to attach this CPU; `None` if the CPU can be attached.
#[must_use]
pub fn first_refusal(facts: &CpuFacts) -> Option<Finding> {
    applicable(facts).filter_map(|check| check(facts)).find(Finding::refuses)
}

/// Returns the width of physical addresses in bits, always in 32..=52: CPUID 8000_0008 EAX bits 7:0,
/// less the bits that memory encryption takes while SYSCFG enables it (APM volume 2, 7.10.1 and
/// 15.34.1; CPUID 8000_001F EBX bits 11:6).
#[must_use]
pub fn physical_bits(facts: &CpuFacts) -> u32 {
    let width = match facts.cpuid_8000_0008.eax & 0xff {
        // A processor without the leaf has 36 bits (APM volume 2, 1.1.3).
        0 => 36,
        width => width,
    };
    width.saturating_sub(amd::encryption_reduction(facts)).clamp(32, 52)
}

/// Returns the checks for this CPU's vendor, the vendor's own before the common ones.
fn applicable(facts: &CpuFacts) -> impl Iterator<Item = &'static Check> {
    let (own, common): (&[Check], &[Check]) = match vendor(facts) {
        Vendor::Amd => (amd::CHECKS, common::CHECKS),
        Vendor::Intel => (intel::CHECKS, common::CHECKS),
        Vendor::Other => (&[vendor_unsupported], &[]),
    };
    own.iter().chain(common)
}

/// Refuses a processor of any other vendor.
fn vendor_unsupported(facts: &CpuFacts) -> Option<Finding> {
    let leaf = &facts.cpuid_0;
    let low = u64::from(leaf.ebx) | u64::from(leaf.edx) << 32;
    Some(Finding::refuse(Code::VendorUnsupported, low, u64::from(leaf.ecx)))
}
