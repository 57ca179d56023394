//! The other end may lie to a source, too: what of its lies gets through a connection to the state machine, and what that does then.
//! The connection is the one that a move has; the machine is none: whether it stands still, was committed or given up is noted.

use super::link::Link;
use mercury_migration::{
    protocol::{
        Attempt, Digest, Mark, Source, Word,
        source::{Action, Event, State},
    },
    session::Receiver,
    wire::{PAGE, Pages, Writer},
};
use proptest::prelude::*;
use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

/// How long the other end may be silent here.
const SILENCE: Duration = Duration::from_millis(150);
const LIMIT: Duration = Duration::from_secs(60);
const OURS: Attempt = Attempt([1; 16]);
const DIGEST: Digest = Digest([7; 32]);

/// What the source has come to.
#[derive(Debug, Default)]
struct Seen {
    heard: Vec<Word>,
    frozen: bool,
    committed: bool,
    given_up: bool,
}

/// A source to which these bytes are said, in a session.
fn told(bytes: &[u8], closes: bool) -> (State, Seen) {
    told_to(SILENCE, bytes, closes)
}

/// To one that waits for so long.
fn told_to(patience: Duration, bytes: &[u8], closes: bool) -> (State, Seen) {
    let (receiver, line) = Receiver::new(LIMIT).expect("a receiver");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let to = listener.local_addr().expect("its address");
    thread::scope(|scope| {
        scope.spawn(move || {
            let (socket, _) = listener.accept().expect("a source");
            socket.set_read_timeout(Some(LIMIT)).expect("set");
            let mut session = receiver.accept(socket).expect("it has the line");
            // It may have heard enough before the end.
            let _ = session.write_all(bytes).and_then(|()| session.flush());
            if !closes {
                let _ = session.read_to_end(&mut Vec::new());
            }
        });
        let mut link = Link::connect(to, &line, LIMIT).expect("taken");
        link.be_patient(patience);
        link.begin(OURS).expect("begun");
        moves(link, patience)
    })
}

/// As `mover.rs` does it.
fn moves(link: Link, patience: Duration) -> (State, Seen) {
    let (mut source, begin) = Source::begin(OURS);
    let (mut todo, mut link, mut seen) = (VecDeque::from(begin), Some(link), Seen::default());
    loop {
        while let Some(action) = todo.pop_front() {
            if let Some(event) = perform(action, &mut link, &mut seen) {
                todo.extend(source.on(event));
            }
        }
        if matches!(source.state(), State::Resumed | State::GivenUp) {
            return (source.state(), seen);
        }
        let since = Instant::now();
        let event = loop {
            match link.as_mut().map(|link| link.hear_message(Duration::from_millis(5))) {
                Some(Ok(Some((message, _)))) => {
                    seen.heard.push(message.word);
                    break Event::Heard(message);
                }
                Some(Err(_)) => {
                    link = None;
                    break Event::Disconnected;
                }
                // There is nobody that it could be heard from any more, and no operator.
                None => return (source.state(), seen),
                Some(Ok(None)) if since.elapsed() > patience => {
                    if source.may_decide() {
                        return (source.state(), seen);
                    }
                    break Event::TimedOut;
                }
                Some(Ok(None)) => {}
            }
        };
        todo.extend(source.on(event));
    }
}

fn perform(action: Action, link: &mut Option<Link>, seen: &mut Seen) -> Option<Event> {
    match action {
        Action::Send(message) => {
            let said = link.as_mut()?.say(message.word, b"");
            if said.is_err() {
                *link = None;
                return Some(Event::Disconnected);
            }
            None
        }
        Action::CopyRounds => Some(Event::StopNow),
        Action::StopAndCopy => {
            seen.frozen = true;
            Some(Event::Streamed(DIGEST))
        }
        Action::Record(mark) => {
            seen.committed |= mark == Mark::Committed;
            Some(Event::Recorded(OURS, mark))
        }
        Action::Resume => {
            seen.frozen = false;
            None
        }
        Action::GiveUp => {
            seen.given_up = true;
            None
        }
        Action::Connect | Action::Boot | Action::Tell(_) => None,
    }
}

/// It has committed only on the right digest, and is given up only when it was told that it runs there, after that.
fn judge((state, seen): &(State, Seen)) -> Result<(), TestCaseError> {
    let at = |word| seen.heard.iter().position(|heard| *heard == word);
    let verified = at(Word::Verified(DIGEST));
    prop_assert!(!seen.committed || verified.is_some(), "{state:?} {seen:?}");
    let started = seen.heard.iter().rposition(|heard| *heard == Word::Started);
    prop_assert!(!seen.given_up || seen.committed && started > verified, "{state:?} {seen:?}");
    match state {
        State::Resumed => prop_assert!(!seen.frozen && !seen.given_up, "{seen:?}"),
        State::GivenUp => prop_assert!(seen.given_up, "{seen:?}"),
        _ => prop_assert!(seen.committed, "{state:?} {seen:?}"),
    }
    Ok(())
}

/// What a destination says.
#[derive(Clone, Debug)]
enum Says {
    Word(Word, usize),
    Round,
    Pages,
}

fn stream(attempt: Attempt, says: &[Says]) -> Vec<u8> {
    let mut writer = Writer::begin(Vec::new(), attempt, 0).expect("begun");
    for say in says {
        match say {
            Says::Word(word, length) => writer.say(*word, &vec![0xff; *length]).expect("said"),
            Says::Round => writer.round(0).expect("begun"),
            Says::Pages => {
                let mut pages = Pages::default();
                pages.add(0x1000, &[1; PAGE]);
                writer.pages(&pages.pack(1).expect("packed")).expect("sent");
            }
        }
    }
    writer.into_inner()
}

fn word(word: Word) -> Says {
    Says::Word(word, 0)
}

fn honest() -> Vec<Says> {
    [Word::Accept, Word::Verified(DIGEST), Word::Started].map(word).into()
}

/// The others would prove nothing if it could not move.
#[test]
fn an_honest_destination_is_believed() {
    let moved = told_to(LIMIT, &stream(OURS, &honest()), false);
    assert_eq!(moved.0, State::GivenUp);
    judge(&moved).expect("as it should be");
}

/// Words that are true of nothing yet, of another attempt, or with texts that are none.
#[test]
fn lies_before_the_commit_leave_it_running() {
    let other = Digest([8; 32]);
    for says in [
        vec![word(Word::Started)],
        vec![word(Word::Verified(DIGEST)), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Verified(other)), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Discarded), word(Word::Started)],
        vec![word(Word::Accept), word(Word::Unknown)],
        vec![Says::Word(Word::Refuse, 1 << 20)],
        vec![word(Word::Offer), word(Word::Commit)],
        vec![Says::Pages, Says::Round, Says::Pages],
    ] {
        for closes in [false, true] {
            let (state, seen) = told(&stream(OURS, &says), closes);
            assert!(
                state == State::Resumed && !seen.frozen && !seen.committed,
                "{says:?}: {state:?} {seen:?}"
            );
        }
    }
    let (state, seen) = told(&stream(Attempt([2; 16]), &honest()), false);
    assert!(state == State::Resumed && seen.heard.is_empty(), "{state:?} {seen:?}");
    for nonsense in [&b""[..], b"HTTP/1.1 200 OK\r\n\r\n", &[0xff; 4096]] {
        let (state, seen) = told(nonsense, false);
        assert!(state == State::Resumed && !seen.frozen, "{state:?} {seen:?}");
    }
}

fn says() -> impl Strategy<Value = Vec<Says>> {
    let words = prop::sample::select(vec![
        Word::Accept,
        Word::Accept,
        Word::Verified(DIGEST),
        Word::Verified(DIGEST),
        Word::Verified(Digest([8; 32])),
        Word::Started,
        Word::Started,
        Word::Discarded,
        Word::Refuse,
        Word::Lost,
        Word::Unknown,
        Word::Offer,
        Word::Commit,
        Word::Cancel,
    ]);
    let say = prop_oneof![
        8 => (words, prop::sample::select(vec![0, 1, 5000])).prop_map(|(word, length)| Says::Word(word, length)),
        1 => Just(Says::Round),
        1 => Just(Says::Pages),
    ];
    prop::collection::vec(say, 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is said, in whatever order.
    #[test]
    fn no_lie_gives_a_machine_up(says in says(), closes in any::<bool>()) {
        judge(&told(&stream(OURS, &says), closes))?;
    }

    /// Wherever a bit of what an honest destination says is turned, or it is cut, the source does not go further than what was whole.
    #[test]
    fn no_damage_gives_a_machine_up(at in any::<prop::sample::Index>(), bit in 0..9_u8) {
        let mut bytes = stream(OURS, &honest());
        let at = at.index(bytes.len());
        if bit == 8 { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
        let moved = told(&bytes, true);
        judge(&moved)?;
        prop_assert!(!moved.1.given_up, "{moved:?}");
    }
}
