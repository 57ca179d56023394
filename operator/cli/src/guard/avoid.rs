//! Escalation: a machine that has died of the same twice in a row avoids it in its next life. The third such
//! death within ten minutes takes its course.
//!
//! The cause is what the life that ended says: the module in which its kernel faulted, and the program that
//! ran on the CPU which asked for the rollback.

use super::{carried, keeper::Event};
use crate::postmortem::{Report, stacks::Cpu};
use mercury_control::sysroot::Sysroot;
use serde::{Deserialize, Serialize};
use std::{
    ffi::CString,
    fmt::{self, Display},
    fs, io,
    path::{Path, PathBuf},
};

/// Deaths of the same in a row after which the cause is avoided.
const DEATHS: u64 = 2;
/// Seconds before a death within which a fault in the kernel's log is its cause.
const FAULT_BEFORE_S: f64 = 30.0;
/// The driver itself, in whose code each life ends.
const OWN: &str = "mercury";
/// Mark of the line that names the place of a fault (`show_regs` of Linux).
const PLACE: &str = "RIP: 0010:";
const INIT: u32 = 1;
/// Nanoseconds of a tick in `/proc`: Linux has 100 ticks in a second there on every x86.
const NS_PER_TICK: u64 = 10_000_000;
/// Place of the start's time among the words after the name in `/proc/PID/stat`.
const STARTED: usize = 19;

/// Treatment of a module in which the kernel has died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OfModule {
    #[default]
    Keep,
    /// Its devices are unbound, and it is removed.
    Unload,
}

/// Treatment of a program during whose call the kernel has died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OfTask {
    #[default]
    Keep,
    /// It gets SIGSTOP.
    Stop,
}

/// Treatment of the whole machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OfMachine {
    #[default]
    Keep,
    /// It moves to a spare.
    Evacuate,
}

/// Acts after the second death of the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Avoid {
    pub module: OfModule,
    pub task: OfTask,
    pub machine: OfMachine,
}

/// The cause of a death, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cause {
    /// Module in which the kernel faulted.
    pub module: Option<String>,
    /// The program that called the kernel.
    pub task: Option<Program>,
}

/// A program of the life that ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    pid: u32,
    name: String,
    /// Nanoseconds from the boot to its start. Numbers of processes come again in each life.
    started_ns: u64,
}

impl Cause {
    /// Finds the cause of the death of a life.
    #[must_use]
    pub fn of(report: &Report) -> Self {
        let asker = report.cpus.iter().find(|cpu| cpu.cpu == report.rollback.cpu);
        let program =
            |cpu: &Cpu| Program { pid: cpu.pid, name: cpu.task.clone(), started_ns: cpu.started_ns };
        let task = |cpu: &Cpu| (cpu.pid > INIT).then(|| program(cpu));
        Self { module: faulting_module(&report.log), task: asker.and_then(task) }
    }
}

/// Returns the module that the last fault in the log names, if that was just before the log's end.
fn faulting_module(log: &[String]) -> Option<String> {
    let end = log.iter().rev().find_map(|line| time(line))?;
    // Only at a line's beginning: names of files and programs may hold anything.
    let text = |line: &str| line.split_once("] ").map_or("", |(_, text)| text).starts_with(PLACE);
    let line = log.iter().rev().find(|line| text(line))?;
    let is_recent = end - time(line)? <= FAULT_BEFORE_S;
    let (_, place) = line.split_once(PLACE)?;
    let (_, module) = place.split_once(" [")?;
    let module = module.split(']').next()?;
    let is_name = !module.is_empty() && module.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    (is_recent && is_name && module != OWN).then(|| module.to_owned())
}

/// Returns the time of a line of the log, in seconds.
fn time(line: &str) -> Option<f64> {
    line.strip_prefix('[')?.split(']').next()?.trim().parse().ok()
}

/// Beginning of each event's text.
const TWICE: &str = "this machine has died of the same twice";

/// A step of an escalation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Tell(Event),
    /// The machine is to move, for this reason.
    Order(String),
}

/// Acts after a death, in the next life; a dry run only tells. The order to move is said before the act,
/// which may never end.
pub fn avoid(rules: Avoid, is_dry: bool, report: &Report, sysroot: &Sysroot, say: &dyn Fn(Step)) {
    if report.rollback.same < DEATHS || rules == Avoid::default() {
        return;
    }
    let act = Act::choose(rules, Cause::of(report));
    let moves = rules.machine == OfMachine::Evacuate;
    if moves && !is_dry {
        say(Step::Order(TWICE.to_owned()));
    }
    let event = match act {
        Some(act) if is_dry => {
            Event::new(4, "would-avoid", format!("{TWICE}: {act} would be {}", act.done()))
        }
        Some(act) => match act.perform(sysroot) {
            Ok(()) => Event::new(2, "avoided", format!("{TWICE}: {act} was {}", act.done())),
            Err(why) => {
                Event::new(2, "not-avoided", format!("{TWICE}: {act} could not be {}: {why}", act.done()))
            }
        },
        None if moves => return,
        None => Event::new(2, "not-avoided", format!("{TWICE}, and the cause is none that the rules avoid")),
    };
    say(Step::Tell(event));
}

/// Acts after a death whose report cannot be read: the machine moves, if it is to.
pub fn without_report(rules: Avoid, is_dry: bool, same: u64, why: &dyn Display, say: &dyn Fn(Step)) {
    if same < DEATHS || rules == Avoid::default() {
        return;
    }
    if rules.machine == OfMachine::Evacuate && !is_dry {
        say(Step::Order(TWICE.to_owned()));
    }
    let text = format!("{TWICE}, and the life that ended tells nothing: {why}");
    say(Step::Tell(Event::new(4, "not-avoided", text)));
}

/// An act that avoids a cause.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Act {
    Unload(String),
    Stop(Program),
}

impl Act {
    fn choose(rules: Avoid, cause: Cause) -> Option<Self> {
        let unload = cause.module.filter(|_| rules.module == OfModule::Unload).map(Self::Unload);
        let stop = cause.task.filter(|_| rules.task == OfTask::Stop);
        unload.or_else(|| stop.map(Self::Stop))
    }

    fn done(&self) -> &'static str {
        match self {
            Self::Unload(_) => "removed",
            Self::Stop(_) => "stopped",
        }
    }

    fn perform(&self, sysroot: &Sysroot) -> io::Result<()> {
        match self {
            Self::Unload(module) => unload(module, sysroot),
            Self::Stop(program) => stop(program, sysroot),
        }
    }
}

impl Display for Act {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unload(module) => write!(to, "the module {module}"),
            Self::Stop(Program { pid, name, .. }) => write!(to, "the process {pid} ({name})"),
        }
    }
}

/// A device, and the folder of its driver.
type Bound = (PathBuf, String);

/// Unbinds a module's devices, and removes the module. Refuses if one of them carries a mounted file system.
fn unload(module: &str, sysroot: &Sysroot) -> io::Result<()> {
    if remove(module).is_ok() {
        return Ok(());
    }
    let mut bound: Vec<Bound> = Vec::new();
    let drivers = format!("sys/module/{module}/drivers");
    for driver in sysroot.names(&drivers) {
        let folder = sysroot.path(&format!("{drivers}/{driver}"));
        bound.extend(devices(&folder)?.into_iter().map(|device| (folder.clone(), device)));
    }
    if let Some((_, device)) =
        bound.iter().find(|(folder, device)| carried::is_needed(&folder.join(device), sysroot))
    {
        let why = format!("{device} may carry a mounted file system or swap space");
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
    }
    without(&bound, || remove(module))
}

/// Unbinds devices for an act. If the act fails, they are bound again.
fn without(bound: &[Bound], act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let write = |(folder, device): &Bound, file: &str| fs::write(folder.join(file), device);
    let done = bound.iter().try_for_each(|one| write(one, "unbind")).and_then(|()| act());
    if done.is_err() {
        // A device that was not unbound refuses. The first error is the one to report.
        bound.iter().for_each(|one| write(one, "bind").unwrap_or_default());
    }
    done
}

/// Returns the names of a driver's devices: those of its links that lead to a device.
fn devices(folder: &Path) -> io::Result<Vec<String>> {
    let is_device = |entry: &fs::DirEntry| entry.path().join("driver").exists();
    let names = fs::read_dir(folder)?.flatten().filter(is_device);
    Ok(names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

fn remove(module: &str) -> io::Result<()> {
    let name = CString::new(module)?;
    // SAFETY: The name is a string that outlives the call, and the kernel removes no module in use.
    match unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Stops a program, if the process of that number is the same program, and no thread of the kernel's. One
/// that was started after the instant is not in this life, where another one may have its number and name.
fn stop(program: &Program, sysroot: &Sysroot) -> io::Result<()> {
    let Program { pid, name, .. } = program;
    let text = |file: &str| sysroot.text(&format!("proc/{pid}/{file}"));
    let is_it = text("comm").is_some_and(|comm| comm == *name);
    if !is_it || text("cmdline").is_none_or(|line| line.is_empty()) {
        return Err(io::Error::new(io::ErrorKind::NotFound, "there is no such program in this life"));
    }
    if text("stat").and_then(|stat| started(&stat)) != Some(program.started_ns / NS_PER_TICK) {
        let why = "the process of this number was started at another time";
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    }
    // SAFETY: It takes numbers.
    match unsafe { libc::kill(pid.cast_signed(), libc::SIGSTOP) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the time of a process's start from its `stat`, in ticks since the boot. Its name may be anything.
fn started(stat: &str) -> Option<u64> {
    stat.rsplit_once(") ")?.1.split(' ').nth(STARTED)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postmortem;
    use mercury_abi::snapshot::RollbackReport;
    use mercury_control::rollback::Rollback;
    use std::cell::RefCell;

    const FAULT: &str = "[   30.100000] RIP: 0010:crash+0x1c/0x30 [broken]";

    fn report(same: u64, log: &[&str], cpu: u32) -> Report {
        let rollback = RollbackReport { count: same, reason: 2, cpu, same, ..RollbackReport::default() };
        postmortem::tests::report(
            Rollback::new(&rollback, "it died".into(), 1),
            vec![postmortem::tests::cpu(0, 0, "swapper/0"), postmortem::tests::cpu(1, 77, "solver")],
            log,
        )
    }

    #[test]
    fn the_cause_is_the_last_fault_and_the_program_on_its_cpu() {
        let of = |log: &[&str], cpu| Cause::of(&report(1, log, cpu));
        let task = Some(Program { pid: 77, name: "solver".into(), started_ns: 0 });
        let end = "[   31.000000] Kernel panic - not syncing";
        assert_eq!(of(&[FAULT, end], 1), Cause { module: Some("broken".into()), task: task.clone() });
        assert_eq!(of(&[FAULT, "[   99.000000] Kernel panic"], 1).module, None, "long before the end");
        let named = "[   30.500000] program RIP: 0010:x [other]: segfault";
        assert_eq!(of(&[FAULT, named, end], 1).module.as_deref(), Some("broken"), "the name of a program");
        for line in ["RIP: 0010:crash+0x1c/0x30", "RIP: 0010:call+0x1/0x2 [mercury]", "RIP: 0010:x [a/b]"] {
            let line = format!("[   30.500000] {line}");
            assert_eq!(of(&[FAULT, &line, end], 1).module, None, "{line}");
        }
        assert_eq!(of(&[], 1), Cause { module: None, task });
        assert_eq!(of(&[], 0), Cause::default(), "an idle CPU");
    }

    #[test]
    fn the_second_death_of_the_same_is_avoided_as_the_rules_say() {
        let all = Avoid { module: OfModule::Unload, task: OfTask::Stop, machine: OfMachine::Keep };
        let nowhere = Sysroot::at("/nowhere");
        let names = |rules, is_dry, report: &Report| {
            let (mut events, mut order) = (Vec::new(), None);
            let steps = RefCell::new(Vec::new());
            avoid(rules, is_dry, report, &nowhere, &|step| steps.borrow_mut().push(step));
            for step in steps.into_inner() {
                match step {
                    Step::Tell(event) => events.push((event.name, event.text)),
                    Step::Order(reason) => order = Some(reason),
                }
            }
            (events, order)
        };
        let faulted = [FAULT, "[   31.000000] Kernel panic"];
        assert_eq!(names(all, false, &report(1, &faulted, 1)), (vec![], None), "the first death");
        assert_eq!(names(Avoid::default(), false, &report(2, &faulted, 1)), (vec![], None), "no rule");
        let (events, _) = names(all, true, &report(2, &faulted, 1));
        assert_eq!(events[0].0, "would-avoid");
        assert!(events[0].1.ends_with("twice: the module broken would be removed"), "{events:?}");
        let (events, _) = names(all, true, &report(2, &[], 1));
        assert!(events[0].1.ends_with("the process 77 (solver) would be stopped"), "{events:?}");
        // Neither is here.
        let (events, _) = names(all, false, &report(2, &[], 1));
        assert_eq!(events[0].0, "not-avoided");
        assert!(events[0].1.contains("no such program"), "{events:?}");
        assert_eq!(names(all, false, &report(2, &faulted, 1)).0[0].0, "not-avoided");
        assert!(names(all, false, &report(2, &[], 0)).0[0].1.contains("none that the rules avoid"));
        let moves = Avoid { machine: OfMachine::Evacuate, ..Avoid::default() };
        assert_eq!(names(moves, false, &report(2, &faulted, 1)), (vec![], Some(TWICE.into())));
        assert_eq!(names(moves, true, &report(2, &faulted, 1)), (vec![], None), "a dry run");
    }

    #[test]
    fn the_machine_moves_without_a_report() {
        let said = |machine, is_dry, same| {
            let steps = RefCell::new(Vec::new());
            let rules = Avoid { module: OfModule::Unload, machine, ..Avoid::default() };
            without_report(rules, is_dry, same, &"busy", &|step| steps.borrow_mut().push(step));
            let steps = steps.into_inner();
            let orders = steps.iter().filter(|step| matches!(step, Step::Order(_))).count();
            (orders, steps.len() - orders)
        };
        assert_eq!(said(OfMachine::Evacuate, false, 2), (1, 1));
        assert_eq!(said(OfMachine::Evacuate, true, 2), (0, 1), "a dry run");
        assert_eq!(said(OfMachine::Keep, false, 2), (0, 1));
        assert_eq!(said(OfMachine::Evacuate, false, 1), (0, 0), "the first death");
    }

    /// A program that is killed at the end of its test, stopped or not.
    struct Killed(std::process::Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill().and_then(|()| self.0.wait());
        }
    }

    #[test]
    fn a_program_is_stopped_if_it_is_the_same() {
        let sleep = std::process::Command::new("sleep").arg("60").spawn().map(Killed).expect("a program");
        let (pid, here) = (sleep.0.id(), Sysroot::default());
        let program = |name: &str, started_ns| Program { pid, name: name.into(), started_ns };
        assert!(stop(&program("another", 0), &here).is_err());
        // A program that begins has its name first, and its words a moment later.
        let text = |file: &str| here.text(&format!("proc/{pid}/{file}")).unwrap_or_default();
        while text("comm") != "sleep" || text("cmdline").is_empty() {
            std::thread::yield_now();
        }
        let ticks = started(&text("stat")).expect("a time");
        for other in [ticks - 1, ticks + 1] {
            let refused = stop(&program("sleep", other * NS_PER_TICK), &here);
            assert!(refused.is_err_and(|why| why.to_string().contains("another time")), "of another life");
        }
        stop(&program("sleep", ticks * NS_PER_TICK + NS_PER_TICK / 2), &here).expect("a stop");
        let state = || here.text(&format!("proc/{pid}/stat")).expect("its state");
        while !state().contains(") T ") {
            std::thread::yield_now();
        }
        drop(sleep);
        // A thread of the kernel's has no command line.
        let thread = Program { pid: 2, name: "kthreadd".into(), started_ns: 0 };
        assert!(stop(&thread, &here).is_err());
    }

    #[test]
    fn a_drivers_devices_are_its_links_to_devices() {
        let folder = tempfile::tempdir().expect("a folder");
        let (driver, device) = (folder.path().join("driver"), folder.path().join("0000:00:03.0"));
        fs::create_dir_all(driver.join("module")).and_then(|()| fs::create_dir(&device)).expect("folders");
        std::os::unix::fs::symlink(&driver, device.join("driver")).expect("a link");
        std::os::unix::fs::symlink(&device, driver.join("0000:00:03.0")).expect("a link");
        fs::write(driver.join("unbind"), "").expect("a file");
        assert_eq!(devices(&driver).expect("devices"), ["0000:00:03.0"]);
    }

    #[test]
    fn devices_are_bound_again_if_the_module_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let bound = [(folder.path().to_owned(), "0000:00:03.0".to_owned())];
        let written = |file: &str| fs::read_to_string(folder.path().join(file)).ok();
        without(&bound, || Ok(())).expect("removed");
        assert_eq!((written("unbind").as_deref(), written("bind")), (Some("0000:00:03.0"), None));
        without(&bound, || Err(io::Error::other("in use"))).expect_err("in use");
        assert_eq!(written("bind").as_deref(), Some("0000:00:03.0"));
    }
}
