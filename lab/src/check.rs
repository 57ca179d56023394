//! `make check`: formatting, lints with warnings denied (for the freestanding image too), the
//! kernel's style for the driver, and a minute of each fuzz target. Hypervisor and driver have a size
//! that they must not exceed, and so have lines.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    artefacts, checkpatch, columns,
    driver::Variant,
    error::{Context, Result},
    hypervisor, paths, progress, sizes,
};

/// Name endings of the driver's files. A generated file has its generator's style.
const DRIVER_FILES: &[&str] = &["c", "h", "S"];
const GENERATED: &str = "mercury_abi.h";

/// Runs all checks, even after one fails, and shows what they find. Returns the names of the checks
/// that failed or could not be run.
#[must_use]
pub fn run() -> Vec<&'static str> {
    let mut format = artefacts::cargo();
    format.args(["fmt", "--all", "--check"]);
    let mut lints = artefacts::cargo();
    lints.args(["clippy", "-q", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    let mut fuzz = artefacts::cargo();
    fuzz.args(["run", "-q", "-p", "mercury-fuzz", "--", "--seconds", "60"]);
    let checks: [_; COMMANDS as usize] = [
        ("formatting", Ok(format)),
        ("lints", Ok(lints)),
        ("the image's lints", hypervisor::lints(Variant::Production)),
        ("the lints of the image with fault points", hypervisor::lints(Variant::Faults)),
        ("the driver's style", driver_style()),
        ("the fuzz targets", Ok(fuzz)),
    ];
    let mut failed = Vec::new();
    for (name, command) in checks {
        let passed = progress::step(name, || passes(command?));
        if let Err(error) = &passed {
            eprintln!("{name}: {error}");
        }
        if !matches!(passed, Ok(true)) {
            failed.push(name);
        }
    }
    if !matches!(sizes::check(), Ok(true)) {
        failed.push("the sizes of hypervisor and driver");
    }
    if !matches!(columns::check(), Ok(true)) {
        failed.push("the length of lines");
    }
    failed
}

fn passes(mut command: Command) -> Result<bool> {
    let status = command.stdin(Stdio::null()).status().context(|| "start a check".into())?;
    Ok(status.success())
}

/// The number of checks that are commands.
const COMMANDS: u32 = 6;
/// The number of checks. The last ones are [`sizes::check`] and [`columns::check`].
pub const COUNT: u32 = COMMANDS + 2;

fn driver_style() -> Result<Command> {
    let mut command = checkpatch::ensure()?;
    command.args(["--terse", "--no-summary", "--show-types", "-f"]);
    let directory = paths::root().join("switch/driver");
    let mut files = driver_files(&directory)?;
    files.sort();
    // The checks' settings are in the directory.
    command.args(files).current_dir(directory);
    Ok(command)
}

/// Returns the sources in a folder of the driver and in all folders below.
fn driver_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).context(|| format!("list {}", folder.display()))?;
    let mut files = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            files.extend(driver_files(&path)?);
        } else if path.extension().is_some_and(|ending| DRIVER_FILES.iter().any(|known| ending == *known))
            && !path.ends_with(GENERATED)
        {
            files.push(path);
        }
    }
    Ok(files)
}
