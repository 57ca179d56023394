//! Which machine's memory is taken when the host has little, and who gets what is left.
//!
//! Two things are decided, apart from each other:
//!
//! - [`divide`] gives each machine a limit ([`mercury_hosted::throttle`]), many times a second. The sum of
//!   what machines may grow is what the host has beyond its reserve. So the host keeps its reserve, however
//!   fast machines grow. One that has reached its limit stands still.
//! - [`plan`] makes room. Machines that have done nothing for a while come first. Their balloons grow: a
//!   machine gives back what its kernel can spare, and goes on at once when it is used. If that is not
//!   enough, the machine that has done nothing for the longest time is put to sleep, one at a time. A machine
//!   that works again gets its memory back first.
//!
//! If machines stand still and all others are at work, one at work falls asleep, too, and comes back when
//! there is room: a swap of whole machines. It is the one that came last. So the one that came first keeps
//! its memory and gets on. But after a [turn](TURN) it is the first that makes room. Nobody gets the memory
//! for ever.

use std::time::Duration;

/// The time without work after which a machine's balloon may grow.
const IDLE: Duration = Duration::from_secs(2);
/// The same if the host is about to run out of memory. Balloons are not waited for then.
const IDLE_IF_URGENT: Duration = Duration::from_millis(500);
/// The time after which a balloon has what it gets.
const SETTLED: Duration = Duration::from_secs(2);
/// The time for which a machine stands still before one at work makes room for it.
pub const STUCK: Duration = Duration::from_millis(300);
/// The time for which a machine stands still before one at work makes room, whoever else seems idle.
const LATE: Duration = Duration::from_secs(1);
/// The time at work after which a machine makes room before all others that are at work.
pub const TURN: Duration = Duration::from_secs(20);
/// The memory that a machine gets at least, or none: about what a fast one fills between two ticks of its
/// timer, at which it looks.
const PORTION: u64 = 4 << 20;

/// The host's need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// The memory that the host should have and does not have.
    pub missing: u64,
    /// True if the host has little of its reserve left.
    pub is_urgent: bool,
    /// True if the host has so much memory that balloons can be empty.
    pub is_plenty: bool,
    /// The time for which a machine that is asleep waits for memory.
    pub wanted: Duration,
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
    /// The time for which it stands still at its limit.
    pub held: Duration,
    /// The time for which it is at work.
    pub turn: Duration,
}

/// A thing to do with a machine, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make its balloon as large as it may be.
    Squeeze(usize),
    /// Make its balloon as small as its user wants it.
    Release(usize),
    /// Put it to sleep if it is idle.
    Sleep(usize),
    /// Put it to sleep although it is at work. It comes back by itself.
    Swap(usize),
}

/// A machine's account, as [`divide`] sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// The memory of its own that it has.
    pub used: u64,
    /// True if it stands still at its limit.
    pub waits: bool,
    /// The time for which it is at work.
    pub turn: Duration,
}

/// Returns the memory that machines may take without asking. The rest of the reserve is for what nobody
/// asks for: what machines take between two ticks, page tables, the process that writes a machine. `taken`
/// is for a machine that wakes.
#[must_use]
pub fn free_to_take(available: u64, reserve: u64, taken: u64) -> u64 {
    available.saturating_sub(reserve / 4 * 3 + taken)
}

/// Divides memory among machines, of which each can have `most` of its own. Returns the limit of each, or
/// nothing for those without one.
#[must_use]
pub fn divide(free: u64, most: u64, machines: &[Account]) -> Vec<Option<u64>> {
    let count = (machines.len() as u64).max(1);
    if free / count >= most {
        return vec![None; machines.len()];
    }
    let share = free / count;
    if share >= PORTION {
        return machines.iter().map(|one| Some(one.used.saturating_add(share))).collect();
    }
    let mut order: Vec<usize> = (0..machines.len()).collect();
    order.sort_by_key(|index| {
        let Account { waits, turn, .. } = machines[*index];
        (!waits, turn >= TURN, std::cmp::Reverse(turn))
    });
    // At a limit that is what it has, a machine would go on until its next tick.
    let mut limits: Vec<Option<u64>> = machines.iter().map(|one| Some(one.used.saturating_sub(1))).collect();
    for index in order.into_iter().take((free / PORTION) as usize) {
        limits[index] = Some(machines[index].used.saturating_add(PORTION));
    }
    limits
}

/// Chooses what to do.
#[must_use]
pub fn plan(need: Need, machines: &[Candidate]) -> Vec<Action> {
    let Need { mut missing, is_urgent, is_plenty, wanted } = need;
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
    } else if missing > 0
        && let Some(index) = swapped(machines, wanted)
    {
        actions.retain(|action| *action != Action::Release(index));
        actions.push(Action::Swap(index));
    }
    actions
}

/// Returns the machine at work that makes room for others, if one must.
fn swapped(machines: &[Candidate], wanted: Duration) -> Option<usize> {
    let is_stuck = machines.iter().any(|one| one.held >= STUCK);
    // A machine alone would make room for nobody who is awake, and one that is idle falls asleep soon.
    let is_alone = machines.len() < 2 && wanted < TURN;
    // Where many share few processors, those at work may look idle, and are not put to sleep.
    let is_late = machines.iter().any(|one| one.held >= LATE);
    let is_one_idle = !is_late && machines.iter().any(|one| one.may_sleep && !one.works);
    if !is_stuck && wanted < TURN || is_alone || is_one_idle {
        return None;
    }
    let all = || (0..machines.len()).filter(|index| machines[*index].may_sleep);
    let has_had_its_turn = all().filter(|index| machines[*index].turn >= TURN);
    let longest = has_had_its_turn.max_by_key(|index| machines[*index].turn);
    longest.or_else(|| all().min_by_key(|index| machines[*index].turn).filter(|_| is_stuck))
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
            held: Duration::ZERO,
            turn: Duration::ZERO,
        }
    }

    fn need(missing: u64, is_plenty: bool) -> Need {
        Need { missing, is_urgent: false, is_plenty, wanted: Duration::ZERO }
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
        let urgent = Need { missing: MIB, is_urgent: true, is_plenty: false, wanted: Duration::ZERO };
        assert_eq!(plan(urgent, &[idle(1), idle(3), idle(9)]), [Squeeze(1), Squeeze(0), Sleep(2)]);
        assert_eq!(plan(urgent, &[idle(0)]), [], "a machine at work stays");
    }

    #[test]
    fn memory_is_given_back_to_machines_at_work_and_to_all_if_there_is_plenty() {
        use Action::Release;
        assert_eq!(plan(need(MIB, false), &[squeezed(0), squeezed(1)]), [Release(0)]);
        assert_eq!(plan(need(0, true), &[squeezed(0), idle(9), squeezed(9)]), [Release(0), Release(2)]);
    }

    fn at_work(seconds: u64, held: u64) -> Candidate {
        let [turn, held] = [Duration::from_secs(seconds), Duration::from_millis(held)];
        Candidate { turn, held, ..idle(0) }
    }

    #[test]
    fn a_machine_at_work_makes_room_only_for_one_that_stands_still() {
        use Action::{Sleep, Swap};
        let urgent = Need { is_urgent: true, ..need(MIB, false) };
        assert_eq!(plan(urgent, &[at_work(9, 0), at_work(5, 0)]), [], "nobody stands still");
        assert_eq!(plan(urgent, &[at_work(9, 299), at_work(5, 0)]), [], "not for long");
        assert_eq!(plan(urgent, &[at_work(9, 300), at_work(5, 0), at_work(7, 0)]), [Swap(1)]);
        assert_eq!(plan(urgent, &[at_work(9, 300), at_work(5, 300)]), [Swap(1)], "the last one");
        assert_eq!(plan(urgent, &[at_work(9, 300)]), [], "it is alone");
        assert_eq!(plan(urgent, &[at_work(21, 0), at_work(5, 300), at_work(25, 0)]), [Swap(2)]);
        assert_eq!(plan(need(0, false), &[at_work(9, 300), at_work(5, 0)]), [], "there is memory");
        let idle = Candidate { idle: IDLE_IF_URGENT, works: false, spare_bytes: 0, ..at_work(0, 0) };
        assert_eq!(plan(urgent, &[at_work(9, 300), idle.clone(), at_work(1, 0)]), [Sleep(1)]);
        let soon = Candidate { idle: Duration::ZERO, ..idle };
        assert_eq!(plan(urgent, &[at_work(9, 300), soon, at_work(1, 0)]), [], "it is idle soon");
        let bound = Candidate { may_sleep: false, ..at_work(1, 0) };
        assert_eq!(plan(urgent, &[at_work(9, 300), bound]), [Swap(0)]);
    }

    #[test]
    fn a_machine_that_has_had_its_turn_makes_room_for_one_asleep() {
        let wanted = Need { wanted: TURN, ..need(MIB, false) };
        assert_eq!(plan(wanted, &[at_work(19, 0), at_work(5, 0)]), []);
        assert_eq!(plan(wanted, &[at_work(20, 0), at_work(22, 0)]), [Action::Swap(1)]);
        assert_eq!(plan(Need { wanted: TURN / 2, ..wanted }, &[at_work(20, 0), at_work(22, 0)]), []);
    }

    #[test]
    fn memory_is_divided_among_all_or_given_to_those_who_wait() {
        let one = |used: u64, waits, seconds| Account { used, waits, turn: Duration::from_secs(seconds) };
        let some = |limits: &[u64]| limits.iter().map(|limit| Some(*limit)).collect::<Vec<_>>();
        assert_eq!(divide(9 * MIB, MIB, &[]), []);
        let two = [one(MIB, false, 0), one(5 * MIB, true, 1)];
        assert_eq!(divide(128 * MIB, 64 * MIB, &two), [None, None]);
        assert_eq!(divide(8 * MIB, 64 * MIB, &two), some(&[5 * MIB, 9 * MIB]));
        assert_eq!(divide(8 * MIB - 1, 64 * MIB, &two), some(&[MIB - 1, 9 * MIB]));
        assert_eq!(divide(4 * MIB - 1, 64 * MIB, &two), some(&[MIB - 1, 5 * MIB - 1]));
        // Those that stand still come first, and of these the one that is at work for the longest time. One
        // that has had its turn comes after them.
        let many = [one(1, true, 3), one(1, true, 30), one(1, true, 9), one(1, false, 15), one(1, true, 1)];
        for (portions, expected) in [(1, [2].as_slice()), (2, &[2, 0]), (3, &[2, 0, 4]), (4, &[2, 0, 4, 1])] {
            let limits = divide(portions * PORTION, 64 * MIB, &many);
            for (index, limit) in limits.into_iter().enumerate() {
                let is_given = expected.contains(&index);
                assert_eq!(limit, Some(if is_given { PORTION + 1 } else { 0 }), "{portions} {index}");
            }
        }
    }

    /// Where many share few processors each works so little that it seems idle, and is not put to sleep.
    #[test]
    fn machines_that_only_seem_idle_hold_up_nobody_for_ever() {
        let seems = Candidate { works: false, ..idle(0) };
        let held = |held| Candidate { held, works: true, ..idle(0) };
        let need = Need { wanted: Duration::ZERO, ..need(MIB, false) };
        assert_eq!(plan(need, &[held(STUCK), seems.clone()]), []);
        assert!(matches!(plan(need, &[held(LATE), seems])[..], [Action::Swap(_)]));
    }

    /// A host without a clock of its own, on which machines fill memory as fast as they can.
    struct Host {
        total: u64,
        machines: Vec<Simulated>,
        /// The machine that is written or read, and what is left of it.
        job: Option<(usize, u64, bool)>,
        now: Duration,
        looked: Duration,
        least_free: u64,
    }

    #[derive(Clone, Debug)]
    struct Simulated {
        has: u64,
        /// The memory that it fills before it rests.
        needs: u64,
        /// The number of times that it fills and frees it.
        rounds: u32,
        filled: u64,
        limit: Option<u64>,
        asleep: bool,
        wanted: Option<Duration>,
        since: Duration,
        idle_since: Duration,
        held_since: Option<Duration>,
    }

    impl Simulated {
        fn works(&self) -> bool {
            self.rounds > 0
        }

        fn waits(&self) -> bool {
            !self.asleep && self.works() && self.limit.is_some_and(|limit| self.has > limit)
        }
    }

    const STEP: Duration = Duration::from_millis(10);
    const PROCESSORS: u64 = 2;
    /// The least memory of a machine.
    const SMALL: u64 = 4 * MIB;
    const RESERVE: u64 = 64 * MIB;
    const MOST: u64 = 64 * MIB;

    impl Host {
        fn free(&self) -> u64 {
            let used: u64 = self.machines.iter().filter(|one| !one.asleep).map(|one| one.has).sum();
            let read = match self.job {
                Some((index, left, false)) => self.machines[index].has - left,
                _ => 0,
            };
            assert!(used + read <= self.total, "the host has no memory: {used} and {read}");
            self.total - used - read
        }

        /// Returns the machine that is to wake, for how long it waits, and what it has.
        fn next(&self) -> (Option<usize>, Duration, u64) {
            let wanted = (0..self.machines.len()).filter(|index| self.machines[*index].wanted.is_some());
            let next = wanted.min_by_key(|index| self.machines[*index].wanted);
            let since = next.and_then(|next| self.machines[next].wanted);
            let waited = since.map_or(Duration::ZERO, |since| self.now - since);
            (next, waited, next.map_or(0, |next| self.machines[next].has))
        }

        /// Lets machines grow for a step. They notice their limit between ticks.
        fn grow(&mut self, per_step: u64) {
            let is_written = |index: usize| matches!(self.job, Some((job, _, true)) if job == index);
            let mut running: Vec<usize> = (0..self.machines.len())
                .filter(|index| {
                    let one = &self.machines[*index];
                    !one.asleep && one.works() && !one.waits() && !is_written(*index)
                })
                .collect();
            // Each has the processor in turn.
            let first = (self.now.as_millis() / STEP.as_millis()) as usize % running.len().max(1);
            running.rotate_left(first);
            for index in running.into_iter().take(PROCESSORS as usize) {
                let one = &mut self.machines[index];
                one.has += per_step;
                one.filled += per_step;
                if one.filled >= one.needs {
                    (one.filled, one.has, one.rounds) = (0, SMALL, one.rounds - 1);
                    one.idle_since = self.now;
                }
            }
        }

        /// Does what the keeper does.
        fn keep(&mut self, bytes_per_step: u64) {
            if let Some((index, left, is_written)) = self.job {
                let left = left.saturating_sub(bytes_per_step);
                self.job = (left > 0).then_some((index, left, is_written));
                if left == 0 {
                    let one = &mut self.machines[index];
                    (one.asleep, one.since, one.held_since) = (is_written, self.now, None);
                    one.wanted = (is_written && one.works()).then_some(self.now);
                }
            }
            let free = self.free();
            self.least_free = self.least_free.min(free);
            let read = self.job.map_or(0, |(_, left, is_written)| if is_written { 0 } else { left });
            let (_, waited, purpose) = self.next();
            let taken = if read > 0 || waited < TURN { read } else { purpose };
            let pool = free_to_take(free, RESERVE, taken);
            let awake: Vec<usize> =
                (0..self.machines.len()).filter(|index| !self.machines[*index].asleep).collect();
            let turn = |one: &Simulated| if one.works() { self.now - one.since } else { Duration::ZERO };
            let accounts: Vec<Account> = awake
                .iter()
                .map(|index| &self.machines[*index])
                .map(|one| Account { used: one.has, waits: one.waits(), turn: turn(one) })
                .collect();
            for (index, limit) in awake.iter().zip(divide(pool, MOST, &accounts)) {
                let one = &mut self.machines[*index];
                one.limit = limit;
                one.held_since = if one.waits() { one.held_since.or(Some(self.now)) } else { None };
            }
            if self.now < self.looked + 10 * STEP {
                return;
            }
            self.looked = self.now;
            self.look(free, &awake);
        }

        fn look(&mut self, free: u64, awake: &[usize]) {
            let (next, waited, purpose) = self.next();
            let missing = (RESERVE + purpose).saturating_sub(free);
            let held = |one: &Simulated| one.held_since.map_or(Duration::ZERO, |since| self.now - since);
            let is_stuck = awake.iter().any(|index| held(&self.machines[*index]) >= STUCK);
            let is_held = awake.iter().any(|index| self.machines[*index].waits());
            let candidates: Vec<Candidate> = awake
                .iter()
                .map(|index| &self.machines[*index])
                .map(|one| Candidate {
                    idle: if one.works() { Duration::ZERO } else { self.now - one.idle_since },
                    works: one.works(),
                    own_bytes: one.has,
                    spare_bytes: 0,
                    squeezed: None,
                    may_sleep: self.job.is_none(),
                    held: held(one),
                    turn: if one.works() { self.now - one.since } else { Duration::ZERO },
                })
                .collect();
            let need = Need { missing, is_urgent: is_held, is_plenty: false, wanted: waited };
            for action in plan(need, &candidates) {
                if let Action::Sleep(index) | Action::Swap(index) = action {
                    self.job = Some((awake[index], self.machines[awake[index]].has, true));
                }
            }
            if let Some(next) = next
                && self.job.is_none()
                && missing == 0
                && (!is_stuck || waited >= TURN)
            {
                self.machines[next].wanted = None;
                self.job = Some((next, self.machines[next].has, false));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]
        /// Machines fill memory faster than others are written, and need more than there is. The host never
        /// runs out of memory, and all machines get on to their end.
        #[test]
        fn nobody_is_killed_and_everybody_gets_on(
            needs in prop::collection::vec((8..56_u64, 1..40_u32), 2..24),
            total in 200..512_u64, grown in 1..6_u64, written in 1..4_u64,
        ) {
            let machines = needs.iter().map(|(needs, rounds)| Simulated {
                has: SMALL,
                needs: needs * MIB,
                rounds: *rounds,
                filled: 0,
                limit: None,
                asleep: false,
                wanted: None,
                since: Duration::ZERO,
                idle_since: Duration::ZERO,
                held_since: None,
            });
            let mut host = Host {
                total: total * MIB,
                machines: machines.collect(),
                job: None,
                now: Duration::ZERO,
                looked: Duration::ZERO,
                least_free: u64::MAX,
            };
            // At 100 to 600 MiB/s for each processor, and 100 to 400 MiB/s to the disk.
            let longest = Duration::from_secs(3600);
            while host.machines.iter().any(Simulated::works) {
                host.keep(written * MIB);
                host.grow(grown * MIB);
                host.now += STEP;
                prop_assert!(host.now < longest, "{:?}", host.machines);
            }
            prop_assert!(host.least_free >= RESERVE / 4, "{} MiB were left", host.least_free / MIB);
        }
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
                let (Action::Squeeze(index)
                | Action::Release(index)
                | Action::Sleep(index)
                | Action::Swap(index)) = action;
                prop_assert!(!seen.contains(&index));
                seen.push(index);
                let one = &machines[index];
                match action {
                    Action::Release(_) => prop_assert!(one.works && one.squeezed.is_some()),
                    Action::Squeeze(_) => prop_assert!(one.idle >= IDLE && missing > 0),
                    Action::Sleep(_) => prop_assert!(one.idle >= IDLE && one.may_sleep && missing > 0),
                    Action::Swap(_) => prop_assert!(false, "none stands still"),
                }
            }
        }
    }
}
