//! Counters of the kernel in /sys: EDAC's of memory controllers, and AER's of PCI Express.

use super::{Amount, Presence, Reading, Sensor, rules::Signal};
use mercury_control::sysroot::Sysroot;
use std::{collections::BTreeMap, io};

/// Folder of the memory controllers.
const CONTROLLERS: &str = "sys/devices/system/edac/mc";
/// Folder of the PCI functions.
const FUNCTIONS: &str = "sys/bus/pci/devices";

/// The sensor.
#[derive(Debug)]
pub struct Counters {
    sysroot: Sysroot,
    /// Errors of each DIMM at the last reading.
    dimms: BTreeMap<String, u64>,
}

fn controllers(sysroot: &Sysroot) -> Vec<String> {
    let is_controller = |name: &String| {
        name.strip_prefix("mc")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    sysroot.names(CONTROLLERS).into_iter().filter(is_controller).collect()
}

fn functions(sysroot: &Sysroot) -> Vec<String> {
    let has_aer = |name: &String| sysroot.exists(&format!("{FUNCTIONS}/{name}/aer_dev_nonfatal"));
    sysroot.names(FUNCTIONS).into_iter().filter(has_aer).collect()
}

/// Returns what this machine has of the sensor.
///
/// # Errors
///
/// Returns the reason why it has nothing.
pub fn presence(sysroot: &Sysroot) -> Presence {
    let (memory, pci) = (controllers(sysroot), functions(sysroot));
    let edac = match memory.len() {
        0 => "no driver of the memory controller (EDAC)".to_owned(),
        count => format!("EDAC: {count} memory controllers"),
    };
    match pci.len() {
        0 if memory.is_empty() => Err(format!("{edac}, and no PCI function reports errors (AER)")),
        0 => Ok(format!("{edac}; no PCI function reports errors (AER)")),
        count => Ok(format!("{edac}; AER: {count} PCI functions")),
    }
}

impl Counters {
    #[must_use]
    pub fn new(sysroot: &Sysroot) -> Self {
        Self { sysroot: sysroot.clone(), dimms: BTreeMap::new() }
    }

    fn number(&self, file: &str) -> Option<u64> {
        self.sysroot.text(file)?.parse().ok()
    }

    /// Reads the counters of a memory controller.
    fn controller(&mut self, name: &str, to: &mut Vec<Reading>) {
        let folder = format!("{CONTROLLERS}/{name}");
        let worst = self.worst(&folder).map(|label| format!(", most of them in {label}"));
        let text = format!("memory controller {name}{}", worst.unwrap_or_default());
        for (signal, file) in [(Signal::Corrected, "ce_count"), (Signal::Uncorrected, "ue_count")] {
            if let Some(count) = self.number(&format!("{folder}/{file}")) {
                to.push(Reading::new(signal, name, Amount::Counter(count), &text));
            }
        }
    }

    /// Returns the label of the DIMM with the most errors since the last reading.
    fn worst(&mut self, folder: &str) -> Option<String> {
        let mut worst = (0, None);
        for dimm in self.sysroot.names(folder) {
            if !dimm.starts_with("dimm") && !dimm.starts_with("rank") {
                continue;
            }
            let of = |file: &str| self.number(&format!("{folder}/{dimm}/{file}")).unwrap_or_default();
            let count = of("dimm_ce_count").saturating_add(of("dimm_ue_count"));
            let before = self.dimms.insert(format!("{folder}/{dimm}"), count).unwrap_or(count);
            let growth = count.saturating_sub(before);
            if growth > worst.0 {
                let label = self.sysroot.text(&format!("{folder}/{dimm}/dimm_label"));
                worst = (growth, label.filter(|label| !label.is_empty()).or(Some(dimm)));
            }
        }
        worst.1
    }

    /// Reads the counters of a PCI function. Corrected errors of a link are frequent, and are left out.
    fn function(&self, name: &str, to: &mut Vec<Reading>) {
        for (file, kind) in [("aer_dev_nonfatal", "non-fatal"), ("aer_dev_fatal", "fatal")] {
            let text = self.sysroot.text(&format!("{FUNCTIONS}/{name}/{file}")).unwrap_or_default();
            if let Some(count) = total(&text) {
                let source = format!("{name}/{kind}");
                let text = format!("{kind} errors of PCI function {name}");
                to.push(Reading::new(Signal::Pcie, source, Amount::Counter(count), text));
            }
        }
    }
}

/// Returns the sum of AER's counters: the line `TOTAL_ERR_…`.
#[must_use]
pub fn total(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("TOTAL_ERR_"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

impl Sensor for Counters {
    fn read(&mut self, to: &mut Vec<Reading>) -> io::Result<()> {
        for name in controllers(&self.sysroot) {
            self.controller(&name, to);
        }
        functions(&self.sysroot).iter().for_each(|name| self.function(name, to));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fake, amount, read};
    use super::*;

    fn machine() -> Fake {
        let fake = Fake::new();
        let controller = "sys/devices/system/edac/mc/mc0";
        fake.put(&format!("{controller}/ce_count"), "7\n");
        fake.put(&format!("{controller}/ue_count"), "1\n");
        fake.put(&format!("{controller}/dimm3/dimm_ce_count"), "6\n");
        fake.put(&format!("{controller}/dimm3/dimm_label"), "CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n");
        fake.put("sys/devices/system/edac/mc/power/control", "auto\n");
        let function = "sys/bus/pci/devices/0000:01:00.0";
        fake.put(&format!("{function}/aer_dev_nonfatal"), "Undefined 0\nDLP 2\nTOTAL_ERR_NONFATAL 2\n");
        fake.put(&format!("{function}/aer_dev_fatal"), "Undefined 0\nTOTAL_ERR_FATAL 0\n");
        fake.put("sys/bus/pci/devices/0000:00:00.0/vendor", "0x1022\n");
        fake
    }

    #[test]
    fn counters_are_read_by_part() {
        let fake = machine();
        let mut counters = Counters::new(&fake.sysroot());
        let readings = read(&mut counters);
        let count = |signal, source| amount(&readings, signal, source);
        assert_eq!(count(Signal::Corrected, "mc0"), Some(Amount::Counter(7)));
        assert_eq!(count(Signal::Uncorrected, "mc0"), Some(Amount::Counter(1)));
        assert_eq!(count(Signal::Pcie, "0000:01:00.0/non-fatal"), Some(Amount::Counter(2)));
        assert_eq!(readings.len(), 4, "{readings:?}");
        assert_eq!(readings[0].text, "memory controller mc0");
        // The DIMM with the newest errors is named, not that with the most.
        fake.put("sys/devices/system/edac/mc/mc0/dimm4/dimm_ce_count", "900\n");
        fake.put("sys/devices/system/edac/mc/mc0/dimm3/dimm_ce_count", "9\n");
        let readings = read(&mut counters);
        assert!(readings[0].text.ends_with("most of them in CPU_SrcID#0_MC#0_Chan#1_DIMM#0"), "{readings:?}");
    }

    #[test]
    fn a_machine_says_what_it_has() {
        assert_eq!(
            presence(&machine().sysroot()),
            Ok("EDAC: 1 memory controllers; AER: 1 PCI functions".into())
        );
        let why = presence(&Fake::new().sysroot()).expect_err("nothing");
        assert!(why.contains("EDAC") && why.contains("AER"), "{why}");
    }

    #[test]
    fn broken_counters_are_left_out() {
        let fake = machine();
        fake.put("sys/devices/system/edac/mc/mc0/ce_count", "-3x\n");
        fake.put("sys/bus/pci/devices/0000:01:00.0/aer_dev_fatal", "TOTAL_ERR_FATAL\n");
        let readings = read(&mut Counters::new(&fake.sysroot()));
        assert_eq!(readings.len(), 2, "{readings:?}");
    }
}
