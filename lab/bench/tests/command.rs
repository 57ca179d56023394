//! The command `lab`: it runs commands in machines, has a shell on the terminal, and leaves no emulator
//! running.

#![allow(clippy::unwrap_used)]

use mercury_lab::{command::patient, pages};
use mercury_lab_bench::times::DEMO_CHECKPOINT_WITHIN;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::{
    fs,
    io::{Read, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The end of the prompt of a machine's shell, which is root's.
const PROMPT: &str = "~# ";

#[test]
#[ignore = "long"]
fn a_killed_owner_takes_its_machine_along() {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_lab"))
        .args(["run", "--", "echo up; sleep 1000"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 3];
    lab.stdout.take().unwrap().read_exact(&mut said).unwrap();
    let qemu = children(lab.id());
    assert!(!qemu.is_empty() && qemu.iter().all(|pid| runs(*pid)));
    lab.kill().unwrap();
    lab.wait().unwrap();
    let start = Instant::now();
    while qemu.iter().any(|pid| runs(*pid)) {
        assert!(start.elapsed() < Duration::from_secs(10), "QEMU has outlived its owner");
        thread::sleep(Duration::from_millis(20));
    }
}

fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let lists = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("children")).unwrap());
    lists
        .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>())
        .collect()
}

#[test]
fn the_lab_command_runs_a_command_and_ends_with_its_code() {
    let lab = Command::new(env!("CARGO_BIN_EXE_lab"))
        .args(["run", "--cpus", "1", "--", "echo out; echo err >&2; exit 5"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&lab.stdout), "out\n");
    assert!(String::from_utf8_lossy(&lab.stderr).contains("err\n"));
    assert_eq!(lab.status.code(), Some(5));
}

#[test]
#[ignore = "long"]
fn the_shell_is_interactive_and_ends_with_the_machine() {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_lab"))
        .args(["shell", "--cpus", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut keys = lab.stdin.take().unwrap();
    let mut screen = lab.stdout.take().unwrap();
    let mut seen = String::new();
    read_until(&mut screen, &mut seen, "Leave with");
    // Job control: Ctrl-C ends the sleep and not the shell.
    keys.write_all(b"sleep 1000\r").unwrap();
    read_until(&mut screen, &mut seen, "sleep 1000");
    thread::sleep(Duration::from_secs(2));
    keys.write_all(b"\x03echo sum $((40+2)); echo $PATH\r").unwrap();
    read_until(&mut screen, &mut seen, "sum 42");
    read_until(&mut screen, &mut seen, "/mercury/bin:");
    keys.write_all(b"poweroff\r").unwrap();
    assert!(lab.wait().unwrap().success());
}

/// The first screen offers things to try. Manual pages and completion of the command are there.
#[test]
#[ignore = "long"]
fn the_shell_welcomes_and_has_manual_and_completion() {
    let mut shell = Typed::start(&["shell", "--cpus", "1"]);
    shell.read_until("Leave with");
    for offered in ["Things to try", "mercury doctor", "mercury checkpoint /dev/vda", "man mercury"] {
        shell.read_until(offered);
    }
    shell.read_until(PROMPT);
    shell.type_keys("man -P cat mercury-checkpoint | grep -A1 '^SYN''OPSIS'; echo man''ual $?\r");
    shell.read_until("mercury checkpoint");
    shell.read_until("manual 0");
    // The first key completes the word, the second one would list words.
    shell.type_keys("echo mercury; mercury detac\t--help | head -3; echo com''pleted\r");
    shell.read_until("mercury detach --help");
    shell.read_until("completed");
    shell.type_keys("poweroff\r");
    assert!(shell.lab.wait().unwrap().success());
}

/// Types the lines of docs/checkpoint.md for a lab machine, as they are in the page.
#[test]
#[ignore = "long"]
fn the_page_on_checkpoints_can_be_typed_in_the_shell() {
    let lines = pages::commands("checkpoint.md", "## In a lab machine, from a fresh clone").unwrap();
    let [lines] = &lines[..] else { panic!("{lines:?}") };
    let mut shell = Typed::start(&["shell"]);
    shell.read_until("Leave with");
    shell.read_until(PROMPT);
    for line in lines {
        shell.type_keys(&format!("{line}\r"));
        if line.starts_with("mercury restore") {
            // The command that ends is that of the checkpoint, which the restored machine goes on with.
            shell.read_until("this machine was restored from image");
        }
        shell.read_until(PROMPT);
    }
    shell.type_keys("test ! -e /root/changed && echo go''ne\r");
    shell.read_until("gone");
    shell.type_keys("poweroff\r");
    assert!(shell.lab.wait().unwrap().success());
}

/// The shell of `lab pair` moves to the other machine with its job, and says how to come back.
#[test]
#[ignore = "long"]
fn the_shell_of_a_pair_moves() {
    let line = format!("exec {} pair", env!("CARGO_BIN_EXE_lab"));
    let mut pair = Typed::of(Command::new("script").args(["-qec", &line, "/dev/null"]));
    pair.read_until("This machine moves with this shell");
    let offered = pair.seen.lines().map(str::trim).find(|line| line.starts_with("mercury migrate"));
    let offered = offered.expect("a line to type").to_owned();
    pair.read_until(PROMPT);
    pair.type_keys("sleep 1000 & echo pro''cess $$\r");
    pair.read_until("process ");
    pair.read_until("\n");
    pair.type_keys(&format!("{offered}\r"));
    pair.read_until("The way back:");
    let way_back = pair.seen.rsplit_once("The way back:").unwrap().1.to_owned();
    pair.read_until("Press Return");
    pair.type_keys("\rjobs; echo still pro''cess $$\r");
    pair.read_until("Running");
    pair.read_until("still process ");
    pair.read_until("\n");
    let number = |mark: &str| {
        let (_, rest) = pair.seen.rsplit_once(mark).unwrap();
        rest.split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!(number("still process "), number("\nprocess "), "{way_back}");
    // Ctrl-A x
    pair.type_keys("\x01x");
    assert!(pair.lab.wait().unwrap().success());
}

/// The demonstrations end with their table, and with each promise kept. That of a checkpoint takes at most
/// three minutes on a quiet host.
#[test]
#[ignore = "long"]
fn the_demonstrations_keep_their_promises() {
    for subject in ["checkpoint", "move"] {
        let begun = Instant::now();
        let demo = Command::new(env!("CARGO_BIN_EXE_lab")).args(["demo", subject]).output().unwrap();
        let said = String::from_utf8_lossy(&demo.stdout);
        println!("{said}\n{subject}: {:.0} s", begun.elapsed().as_secs_f64());
        let failed = format!("{said}{}", String::from_utf8_lossy(&demo.stderr));
        assert!(demo.status.success() && said.contains("\n  ok   ") && !said.contains("FAIL"), "{failed}");
        assert!(subject != "checkpoint" || begun.elapsed() <= patient(DEMO_CHECKPOINT_WITHIN), "{failed}");
    }
}

/// The command `lab` with keys that are typed, and the screen so far.
struct Typed {
    lab: Child,
    keys: ChildStdin,
    screen: ChildStdout,
    seen: String,
    /// The length of the screen up to the last text that was waited for.
    read: usize,
}

impl Typed {
    fn start(words: &[&str]) -> Self {
        Self::of(Command::new(env!("CARGO_BIN_EXE_lab")).args(words))
    }

    fn of(command: &mut Command) -> Self {
        let mut lab = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (keys, screen) = (lab.stdin.take().unwrap(), lab.stdout.take().unwrap());
        Self { lab, keys, screen, seen: String::new(), read: 0 }
    }

    fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Reads on until `text` comes, after the last text that was waited for.
    fn read_until(&mut self, text: &str) {
        let mut rest = self.seen.split_off(self.read);
        read_until(&mut self.screen, &mut rest, text);
        self.read += rest.find(text).unwrap() + text.len();
        self.seen += &rest;
    }
}

/// Time limit for a text to come.
const LIMIT: Duration = Duration::from_secs(240);

fn read_until(screen: &mut ChildStdout, seen: &mut String, text: &str) {
    let mut piece = [0; 1024];
    let end = Instant::now() + patient(LIMIT);
    while !seen.contains(text) {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: 0 };
        let mut polled = [PollFd::new(screen, PollFlags::IN)];
        let ready = rustix::event::poll(&mut polled, Some(&left)).unwrap();
        assert!(ready > 0, "{text:?} did not come in time; there was: {seen}");
        let count = screen.read(&mut piece).unwrap();
        assert!(count > 0, "{text:?} never came; there was: {seen}");
        seen.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
}

fn runs(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !state.is_empty() && !state.contains(") Z ")
}
