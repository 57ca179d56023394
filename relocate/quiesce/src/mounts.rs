//! File systems that are mounted from block devices, as `/proc/self/mountinfo` lists them.

use super::file_systems::Kind;
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// A mounted file system on a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// Major and minor number, as in `/sys/dev/block`.
    pub number: String,
    /// Mount point.
    pub at: PathBuf,
    pub kind: String,
    pub device: PathBuf,
    /// True if the file system can be written to. A read-only one must be unchanged as well,
    /// because the kernel remembers what it has read.
    pub writable: bool,
}

/// The table of mounts of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// A task in the namespace, such as "process 77"; `None` for this process's own.
    pub who: Option<String>,
    pub text: String,
}

impl Table {
    /// Describes a mount point of the table, such as "/data of process 77".
    #[must_use]
    pub fn place(&self, at: &str) -> String {
        let at = unescaped(at);
        self.who.as_ref().map_or_else(|| at.clone(), |who| format!("{at} of {who}"))
    }
}

/// Reads the tables of all mount namespaces that a task is in, each once, this process's first. A thread
/// may have a namespace of its own.
#[must_use]
pub fn tables(sysroot: &Sysroot) -> Vec<Table> {
    let text = |path: &str| {
        let bytes = sysroot.bytes(path).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let namespace = |task: &str| std::fs::read_link(sysroot.path(&format!("proc/{task}/ns/mnt"))).ok();
    let mut seen: BTreeSet<_> = namespace("self").into_iter().collect();
    let mut tables = vec![Table { who: None, text: text("proc/self/mountinfo") }];
    let mut processes = sysroot.names("proc");
    processes.retain(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    for process in processes {
        for thread in sysroot.names(&format!("proc/{process}/task")) {
            let task = format!("{process}/task/{thread}");
            if !namespace(&task).is_some_and(|namespace| seen.insert(namespace)) {
                continue;
            }
            let who = match thread == process {
                true => format!("process {process}"),
                false => format!("thread {thread} of process {process}"),
            };
            tables.push(Table { who: Some(who), text: text(&format!("proc/{task}/mountinfo")) });
        }
    }
    tables
}

/// Lists mounted file systems on disks, each once.
///
/// # Errors
///
/// Returns an error if the list is incomplete, or one is of a kind that has disks without a device
/// number of its own.
pub fn mounted(sysroot: &Sysroot) -> Result<Vec<Mounted>> {
    let table = sysroot
        .bytes("proc/self/mountinfo")
        .ok_or_else(|| Error::new(Exit::Failed, "/proc/self/mountinfo cannot be read").hint("mount /proc"))?;
    let table = String::from_utf8_lossy(&table);
    if let Some(line) = table.lines().find(|line| line.contains(" - zfs ")) {
        let at = line.split(' ').nth(4).unwrap_or_default();
        let text = format!("{at} is a ZFS file system, which cannot be held still");
        return Err(Error::coded(Code::DisksUnheld, text).hint("export the pool"));
    }
    if let Some((kind, at)) = table.lines().find_map(|line| composed_of_several(line, sysroot)) {
        let text = format!("{at} is a {kind} file system, whose disks are unknown");
        return Err(Error::coded(Code::DisksUnheld, text).hint("unmount it"));
    }
    let mut seen = BTreeSet::new();
    let mut mounts: Vec<_> =
        table.lines().filter_map(mount).filter(|mount| seen.insert(mount.number.clone())).collect();
    for mount in &mut mounts {
        if !mount.device.is_absolute() || !mount.device.exists() {
            find_device(mount, sysroot);
        }
    }
    Ok(mounts)
}

/// Finds the kernel's own name for a device that is mounted by another one: `/dev/root`, or a
/// relative name.
fn find_device(mount: &mut Mounted, sysroot: &Sysroot) {
    let event = sysroot.text(&format!("sys/dev/block/{}/uevent", mount.number)).unwrap_or_default();
    if let Some(name) = event.lines().find_map(|line| line.strip_prefix("DEVNAME=")) {
        mount.device = Path::new("/dev").join(name);
    }
}

/// Returns kind and place of a file system that is on disks and yet has no device number. Except
/// for btrfs, the disks of such file systems are unknown.
fn composed_of_several(line: &str, sysroot: &Sysroot) -> Option<(String, String)> {
    let (front, back) = line.split_once(" - ")?;
    let (number, at) = (front.split(' ').nth(2)?, front.split(' ').nth(4)?);
    let kind = back.split(' ').next()?;
    let known = sysroot.text("proc/filesystems").unwrap_or_default();
    // File systems without a disk have a word before their name in this list.
    let wants_disk = known.lines().any(|line| line.strip_prefix('\t') == Some(kind));
    (wants_disk && number.starts_with("0:") && !has_own_numbers(kind))
        .then(|| (kind.to_owned(), unescaped(at)))
}

/// Returns the file system that a file is on: the one mounted closest above it.
#[must_use]
pub fn holder<'a>(mounts: &'a [Mounted], path: &Path, sysroot: &Sysroot) -> Option<&'a Mounted> {
    let table = sysroot.bytes("proc/self/mountinfo").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    let line = line_of(&table, path)?;
    let found = mount(line)?;
    mounts.iter().find(|mount| mount.number == found.number)
}

/// Returns the line of mountinfo for the file system that a file is on.
#[must_use]
pub fn line_of<'a>(table: &'a str, path: &Path) -> Option<&'a str> {
    let points =
        table.lines().filter_map(|line| line.split(' ').nth(4)).map(|at| PathBuf::from(unescaped(at)));
    let closest = points.filter(|at| path.starts_with(at)).max_by_key(|at| at.components().count())?;
    table
        .lines()
        .rev()
        .find(|line| line.split(' ').nth(4).is_some_and(|at| Path::new(&unescaped(at)) == closest))
}

/// Parses a line of mountinfo: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root
/// rw,errors=continue`
pub(super) fn mount(line: &str) -> Option<Mounted> {
    let (front, back) = line.split_once(" - ")?;
    let front: Vec<_> = front.split(' ').collect();
    let back: Vec<_> = back.split(' ').collect();
    let (number, at) = (front.get(2)?, front.get(4)?);
    let (kind, device, options) = (back.first()?, back.get(1)?, back.get(2)?);
    // btrfs has numbers of its own, although it is on a device.
    let on_disk = !number.starts_with("0:") || (has_own_numbers(kind) && device.starts_with("/dev/"));
    let writable = options.split(',').any(|option| option == "rw");
    on_disk.then(|| Mounted {
        number: (*number).to_owned(),
        at: unescaped(at).into(),
        kind: (*kind).to_owned(),
        device: unescaped(device).into(),
        writable,
    })
}

/// Returns the mount points of file systems on other machines that are mounted for writing.
#[must_use]
pub fn served(sysroot: &Sysroot) -> Vec<String> {
    const KINDS: [&str; 5] = ["nfs", "nfs4", "cifs", "smb3", "ceph"];
    let place = |line: &str| {
        let (front, back) = line.split_once(" - ")?;
        let mut words = front.split(' ').skip(4);
        let (at, options) = (words.next()?, words.next()?);
        let is_writable = options.split(',').any(|option| option == "rw");
        (is_writable && KINDS.contains(&back.split(' ').next()?)).then(|| unescaped(at))
    };
    sysroot.text("proc/self/mountinfo").unwrap_or_default().lines().filter_map(place).collect()
}

/// Replaces escapes such as \040 for a space.
pub fn unescaped(text: &str) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        result += before;
        match after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                result.push(char::from(byte));
                rest = &after[3..];
            }
            None => {
                result.push('\\');
                rest = after;
            }
        }
    }
    result + rest
}

/// Returns true for types whose mounts have device numbers of their own.
pub(super) fn has_own_numbers(kind: &str) -> bool {
    Kind::of(kind).is_some_and(Kind::has_own_numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts() {
        let line = "36 35 98:0 / /mnt\\040x rw,noatime master:1 - ext3 /dev/vda rw,errors=continue";
        let found = mount(line).expect("a mount");
        assert_eq!((found.at.to_str(), found.kind.as_str()), (Some("/mnt x"), "ext3"));
        assert!(found.writable);
        assert!(!mount(&line.replace(" rw,errors", " ro,errors")).expect("a mount").writable);
        assert_eq!(mount(&line.replace("98:0", "0:22").replace("/dev/vda", "tmpfs")), None);
        assert!(mount(&line.replace("/dev/vda", "vda")).is_some(), "mounted from within /dev");
        assert_eq!(mount("36 35"), None);
    }

    fn with_files(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        }
        let sysroot = Sysroot::at(root.path());
        (root, sysroot)
    }

    #[test]
    fn file_systems_of_servers_are_listed_if_they_can_be_written_to() {
        let (_root, sysroot) = with_files(&[(
            "proc/self/mountinfo",
            "22 1 0:20 / / rw,relatime shared:1 - nfs4 10.0.0.1:/root rw,addr=10.0.0.1\n\
             30 22 0:30 / /ro ro - nfs s:/ rw,vers=3\n31 22 98:1 / /data rw - ext4 /dev/sda1 rw\n\
             32 22 0:31 / /with\\040space rw - cifs //files/all rw\n",
        )]);
        assert_eq!(served(&sysroot), ["/", "/with space"]);
    }

    #[test]
    fn a_device_is_found_by_its_number() {
        let (_root, sysroot) = with_files(&[
            ("proc/self/mountinfo", "1 0 98:7 / / rw - ext4 /dev/root rw\n"),
            ("sys/dev/block/98:7/uevent", "MAJOR=98\nMINOR=7\nDEVNAME=vdz7\nDEVTYPE=partition\n"),
        ]);
        assert_eq!(mounted(&sysroot).expect("mounts")[0].device, Path::new("/dev/vdz7"));
    }

    #[test]
    fn disks_that_cannot_be_told_are_refused() {
        let line = "1 0 0:44 / /pool rw - bcachefs /dev/sda:/dev/sdb rw\n2 0 0:5 / /tmp rw - tmpfs none rw";
        let (_root, sysroot) = with_files(&[
            ("proc/self/mountinfo", line),
            ("proc/filesystems", "nodev\tsysfs\nnodev\ttmpfs\n\text4\n\tbcachefs\n"),
        ]);
        let error = mounted(&sysroot).expect_err("refused");
        assert!(error.message.starts_with("/pool is a bcachefs file system"), "{}", error.message);
        assert_eq!((error.code, error.exit), (Some(Code::DisksUnheld), Exit::Impossible));
        let (_root, sysroot) = with_files(&[("proc/self/mountinfo", "1 0 0:44 / /pool rw - zfs tank rw\n")]);
        assert_eq!(mounted(&sysroot).expect_err("refused").code, Some(Code::DisksUnheld));
    }

    #[test]
    fn escapes() {
        assert_eq!(unescaped("a\\040b\\"), "a b\\");
        assert_eq!(unescaped("\\9\\011"), "\\9\t");
    }
}
