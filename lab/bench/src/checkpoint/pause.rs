//! The parts of the pause in instructions, on a machine with one CPU that counts them. A tick of
//! its TSC is an instruction, or a nanosecond in which the machine waited.

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

/// The command that turns on the kernel's own trace of a suspend; its clock is the TSC.
const TRACE: &str = "mount -t tracefs none /sys/kernel/tracing 2> /dev/null; cd /sys/kernel/tracing && \
     echo x86-tsc > trace_clock && echo 1 > events/power/suspend_resume/enable";
const READ_TRACE: &str = "grep -v '^#' /sys/kernel/tracing/trace; echo > /sys/kernel/tracing/trace";
const LIMIT: Duration = Duration::from_secs(900);

/// The steps of a pause, in order. A tick is an instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Phases {
    /// Time of the command before it asks the driver: packets are held, and file systems and
    /// applications if the disks of the machine ask for it.
    pub hold: u64,
    /// Time to freeze the tasks.
    pub freeze_tasks: u64,
    /// Time to quiesce the devices.
    pub quiesce_devices: u64,
    /// Time of the rendezvous of all CPUs, with interrupts off.
    pub gather: u64,
    /// Time to search all pages for persistent DMA memory.
    pub search: u64,
    /// Time to suspend the core of the system.
    pub suspend_core: u64,
    /// Time to save the CPU's state.
    pub save: u64,
    /// Time in the hypervisor, without the next step.
    pub hypervisor: u64,
    /// Time to copy the persistent DMA memory.
    pub copy_persistent: u64,
    /// Time of the way back, and of the first write: all levels of tables are made for it, and the
    /// page is copied.
    pub first_write: u64,
    /// Time to resume the core of the system.
    pub resume_core: u64,
    /// Time to release all CPUs.
    pub release: u64,
    /// Time to resume the devices.
    pub resume_devices: u64,
    /// Time to thaw the tasks.
    pub thaw_tasks: u64,
}

impl Phases {
    /// Returns all steps, with names for people.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 14] {
        [
            ("packets held", self.hold),
            ("tasks frozen", self.freeze_tasks),
            ("devices quiesced", self.quiesce_devices),
            ("all CPUs stopped", self.gather),
            ("search for persistent DMA memory", self.search),
            ("system core suspended", self.suspend_core),
            ("CPU saved", self.save),
            ("hypervisor: all of memory protected", self.hypervisor),
            ("hypervisor: copy of persistent DMA memory", self.copy_persistent),
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

    /// Reads the steps from the driver's report, and the devices' share of the first and last
    /// steps.
    fn read(phases: &Value, devices: &Devices) -> Result<Self> {
        let figure = |name: &str, unit: &str| {
            let mut steps = phases["steps"].as_array().into_iter().flatten();
            let found = steps.find(|step| step["name"] == name).and_then(|step| step[unit].as_f64());
            found.map(|value| value as u64).ok_or_else(|| Error::Host(format!("no step {name} in {phases}")))
        };
        let step = |name: &str| figure(name, "ticks");
        let copy_persistent = number(phases, "persistent_ticks")? as u64;
        let within = number(phases, "hypervisor_ticks")? as u64;
        let (quiesce, thaw) = (step("quiesce")?, step("thaw")?);
        Ok(Self {
            // The kernel's clock measured this part, and the driver's report has its time in the
            // ticks that the kernel assumes. Here a tick is a nanosecond.
            hold: figure("hold", "us")? * 1000,
            freeze_tasks: quiesce.saturating_sub(devices.quiesce),
            quiesce_devices: devices.quiesce,
            gather: step("gather")?,
            search: step("search")?,
            suspend_core: step("suspend")?,
            save: step("save")?,
            hypervisor: within.saturating_sub(copy_persistent),
            copy_persistent,
            first_write: step("hypervisor")?.saturating_sub(within),
            resume_core: step("resume")?,
            release: step("release")?,
            resume_devices: devices.resume,
            thaw_tasks: thaw.saturating_sub(devices.resume),
        })
    }

    /// Returns the median of each step over the rounds.
    fn medians(rounds: &[Self]) -> Self {
        let of = |step: fn(&Self) -> u64| {
            median(&rounds.iter().map(|round| step(round) as f64).collect::<Vec<_>>()) as u64
        };
        Self {
            hold: of(|one| one.hold),
            freeze_tasks: of(|one| one.freeze_tasks),
            quiesce_devices: of(|one| one.quiesce_devices),
            gather: of(|one| one.gather),
            search: of(|one| one.search),
            suspend_core: of(|one| one.suspend_core),
            save: of(|one| one.save),
            hypervisor: of(|one| one.hypervisor),
            copy_persistent: of(|one| one.copy_persistent),
            first_write: of(|one| one.first_write),
            resume_core: of(|one| one.resume_core),
            release: of(|one| one.release),
            resume_devices: of(|one| one.resume_devices),
            thaw_tasks: of(|one| one.thaw_tasks),
        }
    }
}

/// The devices' times, by the kernel's trace.
#[derive(Debug, PartialEq, Eq)]
struct Devices {
    quiesce: u64,
    resume: u64,
}

impl Devices {
    /// Reads the kernel's trace, with lines like `… 123456: suspend_resume: dpm_prepare[4096]
    /// begin`.
    fn read(trace: &str) -> Option<Self> {
        let event = |line: &str| {
            let (before, what) = line.split_once(": suspend_resume: ")?;
            let ticks: u64 = before.split_whitespace().next_back()?.parse().ok()?;
            let (name, end) = (what.split('[').next()?, what.split_whitespace().next_back()?);
            Some((format!("{name} {end}"), ticks))
        };
        // The last event of each name counts.
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
    /// Memory of the machine.
    pub memory_mib: u32,
    /// The number of measured snapshots.
    pub rounds: usize,
    /// Instructions to save the CPU, enter the hypervisor, protect all memory, and come back: the
    /// maximum of all rounds.
    pub snapshot_instructions: u64,
    /// The minimum of all rounds.
    pub snapshot_instructions_min: u64,
    /// The part of an entry into the hypervisor and back.
    pub exit_instructions: u64,
    /// The medians of all steps.
    pub phases: Phases,
    /// The whole pause of each round.
    pub totals: Vec<u64>,
    /// The pause of each round that the command measured with the kernel's clock, in nanoseconds.
    pub measured_ns: Vec<u64>,
    /// Pages of persistent DMA memory.
    pub persistent_pages: u64,
    pub memory_pages: u64,
}

impl Pause {
    /// Returns the time of a pause, in nanoseconds, that belongs to no phase: the minimum of all
    /// rounds. A long step shows in each round; a host with other work shows in some rounds.
    #[must_use]
    pub fn unexplained_ns(&self) -> u64 {
        let pairs = self.measured_ns.iter().zip(&self.totals);
        pairs.map(|(measured, phases)| measured.saturating_sub(*phases)).min().unwrap_or(u64::MAX)
    }

    /// Returns the median of the whole pause.
    #[must_use]
    pub fn total(&self) -> f64 {
        median(&self.totals.iter().map(|total| *total as f64).collect::<Vec<_>>())
    }
}

/// Returns the counting machine. An idle machine does not wait for wall time, so the counts are the
/// same whatever the host does.
#[must_use]
pub fn counting_machine(memory_mib: u32) -> Spec {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(1).memory_mib(memory_mib);
    // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
    // during a snapshot.
    spec.icount(Icount::NoSleep { shift: 0 }).qemu_version(Qemu::Newer)
}

/// Boots a machine with so much memory, and makes snapshots in it.
///
/// # Errors
/// If the machine fails.
pub fn with_memory(memory_mib: u32, rounds: usize) -> Result<Pause> {
    let machine = Machine::boot(counting_machine(memory_mib))?;
    // The snapshot scans the pages in use.
    machine.sh("sync; mount -o remount,ro /; mercury load")?;
    machine.sh(TRACE)?;
    let exit = exit_instructions(&machine)?;
    let (mut all, mut last, mut measured_ns) = (Vec::new(), Value::Null, Vec::new());
    for _ in 0..rounds {
        last = ask(&machine, "mercury --json snapshot", LIMIT)?;
        let trace = machine.sh(READ_TRACE)?;
        ask(&machine, "mercury --json snapshot --drop", LIMIT)?;
        let devices = Devices::read(&trace)
            .ok_or_else(|| Error::Host(format!("the kernel's trace lacks an event: {trace}")))?;
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
        persistent_pages: number(&last["phases"], "persistent_pages")? as u64,
        memory_pages: number(&last, "memory")? as u64 / 4096,
    })
}

/// Counts the instructions of a hypercall that does nothing.
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
        let names = [
            "hold",
            "quiesce",
            "gather",
            "search",
            "suspend",
            "save",
            "hypervisor",
            "resume",
            "release",
            "thaw",
        ];
        let steps: Vec<_> =
            names.iter().map(|name| json!({ "name": name, "ticks": 5000, "us": 2.0 })).collect();
        let phases = Phases::read(
            &json!({ "steps": steps, "persistent_ticks": 4800, "hypervisor_ticks": 4900 }),
            &devices,
        )
        .unwrap();
        assert_eq!((phases.freeze_tasks, phases.quiesce_devices), (2000, 3000));
        assert_eq!((phases.hypervisor, phases.copy_persistent, phases.first_write), (100, 4800, 100));
        assert_eq!((phases.resume_devices, phases.thaw_tasks), (700, 4300));
        assert_eq!(phases.hold, 2000);
        assert_eq!(phases.total(), 9 * 5000 + 2000, "nothing is counted twice or left out");
        assert!(Phases::read(&json!({ "steps": [], "persistent_ticks": 0 }), &devices).is_err());
        assert_eq!(Devices::read("nothing"), None);
    }

    #[test]
    fn medians_of_each_step() {
        let round = |search| Phases { search, save: 1, ..Phases::default() };
        let phases = Phases::medians(&[round(10), round(30), round(20)]);
        assert_eq!((phases.search, phases.save, phases.total()), (20, 1, 21));
    }
}
