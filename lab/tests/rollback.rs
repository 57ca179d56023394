//! A machine that is put back to a snapshot in memory, whatever became of it: every byte of memory is what it was, by
//! the hypervisor's own hashes, what ran goes on, and devices work.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{thread, time::Duration};

use mercury_lab::{
    Bus, Iommu, Kernel, Machine, Nic, Platform, Qemu, Result, Spec, Vendor, driver::Variant, iommu,
    restart::knows_the_time,
};
use serde_json::Value;
use workloads::{
    load_test_module, number,
    restart::{hold_registers, registers_were_held},
};

/// Direct and buffered reads of a disk that nothing is mounted on.
const DISK_LOAD: &str = "while true; do dd if=/dev/vda of=/dev/null bs=256k iflag=direct; dd if=/dev/vda of=/dev/null \
     bs=1M; echo 1 > /proc/sys/vm/drop_caches; done";

/// Work of the kernel's: processes, pages, files in memory.
const MEMORY_LOAD: &str = "while true; do cp /bin/bash /run/copy; /bin/true; done";

/// Flows both ways; the card is the only one.
const NETWORK_LOAD: &str = "modprobe virtio_net; card=$(ls /sys/class/net | grep -v lo | head -1); ip address add \
     10.0.2.15/24 dev $card; ip link set $card up; while true; do ping -q -i 0.01 -c 50 -s 1400 10.0.2.2; done";

/// Two lives: the first one keeps a snapshot, works on, and dies. The second one begins where the command ends for
/// the second time, and says so where a host hears it that cannot ask.
const LIVES: &str = r#"
sleep 1
mercury snapshot --compare --json > /run/said 2>&1
if grep -q '"kept"' /run/said; then
    date +%s > /run/first
    ls -R /usr > /run/listing
    sleep 1
    eval "$1"
    sleep 60
    echo "<3>lives: still in the first" > /dev/kmsg
else
    echo "<3>lives: the second, after $(cat /run/said | tr -d '\n')" > /dev/kmsg
fi
"#;

/// Counts, and notices a clock that goes back.
const CLOCK: &str = r#"
import time, os
before, count = time.monotonic(), 0
while True:
    time.sleep(0.05)
    now = time.monotonic()
    if now < before:
        open("/run/clock.wrong", "a").write(f"{before} {now}\n")
    before, count = now, count + 1
    open("/run/clock.new", "w").write(str(count))
    os.rename("/run/clock.new", "/run/clock")
"#;

/// The hypervisor of this version cannot do it on Intel, and Bochs's SVM forgets interrupts.
fn need_qemu() -> Result<()> {
    if Platform::chosen()? == Platform::Qemu {
        return Ok(());
    }
    Platform::need(Vendor::Amd, "this version cannot put back a machine with this processor")?;
    Platform::need(Vendor::Intel, "this SVM reports no interrupts in delivery")
}

fn spec(cpus: u32) -> Spec {
    spec_of(Kernel::BookwormCloud, cpus)
}

fn spec_of(kernel: Kernel, cpus: u32) -> Spec {
    // QEMU 7 executes what the kernel has patched meanwhile, as it does for the time of a snapshot.
    Spec::new(kernel).cpus(cpus).disk(Bus::Virtio, 64).modules(Variant::Faults).qemu_version(Qemu::Newer)
}

fn start(machine: &Machine, line: &str) -> Result<()> {
    machine.sh(&format!("setsid bash -c '{line}' > /dev/null 2>&1 < /dev/null &")).map(drop)
}

/// A machine whose root is only read, at work.
fn at_work(spec: Spec, loads: &[&str]) -> Result<Machine> {
    let machine = Machine::boot(spec)?;
    set_to_work(&machine, loads)?;
    Ok(machine)
}

fn set_to_work(machine: &Machine, loads: &[&str]) -> Result<()> {
    machine.sh("sync; mount -o remount,ro /; yes mercury | head -c 60M > /dev/vda")?;
    load_test_module(machine)?;
    machine.put("/run/lives", LIVES.as_bytes(), 0o755)?;
    machine.put("/run/clock.py", CLOCK.as_bytes(), 0o644)?;
    start(machine, "python3 /run/clock.py")?;
    loads.iter().try_for_each(|load| start(machine, load))?;
    machine.sh("while ! test -s /run/clock; do sleep 0.1; done").map(drop)
}

/// Lives once until `death`, and says how it came back.
fn live_twice(machine: &Machine, death: &str) -> Result<Value> {
    let said = machine.serial_log().len();
    machine.sh(&format!("setsid bash /run/lives '{death}' > /run/lives.said 2>&1 < /dev/null &"))?;
    // Nobody talks to it meanwhile: half a word would be lost.
    loop {
        machine.wait_serial("(?s)lives: .*\n", Duration::from_secs(120))?;
        let log = machine.serial_log();
        if let Some((_, line)) = log[said..].split_once("lives: ").filter(|(_, rest)| rest.contains('\n')) {
            let line = line.lines().next().unwrap();
            let report = line.strip_prefix("the second, after ");
            let report = report.unwrap_or_else(|| panic!("{line}"));
            println!("{report}");
            return Ok(serde_json::from_str(report).unwrap());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// What must hold in a machine that was put back for `reason`.
fn is_as_it_was(machine: &Machine, report: &Value, reason: &str) -> Result<()> {
    assert_eq!((&report["state"], &report["reason"]), (&"rolled-back".into(), &reason.into()), "{report}");
    assert!(report["pages"].as_u64() > Some(1000), "it did work: {report}");
    assert!(report["devices"].as_u64() > Some(0), "{report}");
    assert!(report["compared"]["pages"].as_u64() > Some(100_000), "all memory was compared: {report}");
    assert_eq!(report["compared"]["different"], 0, "{report}");
    assert_eq!(machine.sh("ls /run/first /run/listing 2> /dev/null || true")?, "", "it has not been");
    let before = number(machine, "/run/clock")?;
    machine.sh("sleep 1; dd if=/dev/vda of=/dev/null bs=1M iflag=direct; cat /bin/bash > /dev/null")?;
    assert!(number(machine, "/run/clock")? > before, "what ran goes on");
    assert_eq!(machine.sh("cat /run/clock.wrong 2> /dev/null || true")?, "");
    assert_eq!(machine.sh("head -c 60M /dev/vda | cmp - <(yes mercury | head -c 60M)")?, "");
    knows_the_time(machine, "after")?;
    let log = machine.sh("dmesg")?;
    assert!(!log.contains("Call Trace") && !log.contains("NMI received"), "{log}");
    let status: Value = serde_json::from_str(&machine.sh("mercury status --json")?).unwrap();
    assert!(status["cpus"].as_array().unwrap().iter().all(|cpu| cpu["mode"] == "attached"), "{status}");
    assert!(status["snapshot"].is_null(), "it is used up: {status}");
    Ok(())
}

fn is_native_again(machine: &Machine) -> Result<()> {
    for _ in 0..2 {
        machine.mercury("detach")?;
        assert!(!machine.sh("mercury status --json")?.contains("\"attached\""));
        machine.mercury("attach")?;
    }
    machine.mercury("detach")?;
    machine.check_log()
}

fn goes_back(spec: Spec, loads: &[&str], death: &str, reason: &str) -> Result<()> {
    need_qemu()?;
    let machine = at_work(spec, loads)?;
    let report = live_twice(&machine, death)?;
    is_as_it_was(&machine, &report, reason)?;
    iommu::check(&machine)?;
    is_native_again(&machine)
}

/// Three virtual machines of KVM's, which write to memory and look at it.
const GUESTS_LOAD: &str = "sleep infinity | python3 /run/vm > /run/guests/$RANDOM$RANDOM 2>&1 & \
     sleep infinity | python3 /run/vm > /run/guests/$RANDOM$RANDOM 2>&1 & \
     sleep infinity | python3 /run/vm > /run/guests/$RANDOM$RANDOM 2>&1 & wait";

/// Virtual machines go back with everything else, and count on from where they were.
fn goes_back_with_guests(kernel: Kernel, death: &str, reason: &str) -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec_of(kernel, 2))?;
    machine.put("/run/vm", include_bytes!("../guest/kvm/counter"), 0o755)?;
    machine.sh("mkdir /run/guests; modprobe kvm_amd")?;
    start(&machine, GUESTS_LOAD)?;
    machine.sh("until test $(cat /run/guests/* | grep -c made) = 3; do sleep 0.2; done")?;
    set_to_work(&machine, &[MEMORY_LOAD])?;
    let report = live_twice(&machine, death)?;
    is_as_it_was(&machine, &report, reason)?;
    // A program that read another number than it had written has said so.
    assert_eq!(machine.sh("cat /run/guests/*")?, "made\nmade\nmade");
    assert_eq!(machine.sh("pgrep -fc '^python3 /run/vm'")?, "3");
    is_native_again(&machine)
}

#[test]
#[ignore = "long"]
fn with_virtual_machines() -> Result<()> {
    goes_back_with_guests(Kernel::BookwormCloud, COMMAND, "command")
}

#[test]
#[ignore = "long"]
fn with_virtual_machines_from_a_panic_on_a_later_kernel() -> Result<()> {
    goes_back_with_guests(Kernel::TrixieCloud, PANIC, "panic")
}

const COMMAND: &str = "mercury rollback";
const PANIC: &str = "echo c > /proc/sysrq-trigger";

#[test]
fn on_command() -> Result<()> {
    goes_back(spec(2), &[DISK_LOAD, MEMORY_LOAD], COMMAND, "command")
}

/// Registers have in them what they had, and what is armed is armed.
#[test]
#[ignore = "long"]
fn registers_go_back() -> Result<()> {
    need_qemu()?;
    let machine = at_work(spec(2), &[MEMORY_LOAD])?;
    hold_registers(&machine)?;
    let report = live_twice(&machine, COMMAND)?;
    is_as_it_was(&machine, &report, "command")?;
    registers_were_held(&machine)?;
    is_native_again(&machine)
}

#[test]
#[ignore = "long"]
fn on_command_on_one_cpu() -> Result<()> {
    goes_back(spec(1), &[DISK_LOAD], COMMAND, "command")
}

#[test]
#[ignore = "long"]
fn from_a_panic() -> Result<()> {
    goes_back(spec(2), &[DISK_LOAD, MEMORY_LOAD], PANIC, "panic")
}

#[test]
#[ignore = "long"]
fn from_a_panic_on_a_later_kernel() -> Result<()> {
    goes_back(spec_of(Kernel::TrixieCloud, 2), &[DISK_LOAD, MEMORY_LOAD], PANIC, "panic")
}

#[test]
#[ignore = "long"]
fn from_a_panic_on_one_cpu() -> Result<()> {
    goes_back(spec(1), &[MEMORY_LOAD], PANIC, "panic")
}

/// The others are halted with interrupts off by then.
#[test]
#[ignore = "long"]
fn from_a_panic_on_four_cpus_with_a_network() -> Result<()> {
    need_qemu()?;
    let machine = at_work(spec(4).nic(Nic::Virtio), &[DISK_LOAD, MEMORY_LOAD, NETWORK_LOAD])?;
    machine.sh("until ping -c 1 -W 1 10.0.2.2; do sleep 0.2; done")?;
    let report = live_twice(&machine, PANIC)?;
    is_as_it_was(&machine, &report, "panic")?;
    machine.sh("ping -c 3 10.0.2.2")?;
    is_native_again(&machine)
}

#[test]
#[ignore = "long"]
fn from_a_panic_behind_intels_iommu() -> Result<()> {
    let spec = spec(2).nic(Nic::Virtio).iommu(Iommu::Intel);
    goes_back(spec, &[DISK_LOAD, MEMORY_LOAD, NETWORK_LOAD], PANIC, "panic")
}

/// The disk that is read besides is virtio's, and not behind it; the root's is.
#[test]
#[ignore = "long"]
fn on_command_behind_amds_iommu() -> Result<()> {
    let root_load = DISK_LOAD.replace("vda", "nvme0n1");
    let spec = spec_of(Kernel::BookwormGeneric, 2).iommu(Iommu::Amd);
    goes_back(spec, &[&root_load, DISK_LOAD, MEMORY_LOAD], COMMAND, "command")
}

/// A CPU that takes no interrupts any more is fetched by another.
#[test]
#[ignore = "long"]
fn from_a_hung_cpu() -> Result<()> {
    // Whoever has the other CPU hang would wait for it, and whoever was there would not be heard of again.
    let death = "taskset -cp 0 $$; taskset -c 1 mercury-workload kernel hang 1 & sleep 0.2; mercury rollback";
    goes_back(spec(2), &[], death, "command")
}

/// The same with three that are at work; what waits for the one that hangs stands still with it.
#[test]
#[ignore = "long"]
fn from_a_hung_cpu_of_four_at_work() -> Result<()> {
    let death = "taskset -cp 0 $$; taskset -c 1 mercury-workload kernel hang 1 & sleep 0.2; mercury rollback";
    let loads = [DISK_LOAD, MEMORY_LOAD].map(|load| format!("taskset -cp 2-3 $$; {load}"));
    goes_back(spec(4), &loads.each_ref().map(String::as_str), death, "command")
}

/// The kernel stops it by NMI, in whose handler no other reaches it.
#[test]
#[ignore = "long"]
fn from_a_panic_beside_a_hung_cpu() -> Result<()> {
    let death = "taskset 1 mercury-workload kernel hang-and-panic 1";
    goes_back(spec(2), &[DISK_LOAD], death, "panic")
}

#[test]
#[ignore = "long"]
fn from_a_triple_fault_on_four_cpus() -> Result<()> {
    goes_back(spec(4), &[DISK_LOAD, MEMORY_LOAD], "mercury-workload kernel triple-fault 2", "triple fault")
}

#[test]
#[ignore = "long"]
fn from_a_triple_fault() -> Result<()> {
    goes_back(spec(2), &[DISK_LOAD], "mercury-workload kernel triple-fault 1", "triple fault")
}

fn refused(machine: &Machine, line: &str, reason: &str) -> Result<()> {
    let output = machine.run(line)?;
    assert!(!output.success() && output.stderr.contains(reason), "{line}: {}", output.stderr);
    Ok(())
}

fn state(machine: &Machine) -> Result<Value> {
    let status = machine.sh("mercury status --json")?;
    Ok(serde_json::from_str::<Value>(&status).unwrap()["snapshot"].clone())
}

/// Whatever takes the snapshot away, the machine runs on, and says why it has none.
#[test]
#[ignore = "long"]
fn without_a_snapshot_nothing_happens() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2))?;
    refused(&machine, "mercury snapshot", "/ (/dev/")?;
    machine.sh("sync; mount -o remount,ro /")?;
    refused(&machine, "mercury snapshot --hook 'exit 3'", "the hook failed")?;
    assert!(!machine.sh("mercury status --json")?.contains("\"attached\""), "it is as it was");
    machine.sh("mercury snapshot")?;
    assert_eq!(state(&machine)?["state"], "kept");
    refused(&machine, "mercury snapshot", "snapshot-live")?;
    machine.sh("mercury snapshot --drop")?;
    refused(&machine, "mercury rollback", "no-snapshot")?;

    // Not enough for what devices have for good, even: it is refused, not kept until somebody asks for it.
    refused(&machine, "mercury snapshot --pool 2", "snapshot-pool")?;
    // What was free needs no copy.
    machine.sh("head -c 120M /dev/zero > /run/x && mercury snapshot --pool 80")?;
    machine.sh("dd if=/dev/zero of=/run/x bs=1M count=120 conv=notrunc")?;
    machine.sh("until mercury status | grep snapshot-pool; do sleep 0.2; done; rm /run/x")?;
    refused(&machine, "mercury rollback", "no-snapshot")?;

    machine.sh("mercury snapshot && echo 0 > /sys/devices/system/cpu/cpu1/online")?;
    machine.sh("until mercury status | grep snapshot-lost; do sleep 0.2; done")?;
    machine.sh("mercury snapshot && echo 1 > /sys/devices/system/cpu/cpu1/online")?;
    machine.sh("until mercury status | grep snapshot-hotplug; do sleep 0.2; done")?;
    machine.sh("mercury attach && mercury snapshot && mercury detach")?;
    assert_eq!(state(&machine)?, Value::Null, "detach gives it up");
    refused(&machine, "mercury rollback", "no-snapshot")?;
    machine.check_next_attach()
}

/// NMIs of the system's own come through beneath a snapshot, each once.
#[test]
fn nmis_come_through() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2))?;
    machine.sh("sync; mount -o remount,ro /")?;
    load_test_module(&machine)?;
    machine.sh("mercury snapshot")?;
    for cpu in [0, 1] {
        let answer = workloads::kernel(&machine, &format!("nmi {cpu} 300"))?;
        assert_eq!((&answer["sent"], &answer["lost"]), (&300.into(), &0.into()), "{answer}");
    }
    assert_eq!(state(&machine)?["state"], "kept");
    machine.mercury("detach")?;
    machine.check_next_attach()
}

/// What a device is to read is written to, lest it change it; not what nobody can write.
#[test]
#[ignore = "long"]
fn a_device_is_given_what_is_read_only() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2))?;
    machine.sh("sync; mount -o remount,ro /")?;
    load_test_module(&machine)?;
    machine.sh("mercury snapshot")?;
    let answer = workloads::kernel(&machine, "send-read-only")?;
    assert_eq!((&answer["writable"], &answer["mapped"]), (&0.into(), &1.into()), "{answer}");
    assert_eq!(state(&machine)?["state"], "kept");
    machine.mercury("detach")?;
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn from_a_triple_fault_on_one_cpu() -> Result<()> {
    goes_back(spec(1), &[DISK_LOAD], "mercury-workload kernel triple-fault 0", "triple fault")
}
