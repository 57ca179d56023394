//! Real-time threads that sleep until each next millisecond, and the delays of their wake-ups.

use std::io;

use serde_json::json;

use crate::{Result, cpus, report::Report, stop::Stop};

const NS_PER_S: u64 = 1_000_000_000;
const BUCKETS: usize = 40;

/// The threads' settings.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Period, in microseconds
    #[arg(long, default_value_t = 1000)]
    period_us: u64,
    /// SCHED_FIFO priority
    #[arg(long, default_value_t = 80)]
    priority: i32,
    /// A wake-up later than this many microseconds is a violation
    #[arg(long)]
    limit_us: Option<u64>,
}

/// Runs a thread on each CPU.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    cpus::on_each(stop, report, |cpu, stop, report| {
        cpus::fifo(args.priority)?;
        wake_up(cpu, args, stop, report)
    })
}

fn wake_up(cpu: usize, args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    let period = args.period_us * 1000;
    let (mut latest, mut lost) = (0, 0);
    let mut histogram = [0u64; BUCKETS];
    let mut next = now();
    while !stop.is_set() {
        next += period;
        sleep_until(next)?;
        let Some(late) = now().checked_sub(next) else {
            // A signal may have ended the sleep, and the workload with it.
            report.check(stop.is_set(), || format!("CPU {cpu}: woke up too early"));
            continue;
        };
        latest = latest.max(late);
        histogram[(late.max(1).ilog2() as usize).min(BUCKETS - 1)] += 1;
        // Whole periods that passed in sleep are lost; the rhythm goes on from here.
        lost += late / period;
        next += late / period * period;
        report.pass();
    }
    let limit = args.limit_us.map_or(u64::MAX, |us| us * 1000);
    report.check(latest <= limit, || format!("CPU {cpu}: woke up {latest} ns late"));
    let histogram: Vec<_> = histogram
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0)
        .map(|(bucket, count)| json!([1u64 << bucket, count]))
        .collect();
    let value = json!({ "latest_ns": latest, "lost_periods": lost, "histogram_from_ns": histogram });
    report.fact(&format!("cpu{cpu}"), value);
    Ok(())
}

fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to `time`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * NS_PER_S + time.tv_nsec as u64
}

fn sleep_until(ns: u64) -> Result<()> {
    let time = libc::timespec { tv_sec: (ns / NS_PER_S) as i64, tv_nsec: (ns % NS_PER_S) as i64 };
    // SAFETY: reads `time`.
    let error = unsafe {
        libc::clock_nanosleep(
            libc::CLOCK_MONOTONIC,
            libc::TIMER_ABSTIME,
            &raw const time,
            std::ptr::null_mut(),
        )
    };
    match error {
        0 | libc::EINTR => Ok(()),
        error => Err(io::Error::from_raw_os_error(error).into()),
    }
}
