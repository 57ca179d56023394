//! Heartbeats by the protocol of `sd_notify` (systemd's `NOTIFY_SOCKET`): messages of lines `KEY=VALUE`.

use super::rules::{FOLDER, Service, Target};
use crate::guard::sensors::printable;
use mercury_control::sysroot::Sysroot;
use std::{
    fs::{self, Permissions},
    io,
    os::unix::{
        fs::{PermissionsExt, chown},
        net::UnixDatagram,
    },
    time::Duration,
};

/// Longest message, as systemd has it.
pub const MESSAGE_MAX: usize = 4096;
/// Messages of one service that one turn reads.
const MESSAGES_MAX: usize = 256;
/// Bounds of a patience that a program chooses by `WATCHDOG_USEC`.
const PATIENCES_US: (u64, u64) = (1_000_000, 86_400_000_000);

/// A message in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `WATCHDOG=1` or `READY=1`: the program works.
    pub beats: bool,
    /// `WATCHDOG=trigger`: the program says itself that it has failed.
    pub fails: bool,
    /// `STOPPING=1`: no more heartbeats will come.
    pub stops: bool,
    /// `WATCHDOG_USEC=…`: the patience that it wants from now on.
    pub patience: Option<Duration>,
    /// `STATUS=…`
    pub status: Option<String>,
}

impl Message {
    /// Parses a message. Other lines are systemd's business, and left out.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut message = Self::default();
        for line in String::from_utf8_lossy(bytes).lines() {
            match line.split_once('=') {
                Some(("WATCHDOG", "1")) | Some(("READY", "1")) => message.beats = true,
                Some(("WATCHDOG", "trigger")) => message.fails = true,
                Some(("STOPPING", "1")) => message.stops = true,
                Some(("WATCHDOG_USEC", value)) => message.patience = patience(value),
                Some(("STATUS", text)) => message.status = Some(printable(text)),
                _ => {}
            }
        }
        message
    }
}

fn patience(value: &str) -> Option<Duration> {
    let us: u64 = value.trim().parse().ok()?;
    (us != 0).then(|| Duration::from_micros(us.clamp(PATIENCES_US.0, PATIENCES_US.1)))
}

/// The state of a program that sends heartbeats.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is expected: it has not begun, or has stopped in good order.
    Idle,
    /// The next heartbeat must come in this time.
    Due(Duration),
    Down,
}

/// A change of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Down(String),
    Up,
    /// Something to report, which is over already.
    Note(String),
}

/// The heartbeat of one program.
#[derive(Clone, Debug)]
pub struct Pulse {
    state: State,
    patience: Duration,
    status: String,
}

impl Pulse {
    #[must_use]
    pub fn new(patience: Duration) -> Self {
        Self { state: State::Idle, patience, status: String::new() }
    }

    /// Takes a message.
    pub fn hear(&mut self, message: Message) -> Option<Change> {
        self.patience = message.patience.unwrap_or(self.patience);
        self.status = message.status.unwrap_or(std::mem::take(&mut self.status));
        let was_down = self.state == State::Down;
        if message.fails {
            self.state = State::Down;
            return (!was_down).then(|| self.down("it says that it has failed (WATCHDOG=trigger)".into()));
        }
        if message.stops {
            self.state = State::Idle;
        } else if message.beats || (message.patience.is_some() && matches!(self.state, State::Due(_))) {
            self.state = State::Due(self.patience);
        }
        (was_down && self.state != State::Down).then_some(Change::Up)
    }

    /// Lets time pass.
    pub fn pass(&mut self, time: Duration) -> Option<Change> {
        let State::Due(left) = self.state else { return None };
        if left > time {
            self.state = State::Due(left - time);
            return None;
        }
        self.state = State::Down;
        Some(self.down(format!("no heartbeat for {} s", self.patience.as_secs())))
    }

    fn down(&self, why: String) -> Change {
        let status = if self.status.is_empty() { "" } else { "; its last status: " };
        Change::Down(format!("{why}{status}{}", self.status))
    }

    /// Returns the state in a word.
    #[must_use]
    pub fn state(&self) -> &'static str {
        match self.state {
            State::Idle => "idle",
            State::Due(_) => "up",
            State::Down => "down",
        }
    }
}

/// The socket of one program.
#[derive(Debug)]
pub struct Ear {
    pub socket: UnixDatagram,
    pub pulse: Pulse,
}

impl Ear {
    /// Opens the socket of a service, which its user alone can write to.
    ///
    /// # Errors
    ///
    /// Returns an error if the socket cannot be made, or the user does not exist.
    pub fn open(sysroot: &Sysroot, service: &Service) -> io::Result<Option<Self>> {
        let Target::Socket(name) = service.target() else { return Ok(None) };
        let owner = service.user().map(|user| user_number(sysroot, user)).transpose()?;
        let folder = sysroot.path(FOLDER);
        fs::create_dir_all(&folder)?;
        // Users pass through it to their sockets, and see no others.
        fs::set_permissions(&folder, Permissions::from_mode(0o711))?;
        let path = folder.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
        let socket = UnixDatagram::bind(&path);
        rustix::process::umask(before);
        let socket = socket?;
        socket.set_nonblocking(true)?;
        if owner.is_some() {
            chown(&path, owner, None)?;
        }
        Ok(Some(Self { socket, pulse: Pulse::new(service.patience()) }))
    }

    /// Reads what has come, then lets time pass.
    pub fn turn(&mut self, time: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut bytes = [0; MESSAGE_MAX];
        for _ in 0..MESSAGES_MAX {
            // Descriptors that come along (`FDSTORE`, `BARRIER`) are closed by the kernel, as nobody asks.
            let Ok(length) = self.socket.recv(&mut bytes) else { break };
            changes.extend(self.pulse.hear(Message::parse(&bytes[..length])));
        }
        changes.extend(self.pulse.pass(time));
        changes
    }
}

/// Returns the number of a user, by name or number.
fn user_number(sysroot: &Sysroot, user: &str) -> io::Result<u32> {
    if let Ok(number) = user.parse() {
        return Ok(number);
    }
    let users = sysroot.text("etc/passwd").unwrap_or_default();
    let line = users.lines().find(|line| line.split(':').next() == Some(user));
    let number = line.and_then(|line| line.split(':').nth(2)?.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("there is no user {user} in /etc/passwd")))
}

/// Removes the sockets of services.
pub fn remove(sysroot: &Sysroot, services: &[Service]) {
    let sockets = services.iter().filter(|service| matches!(service.target(), Target::Socket(_)));
    for service in sockets {
        let _ = fs::remove_file(sysroot.path(FOLDER).join(service.target().name()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::{rules::Rules, sensors::testing::Fake};
    use proptest::prelude::*;

    const S: Duration = Duration::from_secs(1);

    fn beat() -> Message {
        Message::parse(b"WATCHDOG=1\n")
    }

    #[test]
    fn messages_are_those_of_sd_notify() {
        let message = Message::parse(b"READY=1\nSTATUS=step 3\x1b[2J\nMAINPID=77\nWATCHDOG_USEC=5000000");
        assert!(message.beats && !message.fails && !message.stops);
        assert_eq!(message.patience, Some(5 * S));
        assert_eq!(message.status.as_deref(), Some("step 3 [2J"));
        assert!(Message::parse(b"WATCHDOG=trigger").fails);
        assert!(Message::parse(b"STOPPING=1").stops);
        assert_eq!(Message::parse(b"WATCHDOG=2\nBARRIER=1\nFDSTORE=1\n=\n\xff"), Message::default());
        assert_eq!(Message::parse(b"WATCHDOG_USEC=1").patience, Some(S));
        assert_eq!(Message::parse(b"WATCHDOG_USEC=0").patience, None);
    }

    #[test]
    fn silence_is_reported_once_and_its_end_too() {
        let mut pulse = Pulse::new(3 * S);
        // Before the first heartbeat nothing is expected.
        assert_eq!((pulse.pass(100 * S), pulse.state()), (None, "idle"));
        assert_eq!(pulse.hear(Message::parse(b"READY=1\nSTATUS=computing")), None);
        assert_eq!(pulse.pass(2 * S), None);
        assert_eq!(pulse.hear(beat()), None);
        assert_eq!(pulse.pass(2 * S), None);
        let down = Change::Down("no heartbeat for 3 s; its last status: computing".into());
        assert_eq!((pulse.pass(S), pulse.state()), (Some(down), "down"));
        assert_eq!(pulse.pass(9 * S), None);
        assert_eq!((pulse.hear(beat()), pulse.state()), (Some(Change::Up), "up"));
    }

    #[test]
    fn a_program_that_stops_is_not_missed() {
        let mut pulse = Pulse::new(3 * S);
        pulse.hear(beat());
        assert_eq!(pulse.hear(Message::parse(b"STOPPING=1")), None);
        assert_eq!(pulse.pass(100 * S), None);
        assert!(matches!(pulse.hear(Message::parse(b"WATCHDOG=trigger")), Some(Change::Down(_))));
        assert_eq!(pulse.hear(Message::parse(b"WATCHDOG=trigger")), None);
        assert_eq!(pulse.hear(Message::parse(b"STOPPING=1")), Some(Change::Up));
    }

    #[test]
    fn a_program_may_ask_for_patience() {
        let mut pulse = Pulse::new(3 * S);
        pulse.hear(beat());
        pulse.hear(Message::parse(b"WATCHDOG_USEC=20000000"));
        assert_eq!(pulse.pass(19 * S), None);
        assert!(pulse.pass(S).is_some());
    }

    #[test]
    fn a_socket_is_its_users_alone() {
        let fake = Fake::new();
        fake.put("etc/passwd", "root:x:0:0::/:/bin/sh\n");
        let services = |text: &str| Rules::parse(text).expect("rules").services;
        let service = &services("[[service]]\nname = 'solver'\npatience_s = 2")[0];
        let mut ear = Ear::open(&fake.sysroot(), service).expect("a socket").expect("a socket");
        let path = fake.sysroot().path("run/mercury-notify/solver");
        assert_eq!(fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, 0o600);
        let client = UnixDatagram::unbound().expect("a socket");
        client.send_to(b"WATCHDOG=1", &path).expect("sent");
        assert_eq!((ear.turn(S), ear.pulse.state()), (vec![], "up"));
        client.send_to(&[b'x'; 60_000], &path).expect("sent");
        assert!(matches!(&ear.turn(S)[..], [Change::Down(_)]));
        client.send_to(b"WATCHDOG=1", &path).expect("sent");
        assert_eq!(ear.turn(Duration::ZERO), [Change::Up]);
        // The socket of a daemon that was killed is replaced.
        assert!(Ear::open(&fake.sysroot(), service).is_ok());
        remove(&fake.sysroot(), std::slice::from_ref(service));
        assert!(!path.exists());
        let nobody = &services("[[service]]\nname = 'solver'\nuser = 'nobody-here'")[0];
        let error = Ear::open(&fake.sysroot(), nobody).expect_err("no user");
        assert!(error.to_string().contains("nobody-here"), "{error}");
        assert_eq!(user_number(&fake.sysroot(), "root").ok(), Some(0));
    }

    proptest! {
        #[test]
        fn any_message_is_read(bytes in prop::collection::vec(any::<u8>(), 0..200),
                               lines in "((WATCHDOG|READY|STOPPING|WATCHDOG_USEC|STATUS)=.{0,24}\n){0,6}") {
            for message in [Message::parse(&bytes), Message::parse(lines.as_bytes())] {
                prop_assert!(message.patience.is_none_or(|patience| patience >= S && patience <= 86_400 * S));
                prop_assert!(message.status.is_none_or(|text| !text.chars().any(char::is_control)));
            }
        }
    }
}
