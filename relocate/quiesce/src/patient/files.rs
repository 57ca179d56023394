//! Small files and folders, such as those in /boot, on a disk that may not answer.
//!
//! A name that a child has looked up is known to the kernel afterwards. So this process can use the file
//! then without a wait.

use super::{Disk, PATIENCE, c_path, call, failed};
use std::{fs::File, io, path::Path};

/// Bytes of one read.
const PART: usize = 8 << 20;

/// Reads a whole file.
///
/// # Errors
///
/// Returns an error if it cannot be read, or a request takes longer than [`PATIENCE`].
pub fn read_whole(path: &Path) -> io::Result<Vec<u8>> {
    read_within(path, usize::MAX)
}

/// Reads the beginning of a file, `length` bytes at the most.
///
/// # Errors
///
/// Returns an error as [`read_whole`] does.
pub fn read_within(path: &Path, length: usize) -> io::Result<Vec<u8>> {
    let disk = Disk::open_with(path, 0, PATIENCE)?;
    let mut bytes = Vec::new();
    while bytes.len() < length {
        let part = disk.read_at(bytes.len() as u64, PART.min(length - bytes.len()))?;
        if part.is_empty() {
            break;
        }
        bytes.extend(part);
    }
    Ok(bytes)
}

/// Returns true if a file or a folder is there.
///
/// # Errors
///
/// Returns an error if that cannot be told, or takes longer than [`PATIENCE`].
pub fn exists(path: &Path) -> io::Result<bool> {
    let name = c_path(path)?;
    // SAFETY: the path is a string that ends with NUL and outlives the call.
    let work = || if unsafe { libc::access(name.as_ptr(), libc::F_OK) } < 0 { failed() } else { 0 };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    match unsafe { call(None, |elapsed| elapsed < PATIENCE, work, || ()) } {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Makes a new file, and opens it for writing.
///
/// # Errors
///
/// Returns an error if the file is there, cannot be made, or that takes longer than [`PATIENCE`]. A file that
/// is made later is removed.
pub fn create(path: &Path, mode: u32) -> io::Result<File> {
    let name = c_path(path)?;
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    let work = || {
        // SAFETY: the path is a string that ends with NUL and outlives the call.
        if unsafe { libc::open(name.as_ptr(), flags, mode) } < 0 { failed() } else { 0 }
    };
    // SAFETY: as for `work`.
    let undo = || _ = unsafe { libc::unlink(name.as_ptr()) };
    // SAFETY: both make a system call.
    unsafe { call(None, |elapsed| elapsed < PATIENCE, work, undo) }?;
    File::options().write(true).open(path)
}

/// Makes a folder; returns false if there is one already.
///
/// # Errors
///
/// Returns an error if it cannot be made, or that takes longer than [`PATIENCE`]. A folder that is made later
/// is removed.
pub fn make_folder(path: &Path) -> io::Result<bool> {
    const MODE: libc::mode_t = 0o777;
    let name = c_path(path)?;
    // SAFETY: the path is a string that ends with NUL and outlives the call.
    let work = || if unsafe { libc::mkdir(name.as_ptr(), MODE) } < 0 { failed() } else { 0 };
    // SAFETY: as for `work`.
    let undo = || _ = unsafe { libc::rmdir(name.as_ptr()) };
    // SAFETY: both make a system call.
    match unsafe { call(None, |elapsed| elapsed < PATIENCE, work, undo) } {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        made => made.map(|()| true),
    }
}

/// Removes an empty folder.
///
/// # Errors
///
/// Returns an error if that fails, or takes longer than [`PATIENCE`]; the folder may go later then.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    let name = c_path(path)?;
    // SAFETY: the path is a string that ends with NUL and outlives the call.
    let work = || if unsafe { libc::rmdir(name.as_ptr()) } < 0 { failed() } else { 0 };
    // SAFETY: `work` makes a system call, and there is nothing to undo.
    unsafe { call(None, |elapsed| elapsed < PATIENCE, work, || ()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt, time::Instant};

    #[test]
    fn a_whole_file_is_read() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        for length in [0, 1, PART, PART + 7] {
            let bytes: Vec<u8> = (0..length).map(|at| (at * 7 % 251) as u8).collect();
            fs::write(&path, &bytes).expect("written");
            assert!(read_whole(&path).expect("read") == bytes, "{length}");
            assert!(read_within(&path, 5).expect("read") == bytes[..length.min(5)], "{length}");
        }
        let missing = read_whole(&folder.path().join("none")).expect_err("none");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        assert_eq!(read_whole(folder.path()).expect_err("a folder").raw_os_error(), Some(libc::EISDIR));
    }

    /// Opening a pipe without a writer waits, as a disk that does not answer does.
    #[test]
    fn a_file_that_does_not_come_is_left_behind() {
        let root = tempfile::tempdir().expect("a folder");
        let pipe = root.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        let begun = Instant::now();
        assert_eq!(read_whole(&pipe).expect_err("nothing").kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < 2 * PATIENCE);
        // The child that was left behind ends.
        drop(fs::OpenOptions::new().read(true).write(true).open(&pipe).expect("its other end"));
    }

    #[test]
    fn files_and_folders_are_made_and_removed() {
        let root = tempfile::tempdir().expect("a folder");
        let (folder, file) = (root.path().join("a"), root.path().join("a/x"));
        assert!(!exists(&file).expect("told") && !exists(&folder).expect("told"));
        assert!(make_folder(&folder).expect("made") && !make_folder(&folder).expect("there"));
        assert_eq!(make_folder(&root.path().join("b/c")).expect_err("no b").kind(), io::ErrorKind::NotFound);
        io::Write::write_all(&mut create(&file, 0o600).expect("made"), b"x").expect("written");
        assert_eq!(fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read(&file).expect("read"), b"x");
        assert_eq!(create(&file, 0o600).expect_err("there").kind(), io::ErrorKind::AlreadyExists);
        assert!(exists(&file).expect("told") && !exists(&file.join("y")).expect("told"));
        assert!(remove_folder(&folder).is_err(), "it is not empty");
        fs::remove_file(&file).expect("gone");
        remove_folder(&folder).expect("gone");
        assert!(!folder.exists());
    }
}
