//! A processor's local interrupt controller (SDM 3A, chapter 11), as far as a kernel uses it that
//! learns of it by a table: interrupts of other processors, and a timer that strikes at a value of
//! the time stamp counter. Interrupts of devices come from the PC's old controllers, to the first
//! processor.

use std::{arch::x86_64::_rdtsc, sync::atomic::Ordering};

use super::Processor;
use crate::{
    devices::{Alarm, now},
    error::Result,
};

/// The physical address of its registers.
pub const BASE: u64 = 0xFEE0_0000;
/// The size of its registers, in bytes.
pub const SIZE: u64 = 0x1000;

mod register {
    pub const ID: u64 = 0x20;
    pub const VERSION: u64 = 0x30;
    pub const PRIORITY: u64 = 0x80;
    pub const PROCESSOR_PRIORITY: u64 = 0xA0;
    pub const END: u64 = 0xB0;
    pub const LOGICAL: u64 = 0xD0;
    pub const FORMAT: u64 = 0xE0;
    pub const SPURIOUS: u64 = 0xF0;
    pub const IN_SERVICE: u64 = 0x100;
    pub const TRIGGER: u64 = 0x180;
    pub const REQUESTED: u64 = 0x200;
    pub const ERROR: u64 = 0x280;
    pub const COMMAND: u64 = 0x300;
    pub const DESTINATION: u64 = 0x310;
    pub const TIMER: u64 = 0x320;
    pub const LAST_VECTOR: u64 = 0x370;
    pub const COUNT: u64 = 0x390;
}

/// Six local vectors, none of them new.
const VERSION: u32 = 5 << 16 | 0x14;
const MASKED: u32 = 1 << 16;
const ALL: u32 = 0xFF;

/// A local interrupt controller.
#[derive(Debug)]
pub struct Apic {
    one: Processor,
    in_service: [u64; 4],
    /// Those that are kept as they were written, by their number.
    registers: [u32; 64],
    /// When the timer strikes, by the time stamp counter; 0 is never.
    deadline: u64,
    /// For which deadline, and when, the host's timer is set.
    armed: (u64, u64),
    alarm: Alarm,
    clock_khz: u64,
}

impl Apic {
    /// Makes the controller of a processor whose time stamp counter has this frequency. The calling
    /// thread gets signals for the timer.
    ///
    /// # Errors
    /// If the host refuses a timer.
    pub fn new(one: Processor, clock_khz: u64) -> Result<Self> {
        let alarm = Alarm::new()?;
        let (in_service, registers) = ([0; 4], [0; 64]);
        let mut apic = Self { one, in_service, registers, deadline: 0, armed: (0, 0), alarm, clock_khz };
        apic.reset();
        Ok(apic)
    }

    /// Puts it into the state after a reset.
    pub fn reset(&mut self) {
        self.in_service = [0; 4];
        self.one.own().requested.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        self.one.own().logical.store(0, Ordering::SeqCst);
        self.registers = [0; 64];
        for at in (register::TIMER..=register::LAST_VECTOR).step_by(16) {
            self.registers[index(at)] = MASKED;
        }
        self.registers[index(register::FORMAT)] = u32::MAX;
        self.registers[index(register::SPURIOUS)] = ALL;
        self.deadline = 0;
    }

    /// Returns the value of the model-specific register with the controller's address.
    #[must_use]
    pub fn base(&self) -> u64 {
        const ENABLED: u64 = 1 << 11;
        const FIRST: u64 = 1 << 8;
        BASE | ENABLED | if self.one.is_first() { FIRST } else { 0 }
    }

    /// Returns the timer's deadline.
    #[must_use]
    pub fn deadline(&self) -> u64 {
        self.deadline
    }

    pub fn set_deadline(&mut self, when: u64) {
        self.deadline = when;
        self.poll();
    }

    /// Requests the timer's interrupt if its deadline has passed.
    pub fn poll(&mut self) {
        if self.deadline == 0 {
            return;
        }
        // SAFETY: Reading it is allowed, or the C library would not work.
        let counter = unsafe { _rdtsc() };
        if counter >= self.deadline {
            self.deadline = 0;
            let timer = self.registers[index(register::TIMER)];
            if timer & MASKED == 0 {
                self.one.request(self.one.number, timer as u8);
            }
            return;
        }
        let time = now();
        if self.armed.0 != self.deadline || time >= self.armed.1 {
            let left = u128::from(self.deadline - counter) * 1_000_000 / u128::from(self.clock_khz.max(1));
            // The host's clock counts on for centuries.
            let when = time.saturating_add(u64::try_from(left).unwrap_or(u64::MAX) + 1).min(u64::MAX >> 1);
            self.armed = (self.deadline, when);
            self.alarm.set(when);
        }
    }

    fn requested(&self, word: usize) -> u64 {
        self.one.own().requested[word].load(Ordering::SeqCst)
    }

    /// Returns the vector that would interrupt now. It must be of a higher class than the interrupt
    /// in service.
    fn next(&self) -> Option<u8> {
        let highest = highest(|word| self.requested(word))?;
        (highest >> 4 > self.processor_priority() >> 4).then_some(highest)
    }

    fn processor_priority(&self) -> u8 {
        let served = highest(|word| self.in_service[word]).map_or(0, |vector| vector & 0xF0);
        let task = self.registers[index(register::PRIORITY)] as u8;
        if task >> 4 >= served >> 4 { task } else { served }
    }

    /// Returns true if an interrupt waits.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.next().is_some()
    }

    /// Returns the vector of the interrupt that is delivered now.
    pub fn acknowledge(&mut self) -> Option<u8> {
        let vector = self.next()?;
        let (word, bit) = (usize::from(vector / 64), 1 << (vector % 64));
        self.one.own().requested[word].fetch_and(!bit, Ordering::SeqCst);
        self.in_service[word] |= bit;
        Some(vector)
    }

    #[must_use]
    pub fn read(&self, offset: u64) -> u32 {
        let part = |words: &dyn Fn(usize) -> u64, from: u64| {
            let number = ((offset - from) / 16) as usize;
            (words(number / 2) >> (number % 2 * 32)) as u32
        };
        match offset {
            register::ID => (self.one.number as u32) << 24,
            register::VERSION => VERSION,
            register::PROCESSOR_PRIORITY => self.processor_priority().into(),
            register::LOGICAL => self.one.own().logical.load(Ordering::SeqCst),
            register::IN_SERVICE..register::TRIGGER => {
                part(&|word| self.in_service[word], register::IN_SERVICE)
            }
            register::REQUESTED..register::ERROR => part(&|word| self.requested(word), register::REQUESTED),
            register::TRIGGER..register::REQUESTED | register::ERROR | register::COUNT => 0,
            _ => self.registers.get(index(offset)).copied().unwrap_or(0),
        }
    }

    pub fn write(&mut self, offset: u64, value: u32) {
        match offset {
            register::END => {
                if let Some(vector) = highest(|word| self.in_service[word]) {
                    self.in_service[usize::from(vector / 64)] &= !(1 << (vector % 64));
                }
            }
            register::LOGICAL => self.one.own().logical.store(value, Ordering::SeqCst),
            register::COMMAND => {
                self.registers[index(offset)] = value;
                self.command(value);
            }
            _ => {
                if let Some(register) = self.registers.get_mut(index(offset)) {
                    *register = value;
                }
            }
        }
    }

    /// Tells other processors something.
    fn command(&self, value: u32) {
        const ASSERTED: u32 = 1 << 14;
        for number in (0..self.one.count).filter(|&number| self.is_meant(number, value)) {
            match value >> 8 & 7 {
                0 | 1 => self.one.request(number, value as u8),
                5 if value & ASSERTED != 0 => self.one.reset(number),
                6 => self.one.start(number),
                // Interrupts that cannot be masked are not delivered.
                _ => {}
            }
        }
    }

    fn is_meant(&self, number: usize, value: u32) -> bool {
        const LOGICAL: u32 = 1 << 11;
        let is_own = number == self.one.number;
        let to = self.registers[index(register::DESTINATION)] >> 24;
        match value >> 18 & 3 {
            0 if value & LOGICAL != 0 => self.one.cpu(number).logical.load(Ordering::SeqCst) >> 24 & to != 0,
            0 => to == ALL || to as usize == number,
            1 => is_own,
            2 => true,
            _ => !is_own,
        }
    }
}

fn index(offset: u64) -> usize {
    (offset / 16) as usize
}

/// Returns the highest vector of a set of 256.
fn highest(words: impl Fn(usize) -> u64) -> Option<u8> {
    let found = (0..4).rev().map(|word| (word, words(word))).find(|(_, bits)| *bits != 0);
    found.map(|(word, bits)| (word * 64) as u8 + bits.ilog2() as u8)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn two() -> [Apic; 2] {
        let first = Processor::first(2).unwrap();
        // No call is sent, because this process is no processor.
        first.cpu(1).called.store(1, Ordering::SeqCst);
        let apic = |number| Apic::new(Processor { number, ..first }, 1_000_000).unwrap();
        [apic(0), apic(1)]
    }

    #[test]
    fn an_interrupt_for_another_is_delivered_there_once() {
        let [mut first, mut second] = two();
        second.write(register::LOGICAL, 2 << 24);
        first.write(register::DESTINATION, 2 << 24);
        first.write(register::COMMAND, 0x8FB);
        assert_eq!((first.acknowledge(), second.read(register::REQUESTED + 0x70)), (None, 1 << 27));
        assert_eq!((second.acknowledge(), second.acknowledge()), (Some(0xFB), None));
        assert_eq!(second.read(register::IN_SERVICE + 0x70), 1 << 27);
        second.write(register::END, 0);
        assert_eq!(second.read(register::IN_SERVICE + 0x70), 0);
    }

    #[test]
    fn a_lower_class_waits_for_a_higher_one() {
        let [mut first, mut second] = two();
        let mut send = |vector: u32| first.write(register::COMMAND, 3 << 18 | vector);
        send(0x51);
        send(0xEF);
        assert_eq!(second.acknowledge(), Some(0xEF));
        send(0xE1);
        assert!(!second.has_interrupt());
        second.write(register::END, 0);
        assert_eq!((second.acknowledge(), second.acknowledge()), (Some(0xE1), None));
        second.write(register::END, 0);
        second.write(register::PRIORITY, 0x60);
        assert!(!second.has_interrupt());
        second.write(register::PRIORITY, 0);
        assert_eq!(second.acknowledge(), Some(0x51));
    }

    #[test]
    fn the_timer_strikes_when_its_time_has_come_unless_it_is_masked() {
        let [mut apic, _] = two();
        apic.set_deadline(1);
        assert_eq!((apic.deadline(), apic.has_interrupt()), (0, false));
        apic.write(register::TIMER, 2 << 17 | 0xEC);
        apic.set_deadline(1);
        assert_eq!(apic.acknowledge(), Some(0xEC));
    }

    #[test]
    fn one_that_waits_is_started_once() {
        let [mut first, second] = two();
        let other = second.one;
        assert!(other.is_reset() && !other.starts());
        // There is no process that could be called.
        other.own().process.store(i32::MAX, Ordering::SeqCst);
        first.write(register::DESTINATION, 1 << 24);
        first.write(register::COMMAND, 0x4610);
        first.write(register::COMMAND, 0x4610);
        assert!(other.starts() && !other.starts() && !other.is_reset());
        // Once it runs, only a reset lets it be started again; the end of a reset's signal is none.
        first.write(register::COMMAND, 0x4610);
        first.write(register::COMMAND, 0x8500);
        assert!(!other.starts() && !other.is_reset());
        first.write(register::COMMAND, 0xC500);
        first.write(register::COMMAND, 0x4610);
        assert!(other.is_reset() && other.starts());
    }

    proptest! {
        // Each case takes timers of the host's.
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn no_program_makes_it_panic(steps in prop::collection::vec((0_u64..0x1000, any::<u32>()), 1..400)) {
            let [mut apic, _] = two();
            for (offset, value) in steps {
                // Not those that call processes.
                if offset / 16 != register::COMMAND / 16 {
                    apic.write(offset, value);
                }
                let _ = (apic.read(offset), apic.acknowledge());
            }
        }
    }
}
