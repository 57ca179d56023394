//! The HPET (IA-PC HPET specification 1.0a): its counter runs at the rate of the machine's, since the kernel
//! measures its other clocks by it. Its timers hold what the kernel writes, and never interrupt: the kernel
//! has the local APICs for that.

use std::{ops::Range, time::Instant};

/// Length of the registers in bytes.
const LENGTH: u64 = 0x400;
/// Registers: capabilities, configuration, counter; the timers, and the distance between two.
const CAPABILITIES: u64 = 0;
const CONFIGURATION: u64 = 0x10;
const COUNTER: u64 = 0xF0;
const TIMERS: Range<u64> = 0x100..0x160;
/// Capabilities: the counter has 64 bits, there are three timers, and interrupts can take the legacy way.
/// Intel is the vendor; the first revision.
const ABLE: u64 = 0x8086_A201;
/// Configuration: the counter runs.
const RUNS: u64 = 1;
/// Femtoseconds in a second.
const SECOND_FS: u64 = 1_000_000_000_000_000;
/// Slowest and fastest rate that the specification allows, and that makes sense, in Hz.
const RATES: Range<u64> = 10_000_000..1_000_000_000;

#[derive(Debug)]
pub struct Hpet {
    start_phys: u64,
    period_fs: u64,
    configuration: u64,
    /// Value of the counter when it was set, started or stopped.
    base: u64,
    since: Instant,
    timers: [u64; (TIMERS.end - TIMERS.start) as usize / 8],
}

impl Hpet {
    /// Makes the timer. `None` if the machine has none, or its rate is unknown.
    pub fn new(start_phys: Option<u64>, hz: u64) -> Option<Self> {
        let start_phys = start_phys.filter(|_| RATES.contains(&hz))?;
        let timers = [0; (TIMERS.end - TIMERS.start) as usize / 8];
        let period_fs = SECOND_FS / hz;
        Some(Self { start_phys, period_fs, configuration: 0, base: 0, since: Instant::now(), timers })
    }

    /// Returns the offset of an address in the registers.
    pub fn offset(&self, phys: u64) -> Option<u64> {
        phys.checked_sub(self.start_phys).filter(|offset| *offset < LENGTH)
    }

    /// Reads registers.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = self.register(offset & !7).to_le_bytes();
        let bytes = value.into_iter().skip((offset & 7) as usize).chain([0; 8]);
        data.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    }

    /// Writes registers.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let register = offset & !7;
        let mut value = self.register(register).to_le_bytes();
        value.iter_mut().skip((offset & 7) as usize).zip(data).for_each(|(to, from)| *to = *from);
        let value = u64::from_le_bytes(value);
        match register {
            CONFIGURATION => {
                self.set(self.counter());
                self.configuration = value;
            }
            COUNTER => self.set(value),
            _ if TIMERS.contains(&register) => {
                self.timers[((register - TIMERS.start) / 8) as usize] = value;
            }
            _ => {}
        }
    }

    fn register(&self, register: u64) -> u64 {
        match register {
            CAPABILITIES => self.period_fs << 32 | ABLE,
            CONFIGURATION => self.configuration,
            COUNTER => self.counter(),
            _ if TIMERS.contains(&register) => self.timers[((register - TIMERS.start) / 8) as usize],
            _ => 0,
        }
    }

    fn counter(&self) -> u64 {
        if self.configuration & RUNS == 0 {
            return self.base;
        }
        let ticks = self.since.elapsed().as_nanos() * 1_000_000 / u128::from(self.period_fs);
        self.base.wrapping_add(ticks as u64)
    }

    fn set(&mut self, value: u64) {
        self.base = value;
        self.since = Instant::now();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::{thread::sleep, time::Duration};

    const AT: u64 = 0xFED0_0000;

    fn read(hpet: &Hpet, offset: u64, length: usize) -> u64 {
        let mut data = [0; 8];
        hpet.read(offset, &mut data[..length]);
        u64::from_le_bytes(data)
    }

    #[test]
    fn the_counter_runs_at_the_machine_s_rate_when_it_is_on() {
        let mut hpet = Hpet::new(Some(AT), 14_318_180).unwrap();
        assert_eq!(read(&hpet, 4, 4), 69_841_278, "femtoseconds");
        assert_eq!(read(&hpet, 0, 8) & 0xFFFF_FFFF, ABLE);
        hpet.write(COUNTER, &7_u64.to_le_bytes());
        sleep(Duration::from_millis(2));
        assert_eq!(read(&hpet, COUNTER, 8), 7);
        hpet.write(COUNTER, &0_u32.to_le_bytes());
        hpet.write(CONFIGURATION, &3_u32.to_le_bytes());
        let (first, since) = (read(&hpet, COUNTER, 4), Instant::now());
        sleep(Duration::from_millis(50));
        let (second, most) = (read(&hpet, COUNTER, 4), since.elapsed());
        assert!(second - first >= 50 * 14_318, "{first} {second}");
        assert!(u128::from(second - first) <= (most.as_micros() + 2_000) * 15, "{first} {second} {most:?}");
        hpet.write(CONFIGURATION, &2_u32.to_le_bytes());
        let stopped = read(&hpet, COUNTER, 8);
        sleep(Duration::from_millis(2));
        assert_eq!((read(&hpet, COUNTER, 8), read(&hpet, CONFIGURATION, 8)), (stopped, 2));
    }

    #[test]
    fn timers_hold_what_is_written_and_nothing_else_does() {
        let mut hpet = Hpet::new(Some(AT), 100_000_000).unwrap();
        hpet.write(0x108, &0x1234_u32.to_le_bytes());
        hpet.write(0x10C, &5_u32.to_le_bytes());
        hpet.write(0x200, &[1; 8]);
        hpet.write(CAPABILITIES, &[1; 8]);
        assert_eq!((read(&hpet, 0x108, 8), read(&hpet, 0x200, 8)), (5 << 32 | 0x1234, 0));
        assert_eq!(read(&hpet, 4, 4), 10_000_000);
        assert_eq!(
            (hpet.offset(AT + 0xF0), hpet.offset(AT - 1), hpet.offset(AT + LENGTH)),
            (Some(0xF0), None, None)
        );
    }

    #[test]
    fn a_machine_without_a_timer_or_a_sensible_rate_has_none() {
        assert!(Hpet::new(None, 14_318_180).is_none());
        for hz in [0, 1, 9_999_999, u64::MAX] {
            assert!(Hpet::new(Some(AT), hz).is_none());
        }
    }
}
