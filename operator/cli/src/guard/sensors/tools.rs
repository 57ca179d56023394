//! Programs of the system that sensors ask.

use mercury_control::sysroot::Sysroot;
use mercury_quiesce::patient;
use std::{
    io,
    path::PathBuf,
    process::{Command, Output},
    time::{Duration, Instant},
};

/// Time for a program to answer. A disk that spins up takes some ten seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time in which a program that has not answered is not asked again. The one that did not answer may still
/// wait for its device, and cannot be ended.
const REST: Duration = Duration::from_secs(3600);
/// Longest output that is believed.
const OUTPUT_MAX: usize = 4 << 20;

/// Returns the program's file, if it is installed.
#[must_use]
pub fn find(sysroot: &Sysroot, name: &str) -> Option<PathBuf> {
    let folders = ["usr/sbin", "usr/bin", "sbin", "bin", "usr/local/sbin", "usr/local/bin"];
    folders.iter().map(|folder| sysroot.path(&format!("{folder}/{name}"))).find(|path| path.is_file())
}

/// A program that is asked about one device.
#[derive(Debug)]
pub struct Tool {
    path: PathBuf,
    patience: Duration,
    rest: Duration,
    silent_since: Option<Instant>,
}

impl Tool {
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, patience: PATIENCE, rest: REST, silent_since: None }
    }

    /// Replaces the time for an answer, and the time in which a silent program is not asked again.
    #[must_use]
    pub fn with(self, patience: Duration, rest: Duration) -> Self {
        Self { patience, rest, ..self }
    }

    /// Runs the program and returns its output. Its exit status is the caller's to judge.
    ///
    /// # Errors
    ///
    /// Returns an error if the program does not start or does not answer, or if it was silent a short time
    /// ago.
    pub fn ask(&mut self, arguments: &[&str]) -> io::Result<Output> {
        if self.silent_since.is_some_and(|since| since.elapsed() < self.rest) {
            let minutes = self.rest.as_secs() / 60;
            let text = format!("{} was silent, and rests for {minutes} minutes", self.path.display());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        self.silent_since = None;
        let mut command = Command::new(&self.path);
        command.args(arguments).env("LC_ALL", "C");
        let mut output = patient::output(command, self.patience).inspect_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                self.silent_since = Some(Instant::now());
            }
        })?;
        output.stdout.truncate(OUTPUT_MAX);
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Fake;
    use super::*;

    #[test]
    fn a_silent_program_is_left_alone_for_a_while() {
        let fake = Fake::new();
        fake.program("slow", "echo >> \"$(dirname \"$0\")/asked\"; exec sleep 20");
        let path = find(&fake.sysroot(), "slow").expect("the program");
        // A shell on a busy host needs some time until it has said that it was asked.
        let mut tool = Tool::new(path).with(Duration::from_secs(3), REST);
        for said in ["has not answered", "rests for 60 minutes"] {
            let error = tool.ask(&[]).expect_err("silence");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(error.to_string().contains(said), "{error}");
        }
        assert_eq!(fake.text("usr/sbin/asked").lines().count(), 1);
        assert_eq!(find(&fake.sysroot(), "missing"), None);
    }
}
