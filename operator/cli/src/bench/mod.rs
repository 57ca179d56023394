//! `mercury bench`: mode switches and operations of lmbench, on this machine.

pub mod os;
pub mod paper;
pub mod spin;
pub mod switch;
mod workloads;

use crate::args::BenchCommand;
use mercury_control::{access, error::Result, exit::Exit, interrupt::Deferred, say::Say};

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
