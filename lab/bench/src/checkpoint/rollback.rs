//! The cost of a rollback by the amount written, and the memory that Mercury holds besides a
//! snapshot's pool.

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
/// Ticks of the 3 ms that devices get to come to rest.
const SETTLE: f64 = 3e6;

/// A script that ends twice: the second end belongs to the life after the rollback.
const LIVES: &str = r#"
mercury snapshot --once --json > /run/said 2>&1
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
    /// MiB that the test wrote.
    pub written_mib: u64,
    /// Pages that were copied back.
    pub pages: u64,
    /// Instructions until the rendezvous of all CPUs was complete.
    pub meet_instructions: u64,
    /// Instructions from then until everything was in place, without the 3 ms that devices get to
    /// come to rest.
    pub work_instructions: u64,
}

/// Writes so many MiB, and rolls back, on one machine that counts.
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
    // The agent must not be spoken to meanwhile: half a message would be lost.
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

/// Memory that Mercury holds while native.
#[derive(Clone, Debug, Serialize)]
pub struct Kept {
    /// Memory by the driver's own account, before the first checkpoint.
    pub before: Memory,
    /// Memory by the driver's own account, after the last checkpoint.
    pub after: Memory,
    /// The number of checkpoints in between.
    pub checkpoints: u32,
    /// KiB that the kernel loses for each checkpoint after the first one.
    pub lost_kib_each: f64,
}

/// Makes one checkpoint after the other, and measures the free memory.
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

/// Returns the free memory once nothing is cached.
fn left_kib(machine: &Machine) -> Result<f64> {
    let line = "sync; sleep 1; for i in 1 2 3; do echo 3 > /proc/sys/vm/drop_caches; sleep 0.3; done; \
                awk '/^MemFree:/ { print $2 }' /proc/meminfo";
    let said = machine.sh(line)?;
    said.parse().map_err(|_| Error::Host(format!("MemFree: {said}")))
}
