//! `mercury load`, `unload`, `attach` and `detach`: their logic, independent of the access to the
//! driver.

use crate::{
    cpus::CpuSet,
    driver::{Direction, Driver},
    error::{Error, Result},
    output::{Render, Text, Tone, bytes, duration, thousands, ticks_to_us},
    stats::Summary,
};
use mercury_abi::{
    code::Code,
    ioctl::{
        MERCURY_MODE_ATTACHED, MERCURY_STATE_ATTACHED, MERCURY_STATE_CRASHED, MERCURY_STATE_UNLOADED,
        SwitchResult, SystemInfo,
    },
};
use serde::Serialize;

/// The preparations for a switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Prepared {
    /// True if the driver was loaded.
    pub driver_inserted: bool,
    /// True if the hypervisor was pre-cached.
    pub hypervisor_loaded: bool,
    /// True if an unused KVM was unloaded.
    pub kvm_unloaded: bool,
}

/// The result of a switch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SwitchReport {
    /// Preparations that were made first.
    pub prepared: Prepared,
    /// CPUs that switched, as a list.
    pub cpus: String,
    /// Number of CPUs that switched.
    pub count: usize,
    /// Number of wanted CPUs that were in the mode already.
    pub already: usize,
    /// Each CPU's time with interrupts off.
    pub per_cpu: Vec<CpuTime>,
    /// Distribution of these times in ticks.
    pub ticks: Summary,
    /// Distribution of these times in microseconds.
    pub us: Summary,
    /// Note about later events on attached CPUs, if any are expected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    #[serde(skip)]
    past: &'static str,
}

/// The time of one CPU with interrupts off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CpuTime {
    /// Number of the CPU in Linux.
    pub cpu: u32,
    pub ticks: u64,
    pub us: f64,
}

/// Loads the hypervisor unless it is loaded. Returns true if this call loaded it.
pub fn ensure_loaded(driver: &dyn Driver) -> Result<bool> {
    match driver.system()?.state {
        MERCURY_STATE_UNLOADED => driver.load().map(|()| true),
        MERCURY_STATE_CRASHED => Err(Error::refused("attach", Code::Crashed, None, [0; 2])),
        _ => Ok(false),
    }
}

/// Switches CPUs and reports the result.
pub fn switch(
    driver: &dyn Driver,
    direction: Direction,
    cpus: Option<&CpuSet>,
    prepared: Prepared,
) -> Result<SwitchReport> {
    let system = driver.system()?;
    if direction == Direction::Detach && system.state == MERCURY_STATE_UNLOADED {
        return Ok(report(direction, &system, &[], 0, prepared));
    }
    let results = driver.switch(direction, cpus)?;
    let already = in_target_mode(driver, direction, cpus)?.saturating_sub(results.len());
    Ok(report(direction, &system, &results, already, prepared))
}

/// Makes the report of a detach on a machine without the driver, where every CPU is native.
#[must_use]
pub fn nothing_to_detach() -> SwitchReport {
    report(Direction::Detach, &SystemInfo::default(), &[], 0, Prepared::default())
}

/// Returns the number of wanted CPUs that are in the target mode.
fn in_target_mode(driver: &dyn Driver, direction: Direction, cpus: Option<&CpuSet>) -> Result<usize> {
    let wanted = |cpu: u32| cpus.is_none_or(|cpus| cpus.contains(cpu));
    let reached = |mode: u32| (mode == MERCURY_MODE_ATTACHED) == (direction == Direction::Attach);
    let online = |mode: u32| mode != mercury_abi::ioctl::MERCURY_MODE_OFFLINE;
    let status = driver.status()?;
    Ok(status.iter().filter(|cpu| wanted(cpu.cpu) && online(cpu.mode) && reached(cpu.mode)).count())
}

fn report(
    direction: Direction,
    system: &SystemInfo,
    results: &[SwitchResult],
    already: usize,
    prepared: Prepared,
) -> SwitchReport {
    let us = |ticks| ticks_to_us(ticks, system.tsc_khz);
    let cpus: CpuSet = results.iter().map(|result| result.cpu).collect();
    SwitchReport {
        prepared,
        cpus: cpus.to_string(),
        count: results.len(),
        already,
        per_cpu: results.iter().map(|r| CpuTime { cpu: r.cpu, ticks: r.ticks, us: us(r.ticks) }).collect(),
        ticks: Summary::of(results.iter().map(|result| result.ticks as f64)),
        us: Summary::of(results.iter().map(|result| us(result.ticks))),
        note: None,
        past: direction.past(),
    }
}

impl Render for SwitchReport {
    fn render(&self, to: &mut Text) {
        self.prepared.render(to);
        match (self.count, self.already) {
            (0, 0) if self.past == Direction::Detach.past() => to.line("nothing to do: no CPU is attached"),
            (0, 0) => to.line("nothing to do: no CPU was named"),
            (0, _) => to.line(format!("nothing to do: every CPU is {} already", self.state())),
            (count, _) => {
                let text = format!("{} {count} {} ({})", self.past, plural(count, "CPU"), self.cpus);
                to.line(to.tone(Tone::Good, &text));
                to.line(self.times());
            }
        }
        if self.count > 0 && self.already > 0 {
            to.line(format!("{} {} already {}", self.already, plural(self.already, "CPU"), self.state()));
        }
        if let Some(note) = &self.note {
            to.line(format!("note: {note}"));
        }
    }
}

impl SwitchReport {
    /// Adds a note to the report.
    #[must_use]
    pub fn note(mut self, note: Option<String>) -> Self {
        self.note = note;
        self
    }

    fn state(&self) -> &'static str {
        if self.past == Direction::Attach.past() { "attached" } else { "native" }
    }

    fn times(&self) -> String {
        let ticks = |value: f64| thousands(value as u64);
        format!(
            "interrupts off, per CPU: min {}, median {}, max {} ({} / {} / {} ticks)",
            duration(self.us.min),
            duration(self.us.median),
            duration(self.us.max),
            ticks(self.ticks.min),
            ticks(self.ticks.median),
            ticks(self.ticks.max)
        )
    }
}

impl Prepared {
    fn render(self, to: &mut Text) {
        let steps = [
            (self.kvm_unloaded, "unloaded an unused KVM"),
            (self.driver_inserted, "loaded the driver"),
            (self.hypervisor_loaded, "loaded the hypervisor into memory"),
        ];
        steps.iter().filter(|(done, _)| *done).for_each(|(_, text)| to.line(text));
    }
}

/// Returns `CPU` or `CPUs`.
#[must_use]
pub fn plural(count: usize, noun: &str) -> String {
    if count == 1 { noun.to_string() } else { format!("{noun}s") }
}

/// The result of `mercury load`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// Preparations that were made.
    pub prepared: Prepared,
    /// Memory of the hypervisor in bytes.
    pub memory_bytes: u64,
    pub version: String,
}

impl LoadReport {
    /// Asks the driver for its present state.
    pub fn collect(driver: &dyn Driver, prepared: Prepared) -> Result<Self> {
        let system = driver.system()?;
        Ok(Self {
            prepared,
            memory_bytes: system.memory_fixed + system.memory_per_cpu * u64::from(system.possible_cpus),
            version: crate::status::nul_padded(&system.version),
        })
    }
}

impl Render for LoadReport {
    fn render(&self, to: &mut Text) {
        if self.prepared == Prepared::default() {
            to.line("nothing to do: the hypervisor is loaded already");
        }
        self.prepared.render(to);
        to.line(format!("Mercury {} is ready and holds {}", self.version, bytes(self.memory_bytes)));
    }
}

/// The result of `mercury unload`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnloadReport {
    /// Number of CPUs that were detached first.
    pub detached: usize,
    /// True if the hypervisor's memory was freed.
    pub hypervisor_freed: bool,
    /// True if the driver was removed.
    pub driver_removed: bool,
}

/// Frees the hypervisor. Refuses while a CPU is attached, unless `detach` asks to detach it first.
pub fn free(driver: &dyn Driver, detach: bool) -> Result<UnloadReport> {
    let system = driver.system()?;
    let mut report = UnloadReport { detached: 0, hypervisor_freed: false, driver_removed: false };
    if system.state == MERCURY_STATE_UNLOADED {
        return Ok(report);
    }
    if system.state == MERCURY_STATE_ATTACHED {
        if !detach {
            return Err(Error::refused("unload", Code::StillAttached, None, [0; 2]));
        }
        report.detached = driver.switch(Direction::Detach, None)?.len();
    }
    driver.unload()?;
    report.hypervisor_freed = true;
    Ok(report)
}

impl Render for UnloadReport {
    fn render(&self, to: &mut Text) {
        if self.detached > 0 {
            to.line(format!("detached {} {}", self.detached, plural(self.detached, "CPU")));
        }
        if self.hypervisor_freed {
            to.line("freed the hypervisor's memory");
        }
        if self.driver_removed {
            to.line("removed the driver");
        }
        if *self == (Self { detached: 0, hypervisor_freed: false, driver_removed: false }) {
            to.line("nothing to do: Mercury is not loaded");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{exit::Exit, fake::FakeDriver};

    fn rendered(report: &impl Render) -> String {
        let mut text = Text::new(false);
        report.render(&mut text);
        text.finish()
    }

    #[test]
    fn attach_and_detach() {
        let driver = FakeDriver::new(4);
        let loaded = ensure_loaded(&driver).expect("load");
        let prepared = Prepared { hypervisor_loaded: loaded, ..Prepared::default() };
        let report = switch(&driver, Direction::Attach, None, prepared).expect("attach");
        assert_eq!(
            rendered(&report),
            "loaded the hypervisor into memory\n\
             attached 4 CPUs (0-3)\n\
             interrupts off, per CPU: min 1.00 µs, median 2.00 µs, max 4.00 µs (3,000 / 6,000 / 12,000 \
             ticks)\n"
        );
        let report =
            switch(&driver, Direction::Detach, Some(&"1".parse().expect("list")), Prepared::default());
        assert!(rendered(&report.expect("detach")).starts_with("detached 1 CPU (1)\n"));
        let report = switch(&driver, Direction::Attach, None, Prepared::default()).expect("attach");
        assert!(rendered(&report).ends_with("3 CPUs already attached\n"), "{}", rendered(&report));
        let report = switch(&driver, Direction::Attach, None, Prepared::default()).expect("attach");
        assert_eq!(rendered(&report), "nothing to do: every CPU is attached already\n");
        let report = report.note(crate::module::departure(&["avic"]));
        assert!(rendered(&report).contains("\nnote: a CPU that runs a virtual machine with AVIC"));
    }

    #[test]
    fn a_refusal_is_passed_on() {
        let driver = FakeDriver::new(1);
        driver.load().expect("load");
        driver.refuse.set(Some(Code::VirtualizationInUse));
        let error = switch(&driver, Direction::Attach, None, Prepared::default()).expect_err("refused");
        assert_eq!(error.exit, Exit::Impossible);
    }

    #[test]
    fn unload_wants_native_cpus() {
        let driver = FakeDriver::new(2);
        assert_eq!(
            rendered(&free(&driver, false).expect("nothing")),
            "nothing to do: Mercury is not loaded\n"
        );
        driver.load().expect("load");
        driver.switch(Direction::Attach, None).expect("attach");
        let error = free(&driver, false).expect_err("still attached");
        assert_eq!((error.code, error.exit), (Some(Code::StillAttached), Exit::State));
        let report = free(&driver, true).expect("detach and free");
        assert_eq!((report.detached, report.hypervisor_freed), (2, true));
    }

    #[test]
    fn detaching_nothing_is_fine() {
        let report =
            switch(&FakeDriver::new(2), Direction::Detach, None, Prepared::default()).expect("nothing");
        assert_eq!(report.count, 0);
        assert_eq!(rendered(&report), "nothing to do: no CPU is attached\n");
    }
}
