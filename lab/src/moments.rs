//! Moments at random, for whoever cuts, kills or interrupts: spread over the whole of what goes on, and repeatable.

use std::{
    env,
    time::{Duration, SystemTime},
};

/// Moments in each part of a stretch of time, at random in that part (splitmix64).
#[derive(Debug)]
pub struct Moments {
    state: u64,
    count: u32,
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().and_then(|text| text.parse().ok())
}

impl Moments {
    /// As many as the environment's variable `counts` says, or `few`; the same again if `seeds` says so. Prints both.
    #[must_use]
    pub fn new(seeds: &str, counts: &str, few: u32) -> Self {
        let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_nanos() as u64);
        let state = number(seeds).unwrap_or(now);
        let count = number(counts).map_or(few, |count| count as u32);
        println!("{seeds}={state} {counts}={count}");
        Self { state, count }
    }

    /// How many there are in each stretch.
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

    /// Those of a stretch of time, in their order.
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
