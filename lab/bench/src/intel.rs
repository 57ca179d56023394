//! The cost of a switch and the exits on Intel: in Bochs, whose time-stamp counter counts the instructions
//! of a machine with one CPU.

use std::{collections::BTreeMap, thread, time::Duration};

use serde::Serialize;
use serde_json::Value;

use super::{
    counts::{self, unexpected},
    exits::{self, Exits},
};
use mercury_lab::{
    error::Result,
    kernel::Kernel,
    machine::Machine,
    spec::{Model, Platform, Spec},
};

const MEMORY_MIB: u32 = 1024;
/// The number of programs started to measure the cost of a start.
const STARTS: u32 = 100;

/// One processor's figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Processor {
    /// The processor's name in the kernel.
    pub name: String,
    /// Instructions of an attach with interrupts off: the maximum of all cycles.
    pub attach_instructions: u64,
    /// Instructions of a detach with interrupts off: the maximum of all cycles.
    pub detach_instructions: u64,
    /// Instructions of a hypercall into the hypervisor and back.
    pub exit_roundtrip_instructions: u64,
    /// Instructions of a CPUID that exits, minus those of a CPUID that does not.
    pub cpuid_exit_instructions: u64,
}

/// Exits of an attached machine on Intel.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Intel {
    /// Exits of a load that only computes.
    pub compute_exits_per_second: f64,
    /// CPUID instructions that a program (/bin/true) executes before its `main`.
    pub cpuid_exits_per_program: f64,
    /// Exits of PostgreSQL at work.
    pub exits_under_postgres: Exits,
    /// The machine on which the exits were counted.
    pub machine: String,
}

/// Returns a machine with one of Bochs's Intel processors.
#[must_use]
pub fn machine(model: Model) -> Spec {
    Spec::new(Kernel::BookwormCloud).cpus(1).memory_mib(MEMORY_MIB).platform(Platform::Bochs(model))
}

/// Boots a machine and counts its exits.
///
/// # Errors
/// If the machine fails.
pub fn measure(time: Duration) -> Result<Intel> {
    let spec = machine(Model::SkylakeX);
    let summary = spec.summary();
    let machine = Machine::boot(spec)?;
    machine.mercury("load")?;
    let (compute, starts) = (compute_exits(&machine, time)?, cpuids_of_a_start(&machine)?);
    machine.start_postgres()?;
    let exits_under_postgres = exits::under_postgres(&machine, time)?;
    machine.check_health()?;
    machine.shut_down()?;
    Ok(Intel {
        compute_exits_per_second: compute as f64 / time.as_secs_f64(),
        cpuid_exits_per_program: starts,
        exits_under_postgres,
        machine: summary,
    })
}

/// Counts on one machine, which is native afterwards.
///
/// # Errors
/// If the machine fails.
pub fn processor(machine: &Machine) -> Result<Processor> {
    let counts = counts::count(machine, MEMORY_MIB)?;
    let native = cpuid(machine)?;
    machine.mercury("attach")?;
    let attached = cpuid(machine)?;
    machine.mercury("detach")?;
    let counted = Processor {
        name: machine.sh("sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1")?,
        attach_instructions: counts.attach_instructions,
        detach_instructions: counts.detach_instructions,
        exit_roundtrip_instructions: counts.exit_roundtrip_instructions,
        cpuid_exit_instructions: (attached - native).round() as u64,
    };
    println!(
        "    {}: attach {}, detach {}, a hypercall and back {}, a CPUID {}",
        counted.name,
        counted.attach_instructions,
        counted.detach_instructions,
        counted.exit_roundtrip_instructions,
        counted.cpuid_exit_instructions
    );
    Ok(counted)
}

/// Returns the number of instructions of a CPUID.
fn cpuid(machine: &Machine) -> Result<f64> {
    let said = machine.sh("mercury-workload cpuid")?;
    let said: Value = serde_json::from_str(&said).unwrap_or_default();
    said["cpu0_ticks"].as_f64().ok_or_else(|| unexpected("mercury-workload cpuid", &said))
}

/// Returns the exits by reason so far.
fn so_far(machine: &Machine) -> Result<BTreeMap<String, u64>> {
    Ok(exits::by_reason(&machine.mercury("status")?))
}

/// Returns the exits of a load that only computes, in so much wall time. The cost of asking, which
/// two questions in a row show, is subtracted.
fn compute_exits(machine: &Machine, time: Duration) -> Result<u64> {
    let sum = |exits: BTreeMap<String, u64>| exits.values().sum::<u64>();
    machine.mercury("attach")?;
    let work = machine.start_work()?;
    let first = sum(so_far(machine)?);
    let second = sum(so_far(machine)?);
    thread::sleep(time);
    let third = sum(so_far(machine)?);
    work.finish()?;
    machine.mercury("detach")?;
    Ok((third - second).saturating_sub(second - first))
}

fn cpuids_of_a_start(machine: &Machine) -> Result<f64> {
    let cpuids = |machine: &Machine| Ok(so_far(machine)?.get("cpuid").copied().unwrap_or(0));
    machine.mercury("attach")?;
    let first = cpuids(machine)?;
    let second = cpuids(machine)?;
    machine.sh(&format!("for n in {{1..{STARTS}}}; do /bin/true; done"))?;
    let third = cpuids(machine)?;
    machine.mercury("detach")?;
    // The shell that starts the programs is one more program.
    Ok((third - second).saturating_sub(second - first) as f64 / f64::from(STARTS + 1))
}
