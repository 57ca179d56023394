//! Messages with fields, for services whose messages go to systemd's journal.

use crate::error::Error;
use libsystemd::logging::{Priority, connected_to_journal, journal_send};

/// Fields of one message, by their names in the journal.
pub type Fields<'a> = Vec<(&'a str, String)>;

/// Sends a message with fields to the journal if standard error goes there. Returns true if the journal has
/// it.
///
/// A process that ends at once is gone when the journal looks for its unit, and `journalctl -u` would not
/// show its message. So root names the unit itself, in the field that `journalctl -u` accepts from root.
#[must_use]
pub fn send(priority: Priority, message: &str, fields: &Fields<'_>) -> bool {
    if !connected_to_journal() {
        return false;
    }
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let unit = unit(&groups).map(|unit| ("OBJECT_SYSTEMD_UNIT", unit));
    let fields = fields.iter().map(|(name, value)| (*name, value.as_str()));
    journal_send(priority, message, fields.chain(unit)).is_ok()
}

/// Returns the service from a process' control groups.
fn unit(groups: &str) -> Option<&str> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    path.rsplit('/').find(|name| name.ends_with(".service"))
}

/// Reports an action of a service: to the journal with fields, elsewhere on standard error.
pub fn say(priority: Priority, program: &str, message: &str, mut fields: Fields<'_>) {
    fields.push(("SYSLOG_IDENTIFIER", program.to_owned()));
    if !send(priority, message, &fields) {
        eprintln!("{program}: {message}");
    }
}

/// Returns the fields of a failed command: `MERCURY_COMMAND`, `MERCURY_EXIT`, and `MERCURY_CODE`,
/// `MERCURY_CPU`, `MERCURY_HINT` if they are known.
#[must_use]
pub fn of_failure<'a>(command: &str, error: &Error) -> Fields<'a> {
    let known = [
        ("MERCURY_CODE", error.code.map(|code| code.name().to_owned())),
        ("MERCURY_CPU", error.cpu.map(|cpu| cpu.to_string())),
        ("MERCURY_HINT", error.hint.clone()),
    ];
    let always = [("MERCURY_COMMAND", command.to_owned()), ("MERCURY_EXIT", (error.exit as u8).to_string())];
    let known = known.into_iter().filter_map(|(name, value)| Some((name, value?)));
    always.into_iter().chain(known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;
    use mercury_abi::code::Code;

    #[test]
    fn a_refusal_has_its_code() {
        let error = Error::refused("attach", Code::SvmDisabled, Some(3), [1, 0x18]);
        let fields = of_failure("attach", &error);
        let field = |name| fields.iter().find(|(field, _)| *field == name).map(|(_, value)| value.as_str());
        assert_eq!(field("MERCURY_COMMAND"), Some("attach"));
        assert_eq!(field("MERCURY_CODE"), Some("svm-disabled"));
        assert_eq!(field("MERCURY_CPU"), Some("3"));
        assert_eq!(field("MERCURY_EXIT"), Some("3"));
        assert!(field("MERCURY_HINT").is_some_and(|hint| hint.contains("firmware")));
    }

    #[test]
    fn unknown_facts_are_no_fields() {
        let fields = of_failure("load", &Error::new(Exit::Failed, "no"));
        assert_eq!(
            fields.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["MERCURY_COMMAND", "MERCURY_EXIT"]
        );
    }

    #[test]
    fn a_service_is_known_by_its_control_group() {
        assert_eq!(unit("0::/system.slice/mercuryd.service\n"), Some("mercuryd.service"));
        assert_eq!(unit("0::/system.slice/mercury.service/attached\n"), Some("mercury.service"));
        assert_eq!(unit("0::/user.slice/session-1.scope\n"), None);
        assert_eq!(unit(""), None);
    }

    #[test]
    fn without_a_journal_nothing_is_sent() {
        assert!(!send(Priority::Info, "not for the journal", &Vec::new()));
    }
}
