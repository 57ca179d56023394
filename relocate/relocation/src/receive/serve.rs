//! The destination's end of a move. [`mercury_migration::protocol::Destination`] decides the
//! actions, and the code here carries them out.

use super::{
    intake::{Broken, ExpectedStreams, Intake, State},
    spare::{Progress, Spare},
    start::{ANSWERS_END, Start},
};
use crate::{
    migrate::{
        link::{HANDSHAKE, Heard, Link, wait_for},
        offer::{Offer, kept},
        pause::{self, Pause},
    },
    operator::Operator,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::bytes,
};
use mercury_migration::{
    announcement::{Announcer, Speaker},
    protocol::{
        Attempt, Destination, Digest, Message, Patience, Word,
        destination::{Action, Advice, Decision, Event, Phase, Verdict},
        source::Asked,
    },
    session::Receiver,
    streams::STREAMS_MAX,
    wire::{Chunks, Frame, Ledger, PAGE, Pages},
};
use rustix::{
    event::{PollFd, PollFlags},
    net::Shutdown,
};
use std::{
    collections::VecDeque,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Time for which a source may be silent while it sends, which includes its quiescing.
pub const RUNNING: Duration = Duration::from_secs(90);
/// Announcements that are read before everything else: a peer may send them without end.
const FRAMES: usize = 64;
/// Interval at which the progress of a machine that was started is asked for.
const STARTING: Duration = Duration::from_millis(10);
/// Time for which a source that asks is answered after the machine has gone on beside this system.
const ANSWERED: Duration = Duration::from_secs(600);
/// Time for which a source is answered after the operator has ended the wait.
const FAREWELL: Duration = Duration::from_secs(3);
/// Signs of life that the source gets in the time for which it waits in silence.
const SIGNS: u32 = 5;
/// Interval at which the operator is told that the disks are slow.
const SLOW: Duration = Duration::from_secs(10);
/// Reason for turning a peer away that has the pairing token.
pub(super) const TAKEN: &str = "another machine is on its way there";

/// The destination and its resources.
pub struct Host {
    receiver: Receiver,
    listener: TcpListener,
    announcer: Announcer,
    patience: Patience,
    destination: Destination,
    spare: Box<dyn Spare>,
    link: Option<Link>,
    arrival: Option<Arrival>,
    /// The reason for the next refusal, or for a promise that nothing has run.
    reason: String,
    heard: Instant,
    operator: Operator,
    pause: Pause,
    eat: Pause,
    /// The thread that turns another peer away.
    doorman: Option<(TcpStream, JoinHandle<()>)>,
    /// The attempt whose machine was started beside this system.
    begun: Option<Attempt>,
}

/// The parts of a machine that have arrived.
struct Arrival {
    offer: Offer,
    /// The memory, when the machine is accepted.
    intake: Option<Intake>,
    /// The text of the last word.
    text: Vec<u8>,
    round: u64,
    /// The last word of the first stream, which is handled when all streams have ended.
    last: Option<Message>,
    /// True if chunks of disks were written that no sync was begun for.
    has_chunks: bool,
}

impl Host {
    /// Makes a destination that waits at `listener`, with this patience.
    #[must_use]
    pub fn new(
        receiver: Receiver,
        listener: TcpListener,
        spare: Box<dyn Spare>,
        patience: Patience,
        operator: Operator,
    ) -> Self {
        Self {
            announcer: Announcer::new(receiver.token()),
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
            begun: None,
        }
    }

    /// Makes the destination pause, or run out of memory, at a test's step.
    #[must_use]
    pub fn failing(self, pause: Pause, eat: Pause) -> Self {
        Self { pause, eat, ..self }
    }

    /// Waits, receives, and starts the machine that has arrived beside this system. Then answers its source:
    /// while the machine is being started, and until the source cannot ask any more. Returns early if the
    /// machine has ended.
    ///
    /// # Errors
    ///
    /// Returns an error if nothing can be received any more, or if the operator has ended the wait.
    pub fn serve_beside(self) -> Result<()> {
        self.serve_while(&|| true)
    }

    /// Does the same for as long as the caller wants it.
    pub(super) fn serve_while(mut self, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        let (mut answered, mut start): (Option<Instant>, _) = (None, None);
        let mut farewell = None;
        while is_wanted() {
            if answered.is_some_and(|end| Instant::now() >= end) {
                self.tell_of_silence();
                break;
            }
            self.turn(if self.is_starting() { STARTING } else { Duration::from_secs(1) })?;
            if self.begun.is_some() {
                let start: &mut Start = start.get_or_insert_default();
                let is_over = !self.is_starting() || self.watch(start);
                if is_over {
                    answered.get_or_insert_with(|| Instant::now() + ANSWERED);
                }
            }
            if self.begun.is_some() && self.spare.progress() == Progress::Ended {
                self.lose();
                break;
            }
            if self.spare.is_over() && self.destination.phase().is_none() {
                // A source that asks hears until then that its machine does not run here.
                let end = *farewell.get_or_insert_with(|| Instant::now() + FAREWELL);
                if Instant::now() >= end {
                    self.dismiss_doorman();
                    return Err(was_ended());
                }
            }
        }
        self.dismiss_doorman();
        Ok(())
    }

    /// Tells the source that the machine is being started, and the operator if that takes long. Returns true
    /// if it has taken longer than anything that ends by itself.
    fn watch(&mut self, start: &mut Start) -> bool {
        if let Some(link) = self.link.as_mut().filter(|_| start.owes_sign()) {
            link.sign_of_life();
        }
        if let Some(text) = start.news(&self.spare.stage()) {
            note!("mercury: {text}");
        }
        start.is_overdue()
    }

    /// Tells the operator that the source gets no more answers, if it may still ask.
    fn tell_of_silence(&self) {
        if self.is_starting() {
            note!("mercury: {ANSWERS_END}");
        }
    }

    /// Ends the thread that turns another peer away.
    fn dismiss_doorman(&mut self) {
        if let Some((socket, doorman)) = self.doorman.take() {
            let _ = rustix::net::shutdown(&socket, Shutdown::Both);
            let _ = doorman.join();
        }
    }

    fn is_starting(&self) -> bool {
        self.destination.phase() == Some(Phase::Starting)
    }

    /// Answers as a destination that was restarted: the machine was started, and does not run any more.
    fn lose(&mut self) {
        let Some(attempt) = self.begun.take() else { return };
        let advice = after_end(self.destination.phase());
        (self.destination, _) = Destination::restart(&[(attempt, Verdict::Starting)]);
        self.say(Message { attempt, word: Word::Lost });
        note!("mercury: {advice}");
    }

    /// Waits, receives, and goes on in the machine that has arrived. Returns only if that fails.
    ///
    /// # Errors
    ///
    /// Always returns an error if it returns.
    pub fn serve(mut self) -> Result<()> {
        loop {
            self.turn(Duration::from_secs(1))?;
        }
    }

    /// Waits for an event for at most `limit`, and carries out its actions.
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
                self.reason = "the source has called the move off".into();
            }
            Event::TimedOut => self.reason = "the source was silent for too long".into(),
            _ => {}
        }
        let actions = self.destination.on(event);
        if event == Event::Verified && self.destination.may_adopt() {
            self.spare.note_complete();
        }
        if let Some(text) = self.destination.phase().and_then(|phase| self.pause.reached(phase)) {
            note!("mercury: {text}");
            pause::hold(|| ());
        }
        if self.destination.phase().and_then(|phase| self.eat.reached(phase)).is_some() {
            note!("mercury: memory is used up");
            pause::eat();
        }
        actions
    }

    /// Returns the next event, if there is one by then.
    fn next_event(&mut self, limit: Duration) -> Option<Event> {
        let patience = self.destination.patience(&self.patience);
        let left = patience.map(|patience| patience.saturating_sub(self.heard.elapsed()));
        if left == Some(Duration::ZERO) {
            return Some(Event::TimedOut);
        }
        self.wait(left.unwrap_or(limit).min(limit));
        if self.is_starting() && self.spare.progress() == Progress::Running {
            return Some(Event::Arrived);
        }
        // The operator comes first: a machine that was discarded must not be started by a word that
        // was under way.
        let event = self.decision().or_else(|| self.announcement()).or_else(|| self.listen());
        event.or_else(|| self.poll_streams()).or_else(|| self.open())
    }

    /// Returns true if a new connection is accepted. While there is an arrival, its source is heard
    /// on its own connection, and on a new one when that has ended. Before an offer, the connection
    /// may belong to a source that is gone.
    fn is_open(&self) -> bool {
        self.link.is_none() || self.destination.phase().is_none()
    }

    /// Waits for a word, or for a new connection if one is accepted.
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

    /// Returns the operator's decision, if one is possible now.
    fn decision(&mut self) -> Option<Event> {
        const WORDS: [&str; 2] = ["adopt", "discard"];
        let word = self.operator.word(&WORDS).or_else(|| self.piped(&WORDS))?;
        let decision = match word {
            "adopt" if self.destination.may_adopt() => Decision::Adopt,
            "discard" if self.destination.may_discard() => Decision::Discard,
            word => {
                note!("mercury: there is nothing to {word}");
                return None;
            }
        };
        self.reason = "its operator decided so".into();
        Some(Event::Operator(decision))
    }

    /// Returns the operator's word from another command. `adopt` counts only when the source is silent: it
    /// may have been meant for another moment.
    fn piped(&mut self, words: &[&'static str]) -> Option<&'static str> {
        let word = self.spare.word(words)?;
        let is_silent = matches!(self.destination.phase(), Some(Phase::Ready(_, Asked::Yes)));
        if word == "adopt" && !is_silent {
            note!("mercury: the source is not silent: nothing is adopted");
            return None;
        }
        Some(word)
    }

    /// Reads the source's next word or data.
    fn listen(&mut self) -> Option<Event> {
        let mut link = self.link.take()?;
        match link.hear(Duration::ZERO) {
            Heard::Nothing => {
                self.link = Some(link);
                None
            }
            Heard::Gone(why) => {
                note!("mercury: the connection has ended: {why}");
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
                let arrival = self.arrival.as_mut().filter(|_| self.destination.accepts_pages());
                match arrival {
                    Some(arrival) if matches!(message.word, Word::Final(_)) => {
                        arrival.last = Some(message);
                        None
                    }
                    _ => Some(Event::Heard(message)),
                }
            }
            Frame::Round(number) => {
                self.begin_sync();
                if let Some(arrival) = &mut self.arrival {
                    arrival.round = number;
                    // Settling while the machine still runs keeps the computation of the digest
                    // short at the end.
                    if let Some(intake) = &arrival.intake {
                        intake.ledger().settle();
                    }
                    if number > 0 {
                        let pages = arrival.intake.as_ref().map_or(0, Intake::pages);
                        note!("mercury: round {number}; {pages} pages so far");
                    }
                }
                self.heard = Instant::now();
                None
            }
            Frame::Proof(_) => {
                self.reason = "a proof has arrived on a stream that needs none".into();
                Some(Event::Failed)
            }
            Frame::Pages(pages) => {
                self.begin_sync();
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

    /// Writes chunks of disks.
    fn write_disk(&mut self, chunks: &Chunks) -> Result<()> {
        let is_over = self.arrival.as_ref().is_none_or(|arrival| arrival.last.is_some());
        if is_over || !self.destination.accepts_pages() {
            return Err(Error::fault("chunks of disks have arrived that were not asked for"));
        }
        if let Some(arrival) = &mut self.arrival {
            arrival.has_chunks = true;
        }
        self.spare.write_disk(chunks)
    }

    /// Begins to make a round's chunks last, while the round's pages arrive.
    fn begin_sync(&mut self) {
        if self.arrival.as_mut().is_some_and(|arrival| std::mem::take(&mut arrival.has_chunks)) {
            self.spare.begin_sync();
        }
    }

    fn note_text(&mut self, message: Message, text: Vec<u8>) {
        if message.word == Word::Offer && self.destination.phase().is_none() {
            let offer = Offer::default();
            let arrival = Arrival { offer, intake: None, text, round: 0, last: None, has_chunks: false };
            self.arrival = Some(arrival);
        } else if let Some(arrival) = &mut self.arrival {
            arrival.text = text;
        }
    }

    /// Returns true if the source may open another stream.
    fn awaits_streams(&self) -> bool {
        let intake = self.arrival.as_ref().and_then(|arrival| arrival.intake.as_ref());
        self.destination.accepts_pages() && intake.is_some_and(Intake::awaits_streams)
    }

    /// Accepts a new connection, if one is allowed. Returns an event if another connection has lost
    /// its place by that.
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

    /// Hands a new connection to the intake: it may be another stream of the source.
    fn open_stream(&mut self) {
        let Some((socket, from)) = self.knocking() else { return };
        if let Some(intake) = self.arrival.as_mut().and_then(|arrival| arrival.intake.as_mut()) {
            intake.let_in(&self.receiver, socket, from);
        }
    }

    fn has_free_doorman(&self) -> bool {
        self.doorman.as_ref().is_none_or(|(_, doorman)| doorman.is_finished())
    }

    /// Tells a new peer that another one has its place. The work is done in a thread, so the source
    /// does not wait for it; a further peer does.
    fn turn_away(&mut self) {
        if !self.has_free_doorman() {
            return;
        }
        let Some((socket, from)) = self.knocking() else { return };
        let Ok(kept) = socket.try_clone() else { return };
        let receiver = self.receiver.clone();
        let doorman = thread::Builder::new().spawn(move || {
            let why = match Link::turn_away(&receiver, socket, TAKEN) {
                Ok(()) => TAKEN.to_owned(),
                Err(error) => error.to_string(),
            };
            note!("mercury: {from} was refused: {why}");
        });
        // If no thread starts, the peer is not told.
        self.doorman = doorman.ok().map(|doorman| (kept, doorman));
    }

    /// Returns a peer that wants to connect, if there is one.
    fn knocking(&self) -> Option<(TcpStream, SocketAddr)> {
        let mut door = [PollFd::new(&self.listener, PollFlags::IN)];
        wait_for(&mut door, Duration::ZERO);
        if door[0].revents().is_empty() { None } else { self.listener.accept().ok() }
    }

    /// Accepts a peer that wants to connect, if there is one with the pairing token.
    fn take_link(&mut self) -> bool {
        let Some((socket, from)) = self.knocking() else { return false };
        // A first connection may be silent while the source prepares. A repeated connection has
        // something to say at once.
        let is_free = self.destination.phase().is_none();
        let patience = if is_free { self.patience.running } else { HANDSHAKE };
        let linked = Link::accept(&self.receiver, socket, patience, (!is_free).then_some(TAKEN));
        match linked.map(|mut link| link.learn(self.patience.running).map(|_| link)) {
            // Another source with the token may have no say in what becomes of this one's machine.
            Ok(Ok(link)) if !is_free && link.attempt() != self.destination.attempt() => {
                note!("mercury: {from} was refused: {TAKEN}");
                false
            }
            Ok(Ok(link)) => {
                note!("mercury: {from} is connected");
                self.link = Some(link);
                self.heard = Instant::now();
                true
            }
            Ok(Err(error)) => {
                note!("mercury: {from} was refused: {error}");
                false
            }
            Err(error) => {
                note!("mercury: {from} was refused: {error}");
                false
            }
        }
    }

    /// Reads the source's announcement.
    fn announcement(&self) -> Option<Event> {
        for frame in std::iter::from_fn(|| self.spare.hear()).take(FRAMES) {
            if let Some(message) = self.announcer.hear(Speaker::Source, &frame) {
                return Some(Event::Heard(message));
            }
            // The machine that has arrived says this when its applications go on.
            let said = self.announcer.hear(Speaker::Destination, &frame);
            let has_started = |said: Message| said.word == Word::Started && self.begun == Some(said.attempt);
            if self.is_starting() && said.is_some_and(has_started) {
                return Some(Event::Arrived);
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
            // This environment has no disk: after a restart it knows nothing of the attempt, and
            // tells the source so.
            Action::Record(attempt, verdict) => {
                self.begun = (verdict == Verdict::Starting).then_some(attempt);
                Some(Event::Recorded(attempt, verdict))
            }
            Action::Verify(digest) => Some(self.verify(digest)),
            Action::Release => {
                self.arrival = None;
                self.spare.release()?;
                None
            }
            Action::Start => {
                note!("mercury: going on in the machine that has arrived");
                // From here on a bare destination has no process that could say anything.
                if let Some(link) = &mut self.link {
                    link.sign_of_life();
                }
                match self.spare.go() {
                    Ok(()) => None,
                    Err(error) => {
                        self.reason = error.message;
                        self.begun = None;
                        Some(Event::StartFailed)
                    }
                }
            }
            Action::Tell(advice) => {
                let offer = self.arrival.as_ref().map(|arrival| &arrival.offer);
                note!("mercury: {}", advice_about(advice, offer));
                None
            }
        })
    }

    fn say(&mut self, message: Message) {
        let text = match message.word {
            Word::Refuse | Word::Discarded => std::mem::take(&mut self.reason),
            // The machine finds cards with these addresses after its arrival.
            Word::Accept => serde_json::to_string(&self.spare.cards()).unwrap_or_default(),
            _ => String::new(),
        };
        if matches!(message.word, Word::Refuse | Word::Discarded) {
            let how = if message.word == Word::Refuse { "was refused" } else { "was discarded" };
            note!("mercury: the machine {how}: {text}");
        }
        if let Some(link) = self.link.as_mut().filter(|link| link.attempt() == Some(message.attempt)) {
            // If the connection is gone, the next read reports it.
            let _ = link.say(message.word, text.as_bytes());
        }
        let is_answer = matches!(message.word, Word::Discarded | Word::Lost | Word::Started | Word::Unknown);
        if is_answer {
            // The word is announced as well, in case there is no connection.
            self.spare.announce(&self.announcer.say(Speaker::Destination, message));
        }
    }

    /// Checks if the offered machine fits; if so, memory is ready for it.
    fn check(&mut self) -> Event {
        match self.prepare() {
            Ok(()) => {
                note!("mercury: a machine arrives");
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
        if self.spare.is_over() {
            return Err("its operator has ended the wait".into());
        }
        let offer = Offer::unpack(&arrival.text).map_err(|error| format!("the offer: {error}"))?;
        // The announcements' key must be known from now on, because answers are due even after the
        // machine is discarded.
        let attempt = self.link.as_ref().and_then(Link::attempt).ok_or("the connection is gone")?;
        self.announcer.know(attempt, &offer.secret);
        if !(1..=STREAMS_MAX).contains(&offer.streams) {
            return Err(format!(
                "the machine would arrive by {} streams: 1 to {STREAMS_MAX} are accepted",
                offer.streams
            ));
        }
        self.spare.prepare(&offer)?;
        let expected = ExpectedStreams { attempt, secret: offer.secret, streams: offer.streams };
        let ledger = Ledger::new(offer.memory());
        let intake = Intake::new(expected, self.spare.memory(), ledger, self.patience.running);
        arrival.intake = Some(intake.map_err(|error| error.message)?);
        arrival.offer = offer;
        Ok(())
    }

    /// Loads pages of the first stream.
    fn load(&mut self, pages: &Pages) -> Result<()> {
        let breach = |what: &str| Error::fault(what);
        let arrival = self.arrival.as_ref().filter(|arrival| arrival.last.is_none());
        let intake = arrival.and_then(|arrival| arrival.intake.as_ref());
        match intake.filter(|_| self.destination.accepts_pages()) {
            Some(intake) => intake.load(pages),
            None => Err(breach("pages have arrived that were not asked for")),
        }
    }

    /// Checks the streams other than the first while pages arrive. If one breaks, this is an event.
    /// When all have ended, the last word of the first stream is handled.
    fn poll_streams(&mut self) -> Option<Event> {
        let arrival = self.arrival.as_mut().filter(|_| self.destination.accepts_pages())?;
        let intake = arrival.intake.as_ref()?;
        if intake.was_alive() {
            self.heard = Instant::now();
        }
        let (event, reason) = match (intake.state(), arrival.last) {
            (State::Broken(Broken::Gone(why)), _) => (Event::Disconnected, why),
            (State::Broken(Broken::Breach(why)), _) => (Event::Failed, why),
            (_, None) => return None,
            (State::Open, Some(_)) if intake.awaits_streams() => {
                (Event::Failed, "the source has not opened all of its streams".into())
            }
            (State::Open, Some(_)) => return None,
            (State::Ended(Some(digest)), Some(Message { word, .. })) if word != Word::Final(digest) => {
                (Event::Failed, "the digests of its streams differ".into())
            }
            (State::Ended(_), Some(last)) => return Some(Event::Heard(last)),
        };
        note!("mercury: {reason}");
        self.reason = reason;
        Some(event)
    }

    /// Checks if the whole machine has arrived, and if its disks are as they were at the instant.
    fn verify(&mut self, digest: Digest) -> Event {
        let begun = Instant::now();
        let right = self.is_right(digest);
        let was_slow = begun.elapsed() >= self.patience.frozen / SIGNS;
        let event = match right {
            // A source that has not waited so long has said so, or is gone.
            Ok(()) if was_slow => self.listen().unwrap_or(Event::Verified),
            Ok(()) => Event::Verified,
            Err(reason) => {
                self.reason = reason;
                Event::Failed
            }
        };
        // The source has had to wait for this end.
        self.heard = Instant::now();
        event
    }

    fn is_right(&mut self, digest: Digest) -> Result<(), String> {
        let attempt = match self.destination.phase() {
            Some(Phase::Verifying(_)) => {
                self.link.as_ref().and_then(Link::attempt).ok_or("the connection is gone")?
            }
            _ => return Err("there is nothing to verify".into()),
        };
        let arrival = self.arrival.as_ref().ok_or("nothing has arrived")?;
        let mut ledger = arrival.intake.as_ref().ok_or("nothing has arrived")?.ledger();
        if !ledger.is_complete() {
            return Err("not all of its memory has arrived".into());
        }
        if ledger.digest(attempt) != digest {
            return Err("its memory differs from the data that was sent".into());
        }
        let last = Offer::unpack(&arrival.text).map_err(|error| format!("the last word: {error}"))?;
        if kept(&last.machine) != kept(&arrival.offer.machine)
            || last.machine.cpus != arrival.offer.machine.cpus
        {
            return Err("it is another machine than the offered one".into());
        }
        let known = |offer: &Offer| offer.disks.iter().map(|one| one.disk.clone()).collect::<Vec<_>>();
        if known(&last) != known(&arrival.offer) {
            return Err("its disks are others than the offered ones".into());
        }
        self.spare.describe(&last.machine);
        let spare = &mut *self.spare;
        let complete = || {
            spare.complete_disks(&last.disks, attempt)?;
            Ok(spare.changed_disks(&last.machine.file_systems))
        };
        let changed = with_signs(complete, self.link.as_mut(), self.patience.frozen / SIGNS)?;
        if !changed.is_empty() {
            return Err(format!(
                "the disks here are not as they were at the instant: {}",
                changed.join("; ")
            ));
        }
        note!("mercury: the machine is here: {} of memory", bytes(ledger.len() as u64 * PAGE as u64));
        Ok(())
    }
}

/// Returns the advice for the kind of the source: hardware, or a guest of another host.
fn advice_about(advice: Advice, offer: Option<&Offer>) -> String {
    if offer.is_some_and(|offer| offer.is_guest) { advice.about_guest() } else { advice.to_string() }
}

/// Returns the error of a wait that the operator has ended while a complete machine waited here.
fn was_ended() -> Error {
    Error::new(Exit::Interrupted, "the wait was ended, and the machine that had arrived was discarded")
        .hint("its source goes on by itself, or its console asks; nothing of the machine is left here")
}

/// Advice for the operator of a system in use, after the end of a machine that was started there. A machine
/// that runs at its next place must not be started a second time.
fn after_end(phase: Option<Phase>) -> &'static str {
    if phase == Some(Phase::Running) {
        "the machine that had moved here has ended here. If it has moved on, or was powered off or stopped, \
         nothing is to be done. If it has failed and runs nowhere else, start it again from its disks, as \
         after a power cut"
    } else {
        "the machine was started here, and has ended before it said that it runs: it does not run here any \
         more. If its source still waits, its console says what can be done. If the machine runs nowhere \
         else, start it again from its disks, as after a power cut"
    }
}

/// Does work that a disk may hold up, in a thread. Meanwhile the source gets a sign of life at each interval.
fn with_signs<T: Send>(
    work: impl FnOnce() -> Result<T, String> + Send,
    mut link: Option<&mut Link>,
    interval: Duration,
) -> Result<T, String> {
    let (begun, mut told) = (Instant::now(), Instant::now());
    thread::scope(|scope| {
        let (to, done) = mpsc::channel();
        let spawned = thread::Builder::new().name("disks".into()).spawn_scoped(scope, move || {
            // The receiver waits until this is sent.
            let _ = to.send(work());
        });
        spawned.map_err(|error| format!("no thread can be started for its disks: {error}"))?;
        loop {
            match done.recv_timeout(interval) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("the thread for its disks has failed: this is a bug".into());
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(link) = &mut link {
                        link.sign_of_life();
                    }
                }
            }
            if told.elapsed() > SLOW {
                told = Instant::now();
                note!(
                    "mercury: the machine is here, and its disks have not answered for {} s. If one does not \
                     answer at all, `dmesg` here names it; the source gives up by itself, and goes on",
                    begun.elapsed().as_secs()
                );
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest leaves no tombstone: its host may say more, or nothing does.
    #[test]
    fn the_advice_about_a_silent_guest_names_no_tombstone_that_there_could_be() {
        let offer = |is_guest| Offer { is_guest, ..Offer::default() };
        let text = |offer: &Offer| advice_about(Advice::SourceSilent, Some(offer));
        assert!(text(&offer(false)).contains("its tombstone says `committed`"));
        let guest = text(&offer(true));
        for words in
            ["leaves no tombstone", "mercury guests abandon", "nobody outside has heard", "`discard`"]
        {
            assert!(guest.contains(words), "{guest}");
        }
        assert!(!guest.contains("committed"), "{guest}");
        assert!(advice_about(Advice::Lost, None).contains("restarted"));
    }

    #[test]
    fn a_machine_that_has_run_and_ended_is_not_to_be_started_again() {
        let text = after_end(Some(Phase::Running));
        assert!(text.contains("moved on") && text.contains("nothing is to be done"), "{text}");
        let early = after_end(Some(Phase::Starting));
        assert!(early.contains("source still waits"), "{early}");
        for text in [text, early] {
            assert!(text.contains("runs nowhere else"), "{text}");
            assert!(!text.contains("restarted"), "the host was not: {text}");
        }
    }
}
