//! Machines that move while they work. Three machines are on one network. One of them is the
//! switch, the server of the root file system, and the peer that talks to the moving machine.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{thread, time::Duration};

use mercury_lab::{
    Disk, Init, Kernel, Machine, MachineCheck, Reset, Result,
    loaders::Loader,
    moving::{GOES_ON, LIMIT, Switch, WAITS, migrate, plug_in, receive, said, wait_more},
    restart::{
        boot_id, comes_further, count, is_well, nothing_wrong,
        script::{ECHO, TALK},
        start,
    },
};
use workloads::{
    moves::{COMES, Scene, THROWN, fails, goes_on, kill_a_process, moves, moves_by, start_work, type_in},
    restart::need_qemu,
};

/// Moves a machine by stop and copy: no byte is sent before the machine stands still.
#[test]
fn a_machine_that_stands_still_moves() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    moves(peer, machine, destination, "10.9.0.3", "--rounds 0")?;
    destination.check_next_attach()
}

/// Moves a machine at work to another one, and back to the source, which was switched off
/// meanwhile.
#[test]
#[ignore = "long"]
fn a_machine_at_work_moves_and_comes_back() -> Result<()> {
    need_qemu()?;
    let Scene { switch, machine, destination } = Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let peer = &switch.peer;
    // An emulator always exceeds the downtime limit, so a throttle would be for nothing.
    moves(peer, &machine, &destination, "10.9.0.3", "--verify-log --max-throttle 0 --streams 3")?;
    destination.wait_serial("is connected: stream 2 of 3", LIMIT)?;
    let said_there = said(&machine);
    assert!(said_there.contains("found by a dirty log"), "{said_there}");
    assert!(said_there.contains("not in the dirty log, of which 0 should have been"), "{said_there}");
    // The source boots as a destination now: the machine's root is in use.
    let repaired = machine.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 2))?;
    plug_in(&repaired, "10.9.0.4")?;
    moves(peer, &destination, &repaired, "10.9.0.4", "--max-throttle 0")?;
    assert!(said(&destination).contains("found by a dirty log"), "{}", said(&destination));
    repaired.check_next_attach()
}

/// A program that writes incompressible data to a thousand pages a second, as evenly as possible: 4
/// MB, more than the limit.
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

/// Throttles applications when they write faster than the link sends and the rest would never fit
/// the limit. The rest then shrinks.
#[test]
#[ignore = "long"]
fn a_load_that_outruns_the_connection_is_held_back() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    start(machine, "outruns", OUTRUNS, "")?;
    let key = receive(destination, "10.9.0.3")?;
    let limits = "--max-downtime 600ms --bandwidth 3";
    let line = migrate(&key, &format!("{limits} --or-give-up --max-throttle 0"));
    fails(peer, machine, &line, &["the downtime would be about"])?;
    moves_by(peer, machine, destination, &key, &format!("{limits} > /run/said"))?;
    let said = destination.sh("cat /run/said")?;
    println!("{said}");
    let (free, held_back) = said.split_once("applications are throttled by 15 % of the time now").unwrap();
    let least = |said: &str| -> u64 {
        let estimates = said.split("downtime now about ").skip(1).map(|rest| rest.split(' ').next().unwrap());
        estimates.map(|ms| ms.parse().unwrap()).min().unwrap()
    };
    assert!(least(held_back) < least(free) * 3 / 4, "{said}");
    comes_further(destination, "outruns", count(destination, "outruns")?)?;
    destination.check_next_attach()
}

/// A command that lets the switch lose each frame with some probability.
const LOSES: &str = "modprobe sch_netem; for port in $(ls /sys/class/net/switch/brif); do \
     tc qdisc replace dev $port root netem loss 10%; done";

/// Moves a machine over a link that loses a tenth of the frames, those between the machine and its
/// file server too.
#[test]
#[ignore = "long"]
fn a_machine_moves_over_a_link_that_loses_a_tenth() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    peer.sh(LOSES)?;
    machine.sh("modprobe tcp_bbr")?;
    moves(peer, machine, destination, "10.9.0.3", "--rounds 2 --congestion-control bbr")?;
    peer.sh("tc -s qdisc | grep -q 'dropped [1-9]'")?;
    destination.check_next_attach()
}

/// Gives up a move at a megabit a second in time: no task stands still for minutes.
#[test]
#[ignore = "long"]
fn a_slow_link_is_given_up() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let key = receive(destination, "10.9.0.3")?;
    peer.sh(&LOSES.replace("loss 10%", "rate 1mbit"))?;
    let line = migrate(&key, "--rounds 1 --or-give-up");
    let output = machine.command(&line).timeout(LIMIT * 4).run()?;
    println!("{}", output.stderr);
    assert!(!output.success() && output.stderr.contains("the downtime would be about"), "{}", output.stderr);
    goes_on(peer, machine)?;
    machine.check_next_attach()
}

/// Receives a machine from the boot menu, with no system running at the destination: the way back
/// onto hardware whose only system has moved away.
#[test]
#[ignore = "long"]
fn a_machine_moves_to_a_destination_started_from_the_boot_menu() -> Result<()> {
    need_qemu()?;
    let switch = Switch::boot()?;
    let plugged = |place| Loader::GrubPc.with(switch.plugged(Kernel::BookwormCloud, 2, 768, place));
    let machine = switch.boot_moving(plugged(2)?)?;
    let destination = switch.boot_other(plugged(3)?.init(Init::Systemd).reset(Reset::Restarts))?;
    Loader::GrubPc.install(&destination, "/dev/vda")?;
    let _off = destination.spawn("poweroff")?;
    destination.wait_shutdown(LIMIT)?;
    let destination = destination.start_by_itself(Disk::Root)?;
    // udev gives the card another name.
    destination.sh("modprobe virtio_net; udevadm settle")?;
    plug_in(&destination, "10.9.0.3")?;
    start_work(&switch, &machine)?;

    let line = "mercury receive --json --listen 10.9.0.3 --prepare /boot/mercury-receive --boot-menu";
    let prepared: serde_json::Value = serde_json::from_str(&destination.sh(line)?).unwrap();
    let [key, once] = [&prepared["key"], &prepared["boot_menu"]["once"]].map(|text| text.as_str().unwrap());
    destination.sh(once)?;
    let _reboot = destination.spawn("reboot")?;
    wait_more(&destination, WAITS, 0)?;
    moves_by(&switch.peer, &machine, &destination, &format!("10.9.0.3 --key {key}"), "--rounds 1")?;
    destination.check_next_attach()
}

/// Goes along with the machine and comes back by one command. A way back that does not work is
/// named.
#[test]
#[ignore = "long"]
fn maintenance_goes_along_and_comes_back() -> Result<()> {
    const WORDS: &str = "/run/words";
    need_qemu()?;
    let Scene { switch, machine, destination } = Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let peer = &switch.peer;
    let (id, boots) = (boot_id(&machine)?, destination.boots());
    let there = receive(&destination, "10.9.0.3")?;
    let maintenance =
        format!("exec 3<>{WORDS}; exec mercury maintenance {there} --without-tombstone <&3 >/run/said 2>&1");
    machine.sh(&format!("mkfifo {WORDS}; setsid sh -c '{maintenance}' > /dev/null 2>&1 &"))?;
    machine.wait_shutdown(LIMIT)?;
    destination.wait_other(boots)?;
    is_well(&destination, &id)?;
    goes_on(peer, &destination)?;
    destination.sh(&format!("grep '^2/3' /run/said; echo back, please > {WORDS}"))?;
    destination.sh("sleep 1; grep 'type HOST --key TOKEN, as' /run/said")?;

    let repaired = machine.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 2))?;
    plug_in(&repaired, "10.9.0.4")?;
    let boots = repaired.boots();
    let back = receive(&repaired, "10.9.0.4")?;
    destination.sh(&format!("echo '{back}' > {WORDS}"))?;
    destination.wait_shutdown(LIMIT)?;
    repaired.wait_other(boots)?;
    is_well(&repaired, &id)?;
    goes_on(peer, &repaired)?;
    let said = repaired.sh("sleep 2; cat /run/said; ! pgrep -f '^mercury maintenance'")?;
    println!("{said}");
    assert!(said.contains("this machine is back"), "{said}");
    repaired.check_next_attach()
}

/// The sensor that the package contains.
const SENSOR: &str = include_str!("../../packaging/examples/memory-errors");

/// Moves a machine on the order of a script that counts the memory's errors, and that knows neither
/// the destination nor the secret.
#[test]
#[ignore = "long"]
fn a_machine_with_failing_memory_leaves_by_itself() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormGeneric, 2, 1024)?;
    machine.sh("echo 1 > /sys/devices/system/machinecheck/machinecheck0/check_interval")?;
    machine.put("/root/sensor", SENSOR.as_bytes(), 0o755)?;
    let (id, boots) = (boot_id(machine)?, destination.boots());
    let words = receive(destination, "10.9.0.3")?;
    machine
        .sh(&format!("mkdir -p /etc/mercury; umask 077; echo '{words}' > /etc/mercury/destination.key"))?;
    machine.sh("setsid mercury daemon --to 10.9.0.3 -- --without-tombstone > /run/said 2>&1 &")?;
    machine.sh("until mercury evacuate --status | grep 'waits for orders'; do sleep 0.2; done")?;
    machine.sh("/root/sensor 1; mercury evacuate --status | grep 'waits for orders'")?;
    let corrected = 0x9400_0000_0000_0001;
    let check = MachineCheck { cpu: 1, bank: 5, status: corrected, address: 0x1000, ..Default::default() };
    machine.qmp()?.inject_mce(&check)?;
    machine.sh("until dmesg | grep -q 'Machine check events logged'; do sleep 0.2; done")?;
    machine.sh("/root/sensor 1")?;
    machine.wait_shutdown(LIMIT)?;
    destination.wait_other(boots)?;
    is_well(destination, &id)?;
    goes_on(peer, destination)?;
    destination.sh(
        "until mercury evacuate --status | grep 'has moved to 10.9.0.3: 1 corrected'; do sleep 0.2; done",
    )?;
    // The pairing token is used up, and no other one exists.
    assert!(
        destination
            .run("mercury evacuate")?
            .stderr
            .contains("the pairing token was used for an earlier move")
    );
    destination.check_next_attach()
}

/// Moves a machine by its own rules: the guard reads an error from the kernel's trace, finds the first spare
/// away, and moves to the second one. Both machines know each other, so that no token is typed.
#[test]
#[ignore = "long"]
fn a_guarded_machine_leaves_for_a_spare_that_knows_it() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormGeneric, 2, 1024)?;
    machine.sh("echo 1 > /sys/devices/system/machinecheck/machinecheck0/check_interval")?;
    let name = |machine: &Machine| machine.sh("mercury identity").map(|name| name.trim().to_owned());
    let (source, spare) = (name(machine)?, name(destination)?);
    let (id, boots) = (boot_id(machine)?, destination.boots());
    let mut waits =
        destination.spawn(&format!("mercury receive --listen 10.9.0.3 --delay 4s --source {source}"))?;
    waits.wait_output("--spare mercury-machine-1-", LIMIT)?;
    wait_more(destination, WAITS, 0)?;
    let rules = format!(
        "on_hang = 'report'\n[sensors]\ninterval_s = 1\n\
        [sensors.limits]\ncorrected = {{ limit = 1, action = 'evacuate' }}\n\
        [[spare]]\nhost = '10.9.0.77:5'\nname = '{spare}'\n[[spare]]\nhost = '10.9.0.3'\nname = '{spare}'\n"
    );
    machine.put("/run/guard.toml", rules.as_bytes(), 0o644)?;
    machine.sh("mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
        setsid mercury daemon --rules /run/guard.toml -- --without-tombstone > /run/said 2>&1 &")?;
    machine.sh("until mercury evacuate --status | grep 'waits for orders'; do sleep 0.2; done")?;
    let status = "mercury guard status --rules /run/guard.toml";
    machine.sh(&format!(
        "for _ in $(seq 60); do {status} | grep -q 'sensor traces: read' && exit 0; sleep 1; done; \
        {status}; cat /run/said; exit 1"
    ))?;
    let corrected = 0x9400_0000_0000_0001;
    let check = MachineCheck { cpu: 1, bank: 5, status: corrected, address: 0x1000, ..Default::default() };
    machine.qmp()?.inject_mce(&check)?;
    machine.wait_shutdown(LIMIT)?;
    destination.wait_other(boots)?;
    is_well(destination, &id)?;
    goes_on(peer, destination)?;
    let moved = "mercury evacuate --status | grep 'has moved to 10.9.0.3: corrected: mce_record'";
    destination.sh(&format!("until {moved}; do sleep 0.2; done"))?;
    let said = destination.sh("cat /run/said")?;
    println!("{said}");
    assert!(said.contains("no connection with 10.9.0.77:5"), "{said}");
    // The sensors are read again, of this hardware.
    destination.sh(&format!("until {status} | grep -q 'sensor traces: read'; do sleep 1; done"))?;
    destination.check_next_attach()
}

/// Refuses a source without the pairing token, and a machine of another size, with the reason.
#[test]
#[ignore = "long"]
fn an_unequal_machine_is_refused() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::with(Kernel::BookwormCloud, 2, [768, 896])?;
    let other = machine.sh(
        "mercury receive --listen 10.9.0.2 --prepare /run/x | grep -o 'mercury-receive.*'; rm -r /run/x",
    )?;
    let words = receive(destination, "10.9.0.3")?;
    let wrong = migrate(&format!("10.9.0.3 --key {other}"), "");
    fails(peer, machine, &wrong, &["no session with the other machine"])?;
    fails(peer, machine, &migrate("10.9.0.3:5 --key x", ""), &["begins with mercury-receive-1-"])?;
    fails(peer, machine, &migrate(&format!("10.9.0.3:5 --key {other}"), ""), &["no connection with"])?;
    let line = migrate(&words, "");
    fails(peer, machine, &line, &["does not accept this machine", "the firmware's memory map"])?;
    // The destination still waits, and still gives the reason.
    fails(peer, machine, &line, &["the firmware's memory map"])?;
    let predicted = machine.sh("mercury migrate --dry-run --without-tombstone")?;
    println!("{predicted}");
    assert!(predicted.contains("applications stand still for about"), "{predicted}");
    goes_on(peer, machine)?;
    machine.check_next_attach()
}

/// Holds the source in doubt: the destination dies when it has been told to start, and no one can
/// know if it has started. The source stands still, reports that, and goes on after an operator has
/// checked.
#[test]
#[ignore = "long"]
fn a_source_in_doubt_waits_for_its_operator() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(destination, "10.9.0.3")?;
    let mut moving = machine.spawn(&migrate(&words, "--rounds 0"))?;
    wait_more(destination, GOES_ON, 0)?;
    destination.power_cut()?;
    wait_more(machine, "does not answer. Nothing runs here", 0)?;
    // The source stays in doubt.
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

/// Keeps the source in doubt when the process that waits for an answer is killed: its undo process
/// keeps asking, and tells the operator.
#[test]
#[ignore = "long"]
fn a_guard_asks_on_for_a_source_in_doubt() -> Result<()> {
    const DOUBT: &str = "does not answer. Nothing runs here";
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(destination, "10.9.0.3")?;
    machine.sh("sysctl -q kernel.sysrq=1")?;
    let moving = machine.spawn(&migrate(&words, "--rounds 0"))?;
    machine.sh("until pgrep -f 'exe undo$'; do sleep 0.02; done; echo 1000 > /proc/$(pgrep -f '^mercury \
        migrate')/oom_score_adj")?;
    wait_more(destination, GOES_ON, 0)?;
    destination.power_cut()?;
    wait_more(machine, DOUBT, 0)?;
    kill_a_process(machine)?;
    wait_more(machine, "the process that moved this machine is gone, after the commit", 0)?;
    wait_more(machine, DOUBT, 1)?;
    // The source stays in doubt, for longer than the undo process waits for a command without
    // progress.
    thread::sleep(Duration::from_secs(70));
    assert!(!machine.serial_log().contains("has not moved"));
    nothing_wrong(peer)?;
    type_in(machine, "resumed\rresume\r")?;
    wait_more(machine, "this machine has not moved, and goes on", 0)?;
    println!("{:?}", moving.wait(LIMIT)?);
    // Applications run before the hypervisor is out. The undo process ends when everything is as it
    // was.
    machine.sh("until ! pgrep -f 'exe undo$'; do sleep 0.1; done; ! ls /sys/fs/cgroup | grep mercury")?;
    goes_on(peer, machine)?;
    machine.sh("cat /proc/sys/net/ipv4/conf/all/arp_ignore | grep -x 0")?;
    machine.check_next_attach()
}

/// Discards an arrival on the order of the destination's operator.
#[test]
#[ignore = "long"]
fn an_arrival_is_discarded_by_the_operator() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(destination, "10.9.0.3")?;
    let moving = machine.spawn(&migrate(&words, "--bandwidth 1"))?;
    wait_more(destination, COMES, 0)?;
    type_in(destination, "adopt\rdiscard\r")?;
    let output = moving.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(output.stderr.contains("its operator decided so"), "{}", output.stderr);
    goes_on(peer, machine)?;
    machine.check_next_attach()
}

/// Changes nothing when one of the streams of pages breaks. The same pairing token moves the
/// machine afterwards.
#[test]
#[ignore = "long"]
fn a_stream_that_breaks_changes_nothing() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(destination, "10.9.0.3")?;
    machine.sh("modprobe -a inet_diag tcp_diag")?;
    let moving = machine.spawn(&migrate(&words, "--bandwidth 1 --streams 3"))?;
    destination.wait_serial("is connected: stream 2 of 3", LIMIT)?;
    let said_there = destination.serial_log();
    let port =
        said_there.split(" is connected: stream 2 of 3").next().and_then(|said| said.rsplit(':').next());
    machine.sh(&format!("sleep 2; ss -K -t -n sport = :{} | grep 10.9.0.3:4747", port.unwrap()))?;
    let output = moving.wait(LIMIT)?;
    println!("{}{}", output.stderr, said(destination));
    assert!(!output.success(), "{}", output.stderr);
    machine.sh("! ls /sys/fs/cgroup | grep mercury; ! ss -t -n | grep 4747")?;
    goes_on(peer, machine)?;
    wait_more(destination, THROWN, 0)?;
    moves_by(peer, machine, destination, &words, "--streams 3 --rounds 0")?;
    destination.check_next_attach()
}

/// Takes along a VLAN on the machine's card, and IPv6. Connections by both go on, and neighbours
/// learn where both addresses are.
#[test]
#[ignore = "long"]
fn a_vlan_and_ipv6_go_along() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    peer.sh("modprobe 8021q; ip link add link switch name seven type vlan id 7; ip link set seven up; \
         ip address add 10.9.7.1/24 dev seven; ip address add fd09::1/64 dev switch nodad")?;
    let by_six =
        "import socketserver, socket\nsocketserver.ThreadingTCPServer.address_family = socket.AF_INET6";
    start(peer, "echo_six", &format!("{by_six}\n{}", ECHO.replace(", 7)", ", 8)")), "")?;
    machine.sh("modprobe 8021q; card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); \
         ip link add link $card name seven type vlan id 7; ip link set seven up; \
         ip address add 10.9.7.2/24 dev seven; ip address add fd09::2/64 dev $card nodad")?;
    start(machine, "talk_vlan", TALK, "10.9.7.1")?;
    start(machine, "talk_six", &TALK.replace(", 7)", ", 8)"), "fd09::1")?;
    moves(peer, machine, destination, "10.9.0.3", "--rounds 2")?;
    println!("{}", peer.sh("ip neighbour")?);
    for (work, address) in [("talk_vlan", "10.9.7.2"), ("talk_six", "fd09::2")] {
        comes_further(destination, work, count(destination, work)? + 5)?;
        peer.sh(&format!("ip neighbour show {address} | grep -i 52:54:00:09:00:03"))?;
    }
    destination.check_next_attach()
}

/// Takes along a bridge that has its card's address, and the machine's. Both are on the
/// destination's card there, and connections go on.
#[test]
#[ignore = "long"]
fn a_bridge_goes_along() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    // One process must do all steps: between two of them the machine's files are out of reach.
    machine.sh(
        "modprobe bridge; card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); ip -batch - <<END
link add name bridge type bridge
link set bridge address $(cat /sys/class/net/$card/address) up
address delete 10.9.0.2/24 dev $card
link set $card master bridge
address add 10.9.0.2/24 dev bridge
END",
    )?;
    goes_on(peer, machine)?;
    moves(peer, machine, destination, "10.9.0.3", "--rounds 2")?;
    println!("{}", destination.sh("ip -brief link")?);
    destination.sh("test $(cat /sys/class/net/*/address | grep -c 52:54:00:09:00:03) = 2")?;
    peer.sh("ip neighbour show 10.9.0.2 | grep -i 52:54:00:09:00:03")?;
    destination.check_next_attach()
}

/// Changes nothing if a move fails before the commit: Ctrl-C in the rounds, and a death of the
/// destination in the rounds and while the source stands still. If the source dies, the destination
/// discards the pages, and takes the next machine.
#[test]
#[ignore = "long"]
fn a_failure_before_the_commit_changes_nothing() -> Result<()> {
    need_qemu()?;
    let Scene { switch, machine, destination } = Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let peer = &switch.peer;
    let words = receive(&destination, "10.9.0.3")?;
    let slowly = migrate(&words, "--bandwidth 1");
    let interrupted = machine.spawn(&slowly)?;
    wait_more(&destination, COMES, 0)?;
    machine.sh("sleep 4; pkill -INT -f '^mercury migrate'")?;
    let output = interrupted.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(output.stderr.contains("interrupted: the machine has not moved"), "{}", output.stderr);
    goes_on(peer, &machine)?;
    wait_more(&destination, THROWN, 0)?;

    let dies = machine.spawn(&slowly)?;
    wait_more(&destination, COMES, 1)?;
    thread::sleep(Duration::from_secs(4));
    destination.power_cut()?;
    let output = dies.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(output.stderr.contains("goes on as if nothing had been tried"), "{}", output.stderr);
    goes_on(peer, &machine)?;

    let destination = destination.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 3))?;
    plug_in(&destination, "10.9.0.3")?;
    let still = migrate(&receive(&destination, "10.9.0.3")?, "--rounds 0");
    let dies = machine.spawn(&still)?;
    wait_more(&destination, COMES, 2)?;
    thread::sleep(Duration::from_millis(2500));
    destination.power_cut()?;
    let output = dies.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(!output.success() && !output.stderr.is_empty(), "{}", output.stderr);
    goes_on(peer, &machine)?;

    let destination = destination.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 3))?;
    plug_in(&destination, "10.9.0.3")?;
    let words = receive(&destination, "10.9.0.3")?;
    let _gone = machine.spawn(&migrate(&words, "--rounds 0"))?;
    wait_more(&destination, COMES, 3)?;
    thread::sleep(Duration::from_secs(2));
    machine.power_cut()?;
    wait_more(&destination, THROWN, 1)
}
