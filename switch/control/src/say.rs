//! The output of a command: its results, and its failure.

use crate::{
    error::Error,
    exit::Exit,
    journal,
    output::{Format, Render, Text, Tone, json, text},
};
use libsystemd::logging::Priority;
use serde::Serialize;
use std::io::Write;

/// The destination of results.
#[derive(Clone, Copy, Debug)]
pub struct Say<'a> {
    pub format: Format,
    pub name: &'a str,
}

impl Say<'_> {
    /// Prints the only result of a command.
    pub fn done<T: Serialize + Render>(self, result: &T) -> Exit {
        print(&text(self.format, self.name, result));
        Exit::Done
    }

    /// Prints one of many results: JSON on one line. Returns false when the reader is gone.
    pub fn one_of_many<T: Serialize + Render>(self, result: &T) -> bool {
        match self.format {
            Format::Text => print(&text(self.format, self.name, result)),
            Format::Json => print(&(serde_json::to_string(result).unwrap_or_default() + "\n")),
        }
    }
}

/// Prints to standard output. Returns false when the reader is gone.
pub fn print(text: &str) -> bool {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_ok()
}

#[derive(Serialize)]
struct Failure<'a> {
    error: &'a Error,
}

/// Reports a failure as text or JSON, and returns its exit status.
pub fn fail(error: &Error, format: Format, name: &str) -> Exit {
    match format {
        Format::Json => drop(print(&(json(name, &Failure { error }) + "\n"))),
        Format::Text if is_in_journal(error, name) => {}
        Format::Text => eprint!("{}", complaint(Text::to(&std::io::stderr()), error, name)),
    }
    error.exit
}

/// Returns true if systemd's journal has the failure, with its fields. Standard error of a service
/// goes there too.
fn is_in_journal(error: &Error, name: &str) -> bool {
    let mut fields = journal::of_failure(name, error);
    fields.push(("SYSLOG_IDENTIFIER", "mercury".to_owned()));
    let hint = error.hint.as_ref().map(|hint| format!("\n  → {hint}")).unwrap_or_default();
    journal::send(Priority::Error, &format!("mercury {name}: {error}{hint}"), &fields)
}

/// Formats a failure for people: what happened and why, then what to do.
fn complaint(mut to: Text, error: &Error, name: &str) -> String {
    let program = to.tone(Tone::Bad, &format!("mercury {name}:"));
    to.line(format!("{program} {error}"));
    if let Some(hint) = &error.hint {
        to.line(format!("  → {hint}"));
    }
    to.finish()
}
