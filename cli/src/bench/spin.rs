//! A thread on each CPU that does nothing but look at the clock, and the longest time that it could
//! not: whatever a switch costs the work above, this sees it.

use crate::{cpus::CpuSet, tsc};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// The longest gap that the thread of one CPU saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Linux's number.
    pub cpu: u32,
    /// TSC ticks between two looks.
    pub ticks: u64,
}

/// Runs `work` while a thread spins on each of `cpus`.
pub fn during<T>(cpus: &CpuSet, work: impl FnOnce() -> T) -> (T, Vec<Gap>) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = &stop;
        let spin = |cpu| (cpu, scope.spawn(move || longest_gap(cpu, stop)));
        let spinners: Vec<_> = cpus.iter().map(spin).collect();
        let result = work();
        stop.store(true, Ordering::Relaxed);
        let gaps =
            spinners.into_iter().filter_map(|(cpu, spinner)| Some(Gap { cpu, ticks: spinner.join().ok()?? }));
        (result, gaps.collect())
    })
}

/// Spins on one CPU until told to stop; `None` if the CPU cannot be had.
fn longest_gap(cpu: u32, stop: &AtomicBool) -> Option<u64> {
    pin(cpu)?;
    let (mut last, mut longest) = (tsc::now(), 0);
    while !stop.load(Ordering::Relaxed) {
        let now = tsc::now();
        longest = longest.max(now.saturating_sub(last));
        last = now;
    }
    Some(longest)
}

/// Keeps the calling thread on one CPU.
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
    use crate::sysroot::Sysroot;

    #[test]
    fn a_spinning_thread_sees_gaps() {
        let allowed = rustix::thread::sched_getaffinity(None).expect("affinity");
        let cpus: CpuSet = Sysroot::default()
            .online_cpus()
            .iter()
            .filter(|cpu| allowed.is_set(*cpu as usize))
            .take(1)
            .collect();
        let ((), gaps) = during(&cpus, || thread::sleep(std::time::Duration::from_millis(20)));
        assert_eq!(gaps.len(), 1);
        assert!(gaps[0].ticks > 0);
    }
}
