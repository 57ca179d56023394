//! Controllers of disks on NVMe, as a monitor shows them to a machine that goes on as a guest: their driver
//! compares what they say of themselves.

use mercury_control::sysroot::Sysroot;
use mercury_image::{Device, NvmeController, NvmeDisk};
use std::{fs::File, io, os::fd::AsRawFd, path::Path};

/// Name of the kernel's driver.
const DRIVER: &str = "nvme";
/// Size of each answer to Identify.
const STRUCTURE: usize = 4096;
/// Structures that Identify returns.
const NAMESPACE: u32 = 0;
const CONTROLLER: u32 = 1;
const IDENTIFIERS: u32 = 3;

/// Describes the controllers on PCI. One that does not answer is left out, with its disks.
#[must_use]
pub fn controllers(devices: &[Device], sysroot: &Sysroot) -> Vec<NvmeController> {
    let devices = devices.iter().filter(|device| device.driver.as_deref() == Some(DRIVER));
    devices.filter_map(|device| controller(&device.address, sysroot, &identify)).collect()
}

/// Asks a controller by Identify: its device, a namespace, and the structure that is wanted.
type Identify<'a> = &'a dyn Fn(&Path, u32, u32) -> io::Result<Vec<u8>>;

fn controller(address: &str, sysroot: &Sysroot, identify: Identify<'_>) -> Option<NvmeController> {
    let folder = format!("sys/bus/pci/devices/{address}");
    let name = sysroot.names(&format!("{folder}/nvme")).into_iter().next()?;
    let device = sysroot.path(&format!("dev/{name}"));
    let own = format!("{folder}/nvme/{name}");
    let number = |file: &str| sysroot.text(&format!("{own}/{file}"))?.trim().parse::<u32>().ok();
    let mut disks = Vec::new();
    for entry in sysroot.names(&own) {
        if let Some(disk_name) = disk_name(&entry)
            && let Some(namespace) = number(&format!("{entry}/nsid"))
        {
            disks.push(disk(disk_name, namespace, &device, identify)?);
        }
    }
    Some(NvmeController {
        address: address.to_owned(),
        identify: trimmed(identify(&device, 0, CONTROLLER).ok()?),
        queue_entries: number("sqsize").map_or(0, |last| last.saturating_add(1)),
        has_messages: !sysroot.names(&format!("{folder}/msi_irqs")).is_empty(),
        has_memory: sysroot.exists(&format!("{own}/cmb")),
        disks,
        name,
    })
}

fn disk(name: String, namespace: u32, device: &Path, identify: Identify<'_>) -> Option<NvmeDisk> {
    let structure = identify(device, namespace, NAMESPACE).ok()?;
    // Controllers before version 1.3 have no list.
    let identifiers = identify(device, namespace, IDENTIFIERS).unwrap_or_default();
    Some(NvmeDisk { name, namespace, identify: trimmed(structure), identifiers: trimmed(identifiers) })
}

/// Returns the name of the disk for an entry in a controller's folder. If controllers share the disk, the
/// entry has the controller's number as well.
fn disk_name(entry: &str) -> Option<String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (front, namespace) = entry.strip_prefix(DRIVER)?.split_once('n')?;
    let subsystem = front.split_once('c').map_or(front, |(subsystem, _)| subsystem);
    (is_number(subsystem) && is_number(namespace)).then(|| format!("{DRIVER}{subsystem}n{namespace}"))
}

/// Removes the zeros at the end.
fn trimmed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    bytes.truncate(end);
    bytes
}

/// `struct nvme_passthru_cmd` of linux/nvme_ioctl.h.
#[repr(C)]
#[derive(Default)]
struct Request {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    words_2_and_3: [u32; 2],
    metadata: u64,
    data: u64,
    metadata_length: u32,
    data_length: u32,
    words_10_to_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

fn identify(device: &Path, namespace: u32, structure: u32) -> io::Result<Vec<u8>> {
    const IDENTIFY: u8 = 6;
    let mut answer = vec![0_u8; STRUCTURE];
    ask(&File::open(device)?, IDENTIFY, namespace, structure, &mut answer)?;
    Ok(answer)
}

/// Asks a controller by its driver's ioctl, with an admin command that returns data and changes nothing.
///
/// # Errors
///
/// Returns an error if the controller does not answer, or refuses.
pub fn ask(controller: &File, opcode: u8, namespace: u32, word_10: u32, answer: &mut [u8]) -> io::Result<()> {
    const NVME_IOCTL_ADMIN_CMD: libc::c_ulong = 0xC048_4E41;
    let mut request = Request {
        opcode,
        namespace,
        data: answer.as_mut_ptr().expose_provenance() as u64,
        data_length: u32::try_from(answer.len()).map_err(io::Error::other)?,
        words_10_to_15: [word_10, 0, 0, 0, 0, 0],
        ..Request::default()
    };
    // SAFETY: The kernel writes at most `data_length` bytes to the answer, which has so many. It writes none
    // after the call.
    let result = unsafe { libc::ioctl(controller.as_raw_fd(), NVME_IOCTL_ADMIN_CMD as _, &raw mut request) };
    match result {
        0 => Ok(()),
        ..0 => Err(io::Error::last_os_error()),
        status => Err(io::Error::other(format!("the controller refuses with status {status:#x}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_kernel_s_layout() {
        assert_eq!(size_of::<Request>(), 0x48);
        assert_eq!(std::mem::offset_of!(Request, words_10_to_15), 40);
    }

    #[test]
    fn disks_have_the_kernel_s_names() {
        let names = ["nvme0n1", "nvme12c3n4", "ng0n1", "nvme0", "nvme0n", "hwmon1", "nvme0n1p1", "nvme0cn1"];
        let expected = [Some("nvme0n1"), Some("nvme12n4"), None, None, None, None, None, Some("nvme0n1")];
        assert_eq!(names.map(disk_name), expected.map(|name| name.map(str::to_owned)));
    }

    #[test]
    fn controllers_are_described_with_their_disks() {
        let root = tempfile::tempdir().expect("a folder");
        let file = |path: &str, text: &str| {
            let path = root.path().join("sys/bus/pci/devices/0000:01:00.0").join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        };
        file("nvme/nvme3/sqsize", "1023\n");
        file("nvme/nvme3/nvme3n1/nsid", "1\n");
        file("nvme/nvme3/nvme3c0n2/nsid", "7\n");
        file("nvme/nvme3/hwmon1/name", "nvme\n");
        file("msi_irqs/33", "msix\n");
        let sysroot = Sysroot::at(root.path());
        let answer = |device: &Path, namespace: u32, structure: u32| {
            assert!(device.ends_with("dev/nvme3"));
            match (namespace, structure) {
                (7, IDENTIFIERS) => Err(io::ErrorKind::InvalidInput.into()),
                _ => Ok(vec![structure as u8 + 1, namespace as u8, 5, 0, 0]),
            }
        };
        let found = controller("0000:01:00.0", &sysroot, &answer).expect("a controller");
        assert_eq!((found.name.as_str(), found.queue_entries), ("nvme3", 1024));
        assert!(found.has_messages && !found.has_memory);
        assert_eq!(found.identify, [2, 0, 5]);
        let mut disks: Vec<_> = found.disks.iter().map(|disk| (disk.name.as_str(), disk.namespace)).collect();
        disks.sort_unstable();
        assert_eq!(disks, [("nvme3n1", 1), ("nvme3n2", 7)]);
        let shared = found.disks.iter().find(|disk| disk.namespace == 7).expect("a disk");
        assert_eq!((shared.identify.as_slice(), shared.identifiers.len()), ([1, 7, 5].as_slice(), 0));
        // A controller that does not answer is unknown, as one of another driver is.
        let silent = |_: &Path, _, _| Err(io::ErrorKind::TimedOut.into());
        assert_eq!(controller("0000:01:00.0", &sysroot, &silent), None);
        let other = Device { address: "0000:01:00.0".into(), ..Device::default() };
        assert_eq!(controllers(&[other], &sysroot), []);
    }
}
