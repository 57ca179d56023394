//! Machines that doctor has judged.

use super::{
    Grade, Report, examine,
    machine::{Asked, Machine, Monitor},
    processor, system,
};
use mercury_abi::{code::Code, facts::CpuFacts};
use mercury_control::{
    cpus::CpuSet,
    error::Error,
    exit::Exit,
    lockdown,
    output::{Render, Text},
    sysroot::Module,
};
use mercury_preflight::example::{good_epyc, good_xeon};
use mercury_relocation::refusals::{Answer, Operation};

fn good_machine() -> Machine {
    Machine {
        release: "6.1.0-13-amd64".into(),
        root: true,
        asked: Asked::Answered {
            facts: (0..4).map(good_epyc).collect(),
            hypervisor_loaded: false,
            attached: CpuSet::default(),
            snapshot: None,
        },
        cpuid: good_epyc(0),
        offline: CpuSet::default(),
        holders: vec![],
        kvm_departs: vec![],
        kvm_enables_at_load: None,
        lockdown: Some(lockdown::Mode::None),
        secure_boot: Some(false),
        signatures_enforced: Some(false),
        driver_loaded: true,
        driver_file: None,
        headers: true,
        kexec_loaded: false,
        crash_kernel_loaded: false,
        livepatches: vec![],
        kgdb: false,
        iommus: 1,
        command_line: String::new(),
        free_blocks: Some(100),
        answers: Some(good_answers()),
        local_disks: false,
        outdated: Vec::new(),
        monitor: None,
    }
}

/// Makes the answers of a machine without obstacles.
fn good_answers() -> Vec<(Operation, Vec<Answer>)> {
    let operations = [Operation::Checkpoint, Operation::PowerOff, Operation::Snapshot, Operation::Migrate];
    operations
        .map(|operation| (operation, vec![Answer { about: "swap", result: Ok("nothing is swapped out") }]))
        .into()
}

/// Makes such answers, except that an operation would be refused.
fn refused_answers(operation: Operation) -> Vec<(Operation, Vec<Answer>)> {
    let mut answers = good_answers();
    for (_, answers) in answers.iter_mut().filter(|(asked, _)| *asked == operation) {
        let error = Error::coded(Code::DevicesUnseen, "GPU 0000:01:00.0 (nvidia), used by train (77)");
        answers.push(Answer { about: "devices", result: Err(error) });
    }
    answers
}

fn with_facts(alter: impl Fn(&mut CpuFacts)) -> Machine {
    let mut machine = good_machine();
    if let Asked::Answered { facts, .. } = &mut machine.asked {
        facts.iter_mut().for_each(alter);
    }
    machine
}

fn rendered(report: &Report) -> String {
    let mut text = Text::new(false);
    report.render(&mut text);
    text.finish()
}

#[test]
fn a_good_machine() {
    let report = examine(&good_machine(), false);
    assert_eq!(report.exit(), Exit::Done);
    insta::assert_snapshot!(rendered(&report));
}

#[test]
fn quiet_says_only_what_is_wrong() {
    assert_eq!(
        rendered(&examine(&good_machine(), true)),
        "This machine can attach: `mercury attach`\n\
         `mercury checkpoint` is possible\n\
         `mercury snapshot` is possible\n\
         `mercury migrate` is possible\n"
    );
}

/// A machine by Intel is asked about VMX and not about SVM.
#[test]
fn a_good_machine_by_intel() {
    let mut machine = good_machine();
    let facts = (0..4).map(good_xeon).collect();
    machine.asked =
        Asked::Answered { facts, hypervisor_loaded: false, attached: CpuSet::default(), snapshot: None };
    machine.cpuid = good_xeon(0);
    let report = examine(&machine, false);
    assert_eq!(report.exit(), Exit::Done);
    let text = rendered(&report);
    for words in ["Intel family 6h", "VMX is enabled", "in 1 GiB pages; VPID"] {
        assert!(text.contains(words), "{words}\n{text}");
    }
    assert!(!text.contains("SVM") && !text.contains("ASID"), "{text}");
}

#[test]
fn vmx_disabled_by_firmware() {
    let mut machine = good_machine();
    let facts = (0..4).map(|cpu| CpuFacts { feature_control: 1, ..good_xeon(cpu) }).collect();
    machine.asked =
        Asked::Answered { facts, hypervisor_loaded: false, attached: CpuSet::default(), snapshot: None };
    let report = examine(&machine, true);
    assert_eq!(report.exit(), Exit::Impossible);
    let text = rendered(&report);
    assert!(text.contains("VMX is disabled by firmware, and the setting is locked"), "{text}");
    assert!(text.contains("VT-x"), "{text}");
}

#[test]
fn svm_disabled_by_firmware() {
    let report = examine(&with_facts(|facts| facts.vm_cr = 0x18), true);
    assert_eq!(report.exit(), Exit::Impossible);
    insta::assert_snapshot!(rendered(&report));
}

#[test]
fn debian_13_with_kvm() {
    let mut machine = with_facts(|facts| {
        facts.efer |= 1 << 12;
        facts.kernel_version = 6 << 16 | 12 << 8;
    });
    machine.release = "6.12.107+deb13-amd64".into();
    machine.holders = vec![Module { name: "kvm_amd".into(), references: 0, used_by: vec![] }];
    machine.kvm_enables_at_load = Some(true);
    insta::assert_snapshot!(rendered(&examine(&machine, false)));
    machine.holders[0].references = 2;
    assert!(rendered(&examine(&machine, true)).contains("2 virtual machines or devices use it"));
}

#[test]
fn kvm_goes_on_above() {
    let mut machine = with_facts(|facts| {
        facts.efer |= 1 << 12;
        facts.system |= mercury_abi::facts::system::KVM_MAY;
    });
    machine.holders = vec![Module { name: "kvm_amd".into(), references: 2, used_by: vec![] }];
    machine.kvm_enables_at_load = Some(true);
    let report = examine(&machine, false);
    assert_eq!(report.exit(), Exit::Done);
    let text = rendered(&report);
    assert!(text.contains("kvm_amd loaded: virtual machines go on while attached"), "{text}");
    assert!(!text.contains("cannot start") && !text.contains("modprobe"), "{text}");
    machine.kvm_departs = vec!["avic"];
    let text = rendered(&examine(&machine, false));
    assert!(text.contains("note        virtual machines") && text.contains("avic=Y"), "{text}");
}

/// Beside another hypervisor's module the driver does not share the hardware with KVM either.
#[test]
fn another_hypervisor_is_named() {
    let mut machine = with_facts(|facts| facts.efer |= 1 << 12);
    let module = |name: &str| Module { name: name.into(), references: 0, used_by: vec![] };
    machine.holders = vec![module("kvm_amd"), module("vboxdrv")];
    machine.kvm_departs = vec!["sev"];
    let report = examine(&machine, false);
    assert_eq!(report.exit(), Exit::Impossible);
    let text = rendered(&report);
    assert!(text.contains("is held by kvm_amd or vboxdrv [virtualization-in-use]"), "{text}");
    assert!(text.contains("`modprobe -r vboxdrv`") && !text.contains("--unload-kvm"), "{text}");
    assert!(text.contains("vboxdrv loaded; virtual machines cannot start while attached"), "{text}");
    assert!(!text.contains("leaves the hypervisor"), "{text}");
}

#[test]
fn one_cpu_of_its_own_kind() {
    let machine = with_facts(|facts| facts.microcode += u64::from(facts.cpu == 3));
    let report = examine(&machine, true);
    assert_eq!(report.exit(), Exit::Done);
    assert!(
        rendered(&report).contains("microcode differs from the first CPU's (bits 0x3) (CPU 3)"),
        "{}",
        rendered(&report)
    );
    let report = examine(&with_facts(|facts| facts.efer |= u64::from(facts.cpu == 2) << 14), true);
    assert_eq!(report.exit(), Exit::Impossible);
    assert!(rendered(&report).contains("(CPU 2) [cpus-differ]"));
}

#[test]
fn without_the_driver() {
    let mut machine = good_machine();
    machine.root = false;
    machine.driver_loaded = false;
    machine.asked = Asked::Unavailable(Error::new(Exit::State, "Mercury's driver is not loaded"));
    let report = examine(&machine, false);
    assert_eq!((report.can_attach, report.exit()), ("unknown", Exit::Impossible));
    insta::assert_snapshot!(rendered(&report));
}

#[test]
fn headers_missing() {
    let mut machine = good_machine();
    (machine.driver_loaded, machine.headers) = (false, false);
    let mut said = |code: Code, release: &str| {
        machine.release = release.into();
        machine.asked = Asked::Unavailable(Error::coded(code, "the driver could not be loaded"));
        rendered(&examine(&machine, true)).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let text = said(Code::DriverMissing, "6.1.0-13-amd64");
    assert!(text.contains("apt install linux-headers-6.1.0-13-amd64"), "{text}");
    // A kernel that is not Debian's has no such package.
    let text = said(Code::DriverMissing, "6.6.1-own");
    assert!(!text.contains("linux-headers") && text.contains("/lib/modules/6.6.1-own/build"), "{text}");
    // Headers are no help if modprobe is missing.
    let text = said(Code::NoModprobe, "6.1.0-13-amd64");
    assert!(!text.contains("linux-headers") && text.contains("apt install kmod"), "{text}");
}

#[test]
fn secure_boot() {
    let mut machine = good_machine();
    machine.driver_loaded = false;
    machine.lockdown = Some(lockdown::Mode::Integrity);
    machine.secure_boot = Some(true);
    machine.asked = Asked::Unavailable(Error::refused("loading the driver", Code::Lockdown, None, [0; 2]));
    let report = examine(&machine, true);
    assert_eq!(report.exit(), Exit::Impossible);
    assert!(rendered(&report).contains("mokutil --import"));
}

/// Attaching works beneath lockdown; the other refusals of the driver are reported.
#[test]
fn lockdown_is_told() {
    for (mode, words) in [
        (lockdown::Mode::Integrity, "no machine can be restored or received here"),
        (lockdown::Mode::Confidentiality, "no checkpoint, no move, no restore"),
    ] {
        let report = examine(&Machine { lockdown: Some(mode), ..good_machine() }, true);
        let text = rendered(&report);
        assert!(text.contains(words) && text.contains("[locked-down]"), "{text}");
        assert_eq!(report.exit(), Exit::Done);
    }
}

/// A hypervisor without its driver is not taken for KVM, which could be unloaded.
#[test]
fn an_orphaned_hypervisor() {
    let facts: Vec<CpuFacts> = (0..4).map(good_epyc).collect();
    let attached: CpuSet = [1, 2].into_iter().collect();
    let mut machine = good_machine();
    machine.asked = Asked::Answered { facts, hypervisor_loaded: false, attached, snapshot: None };
    let report = examine(&machine, true);
    assert_eq!(report.exit(), Exit::Impossible);
    let text = rendered(&report);
    assert!(text.contains("CPUs 1-2 are above a hypervisor whose driver is gone"), "{text}");
    assert!(text.contains("[orphaned-hypervisor]") && text.contains("reboot"), "{text}");
    assert!(!text.contains("held by") && !text.contains("virtualization-in-use"), "{text}");
}

#[test]
fn kernels() {
    let grade = |release: &str| {
        let machine = Machine { release: release.into(), ..good_machine() };
        examine(&machine, false).items.iter().find(|item| item.check == "kernel").map(|item| item.grade)
    };
    assert_eq!(grade("6.12.1-amd64"), Some(Grade::Ok));
    assert_eq!(grade("6.6.1"), Some(Grade::Warning));
    assert_eq!(grade("7.1.0"), Some(Grade::Refused));
    assert!(system::refused_kernel(7 << 16).is_some());
    assert!(system::refused_kernel(6 << 16 | 5 << 8).is_none());
}

#[test]
fn harmless_findings_are_notes() {
    let machine = Machine {
        offline: "4-7".parse().expect("list"),
        crash_kernel_loaded: true,
        livepatches: vec!["fix_cve".into()],
        kgdb: true,
        iommus: 0,
        free_blocks: Some(0),
        ..good_machine()
    };
    let text = rendered(&examine(&machine, false));
    for words in [
        "4-7 are offline",
        "a crash kernel is loaded",
        "fix_cve",
        "kgdb",
        "IOMMU",
        "no free block of 128 KiB",
    ] {
        assert!(text.contains(words), "{words}\n{text}");
    }
}

fn possible(report: &Report) -> [&str; 3] {
    let all: Vec<_> = report.operations.iter().map(|section| section.possible).collect();
    all.try_into().expect("three operations")
}

#[test]
fn each_operation_has_a_verdict_of_its_own() {
    for (operation, expected) in [
        (Operation::Checkpoint, ["no", "yes", "yes"]),
        (Operation::PowerOff, ["yes", "yes", "yes"]),
        (Operation::Snapshot, ["yes", "no", "yes"]),
        (Operation::Migrate, ["yes", "yes", "no"]),
    ] {
        let machine = Machine { answers: Some(refused_answers(operation)), ..good_machine() };
        let report = examine(&machine, true);
        assert_eq!(possible(&report), expected, "{operation:?}");
        assert_eq!(report.exit(), Exit::Done, "attach is not concerned");
        let text = rendered(&report);
        assert!(text.contains("used by train (77) [devices-unseen]"), "{text}");
        assert_eq!(text.contains("with --poweroff it would be refused"), operation == Operation::PowerOff);
    }
}

/// The machine would be off when its environment refuses the image.
#[test]
fn an_environment_that_is_too_old_is_named() {
    let error = Error::coded(Code::RestoreUnfit, "its kernel is another").hint("prepare it again");
    let machine = Machine { outdated: vec![error], ..good_machine() };
    let report = examine(&machine, true);
    assert_eq!(possible(&report), ["yes"; 3]);
    let text = rendered(&report);
    for expected in ["with --poweroff it would be refused: its kernel is another", "prepare it again"] {
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_machine_that_cannot_attach_can_do_no_operation() {
    let report = examine(&with_facts(|facts| facts.vm_cr = 0x18), true);
    assert_eq!(possible(&report), ["no"; 3]);
    let report = examine(&Machine { answers: None, root: false, ..good_machine() }, true);
    assert_eq!(possible(&report), ["unknown"; 3]);
}

/// Each operation makes a snapshot, and there can be only one at a time.
#[test]
fn a_snapshot_that_is_kept_is_in_the_way() {
    let mut machine = good_machine();
    if let Asked::Answered { snapshot, .. } = &mut machine.asked {
        *snapshot = Some(Code::SnapshotLive);
    }
    let report = examine(&machine, true);
    assert_eq!((possible(&report), report.exit()), (["no"; 3], Exit::Done));
    assert!(rendered(&report).contains("[snapshot-live]"));
}

#[test]
fn a_machine_by_intel_without_virtual_nmis_keeps_no_snapshot() {
    const VIRTUAL_NMIS: u64 = 1 << (32 + 5);
    for (lacking, expected) in [(0, "yes"), (VIRTUAL_NMIS, "no")] {
        let mut facts: Vec<_> = (0..4).map(good_xeon).collect();
        facts.iter_mut().for_each(|facts| facts.vmx_pin_controls &= !lacking);
        let asked =
            Asked::Answered { facts, hypervisor_loaded: false, attached: CpuSet::default(), snapshot: None };
        let report = examine(&Machine { asked, cpuid: good_xeon(0), ..good_machine() }, true);
        assert_eq!(possible(&report), ["yes", expected, "yes"]);
        assert_eq!(rendered(&report).contains("[rollback-unsupported]"), expected == "no");
    }
}

/// The verdicts of doctor and of attach agree because they share the code: every refusal of
/// preflight shows in doctor.
#[test]
fn every_refusal_of_attach_shows() {
    for code in Code::ALL {
        let number = *code as u32;
        let by_others = [Code::Lockdown, Code::SegmentUnreadable, Code::StateChanged, Code::SelfTestFailed];
        if (40..100).contains(&number) && !by_others.contains(code) {
            assert!(processor::shows(*code), "{code:?}");
        }
    }
}

/// A host without nested virtualization refuses attach to its guest. The guest can move away all the same.
#[test]
fn a_guest_of_mercury_s_monitor_can_move_away() {
    let guest = |answers_calls| Machine {
        monitor: Some(Monitor { answers_calls }),
        ..with_facts(|facts| facts.vm_cr = 0x18)
    };
    let possible = |report: &Report| report.operations.iter().map(|one| one.possible).collect::<Vec<_>>();
    let report = examine(&guest(true), false);
    assert_eq!(report.can_attach, "no", "{report:?}");
    assert_eq!(possible(&report), ["no", "no", "yes"]);
    let text = rendered(&report);
    for words in
        ["monitor runs this machine as a guest", "stands in for the hypervisor", "`mercury migrate` is"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(possible(&examine(&guest(false), false)), ["no", "no", "no"]);
}
