//! Failures at each step of a move. Either one machine runs, or one stands still and says what to
//! do. Each end, and the link, fails while an end is paused at a step (`--pause-at`). Then the test
//! checks which machine runs.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{
    Boot, Kernel, Machine, Result,
    command::Background,
    moving::{GOES_ON, LIMIT, PEER, Switch, WAITS, migrate, moving, plug, plug_in, times, wait_more},
    restart::{
        Folder, boot_id, comes_further, count, is_well, nothing_wrong, prepared,
        script::{CLOCK, HEAR, TALK},
        start,
    },
};
use workloads::{
    moves::{COMES, THROWN, kill_a_process, type_in},
    restart::need_qemu,
};

const KERNEL: Kernel = Kernel::BookwormCloud;
const MEMORY_MIB: u32 = 768;
/// The places of both machines at the switch, which are the last bytes of their cards' addresses.
const SOURCE: u8 = 2;
const DESTINATION: u8 = 3;

/// Messages on the consoles.
const SILENT: &str = "its source has gone silent before it said if the arrival is to start";
const NO_ANSWER: &str = "does not answer. Nothing runs here";
const FORGOT: &str = "The destination knows nothing of this move";
const KILLED: &str = "the receiver was killed: this restore environment may have run out of memory";
const GUARD_ASKS: &str = "the process that moved this machine is gone, after the commit";

/// A script that finds which machines answer for the moving machine's address. It prints the last
/// bytes of their cards' addresses.
const WHO_ANSWERS: &str = r#"python3 -c '
import socket, struct, time
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
wire.bind(("switch", 0))
wire.settimeout(0.1)
own = wire.getsockname()[4]
asked = socket.inet_aton("10.9.0.2")
found, end, again = set(), time.time() + 3, 0
while time.time() < end:
    if time.time() > again:
        peer = socket.inet_aton("10.9.0.1")
        question = struct.pack("!HHHBBH6s4s6s4s", 0x806, 1, 0x800, 6, 4, 1, own, peer, bytes(6), asked)
        wire.send(b"\xff" * 6 + own + question)
        again = time.time() + 0.5
    try:
        frame = wire.recv(2048)
    except OSError:
        continue
    if frame[20:22] == b"\x00\x02" and frame[28:32] == asked:
        found.add(frame[27])
print(*sorted(found))
'"#;

/// The place where an end is paused, to be struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Source(&'static str),
    Destination(&'static str),
    /// The machine that has arrived at the destination.
    Arrived(&'static str),
}

/// A machine that is to move, with its files on the switch, and a destination in its restore
/// environment.
struct Scene {
    switch: Switch,
    machine: Machine,
    destination: Machine,
    small: Boot,
    key: String,
    id: String,
    begun: Instant,
    _folder: Folder,
}

/// Starts the machine's steady work.
fn put_to_work(switch: &Switch, machine: &Machine) -> Result<()> {
    start(machine, "clock", CLOCK, "")?;
    start(machine, "talk", TALK, PEER)?;
    start(machine, "hear", HEAR, "")?;
    switch.tell()?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true; sysctl -q kernel.sysrq=1")?;
    // The contents of memory go over the link, and there are many moves.
    machine.sh("sync; echo 3 > /proc/sys/vm/drop_caches").map(drop)
}

impl Scene {
    fn new() -> Result<Self> {
        let begun = Instant::now();
        let switch = Switch::boot_for(KERNEL)?;
        let machine = switch.boot_moving(switch.plugged(KERNEL, 2, MEMORY_MIB, SOURCE))?;
        let destination = switch.boot_other(switch.plugged(KERNEL, 2, MEMORY_MIB, DESTINATION))?;
        plug_in(&destination, "10.9.0.3")?;
        let (small, folder, said) = prepared(&destination, "receive --listen 10.9.0.3")?;
        let key = format!("10.9.0.3 --key {}", said["key"].as_str().unwrap());
        put_to_work(&switch, &machine)?;
        let id = boot_id(&machine)?;
        Ok(Self { switch, machine, destination, small, key, id, begun, _folder: folder })
    }

    /// Cuts the destination's power, if it has any, and lets it wait again. Its restore environment
    /// pauses at the given step.
    fn with_destination_at(self, at: At) -> Result<Self> {
        let small = match at {
            At::Destination(step) => self.small.with(&format!("mercury.pause-at={step}")),
            _ => self.small.clone(),
        };
        let before = times(&self.destination, WAITS);
        let destination = self.destination.start_destination(&small)?;
        wait_more(&destination, WAITS, before)?;
        Ok(Self { destination, ..self })
    }

    /// Gives the source power again, boots it, and lets it work.
    fn with_source_again(self) -> Result<Self> {
        let machine = self.machine.start_as(moving(self.switch.plugged(KERNEL, 2, MEMORY_MIB, SOURCE)))?;
        self.switch.peer.sh("pkill -f '[t]ell.py'; rm -f /run/tell /run/tell.wrong")?;
        put_to_work(&self.switch, &machine)?;
        let id = boot_id(&machine)?;
        Ok(Self { machine, id, ..self })
    }

    /// Begins the move, up to the step where it is to be struck. The moving process is the one that
    /// the kernel would kill first, and its undo process must not be killed so.
    fn moves_up_to(&self, at: At, options: &str) -> Result<Background> {
        println!("--- {at:?}, {:?}", self.begun.elapsed());
        let (who, step) = match at {
            At::Source(step) => (&self.machine, step),
            At::Destination(step) | At::Arrived(step) => (&self.destination, step),
        };
        let pause =
            if matches!(at, At::Destination(_)) { String::new() } else { format!("--pause-at {step}") };
        let (said, before) = (format!("paused at {step}"), times(who, &format!("paused at {step}")));
        let line = migrate(&self.key, &format!("{options} {pause}"));
        let moving = self.machine.spawn(&format!("echo 1000 > /proc/self/oom_score_adj; exec {line}"))?;
        wait_more(who, &said, before)?;
        Ok(moving)
    }

    /// Checks that only the machine with this card answers.
    fn answers(&self, who: &str) -> Result<()> {
        assert_eq!(self.switch.peer.sh(WHO_ANSWERS)?.trim(), who, "who answers for the machine's address");
        Ok(())
    }

    /// Checks that nothing runs: no machine answers, and none goes on by itself.
    fn stands_still(&self, moving: &mut Background) -> Result<()> {
        self.answers("")?;
        assert!(!moving.has_ended()?);
        nothing_wrong(&self.switch.peer)
    }

    /// Checks that the machine runs here, natively, with no error in the work of its peers.
    fn works(&self, machine: &Machine) -> Result<()> {
        machine.sh("until ! ls /sys/fs/cgroup | grep mercury; do sleep 0.1; done")?;
        machine.sh("until ! mercury status --json | grep '\"attached\"'; do sleep 0.1; done")?;
        is_well(machine, &self.id)?;
        for work in ["talk", "hear"] {
            comes_further(machine, work, count(machine, work)? + 5)?;
        }
        nothing_wrong(&self.switch.peer)
    }

    /// Checks that the source goes on as before, and no machine has run at the destination since it
    /// was switched on.
    fn goes_on(&self, arrivals: usize) -> Result<()> {
        self.works(&self.machine)?;
        self.answers("2")?;
        assert_eq!(times(&self.destination, GOES_ON), arrivals, "{}", self.destination.serial_log());
        Ok(())
    }

    /// Checks that the machine runs at the destination, and the source, if it had power, is off.
    fn has_moved(&self) -> Result<()> {
        self.machine.wait_shutdown(LIMIT)?;
        self.destination.wait_other(0)?;
        self.works(&self.destination)?;
        self.answers("3")?;
        assert!(!self.machine.serial_log().contains("has not moved"));
        Ok(())
    }

    /// Shows the destination's operator that the arrival is of no use.
    fn is_discarded(&self) -> Result<()> {
        let before = times(&self.destination, THROWN);
        type_in(&self.destination, "discard\r")?;
        wait_more(&self.destination, THROWN, before)
    }
}

/// Checks that the command has failed with a reason.
fn has_failed(moving: Background) -> Result<()> {
    let output = { moving }.wait(LIMIT)?;
    println!("{}", output.stderr);
    assert!(!output.success() && !output.stderr.is_empty(), "{}", output.stderr);
    Ok(())
}

/// Kills the moving process at every step. Up to the commit its undo process starts the machine
/// again. After the commit it keeps asking.
#[test]
#[ignore = "long"]
fn the_mover_may_be_killed_at_every_step() -> Result<()> {
    need_qemu()?;
    let scene = Scene::new()?.with_destination_at(At::Source("Offering"))?;
    for (step, rounds) in
        [("Offering", 0), ("Copying", 0), ("Stopping", 1), ("Instant", 0), ("Asking", 0), ("Recording", 0)]
    {
        let thrown = times(&scene.destination, THROWN);
        let moving = scene.moves_up_to(At::Source(step), &format!("--rounds {rounds}"))?;
        kill_a_process(&scene.machine)?;
        println!("{:?}", { moving }.wait(LIMIT)?);
        // The kernel reports in its log which process it has killed.
        scene.machine.sh("dmesg --clear")?;
        scene.goes_on(0)?;
        match step {
            // No page had come.
            "Offering" => {}
            // The undo process reports it when the machine is complete.
            _ => wait_more(&scene.destination, THROWN, thrown)?,
        }
    }
    let _gone = scene.moves_up_to(At::Source("InDoubt"), "--rounds 0")?;
    kill_a_process(&scene.machine)?;
    wait_more(&scene.machine, GUARD_ASKS, 0)?;
    scene.has_moved()
}

/// Pulls the cable at each step, and plugs it in again when each end has decided.
#[test]
#[ignore = "long"]
fn the_link_may_fail_at_every_step() -> Result<()> {
    need_qemu()?;
    let mut scene = Scene::new()?.with_destination_at(At::Source("Offering"))?;
    for step in ["Offering", "Copying", "Stopping", "Instant", "Asking"] {
        let thrown = times(&scene.destination, THROWN);
        let moving = scene.moves_up_to(At::Source(step), "--rounds 0")?;
        plug(&scene.destination, DESTINATION, false)?;
        has_failed(moving)?;
        scene.goes_on(0)?;
        plug(&scene.destination, DESTINATION, true)?;
        wait_more(&scene.destination, THROWN, thrown)?;
    }

    // The destination has promised that it never runs the machine, and is believed as soon as it is
    // heard.
    let [silent, answers] = [times(&scene.destination, SILENT), times(&scene.machine, NO_ANSWER)];
    let mut moving = scene.moves_up_to(At::Source("Recording"), "--rounds 0")?;
    plug(&scene.destination, DESTINATION, false)?;
    wait_more(&scene.machine, NO_ANSWER, answers)?;
    wait_more(&scene.destination, SILENT, silent)?;
    scene.stands_still(&mut moving)?;
    scene.is_discarded()?;
    plug(&scene.destination, DESTINATION, true)?;
    has_failed(moving)?;
    scene.goes_on(0)?;

    // The source's operator has seen that promise.
    let answers = times(&scene.machine, NO_ANSWER);
    let mut moving = scene.moves_up_to(At::Source("InDoubt"), "--rounds 0")?;
    plug(&scene.destination, DESTINATION, false)?;
    wait_more(&scene.machine, NO_ANSWER, answers)?;
    scene.stands_still(&mut moving)?;
    scene.is_discarded()?;
    type_in(&scene.machine, "resume\r")?;
    has_failed(moving)?;
    scene.goes_on(0)?;
    plug(&scene.destination, DESTINATION, true)?;

    // The machine runs at the destination, which cannot report that.
    scene = scene.with_destination_at(At::Destination("Starting"))?;
    let answers = times(&scene.machine, NO_ANSWER);
    let mut moving = scene.moves_up_to(At::Destination("Starting"), "--rounds 0")?;
    plug(&scene.destination, DESTINATION, false)?;
    wait_more(&scene.machine, NO_ANSWER, answers)?;
    wait_more(&scene.destination, GOES_ON, 0)?;
    scene.stands_still(&mut moving)?;
    plug(&scene.destination, DESTINATION, true)?;
    scene.has_moved()
}

/// Cuts the destination's power before the source has committed, which changes nothing.
#[test]
#[ignore = "long"]
fn the_destination_may_lose_power_at_every_step_before_the_commit() -> Result<()> {
    need_qemu()?;
    let mut scene = Scene::new()?;
    for at in [
        At::Destination("Checking"),
        At::Destination("Admitting"),
        At::Destination("Receiving"),
        At::Source("Stopping"),
        At::Source("Instant"),
        At::Destination("Verifying"),
        At::Destination("Ready"),
    ] {
        scene = scene.with_destination_at(at)?;
        let moving = scene.moves_up_to(at, "--rounds 0")?;
        scene.destination.power_cut()?;
        has_failed(moving)?;
        scene.goes_on(0)?;
    }
    Ok(())
}

/// Cuts the destination's power after the commit, when only an operator can know the result. The
/// source stands still, says what to check, and takes the operator's word.
#[test]
#[ignore = "long"]
fn the_destination_may_lose_power_at_every_step_after_the_commit() -> Result<()> {
    need_qemu()?;
    let mut scene = Scene::new()?;
    for at in [
        At::Source("Recording"),
        At::Source("InDoubt"),
        At::Destination("Recording"),
        At::Destination("Starting"),
        At::Arrived("Arrived"),
        At::Arrived("Running"),
    ] {
        scene = scene.with_destination_at(at)?;
        let answers = times(&scene.machine, NO_ANSWER);
        let mut moving = scene.moves_up_to(at, "--rounds 0")?;
        scene.destination.power_cut()?;
        wait_more(&scene.machine, NO_ANSWER, answers)?;
        scene.stands_still(&mut moving)?;
        if at == At::Arrived("Running") {
            // The machine has acted since the instant, and must not be set back.
            type_in(&scene.machine, "abandon\r")?;
            scene.machine.wait_shutdown(LIMIT)?;
            assert!(!scene.machine.serial_log().contains("has not moved"));
            break;
        }
        if at == At::Destination("Recording") {
            // The destination has power again, and knows nothing.
            let forgot = times(&scene.machine, FORGOT);
            scene = scene.with_destination_at(at)?;
            wait_more(&scene.machine, FORGOT, forgot)?;
            scene.stands_still(&mut moving)?;
        }
        let arrivals = times(&scene.destination, GOES_ON);
        type_in(&scene.machine, "resume\r")?;
        has_failed(moving)?;
        scene.goes_on(arrivals)?;
    }
    Ok(())
}

/// Cuts the source's power at every step. Up to the commit nothing runs at the destination, neither
/// by itself nor on an operator's word.
#[test]
#[ignore = "long"]
fn the_source_may_lose_power_at_every_step() -> Result<()> {
    need_qemu()?;
    let mut scene = Scene::new()?.with_destination_at(At::Source("Offering"))?;
    for step in ["Offering", "Copying", "Stopping", "Instant", "Asking", "Recording"] {
        let [comes, thrown, silent] = [COMES, THROWN, SILENT].map(|text| times(&scene.destination, text));
        let _gone = scene.moves_up_to(At::Source(step), "--rounds 0")?;
        scene.machine.power_cut()?;
        // The source has no power at this moment. With power it would answer that it knows no such
        // connection.
        match step {
            "Offering" => assert_eq!(times(&scene.destination, COMES), comes),
            // The destination gives up by itself, when nothing has come for long.
            "Copying" => {
                wait_more(&scene.destination, "discarded: the source was silent for too long", 0)?;
            }
            "Recording" => {
                wait_more(&scene.destination, SILENT, silent)?;
                scene.is_discarded()?;
            }
            _ => scene.is_discarded()?,
        }
        scene = scene.with_source_again()?;
        assert!(step == "Offering" || times(&scene.destination, THROWN) == thrown + 1);
        scene.goes_on(0)?;
    }
    // The source had committed, and the destination's operator knows that.
    let silent = times(&scene.destination, SILENT);
    let _gone = scene.moves_up_to(At::Source("InDoubt"), "--rounds 0")?;
    scene.machine.power_cut()?;
    wait_more(&scene.destination, SILENT, silent)?;
    scene.answers("")?;
    type_in(&scene.destination, "adopt\r")?;
    scene.has_moved()?;

    // The machine runs at the destination by then.
    scene = scene.with_source_again()?.with_destination_at(At::Source("GivenUp"))?;
    let _gone = scene.moves_up_to(At::Source("GivenUp"), "--rounds 0")?;
    scene.machine.power_cut()?;
    thread::sleep(Duration::from_secs(1));
    scene.has_moved()?;
    scene.destination.check_next_attach()
}

/// Takes all memory of the destination's restore environment, while the machine comes and when all
/// of it is there. The receiver is killed, the source goes on, and another receiver waits.
#[test]
#[ignore = "long"]
fn the_destination_may_run_out_of_memory() -> Result<()> {
    need_qemu()?;
    let mut scene = Scene::new()?;
    for step in ["Receiving", "Verifying"] {
        let before = times(&scene.destination, WAITS);
        let destination =
            scene.destination.start_destination(&scene.small.with(&format!("mercury.eat-at={step}")))?;
        wait_more(&destination, WAITS, before)?;
        scene = Scene { destination, ..scene };
        let [killed, waits] = [KILLED, WAITS].map(|text| times(&scene.destination, text));
        has_failed(scene.machine.spawn(&migrate(&scene.key, "--rounds 0"))?)?;
        scene.goes_on(0)?;
        wait_more(&scene.destination, KILLED, killed)?;
        wait_more(&scene.destination, WAITS, waits)?;
        let said = scene.destination.serial_log();
        assert!(said.contains("Out of memory: Killed process") && !said.contains("Kernel panic"), "{said}");
    }
    Ok(())
}

/// A program that writes to a file on request, and needs no answer of the file's server.
const WRITES: &str = "exec python3 -c 'import os
file = os.open(\"/written\", os.O_WRONLY | os.O_CREAT)
os.read(0, 1)
os.write(file, bytes(1 << 16))
os.read(0, 1)'";

/// Calls a move off even though a file server does not answer. Writes to files have to be on their
/// server before the machine stands still.
#[test]
#[ignore = "long"]
fn a_server_that_does_not_answer_ends_no_command() -> Result<()> {
    need_qemu()?;
    let scene = Scene::new()?.with_destination_at(At::Source("Stopping"))?;
    let writes = scene.machine.spawn(WRITES)?;
    let mut moving = scene.moves_up_to(At::Source("Stopping"), "--rounds 0")?;
    plug(&scene.machine, SOURCE, false)?;
    // Nothing can have taken that file away from the machine.
    writes.write_stdin(b"\n")?;
    thread::sleep(Duration::from_secs(8));
    assert!(!moving.has_ended()?, "it waits for what was written");
    moving.kill(2)?;
    for _ in 0..100 {
        if moving.errors_so_far()?.contains("interrupted") {
            break;
        }
        thread::sleep(Duration::from_millis(200));
    }
    let said = moving.errors_so_far()?;
    plug(&scene.machine, SOURCE, true)?;
    assert!(said.contains("interrupted: the machine has not moved"), "{said}");
    has_failed(moving)?;
    writes.close_stdin()?;
    scene.goes_on(0)
}
