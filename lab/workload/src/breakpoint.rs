//! Hardware breakpoints. perf counts stores to a variable and calls of a function. A debugger
//! watches a variable of its child. Both must see each hit exactly once. In another mode, a
//! breakpoint of each CPU is armed from beginning to end whatever task runs there, and no hit may
//! be missed.
//!
//! There is one watched variable at a time. With two, QEMU 7.2 reports the one that was hit before
//! along with the one that is hit.

use core::arch::global_asm;
use std::{
    hint::black_box,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crate::{
    Result,
    attr::{BREAKPOINT_EXECUTE, BREAKPOINT_WRITE},
    cpus,
    perf::{Event, Target},
    report::Report,
    stop::Stop,
    tracee::{RIP, Tracee, debug_register},
};

global_asm!(
    ".pushsection .text, \"ax\", @progbits",
    ".globl mercury_watch_loop, mercury_watch_mark",
    "mercury_watch_loop:",
    "mov ecx, {stores}",
    "2: mov dword ptr [rdi], ecx",
    "dec ecx",
    "jnz 2b",
    "int3",
    "mercury_watch_mark:",
    "jmp mercury_watch_loop",
    ".popsection",
    stores = const WATCHED_STORES,
);

// SAFETY: defined above.
unsafe extern "C" {
    fn mercury_watch_loop(variable: u64);
    safe static mercury_watch_mark: u8;
}

const WATCHED_STORES: u64 = 8;
const COUNTED: u64 = 20;
/// The length of an execution breakpoint for perf.
const INSTRUCTION: u64 = size_of::<libc::c_long>() as u64;
/// The value of DR7: breakpoint 0 is on for this task, for stores of four bytes.
const WATCH_STORES: u64 = 1 | 1 << 16 | 3 << 18;

/// The breakpoints to watch.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Watch stores only: Bochs does not honour RFLAGS.RF, and an execution breakpoint strikes for
    /// ever
    #[arg(long)]
    stores: bool,
    /// Keep a breakpoint for stores armed on each CPU
    #[arg(long)]
    held: bool,
}

/// Counts hits on each CPU.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    if args.held {
        return cpus::on_each(stop, report, hold);
    }
    let with_calls = !args.stores;
    cpus::on_each(stop, report, |cpu, stop, report| {
        let counted = Counted::new(with_calls)?;
        let variable = AtomicU64::new(0);
        let child = Tracee::start(mercury_watch_loop, variable.as_ptr() as u64)?;
        child.poke(debug_register(0), variable.as_ptr() as u64)?;
        child.poke(debug_register(7), WATCH_STORES)?;
        while !stop.is_set() {
            counted.round(cpu, report)?;
            watch(&child, cpu, variable.as_ptr() as u64, report)?;
            report.pass();
        }
        Ok(())
    })
}

/// Interval between two checks of an armed breakpoint.
const PAUSE: Duration = Duration::from_millis(2);

/// Checks that this CPU's debug registers hold the breakpoint whatever task runs there.
fn hold(cpu: usize, stop: &Stop, report: &mut Report) -> Result<()> {
    let variable = Box::new(AtomicU64::new(0));
    let address = variable.as_ptr() as u64;
    let armed = Event::breakpoint(Target::Cpu(cpu), BREAKPOINT_WRITE, address, size_of::<u64>() as u64)?;
    armed.start()?;
    let mut seen = 0;
    while !stop.is_set() {
        (0..COUNTED).for_each(|number| variable.store(number, Ordering::Relaxed));
        let count = armed.count()?;
        report.check(count == seen + COUNTED, || format!("CPU {cpu}: {} hits, not {COUNTED}", count - seen));
        seen = count;
        report.pass();
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// A variable with its counters. The function is the same for all.
struct Counted {
    variable: Box<AtomicU64>,
    stores: Event,
    calls: Option<Event>,
}

impl Counted {
    fn new(with_calls: bool) -> Result<Self> {
        let variable = Box::new(AtomicU64::new(0));
        let stores = Event::breakpoint(
            Target::ThisThread,
            BREAKPOINT_WRITE,
            variable.as_ptr() as u64,
            size_of::<u64>() as u64,
        )?;
        let function: extern "C" fn(u64) -> u64 = called;
        let address = function as usize as u64;
        let calls = || Event::breakpoint(Target::ThisThread, BREAKPOINT_EXECUTE, address, INSTRUCTION);
        let calls = with_calls.then(calls).transpose()?;
        Ok(Self { variable, stores, calls })
    }

    fn round(&self, cpu: usize, report: &mut Report) -> Result<()> {
        self.stores.start()?;
        self.calls.as_ref().map_or(Ok(()), Event::start)?;
        for number in 0..COUNTED {
            self.variable.store(number, Ordering::Relaxed);
            black_box(called(black_box(number)));
            self.variable.store(number, Ordering::Relaxed);
        }
        let calls = self.calls.as_ref().map_or(Ok(COUNTED), Event::finish)?;
        let counts = [self.stores.finish()?, calls];
        let expected = [2 * COUNTED, COUNTED];
        report.check(counts == expected, || format!("CPU {cpu}: {counts:?} hits instead of {expected:?}"));
        Ok(())
    }
}

#[inline(never)]
extern "C" fn called(number: u64) -> u64 {
    black_box(number)
}

/// Runs one round of the child, which stops at each store and at the mark.
fn watch(child: &Tracee, cpu: usize, variable: u64, report: &mut Report) -> Result<()> {
    let mark = ptr::from_ref(&mercury_watch_mark) as u64;
    let mut hits = 0;
    loop {
        let signal = child.run()?;
        report.check(signal == libc::SIGTRAP, || format!("CPU {cpu}: signal {signal} in the child"));
        if child.peek(RIP)? == mark || hits > WATCHED_STORES {
            break;
        }
        hits += 1;
        let dr6 = child.peek(debug_register(6))?;
        report.check(dr6 & 0xF == 1, || format!("CPU {cpu}: DR6 is {dr6:#x} at a watched store"));
        child.poke(debug_register(6), 0)?;
    }
    report.check(hits == WATCHED_STORES, || format!("CPU {cpu}: {hits} of {WATCHED_STORES} stores seen"));
    let armed = (child.peek(debug_register(0))?, child.peek(debug_register(7))? & 0xF_00FF);
    report.check(armed == (variable, WATCH_STORES), || format!("CPU {cpu}: DR0 and DR7 are {armed:x?}"));
    Ok(())
}
