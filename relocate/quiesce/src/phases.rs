//! The parts of an instant's pause.

use mercury_abi::ioctl::SnapshotRequest;
use mercury_control::{
    device::Device,
    driver::Driver,
    error::Result,
    output::{Text, duration, ticks_to_us},
};
use serde::Serialize;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phase {
    pub name: &'static str,
    /// Duration in ticks of the TSC.
    pub ticks: u64,
    /// Duration in microseconds.
    pub us: f64,
}

/// A pause with its parts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Phases {
    /// Parts in their order.
    pub steps: Vec<Phase>,
    /// Pages of persistent DMA memory that were copied at the instant.
    pub persistent_pages: u64,
    /// Ticks of these copies, within the next.
    pub persistent_ticks: u64,
    /// Ticks in the hypervisor, within the step `hypervisor`.
    pub hypervisor_ticks: u64,
}

impl Phases {
    /// Computes the parts: the time for which applications and file systems were held before, and
    /// the driver's measurements. Empty on another machine than the one that was measured.
    ///
    /// # Errors
    ///
    /// Returns an error if the driver does not report the rate of its clock.
    pub fn of(held: Duration, begin: &SnapshotRequest, device: &Device) -> Result<Self> {
        if begin.restored != 0 || begin.rolled_back != 0 {
            return Ok(Self::default());
        }
        Ok(Self::new(held, begin, device.system()?.tsc_khz))
    }

    fn new(held: Duration, begin: &SnapshotRequest, tsc_khz: u64) -> Self {
        let instant = &begin.instant;
        let held = (held.as_secs_f64() * tsc_khz as f64 * 1e3) as u64;
        let steps = [
            ("hold", held),
            ("quiesce", instant.quiesce),
            ("gather", instant.gather),
            ("suspend", instant.suspend),
            ("search", instant.search),
            ("save", instant.save),
            ("hypervisor", instant.enter),
            ("resume", instant.resume),
            ("release", instant.release),
            ("thaw", instant.thaw),
        ];
        let step = |(name, ticks)| Phase { name, ticks, us: ticks_to_us(ticks, tsc_khz) };
        Self {
            steps: steps.map(step).into(),
            persistent_pages: begin.status.persistent_pages,
            persistent_ticks: begin.status.persistent_ticks,
            hypervisor_ticks: begin.status.enter_ticks,
        }
    }

    /// Writes the parts in one line.
    pub fn render(&self, to: &mut Text) {
        let told = |step: &Phase| format!("{} {}", step.name, duration(step.us));
        if !self.steps.is_empty() {
            to.wrapped("of that: ", &self.steps.iter().map(told).collect::<Vec<_>>().join(", "));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_abi::snapshot::{InstantTicks, SnapshotStatus};

    #[test]
    fn steps_are_in_their_order() {
        let instant =
            InstantTicks { quiesce: 5_000_000, enter: 2000, thaw: 3_000_000, ..InstantTicks::default() };
        let status =
            SnapshotStatus { persistent_pages: 7, persistent_ticks: 1000, ..SnapshotStatus::default() };
        let held = Duration::from_millis(2);
        let phases =
            Phases::new(held, &SnapshotRequest { instant, status, ..SnapshotRequest::default() }, 1_000_000);
        let named = |name: &str| phases.steps.iter().find(|step| step.name == name).map(|step| step.us);
        assert_eq!(
            (named("quiesce"), named("hypervisor"), named("thaw")),
            (Some(5000.0), Some(2.0), Some(3000.0))
        );
        assert_eq!((phases.persistent_pages, phases.persistent_ticks), (7, 1000));
        assert_eq!(phases.steps.first().map(|step| step.name), Some("hold"));
        assert_eq!(named("hold"), Some(2000.0));
    }
}
