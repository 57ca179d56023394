//! Files that are complete at any moment: written beside their place, made durable, and renamed. Their disk
//! may not answer, so child processes do what may hang ([`patient`]).

use mercury_quiesce::patient::{self, Sink};
use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, fchown},
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
    is_put: bool,
}

impl Beside {
    /// Writes the file. The file in its place stays there.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be written, or made durable, or if its disk does not answer.
    pub fn write(place: &Path, bytes: &[u8], readers: Readers) -> io::Result<Self> {
        let mut now = place.as_os_str().to_owned();
        now.push(SUFFIX);
        let new = Self { now: now.into(), place: place.to_owned(), is_put: false };
        // A file of that name is left over from a killed process.
        if patient::exists(&new.now)? {
            let _ = patient::remove(&new.now);
        }
        let is_renewed = readers == Readers::AsBefore && patient::exists(place)?;
        let before = is_renewed.then(|| fs::metadata(place)).transpose()?;
        let mode = if before.is_some() || readers == Readers::Owner { 0o600 } else { 0o666 };
        let file = patient::create(&new.now, mode)?;
        if let Some(before) = before {
            fchown(&file, Some(before.uid()), Some(before.gid()))?;
            file.set_permissions(before.permissions())?;
        }
        let mut sink = Sink::new(file, &new.now)?;
        sink.write_all(bytes)?;
        sink.finish()?;
        Ok(new)
    }

    /// Renames the file to its place, durably.
    ///
    /// # Errors
    ///
    /// Returns an error if that fails.
    pub fn put(mut self) -> io::Result<()> {
        patient::rename(&self.now, &self.place)?;
        self.is_put = true;
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.is_put {
            let _ = patient::remove(&self.now);
        }
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
        let mut all: Vec<_> = folder.ancestors().filter(|path| !path.as_os_str().is_empty()).collect();
        all.reverse();
        let mut made = Self(Vec::new());
        for path in all {
            if !patient::exists(path)? && patient::make_folder(path)? {
                made.0.insert(0, path.to_owned());
            }
        }
        Ok(made)
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = patient::remove_folder(folder);
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
