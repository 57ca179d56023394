//! The controller's registers, which processors read and write at any time.

use crate::gate::Gate;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Offset of the first doorbell.
pub const DOORBELLS: u64 = 0x1000;
/// Version 1.4.
pub const VERSION: u32 = 0x0001_0400;

/// Offsets of registers.
mod offset {
    pub const MASK_SET: u64 = 0x0C;
    pub const MASK_CLEAR: u64 = 0x10;
    pub const CONFIGURATION: u64 = 0x14;
    pub const ADMIN_SIZES: u64 = 0x24;
    pub const ADMIN_SUBMISSION: u64 = 0x28;
    pub const ADMIN_COMPLETION: u64 = 0x30;
}

/// Bits of the configuration.
pub mod configuration {
    pub const ENABLE: u32 = 1;
    /// Command set and size of a page: zeros for the only ones that there are.
    pub const SETS_AND_PAGES: u32 = 0x7F0;
    pub const SHUTDOWN: u32 = 3 << 14;
}

/// Bits of the status.
pub mod status {
    pub const READY: u32 = 1;
    pub const FATAL: u32 = 2;
    pub const SHUT_DOWN: u32 = 2 << 2;
    pub const SHUTDOWN: u32 = 3 << 2;
}

/// Values of the registers.
#[derive(Clone, Debug, Default)]
pub struct Values {
    pub capabilities: u64,
    pub version: u32,
    pub mask: u32,
    pub configuration: u32,
    pub status: u32,
    pub admin_sizes: u32,
    pub admin_submission: u64,
    pub admin_completion: u64,
    /// The last number that was written to each doorbell: of a submission queue, of its completion queue.
    pub doorbells: Vec<u16>,
    /// Number of times that the controller was switched off.
    pub resets: u64,
}

/// The registers.
#[derive(Debug)]
pub struct Registers {
    values: Mutex<Values>,
    /// Is shut while the values are held.
    gate: Arc<Gate>,
}

impl Registers {
    /// Makes the registers of a controller with so many pairs of queues besides the administrator's, of so
    /// many entries each.
    #[must_use]
    pub fn new(pairs: u16, entries: u16, version: u32) -> Self {
        // Up to 20 s until it is ready; queues are contiguous; the NVM command set.
        let capabilities = u64::from(entries.max(2) - 1) | 1 << 16 | 40 << 24 | 1 << 37;
        let doorbells = vec![0; 2 * (usize::from(pairs) + 1)];
        let values = Values { capabilities, version, doorbells, ..Values::default() };
        Self { values: Mutex::new(values), gate: Arc::default() }
    }

    /// Returns the values, until the guard is dropped.
    pub fn values(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the gate to the guest's memory.
    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Follows Bus Master Enable of the function.
    pub fn set_master(&self, is_master: bool) {
        self.gate.set_master(is_master);
    }

    /// Switches the controller off, as a reset of its function does.
    pub fn reset(&self) {
        let mut values = self.values();
        values.configuration = 0;
        values.mask = 0;
        values.resets += 1;
        self.gate.shut();
    }

    /// Reads registers.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let values = self.values();
        let mut bytes = Vec::with_capacity(0x38);
        bytes.extend(values.capabilities.to_le_bytes());
        let low = [values.version, values.mask, values.mask, values.configuration, 0, values.status, 0];
        low.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(values.admin_sizes.to_le_bytes());
        bytes.extend(values.admin_submission.to_le_bytes());
        bytes.extend(values.admin_completion.to_le_bytes());
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        data.iter_mut().zip(bytes.iter().skip(from)).for_each(|(to, from)| *to = *from);
    }

    /// Writes a register of four or eight bytes. Returns true if the controller has work then.
    pub fn write(&self, offset: u64, data: &[u8]) -> bool {
        let mut words =
            data.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        let (Some(low), high) = (words.next(), words.next()) else { return false };
        if !offset.is_multiple_of(4) {
            return false;
        }
        let mut values = self.values();
        let resets = values.resets;
        let mut works = values.write(offset, low);
        if let Some(high) = high {
            works |= values.write(offset + 4, high);
        }
        if values.resets != resets {
            self.gate.shut();
        }
        works
    }
}

impl Values {
    fn write(&mut self, offset: u64, value: u32) -> bool {
        let half = |register: u64, is_high: bool| match is_high {
            true => register & 0xFFFF_FFFF | u64::from(value) << 32,
            false => register & !0xFFFF_FFFF | u64::from(value),
        };
        match offset {
            offset::MASK_SET => self.mask |= value,
            offset::MASK_CLEAR => self.mask &= !value,
            offset::CONFIGURATION => {
                self.resets += u64::from(self.configuration & !value & configuration::ENABLE);
                self.configuration = value;
            }
            offset::ADMIN_SIZES => self.admin_sizes = value & 0x0FFF_0FFF,
            _ if offset & !4 == offset::ADMIN_SUBMISSION => {
                self.admin_submission = half(self.admin_submission, offset & 4 != 0) & !0xFFF;
            }
            _ if offset & !4 == offset::ADMIN_COMPLETION => {
                self.admin_completion = half(self.admin_completion, offset & 4 != 0) & !0xFFF;
            }
            _ => return self.ring(offset, value),
        }
        matches!(offset, offset::CONFIGURATION | offset::MASK_CLEAR)
    }

    fn ring(&mut self, offset: u64, value: u32) -> bool {
        let number = offset.checked_sub(DOORBELLS).and_then(|offset| usize::try_from(offset / 4).ok());
        let Some(doorbell) = number.and_then(|number| self.doorbells.get_mut(number)) else { return false };
        *doorbell = value as u16;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(registers: &Registers, offset: u64, length: usize) -> u64 {
        let mut bytes = [0; 8];
        registers.read(offset, &mut bytes[..length]);
        u64::from_le_bytes(bytes)
    }

    #[test]
    fn registers_are_read_whole_and_in_parts() {
        let registers = Registers::new(3, 1024, VERSION);
        let capabilities = read(&registers, 0, 8);
        assert_eq!(capabilities & 0xFFFF, 1023);
        assert_eq!(read(&registers, 4, 4), capabilities >> 32);
        assert_eq!(read(&registers, 8, 4), 0x1_0400);
        assert!(!registers.write(0x28, &0x1234_5678_9ABC_DEF0_u64.to_le_bytes()));
        assert!(!registers.write(0x30, &0x4000_u32.to_le_bytes()));
        assert!(!registers.write(0x34, &1_u32.to_le_bytes()));
        assert!(!registers.write(0x24, &0xFFFF_FFFF_u32.to_le_bytes()));
        assert_eq!(read(&registers, 0x28, 8), 0x1234_5678_9ABC_D000);
        assert_eq!((read(&registers, 0x30, 8), read(&registers, 0x24, 4)), (0x1_0000_4000, 0x0FFF_0FFF));
        assert_eq!((read(&registers, 0x38, 8), read(&registers, u64::MAX, 8)), (0, 0));
        assert!(registers.write(0x14, &1_u32.to_le_bytes()));
        assert_eq!(read(&registers, 0x16, 2), 0);
        assert_eq!(read(&registers, 0x14, 1), 1);
        // Capabilities and status cannot be written.
        assert!(!registers.write(0, &[0; 8]) && !registers.write(0x1C, &[0xFF; 4]));
        assert_eq!((read(&registers, 0, 8), read(&registers, 0x1C, 4)), (capabilities, 0));
        registers.write(0x0C, &6_u32.to_le_bytes());
        registers.write(0x10, &2_u32.to_le_bytes());
        assert_eq!(read(&registers, 0x0C, 4), 4);
        registers.reset();
        assert_eq!(read(&registers, 0x14, 4), 0);
    }

    #[test]
    fn only_doorbells_that_are_there_ring() {
        let registers = Registers::new(3, 64, VERSION);
        assert!(registers.write(0x1000, &5_u32.to_le_bytes()) && registers.write(0x101C, &[7, 0, 1, 0]));
        assert!(!registers.write(0x1020, &[1; 4]) && !registers.write(0x0FFC, &[1; 4]));
        assert!(!registers.write(0x1002, &[1; 4]) && !registers.write(0x1000, &[1; 2]));
        assert!(!registers.write(0x1000, &[]));
        assert_eq!(registers.values().doorbells, [5, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(read(&registers, 0x1000, 4), 0);
    }
}
