//! The policy of rounds: when to stop and copy, by numbers alone.
//!
//! Each round sends the pages that were written during the round before. While their number falls,
//! another round shortens the downtime. If it no longer falls, the policy throttles the load step
//! by step (auto-convergence), as far as the operator allows. If that does not help either, the
//! operator's choice is carried out: stop all the same, or give up.

use std::time::Duration;

use crate::wire::PAGE;

/// The operator's limits for a move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Longest downtime that the operator wants.
    pub max_downtime: Duration,
    /// Most bytes per second that may be sent while applications run. `None`: no limit.
    pub max_bytes_per_second: Option<u64>,
    /// Strongest throttle of the load, in percent of its time: 0 none, 99 the most.
    pub max_throttle_percent: u8,
    /// Number of rounds after which the policy stops or gives up.
    pub max_rounds: u32,
    /// Choice if the downtime does not fit in the end.
    pub otherwise: Otherwise,
}

/// The choice if the downtime does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// Give the attempt up: the machine goes on at the source.
    GiveUp,
    /// Move the machine, however long the downtime is.
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

/// The numbers of one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Bytes that the round sent: compressed, and without the pages of zeros.
    pub bytes_sent: u64,
    /// Pages that the round sent.
    pub pages_sent: u64,
    /// Duration of the round.
    pub took: Duration,
    /// Part of the duration spent waiting for the bandwidth limit. The last round does not wait.
    pub waited: Duration,
    /// Pages written during the round by processors and devices, and pages that devices may write
    /// at any moment.
    pub dirty_pages: u64,
}

/// The parts of the downtime besides the last pages, as measured before.
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
    /// Returns the sum of all parts.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.quiesce.saturating_add(self.hand_over).saturating_add(self.start)
    }
}

/// The policy's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send another round, with the load throttled.
    Copy {
        /// Throttle in percent of the load's time; 0: none.
        throttle_percent: u8,
    },
    /// Stop the machine and copy the remaining pages.
    Stop {
        /// Downtime that the policy expects.
        downtime: Duration,
    },
    /// Give the attempt up.
    GiveUp {
        /// Downtime that the policy would have expected.
        downtime: Duration,
    },
}

/// Increase of the throttle each time, in percent.
const THROTTLE_STEP: u8 = 15;
/// A round helped if it left at most this share of the dirty pages before it, in percent.
const HELPED_PERCENT: u128 = 85;
/// Number of rounds without help before the throttle is applied, and again after it has reached its
/// limit. In between each such round raises the throttle at once.
const PATIENCE: u32 = 2;
/// Downtime that stands for an estimate that cannot be made: longer than any limit.
const NEVER: Duration = Duration::from_secs(u32::MAX as u64);

/// The policy over one attempt.
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
    /// Returns the policy at the beginning of an attempt.
    #[must_use]
    pub fn new(limits: Limits, fixed: Fixed) -> Self {
        Self { limits, fixed, rounds: 0, throttle_percent: 0, best_pages: None, fruitless: 0 }
    }

    /// Updates the other parts of the downtime with better numbers.
    pub fn expect(&mut self, fixed: Fixed) {
        self.fixed = fixed;
    }

    /// Returns the number of rounds that were decided on.
    #[must_use]
    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// Returns the downtime if the machine were stopped after this round.
    #[must_use]
    pub fn downtime(&self, round: &Round) -> Duration {
        time_to_send(round).saturating_add(self.fixed.sum())
    }

    /// Decides after the first round. It sends pages that nothing has written since, so its numbers
    /// do not predict the dirty pages. The round counts, and decides only if no other round is
    /// allowed.
    #[must_use]
    pub fn first(&mut self, round: &Round) -> Next {
        if self.limits.max_rounds <= 1 {
            return self.next(round);
        }
        self.rounds = self.rounds.saturating_add(1);
        Next::Copy { throttle_percent: 0 }
    }

    /// Decides after any other round.
    #[must_use]
    pub fn next(&mut self, round: &Round) -> Next {
        self.rounds = self.rounds.saturating_add(1);
        let downtime = self.downtime(round);
        if downtime <= self.limits.max_downtime {
            return Next::Stop { downtime };
        }
        self.judge_throttle(round.dirty_pages);
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

    fn judge_throttle(&mut self, dirty_pages: u64) {
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

/// Returns the time for the dirty pages, at the rate of pages in this round. The rate is in pages,
/// not bytes: it includes the cost of finding and compressing them. The dirty pages are assumed to
/// compress like the round's. A round of mostly zeros does not predict that, so the estimate is at
/// least the time for the bytes of incompressible pages.
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

/// Returns the time to wait now, so that the bytes of a round keep to the bandwidth limit.
#[must_use]
pub fn wait(limits: &Limits, bytes_sent: u64, elapsed: Duration) -> Duration {
    let Some(rate) = limits.max_bytes_per_second.map(|rate| rate.max(1)) else { return Duration::ZERO };
    let nanos = u128::from(bytes_sent) * 1_000_000_000 / u128::from(rate);
    let due = u64::try_from(nanos).map_or(NEVER, Duration::from_nanos);
    due.saturating_sub(elapsed)
}
