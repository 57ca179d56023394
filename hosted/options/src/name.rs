//! Names of guests, templates and hosted machines, which are names of folders too.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The longest name. A socket in the guest's folder must still have a path that fits into an address.
const LONGEST: usize = 48;

/// The name of a machine: letters, digits, `-`, `_` and `.`, with a letter or digit at its start.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// Returns a name for a machine: its host name, in the characters of a guest's name.
    #[must_use]
    pub fn of_machine(host: &str) -> Self {
        let kept = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        let text: String = host.chars().map(kept).take(LONGEST).collect();
        text.parse().unwrap_or_else(|_| Self("guest".to_owned()))
    }

    /// Returns the name's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if starts_well && is_plain && text.len() <= LONGEST {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "a name has 1 to {LONGEST} letters, digits and the characters - _ . \
             and begins with a letter or digit"
        ))
    }
}

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_name_never_leaves_its_folder() {
        for wrong in ["", ".", "..", "../x", "a/b", "-x", "a b", "ä", "x\0", &"x".repeat(LONGEST + 1)] {
            assert!(wrong.parse::<Name>().is_err(), "{wrong:?}");
        }
        assert_eq!("db-1.example".parse::<Name>().unwrap().as_str(), "db-1.example");
    }

    #[test]
    fn every_machine_has_a_name() {
        assert_eq!(Name::of_machine("db-1").as_str(), "db-1");
        assert_eq!(Name::of_machine("db/1 x").as_str(), "db-1-x");
        assert_eq!(Name::of_machine("").as_str(), "guest");
        assert_eq!(Name::of_machine("..").as_str(), "guest");
        assert_eq!(Name::of_machine(&"x".repeat(64)).as_str().len(), LONGEST);
    }
}
