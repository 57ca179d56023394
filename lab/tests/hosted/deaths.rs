//! Deaths of a machine at any moment. The machine leaves what a power cut leaves. Its file system
//! is whole after a replay of the journal, and has all that programs were told is on the disk. Its
//! database comes up again, with all transactions that it has confirmed.
//!
//! `MERCURY_DEATHS=10` makes ten deaths in place of fifty. `MERCURY_DEATHS_SEED` repeats a run's
//! moments.

use mercury_lab::moments::Moments;

use super::*;

const DEATHS: u32 = 50;
/// The longest time after programs have begun their work.
const LONGEST: Duration = Duration::from_secs(3);
/// The host's control groups of memory, of both versions: their path, and the files with the memory
/// in use, the limit, and the number of kills for want of memory.
const GROUPS: [(&str, &str, &str, &str); 2] = [
    ("/sys/fs/cgroup/memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"),
    ("/sys/fs/cgroup", "memory.current", "memory.max", "memory.events"),
];

/// A cause of a machine's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    /// SIGKILL while programs write.
    Kill,
    /// SIGKILL at any moment from the start on, when file system and database may not have
    /// recovered yet.
    Early,
    /// SIGKILL of the second processor's process, or of an address space's.
    Other,
    /// A panic of the guest's kernel.
    Panic,
    /// An end of the host's memory for the machine.
    Memory,
}

/// The way of a machine from its start to its death.
#[derive(Clone, Copy, Debug)]
struct Life {
    number: usize,
    death: Death,
    cpus: &'static str,
    isolation: &'static str,
    has_database: bool,
}

impl Life {
    fn new(number: usize) -> Self {
        use Death::*;
        let death = [Kill, Other, Panic, Memory, Early][number % 5];
        // On one processor, only address spaces without isolation have processes with a telling
        // name.
        let cpus = match death {
            Other if number % 20 == 11 => "1",
            Other => "2",
            _ if number / 2 % 2 == 1 => "2",
            _ => "1",
        };
        Self {
            number,
            death,
            cpus,
            isolation: ISOLATIONS[number / 5 % 2],
            has_database: number.is_multiple_of(3),
        }
    }

    fn command(&self, place: &Place, disk: &Path) -> Command {
        let words = ["--cpus", self.cpus, self.isolation, "--append", "root=/dev/vda rw init=/bin/sh"];
        let mut command = place.run();
        command.arg("--disk").arg(disk).args(["--memory", "512"]).args(words);
        command
    }
}

/// A control group of its own.
struct Group {
    directory: PathBuf,
    used: &'static str,
    most: &'static str,
    killed: &'static str,
}

impl Group {
    /// Makes a group. Returns `None` if the host has none, or does not let the test make one.
    fn new() -> Option<Self> {
        GROUPS.into_iter().find_map(|(parent, used, most, killed)| {
            let directory = Path::new(parent).join(format!("mercury-deaths-{}", std::process::id()));
            fs::create_dir(&directory).ok()?;
            let group = Self { directory, used, most, killed };
            group.directory.join(used).exists().then_some(group)
        })
    }

    /// Returns the same command in this group.
    fn within(&self, command: &Command) -> Command {
        let mut within = Command::new("sh");
        within.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.directory);
        within.arg(command.get_program()).args(command.get_args());
        within
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.directory.join(name)).expect("a file of the control group")
    }

    /// Lowers the limit step by step, until the host can take nothing back any more.
    fn close(&self) {
        const STEP: u64 = 1 << 20;
        loop {
            let used: u64 = self.read(self.used).trim().parse().expect("a number");
            let less = used.saturating_sub(STEP);
            if less == 0 || fs::write(self.directory.join(self.most), less.to_string()).is_err() {
                return;
            }
        }
    }

    fn open(&self) {
        let all = if self.most == "memory.max" { "max" } else { "-1" };
        fs::write(self.directory.join(self.most), all).expect("no limit");
    }

    /// Returns how often the host has killed one of the group's processes.
    fn kills(&self) -> u64 {
        let text = self.read(self.killed);
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.and_then(|count| count.parse().ok()).expect("a count of kills")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}

/// Bytes of a record, which do not divide a block.
const RECORD: usize = 1000;
/// Two programs that append records, and one that writes a file anew and renames it to the old
/// one's name. They print on the console what is on the disk, each in one piece.
const WRITERS: &str = r#"
import itertools, os, sys
life = sys.argv[1]
directory = os.open('/deaths', os.O_RDONLY)
def record(number): return b'%08d ' % number * 111 + b'\n'
def tell(writer, number): os.write(1, b'told %s %d %d.\n' % (life.encode(), writer, number))
def open_new(name): return os.open(f'/deaths/{life}-{name}', os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
def append(writer):
    file = open_new(writer)
    os.fsync(directory)
    for number in itertools.count():
        assert os.write(file, record(number)) == 1000
        os.fsync(file)
        tell(writer, number)
def replace(writer):
    for number in itertools.count():
        file = open_new('new')
        assert os.write(file, record(number)) == 1000
        os.fsync(file)
        os.close(file)
        os.rename(f'/deaths/{life}-new', f'/deaths/{life}-{writer}')
        os.fsync(directory)
        tell(writer, number)
for writer, work in enumerate([append, append, replace]):
    if os.fork() == 0: work(writer)
os.wait()
"#;
/// The writers that append records; the last one does not.
const APPENDING: [usize; 2] = [0, 1];
const REPLACING: usize = 2;

/// A ledger: money goes from account to account, and each payment is one transaction.
const LEDGER: &str = "\
create table if not exists account (id int primary key, balance bigint not null);
insert into account select id, 1000 from generate_series(0, 19) id on conflict do nothing;
create table if not exists paid (life int, number int, source int, target int, amount bigint);
create or replace function pay(life int, number int, source int, target int, amount bigint)
returns text language sql as $$
insert into paid values (life, number, source, target, amount);
update account set balance = balance - amount where id = source;
update account set balance = balance + amount where id = target;
select format('paid %s %s.', life, number)
$$;
";
/// A query for balances that differ from the payments, and for the payments: none twice, and none
/// left out.
const CHECK: &str = "\
select 'wrong', count(*) from account where balance != 1000 \
- coalesce((select sum(amount) from paid where source = id), 0)
+ coalesce((select sum(amount) from paid where target = id), 0);
select 'sums', sum(balance) from account;
select 'has', life, count(*), count(distinct number), max(number) from paid group by life order by life;
";
/// A program that makes payments without end, and prints each one that the database has confirmed.
///
/// A payment is one message there and one back, and its amount is known long before. A database
/// that confirms too early and writes a fraction of a second later (`synchronous_commit=off`) would
/// so have confirmed many payments that are lost.
const PAY: &str = r#"awk -v life="$1" 'BEGIN {
	for (number = 0; ; number++)
		print "select pay(" life ", " number ", " number % 20 ", " (number * 7 + 3) % 20 ", " number % 9 + 1 ");"
}' | psql -qtA -v ON_ERROR_STOP=1 bench
"#;
const START_DATABASE: &str = "mkdir -p /dev/shm; mount -t tmpfs t /dev/shm; mount -t tmpfs t /run; ip link \
    set lo up; install -d -o postgres /run/postgresql; pg_ctlcluster 15 main start; echo start''ed $?";
const LOOK_AT_LEDGER: &str = "psql -q -v ON_ERROR_STOP=1 bench < /deaths/ledger.sql 2>&-; \
    psql -qtA bench < /deaths/look.sql; echo look''ed $?";

/// Puts the programs onto the disk.
fn install(place: &Place, disk: &Path) -> Result<()> {
    let mut commands = String::from("mkdir /deaths\n");
    for (name, text) in
        [("writers.py", WRITERS), ("ledger.sql", LEDGER), ("look.sql", CHECK), ("pay.sh", PAY)]
    {
        let file = place.file(name, text.as_bytes());
        commands += &format!("write {} /deaths/{name}\n", file.display());
    }
    let script = place.file("install", commands.as_bytes());
    let mut command = Command::new("debugfs");
    host::run("programs onto the disk", "hosted-install", command.arg("-w").arg("-f").arg(script).arg(disk))
}

/// Returns the lines of the machine's output, without an unfinished one and without lines in which
/// its kernel interrupted.
fn lines(log: &str) -> Vec<&str> {
    let told = log.split("Kernel panic").next().unwrap_or(log);
    told[..told.rfind('\n').map_or(0, |at| at + 1)].lines().collect()
}

/// Returns the number of the last line with this prefix and a full stop. The numbers are in order
/// from the first on.
fn last_number(log: &str, prefix: &str) -> Option<u64> {
    let number = |line: &&str| line.strip_prefix(prefix)?.strip_suffix('.')?.parse().ok();
    let numbers: Vec<u64> = lines(log).iter().filter_map(number).collect();
    assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "{prefix}: {log}");
    numbers.last().copied()
}

/// The data that a machine has reported to be on its disk.
#[derive(Debug)]
struct Promise {
    life: usize,
    /// The last record of each writer.
    records: [Option<u64>; 3],
    /// The last payment.
    paid: Option<u64>,
}

impl Promise {
    fn of(life: usize, log: &str) -> Self {
        let record = |writer| last_number(log, &format!("told {life} {writer} "));
        Self { life, records: [0, 1, 2].map(record), paid: last_number(log, &format!("paid {life} ")) }
    }

    /// Checks that the file system has the records.
    fn check_records(&self, disk: &Path) {
        let record = |number: u64| format!("{number:08} ").repeat(111) + "\n";
        for writer in APPENDING {
            let Some(last) = self.records[writer] else { continue };
            let bytes = content(disk, self.life, writer);
            let there = bytes.len() / RECORD;
            assert!(there as u64 > last, "life {}: {writer} has told {last}, {there} are there", self.life);
            for (number, bytes) in (0..=last).zip(bytes.chunks(RECORD)) {
                assert!(bytes == record(number).as_bytes(), "life {}: {writer}: {number}", self.life);
            }
        }
        if let Some(last) = self.records[REPLACING] {
            let bytes = content(disk, self.life, REPLACING);
            let number = String::from_utf8_lossy(&bytes[..bytes.len().min(8)]).parse().unwrap_or(0);
            assert!(number >= last && bytes == record(number).as_bytes(), "life {}: {last}", self.life);
        }
    }

    /// Checks that the database has the payments. The database was asked in another life.
    fn check_payments(&self, log: &str) {
        let Some(last) = self.paid else { return };
        let prefix = format!("has|{}|", self.life);
        let found = log.lines().find_map(|line| line.strip_prefix(&prefix));
        let numbers: Vec<u64> =
            found.unwrap_or("").split('|').filter_map(|number| number.parse().ok()).collect();
        let [count, different, most] = numbers[..] else {
            panic!("life {} has told {last}: {log}", self.life)
        };
        assert!(most >= last && count == most + 1 && different == count, "life {}: {last}: {log}", self.life);
    }
}

fn content(disk: &Path, life: usize, writer: usize) -> Vec<u8> {
    let request = format!("cat /deaths/{life}-{writer}");
    Command::new("debugfs").args(["-R", &request]).arg(disk).output().expect("debugfs").stdout
}

/// Waits until a machine has printed a text. Returns true if that was before a moment, if there is
/// one.
fn reach(machine: &mut Machine, text: &str, until: Option<Instant>) -> bool {
    let start = Instant::now();
    while !machine.said().contains(text) {
        if until.is_some_and(|until| Instant::now() >= until) {
            return false;
        }
        let ended = machine.child.try_wait().expect("its state");
        assert!(
            ended.is_none() && start.elapsed() < patient(LIMIT),
            "no {text:?}: {ended:?}\n{}",
            machine.said()
        );
        thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Starts a machine's programs and its database, whose ledger must keep all promises. Returns true
/// if that was before a moment, if there is one.
fn come_up(machine: &mut Machine, life: Life, promises: &[Promise], until: Option<Instant>) -> bool {
    if !reach(machine, "Run /bin/sh as init", until) {
        return false;
    }
    machine.type_line(&format!("PS1=; {SHELL}"));
    if !reach(machine, "ready\n", until) {
        return false;
    }
    if life.has_database {
        machine.type_line(START_DATABASE);
        if !reach(machine, "started 0\n", until) {
            return false;
        }
        machine.type_line(LOOK_AT_LEDGER);
        if !reach(machine, "looked 0\n", until) {
            return false;
        }
        let log = machine.said();
        assert!(log.contains("wrong|0\nsums|20000\n"), "{life:?}: {log}");
        promises.iter().for_each(|promise| promise.check_payments(&log));
    }
    true
}

/// Lets the machine work for some time, and then kills it.
fn die(machine: &mut Machine, life: Life, group: Option<&Group>, moment: Duration) {
    let number = life.number;
    machine.type_line(&format!("python3 /deaths/writers.py {number} &"));
    if life.has_database {
        machine.type_line("pgbench -n -c 2 -T 600 bench > /dev/null 2>&1 &");
        machine.type_line(&format!("sh /deaths/pay.sh {number} &"));
        reach(machine, &format!("\npaid {number} 0.\n"), None);
    }
    for writer in 0..3 {
        reach(machine, &format!("\ntold {number} {writer} 0.\n"), None);
    }
    thread::sleep(moment);
    match (life.death, group) {
        (Death::Other, _) => signal(processors::other_process(machine), Signal::KILL),
        (Death::Panic, _) => machine.type_line("exec false"),
        (Death::Memory, Some(group)) => {
            group.close();
            machine.type_line("python3 -c \"bytes = b'x' * (400 << 20)\"");
        }
        _ => machine.child.kill().expect("it is killed"),
    }
}

/// Waits until nothing is left of a machine: no process, and no user of its disk. Returns its exit
/// status.
fn wait_for_its_end(place: &Place, machine: &mut Machine, disk: &Path) -> std::process::ExitStatus {
    let start = Instant::now();
    let wait = |what: &str, log: &dyn Fn() -> String| {
        assert!(start.elapsed() < patient(LIMIT), "{what}: {}", log());
        thread::sleep(Duration::from_millis(5));
    };
    let status = loop {
        if let Some(status) = machine.child.try_wait().expect("its state") {
            break status;
        }
        wait("it does not end", &|| machine.said());
    };
    while !processors::processes(place).is_empty() {
        wait("processes are left", &|| format!("{:?}", processors::processes(place)));
    }
    let gone = start.elapsed();
    let file = File::open(disk).expect("the disk");
    while rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
        wait("its disk is in use", &String::new);
    }
    eprintln!("gone after {gone:?}, its disk free after {:?}", start.elapsed());
    status
}

/// Checks that the disk is no worse than after a power cut.
fn check_disk(life: Life, disk: &Path) -> Result<()> {
    let repaired = host::as_root("e2fsck").arg("-fp").arg(disk).output().expect("e2fsck");
    assert!(matches!(repaired.status.code(), Some(0 | 1)), "after {life:?}: {repaired:?}");
    let mut check = Command::new("e2fsck");
    host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(disk))
}

/// Checks that the machine has died of the intended cause.
fn check_death(life: Life, status: std::process::ExitStatus, log: &str, has_memory: bool) {
    const SIGKILL: Option<i32> = Some(9);
    let is_right = match life.death {
        Death::Other => status.code() == BROKEN && log.contains(CHILD_GONE),
        Death::Panic => status.code() == RESET && log.contains("Kernel panic"),
        // The host chooses the process that it kills.
        Death::Memory if has_memory => status.signal() == SIGKILL || status.code() == BROKEN,
        _ => status.signal() == SIGKILL,
    };
    assert!(is_right, "{life:?}: {status}: {log}");
}

#[test]
#[ignore = "long"]
fn fifty_deaths_harm_neither_the_file_system_nor_the_database() -> Result<()> {
    let mut moments = Moments::new("MERCURY_DEATHS_SEED", "MERCURY_DEATHS", DEATHS);
    let place = Place::new("deaths")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    install(&place, &disk)?;
    let group = Group::new();
    if group.is_none() {
        println!("left out: death by the host's want of memory, for no control group of memory can be made");
    }
    let mut promises: Vec<Promise> = Vec::new();
    let mut needed = LONGEST;
    for (number, moment) in moments.over(LONGEST).into_iter().enumerate() {
        let life = Life::new(number);
        let command = life.command(&place, &disk);
        let kills = group.as_ref().map(Group::kills);
        let start = Instant::now();
        let mut command = group.as_ref().map_or(command, |group| group.within(&life.command(&place, &disk)));
        let mut machine = Machine::start(&place, &mut command);
        let is_early = life.death == Death::Early;
        let until = is_early.then(|| start + needed.mul_f64(moment.div_duration_f64(LONGEST)));
        let is_up = come_up(&mut machine, life, &promises, until);
        if is_early {
            machine.child.kill().expect("it is killed");
        } else {
            needed = start.elapsed();
            die(&mut machine, life, group.as_ref(), moment);
        }
        let status = wait_for_its_end(&place, &mut machine, &disk);
        let log = machine.said();
        check_death(life, status, &log, group.is_some());
        if let (Some(group), Some(kills)) = (&group, kills) {
            assert_eq!(group.kills() > kills, life.death == Death::Memory, "{life:?}: {log}");
            group.open();
        }
        check_disk(life, &disk)?;
        let promise = Promise::of(number, &log);
        promise.check_records(&disk);
        assert!(is_early || !life.has_database || promise.paid.is_some(), "{life:?}: {log}");
        println!("{life:?} up {is_up} after {:?}, {moment:?} more: {promise:?}", needed);
        promises.push(promise);
    }
    keep_all(&place, &disk, &promises)
}

/// Checks that nothing is lost later either: the machine comes up well, and ends in order.
fn keep_all(place: &Place, disk: &Path, promises: &[Promise]) -> Result<()> {
    promises.iter().for_each(|promise| promise.check_records(disk));
    let life = Life { number: promises.len(), has_database: true, cpus: "2", ..Life::new(0) };
    let mut machine = Machine::start(place, &mut life.command(place, disk));
    come_up(&mut machine, life, promises, None);
    machine.type_line("pg_ctlcluster 15 main stop; mount -o remount,ro /dev/vda /; poweroff -f");
    assert_well(&machine.end(HALTED));
    let mut check = Command::new("e2fsck");
    host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(disk))?;
    let count = |promise: &Promise| {
        promise.records.iter().chain([&promise.paid]).flatten().map(|last| last + 1).sum::<u64>()
    };
    println!("{} deaths, {} told and kept", promises.len(), promises.iter().map(count).sum::<u64>());
    Ok(())
}
