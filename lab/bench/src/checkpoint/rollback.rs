//! What it takes to go back, by how much was written; and what Mercury holds besides a snapshot's pool.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::{ask, number, pause::counting_machine};
use crate::counts::Memory;
use mercury_lab::{
    error::{Error, Result, wait_for},
    kernel::Kernel,
    machine::Machine,
    spec::{Bus, Qemu, Spec},
};

const MEMORY_MIB: u32 = 1024;
const LIMIT: Duration = Duration::from_secs(600);
/// Ticks of the 3 ms that devices are given to come to rest in.
const SETTLE: f64 = 3e6;

/// Two lives of a machine: the second one begins where the command ends for the second time.
const LIVES: &str = r#"
mercury snapshot --json > /run/said 2>&1
if grep -q '"kept"' /run/said; then
    head -c "$1" /dev/urandom > /run/written
    mercury rollback
    echo "<3>lives: $(tr -d '\n' < /run/said), not put back" > /dev/kmsg
else
    echo "<3>lives: $(tr -d '\n' < /run/said)" > /dev/kmsg
fi
"#;

/// One rollback.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rollback {
    /// What was written on purpose, in MiB.
    pub written_mib: u64,
    /// Pages that were copied back.
    pub pages: u64,
    /// Until all CPUs had met, in instructions.
    pub meet_instructions: u64,
    /// From then until everything was in place, without the 3 ms that devices are given to come to rest.
    pub work_instructions: u64,
}

/// Writes so many MiB, and goes back, on one machine that counts.
///
/// # Errors
/// If the machine fails.
pub fn measure(sizes_mib: &[u64]) -> Result<Vec<Rollback>> {
    let machine = Machine::boot(counting_machine(MEMORY_MIB))?;
    machine.sh("sync; mount -o remount,ro /; mercury load")?;
    machine.put("/run/lives", LIVES.as_bytes(), 0o755)?;
    let found = sizes_mib.iter().map(|mib| once(&machine, *mib)).collect::<Result<Vec<_>>>()?;
    machine.check_log()?;
    machine.shut_down()?;
    Ok(found)
}

fn once(machine: &Machine, mib: u64) -> Result<Rollback> {
    let before = machine.serial_log().len();
    machine.sh(&format!("setsid sh /run/lives {} > /dev/null 2>&1 < /dev/null &", mib << 20))?;
    // Nobody talks to it meanwhile: half a word would be lost.
    let report = wait_for("the machine to be put back", LIMIT, || {
        let log = machine.serial_log();
        let line = log.get(before..).and_then(|new| new.split_once("lives: "));
        Ok(line.and_then(|(_, rest)| rest.split_once('\n')).map(|(line, _)| line.trim().to_owned()))
    })?;
    let report: Value = serde_json::from_str(&report)
        .map_err(|_| machine.blame(Error::Host(format!("a rollback: {report}"))))?;
    let instructions = |us: &str| number(&report, us).map(|us| us * 1e3);
    let found = Rollback {
        written_mib: mib,
        pages: number(&report, "pages")? as u64,
        meet_instructions: instructions("meet_us")? as u64,
        work_instructions: (instructions("work_us")? - SETTLE).max(0.0) as u64,
    };
    println!("    {found:?}");
    Ok(found)
}

/// What is held while native.
#[derive(Clone, Debug, Serialize)]
pub struct Kept {
    /// By the driver's own account, before the first checkpoint.
    pub before: Memory,
    /// After the last one.
    pub after: Memory,
    /// Checkpoints in between.
    pub checkpoints: u32,
    /// KiB less that the kernel has, for each checkpoint, the first one aside.
    pub lost_kib_each: f64,
}

/// Makes one after the other, and looks at what memory is left.
///
/// # Errors
/// If the machine fails.
pub fn kept(checkpoints: u32) -> Result<Kept> {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(512).disk(Bus::Virtio, 1024);
    let machine = Machine::boot(spec.qemu_version(Qemu::Newer))?;
    machine.mercury("load")?;
    let before = Memory::of(&machine)?;
    let mut left = Vec::new();
    for _ in 0..=checkpoints {
        ask(&machine, "mercury --json checkpoint --overwrite /dev/vda", LIMIT)?;
        left.push(left_kib(&machine)?);
    }
    let after = Memory::of(&machine)?;
    machine.check_health()?;
    machine.shut_down()?;
    println!("    KiB left: {left:?}");
    let lost = left.first().zip(left.last()).map_or(f64::NAN, |(first, last)| first - last);
    Ok(Kept { before, after, checkpoints, lost_kib_each: lost / f64::from(checkpoints.max(1)) })
}

/// What is free once nothing is cached.
fn left_kib(machine: &Machine) -> Result<f64> {
    let line = "sync; sleep 1; for i in 1 2 3; do echo 3 > /proc/sys/vm/drop_caches; sleep 0.3; done; \
                awk '/^MemFree:/ { print $2 }' /proc/meminfo";
    let said = machine.sh(line)?;
    said.parse().map_err(|_| Error::Host(format!("MemFree: {said}")))
}
