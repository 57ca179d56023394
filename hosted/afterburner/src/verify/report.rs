//! The reports for people and for programs.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde::Serialize;

use super::{Account, Finding, image::Image, verify};
use crate::{
    error::{Error, Result},
    operand::Operand,
    record::{Flags, Record},
};

/// Number of findings of a file that are shown to people.
const SHOWN: usize = 40;

/// Runs `afterburner verify`.
///
/// # Errors
/// A file cannot be accounted for at all.
pub fn run(files: &[PathBuf], json: bool) -> Result<ExitCode> {
    let accounts = files.iter().map(|file| verify(file)).collect::<Result<Vec<_>>>()?;
    let mut out = io::stdout().lock();
    let said = if json {
        writeln!(out, "{}", to_json(&Totals::of(&accounts))?)
    } else {
        accounts.iter().try_for_each(|account| out.write_all(page(account).as_bytes()))
    };
    said.map_err(|error| cannot_write(&error))?;
    let clean = accounts.iter().all(|account| account.findings.is_empty());
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reports the findings after a build, with file and function, and the totals. The status tells if
/// there is a finding.
///
/// # Errors
/// A file cannot be accounted for at all.
pub fn complain(files: &[PathBuf]) -> Result<ExitCode> {
    let accounts = files.iter().map(|file| verify(file)).collect::<Result<Vec<_>>>()?;
    let wrong: Vec<&Account> = accounts.iter().filter(|account| !account.findings.is_empty()).collect();
    let Totals { sensitive, uncovered, findings, .. } = Totals::of(&accounts);
    let mut said = String::new();
    wrong.iter().for_each(|account| said += &page(account));
    if !files.is_empty() {
        said += &format!(
            "afterburner: {} files, {sensitive} sensitive instructions, {uncovered} uncovered, \
             {findings} findings\n",
            files.len()
        );
    }
    // Standard error may be closed.
    let _ = io::stderr().lock().write_all(said.as_bytes());
    Ok(if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[derive(Serialize)]
struct Totals<'a> {
    sensitive: usize,
    uncovered: usize,
    findings: usize,
    files: &'a [Account],
}

impl<'a> Totals<'a> {
    fn of(files: &'a [Account]) -> Self {
        Self {
            sensitive: files.iter().map(|account| account.sensitive).sum(),
            uncovered: files.iter().map(|account| account.uncovered).sum(),
            findings: files.iter().map(|account| account.findings.len()).sum(),
            files,
        }
    }
}

fn page(account: &Account) -> String {
    let Account { file, sensitive, uncovered, left, slots, without_nop, filled_bytes, code_bytes, .. } =
        account;
    let share = if *code_bytes == 0 { 0.0 } else { 100.0 * *filled_bytes as f64 / *code_bytes as f64 };
    let mut text = format!(
        "{file}: {sensitive} sensitive instructions, {uncovered} uncovered\n  \
         {slots} slots, {without_nop} of them without a NOP; {left} instructions left as they are; \
         {filled_bytes} bytes filled in, {share:.2} % of the code\n"
    );
    for finding in account.findings.iter().take(SHOWN) {
        text += &line(finding);
    }
    if account.findings.len() > SHOWN {
        text += &format!("  and {} more\n", account.findings.len() - SHOWN);
    }
    text
}

fn line(finding: &Finding) -> String {
    let Finding { what, address, section, function, source } = finding;
    let near = if source.is_empty() { String::new() } else { format!(", near {source}") };
    format!("  {what}: {function} ({section}, {address:#x}{near})\n")
}

#[derive(Serialize)]
struct Listed {
    slot: u64,
    length: u8,
    offset: u8,
    size: u8,
    kind: &'static str,
    source: String,
    target: String,
    alternative: bool,
    left: bool,
    relative: bool,
    borrowed: bool,
    calls: bool,
    function: String,
}

impl Listed {
    fn new(image: &Image, record: &Record) -> Self {
        let [source, target] = record.operands.map(Operand::describe);
        Self {
            slot: record.slot,
            length: record.length,
            offset: record.offset,
            size: record.size,
            kind: record.kind.name(),
            source,
            target,
            alternative: record.flags.has(Flags::ALTERNATIVE),
            left: record.flags.has(Flags::LEFT),
            relative: record.flags.has(Flags::RELATIVE),
            borrowed: record.flags.has(Flags::BORROWED),
            calls: record.flags.has(Flags::CALLS),
            function: image.name(record.slot).0,
        }
    }

    fn line(&self) -> String {
        let flag = |set: bool, letter: char| if set { letter } else { '-' };
        format!(
            "{:#018x} {:>2} {:>2}+{} {}{}{}{}{} {:<12} {:<6} {:<6} {}",
            self.slot,
            self.length,
            self.offset,
            self.size,
            flag(self.alternative, 'a'),
            flag(self.left, 'l'),
            flag(self.relative, 'r'),
            flag(self.borrowed, 'b'),
            flag(self.calls, 'c'),
            self.kind,
            self.source,
            self.target,
            self.function
        )
    }
}

/// Runs `afterburner list`.
///
/// # Errors
/// The file has no records.
pub fn list(file: &Path, json: bool) -> Result<ExitCode> {
    let image = Image::read(file)?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    for record in &image.records {
        let listed = Listed::new(&image, record);
        let text = if json { to_json(&listed)? } else { listed.line() };
        writeln!(out, "{text}").map_err(|error| cannot_write(&error))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn cannot_write(error: &io::Error) -> Error {
    Error::new(format!("cannot write: {error}"))
        .hint("the program that reads the output may have ended, or its disk is full")
}

fn to_json(value: &impl Serialize) -> Result<String> {
    let wrong =
        |error: serde_json::Error| Error::new(error.to_string()).hint("this is a bug: please report it");
    serde_json::to_string(value).map_err(wrong)
}
