//! The first serial port (rust-vmm's model of a 16550A), with the terminal at its other end.

use std::{cell::Cell, convert::Infallible, fmt, io, rc::Rc};

use vm_superio::{Serial as Uart, Trigger, serial::NoEvents};

use super::Console;

const BASE: u16 = 0x3F8;
const INTERRUPT_ENABLE: u16 = 1;
const INTERRUPT_IDENTIFICATION: u16 = 2;
const LINE_CONTROL: u16 = 3;
const LINE_STATUS: u16 = 5;
/// Of the identification: nothing wants attention.
const NONE: u8 = 1;
/// Of the identification: data has come.
const RECEIVED: u8 = 4;
/// Of the line's status: there is data.
const READY: u8 = 1;

/// Remembers that the port wants attention.
#[derive(Clone, Debug, Default)]
struct Line(Rc<Cell<bool>>);

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.set(true);
        Ok(())
    }
}

/// The bytes that the guest has sent, until the terminal gets them.
#[derive(Clone, Debug, Default)]
struct Sent(Rc<std::cell::RefCell<Vec<u8>>>);

impl io::Write for Sent {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().extend(bytes);
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

    /// Receives typed bytes.
    pub fn receive(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            // There is room for them; while the port is being tested they are lost, as on a wire.
            let _ = self.uart.enqueue_raw_bytes(bytes);
        }
    }

    /// Returns true if the port wants attention. The answer is given once.
    pub fn wants_attention(&mut self) -> bool {
        self.line.0.take()
    }

    /// Reads a port. The port says so as long as there is data. The model forgets the data when its
    /// first byte is read. A driver that stops reading in the middle would wait for the rest until
    /// the next key.
    pub fn read(&mut self, port: u16) -> u8 {
        let value = self.uart.read((port - BASE) as u8);
        let asks_why = port - BASE == INTERRUPT_IDENTIFICATION;
        if asks_why && self.listens && self.uart.read(LINE_STATUS as u8) & READY != 0 {
            return value & !NONE | RECEIVED;
        }
        value
    }

    pub fn write(&mut self, port: u16, value: u8, console: &mut Console) {
        match port - BASE {
            INTERRUPT_ENABLE if !self.shows_divisor => self.listens = value & 1 != 0,
            LINE_CONTROL => self.shows_divisor = value & 0x80 != 0,
            _ => {}
        }
        // The line and what is sent are memory, and never fail.
        let _ = self.uart.write((port - BASE) as u8, value);
        let sent = std::mem::take(&mut *self.sent.0.borrow_mut());
        console.put(&sent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_stops_reading_is_told_that_there_is_more() {
        let mut serial = Serial::default();
        let why = |serial: &mut Serial| serial.read(BASE + INTERRUPT_IDENTIFICATION) & (RECEIVED | NONE);
        serial.write(BASE + INTERRUPT_ENABLE, 1, &mut Console::silent());
        assert_eq!(why(&mut serial), NONE);
        serial.receive(b"typed");
        assert!(serial.wants_attention());
        for byte in b"typed" {
            assert_eq!(why(&mut serial), RECEIVED);
            assert_eq!(serial.read(BASE), *byte);
        }
        assert_eq!(why(&mut serial), NONE);
        // A driver that wants no interrupts is told nothing.
        serial.receive(b"more");
        serial.write(BASE + INTERRUPT_ENABLE, 0, &mut Console::silent());
        serial.read(BASE + INTERRUPT_IDENTIFICATION);
        assert_eq!(why(&mut serial), NONE);
    }
}
