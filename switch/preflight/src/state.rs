//! The comparison of one CPU with itself at another time. The native state after a detach must be
//! the state before the attach.

use crate::{
    bits::{cr4, efer},
    fields::FIELDS,
};
use mercury_abi::facts::{CpuFacts, system};

/// A field that differs between two readings of one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the field in [`CpuFacts`].
    pub name: &'static str,
    /// Value in the first reading.
    pub before: u64,
    /// Value in the second reading.
    pub after: u64,
    /// True if the kernel changes the field with the task that runs (debug registers, LDT,
    /// speculation control and the like). On a busy machine a difference in it proves nothing.
    pub per_task: bool,
}

/// Fields that are no state of the CPU: the running task, and properties of the whole machine.
const IGNORED: &[&str] = &["cr3", "rflags", "iomem_end_phys"];

/// Fields that belong to the task which happened to run. SS is null in an interrupt that struck
/// user mode, and the driver reads facts in an interrupt.
const PER_TASK: &[&str] = &["cr4", "dr6", "dr7", "ldtr", "ss", "spec_ctrl", "debugctl"];

/// Returns all differences between two readings of one CPU, apart from the fields that are no state of the
/// CPU.
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

/// Returns a reading of an attached CPU as it would be on the native CPU. Only EFER.SVME (unless
/// KVM may use SVM) or CR4.VMXE belongs to the hypervisor. VM_HSAVE_PA reads as the value that the
/// system wrote.
#[must_use]
pub fn as_if_native(attached: &CpuFacts) -> CpuFacts {
    let ours = if attached.system & system::KVM_MAY == 0 { efer::SVME } else { 0 };
    CpuFacts { efer: attached.efer & !ours, cr4: attached.cr4 & !cr4::VMXE, ..*attached }
}

/// Returns every quantity of the facts with its name.
pub fn named_values(facts: &CpuFacts) -> impl Iterator<Item = (&'static str, u64)> + '_ {
    FIELDS.iter().map(|field| (field.name, (field.get)(facts)))
}
