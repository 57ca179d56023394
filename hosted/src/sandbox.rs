//! What this process may still ask of the host while the guest runs: no new files, no connections, and of the host's system
//! calls only those that the monitor needs. A program of the guest's that gets past the monitor gets no further than this.

use std::{collections::BTreeMap, os::fd::RawFd};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus,
    Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::{
    error::{Error, Result},
    run::Isolation,
};

/// Allowed with any arguments: memory of this process, files that are open, time, signals of its own, its end.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_fdatasync,
    libc::SYS_close,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_ppoll,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_timer_settime,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Forbids opening files and connections, as far as the host's kernel can (Landlock). Says whether it does.
///
/// # Errors
/// If it can and does not.
pub fn forbid_files() -> Result<bool> {
    let wrong =
        |error: landlock::RulesetError| Error::host(format!("cannot forbid this process files: {error}"));
    let newest = ABI::V6;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(newest))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(newest)))
        .and_then(|rules| rules.scope(Scope::from_all(newest)))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(wrong)?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Descriptors with which more is allowed.
#[derive(Debug, Default)]
pub struct Special {
    /// Restricted rings (io_uring): to begin what is in them and to wait for it.
    pub rings: Vec<RawFd>,
    /// The socket that gdb connects to: to accept its connection.
    pub listener: Option<RawFd>,
    /// Processes of the machine's processors, which call each other.
    pub processors: Vec<u32>,
}

/// Forbids all threads of this process other system calls: one ends it.
///
/// # Errors
/// If the host does not do it.
pub fn forbid_calls(isolation: Isolation, special: &Special) -> Result<()> {
    let wrong = |error: &dyn std::fmt::Display| {
        Error::host(format!("cannot forbid this process system calls: {error}"))
    };
    let filter = filter(isolation, special).map_err(|error| wrong(&error))?;
    let program: BpfProgram = filter.try_into().map_err(|error: seccompiler::BackendError| wrong(&error))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| wrong(&error))
}

fn filter(
    isolation: Isolation,
    special: &Special,
) -> std::result::Result<SeccompFilter, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|&call| (call, Vec::new())).collect();
    let equal =
        |argument, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
    // The terminal's settings are put back at the end, which the C library makes sure of by reading them.
    let settings = [libc::TCSETS, libc::TCGETS];
    // Programs' processes are waited for, answered, and interrupted; their descriptors are open.
    let listening = [libc::SECCOMP_IOCTL_NOTIF_RECV, libc::SECCOMP_IOCTL_NOTIF_SEND];
    let listening = listening.into_iter().filter(|_| isolation == Isolation::Process);
    if isolation == Isolation::Process {
        rules.insert(libc::SYS_pidfd_send_signal, Vec::new());
    }
    let requests =
        settings.into_iter().chain(listening).map(|request| SeccompRule::new(vec![equal(1, request)?]));
    rules.insert(libc::SYS_ioctl, requests.collect::<std::result::Result<_, _>>()?);
    let called = special.processors.iter().copied().chain([std::process::id()]);
    let call = |process: u32| SeccompRule::new(vec![equal(0, process.into())?]);
    rules.insert(libc::SYS_tgkill, called.map(call).collect::<std::result::Result<_, _>>()?);
    let only = |descriptor: &RawFd| SeccompRule::new(vec![equal(0, u64::from(descriptor.cast_unsigned()))?]);
    for (call, descriptors) in
        [(libc::SYS_io_uring_enter, &special.rings[..]), (libc::SYS_accept4, special.listener.as_slice())]
    {
        if !descriptors.is_empty() {
            rules.insert(call, descriptors.iter().map(only).collect::<std::result::Result<_, _>>()?);
        }
    }
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, TargetArch::x86_64)
}
