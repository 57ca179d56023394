//! The end of a machine: `poweroff`, `reboot` and `halt`.
//!
//! Every process is asked to stop, then killed, the disks are written, and the kernel is called.
//! Where systemd is the first process, systemd is asked instead.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{MountFlags, mount_remount},
    process::{Pid, Signal, kill_process_group},
    system::{RebootCommand, reboot},
};

use crate::{Result, init::AGENT};

/// Time in which processes may stop by themselves.
const GRACE: Duration = Duration::from_secs(5);
/// The file that shows that the end has begun, so that nothing is started again.
const ENDING: &str = "/run/lab.ending";

/// A way to end a machine.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// A power-off, at which QEMU ends.
    PowerOff,
    /// A restart, through the kernel's reboot notifiers and the firmware.
    Reboot,
    /// A stop of the processors; the machine stays as it is.
    Halt,
}

impl End {
    fn command(self) -> RebootCommand {
        match self {
            Self::PowerOff => RebootCommand::PowerOff,
            Self::Reboot => RebootCommand::Restart,
            Self::Halt => RebootCommand::Halt,
        }
    }

    /// Returns the end that a command's name asks for.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "poweroff" => Some(Self::PowerOff),
            "reboot" => Some(Self::Reboot),
            "halt" => Some(Self::Halt),
            _ => None,
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::PowerOff => "/usr/sbin/poweroff",
            Self::Reboot => "/usr/sbin/reboot",
            Self::Halt => "/usr/sbin/halt",
        }
    }
}

/// Ends the machine on behalf of a user's command. The command's shell ends too, and the kernel
/// then hangs up on all processes of its terminal. Therefore another process ends the machine.
pub fn request(how: End) -> Result<()> {
    if Path::new("/run/systemd/private").exists() {
        return Err(Command::new(how.program()).args(std::env::args().skip(1)).exec().into());
    }
    let mut ender = Command::new(AGENT);
    let status = ender.arg("end").arg(Path::new(how.program()).file_name().unwrap_or_default()).status()?;
    Err(format!("the machine has not ended: {status}").into())
}

/// Ends the machine, in a session of its own.
pub fn end_detached(how: End) -> Result<()> {
    rustix::process::setsid()?;
    end(how)
}

/// Returns true if the end has begun.
pub fn ending() -> bool {
    Path::new(ENDING).exists()
}

/// Ends the machine. Returns only if the kernel refuses.
pub fn end(how: End) -> Result<()> {
    fs::write(ENDING, "")?;
    signal_all(Signal::TERM);
    let start = Instant::now();
    while programs_are_left() && start.elapsed() < GRACE {
        thread::sleep(Duration::from_millis(20));
    }
    signal_all(Signal::KILL);
    rustix::fs::sync();
    let _ = mount_remount("/", MountFlags::RDONLY, "");
    rustix::fs::sync();
    Ok(reboot(how.command())?)
}

/// Signals every process but the first and this one. The process group 1 stands for "all".
fn signal_all(signal: Signal) {
    let _ = kill_process_group(Pid::INIT, signal);
}

/// Returns true if a process is left that runs a program, besides the first and this one.
fn programs_are_left() -> bool {
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else { return false };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != 1 && *pid != own)
        .any(runs_a_program)
}

/// Returns true if a process runs a program. Kernel threads and zombies have no command line.
fn runs_a_program(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}
