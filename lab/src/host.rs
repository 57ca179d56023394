//! Programs of the host's: run with a log, as root where they must be.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    error::{Context, Error, Result},
    paths, progress,
};

/// How many of a log's last lines an error shows.
const TAIL_LINES: usize = 25;

/// Runs a program to its end; what it says goes to a log of the name `log`.
///
/// # Errors
/// If it cannot be started or does not succeed; the error shows the last of what it said.
pub fn run(what: &str, log: &str, command: &mut Command) -> Result<()> {
    let path = paths::lab_dir("log")?.join(format!("{log}.log"));
    let mut file = File::create(&path).context(|| format!("write {}", path.display()))?;
    let _ = writeln!(file, "{command:?}");
    let copy = file.try_clone().context(|| "share a log".into())?;
    let program = command.get_program().to_string_lossy().into_owned();
    let status = progress::step(what, || command.stdin(Stdio::null()).stdout(file).stderr(copy).status())
        .context(|| format!("start {program}"))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Program {
        what: what.to_owned(),
        program,
        status: status.to_string(),
        tail: tail(&path, TAIL_LINES),
        log: path,
    })
}

/// A command that needs to be root: through sudo where we are not.
#[must_use]
pub fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut sudo = Command::new("sudo");
    sudo.arg(program);
    sudo
}

/// Removes a tree that may belong to root.
///
/// # Errors
/// If something of it stays.
pub fn remove_tree(tree: &Path) -> Result<()> {
    if !tree.exists() {
        return Ok(());
    }
    let what = format!("remove {}", tree.display());
    run(&what, "remove", as_root("rm").args(["-rf", "--one-file-system"]).arg(tree))
}

/// The last lines of a text file, as far as it can be read.
#[must_use]
pub fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).unwrap_or_default();
    last_lines(&String::from_utf8_lossy(&text), lines)
}

/// The last lines of a text.
#[must_use]
pub fn last_lines(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The file that a program's name means in this process's search path.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// Words as a shell would take them.
#[must_use]
pub fn quoted(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
    words.join(" ")
}
