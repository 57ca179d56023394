//! A driver of an AHCI controller.

use super::{BLOCKS, Input, SIZE, STEPS};
use crate::{
    Memory,
    ahci::{Controller, Drive, Identity, Properties},
    testing::{Fake, Raised, Ram},
};

/// Places of each port's list and area, and of the tables of all slots.
const LISTS: [u64; 2] = [0x1000, 0x2000];
const AREAS: [u64; 2] = [0x3000, 0x3400];
const TABLES: u64 = 0x4000;
/// Slots that are used.
const SLOTS: u64 = 4;

struct Driven {
    controller: Controller<Ram, Raised>,
    ram: Ram,
}

pub fn run(input: &mut Input<'_>) -> u64 {
    let Some(mut driven) = driven() else { return 0 };
    driven.switch_on();
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        driven.step(input);
    }
    let mut status = [0; 4];
    driven.controller.registers().read(0x120, &mut status);
    32 | u64::from(status[0])
}

/// Makes a controller with a disk, and one that is read-only.
fn driven() -> Option<Driven> {
    let (ram, disk) = (Ram::new(SIZE), Fake::new(BLOCKS as usize * 512));
    let read_only = Fake(disk.0.clone(), true);
    let mut answer = vec![0; 512];
    let mut put =
        |word: usize, value: u16| answer[2 * word..2 * word + 2].copy_from_slice(&value.to_le_bytes());
    for (word, value) in [(49, 0x0F00), (76, 0x010E), (83, 0x7400), (100, BLOCKS as u16), (169, 1)] {
        put(word, value);
    }
    let drive = |disk| Some(Drive::new(Identity::new(&answer).ok()?, Box::new(disk)));
    let drives = vec![(0, drive(disk)?), (1, drive(read_only)?)];
    let properties = Properties { capabilities: 0xC124_1F01, more: 0, version: 0x1_0301, ports: vec![0; 3] };
    let controller = Controller::new(properties, drives, ram.clone(), Raised::default());
    Some(Driven { controller, ram })
}

impl Driven {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        if self.controller.registers().write(offset, bytes) {
            self.controller.work();
        }
    }

    fn switch_on(&mut self) {
        self.write(4, &0x8000_0002_u32.to_le_bytes());
        for (port, (list, area)) in [0x100, 0x180].into_iter().zip(LISTS.into_iter().zip(AREAS)) {
            self.write(port, &list.to_le_bytes());
            self.write(port + 8, &area.to_le_bytes());
            self.write(port + 0x18, &[0x11, 0, 0, 0]);
            self.write(port + 0x14, &[0xFF; 4]);
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 5 {
            0 => {
                let (offset, value) = (input.number(2) % 0x300, input.number(8).to_le_bytes());
                let length = 4 + 4 * (input.byte() as usize % 2);
                self.write(offset, &value[..length]);
            }
            1 => {
                let port = input.byte() % 2 * 0x80;
                self.write(0x118 + port, &[0x10, 0, 0, 0]);
                self.write(0x118 + port, &[0x11, 0, 0, 0]);
            }
            2 => self.command(input),
            3 => {
                let (at, value) = (input.number(3), input.number(8));
                let _ = self.ram.write(at & !7, &value.to_le_bytes());
            }
            _ => {
                self.write(4, &1_u32.to_le_bytes());
                self.switch_on();
            }
        }
    }

    /// Issues a command with a range or two for its data.
    fn command(&mut self, input: &mut Input<'_>) {
        let (port, opcode, flags) = (input.byte() as usize % 2, input.byte() as u8, input.byte() as u8);
        let slot = u64::from(flags) % SLOTS;
        let (list, table) = (LISTS[port] + 32 * slot, TABLES + 0x100 * slot);
        let (sector, device, count, features) =
            (input.number(2), input.byte() as u8, input.number(2), input.number(2));
        let mut command = [0_u8; 20];
        (command[0], command[1], command[2], command[7]) = (0x27, flags & 0x80, opcode, device);
        (command[3], command[11]) = (features as u8, (features >> 8) as u8);
        (command[4], command[5], command[12], command[13]) =
            (sector as u8, (sector >> 8) as u8, count as u8, (count >> 8) as u8);
        command[15] = flags & 4;
        let (place, length) = (input.number(2) << 2, (input.number(2) << 4 | 0xF) as u32);
        let _ = self.ram.write(table, &command);
        for (number, start) in [place, place ^ 0x8000].into_iter().enumerate() {
            let range = [start as u32, 0, 0, length].map(u32::to_le_bytes).concat();
            let _ = self.ram.write(table + 0x80 + 16 * number as u64, &range);
        }
        let ranges = 1 + u32::from(flags >> 3 & 1);
        let header = [5 | ranges << 16, 0, table as u32, 0].map(u32::to_le_bytes).concat();
        let _ = self.ram.write(list, &header);
        let registers = 0x100 + 0x80 * port as u64;
        if matches!(opcode, 0x60 | 0x61) {
            self.write(registers + 0x34, &(1_u32 << slot).to_le_bytes());
        }
        self.write(registers + 0x38, &(1_u32 << slot).to_le_bytes());
    }
}
