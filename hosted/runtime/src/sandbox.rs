//! The rights that remain to this process while the guest runs: no new files, no connections, and
//! only the system calls that the monitor needs. A guest's program that gets past the monitor gets
//! no further.

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

/// System calls that are allowed with any arguments: memory of this process, open files, time, its
/// own signals, its end.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_fstat,
    libc::SYS_lseek,
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
    // Children: whether one has ended.
    libc::SYS_wait4,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// System calls by which a new process prepares itself.
const PREPARING: &[i64] = &[
    libc::SYS_close_range,
    libc::SYS_ftruncate,
    libc::SYS_getppid,
    libc::SYS_memfd_create,
    libc::SYS_prctl,
    libc::SYS_seccomp,
    libc::SYS_setpgid,
];

/// The calls that the host makes itself at its page of virtual system calls (vsyscall). A program may
/// jump there. These calls become signals, from which the guest gets the fault of its own kernel.
const VIRTUAL: [i64; 3] = [libc::SYS_gettimeofday, libc::SYS_time, libc::SYS_getcpu];

/// The number by which a call means the process that makes it.
const THIS_PROCESS: u32 = 0;

/// Closes the inherited descriptors, except the terminal's. A program that gets past the monitor
/// would have them.
///
/// # Errors
/// If the host does not do it.
pub fn close_inherited() -> Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: No part of this process owns a descriptor yet, so none that is in use is closed.
    match unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(Error::system("close inherited descriptors")),
    }
}

/// Closes all but the terminal and these.
///
/// # Errors
/// If the host does not do it.
pub fn keep_only(kept: impl Iterator<Item = RawFd> + Clone) -> Result<()> {
    let kept = kept.map(RawFd::cast_unsigned);
    let mut first = 3;
    loop {
        // A list of them would be the first memory that the process takes.
        let next: Option<libc::c_uint> = kept.clone().filter(|kept| *kept >= first).min();
        let last = next.map_or(libc::c_uint::MAX, |next| next - 1);
        // SAFETY: The former owners of these descriptors in this process never use them again.
        if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            return Err(Error::system("close the first process's descriptors"));
        }
        let Some(next) = next else { return Ok(()) };
        first = next + 1;
    }
}

/// Forbids opening files and connections, as far as the host's kernel can (Landlock). Says whether it does.
///
/// # Errors
/// If it can and does not.
pub fn forbid_files() -> Result<bool> {
    let wrong = |error: landlock::RulesetError| Error::host(format!("cannot give up opening files: {error}"));
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
    /// The socket by which this process sends descriptors.
    pub link: Option<RawFd>,
    /// The processes of the machine's processors, which call each other.
    pub processors: Vec<u32>,
    /// True if this process sends signals to processes whose descriptors (pidfd) it has.
    pub signals: bool,
    /// True if standard output is a log, which this process may empty.
    pub log: bool,
    /// True if this process binds itself to the host's processors.
    pub binds_itself: bool,
    /// This process, if it may send itself signals.
    pub own: Option<u32>,
    /// The flags with which this process makes others, which then give up these and more calls.
    pub makes: Option<libc::c_int>,
}

/// Forbids all threads of this process other system calls: one ends it.
///
/// # Errors
/// If the host does not do it.
pub fn forbid_calls(isolation: Isolation, special: &Special) -> Result<()> {
    let wrong = |error| Error::host(format!("cannot give up system calls: {error}"));
    for program in programs(isolation, special)? {
        seccompiler::apply_filter_all_threads(&program).map_err(wrong)?;
    }
    Ok(())
}

/// Makes the filters. The host takes the stricter result of the two.
fn programs(isolation: Isolation, special: &Special) -> Result<[BpfProgram; 2]> {
    let make = |filter: std::result::Result<SeccompFilter, seccompiler::BackendError>| {
        let program = filter.and_then(BpfProgram::try_from);
        program.map_err(|error| Error::host(format!("cannot give up system calls: {error}")))
    };
    Ok([make(trap_virtual_calls())?, make(filter(isolation, special))?])
}

/// The filters of [`forbid_calls`], which one process makes for those that begin as its copies: the making
/// would take memory in each.
#[derive(Debug)]
pub struct Filters([BpfProgram; 2]);

impl Filters {
    /// Makes the filters.
    ///
    /// # Errors
    /// If the host's processor is not known.
    pub fn new(isolation: Isolation, special: &Special) -> Result<Self> {
        programs(isolation, special).map(Self)
    }

    /// Forbids this process, which must have one thread, other system calls.
    ///
    /// # Errors
    /// If the host does not do it.
    pub fn apply(&self) -> Result<()> {
        for program in &self.0 {
            seccompiler::apply_filter(program)
                .map_err(|error| Error::host(format!("cannot give up system calls: {error}")))?;
        }
        Ok(())
    }
}

fn trap_virtual_calls() -> std::result::Result<SeccompFilter, seccompiler::BackendError> {
    let rules = VIRTUAL.map(|call| (call, Vec::new())).into();
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Trap, TargetArch::x86_64)
}

fn filter(
    isolation: Isolation,
    special: &Special,
) -> std::result::Result<SeccompFilter, seccompiler::BackendError> {
    let allowed = ALLOWED.iter().chain(&VIRTUAL);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = allowed.map(|&call| (call, Vec::new())).collect();
    let equal =
        |argument, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
    // The terminal's settings are put back at the end, which the C library makes sure of by reading them.
    let settings = [libc::TCSETS, libc::TCGETS];
    // Programs' processes are waited for, answered, and interrupted; their descriptors are open.
    let listening = [libc::SECCOMP_IOCTL_NOTIF_RECV, libc::SECCOMP_IOCTL_NOTIF_SEND];
    let listening = listening.into_iter().filter(|_| isolation == Isolation::Process);
    if isolation == Isolation::Process || special.signals {
        rules.insert(libc::SYS_pidfd_send_signal, Vec::new());
    }
    if let Some(flags) = special.makes {
        rules.extend(PREPARING.iter().map(|&call| (call, Vec::new())));
        let flags = SeccompRule::new(vec![equal(0, u64::from(flags.cast_unsigned()))?])?;
        rules.insert(libc::SYS_clone, vec![flags]);
    }
    let requests =
        settings.into_iter().chain(listening).map(|request| SeccompRule::new(vec![equal(1, request)?]));
    rules.insert(libc::SYS_ioctl, requests.collect::<std::result::Result<_, _>>()?);
    if special.log {
        let empty = SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
        let output = equal(0, u64::from(libc::STDOUT_FILENO.cast_unsigned()))?;
        rules.insert(libc::SYS_ftruncate, vec![SeccompRule::new(vec![output, empty])?]);
    }
    let called: Vec<u32> = special.processors.iter().copied().chain(special.own).collect();
    let call = |process: u32| SeccompRule::new(vec![equal(0, process.into())?]);
    let bound = special.binds_itself.then_some(THIS_PROCESS).into_iter().collect();
    for (number, processes) in [(libc::SYS_tgkill, called), (libc::SYS_sched_setaffinity, bound)] {
        // A call without rules would be allowed with any arguments.
        if !processes.is_empty() {
            let rules_of = processes.into_iter().map(call).collect::<std::result::Result<_, _>>()?;
            rules.insert(number, rules_of);
        }
    }
    let only = |descriptor: &RawFd| SeccompRule::new(vec![equal(0, u64::from(descriptor.cast_unsigned()))?]);
    for (call, descriptors) in [
        (libc::SYS_io_uring_enter, &special.rings[..]),
        (libc::SYS_accept4, special.listener.as_slice()),
        (libc::SYS_sendmsg, special.link.as_slice()),
    ] {
        if !descriptors.is_empty() {
            rules.insert(call, descriptors.iter().map(only).collect::<std::result::Result<_, _>>()?);
        }
    }
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, TargetArch::x86_64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs::{self, File},
        net::{TcpListener, TcpStream},
        os::{
            linux::net::SocketAddrExt,
            unix::net::{SocketAddr, UnixListener, UnixStream},
        },
        path::Path,
        process::Command,
        thread,
    };

    use super::*;

    /// Makes a system call. The attempts below have arguments that the host's kernel checks.
    fn call(number: i64, arguments: [i64; 5]) -> i64 {
        let [a, b, c, d, e] = arguments;
        // SAFETY: The calls of these tests take numbers and pointers that the host checks, or end
        // the process.
        unsafe { libc::syscall(number, a, b, c, d, e, 0) }
    }

    /// Returns the version of the host's Landlock: 4 knows TCP, 6 signals and abstract sockets.
    fn landlock() -> i64 {
        const VERSION: i64 = 1;
        call(libc::SYS_landlock_create_ruleset, [0, 0, VERSION, 0, 0])
    }

    fn is_done(number: i64, arguments: [i64; 5]) -> bool {
        call(number, arguments) >= 0
    }

    /// Attaches to a process that is no part of this one, and lets it go.
    fn trace(process: i64) -> bool {
        const SEIZE: i64 = libc::PTRACE_SEIZE as i64;
        is_done(libc::SYS_ptrace, [SEIZE, process, 0, 0, 0])
    }

    /// Mounts a file system where only this thread sees it.
    fn mount(on: &Path) -> bool {
        let on = std::ffi::CString::new(on.to_str().unwrap()).unwrap();
        let (kind, on) = (c"tmpfs".as_ptr() as i64, on.as_ptr() as i64);
        is_done(libc::SYS_mount, [kind, on, kind, 0, 0])
    }

    /// Tries what the host's kernel forbids a thread by this version of Landlock.
    fn attempts(directory: &Path, outside: i64, server: &TcpListener) -> Vec<(&'static str, i64, bool)> {
        let file = directory.join("there");
        let abstract_name = format!("mercury-sandbox-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(abstract_name).unwrap();
        vec![
            ("read a file", 1, File::open(&file).is_ok()),
            ("list a directory", 1, fs::read_dir(directory).is_ok()),
            ("write a file", 1, fs::write(&file, "text").is_ok()),
            ("make a file", 1, File::create_new(directory.join("new")).is_ok()),
            ("remove a file", 1, fs::remove_file(directory.join("new")).is_ok()),
            ("read through /proc", 1, File::open(format!("/proc/{outside}/mem")).is_ok()),
            ("start a program", 1, Command::new("/bin/true").status().is_ok()),
            ("trace a process", 1, trace(outside)),
            ("mount", 1, mount(directory)),
            ("connect", 4, TcpStream::connect(server.local_addr().unwrap()).is_ok()),
            ("listen", 4, TcpListener::bind("127.0.0.1:0").is_ok()),
            ("connect to an abstract socket", 6, UnixStream::connect_addr(&address).is_ok()),
            ("signal a process", 6, is_done(libc::SYS_kill, [outside, 0, 0, 0, 0])),
        ]
    }

    /// Compares attempts before and after. Mounting and tracing need rights in the first place:
    /// without them the attempts show nothing.
    #[test]
    fn files_connections_and_other_processes_are_out_of_reach() {
        let version = landlock();
        if version < 1 {
            println!("left out: the host's kernel has no Landlock");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("there"), "text").unwrap();
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = format!("mercury-sandbox-{}", std::process::id());
        let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        let sleep = || Command::new("sleep").arg("600").spawn().unwrap();
        // A process can be traced once.
        let mut others = [sleep(), sleep()];
        let [first, second] = others.each_ref().map(|other| i64::from(other.id()));
        // Rules are a thread's, and so is what it sees mounted.
        let (before, after) = thread::scope(|scope| {
            let work = || {
                let is_alone = is_done(libc::SYS_unshare, [libc::CLONE_NEWNS.into(), 0, 0, 0, 0]);
                let private = (libc::MS_REC | libc::MS_PRIVATE) as i64;
                let is_alone = is_alone && is_done(libc::SYS_mount, [0, c"/".as_ptr() as i64, 0, private, 0]);
                let place = directory.path().join("mounted");
                fs::create_dir(&place).unwrap();
                fs::write(place.join("there"), "text").unwrap();
                // Without rights of its own the thread would mount nothing, either.
                assert!(is_alone || !mount(&place));
                let before = attempts(directory.path(), first, &server);
                assert!(forbid_files().unwrap());
                (before, attempts(&place, second, &server))
            };
            scope.spawn(work).join().unwrap()
        });
        for other in &mut others {
            other.kill().unwrap();
            other.wait().unwrap();
        }
        let shown = before.iter().filter(|(_, _, is_done)| *is_done).count();
        let plain =
            ["read a file", "list a directory", "write a file", "make a file", "connect", "signal a process"];
        for ((what, least, was_done), (_, _, is_done)) in before.iter().zip(&after) {
            assert!(*was_done || !plain.contains(what), "{what} does not go before");
            assert!(!is_done || version < *least, "{what}: it is not forbidden");
        }
        println!("Landlock {version}: {shown} of {} go before, and none after", before.len());
    }

    /// The system calls with which an escape from a process would begin.
    const WAYS_OUT: &[i64] = &[
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_openat2,
        libc::SYS_creat,
        libc::SYS_open_by_handle_at,
        libc::SYS_memfd_create,
        libc::SYS_socket,
        libc::SYS_socketpair,
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_sendto,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_kill,
        libc::SYS_tkill,
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_move_mount,
        libc::SYS_fsopen,
        libc::SYS_chroot,
        libc::SYS_pivot_root,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_fork,
        libc::SYS_vfork,
        libc::SYS_clone,
        libc::SYS_clone3,
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_keyctl,
        libc::SYS_prctl,
        libc::SYS_seccomp,
        libc::SYS_personality,
        libc::SYS_fcntl,
        libc::SYS_dup2,
        libc::SYS_setuid,
    ];
    const NOTHING: i32 = 7;

    /// Returns the signal that ends a process which has the filter and makes a call, or 0.
    fn signal_of(program: &BpfProgram, number: i64, arguments: [i64; 5]) -> i32 {
        signal_after(|| seccompiler::apply_filter(program).is_ok(), number, arguments)
    }

    /// Returns the signal that ends a process which has limited itself and makes a call, or 0.
    fn signal_after(limit: impl FnOnce() -> bool, number: i64, arguments: [i64; 5]) -> i32 {
        // SAFETY: The child makes system calls only.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: The limit is read only; there is no core dump of what ends by a signal.
            unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
            if limit() {
                call(number, arguments);
            }
            // SAFETY: It ends the process without cleaning up what is its parent's.
            unsafe { libc::_exit(NOTHING) };
        }
        let mut status = 0;
        // SAFETY: The status is written by the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 }
    }

    /// Makes the filter of a machine without special devices.
    fn plain(isolation: Isolation) -> BpfProgram {
        filter(isolation, &Special::default()).unwrap().try_into().unwrap()
    }

    #[test]
    fn every_way_out_of_the_process_ends_it() {
        for isolation in [Isolation::None, Isolation::Process] {
            let program = plain(isolation);
            for &number in WAYS_OUT {
                assert_eq!(signal_of(&program, number, [0; 5]), libc::SIGSYS, "{isolation:?}: call {number}");
            }
        }
    }

    /// The filters that one process makes for others forbid these all ways out, too. They may bind
    /// themselves, and send no signals at all.
    #[test]
    fn filters_made_for_other_processes_forbid_the_same() {
        let special = Special { binds_itself: true, ..Special::default() };
        let filters = Filters::new(Isolation::None, &special).unwrap();
        let signal = |number, arguments| signal_after(|| filters.apply().is_ok(), number, arguments);
        for &number in WAYS_OUT {
            assert_eq!(signal(number, [0; 5]), libc::SIGSYS, "call {number}");
        }
        let own = i64::from(std::process::id());
        assert_eq!(signal(libc::SYS_tgkill, [own, own, 0, 0, 0]), libc::SIGSYS);
        assert_eq!(signal(libc::SYS_pidfd_send_signal, [-1, 0, 0, 0, 0]), libc::SIGSYS);
        assert_eq!(signal(libc::SYS_sched_setaffinity, [0, 0, 0, 0, 0]), 0);
        assert_eq!(signal(libc::SYS_sched_setaffinity, [own, 0, 0, 0, 0]), libc::SIGSYS);
        assert_eq!(signal(libc::SYS_getpid, [0; 5]), 0);
    }

    /// A machine empties its log, and no other file.
    #[test]
    fn only_a_log_may_be_emptied() {
        let special = Special { log: true, ..Special::default() };
        let program: BpfProgram = filter(Isolation::None, &special).unwrap().try_into().unwrap();
        let ends = |arguments| signal_of(&program, libc::SYS_ftruncate, arguments) == libc::SIGSYS;
        // The size is checked before the file, which is no log here.
        assert!(ends([1, 1, 0, 0, 0]) && ends([1, -1, 0, 0, 0]) && ends([2, 0, 0, 0, 0]) && ends([7; 5]));
        let output = i64::from(libc::STDOUT_FILENO);
        let emptied = || {
            // SAFETY: It takes descriptors. The child's output is a pipe from here on.
            unsafe {
                let mut ends = [0; 2];
                libc::pipe(ends.as_mut_ptr()) == 0 && libc::dup2(ends[1], libc::STDOUT_FILENO) >= 0
            }
        };
        let limit = || emptied() && seccompiler::apply_filter(&program).is_ok();
        assert_eq!(signal_after(limit, libc::SYS_ftruncate, [output, 0, 0, 0, 0]), 0);
    }

    /// A process that makes others may do what these need, and make no other kind.
    #[test]
    fn a_process_that_makes_others_makes_no_threads() {
        let flags = libc::CLONE_PARENT | libc::SIGCHLD;
        let special = Special { makes: Some(flags), ..Special::default() };
        let program: BpfProgram = filter(Isolation::None, &special).unwrap().try_into().unwrap();
        let ends = |number, arguments| signal_of(&program, number, arguments) == libc::SIGSYS;
        for number in
            [libc::SYS_execve, libc::SYS_openat, libc::SYS_socket, libc::SYS_ptrace, libc::SYS_clone3]
        {
            assert!(ends(number, [0; 5]), "call {number}");
        }
        assert!(ends(libc::SYS_clone, [libc::CLONE_VM.into(), 0, 0, 0, 0]));
        assert!(!ends(libc::SYS_getppid, [0; 5]) && !ends(libc::SYS_close_range, [9, 8, 0, 0, 0]));
    }

    #[test]
    fn unlisted_system_calls_end_the_monitor_and_needed_ones_do_not() {
        const NUMBERS: i64 = 480;
        const X32: i64 = 0x4000_0000;
        /// The calls of the trampolines of the host's probes (`uretprobe`, `uprobe`). Newer hosts
        /// do not filter them at all. They have no effect elsewhere.
        const PROBES: [i64; 2] = [335, 336];
        let program = plain(Isolation::None);
        let is_named =
            |number: &i64| ALLOWED.contains(number) || VIRTUAL.contains(number) || PROBES.contains(number);
        for number in (0..NUMBERS).filter(|number| !is_named(number)) {
            assert_eq!(signal_of(&program, number, [0; 5]), libc::SIGSYS, "call {number}");
        }
        assert_eq!(signal_of(&program, X32 | libc::SYS_getpid, [0; 5]), libc::SIGSYS);
        for number in [libc::SYS_read, libc::SYS_getpid, libc::SYS_sched_yield] {
            assert_eq!(signal_of(&program, number, [-1, 0, 0, 0, 0]), 0, "call {number}");
        }
    }

    #[test]
    fn virtual_calls_become_signals_and_end_nothing() {
        let [signals, all] =
            [trap_virtual_calls(), filter(Isolation::None, &Special::default())].map(|one| one.unwrap());
        let [signals, all]: [BpfProgram; 2] = [signals.try_into().unwrap(), all.try_into().unwrap()];
        for number in VIRTUAL {
            assert_eq!(signal_of(&signals, number, [0; 5]), libc::SIGSYS, "call {number}");
            assert_eq!(signal_of(&all, number, [0; 5]), 0, "call {number}");
        }
        assert_eq!(signal_of(&signals, libc::SYS_getpid, [0; 5]), 0);
    }

    /// Calls that are allowed for one purpose are for no other.
    #[test]
    fn arguments_of_system_calls_are_checked() {
        let own = i64::from(std::process::id());
        let special = Special {
            log: false,
            rings: vec![11],
            listener: Some(12),
            link: Some(13),
            processors: vec![4321],
            signals: true,
            binds_itself: true,
            own: Some(std::process::id()),
            makes: None,
        };
        let program: BpfProgram = filter(Isolation::None, &special).unwrap().try_into().unwrap();
        let ends = |number, arguments| signal_of(&program, number, arguments) == libc::SIGSYS;
        let request = |request: libc::c_ulong| [-1, request as i64, 0, 0, 0];
        assert!(!ends(libc::SYS_ioctl, request(libc::TCGETS)));
        assert!(ends(libc::SYS_ioctl, request(libc::TIOCSTI)));
        assert!(ends(libc::SYS_ioctl, request(libc::SECCOMP_IOCTL_NOTIF_RECV)));
        for (number, right, wrong) in [
            (libc::SYS_io_uring_enter, 11, 12),
            (libc::SYS_accept4, 12, 11),
            (libc::SYS_sendmsg, 13, 12),
            (libc::SYS_tgkill, own, 1),
            (libc::SYS_tgkill, 4321, 4322),
            (libc::SYS_sched_setaffinity, 0, 4321),
        ] {
            assert!(!ends(number, [right, -1, 0, 0, 0]), "call {number} with {right}");
            assert!(ends(number, [wrong, -1, 0, 0, 0]), "call {number} with {wrong}");
        }
        assert!(!ends(libc::SYS_pidfd_send_signal, [-1, 0, 0, 0, 0]));
    }
}
