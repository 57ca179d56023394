//! Whether an image fits this machine: every reason why not, before anything is given up.

use crate::{checkpoint::disks, output::bytes, sysroot::Sysroot};
use mercury_image::{Device, FileSystem, Machine};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Why the machine of an image cannot go on here, but for its disks.
#[must_use]
pub fn differences(image: &Machine, here: &Machine) -> Vec<String> {
    let mut found = Vec::new();
    if image.kernel != here.kernel {
        found.push(format!("the kernel is “{}”, the image's “{}”", here.kernel, image.kernel));
    }
    if image.mercury != here.mercury {
        found.push(format!("Mercury is {}, the image's {}", here.mercury, image.mercury));
    }
    processor(image, here, &mut found);
    if image.firmware != here.firmware {
        found.push(memory(image, here));
    }
    devices(image, here, &mut found);
    found
}

fn processor(image: &Machine, here: &Machine, found: &mut Vec<String>) {
    let (theirs, ours) = (&image.processor, &here.processor);
    if (&theirs.vendor, theirs.signature) != (&ours.vendor, ours.signature) {
        let name = |processor: &mercury_image::Processor| {
            let [family, model, stepping] = processor.signature;
            format!("{} (family {family}, model {model}, stepping {stepping})", processor.model)
        };
        found.push(format!("the processor is {}, the image's {}", name(ours), name(theirs)));
    }
    let missing: Vec<_> =
        theirs.flags.iter().filter(|flag| !ours.flags.contains(flag)).map(String::as_str).collect();
    if !missing.is_empty() {
        found.push(format!("the processor lacks {}", missing.join(", ")));
    }
    if theirs.microcode != ours.microcode {
        found.push(format!("the microcode is {}, the image's {}", ours.microcode, theirs.microcode));
    }
}

/// The first difference says most.
fn memory(image: &Machine, here: &Machine) -> String {
    let name = |range: &mercury_image::FirmwareRange| {
        format!("{:#x}–{:#x} ({})", range.start_phys, range.last_phys, range.kind)
    };
    let pairs = image.firmware.iter().zip(&here.firmware).find(|(theirs, ours)| theirs != ours);
    match pairs {
        Some((theirs, ours)) => {
            format!("the firmware's memory map has {}, the image's {}", name(ours), name(theirs))
        }
        None => {
            let total = |machine: &Machine| {
                machine.firmware.iter().map(|range| range.last_phys - range.start_phys + 1).sum()
            };
            format!(
                "the firmware's memory map is of {}, the image's of {}",
                bytes(total(here)),
                bytes(total(image))
            )
        }
    }
}

fn devices(image: &Machine, here: &Machine, found: &mut Vec<String>) {
    let same = |left: &Device, right: &Device| left.address == right.address && left.id == right.id;
    for device in &image.devices {
        if !here.devices.iter().any(|ours| same(ours, device)) {
            let driver = device.driver.as_deref().unwrap_or("no driver");
            found.push(format!("device {} ({}, {driver}) is missing", device.address, device.id));
        }
    }
    for device in &here.devices {
        if !image.devices.iter().any(|theirs| same(theirs, device)) {
            found.push(format!("device {} ({}) is new", device.address, device.id));
        }
    }
}

/// Which of the image's file systems are not as they were at the instant.
#[must_use]
pub fn changed_disks(file_systems: &[FileSystem]) -> Vec<String> {
    file_systems.iter().filter_map(changed).collect()
}

fn changed(file_system: &FileSystem) -> Option<String> {
    let name = format!(
        "the {} file system of {} ({})",
        file_system.kind, file_system.mounted_at, file_system.device
    );
    let Some(mark) = &file_system.mark else {
        return Some(format!("{name} could not be marked at the instant: whether it changed cannot be told"));
    };
    let device = match disks::find(file_system, &Sysroot::default()) {
        Ok(device) => device,
        Err(why) => return Some(format!("{name}: {why}")),
    };
    match disks::mark(&device, &file_system.kind) {
        Ok(found) if found == *mark => None,
        Ok(_) => Some(format!("{name} was written to after the instant")),
        Err(error) => Some(format!("{name} cannot be read: {error}")),
    }
}

/// Waits for disks that are not there yet.
pub fn wait_for_disks(file_systems: &[FileSystem], patience: Duration) {
    let end = Instant::now() + patience;
    let missing = |file_system: &FileSystem| {
        file_system.uuid.is_some() && disks::find(file_system, &Sysroot::default()).is_err()
    };
    while file_systems.iter().any(missing) && Instant::now() < end {
        thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{FirmwareRange, Processor};

    fn machine() -> Machine {
        let ram = FirmwareRange { start_phys: 0, last_phys: 0xFFFF, kind: "System RAM".into() };
        Machine {
            processor: Processor { vendor: "A".into(), flags: vec!["fpu".into()], ..Processor::default() },
            firmware: vec![ram],
            devices: vec![Device { address: "0000:00:01.0".into(), id: "1:2".into(), ..Device::default() }],
            ..Machine::default()
        }
    }

    #[test]
    fn every_reason_is_given() {
        assert_eq!(differences(&machine(), &machine()), Vec::<String>::new());
        let mut other = machine();
        other.processor.flags.clear();
        other.processor.microcode = "2".into();
        other.firmware[0].last_phys = 0x1_FFFF;
        other.devices[0].id = "1:3".into();
        let found = differences(&machine(), &other);
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(found[0].contains("lacks fpu"), "{found:?}");
        assert!(found[2].contains("0x1ffff"), "{found:?}");
    }
}
