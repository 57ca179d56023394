//! The machine that has arrived: it goes on with cards that do not know it, on a network that does not know where it is,
//! and the one that it was waits to hear of it.

use super::{here::Held, marks};
use crate::{
    checkpoint::guard::Guard,
    ethernet::{self, Card, Mac, packets},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_migration::{
    hail::{ETHER_TYPE, Hailer, LENGTH, Secret, Speaker},
    protocol::{Attempt, Message, Word},
    session::Line,
};
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};
use std::{
    io::Write,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Between things that are said again, in milliseconds.
const AGAIN_MS: [u64; 5] = [0, 20, 100, 300, 600];
/// How long whoever asks is answered.
const ANSWERED: Duration = Duration::from_secs(600);

/// All that has to be known before the instant.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Arrival {
    /// The receiver's line, from which the key for hails is derived, and from what went with the offer.
    pub line: String,
    /// What went with the offer.
    pub hails: Secret,
    /// The attempt's name.
    pub attempt: [u8; 16],
    /// The machine's cards.
    pub cards: Vec<Card>,
    /// Those of the other machine, which these are now.
    pub theirs: Vec<Card>,
    /// Its bridges that were given an address: names, and what it is.
    pub bridges: Vec<(String, Mac)>,
}

impl Arrival {
    fn hailer(&self) -> Option<Hailer> {
        let line: Line = self.line.parse().ok()?;
        let mut hailer = Hailer::new(&line);
        hailer.know(Attempt(self.attempt), &self.hails);
        Some(hailer)
    }

    fn started(&self, hailer: &Hailer) -> [u8; LENGTH] {
        let message = Message { attempt: Attempt(self.attempt), word: Word::Started };
        hailer.say(Speaker::Destination, message)
    }

    fn say(&self, word: [u8; LENGTH]) {
        if let Ok(packets) = packets::Packets::open(ETHER_TYPE) {
            for card in self.cards.iter().filter(|card| card.up) {
                let _ = packets.say(card, &word);
            }
        }
    }

    /// Makes the machine known, lets it go on, and says that it runs. A card that does not do what it should is no reason
    /// not to go on. If this process does not get so far, its guard lets the machine go on; whoever reads what is told stands
    /// still until then, so it is told last. `step` is told of each step, for tests.
    pub fn settle(&mut self, held: Held, guard: &mut Guard, step: &mut dyn FnMut(&str)) {
        guard.hear();
        step("Arrived");
        let followers = self.followers();
        let mut told = self.tell_cards();
        told.extend(followers.iter().filter_map(|(name, mac)| {
            let refused = ethernet::set_mac(name, *mac).err()?;
            Some(format!("{name} does not take the address of its card: {refused}"))
        }));
        self.announce();
        drop(held);
        guard.is_undone();
        step("Running");
        told.extend(self.say_started().err());
        step("Started");
        // From here one may have moved before, which is this one.
        told.extend(marks::clear_here(&Sysroot::default()));
        for text in told {
            // What nobody reads is no reason to fail.
            let _ = writeln!(std::io::stderr(), "mercury migrate: {text}");
        }
    }

    /// Bridges that were given the address of a card where they came from, which may be switched on again, and the address of that card
    /// here. Others follow by themselves, or have an address that is nobody's.
    fn followers(&self) -> Vec<(String, Mac)> {
        let new = |old: &Mac| {
            let card = self.cards.iter().find(|card| card.up && card.mac == *old)?;
            let theirs = self.theirs.iter().find(|theirs| theirs.place == card.place)?;
            (theirs.mac != card.mac).then_some(theirs.mac)
        };
        self.bridges.iter().filter_map(|(name, mac)| Some((name.clone(), new(mac)?))).collect()
    }

    /// What the cards do not do.
    fn tell_cards(&mut self) -> Vec<String> {
        let mut told = Vec::new();
        for card in self.cards.iter_mut().filter(|card| card.up) {
            let theirs = self.theirs.iter().find(|theirs| theirs.place == card.place);
            let mac = theirs.map_or(card.mac, |theirs| theirs.mac);
            match tell_card(card, mac) {
                Ok(()) => card.mac = mac,
                Err(error) => told.push(format!("{} does not take its address: {error}", card.name)),
            }
        }
        told
    }

    /// Says that it runs, and has whoever asks answered.
    fn say_started(&self) -> Result<(), String> {
        let hailer = self.hailer().ok_or("the other machine cannot be told: the line is gone")?;
        let started = self.started(&hailer);
        for pause in AGAIN_MS {
            thread::sleep(Duration::from_millis(pause));
            self.say(started);
            announce_all();
        }
        let why = |error| format!("nobody answers any more if the other machine asks: {error}");
        self.keep_answering().map_err(why)
    }

    fn announce(&self) {
        for card in self.cards.iter().filter(|card| card.up) {
            let _ = packets::announce(card);
        }
    }

    /// A process of its own does, for a while.
    fn keep_answering(&self) -> std::io::Result<()> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("answer").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let mut line = child.stdin.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        line.write_all(&serde_json::to_vec(self)?)
    }
}

/// What has addresses without being a card is looked for only when everything goes on: files may be on the other side of that.
fn announce_all() {
    // One that nobody hears of is found by those who ask.
    let _ = packets::announce_all(&ethernet::interfaces(&Sysroot::default()));
}

/// The kernel knows the card by the address that the machine's card had where it came from. That one may be switched on
/// again; so the card gets its own address, if that is known.
fn tell_card(card: &Card, mac: Mac) -> std::io::Result<()> {
    if mac == card.mac {
        // What it has already it is not told by all kernels. The bit makes it an address of nobody's.
        let mut other: Mac = mac;
        other[0] ^= 2;
        other[5] ^= 1;
        ethernet::set_mac(&card.name, other)?;
    }
    ethernet::set_mac(&card.name, mac)
}

/// The life of who answers: `mercury answer`.
#[must_use]
pub fn answer() -> Exit {
    let read = serde_json::from_reader::<_, Arrival>(std::io::stdin().lock());
    let (Ok(arrival), Ok(packets)) = (read, packets::Packets::open(ETHER_TYPE)) else {
        return Exit::Failed;
    };
    let Some(hailer) = arrival.hailer() else { return Exit::Failed };
    let end = Instant::now() + ANSWERED;
    while Instant::now() < end {
        let mut all = [PollFd::new(&packets, PollFlags::IN)];
        super::link::wait_for(&mut all, Duration::from_secs(10));
        while let Some(frame) = packets.hear() {
            let commit = Message { attempt: Attempt(arrival.attempt), word: Word::Commit };
            if hailer.hear(Speaker::Source, &frame) == Some(commit) {
                arrival.say(arrival.started(&hailer));
            }
        }
    }
    Exit::Done
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn mac(last: u8) -> Mac {
        [0x52, 0x54, 0, 9, 0, last]
    }

    fn card(place: &str, last: u8, up: bool) -> Card {
        Card { place: place.into(), mac: mac(last), up, ..Card::default() }
    }

    /// One that has the address of a card that is left behind gets that of the card at the same place; others keep theirs.
    #[test]
    fn bridges_follow_their_cards() {
        let bridges = [("with", 2), ("own", 9), ("down", 3), ("gone", 4), ("same", 5)];
        let arrival = Arrival {
            line: String::new(),
            hails: [0; 32],
            attempt: [0; 16],
            cards: vec![card("a", 2, true), card("b", 3, false), card("c", 4, true), card("d", 5, true)],
            theirs: vec![card("d", 5, true), card("b", 13, true), card("a", 12, true)],
            bridges: bridges.map(|(name, last)| (name.to_owned(), mac(last))).into(),
        };
        assert_eq!(arrival.followers(), [("with".to_owned(), mac(12))]);
    }
}
