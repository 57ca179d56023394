//! `lab bench checkpoint`: the figures of checkpoint, snapshot and rollback.

pub mod pause;
pub mod peers;
mod report;
pub mod rollback;
pub mod slope;
pub mod streaming;
mod tools;

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use serde_json::Value;

use super::{Depth, stats::rounded};
use mercury_lab::{
    error::{Error, Result},
    live,
    machine::Machine,
};
use pause::Pause;
use peers::Peers;
#[cfg(test)]
pub use report::tests::figures as kept_promises;
pub use report::{HEADING, promises, section};
use rollback::{Kept, Rollback};
use streaming::Streaming;

/// The amount of measurements.
struct Plan {
    sizes_mib: &'static [u32],
    snapshots: usize,
    alternations: usize,
    quiet: Duration,
    rates: usize,
    peers: usize,
    rollbacks_mib: &'static [u64],
    checkpoints: u32,
}

const FULL: Plan = Plan {
    sizes_mib: &[512, 4096, 12 * 1024],
    snapshots: 3,
    alternations: 3,
    quiet: Duration::from_secs(15),
    rates: 3,
    peers: 2,
    rollbacks_mib: &[0, 8, 32, 128],
    checkpoints: 4,
};
const QUICK: Plan = Plan {
    sizes_mib: &[512, 12 * 1024],
    snapshots: 2,
    alternations: 2,
    quiet: Duration::from_secs(10),
    rates: 1,
    peers: 1,
    rollbacks_mib: &[0, 32],
    checkpoints: 3,
};

/// All figures, in the order of docs/benchmarks.json.
#[derive(Clone, Debug, Serialize)]
pub struct Checkpoint {
    /// The hypervisor's part of the pause, by MiB of memory.
    pub snapshot_instructions: BTreeMap<u32, u64>,
    /// A ratio of transactions per second.
    #[serde(serialize_with = "rounded")]
    pub throughput_during_over_before: f64,
    /// A ratio of bytes per second.
    #[serde(serialize_with = "rounded")]
    pub image_rate_over_zstd: f64,
    pub emulator: String,
    /// The pauses by size of memory.
    pub pauses: Vec<Pause>,
    /// The figures of other tools for the same job.
    pub peers: Peers,
    /// The figures while the image is streamed.
    pub streaming: Streaming,
    /// The rollbacks, by the amount written.
    pub rollbacks: Vec<Rollback>,
    /// Memory that Mercury holds while native.
    pub kept: Kept,
}

/// Measures all figures.
///
/// # Errors
/// If a machine fails.
pub fn measure(depth: Depth) -> Result<Checkpoint> {
    let plan = if depth == Depth::Full { FULL } else { QUICK };
    live::say("A snapshot's pause in instructions, on one CPU");
    let pauses = plan.sizes_mib.iter().map(|mib| pause_with(*mib, &plan)).collect::<Result<Vec<_>>>()?;
    live::say("Rollbacks in instructions, on one CPU");
    let rollbacks = rollback::measure(plan.rollbacks_mib)?;
    live::say("Memory after checkpoints");
    let kept = rollback::kept(plan.checkpoints)?;
    live::say("PostgreSQL while an image is streamed, and zstd alone");
    let streaming = streaming::measure(plan.alternations, plan.quiet, plan.rates)?;
    live::say("The same job by other means");
    let peers = peers::measure(plan.peers)?;
    Ok(Checkpoint {
        snapshot_instructions: pauses
            .iter()
            .map(|pause| (pause.memory_mib, pause.snapshot_instructions))
            .collect(),
        throughput_during_over_before: streaming.during_over_before.median,
        image_rate_over_zstd: streaming.rate_over_zstd.median,
        emulator: emulator()?,
        pauses,
        peers,
        streaming,
        rollbacks,
        kept,
    })
}

fn pause_with(memory_mib: u32, plan: &Plan) -> Result<Pause> {
    let pause = pause::with_memory(memory_mib, plan.snapshots)?;
    println!(
        "    {memory_mib} MiB: {} to {} in the hypervisor, {} in all",
        pause.snapshot_instructions_min,
        pause.snapshot_instructions,
        pause.total()
    );
    Ok(pause)
}

/// Returns the name of the newer QEMU.
pub(super) fn emulator() -> Result<String> {
    Ok(super::emulator(&mercury_lab::emulator::newer_qemu::ensure()?))
}

/// Runs a command that must succeed, and reads its JSON.
pub(super) fn ask(machine: &Machine, line: &str, limit: Duration) -> Result<Value> {
    let output = machine.command(line).timeout(limit).run()?.check()?.stdout;
    serde_json::from_str(&output).map_err(|_| machine.blame(Error::Host(format!("`{line}` says {output}"))))
}

pub(super) fn number(json: &Value, name: &str) -> Result<f64> {
    json[name].as_f64().ok_or_else(|| Error::Host(format!("no number {name} in {json}")))
}

/// Formats a number with its two or three significant digits.
fn label(number: f64) -> String {
    match number {
        100.0.. => format!("{number:.0}"),
        10.0.. => format!("{number:.1}"),
        0.1.. => format!("{number:.2}"),
        _ => format!("{number:.4}"),
    }
}
