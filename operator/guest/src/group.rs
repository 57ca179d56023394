//! The control group of a guest: a transient unit of systemd's (a scope), into which this process goes with
//! all that it starts. The guest does not end with the session that started it then, and the host's operator
//! can limit it (`systemctl set-property`) and see what it uses.

use mercury_guests::{Name, Status};
use mercury_quiesce::patient::output;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// Folder that is there if systemd runs this host.
const SYSTEMD: &str = "/run/systemd/system";
const HIERARCHY: &str = "/sys/fs/cgroup";
const GROUPS: &str = "/proc/self/cgroup";
/// Memory for the monitor, its helper and the kernel's tables, beside a part of the guest's memory.
const BESIDE: u64 = 128 << 20;
/// Part of the guest's memory for the kernel's tables about it.
const TABLES: u64 = 64;
/// Time for systemd to answer, and time for this process to be in its group after that. The source of a
/// machine that arrives waits half a minute for the answer to its offer. Another one may be admitted first.
const PATIENCE: Duration = Duration::from_secs(5);
const MOMENT: Duration = Duration::from_millis(10);

/// Goes into the guest's own group, and notes it in the guest's state. A guest without one can do all that
/// others can, so a failure is only told. A file with the guest's memory may count as the group's.
pub fn enter(status: &mut Status, has_memory_file: bool) {
    match enter_unit(&status.name, limit(status.memory_bytes, has_memory_file)) {
        Ok((unit, group)) => (status.unit, status.group) = (Some(unit), group),
        Err(why) => note!("mercury: {} has no control group of its own: {why}", status.name),
    }
}

fn enter_unit(name: &Name, limit: u64) -> Result<(String, Option<PathBuf>), String> {
    if !Path::new(SYSTEMD).exists() {
        return Err("systemd does not run this host".into());
    }
    let unit = format!("mercury-guest-{name}.scope");
    // A machine that was to be this guest was refused or discarded before.
    let is_there = own_group().is_some_and(|group| group.ends_with(&unit));
    if is_there {
        ask(change(&unit, limit), PATIENCE)??;
    } else if ask(begin(&unit, limit, OomPolicy::Continue), PATIENCE)?.is_err() {
        // systemd knows no such policy of a scope before 253. It ends no scope for a kill then.
        ask(begin(&unit, limit, OomPolicy::Unsaid), PATIENCE)??;
    }
    let end = Instant::now() + PATIENCE;
    loop {
        match own_group().filter(|group| group.ends_with(&unit)) {
            Some(group) => {
                let folder = PathBuf::from(format!("{HIERARCHY}{group}"));
                return Ok((unit, folder.exists().then_some(folder)));
            }
            None if Instant::now() > end => {
                return Err(format!("systemd has not made {unit}: see `journalctl -u {unit}`"));
            }
            None => thread::sleep(MOMENT),
        }
    }
}

/// Returns the limit of the group of a guest with so much memory. Pages of its file belong to the group that
/// touches them first, and the guest has copies of those that it writes to.
fn limit(memory_bytes: u64, has_memory_file: bool) -> u64 {
    let file = if has_memory_file { memory_bytes } else { 0 };
    memory_bytes.saturating_add(memory_bytes / TABLES).saturating_add(BESIDE).saturating_add(file)
}

/// What systemd does with the unit after the kernel has killed one of its processes because memory was short.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OomPolicy {
    /// The rest goes on: the guest, if its copy in a move was killed.
    Continue,
    Unsaid,
}

/// Returns the words that let systemd make the unit of this process. Users have a systemd of their own.
fn begin(unit: &str, limit: u64, policy: OomPolicy) -> Command {
    let (pid, limit) = (std::process::id().to_string(), limit.to_string());
    let mut command = of_user("busctl");
    command.args(["--quiet", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"]);
    command.args([
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        unit,
        "fail",
    ]);
    command.arg(if policy == OomPolicy::Continue { "5" } else { "4" });
    command.args(["Description", "s", "A machine that Mercury runs as a guest"]);
    command.args(["PIDs", "au", "1", &pid, "MemoryMax", "t", &limit]);
    if policy == OomPolicy::Continue {
        command.args(["OOMPolicy", "s", "continue"]);
    }
    command.args(["CollectMode", "s", "inactive-or-failed", "0"]);
    command
}

fn change(unit: &str, limit: u64) -> Command {
    let mut command = of_user("systemctl");
    command.args(["set-property", "--runtime", unit, &format!("MemoryMax={limit}")]);
    command
}

fn of_user(program: &str) -> Command {
    let mut command = Command::new(program);
    // SAFETY: It only asks the kernel for a number.
    if unsafe { libc::geteuid() } != 0 {
        command.arg("--user");
    }
    command
}

/// Runs a command that asks systemd. The inner result is systemd's answer. The outer one is an error if there
/// is no answer in time: asking again would be in vain.
fn ask(command: Command, patience: Duration) -> Result<Result<(), String>, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = output(command, patience).map_err(|error| format!("{program}: {error}"))?;
    if done.status.success() {
        return Ok(Ok(()));
    }
    Ok(Err(format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim())))
}

/// Returns the group of this process in the hierarchy of version 2.
fn own_group() -> Option<String> {
    group_in(&fs::read_to_string(GROUPS).ok()?)
}

fn group_in(text: &str) -> Option<String> {
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_version_2_is_found() {
        let text = "1:name=systemd:/x\n0::/system.slice/mercury-guest-db.scope\n";
        assert_eq!(group_in(text).as_deref(), Some("/system.slice/mercury-guest-db.scope"));
        assert_eq!(group_in("4:memory:/x\n"), None);
    }

    #[test]
    fn a_guest_that_uses_all_its_memory_stays_below_the_limit() {
        assert_eq!(limit(1 << 30, false), (1 << 30) + (16 << 20) + (128 << 20));
        assert_eq!(limit(1 << 30, true), limit(1 << 30, false) + (1 << 30));
        assert_eq!(limit(u64::MAX, true), u64::MAX);
    }

    #[test]
    fn an_answer_is_told_from_none() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let patience = Duration::from_millis(200);
        assert_eq!(ask(shell("exit 0"), PATIENCE), Ok(Ok(())));
        assert_eq!(ask(shell("echo no >&2; exit 1"), PATIENCE), Ok(Err("sh: no".into())));
        let silent = ask(shell("exec sleep 30"), patience).expect_err("no answer");
        assert!(silent.contains("has not answered"), "{silent}");
    }

    #[test]
    fn systemd_is_asked_for_a_unit_of_this_process() {
        let words_of = |policy| {
            let command = begin("mercury-guest-db.scope", 77, policy);
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
            words.join(" ")
        };
        let pid = std::process::id();
        for (policy, count) in [(OomPolicy::Continue, 5), (OomPolicy::Unsaid, 4)] {
            let text = words_of(policy);
            for words in [
                format!("mercury-guest-db.scope fail {count} Description"),
                format!("PIDs au 1 {pid} MemoryMax t 77"),
            ] {
                assert!(text.contains(&words), "{text}");
            }
            assert_eq!(text.contains("OOMPolicy s continue"), policy == OomPolicy::Continue, "{text}");
        }
    }
}
