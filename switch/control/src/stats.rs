//! Minimum, median, 99th percentile, maximum.

use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    pub count: usize,
    pub min: f64,
    /// Value that half of the samples are below.
    pub median: f64,
    /// Value that 99 of 100 samples are below.
    pub p99: f64,
    pub max: f64,
}

impl Summary {
    /// Computes the distribution of `samples`; all zero for none.
    #[must_use]
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Self {
            count: sorted.len(),
            min: sorted.first().copied().unwrap_or_default(),
            median: quantile(&sorted, 0.5),
            p99: quantile(&sorted, 0.99),
            max: sorted.last().copied().unwrap_or_default(),
        }
    }

    /// Returns the distribution in another unit.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        Self {
            count: self.count,
            min: self.min * factor,
            median: self.median * factor,
            p99: self.p99 * factor,
            max: self.max * factor,
        }
    }
}

/// Returns the value below which a share of the samples lies (nearest rank).
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn summaries() {
        let summary = Summary::of((1..=100).map(f64::from));
        assert_eq!((summary.min, summary.median, summary.p99, summary.max), (1.0, 50.0, 99.0, 100.0));
        assert_eq!(Summary::of([]), Summary::default());
        assert_eq!(Summary::of([7.0]).p99, 7.0);
    }

    proptest! {
        #[test]
        fn ordered(samples in proptest::collection::vec(0.0..1e9_f64, 1..50)) {
            let s = Summary::of(samples);
            prop_assert!(s.min <= s.median && s.median <= s.p99 && s.p99 <= s.max);
        }
    }
}
