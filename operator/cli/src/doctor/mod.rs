//! `mercury doctor`: predicts the result of attach, and adds the facts that only user space can
//! see.
//!
//! * [`machine`]: reads everything, judges nothing;
//! * [`processor`]: attach's own checks on every CPU, and the CPUs against each other;
//! * [`system`]: kernel, driver, signing, other hypervisors, memory;
//! * [`operations`]: the reasons against checkpoint, snapshot and migrate on this machine as it is;
//! * this file: the items, and the verdict.

pub mod machine;
pub mod operations;
pub mod processor;
pub mod system;
#[cfg(test)]
mod tests;

use crate::shared::ModuleArgs;
use clap::Args;
use machine::Machine;
use mercury_control::{
    error::Result,
    exit::Exit,
    output::{Render, Text, Tone},
    progress,
    say::Say,
    sysroot::Sysroot,
};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Show only findings that are not in order
    #[arg(short, long)]
    pub quiet: bool,
}

/// Examines this machine and reports the findings.
///
/// # Errors
///
/// Returns no error: each finding is an item of the report.
pub fn run(args: &DoctorArgs, say: Say<'_>) -> Result<Exit> {
    let module = args.module.module.as_deref();
    let machine = progress::during("examining the machine", || Machine::read(module, &Sysroot::default()));
    let report = examine(&machine, args.quiet);
    say.done(&report);
    Ok(report.exit())
}

/// The result of a check, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grade {
    Ok,
    /// A fact that is good to know.
    Note,
    /// Attach goes on, but the operator should look at this.
    Warning,
    /// The check could not be made.
    CannotTell,
    /// Attach will be refused.
    Refused,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    pub check: &'static str,
    /// Result of the check.
    pub grade: Grade,
    /// Finding of the check.
    pub text: String,
    /// Remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Code with which attach would refuse.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'static str>,
    /// CPUs that have the finding, if not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
}

impl Item {
    /// Makes an item that ended with `grade`.
    #[must_use]
    pub fn new(check: &'static str, grade: Grade, text: impl Into<String>) -> Self {
        Self { check, grade, text: text.into(), hint: None, code: None, cpus: None }
    }

    /// Adds a remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// The findings of doctor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `yes`, `no` or `unknown`.
    pub can_attach: &'static str,
    /// Checks for attach, one a line.
    pub items: Vec<Item>,
    /// Checks for each operation on the whole machine.
    pub operations: Vec<Section>,
    #[serde(skip)]
    quiet: bool,
}

/// The checks for one operation on the whole machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Section {
    /// Name: `checkpoint`, `snapshot` or `migrate`.
    pub operation: &'static str,
    /// Verdict: `yes`, `no` or `unknown`.
    pub possible: &'static str,
    pub items: Vec<Item>,
}

/// Judges a machine.
#[must_use]
pub fn examine(machine: &Machine, quiet: bool) -> Report {
    let items: Vec<_> = processor::items(machine).into_iter().chain(system::items(machine)).collect();
    let can_attach = verdict_of(&items);
    let operations = operations::sections(machine, can_attach);
    Report { can_attach, items, operations, quiet }
}

/// Returns the verdict by the worst of the checks.
fn verdict_of(items: &[Item]) -> &'static str {
    match items.iter().map(|item| item.grade).max().unwrap_or(Grade::CannotTell) {
        Grade::Refused => "no",
        Grade::CannotTell => "unknown",
        _ => "yes",
    }
}

impl Report {
    /// Returns the exit status: done only if attach will work.
    #[must_use]
    pub fn exit(&self) -> Exit {
        if self.can_attach == "yes" { Exit::Done } else { Exit::Impossible }
    }

    fn verdict(&self, to: &Text) -> String {
        match self.can_attach {
            "yes" => to.tone(Tone::Good, "This machine can attach: `mercury attach`"),
            "no" => to.tone(Tone::Bad, "This machine cannot attach as it is: see the refusals above"),
            _ => to.tone(Tone::Doubtful, "Nothing prevents attaching, but not every check could be made"),
        }
    }
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        self.render_items("attach", &self.items, to);
        for section in &self.operations {
            self.render_items(section.operation, &section.items, to);
        }
        to.line(self.verdict(to));
        for section in &self.operations {
            let line = section.verdict(to);
            to.line(line);
        }
    }
}

impl Report {
    fn render_items(&self, title: &str, items: &[Item], to: &mut Text) {
        let shown: Vec<_> = items.iter().filter(|item| !self.quiet || item.grade > Grade::Note).collect();
        if shown.is_empty() {
            return;
        }
        to.line(to.tone(Tone::Strong, title));
        shown.into_iter().for_each(|item| item.render(to));
        to.line("");
    }
}

impl Section {
    fn verdict(&self, to: &Text) -> String {
        let operation = self.operation;
        match self.possible {
            "yes" => to.tone(Tone::Good, &format!("`mercury {operation}` is possible")),
            "no" => to.tone(Tone::Bad, &format!("`mercury {operation}` would be refused as this machine is")),
            _ => to.tone(Tone::Doubtful, &format!("`mercury {operation}`: not every check could be made")),
        }
    }
}

impl Render for Item {
    fn render(&self, to: &mut Text) {
        let (word, tone) = match self.grade {
            Grade::Ok => ("ok", Tone::Good),
            Grade::Note => ("note", Tone::Quiet),
            Grade::Warning => ("warning", Tone::Doubtful),
            Grade::CannotTell => ("cannot tell", Tone::Doubtful),
            Grade::Refused => ("refused", Tone::Bad),
        };
        let place = self.cpus.as_ref().map(|cpus| format!(" (CPU {cpus})")).unwrap_or_default();
        let code = self.code.map(|code| format!(" [{code}]")).unwrap_or_default();
        let word = to.tone(tone, &format!("{word:<12}"));
        to.after(&format!("{word}{:<22}", self.check), &format!("{}{place}{code}", self.text));
        if let Some(hint) = &self.hint {
            to.wrapped(&format!("{:34}→ ", ""), hint);
        }
    }
}
