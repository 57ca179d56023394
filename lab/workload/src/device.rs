//! The device `/dev/mercury`.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    ptr,
};

use mercury_abi::{
    Header,
    code::Code,
    facts::CpuFacts,
    ioctl::{
        LoadRequest, MERCURY_IOC_FACTS, MERCURY_IOC_LOAD, MERCURY_IOC_SYSTEM, MERCURY_STATE_UNLOADED,
        Outcome, SwitchRequest, SwitchResult, SystemInfo,
    },
};

use crate::{Result, cpus::check};

const PATH: &str = "/dev/mercury";

/// Opens the device read-only.
pub fn open_read_only() -> io::Result<File> {
    File::open(PATH)
}

/// Opens the device as its controller.
pub fn open_to_control() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(PATH)
}

/// Calls an ioctl with a request of the right type.
pub fn request<T: Copy>(device: &File, command: u32, request: &mut T) -> io::Result<()> {
    // SAFETY: `T` is what the command takes: its number holds the size, and the driver checks it.
    unsafe { raw_request(device, command, ptr::from_mut(request) as u64) }
}

/// Calls an ioctl with any address.
///
/// # Safety
/// No memory of this process may be at the address, unless it is meant to be written by the driver.
pub unsafe fn raw_request(device: &File, command: u32, address: u64) -> io::Result<()> {
    // SAFETY: by contract.
    check(unsafe { libc::ioctl(device.as_raw_fd(), libc::c_ulong::from(command), address) })?;
    Ok(())
}

/// Reads the driver's description of itself.
pub fn system(device: &File) -> Result<SystemInfo> {
    let mut info = SystemInfo { header: Header::of::<SystemInfo>(), ..SystemInfo::default() };
    request(device, MERCURY_IOC_SYSTEM, &mut info)?;
    Ok(info)
}

/// Reads the facts of a CPU.
pub fn facts(device: &File, cpu: usize) -> Result<CpuFacts> {
    let mut facts = CpuFacts { header: Header::of::<CpuFacts>(), cpu: cpu as u32, ..CpuFacts::default() };
    request(device, MERCURY_IOC_FACTS, &mut facts)?;
    Ok(facts)
}

/// Loads the hypervisor, unless it is loaded.
pub fn load(device: &File) -> Result<()> {
    if system(device)?.state != MERCURY_STATE_UNLOADED {
        return Ok(());
    }
    let mut load = LoadRequest { header: Header::of::<LoadRequest>(), ..LoadRequest::default() };
    request(device, MERCURY_IOC_LOAD, &mut load).map_err(|error| explain(error, load.outcome))
}

/// Attaches or detaches the CPUs in `mask` (0: all). Returns a result for each CPU that has
/// switched.
pub fn switch(device: &File, command: u32, mask: u64, flags: u64) -> Result<Vec<SwitchResult>> {
    let mut results = vec![SwitchResult::default(); 64];
    let mask = [mask];
    let all = mask == [0];
    let mut change = SwitchRequest {
        header: Header::of::<SwitchRequest>(),
        flags,
        mask_addr: if all { 0 } else { mask.as_ptr() as u64 },
        mask_words: u32::from(!all),
        results_count: results.len() as u32,
        results_addr: results.as_mut_ptr() as u64,
        ..SwitchRequest::default()
    };
    request(device, command, &mut change).map_err(|error| explain(error, change.outcome))?;
    results.truncate(change.results_count as usize);
    Ok(results)
}

/// Returns the driver's code in words.
pub fn explain(error: io::Error, outcome: Outcome) -> crate::Error {
    let name = Code::from_number(outcome.code).map_or("an unknown code", Code::name);
    format!("{name} on CPU {} ({error}), details {:x?}", outcome.cpu as i32, outcome.detail).into()
}
