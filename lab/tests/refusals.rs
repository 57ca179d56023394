//! Reasons against an operation on the machine as it is. `mercury doctor` predicts the refusals of
//! checkpoint, snapshot and migrate. Hardware that exists without being used is no reason.

#![allow(clippy::unwrap_used)]

mod workloads;

use mercury_lab::{
    Kernel, Machine, Result,
    restart::{self, boot_id, is_well, script::CLOCK, start},
};
use serde_json::Value;
use std::time::Duration;
use workloads::{
    load_test_module,
    restart::{DISK, need_qemu, spec},
};

/// A program that opens an RDMA device and has a context of it, as every program that uses one has
/// (libibverbs's first command).
const USER_OF_RDMA: &str = r#"
import ctypes, os, struct, time
device = os.open("/dev/infiniband/uverbs0", os.O_RDWR)
answer = ctypes.create_string_buffer(64)
GET_CONTEXT, WORDS_IN, WORDS_OUT = 0, 4, 2
os.write(device, struct.pack("<IHHQ", GET_CONTEXT, WORDS_IN, WORDS_OUT, ctypes.addressof(answer)))
say("has a context")
time.sleep(100000)
"#;

/// A program that feeds a watchdog each second. It stands still with all other programs.
const FEEDS: &str = r#"
import os, time
watchdog = os.open("/dev/watchdog", os.O_WRONLY)
while True:
    os.write(watchdog, b"\0")
    say("fed")
    time.sleep(1)
"#;

/// Returns doctor's prediction for an operation: possible or not, and the codes of the refusals.
fn predicted(machine: &Machine, operation: &str) -> Result<(String, Vec<String>)> {
    let report = machine.mercury("doctor")?;
    let sections = report["operations"].as_array().unwrap();
    let section = sections.iter().find(|section| section["operation"] == operation).unwrap();
    let refused = |item: &&Value| item["grade"] == "refused";
    let codes = section["items"].as_array().unwrap().iter().filter(refused);
    let codes = codes.map(|item| item["code"].as_str().unwrap_or_default().to_owned());
    Ok((section["possible"].as_str().unwrap().to_owned(), codes.collect()))
}

fn is_refused(machine: &Machine, line: &str, code: &str, name: &str) -> Result<()> {
    let refusal = machine.mercury_refused(line)?;
    assert_eq!((refusal.exit, refusal.code.as_str()), (3, code), "{line}: {refusal:?}");
    assert!(refusal.text.contains(name), "{line}: {refusal:?}");
    Ok(())
}

/// Refuses an RDMA device with a context, by the name of its user, and not an unused one. A
/// watchdog is fed while its program stands still for longer than the watchdog waits.
#[test]
fn only_devices_in_use_are_refused() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormGeneric))?;
    machine.sh(
        "modprobe rdma_rxe && modprobe ib_uverbs && ip link add fake type dummy && ip link set fake up && \
         rdma link add rxe0 type rxe netdev fake && test -d /sys/class/infiniband/rxe0",
    )?;
    assert_eq!(predicted(&machine, "checkpoint")?, ("yes".into(), vec![]));
    assert_eq!(predicted(&machine, "snapshot")?, ("no".into(), vec!["disks-stay-behind".into()]));
    is_refused(&machine, "snapshot", "disks-stay-behind", "/ (/dev/")?;

    start(&machine, "rdma", USER_OF_RDMA, "")?;
    assert_eq!(predicted(&machine, "checkpoint")?, ("no".into(), vec!["devices-unseen".into()]));
    assert_eq!(predicted(&machine, "migrate")?.1, ["devices-unseen", "no-place-for-tombstone"]);
    let user = "RDMA device rxe0, used by python3 (";
    is_refused(&machine, &format!("checkpoint {DISK}"), "devices-unseen", user)?;
    is_refused(&machine, "migrate --dry-run --without-tombstone", "devices-unseen", user)?;
    is_refused(
        &machine,
        "migrate --dry-run --force-devices",
        "no-place-for-tombstone",
        "tombstone --prepare",
    )?;
    machine.sh("pkill -f '^python3 /run/rdma'")?;
    used_meanwhile(&machine)?;
    macsec_is_predicted(&machine)?;

    machine.sh("modprobe softdog soft_margin=12")?;
    start(&machine, "feeds", FEEDS, "")?;
    machine.sh("grep -x active /sys/class/watchdog/watchdog0/state")?;
    assert_eq!(predicted(&machine, "checkpoint")?.0, "yes");
    let id = boot_id(&machine)?;
    // Longer than the watchdog waits, and no program runs meanwhile.
    machine.sh(&format!("mercury checkpoint --hook 'sleep 18' {DISK}"))?;
    assert_eq!(boot_id(&machine)?, id);
    machine.check_next_attach()
}

/// Makes no image if a device is in use when memory has been read, and not before.
fn used_meanwhile(machine: &Machine) -> Result<()> {
    let slow = machine.spawn("mercury checkpoint - 2> /run/said | (sleep 25; cat > /dev/null)")?;
    machine.sh("until mercury status --json | grep -q '\"in-use\"'; do sleep 0.1; done")?;
    start(machine, "rdma", USER_OF_RDMA, "")?;
    slow.wait(Duration::from_secs(240))?;
    let said = machine.sh("cat /run/said; pkill -f '^python3 /run/rdma'")?;
    assert!(said.contains("the image is not complete") && said.contains("devices-unseen"), "{said}");
    Ok(())
}

/// Predicts the refusal of MACsec, also in another network namespace.
fn macsec_is_predicted(machine: &Machine) -> Result<()> {
    machine.sh("modprobe macsec; ip netns add blue; ip -n blue link add cable type dummy; \
         ip -n blue link add link cable safe type macsec")?;
    for operation in ["checkpoint", "snapshot", "migrate"] {
        let (possible, codes) = predicted(machine, operation)?;
        assert!(possible == "no" && codes.contains(&"macsec-in-use".into()), "{operation}: {codes:?}");
    }
    is_refused(machine, &format!("checkpoint {DISK}"), "macsec-in-use", "safe")?;
    is_refused(machine, "snapshot --force-disks", "macsec-in-use", "safe")?;
    is_refused(machine, "migrate --dry-run --without-tombstone", "macsec-in-use", "safe")?;
    machine
        .sh("ip netns delete blue; while mercury doctor | grep -q macsec-in-use; do sleep 0.2; done")
        .map(drop)
}

/// A program that notes the longest time for which it did not run, in milliseconds.
const STOOD: &str = r#"
import time
last, most = time.monotonic(), 0
while True:
    time.sleep(0.02)
    now = time.monotonic()
    most, last = max(most, now - last), now
    say(int(most * 1000))
"#;

/// The longest standstill of an attempt that fails, in milliseconds: 1.5 s, on an emulator on a busy host.
/// The kernel's own patience is 20 s.
const LONGEST_MS: u64 = 6000;

/// Lets a machine stand still for a moment only when a task does not come to rest, and names the task.
/// Nothing but the kernel's own freezer stops this machine, whose files are in memory. A watchdog is fed.
#[test]
fn a_task_that_does_not_rest_holds_the_machine_for_a_moment() -> Result<()> {
    need_qemu()?;
    let spec = spec(Kernel::BookwormGeneric).memory_mib(2048).kernel_arg("lab.root=ram");
    let machine = Machine::boot(spec)?;
    let patience = || machine.sh("cat /sys/power/pm_freeze_timeout");
    assert_eq!(patience()?, "20000");
    machine.sh("modprobe softdog soft_margin=15")?;
    start(&machine, "feeds", FEEDS, "")?;
    load_test_module(&machine)?;
    start(&machine, "stood", STOOD, "")?;

    // One of which it is known what it waits for is found before anything stands still.
    machine.sh("modprobe dm-mod; dmsetup create x --noudevsync --table '0 2048 zero'; \
         dmsetup suspend --noudevsync x; sleep 1")?;
    for (line, flags) in [("snapshot", ""), ("checkpoint /run/x", "iflag=direct")] {
        machine.sh(&format!(
            "setsid dd if=/dev/dm-0 of=/dev/null {flags} count=1 > /run/dd.said 2>&1 < /dev/null & sleep 1; \
             cat /run/dd.said; grep State:.D /proc/$(pgrep -x -n dd)/status"
        ))?;
        let refused = machine.run(&format!("mercury {line}"))?;
        assert!(
            refused.stderr.contains("dd (") && refused.stderr.contains("waits for a disk"),
            "{refused:?}"
        );
    }
    machine.sh("dmsetup resume --noudevsync x; sleep 1; dmsetup remove --noudevsync x")?;
    let known: u64 = machine.sh("cat /run/stood")?.parse().unwrap();

    // Another one makes the instant fail.
    for line in ["snapshot", "checkpoint /run/x"] {
        let waits = machine.spawn("exec mercury-workload kernel wait 30000")?;
        machine
            .sh("until grep -q 'State:.D' /proc/$(pgrep -f '^mercury-workload kernel wait')/status; do \
             sleep 0.1; done")?;
        let refused = machine.run(&format!("mercury {line}"))?;
        assert!(refused.stderr.contains("snapshot-quiesce"), "{refused:?}");
        assert!(refused.stderr.contains("state D, which waits (msleep)"), "{refused:?}");
        assert_eq!(patience()?, "20000");
        waits.wait(Duration::from_secs(120))?;
    }
    let most: u64 = machine.sh("cat /run/stood")?.parse().unwrap();
    println!("it stood still for {known} ms, and for {most} ms in an instant that failed");
    assert!(known < LONGEST_MS && most < LONGEST_MS, "{known} {most}");
    machine.sh("mercury snapshot && mercury snapshot --drop && mercury detach")?;
    assert_eq!(patience()?, "20000");
    machine.check_next_attach()
}

/// Arms a hardware watchdog again in a restored machine: when its program dies, the watchdog resets
/// the machine.
#[test]
#[ignore = "long"]
fn a_watchdog_is_armed_again() -> Result<()> {
    need_qemu()?;
    let spec = spec(Kernel::BookwormGeneric).qemu_arg("-device").qemu_arg("i6300esb");
    let machine = Machine::boot(spec)?;
    machine.sh("modprobe i6300esb heartbeat=30")?;
    start(&machine, "feeds", FEEDS, "")?;
    start(&machine, "clock", CLOCK, "")?;
    let (boot, _folder) = restart::prepare(&machine, DISK, "--module $MERCURY_MODULE")?;
    let id = boot_id(&machine)?;
    restart::checkpoint(&machine, "", DISK)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &id)?;
    std::thread::sleep(std::time::Duration::from_secs(40));
    assert_eq!(boot_id(&machine)?, id, "its program feeds it");
    machine.sh("pkill -9 -f '^python3 /run/feeds'")?;
    machine.wait_shutdown(std::time::Duration::from_secs(120)).map(drop)
}
