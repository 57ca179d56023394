//! The source's end of a move. [`mercury_migration::protocol::Source`] decides the actions, and the
//! code here carries them out on the machine that moves ([`super::system`]). [`rounds`] copies
//! while everything runs, [`instant`] when it stands still.

mod instant;
mod rounds;

use super::{
    arrival::Arrival,
    copy::Proof,
    doubt::{self, Announcements, Doubt, Overdue},
    link::{self, Heard, Link, Taking},
    log::Log,
    mirror::Mirror,
    offer::Offer,
    page_stream::PageStream,
    pause::{self, Pause},
    report::{MoveEvent, Report},
    system::{Memory, System},
};
use crate::operator::Operator;
use crate::options::MigrateOptions;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::{
    protocol::{
        Attempt, Message, Patience, Source, Tombstone, Word,
        source::{Action, Advice, Event, State},
    },
    session::PairingToken,
    wire::{Frame, Ledger},
};
use mercury_quiesce::{
    ethernet::{Card, Mac},
    hardware,
};
use std::{
    collections::VecDeque,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

/// Time for the other end to say why it has ended a stream.
const LAST_WORD: Duration = Duration::from_secs(2);
/// Time for which a connection is kept after the commit, or after the destination's last sign of life.
const LINK_PATIENCE: Duration = Duration::from_secs(5);
/// Times of silence for which this end waits in all, while the destination gives signs of life.
const SIGNS_MAX: u32 = 6;
/// What the operator is told besides, if the destination has begun the start and then fallen silent.
const BEGUN: &str = "The destination has confirmed that it begins the start.";
/// What the operator is told of a destination that gives signs of life, and has no answer yet.
const STILL_STARTING: &str = "The destination starts this machine as a guest, and the guest does not say yet \
    that it runs. Nothing runs here. This end waits on, and goes on by itself as soon as an answer comes. \
    Look at the guest's console on its host (`mercury guests console NAME`). If the machine works there, \
    type `abandon` here. If it does not and never will, end it there (`mercury guests stop NAME`). This end \
    then hears that it is lost, and says what can be done.";
/// Longest delay until an event is noticed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The parts with which a move begins.
pub struct Departure<'a> {
    pub attempt: Attempt,
    /// Address of the destination.
    pub to: SocketAddr,
    /// Pairing token of the receiver.
    pub token: PairingToken,
    /// Connection to the destination.
    pub link: Link,
    /// Announcements, which need no connection.
    pub announcements: Announcements,
    /// Description of the machine.
    pub offer: Offer,
    /// Bridges of the machine that were given an address: name and address.
    pub bridges: Vec<(String, Mac)>,
    /// Memory of the machine.
    pub memory: &'a dyn Memory,
    /// Source of the changed frames.
    pub log: Log,
    /// Proof that frames are those of the instant, if it is wanted.
    pub proof: Option<Proof>,
    /// Disks that move with the machine.
    pub mirror: Mirror<'a>,
    /// Operator at the console.
    pub operator: Operator,
}

/// The end of a move.
#[derive(Debug)]
pub enum Outcome {
    /// This is the machine that has arrived.
    Arrived(Arrival),
    /// The machine runs at the destination.
    GivenUp,
    /// The machine goes on here.
    Resumed,
}

/// The parts of a mover that are left in the end.
#[derive(Debug)]
pub struct Remains {
    /// Reason why the machine has not moved, if it has not.
    pub failure: Option<Error>,
    /// Operator at the console.
    pub operator: Operator,
    /// Pause that a test still wants.
    pub pause: Pause,
}

/// The result of an action.
enum Step {
    None,
    Event(Event),
    Arrived,
}

/// The source and its resources.
pub struct Mover<'a> {
    args: &'a MigrateOptions,
    system: &'a mut dyn System,
    memory: &'a dyn Memory,
    to: SocketAddr,
    token: PairingToken,
    link: Option<Link>,
    /// The streams besides the first.
    page_streams: Vec<PageStream>,
    announcements: Announcements,
    attempt: Attempt,
    source: Source,
    begin: Vec<Action>,
    patience: Patience,
    proof: Option<Proof>,
    log: Log,
    /// Duration of the last pass over written disk chunks.
    mirrored: Duration,
    offer: Offer,
    mirror: Mirror<'a>,
    ledger: Ledger,
    failure: Option<Error>,
    is_cancelled: bool,
    committed: Option<Instant>,
    /// Cards of the destination, which will be this machine's.
    theirs: Vec<Card>,
    /// Bridges that were given an address.
    bridges: Vec<(String, Mac)>,
    heard: Instant,
    /// First and last sign of life of a destination that has no word to say.
    signed: Option<(Instant, Instant)>,
    /// Limit of the start, after the commit.
    overdue: Option<Overdue>,
    operator: Operator,
    workers: usize,
    begun: Instant,
    stopped: Option<Instant>,
    /// Time at which the last page was sent.
    streamed: Option<Instant>,
    report: Report,
    pause: Pause,
}

impl<'a> Mover<'a> {
    /// Prepares the move; nothing stands still yet.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is gone.
    pub fn new(
        args: &'a MigrateOptions,
        system: &'a mut dyn System,
        patience: Patience,
        departure: Departure<'a>,
    ) -> Result<Self> {
        let Departure {
            attempt,
            to,
            token,
            mut link,
            announcements,
            offer,
            bridges,
            memory,
            log,
            proof,
            mirror,
            operator,
        } = departure;
        let ledger = Ledger::new(offer.memory());
        link.begin(attempt).map_err(|error| {
            Error::new(Exit::Failed, format!("the connection: {error}")).hint("nothing was changed")
        })?;
        let (source, begin) = Source::begin(attempt);
        let mut report = Report::new(attempt.to_string(), offer.machine.kept_pages() * 4096);
        report.disks = mirror.bytes();
        Ok(Self {
            args,
            system,
            memory,
            to,
            token,
            link: Some(link),
            page_streams: Vec::new(),
            announcements,
            attempt,
            source,
            begin,
            patience,
            proof,
            log,
            mirrored: Duration::ZERO,
            offer,
            mirror,
            ledger,
            failure: None,
            is_cancelled: false,
            committed: None,
            theirs: Vec::new(),
            bridges,
            heard: Instant::now(),
            signed: None,
            overdue: None,
            operator,
            workers: thread::available_parallelism().map_or(1, usize::from),
            begun: Instant::now(),
            stopped: None,
            streamed: None,
            report,
            pause: Pause::at(args.pause_at.as_deref()),
        })
    }

    /// Runs the move to its end.
    pub fn run(&mut self) -> Outcome {
        let mut todo = VecDeque::from(std::mem::take(&mut self.begin));
        self.pause(self.source.state());
        loop {
            while let Some(action) = todo.pop_front() {
                match self.perform(action) {
                    Step::None => {}
                    Step::Event(event) => todo.extend(self.happened(event)),
                    Step::Arrived => return Outcome::Arrived(self.arrive()),
                }
            }
            match self.source.state() {
                State::Resumed => return Outcome::Resumed,
                State::GivenUp => return Outcome::GivenUp,
                _ => {}
            }
            let event = self.next_event();
            todo.extend(self.happened(event));
        }
    }

    fn happened(&mut self, event: Event) -> Vec<Action> {
        let actions = self.source.on(event);
        self.pause(self.source.state());
        actions
    }

    /// Pauses at this step, if a test wants that.
    fn pause(&mut self, step: impl std::fmt::Debug) {
        if let Some(text) = self.pause.reached(step) {
            self.operator.tell(&text);
            pause::hold(|| self.system.is_alive());
        }
    }

    /// Returns the report of the move.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report.clone()
    }

    /// Returns the remaining parts, with the reason if the machine has not moved.
    #[must_use]
    pub fn into_remains(self) -> Remains {
        let Self { failure, operator, pause, .. } = self;
        Remains { failure, operator, pause }
    }

    fn is_in_doubt(&self) -> bool {
        self.source.may_decide()
    }

    /// Waits for the next event.
    fn next_event(&mut self) -> Event {
        self.heard = Instant::now();
        let mut taking = Taking::begin(self.waiting_bytes());
        loop {
            self.system.is_alive();
            if self.is_wanted_to_stop() {
                return Event::Cancel;
            }
            if let Some(event) = self.poll_outside() {
                return event;
            }
            if let Some(mut link) = self.link.take() {
                let heard = link.hear(POLL_INTERVAL);
                self.link = Some(link);
                match heard {
                    // A word that has had its effect is no answer to wait on for.
                    Heard::Frame(Frame::Message(Message { word: Word::Accept, .. }, _))
                        if self.source.state() != State::Offering => {}
                    Heard::Frame(Frame::Message(message, text)) => return self.understand(message, &text),
                    Heard::Frame(Frame::Round(_)) => self.hear_sign(),
                    Heard::Frame(_) | Heard::Nothing => {}
                    Heard::Gone(why) => return self.is_gone(&why),
                }
            } else {
                thread::sleep(POLL_INTERVAL);
            }
            // A slow connection still brings the last pages.
            if self.link.is_some() && taking.has_taken(self.waiting_bytes()) {
                self.heard = Instant::now();
            }
            if self.source.patience(&self.patience).is_some_and(|limit| self.heard.elapsed() > limit) {
                self.failure.get_or_insert(self.silence());
                return Event::TimedOut;
            }
        }
    }

    /// Returns the reason for a move that ends because the destination has no word to say.
    fn silence(&self) -> Error {
        match self.signed {
            Some((first, _)) => Error::new(
                Exit::Failed,
                format!(
                    "the destination has all of the machine, and has not verified its disks for {} s",
                    first.elapsed().as_secs()
                ),
            )
            .hint("look at its kernel's log (`dmesg`) and for a faster disk there"),
            None => Error::new(Exit::Failed, "the destination does not answer").hint("look at its console"),
        }
    }

    /// Waits on for a destination that works: for as long as it verifies and starts the machine, within
    /// limits.
    fn hear_sign(&mut self) {
        let now = Instant::now();
        let (first, _) = self.signed.unwrap_or((now, now));
        self.signed = Some((first, now));
        let limit = match self.source.state() {
            State::Asking(_) => first + self.patience.frozen * SIGNS_MAX,
            State::InDoubt(..) => {
                // What the destination confirms keeps the kernel from asking all machines for its address. A
                // word that has come already is read first: nothing can be read after a write has failed.
                if let Some(link) = &mut self.link
                    && !link.is_readable()
                {
                    let _ = link.say(Word::Commit, &[]);
                }
                self.committed.unwrap_or(first) + self.patience.doubt * SIGNS_MAX
            }
            _ => return,
        };
        if now < limit {
            self.heard = now;
        }
    }

    /// Returns true if the destination has given a sign of life since the commit.
    fn has_begun(&self) -> bool {
        let last = self.signed.map(|(_, last)| last);
        self.committed.zip(last).is_some_and(|(committed, last)| last > committed)
    }

    /// Returns true if the destination has given a sign of life a moment ago.
    fn is_signed(&self) -> bool {
        self.signed.is_some_and(|(_, last)| last.elapsed() <= LINK_PATIENCE)
    }

    /// Returns the number of bytes that were sent and that the destination has not taken yet.
    fn waiting_bytes(&self) -> u64 {
        let others = self.page_streams.iter().map(PageStream::waiting_bytes);
        self.link.as_ref().map_or(0, link::waiting_bytes) + others.sum::<u64>()
    }

    /// Returns true once after Ctrl-C.
    fn is_wanted_to_stop(&mut self) -> bool {
        if self.is_cancelled || !self.system.is_interrupted() {
            return false;
        }
        self.is_cancelled = true;
        let why = Error::new(Exit::Interrupted, "interrupted: the machine has not moved, and runs on");
        self.failure.get_or_insert(why);
        true
    }

    /// Reads events that need no connection: announcements, and the operator's decision.
    fn poll_outside(&mut self) -> Option<Event> {
        if !self.is_in_doubt() {
            return None;
        }
        // A connection without answers makes the kernel ask for the other end's address by ARP,
        // which tells all machines this machine's own address.
        if self.committed.is_some_and(|since| since.elapsed() > LINK_PATIENCE)
            && !self.is_signed()
            && let Some(link) = self.link.take()
        {
            link.abandon();
        }
        if let Some(message) = self.announcements.hear() {
            return Some(Event::Heard(message));
        }
        if matches!(self.source.state(), State::InDoubt(..)) {
            self.announcements.say_again(Word::Commit);
            if let Some(text) = self.overdue.as_mut().and_then(Overdue::news) {
                self.advise(text);
            }
        }
        doubt::decision(&mut self.operator).map(Event::Operator)
    }

    fn understand(&mut self, message: Message, text: &[u8]) -> Event {
        let text = String::from_utf8_lossy(text);
        let failure = match message.word {
            Word::Refuse => Some(
                Error::new(Exit::Impossible, format!("the destination does not accept this machine: {text}"))
                    .hint("make the destination equal to it; this machine goes on"),
            ),
            Word::Discarded => Some(
                Error::new(Exit::Failed, format!("the destination has given up: {text}"))
                    .hint("this machine goes on as if nothing had been tried"),
            ),
            Word::Accept => {
                self.theirs = serde_json::from_str(&text).unwrap_or_default();
                None
            }
            _ => None,
        };
        if let Some(failure) = failure {
            self.failure.get_or_insert(failure);
        }
        Event::Heard(message)
    }

    /// Reads the other end's reason on the first stream, after it has ended another stream.
    fn last_word(&mut self) -> Option<Event> {
        let link = self.link.as_mut()?;
        if !link.wait(&[], LAST_WORD) {
            return None;
        }
        match link.hear_message(POLL_INTERVAL) {
            Ok(said) => said.map(|(message, text)| self.understand(message, &text)),
            Err(why) => Some(self.is_gone(&why)),
        }
    }

    fn is_gone(&mut self, why: &str) -> Event {
        let gone = Error::new(Exit::Failed, format!("the connection has ended: {why}"));
        self.failure.get_or_insert(gone.hint("this machine goes on as if nothing had been tried"));
        self.link = None;
        self.page_streams.clear();
        Event::Disconnected
    }

    fn fail(&mut self, error: Error) -> Event {
        self.failure.get_or_insert(error);
        Event::Failed
    }

    fn perform(&mut self, action: Action) -> Step {
        match action {
            Action::Send(message) => self.send(message.word),
            Action::CopyRounds => Step::Event(self.copy_rounds()),
            Action::StopAndCopy => match self.stop_and_copy() {
                Ok(step) => step,
                Err(error) => Step::Event(self.fail(error)),
            },
            Action::Record(tombstone) => self.record(tombstone),
            // A new connection would tell all machines this machine's address, which the
            // destination may have by now. The word is announced instead.
            Action::Connect => Step::None,
            Action::Resume => {
                self.resume();
                Step::None
            }
            // Only a restarted source, which knows nothing of the move, gets this action.
            Action::Boot => Step::None,
            Action::GiveUp => {
                let now = Instant::now();
                let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
                    (Some(from), Some(to)) => to.saturating_duration_since(from).as_secs_f64() * 1e6,
                    _ => 0.0,
                };
                let after = self.report.after.get_or_insert_default();
                after.verify_us = between(self.streamed, self.committed);
                after.start_us = between(self.committed, Some(now));
                after.downtime_us = between(self.stopped, Some(now));
                after.seconds = self.begun.elapsed().as_secs_f64();
                Step::None
            }
            Action::Tell(Advice::NoAnswer) if self.is_signed() => {
                self.advise(STILL_STARTING);
                Step::None
            }
            Action::Tell(advice @ Advice::NoAnswer) if self.has_begun() => {
                self.advise(&format!("{advice} {BEGUN}"));
                Step::None
            }
            Action::Tell(advice) => {
                self.advise(&advice.to_string());
                Step::None
            }
        }
    }

    fn advise(&mut self, text: &str) {
        self.operator.tell(text);
        self.system.tell(&MoveEvent::Doubt { advice: text.to_owned() });
    }

    /// Writes a tombstone that survives a power cut.
    fn record(&mut self, tombstone: Tombstone) -> Step {
        if let Err(error) = self.try_record(tombstone) {
            self.operator.tell(&error.to_string());
            self.failure.get_or_insert(error);
            // A tombstone that cannot be taken back is tried again later. Meanwhile the destination
            // and the operator are heard.
            return match tombstone {
                Tombstone::Cleared => Step::None,
                _ => Step::Event(Event::RecordFailed(self.attempt, tombstone)),
            };
        }
        if tombstone == Tombstone::Committed {
            self.committed = Some(Instant::now());
            self.overdue = Some(Overdue::begin(self.patience.doubt));
        }
        Step::Event(Event::Recorded(self.attempt, tombstone))
    }

    fn try_record(&mut self, tombstone: Tombstone) -> Result<()> {
        if tombstone == Tombstone::Committed {
            self.commit()?;
        }
        self.system.tombstone(tombstone).map_err(|why| {
            Error::new(
                Exit::Failed,
                format!("the tombstone of this move cannot be written ({tombstone:?}): {why}"),
            )
            .hint(
                "`mercury tombstone` shows the tombstone; while it is there, this machine does not start \
                    by itself",
            )
        })
    }

    fn commit(&mut self) -> Result<()> {
        // All pages of these streams have arrived.
        self.page_streams.clear();
        let doubt = Doubt::of(&self.token, self.attempt, self.offer.secret, self.announcements.cards());
        self.system.commit(doubt, self.operator.console())
    }

    /// Goes on as if nothing had been tried.
    fn resume(&mut self) {
        self.page_streams.clear();
        self.system.go_on();
        self.mirror.unwatch();
        // If this fails, closing the device ends the snapshot.
        let _ = self.system.end_instant();
    }

    fn send(&mut self, word: Word) -> Step {
        if self.is_in_doubt() && matches!(word, Word::Commit | Word::Cancel) {
            self.announcements.say(word);
        }
        let Some(link) = self.link.as_mut() else { return Step::None };
        let ended = match word {
            Word::Final(_) => self.page_streams.iter().try_for_each(|page_stream| page_stream.end(word)),
            _ => Ok(()),
        };
        let text = match word {
            Word::Offer => self.offer.pack(),
            Word::Final(_) => {
                hardware::note_time(&mut self.offer.machine);
                self.offer.pack()
            }
            _ => Ok(Vec::new()),
        };
        match ended.and(text).and_then(|text| link.say(word, &text)) {
            Ok(()) => Step::None,
            Err(error) => Step::Event(self.is_gone(&error.to_string())),
        }
    }

    /// Ends the source's role: this machine has arrived, and the connection belongs to the source.
    fn arrive(&mut self) -> Arrival {
        if let Some(link) = self.link.take() {
            link.abandon();
        }
        self.mirror.unwatch();
        self.page_streams.clear();
        self.report.arrive();
        Arrival {
            token: self.token.to_string(),
            secret: self.offer.secret,
            attempt: self.attempt.0,
            cards: self.announcements.cards().to_vec(),
            theirs: std::mem::take(&mut self.theirs),
            bridges: std::mem::take(&mut self.bridges),
        }
    }
}
