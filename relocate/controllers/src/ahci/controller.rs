//! The part of the controller that one thread owns: its disks, and what is done for them.

use super::{
    command::{Command, HEADER, Header, Received, Unread},
    drive::{Drive, Ended, How, READY},
    registers::{BUSY, Port, Properties, Registers, command, status},
};
use crate::{
    Interrupts, Memory,
    gate::{Gated, Pass},
    parts::Lost,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

/// The error register of a disk that has found itself well.
const WELL: u8 = 1;
/// Place of the number of bytes that were copied, in an entry of the list of commands.
const BYTES: u64 = 4;

/// A controller.
#[derive(Debug)]
pub struct Controller<M, I> {
    registers: Arc<Registers<I>>,
    memory: M,
    /// Disks by their ports.
    drives: BTreeMap<usize, Drive>,
    /// Slot of each port after the last one that had its turn.
    turns: Vec<u32>,
}

/// A command that has its turn.
#[derive(Clone, Debug)]
struct Turn {
    port: usize,
    slot: u32,
    header: u64,
    received: u64,
    age: u64,
    pass: Pass,
}

/// What came of a command.
#[derive(Debug)]
enum Outcome {
    /// The disk has ended it.
    Ended(Command, Ended),
    /// The disk's control register was written: the disk waits in its reset, or comes out of it.
    Controlled { resets: bool },
    /// The port has failed, with this event.
    Broken(u32),
}

impl From<Lost> for Outcome {
    fn from(lost: Lost) -> Self {
        Self::Broken(match lost {
            Lost::NoMemory => status::BUS,
            Lost::NoMore => status::OVERFLOW,
        })
    }
}

impl<M: Memory, I: Interrupts> Controller<M, I> {
    /// Makes a controller with disks at some of its ports. It is as after a reset.
    pub fn new(properties: Properties, drives: Vec<(usize, Drive)>, memory: M, interrupts: I) -> Self {
        let fastest = match properties.capabilities >> 20 & 0xF {
            0 => 3,
            generation => generation,
        };
        let speed = |drive: &Drive| drive.identity().speed().min(fastest);
        let speeds: Vec<_> = drives.iter().map(|(port, drive)| (*port, speed(drive))).collect();
        let turns = vec![0; properties.ports.len()];
        let registers = Arc::new(Registers::new(properties, &speeds, interrupts));
        Self { registers, memory, drives: drives.into_iter().collect(), turns }
    }

    /// Returns the registers.
    #[must_use]
    pub fn registers(&self) -> Arc<Registers<I>> {
        Arc::clone(&self.registers)
    }

    /// Does what was asked for until nothing is left. It is called after a write of a register that
    /// [`Registers::write`] returns true for.
    pub fn work(&mut self) {
        loop {
            self.follow_reset();
            let ports: Vec<usize> = self.drives.keys().copied().collect();
            let mut did = false;
            for port in ports {
                did |= self.send_signature(port) || self.serve(port);
            }
            if !did {
                return;
            }
        }
    }

    /// Ends the work in order: writes last.
    ///
    /// # Errors
    /// A disk did not take them.
    pub fn finish(&mut self) -> Result<(), String> {
        let flushed = self.drives.iter_mut().map(|(port, drive)| (port, drive.flush()));
        let failed: Vec<_> =
            flushed.filter_map(|(port, done)| Some(format!("port {port}: {}", done.err()?))).collect();
        if failed.is_empty() { Ok(()) } else { Err(failed.join(", ")) }
    }

    fn follow_reset(&mut self) {
        let mut values = self.registers.values();
        if values.wants_reset() {
            values.reset();
            drop(values);
            self.registers.settle();
        }
    }

    /// Sends the signature of a disk that has begun anew, if its port receives.
    fn send_signature(&mut self, number: usize) -> bool {
        let (area, pass) = {
            let mut values = self.registers.values();
            let Some(port) = values.ports.get_mut(number) else { return false };
            if !port.owes_signature || port.command & command::RECEIVES == 0 {
                return false;
            }
            port.sign(READY, WELL);
            (port.received, port.gate.pass())
        };
        // A driver that has no area there does without.
        let _ = put(&Gated::new(&self.memory, pass), area, &Received::signature(READY, WELL));
        true
    }

    /// Executes the next command of a port. Returns false if there is none.
    fn serve(&mut self, number: usize) -> bool {
        let Some(turn) = self.begin(number) else { return false };
        let outcome = self.execute(&turn);
        self.end(&turn, outcome);
        self.registers.settle();
        true
    }

    fn begin(&mut self, number: usize) -> Option<Turn> {
        let mut values = self.registers.values();
        let is_reset = values.wants_reset();
        let port = values.ports.get_mut(number)?;
        let is_ready = port.is_started() && port.is_linked() && !port.owes_signature && !port.is_halted;
        if is_reset || !is_ready || port.issue == 0 {
            return None;
        }
        let first = self.turns[number];
        let slot = (first + port.issue.rotate_right(first).trailing_zeros()) % u32::BITS;
        self.turns[number] = (slot + 1) % u32::BITS;
        port.is_at_work = true;
        if port.active & 1 << slot == 0 {
            port.task_file |= BUSY;
        }
        let header = port.list + u64::from(slot) * HEADER;
        let (age, pass) = (port.age, port.gate.pass());
        Some(Turn { port: number, slot, header, received: port.received, age, pass })
    }

    fn execute(&mut self, turn: &Turn) -> Outcome {
        let memory = Gated::new(&self.memory, turn.pass.clone());
        let Some(header) = Header::read(&memory, turn.header) else {
            return Outcome::Broken(status::BUS);
        };
        let command = match header.command(&memory) {
            Ok(command) => command,
            Err(Unread::NoMemory) => return Outcome::Broken(status::BUS),
            Err(Unread::Malformed) => return Outcome::Broken(status::INTERFACE),
        };
        if !command.is_command() {
            return Outcome::Controlled { resets: command.resets() };
        }
        let Some(mut data) = header.data(&memory) else { return Outcome::Broken(status::BUS) };
        let Some(drive) = self.drives.get_mut(&turn.port) else {
            return Outcome::Broken(status::INTERFACE);
        };
        match drive.execute(&command, &mut data) {
            Ok(ended) => Outcome::Ended(command, ended),
            Err(lost) => lost.into(),
        }
    }

    fn end(&mut self, turn: &Turn, mut outcome: Outcome) {
        if let Outcome::Ended(command, ended) = &outcome {
            // After a stop or a reset there is no memory. A driver that has no area there does without.
            let memory = Gated::new(&self.memory, turn.pass.clone());
            let _ = put(&memory, turn.received, &Received::of(command, ended));
            let _ = memory.write(turn.header + BYTES, &ended.bytes.to_le_bytes());
            fence(Ordering::Release);
        }
        let mut values = self.registers.values();
        let Some(port) = values.ports.get_mut(turn.port) else { return };
        port.is_at_work = false;
        if port.age == turn.age {
            if !turn.pass.is_valid() {
                // The function was no master of the bus meanwhile.
                outcome = Outcome::Broken(status::BUS);
            }
            let events = port.end(1 << turn.slot, &outcome);
            values.note(turn.port, events);
            if let (Outcome::Ended(..), Some(drive)) = (outcome, self.drives.get_mut(&turn.port)) {
                drive.answer();
            }
        }
    }
}

fn put(memory: &impl Memory, area: u64, received: &Received) -> Option<()> {
    memory.write(area.checked_add(received.place)?, &received.bytes)
}

impl Port {
    /// Notes the end of the command in a slot. Returns the events.
    fn end(&mut self, slot: u32, outcome: &Outcome) -> u32 {
        match outcome {
            Outcome::Ended(_, ended) => self.end_command(slot, ended),
            Outcome::Controlled { resets } => {
                self.issue &= !slot;
                if !resets {
                    self.task_file &= !BUSY;
                    self.owes_signature = self.is_in_reset;
                }
                self.is_in_reset = *resets;
                0
            }
            Outcome::Broken(event) => {
                self.task_file &= !BUSY;
                self.is_halted = true;
                *event
            }
        }
    }

    fn end_command(&mut self, slot: u32, ended: &Ended) -> u32 {
        self.task_file = u32::from(ended.error) << 8 | u32::from(ended.status());
        let event = match ended.how {
            How::Registers => status::REGISTERS,
            How::Pio { .. } => status::PIO,
            How::Queued => status::BITS,
        };
        if ended.failed() {
            // The driver finds the command by what is left of it.
            self.is_halted = true;
            if ended.how == How::Queued {
                self.issue &= !slot;
            }
            return event | status::TASK_FILE;
        }
        self.issue &= !slot;
        if ended.how == How::Queued {
            self.active &= !slot;
        }
        event
    }
}
