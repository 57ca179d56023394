//! Hostile-peer tests of a source. The other end may lie, be late, or break off: the real loop of a
//! move ([`super::mover`]) runs against all of that. [`super::trial`] checks the conditions that
//! must always hold.

use super::{
    offer::Offer,
    trial::{Act, Ended, LIMIT, SILENCE, Stage, honest, offer, plays, plays_by},
};
use mercury_migration::{
    protocol::{Attempt, Digest, Tombstone, Word},
    wire::Writer,
};
use proptest::prelude::*;

const OTHER: Digest = Digest([8; 32]);

fn word(word: Word) -> Act {
    Act::Say(word, 0)
}

/// Encodes words of an attempt's other end.
fn stream(attempt: Attempt, words: &[Word]) -> Vec<u8> {
    let mut writer = Writer::begin(Vec::new(), attempt, 0).expect("begun");
    words.iter().for_each(|word| writer.say(*word, b"").expect("said"));
    writer.into_inner()
}

/// The other tests would prove nothing if an honest move failed.
#[test]
fn an_honest_destination_is_believed() {
    let stage = Stage::new();
    assert_eq!(plays(&stage, &honest(), LIMIT, "resume"), Ended::GivenUp);
    let seen = stage.seen();
    assert_eq!(seen.tombstone, Some(Tombstone::GivenUp));
    let order = [
        "scan",
        "hold still",
        "fence off",
        "take the instant",
        "end the instant",
        "commit",
        "tombstone Committed",
    ];
    let at = order.map(|what| seen.did.iter().position(|did| did == what));
    assert!(at.is_sorted() && at[0].is_some(), "{:?}", seen.did);
}

/// Words that are not true yet, words of another attempt, and invalid texts leave the machine
/// running.
#[test]
fn lies_before_the_commit_leave_it_running() {
    let last = Act::Await(Word::Final(OTHER));
    for says in [
        vec![word(Word::Started)],
        vec![word(Word::Verified(OTHER)), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Verified(OTHER)), word(Word::Started)],
        vec![word(Word::Accept), last.clone(), word(Word::Verified(OTHER)), word(Word::Started)],
        vec![word(Word::Accept), last.clone(), word(Word::Started)],
        vec![word(Word::Accept), last, word(Word::Discarded), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Discarded), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Unknown)],
        vec![Act::Say(Word::Refuse, 1 << 20)],
        vec![word(Word::Offer), word(Word::Commit)],
        vec![Act::Pages, Act::Round, Act::Pages],
        vec![Act::Raw(stream(Attempt([2; 16]), &[Word::Accept]))],
        vec![Act::Raw(b"HTTP/1.1 200 OK\r\n\r\n".into())],
        vec![Act::Raw(vec![0xff; 4096])],
    ] {
        for closes in [None, Some(Act::Close)] {
            let stage = Stage::new();
            let acts: Vec<_> = says.iter().cloned().chain(closes).collect();
            let ended = plays(&stage, &acts, SILENCE, "abandon");
            let seen = stage.seen();
            assert!(matches!(ended, Ended::Resumed(_)) && seen.to_all.is_empty(), "{acts:?}: {ended:?}");
            assert!(!seen.has_done("commit"), "{acts:?}: {:?}", seen.did);
        }
    }
}

/// A destination that has given up ends the streams, and says why on the first one.
#[test]
fn a_peer_that_ends_a_stream_is_asked_why() {
    let stage = Stage::new();
    let by_two = Offer { streams: 2, ..offer() };
    let acts = [word(Word::Accept), word(Word::Discarded)];
    let ended = plays_by(&stage, by_two, &acts, LIMIT, "abandon");
    assert!(matches!(&ended, Ended::Resumed(why) if why.contains("has given up")), "{ended:?}");
}

/// Generates acts that may come at any time.
fn acts() -> impl Strategy<Value = Vec<Act>> {
    let words = prop::sample::select(vec![
        Word::Accept,
        Word::Verified(OTHER),
        Word::Started,
        Word::Discarded,
        Word::Refuse,
        Word::Lost,
        Word::Unknown,
        Word::Offer,
        Word::Commit,
        Word::Cancel,
    ]);
    let announcements =
        prop::sample::select(vec![Word::Started, Word::Discarded, Word::Lost, Word::Unknown, Word::Commit]);
    let act = prop_oneof![
        6 => (words, prop::sample::select(vec![0, 1, 5000]))
            .prop_map(|(word, length)| Act::Say(word, length)),
        4 => Just(Act::SayVerified),
        3 => announcements.prop_map(Act::Announce),
        2 => prop::sample::select(vec!["resume", "abandon", "adopt"]).prop_map(Act::Type),
        1 => prop::sample::select(vec![1, 60, 400]).prop_map(Act::Wait),
        1 => Just(Act::Interrupt),
        1 => Just(Act::Round),
        1 => Just(Act::Pages),
        1 => Just(Act::Close),
    ];
    // An honest destination, with lies inserted and words left out.
    let lies = prop::collection::vec((0..=honest().len(), act), 0..5);
    let left_out = prop::option::weighted(0.4, 0..honest().len());
    (lies, left_out).prop_map(|(lies, left_out)| {
        let mut acts = Vec::new();
        for (at, act) in honest().into_iter().map(Some).chain([None]).enumerate() {
            acts.extend(lies.iter().filter(|(place, _)| *place == at).map(|(_, lie)| lie.clone()));
            acts.extend(act.filter(|_| left_out != Some(at)));
        }
        acts
    })
}

const DOES: [&str; 13] = [
    "scan",
    "begin the log",
    "collect the log",
    "hold back",
    "fence off",
    "hold still",
    "take the instant",
    "read",
    "end the instant",
    "commit",
    "tombstone Committed",
    "tombstone Cleared",
    "tombstone GivenUp",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// No words in any order, no failure here and no Ctrl-C at any time give a machine up.
    #[test]
    fn no_lie_gives_a_machine_up(
        acts in acts(),
        last in prop::sample::select(vec!["resume", "abandon"]),
        failing in prop::collection::vec(prop::sample::select(&DOES[..]), 0..2),
        interrupted_at in prop::option::weighted(0.2, prop::sample::select(&DOES[..])),
        is_there_all_the_same in any::<bool>(),
    ) {
        let stage = Stage::new();
        {
            let mut seen = stage.seen();
            seen.failing = failing.into_iter().map(str::to_owned).collect();
            seen.interrupted_at = interrupted_at.map(str::to_owned);
            seen.is_there_all_the_same = is_there_all_the_same;
        }
        plays(&stage, &acts, SILENCE, last);
    }

    /// A turned bit or a cut anywhere in an honest destination's words does not bring the source
    /// further than the intact words.
    #[test]
    fn no_damage_gives_a_machine_up(at in any::<prop::sample::Index>(), bit in 0..9_u8, of in 0..3_usize) {
        let mut acts = honest();
        // The positions of the accept, the verdict and the answer.
        let place = 1 + 2 * of;
        acts.insert(place, Act::Damage(at, bit));
        acts.insert(place + 2, Act::Close);
        let stage = Stage::new();
        let ended = plays(&stage, &acts, SILENCE, "resume");
        prop_assert!(matches!(ended, Ended::Resumed(_)), "{ended:?}");
        prop_assert_eq!(stage.seen().has_done("commit"), of == 2);
    }
}
