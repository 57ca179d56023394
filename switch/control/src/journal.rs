//! Messages with fields, for services whose messages go to systemd's journal.

use crate::error::Error;
use libsystemd::logging::{Priority, connected_to_journal, journal_send};
use std::{
    io::{self, Write},
    os::unix::net::UnixDatagram,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// The journal's socket for messages with fields.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Messages that the journal could not take.
static LOST: AtomicU64 = AtomicU64::new(0);

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
    let unit = own_unit();
    let unit = unit.as_deref().map(|unit| ("OBJECT_SYSTEMD_UNIT", unit));
    let fields = fields.iter().map(|(name, value)| (*name, value.as_str()));
    journal_send(priority, message, fields.chain(unit)).is_ok()
}

fn own_unit() -> Option<String> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    unit(&groups).map(str::to_owned)
}

/// Returns the service from a process' control groups.
fn unit(groups: &str) -> Option<&str> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    path.rsplit('/').find(|name| name.ends_with(".service"))
}

/// Reports an action of a service: to the journal with fields, elsewhere on standard error.
///
/// It never waits: a journal whose disk does not answer takes no messages, and the service must act just
/// then.
pub fn say(priority: Priority, program: &str, message: &str, mut fields: Fields<'_>) {
    fields.push(("SYSLOG_IDENTIFIER", program.to_owned()));
    fields.extend(own_unit().map(|unit| ("OBJECT_SYSTEMD_UNIT", unit)));
    if connected_to_journal() {
        deliver(Path::new(SOCKET), &LOST, priority, message, &fields);
    } else {
        // Nobody may read it any more, which is no reason to end.
        let _ = writeln!(io::stderr(), "{program}: {message}");
    }
}

/// Sends a message at once, or counts it as lost. A later message says how many were.
fn deliver(to: &Path, lost: &AtomicU64, priority: Priority, message: &str, fields: &Fields<'_>) {
    let before = lost.load(Ordering::Relaxed);
    let message = match before {
        0 => message.to_owned(),
        count => format!("{message} ({count} messages before were lost: the journal took none)"),
    };
    match post(to, &payload(priority, &message, fields)) {
        Ok(()) => lost.fetch_sub(before, Ordering::Relaxed),
        Err(_) => lost.fetch_add(1, Ordering::Relaxed),
    };
}

fn post(to: &Path, payload: &[u8]) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to(payload, to).map(drop)
}

/// Returns a message in the journal's native protocol, each value with its length.
fn payload(priority: Priority, message: &str, fields: &Fields<'_>) -> Vec<u8> {
    let priority = (priority as u8).to_string();
    let own = [("PRIORITY", priority.as_str()), ("MESSAGE", message)];
    let fields = fields.iter().map(|(name, value)| (*name, value.as_str()));
    let mut payload = Vec::new();
    for (name, value) in own.into_iter().chain(fields) {
        payload.extend_from_slice(name.as_bytes());
        payload.push(b'\n');
        payload.extend_from_slice(&(value.len() as u64).to_le_bytes());
        payload.extend_from_slice(value.as_bytes());
        payload.push(b'\n');
    }
    payload
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

    #[test]
    fn a_journal_that_takes_nothing_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let journal = UnixDatagram::bind(&path).expect("a socket");
        let lost = AtomicU64::new(0);
        let say = || deliver(&path, &lost, Priority::Notice, "going", &vec![("A", "x\ny".to_owned())]);
        // The queue of the kernel is full after some messages, and a send that waits would wait for ever.
        while lost.load(Ordering::Relaxed) < 3 {
            say();
        }
        let mut bytes = [0; 512];
        let length = journal.recv(&mut bytes).expect("a message");
        let expected = [
            &b"PRIORITY\n\x01\0\0\0\0\0\0\x005\nMESSAGE\n\x05\0\0\0\0\0\0\0going\n"[..],
            b"A\n\x03\0\0\0\0\0\0\0x\ny\n",
        ];
        assert_eq!(bytes[..length], expected.concat());
        say();
        assert_eq!(lost.load(Ordering::Relaxed), 0);
        journal.set_nonblocking(true).expect("set");
        let mut last = Vec::new();
        while let Ok(length) = journal.recv(&mut bytes) {
            last = bytes[..length].to_vec();
        }
        assert!(String::from_utf8_lossy(&last).contains("going (3 messages before were lost"));
        drop(journal);
        say();
        assert_eq!(lost.load(Ordering::Relaxed), 1);
    }
}
