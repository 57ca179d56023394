//! A child under ptrace. The thread that starts it is its tracer.

use std::{io, ptr};

use crate::{Result, cpus::check};

/// The offset of RIP in `struct user`.
pub const RIP: usize = 16 * 8;
/// The offset of the flags.
pub const FLAGS: usize = 18 * 8;
/// Returns the offset of a debug register in `struct user`.
pub const fn debug_register(number: usize) -> usize {
    848 + 8 * number
}

#[derive(Debug)]
pub struct Tracee(i32);

impl Tracee {
    /// Starts a child that calls `body`, which must do without the C library and never return. The
    /// child is stopped before its first instruction there.
    pub fn start(body: unsafe extern "C" fn(u64), argument: u64) -> Result<Self> {
        // SAFETY: between fork and `body` the child makes only calls that a signal handler may make.
        let pid = unsafe {
            let tracer = libc::getpid();
            let pid = check(libc::fork())?;
            if pid == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() == tracer {
                    libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                    libc::kill(libc::getpid(), libc::SIGSTOP);
                    body(argument);
                }
                libc::_exit(1);
            }
            pid
        };
        let tracee = Self(pid);
        match tracee.wait()? {
            libc::SIGSTOP => Ok(tracee),
            signal => Err(format!("the child stopped with signal {signal}").into()),
        }
    }

    /// Lets the child run until it stops. Returns the signal that stopped it.
    pub fn run(&self) -> Result<i32> {
        self.go(libc::PTRACE_CONT)
    }

    /// Executes one instruction of the child. Returns the signal that stopped it.
    pub fn step(&self) -> Result<i32> {
        self.go(libc::PTRACE_SINGLESTEP)
    }

    fn go(&self, request: libc::c_uint) -> Result<i32> {
        // SAFETY: no pointers are passed; the signal is not delivered.
        check(unsafe { libc::ptrace(request, self.0, 0, 0) } as i32)?;
        self.wait()
    }

    fn wait(&self) -> Result<i32> {
        let mut status = 0;
        // SAFETY: writes to `status`.
        while unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) } == -1 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error.into());
            }
        }
        if libc::WIFSTOPPED(status) {
            Ok(libc::WSTOPSIG(status))
        } else {
            Err(format!("the child has ended with status {status:#x}").into())
        }
    }

    /// Reads a word of the child's registers.
    pub fn peek(&self, offset: usize) -> Result<u64> {
        let mut word = 0u64;
        // The system call itself, not the library's wrapper, writes the word to an address.
        // SAFETY: writes to `word`.
        let result =
            unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_PEEKUSER, self.0, offset, &raw mut word) };
        check(result as i32)?;
        Ok(word)
    }

    /// Sets a word of the child's registers.
    pub fn poke(&self, offset: usize, word: u64) -> Result<()> {
        // SAFETY: concerns the child only.
        let result = unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_POKEUSER, self.0, offset, word) };
        check(result as i32)?;
        Ok(())
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // SAFETY: our own child, which has not been waited for to its end.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), libc::__WALL);
        }
    }
}
