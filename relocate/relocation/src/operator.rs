//! The operator at the console of a machine that stands still, or of a restore environment. All
//! other terminals stand still or do not exist. In a guest, its host's operator has a second way: the monitor
//! passes words on, whatever the guest's console is.

use mercury_abi::guest::{MERCURY_GUEST_ABANDON, MERCURY_GUEST_ANSWER, MERCURY_GUEST_RESUME};
use mercury_quiesce::guest;
use rustix::fs::{CWD, Mode, OFlags};
use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileExt,
    },
};

const DEVICES: &str = "/dev";
const CONSOLE: &str = "console";
/// The device that reads ports.
const PORTS: &str = "port";

/// A conversation with the operator at the console. The console is opened before anything stands
/// still: if the root is on another machine, no path name can be looked up then.
#[derive(Debug, Default)]
pub struct Operator {
    console: Option<File>,
    line: Vec<u8>,
    host: Option<HostWord>,
}

/// The words of the host's operator, in a guest.
#[derive(Debug)]
struct HostWord {
    ports: File,
    at: u64,
}

impl HostWord {
    /// Opens them in a folder of devices. `None`: this machine is no guest, or may not read ports.
    fn open(devices: BorrowedFd<'_>) -> Option<Self> {
        let first = guest::ports()?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let ports = rustix::fs::openat(devices, PORTS, flags, Mode::empty()).ok()?;
        Some(Self { ports: ports.into(), at: u64::from(first + MERCURY_GUEST_ANSWER) })
    }

    /// Reads the next word, if it is one of these. The monitor forgets what was read.
    fn next(&self, words: &[&'static str]) -> Option<&'static str> {
        let known = [("resume", MERCURY_GUEST_RESUME), ("abandon", MERCURY_GUEST_ABANDON)];
        if !known.iter().any(|(word, _)| words.contains(word)) {
            return None;
        }
        let mut byte = [0];
        self.ports.read_exact_at(&mut byte, self.at).ok()?;
        let (word, _) = known.into_iter().find(|(_, number)| *number == u16::from(byte[0]))?;
        words.contains(&word).then_some(word)
    }
}

impl Operator {
    /// Opens the console, if there is one.
    #[must_use]
    pub fn at_console() -> Self {
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let devices = rustix::fs::openat(CWD, DEVICES, flags, Mode::empty());
        devices.map_or_else(|_| Self::default(), Self::at_console_in)
    }

    /// Opens the console in the given folder of devices.
    #[must_use]
    pub fn at_console_in(devices: impl AsFd) -> Self {
        let host = HostWord::open(devices.as_fd());
        Self { host, ..Self::at(devices, CONSOLE) }
    }

    fn at(folder: impl AsFd, name: impl rustix::path::Arg) -> Self {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let console = rustix::fs::openat(folder, name, flags, Mode::empty()).ok();
        Self { console: console.map(File::from), ..Self::default() }
    }

    /// Opens a named pipe by which another command passes the operator's words. They are only read there.
    #[must_use]
    pub fn at_pipe(path: &std::path::Path) -> Self {
        Self::at(CWD, path)
    }

    /// Makes an operator at a test's console.
    #[cfg(test)]
    pub fn at_test(console: File) -> Self {
        Self { console: Some(console), ..Self::default() }
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

    /// Returns the word of these that was typed, alone on a line, or that the host's operator has said.
    pub fn word(&mut self, words: &[&'static str]) -> Option<&'static str> {
        let mut buffer = [0; 64];
        let read = self.console.as_mut().map_or(0, |console| console.read(&mut buffer).unwrap_or(0));
        let typed = self.type_in(&buffer[..read], words);
        typed.or_else(|| self.host.as_ref()?.next(words))
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

    /// The console of a machine may be a display or a port that its host does not show.
    #[test]
    fn the_host_s_operator_decides_without_a_console() {
        for (byte, expected) in [(1, Some("resume")), (2, Some("abandon")), (0xFF, None), (0, None)] {
            let ports = tempfile::tempfile().expect("a file");
            ports.write_all_at(&[0xFF, byte], 6).expect("written");
            let mut operator = Operator { host: Some(HostWord { ports, at: 7 }), ..Operator::default() };
            assert_eq!(operator.word(&["resume", "abandon"]), expected);
            assert_eq!(operator.word(&["adopt", "discard"]), None, "words of another question");
        }
    }

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
