//! The checks for AMD's processors: SVM with nested paging.

use crate::{
    Check, Finding,
    bits::{cpuid, cr4, syscfg, vm_cr},
    common::{self, beyond, unreadable},
    physical_bits,
};
use mercury_abi::{
    code::Code,
    facts::{CpuFacts, readable, system},
};

pub(crate) const CHECKS: &[Check] = &[
    family,
    svm,
    amd_facts_unreadable,
    svm_disabled,
    nested_paging,
    asids,
    init_redirected,
    common::in_use,
    common::efer,
    common::supervisor_cet,
    memory_encryption,
    snp,
    tsc_ratio,
    invlpgb,
    eraps,
    hsave_in_use,
    memory_beyond_map,
    page_table_isolation,
];

/// The oldest supported family. Families 10h to 16h have errata (HARDWARE A-49).
const OLDEST_FAMILY: u32 = 0x17;

/// TSC_RATIO of 1.0: 8 integer bits above 32 fraction bits (APM 15.30.5).
const TSC_RATIO_ONE: u64 = 1 << 32;

/// Returns the number of address bits that memory encryption takes (APM 7.10.1): 0 unless SYSCFG
/// enables it.
pub(crate) fn encryption_reduction(facts: &CpuFacts) -> u32 {
    let capable = facts.cpuid_8000_001f.eax & (cpuid::ENC_EAX_SME | cpuid::ENC_EAX_SEV) != 0;
    let enabled = facts.syscfg & syscfg::MEM_ENCRYPTION != 0;
    if capable && enabled { facts.cpuid_8000_001f.ebx >> 6 & 0x3f } else { 0 }
}

/// Refuses a family below 17h: base plus extended family of CPUID 1 EAX (APM volume 3, E.3.2).
fn family(facts: &CpuFacts) -> Option<Finding> {
    let eax = facts.cpuid_1.eax;
    let family = match eax >> 8 & 0xf {
        0xf => 0xf + (eax >> 20 & 0xff),
        base => base,
    };
    let detail = (u64::from(family), u64::from(eax));
    (family < OLDEST_FAMILY).then(|| Finding::refuse(Code::FamilyUnsupported, detail.0, detail.1))
}

fn has_svm(facts: &CpuFacts) -> bool {
    facts.cpuid_8000_0001.ecx & cpuid::EXT1_ECX_SVM != 0
}

fn svm_feature(facts: &CpuFacts, bit: u32) -> bool {
    has_svm(facts) && facts.cpuid_8000_000a.edx & bit != 0
}

/// Refuses a processor without SVM (APM 15.4).
fn svm(facts: &CpuFacts) -> Option<Finding> {
    (!has_svm(facts)).then(|| Finding::refuse(Code::NoSvm, 0, u64::from(facts.cpuid_8000_0001.ecx)))
}

/// Refuses if an MSR is unreadable that the switch saves, checks or restores.
fn amd_facts_unreadable(facts: &CpuFacts) -> Option<Finding> {
    let sme = facts.cpuid_8000_001f.eax & (cpuid::ENC_EAX_SME | cpuid::ENC_EAX_SEV) != 0;
    let shadow_stacks = facts.cpuid_7_0.ecx & cpuid::LEAF7_ECX_CET_SS != 0;
    let swapped_stacks = svm_feature(facts, cpuid::SVM_EDX_SSS);
    unreadable(
        facts,
        &[
            (has_svm(facts), readable::VM_CR | readable::VM_HSAVE_PA),
            (sme, readable::SYSCFG),
            (svm_feature(facts, cpuid::SVM_EDX_SPEC_CTRL), readable::SPEC_CTRL),
            (svm_feature(facts, cpuid::SVM_EDX_TSC_RATE), readable::TSC_RATIO),
            (shadow_stacks || swapped_stacks, readable::S_CET | readable::ISST_ADDR),
        ],
    )
}

/// Refuses if firmware disabled SVM (APM 15.30.1, 15.31). Detail: 1 if the setting is locked;
/// VM_CR.
fn svm_disabled(facts: &CpuFacts) -> Option<Finding> {
    let locked = u64::from(facts.vm_cr & vm_cr::LOCK != 0);
    let disabled = facts.vm_cr & vm_cr::SVMDIS != 0;
    disabled.then(|| Finding::refuse(Code::SvmDisabled, locked, facts.vm_cr))
}

/// Refuses a processor without nested paging (APM 15.25.2).
fn nested_paging(facts: &CpuFacts) -> Option<Finding> {
    let missing = has_svm(facts) && !svm_feature(facts, cpuid::SVM_EDX_NP);
    missing.then(|| Finding::refuse(Code::NoNestedPaging, 0, u64::from(facts.cpuid_8000_000a.edx)))
}

/// Refuses a processor whose only address-space identifier is 0, the host's (APM 15.16).
fn asids(facts: &CpuFacts) -> Option<Finding> {
    let asids = u64::from(facts.cpuid_8000_000a.ebx);
    (has_svm(facts) && asids < 2).then(|| Finding::refuse(Code::NoAsids, asids, 0))
}

/// Refuses if INIT is turned into #SX (APM 15.28, 15.30.1).
fn init_redirected(facts: &CpuFacts) -> Option<Finding> {
    let redirected = facts.vm_cr & vm_cr::R_INIT != 0;
    redirected.then(|| Finding::refuse(Code::InitRedirected, vm_cr::R_INIT, facts.vm_cr))
}

/// Refuses if the kernel's addresses carry the encryption bit (APM 7.10.2). Detail: that bit, CR3.
fn memory_encryption(facts: &CpuFacts) -> Option<Finding> {
    let encryption_bit = 1_u64.checked_shl(facts.cpuid_8000_001f.ebx & 0x3f).unwrap_or(0);
    let enabled = facts.syscfg & syscfg::MEM_ENCRYPTION != 0;
    let in_tables = enabled && facts.cr3 & encryption_bit != 0;
    let active = facts.system & system::SME != 0 || in_tables;
    active.then(|| Finding::refuse(Code::MemoryEncryption, encryption_bit, facts.cr3))
}

/// Refuses if a reverse map would check the hypervisor's pages (APM 15.36).
fn snp(facts: &CpuFacts) -> Option<Finding> {
    let enabled = facts.syscfg & syscfg::SNP != 0;
    enabled.then(|| Finding::refuse(Code::SnpEnabled, syscfg::SNP, facts.syscfg))
}

/// Refuses if an earlier hypervisor left a TSC scale: the clock would jump at attach (APM 15.30.5).
fn tsc_ratio(facts: &CpuFacts) -> Option<Finding> {
    let exists = svm_feature(facts, cpuid::SVM_EDX_TSC_RATE);
    let readable = facts.readable & readable::TSC_RATIO != 0;
    let scaled = exists && readable && facts.tsc_ratio != TSC_RATIO_ONE;
    scaled.then(|| Finding::refuse(Code::TscRatio, facts.tsc_ratio, TSC_RATIO_ONE))
}

/// Refuses a kernel that uses INVLPGB: from a native CPU it does not reach the translations of an
/// attached one (HARDWARE A-6).
fn invlpgb(facts: &CpuFacts) -> Option<Finding> {
    let used = facts.system & system::INVLPGB != 0;
    used.then(|| Finding::refuse(Code::InvlpgbInUse, system::INVLPGB, facts.system))
}

/// Refuses a kernel that uses ERAPS. A guest has a return predictor of the older size. A control
/// that Mercury leaves off decides which flushes of it the processor still makes by itself. A
/// kernel that knows the feature may have left out flushes of its own. The processor's feature bit
/// alone is no reason: kernels that do not know it flush as before.
fn eraps(facts: &CpuFacts) -> Option<Finding> {
    let used = facts.system & system::ERAPS != 0;
    used.then(|| Finding::refuse(Code::ErapsInUse, system::ERAPS, facts.system))
}

/// Warns if software other than KVM used SVM before. A detach restores the value (APM 15.30.4).
fn hsave_in_use(facts: &CpuFacts) -> Option<Finding> {
    (facts.vm_hsave_pa != 0 && facts.system & system::KVM_MAY == 0)
        .then(|| Finding::warn(Code::HsaveInUse, facts.vm_hsave_pa, 0))
}

/// Refuses if RAM or a device lies outside the nested map. The map covers the physical width, and
/// with four levels no more than 48 bits (APM 15.25.3: the nested depth is the host's).
fn memory_beyond_map(facts: &CpuFacts) -> Option<Finding> {
    let depth_bits = if facts.cr4 & cr4::LA57 != 0 { 57 } else { 48 };
    let bits = physical_bits(facts).min(depth_bits);
    let outside = beyond(facts.iomem_end_phys, bits) != 0;
    outside.then(|| Finding::refuse(Code::MemoryBeyondMap, facts.iomem_end_phys, u64::from(bits)))
}

/// Refuses page-table isolation. The gate lies in the kernel's text, which the user half's tables
/// do not map. AMD's processors need no isolation.
fn page_table_isolation(facts: &CpuFacts) -> Option<Finding> {
    let isolated = facts.system & system::PTI != 0;
    isolated.then(|| Finding::refuse(Code::PageTableIsolation, system::PTI, facts.system))
}
