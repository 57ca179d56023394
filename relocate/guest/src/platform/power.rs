//! The ports of ACPI's fixed hardware (ACPI 6.5, 4.8): no event ever comes, the timer runs, and the kernel
//! can power the machine off and reset it.

use super::End;
use crate::acpi::Ports;
use std::{ops::Range, time::Instant};

/// Frequency of the timer in Hz.
const TIMER_HZ: u128 = 3_579_545;
/// Bits of a control register: ACPI's mode is on; sleep now.
const ENABLED: u16 = 1;
const SLEEP: u16 = 1 << 13;
/// Bit of a status register, in its second byte: the machine has woken up.
const WOKEN: u8 = 1 << 7;

/// The ports, and what the kernel has written to them.
#[derive(Debug)]
pub struct Power {
    ports: Ports,
    began: Instant,
    control: u16,
    /// The kernel has put the machine to sleep, and does not know yet that it is awake.
    has_woken: bool,
    /// Registers that enable events, by port.
    enabled: Vec<(u16, u8)>,
}

impl Power {
    pub fn new(ports: Ports) -> Self {
        Self { ports, began: Instant::now(), control: ENABLED, has_woken: false, enabled: Vec::new() }
    }

    /// Reads a port. Returns nothing if the port is another device's.
    pub fn read(&self, port: u16, data: &mut [u8]) -> Option<()> {
        let ports = &self.ports;
        let words: [u8; 8] = if ports.timer.contains(&port) {
            shifted(u64::from(self.timer()), port - ports.timer.start)
        } else if let Some(block) = block(&ports.controls, port) {
            shifted(u64::from(self.control), port - block.start)
        } else if block(&ports.events, port).or_else(|| block(&ports.general, port)).is_some() {
            data.iter_mut().zip(port..).for_each(|(byte, port)| *byte = self.event(port));
            return Some(());
        } else if ports.firmware_call == Some(port) {
            [0; 8]
        } else {
            return None;
        };
        data.iter_mut().zip(words.into_iter().chain([0; 8])).for_each(|(to, from)| *to = from);
        Some(())
    }

    /// Writes a port. Returns the end of the machine, if that is one.
    pub fn write(&mut self, port: u16, data: &[u8]) -> Option<End> {
        let ports = &self.ports;
        if ports.reset.is_some_and(|(reset, value)| reset == port && data.first() == Some(&value)) {
            return Some(End::Reset);
        }
        if let Some(block) = block(&ports.controls, port) {
            let start = block.start;
            for (byte, port) in data.iter().zip(port..) {
                let shift = 8 * (port - start);
                if shift < 16 {
                    self.control = self.control & !(0xFF << shift) | u16::from(*byte) << shift;
                }
            }
            let sleeps = self.control & SLEEP != 0;
            self.control = self.control & !SLEEP | ENABLED;
            let naps = ports.naps.contains(&((self.control >> 10 & 7) as u8));
            self.has_woken |= sleeps && naps;
            return (sleeps && !naps).then_some(End::PoweredOff);
        }
        for (byte, port) in data.iter().zip(port..) {
            if self.tells_wake(port) {
                self.has_woken &= byte & WOKEN == 0;
            } else if self.enables(port) {
                self.enabled.retain(|(other, _)| *other != port);
                self.enabled.push((port, *byte));
            }
        }
        None
    }

    /// Returns a byte of a block of events. The status in the first half is zero, but after a sleep, of which
    /// the machine wakes up at once.
    fn event(&self, port: u16) -> u8 {
        if self.tells_wake(port) {
            return if self.has_woken { WOKEN } else { 0 };
        }
        self.enabled.iter().find(|(other, _)| *other == port).map_or(0, |(_, byte)| *byte)
    }

    /// Returns true if a port tells that the machine has woken up.
    fn tells_wake(&self, port: u16) -> bool {
        self.ports.events.iter().any(|block| block.start + 1 == port)
    }

    /// Returns true if a port enables events: it is in the second half of a block.
    fn enables(&self, port: u16) -> bool {
        let ports = &self.ports;
        let found = block(&ports.events, port).or_else(|| block(&ports.general, port));
        found.is_some_and(|block| port - block.start >= (block.end - block.start) / 2)
    }

    fn timer(&self) -> u32 {
        let ticks = (self.began.elapsed().as_nanos() * TIMER_HZ / 1_000_000_000) as u32;
        if self.ports.timer_32 { ticks } else { ticks & 0x00FF_FFFF }
    }
}

fn block(blocks: &[Range<u16>], port: u16) -> Option<&Range<u16>> {
    blocks.iter().find(|block| block.contains(&port))
}

/// Returns the bytes of a register from an offset on.
fn shifted(value: u64, offset: u16) -> [u8; 8] {
    value.checked_shr(8 * u32::from(offset)).unwrap_or(0).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn power() -> Power {
        Power::new(Ports {
            events: vec![0x600..0x604],
            controls: vec![0x604..0x606],
            general: vec![0x620..0x624],
            timer: 0x608..0x60C,
            firmware_call: Some(0xB2),
            reset: Some((0xCF9, 6)),
            naps: vec![5],
            ..Ports::default()
        })
    }

    fn read(power: &Power, port: u16, length: usize) -> Option<u64> {
        let mut data = vec![0xAA; length];
        power.read(port, &mut data)?;
        data.resize(8, 0);
        Some(u64::from_le_bytes(data.try_into().ok()?))
    }

    #[test]
    fn events_are_enabled_and_never_come() {
        let mut power = power();
        assert_eq!(power.write(0x600, &[0xFF, 0xFF, 0x20, 0x01]), None);
        assert_eq!(read(&power, 0x600, 4), Some(0x0120_0000));
        assert_eq!(read(&power, 0x602, 2), Some(0x0120));
        assert_eq!(power.write(0x620, &[0xFF]), None);
        assert_eq!(power.write(0x623, &[0x80]), None);
        assert_eq!(read(&power, 0x620, 4), Some(0x8000_0000));
    }

    #[test]
    fn the_control_register_keeps_acpi_on() {
        let mut power = power();
        assert_eq!(power.write(0x604, &[0x00, 0x1C]), None);
        assert_eq!(read(&power, 0x604, 2), Some(0x1C01));
        assert_eq!(read(&power, 0x605, 1), Some(0x1C));
        assert_eq!(power.write(0x605, &[0x3C]), Some(End::PoweredOff));
        assert_eq!(power.write(0xCF9, &[6]), Some(End::Reset));
        assert_eq!(power.write(0xCF9, &[2]), None);
        assert_eq!(read(&power, 0xB2, 1), Some(0));
        assert_eq!(read(&power, 0x606, 1), None);
    }

    #[test]
    fn a_machine_that_sleeps_wakes_up_at_once() {
        let mut power = power();
        assert_eq!(power.write(0x604, &[0x01, 5 << 2 | 0x20]), None);
        assert_eq!(read(&power, 0x600, 2), Some(0x8000));
        assert_eq!(power.write(0x600, &[0x00, 0x80]), None);
        assert_eq!(read(&power, 0x600, 2), Some(0));
        assert_eq!(power.write(0x604, &[0x01, 7 << 2 | 0x20]), Some(End::PoweredOff));
    }

    #[test]
    fn the_timer_runs_and_has_24_bits() {
        let power = power();
        let first = read(&power, 0x608, 4).expect("a timer");
        std::thread::sleep(std::time::Duration::from_millis(20));
        let second = read(&power, 0x608, 4).expect("a timer");
        assert!(second.wrapping_sub(first) & 0xFF_FFFF >= 71_000 && second >> 24 == 0, "{first} {second}");
    }
}
