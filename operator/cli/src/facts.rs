//! `mercury facts` and `mercury verify`.

use crate::shared::{CpusArgs, ModuleArgs};
use clap::Args;
use mercury_control::{
    access::{loaded, observe},
    cpus::CpuSet,
    device::Device,
    driver::{Direction, Driver},
    error::{Error, Result},
    exit::Exit,
    facts::{self, Care},
    interrupt::Deferred,
    module,
    say::Say,
    switch::Prepared,
    sysroot::Sysroot,
};
use mercury_quiesce::undo::{Undo, UndoProcess};

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
    let (device, prepared) = loaded(args.module.module.as_deref(), "verify")?;
    let _deferred = Deferred::begin();
    let verified = UndoProcess::start().and_then(|undo| {
        let cpus = chosen(&args.cpus);
        facts::verify(&device, &cpus, &mut Back(undo))
    });
    leave_as_before(device, prepared);
    let report = verified?;
    say.done(&report);
    Ok(if report.equal { Exit::Done } else { Exit::Failed })
}

/// Removes what was loaded for the comparison alone.
fn leave_as_before(device: Device, prepared: Prepared) {
    // Another process may have begun to use the hypervisor or the driver; then they stay.
    if prepared.hypervisor_loaded {
        let _ = device.unload();
    }
    drop(device);
    if prepared.driver_inserted {
        let _ = module::remove();
    }
}

/// The undo process, which switches a CPU back if this process is killed.
struct Back(UndoProcess);

impl Care for Back {
    fn will(&mut self, cpu: u32, back: Direction) -> Result<()> {
        let step = Undo::Switch { cpu, attach: back == Direction::Attach };
        self.0.will(&step).map_err(|error| {
            Error::new(Exit::Failed, format!("the undo process is gone: {error}"))
                .hint("`dmesg` may say more")
        })
    }

    fn is_back(&mut self) {
        self.0.is_undone();
    }
}

/// Returns the named CPUs, or all that are online.
fn chosen(args: &CpusArgs) -> CpuSet {
    args.cpus.clone().unwrap_or_else(|| Sysroot::default().online_cpus())
}
