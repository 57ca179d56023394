//! Commands of administration.

use super::{
    command::{ALL, Command, Outcome, Status},
    controller::Controller,
    identify::{EVENTS, STRUCTURE},
    prp,
    queue::{Completions, Submissions, silence},
};
use crate::{Interrupts, Memory};

mod opcode {
    pub const DELETE_SUBMISSIONS: u8 = 0x00;
    pub const CREATE_SUBMISSIONS: u8 = 0x01;
    pub const GET_LOG: u8 = 0x02;
    pub const DELETE_COMPLETIONS: u8 = 0x04;
    pub const CREATE_COMPLETIONS: u8 = 0x05;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0A;
    pub const ASYNC_EVENT: u8 = 0x0C;
}

/// Structures that Identify returns.
mod structure {
    pub const NAMESPACE: u32 = 0x00;
    pub const CONTROLLER: u32 = 0x01;
    pub const ACTIVE: u32 = 0x02;
    pub const NAMES: u32 = 0x03;
    /// The controller's limits for the command set in bits 24 to 31 of word 11.
    pub const LIMITS: u32 = 0x06;
}

mod feature {
    pub const ARBITRATION: u32 = 0x01;
    pub const POWER: u32 = 0x02;
    pub const TEMPERATURE: u32 = 0x04;
    pub const ERRORS: u32 = 0x05;
    pub const WRITE_CACHE: u32 = 0x06;
    pub const QUEUES: u32 = 0x07;
    pub const COALESCING: u32 = 0x08;
    pub const VECTOR: u32 = 0x09;
    pub const ATOMICITY: u32 = 0x0A;
    pub const EVENTS: u32 = 0x0B;
}
/// Features that are kept for the driver, and change nothing here.
pub const KEPT: [u32; 7] = [
    feature::ARBITRATION,
    feature::POWER,
    feature::TEMPERATURE,
    feature::ERRORS,
    feature::COALESCING,
    feature::ATOMICITY,
    feature::EVENTS,
];
/// Bit of Set Features: the value is to outlive a reset.
const SAVE: u32 = 1 << 31;

mod log {
    pub const ERRORS: u32 = 1;
    pub const HEALTH: u32 = 2;
    pub const FIRMWARE: u32 = 3;
}
/// Largest length of a log.
const LOG_MAX: u64 = 64 << 10;
/// Temperature in kelvin that the log of health has: no sensor is there.
const TEMPERATURE: u16 = 273 + 25;

/// Bits of the creation of a queue: its memory is in one piece; it raises interrupts.
const CONTIGUOUS: u32 = 1;
const RAISES: u32 = 2;

/// The end of a command of administration: none yet for an event that has not happened.
pub enum Answer {
    Now(Outcome),
    Later,
}

impl<M: Memory, I: Interrupts> Controller<M, I> {
    /// Executes a command of administration.
    pub(super) fn administrate(&mut self, command: &Command) -> Answer {
        if command.is_special() {
            return Answer::Now(Err(Status::INVALID_FIELD));
        }
        Answer::Now(match command.opcode() {
            opcode::DELETE_SUBMISSIONS => self.delete_submissions(command),
            opcode::CREATE_SUBMISSIONS => self.create_submissions(command),
            opcode::DELETE_COMPLETIONS => self.delete_completions(command),
            opcode::CREATE_COMPLETIONS => self.create_completions(command),
            opcode::GET_LOG => self.log(command),
            opcode::IDENTIFY => self.identify(command),
            // A command is over before the next one is read, and an event cannot be called back.
            opcode::ABORT => Ok(1),
            opcode::SET_FEATURES => self.set_feature(command),
            opcode::GET_FEATURES => self.feature(command),
            opcode::ASYNC_EVENT if self.events > EVENTS => Err(Status::TOO_MANY_EVENTS),
            opcode::ASYNC_EVENT => {
                self.events += 1;
                return Answer::Later;
            }
            _ => Err(Status::INVALID_OPCODE),
        })
    }

    /// Returns number, size and memory of a queue that is to be made.
    fn queue(&self, command: &Command, is_there: bool) -> Result<(u16, u16, u64), Status> {
        let (number, size) = (command.word(10) as u16, command.word(10) >> 16);
        if number == 0 || number > self.pairs || is_there {
            return Err(Status::INVALID_QUEUE);
        }
        if size == 0 || size >= u32::from(self.entries) {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let [start, _] = command.pages();
        if command.word(11) & CONTIGUOUS == 0 {
            return Err(Status::INVALID_FIELD);
        }
        if !start.is_multiple_of(super::prp::PAGE) {
            return Err(Status::INVALID_PAGE_OFFSET);
        }
        Ok((number, size as u16 + 1, start))
    }

    fn create_completions(&mut self, command: &Command) -> Outcome {
        let is_there = self.completions.iter().any(|one| u32::from(one.number) == command.word(10) & 0xFFFF);
        let (number, size, start) = self.queue(command, is_there)?;
        let vector = (command.word(11) >> 16) as u16;
        if u32::from(vector) >= self.vectors {
            return Err(Status::INVALID_VECTOR);
        }
        silence(&self.registers, number, 1);
        let vector = (command.word(11) & RAISES != 0).then_some(vector);
        self.completions.push(Completions::new(number, start, size, vector));
        Ok(0)
    }

    fn create_submissions(&mut self, command: &Command) -> Outcome {
        let is_there = self.submissions.iter().any(|one| u32::from(one.number) == command.word(10) & 0xFFFF);
        let (number, size, start) = self.queue(command, is_there)?;
        let completions = (command.word(11) >> 16) as u16;
        if completions == 0 || !self.completions.iter().any(|one| one.number == completions) {
            return Err(Status::INVALID_COMPLETION_QUEUE);
        }
        silence(&self.registers, number, 0);
        self.submissions.push(Submissions::new(number, completions, start, size));
        Ok(0)
    }

    fn delete_submissions(&mut self, command: &Command) -> Outcome {
        let number = command.word(10) as u16;
        let at = self.submissions.iter().position(|one| number != 0 && one.number == number);
        self.submissions.remove(at.ok_or(Status::INVALID_QUEUE)?);
        Ok(0)
    }

    fn delete_completions(&mut self, command: &Command) -> Outcome {
        let number = command.word(10) as u16;
        let at = self.completions.iter().position(|one| number != 0 && one.number == number);
        let at = at.ok_or(Status::INVALID_QUEUE)?;
        if self.submissions.iter().any(|one| one.completions == number) {
            return Err(Status::INVALID_DELETION);
        }
        self.completions.remove(at);
        Ok(0)
    }

    fn identify(&self, command: &Command) -> Outcome {
        let number = command.namespace();
        let namespaces = &self.storage.namespaces;
        let namespace = namespaces.iter().find(|one| one.number == number);
        // A namespace that is not there has zeros. A structure of all of them has what they share.
        let bytes = match (command.word(10) & 0xFF, namespace) {
            (structure::NAMESPACE, Some(namespace)) => namespace.structure(),
            (structure::NAMESPACE, None) if number == 0 => return Err(Status::INVALID_NAMESPACE),
            (structure::NAMESPACE, None) => vec![0; STRUCTURE],
            (structure::CONTROLLER, _) => self.identity.structure(),
            (structure::ACTIVE, _) if number >= ALL - 1 => return Err(Status::INVALID_NAMESPACE),
            (structure::ACTIVE, _) => {
                let mut numbers: Vec<u32> =
                    namespaces.iter().map(|one| one.number).filter(|one| *one > number).collect();
                numbers.sort_unstable();
                let mut bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
                bytes.resize(STRUCTURE, 0);
                bytes
            }
            (structure::NAMES, Some(namespace)) => namespace.names().to_vec(),
            (structure::NAMES, None) => return Err(Status::INVALID_NAMESPACE),
            (structure::LIMITS, _) if command.word(11) >> 24 == 0 => vec![0; STRUCTURE],
            _ => return Err(Status::INVALID_FIELD),
        };
        self.give(command, &bytes)
    }

    fn give(&self, command: &Command, bytes: &[u8]) -> Outcome {
        prp::find(&self.memory, command.pages(), bytes.len() as u64)?.write(bytes)?;
        Ok(0)
    }

    fn log(&self, command: &Command) -> Outcome {
        let count = u64::from(command.word(10) >> 16) | u64::from(command.word(11) & 0xFFFF) << 16;
        let length = (count + 1) * 4;
        if length > LOG_MAX || command.long(12) != 0 {
            return Err(Status::INVALID_FIELD);
        }
        let mut bytes = vec![0; length as usize];
        let mut put = |at: usize, from: &[u8]| {
            bytes.iter_mut().skip(at).zip(from).for_each(|(to, from)| *to = *from);
        };
        match command.word(10) & 0xFF {
            log::ERRORS => {}
            log::HEALTH => {
                put(1, &TEMPERATURE.to_le_bytes());
                // All spare blocks are left; a warning would come at a tenth.
                put(3, &[100, 10]);
            }
            log::FIRMWARE => {
                put(0, &[1]);
                put(8, self.identity.firmware());
            }
            _ => return Err(Status::INVALID_LOG),
        }
        self.give(command, &bytes)
    }

    fn set_feature(&mut self, command: &Command) -> Outcome {
        if command.word(10) & SAVE != 0 {
            return Err(Status::NOT_SAVEABLE);
        }
        let (number, value) = (command.word(10) & 0xFF, command.word(11));
        match number {
            feature::QUEUES => {
                // 65535 is no number of queues less one.
                if value & 0xFFFF == 0xFFFF || value >> 16 == 0xFFFF {
                    return Err(Status::INVALID_FIELD);
                }
                Ok(self.queues())
            }
            feature::WRITE_CACHE => {
                self.storage.caches = value & 1 != 0;
                if !self.storage.caches {
                    self.storage.flush()?;
                }
                Ok(0)
            }
            feature::VECTOR if value & 0xFFFF >= self.vectors => Err(Status::INVALID_FIELD),
            feature::VECTOR => Ok(0),
            _ => {
                let at = KEPT.iter().position(|kept| *kept == number).ok_or(Status::INVALID_FIELD)?;
                self.features[at] = value;
                Ok(0)
            }
        }
    }

    fn feature(&self, command: &Command) -> Outcome {
        let number = command.word(10) & 0xFF;
        // Other than the current value: the default, the saved value, and what can be done.
        if command.word(10) >> 8 & 7 != 0 {
            return Err(Status::INVALID_FIELD);
        }
        match number {
            feature::QUEUES => Ok(self.queues()),
            feature::WRITE_CACHE => Ok(u32::from(self.storage.caches)),
            feature::VECTOR if command.word(11) & 0xFFFF < self.vectors => Ok(command.word(11) & 0xFFFF),
            _ => {
                let at = KEPT.iter().position(|kept| *kept == number).ok_or(Status::INVALID_FIELD)?;
                Ok(self.features[at])
            }
        }
    }

    /// Returns the number of queues of each kind, less one.
    fn queues(&self) -> u32 {
        let last = u32::from(self.pairs) - 1;
        last | last << 16
    }
}
