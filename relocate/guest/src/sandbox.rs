//! The rights that remain to the monitor while the guest runs: no new files, connections, programs and
//! threads, and only the system calls that the devices need (seccomp). A guest that gets past KVM and the
//! monitor's devices gets no further.

use kvm_bindings::KVMIO;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::{collections::BTreeMap, os::fd::RawFd};

/// System calls that are allowed with any arguments: memory of this process, open files, time, signals that
/// it waits for, its end.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_close,
    libc::SYS_recvfrom,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Of a copy of this process.
    libc::SYS_wait4,
];

/// Requests to KVM: run a processor, set an interrupt line, deliver a message. When the guest moves away: log
/// what is written to its memory, tell what was, and translate an address.
const RUN: u32 = KVMIO << 8 | 0x80;
const SET_LINE: u32 = 0x4008_0061 | KVMIO << 8;
const SEND_MESSAGE: u32 = 0x4020_00A5 | KVMIO << 8;
const GIVE_MEMORY: u32 = 0x4020_0046 | KVMIO << 8;
const TAKE_LOG: u32 = 0x4010_0042 | KVMIO << 8;
const TRANSLATE: u32 = 0xC018_0085 | KVMIO << 8;
/// Request to a block device: discard a range.
const DISCARD: u64 = 0x1277;

/// Forbids all threads of this process other system calls: one ends it. `listeners` are sockets that accept
/// connections, and `rings` io_urings that were restricted.
///
/// # Errors
/// The host does not do it.
pub fn confine(listeners: &[RawFd], rings: &[RawFd]) -> Result<()> {
    let wrong = |error: &dyn std::fmt::Display| {
        Error::new(Exit::Impossible, format!("cannot give up system calls: {error}"))
            .hint("boot a kernel with CONFIG_SECCOMP_FILTER, as all of Debian's have it")
    };
    let program = program(listeners, rings).map_err(|error| wrong(&error))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| wrong(&error))
}

fn program(listeners: &[RawFd], rings: &[RawFd]) -> std::result::Result<BpfProgram, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|&call| (call, Vec::new())).collect();
    let equal = |argument, value: u64| {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)?;
        SeccompRule::new(vec![condition])
    };
    // The terminal's settings are put back at the end. A client's socket is told not to block.
    let requests = [
        RUN.into(),
        SET_LINE.into(),
        SEND_MESSAGE.into(),
        GIVE_MEMORY.into(),
        TAKE_LOG.into(),
        TRANSLATE.into(),
        DISCARD,
        libc::TCGETS,
        libc::TCSETS,
        libc::FIONBIO,
    ];
    rules.insert(libc::SYS_ioctl, requests.into_iter().map(|one| equal(1, one)).collect::<Result<_, _>>()?);
    // Processors are interrupted at the end.
    rules.insert(libc::SYS_tgkill, vec![equal(0, std::process::id().into())?]);
    // A copy of this process that keeps the guest's memory, without a new thread, and with the same rights.
    rules.insert(libc::SYS_clone, vec![equal(0, libc::SIGCHLD.cast_unsigned().into())?]);
    // To the other end of a connection, and to no address.
    rules.insert(libc::SYS_sendto, vec![equal(4, 0)?]);
    for (call, descriptors) in [(libc::SYS_accept4, listeners), (libc::SYS_io_uring_enter, rings)] {
        let only = descriptors.iter().map(|one| equal(0, u64::from(one.cast_unsigned())));
        let only: Vec<_> = only.collect::<Result<_, _>>()?;
        if !only.is_empty() {
            rules.insert(call, only);
        }
    }
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, TargetArch::x86_64)?
        .try_into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Returns the signal that ends a process which has the filter and makes a call, or 0.
    fn signal_of(program: &BpfProgram, number: i64, arguments: [i64; 5]) -> i32 {
        let [a, b, c, d, e] = arguments;
        // SAFETY: The child makes system calls only, whose arguments the host's kernel checks. It writes no
        // core dump, and ends without its parent's destructors.
        unsafe {
            let child = libc::fork();
            assert!(child >= 0);
            if child == 0 {
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
                if seccompiler::apply_filter(program).is_ok() {
                    libc::syscall(number, a, b, c, d, e, 0);
                }
                libc::_exit(7);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 }
        }
    }

    #[test]
    fn system_calls_that_are_not_listed_end_the_monitor() {
        const NUMBERS: i64 = 480;
        /// Calls of the host's probes, which newer hosts do not filter.
        const PROBES: [i64; 2] = [335, 336];
        let program = program(&[], &[]).unwrap();
        for number in (0..NUMBERS).filter(|number| !ALLOWED.contains(number) && !PROBES.contains(number)) {
            // No address: the one case in which a message may be sent.
            let arguments = if number == libc::SYS_sendto { [-1, 0, 0, 0, 1] } else { [-1, 0, 0, 0, 0] };
            assert_eq!(signal_of(&program, number, arguments), libc::SIGSYS, "call {number}");
        }
        for number in [libc::SYS_read, libc::SYS_getpid, libc::SYS_sched_yield] {
            assert_eq!(signal_of(&program, number, [-1, 0, 0, 0, 0]), 0, "call {number}");
        }
    }

    #[test]
    fn calls_that_are_allowed_for_one_purpose_are_for_no_other() {
        let program = program(&[12], &[11]).unwrap();
        let ends = |number, arguments| signal_of(&program, number, arguments) == libc::SIGSYS;
        let own = i64::from(std::process::id());
        for (number, right, wrong) in [
            (libc::SYS_accept4, [12, 0, 0, 0, 0], [11, 0, 0, 0, 0]),
            (libc::SYS_io_uring_enter, [11, 0, 0, 0, 0], [12, 0, 0, 0, 0]),
            (libc::SYS_tgkill, [own, -1, 0, 0, 0], [1, -1, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0xAE80, 0, 0, 0], [-1, 0xAE01, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0x4008_AE61, 0, 0, 0], [-1, 0xAE41, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0x4020_AE46, 0, 0, 0], [-1, 0x40A0_AE49, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0x4010_AE42, 0, 0, 0], [-1, 0x4010_AE43, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0xC018_AE85, 0, 0, 0], [-1, 0x4090_AE82, 0, 0, 0]),
            (libc::SYS_clone, [17, 0, 0, 0, 0], [17 | 0x100, 0, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0x4020_AEA5, 0, 0, 0], [-1, 0x4020_AEA6, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0x1277, 0, 0, 0], [-1, 0x127F, 0, 0, 0]),
            (libc::SYS_ioctl, [-1, 0x5402, 0, 0, 0], [-1, 0x5412, 0, 0, 0]),
            (libc::SYS_sendto, [-1, 0, 0, 0, 0], [-1, 0, 0, 0, 1]),
        ] {
            assert!(!ends(number, right), "call {number} with {right:?}");
            assert!(ends(number, wrong), "call {number} with {wrong:?}");
        }
    }
}
