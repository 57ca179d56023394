//! `mercury metrics`: state and counters for Prometheus, on standard output or in a file for node_exporter's
//! textfile collector.

use crate::guard::{integrity, report::Report};
use clap::Args;
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    history::{self, Action, Outcome, Record},
    output::Format,
    say::{self, Say},
    status::Status,
    sysroot::Sysroot,
    watch::Watch,
};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::{Registry, Unit},
};
use std::{
    fmt,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    sync::atomic::AtomicU64,
};

#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Write this file instead; node_exporter reads files that end in .prom
    #[arg(long, value_name = "FILE")]
    pub textfile: Option<PathBuf>,
    /// Let only this group read the file, besides root [default: every user may]
    #[arg(long, value_name = "GROUP", requires = "textfile")]
    pub group: Option<String>,
}

type Seconds<L> = Family<L, Gauge<f64, AtomicU64>>;
type SecondsCounter<L> = Family<L, Counter<f64, AtomicU64>>;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct State {
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Cpu {
    cpu: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CpuReason {
    cpu: u32,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Source {
    source: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Sensor {
    sensor: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SensorSignal {
    sensor: &'static str,
    signal: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Service {
    service: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Act {
    action: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ActResult {
    action: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ActCode {
    action: &'static str,
    code: String,
}

/// The recorded outcomes of an action.
#[derive(Clone, Debug)]
struct Past {
    action: Action,
    record: Option<Record>,
    is_running: bool,
}

/// The state of the guard: of the driver's part, and of mercuryd's.
#[derive(Clone, Debug, Default)]
struct Guarded {
    watch: Option<Watch>,
    daemon: Option<Report>,
    integrity: Option<integrity::report::State>,
}

/// Prints the metrics, or writes them to the file.
///
/// # Errors
///
/// Returns an error if the driver does not answer, or the file cannot be written.
pub fn run(args: &MetricsArgs, say: Say<'_>) -> Result<Exit> {
    if say.format == Format::Json {
        return Err(Error::new(Exit::Usage, "metrics have a format of their own")
            .hint("`mercury status --json` has JSON"));
    }
    access::need_root("metrics")?;
    let folder = Path::new(history::FOLDER);
    let past = Action::ALL.map(|action| Past {
        action,
        record: history::read(folder, action),
        is_running: history::is_running(folder, action),
    });
    let watch = access::observe().and_then(|device| device.watch_status()).ok();
    let watch = watch.map(|state| Watch::new(&state));
    let guarded = Guarded { watch, daemon: Report::read(&Sysroot::default()), integrity: integrity::state() };
    let text = exposition(&access::current_status()?, &guarded, &past).map_err(|error| {
        Error::new(Exit::Failed, format!("the metrics could not be put into text: {error}"))
            .hint("report it as a bug")
    })?;
    let Some(file) = &args.textfile else {
        say::print(&text);
        return Ok(Exit::Done);
    };
    put(file, args.group.as_deref(), &text).map(|()| Exit::Done)
}

/// Formats the metrics in Prometheus' text format.
fn exposition(status: &Status, guarded: &Guarded, past: &[Past]) -> std::result::Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("mercury");
    system(&mut registry, status);
    switches(&mut registry, status);
    exits(&mut registry, status);
    snapshot(&mut registry, status);
    guarded.watch.iter().for_each(|watch| guard(&mut registry, watch));
    guarded.integrity.iter().for_each(|state| compared(&mut registry, state));
    guarded.daemon.iter().for_each(|report| sensors(&mut registry, report));
    attempts(&mut registry, past);
    last_attempts(&mut registry, past);
    let mut text = String::new();
    text::encode_registry(&mut text, &registry)?;
    Ok(plain(&text))
}

/// Converts OpenMetrics to the older text format, the only one that node_exporter reads. There the
/// name of a counter's family ends in `_total`, as its samples' names do, that of an information in
/// `_info`, and units are unknown.
fn plain(text: &str) -> String {
    let kind = |name: &str| {
        let typed = format!("# TYPE {name} ");
        text.lines().find_map(|line| line.strip_prefix(&typed)).unwrap_or_default()
    };
    let line = |line: &str| -> String {
        let mut words = line.splitn(4, ' ');
        let (Some("#"), Some(what), Some(name), Some(rest)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return format!("{line}\n");
        };
        let (suffix, rest) = match (what, kind(name)) {
            ("UNIT", _) => return String::new(),
            ("TYPE", "info") => ("_info", "gauge"),
            (_, "info") => ("_info", rest),
            (_, "counter") => ("_total", rest),
            _ => ("", rest),
        };
        format!("# {what} {name}{suffix} {rest}\n")
    };
    text.lines().map(line).collect()
}

fn system(registry: &mut Registry, status: &Status) {
    let version =
        if status.version.is_empty() { env!("CARGO_PKG_VERSION").to_owned() } else { status.version.clone() };
    registry.register(
        "build",
        "Version of the hypervisor, or of the command without a driver",
        Info::new([("version", version)]),
    );
    let states = Family::<State, Gauge>::default();
    for state in ["no-driver", "unloaded", "loaded", "attached", "crashed", "orphaned"] {
        states.get_or_create(&State { state }).set(i64::from(status.state == state));
    }
    registry.register("state", "1 for the state of Mercury, 0 for the others", states);
    let memory = Gauge::<i64>::default();
    memory.set(signed(status.memory.total_bytes));
    registry.register_with_unit("memory", "Memory that the loaded hypervisor holds", Unit::Bytes, memory);
}

fn switches(registry: &mut Registry, status: &Status) {
    let [attached, wanted, crashed] = [(); 3].map(|()| Family::<Cpu, Gauge>::default());
    let [attaches, detaches] = [(); 2].map(|()| Family::<Cpu, Counter>::default());
    let [last_attach, last_detach] = [(); 2].map(|()| Seconds::<Cpu>::default());
    for cpu in status.cpus.iter().filter(|cpu| cpu.mode != "offline") {
        let label = Cpu { cpu: cpu.cpu };
        attached.get_or_create(&label).set(i64::from(cpu.mode == "attached"));
        wanted.get_or_create(&label).set(i64::from(cpu.wanted));
        crashed.get_or_create(&label).set(i64::from(cpu.crash.is_some()));
        attaches.get_or_create(&label).inc_by(cpu.attaches);
        detaches.get_or_create(&label).inc_by(cpu.detaches);
        last_attach.get_or_create(&label).set(cpu.attach_us / 1e6);
        last_detach.get_or_create(&label).set(cpu.detach_us / 1e6);
    }
    registry.register("cpu_attached", "1 if the CPU is attached, 0 if it is native", attached);
    registry.register("cpu_wanted", "1 if the CPU should be attached", wanted);
    registry.register("cpu_crashed", "1 if the hypervisor crashed on the CPU since load", crashed);
    registry.register("attaches", "Attaches since load", attaches);
    registry.register("detaches", "Detaches since load", detaches);
    registry.register_with_unit(
        "last_attach",
        "Interrupts off in the last attach",
        Unit::Seconds,
        last_attach,
    );
    registry.register_with_unit(
        "last_detach",
        "Interrupts off in the last detach",
        Unit::Seconds,
        last_detach,
    );
}

fn exits(registry: &mut Registry, status: &Status) {
    let exits = Family::<CpuReason, Counter>::default();
    let time = SecondsCounter::<Cpu>::default();
    for cpu in status.cpus.iter().filter(|cpu| cpu.mode != "offline") {
        for (reason, count) in &cpu.exits {
            exits.get_or_create(&CpuReason { cpu: cpu.cpu, reason }).inc_by(*count);
        }
        let us = mercury_control::output::ticks_to_us(cpu.exit_ticks, status.tsc_khz);
        time.get_or_create(&Cpu { cpu: cpu.cpu }).inc_by(us / 1e6);
    }
    registry.register(
        "exits",
        "Exits since load by reason; the question itself is a hypercall on each attached CPU",
        exits,
    );
    registry.register_with_unit("exit", "Time in exits since load", Unit::Seconds, time);
}

fn snapshot(registry: &mut Registry, status: &Status) {
    let states = Family::<State, Gauge>::default();
    let state = status.snapshot.as_ref().map_or("none", |snapshot| snapshot.state);
    for name in ["none", "kept", "in-use", "lost"] {
        states.get_or_create(&State { state: name }).set(i64::from(state == name));
    }
    registry.register(
        "snapshot_state",
        "1 for the state of the snapshot of memory, 0 for the others",
        states,
    );
    if let Some(snapshot) = &status.snapshot {
        let [copied, free] = [(); 2].map(|()| Gauge::<i64>::default());
        copied.set(signed(snapshot.copied_pages));
        free.set(signed(snapshot.free_bytes));
        registry.register("snapshot_copied_pages", "Pages copied for the snapshot", copied);
        registry.register_with_unit("snapshot_free", "Memory left for copies", Unit::Bytes, free);
    }
    let rollbacks = Counter::<u64>::default();
    rollbacks.inc_by(status.rollback.as_ref().map_or(0, |rollback| rollback.count));
    registry.register("rollbacks", "Times that this machine was put back to a snapshot", rollbacks);
}

fn guard(registry: &mut Registry, watch: &Watch) {
    let sources = Family::<Source, Gauge>::default();
    for (source, used) in [("hpet", watch.hpet.used), ("cycles", watch.cycles.used)] {
        sources.get_or_create(&Source { source }).set(i64::from(used));
    }
    registry.register("guard_source", "1 if the watch uses this source of NMIs", sources);
    let cpus = Gauge::<i64>::default();
    cpus.set(i64::from(watch.cpus));
    registry.register("guard_cpus", "CPUs that are watched", cpus);
    let [hangs, nmis] = [(); 2].map(|()| Counter::<u64>::default());
    hangs.inc_by(watch.alarms);
    nmis.inc_by(watch.nmis);
    registry.register("guard_hangs", "Hangs that were noticed since the driver was loaded", hangs);
    registry.register("guard_nmis", "NMIs of the HPET since the driver was loaded", nmis);
    let longest = Gauge::<f64, AtomicU64>::default();
    longest.set(std::time::Duration::from_millis(watch.longest_frozen_ms).as_secs_f64());
    registry.register_with_unit(
        "guard_longest_frozen",
        "Longest time for which a CPU has been seen frozen with interrupts off",
        Unit::Seconds,
        longest,
    );
}

fn sensors(registry: &mut Registry, report: &Report) {
    let up = Family::<Sensor, Gauge>::default();
    for sensor in &report.sensors {
        let label = Sensor { sensor: sensor.name.name() };
        up.get_or_create(&label).set(i64::from(sensor.silent.is_none()));
    }
    registry.register("guard_sensor_up", "1 if the sensor answers", up);
    let [amounts, alarms] = [(); 2].map(|()| Family::<SensorSignal, Counter>::default());
    for sum in &report.signals {
        let label = SensorSignal { sensor: sum.sensor.name(), signal: sum.signal.name() };
        amounts.get_or_create(&label).inc_by(sum.amount);
        alarms.get_or_create(&label).inc_by(sum.alarms);
    }
    registry.register(
        "guard_sensor_signals",
        "Errors, or readings in alarm, since mercuryd reads this hardware",
        amounts,
    );
    registry.register("guard_sensor_alarms", "Times that a sensor's limit was passed", alarms);
    let down = Family::<Service, Gauge>::default();
    let failures = Family::<Service, Counter>::default();
    for service in &report.services {
        let label = Service { service: service.name.clone() };
        down.get_or_create(&label).set(i64::from(service.down));
        failures.get_or_create(&label).inc_by(service.failures);
    }
    registry.register("guard_service_down", "1 from a service's failure to its end", down);
    registry.register("guard_service_failures", "Failures of a service since mercuryd's start", failures);
}

fn compared(registry: &mut Registry, state: &integrity::report::State) {
    let bytes = Gauge::<i64>::default();
    bytes.set(signed(state.bytes));
    registry.register_with_unit(
        "guard_integrity_compared",
        "Code and constants that are compared with their copy",
        Unit::Bytes,
        bytes,
    );
    for (name, help, count) in [
        ("guard_integrity_passes", "Passes over code and constants since the copy was taken", state.passes),
        ("guard_integrity_changes", "Changes of code and constants that nobody owns", state.found),
        ("guard_integrity_mended", "Those of them that were mended", state.mended),
        ("guard_integrity_stores", "Foreign stores to code and constants that were seen", state.stores),
    ] {
        let counter = Counter::<u64>::default();
        counter.inc_by(count);
        registry.register(name, help, counter);
    }
    let last = Gauge::<i64>::default();
    last.set(signed(state.last_pass));
    registry.register_with_unit(
        "guard_integrity_last_pass_timestamp",
        "Time of the last pass, since 1970",
        Unit::Seconds,
        last,
    );
}

fn attempts(registry: &mut Registry, past: &[Past]) {
    let running = Family::<Act, Gauge>::default();
    let counts = Family::<ActResult, Counter>::default();
    for Past { action, record, is_running } in past {
        let action = action.name();
        running.get_or_create(&Act { action }).set(i64::from(*is_running));
        for outcome in Outcome::ALL {
            let count = record.as_ref().map_or(0, |record| record.counts[outcome as usize]);
            counts.get_or_create(&ActResult { action, result: outcome.name() }).inc_by(count);
        }
    }
    registry.register("action_running", "1 while a process carries the action out", running);
    registry.register(
        "action_attempts",
        "Attempts since the start by result; continued: this machine is the one that was restored or arrived",
        counts,
    );
}

fn last_attempts(registry: &mut Registry, past: &[Past]) {
    let [ended, succeeded, duration, pause] = [(); 4].map(|()| Seconds::<Act>::default());
    let [exit, image] = [(); 2].map(|()| Family::<Act, Gauge>::default());
    let results = Family::<ActResult, Gauge>::default();
    let codes = Family::<ActCode, Gauge>::default();
    for Past { action, record, .. } in past {
        let Some(record) = record else { continue };
        let action = action.name();
        let label = Act { action };
        ended.get_or_create(&label).set(record.ended);
        duration.get_or_create(&label).set(record.seconds);
        exit.get_or_create(&label).set(i64::from(record.exit));
        for outcome in Outcome::ALL {
            let is_last = record.last == Some(outcome);
            results.get_or_create(&ActResult { action, result: outcome.name() }).set(i64::from(is_last));
        }
        if let Some(code) = &record.code {
            codes.get_or_create(&ActCode { action, code: code.clone() }).set(1);
        }
        if let Some(when) = record.succeeded {
            succeeded.get_or_create(&label).set(when);
        }
        if let Some(figures) = record.figures {
            pause.get_or_create(&label).set(figures.pause_seconds);
            image.get_or_create(&label).set(signed(figures.bytes));
        }
    }
    registry.register_with_unit(
        "action_last_end_timestamp",
        "When the last attempt ended, since 1970",
        Unit::Seconds,
        ended,
    );
    registry.register_with_unit(
        "action_last_success_timestamp",
        "When the last success ended, since 1970",
        Unit::Seconds,
        succeeded,
    );
    registry.register_with_unit(
        "action_last_duration",
        "Duration of the last attempt",
        Unit::Seconds,
        duration,
    );
    registry.register_with_unit(
        "action_last_pause",
        "Time for which applications stood still in the last success",
        Unit::Seconds,
        pause,
    );
    registry.register_with_unit("action_last_size", "Size of the last image", Unit::Bytes, image);
    registry.register("action_last_exit_status", "Exit status of the last attempt", exit);
    registry.register(
        "action_last_result",
        "1 for the result of the last attempt, 0 for the others",
        results,
    );
    registry.register(
        "action_last_refusal",
        "The code of the last attempt's refusal, see mercury explain",
        codes,
    );
}

/// Converts a size for a gauge.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Writes the text and renames it into place, so that the collector never sees half of it.
fn put(file: &Path, group: Option<&str>, text: &str) -> Result<()> {
    let failed = |error: io::Error| {
        Error::new(Exit::Failed, format!("{} could not be written: {error}", file.display())).hint(
            "name a file in the folder that node_exporter was given with --collector.textfile.directory",
        )
    };
    let group = group.map(group_number).transpose()?;
    // The collector reads only files that end in .prom.
    let fresh = file.with_extension(format!("{}.new", std::process::id()));
    let written = write_new(&fresh, group, text).and_then(|()| fs::rename(&fresh, file));
    if written.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    written.map_err(failed)
}

fn write_new(path: &Path, group: Option<u32>, text: &str) -> io::Result<()> {
    let mode = if group.is_some() { 0o640 } else { 0o644 };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    if group.is_some() {
        fchown(&file, None, group)?;
    }
    // Whatever the caller's umask has taken away.
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(text.as_bytes())
}

fn group_number(name: &str) -> Result<u32> {
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let number = |line: &str| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    };
    groups.lines().find_map(number).or_else(|| name.parse().ok()).ok_or_else(|| {
        Error::new(Exit::Usage, format!("there is no group {name} in /etc/group"))
            .hint(format!("`groupadd --system {name}` makes it"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_control::{
        driver::{Direction, Driver},
        fake::FakeDriver,
        history::Figures,
        sysroot::Sysroot,
    };
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn attached() -> Status {
        let driver = FakeDriver::new(2);
        driver.load().expect("loaded");
        driver.switch(Direction::Attach, None).expect("attached");
        let mut status = Status::collect(&driver).expect("a status");
        status.cpus[0].exits.insert("hypercall", 7);
        status.cpus[0].exit_ticks = 1_500_000;
        status
    }

    fn past() -> [Past; 2] {
        let record = Record {
            counts: [3, 0, 1],
            last: Some(Outcome::Failed),
            exit: 4,
            code: Some("busy".into()),
            ended: 1_795_568_400.5,
            seconds: 2.5,
            succeeded: Some(1_795_568_000.0),
            figures: Some(Figures { pause_seconds: 0.25, bytes: 4096 }),
        };
        [
            Past { action: Action::Checkpoint, record: Some(record), is_running: false },
            Past { action: Action::Migrate, record: None, is_running: true },
        ]
    }

    /// Sorts the lines, because families have no order.
    fn sorted(text: &str) -> String {
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_by_key(|line| {
            let mut words = line.split([' ', '{']);
            let first = words.next().unwrap_or_default();
            let name = if first == "#" { words.nth(1).unwrap_or_default() } else { first };
            (name.to_owned(), first != "#", (*line).to_owned())
        });
        lines.join("\n")
    }

    #[test]
    fn metrics_of_an_attached_machine() {
        insta::assert_snapshot!(sorted(
            &exposition(&attached(), &Guarded::default(), &past()).expect("text")
        ));
    }

    fn guarded() -> Guarded {
        let report = r#"{"pid":1,"sensors":[{"name":"disks","silent":"no answer"}],"stuck":[],
            "signals":[{"sensor":"disks","signal":"disk-errors","amount":3,"alarms":1}],
            "services":[{"name":"solver","state":"down","down":true,"failures":4}]}"#;
        Guarded { watch: None, daemon: serde_json::from_str(report).ok(), integrity: None }
    }

    fn watch() -> Watch {
        let used = |used| mercury_control::watch::Source { used, code: None };
        Watch {
            state: "on",
            cpus: 4,
            hpet: used(true),
            cycles: used(false),
            on_hang: "panic",
            on_oops: "none",
            nmis: 9,
            alarms: 2,
            longest_frozen_ms: 1500,
            last_alarm: String::new(),
        }
    }

    /// Every sample belongs to a family that is described and typed under the same name, as the
    /// text format requires.
    #[test]
    fn the_guard_has_its_counters() {
        let compared =
            integrity::report::State { found: 3, mended: 2, stores: 4, bytes: 7, ..Default::default() };
        let guarded = Guarded { watch: Some(watch()), integrity: Some(compared), ..guarded() };
        let text = exposition(&attached(), &guarded, &past()).expect("text");
        for line in [
            "mercury_guard_integrity_changes_total 3",
            "mercury_guard_integrity_mended_total 2",
            "mercury_guard_integrity_stores_total 4",
            "mercury_guard_integrity_compared_bytes 7",
            "mercury_guard_sensor_up{sensor=\"disks\"} 0",
            "mercury_guard_sensor_signals_total{sensor=\"disks\",signal=\"disk-errors\"} 3",
            "mercury_guard_sensor_alarms_total{sensor=\"disks\",signal=\"disk-errors\"} 1",
            "mercury_guard_service_down{service=\"solver\"} 1",
            "mercury_guard_service_failures_total{service=\"solver\"} 4",
            "mercury_guard_hangs_total 2",
            "mercury_guard_nmis_total 9",
            "mercury_guard_cpus 4",
            "mercury_guard_source{source=\"hpet\"} 1",
            "mercury_guard_source{source=\"cycles\"} 0",
            "mercury_guard_longest_frozen_seconds 1.5",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn each_sample_has_a_type_and_a_description() {
        for status in [attached(), Status::without_driver(&Sysroot::at("/nowhere"))] {
            let text = exposition(&status, &guarded(), &past()).expect("text");
            assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
            for line in text.lines().filter(|line| !line.starts_with('#')) {
                let name = line.split(['{', ' ']).next().expect("a name");
                assert!(text.contains(&format!("# TYPE {name} ")), "{line}");
                assert!(text.contains(&format!("# HELP {name} ")), "{line}");
                assert!(line.rsplit(' ').next().is_some_and(|value| value.parse::<f64>().is_ok()), "{line}");
            }
        }
    }

    /// The table in docs/command.md has each metric.
    #[test]
    fn the_manual_has_each_metric() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/command.md");
        let manual = fs::read_to_string(path).expect("the page");
        let compared = integrity::report::State::default();
        let guarded = Guarded { integrity: Some(compared), watch: Some(watch()), ..guarded() };
        let text = exposition(&attached(), &guarded, &past()).expect("text");
        let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE mercury_")?.split(' ').next());
        let missing: Vec<&str> = names.filter(|name| !manual.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn the_file_is_replaced_as_a_whole_and_readable_as_asked() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("mercury.prom");
        put(&file, None, "one\n").expect("written");
        assert_eq!(fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o644);
        let own = rustix::process::getegid().as_raw().to_string();
        put(&file, Some(&own), "two\n").expect("written");
        let found = fs::metadata(&file).expect("a file");
        assert_eq!((found.mode() & 0o777, found.gid().to_string()), (0o640, own));
        assert_eq!(fs::read_to_string(&file).expect("text"), "two\n");
        assert_eq!(fs::read_dir(folder.path()).expect("files").count(), 1);
        assert_eq!(put(&file, Some("no-such-group"), "").map_err(|error| error.exit), Err(Exit::Usage));
    }

    #[test]
    fn groups_by_name() {
        assert_eq!(group_number("root"), Ok(0));
    }
}
