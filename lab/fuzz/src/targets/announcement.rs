//! Announcements, which every host on the network can send; and pairing tokens and identities, which
//! an operator pastes.

use crate::{Target, input::outcome};
use mercury_migration::{
    announcement::{Announcer, LENGTH, Speaker},
    protocol::{Attempt, Message, Word},
    session::{Identity, PairingToken},
};

const ATTEMPT: Attempt = Attempt([7; 16]);
/// A token with a right check value: the secret and the pin are made up.
const TOKEN: &str = "mercury-receive-1-";
const WORDS: [Word; 6] =
    [Word::Commit, Word::Cancel, Word::Started, Word::Discarded, Word::Lost, Word::Unknown];

pub const TARGET: Target = Target { name: "announcement", run, seeds };

/// Returns the announcer of an end that knows the attempt.
fn announcer() -> Announcer {
    let mut announcer = Announcer::new(&token());
    announcer.know(ATTEMPT, &[3; 32]);
    announcer
}

/// Returns a token, the same in each process.
fn token() -> PairingToken {
    use std::{sync::OnceLock, time::Duration};
    static TOKEN: OnceLock<PairingToken> = OnceLock::new();
    let new = || mercury_migration::session::Receiver::new(Duration::from_secs(60)).expect("a receiver").1;
    TOKEN.get_or_init(new).clone()
}

fn said() -> Vec<(Speaker, Message, [u8; LENGTH])> {
    let announcer = announcer();
    let mut frames = Vec::new();
    for speaker in [Speaker::Source, Speaker::Destination] {
        for word in WORDS {
            let message = Message { attempt: ATTEMPT, word };
            frames.push((speaker, message, announcer.say(speaker, message)));
            frames.push((speaker, message, announcer.say_to_restarted(speaker, message)));
        }
    }
    frames
}

fn seeds() -> Vec<Vec<u8>> {
    let frames = said().into_iter().map(|(_, _, frame)| frame.to_vec());
    frames.chain([TOKEN.as_bytes().to_vec(), token().to_string().into_bytes()]).collect()
}

fn run(input: &[u8]) -> u64 {
    let announcer = announcer();
    let mut text = String::new();
    for speaker in [Speaker::Source, Speaker::Destination] {
        let heard = announcer.hear(speaker, input);
        if let Some(message) = heard {
            let is_own = said().iter().any(|(by, _, frame)| *by == speaker && input.starts_with(frame));
            assert!(is_own, "{message:?} was never announced");
        }
        text += &format!("{:?}", heard.map(|message| message.word));
    }
    let pasted = String::from_utf8_lossy(input);
    match pasted.parse::<PairingToken>() {
        Ok(token) => assert!(pasted.trim().eq_ignore_ascii_case(&token.to_string()), "another token"),
        Err(error) => text += &error.to_string(),
    }
    text += &format!("{}", Identity::from_bytes(input).is_ok());
    outcome(&text)
}
