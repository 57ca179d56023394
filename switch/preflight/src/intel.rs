//! The checks for Intel's processors: VMX with extended page tables and unrestricted guest.
//! Sections are those of the Software Developer's Manual, volume 3.

use crate::{
    Check, Finding,
    bits::{cpuid, cr0, cr4, debugctl, feature_control, rtit_ctl, vmx_misc},
    common::{self, beyond, unreadable},
    physical_bits,
    vmx::{self, basic, ept_vpid, primary, secondary},
};
use mercury_abi::{
    code::Code,
    facts::{CpuFacts, readable},
};

pub(crate) const CHECKS: &[Check] = &[
    vmx,
    intel_facts_unreadable,
    vmx_disabled,
    ept,
    ept_kind,
    unrestricted_guest,
    common::in_use,
    common::efer,
    common::supervisor_cet,
    controls,
    fixed_bits,
    region,
    processor_trace,
    debug_store,
    memory_beyond_map,
];

fn has_vmx(facts: &CpuFacts) -> bool {
    facts.cpuid_1.ecx & cpuid::LEAF1_ECX_VMX != 0
}

/// Refuses a processor without VMX ("Discovering support for VMX").
fn vmx(facts: &CpuFacts) -> Option<Finding> {
    (!has_vmx(facts)).then(|| Finding::refuse(Code::NoVmx, 0, u64::from(facts.cpuid_1.ecx)))
}

/// Refuses if an MSR is unreadable that the switch reads, checks or restores. The MTRRs belong to
/// them: the nested tables take their memory types from the MTRRs.
fn intel_facts_unreadable(facts: &CpuFacts) -> Option<Finding> {
    let shadow_stacks = facts.cpuid_7_0.ecx & cpuid::LEAF7_ECX_CET_SS != 0;
    unreadable(
        facts,
        &[
            (facts.cpuid_1.edx & cpuid::LEAF1_EDX_MTRR == 0, readable::MTRR),
            (has_vmx(facts), readable::FEATURE_CONTROL | readable::VMX | readable::DEBUGCTL),
            (shadow_stacks, readable::S_CET | readable::ISST_ADDR),
        ],
    )
}

/// Refuses unless firmware allows VMXON outside of SMX and has locked the setting ("Enabling and
/// entering VMX operation"). Linux locks a setting that firmware left open. Detail: 1 if locked;
/// IA32_FEATURE_CONTROL.
fn vmx_disabled(facts: &CpuFacts) -> Option<Finding> {
    let readable = facts.readable & readable::FEATURE_CONTROL != 0;
    let wanted = feature_control::LOCK | feature_control::VMX_OUTSIDE_SMX;
    let disabled = has_vmx(facts) && readable && facts.feature_control & wanted != wanted;
    let locked = facts.feature_control & feature_control::LOCK;
    disabled.then(|| Finding::refuse(Code::VmxDisabled, locked, facts.feature_control))
}

fn may(capability: u64, control: u32) -> bool {
    (capability >> 32) as u32 & control != 0
}

fn has_ept(facts: &CpuFacts) -> bool {
    may(facts.vmx_primary_controls, primary::ACTIVATE_SECONDARY)
        && may(facts.vmx_secondary_controls, secondary::EPT)
}

fn knows_vmx(facts: &CpuFacts) -> bool {
    has_vmx(facts) && facts.readable & readable::VMX != 0
}

/// Refuses a processor without extended page tables (appendix A.3.3).
fn ept(facts: &CpuFacts) -> Option<Finding> {
    let missing = knows_vmx(facts) && !has_ept(facts);
    missing.then(|| Finding::refuse(Code::NoEpt, facts.vmx_secondary_controls, facts.vmx_primary_controls))
}

/// Refuses extended page tables of another kind than Mercury builds (appendix A.10). Detail: the
/// missing capabilities; the MSR.
fn ept_kind(facts: &CpuFacts) -> Option<Finding> {
    let missing = ept_vpid::REQUIRED & !facts.vmx_ept_vpid;
    let wrong = knows_vmx(facts) && has_ept(facts) && missing != 0;
    wrong.then(|| Finding::refuse(Code::EptUnsupported, missing, facts.vmx_ept_vpid))
}

/// Refuses a processor without unrestricted guests (appendix A.3.3): a CPU that is reset starts in
/// real mode.
fn unrestricted_guest(facts: &CpuFacts) -> Option<Finding> {
    let has = may(facts.vmx_secondary_controls, secondary::UNRESTRICTED_GUEST);
    let missing = knows_vmx(facts) && has_ept(facts) && !has;
    missing.then(|| Finding::refuse(Code::NoUnrestrictedGuest, facts.vmx_secondary_controls, 0))
}

/// Refuses if no legal controls exist. Detail: the word as [`vmx::Word`]; its bits.
fn controls(facts: &CpuFacts) -> Option<Finding> {
    let asked = knows_vmx(facts) && has_ept(facts) && unrestricted_guest(facts).is_none();
    let refusal = vmx::choose(facts).err().filter(|_| asked)?;
    Some(Finding::refuse(refusal.code, refusal.word as u64, refusal.bits))
}

/// Refuses a CR0 or CR4 that VMX does not allow (appendix A.7 and A.8). Unrestricted guests may
/// choose PE and PG; the driver sets VMXE. Detail: 0 for CR0 or 4 for CR4; the bits.
fn fixed_bits(facts: &CpuFacts) -> Option<Finding> {
    let wrong = |value: u64, ones: u64, allowed: u64| (ones & !value) | (value & !allowed);
    let free = cr0::PE | cr0::PG;
    let cr0 = wrong(facts.cr0, facts.vmx_cr0_fixed0 & !free, facts.vmx_cr0_fixed1);
    let cr4 = wrong(facts.cr4 | cr4::VMXE, facts.vmx_cr4_fixed0, facts.vmx_cr4_fixed1);
    // Bits that preflight does not know have a code of their own.
    let (cr0, cr4) = (cr0 & cr0::KNOWN, cr4 & (cr4::KNOWN | cr4::VMXE));
    match (cr0, cr4) {
        _ if !knows_vmx(facts) => None,
        (0, 0) => None,
        (0, bits) => Some(Finding::refuse(Code::VmxFixedBits, 4, bits)),
        (bits, _) => Some(Finding::refuse(Code::VmxFixedBits, 0, bits)),
    }
}

/// Refuses if the VMXON region and the VMCS cannot lie in ordinary memory (appendix A.1).
fn region(facts: &CpuFacts) -> Option<Finding> {
    const WRITE_BACK: u64 = 6;
    let kind = facts.vmx_basic >> basic::TYPE_SHIFT & 0xf;
    let out_of_reach = facts.vmx_basic & basic::BELOW_4_GIB != 0 && facts.iomem_end_phys >> 32 != 0;
    let wrong = knows_vmx(facts) && (kind != WRITE_BACK || out_of_reach);
    wrong.then(|| Finding::refuse(Code::VmxRegion, kind, facts.vmx_basic))
}

/// Refuses a running processor trace that VMXON would stop, because it cannot run in VMX operation
/// ("Tracing in VMX operation"; HARDWARE I-26). Detail: IA32_RTIT_CTL, IA32_VMX_MISC.
fn processor_trace(facts: &CpuFacts) -> Option<Finding> {
    let tracing = facts.rtit_ctl & rtit_ctl::TRACE_EN != 0;
    let stopped = tracing && facts.vmx_misc & vmx_misc::TRACE_IN_VMX == 0;
    stopped.then(|| Finding::refuse(Code::ProcessorTrace, facts.rtit_ctl, facts.vmx_misc))
}

/// Refuses an active debug store. Its records go to virtual addresses through the loaded page
/// tables, and the hypervisor's own do not map them (SDM volume 3, "Debug store mechanism").
/// Detail: IA32_PEBS_ENABLE, IA32_DEBUGCTL.
fn debug_store(facts: &CpuFacts) -> Option<Finding> {
    let stores = facts.pebs_enable != 0 || facts.debugctl & debugctl::BTS != 0;
    stores.then(|| Finding::refuse(Code::DebugStore, facts.pebs_enable, facts.debugctl))
}

/// Refuses if RAM or a device lies outside the nested map: above the physical width, or above the
/// reach of the tables' levels.
fn memory_beyond_map(facts: &CpuFacts) -> Option<Finding> {
    let reach = if facts.vmx_ept_vpid & ept_vpid::WALK_5 != 0 { 57 } else { 48 };
    let bits = physical_bits(facts).min(reach);
    let outside = beyond(facts.iomem_end_phys, bits) != 0;
    outside.then(|| Finding::refuse(Code::MemoryBeyondMap, facts.iomem_end_phys, u64::from(bits)))
}
