//! `lab test`: runs the tests of the project, and with `FULL=1` all of them and every check. It
//! prints their lines, and sums them up in one line.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
    env, fs,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::Value;

use crate::{
    artefacts, check,
    emulator::{bochs_build, newer_qemu},
    error::{Context, Error, Result},
    hung,
    image::{Image, Release},
    paths, progress,
    reservation::Reservation,
    spec::Platform,
};

/// The results of tests, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u32,
    /// Tests that failed or did not build.
    pub failed: u32,
    /// Tests that are left out, each with a reason.
    pub skipped: u32,
    /// Names of the tests that failed.
    pub failures: Vec<String>,
    /// Names of the tests that the chosen emulator cannot run, each with the reason.
    pub unsupported: Vec<String>,
    /// The reason and the last lines of each test that failed, by name.
    pub said: BTreeMap<String, LastWords>,
}

/// The part of a failed test's output that is repeated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LastWords {
    /// The first lines of the error or the panic.
    reason: Vec<String>,
    last: VecDeque<String>,
}

impl LastWords {
    const REASON_LINES: usize = 4;
    const LAST_LINES: usize = 8;
    /// Characters of each line.
    const WIDTH: usize = 300;

    fn add(&mut self, line: &str) {
        let is_reason = line.starts_with("Error: ") || line.contains(" panicked at ");
        let is_going_on = !self.reason.is_empty() && self.reason.len() < Self::REASON_LINES;
        let short = line.chars().take(Self::WIDTH).collect();
        if is_going_on || (is_reason && self.reason.is_empty()) {
            return self.reason.push(short);
        }
        if self.last.len() == Self::LAST_LINES {
            self.last.pop_front();
        }
        self.last.push_back(short);
    }

    fn lines(&self) -> impl Iterator<Item = &String> {
        self.reason.iter().chain(&self.last)
    }
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.failures.extend(other.failures);
        self.unsupported.extend(other.unsupported);
        self.said.extend(other.said);
    }

    /// Keeps the reason and the last lines of a test's output.
    fn keep_line(&mut self, name: &str, line: &str) {
        self.said.entry(name.to_owned()).or_default().add(line);
    }

    /// Moves a test that the emulator cannot run from the failed tests to the unsupported ones.
    fn skip(&mut self, name: &str, reason: &str) {
        let Some(place) = self.failures.iter().position(|failed| failed == name) else { return };
        self.failures.remove(place);
        self.unsupported.push(format!("{name}: {reason}"));
    }

    /// Adds a line of a test program: `test NAME ... FAILED` of a test that failed, or the sum
    /// `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
    fn add_line(&mut self, prefix: &str, line: &str) {
        let test = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"));
        self.failures.extend(test.map(|name| format!("{prefix}{name}")));
        let Some(rest) = line.trim_start().strip_prefix("test result: ") else { return };
        let Some((_, counts)) = rest.split_once(". ") else { return };
        for part in counts.split(';') {
            let mut words = part.split_whitespace();
            let (Some(count), Some(what)) = (words.next(), words.next()) else { continue };
            let count: u32 = count.parse().unwrap_or(0);
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.skipped += count,
                _ => {}
            }
        }
    }
}

/// Runs the tests, with `FULL=1` the long ones too, or only those that `filter` names: a file of
/// `lab/tests/` or `lab/bench/tests/`, or a part of tests' names. The last lines are `FAILED NAME`
/// for each failed test, and `N passed, N failed, N skipped`.
///
/// # Errors
/// If the tests cannot be run at all.
pub fn run(filter: Option<&str>) -> Result<Tally> {
    Platform::chosen()?;
    elapsed();
    let deadline = deadline()?;
    check_space()?;
    ensure_artefacts(filter.is_none())?;
    let mut tally = Tally::default();
    match filter {
        Some(name) => match lab_test(name) {
            Some((package, _)) => tally.add(run_cargo(&["-p", package, "--test", name], which())?),
            None => tally.add(run_cargo(&["--workspace"], &[name])?),
        },
        None => {
            if is_full() {
                check_style(&mut tally);
            }
            let (in_the_lab, on_the_host) =
                build_tests()?.into_iter().partition::<Vec<_>, _>(Program::is_lab_test);
            for program in &on_the_host {
                tally.add(run_counting(&program.prefix(), &mut program.command())?);
            }
            let _ = fs::remove_file(Reservation::times()?);
            hung::forget()?;
            tally.add(run_lab_tests(&in_the_lab, deadline)?);
            print_times(&fs::read_to_string(Reservation::times()?).unwrap_or_default());
            let (count, machines) = hung::all()?;
            println!("{count} machines hung on their first boot, and were started again\n{machines}");
        }
    }
    tally.unsupported.iter().for_each(|one| println!("SKIPPED {one}"));
    for name in &tally.failures {
        println!("FAILED {name}");
        tally.said.get(name).into_iter().flat_map(LastWords::lines).for_each(|line| println!("    {line}"));
    }
    tally.failed -= tally.unsupported.len() as u32;
    tally.skipped += tally.unsupported.len() as u32;
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    Ok(tally)
}

/// The number of slowest tests that are listed.
const LONGEST: usize = 40;

/// Prints the time that machines ran, which is most of the time of a run.
fn print_times(reservations: &str) {
    let mut times: BTreeMap<&str, u32> = BTreeMap::new();
    for (seconds, name) in reservations.lines().filter_map(|line| line.split_once(' ')) {
        *times.entry(name).or_default() += seconds.parse().unwrap_or(0);
    }
    println!("machines ran for {} s; the longest:", times.values().sum::<u32>());
    let mut longest: Vec<_> = times.into_iter().collect();
    longest.sort_unstable_by_key(|&(_, seconds)| Reverse(seconds));
    longest.iter().take(LONGEST).for_each(|(name, seconds)| println!("{seconds:>5} s  {name}"));
}

/// Builds all parts of machines at once, since much of the time is waiting for the mirror. The
/// tests' programs are built beside them, if wanted.
fn ensure_artefacts(tests: bool) -> Result<()> {
    thread::scope(|scope| {
        let mut all =
            Vec::from(Release::ALL.map(|release| scope.spawn(move || Image::ensure(release).map(drop))));
        all.extend(Release::ALL.map(|release| scope.spawn(move || artefacts::ensure(release).map(drop))));
        all.push(scope.spawn(|| newer_qemu::ensure().map(drop)));
        if is_full() || Platform::chosen()? != Platform::Qemu {
            all.push(scope.spawn(|| bochs_build::ensure().map(drop)));
        }
        if tests {
            all.push(scope.spawn(|| build_tests().map(drop)));
        }
        all.into_iter().try_for_each(|one| joined(one.join())?)
    })
}

/// Checks that what the tests build has room on the disk: a build that fills the disk takes other work
/// with it, after minutes.
fn check_space() -> Result<()> {
    let root = paths::root();
    let disk = rustix::fs::statvfs(&root).map_err(io::Error::from);
    let disk = disk.context(|| format!("read the free space of {}", root.display()))?;
    let built = root.join("target/lab/images").exists();
    enough_space(disk.f_bavail.saturating_mul(disk.f_frsize), built)
        .map_err(|reason| Error::Host(format!("{reason}; the disk is that of {}", root.display())))
}

/// Returns what is missing of the space for the tests, in whole GB, if `free` bytes are not enough.
fn enough_space(free: u64, built: bool) -> std::result::Result<(), String> {
    const GB: u64 = 1_000_000_000;
    // What `make test` leaves in a fresh clone (README), and what machines write while they run.
    let needed = if built { 3 } else { 14 };
    if free >= needed * GB {
        return Ok(());
    }
    let free = free / GB;
    Err(format!("the tests need {needed} GB of disk, and {free} GB are free: make room, then try again"))
}

fn joined<T>(result: thread::Result<T>) -> Result<T> {
    result.map_err(|_| Error::Host("a thread of the lab panicked".into()))
}

/// Counts each check of `make check` as one test.
fn check_style(tally: &mut Tally) {
    let failed = check::run();
    let count = failed.len() as u32;
    tally.failed += count;
    tally.passed += check::COUNT - count;
    tally.failures.extend(failed.iter().map(|name| format!("check {name}")));
}

/// Runs `cargo test` with a selection of targets, and counts the results.
fn run_cargo(selection: &[&str], tests: &[&str]) -> Result<Tally> {
    let mut cargo = artefacts::cargo();
    cargo.args(["test", "--no-fail-fast"]).args(selection).arg("--").args(tests);
    run_counting("", &mut cargo)
}

/// Tests that also run in Bochs with `FULL=1`, by platform and file. All tests there would take
/// hours; these show what only another processor can show. `make test LAB=intel FULL=1` runs all
/// tests that Bochs can run.
const ON_BOCHS: &[(&str, &str, &[&str])] = &[
    ("intel", "applications", &["registers_and_results"]),
    ("intel", "state", &["the_generic_kernel_with_machine_checks"]),
    ("intel", "kernel", &["no_nmi_is_lost", "each_way_out_detaches_one_cpu_with_its_reason"]),
    ("intel", "soak", &["ten_thousand_cycles_on_one_cpu"]),
    ("intel-haswell", "faults", &["refused_state_is_rolled_back"]),
    ("bochs-amd", "applications", &["segments_and_ports"]),
    ("bochs-amd", "kvm", &["kvm_on_6_1"]),
    ("intel", "kvm", &["kvm_on_6_1", "other_hypervisors_are_refused_by_name"]),
    ("intel-haswell", "lifecycle", &["a_hundred_quick_cycles"]),
    ("intel-haswell", "faults", &["each_class_of_refused_state_is_rolled_back"]),
    ("intel-tigerlake", "applications", &["shadow_stacks"]),
];

/// The variable of `make test FULL=1`: the long tests, which are otherwise ignored, those in Bochs,
/// and the checks of `make check` run too.
const FULL: &str = "MERCURY_LAB_FULL";
/// The mark of tests that are ignored for another reason: that emulator cannot run them.
const NEVER: &str = "on_qemu_7";

/// Returns the arguments that select a file's tests.
fn which() -> &'static [&'static str] {
    if is_full() { &["--include-ignored", "--skip", NEVER] } else { &[] }
}

/// Returns true if the long tests run too. Some other tests take longer then.
#[must_use]
pub fn is_full() -> bool {
    env::var(FULL).is_ok_and(|value| !value.is_empty())
}

/// The variable of `make test MINUTES=40`: the time in which tests may begin. A test without a
/// machine by then is left out, by name.
const MINUTES: &str = "MERCURY_LAB_MINUTES";

/// The variable with the end of that time, in seconds since 1970, for the test programs.
pub(crate) const DEADLINE: &str = "MERCURY_LAB_DEADLINE";

fn deadline() -> Result<Option<u64>> {
    let Some(minutes) = env::var(MINUTES).ok().filter(|minutes| !minutes.is_empty()) else { return Ok(None) };
    let wrong = || Error::Host(format!("MINUTES must be a number above zero, and is {minutes:?}"));
    let minutes: u64 = minutes.parse().ok().filter(|minutes| *minutes > 0).ok_or_else(wrong)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Some(now.as_secs() + minutes * 60))
}

/// Runs each file of `lab/tests/` and `lab/bench/tests/`, all at once. Their machines wait for each
/// other (see [`crate::Reservation`]), so that the host has work while the last test of a file
/// runs.
fn run_lab_tests(programs: &[Program], deadline: Option<u64>) -> Result<Tally> {
    let until = deadline.map(|second| (DEADLINE, second.to_string()));
    let in_bochs = Platform::chosen()? == Platform::Qemu && is_full();
    thread::scope(|scope| {
        let mut running = Vec::new();
        for (platform, file, tests) in ON_BOCHS.iter().filter(|_| in_bochs) {
            let program = programs.iter().find(|program| program.name == *file);
            let program =
                program.ok_or_else(|| Error::Host(format!("no file of tests is called {file}.rs")))?;
            let mut command = program.command();
            command
                .env("LAB", platform)
                .envs(until.clone())
                .args(["--include-ignored", "--exact"])
                .args(*tests);
            let prefix = format!("{platform} {file}: ");
            running.push(scope.spawn(move || run_counting(&prefix, &mut command).map(all_of(tests, prefix))));
        }
        for program in programs {
            let mut command = program.command();
            command.args(which()).envs(until.clone());
            running.push(scope.spawn(move || run_counting(&program.prefix(), &mut command)));
        }
        let mut tally = Tally::default();
        running.into_iter().try_for_each(|one| joined(one.join())?.map(|part| tally.add(part)))?;
        Ok(tally)
    })
}

/// Counts a test that was not found as a failed one: it has another name now.
fn all_of(tests: &'static [&'static str], prefix: String) -> impl Fn(Tally) -> Tally {
    move |mut tally| {
        let missing = (tests.len() as u32).saturating_sub(tally.passed + tally.failed + tally.skipped);
        if missing > 0 {
            tally.failed += missing;
            tally.failures.push(format!("{prefix}{missing} of {tests:?} not found"));
        }
        tally
    }
}

/// A program of tests, as cargo builds it.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    /// The name of the library or program whose unit tests these are, or of the file in `tests/`.
    name: String,
    path: PathBuf,
    /// The package's directory.
    directory: PathBuf,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// Tests inside the sources.
    Unit,
    /// A file in `tests/`.
    File,
}

impl Program {
    /// Reads a program from cargo's message about it.
    fn of(message: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(message).ok()?;
        let target = &message["target"];
        let path = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
        let is_file = target["kind"].as_array()?.iter().any(|kind| kind == "test");
        Some(Self {
            name: target["name"].as_str()?.to_owned(),
            path: path.into(),
            directory: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
            kind: if is_file { Kind::File } else { Kind::Unit },
        })
    }

    /// Returns true if the program runs machines.
    fn is_lab_test(&self) -> bool {
        self.kind == Kind::File && LAB.iter().any(|(_, folder)| self.directory.ends_with(folder))
    }

    /// Returns the command that starts the program as cargo would.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.directory);
        command
    }

    /// Returns the prefix of the program's lines: `kvm: ` in the lab, `image, chain: ` elsewhere.
    fn prefix(&self) -> String {
        let package = self.directory.file_name().unwrap_or_default().to_string_lossy();
        match self.kind {
            Kind::Unit => format!("{package}: "),
            Kind::File if self.is_lab_test() => format!("{}: ", self.name),
            Kind::File => format!("{package}, {}: ", self.name),
        }
    }
}

/// Builds all test programs of the project in one run, so that nothing is built twice.
fn build_tests() -> Result<Vec<Program>> {
    let mut cargo = artefacts::cargo();
    cargo.args(["test", "-q", "--workspace", "--lib", "--bins", "--tests", "--no-run"]);
    cargo.args(["--message-format=json-render-diagnostics"]);
    let output = progress::step("building the tests", || cargo.stderr(Stdio::inherit()).output())
        .context(|| "build the tests".into())?;
    if !output.status.success() {
        return Err(Error::Host("the tests do not build".into()));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(messages.lines().filter_map(Program::of).collect())
}

/// Returns the time since the first call, in minutes and seconds: `12:34`.
fn elapsed() -> String {
    static START: OnceLock<Instant> = OnceLock::new();
    let seconds = START.get_or_init(Instant::now).elapsed().as_secs();
    format!("{:02}:{:02}", seconds / 60, seconds % 60)
}

/// Runs test programs, prints their lines with `prefix`, and counts the results.
fn run_counting(prefix: &str, command: &mut Command) -> Result<Tally> {
    let mut running = command.stdout(Stdio::piped()).spawn().context(|| "start tests".into())?;
    let output = running.stdout.take().ok_or_else(|| Error::Host("tests have no output".into()))?;
    let mut tally = Tally::default();
    let mut said_by = String::new();
    for line in BufReader::new(output).lines() {
        let line = line.context(|| "read the tests' output".into())?;
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            said_by = format!("{prefix}{name}");
        } else if line == "failures:" || line.starts_with("test ") {
            said_by.clear();
        } else if !said_by.is_empty() && !line.is_empty() {
            tally.keep_line(&said_by, &line);
        }
        if let Some(reason) =
            line.strip_prefix("Error: ").and_then(|error| error.strip_prefix(Error::SKIPPED))
        {
            tally.skip(&said_by, reason);
        }
        // Most tests wait for their turn.
        if !line.contains("has been running for over") && (prefix.is_empty() || !line.is_empty()) {
            match prefix {
                "" => println!("{line}"),
                prefix => println!("{} {prefix}{line}", elapsed()),
            }
        }
        tally.add_line(prefix, &line);
    }
    let status = running.wait().context(|| "wait for tests".into())?;
    // A program did not build, or a test program crashed.
    if !status.success() && tally.failed == 0 {
        tally.failed += 1;
        tally.failures.push(format!("{prefix}{status}"));
    }
    Ok(tally)
}

/// The packages whose tests run machines, and their folders.
const LAB: [(&str, &str); 2] = [("mercury-lab", "lab"), ("mercury-lab-bench", "lab/bench")];

/// Finds the package and the path of a file of tests that run machines.
fn lab_test(name: &str) -> Option<(&'static str, PathBuf)> {
    let path = |folder: &str| paths::root().join(folder).join("tests").join(format!("{name}.rs"));
    let mut files = LAB.into_iter().map(|(package, folder)| (package, path(folder)));
    files.find(|(_, path)| path.exists())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_before_anything_is_built() {
        assert!(enough_space(14_000_000_000, false).is_ok() && enough_space(3_000_000_000, true).is_ok());
        let reason = enough_space(13_999_999_999, false).unwrap_err();
        assert!(reason.contains("14 GB") && reason.contains("13 GB are free"), "{reason}");
    }

    #[test]
    fn results_are_summed_and_other_lines_are_not() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a ... ok",
            "test b ... FAILED",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 1s",
        ] {
            tally.add_line("file: ", line);
        }
        assert_eq!(
            tally,
            Tally {
                passed: 5,
                failed: 1,
                skipped: 1,
                failures: vec!["file: b".to_owned()],
                ..Tally::default()
            }
        );
    }

    #[test]
    fn unsupported_tests_count_as_no_failure() {
        let mut tally = Tally::default();
        tally.add_line("file: ", "test b ... FAILED");
        tally.skip("file: a", "it has not failed");
        tally.skip("file: b", "no monitor");
        assert_eq!((tally.failures, tally.unsupported), (vec![], vec!["file: b: no monitor".to_owned()]));
    }

    #[test]
    fn the_reason_and_the_last_words_of_a_failed_test_are_repeated() {
        let mut running = Command::new("sh");
        running.args([
            "-c",
            "printf 'test b ... FAILED\\n\\nfailures:\\n\\n---- b stdout ----\\n\\nbefore\\nError: no\\n'; \
             seq 15; \
             printf '\\nfailures:\\n    b\\n\\ntest result: FAILED. 0 passed; 1 failed\\n'; exit 101",
        ]);
        let tally = run_counting("file: ", &mut running).unwrap();
        assert_eq!((tally.failed, &tally.failures), (1, &vec!["file: b".to_owned()]));
        let lines: Vec<&String> = tally.said["file: b"].lines().collect();
        assert_eq!(lines, ["Error: no", "1", "2", "3", "8", "9", "10", "11", "12", "13", "14", "15"]);
    }

    #[test]
    fn tests_that_are_not_there_have_failed() {
        let ran = |passed| Tally { passed, ..Tally::default() };
        assert_eq!(all_of(&["a", "b"], "x: ".to_owned())(ran(2)), ran(2));
        assert_eq!(all_of(&["a", "b"], "x: ".to_owned())(ran(1)).failed, 1);
        for (platform, file, tests) in ON_BOCHS {
            assert!(platform.parse::<Platform>().is_ok());
            let (_, path) = lab_test(file).unwrap();
            let source = fs::read_to_string(path).unwrap();
            assert!(tests.iter().all(|test| source.contains(&format!("fn {test}("))), "{file}: {tests:?}");
        }
    }

    #[test]
    fn test_programs_are_found_among_cargos_messages() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/p/image/Cargo.toml",
            "profile":{"test":true},"target":{"kind":["test"],"name":"chain"},"executable":"/x/a-1"}"#;
        let file = Program::of(message).unwrap();
        assert_eq!((file.path.as_path(), file.prefix().as_str()), (Path::new("/x/a-1"), "image, chain: "));
        let unit = Program::of(&message.replace("\"test\"]", "\"lib\"]")).unwrap();
        assert_eq!((unit.prefix().as_str(), unit.is_lab_test()), ("image: ", false));
        let lab = Program::of(&message.replace("/image/", "/lab/")).unwrap();
        assert_eq!((lab.prefix().as_str(), lab.is_lab_test()), ("chain: ", true));
        let bench = Program::of(&message.replace("/image/", "/lab/bench/")).unwrap();
        assert_eq!((bench.prefix().as_str(), bench.is_lab_test()), ("chain: ", true));
        assert_eq!(Program::of(&message.replace("true", "false")), None);
        assert_eq!(Program::of(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(Program::of("warning"), None);
    }
}
