//! The command `lab`: it runs commands in machines, has a shell on the terminal, and leaves no emulator running.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{Read, Write},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

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

fn read_until(screen: &mut impl Read, seen: &mut String, text: &str) {
    let mut piece = [0; 1024];
    while !seen.contains(text) {
        let count = screen.read(&mut piece).unwrap();
        assert!(count > 0, "{text:?} never came; there was: {seen}");
        seen.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
}

fn runs(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !state.is_empty() && !state.contains(") Z ")
}
