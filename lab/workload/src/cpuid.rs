//! The cost of CPUID, which a VMX machine must intercept while attached: ticks of the TSC for one
//! instruction, on each CPU, without the loop around it.

use core::arch::x86_64::{__cpuid_count, _rdtsc};

use crate::{Result, cpus, report::Report, stop::Stop};

/// Few enough that most samples see no interrupt.
const PER_SAMPLE: u32 = 100;
const SAMPLES: u32 = 101;

/// The instruction to measure.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// EAX
    #[arg(long, default_value_t = 1)]
    leaf: u32,
}

/// Measures on each CPU in turn. The smallest sample counts.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    for cpu in cpus::usable()? {
        cpus::pin(cpu)?;
        let best = |run: fn(u32)| (0..SAMPLES).map(|_| ticks(run, args.leaf)).min().unwrap_or(0);
        let (with, without) = (best(executed), best(looped));
        report.fact(&format!("cpu{cpu}_ticks"), (with - without.min(with)) as f64 / f64::from(PER_SAMPLE));
        report.pass();
        if stop.now() {
            break;
        }
    }
    Ok(())
}

fn ticks(run: fn(u32), leaf: u32) -> u64 {
    // SAFETY: every processor that runs this has a time-stamp counter.
    let now = || unsafe { _rdtsc() };
    let start = now();
    run(leaf);
    now() - start
}

fn executed(leaf: u32) {
    for _ in 0..PER_SAMPLE {
        core::hint::black_box(__cpuid_count(core::hint::black_box(leaf), 0));
    }
}

fn looped(leaf: u32) {
    for _ in 0..PER_SAMPLE {
        core::hint::black_box([core::hint::black_box(leaf); 4]);
    }
}
