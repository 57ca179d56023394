//! The state of the guard in mercuryd, in a file for `mercury guard status` and `mercury metrics`.

use super::sensors::rules::{Kind, Signal};
use mercury_control::{
    output::{Render, Text, Tone, thousands},
    sysroot::Sysroot,
};
use serde::{Deserialize, Serialize};
use std::{fs, io};

/// The file. It is gone after a restart.
const FILE: &str = "run/mercury/guard.state";

/// A sensor that is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sensor {
    pub name: Kind,
    /// Reason why the sensor does not answer; none while it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silent: Option<String>,
}

/// Sums of a signal of a sensor since the daemon's start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    pub sensor: Kind,
    pub signal: Signal,
    /// Errors, or readings in alarm.
    pub amount: u64,
    /// Times that the limit was passed.
    pub alarms: u64,
}

/// A service that is watched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    pub name: String,
    /// State in words: `idle`, `up` or `down` by heartbeats, or systemd's own.
    pub state: String,
    /// True from a failure to its end.
    pub down: bool,
    /// Failures since the daemon's start.
    pub failures: u64,
}

/// The state of the guard in mercuryd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Process of the daemon.
    pub pid: u32,
    pub sensors: Vec<Sensor>,
    pub signals: Vec<Sum>,
    /// Alarms of hwmon that were on from the start, and do not count.
    pub stuck: Vec<String>,
    pub services: Vec<Service>,
}

impl Report {
    /// Writes the file as a whole.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written.
    pub fn write(&self, sysroot: &Sysroot) -> io::Result<()> {
        let (file, new) = (sysroot.path(FILE), sysroot.path(&format!("{FILE}.new")));
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&new, serde_json::to_string(self)?)?;
        fs::rename(new, file)
    }

    /// Reads the file of a daemon that runs.
    #[must_use]
    pub fn read(sysroot: &Sysroot) -> Option<Self> {
        let report: Self = serde_json::from_str(&sysroot.text(FILE)?).ok()?;
        // A daemon that was killed has left its file.
        let program = sysroot.text(&format!("proc/{}/comm", report.pid))?;
        (program == "mercury").then_some(report)
    }

    /// Removes the file.
    pub fn remove(sysroot: &Sysroot) {
        let _ = fs::remove_file(sysroot.path(FILE));
    }
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        if self.sensors.is_empty() {
            to.line("sensors: none");
        }
        for sensor in &self.sensors {
            match &sensor.silent {
                None => to.line(format!("sensor {}: read", sensor.name.name())),
                Some(why) => {
                    let silent = to.tone(Tone::Doubtful, &format!("does not answer: {why}"));
                    to.line(format!("sensor {}: {silent}", sensor.name.name()));
                }
            }
        }
        for sum in self.signals.iter().filter(|sum| sum.amount != 0) {
            let amount = thousands(sum.amount);
            let alarms = match sum.alarms {
                0 => String::new(),
                count => to.tone(Tone::Bad, &format!("; alarms: {count}")),
            };
            to.line(format!("  {} by {}: {amount}{alarms}", sum.signal.name(), sum.sensor.name()));
        }
        if !self.stuck.is_empty() {
            to.line(format!("  on from the start, and not counted: {}", self.stuck.join(", ")));
        }
        for service in &self.services {
            let tone = if service.down { Tone::Bad } else { Tone::Good };
            let state = to.tone(tone, &service.state);
            to.line(format!("service {}: {state}; failures: {}", service.name, service.failures));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sensors::testing::Fake;
    use super::*;

    #[test]
    fn the_report_of_a_dead_daemon_is_not_believed() {
        let fake = Fake::new();
        let sum = Sum { sensor: Kind::Disks, signal: Signal::DiskErrors, amount: 3, alarms: 1 };
        let sensor = Sensor { name: Kind::EventLog, silent: Some("it waits".into()) };
        let report = Report { pid: 77, sensors: vec![sensor], signals: vec![sum], ..Report::default() };
        report.write(&fake.sysroot()).expect("written");
        assert_eq!(Report::read(&fake.sysroot()), None);
        fake.put("proc/77/comm", "mercury\n");
        assert_eq!(Report::read(&fake.sysroot()), Some(report.clone()));
        fake.put("proc/77/comm", "sleep\n");
        assert_eq!(Report::read(&fake.sysroot()), None);
        let mut text = Text::new(false);
        report.render(&mut text);
        let text = text.finish();
        assert!(text.contains("sensor event-log: does not answer: it waits"), "{text}");
        assert!(text.contains("disk-errors by disks: 3; alarms: 1"), "{text}");
        Report::remove(&fake.sysroot());
        assert!(!fake.sysroot().exists(FILE));
    }
}
