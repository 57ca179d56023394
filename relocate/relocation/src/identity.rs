//! A machine's identity: the file with its long-lived key.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::session::MachineKey;
use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

/// The file.
pub const PATH: &str = "/etc/mercury/identity";

fn failed(path: &Path, why: impl std::fmt::Display, hint: &str) -> Error {
    Error::new(Exit::Failed, format!("{}: {why}", path.display())).hint(hint)
}

/// Reads a machine's key.
///
/// # Errors
///
/// Returns an error if there is no such file, users other than its owner may read it, or it holds no key.
pub fn read(path: &Path) -> Result<MachineKey> {
    let missing = "`mercury identity` makes it";
    let status = fs::metadata(path).map_err(|error| failed(path, error, missing))?;
    if ![0, rustix::process::geteuid().as_raw()].contains(&status.uid()) {
        return Err(failed(
            path,
            "it belongs to another user, who may know the key",
            "chown root, and make another",
        ));
    }
    if status.mode() & 0o077 != 0 {
        let hint =
            format!("chmod 600 {}; if others may have read it, remove it and make another", path.display());
        return Err(failed(path, "users other than root may read it", &hint));
    }
    let text = fs::read_to_string(path).map_err(|error| failed(path, error, missing))?;
    text.parse().map_err(|error: mercury_migration::session::Error| {
        failed(path, error, "remove the file, and make another with `mercury identity`")
    })
}

/// Reads a machine's key. Makes the file if there is none.
///
/// # Errors
///
/// Returns an error if the file cannot be read or made.
pub fn read_or_make(path: &Path) -> Result<MachineKey> {
    if path.symlink_metadata().is_ok() {
        return read(path);
    }
    let key = MachineKey::new().map_err(|error| failed(path, error, "nothing was changed"))?;
    match make(path, &key) {
        // Another command was faster, and its key is the machine's.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => read(path),
        made => made.map_err(|error| failed(path, error, "name a file that root can write")).map(|()| key),
    }
}

/// Makes the file. It is complete, and on the disk, before it has its name. No file is replaced.
fn make(path: &Path, key: &MachineKey) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let new = path.with_extension(format!("new-{}-{:?}", std::process::id(), std::thread::current().id()));
    // One that an earlier process has left may have another mode.
    let _ = fs::remove_file(&new);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    let named = writeln!(file, "{}", key.secret_text())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::hard_link(&new, path));
    fs::remove_file(&new)?;
    named.and_then(|()| fs::File::open(folder)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_identity_is_made_once_and_is_its_owners() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("mercury/identity");
        assert!(
            read(&path).is_err_and(|error| error.hint.is_some_and(|hint| hint.contains("mercury identity")))
        );
        let made = read_or_make(&path).expect("made").secret_text();
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(read_or_make(&path).expect("read").secret_text(), made);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("set");
        assert!(read(&path).is_err_and(|error| error.message.contains("users other than root")));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("set");
        fs::write(&path, "nonsense").expect("written");
        assert!(read(&path).is_err_and(|error| error.message.contains("identity")));
        assert_eq!(fs::read_dir(folder.path().join("mercury")).expect("a folder").count(), 1);
    }

    #[test]
    fn two_commands_agree_on_one_identity() {
        for _ in 0..50 {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("identity");
            let read = || read_or_make(&path).expect("a key").secret_text();
            let all: Vec<_> = std::thread::scope(|scope| {
                let started: Vec<_> = (0..4).map(|_| scope.spawn(read)).collect();
                started.into_iter().map(|one| one.join().expect("no panic")).collect()
            });
            assert!(all.iter().all(|key| *key == all[0]), "{all:?}");
            assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        }
    }

    #[test]
    fn a_link_that_leads_nowhere_is_not_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("identity");
        std::os::unix::fs::symlink("nowhere", &path).expect("a link");
        assert!(read_or_make(&path).is_err() && path.is_symlink());
    }
}
