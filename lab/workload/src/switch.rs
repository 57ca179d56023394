//! Attaches and detaches that go through the driver itself, again and again, with counts.

use std::{fs::File, thread, time::Duration};

use mercury_abi::{
    code::Code,
    ioctl::{MERCURY_IOC_ATTACH, MERCURY_IOC_DETACH, SwitchResult},
};
use serde_json::{Value, json};

use crate::{Result, cpus, device, report::Report, stop::Stop};

/// The switches to make.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// End after this many times there and back
    #[arg(long)]
    cycles: Option<u64>,
    /// Only these CPUs, separated by commas
    #[arg(long, value_delimiter = ',')]
    cpus: Vec<usize>,
    /// Wait this long after each switch
    #[arg(long, default_value_t = 0)]
    pause_us: u64,
    /// Real-time priority of the switching thread
    #[arg(long)]
    fifo: Option<i32>,
    /// Switch only once, in one direction
    #[arg(long)]
    only: Option<Direction>,
}

/// The direction of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Direction {
    /// Put the hypervisor under the system.
    Attach,
    /// Take the hypervisor out.
    Detach,
}

impl Direction {
    fn command(self) -> u32 {
        match self {
            Self::Attach => MERCURY_IOC_ATTACH,
            Self::Detach => MERCURY_IOC_DETACH,
        }
    }
}

/// Switches until the end.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    if let Some(priority) = args.fifo {
        cpus::fifo(priority)?;
    }
    let device = device::open_to_control()?;
    device::load(&device)?;
    let mut switcher = Switcher::new(&device, args)?;
    let directions: &[Direction] = match &args.only {
        Some(direction) => std::slice::from_ref(direction),
        None => &[Direction::Attach, Direction::Detach],
    };
    while !stop.now() && args.cycles.is_none_or(|cycles| report.passes() < cycles) {
        for &direction in directions {
            switcher.switch(direction, report)?;
            thread::sleep(Duration::from_micros(args.pause_us));
        }
        report.pass();
        if args.only.is_some() {
            break;
        }
    }
    switcher.finish(report);
    Ok(())
}

/// The switches so far.
struct Switcher<'a> {
    device: &'a File,
    mask: u64,
    cpus: usize,
    tsc_khz: u64,
    attach_ticks: Vec<u64>,
    detach_ticks: Vec<u64>,
}

impl<'a> Switcher<'a> {
    fn new(device: &'a File, args: &Args) -> Result<Self> {
        let cpus = if args.cpus.is_empty() { cpus::usable()?.len() } else { args.cpus.len() };
        Ok(Self {
            device,
            mask: args.cpus.iter().fold(0, |mask, cpu| mask | 1 << cpu),
            cpus,
            tsc_khz: device::system(device)?.tsc_khz.max(1),
            attach_ticks: Vec::new(),
            detach_ticks: Vec::new(),
        })
    }

    fn switch(&mut self, direction: Direction, report: &mut Report) -> Result<()> {
        let results = device::switch(self.device, direction.command(), self.mask, 0)?;
        let expected = self.cpus;
        report.check(results.len() == expected, || {
            format!("{direction:?}: {} CPUs switched instead of {expected}", results.len())
        });
        for SwitchResult { cpu, code, ticks } in results {
            report.check(code == Code::Ok as u32, || format!("{direction:?}: CPU {cpu} says {code}"));
            match direction {
                Direction::Attach => self.attach_ticks.push(ticks),
                Direction::Detach => self.detach_ticks.push(ticks),
            }
        }
        Ok(())
    }

    fn finish(mut self, report: &mut Report) {
        report.fact("cpus", self.cpus);
        report.fact("switches", self.attach_ticks.len() + self.detach_ticks.len());
        let attach = distribution(&mut self.attach_ticks, self.tsc_khz);
        report.fact("attach", attach);
        let detach = distribution(&mut self.detach_ticks, self.tsc_khz);
        report.fact("detach", detach);
    }
}

/// Returns the distribution of the times with interrupts off, in nanoseconds.
fn distribution(ticks: &mut [u64], tsc_khz: u64) -> Value {
    ticks.sort_unstable();
    let at = |part: f64| {
        let index = (ticks.len().saturating_sub(1) as f64 * part) as usize;
        ticks.get(index).map(|ticks| ticks * 1_000_000 / tsc_khz)
    };
    json!({ "min_ns": at(0.0), "median_ns": at(0.5), "p99_ns": at(0.99), "max_ns": at(1.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_of_sorted_ticks() {
        let mut ticks: Vec<u64> = (1..=100).rev().collect();
        let value = distribution(&mut ticks, 1_000_000);
        assert_eq!(value, json!({ "min_ns": 1, "median_ns": 50, "p99_ns": 99, "max_ns": 100 }));
        assert_eq!(distribution(&mut [], 1)["max_ns"], Value::Null);
    }
}
