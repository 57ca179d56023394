//! Machines that `mercury guard` watches, for tests and benches: hangs, and events that are none.

use std::time::Duration;

use serde_json::Value;

use crate::{
    error::{Error, Result},
    machine::Machine,
    spec::Spec,
};

/// The line of the test module when all CPUs hang.
pub const ALL_HANG: &str = "all CPUs hang";
/// The panic of a CPU that was found to hang.
pub const HANGS: &str = "CPU [0-9]+ hangs with interrupts off";

/// Time limit for a panic.
const PANICS_WITHIN: Duration = Duration::from_secs(60);

/// Events that stop CPUs, or keep interrupts off, and are no hang.
const STORM: &str = r"
set -e
dmesg -n 8
end=$(($(date +%s) + $1))
while [ $(date +%s) -lt $end ]; do
    echo 0 > /sys/devices/system/cpu/cpu1/online
    echo 1 > /sys/devices/system/cpu/cpu1/online
    echo hold 1 400 > /dev/mercury_test
    echo stop 2000 > /dev/mercury_test
    echo t > /proc/sysrq-trigger
    echo 'p:storm do_sys_openat2' > /sys/kernel/tracing/kprobe_events
    echo 1 > /sys/kernel/tracing/events/kprobes/storm/enable
    mercury attach > /dev/null
    echo function > /sys/kernel/tracing/current_tracer
    mercury detach > /dev/null
    echo nop > /sys/kernel/tracing/current_tracer
    echo 0 > /sys/kernel/tracing/events/kprobes/storm/enable
    echo > /sys/kernel/tracing/kprobe_events
done
";

/// Boots a machine that is watched, with the test module.
///
/// # Errors
/// If the machine does not come up, or its HPET sends no NMIs.
pub fn watched(spec: Spec) -> Result<Machine> {
    let machine = Machine::boot(spec)?;
    machine.sh("insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko")?;
    let state = json(&machine.sh("mercury guard on --json")?)?;
    if state["watch"]["hpet"]["used"] == true {
        return Ok(machine);
    }
    Err(machine.blame(Error::Unhealthy(format!("the HPET sends no NMIs: {state}"))))
}

/// Gives the test module a command that kills the machine.
///
/// # Errors
/// If the machine does not answer.
pub fn kill(machine: &Machine, command: &str) -> Result<()> {
    machine.sh(&format!("setsid sh -c 'sleep 0.5; echo {command} > /dev/mercury_test' &")).map(drop)
}

/// Waits for a panic. Returns the seconds, in the machine's own time, from the line with `since` to it.
///
/// # Errors
/// If there is no such panic, or no such line.
pub fn panics(machine: &Machine, since: &str, message: &str) -> Result<f64> {
    machine.wait_serial(&format!("(?s)Kernel panic - not syncing: {message}.*\n"), PANICS_WITHIN)?;
    let log = machine.serial_log();
    let times = time_of(&log, "Kernel panic").zip(time_of(&log, since));
    let (end, start) = times.ok_or_else(|| Error::Host(format!("no time of `{since}`: {log}")))?;
    println!("{since}: {:.3} s", end - start);
    Ok(end - start)
}

/// Returns the kernel's time in seconds of the first line with this text.
fn time_of(log: &str, text: &str) -> Option<f64> {
    let line = log.lines().find(|line| line.contains(text))?;
    let (stamp, _) = line.split_once('[')?.1.split_once(']')?;
    stamp.trim().parse().ok()
}

/// Stops CPUs for good reasons, for so many seconds. Returns the state of the watch after that.
///
/// # Errors
/// If the machine does not survive: a false alarm would be a panic.
pub fn storm(machine: &Machine, seconds: u32) -> Result<Value> {
    machine.sh("mount -t tracefs tracefs /sys/kernel/tracing 2> /dev/null || true")?;
    let seconds_text = seconds.to_string();
    let storm = machine.program(&["/bin/bash", "-c", STORM, "storm", &seconds_text]);
    storm.timeout(Duration::from_secs(u64::from(seconds) + 120)).run()?.check()?;
    Ok(json(&machine.sh("mercury guard status --json")?)?["watch"].clone())
}

fn json(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::Host(format!("no JSON ({error}): {text}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_time() {
        let log = "[    1.500000] up\n[   12.250000] mercury_test: all CPUs hang\n";
        assert_eq!(time_of(log, ALL_HANG), Some(12.25));
        assert_eq!(time_of(log, "Kernel panic"), None);
    }
}
