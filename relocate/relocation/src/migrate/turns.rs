//! Every order of events at the commit, in the source's real loop, and Ctrl-C at every step: each
//! combination is played once ([`super::trial`]).

use super::trial::{Act, Ended, LIMIT, SILENCE, Stage, honest, plays};
use mercury_migration::protocol::{Digest, Tombstone, Word};
use std::time::Instant;

const LAST: Word = Word::Final(Digest([0; 32]));

/// An honest destination up to this word of the source, and then the given acts.
fn after(word: Word, then: &[Act]) -> Vec<Act> {
    let acts = honest();
    let at = acts
        .iter()
        .position(|act| matches!(act, Act::Await(found) if *found == word))
        .expect("it is awaited");
    acts[..=at].iter().chain(then).cloned().collect()
}

fn resumed(ended: &Ended, why: &str) {
    assert!(matches!(ended, Ended::Resumed(said) if said.contains(why)), "{ended:?}");
}

#[test]
fn ctrl_c_between_the_last_word_and_the_verdict() {
    for (late, words) in [(None, 1), (Some(Act::SayVerified), 2)] {
        let stage = Stage::new();
        // The destination is silent before the move is called off, and a verdict that was under way
        // changes nothing afterwards.
        let acts = after(LAST, &[Act::Interrupt, Act::Await(Word::Cancel)]);
        let acts: Vec<_> = acts.into_iter().chain(late).collect();
        resumed(&plays(&stage, &acts, LIMIT, "abandon"), "interrupted");
        let seen = stage.seen();
        assert!(!seen.has_done("commit") && seen.to_all.is_empty(), "{:?}", seen.did);
        assert_eq!(seen.said.len(), words);
    }
}

/// A destination that only says that it works, or says again what had its effect, cannot keep the machine
/// standing still. Its words come for a minute, and six times of silence are its limit.
#[test]
fn signs_of_life_without_end_are_not_waited_for() {
    for sign in [Act::Round, Act::Say(Word::Accept, 0)] {
        let stage = Stage::new();
        let flood = Act::Flood(Box::new(sign.clone()));
        let begun = Instant::now();
        resumed(&plays(&stage, &after(LAST, &[flood]), SILENCE, "abandon"), "the destination");
        assert!(begun.elapsed() < LIMIT / 2, "{sign:?}");
        assert!(!stage.seen().has_done("commit") && stage.seen().typed.is_empty());
    }
}

/// Ctrl-C at each call of the loop: before the tombstone the machine runs on, after it Ctrl-C is
/// too late.
#[test]
fn ctrl_c_at_every_step() {
    for at in ["scan", "fence off", "hold still", "take the instant", "read", "end the instant"] {
        let stage = Stage::new();
        stage.seen().interrupted_at = Some(at.into());
        resumed(&plays(&stage, &honest(), LIMIT, "abandon"), "interrupted");
        assert!(!stage.seen().has_done("commit"), "{at}");
    }
    for at in ["commit", "tombstone Committed"] {
        let stage = Stage::new();
        stage.seen().interrupted_at = Some(at.into());
        assert_eq!(plays(&stage, &honest(), LIMIT, "resume"), Ended::GivenUp, "{at}");
        let told = stage.seen().told.join(" ");
        assert!(told.contains("too late to cancel"), "{at}: {told}");
    }
}

/// A failure of the machine before the commit ends the move, and the machine runs on.
#[test]
fn a_failure_before_the_commit_changes_nothing() {
    for what in ["scan", "fence off", "hold still", "take the instant", "read", "end the instant"] {
        let stage = Stage::new();
        stage.seen().failing = vec![what.into()];
        resumed(&plays(&stage, &honest(), LIMIT, "abandon"), &format!("{what} fails"));
        assert!(!stage.seen().has_done("commit"), "{what}");
    }
    // Without a dirty log all of memory is read.
    for what in ["begin the log", "collect the log"] {
        let stage = Stage::new();
        stage.seen().failing = vec![what.into()];
        assert_eq!(plays(&stage, &honest(), LIMIT, "resume"), Ended::GivenUp, "{what}");
    }
}

/// If no process could follow, or the tombstone cannot be written, the destination is not told to
/// start, and the tombstone is taken back.
#[test]
fn a_commit_that_cannot_be_kept_is_withdrawn() {
    for what in ["commit", "tombstone Committed"] {
        for is_there in [false, true] {
            let stage = Stage::new();
            stage.seen().failing = vec![what.into()];
            stage.seen().is_there_all_the_same = is_there;
            let acts = after(LAST, &[Act::SayVerified, Act::Await(Word::Cancel)]);
            resumed(&plays(&stage, &acts, LIMIT, "abandon"), &format!("{what} fails"));
            let seen = stage.seen();
            assert_eq!(
                (seen.tombstone, seen.has_said(Word::Commit)),
                (Some(Tombstone::Cleared), false),
                "{what}"
            );
        }
    }
}

/// While the tombstone may be there, only the destination's promise or the operator lets the
/// machine go on.
#[test]
fn a_tombstone_that_cannot_be_cleared_holds_the_machine() {
    let verified = [Act::SayVerified, Act::AwaitDone("tombstone Cleared")];
    for (then, why) in [
        (vec![Act::Announce(Word::Discarded)], "a promise to all"),
        (vec![Act::Say(Word::Discarded, 0)], "a promise on the connection"),
        (
            vec![
                Act::Announce(Word::Unknown),
                Act::Announce(Word::Started),
                Act::Wait(300),
                Act::Type("resume"),
            ],
            "the operator",
        ),
        (vec![Act::Type("abandon"), Act::Wait(300), Act::Type("resume")], "no other word of the operator's"),
        (
            vec![Act::Close, Act::Wait(300), Act::Announce(Word::Discarded)],
            "a promise, when the connection is gone",
        ),
    ] {
        let stage = Stage::new();
        stage.seen().failing = vec!["tombstone Committed".into(), "tombstone Cleared".into()];
        stage.seen().is_there_all_the_same = true;
        let acts = after(LAST, &[&verified[..], &then].concat());
        let ended = plays(&stage, &acts, SILENCE, "adopt");
        assert!(matches!(ended, Ended::Resumed(_)), "{why}: {ended:?}");
        assert!(!stage.seen().has_said(Word::Commit), "{why}");
    }
}

/// After the commit an answer decides: on the connection or as an announcement, at once or late,
/// with or without the connection.
#[test]
fn an_answer_decides_however_it_comes() {
    let answers = [(Word::Started, true), (Word::Discarded, false)];
    let ways = [
        |word| vec![Act::Say(word, 0)],
        |word| vec![Act::Announce(word)],
        |word| vec![Act::Close, Act::Announce(word)],
        |word| vec![Act::Close, Act::Wait(400), Act::Announce(word)],
        |word| vec![Act::Announce(Word::Unknown), Act::Announce(Word::Lost), Act::Announce(word)],
        |word| vec![Act::Interrupt, Act::Wait(50), Act::Announce(word)],
    ];
    for (word, is_elsewhere) in answers {
        for (number, way) in ways.iter().enumerate() {
            let stage = Stage::new();
            let ended = plays(&stage, &after(Word::Commit, &way(word)), SILENCE, "adopt");
            assert_eq!(ended == Ended::GivenUp, is_elsewhere, "{word:?}, way {number}: {ended:?}");
            let tombstone = if is_elsewhere { Tombstone::GivenUp } else { Tombstone::Cleared };
            assert_eq!(stage.seen().tombstone, Some(tombstone), "{word:?}, way {number}");
        }
    }
}

/// A verdict followed by the end of the connection: the source has committed, and announces it.
#[test]
fn a_verdict_is_the_last_that_is_heard() {
    for (word, is_elsewhere) in [(Word::Started, true), (Word::Discarded, false)] {
        let stage = Stage::new();
        let acts = [
            Act::SayVerified,
            Act::Close,
            Act::AwaitDone("tombstone Committed"),
            Act::Wait(100),
            Act::Announce(word),
        ];
        let ended = plays(&stage, &after(LAST, &acts), LIMIT, "adopt");
        assert_eq!(ended == Ended::GivenUp, is_elsewhere, "{ended:?}");
        assert!(stage.seen().has_said(Word::Commit));
    }
}

/// Without an answer the source goes on standing still, tells its operator, and does as one of the
/// two words says.
#[test]
fn an_operator_decides_when_no_answer_comes() {
    for (word, is_elsewhere) in [("resume", false), ("abandon", true)] {
        for closes in [false, true] {
            let stage = Stage::new();
            let close = closes.then_some(Act::Close);
            let acts: Vec<_> =
                after(Word::Commit, &[]).into_iter().chain(close).chain([Act::Wait(400)]).collect();
            let ended = plays(&stage, &acts, SILENCE, word);
            assert_eq!(ended == Ended::GivenUp, is_elsewhere, "{word}: {ended:?}");
            let told = stage.seen().told.join(" ");
            assert!(told.contains("does not answer"), "{told}");
        }
    }
}

/// A machine that has arrived says nothing as a source.
#[test]
fn an_arrived_machine_is_no_source() {
    let stage = Stage::new();
    stage.seen().arrives = true;
    assert_eq!(plays(&stage, &honest(), LIMIT, "resume"), Ended::Arrived);
    let seen = stage.seen();
    assert!(!seen.has_done("read") && !seen.has_done("go on") && !seen.has_done("commit"), "{:?}", seen.did);
}
