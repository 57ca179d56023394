//! Programs that would notice if something beneath them were not as it was. Each runs until it is told
//! to stop, prints one line of JSON, and ends with code 1 if it has seen a violation.
//!
//! They watch what a mode switch could spoil: time (`spin`, `realtime`), results (`compute`), registers
//! (`fpu`, `flags`), segments and tables (`ldt`, `ioperm`), debugging (`breakpoint`, `step`,
//! `sampling`) and exceptions (`vmmcall`, `wrap`). `switch` is what they are to withstand, `state` compares a
//! CPU with itself, `fuzz-ioctl` attacks the driver, `touch` makes the nested tables fault from user mode,
//! `cpuid` measures what that costs, and `kernel` talks to the test module. `gap` and `compress` measure for the
//! benchmarks.

#![allow(missing_docs)]

mod attr;
mod breakpoint;
mod compress;
mod compute;
mod cpuid;
mod cpus;
mod device;
mod disk;
mod flags;
mod fpu;
mod fuzz;
mod gap;
mod ioperm;
mod kernel;
mod ldt;
mod lockdown;
mod log;
mod perf;
mod realtime;
mod recover;
mod report;
mod rng;
mod sampling;
mod shadow_stack;
mod snapshot;
mod spin;
mod state;
mod step;
mod stop;
mod switch;
mod touch;
mod tracee;
mod vmmcall;
mod wrap;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::Report;
use stop::{Stop, StopArgs};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Parser)]
#[command(name = "mercury-workload", about = "Programs that would notice a mode switch beneath them")]
struct Cli {
    #[command(flatten)]
    stop: StopArgs,
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Subcommand)]
enum Workload {
    /// A thread on each CPU reads the time and keeps the longest gaps
    Spin(spin::Args),
    /// Primes and hashes with known results, on each CPU
    Compute(compute::Args),
    /// x87, SSE, AVX and AVX-512 registers hold patterns
    Fpu,
    /// General registers, flags, selectors, FS and GS bases hold patterns
    Flags,
    /// Segments of a local descriptor table, in 64-bit and in 32-bit code
    Ldt,
    /// Ports that are permitted and ports that are not
    Ioperm,
    /// Hardware breakpoints by perf and by ptrace count exactly
    Breakpoint(breakpoint::Args),
    /// A child is single-stepped; every instruction counts once
    Step(step::Args),
    /// Samples flow on every CPU
    Sampling,
    /// Shadow stacks match the calls
    ShadowStack(shadow_stack::Args),
    /// Real-time threads wake up each millisecond
    Realtime(realtime::Args),
    /// Virtualization instructions in user mode fault as they do natively
    Vmmcall,
    /// CPUID at the end of 4 GiB, in 32-bit code
    Wrap,
    /// Attaches and detaches again and again, through the driver itself
    Switch(switch::Args),
    /// Takes snapshots of memory, and proves them by hashes
    Snapshot(snapshot::Args),
    /// Logs what is written, and proves by hashes that nothing is missing
    Log(log::Args),
    /// Asks for what lockdown forbids
    Lockdown,
    /// Copies a disk that is written to, by the log of what is, and compares the copy
    Disk(disk::Args),
    /// Compares the state of each CPU before, during and after
    State(state::Args),
    /// Calls the driver with nonsense
    FuzzIoctl(fuzz::Args),
    /// Reads a physical address from user mode
    Touch(touch::Args),
    /// Measures what CPUID costs
    Cpuid(cpuid::Args),
    /// Wakes up each millisecond and keeps the longest time in which it did not
    Gap,
    /// Compresses a file with zstd alone
    Compress(compress::Args),
    /// Gives a command to the test module and prints its answer
    Kernel(kernel::Args),
}

impl Workload {
    fn run(&self, stop: &Stop, report: &mut Report) -> Result<()> {
        match self {
            Self::Spin(args) => spin::run(args, stop, report),
            Self::Compute(args) => compute::run(args, stop, report),
            Self::Fpu => fpu::run(stop, report),
            Self::Flags => flags::run(stop, report),
            Self::Ldt => ldt::run(stop, report),
            Self::Ioperm => ioperm::run(stop, report),
            Self::Breakpoint(args) => breakpoint::run(args, stop, report),
            Self::Step(args) => step::run(args, stop, report),
            Self::Sampling => sampling::run(stop, report),
            Self::ShadowStack(args) => shadow_stack::run(args, stop, report),
            Self::Realtime(args) => realtime::run(args, stop, report),
            Self::Vmmcall => vmmcall::run(stop, report),
            Self::Wrap => wrap::run(stop, report),
            Self::Switch(args) => switch::run(args, stop, report),
            Self::Snapshot(args) => snapshot::run(args, stop, report),
            Self::Log(args) => log::run(args, stop, report),
            Self::Lockdown => lockdown::run(report),
            Self::Disk(args) => disk::run(args, report),
            Self::State(args) => state::run(args, stop, report),
            Self::FuzzIoctl(args) => fuzz::run(args, stop, report),
            Self::Touch(args) => touch::run(args, report),
            Self::Cpuid(args) => cpuid::run(args, stop, report),
            Self::Gap => {
                gap::run(stop, report);
                Ok(())
            }
            Self::Compress(args) => compress::run(args, report),
            Self::Kernel(args) => kernel::run(args, report),
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut report = Report::default();
    let stop = Stop::new(&cli.stop);
    eprintln!("started");
    if let Err(error) = cli.workload.run(&stop, &mut report) {
        report.violation(format!("it could not go on: {error}"));
    }
    println!("{}", report.line());
    if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
