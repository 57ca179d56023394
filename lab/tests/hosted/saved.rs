//! Machines that are saved into a file and go on from it.

use std::{collections::BTreeSet, process::Output};

use super::*;

const INIT: &str = "#!/bin/sh\nn=0\nwhile :; do n=$((n + 1)); echo count $n; sleep 0.1; done\n";

/// Time goes on while a machine is saved, and its kernel takes that for a stall.
const QUIET: &str = "rcupdate.rcu_cpu_stall_suppress=1 nosoftlockup";

/// Returns the numbers that a machine has counted, in their order.
fn counted(log: &str) -> Vec<u32> {
    log.lines().filter_map(|line| line.strip_prefix("count ")?.parse().ok()).collect()
}

fn save(place: &Place) -> Command {
    let mut command = as_nobody(&place.command);
    command.args(["hosted", "save", "control", "saved"]).current_dir(&place.directory);
    command
}

/// Returns the command by which a machine goes on, from a file.
fn restore(place: &Place, file: &str, isolation: &str, mib: &str) -> Command {
    let mut command = as_nobody(&place.command);
    command
        .args(["hosted", "restore", file, "--kernel"])
        .arg(&place.kernel)
        .args(["--memory", mib, isolation, "--disk", "disk"]);
    command.args(card()).args(["--control", "control"]).current_dir(&place.directory);
    command
}

/// Returns the words that give a machine a network card, if this host can have one.
fn card() -> &'static [&'static str] {
    let route = Command::new("ip").args(["route", "show", "default"]).output();
    let has_route = route.is_ok_and(|output| !output.stdout.is_empty());
    if has_route && host::find_program("passt").is_some() { &["--net", "passt"] } else { &[] }
}

fn refused(output: &Output, word: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(word), "{word}: {said}");
}

/// Kills the saving program at some moments. The machine counts on, or all of it is in the file.
fn kill_at_moments(place: &Place, machine: &mut Machine) {
    for milliseconds in [1, 5, 10, 20, 40, 60, 80] {
        let mut saving = save(place).spawn().expect("the command");
        thread::sleep(Duration::from_millis(milliseconds));
        let _ = saving.kill();
        if saving.wait().expect("its end").success() {
            return;
        }
        let before = counted(&machine.said()).len();
        let end = Instant::now() + patient(Duration::from_secs(20));
        while counted(&machine.said()).len() <= before {
            if machine.child.try_wait().expect("its state").is_some() {
                let part = place.directory.join("saved.part");
                fs::rename(part, place.directory.join("saved")).expect("all of the machine");
                return;
            }
            assert!(Instant::now() < end, "{milliseconds} ms: {}", machine.said());
            thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(save(place).status().expect("the command").success(), "{}", machine.said());
}

/// Changes bytes of the file, and cuts it short: each time the restore is refused.
fn damage(place: &Place, isolation: &str) {
    let whole = fs::read(place.directory.join("saved")).expect("the file");
    for at in [0, 8, 30, 1000, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        place.file("damaged", &damaged);
        let word = if at < 8 { "no saved machine" } else { "is damaged" };
        refused(&restore(place, "damaged", isolation, "128").output().expect("the command"), word);
    }
    place.file("damaged", &whole[..whole.len() - 4096]);
    refused(&restore(place, "damaged", isolation, "128").output().expect("the command"), "is damaged");
    refused(&restore(place, "saved", isolation, "256").output().expect("the command"), "--memory 128");
    let disk = fs::File::options().write(true).open(place.directory.join("disk")).expect("the disk");
    let dated = disk.metadata().and_then(|of| of.modified()).expect("its date");
    disk.set_modified(dated + Duration::from_millis(1)).expect("another date");
    refused(&restore(place, "saved", isolation, "128").output().expect("the command"), "has changed");
    disk.set_modified(dated).expect("its date");
    let other = ISOLATIONS.into_iter().find(|one| *one != isolation).expect("the other one");
    refused(&restore(place, "saved", other, "128").output().expect("the command"), isolation);
}

#[test]
fn a_saved_machine_counts_on() -> Result<()> {
    let place = Place::with("saved", &previrtualization::build(Release::Bookworm, Flavour::Tiny)?)?;
    fs::set_permissions(&place.directory, fs::Permissions::from_mode(0o777)).expect("its rights");
    let tree = Image::ensure(Release::Bookworm)?.tree();
    let sleep = tree.join("usr/bin/sleep");
    let disk = place.file("disk", &[0; 4096]);
    fs::set_permissions(disk, fs::Permissions::from_mode(0o666)).expect("its rights");
    let archive = place.file("initramfs", &archive_with(&tree, INIT, &[("bin/sleep", &sleep)]));
    for isolation in ISOLATIONS {
        let mut command = place.run();
        command.arg("--initramfs").arg(&archive).args(["--memory", "128", isolation, "--disk", "disk"]);
        command.args(card()).args(["--control", "control"]).args(["--append", QUIET]);
        let mut machine = Machine::start(&place, command.current_dir(&place.directory));
        machine.wait_for("count 5\n");
        kill_at_moments(&place, &mut machine);
        let before = machine.end(HALTED);
        assert!(before.contains("saved"), "{before}");
        damage(&place, isolation);
        let last = *counted(&before).last().expect("a number");
        let mut again = Machine::start(&place, &mut restore(&place, "saved", isolation, "128"));
        again.wait_for(&format!("count {}\n", last + 10));
        let after = counted(&again.said());
        assert_well(&again.said());
        let all: BTreeSet<u32> = counted(&before).into_iter().chain(after.iter().copied()).collect();
        assert!(after[0] == last + 1 && all.len() as u32 == *after.last().expect("a number"), "{after:?}");
        drop(again);
        fs::remove_file(place.directory.join("saved")).expect("its end");
    }
    Ok(())
}
