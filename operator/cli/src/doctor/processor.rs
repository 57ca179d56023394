//! Attach's own checks on every CPU, in groups that show what was checked.

use super::{
    Grade, Item,
    machine::{Asked, Machine},
};
use mercury_abi::{code::Code, facts::CpuFacts};
use mercury_control::{bits, cpus::CpuSet, explain, module, processor::is_decided_by_cpuid};
use mercury_preflight::{Finding, Severity, Vendor, bits::cpuid, physical_bits, vendor, vmx};

/// A group of checks that a reader takes as one.
struct Group {
    name: &'static str,
    /// Codes of the checks.
    codes: &'static [Code],
    /// Text if nothing was found.
    fine: fn(&CpuFacts) -> String,
    /// Vendor of the processors with these checks.
    vendor: Option<Vendor>,
}

const GROUPS: &[Group] = &[
    Group {
        name: "processor",
        codes: &[Code::VendorUnsupported, Code::FamilyUnsupported, Code::IntelUnsupported],
        fine: model,
        vendor: None,
    },
    Group { name: "SVM", codes: &[Code::NoSvm, Code::NoAsids], fine: svm, vendor: Some(Vendor::Amd) },
    Group {
        name: "nested paging",
        codes: &[Code::NoNestedPaging],
        fine: nested_paging,
        vendor: Some(Vendor::Amd),
    },
    Group {
        name: "bare metal",
        codes: &[Code::InsideHypervisor],
        fine: |_| "no hypervisor beneath this machine".into(),
        vendor: None,
    },
    Group {
        name: "firmware",
        codes: &[Code::SvmDisabled, Code::InitRedirected],
        fine: |_| "SVM is enabled".into(),
        vendor: Some(Vendor::Amd),
    },
    Group {
        name: "virtualization free",
        codes: &[Code::VirtualizationInUse, Code::HsaveInUse],
        fine: |_| "not in use".into(),
        vendor: None,
    },
    Group {
        name: "control registers",
        codes: &[
            Code::Cr0Unsupported,
            Code::Cr3Unsupported,
            Code::Cr4Unsupported,
            Code::EferUnsupported,
            Code::Fred,
        ],
        fine: |facts| format!("CR0 {:#x}, CR4 {:#x}, EFER {:#x}", facts.cr0, facts.cr4, facts.efer),
        vendor: None,
    },
    Group {
        name: "extended state",
        codes: &[Code::XstateUnsupported, Code::SupervisorCet],
        fine: |facts| format!("XCR0 {:#x}, XSS {:#x}", facts.xcr0, facts.xss),
        vendor: None,
    },
    Group {
        name: "readable registers",
        codes: &[Code::FactUnreadable],
        fine: |_| "all required registers".into(),
        vendor: None,
    },
    Group {
        name: "memory encryption",
        codes: &[Code::MemoryEncryption, Code::SnpEnabled],
        fine: |_| "off".into(),
        vendor: Some(Vendor::Amd),
    },
    Group {
        name: "memory types",
        codes: &[Code::PatUnsupported, Code::MtrrInconsistent],
        fine: |facts| format!("PAT {:#x}, MTRRs enabled", facts.pat),
        vendor: None,
    },
    Group { name: "physical addresses", codes: &[Code::MemoryBeyondMap], fine: addresses, vendor: None },
    Group {
        name: "clock",
        codes: &[Code::TscRatio],
        fine: |_| "the TSC is not scaled".into(),
        vendor: Some(Vendor::Amd),
    },
    Group {
        name: "TLB broadcasts",
        codes: &[Code::InvlpgbInUse],
        fine: |_| "not used by the kernel".into(),
        vendor: Some(Vendor::Amd),
    },
    Group {
        name: "return predictions",
        codes: &[Code::ErapsInUse],
        fine: |_| "not left to the processor".into(),
        vendor: Some(Vendor::Amd),
    },
    Group {
        name: "kernel's mode",
        codes: &[Code::PageTableIsolation, Code::PrivilegedLayer],
        fine: |_| "no layer beneath, no page-table isolation in the way".into(),
        vendor: None,
    },
    Group {
        name: "machine checks",
        codes: &[Code::MachineCheckInProgress],
        fine: |_| "none in progress".into(),
        vendor: None,
    },
    Group {
        name: "debugging",
        codes: &[Code::SingleStep, Code::DebugActive],
        fine: |_| "no breakpoints, no branch recording".into(),
        vendor: None,
    },
    Group {
        name: "CPUs are equal",
        codes: &[Code::CpusDiffer],
        fine: |_| "in all that matters".into(),
        vendor: None,
    },
    Group {
        name: "VMX",
        codes: &[Code::NoVmx],
        fine: |_| "the processor has it".into(),
        vendor: Some(Vendor::Intel),
    },
    Group {
        name: "firmware",
        codes: &[Code::VmxDisabled],
        fine: |_| "VMX is enabled".into(),
        vendor: Some(Vendor::Intel),
    },
    Group {
        name: "nested paging",
        codes: &[Code::NoEpt, Code::EptUnsupported, Code::NoUnrestrictedGuest],
        fine: extended_paging,
        vendor: Some(Vendor::Intel),
    },
    Group {
        name: "VMX controls",
        codes: &[
            Code::VmxControlForced,
            Code::VmxControlMissing,
            Code::VmxInstructionLost,
            Code::VmxFixedBits,
            Code::VmxRegion,
        ],
        fine: |_| "all that is needed, none that is in the way".into(),
        vendor: Some(Vendor::Intel),
    },
    Group {
        name: "trace, debug store",
        codes: &[Code::ProcessorTrace, Code::DebugStore],
        fine: |_| "not in the way".into(),
        vendor: Some(Vendor::Intel),
    },
];

/// A finding and the CPUs that have it.
struct Found {
    finding: Finding,
    cpus: CpuSet,
}

/// Makes a line for each group, or one for each finding in it.
#[must_use]
pub fn items(machine: &Machine) -> Vec<Item> {
    match &machine.asked {
        Asked::Answered { facts, .. } => {
            let found = findings(facts);
            groups(facts).flat_map(|group| group_items(group, machine, facts, &found)).collect()
        }
        Asked::Unavailable(_) => {
            let facts = std::slice::from_ref(&machine.cpuid);
            let found = findings(facts);
            groups(facts)
                .filter(|group| group.codes.iter().all(|code| is_decided_by_cpuid(*code)))
                .flat_map(|group| group_items(group, machine, facts, &found))
                .collect()
        }
    }
}

/// Returns the groups for this machine's vendor.
fn groups(facts: &[CpuFacts]) -> impl Iterator<Item = &'static Group> {
    let maker = facts.first().map(vendor);
    GROUPS.iter().filter(move |group| group.vendor.is_none() || group.vendor == maker)
}

/// Returns true if a group shows this code (the kernel's series is checked elsewhere).
#[cfg(test)]
pub(super) fn shows(code: Code) -> bool {
    code == Code::KernelUntested || GROUPS.iter().any(|group| group.codes.contains(&code))
}

/// Returns the findings of attach's checks on each CPU, and the differences between CPUs.
fn findings(facts: &[CpuFacts]) -> Vec<Found> {
    let mut all: Vec<Found> = Vec::new();
    for cpu in facts {
        let checks = mercury_preflight::check(cpu);
        let differences = facts.first().map(|first| mercury_preflight::compare(first, cpu));
        for finding in checks.iter().chain(differences.iter().flat_map(|found| found.iter())) {
            add(&mut all, *finding, cpu.cpu);
        }
    }
    all
}

fn add(all: &mut Vec<Found>, finding: Finding, cpu: u32) {
    let cpus: CpuSet = [cpu].into_iter().collect();
    // The address in VM_HSAVE_PA differs between CPUs and is left out.
    let same = |other: &Finding| {
        *other == finding || (other.code, finding.code) == (Code::HsaveInUse, Code::HsaveInUse)
    };
    match all.iter_mut().find(|found| same(&found.finding)) {
        Some(found) => found.cpus = found.cpus.iter().chain(cpus.iter()).collect(),
        None => all.push(Found { finding, cpus }),
    }
}

fn group_items(group: &Group, machine: &Machine, facts: &[CpuFacts], found: &[Found]) -> Vec<Item> {
    let own = found.iter().filter(|found| group.codes.contains(&found.finding.code));
    let items: Vec<_> = own.map(|found| item(group, machine, facts.len(), found)).collect();
    let none = |found: &Found| matches!(found.finding.code, Code::NoSvm | Code::NoVmx);
    let without = found.iter().any(none);
    match (items.is_empty(), facts.first()) {
        // Without virtualization its features mean nothing.
        (true, _) if without && ["nested paging", "VMX controls"].contains(&group.name) => Vec::new(),
        (true, Some(first)) => vec![Item::new(group.name, Grade::Ok, (group.fine)(first))],
        (true, None) => vec![Item::new(group.name, Grade::CannotTell, "no CPU could be read")],
        (false, _) => items,
    }
}

fn item(group: &Group, machine: &Machine, cpu_count: usize, found: &Found) -> Item {
    let Finding { code, severity, detail } = found.finding;
    let grade = match severity {
        Severity::Note => Grade::Note,
        Severity::Warn => Grade::Warning,
        Severity::Refuse => Grade::Refused,
    };
    let everywhere = found.cpus.len() == cpu_count;
    let (text, hint) = match code {
        Code::VirtualizationInUse => in_use(machine),
        code => (bits::describe(code, detail), explain::entry(code).remedy.to_string()),
    };
    Item {
        check: group.name,
        grade,
        text,
        hint: (!hint.starts_with("nothing")).then_some(hint),
        code: Some(code.name()),
        cpus: (!everywhere).then(|| found.cpus.to_string()),
    }
}

/// Describes the holders of the hardware, and how to unload them.
fn in_use(machine: &Machine) -> (String, String) {
    let unknown = "an unknown module".to_string();
    let holders = module::names(&machine.holders).unwrap_or(unknown);
    let hint = module::release(&machine.holders);
    (
        format!("hardware virtualization is held by {holders}"),
        hint.unwrap_or("look for another hypervisor's module in `lsmod`, unload it, or reboot".into()),
    )
}

fn model(facts: &CpuFacts) -> String {
    let eax = facts.cpuid_1.eax;
    let base = eax >> 8 & 0xf;
    let family = if base == 0xf { base + (eax >> 20 & 0xff) } else { base };
    let maker = match vendor(facts) {
        Vendor::Amd => "AMD",
        Vendor::Intel => "Intel",
        Vendor::Other => "unknown",
    };
    let model = (eax >> 4 & 0xf) | (eax >> 16 & 0xf) << 4;
    let stepping = eax & 0xf;
    let microcode = match facts.microcode {
        0 => String::new(),
        revision => format!(", microcode {revision:#x}"),
    };
    format!("{maker} family {family:x}h, model {model:x}h, stepping {stepping}{microcode}")
}

fn svm(facts: &CpuFacts) -> String {
    let features = [
        (cpuid::SVM_EDX_NRIPS, "next RIP saved"),
        (cpuid::SVM_EDX_FLUSH_BY_ASID, "flush by ASID"),
        (cpuid::SVM_EDX_SPEC_CTRL, "SPEC_CTRL virtualized"),
        (cpuid::SVM_EDX_SSS, "supervisor shadow stacks"),
    ];
    let has = |bit: u32| facts.cpuid_8000_000a.edx & bit != 0;
    let names: Vec<_> = features.iter().filter(|(bit, _)| has(*bit)).map(|(_, name)| *name).collect();
    let names = if names.is_empty() { "none of the optional features".into() } else { names.join(", ") };
    format!("{} ASIDs; {names}", facts.cpuid_8000_000a.ebx)
}

fn nested_paging(facts: &CpuFacts) -> String {
    let large = facts.cpuid_8000_0001.edx & cpuid::EXT1_EDX_PAGE_1G != 0;
    if large {
        "in 1 GiB pages".into()
    } else {
        "in 2 MiB pages: the map takes more memory and grows on demand".into()
    }
}

fn extended_paging(facts: &CpuFacts) -> String {
    let has = |bit: u64| facts.vmx_ept_vpid & bit != 0;
    let pages = if has(vmx::ept_vpid::PAGE_1G) {
        "in 1 GiB pages"
    } else {
        "in 2 MiB pages: the map takes more memory and grows on demand"
    };
    let tags = if has(vmx::ept_vpid::INVVPID) { "; VPID" } else { "; no VPID" };
    format!("{pages}{tags}")
}

fn addresses(facts: &CpuFacts) -> String {
    format!("{} bits; RAM and devices end at {:#x}", physical_bits(facts), facts.iomem_end_phys)
}
