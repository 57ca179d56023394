//! A machine may end at any moment, with its database at work. What it leaves is what a power cut leaves: the file system is whole
//! after its journal, and the database comes up again with all that it had said to be done.

use super::*;

const DEATHS: usize = 50;
/// The host's control groups of memory, of both versions: where they are, and the files with what is used and allowed.
const GROUPS: [(&str, &str, &str); 2] = [
    ("/sys/fs/cgroup/memory", "memory.usage_in_bytes", "memory.limit_in_bytes"),
    ("/sys/fs/cgroup", "memory.current", "memory.max"),
];

/// What a machine dies of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    /// SIGKILL while the database works.
    Kill,
    /// SIGKILL at some moment from the start on, before the database has recovered perhaps.
    Early,
    /// The guest's kernel panics.
    Panic,
    /// The host has no memory left for it.
    Memory,
}

impl Death {
    fn of(number: usize) -> Self {
        [Self::Kill, Self::Early, Self::Panic, Self::Memory, Self::Kill][number % 5]
    }
}

/// A control group of its own.
struct Group {
    directory: PathBuf,
    used: &'static str,
    most: &'static str,
}

impl Group {
    fn new() -> Self {
        let (parent, used, most) = GROUPS
            .into_iter()
            .find(|(parent, used, _)| {
                // The root of the second version has no such file, but its groups have.
                Path::new(parent).join(used).exists() || Path::new(parent).join("cgroup.controllers").exists()
            })
            .expect("control groups of memory");
        let directory = Path::new(parent).join(format!("mercury-deaths-{}", std::process::id()));
        fs::create_dir(&directory).expect("a control group");
        assert!(directory.join(used).exists(), "the host has control groups, but not of memory");
        Self { directory, used, most }
    }

    fn start(&self, place: &Place, command: &Command) -> Machine {
        let mut within = Command::new("sh");
        within.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.directory);
        within.arg(command.get_program()).args(command.get_args());
        Machine::start(place, &mut within)
    }

    /// Allows no more than what is used, and a little.
    fn close(&self) {
        const LITTLE: u64 = 256 << 10;
        let used: u64 = fs::read_to_string(self.directory.join(self.used))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .expect("a number");
        fs::write(self.directory.join(self.most), (used + LITTLE).to_string()).expect("a limit");
    }

    fn open(&self) {
        let all = if self.most == "memory.max" { "max" } else { "-1" };
        fs::write(self.directory.join(self.most), all).expect("no limit");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}

const DATABASE: &str = "mkdir -p /dev/shm; mount -t tmpfs t /dev/shm; mount -t tmpfs t /run; ip link set lo up; \
    install -d -o postgres /run/postgresql; pg_ctlcluster 15 main start; \
    until psql -q -c 'select 1' bench >/dev/null 2>&1; do sleep 0.1; done; echo recov''ered";

/// All of what every transaction keeps the same, and the marks that are there, each of which was one.
const LOOK: &str = "psql -qtA bench -c 'create table if not exists mark (death int, number int)' \
     -c 'select (select sum(abalance) from pgbench_accounts) = (select sum(bbalance) from pgbench_branches), \
     (select sum(abalance) from pgbench_accounts) = (select sum(tbalance) from pgbench_tellers), \
     (select sum(abalance) from pgbench_accounts) = (select coalesce(sum(delta), 0) from pgbench_history)' \
     -c \"select 'has', death, max(number), count(*) from mark group by death order by death\"; echo lo''oked";

/// Two clients at work, and a third one that says what has been committed.
fn work(number: usize) -> String {
    format!(
        "pgbench -n -c 2 -T 600 bench >/dev/null 2>&1 & \
         for n in $(seq 100000); do echo \"insert into mark values ({number}, $n);\"; echo \"\\echo mark''ed {number} $n\"; done \
         | psql -q bench &"
    )
}

/// So many of a machine's processes are left.
fn wait_for_its_end(place: &Place, machine: &mut Machine) {
    machine.child.wait().expect("its end");
    let start = Instant::now();
    while !processors::processes(place).is_empty() {
        assert!(start.elapsed() < PATIENCE, "processes are left");
        thread::sleep(Duration::from_millis(50));
    }
}

/// What the console has said of marks, and what the database has of an earlier death.
fn numbers(log: &str, prefix: &str, separator: char) -> Vec<(usize, usize)> {
    let of = |line: &str| {
        let mut words =
            line.strip_prefix(prefix)?.split(separator).filter_map(|word| word.trim().parse().ok());
        Some((words.next()?, words.next()?))
    };
    log.lines().filter_map(of).collect()
}

#[test]
#[ignore = "long"]
fn fifty_deaths_harm_neither_the_file_system_nor_the_database() -> Result<()> {
    let place = Place::new("deaths")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let group = Group::new();
    // Committed by death, as the console said.
    let mut promised: Vec<(usize, usize)> = Vec::new();
    let mut moment = 0x2545_F491_4F6C_DD1D_u64;
    for number in 0..=DEATHS {
        let death = Death::of(number);
        let (cpus, isolation) = (["1", "2"][number % 2], ISOLATIONS[number / 2 % 2]);
        let words =
            ["--memory", "512", "--cpus", cpus, isolation, "--append", "root=/dev/vda rw init=/bin/sh"];
        let mut command = place.run();
        command.arg("--disk").arg(&disk).args(words);
        let mut machine = group.start(&place, &command);
        moment = moment.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let later = |most: u64| Duration::from_millis((moment >> 33) % most);
        if death == Death::Early && number < DEATHS {
            thread::sleep(later(6000));
            let _ = machine.child.kill();
            wait_for_its_end(&place, &mut machine);
        } else {
            machine.wait_for("Run /bin/sh as init");
            machine.type_line(SHELL);
            machine.wait_for("ready\n");
            machine.type_line(DATABASE);
            machine.wait_for("recovered\n");
            machine.type_line(LOOK);
            machine.wait_for("looked\n");
            let log = machine.said();
            assert!(log.contains("\nt|t|t\n"), "before death {number}: {log}");
            let found: Vec<(usize, usize)> = numbers(&log, "has|", '|');
            for (earlier, last) in &promised {
                let kept = found.iter().find(|(one, _)| one == earlier).map_or(0, |(_, most)| *most);
                assert!(kept >= *last, "death {earlier}: {last} was promised, {kept} is there: {log}");
            }
            if number == DEATHS {
                machine.type_line("pg_ctlcluster 15 main stop; mount -o remount,ro /dev/vda /; poweroff -f");
                assert_well(&machine.end(HALTED));
                break;
            }
            machine.type_line(&work(number));
            machine.wait_for(&format!("marked {number} 3\n"));
            thread::sleep(later(2000));
            match death {
                Death::Panic => machine.type_line("exec false"),
                Death::Memory => group.close(),
                Death::Kill | Death::Early => machine.child.kill().expect("it is killed"),
            }
            wait_for_its_end(&place, &mut machine);
            group.open();
            let log = machine.said();
            assert_eq!(log.contains("Attempted to kill init"), death == Death::Panic, "{number}: {log}");
            // A line that was being written says nothing.
            let whole = &log[..log.rfind('\n').map_or(0, |at| at + 1)];
            let marks = numbers(whole, "marked ", ' ');
            promised.extend(marks.iter().rfind(|(of, _)| *of == number));
        }
        let repaired = host::as_root("e2fsck").arg("-fp").arg(&disk).output().expect("e2fsck");
        assert!(matches!(repaired.status.code(), Some(0 | 1)), "after {death:?} {number}: {repaired:?}");
        let mut check = Command::new("e2fsck");
        host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(&disk))?;
        eprintln!("death {number}, {death:?}, {cpus}, {isolation}: {:?}", promised.last());
    }
    assert!(promised.len() >= DEATHS * 4 / 5, "{promised:?}");
    Ok(())
}
