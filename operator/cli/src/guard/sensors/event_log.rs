//! The event log of the board's management controller (IPMI SEL), through `ipmitool`.

use super::{
    Amount, Presence, Reading, Sensor,
    rules::Signal,
    tools::{Tool, find},
};
use mercury_control::sysroot::Sysroot;
use std::{collections::BTreeSet, io};

/// Files of the management controller's driver.
const DEVICES: [&str; 3] = ["dev/ipmi0", "dev/ipmi/0", "dev/ipmidev/0"];

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number in the log.
    pub number: u32,
    /// Date and time, as the controller has them.
    pub time: String,
    /// Sensor, event and direction.
    pub text: String,
}

/// Parses a line of `ipmitool sel list`: fields between bars, the first a hexadecimal number.
#[must_use]
pub fn entry(line: &str) -> Option<Entry> {
    let fields: Vec<_> = line.split('|').map(str::trim).collect();
    let [number, date, time, rest @ ..] = fields.as_slice() else { return None };
    let number = u32::from_str_radix(number, 16).ok()?;
    (!rest.is_empty()).then(|| Entry { number, time: format!("{date} {time}"), text: rest.join(", ") })
}

/// Returns the signal of an entry, if it tells of a failure.
#[must_use]
pub fn signal(entry: &Entry) -> Option<Signal> {
    let text = entry.text.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    // The end of an event, or a value that is back within its bounds.
    if has(&["deasserted", "presence detected", "fully redundant"]) {
        return None;
    }
    if has(&["uncorrectable"]) {
        return Some(Signal::Uncorrected);
    }
    if has(&["correctable ecc", "correctable memory", "correctable error logging"]) {
        return Some(Signal::Corrected);
    }
    let severe = [
        "non-recoverable",
        "upper critical",
        "lower critical",
        "failure",
        "failed array",
        "fault",
        "ierr",
        "thermal trip",
        "ac lost",
        "redundancy lost",
        "non-redundant",
        "bus fatal",
        "machine check",
        "config error",
        "over temperature",
    ];
    has(&severe).then_some(Signal::EventLog)
}

/// The sensor.
#[derive(Debug)]
pub struct EventLog {
    tool: Option<Tool>,
    /// Entries that were there at the last reading.
    seen: Option<BTreeSet<(u32, String)>>,
}

/// Returns what this machine has of the sensor.
///
/// # Errors
///
/// Returns the reason why it has nothing.
pub fn presence(sysroot: &Sysroot) -> Presence {
    let Some(device) = DEVICES.iter().find(|device| sysroot.exists(device)) else {
        return Err("no management controller (/dev/ipmi0; `modprobe ipmi_devintf ipmi_si`)".into());
    };
    match find(sysroot, "ipmitool") {
        Some(_) => Ok(format!("the management controller's log, by ipmitool at /{device}")),
        None => Err(format!("/{device} is there, but ipmitool is not (`apt install ipmitool`)")),
    }
}

impl EventLog {
    #[must_use]
    pub fn new(sysroot: &Sysroot) -> Self {
        Self { tool: find(sysroot, "ipmitool").map(Tool::new), seen: None }
    }

    /// Returns the readings of entries that are new. Those of the first reading are from before.
    fn news(&mut self, text: &str) -> Vec<Reading> {
        let entries: Vec<_> = text.lines().filter_map(entry).collect();
        let now = entries.iter().map(|entry| (entry.number, entry.time.clone())).collect();
        let Some(before) = self.seen.replace(now) else { return Vec::new() };
        let is_new = |entry: &&Entry| !before.contains(&(entry.number, entry.time.clone()));
        let reading = |entry: &Entry| {
            let text = format!("{} ({})", entry.text, entry.time);
            Some(Reading::new(signal(entry)?, "sel", Amount::New(1), text))
        };
        entries.iter().filter(is_new).filter_map(reading).collect()
    }
}

impl Sensor for EventLog {
    fn read(&mut self, to: &mut Vec<Reading>) -> io::Result<()> {
        let tool = self.tool.as_mut().ok_or_else(|| io::Error::other("ipmitool is not installed"))?;
        let output = tool.ask(&["sel", "list"])?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(format!("ipmitool: {}", super::printable(&why))));
        }
        to.extend(self.news(&String::from_utf8_lossy(&output.stdout)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fake, read};
    use super::*;
    use proptest::prelude::*;

    const LOG: &str = "\
   1 | 11/26/2026 | 22:13:01 | Event Logging Disabled #0x72 | Log area reset/cleared | Asserted
   2 | 11/26/2026 | 22:14:00 | Memory #0x53 | Correctable ECC | Asserted
   a | 11/26/2026 | 22:15:00 | Power Supply #0x64 | Power Supply AC lost | Asserted
   b | 11/26/2026 | 22:16:00 | Power Supply #0x64 | Power Supply AC lost | Deasserted
   c | 11/26/2026 | 22:17:00 | Temperature #0x01 | Upper Critical going high | Asserted
";

    #[test]
    fn lines_are_understood() {
        let entries: Vec<_> = LOG.lines().filter_map(entry).collect();
        let numbers: Vec<_> = entries.iter().map(|entry| entry.number).collect();
        assert_eq!(numbers, [1, 2, 10, 11, 12]);
        assert_eq!(entries[1].text, "Memory #0x53, Correctable ECC, Asserted");
        let signals: Vec<_> = entries.iter().map(signal).collect();
        let expected = [None, Some(Signal::Corrected), Some(Signal::EventLog), None, Some(Signal::EventLog)];
        assert_eq!(signals, expected);
        let severe = entry("d|x|y|Memory #0x53 | Uncorrectable ECC | Asserted").expect("an entry");
        assert_eq!(signal(&severe), Some(Signal::Uncorrected));
        // Newer versions have bars in texts, time zones, and times before the clock was set.
        let severe = entry(
            "34 | 02/25/2025 | 04:50:09 PM EST | Memory #0x02 | Uncorrectable ECC (x |  D7) | Asserted",
        );
        assert_eq!(severe.as_ref().and_then(signal), Some(Signal::Uncorrected));
        let early = entry("5 |  Pre-Init  |0000000123| System Event #0x01 | Timestamp Clock Sync | Asserted");
        assert_eq!(early.as_ref().map(signal), Some(None));
        for nothing in ["", "SEL has no entries", "x | 1 | 2 | 3", "1 | 2 | 3", "100000000 | 1 | 2 | 3"] {
            assert_eq!(entry(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn only_new_entries_count() {
        let fake = Fake::new();
        fake.put("dev/ipmi0", "");
        assert!(presence(&fake.sysroot()).expect_err("no tool").contains("apt install ipmitool"));
        fake.program("ipmitool", "cat \"$(dirname \"$0\")/log\"");
        fake.put("usr/sbin/log", &LOG.lines().take(2).collect::<Vec<_>>().join("\n"));
        assert!(presence(&fake.sysroot()).is_ok());
        let mut log = EventLog::new(&fake.sysroot());
        assert_eq!(read(&mut log), []);
        fake.put("usr/sbin/log", LOG);
        let readings = read(&mut log);
        assert_eq!(readings.len(), 2, "{readings:?}");
        assert!(readings[1].text.contains("Upper Critical going high, Asserted (11/26/2026 22:17:00)"));
        assert_eq!(read(&mut log), []);
        // The log was cleared, and its numbers begin again.
        fake.put("usr/sbin/log", "1 | 11/27/2026 | 01:00:00 | Memory #0x53 | Correctable ECC | Asserted\n");
        assert_eq!(read(&mut log).len(), 1);
    }

    #[test]
    fn a_failed_tool_says_why() {
        let fake = Fake::new();
        fake.program("ipmitool", "echo Could not open device >&2; exit 1");
        let why = EventLog::new(&fake.sysroot()).read(&mut Vec::new()).expect_err("a failure");
        assert!(why.to_string().contains("Could not open device"), "{why}");
    }

    proptest! {
        #[test]
        fn any_output_is_read(text in "(?s).{0,200}", bars in "[0-9a-f|: \\n]{0,200}") {
            let mut log = EventLog { tool: None, seen: Some(BTreeSet::new()) };
            for reading in log.news(&text).into_iter().chain(log.news(&bars)) {
                prop_assert!(!reading.text.chars().any(char::is_control));
            }
        }
    }
}
