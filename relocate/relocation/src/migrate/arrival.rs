//! The machine that has arrived. It goes on with cards that do not know its addresses, on a network
//! that does not know its new place, and its source waits to hear from it.

use super::here::Held;
use crate::tombstone;
use mercury_control::{exit::Exit, sysroot::Sysroot};
use mercury_migration::{
    announcement::{Announcer, ETHER_TYPE, LENGTH, Secret, Speaker},
    protocol::{Attempt, Message, Word},
    session::PairingToken,
};
use mercury_quiesce::{
    ethernet::{self, Card, Mac, packets},
    guest::Readiness,
    undo::UndoProcess,
    watchdogs,
};
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};
use std::{
    io::Write,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Pauses between repetitions of the same announcement, in milliseconds.
const AGAIN_MS: [u64; 5] = [0, 20, 100, 300, 600];
/// Time for which peers that ask are answered.
const ANSWERED: Duration = Duration::from_secs(600);

/// The facts that must be known before the instant, because the machine cannot look anything up at
/// its destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Arrival {
    /// Pairing token of the receiver. The key for announcements is derived from it and from the
    /// secret of the offer.
    pub token: String,
    /// Secret of the offer.
    pub secret: Secret,
    pub attempt: [u8; 16],
    /// Cards of this machine at its source.
    pub cards: Vec<Card>,
    /// Cards of the destination, which are this machine's cards now.
    pub theirs: Vec<Card>,
    /// Bridges of this machine that were given an address: name and address.
    pub bridges: Vec<(String, Mac)>,
}

impl Arrival {
    fn announcer(&self) -> Option<Announcer> {
        let token: PairingToken = self.token.parse().ok()?;
        let mut announcer = Announcer::new(&token);
        announcer.know(Attempt(self.attempt), &self.secret);
        Some(announcer)
    }

    fn started(&self, announcer: &Announcer) -> [u8; LENGTH] {
        let message = Message { attempt: Attempt(self.attempt), word: Word::Started };
        announcer.say(Speaker::Destination, message)
    }

    fn say(&self, word: [u8; LENGTH]) {
        if let Ok(packets) = packets::Packets::open(ETHER_TYPE) {
            for card in self.cards.iter().filter(|card| card.up) {
                let _ = packets.say(card, &word);
            }
        }
    }

    /// Makes the machine known on the network, lets it go on, and announces that it runs.
    ///
    /// A card that fails is no reason to stop. If this process does not get so far, its undo
    /// process lets the machine go on. Messages come last, because their readers stand still until
    /// then. Tests observe each step by `step`.
    pub fn settle(
        &mut self,
        held: Held,
        guard: &mut UndoProcess,
        readiness: &mut Readiness,
        step: &mut dyn FnMut(&str),
    ) {
        guard.hear();
        step("Arrived");
        let sysroot = Sysroot::default();
        let mut told = match guard.hear_during(|| readiness.arrive()) {
            Some(mut told) => {
                told.extend(guard.hear_during(|| readiness.note(&sysroot)));
                self.cards = ethernet::cards(&sysroot);
                told
            }
            None => self.tell_all_cards(),
        };
        // Paths are looked up, which may need the network.
        watchdogs::arm_again(&sysroot);
        self.announce();
        drop(held);
        guard.is_undone();
        step("Running");
        told.extend(self.say_started().err());
        step("Started");
        // From here on this machine may have moved before, and this is the machine it moved back
        // to: clear the tombstone.
        told.extend(tombstone::clear_here(&sysroot));
        for text in told {
            // A message without a reader is no reason to fail.
            let _ = writeln!(std::io::stderr(), "mercury migrate: {text}");
        }
    }

    /// Gives each card and the bridges that follow it their addresses, and returns the failures.
    fn tell_all_cards(&mut self) -> Vec<String> {
        let followers = self.followers();
        let mut told = self.tell_cards();
        told.extend(followers.iter().filter_map(|(name, mac)| {
            let refused = ethernet::set_mac(name, *mac).err()?;
            Some(format!("{name} does not accept the address of its card: {refused}"))
        }));
        told
    }

    /// Returns the bridges that were given the address of a source card, each with the address of
    /// the card at the same place here. Other bridges follow their cards by themselves, or have an
    /// address of their own. A bridge must not keep a card's old address, because the source may be
    /// switched on again.
    fn followers(&self) -> Vec<(String, Mac)> {
        let new = |old: &Mac| {
            let card = self.cards.iter().find(|card| card.up && card.mac == *old)?;
            let theirs = self.theirs.iter().find(|theirs| theirs.place == card.place)?;
            (theirs.mac != card.mac).then_some(theirs.mac)
        };
        self.bridges.iter().filter_map(|(name, mac)| Some((name.clone(), new(mac)?))).collect()
    }

    /// Gives each card its address, and returns the failures.
    fn tell_cards(&mut self) -> Vec<String> {
        let mut told = Vec::new();
        for card in self.cards.iter_mut().filter(|card| card.up) {
            let theirs = self.theirs.iter().find(|theirs| theirs.place == card.place);
            let mac = theirs.map_or(card.mac, |theirs| theirs.mac);
            match tell_card(card, mac) {
                Ok(()) => card.mac = mac,
                Err(error) => told.push(format!("{} does not accept its address: {error}", card.name)),
            }
        }
        told
    }

    /// Announces that this machine runs, and starts a process that answers peers that ask.
    fn say_started(&self) -> Result<(), String> {
        let announcer = self.announcer().ok_or("the source cannot be told: the pairing token is gone")?;
        let started = self.started(&announcer);
        for pause in AGAIN_MS {
            thread::sleep(Duration::from_millis(pause));
            self.say(started);
            announce_all();
        }
        let why = |error| format!("if the source asks, no process answers it any more: {error}");
        self.keep_answering().map_err(why)
    }

    fn announce(&self) {
        for card in self.cards.iter().filter(|card| card.up) {
            let _ = packets::announce(card);
        }
    }

    /// Starts a process that answers for a while.
    fn keep_answering(&self) -> std::io::Result<()> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("answer").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let mut line = child.stdin.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        line.write_all(&serde_json::to_vec(self)?)
    }
}

/// Announces interfaces that have addresses without being a card. This runs only when everything
/// goes on, because reading their files may need the network.
fn announce_all() {
    // Peers that miss the announcement ask for the address.
    let _ = packets::announce_all(&ethernet::interfaces(&Sysroot::default()));
}

/// Sets a card's address in the kernel, which knows the card by the address of the source's card.
/// The source may be switched on again, so the card gets its own address if that is known.
fn tell_card(card: &Card, mac: Mac) -> std::io::Result<()> {
    if mac == card.mac {
        // Not every kernel sets an address that the card has already. So the card gets another
        // address in between.
        let mut other: Mac = mac;
        other[0] ^= 2;
        other[5] ^= 1;
        ethernet::set_mac(&card.name, other)?;
    }
    ethernet::set_mac(&card.name, mac)
}

/// Runs the answering process: `mercury answer`.
#[must_use]
pub fn answer() -> Exit {
    let read = serde_json::from_reader::<_, Arrival>(std::io::stdin().lock());
    let (Ok(arrival), Ok(packets)) = (read, packets::Packets::open(ETHER_TYPE)) else {
        return Exit::Failed;
    };
    let Some(announcer) = arrival.announcer() else { return Exit::Failed };
    let end = Instant::now() + ANSWERED;
    while Instant::now() < end {
        let mut all = [PollFd::new(&packets, PollFlags::IN)];
        super::link::wait_for(&mut all, Duration::from_secs(10));
        while let Some(frame) = packets.hear() {
            let commit = Message { attempt: Attempt(arrival.attempt), word: Word::Commit };
            if announcer.hear(Speaker::Source, &frame) == Some(commit) {
                arrival.say(arrival.started(&announcer));
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

    /// A bridge with the address of a source card gets that of the card at the same place; others
    /// keep theirs.
    #[test]
    fn bridges_follow_their_cards() {
        let bridges = [("with", 2), ("own", 9), ("down", 3), ("gone", 4), ("same", 5)];
        let arrival = Arrival {
            token: String::new(),
            secret: [0; 32],
            attempt: [0; 16],
            cards: vec![card("a", 2, true), card("b", 3, false), card("c", 4, true), card("d", 5, true)],
            theirs: vec![card("d", 5, true), card("b", 13, true), card("a", 12, true)],
            bridges: bridges.map(|(name, last)| (name.to_owned(), mac(last))).into(),
        };
        assert_eq!(arrival.followers(), [("with".to_owned(), mac(12))]);
    }
}
