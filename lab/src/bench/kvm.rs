//! KVM above the hypervisor in figures: `lab bench kvm`.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::{counts::counting_machine, stats::rounded};
use crate::{
    error::{Error, Result},
    kernel::Kernel,
    live,
    machine::Machine,
    markdown::{table, thousands},
    spec::Spec,
};

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
const SCRIPT: &str = include_str!("../../guest/kvm/exits");
const COUNTER: &str = include_str!("../../guest/kvm/counter");
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
}

/// Measures all of it.
///
/// # Errors
/// If a machine fails.
pub fn measure(cycles: u64) -> Result<Kvm> {
    live::say("Exits of KVM's guests in instructions, on one CPU");
    let exits = exits(EXITS, SAMPLES)?;
    live::say(&format!("{cycles} times away and back beneath two virtual machines, on two CPUs"));
    let (errors, exits_meanwhile) = under_guests(cycles)?;
    Ok(Kvm {
        added_instructions_per_exit: exits.attached - exits.native,
        exit_instructions_native: exits.native,
        exit_instructions_attached: exits.attached,
        added_after_detach: exits.after - exits.native,
        world_switches_per_exit: exits.world_switches,
        cycles_under_guests: cycles,
        errors,
        exits_meanwhile,
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
    let status = machine.mercury("status")?;
    let sum = |name: &str| -> f64 {
        let cpus = status["cpus"].as_array().map(Vec::as_slice).unwrap_or_default();
        cpus.iter().filter_map(|cpu| cpu["exits"][name].as_f64()).sum()
    };
    Ok(2.0 * sum("guest-run") + sum("guest-end") + sum("held-nmi"))
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
        Written by `make bench`, or alone by `cargo run -p mercury-lab -- bench kvm`. A guest executes CPUID, which KVM answers in\n\
        the kernel; instructions, on one CPU. The goals: at most {ADDED_AT_MOST} more for each exit ({}), in at most three world switches\n\
        ({}: {:.2}; natively one).\n\n\
        {}\n\
        Attach and detach {} times beneath two virtual machines that count: {} errors, {} exits to their processes meanwhile.\n",
        kept(figures.added_instructions_per_exit <= ADDED_AT_MOST),
        kept(figures.world_switches_per_exit <= SWITCHES_AT_MOST),
        figures.world_switches_per_exit,
        table(&["instructions", ""], &rows),
        thousands(figures.cycles_under_guests),
        figures.errors,
        thousands(figures.exits_meanwhile),
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
