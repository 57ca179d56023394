//! Locks between processes: advisory locks on files under `target/lab/locks/`. The kernel releases
//! a lock when its owner ends, however it ends.

use std::{fs::File, path::Path};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::{
    error::{Context, Result},
    paths,
};

/// A lock that is held as long as this value lives.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock called `name`.
    ///
    /// # Errors
    /// If the lock's file cannot be made.
    pub fn wait(name: &str) -> Result<Self> {
        Self::at(&paths::lab_dir("locks")?.join(name))
    }

    /// Waits for the lock on the file at `path`.
    ///
    /// # Errors
    /// If the lock's file cannot be made.
    pub(crate) fn at(path: &Path) -> Result<Self> {
        let file = open(path)?;
        flock(&file, FlockOperation::LockExclusive).context(|| format!("lock {}", path.display()))?;
        Ok(Self { _file: file })
    }

    /// Takes the lock on the file at `path`, unless another process holds it.
    ///
    /// # Errors
    /// If the lock's file cannot be made.
    pub fn take(path: &Path) -> Result<Option<Self>> {
        let file = open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error).context(|| format!("lock {}", path.display())),
        }
    }
}

fn open(path: &Path) -> Result<File> {
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .context(|| format!("open {}", path.display()))
}
