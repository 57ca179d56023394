//! The disks that the restore environment can reach: those that the drivers of this machine's cards
//! find by themselves. The environment assembles no volumes, and logs in nowhere.
//!
//! A machine that moves keeps its connections, also those to its disks' servers. Such a disk goes
//! on working at the destination, as a file on NFS does. The restore environment need not reach it.

use mercury_control::sysroot::Sysroot;
use rustix::fs::{major, minor};
use std::{
    fs, io,
    net::{IpAddr, UdpSocket},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Returns the reason why the environment cannot reach a device, such as "is made of other
/// devices"; `None` if it can.
#[must_use]
pub fn obstacle(device: &Path, sysroot: &Sysroot) -> Option<String> {
    const COMPOSED: &str = "is made of other devices";
    if fs::metadata(device).is_err() {
        return Some(COMPOSED.into());
    }
    let folder = folder(device, sysroot).unwrap_or_default();
    if folder.to_string_lossy().contains("/devices/virtual/block/") {
        return Some(COMPOSED.into());
    }
    network(&folder).map(|network| format!("is a disk on a network ({network})"))
}

/// Returns true if a device is reached by a TCP connection that only the kernel holds, and that
/// moves with the machine: NVMe over TCP, unless the target is this machine; and NBD unless a
/// process waits in it, which gives it up when it stands still. The kernel does not report the peer
/// of NBD.
#[must_use]
pub fn goes_along(device: &Path, sysroot: &Sysroot) -> bool {
    let Some(folder) = folder(device, sysroot) else { return false };
    folder.ancestors().any(|above| {
        let name = above.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("nbd") {
            let holder = fs::read_to_string(above.join("pid"));
            return holder.is_ok_and(|pid| !sysroot.exists(&format!("proc/{}", pid.trim())));
        }
        name.starts_with("nvme")
            && transports(above).is_some_and(|all| all.iter().all(|one| one == "tcp"))
            && said_of_controllers(above, "address").iter().all(|address| leads_elsewhere(address))
    })
}

/// Returns a device's folder in /sys/devices.
fn folder(device: &Path, sysroot: &Sysroot) -> Option<PathBuf> {
    let found = fs::metadata(device).ok()?;
    let link = format!("sys/dev/block/{}:{}", major(found.rdev()), minor(found.rdev()));
    fs::canonicalize(sysroot.path(&link)).ok()
}

/// Returns the network on the path of a device's folder in /sys/devices.
fn network(folder: &Path) -> Option<String> {
    folder.ancestors().find_map(|above| {
        let is_iscsi = ["iscsi_session", "iscsi_host"].iter().any(|name| above.join(name).exists());
        match above.file_name()?.to_str()? {
            _ if is_iscsi => Some("iSCSI".into()),
            "rbd" => Some("Ceph".into()),
            name if name.starts_with("nvme") => fabric(above),
            _ => None,
        }
    })
}

/// Returns the transport of an NVMe controller, or of all those of a subsystem, unless it is PCI.
fn fabric(folder: &Path) -> Option<String> {
    let found = transports(folder)?;
    found.iter().all(|transport| transport != "pcie").then(|| format!("NVMe, {}", found[0]))
}

/// Returns the transports of the controllers in a folder, if there are any: of one controller, or
/// of a subsystem with several.
fn transports(folder: &Path) -> Option<Vec<String>> {
    Some(said_of_controllers(folder, "transport")).filter(|found| !found.is_empty())
}

/// Returns the contents of a file for each controller in a folder.
fn said_of_controllers(folder: &Path, file: &str) -> Vec<String> {
    let below = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let controllers =
        std::iter::once(folder.to_owned()).chain(below).filter(|one| one.join("transport").exists());
    let said = controllers.map(|one| fs::read_to_string(one.join(file)).unwrap_or_default());
    said.map(|text| text.trim().to_owned()).collect()
}

/// Parses the target of an NVMe controller from its address: `traddr=10.0.0.1,trsvcid=4420`.
pub fn target(address: &str) -> Option<IpAddr> {
    address.split(',').find_map(|part| part.trim().strip_prefix("traddr="))?.parse().ok()
}

/// Returns true if an NVMe controller's target is another machine: a socket can be bound only to an
/// address of this machine.
fn leads_elsewhere(address: &str) -> bool {
    let Some(target) = target(address) else { return false };
    UdpSocket::bind((target, 0)).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Computes the obstacle of a device with this folder in /sys/devices, with these files there.
    fn of(folder: &str, files: &[(&str, &str)]) -> Option<String> {
        with(folder, files, obstacle)
    }

    fn with<T>(folder: &str, files: &[(&str, &str)], say: fn(&Path, &Sysroot) -> T) -> T {
        let root = tempfile::tempdir().expect("a folder");
        let devices = root.path().join("sys/devices");
        fs::create_dir_all(devices.join(folder)).expect("folders");
        for (name, text) in files {
            let path = devices.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, text).expect("a file");
        }
        fs::create_dir_all(root.path().join("sys/dev/block")).expect("folders");
        // An existing file; its device number does not matter.
        let number = fs::metadata("/dev/null").expect("a device").rdev();
        let link = format!("sys/dev/block/{}:{}", major(number), minor(number));
        symlink(devices.join(folder), root.path().join(link)).expect("a link");
        say(Path::new("/dev/null"), &Sysroot::at(root.path()))
    }

    #[test]
    fn disks_on_cards_are_reached() {
        assert_eq!(of("pci0000:00/0000:00:04.0/virtio1/block/vda/vda1", &[]), None);
        assert_eq!(of("pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda", &[]), None);
        let nvme = "pci0000:00/0000:00:02.0/nvme/nvme0";
        assert_eq!(
            of(&format!("{nvme}/nvme0n1/nvme0n1p2"), &[(&format!("{nvme}/transport"), "pcie\n")]),
            None
        );
    }

    #[test]
    fn composed_devices_are_not_reachable() {
        assert_eq!(of("virtual/block/dm-0", &[]).as_deref(), Some("is made of other devices"));
        assert_eq!(of("virtual/block/md0/md0p1", &[]).as_deref(), Some("is made of other devices"));
        let gone = obstacle(Path::new("/dev/no-such-disk"), &Sysroot::default());
        assert_eq!(gone.as_deref(), Some("is made of other devices"));
    }

    #[test]
    fn disks_on_a_network_are_not() {
        let session = "platform/host3/session1/target3:0:0/3:0:0:0/block/sda/sda1";
        let file = "platform/host3/session1/iscsi_session/session1/state";
        assert_eq!(of(session, &[(file, "")]).as_deref(), Some("is a disk on a network (iSCSI)"));
        let host = ("pci0000:00/0000:00:05.0/host2/iscsi_host/host2/ipaddress", "");
        let disk = "pci0000:00/0000:00:05.0/host2/target2:0:0/2:0:0:0/block/sdb";
        assert_eq!(of(disk, &[host]).as_deref(), Some("is a disk on a network (iSCSI)"));
        let ctl = "virtual/nvme-fabrics/ctl/nvme1";
        let found = of(&format!("{ctl}/nvme1n1"), &[(&format!("{ctl}/transport"), "tcp\n")]);
        assert_eq!(found.as_deref(), Some("is a disk on a network (NVMe, tcp)"));
        assert_eq!(of("rbd/0/block/rbd0", &[]).as_deref(), Some("is a disk on a network (Ceph)"));
    }

    #[test]
    fn connections_of_the_kernel_s_go_along() {
        let along = |folder: &str, files: &[(&str, &str)]| with(folder, files, goes_along);
        let (nbd, pid) = ("virtual/block/nbd0/nbd0p1", "virtual/block/nbd0/pid");
        assert!(along(nbd, &[(pid, "77\n")]), "who made it is gone");
        assert!(!along(nbd, &[(pid, "77\n"), ("../../proc/77/stat", "")]), "a process holds it");
        assert!(!along(nbd, &[]), "it is not connected");
        let ctl = "virtual/nvme-fabrics/ctl/nvme1";
        let [transport, address] = ["transport", "address"].map(|file| format!("{ctl}/{file}"));
        let nvme = |by, at| along(&format!("{ctl}/nvme1n1"), &[(&transport, by), (&address, at)]);
        // No machine has this address (RFC 5737).
        let there = "traddr=192.0.2.1,trsvcid=4420,src_addr=10.0.0.1\n";
        assert!(nvme("tcp\n", there) && !nvme("rdma\n", there));
        assert!(!nvme("tcp\n", "traddr=127.0.0.1,trsvcid=4420\n"), "its target is this machine");
        assert!(!nvme("tcp\n", ""), "its address is unknown");
        let local = "pci0000:00/0000:00:02.0/nvme/nvme0";
        assert!(!along(&format!("{local}/nvme0n1"), &[(&format!("{local}/transport"), "pcie\n")]));
        assert!(!along("pci0000:00/0000:00:04.0/virtio1/block/vda", &[]));
    }

    #[test]
    fn one_way_that_is_reached_is_enough() {
        let subsystem = "virtual/nvme-subsystem/nvme-subsys0";
        let with = |transports: [&str; 2]| {
            let [first, second] = ["nvme0", "nvme1"].map(|name| format!("{subsystem}/{name}/transport"));
            of(&format!("{subsystem}/nvme0n1"), &[(&first, transports[0]), (&second, transports[1])])
        };
        assert_eq!(with(["pcie\n", "tcp\n"]), None);
        assert!(with(["rdma\n", "rdma\n"]).is_some_and(|why| why.contains("NVMe, rdma")));
    }
}
