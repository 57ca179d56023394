//! The guard in mercuryd: starts the watch, and reports what the driver has seen.

use super::{
    avoid::Avoid,
    escalation::Escalation,
    integrity::{Passes, Said, report::End},
    outlook::{Outlook, Wish},
    report::Report,
    rules::{Rules, Scrub},
    sensors::rules::Seconds,
    start,
    switches::{Change, RESTART, Switches},
};
use libsystemd::logging::Priority;
use mercury_abi::code::Code;
use mercury_control::{
    access,
    device::Device,
    error::{Error, Result},
    exit::Exit,
    journal,
    status::Status,
    sysroot::Sysroot,
    watch::Watch,
};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Interval at which the driver is asked.
const INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which a snapshot is tried that could not be kept.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(60);
/// Rollbacks to one snapshot after which no service causes another one.
const ROLLBACKS_MAX: u64 = 3;

/// Bit of `/proc/sys/kernel/tainted`: D, the kernel has had an oops.
const TAINTED_BY_OOPS: u64 = 1 << 7;
/// Reason to replace a snapshot that was kept before mercuryd began.
const OLDER: &str =
    "the snapshot is older than this guard, and a rollback would go back to a time without it";

/// Name of the event of a second life.
const ROLLED_BACK: &str = "rolled-back";
/// Hooks that run at the same time at most.
const HOOKS_MAX: usize = 16;
static HOOKS: AtomicUsize = AtomicUsize::new(0);

/// What the driver said the last time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    alarms: u64,
    uses_hpet: bool,
    rollbacks: u64,
    is_lost: bool,
}

/// An event to report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub priority: u8,
    pub name: &'static str,
    pub text: String,
    pub fields: Vec<(&'static str, String)>,
}

impl Event {
    /// Makes an event with a priority of syslog's.
    #[must_use]
    pub fn new(priority: u8, name: &'static str, text: String) -> Self {
        Self { priority, name, text, fields: Vec::new() }
    }

    /// Adds a field of the journal.
    #[must_use]
    pub fn field(mut self, name: &'static str, value: &str) -> Self {
        self.fields.push((name, value.to_owned()));
        self
    }

    /// Adds the code that `mercury explain` knows.
    #[must_use]
    pub fn code(self, code: Code) -> Self {
        self.field("MERCURY_CODE", code.name())
    }
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
        events.push(Event::new(2, "hang", watch.last_alarm.clone()));
    }
    if before.uses_hpet && !now.uses_hpet && watch.state == "on" {
        let rest = if watch.cycles.used { "" } else { ", and no hang is noticed any more" };
        let text = format!("NMIs of the HPET come no more{rest}: `mercury explain watch-silent`");
        events.push(Event::new(if watch.cycles.used { 4 } else { 2 }, "source-lost", text));
    }
    if let Some(why) = lost_because.filter(|_| !before.is_lost) {
        let text = format!("the snapshot was lost: `mercury explain {why}`");
        events.push(Event::new(4, "snapshot-lost", text));
    }
    if let Some(rollback) = rollback.filter(|rollback| rollback.count > before.rollbacks) {
        let text = format!("this machine was put back to its snapshot: {}", rollback.text());
        events.push(Event::new(2, ROLLED_BACK, text));
    }
    (events, now)
}

/// The watch in the driver, as the daemon knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The driver watches by the daemon's rules.
    Watching,
    /// The driver refused to.
    Refused,
    /// The driver was removed, or another process controls it.
    Gone,
}

impl Standing {
    /// Compares the acts that the driver has in force with those of the rules; none: there is no driver.
    /// Returns the standing, what is wrong with it since, and true if the watch has to be started anew.
    fn after(self, acts: Option<u32>, wanted: u32) -> (Self, Option<&'static str>, bool) {
        match (self, acts) {
            (_, Some(acts)) if acts == wanted => (Self::Watching, None, false),
            (Self::Watching, Some(0)) => (self, Some("the watch was ended by another program"), true),
            (Self::Watching, Some(_)) => (self, Some("the watch was changed by another program"), true),
            (Self::Watching, None) => (Self::Gone, Some("the driver was removed"), false),
            // It was loaded again, or may be free by now.
            (Self::Gone, Some(_)) => (self, None, true),
            (Self::Refused | Self::Gone, _) => (self, None, false),
        }
    }
}

/// The guard of a running daemon.
#[derive(Debug)]
pub struct Keeper {
    rules: Rules,
    outlook: Outlook,
    standing: Standing,
    reported: Option<Report>,
    seen: Option<Seen>,
    asked: Option<Instant>,
    snapshot_tried: Option<Instant>,
    /// The time at which the snapshot was first seen.
    kept_since: Option<Instant>,
    /// The reason for which the snapshot that is kept is to be replaced.
    stale: Option<&'static str>,
    /// The reason that was told last for which no snapshot can be kept.
    no_snapshot: Option<String>,
    /// Rollbacks of this machine before the snapshot that is kept. In the lives after it this number is still
    /// that of the instant, so the difference counts the rollbacks to this snapshot.
    rollbacks_before: Option<u64>,
    /// A command that keeps a snapshot. Orders are taken meanwhile.
    keeping: Option<JoinHandle<String>>,
    /// A command that goes back to the snapshot. It ends only if the machine does not.
    going_back: Option<JoinHandle<String>>,
    /// Acts after a second death of the same.
    escalation: Option<Escalation>,
    /// Comparisons of code and constants with their copy.
    passes: Option<Passes>,
}

impl Keeper {
    /// Starts the watch, the sensors and the services. A driver that refuses is reported, and the others are
    /// watched all the same.
    #[must_use]
    pub fn begin(rules: Rules, module: Option<&Path>) -> Self {
        // From now on other commands leave the watch alone.
        let report = Report { pid: std::process::id(), ..Report::default() };
        let _ = report.write(&Sysroot::default());
        let device = access::controlled(module, "guard").map(|(device, _)| device);
        let (event, standing) = begin_to_watch(&rules, device);
        tell(&rules, &event);
        let outlook = Outlook::begin(&Sysroot::default(), &rules);
        let integrity = &rules.integrity;
        let passes = (integrity.scrub != Scrub::Off)
            .then(|| Passes::begin(integrity.scrub == Scrub::Mend, integrity.stores, integrity.every()));
        Self { passes, standing, ..Self::of(rules, outlook) }
    }

    fn of(rules: Rules, outlook: Outlook) -> Self {
        Self {
            rules,
            outlook,
            standing: Standing::Refused,
            reported: None,
            seen: None,
            asked: None,
            snapshot_tried: None,
            kept_since: None,
            stale: None,
            no_snapshot: None,
            rollbacks_before: None,
            keeping: None,
            going_back: None,
            escalation: None,
            passes: None,
        }
    }

    #[cfg(test)]
    pub fn busy_with(keeping: JoinHandle<String>) -> Self {
        let rules = Rules { sensors: super::sensors::rules::SensorRules::none(), ..Rules::default() };
        let outlook = Outlook::begin(&Sysroot::at("/nowhere"), &rules);
        Self { asked: Some(Instant::now()), keeping: Some(keeping), ..Self::of(rules, outlook) }
    }

    /// Looks at the sensors and services, and now and then at the driver. Reports what has changed. Returns
    /// the reason if this machine is to move.
    pub fn look(&mut self) -> Option<String> {
        let now = Instant::now();
        let news = self.passes.iter().flat_map(Passes::news);
        news.for_each(|said| tell(&self.rules, &integrity_event(said)));
        let mut order = None;
        for wish in self.outlook.look(now) {
            match wish {
                Wish::Tell(event) => tell(&self.rules, &event),
                Wish::Run(program, event) => run(program, &event),
                Wish::Evacuate(reason) => order = Some(reason),
                Wish::Rollback(reason) => self.go_back(&reason),
                Wish::Renew(reason) => self.stale = Some(reason),
            }
        }
        if self.asked.is_none_or(|asked| now.duration_since(asked) >= INTERVAL) {
            self.asked = Some(now);
            self.publish();
            self.look_at_driver();
        }
        self.look_at_escalation(now).or(order)
    }

    /// Writes the state, if it has changed, for other commands.
    fn publish(&mut self) {
        let report = self.outlook.report();
        if self.reported.as_ref() != Some(&report) && report.write(&Sysroot::default()).is_ok() {
            self.reported = Some(report);
        }
    }

    /// Reports how far an escalation is. Returns the reason if this machine is to move.
    fn look_at_escalation(&mut self, now: Instant) -> Option<String> {
        let news = self.escalation.as_mut()?.news(now);
        news.events.iter().for_each(|event| tell(&self.rules, event));
        if news.has_ended {
            self.escalation = None;
        }
        news.order
    }

    /// Starts the watch again if another program has ended or changed it, or the driver was loaded again.
    fn keep_watching(&mut self, acts: Option<u32>) {
        let (standing, wrong, starts) = self.standing.after(acts, self.rules.acts());
        self.standing = standing;
        if let Some(why) = wrong {
            tell(&self.rules, &Event::new(2, "not-watching", format!("no hang was noticed: {why}")));
        }
        if starts && let Some(device) = access::control_if_loaded().transpose() {
            let (event, standing) = begin_to_watch(&self.rules, device);
            // It was told before that nothing is watched.
            if standing != Standing::Gone {
                tell(&self.rules, &event);
            }
            self.standing = standing;
        }
    }

    /// Asks the driver, and reports what has changed.
    fn look_at_driver(&mut self) {
        if let Some(ended) = self.going_back.take_if(|command| command.is_finished()) {
            self.report_going_back(&ended.join().unwrap_or_default());
        }
        let watch = match access::observe().and_then(|device| device.watch_status()) {
            Ok(watch) => watch,
            Err(error) if error.code == Some(Code::NotLoaded) => return self.keep_watching(None),
            Err(_) => return,
        };
        self.keep_watching(Some(watch.acts));
        let Ok(status) = access::current_status() else { return };
        let watch = Watch::new(&watch);
        let (events, now) = match &self.seen {
            Some(before) => events(before, &watch, &status),
            None => (Vec::new(), events(&Seen::default(), &watch, &status).1),
        };
        let rollback = status.rollback;
        let snapshot = status.snapshot.map(|snapshot| snapshot.state);
        let is_kept = snapshot.is_some_and(|state| state != "lost");
        if !is_kept || self.rollbacks_before.is_none() {
            self.rollbacks_before = Some(now.rollbacks);
        }
        let is_older = self.seen.is_none() && snapshot == Some("kept");
        self.seen = Some(now);
        events.iter().for_each(|event| tell(&self.rules, event));
        if is_older {
            self.stale = Some(OLDER);
        }
        self.look_at_snapshot(snapshot);
        if let Some(ended) = self.keeping.take_if(|keeping| keeping.is_finished()) {
            let event = snapshot_event(&ended.join().unwrap_or_default());
            if let Some(event) = event.filter(|event| is_news(&mut self.no_snapshot, event)) {
                tell(&self.rules, &event);
            }
        }
        if let Some(death) = rollback.filter(|_| events.iter().any(|event| event.name == ROLLED_BACK)) {
            self.escalate(death.same);
        }
    }

    /// Keeps, renews or leaves the snapshot, by its state.
    fn look_at_snapshot(&mut self, state: Option<&str>) {
        let is_kept = state == Some("kept");
        if !self.rules.keeps_snapshots() {
            if let Some(reason) = self.stale.take_if(|_| is_kept) {
                tell(&self.rules, &stale_event(reason));
            }
            return;
        }
        // A snapshot from before the oops is the better one.
        if let Some(event) = oops_event(&Sysroot::default()) {
            if !is_kept && is_news(&mut self.no_snapshot, &event) {
                tell(&self.rules, &event);
            }
            return;
        }
        if state.is_none_or(|state| state == "lost") {
            self.keep_snapshot();
        }
        self.renew_snapshot(is_kept);
    }

    /// Begins to avoid the cause of the last death, if the machine has died of it before.
    fn escalate(&mut self, same: u64) {
        if self.rules.avoid == Avoid::default() {
            return;
        }
        match Escalation::begin(&self.rules, same) {
            Ok(escalation) => self.escalation = Some(escalation),
            Err(error) => {
                let text = format!("no thread for what would avoid the last death: {error}");
                tell(&self.rules, &Event::new(2, "not-avoided", text));
            }
        }
    }

    /// Returns the number of rollbacks to the snapshot that is kept.
    fn rollbacks(&self) -> u64 {
        let now = access::current_status().ok().and_then(|status| status.rollback);
        let now = now.map_or(0, |rollback| rollback.count);
        now.saturating_sub(self.rollbacks_before.unwrap_or_default())
    }

    /// Starts the command that goes back to the snapshot.
    fn go_back(&mut self, reason: &str) {
        if self.going_back.is_some() {
            return;
        }
        if self.rollbacks() >= ROLLBACKS_MAX {
            let text = format!("no rollback for {reason}: {ROLLBACKS_MAX} have not helped");
            tell(&self.rules, &Event::new(2, "not-rolled-back", text).code(Code::RollbackInVain));
            return;
        }
        tell(&self.rules, &Event::new(2, "going-back", format!("going back to the snapshot: {reason}")));
        self.going_back = self.run("rollback", vec![vec!["--json".to_owned(), "rollback".to_owned()]]);
    }

    /// Reports a rollback that has not happened.
    fn report_going_back(&self, said: &str) {
        let value: serde_json::Value = serde_json::from_str(said).unwrap_or_default();
        let why = value["error"]["message"].as_str().unwrap_or("the command said nothing");
        let event = Event::new(2, "not-rolled-back", format!("this machine was not put back: {why}"));
        tell(
            &self.rules,
            &value["error"]["code"]
                .as_str()
                .into_iter()
                .fold(event, |event, code| event.field("MERCURY_CODE", code)),
        );
    }

    /// Reads the hardware again after a move, successful or not.
    pub fn resume(&mut self, has_moved: bool) {
        self.outlook.resume(has_moved);
    }

    /// Takes note that the order to move was refused.
    pub fn was_refused(&mut self) {
        self.outlook.has_failed();
    }

    /// Starts the command that keeps a snapshot.
    fn keep_snapshot(&mut self) {
        let is_early = self.snapshot_tried.is_some_and(|tried| tried.elapsed() < SNAPSHOT_INTERVAL);
        if is_early || self.keeping.is_some() {
            return;
        }
        self.snapshot_tried = Some(Instant::now());
        self.keeping = self.run("snapshot", vec![self.rules.snapshot.command()]);
    }

    /// Drops a snapshot that is stale, or as old as the rules allow, and keeps another one.
    fn renew_snapshot(&mut self, is_kept: bool) {
        let age = self.rules.snapshot.renew_s.map(Seconds::time);
        let is_busy = self.keeping.is_some() || self.going_back.is_some() || self.escalation.is_some();
        let is_due = is_due(&mut self.kept_since, is_kept, Instant::now(), age);
        if is_busy || !(is_due || is_kept && self.stale.is_some()) {
            return;
        }
        self.stale = None;
        (self.kept_since, self.rollbacks_before) = (None, None);
        let drop = ["--json", "snapshot", "--drop"].map(str::to_owned).to_vec();
        self.keeping = self.run("snapshot", vec![drop, self.rules.snapshot.command()]);
    }

    /// Starts commands of Mercury's in a thread, one after the other. The thread returns the words of the
    /// last one. A thread that the system refuses is reported.
    fn run(&self, name: &'static str, commands: Vec<Vec<String>>) -> Option<JoinHandle<String>> {
        let all = move || commands.iter().fold(String::new(), |_, command| mercury(command));
        let started = thread::Builder::new().spawn(all);
        let failed =
            |error| tell(&self.rules, &Event::new(2, "not-started", format!("mercury {name}: {error}")));
        started.map_err(failed).ok()
    }

    /// Leaves this hardware, and returns the command under way that keeps a snapshot. It holds the driver, so
    /// a move waits for it.
    pub fn hand_over(&mut self) -> Option<JoinHandle<String>> {
        self.outlook.pause();
        self.keeping.take()
    }

    /// Stops the watch, the sensors and the services, and puts the kernel's switches back.
    pub fn end(self) {
        Report::remove(&Sysroot::default());
        if let Some(passes) = self.passes {
            passes.end();
        }
        let stopped = Switches::system().put_back().and_then(|()| match access::control_if_loaded()? {
            Some(device) => device.watch(0).map(drop),
            None => Ok(()),
        });
        if let Err(error) = stopped {
            tell(&self.rules, &Event::new(4, "not-stopped", error.to_string()));
        }
    }
}

/// Starts the watch by the rules. Returns the event to report.
fn begin_to_watch(rules: &Rules, device: Result<Device>) -> (Event, Standing) {
    match device.and_then(|device| start(&device, rules)) {
        Ok((watch, changes)) => {
            let text = format!("watching {} CPUs, profile {}", watch.cpus, rules.profile.name());
            (Event::new(6, "watching", text + &restart_of(&changes)), Standing::Watching)
        }
        Err(error) => refused(&error),
    }
}

/// Says that the guard lets a panic restart this machine, if it does.
fn restart_of(changes: &[Change]) -> String {
    let change = changes.iter().find(|change| change.name == RESTART.0);
    let text = |change: &Change| {
        format!("; without a crash kernel a panic restarts this machine: kernel.panic={}", change.set)
    };
    change.map(text).unwrap_or_default()
}

/// Judges a watch that could not be started. A driver that another process controls is tried again.
fn refused(error: &Error) -> (Event, Standing) {
    let standing = if error.exit == Exit::Busy { Standing::Gone } else { Standing::Refused };
    let event = Event::new(2, "not-watching", format!("no hang is noticed: {error}"));
    (error.code.into_iter().fold(event, Event::code), standing)
}

/// Returns the event for the end of the command that keeps a snapshot. The command ends a second time after a
/// rollback, which has an event of its own.
fn snapshot_event(said: &str) -> Option<Event> {
    let value: serde_json::Value = serde_json::from_str(said).unwrap_or_default();
    match (value["state"].as_str(), value["error"]["message"].as_str()) {
        (Some("kept"), _) => Some(Event::new(6, "snapshot-kept", "a snapshot is kept".to_owned())),
        (Some(_), _) => None,
        (None, why) => {
            let text = format!("no snapshot can be kept: {}", why.unwrap_or("the command said nothing"));
            Some(Event::new(4, "no-snapshot", text))
        }
    }
}

/// Returns the event for a snapshot that a rollback had better not go back to. mercuryd did not keep it.
fn stale_event(reason: &str) -> Event {
    let again = "`mercury snapshot --drop` and `mercury snapshot` keep another one";
    Event::new(4, "snapshot-stale", format!("{reason}: {again}"))
}

/// Returns the event for a kernel of which no snapshot is kept, because it has had an oops. A thread of it
/// may be gone, or a lock held for ever, in each life that begins there.
fn oops_event(sysroot: &Sysroot) -> Option<Event> {
    let tainted: u64 = sysroot.text("proc/sys/kernel/tainted")?.parse().ok()?;
    let text = "no snapshot can be kept: the kernel has had an oops (tainted D), and each rollback would go \
        back to that; restart this machine";
    (tainted & TAINTED_BY_OOPS != 0).then(|| Event::new(4, "no-snapshot", text.to_owned()))
}

/// Returns true if a snapshot has been kept for so long.
fn is_due(since: &mut Option<Instant>, is_kept: bool, now: Instant, age: Option<Duration>) -> bool {
    if !is_kept {
        *since = None;
        return false;
    }
    let since = *since.get_or_insert(now);
    age.is_some_and(|age| now.saturating_duration_since(since) >= age)
}

/// Returns true unless the event is the refusal of a snapshot that was told last, which comes each minute.
fn is_news(told: &mut Option<String>, event: &Event) -> bool {
    let refusal = (event.name == "no-snapshot").then(|| event.text.clone());
    let is_news = refusal.is_none() || refusal != *told;
    *told = refusal;
    is_news
}

/// Converts news of the passes.
fn integrity_event(said: Said) -> Event {
    match said {
        Said::Begun(state) => Event::new(
            6,
            "integrity-on",
            format!("comparing code and constants of {} parts, {} bytes", state.parts, state.bytes),
        ),
        Said::Found(finding) => {
            let priority = if finding.end == End::Unclaimed { 4 } else { 2 };
            Event::new(priority, finding.event(), finding.text())
        }
        Said::Failed(why) => Event::new(4, "integrity-failed", why),
    }
}

/// Runs a command of Mercury's, and returns what it has said.
fn mercury(arguments: &[String]) -> String {
    let output = std::env::current_exe()
        .and_then(|program| Command::new(program).args(arguments).stdin(Stdio::null()).output());
    output
        .map_or_else(|error| error.to_string(), |output| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reports an event, and runs the hook without waiting for it.
fn tell(rules: &Rules, event: &Event) {
    let priority = match event.priority {
        0..=2 => Priority::Critical,
        3..=4 => Priority::Warning,
        _ => Priority::Info,
    };
    let name = [("MERCURY_EVENT", event.name.to_owned())].into_iter();
    journal::say(priority, "mercuryd", &event.text, name.chain(event.fields.clone()).collect());
    if let Some(hook) = &rules.hook {
        run(hook.clone(), event);
    }
}

/// A hook that may run. Its end lets another one run.
struct Turn<'a>(&'a AtomicUsize);

impl<'a> Turn<'a> {
    fn take(running: &'a AtomicUsize) -> Option<Self> {
        let more = |count| (count < HOOKS_MAX).then_some(count + 1);
        running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(running))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs a program with an event's name and text as its arguments, and its fields as variables. The program
/// may lie on a disk that does not answer, so a thread starts it.
fn run(program: String, event: &Event) {
    let failed = |why: &str| journal::say(Priority::Warning, "mercuryd", why, vec![]);
    let Some(turn) = Turn::take(&HOOKS) else {
        return failed(&format!("{program} is not run for {}: {HOOKS_MAX} hooks still run", event.name));
    };
    let mut command = Command::new(&program);
    let fields = event.fields.iter().map(|(name, value)| (*name, value.as_str()));
    command.args([event.name, &event.text]).envs(fields).stdin(Stdio::null());
    let name = program.clone();
    let started = thread::Builder::new().spawn(move || {
        let _turn = turn;
        let ended = command.spawn().and_then(|mut child| {
            // The daemon is not ended for want of memory. What it runs may be.
            let _ = fs::write(format!("/proc/{}/oom_score_adj", child.id()), "0");
            child.wait()
        });
        if let Err(error) = ended {
            failed(&format!("{program}: {error}"));
        }
    });
    if let Err(error) = started {
        failed(&format!("{name}: {error}"));
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
    fn a_watch_that_another_program_ends_begins_again() {
        use Standing::{Gone, Refused, Watching};
        let wanted = Rules::default().acts();
        let after = |standing: Standing, acts| standing.after(acts, wanted);
        assert_eq!(after(Watching, Some(wanted)), (Watching, None, false));
        for (acts, word) in [(0, "ended"), (wanted ^ 2, "changed")] {
            let (standing, why, starts) = after(Watching, Some(acts));
            assert!(standing == Watching && why.is_some_and(|why| why.contains(word)) && starts, "{acts}");
        }
        // It is told once that the driver is gone, and the watch begins with the next driver.
        let (gone, why, starts) = after(Watching, None);
        assert_eq!((gone, why, starts), (Gone, Some("the driver was removed"), false));
        assert_eq!(after(Gone, None), (Gone, None, false));
        assert_eq!(after(Gone, Some(0)), (Gone, None, true));
        // A driver that refused is not asked again, unless somebody else had more luck.
        assert_eq!(after(Refused, Some(0)), (Refused, None, false));
        assert_eq!(after(Refused, Some(wanted)), (Watching, None, false));
    }

    /// Such as a checkpoint that began just before the daemon, or the unit that loads the driver at the boot.
    #[test]
    fn a_driver_that_another_process_controls_is_tried_again() {
        let busy = Error { code: Some(Code::Busy), ..Error::new(Exit::Busy, "process 77 controls Mercury") };
        let (event, standing) = refused(&busy);
        assert_eq!((event.name, standing), ("not-watching", Standing::Gone));
        assert!(standing.after(Some(0), Rules::default().acts()).2);
        let (event, standing) = refused(&Error::coded(Code::WatchNoHpet, "no source of NMIs"));
        assert_eq!((event.name, standing), ("not-watching", Standing::Refused));
    }

    #[test]
    fn a_snapshot_that_is_refused_for_good_is_told_once() {
        let refused = |why: &str| {
            snapshot_event(&serde_json::json!({ "error": { "message": why } }).to_string()).expect("an event")
        };
        let kept = snapshot_event(r#"{"state": "kept"}"#).expect("an event");
        let mut told = None;
        assert!(is_news(&mut told, &refused("NFS 4.2")));
        assert!(!is_news(&mut told, &refused("NFS 4.2")));
        assert!(is_news(&mut told, &refused("no memory")), "another reason");
        assert!(is_news(&mut told, &kept) && is_news(&mut told, &kept));
        assert!(is_news(&mut told, &refused("no memory")), "it was kept meanwhile");
        assert_eq!(snapshot_event(r#"{"state": "back"}"#), None);
        assert_eq!(snapshot_event("").map(|event| event.name), Some("no-snapshot"));
    }

    #[test]
    fn no_snapshot_is_kept_of_a_kernel_that_has_had_an_oops() {
        let fake = crate::guard::sensors::testing::Fake::new();
        let name = |tainted: &str| {
            fake.put("proc/sys/kernel/tainted", tainted);
            oops_event(&fake.sysroot()).map(|event| event.name)
        };
        assert_eq!(name("0\n"), None);
        assert_eq!(name("12288\n"), None, "modules from elsewhere");
        assert_eq!(name("12416\n"), Some("no-snapshot"));
        assert_eq!(oops_event(&Sysroot::at("/nowhere")), None);
    }

    #[test]
    fn a_snapshot_is_renewed_at_its_age() {
        let (begun, age) = (Instant::now(), Some(Duration::from_secs(600)));
        let later = |seconds| begun + Duration::from_secs(seconds);
        let mut since = None;
        assert!(!is_due(&mut since, true, begun, age) && !is_due(&mut since, true, later(599), age));
        assert!(is_due(&mut since, true, later(600), age));
        assert!(!is_due(&mut since, true, later(9000), None), "the rules say nothing");
        assert!(!is_due(&mut since, false, later(600), age), "it was lost");
        assert!(!is_due(&mut since, true, later(700), age), "another one is kept");
        assert!(is_due(&mut since, true, later(1300), age));
    }

    #[test]
    fn a_panic_that_restarts_the_machine_is_told() {
        let change = |name: &str| Change { name: name.into(), before: "0".into(), set: "10".into() };
        assert_eq!(restart_of(&[change("kernel/softlockup_panic")]), "");
        assert!(restart_of(&[change("kernel/panic")]).ends_with("kernel.panic=10"));
    }

    #[test]
    fn hooks_that_hang_are_bounded() {
        let running = AtomicUsize::new(0);
        let mut turns: Vec<_> = (0..HOOKS_MAX).filter_map(|_| Turn::take(&running)).collect();
        assert_eq!(turns.len(), HOOKS_MAX);
        assert!(Turn::take(&running).is_none());
        turns.pop();
        assert!(Turn::take(&running).is_some());
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
