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
    if path.exists() {
        return read(path);
    }
    let key = MachineKey::new().map_err(|error| failed(path, error, "nothing was changed"))?;
    make(path, &key).map_err(|error| failed(path, error, "name a file that root can write"))?;
    Ok(key)
}

/// Makes the file. It is complete, and on the disk, before it has its name.
fn make(path: &Path, key: &MachineKey) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = path.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    writeln!(file, "{}", key.secret_text())?;
    file.sync_all()?;
    fs::rename(new, path)
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
}
