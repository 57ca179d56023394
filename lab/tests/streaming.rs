//! Failures while an image is streamed: CPUs come and go, memory is short, the kernel panics, the
//! destination vanishes, an operator presses Ctrl-C or kills the writer. The machine runs on, or
//! the previous image is whole. No image looks whole that is not.
//!
//! `MERCURY_KILLS=20` sends twenty signals of each kind in place of a few. `MERCURY_KILL_SEED`
//! repeats a run's moments.

#![allow(clippy::unwrap_used)]

use std::{
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{Background, Bus, Kernel, Machine, Moments, Output, Qemu, Result, Spec, Variant};
use serde_json::json;

const DISK: &str = "/dev/vda";
const OTHER: &str = "/dev/vdb";
const MINUTES: Duration = Duration::from_secs(120);

/// A program that takes memory until there is none.
const HOG: &str = "
import time
open('/proc/self/oom_score_adj', 'w').write('1000')
held = []
while True:
    held.append(b'x' * (4 << 20))
    time.sleep(0.05)
";

/// A script in place of ssh: another end that runs the same commands on this machine.
const SSH: &str = r#"#!/bin/sh
while [ "$1" != -- ]; do shift; done
test "$2" = spare || exit 255
sh -c "$3"
"#;

fn spec() -> Spec {
    // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
    // during a snapshot.
    let spec = Spec::new(Kernel::BookwormCloud).modules(Variant::Faults).qemu_version(Qemu::Newer);
    spec.disk(Bus::Virtio, 1024).disk(Bus::Virtio, 1024)
}

fn boot(spec: Spec) -> Result<Machine> {
    let machine = Machine::boot(spec)?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    Ok(machine)
}

/// Begins an image to standard output, whose reader waits after the first bytes until the test
/// releases it.
fn begin(machine: &Machine, options: &str) -> Result<Background> {
    begin_with(machine, options, "sleep 0.1")
}

/// Begins an image whose reader repeats something else until the test releases it.
fn begin_with(machine: &Machine, options: &str, meanwhile: &str) -> Result<Background> {
    machine.sh("rm -f /run/streams; touch /run/hold")?;
    let reader = format!(
        "head -c 65536 > /run/x; touch /run/streams; while test -e /run/hold; do {meanwhile}; done; \
         cat >> /run/x"
    );
    let line = format!("bash -o pipefail -c 'mercury checkpoint {options} - | {{ {reader}; }}'");
    let stream = machine.spawn(&line)?;
    machine.sh("until test -e /run/streams; do sleep 0.1; done")?;
    Ok(stream)
}

/// Releases the reader. Returns the command's message.
fn fails(machine: &Machine, stream: Background, reason: &str) -> Result<String> {
    machine.sh("rm /run/hold")?;
    let output = stream.wait(MINUTES)?;
    assert!(!output.success() && output.stderr.contains(reason), "{}{}", output.stdout, output.stderr);
    let said = machine.run("mercury inspect /run/x")?;
    assert!(!said.success() && said.stderr.contains("the image is refused"), "{}", said.stderr);
    runs_on(machine)?;
    Ok(output.stderr)
}

/// Checks that the machine is as before: native, with no task frozen and nothing held.
fn runs_on(machine: &Machine) -> Result<()> {
    assert!(!machine.sh("mercury status --json")?.contains("\"attached\""));
    machine.sh("echo x > /root/x && sync && ! ls /sys/fs/cgroup | grep mercury")?;
    machine.sh("! dmesg | grep -E 'Oops|BUG:'").map(drop)
}

fn is_whole(machine: &Machine, image: &str) -> Result<()> {
    let said = machine.sh(&format!("mercury inspect {image}"))?;
    assert!(said.contains("whole: "), "{said}");
    Ok(())
}

fn is_refused(machine: &Machine, line: &str, reasons: &[&str]) -> Result<()> {
    let output = machine.run(line)?;
    assert!(!output.success(), "{line}: {}", output.stdout);
    let missing: Vec<_> = reasons.iter().filter(|reason| !output.stderr.contains(*reason)).collect();
    assert!(missing.is_empty(), "{line}: {missing:?} is not in {}", output.stderr);
    Ok(())
}

fn online(machine: &Machine, cpu: u32, online: u32) -> Result<()> {
    machine.sh(&format!("echo {online} > /sys/devices/system/cpu/cpu{cpu}/online")).map(drop)
}

/// Refuses CPUs that come or go during a snapshot. A CPU that leaves writes unseen, and one that
/// comes was not there at the instant.
#[test]
#[ignore = "long"]
fn cpus_come_and_go() -> Result<()> {
    let machine = boot(spec().cpus(3))?;
    let stream = begin(&machine, "")?;
    online(&machine, 1, 0)?;
    fails(&machine, stream, "snapshot-lost")?;
    is_refused(&machine, &format!("mercury checkpoint {DISK}"), &["CPUs 1 are present and offline"])?;
    let stream = begin(&machine, "--force-offline")?;
    online(&machine, 1, 1)?;
    fails(&machine, stream, "snapshot-hotplug")?;
    // Between the preparation and the instant.
    for (cpu, to) in [(2, 0), (2, 1)] {
        let hook = format!("echo {to} > /sys/devices/system/cpu/cpu{cpu}/online");
        is_refused(
            &machine,
            &format!("mercury checkpoint --force-offline --hook '{hook}' /run/x"),
            &["snapshot-hotplug"],
        )?;
        runs_on(&machine)?;
    }
    assert_eq!(machine.sh("nproc; ls /run/x.part 2> /dev/null || true")?, "3");
    machine.sh(&format!("mercury checkpoint {DISK}"))?;
    is_whole(&machine, DISK)?;
    machine.check_next_attach()
}

/// Keeps memory in place during a snapshot. Memory that left would belong to no one, and memory
/// that came back would have other contents.
#[test]
#[ignore = "long"]
fn memory_stays_online_during_a_snapshot() -> Result<()> {
    const LEAVES: &str = "for state in /sys/devices/system/memory/memory*/state; do \
         if echo offline > $state 2> /dev/null; then echo online_movable > $state && echo $state; fi; done";
    let machine = boot(spec().kernel_arg("movablecore=384M"))?;
    let natively = machine.sh(LEAVES)?;
    assert_ne!(natively, "", "no memory can leave this machine");
    let stream = begin(&machine, "")?;
    assert_eq!(machine.sh(LEAVES)?, "");
    machine.sh("rm /run/hold")?;
    stream.wait(MINUTES)?.check()?;
    is_whole(&machine, "/run/x")?;
    runs_on(&machine)?;
    assert_ne!(machine.sh(LEAVES)?, "", "memory is still held");
    machine.check_next_attach()
}

fn is_right_or_refused(machine: &Machine, output: &Output, image: &str) -> Result<()> {
    println!("{}{}", output.stdout, output.stderr);
    if output.success() {
        return is_whole(machine, image);
    }
    assert!(output.stderr.contains("snapshot-pool"), "{}", output.stderr);
    is_refused(machine, &format!("mercury inspect {image}"), &["the image is refused"])
}

/// Makes a right image or none when a program takes all memory during the writing.
#[test]
#[ignore = "long"]
fn a_checkpoint_survives_a_lack_of_memory() -> Result<()> {
    let machine = boot(spec())?;
    let counter = |name: &str| -> Result<u64> {
        Ok(machine.sh(&format!("grep '^{name} ' /proc/vmstat | cut -d ' ' -f 2"))?.parse().unwrap())
    };
    machine.put("/run/hog.py", HOG.as_bytes(), 0o644)?;
    machine.sh("cat /usr/bin/* /usr/lib/x86_64-linux-gnu/*.so* > /dev/null 2>&1 || true")?;
    let (reclaimed, killed) = (counter("pgsteal_kswapd")?, counter("oom_kill")?);
    let stream = begin(&machine, "")?;
    let hog = machine.spawn("python3 /run/hog.py")?;
    machine
        .sh("for i in $(seq 1200); do dmesg | grep -q 'Killed process.*python3' && exit 0; sleep 0.1; \
        done; exit 1")?;
    assert!(!hog.wait(MINUTES)?.success());
    println!("{} pages reclaimed", counter("pgsteal_kswapd")? - reclaimed);
    assert!(counter("pgsteal_kswapd")? > reclaimed && counter("oom_kill")? > killed);
    // No program took memory that was to be copied. Free memory needs no copy, reclaimed memory
    // does.
    machine.sh("rm /run/hold")?;
    is_right_or_refused(&machine, &stream.wait(MINUTES)?, "/run/x")?;

    // The program writes at full speed.
    let stream = machine.spawn(&format!("mercury checkpoint --json {DISK}"))?;
    let hog = machine.spawn("python3 /run/hog.py")?;
    assert!(!hog.wait(MINUTES)?.success());
    is_right_or_refused(&machine, &stream.wait(MINUTES)?, DISK)?;
    runs_on(&machine)?;
    machine.check_next_attach()
}

/// A program that fills memory except for its argument, in MiB, with incompressible data. On
/// request it writes to every page again: slowly at first, so that streaming goes on, and then at
/// full speed.
///
/// When the test releases it, the program checks its data. Before that it gives back as much memory
/// as its other argument says. The pool cannot grow by that memory, whose old contents are still to
/// be kept.
const OVERWRITES: &str = r#"
import mmap, os, sys, time
with open("/proc/meminfo") as table:
    available = next(int(line.split()[1]) for line in table if line.startswith("MemAvailable"))
block = os.urandom(16 << 20)
size = (available // 1024 - int(sys.argv[1])) >> 4 << 24
ballast = int(sys.argv[2]) << 20
size -= ballast

def filled(size):
    room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, len(block)):
        room[at:at + len(block)] = block
    for at in range(0, size, 4096):
        room[at:at + 8] = at.to_bytes(8, "little")
    return room

room, ballast = filled(size), filled(ballast)
open("/run/filled", "w").write(str(size))
while not os.path.exists("/run/write"):
    time.sleep(0.05)
ballast.close()
for at in range(0, size, 4096):
    room[at:at + 8] = (at + 1).to_bytes(8, "little")
    if at < 64 << 20 and not at % (256 << 10):
        time.sleep(0.1)
open("/run/written", "w").write("all")
while not os.path.exists("/run/let-go"):
    time.sleep(0.05)
for at in range(0, size, 4096):
    assert room[at:at + 8] == (at + 1).to_bytes(8, "little"), at
print(size >> 20, "MiB were written over")
"#;

/// Returns the number before some words.
fn number_before(text: &str, words: &str) -> u64 {
    let before = text
        .split(words)
        .next()
        .filter(|before| before.len() < text.len())
        .unwrap_or_else(|| panic!("{text}"));
    let digits = before.split_whitespace().next_back().unwrap().replace(',', "");
    digits.parse().unwrap_or_else(|_| panic!("{text}"))
}

/// Size of the pool, in MiB.
const POOL: u64 = 48;

/// Writes more than the pool could ever hold, with a slow reader of the image. The writer gives so
/// many MiB back to the system after the instant. `then` may act when everything is written
/// and nothing released yet. Returns the MiB written and the command's message.
fn exhaust_the_pool(
    machine: &Machine,
    given_back: u64,
    then: impl FnOnce(&Machine) -> Result<()>,
) -> Result<(u64, String)> {
    machine.put("/run/overwrites.py", OVERWRITES.as_bytes(), 0o644)?;
    machine.sh(
        "rm -f /run/filled /run/write /run/written /run/let-go; sync; echo 3 > /proc/sys/vm/drop_caches",
    )?;
    // The command itself needs this much besides the pool.
    let writer = machine.spawn(&format!("python3 /run/overwrites.py {} {given_back}", POOL + 96))?;
    machine.sh("for i in $(seq 1200); do test -s /run/filled && exit 0; sleep 0.1; done; exit 1")?;
    let size_mib = machine.sh("cat /run/filled")?.parse::<u64>().unwrap() >> 20;
    let stream = begin_with(machine, &format!("--pool {POOL}"), "head -c 1048576 > /dev/null; sleep 0.05")?;
    machine.sh("touch /run/write")?;
    machine.sh("for i in $(seq 1200); do test -s /run/written && exit 0; sleep 0.1; done; exit 1")?;
    then(machine)?;
    machine.sh("touch /run/let-go")?;
    println!("{}", writer.wait(MINUTES)?.check()?.stdout);
    let said = fails(machine, stream, "snapshot-pool")?;
    println!("{said}");
    Ok((size_mib, said))
}

/// Gives a snapshot up only after streaming was sped up and the writer had to wait. No image
/// results, and every program runs on.
#[test]
#[ignore = "long"]
fn the_pool_is_exhausted() -> Result<()> {
    let machine = boot(spec())?;
    let (size_mib, said) = exhaust_the_pool(&machine, 192, |_| Ok(()))?;
    let (hurried, waited) =
        (number_before(&said, " times to hurry"), number_before(&said, " times, and the pool got"));
    assert!(hurried > 0 && waited > 0, "{said}");
    // The pool grew by the little memory that was free at the instant.
    let grown_mib = number_before(&said, " pages more") / 256;
    assert!(POOL + grown_mib < size_mib / 2, "{grown_mib} MiB more, of {size_mib} written: {said}");
    machine.sh(&format!("mercury checkpoint {DISK}"))?;
    is_whole(&machine, DISK)?;
    machine.check_next_attach()
}

/// Gives memory back before a task is killed. The pool grows by all spare memory and is full of
/// copies. A program then wants memory that would be free without the pool, so the snapshot is
/// given up.
#[test]
#[ignore = "long"]
fn the_pool_shrinks_before_a_task_is_killed() -> Result<()> {
    let machine = boot(spec())?;
    let needs = "python3 -c 'room = bytearray(80 << 20); room[::4096] = b\"x\" * len(room[::4096])'";
    exhaust_the_pool(&machine, 16, |machine| {
        println!("{}", machine.sh("free -m")?);
        machine.sh(needs).map(drop)
    })?;
    assert_eq!(machine.sh("grep '^oom_kill ' /proc/vmstat")?, "oom_kill 0");
    the_pool_shrinks_before_the_instant(&machine)?;
    assert_eq!(machine.sh("grep '^oom_kill ' /proc/vmstat")?, "oom_kill 0");
    machine.check_next_attach()
}

/// Checks the time before the instant. The command refuses a pool that leaves programs too little,
/// and the driver accepts no such pool. A pool gives memory back to programs that need it.
fn the_pool_shrinks_before_the_instant(machine: &Machine) -> Result<()> {
    let available = || -> Result<u64> {
        Ok(machine.sh("awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo")?.parse().unwrap())
    };
    let refused = |line: &str, reason: &str| -> Result<()> {
        let output = machine.run(line)?;
        assert!(!output.success() && output.stderr.contains(reason), "{line}: {}", output.stderr);
        runs_on(machine)
    };
    let all = available()?;
    refused(&format!("mercury checkpoint --pool {all}M {DISK}"), "leaves programs too little memory")?;
    machine.mercury("attach")?;
    machine.sh(&format!("mercury-workload snapshot --pool-pages {} --rounds 1", all << 8))?;
    machine.mercury("detach")?;
    let pool = available()? / 2;
    let needs = available()? - pool + 64;
    let hook =
        format!("python3 -c \"room = bytearray({needs} << 20); room[::4096] = b'x' * len(room[::4096])\"");
    machine.put("/run/hook", hook.as_bytes(), 0o755)?;
    refused(&format!("mercury checkpoint --pool {pool}M --hook 'sh /run/hook' {DISK}"), "snapshot-pool")
}

/// Delays writes to a disk.
fn slow(machine: &Machine, disk: &str) -> Result<()> {
    let mut arguments = json!({"device": disk, "bps": 0, "bps_rd": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    arguments["bps_wr"] = json!(4 << 20);
    machine.qmp()?.execute("block_set_io_throttle", arguments).map(drop)
}

/// Panics as natively, with the previous image whole.
#[test]
#[ignore = "long"]
fn the_kernel_panics() -> Result<()> {
    let machine = boot(spec())?;
    machine.sh(&format!("mercury checkpoint {DISK}"))?;
    slow(&machine, "disk1")?;
    let _stream = machine.spawn(&format!("mercury checkpoint {OTHER}"))?;
    machine.sh(&format!("until test \"$(head -c 8 {OTHER} | tr -d '\\0')\"; do sleep 0.2; done"))?;
    let _panic = machine.spawn("echo c > /proc/sysrq-trigger")?;
    machine.wait_shutdown(MINUTES)?;
    assert!(machine.serial_log().contains("Kernel panic - not syncing: sysrq triggered crash"));
    machine.forgive();
    let machine = machine.start_again()?;
    is_whole(&machine, DISK)?;
    is_refused(&machine, &format!("mercury inspect {OTHER}"), &["the image is refused"])?;
    machine.sh("! dmesg | grep -iE 'ext4.*error'")?;
    // The console still shows the panic.
    machine.mercury("attach")?;
    machine.mercury("detach").map(drop)
}

/// Makes no image when the destination's disk is pulled. The machine runs on.
#[test]
fn the_destination_vanishes() -> Result<()> {
    let machine = boot(spec().qemu_arg("-device").qemu_arg("pcie-root-port,id=riser"))?;
    let plug = [
        ("blockdev-add", json!({"driver": "null-co", "node-name": "gone", "size": 1 << 30})),
        ("device_add", json!({"driver": "virtio-blk-pci", "id": "gone", "drive": "gone", "bus": "riser"})),
    ];
    for (command, arguments) in plug {
        machine.qmp()?.execute(command, arguments)?;
    }
    machine.sh("until test -b /dev/vdc; do sleep 0.1; done")?;
    let stream = machine.spawn("mercury checkpoint /dev/vdc")?;
    machine.sh("until mercury status --json | grep -q '\"attached\"'; do sleep 0.1; done; sleep 2")?;
    machine.qmp()?.execute("device_del", json!({"id": "gone"}))?;
    let output = stream.wait(MINUTES)?;
    println!("{}{}", output.stdout, output.stderr);
    assert!(!output.success() && output.stderr.contains("the image could not be"), "{}", output.stderr);
    runs_on(&machine)?;
    machine.check_next_attach()
}

fn stand_in(machine: &Machine) -> Result<()> {
    machine.sh("mkdir -p /run/bin /run/spare")?;
    machine.put("/run/bin/ssh", SSH.as_bytes(), 0o755)
}

/// Sends an image to another host, without ssh itself; the commands on both sides of it are the
/// real ones.
#[test]
#[ignore = "long"]
fn an_image_goes_to_another_host() -> Result<()> {
    let machine = boot(spec())?;
    stand_in(&machine)?;
    let checkpoint = "PATH=/run/bin:$PATH mercury checkpoint ssh://spare/run/spare/it\\'s";
    machine.sh(checkpoint)?;
    assert_eq!(machine.sh("ls /run/spare; stat -c %a /run/spare/*")?, "it's\n600");
    is_whole(&machine, "\"/run/spare/it's\"")?;
    machine.sh("mv /run/spare/it\\'s /run/before")?;

    for victim in ["pkill -KILL -x cat", "pkill -KILL -f '/run/bin/ssh.*umask'"] {
        let stream = machine.spawn(checkpoint)?;
        machine.sh("until test -s /run/spare/*.part; do sleep 0.05; done")?;
        machine.sh(victim)?;
        let output = stream.wait(MINUTES)?;
        println!("{}{}", output.stdout, output.stderr);
        assert!(!output.success(), "{}", output.stderr);
        assert_eq!(machine.sh("sleep 1; ls /run/spare")?, "", "{victim}");
        runs_on(&machine)?;
    }
    is_refused(
        &machine,
        "PATH=/run/bin:$PATH mercury checkpoint ssh://nobody/x",
        &["ssh ended with exit status: 255"],
    )?;
    runs_on(&machine)?;
    is_whole(&machine, "/run/before")?;
    machine.check_next_attach()
}

/// The default number of signals of each kind.
const FEW: u32 = 3;
/// Images, and the one that is merged from two.
const IMAGE: &str = "/run/image";
const MERGED: &str = "/run/merged";
const COMMAND: &str = "^mercury (checkpoint|merge)";
const UNDO: &str = "exe [u]ndo";

fn moments() -> Moments {
    Moments::new("MERCURY_KILL_SEED", "MERCURY_KILLS", FEW)
}

/// Waits until the undo process has ended.
fn undo_ends(machine: &Machine) -> Result<()> {
    let line =
        format!("for i in $(seq 300); do pgrep -f '{UNDO}' > /dev/null || exit 0; sleep 0.1; done; exit 1");
    machine.sh(&line).map(drop)
}

fn sum(machine: &Machine, image: &str) -> Result<String> {
    machine.sh(&format!("sha256sum < {image}"))
}

/// Returns the time of a command that is not disturbed.
fn time_of(machine: &Machine, line: &str) -> Result<Duration> {
    let begun = Instant::now();
    machine.sh(line)?;
    println!("{line}: {:.1?}", begun.elapsed());
    Ok(begun.elapsed())
}

/// Sends a signal during a command that writes to a file. The file is then the previous one or the
/// intended one, and whole.
fn disturb(
    machine: &Machine,
    line: &str,
    file: &str,
    signal: &str,
    whom: &str,
    moment: Duration,
) -> Result<()> {
    let before = sum(machine, file)?;
    let command = machine.spawn(line)?;
    thread::sleep(moment);
    let hit = machine.run(&format!("pkill -{signal} -f '{whom}'"))?.success();
    let output = command.wait(MINUTES)?;
    undo_ends(machine)?;
    println!(
        "{signal} to {whom} after {moment:.2?}, hit {hit}: {:?} {}",
        output.exit,
        output.stderr.trim_end()
    );
    assert!(hit || output.success(), "{}", output.stderr);
    // A killed merge is tidied up by the next one.
    if line.starts_with("mercury checkpoint") || signal == "INT" {
        assert_eq!(machine.sh(&format!("ls {file}*"))?, file);
    }
    is_whole(machine, file)?;
    // A command that was signalled may have been at its very end.
    if signal == "INT" && !output.success() {
        assert_eq!(sum(machine, file)?, before, "the image before");
    }
    runs_on(machine)
}

/// Keeps the previous image at Ctrl-C, and at kills of the command and of its undo process.
#[test]
#[ignore = "long"]
fn a_signal_keeps_the_previous_image() -> Result<()> {
    let mut moments = moments();
    let machine = boot(spec())?;
    let line = format!("mercury checkpoint {IMAGE}");
    let stretch = time_of(&machine, &line)?;
    for (signal, whom) in [("INT", COMMAND), ("KILL", COMMAND), ("KILL", UNDO)] {
        for moment in moments.over(stretch) {
            disturb(&machine, &line, IMAGE, signal, whom, moment)?;
        }
    }
    machine.check_next_attach()
}

/// Keeps the images that are merged at such signals. The next merge works.
#[test]
#[ignore = "long"]
fn a_signal_keeps_the_merged_images() -> Result<()> {
    let mut moments = moments();
    let machine = boot(spec())?;
    machine.sh(&format!("mercury checkpoint {DISK} && mercury checkpoint --incremental={DISK} {OTHER}"))?;
    let line = format!("mercury merge {MERGED} {DISK} {OTHER}");
    let stretch = time_of(&machine, &line)?;
    let sums = |machine: &Machine| Ok::<_, mercury_lab::Error>([sum(machine, DISK)?, sum(machine, OTHER)?]);
    let before = sums(&machine)?;
    for signal in ["INT", "KILL"] {
        for moment in moments.over(stretch) {
            disturb(&machine, &line, MERGED, signal, COMMAND, moment)?;
        }
    }
    assert_eq!(sums(&machine)?, before);
    machine.sh(&line)?;
    assert_eq!(machine.sh(&format!("ls {MERGED}*"))?, MERGED);
    is_whole(&machine, MERGED)
}

/// A program that kills a process at a moment of the machine's monotonic clock.
const KILL_AT: &str = "
import os, sys, time
time.sleep(max(0, float(sys.argv[1]) - time.monotonic()))
os.kill(int(sys.argv[2]), 9)
";

/// Runs all tasks on, with the image whole or refused, when the command is killed at any moment
/// before the machine is off. For most of that time every other task is frozen. A kill that comes
/// too late finds a machine that is off, and its image whole.
#[test]
#[ignore = "long"]
fn a_kill_before_the_machine_is_off_lets_it_run_on() -> Result<()> {
    let mut moments = moments();
    let mut machine = boot(spec())?;
    let stretch = time_of(&machine, &format!("mercury checkpoint {DISK}"))?;
    for moment in moments.over(stretch) {
        machine.put("/run/kill.py", KILL_AT.as_bytes(), 0o644)?;
        let end = format!("$(awk '{{ print $1 + {:.3} }}' /proc/uptime)", moment.as_secs_f64());
        // One killer starts before applications are frozen; another is not frozen then.
        let hook = "setsid python3 /run/kill.py $END $PPID > /dev/null 2>&1 < /dev/null &";
        let line = format!(
            "export END={end}; mercury checkpoint --poweroff --hook '{hook}' {DISK} & \
             setsid python3 /run/kill.py $END $! > /dev/null 2>&1 < /dev/null & wait %1"
        );
        let ended = machine.spawn(&line)?.wait(MINUTES);
        println!(
            "killed after {moment:.2?}: {:?}",
            ended.as_ref().map(|output| (&output.exit, &output.stderr)).ok()
        );
        if let Ok(output) = ended {
            assert!(!output.success(), "{}", output.stderr);
            undo_ends(&machine)?;
            runs_on(&machine)?;
        } else {
            machine.wait_shutdown(MINUTES)?;
            machine.forgive();
            machine = machine.start_again()?;
            machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
        }
        // The commit record may exist while the machine is not off yet.
        let said = machine.run(&format!("mercury inspect {DISK}"))?;
        assert!(said.success() || said.stderr.contains("the image is refused"), "{}", said.stderr);
    }
    machine.check_next_attach()
}
