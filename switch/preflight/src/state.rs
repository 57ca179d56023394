//! One CPU against itself at another time: what is native after detach must be what was native
//! before attach.

use crate::{
    bits::{cr4, efer},
    fields::FIELDS,
};
use mercury_abi::facts::{CpuFacts, system};

/// A field that differs between two readings of one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The field's name in [`CpuFacts`].
    pub name: &'static str,
    /// First reading.
    pub before: u64,
    /// Second reading.
    pub after: u64,
    /// The kernel changes this with the task that runs (debug registers, LDT, speculation control
    /// and the like), so on a busy machine a difference proves nothing.
    pub per_task: bool,
}

/// Not state: what was running, and what the machine as a whole is.
const IGNORED: &[&str] = &["cr3", "rflags", "iomem_end_phys"];

/// State that belongs to the task which happened to run. SS is null in an interrupt that struck user mode,
/// and facts are read in an interrupt.
const PER_TASK: &[&str] = &["cr4", "dr6", "dr7", "ldtr", "ss", "spec_ctrl", "debugctl"];

/// Everything in which two readings of one CPU differ, page tables and flags of the reader apart.
pub fn state_difference<'a>(
    before: &'a CpuFacts,
    after: &'a CpuFacts,
) -> impl Iterator<Item = Difference> + 'a {
    FIELDS.iter().filter(|field| !IGNORED.contains(&field.name)).filter_map(|field| {
        let (old, new) = ((field.get)(before), (field.get)(after));
        let per_task = PER_TASK.contains(&field.name);
        (old != new).then_some(Difference { name: field.name, before: old, after: new, per_task })
    })
}

/// A reading taken while attached as it would be on the native CPU: EFER.SVME (unless KVM may have a say in it) or
/// CR4.VMXE is the hypervisor's, and nothing else. VM_HSAVE_PA reads as what the system wrote.
#[must_use]
pub fn as_if_native(attached: &CpuFacts) -> CpuFacts {
    let ours = if attached.system & system::KVM_MAY == 0 { efer::SVME } else { 0 };
    CpuFacts { efer: attached.efer & !ours, cr4: attached.cr4 & !cr4::VMXE, ..*attached }
}

/// Every quantity of the facts by name.
pub fn named_values(facts: &CpuFacts) -> impl Iterator<Item = (&'static str, u64)> + '_ {
    FIELDS.iter().map(|field| (field.name, (field.get)(facts)))
}
