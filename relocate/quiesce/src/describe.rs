//! The description of a machine in its image: the part from /proc and /sys, without the driver's
//! part.

use super::{boot_map, cpuid, guest, xsave};
use mercury_abi::restart::{MERCURY_RANGE_KEPT, MERCURY_RESTART_FIVE_LEVEL, MERCURY_RESTART_X2APIC};
use mercury_control::{device::Restart, sysroot::Sysroot};
use mercury_image::{Cpu, Device, FirmwareRange, Iommu, Kind, Machine, Processor, Range, Resume, VmCoreInfo};
use std::{collections::BTreeSet, time::SystemTime};

/// Describes this machine. The driver's part comes from [`add_restart`], and file systems from the
/// code that freezes them.
#[must_use]
pub fn describe(sysroot: &Sysroot) -> Machine {
    let text = |file| sysroot.text(file).unwrap_or_default();
    Machine {
        taken_at: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
        host: text("proc/sys/kernel/hostname"),
        kernel: text("proc/version"),
        release: text("proc/sys/kernel/osrelease"),
        command_line: text("proc/cmdline"),
        boot_id: text("proc/sys/kernel/random/boot_id"),
        mercury: env!("CARGO_PKG_VERSION").to_owned(),
        processor: Processor {
            xsave: xsave::components(),
            leaves: cpuid::leaves(),
            ..processor(&text("proc/cpuinfo"))
        },
        firmware: firmware(sysroot),
        vmcoreinfo: vmcoreinfo(&text("sys/kernel/vmcoreinfo")),
        devices: devices(sysroot),
        iommus: Some(iommus(sysroot)),
        ..Machine::default()
    }
}

/// Adds the driver's part.
pub fn add_restart(machine: &mut Machine, restart: &Restart) {
    machine.cpus = restart
        .cpus
        .iter()
        .map(|cpu| Cpu { cpu: cpu.cpu, apic_id: cpu.apic_id, saved_phys: cpu.saved_phys })
        .collect();
    machine.ranges = restart
        .ranges
        .iter()
        .map(|range| Range {
            start_phys: range.start_phys,
            pages: range.pages,
            kind: if range.kind == MERCURY_RANGE_KEPT { Kind::Kept } else { Kind::Free },
        })
        .collect();
    machine.ranges.sort_by_key(|range| range.start_phys);
    machine.resume = Resume {
        virt: restart.resume_virt,
        phys: restart.resume_phys,
        five_level: restart.flags & MERCURY_RESTART_FIVE_LEVEL != 0,
        x2apic: restart.flags & MERCURY_RESTART_X2APIC != 0,
    };
}

/// Reads the first processor's part of /proc/cpuinfo.
#[must_use]
pub fn processor(cpuinfo: &str) -> Processor {
    let first = cpuinfo.split("\n\n").next().unwrap_or_default();
    let value = |name: &str| {
        let line = first.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split_once(':'))
            .map_or_else(String::new, |(_, value)| value.trim().to_owned())
    };
    let number = |name| value(name).parse().unwrap_or(0);
    let flags: BTreeSet<String> = value("flags").split_whitespace().map(str::to_owned).collect();
    Processor {
        vendor: value("vendor_id"),
        model: value("model name"),
        signature: [number("cpu family"), number("model"), number("stepping")],
        microcode: value("microcode"),
        flags: flags.into_iter().collect(),
        xsave: Vec::new(),
        leaves: Vec::new(),
    }
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

/// Returns the memory map that the firmware gives at each boot.
///
/// The kernel adds memory that is plugged in to the map that it shows. A restore environment does
/// not use such memory, so its map does not show it. The driver asks ACPI if that memory is there.
fn firmware(sysroot: &Sysroot) -> Vec<FirmwareRange> {
    let entry = |name: &String| {
        let field = |field| sysroot.text(&format!("sys/firmware/memmap/{name}/{field}"));
        Some(FirmwareRange {
            start_phys: hexadecimal(&field("start")?)?,
            last_phys: hexadecimal(&field("end")?)?,
            kind: field("type")?,
        })
    };
    let mut ranges: Vec<_> = sysroot.names("sys/firmware/memmap").iter().filter_map(entry).collect();
    let boot = boot_map::of(sysroot);
    // If the kernel does not show the boot loader's map, every range counts.
    ranges.retain(|range| boot.is_empty() || boot.iter().any(|given| given.overlaps(range)));
    ranges.sort();
    ranges
}

/// Returns the place of the kernel's note for crash-dump tools.
#[must_use]
pub fn crash_note(sysroot: &Sysroot) -> Option<VmCoreInfo> {
    vmcoreinfo(&sysroot.text("sys/kernel/vmcoreinfo").unwrap_or_default())
}

/// Parses two hexadecimal numbers: address and length.
fn vmcoreinfo(text: &str) -> Option<VmCoreInfo> {
    let (phys, bytes) = text.split_once(' ')?;
    Some(VmCoreInfo { phys: hexadecimal(phys)?, bytes: hexadecimal(bytes)? })
}

/// Describes the PCI devices. A guest's description has those of its hardware too, which it will need again.
pub fn devices(sysroot: &Sysroot) -> Vec<Device> {
    let mut found = present(sysroot);
    if let Some(metal) = guest::recalled(sysroot) {
        found.extend(metal.absent(&found));
        found.sort_by(|one, other| one.address.cmp(&other.address));
    }
    found
}

fn present(sysroot: &Sysroot) -> Vec<Device> {
    let device = |address: &String| {
        let folder = format!("sys/bus/pci/devices/{address}");
        let field = |field: &str| sysroot.text(&format!("{folder}/{field}")).unwrap_or_default();
        let number = |name| field(name).trim_start_matches("0x").to_owned();
        let driver = std::fs::read_link(sysroot.path(&format!("{folder}/driver"))).ok();
        Device {
            address: address.clone(),
            id: format!("{}:{}", number("vendor"), number("device")),
            class: number("class"),
            driver: driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())),
            ..Device::default()
        }
    };
    sysroot.names("sys/bus/pci/devices").iter().map(device).collect()
}

/// Describes the IOMMUs. Intel's have an address and features; AMD's have features only, because
/// they are PCI devices as well.
fn iommus(sysroot: &Sysroot) -> Vec<Iommu> {
    const REGISTERS: [&str; 5] =
        ["intel-iommu/address", "intel-iommu/cap", "intel-iommu/ecap", "amd-iommu/cap", "amd-iommu/features"];
    let iommu = |name: &String| {
        let register = |file: &&str| sysroot.text(&format!("sys/class/iommu/{name}/{file}"));
        Iommu { name: name.clone(), registers: REGISTERS.iter().filter_map(register).collect() }
    };
    sysroot.names("sys/class/iommu").iter().map(iommu).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn iommus_are_told_apart() {
        let root = tempfile::tempdir().expect("a folder");
        let file = |path: &str, text: &str| {
            let path = root.path().join("sys/class/iommu").join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        assert_eq!(iommus(&Sysroot::at(root.path())), []);
        file("dmar0/intel-iommu/address", "fed90000\n");
        file("dmar0/intel-iommu/cap", "d2008c222f0606\n");
        file("dmar0/intel-iommu/domains_used", "3\n");
        let found = iommus(&Sysroot::at(root.path()));
        assert_eq!(found[0].name, "dmar0");
        assert_eq!(found[0].registers, ["fed90000", "d2008c222f0606"], "and nothing that changes");
    }

    /// The kernel shows the memory of a DIMM as the firmware's; a restore environment does not.
    #[test]
    fn plugged_memory_is_not_the_firmware_s() {
        let root = tempfile::tempdir().expect("a folder");
        let file = |path: &str, bytes: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, bytes).expect("a file");
        };
        let ranges = [
            ("0", "0x0", "0x9ffff", "System RAM"),
            ("1", "0x100000000", "0x107ffffff", "System RAM"),
            ("2", "0x9fc00", "0x9ffff", "Reserved"),
        ];
        for (name, start, end, kind) in ranges {
            for (field, text) in [("start", start), ("end", end), ("type", kind)] {
                file(&format!("sys/firmware/memmap/{name}/{field}"), text.as_bytes());
            }
        }
        let found = || firmware(&Sysroot::at(root.path()));
        assert_eq!(found().len(), 3, "nothing tells what is plugged in");
        file(
            "sys/kernel/boot_params/data",
            &boot_map::tests::parameters(&[(0, 0x9_FC00), (0x9_FC00, 0x400)]),
        );
        let starts: Vec<_> = found().iter().map(|range| range.start_phys).collect();
        assert_eq!(starts, [0, 0x9_FC00]);
    }

    #[test]
    fn processors() {
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\n\
                    model name\t: EPYC\nstepping\t: 2\nmicrocode\t: 0x1000065\nflags\t\t: svm fpu svm\n\n\
                    processor\t: 1\nvendor_id\t: Other\n";
        let found = processor(text);
        assert_eq!((found.vendor.as_str(), found.signature), ("AuthenticAMD", [25, 1, 2]));
        assert_eq!(found.flags, ["fpu", "svm"]);
        assert_eq!(found.microcode, "0x1000065");
    }

    #[test]
    fn places() {
        assert_eq!(vmcoreinfo("7ff2000 1024"), Some(VmCoreInfo { phys: 0x7ff_2000, bytes: 0x1024 }));
        assert_eq!(vmcoreinfo(""), None);
    }
}
