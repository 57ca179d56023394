//! The kernel's own freezer, which stops all tasks for the instant.
//!
//! It waits up to 20 s for a task, and everything stands still meanwhile. Mercury's tasks come to rest in
//! milliseconds, so that a longer wait is a failure: [`Limited`] shortens it around an instant.

use crate::undo::{Number, Undo, UndoProcess};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use std::{fs, fs::File, os::unix::fs::FileExt};

/// File with the freezer's patience in milliseconds.
const FILE: &str = "sys/power/pm_freeze_timeout";
/// Patience around an instant. User programs and the kernel's threads each have so much.
const MOST_MS: u64 = 1500;

/// The freezer's patience, shortened until this is dropped.
#[derive(Debug)]
pub struct Limited {
    /// The open file: its path may lead over a server that does not answer yet.
    changed: Option<(File, String)>,
}

impl Limited {
    /// Shortens the freezer's patience. The undo process puts it back if this process does not, and feeds
    /// watchdogs meanwhile.
    ///
    /// # Errors
    ///
    /// Returns an error if the undo process is gone.
    pub fn set(guard: &mut UndoProcess, sysroot: &Sysroot) -> Result<Self> {
        let number = Number { file: sysroot.path(FILE), was: sysroot.text(FILE).unwrap_or_default() };
        guard.will(&Undo::Patience(number.clone())).map_err(|error| {
            Error::new(Exit::Failed, format!("the undo process is gone: {error}"))
                .hint("`dmesg` may say more")
        })?;
        Ok(Self::shorten(number))
    }

    /// Leaves a patience that is shorter already, or that the kernel does not show.
    fn shorten(number: Number) -> Self {
        let is_long = number.was.parse::<u64>().is_ok_and(|was| was > MOST_MS);
        let file = is_long.then(|| File::options().write(true).open(&number.file));
        let file = file.and_then(std::result::Result::ok);
        let changed = file.filter(|file| write(file, &MOST_MS.to_string()));
        Self { changed: changed.map(|file| (file, number.was)) }
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        if let Some((file, was)) = &self.changed {
            // If this fails, the undo process tries again.
            let _ = write(file, was);
        }
    }
}

fn write(file: &File, text: &str) -> bool {
    file.write_all_at(text.as_bytes(), 0).is_ok()
}

impl Number {
    /// Puts the number back. One that could not be read was not changed.
    pub(super) fn put_back(&self) {
        if !self.was.is_empty() {
            let _ = fs::write(&self.file, &self.was);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_patience_is_shortened_for_a_while() {
        let root = tempfile::tempdir().expect("a folder");
        let file = root.path().join("pm_freeze_timeout");
        let number = |was: &str| Number { file: file.clone(), was: was.into() };
        let text = || fs::read_to_string(&file).expect("a file");
        // A file of the kernel's takes a number as a whole.
        for (was, during) in [("20000", "15000"), ("800", "800"), ("", "")] {
            fs::write(&file, was).expect("a file");
            let limited = Limited::shorten(number(was));
            assert_eq!(text(), during, "{was}");
            drop(limited);
            assert_eq!(text(), was);
            number(was).put_back();
            assert_eq!(text(), was);
        }
        fs::remove_file(&file).expect("removed");
        assert!(Limited::shorten(number("20000")).changed.is_none());
    }
}
