//! Commands, and how they end.

use std::io;

/// Size of a command in a queue.
pub const COMMAND: usize = 64;
/// Number of a namespace that means all of them.
pub const ALL: u32 = 0xFFFF_FFFF;

/// A command.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    words: [u32; COMMAND / 4],
}

impl Command {
    pub fn new(bytes: &[u8; COMMAND]) -> Self {
        let mut words = [0; COMMAND / 4];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Self { words }
    }

    pub fn opcode(&self) -> u8 {
        self.words[0] as u8
    }

    /// Returns true if the command is one of a fused pair, or describes its data by a scatter-gather list.
    pub fn is_special(&self) -> bool {
        self.words[0] & 0xC300 != 0
    }

    pub fn identifier(&self) -> u16 {
        (self.words[0] >> 16) as u16
    }

    pub fn namespace(&self) -> u32 {
        self.words[1]
    }

    /// Returns a word that has a meaning of its own in each command: 10 to 15.
    pub fn word(&self, number: usize) -> u32 {
        self.words.get(number).copied().unwrap_or(0)
    }

    /// Returns a word, and the next one as its upper half.
    pub fn long(&self, number: usize) -> u64 {
        u64::from(self.word(number)) | u64::from(self.word(number + 1)) << 32
    }

    /// Returns the pointers to the command's data.
    pub fn pages(&self) -> [u64; 2] {
        [self.long(6), self.long(8)]
    }
}

/// The end of a command: a type in bits 8 to 10, and a code below. Zero is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(u16);

impl Status {
    pub const DONE: Self = Self(0);
    pub const INVALID_OPCODE: Self = Self(0x01);
    pub const INVALID_FIELD: Self = Self(0x02);
    pub const DATA_TRANSFER: Self = Self(0x04);
    pub const INVALID_NAMESPACE: Self = Self(0x0B);
    pub const INVALID_PAGE_OFFSET: Self = Self(0x13);
    pub const PROTECTED: Self = Self(0x20);
    pub const OUT_OF_RANGE: Self = Self(0x80);
    pub const CAPACITY: Self = Self(0x81);
    pub const INVALID_COMPLETION_QUEUE: Self = Self(0x100);
    pub const INVALID_QUEUE: Self = Self(0x101);
    pub const INVALID_QUEUE_SIZE: Self = Self(0x102);
    pub const TOO_MANY_EVENTS: Self = Self(0x105);
    pub const INVALID_VECTOR: Self = Self(0x108);
    pub const INVALID_LOG: Self = Self(0x109);
    pub const INVALID_DELETION: Self = Self(0x10C);
    pub const NOT_SAVEABLE: Self = Self(0x10D);
    pub const WRITE_FAULT: Self = Self(0x280);
    pub const UNREADABLE: Self = Self(0x281);

    /// Bit that tells the driver not to try again.
    const FINAL: u16 = 1 << 14;

    /// Returns the status field of a completion. No command that failed here succeeds later by itself.
    pub fn field(self) -> u16 {
        if self == Self::DONE { 0 } else { self.0 | Self::FINAL }
    }

    /// Returns the status for the host's error of a read.
    pub fn of_read(_: &io::Error) -> Self {
        Self::UNREADABLE
    }

    /// Returns the status for the host's error of a write.
    pub fn of_write(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Self::CAPACITY,
            Some(libc::EROFS | libc::EPERM | libc::EBADF) => Self::PROTECTED,
            _ => Self::WRITE_FAULT,
        }
    }
}

/// The result of a command: a word for the driver, or the reason why it failed.
pub type Outcome = Result<u32, Status>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_s_fields_are_where_the_standard_has_them() {
        let mut bytes = [0; COMMAND];
        bytes.iter_mut().zip(0..).for_each(|(byte, at)| *byte = at);
        bytes[1] = 0;
        let command = Command::new(&bytes);
        assert_eq!((command.opcode(), command.identifier(), command.namespace()), (0, 0x0302, 0x0706_0504));
        assert_eq!(command.pages(), [0x1F1E_1D1C_1B1A_1918, 0x2726_2524_2322_2120]);
        assert_eq!((command.word(10), command.word(99)), (0x2B2A_2928, 0));
        assert!(!command.is_special());
        bytes[1] = 0x40;
        assert!(Command::new(&bytes).is_special());
    }

    #[test]
    fn the_host_s_errors_have_statuses() {
        let of = |number| Status::of_write(&io::Error::from_raw_os_error(number)).field();
        assert_eq!([libc::ENOSPC, libc::EROFS, libc::EIO].map(of), [0x4081, 0x4020, 0x4280]);
        assert_eq!(Status::of_read(&io::ErrorKind::UnexpectedEof.into()).field(), 0x4281);
        assert_eq!(Status::DONE.field(), 0);
    }
}
