//! Devices that carry a mounted file system or swap space: without them the machine may lose its root.
//!
//! In doubt a device carries one. Disks of a mounted file system are found through device mapper and md. A
//! file system that comes over the network is carried by each network card that is up.

use mercury_control::sysroot::Sysroot;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// File systems that come over the network.
const REMOTE: [&str; 9] =
    ["nfs", "nfs4", "cifs", "smb3", "ceph", "afs", "lustre", "fuse.glusterfs", "fuse.sshfs"];
/// File systems that do not say on which disks they are.
const ON_ANY_DISK: [&str; 3] = ["btrfs", "zfs", "bcachefs"];
/// Virtual disks without a device of their own. The file of a loop device is on another mounted file system.
const WITHOUT_DEVICE: [&str; 3] = ["loop", "zram", "ram"];

/// The parts of a machine that its mounted file systems need.
#[derive(Debug, Default)]
struct Needs {
    /// Disks and partitions, by their folders below `/sys/devices`.
    disks: Vec<PathBuf>,
    any_disk: bool,
    network: bool,
}

/// Returns true if a device carries a mounted file system or swap space, by its folder in `/sys`.
#[must_use]
pub fn is_needed(device: &Path, sysroot: &Sysroot) -> bool {
    let Ok(device) = fs::canonicalize(device) else { return true };
    let needs = Needs::of(sysroot);
    let has = |class: &str, is_meant: &dyn Fn(&Path) -> bool| {
        let folders = sysroot.names(class).into_iter().map(|name| sysroot.path(&format!("{class}/{name}")));
        folders
            .filter_map(|path| fs::canonicalize(path).ok())
            .any(|at| at.starts_with(&device) && is_meant(&at))
    };
    let is_up = |card: &Path| fs::read_to_string(card.join("operstate")).is_ok_and(|text| text != "down\n");
    needs.disks.iter().any(|disk| disk.starts_with(&device))
        || needs.network && has("sys/class/net", &is_up)
        || needs.any_disk && (has("sys/class/block", &|_| true) || has("sys/class/nvme", &|_| true))
}

impl Needs {
    fn of(sysroot: &Sysroot) -> Self {
        let mut needs = Self::default();
        for line in sysroot.text("proc/self/mountinfo").unwrap_or_default().lines() {
            needs.add_mount(line, sysroot);
        }
        for line in sysroot.text("proc/swaps").unwrap_or_default().lines().skip(1) {
            if let Some(name) = line.split_whitespace().next().and_then(|path| path.strip_prefix("/dev/")) {
                needs.add_disk(&sysroot.path(&format!("sys/class/block/{name}")));
            }
        }
        needs
    }

    /// Adds a line of mountinfo, such as `22 1 8:1 / / rw - ext4 /dev/sda1 rw`.
    fn add_mount(&mut self, line: &str, sysroot: &Sysroot) {
        let Some((front, back)) = line.split_once(" - ") else { return };
        let (Some(number), Some(kind)) = (front.split(' ').nth(2), back.split(' ').next()) else { return };
        self.network |= REMOTE.contains(&kind);
        self.any_disk |= ON_ANY_DISK.contains(&kind);
        if !number.starts_with("0:") {
            self.add_disk(&sysroot.path(&format!("sys/dev/block/{number}")));
        }
    }

    fn add_disk(&mut self, link: &Path) {
        let Ok(disk) = fs::canonicalize(link) else {
            self.any_disk = true;
            return;
        };
        // Those of a partition are its disk's.
        let folders = [Some(disk.as_path()), disk.parent()].into_iter().flatten();
        let lists = folders.filter_map(|folder| fs::read_dir(folder.join("slaves")).ok());
        let parts: Vec<_> = lists.flatten().flatten().map(|entry| entry.path()).collect();
        if !parts.is_empty() {
            return parts.iter().for_each(|part| self.add_disk(part));
        }
        let is_in = |folder: &str| disk.components().any(|part| part.as_os_str() == folder);
        let name = disk.file_name().unwrap_or_default().to_string_lossy();
        // Paths of NVMe, disks of the network.
        let is_virtual = is_in("virtual") && !WITHOUT_DEVICE.iter().any(|kind| name.starts_with(kind));
        self.any_disk |= is_virtual;
        self.network |= is_virtual || is_in("rbd") || disk.to_string_lossy().contains("/session");
        self.disks.push(disk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const CARD: &str = "sys/devices/pci0/card";
    const ADAPTER: &str = "sys/devices/pci0/adapter";
    const PARTITION: &str = "sys/devices/pci0/adapter/host0/block/sda/sda1";

    /// A machine with a network card, and a disk behind an adapter.
    fn machine(mounts: &str) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        put(&sysroot, "proc/self/mountinfo", mounts);
        put(&sysroot, &format!("{CARD}/net/eth0/operstate"), "up\n");
        link(&sysroot, &format!("{CARD}/net/eth0"), "sys/class/net/eth0");
        fs::create_dir_all(sysroot.path(PARTITION)).expect("folders");
        for name in ["sys/dev/block/8:1", "sys/class/block/sda1"] {
            link(&sysroot, PARTITION, name);
        }
        (root, sysroot)
    }

    fn put(sysroot: &Sysroot, path: &str, text: &str) {
        let path = sysroot.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        fs::write(path, text).expect("a file");
    }

    fn link(sysroot: &Sysroot, to: &str, name: &str) {
        let name = sysroot.path(name);
        fs::create_dir_all(name.parent().expect("a folder")).expect("folders");
        symlink(sysroot.path(to), name).expect("a link");
    }

    /// Returns if the card and the adapter are needed.
    fn needed(sysroot: &Sysroot) -> (bool, bool) {
        (is_needed(&sysroot.path(CARD), sysroot), is_needed(&sysroot.path(ADAPTER), sysroot))
    }

    #[test]
    fn disks_of_mounted_file_systems_are_needed() {
        let (_root, sysroot) = machine("1 0 0:5 / /run rw - tmpfs tmpfs rw\n");
        assert_eq!(needed(&sysroot), (false, false));
        let (_root, sysroot) = machine("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
        assert_eq!(needed(&sysroot), (false, true));
        let (_root, sysroot) = machine("22 1 0:30 / / rw - btrfs /dev/sda1 rw\n");
        assert_eq!(needed(&sysroot), (false, true));
        let (_root, sysroot) = machine("");
        assert_eq!(needed(&sysroot), (false, false));
        put(&sysroot, "proc/swaps", "Filename Type Size\n/dev/sda1 partition 1\n");
        assert_eq!(needed(&sysroot), (false, true), "swap space");
        assert!(is_needed(&sysroot.path("sys/devices/unknown"), &sysroot));
    }

    #[test]
    fn disks_beneath_device_mapper_are_needed() {
        let (_root, sysroot) = machine("22 1 254:0 / / rw - ext4 /dev/mapper/root rw\n");
        assert_eq!(needed(&sysroot), (false, true), "an unknown disk");
        link(&sysroot, PARTITION, "sys/devices/virtual/block/dm-0/slaves/sda1");
        link(&sysroot, "sys/devices/virtual/block/dm-0", "sys/dev/block/254:0");
        assert_eq!(needed(&sysroot), (false, true));
        let dm = Needs::of(&sysroot);
        assert!(!dm.any_disk && !dm.network, "{dm:?}");
    }

    #[test]
    fn cards_are_needed_for_file_systems_of_the_network() {
        let (_root, sysroot) = machine("22 1 0:30 / / rw - nfs s:/ rw,vers=3\n");
        assert_eq!(needed(&sysroot), (true, false));
        put(&sysroot, &format!("{CARD}/net/eth0/operstate"), "down\n");
        assert_eq!(needed(&sysroot), (false, false));
        let (_root, sysroot) = machine("22 1 259:0 / / rw - ext4 /dev/nvme0n1 rw\n");
        fs::create_dir_all(sysroot.path("sys/devices/virtual/nvme-fabrics/ctl/nvme0/nvme0n1"))
            .expect("a folder");
        link(&sysroot, "sys/devices/virtual/nvme-fabrics/ctl/nvme0/nvme0n1", "sys/dev/block/259:0");
        assert_eq!(needed(&sysroot), (true, true), "it may be anywhere");
    }
}
