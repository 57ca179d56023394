//! mercuryd's own heartbeat to systemd (`sd_notify`), if the unit asks for one.

use libsystemd::daemon::{NotifyState, notify, watchdog_enabled};
use std::time::{Duration, Instant};

/// Patience for which systemd is asked during a move. The machine then stands still for a while, and a daemon
/// that is ended takes the move along with it.
const DURING_A_MOVE: Duration = Duration::from_secs(24 * 3600);

/// The connection with systemd.
#[derive(Debug)]
pub struct Manager {
    /// Time within which systemd expects a heartbeat; none: it does not.
    patience: Option<Duration>,
    beaten: Option<Instant>,
    is_moving: bool,
}

impl Manager {
    /// Tells systemd that orders are taken from now on.
    #[must_use]
    pub fn ready() -> Self {
        say(&[NotifyState::Ready]);
        Self::with(watchdog_enabled(false))
    }

    /// Makes a connection with this patience of systemd's.
    #[must_use]
    pub fn with(patience: Option<Duration>) -> Self {
        Self { patience: patience.filter(|patience| !patience.is_zero()), beaten: None, is_moving: false }
    }

    /// Tells systemd that the daemon works.
    pub fn beat(&mut self, is_moving: bool, now: Instant) {
        say(&self.due(is_moving, now));
    }

    /// Returns the messages that are due: a heartbeat four times within the patience, and another patience
    /// for a move.
    fn due(&mut self, is_moving: bool, now: Instant) -> Vec<NotifyState> {
        let Some(patience) = self.patience else { return Vec::new() };
        let mut messages = Vec::new();
        if std::mem::replace(&mut self.is_moving, is_moving) != is_moving {
            let patience = if is_moving { DURING_A_MOVE } else { patience };
            messages.push(NotifyState::WatchdogUsec(u64::try_from(patience.as_micros()).unwrap_or(u64::MAX)));
        }
        let is_due = |then: Instant| now.saturating_duration_since(then) >= patience / 4;
        if self.beaten.is_none_or(is_due) || !messages.is_empty() {
            self.beaten = Some(now);
            messages.push(NotifyState::Watchdog);
        }
        messages
    }
}

/// Tells systemd that the daemon ends in good order.
pub fn stopping() {
    say(&[NotifyState::Stopping]);
}

/// Sends messages. A systemd that is not there, or does not listen, is no matter to the daemon.
fn say(messages: &[NotifyState]) {
    if !messages.is_empty() {
        let _ = notify(false, messages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_come_in_time() {
        let mut manager = Manager::with(Some(Duration::from_secs(40)));
        let start = Instant::now();
        let mut at = |seconds| manager.due(false, start + Duration::from_secs(seconds));
        assert_eq!(at(0), [NotifyState::Watchdog]);
        assert_eq!(at(9), []);
        assert_eq!(at(10), [NotifyState::Watchdog]);
        assert_eq!(Manager::with(None).due(false, start), []);
        assert_eq!(Manager::with(Some(Duration::ZERO)).due(false, start), []);
    }

    #[test]
    fn a_move_has_time() {
        let mut manager = Manager::with(Some(Duration::from_secs(40)));
        let start = Instant::now();
        manager.due(false, start);
        let day = NotifyState::WatchdogUsec(86_400_000_000);
        assert_eq!(manager.due(true, start), [day, NotifyState::Watchdog]);
        assert_eq!(manager.due(true, start), []);
        let usual = NotifyState::WatchdogUsec(40_000_000);
        assert_eq!(manager.due(false, start), [usual, NotifyState::Watchdog]);
    }
}
