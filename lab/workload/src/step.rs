//! A child that is single-stepped, again and again, through instructions that are hard to step
//! over: CPUID, SYSCALL, PUSHF and POPF, and VMMCALL, which faults. Every instruction must stop the
//! child once.

use core::arch::global_asm;

use crate::{
    Result, cpus,
    report::Report,
    stop::Stop,
    tracee::{FLAGS, RIP, Tracee},
};

global_asm!(
    ".pushsection .text, \"ax\", @progbits",
    ".globl mercury_step_loop, mercury_step_first, mercury_step_fault, mercury_step_last",
    "mercury_step_loop:",
    "int3",
    "mercury_step_first:",
    "xor eax, eax",
    "cpuid",
    "mov eax, 39", // getpid
    "test rdi, rdi",
    "jnz 3f",
    "syscall",
    "3:",
    "pushfq",
    "and qword ptr [rsp], -257", // without TF, which is the tracer's
    "popfq",
    "mov ecx, 3",
    "2: dec ecx",
    "jnz 2b",
    "rdtsc",
    "mercury_step_fault:",
    "vmmcall",
    "nop",
    "mercury_step_last:",
    "jmp mercury_step_loop",
    ".popsection",
);

// SAFETY: defined above.
unsafe extern "C" {
    fn mercury_step_loop(without_syscall: u64);
    safe static mercury_step_first: u8;
    safe static mercury_step_fault: u8;
    safe static mercury_step_last: u8;
}

/// The number of instructions from the first to the last, with the loop's three rounds unrolled.
const STEPS: usize = 19;
const VMMCALL_LENGTH: u64 = 3;
const TRAP_FLAG: u64 = 1 << 8;

fn address(label: &u8) -> u64 {
    std::ptr::from_ref(label) as u64
}

/// The sequence to step through.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Leave SYSCALL out: Bochs traps after it, in the kernel
    #[arg(long)]
    without_syscall: bool,
}

/// Steps a child on each CPU.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    let steps = STEPS - usize::from(args.without_syscall);
    cpus::on_each(stop, report, |cpu, stop, report| {
        let child = Tracee::start(mercury_step_loop, args.without_syscall.into())?;
        let mut way = None;
        while !stop.is_set() {
            let signal = child.run()?;
            report.check(signal == libc::SIGTRAP, || format!("CPU {cpu}: signal {signal} instead of INT3"));
            let now = walk(&child, cpu, report)?;
            let first = way.get_or_insert_with(|| now.clone());
            report.check(now.len() == steps, || format!("CPU {cpu}: {} steps instead of {steps}", now.len()));
            report.check(*first == now, || format!("CPU {cpu}: another way: {now:x?}"));
            report.pass();
        }
        Ok(())
    })
}

/// Steps through the sequence. Returns the address of each instruction.
fn walk(child: &Tracee, cpu: usize, report: &mut Report) -> Result<Vec<u64>> {
    let mut way = Vec::new();
    let mut at = child.peek(RIP)?;
    report.check(at == address(&mercury_step_first), || format!("CPU {cpu}: INT3 stopped at {at:#x}"));
    while at != address(&mercury_step_last) && way.len() < 2 * STEPS {
        way.push(at - address(&mercury_step_first));
        let expected = if at == address(&mercury_step_fault) { libc::SIGILL } else { libc::SIGTRAP };
        let signal = child.step()?;
        report.check(signal == expected, || format!("CPU {cpu}: signal {signal} at {at:#x}"));
        if signal == libc::SIGILL {
            let same = child.peek(RIP)?;
            report.check(same == at, || format!("CPU {cpu}: VMMCALL at {at:#x} faulted at {same:#x}"));
            child.poke(RIP, at + VMMCALL_LENGTH)?;
        }
        at = child.peek(RIP)?;
    }
    // Linux loses track of the owner of the trap flag over a POPF that clears the flag, and would
    // leave it set.
    child.poke(FLAGS, child.peek(FLAGS)? & !TRAP_FLAG)?;
    Ok(way)
}
