//! The words of the host's operator for a guest that stands still in doubt about its move. The guest asks by
//! reading a port. A word comes by a pipe, a line with the time at which it was said:
//!
//! ```text
//! resume 123456        milliseconds since the host's start
//! ```

use mercury_abi::guest::{MERCURY_GUEST_ABANDON, MERCURY_GUEST_RESUME};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use std::{fs::File, io::Read, os::unix::fs::OpenOptionsExt, path::Path, time::Duration};

/// Age at which a word counts no more: its command has taken it back by then, or was killed.
const OLD: Duration = Duration::from_secs(10);
/// Byte that a port reads as if nothing answers.
const NOTHING: u8 = 0xFF;
/// Largest number of bytes that wait for their end of a line.
const MOST: usize = 4096;

/// The pipe, and its bytes that are no line yet. The default has no pipe.
#[derive(Debug, Default)]
pub struct Words {
    pipe: Option<File>,
    read: Vec<u8>,
}

impl Words {
    /// Opens the pipe. This process may open nothing while the guest runs.
    ///
    /// # Errors
    /// The pipe is not there.
    pub fn open(path: &Path) -> Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let pipe = options.open(path).map_err(|error| {
            let text = format!("cannot open the pipe for the operator's words, {}: {error}", path.display());
            Error::new(Exit::Failed, text).hint(crate::FOLDER)
        })?;
        Ok(Self { pipe: Some(pipe), read: Vec::new() })
    }

    /// Returns the byte that the guest reads.
    pub fn take(&mut self) -> u8 {
        let mut piece = [0; 256];
        while let Some(count) = self.pipe.as_mut().and_then(|pipe| pipe.read(&mut piece).ok()) {
            self.read.extend(&piece[..count]);
            if count == 0 || self.read.len() > MOST {
                break;
            }
        }
        self.said(now())
    }

    /// Returns the last word that is not too old. Earlier ones count no more.
    fn said(&mut self, now: Duration) -> u8 {
        let Some(end) = self.read.iter().rposition(|byte| *byte == b'\n') else {
            self.read.truncate(MOST);
            return NOTHING;
        };
        let lines: Vec<u8> = self.read.drain(..=end).collect();
        let text = String::from_utf8_lossy(&lines);
        text.lines().rev().find_map(|line| word(line, now)).unwrap_or(NOTHING)
    }
}

fn word(line: &str, now: Duration) -> Option<u8> {
    let (word, at) = line.split_once(' ')?;
    let at = Duration::from_millis(at.parse().ok()?);
    let word = match word {
        "resume" => MERCURY_GUEST_RESUME,
        "abandon" => MERCURY_GUEST_ABANDON,
        _ => return None,
    };
    (at <= now && now - at < OLD).then_some(word as u8)
}

/// Returns the time since the host's start.
fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: The kernel writes the time there.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;

    fn said(text: &str) -> u8 {
        let mut words = Words { pipe: None, read: text.into() };
        words.said(Duration::from_secs(100))
    }

    #[test]
    fn the_last_word_counts_if_it_is_not_old() {
        assert_eq!(said("resume 99000\n"), 1);
        assert_eq!(said("resume 99000\nabandon 99500\n"), 2);
        for text in
            ["", "resume 99000", "resume 80000\n", "resume 200000\n", "adopt\n", "resume\n", "resume x\n"]
        {
            assert_eq!(said(text), NOTHING, "{text:?}");
        }
    }

    #[test]
    fn a_word_is_read_once() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("decision");
        assert!(Words::open(&path).unwrap_err().hint.is_some());
        let text = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: It takes a path, which lives until then.
        assert_eq!(unsafe { libc::mkfifo(text.as_ptr(), 0o600) }, 0);
        let mut words = Words::open(&path).unwrap();
        assert_eq!(words.take(), NOTHING);
        let mut command = File::options().write(true).open(&path).unwrap();
        writeln!(command, "abandon {}", now().as_millis()).unwrap();
        assert_eq!(words.take(), 2);
        assert_eq!(words.take(), NOTHING);
    }
}
