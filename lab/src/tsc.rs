//! The frequency of this host's time-stamp counter. QEMU's emulated counter shows the host's as it
//! is.
//!
//! A kernel measures the frequency when it boots, against a timer that is emulated too. On a host
//! that is short of processor time the result may be anything, and the kernel's clock may run at
//! three times the speed.

use std::{
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

const INTERVAL: Duration = Duration::from_millis(100);
/// The number of readings of counter and clock. The quickest one counts.
const READINGS: u32 = 100;

/// Returns the frequency in kHz.
pub fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> u64 {
    let (first_time, first) = read_both();
    thread::sleep(INTERVAL);
    let (last_time, last) = read_both();
    let nanoseconds = (last_time - first_time).as_nanos();
    u64::try_from(u128::from(last.wrapping_sub(first)) * 1_000_000 / nanoseconds.max(1)).unwrap_or(0)
}

/// Reads clock and counter at the same moment. A reading that was interrupted is longer than
/// another one, and is dropped.
fn read_both() -> (Instant, u64) {
    let readings = (0..READINGS).map(|_| {
        let time = Instant::now();
        // SAFETY: RDTSC has no operands, and Linux lets user mode read it.
        let counter = unsafe { std::arch::x86_64::_rdtsc() };
        (time.elapsed(), (time, counter))
    });
    readings.min_by_key(|(took, _)| *took).map_or_else(|| (Instant::now(), 0), |(_, moment)| moment)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The frequency is one that processors have, and a second measurement agrees to a thousandth.
    #[test]
    fn the_measured_frequency_is_plausible() {
        let (one, other) = (measure(), measure());
        assert!((500_000..10_000_000).contains(&one), "{one} kHz");
        assert!(one.abs_diff(other) < one / 1000, "{one} and {other} kHz");
    }
}
