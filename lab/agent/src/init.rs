//! The first process. It sets the machine up, starts the agent and, if wanted, a shell, reaps
//! orphans, and ends the machine on request.
//!
//! With `lab.init=systemd` it gives way to systemd instead, and leaves systemd a unit that starts
//! the agent.

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Child, Command},
};

use mercury_lab_agent::{LAB_DIR, PATH};
use rustix::{
    mount::{MountFlags, mount},
    process::{Pid, WaitOptions, wait},
};

use crate::{Result, boot, cmdline::Cmdline, environment, power};

/// This program's path, on the artefacts' disk.
pub const AGENT: &str = "/mercury/bin/mercury-lab-agent";

/// Runs the machine. Returns only if the machine could not be set up.
pub fn run() -> Result<()> {
    boot::enter_root()?;
    let cmdline = Cmdline::read();
    // A root that is only read has no room for it.
    if !cmdline.has("ro") {
        run_script("lab-own-kernel", &[])?;
    }
    if let Some(words) = cmdline.get("nfs") {
        run_script("lab-nfs-root", &words.split(',').collect::<Vec<_>>())?;
    }
    match cmdline.get("root") {
        Some("ram") => run_script("lab-ram-root", &[])?,
        Some("mapped") => {
            run_script("lab-ram-root", &[])?;
            run_script("lab-mapped-root", &[])?;
        }
        Some("small") => run_script("lab-small-root", &[])?,
        _ => {}
    }
    if cmdline.get("init") == Some("systemd") {
        return become_systemd();
    }
    set_up(&cmdline)?;
    supervise(&cmdline)
}

/// Runs one of the lab's scripts: most change to another root.
fn run_script(script: &str, arguments: &[&str]) -> Result<()> {
    let path = format!("{LAB_DIR}/lib/{script}");
    let status = Command::new("/bin/sh").arg(&path).args(arguments).env("PATH", PATH).status()?;
    if status.success() { Ok(()) } else { Err(format!("{path}: {status}").into()) }
}

fn become_systemd() -> Result<()> {
    const UNIT: &str = include_str!("agent.service");
    mount_dir("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=755"))?;
    let wants = "/run/systemd/system/basic.target.wants";
    fs::create_dir_all(wants)?;
    fs::write("/run/systemd/system/mercury-lab-agent.service", UNIT)?;
    let link = format!("{wants}/mercury-lab-agent.service");
    std::os::unix::fs::symlink("../mercury-lab-agent.service", link)?;
    Err(Command::new("/sbin/init").exec().into())
}

fn set_up(cmdline: &Cmdline) -> Result<()> {
    mount_rest()?;
    rustix::system::sethostname(cmdline.get("host").unwrap_or("lab").as_bytes())?;
    Command::new("/bin/sh").arg(format!("{LAB_DIR}/lib/lab-network")).env("PATH", PATH).spawn()?;
    Ok(())
}

fn mount_rest() -> Result<()> {
    let safe = MountFlags::NOSUID | MountFlags::NODEV;
    mount_dir("devpts", "/dev/pts", MountFlags::NOSUID, Some(c"gid=5,mode=620,ptmxmode=666"))?;
    mount_dir("tmpfs", "/dev/shm", safe, Some(c"mode=1777"))?;
    mount_dir("tmpfs", "/run", safe, Some(c"mode=755"))?;
    mount_dir("tmpfs", "/tmp", safe, Some(c"mode=1777"))?;
    // Some tests need it, and some kernels lack it.
    let _ = mount_dir("cgroup2", "/sys/fs/cgroup", safe, None);
    let _ = mount_dir("debugfs", "/sys/kernel/debug", safe, None);
    let _ = mount_dir("tracefs", "/sys/kernel/tracing", safe, None);
    fs::create_dir_all("/run/lock")?;
    for (link, to) in [("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        let to = format!("/proc/self/{to}");
        let _ = std::os::unix::fs::symlink(to, format!("/dev/{link}"));
    }
    Ok(())
}

fn mount_dir(kind: &str, at: &str, flags: MountFlags, options: Option<&std::ffi::CStr>) -> Result<()> {
    let _ = fs::create_dir_all(at);
    mount(kind, at, kind, flags, options)
        .map_err(|error| format!("cannot mount {kind} at {at}: {error}").into())
}

/// Keeps the agent and the shell running and reaps orphans, until the end is requested.
fn supervise(cmdline: &Cmdline) -> Result<()> {
    let mut agent = start("serve")?;
    let shell = (cmdline.get("shell") == Some("1")).then(|| start("shell")).transpose()?;
    loop {
        let Ok(Some((pid, _))) = wait(WaitOptions::empty()) else { continue };
        if power::ending() {
            continue;
        }
        if is(&agent, pid) {
            agent = start("serve")?;
        } else if shell.as_ref().is_some_and(|shell| is(shell, pid)) {
            power::end(power::End::PowerOff)?;
        }
    }
}

fn start(role: &str) -> Result<Child> {
    let mut command = Command::new(AGENT);
    Ok(command.arg(role).env_clear().envs(environment::variables()).spawn()?)
}

fn is(child: &Child, pid: Pid) -> bool {
    i32::try_from(child.id()).is_ok_and(|id| id == pid.as_raw_nonzero().get())
}
