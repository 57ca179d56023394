//! How fast this host's time-stamp counter counts: QEMU's emulated one shows it as it is.
//!
//! A kernel finds that out for itself when it boots, against a timer that is emulated too. On a host that is short of
//! processor time it may find anything, and its clock runs at three times the speed.

use std::{
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

const INTERVAL: Duration = Duration::from_millis(100);
/// Looks at counter and clock; of these the quickest counts.
const LOOKS: u32 = 100;

/// The frequency in kHz.
pub fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> u64 {
    let (first_time, first) = look();
    thread::sleep(INTERVAL);
    let (last_time, last) = look();
    let nanoseconds = (last_time - first_time).as_nanos();
    u64::try_from(u128::from(last.wrapping_sub(first)) * 1_000_000 / nanoseconds.max(1)).unwrap_or(0)
}

/// A moment by both: whoever is interrupted between them looks again.
fn look() -> (Instant, u64) {
    let looks = (0..LOOKS).map(|_| {
        let time = Instant::now();
        // SAFETY: RDTSC has no operands, and Linux lets user mode read it.
        let counter = unsafe { std::arch::x86_64::_rdtsc() };
        (time.elapsed(), (time, counter))
    });
    looks.min_by_key(|(took, _)| *took).map_or_else(|| (Instant::now(), 0), |(_, moment)| moment)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twice the same, to a thousandth; and what processors have.
    #[test]
    fn it_is_a_frequency() {
        let (one, other) = (measure(), measure());
        assert!((500_000..10_000_000).contains(&one), "{one} kHz");
        assert!(one.abs_diff(other) < one / 1000, "{one} and {other} kHz");
    }
}
