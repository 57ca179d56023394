//! Machines that move while they work: three of them on one network, of which one is the switch, the server of the root
//! file system, and who talks to the one that moves.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{
    fs::{self, File},
    io::Write,
    net::TcpStream,
    os::unix::fs::FileExt,
    path::PathBuf,
    process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use mercury_lab::{
    Kernel, Machine, MachineCheck, Result, Spec,
    moving::{
        GOES_ON, LIMIT, PEER, Switch, arrives, free_port, migrate, plug_in, receive, said, times, wait_more,
    },
    restart::{
        boot_id, comes_further, count, is_well, nothing_wrong,
        script::{ATTACH_BLOCKS, BLOCKS, CLOCK, HEAR, TALK},
        start,
    },
};
use serde_json::json;
use workloads::restart::need_qemu;

/// One machine with all its files on another, and a spare.
struct Scene {
    switch: Switch,
    machine: Machine,
    spare: Machine,
}

impl Scene {
    /// The machines' kernel; both have the same processors and devices.
    fn new(kernel: Kernel, cpus: u32, memory_mib: u32) -> Result<Self> {
        Self::with(kernel, cpus, [memory_mib; 2])
    }

    fn with(kernel: Kernel, cpus: u32, memory_mib: [u32; 2]) -> Result<Self> {
        Self::with_more(kernel, cpus, memory_mib, |spec| spec)
    }

    /// Both have something more.
    fn with_more(
        kernel: Kernel,
        cpus: u32,
        memory_mib: [u32; 2],
        more: impl Fn(Spec) -> Spec,
    ) -> Result<Self> {
        let switch = Switch::boot()?;
        let machine = switch.boot_moving(more(switch.plugged(kernel, cpus, memory_mib[0], 2)))?;
        let spare = switch.boot_other(more(switch.plugged(kernel, cpus, memory_mib[1], 3)))?;
        plug_in(&spare, "10.9.0.3")?;
        start(&machine, "clock", CLOCK, "")?;
        start(&machine, "talk", TALK, PEER)?;
        start(&machine, "hear", HEAR, "")?;
        switch.tell()?;
        machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
        Ok(Self { switch, machine, spare })
    }
}

/// What the spare says on its console.
const COMES: &str = "mercury: a machine comes";
const THROWN: &str = "was thrown away";

/// The machine moves to the spare, which is it then.
fn moves(peer: &Machine, machine: &Machine, spare: &Machine, address: &str, options: &str) -> Result<()> {
    let boots = spare.boots();
    let key = receive(spare, address)?;
    moves_by(peer, machine, spare, (&key, boots), options)
}

/// To one that waits already, and had booted so often before.
fn moves_by(
    peer: &Machine,
    machine: &Machine,
    spare: &Machine,
    (key, boots): (&str, u32),
    options: &str,
) -> Result<()> {
    let id = boot_id(machine)?;
    let before = times(spare, GOES_ON);
    let mut moving = machine.spawn(&migrate(key, options))?;
    if !arrives(machine, spare, before, &mut moving)? {
        println!("{}{}", moving.output_so_far()?, moving.errors_so_far()?);
    }
    let ended = machine.wait_shutdown(Duration::from_secs(30));
    println!("{}", said(machine));
    if ended.is_err() {
        println!("{:?} {:?} {}", moving.output_so_far(), moving.errors_so_far(), spare.serial_log());
    }
    ended?;
    spare.wait_other(boots)?;
    is_well(spare, &id)?;
    goes_on(peer, spare)
}

/// Native, at work, and everybody it talks to content.
fn goes_on(peer: &Machine, machine: &Machine) -> Result<()> {
    let status = machine.sh("mercury status --json")?;
    assert!(!status.contains("\"attached\""), "{status}");
    for work in ["talk", "hear"] {
        comes_further(machine, work, count(machine, work)? + 5)?;
    }
    nothing_wrong(peer)
}

/// Stop and copy: no byte is sent before everything stands still.
#[test]
fn a_machine_that_stands_still_moves() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    moves(peer, machine, spare, "10.9.0.3", "--rounds 0")?;
    spare.check_next_attach()
}

/// While it works, to another machine, and back to the one that was switched off meanwhile.
#[test]
#[ignore = "long"]
fn a_machine_at_work_moves_and_comes_back() -> Result<()> {
    need_qemu()?;
    let Scene { switch, machine, spare } = Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let peer = &switch.peer;
    // An emulator never keeps to the limit, and nobody writes so much that it would be for that.
    moves(peer, &machine, &spare, "10.9.0.3", "--verify-log --max-throttle 0 --streams 3")?;
    spare.wait_serial("is connected: stream 2 of 3", LIMIT)?;
    let said_there = said(&machine);
    assert!(said_there.contains("found by a log of writes"), "{said_there}");
    assert!(said_there.contains("not in the log of writes, of which 0 should have been"), "{said_there}");
    // What boots there is a spare now: the machine's root is in use.
    let repaired = machine.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 2))?;
    plug_in(&repaired, "10.9.0.4")?;
    moves(peer, &spare, &repaired, "10.9.0.4", "--max-throttle 0")?;
    assert!(said(&spare).contains("found by a log of writes"), "{}", said(&spare));
    repaired.check_next_attach()
}

/// A disk that several machines have, until this is dropped.
struct SharedDisk(PathBuf);

impl SharedDisk {
    fn new(mib: u64) -> Self {
        let path = std::env::temp_dir().join(format!("mercury-shared-disk-{}", process::id()));
        File::create(&path).unwrap().set_len(mib << 20).unwrap();
        Self(path)
    }

    fn plugged(&self, spec: Spec) -> Spec {
        let drive = format!("if=none,id=shared,format=raw,file.locking=off,file={}", self.0.display());
        ["-drive", &drive, "-device", "virtio-blk-pci,drive=shared,share-rw=on"]
            .into_iter()
            .fold(spec, Spec::qemu_arg)
    }
}

impl Drop for SharedDisk {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Has each number on the disk before the next.
const LEDGER: &str = "
import os, sys, time
count = 0
with open(sys.argv[1], 'ab') as ledger:
    while True:
        ledger.write(b'%d\\n' % count)
        ledger.flush()
        os.fsync(ledger.fileno())
        count += 1
        say(count)
        time.sleep(0.02)
";

/// No number is missing, and none is there twice.
fn is_right(machine: &Machine, ledger: &str) -> Result<()> {
    let counted = machine.sh(&format!(
        "pkill -f '[p]ython3.* {ledger}'; sleep 1; lines=$(wc -l < {ledger}); test $lines -gt 5 && \
         seq 0 $((lines - 1)) | cmp - {ledger} && echo $lines numbers in {ledger}"
    ))?;
    print!("{counted}");
    Ok(())
}

/// A file system on a disk that both machines have goes along. If somebody else writes to it behind the instant, the machine
/// does not.
#[test]
#[ignore = "long"]
fn a_disk_that_both_reach_goes_along() -> Result<()> {
    need_qemu()?;
    let disk = SharedDisk::new(64);
    let Scene { switch: Switch { peer, .. }, machine, spare } =
        &Scene::with_more(Kernel::BookwormCloud, 2, [768; 2], |spec| disk.plugged(spec))?;
    machine.sh(
        "modprobe virtio_blk; mkfs.ext4 -q /dev/vda && mkdir -p /run/shared && mount /dev/vda /run/shared",
    )?;
    start(machine, "ledger", LEDGER, "/run/shared/ledger")?;
    let boots = spare.boots();
    let words = receive(spare, "10.9.0.3")?;
    let (stop, file) = (AtomicBool::new(false), File::options().write(true).open(&disk.0).unwrap());
    thread::scope(|scope| {
        // The first bytes are nobody's: a boot loader could be there.
        scope.spawn(|| {
            for count in 0_u64.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                file.write_all_at(&count.to_le_bytes(), 0).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
        });
        let refused = fails(
            peer,
            machine,
            &migrate(&words, "--rounds 1"),
            &["the disks here are not as they were", "was written to after the instant"],
        );
        stop.store(true, Ordering::Relaxed);
        refused
    })?;
    comes_further(machine, "ledger", count(machine, "ledger")?)?;
    moves_by(peer, machine, spare, (&words, boots), "--rounds 2")?;
    comes_further(spare, "ledger", count(spare, "ledger")? + 5)?;
    is_right(spare, "/run/shared/ledger")?;
    println!("{}", spare.sh("umount /run/shared && e2fsck -f -n /dev/vda 2>&1")?);
    spare.check_next_attach()
}

/// A disk of the switch's by NVMe over TCP.
const NVME_TARGET: &str = "modprobe -a nvmet nvmet-tcp; mountpoint -q /sys/kernel/config || \
     mount -t configfs none /sys/kernel/config; cd /sys/kernel/config/nvmet; truncate -s 64M /run/nvme; \
     mkdir subsystems/shared subsystems/shared/namespaces/1 ports/1; echo 1 > subsystems/shared/attr_allow_any_host; \
     cd subsystems/shared/namespaces/1; echo -n /run/nvme > device_path; echo 1 > enable; cd ../../../../ports/1; \
     echo ipv4 > addr_adrfam; echo tcp > addr_trtype; echo 10.9.0.1 > addr_traddr; echo 4420 > addr_trsvcid; \
     ln -s ../../subsystems/shared subsystems/shared";
const NVME_CONNECT: &str = "modprobe nvme-tcp; echo transport=tcp,traddr=10.9.0.1,trsvcid=4420,nqn=shared > \
     /dev/nvme-fabrics; for i in $(seq 100); do disk=$(ls -d /sys/block/nvme[1-9]*n1 2> /dev/null) && break; sleep 0.1; done; \
     echo -n /dev/$(basename $disk)";

/// File systems on disks that the machine has by connections of its kernel's go along with these.
#[test]
#[ignore = "long"]
fn disks_on_a_network_go_along() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    start(peer, "blocks", BLOCKS, "")?;
    peer.sh(NVME_TARGET)?;
    machine.sh("modprobe nbd nbds_max=2")?;
    start(machine, "attach_blocks", ATTACH_BLOCKS, PEER)?;
    machine.sh("while pgrep -f '[a]ttach_blocks'; do sleep 0.1; done")?;
    let nvme = machine.sh(NVME_CONNECT)?;
    for (name, disk) in [("blocks_ledger", "/dev/nbd0"), ("nvme_ledger", &nvme)] {
        machine.sh(&format!(
            "mkfs.ext4 -q {disk} && mkdir -p /run/{name}.d && mount {disk} /run/{name}.d && dmesg | tail -3"
        ))?;
        start(machine, name, LEDGER, &format!("/run/{name}.d/ledger"))?;
    }
    moves(peer, machine, spare, "10.9.0.3", "--rounds 2")?;
    for (name, disk) in [("blocks_ledger", "/dev/nbd0"), ("nvme_ledger", &nvme)] {
        println!("{name}: {}", count(spare, name)?);
        if let Err(error) = comes_further(spare, name, count(spare, name)? + 5) {
            println!("{}", spare.sh("dmesg | tail -40")?);
            return Err(error);
        }
        is_right(spare, &format!("/run/{name}.d/ledger"))?;
        println!("{}", spare.sh(&format!("umount /run/{name}.d && e2fsck -f -n {disk} 2>&1"))?);
    }
    spare.check_next_attach()
}

/// Writes to a thousand pages a second what cannot be compressed, as evenly as it may: 4 MB, more than the limit.
const OUTRUNS: &str = "
import os, time
PAGES = 8000
memory, count = bytearray(PAGES * 4096), 0
while True:
    for _ in range(20):
        at = count % PAGES * 4096
        memory[at:at + 4096] = os.urandom(4096)
        count += 1
    say(count)
    time.sleep(0.02)
";

/// More is written than goes over, and more is left than ever fits: applications are held back, and less is left.
#[test]
#[ignore = "long"]
fn a_load_that_outruns_the_connection_is_held_back() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    start(machine, "outruns", OUTRUNS, "")?;
    let boots = spare.boots();
    let key = receive(spare, "10.9.0.3")?;
    let limits = "--max-downtime 600ms --bandwidth 3";
    let line = migrate(&key, &format!("{limits} --or-give-up --max-throttle 0"));
    fails(peer, machine, &line, &["the downtime would be about"])?;
    moves_by(peer, machine, spare, (&key, boots), &format!("{limits} > /run/said"))?;
    let said = spare.sh("cat /run/said")?;
    println!("{said}");
    let (free, held_back) = said.split_once("applications stand still for 15 % of the time now").unwrap();
    let least = |said: &str| -> u64 {
        let estimates = said.split("downtime now about ").skip(1).map(|rest| rest.split(' ').next().unwrap());
        estimates.map(|ms| ms.parse().unwrap()).min().unwrap()
    };
    assert!(least(held_back) < least(free) * 3 / 4, "{said}");
    comes_further(spare, "outruns", count(spare, "outruns")?)?;
    spare.check_next_attach()
}

/// Each frame that the switch sends may be lost.
const LOSES: &str = "modprobe sch_netem; for port in $(ls /sys/class/net/switch/brif); do \
     tc qdisc replace dev $port root netem loss 10%; done";

/// A tenth of what is sent is lost, also of what the machine and its files' server say to each other.
#[test]
#[ignore = "long"]
fn a_machine_moves_over_a_link_that_loses_a_tenth() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    peer.sh(LOSES)?;
    machine.sh("modprobe tcp_bbr")?;
    moves(peer, machine, spare, "10.9.0.3", "--rounds 2 --congestion-control bbr")?;
    peer.sh("tc -s qdisc | grep -q 'dropped [1-9]'")?;
    spare.check_next_attach()
}

/// At a megabit a second the move is given up, in time: nobody stands still for minutes.
#[test]
#[ignore = "long"]
fn a_slow_link_is_given_up() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let key = receive(spare, "10.9.0.3")?;
    peer.sh(&LOSES.replace("loss 10%", "rate 1mbit"))?;
    let line = migrate(&key, "--rounds 1 --or-give-up");
    let output = machine.command(&line).timeout(LIMIT * 4).run()?;
    println!("{}", output.stderr);
    assert!(!output.success() && output.stderr.contains("the downtime would be about"), "{}", output.stderr);
    goes_on(peer, machine)?;
    machine.check_next_attach()
}

/// One command for both ways, which goes along. What is no way back is said to be none.
#[test]
#[ignore = "long"]
fn maintenance_goes_along_and_comes_back() -> Result<()> {
    const WORDS: &str = "/run/words";
    need_qemu()?;
    let Scene { switch, machine, spare } = Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let peer = &switch.peer;
    let (id, boots) = (boot_id(&machine)?, spare.boots());
    let there = receive(&spare, "10.9.0.3")?;
    let maintenance =
        format!("exec 3<>{WORDS}; exec mercury maintenance {there} --without-mark <&3 >/run/said 2>&1");
    machine.sh(&format!("mkfifo {WORDS}; setsid sh -c '{maintenance}' > /dev/null 2>&1 &"))?;
    machine.wait_shutdown(LIMIT)?;
    spare.wait_other(boots)?;
    is_well(&spare, &id)?;
    goes_on(peer, &spare)?;
    spare.sh(&format!("grep '^2/3' /run/said; echo back, please > {WORDS}"))?;
    spare.sh("sleep 1; grep 'what is wanted is HOST --key LINE' /run/said")?;

    let repaired = machine.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 2))?;
    plug_in(&repaired, "10.9.0.4")?;
    let boots = repaired.boots();
    let back = receive(&repaired, "10.9.0.4")?;
    spare.sh(&format!("echo '{back}' > {WORDS}"))?;
    spare.wait_shutdown(LIMIT)?;
    repaired.wait_other(boots)?;
    is_well(&repaired, &id)?;
    goes_on(peer, &repaired)?;
    let said = repaired.sh("sleep 2; cat /run/said; ! pgrep -f '^mercury maintenance'")?;
    println!("{said}");
    assert!(said.contains("this machine is back"), "{said}");
    repaired.check_next_attach()
}

/// The sensor that comes with the package.
const SENSOR: &str = include_str!("../../packaging/examples/memory-errors");

/// Nobody gives an order but a script that counts the memory's errors, and knows neither where to nor the secret.
#[test]
#[ignore = "long"]
fn a_machine_with_failing_memory_leaves_by_itself() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } =
        &Scene::new(Kernel::BookwormGeneric, 2, 1024)?;
    machine.sh("echo 1 > /sys/devices/system/machinecheck/machinecheck0/check_interval")?;
    machine.put("/root/sensor", SENSOR.as_bytes(), 0o755)?;
    let (id, boots) = (boot_id(machine)?, spare.boots());
    let words = receive(spare, "10.9.0.3")?;
    machine.sh(&format!("mkdir -p /etc/mercury; umask 077; echo '{words}' > /etc/mercury/spare.key"))?;
    machine.sh("setsid mercury daemon --to 10.9.0.3 -- --without-mark > /run/said 2>&1 &")?;
    machine.sh("until mercury evacuate --status | grep 'waits for orders'; do sleep 0.2; done")?;
    machine.sh("/root/sensor 1; mercury evacuate --status | grep 'waits for orders'")?;
    let corrected = 0x9400_0000_0000_0001;
    let check = MachineCheck { cpu: 1, bank: 5, status: corrected, address: 0x1000, ..Default::default() };
    machine.qmp()?.inject_mce(&check)?;
    machine.sh("until dmesg | grep -q 'Machine check events logged'; do sleep 0.2; done")?;
    machine.sh("/root/sensor 1")?;
    machine.wait_shutdown(LIMIT)?;
    spare.wait_other(boots)?;
    is_well(spare, &id)?;
    goes_on(peer, spare)?;
    spare.sh(
        "until mercury evacuate --status | grep 'has moved to 10.9.0.3: 1 corrected'; do sleep 0.2; done",
    )?;
    // The line is used up, and no other one is there.
    assert!(spare.run("mercury evacuate")?.stderr.contains("the line was used for the last move"));
    spare.check_next_attach()
}

/// The move fails, and the machine goes on as if nothing had been tried.
fn fails(peer: &Machine, machine: &Machine, line: &str, reasons: &[&str]) -> Result<()> {
    let output = machine.command(line).timeout(LIMIT).run()?;
    println!("{}", output.stderr);
    for reason in reasons {
        assert!(!output.success() && output.stderr.contains(reason), "{reason}: {}", output.stderr);
    }
    machine.sh("! ls /sys/fs/cgroup | grep mercury; ls /")?;
    goes_on(peer, machine)
}

/// Whoever has not the line gets nowhere; a machine of another size does not take this one, and says why.
#[test]
#[ignore = "long"]
fn who_does_not_fit_is_refused() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } =
        &Scene::with(Kernel::BookwormCloud, 2, [768, 896])?;
    let other = machine.sh(
        "mercury receive --listen 10.9.0.2 --prepare /run/x | grep -o 'mercury-receive.*'; rm -r /run/x",
    )?;
    let words = receive(spare, "10.9.0.3")?;
    let wrong = migrate(&format!("10.9.0.3 --key {other}"), "");
    fails(peer, machine, &wrong, &["no session with the other machine"])?;
    fails(peer, machine, &migrate("10.9.0.3:5 --key x", ""), &["it begins with mercury-receive-1-"])?;
    fails(peer, machine, &migrate(&format!("10.9.0.3:5 --key {other}"), ""), &["no connection with"])?;
    let line = migrate(&words, "");
    fails(peer, machine, &line, &["does not take this one", "the firmware's memory map"])?;
    // It still waits, and still says so.
    fails(peer, machine, &line, &["the firmware's memory map"])?;
    let predicted = machine.sh("mercury migrate --dry-run")?;
    println!("{predicted}");
    assert!(predicted.contains("applications stand still for about"), "{predicted}");
    goes_on(peer, machine)?;
    machine.check_next_attach()
}

/// The console, which nothing is connected to otherwise.
fn console(machine: &Machine) -> Result<TcpStream> {
    let port = free_port()?;
    let address = json!({"type": "inet", "data": {"host": "127.0.0.1", "port": port.to_string()}});
    let socket =
        json!({"addr": address, "server": true, "wait": false, "logfile": "serial.log", "logappend": true});
    let backend = json!({"type": "socket", "data": socket});
    machine.qmp()?.execute("chardev-change", json!({"id": "console", "backend": backend}))?;
    Ok(TcpStream::connect(("127.0.0.1", port)).unwrap())
}

/// Types at the console.
fn type_in(machine: &Machine, text: &str) -> Result<()> {
    console(machine)?.write_all(text.as_bytes()).unwrap();
    thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// Has the kernel kill the process that it would rather do without, by SysRq: everybody who could be told to stands still.
fn kill_somebody(machine: &Machine) -> Result<()> {
    let mut console = console(machine)?;
    machine.qmp()?.execute("chardev-send-break", json!({"id": "console"}))?;
    thread::sleep(Duration::from_millis(300));
    console.write_all(b"f").unwrap();
    thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// The other machine dies when it has been told to start, and nobody can know whether it has: this one stands still, says
/// so, and goes on when an operator has looked.
#[test]
#[ignore = "long"]
fn a_source_in_doubt_waits_for_its_operator() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(spare, "10.9.0.3")?;
    let mut moving = machine.spawn(&migrate(&words, "--rounds 0"))?;
    wait_more(spare, GOES_ON, 0)?;
    spare.power_cut()?;
    wait_more(machine, "does not answer. Nothing runs here", 0)?;
    // It stays so.
    thread::sleep(Duration::from_secs(10));
    assert!(!moving.has_ended()?);
    nothing_wrong(peer)?;
    type_in(machine, "abandon ship\rresume\r")?;
    let output = moving.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(!output.success(), "{}", output.stderr);
    machine.sh("! ls /sys/fs/cgroup | grep mercury")?;
    goes_on(peer, machine)?;
    machine.check_next_attach()
}

/// The same, and the process that waits for an answer is killed: its guard asks on, and tells the operator.
#[test]
#[ignore = "long"]
fn a_guard_asks_on_for_a_source_in_doubt() -> Result<()> {
    const DOUBT: &str = "does not answer. Nothing runs here";
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(spare, "10.9.0.3")?;
    machine.sh("sysctl -q kernel.sysrq=1")?;
    let moving = machine.spawn(&migrate(&words, "--rounds 0"))?;
    machine.sh("until pgrep -f 'exe guard$'; do sleep 0.02; done; echo 1000 > /proc/$(pgrep -f '^mercury migrate')/oom_score_adj")?;
    wait_more(spare, GOES_ON, 0)?;
    spare.power_cut()?;
    wait_more(machine, DOUBT, 0)?;
    kill_somebody(machine)?;
    wait_more(machine, "the process that moved this machine is gone, after the commit", 0)?;
    wait_more(machine, DOUBT, 1)?;
    // It stays so, for longer than a guard is patient with who only does not get on.
    thread::sleep(Duration::from_secs(70));
    assert!(!machine.serial_log().contains("has not moved"));
    nothing_wrong(peer)?;
    type_in(machine, "resumed\rresume\r")?;
    wait_more(machine, "this machine has not moved, and goes on", 0)?;
    println!("{:?}", moving.wait(LIMIT)?);
    machine.sh("until ! ls /sys/fs/cgroup | grep mercury; do sleep 0.1; done")?;
    goes_on(peer, machine)?;
    machine.sh("cat /proc/sys/net/ipv4/conf/all/arp_ignore | grep -x 0")?;
    machine.check_next_attach()
}

/// The spare's operator does not want it after all.
#[test]
#[ignore = "long"]
fn an_arrival_is_discarded_by_the_operator() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(spare, "10.9.0.3")?;
    let moving = machine.spawn(&migrate(&words, "--bandwidth 1"))?;
    wait_more(spare, COMES, 0)?;
    type_in(spare, "adopt\rdiscard\r")?;
    let output = moving.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(output.stderr.contains("its operator wanted it so"), "{}", output.stderr);
    goes_on(peer, machine)?;
    machine.check_next_attach()
}

/// One of the streams that pages go by breaks: nothing has happened, and by the same line the machine is taken afterwards.
#[test]
#[ignore = "long"]
fn a_stream_that_breaks_changes_nothing() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, spare } = &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let boots = spare.boots();
    let words = receive(spare, "10.9.0.3")?;
    machine.sh("modprobe -a inet_diag tcp_diag")?;
    let moving = machine.spawn(&migrate(&words, "--bandwidth 1 --streams 3"))?;
    spare.wait_serial("is connected: stream 2 of 3", LIMIT)?;
    let said_there = spare.serial_log();
    let port =
        said_there.split(" is connected: stream 2 of 3").next().and_then(|said| said.rsplit(':').next());
    machine.sh(&format!("sleep 2; ss -K -t -n sport = :{} | grep 10.9.0.3:4747", port.unwrap()))?;
    let output = moving.wait(LIMIT)?;
    println!("{}{}", output.stderr, said(spare));
    assert!(!output.success(), "{}", output.stderr);
    machine.sh("! ls /sys/fs/cgroup | grep mercury; ! ss -t -n | grep 4747")?;
    goes_on(peer, machine)?;
    wait_more(spare, THROWN, 0)?;
    moves_by(peer, machine, spare, (&words, boots), "--streams 3 --rounds 0")?;
    spare.check_next_attach()
}

/// Ctrl-C in the rounds; the other machine dies in the rounds, and when everything stands still; the machine goes on.
/// Where it dies itself, the other one throws away what has come, and takes the next.
#[test]
#[ignore = "long"]
fn whatever_fails_before_the_commit_changes_nothing() -> Result<()> {
    need_qemu()?;
    let Scene { switch, machine, spare } = Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let peer = &switch.peer;
    let words = receive(&spare, "10.9.0.3")?;
    let slowly = migrate(&words, "--bandwidth 1");
    let interrupted = machine.spawn(&slowly)?;
    wait_more(&spare, COMES, 0)?;
    machine.sh("sleep 4; pkill -INT -f '^mercury migrate'")?;
    let output = interrupted.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(output.stderr.contains("interrupted: the machine has not moved"), "{}", output.stderr);
    goes_on(peer, &machine)?;
    wait_more(&spare, THROWN, 0)?;

    let dies = machine.spawn(&slowly)?;
    wait_more(&spare, COMES, 1)?;
    thread::sleep(Duration::from_secs(4));
    spare.power_cut()?;
    let output = dies.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(output.stderr.contains("goes on as if nothing had been tried"), "{}", output.stderr);
    goes_on(peer, &machine)?;

    let spare = spare.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 3))?;
    plug_in(&spare, "10.9.0.3")?;
    let still = migrate(&receive(&spare, "10.9.0.3")?, "--rounds 0");
    let dies = machine.spawn(&still)?;
    wait_more(&spare, COMES, 2)?;
    thread::sleep(Duration::from_millis(2500));
    spare.power_cut()?;
    let output = dies.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(!output.success() && !output.stderr.is_empty(), "{}", output.stderr);
    goes_on(peer, &machine)?;

    let spare = spare.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 3))?;
    plug_in(&spare, "10.9.0.3")?;
    let words = receive(&spare, "10.9.0.3")?;
    let _gone = machine.spawn(&migrate(&words, "--rounds 0"))?;
    wait_more(&spare, COMES, 3)?;
    thread::sleep(Duration::from_secs(2));
    machine.power_cut()?;
    wait_more(&spare, THROWN, 1)
}
