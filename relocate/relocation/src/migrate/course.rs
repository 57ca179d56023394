//! The course of the rounds: gives the policy the numbers of each round, and returns the next step.
//! By numbers alone.

use super::copy::Pass;
use crate::options::MigrateOptions;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::rounds::{Fixed, Limits, Next, Otherwise, Policy, Round};
use std::time::Duration;

/// Estimated times of the instant and the arrival, before they are known.
const GUESS: Fixed = Fixed {
    quiesce: Duration::from_millis(200),
    hand_over: Duration::from_millis(50),
    start: Duration::from_millis(200),
};
/// Time of the last round for reading persistent DMA memory, with a dirty log.
const READING_LOGGED: Duration = Duration::from_millis(100);
/// Longest downtime if the operator sets none.
pub const MAX_DOWNTIME: Duration = Duration::from_secs(1);

const _: () = assert!(
    GUESS.quiesce.as_millis()
        + GUESS.hand_over.as_millis()
        + GUESS.start.as_millis()
        + READING_LOGGED.as_millis()
        < MAX_DOWNTIME.as_millis(),
    "no machine would ever fit"
);

/// Returns the fixed part of the downtime, besides the last pages, if reading them takes `reading`.
#[must_use]
pub fn guess(reading: Duration) -> Fixed {
    Fixed { quiesce: GUESS.quiesce + reading, ..GUESS }
}

/// Returns the limits that the operator has set.
#[must_use]
pub fn limits(args: &MigrateOptions) -> Limits {
    Limits {
        max_downtime: args.max_downtime.map_or(MAX_DOWNTIME, |span| span.0),
        max_bytes_per_second: args.bandwidth.map(|mib| mib << 20),
        max_throttle_percent: args.max_throttle,
        max_rounds: args.rounds,
        otherwise: if args.or_give_up { Otherwise::GiveUp } else { Otherwise::Stop },
    }
}

/// Refuses options that could only end in giving up, after all of memory was sent.
///
/// # Errors
///
/// Returns a usage error for such options.
pub fn refuse_hopeless(args: &MigrateOptions) -> Result<()> {
    let (limits, least) = (limits(args), GUESS.sum());
    if !args.or_give_up {
        return Ok(());
    }
    if args.rounds == 0 {
        let why = "--rounds 0 stops everything first, so --or-give-up has no estimate to decide by";
        return Err(Error::new(Exit::Usage, why).hint("leave out one of the two options"));
    }
    if limits.max_downtime < least {
        let why = format!(
            "a downtime of {} ms can never be met: the instant, the hand-over and the start alone are \
             estimated at {} ms",
            limits.max_downtime.as_millis(),
            least.as_millis()
        );
        return Err(
            Error::new(Exit::Usage, why).hint("allow more with --max-downtime, or leave out --or-give-up")
        );
    }
    Ok(())
}

/// The state of the move after a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Pages that changed after they had been sent, per second of the round before.
    pub dirty_pages_per_second: f64,
    /// Expected downtime if the machine were stopped now.
    pub downtime: Duration,
    pub next: Next,
}

impl Outlook {
    /// Returns the throttle of the load from now on, in percent of its time.
    #[must_use]
    pub fn throttle_percent(&self) -> u8 {
        if let Next::Copy { throttle_percent } = self.next { throttle_percent } else { 0 }
    }
}

/// The rounds of one move.
#[derive(Debug)]
pub struct Course {
    limits: Limits,
    policy: Policy,
    before: Option<Pass>,
}

impl Course {
    /// Makes the course before the first round.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, policy: Policy::new(limits, GUESS), before: None }
    }

    /// Records a finished round, during which reading written disk chunks took `disks`, and returns
    /// the outlook.
    pub fn after(&mut self, done: &Pass, has_log: bool, disks: Duration) -> Outlook {
        // The number of dirty pages is known only after they are read, so the rate of the round
        // before is taken. The first round sends pages that no task may have written.
        let seconds = |pass: &Pass| pass.took.as_secs_f64().max(0.001);
        let per_second = self.before.map(|before| done.sent as f64 / seconds(&before));
        let dirty_pages = per_second.map_or(done.sent, |rate| (rate * seconds(done)) as u64);
        // The last round reads all of memory as well. With a dirty log it reads only the pages in
        // the log and persistent DMA memory.
        let reading = match (has_log, self.before) {
            (true, _) => READING_LOGGED,
            (false, None) => done.took,
            (false, Some(_)) => done.took.saturating_sub(done.waited),
        };
        self.policy.expect(guess(reading + disks));
        let round = Round {
            bytes_sent: done.bytes,
            pages_sent: done.sent,
            took: done.took,
            waited: done.waited,
            dirty_pages,
        };
        let next = if self.before.is_none() { self.policy.first(&round) } else { self.policy.next(&round) };
        self.before = Some(*done);
        Outlook {
            dirty_pages_per_second: per_second.unwrap_or(0.0),
            downtime: self.policy.downtime(&round),
            next,
        }
    }

    /// Makes the error with which a move is given up.
    #[must_use]
    pub fn too_long(&self, downtime: Duration) -> Error {
        let text = format!(
            "the downtime would be about {:.1} s, of which the instant and the arrival alone are \
             estimated at {:.2} s; {:.2} s are allowed",
            downtime.as_secs_f64(),
            GUESS.sum().as_secs_f64(),
            self.limits.max_downtime.as_secs_f64()
        );
        Error::new(Exit::Failed, text)
            .hint("allow more with --max-downtime, or reduce the load; the machine runs on")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(options: &str) -> MigrateOptions {
        MigrateOptions::of(options)
    }

    /// Makes a round that sent so many pages, each in 40 microseconds.
    fn round(sent: u64) -> Pass {
        Pass {
            scanned: sent,
            sent,
            changed: sent,
            bytes: sent * 4096,
            took: Duration::from_micros(sent * 40),
            ..Pass::default()
        }
    }

    /// Runs rounds of a machine that sends so many pages in each, the first one all of memory.
    /// Returns the end and the number of rounds.
    fn run(options: &str, dirty: impl Fn(u64) -> u64) -> (Next, u64) {
        let mut course = Course::new(limits(&args(options)));
        for number in 0..2000 {
            let sent = if number == 0 { 500_000 } else { dirty(number) };
            match course.after(&round(sent), true, Duration::ZERO).next {
                Next::Copy { .. } => {}
                end => return (end, number + 1),
            }
        }
        panic!("it never ends");
    }

    /// An operator who asked to give up gets that, however few rounds there are.
    #[test]
    fn a_move_above_the_limit_is_given_up() {
        for rounds in [1, 2, 3, 4, 30] {
            let busy = |_| 400_000;
            let (end, count) = run(&format!("--rounds {rounds} --or-give-up"), busy);
            assert!(matches!(end, Next::GiveUp { .. }) && count <= rounds, "{rounds}: {end:?} after {count}");
            let (end, count) = run(&format!("--rounds {rounds}"), busy);
            assert!(matches!(end, Next::Stop { .. }) && count <= rounds, "{rounds}: {end:?} after {count}");
        }
    }

    /// A machine that writes little fits the default limit; one that writes nothing does after two
    /// rounds.
    #[test]
    fn a_quiet_machine_fits() {
        let (end, count) = run("--or-give-up", |_| 500);
        assert!(
            matches!(end, Next::Stop { downtime } if downtime < MAX_DOWNTIME) && count <= 4,
            "{end:?} after {count}"
        );
        assert_eq!(run("--or-give-up", |_| 0).1, 2);
    }

    #[test]
    fn a_hopeless_limit_is_refused() {
        let refused =
            |options| refuse_hopeless(&args(options)).err().map(|error| (error.exit, error.message));
        assert!(
            refused("--rounds 0 --or-give-up")
                .is_some_and(|(exit, why)| exit == Exit::Usage && why.contains("--rounds 0"))
        );
        assert!(refused("--max-downtime 300ms --or-give-up").is_some_and(|(_, why)| why.contains("450 ms")));
        for fine in
            ["", "--rounds 0", "--or-give-up", "--max-downtime 300ms", "--max-downtime 600ms --or-give-up"]
        {
            assert_eq!(refused(fine), None, "{fine}");
        }
    }
}
