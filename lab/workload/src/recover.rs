//! Instructions that are expected to fault. The signal's handler goes on after them and records the
//! fault.

use std::{cell::UnsafeCell, mem, ptr};

use crate::{Result, cpus::check};

/// The place at which the current thread goes on after a fault. [`attempt`] writes `resume` and
/// `start`.
#[repr(C)]
#[derive(Debug)]
pub struct Recovery {
    /// The address after the instruction, or 0 while no fault is expected.
    pub resume: u64,
    /// The instruction's address.
    pub start: u64,
    /// The signal that came.
    pub signal: i32,
    at: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The signal: SIGILL, SIGSEGV …
    pub signal: i32,
    /// True if the faulting instruction is the one that was tried.
    pub in_place: bool,
}

thread_local! {
    static RECOVERY: UnsafeCell<Recovery> =
        const { UnsafeCell::new(Recovery { resume: 0, start: 0, signal: 0, at: 0 }) };
}

fn recovery() -> *mut Recovery {
    RECOVERY.with(UnsafeCell::get)
}

/// Handles the signals of faults from now on, on all threads.
pub fn install() -> Result<()> {
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
    for signal in [libc::SIGILL, libc::SIGSEGV, libc::SIGBUS, libc::SIGTRAP] {
        // SAFETY: `on_fault` is a handler of the kind that SA_SIGINFO asks for and only touches its
        // thread's own recovery; the action lives until the call returns.
        unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO;
            check(libc::sigaction(signal, &raw const action, ptr::null_mut()))?;
        }
    }
    Ok(())
}

extern "C" fn on_fault(signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the interrupted context, and the recovery is this thread's own, which
    // it does not touch between `arm` and `disarm` other than from the instruction sequence itself.
    unsafe {
        let rip = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize];
        let recovery = recovery();
        if (*recovery).resume == 0 {
            // An unexpected fault: the instruction faults again and ends the process.
            libc::signal(signal, libc::SIG_DFL);
            return;
        }
        (*recovery).signal = signal;
        (*recovery).at = *rip as u64;
        *rip = (*recovery).resume as i64;
    }
}

pub fn arm() -> *mut Recovery {
    let recovery = recovery();
    // SAFETY: this thread's own, and no attempt is under way.
    unsafe { recovery.write(Recovery { resume: 0, start: 0, signal: 0, at: 0 }) };
    recovery
}

/// Ends an attempt. Returns the fault, if there was one.
pub fn disarm() -> Option<Fault> {
    let recovery = recovery();
    // SAFETY: this thread's own, and the attempt is over.
    let done = unsafe { recovery.replace(Recovery { resume: 0, start: 0, signal: 0, at: 0 }) };
    (done.signal != 0).then_some(Fault { signal: done.signal, in_place: done.at == done.start })
}

/// Executes instructions of which the first may fault. The value is the fault, if there was one.
/// The macro goes into an unsafe block, with the operands that `asm!` takes.
macro_rules! attempt {
    ($instruction:expr $(, $($operands:tt)*)?) => {{
        let recovery = $crate::recover::arm();
        core::arch::asm!(
            "lea {scratch}, [rip + 2f]",
            "mov [{recovery} + 8], {scratch}",
            "lea {scratch}, [rip + 3f]",
            "mov [{recovery}], {scratch}",
            "2:",
            $instruction,
            "3:",
            recovery = in(reg) recovery,
            scratch = out(reg) _,
            $($($operands)*)?
        );
        $crate::recover::disarm()
    }};
}
pub(crate) use attempt;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_seen_and_survived() {
        install().unwrap();
        // SAFETY: the one faults, and the other does nothing.
        let (fault, none) = unsafe { (attempt!("ud2"), attempt!("nop")) };
        assert_eq!(fault, Some(Fault { signal: libc::SIGILL, in_place: true }));
        assert_eq!(none, None);
    }
}
