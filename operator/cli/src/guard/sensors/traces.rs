//! The kernel's events of reliability, from an instance of its trace that the guard makes for itself: machine
//! checks, memory errors, errors of PCI Express, and what the firmware reports through APEI (GHES).
//!
//! The trace has each event, also those that the kernel's collector of corrected errors (RAS_CEC, on Debian
//! 13) keeps from EDAC's counters. An instance of one's own disturbs no other user of the trace.

use super::{Amount, Presence, Reading, Sensor, rules::Signal};
use mercury_control::sysroot::Sysroot;
use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

const TRACING: &str = "sys/kernel/tracing";
/// Name of the instance.
const INSTANCE: &str = "mercury-guard";
/// Memory of the trace for each CPU in KiB: some hundred events between two readings.
const BUFFER_KIB: &str = "32";
/// Events, by their folders below `events/`.
const EVENTS: [&str; 7] = [
    "mce/mce_record",
    "ras/mc_event",
    "ras/aer_event",
    "ras/non_standard_event",
    "ras/extlog_mem_event",
    "ras/arm_event",
    "ras/memory_failure_event",
];
/// Bytes that one reading takes at most. A flood of errors has long passed its limit by then.
const READ_MAX: u64 = 1 << 20;

/// `MCi_STATUS.UC`: the error was not corrected.
const UNCORRECTED: u64 = 1 << 61;
/// `MCi_STATUS.Deferred` of AMD and Hygon: lost data that nobody has used yet. On Intel this bit counts.
const DEFERRED: u64 = 1 << 44;
/// Vendors with that bit, by the kernel's numbers.
const DEFERRING: [&str; 2] = ["2", "9"];
/// Bank of the firmware's records about memory (APEI).
const FIRMWARE_BANK: u32 = 255;
/// Banks of machine checks. The kernel uses higher numbers for itself.
const BANKS: u32 = 64;

/// The sensor. It is opened at its first reading, and again after an error.
#[derive(Debug)]
pub struct Traces {
    sysroot: Sysroot,
    open: Option<Instance>,
}

/// The guard's own instance of the trace.
#[derive(Debug)]
struct Instance {
    folder: PathBuf,
    pipe: File,
    /// The beginning of a line whose end has not been read yet.
    rest: Vec<u8>,
}

fn present(sysroot: &Sysroot) -> Vec<&'static str> {
    let exists = |event: &&&str| sysroot.exists(&format!("{TRACING}/events/{event}/enable"));
    EVENTS.iter().filter(exists).copied().collect()
}

/// Returns what this machine has of the sensor.
///
/// # Errors
///
/// Returns the reason why it has nothing.
pub fn presence(sysroot: &Sysroot) -> Presence {
    let events = present(sysroot);
    if events.is_empty() {
        let why = match sysroot.names(TRACING).is_empty() {
            true => "the kernel's trace is not mounted (`mount -t tracefs tracefs /sys/kernel/tracing`)",
            false => "this kernel traces no hardware errors (Debian 12's cloud kernel is such a one)",
        };
        return Err(why.into());
    }
    let words = |event: &&str| event.split('/').next_back().unwrap_or_default().to_owned();
    let list = events.iter().map(words).collect::<Vec<_>>().join(", ");
    let firmware = if sysroot.exists("sys/firmware/acpi/tables/HEST") {
        "the firmware reports errors (APEI)"
    } else {
        "the firmware reports none (no APEI)"
    };
    let hidden =
        if collects(sysroot) { "; RAS_CEC hides corrected ones from EDAC, not from here" } else { "" };
    Ok(format!("{list}; {firmware}{hidden}"))
}

/// Returns true if the kernel has its collector of corrected errors.
fn collects(sysroot: &Sysroot) -> bool {
    let symbols = sysroot.text("proc/kallsyms").unwrap_or_default();
    symbols.lines().any(|line| line.ends_with(" cec_notifier"))
}

impl Traces {
    #[must_use]
    pub fn new(sysroot: &Sysroot) -> Self {
        Self { sysroot: sysroot.clone(), open: None }
    }

    fn lines(&mut self) -> io::Result<Vec<String>> {
        let mut open = match self.open.take() {
            Some(open) => open,
            // The sensor of before a move may remove its instance just now.
            None => Instance::open(&self.sysroot).or_else(|_| Instance::open(&self.sysroot))?,
        };
        let lines = open.lines()?;
        self.open = Some(open);
        Ok(lines)
    }
}

impl Instance {
    /// Makes the instance, and switches its events on. An instance that a killed daemon has left is used.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses.
    fn open(sysroot: &Sysroot) -> io::Result<Self> {
        let folder = sysroot.path(&format!("{TRACING}/instances/{INSTANCE}"));
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let put = |file: &str, text: &str| fs::write(folder.join(file), text);
        put("buffer_size_kb", BUFFER_KIB)?;
        let mut on = 0;
        for event in present(sysroot) {
            on += u32::from(put(&format!("events/{event}/enable"), "1").is_ok());
        }
        if on == 0 {
            return Err(io::Error::other("no event of the trace can be switched on"));
        }
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits();
        let pipe = OpenOptions::new()
            .read(true)
            .custom_flags(i32::try_from(nonblocking).unwrap_or_default())
            .open(folder.join("trace_pipe"))?;
        Ok(Self { folder, pipe, rest: Vec::new() })
    }

    /// Returns the lines that have come since.
    fn lines(&mut self) -> io::Result<Vec<String>> {
        let mut bytes = std::mem::take(&mut self.rest);
        match (&mut self.pipe).take(READ_MAX).read_to_end(&mut bytes) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.rest = bytes.split_off(end);
        // A line without an end is no line of the trace.
        self.rest.truncate(4096);
        Ok(String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect())
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // The kernel removes an instance that nobody reads.
        if let Ok(null) = File::open("/dev/null") {
            self.pipe = null;
        }
        // Its events end with it. One that another sensor reads by now stays as it is.
        let _ = fs::remove_dir(&self.folder);
    }
}

/// An event of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub signal: Signal,
    /// Stable name of the part.
    pub source: String,
    pub count: u64,
    pub text: String,
}

/// Parses a line of the trace; `None` for all but errors.
#[must_use]
pub fn event(line: &str) -> Option<Event> {
    let (name, fields) = named(line)?;
    let (signal, source, count) = match name {
        "mce_record" => machine_check(fields)?,
        "mc_event" => memory_error(fields)?,
        "aer_event" => pcie_error(fields)?,
        "memory_failure_event" => (Signal::Uncorrected, "page".to_owned(), 1),
        _ => firmware_error(name, fields)?,
    };
    Some(Event { signal, source: format!("{name}/{source}"), count, text: format!("{name}: {fields}") })
}

/// Returns the event's name and its fields, which follow the time. The name of a process comes before, and
/// any user can choose one that holds the name of an event.
fn named(line: &str) -> Option<(&'static str, &str)> {
    let is_time = |word: &str| {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        word.split_once('.').is_some_and(|(whole, part)| is_number(whole) && is_number(part))
    };
    let ends = line.match_indices(": ").map(|(at, _)| line.split_at(at));
    let timed = ends.filter(|(before, _)| before.rsplit(' ').next().is_some_and(is_time));
    let names = || EVENTS.iter().filter_map(|event| event.split('/').next_back());
    timed.map(|(_, rest)| rest).find_map(|rest| {
        let rest = rest.strip_prefix(": ")?;
        names().find_map(|name| Some((name, rest.strip_prefix(name)?.strip_prefix(": ")?)))
    })
}

/// `CPU: 0, MCGc/s: 9/0, MC4: dc00400000000000, …`
fn machine_check(fields: &str) -> Option<(Signal, String, u64)> {
    let bank = fields.split(", ").find_map(|field| {
        let (bank, status) = field.trim().strip_prefix("MC")?.split_once(": ")?;
        Some((bank.parse::<u32>().ok()?, u64::from_str_radix(status.trim(), 16).ok()?))
    });
    let (bank, status) = bank.filter(|(bank, _)| *bank < BANKS || *bank == FIRMWARE_BANK)?;
    let vendor =
        fields.split(", ").find_map(|field| field.trim().strip_prefix("PROCESSOR: ")?.split(':').next());
    let can_defer = vendor.is_some_and(|vendor| DEFERRING.contains(&vendor));
    let severe = UNCORRECTED | if can_defer { DEFERRED } else { 0 };
    let signal = if status & severe == 0 { Signal::Corrected } else { Signal::Uncorrected };
    let source = if bank == FIRMWARE_BANK { "firmware".to_owned() } else { format!("bank{bank}") };
    Some((signal, source, 1))
}

/// `2 Corrected errors: memory read error on DIMM_A1 (mc:0 location:…)`
fn memory_error(fields: &str) -> Option<(Signal, String, u64)> {
    let (count, rest) = fields.split_once(' ')?;
    let kind = rest.split([' ', ':']).next()?;
    let signal = match kind {
        "Corrected" => Signal::Corrected,
        "Uncorrected" | "Deferred" | "Fatal" => Signal::Uncorrected,
        _ => return None,
    };
    let (_, controller) = rest.rsplit_once("(mc:")?;
    let controller = controller.split([' ', ')']).next().filter(|number| number.parse::<u32>().is_ok())?;
    Some((signal, format!("mc{controller}"), count.parse::<u64>().ok().filter(|count| *count < 1 << 16)?))
}

/// `0000:01:00.0 PCIe Bus Error: severity=Fatal, Data Link Protocol…`
fn pcie_error(fields: &str) -> Option<(Signal, String, u64)> {
    let (function, rest) = fields.split_once(" Bus Error: severity=")?;
    let function = function.split(' ').next()?;
    let is_name = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
    let is_corrected = rest.starts_with("Corrected");
    (!is_corrected && function.len() <= 16 && function.chars().all(is_name))
        .then(|| (Signal::Pcie, function.to_owned(), 1))
}

/// Errors in records of the firmware: `severity: corrected; …`, `sev:2, …`, `{3} Corrected error: …`.
fn firmware_error(name: &str, fields: &str) -> Option<(Signal, String, u64)> {
    let text = fields.to_ascii_lowercase();
    // extlog_mem_event says it in words: "Corrected error".
    let words = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let signal = match name {
        // The numbers are those of GHES: 1 corrected, 2 recoverable, 3 fatal.
        "non_standard_event" => match severity(&text)? {
            1 => Signal::Corrected,
            2 | 3 => Signal::Uncorrected,
            _ => return None,
        },
        _ if words(&["uncorrected", "fatal", "recoverable"]) => Signal::Uncorrected,
        _ if words(&["corrected"]) => Signal::Corrected,
        _ if words(&["info"]) => return None,
        _ => Signal::Uncorrected,
    };
    Some((signal, "firmware".to_owned(), 1))
}

/// Returns the number after `severity:`.
fn severity(text: &str) -> Option<u8> {
    let (_, rest) = text.split_once("severity: ").or_else(|| text.split_once("sev: "))?;
    rest.split([';', ',', ' ']).next()?.parse().ok()
}

impl Sensor for Traces {
    fn read(&mut self, to: &mut Vec<Reading>) -> io::Result<()> {
        let mut sums = BTreeMap::<(Signal, String), (u64, String)>::new();
        for event in self.lines()?.iter().filter_map(|line| event(line)) {
            let sum = sums.entry((event.signal, event.source)).or_default();
            *sum = (sum.0.saturating_add(event.count), event.text);
        }
        let reading = |((signal, source), (count, text)): ((Signal, String), (u64, String))| {
            Reading::new(signal, source, Amount::New(count), text)
        };
        to.extend(sums.into_iter().map(reading));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fake, amount, read};
    use super::*;
    use proptest::prelude::*;

    const MCE: &str = "     kworker/0:1-22   [000] .....   120.101010: mce_record: CPU: 0, MCGc/s: 9/0, MC4: \
        dc00400000000000, IPID: 0000000000000000, ADDR/MISC/SYND: 0000000000001000/0/0, RIP: 00:<0>, TSC: 0";
    const MEMORY: &str = "          <idle>-0       [003] d.h..    12.000001: mc_event: 2 Corrected errors: \
        memory read error on DIMM_A1 (mc:1 location:0:1:-1 address:0x1000 grain:6 syndrome:0x0 )";

    #[test]
    fn machine_checks_by_their_status() {
        let found = event(MCE).expect("an event");
        assert_eq!(
            (found.signal, found.source.as_str(), found.count),
            (Signal::Corrected, "mce_record/bank4", 1)
        );
        let severe = event(&MCE.replace("dc00", "fc00")).expect("an event");
        assert_eq!(severe.signal, Signal::Uncorrected);
        assert_eq!(event(&MCE.replace("MC4:", "MC128:")), None);
        // Memory errors of which the firmware tells the kernel.
        let firmware = event(&MCE.replace("MC4:", "MC255:")).expect("an event");
        assert_eq!((firmware.signal, firmware.source.as_str()), (Signal::Corrected, "mce_record/firmware"));
    }

    #[test]
    fn the_name_of_a_process_hides_no_event() {
        for name in [": mce_record: ", " 1.0: mc_event:", "1.0: mce_record"] {
            let found = event(&MCE.replace("kworker/0:1", name)).expect("an event");
            assert_eq!(found, event(MCE).expect("an event"), "{name}");
        }
        assert_eq!(event("x: mce_record: CPU: 0, MCGc/s: 9/0, MC4: dc00400000000000"), None);
    }

    #[test]
    fn deferred_errors_are_lost_data_where_the_bit_means_that() {
        let line = |vendor: &str| {
            format!(
                "mce_record: CPU: 0, MCGc/s: 9/0, MC4: 9c00100000000000, PROCESSOR: {vendor}:a20f10, TIME: 1"
            )
        };
        let signal =
            |vendor| event(&format!("x-1 [000] ..... 1.0: {}", line(vendor))).expect("an event").signal;
        assert_eq!([signal("2"), signal("9")], [Signal::Uncorrected; 2]);
        // On Intel it is a part of the count of corrected errors.
        assert_eq!(signal("0"), Signal::Corrected);
    }

    #[test]
    fn memory_errors_by_controller() {
        let found = event(MEMORY).expect("an event");
        assert_eq!(
            (found.signal, found.source.as_str(), found.count),
            (Signal::Corrected, "mc_event/mc1", 2)
        );
        assert!(found.text.contains("DIMM_A1"));
        for kind in ["Uncorrected", "Fatal", "Deferred"] {
            assert_eq!(event(&MEMORY.replace("Corrected", kind)).expect(kind).signal, Signal::Uncorrected);
        }
        assert_eq!(event(&MEMORY.replace("Corrected", "Info")), None);
        assert_eq!(event(&MEMORY.replace(": 2 ", ": 99999999 ")), None);
    }

    #[test]
    fn other_events() {
        let line = |text: &str| event(&format!("x-1 [000] ..... 1.0: {text}")).map(|event| event.signal);
        let aer = "aer_event: 0000:01:00.0 PCIe Bus Error: severity=";
        assert_eq!(line(&format!("{aer}Fatal, Data Link Protocol")), Some(Signal::Pcie));
        assert_eq!(line(&format!("{aer}Uncorrected, non-fatal, Poisoned TLP")), Some(Signal::Pcie));
        assert_eq!(line(&format!("{aer}Corrected, Bad TLP")), None);
        let firmware = "non_standard_event: severity: ";
        assert_eq!(line(&format!("{firmware}1; sec type:x; FRU: y")), Some(Signal::Corrected));
        assert_eq!(line(&format!("{firmware}2; sec type:x")), Some(Signal::Uncorrected));
        assert_eq!(line(&format!("{firmware}0; sec type:x")), None);
        assert_eq!(
            line("memory_failure_event: pfn 0x100: recovery action for dirty page: Recovered"),
            Some(Signal::Uncorrected)
        );
        assert_eq!(line("extlog_mem_event: { 3 } corrected error: unknown"), Some(Signal::Corrected));
        assert_eq!(line("sched_switch: prev_comm=x"), None);
    }

    fn machine() -> Fake {
        let fake = Fake::new();
        fake.put("sys/kernel/tracing/events/mce/mce_record/enable", "0");
        fake.put("sys/kernel/tracing/events/ras/mc_event/enable", "0");
        // In a real tracefs the folder and its files appear together.
        let instance = "sys/kernel/tracing/instances/mercury-guard";
        fake.put(&format!("{instance}/events/mce/mce_record/enable"), "0");
        fake.put(&format!("{instance}/events/ras/mc_event/enable"), "0");
        fake.put(&format!("{instance}/trace_pipe"), "");
        fake
    }

    #[test]
    fn an_instance_of_its_own_is_read() {
        let fake = machine();
        let pipe = "sys/kernel/tracing/instances/mercury-guard/trace_pipe";
        let half = &MEMORY[..90];
        fake.put(pipe, &format!("{MCE}\n{MCE}\nnoise\n{half}"));
        let mut traces = Traces::new(&fake.sysroot());
        let enable = "sys/kernel/tracing/instances/mercury-guard/events/ras/mc_event/enable";
        let readings = read(&mut traces);
        assert_eq!(fake.text(enable), "1");
        let bank = amount(&readings, Signal::Corrected, "mce_record/bank4");
        assert_eq!((bank, readings.len()), (Some(Amount::New(2)), 1));
        // The other half of a line comes with the next reading.
        fake.put(pipe, &format!("{MCE}\n{MCE}\nnoise\n{half}{}\n", &MEMORY[90..]));
        let readings = read(&mut traces);
        assert_eq!(amount(&readings, Signal::Corrected, "mc_event/mc1"), Some(Amount::New(2)));
        // A sensor that begins before the last one has ended keeps its events.
        let mut next = Traces::new(&fake.sysroot());
        read(&mut next);
        drop(traces);
        assert_eq!(fake.text(enable), "1");
    }

    #[test]
    fn a_trace_that_cannot_be_read_is_tried_again() {
        let fake = machine();
        let pipe = "sys/kernel/tracing/instances/mercury-guard/trace_pipe";
        fake.remove(pipe);
        let mut traces = Traces::new(&fake.sysroot());
        assert!(traces.read(&mut Vec::new()).is_err());
        fake.put(pipe, &format!("{MCE}\n"));
        assert_eq!(read(&mut traces).len(), 1);
    }

    #[test]
    fn a_machine_says_what_it_has() {
        let fake = machine();
        let text = presence(&fake.sysroot()).expect("a trace");
        assert!(text.starts_with("mce_record, mc_event; the firmware reports none"), "{text}");
        fake.put("sys/firmware/acpi/tables/HEST", "");
        fake.put("proc/kallsyms", "0000000000000000 t cec_notifier\n");
        let text = presence(&fake.sysroot()).expect("a trace");
        assert!(text.contains("(APEI)") && text.contains("RAS_CEC"), "{text}");
        assert!(presence(&Fake::new().sysroot()).expect_err("none").contains("mount -t tracefs"));
        let other = Fake::new();
        other.put("sys/kernel/tracing/events/sched/enable", "0");
        assert!(presence(&other.sysroot()).expect_err("none").contains("cloud kernel"));
    }

    proptest! {
        #[test]
        fn any_line_is_read(
            name in prop::sample::select(EVENTS.to_vec()),
            fields in "(MC[0-9]{0,12}: [0-9a-f]{0,20}|[0-9]{0,30} Corrected|[ -~]{0,40}|.{0,9}|\\(mc:){0,5}",
        ) {
            let name = name.split('/').next_back().unwrap_or_default();
            if let Some(event) = event(&format!("x-1 [000] ..... 1.0: {name}: {fields}")) {
                prop_assert!(event.count < 1 << 16);
            }
        }
    }
}
