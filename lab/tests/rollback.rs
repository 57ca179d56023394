//! A machine that rolls back to a snapshot in memory after any failure. By the hypervisor's own
//! hashes every byte of memory is as it was, programs go on, and devices work.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{
    Bus, Iommu, Kernel, Machine, Model, Nic, Platform, Qemu, Reservation, Result, Spec, Vendor,
    driver::Variant,
    iommu,
    restart::{self, knows_the_time, script::EXPORTS},
};
use serde_json::Value;
use workloads::{
    load_test_module, number,
    readers::{FRESH_CARD, REAL_DRIVERS, disk_load, give_address, network_load, real_hardware, source},
    restart::{
        encrypt, free_port, hold_registers, nothing_is_encrypted_twice, plug_in, registers_were_held,
        snapshot_of, wired,
    },
};

/// Direct and buffered reads of a disk without a mounted file system.
const DISK_LOAD: &str = "while true; do dd if=/dev/vda of=/dev/null bs=256k iflag=direct; \
     dd if=/dev/vda of=/dev/null bs=1M; echo 1 > /proc/sys/vm/drop_caches; done";

/// Work of the kernel: processes, pages, files in memory.
const MEMORY_LOAD: &str = "while true; do cp /bin/bash /run/copy; /bin/true; done";

/// Traffic in both directions on the machine's only card.
const NETWORK_LOAD: &str = "modprobe virtio_net; \
     card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); ip address add 10.0.2.15/24 dev $card; \
     ip link set $card up; while true; do ping -q -i 0.01 -c 50 -s 1400 10.0.2.2; done";

/// A script with two lives. The first life keeps a snapshot, works on, and dies. The second one
/// begins where the command ends for the second time, and reports on the console, since the host
/// cannot ask.
const LIVES: &str = r#"
sleep 1
mercury snapshot --compare --json "${@:2}" > /run/said 2>&1
if grep -q '"kept"' /run/said; then
    date +%s > /run/first
    ls -lR /usr/bin > /run/listing
    sleep 1
    eval "$1"
    sleep 60
    echo "<3>lives: still in the first" > /dev/kmsg
else
    echo "<3>lives: the second, after $(cat /run/said | tr -d '\n')" > /dev/kmsg
fi
"#;

/// A program that counts, and notices a clock that goes back.
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

/// Skips the test on other emulators: Bochs has no disk for its data, and its SVM forgets interrupts.
fn need_qemu() -> Result<()> {
    if Platform::chosen()? == Platform::Qemu {
        return Ok(());
    }
    Platform::need(Vendor::Amd, "Bochs has no further disk; `rollback.rs: intel_*` are for this processor")?;
    Platform::need(Vendor::Intel, "this SVM reports no interrupts in delivery")
}

fn spec(cpus: u32) -> Spec {
    spec_of(Kernel::BookwormCloud, cpus)
}

fn spec_of(kernel: Kernel, cpus: u32) -> Spec {
    // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
    // during a snapshot.
    Spec::new(kernel).cpus(cpus).disk(Bus::Virtio, 64).modules(Variant::Faults).qemu_version(Qemu::Newer)
}

fn start(machine: &Machine, line: &str) -> Result<()> {
    machine.sh(&format!("setsid bash -c '{line}' > /dev/null 2>&1 < /dev/null &")).map(drop)
}

/// Boots a machine with a read-only root, and sets it to work.
fn at_work(spec: Spec, loads: &[&str]) -> Result<Machine> {
    let machine = Machine::boot(spec)?;
    only_read_root(&machine)?;
    set_to_work(&machine, "/dev/vda", loads)?;
    Ok(machine)
}

fn only_read_root(machine: &Machine) -> Result<()> {
    machine.sh("sync; mount -o remount,ro /").map(drop)
}

/// Sets a machine to work, with data on `disk` to read again.
fn set_to_work(machine: &Machine, disk: &str, loads: &[&str]) -> Result<()> {
    machine.sh(&format!("ln -s {disk} /run/disk; yes mercury | head -c 60M > {disk}"))?;
    count(machine)?;
    machine.put("/run/lives", LIVES.as_bytes(), 0o755)?;
    loads.iter().try_for_each(|load| start(machine, load))
}

/// Starts the program that counts, and loads the test module.
fn count(machine: &Machine) -> Result<()> {
    load_test_module(machine)?;
    machine.put("/run/clock.py", CLOCK.as_bytes(), 0o644)?;
    start(machine, "python3 /run/clock.py")?;
    machine.sh("while ! test -s /run/clock; do sleep 0.1; done").map(drop)
}

/// Lives once until `death`. Returns the report of the way back.
fn live_twice(machine: &Machine, death: &str) -> Result<Value> {
    live_twice_with(machine, death, "")
}

/// Lives once until `death`, with more arguments for `mercury snapshot`.
fn live_twice_with(machine: &Machine, death: &str, words: &str) -> Result<Value> {
    let said = machine.serial_log().len();
    machine.sh(&format!("setsid bash /run/lives '{death}' {words} > /run/lives.said 2>&1 < /dev/null &"))?;
    // The agent must not be spoken to meanwhile: half a message would be lost.
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

/// Checks a machine that was rolled back for `reason`.
fn is_as_it_was(machine: &Machine, report: &Value, reason: &str) -> Result<()> {
    memory_is_as_it_was(machine, report, reason)?;
    assert_eq!(machine.sh("ls /run/first /run/listing 2> /dev/null || true")?, "", "it has not been");
    machine.sh("dd if=/run/disk of=/dev/null bs=1M iflag=direct; cat /bin/bash > /dev/null")?;
    assert_eq!(machine.sh("head -c 60M /run/disk | cmp - <(yes mercury | head -c 60M)")?, "");
    knows_the_time(machine, "after")
}

/// Checks that all memory is as it was, and that what ran goes on.
fn memory_is_as_it_was(machine: &Machine, report: &Value, reason: &str) -> Result<()> {
    assert_eq!((&report["state"], &report["reason"]), (&"rolled-back".into(), &reason.into()), "{report}");
    assert!(report["pages"].as_u64() > Some(1000), "it did work: {report}");
    assert!(report["devices"].as_u64() > Some(0), "{report}");
    assert!(report["compared"]["pages"].as_u64() > Some(100_000), "all memory was compared: {report}");
    assert_eq!(report["compared"]["different"], 0, "{report}");
    let before = number(machine, "/run/clock")?;
    machine.sh("sleep 1")?;
    assert!(number(machine, "/run/clock")? > before, "what ran goes on");
    assert_eq!(machine.sh("cat /run/clock.wrong 2> /dev/null || true")?, "");
    let log = machine.sh("dmesg")?;
    assert!(!log.contains("Call Trace") && !log.contains("NMI received"), "{log}");
    let status: Value = serde_json::from_str(&machine.sh("mercury status --json")?).unwrap();
    assert!(status["cpus"].as_array().unwrap().iter().all(|cpu| cpu["mode"] == "attached"), "{status}");
    assert_eq!(status["snapshot"]["state"] == "kept", report["again"] == true, "{status}");
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

/// Three KVM virtual machines, which write to memory and check it.
const GUESTS_LOAD: &str = "sleep infinity | python3 /run/vm > /run/guests/$RANDOM$RANDOM 2>&1 & \
     sleep infinity | python3 /run/vm > /run/guests/$RANDOM$RANDOM 2>&1 & \
     sleep infinity | python3 /run/vm > /run/guests/$RANDOM$RANDOM 2>&1 & wait";

/// Rolls virtual machines back with the host, from where they count on.
fn goes_back_with_guests(kernel: Kernel, death: &str, reason: &str) -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec_of(kernel, 2))?;
    machine.put("/run/vm", include_bytes!("../guest/kvm/counter"), 0o755)?;
    machine.sh("mkdir /run/guests; modprobe kvm_amd")?;
    start(&machine, GUESTS_LOAD)?;
    machine.sh("until test $(cat /run/guests/* | grep -c made) = 3; do sleep 0.2; done")?;
    only_read_root(&machine)?;
    set_to_work(&machine, "/dev/vda", &[MEMORY_LOAD])?;
    let report = live_twice(&machine, death)?;
    is_as_it_was(&machine, &report, reason)?;
    // A program that read another number than it had written has reported that.
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

/// Rolls a watched machine back. The watch goes on in the second life.
fn goes_back_by_the_watch(cpus: u32, rules: &str, death: &str, reason: &str) -> Result<()> {
    need_qemu()?;
    let machine = at_work(spec(cpus), &[MEMORY_LOAD])?;
    machine.put("/run/guard.toml", rules.as_bytes(), 0o644)?;
    machine.sh("mercury guard on --rules /run/guard.toml")?;
    let report = live_twice(&machine, death)?;
    is_as_it_was(&machine, &report, reason)?;
    let nmis = || -> Result<Value> {
        let state = machine.sh("mercury guard status --rules /run/guard.toml --json")?;
        Ok(serde_json::from_str::<Value>(&state).unwrap()["watch"]["nmis"].clone())
    };
    let before = nmis()?;
    machine.sh("sleep 3")?;
    assert!(nmis()?.as_u64() > before.as_u64(), "the watch goes on");
    machine.sh("mercury guard off")?;
    is_native_again(&machine)
}

#[test]
#[ignore = "long"]
fn from_a_hang_of_all_cpus() -> Result<()> {
    goes_back_by_the_watch(2, "", "echo hang-all 100 > /dev/mercury_test", "hang")
}

#[test]
#[ignore = "long"]
fn from_a_hang_of_one_cpu_of_four() -> Result<()> {
    goes_back_by_the_watch(4, "", "echo hang 3 > /dev/mercury_test", "hang")
}

/// The kernel would go on after the oops: `panic_on_oops` is 0.
#[test]
#[ignore = "long"]
fn from_an_oops() -> Result<()> {
    goes_back_by_the_watch(2, "on_oops = 'fatal'", "echo oops 1 > /dev/mercury_test", "oops")
}

/// A script that lives so many times, and each time does some work and dies. It reports on the console
/// at the begin of each life. The number of lives is all that it knows of those before.
const MANY_LIVES: &str = r#"
sleep 1
mercury snapshot --json "${@:3}" > /run/said 2>&1
lives=$(grep -o '"count": *[0-9]*' /run/said | grep -o '[0-9]*$')
lives=${lives:-0}
test ! -e /run/been || echo "<3>lives: a file of another life" > /dev/kmsg
status=$(mercury status --json | tr -d ' \n')
number() { echo "$status" | grep -o "\"$1\":[0-9]*" | cut -d: -f2; }
said=$(tr -s ' \n' ' ' < /run/said)
echo "<3>life $lives: $said [$(number free_bytes), $(number total_bytes)]" > /dev/kmsg
if test $lives -lt "$1"; then
    touch /run/been
    ls -lR /usr/lib > /run/listing
    head -c 8M /dev/urandom > /run/written
    eval "$2"
    sleep 60
    echo "<3>lives: still in life $lives" > /dev/kmsg
else
    echo "<3>lives: all lived" > /dev/kmsg
fi
"#;

/// Time in which a machine in QEMU lives and dies.
const LIFE: Duration = Duration::from_secs(30);

/// Lets a machine die so many times of something, each time within `limit`. Returns the reports at the begin
/// of each life: of the command, and the free bytes of the pool and the bytes of the hypervisor's memory.
fn live_often(
    machine: &Machine,
    deaths: u32,
    death: &str,
    words: &str,
    limit: Duration,
) -> Result<Vec<(Value, Value)>> {
    machine.put("/run/lives", MANY_LIVES.as_bytes(), 0o755)?;
    machine.sh(&format!(
        "setsid bash /run/lives {deaths} '{death}' {words} > /run/lives.said 2>&1 < /dev/null &"
    ))?;
    let line = machine.wait_serial("lives: .*\n", limit * (deaths + 2))?;
    assert!(line.contains("all lived"), "{line}");
    let log = machine.serial_log();
    let report = |life: u32| {
        let (_, rest) = log.split_once(&format!("life {life}: ")).expect("a report");
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        (values.next().expect("a report").unwrap(), values.next().expect("a status").unwrap())
    };
    Ok((0..=deaths).map(report).collect())
}

/// Checks that no life costs memory of the hypervisor's or of the pool.
fn nothing_leaks(lives: &[(Value, Value)]) {
    let free = |life: &(Value, Value)| life.1[0].as_u64().expect("free bytes");
    let second = free(&lives[1]);
    for life in &lives[1..] {
        let (report, status) = life;
        assert_eq!((&report["state"], &report["again"]), (&"rolled-back".into(), &true.into()), "{report}");
        assert!(status[1].is_number() && status[1] == lives[0].1[1], "{status}");
        assert!(free(life).abs_diff(second) < 24 << 20, "{} after {second}: {status}", free(life));
    }
}

/// Checks that the life that ended by a panic is known: its words, where its CPUs were, and its memory, byte
/// by byte as the hypervisor found it. The next life works meanwhile.
fn is_dissected(machine: &Machine) -> Result<()> {
    machine.sh("mkfs.ext4 -q /dev/vdb && mount /dev/vdb /mnt && head -c 4M /dev/urandom > /run/another")?;
    let banner = machine.sh("grep ' linux_banner$' /proc/kallsyms | cut -d ' ' -f 1")?;
    let said = machine.sh("mercury postmortem --json --core /mnt/core")?;
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["reason"], &report["core"]["exact"]), (&"panic".into(), &true.into()), "{report}");
    assert!(
        report["message"].as_str().is_some_and(|words| words.contains("sysrq triggered crash")),
        "{said}"
    );
    assert!((0.5..300.0).contains(&report["lived_s"].as_f64().unwrap()), "{report}");
    let log = report["log"].as_array().unwrap();
    let has = |words: &str| log.iter().any(|line| line.as_str().unwrap().contains(words));
    assert!(has("Linux version 6.1") && has("sysrq: Trigger a crash") && has("Call Trace:"), "{said}");
    let cpus = report["cpus"].as_array().unwrap();
    let dead = cpus.iter().find(|cpu| cpu["cpu"] == report["cpu"]).expect("the CPU that panicked");
    let calls = dead["calls"].to_string();
    assert!(calls.contains("\"panic+0x") && calls.contains("sysrq_handle_crash+0x"), "{dead}");
    assert_eq!((cpus.len(), dead["task"].as_str()), (2, Some("bash")), "{said}");
    let core = machine.sh(&format!(
        "head -c 64K /mnt/core | grep -aow VMCOREINFO; gdb -batch -ex 'x/s 0x{banner}' \
         -ex 'info threads' -ex bt -c /mnt/core 2>&1"
    ))?;
    println!("{core}");
    assert!(core.contains("VMCOREINFO") && core.contains("Linux version 6.1"), "{core}");
    assert_eq!(core.matches("New LWP").count(), 2, "{core}");
    let said = machine.sh("mercury postmortem --drop")?;
    println!("{said}");
    assert!(said.contains("were given back") && said.contains("sysrq_handle_crash"), "{said}");
    refused(machine, "mercury postmortem", "no-post-mortem")?;
    machine.sh("umount /mnt").map(drop)
}

/// Goes back to the same instant again and again, by turns of what the machine dies of. The life that ended
/// last is dissected.
#[test]
fn again_and_again() -> Result<()> {
    need_qemu()?;
    let spec = spec(2).disk(Bus::Virtio, 1024).memory_mib(1536).kernel_arg("init_on_alloc=0");
    let machine = at_work(spec, &[MEMORY_LOAD])?;
    let death = "case $((lives % 3)) in 0) mercury rollback;; 1) echo c > /proc/sysrq-trigger;; \
         2) mercury-workload kernel triple-fault 1;; esac";
    let lives = live_often(&machine, 5, death, "--compare", LIFE)?;
    nothing_leaks(&lives);
    for ((report, _), reason) in
        lives[1..].iter().zip(["command", "panic", "triple fault", "command", "panic"])
    {
        assert_eq!(report["reason"], reason, "{report}");
        assert_eq!(report["compared"]["different"], 0, "{report}");
    }
    is_as_it_was(&machine, &lives[5].0, "panic")?;
    is_dissected(&machine)?;
    is_native_again(&machine)
}

/// Lets a panic take its course that comes back each time.
#[test]
#[ignore = "long"]
fn the_same_panic_three_times_is_the_last() -> Result<()> {
    dies_three_times(PANIC)
}

/// Catches the loop at another instruction in each life.
#[test]
#[ignore = "long"]
fn the_same_soft_lockup_three_times_is_the_last() -> Result<()> {
    dies_three_times(
        "echo 2 > /proc/sys/kernel/watchdog_thresh; echo 1 > /proc/sys/kernel/softlockup_panic; \
         echo soft-hang > /dev/mercury_test",
    )
}

fn dies_three_times(death: &str) -> Result<()> {
    need_qemu()?;
    let machine = at_work(spec(2), &[])?;
    machine.put("/run/lives", MANY_LIVES.as_bytes(), 0o755)?;
    start(&machine, &format!("bash /run/lives 9 \"{death}\""))?;
    machine.wait_shutdown(Duration::from_secs(300))?;
    let log = machine.serial_log();
    assert!(log.contains("life 2: ") && !log.contains("life 3: "), "{log}");
    Ok(())
}

/// Goes back a thousand times, or as often as `MERCURY_LIVES` says. The disk is read all the time.
#[test]
#[ignore = "long"]
fn a_thousand_times() -> Result<()> {
    need_qemu()?;
    let machine = at_work(spec(2), &[DISK_LOAD])?;
    let wanted = std::env::var("MERCURY_LIVES").ok().and_then(|number| number.parse().ok()).unwrap_or(1000);
    let lives = live_often(&machine, wanted, "mercury rollback", "", LIFE)?;
    nothing_leaks(&lives);
    let free: Vec<_> = lives.iter().map(|life| life.1[0].as_u64().unwrap_or(0) >> 10).collect();
    println!("KiB that were free in the pool: {free:?}");
    machine.sh("head -c 60M /run/disk | cmp - <(yes mercury | head -c 60M)")?;
    is_native_again(&machine)
}

#[test]
fn on_command() -> Result<()> {
    need_qemu()?;
    let machine = at_work(spec(2), &[DISK_LOAD, MEMORY_LOAD])?;
    encrypt(&machine)?;
    let report = live_twice(&machine, COMMAND)?;
    is_as_it_was(&machine, &report, "command")?;
    nothing_is_encrypted_twice(&machine)?;
    is_native_again(&machine)
}

/// Restores the registers, and arms again what was armed.
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
fn on_command_on_three_cpus() -> Result<()> {
    goes_back(spec(3), &[DISK_LOAD, MEMORY_LOAD], COMMAND, "command")
}

#[test]
#[ignore = "long"]
fn on_command_on_four_cpus() -> Result<()> {
    goes_back(spec(4), &[DISK_LOAD, MEMORY_LOAD], COMMAND, "command")
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

#[test]
#[ignore = "long"]
fn from_a_panic_on_three_cpus() -> Result<()> {
    goes_back(spec(3), &[DISK_LOAD, MEMORY_LOAD], PANIC, "panic")
}

/// Rolls back from a panic on four CPUs; the others are halted with interrupts off by then.
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

/// Rolls back behind AMD's IOMMU. The disk that is read as well is virtio's, and not behind the
/// IOMMU; the root's is.
#[test]
#[ignore = "long"]
fn on_command_behind_amds_iommu() -> Result<()> {
    let root_load = DISK_LOAD.replace("vda", "nvme0n1");
    let spec = spec_of(Kernel::BookwormGeneric, 2).iommu(Iommu::Amd);
    goes_back(spec, &[&root_load, DISK_LOAD, MEMORY_LOAD], COMMAND, "command")
}

/// A script in which the second CPU hangs. A process that waited for it would hang, and one that
/// was on it would not be heard of again.
const HANG: &str =
    "taskset -cp 0 $$; taskset -c 1 mercury-workload kernel hang 1 & sleep 0.2; mercury rollback";

/// Rolls back a CPU that takes no interrupts, with the help of another one. A machine with one CPU
/// has none that could help.
#[test]
#[ignore = "long"]
fn from_a_hung_cpu() -> Result<()> {
    goes_back(spec(2), &[], HANG, "command")
}

/// Rolls back with work on the CPUs that do not hang, as far as it does not wait for the one that
/// does.
fn goes_back_from_a_hung_cpu(cpus: u32, at_work: &str, death: &str, reason: &str) -> Result<()> {
    let loads = [DISK_LOAD, MEMORY_LOAD].map(|load| format!("taskset -cp {at_work} $$; {load}"));
    goes_back(spec(cpus), &loads.each_ref().map(String::as_str), death, reason)
}

/// Rolls back by the kernel's own watchdog: the only other CPU soon waits in the kernel for the
/// hung one, and no command runs then.
#[test]
#[ignore = "long"]
fn from_a_hung_cpu_of_two_at_work() -> Result<()> {
    let death = "echo 2 > /proc/sys/kernel/watchdog_thresh; echo 1 > /proc/sys/kernel/softlockup_panic; \
         taskset -cp 0 $$; taskset -c 1 mercury-workload kernel hang 1 &";
    goes_back_from_a_hung_cpu(2, "0", death, "panic")
}

#[test]
#[ignore = "long"]
fn from_a_hung_cpu_of_three_at_work() -> Result<()> {
    goes_back_from_a_hung_cpu(3, "2", HANG, "command")
}

#[test]
#[ignore = "long"]
fn from_a_hung_cpu_of_four_at_work() -> Result<()> {
    goes_back_from_a_hung_cpu(4, "2-3", HANG, "command")
}

/// Rolls back a CPU that the kernel stops by NMI. No other NMI reaches it in the handler.
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
fn from_a_triple_fault_on_three_cpus() -> Result<()> {
    goes_back(spec(3), &[DISK_LOAD, MEMORY_LOAD], "mercury-workload kernel triple-fault 1", "triple fault")
}

#[test]
#[ignore = "long"]
fn from_a_triple_fault() -> Result<()> {
    goes_back(spec(2), &[DISK_LOAD], "mercury-workload kernel triple-fault 1", "triple fault")
}

/// Rolls back real hardware at work: AHCI with the root, NVMe, USB storage and e1000e.
fn real_hardware_goes_back(spec: Spec, death: &str, reason: &str) -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec.modules(Variant::Faults).qemu_version(Qemu::Newer))?;
    machine.sh(&format!("modprobe -a {REAL_DRIVERS}"))?;
    give_address(&machine)?;
    only_read_root(&machine)?;
    let port = source();
    let loads = ["/dev/sda", "/dev/nvme0n1", "/dev/sdb"].map(disk_load);
    let loads = loads.into_iter().chain([network_load(port, FRESH_CARD)]);
    let loads: Vec<_> = loads.map(|load| format!("while true; do {load}; done")).collect();
    set_to_work(&machine, "/dev/nvme0n1", &loads.iter().map(String::as_str).collect::<Vec<_>>())?;
    let direct = "dd if=/dev/sda bs=1M count=64 skip=64 iflag=direct status=none | sha256sum";
    let root = machine.sh(direct)?;
    let report = live_twice(&machine, death)?;
    is_as_it_was(&machine, &report, reason)?;
    assert_eq!(machine.sh(direct)?, root, "AHCI");
    machine.sh("dd if=/dev/sdb bs=1M count=64 iflag=direct status=none | cmp - <(head -c 64M /dev/zero)")?;
    let received = format!("timeout 60 head -c 5M < /dev/tcp/10.0.2.2/{port} | wc -c");
    assert_eq!(machine.sh(&received)?, "5242880");
    iommu::check(&machine)?;
    is_native_again(&machine)
}

#[test]
#[ignore = "long"]
fn on_command_with_ahci_nvme_usb_and_e1000e() -> Result<()> {
    real_hardware_goes_back(real_hardware(), COMMAND, "command")
}

#[test]
#[ignore = "long"]
fn from_a_panic_with_ahci_nvme_usb_and_e1000e() -> Result<()> {
    real_hardware_goes_back(real_hardware(), PANIC, "panic")
}

/// Reads and writes on a writable root, with a count for the test.
const ROOT_LOAD: &str = "n=0; while cat /usr/bin/python3 > /dev/null && cp /bin/bash /root/load && sync \
     /root/load; do echo $((n += 1)) > /run/rounds.new; mv /run/rounds.new /run/rounds; \
     echo 1 > /proc/sys/vm/drop_caches; done";

/// Returns a script that changes the root's files in the life that ends, and ends it.
fn after_a_change(death: &str) -> String {
    format!("touch /root/first; yes first | head -c 20M > /root/file; rm /root/lost; sync; {death}")
}

/// Sets a machine with a writable root to work, with files to check later.
fn set_root_to_work(machine: &Machine) -> Result<()> {
    machine.sh("yes before | head -c 20M > /root/file; echo kept > /root/lost; sync")?;
    set_to_work(machine, "/dev/vda", &[DISK_LOAD, ROOT_LOAD])?;
    machine.sh("until test -s /run/rounds; do sleep 0.1; done").map(drop)
}

/// Checks that the work on the root goes on.
fn root_works(machine: &Machine) -> Result<()> {
    let before = number(machine, "/run/rounds")?;
    machine.sh(&format!(
        "for i in $(seq 600); do test $(cat /run/rounds) -gt {} && exit; sleep 0.1; done; exit 1",
        before + 1
    ))?;
    machine.sh("echo second > /root/second && sync").map(drop)
}

/// Checks that files are as they were.
fn root_is_back(machine: &Machine) -> Result<()> {
    machine
        .sh("cmp /root/file <(yes before | head -c 20M) && test ! -e /root/first && grep kept /root/lost")
        .map(drop)
}

/// Rolls back a machine whose files are all in memory.
#[test]
#[ignore = "long"]
fn on_command_with_a_root_in_ram() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2).memory_mib(1536).kernel_arg("lab.root=ram"))?;
    assert_eq!(machine.sh("findmnt -no FSTYPE /; findmnt -rno TARGET -t ext4")?, "tmpfs\n/mercury");
    set_root_to_work(&machine)?;
    let report = live_twice(&machine, &after_a_change(COMMAND))?;
    is_as_it_was(&machine, &report, "command")?;
    root_is_back(&machine)?;
    root_works(&machine)?;
    is_native_again(&machine)
}

/// Rolls back a machine whose root is on another machine. The server goes on: changes to its files
/// stay, and the connection is made anew.
fn root_on_nfs_goes_back(death: &str, reason: &str) -> Result<()> {
    need_qemu()?;
    let both = Reservation::of(2, &[Kernel::BookwormCloud])?;
    let port = free_port();
    let server = Spec::new(Kernel::BookwormCloud).cpus(1).memory_mib(768).qemu_version(Qemu::Newer);
    let server = Machine::boot_reserved(wired(server, port, "listen"), &both)?;
    plug_in(&server, "10.9.0.1")?;
    restart::start(&server, "exports", EXPORTS, "")?;
    let spec = wired(spec(2).kernel_arg("lab.nfs=10.9.0.1,10.9.0.2,4.0"), port, "connect");
    let machine = Machine::boot_reserved(spec, &both)?;
    assert_eq!(machine.sh("findmnt -no FSTYPE /; findmnt -rno TARGET -t ext4")?, "nfs4\n/mercury");
    machine.sh("mount -i -t nfs4 10.9.0.1:/ /mnt -o vers=4.2,addr=10.9.0.1,clientaddr=10.9.0.2")?;
    refused(&machine, "mercury snapshot", "/mnt is on NFS 4.2")?;
    machine.sh("umount /mnt")?;
    set_root_to_work(&machine)?;
    let report = live_twice(&machine, &after_a_change(death))?;
    let begun = Instant::now();
    root_works(&machine)?;
    println!("its root worked again after {:.1} s", begun.elapsed().as_secs_f64());
    is_as_it_was(&machine, &report, reason)?;
    machine.sh("cmp /root/file <(yes first | head -c 20M) && ls /root/first && test ! -e /root/lost")?;
    assert_eq!(server.sh("cat /root/second")?, "second");
    is_native_again(&machine)
}

#[test]
#[ignore = "long"]
fn on_command_with_a_root_on_nfs() -> Result<()> {
    root_on_nfs_goes_back(COMMAND, "command")
}

#[test]
#[ignore = "long"]
fn from_a_panic_with_a_root_on_nfs() -> Result<()> {
    root_on_nfs_goes_back(PANIC, "panic")
}

/// A script that puts the root's disk back. Reads through the device have the old contents at once,
/// and the disk has them soon after.
const PUT_BACK: &str = r#"
set -e
read sectors < /run/sectors
dmsetup suspend --nolockfs --noudevsync root
dmsetup remove --noudevsync frozen
dmsetup reload root --table "0 $sectors snapshot-merge /dev/nvme0n1 /dev/vdb P 16"
dmsetup resume --noudevsync root
"#;

/// A command that waits until the disk has all old contents again: the sectors in use are then only
/// those that record where data is.
const MERGED: &str = "for i in $(seq 600); do set -- $(dmsetup status root); test ${4%/*} = $5 && exit; \
    sleep 0.1; done; exit 1";

/// Rolls back a writable root by a device-mapper snapshot, which is made and merged while
/// everything is frozen.
fn root_on_a_disk_goes_back(death: &str, reason: &str) -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2).disk(Bus::Virtio, 512).kernel_arg("lab.root=mapped"))?;
    assert_eq!(machine.sh("findmnt -no SOURCE,FSTYPE /")?, "/dev/dm-0 ext4");
    // The scripts' programs must be in memory: they must not be read from a disk that has changed
    // since.
    let hook = format!(
        "cat /bin/sh /sbin/dmsetup $(ldd /sbin/dmsetup | grep -o \" /[^ ]*\") > /dev/null\n{}",
        snapshot_of("root", "/dev/nvme0n1", "/dev/vdb")
    );
    machine.put("/run/freeze", hook.as_bytes(), 0o755)?;
    machine.put("/run/put-back", PUT_BACK.as_bytes(), 0o755)?;
    machine.sh("blockdev --getsz /dev/nvme0n1 > /run/sectors")?;
    set_root_to_work(&machine)?;
    let words = "--force-disks --hook \"sh /run/freeze\" --put-back \"sh /run/put-back\"";
    let report = live_twice_with(&machine, &after_a_change(death), words)?;
    machine.sh("echo 3 > /proc/sys/vm/drop_caches")?;
    root_is_back(&machine)?;
    is_as_it_was(&machine, &report, reason)?;
    root_works(&machine)?;
    machine.sh(MERGED)?;
    machine.sh("echo 3 > /proc/sys/vm/drop_caches")?;
    root_is_back(&machine)?;
    machine.sh("pkill -f [r]ounds.new; while pgrep -f [r]ounds.new; do sleep 0.1; done; \
         sync && mount -o remount,ro /")?;
    println!("{}", machine.sh("e2fsck -fn /dev/dm-0")?);
    is_native_again(&machine)
}

#[test]
#[ignore = "long"]
fn on_command_with_its_disk() -> Result<()> {
    root_on_a_disk_goes_back(COMMAND, "command")
}

#[test]
#[ignore = "long"]
fn from_a_panic_with_its_disk() -> Result<()> {
    root_on_a_disk_goes_back(PANIC, "panic")
}

/// An array of two disks that is checked slowly.
const ARRAY: &str = "modprobe raid1; mdadm --create /dev/md0 --run --level=1 --metadata=1.2 --assume-clean \
     --raid-devices=2 /dev/vdb /dev/vdc; cd /sys/block/md0/md; echo 1000 > sync_speed_max; \
     echo check > sync_action";

/// Brings RAID arrays to rest while commands put disks back, and lets them go on in both lives.
#[test]
#[ignore = "long"]
fn arrays_rest_while_disks_are_put_back() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2).disk(Bus::Virtio, 256).disk(Bus::Virtio, 256))?;
    only_read_root(&machine)?;
    machine.sh(ARRAY)?;
    machine.put("/run/lives", LIVES.as_bytes(), 0o755)?;
    machine.put(
        "/run/see",
        b"cat /sys/block/md0/md/sync_action /sys/block/md0/md/array_state > $1",
        0o755,
    )?;
    let words = "--force-disks --hook \"sh /run/see /run/then\" --put-back \"sh /run/see /run/later\"";
    // The console shows what is urgent.
    let first = "cp /sys/block/md0/md/sync_action /run/between; \
         echo \"<2>$(cat /run/between)\" > /dev/kmsg; mercury rollback";
    let report = live_twice_with(&machine, first, words)?;
    assert_eq!(report["state"], "rolled-back", "{report}");
    for file in ["then", "later"] {
        assert_eq!(machine.sh(&format!("cat /run/{file}"))?, "frozen\nclean", "{file}");
    }
    assert_eq!(
        machine.sh("cat /sys/block/md0/md/sync_action; ls /run/between 2> /dev/null || true")?,
        "check"
    );
    let log = machine.serial_log();
    assert!(log.lines().any(|line| line.ends_with("] check")), "it went on in the first life: {log}");
    machine.sh("echo idle > /sys/block/md0/md/sync_action; mdadm --stop /dev/md0")?;
    is_native_again(&machine)
}

/// Ends a machine whose memory was rolled back but whose disk was not, whatever its owner has
/// forced. The disk stays as the first life has left it.
#[test]
#[ignore = "long"]
fn a_disk_that_has_moved_on_is_not_met() -> Result<()> {
    need_qemu()?;
    let mut machine = Machine::boot(spec(2))?;
    for (words, why) in [
        ("", "/ was written to after the instant"),
        ("--put-back \"exit 3\"", "the command of --put-back failed: exit status: 3"),
    ] {
        machine.put("/run/lives", LIVES.as_bytes(), 0o755)?;
        machine.sh(&format!(
            "setsid bash /run/lives \"touch /root/first; sync; mercury rollback\" --force-disks {words} \
             > /run/lives.said 2>&1 < /dev/null &"
        ))?;
        machine.wait_serial(&format!("its disks were not: {why}; it restarts"), Duration::from_secs(120))?;
        machine.wait_shutdown(Duration::from_secs(60))?;
        machine = machine.start_again()?;
        machine.sh(
            "rm /root/first && mount -o remount,ro / && e2fsck -fn /dev/nvme0n1 && mount -o remount,rw /",
        )?;
    }
    Ok(())
}

/// Ends a machine whose read-only root was remounted and written to after the instant.
#[test]
#[ignore = "long"]
fn a_read_only_disk_that_was_written_to_is_not_met() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2))?;
    only_read_root(&machine)?;
    machine.put("/run/lives", LIVES.as_bytes(), 0o755)?;
    start(
        &machine,
        "bash /run/lives \"mount -o remount,rw /; touch /root/first; sync; mount -o remount,ro /; \
         mercury rollback\" > /run/lives.said 2>&1",
    )?;
    let why = "its disks were not: / was written to after the instant; it restarts";
    machine.wait_serial(why, Duration::from_secs(120))?;
    machine.wait_shutdown(Duration::from_secs(60))?;
    let machine = machine.start_again()?;
    machine.sh("mount -o remount,ro / && e2fsck -fn /dev/nvme0n1").map(drop)
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

/// Leaves the machine running, with a reason, whatever takes its snapshot away.
#[test]
#[ignore = "long"]
fn a_refused_or_dropped_snapshot_allows_no_rollback() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2))?;
    refused(&machine, "mercury snapshot", "/ (/dev/")?;
    machine.sh("sync; mount -o remount,ro /")?;
    refused(&machine, "exec 3<>/dev/vda; mercury snapshot", "open for writing")?;
    refused(&machine, "mercury snapshot --hook 'exit 3'", "the hook failed")?;
    assert!(!machine.sh("mercury status --json")?.contains("\"attached\""), "it is as it was");
    machine.sh("mercury snapshot")?;
    assert_eq!(state(&machine)?["state"], "kept");
    refused(&machine, "mercury snapshot", "snapshot-live")?;
    machine.sh("mercury snapshot --drop")?;
    refused(&machine, "mercury rollback", "no-snapshot")?;

    // The pool is too small even for persistent DMA memory: the command refuses it at once, and not
    // at the rollback.
    refused(&machine, "mercury snapshot --pool 2", "snapshot-pool")?;
    // Memory that was free needs no copy.
    machine.sh("head -c 120M /dev/zero > /run/x && mercury snapshot --pool 80")?;
    machine.sh("dd if=/dev/zero of=/run/x bs=1M count=120 conv=notrunc")?;
    machine.sh("until mercury status | grep snapshot-pool; do sleep 0.2; done; rm /run/x")?;
    refused(&machine, "mercury rollback", "no-snapshot")?;

    machine.sh(
        "modprobe -a dummy macsec; ip link add cable type dummy; ip link add link cable safe type macsec",
    )?;
    refused(&machine, "mercury snapshot", "macsec-in-use")?;
    machine.sh("ip link delete safe; ip link delete cable")?;

    machine.sh("mercury snapshot && echo 0 > /sys/devices/system/cpu/cpu1/online")?;
    machine.sh("until mercury status | grep snapshot-lost; do sleep 0.2; done")?;
    machine.sh("mercury snapshot && echo 1 > /sys/devices/system/cpu/cpu1/online")?;
    machine.sh("until mercury status | grep snapshot-hotplug; do sleep 0.2; done")?;
    machine.sh("mercury attach && mercury snapshot && mercury detach")?;
    assert_eq!(state(&machine)?, Value::Null, "detach gives it up");
    refused(&machine, "mercury rollback", "no-snapshot")?;
    machine.check_next_attach()
}

/// Delivers each of the system's own NMIs once under a snapshot.
#[test]
fn nmis_come_through() -> Result<()> {
    need_qemu()?;
    deliver_nmis(spec(2))
}

#[test]
#[ignore = "long"]
fn intel_nmis_come_through() -> Result<()> {
    deliver_nmis(intel(2))
}

fn deliver_nmis(spec: Spec) -> Result<()> {
    let machine = Machine::boot(spec)?;
    machine.sh("sync; mount -o remount,ro /")?;
    load_test_module(&machine)?;
    machine.sh("mercury snapshot")?;
    refused(&machine, "mercury verify", "snapshot-live")?;
    assert_eq!(
        (state(&machine)?["state"].as_str(), machine.modes()?.as_str()),
        (Some("kept"), "attached attached")
    );
    for cpu in [0, 1] {
        let answer = workloads::kernel(&machine, &format!("nmi {cpu} 300"))?;
        assert_eq!((&answer["sent"], &answer["lost"]), (&300.into(), &0.into()), "{answer}");
    }
    assert_eq!(state(&machine)?["state"], "kept");
    machine.mercury("detach")?;
    machine.check_next_attach()
}

/// Writes to pages that a device is to read, since the device might change them, but not to
/// read-only pages.
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

/// Returns the messages of an AML method of `lab/guest/acpi/sleep.asl` in the kernel's log, in
/// order.
fn firmware_was_told(log: &str) -> Vec<&str> {
    log.split("firmware _").skip(1).map(|rest| rest.get(..5).unwrap_or(rest)).collect()
}

/// Reports the instant and the way back to the firmware as Linux reports hibernation: `_PTS(4)` and
/// `_WAK(4)` with no sleep in between. A rollback calls `_WAK(4)` once more.
#[test]
#[ignore = "long"]
fn firmware_is_told_of_a_sleep() -> Result<()> {
    need_qemu()?;
    let table = concat!("file=", env!("CARGO_MANIFEST_DIR"), "/guest/acpi/sleep.aml");
    let spec = spec(2).qemu_arg("-acpitable").qemu_arg(table);
    let machine = at_work(spec.kernel_arg("acpi.aml_debug_output=1").kernel_arg("ignore_loglevel"), &[])?;
    machine.mercury("attach")?;
    let report = live_twice(&machine, "mercury rollback")?;
    let log = machine.serial_log();
    // The console was frozen at the instant: each life prints what the kernel had recorded just
    // before it.
    let lives = ["TTS 4", "PTS 4", "WAK 4", "TTS 0", "PTS 4", "WAK 4", "TTS 0"];
    assert_eq!(firmware_was_told(&log), lives, "{log}");
    is_as_it_was(&machine, &report, "command")
}

/// Describes a machine by Intel, in Bochs, which interprets all CPUs in one thread.
fn intel(cpus: u32) -> Spec {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(cpus).memory_mib(768).modules(Variant::Faults);
    spec.platform(Platform::Bochs(Model::SkylakeX))
}

/// Goes back from one death after the other on a processor by Intel, each time with all memory compared.
/// `before` prepares the machine. The root's disk works in the last life, and the life before it is known.
fn intel_goes_back(spec: Spec, before: &str, deaths: &[(&str, &str)]) -> Result<()> {
    let machine = Machine::boot(spec)?;
    only_read_root(&machine)?;
    machine.sh(before)?;
    count(&machine)?;
    start(&machine, MEMORY_LOAD)?;
    let cases = deaths.iter().enumerate().map(|(life, (death, _))| format!("{life}) {death};;"));
    let death = format!("case $lives in {} esac", cases.collect::<Vec<_>>().join(" "));
    let lives = live_often(&machine, deaths.len() as u32, &death, "--compare", 10 * LIFE)?;
    nothing_leaks(&lives);
    for ((report, _), (_, reason)) in lives[1..].iter().zip(deaths) {
        println!("{report}");
        assert_eq!((&report["reason"], &report["compared"]["different"]), (&(*reason).into(), &0.into()));
    }
    let (last, _) = lives.last().expect("a life");
    memory_is_as_it_was(&machine, last, deaths.last().expect("a death").1)?;
    machine.sh("dd if=/dev/sda of=/dev/null bs=1M count=8 iflag=direct; cat /bin/bash > /dev/null")?;
    let postmortem = machine.command("mercury postmortem --drop").timeout(20 * LIFE).run()?.check()?;
    let words = postmortem.stdout;
    println!("{words}");
    assert!(words.contains(deaths.last().expect("a death").1), "{words}");
    is_native_again(&machine)
}

const TRIPLE_FAULT: &str = "mercury-workload kernel triple-fault 0";

#[test]
#[ignore = "long"]
fn intel_goes_back_with_one_cpu() -> Result<()> {
    let deaths = [(COMMAND, "command"), (TRIPLE_FAULT, "triple fault"), (PANIC, "panic")];
    intel_goes_back(intel(1), "true", &deaths)
}

/// Goes back with a CPU that the kernel has stopped by NMI, and that an NMI fetches from that handler.
#[test]
#[ignore = "long"]
fn intel_goes_back_with_two_cpus() -> Result<()> {
    let beside = "taskset 1 mercury-workload kernel hang-and-panic 1";
    let deaths = [(COMMAND, "command"), (TRIPLE_FAULT, "triple fault"), (PANIC, "panic"), (beside, "panic")];
    intel_goes_back(intel(2), "true", &deaths)
}

#[test]
#[ignore = "long"]
fn intel_goes_back_from_a_hang_of_all_cpus() -> Result<()> {
    let watch = "touch /run/guard.toml; mercury guard on --rules /run/guard.toml";
    intel_goes_back(intel(2), watch, &[("echo hang-all 100 > /dev/mercury_test", "hang")])
}
