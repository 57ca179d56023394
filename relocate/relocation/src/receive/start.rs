//! The wait for a machine that was started beside this system: its limits, and what the operator is told.
//!
//! The machine's own kernel wakes its devices and sets its network up. No limit of this system may end that:
//! a machine that was told to start may act at any moment, and its source goes on only when an operator says
//! that it does not run here. So each limit ends in a message, and never in a start elsewhere.

use std::time::{Duration, Instant};

/// Interval at which the source is told that the machine is being started.
const SIGN: Duration = Duration::from_secs(1);
/// Time for a start, after which the operator is told what the machine waits for. Its disks take two minutes
/// at most.
const LATE: Duration = Duration::from_secs(60);
/// Time after which nothing that ends by itself is left of a start: its network takes eleven minutes at most
/// (`mercury_quiesce::guard`).
pub const OVERDUE: Duration = Duration::from_secs(900);

/// What the operator is told when the source gets no more answers, and the machine has not said that it runs.
pub const ANSWERS_END: &str = "the machine still does not say that it runs, and from now on its source gets \
    no answer from here. Look at the machine's console. If it works, type `abandon` at its source. If it does \
    not, end it here, and then type `resume` at its source";

/// A start, from the moment at which the machine may run.
#[derive(Debug)]
pub struct Start {
    begun: Instant,
    signed: Option<Instant>,
    told: Told,
}

/// The last message to the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Told {
    Nothing,
    Late,
    Overdue,
}

impl Default for Start {
    fn default() -> Self {
        Self { begun: Instant::now(), signed: None, told: Told::Nothing }
    }
}

impl Start {
    /// Returns true once at each interval at which the source is to get a sign of life.
    pub fn owes_sign(&mut self) -> bool {
        let owes = self.signed.is_none_or(|at| at.elapsed() >= SIGN);
        if owes {
            self.signed = Some(Instant::now());
        }
        owes
    }

    /// Returns true if nothing that ends by itself is left of the start.
    pub fn is_overdue(&self) -> bool {
        self.begun.elapsed() >= OVERDUE
    }

    /// Returns a message to the operator about a machine in this stage, each once.
    pub fn news(&mut self, stage: &str) -> Option<String> {
        self.news_after(self.begun.elapsed(), stage)
    }

    fn news_after(&mut self, took: Duration, stage: &str) -> Option<String> {
        let now = match took {
            took if took >= OVERDUE => Told::Overdue,
            took if took >= LATE => Told::Late,
            _ => Told::Nothing,
        };
        if now <= self.told {
            return None;
        }
        self.told = now;
        let minutes = took.as_secs() / 60;
        let what = match now {
            Told::Overdue => {
                "Every wait that ends by itself would have ended. If the machine works, type `abandon` at its \
                 source. If it does not, end it here: its source then says what can be done, if it hears of \
                 that within ten minutes"
            }
            _ => "Its source stands still until the machine says that it runs, or has ended here",
        };
        Some(format!(
            "the machine was started {minutes} min ago, and does not say that it runs: {stage}. {what}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_of_a_start_is_told_once_with_what_to_do() {
        let mut start = Start::default();
        let mut at = |seconds| start.news_after(Duration::from_secs(seconds), "it waits for X");
        assert_eq!((at(0), at(59)), (None, None));
        let late = at(60).expect("it is late");
        assert!(late.contains("1 min ago") && late.contains("it waits for X"), "{late}");
        assert!(
            late.contains("stands still") && !late.contains("resume"),
            "no choice is offered yet: {late}"
        );
        assert_eq!((at(61), at(899)), (None, None));
        let overdue = at(900).expect("it is overdue");
        assert!(overdue.contains("15 min ago") && overdue.contains("it waits for X"), "{overdue}");
        assert!(overdue.contains("`abandon`") && overdue.contains("end it here: its source then says"));
        assert!(overdue.contains("within ten minutes"), "{overdue}");
        assert!(ANSWERS_END.contains("`abandon`") && ANSWERS_END.contains("`resume`"));
        assert_eq!(at(5000), None);
    }

    /// A loop that was held up says the last thing alone.
    #[test]
    fn a_limit_that_was_passed_long_ago_is_told_all_the_same() {
        let mut start = Start::default();
        assert!(start.news_after(OVERDUE * 2, "X").is_some_and(|text| text.contains("30 min ago")));
        assert_eq!(start.news_after(OVERDUE * 3, "X"), None);
    }

    #[test]
    fn the_source_gets_a_sign_at_once_and_not_with_each_turn() {
        let mut start = Start::default();
        assert!(start.owes_sign() && !start.owes_sign());
        start.signed = Instant::now().checked_sub(SIGN);
        assert!(start.owes_sign());
    }
}
