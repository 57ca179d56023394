//! The keyboard controller (8042) without a keyboard. Its driver tests it when the kernel resumes, and would
//! wait for seconds if it did not answer.

/// Port of data, and port of status and commands.
pub const DATA: u16 = 0x60;
pub const COMMAND: u16 = 0x64;

/// Commands: read and write the control byte, test the second port, the controller and the first port, reset
/// the processor.
mod command {
    pub const READ_CONTROL: u8 = 0x20;
    pub const WRITE_CONTROL: u8 = 0x60;
    pub const TEST_SECOND: u8 = 0xA9;
    pub const TEST: u8 = 0xAA;
    pub const TEST_FIRST: u8 = 0xAB;
    pub const RESET: u8 = 0xFE;
}
/// Answers to tests: the controller is well; a port is well.
const WELL: u8 = 0x55;
const PORT_WELL: u8 = 0;
/// Bits of the status: there is data; the controller has passed its test.
const HAS_DATA: u8 = 1;
const TESTED: u8 = 4;

#[derive(Debug, Default)]
pub struct Keyboard {
    control: u8,
    answer: Option<u8>,
    /// The next byte of data is the control byte.
    expects_control: bool,
}

impl Keyboard {
    pub fn read(&mut self, port: u16) -> u8 {
        match port {
            DATA => self.answer.take().unwrap_or(0),
            _ => TESTED | if self.answer.is_some() { HAS_DATA } else { 0 },
        }
    }

    /// Writes a port. Returns true if that resets the machine.
    pub fn write(&mut self, port: u16, value: u8) -> bool {
        let expected_control = std::mem::take(&mut self.expects_control);
        match (port, value) {
            (DATA, control) if expected_control => self.control = control,
            (COMMAND, command::READ_CONTROL) => self.answer = Some(self.control),
            (COMMAND, command::WRITE_CONTROL) => self.expects_control = true,
            (COMMAND, command::TEST) => self.answer = Some(WELL),
            (COMMAND, command::TEST_FIRST | command::TEST_SECOND) => self.answer = Some(PORT_WELL),
            (COMMAND, command::RESET) => return true,
            _ => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_s_questions_are_answered() {
        let mut keyboard = Keyboard::default();
        assert_eq!(keyboard.read(COMMAND) & HAS_DATA, 0);
        assert!(!keyboard.write(COMMAND, 0x60) && !keyboard.write(DATA, 0x47));
        for (command, answer) in [(0xAA, 0x55), (0x20, 0x47), (0xAB, 0), (0xA9, 0)] {
            assert!(!keyboard.write(COMMAND, command));
            assert_eq!(keyboard.read(COMMAND) & HAS_DATA, HAS_DATA);
            assert_eq!(keyboard.read(DATA), answer);
            assert_eq!(keyboard.read(COMMAND) & HAS_DATA, 0);
        }
        // A key for a keyboard that is not there.
        assert!(!keyboard.write(DATA, 0xFF));
        assert_eq!(keyboard.read(COMMAND) & HAS_DATA, 0);
        assert!(keyboard.write(COMMAND, 0xFE));
    }
}
