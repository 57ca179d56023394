//! Orders and answers, a line of JSON each, and what the daemon makes of them.

use crate::output::{Render, Text};
use serde::{Deserialize, Serialize};

/// No order is longer, in bytes.
pub const LINE_MAX: u64 = 4096;
/// No reason is repeated further, in characters.
const REASON_MAX: usize = 200;

/// What a client wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// To know what the daemon is at.
    Status {},
    /// This machine is to leave.
    Evacuate {
        /// Why, for those who read about it.
        reason: String,
    },
}

/// What the daemon is at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum State {
    /// Nothing was ordered yet.
    #[default]
    Waiting,
    /// This machine moves.
    Evacuating {
        /// Why.
        reason: String,
        /// Where to.
        to: String,
    },
    /// It has moved: this is the machine that has arrived.
    Moved {
        /// Why.
        reason: String,
        /// Where to.
        to: String,
    },
    /// It has not, and goes on as before.
    Failed {
        /// Why it was to.
        reason: String,
        /// Where to.
        to: String,
        /// Why it has not.
        why: String,
    },
}

/// What a client is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// What the daemon is at now.
    #[serde(flatten)]
    pub state: State,
    /// Why the order was not taken.
    pub refused: Option<String>,
    /// It was not taken because another one is being carried out.
    pub busy: bool,
}

impl Answer {
    /// The order was taken.
    #[must_use]
    pub fn taken(desk: &Desk) -> Self {
        Self { state: desk.state.clone(), refused: None, busy: false }
    }

    /// It was not.
    #[must_use]
    pub fn refused(desk: &Desk, why: String) -> Self {
        let busy = matches!(desk.state, State::Evacuating { .. });
        Self { state: desk.state.clone(), refused: Some(why), busy }
    }
}

impl Render for Answer {
    fn render(&self, to: &mut Text) {
        to.line(match &self.state {
            State::Waiting => "mercuryd waits for orders".to_owned(),
            State::Evacuating { reason, to } => format!("this machine moves to {to}: {reason}"),
            State::Moved { reason, to } => format!("this machine has moved to {to}: {reason}"),
            State::Failed { reason, to, why } => {
                format!("this machine was to move to {to} ({reason}), and has not: {why}")
            }
        });
    }
}

/// The state, and what the next order has to be measured by.
#[derive(Debug, Default)]
pub struct Desk {
    state: State,
    /// The line of the move that is going on or was the last to succeed.
    line: Option<String>,
}

impl Desk {
    /// An order to leave is carried out from here on.
    ///
    /// # Errors
    /// Why it is not.
    pub fn begin(&mut self, reason: &str, to: &str, line: &str) -> Result<(), String> {
        if matches!(self.state, State::Evacuating { .. }) {
            return Err("this machine is moving already".into());
        }
        if self.line.as_deref() == Some(line) {
            return Err("the line was used for the last move: put that of another spare into the file".into());
        }
        self.line = Some(line.into());
        self.state = State::Evacuating { reason: printable(reason), to: to.into() };
        Ok(())
    }

    /// It was carried out, or not. A line that was not used up may be tried again.
    pub fn end(&mut self, ended: Result<(), String>) {
        let State::Evacuating { reason, to } = std::mem::take(&mut self.state) else { return };
        self.state = match ended {
            Ok(()) => State::Moved { reason, to },
            Err(why) => {
                self.line = None;
                State::Failed { reason, to, why }
            }
        };
    }
}

/// A reason as it can be put into a log.
#[must_use]
pub fn printable(reason: &str) -> String {
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_one_line() {
        assert_eq!(printable("a\nb\u{1b}[2J"), "a b [2J");
        assert_eq!(printable(&"x".repeat(1000)).len(), REASON_MAX);
    }

    #[test]
    fn what_has_not_begun_does_not_end() {
        let mut desk = Desk::default();
        desk.end(Ok(()));
        assert_eq!(desk.state, State::Waiting);
    }

    #[test]
    fn orders_are_what_the_documentation_says() {
        let order = Order::Evacuate { reason: "errors".into() };
        assert_eq!(
            serde_json::to_string(&order).ok().as_deref(),
            Some(r#"{"order":"evacuate","reason":"errors"}"#)
        );
        assert_eq!(serde_json::from_str::<Order>(r#"{"order":"status"}"#).ok(), Some(Order::Status {}));
    }
}
