//! A source in doubt: it has said `Commit`, and does not know yet if the machine runs at the
//! destination. It repeats the question on the network until the destination answers or its
//! operator decides. `mercury migrate` does so ([`super::mover`]). If that process is killed, its
//! undo process asks on ([`Doubt::settle`]) and acts on the answer.

use crate::{
    operator::Operator,
    tombstone::{Folders, Standing, Tombstones},
};
use mercury_control::{
    device::{Access, Device},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_migration::{
    announcement::{Announcer, ETHER_TYPE, Secret, Speaker},
    protocol::{
        Attempt, Message, Source, Tombstone, Word,
        source::{Action, Decision, Event, Memory, State},
    },
    session::PairingToken,
};
use mercury_quiesce::{
    ethernet::{Card, packets::Packets},
    guard::Moves,
    undo::Step,
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

/// Time for an answer before the operator is told. A large machine with many devices takes a while
/// to start.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Limit of a start in times of patience: a quarter of an hour. Each wait of it that ends by itself is
/// shorter.
pub const OVERDUE: u32 = 90;
/// Pause between two announcements when nothing else can be done.
const AGAIN: Duration = Duration::from_millis(500);
/// Time for which the other end is told that the move is off, if it does not answer.
const CALLING_OFF: Duration = Duration::from_secs(5);
/// Time for which the driver may be busy with the end of the killed process.
const DRIVER_PATIENCE: Duration = Duration::from_secs(60);

/// A carrier of frames to all machines on the network.
pub trait Air: std::fmt::Debug {
    /// Sends a frame by a card.
    fn say(&self, card: &Card, frame: &[u8]);

    /// Returns a frame that another machine has sent.
    fn hear(&self) -> Option<Vec<u8>>;
}

impl Air for Packets {
    fn say(&self, card: &Card, frame: &[u8]) {
        // A frame that is lost is sent again later.
        let _ = Self::say(self, card, frame);
    }

    fn hear(&self) -> Option<Vec<u8>> {
        Self::hear(self)
    }
}

/// The announcements of both ends to all machines on the network. A machine that has arrived can be
/// reached in no other way.
#[derive(Debug)]
pub struct Announcements {
    announcer: Announcer,
    air: Box<dyn Air>,
    cards: Vec<Card>,
    attempt: Attempt,
    said: Instant,
}

impl Announcements {
    /// Opens announcements for an attempt with this secret, by all cards that are up.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel opens no socket for them.
    pub fn open(
        token: &PairingToken,
        attempt: Attempt,
        secret: &Secret,
        cards: Vec<Card>,
    ) -> io::Result<Self> {
        Ok(Self::by(Box::new(Packets::open(ETHER_TYPE)?), token, attempt, secret, cards))
    }

    /// Makes announcements that `air` carries.
    #[must_use]
    pub fn by(
        air: Box<dyn Air>,
        token: &PairingToken,
        attempt: Attempt,
        secret: &Secret,
        cards: Vec<Card>,
    ) -> Self {
        let mut announcer = Announcer::new(token);
        announcer.know(attempt, secret);
        Self { announcer, air, cards, attempt, said: Instant::now() }
    }

    /// Returns this machine's cards.
    #[must_use]
    pub fn cards(&self) -> &[Card] {
        &self.cards
    }

    /// Announces a word to all.
    pub fn say(&mut self, word: Word) {
        self.said = Instant::now();
        let message = Message { attempt: self.attempt, word };
        // A destination that was restarted cannot understand the first frame, and must be able to
        // answer that it knows nothing.
        let frames = [
            self.announcer.say(Speaker::Source, message),
            self.announcer.say_to_restarted(Speaker::Source, message),
        ];
        for card in self.cards.iter().filter(|card| card.up) {
            for frame in &frames {
                self.air.say(card, frame);
            }
        }
    }

    /// Announces a word again, unless that was done a moment ago.
    pub fn say_again(&mut self, word: Word) {
        if self.said.elapsed() > AGAIN {
            self.say(word);
        }
    }

    /// Returns the other end's announcement, if there is one.
    #[must_use]
    pub fn hear(&self) -> Option<Message> {
        while let Some(frame) = self.air.hear() {
            if let Some(message) = self.announcer.hear(Speaker::Destination, &frame) {
                return Some(message);
            }
        }
        None
    }
}

/// Returns the decision of the operator at the console, if there is one.
pub fn decision(operator: &mut Operator) -> Option<Decision> {
    operator
        .word(&["resume", "abandon"])
        .map(|word| if word == "resume" { Decision::Resume } else { Decision::Abandon })
}

/// The limit of all waits between `Commit` and `Started`. Some of them have none of their own. The limit ends
/// in advice: this end cannot know if the machine runs elsewhere.
#[derive(Debug)]
pub struct Overdue {
    end: Instant,
    is_told: bool,
}

impl Overdue {
    /// Begins with the commit, for a source with this patience.
    #[must_use]
    pub fn begin(patience: Duration) -> Self {
        Self { end: Instant::now() + patience * OVERDUE, is_told: false }
    }

    /// Returns the advice to the operator, once.
    pub fn news(&mut self) -> Option<&'static str> {
        if self.is_told || Instant::now() < self.end {
            return None;
        }
        self.is_told = true;
        Some(
            "The start at the destination is overdue. Every wait of it that ends by itself would have ended: \
             20 s for its own processes, some two minutes for each of its disks, eleven minutes for the \
             network of a guest. One without an end of its own may hang: a driver that stops or wakes a \
             device, CPUs that wait for each other, or an interrupt that was pending. Look at the \
             destination's console and at what clients have seen. If the machine works there, type `abandon` \
             here. If it does not, switch the destination off. A guest you end with `mercury guests stop` on \
             its host. Then type `resume` here. This end keeps asking meanwhile.",
        )
    }
}

/// The silence of this machine after the commit: it does not answer for its addresses, because the
/// destination may have them.
#[derive(Debug)]
pub struct Silence {
    /// The kernel's setting, opened while path names can be looked up.
    file: Option<File>,
    before: Vec<u8>,
}

impl Silence {
    const SETTING: &str = "/proc/sys/net/ipv4/conf/all/arp_ignore";
    /// Value of the setting: no answer for any address.
    const NOTHING: &[u8] = b"8";

    /// Opens the setting and remembers its value.
    #[must_use]
    pub fn prepare() -> Self {
        let before = std::fs::read(Self::SETTING).unwrap_or_else(|_| b"0".to_vec());
        Self { file: File::options().write(true).open(Self::SETTING).ok(), before }
    }

    fn set(&self, value: &[u8]) {
        if let Some(file) = &self.file {
            // If ARP cannot be silenced, neighbours may use the wrong machine until this one is
            // off.
            let _ = file.write_at(value, 0);
        }
    }

    /// Silences the machine.
    pub fn keep(&self) {
        self.set(Self::NOTHING);
    }

    /// Puts the setting back.
    pub fn end(&self) {
        self.set(&self.before);
    }
}

/// The files that an undo process needs of a machine that stands still. If the root is on another
/// machine, no path name can be looked up then.
#[derive(Debug)]
pub struct Reach {
    devices: Option<OwnedFd>,
    folders: Folders,
    silence: Silence,
}

impl Reach {
    /// Opens the files, while everything runs.
    #[must_use]
    pub fn open() -> Self {
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let devices = rustix::fs::openat(CWD, "/dev", flags, Mode::empty()).ok();
        Self { devices, folders: Folders::open(&Sysroot::default()), silence: Silence::prepare() }
    }

    fn tombstones(&self, standing: &Standing) -> io::Result<Tombstones> {
        standing.open(&self.folders, self.devices.as_ref())
    }

    fn operator(&self) -> Operator {
        self.devices.as_ref().map_or_else(Operator::default, Operator::at_console_in)
    }

    /// Removes the fence that is left, and lets this machine answer for its addresses again.
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

impl Moves for Reach {
    fn open_fence(&self) {
        Self::open_fence(self);
    }

    fn call_off(&self, step: &Step) {
        if let Some(doubt) = step.facts::<Doubt>() {
            doubt.call_off();
        }
    }

    fn settle(&self, step: &Step) {
        if let Some(doubt) = step.facts::<Doubt>() {
            doubt.settle(self);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The machine goes on here.
    GoesOn,
    /// The machine runs at the destination.
    Elsewhere,
}

/// The facts that another process needs to ask on.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doubt {
    /// Pairing token of the receiver.
    pub token: String,
    /// Secret of the offer.
    pub secret: Secret,
    pub attempt: [u8; 16],
    /// Cards of this machine.
    pub cards: Vec<Card>,
    /// Its tombstone, if there is one that survives a power cut.
    pub tombstone: Option<Standing>,
}

// The pairing token is a secret.
impl std::fmt::Debug for Doubt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Doubt").field("attempt", &Attempt(self.attempt)).finish_non_exhaustive()
    }
}

impl Doubt {
    /// Makes the doubt of this attempt, without a tombstone.
    #[must_use]
    pub fn of(token: &PairingToken, attempt: Attempt, secret: Secret, cards: &[Card]) -> Self {
        Self { token: token.to_string(), secret, attempt: attempt.0, cards: cards.to_vec(), tombstone: None }
    }

    fn announcements(&self) -> Option<Announcements> {
        let token = self.token.parse().ok()?;
        Announcements::open(&token, Attempt(self.attempt), &self.secret, self.cards.clone()).ok()
    }

    /// Calls the attempt off after its process was killed before the commit. This machine goes on,
    /// and the other end is told that it need not wait for a verdict.
    pub fn call_off(&self) {
        let Some(announcements) = self.announcements() else { return };
        let keeper = Keeper { tombstones: None, fault: None };
        let mut asker =
            AtConsole { announcements: Some((announcements, true)), keeper, operator: Operator::default() };
        call_off(Attempt(self.attempt), &mut asker, CALLING_OFF);
    }

    /// Asks on until an answer, or an operator, tells if this machine runs at the destination. If
    /// it does, this machine is switched off and the function does not return.
    pub fn settle(&self, reach: &Reach) {
        let mut operator = reach.operator();
        operator.tell(
            "the process that moved this machine is gone, after the commit. Another process asks on: this \
             machine stands still until it is known that it does not run at the destination",
        );
        let announcements = self.announcements();
        let mut keeper = Keeper { tombstones: None, fault: None };
        if let Some(standing) = &self.tombstone {
            keeper = Keeper::new(reach.tombstones(standing).map_err(|error| error.to_string()));
        }
        // The killed process may not have written the tombstone. Without it, the destination is not
        // told to start.
        let may_say = keeper.is_committed();
        if !may_say {
            operator.tell(&format!(
                "the tombstone of this move cannot be written ({}). The destination is not told to start. \
                 If it was told before, it answers so",
                keeper.fault.as_deref().unwrap_or_default()
            ));
        }
        let announcements = announcements.map(|announcements| (announcements, may_say));
        let mut asker = AtConsole { announcements, keeper, operator };
        match ask(Attempt(self.attempt), &mut asker, PATIENCE) {
            Ended::GoesOn => asker.operator.tell("this machine has not moved, and goes on"),
            Ended::Elsewhere => super::switch_off(&mut asker.operator),
        }
    }
}

/// The partners of a source in doubt: the destination, the tombstone and the operator.
trait Ask {
    fn say(&mut self, word: Word);
    fn say_again(&mut self, word: Word);
    fn hear(&mut self) -> Option<Message>;
    fn decision(&mut self) -> Option<Decision>;
    fn record(&mut self, tombstone: Tombstone);
    fn tell(&mut self, text: &str);
}

/// The keeper of the tombstone, if there is one.
struct Keeper {
    tombstones: Option<Tombstones>,
    /// Reason why the tombstone cannot be kept, if there should be one.
    fault: Option<String>,
}

impl Keeper {
    fn new(tombstones: Result<Tombstones, String>) -> Self {
        match tombstones {
            Ok(tombstones) => Self { tombstones: Some(tombstones), fault: None },
            Err(fault) => Self { tombstones: None, fault: Some(fault) },
        }
    }

    /// Returns true if the tombstone says that the machine may run elsewhere. Writes it if it does
    /// not say so yet.
    fn is_committed(&mut self) -> bool {
        if let Some(tombstones) =
            self.tombstones.as_mut().filter(|tombstones| !tombstones.says(Tombstone::Committed))
            && let Err(why) = tombstones.write(Tombstone::Committed)
        {
            self.fault = Some(why);
        }
        self.fault.is_none()
    }

    fn keep(&mut self, tombstone: Tombstone) -> Result<(), String> {
        self.tombstones.as_mut().map_or(Ok(()), |tombstones| tombstones.write(tombstone))
    }
}

/// The partners of a real doubt: the destination by announcements, if these could be opened, with
/// true if it may be told to start; the tombstone; and the operator.
struct AtConsole {
    announcements: Option<(Announcements, bool)>,
    keeper: Keeper,
    operator: Operator,
}

impl Ask for AtConsole {
    fn say(&mut self, word: Word) {
        if let Some((announcements, true)) = &mut self.announcements {
            announcements.say(word);
        }
    }

    fn say_again(&mut self, word: Word) {
        if let Some((announcements, true)) = &mut self.announcements {
            announcements.say_again(word);
        }
    }

    fn hear(&mut self) -> Option<Message> {
        self.announcements.as_ref()?.0.hear()
    }

    fn record(&mut self, tombstone: Tombstone) {
        if let Err(why) = self.keeper.keep(tombstone) {
            self.operator.tell(&format!(
                "the tombstone of this move cannot be changed: {why}. While it is there this machine does \
                 not start by itself: use `mercury tombstone --clear`"
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

/// Runs the protocol from a restart of the sender on, with the machine still in memory.
fn ask(attempt: Attempt, asker: &mut impl Ask, patience: Duration) -> Ended {
    let (mut source, begin) = Source::restart(attempt, Tombstone::Committed, Memory::Kept);
    let mut todo = VecDeque::from(begin);
    let mut overdue = Overdue::begin(patience);
    asker.say(Word::Commit);
    loop {
        while let Some(action) = todo.pop_front() {
            match action {
                Action::Send(message) => asker.say(message.word),
                Action::Tell(advice) => asker.tell(&advice.to_string()),
                Action::Record(tombstone) => asker.record(tombstone),
                // The caller of `ask` carries these actions out.
                _ => {}
            }
        }
        match source.state() {
            State::Resumed => return Ended::GoesOn,
            State::GivenUp => return Ended::Elsewhere,
            _ => todo.extend(source.on(next(asker, patience, &mut overdue))),
        }
    }
}

/// Runs the protocol from a restart of a sender that had not committed. Repeats that until the
/// destination answers, or for the given time.
fn call_off(attempt: Attempt, asker: &mut impl Ask, patience: Duration) {
    let (_, begin) = Source::restart(attempt, Tombstone::Cleared, Memory::Kept);
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

/// Waits for the next event.
fn next(asker: &mut impl Ask, patience: Duration, overdue: &mut Overdue) -> Event {
    let begun = Instant::now();
    loop {
        if let Some(text) = overdue.news() {
            asker.tell(text);
        }
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

    /// A script of words from the other end and the operator, each after a number of questions.
    #[derive(Default)]
    struct Script {
        said: Vec<Word>,
        answers: Vec<(usize, Message)>,
        decides: Option<(usize, Decision)>,
        told: Vec<String>,
        tombstones: Vec<Tombstone>,
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

        fn record(&mut self, tombstone: Tombstone) {
            self.tombstones.push(tombstone);
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
        for (word, ended, tombstone) in [
            (Word::Started, Ended::Elsewhere, Tombstone::GivenUp),
            (Word::Discarded, Ended::GoesOn, Tombstone::Cleared),
        ] {
            let mut script = answered(&[(Attempt([8; 16]), Word::Discarded), (ATTEMPT, word)]);
            assert_eq!(ask(ATTEMPT, &mut script, Duration::from_secs(60)), ended);
            assert_eq!(script.said, [Word::Commit], "it was asked");
            assert_eq!(script.tombstones, [tombstone]);
            assert!(script.told.is_empty());
        }
    }

    /// An answer that promises nothing decides nothing.
    #[test]
    fn an_answer_without_a_promise_decides_nothing() {
        for word in [Word::Unknown, Word::Lost] {
            let mut script = answered(&[(ATTEMPT, word), (ATTEMPT, word)]);
            script.decides = Some((5, Decision::Abandon));
            assert_eq!(ask(ATTEMPT, &mut script, Duration::from_secs(60)), Ended::Elsewhere);
            assert!(script.told.iter().all(|text| text.contains("Nothing runs here")), "{:?}", script.told);
            assert_eq!(script.told.len(), 2);
        }
    }

    #[test]
    fn the_operator_is_told_when_no_answer_comes() {
        let mut script = Script { decides: Some((20, Decision::Resume)), ..Script::default() };
        assert_eq!(ask(ATTEMPT, &mut script, MOMENT), Ended::GoesOn);
        let told = script.told.iter().filter(|text| text.contains("does not answer")).count();
        assert_eq!(told, 1, "once: {:?}", script.told);
        assert!(script.said.len() > 1, "and it was asked again");
    }

    /// A start without an end of its own has a limit, which is told once. It decides nothing.
    #[test]
    fn a_start_that_is_overdue_is_told_once_and_decides_nothing() {
        let mut script = Script { decides: Some((600, Decision::Resume)), ..Script::default() };
        assert_eq!(ask(ATTEMPT, &mut script, MOMENT), Ended::GoesOn);
        let overdue: Vec<_> = script.told.iter().filter(|text| text.contains("is overdue")).collect();
        assert_eq!(overdue.len(), 1, "{:?}", script.told);
        for named in ["20 s", "two minutes", "eleven minutes", "stops or wakes", "`abandon`", "`resume`"] {
            assert!(overdue[0].contains(named), "{named}: {}", overdue[0]);
        }
        assert_eq!(script.tombstones, [Tombstone::Cleared], "only the operator's word has an effect");
        let mut early = Overdue::begin(PATIENCE);
        assert_eq!(early.news(), None);
    }

    /// A source that has not committed says so, and does not wait for an answer for ever.
    #[test]
    fn an_uncommitted_move_is_called_off() {
        for answers in [&[(Attempt([8; 16]), Word::Discarded), (ATTEMPT, Word::Discarded)][..], &[]] {
            let mut script = answered(answers);
            call_off(ATTEMPT, &mut script, Duration::from_millis(200));
            assert_eq!(script.said, [Word::Cancel]);
            assert!(script.tombstones.is_empty() && script.told.is_empty());
            let is_right = if answers.is_empty() { script.questions > 2 } else { script.questions == 2 };
            assert!(is_right, "{answers:?}: it has listened {} times", script.questions);
        }
    }

    #[test]
    fn a_doubt_can_be_handed_on() {
        let doubt = Doubt {
            token: "mercury-receive-1-x".into(),
            secret: [3; 32],
            attempt: [7; 16],
            cards: vec![],
            tombstone: None,
        };
        let text = serde_json::to_string(&doubt).expect("JSON");
        assert_eq!(serde_json::from_str::<Doubt>(&text).expect("a doubt"), doubt);
        assert!(!format!("{doubt:?}").contains("mercury-receive"));
    }
}
