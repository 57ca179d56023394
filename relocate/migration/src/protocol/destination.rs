//! The machine that takes another one in.

use std::{fmt, time::Duration};

use super::{Attempt, Digest, Message, Patience, Word, source::Asked};

/// What a destination has on its disk of each attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Taken in. As nothing starts without [`Verdict::Starting`], after a restart this is as good as discarded.
    Accepted,
    /// It is about to run, or has run.
    Starting,
    /// It has not run, and never will.
    Discarded,
}

/// How far an arrival is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Whether it can be held here is being looked at.
    Checking,
    /// It can; [`Verdict::Accepted`] is being written.
    Admitting,
    /// Pages come.
    Receiving,
    /// All have come, and are compared with this digest.
    Verifying(Digest),
    /// They are right. It waits for the verdict; the operator was told if the source has gone silent.
    Ready(Digest, Asked),
    /// It is to start; [`Verdict::Starting`] is being written.
    Recording,
    /// It is being started: from here on it may run.
    Starting,
    /// It runs.
    Running,
}

/// What an operator decides at a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Start it though nobody said so: the source has committed, and does not get through.
    Adopt,
    /// Throw it away.
    Discard,
}

/// What happens to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The connection to the source is gone.
    Disconnected,
    /// Something was said.
    Heard(Message),
    /// [`Destination::patience`] is over.
    TimedOut,
    /// What was offered can be held here.
    Fits,
    /// It cannot.
    DoesNotFit,
    /// All pages are there, and are those of the digest.
    Verified,
    /// They are not; or the stream was refused; or memory ran out.
    Failed,
    /// A verdict is safe on the disk, and with it all that were asked for before it.
    Recorded(Attempt, Verdict),
    /// It could not be written; it may be there all the same.
    RecordFailed(Attempt, Verdict),
    /// The arrival's first instruction has run.
    Arrived,
    /// It could not be started, and none of its instructions has run.
    StartFailed,
    /// The operator has decided.
    Operator(Decision),
}

/// What a destination has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Say it, if there is a connection.
    Send(Message),
    /// Find out whether what is offered can be held.
    Check,
    /// Write this on the disk.
    Record(Attempt, Verdict),
    /// Compare all that has come with the digest.
    Verify(Digest),
    /// Release what has come.
    Release,
    /// Start it.
    Start,
    /// Tell the operator.
    Tell(Advice),
}

/// What an operator has to be told at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Advice {
    /// An arrival is whole, and its source is gone.
    SourceSilent,
    /// It was started here, or may have been, before this machine was restarted.
    Lost,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SourceSilent => {
                "The arrival is whole, but its source has gone silent before it said what becomes of it. If the source \
                 comes back, it goes on by itself. Look at the source's console. If it says that it waits for this \
                 machine, or is off and its record on the disk says `committed`: keep it off or waiting, and type \
                 `adopt` here, which starts the machine. That the source is dead is not enough: it may have gone on \
                 before it died, and what is here is older than its disks then. `discard` throws the arrival away."
            }
            Self::Lost => {
                "A machine that had moved here was started, or may have been, and then this machine was restarted: it \
                 does not run here any more. If its source still waits, it says what can be done; otherwise start \
                 the machine again from its disks, as after a power cut."
            }
        })
    }
}

/// The destination's end: at most one arrival, and what became of those before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Destination {
    pub(super) arrival: Option<(Attempt, Phase)>,
    /// As on the disk. Of each attempt the last entry counts.
    pub(super) past: Vec<(Attempt, Verdict)>,
}

impl Destination {
    /// One that has the past which is on the disk, after a start of the receiver: what had arrived is gone.
    #[must_use]
    pub fn restart(past: &[(Attempt, Verdict)]) -> (Self, Vec<Action>) {
        let mut destination = Self::default();
        for (attempt, verdict) in past {
            destination.note(*attempt, *verdict);
        }
        let lost = destination.past.iter().any(|(_, verdict)| *verdict == Verdict::Starting);
        (destination, if lost { vec![Action::Tell(Advice::Lost)] } else { Vec::new() })
    }

    /// How far the arrival is.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        self.arrival.map(|(_, phase)| phase)
    }

    /// Whether pages are taken. Outside of it one that comes is a breach, and [`Event::Failed`].
    #[must_use]
    pub fn takes_pages(&self) -> bool {
        self.phase() == Some(Phase::Receiving)
    }

    /// Whether an operator may start it.
    #[must_use]
    pub fn may_adopt(&self) -> bool {
        matches!(self.phase(), Some(Phase::Ready(..)))
    }

    /// Whether an operator may throw it away.
    #[must_use]
    pub fn may_discard(&self) -> bool {
        !matches!(self.phase(), None | Some(Phase::Starting | Phase::Running))
    }

    /// Whether something of the arrival may run.
    #[must_use]
    pub fn may_execute(&self) -> bool {
        matches!(self.phase(), Some(Phase::Starting | Phase::Running))
    }

    /// After how long without anything heard it is to be told that time is up.
    #[must_use]
    pub fn patience(&self, patience: &Patience) -> Option<Duration> {
        match self.phase()? {
            Phase::Checking | Phase::Admitting | Phase::Receiving => Some(patience.running),
            // A source whose power is gone ends no connection: its operator is told soon.
            Phase::Verifying(_) | Phase::Recording | Phase::Ready(_, Asked::No) => Some(patience.frozen),
            Phase::Ready(_, Asked::Yes) => patience.hold,
            Phase::Starting | Phase::Running => None,
        }
    }

    /// Something happened.
    #[must_use]
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        match (event, self.arrival) {
            (Event::Heard(message), arrival) => match arrival {
                Some((attempt, phase)) if attempt == message.attempt => {
                    self.heard(attempt, phase, message.word)
                }
                _ => self.heard_of_another(message),
            },
            (_, None) => Vec::new(),
            (Event::Recorded(of, _) | Event::RecordFailed(of, _), Some((attempt, _))) if of != attempt => {
                Vec::new()
            }
            (Event::Operator(decision), Some((attempt, phase))) => self.decided(attempt, phase, decision),
            (_, Some((attempt, phase))) => self.happened(attempt, phase, event),
        }
    }

    fn heard(&mut self, attempt: Attempt, phase: Phase, word: Word) -> Vec<Action> {
        match (phase, word) {
            (Phase::Running, _) => vec![say(attempt, Word::Started)],
            (Phase::Starting, _) | (_, Word::Offer) => Vec::new(),
            (Phase::Receiving, Word::Final(digest)) => {
                self.enter(attempt, Phase::Verifying(digest), [Action::Verify(digest)])
            }
            (Phase::Ready(digest, _), Word::Final(again)) if again == digest => {
                vec![say(attempt, Word::Verified(digest))]
            }
            (Phase::Ready(..), Word::Commit) => self.record_start(attempt),
            (Phase::Recording, Word::Commit) | (Phase::Verifying(_), Word::Final(_)) => Vec::new(),
            // Cancelled; or said out of turn, and then whoever says it cannot be followed.
            _ => self.end(attempt, phase),
        }
    }

    fn heard_of_another(&mut self, Message { attempt, word }: Message) -> Vec<Action> {
        let verdict = self.past.iter().find(|(past, _)| *past == attempt).map(|(_, verdict)| *verdict);
        match (verdict, word) {
            (Some(Verdict::Starting), _) => vec![say(attempt, Word::Lost)],
            (Some(_), _) => vec![say(attempt, Word::Discarded)],
            (None, Word::Offer) if self.arrival.is_none() => {
                self.enter(attempt, Phase::Checking, [Action::Check])
            }
            (None, Word::Offer) => vec![say(attempt, Word::Refuse)],
            (None, _) => vec![say(attempt, Word::Unknown)],
        }
    }

    fn happened(&mut self, attempt: Attempt, phase: Phase, event: Event) -> Vec<Action> {
        match (phase, event) {
            (Phase::Running, _) => Vec::new(),
            (Phase::Starting, Event::Arrived) => {
                self.enter(attempt, Phase::Running, [say(attempt, Word::Started)])
            }
            (Phase::Starting, Event::StartFailed) => self.discard(attempt),
            (Phase::Starting, _) => Vec::new(),
            (Phase::Checking, Event::Fits) => {
                self.enter(attempt, Phase::Admitting, [Action::Record(attempt, Verdict::Accepted)])
            }
            (Phase::Admitting, Event::Recorded(_, Verdict::Accepted)) => {
                self.enter(attempt, Phase::Receiving, [say(attempt, Word::Accept)])
            }
            (Phase::Verifying(digest), Event::Verified) => {
                self.enter(attempt, Phase::Ready(digest, Asked::No), [say(attempt, Word::Verified(digest))])
            }
            (Phase::Recording, Event::Recorded(_, Verdict::Starting)) => {
                self.enter(attempt, Phase::Starting, [Action::Start])
            }
            (Phase::Ready(digest, Asked::No), Event::Disconnected | Event::TimedOut) => {
                self.enter(attempt, Phase::Ready(digest, Asked::Yes), [Action::Tell(Advice::SourceSilent)])
            }
            (Phase::Ready(..) | Phase::Recording, Event::Disconnected) => Vec::new(),
            (Phase::Checking, Event::DoesNotFit) => self.refuse(attempt),
            (Phase::Admitting, Event::RecordFailed(..)) => self.refuse(attempt),
            (Phase::Recording, Event::RecordFailed(..))
            | (_, Event::Disconnected | Event::TimedOut | Event::Failed) => self.end(attempt, phase),
            _ => Vec::new(),
        }
    }

    fn decided(&mut self, attempt: Attempt, phase: Phase, decision: Decision) -> Vec<Action> {
        match (phase, decision) {
            (Phase::Ready(..), Decision::Adopt) => self.record_start(attempt),
            (_, Decision::Discard) if self.may_discard() => self.end(attempt, phase),
            _ => Vec::new(),
        }
    }

    fn record_start(&mut self, attempt: Attempt) -> Vec<Action> {
        self.enter(attempt, Phase::Recording, [Action::Record(attempt, Verdict::Starting)])
    }

    /// Ends an arrival that nothing of has run.
    fn end(&mut self, attempt: Attempt, phase: Phase) -> Vec<Action> {
        match phase {
            Phase::Checking | Phase::Admitting => self.refuse(attempt),
            _ => self.discard(attempt),
        }
    }

    /// Not taken in. That is no promise: without a record the same offer could be taken in after a restart.
    fn refuse(&mut self, attempt: Attempt) -> Vec<Action> {
        self.arrival = None;
        vec![Action::Release, say(attempt, Word::Refuse)]
    }

    /// From here on the answer to whatever is said of this attempt is that it never runs here. That it was accepted is on
    /// the disk, so this holds after a restart as well.
    fn discard(&mut self, attempt: Attempt) -> Vec<Action> {
        self.arrival = None;
        self.note(attempt, Verdict::Discarded);
        vec![Action::Release, Action::Record(attempt, Verdict::Discarded), say(attempt, Word::Discarded)]
    }

    fn note(&mut self, attempt: Attempt, verdict: Verdict) {
        self.past.retain(|(past, _)| *past != attempt);
        self.past.push((attempt, verdict));
    }

    fn enter<const N: usize>(&mut self, attempt: Attempt, phase: Phase, actions: [Action; N]) -> Vec<Action> {
        self.arrival = Some((attempt, phase));
        actions.into()
    }
}

fn say(attempt: Attempt, word: Word) -> Action {
    Action::Send(Message { attempt, word })
}
