//! The checks that decide whether a CPU can be attached, and whether it came back as it was.
//!
//! The same code runs in two places: in the hypervisor, on each CPU just before it switches, and in
//! `mercury doctor`, on facts that the driver read. So the verdict of `doctor` is the verdict of
//! `attach`.
//!
//! * [`check`]: everything that speaks against attaching one CPU. The vendors' lists stand side by
//!   side (`amd`, `intel`); what holds for both is in `common`.
//! * [`vmx`]: the controls that the hypervisor sets on Intel, so that what it cannot set is known before.
//! * [`compare`]: whether two CPUs are equal in everything that the hypervisor relies on.
//! * [`state_difference`]: which architectural state differs between two readings of one CPU.
//!
//! White lists, never black lists: a bit that this crate does not name is a refusal. It depends on
//! nothing but the interface, allocates nothing, formats nothing and cannot panic.

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

/// One check: `None` where there is nothing to say.
type Check = fn(&CpuFacts) -> Option<Finding>;

/// Everything that speaks against attaching this CPU, refusals and warnings alike.
#[must_use]
pub fn check(facts: &CpuFacts) -> Findings {
    applicable(facts).filter_map(|check| check(facts)).collect()
}

/// The first reason not to attach this CPU; `None`: it can be attached.
#[must_use]
pub fn first_refusal(facts: &CpuFacts) -> Option<Finding> {
    applicable(facts).filter_map(|check| check(facts)).find(Finding::refuses)
}

/// Width of physical addresses in bits: CPUID 8000_0008 EAX[7:0], less what memory encryption takes
/// while it is enabled in SYSCFG (APM vol. 2, 7.10.1 and 15.34.1; CPUID 8000_001F EBX[11:6]).
/// Always in 32..=52.
#[must_use]
pub fn physical_bits(facts: &CpuFacts) -> u32 {
    let width = match facts.cpuid_8000_0008.eax & 0xff {
        // The leaf is missing: APM vol. 2, 1.1.3 (and every processor that lacks it has 36).
        0 => 36,
        width => width,
    };
    width.saturating_sub(amd::encryption_reduction(facts)).clamp(32, 52)
}

/// The checks for this CPU's vendor, the vendor's own before the common ones.
fn applicable(facts: &CpuFacts) -> impl Iterator<Item = &'static Check> {
    let (own, common): (&[Check], &[Check]) = match vendor(facts) {
        Vendor::Amd => (amd::CHECKS, common::CHECKS),
        Vendor::Intel => (intel::CHECKS, common::CHECKS),
        Vendor::Other => (&[vendor_unsupported], &[]),
    };
    own.iter().chain(common)
}

/// A processor of which nothing is known.
fn vendor_unsupported(facts: &CpuFacts) -> Option<Finding> {
    let leaf = &facts.cpuid_0;
    let low = u64::from(leaf.ebx) | u64::from(leaf.edx) << 32;
    Some(Finding::refuse(Code::VendorUnsupported, low, u64::from(leaf.ecx)))
}
