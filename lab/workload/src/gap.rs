//! The pause that an application sees. The program wakes up a thousand times a second and keeps the
//! longest time without a wake-up, by the TSC, which goes on whatever the kernel does to its clocks
//! meanwhile.

use core::arch::x86_64::_rdtsc;
use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{report::Report, stop::Stop};

const PERIOD: Duration = Duration::from_millis(1);
const CALIBRATION: Duration = Duration::from_millis(200);

/// Runs until the workload ends.
pub fn run(stop: &Stop, report: &mut Report) {
    let ticks_per_us = calibrate();
    let (mut longest, mut before) = (0, ticks());
    while !stop.now() {
        thread::sleep(PERIOD);
        let now = ticks();
        longest = longest.max(now.saturating_sub(before));
        before = now;
        report.pass();
    }
    report.fact("longest_ticks", longest);
    report.fact("longest_us", longest as f64 / ticks_per_us);
}

fn calibrate() -> f64 {
    let (begun, before) = (Instant::now(), ticks());
    thread::sleep(CALIBRATION);
    (ticks() - before) as f64 / (begun.elapsed().as_secs_f64() * 1e6)
}

fn ticks() -> u64 {
    // SAFETY: reads a counter.
    unsafe { _rdtsc() }
}
