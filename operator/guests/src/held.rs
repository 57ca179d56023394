//! Folders that a process holds as long as it lives, by a lock in them.

use std::{
    env,
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// The file that is locked.
pub const LOCK: &str = "lock";
/// Attempts to lock a folder, and the time between two of them.
const ATTEMPTS: u32 = 10;
const MOMENT: Duration = Duration::from_millis(10);

/// Returns the folder for what runs of this process's user: `/run/mercury`, and `$XDG_RUNTIME_DIR/mercury`
/// for users.
#[must_use]
pub fn run_folder() -> PathBuf {
    let user = rustix::process::geteuid();
    let run = match env::var_os("XDG_RUNTIME_DIR") {
        _ if user.is_root() => "/run".into(),
        Some(run) => PathBuf::from(run),
        None => Path::new("/run/user").join(user.as_raw().to_string()),
    };
    run.join("mercury")
}

/// Makes the folder, and locks it. Returns `None` if another process holds the lock.
///
/// # Errors
/// If the folder cannot be made or locked.
pub fn take_lock(folder: &Path) -> io::Result<Option<File>> {
    for _ in 0..ATTEMPTS {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let path = folder.join(LOCK);
        let lock = match File::options().create(true).truncate(false).write(true).open(&path) {
            // The guest before has just removed its folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            lock => lock?,
        };
        match lock.try_lock() {
            Ok(()) if is_same(&lock, &path)? => return Ok(Some(lock)),
            Ok(()) => {}
            // A reader locks it for a moment.
            Err(TryLockError::WouldBlock) => thread::sleep(MOMENT),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(None)
}

/// Returns true if the path still leads to the open file.
fn is_same(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a file if it is there.
///
/// # Errors
/// If it cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns true if a process holds the lock of a folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn is_locked(folder: &Path) -> io::Result<bool> {
    let lock = match File::open(folder.join(LOCK)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        lock => lock?,
    };
    match lock.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
