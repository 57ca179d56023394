//! The kernel's own detectors: their switches are set, noted, and put back.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The switch that lets a panic restart the machine, and its value: after ten seconds.
pub const RESTART: (&str, &str) = ("kernel/panic", "10");

/// A switch that the guard has set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Name below `/proc/sys`.
    pub name: String,
    /// Value before.
    pub before: String,
    /// Value that the guard has set.
    pub set: String,
}

/// The switches, and the note of their values before.
#[derive(Debug)]
pub struct Switches {
    sysctls: PathBuf,
    note: PathBuf,
    crash_kernel: PathBuf,
}

impl Switches {
    /// Returns this system's switches. The note is gone after a restart, as the switches are.
    #[must_use]
    pub fn system() -> Self {
        Self {
            sysctls: "/proc/sys".into(),
            note: "/run/mercury/guard.switches".into(),
            crash_kernel: "/sys/kernel/kexec_crash_loaded".into(),
        }
    }

    /// Returns the switches that are set, by the note.
    #[must_use]
    pub fn changes(&self) -> Vec<Change> {
        let text = fs::read_to_string(&self.note).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Returns true if this machine stands still after a panic: without a crash kernel, it does not restart.
    #[must_use]
    pub fn stands_still(&self) -> bool {
        let is = |path: &Path, value| fs::read_to_string(path).is_ok_and(|text| text.trim() == value);
        is(&self.sysctls.join(RESTART.0), "0") && !is(&self.crash_kernel, "1")
    }

    /// Sets switches to these values. The note is written first, so that a killed command
    /// leaves no switch behind.
    ///
    /// # Errors
    ///
    /// Returns an error if a switch cannot be written. A switch that this kernel lacks is left out.
    pub fn set(&mut self, wanted: &[(&str, &str)]) -> Result<Vec<Change>> {
        let read = |(name, value): &(&str, &str)| {
            let before = fs::read_to_string(self.sysctls.join(name)).ok()?.trim().to_owned();
            Some(Change { name: (*name).to_owned(), before, set: (*value).to_owned() })
        };
        let is_change = |change: &Change| change.before != change.set;
        let changes: Vec<_> = wanted.iter().filter_map(read).filter(is_change).collect();
        if changes.is_empty() {
            return Ok(changes);
        }
        self.write_note(&changes).map_err(|error| failed(&self.note, &error))?;
        changes.iter().try_for_each(|change| self.write(&change.name, &change.set))?;
        Ok(changes)
    }

    /// Puts back what the note has. A switch that somebody has changed since stays as it is.
    ///
    /// # Errors
    ///
    /// Returns an error if a switch cannot be written.
    pub fn put_back(&mut self) -> Result<()> {
        for change in self.changes() {
            let now = fs::read_to_string(self.sysctls.join(&change.name)).unwrap_or_default();
            if now.trim() == change.set {
                self.write(&change.name, &change.before)?;
            }
        }
        match fs::remove_file(&self.note) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&self.note, &error)),
            _ => Ok(()),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<()> {
        let path = self.sysctls.join(name);
        fs::write(&path, value).map_err(|error| failed(&path, &error))
    }

    fn write_note(&self, changes: &[Change]) -> io::Result<()> {
        if let Some(folder) = self.note.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&self.note, serde_json::to_string(changes)?)
    }
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("{}: {error}", path.display()))
        .hint("set the switch to `keep` in the rules if this kernel does not let root change it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switches(values: &[(&str, &str)]) -> (tempfile::TempDir, Switches) {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("kernel")).expect("a folder");
        for (name, value) in values {
            fs::write(folder.path().join(name), value).expect("a switch");
        }
        let switches = Switches {
            sysctls: folder.path().into(),
            note: folder.path().join("run/note"),
            crash_kernel: folder.path().join("crash"),
        };
        (folder, switches)
    }

    #[test]
    fn switches_are_put_back() {
        let (folder, mut switches) =
            switches(&[("kernel/a", "0\n"), ("kernel/b", "1\n"), ("kernel/c", "0\n")]);
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).expect("a switch");
        let wanted = ["kernel/a", "kernel/b", "kernel/c", "kernel/missing"].map(|name| (name, "1"));
        let set = switches.set(&wanted).expect("set");
        assert_eq!(
            set.iter().map(|change| change.name.as_str()).collect::<Vec<_>>(),
            ["kernel/a", "kernel/c"]
        );
        assert_eq!((read("kernel/a").as_str(), switches.changes()), ("1", set));
        // An operator changes one meanwhile.
        fs::write(folder.path().join("kernel/c"), "2").expect("a switch");
        switches.put_back().expect("put back");
        assert_eq!((read("kernel/a").as_str(), read("kernel/c").as_str()), ("0", "2"));
        assert!(switches.changes().is_empty());
        switches.put_back().expect("nothing to put back");
    }

    #[test]
    fn a_machine_that_would_stand_still_restarts() {
        let (folder, mut switches) = switches(&[("kernel/panic", "0\n"), ("crash", "1\n")]);
        assert!(!switches.stands_still(), "a crash kernel runs");
        fs::write(folder.path().join("crash"), "0\n").expect("a file");
        assert!(switches.stands_still());
        switches.set(&[RESTART]).expect("set");
        let now = || fs::read_to_string(folder.path().join("kernel/panic")).expect("a switch");
        assert_eq!((now().as_str(), switches.stands_still()), ("10", false));
        switches.put_back().expect("put back");
        assert_eq!((now().as_str(), switches.stands_still()), ("0", true));
        fs::remove_file(folder.path().join("kernel/panic")).expect("gone");
        assert!(!switches.stands_still(), "a kernel without the switch");
    }
}
