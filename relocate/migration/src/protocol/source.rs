//! The source's state machine: the end that moves.

use std::{fmt, time::Duration};

use super::{Attempt, Digest, Message, Patience, Word};

/// The source's tombstone of an attempt, on its disk. It is read before any part of a restarted
/// machine acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tombstone {
    /// The destination may be told, or has been told, to start.
    Committed,
    /// The machine runs elsewhere, for good.
    GivenUp,
    /// Neither of the above holds.
    Cleared,
}

/// The place of the frozen machine after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The machine is still in memory: only the sender was started again.
    Kept,
    /// The machine is gone with the power. Only a system that boots from the disks can go on here.
    Gone,
}

/// The state of a request to the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asked {
    /// The operator was not asked yet.
    No,
    /// The operator was asked for help.
    Yes,
}

/// The state of an attempt at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The offer was sent; applications run.
    Offering,
    /// Rounds of pages are sent; applications run.
    Copying,
    /// The machine is quiesced, its instant has passed, and the last pages are sent.
    Stopping,
    /// Everything was sent, and the destination verifies it.
    Asking(Digest),
    /// The destination has verified. [`Tombstone::Committed`] is being written; `Commit` was not sent.
    Recording,
    /// The attempt is called off. `Committed` may be on the disk, and has to come off it.
    Withdrawing(Asked),
    /// `Commit` was sent, or may have been. The source does not know if the destination has
    /// started.
    InDoubt(Memory, Asked),
    /// Applications run at the source again.
    Resumed,
    /// The machine runs elsewhere. Nothing at the source acts any more.
    GivenUp,
}

/// The part of the source that may act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Applications {
    /// All applications run.
    Run,
    /// Only the sender runs: applications are frozen, file systems quiet, and the network is open
    /// to the destination alone.
    Frozen,
    /// Nothing runs, and nothing ever will again.
    GivenUp,
}

/// The operator's decision at a source that cannot know the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Go on here: nothing runs at the destination, and nothing will.
    Resume,
    /// Give this machine up: it runs at the destination.
    Abandon,
}

/// An event at a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A connection to the destination exists (again), authenticated in both directions.
    Connected,
    /// The connection is gone.
    Disconnected,
    /// A message has arrived.
    Heard(Message),
    /// [`Source::patience`] has passed without a message.
    TimedOut,
    /// The policy of rounds decides to stop the machine and copy the remaining pages.
    StopNow,
    /// The machine was quiesced, and all pages of its instant were sent.
    Streamed(Digest),
    /// The source failed: a page was not readable, the dirty log was lost, or the machine could not
    /// be quiesced.
    Failed,
    /// A tombstone is safe on the disk, and with it all earlier ones.
    Recorded(Attempt, Tombstone),
    /// A tombstone could not be written. It may be on the disk all the same.
    RecordFailed(Attempt, Tombstone),
    /// The operator cancels the move (Ctrl-C).
    Cancel,
    /// The operator has decided.
    Operator(Decision),
}

/// An action that the source has to carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message, if there is a connection.
    Send(Message),
    /// Send pages, round by round.
    CopyRounds,
    /// Freeze, close the fence, take the instant, and send the missing pages.
    StopAndCopy,
    /// Write this tombstone on the disk, with the attempt.
    Record(Tombstone),
    /// Connect to the destination, until a connection exists.
    Connect,
    /// Thaw, take the fence away, end the snapshot: as if no move had been tried.
    Resume,
    /// Boot from the disks: the frozen machine is gone, and nothing of it runs elsewhere.
    Boot,
    /// Let go of the machine: power off, and release its memory.
    GiveUp,
    /// Tell the operator.
    Tell(Advice),
}

/// Advice for the operator at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Advice {
    /// The destination was told to start, and does not answer.
    NoAnswer,
    /// The destination has started the machine, or may have, and has lost it.
    DestinationLostIt,
    /// The destination does not know the attempt.
    DestinationForgot,
    /// The tombstone cannot be taken off the disk, and the destination does not answer.
    MarkStays,
    /// The cancellation comes too late.
    TooLate,
    /// The destination says that it has started a machine without a commit.
    StartedUnasked,
    /// The machine of this source runs elsewhere.
    Moved,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoAnswer => {
                "The destination was told to start this machine and does not answer. Nothing runs here. \
                 This end keeps asking, and goes on by itself as soon as an answer comes. If no answer \
                 can come, look at the destination's console. If the machine runs there, type `abandon` \
                 here. If it does not, make sure that it never will: type `discard` there, and wait until \
                 the console says that the machine was discarded; or switch that machine off. Only then \
                 type `resume` here. The machine may have run there for a while: if so, first look at what \
                 its clients and disks have seen, because `resume` goes on from the instant of the move."
            }
            Self::DestinationLostIt => {
                "The destination started this machine, or may have, and was then restarted. Nothing runs \
                 here. `resume` goes on from the instant of the move: everything that the machine did at \
                 the destination since is undone here, but not for its peers. First look at what its \
                 clients and disks have seen. `abandon` gives this machine up."
            }
            Self::DestinationForgot => {
                "The destination knows nothing of this move. It was restarted without its records, or it \
                 is another machine. Nothing runs here. Make sure that the machine does not run there, \
                 then type `resume` here. If it does run there, type `abandon`."
            }
            Self::MarkStays => {
                "The move was called off before the destination was told to start, but this machine's \
                 tombstone cannot be cleared, and the destination does not answer. Nothing runs here. \
                 Repair the disk that holds the tombstone, or the connection. Or make sure that the \
                 destination has discarded the arrival: type `discard` there, and wait until the console \
                 says that the machine was discarded; or switch it off. Only then type `resume` here."
            }
            Self::TooLate => "It is too late to cancel: the destination may have started.",
            Self::StartedUnasked => {
                "The destination says that it runs this machine, although this machine never told it to. \
                 This machine goes on. Switch the destination off before anything else."
            }
            Self::Moved => {
                "The machine that was here has moved, and runs at the destination. Do not start its \
                 system here."
            }
        })
    }
}

/// The source's state in one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    pub(super) attempt: Attempt,
    pub(super) state: State,
}

impl Source {
    /// Begins an attempt on an existing connection. The name must never have been used.
    #[must_use]
    pub fn begin(attempt: Attempt) -> (Self, Vec<Action>) {
        let source = Self { attempt, state: State::Offering };
        (source, vec![source.say(Word::Offer)])
    }

    /// Returns the state of an attempt after a restart of the sender or of the whole machine, by
    /// the tombstone on the disk.
    #[must_use]
    pub fn restart(attempt: Attempt, tombstone: Tombstone, memory: Memory) -> (Self, Vec<Action>) {
        let (state, action) = match (tombstone, memory) {
            (Tombstone::Cleared, memory) => (State::Resumed, go_on(memory)),
            (Tombstone::Committed, Memory::Kept) => (State::InDoubt(memory, Asked::No), Action::Connect),
            // An operator who switches a machine on looks at its screen, and is told there why it
            // does not boot.
            (Tombstone::Committed, Memory::Gone) => (State::InDoubt(memory, Asked::Yes), Action::Connect),
            (Tombstone::GivenUp, _) => (State::GivenUp, Action::Tell(Advice::Moved)),
        };
        let source = Self { attempt, state };
        let told =
            (state == State::InDoubt(Memory::Gone, Asked::Yes)).then_some(Action::Tell(Advice::NoAnswer));
        // The other end may have all of it, and wait for the verdict.
        let is_over = state == State::Resumed && memory == Memory::Kept;
        let cancel = is_over.then_some(source.say(Word::Cancel));
        (source, told.into_iter().chain([action]).chain(cancel).collect())
    }

    /// Returns the state of the attempt.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the part of the source that may act.
    #[must_use]
    pub fn applications(&self) -> Applications {
        match self.state {
            State::Offering | State::Copying | State::Resumed => Applications::Run,
            State::Stopping
            | State::Asking(_)
            | State::Recording
            | State::Withdrawing(_)
            | State::InDoubt(..) => Applications::Frozen,
            State::GivenUp => Applications::GivenUp,
        }
    }

    /// Returns true if Ctrl-C still stops the move.
    #[must_use]
    pub fn may_cancel(&self) -> bool {
        self.is_before_verdict() || self.state == State::Recording
    }

    /// Returns true if the operator may decide, because this end cannot.
    #[must_use]
    pub fn may_decide(&self) -> bool {
        matches!(self.state, State::Withdrawing(_) | State::InDoubt(..))
    }

    /// Returns the silence after which the caller reports [`Event::TimedOut`].
    #[must_use]
    pub fn patience(&self, patience: &Patience) -> Option<Duration> {
        match self.state {
            State::Offering | State::Copying => Some(patience.running),
            State::Stopping | State::Asking(_) | State::Recording => Some(patience.frozen),
            State::Withdrawing(_) | State::InDoubt(..) => Some(patience.doubt),
            State::Resumed | State::GivenUp => None,
        }
    }

    /// Handles an event, and returns the actions that follow.
    #[must_use]
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Heard(Message { attempt, .. })
            | Event::Recorded(attempt, _)
            | Event::RecordFailed(attempt, _)
                if attempt != self.attempt =>
            {
                Vec::new()
            }
            _ if self.is_before_verdict() => self.before_verdict(event),
            _ => match self.state {
                State::Recording => self.recording(event),
                State::Withdrawing(asked) => self.withdrawing(event, asked),
                State::InDoubt(memory, asked) => self.in_doubt(event, memory, asked),
                _ => Vec::new(),
            },
        }
    }

    fn is_before_verdict(&self) -> bool {
        matches!(self.state, State::Offering | State::Copying | State::Stopping | State::Asking(_))
    }

    fn say(&self, word: Word) -> Action {
        Action::Send(Message { attempt: self.attempt, word })
    }

    fn before_verdict(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Copying, Event::StopNow) => self.enter(State::Stopping, [Action::StopAndCopy]),
            (State::Stopping, Event::Streamed(digest)) => {
                let last = self.say(Word::Final(digest));
                self.enter(State::Asking(digest), [last])
            }
            (_, Event::Heard(message)) => self.heard_before_verdict(message.word),
            (_, Event::Disconnected | Event::TimedOut | Event::Failed | Event::Cancel) => self.call_off(),
            _ => Vec::new(),
        }
    }

    fn heard_before_verdict(&mut self, word: Word) -> Vec<Action> {
        match (self.state, word) {
            (State::Offering, Word::Accept) => self.enter(State::Copying, [Action::CopyRounds]),
            (State::Asking(sent), Word::Verified(found)) if sent == found => {
                self.enter(State::Recording, [Action::Record(Tombstone::Committed)])
            }
            // The message came twice, by a connection that repeats.
            (_, Word::Accept) => Vec::new(),
            (_, Word::Started) => {
                let mut actions = self.call_off();
                actions.push(Action::Tell(Advice::StartedUnasked));
                actions
            }
            _ => self.call_off(),
        }
    }

    /// Calls the attempt off. Nothing is on the disk and nothing was committed: as if no move had
    /// been tried.
    fn call_off(&mut self) -> Vec<Action> {
        let cancel = self.say(Word::Cancel);
        self.enter(State::Resumed, [Action::Resume, cancel])
    }

    fn recording(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Recorded(_, Tombstone::Committed) => {
                let commit = self.say(Word::Commit);
                self.enter(State::InDoubt(Memory::Kept, Asked::No), [commit])
            }
            Event::Heard(Message { word: Word::Discarded, .. }) => self.go_on(Memory::Kept),
            Event::RecordFailed(..)
            | Event::TimedOut
            | Event::Disconnected
            | Event::Failed
            | Event::Cancel => {
                let cancel = self.say(Word::Cancel);
                self.enter(State::Withdrawing(Asked::No), [Action::Record(Tombstone::Cleared), cancel])
            }
            _ => Vec::new(),
        }
    }

    /// Waits until `Committed` is off the disk. Until then the machine must not go on if the
    /// arrival may be whole: after a power failure a restarted source would commit to a machine
    /// that has moved on.
    fn withdrawing(&mut self, event: Event, asked: Asked) -> Vec<Action> {
        let cancel = self.say(Word::Cancel);
        match event {
            Event::Recorded(_, Tombstone::Cleared) => self.enter(State::Resumed, [Action::Resume]),
            Event::Heard(Message { word: Word::Discarded, .. }) => self.go_on(Memory::Kept),
            Event::Operator(Decision::Resume) => self.go_on(Memory::Kept),
            Event::Connected => vec![cancel],
            Event::Disconnected => vec![Action::Connect],
            Event::TimedOut | Event::RecordFailed(_, Tombstone::Cleared) => {
                let again = [Action::Record(Tombstone::Cleared), cancel];
                let mut actions = self.enter(State::Withdrawing(Asked::Yes), again);
                if asked == Asked::No {
                    actions.push(Action::Tell(Advice::MarkStays));
                }
                actions
            }
            _ => Vec::new(),
        }
    }

    fn in_doubt(&mut self, event: Event, memory: Memory, asked: Asked) -> Vec<Action> {
        let commit = self.say(Word::Commit);
        match event {
            Event::Connected => vec![commit],
            Event::Disconnected => vec![Action::Connect],
            Event::Heard(message) => self.heard_in_doubt(message.word, memory, asked),
            Event::TimedOut => {
                let mut actions = self.ask(memory, asked, Advice::NoAnswer);
                actions.push(commit);
                actions
            }
            Event::Cancel => vec![Action::Tell(Advice::TooLate)],
            Event::Operator(Decision::Resume) => self.go_on(memory),
            Event::Operator(Decision::Abandon) => self.give_up(),
            _ => Vec::new(),
        }
    }

    fn heard_in_doubt(&mut self, word: Word, memory: Memory, asked: Asked) -> Vec<Action> {
        match word {
            Word::Started => self.give_up(),
            Word::Discarded => self.go_on(memory),
            Word::Lost => self.ask(memory, asked, Advice::DestinationLostIt),
            Word::Unknown => self.ask(memory, asked, Advice::DestinationForgot),
            _ => Vec::new(),
        }
    }

    /// Asks the operator. That no answer comes is reported once; an answer is reported whenever it
    /// comes.
    fn ask(&mut self, memory: Memory, asked: Asked, advice: Advice) -> Vec<Action> {
        let is_news = asked == Asked::No || advice != Advice::NoAnswer;
        let actions = self.enter(State::InDoubt(memory, Asked::Yes), []);
        actions.into_iter().chain(is_news.then_some(Action::Tell(advice))).collect()
    }

    /// Lets the source go on: the destination will never start the arrival.
    fn go_on(&mut self, memory: Memory) -> Vec<Action> {
        self.enter(State::Resumed, [Action::Record(Tombstone::Cleared), go_on(memory)])
    }

    fn give_up(&mut self) -> Vec<Action> {
        self.enter(State::GivenUp, [Action::Record(Tombstone::GivenUp), Action::GiveUp])
    }

    fn enter<const N: usize>(&mut self, state: State, actions: [Action; N]) -> Vec<Action> {
        self.state = state;
        actions.into()
    }
}

fn go_on(memory: Memory) -> Action {
    match memory {
        Memory::Kept => Action::Resume,
        Memory::Gone => Action::Boot,
    }
}
