//! A rendezvous of all CPUs in the hypervisor. The last CPU to come does the work for which no CPU may be
//! in the system, and lets the others go on. The wait is bounded: a CPU that has waited long enough ends
//! the rendezvous for all.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::x86::Hardware;

/// Flag in the number of CPUs that came: one is missing, and none waits any more.
const MISSED: u32 = 1 << 31;

/// CPUs that have come, and the end of the work.
#[derive(Debug)]
pub struct Rendezvous {
    arrived: AtomicU32,
    /// True once the last CPU has done its work.
    open: AtomicBool,
}

/// Duty of a CPU that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Do the work, and then call [`Rendezvous::open`].
    Last,
    /// Wait: call [`Rendezvous::wait`].
    Early,
    /// Nothing: the rendezvous has ended.
    Late,
}

impl Rendezvous {
    /// Returns a rendezvous to which no CPU has come.
    #[must_use]
    pub const fn new() -> Self {
        Self { arrived: AtomicU32::new(0), open: AtomicBool::new(false) }
    }

    /// Begins again, while no CPU is there.
    pub fn begin(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Relaxed);
    }

    /// Counts one of `cpus` that comes.
    pub fn arrive(&self, cpus: u32) -> Arrival {
        let arrived = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        match arrived {
            MISSED.. => Arrival::Late,
            _ if arrived == cpus => Arrival::Last,
            _ => Arrival::Early,
        }
    }

    /// Lets the others go on: the work is done.
    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Ends the rendezvous for the CPUs that wait: the one at work has failed.
    pub fn give_up(&self) {
        self.arrived.fetch_or(MISSED, Ordering::AcqRel);
    }

    /// Waits for the work to be done. Waits for missing CPUs no longer than `patience`, in TSC ticks. Returns
    /// `false` if one did not come, or the one at work has failed.
    pub fn wait(&self, hardware: &mut impl Hardware, cpus: u32, patience: u64) -> bool {
        let start = hardware.tsc();
        while !self.open.load(Ordering::Acquire) {
            let arrived = self.arrived.load(Ordering::Acquire);
            if arrived & MISSED != 0 {
                return false;
            }
            if arrived < cpus && hardware.tsc().wrapping_sub(start) > patience {
                // Only while one is missing: then no CPU goes on, whether it waits or comes later.
                let missed = arrived | MISSED;
                let _ = self.arrived.compare_exchange(arrived, missed, Ordering::AcqRel, Ordering::Acquire);
            }
            core::hint::spin_loop();
        }
        true
    }
}

impl Default for Rendezvous {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::model::Model;

    const CPUS: u32 = 4;

    /// Sends `comers` CPUs, and returns for each if it may go on. The last one counts its work.
    fn meet(rendezvous: &Rendezvous, comers: u32, patience: u64, work: &AtomicU32) -> Vec<bool> {
        thread::scope(|scope| {
            let come = || match rendezvous.arrive(CPUS) {
                Arrival::Last => {
                    work.fetch_add(1, Ordering::Relaxed);
                    rendezvous.open();
                    true
                }
                Arrival::Early => {
                    let goes_on = rendezvous.wait(&mut Model::default(), CPUS, patience);
                    assert!(!goes_on || work.load(Ordering::Relaxed) == 1, "before the work was done");
                    goes_on
                }
                Arrival::Late => false,
            };
            let all: Vec<_> = (0..comers).map(|_| scope.spawn(come)).collect();
            all.into_iter().map(|one| one.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn the_last_one_works_for_all() {
        let rendezvous = Rendezvous::new();
        for _ in 0..100 {
            let work = AtomicU32::new(0);
            rendezvous.begin();
            assert_eq!(meet(&rendezvous, CPUS, u64::MAX, &work), [true; CPUS as usize]);
            assert_eq!(work.into_inner(), 1);
        }
    }

    #[test]
    fn a_cpu_that_fails_at_its_work_leaves_none_waiting() {
        let rendezvous = Rendezvous::new();
        thread::scope(|scope| {
            let early = || rendezvous.arrive(2) == Arrival::Early;
            assert!(early());
            let waits = scope.spawn(|| rendezvous.wait(&mut Model::default(), 2, u64::MAX));
            assert_eq!(rendezvous.arrive(2), Arrival::Last);
            rendezvous.give_up();
            assert!(!waits.join().expect("no panic"));
        });
    }

    /// The CPUs that came go on without the missing one, which cannot begin the work again later.
    #[test]
    fn no_cpu_waits_for_ever() {
        let (rendezvous, work) = (Rendezvous::new(), AtomicU32::new(0));
        assert_eq!(meet(&rendezvous, CPUS - 1, 1000, &work), [false; CPUS as usize - 1]);
        assert_eq!(rendezvous.arrive(CPUS), Arrival::Late);
        assert_eq!(work.into_inner(), 0);
    }
}
