//! Orders and answers, a line of JSON each, and the daemon's state.

use super::spares::Ticket;
use mercury_control::output::{Render, Text};
use serde::{Deserialize, Serialize};

/// Longest order in bytes.
pub const LINE_MAX: u64 = 4096;
/// Longest part of a reason that is repeated, in characters.
const REASON_MAX: usize = 200;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// Report the daemon's state.
    Status {},
    /// Move this machine.
    Evacuate {
        /// Reason, for people who read about the move.
        reason: String,
    },
}

/// The state of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum State {
    /// There was no order yet.
    #[default]
    Waiting,
    /// The machine is moving.
    Evacuating { reason: String, to: String },
    /// The machine has moved: this is the machine that has arrived.
    Moved { reason: String, to: String },
    /// The machine has not moved, and goes on as before.
    Failed {
        reason: String,
        to: String,
        /// Reason why it has not moved.
        why: String,
    },
}

/// The answer to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// State of the daemon now.
    #[serde(flatten)]
    pub state: State,
    /// Reason why the order was refused.
    pub refused: Option<String>,
    /// True if the order was refused because another one is being carried out.
    pub busy: bool,
}

impl Answer {
    /// Makes the answer to an accepted order.
    #[must_use]
    pub fn taken(desk: &Desk) -> Self {
        Self { state: desk.state.clone(), refused: None, busy: false }
    }

    /// Makes the answer to a refused order.
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

/// The daemon's state, with the data for judging the next order.
#[derive(Debug, Default)]
pub struct Desk {
    state: State,
    /// Tickets of the move that is under way and of those that succeeded.
    tickets: Vec<Ticket>,
}

impl Desk {
    /// Begins to carry an order out.
    ///
    /// # Errors
    ///
    /// Returns the reason for a refusal.
    pub fn begin(&mut self, reason: &str, to: &str, ticket: &Ticket) -> Result<(), String> {
        if matches!(self.state, State::Evacuating { .. }) {
            return Err("this machine is moving already".into());
        }
        if matches!(ticket, Ticket::Token(_)) && self.tickets.contains(ticket) {
            return Err("the pairing token was used for an earlier move: put that of another destination \
                into the file"
                .into());
        }
        self.tickets.push(ticket.clone());
        self.state = State::Evacuating { reason: printable(reason), to: to.into() };
        Ok(())
    }

    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns the destination of the move that is under way, and its reason.
    #[must_use]
    pub fn under_way(&self) -> (String, String) {
        match &self.state {
            State::Evacuating { reason, to } => (to.clone(), reason.clone()),
            _ => Default::default(),
        }
    }

    /// Records the end of a move. A pairing token that was not used up may be tried again.
    pub fn end(&mut self, ended: Result<(), String>) {
        let State::Evacuating { reason, to } = std::mem::take(&mut self.state) else { return };
        self.state = match ended {
            Ok(()) => State::Moved { reason, to },
            Err(why) => {
                self.tickets.pop();
                State::Failed { reason, to, why }
            }
        };
    }
}

/// Makes a reason printable for a log.
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
    fn an_order_that_has_not_begun_does_not_end() {
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
