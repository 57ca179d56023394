//! The report of a rollback: the reason, and the times that it took.

use crate::output::{Hex, duration, thousands, ticks_to_us};
use mercury_abi::snapshot::{RollbackReason, RollbackReport};
use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rollback {
    /// Number of rollbacks since the hypervisor was loaded.
    pub count: u64,
    /// Reason for the rollback.
    pub reason: &'static str,
    /// Last message of the kernel.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// CPU that asked for the rollback.
    pub cpu: u32,
    /// Instruction pointer there.
    pub rip: Hex,
    /// Pages that were copied back.
    pub pages: u64,
    /// Devices that were silenced.
    pub devices: u64,
    /// Microseconds until the rendezvous of all CPUs.
    pub meet_us: f64,
    /// Microseconds from then until everything was in place.
    pub work_us: f64,
    /// Number of deaths in a row of the same cause, the last one included. 0: the machine went back on
    /// command.
    pub same: u64,
    /// Test builds: pages that were compared, and pages that differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<Compared>,
}

/// The result of a comparison of all memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Pages that were compared.
    pub pages: u64,
    /// Pages that differ.
    pub different: u64,
    /// Address of the first that differs.
    pub first: Hex,
}

impl Rollback {
    /// Converts the driver's report.
    #[must_use]
    pub fn new(report: &RollbackReport, message: String, tsc_khz: u64) -> Self {
        let name = RollbackReason::NAMES.iter().find(|(reason, _)| *reason as u32 == report.reason);
        let compared = Compared {
            pages: report.compared,
            different: report.different,
            first: Hex(report.different_phys),
        };
        Self {
            count: report.count,
            reason: name.map_or("unknown", |(_, name)| name),
            message,
            cpu: report.cpu,
            rip: Hex(report.rip_virt),
            pages: report.pages,
            devices: report.functions,
            meet_us: ticks_to_us(report.rendezvous_ticks, tsc_khz),
            work_us: ticks_to_us(report.work_ticks, tsc_khz),
            same: report.same,
            compared: (report.compared != 0).then_some(compared),
        }
    }

    /// Formats the rollback in one line.
    #[must_use]
    pub fn text(&self) -> String {
        let message = if self.message.is_empty() { String::new() } else { format!(" ({})", self.message) };
        format!(
            "{} on CPU {}{message}: {} pages in {}",
            self.reason,
            self.cpu,
            thousands(self.pages),
            duration(self.meet_us + self.work_us)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollback_in_words() {
        let report = RollbackReport {
            count: 1,
            reason: RollbackReason::Panic as u32,
            cpu: 3,
            pages: 4096,
            rendezvous_ticks: 1_000_000,
            work_ticks: 4_000_000,
            ..RollbackReport::default()
        };
        let rollback = Rollback::new(&report, "sysrq triggered crash".into(), 1_000_000);
        assert_eq!(rollback.text(), "panic on CPU 3 (sysrq triggered crash): 4,096 pages in 5.00 ms");
        assert_eq!(rollback.compared, None);
    }
}
