//! `mercury bench switch`: attaches and detaches again and again, with a thread spinning on each
//! CPU.

use super::{
    paper::{self, Switches},
    spin::{self, Gap},
};
use crate::shared::ModuleArgs;
use clap::Args;
use mercury_abi::{
    code::Code,
    ioctl::{MERCURY_MODE_ATTACHED, MERCURY_MODE_OFFLINE, SwitchResult},
};
use mercury_control::{
    cpus::CpuSet,
    driver::{Direction, Driver},
    error::{Error, Result},
    output::{Render, Text, Tone, duration, thousands, ticks_to_us},
    progress,
    stats::Summary,
};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Debug, Args)]
pub struct SwitchArgs {
    /// Number of attaches and detaches
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub cycles: u32,
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Round trips per CPU: the maximum of one request.
const ROUND_TRIPS: u32 = 1000;

/// Requests of round trips per CPU; their median is reported.
const ROUND_TRIP_SAMPLES: usize = 11;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub cycles: u32,
    /// TSC frequency in kHz.
    pub tsc_khz: u64,
    /// Times of attaches with interrupts off.
    pub attach: Times,
    /// Times of detaches with interrupts off.
    pub detach: Times,
    /// Round trip of a hypercall, per CPU.
    pub round_trip: Vec<RoundTrip>,
    /// Longest pause of a spinning thread, per CPU.
    pub pauses: Vec<Pause>,
    /// Figures of the papers in microseconds.
    pub paper: PaperTimes,
}

/// The times of one direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Times of each CPU.
    pub cpus: Vec<CpuTimes>,
    /// Times of all CPUs together, in microseconds.
    pub all_us: Summary,
    /// Times of all CPUs together, in TSC ticks.
    pub all_ticks: Summary,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CpuTimes {
    /// Number of the CPU in Linux.
    pub cpu: u32,
    pub ticks: Summary,
    pub us: Summary,
}

/// The time of one CPU's exit and re-entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoundTrip {
    /// Number of the CPU in Linux.
    pub cpu: u32,
    /// TSC ticks, without the measuring loop.
    pub ticks: f64,
    pub us: f64,
}

/// The longest pauses that a thread spinning on one CPU saw.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pause {
    /// Number of the CPU in Linux.
    pub cpu: u32,
    /// Pause while CPUs were only asked for their modes, as often as they were switched.
    pub asking_us: f64,
    /// Pause while CPUs were switched.
    pub switching_us: f64,
}

/// The switch times in the papers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PaperTimes {
    #[serde(flatten)]
    pub jcst_2012: Switches,
    pub cluster_2007: Switches,
}

/// The ticks per CPU and direction.
#[derive(Default)]
struct Samples {
    attach: BTreeMap<u32, Vec<u64>>,
    detach: BTreeMap<u32, Vec<u64>>,
    cycles: u32,
}

/// Measures `cycles` cycles, or fewer if `stop` returns true. All CPUs are native before and after.
pub fn measure(driver: &dyn Driver, cycles: u32, stop: &dyn Fn() -> bool) -> Result<Report> {
    let tsc_khz = driver.system()?.tsc_khz;
    let cpus = native_cpus(driver)?;
    progress::line("measuring pauses without switches");
    let (asked, baseline) = spin::during(&cpus, tsc_khz, || ask(driver, cycles, stop));
    asked?;
    let (samples, gaps) = spin::during(&cpus, tsc_khz, || cycle(driver, cycles, stop));
    let samples = samples?;
    let round_trip = if samples.cycles > 0 { round_trips(driver, &cpus, tsc_khz)? } else { Vec::new() };
    progress::line("");
    Ok(Report {
        cycles: samples.cycles,
        tsc_khz,
        attach: times(&samples.attach, tsc_khz),
        detach: times(&samples.detach, tsc_khz),
        round_trip,
        pauses: pauses(&baseline, &gaps, tsc_khz),
        paper: PaperTimes { jcst_2012: paper::JCST_2012, cluster_2007: paper::CLUSTER_2007 },
    })
}

/// Returns the online CPUs, all of which must be native.
fn native_cpus(driver: &dyn Driver) -> Result<CpuSet> {
    let status = driver.status()?;
    if status.iter().any(|cpu| cpu.mode == MERCURY_MODE_ATTACHED) {
        return Err(
            Error::refused("bench switch", Code::StillAttached, None, [0; 2]).hint("`mercury detach` first")
        );
    }
    Ok(status.iter().filter(|cpu| cpu.mode != MERCURY_MODE_OFFLINE).map(|cpu| cpu.cpu).collect())
}

/// Asks every CPU for its mode as often as the cycles will switch it: the same interrupts and the
/// same work in this process, without a switch.
fn ask(driver: &dyn Driver, cycles: u32, stop: &dyn Fn() -> bool) -> Result<()> {
    for _ in (0..cycles.saturating_mul(2)).take_while(|_| !stop()) {
        driver.status()?;
    }
    Ok(())
}

fn cycle(driver: &dyn Driver, cycles: u32, stop: &dyn Fn() -> bool) -> Result<Samples> {
    let mut samples = Samples::default();
    for cycle in (0..cycles).take_while(|_| !stop()) {
        if cycle.is_multiple_of(10) {
            progress::line(&format!("cycle {} of {cycles}", cycle + 1));
        }
        add(&mut samples.attach, &driver.switch(Direction::Attach, None)?);
        add(&mut samples.detach, &driver.switch(Direction::Detach, None)?);
        samples.cycles += 1;
    }
    Ok(samples)
}

fn add(samples: &mut BTreeMap<u32, Vec<u64>>, results: &[SwitchResult]) {
    for result in results {
        samples.entry(result.cpu).or_default().push(result.ticks);
    }
}

/// Attaches once more, measures hypercalls on each CPU, and detaches in any case.
fn round_trips(driver: &dyn Driver, cpus: &CpuSet, tsc_khz: u64) -> Result<Vec<RoundTrip>> {
    driver.switch(Direction::Attach, None)?;
    let measured = cpus.iter().map(|cpu| round_trip(driver, cpu, tsc_khz)).collect();
    driver.switch(Direction::Detach, None)?;
    measured
}

fn round_trip(driver: &dyn Driver, cpu: u32, tsc_khz: u64) -> Result<RoundTrip> {
    let mut samples = Vec::new();
    for _ in 0..ROUND_TRIP_SAMPLES {
        let measured = driver.measure(cpu, ROUND_TRIPS)?;
        let ticks = measured.ticks.saturating_sub(measured.overhead_ticks);
        samples.push(ticks as f64 / f64::from(ROUND_TRIPS));
    }
    let ticks = Summary::of(samples).median;
    let us = if tsc_khz == 0 { 0.0 } else { ticks * 1000.0 / tsc_khz as f64 };
    Ok(RoundTrip { cpu, ticks, us })
}

fn times(samples: &BTreeMap<u32, Vec<u64>>, tsc_khz: u64) -> Times {
    let to_us = ticks_to_us(1, tsc_khz);
    let summary = |ticks: &[u64]| Summary::of(ticks.iter().map(|ticks| *ticks as f64));
    let cpus = samples.iter().map(|(cpu, ticks)| (*cpu, summary(ticks)));
    let all: Vec<u64> = samples.values().flatten().copied().collect();
    Times {
        cpus: cpus.map(|(cpu, ticks)| CpuTimes { cpu, ticks, us: ticks.scaled(to_us) }).collect(),
        all_us: summary(&all).scaled(to_us),
        all_ticks: summary(&all),
    }
}

fn pauses(baseline: &[Gap], gaps: &[Gap], tsc_khz: u64) -> Vec<Pause> {
    let asking = |cpu| baseline.iter().find(|gap| gap.cpu == cpu).map_or(0, |gap| gap.ticks);
    let pause = |gap: &Gap| Pause {
        cpu: gap.cpu,
        asking_us: ticks_to_us(asking(gap.cpu), tsc_khz),
        switching_us: ticks_to_us(gap.ticks, tsc_khz),
    };
    gaps.iter().map(pause).collect()
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        to.line(
            to.tone(Tone::Strong, &format!("{} cycles of attach and detach", thousands(self.cycles.into()))),
        );
        if self.cycles == 0 {
            to.line("interrupted before the first one was done");
            return;
        }
        to.line("time with interrupts off, per CPU:");
        to.table(&self.time_rows());
        to.line("");
        to.table(&self.cpu_rows());
        to.line("");
        to.line(
            "The pauses are those of a thread that spins on the CPU, while the modes are only asked for and",
        );
        to.line("while they are switched; they include whatever else the kernel does there.");
    }
}

impl Report {
    fn time_rows(&self) -> Vec<Vec<String>> {
        let heading = ["", "CPU", "min", "median", "p99", "max", "median ticks", "JCST 2012"];
        let mut rows = vec![heading.map(String::from).to_vec()];
        let paper = self.paper.jcst_2012;
        for (name, times, paper) in
            [("attach", &self.attach, paper.attach_us), ("detach", &self.detach, paper.detach_us)]
        {
            rows.extend(
                times.cpus.iter().map(|cpu| time_row(name, &cpu.cpu.to_string(), &cpu.us, &cpu.ticks, None)),
            );
            rows.push(time_row(name, "all", &times.all_us, &times.all_ticks, Some(paper)));
        }
        rows
    }

    fn cpu_rows(&self) -> Vec<Vec<String>> {
        let heading = ["CPU", "exit and back", "ticks", "longest pause, asking", "switching"];
        let mut rows = vec![heading.map(String::from).to_vec()];
        for trip in &self.round_trip {
            let pause = self.pauses.iter().find(|pause| pause.cpu == trip.cpu);
            let shown = |us: Option<f64>| us.map_or("–".to_string(), duration);
            rows.push(vec![
                trip.cpu.to_string(),
                duration(trip.us),
                thousands(trip.ticks as u64),
                shown(pause.map(|pause| pause.asking_us)),
                shown(pause.map(|pause| pause.switching_us)),
            ]);
        }
        rows
    }
}

fn time_row(name: &str, cpu: &str, us: &Summary, ticks: &Summary, paper: Option<f64>) -> Vec<String> {
    let mut row = vec![name.to_string(), cpu.to_string()];
    row.extend([us.min, us.median, us.p99, us.max].map(duration));
    row.push(thousands(ticks.median as u64));
    row.push(paper.map(duration).unwrap_or_default());
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_control::fake::FakeDriver;
    use std::cell::Cell;

    #[test]
    fn measures_and_leaves_the_machine_native() {
        let driver = FakeDriver::new(1);
        let report = measure(&driver, 5, &|| false).expect("measured");
        assert_eq!((report.cycles, report.attach.cpus[0].ticks.count), (5, 5));
        assert_eq!(report.attach.cpus[0].us.median, 1.0);
        assert_eq!(report.round_trip[0].ticks, 540.0);
        assert!(!driver.attached.borrow().contains(&true));
    }

    #[test]
    fn an_interrupt_ends_it_natively() {
        let driver = FakeDriver::new(1);
        let calls = Cell::new(0);
        let stop = || {
            calls.set(calls.get() + 1);
            calls.get() > 15
        };
        let report = measure(&driver, 6, &stop).expect("measured");
        assert!(report.cycles < 6);
        assert!(!driver.attached.borrow().contains(&true));
    }

    #[test]
    fn attached_cpus_are_left_alone() {
        let driver = FakeDriver::new(2);
        driver.switch(Direction::Attach, None).expect("attach");
        assert_eq!(
            measure(&driver, 1, &|| false).map_err(|error| error.code),
            Err(Some(Code::StillAttached))
        );
    }

    #[test]
    fn rendered() {
        let mut report = measure(&FakeDriver::new(2), 3, &|| false).expect("measured");
        let pause = |cpu, us| Pause { cpu, asking_us: us, switching_us: us * 1.5 };
        report.pauses = vec![pause(0, 120.0), pause(1, 4000.0)];
        let mut text = Text::new(false);
        report.render(&mut text);
        insta::assert_snapshot!(text.finish());
    }
}
