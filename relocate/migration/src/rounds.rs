//! When to stop and copy: the policy of the rounds, by numbers alone.
//!
//! Each round sends what was written while the one before was sent. As long as that becomes less, another round makes the
//! downtime shorter. Where it does not any more, the load is held back step by step (auto-convergence), if that is allowed;
//! where that does not help either, the operator's choice is carried out: stop all the same, or give up.

use std::time::Duration;

use crate::wire::PAGE;

/// What an operator allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The longest downtime that is wanted.
    pub max_downtime: Duration,
    /// The most that may be sent in a second, while applications run.
    pub max_bytes_per_second: Option<u64>,
    /// How far the load may be held back, in percent of its time: 0 is not at all, 99 the most.
    pub max_throttle_percent: u8,
    /// Rounds after which it comes to an end, one way or the other.
    pub max_rounds: u32,
    /// What is done if the downtime does not fit in the end.
    pub otherwise: Otherwise,
}

/// What is done if the downtime does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// Give the attempt up: the machine goes on where it is.
    GiveUp,
    /// Move it, however long it takes.
    Stop,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_downtime: Duration::from_millis(500),
            max_bytes_per_second: None,
            max_throttle_percent: 90,
            max_rounds: 40,
            otherwise: Otherwise::GiveUp,
        }
    }
}

/// What a round was like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Bytes that went over the wire in it; compressed, and without what zeros save.
    pub bytes_sent: u64,
    /// Pages that it has sent.
    pub pages_sent: u64,
    /// How long it took.
    pub took: Duration,
    /// Of that, how long it waited for the bandwidth limit's sake. The last round does not wait.
    pub waited: Duration,
    /// Pages that were written meanwhile, by processors and devices, and those that devices may write at any moment.
    pub dirty_pages: u64,
}

/// What the downtime has besides the last pages, as measured before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// Quiescing the machine.
    pub quiesce: Duration,
    /// Verifying, and the messages of the hand-over.
    pub hand_over: Duration,
    /// Starting at the destination, until applications run.
    pub start: Duration,
}

impl Fixed {
    /// All of it.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.quiesce.saturating_add(self.hand_over).saturating_add(self.start)
    }
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another round, with the load held back by so many percent of its time.
    Copy {
        /// 0: not at all.
        throttle_percent: u8,
    },
    /// Stop the machine and copy the rest.
    Stop {
        /// The downtime that is expected.
        downtime: Duration,
    },
    /// Give the attempt up.
    GiveUp {
        /// The downtime that would have been expected.
        downtime: Duration,
    },
}

/// Held back by so much more each time.
const THROTTLE_STEP: u8 = 15;
/// A round must leave at most this share of what the one before left, in percent, or it did not help.
const HELPED_PERCENT: u128 = 85;
/// Rounds without help that are put up with before the load is held back at all, and where it is as far as it may be. In
/// between each such round is one too many.
const PATIENCE: u32 = 2;
/// As long as no downtime may be: what stands for an estimate that cannot be made.
const NEVER: Duration = Duration::from_secs(u32::MAX as u64);

/// The policy, over one attempt.
#[derive(Clone, Debug)]
pub struct Policy {
    limits: Limits,
    fixed: Fixed,
    rounds: u32,
    throttle_percent: u8,
    best_pages: Option<u64>,
    fruitless: u32,
}

impl Policy {
    /// At the beginning.
    #[must_use]
    pub fn new(limits: Limits, fixed: Fixed) -> Self {
        Self { limits, fixed, rounds: 0, throttle_percent: 0, best_pages: None, fruitless: 0 }
    }

    /// What the downtime has besides is known better now.
    pub fn expect(&mut self, fixed: Fixed) {
        self.fixed = fixed;
    }

    /// Rounds that were decided on.
    #[must_use]
    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// The downtime if the machine were stopped after this round.
    #[must_use]
    pub fn downtime(&self, round: &Round) -> Duration {
        time_to_send(round).saturating_add(self.fixed.sum())
    }

    /// What comes after the first round, which sends what nobody has written: it counts, and says nothing of how many pages
    /// will be. Only where there may be no other one it decides.
    #[must_use]
    pub fn first(&mut self, round: &Round) -> Next {
        if self.limits.max_rounds <= 1 {
            return self.next(round);
        }
        self.rounds = self.rounds.saturating_add(1);
        Next::Copy { throttle_percent: 0 }
    }

    /// What comes after this round.
    #[must_use]
    pub fn next(&mut self, round: &Round) -> Next {
        self.rounds = self.rounds.saturating_add(1);
        let downtime = self.downtime(round);
        if downtime <= self.limits.max_downtime {
            return Next::Stop { downtime };
        }
        self.look_whether_it_helped(round.dirty_pages);
        let may_hold_back = self.throttle_percent < self.limits.max_throttle_percent.min(99);
        let patience = if self.throttle_percent > 0 && may_hold_back { 0 } else { PATIENCE };
        let is_fruitless = self.fruitless > patience;
        if self.rounds >= self.limits.max_rounds || is_fruitless && !may_hold_back {
            return self.otherwise(downtime);
        }
        if is_fruitless {
            let more = self.throttle_percent.saturating_add(THROTTLE_STEP);
            self.throttle_percent = more.min(self.limits.max_throttle_percent).min(99);
            self.fruitless = 0;
        }
        Next::Copy { throttle_percent: self.throttle_percent }
    }

    fn look_whether_it_helped(&mut self, dirty_pages: u64) {
        let helped = |best: u64| u128::from(dirty_pages) * 100 <= u128::from(best) * HELPED_PERCENT;
        if self.best_pages.is_none_or(helped) {
            self.fruitless = 0;
        } else {
            self.fruitless += 1;
        }
        self.best_pages = Some(self.best_pages.map_or(dirty_pages, |best| best.min(dirty_pages)));
    }

    fn otherwise(&self, downtime: Duration) -> Next {
        match self.limits.otherwise {
            Otherwise::GiveUp => Next::GiveUp { downtime },
            Otherwise::Stop => Next::Stop { downtime },
        }
    }
}

/// How long what is dirty takes, at the rate at which pages went in this round. Pages are what counts, not bytes: what
/// finding and compressing them costs is in it. What is dirty is taken to compress like the round; a round in which
/// mostly zeros went says nothing of that, so at least the bytes of incompressible pages are reckoned then.
fn time_to_send(round: &Round) -> Duration {
    if round.dirty_pages == 0 {
        return Duration::ZERO;
    }
    let busy = round.took.saturating_sub(round.waited).as_nanos();
    if round.pages_sent == 0 || busy == 0 || round.bytes_sent == 0 {
        return NEVER;
    }
    let dirty = u128::from(round.dirty_pages);
    let by_pages = busy.saturating_mul(dirty) / u128::from(round.pages_sent);
    let is_mostly_zeros = u128::from(round.bytes_sent) < u128::from(round.pages_sent) * PAGE as u128 / 16;
    let by_bytes = busy.saturating_mul(dirty * PAGE as u128) / u128::from(round.bytes_sent);
    let nanos = if is_mostly_zeros { by_pages.max(by_bytes) } else { by_pages };
    u64::try_from(nanos).map_or(NEVER, |nanos| Duration::from_nanos(nanos).min(NEVER))
}

/// How long to wait now, so that what was sent in a round keeps to the bandwidth limit.
#[must_use]
pub fn wait(limits: &Limits, bytes_sent: u64, elapsed: Duration) -> Duration {
    let Some(rate) = limits.max_bytes_per_second.map(|rate| rate.max(1)) else { return Duration::ZERO };
    let nanos = u128::from(bytes_sent) * 1_000_000_000 / u128::from(rate);
    let due = u64::try_from(nanos).map_or(NEVER, Duration::from_nanos);
    due.saturating_sub(elapsed)
}
