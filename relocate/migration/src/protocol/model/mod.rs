//! A model checker for the hand-over.
//!
//! It tries all possible events, breadth first, from the beginning on. In each state that it finds,
//! the properties of [`check`] must hold. The events come from:
//!
//! - both machines, with their real state machines;
//! - a network that has delivered everything ever said, in any order, any number of times or never;
//! - disks that write late, or report a failure and have written all the same;
//! - processes and machines that die at any moment and start again;
//! - time that is up at any moment;
//! - operators that cancel at any moment, and otherwise follow the advice that they got.
//!
//! A message that is not delivered is lost, and an event that may happen now may also happen later.
//! Losses, repetitions, reorderings across connections and delays past timeouts are therefore
//! covered without names of their own.
//!
//! A checker that cannot fail is worthless: [`mutants`] breaks each rule, one at a time, and the
//! checker must detect each.

mod check;
mod mutants;
mod network;
mod world;

use std::{
    collections::{HashSet, VecDeque},
    hash::{Hash, Hasher},
};

use check::Checked;
use mutants::Mutant;
use world::{Step, Terms, World};

/// The result of an exploration.
struct Found {
    states: usize,
    /// The broken property, and the steps that led to it.
    broken: Option<(String, Vec<String>)>,
    /// Names of the ends that were seen, so that a model in which nothing happens is noticed.
    ends: HashSet<&'static str>,
}

/// The states seen so far, as fingerprints of 128 bits: by chance no two are the same.
#[derive(Default)]
struct Seen(HashSet<u128>);

impl Seen {
    fn is_new(&mut self, world: &World) -> bool {
        let mut print = Print([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03]);
        world.hash(&mut print);
        let [low, high] = print.0.map(u128::from);
        self.0.insert(high << 64 | low)
    }
}

/// A hasher for fingerprints. It is quicker than the standard library's, which resists attackers.
struct Print([u64; 2]);

impl Hasher for Print {
    fn finish(&self) -> u64 {
        self.0[0]
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        let factors = [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53];
        for (lane, factor) in self.0.iter_mut().zip(factors) {
            let product = u128::from(*lane ^ word ^ factor) * u128::from(factor);
            *lane = (product as u64 ^ (product >> 64) as u64).rotate_left(23).wrapping_add(factor);
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(u64::from(byte));
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

/// Number of deaths of either end in one exploration. More deaths take much longer.
const DEATHS: u8 = 2;

/// Number of states that are explored with two attempts.
const STATES: usize = 200_000;

fn explore(terms: Terms, mutant: Option<Mutant>, check: fn(&World) -> Checked) -> Found {
    let mut seen = Seen::default();
    let mut steps: Vec<(usize, Step)> = vec![(0, Step::Begin)];
    let mut waiting = VecDeque::new();
    let mut found = Found { states: 0, broken: None, ends: HashSet::new() };
    let first = World::new(terms, mutant);
    seen.is_new(&first);
    waiting.push_back((first, 0));
    while let Some((world, at)) = waiting.pop_front() {
        found.states += 1;
        if terms.attempts > 1 && found.states > STATES {
            return found;
        }
        found.ends.extend(world.ends());
        if let Err(what) = check(&world) {
            found.broken = Some((what, trace(&steps, at)));
            return found;
        }
        for step in world.steps() {
            let mut next = world.clone();
            next.take(step);
            if seen.is_new(&next) {
                steps.push((at, step));
                waiting.push_back((next, steps.len() - 1));
            }
        }
    }
    found
}

fn trace(steps: &[(usize, Step)], mut at: usize) -> Vec<String> {
    let mut trace = Vec::new();
    while at != 0 {
        trace.push(format!("{:?}", steps[at].1));
        at = steps[at].0;
    }
    trace.reverse();
    trace
}

fn holds(terms: Terms) -> Found {
    let found = explore(terms, None, check::is_right);
    if let Some((what, trace)) = &found.broken {
        panic!("{what}, after {} states, {terms:?}:\n{}", found.states, trace.join("\n"));
    }
    println!("{terms:?}: {} states", found.states);
    found
}

/// Explores one attempt with deaths of both ends. Every end must have been seen.
#[test]
fn one_attempt() {
    let found = holds(Terms { attempts: 1, deaths: DEATHS, records: true, rough: true });
    let ends = ["moved", "called off", "adopted", "resumed by an operator", "abandoned", "booted", "lost"];
    for end in ends {
        assert!(found.ends.contains(end), "no state was seen that ends as: {end}");
    }
}

/// A destination without a disk of its own, as in the restore environment, forgets.
#[test]
fn a_destination_that_forgets() {
    let found = holds(Terms { attempts: 1, deaths: DEATHS, records: false, rough: true });
    assert!(found.ends.contains("resumed by an operator"));
}

/// Explores a second attempt, with all messages of the first still in the network. No machine dies
/// and no disk fails. The space is still too large to be explored to the end here, so only the
/// nearest states are.
#[test]
fn two_attempts_to_a_depth() {
    let found = holds(Terms { attempts: 2, deaths: 0, records: true, rough: false });
    assert!(found.states > 100_000);
}

/// Every broken rule is detected.
#[test]
fn mutants_are_found_out() {
    for mutant in mutants::ALL {
        let terms = Terms {
            attempts: mutant.attempts(),
            deaths: mutant.deaths(),
            records: mutant.records(),
            rough: true,
        };
        // Most mutants do harm; some only keep an end from ever being reached.
        let harm = explore(terms, Some(mutant), check::is_safe);
        let found = if harm.broken.is_some() { harm } else { explore(terms, Some(mutant), check::is_right) };
        let (what, trace) = found.broken.unwrap_or_else(|| {
            panic!("{mutant:?} was not found out, in {} states", found.states);
        });
        println!("{mutant:?}: {what}, after {} states, by {} steps", found.states, trace.len());
    }
}
