//! The hand-over: two state machines without input, output or clock.
//!
//! [`Source`] is the machine that moves, [`Destination`] the one that takes it in. Each is told what happened
//! (an event) and answers what is to be done (actions, in this order). docs/migration.md has the diagram and the reasons.
//! What both rest on:
//!
//! 1. A destination starts the arrival only when [`Word::Commit`] has come, or an operator says so, only with every page
//!    verified, and only after [`Verdict::Starting`] is on its disk.
//! 2. A source says `Commit` only after the destination has named the digest of all that was sent, and after
//!    [`Mark::Committed`] is on its own disk. From then on it never goes on by itself, not even after a restart, unless
//!    the destination has said [`Word::Discarded`]: that it has not started and never will.
//! 3. Before that any failure, silence or cancellation sets the source going again.
//! 4. An attempt has a name that is used once. What is said of another attempt changes nothing.
//!
//! What the rules rest on in turn: a connection delivers in order or breaks, and what was said on one cannot be repeated
//! on another (TLS; the model does not even need the order); marks are written in the order in which they are asked for,
//! and [`Event::Recorded`](source::Event::Recorded) comes after they are safe; a mark is looked at before anything
//! of a source acts after a restart.

pub mod destination;
mod message;
#[cfg(test)]
mod model;
pub mod source;

pub use destination::{Destination, Verdict};
pub use message::{Attempt, Digest, Message, Word};
pub use source::{Mark, Source};

use std::time::Duration;

/// How long each end waits in a state in which nothing is heard, before it is told that time is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For an answer, or for pages, while applications run.
    pub running: Duration,
    /// While applications are frozen, up to the commit: this is added to the downtime at worst.
    pub frozen: Duration,
    /// Between two commits that are said again, once nothing else can be done.
    pub doubt: Duration,
    /// For the verdict on an arrival that is whole, at the destination; then it is discarded. `None`: until an operator
    /// decides, for a source whose hardware is about to fail.
    pub hold: Option<Duration>,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            running: Duration::from_secs(30),
            frozen: Duration::from_secs(10),
            doubt: Duration::from_secs(2),
            hold: Some(Duration::from_secs(600)),
        }
    }
}
