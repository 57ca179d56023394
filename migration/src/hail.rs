//! What is said after the commit where there can be no connection: the machine that arrives has the address of the one
//! that it was, so neither can send the other a packet of its own network. Both are on one Ethernet, and there a frame to all
//! reaches whoever listens.
//!
//! A hail is a message of the protocol in 58 bytes: [`MAGIC`] (8), who says it (1: the source, 2: the destination), the word
//! (1, as in [`wire`](crate::wire)), the attempt (16), and BLAKE3 (32) of all that with a key that
//! both ends derive from the receiver's line. It may be heard by anybody, and repeated by anybody: it says what is true for
//! good ([`Word::Started`], [`Word::Discarded`]), or asks for it ([`Word::Commit`]), of an attempt whose name is used once.
//! Whether that attempt is the one that matters is the state machines' to say.

use crate::{
    protocol::{Attempt, Message, Word},
    session::Line,
};

/// How it begins.
pub const MAGIC: [u8; 8] = *b"\x89MHail\r\n";
/// The type of such Ethernet frames: IEEE 802's first one for local experiments.
pub const ETHER_TYPE: u16 = 0x88b5;
/// Bytes of a hail.
pub const LENGTH: usize = CHECKED + 32;

const CHECKED: usize = 8 + 1 + 1 + 16;

/// Who says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaker {
    /// The machine that moves.
    Source = 1,
    /// The one that takes it in, or what has arrived there.
    Destination = 2,
}

/// What both ends make and check hails with.
#[derive(Clone, PartialEq, Eq)]
pub struct Hailer {
    key: [u8; 32],
}

impl std::fmt::Debug for Hailer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hailer(..)")
    }
}

impl Hailer {
    /// For moves to the receiver of a line.
    #[must_use]
    pub fn new(line: &Line) -> Self {
        Self { key: line.hail_key() }
    }

    /// What goes into the frame.
    #[must_use]
    pub fn say(&self, speaker: Speaker, Message { attempt, word }: Message) -> [u8; LENGTH] {
        let number = match word {
            Word::Cancel => 3,
            Word::Commit => 4,
            Word::Started => 8,
            Word::Discarded => 9,
            Word::Lost => 10,
            // Nothing else is said so.
            _ => 11,
        };
        let mut bytes = [0; LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = speaker as u8;
        bytes[9] = number;
        bytes[10..CHECKED].copy_from_slice(&attempt.0);
        let sum = blake3::keyed_hash(&self.key, &bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(sum.as_bytes());
        bytes
    }

    /// What the other end has said, if it is that. A frame may be padded.
    #[must_use]
    pub fn hear(&self, speaker: Speaker, frame: &[u8]) -> Option<Message> {
        let bytes = frame.first_chunk::<LENGTH>()?;
        let (checked, sum) = bytes.split_at(CHECKED);
        let mut found = [0; 32];
        found.copy_from_slice(sum);
        // Compared in constant time.
        let is_right = blake3::keyed_hash(&self.key, checked) == blake3::Hash::from_bytes(found);
        if !is_right || checked[..8] != MAGIC || checked[8] != speaker as u8 {
            return None;
        }
        let mut attempt = Attempt([0; 16]);
        attempt.0.copy_from_slice(&checked[10..]);
        let word = match checked[9] {
            3 => Word::Cancel,
            4 => Word::Commit,
            8 => Word::Started,
            9 => Word::Discarded,
            10 => Word::Lost,
            11 => Word::Unknown,
            _ => return None,
        };
        Some(Message { attempt, word })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Receiver;
    use std::time::Duration;

    fn hailer() -> Hailer {
        let (_, line) = Receiver::new(Duration::from_secs(60)).expect("a receiver");
        Hailer::new(&line)
    }

    const STARTED: Message = Message { attempt: Attempt([1; 16]), word: Word::Started };

    #[test]
    fn only_the_other_end_is_heard() {
        let one = hailer();
        let mut frame = one.say(Speaker::Destination, STARTED).to_vec();
        frame.extend([0; 20]);
        assert_eq!(one.hear(Speaker::Destination, &frame), Some(STARTED));
        assert_eq!(one.hear(Speaker::Source, &frame), None, "what one has said oneself");
        assert_eq!(hailer().hear(Speaker::Destination, &frame), None, "another line");
        assert_eq!(one.hear(Speaker::Destination, &frame[..LENGTH - 1]), None);
    }

    #[test]
    fn no_bit_can_be_changed() {
        let one = hailer();
        let frame = one.say(Speaker::Destination, STARTED);
        for bit in 0..LENGTH * 8 {
            let mut changed = frame;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(one.hear(Speaker::Destination, &changed), None, "bit {bit}");
        }
    }
}
