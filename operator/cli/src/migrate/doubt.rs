//! A source in doubt: it has said `Commit`, and does not know yet whether it runs elsewhere. It says so to all, until it is
//! answered or its operator decides. `mercury migrate` does ([`super::mover`]); if it does not live to, its guard asks on
//! ([`Doubt::settle`]), and does what is to be done then.

use super::{
    marks::{Folders, Marks, Standing},
    operator::Operator,
};
use crate::{
    device::{Access, Device},
    ethernet::{Card, packets::Packets},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_migration::{
    hail::{ETHER_TYPE, Hailer, Secret, Speaker},
    protocol::{
        Attempt, Mark, Message, Source, Word,
        source::{Action, Decision, Event, Memory, State},
    },
    session::Line,
};
use rustix::fs::{CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    thread,
    time::{Duration, Instant},
};

/// How long an answer may take before the operator is told. A large machine with many devices takes a while to start.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries to be heard, once nothing else can be done.
const AGAIN: Duration = Duration::from_millis(500);
/// How long the other end is told that it is over, if it does not answer.
const CALLING_OFF: Duration = Duration::from_secs(5);
/// How long the driver may be busy with the end of the process that was killed.
const DRIVER_PATIENCE: Duration = Duration::from_secs(60);

/// Who carries frames to all.
pub trait Air: std::fmt::Debug {
    /// Says one by a card.
    fn say(&self, card: &Card, frame: &[u8]);

    /// One that somebody has said.
    fn hear(&self) -> Option<Vec<u8>>;
}

impl Air for Packets {
    fn say(&self, card: &Card, frame: &[u8]) {
        // What is not heard is said again.
        let _ = Self::say(self, card, frame);
    }

    fn hear(&self) -> Option<Vec<u8>> {
        Self::hear(self)
    }
}

/// What is said to all, and what the other end has said to all: what has arrived cannot be told otherwise.
#[derive(Debug)]
pub struct Hails {
    hailer: Hailer,
    air: Box<dyn Air>,
    cards: Vec<Card>,
    attempt: Attempt,
    said: Instant,
}

impl Hails {
    /// For an attempt with this secret, by all cards that are up.
    ///
    /// # Errors
    /// If the kernel opens no socket for it.
    pub fn open(line: &Line, attempt: Attempt, secret: &Secret, cards: Vec<Card>) -> io::Result<Self> {
        Ok(Self::by(Box::new(Packets::open(ETHER_TYPE)?), line, attempt, secret, cards))
    }

    /// The same, by whoever carries them.
    #[must_use]
    pub fn by(air: Box<dyn Air>, line: &Line, attempt: Attempt, secret: &Secret, cards: Vec<Card>) -> Self {
        let mut hailer = Hailer::new(line);
        hailer.know(attempt, secret);
        Self { hailer, air, cards, attempt, said: Instant::now() }
    }

    /// This machine's cards.
    #[must_use]
    pub fn cards(&self) -> &[Card] {
        &self.cards
    }

    /// Says it to all.
    pub fn say(&mut self, word: Word) {
        self.said = Instant::now();
        let message = Message { attempt: self.attempt, word };
        // One that was restarted cannot understand the first, and must be able to say that it knows nothing.
        let frames = [
            self.hailer.say(Speaker::Source, message),
            self.hailer.say_to_who_forgot(Speaker::Source, message),
        ];
        for card in self.cards.iter().filter(|card| card.up) {
            for frame in &frames {
                self.air.say(card, frame);
            }
        }
    }

    /// Says it again, if that was not done just now.
    pub fn say_again(&mut self, word: Word) {
        if self.said.elapsed() > AGAIN {
            self.say(word);
        }
    }

    /// What the other end has said, if it has.
    #[must_use]
    pub fn hear(&self) -> Option<Message> {
        while let Some(frame) = self.air.hear() {
            if let Some(message) = self.hailer.hear(Speaker::Destination, &frame) {
                return Some(message);
            }
        }
        None
    }
}

/// What the operator at the console has decided, if that.
pub fn decision(operator: &mut Operator) -> Option<Decision> {
    operator
        .word(&["resume", "abandon"])
        .map(|word| if word == "resume" { Decision::Resume } else { Decision::Abandon })
}

/// From the commit on this machine does not say that it has its addresses: another one may have them.
#[derive(Debug)]
pub struct Silence {
    /// A setting of the kernel's, opened while names can be looked up.
    file: Option<File>,
    before: Vec<u8>,
}

impl Silence {
    const SETTING: &str = "/proc/sys/net/ipv4/conf/all/arp_ignore";
    /// No answer for any address.
    const NOTHING: &[u8] = b"8";

    /// Has all that it needs open.
    #[must_use]
    pub fn prepare() -> Self {
        let before = std::fs::read(Self::SETTING).unwrap_or_else(|_| b"0".to_vec());
        Self { file: File::options().write(true).open(Self::SETTING).ok(), before }
    }

    fn set(&self, value: &[u8]) {
        if let Some(file) = &self.file {
            // Where ARP cannot be kept quiet, neighbours may be led astray until this machine is off.
            let _ = file.write_at(value, 0);
        }
    }

    /// Begins.
    pub fn keep(&self) {
        self.set(Self::NOTHING);
    }

    /// It is as it was.
    pub fn end(&self) {
        self.set(&self.before);
    }
}

/// What a guard needs of a machine that stands still: where the root is another machine's, no name can be looked up any more.
#[derive(Debug)]
pub struct Reach {
    devices: Option<OwnedFd>,
    folders: Folders,
    silence: Silence,
}

impl Reach {
    /// Opens it, while everything runs.
    #[must_use]
    pub fn open() -> Self {
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let devices = rustix::fs::openat(CWD, "/dev", flags, Mode::empty()).ok();
        Self { devices, folders: Folders::open(&Sysroot::default()), silence: Silence::prepare() }
    }

    fn marks(&self, standing: &Standing) -> io::Result<Marks> {
        standing.open(&self.folders, self.devices.as_ref())
    }

    fn operator(&self) -> Operator {
        self.devices.as_ref().map_or_else(Operator::default, Operator::at_console_in)
    }

    /// Takes the fence away that stays, and has this machine answer for its addresses again.
    pub fn open_fence(&self) {
        self.silence.end();
        let Some(devices) = &self.devices else { return };
        let end = Instant::now() + DRIVER_PATIENCE;
        let mut device = Device::open_in(devices, Access::Control);
        while device.as_ref().is_err_and(|error| error.exit == Exit::Busy) && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
            device = Device::open_in(devices, Access::Control);
        }
        if let Err(error) = device.and_then(|device| device.fence_down()) {
            eprintln!("mercury: the network stays fenced off: {error}");
        }
    }
}

/// How a doubt ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The machine goes on here.
    GoesOn,
    /// It runs elsewhere.
    Elsewhere,
}

/// All that somebody else has to know to ask on.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doubt {
    /// The receiver's line.
    pub line: String,
    /// What went with the offer.
    pub hails: Secret,
    /// The attempt's name.
    pub attempt: [u8; 16],
    /// This machine's cards.
    pub cards: Vec<Card>,
    /// Its mark, if it has one that outlasts a power cut.
    pub mark: Option<Standing>,
}

// The line is a secret.
impl std::fmt::Debug for Doubt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Doubt").field("attempt", &Attempt(self.attempt)).finish_non_exhaustive()
    }
}

impl Doubt {
    /// Of this attempt, without a mark.
    #[must_use]
    pub fn of(line: &Line, attempt: Attempt, hails: Secret, cards: &[Card]) -> Self {
        Self { line: line.to_string(), hails, attempt: attempt.0, cards: cards.to_vec(), mark: None }
    }

    fn hails(&self) -> Option<Hails> {
        let line = self.line.parse().ok()?;
        Hails::open(&line, Attempt(self.attempt), &self.hails, self.cards.clone()).ok()
    }

    /// Nothing of it was committed, and whoever moved it is gone: this machine goes on, and the other end is told that it need not wait
    /// for a verdict.
    pub fn call_off(&self) {
        let Some(hails) = self.hails() else { return };
        let keeper = Keeper { marks: None, fault: None };
        let mut asker = AtConsole { hails: Some((hails, true)), keeper, operator: Operator::default() };
        call_off(Attempt(self.attempt), &mut asker, CALLING_OFF);
    }

    /// Asks on until it is known, or an operator knows, whether this machine runs elsewhere. If it does, this one is
    /// switched off, and this does not return.
    pub fn settle(&self, reach: &Reach) {
        let mut operator = reach.operator();
        operator.tell(
            "the process that moved this machine is gone, after the commit. Another one asks on: nothing runs here until it is \
             known that nothing runs at the other machine",
        );
        let hails = self.hails();
        let mut keeper = Keeper { marks: None, fault: None };
        if let Some(standing) = &self.mark {
            keeper = Keeper::new(reach.marks(standing).map_err(|error| error.to_string()));
        }
        // Whoever is gone may not have come to it, and without it nobody is told to start.
        let may_say = keeper.is_committed();
        if !may_say {
            operator.tell(&format!(
                "the mark of this move cannot be written ({}). Nobody is told to start; if the other machine was told before, it \
                 says so",
                keeper.fault.as_deref().unwrap_or_default()
            ));
        }
        let hails = hails.map(|hails| (hails, may_say));
        let mut asker = AtConsole { hails, keeper, operator };
        match ask(Attempt(self.attempt), &mut asker, PATIENCE) {
            Ended::GoesOn => asker.operator.tell("this machine has not moved, and goes on"),
            Ended::Elsewhere => super::switch_off(&mut asker.operator),
        }
    }
}

/// Who can be asked, and told.
trait Ask {
    fn say(&mut self, word: Word);
    fn say_again(&mut self, word: Word);
    fn hear(&mut self) -> Option<Message>;
    fn decision(&mut self) -> Option<Decision>;
    fn record(&mut self, mark: Mark);
    fn tell(&mut self, text: &str);
}

/// Keeps the mark, if there is one.
struct Keeper {
    marks: Option<Marks>,
    /// Why it cannot be kept, where there should be one.
    fault: Option<String>,
}

impl Keeper {
    fn new(marks: Result<Marks, String>) -> Self {
        match marks {
            Ok(marks) => Self { marks: Some(marks), fault: None },
            Err(fault) => Self { marks: None, fault: Some(fault) },
        }
    }

    /// Whether it says that the machine may run elsewhere; written if it does not yet.
    fn is_committed(&mut self) -> bool {
        if let Some(marks) = self.marks.as_mut().filter(|marks| !marks.says(Mark::Committed))
            && let Err(why) = marks.write(Mark::Committed)
        {
            self.fault = Some(why);
        }
        self.fault.is_none()
    }

    fn keep(&mut self, mark: Mark) -> Result<(), String> {
        self.marks.as_mut().map_or(Ok(()), |marks| marks.write(mark))
    }
}

/// The other end by hails, if they could be opened, and whether it may be told to start; the mark; and the operator.
struct AtConsole {
    hails: Option<(Hails, bool)>,
    keeper: Keeper,
    operator: Operator,
}

impl Ask for AtConsole {
    fn say(&mut self, word: Word) {
        if let Some((hails, true)) = &mut self.hails {
            hails.say(word);
        }
    }

    fn say_again(&mut self, word: Word) {
        if let Some((hails, true)) = &mut self.hails {
            hails.say_again(word);
        }
    }

    fn hear(&mut self) -> Option<Message> {
        self.hails.as_ref()?.0.hear()
    }

    fn record(&mut self, mark: Mark) {
        if let Err(why) = self.keeper.keep(mark) {
            self.operator.tell(&format!(
                "the mark of this move cannot be changed: {why}. While it is there this machine does not start by itself: \
                 `mercury mark --clear`"
            ));
        }
    }

    fn decision(&mut self) -> Option<Decision> {
        decision(&mut self.operator)
    }

    fn tell(&mut self, text: &str) {
        self.operator.tell(text);
    }
}

/// The protocol from a restart of the sender on, with the machine in memory still.
fn ask(attempt: Attempt, asker: &mut impl Ask, patience: Duration) -> Ended {
    let (mut source, begin) = Source::restart(attempt, Mark::Committed, Memory::Kept);
    let mut todo = VecDeque::from(begin);
    asker.say(Word::Commit);
    loop {
        while let Some(action) = todo.pop_front() {
            match action {
                Action::Send(message) => asker.say(message.word),
                Action::Tell(advice) => asker.tell(&advice.to_string()),
                Action::Record(mark) => asker.record(mark),
                // What is done then is done by whoever asked for it.
                _ => {}
            }
        }
        match source.state() {
            State::Resumed => return Ended::GoesOn,
            State::GivenUp => return Ended::Elsewhere,
            _ => todo.extend(source.on(next(asker, patience))),
        }
    }
}

/// The protocol from a restart of the sender on, which had not committed: says so until that is answered, or for so long.
fn call_off(attempt: Attempt, asker: &mut impl Ask, patience: Duration) {
    let (_, begin) = Source::restart(attempt, Mark::Cleared, Memory::Kept);
    for action in begin {
        if let Action::Send(message) = action {
            asker.say(message.word);
        }
    }
    let end = Instant::now() + patience;
    while Instant::now() < end {
        if asker.hear().is_some_and(|message| message.attempt == attempt) {
            return;
        }
        asker.say_again(Word::Cancel);
        thread::sleep(Duration::from_millis(20).min(patience));
    }
}

/// Waits until something has happened.
fn next(asker: &mut impl Ask, patience: Duration) -> Event {
    let begun = Instant::now();
    loop {
        if let Some(message) = asker.hear() {
            return Event::Heard(message);
        }
        if let Some(decision) = asker.decision() {
            return Event::Operator(decision);
        }
        if begun.elapsed() > patience {
            return Event::TimedOut;
        }
        asker.say_again(Word::Commit);
        thread::sleep(Duration::from_millis(20).min(patience));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: Attempt = Attempt([7; 16]);

    /// What the other end says, and the operator, each after so many questions.
    #[derive(Default)]
    struct Script {
        said: Vec<Word>,
        answers: Vec<(usize, Message)>,
        decides: Option<(usize, Decision)>,
        told: Vec<String>,
        marks: Vec<Mark>,
        questions: usize,
    }

    impl Ask for Script {
        fn say(&mut self, word: Word) {
            self.said.push(word);
        }

        fn say_again(&mut self, _: Word) {}

        fn hear(&mut self) -> Option<Message> {
            self.questions += 1;
            let at = self.answers.iter().position(|(after, _)| self.questions > *after)?;
            Some(self.answers.remove(at).1)
        }

        fn decision(&mut self) -> Option<Decision> {
            let (_, decision) = self.decides.take_if(|(after, _)| self.questions > *after)?;
            Some(decision)
        }

        fn record(&mut self, mark: Mark) {
            self.marks.push(mark);
        }

        fn tell(&mut self, text: &str) {
            self.told.push(text.into());
        }
    }

    fn answered(words: &[(Attempt, Word)]) -> Script {
        let answer = |(at, (attempt, word)): (usize, &(Attempt, Word))| {
            (at, Message { attempt: *attempt, word: *word })
        };
        Script { answers: words.iter().enumerate().map(answer).collect(), ..Script::default() }
    }

    const MOMENT: Duration = Duration::from_millis(1);

    #[test]
    fn an_answer_decides() {
        for (word, ended, mark) in [
            (Word::Started, Ended::Elsewhere, Mark::GivenUp),
            (Word::Discarded, Ended::GoesOn, Mark::Cleared),
        ] {
            let mut script = answered(&[(Attempt([8; 16]), Word::Discarded), (ATTEMPT, word)]);
            assert_eq!(ask(ATTEMPT, &mut script, Duration::from_secs(60)), ended);
            assert_eq!(script.said, [Word::Commit], "it was asked");
            assert_eq!(script.marks, [mark]);
            assert!(script.told.is_empty());
        }
    }

    /// What promises nothing decides nothing.
    #[test]
    fn nobody_goes_on_without_a_promise() {
        for word in [Word::Unknown, Word::Lost] {
            let mut script = answered(&[(ATTEMPT, word), (ATTEMPT, word)]);
            script.decides = Some((5, Decision::Abandon));
            assert_eq!(ask(ATTEMPT, &mut script, Duration::from_secs(60)), Ended::Elsewhere);
            assert!(script.told.iter().all(|text| text.contains("Nothing runs here")), "{:?}", script.told);
            assert_eq!(script.told.len(), 2);
        }
    }

    #[test]
    fn the_operator_is_told_when_nobody_answers() {
        let mut script = Script { decides: Some((20, Decision::Resume)), ..Script::default() };
        assert_eq!(ask(ATTEMPT, &mut script, MOMENT), Ended::GoesOn);
        assert_eq!(script.told.len(), 1, "once: {:?}", script.told);
        assert!(script.told[0].contains("does not answer"));
        assert!(script.said.len() > 1, "and it was asked again");
    }

    /// Whoever has not committed says so, and waits for no answer that does not come.
    #[test]
    fn what_was_not_committed_is_called_off() {
        for answers in [&[(Attempt([8; 16]), Word::Discarded), (ATTEMPT, Word::Discarded)][..], &[]] {
            let mut script = answered(answers);
            call_off(ATTEMPT, &mut script, Duration::from_millis(200));
            assert_eq!(script.said, [Word::Cancel]);
            assert!(script.marks.is_empty() && script.told.is_empty());
            let is_right = if answers.is_empty() { script.questions > 2 } else { script.questions == 2 };
            assert!(is_right, "{answers:?}: it has listened {} times", script.questions);
        }
    }

    #[test]
    fn a_doubt_can_be_handed_on() {
        let doubt = Doubt {
            line: "mercury-receive-1-x".into(),
            hails: [3; 32],
            attempt: [7; 16],
            cards: vec![],
            mark: None,
        };
        let text = serde_json::to_string(&doubt).expect("JSON");
        assert_eq!(serde_json::from_str::<Doubt>(&text).expect("a doubt"), doubt);
        assert!(!format!("{doubt:?}").contains("mercury-receive"));
    }
}
