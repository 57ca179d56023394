//! Access to the driver for a command: as root, with driver and hypervisor loaded if they are not.

use crate::{
    device::{Access, Device},
    driver::Driver,
    error::{Error, Result},
    exit::Exit,
    module, monitor, processor, progress,
    status::Status,
    sudo,
    switch::{self, Prepared},
    sysroot::Sysroot,
};
use mercury_abi::{
    code::Code,
    facts::CpuFacts,
    ioctl::{MERCURY_FEATURE_MONITOR, MERCURY_STATE_UNLOADED},
};
use std::path::Path;

/// Refuses a user who is not root.
pub fn need_root(action: &str) -> Result<()> {
    let error = || Error::new(Exit::Permission, format!("{action} needs root")).hint(sudo::again());
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(error()) }
}

/// Loads the driver and opens it for control.
pub fn controlled(module: Option<&Path>, action: &str) -> Result<(Device, Prepared)> {
    need_root(action)?;
    let mut driver_inserted = false;
    for _ in 0..INSERTIONS {
        driver_inserted |=
            progress::during("loading the driver", || module::insert(module, &Sysroot::default()))
                .map_err(|error| without_driver(error, &processor::cpuid_facts(), action))?;
        match Device::open(Access::Control) {
            // Another process has removed the driver since.
            Err(error) if error.code == Some(Code::NotLoaded) => {}
            opened => return Ok((opened?, Prepared { driver_inserted, ..Prepared::default() })),
        }
    }
    Err(Error::new(Exit::Busy, "another process removes the driver again and again")
        .hint("wait until that process (`mercury unload`) ends, and repeat the command"))
}

/// Improves the error for a driver that cannot be loaded: a refusal that no driver could change
/// comes first.
fn without_driver(error: Error, cpuid: &CpuFacts, action: &str) -> Error {
    let Some(refusal) = processor::refused_processor(cpuid, action) else { return error };
    Error { message: format!("{}; besides, {}", refusal.message, error.message), ..refusal }
}

/// How often the driver is loaded again if another process removes it at once.
const INSERTIONS: usize = 3;

/// Opens the device for control when no other process loads or removes the driver. Returns none
/// without a driver.
pub fn control_if_loaded() -> Result<Option<Device>> {
    if !module::settles_as_loaded(&Sysroot::default())? {
        return Ok(None);
    }
    match Device::open(Access::Control) {
        // Another process has removed the driver since.
        Err(error) if error.code == Some(Code::NotLoaded) => Ok(None),
        opened => opened.map(Some),
    }
}

/// Loads the driver and the hypervisor, and opens the driver for control.
pub fn loaded(module: Option<&Path>, action: &str) -> Result<(Device, Prepared)> {
    let (device, mut prepared) = controlled(module, action)?;
    prepared.hypervisor_loaded = load_hypervisor(&device)?;
    Ok((device, prepared))
}

/// Loads the driver and opens it for control, and loads the hypervisor unless a monitor stands in for it.
pub fn loaded_for_move(module: Option<&Path>, action: &str) -> Result<Device> {
    let (device, _) = controlled(module, action)?;
    if !is_monitored(&device)? {
        load_hypervisor(&device)?;
    }
    Ok(device)
}

/// Returns true if this machine is a guest whose monitor stands in for the hypervisor, which is not loaded.
pub fn is_monitored(device: &Device) -> Result<bool> {
    let system = device.system()?;
    Ok(system.features & MERCURY_FEATURE_MONITOR != 0 && system.state == MERCURY_STATE_UNLOADED)
}

/// Loads the hypervisor unless it is loaded. Returns true if this call loaded it.
pub fn load_hypervisor(device: &Device) -> Result<bool> {
    progress::during("loading the hypervisor into memory", || switch::ensure_loaded(device))
}

/// Opens the driver for reading only.
pub fn observe() -> Result<Device> {
    Device::open(Access::Observe)
}

/// Reads the status, also without a driver.
pub fn current_status() -> Result<Status> {
    let status = match observe() {
        Ok(device) => Status::collect(&device),
        Err(error) if error.code == Some(Code::NotLoaded) => Ok(Status::without_driver(&Sysroot::default())),
        Err(error) => Err(error),
    };
    Ok(Status { guest: monitor::is_guest(), ..status? })
}
