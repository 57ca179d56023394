//! The checks of attach, each on altered facts of one CPU. Attach refuses on that CPU, and `mercury
//! doctor` has predicted the refusal.

use std::mem::offset_of;

use mercury_abi::{code::Code, facts::CpuFacts, gate::FaultPoint};
use mercury_lab::Result;
use serde_json::Value;

use crate::{
    CPUS, plain,
    subject::{Subject, hex, same},
};

/// An altered word of the facts: the quantity's name in `mercury facts`, the half of the word, and
/// the alteration.
struct Row {
    code: Code,
    field: &'static str,
    offset: usize,
    high: bool,
    alter: fn(u32) -> u32,
}

macro_rules! row {
    ($code:ident, $($field:ident).+, $alter:expr) => {
        Row {
            code: Code::$code,
            field: concat_path!($($field).+),
            offset: offset_of!(CpuFacts, $($field).+),
            high: false,
            alter: $alter,
        }
    };
    ($code:ident, high $($field:ident).+, $alter:expr) => {
        Row {
            code: Code::$code,
            field: concat_path!($($field).+),
            offset: offset_of!(CpuFacts, $($field).+) + 4,
            high: true,
            alter: $alter,
        }
    };
}

macro_rules! concat_path {
    ($first:ident) => {
        stringify!($first)
    };
    ($first:ident . $second:ident) => {
        concat!(stringify!($first), ".", stringify!($second))
    };
}

const ROWS: &[Row] = &[
    row!(VendorUnsupported, cpuid_0.ebx, |ebx| ebx ^ 1),
    row!(FamilyUnsupported, cpuid_1.eax, |_| 0x0060_0f12),
    row!(NoSvm, cpuid_8000_0001.ecx, |ecx| ecx & !(1 << 2)),
    row!(FactUnreadable, readable, |bits| bits & !(1 << 10)),
    row!(SvmDisabled, vm_cr, |bits| bits | 1 << 4),
    row!(NoNestedPaging, cpuid_8000_000a.edx, |edx| edx & !1),
    row!(NoAsids, cpuid_8000_000a.ebx, |_| 1),
    row!(InitRedirected, vm_cr, |bits| bits | 1 << 1),
    row!(VirtualizationInUse, efer, |efer| efer | 1 << 12),
    row!(EferUnsupported, efer, |efer| efer | 1 << 13),
    row!(SupervisorCet, s_cet, |_| 1),
    row!(MemoryEncryption, system, |bits| bits | 1 << 1),
    row!(SnpEnabled, syscfg, |bits| bits | 1 << 24),
    row!(InvlpgbInUse, system, |bits| bits | 1 << 3),
    row!(ErapsInUse, system, |bits| bits | 1 << 4),
    row!(Cr0Unsupported, cr0, |cr0| cr0 | 1 << 30),
    row!(Fred, high cr4, |cr4| cr4 | 1),
    row!(Cr4Unsupported, cr4, |cr4| cr4 | 1 << 24),
    row!(Cr3Unsupported, high cr3, |cr3| cr3 | 1 << 19),
    row!(XstateUnsupported, high xcr0, |xcr0| xcr0 | 1 << 30),
    row!(PatUnsupported, pat, |pat| pat & !7),
    row!(MemoryBeyondMap, high iomem_end_phys, |end| end | 1 << 24),
    row!(SingleStep, rflags, |rflags| rflags | 1 << 8),
    row!(MachineCheckInProgress, mcg_status, |status| status | 1 << 2),
    row!(PageTableIsolation, system, |bits| bits | 1),
    row!(PrivilegedLayer, system, |bits| bits | 1 << 2),
    row!(CpusDiffer, cpuid_8000_000a.edx, |edx| edx ^ 1 << 7),
];

/// Checks that unit tests cover. TSC_RATIO only counts where the processor has it, which takes a
/// second altered word. The others are Intel's, which this machine is not
/// (`switch/preflight/src/tests_intel.rs`).
const UNIT_TESTED: &[Code] = &[
    Code::TscRatio,
    Code::NoVmx,
    Code::VmxDisabled,
    Code::NoEpt,
    Code::EptUnsupported,
    Code::NoUnrestrictedGuest,
    Code::VmxFixedBits,
    Code::VmxRegion,
    Code::ProcessorTrace,
    Code::DebugStore,
];

#[test]
fn no_check_is_left_out() {
    let sources = [
        include_str!("../../../switch/preflight/src/amd.rs"),
        include_str!("../../../switch/preflight/src/common.rs"),
        include_str!("../../../switch/preflight/src/compare.rs"),
        include_str!("../../../switch/preflight/src/intel.rs"),
        include_str!("../../../switch/preflight/src/lib.rs"),
    ];
    let tested: Vec<Code> = ROWS.iter().map(|row| row.code).chain(UNIT_TESTED.iter().copied()).collect();
    for source in sources {
        let refused = source.split("Finding::refuse(Code::").chain(source.split("white_list(Code::")).skip(1);
        for rest in refused {
            let name = rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
            let known = Code::ALL.iter().any(|code| format!("{code:?}") == name);
            let covered = tested.iter().any(|code| format!("{code:?}") == name);
            assert!(covered || !known, "{name} has no row");
        }
    }
}

#[test]
#[ignore = "long"]
fn every_check_refuses_and_doctor_says_so_before() -> Result<()> {
    let mut subject = Subject::boot(plain(), CPUS)?;
    let facts = subject.machine.mercury("facts")?;
    for (row, cpu) in ROWS.iter().zip((0..CPUS).cycle()) {
        // The other CPUs are compared with the first one.
        let cpu = if row.code == Code::CpusDiffer { CPUS - 1 } else { cpu };
        println!("{} on CPU {cpu}", row.code.name());
        doctor_predicts(&subject, row, &row.arm(cpu, &facts["cpus"][cpu as usize]))?;
        subject.attach_is_refused(&[], row.code, cpu)?;
        subject.attaches_again(&[])?;
    }
    subject.is_as_before()?;
    subject.finish()
}

impl Row {
    fn arm(&self, cpu: u32, facts: &Value) -> String {
        let live = hex(&facts[self.field]).unwrap_or_else(|| panic!("{} is no field", self.field));
        let word = if self.high { live >> 32 } else { live } as u32;
        let (point, offset, value) = (FaultPoint::Facts as u32, self.offset, (self.alter)(word));
        format!("mercury fault {point} --cpu {cpu} --offset {offset} --value {value:#x}")
    }
}

fn doctor_predicts(subject: &Subject, row: &Row, arm: &str) -> Result<()> {
    let replies = subject.run(&[arm, "mercury --json doctor"])?;
    let report = replies[1].json()?;
    let items = report["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    let predicted = items.iter().any(|item| item["code"] == row.code.name() && item["grade"] == "refused");
    same("doctor", (replies[1].exit, report["can_attach"].as_str(), predicted), (3, Some("no"), true))
}
