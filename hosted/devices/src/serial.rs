//! A serial port (16550A). The monitor carries its bytes. A byte that the guest sends is out at once.
//!
//! The port holds its interrupt line high as long as a condition holds that the driver has enabled, as the
//! chip does: data waits, or the transmitter is empty and the driver does not know yet. So a driver that
//! switches interrupts off and on again, or is late, finds the line high. An interrupt controller that
//! counts edges gets one for each rise ([`Serial::wants_attention`]).

use std::collections::VecDeque;

use crate::{
    error::Result,
    state::{Reader, Writer},
};

/// Number of the port's registers.
pub const REGISTERS: u16 = 8;
/// The registers. The first three have another meaning while the divisor is shown, or when they are written.
const DATA: u8 = 0;
const INTERRUPT_ENABLE: u8 = 1;
const INTERRUPT_IDENTIFICATION: u8 = 2;
const LINE_CONTROL: u8 = 3;
const MODEM_CONTROL: u8 = 4;
const LINE_STATUS: u8 = 5;
const MODEM_STATUS: u8 = 6;
const SCRATCH: u8 = 7;

/// Interrupts that a driver enables: data has come, the transmitter is empty.
const WANTS_DATA: u8 = 1;
const WANTS_EMPTY: u8 = 2;
/// All bits of the enabling register.
const ENABLES: u8 = 0xF;
/// The identification: nothing, the transmitter is empty, data has come; both queues are on.
const NONE: u8 = 1;
const EMPTIED: u8 = 2;
const RECEIVED: u8 = 4;
const HAS_QUEUES: u8 = 0xC0;
/// Commands to the queues: switch on, drop what was received.
const QUEUES_ON: u8 = 1;
const DROP_RECEIVED: u8 = 2;
/// Line control: the divisor is in the place of the first two registers.
const DIVISOR: u8 = 0x80;
/// Modem control: the second output, which a PC's driver sets for interrupts; the test that joins both ends.
const SECOND_OUTPUT: u8 = 8;
const LOOPS: u8 = 0x10;
/// Line status: data waits; the transmitter is empty, in both its parts.
const READY: u8 = 1;
const EMPTY: u8 = 0x60;
/// Modem status: the other end is there and ready.
const OTHER_END: u8 = 0xB0;
/// Length of the queue of received bytes.
const QUEUE: usize = 64;

/// The serial port of a PC.
#[derive(Debug)]
pub struct Serial {
    received: VecDeque<u8>,
    enabled: u8,
    line_control: u8,
    modem_control: u8,
    scratch: u8,
    divisor: [u8; 2],
    has_queues: bool,
    /// The transmitter is empty, and the driver does not know yet.
    was_emptied: bool,
    /// The line, as the last access has left it.
    is_high: bool,
    /// The line has risen, and the monitor does not know yet.
    has_risen: bool,
}

impl Default for Serial {
    fn default() -> Self {
        Self {
            received: VecDeque::new(),
            enabled: 0,
            line_control: 3,
            modem_control: SECOND_OUTPUT,
            scratch: 0,
            divisor: [12, 0],
            has_queues: false,
            was_emptied: true,
            is_high: false,
            has_risen: false,
        }
    }
}

impl Serial {
    /// Writes the state.
    pub fn save(&self, to: &mut Writer) {
        let (first, second) = self.received.as_slices();
        to.bytes(&[first, second].concat());
        let [low, high] = self.divisor;
        to.numbers([self.enabled, self.line_control, self.modem_control, self.scratch, low, high]);
        to.numbers([self.has_queues, self.was_emptied, self.is_high, self.has_risen]);
    }

    /// Reads the state.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn load(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            received: from.bytes()?.iter().copied().collect(),
            enabled: from.number()?,
            line_control: from.number()?,
            modem_control: from.number()?,
            scratch: from.number()?,
            divisor: [from.number()?, from.number()?],
            has_queues: from.truth()?,
            was_emptied: from.truth()?,
            is_high: from.truth()?,
            has_risen: from.truth()?,
        })
    }

    /// Returns the number of bytes that the port can take. While no driver wants interrupts for
    /// them it takes none, so that input before the guest listens is not lost.
    #[must_use]
    pub fn room(&self) -> usize {
        let listens = self.enabled & WANTS_DATA != 0 && !self.is_tested();
        if listens { QUEUE.saturating_sub(self.received.len()) } else { 0 }
    }

    /// Receives typed bytes. There must be room for them.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.received.extend(bytes);
        self.drive_line();
    }

    /// Returns true if the interrupt line is high.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.is_high
    }

    /// Returns true if the line has risen. The answer is given once for each rise.
    pub fn wants_attention(&mut self) -> bool {
        std::mem::take(&mut self.has_risen)
    }

    /// Reads a register.
    pub fn read(&mut self, register: u8) -> u8 {
        let shows_divisor = self.shows_divisor();
        let value = match register {
            DATA | INTERRUPT_ENABLE if shows_divisor => self.divisor[usize::from(register)],
            DATA => self.received.pop_front().unwrap_or(0),
            INTERRUPT_ENABLE => self.enabled,
            INTERRUPT_IDENTIFICATION => self.identify(),
            LINE_CONTROL => self.line_control,
            MODEM_CONTROL => self.modem_control,
            LINE_STATUS => EMPTY | if self.received.is_empty() { 0 } else { READY },
            MODEM_STATUS if self.is_tested() => looped(self.modem_control),
            MODEM_STATUS => OTHER_END,
            SCRATCH => self.scratch,
            _ => 0xFF,
        };
        self.drive_line();
        value
    }

    /// Writes a register. Returns the bytes that the guest has sent.
    #[must_use]
    pub fn write(&mut self, register: u8, value: u8) -> Vec<u8> {
        let mut sent = Vec::new();
        match register {
            DATA | INTERRUPT_ENABLE if self.shows_divisor() => self.divisor[usize::from(register)] = value,
            DATA => sent = self.send(value),
            INTERRUPT_ENABLE => {
                let added = value & !self.enabled;
                self.was_emptied |= added & WANTS_EMPTY != 0;
                self.enabled = value & ENABLES;
            }
            INTERRUPT_IDENTIFICATION => {
                self.has_queues = value & QUEUES_ON != 0;
                if value & DROP_RECEIVED != 0 {
                    self.received.clear();
                }
            }
            LINE_CONTROL => self.line_control = value,
            MODEM_CONTROL => self.modem_control = value,
            SCRATCH => self.scratch = value,
            _ => {}
        }
        self.drive_line();
        sent
    }

    fn shows_divisor(&self) -> bool {
        self.line_control & DIVISOR != 0
    }

    fn is_tested(&self) -> bool {
        self.modem_control & LOOPS != 0
    }

    /// Sends a byte. The transmitter is full for a moment, so the line falls and rises again.
    fn send(&mut self, byte: u8) -> Vec<u8> {
        self.was_emptied = false;
        self.drive_line();
        self.was_emptied = true;
        if !self.is_tested() {
            return vec![byte];
        }
        if self.received.len() < QUEUE {
            self.received.push_back(byte);
        }
        Vec::new()
    }

    /// Returns the most important condition that holds the line. To read of the empty transmitter ends that
    /// condition.
    fn identify(&mut self) -> u8 {
        let condition = if self.has_data() {
            RECEIVED
        } else if self.is_empty_news() {
            self.was_emptied = false;
            EMPTIED
        } else {
            NONE
        };
        condition | if self.has_queues { HAS_QUEUES } else { 0 }
    }

    fn has_data(&self) -> bool {
        self.enabled & WANTS_DATA != 0 && !self.received.is_empty()
    }

    fn is_empty_news(&self) -> bool {
        self.enabled & WANTS_EMPTY != 0 && self.was_emptied
    }

    fn drive_line(&mut self) {
        let is_high = self.has_data() || self.is_empty_news();
        self.has_risen |= is_high && !self.is_high;
        self.is_high = is_high;
    }
}

/// Returns the modem's status while both ends are joined: each output leads to an input.
fn looped(control: u8) -> u8 {
    let bit = |from: u8, to: u8| (control >> from & 1) << to;
    bit(0, 5) | bit(1, 4) | bit(2, 6) | bit(3, 7)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reads why the line is high.
    fn why(serial: &mut Serial) -> u8 {
        serial.read(INTERRUPT_IDENTIFICATION) & !HAS_QUEUES
    }

    #[test]
    fn sent_bytes_come_out_and_the_port_asks_for_more() {
        let mut serial = Serial::default();
        assert_eq!(serial.write(INTERRUPT_ENABLE, WANTS_EMPTY), []);
        assert!(serial.wants_attention(), "the transmitter is empty from the start");
        assert_eq!((why(&mut serial), serial.is_raised()), (EMPTIED, false));
        assert_eq!(why(&mut serial), NONE);
        assert_eq!(serial.write(DATA, b'a'), b"a");
        assert!(serial.wants_attention() && serial.is_raised());
        assert!(!serial.wants_attention());
        // Another byte before the driver has asked: the line falls and rises again.
        assert_eq!(serial.write(DATA, b'b'), b"b");
        assert!(serial.wants_attention() && serial.is_raised());
        assert_eq!(serial.write(INTERRUPT_ENABLE, 0), []);
        assert!(!serial.is_raised());
        assert_eq!((serial.room(), serial.read(LINE_STATUS)), (0, EMPTY));
    }

    #[test]
    fn the_line_is_high_until_all_bytes_are_read() {
        let mut serial = Serial::default();
        assert_eq!(serial.write(INTERRUPT_ENABLE, WANTS_DATA), []);
        assert_eq!((why(&mut serial), serial.room()), (NONE, QUEUE));
        serial.receive(b"typed");
        assert!(serial.wants_attention());
        for byte in b"typed" {
            assert!(serial.is_raised());
            assert_eq!((why(&mut serial), serial.read(LINE_STATUS)), (RECEIVED, EMPTY | READY));
            assert_eq!(serial.read(DATA), *byte);
        }
        assert!(!serial.is_raised() && !serial.wants_attention());
        assert_eq!(why(&mut serial), NONE);
    }

    #[test]
    fn bytes_that_wait_while_interrupts_are_off_raise_the_line_when_they_are_on_again() {
        let mut serial = Serial::default();
        let enable = |serial: &mut Serial, value| assert_eq!(serial.write(INTERRUPT_ENABLE, value), []);
        enable(&mut serial, WANTS_DATA);
        serial.receive(b"x");
        assert!(serial.wants_attention());
        // A console that prints a message. A handler on another processor finds nothing meanwhile.
        enable(&mut serial, 0);
        assert_eq!((why(&mut serial), serial.is_raised()), (NONE, false));
        enable(&mut serial, WANTS_DATA);
        assert!(serial.is_raised() && serial.wants_attention());
        assert_eq!((why(&mut serial), serial.read(DATA)), (RECEIVED, b'x'));
        // A driver that drops what was received.
        serial.receive(b"lost");
        assert_eq!(serial.write(INTERRUPT_IDENTIFICATION, QUEUES_ON | DROP_RECEIVED), []);
        assert!(!serial.is_raised());
        assert_eq!(serial.read(INTERRUPT_IDENTIFICATION), NONE | HAS_QUEUES);
    }

    #[test]
    fn a_driver_s_tests_find_a_16550a() {
        let mut serial = Serial::default();
        let mut put = |register, value| assert_eq!(serial.write(register, value), []);
        put(SCRATCH, 0x5A);
        put(LINE_CONTROL, DIVISOR | 3);
        put(DATA, 1);
        put(INTERRUPT_ENABLE, 0);
        put(LINE_CONTROL, 3);
        put(INTERRUPT_ENABLE, 0xFF);
        put(MODEM_CONTROL, LOOPS | 0xA);
        put(DATA, 7);
        assert_eq!((serial.read(INTERRUPT_ENABLE), serial.read(SCRATCH)), (ENABLES, 0x5A));
        assert_eq!((serial.read(MODEM_STATUS) & 0xF0, serial.read(DATA)), (0x90, 7));
        assert_eq!(serial.room(), 0);
        assert_eq!(serial.write(MODEM_CONTROL, 0xB), []);
        assert_eq!((serial.read(MODEM_STATUS), serial.room()), (OTHER_END, QUEUE));
        assert_eq!(serial.write(LINE_CONTROL, DIVISOR), []);
        assert_eq!((serial.read(DATA), serial.read(INTERRUPT_ENABLE)), (1, 0));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Receive(usize),
        Read(u8),
        Write(u8, u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let register = 0..REGISTERS as u8;
        prop_oneof![
            (0..QUEUE).prop_map(Step::Receive),
            register.clone().prop_map(Step::Read),
            (register, any::<u8>()).prop_map(|(register, value)| Step::Write(register, value)),
            (0..4_u8).prop_map(|value| Step::Write(INTERRUPT_ENABLE, value)),
        ]
    }

    proptest! {
        /// The line is high just when the identification names a condition, and each rise is told.
        #[test]
        fn the_line_follows_the_registers(steps in proptest::collection::vec(step(), 0..200)) {
            let mut serial = Serial::default();
            for step in steps {
                let was_high = serial.is_raised();
                match step {
                    Step::Receive(count) => serial.receive(&vec![7; count.min(serial.room())]),
                    Step::Read(register) => drop(serial.read(register)),
                    Step::Write(register, value) => drop(serial.write(register, value)),
                }
                let is_high = serial.is_raised();
                let has_risen = serial.wants_attention();
                prop_assert!(!is_high || was_high || has_risen, "a rise is lost");
                prop_assert!(serial.received.len() <= QUEUE);
                let waits = serial.enabled & WANTS_DATA != 0 && serial.read(LINE_STATUS) & READY != 0;
                prop_assert!(is_high || !waits, "bytes wait, and the line is low");
                let told = why(&mut serial);
                prop_assert_eq!(is_high, told != NONE);
                prop_assert_eq!(waits, told == RECEIVED);
            }
        }
    }
}
