//! A function on PCI: its configuration space, the addresses that it decodes, and its messages.
//!
//! The function begins as a machine's driver knew it. Its kernel writes the same values again when it
//! resumes, measures the function in a rescan, and programs the messages.

use std::ops::Range;

/// Size of the configuration space.
pub const SPACE: usize = 256;
/// Size of an entry in a table of messages.
const ENTRY: usize = 16;

/// Registers of the header.
mod header {
    pub const COMMAND: usize = 0x04;
    pub const STATUS_HIGH: usize = 0x07;
    pub const CACHE_LINE: usize = 0x0C;
    pub const LATENCY: usize = 0x0D;
    pub const TYPE: usize = 0x0E;
    pub const BARS: usize = 0x10;
    pub const CAPABILITIES: usize = 0x34;
    pub const LINE: usize = 0x3C;
}
/// Writable bits of the command: ports, memory, master, parity, errors, no interrupt line.
const COMMAND_BITS: [u8; 2] = [0x47, 0x05];
const MEMORY: u8 = 2;
const MASTER: u8 = 4;
const NO_LINE: u16 = 1 << 10;
/// Bits of a base address register: it is for ports; it has 64 bits; its flags.
const IS_PORTS: u32 = 1;
const IS_WIDE: u32 = 4;
const FLAGS: u32 = 15;

/// Kinds of capabilities.
mod capability {
    pub const POWER: u8 = 0x01;
    pub const MSI: u8 = 0x05;
    pub const EXPRESS: u8 = 0x10;
    pub const MSI_X: u8 = 0x11;
}

/// A message that is to be written for an interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Address of the write.
    pub address: u64,
    /// Data of the write.
    pub data: u32,
}

/// A range of memory that the function decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bar {
    number: usize,
    length: u64,
    is_wide: bool,
}

/// Effects of a write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Messages that had to wait until now.
    pub messages: Vec<Message>,
    /// True if the function is to be reset.
    pub resets: bool,
}

/// Table of messages (MSI-X).
#[derive(Clone, Debug)]
struct Table {
    capability: usize,
    bar: usize,
    entries: Range<u64>,
    pending_bits: Range<u64>,
    bytes: Vec<u8>,
    pending: Vec<bool>,
}

/// A function.
#[derive(Clone, Debug)]
pub struct Function {
    space: Vec<u8>,
    /// Bits of the space that can be written.
    writable: Vec<u8>,
    bars: Vec<Bar>,
    table: Option<Table>,
    /// Place of the capability MSI.
    msi: Option<usize>,
    /// Vectors of MSI whose messages wait.
    msi_pending: u32,
    /// Place of the control of the capability for PCI Express.
    express_control: Option<usize>,
}

impl Function {
    /// Makes a function with this configuration space, and lengths of what its base address registers
    /// decode.
    ///
    /// # Errors
    /// Returns the reason as a clause if the space describes no such function.
    pub fn new(config: &[u8], lengths: &[(u32, u64)]) -> Result<Self, String> {
        if config.len() < SPACE {
            return Err(format!("{} bytes of its configuration space are known", config.len()));
        }
        let space = config[..SPACE].to_vec();
        if space[header::TYPE] & 0x7F != 0 {
            return Err("it is a bridge".to_owned());
        }
        let mut function = Self {
            space,
            writable: vec![0; SPACE],
            bars: Vec::new(),
            table: None,
            msi: None,
            msi_pending: 0,
            express_control: None,
        };
        function.permit(header::COMMAND, &COMMAND_BITS);
        function.permit(header::CACHE_LINE, &[0xFF]);
        function.permit(header::LATENCY, &[0xFF]);
        function.permit(header::LINE, &[0xFF]);
        function.find_bars(lengths)?;
        function.find_capabilities()?;
        // No error has happened here.
        function.space[header::STATUS_HIGH] = 0;
        function.reset();
        Ok(function)
    }

    fn permit(&mut self, at: usize, bits: &[u8]) {
        self.writable.iter_mut().skip(at).zip(bits).for_each(|(to, from)| *to = *from);
    }

    fn word(&self, at: usize) -> u16 {
        self.space.get(at..at + 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    fn long(&self, at: usize) -> u32 {
        u32::from(self.word(at)) | u32::from(self.word(at + 2)) << 16
    }

    fn find_bars(&mut self, lengths: &[(u32, u64)]) -> Result<(), String> {
        let mut number = 0;
        while number < 6 {
            let low = self.long(header::BARS + 4 * number);
            let length = lengths.iter().find(|(other, _)| *other as usize == number).map(|one| one.1);
            let is_wide = low & (IS_PORTS | IS_WIDE) == IS_WIDE && number < 5;
            if let Some(length) = length.filter(|_| low & IS_PORTS == 0) {
                if !length.is_power_of_two() || length < 16 || (!is_wide && length > 1 << 31) {
                    return Err(format!("its base address register {number} decodes {length} bytes"));
                }
                let bar = Bar { number, length, is_wide };
                if !self.start(bar).is_multiple_of(length) || self.start(bar).checked_add(length).is_none() {
                    return Err(format!("its base address register {number} is not aligned"));
                }
                let at = header::BARS + 4 * number;
                let mask = !(length - 1);
                self.permit(at, &(mask as u32 & !FLAGS).to_le_bytes());
                if is_wide {
                    self.permit(at + 4, &((mask >> 32) as u32).to_le_bytes());
                }
                self.bars.push(bar);
            }
            number += if is_wide { 2 } else { 1 };
        }
        Ok(())
    }

    fn find_capabilities(&mut self) -> Result<(), String> {
        let mut at = usize::from(self.space[header::CAPABILITIES] & 0xFC);
        for _ in 0..SPACE / 4 {
            if at < 0x40 {
                return Ok(());
            }
            match self.space[at] {
                capability::POWER => self.permit(at + 4, &[3]),
                capability::MSI => {
                    self.msi = Some(at);
                    self.permit(at + 2, &[0x71]);
                    let length = if self.has_wide_messages(at) { 10 } else { 6 }
                        + if self.has_mask(at) { 6 } else { 0 };
                    self.permit(at + 4, &vec![0xFF; length]);
                    self.permit(at + 4, &[0xFC]);
                }
                capability::EXPRESS => {
                    self.express_control = Some(at + 8).filter(|control| control + 2 <= SPACE);
                    for control in [0x08, 0x10, 0x28, 0x30] {
                        self.permit(at + control, &[0xFF, 0xFF]);
                    }
                    // No transaction is pending, and no error has happened.
                    self.permit_nothing_pending(at);
                }
                capability::MSI_X => self.find_table(at)?,
                _ => {}
            }
            at = usize::from(self.space.get(at + 1).copied().unwrap_or(0) & 0xFC);
        }
        Err("its capabilities have no end".to_owned())
    }

    fn permit_nothing_pending(&mut self, express: usize) {
        if let Some(status) = self.space.get_mut(express + 0x0A) {
            *status = 0;
        }
    }

    fn has_mask(&self, msi: usize) -> bool {
        self.word(msi + 2) & 0x100 != 0
    }

    fn find_table(&mut self, at: usize) -> Result<(), String> {
        let count = u64::from(self.word(at + 2) & 0x7FF) + 1;
        let (table, pending) = (self.long(at + 4), self.long(at + 8));
        let place = |register: u32, length: u64| {
            let start = u64::from(register & !7);
            let bar = self.bars.iter().find(|bar| bar.number == (register & 7) as usize);
            let is_there = bar.is_some_and(|bar| start + length <= bar.length);
            is_there.then_some(start..start + length)
        };
        let outside = || "its table of messages is outside of its registers".to_owned();
        let entries = place(table, count * ENTRY as u64).ok_or_else(outside)?;
        let pending_bits = place(pending, count.div_ceil(64) * 8).ok_or_else(outside)?;
        if table & 7 != pending & 7 {
            return Err("its table of messages and their pending bits are apart".to_owned());
        }
        self.permit(at + 3, &[0xC0]);
        self.table = Some(Table {
            capability: at,
            bar: (table & 7) as usize,
            entries,
            pending_bits,
            bytes: Vec::new(),
            pending: vec![false; count as usize],
        });
        Ok(())
    }

    /// Switches messages off, as a reset does.
    pub fn reset(&mut self) {
        if let Some(msi) = self.msi {
            self.space[msi + 2] &= !1;
        }
        self.set_msi_pending(0);
        let Some(table) = &mut self.table else { return };
        self.space[table.capability + 3] &= !0xC0;
        table.pending.fill(false);
        // Each entry is masked.
        table.bytes = [[0; 12].as_slice(), &[1, 0, 0, 0]].concat().repeat(table.pending.len());
    }

    /// Returns the number of vectors that the function has messages for.
    #[must_use]
    pub fn vectors(&self) -> u32 {
        match (&self.table, self.msi) {
            (Some(table), _) => table.pending.len() as u32,
            (None, Some(msi)) => 1 << (self.word(msi + 2) >> 1 & 7).min(5),
            (None, None) => 0,
        }
    }

    /// Returns the end of the registers in a base address register that come before the table of messages.
    #[must_use]
    pub fn registers_end(&self, number: usize) -> u64 {
        let length = self.bars.iter().find(|bar| bar.number == number).map_or(0, |bar| bar.length);
        let table = self.table.as_ref().filter(|table| table.bar == number);
        table.map_or(length, |table| table.entries.start.min(table.pending_bits.start))
    }

    /// Returns the ranges of addresses that the function decodes, whether it is enabled or not.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<u64>> {
        self.bars.iter().map(|bar| self.start(*bar)..self.start(*bar) + bar.length).collect()
    }

    fn start(&self, bar: Bar) -> u64 {
        let at = header::BARS + 4 * bar.number;
        let high = if bar.is_wide { u64::from(self.long(at + 4)) << 32 } else { 0 };
        high | u64::from(self.long(at) & !FLAGS)
    }

    /// Returns the base address register that decodes an address, and the offset in its range.
    #[must_use]
    pub fn decode(&self, phys: u64) -> Option<(usize, u64)> {
        if self.space[header::COMMAND] & MEMORY == 0 {
            return None;
        }
        self.bars.iter().find_map(|bar| {
            let offset = phys.checked_sub(self.start(*bar)).filter(|offset| *offset < bar.length)?;
            Some((bar.number, offset))
        })
    }

    /// Reads the configuration space.
    pub fn read(&self, at: usize, data: &mut [u8]) {
        data.fill(0xFF);
        data.iter_mut().zip(self.space.iter().skip(at)).for_each(|(to, from)| *to = *from);
    }

    /// Writes the configuration space.
    pub fn write(&mut self, at: usize, data: &[u8]) -> Effects {
        let mut effects = Effects::default();
        for (at, byte) in (at..SPACE).zip(data) {
            let bits = self.writable[at];
            self.space[at] = self.space[at] & !bits | byte & bits;
        }
        if let Some(high) = self.express_control.map(|control| control + 1) {
            // Bit 15 of the control asks for a reset, and reads as zero.
            effects.resets = self.space[high] & 0x80 != 0;
            self.space[high] &= 0x7F;
        }
        if effects.resets {
            self.space[header::COMMAND] &= !COMMAND_BITS[0];
            self.reset();
        }
        if self.enabled_msi().is_none() {
            self.set_msi_pending(0);
        }
        effects.messages = self.deliverable();
        effects
    }

    /// Reads the table of messages or their pending bits. Returns false for other registers.
    pub fn read_table(&self, bar: usize, offset: u64, data: &mut [u8]) -> bool {
        let Some(table) = self.table.as_ref().filter(|table| table.bar == bar) else { return false };
        if table.entries.contains(&offset) {
            let from = table.bytes.iter().skip((offset - table.entries.start) as usize);
            data.fill(0);
            data.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            return true;
        }
        if !table.pending_bits.contains(&offset) {
            return false;
        }
        let first = (offset - table.pending_bits.start) as usize * 8;
        for (byte, at) in data.iter_mut().zip((first..).step_by(8)) {
            let bit = |bit: usize| u8::from(table.pending.get(at + bit) == Some(&true)) << bit;
            *byte = (0..8).map(bit).fold(0, |byte, bit| byte | bit);
        }
        true
    }

    /// Writes the table of messages. Returns nothing for other registers.
    pub fn write_table(&mut self, bar: usize, offset: u64, data: &[u8]) -> Option<Effects> {
        let table = self.table.as_mut().filter(|table| table.bar == bar)?;
        if table.pending_bits.contains(&offset) {
            return Some(Effects::default());
        }
        if !table.entries.contains(&offset) {
            return None;
        }
        let start = (offset - table.entries.start) as usize;
        table.bytes.iter_mut().skip(start).zip(data).for_each(|(to, from)| *to = *from);
        Some(Effects { messages: self.deliverable(), resets: false })
    }

    /// Raises a vector. Returns its message, if it can be sent at once. Otherwise the vector is pending, and
    /// a later write returns the message.
    pub fn raise(&mut self, vector: u16) -> Option<Message> {
        if self.has_table() {
            let pending = self.table.as_mut()?.pending.get_mut(usize::from(vector))?;
            *pending = true;
        } else {
            let vector = vector & (self.granted(self.enabled_msi()?) - 1);
            self.set_msi_pending(self.msi_pending | 1 << vector);
        }
        self.deliverable().pop()
    }

    /// Returns the place of the capability MSI, if the driver uses it.
    fn enabled_msi(&self) -> Option<usize> {
        self.msi.filter(|msi| self.word(msi + 2) & 1 != 0)
    }

    /// Returns the number of vectors that the driver grants by MSI.
    fn granted(&self, msi: usize) -> u16 {
        1 << (self.word(msi + 2) >> 4 & 7).min(5)
    }

    /// Returns the place of MSI's mask bits, if it has them. Its pending bits follow them.
    fn msi_masks(&self, msi: usize) -> Option<usize> {
        self.has_mask(msi).then_some(msi + if self.has_wide_messages(msi) { 0x10 } else { 0x0C })
    }

    fn has_wide_messages(&self, msi: usize) -> bool {
        self.word(msi + 2) & 0x80 != 0
    }

    /// Notes the vectors of MSI that are pending, where the driver can see them.
    fn set_msi_pending(&mut self, pending: u32) {
        self.msi_pending = pending;
        let place = self.msi.and_then(|msi| self.msi_masks(msi)).map(|masks| masks + 4);
        if let Some(place) = place.and_then(|at| self.space.get_mut(at..at + 4)) {
            place.copy_from_slice(&pending.to_le_bytes());
        }
    }

    /// Returns true if the driver lets the function reach memory (Bus Master Enable).
    #[must_use]
    pub fn is_master(&self) -> bool {
        self.space[header::COMMAND] & MASTER != 0
    }

    /// Returns true if the driver lets the function use its line: without messages, and the line not
    /// disabled.
    #[must_use]
    pub fn uses_line(&self) -> bool {
        let has_messages = self.enabled_msi().is_some() || self.has_table();
        !has_messages && self.word(header::COMMAND) & NO_LINE == 0
    }

    /// Returns true if the table of messages is in use.
    #[must_use]
    pub fn has_table(&self) -> bool {
        self.table.as_ref().is_some_and(|table| self.space[table.capability + 3] & 0x80 != 0)
    }

    /// Takes the messages that are pending and not masked. A message is a write to memory: without Bus Master
    /// Enable it is not sent (PCI Express Base 7.5.1.1.3), and stays pending.
    fn deliverable(&mut self) -> Vec<Message> {
        if !self.is_master() {
            return Vec::new();
        }
        if self.has_table() { self.deliverable_of_table() } else { self.deliverable_of_msi() }
    }

    fn deliverable_of_table(&mut self) -> Vec<Message> {
        let is_masked = |table: &Table, space: &[u8]| space[table.capability + 3] & 0xC0 != 0x80;
        let Some(table) = &mut self.table else { return Vec::new() };
        if is_masked(table, &self.space) {
            return Vec::new();
        }
        let mut messages = Vec::new();
        for (entry, pending) in table.bytes.chunks_exact(ENTRY).zip(&mut table.pending) {
            let long =
                |at: usize| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
            if *pending && long(12) & 1 == 0 {
                *pending = false;
                let address = u64::from(long(4)) << 32 | u64::from(long(0));
                messages.push(Message { address, data: long(8) });
            }
        }
        messages
    }

    fn deliverable_of_msi(&mut self) -> Vec<Message> {
        let Some(msi) = self.enabled_msi() else { return Vec::new() };
        let masked = self.msi_masks(msi).map_or(0, |masks| self.long(masks));
        let ready = self.msi_pending & !masked;
        if ready == 0 {
            return Vec::new();
        }
        self.set_msi_pending(self.msi_pending & masked);
        let is_wide = self.has_wide_messages(msi);
        let high = if is_wide { u64::from(self.long(msi + 8)) << 32 } else { 0 };
        let address = high | u64::from(self.long(msi + 4));
        let data = self.word(msi + if is_wide { 12 } else { 8 });
        let granted = self.granted(msi);
        let vectors = (0_u16..32).filter(|vector| ready & 1 << vector != 0);
        let message = |vector: u16| {
            let data = data & !(granted - 1) | vector & (granted - 1);
            Message { address, data: u32::from(data) }
        };
        vectors.map(message).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub const START: u64 = 0xFEBD_0000;
    const TABLE: u64 = 0x2000;
    const PENDING: u64 = 0x3000;

    /// Returns the space of a disk's controller with MSI-X of 65 vectors, and power management and PCI
    /// Express after it.
    pub fn space() -> Vec<u8> {
        let mut space = vec![0; SPACE];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[0x36, 0x1B, 0x10, 0x00, 0x07, 0x05, 0x10, 0xF0, 2, 2, 8, 1]);
        put(0x10, &(START as u32 | 4).to_le_bytes());
        put(0x34, &[0x40]);
        put(0x3C, &[11, 1]);
        put(0x40, &[capability::MSI_X, 0x80, 64, 0x80]);
        put(0x44, &(TABLE as u32).to_le_bytes());
        put(0x48, &(PENDING as u32).to_le_bytes());
        put(0x60, &[capability::POWER, 0, 3, 0, 8, 0]);
        put(0x80, &[capability::EXPRESS, 0x60, 2, 0]);
        put(0x8A, &[0x2F]);
        space
    }

    fn function() -> Function {
        Function::new(&space(), &[(0, 0x4000)]).unwrap()
    }

    fn long(function: &Function, at: usize) -> u32 {
        let mut bytes = [0; 4];
        function.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn program(function: &mut Function, vector: u64, message: Message, masked: u32) -> Vec<Message> {
        let at = TABLE + vector * 16;
        for (at, word) in
            [(0, message.address as u32), (4, (message.address >> 32) as u32), (8, message.data)]
        {
            assert!(function.write_table(0, at + TABLE + vector * 16, &word.to_le_bytes()).is_some());
        }
        function.write_table(0, at + 12, &masked.to_le_bytes()).unwrap().messages
    }

    #[test]
    fn identity_is_fixed_and_the_driver_s_bits_can_be_written() {
        let mut function = function();
        assert_eq!(long(&function, 0), 0x0010_1B36);
        assert_eq!(long(&function, 4), 0x0010_0507, "no error of the machine is left");
        // The control of PCI Express would reset it.
        for at in (0..SPACE).step_by(4).filter(|at| *at != 0x88) {
            function.write(at, &[0xFF; 4]);
        }
        assert_eq!((long(&function, 0), long(&function, 8)), (0x0010_1B36, 0x0108_0202));
        // Measured as a rescan does.
        assert_eq!((long(&function, 0x10), long(&function, 0x14)), (0xFFFF_C004, 0xFFFF_FFFF));
        assert_eq!(long(&function, 0x18), 0);
        assert_eq!(long(&function, 0x40) >> 16, 0xC040, "the size of the table stays");
        assert_eq!(long(&function, 0x64), 0x0B, "only the state of power");
        let mut past = [0; 4];
        function.read(SPACE - 2, &mut past);
        assert_eq!(past[2..], [0xFF, 0xFF]);
    }

    #[test]
    fn addresses_are_decoded_where_they_are_and_only_while_memory_is_enabled() {
        let mut function = function();
        assert_eq!(function.ranges().first(), Some(&(START..START + 0x4000)));
        assert_eq!(function.decode(START + 0x1008), Some((0, 0x1008)));
        assert_eq!(function.decode(START + 0x4000), None);
        assert_eq!((function.registers_end(0), function.registers_end(1)), (TABLE, 0));
        function.write(0x14, &[1]);
        assert_eq!(function.decode((1 << 32) + START), Some((0, 0)));
        function.write(4, &[0, 0]);
        assert_eq!(function.decode((1 << 32) + START), None);
    }

    #[test]
    fn messages_wait_while_they_are_masked() {
        let mut function = function();
        assert_eq!(function.vectors(), 65);
        let message = |vector: u32| Message { address: 0xFEE0_1000, data: 0x4000 + vector };
        assert_eq!(function.raise(0), None, "the driver has not enabled them");
        function.write(0x42, &[0x40, 0xC0]);
        assert_eq!(program(&mut function, 0, message(0), 0), []);
        assert_eq!(program(&mut function, 64, message(64), 1), []);
        assert_eq!((function.raise(0), function.raise(64), function.raise(65)), (None, None, None));
        let mut bits = [0; 16];
        assert!(function.read_table(0, PENDING, &mut bits));
        assert_eq!((bits[0], bits[8]), (1, 1));
        assert_eq!(function.write(0x42, &[0x40, 0x80]).messages, [message(0)]);
        assert!(!function.uses_line());
        assert_eq!(program(&mut function, 64, message(64), 0), [message(64)]);
        assert_eq!(function.raise(64), Some(message(64)));
        assert!(function.read_table(0, PENDING, &mut bits));
        assert_eq!(bits, [0; 16]);
        let mut entry = [0; 16];
        assert!(function.read_table(0, TABLE + 64 * 16, &mut entry));
        assert_eq!((entry[1], entry[8], entry[12]), (0x10, 0x40, 0));
        assert!(!function.read_table(0, 0x1000, &mut entry) && !function.read_table(2, TABLE, &mut entry));
        assert!(function.write_table(0, 0x1000, &[1]).is_none());
        function.reset();
        assert_eq!(function.raise(64), None);
    }

    #[test]
    fn messages_without_a_table_have_the_vector_in_their_data() {
        let mut space = space();
        space[0x40] = capability::MSI;
        space[0x42..0x44].copy_from_slice(&[0x88, 0]);
        space[0x48..0x4C].fill(0);
        let mut function = Function::new(&space, &[(0, 0x4000)]).unwrap();
        assert_eq!(function.vectors(), 16);
        assert_eq!(function.raise(0), None);
        function.write(0x44, &0xFEE0_3003_u32.to_le_bytes());
        function.write(0x4C, &[0x47, 0x41]);
        function.write(4, &[7, 0]);
        assert!(function.uses_line());
        function.write(4, &[7, 4]);
        assert!(!function.uses_line());
        function.write(4, &[7, 0]);
        function.write(0x42, &[0xA1, 0]);
        assert!(!function.uses_line());
        assert_eq!(function.raise(2), Some(Message { address: 0xFEE0_3000, data: 0x4146 }));
        assert_eq!(function.raise(7), Some(Message { address: 0xFEE0_3000, data: 0x4147 }));
    }

    /// Returns a function with MSI of four vectors for addresses of 64 bits, with mask bits if wanted. Its
    /// driver has enabled two vectors.
    fn with_msi(has_masks: bool) -> Function {
        let mut space = space();
        space[0x40] = capability::MSI;
        space[0x42..0x44].copy_from_slice(&[0x84, u8::from(has_masks)]);
        space[0x48..0x58].fill(0);
        let mut function = Function::new(&space, &[(0, 0x4000)]).unwrap();
        function.write(0x44, &0xFEE0_3000_u32.to_le_bytes());
        function.write(0x4C, &[0x40, 0x41]);
        function.write(4, &[7, 0]);
        function.write(0x42, &[0x95, 0]);
        function
    }

    const fn msi(data: u32) -> Message {
        Message { address: 0xFEE0_3000, data }
    }

    #[test]
    fn no_message_is_sent_while_the_function_is_no_master() {
        let mut function = function();
        let message = |vector: u32| Message { address: 0xFEE0_1000, data: 0x4000 + vector };
        function.write(0x42, &[0x40, 0x80]);
        for vector in [0, 3] {
            program(&mut function, vector, message(vector as u32), 0);
        }
        assert_eq!(function.raise(0), Some(message(0)));
        assert_eq!(function.write(4, &[3, 0]).messages, []);
        assert_eq!((function.raise(0), function.raise(3), function.raise(3)), (None, None, None));
        assert!(!function.uses_line(), "the line does not stand in");
        let mut bits = [0; 8];
        assert!(function.read_table(0, PENDING, &mut bits));
        assert_eq!(bits[0], 9, "the driver sees what waits");
        // Neither the table nor another bit of the command lets one out.
        assert_eq!(program(&mut function, 3, message(3), 0), []);
        assert_eq!(function.write(4, &[3, 4]).messages, []);
        assert_eq!(function.write(4, &[7, 4]).messages, [message(0), message(3)]);
        assert!(function.read_table(0, PENDING, &mut bits) && bits == [0; 8]);
        assert_eq!(function.write(4, &[7, 0]).messages, [], "each is sent once");
    }

    #[test]
    fn messages_without_a_table_wait_for_the_master_too() {
        for has_masks in [false, true] {
            let mut function = with_msi(has_masks);
            assert_eq!(function.raise(1), Some(msi(0x4141)));
            function.write(4, &[3, 0]);
            assert_eq!((function.raise(1), function.raise(1), function.raise(0)), (None, None, None));
            assert_eq!(long(&function, 0x54), if has_masks { 3 } else { 0 });
            assert_eq!(function.write(4, &[7, 0]).messages, [msi(0x4140), msi(0x4141)]);
            assert_eq!((function.write(4, &[7, 0]).messages, long(&function, 0x54)), (vec![], 0));
            // Nothing waits for a driver that has switched the messages off meanwhile.
            function.write(4, &[3, 0]);
            assert_eq!(function.raise(1), None);
            function.write(0x42, &[0x94, 0]);
            assert_eq!((function.write(4, &[7, 0]).messages, long(&function, 0x54)), (vec![], 0));
            assert_eq!(function.write(0x42, &[0x95, 0]).messages, []);
            function.write(4, &[3, 0]);
            assert_eq!(function.raise(1), None);
            function.reset();
            function.write(4, &[7, 0]);
            assert_eq!(function.write(0x42, &[0x95, 0]).messages, []);
        }
    }

    #[test]
    fn masked_messages_without_a_table_are_pending() {
        let mut function = with_msi(true);
        function.write(0x50, &[2, 0, 0, 0]);
        assert_eq!((function.raise(0), function.raise(1)), (Some(msi(0x4140)), None));
        function.write(0x54, &[0; 4]);
        assert_eq!(long(&function, 0x54), 2, "the driver reads it and cannot write it");
        assert_eq!(function.write(0x50, &[0; 4]).messages, [msi(0x4141)]);
        assert_eq!(long(&function, 0x54), 0);
    }

    #[test]
    fn a_reset_of_the_function_is_asked_for_once() {
        let mut function = function();
        assert_eq!(long(&function, 0x88) >> 16 & 0x20, 0, "no transaction is pending");
        assert!(function.write(0x88, &[0x10, 0x80]).resets);
        assert_eq!(function.decode(START), None);
        assert!(!function.write(0x88, &[0x10, 0]).resets);
    }

    #[test]
    fn spaces_that_describe_no_function_are_refused() {
        let refused = |change: &dyn Fn(&mut Vec<u8>), length| {
            let mut space = space();
            change(&mut space);
            Function::new(&space, &[(0, length)]).unwrap_err()
        };
        assert!(refused(&|space| space.truncate(64), 0x4000).contains("64 bytes"));
        assert!(refused(&|space| space[0x0E] = 1, 0x4000).contains("bridge"));
        assert!(refused(&|space| space[0x81] = 0x40, 0x4000).contains("no end"));
        assert!(refused(&|_| (), 0x3000).contains("decodes"));
        assert!(refused(&|space| space[0x11] = 0x10, 0x4000).contains("not aligned"));
        assert!(refused(&|space| space[0x45] = 0x3C, 0x4000).contains("outside"));
        assert!(refused(&|space| space[0x44] = 2, 0x4000).contains("outside"));
    }

    proptest! {
        /// No space and no access brings the function out of bounds.
        #[test]
        fn any_space_is_refused_or_works(
            space in proptest::collection::vec(any::<u8>(), SPACE),
            length in 4_u32..34,
            accesses in proptest::collection::vec((any::<u8>(), any::<[u8; 4]>()), 0..40),
        ) {
            let mut space = space;
            space[0x0E] = 0;
            let lengths = [(0, 1 << length), (2, 0x1000)];
            let Ok(mut function) = Function::new(&space, &lengths) else { return Ok(()) };
            for (at, bytes) in accesses {
                function.write(usize::from(at), &bytes);
                let mut read = [0; 4];
                function.read(usize::from(at), &mut read);
                function.write_table(0, u64::from(u32::from_le_bytes(bytes)), &bytes);
                function.read_table(2, u64::from(at), &mut read);
                function.raise(u16::from(at));
            }
            prop_assert!(function.vectors() <= 2048);
        }
    }
}
