//! Block devices that are held, although no mount table that this command can read has a file
//! system on them. A file system lives on after `umount -l` until its last file is closed. It may
//! be mounted in a namespace that no process is in, or only in a descriptor (`fsmount()`). Such a
//! file system can be neither frozen nor compared. The kernel goes on writing to it after the
//! instant, and a machine that is brought back would destroy it.
//!
//! Each holder of a block device, such as a file system of any kind, has claimed it: opening the
//! device with O_EXCL fails with EBUSY.

use super::{block_devices, file_systems::LISTED_BY_DEVICE, mounts::Mounted, patient, swap};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use rustix::fs::{AtFlags, StatxFlags};
use std::{
    collections::BTreeSet,
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
    time::{Duration, Instant},
};

/// Links from processes to files, besides their descriptors.
const PLACES: [&str; 3] = ["cwd", "root", "exe"];

/// Time for the kernel to give the map of one process, and for those of all. It waits while the process
/// changes its map, and that may wait for a disk.
const MAP_PATIENCE: Duration = Duration::from_secs(1);
const MAPS_PATIENCE: Duration = Duration::from_secs(10);
/// Longest part of a map that is searched, in bytes.
const MAPS_LONGEST: usize = 16 << 20;

/// Refuses a machine with a held disk that this command cannot hold still: the disk is neither
/// mounted within reach, nor swap, nor a part of another device.
///
/// # Errors
///
/// Returns an error that names the disks, their known contents, and processes that use them; or a
/// disk that does not answer.
pub fn refuse(mounts: &[Mounted], sysroot: &Sysroot) -> Result<()> {
    let held = unexplained(mounts, sysroot, &|device| patient::claim(device))?;
    if held.is_empty() {
        return Ok(());
    }
    Err(refusal(&held, sysroot))
}

fn refusal(held: &[String], sysroot: &Sysroot) -> Error {
    let all: Vec<_> = held.iter().map(|name| described(name, sysroot)).collect();
    let text = format!("disks are in use where this command cannot hold them still: {}", all.join(", "));
    Error::coded(Code::DisksUnheld, text)
}

/// Returns the names of block devices that are claimed for an unknown reason.
fn unexplained(
    mounts: &[Mounted],
    sysroot: &Sysroot,
    claim: &dyn Fn(&Path) -> io::Result<()>,
) -> Result<Vec<String>> {
    let known = known(mounts, sysroot);
    let is_known = |name: &String| {
        let of = |what: &str| sysroot.text(&format!("sys/class/block/{name}/{what}"));
        // zram and RAM disks are memory, and in the image.
        let is_memory = name.starts_with("zram") || name.starts_with("ram");
        let is_below_another = !sysroot.names(&format!("sys/class/block/{name}/holders")).is_empty();
        // A device without a size holds no data: an unconnected loop or NBD device.
        let is_nothing = of("size").is_some_and(|size| size == "0");
        is_memory || is_nothing || is_below_another || of("dev").is_none_or(|number| known.contains(&number))
    };
    let (explained, rest): (Vec<_>, Vec<_>) =
        sysroot.names("sys/class/block").into_iter().partition(is_known);
    let mut claimed = Vec::new();
    for name in rest {
        match claim(&block_devices::device_file(&name)) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => claimed.push(name),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(Error::new(Exit::Failed, format!("/dev/{name} cannot be opened: {error}"))
                    .hint("make the disk answer again, or remove it, and try again"));
            }
            _ => {}
        }
    }
    // A claim of a partition claims its disk as well, and the other way round.
    let disk_of = |name: &str| disk_of(name, sysroot);
    let is_of = |name: &String, others: &[String]| {
        others
            .iter()
            .any(|other| disk_of(other).as_ref() == Some(name) || disk_of(name).as_ref() == Some(other))
    };
    let is_own = |name: &&String| {
        !is_of(name, &explained) && !claimed.iter().any(|part| disk_of(part).as_ref() == Some(*name))
    };
    Ok(claimed.iter().filter(is_own).cloned().collect())
}

/// Returns the disk of a partition.
fn disk_of(name: &str, sysroot: &Sysroot) -> Option<String> {
    sysroot.text(&format!("sys/class/block/{name}/partition"))?;
    let place = std::fs::canonicalize(sysroot.path(&format!("sys/class/block/{name}"))).ok()?;
    Some(place.parent()?.file_name()?.to_string_lossy().into_owned())
}

/// Returns the numbers of devices that this command can hold still or holds itself.
fn known(mounts: &[Mounted], sysroot: &Sysroot) -> BTreeSet<String> {
    let mut known: BTreeSet<_> = mounts.iter().map(|mount| mount.number.clone()).collect();
    let number_of = |path: &Path| {
        let found = std::fs::metadata(path).ok().filter(|found| found.file_type().is_block_device())?;
        Some(number(found.rdev()))
    };
    known.extend(mounts.iter().filter_map(|mount| number_of(&mount.device)));
    let swaps = swap::paths(sysroot);
    known.extend(swaps.iter().filter_map(|path| number_of(path)));
    // A swap area gives everything back before the instant.
    let is_swap = |zram: &str| swaps.iter().any(|path| path.file_name().is_some_and(|name| name == zram));
    let empty =
        backing_disks(sysroot).into_iter().filter(|disk| disk.pages == Some(0) || is_swap(&disk.zram));
    known.extend(empty.map(|disk| disk.number));
    // The image may be written to one of them.
    let own = sysroot.names("proc/self/fd");
    known.extend(own.iter().filter_map(|fd| number_of(&sysroot.path(&format!("proc/self/fd/{fd}")))));
    // btrfs may use more devices than the mounted one.
    for volume in sysroot.names("sys/fs/btrfs") {
        let disks = sysroot.names(&format!("sys/fs/btrfs/{volume}/devices"));
        let numbers: Vec<_> =
            disks.iter().filter_map(|disk| sysroot.text(&format!("sys/class/block/{disk}/dev"))).collect();
        if numbers.iter().any(|number| known.contains(number)) {
            known.extend(numbers);
        }
    }
    known
}

/// A disk to which zram writes pages when a program tells it to.
struct BackingDisk {
    zram: String,
    number: String,
    /// Pages of zram that are there and not in memory.
    pages: Option<u64>,
}

fn backing_disks(sysroot: &Sysroot) -> Vec<BackingDisk> {
    let zrams = sysroot.names("sys/block").into_iter().filter(|name| name.starts_with("zram"));
    let disk = |zram: String| {
        let path = sysroot.text(&format!("sys/block/{zram}/backing_dev"))?;
        let name = Path::new(&path).file_name()?.to_string_lossy().into_owned();
        let found = || Some(number(std::fs::metadata(&path).ok()?.rdev()));
        let number = sysroot.text(&format!("sys/class/block/{name}/dev")).or_else(found)?;
        let state = sysroot.text(&format!("sys/block/{zram}/bd_stat")).unwrap_or_default();
        let pages = state.split_whitespace().next().and_then(|pages| pages.parse().ok());
        Some(BackingDisk { zram, number, pages })
    };
    zrams.filter_map(disk).collect()
}

fn number(device: u64) -> String {
    format!("{}:{}", libc::major(device), libc::minor(device))
}

/// Describes a device with its known uses, such as "/dev/sdb1 (ext4, used by tail (77))".
fn described(name: &str, sysroot: &Sysroot) -> String {
    let kind = LISTED_BY_DEVICE.iter().find(|kind| sysroot.exists(&format!("sys/fs/{kind}/{name}")));
    let number = sysroot.text(&format!("sys/class/block/{name}/dev")).unwrap_or_default();
    if let Some(BackingDisk { zram, pages, .. }) =
        backing_disks(sysroot).into_iter().find(|disk| disk.number == number)
    {
        let pages = pages.map_or_else(|| "an unknown number of".into(), |pages| pages.to_string());
        return format!("/dev/{name} (the backing disk of {zram}, which has {pages} pages there)");
    }
    let users = users(&number, sysroot);
    let users = match &users[..] {
        [] => "in use by the kernel, for no process that can be named".to_owned(),
        some => format!("used by {}", some.join(" and ")),
    };
    let kind = kind.map(|kind| format!("{kind}, ")).unwrap_or_default();
    format!("/dev/{name} ({kind}{users})")
}

/// Lists processes that use files on a device, or the device itself, such as "tail (77)". The list is
/// incomplete if a process does not give its map, because it waits for a disk.
fn users(number: &str, sysroot: &Sysroot) -> Vec<String> {
    let end = Instant::now() + MAPS_PATIENCE;
    let maps = |folder: &str| {
        let left = end.saturating_duration_since(Instant::now());
        let path = sysroot.path(&format!("{folder}/maps"));
        let read = || patient::read_file(&path, MAPS_LONGEST, MAP_PATIENCE).ok();
        let bytes = if left.is_zero() { None } else { read() };
        bytes.is_some_and(|bytes| maps_it(&String::from_utf8_lossy(&bytes), number))
    };
    let mut processes = sysroot.names("proc");
    processes.retain(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let uses = |process: &&String| {
        let folder = format!("proc/{process}");
        let descriptors = sysroot.names(&format!("{folder}/fd")).into_iter().map(|fd| format!("fd/{fd}"));
        let mut places = descriptors.chain(PLACES.map(str::to_owned));
        places.any(|place| is_on(&sysroot.path(&format!("{folder}/{place}")), number)) || maps(&folder)
    };
    let name = |process: &String| {
        format!("{} ({process})", sysroot.text(&format!("proc/{process}/comm")).unwrap_or_default())
    };
    processes.iter().filter(uses).map(name).collect()
}

/// Returns true if a file is on a device, or is the device. The kernel asks no server for this.
fn is_on(path: &Path, number: &str) -> bool {
    let found = rustix::fs::statx(
        rustix::fs::CWD,
        path,
        AtFlags::STATX_DONT_SYNC,
        StatxFlags::TYPE | StatxFlags::MODE,
    );
    found.is_ok_and(|found| {
        [(found.stx_dev_major, found.stx_dev_minor), (found.stx_rdev_major, found.stx_rdev_minor)]
            .iter()
            .any(|(major, minor)| format!("{major}:{minor}") == number)
    })
}

/// Returns true if a line of /proc/PID/maps has a file on a device: `… r-xp 00000000 fe:10 1234
/// /bin/x`.
fn maps_it(maps: &str, number: &str) -> bool {
    let numbers = maps.lines().filter_map(|line| line.split_whitespace().nth(3)?.split_once(':'));
    let parsed = numbers.filter_map(|(major, minor)| {
        Some((u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?))
    });
    parsed.into_iter().any(|(major, minor)| format!("{major}:{minor}") == number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    /// Makes a system with devices by name and number; a name with a slash is a partition of the
    /// disk before it.
    fn machine(devices: &[(&str, &str)]) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let class = root.path().join("sys/class/block");
        fs::create_dir_all(&class).expect("folders");
        for (place, number) in devices {
            let folder = root.path().join("sys/devices").join(place);
            fs::create_dir_all(folder.join("holders")).expect("folders");
            fs::write(folder.join("dev"), number).expect("a file");
            if place.contains('/') {
                fs::write(folder.join("partition"), "1").expect("a file");
            }
            symlink(&folder, class.join(folder.file_name().expect("a name"))).expect("a link");
        }
        let sysroot = Sysroot::at(root.path());
        (root, sysroot)
    }

    fn mounted(number: &str) -> Mounted {
        Mounted {
            number: number.into(),
            at: "/data".into(),
            kind: "ext4".into(),
            device: "/no/such/disk".into(),
            writable: true,
        }
    }

    fn held(mounts: &[Mounted], sysroot: &Sysroot, busy: &[&str]) -> Vec<String> {
        let claim = |device: &Path| {
            let name = device.file_name().expect("a name").to_string_lossy().into_owned();
            if busy.contains(&&*name) { Err(io::Error::from_raw_os_error(libc::EBUSY)) } else { Ok(()) }
        };
        unexplained(mounts, sysroot, &claim).expect("they answer")
    }

    #[test]
    fn a_device_held_for_no_known_reason_is_named() {
        let (root, sysroot) = machine(&[
            ("sda", "8:0"),
            ("sda/sda1", "8:1"),
            ("sda/sda2", "8:2"),
            ("sdb", "8:16"),
            ("sdb/sdb1", "8:17"),
            ("zram0", "254:0"),
        ]);
        let mounts = [mounted("8:1")];
        let all = ["sda", "sda1", "zram0"];
        assert!(held(&mounts, &sysroot, &all).is_empty(), "a disk is claimed with its partition");
        assert_eq!(held(&mounts, &sysroot, &["sda", "sda1", "sda2"]), ["sda2"]);
        assert_eq!(held(&mounts, &sysroot, &["sda", "sdb", "sdb1"]), ["sdb1"], "the part, not the whole");
        assert_eq!(held(&mounts, &sysroot, &["sdb"]), ["sdb"]);
        assert!(held(&[mounted("8:16")], &sysroot, &["sdb", "sdb1"]).is_empty(), "a whole disk is mounted");
        fs::create_dir(root.path().join("sys/devices/sdb/holders/dm-0")).expect("a folder");
        assert!(held(&mounts, &sysroot, &["sdb"]).is_empty(), "a volume is made of it");
    }

    #[test]
    fn all_disks_of_a_volume_of_btrfs_are_known() {
        let (root, sysroot) = machine(&[("sda", "8:0"), ("sdb", "8:16"), ("sdc", "8:32")]);
        for disk in ["sda", "sdb"] {
            fs::create_dir_all(root.path().join("sys/fs/btrfs/1234/devices").join(disk)).expect("folders");
        }
        fs::create_dir_all(root.path().join("sys/fs/btrfs/5678/devices/sdc")).expect("folders");
        let all = ["sda", "sdb", "sdc"];
        assert_eq!(held(&[mounted("8:0")], &sysroot, &all), ["sdc"]);
    }

    /// zram claims its backing disk for as long as it is there, with data on it or without.
    #[test]
    fn a_backing_disk_of_zram_is_held_if_memory_has_everything() {
        let (root, sysroot) = machine(&[("sdb", "8:16"), ("sdb/sdb1", "8:17"), ("zram0", "254:0")]);
        let put = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, text).expect("a file");
        };
        let found = || held(&[], &sysroot, &["sdb", "sdb1", "zram0"]);
        put("sys/block/zram0/backing_dev", "none\n");
        assert_eq!(found(), ["sdb1"]);
        put("sys/block/zram0/backing_dev", "/dev/sdb1\n");
        put("sys/block/zram0/bd_stat", "       3        0        3\n");
        assert_eq!(found(), ["sdb1"], "a file system on zram, with pages on the disk");
        let text = "/dev/sdb1 (the backing disk of zram0, which has 3 pages there)";
        assert_eq!(described("sdb1", &sysroot), text);
        put("sys/block/zram0/bd_stat", "       0        0        3\n");
        assert!(found().is_empty(), "nothing is there");
        put("sys/block/zram0/bd_stat", "       3        0        3\n");
        put("proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 8 4 100\n");
        assert!(found().is_empty(), "everything is read back before the instant");
    }

    #[test]
    fn one_that_does_not_answer_is_named() {
        let (_root, sysroot) = machine(&[("sda", "8:0")]);
        let claim = |_: &Path| Err(io::ErrorKind::TimedOut.into());
        let error = unexplained(&[], &sysroot, &claim).expect_err("no answer");
        assert!(error.message.starts_with("/dev/sda cannot be opened"), "{error}");
    }

    #[test]
    fn users_are_named() {
        let (root, sysroot) = machine(&[("sdb", "8:16")]);
        assert_eq!(
            described("sdb", &sysroot),
            "/dev/sdb (in use by the kernel, for no process that can be named)"
        );
        fs::create_dir_all(root.path().join("sys/fs/ext4/sdb")).expect("folders");
        fs::create_dir_all(root.path().join("proc/77")).expect("folders");
        fs::write(root.path().join("proc/77/comm"), "tail\n").expect("a file");
        fs::write(root.path().join("proc/77/maps"), "0-1 r-xp 00000000 08:10 1234 /x\n").expect("a file");
        assert_eq!(described("sdb", &sysroot), "/dev/sdb (ext4, used by tail (77))");
        // A map that is not given: opening a pipe without a writer waits.
        fs::create_dir_all(root.path().join("proc/76")).expect("folders");
        let pipe = root.path().join("proc/76/maps");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        let begun = Instant::now();
        assert_eq!(described("sdb", &sysroot), "/dev/sdb (ext4, used by tail (77))");
        assert!(begun.elapsed() < MAPS_PATIENCE);
        // The child that was left behind ends.
        drop(fs::OpenOptions::new().read(true).write(true).open(&pipe).expect("its other end"));
        let refusal = refusal(&["sdb".to_owned()], &sysroot);
        assert!(refusal.message.ends_with("tail (77)) [disks-unheld]"), "{}", refusal.message);
        assert_eq!(refusal.exit, Exit::Impossible);
        let file = tempfile::NamedTempFile::new().expect("a file");
        let on = fs::metadata(file.path()).expect("a file").dev();
        assert!(is_on(file.path(), &number(on)) && !is_on(file.path(), "8:16"));
    }
}
