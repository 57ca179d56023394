//! Programs that would notice a change under them. Each runs until it is told to stop, prints one
//! line of JSON, and ends with code 1 if it has seen a violation.
//!
//! They watch everything that a mode switch could damage: time (`spin`, `realtime`), results
//! (`compute`), registers (`fpu`, `flags`), segments and tables (`ldt`, `ioperm`), debugging
//! (`breakpoint`, `step`, `sampling`) and exceptions (`vmmcall`, `wrap`).
//!
//! Other programs act: `switch` switches under them, `state` compares a CPU with itself,
//! `fuzz-ioctl` attacks the driver, `touch` makes the nested tables fault from user mode, `cpuid`
//! measures the cost of that instruction, and `kernel` talks to the test module. `gap` and
//! `compress` measure for the benchmarks.

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
mod frames;
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
mod restore;
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
    /// Read the time in a thread on each CPU, and keep the longest gaps
    Spin(spin::Args),
    /// Compute primes and hashes with known results, on each CPU
    Compute(compute::Args),
    /// Hold patterns in x87, SSE, AVX and AVX-512 registers
    Fpu,
    /// Hold patterns in general registers, flags, selectors, FS and GS bases
    Flags,
    /// Use segments of a local descriptor table, in 64-bit and in 32-bit code
    Ldt,
    /// Use a permitted port and one that is not
    Ioperm,
    /// Count hardware breakpoints exactly, by perf and by ptrace
    Breakpoint(breakpoint::Args),
    /// Single-step a child, and count every instruction once
    Step(step::Args),
    /// Take samples on every CPU
    Sampling,
    /// Match shadow stacks with calls
    ShadowStack(shadow_stack::Args),
    /// Wake up real-time threads each millisecond
    Realtime(realtime::Args),
    /// Execute virtualization instructions in user mode, which must fault as they do natively
    Vmmcall,
    /// Execute CPUID at the end of 4 GiB, in 32-bit code
    Wrap,
    /// Attach and detach again and again, through the driver itself
    Switch(switch::Args),
    /// Take snapshots of memory, and prove them by hashes
    Snapshot(snapshot::Args),
    /// Keep a dirty log, and prove by hashes that nothing is missing
    Log(log::Args),
    /// Request what lockdown forbids
    Lockdown,
    /// Copy a disk that is written to, by its dirty log, and compare the copy
    Disk(disk::Args),
    /// Compare the state of each CPU before, during and after
    State(state::Args),
    /// Begin to restore a made-up machine, and go no further
    RestoreBegin,
    /// Send random requests to the driver
    FuzzIoctl(fuzz::Args),
    /// Read a physical address from user mode
    Touch(touch::Args),
    /// Measure the cost of CPUID
    Cpuid(cpuid::Args),
    /// Wake up each millisecond, and keep the longest time without a wake-up
    Gap,
    /// Compress a file with zstd alone
    Compress(compress::Args),
    /// Give a command to the test module and print its answer
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
            Self::RestoreBegin => restore::run(stop, report),
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
