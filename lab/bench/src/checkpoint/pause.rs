//! What the pause is made of, in instructions: on a machine with one CPU that counts them, where a tick of the TSC is
//! an instruction, or a nanosecond in which the machine waited.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use serde_json::Value;

use super::{ask, number};
use crate::stats::median;
use mercury_lab::{
    error::{Error, Result},
    kernel::Kernel,
    machine::Machine,
    spec::{Icount, Qemu, Spec},
};

/// The kernel's own word on how far it is; the clock is the TSC.
const TRACE: &str = "mount -t tracefs none /sys/kernel/tracing 2> /dev/null; cd /sys/kernel/tracing && \
     echo x86-tsc > trace_clock && echo 1 > events/power/suspend_resume/enable";
const READ_TRACE: &str = "grep -v '^#' /sys/kernel/tracing/trace; echo > /sys/kernel/tracing/trace";
const LIMIT: Duration = Duration::from_secs(900);

/// Steps of a pause in their order; a tick is an instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Phases {
    /// Tasks are frozen.
    pub freeze_tasks: u64,
    /// Devices are quiesced.
    pub quiesce_devices: u64,
    /// All CPUs come to stand still, with interrupts off.
    pub gather: u64,
    /// What devices have for good is looked for, among all pages.
    pub search: u64,
    /// The core of the system is suspended.
    pub suspend_core: u64,
    /// The CPU's state is saved.
    pub save: u64,
    /// In the hypervisor, without the next.
    pub hypervisor: u64,
    /// What devices have for good is copied.
    pub copy_lasting: u64,
    /// The way back, and the first write: all levels of tables are made for it, and the page is copied.
    pub first_write: u64,
    /// The core of the system goes on.
    pub resume_core: u64,
    /// All CPUs go on.
    pub release: u64,
    /// Devices go on.
    pub resume_devices: u64,
    /// Tasks go on.
    pub thaw_tasks: u64,
}

impl Phases {
    /// All of them, with names for people.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 13] {
        [
            ("tasks frozen", self.freeze_tasks),
            ("devices quiesced", self.quiesce_devices),
            ("all CPUs stopped", self.gather),
            ("what devices have for good: looked for", self.search),
            ("system core suspended", self.suspend_core),
            ("CPU saved", self.save),
            ("hypervisor: all of memory protected", self.hypervisor),
            ("hypervisor: what devices have for good copied", self.copy_lasting),
            ("back, and the first write", self.first_write),
            ("system core resumed", self.resume_core),
            ("all CPUs go on", self.release),
            ("devices resumed", self.resume_devices),
            ("tasks thawed", self.thaw_tasks),
        ]
    }

    fn total(&self) -> u64 {
        self.named().iter().map(|(_, ticks)| ticks).sum()
    }

    /// From what the command reports of the driver, and how much of the ends was devices'.
    fn read(phases: &Value, devices: &Devices) -> Result<Self> {
        let step = |name: &str| {
            let steps = phases["steps"].as_array().into_iter().flatten();
            let found = steps.filter(|step| step["name"] == name).find_map(|step| step["ticks"].as_u64());
            found.ok_or_else(|| Error::Host(format!("no step {name} in {phases}")))
        };
        let copy_lasting = number(phases, "lasting_ticks")? as u64;
        let within = number(phases, "hypervisor_ticks")? as u64;
        let (quiesce, thaw) = (step("quiesce")?, step("thaw")?);
        Ok(Self {
            freeze_tasks: quiesce.saturating_sub(devices.quiesce),
            quiesce_devices: devices.quiesce,
            gather: step("gather")?,
            search: step("search")?,
            suspend_core: step("suspend")?,
            save: step("save")?,
            hypervisor: within.saturating_sub(copy_lasting),
            copy_lasting,
            first_write: step("hypervisor")?.saturating_sub(within),
            resume_core: step("resume")?,
            release: step("release")?,
            resume_devices: devices.resume,
            thaw_tasks: thaw.saturating_sub(devices.resume),
        })
    }

    /// Of each step the median over the rounds.
    fn medians(rounds: &[Self]) -> Self {
        let of = |step: fn(&Self) -> u64| {
            median(&rounds.iter().map(|round| step(round) as f64).collect::<Vec<_>>()) as u64
        };
        Self {
            freeze_tasks: of(|one| one.freeze_tasks),
            quiesce_devices: of(|one| one.quiesce_devices),
            gather: of(|one| one.gather),
            search: of(|one| one.search),
            suspend_core: of(|one| one.suspend_core),
            save: of(|one| one.save),
            hypervisor: of(|one| one.hypervisor),
            copy_lasting: of(|one| one.copy_lasting),
            first_write: of(|one| one.first_write),
            resume_core: of(|one| one.resume_core),
            release: of(|one| one.release),
            resume_devices: of(|one| one.resume_devices),
            thaw_tasks: of(|one| one.thaw_tasks),
        }
    }
}

/// How long devices took, by the kernel's trace.
#[derive(Debug, PartialEq, Eq)]
struct Devices {
    quiesce: u64,
    resume: u64,
}

impl Devices {
    /// Lines are `… 123456: suspend_resume: dpm_prepare[4096] begin`.
    fn read(trace: &str) -> Option<Self> {
        let event = |line: &str| {
            let (before, what) = line.split_once(": suspend_resume: ")?;
            let ticks: u64 = before.split_whitespace().next_back()?.parse().ok()?;
            let (name, end) = (what.split('[').next()?, what.split_whitespace().next_back()?);
            Some((format!("{name} {end}"), ticks))
        };
        // The last one of each.
        let events: BTreeMap<String, u64> = trace.lines().filter_map(event).collect();
        let between = |from: &str, to: &str| events.get(to)?.checked_sub(*events.get(from)?);
        Some(Self {
            quiesce: between("dpm_prepare begin", "dpm_suspend_noirq end")?,
            resume: between("dpm_resume_noirq begin", "thaw_processes begin")?,
        })
    }
}

/// The pause on a machine of one size.
#[derive(Clone, Debug, Serialize)]
pub struct Pause {
    /// Of the machine.
    pub memory_mib: u32,
    /// Snapshots measured.
    pub rounds: usize,
    /// Saving the CPU, going into the hypervisor, protecting all of memory, and coming back: the most of all rounds.
    pub snapshot_instructions: u64,
    /// The fewest.
    pub snapshot_instructions_min: u64,
    /// Of that, into the hypervisor and back.
    pub exit_instructions: u64,
    /// Medians.
    pub phases: Phases,
    /// The whole, each round.
    pub totals: Vec<u64>,
    /// The pause that the command measured with the kernel's clock, in nanoseconds, of each round.
    pub measured_ns: Vec<u64>,
    /// Pages that devices have for good.
    pub lasting_pages: u64,
    /// Pages of memory.
    pub memory_pages: u64,
}

impl Pause {
    /// Returns the time of a pause, in nanoseconds, that belongs to none of the phases: the least of all rounds.
    /// A step that takes long shows in each round; a host with other work to do shows in some.
    #[must_use]
    pub fn unexplained_ns(&self) -> u64 {
        let pairs = self.measured_ns.iter().zip(&self.totals);
        pairs.map(|(measured, phases)| measured.saturating_sub(*phases)).min().unwrap_or(u64::MAX)
    }

    /// The median of the whole.
    #[must_use]
    pub fn total(&self) -> f64 {
        median(&self.totals.iter().map(|total| *total as f64).collect::<Vec<_>>())
    }
}

/// The machine that counts. An idle one does not wait for the wall's time: it is the same whatever the host does.
#[must_use]
pub fn counting_machine(memory_mib: u32) -> Spec {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(1).memory_mib(memory_mib);
    // QEMU 7 executes what the kernel has patched meanwhile, as it does for the time of a snapshot.
    spec.icount(Icount::NoSleep { shift: 0 }).qemu_version(Qemu::Newer)
}

/// Boots a machine of so much memory, and keeps snapshots in it.
///
/// # Errors
/// If the machine fails.
pub fn with_memory(memory_mib: u32, rounds: usize) -> Result<Pause> {
    let machine = Machine::boot(counting_machine(memory_mib))?;
    // Pages in use are what is looked at.
    machine.sh("sync; mount -o remount,ro /; mercury load")?;
    machine.sh(TRACE)?;
    let exit = exit_instructions(&machine)?;
    let (mut all, mut last, mut measured_ns) = (Vec::new(), Value::Null, Vec::new());
    for _ in 0..rounds {
        last = ask(&machine, "mercury --json snapshot", LIMIT)?;
        let trace = machine.sh(READ_TRACE)?;
        ask(&machine, "mercury --json snapshot --drop", LIMIT)?;
        let devices = Devices::read(&trace)
            .ok_or_else(|| Error::Host(format!("the kernel's trace is strange: {trace}")))?;
        measured_ns.push((number(&last, "pause_us")? * 1e3) as u64);
        all.push(Phases::read(&last["phases"], &devices)?);
    }
    machine.check_health()?;
    machine.shut_down()?;
    let costs = || all.iter().map(|phases| phases.save + exit + phases.hypervisor);
    Ok(Pause {
        memory_mib,
        rounds,
        snapshot_instructions: costs().max().unwrap_or(0),
        snapshot_instructions_min: costs().min().unwrap_or(0),
        exit_instructions: exit,
        phases: Phases::medians(&all),
        totals: all.iter().map(Phases::total).collect(),
        measured_ns,
        lasting_pages: number(&last["phases"], "lasting_pages")? as u64,
        memory_pages: number(&last, "memory")? as u64 / 4096,
    })
}

/// A hypercall that does nothing.
fn exit_instructions(machine: &Machine) -> Result<u64> {
    let report = ask(machine, "mercury --json bench switch --cycles 5", LIMIT)?;
    number(&report["round_trip"][0], "ticks").map(|ticks| ticks.round() as u64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    const TRACED: &str = "\
         mercury-321     [000] ..... 1000: suspend_resume: dpm_prepare[4096] begin
         mercury-321     [000] ..... 1100: suspend_resume: dpm_prepare[4096] end
         mercury-321     [000] ..... 4000: suspend_resume: dpm_suspend_noirq[1] end
         mercury-321     [000] ..... 9000: suspend_resume: dpm_resume_noirq[32] begin
         mercury-321     [000] ..... 9700: suspend_resume: thaw_processes[0] begin";

    #[test]
    fn ends_are_split_between_tasks_and_devices() {
        let devices = Devices::read(TRACED).unwrap();
        assert_eq!(devices, Devices { quiesce: 3000, resume: 700 });
        let names =
            ["quiesce", "gather", "search", "suspend", "save", "hypervisor", "resume", "release", "thaw"];
        let steps: Vec<_> = names.iter().map(|name| json!({ "name": name, "ticks": 5000 })).collect();
        let phases = Phases::read(
            &json!({ "steps": steps, "lasting_ticks": 4800, "hypervisor_ticks": 4900 }),
            &devices,
        )
        .unwrap();
        assert_eq!((phases.freeze_tasks, phases.quiesce_devices), (2000, 3000));
        assert_eq!((phases.hypervisor, phases.copy_lasting, phases.first_write), (100, 4800, 100));
        assert_eq!((phases.resume_devices, phases.thaw_tasks), (700, 4300));
        assert_eq!(phases.total(), 9 * 5000, "nothing is counted twice or left out");
        assert!(Phases::read(&json!({ "steps": [], "lasting_ticks": 0 }), &devices).is_err());
        assert_eq!(Devices::read("nothing"), None);
    }

    #[test]
    fn medians_of_each_step() {
        let round = |search| Phases { search, save: 1, ..Phases::default() };
        let phases = Phases::medians(&[round(10), round(30), round(20)]);
        assert_eq!((phases.search, phases.save, phases.total()), (20, 1, 21));
    }
}
