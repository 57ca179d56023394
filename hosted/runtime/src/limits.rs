//! Limits of the host, checked before a machine starts. A limit that is too low would end the
//! machine later, in the middle of something.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    layout,
};

/// Mappings that the host's own libraries and the monitor need.
const OWN_MAPPINGS: u64 = 2000;
const LEAST_MAPPINGS: u64 = 8192;
const MAPPINGS: &str = "proc/sys/vm/max_map_count";
/// The monitor's own need besides the guest's memory, with its thunks and processes, in bytes.
const OWN_MEMORY: u64 = 32 << 20;
/// The need of an address-space process, without the guest's page tables, in bytes.
const HOME_MEMORY: u64 = 1 << 20;
const MEMORY: &str = "proc/meminfo";
const MAPS: &str = "proc/self/maps";
const GROUPS: &str = "proc/self/cgroup";

/// The host's files with limits.
#[derive(Debug)]
pub struct Limits {
    root: PathBuf,
}

impl Default for Limits {
    fn default() -> Self {
        Self { root: "/".into() }
    }
}

/// Ensures a stack of enough room, for which the host leaves only the usual room below the
/// libraries. Returns false if that is only true from the next program on.
///
/// # Errors
/// If the stack may not be as large.
pub fn fit_stack() -> Result<bool> {
    const LEAST: u64 = 2 << 20;
    const USUAL: u64 = 8 << 20;
    const MOST: u64 = 1 << 30;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: It writes the structure.
    if unsafe { libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit) } != 0 {
        return Err(Error::system("ask how large the stack may be"));
    }
    if (LEAST..=MOST).contains(&limit.rlim_cur) {
        return Ok(true);
    }
    if limit.rlim_max < LEAST {
        return Err(Error::host(format!(
            "the stack may have {} KiB, which is too little",
            limit.rlim_max >> 10
        ))
        .hint("raise the limit with ulimit -Hs 8192, as a user who may do that"));
    }
    limit.rlim_cur = USUAL.min(limit.rlim_max);
    // SAFETY: It reads the structure.
    if unsafe { libc::setrlimit(libc::RLIMIT_STACK, &raw const limit) } != 0 {
        return Err(Error::system("give the stack its usual limit"));
    }
    Ok(false)
}

impl Limits {
    /// Checks that the guest's addresses are free.
    ///
    /// # Errors
    /// If the host has put something of this program there.
    pub fn addresses(&self) -> Result<()> {
        let maps = fs::read_to_string(self.root.join(MAPS)).unwrap_or_default();
        let Some((address, what)) = maps.lines().find_map(taken) else { return Ok(()) };
        Err(Error::host(format!("the host has put {what} at {address:#x}, where the guest needs its memory"))
            .hint("start it from another shell, without setarch and with the usual limits (ulimit -s 8192)"))
    }

    fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        fs::read_to_string(self.root.join(path)).ok()?.trim().parse().ok()
    }

    /// Returns the number of mappings that the guest may have.
    ///
    /// # Errors
    /// If they are too few.
    pub fn mappings(&self) -> Result<u64> {
        let most = self.number(MAPPINGS).unwrap_or(LEAST_MAPPINGS + OWN_MAPPINGS);
        if most < LEAST_MAPPINGS {
            return Err(Error::host(format!(
                "the host allows a process {most} mappings, and a guest needs {LEAST_MAPPINGS}"
            ))
            .hint(format!("sysctl vm.max_map_count=65530 (the usual value; /{MAPPINGS})")));
        }
        Ok(most - OWN_MAPPINGS.min(most / 4))
    }

    /// Checks that the guest may have so many bytes of memory.
    ///
    /// # Errors
    /// If the host has less memory, or a control group of this process allows less. The monitor
    /// needs some, too.
    pub fn memory(&self, bytes: u64) -> Result<()> {
        let all = self.total_memory();
        if let Some(all) = all.filter(|all| *all < bytes) {
            return Err(Error::host(format!(
                "the host has {} MiB of memory and swap, and the guest is to have {} MiB",
                all >> 20,
                bytes >> 20
            ))
            .hint("give the guest less with --memory"));
        }
        for (most, path) in self.groups() {
            if most < bytes.saturating_add(OWN_MEMORY) {
                return Err(Error::host(format!(
                    "the control group allows {} MiB of memory, and the guest is to have {} MiB beside the \
                     monitor's {}",
                    most >> 20,
                    bytes >> 20,
                    OWN_MEMORY >> 20
                ))
                .hint(format!(
                    "give the guest less with --memory, or the control group more (/{})",
                    path.display()
                )));
            }
        }
        Ok(())
    }

    /// Returns the number of address-space processes for which the control groups have memory,
    /// besides the guest's and the monitor's.
    #[must_use]
    pub fn space_processes(&self, bytes: u64) -> u64 {
        // Page tables take a 512th of what they map, if all of it is used.
        let each = HOME_MEMORY.saturating_add(bytes / 512);
        let processes = |most: u64| most.saturating_sub(bytes).saturating_sub(OWN_MEMORY) / each;
        self.groups().into_iter().map(|(most, _)| processes(most)).min().unwrap_or(u64::MAX)
    }

    /// Returns the memory limits of this process's control groups, and their places.
    fn groups(&self) -> Vec<(u64, PathBuf)> {
        let groups = fs::read_to_string(self.root.join(GROUPS)).unwrap_or_default();
        groups.lines().filter_map(limit).flat_map(|one| self.limits(one)).collect()
    }

    /// Returns the size of memory and swap, in bytes.
    fn total_memory(&self) -> Option<u64> {
        let text = fs::read_to_string(self.root.join(MEMORY)).ok()?;
        let kib = |name: &str| -> Option<u64> {
            text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
        };
        Some((kib("MemTotal:")? + kib("SwapTotal:").unwrap_or(0)) << 10)
    }

    /// Returns the limits of a group and of those above it.
    fn limits(&self, limit: Limit<'_>) -> Vec<(u64, PathBuf)> {
        let mut found = Vec::new();
        let mut group = PathBuf::from(limit.mounted);
        let parts = Path::new(limit.group).components();
        for part in std::iter::once(None).chain(parts.map(Some)) {
            match part {
                None => {}
                Some(Component::Normal(name)) => group.push(name),
                Some(_) => continue,
            }
            let path = group.join(limit.file);
            found.extend(self.number(&path).map(|most| (most, path)));
        }
        found
    }
}

/// Returns the part of a mapping's line that lies at the guest's addresses.
fn taken(line: &str) -> Option<(u64, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16));
    let (start, end) = (start.ok()?, end.ok()?);
    let areas = [layout::USER_START..layout::USER_END, layout::VMALLOC..layout::ENTRY_AREA_END];
    let is_taken = areas.iter().any(|area| start < area.end && area.start < end);
    is_taken.then(|| (start, rest.split_whitespace().nth(4).unwrap_or("something")))
}

/// The place of a limit.
struct Limit<'a> {
    mounted: &'static str,
    group: &'a str,
    file: &'static str,
}

/// Returns the limit to which a line leads: in the only hierarchy, or in that of memory.
fn limit(line: &str) -> Option<Limit<'_>> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, group) = rest.split_once(':')?;
    if controllers.is_empty() {
        return Some(Limit { mounted: "sys/fs/cgroup", group, file: "memory.max" });
    }
    let has_memory = controllers.split(',').any(|one| one == "memory");
    has_memory.then_some(Limit { mounted: "sys/fs/cgroup/memory", group, file: "memory.limit_in_bytes" })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Limits) {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = directory.path().to_owned();
        (directory, Limits { root })
    }

    #[test]
    fn a_host_that_allows_few_mappings_is_refused() {
        assert!(host(&[]).1.mappings().is_ok());
        let (_directory, limits) = host(&[(MAPPINGS, "65530\n")]);
        assert_eq!(limits.mappings().unwrap(), 65530 - OWN_MAPPINGS);
        let (_directory, limits) = host(&[(MAPPINGS, "8191\n")]);
        let error = limits.mappings().unwrap_err();
        assert!(error.message().contains("allows a process 8191 mappings") && error.is_hosts());
        assert!(error.remedy().unwrap().contains("sysctl vm.max_map_count=65530"));
    }

    #[test]
    fn mappings_in_the_guest_s_addresses_are_named() {
        const USUAL: &str = "555555554000-555555583000 r--p 00000000 fe:00 1 /usr/bin/mercury\n\
                             7ffff7dd5000-7ffff7dfb000 r--p 00000000 fe:00 2 /usr/lib/libc.so.6\n";
        assert!(host(&[(MAPS, USUAL)]).1.addresses().is_ok() && host(&[]).1.addresses().is_ok());
        let below = format!("{USUAL}15555532c000-155555352000 r--p 00000000 fe:00 2 /usr/lib/libc.so.6\n");
        let error = host(&[(MAPS, &below)]).1.addresses().unwrap_err();
        assert!(error.message().contains("/usr/lib/libc.so.6 at 0x15555532c000"), "{}", error.message());
        assert!(host(&[(MAPS, "570000000000-570000001000 rw-p 00000000 00:00 0\n")]).1.addresses().is_err());
    }

    #[test]
    fn a_group_s_limit_of_memory_is_one_of_those_above_it_too() {
        const MIB: u64 = 1 << 20;
        let (_directory, limits) = host(&[
            (GROUPS, "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "268435456\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
        ]);
        assert!(limits.memory(224 * MIB).is_ok());
        let error = limits.memory(225 * MIB).unwrap_err();
        assert_eq!(
            error.message(),
            "the control group allows 256 MiB of memory, and the guest is to have 225 MiB beside the \
             monitor's 32"
        );
        assert!(error.remedy().unwrap().contains("/sys/fs/cgroup/a/memory.max"));
        let (_directory, limits) = host(&[
            (GROUPS, "5:cpu,memory:/x\n1:name=systemd:/y\n0::/y\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "134217728\n"),
        ]);
        assert!(limits.memory(96 * MIB).is_ok() && limits.memory(97 * MIB).is_err());
        assert_eq!(
            (
                limits.space_processes(64 * MIB),
                limits.space_processes(96 * MIB),
                limits.space_processes(97 * MIB)
            ),
            (28, 0, 0)
        );
        assert_eq!(host(&[]).1.space_processes(64 * MIB), u64::MAX);
        assert!(host(&[]).1.memory(u64::MAX).is_ok());
        let (_directory, limits) = host(&[(MEMORY, "MemTotal:  2097152 kB\nSwapTotal:  1048576 kB\n")]);
        assert!(limits.memory(3072 * MIB).is_ok());
        assert!(limits.memory(3073 * MIB).unwrap_err().message().contains("the host has 3072 MiB"));
    }
}
