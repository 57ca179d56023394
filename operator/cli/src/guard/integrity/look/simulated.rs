//! A kernel that changes its code all the time, and looks at it in between. Each reading, and each step of a
//! change, may come before or after any other.

use super::{Judged, Kernel, Odd, Suspect, judge, look};
use crate::guard::integrity::{
    copy::{self, Block, Copy},
    layout::{Part, Range as Area},
    memory::Memory,
    pokes::Lock,
    sites::Sites,
};
use proptest::prelude::*;
use std::{
    cell::RefCell,
    collections::{BTreeSet, VecDeque},
    io,
    ops::Range,
    time::Duration,
};

const START: u64 = 0xFFFF_FFFF_8100_0000;
const TRAMPOLINE: u64 = 0xFFFF_FFFF_C000_0000;
const SIZE: usize = 0x100;
/// Offsets of the tables, and of the functions that static calls go to.
const JUMPS: u64 = 0x1000;
const CALLS: u64 = 0x2000;
const KEY: u64 = 0x2800;
const QUIET_KEY: u64 = 0x2808;
/// Places that change.
const ENTRY: usize = 0x00;
const JUMP: usize = 0x40;
const CALL: usize = 0x50;
const PROBED: usize = 0x60;
const SHORT: usize = 0x70;
/// Places that the kernel could change, and does not.
const QUIET_JUMP: usize = 0xA0;
const QUIET_CALL: usize = 0xB0;
const QUIET_ENTRY: usize = 0xC0;
/// Code that the kernel does not change.
const PLAIN: usize = 0xE0;
/// Functions that static calls go to. One bit tells them apart.
const CALLEES: [u64; 2] = [START + 0x20, START + 0x30];

const BREAKPOINT: u8 = 0xCC;
const NOP5: [u8; 5] = [0x0F, 0x1F, 0x44, 0x00, 0x00];
const INSTRUCTIONS: [u8; 5] = [0x55, 0x48, 0x89, 0xE5, 0x41];
/// Changes that go on beside each other.
const ACTORS: usize = 5;
/// Steps for which an actor stands still at most, for each step between two readings: some more than a look
/// takes.
const STALL: u64 = 200;

/// A step of a change.
#[derive(Clone, Debug)]
enum Step {
    Nothing,
    Take(Lock),
    Release(Lock),
    Write(usize, Vec<u8>),
    Record(usize, usize),
    /// A static call goes to another function.
    Key(u64),
    /// A kprobe is in the list.
    Probe(bool),
    /// A jump of a kprobe that has left the list is still there.
    OldProbe(bool),
    /// The kernel has a symbol for the trampoline.
    Trampoline(bool),
}
use Step::{Key, Nothing, OldProbe, Probe, Record, Release, Take, Trampoline, Write};

struct World {
    text: Vec<u8>,
    key: u64,
    is_probed: bool,
    has_old_probe: bool,
    has_trampoline: bool,
    held: BTreeSet<&'static str>,
    records: Vec<Range<u64>>,
    /// Steps that each actor has before it.
    steps: Vec<VecDeque<Step>>,
    /// How often each actor has changed something.
    turns: [usize; ACTORS],
    random: u64,
    /// Number of steps that come between two readings, at most.
    pace: u64,
    /// One of so many steps is followed by a wait for a processor; none for 0.
    stalls: u64,
    /// Steps for which an actor still waits for a processor.
    stalled: [u64; ACTORS],
}

/// Returns a call or a jump.
fn branch(opcode: u8, from: usize, to: u64) -> Vec<u8> {
    let distance = to.wrapping_sub(START + from as u64 + 5);
    [&[opcode][..], &distance.to_le_bytes()[..4]].concat()
}

/// Returns the steps by which the kernel replaces an instruction.
fn poke(at: usize, new: &[u8]) -> Vec<Step> {
    let tail = new[1..].iter().enumerate().map(|(index, byte)| Write(at + 1 + index, vec![*byte]));
    let mut steps = vec![Write(at, vec![BREAKPOINT]), Nothing];
    steps.extend(tail);
    steps.extend([Record(at, new.len()), Nothing, Write(at, vec![new[0]]), Nothing]);
    steps
}

fn with(lock: Lock, steps: Vec<Step>) -> Vec<Step> {
    [vec![Take(lock), Nothing], steps, vec![Nothing, Release(lock)]].concat()
}

/// Returns what an actor does at its next turn.
fn turn(actor: usize, turn: usize) -> Vec<Step> {
    let is_on = turn.is_multiple_of(2);
    let jump = |at, opcode: u8, to| branch(opcode, at, START + to);
    match actor {
        // ftrace: the trampoline has a symbol before it is called, and until it is not called any more.
        0 if is_on => {
            [vec![Trampoline(true)], with(Lock::Text, poke(ENTRY, &branch(0xE8, ENTRY, TRAMPOLINE)))].concat()
        }
        0 => [with(Lock::Text, poke(ENTRY, &NOP5)), vec![Nothing, Trampoline(false)]].concat(),
        1 => {
            let new = if is_on { jump(JUMP, 0xE9, 0x4C) } else { NOP5.to_vec() };
            with(Lock::Text, poke(JUMP, &new))
        }
        2 => with(Lock::Text, poke(SHORT, if is_on { &[0xEB, 0x08] } else { &[0x66, 0x90] })),
        3 => {
            let function = CALLEES[usize::from(is_on)];
            let change = with(Lock::Text, poke(CALL, &branch(0xE8, CALL, function)));
            with(Lock::Calls, [vec![Key(function), Nothing], change].concat())
        }
        _ => probe(turn),
    }
}

/// A kprobe comes, becomes a jump, leaves the list, and its jump goes. Every other one stays a breakpoint.
fn probe(turn: usize) -> Vec<Step> {
    let breakpoint = [Write(PROBED, vec![BREAKPOINT]), Nothing, Record(PROBED, 1)].to_vec();
    let undo = [Write(PROBED, vec![INSTRUCTIONS[0]]), Nothing, Record(PROBED, 1)].to_vec();
    match turn % 6 {
        0 | 4 => [vec![Probe(true), Nothing], with(Lock::Text, breakpoint)].concat(),
        1 => with(Lock::Text, poke(PROBED, &branch(0xE9, PROBED, TRAMPOLINE))),
        2 => vec![OldProbe(true), Nothing, Probe(false)],
        3 => {
            let tail = Write(PROBED + 1, INSTRUCTIONS[1..].to_vec());
            let change = [breakpoint, vec![tail, Record(PROBED, 5), OldProbe(false), Nothing], undo].concat();
            with(Lock::Text, change)
        }
        _ => [with(Lock::Text, undo), vec![Nothing, Probe(false)]].concat(),
    }
}

impl World {
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Takes some steps.
    fn go_on(&mut self) {
        let steps = self.random(self.pace + 1);
        (0..steps).for_each(|_| self.step());
    }

    fn step(&mut self) {
        let actor = self.random(ACTORS as u64) as usize;
        if self.stalled[actor] > 0 {
            self.stalled[actor] -= 1;
            return;
        }
        if self.stalls > 0 && self.random(self.stalls) == 0 {
            self.stalled[actor] = self.random(STALL * self.pace);
        }
        let Some(step) = self.steps[actor].front().cloned() else {
            self.steps[actor] = turn(actor, self.turns[actor]).into();
            // A static call holds its lock while it waits for the text's.
            let rest = [20, 20, 20, 1000, 20][actor];
            for _ in 0..self.random(rest) {
                self.steps[actor].push_front(Nothing);
            }
            self.turns[actor] += 1;
            return;
        };
        match step {
            // It waits.
            Take(lock) if !self.held.insert(name(lock)) => return,
            Nothing | Take(_) => {}
            Release(lock) => assert!(self.held.remove(name(lock))),
            Write(at, bytes) => self.text[at..at + bytes.len()].copy_from_slice(&bytes),
            Record(at, size) => {
                let address = START + at as u64;
                self.records.push(address..address + size as u64);
            }
            Key(function) => self.key = function,
            Probe(is_there) => self.is_probed = is_there,
            OldProbe(is_there) => self.has_old_probe = is_there,
            Trampoline(is_there) => self.has_trampoline = is_there,
        }
        self.steps[actor].pop_front();
    }

    fn byte(&self, address: u64) -> u8 {
        let offset = address - START;
        let word = |value: u64, at: u64| value.wrapping_sub(START + at).to_le_bytes();
        let entry = |base: u64, size: u64, entries: &[(u64, u64)]| {
            let (index, at) = ((offset - base) / size, (offset - base) % size);
            let Some((first, second)) = entries.get(index as usize) else { return 0 };
            let start = base + index * size;
            let bytes = [&word(*first, start)[..4], &word(*second, start + 4)[..4], &[1; 8]].concat();
            bytes[at as usize]
        };
        let place = |at: usize| START + at as u64;
        match offset {
            _ if offset < SIZE as u64 => self.text[offset as usize],
            JUMPS..CALLS => {
                let jumps = [(JUMP, 0x4C), (SHORT, 0x7A), (QUIET_JUMP, 0xAC)];
                entry(JUMPS, 16, &jumps.map(|(at, target)| (place(at), place(target))))
            }
            CALLS..KEY => {
                let calls = [(place(CALL), START + KEY), (place(QUIET_CALL), START + QUIET_KEY)];
                entry(CALLS, 8, &calls)
            }
            KEY..QUIET_KEY => self.key.to_le_bytes()[(offset - KEY) as usize],
            _ => CALLEES[0].to_le_bytes()[(offset - QUIET_KEY) as usize],
        }
    }
}

fn name(lock: Lock) -> &'static str {
    match lock {
        Lock::Text => "text",
        _ => "calls",
    }
}

/// The kernel under test, with its copy.
struct Simulated {
    world: RefCell<World>,
    part: Part,
    block: Block,
    old: Vec<u8>,
    /// Places that were collected before the first pass.
    stale: Option<Sites>,
}

impl Memory for Simulated {
    /// A reading is no instant: other things happen between its words.
    fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
        for (at, byte) in (address..).zip(to) {
            let mut world = self.world.borrow_mut();
            if at % 8 == 0 {
                world.go_on();
            }
            *byte = world.byte(at);
        }
        Ok(())
    }
}

impl Kernel for Simulated {
    fn record(&mut self) -> io::Result<()> {
        self.world.get_mut().records.clear();
        Ok(())
    }

    fn recorded(&mut self) -> io::Result<Option<Vec<Range<u64>>>> {
        let world = self.world.get_mut();
        world.go_on();
        Ok(Some(world.records.clone()))
    }

    fn is_free(&mut self, lock: Lock) -> io::Result<bool> {
        let world = self.world.get_mut();
        world.go_on();
        Ok(if lock == Lock::OldProbes { !world.has_old_probe } else { !world.held.contains(name(lock)) })
    }

    fn read(&mut self, block: &Block) -> io::Result<Vec<u8>> {
        copy::read(self, block)
    }

    fn sites(&mut self) -> io::Result<Sites> {
        let mut symbols = String::new();
        for at in [ENTRY, 0x20, 0x30, QUIET_ENTRY] {
            symbols += &format!("{:x} t function_{at:x}\n", START + at as u64);
        }
        self.world.get_mut().go_on();
        if self.world.get_mut().has_trampoline {
            symbols += &format!("{TRAMPOLINE:x} t ftrace_trampoline\t[__builtin__ftrace]\n");
        }
        self.world.get_mut().go_on();
        let mut probes = String::new();
        if self.world.get_mut().is_probed {
            probes = format!("{:x}  k  probed+0x0\n", START + PROBED as u64);
        }
        Sites::collect(self, &symbols, &probes, &[], [&self.part].into_iter())
    }

    fn pause(&mut self, time: Duration) {
        let millis = time.as_millis() as u64;
        (0..millis.min(50)).for_each(|_| self.world.get_mut().go_on());
    }
}

impl Simulated {
    fn new(seed: u64, pace: u64) -> Self {
        let mut text = vec![0x90; SIZE];
        for at in [ENTRY, JUMP, QUIET_JUMP, QUIET_ENTRY] {
            text[at..at + 5].copy_from_slice(&NOP5);
        }
        text[SHORT..SHORT + 2].copy_from_slice(&[0x66, 0x90]);
        text[PROBED..PROBED + 5].copy_from_slice(&INSTRUCTIONS);
        for at in [CALL, QUIET_CALL] {
            text[at..at + 5].copy_from_slice(&branch(0xE8, at, CALLEES[0]));
        }
        let part = Part {
            name: "kernel".into(),
            ranges: vec![Area { start: START, end: START + SIZE as u64, is_code: true }],
            jumps: (START + JUMPS, START + JUMPS + 0x30),
            calls: (START + CALLS, START + CALLS + 0x10),
        };
        let world = World {
            text: text.clone(),
            key: CALLEES[0],
            is_probed: false,
            has_old_probe: false,
            has_trampoline: false,
            held: BTreeSet::new(),
            records: Vec::new(),
            steps: vec![VecDeque::new(); ACTORS],
            turns: [0; ACTORS],
            random: seed | 1,
            pace: 0,
            stalls: 0,
            stalled: [0; ACTORS],
        };
        let folder = tempfile::tempdir().expect("a folder");
        let mut copy = Copy::open(folder.path(), "boot").expect("a copy");
        let block = Block::default();
        let mut new = Self { world: RefCell::new(world), part: part.clone(), block, old: text, stale: None };
        copy.add(part, &new, || Ok(true)).expect("a copy");
        new.block = copy.parts["kernel"].blocks[0].clone();
        new.stale = Some(new.sites().expect("places"));
        new.world.get_mut().pace = pace;
        new
    }

    /// Makes a pass, as the scrubber does.
    fn pass(&mut self) -> Judged {
        self.pause(Duration::from_millis(20));
        let now = copy::read(self, &self.block).expect("bytes");
        let (block, old) = (self.block.clone(), self.old.clone());
        let suspect = Suspect { part: "kernel".into(), block, old, now };
        let judged = judge(self.stale.as_ref().expect("places"), &suspect);
        if judged.is_well() {
            return judged;
        }
        look(self, &mut [suspect]).expect("a look").remove(0)
    }
}

/// Passes within which a foreign store is found.
const PASSES: usize = 10;

/// Returns a change of somebody else's.
fn foreign(choice: usize) -> (usize, Vec<u8>) {
    match choice {
        0 => (PLAIN, vec![0x91]),
        1 => (PLAIN, vec![BREAKPOINT]),
        2 => (QUIET_JUMP, vec![BREAKPOINT]),
        3 => (QUIET_JUMP, branch(0xE9, QUIET_JUMP, START + 0xAD)),
        4 => (QUIET_CALL, branch(0xE8, QUIET_CALL, CALLEES[1])),
        5 => (QUIET_ENTRY, branch(0xE8, QUIET_ENTRY, START + 0x20)),
        _ => (QUIET_ENTRY, vec![0x0E]),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever the kernel does between two readings, it is not accused.
    #[test]
    fn the_kernels_own_changes_are_never_odd(
        seed: u64,
        pace in prop::sample::select(vec![1, 3, 20, 100]),
        stalls in prop::sample::select(vec![0, 50, 1000]),
    ) {
        let mut kernel = Simulated::new(seed, pace);
        kernel.world.get_mut().stalls = stalls;
        for _ in 0..PASSES {
            let judged = kernel.pass();
            prop_assert_eq!(&judged.odd, &[] as &[Odd]);
        }
    }

    /// A store of somebody else's that stays is found beside all that, and it alone.
    #[test]
    fn a_foreign_store_is_found_beside_the_kernels_changes(
        seed: u64,
        pace in prop::sample::select(vec![1, 3, 20, 100]),
        choice in 0_usize..7,
        before in 0_usize..3,
    ) {
        let mut kernel = Simulated::new(seed, pace);
        for _ in 0..before {
            prop_assert_eq!(&kernel.pass().odd, &[] as &[Odd]);
        }
        let (at, bytes) = foreign(choice);
        kernel.world.get_mut().text[at..at + bytes.len()].copy_from_slice(&bytes);
        // Some lock may not have been free once in a pass.
        let found = (0..PASSES).map(|_| kernel.pass().odd).find(|odd| !odd.is_empty()).unwrap_or_default();
        prop_assert_eq!(found.len(), 1, "{:?}", found);
        let (start, end) = (found[0].start, found[0].start + found[0].now.len() as u64);
        prop_assert!((start..end).contains(&(START + at as u64)), "{:?}", found);
    }
}
