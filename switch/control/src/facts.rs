//! All facts of a CPU, and the proof that two switches leave it unchanged: for tests and reports.

use crate::{
    cpus::CpuSet,
    driver::{Direction, Driver},
    error::{Error, Result},
    output::{Hex, Render, Text},
};
use mercury_abi::{
    code::Code,
    facts::CpuFacts,
    ioctl::{MERCURY_MODE_ATTACHED, MERCURY_MODE_NATIVE},
};
use serde::Serialize;
use std::collections::BTreeMap;

/// Facts of several CPUs.
#[derive(Debug, Serialize)]
pub struct AllFacts {
    cpus: Vec<BTreeMap<&'static str, Hex>>,
}

/// Reads the facts of `cpus`; those that are offline are left out.
pub fn collect(driver: &dyn Driver, cpus: &CpuSet) -> Result<AllFacts> {
    let mut all = Vec::new();
    for cpu in cpus.iter() {
        all.extend(driver.facts(cpu)?.map(|facts| named(&facts)));
    }
    Ok(AllFacts { cpus: all })
}

fn named(facts: &CpuFacts) -> BTreeMap<&'static str, Hex> {
    mercury_preflight::named_values(facts).map(|(name, value)| (name, Hex(value))).collect()
}

impl Render for AllFacts {
    fn render(&self, to: &mut Text) {
        for cpu in &self.cpus {
            to.line(format!("CPU {}", cpu.get("cpu").map_or(0, |cpu| cpu.0)));
            cpu.iter().for_each(|(name, value)| to.line(format!("  {name:24}{:#x}", value.0)));
        }
    }
}

/// A comparison of each CPU's state before, between and after two switches.
#[derive(Debug, Serialize)]
pub struct Verification {
    /// No CPU differs, except in state that changes with the task.
    pub equal: bool,
    cpus: Vec<Compared>,
}

/// The comparison of one CPU.
#[derive(Debug, Serialize)]
struct Compared {
    cpu: u32,
    /// Mode in which the CPU was found, and left again.
    mode: &'static str,
    changes: Vec<Change>,
}

#[derive(Debug, Serialize)]
struct Change {
    /// Mode of the CPU, `attached` or `native`, at the reading that differs from the first one.
    when: &'static str,
    field: &'static str,
    before: Hex,
    after: Hex,
    /// True if the kernel may have changed the state with the task, so that it does not count.
    per_task: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Native,
    Attached,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Attached => "attached",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Native => Self::Attached,
            Self::Attached => Self::Native,
        }
    }

    /// Returns the switch that leads to this mode.
    fn direction(self) -> Direction {
        match self {
            Self::Native => Direction::Detach,
            Self::Attached => Direction::Attach,
        }
    }
}

/// Cares for a CPU that is switched for the length of a comparison.
pub trait Care {
    /// Hears that a CPU will be switched, before it is, and how it is switched back.
    ///
    /// # Errors
    ///
    /// Returns an error if nothing could switch it back: it is not switched then.
    fn will(&mut self, cpu: u32, back: Direction) -> Result<()>;
    /// Hears that the CPU is back in its mode.
    fn is_back(&mut self);
}

/// Switches each CPU in turn to the other mode and back, and compares its state before, between and
/// after. CPUs that come online attach, or do not, as before.
///
/// # Errors
///
/// Returns an error if there is a snapshot of memory, which a detach would end, or a switch is
/// refused.
pub fn verify(driver: &dyn Driver, cpus: &CpuSet, care: &mut dyn Care) -> Result<Verification> {
    refuse_snapshot(driver)?;
    let cpus: Vec<Compared> = cpus.iter().map(|cpu| verify_cpu(driver, cpu, care)).collect::<Result<_>>()?;
    let equal = cpus.iter().all(Compared::is_equal);
    Ok(Verification { equal, cpus })
}

/// Refuses while there is a snapshot of memory: a CPU that detaches ends it.
fn refuse_snapshot(driver: &dyn Driver) -> Result<()> {
    if driver.system()?.snapshot.live == 0 {
        return Ok(());
    }
    let refusal = Error::refused("verify", Code::SnapshotLive, None, [0; 2]);
    Err(Error {
        message: format!("{}; verify detaches each CPU, which would end the snapshot", refusal.message),
        ..refusal
    }
    .hint("verify before you keep a snapshot; `mercury snapshot --drop` gives up the one that is kept"))
}

fn verify_cpu(driver: &dyn Driver, cpu: u32, care: &mut dyn Care) -> Result<Compared> {
    let mode = mode_of(driver, cpu)?;
    let before = read_in(driver, cpu, mode)?;
    care.will(cpu, mode.direction())?;
    switch_to(driver, cpu, mode.other())?;
    let between = read_in(driver, cpu, mode.other());
    switch_to(driver, cpu, mode).map_err(|error| left_in(error, cpu, mode.other()))?;
    care.is_back();
    let (between, after) = (between?, read_in(driver, cpu, mode)?);
    let changed = |when: Mode, later: &CpuFacts| -> Vec<Change> {
        mercury_preflight::state_difference(&before, later).map(|found| change(when.name(), &found)).collect()
    };
    let changes = changed(mode.other(), &between).into_iter().chain(changed(mode, &after)).collect();
    Ok(Compared { cpu, mode: mode.name(), changes })
}

fn mode_of(driver: &dyn Driver, cpu: u32) -> Result<Mode> {
    let status = driver.status()?.into_iter().find(|status| status.cpu == cpu);
    match status.map(|status| status.mode) {
        Some(MERCURY_MODE_ATTACHED) => Ok(Mode::Attached),
        Some(MERCURY_MODE_NATIVE) => Ok(Mode::Native),
        _ => Err(Error::refused("verify", Code::CpuOffline, Some(cpu), [0; 2])),
    }
}

/// Reads a CPU's state, without the state that the hypervisor itself sets while the CPU is
/// attached.
fn read_in(driver: &dyn Driver, cpu: u32, mode: Mode) -> Result<CpuFacts> {
    let gone = || Error::refused("verify", Code::CpuOffline, Some(cpu), [0; 2]);
    let facts = driver.facts(cpu)?.ok_or_else(gone)?;
    Ok(if mode == Mode::Attached { mercury_preflight::as_if_native(&facts) } else { facts })
}

fn switch_to(driver: &dyn Driver, cpu: u32, mode: Mode) -> Result<()> {
    let one: CpuSet = [cpu].into_iter().collect();
    driver.switch_for_now(mode.direction(), &one)
}

/// Adds to the error of a switch back that failed the mode in which the CPU is now.
fn left_in(error: Error, cpu: u32, mode: Mode) -> Error {
    let back = mode.other().direction().name();
    let message = format!("{}; CPU {cpu} is {} now, and was not before", error.message, mode.name());
    let remedy = error.hint.as_ref().map(|hint| format!("{hint}; then ")).unwrap_or_default();
    Error { message, ..error }.hint(format!("{remedy}`mercury {back} --cpus {cpu}` switches it back"))
}

fn change(when: &'static str, difference: &mercury_preflight::Difference) -> Change {
    Change {
        when,
        field: difference.name,
        before: Hex(difference.before),
        after: Hex(difference.after),
        per_task: difference.per_task,
    }
}

impl Compared {
    /// Returns true if nothing differs, except state that changes with the task.
    fn is_equal(&self) -> bool {
        self.changes.iter().all(|change| change.per_task)
    }

    fn verdict(&self) -> &'static str {
        match (self.is_equal(), self.changes.is_empty(), self.mode) {
            (true, true, "attached") => "equal before, while native and after",
            (true, true, _) => "equal before, while attached and after",
            (true, false, _) => "equal, except for state that changes with the task:",
            (false, ..) => "differs:",
        }
    }
}

impl Render for Verification {
    fn render(&self, to: &mut Text) {
        for cpu in &self.cpus {
            to.line(format!("CPU {}: {}", cpu.cpu, cpu.verdict()));
            for change in &cpu.changes {
                let task = if change.per_task { " (changes with the task)" } else { "" };
                let (before, after) = (change.before.0, change.after.0);
                to.line(format!("  {} {}: {before:#x} → {after:#x}{task}", change.when, change.field));
            }
        }
        for mode in [Mode::Native, Mode::Attached] {
            let cpus: CpuSet =
                self.cpus.iter().filter(|cpu| cpu.mode == mode.name()).map(|cpu| cpu.cpu).collect();
            if !cpus.is_empty() {
                let noun = crate::switch::plural(cpus.len(), "CPU");
                to.line(format!("{noun} {cpus}: {} as before", mode.name()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeDriver;

    fn rendered(report: &Verification) -> String {
        let mut text = Text::new(false);
        report.render(&mut text);
        text.finish()
    }

    /// Notes which CPUs are switched, and how they are switched back.
    #[derive(Default)]
    struct Noted {
        told: Vec<(u32, Direction)>,
        away: Option<u32>,
    }

    impl Care for Noted {
        fn will(&mut self, cpu: u32, back: Direction) -> Result<()> {
            assert_eq!(self.away.replace(cpu), None, "one CPU at a time");
            self.told.push((cpu, back));
            Ok(())
        }

        fn is_back(&mut self) {
            self.away = None;
        }
    }

    fn verify(driver: &dyn Driver, cpus: &CpuSet) -> Result<Verification> {
        super::verify(driver, cpus, &mut Noted::default())
    }

    /// A machine on which all CPUs attach that come online stays one, and so does one on which none does.
    #[test]
    fn cpus_that_come_later_attach_as_before() {
        for attaches in [true, false] {
            let driver = FakeDriver::new(2);
            let one = "0".parse().expect("list");
            driver.switch(Direction::Attach, if attaches { None } else { Some(&one) }).expect("attach");
            verify(&driver, &both()).expect("verify");
            assert_eq!(driver.want_all.get(), attaches);
            assert_eq!(*driver.attached.borrow(), [true, attaches]);
        }
    }

    /// If the command is killed, the undo process knows which CPU goes back, and how.
    #[test]
    fn each_switch_is_told_before() {
        let driver = FakeDriver::new(2);
        *driver.attached.borrow_mut() = vec![false, true];
        let mut noted = Noted::default();
        super::verify(&driver, &both(), &mut noted).expect("verify");
        assert_eq!(noted.told, [(0, Direction::Detach), (1, Direction::Attach)]);
        assert_eq!(noted.away, None);
        driver.refuse_attach.set(Some(Code::VirtualizationInUse));
        super::verify(&driver, &"1".parse().expect("list"), &mut noted).expect_err("it stays native");
        assert_eq!(noted.away, Some(1));
    }

    fn both() -> CpuSet {
        "0-1".parse().expect("list")
    }

    #[test]
    fn a_good_driver_changes_nothing() {
        let report = verify(&FakeDriver::new(2), &both()).expect("verify");
        assert!(report.equal);
        let error = verify(&FakeDriver::new(2), &"5".parse().expect("list")).expect_err("no such CPU");
        assert_eq!(error.code, Some(Code::CpuOffline));
    }

    /// EFER.SVME, which an attached CPU reads as set, is no difference; and each CPU stays in its
    /// mode.
    #[test]
    fn each_cpu_is_left_in_the_mode_in_which_it_was() {
        for attached in [[true, true], [false, true], [false, false]] {
            let driver = FakeDriver::new(2);
            *driver.attached.borrow_mut() = attached.to_vec();
            let report = verify(&driver, &both()).expect("verify");
            assert!(report.equal, "{report:?}");
            assert_eq!(*driver.attached.borrow(), attached);
        }
        let driver = FakeDriver::new(2);
        *driver.attached.borrow_mut() = vec![false, true];
        assert_eq!(
            rendered(&verify(&driver, &both()).expect("verify")),
            "CPU 0: equal before, while attached and after\n\
             CPU 1: equal before, while native and after\n\
             CPU 0: native as before\n\
             CPU 1: attached as before\n"
        );
    }

    #[test]
    fn a_snapshot_is_not_ended_for_it() {
        let driver = FakeDriver::new(2);
        *driver.attached.borrow_mut() = vec![true; 2];
        driver.snapshot_live.set(true);
        let error = verify(&driver, &both()).expect_err("refused");
        assert_eq!(error.code, Some(Code::SnapshotLive));
        assert_eq!(*driver.attached.borrow(), [true; 2]);
    }

    #[test]
    fn a_cpu_that_cannot_go_back_is_named() {
        let driver = FakeDriver::new(2);
        *driver.attached.borrow_mut() = vec![true; 2];
        driver.refuse_attach.set(Some(Code::VirtualizationInUse));
        let error = verify(&driver, &both()).expect_err("it stays native");
        assert!(error.message.ends_with("CPU 0 is native now, and was not before"), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.ends_with("`mercury attach --cpus 0` switches it back")));
    }

    #[test]
    fn state_of_the_task_is_no_difference() {
        let change =
            |field, per_task| Change { when: "native", field, before: Hex(1), after: Hex(2), per_task };
        let found = |changes| Compared { cpu: 0, mode: "native", changes };
        assert_eq!(found(vec![]).verdict(), "equal before, while attached and after");
        let of_task = found(vec![change("spec_ctrl", true)]);
        assert_eq!(of_task.verdict(), "equal, except for state that changes with the task:");
        assert_eq!(found(vec![change("spec_ctrl", true), change("efer", false)]).verdict(), "differs:");
    }

    #[test]
    fn all_facts_have_names() {
        let all = collect(&FakeDriver::new(1), &"0-3".parse().expect("list")).expect("facts");
        assert_eq!(all.cpus.len(), 1);
        assert_eq!(all.cpus[0].get("efer"), Some(&Hex(0xd01)));
    }
}
