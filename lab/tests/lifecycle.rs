//! The life of Mercury in a machine: load, attach, detach, unload, in every order, by one
//! controller or two, with the controller killed at any moment.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::time::Duration;

use mercury_abi::gate::FaultPoint;
use mercury_lab::{Init, Kernel, Machine, Result, Spec, Variant, Vendor, is_full};
use serde_json::Value;
use workloads::{load_test_module, report};

fn plain() -> Spec {
    Spec::new(Kernel::BookwormCloud)
}

fn state(machine: &Machine) -> Result<String> {
    Ok(machine.mercury("status")?["state"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn load_attach_detach_unload() -> Result<()> {
    let machine = Machine::boot(plain())?;
    assert_eq!(state(&machine)?, "no-driver");
    // Detach and unload succeed if there is nothing to do.
    assert_eq!(machine.mercury("detach")?["count"], 0);
    assert_eq!(machine.mercury("unload")?["driver_removed"], false);

    let work = machine.start_work()?;
    let loaded = machine.mercury("load")?;
    assert_eq!(loaded["prepared"]["hypervisor_loaded"], true);
    assert_eq!((state(&machine)?.as_str(), machine.modes()?.as_str()), ("loaded", "native native"));
    assert_eq!(machine.mercury("load")?["prepared"]["hypervisor_loaded"], false);

    let attached = machine.mercury("attach")?;
    assert_eq!((&attached["count"], &attached["cpus"]), (&2.into(), &"0-1".into()));
    assert_eq!((state(&machine)?.as_str(), machine.modes()?.as_str()), ("attached", "attached attached"));
    assert_eq!(machine.mercury("attach")?["already"], 2);

    assert_eq!(machine.mercury("detach")?["count"], 2);
    assert_eq!((state(&machine)?.as_str(), machine.modes()?.as_str()), ("loaded", "native native"));
    assert_eq!(machine.mercury("detach")?["count"], 0);

    machine.mercury("unload --keep-driver")?;
    assert_eq!(state(&machine)?, "unloaded");
    machine.check_next_attach()?;
    assert_eq!(machine.mercury("unload")?["driver_removed"], true);
    assert_eq!(state(&machine)?, "no-driver");
    machine.check_next_attach()?;
    work.finish()
}

#[test]
fn parts_of_a_machine_switch_by_themselves() -> Result<()> {
    let machine = Machine::boot(plain().cpus(4))?;
    let work = machine.start_work()?;
    assert_eq!(machine.mercury("attach --cpus 1,3")?["cpus"], "1,3");
    assert_eq!(machine.modes()?, "native attached native attached");
    assert_eq!(machine.mercury("detach --cpus 1")?["cpus"], "1");
    assert_eq!(machine.modes()?, "native native native attached");
    let rest = machine.mercury("attach")?;
    assert_eq!((&rest["cpus"], &rest["already"]), (&"0-2".into(), &1.into()));
    assert_eq!(machine.mercury("detach --cpus 0-2")?["count"], 3);
    assert_eq!(machine.modes()?, "native native native attached");
    assert_eq!(state(&machine)?, "attached");
    // A CPU that does not exist: nothing is done.
    let refusal = machine.mercury_refused("attach --cpus 0,7")?;
    assert_eq!((refusal.exit, refusal.code.as_str()), (1, "cpu-offline"), "{refusal:?}");
    assert_eq!(machine.modes()?, "native native native attached");
    assert_eq!(machine.mercury("detach")?["cpus"], "3");
    machine.check_next_attach()?;
    work.finish()
}

/// A program that writes to an MSR of one CPU without the kernel's knowledge.
const WRMSR: &str = r#"
import os, struct, sys
cpu, msr, value = (int(word, 0) for word in sys.argv[1:])
fd = os.open(f"/dev/cpu/{cpu}/msr", os.O_RDWR)
os.pwrite(fd, struct.pack("<Q", value), msr)
"#;

/// Returns a command that takes the hardware away from CPU 0 or 1, as software does that does not
/// know Mercury, and the reason's name.
fn take_away(vendor: Vendor, cpu: usize) -> (&'static str, &'static str) {
    match vendor {
        // 0xd01 is EFER without SVME; the other is VM_HSAVE_PA.
        Vendor::Amd => (
            ["python3 /root/wrmsr 0 0xc0010117 0", "python3 /root/wrmsr 1 0xc0000080 0xd01"][cpu],
            "svm-released",
        ),
        Vendor::Intel => {
            (["mercury-workload kernel vmxoff 0", "mercury-workload kernel vmxoff 1"][cpu], "vmx-released")
        }
    }
}

#[test]
fn the_status_is_asked_of_each_cpu() -> Result<()> {
    let machine = Machine::boot(plain().cpus(2))?;
    machine.put("/root/wrmsr", WRMSR.as_bytes(), 0o644)?;
    machine.sh("modprobe msr")?;
    load_test_module(&machine)?;
    let work = machine.start_work()?;
    machine.mercury("attach")?;
    let (take_away_0, _) = take_away(machine.vendor(), 0);
    let (take_away_1, reason) = take_away(machine.vendor(), 1);
    machine.sh(take_away_1)?;
    let status = machine.mercury("status")?;
    assert_eq!(machine.modes()?, "attached native");
    assert_eq!(status["cpus"][1]["left_because"], reason, "{status}");
    machine.sh("dmesg | grep -q 'CPU 1 left the hypervisor'")?;
    let metrics = machine.sh("mercury metrics")?;
    for line in ["cpu_attached{cpu=\"0\"} 1", "cpu_attached{cpu=\"1\"} 0", "cpu_wanted{cpu=\"1\"} 0"] {
        assert!(metrics.contains(&format!("\nmercury_{line}\n")), "{line}: {metrics}");
    }
    assert_eq!(machine.mercury("attach")?["cpus"], "1");
    assert_eq!(machine.modes()?, "attached attached");
    // The last CPU that leaves clears the state.
    machine.sh(&format!("{take_away_0} && {take_away_1}"))?;
    assert_eq!((state(&machine)?.as_str(), machine.modes()?.as_str()), ("loaded", "native native"));
    machine.mercury("unload")?;
    machine.check_next_attach()?;
    work.finish()
}

/// Shows operators the result of the last checkpoint in metrics, and a service's failure in the
/// journal by its code.
#[test]
#[ignore = "long"]
fn services_are_watched_by_metrics_and_by_the_journal() -> Result<()> {
    let machine = Machine::boot(plain().init(Init::Systemd))?;
    machine.sh("systemctl start systemd-journald")?;
    let line = "systemd-run --quiet --wait --unit refused -E PATH=$PATH -E MERCURY_MODULE=$MERCURY_MODULE";
    let refused = machine.run(&format!("{line} mercury attach --cpus 77"))?;
    assert!(!refused.success());
    machine.sh("journalctl --sync")?;
    let found = machine.sh("journalctl -u refused -o json MERCURY_CODE=cpu-offline")?;
    let entry: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(
        (&entry["MERCURY_COMMAND"], &entry["MERCURY_CPU"], &entry["PRIORITY"], &entry["SYSLOG_IDENTIFIER"]),
        (&"attach".into(), &"77".into(), &"3".into(), &"mercury".into())
    );
    assert!(entry["MESSAGE"].as_str().unwrap().starts_with("mercury attach: "), "{entry}");

    let metric = |name: &str, labels: &str| -> Result<String> {
        let found = machine.sh(&format!("mercury metrics | grep '^mercury_{name}{{{labels}}} '"))?;
        Ok(found.rsplit(' ').next().unwrap().to_owned())
    };
    machine.run("mercury checkpoint /no/such/folder/image")?;
    assert_eq!(metric("action_last_result", "action=\"checkpoint\",result=\"failed\"")?, "1");
    machine.sh("mercury checkpoint --level 1 - > /dev/null")?;
    assert_eq!(metric("action_last_result", "action=\"checkpoint\",result=\"done\"")?, "1");
    let attempts =
        |result| metric("action_attempts_total", &format!("action=\"checkpoint\",result=\"{result}\""));
    assert_eq!((attempts("done")?, attempts("failed")?), ("1".into(), "1".into()));
    let age = machine.sh("date +%s")?.parse::<f64>().unwrap()
        - metric("action_last_success_timestamp_seconds", "action=\"checkpoint\"")?.parse::<f64>().unwrap();
    assert!((-1.0..60.0).contains(&age), "{age}");
    machine.shut_down()
}

#[test]
fn a_hundred_quick_cycles() -> Result<()> {
    let machine = Machine::boot(plain().cpus(4))?;
    let work = machine.start_work()?;
    machine.mercury("load")?;
    machine.sh("mercury-workload switch --cycles 100")?;
    let status = machine.mercury("status")?;
    for cpu in status["cpus"].as_array().unwrap() {
        assert_eq!((&cpu["attaches"], &cpu["detaches"]), (&100.into(), &100.into()), "{cpu}");
        assert!(cpu["left_because"].is_null() && cpu["crash"].is_null(), "{cpu}");
    }
    machine.check_next_attach()?;
    work.finish()
}

/// Keeps the device for root, even if its rights were opened to all users. A controller closes the
/// device on exec, and leaves no controller in the programs that it starts.
#[test]
fn the_device_is_for_root_and_for_one_process() -> Result<()> {
    let machine = Machine::boot(plain().cpus(1))?;
    machine.mercury("load")?;
    assert_eq!(machine.sh("stat -c '%a %U %G' /dev/mercury")?, "600 root root");
    let nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all";
    let refused = machine.run(&format!("{nobody} mercury attach"))?;
    assert_eq!(refused.code(), Some(6), "{}", refused.stderr);
    let open = format!("{nobody} python3 -c \"open('/dev/mercury', 'r+b', buffering=0)\"");
    assert!(machine.run(&open)?.stderr.contains("PermissionError"));
    machine.sh("chmod 666 /dev/mercury")?;
    assert!(machine.run(&open)?.stderr.contains("PermissionError"));
    machine.sh("chmod 600 /dev/mercury")?;

    let exec = "python3 -c \"import os; device = open('/dev/mercury', 'r+b', buffering=0); \
                os.set_inheritable(device.fileno(), False); \
                os.execlp('sh', 'sh', '-c', 'echo runs; read line')\"";
    let mut child = machine.spawn(exec)?;
    child.wait_output("runs", Duration::from_secs(30))?;
    assert!(machine.mercury("status")?["controller_pid"].is_null());
    machine.mercury("attach")?;
    child.close_stdin()?;
    machine.mercury("detach")?;
    machine.check_next_attach()
}

#[test]
fn there_is_one_controller() -> Result<()> {
    let machine = Machine::boot(plain())?;
    let work = machine.start_work()?;
    machine.mercury("load")?;
    let mut holder = machine.spawn("exec 3<>/dev/mercury; echo holds; read")?;
    holder.wait_output("holds", Duration::from_secs(30))?;
    for command in ["attach", "detach", "load", "unload"] {
        let refusal = machine.mercury_refused(command)?;
        assert_eq!((refusal.exit, refusal.code.as_str()), (4, "busy"), "{command}: {refusal:?}");
    }
    // Every user may read the status.
    let status = machine.mercury("status")?;
    assert_eq!(status["controller_pid"], holder.pid(), "{status}");
    // A read-only descriptor allows no action: attach, number 4, with EPERM.
    let attach = "import fcntl; fcntl.ioctl(open('/dev/mercury', 'rb'), 0xc040f504, bytearray(64))";
    assert!(machine.run(&format!("python3 -c \"{attach}\""))?.stderr.contains("Errno 1"));
    holder.kill(9)?;
    holder.wait(Duration::from_secs(30))?;
    machine.check_next_attach()?;
    work.finish()
}

/// A program that starts a switcher or a command, kills it at a random moment, and checks that the
/// next command works.
const KILLS: &str = r#"
set -u
for round in $(seq "$1"); do
	case $((round % 4)) in
	0) mercury-workload switch >/dev/null & ;;
	1) mercury attach >/dev/null 2>&1 & ;;
	2) (while mercury detach && mercury attach; do :; done) >/dev/null 2>&1 & ;;
	3) mercury-workload switch --cpus 1,2 >/dev/null & ;;
	esac
	sleep 0.$(printf %03d $((RANDOM % 120)))
	kill -9 $! $(pgrep -P $!) 2>/dev/null
	wait $! 2>/dev/null
	case $((RANDOM % 4)) in
	0) next=attach ;;
	1) next=detach ;;
	2) next=load ;;
	3) next='unload --detach' ;;
	esac
	# A child of the loop may have been born just before its parent died.
	for try in $(seq 50); do
		said=$(mercury --json $next 2>&1) && continue 2
		case $said in *'"busy"'*) sleep 0.02 ;; *) break ;; esac
	done
	echo "round $round: $next: $said"
	exit 1
done
echo "$round kills"
"#;

#[test]
fn a_killed_controller_leaves_no_trace() -> Result<()> {
    let machine = Machine::boot(plain().cpus(3))?;
    let work = machine.start_work()?;
    machine.put("/root/kills", KILLS.as_bytes(), 0o755)?;
    let count = if is_full() { 40 } else { 12 };
    let kills = machine
        .command(&format!("bash -x /root/kills {count}"))
        .timeout(Duration::from_secs(240))
        .run()?
        .check()?;
    assert!(kills.stdout.ends_with(&format!("{count} kills\n")), "{}", kills.stdout);
    for cpu in machine.mercury("status")?["cpus"].as_array().unwrap_or(&Vec::new()) {
        assert!(cpu["left_because"].is_null() && cpu["crash"].is_null(), "{cpu}");
    }
    machine.check_next_attach()?;
    machine.mercury("unload")?;
    machine.check_next_attach()?;
    work.finish()
}

/// Two programs that load and unload, each as if it were alone. "busy" is the only failure that
/// they may get.
const RIVALS: &str = r#"
rival() {
	for round in $(seq "$1"); do
		for next in $2; do
			said=$(mercury --json $next) && continue
			case $said in *'"busy"'*) ;; *) echo "round $round: $next: $said" ;; esac
		done
	done
}
rival "$1" 'load unload' 2>&1 &
rival "$1" 'detach unload' 2>&1 &
wait
echo rested
"#;

#[test]
#[ignore = "long"]
fn a_driver_that_comes_or_goes_is_waited_for() -> Result<()> {
    let machine = Machine::boot(plain())?;
    machine.put("/root/rivals", RIVALS.as_bytes(), 0o755)?;
    let rivals = machine.command("bash /root/rivals 20").timeout(Duration::from_secs(240)).run()?.check()?;
    assert_eq!(rivals.stdout, "rested\n");
    machine.check_next_attach()
}

#[test]
fn a_driver_in_use_is_not_removed() -> Result<()> {
    let machine = Machine::boot(plain())?;
    let work = machine.start_work()?;
    let in_use =
        |machine: &Machine| -> Result<bool> { Ok(machine.run("rmmod mercury")?.stderr.contains("in use")) };
    machine.mercury("load")?;
    assert!(in_use(&machine)?);
    machine.mercury("attach")?;
    assert!(in_use(&machine)?);
    for command in ["unload", "unload --keep-driver"] {
        let refusal = machine.mercury_refused(command)?;
        assert_eq!((refusal.exit, refusal.code.as_str()), (5, "still-attached"), "{refusal:?}");
    }
    assert_eq!(machine.modes()?, "attached attached");
    let unloaded = machine.mercury("unload --detach")?;
    assert_eq!(
        (&unloaded["detached"], &unloaded["hypervisor_freed"], &unloaded["driver_removed"]),
        (&2.into(), &true.into(), &true.into())
    );
    // After a load and an unload with the driver left in place, the driver can be removed by hand.
    machine.mercury("load")?;
    machine.mercury("unload --keep-driver")?;
    machine.sh("rmmod mercury")?;
    machine.check_next_attach()?;
    work.finish()?;
    lockdown_forbids_what_it_should(&machine)
}

/// Requests that read the kernel's memory, and those that replace it.
const READING: [&str; 7] = [
    "snapshot-prepare",
    "snapshot-begin",
    "snapshot-take",
    "snapshot-look",
    "snapshot-machine",
    "firmware",
    "postmortem",
];
const REPLACING: [&str; 4] = ["restore-begin", "restore-load", "restore-read", "restore-go"];

/// Checks that lockdown forbids root to read or replace the kernel's memory. Attach, and a snapshot
/// that stays in memory, remain allowed.
fn lockdown_forbids_what_it_should(machine: &Machine) -> Result<()> {
    let forbidden = |names: &[&str]| -> Result<Vec<bool>> {
        let answers = report(&machine.run("mercury-workload lockdown")?.check()?);
        Ok(names.iter().map(|name| answers[*name] == "locked-down").collect())
    };
    machine.sh("mountpoint -q /sys/kernel/security || mount -t securityfs none /sys/kernel/security")?;
    machine.mercury("attach")?;
    assert_eq!(
        (forbidden(&READING)?, forbidden(&REPLACING)?),
        (vec![false; READING.len()], vec![false; REPLACING.len()])
    );
    machine.sh("echo integrity > /sys/kernel/security/lockdown")?;
    assert_eq!(
        (forbidden(&READING)?, forbidden(&REPLACING)?),
        (vec![false; READING.len()], vec![true; REPLACING.len()])
    );
    let doctor = machine.sh("mercury doctor")?;
    assert!(doctor.contains("no machine can be restored or received here"), "{doctor}");
    assert!(doctor.contains("bringing the machine back was refused"), "{doctor}");
    for command in ["restore /dev/null", "receive", "checkpoint --poweroff /run/x"] {
        let refusal = machine.mercury_refused(command)?;
        assert_eq!((refusal.exit, refusal.code.as_str()), (3, "locked-down"), "{refusal:?}");
    }
    machine.sh("echo confidentiality > /sys/kernel/security/lockdown")?;
    assert_eq!(
        (forbidden(&READING)?, forbidden(&REPLACING)?),
        (vec![true; READING.len()], vec![true; REPLACING.len()])
    );
    let doctor = machine.sh("mercury doctor")?;
    assert!(doctor.contains("no checkpoint, no move, no restore"), "{doctor}");
    for section in machine.mercury("doctor")?["operations"].as_array().unwrap() {
        let is_named = section["items"].to_string().contains("locked-down");
        assert_eq!(is_named, section["operation"] != "snapshot", "{section}");
        assert!(!is_named || section["possible"] == "no", "{section}");
    }
    for command in ["checkpoint /run/x", "migrate 10.0.0.1 --dry-run"] {
        let refusal = machine.mercury_refused(command)?;
        assert_eq!((refusal.exit, refusal.code.as_str()), (3, "locked-down"), "{refusal:?}");
    }
    let metrics = machine.sh("mercury metrics")?;
    let last = r#"mercury_action_last_refusal{action="checkpoint",code="locked-down"} 1"#;
    assert!(metrics.contains(last), "{metrics}");
    machine.mercury("detach")?;
    machine.check_health()
}

/// Detaches all CPUs when the kernel removes the driver by force (`rmmod -f`). No CPU stays above a
/// hypervisor that no driver can reach.
#[test]
fn a_driver_that_is_removed_by_force_detaches() -> Result<()> {
    let machine = Machine::boot(plain().modules(Variant::Faults))?;
    let work = machine.start_work()?;
    machine.mercury("attach")?;
    // A process with the device open would jump into freed memory at its end.
    let reader = machine.spawn("exec sleep 1000 < /dev/mercury")?;
    machine.sh("until pgrep -x sleep > /dev/null; do sleep 0.1; done")?;
    let mut removal = machine.spawn("rmmod -f mercury")?;
    machine.sh("until dmesg | grep 'mercury: the driver stays until'; do sleep 0.1; done")?;
    assert!(!removal.has_ended()?);
    reader.kill(9)?;
    removal.wait(Duration::from_secs(60))?.check()?;
    machine.mercury("load")?;
    assert_eq!(machine.modes()?, "native native");
    // The driver tells a CPU that does not leave from KVM's use of the hardware.
    machine.mercury("attach")?;
    machine.sh(&format!("mercury fault {}", FaultPoint::Exit as u32))?;
    machine.sh("rmmod -f mercury && dmesg | grep 'stays above the hypervisor'")?;
    let status = machine.sh("mercury status")?;
    assert!(!status.contains("bare hardware") && status.contains("mercury doctor"), "{status}");
    let doctor = machine.run("mercury --json doctor")?;
    assert_eq!(doctor.code(), Some(3), "{doctor:?}");
    assert!(doctor.stdout.contains("orphaned-hypervisor"), "{doctor:?}");
    assert!(!doctor.stdout.contains("virtualization-in-use"), "{doctor:?}");
    let refusal = machine.mercury_refused("attach")?;
    assert_eq!((refusal.exit, refusal.code.as_str()), (3, "orphaned-hypervisor"), "{refusal:?}");
    assert_eq!(machine.mercury("status")?["state"], "orphaned");
    work.finish()
}

/// A program that maps the shared blocks, reports that, and reads them again on request.
const MAPPER: &str = r#"
import mmap, sys
file = open("/dev/mercury", "rb")
blocks = mmap.mmap(file.fileno(), 8192, mmap.MAP_SHARED, mmap.PROT_READ)
file.close()
before = blocks[:]
print("mapped", flush=True)
sys.stdin.readline()
print("same" if blocks[:12] == before[:12] else "other", flush=True)
file = open("/dev/mercury", "rb")
try:
    mmap.mmap(file.fileno(), 8192, mmap.MAP_SHARED, mmap.PROT_READ)
except OSError as error:
    print(error.errno, flush=True)
"#;

#[test]
fn mapped_counters_outlive_an_unload() -> Result<()> {
    let machine = Machine::boot(plain())?;
    machine.put("/root/mapper", MAPPER.as_bytes(), 0o644)?;
    machine.mercury("attach")?;
    let mut mapper = machine.spawn("python3 /root/mapper")?;
    mapper.wait_output("mapped", Duration::from_secs(30))?;
    machine.mercury("detach")?;
    machine.mercury("unload --keep-driver")?;
    // Memory is allocated and freed, so that a freed page would belong to another process.
    machine.sh("stress-ng --vm 2 --vm-bytes 80% --timeout 3 --quiet")?;
    mapper.write_stdin(b"\n")?;
    let said = mapper.wait(Duration::from_secs(60))?.check()?.stdout;
    assert!(said.contains("same"), "{said}");
    // There is nothing to map any more: ENXIO.
    assert!(said.trim().ends_with('6'), "{said}");
    machine.mercury("unload")?;
    machine.check_next_attach()
}

/// Returns the exits without those of CPUID, which VMX always intercepts: every program that starts
/// executes some.
fn exits(status: &Value) -> Vec<u64> {
    let count = |value: &Value| value.as_u64().unwrap_or(0);
    let of = |cpu: &Value| count(&cpu["exits_total"]) - count(&cpu["exits"]["cpuid"]);
    status["cpus"].as_array().unwrap().iter().map(of).collect()
}

#[test]
fn a_machine_at_work_causes_no_exits() -> Result<()> {
    let machine = Machine::boot(plain().cpus(4).memory_mib(1536))?;
    machine.start_postgres()?;
    machine.mercury("attach")?;
    // A question causes exits of its own. Two statuses in a row show how many.
    let (first, second) = (exits(&machine.mercury("status")?), exits(&machine.mercury("status")?));
    let report = machine.sh(
        "stress-ng --cpu 1 --vm 1 --vm-bytes 64M --hdd 1 --hdd-bytes 32M --switch 1 --timer 1 --fork 1 \
             --temp-path /tmp --timeout 8 --quiet & pgbench -n -c 2 -T 8 bench; wait",
    )?;
    assert!(report.contains("number of failed transactions: 0"), "{report}");
    let third = exits(&machine.mercury("status")?);
    for cpu in 0..4 {
        let (asking, working) = (second[cpu] - first[cpu], third[cpu] - second[cpu]);
        assert_eq!(working, asking, "CPU {cpu}: steady_exits must be 0");
    }
    machine.mercury("detach")?;
    machine.check_next_attach()
}
