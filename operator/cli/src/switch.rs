//! `mercury load`, `unload`, `attach` and `detach`.

use crate::{doctor, shared::ModuleArgs};
use clap::Args;
use mercury_abi::code::Code;
use mercury_control::{
    access::{control_if_loaded, controlled, load_hypervisor, loaded, need_root},
    cpus::CpuSet,
    device::Device,
    driver::Direction,
    error::{Error, Result},
    interrupt::Deferred,
    module,
    output::Format,
    progress,
    switch::{self, LoadReport, Prepared, SwitchReport, UnloadReport},
    sysroot::{Module, Sysroot},
};
use std::io::IsTerminal;

#[derive(Debug, Args)]
pub struct UnloadArgs {
    /// Detach first if CPUs are attached
    #[arg(long)]
    pub detach: bool,
    /// Leave the driver loaded and free only the hypervisor
    #[arg(long)]
    pub keep_driver: bool,
}

#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Only these CPUs, such as 0-3,8 [default: all online CPUs]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Unload KVM without asking if it holds the hardware and no virtual machine uses it
    #[arg(long)]
    pub unload_kvm: bool,
    /// Attach on a kernel of a major version that Mercury was never tested on
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Only these CPUs, such as 0-3,8 [default: all]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
}

/// Loads the driver and the hypervisor.
///
/// # Errors
///
/// Returns an error if the driver or the hypervisor cannot be loaded.
pub fn load(args: &ModuleArgs) -> Result<LoadReport> {
    let deferred = Deferred::begin();
    let (device, prepared) = loaded(args.module.as_deref(), "load")?;
    drop(deferred);
    LoadReport::collect(&device, prepared)
}

/// Frees the hypervisor and removes the driver.
///
/// # Errors
///
/// Returns an error if CPUs are attached, or if the driver is in use.
pub fn unload(args: &UnloadArgs) -> Result<UnloadReport> {
    need_root("unload")?;
    let _deferred = Deferred::begin();
    let Some(device) = control_if_loaded()? else {
        return Ok(UnloadReport { detached: 0, hypervisor_freed: false, driver_removed: false });
    };
    let mut report = progress::during("unloading", || switch::free(&device, args.detach))?;
    drop(device);
    if !args.keep_driver {
        module::remove()?;
        report.driver_removed = true;
    }
    Ok(report)
}

/// Attaches CPUs. Loads the driver and the hypervisor first if needed.
///
/// # Errors
///
/// Returns an error if a CPU cannot be attached: all CPUs are native then.
pub fn attach(args: &AttachArgs, format: Format) -> Result<SwitchReport> {
    need_root("attach")?;
    all_online("attach", args.cpus.as_ref())?;
    let version = doctor::machine::version_code(&doctor::machine::release()).unwrap_or(0);
    if let Some(error) = doctor::system::refused_kernel(version).filter(|_| !args.force) {
        return Err(error);
    }
    let (device, mut prepared) = controlled(args.module.module.as_deref(), "attach")?;
    let report = match load_and_attach(&device, args.cpus.as_ref(), &mut prepared) {
        Err(error) if error.code == Some(Code::VirtualizationInUse) => {
            make_kvm_let_go(args, format, error)?;
            prepared.kvm_unloaded = true;
            load_and_attach(&device, args.cpus.as_ref(), &mut prepared)
        }
        result => result,
    };
    let sysroot = Sysroot::default();
    match report {
        Ok(report) => Ok(report.note(module::departure(&module::kvm_departs(&sysroot)))),
        Err(error) if error.code == Some(Code::VirtualizationInUse) && prepared.kvm_unloaded => {
            Err(held_by(&module::holders(&sysroot), error))
        }
        Err(error) => Err(error),
    }
}

/// Loads and attaches. Either step can fail because another hypervisor uses the hardware.
fn load_and_attach(device: &Device, cpus: Option<&CpuSet>, prepared: &mut Prepared) -> Result<SwitchReport> {
    prepared.hypervisor_loaded |= load_hypervisor(device)?;
    switch_deferred(device, Direction::Attach, cpus, *prepared)
}

/// Detaches CPUs.
///
/// # Errors
///
/// Returns an error if a CPU cannot be detached.
pub fn detach(args: &DetachArgs) -> Result<SwitchReport> {
    need_root("detach")?;
    all_online("detach", args.cpus.as_ref())?;
    let Some(device) = control_if_loaded()? else { return Ok(switch::nothing_to_detach()) };
    switch_deferred(&device, Direction::Detach, args.cpus.as_ref(), Prepared::default())
}

/// Runs a switch to its end even after Ctrl-C, so that it is never done in part.
fn switch_deferred(
    device: &Device,
    direction: Direction,
    cpus: Option<&CpuSet>,
    prepared: Prepared,
) -> Result<SwitchReport> {
    let _deferred = Deferred::begin();
    let label = format!("{}ing", direction.name());
    progress::during(&label, || switch::switch(device, direction, cpus, prepared))
}

/// Refuses a CPU that cannot be switched, before the switch begins.
fn all_online(action: &str, cpus: Option<&CpuSet>) -> Result<()> {
    let online = Sysroot::default().online_cpus();
    let missing = cpus.and_then(|cpus| cpus.iter().find(|cpu| !online.contains(*cpu)));
    missing.map_or(Ok(()), |cpu| Err(Error::refused(action, Code::CpuOffline, Some(cpu), [0; 2])))
}

/// Unloads a KVM without virtual machines, if the operator wants that. Otherwise returns the error,
/// with the modules that may hold the hardware.
fn make_kvm_let_go(args: &AttachArgs, format: Format, error: Error) -> Result<()> {
    let holders = module::holders(&Sysroot::default());
    let unused = holders.iter().find(|module| module::is_unused_kvm(module));
    let can_ask = format == Format::Text && !holders.iter().any(module::is_rival);
    match unused.filter(|kvm| args.unload_kvm || (can_ask && agreed(&kvm.name))) {
        Some(kvm) => module::remove_kvm(kvm),
        None => Err(held_by(&holders, error)),
    }
}

/// Adds the modules that hold the hardware to the error, and how to unload them.
fn held_by(holders: &[Module], error: Error) -> Error {
    let Some(names) = module::names(holders) else { return error };
    Error { message: format!("{}; {names} holds it", error.message), hint: module::release(holders), ..error }
}

/// Asks the operator on the terminal, if there is one.
fn agreed(holder: &str) -> bool {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return false;
    }
    eprint!("{holder} holds the hardware, and no virtual machine uses it. Unload it? [y/N] ");
    let mut answer = String::new();
    let read = std::io::stdin().read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}
