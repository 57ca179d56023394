//! The command's own process, which has to go on while everything else stands still.

use crate::mounts;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};

/// Ignores the terminal's stop signals: a stopped command would leave others standing still.
pub fn stay_in_the_foreground() {
    for signal in [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU] {
        // SAFETY: ignoring a signal installs no code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Locks all memory of this program, so that none of it has to be read from a file: a disk or a
/// server may not answer.
pub fn keep_in_memory() -> Result<()> {
    rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT).map_err(|error| {
        Error::new(Exit::Failed, format!("the command's memory could not be locked: {error}"))
            .hint("free memory, or raise the limit of locked memory (`ulimit -l unlimited`)")
    })
}

/// Returns true if standard output can be written to while file systems are frozen and readers
/// stand still.
pub fn may_be_written(sysroot: &Sysroot) -> bool {
    let Ok(path) = std::fs::read_link("/proc/self/fd/1") else { return false };
    let mounts = mounts::mounted(sysroot).unwrap_or_default();
    !path.is_absolute() || !mounts::holder(&mounts, &path, sysroot).is_some_and(|mount| mount.writable)
}
