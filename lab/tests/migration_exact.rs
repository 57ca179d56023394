//! An exact arrival. The machine equals the source at the instant, byte for byte, with its devices
//! at work: the hypervisor hashes every page then, while no CPU runs the system.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::time::Duration;

use mercury_lab::{
    Kernel, Result,
    moving::{LIMIT, said},
    restart::{boot_id, is_well, prepared},
};
use serde_json::Value;
use workloads::{
    devices::one_disk,
    moves::{Scene, Shared, disk, goes_on},
    restart::need_qemu,
};

/// A script that gives the order as soon as the destination waits.
const ORDERS: &str =
    "until ping -c 1 -W 1 10.9.0.3; do sleep 1; done; sleep 3; pkill -USR1 -f '^mercury daemon'";

/// Returns the number before `unit`, after `text`.
fn number(said: &str, text: &str) -> f64 {
    let rest = said.split_once(text).unwrap_or_else(|| panic!("{text}: {said}")).1;
    rest.split_whitespace().next().unwrap().parse().unwrap()
}

/// Moves a machine with disk and network at work, to a destination that a boot loader has started,
/// on the order of a signal. The forecast of `--dry-run` is compared with the move.
#[test]
#[ignore = "long"]
fn a_machine_at_full_work_arrives_exact() -> Result<()> {
    need_qemu()?;
    let shared = Shared::new(&["both"]);
    let plug = |spec| shared.plug(&["both"], spec).boot_limit(Duration::from_secs(600));
    let Scene { switch, machine, destination } = Scene::changed(Kernel::BookwormCloud, 2, [768; 2], plug)?;
    let devices = one_disk(&disk(&machine, "both")?);
    devices.start(&machine)?;
    let predicted: Value =
        serde_json::from_str(&machine.sh("mercury migrate --dry-run --without-tombstone --json")?).unwrap();
    println!("{predicted}");
    assert_eq!(predicted["found_by"], "a dirty log");
    assert!(predicted["dirty_pages_per_second"].as_f64().unwrap() > 10.0);

    let (boot, _folder, waits) = prepared(&destination, "receive --listen 10.9.0.3")?;
    let key = waits["key"].as_str().unwrap();
    destination.power_cut()?;
    machine.sh(&format!("mkdir -p /etc/mercury; umask 077; echo '{key}' > /etc/mercury/destination.key"))?;
    let options = "--without-tombstone --verify-instant --max-throttle 0";
    machine.sh(&format!("setsid mercury daemon --to 10.9.0.3 -- {options} > /run/daemon 2>&1 &"))?;
    machine.sh("until mercury evacuate --status | grep 'waits for orders'; do sleep 0.2; done")?;
    machine.put("/run/orders", ORDERS.as_bytes(), 0o644)?;
    machine.sh("setsid sh /run/orders > /dev/null 2>&1 &")?;
    let id = boot_id(&machine)?;
    // This returns when the destination is the machine that has arrived.
    let arrived = destination.start_other(&boot);
    if arrived.is_err() {
        println!("{} {}", said(&machine), machine.sh("cat /run/daemon").unwrap_or_default());
    }
    let arrived = arrived?;
    machine.wait_shutdown(LIMIT)?;
    // The last line is printed after the move.
    let report = said(&machine);
    println!("{report}");
    is_well(&arrived, &id)?;
    goes_on(&switch.peer, &arrived)?;
    assert!(report.contains("found by a dirty log"), "{report}");
    assert!(report.contains("of which 0 differ"), "{report}");
    let compared = report.lines().find(|line| line.contains("pages were compared")).unwrap();
    assert!(number(compared, "mercury migrate: ") > 10_000.0, "hardly any page was compared: {report}");
    devices.go_on(&arrived)?;
    devices.end(&arrived)?;
    arrived
        .sh("until mercury evacuate --status | grep 'has moved to 10.9.0.3: SIGUSR1'; do sleep 0.2; done")?;

    let downtime = number(&report, "stood still for ");
    let expected = predicted["downtime_ms"].as_f64().unwrap();
    println!("{expected:.0} ms were predicted, it was {downtime:.0} ms, with the comparison");
    // The policy plans with hardware's times for the instant and the arrival; an emulator's are far
    // longer.
    assert!(expected < downtime * 2.0 && downtime < expected * 200.0);
    arrived.check_next_attach()
}
