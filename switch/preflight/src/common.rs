//! The checks for every vendor, and the functions that both vendors' lists use.

use crate::{
    Check, Finding,
    bits::{cpuid, cr0, cr4, debugctl, dr7, efer, mcg_status, mtrr_def_type, rflags, s_cet, xstate},
    physical_bits,
};
use mercury_abi::{
    code::Code,
    facts::{CpuFacts, readable, system},
};

/// The maker of the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD ("AuthenticAMD").
    Amd,
    /// Intel ("GenuineIntel").
    Intel,
    /// Any other maker; its processors are refused.
    Other,
}

/// Returns the vendor by CPUID 0 EBX, EDX, ECX (APM volume 3, E.3.1).
#[must_use]
pub fn vendor(facts: &CpuFacts) -> Vendor {
    let leaf = &facts.cpuid_0;
    match [leaf.ebx, leaf.edx, leaf.ecx] {
        // "AuthenticAMD"
        [0x6874_7541, 0x6974_6e65, 0x444d_4163] => Vendor::Amd,
        // "GenuineIntel"
        [0x756e_6547, 0x4965_6e69, 0x6c65_746e] => Vendor::Intel,
        _ => Vendor::Other,
    }
}

/// The support for a kernel series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelSupport {
    /// A series on which every test of Mercury runs.
    Tested,
    /// An untested series of a known major version.
    Untested,
    /// A series of an unknown major version: `mercury attach` wants `--force`.
    Unknown,
}

/// Returns the support for a Linux version code (major << 16 | minor << 8 | patch).
#[must_use]
pub fn kernel_support(version: u64) -> KernelSupport {
    match (version >> 16, version >> 8 & 0xff) {
        (6, 1 | 12) => KernelSupport::Tested,
        (6, _) => KernelSupport::Untested,
        _ => KernelSupport::Unknown,
    }
}

pub(crate) const CHECKS: &[Check] = &[
    common_facts_unreadable,
    cr0,
    fred,
    cr4,
    cr3,
    xstate,
    pat,
    single_step,
    machine_check,
    privileged_layer,
    inside_hypervisor,
    mtrrs_disabled,
    debug_active,
    kernel_untested,
];

/// Refuses if MSRs that the CPU has by CPUID could not be read. Detail: their
/// [`mercury_abi::facts::readable`] bits.
pub(crate) fn unreadable(facts: &CpuFacts, required: &[(bool, u64)]) -> Option<Finding> {
    let wanted = required.iter().filter(|(present, _)| *present).fold(0, |all, (_, bit)| all | bit);
    let missing = wanted & !facts.readable;
    (missing != 0).then(|| Finding::refuse(Code::FactUnreadable, missing, facts.readable))
}

/// Refuses a register that violates its white list. Detail: the bits at fault; the whole value.
pub(crate) fn white_list(code: Code, value: u64, known: u64, required: u64) -> Option<Finding> {
    let fault = (value & !known) | (required & !value);
    (fault != 0).then(|| Finding::refuse(code, fault, value))
}

fn common_facts_unreadable(facts: &CpuFacts) -> Option<Finding> {
    let leaf1_edx = facts.cpuid_1.edx;
    unreadable(
        facts,
        &[
            (true, readable::PAT),
            (leaf1_edx & cpuid::LEAF1_EDX_MTRR != 0, readable::MTRR),
            (leaf1_edx & cpuid::LEAF1_EDX_MCA != 0, readable::MCG_STATUS),
            (facts.cpuid_d_1.eax & cpuid::LEAFD1_EAX_XSAVES != 0, readable::XSS),
        ],
    )
}

/// Refuses if other software uses hardware virtualization (APM 15.4; SDM, "Enabling and entering
/// VMX operation"). KVM on AMD is no reason, because it runs on above the hypervisor. Detail: EFER,
/// CR4.
pub(crate) fn in_use(facts: &CpuFacts) -> Option<Finding> {
    let shared = facts.system & system::KVM_MAY != 0;
    let used = facts.efer & efer::SVME != 0 && !shared || facts.cr4 & cr4::VMXE != 0;
    used.then(|| Finding::refuse(Code::VirtualizationInUse, facts.efer, facts.cr4))
}

/// Checks EFER against its white list (APM 3.1.7, 15.5.1). SVME is reported apart.
pub(crate) fn efer(facts: &CpuFacts) -> Option<Finding> {
    white_list(Code::EferUnsupported, facts.efer, efer::KNOWN | efer::SVME, efer::REQUIRED)
}

/// Refuses a kernel that uses shadow stacks (APM 18.9), or tracks branches where the hypervisor
/// cannot carry that state.
pub(crate) fn supervisor_cet(facts: &CpuFacts) -> Option<Finding> {
    let carried = if vendor(facts) == Vendor::Intel { s_cet::ENDBR_EN } else { 0 };
    let wrong = facts.s_cet & !carried != 0;
    wrong.then(|| Finding::refuse(Code::SupervisorCet, facts.s_cet, facts.cr4))
}

/// Checks CR0 against its white list (APM 3.1.1, 15.5.1).
fn cr0(facts: &CpuFacts) -> Option<Finding> {
    white_list(Code::Cr0Unsupported, facts.cr0, cr0::KNOWN, cr0::REQUIRED)
}

/// Refuses FRED, because it changes the delivery of every event.
fn fred(facts: &CpuFacts) -> Option<Finding> {
    (facts.cr4 & cr4::FRED != 0).then(|| Finding::refuse(Code::Fred, cr4::FRED, facts.cr4))
}

/// Checks CR4 against its white list (APM 3.1.3, 15.5.1). FRED and VMXE are reported apart.
fn cr4(facts: &CpuFacts) -> Option<Finding> {
    let known = cr4::KNOWN | cr4::FRED | cr4::VMXE;
    white_list(Code::Cr4Unsupported, facts.cr4, known, cr4::REQUIRED)
}

/// Refuses a CR3 with bits above the physical width (APM 3.1.2, 5.3.2): a C-bit, or address
/// masking.
fn cr3(facts: &CpuFacts) -> Option<Finding> {
    let above = beyond(facts.cr3, physical_bits(facts));
    (above != 0).then(|| Finding::refuse(Code::Cr3Unsupported, above, facts.cr3))
}

/// Checks XCR0 and XSS against their white lists (APM 11.5.2). Detail: the unknown components; 0
/// for XCR0, 1 for XSS.
fn xstate(facts: &CpuFacts) -> Option<Finding> {
    let (user, supervisor) = (facts.xcr0 & !xstate::XCR0_KNOWN, facts.xss & !xstate::XSS_KNOWN);
    match (user, supervisor) {
        (0, 0) => None,
        (0, bits) => Some(Finding::refuse(Code::XstateUnsupported, bits, 1)),
        (bits, _) => Some(Finding::refuse(Code::XstateUnsupported, bits, 0)),
    }
}

/// Refuses a PAT whose index 0 is not write-back. Nested entries use that index (APM 15.25.8;
/// 7.8.2: 6 is WB).
fn pat(facts: &CpuFacts) -> Option<Finding> {
    let entry0 = facts.pat & 7;
    let readable = facts.readable & readable::PAT != 0;
    (readable && entry0 != 6).then(|| Finding::refuse(Code::PatUnsupported, entry0, facts.pat))
}

/// Refuses while a debugger single-steps the switch (APM 13.1.4).
fn single_step(facts: &CpuFacts) -> Option<Finding> {
    let stepping = facts.rflags & rflags::TF != 0;
    stepping.then(|| Finding::refuse(Code::SingleStep, rflags::TF, facts.rflags))
}

/// Refuses while the kernel handles a machine check: a second one would be a shutdown (APM 9.3.1).
fn machine_check(facts: &CpuFacts) -> Option<Finding> {
    let in_progress = facts.mcg_status & mcg_status::MCIP;
    (in_progress != 0).then(|| Finding::refuse(Code::MachineCheckInProgress, in_progress, facts.mcg_status))
}

/// Refuses a kernel that runs above Xen.
fn privileged_layer(facts: &CpuFacts) -> Option<Finding> {
    let layered = facts.system & system::PRIVILEGED_LAYER != 0;
    layered.then(|| Finding::refuse(Code::PrivilegedLayer, system::PRIVILEGED_LAYER, facts.system))
}

/// Warns in a virtual machine: it works, but every world switch is emulated. Detail: the first
/// eight letters of the hypervisor's signature, then the last four.
fn inside_hypervisor(facts: &CpuFacts) -> Option<Finding> {
    let leaf = &facts.cpuid_4000_0000;
    let letters = u64::from(leaf.ebx) | u64::from(leaf.ecx) << 32;
    let inside = facts.cpuid_1.ecx & cpuid::LEAF1_ECX_HYPERVISOR != 0;
    inside.then(|| Finding::warn(Code::InsideHypervisor, letters, u64::from(leaf.edx)))
}

/// Warns if the MTRRs are off. All memory is then uncacheable (APM 7.7.2): slow, not wrong.
fn mtrrs_disabled(facts: &CpuFacts) -> Option<Finding> {
    let present = facts.cpuid_1.edx & cpuid::LEAF1_EDX_MTRR != 0;
    let readable = facts.readable & readable::MTRR != 0;
    let enabled = facts.mtrr_def_type & mtrr_def_type::E != 0;
    let off = present && readable && !enabled;
    off.then(|| Finding::warn(Code::MtrrInconsistent, mtrr_def_type::E, facts.mtrr_def_type))
}

/// Notes that debugging facilities are in use; they go on working. Detail: DR7, DEBUGCTL.
fn debug_active(facts: &CpuFacts) -> Option<Finding> {
    let armed = facts.dr7 & (dr7::ARMED | dr7::GD) != 0;
    let recording = facts.debugctl & (debugctl::LBR | debugctl::BTF) != 0;
    (armed || recording).then(|| Finding::note(Code::DebugActive, facts.dr7, facts.debugctl))
}

/// Warns of a kernel series without tests. The command, not this check, decides if an unknown major
/// version is refused.
fn kernel_untested(facts: &CpuFacts) -> Option<Finding> {
    let tested = kernel_support(facts.kernel_version) == KernelSupport::Tested;
    (!tested).then(|| Finding::warn(Code::KernelUntested, facts.kernel_version, 0))
}

/// Returns the bits of `address` at or above bit `bits`, which is below 64.
pub(crate) fn beyond(address: u64, bits: u32) -> u64 {
    address & u64::MAX.checked_shl(bits).unwrap_or(0)
}
