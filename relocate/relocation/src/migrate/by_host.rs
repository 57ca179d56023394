//! A move that the host of this guest has ordered. What the command has to say goes to the host's operator,
//! by a port of the monitor: a line of JSON for each message.

use super::report::{MoveEvent, Report};
use mercury_abi::guest::MERCURY_GUEST_ANSWER;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Format, Render, text},
};
use mercury_quiesce::guest;
use serde::Serialize;
use std::{fs::File, os::unix::fs::FileExt};

/// The device that reads and writes ports.
const PORTS: &str = "/dev/port";

/// The way to the host's operator, if the host has ordered the move.
#[derive(Debug)]
pub struct HostLine(Option<(File, u64)>);

/// A message: one of these, with its text for people.
#[derive(Debug, Default, Serialize)]
pub struct Message<'a> {
    /// The command has begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub begun: Option<bool>,
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
    pub fn open(is_ordered: bool) -> Result<Self> {
        if !is_ordered {
            return Ok(Self(None));
        }
        let first = guest::ports().ok_or_else(|| {
            Error::new(Exit::Usage, "--ordered is for a guest of Mercury's alone")
                .hint("leave the option out: `mercury guests migrate` on the host gives it")
        })?;
        let ports = File::options().write(true).open(PORTS).map_err(|error| {
            Error::new(Exit::Failed, format!("cannot answer the host by {PORTS}: {error}"))
                .hint("type `mercury migrate` in the guest: it needs no answer to the host")
        })?;
        let line = Self(Some((ports, u64::from(first + MERCURY_GUEST_ANSWER))));
        line.send(&Message { begun: Some(true), ..Message::default() });
        Ok(line)
    }

    pub fn event(&self, event: &MoveEvent) {
        self.send(&Message { event: Some(event), text: plain(event), ..Message::default() });
    }

    pub fn report(&self, report: &Report) {
        self.send(&Message { report: Some(report), text: plain(report), ..Message::default() });
    }

    pub fn error(&self, error: &Error) {
        self.send(&Message { error: Some(error), ..Message::default() });
    }

    fn send(&self, message: &Message<'_>) {
        let Some((ports, at)) = &self.0 else { return };
        let line = serde_json::to_string(message).unwrap_or_default() + "\n";
        // Several bytes at once would go to several ports. Nobody else can be told if this fails.
        let _ = line.bytes().try_for_each(|byte| ports.write_all_at(&[byte], *at));
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
        tell(&HostLine(Some((file.try_clone().expect("the file"), 7))));
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
    fn a_machine_that_is_no_guest_answers_nobody() {
        HostLine::open(false).expect("nothing to open").event(&MoveEvent::Stops);
        if !guest::is_guest() {
            assert_eq!(HostLine::open(true).expect_err("refused").exit, Exit::Usage);
        }
    }
}
