//! The two interrupt controllers of a PC (Intel 8259A). The second is at the first one's line 2.
//! All lines are edge-triggered.

use mercury_devices::state::{Reader, Writer};

use crate::error::Result;

/// The line that the second controller is at.
const CASCADE: u8 = 2;
/// Command: end of interrupt.
const END: u8 = 0x20;

#[derive(Debug, Default)]
struct Pic {
    requested: u8,
    in_service: u8,
    masked: u8,
    base: u8,
    /// The number of the next initialization word.
    initializing: u8,
    reads_in_service: bool,
    ends_itself: bool,
}

impl Pic {
    fn save(&self, to: &mut Writer) {
        to.numbers([self.requested, self.in_service, self.masked, self.base, self.initializing]);
        to.numbers([self.reads_in_service, self.ends_itself]);
    }

    fn load(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            requested: from.number()?,
            in_service: from.number()?,
            masked: from.number()?,
            base: from.number()?,
            initializing: from.number()?,
            reads_in_service: from.truth()?,
            ends_itself: from.truth()?,
        })
    }

    /// Returns the line that would interrupt now.
    fn next(&self) -> Option<u8> {
        let line = (self.requested & !self.masked).trailing_zeros();
        let busy = self.in_service.trailing_zeros();
        (line < 8 && line < busy).then_some(line as u8)
    }

    fn acknowledge(&mut self, line: u8) {
        self.requested &= !(1 << line);
        if !self.ends_itself {
            self.in_service |= 1 << line;
        }
    }

    fn command(&mut self, value: u8) {
        match value {
            _ if value & 0x10 != 0 => {
                *self = Self { initializing: 1, ..Self::default() };
            }
            _ if value & 0xA == 0xA => self.reads_in_service = value & 1 != 0,
            _ if value & 8 != 0 => {}
            // For a line by its number, or the most urgent one.
            _ if value & 0x60 == 0x60 => self.in_service &= !(1 << (value & 7)),
            _ if value & END != 0 => self.in_service &= self.in_service.wrapping_sub(1),
            _ => {}
        }
    }

    fn data(&mut self, value: u8) {
        match self.initializing {
            1 => (self.base, self.initializing) = (value & !7, 2),
            2 => self.initializing = 3,
            3 => (self.ends_itself, self.initializing) = (value & 2 != 0, 0),
            _ => self.masked = value,
        }
    }

    fn status(&self) -> u8 {
        if self.reads_in_service { self.in_service } else { self.requested }
    }
}

/// Both controllers.
#[derive(Debug, Default)]
pub struct Pics {
    first: Pic,
    second: Pic,
}

impl Pics {
    /// Writes the state of both.
    pub fn save(&self, to: &mut Writer) {
        [&self.first, &self.second].into_iter().for_each(|pic| pic.save(to));
    }

    /// Reads the state of both.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn load(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { first: Pic::load(from)?, second: Pic::load(from)? })
    }

    /// Records that a device wants attention.
    pub fn raise(&mut self, line: u8) {
        if line < 8 {
            self.first.requested |= 1 << line;
        } else {
            self.second.requested |= 1 << (line - 8);
        }
        self.cascade();
    }

    fn cascade(&mut self) {
        if self.second.next().is_some() {
            self.first.requested |= 1 << CASCADE;
        }
    }

    /// Returns true if an interrupt waits.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.first.next().is_some()
    }

    /// Returns the vector of the interrupt that is delivered now.
    pub fn acknowledge(&mut self) -> Option<u8> {
        let line = self.first.next()?;
        self.first.acknowledge(line);
        if line != CASCADE {
            return Some(self.first.base + line);
        }
        let line = self.second.next()?;
        self.second.acknowledge(line);
        Some(self.second.base + line)
    }

    #[must_use]
    pub fn read(&self, port: u16) -> u8 {
        let pic = if port < 0xA0 { &self.first } else { &self.second };
        if port & 1 == 0 { pic.status() } else { pic.masked }
    }

    pub fn write(&mut self, port: u16, value: u8) {
        let pic = if port < 0xA0 { &mut self.first } else { &mut self.second };
        if port & 1 == 0 {
            pic.command(value)
        } else {
            pic.data(value)
        }
        self.cascade();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn initialized() -> Pics {
        let mut pics = Pics::default();
        for (command, base) in [(0x20, 0x30), (0xA0, 0x38)] {
            pics.write(command, 0x11);
            for word in [base, 4, 1, 0] {
                pics.write(command + 1, word);
            }
        }
        pics
    }

    #[test]
    fn urgent_lines_come_first_and_others_wait_for_the_end() {
        let mut pics = initialized();
        pics.raise(4);
        pics.raise(0);
        assert_eq!(pics.acknowledge(), Some(0x30));
        assert!(!pics.has_interrupt());
        pics.write(0x20, 0x60);
        assert_eq!(pics.acknowledge(), Some(0x34));
        pics.write(0x20, 0x20);
        assert_eq!(pics.acknowledge(), None);
    }

    #[test]
    fn masked_lines_keep_their_request() {
        let mut pics = initialized();
        pics.write(0x21, 0x10);
        pics.raise(4);
        assert!(!pics.has_interrupt());
        pics.write(0x21, 0);
        assert_eq!(pics.acknowledge(), Some(0x34));
    }

    #[test]
    fn the_second_comes_through_the_first() {
        let mut pics = initialized();
        pics.raise(10);
        assert_eq!(pics.acknowledge(), Some(0x3A));
        pics.raise(11);
        assert_eq!(pics.acknowledge(), None);
        pics.write(0xA0, 0x62);
        pics.write(0x20, 0x62);
        assert_eq!(pics.acknowledge(), Some(0x3B));
    }
}
