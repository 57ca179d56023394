//! For tests and reports: all that is read of a CPU, and the proof that it comes back as it was.

use crate::{
    cpus::CpuSet,
    driver::{Direction, Driver},
    error::{Error, Result},
    exit::Exit,
    output::{Hex, Render, Text},
};
use mercury_abi::facts::CpuFacts;
use serde::Serialize;
use std::collections::BTreeMap;

/// Facts of several CPUs.
#[derive(Debug, Serialize)]
pub struct AllFacts {
    cpus: Vec<BTreeMap<&'static str, Hex>>,
}

/// Reads the facts of `cpus`; those that are offline are left out.
pub fn collect(driver: &dyn Driver, cpus: &CpuSet) -> Result<AllFacts> {
    let mut all = Vec::new();
    for cpu in cpus.iter() {
        all.extend(driver.facts(cpu)?.map(|facts| named(&facts)));
    }
    Ok(AllFacts { cpus: all })
}

fn named(facts: &CpuFacts) -> BTreeMap<&'static str, Hex> {
    mercury_preflight::named_values(facts).map(|(name, value)| (name, Hex(value))).collect()
}

impl Render for AllFacts {
    fn render(&self, to: &mut Text) {
        for cpu in &self.cpus {
            to.line(format!("CPU {}", cpu.get("cpu").map_or(0, |cpu| cpu.0)));
            cpu.iter().for_each(|(name, value)| to.line(format!("  {name:24}{:#x}", value.0)));
        }
    }
}

/// What a switch changed that it should not have.
#[derive(Debug, Serialize)]
pub struct Verification {
    /// Nothing did.
    pub equal: bool,
    cpus: Vec<Changed>,
}

#[derive(Debug, Serialize)]
struct Changed {
    cpu: u32,
    changes: Vec<Change>,
}

#[derive(Debug, Serialize)]
struct Change {
    /// `attached`, or `native` for after detach.
    when: &'static str,
    field: &'static str,
    before: Hex,
    after: Hex,
    /// The kernel may have changed it with the task: it does not count.
    per_task: bool,
}

/// Attaches and detaches each CPU in turn and compares its state before, during and after.
pub fn verify(driver: &dyn Driver, cpus: &CpuSet) -> Result<Verification> {
    let cpus: Vec<Changed> = cpus.iter().map(|cpu| verify_cpu(driver, cpu)).collect::<Result<_>>()?;
    let equal = cpus.iter().flat_map(|cpu| &cpu.changes).all(|change| change.per_task);
    Ok(Verification { equal, cpus })
}

fn verify_cpu(driver: &dyn Driver, cpu: u32) -> Result<Changed> {
    let one: CpuSet = [cpu].into_iter().collect();
    let read = || driver.facts(cpu)?.ok_or_else(|| Error::new(Exit::Failed, format!("CPU {cpu} is offline")));
    let before = read()?;
    driver.switch(Direction::Attach, Some(&one))?;
    let attached = read();
    driver.switch(Direction::Detach, Some(&one))?;
    let (attached, after) = (attached?, read()?);
    let attached = mercury_preflight::as_if_native(&attached);
    let during = mercury_preflight::state_difference(&before, &attached).map(|d| change("attached", &d));
    let later = mercury_preflight::state_difference(&before, &after).map(|d| change("native", &d));
    Ok(Changed { cpu, changes: during.chain(later).collect() })
}

fn change(when: &'static str, difference: &mercury_preflight::Difference) -> Change {
    Change {
        when,
        field: difference.name,
        before: Hex(difference.before),
        after: Hex(difference.after),
        per_task: difference.per_task,
    }
}

impl Render for Verification {
    fn render(&self, to: &mut Text) {
        for cpu in &self.cpus {
            let verdict =
                if cpu.changes.is_empty() { "equal before, while attached and after" } else { "differs:" };
            to.line(format!("CPU {}: {verdict}", cpu.cpu));
            for change in &cpu.changes {
                let task = if change.per_task { " (changes with the task)" } else { "" };
                let (before, after) = (change.before.0, change.after.0);
                to.line(format!("  {} {}: {before:#x} → {after:#x}{task}", change.when, change.field));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeDriver;

    #[test]
    fn a_good_driver_changes_nothing() {
        let report = verify(&FakeDriver::new(2), &"0-1".parse().expect("list")).expect("verify");
        assert!(report.equal);
        assert!(verify(&FakeDriver::new(2), &"5".parse().expect("list")).is_err());
    }

    #[test]
    fn all_facts_have_names() {
        let all = collect(&FakeDriver::new(1), &"0-3".parse().expect("list")).expect("facts");
        assert_eq!(all.cpus.len(), 1);
        assert_eq!(all.cpus[0].get("efer"), Some(&Hex(0xd01)));
    }
}
