//! `mercury bench`: mode switches and operations of lmbench, on this machine.

pub mod os;
pub mod paper;
pub mod spin;
pub mod switch;
mod workloads;

use clap::Subcommand;
use mercury_control::{access, error::Result, exit::Exit, interrupt::Deferred, say::Say};

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Attach and detach again and again: switch times, exit round trip, longest pause of a
    /// spinning thread
    Switch(switch::SwitchArgs),
    /// Nine operations of lmbench, those of the papers' tables, and two more: fork, exec, context
    /// switch, faults
    Os(os::OsArgs),
}

pub fn run(command: &BenchCommand, say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    match command {
        BenchCommand::Switch(args) => {
            let (device, _) = access::loaded(args.module.module.as_deref(), "bench switch")?;
            let report = switch::measure(&device, args.cycles, &|| deferred.requested())?;
            say.done(&report);
        }
        BenchCommand::Os(args) => {
            let report = os::measure(args.samples, args.only.as_deref(), &|| deferred.requested())?;
            say.done(&report);
        }
    }
    Ok(if deferred.requested() { Exit::Interrupted } else { Exit::Done })
}
