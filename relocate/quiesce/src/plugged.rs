//! Memory that a restore environment would not find, because a driver makes it available after each boot.
//!
//! The driver decides (`switch/driver/snapshot/plugged.c`), with the firmware's map and ACPI's devices. Here
//! its refusal is predicted from what the kernel shows.

use super::boot_map;
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    sysroot::Sysroot,
};
use mercury_image::FirmwareRange;

/// Identifier of a memory device of ACPI's: a DIMM in a slot.
const DIMM: &str = "PNP0C80";
/// `_STA`: the device is present and enabled.
const PRESENT: u64 = 0b11;

/// Refuses a machine with memory that only a driver makes available.
///
/// # Errors
///
/// Returns an error that names the memory.
pub fn refuse(sysroot: &Sysroot) -> Result<()> {
    let boot = boot_map::of(sysroot);
    // Without the boot loader's map only the driver can tell.
    if boot.is_empty() {
        return Ok(());
    }
    let is_plugged = |range: &FirmwareRange| !boot.iter().any(|given| given.overlaps(range));
    let ranges = sysroot.text("proc/iomem").unwrap_or_default();
    // Memory of a driver has the driver's name, except that of Hyper-V's and Xen's.
    let is_found = |range: &FirmwareRange| range.kind == "System RAM" && has_dimm(sysroot);
    let ranges = ranges.lines().filter_map(memory).filter(is_plugged).filter(|range| !is_found(range));
    let named: Vec<_> = ranges.map(|range| name(&range)).collect();
    if named.is_empty() {
        return Ok(());
    }
    let text = format!("a restore environment does not find this memory: {}", named.join(", "));
    Err(Error::coded(Code::RestoreMemory, text))
}

fn name(range: &FirmwareRange) -> String {
    format!("{:#x}–{:#x} ({})", range.start_phys, range.last_phys, range.kind)
}

/// Parses a range of memory from a line of /proc/iomem. Memory of virtio-mem is a part of its device's range.
fn memory(line: &str) -> Option<FirmwareRange> {
    let (range, kind) = line.trim_start().split_once(" : ")?;
    let (start, last) = range.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    kind.starts_with("System RAM").then_some(())?;
    Some(FirmwareRange { start_phys: address(start)?, last_phys: address(last)?, kind: kind.to_owned() })
}

fn has_dimm(sysroot: &Sysroot) -> bool {
    const FOLDER: &str = "sys/bus/acpi/devices";
    let is_dimm = |name: &String| {
        let status =
            sysroot.text(&format!("{FOLDER}/{name}/status")).and_then(|text| text.parse::<u64>().ok());
        name.starts_with(DIMM) && status.is_none_or(|status| status & PRESENT == PRESENT)
    };
    sysroot.names(FOLDER).iter().any(is_dimm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn memory_of_drivers_is_named() {
        let root = tempfile::tempdir().expect("a folder");
        let file = |path: &str, bytes: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, bytes).expect("a file");
        };
        let refused = || refuse(&Sysroot::at(root.path())).map_err(|error| error.message);
        let firmwares = "00001000-0009fbff : System RAM\n  00001000-00001fff : Kernel code\n\
            000a0000-000bffff : PCI Bus 0000:00\n";
        let virtio = "100000000-107ffffff : virtio1\n  100000000-107ffffff : System RAM (virtio_mem)\n";
        file("proc/iomem", format!("{firmwares}{virtio}").as_bytes());
        assert_eq!(refused(), Ok(()), "nothing tells what is plugged in");
        let parameters = boot_map::tests::parameters(&[(0, 0x9_FC00), (0x9_FC00, 0x400)]);
        file("sys/kernel/boot_params/data", &parameters);
        let message = refused().expect_err("a driver's");
        assert!(message.contains("0x100000000–0x107ffffff (System RAM (virtio_mem))"), "{message}");
        assert!(message.ends_with("[restore-memory]"), "{message}");
        file("proc/iomem", format!("{firmwares}100000000-107ffffff : System RAM\n").as_bytes());
        assert!(refused().is_err(), "Hyper-V's");
        file("sys/bus/acpi/devices/PNP0C80:00/status", b"15\n");
        assert_eq!(refused(), Ok(()), "a DIMM in a slot");
        file("sys/bus/acpi/devices/PNP0C80:00/status", b"0\n");
        assert!(refused().is_err(), "an empty slot");
        file("proc/iomem", firmwares.as_bytes());
        assert_eq!(refused(), Ok(()));
    }
}
