//! The host's memory, as far as this process may use it, and the work of machines.
//!
//! Three sources count: the memory that the host has (`MemAvailable`), the limits of this process's control
//! group and of those above it (versions 1 and 2), and the time in which processes wait for memory (PSI).
//! Where one of them is absent, the others are used.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

/// The part of all memory that is to be free, and its limits.
const FREE_PART: u64 = 8;
const FREE_LEAST: u64 = 64 << 20;
const FREE_MOST: u64 = 1 << 30;
/// The percentage of the last ten seconds in which a process has waited for memory, from which the host
/// counts as one without memory.
const STALLED: f64 = 20.0;

/// Where the host's files are.
#[derive(Clone, Debug)]
pub struct Sources {
    proc: PathBuf,
    groups: PathBuf,
}

impl Default for Sources {
    fn default() -> Self {
        Self { proc: "/proc".into(), groups: "/sys/fs/cgroup".into() }
    }
}

/// The host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    pub available: u64,
    /// True if processes wait for memory.
    pub is_stalled: bool,
}

impl Memory {
    /// Returns the memory that is to be free.
    #[must_use]
    pub fn reserve(self) -> u64 {
        (self.total / FREE_PART).clamp(FREE_LEAST, FREE_MOST)
    }

    /// Returns the memory that the host should have for its reserve and for a purpose, and does not have.
    #[must_use]
    pub fn missing(self, purpose: u64) -> u64 {
        let missing = (self.reserve() + purpose).saturating_sub(self.available);
        if self.is_stalled { missing.max(self.reserve() / 2) } else { missing }
    }

    /// Returns true if little of the reserve is left.
    #[must_use]
    pub fn is_urgent(self) -> bool {
        self.available < self.reserve() * 3 / 4
    }

    /// Returns true if there is so much memory that nothing has to be taken from machines.
    #[must_use]
    pub fn is_plenty(self) -> bool {
        !self.is_stalled && self.available >= 3 * self.reserve()
    }
}

impl Sources {
    /// Reads the host's memory. Returns nothing if the host does not tell.
    #[must_use]
    pub fn memory(&self) -> Option<Memory> {
        let text = fs::read_to_string(self.proc.join("meminfo")).ok()?;
        let kib = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let mut memory = Memory {
            total: kib("MemTotal")? << 10,
            available: kib("MemAvailable")? << 10,
            is_stalled: false,
        };
        memory.is_stalled = is_stalled(&self.proc.join("pressure/memory"));
        let groups = fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        for group in groups.lines() {
            self.limit_by(group, &mut memory);
        }
        Some(memory)
    }

    /// Applies the limits of a line of `/proc/self/cgroup`.
    fn limit_by(&self, line: &str, memory: &mut Memory) {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return };
        let path = path.trim_start_matches('/');
        let (roots, names) = match controllers {
            "" => (vec![self.groups.clone(), self.groups.join("unified")], ["memory.max", "memory.current"]),
            _ if controllers.split(',').any(|one| one == "memory") => {
                (vec![self.groups.join(controllers)], ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            _ => return,
        };
        for root in roots {
            let groups = Path::new(path).ancestors().map(|group| root.join(group));
            groups.for_each(|group| limit_by_group(&group, names, memory));
        }
    }
}

/// The limit of a group of version 2 from which its processes are slowed down.
const HIGH: &str = "memory.high";
/// A limit of this size is none.
const NO_LIMIT: u64 = 1 << 62;

/// Applies the limit of one group. Each level counts, whatever the ones below allow.
fn limit_by_group(group: &Path, [limit, usage]: [&str; 2], memory: &mut Memory) {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    memory.is_stalled |= is_stalled(&group.join("memory.pressure"));
    // From `memory.high` on the host's kernel slows all processes of the group down, so that is a limit, too.
    let limit = [limit, HIGH].into_iter().filter_map(number).min();
    let (Some(limit), Some(usage)) = (limit, number(usage)) else { return };
    // Version 1 says that there is no limit with a number that no host has.
    if limit >= NO_LIMIT {
        return;
    }
    // The files of version 1 have the sums of a group's parts under names of their own.
    let statistics = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let sum = |names: &[&str], prefix: &str| -> u64 {
        let names: Vec<String> = names.iter().map(|name| format!("{prefix}{name}")).collect();
        let found = statistics.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            names.iter().any(|one| one == name).then(|| value.trim().parse::<u64>().ok())?
        });
        found.sum()
    };
    let all = |names: &[&str]| sum(names, "total_").max(sum(names, ""));
    // The host must write pages that are dirty before it can use them for something else. The memory of
    // machines is in none of these numbers: it has no place on a disk.
    let dirty = all(&["dirty", "writeback"]).max(all(&["file_dirty", "file_writeback"]));
    let reclaimable = all(&["inactive_file", "active_file"]).saturating_sub(dirty);
    memory.total = memory.total.min(limit);
    memory.available =
        memory.available.min(limit.saturating_add(reclaimable.min(usage)).saturating_sub(usage));
}

/// Returns true if a file of pressure says that processes wait for memory. Without the file none does.
fn is_stalled(file: &Path) -> bool {
    let text = fs::read_to_string(file).unwrap_or_default();
    let some = text.lines().find_map(|line| line.strip_prefix("some avg10="));
    some.and_then(|rest| rest.split(' ').next()?.parse().ok()).is_some_and(|part: f64| part >= STALLED)
}

/// The processor time that processes have used, and their parents.
#[derive(Debug, Default)]
pub struct Processes(HashMap<u32, (u32, u64)>);

impl Processes {
    /// Reads all processes of the host.
    #[must_use]
    pub fn read(sources: &Sources) -> Self {
        let mut all = HashMap::new();
        for entry in fs::read_dir(&sources.proc).into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            if let Some(one) = parent_and_ticks(&stat) {
                all.insert(pid, one);
            }
        }
        Self(all)
    }

    /// Returns the ticks of a process and of all below it.
    #[must_use]
    pub fn ticks(&self, pid: u32) -> u64 {
        let is_below = |mut one: u32| {
            // A number that was used again may make a circle.
            for _ in 0..64 {
                match self.0.get(&one) {
                    _ if one == pid => return true,
                    Some((parent, _)) if *parent > 1 => one = *parent,
                    _ => return false,
                }
            }
            false
        };
        self.0.iter().filter(|(one, _)| is_below(**one)).map(|(_, (_, ticks))| ticks).sum()
    }
}

/// Reads a process's parent and the ticks that it has used, from its `stat`.
fn parent_and_ticks(stat: &str) -> Option<(u32, u64)> {
    /// The places of the numbers after the name.
    const PARENT: usize = 1;
    const USER: usize = 11;
    // The name before may contain anything but ends with the last parenthesis.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().take(USER + 2).collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((u32::try_from(number(PARENT)?).ok()?, number(USER)? + number(USER + 1)?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn sources(files: &[(&str, &str)]) -> (tempfile::TempDir, Sources) {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let [proc, groups] = ["proc", "groups"].map(|name| directory.path().join(name));
        (directory, Sources { proc, groups })
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:       1048576 kB\nMemFree: 1 kB\nMemAvailable:   524288 kB\n");

    #[test]
    fn the_host_and_the_group_limit_memory() {
        let (_kept, plain) = sources(&[MEMINFO]);
        let expected = Memory { total: 1024 * MIB, available: 512 * MIB, is_stalled: false };
        assert_eq!(plain.memory(), Some(expected));
        // Version 1, with a limit on the group above.
        let (_kept, first) = sources(&[
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/a/b\n0::/\n"),
            ("groups/memory/a/memory.limit_in_bytes", "268435456\n"),
            ("groups/memory/a/memory.usage_in_bytes", "209715200\n"),
            (
                "groups/memory/a/memory.stat",
                "inactive_file 5\ntotal_inactive_file 8388608\ntotal_active_file 3145728\n\
                 total_dirty 1048576\ntotal_writeback 1048576\n",
            ),
            ("groups/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
            ("groups/memory/a/b/memory.usage_in_bytes", "5\n"),
        ]);
        let expected = Memory { total: 256 * MIB, available: 65 * MIB, is_stalled: false };
        assert_eq!(first.memory(), Some(expected));
        // Version 2.
        let (_kept, second) = sources(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/user\n"),
            ("groups/user/memory.max", "134217728\n"),
            ("groups/user/memory.current", "100663296\n"),
            (
                "groups/user/memory.stat",
                "anon 5\ninactive_file 2097152\nfile_dirty 524288\nfile_writeback 524288\n",
            ),
            ("groups/user/memory.pressure", "some avg10=35.20 avg60=0.00 avg300=0.00 total=0\n"),
        ]);
        let expected = Memory { total: 128 * MIB, available: 33 * MIB, is_stalled: true };
        assert_eq!(second.memory(), Some(expected));
        // A larger limit above counts as well, because others may have used it up.
        let (_kept, outer) = sources(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("groups/a/b/memory.max", "134217728\n"),
            ("groups/a/b/memory.current", "33554432\n"),
            ("groups/a/memory.max", "268435456\n"),
            ("groups/a/memory.current", "266338304\n"),
        ]);
        let expected = Memory { total: 128 * MIB, available: 2 * MIB, is_stalled: false };
        assert_eq!(outer.memory(), Some(expected));
        // Processes are slowed down long before the limit.
        for (max, high) in
            [("max\n", "134217728\n"), ("268435456\n", "134217728\n"), ("134217728\n", "max\n")]
        {
            let (_kept, slow) = sources(&[
                MEMINFO,
                ("proc/self/cgroup", "0::/a\n"),
                ("groups/a/memory.max", max),
                ("groups/a/memory.high", high),
                ("groups/a/memory.current", "100663296\n"),
            ]);
            let expected = Memory { total: 128 * MIB, available: 32 * MIB, is_stalled: false };
            assert_eq!(slow.memory(), Some(expected), "{max}{high}");
        }
        let (_kept, nothing) = sources(&[]);
        assert_eq!(nothing.memory(), None);
    }

    #[test]
    fn a_host_that_waits_misses_memory() {
        let (_kept, stalled) = sources(&[
            MEMINFO,
            ("proc/pressure/memory", "some avg10=20.00 avg60=0 avg300=0 total=1\nfull avg10=0.00\n"),
        ]);
        let memory = stalled.memory().unwrap();
        assert!(memory.is_stalled && !memory.is_plenty());
        assert_eq!((memory.reserve(), memory.missing(0)), (128 * MIB, 64 * MIB));
        let calm = Memory { is_stalled: false, ..memory };
        assert_eq!((calm.missing(0), calm.missing(400 * MIB), calm.is_plenty()), (0, 16 * MIB, true));
        let (_kept, little) = sources(&[MEMINFO, ("proc/pressure/memory", "some avg10=19.99 avg60=99.0\n")]);
        assert_eq!(little.memory(), Some(calm));
    }

    #[test]
    fn processes_work_for_their_machine() {
        let stat = |parent: u32, user: u64| format!("1 (a) b) S {parent} 1 1 0 -1 0 0 0 0 0 {user} 5 0 0 20");
        assert_eq!(parent_and_ticks(&stat(7, 30)), Some((7, 35)));
        assert_eq!(parent_and_ticks("1 (x) S"), None);
        let texts = [(10, stat(1, 1)), (11, stat(10, 2)), (12, stat(11, 3)), (13, stat(1, 100))];
        let files: Vec<(String, String)> =
            texts.iter().map(|(pid, text)| (format!("proc/{pid}/stat"), text.clone())).collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let (_kept, sources) = sources(&files);
        let all = Processes::read(&sources);
        assert_eq!([10, 11, 13, 99].map(|pid| all.ticks(pid)), [6 + 15, 5 + 10, 105, 0]);
    }
}
