//! `make bench`: the paper's tables, measured in the lab, and the numbers that Mercury promises.
//!
//! The figures are of three kinds, none of which needs a quiet host:
//!
//! - instructions, counted on a machine with one CPU;
//! - exits, counted on a machine at work;
//! - ratios of times that were measured side by side.

#![allow(missing_docs)]

pub mod campaign;
pub mod checkpoint;
pub mod counts;
pub mod demo;
pub mod disco;
pub mod exits;
pub mod footprint;
pub mod guard;
pub mod guest;
pub mod hosted;
pub mod intel;
pub mod kvm;
pub mod ltp;
pub mod migration;
pub mod papers;
mod phases;
pub mod previrtualization;
mod report;
mod running;
pub mod soak;
mod stats;
pub mod subnet;
mod suite;
pub mod switch;
pub mod times;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde::Serialize;
use serde_json::Value;

use checkpoint::Checkpoint;
use counts::Memory;
use exits::Exits;
use guard::Guard;
use intel::Intel;
use kvm::Kvm;
use mercury_lab::{
    error::{Context, Error, Result},
    image::Release,
    kernel::Kernel,
    live,
    machine::Machine,
    markdown, paths,
    spec::{QEMU, Spec},
};
use migration::Migration;
use phases::Compared;
use previrtualization::{Effort, Previrtualization};
use suite::Amount;
use switch::Switch;

/// Memory of the machines on which the benchmarks run, in MiB.
const MEMORY_MIB: u32 = 1024;

/// The effort on a small kernel, for docs/ and for a quick run.
const PREVIRTUALIZED: [Effort; 2] =
    [Effort { samples: 5, timed_pairs: 9 }, Effort { samples: 1, timed_pairs: 0 }];
/// The number of rounds for a hosted kernel and the systems like it, for docs/ and for a quick run.
const HOSTED_ROUNDS: [hosted::Rounds; 2] =
    [hosted::Rounds { small: 5, work: 3 }, hosted::Rounds { small: 1, work: 1 }];
/// The size of the measurement between hosted machines, for docs/ and for a quick run.
const SUBNET: [subnet::Plan; 2] =
    [subnet::Plan { rounds: 3, mib: 128, trips: 1000 }, subnet::Plan { rounds: 1, mib: 64, trips: 300 }];

/// The amount of measurements.
#[derive(Clone, Copy, Debug)]
struct Plan {
    counted_rounds: u32,
    timed_rounds: u32,
    exits: Duration,
    switch_cycles: u32,
    intel: Duration,
    kvm: kvm::Plan,
}

const FULL: Plan = Plan {
    counted_rounds: 3,
    timed_rounds: 3,
    exits: Duration::from_secs(60),
    switch_cycles: 200,
    intel: Duration::from_secs(30),
    kvm: kvm::Plan { cycles: 2000, rounds: kvm::Rounds { boots: 3, samples: 5 } },
};
const QUICK: Plan = Plan {
    counted_rounds: 1,
    timed_rounds: 0,
    exits: Duration::from_secs(10),
    switch_cycles: 50,
    intel: Duration::from_secs(10),
    kvm: kvm::Plan { cycles: 100, rounds: kvm::Rounds { boots: 1, samples: 1 } },
};

/// The thoroughness of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// A run for docs/.
    Full,
    /// A quick run for a first impression.
    Quick,
}

/// The figures that a run measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    All,
    /// Figures of checkpoint, snapshot and rollback.
    Checkpoint,
    /// Figures of the guard and of rollbacks from deaths.
    Guard,
    /// The previous part's figures of exits alone.
    GuardExits,
    /// Figures of a bare machine that becomes a guest, and comes back.
    Guest,
    /// Figures of KVM above the hypervisor.
    Kvm,
    /// Figures of moves.
    Migration,
    /// Figures of a switch, and of an exit beneath a snapshot.
    Switch,
    /// Figures of kernels that the afterburner has built from these releases' sources.
    Previrtualization(&'static [Release]),
    /// The previous part's figures on bare machines only.
    Slots(&'static [Release]),
    /// The previous part's figures of hosted kernels and the systems like them.
    Hosted,
    /// The memory of hosted machines.
    Footprint,
    /// Machines that begin as copies of one.
    Disco,
    /// TCP between hosted machines.
    Subnet,
    /// The papers' tables beside the same measurements, with a virtual machine of KVM.
    Papers,
}

impl Part {
    /// The parts that can be measured by themselves, by the names that a person gives.
    pub const NAMED: [(&'static str, Self); 16] = [
        ("switch", Self::Switch),
        ("checkpoint", Self::Checkpoint),
        ("guard", Self::Guard),
        ("guard-exits", Self::GuardExits),
        ("guest", Self::Guest),
        ("kvm", Self::Kvm),
        ("migration", Self::Migration),
        ("previrtualization", Self::Previrtualization(&Release::ALL)),
        ("previrtualization-6.1", Self::Previrtualization(&[Release::Bookworm])),
        ("slots", Self::Slots(&Release::ALL)),
        ("slots-6.1", Self::Slots(&[Release::Bookworm])),
        ("hosted", Self::Hosted),
        ("footprint", Self::Footprint),
        ("disco", Self::Disco),
        ("subnet", Self::Subnet),
        ("papers", Self::Papers),
    ];
}

/// All figures, in the order of docs/benchmarks.json.
#[derive(Debug, Serialize)]
struct Figures {
    attach_instructions: u64,
    detach_instructions: u64,
    exit_roundtrip_instructions: u64,
    steady_exits_per_second: f64,
    /// Ratios of instructions, on one CPU.
    after_detach_over_never_loaded: BTreeMap<String, f64>,
    machine: Description,
    switch: Switch,
    exits_under_postgres: Exits,
    memory: Memory,
    /// Costs in instructions, on one CPU.
    counted: Vec<Compared>,
    /// Costs in nanoseconds of the emulator, on two CPUs.
    timed: Vec<Compared>,
    /// Times by `mercury bench switch` on the machine with two CPUs, in the emulator's
    /// microseconds.
    switch_times_us: SwitchTimes,
    paper: Paper,
    peers: Peers,
    /// Exits on VMX.
    intel: Intel,
    kvm: Kvm,
    previrtualization: Previrtualization,
    checkpoint: Checkpoint,
    migration: Migration,
    guard: Guard,
}

/// The machines on which the figures were measured.
#[derive(Debug, Serialize)]
struct Description {
    emulator: String,
    processor: String,
    kernel: String,
    version: String,
    counted_on: String,
    timed_on: String,
}

#[derive(Debug, Serialize)]
struct SwitchTimes {
    attach: Value,
    detach: Value,
    round_trip_median: f64,
}

/// Figures of JCST 2012: mode switches of section 7.4, and ratios of table 1 (one CPU).
#[derive(Debug, Serialize)]
struct Paper {
    attach_us: f64,
    detach_us: f64,
    /// Ratios: attached ÷ native Linux, and native Mercury ÷ native Linux.
    attached_over_native_linux: BTreeMap<String, f64>,
    native_mercury_over_native_linux: BTreeMap<String, f64>,
}

/// Figures of `jailhouse enable` and `disable` of a root cell, measured on the same emulator, QEMU
/// 7.2.
#[derive(Debug, Serialize)]
struct Peers {
    jailhouse_enable_instructions: u64,
    jailhouse_disable_instructions: u64,
}

const JAILHOUSE: Peers =
    Peers { jailhouse_enable_instructions: 22_900_000, jailhouse_disable_instructions: 12_300 };

/// `lab bench`: measures, and writes docs/benchmarks.md and docs/benchmarks.json. With
/// [`Depth::Quick`] it writes the same files under target/lab/bench/. A part replaces that part of
/// the existing files.
///
/// # Errors
/// If a machine fails, or a promise is broken.
pub fn run(part: Part, depth: Depth) -> Result<()> {
    let directory = match depth {
        Depth::Full => paths::root().join("docs"),
        Depth::Quick => paths::lab_dir("bench")?,
    };
    let (page, json) = (directory.join("benchmarks.md"), directory.join("benchmarks.json"));
    let plan = if depth == Depth::Full { &FULL } else { &QUICK };
    let replace = |heading: &str, section: &str, key: &str, figures: &str| {
        println!("\n{section}");
        let old = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        write(page.clone(), &markdown::replace_section(&old(&page), heading, section))?;
        write(json.clone(), &with_part(&old(&json), key, figures))
    };
    match part {
        Part::All => {
            let figures = measure(plan, depth)?;
            let text = report::page(&figures);
            println!("\n{text}");
            write(page.clone(), &text)?;
            let soak = soak_in(&fs::read_to_string(&json).unwrap_or_default());
            write(json.clone(), &(pretty(&figures)? + "\n"))?;
            soak.map_or(Ok(()), |soak| put_soak(json.clone(), &soak))?;
            report::verdict(&figures)
        }
        Part::Checkpoint => {
            let figures = checkpoint::measure(depth)?;
            let section = checkpoint::section(&figures);
            replace(checkpoint::HEADING, &section, "checkpoint", &pretty(&figures)?)?;
            report::judge(&checkpoint::promises(&figures))
        }
        Part::Guard => {
            let figures = guard::measure(depth)?;
            replace(guard::HEADING, &guard::section(&figures), guard::KEY, &pretty(&figures)?)?;
            report::judge(&guard::promises(&figures))
        }
        Part::GuardExits => {
            let exits = guard::exits(depth)?;
            let old = alone_of(&fs::read_to_string(&json).unwrap_or_default(), guard::KEY);
            let old = old.and_then(|text| serde_json::from_str(&text).ok());
            let figures = exits.into_figures(old.ok_or_else(|| {
                Error::Host(format!("{} has no figures of the guard: `bench guard` first", json.display()))
            })?);
            replace(guard::HEADING, &guard::section(&figures), guard::KEY, &pretty(&figures)?)?;
            report::judge(&guard::promises(&figures))
        }
        Part::Guest => {
            // A run is long, and what has been measured outlasts its failure.
            let so_far = paths::lab_dir("bench")?.join("guest-so-far.json");
            let figures = guest::measure(depth, |figures| write(so_far.clone(), &pretty(figures)?))?;
            replace(guest::HEADING, &guest::section(&figures), guest::KEY, &pretty(&figures)?)?;
            report::judge(&guest::promises(&figures))
        }
        Part::Kvm => {
            let figures = kvm::measure(plan.kvm)?;
            replace(kvm::HEADING, &kvm::section(&figures), "kvm", &pretty(&figures)?)?;
            report::judge(&kvm::promises(&figures))
        }
        Part::Migration => {
            let figures = migration::measure(depth)?;
            let soak = soak_in(&fs::read_to_string(&json).unwrap_or_default());
            replace(migration::HEADING, &migration::section(&figures), "migration", &pretty(&figures)?)?;
            soak.map_or(Ok(()), |soak| put_soak(json.clone(), &soak))?;
            report::judge(&migration::promises(&figures))
        }
        Part::Switch => {
            let figures = switch::measure()?;
            replace(switch::HEADING, &switch::section(&figures), switch::KEY, &pretty(&figures)?)?;
            let old = fs::read_to_string(&json).unwrap_or_default();
            let text = figures.top().iter().fold(old, |text, (key, most)| with_number(&text, key, *most));
            write(json.clone(), &text)?;
            report::judge(&switch::promises(&figures))
        }
        Part::Previrtualization(releases) => {
            let figures = previrtualized(releases, depth)?;
            let section = previrtualization::section(&figures);
            replace(previrtualization::HEADING, &section, previrtualization::KEY, &pretty(&figures)?)?;
            previrtualization::verdict(&figures)
        }
        Part::Slots(releases) => {
            let figures = previrtualization::bare(releases, effort(depth))?;
            let old = |path: &Path| fs::read_to_string(path).unwrap_or_default();
            let others = alone_of(&old(&json), previrtualization::KEY).unwrap_or_else(|| "{}".to_owned());
            let section = previrtualization::with_kernels(&old(&page), &previrtualization::section(&figures));
            let text = previrtualization::json_with_kernels(&others, &figures)?;
            replace(previrtualization::HEADING, &section, previrtualization::KEY, &text)?;
            previrtualization::verdict(&figures)
        }
        Part::Papers => {
            let figures = papers::measure(papers::Plan::of(depth))?;
            replace(papers::HEADING, &papers::section(&figures), papers::KEY, &pretty(&figures)?)
        }
        Part::Footprint => {
            let figures = footprint::measure(Release::Bookworm)?;
            replace(footprint::HEADING, &footprint::section(&figures), footprint::KEY, &pretty(&figures)?)?;
            report::judge(&footprint::promises(&figures))
        }
        Part::Disco => {
            let figures = disco::measure(Release::Bookworm)?;
            replace(disco::HEADING, &disco::section(&figures), disco::KEY, &pretty(&figures)?)?;
            report::judge(&disco::promises(&figures))
        }
        Part::Subnet => {
            let [all, few] = SUBNET;
            let plan = if depth == Depth::Full { all } else { few };
            let figures = subnet::measure(Release::Bookworm, plan)?;
            replace(subnet::HEADING, &subnet::section(&figures), subnet::KEY, &pretty(&figures)?)?;
            report::judge(&subnet::promises(&figures))
        }
        Part::Hosted => {
            let [all, few] = HOSTED_ROUNDS;
            let rounds = if depth == Depth::Full { all } else { few };
            let figures = hosted::measure(Release::Bookworm, rounds)?;
            let old = |path: &Path| fs::read_to_string(path).unwrap_or_default();
            let others = alone_of(&old(&json), previrtualization::KEY).unwrap_or_else(|| "{}".to_owned());
            let section = previrtualization::with_hosted(&old(&page), &hosted::section(&figures));
            let figures = previrtualization::json_with_hosted(&others, &figures)?;
            replace(previrtualization::HEADING, &section, previrtualization::KEY, &figures)
        }
    }
}

fn previrtualized(releases: &[Release], depth: Depth) -> Result<Previrtualization> {
    let [all, few] = HOSTED_ROUNDS;
    let rounds = if depth == Depth::Full { all } else { few };
    previrtualization::measure(releases, effort(depth), rounds)
}

fn effort(depth: Depth) -> Effort {
    let [all, few] = PREVIRTUALIZED;
    if depth == Depth::Full { all } else { few }
}

fn pretty(figures: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(figures).map_err(|error| Error::Host(error.to_string()))
}

/// Keys that both a benchmark of moves and a soak count. Their sums stand among migration's
/// figures.
const COUNTED: [&str; 4] = ["moves", "transactions", "lost_transactions", "doubled_transactions"];
const SOAK: &str = "soak";

/// Puts a soak's figures into docs/benchmarks.json, among those of migration.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn add_soak(soak: &str) -> Result<()> {
    put_soak(paths::root().join("docs/benchmarks.json"), soak)
}

fn put_soak(path: PathBuf, soak: &str) -> Result<()> {
    let old = fs::read_to_string(&path).unwrap_or_default();
    let migration = alone_of(&old, "migration").unwrap_or_else(|| "{\n}".to_owned());
    write(path, &with_part(&old, "migration", with_soak(&migration, soak).trim_end()))
}

/// Returns the soak's figures among those of migration.
fn soak_in(json: &str) -> Option<String> {
    alone_of(&alone_of(json, "migration")?, SOAK)
}

/// Returns migration's figures with these figures of a soak, in place of an earlier soak's.
fn with_soak(migration: &str, soak: &str) -> String {
    let count = |json: &str, key: &str| {
        serde_json::from_str(json).ok().and_then(|all: Value| all[key].as_u64()).unwrap_or(0)
    };
    let before = alone_of(migration, SOAK).unwrap_or_default();
    let counted = COUNTED.iter().fold(migration.to_owned(), |text, key| {
        let others = count(migration, key).saturating_sub(count(&before, key));
        with_number(&text, key, others + count(soak, key))
    });
    with_part(&counted, SOAK, soak)
}

/// Puts a number into an object's text: in place of the number with this key, or last.
fn with_number(json: &str, key: &str, number: u64) -> String {
    let begin = format!("\n  \"{key}\": ");
    let Some((before, rest)) = json.split_once(&begin) else {
        return with_part(json, key, &number.to_string());
    };
    let end = rest.find([',', '\n']).unwrap_or(rest.len());
    format!("{before}{begin}{number}{}", &rest[end..])
}

/// Puts an object into a text of JSON as [`pretty`] writes it: in place of the object with this
/// key, or last.
fn with_part(json: &str, key: &str, figures: &str) -> String {
    const END: &str = "\n  }";
    let key = format!("\n  \"{key}\": ");
    let figures = figures.replace('\n', "\n  ");
    if let Some((before, rest)) = json.split_once(&key) {
        let after = rest.find(END).map_or("\n}\n", |end| &rest[end + END.len()..]);
        return format!("{before}{key}{figures}{after}");
    }
    let others = json.trim_end().strip_suffix('}').unwrap_or_default().trim_end();
    let (others, comma) = if others.len() > 1 { (others, ",") } else { ("{", "") };
    format!("{others}{comma}{key}{figures}\n}}\n")
}

/// Returns the object with this key, formatted as if it stood alone.
fn alone_of(json: &str, key: &str) -> Option<String> {
    const END: &str = "\n  }";
    let (_, rest) = json.split_once(&format!("\n  \"{key}\": "))?;
    let object = &rest[..rest.find(END)? + END.len()];
    Some(object.replace("\n  ", "\n"))
}

fn write(path: PathBuf, text: &str) -> Result<()> {
    fs::write(&path, text).context(|| format!("write {}", path.display()))?;
    println!("written: {}", path.display());
    Ok(())
}

fn measure(plan: &Plan, depth: Depth) -> Result<Figures> {
    let switch = switch::measure()?;
    live::say("The paper's benchmarks in instructions, on one CPU");
    // A process's place in memory decides by chance how many page tables its fork copies: several
    // per cent.
    let spec = counts::counting_machine(MEMORY_MIB).kernel_arg("norandmaps");
    let counted_on = spec.summary();
    let machine = Machine::boot(spec)?;
    let paper = paper(&machine)?;
    let counted = phases::compare(&machine, &Amount::COUNTED, plan.counted_rounds)?;
    machine.check_health()?;
    machine.shut_down()?;
    let timed = timed(plan)?;
    live::say("Exits on Intel, in Bochs");
    let intel = intel::measure(plan.intel)?;
    let kvm = kvm::measure(plan.kvm)?;
    let previrtualization = previrtualized(&Release::ALL, depth)?;
    let checkpoint = checkpoint::measure(depth)?;
    let migration = migration::measure(depth)?;
    let guard = guard::measure(depth)?;
    let [attach_instructions, detach_instructions, exit_roundtrip_instructions] =
        switch.top().map(|(_, most)| most);
    Ok(Figures {
        attach_instructions,
        detach_instructions,
        exit_roundtrip_instructions,
        steady_exits_per_second: timed.exits.steady_exits_per_second,
        after_detach_over_never_loaded: medians(&counted),
        machine: Description { counted_on, ..timed.machine },
        switch,
        exits_under_postgres: timed.exits,
        memory: timed.memory,
        counted,
        timed: timed.compared,
        switch_times_us: timed.switch_times,
        paper,
        peers: JAILHOUSE,
        intel,
        kvm,
        previrtualization,
        checkpoint,
        migration,
        guard,
    })
}

/// Measurements of the machine with two CPUs.
struct Timed {
    machine: Description,
    exits: Exits,
    memory: Memory,
    compared: Vec<Compared>,
    switch_times: SwitchTimes,
}

fn timed(plan: &Plan) -> Result<Timed> {
    live::say("Times, exits and memory, on two CPUs");
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(MEMORY_MIB);
    let timed_on = spec.summary();
    let machine = Machine::boot(spec)?;
    let compared = match plan.timed_rounds {
        0 => Vec::new(),
        rounds => phases::compare(&machine, &Amount::TIMED, rounds)?,
    };
    if compared.is_empty() {
        machine.start_postgres()?;
    }
    let version = machine.mercury("load")?["version"].as_str().unwrap_or_default().to_owned();
    let memory = Memory::of(&machine)?;
    println!("    {} s of PostgreSQL while attached", plan.exits.as_secs());
    let exits = exits::under_postgres(&machine, plan.exits)?;
    let switch_times = switch_times(&machine, plan.switch_cycles)?;
    machine.check_health()?;
    let machine_description = Description {
        emulator: emulator(Path::new(QEMU)),
        processor: machine.sh("sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1")?,
        kernel: machine.kernel().to_owned(),
        version,
        counted_on: String::new(),
        timed_on,
    };
    machine.shut_down()?;
    Ok(Timed { machine: machine_description, exits, memory, compared, switch_times })
}

fn switch_times(machine: &Machine, cycles: u32) -> Result<SwitchTimes> {
    let report = machine.mercury(&format!("bench switch --cycles {cycles}"))?;
    let trips = report["round_trip"].as_array().into_iter().flatten();
    let trips: Vec<f64> = trips.filter_map(|trip| trip["us"].as_f64()).collect();
    let times = |which: &str| tenths(&report[which]["all_us"]);
    Ok(SwitchTimes {
        attach: times("attach"),
        detach: times("detach"),
        round_trip_median: tenth(stats::median(&trips)),
    })
}

fn tenth(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// Returns the object with its numbers rounded.
fn tenths(object: &Value) -> Value {
    let fields = object.as_object().into_iter().flatten();
    let fields = fields.map(|(key, value)| {
        let rounded = value.as_f64().filter(|_| value.is_f64()).map(tenth);
        (key.clone(), rounded.map_or_else(|| value.clone(), Value::from))
    });
    Value::Object(fields.collect())
}

fn emulator(program: &Path) -> String {
    let said = Command::new(program).arg("--version").output();
    let said = said.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    said.lines().next().unwrap_or("QEMU").to_owned()
}

fn medians(compared: &[Compared]) -> BTreeMap<String, f64> {
    let four_decimals = |number: f64| (number * 1e4).round() / 1e4;
    compared.iter().map(|one| (one.name.clone(), four_decimals(one.after_detach.median))).collect()
}

/// Reads the ratios of JCST 2012 from the output of `mercury bench os`.
fn paper(machine: &Machine) -> Result<Paper> {
    let report = machine.mercury("bench os --samples 1")?;
    let ratio = |benchmark: &Value, of: &str| {
        let paper = &benchmark["paper"]["jcst_2012_up"];
        let ratio = paper[of].as_f64()? / paper["native_us"].as_f64()?;
        Some((benchmark["name"].as_str()?.to_owned(), (ratio * 100.0).round() / 100.0))
    };
    let all = |of: &str| {
        report["benchmarks"].as_array().into_iter().flatten().filter_map(|one| ratio(one, of)).collect()
    };
    Ok(Paper {
        attach_us: 220.0,
        detach_us: 60.0,
        attached_over_native_linux: all("mercury_attached_us"),
        native_mercury_over_native_linux: all("mercury_native_us"),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_soak_is_counted_with_the_benchmark() {
        let soak = |moves: u64| format!("{{\n  \"moves\": {moves},\n  \"lost_transactions\": 0\n}}");
        let parsed = |json: &str| serde_json::from_str::<Value>(json).unwrap();
        let benchmark = "{\n  \"ratio\": 1.5,\n  \"moves\": 12,\n  \"transactions\": 300\n}";
        let first = with_soak(benchmark, &soak(50));
        assert!(
            first.starts_with("{\n  \"ratio\": 1.5,\n  \"moves\": 62,\n  \"transactions\": 300,\n"),
            "{first}"
        );
        assert_eq!(
            (&parsed(&first)["soak"]["moves"], &parsed(&first)["lost_transactions"]),
            (&50.into(), &0.into())
        );
        let second = parsed(&with_soak(&first, &soak(70)));
        assert_eq!((&second["moves"], &second["soak"]["moves"]), (&82.into(), &70.into()));
        let all = with_part("{\n  \"a\": 1\n}\n", "migration", first.trim_end());
        assert_eq!(parsed(&soak_in(&all).unwrap())["moves"], 50);
        let alone = parsed(&with_soak("{\n}", &soak(3)));
        assert_eq!((&alone["moves"], &alone["soak"]["moves"]), (&3.into(), &3.into()));
    }

    #[test]
    fn a_part_takes_its_place_among_the_figures() {
        let figures = "{\n  \"a\": 1\n}";
        let with = with_part("{\n  \"x\": {\n    \"y\": 2\n  }\n}\n", "new", figures);
        assert_eq!(with, "{\n  \"x\": {\n    \"y\": 2\n  },\n  \"new\": {\n    \"a\": 1\n  }\n}\n");
        assert_eq!(with_part(&with, "new", figures), with);
        let first = with_part(&with, "x", figures);
        assert_eq!(first, "{\n  \"x\": {\n    \"a\": 1\n  },\n  \"new\": {\n    \"a\": 1\n  }\n}\n");
        assert_eq!(alone_of(&with, "x").unwrap(), "{\n  \"y\": 2\n}");
        assert_eq!(alone_of(&with, "new").unwrap(), figures);
        assert!(alone_of(&with, "y").is_none());
        let alone = with_part("", "new", figures);
        let parsed: Value = serde_json::from_str(&alone).unwrap();
        assert_eq!(parsed["new"]["a"], 1);
        assert_eq!(with_part(&alone, "new", figures), alone);
    }
}
