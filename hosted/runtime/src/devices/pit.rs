//! The timer of a PC (Intel 8254): its first channel, which interrupts. The others count as well,
//! without effect.

use mercury_devices::state::{Reader, Writer};

use crate::error::{Error, Result};

/// The frequency in Hz.
const FREQUENCY: u64 = 1_193_182;
const NANOSECONDS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug, Default)]
struct Channel {
    mode: u8,
    /// 1: low byte, 2: high byte, 3: both.
    access: u8,
    low: Option<u8>,
    reload: u64,
    started: Option<u64>,
    latched: Option<u16>,
    read_high: bool,
}

impl Channel {
    /// Writes the state. A time is written as its distance from now.
    fn save(&self, to: &mut Writer, now: u64) {
        to.numbers([self.mode, self.access]);
        to.numbers([self.reload, u64::from(self.read_high)]);
        to.numbers([u64::from(self.low.is_some()), u64::from(self.low.unwrap_or(0))]);
        to.numbers([u64::from(self.latched.is_some()), u64::from(self.latched.unwrap_or(0))]);
        let ago = self.started.map(|started| now.saturating_sub(started));
        to.numbers([u64::from(ago.is_some()), ago.unwrap_or(0)]);
    }

    fn load(from: &mut Reader<'_>, now: u64) -> Result<Self> {
        let (mode, access) = (from.number()?, from.number()?);
        let (reload, read_high) = (from.number()?, from.truth()?);
        let (has_low, low) = (from.truth()?, from.number()?);
        let (is_latched, latched) = (from.truth()?, from.number()?);
        let (has_started, ago) = (from.truth()?, from.number::<u64>()?);
        let (low, latched) = (has_low.then_some(low), is_latched.then_some(latched));
        let started = has_started.then(|| now.saturating_sub(ago));
        if has_started && !(1..=0x1_0000).contains(&reload) {
            return Err(Error::state("the timer"));
        }
        Ok(Self { mode, access, low, reload, started, latched, read_high })
    }

    fn is_periodic(&self) -> bool {
        matches!(self.mode, 2 | 3 | 6 | 7)
    }

    fn write(&mut self, value: u8, now: u64) {
        let count = match (self.access, self.low) {
            (1, _) => u64::from(value),
            (2, _) => u64::from(value) << 8,
            (_, None) => {
                self.low = Some(value);
                return;
            }
            (_, Some(low)) => u64::from(value) << 8 | u64::from(low),
        };
        self.low = None;
        self.reload = if count == 0 { 0x1_0000 } else { count };
        self.started = Some(now);
    }

    fn period(&self) -> u64 {
        self.reload * NANOSECONDS / FREQUENCY
    }

    fn count(&self, now: u64) -> u16 {
        let Some(started) = self.started else { return 0 };
        let ticks = now.saturating_sub(started) * FREQUENCY / NANOSECONDS;
        let left = match self.is_periodic() {
            true => self.reload - ticks % self.reload,
            false => self.reload.wrapping_sub(ticks),
        };
        left as u16
    }

    fn read(&mut self, now: u64) -> u8 {
        let count = self.latched.unwrap_or_else(|| self.count(now));
        let high = match self.access {
            1 => false,
            2 => true,
            _ => {
                self.read_high = !self.read_high;
                !self.read_high
            }
        };
        if high || self.access != 3 {
            self.latched = None;
        }
        (if high { count >> 8 } else { count }) as u8
    }
}

/// The timer of a PC.
#[derive(Debug, Default)]
pub struct Pit {
    channels: [Channel; 3],
}

impl Pit {
    /// Writes the state.
    pub fn save(&self, to: &mut Writer, now: u64) {
        self.channels.iter().for_each(|channel| channel.save(to, now));
    }

    /// Reads the state.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn load(from: &mut Reader<'_>, now: u64) -> Result<Self> {
        let mut pit = Self::default();
        for channel in &mut pit.channels {
            *channel = Channel::load(from, now)?;
        }
        Ok(pit)
    }

    pub fn read(&mut self, port: u16, now: u64) -> u8 {
        self.channels.get_mut(usize::from(port & 3)).map_or(0, |channel| channel.read(now))
    }

    pub fn write(&mut self, port: u16, value: u8, now: u64) {
        if let Some(channel) = self.channels.get_mut(usize::from(port & 3)) {
            return channel.write(value, now);
        }
        let Some(channel) = self.channels.get_mut(usize::from(value >> 6)) else { return };
        match value >> 4 & 3 {
            0 => channel.latched = Some(channel.count(now)),
            access => *channel = Channel { mode: value >> 1 & 7, access, ..Channel::default() },
        }
    }

    /// Returns the time of the next interrupt.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        let channel = &self.channels[0];
        channel.started.map(|started| started + channel.period())
    }

    /// Returns true if the timer has to interrupt now. Periods that passed unseen are one
    /// interrupt.
    pub fn expired(&mut self, now: u64) -> bool {
        let Some(when) = self.next().filter(|when| *when <= now) else { return false };
        let channel = &mut self.channels[0];
        let period = channel.period().max(1);
        channel.started = channel.is_periodic().then(|| when + (now - when) / period * period);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_shot_strikes_once() {
        let mut pit = Pit::default();
        pit.write(0x43, 0x38, 0);
        pit.write(0x40, 0x9C, 1000);
        assert_eq!(pit.next(), None);
        pit.write(0x40, 0x2E, 1000);
        // 11932 ticks are 10 ms.
        assert!(!pit.expired(10_000_000));
        assert!(pit.expired(10_002_000));
        assert!(!pit.expired(1_000_000_000));
    }

    #[test]
    fn periodic_strikes_again() {
        let mut pit = Pit::default();
        pit.write(0x43, 0x34, 0);
        pit.write(0x40, 0x9C, 0);
        pit.write(0x40, 0x2E, 0);
        assert!(pit.expired(35_000_000));
        assert!(!pit.expired(39_000_000));
        assert!(pit.expired(41_000_000));
    }

    proptest! {
        #[test]
        fn no_program_makes_it_panic(
            steps in proptest::collection::vec((0_u16..4, any::<u8>(), any::<u32>()), 1..50),
        ) {
            let mut pit = Pit::default();
            let mut now = 0;
            for (port, value, later) in steps {
                pit.write(port, value, now);
                now += u64::from(later);
                pit.read(port, now);
                pit.expired(now);
            }
        }
    }

    #[test]
    fn a_latched_count_is_read_in_two_halves() {
        let mut pit = Pit::default();
        pit.write(0x43, 0x34, 0);
        pit.write(0x40, 0x00, 0);
        pit.write(0x40, 0x10, 0);
        pit.write(0x43, 0x00, 0);
        assert_eq!((pit.read(0x40, 50_000), pit.read(0x40, 99_000)), (0, 0x10));
    }
}
