//! `mercury guard drill`: a real panic on purpose, and the report of what happened.
//!
//! The drill keeps a snapshot of its own, and panics. In the machine that was put back this process goes on
//! inside `mercury snapshot`, which then says how the machine came back.

use clap::Args;
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text, Tone},
};
use serde::Serialize;
use serde_json::Value;
use std::{
    fs,
    io::{self, Read},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

#[derive(Debug, Args)]
pub struct DrillArgs {
    /// Panic although no snapshot can be kept: this machine restarts, or its crash kernel runs
    #[arg(long)]
    pub force: bool,
}

/// The report of a drill that was survived.
#[derive(Debug, PartialEq, Serialize)]
pub struct Report {
    /// State: `survived`.
    pub state: &'static str,
    /// Report of `mercury snapshot` in the machine that was put back.
    pub rollback: Value,
}

/// Time for the kernel to panic.
const PATIENCE: Duration = Duration::from_secs(30);

/// What `mercury snapshot` has said.
#[derive(Debug, PartialEq)]
enum Said {
    /// A snapshot is kept: this is the first life.
    Kept,
    /// This is the second life.
    Back(Value),
    /// There is no snapshot, for this reason.
    Refused(String),
}

/// Runs the drill.
///
/// # Errors
///
/// Returns an error if no snapshot can be kept, or the kernel does not panic.
pub fn run(args: &DrillArgs) -> Result<Report> {
    access::need_root("guard drill")?;
    let kept = access::current_status()?.snapshot.is_some_and(|snapshot| snapshot.state == "kept");
    if kept && !args.force {
        return Err(Error::new(Exit::State, "a snapshot is kept already, and all work since would be lost")
            .hint("`mercury snapshot --drop` gives it up; --force panics, and goes back to that one"));
    }
    match if kept { Said::Kept } else { snapshot()? } {
        Said::Back(rollback) => Ok(Report { state: "survived", rollback }),
        Said::Refused(why) if !args.force => Err(Error::new(
            Exit::State,
            format!("no snapshot can be kept, so a panic would end this machine: {why}"),
        )
        .hint("--force panics all the same: the crash kernel runs, or the machine restarts")),
        Said::Kept | Said::Refused(_) => Err(panic()),
    }
}

/// Keeps a snapshot, by the command of its own.
fn snapshot() -> Result<Said> {
    let failed = |error: io::Error| {
        Error::new(Exit::Failed, format!("mercury snapshot: {error}"))
            .hint("run `mercury snapshot` by hand: it says what is wrong")
    };
    let mut child = Command::new(std::env::current_exe().map_err(failed)?)
        .args(["--json", "snapshot", "--once"])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut text = String::new();
    if let Some(mut output) = child.stdout.take() {
        output.read_to_string(&mut text).map_err(failed)?;
    }
    child.wait().map_err(failed)?;
    Ok(understand(&text))
}

fn understand(text: &str) -> Said {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    match value["state"].as_str() {
        Some("kept") => Said::Kept,
        Some("rolled-back") => Said::Back(value),
        _ => Said::Refused(value["error"]["message"].as_str().unwrap_or("it said nothing").to_owned()),
    }
}

/// Panics. Returns only if the kernel does not.
fn panic() -> Error {
    eprintln!("the kernel panics now, on purpose");
    match fs::write("/proc/sysrq-trigger", "c") {
        Err(error) => Error::new(Exit::Failed, format!("/proc/sysrq-trigger: {error}"))
            .hint("mount /proc for writing; lockdown does not forbid it"),
        Ok(()) => {
            thread::sleep(PATIENCE);
            Error::new(Exit::Failed, "the kernel did not panic").hint("look at `dmesg`")
        }
    }
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        let survived = to.tone(Tone::Good, "survived");
        to.line(format!("{survived}: the kernel panicked, and the machine was put back"));
        for key in ["reason", "message", "pages", "devices", "meet_us", "work_us"] {
            if !self.rollback[key].is_null() {
                to.line(format!("  {key}: {}", self.rollback[key].to_string().trim_matches('"')));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lives_are_told_apart() {
        assert_eq!(understand(r#"{"state": "kept", "memory": 1}"#), Said::Kept);
        assert!(matches!(understand(r#"{"state": "rolled-back", "reason": "panic"}"#), Said::Back(_)));
        let refused = understand(r#"{"error": {"message": "disks"}}"#);
        assert_eq!(refused, Said::Refused("disks".into()));
        assert!(matches!(understand("nonsense"), Said::Refused(_)));
    }

    #[test]
    fn a_report_in_words() {
        let rollback = serde_json::json!({"state": "rolled-back", "reason": "panic", "pages": 7});
        let mut text = Text::new(false);
        Report { state: "survived", rollback }.render(&mut text);
        let text = text.finish();
        assert!(
            text.contains("survived") && text.contains("reason: panic") && text.contains("pages: 7"),
            "{text}"
        );
    }
}
