//! Ratios of things that were measured side by side, with their confidence intervals.

use serde::{Serialize, Serializer};

/// A ratio's median over the rounds, and the interval that holds it with 95 % (bootstrap).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    #[serde(serialize_with = "rounded")]
    pub median: f64,
    #[serde(serialize_with = "rounded")]
    pub low: f64,
    #[serde(serialize_with = "rounded")]
    pub high: f64,
}

/// Writes a number with four decimals. More would be noise, and the page would change with it.
pub(super) fn rounded<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((number * 1e4).round() / 1e4)
}

const RESAMPLES: usize = 2000;

impl Ratio {
    /// Returns the ratio from those of all rounds.
    #[must_use]
    pub fn of(ratios: &[f64]) -> Self {
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let mut resample = || -> f64 {
            let chosen: Vec<f64> =
                ratios.iter().filter_map(|_| ratios.get(random.below(ratios.len())).copied()).collect();
            median(&chosen)
        };
        let mut medians: Vec<f64> = (0..RESAMPLES).map(|_| resample()).collect();
        medians.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| medians[(part * (RESAMPLES - 1) as f64) as usize];
        Self { median: median(ratios), low: at(0.025), high: at(0.975) }
    }
}

/// Returns the middle number, or the mean of the two in the middle. The median of no numbers is
/// NaN.
#[must_use]
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// A generator that always gives the same numbers, so that the same measurements give the same page
/// (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn an_interval_holds_its_median_and_widens_with_the_noise() {
        let calm = Ratio::of(&[1.0, 1.001, 0.999, 1.0, 1.002]);
        let noisy = Ratio::of(&[1.0, 1.1, 0.9, 1.0, 1.2]);
        for ratio in [calm, noisy] {
            assert!(ratio.low <= ratio.median && ratio.median <= ratio.high, "{ratio:?}");
        }
        assert!(calm.high - calm.low < noisy.high - noisy.low);
        assert_eq!(calm, Ratio::of(&[1.0, 1.001, 0.999, 1.0, 1.002]));
    }
}
