//! `mercury guard check`: the help that this machine gives the guard, and what a rollback would lose here.

use super::{
    rules::Rules,
    sensors::{self, rules::Kind},
};
use mercury_control::{
    output::{Render, Text, Tone},
    sysroot::Sysroot,
};
use mercury_quiesce::nfs;
use mercury_relocation::refusals;
use serde::Serialize;
use std::{fs, path::Path};

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name.
    pub name: &'static str,
    /// State: `good`, `note` or `bad`.
    pub state: &'static str,
    pub text: String,
}

/// All findings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Findings {
    findings: Vec<Finding>,
}

/// Facts about this machine, which need no driver.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    has_hpet: bool,
    has_counters: bool,
    remapped: bool,
    crash_kernel: bool,
    /// Seconds from a panic to the restart: 0 for never.
    panic_timeout: i64,
    hardware_watchdog: bool,
    /// Local file systems that are mounted for writing.
    written: Vec<String>,
    /// Reasons besides file systems for which local disks keep this machine from a snapshot.
    disks: Vec<String>,
    /// File systems of NFS with which no snapshot can be kept, and their versions.
    sessions: Vec<String>,
}

impl Facts {
    /// Reads them from the files of the system below `root`.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let number = |path: &str| text(path).trim().parse::<i64>().unwrap_or_default();
        let exists = |path: &str| root.join(path).exists();
        let sysroot = Sysroot::at(root);
        let volumes = nfs::volumes(&sysroot).into_iter().filter(nfs::Volume::has_sessions);
        let disks = [refusals::refuse_disk_writers, refusals::refuse_remembered_volumes];
        Self {
            has_hpet: exists("sys/firmware/acpi/tables/HPET"),
            has_counters: exists("sys/bus/event_source/devices/cpu"),
            remapped: text("proc/interrupts").contains(" IR-IO-APIC"),
            crash_kernel: number("sys/kernel/kexec_crash_loaded") == 1,
            panic_timeout: number("proc/sys/kernel/panic"),
            hardware_watchdog: exists("dev/watchdog0"),
            written: written(&text("proc/self/mounts")),
            disks: disks.iter().filter_map(|refuse| Some(refuse(&sysroot).err()?.message)).collect(),
            sessions: volumes.map(|volume| format!("{} (NFS {})", volume.at, volume.version)).collect(),
        }
    }

    /// Judges the facts.
    #[must_use]
    pub fn findings(&self) -> Findings {
        let crash = match (self.crash_kernel, self.panic_timeout) {
            (true, _) => Ok("a crash kernel is loaded: a panic is recorded, and the machine restarts".into()),
            (_, 0) => {
                Err("after a panic this machine stands still: load a crash kernel (kdump-tools), or set \
                kernel.panic=10"
                    .to_owned())
            }
            (_, seconds) => Ok(format!("the machine restarts after a panic (kernel.panic={seconds})")),
        };
        let (state, text) = crash.map_or_else(|text| ("bad", text), |text| ("good", text));
        let findings = vec![
            self.hpet(),
            finding("cycles", self.has_counters, "counters of cycles", "watch-no-pmu"),
            Finding { name: "after-a-panic", state, text },
            self.hardware(),
            self.lost(),
        ];
        Findings { findings }
    }

    fn hpet(&self) -> Finding {
        if self.has_hpet && self.remapped {
            let text = "the HPET's NMIs do not pass the IOMMU (`mercury explain watch-remapped`): a CPU that \
                sleeps with interrupts off is not noticed, nor is one that never leaves an NMI";
            return Finding { name: "hpet", state: "note", text: text.into() };
        }
        finding("hpet", self.has_hpet, "NMIs of the HPET", "watch-no-hpet")
    }

    fn hardware(&self) -> Finding {
        let (state, text) = match self.hardware_watchdog {
            true => {
                ("good", "/dev/watchdog0 is there for a CPU that no NMI reaches: RuntimeWatchdogSec= uses it")
            }
            false => {
                ("note", "no hardware watchdog: a machine whose last CPU never leaves an NMI stays hung")
            }
        };
        Finding { name: "hardware-watchdog", state, text: text.into() }
    }

    /// Tells what a rollback would lose.
    fn lost(&self) -> Finding {
        let name = "rollback";
        if !self.sessions.is_empty() {
            let text = "no snapshot can be kept, so nothing is put back: mount with vers=4.0 or vers=3: ";
            return Finding { name, state: "note", text: text.to_owned() + &self.sessions.join(", ") };
        }
        if !self.disks.is_empty() {
            let text = format!("no snapshot can be kept, so nothing is put back: {}", self.disks.join("; "));
            return Finding { name, state: "note", text };
        }
        if self.written.is_empty() {
            let text = "no local file system is written to: a rollback loses work since the snapshot only";
            return Finding { name, state: "good", text: text.into() };
        }
        let text = format!(
            "a rollback undoes acknowledged writes (a database's commits), or is refused: {} written to",
            self.written.join(", ") + if self.written.len() == 1 { " is" } else { " are" }
        );
        Finding { name, state: "note", text }
    }
}

fn finding(name: &'static str, good: bool, what: &str, code: &str) -> Finding {
    if good {
        return Finding { name, state: "good", text: format!("{what} can be used") };
    }
    Finding { name, state: "note", text: format!("no {what} (`mercury explain {code}`)") }
}

/// Returns the mount points of file systems on local disks, those of ZFS among them, that are mounted
/// for writing.
fn written(mounts: &str) -> Vec<String> {
    let mount = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let [device, at, kind, options, ..] = words.as_slice() else { return None };
        let writes = options.split(',').any(|option| option == "rw");
        ((device.starts_with("/dev/") || *kind == "zfs") && writes).then(|| (*at).to_owned())
    };
    mounts.lines().filter_map(mount).collect()
}

/// Returns a finding for each sensor.
fn sensors(sysroot: &Sysroot, rules: &Rules) -> Vec<Finding> {
    let of = |kind: Kind| {
        let (state, text) = match sensors::presence(kind, sysroot) {
            Ok(text) if rules.sensors.used.contains(&kind) => ("good", text),
            Ok(text) => ("note", format!("not in use, by the rules: {text}")),
            Err(text) => ("note", text),
        };
        let name = match kind {
            Kind::Counters => "sensor-counters",
            Kind::Traces => "sensor-traces",
            Kind::Hwmon => "sensor-hwmon",
            Kind::Disks => "sensor-disks",
            Kind::EventLog => "sensor-event-log",
        };
        Finding { name, state, text }
    };
    Kind::ALL.into_iter().map(of).collect()
}

/// Checks this machine.
#[must_use]
pub fn check(rules: &Rules) -> Findings {
    let Findings { mut findings } = Facts::read(Path::new("/")).findings();
    findings.extend(sensors(&Sysroot::default(), rules));
    Findings { findings }
}

impl Render for Findings {
    fn render(&self, to: &mut Text) {
        for finding in &self.findings {
            let (tone, mark) = match finding.state {
                "good" => (Tone::Good, "ok  "),
                "note" => (Tone::Doubtful, "note"),
                _ => (Tone::Bad, "bad "),
            };
            let mark = to.tone(tone, mark);
            to.after(&format!("{mark} {:18}", finding.name), &finding.text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state<'a>(findings: &'a Findings, name: &str) -> &'a Finding {
        findings.findings.iter().find(|finding| finding.name == name).expect("a finding")
    }

    #[test]
    fn a_machine_that_helps() {
        let facts = Facts {
            has_hpet: true,
            has_counters: true,
            crash_kernel: true,
            hardware_watchdog: true,
            ..Facts::default()
        };
        let findings = facts.findings();
        assert!(findings.findings.iter().all(|finding| finding.state == "good"), "{findings:?}");
    }

    #[test]
    fn each_lack_is_named() {
        let findings = Facts { written: vec!["/".into()], ..Facts::default() }.findings();
        assert_eq!(state(&findings, "after-a-panic").state, "bad");
        for name in ["hpet", "cycles", "hardware-watchdog", "rollback"] {
            assert_eq!(state(&findings, name).state, "note", "{name}");
        }
        let remapped =
            Facts { has_hpet: true, remapped: true, panic_timeout: 10, ..Facts::default() }.findings();
        assert!(state(&remapped, "hpet").text.contains("watch-remapped"));
        assert_eq!(state(&remapped, "after-a-panic").state, "good");
    }

    #[test]
    fn a_machine_that_cannot_keep_a_snapshot_is_told_so() {
        let findings = Facts { sessions: vec!["/ (NFS 4.2)".into()], ..Facts::default() }.findings();
        let rollback = state(&findings, "rollback");
        assert_eq!(rollback.state, "note");
        assert!(rollback.text.contains("vers=4.0") && rollback.text.contains("/ (NFS 4.2)"), "{rollback:?}");
    }

    #[test]
    fn each_sensor_is_named() {
        let fake = sensors::testing::Fake::new();
        fake.put("sys/class/hwmon/hwmon0/temp1_alarm", "0");
        fake.put("sys/class/nvme/nvme0/state", "live");
        let rules = Rules::parse("[sensors]\nuse = ['hwmon']").expect("rules");
        let findings = Findings { findings: sensors(&fake.sysroot(), &rules) };
        assert_eq!(state(&findings, "sensor-hwmon").state, "good");
        assert!(state(&findings, "sensor-disks").text.starts_with("not in use"), "{findings:?}");
        for name in ["sensor-counters", "sensor-traces", "sensor-event-log"] {
            assert_eq!(state(&findings, name).state, "note", "{name}");
        }
    }

    #[test]
    fn facts_come_from_files() {
        let root = tempfile::tempdir().expect("a folder");
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        put("sys/kernel/kexec_crash_loaded", "1\n");
        put("proc/sys/kernel/panic", "-1\n");
        put("proc/interrupts", "   4:  1  IR-IO-APIC    4-edge ttyS0\n");
        put(
            "proc/self/mounts",
            "/dev/sda1 / ext4 rw,relatime 0 0\n/dev/sdb /x ext4 ro 0 0\ntmpfs /run tmpfs rw 0 0\n\
             tank /pool zfs rw 0 0\n",
        );
        put("sys/class/block/sdb/dev", "8:16\n");
        put("proc/77/fdinfo/0", "flags:\t02\n");
        put("proc/77/comm", "qemu\n");
        fs::create_dir_all(root.path().join("proc/77/fd")).expect("a folder");
        std::os::unix::fs::symlink("/dev/sdb", root.path().join("proc/77/fd/0")).expect("a link");
        put("proc/self/mountinfo", "30 1 0:30 / /srv rw - nfs4 s:/ rw,vers=4.2,addr=10.0.0.1\n");
        let facts = Facts::read(root.path());
        assert!(facts.crash_kernel && facts.remapped && !facts.has_hpet);
        assert_eq!((facts.panic_timeout, &facts.written), (-1, &vec!["/".to_owned(), "/pool".to_owned()]));
        assert_eq!(facts.sessions, ["/srv (NFS 4.2)"]);
        let findings = Facts { sessions: Vec::new(), ..facts }.findings();
        let rollback = state(&findings, "rollback");
        assert!(rollback.state == "note" && rollback.text.contains("/dev/sdb by qemu (77)"), "{rollback:?}");
    }
}
