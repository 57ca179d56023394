//! An operator's view of a machine: `mercury` commands and their JSON, work that notices a wrong
//! result, and the checks at the end of a test.

use std::{sync::LazyLock, time::Duration};

use regex::Regex;
use serde_json::Value;

use crate::{
    command::Background,
    error::{Error, Result},
    link::{Link, System},
    machine::Machine,
};

/// Text that a kernel prints only when something is wrong.
static COMPLAINT: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(
        "WARNING: (CPU|[a-z])|BUG: |Oops: |kernel BUG at|Kernel panic|cut here|unable to handle|\
         general protection fault, |invalid opcode: |double fault|unchecked MSR access|soft lockup|\
         hard LOCKUP|detected stalls|self-detected stall|blocked for more than|scheduling while atomic|\
         Bad page|list_(add|del) corruption",
    )
    .ok()
});

/// Text of a warning that a kernel of the lab's own prints, because it is small.
const LACKING: &str = "WARNING: kernel not compiled with";

/// Words of a warning that Linux 6.1 may print in each suspend and hibernation of its first two minutes. When
/// it wakes, ACPI's interrupt links allocate memory before the clock goes on. A new slab is shuffled, and
/// new random numbers ask for the time since boot.
const EARLY_CLOCK: [&str; 4] = ["timekeeping.c", "ktime_get_seconds", "crng_make_state", "syscore_resume"];

/// Bits of `/proc/sys/kernel/tainted`: a bad page, an oops, a warning, a lockup.
const TAINTS: u64 = 1 << 5 | 1 << 7 | WARNED | 1 << 14;
const WARNED: u64 = 1 << 9;

/// Time limit for the work to start. A busy machine may have one CPU, and this work has the lowest
/// priority.
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// Returns the lines of a kernel's log that a healthy machine does not write.
#[must_use]
pub fn complaints(log: &str) -> Vec<&str> {
    let Some(complaint) = COMPLAINT.as_ref() else { return vec!["the pattern is none"] };
    let (lines, _) = without_early_clock(log);
    lines.into_iter().filter(|line| complaint.is_match(line) && !line.contains(LACKING)).collect()
}

/// Returns the lines of a log without those warnings, and the number of them.
fn without_early_clock(log: &str) -> (Vec<&str>, usize) {
    let mut lines: Vec<_> = log.lines().collect();
    let (mut from, mut warnings) = (0, 0);
    while let Some(begin) = lines[from..].iter().position(|line| line.contains("[ cut here ]")) {
        let begin = from + begin;
        let Some(end) = lines[begin..].iter().position(|line| line.contains("---[ end trace")) else { break };
        let warning = &lines[begin..=begin + end];
        from = begin + end + 1;
        if EARLY_CLOCK.iter().all(|word| warning.iter().any(|line| line.contains(word))) {
            lines.drain(begin..from);
            (from, warnings) = (begin, warnings + 1);
        }
    }
    (lines, warnings)
}

/// Checks that the log of a system's kernel has no complaint, nor its taint flags.
///
/// # Errors
/// With the complaints.
pub fn check_log(system: &Link) -> Result<()> {
    let log = system.sh("dmesg")?;
    let taint: u64 = system.sh("cat /proc/sys/kernel/tainted")?.parse().unwrap_or(u64::MAX);
    let found = complaints(&log);
    let (_, early_clock) = without_early_clock(&log);
    let forgiven = if early_clock > 0 { WARNED } else { 0 };
    if found.is_empty() && taint & TAINTS & !forgiven == 0 {
        return Ok(());
    }
    let found = found.join("\n");
    let text = format!("tainted {taint:#x}; in its log:\n{found}\n\nall of it:\n{log}");
    Err(system.blame(Error::Unhealthy(text)))
}

/// A refusal by a `mercury` command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The command's exit status.
    pub exit: i32,
    /// The code's short name, or an empty text if there was no code.
    pub code: String,
    /// The command's message, with the hint.
    pub text: String,
}

/// A CPU-bound job with a known result on every CPU.
#[derive(Debug)]
pub struct Work(Background);

impl Work {
    /// Ends the work.
    ///
    /// # Errors
    /// If the work had ended before, or a result was wrong.
    pub fn finish(mut self) -> Result<()> {
        if !self.0.has_ended()? {
            self.0.kill(15)?;
        }
        self.0.wait(Duration::from_secs(60))?.check().map(drop)
    }
}

impl Machine {
    /// Runs a `mercury` command that must succeed, and returns its JSON.
    ///
    /// # Errors
    /// If the command fails.
    pub fn mercury(&self, arguments: &str) -> Result<Value> {
        let line = format!("mercury --json {arguments}");
        let output = self.run(&line)?.check()?;
        self.parse(&line, &output.stdout)
    }

    /// Runs a `mercury` command that must not succeed.
    ///
    /// # Errors
    /// If the command succeeds, or gives no reason.
    pub fn mercury_refused(&self, arguments: &str) -> Result<Refusal> {
        let line = format!("mercury --json {arguments}");
        let output = self.run(&line)?;
        let json = self.parse(&line, &output.stdout)?;
        let error = &json["error"];
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        if output.success() || error.is_null() {
            return Err(self.blame(Error::Unhealthy(format!("`{line}` was not refused: {json}"))));
        }
        Ok(Refusal {
            exit: output.code().unwrap_or(-1),
            code: text("code"),
            text: format!("{} {}", text("message"), text("hint")),
        })
    }

    fn parse(&self, line: &str, json: &str) -> Result<Value> {
        serde_json::from_str(json).map_err(|error| {
            self.blame(Error::Unhealthy(format!("`{line}` printed no JSON ({error}): {json}")))
        })
    }

    /// Returns the mode of each possible CPU as the CPU reports it, in one word each: `attached
    /// native offline`.
    ///
    /// # Errors
    /// If the status cannot be read.
    pub fn modes(&self) -> Result<String> {
        let status = self.mercury("status")?;
        let cpus = status["cpus"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(cpus.iter().filter_map(|cpu| cpu["mode"].as_str()).collect::<Vec<_>>().join(" "))
    }

    /// Gives every idle CPU work for a part of the time, since the host has other machines to
    /// emulate.
    ///
    /// # Errors
    /// If the work cannot be started.
    pub fn start_work(&self) -> Result<Work> {
        let mut work = self.spawn("exec nice -n 19 mercury-workload compute --rest 4 2>&1")?;
        // The work handles its end from then on.
        work.wait_output("started", STARTS_WITHIN)?;
        Ok(Work(work))
    }

    /// Checks that the kernel has no complaint: in its log, on the console, in its taint flags.
    ///
    /// # Errors
    /// With the complaints.
    pub fn check_health(&self) -> Result<()> {
        self.check_console()?;
        self.check_log()
    }

    /// Checks that the kernel's own log has no complaint. A kernel that was restored or rolled back
    /// does not know what the console has shown since.
    ///
    /// # Errors
    /// With the complaints.
    pub fn check_log(&self) -> Result<()> {
        check_log(self.link())
    }

    /// Checks that the console shows no complaint. The console is all that is left of a machine
    /// that has gone.
    ///
    /// # Errors
    /// With the complaints.
    pub fn check_console(&self) -> Result<()> {
        let log = self.serial_log();
        let found = complaints(&log);
        if found.is_empty() {
            return Ok(());
        }
        Err(self.blame(Error::Unhealthy(format!("on its console:\n{}", found.join("\n")))))
    }

    /// Ends most tests: checks that the next attach and the next detach work, and that the machine
    /// is healthy.
    ///
    /// # Errors
    /// If a check fails.
    pub fn check_next_attach(&self) -> Result<()> {
        self.mercury("attach")?;
        let modes = self.modes()?;
        self.mercury("detach")?;
        if modes.contains("native") {
            return Err(self.blame(Error::Unhealthy(format!("after the next attach: {modes}"))));
        }
        self.check_health()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_told_from_news() {
        let log = "\
[    1.0] mercury: loading out-of-tree module taints kernel.
[    1.0] Speculative Return Stack Overflow: WARNING: See https://kernel.org/doc/html/latest/
[    1.0] Speculative Return Stack Overflow: WARNING: kernel not compiled with CPU_SRSO.
[    1.1] WARNING: possible circular locking dependency detected
[    1.1] WARNING: CPU: 1 PID: 7 at kernel/smp.c:433
[    1.2] Uhhuh. NMI received for unknown reason 30 on CPU 0.
[    1.3] BUG: kernel NULL pointer dereference, address: 0
[    1.4] traps: app[1] trap invalid opcode ip:1 sp:2 error:0";
        assert_eq!(complaints(log).len(), 3, "{:?}", complaints(log));
    }

    #[test]
    fn linux_s_own_warning_in_an_early_suspend_is_no_complaint() {
        let warning = "\
[   81.0] ------------[ cut here ]------------
[   81.0] WARNING: CPU: 0 PID: 16 at kernel/time/timekeeping.c:1005 ktime_get_seconds+0x1b/0x30
[   81.0] Stopper: multi_cpu_stop+0x0/0x120 <- stop_machine_cpuslocked+0x16c/0x1b0
[   81.0]  crng_make_state+0x136/0x1c0
[   81.0]  allocate_slab+0x169/0x490
[   81.0]  acpi_pci_link_set+0x76/0x260
[   81.0]  irqrouter_resume+0x44/0x50
[   81.0]  syscore_resume+0x4e/0x180
[   81.0] ---[ end trace 0000000000000000 ]---
";
        let other = warning.replace("syscore_resume", "driver_resume");
        assert_eq!(complaints(warning), [""; 0]);
        assert_eq!(without_early_clock(&format!("{warning}x\n{warning}")), (vec!["x"], 2));
        assert_eq!(complaints(&format!("{warning}{other}")).len(), 2);
        assert_eq!(complaints(&format!("{other}{warning}")).len(), 2);
        let torn: String = warning.lines().take(3).map(|line| format!("{line}\n")).collect();
        assert_eq!(complaints(&torn).len(), 2);
    }
}
