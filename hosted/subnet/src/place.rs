//! The files by which the machines of a user find a subnet: `$XDG_RUNTIME_DIR/mercury/subnets`, for root
//! `/run/mercury/subnets`. Only the user may open the folder.
//!
//! | file | content |
//! |---|---|
//! | `NAME.socket` | the keeper's socket |
//! | `NAME.start` | locked by a machine that joins, and by a keeper that ends |
//! | `NAME.members` | locked by each machine for its life, in common |

use std::{
    env,
    fs::{DirBuilder, File, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use mercury_hosted_options::net::SubnetName;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::error::{Error, Result};

const SOCKET: &str = "socket";

/// Returns the folder for what runs of this process's user.
#[must_use]
pub fn run_folder() -> PathBuf {
    let user = rustix::process::geteuid();
    let run = match env::var_os("XDG_RUNTIME_DIR") {
        _ if user.is_root() => "/run".into(),
        Some(run) if !run.is_empty() => PathBuf::from(run),
        _ => Path::new("/run/user").join(user.as_raw().to_string()),
    };
    run.join("mercury")
}

/// Makes a folder if it is missing, and checks that only this user may open it.
///
/// # Errors
/// If it cannot be made, or belongs to others.
pub fn make_own(folder: &Path) -> Result<()> {
    let hint = "set XDG_RUNTIME_DIR to a folder that is yours, as pam_systemd does at login";
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| Error::file("make", folder, error).hint(hint))?;
    let found = folder.symlink_metadata().map_err(|error| Error::file("read", folder, error))?;
    let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if !is_own || found.mode() & 0o077 != 0 {
        let text = format!("{} is open to other users", folder.display());
        return Err(Error::new(text).hint("make it yours alone: chmod 700, chown"));
    }
    Ok(())
}

/// The folder of a user's subnets.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Returns the folder of this process's user.
    #[must_use]
    pub fn own() -> Self {
        Self(run_folder().join("subnets"))
    }

    /// Returns a folder of a test.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Makes the folder if it is missing, and checks that only this user may open it.
    ///
    /// # Errors
    /// If it cannot be made, or belongs to others.
    pub fn make(&self) -> Result<()> {
        make_own(&self.0)
    }

    /// Returns the subnets that have a socket.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn names(&self) -> Result<Vec<SubnetName>> {
        let entries = match self.0.read_dir() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| Error::file("read", &self.0, error))?,
        };
        let files = entries.flatten().map(|entry| PathBuf::from(entry.file_name()));
        let sockets = files.filter(|file| file.extension().is_some_and(|kind| kind == SOCKET));
        let mut names: Vec<SubnetName> =
            sockets.filter_map(|file| file.file_stem()?.to_str()?.parse().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// Returns the path of a subnet's socket.
    #[must_use]
    pub fn socket(&self, name: &SubnetName) -> PathBuf {
        self.0.join(format!("{name}.{SOCKET}"))
    }

    /// Opens the lock of those that join and end.
    pub(crate) fn start_lock(&self, name: &SubnetName) -> Result<File> {
        open(&self.0.join(format!("{name}.start")))
    }

    /// Opens the lock that each machine holds.
    pub(crate) fn members_lock(&self, name: &SubnetName) -> Result<File> {
        open(&self.0.join(format!("{name}.members")))
    }
}

fn open(path: &Path) -> Result<File> {
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    opened.map_err(|error| Error::file("open", path, error))
}

/// Locks a file. Returns false if another process has a lock that does not allow it.
pub(crate) fn try_lock(file: &File, how: FlockOperation) -> Result<bool> {
    match flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(Error::call("lock a file of the subnet")(error)),
    }
}

/// Locks a file for this process alone. Returns false if another process holds a lock for so long.
///
/// # Errors
/// The error of the host.
pub fn lock_within(file: &File, patience: Duration) -> io::Result<bool> {
    const MOMENT: Duration = Duration::from_millis(10);
    let start = Instant::now();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK | Errno::INTR) if start.elapsed() < patience => thread::sleep(MOMENT),
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn a_lock_is_not_waited_for_without_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("lock");
        let [first, second] = [(); 2].map(|()| open(&path).expect("a file"));
        let patience = Duration::from_millis(50);
        assert!(lock_within(&first, patience).expect("a lock"));
        assert!(!lock_within(&second, patience).expect("an answer"), "another has it");
        drop(first);
        assert!(lock_within(&second, patience).expect("a lock"));
    }

    #[test]
    fn a_folder_that_others_may_open_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("mercury/subnets");
        let folder = Folder::at(&path);
        folder.make().expect("the folder");
        assert_eq!(path.metadata().expect("the folder").mode() & 0o777, 0o700);
        folder.make().expect("the folder again");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).expect("its rights");
        let refused = folder.make().expect_err("a refusal");
        assert!(refused.message().contains("open to other users") && refused.remedy().is_some());
    }
}
