//! The bound on the length of lines of code. `make check` fails when a line exceeds it.

use std::{fs, path::Path, process::Command};

use crate::{
    error::{Context, Error, Result},
    paths,
};

/// The bound, in characters.
const COLUMNS: usize = 110;

/// Name endings of files that are data or text: tables of documentation, recorded output, lists of
/// dependencies.
const TEXT: [&str; 6] = [".md", ".json", ".snap", ".lock", ".proptest-regressions", "COPYING"];

/// Files and folders without the bound: licences as their authors wrote them, inputs of fuzz
/// targets, and files of the lab's machines, whose content names the built images.
const FREE: [&str; 3] = ["LICENSE-", "lab/fuzz/findings/", "lab/guest/"];

/// Prints each line that is too long. Returns true if there is none.
///
/// # Errors
/// If git does not list the files, or a file cannot be read.
pub fn check() -> Result<bool> {
    let mut fit = true;
    for file in files()?.iter().filter(|file| is_bound(file)) {
        // A file that is no text has no lines.
        let Ok(text) = String::from_utf8(read(Path::new(file))?) else { continue };
        for line in too_long(&text) {
            println!("{file}:{line}: the line has more than {COLUMNS} characters");
            fit = false;
        }
    }
    Ok(fit)
}

fn files() -> Result<Vec<String>> {
    let mut list = Command::new("git");
    list.args(["ls-files", "-z"]).current_dir(paths::root());
    let output = list.output().context(|| "start git".into())?;
    if !output.status.success() {
        return Err(Error::Host("git does not list the files of this folder: is it a clone?".into()));
    }
    let list = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(list.split_terminator('\0').map(str::to_owned).collect())
}

/// Reads a file. A file that was removed and is still in git's list is empty.
fn read(file: &Path) -> Result<Vec<u8>> {
    let path = paths::root().join(file);
    if path.exists() {
        fs::read(&path).context(|| format!("read {}", path.display()))
    } else {
        Ok(Vec::new())
    }
}

fn is_bound(file: &str) -> bool {
    !TEXT.iter().any(|end| file.ends_with(end)) && !FREE.iter().any(|start| file.starts_with(start))
}

/// Returns the numbers of lines that are too long.
fn too_long(text: &str) -> impl Iterator<Item = usize> {
    let lines = (1..).zip(text.lines());
    lines.filter(|(_, line)| line.chars().count() > COLUMNS).map(|(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_counted_and_not_bytes() {
        let text = format!("short\n{}\n{}\n", "×".repeat(COLUMNS), "x".repeat(COLUMNS + 1));
        assert_eq!(too_long(&text).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn code_has_the_bound_and_text_has_none() {
        assert!(
            is_bound("lab/src/columns.rs") && is_bound("switch/driver/main.c") && is_bound("scripts/clean")
        );
        assert!(is_bound("Cargo.toml"));
        assert!(!is_bound("README.md") && !is_bound("LICENSE-MIT") && !is_bound("lab/guest/welcome"));
    }
}
