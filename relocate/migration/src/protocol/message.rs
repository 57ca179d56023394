//! The messages between both ends.

use std::fmt;

/// The name of an attempt: random, used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt(pub [u8; 16]);

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The digest of everything that was sent in an attempt, and so of the machine that has to arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A message of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Attempt that the message concerns.
    pub attempt: Attempt,
    /// Content of the message.
    pub word: Word,
}

/// The words of the protocol, each with its speaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// Source: receive this machine. Its description goes with the message.
    Offer,
    /// Source: all pages were sent, as they were at one instant.
    Final(Digest),
    /// Source: forget the attempt. The machine goes on at the source, or will.
    Cancel,
    /// Source: start the machine. It does not go on at the source.
    Commit,
    /// Destination: the offer is accepted; send the machine.
    Accept,
    /// Destination: the offer is refused. The reason goes with the message.
    Refuse,
    /// Destination: every page has arrived and is right.
    Verified(Digest),
    /// Destination: the machine runs here.
    Started,
    /// Destination: nothing of the machine has run here, and nothing will.
    Discarded,
    /// Destination: the machine was started here, or may have been, and does not run any more.
    Lost,
    /// Destination: the attempt is unknown here. The answer proves nothing about past events.
    Unknown,
}
