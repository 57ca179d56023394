//! Intel's list. VMX is not supported by this version, so it has one entry; the rest of it
//! (feature control, capability words, EPT, MTRR types) comes here.

use crate::{Check, Finding};
use mercury_abi::{code::Code, facts::CpuFacts};

pub(crate) const CHECKS: &[Check] = &[unsupported];

fn unsupported(facts: &CpuFacts) -> Option<Finding> {
    Some(Finding::refuse(Code::IntelUnsupported, u64::from(facts.cpuid_1.eax), facts.feature_control))
}
