//! The memory of a hosted machine: the guest's, and the monitor's beside it.
//!
//! Each process's share of each mapping is what the host's kernel says (PSS, `/proc/PID/smaps`), so the
//! sum over all processes counts each page once. The guest's memory is one file, which has a name there.

use std::{
    collections::BTreeMap,
    fs,
    ops::AddAssign,
    path::{Path, PathBuf},
};

use crate::error::{Context, Error, Result};

/// The file of the guest's memory, as the host's kernel names it.
const GUEST: &str = "/memfd:mercury-hosted (deleted)";

/// The end of the program's path.
const PROGRAM: &str = "/mercury-hosted";

/// The memory of a machine's processes, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    pub processes: u64,
    /// The monitor's memory, with its code.
    pub monitor: u64,
    /// The part of it that is the program's file. All machines of a host share that, and the host maps more
    /// or less of it around what is used, as it happens to cache the file.
    pub program: u64,
    /// The guest's memory, as far as it is used.
    pub guest: u64,
    /// The host's page tables for the processes. They are in neither of the two.
    pub page_tables: u64,
}

impl AddAssign for Footprint {
    fn add_assign(&mut self, other: Self) {
        self.processes += other.processes;
        self.monitor += other.monitor;
        self.program += other.program;
        self.guest += other.guest;
        self.page_tables += other.page_tables;
    }
}

/// Returns the memory of a process and of all its descendants.
///
/// # Errors
/// If the host's kernel does not tell it to this user, or a process ends meanwhile.
pub fn of(process: u32) -> Result<Footprint> {
    let parents = parents()?;
    let mut all = Footprint::default();
    let mut pending = vec![process];
    while let Some(process) = pending.pop() {
        pending.extend(parents.iter().filter(|(_, parent)| **parent == process).map(|(child, _)| *child));
        let read = |name: &str| {
            let path = PathBuf::from(format!("/proc/{process}/{name}"));
            fs::read_to_string(&path).context(|| format!("read {}", path.display()))
        };
        let mut one = shares(&read("smaps")?);
        one.page_tables = kib(&read("status")?, "VmPTE:").unwrap_or(0);
        all += one;
    }
    if all.guest == 0 {
        return Err(Error::Host(format!("process {process} is no hosted machine")));
    }
    Ok(all)
}

/// Returns the parents of this host's processes.
fn parents() -> Result<BTreeMap<u32, u32>> {
    let entries = fs::read_dir("/proc").context(|| "list /proc".into())?;
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // A process may end meanwhile.
    Ok(numbers.filter_map(|process| Some((process, parent(process)?))).collect())
}

fn parent(process: u32) -> Option<u32> {
    let status = fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat")).ok()?;
    // The program's name is in parentheses, and may have any character.
    status.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Adds up a process's shares.
fn shares(maps: &str) -> Footprint {
    let mut all = Footprint { processes: 1, ..Footprint::default() };
    let mut mapped = "";
    for line in maps.lines() {
        let is_field = line.split(' ').next().is_some_and(|word| word.ends_with(':'));
        if !is_field {
            mapped = line;
        } else if let Some(share) = kib(line, "Pss:") {
            let (is_guests, is_program) = (mapped.ends_with(GUEST), mapped.ends_with(PROGRAM));
            *(if is_guests { &mut all.guest } else { &mut all.monitor }) += share;
            all.program += if is_program { share } else { 0 };
        }
    }
    all
}

fn kib(text: &str, field: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(field)?.split_whitespace().next()?.parse().ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_s_file_is_told_from_the_monitor_s() {
        let maps = "40000000-48000000 rwxs 00000000 00:01 7 /memfd:mercury-hosted (deleted)\n\
                    Size: 131072 kB\nPss: 700 kB\nPss_Dirty: 9 kB\n\
                    555555554000-555555583000 r--p 00000000 fe:00 1 /usr/bin/mercury-hosted\nPss: 11 kB\n\
                    7fffefc2b000-7fffefc30000 rw-s 00000000 00:01 9 /memfd:mercury-hosted-copies (deleted)\n\
                    Pss: 5 kB\n7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0 [stack]\nPss: 4 kB\n";
        let all = Footprint { processes: 1, monitor: 20, program: 11, guest: 700, page_tables: 0 };
        assert_eq!(shares(maps), all);
    }

    #[test]
    fn another_process_is_no_machine_and_has_a_parent() {
        let own = std::process::id();
        assert!(of(own).unwrap_err().to_string().contains("no hosted machine"));
        assert_eq!(parent(own), Some(std::os::unix::process::parent_id()));
        assert!(parent(u32::MAX).is_none());
    }
}
