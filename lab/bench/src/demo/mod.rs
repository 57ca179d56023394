//! `make demo`, `make demo-checkpoint`, `make demo-guard`, `make demo-guest`, `make
//! demo-disco` and `make demo-move`:
//! demonstrations of Mercury, with live progress, a table and a verdict at the end.

mod checkpoint;
pub(crate) mod database;
mod disco;
mod guard;
mod guest;
mod moves;
mod switch;
mod switch_report;

use clap::ValueEnum;
use comfy_table::{CellAlignment, Table, presets};

use mercury_lab::error::{Error, Result};

/// The capability that a demonstration shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// Attach and detach, under a machine that is hard at work.
    Switch,
    /// A checkpoint of a machine with a database, and its restore in a fresh machine.
    Checkpoint,
    /// A driver that corrupts memory, in a machine that goes back and names the driver.
    Guard,
    /// A bare machine that goes on as a guest of another one.
    Guest,
    /// Many machines that begin as copies of one.
    Disco,
    /// Two live moves of a machine with a database.
    Move,
}

/// Runs a demonstration.
///
/// # Errors
/// If a machine cannot be booted, or anything was lost, wrong or complained about.
pub fn run(subject: Subject) -> Result<()> {
    match subject {
        Subject::Switch => switch::run(),
        Subject::Checkpoint => checkpoint::run(),
        Subject::Guard => guard::run(),
        Subject::Guest => guest::run(),
        Subject::Disco => disco::run(),
        Subject::Move => moves::run(),
    }
}

/// A promise, with true if it was kept.
#[derive(Debug)]
struct Check {
    holds: bool,
    what: String,
}

impl Check {
    fn new(holds: bool, what: impl Into<String>) -> Self {
        Self { holds, what: what.into() }
    }
}

/// Prints a line for each promise.
///
/// # Errors
/// If a promise was broken, with `why` if the reason is known.
fn conclude(checks: &[Check], why: Option<&str>) -> Result<()> {
    println!();
    for Check { holds, what } in checks {
        println!("  {} {what}", if *holds { "ok  " } else { "FAIL" });
    }
    if checks.iter().all(|check| check.holds) {
        return Ok(());
    }
    let broken: Vec<&str> = checks.iter().filter(|check| !check.holds).map(|check| &*check.what).collect();
    let why = why.map_or_else(|| format!("these promises were broken: {}", broken.join("; ")), str::to_owned);
    Err(Error::Host(why))
}

/// Prints commands that a newcomer may type next.
fn try_next(commands: &[(&str, &str)]) {
    println!("\nWhat to try next:\n");
    for (command, what) in commands {
        println!("    {command:<22} {what}");
    }
}

/// Prints what a command in a machine has printed.
fn tell(text: &str) {
    text.lines().for_each(|line| println!("    {line}"));
}

/// Returns a table without lines, whose columns of numbers are aligned to the right.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_promise_is_an_error_that_names_it() {
        assert!(conclude(&[Check::new(true, "one")], None).is_ok());
        let broken = [Check::new(true, "one"), Check::new(false, "two")];
        let error = conclude(&broken, None).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("two") && !error.contains("one"), "{error}");
        assert!(
            conclude(&broken, Some("the cause")).is_err_and(|error| error.to_string().contains("the cause"))
        );
    }
}
