//! Notes in an image that its machine has come back from it ([`Start`]).

use super::patient;
use mercury_image::{Identity, Start};
use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsFd,
    path::Path,
};

/// Notes in an open image that its machine has come back from it, or goes on without it. Returns true if
/// that is the first time.
///
/// # Errors
///
/// Returns an error if the image is not there, or cannot be written to.
pub fn note(file: &File, identity: Option<Identity>) -> io::Result<bool> {
    let mut first = patient::read_beginning(file.as_fd())?;
    let is_it = |start: &Start| identity.is_none_or(|identity| start.identity == identity);
    let start = Start::read(&first).filter(is_it).ok_or_else(|| io::Error::other("the image is gone"))?;
    if start.was_restored {
        return Ok(false);
    }
    Start::note_restored(&mut first);
    patient::write_beginning(file.as_fd(), &first).map(|()| true)
}

/// Does the same at a path.
///
/// # Errors
///
/// Fails as [`note`] does.
pub fn note_at(path: &Path, identity: Option<Identity>) -> io::Result<bool> {
    note(&OpenOptions::new().read(true).write(true).open(path)?, identity)
}
