//! Spares: the machines to which this one may move, in order of preference.

use mercury_migration::session::MachineName;
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs,
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// Longest file with a token that is read.
const SECRET_MAX: u64 = 1 << 16;

/// A host, which is an argument of `mercury migrate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Host(String);

impl TryFrom<String> for Host {
    type Error = String;

    fn try_from(host: String) -> Result<Self, String> {
        let is_letter = |c: char| c.is_ascii_alphanumeric() || "._-:[]".contains(c);
        match !host.is_empty() && !host.starts_with('-') && host.chars().all(is_letter) {
            true => Ok(Self(host)),
            false => Err(format!("{host:?} is no host: HOST or HOST:PORT")),
        }
    }
}

impl From<Host> for String {
    fn from(host: Host) -> Self {
        host.0
    }
}

/// A name of a machine, which is checked as the file is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Name(MachineName);

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse().map(Self).map_err(|error: mercury_migration::session::Error| error.to_string())
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0.to_string()
    }
}

/// The right to move to a spare.
#[derive(Clone, PartialEq, Eq)]
pub enum Ticket {
    /// The pairing token that it has printed: a secret, good once.
    Token(String),
    /// The name of a spare that knows this machine.
    Name(String),
}

/// Keeps the secret out of logs.
impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(_) => f.write_str("Token(..)"),
            Self::Name(name) => write!(f, "Name({name})"),
        }
    }
}

/// Keys of a spare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    /// The machine that waits in `mercury receive`: HOST or HOST:PORT.
    host: Host,
    /// File with the pairing token that it has printed.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_file: Option<PathBuf>,
    /// Its name, if it knows this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Name>,
}

/// A spare, with exactly one way to be authenticated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Keys", into = "Keys")]
pub struct Spare {
    host: Host,
    way: Way,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    KeyFile(PathBuf),
    Name(Name),
}

impl TryFrom<Keys> for Spare {
    type Error = String;

    fn try_from(keys: Keys) -> Result<Self, String> {
        let way = match (keys.key_file, keys.name) {
            (Some(file), None) => Way::KeyFile(file),
            (None, Some(name)) => Way::Name(name),
            (found, _) => {
                let has = if found.is_some() { "both" } else { "neither" };
                let host = keys.host.0;
                return Err(format!("the [[spare]] {host} has {has} of key_file and name: give one of them"));
            }
        };
        Ok(Self { host: keys.host, way })
    }
}

impl From<Spare> for Keys {
    fn from(spare: Spare) -> Self {
        let (key_file, name) = match spare.way {
            Way::KeyFile(file) => (Some(file), None),
            Way::Name(name) => (None, Some(name)),
        };
        Self { host: spare.host, key_file, name }
    }
}

impl Spare {
    /// Makes a spare of the daemon's options.
    #[must_use]
    pub fn new(host: &str, key_file: &Path) -> Self {
        Self { host: Host(host.to_owned()), way: Way::KeyFile(key_file.to_owned()) }
    }

    #[must_use]
    pub fn host(&self) -> &str {
        &self.host.0
    }

    /// Returns the right to move to this spare. A pairing token is read for each order, because an operator
    /// may have replaced it.
    ///
    /// # Errors
    ///
    /// Returns the reason if there is no token, or users other than root may read or replace it.
    pub fn ticket(&self) -> Result<Ticket, String> {
        let file = match &self.way {
            Way::KeyFile(file) => file,
            Way::Name(name) => return Ok(Ticket::Name(name.0.to_string())),
        };
        let failed = |why: String| format!("{}: {why}", file.display());
        let text = secret(file).map_err(|error| failed(error.to_string()))?;
        let line = text.split_whitespace().last().unwrap_or_default();
        line.parse::<mercury_migration::session::PairingToken>()
            .map_err(|error| failed(error.to_string()))?;
        Ok(Ticket::Token(line.to_owned()))
    }
}

/// Reads a file that only root may read or write. All checks are made on the open file, and a pipe in its
/// place is not waited for.
fn secret(path: &Path) -> io::Result<String> {
    let flags = (rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits();
    let flags = i32::try_from(flags).unwrap_or_default();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let status = file.metadata()?;
    // mercuryd runs as root.
    let root = rustix::process::geteuid().as_raw();
    let why = if !status.is_file() {
        "it is no regular file".to_owned()
    } else if status.uid() != root {
        format!("user {} owns it and may replace it: chown root {}", status.uid(), path.display())
    } else if status.mode() & 0o077 != 0 {
        format!("users other than root may read it: chmod 600 {}", path.display())
    } else {
        let mut text = String::new();
        return file.take(SECRET_MAX).read_to_string(&mut text).map(|_| text);
    };
    Err(io::Error::other(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    #[test]
    fn only_a_file_of_root_is_a_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let mode = |mode| fs::set_permissions(&path, Permissions::from_mode(mode)).expect("a mode");
        fs::write(&path, "x").expect("a file");
        mode(0o600);
        assert_eq!(secret(&path).expect("a secret"), "x");
        mode(0o640);
        assert!(secret(&path).expect_err("others").to_string().contains("chmod 600"));
        mode(0o600);
        // Only root can give a file away.
        if std::os::unix::fs::chown(&path, Some(1234), None).is_ok() {
            let why = secret(&path).expect_err("another owner").to_string();
            assert!(why.starts_with("user 1234 owns it"), "{why}");
        }
        fs::remove_file(&path).expect("removed");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a pipe");
        assert!(secret(&path).expect_err("a pipe").to_string().contains("no regular file"));
    }

    use crate::guard::rules::Rules;

    #[test]
    fn spares_keep_their_order() {
        let name = mercury_migration::session::MachineKey::new().expect("a key").name().expect("a name");
        let text = format!(
            "[[spare]]\nhost = '10.9.0.3'\nkey_file = '/a'\n[[spare]]\nhost = 'b.example:99'\nname = '{name}'"
        );
        let rules = Rules::parse(&text).expect("rules");
        assert_eq!(rules.spares[1].ticket(), Ok(super::Ticket::Name(name.to_string())));
        assert!(rules.spares[0].ticket().is_err());
        let hosts: Vec<_> = rules.spares.iter().map(super::Spare::host).collect();
        assert_eq!(hosts, ["10.9.0.3", "b.example:99"]);
    }

    #[test]
    fn mistakes_are_named_with_line_and_key() {
        for (text, said) in [
            ("[[spare]]\nhost = '--key'\nkey_file = '/a'", &["line 2", "--key"]),
            ("[[spare]]\nhost = 'a b'\nkey_file = '/a'", &["line 2", "no host"]),
            ("[[spare]]\nhost = 'a'", &["line 1", "a has neither of key_file and name"]),
            ("[[spare]]\nhost = 'a'\nname = 'mercury-machine-1-77'", &["line 3", "no machine's name"]),
            ("[[spare]]\nhost = 'a'\nkey_fil = '/a'", &["line 3", "key_fil"]),
        ] {
            let why = Rules::parse(text).expect_err(text);
            assert!(said.iter().all(|said| why.contains(said)), "{text}: {why}");
        }
    }
}
