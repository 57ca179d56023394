//! Failures on the way in, under the system, and on the way out: every fault point of the driver
//! and of the hypervisor, on the first CPU, one in the middle and the last, under a machine at
//! work. After each failure the machine is as it was before, and the next attach works.

#![allow(clippy::unwrap_used)]

#[path = "faults/nmi.rs"]
mod nmi;
#[path = "faults/preflight.rs"]
mod preflight;
#[path = "faults/steps.rs"]
mod steps;
#[path = "faults/subject.rs"]
mod subject;

use std::time::Duration;

use mercury_abi::{code::Code, gate::FaultPoint, refusal::Refusal};
use mercury_lab::{Kernel, Model, Platform, Qemu, Result, Spec, Vendor, is_full};
use serde_json::Value;
use subject::{FRESH, Subject, arm, hex, modes, same};

const MINUTE: Duration = Duration::from_secs(60);

/// The number of CPUs: the boot CPU, one in the middle and the last.
const CPUS: u32 = 3;

fn plain() -> Spec {
    Spec::new(Kernel::BookwormCloud).memory_mib(768)
}

/// Describes a machine in a QEMU with x2APIC.
fn newer() -> Spec {
    plain().qemu_version(Qemu::Newer).cpu("EPYC-Milan,+svm,+npt,+x2apic,+vgif")
}

/// Describes a machine in an emulator that refuses control blocks as processors do, which QEMU 7
/// does not.
fn refusing() -> Result<Spec> {
    Ok(if Platform::chosen()? == Platform::Qemu { newer() } else { plain() })
}

/// Describes such a machine in x2APIC mode, for which Linux needs interrupt remapping. The cloud
/// kernel has a driver for Intel's IOMMU only.
fn newer_in_x2apic_mode() -> Spec {
    newer().qemu_arg("-device").qemu_arg("intel-iommu,intremap=on,eim=on")
}

/// A fault point, and the code of the command's refusal.
type Refused = (FaultPoint, Code);
/// A fault point, the CPU's reason for leaving the hypervisor, and some words of its record.
type Failure = (FaultPoint, Code, &'static str);
/// A fault point, and the numbers of the checks that the record may name: AMD's, Intel's.
type Impossible = (FaultPoint, [&'static [u64]; 2]);
/// A word of the control block, the shift of the flipped bits, the bits, and the checks of which
/// the record names one.
type Flipped = (u32, u32, u32, &'static [u64]);

/// Refusals by the driver and the hypervisor themselves.
const REFUSALS: &[Refused] = &[
    (FaultPoint::BeforeSvme, Code::InjectedFault),
    (FaultPoint::AfterSvme, Code::InjectedFault),
    (FaultPoint::Entry, Code::InjectedFault),
    (FaultPoint::AfterSave, Code::InjectedFault),
    (FaultPoint::AfterCapture, Code::InjectedFault),
    (FaultPoint::BeforeRun, Code::InjectedFault),
];

/// Failures of the hypervisor on the way in.
const FAILURES_ON_ENTRY: &[Failure] = &[
    (FaultPoint::EntryPageFault, Code::HostException, "exception 14"),
    (FaultPoint::EntryPanic, Code::HostPanic, "injected: entry"),
];

/// Control blocks that the processor refuses. The number is that of the failed check.
const REFUSED_BY_PROCESSOR: &[Impossible] = &[
    (FaultPoint::RunAsidZero, [&[13], INVALID_CONTROLS]),
    (FaultPoint::RunNoIntercept, [&[12], INVALID_CONTROLS]),
    // QEMU overwrites the guest's state when it refuses. The wrong part can then not be found any
    // more.
    (FaultPoint::RunCr0, [&[3, 0], &[Refusal::Cr0Fixed as u64]]),
    (FaultPoint::RunCr4, [&[5, 0], &[Refusal::Cr4Fixed as u64]]),
    (FaultPoint::RunEfer, [&[1, 0], &[Refusal::EferLma as u64]]),
    (FaultPoint::RunCr3, [&[4, 0], &[Refusal::Cr3Width as u64]]),
    (FaultPoint::RunDr7, [&[7, 0], &[Refusal::Dr7High as u64]]),
];

const INVALID_CONTROLS: &[u64] = &[Refusal::InvalidControls as u64];

/// Every other class of checks of VMRUN (APM vol. 2, 15.5.1).
const FLIPPED_SVM: &[Flipped] = &[
    (0x558, 0, 1 << 29, &[2, 0]),
    (0x568, 32, 1, &[6, 0]),
    (0x4D0, 0, 1 << 16, &[8, 0]),
    (0x410, 26, 1, &[11, 0]),
    (0xA8, 0, 1 << 31 | 1 << 8, &[14, 0]),
];

/// Every other class of checks of VM entry (SDM volume 3, "VM entries"), in the manual's order:
/// control fields, host state, MSRs to be loaded, the guest's registers, segments, tables, RFLAGS,
/// and state outside registers.
///
/// SS is missing: an interrupt of user mode loads null, and an unusable segment is not checked.
/// Bochs enters with a RIP that is not canonical.
const FLIPPED_VMX: &[Flipped] = &[
    (0x201A, 0, 1 << 3, INVALID_CONTROLS), // EPT pointer: length of the walk
    (0x6C02, 60, 1, &[Refusal::InvalidHostState as u64]), // host CR3
    (0x4014, 0, 1, &[Refusal::MsrLoading as u64]), // count of MSRs to be loaded
    (0x6824, 62, 1, &[Refusal::SysenterNotCanonical as u64]),
    (0x2804, 0, 4, &[Refusal::IllegalPat as u64]),
    (0x2806, 0, 1 << 1, &[Refusal::EferReserved as u64]),
    (0x4816, 0, 1 << 4, &[Refusal::CodeSegment as u64]),
    (0x481A, 0, 1 << 16, &[Refusal::DataSegment as u64]),
    (0x4822, 0, 1 << 1, &[Refusal::TaskRegister as u64]),
    (0x4820, 0, 1 << 16, &[Refusal::LdtRegister as u64]),
    (0x6810, 62, 1, &[Refusal::SegmentBase as u64]), // GS
    (0x4810, 0, 1 << 16, &[Refusal::DescriptorTable as u64]),
    (0x6820, 0, 1 << 1, &[Refusal::Rflags as u64]),
    (0x4016, 0, 0x8000_0020, &[Refusal::InterruptWithoutIf as u64]),
    (0x4826, 0, 4, &[Refusal::Activity as u64]),
    (0x4824, 0, 1 << 7, &[Refusal::Interruptibility as u64]),
    (0x6822, 0, 1 << 4, &[Refusal::PendingDebug as u64]),
    (0x2800, 0, 1, &[Refusal::LinkPointer as u64]),
];

/// Failures of the hypervisor while it answers an exit, with the words of its record.
const FAILURES_IN_EXITS: &[Failure] = &[
    (FaultPoint::ExitPageFault, Code::HostException, "exception 14"),
    (FaultPoint::ExitGeneralProtection, Code::HostException, "exception 13"),
    (FaultPoint::ExitInvalidOpcode, Code::HostException, "exception 6"),
    (FaultPoint::ExitStackOverflow, Code::HostException, "exception"),
    (FaultPoint::ExitPanic, Code::HostPanic, "injected: exit"),
    (FaultPoint::ExitUnknown, Code::UnknownExit, "unknown exit 0x"),
    QUICK,
];

/// A failure in the answer to a hypercall, which saves no vector register. The failure destroys
/// registers that an earlier exit has saved.
const QUICK: Failure = (FaultPoint::QuickPageFault, Code::HostException, "exception 14");

/// State with which the processor refuses to go on.
const CORRUPTIONS_SVM: &[Failure] = &[
    (FaultPoint::ExitCorruptControl, Code::InvalidGuestState, "check 13"),
    (FaultPoint::ExitCorruptState, Code::InvalidGuestState, "refused control block: check 1,"),
];
const CORRUPTIONS_VMX: &[Failure] = &[
    (FaultPoint::ExitCorruptControl, Code::InvalidGuestState, "VM entry with invalid control fields"),
    (FaultPoint::ExitCorruptState, Code::InvalidGuestState, "EFER.LMA differs"),
];

fn corruptions() -> Result<&'static [Failure]> {
    Ok(match Platform::chosen()?.vendor() {
        Vendor::Amd => CORRUPTIONS_SVM,
        Vendor::Intel => CORRUPTIONS_VMX,
    })
}

/// Returns true if a crash has the exit code of a hypercall: VMEXIT_VMMCALL, or VMX's reason 18. On
/// AMD the question for a CPU's mode is VMEXIT_MSR. A refused entry has VMEXIT_INVALID, or a reason
/// with one of two bits for that.
fn is_right_exit(vendor: Vendor, code: Code, exit_code: u64) -> bool {
    match (vendor, code) {
        (Vendor::Amd, Code::InvalidGuestState) => exit_code == u64::MAX,
        (Vendor::Amd, _) => matches!(exit_code, 0x81 | 0x7C),
        (Vendor::Intel, Code::InvalidGuestState) => exit_code >> 32 == 1 && exit_code >> 30 & 3 != 0,
        (Vendor::Intel, _) => exit_code == 1 << 32 | 18,
    }
}

const FAILURES_IN_DETACH: &[Failure] = &[
    (FaultPoint::DetachPageFault, Code::HostException, "exception 14"),
    (FaultPoint::DetachPanic, Code::HostPanic, "injected: detach"),
];

const LOAD_FAILURES: &[Refused] = &[
    (FaultPoint::LoadContiguous, Code::NoContiguousMemory),
    (FaultPoint::LoadMemory, Code::NoMemory),
    (FaultPoint::LoadImage, Code::BadImage),
];

/// Fault points that have a test of their own.
const SINGLE: &[FaultPoint] = &[
    FaultPoint::None,
    FaultPoint::Facts,
    FaultPoint::AfterSwitch,
    FaultPoint::Exit,
    FaultPoint::RunField,
    FaultPoint::Hotplug,
    FaultPoint::ExitEvent,
];

#[test]
fn no_fault_point_is_left_out() {
    let source = include_str!("../../switch/abi/src/gate.rs");
    let (_, points) = source.split_once("pub enum FaultPoint {").unwrap();
    let (points, _) = points.split_once('}').unwrap();
    let defined = points.lines().filter_map(|line| line.split_once(" = "));
    let mut defined: Vec<u32> =
        defined.map(|(_, number)| number.trim_end_matches(',').parse().unwrap()).collect();
    let exercised = SINGLE
        .iter()
        .chain(REFUSALS.iter().chain(LOAD_FAILURES).map(|(point, _)| point))
        .chain(REFUSED_BY_PROCESSOR.iter().map(|(point, _)| point))
        .chain(
            [FAILURES_ON_ENTRY, FAILURES_IN_EXITS, CORRUPTIONS_SVM, CORRUPTIONS_VMX, FAILURES_IN_DETACH]
                .concat()
                .iter()
                .map(|(point, ..)| point),
        )
        .map(|point| *point as u32)
        .collect::<Vec<_>>();
    defined.retain(|point| !exercised.contains(point));
    assert_eq!(defined, Vec::<u32>::new(), "these fault points have no test");
}

/// Returns the explanation of every code that these tests meet.
fn explanations() -> String {
    let codes = [
        Code::InjectedFault,
        Code::FaultInSwitch,
        Code::InvalidGuestState,
        Code::WrongMode,
        Code::HostException,
        Code::HostPanic,
        Code::UnknownExit,
        Code::Crashed,
    ];
    codes.map(|code| format!("mercury explain {}", code.name())).join(" && ")
}

#[test]
#[ignore = "long"]
fn a_failed_load_leaves_nothing() -> Result<()> {
    let mut subject = Subject::boot(plain(), CPUS)?;
    subject.must(&[&explanations()])?;
    // Memory for the image, the information and an area for each CPU, and memory for each CPU.
    let passages = |point: FaultPoint| match point {
        FaultPoint::LoadContiguous => 2 + CPUS,
        FaultPoint::LoadMemory => CPUS,
        _ => 1,
    };
    let rows = LOAD_FAILURES.iter().flat_map(|row| (1..=passages(row.0)).map(move |passage| (row, passage)));
    for ((point, code), passage) in rows {
        println!("{point:?}, passage {passage}");
        let load = "mercury --json load";
        let replies = subject.run(&[FRESH, &arm(*point, None, passage), load, "mercury --json status"])?;
        let error = replies[2].json()?["error"]["code"].clone();
        same("load", (replies[2].exit, error.as_str()), (1, Some(code.name())))?;
        same("state", replies[3].json()?["state"].as_str(), Some("unloaded"))?;
        subject.attaches_again(&[load])?;
    }
    subject.is_as_before()?;
    subject.finish()
}

/// Attaches with a point armed on `cpu`, checks the refusal there, and that everything is as
/// before. Returns the status.
fn refuse(subject: &mut Subject, point: FaultPoint, code: Code, cpu: u32) -> Result<Value> {
    println!("{point:?} on CPU {cpu}");
    let arm = arm(point, Some(cpu), 1);
    // The first attach after a load goes another way: one CPU goes ahead and is examined.
    let prepare = if cpu == 0 { vec![FRESH, "mercury load", &arm] } else { vec![&*arm] };
    subject.attach_is_refused(&prepare, code, cpu)?;
    subject.is_as_before()
}

fn refusals(subject: &mut Subject, (point, code): Refused, cpu: u32) -> Result<()> {
    refuse(subject, point, code, cpu)?;
    subject.attaches_again(&[])
}

fn failure_on_entry(subject: &mut Subject, (point, code, message): Failure, cpu: u32) -> Result<()> {
    let status = refuse(subject, point, Code::FaultInSwitch, cpu)?;
    check_crash(subject, &status, cpu, code, message)?;
    same("exit code", hex(&status["cpus"][cpu as usize]["crash"]["exit_code"]), Some(0))?;
    subject.recovers_from_crash()
}

/// Runs each row on each CPU, or on one CPU, another one each time, where time is short.
fn on_all_cpus<R: Copy>(spec: Spec, rows: &[R], one: fn(&mut Subject, R, u32) -> Result<()>) -> Result<()> {
    let mut subject = Subject::boot(spec, CPUS)?;
    let cpus = subject.cpus();
    for (place, row) in rows.iter().enumerate() {
        let one_of_them = &cpus[place % cpus.len()..][..1];
        for cpu in if is_full() { &cpus } else { one_of_them } {
            one(&mut subject, *row, *cpu)?;
        }
    }
    subject.finish()
}

#[test]
fn every_refusal_on_the_way_in_is_rolled_back() -> Result<()> {
    on_all_cpus(plain(), REFUSALS, refusals)
}

#[test]
fn every_failure_on_the_way_in_is_rolled_back() -> Result<()> {
    on_all_cpus(plain(), FAILURES_ON_ENTRY, failure_on_entry)
}

fn refused_by_processor(subject: &mut Subject, (point, checks): Impossible, cpu: u32) -> Result<()> {
    refuse(subject, point, Code::InvalidGuestState, cpu)?;
    names_the_check(subject, checks[subject.machine.vendor() as usize])?;
    subject.attaches_again(&[])
}

/// Checks that the log names one of these checks.
fn names_the_check(subject: &Subject, checks: &[u64]) -> Result<()> {
    let events = subject.events("invalid-state")?;
    let check = events.last().and_then(|event| hex(&event["arguments"][0]));
    same(&format!("{check:?} is one of {checks:?}"), check.is_some_and(|check| checks.contains(&check)), true)
}

fn flipped(subject: &mut Subject, (word, shift, bits, checks): Flipped, cpu: u32) -> Result<()> {
    println!("bits of word {word:#x} flipped on CPU {cpu}");
    let arm = format!(
        "{} --offset {} --value {bits:#x}",
        arm(FaultPoint::RunField, Some(cpu), 1),
        shift << 16 | word
    );
    subject.attach_is_refused(&[&arm], Code::InvalidGuestState, cpu)?;
    subject.is_as_before()?;
    names_the_check(subject, checks)?;
    subject.attaches_again(&[])
}

/// Rolls back the first few refused states. The long tests try all of them.
#[test]
#[ignore = "long"]
fn refused_state_is_rolled_back() -> Result<()> {
    classes_are_rolled_back(3)
}

#[test]
#[ignore = "long"]
fn each_class_of_refused_state_is_rolled_back() -> Result<()> {
    classes_are_rolled_back(usize::MAX)
}

fn classes_are_rolled_back(count: usize) -> Result<()> {
    let mut subject = Subject::boot(refusing()?, CPUS)?;
    let rows = match subject.machine.vendor() {
        Vendor::Amd => FLIPPED_SVM,
        Vendor::Intel => FLIPPED_VMX,
    };
    for (row, cpu) in rows.iter().take(count).zip((0..CPUS).cycle()) {
        flipped(&mut subject, *row, cpu)?;
    }
    subject.finish()
}

#[test]
#[ignore = "long"]
fn a_refusal_by_the_processor_is_rolled_back() -> Result<()> {
    on_all_cpus(refusing()?, REFUSED_BY_PROCESSOR, refused_by_processor)
}

#[test]
#[ignore = "QEMU 7.2 loses its way when VMRUN refuses a control block: the machine triple-faults"]
fn a_refusal_by_the_processor_is_rolled_back_on_qemu_7() -> Result<()> {
    on_all_cpus(plain(), REFUSED_BY_PROCESSOR, refused_by_processor)
}

/// Checks the record of a crash on `cpu`: the code, the place, and the registers.
fn check_crash(subject: &Subject, status: &Value, cpu: u32, code: Code, message: &str) -> Result<()> {
    same("state", status["state"].as_str(), Some("crashed"))?;
    let crash = &status["cpus"][cpu as usize]["crash"];
    same("crash", crash["code"].as_str(), Some(code.name()))?;
    let said = crash["message"].as_str().unwrap_or_default();
    same(&format!("{message:?} is in {said:?}"), said.contains(message), true)?;
    for register in ["rip", "rsp", "cr3"] {
        same(register, hex(&crash["guest"][register]).is_some_and(|value| value != 0), true)?;
    }
    let events = subject.events("crash")?;
    same("crashes in the log", events.len(), 1)?;
    same("of this CPU", events[0]["cpu"].as_u64(), Some(u64::from(cpu)))?;
    if cpu == 0 {
        let shown = format!("mercury status | grep 'crash on CPU {cpu}: {}'", code.name());
        subject.must(&[&shown])?;
    }
    Ok(())
}

/// Returns the machine's seconds from the crash to the driver's line that all CPUs are native.
fn seconds_to_follow(subject: &Subject, said: &str) -> Result<f64> {
    let end = said.split_once(']').and_then(|(stamp, _)| stamp.trim_start_matches('[').trim().parse().ok());
    let crash = subject.events("crash")?;
    let start = crash.first().and_then(|event| event["seconds"].as_f64());
    Ok(end.unwrap_or(f64::MAX) - start.unwrap_or(0.0))
}

/// Makes the hypervisor fail under an attached machine, at the hypercall that ends the arming. The
/// other CPUs leave by themselves, without a request.
fn failure_in_exit(subject: &mut Subject, (point, code, message): Failure, cpu: u32) -> Result<()> {
    println!("{point:?} on CPU {cpu}");
    let followed = format!("until dmesg | grep 'crashed on CPU {cpu} '; do sleep 0.3; done");
    let lines = ["dmesg -C", "mercury attach", &arm(point, Some(cpu), 1), &followed];
    let said = subject.must(&lines)?.text;
    let seconds = seconds_to_follow(subject, &said)?;
    // The kernel's clock and the TSC drift apart a little, in an emulator whose clock is the
    // host's.
    same(&format!("the others followed in {seconds:.3} s"), (-0.1..2.0).contains(&seconds), true)?;
    let status = subject.is_as_before()?;
    check_crash(subject, &status, cpu, code, message)?;
    let crash = &status["cpus"][cpu as usize]["crash"];
    let exit_code = hex(&crash["exit_code"]).unwrap_or_default();
    let right = is_right_exit(subject.machine.vendor(), code, exit_code);
    same(&format!("exit code {exit_code:#x}"), right, true)?;
    // The instruction was in the driver's text.
    let rip = hex(&crash["guest"]["rip"]).unwrap_or(0);
    same(&format!("RIP {rip:#x} is a module's"), rip >= 0xFFFF_FFFF_C000_0000, true)?;
    subject.recovers_from_crash()
}

#[test]
#[ignore = "long"]
fn the_machine_runs_on_after_every_failure_in_an_exit() -> Result<()> {
    on_all_cpus(plain(), FAILURES_IN_EXITS, failure_in_exit)
}

/// Leaves programs' vector registers alone, which are in the processor while the hypervisor answers
/// a hypercall.
#[test]
#[ignore = "long"]
fn a_failure_in_a_hypercall_leaves_vector_registers_alone() -> Result<()> {
    let mut subject = Subject::boot(plain(), CPUS)?;
    let registers = subject.machine.spawn("exec mercury-workload --until-file /run/end fpu")?;
    for cpu in subject.cpus() {
        failure_in_exit(&mut subject, QUICK, cpu)?;
    }
    subject.machine.sh("touch /run/end")?;
    let said = registers.wait(MINUTE)?.check()?.stdout;
    let report: Value = serde_json::from_str(said.lines().last().unwrap_or_default()).unwrap_or_default();
    let found = (report["passes"].as_u64() > Some(0), report["violations"].as_u64());
    same(&format!("registers: {report}"), found, (true, Some(0)))?;
    subject.finish()
}

#[test]
#[ignore = "long"]
fn the_machine_runs_on_after_a_corruption() -> Result<()> {
    on_all_cpus(refusing()?, corruptions()?, failure_in_exit)
}

#[test]
#[ignore = "QEMU 7.2 loses its way when VMRUN refuses a control block: the machine triple-faults"]
fn the_machine_runs_on_after_a_corruption_on_qemu_7() -> Result<()> {
    on_all_cpus(plain(), CORRUPTIONS_SVM, failure_in_exit)
}

/// Detaches all CPUs although the hypervisor fails: every CPU is native.
fn failure_in_detach(subject: &mut Subject, (point, code, message): Failure, cpu: u32) -> Result<()> {
    println!("{point:?} on CPU {cpu}");
    let lines = ["mercury attach", &arm(point, Some(cpu), 1), "mercury --json detach"];
    let detached = subject.must(&lines)?.json()?;
    same("detached", detached["count"].as_u64(), Some(u64::from(CPUS) - 1))?;
    let status = subject.is_as_before()?;
    check_crash(subject, &status, cpu, code, message)?;
    subject.recovers_from_crash()
}

#[test]
fn detach_succeeds_even_if_it_fails() -> Result<()> {
    on_all_cpus(plain(), FAILURES_IN_DETACH, failure_in_detach)
}

/// Tries each point once on the newer QEMU, with x2APIC, and with a nested map of 2 MiB pages.
#[test]
#[ignore = "long"]
fn the_same_on_a_newer_qemu_with_x2apic() -> Result<()> {
    let mut subject = Subject::boot(newer_in_x2apic_mode().cpu_feature("-pdpe1gb"), CPUS)?;
    subject.must(&["dmesg | grep -i 'x2apic enabled'"])?;
    let mut cpu = (0..CPUS).cycle();
    let mut next = || cpu.next().unwrap_or(0);
    for row in REFUSALS {
        refusals(&mut subject, *row, next())?;
    }
    for row in FAILURES_ON_ENTRY {
        failure_on_entry(&mut subject, *row, next())?;
    }
    for row in FAILURES_IN_EXITS {
        failure_in_exit(&mut subject, *row, next())?;
    }
    for row in FAILURES_IN_DETACH {
        failure_in_detach(&mut subject, *row, next())?;
    }
    let cpu = next();
    event_in_delivery(&mut subject, cpu, &format!("mercury-workload touch --on {cpu} 6000000000"))?;
    subject.finish()
}

#[test]
#[ignore = "long"]
fn a_cpu_in_the_wrong_mode_after_the_switch_is_noticed() -> Result<()> {
    let mut subject = Subject::boot(plain(), CPUS)?;
    for cpu in subject.cpus() {
        // The check runs once for each CPU, on whichever CPU the command runs.
        subject.attach_is_refused(&[&arm(FaultPoint::AfterSwitch, None, cpu + 1)], Code::WrongMode, cpu)?;
        subject.is_as_before()?;
        subject.attaches_again(&[])?;
    }
    hotplug(&mut subject)?;
    subject.finish()
}

/// Leaves a CPU native that refuses when it comes online. The CPU can be attached later.
fn hotplug(subject: &mut Subject) -> Result<()> {
    println!("Hotplug");
    let last = CPUS - 1;
    let online = format!("/sys/devices/system/cpu/cpu{last}/online");
    let code = Code::InjectedFault as u32;
    let lines = [
        "mercury attach",
        &format!("echo 0 > {online}"),
        &arm(FaultPoint::Hotplug, Some(last), 1),
        &format!("echo 1 > {online}"),
        &format!("dmesg | grep 'CPU {last} came online and stays native (code {code})'"),
        "mercury --json status",
    ];
    let status = subject.must(&lines)?.json()?;
    same("modes", modes(&status), vec!["attached", "attached", "native"])?;
    let later = subject.must(&["mercury --json attach"])?.json()?;
    same("attached later", later["cpus"].as_str(), Some("2"))?;
    subject.must(&["mercury detach"])?;
    subject.is_as_before()?;
    subject.attaches_again(&[])?;
    crash_and_gone(subject, last, &online)
}

/// Takes a CPU offline on which the hypervisor has just crashed. The driver reads the crash all the
/// same, and the CPU comes back native.
fn crash_and_gone(subject: &mut Subject, cpu: u32, online: &str) -> Result<()> {
    println!("a crash on CPU {cpu}, which goes");
    let lines = [
        "dmesg -C",
        "mercury attach",
        &format!("{}; echo 0 > {online}", arm(FaultPoint::ExitPageFault, Some(cpu), 1)),
        &format!("until dmesg | grep 'crashed on CPU {cpu} '; do sleep 0.3; done"),
        &format!("echo 1 > {online}"),
    ];
    subject.must(&lines)?;
    let status = subject.is_as_before()?;
    same("state", status["state"].as_str(), Some("crashed"))?;
    subject.recovers_from_crash()
}

/// Delivers a vector that no CPU sent, as if it had been in delivery. The kernel takes it for a
/// request to reschedule. `touch` exits with interrupts on.
fn event_in_delivery(subject: &mut Subject, cpu: u32, touch: &str) -> Result<()> {
    println!("ExitEvent on CPU {cpu}");
    subject.must(&["mercury attach", &arm(FaultPoint::ExitEvent, Some(cpu), 1), touch])?;
    let events = subject.events("reinjected")?;
    let last = events.last().map(|event| (event["cpu"].as_u64(), hex(&event["arguments"][0])));
    same("event", last, Some((Some(u64::from(cpu)), Some(0x8000_00FD))))?;
    let detached = subject.must(&["mercury --json detach"])?.json()?;
    same("all were attached", detached["count"].as_u64(), Some(u64::from(CPUS)))?;
    subject.is_as_before().map(drop)
}

/// Describes a machine with a nested map of 2 MiB pages, which ends with the machine's own memory
/// and is extended on demand. A program's first access beyond it is an exit of the returned code.
fn with_small_map() -> Result<(Spec, u64)> {
    Ok(match Platform::chosen()?.vendor() {
        Vendor::Amd => (plain().cpu_feature("-pdpe1gb"), 0x400),
        Vendor::Intel => (plain().platform(Platform::Bochs(Model::SandyBridge)), 1 << 32 | 48),
    })
}

/// Hides a failure from the user's program in whose midst the exit occurs: the CPU departs and
/// returns by IRETQ.
#[test]
#[ignore = "long"]
fn a_failure_beneath_user_mode_goes_unnoticed_there() -> Result<()> {
    const UNKNOWN: Failure = (FaultPoint::ExitUnknown, Code::UnknownExit, "unknown exit 0x");
    let (spec, exit_code) = with_small_map()?;
    let mut subject = Subject::boot(spec, CPUS)?;
    let mut address = 0x60_0000_0000_u64;
    let mut touch = |cpu: u32| {
        address += 1 << 30;
        format!("mercury-workload touch --on {cpu} {address:x}")
    };
    for (point, code, message) in [FAILURES_IN_EXITS[0], FAILURES_IN_EXITS[4], UNKNOWN] {
        for cpu in subject.cpus() {
            println!("{point:?} on CPU {cpu}");
            // Arming ends with one hypercall; the program's exit is the next one.
            subject.must(&["mercury attach", &touch(cpu), &arm(point, Some(cpu), 2), &touch(cpu)])?;
            let status = subject.is_as_before()?;
            check_crash(&subject, &status, cpu, code, message)?;
            let crash = &status["cpus"][cpu as usize]["crash"];
            same("exit code", hex(&crash["exit_code"]), Some(exit_code))?;
            same("in user mode", hex(&crash["guest"]["rip"]).map(|rip| rip >> 47), Some(0))?;
            subject.recovers_from_crash()?;
        }
    }
    for cpu in subject.cpus() {
        event_in_delivery(&mut subject, cpu, &touch(cpu))?;
    }
    subject.finish()
}

#[test]
fn an_intel_processor_without_vmx_is_refused_by_name() -> Result<()> {
    let machine = mercury_lab::Machine::boot(plain().cpu("Skylake-Client").cpus(1))?;
    let refusal = machine.mercury_refused("attach")?;
    same("attach", (refusal.exit, refusal.code.as_str()), (3, Code::NoVmx.name()))?;
    let doctor = machine.run("mercury --json doctor")?;
    same("doctor", (doctor.code(), doctor.stdout.contains(Code::NoVmx.name())), (Some(3), true))?;
    machine.check_health()
}
