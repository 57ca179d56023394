//! Kernel lockdown: predicts the driver's refusals. The driver asks the kernel itself
//! (`switch/driver/device.c`).

use crate::{
    error::{Error, Result},
    sysroot::Sysroot,
};
use mercury_abi::code::Code;

/// File of the kernel with all modes, the one in force in brackets.
const FILE: &str = "sys/kernel/security/lockdown";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// No lockdown.
    None,
    /// Root cannot change the kernel: no machine is restored or received here.
    Integrity,
    /// Root cannot read the kernel's memory either: there is no checkpoint, and the machine cannot
    /// move.
    Confidentiality,
}

impl Mode {
    /// Reads the mode; `None` without lockdown, or if its file is not mounted.
    #[must_use]
    pub fn read(sysroot: &Sysroot) -> Option<Self> {
        Self::parse(&sysroot.text(FILE)?)
    }

    /// Parses the word in brackets: `none [integrity] confidentiality`.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once('[')?;
        [Self::None, Self::Integrity, Self::Confidentiality]
            .into_iter()
            .find(|mode| rest.split_once(']').is_some_and(|(word, _)| word == mode.name()))
    }

    /// Returns the kernel's word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Integrity => "integrity",
            Self::Confidentiality => "confidentiality",
        }
    }
}

/// Refuses an action that replaces the kernel's memory, before this machine is given up for it.
///
/// # Errors
///
/// Returns an error if the kernel is locked down.
pub fn refuse_restore(action: &str, sysroot: &Sysroot) -> Result<()> {
    refuse(action, Mode::Integrity, sysroot)
}

/// Refuses an action that reads the kernel's memory.
///
/// # Errors
///
/// Returns an error if the kernel keeps its memory confidential.
pub fn refuse_reading(action: &str, sysroot: &Sysroot) -> Result<()> {
    refuse(action, Mode::Confidentiality, sysroot)
}

fn refuse(action: &str, from: Mode, sysroot: &Sysroot) -> Result<()> {
    match Mode::read(sysroot) {
        Some(mode) if mode >= from => Err(Error::refused(action, Code::LockedDown, None, [0; 2])),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn locked(text: &str) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("temporary directory");
        let path = root.path().join(FILE);
        fs::create_dir_all(path.parent().expect("parent")).expect("directory");
        fs::write(path, text).expect("file");
        let sysroot = Sysroot::at(root.path());
        (root, sysroot)
    }

    #[test]
    fn modes_are_read() {
        assert_eq!(Mode::parse("none [integrity] confidentiality"), Some(Mode::Integrity));
        assert_eq!(Mode::parse("[none] integrity confidentiality"), Some(Mode::None));
        assert_eq!((Mode::parse("none"), Mode::parse("[all]")), (None, None));
        assert_eq!(Mode::read(&Sysroot::at("/nowhere")), None);
    }

    #[test]
    fn each_mode_refuses_what_it_should() {
        for (text, restore, reading) in [
            ("[none] integrity confidentiality\n", true, true),
            ("none [integrity] confidentiality\n", false, true),
            ("none integrity [confidentiality]\n", false, false),
        ] {
            let (_root, sysroot) = locked(text);
            assert_eq!(refuse_restore("restore", &sysroot).is_ok(), restore, "{text}");
            assert_eq!(refuse_reading("checkpoint", &sysroot).is_ok(), reading, "{text}");
        }
        let (_root, sysroot) = locked("none [integrity] confidentiality");
        let error = refuse_restore("restore", &sysroot).expect_err("integrity");
        assert_eq!(error.code, Some(Code::LockedDown));
        assert!(error.message.contains("restore was refused"), "{error}");
    }
}
