//! Processes that can write to a disk by its device: virtual machines, databases on raw disks, tools.
//! No file system is mounted there, and most of these processes do not claim the disk ([`super::claims`]).

use super::{
    block_devices::device_file,
    openers::{self, Process},
};
use mercury_control::sysroot::Sysroot;
use std::{
    collections::BTreeMap,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

/// Names each disk that other processes have open for writing, such as "/dev/sdb by qemu (77)". RAM disks
/// are memory. A server of a network disk (NBD) has its disk open, and writes nothing of its own.
#[must_use]
pub fn of_disks(sysroot: &Sysroot) -> Vec<String> {
    let own = std::process::id();
    let mut found: BTreeMap<String, Vec<Process>> = BTreeMap::new();
    for pid in sysroot.names("proc").into_iter().filter_map(|name| name.parse::<u32>().ok()) {
        if pid == own {
            continue;
        }
        for disk in written_by(pid, sysroot) {
            let processes = found.entry(disk).or_default();
            if processes.iter().all(|process| process.pid != pid) {
                processes.push(Process::of(pid, sysroot));
            }
        }
    }
    let named = |(disk, processes): (&String, &Vec<Process>)| {
        format!("{} by {}", device_file(disk).display(), openers::names(processes))
    };
    found.iter().map(named).collect()
}

/// Lists the disks that a process has open for writing.
fn written_by(pid: u32, sysroot: &Sysroot) -> Vec<String> {
    let disk = |descriptor: String| {
        let disk = disk_at(&sysroot.path(&format!("proc/{pid}/fd/{descriptor}")), sysroot)?;
        let is_memory = disk.starts_with("ram") || disk.starts_with("zram");
        let is_server = sysroot.text(&format!("sys/class/block/{disk}/pid")) == Some(pid.to_string());
        let writes = is_writable(&sysroot.text(&format!("proc/{pid}/fdinfo/{descriptor}"))?);
        (writes && !is_memory && !is_server).then_some(disk)
    };
    sysroot.names(&format!("proc/{pid}/fd")).into_iter().filter_map(disk).collect()
}

/// Returns the kernel's name of the block device that a descriptor's link leads to. The link opens the very
/// device, whatever its name is in the process's own namespace.
fn disk_at(link: &Path, sysroot: &Sysroot) -> Option<String> {
    let target = std::fs::read_link(link).ok()?;
    let named = target.strip_prefix("/dev").ok()?.to_string_lossy().replace('/', "!");
    let metadata = std::fs::metadata(link).ok().filter(|found| found.file_type().is_block_device());
    let by_number = metadata.and_then(|found| {
        let number = format!("{}:{}", libc::major(found.rdev()), libc::minor(found.rdev()));
        let disk = std::fs::read_link(sysroot.path(&format!("sys/dev/block/{number}"))).ok()?;
        Some(disk.file_name()?.to_string_lossy().into_owned())
    });
    by_number.or_else(|| sysroot.exists(&format!("sys/class/block/{named}")).then_some(named))
}

/// Returns true if the flags of a descriptor, such as `flags:\t02140002`, let it write.
fn is_writable(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openers::tests::process;

    #[test]
    fn disks_that_are_open_for_writing_are_named_with_their_processes() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        };
        for disk in ["sdb", "dm-3", "ram0", "nbd0", "cciss!c0d0"] {
            write(&format!("sys/class/block/{disk}/size"), "8\n");
        }
        write("sys/class/block/nbd0/pid", "12\n");
        let files = ["/dev/sdb", "/dev/sdb", "/dev/ram0", "/dev/null", "/dev/cciss/c0d0"];
        process(root.path(), 77, "qemu", &files);
        process(root.path(), 78, "dd", &["/dev/dm-3", "/dev/sdb"]);
        process(root.path(), 12, "nbd-client", &["/dev/nbd0"]);
        process(root.path(), std::process::id(), "mercury", &["/dev/sdb"]);
        for (pid, count) in [(77, 5), (12, 1), (std::process::id(), 1)] {
            for descriptor in 0..count {
                write(&format!("proc/{pid}/fdinfo/{descriptor}"), "pos:\t0\nflags:\t02140002\nmnt_id:\t9\n");
            }
        }
        write("proc/78/fdinfo/0", "pos:\t0\nflags:\t0100001\n");
        write("proc/78/fdinfo/1", "pos:\t0\nflags:\t0100000\n");
        assert_eq!(
            of_disks(&Sysroot::at(root.path())),
            ["/dev/cciss/c0d0 by qemu (77)", "/dev/dm-3 by dd (78)", "/dev/sdb by qemu (77)"]
        );
    }
}
