//! Units of systemd, by `systemctl show`.

use super::heartbeat::Change;
use crate::guard::sensors::printable;
use std::time::Duration;

/// The properties that are asked for.
pub const PROPERTIES: &str = "--property=LoadState,ActiveState,SubState,Result,NRestarts,Type";

/// What systemd says of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    load: String,
    active: String,
    sub: String,
    result: String,
    restarts: u64,
    kind: String,
}

/// Parses the output of `systemctl show` for several units, in the order of the arguments.
#[must_use]
pub fn parse(text: &str) -> Vec<Unit> {
    let mut units = Vec::new();
    let mut open: Option<Unit> = None;
    for line in text.lines() {
        if line.is_empty() {
            units.extend(open.take());
            continue;
        }
        let unit = open.get_or_insert_with(Unit::default);
        match line.split_once('=') {
            Some(("LoadState", value)) => unit.load = printable(value),
            Some(("ActiveState", value)) => unit.active = printable(value),
            Some(("SubState", value)) => unit.sub = printable(value),
            Some(("Result", value)) => unit.result = printable(value),
            Some(("Type", value)) => unit.kind = printable(value),
            Some(("NRestarts", value)) => unit.restarts = value.parse().unwrap_or_default(),
            _ => {}
        }
    }
    units.extend(open);
    units
}

/// The history of a unit.
#[derive(Clone, Debug)]
pub struct Watched {
    patience: Duration,
    /// Time for which the unit has been between two states.
    between: Duration,
    restarts: Option<u64>,
    is_down: bool,
    state: String,
}

impl Watched {
    #[must_use]
    pub fn new(patience: Duration) -> Self {
        Self { patience, between: Duration::ZERO, restarts: None, is_down: false, state: "unknown".into() }
    }

    /// Compares a unit with its history. `time` has passed since the last comparison.
    pub fn compare(&mut self, unit: &Unit, time: Duration) -> Option<Change> {
        self.state = match unit.load.as_str() {
            "not-found" => "not found".to_owned(),
            _ => format!("{} ({})", unit.active, unit.sub),
        };
        let is_between = match unit.active.as_str() {
            // Such a unit is starting for as long as it works.
            "activating" => unit.kind != "oneshot",
            "deactivating" | "reloading" => true,
            _ => false,
        };
        self.between = if is_between { self.between.saturating_add(time) } else { Duration::ZERO };
        let is_first = self.restarts.is_none();
        let restarts = self.restarts.replace(unit.restarts).unwrap_or(unit.restarts);
        let why = self.failure(unit);
        let was_down = std::mem::replace(&mut self.is_down, why.is_some());
        match (was_down, why) {
            // Neither a move nor a rollback was of help before.
            (false, Some(why)) if is_first => Some(Change::Note(format!("{why} before it was watched"))),
            (false, Some(why)) => Some(Change::Down(why)),
            (true, None) => Some(Change::Up),
            _ if unit.restarts > restarts => {
                Some(Change::Note(format!("systemd has restarted it (so far: {})", unit.restarts)))
            }
            _ => None,
        }
    }

    fn failure(&self, unit: &Unit) -> Option<String> {
        if unit.active == "failed" {
            return Some(format!("its unit has failed (result {})", unit.result));
        }
        let seconds = self.patience.as_secs();
        (self.between > self.patience)
            .then(|| format!("its unit has been {} for more than {seconds} s", unit.active))
    }

    /// Returns the state in words.
    #[must_use]
    pub fn state(&self) -> &str {
        &self.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S: Duration = Duration::from_secs(1);

    fn unit(active: &str, restarts: u64) -> Unit {
        let text = format!(
            "LoadState=loaded\nActiveState={active}\nSubState=x\nResult=watchdog\nNRestarts={restarts}"
        );
        parse(&text).remove(0)
    }

    #[test]
    fn units_come_in_their_order() {
        let text = "LoadState=loaded\nActiveState=active\nSubState=running\nResult=success\nNRestarts=0\n\n\
            LoadState=not-found\nActiveState=inactive\nSubState=dead\n\nActiveState=failed\nNRestarts=x\n";
        let units = parse(text);
        let states: Vec<_> = units.iter().map(|unit| unit.active.as_str()).collect();
        assert_eq!(states, ["active", "inactive", "failed"]);
        assert_eq!(parse(""), []);
        let mut watched = Watched::new(S);
        watched.compare(&units[1], S);
        assert_eq!(watched.state(), "not found");
    }

    #[test]
    fn a_failure_is_reported_once_and_its_end_too() {
        let mut watched = Watched::new(10 * S);
        assert_eq!(watched.compare(&unit("active", 0), S), None);
        let down = watched.compare(&unit("failed", 0), S);
        assert_eq!(down, Some(Change::Down("its unit has failed (result watchdog)".into())));
        assert_eq!(watched.compare(&unit("failed", 0), S), None);
        assert_eq!(watched.compare(&unit("active", 0), S), Some(Change::Up));
        // A unit that the operator has stopped has not failed.
        assert_eq!(watched.compare(&unit("inactive", 0), S), None);
    }

    #[test]
    fn a_unit_that_does_not_get_on_hangs() {
        let mut watched = Watched::new(10 * S);
        assert_eq!(watched.compare(&unit("deactivating", 0), 6 * S), None);
        let Some(Change::Down(why)) = watched.compare(&unit("deactivating", 0), 6 * S) else {
            panic!("it hangs")
        };
        assert!(why.contains("deactivating for more than 10 s"), "{why}");
        assert_eq!(watched.compare(&unit("inactive", 0), 6 * S), Some(Change::Up));
    }

    #[test]
    fn a_unit_that_had_failed_before_has_no_consequence() {
        let mut watched = Watched::new(10 * S);
        let note = "its unit has failed (result watchdog) before it was watched";
        assert_eq!(watched.compare(&unit("failed", 0), S), Some(Change::Note(note.into())));
        assert_eq!(watched.compare(&unit("failed", 0), S), None);
        assert_eq!(watched.compare(&unit("active", 0), S), Some(Change::Up));
        assert!(matches!(watched.compare(&unit("failed", 0), S), Some(Change::Down(_))));
    }

    #[test]
    fn a_oneshot_unit_may_work_for_long() {
        let mut watched = Watched::new(10 * S);
        let backup = parse("ActiveState=activating\nSubState=start\nNRestarts=0\nType=oneshot").remove(0);
        assert!((0..100).all(|_| watched.compare(&backup, 6 * S).is_none()));
        let ends = parse("ActiveState=deactivating\nNRestarts=0\nType=oneshot").remove(0);
        assert_eq!(watched.compare(&ends, 6 * S), None);
        assert!(matches!(watched.compare(&ends, 6 * S), Some(Change::Down(_))));
    }

    #[test]
    fn a_restart_between_two_looks_is_seen() {
        let mut watched = Watched::new(10 * S);
        // Restarts from before do not count.
        assert_eq!(watched.compare(&unit("active", 7), S), None);
        let note = Change::Note("systemd has restarted it (so far: 8)".into());
        assert_eq!(watched.compare(&unit("active", 8), S), Some(note));
        assert_eq!(watched.compare(&unit("active", 8), S), None);
    }

    proptest! {
        #[test]
        fn any_output_is_read(text in "((ActiveState|Result|NRestarts|x)=?.{0,12}\n|\n|.{0,8}){0,12}") {
            let mut watched = Watched::new(S);
            for unit in parse(&text) {
                watched.compare(&unit, S);
            }
        }
    }
}
