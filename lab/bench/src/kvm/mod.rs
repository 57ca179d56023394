//! `lab bench kvm`: the figures of KVM above the hypervisor.

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

/// The heading of this part of the page.
pub const HEADING: &str = "## KVM above the hypervisor";
/// Upper bound of the instructions that an attached hypervisor adds to an exit of a guest.
pub const ADDED_AT_MOST: f64 = 100.0;
/// Upper bound of the world switches of an exit.
pub const SWITCHES_AT_MOST: f64 = 3.05;
/// The guest's exits in one sample, and the number of samples.
const EXITS: u64 = 20_000;
const SAMPLES: u64 = 5;
const MEMORY_MIB: u32 = 768;
const SCRIPT: &str = include_str!("../../../guest/kvm/exits");
const COUNTER: &str = include_str!("../../../guest/kvm/counter");
const LIMIT: Duration = Duration::from_secs(900);

#[derive(Clone, Debug, Serialize)]
pub struct Kvm {
    /// Instructions of one exit of a guest and back: attached minus native.
    #[serde(serialize_with = "rounded")]
    pub added_instructions_per_exit: f64,
    #[serde(serialize_with = "rounded")]
    pub exit_instructions_native: f64,
    #[serde(serialize_with = "rounded")]
    pub exit_instructions_attached: f64,
    /// The same difference after a detach.
    #[serde(serialize_with = "rounded")]
    pub added_after_detach: f64,
    /// VMRUN instructions for each exit of the guest, executed by any level; natively one.
    #[serde(serialize_with = "rounded")]
    pub world_switches_per_exit: f64,
    /// Cycles of attach and detach under two virtual machines.
    pub cycles_under_guests: u64,
    /// Virtual machines that counted wrongly, and complaints of the kernel.
    pub errors: u64,
    /// Exits of those virtual machines to their processes meanwhile.
    pub exits_meanwhile: u64,
    /// The figures of a Linux guest at work.
    pub linux: Linux,
    /// The costs of touching a guest's pages, one after the other.
    pub touches: Vec<Touch>,
}

/// The amount of measurements.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Cycles under virtual machines.
    pub cycles: u64,
    /// Rounds of a Linux guest.
    pub rounds: Rounds,
}

/// Measures all figures.
///
/// # Errors
/// If a machine fails.
pub fn measure(plan: Plan) -> Result<Kvm> {
    let Plan { cycles, rounds } = plan;
    live::say("Exits of KVM's guests in instructions, on one CPU");
    let exits = exits(EXITS, SAMPLES)?;
    live::say(&format!("{cycles} attaches and detaches under two virtual machines, on two CPUs"));
    let (errors, exits_meanwhile) = under_guests(cycles)?;
    live::say("A Linux guest's boot and PostgreSQL in it, in instructions, on one CPU");
    let linux = linux::measure(rounds)?;
    live::say("A guest's pages under a snapshot, in instructions, on one CPU");
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

/// The cost of a guest's exits, in instructions of the host.
#[derive(Clone, Copy, Debug)]
pub struct Exits {
    /// Instructions of an exit and back, natively.
    pub native: f64,
    pub attached: f64,
    pub after: f64,
    /// VMRUN instructions for each exit while attached.
    pub world_switches: f64,
}

/// Counts the exits: the minimum of so many samples of so many exits.
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

/// Returns the instructions of an exit. A nanosecond is an instruction.
fn exit(machine: &Machine, number: u64, samples: u64) -> Result<f64> {
    let output = machine.command(&format!("/root/exits {number} {samples}")).timeout(LIMIT).run()?.check()?;
    output.stdout.trim().parse().map_err(|_| Error::Host(format!("no number: {}", output.stdout)))
}

/// Returns the number of VMRUN instructions so far. Each VMRUN of the system is the guest's entry
/// and, after the guest's exit, one of the hypervisor's. The same holds for each STGI.
fn switches(machine: &Machine) -> Result<f64> {
    let exits = Exited::so_far(machine)?;
    Ok(2.0 * exits.of("guest-run") + exits.of("guest-end") + exits.of("held-nmi"))
}

/// Returns the number of entries of guests so far.
fn runs_of_guests(machine: &Machine) -> Result<f64> {
    Ok(Exited::so_far(machine)?.of("guest-run"))
}

/// The hypervisor's counters.
struct Exited(Value);

impl Exited {
    fn so_far(machine: &Machine) -> Result<Self> {
        machine.mercury("status").map(Self)
    }

    /// Returns a counter's sum over all CPUs.
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

/// Returns this part of the page.
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
        `cargo run -p mercury-lab-bench -- bench kvm` writes this section alone. A guest executes CPUID, \
        which KVM\n\
        answers in the kernel. The figures are instructions, on one CPU. The goals: an exit takes at most\n\
        {ADDED_AT_MOST} more ({}), with at most three world switches ({}: {:.2}; natively one).\n\n\
        {}\n\
        Attach and detach {} times under two counting virtual machines: {} errors, \
        and {} exits to their processes\n\
        meanwhile.\n\n\
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
        "The Linux guest runs this machine's own kernel in stock QEMU on KVM, on one CPU. \
        For PostgreSQL it has the\n\
        machine's root disk (NVMe, with writes kept in memory). The figures are the instructions of QEMU's \
        process,\n\
        with its guest and with KVM. Waiting does not count (`halt_poll_ns=0`). \
        Native and attached rounds take turns,\n\
        {} and {} of them; the figures are medians. Noise is the largest difference between native \
        rounds.\n\n{}",
        linux.boot.rounds,
        linux.pgbench.rounds,
        table(&header, &rows),
    )
}

fn beneath_a_snapshot(touches: &[Touch]) -> String {
    let row = |touch: &Touch| vec![touch.what.to_owned(), format!("{:.1}", touch.instructions)];
    format!(
        "The cost of a live snapshot for a guest that touches 4,096 pages, one after the other. Four of the\n\
        instructions of each touch are the guest's own, and each touch has a share of the timer's ticks. \
        A first write\n\
        under a snapshot is mostly the copy.\n\n{}",
        table(&["instructions for a page", ""], &touches.iter().map(row).collect::<Vec<_>>()),
    )
}

/// Returns the promises, and for each true if it is kept.
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
        (figures.errors == 0, "an error occurred under virtual machines"),
    ]
}

/// Returns figures that keep the promises.
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
