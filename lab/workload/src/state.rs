//! The comparison of each CPU with itself: native, attached, and native again.

use std::fs::File;

use mercury_abi::{
    facts::CpuFacts,
    ioctl::{MERCURY_IOC_ATTACH, MERCURY_IOC_DETACH},
};
use mercury_preflight::{
    Vendor,
    bits::{cr4, efer},
    state_difference, vendor,
};

use crate::{Result, cpus, device, report::Report, stop::Stop};

/// The number of comparisons.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Times there and back
    #[arg(long, default_value_t = 10)]
    cycles: u64,
}

/// Compares all CPUs.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    let device = device::open_to_control()?;
    device::load(&device)?;
    let cpus = cpus::usable()?;
    let before = cpus.iter().map(|&cpu| facts(&device, cpu)).collect::<Result<Vec<_>>>()?;
    while report.passes() < args.cycles && !stop.now() {
        device::switch(&device, MERCURY_IOC_ATTACH, 0, 0)?;
        for before in &before {
            compare(&device, "attached", &as_attached(before), report)?;
        }
        device::switch(&device, MERCURY_IOC_DETACH, 0, 0)?;
        for before in &before {
            compare(&device, "native again", before, report)?;
        }
        report.pass();
    }
    report.fact("cpus", cpus.len());
    Ok(())
}

/// Returns the state that must be seen while attached: the virtualization extension is on, and the
/// rest is as before.
fn as_attached(native: &CpuFacts) -> CpuFacts {
    match vendor(native) {
        Vendor::Intel => CpuFacts { cr4: native.cr4 | cr4::VMXE, ..*native },
        _ => CpuFacts { efer: native.efer | efer::SVME, ..*native },
    }
}

/// Reads a CPU from itself, in this task's own system call. State that belongs to a task (SS is
/// what the last entry into the kernel has left) is then this task's, and the same each time.
fn facts(device: &File, cpu: usize) -> Result<CpuFacts> {
    cpus::pin(cpu)?;
    device::facts(device, cpu)
}

fn compare(device: &File, when: &str, expected: &CpuFacts, report: &mut Report) -> Result<()> {
    let now = facts(device, expected.cpu as usize)?;
    let all: Vec<_> = state_difference(expected, &now).collect();
    if !all.is_empty() {
        report.violation(format!("CPU {}, {when}: {all:x?}", expected.cpu));
    }
    Ok(())
}
