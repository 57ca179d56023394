//! Which machine's memory is taken when the host has little, and when it is given back.
//!
//! Only machines that have done nothing for a while are asked. First their balloons grow: a machine gives
//! back what its kernel can spare, and goes on at once when it is used. If that is not enough, the machine
//! that has done nothing for the longest time is put to sleep, one at a time. A machine that works again gets
//! its memory back first.

use std::time::Duration;

/// The time without work after which a machine's balloon may grow.
const IDLE: Duration = Duration::from_secs(2);
/// The same if the host is about to run out of memory. Balloons are not waited for then.
const IDLE_IF_URGENT: Duration = Duration::from_millis(500);
/// The time after which a balloon has what it gets.
const SETTLED: Duration = Duration::from_secs(2);

/// The host's need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// The memory that the host should have and does not have.
    pub missing: u64,
    /// True if the host has little of its reserve left.
    pub is_urgent: bool,
    /// True if the host has so much memory that balloons can be empty.
    pub is_plenty: bool,
}

/// A machine, as the policy sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The time since it has last worked.
    pub idle: Duration,
    /// True if it worked when that was last measured.
    pub works: bool,
    /// The memory that would be free without the machine.
    pub own_bytes: u64,
    /// The memory that its balloon would be asked for.
    pub spare_bytes: u64,
    /// The time since its balloon was last made larger, if this was done and not taken back.
    pub squeezed: Option<Duration>,
    /// True if it may be put to sleep.
    pub may_sleep: bool,
}

/// A thing to do with a machine, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make its balloon as large as it may be.
    Squeeze(usize),
    /// Make its balloon as small as its user wants it.
    Release(usize),
    /// Put it to sleep.
    Sleep(usize),
}

/// Chooses what to do.
#[must_use]
pub fn plan(need: Need, machines: &[Candidate]) -> Vec<Action> {
    let Need { mut missing, is_urgent, is_plenty } = need;
    let is_back = |one: &Candidate| one.squeezed.is_some() && (is_plenty || one.works);
    let indices = |filter: &dyn Fn(&Candidate) -> bool| -> Vec<usize> {
        (0..machines.len()).filter(|index| filter(&machines[*index])).collect()
    };
    let mut actions: Vec<Action> = indices(&is_back).into_iter().map(Action::Release).collect();
    let least = if is_urgent { IDLE_IF_URGENT } else { IDLE };
    let mut idle = indices(&|one| !one.works && one.idle >= least);
    idle.sort_by_key(|index| std::cmp::Reverse(machines[*index].idle));
    for index in idle.iter().filter(|index| machines[**index].squeezed.is_none()) {
        let gain = machines[*index].spare_bytes.min(machines[*index].own_bytes);
        if missing == 0 || gain == 0 {
            continue;
        }
        actions.push(Action::Squeeze(*index));
        if !is_urgent {
            missing = missing.saturating_sub(gain);
        }
    }
    let is_settled = |one: &Candidate| one.squeezed.is_some_and(|since| since >= SETTLED);
    let has_nothing_to_spare = |one: &Candidate| one.spare_bytes.min(one.own_bytes) == 0;
    let sleeper = idle.into_iter().find(|index| {
        let one = &machines[*index];
        one.may_sleep && (is_urgent || is_settled(one) || has_nothing_to_spare(one))
    });
    if let Some(index) = sleeper.filter(|_| missing > 0) {
        actions.retain(|action| *action != Action::Squeeze(index));
        actions.push(Action::Sleep(index));
    }
    actions
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn idle(seconds: u64) -> Candidate {
        Candidate {
            idle: Duration::from_secs(seconds),
            works: seconds == 0,
            own_bytes: 40 * MIB,
            spare_bytes: 30 * MIB,
            squeezed: None,
            may_sleep: true,
        }
    }

    fn need(missing: u64, is_plenty: bool) -> Need {
        Need { missing, is_urgent: false, is_plenty }
    }

    fn squeezed(seconds: u64) -> Candidate {
        Candidate { squeezed: Some(SETTLED), ..idle(seconds) }
    }

    #[test]
    fn nothing_is_taken_from_a_host_with_memory_or_from_machines_at_work() {
        assert_eq!(plan(need(0, false), &[idle(9), squeezed(9)]), []);
        assert_eq!(plan(need(MIB, false), &[idle(0), idle(1)]), []);
    }

    #[test]
    fn balloons_come_first_and_the_longest_idle_machine_too() {
        use Action::{Sleep, Squeeze};
        assert_eq!(plan(need(MIB, false), &[idle(3), idle(9)]), [Squeeze(1)]);
        assert_eq!(plan(need(31 * MIB, false), &[idle(3), idle(9)]), [Squeeze(1), Squeeze(0)]);
        // A machine whose balloon has what it gets sleeps if the other one's balloon is not enough.
        assert_eq!(plan(need(31 * MIB, false), &[idle(3), squeezed(9)]), [Squeeze(0), Sleep(1)]);
        assert_eq!(plan(need(30 * MIB, false), &[idle(3), squeezed(9)]), [Squeeze(0)]);
        assert_eq!(plan(need(99 * MIB, false), &[squeezed(3), squeezed(9)]), [Sleep(1)], "one at a time");
        let busy_balloon = Candidate { squeezed: Some(Duration::ZERO), ..idle(9) };
        assert_eq!(plan(need(MIB, false), &[busy_balloon]), []);
        let small = Candidate { spare_bytes: 0, ..idle(9) };
        assert_eq!(plan(need(MIB, false), std::slice::from_ref(&small)), [Sleep(0)]);
        assert_eq!(plan(need(MIB, false), &[Candidate { may_sleep: false, ..small }]), []);
    }

    #[test]
    fn a_host_that_runs_out_of_memory_does_not_wait_for_balloons() {
        use Action::{Sleep, Squeeze};
        let urgent = Need { missing: MIB, is_urgent: true, is_plenty: false };
        assert_eq!(plan(urgent, &[idle(1), idle(3), idle(9)]), [Squeeze(1), Squeeze(0), Sleep(2)]);
        assert_eq!(plan(urgent, &[idle(0)]), [], "a machine at work stays");
    }

    #[test]
    fn memory_is_given_back_to_machines_at_work_and_to_all_if_there_is_plenty() {
        use Action::Release;
        assert_eq!(plan(need(MIB, false), &[squeezed(0), squeezed(1)]), [Release(0)]);
        assert_eq!(plan(need(0, true), &[squeezed(0), idle(9), squeezed(9)]), [Release(0), Release(2)]);
    }

    proptest! {
        /// No machine at work loses memory, and no machine gets two orders.
        #[test]
        fn only_idle_machines_lose_memory(
            machines in prop::collection::vec((0..5_u64, 0..3_u64, 0..3_u64, any::<bool>()), 0..12),
            missing in 0..200_u64,
        ) {
            let machines: Vec<Candidate> = machines
                .into_iter()
                .map(|(seconds, spare, since, may_sleep)| Candidate {
                    spare_bytes: spare * 20 * MIB,
                    squeezed: since.checked_sub(1).map(|since| Duration::from_secs(since * 2)),
                    may_sleep,
                    ..idle(seconds)
                })
                .collect();
            let mut seen = Vec::new();
            for action in plan(need(missing * MIB, false), &machines) {
                let (Action::Squeeze(index) | Action::Release(index) | Action::Sleep(index)) = action;
                prop_assert!(!seen.contains(&index));
                seen.push(index);
                let one = &machines[index];
                match action {
                    Action::Release(_) => prop_assert!(one.works && one.squeezed.is_some()),
                    Action::Squeeze(_) => prop_assert!(one.idle >= IDLE && missing > 0),
                    Action::Sleep(_) => prop_assert!(one.idle >= IDLE && one.may_sleep && missing > 0),
                }
            }
        }
    }
}
