//! The comparison of phases: never loaded, loaded, attached, after detach. All phases run on one
//! machine, in one run, round after round, so that a drift affects all of them.
//!
//! A round begins and ends natively without Mercury. Each phase is compared with the two
//! measurements around it. The noise is the result of comparing those measurements with each other
//! in the same way.

use serde::Serialize;

use super::{
    stats::{self, Ratio, rounded},
    suite::{self, Amount},
};
use mercury_lab::{
    error::{Error, Result},
    live::Line,
    machine::Machine,
};

/// The phases of a round, in order, and the command that begins each.
const PHASES: [(&str, &str); 4] =
    [("never loaded", "unload"), ("loaded", "load"), ("attached", "attach"), ("after detach", "detach")];

/// The number of first passes that are dropped, since caches fill and slabs grow in them.
const WARM_UP: u32 = 2;

/// The results of all rounds of one benchmark.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    pub name: String,
    /// The operation that has the cost.
    pub operation: &'static str,
    /// Median cost while Mercury is not loaded, in nanoseconds or instructions.
    #[serde(serialize_with = "rounded")]
    pub never_loaded: f64,
    /// The cost while loaded, divided by the cost without Mercury.
    pub loaded: Ratio,
    /// The same ratio while attached.
    pub attached: Ratio,
    /// The same ratio after the detach.
    pub after_detach: Ratio,
    /// The largest difference of a measurement without Mercury from the two around it.
    #[serde(serialize_with = "rounded")]
    pub noise: f64,
    /// All costs without Mercury, divided by the first one, before the driver was ever loaded.
    pub unloaded_over_first: Ratio,
}

impl Compared {
    /// Returns true if the cost after a detach cannot be told from the native cost.
    #[must_use]
    pub fn is_native_after_detach(&self) -> bool {
        let Ratio { median, low, high } = self.after_detach;
        (median - 1.0).abs() <= self.noise.max(0.005) || (low..=high).contains(&1.0)
    }
}

/// The costs of one benchmark in each phase, round by round.
#[derive(Clone, Debug, Default)]
struct Costs {
    /// The native costs. There is one more of them than of the others: the last round ends with it.
    never: Vec<f64>,
    others: [Vec<f64>; 3],
}

/// Runs all benchmarks in all phases, `rounds` times.
///
/// # Errors
/// If the machine or a benchmark fails.
pub fn compare(machine: &Machine, amount: &Amount, rounds: u32) -> Result<Vec<Compared>> {
    suite::set_up(machine)?;
    let mut line = Line::begin();
    let mut names = Vec::new();
    for pass in 1..=WARM_UP {
        line.show(&format!("pass {pass} of {WARM_UP}, to warm up"));
        names = suite::measure(machine, amount)?.into_iter().map(|(name, _)| name).collect();
    }
    let mut costs = vec![Costs::default(); names.len()];
    for round in 1..=rounds {
        for (phase, (name, command)) in PHASES.into_iter().enumerate() {
            line.show(&format!("round {round} of {rounds}: {name}"));
            machine.mercury(command)?;
            check_mode(machine, phase)?;
            add(&mut costs, phase, &suite::measure(machine, amount)?);
        }
    }
    line.show("once more without Mercury");
    machine.mercury("unload")?;
    add(&mut costs, 0, &suite::measure(machine, amount)?);
    Ok(names.into_iter().zip(&costs).map(|(name, costs)| costs.compared(name)).collect())
}

fn check_mode(machine: &Machine, phase: usize) -> Result<()> {
    let expected = ["no-driver", "loaded", "attached", "loaded"];
    let status = machine.mercury("status")?;
    if status["state"] == expected[phase] {
        return Ok(());
    }
    Err(machine.blame(Error::Unhealthy(format!("{} instead of {}", status["state"], expected[phase]))))
}

fn add(costs: &mut [Costs], phase: usize, measured: &[(String, f64)]) {
    for (costs, (_, cost)) in costs.iter_mut().zip(measured) {
        match phase {
            0 => costs.never.push(*cost),
            other => costs.others[other - 1].push(*cost),
        }
    }
}

impl Costs {
    fn compared(&self, name: String) -> Compared {
        let [loaded, attached, after_detach] = [0, 1, 2].map(|phase| Ratio::of(&self.ratios(phase)));
        let first = self.never.first().copied().unwrap_or(f64::NAN);
        let later: Vec<f64> = self.never.iter().skip(1).map(|cost| cost / first).collect();
        Compared {
            operation: suite::operation(&name),
            name,
            never_loaded: stats::median(&self.never),
            loaded,
            attached,
            after_detach,
            noise: self.noise(),
            unloaded_over_first: Ratio::of(&later),
        }
    }

    /// Returns the costs of a phase, divided by the native costs before and after it.
    fn ratios(&self, phase: usize) -> Vec<f64> {
        let around = self.never.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
        self.others[phase].iter().zip(around).map(|(cost, native)| cost / native).collect()
    }

    fn noise(&self) -> f64 {
        let alone = self.never.windows(3).map(|three| three[1] / f64::midpoint(three[0], three[2]));
        alone.map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drift_cancels() {
        let never = vec![100.0, 110.0, 120.0, 130.0];
        let drifting = |factor: f64| vec![105.0 * factor, 115.0 * factor, 125.0 * factor];
        let costs = Costs { never, others: [drifting(1.0), drifting(1.5), drifting(1.0)] };
        let compared = costs.compared("fork".to_owned());
        assert_eq!((compared.after_detach.median, compared.attached.median), (1.0, 1.5));
        assert_eq!((compared.noise, compared.never_loaded), (0.0, 115.0));
        assert!(compared.is_native_after_detach());
    }

    #[test]
    fn a_cost_that_remains_after_detach_is_found() {
        let costs = Costs {
            never: vec![100.0, 101.0, 100.0],
            others: [vec![100.0; 2], vec![100.0; 2], vec![105.0, 106.0]],
        };
        assert!(!costs.compared("fork".to_owned()).is_native_after_detach());
    }
}
