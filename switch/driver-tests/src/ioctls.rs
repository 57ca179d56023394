//! The class of each ioctl for lockdown, compared with the driver's table. A new ioctl fails here until
//! a developer has decided on its class.

use std::collections::{BTreeMap, BTreeSet};

/// What lockdown has to forbid about an ioctl, as `device.c` names it: `NONE` for those that show nothing of
/// the kernel's memory and put nothing into it, `READS`, `WRITES`. Two of `NONE` ask by themselves, because
/// only a snapshot that user space reads is forbidden: see [`ASKS_ITSELF`].
const CLASSES: [(&str, &str); 30] = [
    ("SYSTEM", "NONE"),
    ("FACTS", "NONE"),
    ("LOAD", "NONE"),
    ("UNLOAD", "NONE"),
    ("ATTACH", "NONE"),
    ("DETACH", "NONE"),
    ("STATUS", "NONE"),
    ("MEASURE", "NONE"),
    ("SNAPSHOT_PREPARE", "NONE"),
    ("SNAPSHOT_BEGIN", "NONE"),
    ("SNAPSHOT_READ", "READS"),
    ("SNAPSHOT_END", "NONE"),
    ("SNAPSHOT_MACHINE", "READS"),
    ("ROLLBACK", "NONE"),
    ("FENCE", "NONE"),
    ("RESTORE_BEGIN", "WRITES"),
    ("RESTORE_LOAD", "WRITES"),
    ("SNAPSHOT_READ_PRESENT", "READS"),
    ("LOG_BEGIN", "NONE"),
    ("LOG_COLLECT", "NONE"),
    ("DISK_LOG", "NONE"),
    ("FIRMWARE", "READS"),
    ("WATCH", "NONE"),
    ("WATCH_STATUS", "NONE"),
    ("POSTMORTEM", "READS"),
    ("MEND", "WRITES"),
    ("INTEGRITY", "NONE"),
    ("RESTORE_READ", "WRITES"),
    ("RESTORE_GO", "WRITES"),
    // Only in builds for tests.
    ("FAULT", "NONE"),
];

/// Operations that ask `check_lockdown`.
const ASKS_ITSELF: [&str; 2] = ["snapshot_prepare", "snapshot_begin"];

const DEVICE: &str = include_str!("../../driver/device.c");
const HEADER: &str = include_str!("../../driver/mercury_abi.h");
const WORKLOAD: &str = include_str!("../../../lab/workload/src/lockdown.rs");

/// Returns name and class of each row of the driver's table.
fn rows() -> BTreeMap<&'static str, &'static str> {
    let rows = DEVICE.lines().filter_map(|line| line.trim().strip_prefix("{ MERCURY_IOC_"));
    let row = |row: &'static str| {
        let words: Vec<_> = row.split(", ").collect();
        (words[0], words[3].trim_end_matches(','))
    };
    rows.map(row).collect()
}

#[test]
fn each_ioctl_has_its_class() {
    assert_eq!(rows(), CLASSES.into_iter().collect());
    let names = HEADER.lines().filter_map(|line| line.strip_prefix("#define MERCURY_IOC_"));
    let names = names.filter_map(|line| line.split(' ').next()).filter(|name| *name != "TYPE");
    let known: BTreeSet<_> = CLASSES.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.collect::<BTreeSet<_>>(), known);
}

#[test]
fn the_table_is_obeyed() {
    assert!(
        DEVICE.contains("if (operation->like != LOCKDOWN_NONE && security_locked_down(operation->like))")
    );
    for operation in ASKS_ITSELF {
        assert!(
            DEVICE.contains(&format!("RUN({operation}, check_lockdown(request) ?: mercury_{operation}("))
        );
    }
}

/// The lab's test of lockdown sends each of those that lockdown may forbid.
#[test]
fn the_lab_sends_each_that_is_forbidden() {
    let forbidden = CLASSES.iter().filter(|(_, class)| *class != "NONE").map(|(name, _)| *name);
    for name in forbidden.chain(["SNAPSHOT_PREPARE", "SNAPSHOT_BEGIN"]) {
        assert!(WORKLOAD.contains(&format!("MERCURY_IOC_{name}")), "{name}");
    }
}
