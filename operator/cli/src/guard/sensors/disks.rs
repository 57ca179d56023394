//! SMART of disks: NVMe by the kernel's own command, ATA and SCSI through `smartctl --json`.
//!
//! A disk that sleeps is not woken. Attributes of ATA are the manufacturer's. So only those count whose
//! meaning all manufacturers share: replaced, pending and uncorrectable sectors.

use super::{
    Amount, Presence, Reading, Sensor, nvme,
    rules::Signal,
    tools::{Tool, find},
};
use mercury_control::sysroot::Sysroot;
use serde_json::Value;
use std::{collections::BTreeMap, io};

/// Disks that one reading asks at most.
const DISKS_MAX: usize = 512;
/// Attributes of ATA that count sectors.
const SECTORS: [(u64, &str); 3] = [(5, "replaced"), (197, "pending"), (198, "uncorrectable")];

/// The sensor.
#[derive(Debug)]
pub struct Disks {
    sysroot: Sysroot,
    /// smartctl, by the disk that it is asked about; the scan is an empty name.
    tools: BTreeMap<String, Tool>,
}

/// A disk that smartctl has found, by a scan that opens no disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    name: String,
    /// Type for smartctl's option `-d`.
    kind: String,
}

impl Found {
    /// Returns the type to ask for. A scan calls ATA's disks `scsi`, of which smartctl would read no
    /// sectors. It finds out by itself when it is asked without a type.
    fn kind(&self) -> Option<&str> {
        Some(self.kind.as_str()).filter(|kind| !matches!(*kind, "scsi" | "ata"))
    }

    /// Returns the name of the disk. Several disks behind one controller have one file.
    fn part(&self) -> String {
        self.kind().map_or_else(|| self.name.clone(), |kind| format!("{} {kind}", self.name))
    }
}

fn ata_disks(sysroot: &Sysroot) -> usize {
    sysroot.names("sys/block").iter().filter(|name| name.starts_with("sd")).count()
}

/// Returns what this machine has of the sensor.
///
/// # Errors
///
/// Returns the reason why it has nothing.
pub fn presence(sysroot: &Sysroot) -> Presence {
    let (nvme, others) = (nvme::controllers(sysroot).len(), ata_disks(sysroot));
    match (nvme, others, find(sysroot, "smartctl")) {
        (0, 0, _) => Err("no NVMe, ATA or SCSI disk".into()),
        (0, _, None) => Err(format!("{others} disks, but no smartctl (`apt install smartmontools`)")),
        (_, 0, _) => Ok(format!("{nvme} NVMe disks")),
        (_, _, None) => Ok(format!("{nvme} NVMe disks; {others} others, but no smartctl (smartmontools)")),
        (0, _, Some(_)) => Ok(format!("{others} disks, by smartctl")),
        (_, _, Some(_)) => Ok(format!("{nvme} NVMe disks; {others} others, by smartctl")),
    }
}

/// Returns the disks in the output of `smartctl --scan --json`. NVMe has a way of its own.
#[must_use]
pub fn scanned(json: &[u8]) -> Vec<Found> {
    let value: Value = serde_json::from_slice(json).unwrap_or_default();
    let text = |value: &Value, key: &str| value[key].as_str().map(str::to_owned);
    let found = |value: &Value| {
        let found = Found { name: text(value, "name")?, kind: text(value, "type")? };
        // Names are arguments of the next call.
        (found.name.starts_with("/dev/") && !found.kind.starts_with('-')).then_some(found)
    };
    let devices = value["devices"].as_array().into_iter().flatten();
    devices.filter_map(found).filter(|found| found.kind != "nvme").take(DISKS_MAX).collect()
}

/// Returns the readings in the output of `smartctl --json` for a disk.
#[must_use]
pub fn readings(name: &str, json: &[u8]) -> Vec<Reading> {
    let value: Value = serde_json::from_slice(json).unwrap_or_default();
    let text = |key: &str| value[key].as_str().unwrap_or_default();
    let model = if text("model_name").is_empty() { text("scsi_model_name") } else { text("model_name") };
    let part = format!("{name} ({model} {})", text("serial_number"));
    // Two paths or actuators of a disk share its serial number, and some disks have none.
    let source = format!("{name} {}", text("serial_number"));
    let source = source.trim_end();
    let mut readings = Vec::new();
    let mut add = |signal, kind: &str, amount, text: String| {
        readings.push(Reading::new(signal, super::printable(&format!("{source}/{kind}")), amount, text));
    };
    if value.pointer("/smart_status/passed").and_then(Value::as_bool) == Some(false) {
        add(Signal::DiskFailing, "status", Amount::New(1), format!("{part} reports that it is failing"));
    }
    let attributes = value.pointer("/ata_smart_attributes/table").and_then(Value::as_array);
    for attribute in attributes.into_iter().flatten() {
        let name = attribute["name"].as_str().unwrap_or("an attribute");
        let is_vital = attribute.pointer("/flags/prefailure").and_then(Value::as_bool) == Some(true);
        if is_vital && attribute["when_failed"] == "now" {
            let text = format!("{part} is failing by {name}");
            add(Signal::DiskFailing, name, Amount::New(1), text);
        }
        let id = attribute["id"].as_u64();
        let raw = attribute.pointer("/raw/value").and_then(Value::as_u64);
        if let Some(((_, kind), raw)) = SECTORS.iter().find(|(known, _)| Some(*known) == id).zip(raw) {
            // Manufacturers put other numbers above these bits.
            let text = format!("{part}: {kind} sectors");
            add(Signal::DiskErrors, kind, Amount::Level(raw & 0xffff_ffff), text);
        }
    }
    if let Some(defects) = value["scsi_grown_defect_list"].as_u64() {
        add(Signal::DiskErrors, "defects", Amount::Level(defects), format!("{part}: grown defects"));
    }
    readings
}

impl Disks {
    #[must_use]
    pub fn new(sysroot: &Sysroot) -> Self {
        Self { sysroot: sysroot.clone(), tools: BTreeMap::new() }
    }

    fn smartctl(&mut self, disk: &str, arguments: &[&str]) -> io::Result<Option<Vec<u8>>> {
        let Some(path) = find(&self.sysroot, "smartctl") else { return Ok(None) };
        let tool = self.tools.entry(disk.to_owned()).or_insert_with(|| Tool::new(path));
        tool.ask(arguments).map(|output| Some(output.stdout))
    }
}

impl Sensor for Disks {
    fn read(&mut self, to: &mut Vec<Reading>) -> io::Result<()> {
        let mut answer = Ok(());
        let mut take = |result: io::Result<Vec<Reading>>| match result {
            Ok(found) => to.extend(found),
            Err(error) => answer = Err(error),
        };
        for controller in nvme::controllers(&self.sysroot) {
            take(nvme::read(&self.sysroot, &controller));
        }
        let scan = self.smartctl("", &["--scan", "--json=c"])?.unwrap_or_default();
        for found in scanned(&scan) {
            let mut arguments = vec!["--json=c", "-n", "standby", "-i", "-H", "-A"];
            arguments.extend(found.kind().into_iter().flat_map(|kind| ["-d", kind]));
            arguments.push(&found.name);
            let output = self.smartctl(&found.name, &arguments);
            take(output.map(|json| readings(&found.part(), &json.unwrap_or_default())));
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fake, amount, read};
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = r#"{"smartctl":{"exit_status":0},"model_name":"WDC X","serial_number":"S1",
        "smart_status":{"passed":true},"ata_smart_attributes":{"table":[
        {"id":5,"name":"Reallocated_Sector_Ct","thresh":10,"when_failed":"","flags":{"prefailure":true},
         "raw":{"value":8589934594,"string":"2"}},
        {"id":197,"name":"Current_Pending_Sector","when_failed":"","raw":{"value":1}},
        {"id":194,"name":"Temperature_Celsius","raw":{"value":31}}]}}"#;
    const SCAN: &str = r#"{"devices":[{"name":"/dev/sda","type":"scsi"},{"name":"/dev/nvme0","type":"nvme"},
        {"name":"--evil","type":"sat"},{"name":"/dev/sdb","type":"-x"},
        {"name":"/dev/bus/0","type":"megaraid,3"},7]}"#;

    #[test]
    fn disks_of_a_scan() {
        let found = scanned(SCAN.as_bytes());
        let names: Vec<_> = found.iter().map(|found| (found.name.as_str(), found.kind.as_str())).collect();
        assert_eq!(names, [("/dev/sda", "scsi"), ("/dev/bus/0", "megaraid,3")]);
        assert_eq!(scanned(b"nonsense"), []);
    }

    #[test]
    fn sectors_are_counted_and_failures_named() {
        let found = readings("/dev/sda", GOOD.as_bytes());
        assert_eq!(amount(&found, Signal::DiskErrors, "/dev/sda S1/replaced"), Some(Amount::Level(2)));
        assert_eq!(amount(&found, Signal::DiskErrors, "/dev/sda S1/pending"), Some(Amount::Level(1)));
        assert_eq!(found.len(), 2, "{found:?}");
        // The other actuator of this disk has the same serial number.
        let other = readings("/dev/sdb", GOOD.as_bytes());
        assert!(found.iter().all(|one| other.iter().all(|two| one.source != two.source)), "{other:?}");
        let failing = GOOD.replace("\"passed\":true", "\"passed\":false");
        let failing = failing.replacen("\"when_failed\":\"\"", "\"when_failed\":\"now\"", 1);
        let found = readings("/dev/sda", failing.as_bytes());
        let failing: Vec<_> = found.iter().filter(|found| found.signal == Signal::DiskFailing).collect();
        assert_eq!(failing.len(), 2, "{failing:?}");
        assert_eq!(failing[0].text, "/dev/sda (WDC X S1) reports that it is failing");
        assert!(failing[1].text.ends_with("is failing by Reallocated_Sector_Ct"));
        // A disk that sleeps has said nothing.
        assert_eq!(readings("/dev/sda", br#"{"smartctl":{"exit_status":2}}"#), []);
        let scsi = readings("/dev/sdc", br#"{"scsi_model_name":"X","scsi_grown_defect_list":4}"#);
        assert_eq!(amount(&scsi, Signal::DiskErrors, "/dev/sdc/defects"), Some(Amount::Level(4)));
    }

    #[test]
    fn smartctl_is_asked_for_each_disk() {
        let fake = Fake::new();
        fake.put("sys/block/sda/size", "1");
        assert!(presence(&fake.sysroot()).expect_err("no tool").contains("smartmontools"));
        fake.put("usr/sbin/scan", SCAN);
        fake.put("usr/sbin/good", GOOD);
        fake.program(
            "smartctl",
            "cd \"$(dirname \"$0\")\"; echo \"$*\" >> asked
            case $1 in --scan) cat scan;; *) case $* in *sda) cat good;; *) echo broken;; esac;; esac",
        );
        assert_eq!(presence(&fake.sysroot()), Ok("1 disks, by smartctl".into()));
        let found = read(&mut Disks::new(&fake.sysroot()));
        assert_eq!(found.len(), 2, "{found:?}");
        let asked = fake.text("usr/sbin/asked");
        assert_eq!(asked.lines().nth(1), Some("--json=c -n standby -i -H -A /dev/sda"));
        assert_eq!(asked.lines().nth(2), Some("--json=c -n standby -i -H -A -d megaraid,3 /dev/bus/0"));
    }

    /// A value of JSON with keys that smartctl uses, and wrong kinds of values.
    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
            Just(Value::from("now")),
        ];
        let key = prop::sample::select(vec![
            "devices",
            "name",
            "type",
            "smart_status",
            "passed",
            "ata_smart_attributes",
            "table",
            "id",
            "raw",
            "value",
            "when_failed",
            "flags",
            "prefailure",
            "scsi_grown_defect_list",
            "serial_number",
        ]);
        leaf.prop_recursive(5, 60, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_output_is_read(value in json(), cut in 0_usize..400) {
            let text = value.to_string();
            let part = text.as_bytes().get(..cut).unwrap_or(text.as_bytes());
            for json in [text.as_bytes(), part] {
                for reading in readings("/dev/sda", json) {
                    prop_assert!(!reading.text.chars().chain(reading.source.chars()).any(char::is_control));
                }
                prop_assert!(scanned(json).iter().all(|found| found.name.starts_with("/dev/")));
            }
        }
    }
}
