//! Commands on namespaces.

use super::{
    command::{ALL, Command, Outcome, Status},
    identify::Namespace,
    prp,
};
use crate::{Memory, parts::Parts};

mod opcode {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET: u8 = 0x09;
}
/// Bit of a command: its data is to last before the command ends.
const FORCE: u32 = 1 << 30;
/// Bit of Dataset Management: the ranges are given up.
const DEALLOCATE: u32 = 4;
/// Size of a range in Dataset Management.
const RANGE: usize = 16;
/// Bytes that are copied at once.
const BUFFER: u64 = 128 << 10;

/// The namespaces of a controller, and what it promises about them.
#[derive(Debug)]
pub struct Storage {
    pub namespaces: Vec<Namespace>,
    /// Largest length of a transfer.
    pub transfer_max: Option<u64>,
    /// True while a write may end before its data lasts.
    pub caches: bool,
}

impl Storage {
    /// Executes a command.
    pub fn execute(&mut self, command: &Command, memory: &(impl Memory + ?Sized)) -> Outcome {
        if command.is_special() {
            return Err(Status::INVALID_FIELD);
        }
        let (caches, transfer_max) = (self.caches, self.transfer_max);
        let opcode = command.opcode();
        if opcode == opcode::FLUSH && command.namespace() == ALL {
            return self.flush();
        }
        let number = command.namespace();
        let namespace = self.namespaces.iter_mut().find(|one| one.number == number);
        let namespace = namespace.ok_or(Status::INVALID_NAMESPACE)?;
        match opcode {
            opcode::FLUSH => return namespace.flush(),
            opcode::READ => return namespace.read(command, transfer_max, memory),
            opcode::WRITE | opcode::WRITE_ZEROES | opcode::DATASET => {}
            _ => return Err(Status::INVALID_OPCODE),
        }
        if namespace.disk.is_read_only() {
            return Err(Status::PROTECTED);
        }
        match opcode {
            opcode::WRITE => namespace.write(command, transfer_max, memory)?,
            opcode::WRITE_ZEROES => namespace.zero(command)?,
            _ => return namespace.give_up(command, memory),
        };
        if !caches || command.word(12) & FORCE != 0 {
            namespace.flush()?;
        }
        Ok(0)
    }

    /// Notes that a command begins.
    pub fn begin(&mut self) {
        self.namespaces.iter_mut().for_each(|one| one.disk.begin());
    }

    /// Notes that the driver has the answer to the command.
    pub fn answer(&mut self) {
        self.namespaces.iter_mut().for_each(|one| one.disk.answer());
    }

    /// Makes all writes last.
    pub fn flush(&mut self) -> Outcome {
        // Each is flushed, also after an error of another one.
        let all: Vec<Outcome> = self.namespaces.iter_mut().map(Namespace::flush).collect();
        all.into_iter().find(Result::is_err).unwrap_or(Ok(0))
    }
}

impl Namespace {
    fn flush(&mut self) -> Outcome {
        self.disk.flush().map(|()| 0).map_err(|error| Status::of_write(&error))
    }

    /// Returns position and length in bytes of the blocks of a command.
    fn place(&self, command: &Command) -> Result<(u64, u64), Status> {
        self.range(command.long(10), u64::from(command.word(12) & 0xFFFF) + 1)
    }

    fn range(&self, first: u64, count: u64) -> Result<(u64, u64), Status> {
        let end = first.checked_add(count).filter(|end| *end <= self.blocks);
        end.map(|_| (first << self.shift, count << self.shift)).ok_or(Status::OUT_OF_RANGE)
    }

    /// Copies blocks between the disk and the guest's memory, a buffer at a time.
    fn transfer<M: Memory + ?Sized>(
        &mut self,
        command: &Command,
        most: Option<u64>,
        memory: &M,
        mut copy: impl FnMut(&mut Self, u64, &mut [u8], &mut Parts<'_, M>) -> Result<(), Status>,
    ) -> Outcome {
        let (at, length) = self.place(command)?;
        if most.is_some_and(|most| length > most) {
            return Err(Status::INVALID_FIELD);
        }
        let mut data = prp::find(memory, command.pages(), length)?;
        let mut buffer = vec![0; length.min(BUFFER) as usize];
        for done in (0..length).step_by(BUFFER as usize) {
            let part = &mut buffer[..(length - done).min(BUFFER) as usize];
            copy(self, at + done, part, &mut data)?;
        }
        Ok(0)
    }

    fn read<M: Memory + ?Sized>(&mut self, command: &Command, most: Option<u64>, memory: &M) -> Outcome {
        self.transfer(command, most, memory, |namespace, at, part, data| {
            namespace.disk.read(at, part).map_err(|error| Status::of_read(&error))?;
            Ok(data.write(part)?)
        })
    }

    fn write<M: Memory + ?Sized>(&mut self, command: &Command, most: Option<u64>, memory: &M) -> Outcome {
        self.transfer(command, most, memory, |namespace, at, part, data| {
            data.read(part)?;
            namespace.disk.write(at, part).map_err(|error| Status::of_write(&error))
        })
    }

    fn zero(&mut self, command: &Command) -> Outcome {
        let (at, length) = self.place(command)?;
        self.disk.zero(at, length).map(|()| 0).map_err(|error| Status::of_write(&error))
    }

    /// Gives ranges up. All are checked before the first is given up.
    fn give_up(&mut self, command: &Command, memory: &(impl Memory + ?Sized)) -> Outcome {
        let count = (command.word(10) & 0xFF) as usize + 1;
        let mut bytes = vec![0; count * RANGE];
        prp::find(memory, command.pages(), bytes.len() as u64)?.read(&mut bytes)?;
        let mut ranges = Vec::with_capacity(count);
        for range in bytes.as_chunks::<RANGE>().0 {
            let [_, blocks, low, high] = [0, 4, 8, 12]
                .map(|at| u32::from_le_bytes([range[at], range[at + 1], range[at + 2], range[at + 3]]));
            ranges.push(self.range(u64::from(low) | u64::from(high) << 32, u64::from(blocks))?);
        }
        if command.word(11) & DEALLOCATE == 0 {
            // The rest of the command is advice.
            return Ok(0);
        }
        for (at, length) in ranges.into_iter().filter(|(_, length)| *length > 0) {
            self.disk.discard(at, length).map_err(|error| Status::of_write(&error))?;
        }
        Ok(0)
    }
}
