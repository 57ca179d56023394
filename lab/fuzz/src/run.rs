//! The driver of a target: inputs from a generator, until the time is over.

use crate::{Target, mutate::Generator};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// An input that takes longer is a finding.
pub const LIMIT: Duration = Duration::from_secs(20);

/// The end of a run.
#[derive(Clone, Copy, Debug)]
pub enum End {
    After(Duration),
    Inputs(u64),
}

/// The numbers of a run, and the input that failed.
#[derive(Debug)]
pub struct Report {
    pub inputs: u64,
    pub outcomes: usize,
    pub failed: Option<Vec<u8>>,
}

/// The input of a worker and its start, for the watchdog.
#[derive(Debug, Default)]
pub struct Watched(Mutex<Option<(Instant, &'static str, Vec<u8>)>>);

impl Watched {
    fn set(&self, now: Option<(Instant, &'static str, Vec<u8>)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Returns the target and the input that have run longer than [`LIMIT`].
    #[must_use]
    pub fn hang(&self) -> Option<(&'static str, Vec<u8>)> {
        let now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, name, input) = now.as_ref()?;
        (start.elapsed() > LIMIT).then(|| (*name, input.clone()))
    }
}

/// Runs a target. Stops at the first input that panics.
pub fn run(target: &Target, seed: u64, end: End, watched: &Watched) -> Report {
    let start = Instant::now();
    let seeds = (target.seeds)();
    let mut generator = Generator::new(seeds.clone(), seed);
    let mut report = Report { inputs: 0, outcomes: 0, failed: None };
    let mut first = seeds.into_iter();
    let is_over = |inputs: u64| match end {
        End::After(time) => start.elapsed() >= time,
        End::Inputs(most) => inputs >= most,
    };
    while !is_over(report.inputs) {
        let input = first.next().unwrap_or_else(|| generator.input());
        watched.set(Some((Instant::now(), target.name, input.clone())));
        let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(&input)));
        watched.set(None);
        report.inputs += 1;
        match outcome {
            Ok(outcome) => generator.learn(&input, outcome),
            Err(_) => {
                report.failed = Some(input);
                break;
            }
        }
    }
    report.outcomes = generator.outcomes();
    report
}
