//! The disks of a machine as they were at one moment. Each start of the machine may begin from them
//! again. The host's tools examine what a power cut leaves.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    emulator::file,
    error::{Context, Error, Result},
    host,
};

/// Disks whose contents at one moment are kept.
#[derive(Debug)]
pub struct Disks {
    dir: PathBuf,
    kept: PathBuf,
    extra: usize,
}

/// One of a machine's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    /// The disk of the root file system.
    Root,
    /// A disk of [`crate::Spec::disk`], by its number.
    Extra(usize),
}

/// The treatment of data that was written to a disk and not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Most unflushed data is lost in a power cut: only a flush makes known where the data lies (a
    /// layer of qcow2).
    Back,
    /// Data is on the disk when the write ends.
    Through,
}

impl Disk {
    /// Returns the disk's name in QEMU's arguments.
    pub(crate) fn id(self) -> String {
        match self {
            Self::Root => "root".to_owned(),
            Self::Extra(index) => format!("disk{index}"),
        }
    }

    fn name(self) -> String {
        match self {
            Self::Root => file::ROOT.to_owned(),
            Self::Extra(index) => file::disk(index),
        }
    }
}

impl Disks {
    /// Keeps the disks of a machine that is off. `dir` is the machine's directory.
    pub(crate) fn keep(dir: &Path, extra: usize) -> Result<Self> {
        let disks = Self { dir: dir.to_owned(), kept: dir.to_owned(), extra };
        for disk in disks.all() {
            let (now, kept) = (disks.now(disk), disks.kept(disk));
            fs::rename(&now, &kept).context(|| format!("keep {}", now.display()))?;
            disks.put_back(disk, Cache::Back)?;
        }
        Ok(disks)
    }

    /// Copies the disks, as they are now, to a place beside the machine.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).context(|| format!("make {}", dir.display()))?;
        let copy = Self { dir: dir.to_owned(), kept: self.kept.clone(), extra: self.extra };
        for disk in self.all() {
            let mut command = Command::new("cp");
            command.arg("--sparse=always").arg(self.now(disk)).arg(copy.now(disk));
            host::run("copying a disk", "cp", &mut command)?;
        }
        Ok(copy)
    }

    fn all(&self) -> impl Iterator<Item = Disk> + use<> {
        [Disk::Root].into_iter().chain((0..self.extra).map(Disk::Extra))
    }

    fn now(&self, disk: Disk) -> PathBuf {
        self.dir.join(disk.name())
    }

    fn kept(&self, disk: Disk) -> PathBuf {
        self.kept.join(format!("kept-{}", disk.name()))
    }

    /// Gives a disk its kept contents again. The machine must be off.
    ///
    /// # Errors
    /// If the disk's contents cannot be restored.
    pub fn put_back(&self, disk: Disk, cache: Cache) -> Result<()> {
        let mut command = Command::new("qemu-img");
        match cache {
            Cache::Back => {
                command.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(self.kept(disk));
            }
            Cache::Through => {
                command.args(["convert", "-O", "qcow2", "-o", "preallocation=metadata"]).arg(self.kept(disk));
            }
        }
        host::run("putting a disk back", "qemu-img", command.arg(self.now(disk)))
    }

    /// Returns true if a disk holds the kept contents, bit by bit.
    ///
    /// # Errors
    /// If the disks cannot be compared.
    pub fn is_as_kept(&self, disk: Disk) -> Result<bool> {
        let mut command = Command::new("qemu-img");
        command.args(["compare", "-q"]).arg(self.kept(disk)).arg(self.now(disk));
        let status = command.status().context(|| "start qemu-img".into())?;
        match status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(Error::Host(format!("qemu-img compare: {status}"))),
        }
    }

    /// Writes a disk's present contents to a file, with holes in place of zeros.
    ///
    /// # Errors
    /// If the disk cannot be read, or the file not written.
    pub fn save(&self, disk: Disk, to: &Path) -> Result<()> {
        save(&self.now(disk), to)
    }

    /// Checks that the root file system recovers as it does in a system that comes up after a power
    /// cut: the journal is replayed, and then nothing is to be repaired. Works on a copy in
    /// `folder`.
    ///
    /// # Errors
    /// With what is to be repaired.
    pub fn root_recovers(&self, folder: &Path) -> Result<()> {
        on_a_copy(&self.now(Disk::Root), folder, |copy| {
            repairs("-p", copy, 1)?;
            repairs("-fn", copy, 0)
        })
    }
}

/// Checks that the root file system of a properly ended machine needs no repair, and no replay of
/// its journal. `dir` is the machine's directory.
pub(crate) fn root_is_clean(dir: &Path) -> Result<()> {
    on_a_copy(&dir.join(file::ROOT), dir, |copy| repairs("-fn", copy, 0))
}

fn save(disk: &Path, to: &Path) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-O", "raw"]).arg(disk).arg(to);
    host::run("copying a disk", "qemu-img", &mut command)
}

fn on_a_copy(disk: &Path, folder: &Path, check: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let copy = folder.join("copy-of-root");
    save(disk, &copy)?;
    let found = check(&copy);
    fs::remove_file(&copy).context(|| format!("remove {}", copy.display()))?;
    found
}

/// Runs e2fsck on a file system. Its exit code may be at most `most`: 0 means that nothing was to
/// be done, 1 that something was.
fn repairs(options: &str, file_system: &Path, most: i32) -> Result<()> {
    let output = Command::new("/sbin/e2fsck").arg(options).arg(file_system).output();
    let output = output.context(|| "start e2fsck".into())?;
    if output.status.code().is_some_and(|code| code <= most) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    Err(Error::Unhealthy(format!("e2fsck {options}: {}: {said}", output.status)))
}
