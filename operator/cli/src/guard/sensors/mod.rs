//! Sensors of the hardware: a failure often announces itself, and a machine can move before it.
//!
//! * [`rules`]: the section of the file; [`judge`]: counts and limits;
//! * [`counters`], [`traces`], [`hwmon`], [`disks`], [`event_log`]: the sensors;
//! * [`station`]: the threads that read them.
//!
//! A sensor that waits for a disk or for a program waits in a thread of its own. The daemon and the other
//! sensors go on.

pub mod counters;
pub mod disks;
pub mod event_log;
pub mod hwmon;
pub mod judge;
pub mod nvme;
pub mod rules;
pub mod station;
pub mod tools;
pub mod traces;

use mercury_control::sysroot::Sysroot;
use rules::{Kind, SensorRules, Signal};
use std::io;

/// Longest text of a part's name. It comes from firmware and disks.
const TEXT_MAX: usize = 120;

/// An amount of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// A counter that only grows. It begins again at zero.
    Counter(u64),
    /// A number that may fall. Its growth counts.
    Level(u64),
    /// Events since the last reading.
    New(u64),
    /// An alarm that is on or off.
    Alarm(bool),
}

/// A reading of one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    pub signal: Signal,
    /// Stable name of the source, of which amounts are counted together.
    pub source: String,
    pub amount: Amount,
    /// The part that is concerned, in words.
    pub text: String,
}

impl Reading {
    fn new(signal: Signal, source: impl Into<String>, amount: Amount, text: impl AsRef<str>) -> Self {
        Self { signal, source: source.into(), amount, text: printable(text.as_ref()) }
    }
}

/// Makes a text from outside printable, and short.
#[must_use]
pub fn printable(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(TEXT_MAX).collect();
    text.trim().to_owned()
}

/// A family of sensors, which is read again and again.
pub trait Sensor: Send {
    /// Reads all sources, and adds what they say.
    ///
    /// # Errors
    ///
    /// Returns an error if a source cannot be read now. What the others say was added.
    fn read(&mut self, to: &mut Vec<Reading>) -> io::Result<()>;
}

/// The presence of a sensor on this machine, in words.
pub type Presence = std::result::Result<String, String>;

/// Returns what this machine has of a sensor.
///
/// # Errors
///
/// Returns the reason why it has none.
pub fn presence(kind: Kind, sysroot: &Sysroot) -> Presence {
    match kind {
        Kind::Counters => counters::presence(sysroot),
        Kind::Traces => traces::presence(sysroot),
        Kind::Hwmon => hwmon::presence(sysroot),
        Kind::Disks => disks::presence(sysroot),
        Kind::EventLog => event_log::presence(sysroot),
    }
}

/// Returns the sensor if this machine has it.
#[must_use]
pub fn open(kind: Kind, sysroot: &Sysroot, rules: &SensorRules) -> Option<Box<dyn Sensor>> {
    presence(kind, sysroot).ok()?;
    Some(match kind {
        Kind::Counters => Box::new(counters::Counters::new(sysroot)),
        Kind::Traces => Box::new(traces::Traces::new(sysroot)),
        Kind::Hwmon => Box::new(hwmon::Hwmon::new(sysroot, &rules.ignore)),
        Kind::Disks => Box::new(disks::Disks::new(sysroot)),
        Kind::EventLog => Box::new(event_log::EventLog::new(sysroot)),
    })
}

/// A system's files that a test makes up.
#[cfg(test)]
pub mod testing {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[derive(Debug)]
    pub struct Fake {
        folder: tempfile::TempDir,
    }

    impl Default for Fake {
        fn default() -> Self {
            Self { folder: tempfile::tempdir().expect("a folder") }
        }
    }

    impl Fake {
        pub fn new() -> Self {
            Self::default()
        }

        pub fn sysroot(&self) -> Sysroot {
            Sysroot::at(self.folder.path())
        }

        pub fn put(&self, path: &str, text: &str) {
            let path = self.folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }

        pub fn text(&self, path: &str) -> String {
            fs::read_to_string(self.folder.path().join(path)).unwrap_or_default()
        }

        pub fn remove(&self, path: &str) {
            fs::remove_file(self.folder.path().join(path)).expect("a file");
        }

        /// Puts a program there, a script of the shell.
        pub fn program(&self, name: &str, script: &str) {
            let path = format!("usr/sbin/{name}");
            self.put(&path, &format!("#!/bin/sh\n{script}\n"));
            let path = self.folder.path().join(path);
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
        }
    }

    /// Reads a sensor that answers.
    pub fn read(sensor: &mut dyn Sensor) -> Vec<Reading> {
        let mut readings = Vec::new();
        sensor.read(&mut readings).expect("an answer");
        readings
    }

    /// Returns the amount of a source.
    pub fn amount(readings: &[Reading], signal: Signal, source: &str) -> Option<Amount> {
        let found = readings.iter().find(|reading| reading.signal == signal && reading.source == source);
        found.map(|reading| reading.amount)
    }
}
