//! Files that are complete at any moment: written beside their place, made durable, and renamed.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, fchown},
    path::{Path, PathBuf},
};

/// Suffix of a file that is not in its place yet.
const SUFFIX: &str = ".mercury-new";

/// The permissions of a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// Only its owner may read it, because it may hold secrets.
    Owner,
    /// The users who could read the file that it replaces; without one, as the umask says.
    AsBefore,
}

/// A file that is written, and not in its place yet. It is removed if it is dropped before.
#[derive(Debug)]
pub struct Beside {
    now: PathBuf,
    place: PathBuf,
}

impl Beside {
    /// Writes the file. The file in its place stays there.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be written, or made durable.
    pub fn write(place: &Path, bytes: &[u8], readers: Readers) -> io::Result<Self> {
        let mut now = place.as_os_str().to_owned();
        now.push(SUFFIX);
        let new = Self { now: now.into(), place: place.to_owned() };
        // A file of that name is left over from a killed process.
        let _ = fs::remove_file(&new.now);
        let before = fs::metadata(place).ok().filter(|_| readers == Readers::AsBefore);
        let mode = if before.is_some() || readers == Readers::Owner { 0o600 } else { 0o666 };
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new.now)?;
        if let Some(before) = before {
            fchown(&file, Some(before.uid()), Some(before.gid()))?;
            file.set_permissions(before.permissions())?;
        }
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(new)
    }

    /// Renames the file to its place, durably.
    ///
    /// # Errors
    ///
    /// Returns an error if that fails.
    pub fn put(self) -> io::Result<()> {
        fs::rename(&self.now, &self.place)?;
        let folder = self.place.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Fails if the file is in its place.
        let _ = fs::remove_file(&self.now);
    }
}

/// Folders that were made for files. Empty ones are removed on drop.
#[derive(Debug)]
pub struct Folders(Vec<PathBuf>);

impl Folders {
    /// Makes the folders that are missing.
    ///
    /// # Errors
    ///
    /// Returns an error if one cannot be made.
    pub fn make(folder: &Path) -> io::Result<Self> {
        let missing = folder.ancestors().filter(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = Self(missing.map(Path::to_owned).collect());
        fs::create_dir_all(folder)?;
        Ok(made)
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("a file").permissions().mode() & 0o7777
    }

    #[test]
    fn the_old_file_stays_until_the_new_one_is_put() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vmlinuz");
        let names = || fs::read_dir(folder.path()).expect("a folder").count();
        fs::write(&path, "old").expect("a file");
        fs::write(folder.path().join("vmlinuz.mercury-new"), "left, and longer").expect("a file");
        let new = Beside::write(&path, b"new", Readers::Owner).expect("written");
        assert_eq!((fs::read(&path).expect("read"), names()), (b"old".to_vec(), 2));
        drop(new);
        assert_eq!((fs::read(&path).expect("read"), names()), (b"old".to_vec(), 1));
        Beside::write(&path, b"new", Readers::Owner).expect("written").put().expect("put");
        assert_eq!((fs::read(&path).expect("read"), names()), (b"new".to_vec(), 1));
    }

    #[test]
    fn secrets_are_their_owners() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("initramfs");
        fs::write(&path, "old").expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("a mode");
        let new = Beside::write(&path, b"new", Readers::Owner).expect("written");
        assert_eq!(mode(&new.now), 0o600);
        new.put().expect("put");
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn permissions_of_the_old_file_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("custom.cfg");
        fs::write(&path, "old").expect("a file");
        for wanted in [0o600, 0o640, 0o664] {
            fs::set_permissions(&path, fs::Permissions::from_mode(wanted)).expect("a mode");
            Beside::write(&path, b"new", Readers::AsBefore).expect("written").put().expect("put");
            assert_eq!(mode(&path), wanted);
        }
    }

    #[test]
    fn folders_that_nothing_came_into_go() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("a/b");
        drop(Folders::make(&folder).expect("made"));
        assert!(!root.path().join("a").exists() && root.path().exists());
        let made = Folders::make(&folder).expect("made");
        fs::write(folder.join("x"), "x").expect("a file");
        drop(made);
        assert!(folder.join("x").exists());
        drop(Folders::make(&folder).expect("there"));
        assert!(folder.join("x").exists());
    }
}
