//! File systems of NFS in all mount namespaces, and those in none: `umount -l` leaves one alive until its
//! last file is closed.

use super::mounts::{self, Table};
use mercury_control::sysroot::Sysroot;
use std::collections::BTreeSet;

/// A file system of NFS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// The mount point, such as "/data of process 77".
    pub at: String,
    /// The version, such as "4.2"; "4" if only the kernel knows the rest of it.
    pub version: String,
}

impl Volume {
    /// Returns true if requests may be numbered, as they are from version 4.1 on: a client that falls
    /// behind its server never recovers.
    #[must_use]
    pub fn has_sessions(&self) -> bool {
        self.version.starts_with('4') && self.version != "4.0"
    }
}

/// Lists them.
#[must_use]
pub fn volumes(sysroot: &Sysroot) -> Vec<Volume> {
    let tables = mounts::tables(sysroot);
    let mut numbers = BTreeSet::new();
    let mut found = Vec::new();
    for table in &tables {
        for (number, volume) in table.text.lines().filter_map(|line| mounted(line, table)) {
            if numbers.insert(number) {
                found.push(volume);
            }
        }
    }
    for line in lists(sysroot).iter().flat_map(|list| list.lines().skip(1)) {
        found
            .extend(unmounted(line).filter(|(number, _)| numbers.insert(number.clone())).map(|(_, one)| one));
    }
    found
}

/// Parses a line of mountinfo. Returns the device number, too.
fn mounted(line: &str, table: &Table) -> Option<(String, Volume)> {
    let (front, back) = line.split_once(" - ")?;
    let kind = back.split(' ').next()?;
    if !matches!(kind, "nfs" | "nfs4") {
        return None;
    }
    let mut words = front.split(' ').skip(2);
    let (number, at) = (words.next()?, words.nth(1)?);
    let version = back.split([' ', ',']).find_map(|option| option.strip_prefix("vers="));
    let version = version.unwrap_or(if kind == "nfs4" { "4" } else { "3" }).to_owned();
    Some((number.to_owned(), Volume { at: table.place(at), version }))
}

/// Returns the kernel's lists of the file systems, of each network namespace.
fn lists(sysroot: &Sysroot) -> Vec<String> {
    let is_number = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    let tasks = ["self".to_owned()].into_iter().chain(sysroot.names("proc").into_iter().filter(is_number));
    let mut namespaces = BTreeSet::new();
    let is_new = |task: &String| {
        let namespace = std::fs::read_link(sysroot.path(&format!("proc/{task}/ns/net")));
        namespace.map_or(task == "self", |namespace| namespaces.insert(namespace))
    };
    let list = |task: String| sysroot.text(&format!("proc/{task}/net/nfsfs/volumes"));
    tasks.filter(is_new).filter_map(list).collect()
}

/// Parses a line such as `v4 0a000001  801 0:45         0:0      no`.
fn unmounted(line: &str) -> Option<(String, Volume)> {
    let mut words = line.split_whitespace();
    let version = words.next()?.strip_prefix('v')?.to_owned();
    let number = words.nth(2)?.to_owned();
    let at = format!("a file system that is mounted nowhere any more (device {number})");
    Some((number, Volume { at, version }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    const OWN: &str = "22 1 8:1 / / rw - ext4 /dev/vda1 rw\n\
        30 22 0:30 / /srv rw shared:9 - nfs4 s:/ rw,vers=4.0,addr=10.0.0.1\n\
        31 22 0:31 / /old rw - nfs s:/ rw,vers=3,addr=10.0.0.1\n";
    const CONTAINER: &str = "22 1 8:1 / / rw - ext4 /dev/vda1 rw\n\
        40 22 0:40 / /data rw - nfs4 s:/ rw,vers=4.2,addr=10.0.0.1\n";
    const LIST: &str = "NV SERVER   PORT DEV          FSID                              FSC\n\
        v4 0a000001  801 0:30         0:0                               no \n\
        v3 0a000001  801 0:31         0:0                               no \n";

    fn machine() -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        put(&sysroot, "proc/self/mountinfo", OWN);
        put(&sysroot, "proc/self/net/nfsfs/volumes", LIST);
        (root, sysroot)
    }

    fn put(sysroot: &Sysroot, path: &str, text: &str) {
        let path = sysroot.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        fs::write(path, text).expect("a file");
    }

    fn with_sessions(sysroot: &Sysroot) -> Vec<String> {
        volumes(sysroot).into_iter().filter(Volume::has_sessions).map(|one| one.at).collect()
    }

    #[test]
    fn all_versions_are_told_apart() {
        let (_root, sysroot) = machine();
        let found = volumes(&sysroot);
        let volume = |at: &str, version: &str| Volume { at: at.into(), version: version.into() };
        assert_eq!(found, [volume("/srv", "4.0"), volume("/old", "3")]);
        assert!(with_sessions(&sysroot).is_empty());
        put(&sysroot, "proc/self/mountinfo", &OWN.replace("4.0", "4.1"));
        assert_eq!(with_sessions(&sysroot), ["/srv"]);
    }

    /// Containers, and threads with a namespace of their own.
    #[test]
    fn other_namespaces_are_searched() {
        let (_root, sysroot) = machine();
        put(&sysroot, "proc/77/task/78/mountinfo", CONTAINER);
        fs::create_dir_all(sysroot.path("proc/77/task/78/ns")).expect("folders");
        symlink("mnt:[7]", sysroot.path("proc/77/task/78/ns/mnt")).expect("a link");
        assert_eq!(with_sessions(&sysroot), ["/data of thread 78 of process 77"]);
    }

    #[test]
    fn what_is_mounted_nowhere_is_found() {
        let (_root, sysroot) = machine();
        put(&sysroot, "proc/self/net/nfsfs/volumes", &LIST.replace("0:31", "0:32").replace("v3", "v4"));
        let lost = "a file system that is mounted nowhere any more (device 0:32)";
        assert_eq!(with_sessions(&sysroot), [lost]);
        // In another network namespace.
        let (_root, sysroot) = machine();
        put(&sysroot, "proc/77/net/nfsfs/volumes", &LIST.replace("0:30", "0:32"));
        fs::create_dir_all(sysroot.path("proc/77/ns")).expect("folders");
        symlink("net:[7]", sysroot.path("proc/77/ns/net")).expect("a link");
        assert_eq!(with_sessions(&sysroot), [lost]);
    }
}
