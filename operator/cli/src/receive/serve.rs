//! The destination's end of a move: what [`mercury_migration::protocol::Destination`] says is to be done is done here.

use super::{
    intake::{Broken, Intake, State, Whose},
    spare::Spare,
};
use crate::{
    error::{Error, Result},
    migrate::{
        link::{HANDSHAKE, Heard, Link, wait_for},
        offer::{Offer, kept},
        operator::Operator,
        pause::{self, Pause},
    },
    output::bytes,
};
use mercury_migration::{
    hail::{Hailer, Speaker},
    protocol::{
        Destination, Digest, Message, Patience, Word,
        destination::{Action, Decision, Event, Phase},
    },
    session::Receiver,
    streams::STREAMS_MAX,
    wire::{Chunks, Frame, Ledger, PAGE, Pages},
};
use rustix::event::{PollFd, PollFlags};
use std::{
    collections::VecDeque,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long a source may be silent while it sends: it quiesces in between.
pub const RUNNING: Duration = Duration::from_secs(90);
/// Frames on the network that are looked at before everything else is: somebody may send them without end.
const FRAMES: usize = 64;
/// Why somebody is turned away who has the line.
const TAKEN: &str = "another machine is on its way there";

/// The destination, and what it has.
pub struct Host {
    receiver: Receiver,
    listener: TcpListener,
    hailer: Hailer,
    patience: Patience,
    destination: Destination,
    spare: Box<dyn Spare>,
    link: Option<Link>,
    arrival: Option<Arrival>,
    /// What goes with the next refusal, or with a promise that nothing has run.
    reason: String,
    heard: Instant,
    operator: Operator,
    pause: Pause,
    eat: Pause,
    /// Who tells somebody else that there is no place now.
    doorman: Option<JoinHandle<()>>,
}

/// What has come of a machine.
struct Arrival {
    offer: Offer,
    /// What has come of it, once it is taken in.
    intake: Option<Intake>,
    /// What went with what was said last.
    text: Vec<u8>,
    round: u64,
    /// What the first stream has ended with, which is heard when all have.
    last: Option<Message>,
}

impl Host {
    /// One that waits at `listener`, for so long.
    #[must_use]
    pub fn new(
        receiver: Receiver,
        listener: TcpListener,
        spare: Box<dyn Spare>,
        patience: Patience,
        operator: Operator,
    ) -> Self {
        Self {
            hailer: Hailer::new(receiver.line()),
            receiver,
            listener,
            patience,
            destination: Destination::default(),
            spare,
            link: None,
            arrival: None,
            reason: String::new(),
            heard: Instant::now(),
            operator,
            pause: Pause::default(),
            eat: Pause::default(),
            doorman: None,
        }
    }

    /// One that holds still, or runs out of memory, where a test wants it.
    #[must_use]
    pub fn failing(self, pause: Pause, eat: Pause) -> Self {
        Self { pause, eat, ..self }
    }

    /// Waits, takes in, and goes on in what has arrived. Returns only if that cannot be.
    ///
    /// # Errors
    /// Always, then.
    pub fn serve(mut self) -> Result<()> {
        loop {
            self.turn(Duration::from_secs(1))?;
        }
    }

    /// Waits for at most so long, and does what is to be done if something has happened.
    pub(super) fn turn(&mut self, limit: Duration) -> Result<()> {
        let Some(event) = self.next_event(limit) else { return Ok(()) };
        self.heard = Instant::now();
        let mut todo = VecDeque::from(self.happened(event));
        while let Some(action) = todo.pop_front() {
            let Some(event) = self.perform(action)? else { continue };
            todo.extend(self.happened(event));
        }
        Ok(())
    }

    fn happened(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Heard(Message { word: Word::Cancel, .. }) => {
                self.reason = "the source has called it off".into();
            }
            Event::TimedOut => self.reason = "nothing was heard of the source for too long".into(),
            _ => {}
        }
        let actions = self.destination.on(event);
        if let Some(text) = self.destination.phase().and_then(|phase| self.pause.reached(phase)) {
            eprintln!("mercury: {text}");
            pause::hold(|| ());
        }
        if self.destination.phase().and_then(|phase| self.eat.reached(phase)).is_some() {
            eprintln!("mercury: memory is eaten up");
            pause::eat();
        }
        actions
    }

    /// What has happened, if something has by then.
    fn next_event(&mut self, limit: Duration) -> Option<Event> {
        let patience = self.destination.patience(&self.patience);
        let left = patience.map(|patience| patience.saturating_sub(self.heard.elapsed()));
        if left == Some(Duration::ZERO) {
            return Some(Event::TimedOut);
        }
        self.wait(left.unwrap_or(limit).min(limit));
        // The operator comes first: what was thrown away is not started by a word that was on its way.
        let event = self.decision().or_else(|| self.hail()).or_else(|| self.listen());
        event.or_else(|| self.look_at_streams()).or_else(|| self.open())
    }

    /// Whether somebody is let in. As long as there is an arrival its source is heard on its own connection, and when that has
    /// ended; while nothing has come, one that seems to be there may be one of a source that is gone.
    fn is_open(&self) -> bool {
        self.link.is_none() || self.destination.phase().is_none()
    }

    /// Waits until somebody says something, or is at the door where that may be.
    fn wait(&mut self, limit: Duration) {
        let is_open = self.is_open() || self.awaits_streams() || self.has_free_doorman();
        let intake = self.arrival.as_ref().and_then(|arrival| arrival.intake.as_ref());
        let mut others: Vec<_> = self.spare.ear().into_iter().chain(intake.map(AsFd::as_fd)).collect();
        if is_open {
            others.push(self.listener.as_fd());
        }
        if let Some(link) = &mut self.link {
            link.wait(&others, limit);
        } else {
            let mut all: Vec<_> =
                others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            wait_for(&mut all, limit);
        }
    }

    /// What the operator has decided, where that may be.
    fn decision(&mut self) -> Option<Event> {
        let decision = match self.operator.word(&["adopt", "discard"])? {
            "adopt" if self.destination.may_adopt() => Decision::Adopt,
            "discard" if self.destination.may_discard() => Decision::Discard,
            word => {
                eprintln!("mercury: there is nothing to {word}");
                return None;
            }
        };
        self.reason = "its operator wanted it so".into();
        Some(Event::Operator(decision))
    }

    /// What the source says, if it says something.
    fn listen(&mut self) -> Option<Event> {
        let mut link = self.link.take()?;
        match link.hear(Duration::ZERO) {
            Heard::Nothing => {
                self.link = Some(link);
                None
            }
            Heard::Gone(why) => {
                eprintln!("mercury: the connection has ended: {why}");
                self.reason = format!("the connection has ended: {why}");
                Some(Event::Disconnected)
            }
            Heard::Frame(frame) => {
                self.link = Some(link);
                self.understand(frame)
            }
        }
    }

    fn understand(&mut self, frame: Frame) -> Option<Event> {
        match frame {
            Frame::Message(message, text) => {
                self.note_text(message, text);
                let arrival = self.arrival.as_mut().filter(|_| self.destination.takes_pages());
                match arrival {
                    Some(arrival) if matches!(message.word, Word::Final(_)) => {
                        arrival.last = Some(message);
                        None
                    }
                    _ => Some(Event::Heard(message)),
                }
            }
            Frame::Round(number) => {
                if let Some(arrival) = &mut self.arrival {
                    arrival.round = number;
                    // While the machine still runs: its digest is short at the end.
                    if let Some(intake) = &arrival.intake {
                        intake.ledger().settle();
                    }
                    if number > 0 {
                        let pages = arrival.intake.as_ref().map_or(0, Intake::pages);
                        eprintln!("mercury: round {number}; {pages} pages so far");
                    }
                }
                self.heard = Instant::now();
                None
            }
            Frame::Proof(_) => {
                self.reason = "a proof came where there is nothing to be proven".into();
                Some(Event::Failed)
            }
            Frame::Pages(pages) => {
                let loaded = self.load(&pages);
                self.has_taken(loaded)
            }
            Frame::Chunks(chunks) => {
                let written = self.write_disk(&chunks);
                self.has_taken(written)
            }
        }
    }

    fn has_taken(&mut self, taken: Result<()>) -> Option<Event> {
        self.heard = Instant::now();
        self.reason = taken.err()?.message;
        Some(Event::Failed)
    }

    /// Puts chunks of disks where they belong.
    fn write_disk(&mut self, chunks: &Chunks) -> Result<()> {
        let is_over = self.arrival.as_ref().is_none_or(|arrival| arrival.last.is_some());
        if is_over || !self.destination.takes_pages() {
            return Err(Error::fault("chunks of a disk came that nobody had asked for"));
        }
        self.spare.write_disk(chunks)
    }

    fn note_text(&mut self, message: Message, text: Vec<u8>) {
        if message.word == Word::Offer && self.destination.phase().is_none() {
            self.arrival =
                Some(Arrival { offer: Offer::default(), intake: None, text, round: 0, last: None });
        } else if let Some(arrival) = &mut self.arrival {
            arrival.text = text;
        }
    }

    /// Whether the source may open another stream.
    fn awaits_streams(&self) -> bool {
        let intake = self.arrival.as_ref().and_then(|arrival| arrival.intake.as_ref());
        self.destination.takes_pages() && intake.is_some_and(Intake::awaits_streams)
    }

    /// Lets in who is at the door, where that may be; whether another connection has lost its place by that.
    fn open(&mut self) -> Option<Event> {
        if !self.is_open() {
            if self.awaits_streams() {
                self.open_stream();
            } else {
                self.turn_away();
            }
            return None;
        }
        let had_one = self.link.is_some();
        (self.take_link() && had_one).then_some(Event::Disconnected)
    }

    /// Takes who is at the door for the source, which opens another stream.
    fn open_stream(&mut self) {
        let Some((socket, from)) = self.knocking() else { return };
        if let Some(intake) = self.arrival.as_mut().and_then(|arrival| arrival.intake.as_mut()) {
            intake.let_in(&self.receiver, socket, from);
        }
    }

    fn has_free_doorman(&self) -> bool {
        self.doorman.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Tells who is at the door that another one has its place. The source that has it is not kept waiting meanwhile; who
    /// comes then is.
    fn turn_away(&mut self) {
        if !self.has_free_doorman() {
            return;
        }
        let Some((socket, from)) = self.knocking() else { return };
        let receiver = self.receiver.clone();
        let doorman = thread::Builder::new().spawn(move || {
            let why = match Link::turn_away(&receiver, socket, TAKEN) {
                Ok(()) => TAKEN.to_owned(),
                Err(error) => error.to_string(),
            };
            eprintln!("mercury: {from} was refused: {why}");
        });
        // Where there can be no thread nobody is told.
        self.doorman = doorman.ok();
    }

    /// Who is at the door, if anybody is.
    fn knocking(&self) -> Option<(TcpStream, SocketAddr)> {
        let mut door = [PollFd::new(&self.listener, PollFlags::IN)];
        wait_for(&mut door, Duration::ZERO);
        if door[0].revents().is_empty() { None } else { self.listener.accept().ok() }
    }

    /// Takes who waits at the door, if anybody does and has the line.
    fn take_link(&mut self) -> bool {
        let Some((socket, from)) = self.knocking() else { return false };
        // Whoever comes first makes itself ready before it says what it wants; who comes again has something to say.
        let patience = if self.destination.phase().is_none() { self.patience.running } else { HANDSHAKE };
        let linked = Link::accept(&self.receiver, socket, patience);
        match linked.map(|mut link| link.learn(self.patience.running).map(|_| link)) {
            Ok(Ok(link)) => {
                eprintln!("mercury: {from} is connected");
                self.link = Some(link);
                self.heard = Instant::now();
                true
            }
            Ok(Err(error)) => {
                eprintln!("mercury: {from} was refused: {error}");
                false
            }
            Err(error) => {
                eprintln!("mercury: {from} was refused: {error}");
                false
            }
        }
    }

    /// What a source has said without a connection.
    fn hail(&self) -> Option<Event> {
        for frame in std::iter::from_fn(|| self.spare.hear()).take(FRAMES) {
            if let Some(message) = self.hailer.hear(Speaker::Source, &frame) {
                return Some(Event::Heard(message));
            }
        }
        None
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>> {
        Ok(match action {
            Action::Send(message) => {
                self.say(message);
                None
            }
            Action::Check => Some(self.check()),
            // There is no disk here: nothing of it is known after a restart, which the source is told then.
            Action::Record(attempt, verdict) => Some(Event::Recorded(attempt, verdict)),
            Action::Verify(digest) => Some(self.verify(digest)),
            Action::Release => {
                self.arrival = None;
                self.spare.release()?;
                None
            }
            Action::Start => {
                eprintln!("mercury: going on in the machine that has arrived");
                self.reason = self.spare.go().message;
                Some(Event::StartFailed)
            }
            Action::Tell(advice) => {
                eprintln!("mercury: {advice}");
                None
            }
        })
    }

    fn say(&mut self, message: Message) {
        let text = match message.word {
            Word::Refuse | Word::Discarded => std::mem::take(&mut self.reason),
            // What arrives finds cards that have these addresses.
            Word::Accept => serde_json::to_string(&self.spare.cards()).unwrap_or_default(),
            _ => String::new(),
        };
        if matches!(message.word, Word::Refuse | Word::Discarded) {
            let how = if message.word == Word::Refuse { "was refused" } else { "was thrown away" };
            eprintln!("mercury: the machine {how}: {text}");
        }
        if let Some(link) = self.link.as_mut().filter(|link| link.attempt() == Some(message.attempt)) {
            // One that is gone is heard of when it is listened to.
            let _ = link.say(message.word, text.as_bytes());
        }
        let is_answer = matches!(message.word, Word::Discarded | Word::Lost | Word::Started | Word::Unknown);
        if is_answer {
            // To all, if there should be no connection.
            self.spare.hail(&self.hailer.say(Speaker::Destination, message));
        }
    }

    /// Whether the machine that is offered can be held; then memory is ready for it.
    fn check(&mut self) -> Event {
        match self.prepare() {
            Ok(()) => {
                eprintln!("mercury: a machine comes");
                self.reason = "the source was not understood".into();
                Event::Fits
            }
            Err(reason) => {
                self.reason = reason;
                Event::DoesNotFit
            }
        }
    }

    fn prepare(&mut self) -> Result<(), String> {
        let arrival = self.arrival.as_mut().ok_or("nothing was offered")?;
        let offer = Offer::unpack(&arrival.text).map_err(|error| format!("the offer: {error}"))?;
        // Answers to what is said of it later have to be believed, also when it is thrown away by then.
        let attempt = self.link.as_ref().and_then(Link::attempt).ok_or("it is gone")?;
        self.hailer.know(attempt, &offer.hails);
        if !(1..=STREAMS_MAX).contains(&offer.streams) {
            return Err(format!("it would come by {} streams: 1 to {STREAMS_MAX} are taken", offer.streams));
        }
        self.spare.prepare(&offer)?;
        let whose = Whose { attempt, secret: offer.hails, streams: offer.streams };
        let ledger = Ledger::new(offer.memory());
        let intake = Intake::new(whose, self.spare.memory(), ledger, self.patience.running);
        arrival.intake = Some(intake.map_err(|error| error.message)?);
        arrival.offer = offer;
        Ok(())
    }

    /// Takes what came by the first stream.
    fn load(&mut self, pages: &Pages) -> Result<()> {
        let breach = |what: &str| Error::fault(what);
        let arrival = self.arrival.as_ref().filter(|arrival| arrival.last.is_none());
        let intake = arrival.and_then(|arrival| arrival.intake.as_ref());
        match intake.filter(|_| self.destination.takes_pages()) {
            Some(intake) => intake.load(pages),
            None => Err(breach("pages came that nobody had asked for")),
        }
    }

    /// What the streams besides the first come to, while pages are taken: they break, or they end, and then what the first
    /// one has said of the end is heard.
    fn look_at_streams(&mut self) -> Option<Event> {
        let arrival = self.arrival.as_mut().filter(|_| self.destination.takes_pages())?;
        let intake = arrival.intake.as_ref()?;
        if intake.was_alive() {
            self.heard = Instant::now();
        }
        let (event, reason) = match (intake.state(), arrival.last) {
            (State::Broken(Broken::Gone(why)), _) => (Event::Disconnected, why),
            (State::Broken(Broken::Breach(why)), _) => (Event::Failed, why),
            (_, None) => return None,
            (State::Open, Some(_)) if intake.awaits_streams() => {
                (Event::Failed, "it has not opened all of its streams".into())
            }
            (State::Open, Some(_)) => return None,
            (State::Ended(Some(digest)), Some(Message { word, .. })) if word != Word::Final(digest) => {
                (Event::Failed, "its streams do not end alike".into())
            }
            (State::Ended(_), Some(last)) => return Some(Event::Heard(last)),
        };
        eprintln!("mercury: {reason}");
        self.reason = reason;
        Some(event)
    }

    /// Whether all of it is here, and its disks are as they were at the instant.
    fn verify(&mut self, digest: Digest) -> Event {
        match self.is_right(digest) {
            Ok(()) => Event::Verified,
            Err(reason) => {
                self.reason = reason;
                Event::Failed
            }
        }
    }

    fn is_right(&mut self, digest: Digest) -> Result<(), String> {
        let attempt = match self.destination.phase() {
            Some(Phase::Verifying(_)) => self.link.as_ref().and_then(Link::attempt).ok_or("it is gone")?,
            _ => return Err("nothing is to be verified".into()),
        };
        let arrival = self.arrival.as_ref().ok_or("nothing has come")?;
        let mut ledger = arrival.intake.as_ref().ok_or("nothing has come")?.ledger();
        if !ledger.is_complete() {
            return Err("not all of its memory has come".into());
        }
        if ledger.digest(attempt) != digest {
            return Err("its memory is not what was sent".into());
        }
        let last = Offer::unpack(&arrival.text).map_err(|error| format!("the last word: {error}"))?;
        if kept(&last.machine) != kept(&arrival.offer.machine)
            || last.machine.cpus != arrival.offer.machine.cpus
        {
            return Err("it is another machine than the one that was offered".into());
        }
        let known = |offer: &Offer| offer.disks.iter().map(|one| one.disk.clone()).collect::<Vec<_>>();
        if known(&last) != known(&arrival.offer) {
            return Err("these are other disks than those that were offered".into());
        }
        self.spare.complete_disks(&last.disks, attempt)?;
        let changed = self.spare.changed_disks(&last.machine.file_systems);
        if !changed.is_empty() {
            return Err(format!(
                "the disks here are not as they were at the instant: {}",
                changed.join("; ")
            ));
        }
        eprintln!("mercury: the machine is here: {} of memory", bytes(ledger.len() as u64 * PAGE as u64));
        Ok(())
    }
}
