//! Sizes of the parts that everything else has to trust: the hypervisor and the driver. `make check` fails
//! when one exceeds its bound.
//!
//! A line counts if it holds code: blank lines, comments, lines of brackets alone and unit tests do not
//! count.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{Context, Result},
    paths,
};

/// A part, and its bound.
struct Part {
    name: &'static str,
    /// Folder below the root.
    folder: &'static str,
    /// Name endings of its files.
    endings: &'static [&'static str],
    /// Returns true if a file of the folder, by its path in there, belongs to the part.
    has: fn(&str) -> bool,
    most_lines: usize,
}

/// Files of the hypervisor that serve snapshots, the dirty log and rollbacks, besides its folder `snapshot/`.
const OF_SNAPSHOTS: [&str; 5] =
    ["svm/guests/beneath_snapshot.rs", "svm/rollback.rs", "svm/shadow.rs", "vmx/rollback.rs", "pci.rs"];

const PARTS: [Part; 3] = [
    Part {
        name: "the hypervisor, for attach",
        folder: "switch/hypervisor/src",
        endings: &["rs"],
        has: |path| !is_of_snapshots(path),
        most_lines: 7500,
    },
    Part {
        name: "the hypervisor, for snapshots",
        folder: "switch/hypervisor/src",
        endings: &["rs"],
        has: is_of_snapshots,
        most_lines: 2500,
    },
    Part {
        name: "the driver, without the generated header",
        folder: "switch/driver",
        endings: &["c", "h", "S"],
        has: |path| path != "mercury_abi.h",
        // Of these, 60 let a guest go back to its hardware: virtio's drivers have to wake up without a
        // device.
        // 90 mend the kernel's code. 80 let a guest's monitor stand in for the hypervisor, and
        // let the host order a move.
        most_lines: 7530,
    },
];

fn is_of_snapshots(path: &str) -> bool {
    path.starts_with("snapshot/") || OF_SNAPSHOTS.contains(&path)
}

/// Prints the size of each part beside its bound. Returns true if none exceeds it.
///
/// # Errors
/// If a source cannot be read.
pub fn check() -> Result<bool> {
    let mut fit = true;
    for part in &PARTS {
        let lines = part.lines()?;
        println!("{:5} of {} lines: {}", lines, part.most_lines, part.name);
        fit &= lines <= part.most_lines;
    }
    Ok(fit)
}

impl Part {
    fn lines(&self) -> Result<usize> {
        let folder = paths::root().join(self.folder);
        let mut lines = 0;
        for file in files(&folder)? {
            let inside = file.strip_prefix(&folder).unwrap_or(&file).to_string_lossy().into_owned();
            let ending = file.extension().unwrap_or_default();
            if self.endings.iter().any(|known| ending == *known) && (self.has)(&inside) && !is_test(&file) {
                let text = fs::read_to_string(&file).context(|| format!("read {}", file.display()))?;
                lines += lines_of_code(&text);
            }
        }
        Ok(lines)
    }
}

/// Returns true for a file that only tests use.
fn is_test(file: &Path) -> bool {
    ["tests.rs", "model.rs"].iter().any(|name| file.ends_with(name))
}

/// Returns all files in a folder and in the folders below.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).context(|| format!("list {}", folder.display()))?;
    let mut found = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// Counts the lines that hold code, up to the unit tests, which are the end of a Rust file.
fn lines_of_code(text: &str) -> usize {
    let tests = text
        .match_indices("#[cfg(test)]\n")
        .find(|(at, attribute)| text[at + attribute.len()..].lines().next().is_some_and(is_module));
    let text = &text[..tests.map_or(text.len(), |(at, _)| at)];
    text.lines().map(str::trim).filter(|line| holds_code(line)).count()
}

fn is_module(line: &str) -> bool {
    line.contains("mod ") && line.ends_with('{')
}

fn holds_code(line: &str) -> bool {
    let is_comment = line == "*" || ["//", "/*", "* ", "*/"].iter().any(|start| line.starts_with(start));
    !is_comment && !line.chars().all(|character| "()[]{},;".contains(character))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_brackets_and_tests_do_not_count() {
        let code = "//! Doc.\n\nfn f() {\n    // Why.\n    g(\n        1,\n    );\n}\n\n";
        let text = format!("{code}#[cfg(test)]\nmod tests {{\n    fn h() {{}}\n}}\n");
        assert_eq!(lines_of_code(&text), 3);
        assert_eq!(lines_of_code("/* Why.\n *\n * And how.\n */\nint f(void)\n{\n\treturn 1;\n}\n"), 2);
    }

    #[test]
    fn parts_keep_their_bounds() {
        assert!(check().expect("sources that can be read"));
    }
}
