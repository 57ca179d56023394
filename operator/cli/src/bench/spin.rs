//! A thread on each CPU that does nothing but read the clock, and its longest gap although it had
//! the CPU. Any cost of a switch for the work above shows in that gap.
//!
//! Time in which the scheduler gave the CPU to another thread is taken out, because the thread's
//! own CPU time stands still then. Interrupts, and time beneath the kernel, stay in.

use mercury_control::{cpus::CpuSet, tsc};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// The longest gap that the thread of one CPU saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Number of the CPU in Linux.
    pub cpu: u32,
    /// TSC ticks between two readings, as far as the thread was on its CPU.
    pub ticks: u64,
}

/// Runs `work` while a thread spins on each of `cpus`.
pub fn during<T>(cpus: &CpuSet, tsc_khz: u64, work: impl FnOnce() -> T) -> (T, Vec<Gap>) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = &stop;
        let spin = |cpu| (cpu, scope.spawn(move || longest_gap(cpu, tsc_khz, stop)));
        let spinners: Vec<_> = cpus.iter().map(spin).collect();
        let result = work();
        stop.store(true, Ordering::Relaxed);
        let gaps =
            spinners.into_iter().filter_map(|(cpu, spinner)| Some(Gap { cpu, ticks: spinner.join().ok()?? }));
        (result, gaps.collect())
    })
}

/// Spins on one CPU until told to stop; `None` if the thread cannot be bound to the CPU.
fn longest_gap(cpu: u32, tsc_khz: u64, stop: &AtomicBool) -> Option<u64> {
    pin(cpu)?;
    let mut since = Since::now(tsc_khz);
    let (mut last, mut longest) = (since.tsc, 0);
    while !stop.load(Ordering::Relaxed) {
        let now = tsc::now();
        let gap = now.saturating_sub(last);
        last = now;
        if gap > longest {
            longest = longest.max(since.on_cpu(now, gap));
            since = Since::now(tsc_khz);
            last = since.tsc;
        }
    }
    Some(longest)
}

/// A moment in both times.
struct Since {
    tsc: u64,
    cpu_ticks: u64,
    tsc_khz: u64,
}

impl Since {
    fn now(tsc_khz: u64) -> Self {
        let tsc = tsc::now();
        Self { tsc, cpu_ticks: cpu_ticks(tsc_khz), tsc_khz }
    }

    /// Returns the part of the `gap` that ends at `now` during which the thread was on its CPU: all
    /// CPU time since the start, without that of the readings before the gap.
    fn on_cpu(&self, now: u64, gap: u64) -> u64 {
        let used = cpu_ticks(self.tsc_khz).saturating_sub(self.cpu_ticks);
        let before = now.saturating_sub(gap).saturating_sub(self.tsc);
        used.saturating_sub(before).min(gap)
    }
}

/// Returns the CPU time of the calling thread, in TSC ticks.
fn cpu_ticks(tsc_khz: u64) -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let ns = time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs();
    (u128::from(ns) * u128::from(tsc_khz) / 1_000_000) as u64
}

/// Binds the calling thread to one CPU.
pub fn pin(cpu: u32) -> Option<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu as usize >= rustix::thread::CpuSet::MAX_CPU {
        return None;
    }
    set.set(cpu as usize);
    rustix::thread::sched_setaffinity(None, &set).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_control::sysroot::Sysroot;

    #[test]
    fn a_spinning_thread_sees_gaps() {
        let allowed = rustix::thread::sched_getaffinity(None).expect("affinity");
        let cpus: CpuSet = Sysroot::default()
            .online_cpus()
            .iter()
            .filter(|cpu| allowed.is_set(*cpu as usize))
            .take(1)
            .collect();
        // On a busy host other threads may have the CPU for all of the time.
        let sees_one = || {
            let ((), gaps) =
                during(&cpus, 1_000_000, || thread::sleep(std::time::Duration::from_millis(400)));
            gaps.len() == 1 && gaps[0].ticks > 0
        };
        assert!((0..20).any(|_| sees_one()));
    }
}
