//! A serial port (rust-vmm's model of a 16550A). The monitor carries its bytes.

use std::{
    convert::Infallible,
    fmt, io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use vm_superio::{Serial as Uart, Trigger, serial::NoEvents};

/// Number of the port's registers.
pub const REGISTERS: u16 = 8;
const INTERRUPT_ENABLE: u8 = 1;
const INTERRUPT_IDENTIFICATION: u8 = 2;
const LINE_CONTROL: u8 = 3;
const LINE_STATUS: u8 = 5;
/// Of the identification: nothing wants attention.
const NONE: u8 = 1;
/// Of the identification: data has come.
const RECEIVED: u8 = 4;
/// Of the line's status: there is data.
const READY: u8 = 1;

/// Remembers that the port wants attention.
#[derive(Clone, Debug, Default)]
struct Line(Arc<AtomicBool>);

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// The bytes that the guest has sent, until the monitor takes them.
#[derive(Clone, Debug, Default)]
struct Sent(Arc<Mutex<Vec<u8>>>);

impl Sent {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl io::Write for Sent {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The serial port of a PC.
pub struct Serial {
    uart: Uart<Line, NoEvents, Sent>,
    line: Line,
    sent: Sent,
    /// The divisor is in the first two registers' place.
    shows_divisor: bool,
    listens: bool,
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serial").field("line", &self.line).finish_non_exhaustive()
    }
}

impl Default for Serial {
    fn default() -> Self {
        let (line, sent) = (Line::default(), Sent::default());
        Self { uart: Uart::new(line.clone(), sent.clone()), line, sent, shows_divisor: false, listens: false }
    }
}

impl Serial {
    /// Returns the number of bytes that the port can take. While no driver wants interrupts for
    /// them it takes none, so that input before the guest listens is not lost.
    #[must_use]
    pub fn room(&self) -> usize {
        if self.listens { self.uart.fifo_capacity() } else { 0 }
    }

    /// Returns true if the driver wants interrupts for bytes, and has not read all of them.
    #[must_use]
    pub fn has_unread(&mut self) -> bool {
        self.listens && self.uart.read(LINE_STATUS) & READY != 0
    }

    /// Receives typed bytes.
    pub fn receive(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            // There is room for them; while the port is being tested they are lost, as on a wire.
            let _ = self.uart.enqueue_raw_bytes(bytes);
        }
    }

    /// Returns true if the port wants attention. The answer is given once.
    pub fn wants_attention(&mut self) -> bool {
        self.line.0.swap(false, Ordering::Relaxed)
    }

    /// Reads a register. The port says so as long as there is data. The model forgets the data when its
    /// first byte is read. A driver that stops reading in the middle would wait for the rest until
    /// the next key.
    pub fn read(&mut self, register: u8) -> u8 {
        let value = self.uart.read(register);
        let asks_why = register == INTERRUPT_IDENTIFICATION;
        if asks_why && self.listens && self.uart.read(LINE_STATUS) & READY != 0 {
            return value & !NONE | RECEIVED;
        }
        value
    }

    /// Writes a register. Returns the bytes that the guest has sent.
    #[must_use]
    pub fn write(&mut self, register: u8, value: u8) -> Vec<u8> {
        match register {
            INTERRUPT_ENABLE if !self.shows_divisor => self.listens = value & 1 != 0,
            LINE_CONTROL => self.shows_divisor = value & 0x80 != 0,
            _ => {}
        }
        // The line and what is sent are memory, and never fail.
        let _ = self.uart.write(register, value);
        self.sent.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sent_bytes_come_out_and_the_port_asks_for_more() {
        let mut serial = Serial::default();
        assert_eq!(serial.write(INTERRUPT_ENABLE, 2), []);
        assert_eq!(serial.write(0, b'a'), b"a");
        assert!(serial.wants_attention());
        assert!(!serial.wants_attention());
        assert_eq!(serial.room(), 0);
    }

    #[test]
    fn a_driver_that_stops_reading_is_told_that_there_is_more() {
        let mut serial = Serial::default();
        let why = |serial: &mut Serial| serial.read(INTERRUPT_IDENTIFICATION) & (RECEIVED | NONE);
        assert_eq!(serial.write(INTERRUPT_ENABLE, 1), []);
        assert_eq!(why(&mut serial), NONE);
        serial.receive(b"typed");
        assert!(serial.wants_attention());
        for byte in b"typed" {
            assert_eq!(why(&mut serial), RECEIVED);
            assert_eq!(serial.read(0), *byte);
        }
        assert_eq!(why(&mut serial), NONE);
        // A driver that wants no interrupts is told nothing.
        serial.receive(b"more");
        assert_eq!(serial.write(INTERRUPT_ENABLE, 0), []);
        serial.read(INTERRUPT_IDENTIFICATION);
        assert_eq!(why(&mut serial), NONE);
    }
}
