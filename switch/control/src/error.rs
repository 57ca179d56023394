//! Errors that say what went wrong and what to do next.

use crate::{bits, exit::Exit, explain, sudo};
use mercury_abi::{code::Code, ioctl::Outcome};
use serde::{Serialize, Serializer};
use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure with its exit status, and with a hint if there is a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Error {
    pub exit: Exit,
    /// The stable code, if the driver or a check gave one.
    #[serde(serialize_with = "code_name", skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
    /// The CPU that refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
    /// The action that failed, and the reason.
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

fn code_name<S: Serializer>(code: &Option<Code>, to: S) -> std::result::Result<S::Ok, S::Error> {
    code.map(Code::name).serialize(to)
}

impl Error {
    /// Makes a failure that has no code.
    #[must_use]
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, code: None, cpu: None, message: message.into(), hint: None }
    }

    /// Adds a hint: what the operator can do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Makes a refusal by code, with the code's own explanation and remedy.
    #[must_use]
    pub fn refused(action: &str, code: Code, cpu: Option<u32>, detail: [u64; 2]) -> Self {
        let place = cpu.map(|cpu| format!(" on CPU {cpu}")).unwrap_or_default();
        let reason = bits::describe(code, detail);
        let entry = explain::entry(code);
        Self {
            exit: Exit::of(code),
            code: Some(code),
            cpu,
            message: format!("{action} was refused{place}: {reason} [{}]", code.name()),
            hint: Some(entry.remedy.to_string()),
        }
    }

    /// Makes a failure that no operator can cause: a bug in Mercury, or a peer that breaks the
    /// protocol.
    #[must_use]
    pub fn fault(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message).hint(
            "install the same release of Mercury on all machines; if it stays, \
                report it with `mercury status --json` and `mercury log`",
        )
    }

    /// Makes a refusal by code, with a message that names the obstacle on this machine.
    #[must_use]
    pub fn coded(code: Code, message: impl Into<String>) -> Self {
        let message = format!("{} [{}]", message.into(), code.name());
        Self { code: Some(code), ..Self::new(Exit::of(code), message) }.hint(explain::entry(code).remedy)
    }

    /// Returns the message without the code at its end.
    #[must_use]
    pub fn plain_message(&self) -> &str {
        let end = self.code.map(|code| format!(" [{}]", code.name())).unwrap_or_default();
        self.message.strip_suffix(&end).unwrap_or(&self.message)
    }

    /// Makes the refusal that the driver reported; returns `None` if the outcome is a success.
    #[must_use]
    pub fn from_outcome(action: &str, outcome: &Outcome) -> Option<Self> {
        let cpu = (outcome.cpu != u32::MAX).then_some(outcome.cpu);
        match Code::from_number(outcome.code) {
            Some(Code::Ok) => None,
            Some(code) => Some(Self::refused(action, code, cpu, outcome.detail)),
            None => Some(
                Self::new(
                    Exit::Failed,
                    format!(
                        "{action} was refused with code {}, which this command does not know",
                        outcome.code
                    ),
                )
                .hint("install the mercury command and the driver from the same release"),
            ),
        }
    }

    /// Makes a failure of a system call for which no better reason is known.
    #[must_use]
    pub fn system(action: &str, errno: rustix::io::Errno) -> Self {
        let (exit, hint) = match errno {
            rustix::io::Errno::PERM | rustix::io::Errno::ACCESS => {
                return Self::new(Exit::Permission, format!("{action} failed: {}", strip_number(&errno)))
                    .hint(format!("run it as root: {}", sudo::again()));
            }
            rustix::io::Errno::NOTTY | rustix::io::Errno::INVAL => (
                Exit::Failed,
                "the loaded driver is of another version: run `mercury unload`, then install the command \
                 and the driver from the same release",
            ),
            rustix::io::Errno::NOMEM => (Exit::Failed, "free some memory and try again"),
            rustix::io::Errno::INTR => (Exit::Interrupted, "nothing was left half done: repeat the command"),
            _ => (Exit::Failed, "`dmesg | grep mercury` may say more"),
        };
        Self::new(exit, format!("{action} failed: {}", strip_number(&errno))).hint(hint)
    }
}

/// Returns the system's text without "(os error 5)".
fn strip_number(errno: &rustix::io::Errno) -> String {
    let text = std::io::Error::from(*errno).to_string();
    text.split(" (os error").next().unwrap_or(&text).to_string()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_what_where_why_and_the_way_out() {
        let outcome = Outcome { code: Code::SvmDisabled as u32, cpu: 3, detail: [1, 0x18] };
        let error = Error::from_outcome("attach", &outcome).expect("refused");
        assert_eq!(error.exit, Exit::Impossible);
        assert!(error.message.starts_with("attach was refused on CPU 3: "), "{error}");
        assert!(error.message.ends_with("[svm-disabled]"), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.contains("firmware")));
    }

    #[test]
    fn no_bare_errno() {
        let error = Error::system("opening /dev/mercury", rustix::io::Errno::PERM);
        assert_eq!(error.message, "opening /dev/mercury failed: Operation not permitted");
        assert_eq!(error.exit, Exit::Permission);
    }

    #[test]
    fn success_is_no_error() {
        assert_eq!(Error::from_outcome("attach", &Outcome::default()), None);
    }
}
