//! A move that the host of this guest has ordered. What the command has to say goes to the host's operator,
//! by a port of the monitor: a line of JSON for each message, with the name of the order.

use super::report::{MoveEvent, Report};
use mercury_abi::guest::MERCURY_GUEST_ANSWER;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Format, Render, text},
};
use mercury_quiesce::guest;
use serde::Serialize;
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The device that reads and writes ports.
const PORTS: &str = "/dev/port";
/// Time between two signs of life.
const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

/// The way to the host's operator, if the host has ordered the move.
#[derive(Debug)]
pub struct HostLine(Option<Line>);

#[derive(Debug)]
struct Line {
    ports: File,
    at: u64,
    /// Name of the order.
    order: String,
    /// Time of the last message. `None` from the time at which applications stop: this command may go on at
    /// the destination then, which has no such port.
    said: Mutex<Option<Instant>>,
}

/// A message: one of these, with its text for people.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Message<'a> {
    /// Name of the order that is answered.
    pub order: &'a str,
    /// The command has begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub begun: Option<bool>,
    /// The move goes on, and there is nothing to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alive: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<&'a MoveEvent>,
    /// The machine has moved, and is about to be powered off here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<&'a Report>,
    /// The machine has not moved, and goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a Error>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
}

impl HostLine {
    /// Opens the way, if the host has ordered the move, and says that the command has begun.
    ///
    /// # Errors
    ///
    /// Returns an error if this machine is no guest, or ports cannot be written to.
    pub fn open(order: Option<&str>) -> Result<Self> {
        let Some(order) = order else { return Ok(Self(None)) };
        let first = guest::ports().ok_or_else(|| {
            Error::new(Exit::Usage, "--ordered is for a guest of Mercury's alone")
                .hint("leave the option out: `mercury guests migrate` on the host gives it")
        })?;
        let ports = File::options().write(true).open(PORTS).map_err(|error| {
            Error::new(Exit::Failed, format!("cannot answer the host by {PORTS}: {error}"))
                .hint("type `mercury migrate` in the guest: it needs no answer to the host")
        })?;
        let (at, order) = (u64::from(first + MERCURY_GUEST_ANSWER), order.to_owned());
        let line = Self(Some(Line { ports, at, order, said: Mutex::new(Some(Instant::now())) }));
        line.send(&Message { begun: Some(true), ..Message::default() });
        Ok(line)
    }

    /// Says from time to time that the move goes on.
    pub fn alive(&self) {
        let Some(line) = &self.0 else { return };
        if line.said().is_some_and(|said| said.elapsed() > SIGN_OF_LIFE) {
            self.send(&Message { alive: Some(true), ..Message::default() });
        }
    }

    pub fn event(&self, event: &MoveEvent) {
        if let (MoveEvent::Stops, Some(line)) = (event, &self.0) {
            *line.said() = None;
        }
        self.send(&Message { event: Some(event), text: plain(event), ..Message::default() });
    }

    pub fn report(&self, report: &Report) {
        self.send(&Message { report: Some(report), text: plain(report), ..Message::default() });
    }

    pub fn error(&self, error: &Error) {
        self.send(&Message { error: Some(error), ..Message::default() });
    }

    fn send(&self, message: &Message<'_>) {
        let Some(line) = &self.0 else { return };
        let message = Message { order: &line.order, text: message.text.clone(), ..*message };
        let bytes = serde_json::to_string(&message).unwrap_or_default() + "\n";
        // Several bytes at once would go to several ports. Nobody else can be told if this fails.
        let _ = bytes.bytes().try_for_each(|byte| line.ports.write_all_at(&[byte], line.at));
        if let Some(said) = &mut *line.said() {
            *said = Instant::now();
        }
    }
}

impl Line {
    fn said(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn plain<T: Serialize + Render>(what: &T) -> String {
    text(Format::Text, "migrate", what).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(tell: impl FnOnce(&HostLine)) -> String {
        // A file keeps the last byte only, as a port does.
        let file = tempfile::tempfile().expect("a file");
        let ports = file.try_clone().expect("the file");
        let long_ago = Instant::now().checked_sub(2 * SIGN_OF_LIFE);
        tell(&HostLine(Some(Line { ports, at: 7, order: "5".into(), said: Mutex::new(long_ago) })));
        let mut last = [0; 9];
        let count = file.read_at(&mut last, 0).expect("the file");
        String::from_utf8_lossy(&last[..count]).into_owned()
    }

    #[test]
    fn each_byte_goes_to_one_port() {
        let line = sent(|line| line.event(&MoveEvent::Stops));
        assert_eq!(line, "\0\0\0\0\0\0\0\n");
    }

    #[test]
    fn signs_of_life_come_seldom_and_not_while_applications_stand_still() {
        assert_eq!(sent(HostLine::alive), "\0\0\0\0\0\0\0\n");
        let sent = sent(|line| {
            line.event(&MoveEvent::Stops);
            let Some(line_of_test) = &line.0 else { return };
            line_of_test.ports.set_len(0).expect("a file");
            line.alive();
        });
        assert_eq!(sent, "");
    }

    #[test]
    fn each_message_names_its_order() {
        let message = Message { order: "5", alive: Some(true), ..Message::default() };
        assert_eq!(serde_json::to_string(&message).expect("JSON"), r#"{"order":"5","alive":true}"#);
    }

    #[test]
    fn a_machine_that_is_no_guest_answers_nobody() {
        HostLine::open(None).expect("nothing to open").event(&MoveEvent::Stops);
        if !guest::is_guest() {
            assert_eq!(HostLine::open(Some("5")).expect_err("refused").exit, Exit::Usage);
        }
    }
}
