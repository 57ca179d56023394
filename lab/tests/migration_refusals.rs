//! Moves that do not come about: a destination without room, a second move at the same time, disks
//! that vanish, an operator who presses Ctrl-C while the machine stands still. Each refusal has its
//! reason, and the machine runs on.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{io::Write, time::Duration};

use mercury_lab::{
    Kernel, Machine, Result,
    moving::{LIMIT, Switch, migrate, receive, times, wait_more},
    restart::nothing_wrong,
};
use workloads::{
    moves::{COMES, Scene, Shared, THROWN, console, disk, fails, goes_on},
    restart::need_qemu,
};

/// The message of a command while another process has the driver.
const BUSY: &str = "controls Mercury";

/// The messages of a move whose applications stand still, and of one that Ctrl-C has ended.
const STANDS: &str = "applications stand still now";
const INTERRUPTED: &str = "interrupted: the machine has not moved";

/// Checks that a command is refused at once, with its reason, without another effect.
fn is_refused(machine: &Machine, line: &str, reason: &str) -> Result<()> {
    let output = machine.command(line).timeout(Duration::from_secs(60)).run()?;
    println!("{line}: {}", output.stderr);
    assert!(!output.success() && output.stderr.contains(reason), "{reason}: {}", output.stderr);
    Ok(())
}

/// Refuses, while a machine moves, every other command that wants to move it or to move to its
/// destination. None disturbs the move.
#[test]
#[ignore = "long"]
fn a_second_move_is_refused_with_the_reason() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let words = receive(destination, "10.9.0.3")?;
    // There is no room for the pages that wait until the restore environment ends. The command says
    // so before the first page.
    let line = migrate(&words, "--pool 8");
    fails(peer, machine, &line, &["does not accept this machine", "too little memory is free"])?;
    assert_eq!(times(destination, COMES), 0);

    machine
        .sh(&format!("mkdir -p /etc/mercury; umask 077; echo '{words}' > /etc/mercury/destination.key"))?;
    machine.sh("setsid mercury daemon --to 10.9.0.3 -- --without-tombstone > /run/daemon 2>&1 &")?;
    machine.sh("until mercury evacuate --status | grep 'waits for orders'; do sleep 0.2; done")?;
    let mut first = machine.spawn(&migrate(&words, "--bandwidth 1"))?;
    wait_more(destination, COMES, 0)?;
    let again = migrate(&words, "");
    is_refused(machine, &again, BUSY)?;
    is_refused(machine, "mercury migrate --dry-run --without-tombstone", BUSY)?;
    is_refused(machine, "mercury checkpoint --force-devices /run/image", BUSY)?;
    // Another reason comes first: the root is on NFS.
    is_refused(machine, "mercury checkpoint /run/image", "is on NFS 4.2")?;
    is_refused(machine, "mercury snapshot", "is on NFS 4.2")?;
    machine.sh("mercury evacuate --reason errors")?;
    let said = machine.sh("until mercury evacuate --status | grep 'and has not:' -A5; do sleep 0.2; done")?;
    println!("{said}");
    assert!(said.contains(BUSY), "{said}");
    is_refused(peer, &again, "another machine is on its way there")?;
    assert!(!first.has_ended()? && times(destination, THROWN) == 0, "{}", first.errors_so_far()?);
    nothing_wrong(peer)?;
    machine.sh("pkill -INT -f '^mercury migrate'")?;
    let output = first.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(output.stderr.contains(INTERRUPTED), "{}", output.stderr);
    goes_on(peer, machine)?;
    wait_more(destination, THROWN, 0)?;
    machine.sh("pkill -f '^mercury daemon'")?;
    interrupted_at_the_console(peer, machine, destination, &words)?;
    machine.check_next_attach()
}

/// Ends a move of a machine that stands still by Ctrl-C from its terminal, which the kernel
/// handles.
fn interrupted_at_the_console(
    peer: &Machine,
    machine: &Machine,
    destination: &Machine,
    words: &str,
) -> Result<()> {
    peer.sh("modprobe sch_netem; for port in $(ls /sys/class/net/switch/brif); do \
             tc qdisc replace dev $port root netem rate 30mbit; done")?;
    let line = migrate(words, "--rounds 0");
    let thrown = times(destination, THROWN);
    let (stands, interrupted) = (times(machine, STANDS), times(machine, INTERRUPTED));
    // The shell survives the Ctrl-C.
    let inner = format!("trap : INT; {line}; touch /run/ended");
    machine.sh(&format!("setsid -c sh -c '{inner}' < /dev/ttyS0 > /dev/ttyS0 2>&1 &"))?;
    wait_more(machine, STANDS, stands)?;
    console(machine)?.write_all(b"\x03").unwrap();
    machine.command("until test -e /run/ended; do sleep 0.1; done").timeout(LIMIT).run()?.check()?;
    wait_more(machine, INTERRUPTED, interrupted)?;
    wait_more(destination, THROWN, thrown)?;
    peer.sh("for port in $(ls /sys/class/net/switch/brif); do tc qdisc del dev $port root; done")?;
    machine.sh("! ls /sys/fs/cgroup | grep mercury")?;
    goes_on(peer, machine)
}

/// Ends a move whose disk vanishes: a disk that an image is written to when the move begins, and a
/// disk of both ends that one of them has lost. The vanished disk is not touched again, since the
/// emulator itself would crash.
#[test]
#[ignore = "long"]
fn a_disk_that_vanishes_ends_the_move() -> Result<()> {
    const DISKS: [&str; 2] = ["first", "second"];
    need_qemu()?;
    let shared = Shared::new(&DISKS);
    let plug = |spec| shared.plug(&DISKS, spec);
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::changed(Kernel::BookwormCloud, 2, [768; 2], plug)?;
    let [first, second] = DISKS.map(|name| disk(machine, name).unwrap());
    let words = receive(destination, "10.9.0.3")?;

    // A move begins while an image is written. No destination waits at that address.
    let (_, key) = words.split_once(' ').unwrap();
    let writes = machine.spawn(&format!("mercury checkpoint --force-devices {first}"))?;
    let nowhere = migrate(&format!("10.9.0.1:9 {key}"), "");
    let tries =
        format!("for i in $(seq 300); do {nowhere} 2>&1 | grep '{BUSY}' && exit; sleep 0.1; done; exit 1");
    println!("{}", machine.command(&tries).timeout(LIMIT).run()?.check()?.stdout);
    println!("{}", writes.wait(LIMIT)?.check()?.stdout);
    goes_on(peer, machine)?;

    for disk in [&first, &second] {
        machine.sh(&format!("mkfs.ext4 -q {disk}"))?;
    }
    machine.sh(&format!("mount {first} /mnt; echo before > /mnt/file; sync"))?;
    let line = migrate(&words, "--bandwidth 4 --rounds 2");

    // The disk vanishes at the destination after its first check.
    let moving = machine.spawn(&line)?;
    wait_more(destination, COMES, 0)?;
    println!("{}", destination.qmp()?.human("drive_del first")?);
    let output = moving.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(!output.success(), "{}", output.stderr);
    assert!(
        output.stderr.contains("the destination has given up: the disks here are not"),
        "{}",
        output.stderr
    );
    assert!(output.stderr.contains("/mnt"), "{}", output.stderr);
    goes_on(peer, machine)?;
    machine.sh("grep -x before /mnt/file; echo after > /mnt/file; sync; umount /mnt")?;

    // The disk vanishes here, while rounds run.
    machine.sh(&format!("mount {second} /mnt; echo before > /mnt/file; sync"))?;
    let moving = machine.spawn(&line)?;
    wait_more(destination, COMES, 1)?;
    println!("{}", machine.qmp()?.human("drive_del second")?);
    let output = moving.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(!output.success() && output.stderr.contains("/mnt"), "{}", output.stderr);
    machine.sh("! ls /sys/fs/cgroup | grep mercury")?;
    wait_more(destination, THROWN, 1)?;
    goes_on(peer, machine)?;
    machine.sh("umount -l /mnt")?;
    machine.check_next_attach()
}
