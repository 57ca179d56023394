//! `mercury guests console`: joins this terminal to the first serial port of a guest.

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::retry_on_intr,
    termios::{OptionalActions, Termios, tcgetattr, tcsetattr},
};
use std::{
    io::{self, Read, Write, stdin, stdout},
    os::{fd::AsFd, unix::net::UnixStream},
};

/// The key that makes the next key a command to this program (Ctrl-A), and the command that leaves the
/// console. QEMU's and a hosted machine's consoles have the same keys.
const ESCAPE: u8 = 1;
const LEAVE: u8 = b'x';

/// The end of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The user has left, or the input has ended.
    ByUser,
    /// The guest has ended.
    ByGuest,
}

/// Passes bytes to and fro until the user leaves or the guest ends.
///
/// # Errors
/// If the terminal or the socket fails.
pub fn visit(guest: &UnixStream) -> io::Result<Left> {
    let _raw = Raw::set();
    let (input, mut keys) = (stdin(), Keys::default());
    let mut piece = [0; 4096];
    loop {
        let mut ready =
            [PollFd::new(&input, PollFlags::IN), PollFd::from_borrowed_fd(guest.as_fd(), PollFlags::IN)];
        retry_on_intr(|| poll(&mut ready, None))?;
        let [by_user, by_guest] = ready.map(|one| !one.revents().is_empty());
        if by_guest {
            let count = (&*guest).read(&mut piece)?;
            if count == 0 {
                return Ok(Left::ByGuest);
            }
            stdout().write_all(&piece[..count])?;
            stdout().flush()?;
        }
        if by_user {
            let count = retry_on_intr(|| rustix::io::read(&input, &mut piece))?;
            let typed = keys.take(&piece[..count]);
            (&*guest).write_all(&typed)?;
            if count == 0 || keys.has_left {
                return Ok(Left::ByUser);
            }
        }
    }
}

/// The keys that are typed, without the commands to this program.
#[derive(Debug, Default)]
struct Keys {
    is_command: bool,
    has_left: bool,
}

impl Keys {
    /// Returns the bytes for the guest. Nothing after the command to leave is for the guest.
    fn take(&mut self, typed: &[u8]) -> Vec<u8> {
        let mut passed = Vec::new();
        for &key in typed {
            match (self.is_command, key) {
                (true, LEAVE) => {
                    self.has_left = true;
                    return passed;
                }
                (false, ESCAPE) => self.is_command = true,
                (_, key) => {
                    self.is_command = false;
                    passed.push(key);
                }
            }
        }
        passed
    }
}

/// The terminal's settings, which are put back when this value is dropped.
struct Raw(Option<Termios>);

impl Raw {
    /// Lets the terminal pass each key on unchanged. Does nothing if standard input is no terminal.
    fn set() -> Self {
        let before = tcgetattr(stdin()).ok();
        if let Some(mut settings) = before.clone() {
            settings.make_raw();
            let _ = tcsetattr(stdin(), OptionalActions::Now, &settings);
        }
        Self(before)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_pass_but_for_commands() {
        let mut keys = Keys::default();
        assert_eq!(keys.take(b"ls\r"), b"ls\r");
        assert_eq!(keys.take(&[ESCAPE, ESCAPE, b'x']), [ESCAPE, b'x'], "the key itself, typed twice");
        assert_eq!(keys.take(&[ESCAPE]), b"");
        assert_eq!(keys.take(b"q"), b"q");
        assert!(!keys.has_left);
        assert_eq!(keys.take(&[b'a', ESCAPE, b'x', b'b']), b"a");
        assert!(keys.has_left);
    }
}
