//! The gaps that a spinning thread sees. Each CPU reads its TSC in a loop; time that is missing
//! between two readings was spent elsewhere.

use core::arch::x86_64::_rdtsc;
use std::time::Instant;

use serde_json::json;

use crate::{Result, cpus, report::Report, stop::Stop};

const LONGEST: usize = 8;
const BUCKETS: usize = 40;

/// The way to spin.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Real-time priority, so that only interrupts and the hypervisor come in between
    #[arg(long)]
    fifo: Option<i32>,
    /// A gap longer than this many microseconds is a violation
    #[arg(long)]
    limit_us: Option<u64>,
}

/// Gaps of one CPU, in TSC ticks.
#[derive(Debug)]
struct Gaps {
    longest: [u64; LONGEST],
    /// The number of gaps by powers of two.
    histogram: [u64; BUCKETS],
    backwards: u64,
}

impl Gaps {
    fn new() -> Self {
        Self { longest: [0; LONGEST], histogram: [0; BUCKETS], backwards: 0 }
    }

    fn add(&mut self, before: u64, now: u64) {
        let Some(gap) = now.checked_sub(before) else {
            self.backwards += 1;
            return;
        };
        let bucket = (gap.max(1).ilog2() as usize).min(BUCKETS - 1);
        self.histogram[bucket] += 1;
        if gap > self.longest[LONGEST - 1] {
            self.longest[LONGEST - 1] = gap;
            self.longest.sort_unstable_by(|a, b| b.cmp(a));
        }
    }
}

/// Spins on each CPU.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    cpus::on_each(stop, report, |cpu, stop, report| {
        if let Some(priority) = args.fifo {
            cpus::fifo(priority)?;
        }
        spin(cpu, args, stop, report);
        Ok(())
    })
}

fn tsc() -> u64 {
    // SAFETY: every processor of this architecture has a TSC.
    unsafe { _rdtsc() }
}

fn spin(cpu: usize, args: &Args, stop: &Stop, report: &mut Report) {
    let mut gaps = Gaps::new();
    let (clock, start) = (Instant::now(), tsc());
    let mut before = start;
    while !stop.is_set() {
        for _ in 0..1000 {
            let now = tsc();
            gaps.add(before, now);
            before = now;
        }
        report.pass();
    }
    let ns_per_tick = clock.elapsed().as_nanos() as f64 / (tsc() - start).max(1) as f64;
    let ns = |ticks: u64| (ticks as f64 * ns_per_tick) as u64;
    report.check(gaps.backwards == 0, || format!("CPU {cpu}: the TSC went back {} times", gaps.backwards));
    let longest = ns(gaps.longest[0]);
    let limit_ns = args.limit_us.map_or(u64::MAX, |us| us * 1000);
    report.check(longest <= limit_ns, || format!("CPU {cpu}: nothing ran for {longest} ns"));
    let histogram: Vec<_> = gaps
        .histogram
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0)
        .map(|(bucket, count)| json!([ns(1 << bucket), count]))
        .collect();
    let value = json!({ "longest_ns": gaps.longest.map(ns), "histogram_from_ns": histogram });
    report.fact(&format!("cpu{cpu}"), value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gaps_are_kept_in_order() {
        let mut gaps = Gaps::new();
        for gap in [5, 1, 9, 7, 3, 8, 2, 6, 4, 10] {
            gaps.add(100, 100 + gap);
        }
        gaps.add(100, 99);
        assert_eq!(gaps.longest, [10, 9, 8, 7, 6, 5, 4, 3]);
        assert_eq!(gaps.histogram[..4], [1, 2, 4, 3]);
        assert_eq!(gaps.backwards, 1);
    }
}
