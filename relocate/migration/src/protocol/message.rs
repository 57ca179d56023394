//! What the two ends say to each other.

use std::fmt;

/// The name of an attempt to move: random, and used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt(pub [u8; 16]);

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The digest of all that was sent in an attempt, and so of the machine that has to arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Of which attempt.
    pub attempt: Attempt,
    /// What is said.
    pub word: Word,
}

/// What can be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// Source: take this machine. What it is goes with it.
    Offer,
    /// Source: that was all of it, taken at one instant.
    Final(Digest),
    /// Source: forget it. This machine goes on, or will.
    Cancel,
    /// Source: start it. This machine does not go on.
    Commit,
    /// Destination: send it.
    Accept,
    /// Destination: it cannot be taken. Why goes with it.
    Refuse,
    /// Destination: every page is here and right.
    Verified(Digest),
    /// Destination: it runs here.
    Started,
    /// Destination: nothing of it has run here, and nothing of it will.
    Discarded,
    /// Destination: it was started here, or may have been, and does not run any more.
    Lost,
    /// Destination: nothing is known here of this attempt. That says nothing about what happened.
    Unknown,
}
