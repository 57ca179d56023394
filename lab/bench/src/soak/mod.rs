//! `make soak`: attach and detach ten thousand times under all kinds of work.
//!
//! The machine has four CPUs. PostgreSQL, stress-ng, iperf3, a network card, a disk, known results
//! and patterns in registers run all the time. The mode of all CPUs is switched again and again.
//! CPUs leave and come back in between, attached and native.
//!
//! Nothing may be lost, nothing may be wrong, and the kernel may not complain. At the end each CPU
//! must be as it was before the driver was ever loaded.

pub mod guests;
mod load;
pub mod migration;
mod report;
pub mod restart;

use std::{fs, time::Duration};

use serde_json::Value;

use load::{Database, Load, Work};
use mercury_lab::{
    error::{Context, Error, Result},
    kernel::Kernel,
    live::{self, Line},
    machine::Machine,
    paths,
    spec::{Nic, Platform, Spec},
};

/// Time limit of a batch of switches under the work, in wall time.
const BATCH_LIMIT: Duration = Duration::from_secs(900);
/// Pause after each switch.
const PAUSE: Duration = Duration::from_millis(2);
/// The number of cycles from which docs/ gets a page: in QEMU, and in Bochs, which has fewer CPUs
/// and is slower.
const WORTH_A_PAGE: [u64; 2] = [10_000, 1000];

/// The amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Attaches and detaches of all CPUs.
    pub cycles: u64,
    /// The machine's emulator. In Bochs, which runs all processors in one thread, the machine has
    /// two CPUs and no network card.
    pub platform: Platform,
    pub cpus: u32,
    /// Cycles after which a CPU leaves and comes back.
    pub batch: u64,
    /// Length of a round of pgbench, stress-ng and iperf3.
    pub round: Duration,
}

impl Plan {
    /// Makes a plan for `cycles` cycles.
    #[must_use]
    pub fn new(platform: Platform, cycles: u64) -> Self {
        let long = cycles >= 1000;
        Self {
            cycles,
            platform,
            cpus: if platform == Platform::Qemu { 4 } else { 2 },
            batch: if long { 100 } else { 25 },
            round: Duration::from_secs(if long { 20 } else { 5 }),
        }
    }
}

/// The observations of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The command that wrote the page.
    command: String,
    machine: String,
    kernel: String,
    version: String,
    cycles: u64,
    elapsed: Duration,
    /// CPUs that left and came back: while native, while attached.
    hotplugs: [u64; 2],
    attach: Times,
    detach: Times,
    work: Vec<Work>,
    database: Database,
    status: Value,
    /// Differences between the state of the CPUs and that before the driver was loaded.
    state_changes: Vec<String>,
    complaint: Option<String>,
    failures: String,
}

/// Times of one direction with interrupts off, in the emulator's nanoseconds.
#[derive(Clone, Debug, Default)]
struct Times {
    min: Option<u64>,
    max: u64,
    medians: Vec<u64>,
}

impl Times {
    fn add(&mut self, batch: &Value) {
        let min = batch["min_ns"].as_u64();
        self.min = self.min.into_iter().chain(min).min();
        self.max = self.max.max(batch["max_ns"].as_u64().unwrap_or(0));
        self.medians.extend(batch["median_ns"].as_u64());
    }

    fn median(&self) -> u64 {
        let mut sorted = self.medians.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or(0)
    }
}

/// `lab soak`: runs the soak, prints the table, and writes a page of docs/ if the soak was long
/// enough.
///
/// # Errors
/// If the machine cannot be booted, or anything was lost, wrong or complained about.
pub fn command(cycles: u64) -> Result<()> {
    let platform = Platform::chosen()?;
    let outcome = run(Plan::new(platform, cycles))?;
    let page = report::page(&outcome);
    println!("\n{page}");
    outcome.check()?;
    let [in_qemu, in_bochs] = WORTH_A_PAGE;
    let (name, enough) = match platform {
        Platform::Qemu => ("docs/soak.md".to_owned(), in_qemu),
        Platform::Bochs(_) => (format!("docs/soak-{platform}.md"), in_bochs),
    };
    if cycles < enough {
        println!("{name} is written by {enough} cycles or more.");
        return Ok(());
    }
    let path = paths::root().join(name);
    fs::write(&path, page).context(|| format!("write {}", path.display()))?;
    println!("written: {}", path.display());
    Ok(())
}

/// Boots a machine and runs the plan on it.
///
/// # Errors
/// If the machine ends, or cannot go on.
pub fn run(plan: Plan) -> Result<Outcome> {
    live::say(&format!("A machine with {} CPUs, and {} cycles under it", plan.cpus, plan.cycles));
    let spec = Spec::new(Kernel::BookwormCloud).platform(plan.platform).cpus(plan.cpus).memory_mib(1536);
    let spec = if plan.platform == Platform::Qemu { spec.nic(Nic::Virtio) } else { spec };
    let summary = spec.summary();
    let machine = Machine::boot(spec)?;
    let outcome = Soak { machine: &machine, plan, hotplugs: [0; 2], pause: PAUSE }.run(summary)?;
    machine.shut_down()?;
    Ok(outcome)
}

struct Soak<'a> {
    machine: &'a Machine,
    plan: Plan,
    hotplugs: [u64; 2],
    /// The pause after each switch.
    pause: Duration,
}

impl Soak<'_> {
    fn run(mut self, summary: String) -> Result<Outcome> {
        self.machine.sh("insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko")?;
        // The state of a CPU that has come back differs in parts from the firmware's.
        (1..self.plan.cpus).try_for_each(|cpu| self.leave(cpu).and_then(|()| self.come_back(cpu)))?;
        let before = self.states()?;
        let version = self.machine.mercury("load")?["version"].as_str().unwrap_or_default().to_owned();
        let load = Load::start(self.machine, self.plan.round)?;
        let mut line = Line::begin();
        let (attach, detach, load) = self.switch_all(load, &mut line)?;
        let elapsed = line.elapsed();
        drop(line);
        let (work, database) = load.finish()?;
        let status = self.machine.mercury("status")?;
        self.machine.mercury("unload")?;
        Ok(Outcome {
            command: match self.plan.platform {
                Platform::Qemu => "make soak".to_owned(),
                platform => format!("make soak LAB={platform} CYCLES={}", self.plan.cycles),
            },
            machine: summary,
            kernel: self.machine.kernel().to_owned(),
            version,
            cycles: self.plan.cycles,
            elapsed,
            hotplugs: self.hotplugs,
            attach,
            detach,
            work,
            database,
            status,
            state_changes: changes(&before, &self.states()?),
            complaint: self.machine.check_health().err().map(|error| error.to_string()),
            failures: Load::failures(self.machine),
        })
    }

    fn switch_all<'a>(&mut self, mut load: Load<'a>, line: &mut Line) -> Result<(Times, Times, Load<'a>)> {
        let (mut attach, mut detach) = (Times::default(), Times::default());
        let mut done = 0;
        while done < self.plan.cycles {
            let batch = self.plan.batch.min(self.plan.cycles - done);
            let report = self.switch(batch)?;
            attach.add(&report["attach"]);
            detach.add(&report["detach"]);
            done += batch;
            self.hotplug(done / self.plan.batch)?;
            self.machine.check_console()?;
            load.check_running()?;
            line.show(&format!(
                "{done} of {} cycles, {} transactions, {} CPUs left and came back",
                self.plan.cycles,
                load.transactions(),
                self.hotplugs.iter().sum::<u64>()
            ));
        }
        Ok((attach, detach, load))
    }

    /// Runs one batch through the driver, at a priority above everything that runs.
    fn switch(&self, cycles: u64) -> Result<Value> {
        let pause = self.pause.as_micros();
        let line = format!("mercury-workload switch --cycles {cycles} --fifo 50 --pause-us {pause}");
        let output = self.machine.command(&line).timeout(BATCH_LIMIT).run()?.check()?;
        serde_json::from_str(output.stdout.trim())
            .map_err(|error| Error::Host(format!("no report ({error}): {}", output.stdout)))
    }

    /// Takes a CPU offline and online again: every other time under an attached hypervisor.
    fn hotplug(&mut self, number: u64) -> Result<()> {
        let cpu = u32::try_from(number % u64::from(self.plan.cpus - 1)).unwrap_or(0) + 1;
        let attached = number % 2;
        if attached == 1 {
            self.machine.mercury("attach")?;
            self.leave(cpu)?;
            self.come_back(cpu)?;
            self.expect("attached")?;
            self.machine.mercury("detach")?;
        } else {
            self.leave(cpu)?;
            self.switch(3)?;
            self.come_back(cpu)?;
        }
        self.hotplugs[usize::from(attached == 1)] += 1;
        self.expect("native")
    }

    fn leave(&self, cpu: u32) -> Result<()> {
        self.machine.sh(&format!("echo 0 > /sys/devices/system/cpu/cpu{cpu}/online")).map(drop)
    }

    fn come_back(&self, cpu: u32) -> Result<()> {
        self.machine.sh(&format!("echo 1 > /sys/devices/system/cpu/cpu{cpu}/online")).map(drop)
    }

    fn expect(&self, mode: &str) -> Result<()> {
        let modes = self.machine.modes()?;
        if modes.split(' ').all(|found| found == mode) {
            return Ok(());
        }
        Err(self.machine.blame(Error::Unhealthy(format!("not all CPUs are {mode}: {modes}"))))
    }

    /// Reads the whole state of each CPU by the test module, which knows nothing of the driver.
    fn states(&self) -> Result<Vec<Value>> {
        let state = |cpu: u32| {
            let line = self.machine.sh(&format!("mercury-workload kernel state {cpu}"))?;
            serde_json::from_str(&line).map_err(|error| Error::Host(format!("no state ({error}): {line}")))
        };
        (0..self.plan.cpus).map(state).collect()
    }
}

fn changes(before: &[Value], after: &[Value]) -> Vec<String> {
    let pairs = before.iter().zip(after).enumerate();
    pairs.flat_map(|(cpu, (before, after))| changed_fields(cpu, before, after)).collect()
}

fn changed_fields(cpu: usize, before: &Value, after: &Value) -> Vec<String> {
    let fields = before.as_object().into_iter().flatten();
    let changed = fields.filter(|(name, value)| after[*name] != **value);
    changed.map(|(name, value)| format!("CPU {cpu}: {name} was {value} and is {}", after[name])).collect()
}

impl Outcome {
    /// Checks that nothing was lost, wrong or complained about.
    ///
    /// # Errors
    /// With all failures.
    pub fn check(&self) -> Result<()> {
        let work = self.work.iter().map(|work| {
            let what = format!("{}: {}, {} wrong", work.name, work.passes, work.violations);
            (work.passes > 0 && work.violations == 0, what)
        });
        let all = self.checks().into_iter().chain(work);
        let bad: Vec<String> = all.filter(|(holds, _)| !holds).map(|(_, what)| what).collect();
        if bad.is_empty() {
            return Ok(());
        }
        let details = [self.failures.clone(), self.complaint.clone().unwrap_or_default()];
        Err(Error::Unhealthy(format!("{}\n{}", bad.join("; "), details.join("\n"))))
    }

    /// Returns the conditions that must hold beside the work, each with its words.
    fn checks(&self) -> Vec<(bool, String)> {
        let cpus = self.status["cpus"].as_array().map_or(&[][..], Vec::as_slice);
        let all = |test: &dyn Fn(&Value) -> bool| !cpus.is_empty() && cpus.iter().all(test);
        let database = &self.database;
        vec![
            (
                all(&|cpu| cpu["attaches"].as_u64() >= Some(self.cycles)),
                format!("each CPU was attached {} times or more", self.cycles),
            ),
            (
                all(&|cpu| cpu["mode"] == "native" && cpu["crash"].is_null()),
                "every CPU is native at the end, and the hypervisor never failed".to_owned(),
            ),
            (
                all(&|cpu| cpu["attaches"] == cpu["detaches"]),
                "every attach was followed by its detach".to_owned(),
            ),
            (database.failed == 0, format!("{} transactions failed", database.failed)),
            (
                database.acknowledged == database.found && database.found > 0,
                format!("{} transactions acknowledged, {} found", database.acknowledged, database.found),
            ),
            (database.balances_agree, "the balances agree with the history".to_owned()),
            (self.state_changes.is_empty(), self.state()),
            (self.complaint.is_none(), "the kernel has no complaint".to_owned()),
        ]
    }

    fn state(&self) -> String {
        if self.state_changes.is_empty() {
            "all that can be read of each CPU is as it was before the driver was loaded".to_owned()
        } else {
            self.state_changes.join(", ")
        }
    }
}
