//! The hand-over: two state machines without input, output or clock.
//!
//! [`Source`] is the machine that moves, [`Destination`] the machine that receives it. Each is told
//! events and answers with actions, in the order in which they are to be carried out.
//! docs/migration.md has the diagram and the reasons. Both rest on these rules:
//!
//! 1. A destination starts the arrival only when [`Word::Commit`] has come, or the operator says
//!    so. Every page must be verified, and [`Verdict::Starting`] must be on its disk.
//! 2. A source says `Commit` only after the destination has named the digest of everything that was
//!    sent, and after [`Tombstone::Committed`] is on its own disk. From then on it never goes on by
//!    itself, not even after a restart. Only [`Word::Discarded`] of the destination releases it:
//!    the arrival has not started and never will.
//! 3. Before that, any failure, silence or cancellation lets the source go on.
//! 4. An attempt has a name that is used once. A message about another attempt changes nothing.
//!
//! The rules rest on these conditions:
//!
//! - A connection delivers in order or breaks. A message of one connection cannot be repeated on
//!   another (TLS). The model does not even need the order.
//! - Tombstones are written in the order in which they are asked for, and
//!   [`Event::Recorded`](source::Event::Recorded) comes after they are safe.
//! - After a restart the tombstone is read before any part of a source acts.

pub mod destination;
mod message;
#[cfg(test)]
mod model;
pub mod source;

pub use destination::{Destination, Verdict};
pub use message::{Attempt, Digest, Message, Word};
pub use source::{Source, Tombstone};

use std::time::Duration;

/// The time that each end waits in a silent state before it is told that time is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Wait for an answer, or for pages, while applications run.
    pub running: Duration,
    /// Wait while applications are frozen, up to the commit. In the worst case it adds to the
    /// downtime.
    pub frozen: Duration,
    /// Time between two repeated commits, after the outcome is in doubt.
    pub doubt: Duration,
    /// Wait for the verdict on a complete arrival, at the destination; then the arrival is
    /// discarded. `None`: until the operator decides, for a source whose hardware is about to fail.
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
