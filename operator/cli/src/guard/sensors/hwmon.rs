//! Alarms of the board's own sensors: temperatures, fans, voltages, currents and powers.
//!
//! A chip sets a file `…_alarm` when a value has left its bounds. Where a chip has no such file for a
//! temperature, its value is compared with the chip's own critical one. Many boards leave inputs open, whose
//! alarms are always on. An alarm that is on at the first reading does not count until it has been off.

use super::{Amount, Presence, Reading, Sensor, rules::Signal};
use mercury_control::sysroot::Sysroot;
use std::{collections::BTreeSet, io};

const CHIPS: &str = "sys/class/hwmon";

/// The sensor.
#[derive(Debug)]
pub struct Hwmon {
    sysroot: Sysroot,
    ignore: Vec<String>,
}

/// Returns the signal of a file, if it is an alarm.
fn signal_of(file: &str) -> Option<Signal> {
    let (input, kind) = file.split_once('_')?;
    if !kind.ends_with("alarm") && kind != "fault" {
        return None;
    }
    match input.trim_end_matches(|c: char| c.is_ascii_digit()) {
        "temp" => Some(Signal::Temperature),
        "fan" => Some(Signal::Fan),
        "in" | "curr" | "power" => Some(Signal::Voltage),
        _ => None,
    }
}

/// Returns the inputs with a critical temperature and no alarm for it.
fn compared(files: &[String]) -> Vec<&str> {
    let has = |name: String| files.binary_search(&name).is_ok();
    let inputs = files.iter().filter_map(|file| file.strip_suffix("_crit"));
    let temperatures = inputs.filter(|input| input.starts_with("temp"));
    temperatures
        .filter(|input| {
            has(format!("{input}_input"))
                && !has(format!("{input}_crit_alarm"))
                && !has(format!("{input}_alarm"))
        })
        .collect()
}

/// Returns true if a rule names the alarm: exactly, or by its beginning before a `*`.
fn matches(rule: &str, alarm: &str) -> bool {
    match rule.strip_suffix('*') {
        Some(beginning) => alarm.starts_with(beginning),
        None => rule == alarm,
    }
}

/// Returns what this machine has of the sensor.
///
/// # Errors
///
/// Returns the reason why it has nothing.
pub fn presence(sysroot: &Sysroot) -> Presence {
    let (mut found, mut alarms) = (BTreeSet::new(), 0);
    for chip in sysroot.names(CHIPS) {
        let files = sysroot.names(&format!("{CHIPS}/{chip}"));
        let count = files.iter().filter(|file| signal_of(file).is_some()).count() + compared(&files).len();
        alarms += count;
        if count != 0 {
            found.insert(sysroot.text(&format!("{CHIPS}/{chip}/name")).unwrap_or(chip));
        }
    }
    match alarms {
        0 => Err("no chip has an alarm (/sys/class/hwmon)".into()),
        count => Ok(format!("{count} alarms of {}", found.into_iter().collect::<Vec<_>>().join(", "))),
    }
}

impl Hwmon {
    #[must_use]
    pub fn new(sysroot: &Sysroot, ignore: &[String]) -> Self {
        Self { sysroot: sysroot.clone(), ignore: ignore.to_vec() }
    }

    fn number(&self, file: &str) -> Option<i64> {
        self.sysroot.text(file)?.parse().ok()
    }

    fn chip(&self, chip: &str, to: &mut Vec<Reading>) {
        let folder = format!("{CHIPS}/{chip}");
        let name = self.sysroot.text(&format!("{folder}/name")).unwrap_or_else(|| chip.to_owned());
        let files = self.sysroot.names(&folder);
        for (file, signal) in files.iter().filter_map(|file| Some((file, signal_of(file)?))) {
            let on = self.number(&format!("{folder}/{file}")).map(|value| value != 0);
            self.add(&folder, &name, chip, file, signal, on, to);
        }
        for input in compared(&files) {
            let value = |kind| self.number(&format!("{folder}/{input}_{kind}"));
            // A limit of zero is no limit.
            let on = value("input").zip(value("crit").filter(|crit| *crit > 0));
            let on = on.map(|(value, crit)| value >= crit);
            self.add(&folder, &name, chip, &format!("{input}_crit"), Signal::Temperature, on, to);
        }
    }

    /// Adds an alarm, unless it cannot be read or is left out. `chip` tells chips of one name apart, but
    /// its number changes from boot to boot.
    #[allow(clippy::too_many_arguments)]
    fn add(
        &self,
        folder: &str,
        name: &str,
        chip: &str,
        file: &str,
        signal: Signal,
        on: Option<bool>,
        to: &mut Vec<Reading>,
    ) {
        let alarm = format!("{name}/{file}");
        let Some(on) = on.filter(|_| !self.ignore.iter().any(|rule| matches(rule, &alarm))) else { return };
        let input = file.split('_').next().unwrap_or_default();
        let label = self.sysroot.text(&format!("{folder}/{input}_label")).unwrap_or_default();
        let value = self.number(&format!("{folder}/{input}_input"));
        let value = value.map(|value| format!(", now {}", in_words(input, value))).unwrap_or_default();
        let text = format!("{alarm} {label} is on{value}");
        to.push(Reading::new(signal, format!("{chip}/{alarm}"), Amount::Alarm(on), text));
    }
}

/// Formats a value, which is in thousandths but for fans and powers.
fn in_words(input: &str, value: i64) -> String {
    let thousandths = |unit: &str| {
        let (sign, value) = (if value < 0 { "-" } else { "" }, value.unsigned_abs());
        format!("{sign}{}.{:03} {unit}", value / 1000, value % 1000)
    };
    match input.trim_end_matches(|c: char| c.is_ascii_digit()) {
        "temp" => thousandths("°C"),
        "fan" => format!("{value} turns a minute"),
        "curr" => thousandths("A"),
        "in" => thousandths("V"),
        _ => format!("{value} µW"),
    }
}

impl Sensor for Hwmon {
    fn read(&mut self, to: &mut Vec<Reading>) -> io::Result<()> {
        self.sysroot.names(CHIPS).iter().for_each(|chip| self.chip(chip, to));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fake, amount, read};
    use super::*;

    fn machine() -> Fake {
        let fake = Fake::new();
        for (file, text) in [
            ("hwmon0/name", "coretemp"),
            ("hwmon0/temp1_input", "101000"),
            ("hwmon0/temp1_label", "Package id 0"),
            ("hwmon0/temp1_crit", "100000"),
            ("hwmon0/temp1_crit_alarm", "1"),
            ("hwmon1/name", "nct6775"),
            ("hwmon1/in3_alarm", "0"),
            ("hwmon1/in3_input", "3296"),
            ("hwmon1/fan2_alarm", "1"),
            ("hwmon1/fan2_fault", "0"),
            ("hwmon1/fan2_input", "0"),
            ("hwmon1/beep_enable", "0"),
            ("hwmon1/intrusion0_alarm", "1"),
            ("hwmon2/name", "k10temp"),
            ("hwmon2/temp1_input", "-1500"),
            ("hwmon2/temp1_crit", "95000"),
            ("hwmon2/temp2_input", "120000"),
            ("hwmon2/temp2_crit", "0"),
        ] {
            fake.put(&format!("sys/class/hwmon/{file}"), &format!("{text}\n"));
        }
        fake
    }

    #[test]
    fn alarms_are_read_by_kind() {
        let fake = machine();
        let readings = read(&mut Hwmon::new(&fake.sysroot(), &[]));
        let on = |signal, source| amount(&readings, signal, source);
        assert_eq!(on(Signal::Temperature, "hwmon0/coretemp/temp1_crit_alarm"), Some(Amount::Alarm(true)));
        assert_eq!(on(Signal::Voltage, "hwmon1/nct6775/in3_alarm"), Some(Amount::Alarm(false)));
        assert_eq!(on(Signal::Fan, "hwmon1/nct6775/fan2_alarm"), Some(Amount::Alarm(true)));
        assert_eq!(on(Signal::Temperature, "hwmon2/k10temp/temp1_crit"), Some(Amount::Alarm(false)));
        assert_eq!(readings.len(), 5, "{readings:?}");
        assert_eq!(readings[0].text, "coretemp/temp1_crit_alarm Package id 0 is on, now 101.000 °C");
        fake.put("sys/class/hwmon/hwmon2/temp1_input", "95000");
        let readings = read(&mut Hwmon::new(&fake.sysroot(), &[]));
        assert_eq!(
            amount(&readings, Signal::Temperature, "hwmon2/k10temp/temp1_crit"),
            Some(Amount::Alarm(true))
        );
    }

    #[test]
    fn an_operator_leaves_alarms_out() {
        let fake = machine();
        let ignore =
            ["nct6775/fan*".to_owned(), "k10temp/temp1_crit".to_owned(), "coretemp/temp1".to_owned()];
        let readings = read(&mut Hwmon::new(&fake.sysroot(), &ignore));
        let sources: Vec<_> = readings.iter().map(|reading| reading.source.as_str()).collect();
        assert_eq!(sources, ["hwmon0/coretemp/temp1_crit_alarm", "hwmon1/nct6775/in3_alarm"]);
    }

    #[test]
    fn a_machine_says_what_it_has() {
        assert_eq!(presence(&machine().sysroot()), Ok("6 alarms of coretemp, k10temp, nct6775".into()));
        assert!(presence(&Fake::new().sysroot()).is_err());
    }

    #[test]
    fn values_have_units() {
        assert_eq!(in_words("temp1", -1500), "-1.500 °C");
        assert_eq!(in_words("in0", 12_096), "12.096 V");
        assert_eq!(in_words("fan3", 1180), "1180 turns a minute");
    }
}
