//! Disks on AHCI.

use super::{Controller, Kind, Known, Opened, device, function, given};
use mercury_control::output::bytes;
use mercury_controllers::ahci::{Drive, FIRST_PORT, Identity, PORT, PORTS_MAX, Properties};
use mercury_image::{AhciController, AhciDisk, Machine};

/// Number of the base address register with a controller's registers.
pub const REGISTERS: usize = 5;
/// Interrupts of KVM's IOAPIC.
const LINES: u32 = 24;

/// Lists the disks of a controller.
pub fn disks(controller: &AhciController) -> impl Iterator<Item = Known<'_>> {
    own(controller).map(|(_, disk)| Known { name: &disk.name, label: label(disk) })
}

fn own(controller: &AhciController) -> impl Iterator<Item = (usize, &AhciDisk)> {
    controller.ports.iter().filter_map(|port| Some((port.number as usize, port.disk.as_ref()?)))
}

/// Describes a disk so that an operator finds its content.
fn label(disk: &AhciDisk) -> String {
    let Ok(identity) = Identity::new(&disk.identify) else {
        return format!("{} (of unknown size)", disk.name);
    };
    let size = identity.bytes().map_or_else(|| "of unknown size".into(), bytes);
    format!("{} ({}, serial number {}, {size})", disk.name, identity.model(), identity.serial())
}

/// Plans a controller, if one of its disks was given.
pub fn plan(
    machine: &Machine,
    theirs: &AhciController,
    opened: &[Opened<'_>],
) -> Option<Result<Controller, String>> {
    let is_given = own(theirs).any(|(_, disk)| given(opened, &disk.name).is_some());
    is_given.then(|| controller(machine, theirs, opened))
}

fn controller(
    machine: &Machine,
    theirs: &AhciController,
    opened: &[Opened<'_>],
) -> Result<Controller, String> {
    let device = device(machine, &theirs.address)?;
    if let Some(port) = theirs.ports.iter().find(|port| port.has_multiplier) {
        return Err(format!("its port {} has a port multiplier", port.number + 1));
    }
    if !theirs.has_messages && theirs.line.is_none_or(|line| line >= LINES) {
        return Err("it raises its interrupts neither by messages (MSI) nor at the first IOAPIC".into());
    }
    let function = function(device)?;
    let last = theirs.ports.iter().map(|port| port.number as usize).max().unwrap_or(0);
    let ports = (last + 1).max(theirs.capabilities as usize % PORTS_MAX + 1);
    let end = FIRST_PORT + PORT * ports as u64;
    if ports > PORTS_MAX || function.registers_end(REGISTERS) < end {
        return Err(format!("its PCI device has no room for {ports} ports"));
    }
    // The driver would search for a disk that is not there for many seconds, and hold up the machine.
    if let Some((_, missing)) = own(theirs).find(|(_, disk)| given(opened, &disk.name).is_none()) {
        let (name, label) = (&missing.name, label(missing));
        return Err(format!(
            "it has the disk {label} too: give its content as well, with --disk {name}=FILE"
        ));
    }
    let drives = own(theirs)
        .filter_map(|(port, disk)| Some((port, disk, given(opened, &disk.name)?)))
        .map(|(port, disk, opened)| Ok((port, drive(disk, opened)?)))
        .collect::<Result<_, String>>()?;
    let properties = Properties {
        capabilities: theirs.capabilities,
        more: theirs.more_capabilities,
        version: theirs.version,
        ports: commands(theirs, ports),
    };
    let kind = Kind::Ahci { properties, drives, line: theirs.line };
    Ok(Controller { address: theirs.address.clone(), function, kind })
}

/// Returns the registers of commands, in the order of the ports.
fn commands(theirs: &AhciController, ports: usize) -> Vec<u32> {
    let of = |number: usize| theirs.ports.iter().find(|port| port.number as usize == number);
    (0..ports).map(|number| of(number).map_or(0, |port| port.command)).collect()
}

fn drive(disk: &AhciDisk, opened: &Opened<'_>) -> Result<Drive, String> {
    let identity = Identity::new(&disk.identify).map_err(|why| format!("{}: {why}", disk.name))?;
    let content = opened.content(identity.bytes())?;
    Ok(Drive::new(identity, content))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::disks::{OwnDisk, Plan};
    use mercury_image::{AhciPort, Bar, Device};
    use tempfile::NamedTempFile;

    pub const START: u32 = 0xFEBC_0000;
    const ADDRESS: &str = "0000:00:1f.2";
    const SECTORS: u16 = 64;

    fn answer() -> Vec<u8> {
        let mut words = vec![0_u16; 256];
        for (word, value) in [(10, 0x3031), (27, 0x4142), (49, 0x0F00), (83, 0x7400), (100, SECTORS)] {
            words[word] = value;
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn port(number: u32, disk: Option<&str>) -> AhciPort {
        let disk = disk.map(|name| AhciDisk { name: name.into(), identify: answer() });
        AhciPort { number, disk, ..AhciPort::default() }
    }

    /// Returns a machine with two disks on AHCI, whose controller has messages without a table.
    fn machine() -> Machine {
        let mut config = vec![0; 256];
        config[4] = 6;
        config[0x24..0x28].copy_from_slice(&START.to_le_bytes());
        config[0x34] = 0x80;
        config[0x80..0x84].copy_from_slice(&[5, 0, 0x80, 0]);
        let bars = vec![Bar { number: 5, start: u64::from(START), length: 0x1000, flags: 0x200 }];
        let device = Device { address: ADDRESS.into(), config, bars, ..Device::default() };
        let controller = AhciController {
            address: ADDRESS.into(),
            capabilities: 0xC014_1F05,
            has_messages: true,
            ports: vec![port(0, Some("sda")), port(1, None), port(5, Some("sdb"))],
            ..AhciController::default()
        };
        Machine { devices: vec![device], ahci: vec![controller], ..Machine::default() }
    }

    fn contents() -> (NamedTempFile, Vec<OwnDisk>) {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(u64::from(SECTORS) * 512).unwrap();
        let one = |name: &str| OwnDisk {
            name: name.into(),
            path: file.path().into(),
            read_only: true,
            arrives: false,
        };
        let given = vec![one("sda"), one("sdb")];
        (file, given)
    }

    /// Returns a controller that raises its interrupts by a line.
    pub fn planned(line: u32) -> (NamedTempFile, Controller) {
        let (file, given) = contents();
        let mut machine = machine();
        (machine.ahci[0].has_messages, machine.ahci[0].line) = (false, Some(line));
        let mut plan = Plan::of(&machine, &given, &[], 1 << 40).unwrap();
        assert_eq!(plan.reasons, [""; 0]);
        (file, plan.controllers.remove(0))
    }

    #[test]
    fn a_controller_has_its_disks_at_their_ports() {
        let (_file, given) = contents();
        let plan = Plan::of(&machine(), &given, &[], 1 << 40).unwrap();
        assert_eq!(plan.reasons, [""; 0]);
        let Kind::Ahci { properties, drives, line: None } = &plan.controllers[0].kind else {
            panic!("{plan:?}")
        };
        assert_eq!((properties.ports.len(), properties.capabilities), (6, 0xC014_1F05));
        assert_eq!(drives.iter().map(|(port, _)| *port).collect::<Vec<_>>(), [0, 5]);
    }

    #[test]
    fn each_controller_that_is_unfit_is_refused_by_name() {
        type Change = fn(&mut Machine, &mut Vec<OwnDisk>);
        let changes: [(Change, &str); 9] = [
            (|one, _| one.ahci[0].ports[1].has_multiplier = true, "port 2 has a port multiplier"),
            (|_, given| drop(given.pop()), "the disk sdb (AB, serial number 01, 32.0 KiB) too"),
            (|one, _| one.ahci[0].has_messages = false, "neither by messages"),
            (
                |one, _| (one.ahci[0].has_messages, one.ahci[0].line) = (false, Some(24)),
                "neither by messages",
            ),
            (|one, _| one.devices[0].bars[0].length = 0x200, "no room for 6 ports"),
            (|one, _| one.ahci[0].ports[1].number = 32, "no room for 33 ports"),
            (|one, _| one.devices.clear(), "does not describe its PCI device"),
            (|one, _| one.ahci[0].ports[0].disk.as_mut().unwrap().identify[1] = 0x80, "sda: it is no disk"),
            (|one, _| one.ahci[0].ports[2].disk.as_mut().unwrap().identify[202] = 1, "sdb: it has"),
        ];
        for (change, expected) in changes {
            let (_file, mut given) = contents();
            let mut machine = machine();
            change(&mut machine, &mut given);
            let plan = Plan::of(&machine, &given, &[], 1 << 40).unwrap();
            assert_eq!(plan.reasons.len(), 1, "{expected}: {plan:?}");
            let reason = &plan.reasons[0];
            assert!(reason.contains(ADDRESS) && reason.contains(expected), "{expected}: {reason}");
            assert!(plan.controllers.is_empty());
        }
        // A controller without disks that were given is not shown.
        let plan = Plan::of(&machine(), &[], &[], 1 << 40).unwrap();
        assert!(plan.controllers.is_empty() && plan.reasons.is_empty());
    }
}
