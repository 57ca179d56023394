//! Random moments for tests that cut, kill or interrupt. The moments are spread over the whole of
//! the work, and can be repeated.

use std::{
    env,
    time::{Duration, SystemTime},
};

/// A generator of moments. Each part of a stretch of time has one moment, at random in that part
/// (splitmix64).
#[derive(Debug)]
pub struct Moments {
    state: u64,
    count: u32,
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().and_then(|text| text.parse().ok())
}

impl Moments {
    /// Takes the number of moments from the environment's variable `counts`, or takes `few`. The
    /// variable `seeds` repeats earlier moments. Prints the seed and the number.
    #[must_use]
    pub fn new(seeds: &str, counts: &str, few: u32) -> Self {
        let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_nanos() as u64);
        let state = number(seeds).unwrap_or(now);
        let count = number(counts).map_or(few, |count| count as u32);
        println!("{seeds}={state} {counts}={count}");
        Self { state, count }
    }

    /// Returns the number of moments in each stretch.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (self.state ^ self.state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// Returns the moments of a stretch of time, in order.
    pub fn over(&mut self, stretch: Duration) -> Vec<Duration> {
        let part = stretch / self.count;
        let in_part = |random: u64| part.mul_f64((random >> 11) as f64 / (1_u64 << 53) as f64);
        (0..self.count).map(|number| part * number + in_part(self.next())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_one() {
        let mut moments = Moments { state: 1, count: 5 };
        let all = moments.over(Duration::from_secs(10));
        assert_eq!(all.iter().map(|moment| moment.as_secs() / 2).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        assert_ne!(moments.over(Duration::from_secs(10)), all);
        assert_eq!(Moments { state: 1, count: 5 }.over(Duration::from_secs(10)), all);
    }
}
