//! Tests that only a kernel can run, by the test module: a CPU that takes no interrupts, NMIs,
//! MSRs, and the hypervisor's own memory.

#![allow(clippy::unwrap_used)]

mod workloads;

use mercury_lab::{Kernel, Machine, Platform, Result, Spec, Vendor};
use serde_json::Value;
use workloads::{Repeated, Workloads, exits, kernel, load, load_test_module, switch};

fn boot(kernel: Kernel, cpus: u32) -> Result<Machine> {
    let machine = Machine::boot(Spec::new(kernel).cpus(cpus).memory_mib(768))?;
    load_test_module(&machine)?;
    load(&machine)?;
    Ok(machine)
}

/// A script that runs on CPU 0 only. It holds the last CPU with interrupts off while the others run
/// `$1`, and the CPU is still held when they have finished. The answer comes before the end of the
/// hold.
const WHILE_HELD: &str = r#"
mercury-workload kernel hold 2 6000 >/run/held &
until mercury-workload kernel holding | grep -q '"holding":1'; do :; done
mercury-workload switch $1
mercury-workload kernel holding
wait
cat /run/held
"#;

fn while_held(machine: &Machine, switch: &str) -> Result<()> {
    let output =
        machine.program(&["/usr/bin/taskset", "-c", "0", "/bin/bash", "-c", WHILE_HELD, "held", switch]);
    let output = output.run()?.check()?;
    let lines: Vec<Value> = output.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    println!("{switch}, while CPU 2 is held: {}", lines[0]);
    assert_eq!(lines[0]["violations"], 0, "{}", output.stdout);
    assert_eq!(lines[1]["holding"], 1, "they have waited for CPU 2: {}", output.stdout);
    assert!(lines[2]["held_us"].as_u64().unwrap() >= 6_000_000, "{}", output.stdout);
    Ok(())
}

#[test]
#[ignore = "long"]
fn no_cpu_waits_for_another() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud, 3)?;
    while_held(&machine, "--cycles 50 --cpus 0,1")?;
    assert_eq!(machine.modes()?, "native native native");
    while_held(&machine, "--only attach --cpus 0,1")?;
    assert_eq!(machine.modes()?, "attached attached native");
    machine.mercury("attach")?;
    while_held(&machine, "--only detach --cpus 0,1")?;
    assert_eq!(machine.modes()?, "native native attached");
    machine.mercury("detach")?;
    machine.check_next_attach()
}

fn nmi_storm(release: Kernel) -> Result<()> {
    let machine = boot(release, 2)?;
    let workloads = Workloads::start(&machine, &["compute", "fpu", "flags"])?;
    let storm = |from: usize, to: usize| Repeated::start(&machine, &format!("--on {from} nmi {to} 300"));
    let storms = [storm(0, 1)?, storm(1, 0)?, storm(0, 0)?];
    switch(&machine, 600)?;
    workloads.finish()?;
    let mut sent = [0; 2];
    for (storm, to) in storms.into_iter().zip([1, 0, 0]) {
        let sums = storm.finish()?;
        assert_eq!(sums["lost"], 0, "{sums:?}");
        sent[to] += sums["sent"];
    }
    // All NMIs that were sent, and not one more.
    let handled = |cpu: usize| -> Result<u64> {
        Ok(kernel(&machine, &format!("nmi {cpu} 0"))?["handled_by_cpu"].as_u64().unwrap())
    };
    assert_eq!([handled(0)?, handled(1)?], sent);
    assert!(sent.iter().all(|sent| *sent > 1000), "hardly any: {sent:?}");
    machine.check_next_attach()
}

#[test]
fn no_nmi_is_lost() -> Result<()> {
    nmi_storm(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn no_nmi_is_lost_on_debian_13() -> Result<()> {
    nmi_storm(Kernel::TrixieCloud)
}

/// Returns the value of an MSR of CPU 1, or `None` if the read faults.
fn read_msr(machine: &Machine, index: u32) -> Result<Option<u64>> {
    let answer = kernel(machine, &format!("rdmsr 1 {index:#x}"))?;
    let value = answer["value"].as_str().unwrap().trim_start_matches("0x").to_owned();
    Ok((answer["fault"] == 0).then(|| u64::from_str_radix(&value, 16).unwrap()))
}

/// Returns true if the MSR can be written.
fn write_msr(machine: &Machine, index: u32, value: u64) -> Result<bool> {
    Ok(kernel(machine, &format!("wrmsr 1 {index:#x} {value:#x}"))?["fault"] == 0)
}

const EFER: u32 = 0xC000_0080;
const EFER_LME: u64 = 1 << 8;
const PAT: u32 = 0x277;
const VM_HSAVE_PA: u32 = 0xC001_0117;
const PATCH_LOADER: u32 = 0xC001_0020;
const MICROCODE_TRIGGER: u32 = 0x79;
const PEBS_ENABLE: u32 = 0x3F1;
const FEATURE_CONTROL: u32 = 0x3A;
const CR4_VMXE: u64 = 1 << 13;

/// The MSRs of one vendor.
struct Msrs {
    /// MSRs outside the permission map, which are always intercepted: machine-check banks that do
    /// not exist.
    beyond: [u32; 4],
    /// MSRs that are not intercepted.
    others: [u32; 4],
    /// Values that hardware refuses, with their MSRs.
    illegal: Vec<(u32, u64)>,
    /// Bits of EFER while attached.
    efer: u64,
}

fn msrs(machine: &Machine) -> Result<Msrs> {
    // The auxiliary value of the time-stamp counter, and SYSCALL's target.
    const TSC_AUX: u32 = 0xC000_0103;
    const LSTAR: u32 = 0xC000_0082;
    Ok(match machine.vendor() {
        Vendor::Amd => Msrs {
            beyond: [0xC000_2000, 0xC000_2001, 0xC000_2004, 0xC000_2010],
            others: [TSC_AUX, LSTAR, 0xC001_0015, 0xC001_0111],
            illegal: vec![(VM_HSAVE_PA, 0x1234), (VM_HSAVE_PA, 1 << 60)],
            efer: 1 << 12,
        },
        Vendor::Intel => Msrs {
            beyond: [0x2000, 0x4000_0000, 0xC000_2000, 0xC001_0015],
            // The first capability MSR of VMX has its native value.
            others: [TSC_AUX, LSTAR, FEATURE_CONTROL, 0x480],
            illegal: vec![(FEATURE_CONTROL, 1)],
            efer: 0,
        },
    })
}

#[test]
fn msrs_read_as_they_do_natively() -> Result<()> {
    let machine = boot(Kernel::BookwormGeneric, 2)?;
    let Msrs { beyond, others, efer: bits, .. } = msrs(&machine)?;
    let read_all =
        || beyond.iter().chain(&others).map(|&index| read_msr(&machine, index)).collect::<Result<Vec<_>>>();
    let (native, efer) = (read_all()?, read_msr(&machine, EFER)?.unwrap());
    let written = write_msr(&machine, beyond[0], 0)?;
    machine.mercury("attach")?;
    let before = exits(&machine, 1, "msr-pass-through")?;
    assert_eq!(read_all()?, native);
    assert_eq!(write_msr(&machine, beyond[0], 0)?, written);
    assert_eq!(exits(&machine, 1, "msr-pass-through")?, before + beyond.len() as u64 + 1);
    assert_eq!(read_msr(&machine, EFER)?, Some(efer | bits));
    machine.mercury("detach")?;
    assert_eq!(read_all()?, native);
    assert_eq!(read_msr(&machine, EFER)?, Some(efer));
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn msrs_that_may_not_be_written_unseen() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud, 2)?;
    let pat = read_msr(&machine, PAT)?.unwrap();
    machine.mercury("attach")?;
    let efer = read_msr(&machine, EFER)?.unwrap();

    // Values that hardware refuses are refused, and change nothing.
    let mut illegal = vec![
        (PAT, pat & !0xFF00 | 0x0200),
        (PAT, pat & !0xFF00 | 0xFF00),
        (EFER, efer | 1 << 16),
        (EFER, efer | 1 << 63),
        (EFER, efer & !EFER_LME),
    ];
    illegal.extend(msrs(&machine)?.illegal);
    for (index, value) in illegal {
        let before = read_msr(&machine, index)?;
        assert!(!write_msr(&machine, index, value)?, "MSR {index:#x} took {value:#x}");
        assert_eq!(read_msr(&machine, index)?, before, "MSR {index:#x}");
    }
    // Legal values are accepted, and outlast the hypervisor.
    assert!(write_msr(&machine, EFER, efer)?);
    let swapped = pat & !0xFFFF_0000_0000_0000 | 0x0405_0000_0000_0000;
    assert!(write_msr(&machine, PAT, swapped)?);
    assert_eq!(read_msr(&machine, PAT)?, Some(swapped));
    assert_eq!(machine.modes()?, "attached attached");
    machine.mercury("detach")?;
    assert_eq!(read_msr(&machine, PAT)?, Some(swapped));
    assert!(write_msr(&machine, PAT, pat)?);
    machine.check_next_attach()
}

/// Returns ways to make CPU 1 leave: a command for the test module, and the reason that the CPU
/// gives.
fn ways_out(machine: &Machine, efer: u64) -> Result<Vec<(String, &'static str)>> {
    let write = |index: u32, value: u64| format!("wrmsr 1 {index:#x} {value:#x}");
    let address = 0xFFFF_8000_0000_0000;
    Ok(match machine.vendor() {
        Vendor::Amd => vec![
            (write(EFER, efer), "svm-released"),
            (write(VM_HSAVE_PA, 0), "svm-released"),
            (write(PATCH_LOADER, address), "microcode-update"),
        ],
        Vendor::Intel => vec![
            ("vmxoff 1".to_owned(), "vmx-released"),
            (write(MICROCODE_TRIGGER, address), "microcode-update"),
            (write(PEBS_ENABLE, 1), "debug-store"),
        ],
    })
}

#[test]
#[ignore = "long"]
fn each_way_out_detaches_one_cpu_with_its_reason() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud, 2)?;
    let efer = read_msr(&machine, EFER)?.unwrap();
    let work = machine.start_work()?;
    for (command, reason) in ways_out(&machine, efer)? {
        machine.mercury("attach")?;
        kernel(&machine, &command)?;
        assert_eq!(machine.modes()?, "attached native", "after {command}");
        let status = machine.mercury("status")?;
        assert_eq!(status["cpus"][1]["left_because"], reason, "{status}");
        assert_eq!(read_msr(&machine, EFER)?, Some(efer));
        assert_eq!(machine.mercury("attach")?["cpus"], "1");
        machine.mercury("detach")?;
    }
    machine.check_next_attach()?;
    work.finish()
}

/// Keeps a CPU attached that only clears CR4.VMXE, as before the start of another kernel. The CPU
/// is detached on request.
#[test]
#[ignore = "long"]
fn clearing_vmxe_is_no_release() -> Result<()> {
    Platform::need(Vendor::Intel, "AMD's bit is another one, and clearing it is a release")?;
    let machine = boot(Kernel::BookwormCloud, 2)?;
    machine.mercury("attach")?;
    kernel(&machine, &format!("clear-cr4 1 {CR4_VMXE:#x}"))?;
    assert_eq!(machine.modes()?, "attached attached");
    assert_eq!(machine.mercury("detach")?["count"], 2);
    machine.check_next_attach()
}

/// Makes a CPU leave for good when a memory type changes, since the nested tables are then wrong.
#[test]
#[ignore = "long"]
fn changed_memory_types_make_a_cpu_leave() -> Result<()> {
    Platform::need(Vendor::Intel, "SVM's nested tables have no types of memory")?;
    const PHYS_BASE_7: u32 = 0x20E;
    let machine = boot(Kernel::BookwormCloud, 2)?;
    let before = read_msr(&machine, PHYS_BASE_7)?.unwrap();
    machine.mercury("attach")?;
    assert!(write_msr(&machine, PHYS_BASE_7, before)?);
    assert_eq!(machine.modes()?, "attached attached", "the same value changes nothing");
    // The register has no effect by itself: its mask is clear.
    assert!(write_msr(&machine, PHYS_BASE_7, before ^ 6)?);
    assert_eq!(read_msr(&machine, PHYS_BASE_7)?, Some(before ^ 6));
    assert_eq!(machine.modes()?, "attached native");
    assert_eq!(machine.mercury("status")?["cpus"][1]["left_because"], "mtrr-changed");
    assert!(write_msr(&machine, PHYS_BASE_7, before)?);
    machine.mercury("detach")?;
    machine.check_next_attach()
}

#[test]
fn hidden_memory() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud, 2)?;
    let size = kernel(&machine, "hidden-find")?["size"].as_u64().unwrap();
    let native = kernel(&machine, "hidden-read")?;
    assert!(native["nonzero"].as_u64().unwrap() > 5000, "{native}");
    let refused = machine.run("mercury-workload kernel hidden-write 0x1000")?;
    assert!(!refused.success(), "a native CPU may destroy it: {}", refused.stdout);

    machine.mercury("attach")?;
    for cpu in 0..2 {
        let hidden = kernel(&machine, &format!("--on {cpu} hidden-read"))?;
        assert_eq!(hidden["nonzero"], 0, "CPU {cpu} sees something: {hidden}");
    }
    let before = exits(&machine, 0, "hidden-write")? + exits(&machine, 1, "hidden-write")?;
    let pages = size / 4096;
    for page in 0..pages {
        let (cpu, offset) = (page % 2, page * 4096 + 8 * page);
        assert_eq!(kernel(&machine, &format!("--on {cpu} hidden-write {offset}"))?["written"], 1);
    }
    let after = exits(&machine, 0, "hidden-write")? + exits(&machine, 1, "hidden-write")?;
    assert_eq!(after - before, pages, "each page's first write is counted");
    assert_eq!(machine.modes()?, "attached attached");
    let log = machine.sh("mercury log")?;
    assert!(log.contains("hidden"), "{log}");

    machine.mercury("detach")?;
    let again = kernel(&machine, "hidden-read")?;
    assert_eq!(again["crc"], native["crc"], "the hypervisor's code has changed");
    machine.check_next_attach()
}
