//! The start of a program's process: a copy of the monitor that gives up everything but its own code and
//! memory.

use std::{
    ffi::c_void,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use libc::c_long;

use super::{AUTODISARM, Common, HANDLED, STACK, State, hosted_stub_handler, hosted_stub_returned, placed};
use crate::{
    error::{Error, Result},
    layout::{PAGE, STUB, STUB_STATE, STUB_STATE_SIZE},
    process,
    signal::{self, Action},
};

/// Starts the process, with the monitor's descriptors and a copy of its memory.
pub(super) fn spawn(common: &Common, index: usize, program: &[libc::sock_filter]) -> Result<OwnedFd> {
    let mut process: i32 = -1;
    let flags = libc::CLONE_FILES | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: It takes nothing.
    let parent = unsafe { libc::getpid() };
    // SAFETY: Signals are off, so that the child has no handler of ours called; the child only
    // makes system calls, from memory that is its own copy, and does not come back.
    let pid = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let pid = libc::syscall(libc::SYS_clone, c_long::from(flags), 0, &raw mut process, 0, 0);
        if pid == 0 {
            become_stub(common, index, program, parent);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        pid
    };
    if pid < 0 {
        return Err(Error::system("start a process for programs")
            .hint("the host limits your processes: raise ulimit -u, or use --isolation=none"));
    }
    signal::watch_child(pid as i32);
    // SAFETY: The host has just made the descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(process) })
}

/// Returns the listener that the process has made. Both processes still share their descriptors.
pub(super) fn listener(area: usize, process: &OwnedFd) -> Result<OwnedFd> {
    let state: *mut State = ptr::with_exposed_provenance_mut(area);
    loop {
        // SAFETY: The area is mapped; the process writes the number with one instruction.
        let number = unsafe { (&raw const (*state).listener).read_volatile() };
        if number > 0 {
            // SAFETY: The process has made the descriptor, and leaves it to us.
            return Ok(unsafe { OwnedFd::from_raw_fd(number as i32 - 1) });
        }
        let mut ended = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: It reads and writes the one structure.
        let is_ended = unsafe { libc::poll(&raw mut ended, 1, 0) } > 0;
        if number < 0 || is_ended {
            let error = io::Error::from_raw_os_error(-number as i32);
            let hint = match error.raw_os_error() {
                Some(libc::EMFILE | libc::ENFILE) => {
                    "each takes a few descriptors (ulimit -n); --isolation=none needs less"
                }
                Some(libc::ENOMEM) => {
                    "the host limits this process' memory (ulimit -v, -d); --isolation=none needs less"
                }
                _ => "the host's kernel has to be 5.19 or later, with seccomp; --isolation=none needs less",
            };
            return Err(Error::host(format!("cannot start a process for programs: {error}")).hint(hint));
        }
        // SAFETY: It takes nothing.
        unsafe { libc::sched_yield() };
    }
}

/// Turns the new process into a program's process.
///
/// # Safety
/// The process must have no other thread, and signals must be off.
unsafe fn become_stub(common: &Common, index: usize, program: &[libc::sock_filter], parent: i32) -> ! {
    let state: *mut State = ptr::with_exposed_provenance_mut(common.area(index));
    // SAFETY: The area is mapped.
    let say = |number: i64| unsafe { (&raw mut (*state).listener).write_volatile(number) };
    // SAFETY: All of it concerns this process only.
    match unsafe { prepare_stub(common, index, program, parent) } {
        Some(listener) => {
            say(i64::from(listener) + 1);
            // SAFETY: The code is mapped there; it never comes back.
            unsafe { std::arch::asm!("jmp {}", in(reg) STUB, options(noreturn)) }
        }
        None => {
            let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            say(-i64::from(error));
            // SAFETY: It ends the process.
            unsafe { libc::_exit(1) }
        }
    }
}

/// Prepares everything that needs no orders. Returns the listener's descriptor.
///
/// # Safety
/// As for [`become_stub`].
unsafe fn prepare_stub(
    common: &Common,
    index: usize,
    program: &[libc::sock_filter],
    parent: i32,
) -> Option<RawFd> {
    const RESTORER: u64 = 0x0400_0000;
    let done = |result: i32| (result == 0).then_some(());
    // SAFETY: The caller says that it is a process of its own; structures are the kernel's.
    unsafe {
        done(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        // The monitor may have ended before that.
        (libc::getppid() == parent).then_some(())?;
        // Signals of the terminal are the monitor's.
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"mercury-program".as_ptr());
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        done(libc::setrlimit(libc::RLIMIT_CORE, &raw const none))?;
        map_own(common, index)?;
        let stack = libc::stack_t {
            ss_sp: ptr::with_exposed_provenance_mut((STUB_STATE + STACK) as usize),
            ss_flags: AUTODISARM,
            ss_size: (STUB_STATE_SIZE - STACK) as usize,
        };
        done(libc::sigaltstack(&raw const stack, ptr::null_mut()))?;
        let action = Action {
            handler: placed(hosted_stub_handler),
            flags: (libc::SA_SIGINFO | libc::SA_ONSTACK) as u64 | RESTORER,
            restorer: placed(hosted_stub_returned),
            mask: !0,
        };
        let mut blocked = !0_u64;
        for signal in HANDLED {
            blocked &= !(1 << (signal - 1));
            let old = ptr::null_mut::<c_void>();
            done(libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, old, 8) as i32)?;
        }
        done(libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const blocked,
            ptr::null_mut::<c_void>(),
            8,
        ) as i32)?;
        done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
        let set = u64::from(libc::SECCOMP_SET_MODE_FILTER);
        let listener = libc::syscall(libc::SYS_seccomp, set, flags, &raw const program);
        (listener >= 0).then_some(listener as RawFd)
    }
}

/// Maps the code and the shared memory.
fn map_own(common: &Common, index: usize) -> Option<()> {
    let code = (STUB, PAGE, libc::PROT_READ | libc::PROT_EXEC, 0);
    let after_code = PAGE + index as u64 * STUB_STATE_SIZE;
    let state = (STUB_STATE, STUB_STATE_SIZE, libc::PROT_READ | libc::PROT_WRITE, after_code);
    for (address, length, rights, offset) in [code, state] {
        let file = (common.file.as_raw_fd(), offset);
        process::map_free(address, length, rights, libc::MAP_SHARED, file).then_some(())?;
    }
    Some(())
}
