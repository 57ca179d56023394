//! A thread with a shadow stack (SDM volume 1, "Control-flow enforcement technology") that calls
//! and returns, with a CPUID at the bottom of the calls. A lost shadow stack pointer faults at the
//! next return.

use core::arch::naked_asm;
use std::mem;

use crate::{Result, cpus, report::Report, stop::Stop};

/// Linux's `ARCH_SHSTK_ENABLE`, `ARCH_SHSTK_DISABLE` and `ARCH_SHSTK_SHSTK`.
const ENABLE: u64 = 0x5001;
const DISABLE: u64 = 0x5002;
const SHADOW_STACK: u64 = 1;

const ROUNDS: u64 = 2000;

/// The observations of one pass.
#[repr(C)]
#[derive(Debug, Default)]
struct Seen {
    enabled: i64,
    /// The shadow stack pointer before the calls and after them.
    before: u64,
    after: u64,
    disabled: i64,
}

/// The judgement of interrupted passes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Ignore passes that another thread has interrupted: Bochs's XRSTORS loses the shadow stack
    #[arg(long)]
    alone: bool,
}

/// Runs on each CPU.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    cpus::on_each(stop, report, |cpu, stop, report| {
        while !stop.is_set() {
            let mut seen = Seen::default();
            let switches = context_switches()?;
            // SAFETY: it returns with the shadow stack switched off, as it came.
            unsafe { call_and_return(&raw mut seen, ROUNDS) };
            if seen.enabled != 0 {
                return Err(std::io::Error::from_raw_os_error(-seen.enabled as i32).into());
            }
            if args.alone && context_switches()? != switches {
                continue;
            }
            report.check(seen.disabled == 0, || format!("CPU {cpu}: it stays on: {}", seen.disabled));
            let same = seen.before != 0 && seen.before == seen.after;
            report.check(same, || format!("CPU {cpu}: {seen:x?}"));
            report.pass();
        }
        Ok(())
    })
}

/// Returns how often this thread has given its processor away.
fn context_switches() -> Result<i64> {
    // SAFETY: numbers that may all be zero, which the kernel fills in.
    let usage = unsafe {
        let mut usage: libc::rusage = mem::zeroed();
        cpus::check(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage))?;
        usage
    };
    Ok(usage.ru_nvcsw + usage.ru_nivcsw)
}

/// Switches the shadow stack on, calls eight levels deep `rounds` times, and switches it off. A
/// function that switches it on cannot return before it is off, since the function's own return
/// address is not on it.
#[unsafe(naked)]
unsafe extern "C" fn call_and_return(seen: *mut Seen, rounds: u64) {
    naked_asm!(
        "push rbx; push r12; push r13",
        "mov r12, rdi",
        "mov r13, rsi",
        "mov eax, {arch_prctl}; mov edi, {enable}; mov esi, {shadow_stack}",
        "syscall",
        "mov [r12], rax",
        "test rax, rax",
        "jnz 4f",
        "xor eax, eax; rdsspq rax",
        "mov [r12 + 8], rax",
        "2:",
        "mov edi, 8",
        "call 5f",
        "dec r13",
        "jnz 2b",
        "xor eax, eax; rdsspq rax",
        "mov [r12 + 16], rax",
        "mov eax, {arch_prctl}; mov edi, {disable}; mov esi, {shadow_stack}",
        "syscall",
        "mov [r12 + 24], rax",
        "4:",
        "pop r13; pop r12; pop rbx",
        "ret",
        "5:",
        "dec edi",
        "jz 6f",
        "call 5b",
        "ret",
        "6:",
        "xor eax, eax; xor ecx, ecx",
        "cpuid",
        "ret",
        arch_prctl = const libc::SYS_arch_prctl,
        enable = const ENABLE,
        disable = const DISABLE,
        shadow_stack = const SHADOW_STACK,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_goes_on_without_a_shadow_stack() {
        let mut seen = Seen::default();
        // SAFETY: as in `run`.
        unsafe { call_and_return(&raw mut seen, 3) };
        assert!(seen.enabled != 0 || seen.before == seen.after && seen.disabled == 0, "{seen:x?}");
    }
}
