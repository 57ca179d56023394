//! The terminal of a monitor that carries a guest's console.

use std::sync::{Mutex, PoisonError};

/// Ctrl-A, and then `x`, leaves the guest.
const ESCAPE: u8 = 1;
const LEAVE: u8 = b'x';

/// The terminal's settings before the guest began, while it has others.
static SAVED: Mutex<Option<libc::termios>> = Mutex::new(None);

/// Has the terminal give every key at once, and Ctrl-C to the guest. Returns false if standard input is no
/// terminal.
pub fn make_raw() -> bool {
    // SAFETY: The structure is filled before it is used.
    unsafe {
        let mut settings: libc::termios = std::mem::zeroed();
        if libc::tcgetattr(libc::STDIN_FILENO, &raw mut settings) != 0 {
            return false;
        }
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(settings);
        libc::cfmakeraw(&raw mut settings);
        libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const settings);
    }
    true
}

/// Gives the terminal back as it was, whatever this thread has been interrupted in.
pub fn restore() {
    let saved = SAVED.try_lock().ok().and_then(|mut saved| saved.take());
    if let Some(saved) = saved {
        // SAFETY: These are the settings that were read from it.
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const saved) };
    }
}

/// The keys of a person, of whom the guest gets all but the escape.
#[derive(Debug, Default)]
pub struct Keys {
    is_escaped: bool,
}

impl Keys {
    /// Returns the bytes for the guest, and true if the person leaves it.
    pub fn read(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut bytes = Vec::with_capacity(typed.len());
        let mut leaves = false;
        for &byte in typed {
            match (std::mem::take(&mut self.is_escaped), byte) {
                (true, LEAVE) => leaves = true,
                (false, ESCAPE) => self.is_escaped = true,
                _ => bytes.push(byte),
            }
        }
        (bytes, leaves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_escape_leaves_and_twice_it_is_a_key() {
        let mut keys = Keys::default();
        assert_eq!(keys.read(b"ax\x01"), (b"ax".to_vec(), false));
        assert_eq!(keys.read(b"x"), (Vec::new(), true));
        assert_eq!(keys.read(b"\x01\x01x\x01y"), (b"\x01xy".to_vec(), false));
    }
}
