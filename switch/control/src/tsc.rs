//! The time-stamp counter.

use crate::log::Clock;
use rustix::time::{ClockId, clock_gettime};

#[must_use]
pub fn now() -> u64 {
    // SAFETY: RDTSC has no operands and is on every x86-64 processor; Linux lets user mode read it
    // unless a process asks otherwise (PR_SET_TSC), which this one does not.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Relates the counter to the seconds that `dmesg` prints.
#[must_use]
pub fn clock(tsc_khz: u64) -> Clock {
    let time = clock_gettime(ClockId::Monotonic);
    Clock { tsc: now(), seconds: time.tv_sec as f64 + time.tv_nsec as f64 / 1e9, tsc_khz }
}
