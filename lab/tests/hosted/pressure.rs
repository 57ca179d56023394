//! Memory that goes where it is needed: balloons, and machines that sleep.

use std::os::unix::process::CommandExt;

use super::{
    disco::{
        answer, disco, done, json, pid, place, place_with, refused, said, save, save_with, tell, wait_for,
    },
    *,
};

fn machines(place: &Place) -> Vec<serde_json::Value> {
    json(place, &["list"])["machines"].as_array().expect("machines").clone()
}

fn state(place: &Place, name: &str) -> String {
    let found = machines(place).into_iter().find(|one| one["name"] == name);
    found.map_or("gone".to_owned(), |one| one["state"].as_str().expect("a state").to_owned())
}

/// Makes the folder in which machines sleep.
fn folder(place: &Place) -> PathBuf {
    let folder = place.directory.join("asleep");
    fs::create_dir(&folder).expect("a folder");
    give_to_nobody(&folder);
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("its rights");
    folder
}

fn files(folder: &Path) -> usize {
    fs::read_dir(folder).expect("the folder").count()
}

/// Returns the files that are not whole.
fn parts(folder: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).expect("the folder").flatten().map(|entry| entry.path());
    all.filter(|path| path.extension().is_some_and(|end| end == "part")).collect()
}

fn kill(process: i64) {
    kill_process(Pid::from_raw(process as i32).expect("a number"), Signal::KILL).expect("its end");
}

/// A machine that sleeps has no process and no memory. It wakes at a key or by the command, and goes on as if
/// nothing had been. What fails leaves it as it was.
#[test]
fn a_machine_sleeps_and_wakes() -> Result<()> {
    let (place, archive) = place()?;
    save(&place, &archive, &[]);
    let template = ["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"];
    done(disco(&place, &template));
    done(disco(&place, &["run", "web", "--detach"]));
    let sleep = |name: &str| disco(&place, &["sleep", name]).output().expect("the command");
    refused(&sleep("web-1"), "has no folder for it");
    done(disco(&place, &["rm", "web"]));

    let nowhere = [&template[..], &["--sleep-in", "nowhere"]].concat();
    refused(&disco(&place, &nowhere).output().expect("it"), "machines cannot sleep in nowhere");
    let folder = folder(&place);
    let template = [&template[..], &["--sleep-in", "asleep"]].concat();
    done(disco(&place, &template));
    done(disco(&place, &["run", "web", "--count", "2"]));
    for machine in ["web-1", "web-2"] {
        tell(&place, machine, "go\n");
    }
    for machine in ["web-1", "web-2"] {
        wait_for(&place, machine, "finished\n");
        tell(&place, machine, "now\n");
        wait_for(&place, machine, "again now\n");
    }
    tell(&place, "web-1", "here\n");
    let before = answer(&place, "web-1", "here");
    let sum = |answer: &str| answer.split_whitespace().rev().nth(1).expect("a sum").to_owned();

    let process = pid(&place, "web-1");
    done(disco(&place, &["sleep", "web-1"]));
    assert_eq!((state(&place, "web-1"), state(&place, "web-2")), ("asleep".into(), "runs".into()));
    assert!(!Path::new(&format!("/proc/{process}")).exists() && files(&folder) == 1);
    refused(&sleep("web-1"), "web-1 is asleep");
    for words in [&["fork", "web-1"][..], &["resize", "web-1", "64"], &["save", "web-1", "file"]] {
        refused(&disco(&place, words).output().expect("the command"), "web-1 is asleep");
    }
    refused(
        &disco(&place, &["run", "web", "--name", "web-1", "--detach"]).output().expect("it"),
        "web-1 already",
    );
    // A key, and the word of which it is the first.
    let begin = Instant::now();
    tell(&place, "web-1", "awake\n");
    let after = answer(&place, "web-1", "awake");
    println!("a key was answered after {:?}", begin.elapsed());
    assert_eq!(sum(&after), sum(&before), "its files are as they were");
    assert_eq!((state(&place, "web-1").as_str(), files(&folder)), ("runs", 0));
    refused(&disco(&place, &["wake", "web-1"]).output().expect("the command"), "web-1 is awake");

    // The template dies while one machine sleeps. A new one takes it over.
    done(disco(&place, &["sleep", "web-1"]));
    kill(json(&place, &["list"])["templates"][0]["pid"].as_i64().expect("a number"));
    wait_until("the template has ended", || {
        json(&place, &["list"])["templates"].as_array().is_some_and(Vec::is_empty)
    });
    assert_eq!(state(&place, "web-1"), "asleep");
    refused(&disco(&place, &["wake", "web-1"]).output().expect("the command"), "no template web");
    done(disco(&place, &template));
    done(disco(&place, &["wake", "web-1"]));
    tell(&place, "web-1", "later\n");
    assert_eq!(sum(&answer(&place, "web-1", "later")), sum(&before));
    // The other one still runs, but its template is another process.
    refused(&sleep("web-2"), "not this template's");

    // A machine that cannot be written goes on, and so does one whose template is killed.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o500)).expect("its rights");
    refused(&sleep("web-1"), "cannot write");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("its rights");
    tell(&place, "web-1", "still\n");
    assert_eq!(sum(&answer(&place, "web-1", "still")), sum(&before));
    assert_eq!((state(&place, "web-1").as_str(), files(&folder)), ("runs", 0));

    // A damaged file is refused, and whole again it wakes.
    done(disco(&place, &["sleep", "web-1"]));
    let file = fs::read_dir(&folder).expect("it").flatten().next().expect("a file").path();
    let whole = fs::read(&file).expect("it");
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    fs::write(&file, damaged).expect("it");
    refused(&disco(&place, &["wake", "web-1"]).output().expect("the command"), "is damaged");
    assert_eq!(state(&place, "web-1"), "asleep");
    fs::write(&file, whole).expect("it");
    done(disco(&place, &["wake", "web-1"]));
    tell(&place, "web-1", "whole\n");
    assert_eq!(sum(&answer(&place, "web-1", "whole")), sum(&before));

    done(disco(&place, &["sleep", "web-1"]));
    done(disco(&place, &["stop", "web-1"]));
    assert_eq!((state(&place, "web-1").as_str(), files(&folder)), ("gone", 0));
    done(disco(&place, &["run", "web", "--name", "web-1", "--detach"]));
    done(disco(&place, &["sleep", "web-1"]));
    // Machines of an earlier template of that name end as well.
    done(disco(&place, &["rm", "web"]));
    assert_eq!((state(&place, "web-1").as_str(), files(&folder)), ("gone", 0));
    wait_until("web-2 has ended", || state(&place, "web-2") == "gone");
    Ok(())
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + patient(Duration::from_secs(30));
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A template is killed at times that fall into all steps of falling asleep, and a machine while it is
/// written. What is left is the machine or its file, which goes on with right answers.
#[test]
#[ignore = "long"]
fn whatever_is_killed_leaves_a_machine_or_its_file() -> Result<()> {
    const TIMES: u32 = 12;
    let (place, archive) = place()?;
    save(&place, &archive, &[]);
    let folder = folder(&place);
    let template =
        ["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128", "--sleep-in", "asleep"];
    done(disco(&place, &template));
    done(disco(&place, &["run", "web", "--detach"]));
    tell(&place, "web-1", "go\n");
    wait_for(&place, "web-1", "finished\n");
    tell(&place, "web-1", "now\n");
    wait_for(&place, "web-1", "again now\n");
    tell(&place, "web-1", "first\n");
    let first = answer(&place, "web-1", "first");
    let sum = |answer: &str| answer.split_whitespace().rev().nth(1).expect("a sum").to_owned();
    // On a busy host it falls asleep slowly.
    let begin = Instant::now();
    done(disco(&place, &["sleep", "web-1"]));
    let slow = begin.elapsed();
    tell(&place, "web-1", "second\n");
    assert_eq!(sum(&answer(&place, "web-1", "second")), sum(&first));
    let (mut awake, mut asleep) = (0, 0);
    for number in 0..3 * TIMES {
        if number >= TIMES && awake > 0 && asleep > 0 {
            break;
        }
        let process = json(&place, &["list"])["templates"][0]["pid"].as_i64().expect("a number");
        let mut command = disco(&place, &["sleep", "web-1"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command");
        thread::sleep(slow * number / (TIMES * 2 / 3));
        kill(process);
        let _ = child.wait();
        wait_until("the template has ended", || {
            json(&place, &["list"])["templates"].as_array().is_some_and(Vec::is_empty)
        });
        // The machine hears of it at once, and ends or goes on.
        thread::sleep(Duration::from_millis(300));
        match state(&place, "web-1").as_str() {
            "asleep" => {
                asleep += 1;
                done(disco(&place, &template));
                assert!(parts(&folder).is_empty(), "nobody writes {:?}", parts(&folder));
            }
            "runs" => {
                awake += 1;
                let word = format!("on{number}");
                tell(&place, "web-1", &format!("{word}\n"));
                assert_eq!(sum(&answer(&place, "web-1", &word)), sum(&first));
                // It is its template's no longer, so another one takes its place, by way of a file.
                done(disco(&place, &["stop", "web-1"]));
                done(disco(&place, &template));
                done(disco(&place, &["run", "web", "--name", "web-1", "--detach"]));
                tell(&place, "web-1", "go\n");
                wait_for(&place, "web-1", "finished\n");
                tell(&place, "web-1", "now\n");
                wait_for(&place, "web-1", "again now\n");
                continue;
            }
            other => panic!("{number}: the machine is {other}: {}", said(&place, "web-1")),
        }
        let word = format!("woke{number}");
        tell(&place, "web-1", &format!("{word}\n"));
        assert_eq!(sum(&answer(&place, "web-1", &word)), sum(&first));
    }
    println!("the machine was awake {awake} times, and asleep {asleep} times; it takes {slow:?}");
    assert!(awake > 0 && asleep > 0);
    // A machine that is killed while it is written has nothing but its file.
    let mut command = disco(&place, &["sleep", "web-1"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command");
    let process = machines(&place)[0]["pid"].as_i64().expect("a number");
    wait_until("the machine is being written", || !parts(&folder).is_empty());
    kill(process);
    // Another machine gets another name meanwhile.
    done(disco(&place, &["run", "web", "--detach"]));
    let _ = child.wait();
    wait_until("the machine is asleep", || state(&place, "web-1") == "asleep");
    // It is not tried again for a while.
    tell(&place, "web-1", "last\n");
    assert_eq!(sum(&answer(&place, "web-1", "last")), sum(&first));
    done(disco(&place, &["rm", "web"]));
    Ok(())
}

/// The first program of a machine that keeps a file of numbers, which it makes anew for each word.
const FILLER: &str = "#!/bin/sh\necho ready\nread word\n\
    while :; do old=$(md5sum </f 2>/dev/null); seq $word $((word + LINES)) >/f\n\
    echo says $word $old $(md5sum </f); read word; done\n";

/// A group of processes whose memory is limited (control groups, version 1).
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Option<Self> {
        let group = Path::new("/sys/fs/cgroup/memory").join(format!("mercury-test-{}", std::process::id()));
        fs::create_dir(&group).ok()?;
        let group = Self(group);
        fs::write(group.0.join("memory.limit_in_bytes"), bytes.to_string()).ok()?;
        Some(group)
    }

    /// Starts a command in the group.
    fn join(&self, mut command: Command) -> Command {
        let file = File::options().write(true).open(self.0.join("cgroup.procs")).expect("the group");
        // SAFETY: It makes one system call.
        unsafe { command.pre_exec(move || (&file).write_all(b"0")) };
        command
    }

    fn number(&self, name: &str) -> u64 {
        let text = fs::read_to_string(self.0.join(name)).expect("the group");
        text.trim().parse().expect("a number")
    }

    /// Returns the number of processes that were killed for want of memory.
    fn killed(&self) -> u64 {
        let text = fs::read_to_string(self.0.join("memory.oom_control")).expect("the group");
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.and_then(|number| number.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Machines that are left would hold the group.
        for process in fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default().lines() {
            if let Some(pid) = process.parse().ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        thread::sleep(Duration::from_millis(200));
        let _ = fs::remove_dir(&self.0);
    }
}

/// Twenty-four machines of 64 MiB work at the same time where 512 MiB are allowed. Nobody is killed, and all
/// answers are right.
#[test]
#[ignore = "long"]
fn machines_need_three_times_the_memory_that_there_is() -> Result<()> {
    const MACHINES: u64 = 24;
    const LINES: u64 = 3_000_000;
    const LIMIT: u64 = 512 << 20;
    const ROUNDS: u64 = 2;
    let Some(group) = Group::new(LIMIT) else {
        println!("left out: this host has no control groups of version 1 for memory");
        return Ok(());
    };
    let init = FILLER.replace("LINES", &LINES.to_string());
    let (place, archive) = place_with("pressure", Flavour::PreVirtualized, &init)?;
    save_with(&place, &archive, "64", &[]);
    folder(&place);
    let template =
        ["template", "web", "saved", "--kernel", "vmlinux", "--memory", "64", "--sleep-in", "asleep"];
    done(group.join(disco(&place, &template)));
    let count = MACHINES.to_string();
    done(disco(&place, &["run", "web", "--count", &count]));
    let name = |machine: u64| format!("web-{}", machine + 1);
    let word = |machine: u64, round: u64| 100 * machine + round + 1;
    let mut most_asleep = 0;
    for round in 0..ROUNDS {
        let begin = Instant::now();
        (0..MACHINES)
            .for_each(|machine| tell(&place, &name(machine), &format!("{}\n", word(machine, round))));
        let mut times = Vec::new();
        let mut waiting: Vec<u64> = (0..MACHINES).collect();
        while !waiting.is_empty() {
            waiting.retain(|machine| {
                let says = format!("says {} ", word(*machine, round));
                let said = said(&place, &name(*machine));
                let Some((line, _)) = said.split_once(&says).and_then(|(_, rest)| rest.split_once('\n'))
                else {
                    return true;
                };
                let sums: Vec<&str> = line.split_whitespace().filter(|word| *word != "-").collect();
                let rounds = round.saturating_sub(1)..=round;
                let expected: Vec<String> =
                    rounds.map(|round| sum_of(word(*machine, round), LINES)).collect();
                let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
                // At first it has no old file.
                assert!(sums.ends_with(&expected), "{}: {line}", name(*machine));
                times.push(begin.elapsed().as_secs_f32());
                false
            });
            let all = machines(&place);
            let asleep = all.iter().filter(|one| one["state"] == "asleep").count();
            most_asleep = most_asleep.max(asleep);
            assert_eq!((group.killed(), all.len() as u64), (0, MACHINES), "nobody was killed");
            let is_late = begin.elapsed() > patient(Duration::from_secs(600));
            assert!(!is_late, "{waiting:?} wait: {}", json(&place, &["list"]));
            thread::sleep(Duration::from_millis(200));
        }
        println!(
            "round {round}: the first answer after {:.1} s, half of them {:.1} s, the last {:.1} s",
            times[0],
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
    println!(
        "up to {most_asleep} machines slept at a time; {} MiB were used at most, {} refused",
        group.number("memory.max_usage_in_bytes") >> 20,
        group.number("memory.failcnt"),
    );
    assert!(most_asleep > 0, "the machines do not fit");
    for machine in 0..MACHINES {
        assert_well(&said(&place, &name(machine)));
    }
    done(disco(&place, &["rm", "web"]));
    Ok(())
}

/// Returns true if a machine stands still because it has as much memory as it may have.
fn stands_still(process: i32) -> bool {
    let folder = fs::read_dir(format!("/proc/{process}/fd")).expect("its files");
    let is_it = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|name| name.to_string_lossy().starts_with("/memfd:mercury-balloon"))
    };
    let path = folder.flatten().map(|entry| entry.path()).find(is_it).expect("the shared words");
    let mut waits = [0; 8];
    // It is the last word.
    let file = File::open(path).expect("the words");
    let length = file.metadata().expect("its length").len();
    file.read_exact_at(&mut waits, length - 8).expect("the words");
    u64::from_le_bytes(waits) == 1
}

/// A machine that stands still at its limit goes on when its template does not look any more, or is killed.
/// It ends when it is told to.
#[test]
#[ignore = "long"]
fn no_machine_stands_still_for_ever() -> Result<()> {
    const LIMIT: u64 = 256 << 20;
    let Some(group) = Group::new(LIMIT) else {
        println!("left out: this host has no control groups of version 1 for memory");
        return Ok(());
    };
    let init = FILLER.replace("LINES", "3000000");
    let (place, archive) = place_with("standstill", Flavour::PreVirtualized, &init)?;
    save_with(&place, &archive, "64", &[]);
    let template = ["template", "web", "saved", "--kernel", "vmlinux", "--memory", "64"];
    done(group.join(disco(&place, &template)));
    done(disco(&place, &["run", "web", "--count", "10"]));
    let process = json(&place, &["list"])["templates"][0]["pid"].as_i64().expect("a number");
    let process = Pid::from_raw(process as i32).expect("a number");
    let hold = |machine: &str, word: &str| {
        // The template has divided its memory among ten machines.
        thread::sleep(Duration::from_millis(1500));
        kill_process(process, Signal::STOP).expect("its stop");
        tell(&place, machine, &format!("{word}\n"));
        let pid = pid(&place, machine);
        wait_until("the machine stands still", || stands_still(pid));
        Instant::now()
    };
    let held = hold("web-1", "1");
    assert!(answer(&place, "web-1", "1").contains(&sum_of(1, 3_000_000)));
    let time = held.elapsed();
    assert!((20..60).contains(&time.as_secs()), "it has gone on after {time:?}");
    kill_process(process, Signal::CONT).expect("it goes on");

    hold("web-2", "2");
    done(disco(&place, &["stop", "web-2"]));
    assert_eq!(state(&place, "web-2"), "gone");
    kill_process(process, Signal::CONT).expect("it goes on");

    let held = hold("web-3", "3");
    kill_process(process, Signal::KILL).expect("its end");
    assert!(answer(&place, "web-3", "3").contains(&sum_of(3, 3_000_000)));
    assert!(held.elapsed() < Duration::from_secs(20), "it has waited for the end of the lease");
    assert_eq!(group.killed(), 0);
    for machine in machines(&place) {
        done(disco(&place, &["stop", machine["name"].as_str().expect("a name")]));
    }
    Ok(())
}

/// Returns the sum of the numbers that a machine writes.
fn sum_of(first: u64, lines: u64) -> String {
    let command = format!("seq {first} {} | md5sum", first + lines);
    let output = Command::new("sh").args(["-c", &command]).output().expect("the command");
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().expect("a sum").to_owned()
}

/// A machine gives memory to the host when it is told to, and takes it back when its programs need it.
#[test]
#[ignore = "long"]
fn a_machine_is_made_smaller_and_larger() -> Result<()> {
    let init = FILLER.replace("LINES", "3000000");
    let (place, archive) = place_with("resize", Flavour::PreVirtualized, &init)?;
    save(&place, &archive, &[]);
    done(disco(&place, &["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"]));
    done(disco(&place, &["run", "web", "--detach"]));
    tell(&place, "web-1", "7\n");
    assert!(answer(&place, "web-1", "7").contains(&sum_of(7, 3_000_000)));
    let balloon = || machines(&place)[0]["balloon"]["given_bytes"].as_u64().expect("a size");
    assert_eq!(balloon(), 0);
    for wrong in ["31", "129"] {
        let output = disco(&place, &["resize", "web-1", wrong]).output().expect("the command");
        refused(&output, "can have 32 to 128 MiB");
    }
    let given = json(&place, &["resize", "web-1", "80"]);
    assert_eq!((given["given_bytes"].as_u64(), balloon()), (Some(48 << 20), 48 << 20));
    tell(&place, "web-1", "8\n");
    assert!(answer(&place, "web-1", "8").contains(&sum_of(8, 3_000_000)));
    // A copy is as small as the machine.
    done(disco(&place, &["fork", "web-1"]));
    wait_until("the copy has its balloon", || machines(&place)[1]["balloon"]["given_bytes"] == 48 << 20);
    // Its programs need more than is left, so its kernel takes some back.
    done(disco(&place, &["resize", "web-1", "32"]));
    let smallest = balloon();
    assert!(smallest > 48 << 20, "{smallest}");
    tell(&place, "web-1", "9\n");
    assert!(answer(&place, "web-1", "9").contains(&sum_of(9, 3_000_000)));
    done(disco(&place, &["resize", "web-1", "128"]));
    assert_eq!(balloon(), 0);
    tell(&place, "web-1", "10\n");
    assert!(answer(&place, "web-1", "10").contains(&sum_of(10, 3_000_000)));
    done(disco(&place, &["rm", "web"]));
    Ok(())
}
