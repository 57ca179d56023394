//! The operator's hook, which runs while everything else stands still.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use rustix::process::{Pid, Signal};
use std::{
    io,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// Time for a hook, during which everything stands still.
const HOOK_PATIENCE: Duration = Duration::from_secs(40);

pub fn run_hook(hook: &str) -> Result<()> {
    run_still(hook).map_err(|why| {
        Error::new(Exit::Failed, format!("the hook failed: {why}")).hint(
            "nothing was kept; the machine runs on. File systems are frozen while the hook runs, so \
                it must not write to them",
        )
    })
}

/// Runs a command while everything else stands still; returns the reason as a clause if it failed.
pub fn run_still(command: &str) -> Result<(), String> {
    let mut shell = Command::new("/bin/sh");
    // Standard output may be the image.
    shell.args(["-c", command]).stdout(std::io::stderr()).stdin(Stdio::null());
    // Its child processes end with it.
    shell.process_group(0);
    run_within(HOOK_PATIENCE, move || shell.spawn())
}

/// Runs a process that `start` starts. The start itself may wait for the disk that has the shell.
fn run_within(
    patience: Duration,
    start: impl FnOnce() -> io::Result<Child> + Send + 'static,
) -> Result<(), String> {
    let end = Instant::now() + patience;
    let late = || format!("it has not ended in {} s", patience.as_secs());
    let (sender, receiver) = mpsc::channel();
    let started = thread::Builder::new().name("hook".into()).spawn(move || {
        let child = start();
        // A process that starts too late must not act on a machine that goes on.
        if let Err(mpsc::SendError(Ok(child))) = sender.send(child) {
            kill(&child);
        }
    });
    started.map_err(|error| error.to_string())?;
    let started = receiver.recv_timeout(patience).map_err(|_| late())?;
    let mut child = started.map_err(|error| error.to_string())?;
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(status.to_string()),
            None if Instant::now() > end => {
                kill(&child);
                return Err(late());
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Ends a process with its child processes.
fn kill(leader: &Child) {
    if let Some(group) = i32::try_from(leader.id()).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0);
        command
    }

    #[test]
    fn a_hook_says_how_it_ended() {
        assert_eq!(run_still("exit 0"), Ok(()));
        assert_eq!(run_still("exit 3"), Err("exit status: 3".into()));
        let error = run_hook("exit 3").expect_err("it failed");
        assert_eq!(error.message, "the hook failed: exit status: 3");
        let missing = run_within(HOOK_PATIENCE, || Command::new("/no/such/shell").spawn());
        assert!(missing.is_err_and(|why| why.contains("No such file")));
    }

    #[test]
    fn a_hook_that_lasts_too_long_ends() {
        let begun = Instant::now();
        let mut command = shell("sleep 60");
        let ended = run_within(Duration::from_millis(100), move || command.spawn());
        assert_eq!(ended, Err("it has not ended in 0 s".into()));
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    /// The shell's disk may not answer, while everything stands still.
    #[test]
    fn a_hook_that_does_not_start_is_given_up_and_does_nothing_later() {
        let root = tempfile::tempdir().expect("a folder");
        let (late, done) = (root.path().join("late"), root.path().join("done"));
        let mut command = shell(&format!("sleep 1; touch {}", done.display()));
        let (go, may_go) = mpsc::channel::<()>();
        let (begun, started) = (Instant::now(), late.clone());
        let ended = run_within(Duration::from_millis(100), move || {
            let _ = may_go.recv();
            let child = command.spawn();
            std::fs::write(started, "").expect("a file");
            child
        });
        assert_eq!(ended, Err("it has not ended in 0 s".into()));
        assert!(begun.elapsed() < Duration::from_secs(30));
        go.send(()).expect("it waits");
        while !late.exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it did not start");
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_secs(2));
        assert!(!done.exists(), "it acted on a machine that goes on");
    }
}
