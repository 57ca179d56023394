//! The battery-backed clock of a PC (Motorola MC146818): the host's time, in UTC, or ahead of it. It cannot
//! be set.

use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Debug, Default)]
pub struct Clock {
    index: u8,
    ahead_ms: i64,
}

/// A moment as the registers have it.
struct Moment {
    seconds: u64,
    minutes: u64,
    hours: u64,
    weekday: u64,
    day: u64,
    month: u64,
    year: u64,
}

/// Returns the civil date of a time since 1970.
fn moment(unix: u64) -> Moment {
    let days = unix / 86400;
    // Years begin in March here, so that the leap day is the last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    Moment {
        seconds: unix % 60,
        minutes: unix / 60 % 60,
        hours: unix / 3600 % 24,
        weekday: (days + 4) % 7 + 1,
        day: day_of_year - (153 * shifted_month + 2) / 5 + 1,
        month,
        year: year_of_era + era * 400 + u64::from(month <= 2),
    }
}

impl Clock {
    /// Returns the register that is shown.
    #[must_use]
    pub fn index(&self) -> u8 {
        self.index
    }

    /// Makes a clock that shows a register.
    #[must_use]
    pub fn showing(index: u8) -> Self {
        Self { index: index & 0x7F, ahead_ms: 0 }
    }

    /// Makes a clock that is ahead of the host's time, or behind it.
    #[must_use]
    pub fn ahead_by(ahead_ms: i64) -> Self {
        Self { index: 0, ahead_ms }
    }

    #[must_use]
    pub fn read(&self, port: u16) -> u8 {
        if port & 1 == 0 {
            return 0xFF;
        }
        register(self.index, self.seconds(SystemTime::now()))
    }

    /// Returns the time in seconds since 1970.
    fn seconds(&self, now: SystemTime) -> u64 {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as i64);
        now.saturating_add(self.ahead_ms).max(0).unsigned_abs() / 1000
    }

    pub fn write(&mut self, port: u16, value: u8) {
        if port & 1 == 0 {
            self.index = value & 0x7F;
        }
    }
}

fn register(index: u8, unix: u64) -> u8 {
    let moment = moment(unix);
    let decimal = |value: u64| (value / 10 % 10 * 16 + value % 10) as u8;
    match index {
        0x00 => decimal(moment.seconds),
        0x02 => decimal(moment.minutes),
        0x04 => decimal(moment.hours),
        0x06 => decimal(moment.weekday),
        0x07 => decimal(moment.day),
        0x08 => decimal(moment.month),
        0x09 => decimal(moment.year % 100),
        0x0A => 0x26,
        0x0B => 0x02,
        0x0D => 0x80,
        0x32 => decimal(moment.year / 100),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_can_be_ahead_of_the_host_s() {
        let now = UNIX_EPOCH + std::time::Duration::from_millis(1_795_305_600_400);
        let seconds = |ahead| Clock::ahead_by(ahead).seconds(now);
        assert_eq!(
            [0, 600, -401, 7_200_000].map(seconds),
            [1_795_305_600, 1_795_305_601, 1_795_305_599, 1_795_312_800]
        );
        assert_eq!([i64::MIN, i64::MAX].map(seconds), [0, i64::MAX as u64 / 1000]);
    }

    #[test]
    fn dates_are_right_beside_leap_days() {
        let date = |unix| [0x32, 9, 8, 7, 4, 2, 0].map(|index| register(index, unix));
        assert_eq!(date(951_782_399), [0x20, 0x00, 0x02, 0x28, 0x23, 0x59, 0x59]);
        assert_eq!(date(951_782_400), [0x20, 0x00, 0x02, 0x29, 0, 0, 0]);
        assert_eq!(date(1_795_305_600), [0x20, 0x26, 0x11, 0x22, 0, 0, 0]);
    }
}
