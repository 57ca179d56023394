//! Queues in the guest's memory: commands come in one, and their ends go into another.

use super::{
    command::{COMMAND, Command, Status},
    registers::Registers,
};
use crate::Memory;

/// Size of a completion.
const COMPLETION: u64 = 16;

/// A queue of commands.
#[derive(Clone, Debug)]
pub struct Submissions {
    pub number: u16,
    pub completions: u16,
    start: u64,
    size: u16,
    head: u16,
}

/// A queue of ends of commands.
#[derive(Clone, Debug)]
pub struct Completions {
    pub number: u16,
    /// The vector that is raised for each end.
    pub vector: Option<u16>,
    start: u64,
    size: u16,
    tail: u16,
    phase: bool,
}

/// The end of a command, for its queue.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub identifier: u16,
    pub status: Status,
    pub value: u32,
}

/// Memory that a queue should have is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing;

impl Submissions {
    pub fn new(number: u16, completions: u16, start: u64, size: u16) -> Self {
        Self { number, completions, start, size, head: 0 }
    }

    /// Returns true if there is a command. A doorbell beyond the queue's end means nothing.
    pub fn has_command(&self, registers: &Registers) -> bool {
        let tail = doorbell(registers, self.number, 0);
        tail != self.head && tail < self.size
    }

    /// Reads the next command, which must be there.
    pub fn take(&mut self, memory: &(impl Memory + ?Sized)) -> Result<Command, Missing> {
        let mut bytes = [0; COMMAND];
        let at = self.start.checked_add(u64::from(self.head) * COMMAND as u64).ok_or(Missing)?;
        memory.read(at, &mut bytes).ok_or(Missing)?;
        self.head = next(self.head, self.size);
        Ok(Command::new(&bytes))
    }
}

impl Completions {
    pub fn new(number: u16, start: u64, size: u16, vector: Option<u16>) -> Self {
        Self { number, vector, start, size, tail: 0, phase: true }
    }

    /// Returns true if the driver has not yet read the ends that fill the queue.
    pub fn is_full(&self, registers: &Registers) -> bool {
        next(self.tail, self.size) == doorbell(registers, self.number, 1)
    }

    /// Writes the end of a command. The word with the phase comes last: the driver looks at it.
    pub fn put(
        &mut self,
        end: End,
        from: &Submissions,
        memory: &(impl Memory + ?Sized),
    ) -> Result<(), Missing> {
        let at = self.start.checked_add(u64::from(self.tail) * COMPLETION).ok_or(Missing)?;
        let place = u32::from(from.head) | u32::from(from.number) << 16;
        let field = u32::from(end.status.field() << 1 | u16::from(self.phase));
        let words = [end.value, 0, place].map(u32::to_le_bytes).concat();
        memory.write(at, &words).ok_or(Missing)?;
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        let last = u32::from(end.identifier) | field << 16;
        memory.write(at.checked_add(12).ok_or(Missing)?, &last.to_le_bytes()).ok_or(Missing)?;
        self.tail = next(self.tail, self.size);
        self.phase ^= self.tail == 0;
        Ok(())
    }
}

fn next(at: u16, size: u16) -> u16 {
    if at + 1 >= size { 0 } else { at + 1 }
}

fn doorbell(registers: &Registers, queue: u16, kind: usize) -> u16 {
    registers.values().doorbells.get(2 * usize::from(queue) + kind).copied().unwrap_or(0)
}

/// Forgets what was written to a queue's doorbell before it was made.
pub fn silence(registers: &Registers, queue: u16, kind: usize) {
    if let Some(doorbell) = registers.values().doorbells.get_mut(2 * usize::from(queue) + kind) {
        *doorbell = 0;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::Ram;

    #[test]
    fn commands_are_taken_in_a_ring() {
        let (ram, registers) = (Ram::new(0x2000), Registers::new(1, 4, 0));
        let mut queue = Submissions::new(1, 1, 0x1000, 3);
        let submit = |tail: u16| registers.write(0x1008, &u32::from(tail).to_le_bytes());
        for (at, identifier) in [(0_u64, 10_u8), (1, 11), (2, 12)] {
            ram.write(0x1000 + at * 64 + 2, &[identifier]).unwrap();
        }
        assert!(!queue.has_command(&registers));
        for (tail, identifier) in [(1, 10), (2, 11), (0, 12), (1, 10)] {
            submit(tail);
            assert!(queue.has_command(&registers));
            assert_eq!(queue.take(&ram).unwrap().identifier(), identifier);
            assert!(!queue.has_command(&registers));
        }
        submit(3);
        assert!(!queue.has_command(&registers), "it is beyond the end");
        let mut lost = Submissions::new(1, 1, 0x1FF0, 3);
        assert_eq!(lost.take(&ram).err(), Some(Missing));
        assert_eq!(Submissions::new(1, 1, u64::MAX, 3).take(&ram).err(), Some(Missing));
    }

    #[test]
    fn ends_have_a_phase_and_wait_for_room() {
        let (ram, registers) = (Ram::new(0x2000), Registers::new(1, 4, 0));
        let from = Submissions { head: 2, ..Submissions::new(1, 1, 0, 3) };
        let mut queue = Completions::new(1, 0x1000, 3, Some(4));
        let mut phases = Vec::new();
        for turn in 0..7_u16 {
            assert!(!queue.is_full(&registers));
            let end = End { identifier: turn, status: Status::OUT_OF_RANGE, value: 9 };
            queue.put(end, &from, &ram).unwrap();
            let at = 0x1000 + u64::from(turn % 3) * 16;
            let mut bytes = [0; 16];
            ram.read(at, &mut bytes).unwrap();
            assert_eq!(bytes[..14], [9, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0, turn as u8, 0]);
            let field = u16::from_le_bytes([bytes[14], bytes[15]]);
            assert_eq!(field >> 1, 0x4080);
            phases.push(field & 1);
            registers.write(0x100C, &u32::from((turn + 1) % 3).to_le_bytes());
        }
        assert_eq!(phases, [1, 1, 1, 0, 0, 0, 1]);
        let end = End { identifier: 0, status: Status::DONE, value: 0 };
        queue.put(end, &from, &ram).unwrap();
        queue.put(end, &from, &ram).unwrap();
        assert!(queue.is_full(&registers));
        assert!(Completions::new(1, 0x1FF8, 3, None).put(end, &from, &ram).is_err());
    }
}
