//! The network of the model: the set of everything ever said, for each direction.

use crate::protocol::{Attempt, Digest, Message, Word};

/// A packet that can be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet {
    /// A message of the protocol.
    Message(Message),
    /// The one page of the model, with the time of its content.
    Page(Attempt, u8),
}

/// Number of times that the model counts.
const TIMES: u8 = 8;
/// Number of bits for an attempt.
const WIDTH: u8 = 32;

/// A set of packets, as a bit mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Network(u64);

pub fn attempt(number: u8) -> Attempt {
    Attempt([number; 16])
}

/// Returns the model's digest of memory, which is the memory itself.
pub fn digest(time: u8) -> Digest {
    assert!(time < TIMES, "the model's clock is too short");
    Digest([time; 32])
}

fn bit(packet: Packet) -> u8 {
    let (attempt, bit) = match packet {
        Packet::Page(attempt, time) => (attempt, 16 + time),
        Packet::Message(Message { attempt, word }) => (
            attempt,
            match word {
                Word::Final(Digest(time)) => 24 + time[0],
                Word::Verified(Digest(time)) => 8 + time[0],
                Word::Offer => 0,
                Word::Cancel => 1,
                Word::Commit => 2,
                Word::Accept => 3,
                Word::Refuse => 4,
                Word::Started => 5,
                Word::Discarded => 6,
                Word::Lost => 7,
                Word::Unknown => 23,
            },
        ),
    };
    attempt.0[0] * WIDTH + bit
}

fn packet(bit: u8) -> Packet {
    let attempt = attempt(bit / WIDTH);
    let word = match bit % WIDTH {
        0 => Word::Offer,
        1 => Word::Cancel,
        2 => Word::Commit,
        3 => Word::Accept,
        4 => Word::Refuse,
        5 => Word::Started,
        6 => Word::Discarded,
        7 => Word::Lost,
        23 => Word::Unknown,
        time @ 8..16 => Word::Verified(digest(time - 8)),
        time @ 16..23 => return Packet::Page(attempt, time - 16),
        time => Word::Final(digest(time - 24)),
    };
    Packet::Message(Message { attempt, word })
}

impl Network {
    pub fn add(&mut self, added: Packet) {
        assert_eq!(packet(bit(added)), added, "the model's network is too narrow");
        self.0 |= 1 << bit(added);
    }

    pub fn packets(self) -> impl Iterator<Item = Packet> {
        (0..64).filter(move |bit| self.0 >> bit & 1 == 1).map(packet)
    }

    pub fn clear(&mut self) {
        self.0 = 0;
    }
}
