//! The way from the initramfs to the real root: modules, disks, mounts, and the change of root.
//!
//! The initramfs holds this program, the modules that the kernel needs to see its disks and the
//! port to the host, and `/modules`, the list of their names in loading order.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use mercury_lab_agent::{LAB_DIR, LAB_LABEL, ROOT_LABEL};
use rustix::{
    io::Errno,
    mount::{MountFlags, mount, mount_move},
};

use crate::{Result, cmdline::Cmdline};

/// Time limit for the disks to appear.
const DISK_TIMEOUT: Duration = Duration::from_secs(60);
const NEW_ROOT: &str = "/root.new";

/// Goes from the initramfs to the root disk.
pub fn enter_root() -> Result<()> {
    mount_kernel_trees()?;
    load_modules()?;
    fs::create_dir_all(NEW_ROOT)?;
    let only_read = if Cmdline::read().has("ro") { MountFlags::RDONLY } else { MountFlags::empty() };
    mount_labelled(ROOT_LABEL, Path::new(NEW_ROOT), MountFlags::NOATIME | only_read)?;
    let lab = Path::new(NEW_ROOT).join(&LAB_DIR[1..]);
    fs::create_dir_all(&lab)?;
    mount_labelled(LAB_LABEL, &lab, MountFlags::RDONLY)?;
    switch_root()
}

fn mount_kernel_trees() -> Result<()> {
    for (kind, at) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        fs::create_dir_all(at)?;
        match mount(kind, at, kind, MountFlags::empty(), None) {
            // The kernel may have mounted its devices already.
            Ok(()) | Err(Errno::BUSY) => {}
            Err(error) => return Err(format!("cannot mount {kind}: {error}").into()),
        }
    }
    Ok(())
}

fn load_modules() -> Result<()> {
    for name in fs::read_to_string("/modules").unwrap_or_default().lines() {
        let module = File::open(Path::new("/").join(name))?;
        match rustix::system::finit_module(&module, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => eprintln!("mercury-lab-agent: cannot load {name}: {error}"),
        }
    }
    Ok(())
}

fn mount_labelled(label: &str, at: &Path, flags: MountFlags) -> Result<()> {
    let disk = wait_for_disk(label)?;
    mount(&disk, at, "ext4", flags, None)
        .map_err(|error| format!("cannot mount {} ({label}): {error}", disk.display()).into())
}

fn wait_for_disk(label: &str) -> Result<PathBuf> {
    let start = Instant::now();
    while start.elapsed() < DISK_TIMEOUT {
        if let Some(disk) = find_disk(label) {
            return Ok(disk);
        }
        thread::sleep(Duration::from_millis(10));
    }
    Err(format!("no disk labelled {label} has appeared").into())
}

/// Returns the disk whose ext4 label is `label`, on any bus.
fn find_disk(label: &str) -> Option<PathBuf> {
    fs::read_dir("/sys/block")
        .ok()?
        .flatten()
        .map(|entry| Path::new("/dev").join(entry.file_name()))
        .find(|disk| ext4_label(disk).is_some_and(|found| found == label))
}

/// Reads `s_volume_name` from the superblock, which begins 1,024 bytes into the disk.
fn ext4_label(disk: &Path) -> Option<String> {
    const SUPERBLOCK: u64 = 1024;
    const MAGIC: (usize, [u8; 2]) = (0x38, [0x53, 0xEF]);
    const LABEL: std::ops::Range<usize> = 0x78..0x88;
    let mut superblock = [0; 0x88];
    let mut file = File::open(disk).ok()?;
    file.seek(SeekFrom::Start(SUPERBLOCK)).ok()?;
    file.read_exact(&mut superblock).ok()?;
    if superblock[MAGIC.0..MAGIC.0 + 2] != MAGIC.1 {
        return None;
    }
    let label = superblock[LABEL].split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(label).into_owned())
}

/// Makes the root disk the root, and frees the contents of the initramfs first.
fn switch_root() -> Result<()> {
    for name in fs::read_to_string("/modules").unwrap_or_default().lines() {
        let _ = fs::remove_file(Path::new("/").join(name));
    }
    let _ = fs::remove_file("/init");
    for tree in ["dev", "proc", "sys"] {
        let to = Path::new(NEW_ROOT).join(tree);
        fs::create_dir_all(&to)?;
        mount_move(Path::new("/").join(tree), to)?;
    }
    rustix::process::chdir(NEW_ROOT)?;
    mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    rustix::process::chdir("/")?;
    Ok(())
}
