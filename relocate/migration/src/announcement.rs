//! Announcements: messages after the commit, where no connection is possible. The arrived machine
//! has the source's address, so neither can send the other a packet of its own network. Both are on
//! one Ethernet, and a broadcast frame there reaches every listener.
//!
//! An announcement is a message of the protocol in 58 bytes: [`MAGIC`] (8), the speaker (1: the
//! source, 2: the destination), the word (1, as in [`wire`](crate::wire)), the attempt (16), and
//! the keyed BLAKE3 (32) of all that. Every host on the network may hear it and repeat it.
//! Repetition does no harm: an announcement states a permanent fact ([`Word::Started`],
//! [`Word::Discarded`]), or asks for one ([`Word::Commit`]), of an attempt whose name is used once.
//! The state machines decide if that attempt is the one that matters.
//!
//! The key belongs to the attempt: both ends derive it from the receiver's pairing token and from a
//! [`Secret`], which the source sends with the offer, inside the session. A host that has only seen
//! the token can therefore decide nothing. A restarted receiver has lost the secret. Announcements
//! to it and from it use a key that is derived from the token alone, and carry only two words:
//! [`Word::Unknown`], which decides nothing, and a question about an attempt that the receiver does
//! not know.

use crate::{
    protocol::{Attempt, Message, Word},
    session::PairingToken,
};

/// First bytes of an announcement.
pub const MAGIC: [u8; 8] = *b"\x89MHail\r\n";
/// Type of the Ethernet frames: IEEE 802's first one for local experiments.
pub const ETHER_TYPE: u16 = 0x88b5;
/// Size of an announcement in bytes.
pub const LENGTH: usize = CHECKED + 32;

const CHECKED: usize = 8 + 1 + 1 + 16;

/// The speaker of an announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaker {
    /// The machine that moves.
    Source = 1,
    /// The destination, or the machine that has arrived there.
    Destination = 2,
}

/// The secret of an attempt: random, used once. The source makes it and sends it with the offer.
pub type Secret = [u8; 32];

/// Context for deriving an attempt's key.
const CONTEXT: &str = "mercury migration 2: hails of an attempt";

/// The keys with which an end makes and checks announcements.
#[derive(Clone, PartialEq, Eq)]
pub struct Announcer {
    /// Key from the pairing token alone.
    key: [u8; 32],
    known: Vec<(Attempt, [u8; 32])>,
}

impl std::fmt::Debug for Announcer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Announcer(..)")
    }
}

impl Announcer {
    /// Returns the announcer for moves to the receiver of a pairing token.
    #[must_use]
    pub fn new(token: &PairingToken) -> Self {
        Self { key: token.announcement_key(), known: Vec::new() }
    }

    /// Stores the secret of an offered attempt. From here on the token's key no longer counts for
    /// this attempt.
    pub fn know(&mut self, attempt: Attempt, secret: &Secret) {
        let key = blake3::derive_key(CONTEXT, &[&self.key[..], &attempt.0, secret].concat());
        if self.key_of(attempt).is_none() {
            self.known.push((attempt, key));
        }
    }

    fn key_of(&self, attempt: Attempt) -> Option<&[u8; 32]> {
        self.known.iter().find(|(known, _)| *known == attempt).map(|(_, key)| key)
    }

    /// Returns the frame's content for a message. Uses the token's key for an attempt that is not
    /// known.
    #[must_use]
    pub fn say(&self, speaker: Speaker, message: Message) -> [u8; LENGTH] {
        Self::made(self.key_of(message.attempt).unwrap_or(&self.key), speaker, message)
    }

    /// Returns the frame's content for a receiver that was restarted, and cannot know the attempt.
    #[must_use]
    pub fn say_to_restarted(&self, speaker: Speaker, message: Message) -> [u8; LENGTH] {
        Self::made(&self.key, speaker, message)
    }

    fn made(key: &[u8; 32], speaker: Speaker, Message { attempt, word }: Message) -> [u8; LENGTH] {
        let number = match word {
            Word::Cancel => 3,
            Word::Commit => 4,
            Word::Started => 8,
            Word::Discarded => 9,
            Word::Lost => 10,
            // No other word is announced.
            _ => 11,
        };
        let mut bytes = [0; LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = speaker as u8;
        bytes[9] = number;
        bytes[10..CHECKED].copy_from_slice(&attempt.0);
        let sum = blake3::keyed_hash(key, &bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(sum.as_bytes());
        bytes
    }

    /// Returns the message in a frame, if it is an announcement of the other end. A frame may be
    /// padded.
    #[must_use]
    pub fn hear(&self, speaker: Speaker, frame: &[u8]) -> Option<Message> {
        let bytes = frame.first_chunk::<LENGTH>()?;
        let (checked, sum) = bytes.split_at(CHECKED);
        let mut found = [0; 32];
        found.copy_from_slice(sum);
        // The comparison takes constant time.
        let is_by = |key| blake3::keyed_hash(key, checked) == blake3::Hash::from_bytes(found);
        if checked[..8] != MAGIC || checked[8] != speaker as u8 {
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
        let own = self.key_of(attempt);
        // Words for which the token's key suffices.
        let decides_nothing = own.is_none() || word == Word::Unknown;
        (own.is_some_and(is_by) || decides_nothing && is_by(&self.key)).then_some(Message { attempt, word })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Receiver;
    use std::time::Duration;

    fn announcer() -> Announcer {
        let (_, token) = Receiver::new(Duration::from_secs(60)).expect("a receiver");
        Announcer::new(&token)
    }

    const STARTED: Message = Message { attempt: Attempt([1; 16]), word: Word::Started };

    #[test]
    fn only_the_other_end_is_heard() {
        let one = announcer();
        let mut frame = one.say(Speaker::Destination, STARTED).to_vec();
        frame.extend([0; 20]);
        assert_eq!(one.hear(Speaker::Destination, &frame), Some(STARTED));
        assert_eq!(one.hear(Speaker::Source, &frame), None, "what one has said oneself");
        assert_eq!(announcer().hear(Speaker::Destination, &frame), None, "another token");
        assert_eq!(one.hear(Speaker::Destination, &frame[..LENGTH - 1]), None);
    }

    #[test]
    fn no_bit_can_be_changed() {
        let one = announcer();
        let frame = one.say(Speaker::Destination, STARTED);
        for bit in 0..LENGTH * 8 {
            let mut changed = frame;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(one.hear(Speaker::Destination, &changed), None, "bit {bit}");
        }
    }

    /// A host that has seen the pairing token decides nothing; only the attempt's secret does.
    #[test]
    fn the_line_is_not_enough() {
        let stranger = announcer();
        let (mut source, mut destination, mut other) = (stranger.clone(), stranger.clone(), stranger.clone());
        source.know(STARTED.attempt, &[5; 32]);
        destination.know(STARTED.attempt, &[5; 32]);
        other.know(STARTED.attempt, &[6; 32]);
        let commit = Message { word: Word::Commit, ..STARTED };
        for word in [Word::Started, Word::Discarded, Word::Lost, Word::Commit, Word::Cancel] {
            let message = Message { word, ..STARTED };
            for forger in [&stranger, &other] {
                let frame = forger.say(Speaker::Destination, message);
                assert_eq!(source.hear(Speaker::Destination, &frame), None, "{word:?}");
            }
            let frame = destination.say(Speaker::Destination, message);
            assert_eq!(source.hear(Speaker::Destination, &frame), Some(message));
        }
        // A restarted receiver is asked, answers, and is understood. A receiver that knows the
        // attempt ignores the question.
        let question = source.say_to_restarted(Speaker::Source, commit);
        assert_eq!(stranger.hear(Speaker::Source, &question), Some(commit));
        assert_eq!(destination.hear(Speaker::Source, &question), None);
        let unknown = Message { word: Word::Unknown, ..STARTED };
        let answer = stranger.say(Speaker::Destination, unknown);
        assert_eq!(source.hear(Speaker::Destination, &answer), Some(unknown));
        // The secret of another attempt does not replace it.
        destination.know(STARTED.attempt, &[7; 32]);
        assert_eq!(destination.hear(Speaker::Source, &source.say(Speaker::Source, commit)), Some(commit));
    }
}
