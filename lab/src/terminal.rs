//! The settings of this process's terminal.

use rustix::{
    stdio::stdin,
    termios::{OptionalActions, Termios, tcgetattr, tcsetattr},
};

/// The settings of this process's terminal, which return when this value is dropped. QEMU sets the
/// terminal to raw, and may be killed before it restores the settings.
pub(crate) struct Terminal(Option<Termios>);

impl Terminal {
    /// Saves the terminal's settings.
    pub(crate) fn save() -> Self {
        Self(tcgetattr(stdin()).ok())
    }

    /// Passes every key on as it is typed, even the keys that would be signals.
    pub(crate) fn make_raw(&self) {
        if let Some(mut raw) = self.0.clone() {
            raw.make_raw();
            let _ = tcsetattr(stdin(), OptionalActions::Now, &raw);
        }
    }

    /// Returns true if there was a terminal and it has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_some() && tcgetattr(stdin()).is_err()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(saved) = &self.0 {
            let now = OptionalActions::Now;
            let _ = tcsetattr(stdin(), now, saved);
        }
    }
}
