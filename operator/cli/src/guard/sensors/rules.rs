//! `[sensors]` of the rules: the sensors in use, their limits, and the consequences.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};

/// A number of seconds from `LEAST` to `MOST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Seconds<const LEAST: u64, const MOST: u64>(u64);

impl<const LEAST: u64, const MOST: u64> TryFrom<u64> for Seconds<LEAST, MOST> {
    type Error = String;

    fn try_from(seconds: u64) -> Result<Self, String> {
        match (LEAST..=MOST).contains(&seconds) {
            true => Ok(Self(seconds)),
            false => Err(format!("{seconds} is not from {LEAST} to {MOST} seconds")),
        }
    }
}

impl<const LEAST: u64, const MOST: u64> From<Seconds<LEAST, MOST>> for u64 {
    fn from(seconds: Seconds<LEAST, MOST>) -> Self {
        seconds.0
    }
}

impl<const LEAST: u64, const MOST: u64> Seconds<LEAST, MOST> {
    /// Makes a default, which is within the bounds.
    #[must_use]
    pub const fn default_of(seconds: u64) -> Self {
        assert!(LEAST <= seconds && seconds <= MOST, "a default within its bounds");
        Self(seconds)
    }

    /// Returns the time.
    #[must_use]
    pub fn time(self) -> Duration {
        Duration::from_secs(self.0)
    }
}

/// A family of sensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Counters of the kernel: EDAC and AER.
    Counters,
    /// Events of the kernel's trace: machine checks, and what the firmware reports (APEI).
    Traces,
    /// Alarms of temperatures, fans and voltages.
    Hwmon,
    /// SMART of NVMe, ATA and SCSI disks.
    Disks,
    /// The event log of the board's management controller (IPMI SEL).
    EventLog,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Counters, Self::Traces, Self::Hwmon, Self::Disks, Self::EventLog];

    /// Returns the name in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counters => "counters",
            Self::Traces => "traces",
            Self::Hwmon => "hwmon",
            Self::Disks => "disks",
            Self::EventLog => "event-log",
        }
    }

    /// Returns true if a reading takes a program, or keeps a disk or a management controller busy.
    #[must_use]
    pub fn is_slow(self) -> bool {
        matches!(self, Self::Disks | Self::EventLog)
    }
}

/// Something that sensors count. Each has a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Signal {
    /// Errors of memory, caches and buses that were corrected.
    Corrected,
    /// Errors of memory, caches and buses that were not corrected, and that the kernel has survived.
    Uncorrected,
    /// Errors of PCI Express that were not corrected.
    Pcie,
    /// Readings with a temperature in alarm.
    Temperature,
    /// Readings with a fan in alarm.
    Fan,
    /// Readings with a voltage, a current or a power in alarm.
    Voltage,
    /// Readings of a disk that reports its own end.
    DiskFailing,
    /// Sectors and blocks that a disk has lost or replaced.
    DiskErrors,
    /// Severe entries in the event log of the board's management controller.
    EventLog,
}

impl Signal {
    pub const ALL: [Self; 9] = [
        Self::Corrected,
        Self::Uncorrected,
        Self::Pcie,
        Self::Temperature,
        Self::Fan,
        Self::Voltage,
        Self::DiskFailing,
        Self::DiskErrors,
        Self::EventLog,
    ];

    /// Returns the name in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Corrected => "corrected",
            Self::Uncorrected => "uncorrected",
            Self::Pcie => "pcie",
            Self::Temperature => "temperature",
            Self::Fan => "fan",
            Self::Voltage => "voltage",
            Self::DiskFailing => "disk-failing",
            Self::DiskErrors => "disk-errors",
            Self::EventLog => "event-log",
        }
    }

    /// Returns the default limit, and the seconds in which it counts.
    fn default_limit(self) -> (u64, u64) {
        match self {
            Self::Corrected | Self::Pcie => (10, 3600),
            Self::Uncorrected | Self::DiskFailing => (1, 86_400),
            Self::Temperature | Self::Fan | Self::Voltage => (3, 600),
            Self::DiskErrors => (10, 86_400),
            Self::EventLog => (1, 3600),
        }
    }
}

/// The consequence of an alarm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// None: the signal is not judged.
    Ignore,
    /// An event: a line in the journal, a count in the metrics, and the hook.
    #[default]
    Report,
    /// The event, and the order to move this machine.
    Evacuate,
}

/// Keys of a limit. What is left out is as the signal has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitKeys {
    /// Number of errors, or of readings in alarm, that is too many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<std::num::NonZeroU64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within_s: Option<Seconds<1, 2_592_000>>,
    pub action: Action,
}

/// A limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub limit: u64,
    pub within: Duration,
    pub action: Action,
}

/// The section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SensorRules {
    /// Sensors in use.
    #[serde(rename = "use")]
    pub used: Vec<Kind>,
    /// Time between two readings of files.
    pub interval_s: Seconds<1, 3600>,
    /// Time between two readings of disks and of the event log.
    pub slow_interval_s: Seconds<1, 86_400>,
    /// Alarms of hwmon to leave out: `CHIP/FILE`, or the beginning of one before a `*`.
    pub ignore: Vec<String>,
    pub limits: BTreeMap<Signal, LimitKeys>,
}

impl Default for SensorRules {
    fn default() -> Self {
        Self {
            used: Kind::ALL.to_vec(),
            interval_s: Seconds::default_of(30),
            slow_interval_s: Seconds::default_of(1800),
            ignore: Vec::new(),
            limits: BTreeMap::new(),
        }
    }
}

impl SensorRules {
    /// Returns rules that read no sensor.
    #[cfg(test)]
    pub fn none() -> Self {
        Self { used: Vec::new(), ..Self::default() }
    }

    /// Returns the limit of a signal.
    #[must_use]
    pub fn limit(&self, signal: Signal) -> Limit {
        let keys = self.limits.get(&signal).cloned().unwrap_or_default();
        let (limit, within) = signal.default_limit();
        Limit {
            limit: keys.limit.map_or(limit, std::num::NonZeroU64::get),
            within: keys.within_s.map_or(Duration::from_secs(within), Seconds::time),
            action: keys.action,
        }
    }

    /// Returns the time between two readings of a sensor.
    #[must_use]
    pub fn interval(&self, kind: Kind) -> Duration {
        if kind.is_slow() { self.slow_interval_s.time() } else { self.interval_s.time() }
    }

    /// Returns true if some alarm orders this machine to move.
    #[must_use]
    pub fn may_evacuate(&self) -> bool {
        Signal::ALL.iter().any(|signal| self.limit(*signal).action == Action::Evacuate)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::rules::Rules;
    use super::*;

    fn sensors(text: &str) -> Result<SensorRules, String> {
        Rules::parse(text).map(|rules| rules.sensors)
    }

    #[test]
    fn by_default_everything_is_read_and_nothing_is_done() {
        let rules = sensors("").expect("rules");
        assert_eq!(rules.used, Kind::ALL);
        assert!(!rules.may_evacuate());
        assert!(Signal::ALL.iter().all(|signal| rules.limit(*signal).action == Action::Report));
        assert_eq!(rules.limit(Signal::Corrected).limit, 10);
    }

    #[test]
    fn names_in_the_file_are_those_of_the_events() {
        for signal in Signal::ALL {
            let text = format!("[sensors.limits]\n{} = {{ limit = 7, action = 'evacuate' }}", signal.name());
            let rules = sensors(&text).expect(&text);
            assert_eq!((rules.limit(signal).limit, rules.may_evacuate()), (7, true));
        }
        for kind in Kind::ALL {
            let rules = sensors(&format!("[sensors]\nuse = ['{}']", kind.name())).expect("rules");
            assert_eq!(rules.used, [kind]);
        }
    }

    #[test]
    fn mistakes_are_named_with_line_and_key() {
        for (text, said) in [
            ("[sensors]\n\ninterval_s = 0", &["line 3", "interval_s = 0", "1 to 3600"]),
            ("[sensors]\nuse = ['hwmom']", &["line 2", "hwmom", "hwmon"]),
            ("[sensors.limits]\ncorected = { limit = 3 }", &["line 2", "corected", "corrected"]),
            ("[sensors.limits]\nfan = { limit = 0 }", &["line 2", "limit = 0", "nonzero"]),
            ("[sensors.limits]\nfan = { within = 3 }", &["line 2", "within", "within_s"]),
            ("[sensors.limits]\npcie = { action = 'rollback' }", &["line 2", "rollback", "evacuate"]),
            ("[sensors]\nslow_interval_s = -4", &["line 2", "slow_interval_s = -4", "-4"]),
        ] {
            let why = sensors(text).expect_err(text);
            assert!(said.iter().all(|said| why.contains(said)), "{why}");
        }
    }
}
