//! The operator's hook, which runs while everything else stands still.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use rustix::process::{Pid, Signal};
use std::{
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    time,
};

/// Time for a hook, during which everything stands still.
const HOOK_PATIENCE: time::Duration = time::Duration::from_secs(40);

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
    let mut child = shell.spawn().map_err(|error| error.to_string())?;
    let end = time::Instant::now() + HOOK_PATIENCE;
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(status.to_string()),
            None if time::Instant::now() > end => {
                let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
                if let Some(group) = group {
                    let _ = rustix::process::kill_process_group(group, Signal::KILL);
                }
                return Err(format!("it has not ended in {} s", HOOK_PATIENCE.as_secs()));
            }
            None => std::thread::sleep(time::Duration::from_millis(5)),
        }
    }
}
