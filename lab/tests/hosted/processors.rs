//! Machines with two processors and more.

use super::*;

/// Work for two processors, with a check of its results.
const WORK: &str = "for n in 1 2 3 4; do (for m in 1 2; do xz -1 -c /usr/bin/dash | xz -dc | cmp - \
/usr/bin/dash || echo BAD; done) & done; wait; for n in 1 2 3; do (for m in $(seq 30); do /bin/true || echo \
BAD; done) & done; wait; for n in 1 2 3 4; do (head -c 1310720 /dev/urandom > /root/file$n; sha256sum \
/root/file$n > /root/sum$n; sync; sha256sum -c /root/sum$n > /dev/null || echo BAD) & done; wait; \
echo work''ed";

/// A script that takes a processor offline and brings it back.
const GO_AND_COME: &str = "cd /sys/devices/system/cpu/cpu1; echo 0 > online; echo with''out $(nproc); \
     echo 1 > online; taskset -c 1 /bin/true; echo to''ok $?; echo wi''th $(nproc); cd /";

fn work_on_two(isolation: &str) -> Result<()> {
    let place = Place::new("processors")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut machine = shell_on_disk(&place, &disk, &["--cpus", "2", isolation]);
    machine.type_line("echo has $(nproc)");
    machine.wait_for("has 2\n");
    machine.type_line(WORK);
    machine.wait_for("worked\n");
    machine.type_line("cat > /root/shared.py <<'E''ND'");
    include_str!("shared.py").lines().for_each(|line| machine.type_line(line));
    machine.type_line("END");
    machine.type_line("python3 /root/shared.py 2>&1; echo sha''red $?");
    machine.wait_for("shared 0\n");
    machine.type_line("grep -E 'LOC|RES|CAL|TLB' /proc/interrupts");
    machine.type_line(GO_AND_COME);
    machine.wait_for("with 2\n");
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    for line in ["mapped True []", "forked {0}", "locked 20000", "without 1", "took 0"] {
        assert!(log.contains(&format!("{line}\n")), "{line}: {log}");
    }
    assert!(!log.contains("BAD\n"), "{log}");
    // Each processor has been told by the other one to flush translations.
    let counts = log.lines().find_map(|line| line.trim().strip_prefix("TLB:")).expect("a line of counters");
    let counts: Vec<u64> = counts.split_whitespace().map_while(|word| word.parse().ok()).collect();
    assert!(counts.len() == 2 && counts.iter().all(|count| *count > 10), "{counts:?}");
    assert_well(&log);
    let mut check = Command::new("e2fsck");
    host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(&disk))
}

#[test]
#[ignore = "long"]
fn two_processors_work_together() -> Result<()> {
    work_on_two(ISOLATIONS[0])
}

#[test]
#[ignore = "long"]
fn two_processors_work_together_with_programs_in_processes_of_their_own() -> Result<()> {
    work_on_two(ISOLATIONS[1])
}

#[test]
#[ignore = "long"]
fn postgresql_works_on_two_processors() -> Result<()> {
    use_postgresql(&[ISOLATIONS[0], "--cpus", "2"])
}

/// Comes up fifty times with two processors, and each fifth time with four, of which one goes and
/// comes back.
#[test]
#[ignore = "long"]
fn processors_come_up_fifty_times() -> Result<()> {
    let place = Place::new("fifty")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let disk = format!("{},ro", disk.display());
    for number in 0..50 {
        let cpus = if number % 5 == 4 { "4" } else { "2" };
        let words = ["--cpus", cpus, ISOLATIONS[number % 2], "--append", "root=/dev/vda ro init=/bin/sh"];
        let mut machine = Machine::start(&place, place.run().args(["--disk", &disk]).args(words));
        machine.wait_for("Run /bin/sh as init");
        machine.type_line(SHELL);
        machine.wait_for("ready\n");
        machine.type_line(GO_AND_COME);
        machine.wait_for(&format!("with {cpus}\n"));
        machine.type_line("poweroff -f");
        let log = machine.end(HALTED);
        let left = cpus.parse::<u32>().expect("a number") - 1;
        assert!(log.contains(&format!("without {left}\n")) && log.contains("took 0\n"), "{number}: {log}");
        assert_well(&log);
    }
    Ok(())
}

/// Returns the processes of the machine, which has the directory's name on its command line.
pub fn processes(place: &Place) -> Vec<i32> {
    let name = place.directory.to_str().expect("a name");
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_one = |number: &i32| {
        fs::read(format!("/proc/{number}/cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(name))
    };
    numbers.filter(is_one).collect()
}

/// Returns the process of a processor that is not the first, or of an address space.
pub fn other_process(machine: &Machine) -> i32 {
    let first = machine.child.id();
    let children = fs::read_to_string(format!("/proc/{first}/task/{first}/children")).expect("its children");
    let mut numbers = children.split_whitespace().filter_map(|number| number.parse().ok());
    let is_other = |number: &i32| {
        let name = fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
        ["mercury-cpu\n", "mercury-space\n"].contains(&name.as_str())
    };
    numbers.find(is_other).expect("another process")
}

/// Ends the machine, with a message, when a processor's process is killed. A machine that is killed
/// leaves no process.
#[test]
#[ignore = "long"]
fn processors_end_together() -> Result<()> {
    let place = Place::new("together")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    for isolation in ISOLATIONS {
        for of_the_first in [false, true] {
            let mut machine = shell_on_disk(&place, &disk, &["--cpus", "2", isolation]);
            let first = machine.child.id().cast_signed();
            signal(if of_the_first { first } else { other_process(&machine) }, Signal::KILL);
            if of_the_first {
                machine.child.wait().expect("its end");
            } else {
                let log = machine.end(BROKEN);
                assert!(log.contains(CHILD_GONE), "{log}");
            }
            let start = Instant::now();
            while !processes(&place).is_empty() {
                assert!(start.elapsed() < patient(LIMIT), "{:?} are left", processes(&place));
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
    Ok(())
}

/// Forks and pipes on all processors, so that the processors wait for each other.
const BUSY: &str =
    "for n in 1 2 3; do (while :; do echo x | cat > /dev/null; done) & done; sleep 1; echo bu''sy";

/// Ends the machine even though a processor waits for a dead one, perhaps with interrupts off.
#[test]
#[ignore = "long"]
fn processors_end_together_though_one_waits_for_the_dead() -> Result<()> {
    const TIMES: usize = 8;
    let place = Place::new("waiting")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    for number in 0..TIMES {
        let mut machine = shell_on_disk(&place, &disk, &["--cpus", "2", ISOLATIONS[number % 2]]);
        machine.type_line(BUSY);
        machine.wait_for("busy\n");
        let other = other_process(&machine);
        signal(other, Signal::STOP);
        thread::sleep(Duration::from_millis(500));
        signal(other, Signal::KILL);
        let log = machine.end(BROKEN);
        assert!(log.contains(CHILD_GONE), "{log}");
    }
    Ok(())
}
