//! A place for a tombstone on any machine with UEFI, whatever its disks: a variable of the
//! firmware, through efivarfs. The folder is held open, because no path name can be looked up at
//! the commit if the root is on another machine.

use rustix::{
    fs::{AtFlags, CWD, IFlags, Mode, OFlags},
    io::Errno,
    mount::{MountFlags, mount},
};
use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

/// The folder in which the kernel shows the variables.
pub const FOLDER: &str = "sys/firmware/efi/efivars";
/// Name of the source's tombstone, with Mercury's own vendor GUID.
pub const TOMBSTONE: &str = "MercuryTombstone-b3391025-8533-46fd-88a9-0064a0d1c64e";

/// Attributes: kept without power, and visible to the firmware and to the system.
const ATTRIBUTES: [u8; 4] = 7_u32.to_le_bytes();
/// Size limit for reading a variable of Mercury's.
const MOST: u64 = 16 << 10;

/// The firmware's variables.
#[derive(Debug)]
pub struct Variables {
    folder: OwnedFd,
}

impl Variables {
    /// Opens the variables in a folder.
    ///
    /// # Errors
    ///
    /// Returns an error if the folder cannot be opened.
    pub fn at(folder: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(Self { folder: rustix::fs::openat(CWD, folder, flags, Mode::empty())? })
    }

    /// Opens the variables of this machine, if its firmware has some; mounts efivarfs if needed.
    ///
    /// # Errors
    ///
    /// Returns an error if they cannot be reached.
    pub fn of_this_machine(root: &Path) -> io::Result<Option<Self>> {
        let folder = root.join(FOLDER);
        let Ok(mut entries) = std::fs::read_dir(&folder) else { return Ok(None) };
        if entries.next().is_none() {
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            match mount("efivarfs", &folder, "efivarfs", flags, None) {
                // The kernel does not use the firmware after the start: a real-time kernel, or
                // efi=noruntime.
                Err(Errno::OPNOTSUPP | Errno::NODEV) => return Ok(None),
                other => other?,
            }
        }
        Self::at(&folder).map(Some)
    }

    /// Duplicates the descriptor for another owner.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no descriptors left.
    pub fn again(&self) -> io::Result<Self> {
        Ok(Self { folder: self.folder.try_clone()? })
    }

    /// Reads a variable; returns `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be read.
    pub fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        let read = self.open(name, OFlags::RDONLY).and_then(|file| file.take(MOST).read_to_end(&mut bytes));
        match read {
            // A name may stay without a variable in the firmware.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        Ok(bytes.get(ATTRIBUTES.len()..).filter(|data| !data.is_empty()).map(<[u8]>::to_vec))
    }

    /// Writes a variable. The firmware keeps it when this returns.
    ///
    /// # Errors
    ///
    /// Returns an error if the firmware does not keep it.
    pub fn write(&self, name: &str, data: &[u8]) -> io::Result<()> {
        self.let_change(name)?;
        let mut file = self.open(name, OFlags::WRONLY | OFlags::CREATE)?;
        // The kernel needs a variable in one write.
        let whole = [&ATTRIBUTES, data].concat();
        if file.write(&whole)? != whole.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(())
    }

    /// Removes a variable.
    ///
    /// # Errors
    ///
    /// Returns an error if the firmware keeps it.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.let_change(name)?;
        match rustix::fs::unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes a variable changeable: the kernel protects unknown variables against programs that
    /// remove whole trees.
    fn let_change(&self, name: &str) -> io::Result<()> {
        let file = match self.open(name, OFlags::RDONLY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        let flags = match rustix::fs::ioctl_getflags(&file) {
            // This file system protects nothing.
            Err(Errno::NOTTY | Errno::OPNOTSUPP) => return Ok(()),
            other => other?,
        };
        if flags.contains(IFlags::IMMUTABLE) {
            rustix::fs::ioctl_setflags(&file, flags - IFlags::IMMUTABLE)?;
        }
        Ok(())
    }

    fn open(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let mode = Mode::RUSR | Mode::WUSR;
        let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(self.folder.as_fd(), name, flags, mode)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_variable_is_kept_with_its_attributes() {
        let folder = tempfile::tempdir().expect("a folder");
        let variables = Variables::at(folder.path()).expect("it is there");
        assert_eq!(variables.read(TOMBSTONE).expect("none"), None);
        for data in [b"first", b"other"] {
            variables.write(TOMBSTONE, data).expect("written");
            let file = fs::read(folder.path().join(TOMBSTONE)).expect("a file");
            assert_eq!(file, [&[7, 0, 0, 0][..], data].concat());
            assert_eq!(variables.read(TOMBSTONE).expect("read").as_deref(), Some(&data[..]));
        }
        assert_eq!(variables.read("MercuryTombstone-another").expect("none"), None);
        variables.remove(TOMBSTONE).expect("removed");
        variables.remove(TOMBSTONE).expect("it is gone already");
        assert_eq!(variables.read(TOMBSTONE).expect("none"), None);
    }

    /// An empty variable counts as missing: the name of a variable that could not be written stays.
    #[test]
    fn an_empty_one_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let variables = Variables::at(folder.path()).expect("it is there");
        for bytes in [&[][..], &[7, 0, 0, 0]] {
            fs::write(folder.path().join(TOMBSTONE), bytes).expect("a file");
            assert_eq!(variables.read(TOMBSTONE).expect("none"), None);
        }
    }

    #[test]
    fn the_folder_need_not_be_found_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let (before, after) = (folder.path().join("before"), folder.path().join("after"));
        fs::create_dir(&before).expect("a folder");
        let variables = Variables::at(&before).expect("it is there");
        fs::rename(&before, &after).expect("renamed");
        variables.write(TOMBSTONE, b"tombstone").expect("written");
        assert!(after.join(TOMBSTONE).exists());
    }

    #[test]
    fn a_machine_with_a_bios_has_none() {
        let root = tempfile::tempdir().expect("a folder");
        assert!(Variables::of_this_machine(root.path()).expect("no error").is_none());
    }
}
