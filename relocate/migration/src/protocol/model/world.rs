//! The world of the model: both machines, their disks, and all possible events.

use super::{
    mutants::Mutant,
    network::{Network, Packet, attempt, digest},
};
use crate::protocol::{
    Attempt, Destination, Message, Source, Tombstone, Verdict, Word,
    destination::{self, Phase},
    source::{self, Applications, Memory, State},
};

/// The extent of an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    pub attempts: u8,
    pub deaths: u8,
    /// True if the destination has records that survive it.
    pub records: bool,
    /// True if disks fail, and rounds are sent before the last one.
    pub rough: bool,
}

/// The power state of the source's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Power {
    On,
    /// The sending process is dead, and the machine is on.
    NoSender,
    Off,
    /// An operator keeps the machine off.
    KeptOff,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceHost {
    pub machine: Source,
    pub power: Power,
    pub disk: Option<(Attempt, Tombstone)>,
    pub pending: Vec<(Attempt, Tombstone)>,
    /// Content of memory, as a time: it changes whenever applications have run.
    pub time: u8,
    pub told: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationHost {
    pub machine: Destination,
    pub on: bool,
    pub disk: Vec<(Attempt, Verdict)>,
    pub pending: Vec<(Attempt, Verdict)>,
    /// Content of the memory that has arrived.
    pub memory: Option<u8>,
    pub told: bool,
    /// True if the arrival runs.
    pub runs: bool,
}

/// Facts that no part of the world knows, only the checker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ghosts {
    /// Attempt whose arrival has ever run.
    pub executed: Option<Attempt>,
    /// Times of the arrival's memory and of the source's, when the arrival began to run.
    pub executed_times: Option<(u8, u8)>,
    pub operator_resumed: bool,
    pub operator_abandoned: bool,
    pub operator_adopted: bool,
    /// True if the source went on by itself although the destination had run.
    pub resumed_after: bool,
    pub booted: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub terms: Terms,
    pub mutant: Option<Mutant>,
    pub attempt: u8,
    pub deaths: u8,
    pub source: SourceHost,
    pub destination: DestinationHost,
    pub to_source: Network,
    pub to_destination: Network,
    pub ghosts: Ghosts,
}

/// One event in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Begin,
    /// Another attempt begins, of a machine that goes on.
    BeginAgain,
    ToSource(Packet),
    ToDestination(Packet),
    Source(source::Event),
    /// A round is sent, and the machine works meanwhile.
    Round,
    /// The last pages are sent.
    Stream,
    SourceWrites,
    /// A write was reported as failed. The flag tells if it happened all the same.
    SourceWriteFails(bool),
    /// The sender dies. So many of the writes under way still happen.
    SenderDies(u8),
    SourceDies(u8),
    SenderStarts,
    SourceBoots,
    SourceOperator(source::Decision),
    Destination(destination::Event),
    DestinationWrites,
    DestinationWriteFails(bool),
    DestinationDies(u8),
    DestinationBoots,
    /// An adoption, for which the operator keeps the source off if it is off.
    Adopt,
}

impl World {
    pub fn new(terms: Terms, mutant: Option<Mutant>) -> Self {
        let (machine, actions) = Source::begin(attempt(0));
        let source =
            SourceHost { machine, power: Power::On, disk: None, pending: Vec::new(), time: 0, told: false };
        let destination = DestinationHost {
            machine: Destination::default(),
            on: true,
            disk: Vec::new(),
            pending: Vec::new(),
            memory: None,
            told: false,
            runs: false,
        };
        let mut world = Self {
            terms,
            mutant,
            attempt: 0,
            deaths: 0,
            source,
            destination,
            to_source: Network::default(),
            to_destination: Network::default(),
            ghosts: Ghosts::default(),
        };
        world.source_does(actions);
        world
    }

    /// Returns true if applications run at the source.
    pub fn source_runs(&self) -> bool {
        matches!(self.source.power, Power::On | Power::NoSender)
            && self.source.machine.applications() == Applications::Run
    }

    /// Returns the names of the ends that this state shows.
    pub fn ends(&self) -> impl Iterator<Item = &'static str> {
        let gone = self.source.machine.state == State::GivenUp;
        let ghosts = &self.ghosts;
        [
            ("moved", self.destination.runs && gone && !ghosts.operator_abandoned),
            ("called off", self.source_runs() && self.source.machine.state == State::Resumed),
            ("adopted", self.destination.runs && ghosts.operator_adopted),
            ("resumed by an operator", self.source_runs() && ghosts.operator_resumed),
            ("abandoned", gone && ghosts.operator_abandoned),
            ("booted", self.source_runs() && ghosts.booted),
            ("lost", ghosts.executed.is_some() && self.destination.on && !self.destination.runs),
        ]
        .into_iter()
        .filter_map(|(end, is_so)| is_so.then_some(end))
    }

    /// Returns all possible next steps.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = self.source_steps();
        steps.extend(self.destination_steps());
        steps.extend(self.deaths());
        steps
    }

    fn source_steps(&self) -> Vec<Step> {
        use source::Event;
        let source = &self.source;
        match source.power {
            Power::NoSender => return vec![Step::SenderStarts],
            Power::Off => return vec![Step::SourceBoots],
            Power::KeptOff => return Vec::new(),
            Power::On => {}
        }
        let mut steps: Vec<_> = self.to_source.packets().map(Step::ToSource).collect();
        let always = [Event::Connected, Event::Disconnected, Event::TimedOut, Event::Failed, Event::Cancel];
        steps.extend(always.map(Step::Source));
        match source.machine.state {
            State::Copying if self.terms.rough && source.time < 2 * self.attempt + 1 => {
                steps.extend([Step::Round])
            }
            State::Copying => steps.push(Step::Source(Event::StopNow)),
            State::Stopping => steps.push(Step::Stream),
            State::Resumed if self.attempt + 1 < self.terms.attempts => steps.push(Step::BeginAgain),
            _ => {}
        }
        if !source.pending.is_empty() {
            let fails = [true, false].map(Step::SourceWriteFails).into_iter().filter(|_| self.terms.rough);
            steps.extend([Step::SourceWrites].into_iter().chain(fails));
        }
        steps.extend(self.source_decisions().map(Step::SourceOperator));
        steps
    }

    /// Returns the decisions of an operator at the source who was asked, checks the advised facts,
    /// and decides rightly.
    fn source_decisions(&self) -> impl Iterator<Item = source::Decision> {
        let asked = self.source.machine.may_decide() && self.source.told;
        let arrival = self.destination.machine.arrival;
        let is_here = self.destination.on && arrival.is_some_and(|(of, _)| of == self.source.machine.attempt);
        let resume = (asked && !is_here && !self.destination.runs).then_some(source::Decision::Resume);
        let abandon = (asked && self.destination.runs).then_some(source::Decision::Abandon);
        resume.into_iter().chain(abandon)
    }

    fn destination_steps(&self) -> Vec<Step> {
        use destination::{Decision, Event};
        let destination = &self.destination;
        if !destination.on {
            return vec![Step::DestinationBoots];
        }
        let mut steps: Vec<_> = self.to_destination.packets().map(Step::ToDestination).collect();
        let events: &[Event] = match destination.machine.phase() {
            None | Some(Phase::Running) => &[],
            Some(Phase::Starting) => &[Event::Arrived, Event::StartFailed],
            Some(Phase::Checking) => &[Event::Fits, Event::DoesNotFit],
            _ => &[Event::Operator(Decision::Discard)],
        };
        steps.extend(events.iter().copied().map(Step::Destination));
        if destination.machine.phase().is_some_and(|phase| phase != Phase::Running) {
            let always = [Event::Disconnected, Event::TimedOut, Event::Failed];
            steps.extend(always.map(Step::Destination));
        }
        if let Some(Phase::Verifying(digest)) = destination.machine.phase() {
            let is_right = destination.memory == Some(digest.0[0]);
            let is_right = is_right || self.mutant == Some(Mutant::VerifiesNothing);
            steps.extend(is_right.then_some(Step::Destination(Event::Verified)));
        }
        if !destination.pending.is_empty() {
            let fails =
                [true, false].map(Step::DestinationWriteFails).into_iter().filter(|_| self.terms.rough);
            steps.extend([Step::DestinationWrites].into_iter().chain(fails));
        }
        steps.extend(self.may_adopt().then_some(Step::Adopt));
        steps
    }

    /// Returns true if an operator may adopt: the operator was asked, and the source says that it
    /// waits, or is off with its commit on its disk. Power off alone is not enough, because the
    /// source may have gone on before.
    fn may_adopt(&self) -> bool {
        let waits = match self.source.power {
            Power::On => matches!(self.source.machine.state, State::InDoubt(..)),
            Power::NoSender => false,
            Power::Off => self.source.disk == Some((self.source.machine.attempt, Tombstone::Committed)),
            Power::KeptOff => false,
        } || self.mutant == Some(Mutant::AdoptsWhenSilent);
        let of_source =
            self.destination.machine.arrival.map(|(of, _)| of) == Some(self.source.machine.attempt);
        self.destination.machine.may_adopt() && self.destination.told && waits && of_source
    }

    fn deaths(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.deaths == self.terms.deaths {
            return steps;
        }
        let landed = |pending: usize| 0..=pending as u8;
        let source = landed(self.source.pending.len());
        if self.source.power == Power::On {
            steps.extend(source.clone().map(Step::SenderDies));
        }
        if matches!(self.source.power, Power::On | Power::NoSender) {
            steps.extend(source.map(Step::SourceDies));
        }
        if self.destination.on {
            steps.extend(landed(self.destination.pending.len()).map(Step::DestinationDies));
        }
        steps
    }

    /// Carries out a step.
    pub fn take(&mut self, step: Step) {
        // The times were checked when the arrival ran.
        self.ghosts.executed_times = None;
        self.happen(step);
    }

    fn happen(&mut self, step: Step) {
        match step {
            Step::Begin => {}
            Step::BeginAgain => self.begin_again(),
            Step::ToSource(Packet::Message(message)) => self.source_hears(source::Event::Heard(message)),
            Step::ToSource(Packet::Page(..)) => {}
            Step::ToDestination(packet) => self.destination_receives(packet),
            Step::Source(event) => self.source_hears(event),
            Step::Round => {
                self.send_page();
                self.source.time += 1;
            }
            Step::Stream => {
                self.send_page();
                self.source_hears(source::Event::Streamed(digest(self.source.time)));
            }
            Step::SourceWrites => {
                let (attempt, tombstone) = self.source_write(true);
                self.source_hears(source::Event::Recorded(attempt, tombstone));
            }
            Step::SourceWriteFails(landed) => {
                let (attempt, tombstone) = self.source_write(landed);
                self.source_hears(source::Event::RecordFailed(attempt, tombstone));
            }
            Step::SenderDies(landed) => self.source_dies(landed, Power::NoSender),
            Step::SourceDies(landed) => self.source_dies(landed, Power::Off),
            Step::SenderStarts => self.source_starts(Memory::Kept),
            Step::SourceBoots => self.source_starts(Memory::Gone),
            Step::SourceOperator(decision) => self.source_decides(decision),
            Step::Destination(event) => self.destination_event(event),
            Step::DestinationWrites => {
                let (attempt, verdict) = self.destination_write(true);
                self.destination_event(destination::Event::Recorded(attempt, verdict));
            }
            Step::DestinationWriteFails(landed) => {
                let (attempt, verdict) = self.destination_write(landed);
                self.destination_event(destination::Event::RecordFailed(attempt, verdict));
            }
            Step::DestinationDies(landed) => self.destination_dies(landed),
            Step::DestinationBoots => self.destination_boots(),
            Step::Adopt => self.adopt(),
        }
    }

    fn begin_again(&mut self) {
        self.attempt += 1;
        let (machine, actions) = Source::begin(attempt(self.attempt));
        self.source.machine = machine;
        self.source.told = false;
        self.source_does(actions);
    }

    fn send_page(&mut self) {
        let page = Packet::Page(self.source.machine.attempt, self.source.time);
        self.to_destination.add(page);
    }

    fn source_hears(&mut self, event: source::Event) {
        let before = self.source.machine;
        let mut actions = self.source.machine.on(event);
        if let Some(mutant) = self.mutant {
            mutant.source(&before, event, &mut self.source.machine, &mut actions);
        }
        self.source_does(actions);
    }

    pub fn source_does(&mut self, actions: Vec<source::Action>) {
        use source::Action;
        for action in actions {
            match action {
                Action::Send(message) => self.to_destination.add(Packet::Message(message)),
                Action::Record(tombstone) => {
                    self.source_asks_to_write((self.source.machine.attempt, tombstone))
                }
                Action::Resume | Action::Boot => self.source_goes_on(action == Action::Boot),
                Action::Tell(_) => self.source.told = true,
                Action::CopyRounds | Action::StopAndCopy | Action::Connect | Action::GiveUp => {}
            }
        }
    }

    /// A repeated request for a write that is still under way is one write.
    fn source_asks_to_write(&mut self, asked: (Attempt, Tombstone)) {
        if self.source.pending.last() != Some(&asked) {
            self.source.pending.push(asked);
        }
    }

    fn source_goes_on(&mut self, boots: bool) {
        self.source.time += 1;
        self.ghosts.booted |= boots;
        if self.ghosts.executed.is_some() && !self.ghosts.operator_resumed {
            self.ghosts.resumed_after = true;
        }
    }

    fn source_write(&mut self, lands: bool) -> (Attempt, Tombstone) {
        let written = self.source.pending.remove(0);
        if lands {
            self.source.disk = Some(written);
        }
        written
    }

    fn source_dies(&mut self, landed: u8, power: Power) {
        self.deaths += 1;
        for _ in 0..landed {
            self.source_write(true);
        }
        self.source.pending.clear();
        self.source.power = power;
    }

    fn source_starts(&mut self, memory: Memory) {
        let (of, tombstone) = self.source.disk.unwrap_or((self.source.machine.attempt, Tombstone::Cleared));
        let tombstone =
            if self.mutant == Some(Mutant::BootsWithoutLooking) { Tombstone::Cleared } else { tombstone };
        let nothing_is_frozen = memory == Memory::Kept && self.source_runs();
        self.source.power = Power::On;
        self.source.told = false;
        if nothing_is_frozen {
            self.source.machine.state = State::Resumed;
            // The operator who asks on knows only that nothing was committed.
            let cancel = message(self.source.machine.attempt, Word::Cancel);
            self.source_does(vec![source::Action::Send(cancel)]);
            return;
        }
        let (machine, actions) = Source::restart(of, tombstone, memory);
        self.source.machine = machine;
        self.source_does(actions);
    }

    fn source_decides(&mut self, decision: source::Decision) {
        match decision {
            source::Decision::Resume => self.ghosts.operator_resumed = true,
            source::Decision::Abandon => self.ghosts.operator_abandoned = true,
        }
        self.source_hears(source::Event::Operator(decision));
    }

    fn destination_receives(&mut self, packet: Packet) {
        match packet {
            Packet::Message(message) => self.destination_event(destination::Event::Heard(message)),
            Packet::Page(of, time) => {
                let machine = &self.destination.machine;
                let arrival = machine.arrival.map(|(attempt, _)| attempt);
                let forgives = self.mutant == Some(Mutant::AcceptsPagesAlways);
                if arrival == Some(of) && (machine.accepts_pages() || forgives) && !self.destination.runs {
                    self.destination.memory = Some(time);
                }
            }
        }
    }

    fn destination_event(&mut self, event: destination::Event) {
        let before = self.destination.machine.clone();
        let mut actions = self.destination.machine.on(event);
        if let Some(mutant) = self.mutant {
            mutant.destination(&before, event, &mut self.destination.machine, &mut actions);
        }
        if event == destination::Event::Arrived && before.phase() == Some(Phase::Starting) {
            self.execute(before.arrival.map(|(attempt, _)| attempt));
        }
        self.destination_does(actions);
    }

    fn execute(&mut self, of: Option<Attempt>) {
        self.destination.runs = true;
        self.ghosts.executed = of;
        let held = self.destination.memory.unwrap_or(u8::MAX);
        self.ghosts.executed_times = Some((held, self.source.time));
    }

    pub fn destination_does(&mut self, actions: Vec<destination::Action>) {
        use destination::Action;
        for action in actions {
            match action {
                Action::Send(message) => self.to_source.add(Packet::Message(message)),
                Action::Record(attempt, verdict) => self.destination_asks_to_write((attempt, verdict)),
                Action::Release => self.destination.memory = None,
                Action::Tell(_) => self.destination.told = true,
                Action::Check | Action::Verify(_) | Action::Start => {}
            }
        }
    }

    fn destination_asks_to_write(&mut self, asked: (Attempt, Verdict)) {
        if self.destination.pending.last() != Some(&asked) {
            self.destination.pending.push(asked);
        }
    }

    fn destination_write(&mut self, lands: bool) -> (Attempt, Verdict) {
        let written = self.destination.pending.remove(0);
        if lands && self.terms.records {
            self.destination.disk.retain(|(attempt, _)| *attempt != written.0);
            self.destination.disk.push(written);
        }
        written
    }

    fn destination_dies(&mut self, landed: u8) {
        self.deaths += 1;
        for _ in 0..landed {
            self.destination_write(true);
        }
        // The arrival may have run already when the destination died.
        let host = &mut self.destination;
        host.pending.clear();
        host.memory = None;
        host.runs = false;
        host.on = false;
        host.told = false;
        host.machine = Destination::default();
    }

    fn destination_boots(&mut self) {
        // The connections died with the destination, and TLS repeats no old message on new ones.
        // With records a repetition would be possible.
        if !self.terms.records {
            self.to_destination.clear();
        }
        let (machine, actions) = Destination::restart(&self.destination.disk);
        self.destination.machine = machine;
        self.destination.on = true;
        self.destination_does(actions);
    }

    fn adopt(&mut self) {
        self.ghosts.operator_adopted = true;
        if self.source.power == Power::Off {
            self.source.power = Power::KeptOff;
        }
        self.destination_event(destination::Event::Operator(destination::Decision::Adopt));
    }
}

/// Returns a message with a word of an attempt.
pub fn message(attempt: Attempt, word: Word) -> Message {
    Message { attempt, word }
}
