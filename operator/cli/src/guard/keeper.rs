//! The guard in mercuryd: starts the watch, and reports what the driver has seen.

use super::{rules::Rules, start, switches::Switches};
use libsystemd::logging::Priority;
use mercury_control::{access, error::Result, journal, status::Status, watch::Watch};
use std::{
    path::Path,
    process::{Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Interval at which the driver is asked.
const INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which a snapshot is tried that could not be kept.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(60);

/// What the driver said the last time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    alarms: u64,
    uses_hpet: bool,
    rollbacks: u64,
    is_lost: bool,
}

/// An event to report.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    priority: u8,
    name: &'static str,
    text: String,
}

/// Compares two answers of the driver.
#[must_use]
pub fn events(before: &Seen, watch: &Watch, status: &Status) -> (Vec<Event>, Seen) {
    let rollback = status.rollback.as_ref();
    let lost_because = status.snapshot.as_ref().and_then(|snapshot| snapshot.lost_because);
    let now = Seen {
        alarms: watch.alarms,
        uses_hpet: watch.hpet.used,
        rollbacks: rollback.map_or(0, |rollback| rollback.count),
        is_lost: lost_because.is_some(),
    };
    let mut events = Vec::new();
    if now.alarms > before.alarms {
        events.push(Event { priority: 2, name: "hang", text: watch.last_alarm.clone() });
    }
    if before.uses_hpet && !now.uses_hpet && watch.state == "on" {
        let rest = if watch.cycles.used { "" } else { ", and no hang is noticed any more" };
        let text = format!("NMIs of the HPET come no more{rest}: `mercury explain watch-silent`");
        events.push(Event { priority: if watch.cycles.used { 4 } else { 2 }, name: "source-lost", text });
    }
    if let Some(why) = lost_because.filter(|_| !before.is_lost) {
        let text = format!("the snapshot was lost: `mercury explain {why}`");
        events.push(Event { priority: 4, name: "snapshot-lost", text });
    }
    if let Some(rollback) = rollback.filter(|rollback| rollback.count > before.rollbacks) {
        let text = format!("this machine was put back to its snapshot: {}", rollback.text());
        events.push(Event { priority: 2, name: "rolled-back", text });
    }
    (events, now)
}

/// The guard of a running daemon.
#[derive(Debug)]
pub struct Keeper {
    rules: Rules,
    seen: Option<Seen>,
    asked: Option<Instant>,
    snapshot_tried: Option<Instant>,
    /// A command that keeps a snapshot. Orders are taken meanwhile.
    keeping: Option<JoinHandle<String>>,
}

impl Keeper {
    /// Starts the watch if there are rules.
    ///
    /// # Errors
    ///
    /// Returns an error if the rules are wrong, or the driver refuses.
    pub fn begin(path: &Path, module: Option<&Path>) -> Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let rules = Rules::read(path)?;
        let (device, _) = access::controlled(module, "guard")?;
        let state = start(&device, &rules)?;
        let text = format!("watching {} CPUs, profile {}", state.watch.cpus, rules.profile.name());
        tell(&rules, &Event { priority: 6, name: "watching", text });
        Ok(Some(Self { rules, seen: None, asked: None, snapshot_tried: None, keeping: None }))
    }

    #[cfg(test)]
    pub fn busy_with(keeping: JoinHandle<String>) -> Self {
        let rules = Rules::default();
        Self { rules, seen: None, asked: Some(Instant::now()), snapshot_tried: None, keeping: Some(keeping) }
    }

    /// Asks the driver now and then, and reports what has changed.
    pub fn look(&mut self) {
        if self.asked.is_some_and(|asked| asked.elapsed() < INTERVAL) {
            return;
        }
        self.asked = Some(Instant::now());
        let Ok(watch) = access::observe().and_then(|device| device.watch_status()) else { return };
        let Ok(status) = access::current_status() else { return };
        let watch = Watch::new(&watch);
        let (events, now) = match &self.seen {
            Some(before) => events(before, &watch, &status),
            None => (Vec::new(), events(&Seen::default(), &watch, &status).1),
        };
        self.seen = Some(now);
        events.iter().for_each(|event| tell(&self.rules, event));
        let is_kept = status.snapshot.is_some_and(|snapshot| snapshot.state != "lost");
        if self.rules.keeps_snapshots() && !is_kept {
            self.keep_snapshot();
        }
        if let Some(ended) = self.keeping.take_if(|keeping| keeping.is_finished()) {
            self.report_snapshot(&ended.join().unwrap_or_default());
        }
    }

    /// Starts the command that keeps a snapshot.
    fn keep_snapshot(&mut self) {
        let is_early = self.snapshot_tried.is_some_and(|tried| tried.elapsed() < SNAPSHOT_INTERVAL);
        if is_early || self.keeping.is_some() {
            return;
        }
        self.snapshot_tried = Some(Instant::now());
        self.keeping = Some(thread::spawn(|| {
            let output = std::env::current_exe().and_then(|program| {
                Command::new(program).args(["--json", "snapshot"]).stdin(Stdio::null()).output()
            });
            output.map_or_else(
                |error| error.to_string(),
                |output| String::from_utf8_lossy(&output.stdout).into_owned(),
            )
        }));
    }

    /// Returns the command under way that keeps a snapshot. It holds the driver, so a move waits for it.
    pub fn hand_over(&mut self) -> Option<JoinHandle<String>> {
        self.keeping.take()
    }

    /// Reports the end of that command. It ends a second time after a rollback, which is no matter here.
    fn report_snapshot(&self, said: &str) {
        let value: serde_json::Value = serde_json::from_str(said).unwrap_or_default();
        match (value["state"].as_str(), value["error"]["message"].as_str()) {
            (Some("kept"), _) => {
                let text = "a snapshot is kept".to_owned();
                tell(&self.rules, &Event { priority: 6, name: "snapshot-kept", text });
            }
            // The second life: the next look reports it.
            (Some(_), _) => {}
            (None, why) => {
                let text = format!("no snapshot can be kept: {}", why.unwrap_or("the command said nothing"));
                tell(&self.rules, &Event { priority: 4, name: "no-snapshot", text });
            }
        }
    }

    /// Stops the watch, and puts the kernel's switches back.
    pub fn end(self) {
        let stopped = Switches::system().put_back().and_then(|()| match access::control_if_loaded()? {
            Some(device) => device.watch(0).map(drop),
            None => Ok(()),
        });
        if let Err(error) = stopped {
            tell(&self.rules, &Event { priority: 4, name: "not-stopped", text: error.to_string() });
        }
    }
}

/// Reports an event, and runs the hook without waiting for it.
fn tell(rules: &Rules, event: &Event) {
    let priority = match event.priority {
        0..=2 => Priority::Critical,
        3..=4 => Priority::Warning,
        _ => Priority::Info,
    };
    journal::say(priority, "mercuryd", &event.text, vec![("MERCURY_EVENT", event.name.to_owned())]);
    let Some(hook) = &rules.hook else { return };
    match Command::new(hook).args([event.name, &event.text]).stdin(Stdio::null()).spawn() {
        Ok(mut child) => drop(thread::spawn(move || child.wait())),
        Err(error) => journal::say(Priority::Warning, "mercuryd", &format!("{hook}: {error}"), vec![]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_abi::snapshot::RollbackReport;
    use mercury_control::{rollback::Rollback, status::Snapshot, sysroot::Sysroot};

    fn watch(alarms: u64, used: bool) -> Watch {
        let source = |used| mercury_control::watch::Source { used, code: None };
        Watch {
            state: "on",
            cpus: 2,
            hpet: source(used),
            cycles: source(false),
            on_hang: "panic",
            on_oops: "none",
            nmis: 1,
            alarms,
            longest_frozen_ms: 0,
            last_alarm: "CPU 1 hangs".into(),
        }
    }

    fn status(rollback: Option<Rollback>, lost_because: Option<&'static str>) -> Status {
        let state = if lost_because.is_some() { "lost" } else { "kept" };
        let snapshot = Some(Snapshot { state, lost_because, copied_pages: 0, free_bytes: 0 });
        Status { rollback, snapshot, ..Status::without_driver(&Sysroot::default()) }
    }

    #[test]
    fn each_change_is_reported_once() {
        let (said, seen) = events(&Seen::default(), &watch(0, true), &status(None, None));
        assert!(said.is_empty());
        let report = RollbackReport { count: 1, reason: 5, ..RollbackReport::default() };
        let rollback = Rollback::new(&report, "CPU 1 hangs".into(), 1_000_000);
        let after = status(Some(rollback), Some("snapshot-pool"));
        let (said, seen) = events(&seen, &watch(1, false), &after);
        let names: Vec<_> = said.iter().map(|event| event.name).collect();
        assert_eq!(names, ["hang", "source-lost", "snapshot-lost", "rolled-back"]);
        assert!(said[1].text.contains("no hang is noticed any more"), "{}", said[1].text);
        assert!(said[3].text.contains("hang on CPU 0"), "{}", said[3].text);
        let (said, _) = events(&seen, &watch(1, false), &after);
        assert!(said.is_empty());
    }
}
