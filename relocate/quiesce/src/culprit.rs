//! The device that kept the kernel from stopping all devices.

use mercury_abi::code::Code;
use mercury_control::{error::Error, sysroot::Sysroot};

/// Returns the number of devices that did not stop since boot. The kernel keeps the name of the
/// last one for ever.
pub fn quiesce_failures(sysroot: &Sysroot) -> u64 {
    let folder = "sys/power/suspend_stats";
    let count = |name: &String| sysroot.text(&format!("{folder}/{name}"))?.parse::<u64>().ok();
    sysroot.names(folder).iter().filter(|name| name.starts_with("failed_")).filter_map(count).sum()
}

/// Adds the device that did not stop to an error, if the kernel names it; before,
/// [`quiesce_failures`] was `failures`.
pub fn name_culprit(mut error: Error, failures: u64, sysroot: &Sysroot) -> Error {
    if quiesce_failures(sysroot) == failures {
        return error;
    }
    let stats =
        |file| sysroot.text(&format!("sys/power/suspend_stats/{file}")).filter(|text| !text.is_empty());
    if error.code == Some(Code::SnapshotQuiesce)
        && let Some(device) = stats("last_failed_dev")
    {
        let step = stats("last_failed_step").map(|step| format!(", at step {step}")).unwrap_or_default();
        error.message += &format!(": device {device}{step}");
        error.hint =
            Some(format!("unbind the driver of {device}, or end the programs that use it, and try again"));
    }
    error
}
