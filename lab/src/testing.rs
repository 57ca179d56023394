//! `lab test`: runs every check and test of the project, lets their lines through, and sums them up in one
//! line.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

use crate::{
    artefacts, check,
    error::{Context, Error, Result},
    image::Release,
    paths,
};

/// Tests counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Passed.
    pub passed: u32,
    /// Failed, or not even built.
    pub failed: u32,
    /// Marked to be left out, each with the reason.
    pub skipped: u32,
}

impl Tally {
    /// Adds what a test program says at its end: `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
    fn add_line(&mut self, line: &str) {
        let Some(rest) = line.trim_start().strip_prefix("test result: ") else { return };
        let Some((_, counts)) = rest.split_once(". ") else { return };
        for part in counts.split(';') {
            let mut words = part.split_whitespace();
            let (Some(count), Some(what)) = (words.next(), words.next()) else { continue };
            let count: u32 = count.parse().unwrap_or(0);
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.skipped += count,
                _ => {}
            }
        }
    }
}

/// Runs all tests, or those that `filter` names: a file of `lab/tests/`, or a part of tests' names. The
/// last line is `N passed, N failed, N skipped`.
///
/// # Errors
/// If the tests cannot be run at all.
pub fn run(filter: Option<&str>) -> Result<Tally> {
    for release in Release::ALL {
        artefacts::ensure(release)?;
    }
    let mut tally = Tally::default();
    match filter {
        Some(name) if is_lab_test(name) => run_some(&["-p", "mercury-lab", "--test", name], &[], &mut tally)?,
        Some(name) => run_some(&["--workspace"], &[name], &mut tally)?,
        None => {
            check_style(&mut tally)?;
            run_some(&["--workspace"], &[], &mut tally)?;
        }
    }
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    Ok(tally)
}

/// Each of `make check`'s counts as one.
fn check_style(tally: &mut Tally) -> Result<()> {
    let failed = check::run()?;
    failed.iter().for_each(|name| println!("check {name} ... FAILED"));
    let count = failed.len() as u32;
    tally.failed += count;
    tally.passed += check::COUNT - count;
    Ok(())
}

/// Runs `cargo test` with a selection of targets, and counts.
fn run_some(selection: &[&str], tests: &[&str], tally: &mut Tally) -> Result<()> {
    let mut cargo = artefacts::cargo();
    cargo.args(["test", "--no-fail-fast"]).args(selection).arg("--").args(tests);
    let mut running = cargo.stdout(Stdio::piped()).spawn().context(|| "start cargo test".into())?;
    let output = running.stdout.take().ok_or_else(|| Error::Host("cargo has no output".into()))?;
    let failed_before = tally.failed;
    for line in BufReader::new(output).lines() {
        let line = line.context(|| "read the tests' output".into())?;
        println!("{line}");
        tally.add_line(&line);
    }
    let status = running.wait().context(|| "wait for cargo test".into())?;
    if !status.success() && tally.failed == failed_before {
        // Something did not build, or a test program crashed.
        tally.failed += 1;
    }
    Ok(())
}

fn is_lab_test(name: &str) -> bool {
    paths::root().join("lab/tests").join(format!("{name}.rs")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed_and_other_lines_are_not() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a ... ok",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 1s",
        ] {
            tally.add_line(line);
        }
        assert_eq!(tally, Tally { passed: 5, failed: 1, skipped: 1 });
    }
}
