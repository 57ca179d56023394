//! A driver in the guest that follows arbitrary bytes: the configuration space of a function, and registers,
//! queues and commands of an NVMe controller and of an AHCI controller.
//!
//! The function must return for every input. A panic is a finding, and so is a hang.

mod ports;

use crate::{
    Memory,
    nvme::{Controller, Identity, Limits, Namespace},
    pci::{Function, SPACE},
    testing::{Fake, Raised, Ram},
};

/// Size of the guest's memory in bytes.
const SIZE: usize = 256 << 10;
/// Blocks of the disk.
const BLOCKS: u64 = 64;
/// Largest number of steps of one input.
const STEPS: usize = 200;
/// Places of the administrator's queues, and of another pair.
const QUEUES: [u64; 4] = [0x1000, 0x2000, 0x3000, 0x4000];
/// Entries of each queue.
const ENTRIES: u32 = 8;

/// Inputs to begin with: a controller that is switched on and identified; one whose pair of queues is made,
/// and whose first block is written and read; a configuration space; a disk that is
/// identified, is written to, and refuses a command.
pub const SEEDS: &[&[u8]] = &[
    &[0, 0, 2, 0, 6, 1, 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 6, 0, 0x80, 2, 0, 0, 0, 0, 0, 0, 0],
    &[
        0, 0, 1, 2, 1, 1, 1, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 2, 1, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0,
        1,
    ],
    &[1, 0x40, 0x11, 0, 2, 0x80, 3, 0x40, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0, 0],
    &[
        2, 2, 0, 0xEC, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0xFF, 0, 2, 0, 0x61, 0x81, 5, 0, 0x40, 8, 0, 1, 0,
        0, 0x20, 0xFF, 0, 2, 0, 0xB0, 0x82, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0xFF, 0,
    ],
];

/// Bytes of an input, from which numbers are taken. After the last byte there are zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u64 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        u64::from(*first)
    }

    fn number(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |number, at| number | self.byte() << (8 * at))
    }
}

/// Does what the input says to a function or to a controller. Returns a number for what came of it.
#[must_use]
pub fn run(input: &[u8]) -> u64 {
    let mut input = Input(input);
    match input.byte() % 3 {
        0 => controller(&mut input),
        1 => function(&mut input),
        _ => ports::run(&mut input),
    }
}

/// Makes a function of a space with some bytes of the input in it, and uses the function.
fn function(input: &mut Input<'_>) -> u64 {
    let mut space = vec![0; SPACE];
    space[4] = 2;
    space[0x34] = 0x40;
    let start = 0x40 + input.byte() as usize % 0xC0;
    space[start..].iter_mut().for_each(|byte| *byte = input.byte() as u8);
    let Ok(mut function) = Function::new(&space, &[(0, 0x1000), (1, 16)]) else { return 0 };
    let mut sent = 0;
    for _ in 0..STEPS.min(input.0.len()) {
        let (what, at, value) = (input.byte() % 5, input.number(2), input.number(4).to_le_bytes());
        let mut read = [0; 8];
        let effects = match what {
            0 => Some(function.write(at as usize & 0xFF, &value)),
            1 => function.write_table(at as usize & 1, at, &value),
            2 => {
                sent += u64::from(function.raise(at as u16).is_some());
                None
            }
            3 => {
                function.read(at as usize & 0xFF, &mut read);
                function.read_table(0, at, &mut read);
                None
            }
            _ => {
                sent += u64::from(function.decode(at).is_some());
                None
            }
        };
        sent += effects.map_or(0, |effects| effects.messages.len() as u64);
    }
    1 + sent.min(14)
}

/// A controller with its driver.
struct Driven {
    controller: Controller<Ram, Raised>,
    ram: Ram,
    tails: [u32; 2],
}

fn controller(input: &mut Input<'_>) -> u64 {
    let Some(mut driven) = driven() else { return 0 };
    driven.switch_on();
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        driven.step(input);
    }
    let mut status = [0; 4];
    driven.controller.registers().read(0x1C, &mut status);
    16 | u64::from(status[0])
}

/// Makes a controller with a disk, and one that is read-only.
fn driven() -> Option<Driven> {
    let (ram, disk) = (Ram::new(SIZE), Fake::new(BLOCKS as usize * 512));
    let read_only = Fake(disk.0.clone(), true);
    let mut structure = vec![0; 256];
    structure[..8].copy_from_slice(&BLOCKS.to_le_bytes());
    structure[130] = 9;
    let mut about = vec![0; 256];
    about[77] = 4;
    about[82] = 2;
    let namespaces = vec![
        Namespace::new(1, &structure, &[], Box::new(disk)).ok()?,
        Namespace::new(2, &structure, &[], Box::new(read_only)).ok()?,
    ];
    let identity = Identity::new(&about).ok()?;
    let limits = Limits { pairs: 2, entries: ENTRIES as u16, vectors: 2 };
    let controller = Controller::new(identity, namespaces, limits, ram.clone(), Raised::default());
    Some(Driven { controller, ram, tails: [0; 2] })
}

impl Driven {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        if self.controller.registers().write(offset, bytes) {
            self.controller.work();
        }
    }

    fn switch_on(&mut self) {
        let sizes = (ENTRIES - 1) | (ENTRIES - 1) << 16;
        self.write(0x24, &sizes.to_le_bytes());
        self.write(0x28, &QUEUES[0].to_le_bytes());
        self.write(0x30, &QUEUES[1].to_le_bytes());
        self.write(0x14, &1_u32.to_le_bytes());
        self.tails = [0; 2];
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 6 {
            0 => {
                let (offset, value) = (input.number(2) % 0x1040, input.number(8).to_le_bytes());
                let length = 4 + 4 * (input.byte() as usize % 2);
                self.write(offset, &value[..length]);
            }
            1 => self.make_queues(),
            2 => self.command(input),
            3 => {
                let (at, value) = (input.number(3), input.number(8));
                let _ = self.ram.write(at & !7, &value.to_le_bytes());
            }
            4 => self.switch_on(),
            _ => {
                let queue = input.byte() % 3;
                self.write(0x1004 + queue * 8, &(input.byte() as u32 % ENTRIES).to_le_bytes());
            }
        }
    }

    fn make_queues(&mut self) {
        let size = (ENTRIES - 1) << 16 | 1;
        self.submit(0, 5, 0, [QUEUES[3], 0], [size, 1 << 16 | 3, 0]);
        self.submit(0, 1, 0, [QUEUES[2], 0], [size, 1 << 16 | 1, 0]);
        self.tails[1] = 0;
    }

    fn command(&mut self, input: &mut Input<'_>) {
        let (queue, opcode, namespace) =
            (input.byte() as usize % 2, input.byte() as u8, input.byte() as u32 % 4);
        let pages = [input.number(2) << 6, input.number(2) << 3];
        let words = [input.number(2) as u32, input.number(1) as u32, input.number(2) as u32];
        // Heads follow, so that there is mostly room.
        let head = self.tails[queue];
        self.write(0x1004 + queue as u64 * 8, &head.to_le_bytes());
        self.submit(queue, opcode, namespace, pages, words);
    }

    fn submit(&mut self, queue: usize, opcode: u8, namespace: u32, pages: [u64; 2], words: [u32; 3]) {
        let start = QUEUES[2 * queue] + u64::from(self.tails[queue]) * 64;
        let mut command = [0_u32; 16];
        (command[0], command[1]) = (u32::from(opcode), namespace);
        (command[6], command[8]) = (pages[0] as u32, pages[1] as u32);
        command[10..13].copy_from_slice(&words);
        let _ = self.ram.write(start, &command.map(u32::to_le_bytes).concat());
        self.tails[queue] = (self.tails[queue] + 1) % ENTRIES;
        self.write(0x1000 + queue as u64 * 8, &self.tails[queue].to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_reach_a_controller_that_is_on_and_a_function() {
        let outcomes: Vec<u64> = SEEDS.iter().map(|seed| run(seed)).collect();
        assert_eq!(outcomes[..2], [17, 17]);
        assert!(outcomes[2] < 16);
        assert_eq!(outcomes[3], 0x71);
    }
}
