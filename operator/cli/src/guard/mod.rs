//! `mercury guard`: notices a machine that hangs, and acts by the rules of `/etc/mercury/guard.toml`.
//!
//! * [`integrity`]: code and constants are compared with a copy, and mended;
//! * [`rules`]: the file; [`switches`]: the kernel's own detectors;
//! * [`check`]: the help that this machine gives; [`drill`]: a panic on purpose;
//! * [`keeper`]: the guard in mercuryd; [`avoid`]: its acts after a machine has died of the same twice;
//!   [`escalation`]: these acts, in a thread; [`carried`]: devices that no act takes away.

pub mod avoid;
pub mod carried;
pub mod check;
pub mod drill;
pub mod escalation;
pub mod integrity;
pub mod keeper;
pub mod outlook;
pub mod report;
pub mod rules;
pub mod sensors;
pub mod services;
pub mod switches;

use clap::{Args, Subcommand};
use mercury_abi::code::Code;
use mercury_control::{
    access,
    device::{Access, Device},
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text},
    say::Say,
    sysroot::Sysroot,
    watch::Watch,
};
use report::Report;
use rules::{Rules, Scrub};
use serde::Serialize;
use std::path::PathBuf;
use switches::{Change, Switches};

#[derive(Debug, Subcommand)]
pub enum GuardCommand {
    /// Watch this machine by the rules, until `mercury guard off`
    On(OnArgs),
    /// Watch this machine no longer, and put the kernel's switches back
    Off,
    /// Show the watch and its rules
    Status(RulesArgs),
    /// Compare the kernel's code and constants with their copy, once
    #[command(
        long_about = "Compares code and constants of the kernel and of its modules with the copy that was \
            taken when integrity was switched on. Without a copy it takes one, and finds nothing yet. \
            Changes that the kernel makes itself are told apart: ftrace, kprobes, static keys and calls, \
            live patches, modules. Exits with 1 if there is another change that is not mended."
    )]
    Scrub(ScrubArgs),
    /// Check what helps the guard on this machine, its sensors, and what a rollback would lose here
    Check(RulesArgs),
    /// Panic on purpose, and report how this machine came back
    #[command(
        long_about = "Keeps a snapshot, and makes the kernel panic. The machine goes back to the snapshot, \
            and this command reports how. It refuses where no snapshot can be kept, because the panic would \
            end this machine. Everything else that happens on the machine in that second is lost."
    )]
    Drill(drill::DrillArgs),
}

#[derive(Debug, Args)]
pub struct OnArgs {
    #[command(flatten)]
    pub rules: RulesArgs,
    #[command(flatten)]
    pub module: crate::shared::ModuleArgs,
}

#[derive(Debug, Args)]
pub struct ScrubArgs {
    /// Mend what nobody may have changed. The driver has to be loaded
    #[arg(long)]
    pub mend: bool,
}

#[derive(Debug, Args)]
pub struct RulesArgs {
    /// The file with the rules
    #[arg(long, value_name = "FILE", default_value = rules::PATH)]
    pub rules: PathBuf,
}

/// State of the guard.
#[derive(Debug, Serialize)]
struct State {
    /// The watch; none without the driver.
    watch: Option<Watch>,
    rules: Rules,
    switches: Vec<Change>,
    /// Sensors and services, if mercuryd runs and guards.
    #[serde(skip_serializing_if = "Option::is_none")]
    daemon: Option<Report>,
    /// Comparisons of code and constants with their copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    integrity: Option<integrity::report::State>,
    /// True if a snapshot is kept that is older than this watch.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    older_snapshot: bool,
}

/// Runs a command of the guard.
///
/// # Errors
///
/// Returns an error if the rules cannot be read, or the driver refuses.
pub fn run(command: &GuardCommand, say: Say<'_>) -> Result<Exit> {
    match command {
        GuardCommand::On(args) => {
            need_no_daemon(&Sysroot::default(), "guard on")?;
            let (device, _) = access::controlled(args.module.module.as_deref(), "guard on")?;
            let rules = Rules::read(&args.rules.rules)?;
            let (watch, switches) = start(&device, &rules)?;
            let integrity = match rules.integrity.scrub {
                Scrub::Off => None,
                Scrub::Report | Scrub::Mend => Some(integrity::open()?.state().clone()),
            };
            let status = access::current_status()?;
            let older_snapshot = status.snapshot.is_some_and(|snapshot| snapshot.state == "kept");
            let watch = Some(watch);
            Ok(say.done(&State { watch, rules, switches, daemon: None, integrity, older_snapshot }))
        }
        GuardCommand::Off => off().map(|state| say.done(&state)),
        GuardCommand::Status(args) => status(args).map(|state| say.done(&state)),
        GuardCommand::Scrub(args) => scrub(args, say),
        GuardCommand::Check(args) => Ok(say.done(&check::check(&Rules::read(&args.rules)?))),
        GuardCommand::Drill(args) => drill::run(args).map(|report| say.done(&report)),
    }
}

/// Starts the watch, then sets the kernel's switches.
fn start(device: &Device, rules: &Rules) -> Result<(Watch, Vec<Change>)> {
    let watch = Watch::new(&device.watch(rules.acts())?);
    let mut switches = Switches::system();
    let changes = switches.put_back().and_then(|()| {
        let wanted = rules.kernel_switches(switches.stands_still());
        switches.set(&wanted)
    });
    if changes.is_err() {
        // All or nothing. The first error is the one to report.
        let _ = switches.put_back();
        let _ = device.watch(0);
    }
    Ok((watch, changes?))
}

/// Refuses while mercuryd guards: it would not learn that its watch, its switches or its copy are others.
///
/// # Errors
///
/// Returns an error that names its process.
pub fn need_no_daemon(sysroot: &Sysroot, action: &str) -> Result<()> {
    let Some(daemon) = Report::read(sysroot) else { return Ok(()) };
    let why = format!("mercuryd (process {}) guards this machine, and {action} would interfere", daemon.pid);
    Err(Error::new(Exit::State, why).hint(
        "`systemctl stop mercuryd` ends the watch; after a change of the rules, `systemctl restart mercuryd`",
    ))
}

/// Stops the watch, and puts the kernel's switches back.
fn off() -> Result<Watch> {
    access::need_root("guard off")?;
    need_no_daemon(&Sysroot::default(), "guard off")?;
    integrity::forget()?;
    Switches::system().put_back()?;
    match access::control_if_loaded()? {
        Some(device) => Ok(Watch::new(&device.watch(0)?)),
        None => Err(without_driver()),
    }
}

fn status(args: &RulesArgs) -> Result<State> {
    access::need_root("guard status")?;
    let watch = Device::open(Access::Observe).and_then(|device| Ok(Watch::new(&device.watch_status()?)));
    let daemon = Report::read(&Sysroot::default());
    let rules = Rules::read(&args.rules)?;
    // Without the driver, the daemon's part is worth showing.
    let watch = watch.map(Some).or_else(|error| if daemon.is_some() { Ok(None) } else { Err(error) })?;
    let (switches, integrity) = (Switches::system().changes(), integrity::state());
    Ok(State { watch, rules, switches, daemon, integrity, older_snapshot: false })
}

/// Makes one pass over code and constants.
fn scrub(args: &ScrubArgs, say: Say<'_>) -> Result<Exit> {
    use integrity::report::{End, Pass};
    access::need_root("guard scrub")?;
    let mut scrubber = integrity::open()?;
    let found = scrubber.pass(args.mend)?;
    let is_well = found.iter().all(|finding| finding.end == End::Mended);
    let done = say.done(&Pass { found, integrity: scrubber.state().clone() });
    Ok(if is_well { done } else { Exit::Failed })
}

fn without_driver() -> Error {
    Error::coded(Code::NotLoaded, "the driver is not loaded, so nothing is watched")
        .hint("`mercury guard on` loads it")
}

impl Render for State {
    fn render(&self, to: &mut Text) {
        match &self.watch {
            Some(watch) => watch.render(to),
            None => to.line("the driver is not loaded, so no hang is noticed"),
        }
        if self.older_snapshot {
            to.line(
                "a snapshot is kept, and a rollback goes back to a time without this watch: keep it anew \
                 (`mercury snapshot --drop`, then `mercury snapshot`)",
            );
        }
        let tried = if self.rules.dry_run { ", only tried (dry_run)" } else { "" };
        to.line(format!("rules: profile {}{tried}", self.rules.profile.name()));
        for change in &self.switches {
            to.line(format!("{}: {} (was {})", change.name, change.set, change.before));
        }
        match &self.daemon {
            Some(report) => report.render(to),
            None => to.line("mercuryd does not guard, so no sensor and no service is watched"),
        }
        match &self.integrity {
            Some(integrity) => integrity.render(to),
            None => to.line("integrity: code and constants are not compared"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sensors::testing::Fake;

    #[test]
    fn a_daemon_that_guards_is_not_interfered_with() {
        let fake = Fake::new();
        need_no_daemon(&fake.sysroot(), "guard off").expect("no daemon");
        Report { pid: 77, ..Report::default() }.write(&fake.sysroot()).expect("written");
        need_no_daemon(&fake.sysroot(), "guard off").expect("a daemon that has died");
        fake.put("proc/77/comm", "mercury\n");
        let refused = need_no_daemon(&fake.sysroot(), "guard off").expect_err("a daemon");
        assert_eq!(refused.exit, Exit::State);
        assert!(refused.message.contains("mercuryd (process 77)"), "{refused}");
    }
}
