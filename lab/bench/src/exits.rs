//! Exits of an attached machine at work.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use serde_json::Value;

use super::{
    counts::{counting_machine, unexpected},
    kvm::touched,
};
use mercury_lab::{error::Result, machine::Machine, spec::Qemu};

/// A process that writes to its pages on demand.
pub(super) const DIRTY: &[u8] = include_bytes!("../../guest/migration/dirty");
/// Memory of the counting machine.
const COUNTED_MIB: u32 = 512;
/// The snapshot's pool for copies: more than the process writes.
const POOL: &str = "64M";
/// Time that a command may take beyond the requested time.
const SLACK: Duration = Duration::from_secs(120);

/// Exits into the hypervisor, and the work that ran meanwhile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exits {
    /// Length of the measurement.
    pub seconds: u64,
    /// pgbench's transactions in that time (TPC-B).
    pub transactions: u64,
    pub by_reason: BTreeMap<String, u64>,
    /// Exits that the measurement itself causes: one hypercall on each CPU.
    pub of_the_question: u64,
    /// The other exits, per second.
    pub steady_exits_per_second: f64,
}

/// Attaches, lets PostgreSQL work for a while, and detaches.
///
/// # Errors
/// If the machine fails.
pub fn under_postgres(machine: &Machine, time: Duration) -> Result<Exits> {
    machine.mercury("attach")?;
    let line = format!("pgbench -n -c 4 -j 2 -T {} bench", time.as_secs());
    let job = machine.command(&line).timeout(time + SLACK).spawn()?;
    let before = machine.mercury("status")?;
    let report = job.wait(time + SLACK)?.check()?.stdout;
    let after = machine.mercury("status")?;
    machine.mercury("detach")?;
    let cpus = after["cpus"].as_array().ok_or_else(|| unexpected("status", &after))?.len() as u64;
    let total = all_exits(&after) - all_exits(&before);
    Ok(Exits {
        seconds: time.as_secs(),
        transactions: transactions(&report),
        by_reason: difference(&by_reason(&before), &by_reason(&after)),
        of_the_question: cpus,
        steady_exits_per_second: total.saturating_sub(cpus) as f64 / time.as_secs_f64(),
    })
}

/// The cost of a first write to a page, in instructions a page, the writer's own included.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FirstWrites {
    /// The cost while attached, without a snapshot.
    pub attached: f64,
    /// The cost under a snapshot: an exit, the copy, and back.
    pub snapshot: f64,
    /// The cost of the second write.
    pub again: f64,
}

/// Counts the exits that a process forces under a snapshot by writing to pages.
///
/// # Errors
/// If the machine fails.
pub fn beneath_a_snapshot() -> Result<FirstWrites> {
    let machine = Machine::boot(counting_machine(COUNTED_MIB).qemu_version(Qemu::Newer))?;
    machine.put("/root/dirty", DIRTY, 0o755)?;
    let mut writer = machine.spawn("/root/dirty")?;
    writer.wait_output("ready", SLACK)?;
    let mut write = || touched(&mut writer, "write");
    // The first write makes the pages exist.
    write()?;
    machine.mercury("attach")?;
    let attached = write()?;
    machine.mercury(&format!("snapshot --force-disks --pool {POOL}"))?;
    let (snapshot, again) = (write()?, write()?);
    machine.mercury("snapshot --drop")?;
    writer.close_stdin()?;
    writer.wait(SLACK)?.check()?;
    machine.check_health()?;
    machine.shut_down()?;
    Ok(FirstWrites { attached, snapshot, again })
}

fn cpus(status: &Value) -> impl Iterator<Item = &Value> {
    status["cpus"].as_array().into_iter().flatten()
}

fn all_exits(status: &Value) -> u64 {
    cpus(status).filter_map(|cpu| cpu["exits_total"].as_u64()).sum()
}

/// Returns the exits by reason, of all CPUs together.
#[must_use]
pub fn by_reason(status: &Value) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (reason, count) in cpus(status).flat_map(|cpu| cpu["exits"].as_object().into_iter().flatten()) {
        *sums.entry(reason.clone()).or_insert(0) += count.as_u64().unwrap_or(0);
    }
    sums
}

fn difference(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let gained = after
        .iter()
        .map(|(reason, count)| (reason.clone(), count - before.get(reason).copied().unwrap_or(0)));
    gained.filter(|(_, count)| *count > 0).collect()
}

fn transactions(report: &str) -> u64 {
    let line = report.lines().find_map(|line| line.split_once("actually processed: "));
    line.and_then(|(_, rest)| rest.split('/').next()?.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn exits_are_counted_by_reason() {
        let exits = |hypercall: u64, msr: u64| json!({ "hypercall": hypercall, "msr-pass-through": msr });
        let cpu = |hypercall: u64, msr: u64| json!({ "exits": exits(hypercall, msr) });
        let before = by_reason(&json!({ "cpus": [cpu(3, 1), cpu(2, 0)] }));
        let after = by_reason(&json!({ "cpus": [cpu(4, 1), cpu(3, 0)] }));
        assert_eq!(difference(&before, &after), BTreeMap::from([("hypercall".to_owned(), 2)]));
    }

    #[test]
    fn transactions_are_read_from_the_report() {
        assert_eq!(transactions("x\nnumber of transactions actually processed: 217\n"), 217);
        assert_eq!(transactions("number of transactions actually processed: 50/50"), 50);
    }
}
