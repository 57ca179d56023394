//! PostgreSQL in a machine that has become a guest, beside the same PostgreSQL in an ordinary guest of stock
//! QEMU on the same host. Both have the same kernel, the same memory and the same disk, on NVMe, and their
//! flushes are the host's.
//!
//! The cost is in instructions: those of the monitor's process, with its guest and with KVM's work for it, on
//! a host with one CPU that counts them. Time in which the process waits does not count.

use std::time::Duration;

use serde::Serialize;

use crate::{
    demo::database,
    stats::{median, rounded},
};
use mercury_lab::{
    as_guest::{self, ARTEFACTS, Guest, ROOT, disk},
    command::Background,
    error::{Error, Result},
    guests,
    kernel::Kernel,
    link::System,
    machine::Machine,
    spec::{Icount, Spec},
};

/// The kernel of all: Debian's with NVMe and ext4 built in, which an ordinary guest starts without more.
const KERNEL: Kernel = Kernel::BookwormCloud;
/// Memory of both guests, and of their host.
const GUEST_MIB: u32 = 512;
const HOST_MIB: u32 = 2048;
/// pgbench's transactions in one sample.
const TRANSACTIONS: u32 = 50;
const LIMIT: Duration = Duration::from_secs(900);

/// The script that starts the ordinary guest, and is the first process in it.
const SCRIPT: &[u8] = include_bytes!("../../../guest/kvm/database");
const WORKED: &[u8] = include_bytes!("../../../guest/kvm/worked");

/// The cost of a transaction of pgbench's TPC-B, in instructions.
#[derive(Clone, Debug, Serialize)]
pub struct Database {
    /// In the machine that has become a guest; the median.
    pub arrived_instructions: u64,
    /// In the ordinary guest; the median.
    pub ordinary_instructions: u64,
    /// Throughput that a processor allows: the ordinary guest's cost divided by the arrived one's.
    #[serde(serialize_with = "rounded")]
    pub arrived_over_ordinary: f64,
    /// The largest difference between two samples of one guest.
    #[serde(serialize_with = "rounded")]
    pub noise: f64,
    /// The number of samples, of each guest.
    pub samples: usize,
}

impl Database {
    fn of(arrived: &[f64], ordinary: &[f64]) -> Self {
        let spread = |all: &[f64]| {
            let most = all.iter().copied().fold(0.0, f64::max);
            most / all.iter().copied().fold(f64::MAX, f64::min) - 1.0
        };
        Self {
            arrived_instructions: median(arrived) as u64,
            ordinary_instructions: median(ordinary) as u64,
            arrived_over_ordinary: median(ordinary) / median(arrived),
            noise: spread(arrived).max(spread(ordinary)),
            samples: arrived.len(),
        }
    }
}

/// Measures so many samples in each guest.
///
/// # Errors
/// If a machine fails, or a transaction does.
pub fn measure(samples: usize) -> Result<Database> {
    let source =
        Machine::boot(counting(as_guest::on_nvme(as_guest::metal(KERNEL, 1)).memory_mib(GUEST_MIB)))?;
    // The ordinary guest finds its first process on its root.
    source.put("/root/database", SCRIPT, 0o755)?;
    source.start_postgres()?;
    source.sh("sync")?;
    let (root, tools) = (disk(&source, "mercury-root")?, disk(&source, "mercury-lab")?);
    as_guest::checkpoint(&source)?;

    let spec = counting(as_guest::host_with_disks(KERNEL, &source, KERNEL)?.memory_mib(HOST_MIB));
    let spec = guests::arguments()?.iter().fold(spec, |spec, word| spec.qemu_arg(word));
    let host = source.boot_in_its_place(spec)?;
    for (name, text) in [("database", SCRIPT), ("worked", WORKED)] {
        host.put(&format!("/root/{name}"), text, 0o755)?;
    }
    // A CPU that polls instead of halting works for as long as there is time.
    host.sh("modprobe kvm_amd; echo 0 > /sys/module/kvm/parameters/halt_poll_ns; \
         mkdir /run/guests && mount -o ro $(blkid -L mercury-guests) /run/guests")?;
    let disks = format!("--disk {root}={ROOT} --disk {tools}={ARTEFACTS},ro");
    let arrived = in_arrived(&host, &disks, samples)?;
    let ordinary = in_ordinary(&host, samples)?;
    host.check_health()?;
    Ok(Database::of(&arrived, &ordinary))
}

fn counting(spec: Spec) -> Spec {
    spec.cpus(1).icount(Icount::Exact)
}

/// Returns the cost in the machine of the image, whose database has run since before its instant.
fn in_arrived(host: &Machine, disks: &str, samples: usize) -> Result<Vec<f64>> {
    let guest = Guest::start(host, &format!("--console socket {disks}"))?;
    let listed = host.mercury("guests list")?;
    let pid = listed["guests"][0]["pid"].as_u64();
    let pid = pid.ok_or_else(|| Error::Host(format!("no guest has a monitor: {listed}")))?;
    let run = || {
        let line = format!("pgbench -n -t {TRANSACTIONS} --random-seed=1 bench");
        let said = guest.link().command(&line).timeout(LIMIT).run()?.check()?.stdout;
        all_done(&said)
    };
    let costs = sample("the arrived guest", host, pid, samples, run)?;
    guest.sh("lab-postgres stop")?;
    guest.power_off()?;
    Ok(costs)
}

/// Returns the cost in an ordinary guest, on the disk that the arrived one has left.
fn in_ordinary(host: &Machine, samples: usize) -> Result<Vec<f64>> {
    let drive = format!("DRIVE=file={ROOT},format=raw,cache=writeback MEMORY={GUEST_MIB}");
    let mut machine = host.spawn(&format!("exec env {drive} /root/database"))?;
    machine.wait_output("ready", LIMIT)?;
    // The script's process has become QEMU.
    let pid = u64::from(machine.pid());
    let costs = sample("the ordinary guest", host, pid, samples, || ordered(&mut machine))?;
    machine.write_stdin(b"0\n")?;
    machine.wait(LIMIT)?.check()?;
    Ok(costs)
}

/// Lets the ordinary guest carry transactions out.
fn ordered(machine: &mut Background) -> Result<()> {
    let before = machine.output_so_far()?.len();
    let done = machine.output_so_far()?.matches("done").count();
    machine.write_stdin(format!("{TRANSACTIONS}\n").as_bytes())?;
    machine.wait_output_times("done", done + 1, LIMIT)?;
    all_done(&machine.output_so_far()?[before..])
}

/// Runs once to warm up, and then measures the instructions of a process for each transaction.
fn sample(
    what: &str,
    host: &Machine,
    pid: u64,
    samples: usize,
    mut run: impl FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let worked = || -> Result<f64> {
        let said = host.sh(&format!("/root/worked {pid}"))?;
        said.trim().parse().map_err(|_| Error::Host(format!("no time that {what} has worked: {said}")))
    };
    run()?;
    let mut costs = Vec::new();
    for _ in 0..samples {
        let before = worked()?;
        run()?;
        let cost = (worked()? - before) / f64::from(TRANSACTIONS);
        println!("    {what}: {cost:.0} instructions for a transaction");
        costs.push(cost);
    }
    Ok(costs)
}

/// Refuses a report of pgbench's in which a transaction is missing.
fn all_done(said: &str) -> Result<()> {
    let measured = database::result(said)?;
    if measured.done == u64::from(TRANSACTIONS) && measured.failed == 0 {
        return Ok(());
    }
    Err(Error::Unhealthy(format!("not all transactions were done: {said}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_more_is_slower() {
        let database = Database::of(&[100.0, 104.0, 102.0], &[96.9, 96.0, 98.0]);
        assert_eq!((database.arrived_instructions, database.samples), (102, 3));
        assert!((database.arrived_over_ordinary - 0.95).abs() < 1e-9, "{database:?}");
        assert!((database.noise - 0.04).abs() < 1e-9, "{database:?}");
    }

    #[test]
    fn a_report_without_all_transactions_is_none() {
        let report = |done: u32| {
            format!(
                "number of transactions actually processed: {done}/{TRANSACTIONS}\n\
                 number of failed transactions: 0 (0.000%)\ntps = 21.7 (without initial connection time)\n"
            )
        };
        assert!(all_done(&report(TRANSACTIONS)).is_ok());
        assert!(all_done(&report(TRANSACTIONS - 1)).is_err() && all_done("ERROR").is_err());
    }
}
