//! `[[service]]` of the rules: services that are watched, and the consequences of their failure.

use crate::guard::sensors::rules::Seconds;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The folder with the sockets for heartbeats.
pub const FOLDER: &str = "run/mercury-notify";
/// Longest name of a service.
const NAME_MAX: usize = 64;

/// The service itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// A unit of systemd's.
    Unit(String),
    /// A program that sends heartbeats to a socket of this name.
    Socket(String),
}

impl Target {
    /// Returns the name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Unit(name) | Self::Socket(name) => name,
        }
    }
}

/// The consequence of a service's failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// An event.
    #[default]
    Report,
    /// The event, and the way back to the snapshot that is kept.
    Rollback,
    /// The event, and the order to move this machine.
    Evacuate,
}

/// A name of a service, which is a part of a path and an argument of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Name(String);

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let is_letter = |c: char| c.is_ascii_alphanumeric() || "_.@:-\\".contains(c);
        let is_name = (1..=NAME_MAX).contains(&name.len()) && name.chars().all(is_letter);
        if !is_name || name.starts_with(['.', '-']) {
            return Err(format!(
                "{name:?} is no name of a service: it has up to {NAME_MAX} letters, digits and _.@:-"
            ));
        }
        Ok(Self(name))
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

/// The section as it is in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<Name>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Name>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patience_s: Option<Seconds<1, 86_400>>,
    #[serde(default)]
    action: Action,
    #[serde(skip_serializing_if = "Option::is_none")]
    hook: Option<String>,
}

/// A service that is watched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Keys", into = "Keys")]
pub struct Service {
    keys: Keys,
    target: Target,
}

impl TryFrom<Keys> for Service {
    type Error = String;

    fn try_from(keys: Keys) -> Result<Self, String> {
        let target = match (&keys.unit, &keys.name) {
            (Some(unit), None) => Target::Unit(unit.0.clone()),
            (None, Some(name)) => Target::Socket(name.0.clone()),
            (Some(unit), Some(name)) => {
                return Err(format!(
                    "a [[service]] has unit = {:?} and name = {:?}: leave one out",
                    unit.0, name.0
                ));
            }
            (None, None) => {
                return Err("a [[service]] has neither unit = \"….service\" nor name = \"…\"".into());
            }
        };
        if keys.user.is_some() && keys.unit.is_some() {
            let unit = target.name();
            return Err(format!(
                "user is for a service with name = …, whose socket it owns; {unit} is a unit"
            ));
        }
        Ok(Self { keys, target })
    }
}

impl From<Service> for Keys {
    fn from(service: Service) -> Self {
        service.keys
    }
}

impl Service {
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the user who may send heartbeats; root if `None`.
    #[must_use]
    pub fn user(&self) -> Option<&str> {
        self.keys.user.as_deref()
    }

    /// Returns the time without a heartbeat, or in a state between two others.
    #[must_use]
    pub fn patience(&self) -> Duration {
        let default = match self.target {
            Target::Unit(_) => 300,
            Target::Socket(_) => 30,
        };
        self.keys.patience_s.map_or(Duration::from_secs(default), Seconds::time)
    }

    #[must_use]
    pub fn action(&self) -> Action {
        self.keys.action
    }

    /// Returns the program that is run when the service fails, besides the hook of all events.
    #[must_use]
    pub fn hook(&self) -> Option<&str> {
        self.keys.hook.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::rules::Rules;

    fn services(text: &str) -> Result<Vec<Service>, String> {
        Rules::parse(text).map(|rules| rules.services)
    }

    #[test]
    fn services_have_defaults() {
        let text = "[[service]]\nunit = 'postgresql.service'\n[[service]]\nname = 'solver'\nuser = 'slurm'\n\
            patience_s = 5\naction = 'rollback'\nhook = '/bin/true'";
        let [unit, solver] = &services(text).expect("services")[..] else { panic!("two services") };
        assert_eq!((unit.target().name(), unit.action()), ("postgresql.service", Action::Report));
        assert_eq!((unit.patience(), unit.hook()), (Duration::from_secs(300), None));
        assert_eq!((solver.target(), solver.user()), (&Target::Socket("solver".into()), Some("slurm")));
        assert_eq!((solver.patience(), solver.action()), (Duration::from_secs(5), Action::Rollback));
    }

    #[test]
    fn mistakes_are_named_with_line_and_key() {
        for (text, said) in [
            ("[[service]]\npatience_s = 3", &["line 1", "neither unit"]),
            (
                "[[service]]\nname = 'a'\n[[service]]\nname = 'b'\nunit = 'b.service'",
                &["unit = \"b.service\" and name = \"b\"", "leave one out"],
            ),
            ("[[service]]\nname = '../../etc/x'", &["line 2", "no name"]),
            ("[[service]]\nname = 'x'\n[[service]]\nunit = '--root=/x'", &["line 4", "no name"]),
            ("[[service]]\nunit = 'a.service'\nuser = 'x'", &["line 1", "user"]),
            ("[[service]]\nname = 'a'\npatience = 3", &["line 3", "patience_s"]),
            ("[[service]]\nname = 'a'\naction = 'reboot'", &["line 3", "rollback"]),
            ("[[service]]\nname = 'a'\n[[service]]\nname = 'a'", &["a", "twice"]),
        ] {
            let why = services(text).expect_err(text);
            assert!(said.iter().all(|said| why.contains(said)), "{text}: {why}");
        }
    }
}
