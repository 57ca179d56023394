//! All CPUs meet in the hypervisor. The last to come does what must be done while nobody is in the system, and lets
//! the others go on. Nobody waits for ever: who has waited long enough ends the meeting, for all.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::x86::Hardware;

/// Set in the number of those who came: one is missing, and nobody waits any more.
const MISSED: u32 = 1 << 31;

/// Who has come.
#[derive(Debug)]
pub struct Rendezvous {
    arrived: AtomicU32,
    /// The last one has done its work.
    open: AtomicBool,
}

/// What is to be done by who comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The work, and then [`Rendezvous::open`].
    Last,
    /// To wait: [`Rendezvous::wait`].
    Early,
    /// Nothing: the meeting has ended.
    Late,
}

impl Rendezvous {
    /// Nobody has come.
    #[must_use]
    pub const fn new() -> Self {
        Self { arrived: AtomicU32::new(0), open: AtomicBool::new(false) }
    }

    /// The same again, while nobody is there.
    pub fn begin(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Relaxed);
    }

    /// One of `cpus` comes.
    pub fn arrive(&self, cpus: u32) -> Arrival {
        let arrived = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        match arrived {
            MISSED.. => Arrival::Late,
            _ if arrived == cpus => Arrival::Last,
            _ => Arrival::Early,
        }
    }

    /// The work is done.
    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Waits for that, and for the others no longer than so many ticks; `false` if one did not come.
    pub fn wait(&self, hardware: &mut impl Hardware, cpus: u32, patience: u64) -> bool {
        let start = hardware.tsc();
        while !self.open.load(Ordering::Acquire) {
            let arrived = self.arrived.load(Ordering::Acquire);
            if arrived & MISSED != 0 {
                return false;
            }
            if arrived < cpus && hardware.tsc().wrapping_sub(start) > patience {
                // Only while one is missing: nobody goes on then, who waits or comes later.
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

    /// Each of `comers` comes, and says whether it may go on; the last one counts.
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

    /// Those who came go on without it, and who comes later does not begin again.
    #[test]
    fn nobody_waits_for_ever() {
        let (rendezvous, work) = (Rendezvous::new(), AtomicU32::new(0));
        assert_eq!(meet(&rendezvous, CPUS - 1, 1000, &work), [false; CPUS as usize - 1]);
        assert_eq!(rendezvous.arrive(CPUS), Arrival::Late);
        assert_eq!(work.into_inner(), 0);
    }
}
