//! The mutants: rules broken on purpose, one at a time.

use super::world::message;
use crate::protocol::{
    Destination, Message, Source, Tombstone, Word,
    destination::{self, Phase},
    source::{self, Asked, Memory, State},
};

/// A broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// The source goes on when its commit gets no answer.
    ResumesInDoubt,
    /// The source takes "unknown" for a refusal.
    ResumesOnUnknown,
    /// The source goes on when the destination has lost the machine.
    ResumesOnLost,
    /// The source commits before the tombstone is on its disk.
    CommitsUnrecorded,
    /// The source commits as soon as everything is sent, and the destination starts without
    /// verification. Each alone is stopped by the other end.
    CommitsUnverified,
    /// The source goes on when the connection breaks after its commit.
    ResumesOnDisconnect,
    /// The source goes on while its disk may say that it has committed.
    ResumesUncleared,
    /// The source is given up as soon as it has committed.
    GivesUpOnCommit,
    /// The source waits on for a verdict after the connection is gone.
    WaitsBeforeVerdict,
    /// The source can be cancelled after the commit.
    CancelsTooLate,
    /// The source never reports that it is in doubt.
    NeverAsks,
    /// The source obeys messages about other attempts.
    SourceMixesAttempts,
    /// A restarted source does not read its tombstone.
    BootsWithoutLooking,
    /// The destination starts as soon as everything is verified.
    StartsVerified,
    /// The destination starts after a long silence of the source.
    StartsOnSilence,
    /// The destination starts before the verdict is on its disk.
    StartsUnrecorded,
    /// The destination accepts a cancellation when the arrival may have started.
    DiscardsStarted,
    /// The destination reports every page as right.
    VerifiesNothing,
    /// The destination accepts pages that were verified already.
    AcceptsPagesAlways,
    /// The destination accepts an attempt again that it has discarded.
    AcceptsAgain,
    /// The destination reports an unknown attempt as discarded.
    ClaimsToKnow,
    /// The destination keeps an arrival that its source has cancelled, and waits on.
    IgnoresCancel,
    /// The destination obeys messages about other attempts.
    DestinationMixesAttempts,
    /// The operator adopts because the source is silent.
    AdoptsWhenSilent,
}

/// All mutants, in the order of their declaration.
pub const ALL: [Mutant; 24] = {
    use Mutant::*;
    [
        ResumesInDoubt,
        ResumesOnUnknown,
        ResumesOnLost,
        CommitsUnrecorded,
        CommitsUnverified,
        ResumesOnDisconnect,
        ResumesUncleared,
        GivesUpOnCommit,
        WaitsBeforeVerdict,
        CancelsTooLate,
        NeverAsks,
        SourceMixesAttempts,
        BootsWithoutLooking,
        StartsVerified,
        StartsOnSilence,
        StartsUnrecorded,
        DiscardsStarted,
        VerifiesNothing,
        AcceptsPagesAlways,
        AcceptsAgain,
        ClaimsToKnow,
        IgnoresCancel,
        DestinationMixesAttempts,
        AdoptsWhenSilent,
    ]
};

impl Mutant {
    pub fn attempts(self) -> u8 {
        if matches!(self, Self::SourceMixesAttempts | Self::DestinationMixesAttempts) { 2 } else { 1 }
    }

    pub fn deaths(self) -> u8 {
        if self.attempts() == 2 { 0 } else { 2 }
    }

    pub fn records(self) -> bool {
        !matches!(self, Self::ResumesOnUnknown | Self::ClaimsToKnow)
    }

    /// Applies the mutant to a step of the source.
    pub fn source(
        self,
        before: &Source,
        event: source::Event,
        after: &mut Source,
        actions: &mut Vec<source::Action>,
    ) {
        use source::{Action, Decision, Event};
        let resume = |source: &mut Source| {
            let Source { attempt, .. } = *source;
            *source = Source { attempt, state: State::InDoubt(Memory::Kept, Asked::Yes) };
            source.on(Event::Operator(Decision::Resume))
        };
        let heard = match event {
            Event::Heard(message) if message.attempt == before.attempt => Some(message.word),
            _ => None,
        };
        let in_doubt = matches!(before.state, State::InDoubt(..));
        let commit = Action::Send(message(before.attempt, Word::Commit));
        match self {
            Self::ResumesInDoubt if in_doubt && event == Event::TimedOut => *actions = resume(after),
            Self::ResumesOnDisconnect if in_doubt && event == Event::Disconnected => {
                *actions = resume(after);
            }
            Self::CancelsTooLate if in_doubt && event == Event::Cancel => *actions = resume(after),
            Self::ResumesOnUnknown if in_doubt && heard == Some(Word::Unknown) => *actions = resume(after),
            Self::ResumesOnLost if in_doubt && heard == Some(Word::Lost) => *actions = resume(after),
            Self::CommitsUnrecorded if after.state == State::Recording => actions.push(commit),
            Self::CommitsUnverified
                if matches!(before.state, State::Stopping) && matches!(after.state, State::Asking(_)) =>
            {
                after.state = State::Recording;
                actions.push(Action::Record(Tombstone::Committed));
            }
            Self::ResumesUncleared if matches!(after.state, State::Withdrawing(_)) => {
                after.state = State::Resumed;
                actions.push(Action::Resume);
            }
            Self::GivesUpOnCommit if before.state == State::Recording && actions.contains(&commit) => {
                after.state = State::GivenUp;
            }
            Self::WaitsBeforeVerdict
                if matches!(before.state, State::Asking(_)) && event == Event::Disconnected =>
            {
                (*after, *actions) = (*before, Vec::new());
            }
            Self::NeverAsks => actions.retain(|action| !matches!(action, Action::Tell(_))),
            Self::SourceMixesAttempts => {
                if let Event::Heard(Message { attempt, word }) = event
                    && attempt != before.attempt
                {
                    *actions = after.on(Event::Heard(message(before.attempt, word)));
                }
            }
            _ => {}
        }
    }

    /// Applies the mutant to a step of the destination.
    pub fn destination(
        self,
        before: &Destination,
        event: destination::Event,
        after: &mut Destination,
        actions: &mut Vec<destination::Action>,
    ) {
        use destination::{Action, Decision, Event};
        let Event::Heard(Message { attempt, word }) = event else {
            return self.destination_alone(before, event, after, actions);
        };
        let of_another = before.arrival.is_none_or(|(arrival, _)| arrival != attempt);
        match self {
            Self::StartsUnrecorded if after.phase() == Some(Phase::Recording) => {
                after.arrival = Some((attempt, Phase::Starting));
                actions.push(Action::Start);
            }
            Self::DiscardsStarted if before.may_execute() && !of_another && word == Word::Cancel => {
                *actions = vec![Action::Send(message(attempt, Word::Discarded))];
            }
            Self::AcceptsAgain if before.arrival.is_none() && word == Word::Offer => {
                after.past.clear();
                *actions = after.on(event);
            }
            Self::ClaimsToKnow => {
                let unknown = Action::Send(message(attempt, Word::Unknown));
                let claim = Action::Send(message(attempt, Word::Discarded));
                actions.iter_mut().filter(|action| **action == unknown).for_each(|action| *action = claim);
            }
            Self::IgnoresCancel if !of_another && word == Word::Cancel => {
                *after = before.clone();
                *actions = vec![Action::Send(message(attempt, Word::Discarded))];
            }
            Self::DestinationMixesAttempts if of_another => {
                if let Some((arrival, _)) = before.arrival {
                    *after = before.clone();
                    *actions = after.on(Event::Heard(message(arrival, word)));
                }
            }
            Self::CommitsUnverified if !of_another && word == Word::Commit => {
                if let Some((_, Phase::Receiving | Phase::Verifying(_))) = before.arrival {
                    *after = before.clone();
                    after.arrival = Some((attempt, Phase::Starting));
                    *actions = vec![Action::Start];
                }
            }
            Self::StartsVerified if after.may_adopt() => {
                *actions = after.on(Event::Operator(Decision::Adopt));
            }
            _ => {}
        }
    }

    fn destination_alone(
        self,
        before: &Destination,
        event: destination::Event,
        after: &mut Destination,
        actions: &mut Vec<destination::Action>,
    ) {
        use destination::{Decision, Event};
        let adopt = Event::Operator(Decision::Adopt);
        match self {
            Self::StartsVerified if event == Event::Verified && after.may_adopt() => {
                actions.extend(after.on(adopt));
            }
            Self::StartsOnSilence if event == Event::TimedOut && before.may_adopt() => {
                *after = before.clone();
                *actions = after.on(adopt);
            }
            _ => {}
        }
    }
}
