//! The destination's state machine: the end that receives a machine.

use std::{fmt, time::Duration};

use super::{Attempt, Digest, Message, Patience, Word, source::Asked};

/// The destination's record of an attempt, on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The attempt was accepted. Nothing starts without [`Verdict::Starting`], so after a restart
    /// this equals "discarded".
    Accepted,
    /// The arrival is about to run, or has run.
    Starting,
    /// The arrival has not run, and never will.
    Discarded,
}

/// The progress of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The destination checks if it can hold the machine.
    Checking,
    /// It can, and [`Verdict::Accepted`] is being written.
    Admitting,
    /// Pages arrive.
    Receiving,
    /// All pages have arrived, and are compared with this digest.
    Verifying(Digest),
    /// All pages are right. The arrival waits for the verdict. `Asked`: the operator was told that
    /// the source is silent.
    Ready(Digest, Asked),
    /// The arrival is to start, and [`Verdict::Starting`] is being written.
    Recording,
    /// The arrival is being started. From here on it may run.
    Starting,
    /// The arrival runs.
    Running,
}

/// The operator's decision at a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Start the arrival without a commit: the source has committed, and its message does not
    /// arrive.
    Adopt,
    /// Discard the arrival.
    Discard,
}

/// An event at a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The connection to the source is gone.
    Disconnected,
    /// A message has arrived.
    Heard(Message),
    /// [`Destination::patience`] has passed without a message.
    TimedOut,
    /// The offered machine can be held here.
    Fits,
    /// The offered machine cannot be held here.
    DoesNotFit,
    /// All pages are here, and have the digest.
    Verified,
    /// A page is missing or wrong, the stream was refused, or memory ran out.
    Failed,
    /// A verdict is safe on the disk, and with it all earlier ones.
    Recorded(Attempt, Verdict),
    /// A verdict could not be written. It may be on the disk all the same.
    RecordFailed(Attempt, Verdict),
    /// The arrival's first instruction has run.
    Arrived,
    /// The arrival could not be started, and none of its instructions has run.
    StartFailed,
    /// The operator has decided.
    Operator(Decision),
}

/// An action that the destination has to carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message, if there is a connection.
    Send(Message),
    /// Check if the offered machine can be held.
    Check,
    /// Write this verdict on the disk.
    Record(Attempt, Verdict),
    /// Compare all pages with the digest.
    Verify(Digest),
    /// Release the memory of the arrival.
    Release,
    /// Start the arrival.
    Start,
    /// Tell the operator.
    Tell(Advice),
}

/// Advice for the operator at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Advice {
    /// An arrival is whole, and its source is silent.
    SourceSilent,
    /// The arrival was started here, or may have been, before this machine was restarted.
    Lost,
}

impl Advice {
    /// Returns the text for a source that is a guest of a host in use. It has no tombstone.
    #[must_use]
    pub fn about_guest(self) -> String {
        match self {
            Self::SourceSilent => {
                "The arrival is complete, but its source, a guest of another host, has gone silent before it \
                 said if the arrival is to start. If the source comes back, the move goes on by itself. A guest \
                 leaves no tombstone, so look on its host. If the guest waits there for this machine, as its \
                 console or `mercury guests migrate` says, type `adopt` here, and then `mercury guests abandon` \
                 there. If it runs there, type `discard` here. If its host is dead, nothing says if the guest \
                 had gone on before: adopt only if nobody outside has heard of the machine since it stopped. \
                 Otherwise the arrival is older than what its clients know."
                    .into()
            }
            Self::Lost => self.to_string(),
        }
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SourceSilent => {
                "The arrival is complete, but its source has gone silent before it said if the arrival is \
                 to start. If the source comes back, the move goes on by itself. Look at the source's \
                 console. If it says that it waits for this machine, or is off and its tombstone says \
                 `committed`: keep it off or waiting, and type `adopt` here, which starts the machine. It \
                 is not enough that the source is dead: it may have gone on before it died, and then the \
                 arrival is older than its disks. `discard` discards the arrival."
            }
            Self::Lost => {
                "A machine that had moved here was started, or may have been, and then this machine was \
                 restarted: it does not run here any more. If its source still waits, its console says \
                 what can be done. Otherwise start the machine again from its disks, as after a power \
                 cut."
            }
        })
    }
}

/// The destination's state: at most one arrival, and the verdicts on earlier attempts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Destination {
    pub(super) arrival: Option<(Attempt, Phase)>,
    /// Verdicts as on the disk. The last entry of each attempt counts.
    pub(super) past: Vec<(Attempt, Verdict)>,
}

impl Destination {
    /// Returns the state after a start of the receiver, with the verdicts on its disk. The memory
    /// of an arrival is gone.
    #[must_use]
    pub fn restart(past: &[(Attempt, Verdict)]) -> (Self, Vec<Action>) {
        let mut destination = Self::default();
        for (attempt, verdict) in past {
            destination.note(*attempt, *verdict);
        }
        let lost = destination.past.iter().any(|(_, verdict)| *verdict == Verdict::Starting);
        (destination, if lost { vec![Action::Tell(Advice::Lost)] } else { Vec::new() })
    }

    /// Returns the arrival's progress, if there is an arrival.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        self.arrival.map(|(_, phase)| phase)
    }

    /// Returns the attempt of the machine that arrives, if one does.
    #[must_use]
    pub fn attempt(&self) -> Option<Attempt> {
        self.arrival.map(|(attempt, _)| attempt)
    }

    /// Returns true if pages may arrive. At any other time a page is a breach, and
    /// [`Event::Failed`].
    #[must_use]
    pub fn accepts_pages(&self) -> bool {
        self.phase() == Some(Phase::Receiving)
    }

    /// Returns true if the operator may start the arrival.
    #[must_use]
    pub fn may_adopt(&self) -> bool {
        matches!(self.phase(), Some(Phase::Ready(..)))
    }

    /// Returns true if the operator may discard the arrival.
    #[must_use]
    pub fn may_discard(&self) -> bool {
        !matches!(self.phase(), None | Some(Phase::Starting | Phase::Running))
    }

    /// Returns true if an instruction of the arrival may run.
    #[must_use]
    pub fn may_execute(&self) -> bool {
        matches!(self.phase(), Some(Phase::Starting | Phase::Running))
    }

    /// Returns the silence after which the caller reports [`Event::TimedOut`].
    #[must_use]
    pub fn patience(&self, patience: &Patience) -> Option<Duration> {
        match self.phase()? {
            Phase::Checking | Phase::Admitting | Phase::Receiving => Some(patience.running),
            // A source without power ends no connection. Its operator is told soon.
            Phase::Verifying(_) | Phase::Recording | Phase::Ready(_, Asked::No) => Some(patience.frozen),
            Phase::Ready(_, Asked::Yes) => patience.hold,
            Phase::Starting | Phase::Running => None,
        }
    }

    /// Handles an event, and returns the actions that follow.
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
            // The source cancelled, or spoke out of turn. A source out of turn cannot be followed.
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

    /// Ends an arrival of which no instruction has run.
    fn end(&mut self, attempt: Attempt, phase: Phase) -> Vec<Action> {
        match phase {
            Phase::Checking | Phase::Admitting => self.refuse(attempt),
            _ => self.discard(attempt),
        }
    }

    /// Refuses an offer. A refusal promises nothing: without a record the same offer could be
    /// accepted after a restart.
    fn refuse(&mut self, attempt: Attempt) -> Vec<Action> {
        self.arrival = None;
        vec![Action::Release, say(attempt, Word::Refuse)]
    }

    /// Discards an arrival. From here on the answer to every message of this attempt is that it
    /// never runs here. The disk says that the attempt was accepted, so the answer holds after a
    /// restart as well.
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
