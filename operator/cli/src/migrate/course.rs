//! How the rounds go: what each has come to, as the policy wants it, and what comes next. By numbers alone.

use super::copy::Pass;
use crate::{
    args::MigrateArgs,
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::rounds::{Fixed, Limits, Next, Otherwise, Policy, Round};
use std::time::Duration;

/// What the instant and the arrival take, before they are known.
const GUESS: Fixed = Fixed {
    quiesce: Duration::from_millis(200),
    hand_over: Duration::from_millis(50),
    start: Duration::from_millis(200),
};
/// What the last round takes for reading what devices have for good, with a log.
const READING_LOGGED: Duration = Duration::from_millis(100);
/// How long applications may stand still if nothing else is said.
pub const MAX_DOWNTIME: Duration = Duration::from_secs(1);

const _: () = assert!(
    GUESS.quiesce.as_millis()
        + GUESS.hand_over.as_millis()
        + GUESS.start.as_millis()
        + READING_LOGGED.as_millis()
        < MAX_DOWNTIME.as_millis(),
    "no machine would ever fit"
);

/// What the downtime has besides the last pages, if reading them takes so long.
#[must_use]
pub fn guess(reading: Duration) -> Fixed {
    Fixed { quiesce: GUESS.quiesce + reading, ..GUESS }
}

/// What an operator allows.
#[must_use]
pub fn limits(args: &MigrateArgs) -> Limits {
    Limits {
        max_downtime: args.max_downtime.map_or(MAX_DOWNTIME, |span| span.0),
        max_bytes_per_second: args.bandwidth.map(|mib| mib << 20),
        max_throttle_percent: args.max_throttle,
        max_rounds: args.rounds,
        otherwise: if args.or_give_up { Otherwise::GiveUp } else { Otherwise::Stop },
    }
}

/// What could only end in giving up, after all of memory was sent.
///
/// # Errors
/// If it is that.
pub fn refuse_hopeless(args: &MigrateArgs) -> Result<()> {
    let (limits, least) = (limits(args), GUESS.sum());
    if !args.or_give_up {
        return Ok(());
    }
    if args.rounds == 0 {
        let why = "--rounds 0 stops everything first: --or-give-up has nothing to go by then";
        return Err(Error::new(Exit::Usage, why).hint("leave out one of the two"));
    }
    if limits.max_downtime < least {
        let why = format!(
            "a downtime of {} ms is never expected: {} ms are reckoned for the instant, the hand-over and the start alone",
            limits.max_downtime.as_millis(),
            least.as_millis()
        );
        return Err(
            Error::new(Exit::Usage, why).hint("allow more with --max-downtime, or leave out --or-give-up")
        );
    }
    Ok(())
}

/// What a round has come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Pages that were not any more what had been sent, in a second of the round before.
    pub dirty_pages_per_second: f64,
    /// The downtime if the machine were stopped now.
    pub downtime: Duration,
    /// What comes next.
    pub next: Next,
}

impl Outlook {
    /// How far the load is held back from now on, in percent of its time.
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
    /// Before the first round.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, policy: Policy::new(limits, GUESS), before: None }
    }

    /// A round is over, in which what was written to disks took so long.
    pub fn after(&mut self, done: &Pass, has_log: bool, disks: Duration) -> Outlook {
        // What is dirty now is known only when it is looked for: as much as was, in as much time. The first round sends
        // what nobody has written.
        let seconds = |pass: &Pass| pass.took.as_secs_f64().max(0.001);
        let per_second = self.before.map(|before| done.sent as f64 / seconds(&before));
        let dirty_pages = per_second.map_or(done.sent, |rate| (rate * seconds(done)) as u64);
        // The last round reads all of memory as well; with a log, what it has to send and what devices have for good.
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

    /// Why the move is given up.
    #[must_use]
    pub fn too_long(&self, downtime: Duration) -> Error {
        let text = format!(
            "the downtime would be about {:.1} s, of which {:.2} s are reckoned for the instant and the arrival alone; \
             {:.2} s are allowed",
            downtime.as_secs_f64(),
            GUESS.sum().as_secs_f64(),
            self.limits.max_downtime.as_secs_f64()
        );
        Error::new(Exit::Failed, text)
            .hint("allow more with --max-downtime, or let the load rest; the machine runs on")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn args(options: &str) -> MigrateArgs {
        let line = format!("mercury migrate there {options}");
        match Cli::try_parse_from(line.split_whitespace()).expect("arguments").command {
            Command::Migrate(args) => args,
            _ => panic!("another command"),
        }
    }

    /// A round in which so many pages went, each in 40 microseconds.
    fn round(sent: u64) -> Pass {
        Pass {
            looked: sent,
            sent,
            changed: sent,
            bytes: sent * 4096,
            took: Duration::from_micros(sent * 40),
            ..Pass::default()
        }
    }

    /// How a machine's rounds end of which each sends so many pages, the first one all of memory; and after how many.
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

    /// Whoever wants it given up gets that, however few rounds there are.
    #[test]
    fn what_does_not_fit_is_given_up() {
        for rounds in [1, 2, 3, 4, 30] {
            let busy = |_| 400_000;
            let (end, count) = run(&format!("--rounds {rounds} --or-give-up"), busy);
            assert!(matches!(end, Next::GiveUp { .. }) && count <= rounds, "{rounds}: {end:?} after {count}");
            let (end, count) = run(&format!("--rounds {rounds}"), busy);
            assert!(matches!(end, Next::Stop { .. }) && count <= rounds, "{rounds}: {end:?} after {count}");
        }
    }

    /// A machine that writes little fits the limit that nobody has set; one that writes nothing does after two rounds.
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
    fn what_is_hopeless_is_refused() {
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
