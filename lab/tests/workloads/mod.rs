//! Common parts of the tests that switch under running programs: workloads that run until they are
//! told to end, the switching, and the test module.

#![allow(dead_code, clippy::unwrap_used)]

pub mod devices;
pub mod moves;
pub mod readers;
pub mod restart;

use std::{collections::BTreeMap, time::Duration};

use mercury_lab::{Background, Machine, Output, Result};
use serde_json::Value;

/// Time limit for a workload's end: all workloads share the same few CPUs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Reads a workload's last line.
pub fn report(output: &Output) -> Value {
    let line = output.stdout.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|_| panic!("no report: {}{}", output.stdout, output.stderr))
}

pub struct Workloads<'a> {
    machine: &'a Machine,
    running: Vec<(String, Background)>,
}

impl<'a> Workloads<'a> {
    /// Starts workloads by their arguments for `mercury-workload`.
    pub fn start(machine: &'a Machine, all: &[&str]) -> Result<Self> {
        machine.sh("rm -f /run/end")?;
        let start = |&words: &&str| {
            let line = format!("exec mercury-workload --until-file /run/end {words}");
            Ok((words.to_owned(), machine.spawn(&line)?))
        };
        Ok(Self { machine, running: all.iter().map(start).collect::<Result<_>>()? })
    }

    /// Ends all workloads. Returns their reports, each of which has passes and no violation.
    pub fn finish(self) -> Result<Vec<Value>> {
        self.machine.sh("touch /run/end")?;
        let mut reports = Vec::new();
        for (name, workload) in self.running {
            let output = workload.wait(PATIENCE)?.check()?;
            let report = report(&output);
            println!("{name}: {report}");
            assert_eq!(report["violations"], 0, "{name}: {report}");
            assert!(report["passes"].as_u64().unwrap() > 0, "{name} never came to anything: {report}");
            reports.push(report);
        }
        Ok(reports)
    }
}

/// Attaches and detaches all CPUs `cycles` times, at a priority above everything that runs.
pub fn switch(machine: &Machine, cycles: u64) -> Result<Value> {
    let line = format!("mercury-workload switch --cycles {cycles} --fifo 90 --pause-us 2000");
    let output = machine.command(&line).timeout(Duration::from_secs(240)).run()?.check()?;
    let report = report(&output);
    println!("{cycles} cycles: {report}");
    let cpus = report["cpus"].as_u64().unwrap();
    assert_eq!(report["switches"], 2 * cycles * cpus, "{report}");
    Ok(report)
}

/// Loads the driver and the hypervisor, and leaves every CPU native.
pub fn load(machine: &Machine) -> Result<()> {
    machine.mercury("load").map(drop)
}

/// Loads the test module.
pub fn load_test_module(machine: &Machine) -> Result<()> {
    machine.sh("insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko").map(drop)
}

/// Runs a command of the test module.
pub fn kernel(machine: &Machine, words: &str) -> Result<Value> {
    Ok(report(&machine.run(&format!("mercury-workload kernel {words}"))?.check()?))
}

/// A command of the test module that is repeated until the workloads end.
pub struct Repeated(Background);

impl Repeated {
    pub fn start(machine: &Machine, words: &str) -> Result<Self> {
        let line = format!("until [ -e /run/end ]; do mercury-workload kernel {words} || exit; done");
        machine.spawn(&line).map(Self)
    }

    /// Ends the repetition. Returns its answers, added up by name.
    pub fn finish(self) -> Result<BTreeMap<String, u64>> {
        let output = self.0.wait(PATIENCE)?.check()?;
        let mut sums = BTreeMap::new();
        for line in output.stdout.lines() {
            let answer: BTreeMap<String, u64> = serde_json::from_str(line).unwrap();
            for (name, value) in answer {
                *sums.entry(name).or_default() += value;
            }
        }
        println!("{sums:?}");
        Ok(sums)
    }
}

/// Returns the exits of a CPU so far, by reason.
pub fn exits(machine: &Machine, cpu: usize, reason: &str) -> Result<u64> {
    Ok(machine.mercury("status")?["cpus"][cpu]["exits"][reason].as_u64().unwrap_or(0))
}

/// Reads a number that a script keeps in a file. The script never leaves the file half written.
pub fn number(machine: &Machine, path: &str) -> Result<u64> {
    Ok(machine.sh(&format!("cat {path}"))?.trim().parse().unwrap())
}
