//! `lab soak --guests`: attach and detach under a KVM host. Its virtual machines are reset, panic,
//! end in triple faults and are killed in the midst of their work, and new ones are made. NMIs go
//! from each CPU to the other, and a CPU leaves and comes back.

use std::{fs, time::Duration};

use serde_json::Value;

use super::{
    Soak, Times,
    load::{self, Work},
};
use crate::soak::{Plan, report};
use mercury_lab::{
    command::Background,
    error::{Context, Error, Result},
    guests,
    kernel::Kernel,
    live::{self, Line},
    machine::Machine,
    markdown::{table, thousands},
    paths,
    spec::{Platform, Qemu, Spec},
};

/// Time limit of a guest's end.
const ENDS_WITHIN: Duration = Duration::from_secs(900);
/// Pause after each switch. Guests live longer than a cycle, and are to live through many.
const PAUSE: Duration = Duration::from_millis(20);
/// The number of NMIs of one round.
const STORM: u32 = 200;
/// The number of cycles from which docs/ gets a page.
const WORTH_A_PAGE: u64 = 2000;

const FILES: [(&str, &str); 3] = [
    ("/root/init.c", include_str!("../../../guest/kvm/init.c")),
    ("/root/initrd", include_str!("../../../guest/kvm/initrd")),
    ("/run/soak/lives", include_str!("../../../guest/soak/lives")),
];
/// The ends of virtual machines, with the words for each.
const LIVES: [(&str, &str); 4] = [
    ("reset", "Linux guests that were reset twice (QMP) and powered off"),
    ("panic", "Linux guests that died of a panic"),
    ("kill", "QEMU killed with its Linux guest on two CPUs"),
    ("fault", "programs without a kernel that ended in a triple fault"),
];

/// The observations of a run.
#[derive(Debug)]
pub struct Outcome {
    machine: String,
    kernel: String,
    cycles: u64,
    elapsed: Duration,
    /// CPUs that left and came back: while native, while attached.
    hotplugs: [u64; 2],
    attach: Times,
    detach: Times,
    work: Vec<Work>,
    nmis: Nmis,
    status: Value,
    complaint: Option<String>,
    failures: String,
}

#[derive(Clone, Copy, Debug, Default)]
struct Nmis {
    sent: u64,
    lost: u64,
}

/// Runs the soak, prints the page, and writes it to docs/ if the soak was long enough.
///
/// # Errors
/// If something was lost, wrong or complained about.
pub fn command(cycles: u64) -> Result<()> {
    let outcome = run(cycles)?;
    let page = outcome.page();
    println!("\n{page}");
    outcome.check()?;
    if cycles >= WORTH_A_PAGE {
        let path = paths::root().join("docs/soak-kvm.md");
        fs::write(&path, page).context(|| format!("write {}", path.display()))?;
        println!("written: {}", path.display());
    }
    Ok(())
}

/// Boots a machine and runs the soak.
///
/// # Errors
/// If the machine ends, or cannot go on.
pub fn run(cycles: u64) -> Result<Outcome> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported { reason: "a Linux guest takes too long in Bochs" });
    }
    live::say(&format!("{cycles} cycles under virtual machines that are reset and crash"));
    let spec = Spec::new(Kernel::BookwormCloud).qemu_version(Qemu::Newer).cpus(2).memory_mib(1536);
    let summary = spec.summary();
    let machine = Machine::boot(guests::arguments()?.iter().fold(spec, |spec, word| spec.qemu_arg(word)))?;
    let outcome = beneath(&machine, cycles, summary)?;
    machine.shut_down()?;
    Ok(outcome)
}

fn beneath(machine: &Machine, cycles: u64, summary: String) -> Result<Outcome> {
    machine.sh(
        "mkdir /run/soak /run/guests; modprobe kvm_amd; mount -o ro $(blkid -L mercury-guests) /run/guests",
    )?;
    for (path, text) in FILES {
        machine.put(path, text.as_bytes(), 0o755)?;
    }
    machine.sh("insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko; \
        bash /root/initrd 1000000 /run/soak/guest.cpio")?;
    machine.mercury("load")?;
    let start = |(kind, name): (&str, &'static str)| -> Result<(&'static str, Background)> {
        Ok((name, machine.spawn(&format!("exec python3 /run/soak/lives {kind}"))?))
    };
    let mut running = LIVES.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    for (_, lives) in &mut running {
        lives.wait_output("begun", ENDS_WITHIN)?;
    }
    let storms = [storm(machine, 0, 1)?, storm(machine, 1, 0)?];

    let plan = Plan { cpus: 2, batch: 20, ..Plan::new(Platform::Qemu, cycles) };
    let mut soak = Soak { machine, plan, hotplugs: [0; 2], pause: PAUSE };
    let (mut attach, mut detach, mut line, mut done) = (Times::default(), Times::default(), Line::begin(), 0);
    while done < cycles {
        let batch = plan.batch.min(cycles - done);
        let report = soak.switch(batch)?;
        attach.add(&report["attach"]);
        detach.add(&report["detach"]);
        done += batch;
        // NMIs are sent only to CPUs that are online.
        machine.sh("touch /run/soak/calm; until flock -n /run/soak/storm true; do sleep 0.1; done")?;
        soak.hotplug(done / plan.batch)?;
        // After a CPU has come back, the kernel updates the CPU sets of tasks in its own time.
        machine.sh("until taskset -c 1 true 2> /dev/null; do sleep 0.1; done; rm /run/soak/calm")?;
        machine.check_console()?;
        still_running(machine, &mut running)?;
        line.show(&format!("{done} of {cycles} cycles"));
    }
    let elapsed = line.elapsed();
    drop(line);
    machine.sh("touch /run/soak/end")?;
    let nmis = storms.into_iter().map(finish_storm).collect::<Result<Vec<_>>>()?;
    let work =
        running.into_iter().map(|(name, lives)| finish(machine, name, lives)).collect::<Result<Vec<_>>>()?;
    let status = machine.mercury("status")?;
    // This succeeds only if no guest uses the module any more.
    machine.sh("rmmod kvm_amd kvm")?;
    let complaint = machine.check_next_attach().err().map(|error| error.to_string());
    Ok(Outcome {
        machine: summary,
        kernel: machine.kernel().to_owned(),
        cycles,
        elapsed,
        hotplugs: soak.hotplugs,
        attach,
        detach,
        work,
        nmis: nmis
            .iter()
            .fold(Nmis::default(), |all, one| Nmis { sent: all.sent + one.sent, lost: all.lost + one.lost }),
        status,
        complaint,
        failures: load::Load::failures(machine),
    })
}

fn still_running(machine: &Machine, running: &mut [(&'static str, Background)]) -> Result<()> {
    for (name, lives) in running {
        if lives.has_ended()? {
            let said = format!("{name}: ended: {}{}", lives.output_so_far()?, lives.errors_so_far()?);
            return Err(machine.blame(Error::Unhealthy(said)));
        }
    }
    Ok(())
}

fn finish(machine: &Machine, name: &'static str, lives: Background) -> Result<Work> {
    let output = lives.wait(ENDS_WITHIN)?;
    load::done(name, &output.stdout).ok_or_else(|| {
        let said = format!("{name}: they did not say what was: {}{}", output.stdout, output.stderr);
        machine.blame(Error::Unhealthy(said))
    })
}

/// Sends NMIs from a CPU to another one, again and again, except while a CPU leaves.
fn storm(machine: &Machine, from: u32, to: u32) -> Result<Background> {
    machine.spawn(&format!(
        "until [ -e /run/soak/end ]; do flock -s /run/soak/storm sh -c 'test -e /run/soak/calm || exec \
         mercury-workload kernel --on {from} nmi {to} {STORM}' || exit; sleep 0.1; done"
    ))
}

fn finish_storm(storm: Background) -> Result<Nmis> {
    let output = storm.wait(ENDS_WITHIN)?.check()?;
    let rounds: Vec<Value> =
        output.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let lost = rounds.iter().filter_map(|round| round["lost"].as_u64()).sum();
    let said = rounds.iter().filter(|round| round["lost"].is_u64()).count() as u64;
    Ok(Nmis { sent: said * u64::from(STORM), lost })
}

impl Outcome {
    /// Checks that nothing was wrong.
    ///
    /// # Errors
    /// With all errors.
    pub fn check(&self) -> Result<()> {
        let bad: Vec<String> =
            self.checks().into_iter().filter(|(holds, _)| !holds).map(|(_, what)| what).collect();
        if bad.is_empty() {
            return Ok(());
        }
        let complaint = self.complaint.as_deref().unwrap_or_default();
        Err(Error::Unhealthy(format!("{}\n{}\n{complaint}", bad.join("; "), self.failures)))
    }

    fn checks(&self) -> Vec<(bool, String)> {
        let cpus = self.status["cpus"].as_array().map_or(&[][..], Vec::as_slice);
        let all = |test: &dyn Fn(&Value) -> bool| !cpus.is_empty() && cpus.iter().all(test);
        let sum = |reason: &str| cpus.iter().filter_map(|cpu| cpu["exits"][reason].as_u64()).sum::<u64>();
        let (runs, held) = (sum("guest-run"), sum("held-nmi"));
        let lived = |work: &Work| {
            let what = format!("{}: {}, {} wrong", work.name, thousands(work.passes), work.violations);
            (work.passes > 0 && work.violations == 0, what)
        };
        let mut checks: Vec<_> = self.work.iter().map(lived).collect();
        checks.extend([
            (
                all(&|cpu| cpu["attaches"].as_u64() >= Some(self.cycles)),
                format!("each CPU was attached {} times or more", thousands(self.cycles)),
            ),
            (
                all(&|cpu| {
                    cpu["mode"] == "native" && cpu["crash"].is_null() && cpu["attaches"] == cpu["detaches"]
                }),
                "every attach was followed by its detach, and the hypervisor never failed".to_owned(),
            ),
            (runs > self.cycles, format!("guests were entered {} times above it", thousands(runs))),
            (
                self.nmis.sent > 0 && self.nmis.lost == 0,
                format!("{} NMIs, {} lost", thousands(self.nmis.sent), self.nmis.lost),
            ),
            (held > 0, format!("{} of them struck while GIF was 0 for KVM", thousands(held))),
            (
                self.complaint.is_none(),
                "KVM could be unloaded, the next attach worked, and the kernel has no complaint".to_owned(),
            ),
        ]);
        checks
    }

    fn page(&self) -> String {
        let [native, attached] = self.hotplugs;
        let mark = |holds: bool| if holds { "yes" } else { "**NO**" };
        let rows: Vec<_> =
            self.checks().into_iter().map(|(holds, what)| vec![what, mark(holds).to_owned()]).collect();
        let times = [("attach", &self.attach), ("detach", &self.detach)];
        let times: Vec<_> = times.iter().map(|(name, times)| report::times_of(name, times)).collect();
        format!(
            "# {} times there and back beneath virtual machines that crash\n\n\
            `cargo run -p mercury-lab-bench -- soak --guests --cycles {}` wrote this page. \
            One machine was emulated in\n\
            software ({}), with Debian's own kernel {} and stock QEMU on its KVM. \
            All CPUs were attached and detached, in\n\
            {} minutes of wall time, while virtual machines lived and died as the table says, \
            one of each kind at a time.\n\
            In between a CPU was taken offline and brought back, with guests on it: \
            {native} times while native, and\n\
            {attached} times while attached.\n\n{}\n\
            Times with interrupts off, per CPU, in the emulator's microseconds. The host is shared, \
            which causes the\n\
            longest times.\n\n{}",
            thousands(self.cycles),
            self.cycles,
            self.machine,
            self.kernel,
            self.elapsed.as_secs() / 60,
            table(&["what", "holds"], &rows),
            table(&["switch", "min", "median", "max"], &times),
        )
    }
}
