//! The operator at the console of a machine that stands still, or of a restore environment. All
//! other terminals stand still or do not exist.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::AsFd,
};

use rustix::fs::{CWD, Mode, OFlags};

const CONSOLE: &str = "/dev/console";

/// A conversation with the operator at the console. The console is opened before anything stands
/// still: if the root is on another machine, no path name can be looked up then.
#[derive(Debug, Default)]
pub struct Operator {
    console: Option<File>,
    line: Vec<u8>,
}

impl Operator {
    /// Opens the console, if there is one.
    #[must_use]
    pub fn at_console() -> Self {
        Self::at(CWD, CONSOLE)
    }

    /// Opens the console in the given folder of devices.
    #[must_use]
    pub fn at_console_in(devices: impl AsFd) -> Self {
        Self::at(devices, "console")
    }

    fn at(folder: impl AsFd, name: impl rustix::path::Arg) -> Self {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let console = rustix::fs::openat(folder, name, flags, Mode::empty()).ok();
        Self { console: console.map(File::from), line: Vec::new() }
    }

    /// Opens a named pipe by which another command passes the operator's words. They are only read there.
    #[must_use]
    pub fn at_pipe(path: &std::path::Path) -> Self {
        Self::at(CWD, path)
    }

    /// Makes an operator at a test's console.
    #[cfg(test)]
    pub fn at_test(console: File) -> Self {
        Self { console: Some(console), line: Vec::new() }
    }

    /// Returns the console, for code that reports at the very end.
    #[must_use]
    pub fn console(&self) -> Option<File> {
        self.console.as_ref()?.try_clone().ok()
    }

    /// Tells the operator something.
    pub fn tell(&mut self, text: &str) {
        if let Some(console) = &mut self.console {
            // A message without a reader is no reason to fail.
            let _ = write!(console, "\r\nmercury migrate: {text}\r\n");
        }
    }

    /// Returns the word of these that was typed, alone on a line.
    pub fn word(&mut self, words: &[&'static str]) -> Option<&'static str> {
        let mut buffer = [0; 64];
        let read = self.console.as_mut()?.read(&mut buffer).unwrap_or(0);
        self.type_in(&buffer[..read], words)
    }

    fn type_in(&mut self, typed: &[u8], words: &[&'static str]) -> Option<&'static str> {
        for byte in typed {
            if !matches!(byte, b'\r' | b'\n') {
                self.line.truncate(64);
                self.line.push(*byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let found = words.iter().find(|word| word.as_bytes() == line.trim_ascii());
            if let Some(word) = found {
                return Some(word);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_words_decide() {
        let mut operator = Operator::default();
        let mut typed = |text: &[u8]| operator.type_in(text, &["resume", "abandon"]);
        assert_eq!(typed(b"resu"), None);
        assert_eq!(typed(b"me\r"), Some("resume"));
        assert_eq!(typed(b"resumed\nabandon now\nadopt\n"), None);
        assert_eq!(typed(b" abandon \n"), Some("abandon"));
        assert_eq!(typed(&[b'x'; 1000]), None);
        assert_eq!(typed(b"\nresume\n"), Some("resume"));
    }
}
