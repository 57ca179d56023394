//! `mercury guard`: a machine that hangs is noticed in time, and one that works is not taken for hung.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::time::{Duration, Instant};

use mercury_lab::{
    Background, Kernel, Machine, Platform, Qemu, Result, Spec, Vendor,
    error::wait_for,
    guard::{self, ALL_HANG, HANGS, kill, panics},
};
use serde_json::Value;
use workloads::load_test_module;

const MINUTE: Duration = Duration::from_secs(60);

fn spec(cpus: u32) -> Spec {
    Spec::new(Kernel::BookwormCloud).cpus(cpus)
}

/// Skips the test on Bochs, whose HPET sends no NMIs.
fn need_qemu() -> Result<()> {
    if Platform::chosen()? == Platform::Qemu {
        return Ok(());
    }
    let reason = "this emulator's HPET sends no NMIs";
    Platform::need(Vendor::Amd, reason)?;
    Platform::need(Vendor::Intel, reason)
}

/// Boots a machine that is watched.
fn watched(spec: Spec) -> Result<Machine> {
    need_qemu()?;
    guard::watched(spec)
}

fn all_cpus_hang(spec: Spec) -> Result<()> {
    let machine = watched(spec)?;
    kill(&machine, "hang-all 100")?;
    let seconds = panics(&machine, ALL_HANG, HANGS)?;
    assert!(seconds <= 2.0, "{seconds}");
    Ok(())
}

#[test]
fn a_hang_of_all_cpus_becomes_a_panic() -> Result<()> {
    all_cpus_hang(spec(2))
}

#[test]
#[ignore = "long"]
fn a_hang_of_one_and_of_four_becomes_a_panic() -> Result<()> {
    all_cpus_hang(spec(1))?;
    all_cpus_hang(spec(4))
}

/// The HPET sends messages of its own here, and drives no pin.
#[test]
#[ignore = "long"]
fn a_hang_is_seen_by_messages_of_the_hpet() -> Result<()> {
    all_cpus_hang(spec(2).qemu_arg("-global").qemu_arg("hpet.msi=on"))
}

#[test]
#[ignore = "long"]
fn a_hang_is_seen_on_6_12() -> Result<()> {
    all_cpus_hang(Spec::new(Kernel::TrixieCloud).cpus(2))
}

/// The machine is attached, and the watch needs nothing of the hypervisor.
#[test]
#[ignore = "long"]
fn a_hang_is_seen_while_attached() -> Result<()> {
    let machine = watched(spec(2))?;
    machine.mercury("attach")?;
    kill(&machine, "hang-all 100")?;
    assert!(panics(&machine, ALL_HANG, HANGS)? <= 2.0);
    Ok(())
}

#[test]
#[ignore = "long"]
fn one_cpu_of_two_hangs() -> Result<()> {
    let machine = watched(spec(2))?;
    kill(&machine, "hang 1")?;
    assert!(panics(&machine, "CPU 1 hangs\n".trim(), HANGS)? <= 3.0);
    Ok(())
}

#[test]
#[ignore = "long"]
fn a_cpu_never_leaves_a_handler_of_nmis() -> Result<()> {
    let machine = watched(spec(2))?;
    kill(&machine, "hang-in-nmi 1")?;
    assert!(panics(&machine, "hangs in an NMI", "CPU 1 answers no NMI")? <= 3.0);
    Ok(())
}

/// A false alarm would be a panic. QEMU 7 hangs for real: it repeats breakpoints that the kernel has removed.
fn storm(spec: Spec, seconds: u32) -> Result<()> {
    let machine = watched(spec)?;
    let watch = guard::storm(&machine, seconds)?;
    println!("{watch}");
    assert_eq!((&watch["state"], &watch["alarms"], &watch["cpus"]), (&"on".into(), &0.into(), &2.into()));
    assert!(watch["nmis"].as_u64() > Some(u64::from(seconds)), "the HPET went on: {watch}");
    assert_eq!(watch["hpet"]["used"], true, "{watch}");
    let log = machine.sh("dmesg")?;
    assert!(!log.contains("NMI received for unknown reason"), "{log}");
    machine.sh("mercury guard off")?;
    let count = "grep NMI: /proc/interrupts";
    let before = machine.sh(count)?;
    machine.sh("sleep 1")?;
    assert_eq!(machine.sh(count)?, before, "no NMIs come any more");
    Ok(())
}

#[test]
fn a_storm_causes_no_alarm() -> Result<()> {
    storm(spec(2).qemu_version(Qemu::Newer), 10)
}

#[test]
#[ignore = "long"]
fn a_long_storm_causes_no_alarm() -> Result<()> {
    storm(spec(2).qemu_version(Qemu::Newer), 300)
}

fn status(machine: &Machine) -> Result<Value> {
    Ok(serde_json::from_str(&machine.sh("mercury guard status --json")?).unwrap())
}

/// Only reports hangs, so that a test goes on after one.
const REPORT: &[u8] = b"on_hang = 'report'\n";

/// Boots a machine whose watch reports hangs.
fn reporting(spec: Spec) -> Result<Machine> {
    need_qemu()?;
    let machine = Machine::boot(spec)?;
    load_test_module(&machine)?;
    machine.put("/run/guard.toml", REPORT, 0o644)?;
    machine.sh("mercury guard on --rules /run/guard.toml")?;
    Ok(machine)
}

/// The kernel stops all CPUs for longer than a hang may last. The watch hears why, and knows no better once
/// nobody tells it: the storm above can fail.
#[test]
#[ignore = "long"]
fn a_long_stop_is_a_hang_if_the_kernel_does_not_say_why() -> Result<()> {
    let machine = reporting(spec(2).qemu_version(Qemu::Newer))?;
    machine.sh("echo stop 4000 > /dev/mercury_test")?;
    assert_eq!(status(&machine)?["watch"]["alarms"], 0);
    machine.sh("mount -t debugfs debugfs /sys/kernel/debug 2> /dev/null || true")?;
    machine.sh("echo 0 > /sys/kernel/debug/kprobes/enabled; echo stop 4000 > /dev/mercury_test")?;
    assert_eq!(status(&machine)?["watch"]["alarms"], 1);
    Ok(())
}

/// The watch ends while it reports a hang, again and again. No NMI comes afterwards.
#[test]
#[ignore = "long"]
fn the_watch_ends_during_an_alarm() -> Result<()> {
    let machine = reporting(spec(2).qemu_version(Qemu::Newer))?;
    for delay in ["0.9", "1.0", "1.1", "1.2", "1.3", "1.4", "1.5"] {
        machine.sh("mercury guard on --rules /run/guard.toml")?;
        machine
            .sh(&format!("echo hold 1 2500 > /dev/mercury_test & sleep {delay}; mercury guard off; wait"))?;
        let count = "grep NMI: /proc/interrupts";
        let before = machine.sh(count)?;
        machine.sh("sleep 1")?;
        assert_eq!(machine.sh(count)?, before, "NMIs come after {delay} s");
    }
    let log = machine.sh("dmesg")?;
    assert!(log.contains("CPU 1 hangs with interrupts off"), "an alarm was under way: {log}");
    for unwanted in ["Call Trace", "NMI received", "the kernel cannot tell why"] {
        assert!(!log.contains(unwanted), "{log}");
    }
    Ok(())
}

/// A watch whose NMIs come no more says so, and `mercury guard on` starts it again.
#[test]
#[ignore = "long"]
fn a_silent_timer_is_reported() -> Result<()> {
    let machine = reporting(spec(2))?;
    machine.sh("echo hpet 0 > /dev/mercury_test")?;
    let said = "dmesg | grep -q 'NMIs of the HPET come no more: no hang is noticed'";
    machine.sh(&format!("for _ in $(seq 60); do {said} && exit 0; sleep 1; done; dmesg; exit 1"))?;
    let silent = status(&machine)?;
    assert_eq!((&silent["watch"]["hpet"]["used"], &silent["watch"]["alarms"]), (&false.into(), &0.into()));
    machine.sh("echo hpet 1 > /dev/mercury_test; mercury guard on --rules /run/guard.toml")?;
    assert_eq!(status(&machine)?["watch"]["hpet"]["used"], true);
    Ok(())
}

/// A machine that neither counts cycles nor has an HPET cannot be watched, and says which it lacks.
#[test]
#[ignore = "long"]
fn a_machine_without_an_hpet_is_refused() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2).qemu_arg("-machine").qemu_arg("hpet=off"))?;
    let refused = machine.command("mercury guard on").run()?;
    assert!(!refused.success() && refused.stderr.contains("[watch-no-hpet]"), "{refused:?}");
    assert!(machine.sh("mercury guard status")?.contains("the watch is off"));
    Ok(())
}

/// A machine goes back to a time without a watch. One that begins more than a minute later knows nothing of
/// devices that would still be awaited.
#[test]
#[ignore = "long"]
fn a_watch_that_begins_after_a_rollback_causes_no_alarm() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2))?;
    machine.sh("dmesg -n 8; sync; mount -o remount,ro /; mercury snapshot")?;
    machine.sh("setsid sh -c 'sleep 0.5; mercury rollback' > /dev/null 2>&1 &")?;
    // The agent must not be spoken to while the machine goes back.
    machine.wait_serial("was put back to its snapshot", 2 * MINUTE)?;
    machine.sh("mercury snapshot --drop; sleep 62; mercury guard on; sleep 3")?;
    let state = status(&machine)?;
    assert_eq!((&state["watch"]["state"], &state["watch"]["alarms"]), (&"on".into(), &0.into()));
    Ok(())
}

/// The counter of QEMU's HPET wraps around 43 seconds after the start, and the timer fires once more then.
#[test]
#[ignore = "long"]
fn no_nmi_is_left_over_when_the_counter_wraps() -> Result<()> {
    let machine = watched(spec(2))?;
    machine.sh("sleep 60")?;
    let state = status(&machine)?;
    assert_eq!((&state["watch"]["alarms"], &state["watch"]["hpet"]["used"]), (&0.into(), &true.into()));
    let log = machine.sh("dmesg")?;
    assert!(!log.contains("NMI received for unknown reason"), "{log}");
    Ok(())
}

/// A sleep is no hang, and the watch goes on after it.
#[test]
#[ignore = "long"]
fn a_watched_machine_sleeps() -> Result<()> {
    let machine = watched(spec(2))?;
    let sleeper = machine.spawn("echo mem > /sys/power/state && echo awake")?;
    let is = |wanted: &'static str| {
        wait_for(&format!("the machine to be {wanted}"), 2 * MINUTE, || {
            Ok((machine.qmp()?.status()? == wanted).then_some(()))
        })
    };
    is("suspended")?;
    std::thread::sleep(Duration::from_secs(5));
    machine.qmp()?.system_wakeup()?;
    assert!(sleeper.wait(2 * MINUTE)?.check()?.stdout.contains("awake"));
    let before = status(&machine)?;
    machine.sh("sleep 3")?;
    let after = status(&machine)?;
    assert_eq!((&after["watch"]["alarms"], &after["watch"]["hpet"]["used"]), (&0.into(), &true.into()));
    assert!(after["watch"]["nmis"].as_u64() > before["watch"]["nmis"].as_u64().map(|nmis| nmis + 6));
    kill(&machine, "hang-all 100")?;
    assert!(panics(&machine, ALL_HANG, HANGS)? <= 2.0);
    Ok(())
}

/// The daemon, by the rules in /run/guard.toml.
const DAEMON: &str = "exec mercury daemon --rules /run/guard.toml --socket /run/socket";

/// Boots a machine whose daemon keeps a snapshot, by these rules. `prepare` runs before. The console shows
/// all that the daemon says.
fn stateless(rules: &str, prepare: &str) -> Result<Machine> {
    need_qemu()?;
    let machine = Machine::boot(spec(2).qemu_version(Qemu::Newer))?;
    load_test_module(&machine)?;
    machine.put("/run/guard.toml", format!("profile = 'stateless'\n{rules}").as_bytes(), 0o644)?;
    machine.sh(&format!("{prepare} dmesg -n 8; sync; mount -o remount,ro /"))?;
    machine.sh(&format!("setsid sh -c '{DAEMON}' > /dev/kmsg 2>&1 < /dev/null &"))?;
    machine.wait_serial("a snapshot is kept", 2 * MINUTE)?;
    Ok(machine)
}

/// The profile of machines without data of their own: the daemon keeps a snapshot, a hang puts the machine
/// back to it, and a snapshot that was lost is taken anew.
#[test]
#[ignore = "long"]
fn a_stateless_machine_goes_back_and_keeps_a_snapshot() -> Result<()> {
    let machine = stateless("", "")?;
    machine.sh("touch /run/first; setsid sh -c 'sleep 0.5; echo hang-all 100 > /dev/mercury_test' &")?;
    machine.wait_serial("was put back to its snapshot", 2 * MINUTE)?;
    assert_eq!(machine.sh("ls /run/first 2> /dev/null || true")?, "", "it has not been");
    let kept = status(&machine)?;
    assert_eq!(kept["watch"]["hpet"]["used"], true, "{kept}");

    machine.sh("echo 0 > /sys/devices/system/cpu/cpu1/online")?;
    // The second life knows nothing of the first one's lines.
    let kept = "dmesg | grep -q 'a snapshot is kept'";
    machine.command(&format!("until {kept}; do sleep 1; done")).timeout(3 * MINUTE).run()?.check()?;
    assert!(machine.sh("dmesg")?.contains("the snapshot was lost"));
    Ok(())
}

/// Boots a machine that avoids the module in which it died, and lets it die there twice.
fn died_twice_in_a_module(prepare: &str) -> Result<Machine> {
    let machine = stateless("[avoid]\nmodule = 'unload'\ntask = 'stop'\n", prepare)?;
    let die = "setsid sh -c 'sleep 0.5; echo oops 1 > /dev/mercury_test' > /dev/null 2>&1 &";
    machine.sh(die)?;
    machine.wait_serial("was put back to its snapshot", 2 * MINUTE)?;
    assert_eq!(machine.mercury("status")?["rollback"]["same"], 1);
    assert_eq!(machine.sh("ls -d /sys/module/mercury_test")?, "/sys/module/mercury_test");

    machine.sh(die)?;
    Ok(machine)
}

/// Dies twice in a module. The daemon removes it in the third life.
#[test]
#[ignore = "long"]
fn a_machine_that_died_of_the_same_twice_avoids_it() -> Result<()> {
    let machine = died_twice_in_a_module("")?;
    machine.wait_serial("died of the same twice: the module mercury_test was removed", 2 * MINUTE)?;
    let status = machine.mercury("status")?;
    assert_eq!(
        (&status["rollback"]["same"], &status["rollback"]["count"]),
        (&2.into(), &2.into()),
        "{status}"
    );
    assert_eq!(machine.sh("ls -d /sys/module/mercury_test 2> /dev/null || true")?, "");
    Ok(())
}

/// A fatal oops is a panic the third time, and no snapshot is kept of the kernel that had it.
#[test]
#[ignore = "long"]
fn the_third_oops_of_the_same_takes_its_course() -> Result<()> {
    let machine = stateless("", "")?;
    let die = "setsid sh -c 'sleep 0.5; echo oops 1 > /dev/mercury_test' > /dev/null 2>&1 &";
    let back = "the machine was put back to its snapshot \\(reason";
    for lives in [back.to_owned(), format!("(?s){back}.*{back}")] {
        machine.sh(die)?;
        machine.wait_serial(&lives, 2 * MINUTE)?;
    }
    assert_eq!(machine.mercury("status")?["rollback"]["same"], 2);
    machine.sh(die)?;
    machine.wait_serial("mercury explain rollback-repeated", 2 * MINUTE)?;
    machine.wait_serial("and no way back", MINUTE)?;
    machine.wait_shutdown(2 * MINUTE)?;
    Ok(())
}

/// A module that does not come to its end holds who removes it, and not the daemon.
#[test]
#[ignore = "long"]
fn a_module_that_does_not_end_does_not_hold_the_daemon() -> Result<()> {
    let slow = "echo 60 > /sys/module/mercury_test/parameters/slow_exit;";
    let machine = died_twice_in_a_module(slow)?;
    // The agent must not be spoken to while the machine goes back.
    machine.wait_serial("is not avoided within 30 s", 2 * MINUTE)?;
    let going = "test \"$(cat /sys/module/mercury_test/initstate)\" = going";
    machine.sh(&format!("mercury evacuate --status --socket /run/socket && {going}"))?;
    machine.wait_serial("died of the same twice: the module mercury_test was removed", 2 * MINUTE)?;
    Ok(())
}

/// Starts and ends with the daemon, which reports to standard error here. Nobody else may end its watch, and
/// a driver that is loaded anew watches again.
#[test]
#[ignore = "long"]
fn the_daemon_guards_by_its_rules() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(2))?;
    let rules = b"on_hang = 'report'\n[kernel]\nhung_task = 'panic'\nsoft_lockup = 'panic'\n";
    machine.put("/run/guard.toml", rules, 0o644)?;
    let switches = "sysctl -n kernel.hung_task_panic kernel.softlockup_panic | xargs";
    assert_eq!(machine.sh(switches)?.trim(), "0 0");
    let daemon = machine.spawn(DAEMON)?;
    let is_on = "mercury guard status --rules /run/guard.toml | grep -q 'is on'";
    machine.sh(&format!("for _ in $(seq 60); do {is_on} && exit 0; sleep 1; done; exit 1"))?;
    assert_eq!(machine.sh(switches)?.trim(), "1 1");
    load_test_module(&machine)?;
    // It is reported, and ends by itself.
    machine.sh("echo hold 1 3000 > /dev/mercury_test; sleep 7")?;
    for command in ["mercury guard off", "mercury guard on --rules /run/guard.toml"] {
        let refused = machine.command(command).run()?;
        assert!(!refused.success() && refused.stderr.contains("mercuryd (process"), "{refused:?}");
    }
    machine.sh(&format!("{is_on}; rmmod mercury_test; mercury unload; sleep 7; mercury load"))?;
    machine.sh(&format!("for _ in $(seq 60); do {is_on} && exit 0; sleep 1; done; exit 1"))?;
    daemon.kill(15)?;
    let said = daemon.wait(MINUTE)?;
    assert!(said.stderr.contains("watching 2 CPUs") && said.stderr.contains("CPU 1 hangs"), "{said:?}");
    assert!(said.stderr.contains("no hang was noticed: the driver was removed"), "{said:?}");
    assert_eq!(said.stderr.matches("watching 2 CPUs").count(), 2, "{said:?}");
    assert_eq!(machine.sh(switches)?.trim(), "0 0");
    assert!(machine.sh("mercury guard status")?.contains("the watch is off"));
    Ok(())
}

/// Boots a machine whose daemon compares code and constants, and mends them.
fn scrubbed(release: Kernel) -> Result<(Machine, Background)> {
    compared(Spec::new(release).cpus(2), "scrub = 'mend'")
}

/// Boots a machine whose daemon compares code and constants by a rule.
fn compared(spec: Spec, rule: &str) -> Result<(Machine, Background)> {
    compared_after("true", spec, rule)
}

/// Does the same after a command.
fn compared_after(command: &str, spec: Spec, rule: &str) -> Result<(Machine, Background)> {
    need_qemu()?;
    let machine = Machine::boot(spec.qemu_version(Qemu::Newer))?;
    load_test_module(&machine)?;
    machine.sh(command)?;
    let rules = format!("on_hang = 'report'\n[integrity]\n{rule}\n");
    machine.put("/run/guard.toml", rules.as_bytes(), 0o644)?;
    let daemon = machine.spawn(DAEMON)?;
    let is_there = "mercury guard status > /dev/null 2>&1";
    machine.sh(&format!("for _ in $(seq 120); do {is_there} && exit 0; sleep 0.5; done; exit 1"))?;
    integrity_becomes(&machine, |state| state["passes"].as_u64() > Some(0))?;
    Ok((machine, daemon))
}

/// Returns the integrity of the machine's code, as `mercury guard status` reports it.
fn integrity(machine: &Machine) -> Result<Value> {
    let state: Value = serde_json::from_str(&machine.sh("mercury guard status --json")?).unwrap();
    Ok(state["integrity"].clone())
}

/// Waits for so many more passes. Returns the state then.
fn passes(machine: &Machine, more: u64) -> Result<Value> {
    let mut first = None;
    for _ in 0..120 {
        let state = integrity(machine)?;
        let passes = state["passes"].as_u64().unwrap_or(0);
        if passes >= *first.get_or_insert(passes) + more {
            return Ok(state);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    panic!("no pass: {}", integrity(machine)?)
}

/// Flips a bit. Waits until a command prints the same as before. Returns seconds and passes meanwhile.
fn mending_takes(machine: &Machine, address: &str, bit: u32, command: &str) -> Result<(f64, u64)> {
    let count = |state: &Value| state["passes"].as_u64().unwrap_or(0);
    let before = machine.sh(command)?;
    let began = count(&integrity(machine)?);
    let since = Instant::now();
    // In one line: the next pass may come soon.
    let flip = format!("mercury-workload kernel flip {address} {bit} > /run/flip");
    assert_ne!(machine.sh(&format!("{flip}; {command}"))?, before, "the bit has flipped");
    while machine.sh(command)? != before {
        assert!(since.elapsed() < 2 * MINUTE, "{}", integrity(machine)?);
    }
    Ok((since.elapsed().as_secs_f64(), count(&integrity(machine)?) - began))
}

/// Returns the address of a symbol, some bytes on.
fn address_of(machine: &Machine, symbol: &str, offset: u64) -> Result<String> {
    let text = machine.sh(&format!("awk '$3 == \"{symbol}\" {{print $1}}' /proc/kallsyms"))?;
    Ok(format!("{:#x}", u64::from_str_radix(text.trim(), 16).unwrap() + offset))
}

/// Code that computes wrong sums without a word is found, and the sums are right again; so are a constant of
/// the module's, and code and constants of the kernel itself.
fn flipped_bits_are_mended(release: Kernel) -> Result<()> {
    let (machine, daemon) = scrubbed(release)?;
    let sum = "mercury-workload kernel sum 1000";
    let right = machine.sh(sum)?;
    let places = [
        ("test_step", 3, 1, sum),
        ("test_seed", 0, 5, sum),
        ("linux_banner", 3, 0, "dd if=/proc/kcore bs=1 skip=$AT count=8 2> /dev/null | od -x"),
        ("idt_table", 4000, 3, "dd if=/proc/kcore bs=1 skip=$AT count=8 2> /dev/null | od -x"),
        ("sysrq_handle_crash", 12, 2, "dd if=/proc/kcore bs=1 skip=$AT count=8 2> /dev/null | od -x"),
    ];
    for (symbol, offset, bit, command) in places {
        let address = address_of(&machine, symbol, offset)?;
        let command = command.replace("$AT", &kcore_offset(&machine, &address)?);
        let (seconds, passes) = mending_takes(&machine, &address, bit, &command)?;
        println!("{symbol}: {seconds:.1} s, {passes} passes");
        // The pass under way may have been there before the flip. One more may end while it is counted.
        assert!(passes <= 3, "{symbol}: {passes}");
    }
    assert_eq!(machine.sh(sum)?, right);
    let state = passes(&machine, 1)?;
    println!("{state}");
    assert_eq!((&state["found"], &state["mended"]), (&places.len().into(), &places.len().into()), "{state}");
    let first = &state["findings"][0];
    assert_eq!(first["symbol"], "test_step+0x3 [mercury_test]", "{state}");
    assert_eq!((&first["before"], &first["found"], &first["bits"]), (&"1f".into(), &"1d".into(), &1.into()));
    daemon.kill(15)?;
    let said = daemon.wait(MINUTE)?;
    assert!(said.stderr.contains("test_step+0x3 [mercury_test]"), "{said:?}");
    Ok(())
}

/// Returns the place of an address in `/proc/kcore`.
fn kcore_offset(machine: &Machine, address: &str) -> Result<String> {
    let text = machine.sh("readelf -lW /proc/kcore")?;
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    let address = number(address);
    let place = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let ["LOAD", offset, start, _, size, ..] = words.as_slice() else { return None };
        let inside = address.checked_sub(number(start)).filter(|inside| *inside < number(size));
        inside.map(|inside| (number(offset) + inside).to_string())
    };
    Ok(text.lines().find_map(place).unwrap_or_else(|| panic!("{address:#x}: {text}")))
}

#[test]
fn a_flipped_bit_in_code_is_mended() -> Result<()> {
    flipped_bits_are_mended(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn a_flipped_bit_in_code_is_mended_on_6_12() -> Result<()> {
    flipped_bits_are_mended(Kernel::TrixieCloud)
}

/// Boots an attached machine whose code and constants are read-only in the nested tables.
fn guarded(spec: Spec, rule: &str) -> Result<(Machine, Background)> {
    let (machine, daemon) = compared(spec, &format!("{rule}\nstores = true"))?;
    machine.mercury("attach")?;
    integrity_becomes(&machine, |state| state["guarded"].as_u64() > Some(1000))?;
    Ok((machine, daemon))
}

/// Waits until the state of the integrity is as wanted. Returns it.
fn integrity_becomes(machine: &Machine, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    for _ in 0..120 {
        let state = integrity(machine)?;
        if wanted(&state) {
            return Ok(state);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    panic!("never: {}", integrity(machine)?)
}

/// Returns how many exits of a kind there were, on all CPUs.
fn exits_of(machine: &Machine, reason: &str) -> Result<u64> {
    let status = machine.mercury("status")?;
    let of = |cpu: &Value| cpu["exits"][reason].as_u64().unwrap_or(0);
    Ok(status["cpus"].as_array().unwrap().iter().map(of).sum())
}

/// A store to code of a module, and to code, constants and the table of interrupts of the kernel, is seen
/// when it is made, with its maker, and undone. Nothing exits before.
fn foreign_stores_are_undone(release: Kernel) -> Result<()> {
    // The first pass makes all read-only, and the next one is far.
    let rule = "scrub = 'mend'\nstores = true\nevery_seconds = 900";
    let (machine, daemon) = compared_after("mercury attach", Spec::new(release).cpus(2), rule)?;
    println!("{}", integrity_becomes(&machine, |state| state["guarded"].as_u64() > Some(1000))?);
    let before = exits(&machine)?;
    machine.sh("find /usr -type f -size -40k | head -300 | xargs cat | sha256sum; sleep 5")?;
    assert_eq!(exits(&machine)?, before, "exits of a machine at work");
    let sum = "mercury-workload kernel sum 1000";
    let right = machine.sh(sum)?;
    let places = ["test_step", "test_seed", "linux_banner", "idt_table", "sysrq_handle_crash"];
    for (number, symbol) in places.into_iter().enumerate() {
        let address = address_of(&machine, symbol, 3)?;
        machine.sh(&format!("mercury-workload kernel flip {address} 1 > /run/flip"))?;
        let since = Instant::now();
        let wanted = number as u64 + 1;
        let is_done = |state: &Value| state["stores"] == wanted && state["mended"] == wanted;
        let state = integrity_becomes(&machine, is_done)?;
        let findings = state["findings"].as_array().unwrap();
        let store = findings.iter().rfind(|finding| finding["kind"] == "store").expect("a store");
        println!("{symbol}: {:.1} s, {store}", since.elapsed().as_secs_f64());
        assert_eq!(store["address"], address, "{state}");
        assert!(store["symbol"].as_str().unwrap().starts_with(&format!("{symbol}+0x3")), "{store}");
        let by = store["why"].as_str().unwrap();
        assert!(by.starts_with("test_flip+") && by.contains("[mercury_test] < "), "{store}");
        // Sooner than the next pass would have come, also on a host that is busy.
        assert!(since.elapsed() < Duration::from_secs(100), "{symbol}");
    }
    assert_eq!(machine.sh(sum)?, right);
    assert_eq!(exits_of(&machine, "foreign-store")?, places.len() as u64);
    let state = integrity(&machine)?;
    assert!(state["found"] == places.len() && state["not_guarded"].is_null(), "{state}");
    daemon.kill(15)?;
    let said = daemon.wait(MINUTE)?;
    assert!(said.stderr.contains("a store to test_step+0x3 [mercury_test]"), "{said:?}");
    // The daemon has ended, and nothing is read-only any more.
    let address = address_of(&machine, "test_seed", 3)?;
    machine.sh(&format!("mercury-workload kernel flip {address} 1 > /run/flip"))?;
    assert_eq!(exits_of(&machine, "foreign-store")?, places.len() as u64);
    assert_eq!(machine.mercury("status")?["state"], "attached");
    Ok(())
}

#[test]
#[ignore = "long"]
fn a_foreign_store_is_seen_and_undone() -> Result<()> {
    foreign_stores_are_undone(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn a_foreign_store_is_seen_and_undone_on_6_12() -> Result<()> {
    foreign_stores_are_undone(Kernel::TrixieCloud)
}

/// Beneath a snapshot no store is seen, and the state says so. When the machine has gone back and the
/// snapshot is dropped, stores are seen again.
#[test]
#[ignore = "long"]
fn stores_are_seen_again_after_a_rollback() -> Result<()> {
    let (machine, _daemon) = guarded(spec(2), "scrub = 'mend'")?;
    machine.sh("dmesg -n 8; sync; mount -o remount,ro /; mercury snapshot")?;
    let hides = |state: &Value| {
        let why = state["not_guarded"].as_str().unwrap_or_default();
        why.contains("while a snapshot is kept") && state["guarded"] == 0
    };
    integrity_becomes(&machine, hides)?;
    machine.sh("setsid sh -c 'sleep 0.5; mercury rollback' > /dev/null 2>&1 &")?;
    // The agent must not be spoken to while the machine goes back.
    machine.wait_serial("was put back to its snapshot", 2 * MINUTE)?;
    integrity_becomes(&machine, hides)?;
    machine.sh("mercury snapshot --drop")?;
    let is_guarded = |state: &Value| state["guarded"].as_u64() > Some(1000) && state["not_guarded"].is_null();
    integrity_becomes(&machine, is_guarded)?;
    let address = address_of(&machine, "test_seed", 3)?;
    machine.sh(&format!("mercury-workload kernel flip {address} 1 > /run/flip"))?;
    integrity_becomes(&machine, |state| state["stores"] == 1 && state["mended"] == 1)?;
    Ok(())
}

/// The log has room for 64 records of a CPU, and the daemon looks twice a second. A store whose record was
/// overwritten is reported all the same, and its page is made read-only again.
#[test]
#[ignore = "long"]
fn a_store_whose_record_is_lost_is_reported() -> Result<()> {
    let (machine, daemon) = guarded(spec(1), "scrub = 'mend'")?;
    let address = address_of(&machine, "test_seed", 3)?;
    // Each access to this MSR, which is beyond those that the processor can let through, is a record.
    let flood =
        "for _ in $(seq 70); do mercury-workload kernel rdmsr 0 0xc0002000 > /dev/null 2>&1 || true; done";
    let daemon_stands = "kill -STOP $(pgrep -f '[m]ercury daemon')";
    let daemon_goes_on = "kill -CONT $(pgrep -f '[m]ercury daemon')";
    let flip = format!("mercury-workload kernel flip {address} 1 > /run/flip");
    machine.sh(&format!("{daemon_stands}; {flip}; {flood}; {daemon_goes_on}"))?;
    let state = integrity_becomes(&machine, |state| state["stores"] == 1 && state["mended"] == 1)?;
    println!("{state}");
    let findings = state["findings"].as_array().unwrap();
    let lost = findings.iter().find(|finding| finding["kind"] == "store").expect("a store");
    assert!(lost["symbol"].as_str().unwrap().contains("overwritten"), "{state}");
    // The mend was a store, too.
    machine.sh(&flip)?;
    integrity_becomes(&machine, |state| state["stores"] == 2 && state["mended"] == 2)?;
    drop(daemon);
    Ok(())
}

/// MSR of the flags that SYSCALL clears, and a flag there that harms nobody: ID.
const SFMASK: &str = "0xc0000084";
const FLAG: u64 = 1 << 21;

/// Returns the exits of attached CPUs so far, but for the calls of Mercury's own programs.
fn exits(machine: &Machine) -> Result<u64> {
    let status = machine.mercury("status")?;
    let of = |cpu: &Value| {
        let calls = cpu["exits"]["hypercall"].as_u64().unwrap_or(0);
        cpu["exits_total"].as_u64().unwrap_or(0) - calls
    };
    Ok(status["cpus"].as_array().unwrap().iter().map(of).sum())
}

/// A register of one CPU that changes is reported, with its values. Passes cause no exits meanwhile.
#[test]
#[ignore = "long"]
fn a_register_that_changes_is_reported() -> Result<()> {
    let (machine, daemon) = scrubbed(Kernel::BookwormCloud)?;
    machine.mercury("attach")?;
    assert_eq!(passes(&machine, 1)?["cpus"], 2);
    let before = exits(&machine)?;
    assert_eq!(passes(&machine, 3)?["found"], 0);
    assert_eq!(exits(&machine)?, before, "exits for passes");
    let msr = |line: &str| machine.sh(&format!("mercury-workload kernel {line}"));
    let answer: Value = serde_json::from_str(&msr(&format!("rdmsr 1 {SFMASK}"))?).unwrap();
    let text = answer["value"].as_str().unwrap().trim_start_matches("0x");
    let value = u64::from_str_radix(text, 16).unwrap();
    msr(&format!("wrmsr 1 {SFMASK} {:#x}", value ^ FLAG))?;
    let state = passes(&machine, 2)?;
    let finding = &state["findings"][0];
    assert_eq!((&state["found"], &finding["kind"]), (&1.into(), &"register".into()), "{state}");
    assert_eq!((&finding["address"], &finding["symbol"]), (&"CPU 1".into(), &"SFMASK".into()), "{state}");
    assert_eq!(finding["found"], format!("{:x}", value ^ FLAG), "{state}");
    daemon.kill(15)?;
    let said = daemon.wait(MINUTE)?;
    assert!(said.stderr.contains("register changed at SFMASK (CPU 1)"), "{said:?}");
    Ok(())
}

/// All that the kernel changes in its code: ftrace, trampolines, kprobes, static keys and calls, modules.
const POKES: &str = r"
set -e
mount -t tracefs tracefs /sys/kernel/tracing 2> /dev/null || true
cd /sys/kernel/tracing
end=$(($(date +%s) + $1))
pause() { sleep $((RANDOM % 7)); }
while [ $(date +%s) -lt $end ]; do
    echo function > current_tracer; pause
    echo 'p:poke do_sys_openat2' > kprobe_events
    echo 'p:inside vfs_read+9' >> kprobe_events || true
    echo 'r:back vfs_write' >> kprobe_events
    echo 1 > events/kprobes/enable; pause
    echo nop > current_tracer
    echo 1 > events/sched/enable; echo 1 > events/irq/enable; pause
    sysctl -q kernel.sched_schedstats=1; pause
    mercury attach > /dev/null; pause
    echo 0 > events/kprobes/enable; echo > kprobe_events
    mercury detach > /dev/null
    echo 0 > events/enable; sysctl -q kernel.sched_schedstats=0
    rmmod mercury_test; pause
    insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko
    pause
done
";

/// The same without a pause, on a machine that stays attached, and BPF's compiler. The tracer takes some
/// functions alone: two exits for each place are slow in an emulator.
const POKES_BENEATH: &str = r#"
set -e
mount -t tracefs tracefs /sys/kernel/tracing 2> /dev/null || true
cd /sys/kernel/tracing
echo 'vfs_*' > set_ftrace_filter
end=$(($(date +%s) + $1))
while [ $(date +%s) -lt $end ]; do
    echo function > current_tracer; cat /etc/passwd > /dev/null
    grep -q vfs_ trace
    echo 'p:poke do_sys_openat2' > kprobe_events
    echo 'r:back vfs_write' >> kprobe_events
    echo 1 > events/kprobes/enable; cat /etc/passwd > /dev/null
    grep -q poke: trace
    echo 0 > events/kprobes/enable; echo > kprobe_events
    echo nop > current_tracer
    echo 1 > events/sched/enable; echo 1 > events/irq/enable
    sysctl -q kernel.sched_schedstats=1
    echo 0 > events/enable; sysctl -q kernel.sched_schedstats=0
    python3 -c '
import ctypes, socket, struct
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xffff))
program = struct.pack("HL", 1, ctypes.addressof(code))
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.setsockopt(socket.SOL_SOCKET, 26, program)
'
    rmmod mercury_test
    insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko
done
"#;

/// The kernel changes its own code while that is read-only beneath it.
fn pokes_go_through(release: Kernel, seconds: u64) -> Result<()> {
    let (machine, daemon) = guarded(Spec::new(release).cpus(2), "scrub = 'report'")?;
    let before = exits_of(&machine, "text-poke")?;
    let text = seconds.to_string();
    let pokes = machine.program(&["/bin/bash", "-c", POKES_BENEATH, "pokes", &text]);
    pokes.timeout(Duration::from_secs(seconds + 180)).run()?.check()?;
    let state = passes(&machine, 2)?;
    let count = exits_of(&machine, "text-poke")? - before;
    println!("{count} exits for the kernel's own changes; {state}");
    assert!(count > 1000, "{count}");
    assert_eq!((&state["stores"], &state["found"]), (&0.into(), &0.into()), "{state}");
    assert!(state["guarded"].as_u64() > Some(1000), "{state}");
    daemon.kill(15)?;
    let said = daemon.wait(MINUTE)?;
    assert!(!said.stderr.contains("a store to") && !said.stderr.contains("changed at"), "{said:?}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn the_kernels_own_stores_go_through() -> Result<()> {
    pokes_go_through(Kernel::BookwormCloud, 60)
}

#[test]
#[ignore = "long"]
fn the_kernels_own_stores_go_through_on_6_12() -> Result<()> {
    pokes_go_through(Kernel::TrixieCloud, 60)
}

fn pokes_cause_no_finding(release: Kernel, seconds: u64) -> Result<()> {
    let (machine, daemon) = scrubbed(release)?;
    let text = seconds.to_string();
    let pokes = machine.program(&["/bin/bash", "-c", POKES, "pokes", &text]);
    pokes.timeout(Duration::from_secs(seconds + 180)).run()?.check()?;
    let state = passes(&machine, 2)?;
    println!("{state}");
    assert_eq!((&state["found"], &state["findings"]), (&0.into(), &Value::Array(vec![])), "{state}");
    daemon.kill(15)?;
    let said = daemon.wait(MINUTE)?;
    assert!(!said.stderr.contains("changed at") && !said.stderr.contains("cannot be"), "{said:?}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn the_kernels_own_changes_cause_no_finding() -> Result<()> {
    pokes_cause_no_finding(Kernel::BookwormCloud, 120)
}

#[test]
#[ignore = "long"]
fn the_kernels_own_changes_cause_no_finding_on_6_12() -> Result<()> {
    pokes_cause_no_finding(Kernel::TrixieCloud, 120)
}

/// The drill is refused where it would end the machine, and survived elsewhere.
#[test]
#[ignore = "long"]
fn a_drill_is_survived() -> Result<()> {
    need_qemu()?;
    // QEMU 7 runs stale copies of code that the kernel has patched.
    let machine = Machine::boot(spec(2).qemu_version(Qemu::Newer))?;
    let refused = machine.command("mercury guard drill").run()?;
    assert!(refused.stderr.contains("would end this machine"), "{refused:?}");
    machine.sh("sync; mount -o remount,ro /")?;
    let line = "sleep 1; mercury guard drill --json > /run/drill; echo \"<3>drill: over\" > /dev/kmsg";
    machine.sh(&format!("setsid bash -c '{line}' > /dev/null 2>&1 < /dev/null &"))?;
    // The agent must not be spoken to meanwhile: half a message would be lost.
    machine.wait_serial("drill: over", 2 * MINUTE)?;
    let report: Value = serde_json::from_str(&machine.sh("cat /run/drill")?).unwrap();
    assert_eq!(report["state"], "survived", "{report}");
    assert_eq!(report["rollback"]["reason"], "panic", "{report}");
    Ok(())
}
