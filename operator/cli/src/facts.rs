//! `mercury facts` and `mercury verify`.

use crate::shared::{CpusArgs, ModuleArgs};
use clap::Args;
use mercury_control::{
    access::{loaded, observe},
    cpus::CpuSet,
    error::Result,
    exit::Exit,
    facts,
    interrupt::Deferred,
    say::Say,
    sysroot::Sysroot,
};

#[derive(Debug, Args)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub cpus: CpusArgs,
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Prints every fact that is read of each CPU.
///
/// # Errors
///
/// Returns an error if the driver is not loaded or does not answer.
pub fn show(args: &CpusArgs, say: Say<'_>) -> Result<Exit> {
    facts::collect(&observe()?, &chosen(args)).map(|all| say.done(&all))
}

/// Switches each CPU to the other mode and back, and compares its state.
///
/// # Errors
///
/// Returns an error if a CPU cannot be switched.
pub fn verify(args: &VerifyArgs, say: Say<'_>) -> Result<Exit> {
    let (device, _) = loaded(args.module.module.as_deref(), "verify")?;
    let _deferred = Deferred::begin();
    let report = facts::verify(&device, &chosen(&args.cpus))?;
    say.done(&report);
    Ok(if report.equal { Exit::Done } else { Exit::Failed })
}

/// Returns the named CPUs, or all that are online.
fn chosen(args: &CpusArgs) -> CpuSet {
    args.cpus.clone().unwrap_or_else(|| Sysroot::default().online_cpus())
}
