//! A Linux guest's boot, and PostgreSQL in the guest, natively and above the hypervisor by turns.
//! The cost is in instructions: those of stock QEMU's process, with its guest and with KVM's work
//! for it, on a machine with one CPU that counts them.

use serde::Serialize;

use super::{LIMIT, runs_of_guests};
use crate::{
    counts::counting_machine,
    stats::{Ratio, median, rounded},
};
use mercury_lab::{
    command::Background,
    error::{Error, Result},
    guests,
    machine::Machine,
    spec::Qemu,
};

const MEMORY_MIB: u32 = 2048;
/// pgbench's transactions in one sample.
const TRANSACTIONS: u32 = 50;

const FILES: [(&str, &[u8]); 5] = [
    ("boot", include_bytes!("../../../guest/kvm/boot")),
    ("database", include_bytes!("../../../guest/kvm/database")),
    ("initrd", include_bytes!("../../../guest/kvm/initrd")),
    ("init.c", include_bytes!("../../../guest/kvm/init.c")),
    ("worked", include_bytes!("../../../guest/kvm/worked")),
];

/// The number of measurements of each workload, both ways.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    pub boots: usize,
    pub samples: usize,
}

/// A guest's workload, by turns natively and above the hypervisor.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// Attached ÷ native, of each round.
    pub attached_over_native: Ratio,
    /// The largest difference between two native measurements.
    #[serde(serialize_with = "rounded")]
    pub noise: f64,
    pub native_instructions: u64,
    pub attached_instructions: u64,
    /// Entries of the guest for one workload while attached; the median.
    pub runs_of_guest: u64,
    /// The number of rounds, each way.
    pub rounds: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct Linux {
    /// The boot of Debian's kernel: from its first instruction to its power-off by a first process
    /// that does nothing else.
    pub boot: Compared,
    /// A transaction of pgbench's TPC-B.
    pub pgbench: Compared,
}

/// Instructions, and entries of the guest, of one round: natively and attached.
#[derive(Clone, Copy, Debug)]
struct Round {
    native: f64,
    attached: f64,
    runs: f64,
}

/// Measures both workloads.
///
/// # Errors
/// If a machine fails.
pub fn measure(rounds: Rounds) -> Result<Linux> {
    let spec = counting_machine(MEMORY_MIB).qemu_version(Qemu::Newer);
    let machine = Machine::boot(guests::arguments()?.iter().fold(spec, |spec, word| spec.qemu_arg(word)))?;
    for (name, text) in FILES {
        machine.put(&format!("/root/{name}"), text, 0o755)?;
    }
    // A CPU that polls instead of halting works for as long as there is time.
    machine.sh("modprobe kvm_amd; echo 0 > /sys/module/kvm/parameters/halt_poll_ns; \
         mkdir /run/guests && mount -o ro $(blkid -L mercury-guests) /run/guests")?;
    machine.mercury("load")?;
    boot(&machine)?;
    let boot = by_turns(&machine, rounds.boots, "boot", || boot(&machine))?;
    machine.sh("sync; mount -o remount,ro /")?;
    let mut database = machine.spawn("exec /root/database")?;
    database.wait_output("ready", LIMIT)?;
    let mut sample = || transactions(&machine, &mut database);
    sample()?;
    let pgbench = by_turns(&machine, rounds.samples, "pgbench", sample)?;
    database.write_stdin(b"0\n")?;
    database.wait(LIMIT)?.check()?;
    machine.check_health()?;
    machine.shut_down()?;
    Ok(Linux { boot, pgbench })
}

fn by_turns(
    machine: &Machine,
    rounds: usize,
    what: &str,
    mut cost: impl FnMut() -> Result<f64>,
) -> Result<Compared> {
    let mut all = Vec::new();
    for _ in 0..rounds {
        let native = cost()?;
        machine.mercury("attach")?;
        let before = runs_of_guests(machine)?;
        let attached = cost()?;
        let runs = runs_of_guests(machine)? - before;
        machine.mercury("detach")?;
        println!("    {what}: {native:.0} natively, {attached:.0} attached, {runs} entries");
        all.push(Round { native, attached, runs });
    }
    Ok(compared(&all))
}

fn compared(rounds: &[Round]) -> Compared {
    let all = |of: fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let native = all(|round| round.native);
    let (least, most) =
        native.iter().fold((f64::MAX, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
    Compared {
        attached_over_native: Ratio::of(&all(|round| round.attached / round.native)),
        noise: most / least - 1.0,
        native_instructions: median(&native) as u64,
        attached_instructions: median(&all(|round| round.attached)) as u64,
        runs_of_guest: median(&all(|round| round.runs)) as u64,
        rounds: rounds.len(),
    }
}

/// Returns QEMU's instructions for a guest's whole life.
fn boot(machine: &Machine) -> Result<f64> {
    let output = machine.command("/root/boot 1 0 /root/worked").timeout(LIMIT).run()?.check()?;
    let unexpected = || Error::Host(format!("a boot said {}{}", output.stdout, output.stderr));
    if !output.stdout.contains("cpus 1 processes ") || !output.stdout.contains(" wrong 0") {
        return Err(unexpected());
    }
    let worked = output.stderr.rsplit("worked ").next().and_then(|count| count.trim().parse().ok());
    worked.ok_or_else(unexpected)
}

/// Returns QEMU's instructions for a transaction.
fn transactions(machine: &Machine, database: &mut Background) -> Result<f64> {
    // The script's process has become QEMU.
    let pid = database.pid();
    let worked = || -> Result<f64> {
        let said = machine.sh(&format!("/root/worked {pid}"))?;
        said.parse().map_err(|_| Error::Host(format!("no time that QEMU has worked: {said}")))
    };
    let done = |said: &str| said.matches("done").count();
    let (before, rounds) = (worked()?, done(&database.output_so_far()?));
    database.write_stdin(format!("{TRANSACTIONS}\n").as_bytes())?;
    database.wait_output_times("done", rounds + 1, LIMIT)?;
    let cost = (worked()? - before) / f64::from(TRANSACTIONS);
    let said = database.output_so_far()?;
    let all = format!("actually processed: {TRANSACTIONS}/{TRANSACTIONS}");
    if said.matches(&all).count() == rounds + 1 && !said.contains("ERROR") {
        return Ok(cost);
    }
    Err(Error::Unhealthy(format!("not all transactions: {said}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_compared_with_themselves() {
        let round = |native: f64, ratio: f64| Round { native, attached: native * ratio, runs: 7.0 };
        let compared = compared(&[round(100.0, 1.02), round(110.0, 1.01), round(105.0, 1.03)]);
        assert!((compared.attached_over_native.median - 1.02).abs() < 1e-9);
        assert!((compared.noise - 0.1).abs() < 1e-9);
        assert_eq!((compared.native_instructions, compared.runs_of_guest, compared.rounds), (105, 7, 3));
    }
}
