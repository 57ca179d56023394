//! `make demo`: attach and detach under a machine that is hard at work, and a table at the end.
//!
//! The machine has four CPUs, PostgreSQL under pgbench, and a CPU-bound job with known results.
//! First the database runs alone on a machine that has never seen Mercury; then attached; then
//! while the mode is switched hundreds of times; then detached. Nothing may be lost, nothing may be
//! wrong, and the kernel may not complain.

use std::time::Duration;

use serde_json::Value;

use super::{
    database::{self, Measured},
    switch_report as report, tell,
};
use mercury_lab::{
    command::Background,
    error::{Error, Result},
    kernel::Kernel,
    live::{Line, say},
    machine::Machine,
    progress,
    spec::{Spec, Vendor},
};

const CPUS: u32 = 4;
const MEMORY_MIB: u32 = 1536;
pub(super) const CYCLES: u32 = 200;
const PHASE: Duration = Duration::from_secs(8);
const LIMIT: Duration = Duration::from_secs(600);
/// Interval between two readings of a running command's output.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The observations of the demonstration.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) machine: String,
    pub(super) vendor: Vendor,
    pub(super) never_loaded: Measured,
    pub(super) attached: Measured,
    pub(super) switching: Measured,
    pub(super) after_detach: Measured,
    /// The output of `mercury bench switch --json`.
    pub(super) switches: Value,
    /// The output of `mercury status --json` at the end.
    pub(super) status: Value,
    /// Exits while attached and left alone, without the driver's own hypercalls and VMX's CPUID.
    pub(super) steady_exits: u64,
    pub(super) compute_rounds: u64,
    pub(super) balances_agree: bool,
    /// The kernel's complaint, if any.
    pub(super) complaint: Option<String>,
}

/// Shows the demonstration.
///
/// # Errors
/// If the machine cannot be booted, or anything was lost, wrong or complained about.
pub fn run() -> Result<()> {
    say("A machine with stock Debian 12: building what is missing, then booting it");
    let spec = Spec::new(Kernel::BookwormCloud).cpus(CPUS).memory_mib(MEMORY_MIB);
    let summary = spec.summary();
    let machine = Machine::boot(spec)?;
    say(&format!("It runs {} (up in {:.1} s)", machine.kernel(), machine.boot_time().as_secs_f32()));
    let seen = watch(&machine, summary)?;
    machine.shut_down()?;
    report::print(&seen);
    report::verdict(&seen)
}

fn watch(machine: &Machine, summary: String) -> Result<Seen> {
    progress::step("starting PostgreSQL", || machine.start_postgres())?;
    let work = machine.spawn("nice -n 5 mercury-workload compute --until-file /run/demo-ends")?;

    say("PostgreSQL and a CPU-bound job, on a machine that has never seen Mercury");
    let never_loaded = measure(machine, PHASE)?;

    say("mercury attach: the hypervisor is put under the running kernel");
    tell(&machine.sh("mercury attach")?);
    let exits = || Ok(foreign_exits(machine.vendor(), &machine.mercury("status")?));
    let before = exits()?;
    let attached = measure(machine, PHASE)?;
    let steady_exits = exits()?.saturating_sub(before);
    say("mercury detach: the hypervisor is taken out again");
    tell(&machine.sh("mercury detach")?);

    say(&format!("Now {CYCLES} attaches and {CYCLES} detaches on each CPU, under the same load"));
    let (switches, switching) = switch(machine)?;

    say("Detached; the same machine once more, native");
    let after_detach = measure(machine, PHASE)?;

    machine.sh("touch /run/demo-ends")?;
    let compute = work.wait(LIMIT)?.check()?;
    Ok(Seen {
        machine: summary,
        vendor: machine.vendor(),
        never_loaded,
        attached,
        switching,
        after_detach,
        switches,
        status: machine.mercury("status")?,
        steady_exits,
        compute_rounds: json(&compute.stdout)?["passes"].as_u64().unwrap_or(0),
        balances_agree: database::balances_agree(machine)?,
        complaint: machine.check_health().err().map(|error| error.to_string()),
    })
}

/// Runs pgbench once, and shows its progress.
fn measure(machine: &Machine, time: Duration) -> Result<Measured> {
    let mut run = database::start(machine, time)?;
    follow(&mut run, database::progress)?;
    database::result(&run.wait(LIMIT)?.check()?.stdout)
}

/// Switches the mode, while pgbench runs until the switches are done.
fn switch(machine: &Machine) -> Result<(Value, Measured)> {
    let mut database = database::start(machine, LIMIT)?;
    while database::progress(&database.errors_so_far()?).is_none() && !database.has_ended()? {
        std::thread::sleep(POLL_INTERVAL);
    }
    let mut bench = machine.spawn(&format!("mercury --json bench switch --cycles {CYCLES}"))?;
    let attaches = |status: &Value| status["cpus"][0]["attaches"].as_u64().unwrap_or(0);
    let start = attaches(&machine.mercury("status")?);
    follow(&mut bench, |_| {
        let status = machine.mercury("status").ok()?;
        Some(format!("{} of {CYCLES} cycles", attaches(&status).saturating_sub(start)))
    })?;
    let switches = json(&bench.wait(LIMIT)?.check()?.stdout)?;
    database::stop(&mut database)?;
    let measured = database::result(&database.wait(LIMIT)?.stdout)?;
    Ok((switches, measured))
}

/// Shows the text that `text` makes from a command's output, until the command has ended.
fn follow(run: &mut Background, mut text: impl FnMut(&str) -> Option<String>) -> Result<()> {
    let mut line = Line::begin();
    while !run.has_ended()? {
        std::thread::sleep(POLL_INTERVAL);
        if let Some(text) = text(&run.errors_so_far()?) {
            line.show(&text);
        }
    }
    Ok(())
}

/// Returns the unexpected exits of all CPUs: all but the driver's hypercalls, and CPUID, which VMX
/// always intercepts.
fn foreign_exits(vendor: Vendor, status: &Value) -> u64 {
    let cpus = status["cpus"].as_array().map_or(&[][..], Vec::as_slice);
    let expected = match vendor {
        Vendor::Amd => &["hypercall"][..],
        Vendor::Intel => &["hypercall", "cpuid"],
    };
    let of_cpu = |cpu: &Value| {
        let own: u64 = expected.iter().filter_map(|reason| cpu["exits"][reason].as_u64()).sum();
        cpu["exits_total"].as_u64().unwrap_or(0).saturating_sub(own)
    };
    cpus.iter().map(of_cpu).sum()
}

fn json(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::Host(format!("no JSON ({error}): {text}")))
}
