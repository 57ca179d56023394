//! The source's end of a move: what [`mercury_migration::protocol::Source`] says is to be done is done here.

use super::{
    FROZEN, RUNNING,
    arrival::Arrival,
    copy::{From, Pass, Proof, Reading, Stopped, Ways, pass},
    course::{self, Course},
    doubt::{self, Doubt, Hails, Silence},
    lane::{Lane, Whose},
    link::Link,
    log::{Log, prepare},
    marks::Marks,
    mirror::{How, Mirror},
    no_way_back,
    offer::Offer,
    operator::Operator,
    pause::{self, Pause},
    report::{After, Report, Told, how_far},
};
use crate::{
    args::MigrateArgs,
    checkpoint::{
        self,
        applications::{Brake, Frozen},
        describe,
        disks::{self, Mounted, Still},
        fence,
        guard::{Guard, Undo},
    },
    commands::Say,
    device::{Cursor, Device},
    error::{Error, Result},
    ethernet::{self, Card},
    exit::Exit,
    interrupt::Deferred,
    output::Format,
    progress,
    sysroot::Sysroot,
};
use mercury_abi::ioctl::{MERCURY_SNAPSHOT_HASH, MERCURY_SNAPSHOT_TRACK, MERCURY_TAKE_USED};
use mercury_migration::{
    protocol::{
        Attempt, Mark, Message, Patience, Source, Word,
        source::{Action, Event, State},
    },
    rounds::{Limits, Next, Otherwise},
    session::Line,
    wire::{Ledger, PAGE},
};
use std::{
    collections::VecDeque,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

/// Who is told how far a pass is, and says whether to go on.
type Watch<'a> = dyn FnMut(&Pass, &mut Link) -> bool + 'a;

/// The pool has room for what the small kernel of the other end occupies, in MiB.
const POOL_LEAST: u64 = 192;
/// How often progress is shown.
const INTERVAL: Duration = Duration::from_millis(500);
/// How long a connection is kept after the commit.
const LINK_PATIENCE: Duration = Duration::from_secs(5);

/// How long what was written may take to be on its disks, or its servers, before anything stands still.
const WRITE_PATIENCE: Duration = Duration::from_secs(300);
/// The other end takes longer silence than this for an end.
const SIGN_OF_LIFE: Duration = Duration::from_secs(20);

/// By how many streams pages go.
fn streams(args: &MigrateArgs) -> u32 {
    const USUAL_MOST: usize = 4;
    let usual = thread::available_parallelism().map_or(1, usize::from).min(USUAL_MOST);
    args.streams.unwrap_or(usual as u32)
}

/// What stands still, until it is dropped.
#[derive(Debug, Default)]
pub struct Held {
    // In the order in which they go on.
    _still: Option<Still>,
    _frozen: Option<Frozen>,
}

/// How a move has ended.
#[derive(Debug)]
pub enum Outcome {
    /// This is the machine that has arrived.
    Arrived(Arrival),
    /// It runs elsewhere.
    GivenUp,
    /// It goes on here.
    Resumed,
}

/// What is left of a mover.
#[derive(Debug)]
pub struct Rest {
    /// Why the machine has not moved, if it has not.
    pub failure: Option<Error>,
    /// What still stands still.
    pub held: Held,
    /// Whoever is at the console.
    pub operator: Operator,
    /// Whether standard output can be written to when everything stands still.
    pub may_write: bool,
    /// Where a test wants it to hold still yet.
    pub pause: Pause,
}

/// What an action comes to.
enum Step {
    None,
    Event(Event),
    Arrived,
}

/// The source, and what it has.
pub struct Mover<'a> {
    args: &'a MigrateArgs,
    say: Say<'a>,
    sysroot: &'a Sysroot,
    deferred: &'a Deferred,
    device: &'a Device,
    guard: &'a mut Guard,
    to: SocketAddr,
    line: Line,
    link: Option<Link>,
    /// The streams besides the first.
    lanes: Vec<Lane>,
    hails: Hails,
    attempt: Attempt,
    source: Source,
    begin: Vec<Action>,
    patience: Patience,
    pool: u64,
    /// The snapshot's.
    flags: u64,
    proof: Option<Proof>,
    log: Log,
    mounts: Vec<Mounted>,
    /// How long the last pass over what was written to disks took.
    mirrored: Duration,
    offer: Offer,
    mirror: Mirror,
    ledger: Ledger,
    held: Held,
    /// Where the load outruns the connection.
    brake: Option<Brake>,
    failure: Option<Error>,
    is_cancelled: bool,
    committed: Option<Instant>,
    /// The other machine's cards, which this one's will be.
    theirs: Vec<Card>,
    silence: Silence,
    /// Where a mark outlasts a power cut, unless it is to do without.
    marks: Option<Marks>,
    heard: Instant,
    operator: Operator,
    /// Whether standard output can be written to when everything stands still.
    may_write: bool,
    workers: usize,
    begun: Instant,
    stopped: Option<Instant>,
    report: Report,
    pause: Pause,
}

impl<'a> Mover<'a> {
    /// Makes everything ready; nothing stands still yet.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new(
        args: &'a MigrateArgs,
        say: Say<'a>,
        sysroot: &'a Sysroot,
        deferred: &'a Deferred,
        device: &'a Device,
        guard: &'a mut Guard,
        (to, line, mut link): (SocketAddr, Line, Link),
    ) -> Result<Self> {
        let failed = |what: &str, error: std::io::Error| {
            Error::new(Exit::Failed, format!("{what}: {error}")).hint("nothing was changed")
        };
        let attempt = Attempt(checkpoint::random()?);
        let secret = checkpoint::random()?;
        let hails = Hails::open(&line, attempt, &secret, ethernet::cards(sysroot))
            .map_err(|error| failed("frames on the network", error))?;
        let mirror = Mirror::open(&args.with_disk, sysroot)?;
        let pool = checkpoint::pool_pages(args.pool, sysroot);
        let least = POOL_LEAST + mirror.memory_there();
        let pool = if args.pool.is_some() { pool } else { pool.max(least << 8) };
        let proof = args.verify_instant.then(Proof::default);
        let hashes = if proof.is_some() { MERCURY_SNAPSHOT_HASH } else { 0 };
        let log = prepare(device, pool, args.hash, hashes)?;
        let mounts = disks::all(sysroot)?;
        let mut machine = describe::describe(sysroot);
        describe::add_restart(&mut machine, &device.snapshot_machine()?);
        let compared = disks::to_be_compared(&mounts, args.network_disks, sysroot);
        machine.file_systems = compared.iter().map(disks::name).collect();
        let disks = mirror.offered(&mounts, sysroot);
        let offer = Offer {
            machine,
            cpus: sysroot.online_cpus().iter().count(),
            disks,
            hails: secret,
            streams: streams(args),
        };
        let ledger = Ledger::new(offer.memory());
        link.begin(attempt).map_err(|error| failed("the connection", error))?;
        let (source, begin) = Source::begin(attempt);
        let mut report = Report::new(attempt.to_string(), offer.machine.kept_pages() * 4096);
        report.disks = mirror.bytes();
        Ok(Self {
            link: Some(link),
            lanes: Vec::new(),
            patience: Patience { running: RUNNING, frozen: FROZEN, doubt: doubt::PATIENCE, hold: None },
            held: Held::default(),
            brake: None,
            failure: None,
            is_cancelled: false,
            committed: None,
            theirs: Vec::new(),
            silence: Silence::prepare(),
            marks: None,
            heard: Instant::now(),
            operator: Operator::at_console(),
            may_write: checkpoint::may_be_written(sysroot),
            workers: thread::available_parallelism().map_or(1, usize::from),
            begun: Instant::now(),
            stopped: None,
            args,
            say,
            sysroot,
            deferred,
            device,
            guard,
            to,
            line,
            hails,
            attempt,
            source,
            begin,
            pool,
            flags: hashes | if matches!(log, Log::Prepared) { MERCURY_SNAPSHOT_TRACK } else { 0 },
            proof,
            log,
            mounts,
            mirrored: Duration::ZERO,
            offer,
            mirror,
            ledger,
            report,
            pause: Pause::at(args.pause_at.as_deref()),
        })
    }

    /// Moves the machine, as far as that goes.
    ///
    /// # Errors
    /// If this end cannot do what it has to, before anything stands still.
    pub fn run(&mut self) -> Result<Outcome> {
        let mut todo = VecDeque::from(std::mem::take(&mut self.begin));
        self.pause(self.source.state());
        loop {
            while let Some(action) = todo.pop_front() {
                match self.perform(action) {
                    Step::None => {}
                    Step::Event(event) => todo.extend(self.happened(event)),
                    Step::Arrived => return Ok(Outcome::Arrived(self.arrive())),
                }
            }
            match self.source.state() {
                State::Resumed => return Ok(Outcome::Resumed),
                State::GivenUp => return Ok(Outcome::GivenUp),
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

    /// Holds still here for a while, if a test wants that.
    fn pause(&mut self, step: impl std::fmt::Debug) {
        if let Some(text) = self.pause.reached(step) {
            self.operator.tell(&text);
            pause::hold(|| self.guard.hear());
        }
    }

    /// Marks what is to outlast a power cut.
    pub fn keep_marks(&mut self, marks: Option<Marks>) {
        self.marks = marks.map(|marks| marks.of(self.attempt));
    }

    /// What it has come to.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report.clone()
    }

    /// Why it has not moved, and what still stands still.
    #[must_use]
    pub fn into_rest(self) -> Rest {
        let Self { failure, held, operator, may_write, pause, .. } = self;
        Rest { failure, held, operator, may_write, pause }
    }

    fn is_in_doubt(&self) -> bool {
        self.source.may_decide()
    }

    /// Waits until something has happened.
    fn next_event(&mut self) -> Event {
        self.heard = Instant::now();
        loop {
            self.guard.hear();
            if self.is_wanted_to_stop() {
                return Event::Cancel;
            }
            if let Some(event) = self.look_around() {
                return event;
            }
            if let Some(mut link) = self.link.take() {
                match link.hear_message(Duration::from_millis(20)) {
                    Ok(None) => self.link = Some(link),
                    Ok(Some((message, text))) => {
                        self.link = Some(link);
                        return self.understand(message, &text);
                    }
                    Err(why) => return self.is_gone(&why),
                }
            } else {
                thread::sleep(Duration::from_millis(20));
            }
            if self.source.patience(&self.patience).is_some_and(|limit| self.heard.elapsed() > limit) {
                let silent = Error::new(Exit::Failed, "the other machine does not answer");
                self.failure.get_or_insert(silent.hint("look at its console"));
                return Event::TimedOut;
            }
        }
    }

    /// Ctrl-C, once.
    fn is_wanted_to_stop(&mut self) -> bool {
        if self.is_cancelled || !self.deferred.requested() {
            return false;
        }
        self.is_cancelled = true;
        let why = Error::new(Exit::Interrupted, "interrupted: the machine has not moved, and runs on");
        self.failure.get_or_insert(why);
        true
    }

    /// Where no connection need be: what was said to all, and what the operator says.
    fn look_around(&mut self) -> Option<Event> {
        if !self.is_in_doubt() {
            return None;
        }
        // A connection that is not answered makes the kernel ask all for the other end, and so say where it is itself.
        if self.committed.is_some_and(|since| since.elapsed() > LINK_PATIENCE)
            && let Some(link) = self.link.take()
        {
            link.abandon();
        }
        if let Some(message) = self.hails.hear() {
            return Some(Event::Heard(message));
        }
        if matches!(self.source.state(), State::InDoubt(..)) {
            self.hails.say_again(Word::Commit);
        }
        doubt::decision(&mut self.operator).map(Event::Operator)
    }

    fn understand(&mut self, message: Message, text: &[u8]) -> Event {
        let text = String::from_utf8_lossy(text);
        let failure = match message.word {
            Word::Refuse => Some(
                Error::new(Exit::Impossible, format!("the other machine does not take this one: {text}"))
                    .hint("this machine goes on; the other one must be equal to it"),
            ),
            Word::Discarded => Some(
                Error::new(Exit::Failed, format!("the other machine has given up: {text}"))
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

    fn is_gone(&mut self, why: &str) -> Event {
        let gone = Error::new(Exit::Failed, format!("the connection has ended: {why}"));
        self.failure.get_or_insert(gone.hint("this machine goes on as if nothing had been tried"));
        self.link = None;
        self.lanes.clear();
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
            Action::Record(mark) => self.record(mark),
            // To ask for a connection is to say to all who has this machine's address, which may be another one's by now.
            // What has to be said is hailed.
            Action::Connect => Step::None,
            Action::Resume => {
                self.resume();
                Step::None
            }
            // Only after a restart, which knows nothing of the move.
            Action::Boot => Step::None,
            Action::GiveUp => {
                let after = self.report.after.get_or_insert_default();
                after.downtime_us = self.stopped.map_or(0.0, |stopped| stopped.elapsed().as_secs_f64() * 1e6);
                after.seconds = self.begun.elapsed().as_secs_f64();
                Step::None
            }
            Action::Tell(advice) => {
                self.operator.tell(&advice.to_string());
                if self.may_write && self.say.format == Format::Json {
                    self.tell(&Told::Doubt { advice: advice.to_string() });
                }
                Step::None
            }
        }
    }

    /// Has a mark written that outlasts a power cut.
    fn record(&mut self, mark: Mark) -> Step {
        if let Err(error) = self.try_record(mark) {
            self.operator.tell(&error.to_string());
            self.failure.get_or_insert(error);
            // What cannot be taken back is tried again when time is up: the other end, and the operator, are listened to meanwhile.
            return match mark {
                Mark::Cleared => Step::None,
                _ => Step::Event(Event::RecordFailed(self.attempt, mark)),
            };
        }
        if mark == Mark::Committed {
            self.committed = Some(Instant::now());
        }
        Step::Event(Event::Recorded(self.attempt, mark))
    }

    fn try_record(&mut self, mark: Mark) -> Result<()> {
        if mark == Mark::Committed {
            // From here on nobody may set the machine going, nor let it be heard, who does not know how the move has ended: this
            // process, and if it is killed, its guard.
            self.commit()?;
        }
        let Some(marks) = &mut self.marks else { return Ok(()) };
        marks.write(mark).map_err(|why| {
            Error::new(Exit::Failed, format!("the mark of this move cannot be written ({mark:?}): {why}"))
                .hint("`mercury mark` shows what is there; while it is there, this machine does not start by itself")
        })
    }

    fn commit(&mut self) -> Result<()> {
        // All that they carried is there.
        self.lanes.clear();
        self.device.fence_stays()?;
        no_way_back::begin(self.operator.console());
        let doubt = Doubt {
            line: self.line.to_string(),
            hails: self.offer.hails,
            attempt: self.attempt.0,
            cards: self.hails.cards().to_vec(),
            mark: self.marks.as_ref().map(Marks::standing),
        };
        let told =
            self.guard.will(&Undo::Open).and_then(|()| self.guard.will(&Undo::Decide(Box::new(doubt))));
        told.map_err(|error| Error::new(Exit::Failed, format!("the guard is gone: {error}")))?;
        self.silence.keep();
        Ok(())
    }

    /// Goes on as if nothing had been tried.
    fn resume(&mut self) {
        self.lanes.clear();
        no_way_back::end();
        self.guard.is_decided();
        // Who was silent must not be so when applications run.
        let _ = self.device.fence_down();
        self.silence.end();
        self.held = Held::default();
        self.brake = None;
        self.guard.is_released();
        self.mirror.unwatch(self.device);
        // One that is over, or that was only prepared, goes with the device.
        let _ = self.device.snapshot_end();
    }

    fn send(&mut self, word: Word) -> Step {
        if self.is_in_doubt() && matches!(word, Word::Commit | Word::Cancel) {
            self.hails.say(word);
        }
        let text = match word {
            Word::Offer | Word::Final(_) => self.offer.pack(),
            _ => Ok(Vec::new()),
        };
        let Some(link) = self.link.as_mut() else { return Step::None };
        let ended = match word {
            Word::Final(_) => self.lanes.iter().try_for_each(|lane| lane.end(word)),
            _ => Ok(()),
        };
        match ended.and(text).and_then(|text| link.say(word, &text)) {
            Ok(()) => Step::None,
            Err(error) => Step::Event(self.is_gone(&error.to_string())),
        }
    }

    /// The streams besides the first, now that the other end wants pages.
    fn open_lanes(&mut self) -> Result<()> {
        let Self { to, line, attempt, offer, args, .. } = self;
        let whose = Whose { to: *to, line, attempt: *attempt, secret: &offer.hails };
        let control = args.congestion_control.as_deref();
        let open = |stream| Lane::open(&whose, stream, RUNNING, control);
        self.lanes = (1..offer.streams).map(open).collect::<Result<_>>()?;
        Ok(())
    }

    /// Rounds, until the machine is to be stopped.
    fn copy_rounds(&mut self) -> Event {
        if let Err(error) = self.open_lanes() {
            return self.fail(error);
        }
        let limits = course::limits(self.args);
        let mut course = Course::new(limits);
        self.tell(&Told::Accepted { memory: self.report.memory });
        for number in 0..u64::from(limits.max_rounds) {
            let done = match self.round(number, &limits) {
                Ok(done) => done,
                Err(event) => return event,
            };
            // While everything runs: the digest is short at the end.
            self.ledger.settle();
            self.report.rounds = number + 1;
            self.report.pages[0] += done.sent;
            self.report.bytes[0] += done.bytes;
            let outlook = course.after(&done, matches!(self.log, Log::Live), self.mirrored);
            self.tell(&Told::round(number, &done, &outlook));
            let throttle_percent = outlook.throttle_percent();
            match outlook.next {
                Next::Copy { .. } => {
                    if let Err(error) = self.hold_back(throttle_percent) {
                        return self.fail(error);
                    }
                }
                Next::Stop { .. } => return Event::StopNow,
                Next::GiveUp { downtime } => return self.fail(course.too_long(downtime)),
            }
        }
        match limits.otherwise {
            Otherwise::Stop => Event::StopNow,
            // No arguments lead here; whoever wants it given up is not to be moved.
            Otherwise::GiveUp => self.fail(Error::new(Exit::Failed, "no downtime could be expected")),
        }
    }

    /// Applications run for a part of the time only.
    fn hold_back(&mut self, percent: u8) -> Result<()> {
        if percent > 0 && self.brake.is_none() {
            self.brake = Some(Brake::new(self.guard)?);
        }
        if let Some(brake) = &self.brake {
            brake.set(percent);
        }
        Ok(())
    }

    fn round(&mut self, number: u64, limits: &Limits) -> std::result::Result<Pass, Event> {
        if let Some(link) = self.link.as_mut()
            && let Err(error) = link.round(number)
        {
            return Err(self.is_gone(&error.to_string()));
        }
        self.mirror_round(number, limits)?;
        if number == 0 {
            self.log.begin(self.device);
        }
        let only = if number == 0 { 0 } else { self.log.collect(self.device) };
        self.pass(From::Now, only, &format!("round {number}"), limits)
    }

    /// Disks go before memory: sending them takes long, and what has to be read again of them at the end is little.
    fn mirror_round(&mut self, number: u64, limits: &Limits) -> std::result::Result<(), Event> {
        if self.mirror.is_empty() {
            return Ok(());
        }
        if number == 0 {
            self.mirror.watch(self.device).map_err(|error| self.fail(error))?;
        } else {
            // What is only in memory of what was written to files would be written at the last moment.
            self.guard.hear_during(rustix::fs::sync);
        }
        let done = self.mirror_pass(From::Now, &format!("disks, round {number}"), limits)?;
        self.mirrored = if number == 0 { Duration::ZERO } else { done.took };
        let told = Told::Mirrored {
            round: number,
            read: done.looked * PAGE as u64,
            changed: done.sent * PAGE as u64,
            bytes: done.bytes,
            seconds: done.took.as_secs_f64(),
        };
        self.tell(&told);
        Ok(())
    }

    /// One pass over what may have been written to disks; at the end until nothing has; otherwise what has happened.
    fn mirror_pass(&mut self, from: From, name: &str, limits: &Limits) -> std::result::Result<Pass, Event> {
        let total = self.mirror.bytes().div_ceil(PAGE as u64);
        let mut mirror = std::mem::take(&mut self.mirror);
        let how =
            How { device: self.device, level: self.args.level, workers: self.workers, from, limits: *limits };
        let passed = self.watched(from, name, total, |Ways { link, .. }, watch| match from {
            From::Now => mirror.pass(&how, link, watch),
            From::Instant => mirror.finish(&how, link, watch),
        });
        self.mirror = mirror;
        if let Ok(done) = &passed {
            self.report.disk_bytes += done.bytes;
        }
        passed
    }

    /// What was written to disks until their file systems were held still; nobody writes to them any more.
    fn mirror_the_rest(&mut self) -> std::result::Result<(), Event> {
        if self.mirror.is_empty() {
            return Ok(());
        }
        if self.report.rounds == 0 {
            self.mirror.watch(self.device).map_err(|error| self.fail(error))?;
        }
        let limits = Limits { max_bytes_per_second: None, ..course::limits(self.args) };
        self.mirror_pass(From::Instant, "the rest of the disks", &limits).map(drop)
    }

    /// Takes the frames that were not in the log as well, and counts those that it should have had.
    fn verify_log(&mut self, limits: &Limits) -> std::result::Result<(), Event> {
        let rest = self.pass(From::Instant, MERCURY_TAKE_USED, "the rest, to compare", limits)?;
        self.report.missed = Some(rest.changed);
        self.operator.tell(&format!(
            "{} pages were not in the log of writes, of which {} should have been",
            rest.looked, rest.changed
        ));
        Ok(())
    }

    /// What was read is what it was at the instant, or the machine does not move.
    fn prove(&mut self) -> Result<()> {
        let Some((compared, wrong)) = self.proof.as_ref().map(Proof::found) else { return Ok(()) };
        let said = format!(
            "{compared} pages were compared with the hypervisor's hashes of the instant, of which {wrong} are not what they were"
        );
        self.operator.tell(&said);
        if wrong == 0 { Ok(()) } else { Err(Error::new(Exit::Failed, said).hint("the machine runs on")) }
    }

    /// One pass over memory; otherwise what has happened.
    fn pass(
        &mut self,
        from: From,
        only: u64,
        name: &str,
        limits: &Limits,
    ) -> std::result::Result<Pass, Event> {
        let (device, kept_proof) = (self.device, self.proof.take());
        let proof = kept_proof.as_ref();
        let read = |cursor: &mut Cursor, count| match from {
            From::Now => device.snapshot_look_some(cursor, count, only),
            From::Instant => match proof {
                None => device.snapshot_take_some(cursor, count, only),
                Some(proof) => {
                    let (frames, hashes) = device.snapshot_take_hashed(cursor, count, only)?;
                    proof.compare(&frames, &hashes);
                    Ok(frames)
                }
            },
        };
        let reading = Reading { read: &read, from, level: self.args.level, workers: self.workers };
        let total = self.offer.machine.kept_pages();
        let mut ledger = std::mem::replace(&mut self.ledger, Ledger::new(Vec::new()));
        let passed =
            self.watched(from, name, total, |ways, watch| pass(&reading, &mut ledger, limits, ways, watch));
        self.ledger = ledger;
        self.proof = kept_proof;
        passed
    }

    /// A pass over `total` pages, which is shown, and ends when somebody wants it.
    fn watched(
        &mut self,
        from: From,
        name: &str,
        total: u64,
        pass: impl FnOnce(Ways<'_>, &mut Watch<'_>) -> std::result::Result<Pass, Stopped>,
    ) -> std::result::Result<Pass, Event> {
        let Some(mut link) = self.link.take() else { return Err(self.is_gone("it is not there")) };
        let (begun, mut shown) = (Instant::now(), Instant::now());
        // Whoever shows a terminal's lines may stand still.
        let is_shown = from == From::Now && self.say.format == Format::Text;
        let (deferred, guard) = (self.deferred, &mut *self.guard);
        let was_cancelled = self.is_cancelled;
        let mut watch = |pass: &Pass, link: &mut Link| {
            guard.hear();
            if is_shown && shown.elapsed() > INTERVAL {
                shown = Instant::now();
                progress::line(&how_far(name, pass, total, begun.elapsed().as_secs_f64()));
            }
            (was_cancelled || !deferred.requested()) && !link.is_readable()
        };
        let passed = pass(Ways { link: &mut link, lanes: &self.lanes }, &mut watch);
        if is_shown {
            progress::line("");
        }
        match passed {
            Ok(pass) => {
                self.link = Some(link);
                Ok(pass)
            }
            Err(Stopped::Failed(error)) => {
                self.link = Some(link);
                Err(self.fail(error))
            }
            Err(Stopped::Gone(why)) => Err(self.is_gone(&why)),
            Err(Stopped::Wanted) => {
                self.link = Some(link);
                Err(self.next_event())
            }
        }
    }

    fn tell(&self, told: &Told) {
        self.say.one_of_many(told);
    }

    /// What was written is on its disks, so that there is little to write when everything stands still; or what has happened
    /// meanwhile. A disk or a server that does not answer is waited for by nobody else but this command, and not for ever.
    fn write_back(&mut self) -> Result<Option<Event>> {
        let written = thread::spawn(rustix::fs::sync);
        let (end, mut said) = (Instant::now() + WRITE_PATIENCE, Instant::now());
        let mut rounds = self.report.rounds..;
        while !written.is_finished() {
            self.guard.hear();
            if self.is_wanted_to_stop() {
                return Ok(Some(Event::Cancel));
            }
            let Some(link) = self.link.as_mut() else { return Ok(Some(Event::Disconnected)) };
            if link.is_readable() {
                return Ok(Some(self.next_event()));
            }
            if said.elapsed() > SIGN_OF_LIFE
                && let Some(number) = rounds.next()
            {
                said = Instant::now();
                if let Err(error) = link.round(number).and_then(|()| link.flush()) {
                    return Ok(Some(self.is_gone(&error.to_string())));
                }
            }
            if Instant::now() > end {
                let text = "what was written to files does not come to their disks or servers";
                return Err(Error::new(Exit::Failed, text)
                    .hint("find out which one does not answer: a process in state D waits for it (ps, /proc/PID/stack)"));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(None)
    }

    /// Everything stands still; the instant; and what is not as it was sent goes over.
    fn stop_and_copy(&mut self) -> Result<Step> {
        self.tell(&Told::Stops);
        if let Some(event) = self.write_back()? {
            return Ok(Step::Event(event));
        }
        // Nothing of this program comes from a disk any more, which may be fenced off.
        rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT)
            .map_err(|error| Error::new(Exit::Failed, format!("memory could not be locked: {error}")))?;
        let peer: fence::Peer = self.to.into();
        self.device.fence(&[peer.into()])?;
        let begun = Instant::now();
        self.stopped = Some(begun);
        let frozen = match self.brake.take() {
            Some(brake) => brake.hold(self.guard)?,
            None => Frozen::hold(self.guard, &[])?,
        };
        // What was there when the move began may have changed.
        let mounts = disks::all(self.sysroot)?;
        if mounts != self.mounts {
            return Err(Error::new(Exit::Failed, "file systems were mounted or unmounted meanwhile")
                .hint("try again"));
        }
        self.held = Held { _still: Some(Still::hold(&mounts, self.guard)?), _frozen: Some(frozen) };
        if let Err(event) = self.mirror_the_rest() {
            return Ok(Step::Event(event));
        }
        let compared = disks::to_be_compared(&mounts, self.args.network_disks, self.sysroot);
        self.offer.machine.file_systems = self.guard.hear_during(|| disks::describe_all(&compared));
        checkpoint::refuse_swap(self.sysroot)?;
        self.guard.hear();
        let failures = checkpoint::quiesce_failures(self.sysroot);
        let begin = self
            .device
            .snapshot_begin(self.pool, self.flags)
            .map_err(|error| checkpoint::name_culprit(error, failures, self.sysroot))?;
        if begin.restored != 0 {
            return Ok(Step::Arrived);
        }
        self.mirror.is_still(self.device, self.sysroot)?;
        for (disk, digest) in self.offer.disks.iter_mut().zip(self.mirror.digests(self.attempt)) {
            disk.digest = digest;
        }
        let quiesce_us = begun.elapsed().as_secs_f64() * 1e6;
        self.pause("Instant");
        if let Some(link) = &self.link {
            link.be_patient(FROZEN);
        }
        self.lanes.iter().for_each(|lane| lane.be_patient(FROZEN));
        let last = Instant::now();
        let limits = Limits { max_bytes_per_second: None, ..course::limits(self.args) };
        let only = self.log.collect(self.device);
        let found_by = self.log.found_by();
        let done = match self.pass(From::Instant, only, "the last pages", &limits) {
            Ok(done) => done,
            Err(event) => return Ok(Step::Event(event)),
        };
        let last_took = last.elapsed();
        if (self.args.verify_log || self.proof.is_some())
            && only != 0
            && let Err(event) = self.verify_log(&limits)
        {
            return Ok(Step::Event(event));
        }
        self.prove()?;
        // Only now it is known that all was as at the instant.
        self.device.snapshot_end()?;
        if !self.ledger.is_complete() {
            return Err(Error::new(Exit::Failed, "not all of memory could be read").hint("try again"));
        }
        let last_us = last_took.as_secs_f64() * 1e6;
        self.report.after =
            Some(After { found_by, looked: done.looked, quiesce_us, last_us, ..After::default() });
        self.report.pages[1] = done.sent;
        self.report.bytes[1] = done.bytes;
        Ok(Step::Event(Event::Streamed(self.ledger.digest(self.attempt))))
    }

    /// This machine has arrived: its connection was another one's.
    fn arrive(&mut self) -> Arrival {
        if let Some(link) = self.link.take() {
            link.abandon();
        }
        self.mirror.unwatch(self.device);
        self.lanes.clear();
        self.report.arrive();
        Arrival {
            line: self.line.to_string(),
            hails: self.offer.hails,
            attempt: self.attempt.0,
            cards: self.hails.cards().to_vec(),
            theirs: std::mem::take(&mut self.theirs),
        }
    }
}
