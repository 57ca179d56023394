//! A disk behind a port: commands, and how they end.

use super::{
    command::Command,
    identify::{Identity, STRUCTURE, checksum},
};
use crate::{
    Disk, Memory,
    disk::Lasting,
    parts::{Lost, Parts},
};
use std::io;

mod opcode {
    pub const TRIM: u8 = 0x06;
    pub const READ: u8 = 0x20;
    pub const READ_EXT: u8 = 0x24;
    pub const READ_DMA_EXT: u8 = 0x25;
    pub const READ_LOG: u8 = 0x2F;
    pub const WRITE: u8 = 0x30;
    pub const WRITE_EXT: u8 = 0x34;
    pub const WRITE_DMA_EXT: u8 = 0x35;
    pub const WRITE_FORCED: u8 = 0x3D;
    pub const VERIFY: u8 = 0x40;
    pub const VERIFY_EXT: u8 = 0x42;
    pub const READ_QUEUED: u8 = 0x60;
    pub const WRITE_QUEUED: u8 = 0x61;
    pub const READ_DMA: u8 = 0xC8;
    pub const WRITE_DMA: u8 = 0xCA;
    pub const STANDBY_NOW: u8 = 0xE0;
    pub const IDLE_NOW: u8 = 0xE1;
    pub const STANDBY: u8 = 0xE2;
    pub const IDLE: u8 = 0xE3;
    pub const CHECK_POWER: u8 = 0xE5;
    pub const SLEEP: u8 = 0xE6;
    pub const FLUSH: u8 = 0xE7;
    pub const FLUSH_EXT: u8 = 0xEA;
    pub const IDENTIFY: u8 = 0xEC;
    pub const SET_FEATURES: u8 = 0xEF;
}
mod feature {
    pub const CACHE_ON: u16 = 0x02;
    pub const CACHE_OFF: u16 = 0x82;
    /// Mode of transfers, features of SATA, read-ahead, and what a reset changes: nothing depends on them.
    pub const WITHOUT_EFFECT: [u16; 7] = [0x03, 0x10, 0x90, 0x55, 0xAA, 0x66, 0xCC];
}
mod log {
    pub const DIRECTORY: u8 = 0x00;
    pub const QUEUED_ERROR: u8 = 0x10;
    pub const IDENTITY: u8 = 0x30;
}

/// Bits of the error register.
pub mod error {
    pub const ABORTED: u8 = 0x04;
    pub const NOT_FOUND: u8 = 0x10;
    /// Of a read: the medium has an error. Of a write: it is protected.
    pub const MEDIUM: u8 = 0x40;
}
/// Status of a disk that is ready, and of one whose command has failed.
pub const READY: u8 = 0x50;
const FAILED: u8 = 0x51;
/// Bit of the device register: the data is to last before the command ends.
const FORCED: u8 = 0x80;
/// Answer to the question for the mode of power: active.
const ACTIVE: u8 = 0xFF;
/// Size of an entry in a list of ranges.
const RANGE: usize = 8;
/// Bytes that are copied at once.
const BUFFER: u64 = 128 << 10;

/// The way in which a port learns of a command's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// By the disk's registers.
    Registers,
    /// By the structure that comes before data. It has the number of bytes.
    Pio { bytes: u16 },
    /// By a bit for the command, which was queued.
    Queued,
}

/// The end of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub how: How,
    /// The error register. Zero is success.
    pub error: u8,
    pub count: u8,
    /// Bytes that were copied.
    pub bytes: u32,
}

impl Ended {
    fn well() -> Self {
        Self { how: How::Registers, error: 0, count: 0, bytes: 0 }
    }

    pub fn failed(&self) -> bool {
        self.error != 0
    }

    pub fn status(&self) -> u8 {
        if self.failed() { FAILED } else { READY }
    }
}

/// The reason why a command fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The disk's error register.
    Disk(u8),
    /// The command's data is nowhere.
    Data(Lost),
}

impl From<Lost> for Failure {
    fn from(lost: Lost) -> Self {
        Self::Data(lost)
    }
}

const ABORTED: Failure = Failure::Disk(error::ABORTED);

fn of_read(_: io::Error) -> Failure {
    Failure::Disk(error::MEDIUM)
}

/// No try of the same write succeeds later by itself.
fn of_write(error: io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::EROFS | libc::EPERM | libc::EBADF) => Failure::Disk(error::MEDIUM),
        _ => Failure::Disk(error::NOT_FOUND),
    }
}

/// A disk.
pub struct Drive {
    identity: Identity,
    disk: Lasting,
    /// True while a write may end before its data lasts.
    caches: bool,
    /// The queued command that has failed, until the driver asks for it.
    failed: Option<(Command, u8)>,
}

impl std::fmt::Debug for Drive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drive").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Drive {
    /// Makes a disk with this identity and this content.
    #[must_use]
    pub fn new(identity: Identity, disk: Box<dyn Disk + Send>) -> Self {
        let caches = identity.caches();
        Self { identity, disk: Lasting::new(disk), caches, failed: None }
    }

    /// Returns what the disk says of itself.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Makes all writes last.
    ///
    /// # Errors
    /// The host's.
    pub fn flush(&mut self) -> io::Result<()> {
        self.disk.flush()
    }

    /// Notes that the driver has the answer to a command.
    pub(super) fn answer(&mut self) {
        self.disk.answer();
    }

    /// Executes a command.
    ///
    /// # Errors
    /// The data of the command is nowhere, although the command is right.
    pub fn execute<M: Memory + ?Sized>(
        &mut self,
        command: &Command,
        data: &mut Parts<'_, M>,
    ) -> Result<Ended, Lost> {
        self.disk.begin();
        match self.dispatch(command, data) {
            Ok(ended) => Ok(ended),
            Err(Failure::Data(lost)) => Err(lost),
            Err(Failure::Disk(error)) => {
                let is_queued = matches!(command.opcode(), opcode::READ_QUEUED | opcode::WRITE_QUEUED);
                if is_queued {
                    self.failed = Some((*command, error));
                }
                let how = if is_queued { How::Queued } else { How::Registers };
                Ok(Ended { how, error, ..Ended::well() })
            }
        }
    }

    fn dispatch<M: Memory + ?Sized>(
        &mut self,
        command: &Command,
        data: &mut Parts<'_, M>,
    ) -> Result<Ended, Failure> {
        use opcode as op;
        match command.opcode() {
            op::READ_DMA | op::READ_DMA_EXT | op::READ_QUEUED | op::READ | op::READ_EXT => {
                self.read(command, data)
            }
            op::WRITE_DMA
            | op::WRITE_DMA_EXT
            | op::WRITE_FORCED
            | op::WRITE_QUEUED
            | op::WRITE
            | op::WRITE_EXT => self.write(command, data),
            op::VERIFY | op::VERIFY_EXT => self.place(command).map(|_| Ended::well()),
            op::TRIM => self.trim(command, data),
            op::IDENTIFY => give(&self.identity.answer(self.caches), data),
            op::READ_LOG => self.log(command, data),
            op::SET_FEATURES => self.set(command.features()),
            op::CHECK_POWER => Ok(Ended { count: ACTIVE, ..Ended::well() }),
            op::IDLE_NOW | op::IDLE => Ok(Ended::well()),
            op::FLUSH | op::FLUSH_EXT | op::STANDBY_NOW | op::STANDBY | op::SLEEP => {
                self.flush().map_err(of_write)?;
                Ok(Ended::well())
            }
            _ => Err(ABORTED),
        }
    }

    /// Returns position and length in bytes of the sectors of a command.
    fn place(&self, command: &Command) -> Result<(u64, u64), Failure> {
        use opcode as op;
        let whole = |count: u16| if count == 0 { 0x1_0000 } else { u64::from(count) };
        let (sector, count) = match command.opcode() {
            op::READ_QUEUED | op::WRITE_QUEUED => (command.sector(), whole(command.features())),
            op::READ | op::READ_DMA | op::WRITE | op::WRITE_DMA | op::VERIFY => {
                let count = u64::from(command.count() & 0xFF);
                (command.short_sector(), if count == 0 { 0x100 } else { count })
            }
            _ => (command.sector(), whole(command.count())),
        };
        self.range(sector, count)
    }

    fn range(&self, sector: u64, count: u64) -> Result<(u64, u64), Failure> {
        let (sectors, shift) = (self.identity.sectors, self.identity.shift);
        let is_there = sector.checked_add(count).is_some_and(|end| end <= sectors);
        if is_there { Ok((sector << shift, count << shift)) } else { Err(Failure::Disk(error::NOT_FOUND)) }
    }

    fn read<M: Memory + ?Sized>(
        &mut self,
        command: &Command,
        data: &mut Parts<'_, M>,
    ) -> Result<Ended, Failure> {
        let (at, length) = self.place(command)?;
        let mut buffer = vec![0; length.min(BUFFER) as usize];
        for done in (0..length).step_by(BUFFER as usize) {
            let part = &mut buffer[..(length - done).min(BUFFER) as usize];
            self.disk.read(at + done, part).map_err(of_read)?;
            data.write(part)?;
        }
        Ok(moved(command, length))
    }

    fn write<M: Memory + ?Sized>(
        &mut self,
        command: &Command,
        data: &mut Parts<'_, M>,
    ) -> Result<Ended, Failure> {
        let (at, length) = self.place(command)?;
        self.refuse_protected()?;
        let mut buffer = vec![0; length.min(BUFFER) as usize];
        for done in (0..length).step_by(BUFFER as usize) {
            let part = &mut buffer[..(length - done).min(BUFFER) as usize];
            data.read(part)?;
            self.disk.write(at + done, part).map_err(of_write)?;
        }
        let is_forced = match command.opcode() {
            opcode::WRITE_FORCED => true,
            opcode::WRITE_QUEUED => command.device() & FORCED != 0,
            _ => false,
        };
        if is_forced || !self.caches {
            self.disk.flush().map_err(of_write)?;
        }
        Ok(moved(command, length))
    }

    fn refuse_protected(&self) -> Result<(), Failure> {
        if self.disk.is_read_only() { Err(Failure::Disk(error::MEDIUM)) } else { Ok(()) }
    }

    /// Gives ranges up. All are checked before the first is given up.
    fn trim<M: Memory + ?Sized>(
        &mut self,
        command: &Command,
        data: &mut Parts<'_, M>,
    ) -> Result<Ended, Failure> {
        if command.features() != 1 || !(1..=self.identity.trim_blocks()).contains(&command.count()) {
            return Err(ABORTED);
        }
        self.refuse_protected()?;
        let mut bytes = vec![0; usize::from(command.count()) * STRUCTURE];
        data.read(&mut bytes)?;
        let mut ranges = Vec::new();
        for range in bytes.as_chunks::<RANGE>().0 {
            let range = u64::from_le_bytes(*range);
            // An entry without sectors means nothing.
            if range >> 48 > 0 {
                ranges.push(self.range(range & 0xFFFF_FFFF_FFFF, range >> 48)?);
            }
        }
        for (at, length) in ranges {
            let done = match self.identity.trims_to_zeros() {
                true => self.disk.zero(at, length),
                false => self.disk.discard(at, length),
            };
            done.map_err(of_write)?;
        }
        Ok(Ended { bytes: bytes.len() as u32, ..Ended::well() })
    }

    fn log<M: Memory + ?Sized>(
        &mut self,
        command: &Command,
        data: &mut Parts<'_, M>,
    ) -> Result<Ended, Failure> {
        let [number, page, ..] = command.sector().to_le_bytes();
        // Each log has one page.
        if page != 0 || command.count() != 1 {
            return Err(ABORTED);
        }
        let mut bytes = vec![0; STRUCTURE];
        match number {
            log::DIRECTORY => {
                bytes[0] = 1;
                for number in [log::QUEUED_ERROR, log::IDENTITY] {
                    bytes[2 * usize::from(number)] = 1;
                }
            }
            log::QUEUED_ERROR => bytes = self.queued_error(),
            // A list of the pages that there are, with this one alone.
            log::IDENTITY => (bytes[0], bytes[8]) = (1, 1),
            _ => return Err(ABORTED),
        }
        give(&bytes, data)
    }

    /// Returns the page about the queued command that has failed, and forgets the command.
    fn queued_error(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; STRUCTURE];
        match self.failed.take() {
            Some((command, error)) => {
                let sector = command.sector().to_le_bytes();
                bytes[0] = command.tag();
                bytes[2..7].copy_from_slice(&[FAILED, error, sector[0], sector[1], sector[2]]);
                bytes[7] = command.device();
                bytes[8..11].copy_from_slice(&sector[3..6]);
            }
            // The last failure was none of a queued command.
            None => bytes[0] = 0x80,
        }
        bytes[STRUCTURE - 1] = checksum(&bytes);
        bytes
    }

    fn set(&mut self, feature: u16) -> Result<Ended, Failure> {
        match feature & 0xFF {
            feature::CACHE_ON => self.caches = true,
            feature::CACHE_OFF => {
                self.flush().map_err(of_write)?;
                self.caches = false;
            }
            other if feature::WITHOUT_EFFECT.contains(&other) => {}
            _ => return Err(ABORTED),
        }
        Ok(Ended::well())
    }
}

/// Gives the driver an answer by PIO.
fn give<M: Memory + ?Sized>(bytes: &[u8], data: &mut Parts<'_, M>) -> Result<Ended, Failure> {
    data.write(bytes)?;
    Ok(Ended { how: How::Pio { bytes: bytes.len() as u16 }, bytes: bytes.len() as u32, ..Ended::well() })
}

fn moved(command: &Command, length: u64) -> Ended {
    let how = match command.opcode() {
        opcode::READ | opcode::READ_EXT => How::Pio { bytes: u16::try_from(length).unwrap_or(0) },
        opcode::READ_QUEUED | opcode::WRITE_QUEUED => How::Queued,
        _ => How::Registers,
    };
    Ended { how, bytes: length as u32, ..Ended::well() }
}
