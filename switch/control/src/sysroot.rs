//! The kernel's files in /proc and /sys, below a root that tests replace.

use crate::cpus::CpuSet;
use std::{fs, path::PathBuf};

/// The root of the file system to read from.
#[derive(Clone, Debug)]
pub struct Sysroot {
    root: PathBuf,
}

impl Default for Sysroot {
    fn default() -> Self {
        Self::at("/")
    }
}

/// A line of /proc/modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    pub name: String,
    /// Number of its users, other modules included.
    pub references: u32,
    /// The modules that use it.
    pub used_by: Vec<String>,
}

impl Sysroot {
    /// Makes a root for files below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the path of `file`, which is relative to the root.
    #[must_use]
    pub fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    /// Returns true if a file or directory exists.
    #[must_use]
    pub fn exists(&self, file: &str) -> bool {
        self.path(file).exists()
    }

    /// Returns a file's text without surrounding white space; `None` if it cannot be read.
    #[must_use]
    pub fn text(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.path(file)).ok().map(|text| text.trim().to_string())
    }

    /// Returns the bytes of available memory, if the kernel reports them.
    #[must_use]
    pub fn available_memory(&self) -> Option<u64> {
        let meminfo = self.text("proc/meminfo")?;
        let rest = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = rest.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kib * 1024)
    }

    /// Returns a file's bytes.
    #[must_use]
    pub fn bytes(&self, file: &str) -> Option<Vec<u8>> {
        fs::read(self.path(file)).ok()
    }

    /// Returns the names in a directory, sorted.
    #[must_use]
    pub fn names(&self, directory: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(directory)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Returns the flag in a file (`Y`, `1` or no); `None` if it cannot be read.
    #[must_use]
    pub fn flag(&self, file: &str) -> Option<bool> {
        self.text(file).map(|text| matches!(text.as_str(), "Y" | "1"))
    }

    /// Returns the loaded modules.
    #[must_use]
    pub fn modules(&self) -> Vec<Module> {
        parse_modules(&self.text("proc/modules").unwrap_or_default())
    }

    /// Returns one loaded module.
    #[must_use]
    pub fn module(&self, name: &str) -> Option<Module> {
        self.modules().into_iter().find(|module| module.name == name)
    }

    /// Returns the online CPUs.
    #[must_use]
    pub fn online_cpus(&self) -> CpuSet {
        self.cpu_list("sys/devices/system/cpu/online")
    }

    /// Returns the CPUs that may ever be there.
    #[must_use]
    pub fn possible_cpus(&self) -> CpuSet {
        self.cpu_list("sys/devices/system/cpu/possible")
    }

    /// Returns the CPUs that are present and offline.
    #[must_use]
    pub fn offline_cpus(&self) -> CpuSet {
        let online = self.online_cpus();
        self.cpu_list("sys/devices/system/cpu/present").iter().filter(|cpu| !online.contains(*cpu)).collect()
    }

    /// Returns the CPU list in a file; empty if the file is missing.
    #[must_use]
    pub fn cpu_list(&self, file: &str) -> CpuSet {
        self.text(file).and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// Returns the number of free blocks of at least 2^`order` pages in all zones.
    #[must_use]
    pub fn free_blocks(&self, order: usize) -> Option<u64> {
        self.text("proc/buddyinfo").map(|text| parse_buddyinfo(&text, order))
    }
}

fn parse_modules(text: &str) -> Vec<Module> {
    text.lines().filter_map(parse_module).collect()
}

/// Parses a line such as `kvm 1327104 1 kvm_amd, Live 0xffffffffc0a00000`.
fn parse_module(line: &str) -> Option<Module> {
    let mut words = line.split_whitespace();
    let name = words.next()?.to_string();
    let references = words.nth(1)?.parse().ok()?;
    let users = words.next()?.split(',').filter(|user| !matches!(*user, "" | "-"));
    Some(Module { name, references, used_by: users.map(str::to_string).collect() })
}

/// Parses lines such as `Node 0, zone   Normal    216     55    189    101 …`, with a column per
/// order.
fn parse_buddyinfo(text: &str, order: usize) -> u64 {
    let counts = |line: &str| -> u64 {
        let columns = line.split_whitespace().skip(4 + order);
        columns
            .enumerate()
            .filter_map(|(above, count)| Some(count.parse::<u64>().ok()? << above.min(32)))
            .sum()
    };
    text.lines().map(counts).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn modules() {
        let text = "kvm_amd 208896 0 - Live 0xffffffffc0b3e000\n\
                    kvm 1327104 1 kvm_amd, Live 0xffffffffc09f5000\n\
                    ccp 155648 2 kvm_amd,tpm, Live 0x0 (E)\nbroken\n";
        let modules = parse_modules(text);
        assert_eq!(modules.len(), 3);
        assert_eq!(modules[0], Module { name: "kvm_amd".into(), references: 0, used_by: vec![] });
        assert_eq!(modules[2].used_by, ["kvm_amd", "tpm"]);
    }

    #[test]
    fn buddyinfo() {
        let text = "\
Node 0, zone      DMA      1      1      1      0      0      0      0      0      1      1      2
Node 0, zone   Normal    216     55    189    101     84     38     37     27      5      3      0
";
        assert_eq!(parse_buddyinfo(text, 6), (4 + 8 + 32) + (37 + 2 * 27 + 4 * 5 + 8 * 3));
        assert_eq!(parse_buddyinfo(text, 10), 2);
        assert_eq!(parse_buddyinfo(text, 40), 0);
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "[ -~\n]{0,200}", order in 0..20_usize) {
            let _ = parse_modules(&text);
            let _ = parse_buddyinfo(&text, order);
        }
    }
}
