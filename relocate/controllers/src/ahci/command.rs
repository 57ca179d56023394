//! Commands in a port's list, and the structures that a port receives (FIS).

use super::drive::{Ended, How};
use crate::{Memory, parts::Parts};

/// Size of an entry in the list of commands.
pub const HEADER: u64 = 32;
/// Size of the structure with a command, as far as it has a meaning.
const COMMAND: usize = 20;
/// Place of the list of ranges in a table.
const RANGES: u64 = 0x80;
/// Size of an entry in the list of ranges.
const RANGE: usize = 16;

/// Kinds of structures.
mod kind {
    pub const TO_DEVICE: u8 = 0x27;
    pub const TO_HOST: u8 = 0x34;
    pub const PIO: u8 = 0x5F;
    pub const BITS: u8 = 0xA1;
}
/// Bit of a structure from a device: it raises an interrupt.
const INTERRUPTS: u8 = 0x40;

/// An entry in the list of commands.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    flags: u32,
    table: u64,
}

/// The reason why a command cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// A part of it is no memory.
    NoMemory,
    /// It has no form that a device understands.
    Malformed,
}

/// A command for a disk.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    bytes: [u8; COMMAND],
}

impl Header {
    /// Reads an entry.
    pub fn read(memory: &(impl Memory + ?Sized), at: u64) -> Option<Self> {
        let mut bytes = [0; HEADER as usize];
        memory.read(at, &mut bytes)?;
        let long = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let table = u64::from(long(12)) << 32 | u64::from(long(8) & !0x7F);
        Some(Self { flags: long(0), table })
    }

    /// Reads the command.
    pub fn command(&self, memory: &(impl Memory + ?Sized)) -> Result<Command, Unread> {
        let mut bytes = [0; COMMAND];
        memory.read(self.table, &mut bytes).ok_or(Unread::NoMemory)?;
        // Its length is in units of four bytes.
        if bytes[0] != kind::TO_DEVICE || !(2..=16).contains(&(self.flags & 0x1F)) {
            return Err(Unread::Malformed);
        }
        Ok(Command { bytes })
    }

    /// Finds the command's data.
    pub fn data<'a, M: Memory + ?Sized>(&self, memory: &'a M) -> Option<Parts<'a, M>> {
        let mut ranges = vec![0; (self.flags >> 16) as usize * RANGE];
        memory.read(self.table.checked_add(RANGES)?, &mut ranges)?;
        let mut data = Parts::new(memory);
        for range in ranges.as_chunks::<RANGE>().0 {
            let long =
                |at: usize| u32::from_le_bytes([range[at], range[at + 1], range[at + 2], range[at + 3]]);
            let start = u64::from(long(4)) << 32 | u64::from(long(0));
            data.add(start, u64::from(long(12) & 0x3F_FFFF) + 1);
        }
        Some(data)
    }
}

impl Command {
    /// Returns true if it is a command, and not a change of the control register alone.
    pub fn is_command(&self) -> bool {
        self.bytes[1] & 0x80 != 0
    }

    /// Returns true if the control register asks for a reset of the disk.
    pub fn resets(&self) -> bool {
        self.bytes[15] & 4 != 0
    }

    pub fn opcode(&self) -> u8 {
        self.bytes[2]
    }

    pub fn features(&self) -> u16 {
        u16::from_le_bytes([self.bytes[3], self.bytes[11]])
    }

    pub fn count(&self) -> u16 {
        u16::from_le_bytes([self.bytes[12], self.bytes[13]])
    }

    pub fn device(&self) -> u8 {
        self.bytes[7]
    }

    /// Returns a sector's number of 48 bits.
    pub fn sector(&self) -> u64 {
        let b = self.bytes;
        u64::from_le_bytes([b[4], b[5], b[6], b[8], b[9], b[10], 0, 0])
    }

    /// Returns a sector's number of 28 bits.
    pub fn short_sector(&self) -> u64 {
        self.sector() & 0xFF_FFFF | u64::from(self.bytes[7] & 0xF) << 24
    }

    /// Returns the number of a queued command.
    pub fn tag(&self) -> u8 {
        (self.bytes[12] >> 3) & 0x1F
    }
}

/// A structure that a port receives, with its place in the area for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub place: u64,
    pub bytes: Vec<u8>,
}

impl Received {
    /// Makes the structure for the end of a command.
    pub fn of(command: &Command, ended: &Ended) -> Self {
        match ended.how {
            How::Registers => Self::registers(command, ended),
            How::Pio { bytes } => Self::pio(command, ended, bytes),
            How::Queued => Self::bits(command, ended),
        }
    }

    /// Makes the structure that a disk sends after a reset.
    pub fn signature(status: u8, error: u8) -> Self {
        let mut bytes = vec![0; 20];
        bytes[..7].copy_from_slice(&[kind::TO_HOST, 0, status, error, 1, 0, 0]);
        bytes[12] = 1;
        Self { place: 0x40, bytes }
    }

    fn echo(kind: u8, command: &Command, ended: &Ended) -> Vec<u8> {
        let mut bytes = vec![0; 20];
        bytes[..4].copy_from_slice(&[kind, INTERRUPTS, ended.status(), ended.error]);
        bytes[4..11].copy_from_slice(&command.bytes[4..11]);
        bytes[12] = ended.count;
        bytes
    }

    fn registers(command: &Command, ended: &Ended) -> Self {
        Self { place: 0x40, bytes: Self::echo(kind::TO_HOST, command, ended) }
    }

    /// Makes the structure that comes before data by PIO. It has the status of the end as well.
    fn pio(command: &Command, ended: &Ended, length: u16) -> Self {
        let mut bytes = Self::echo(kind::PIO, command, ended);
        // The data comes from the device, which is ready to send.
        bytes[1] |= 0x20;
        bytes[2] = 0x58;
        bytes[15] = ended.status();
        bytes[16..18].copy_from_slice(&length.to_le_bytes());
        Self { place: 0x20, bytes }
    }

    fn bits(command: &Command, ended: &Ended) -> Self {
        let done = if ended.failed() { 0_u32 } else { 1 << command.tag() };
        let mut bytes = vec![kind::BITS, INTERRUPTS, ended.status() & 0x77, ended.error];
        bytes.extend(done.to_le_bytes());
        Self { place: 0x58, bytes }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod tests {
    use super::*;
    use crate::testing::Ram;

    /// Returns a command, as a driver writes it.
    pub fn command(opcode: u8, sector: u64, count: u16, features: u16, device: u8) -> Command {
        let (s, c, f) = (sector.to_le_bytes(), count.to_le_bytes(), features.to_le_bytes());
        let bytes = [
            0x27, 0x80, opcode, f[0], s[0], s[1], s[2], device, s[3], s[4], s[5], f[1], c[0], c[1], 0, 0, 0,
            0, 0, 0,
        ];
        Command { bytes }
    }

    #[test]
    fn a_command_s_fields_are_where_the_standard_has_them() {
        let one = command(0x60, 0x0605_0403_0201, 0x0078, 0x0A09, 0xE7);
        assert_eq!((one.sector(), one.short_sector()), (0x0605_0403_0201, 0x0703_0201));
        assert_eq!((one.features(), one.count(), one.tag(), one.device()), (0x0A09, 0x78, 15, 0xE7));
        assert!(one.is_command() && !one.resets());
    }

    #[test]
    fn headers_lead_to_commands_and_data() {
        let ram = Ram::new(0x4000);
        let put = |at: u64, words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            ram.write(at, &bytes).unwrap();
        };
        put(0x100, &[5 | 2 << 16, 0, 0x107F, 0]);
        put(0x1000, &[0x0025_8027]);
        put(0x1080, &[0x2000, 0, 0, 0x1FF, 0x3000, 0, 0, 0x8000_0001]);
        let header = Header::read(&ram, 0x100).unwrap();
        assert_eq!(header.command(&ram).unwrap().opcode(), 0x25);
        assert_eq!(header.data(&ram).unwrap().into_list(), [(0x2000, 0x200), (0x3000, 2)]);
        for (flags, table, why) in [
            (5, 0x1100, Unread::Malformed),
            (1, 0x1000, Unread::Malformed),
            (17, 0x1000, Unread::Malformed),
            (5, 0x4000, Unread::NoMemory),
        ] {
            put(0x100, &[flags, 0, table, 0]);
            assert_eq!(Header::read(&ram, 0x100).unwrap().command(&ram).unwrap_err(), why);
        }
        put(0x100, &[5 | 0xFFFF << 16, 0, 0x1000, 0]);
        assert!(Header::read(&ram, 0x100).unwrap().data(&ram).is_none());
        put(0x100, &[5 | 1 << 16, 0, !0, !0]);
        assert!(Header::read(&ram, 0x100).unwrap().data(&ram).is_none());
        assert!(Header::read(&ram, 0x3FF0).is_none());
    }
}
