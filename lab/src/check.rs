//! `make check`: formatting, lints with warnings denied, and the kernel's style for the driver.

use std::process::{Command, Stdio};

use crate::{
    artefacts, checkpatch,
    error::{Context, Result},
    paths, progress,
};

/// The driver's files by the ends of their names; what is generated has its generator's style.
const DRIVER_FILES: &[&str] = &["c", "h", "S"];
const GENERATED: &str = "mercury_abi.h";

/// Runs all of them, whatever becomes of the first; what they find is shown. The names of those that failed.
///
/// # Errors
/// If one cannot be run at all.
pub fn run() -> Result<Vec<&'static str>> {
    let mut format = artefacts::cargo();
    format.args(["fmt", "--all", "--check"]);
    let mut lints = artefacts::cargo();
    lints.args(["clippy", "-q", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    let checks = [("formatting", format), ("lints", lints), ("the driver's style", driver_style()?)];
    let mut failed = Vec::new();
    for (name, mut command) in checks {
        let run = || command.stdin(Stdio::null()).status();
        if !progress::step(name, run).context(|| format!("check {name}"))?.success() {
            failed.push(name);
        }
    }
    Ok(failed)
}

/// How many checks there are.
pub const COUNT: u32 = 3;

fn driver_style() -> Result<Command> {
    let mut command = checkpatch::ensure()?;
    command.args(["--terse", "--no-summary", "--show-types", "-f"]);
    let directory = paths::root().join("driver");
    let entries = std::fs::read_dir(&directory).context(|| "list driver/".into())?;
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| {
        let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        DRIVER_FILES.contains(&&*ending) && !path.ends_with(GENERATED)
    });
    files.sort();
    // Its settings are in the directory.
    command.args(files).current_dir(directory);
    Ok(command)
}
