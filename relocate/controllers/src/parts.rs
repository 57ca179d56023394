//! Data in parts of the guest's memory.

use crate::Memory;
use std::ops::Range;

/// The reason why data cannot be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// A part is no memory.
    NoMemory,
    /// There are no more parts.
    NoMore,
}

/// Data of a command in the guest's memory, from the first byte to the last.
#[derive(Debug)]
pub struct Parts<'a, M: ?Sized> {
    memory: &'a M,
    /// Address and length of each part.
    parts: Vec<(u64, u64)>,
    /// The current part, and the bytes of it that are done.
    at: usize,
    done: u64,
}

impl<'a, M: Memory + ?Sized> Parts<'a, M> {
    pub fn new(memory: &'a M) -> Self {
        Self { memory, parts: Vec::new(), at: 0, done: 0 }
    }

    /// Adds a part, or makes the last one longer. Returns its length.
    pub fn add(&mut self, start: u64, length: u64) -> u64 {
        match self.parts.last_mut() {
            Some((last, bytes)) if last.checked_add(*bytes) == Some(start) => *bytes += length,
            _ => self.parts.push((start, length)),
        }
        length
    }

    /// Returns the address and the length of each part.
    #[cfg(test)]
    pub fn into_list(self) -> Vec<(u64, u64)> {
        self.parts
    }

    /// Copies the next bytes out of the guest's memory.
    ///
    /// # Errors
    /// A part of them is no memory, or there are no more.
    pub fn read(&mut self, into: &mut [u8]) -> Result<(), Lost> {
        let memory = self.memory;
        self.each(into.len(), |place, range| memory.read(place, &mut into[range]))
    }

    /// Copies the next bytes into the guest's memory.
    ///
    /// # Errors
    /// A part of them is no memory, or there are no more.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Lost> {
        let memory = self.memory;
        self.each(bytes.len(), |place, range| memory.write(place, &bytes[range]))
    }

    fn each(
        &mut self,
        length: usize,
        mut copy: impl FnMut(u64, Range<usize>) -> Option<()>,
    ) -> Result<(), Lost> {
        let mut copied = 0;
        while copied < length {
            let (start, bytes) = *self.parts.get(self.at).ok_or(Lost::NoMore)?;
            let count = (bytes - self.done).min((length - copied) as u64);
            let place = start.checked_add(self.done).ok_or(Lost::NoMemory)?;
            copy(place, copied..copied + count as usize).ok_or(Lost::NoMemory)?;
            copied += count as usize;
            self.done += count;
            if self.done == bytes {
                (self.at, self.done) = (self.at + 1, 0);
            }
        }
        Ok(())
    }
}
