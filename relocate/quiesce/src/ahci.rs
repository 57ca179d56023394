//! Controllers of disks on AHCI, as a monitor shows them to a machine that goes on as a guest: their driver
//! compares what the disks say of themselves.

use mercury_control::sysroot::Sysroot;
use mercury_image::{AhciController, AhciDisk, AhciPort, Device};
use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
};

/// Name of the kernel's driver.
const DRIVER: &str = "ahci";
/// Size of the answer to IDENTIFY DEVICE.
const STRUCTURE: usize = 512;
/// The words of the answer that are texts: serial number, firmware, model. A word has its first byte above.
const TEXTS: [std::ops::Range<usize>; 2] = [10..20, 23..47];

/// Describes the controllers on PCI. One whose driver or disks do not answer is left out.
#[must_use]
pub fn controllers(devices: &[Device], sysroot: &Sysroot) -> Vec<AhciController> {
    let devices = devices.iter().filter(|device| device.driver.as_deref() == Some(DRIVER));
    devices.filter_map(|device| controller(&device.address, sysroot, &identify)).collect()
}

/// Returns a disk's answer to IDENTIFY DEVICE, as the kernel has it.
type Identify<'a> = &'a dyn Fn(&Path) -> io::Result<Vec<u8>>;

fn controller(address: &str, sysroot: &Sysroot, identify: Identify<'_>) -> Option<AhciController> {
    let folder = format!("sys/bus/pci/devices/{address}");
    let names = sysroot.names(&folder);
    let places = names.iter().filter(|name| name.starts_with("ata"));
    let places: Vec<Place<'_>> =
        places.map(|name| Place::find(&folder, name, sysroot)).collect::<Option<_>>()?;
    let first = places.first()?;
    let has_messages = !sysroot.names(&format!("{folder}/msi_irqs")).is_empty();
    let mut ports: Vec<AhciPort> = places.iter().map(|place| place.port(identify)).collect::<Option<_>>()?;
    ports.sort_by_key(|port| port.number);
    Some(AhciController {
        address: address.to_owned(),
        capabilities: first.register("ahci_host_caps")?,
        more_capabilities: first.register("ahci_host_cap2")?,
        version: first.register("ahci_host_version")?,
        has_messages,
        line: if has_messages { None } else { line(&folder, sysroot) },
        ports,
    })
}

/// Returns the global system interrupt of a device without messages. Those of the first IOAPIC have the
/// kernel's numbers.
fn line(folder: &str, sysroot: &Sysroot) -> Option<u32> {
    let irq = sysroot.text(&format!("{folder}/irq"))?;
    let irq = irq.trim();
    let of = |what: &str| sysroot.text(&format!("sys/kernel/irq/{irq}/{what}"));
    let is_same = of("chip_name")?.contains("IO-APIC") && of("hwirq")?.trim() == irq;
    irq.parse().ok().filter(|_| is_same)
}

/// A port's folders in `/sys`.
struct Place<'a> {
    sysroot: &'a Sysroot,
    port: String,
    scsi: String,
    host: String,
}

impl<'a> Place<'a> {
    fn find(folder: &str, name: &str, sysroot: &'a Sysroot) -> Option<Self> {
        let folder = format!("{folder}/{name}");
        let host = sysroot.names(&folder).into_iter().find(|entry| entry.starts_with("host"))?;
        let (port, scsi) = (format!("{folder}/ata_port/{name}"), format!("{folder}/{host}"));
        Some(Self { sysroot, port, scsi, host })
    }

    fn number(&self, file: &str) -> Option<u32> {
        self.sysroot.text(&format!("{}/{file}", self.port))?.trim().parse().ok()
    }

    /// Reads a register that the driver shows.
    fn register(&self, file: &str) -> Option<u32> {
        let text = self.sysroot.text(&format!("{}/scsi_host/{}/{file}", self.scsi, self.host))?;
        u32::from_str_radix(text.trim(), 16).ok()
    }

    fn port(&self, identify: Identify<'_>) -> Option<AhciPort> {
        let disk = match self.disk() {
            Some(name) => {
                let identify = identify(&self.sysroot.path(&format!("dev/{name}"))).ok()?;
                Some(AhciDisk { name, identify })
            }
            None => None,
        };
        Some(AhciPort {
            // The kernel counts from 1.
            number: self.number("port_no")?.checked_sub(1)?,
            command: self.register("ahci_port_cmd")?,
            has_multiplier: self.number("nr_pmp_links").is_some_and(|links| links > 0),
            disk,
        })
    }

    /// Returns the name of the port's disk. A zoned disk is none for a guest.
    fn disk(&self) -> Option<String> {
        let find = |folder: &str, is: &dyn Fn(&str) -> bool| {
            let found = self.sysroot.names(folder).into_iter().find(|name| is(name))?;
            Some(format!("{folder}/{found}"))
        };
        let target = find(&self.scsi, &|name| name.starts_with("target"))?;
        let device = find(&target, &|name| name.contains(':') && !name.starts_with("target"))?;
        let name = self.sysroot.names(&format!("{device}/block")).into_iter().next()?;
        let zoned = self.sysroot.text(&format!("{device}/block/{name}/queue/zoned"));
        let is_disk = name.starts_with("sd") && zoned.is_none_or(|zoned| zoned.trim() == "none");
        is_disk.then_some(name)
    }
}

/// Asks the kernel by its ioctl. No command reaches the disk.
fn identify(device: &Path) -> io::Result<Vec<u8>> {
    const HDIO_GET_IDENTITY: libc::c_ulong = 0x030D;
    let file: File = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(device)?;
    let mut answer = vec![0_u8; STRUCTURE];
    // SAFETY: The kernel writes 512 bytes to the answer, which has so many.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), HDIO_GET_IDENTITY as _, answer.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    as_the_disk_has_it(&mut answer);
    Ok(answer)
}

/// Puts the bytes of texts in the disk's order. The kernel has made them readable.
fn as_the_disk_has_it(answer: &mut [u8]) {
    for words in TEXTS {
        answer[2 * words.start..2 * words.end]
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .for_each(|word| word.reverse());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        std::fs::write(path, text).expect("a file");
    }

    /// Makes a port in `/sys`.
    fn port(root: &Path, ata: u32, number: &str, links: &str) {
        let folder = format!("sys/bus/pci/devices/0000:00:1f.2/ata{ata}");
        file(root, &format!("{folder}/ata_port/ata{ata}/port_no"), number);
        file(root, &format!("{folder}/ata_port/ata{ata}/nr_pmp_links"), links);
        for (name, text) in [
            ("ahci_host_caps", "c0141f05\n"),
            ("ahci_host_cap2", "0\n"),
            ("ahci_host_version", "10300\n"),
            ("ahci_port_cmd", "4c017\n"),
        ] {
            file(root, &format!("{folder}/host{ata}/scsi_host/host{ata}/{name}"), text);
        }
    }

    fn block(root: &Path, ata: u32, name: &str, zoned: &str) {
        let device = format!("host{ata}/target{ata}:0:0/{ata}:0:0:0");
        let path = format!("sys/bus/pci/devices/0000:00:1f.2/ata{ata}/{device}/block/{name}/queue/zoned");
        file(root, &path, zoned);
    }

    #[test]
    fn controllers_are_described_with_their_ports_and_disks() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        for (ata, number, links) in
            [(10, "2\n", "0\n"), (9, "1\n", "0\n"), (11, "3\n", "5\n"), (12, "4\n", "0\n")]
        {
            port(root, ata, number, links);
        }
        block(root, 9, "sda", "none\n");
        block(root, 10, "sr0", "none\n");
        block(root, 12, "sdb", "host-managed\n");
        file(root, "sys/bus/pci/devices/0000:00:1f.2/irq", "19\n");
        file(root, "sys/kernel/irq/19/chip_name", "IO-APIC\n");
        file(root, "sys/kernel/irq/19/hwirq", "19\n");
        let sysroot = Sysroot::at(root);
        let answer = |device: &Path| match device.ends_with("dev/sda") {
            true => Ok(vec![7; STRUCTURE]),
            false => Err(io::ErrorKind::NotFound.into()),
        };
        let find = || controller("0000:00:1f.2", &sysroot, &answer);
        let found = find().expect("a controller");
        assert_eq!((found.capabilities, found.version, found.line), (0xC014_1F05, 0x1_0300, Some(19)));
        let ports: Vec<_> = found
            .ports
            .iter()
            .map(|port| (port.number, port.has_multiplier, port.disk.as_ref().map(|disk| disk.name.as_str())))
            .collect();
        assert_eq!(ports, [(0, false, Some("sda")), (1, false, None), (2, true, None), (3, false, None)]);
        assert_eq!(found.ports[0].command, 0x4_C017);
        // The line of another IOAPIC, and messages.
        file(root, "sys/kernel/irq/19/hwirq", "3\n");
        assert_eq!(find().and_then(|one| one.line), None);
        file(root, "sys/bus/pci/devices/0000:00:1f.2/msi_irqs/33", "msi\n");
        assert!(find().is_some_and(|one| one.has_messages));
        // A disk that does not answer is unknown, with its controller.
        block(root, 11, "sdc", "none\n");
        assert_eq!(find(), None);
        let other = Device { address: "0000:00:1f.2".into(), ..Device::default() };
        assert_eq!(controllers(&[other], &sysroot), []);
    }

    #[test]
    fn texts_have_the_disk_s_order() {
        let mut answer: Vec<u8> = (0..STRUCTURE).map(|at| at as u8).collect();
        as_the_disk_has_it(&mut answer);
        assert_eq!(answer[18..24], [18, 19, 21, 20, 23, 22]);
        assert_eq!(answer[38..48], [39, 38, 40, 41, 42, 43, 44, 45, 47, 46]);
        assert_eq!(answer[92..96], [93, 92, 94, 95]);
    }
}
