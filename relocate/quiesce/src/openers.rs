//! Processes by the devices that they have open, from `/proc/PID/fd`. Only root sees other users' processes.

use mercury_control::sysroot::Sysroot;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Number of the process.
    pub pid: u32,
    /// Name of its program, as `ps` shows it.
    pub name: String,
}

impl Process {
    /// Reads the process of this number.
    #[must_use]
    pub fn of(pid: u32, sysroot: &Sysroot) -> Self {
        let name = sysroot.text(&format!("proc/{pid}/comm")).unwrap_or_default();
        Self { pid, name }
    }
}

/// Formats processes as `qemu-system-x86 (1234), Xorg (77)`.
#[must_use]
pub fn names<'a>(processes: impl IntoIterator<Item = &'a Process>) -> String {
    let named = |process: &Process| format!("{} ({})", process.name, process.pid);
    processes.into_iter().map(named).collect::<Vec<_>>().join(", ")
}

/// An open file that is a device, or has no name in a file system (`anon_inode:…`).
#[derive(Clone, Debug)]
pub struct Open {
    process: Process,
    /// Target of the descriptor's link in /proc.
    pub target: String,
    /// Number of the descriptor.
    pub descriptor: i32,
}

impl Open {
    /// Returns the process that has the file open.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }
}

/// All open files of all processes that are devices or have no name, except this process's own.
#[derive(Clone, Debug, Default)]
pub struct Openers(Vec<Open>);

impl Openers {
    #[must_use]
    pub fn read(sysroot: &Sysroot) -> Self {
        let own = std::process::id();
        let numbers = sysroot.names("proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
        Self(numbers.filter(|pid| *pid != own).flat_map(|pid| of_process(pid, sysroot)).collect())
    }

    /// Returns the open files whose target fits.
    pub fn all(&self, fits: impl Fn(&str) -> bool) -> impl Iterator<Item = &Open> {
        self.0.iter().filter(move |open| fits(&open.target))
    }

    /// Returns the processes with an open file that fits, each once.
    #[must_use]
    pub fn of(&self, fits: impl Fn(&str) -> bool) -> Vec<&Process> {
        let mut found: Vec<_> = self.all(fits).map(Open::process).collect();
        found.sort();
        found.dedup();
        found
    }
}

fn of_process(pid: u32, sysroot: &Sysroot) -> Vec<Open> {
    let folder = format!("proc/{pid}/fd");
    let target = |name: &String| {
        let target = std::fs::read_link(sysroot.path(&format!("{folder}/{name}"))).ok()?;
        let target = target.to_str()?.to_owned();
        (target.starts_with("/dev/") || target.starts_with("anon_inode:"))
            .then_some((name.parse().ok()?, target))
    };
    let found: Vec<(i32, String)> = sysroot.names(&folder).iter().filter_map(target).collect();
    if found.is_empty() {
        return Vec::new();
    }
    let process = Process::of(pid, sysroot);
    let open = |(descriptor, target)| Open { process: process.clone(), target, descriptor };
    found.into_iter().map(open).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink, path::Path};

    /// Adds a process with open files to a root of a test.
    pub fn process(root: &Path, pid: u32, name: &str, files: &[&str]) {
        let folder = root.join(format!("proc/{pid}"));
        fs::create_dir_all(folder.join("fd")).expect("a folder");
        fs::write(folder.join("comm"), format!("{name}\n")).expect("a file");
        for (number, target) in files.iter().enumerate() {
            symlink(target, folder.join(format!("fd/{number}"))).expect("a link");
        }
    }

    #[test]
    fn each_process_is_named_once() {
        let root = tempfile::tempdir().expect("a folder");
        process(root.path(), 77, "train", &["/dev/nvidia0", "/home/x", "/dev/nvidia0"]);
        process(root.path(), 8, "Xorg", &["/dev/nvidia0", "socket:[9]"]);
        process(root.path(), std::process::id(), "mercury", &["/dev/nvidia0"]);
        let openers = Openers::read(&Sysroot::at(root.path()));
        assert_eq!(names(openers.of(|target| target == "/dev/nvidia0")), "Xorg (8), train (77)");
        assert!(openers.of(|target| target.starts_with("/home")).is_empty());
    }
}
