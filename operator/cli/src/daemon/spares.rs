//! Spares: the machines to which this one may move, in order of preference.

use serde::{Deserialize, Serialize};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

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

/// A spare as the file has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spare {
    /// The machine that waits in `mercury receive`: HOST or HOST:PORT.
    host: Host,
    /// File with the pairing token that it has printed.
    key_file: PathBuf,
}

impl Spare {
    /// Makes a spare of the daemon's options.
    #[must_use]
    pub fn new(host: &str, key_file: &Path) -> Self {
        Self { host: Host(host.to_owned()), key_file: key_file.to_owned() }
    }

    #[must_use]
    pub fn host(&self) -> &str {
        &self.host.0
    }

    /// Reads the pairing token. It is a secret, and it is read for each order, because an operator may have
    /// replaced it.
    ///
    /// # Errors
    ///
    /// Returns the reason if there is none, or users other than root may read it.
    pub fn line(&self) -> Result<String, String> {
        let file = &self.key_file;
        let failed = |why: String| format!("{}: {why}", file.display());
        let status = fs::metadata(file).map_err(|error| failed(error.to_string()))?;
        if status.mode() & 0o077 != 0 {
            return Err(failed(format!("users other than root may read it: chmod 600 {}", file.display())));
        }
        let text = fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
        let line = text.split_whitespace().last().unwrap_or_default();
        line.parse::<mercury_migration::session::PairingToken>()
            .map_err(|error| failed(error.to_string()))?;
        Ok(line.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use crate::guard::rules::Rules;

    #[test]
    fn spares_keep_their_order() {
        let text = "[[spare]]\nhost = '10.9.0.3'\nkey_file = '/a'\n[[spare]]\nhost = 'b.example:99'\nkey_file = '/b'";
        let rules = Rules::parse(text).expect("rules");
        let hosts: Vec<_> = rules.spares.iter().map(super::Spare::host).collect();
        assert_eq!(hosts, ["10.9.0.3", "b.example:99"]);
    }

    #[test]
    fn mistakes_are_named_with_line_and_key() {
        for (text, said) in [
            ("[[spare]]\nhost = '--key'\nkey_file = '/a'", &["line 2", "--key"]),
            ("[[spare]]\nhost = 'a b'\nkey_file = '/a'", &["line 2", "no host"]),
            ("[[spare]]\nhost = 'a'", &["line 1", "key_file"]),
            ("[[spare]]\nhost = 'a'\nkey_fil = '/a'", &["line 3", "key_fil"]),
        ] {
            let why = Rules::parse(text).expect_err(text);
            assert!(said.iter().all(|said| why.contains(said)), "{text}: {why}");
        }
    }
}
