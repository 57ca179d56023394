//! `lab bench guard`: how soon a hang is noticed, how quickly a machine goes back, and the deaths that it
//! survives.

use std::{collections::BTreeMap, thread, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    Depth,
    campaign::{
        self, Load, Moment, Plan,
        fault::Class,
        record::{Outcome, Record, Results},
    },
    exits::by_reason,
    stats::{self, rounded},
};
use mercury_lab::{
    error::{Error, Result, wait_for},
    guard::{ALL_HANG, HANGS, kill, panics, storm, watched},
    kernel::Kernel,
    live,
    machine::Machine,
    markdown::table,
    spec::{Qemu, Spec},
};

/// The heading of this part of the page.
pub const HEADING: &str = "## Guard";
pub const KEY: &str = "guard";
/// Time in which a hang of all CPUs has to be noticed.
const NOTICED_WITHIN_S: f64 = 2.0;
const CPUS: [u32; 3] = [1, 2, 4];
/// Rules of the daemon whose machine's exits are counted.
const RULES: &[u8] = b"[integrity]\nscrub = 'report'\n";
/// Time for the daemon's first comparison.
const FIRST_PASS: Duration = Duration::from_secs(120);
/// Reason of exits that Mercury's own programs cause.
const CALL: &str = "hypercall";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Guard {
    /// The longest time from a hang of all CPUs to the panic.
    #[serde(serialize_with = "rounded")]
    pub hang_detection_seconds: f64,
    /// The same on one, two and four CPUs.
    pub hang_detection_by_cpus: Vec<Hang>,
    /// The median of the rollbacks from deaths, without the time in which devices come to rest.
    #[serde(serialize_with = "rounded")]
    pub rollback_ms_per_1000_pages: f64,
    /// LKDTM's crash types that killed the machine, and those from which it went back with right sums.
    pub lkdtm_lethal: u64,
    pub lkdtm_survived: u64,
    /// Crash types in all.
    pub lkdtm_types: u64,
    /// Alarms in a storm of CPUs that were stopped for good reasons.
    pub false_alarms: u64,
    pub storm_seconds: u32,
    /// Exits while attached, watched, and compared every five seconds, without calls of Mercury's programs.
    #[serde(serialize_with = "rounded", default)]
    pub exits_per_second: f64,
    /// Such calls: mercuryd asks the driver every five seconds.
    #[serde(serialize_with = "rounded", default)]
    pub calls_per_second: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Hang {
    pub cpus: u32,
    #[serde(serialize_with = "rounded")]
    pub seconds: f64,
}

/// Measures all figures. LKDTM's results are those of the campaign with seed 1, which goes on here.
///
/// # Errors
/// If a machine fails.
pub fn measure(depth: Depth) -> Result<Guard> {
    let (types, storm_seconds) = if depth == Depth::Full { (usize::MAX, 120) } else { (10, 20) };
    live::say("All CPUs hang, on machines with 1, 2 and 4");
    let hangs = CPUS.into_iter().map(hang).collect::<Result<Vec<_>>>()?;
    live::say(&format!("{storm_seconds} seconds of CPUs that are stopped for good reasons"));
    let machine = watched(spec(2))?;
    let alarms = storm(&machine, storm_seconds)?["alarms"].as_u64().unwrap_or(u64::MAX);
    machine.shut_down()?;
    let guarded = exits(depth)?;
    let records = crash_types(types)?;
    let of = |test: fn(Outcome) -> bool| records.iter().filter(|record| test(record.outcome)).count() as u64;
    let each: Vec<f64> = records.iter().filter_map(Record::ms_per_1000_pages).collect();
    Ok(Guard {
        hang_detection_seconds: hangs.iter().map(|hang| hang.seconds).fold(0.0, f64::max),
        hang_detection_by_cpus: hangs,
        rollback_ms_per_1000_pages: stats::median(&each),
        lkdtm_lethal: of(Outcome::has_died),
        lkdtm_survived: of(|outcome| outcome == Outcome::Right),
        lkdtm_types: records.len() as u64,
        false_alarms: alarms,
        storm_seconds,
        exits_per_second: guarded.exits_per_second,
        calls_per_second: guarded.calls_per_second,
    })
}

/// Exits of a guarded machine.
#[derive(Clone, Copy, Debug)]
pub struct Exits {
    exits_per_second: f64,
    calls_per_second: f64,
}

impl Exits {
    /// Puts these figures in place of older ones.
    #[must_use]
    pub fn into_figures(self, figures: Guard) -> Guard {
        let Self { exits_per_second, calls_per_second } = self;
        Guard { exits_per_second, calls_per_second, ..figures }
    }
}

/// Counts the exits of an attached machine that mercuryd watches and compares. Its two readings of the status
/// count among the calls.
///
/// # Errors
/// If the machine fails, or the daemon compares nothing.
pub fn exits(depth: Depth) -> Result<Exits> {
    let seconds = if depth == Depth::Full { 60 } else { 20 };
    live::say(&format!("{seconds} seconds of an attached machine that is guarded"));
    let machine = Machine::boot(spec(2))?;
    machine.put("/run/guard.toml", RULES, 0o644)?;
    machine.mercury("load")?;
    let daemon = machine.spawn("exec mercury daemon --rules /run/guard.toml --socket /run/socket")?;
    let passes = || -> Result<u64> {
        let state = machine.command("mercury guard status --json").run()?.stdout;
        let state: serde_json::Value = serde_json::from_str(&state).unwrap_or_default();
        Ok(state["integrity"]["passes"].as_u64().unwrap_or(0))
    };
    wait_for("the first comparison", FIRST_PASS, || Ok((passes()? > 0).then_some(())))?;
    machine.mercury("attach")?;
    let (first, before) = (passes()?, by_reason(&machine.mercury("status")?));
    thread::sleep(Duration::from_secs(seconds));
    let (last, after) = (passes()?, by_reason(&machine.mercury("status")?));
    if last <= first {
        return Err(machine.blame(Error::Unhealthy("the daemon compares nothing while attached".into())));
    }
    daemon.kill(15)?;
    daemon.wait(FIRST_PASS)?;
    machine.mercury("detach")?;
    let more = |calls: bool| {
        let of = |sums: &BTreeMap<String, u64>| {
            sums.iter().filter(|(reason, _)| (*reason == CALL) == calls).map(|(_, count)| count).sum::<u64>()
        };
        (of(&after) - of(&before)) as f64 / seconds as f64
    };
    Ok(Exits { exits_per_second: more(false), calls_per_second: more(true) })
}

fn spec(cpus: u32) -> Spec {
    Spec::new(Kernel::BookwormCloud).cpus(cpus).qemu_version(Qemu::Newer)
}

fn hang(cpus: u32) -> Result<Hang> {
    let machine = watched(spec(cpus))?;
    kill(&machine, "hang-all 100")?;
    let seconds = panics(&machine, ALL_HANG, HANGS)?;
    machine.forgive();
    Ok(Hang { cpus, seconds })
}

/// Runs the campaign of the first crash types, or of all. Returns a result for each.
fn crash_types(most: usize) -> Result<Vec<Record>> {
    let plan = Plan {
        kernel: Kernel::BookwormCloud,
        cpus: 2,
        load: Load::Idle,
        moment: Moment::JustBefore,
        classes: vec![Class::Lkdtm],
        count: most,
        seed: 1,
        time: None,
    };
    let results = campaign::run(&plan, Results::open(&plan.name())?)?;
    let counts = |record: &&Record| record.class == Class::Lkdtm && record.outcome != Outcome::Refused;
    Ok(results.all().iter().filter(counts).cloned().collect())
}

/// Returns this part of the page.
#[must_use]
pub fn section(figures: &Guard) -> String {
    let hangs = figures.hang_detection_by_cpus.iter();
    let hangs: Vec<Vec<String>> =
        hangs.map(|hang| vec![hang.cpus.to_string(), format!("{:.2}", hang.seconds)]).collect();
    format!(
        "{HEADING}\n\n\
        `cargo run -p mercury-lab-bench -- bench guard` writes this section alone. \
        [campaign.md](campaign.md) has faults of all\nkinds.\n\n\
        All CPUs hang with interrupts off, natively. Time until the panic, in the machine's own time:\n\n{}\n\
        - Rollbacks from deaths take {:.1} ms for 1,000 pages, in the median, in the emulator's time. \
        The 3 ms in which\n  devices come to rest are not counted.\n\
        - Of {} crash types of LKDTM {} killed a machine with two CPUs. It went back with right sums from \
        {} of them.\n\
        - {} false alarms in {} seconds of hotplug, held CPUs, floods of the console, kprobes, the function \
        tracer, attach\n  and detach.\n\
        - {:.2} exits a second of an attached machine that mercuryd watches, and whose code, constants and \
        registers it\n  compares every five seconds. Calls of Mercury's own programs are not among them: \
        {:.2} a second on two CPUs.\n",
        table(&["CPUs", "seconds"], &hangs),
        figures.rollback_ms_per_1000_pages,
        figures.lkdtm_types,
        figures.lkdtm_lethal,
        figures.lkdtm_survived,
        figures.false_alarms,
        figures.storm_seconds,
        figures.exits_per_second,
        figures.calls_per_second,
    )
}

/// Returns the promises, and for each true if it is kept.
#[must_use]
pub fn promises(figures: &Guard) -> [(bool, &'static str); 4] {
    [
        (figures.hang_detection_seconds <= NOTICED_WITHIN_S, "a hang of all CPUs is noticed late"),
        (figures.lkdtm_survived == figures.lkdtm_lethal, "a machine did not come back from a crash type"),
        (figures.false_alarms == 0, "the guard took a machine at work for hung"),
        (figures.exits_per_second == 0.0, "a machine that is guarded has exits"),
    ]
}

/// Returns figures that keep the promises.
#[cfg(test)]
pub fn kept_promises() -> Guard {
    Guard {
        hang_detection_seconds: 1.5,
        hang_detection_by_cpus: vec![Hang { cpus: 2, seconds: 1.5 }],
        rollback_ms_per_1000_pages: 12.5,
        lkdtm_lethal: 34,
        lkdtm_survived: 34,
        lkdtm_types: 72,
        false_alarms: 0,
        storm_seconds: 120,
        exits_per_second: 0.0,
        calls_per_second: 0.47,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_promises_are_found() {
        assert!(promises(&kept_promises()).iter().all(|(kept, _)| *kept));
        let wrong = [
            Guard { hang_detection_seconds: 2.1, ..kept_promises() },
            Guard { lkdtm_survived: 33, ..kept_promises() },
            Guard { false_alarms: 1, ..kept_promises() },
            Guard { exits_per_second: 0.1, ..kept_promises() },
        ];
        assert!(wrong.iter().all(|figures| promises(figures).iter().any(|(kept, _)| !kept)));
    }

    /// As docs/benchmarks.json had them before exits were counted.
    #[test]
    fn exits_are_put_among_older_figures() {
        let mut old = serde_json::to_value(kept_promises()).expect("figures");
        old.as_object_mut().expect("an object").remove("exits_per_second");
        let old: Guard = serde_json::from_value(old).expect("figures");
        let new = Exits { exits_per_second: 0.0, calls_per_second: 0.5 }.into_figures(old);
        assert_eq!((new.exits_per_second, new.calls_per_second, new.lkdtm_types), (0.0, 0.5, 72));
        assert!(section(&new).contains("0.50 a second on two CPUs"), "{}", section(&new));
    }

    #[test]
    fn the_section_has_the_figures() {
        let section = section(&kept_promises());
        for part in
            ["| 2    |    1.50 |", "12.5 ms", "Of 72 crash types of LKDTM 34 killed", "0 false alarms in 120"]
        {
            assert!(section.contains(part), "{part:?} is not in\n{section}");
        }
    }
}
