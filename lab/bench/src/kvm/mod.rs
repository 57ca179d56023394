//! KVM above the hypervisor in figures: `lab bench kvm`.

mod linux;
mod pages;

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::{
    counts::counting_machine,
    stats::{Ratio, rounded},
};
pub use linux::Rounds;
use linux::{Compared, Linux};
use mercury_lab::{
    error::{Error, Result},
    kernel::Kernel,
    live,
    machine::Machine,
    markdown::{table, thousands},
    spec::Spec,
};
use pages::Touch;
pub(super) use pages::touched;

/// The heading of its part of the page.
pub const HEADING: &str = "## KVM above the hypervisor";
/// Instructions that an exit of a guest may take more while the hypervisor is there.
pub const ADDED_AT_MOST: f64 = 100.0;
/// World switches of an exit, at most.
pub const SWITCHES_AT_MOST: f64 = 3.05;
/// The guest's exits in one sample, and samples.
const EXITS: u64 = 20_000;
const SAMPLES: u64 = 5;
const MEMORY_MIB: u32 = 768;
const SCRIPT: &str = include_str!("../../../guest/kvm/exits");
const COUNTER: &str = include_str!("../../../guest/kvm/counter");
const LIMIT: Duration = Duration::from_secs(900);

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct Kvm {
    /// Of one exit of a guest and back, attached less native.
    #[serde(serialize_with = "rounded")]
    pub added_instructions_per_exit: f64,
    /// Native.
    #[serde(serialize_with = "rounded")]
    pub exit_instructions_native: f64,
    /// Attached.
    #[serde(serialize_with = "rounded")]
    pub exit_instructions_attached: f64,
    /// After a detach, less native.
    #[serde(serialize_with = "rounded")]
    pub added_after_detach: f64,
    /// VMRUN, by whomever, for each exit of the guest; natively one.
    #[serde(serialize_with = "rounded")]
    pub world_switches_per_exit: f64,
    /// Attach and detach beneath two virtual machines.
    pub cycles_under_guests: u64,
    /// Virtual machines that counted wrongly, and complaints of the kernel's.
    pub errors: u64,
    /// Exits of those virtual machines to their processes meanwhile.
    pub exits_meanwhile: u64,
    /// A Linux guest at work.
    pub linux: Linux,
    /// Of a guest's pages, one after the other.
    pub touches: Vec<Touch>,
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Beneath virtual machines.
    pub cycles: u64,
    /// Of a Linux guest.
    pub rounds: Rounds,
}

/// Measures all of it.
///
/// # Errors
/// If a machine fails.
pub fn measure(plan: Plan) -> Result<Kvm> {
    let Plan { cycles, rounds } = plan;
    live::say("Exits of KVM's guests in instructions, on one CPU");
    let exits = exits(EXITS, SAMPLES)?;
    live::say(&format!("{cycles} times away and back beneath two virtual machines, on two CPUs"));
    let (errors, exits_meanwhile) = under_guests(cycles)?;
    live::say("A Linux guest's boot and PostgreSQL in it, in instructions, on one CPU");
    let linux = linux::measure(rounds)?;
    live::say("A guest's pages beneath a snapshot, in instructions, on one CPU");
    let touches = pages::measure()?;
    Ok(Kvm {
        added_instructions_per_exit: exits.attached - exits.native,
        exit_instructions_native: exits.native,
        exit_instructions_attached: exits.attached,
        added_after_detach: exits.after - exits.native,
        world_switches_per_exit: exits.world_switches,
        cycles_under_guests: cycles,
        errors,
        exits_meanwhile,
        linux,
        touches,
    })
}

/// Exits of a guest, in instructions of the host's.
#[derive(Clone, Copy, Debug)]
pub struct Exits {
    /// One and back, native.
    pub native: f64,
    /// Attached.
    pub attached: f64,
    /// After a detach.
    pub after: f64,
    /// VMRUN for each while attached.
    pub world_switches: f64,
}

/// Counts them: the fewest of so many samples of so many exits.
///
/// # Errors
/// If the machine fails.
pub fn exits(number: u64, samples: u64) -> Result<Exits> {
    let machine = Machine::boot(counting_machine(MEMORY_MIB))?;
    machine.put("/root/exits", SCRIPT.as_bytes(), 0o755)?;
    machine.sh("modprobe kvm_amd")?;
    machine.mercury("load")?;
    let exit = || exit(&machine, number, samples);
    let native = exit()?;
    machine.mercury("attach")?;
    let before = switches(&machine)?;
    let attached = exit()?;
    let world_switches = (switches(&machine)? - before) / (number * (samples + 1)) as f64;
    machine.mercury("detach")?;
    let after = exit()?;
    machine.check_health()?;
    machine.shut_down()?;
    Ok(Exits { native, attached, after, world_switches })
}

/// A nanosecond is an instruction.
fn exit(machine: &Machine, number: u64, samples: u64) -> Result<f64> {
    let output = machine.command(&format!("/root/exits {number} {samples}")).timeout(LIMIT).run()?.check()?;
    output.stdout.trim().parse().map_err(|_| Error::Host(format!("no number: {}", output.stdout)))
}

/// VMRUN so far: each of the system's is the guest's and, after its exit, one of the hypervisor's; so is each STGI.
fn switches(machine: &Machine) -> Result<f64> {
    let exits = Exited::so_far(machine)?;
    Ok(2.0 * exits.of("guest-run") + exits.of("guest-end") + exits.of("held-nmi"))
}

/// Entries of guests so far.
fn runs_of_guests(machine: &Machine) -> Result<f64> {
    Ok(Exited::so_far(machine)?.of("guest-run"))
}

/// What the hypervisor has counted.
struct Exited(Value);

impl Exited {
    fn so_far(machine: &Machine) -> Result<Self> {
        machine.mercury("status").map(Self)
    }

    /// Of all CPUs.
    fn of(&self, reason: &str) -> f64 {
        let cpus = self.0["cpus"].as_array().map(Vec::as_slice).unwrap_or_default();
        cpus.iter().filter_map(|cpu| cpu["exits"][reason].as_f64()).sum()
    }
}

fn under_guests(cycles: u64) -> Result<(u64, u64)> {
    let machine = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(MEMORY_MIB))?;
    machine.put("/root/counter", COUNTER.as_bytes(), 0o755)?;
    machine.sh("modprobe kvm_amd")?;
    machine.mercury("load")?;
    let mut guests = [machine.spawn("/root/counter")?, machine.spawn("/root/counter")?];
    for guest in &mut guests {
        guest.wait_output("made", LIMIT)?;
    }
    let report = machine
        .command(&format!("mercury --json bench switch --cycles {cycles}"))
        .timeout(LIMIT)
        .run()?
        .check()?;
    let report: Value = serde_json::from_str(&report.stdout).unwrap_or_default();
    if report["cycles"].as_u64().is_some_and(|done| done != cycles) {
        return Err(Error::Unhealthy(format!("not all cycles: {report}")));
    }
    let (mut errors, mut exits) = (0, 0);
    for guest in guests {
        guest.close_stdin()?;
        let output = guest.wait(LIMIT)?;
        let count =
            output.stdout.rsplit("counted ").next().and_then(|count| count.trim().parse::<u64>().ok());
        match count.filter(|_| output.success()) {
            Some(count) => exits += count,
            None => errors += 1,
        }
    }
    errors += u64::from(machine.check_health().is_err());
    machine.shut_down()?;
    Ok((errors, exits))
}

/// This part of the page.
#[must_use]
pub fn section(figures: &Kvm) -> String {
    let kept = |is: bool| if is { "kept" } else { "**missed**" };
    let rows = [
        ("an exit and back, native", figures.exit_instructions_native),
        ("attached", figures.exit_instructions_attached),
        ("**added**", figures.added_instructions_per_exit),
        ("added after a detach", figures.added_after_detach),
    ];
    let rows: Vec<Vec<String>> =
        rows.iter().map(|(what, number)| vec![(*what).to_owned(), format!("{number:.1}")]).collect();
    format!(
        "{HEADING}\n\n\
        Written by `make bench`, or alone by `cargo run -p mercury-lab-bench -- bench kvm`. A guest executes CPUID, which KVM answers in\n\
        the kernel; instructions, on one CPU. The goals: at most {ADDED_AT_MOST} more for each exit ({}), in at most three world switches\n\
        ({}: {:.2}; natively one).\n\n\
        {}\n\
        Attach and detach {} times beneath two virtual machines that count: {} errors, {} exits to their processes meanwhile.\n\n\
        {}\n{}",
        kept(figures.added_instructions_per_exit <= ADDED_AT_MOST),
        kept(figures.world_switches_per_exit <= SWITCHES_AT_MOST),
        figures.world_switches_per_exit,
        table(&["instructions", ""], &rows),
        thousands(figures.cycles_under_guests),
        figures.errors,
        thousands(figures.exits_meanwhile),
        at_work(&figures.linux),
        beneath_a_snapshot(&figures.touches),
    )
}

fn at_work(linux: &Linux) -> String {
    let row = |what: &str, compared: &Compared| {
        let Ratio { median, low, high } = compared.attached_over_native;
        vec![
            what.to_owned(),
            thousands(compared.native_instructions),
            thousands(compared.attached_instructions),
            format!("{median:.4}"),
            format!("{low:.4} – {high:.4}"),
            format!("{:.4}", compared.noise),
            thousands(compared.runs_of_guest),
        ]
    };
    let rows =
        [row("boot and power-off", &linux.boot), row("pgbench, a transaction (TPC-B)", &linux.pgbench)];
    let header =
        ["instructions", "native", "attached", "attached ÷ native", "95 %", "noise", "entries of the guest"];
    format!(
        "A Linux guest: stock QEMU on KVM, with this machine's own kernel on one CPU, and for PostgreSQL its root disk (NVMe, what is\n\
        written kept in memory). What QEMU's process works, with its guest and with KVM, in instructions; waiting is no work\n\
        (`halt_poll_ns=0`). Native and attached by turns, {} and {} rounds; medians; noise is the most that native ones differ.\n\n{}",
        linux.boot.rounds,
        linux.pgbench.rounds,
        table(&header, &rows),
    )
}

fn beneath_a_snapshot(touches: &[Touch]) -> String {
    let row = |touch: &Touch| vec![touch.what.to_owned(), format!("{:.1}", touch.instructions)];
    format!(
        "What a live snapshot costs a guest: it touches one page after the other, 4,096 of them. Four of the instructions of each\n\
        are the guest's own, and a share of what comes every tick is in it. A first write beneath a snapshot is mostly the copy.\n\n{}",
        table(&["instructions for a page", ""], &touches.iter().map(row).collect::<Vec<_>>()),
    )
}

/// What is promised, and whether it is kept.
#[must_use]
pub fn promises(figures: &Kvm) -> [(bool, &'static str); 3] {
    [
        (
            figures.added_instructions_per_exit <= ADDED_AT_MOST,
            "an exit of KVM's guest takes more than promised",
        ),
        (
            figures.world_switches_per_exit <= SWITCHES_AT_MOST,
            "an exit of KVM's guest takes more than three world switches",
        ),
        (figures.errors == 0, "something went wrong beneath virtual machines"),
    ]
}

/// Figures that keep what is promised.
#[cfg(test)]
pub fn kept_promises() -> Kvm {
    let ratio = Ratio { median: 1.01, low: 1.0, high: 1.02 };
    let compared = Compared {
        attached_over_native: ratio,
        noise: 0.01,
        native_instructions: 1000,
        attached_instructions: 1010,
        runs_of_guest: 3,
        rounds: 3,
    };
    Kvm {
        added_instructions_per_exit: 60.0,
        exit_instructions_native: 3000.0,
        exit_instructions_attached: 3060.0,
        added_after_detach: 0.0,
        world_switches_per_exit: 3.0,
        cycles_under_guests: 2000,
        errors: 0,
        exits_meanwhile: 10,
        linux: Linux { boot: compared.clone(), pgbench: compared },
        touches: vec![Touch { what: "natively", instructions: 4.0 }],
    }
}
