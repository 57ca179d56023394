//! Memory limits of control groups: Documentation/admin-guide/cgroup-v2.rst, and cgroup-v1/memory.rst.
//!
//! swapoff(2) charges each page that it reads back to the control group that the page belonged to.
//! If the group has no room, and no file data that it can drop, the kernel ends one of its tasks.

use super::mounts::unescaped;
use mercury_control::{output::bytes, sysroot::Sysroot};
use std::collections::BTreeMap;

/// Most of a limit that stays free for growth while swap is off.
const RESERVE_MOST: u64 = 64 << 20;
/// Part of a limit that stays free for growth.
const RESERVE_PART: u64 = 16;
/// Memory that the kernel may charge before it is needed, and that passes from swap to memory.
const CHARGED_AHEAD: u64 = 1 << 20;

/// A control group whose limit is too low to read back its swapped-out pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tight {
    /// Path below the root of the hierarchy, such as `/system.slice/postgresql.service`.
    pub group: String,
    /// The file with the limit.
    pub file: String,
    pub limit: u64,
    /// Bytes that the group occupies and cannot drop.
    pub occupied: u64,
    /// Bytes that would be read back.
    pub swapped: u64,
    /// The lowest limit with room for both.
    pub wanted: u64,
}

impl Tight {
    /// Describes the group and its lack.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "control group {} may have {}, cannot drop {} of what it has, and {} of it are swapped out",
            self.group,
            bytes(self.limit),
            bytes(self.occupied),
            bytes(self.swapped)
        )
    }
}

/// The two generations of the kernel's interface.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A hierarchy of groups that limits memory.
struct Hierarchy {
    version: Version,
    /// Its mount point, relative to the root of files.
    at: String,
}

impl Hierarchy {
    /// Finds the hierarchies in the table of mounts, each once.
    fn all(sysroot: &Sysroot) -> Vec<Self> {
        let table = sysroot.text("proc/self/mountinfo").unwrap_or_default();
        let of =
            |wanted| table.lines().find_map(|line| Self::parse(line).filter(|one| one.version == wanted));
        [Version::One, Version::Two].into_iter().filter_map(of).collect()
    }

    /// Parses a line such as `31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory`.
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let mut words = back.split(' ');
        let version = match words.next()? {
            "cgroup2" => Version::Two,
            "cgroup" if words.nth(1)?.split(',').any(|option| option == "memory") => Version::One,
            _ => return None,
        };
        let at = unescaped(front.split(' ').nth(4)?).trim_start_matches('/').to_owned();
        Some(Self { version, at })
    }

    /// Visits all groups, each after its children.
    fn visit(&self, sysroot: &Sysroot, see: &mut dyn FnMut(&Group<'_>)) {
        self.visit_below("", sysroot, see);
    }

    /// Visits a group after its children. Returns the sum of their `memory.min`, and of its own.
    fn visit_below(&self, name: &str, sysroot: &Sysroot, see: &mut dyn FnMut(&Group<'_>)) -> u64 {
        let folder = format!("{}{name}", self.at);
        let mut protected = 0;
        for child in sysroot.names(&folder) {
            let path = format!("{folder}/{child}");
            if sysroot.path(&path).is_dir() {
                protected += self.visit_below(&format!("{name}/{child}"), sysroot, see);
            }
        }
        let group = Group { version: self.version, name, folder, protected, sysroot };
        see(&group);
        protected.saturating_add(group.number("memory.min").unwrap_or(0))
    }
}

struct Group<'a> {
    version: Version,
    name: &'a str,
    folder: String,
    /// Bytes below it that the kernel does not take from groups (`memory.min`).
    protected: u64,
    sysroot: &'a Sysroot,
}

impl Group<'_> {
    fn text(&self, file: &str) -> Option<String> {
        self.sysroot.text(&format!("{}/{file}", self.folder))
    }

    /// Reads a number. `max` is none.
    fn number(&self, file: &str) -> Option<u64> {
        self.text(file)?.parse().ok()
    }

    /// Returns the file data that the kernel can drop at once.
    fn droppable(&self) -> u64 {
        let text = self.text("memory.stat").unwrap_or_default();
        let prefix = if self.version == Version::One { "total_" } else { "" };
        let of = |name| keyed(&text, &format!("{prefix}{name}")).unwrap_or(0);
        let (dirty, writeback) = match self.version {
            Version::One => (of("dirty"), of("writeback")),
            Version::Two => (of("file_dirty"), of("file_writeback")),
        };
        let files = of("active_file").saturating_add(of("inactive_file"));
        files.saturating_sub(dirty.saturating_add(writeback)).saturating_sub(self.protected)
    }

    /// Returns the limit that lacks room for pages that are swapped out to disks, `most` at the most.
    fn lack(&self, most: u64) -> Option<Tight> {
        let (limit_file, used_file) = match self.version {
            Version::One => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            Version::Two => ("memory.max", "memory.current"),
        };
        let used = self.number(used_file)?;
        let both = self.number("memory.memsw.usage_in_bytes");
        let swapped = match self.version {
            Version::One => both.map(|both| both.saturating_sub(used)),
            Version::Two => self.number("memory.swap.current"),
        };
        // A kernel that does not account swap charges the group of the task.
        let swapped = swapped.unwrap_or(most).min(most);
        if swapped == 0 {
            return None;
        }
        let tight = |file: &str, used: u64, reserve: &dyn Fn(u64) -> u64| {
            let limit = self.number(file)?;
            let occupied = used.saturating_sub(self.droppable());
            let wanted = occupied.saturating_add(reserve(limit));
            (wanted > limit).then(|| Tight {
                group: if self.name.is_empty() { "/".into() } else { self.name.into() },
                file: format!("/{}/{file}", self.folder),
                limit,
                occupied,
                swapped,
                wanted,
            })
        };
        let reserve = |limit: u64| swapped + (limit / RESERVE_PART).min(RESERVE_MOST);
        tight(limit_file, used, &reserve).or_else(|| {
            // A page counts twice while it comes from swap to memory.
            tight("memory.memsw.limit_in_bytes", both?, &|_| CHARGED_AHEAD)
        })
    }

    /// Returns the number of its tasks that the kernel has ended for lack of memory.
    fn kills(&self) -> Option<u64> {
        let file = if self.version == Version::One { "memory.oom_control" } else { "memory.events.local" };
        keyed(&self.text(file)?, "oom_kill")
    }
}

/// Returns the number after a name, in lines of both.
fn keyed(text: &str, name: &str) -> Option<u64> {
    let number = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(number)
}

/// Returns the groups that lack room for their pages among `swapped` bytes on disks. Limits hold for
/// all groups below, so each level is asked.
#[must_use]
pub fn tight(swapped: u64, sysroot: &Sysroot) -> Vec<Tight> {
    let mut found = Vec::new();
    for hierarchy in Hierarchy::all(sysroot) {
        hierarchy.visit(sysroot, &mut |group| found.extend(group.lack(swapped)));
    }
    found
}

/// The numbers of tasks that the kernel has ended for lack of memory, until now.
#[derive(Debug)]
pub struct Kills {
    all: Option<u64>,
    by_group: BTreeMap<String, u64>,
}

impl Kills {
    /// Reads the numbers.
    #[must_use]
    pub fn now(sysroot: &Sysroot) -> Self {
        let mut by_group = BTreeMap::new();
        for hierarchy in Hierarchy::all(sysroot) {
            hierarchy.visit(sysroot, &mut |group| {
                by_group.extend(group.kills().map(|kills| (group.name.to_owned(), kills)));
            });
        }
        Self { all: Self::in_all(sysroot), by_group }
    }

    /// The kernel counts those of groups here, too.
    fn in_all(sysroot: &Sysroot) -> Option<u64> {
        keyed(&sysroot.text("proc/vmstat")?, "oom_kill")
    }

    /// Returns true if a task was ended since.
    #[must_use]
    pub fn rose(&self, sysroot: &Sysroot) -> bool {
        self.all.is_some_and(|before| Self::in_all(sysroot).is_some_and(|now| now > before))
    }

    /// Names the groups that have lost a task since.
    #[must_use]
    pub fn named(&self, sysroot: &Sysroot) -> String {
        let now = Self::now(sysroot).by_group;
        let lost = now.iter().filter(|(name, now)| **now > self.by_group.get(*name).copied().unwrap_or(0));
        let names: Vec<_> = lost.map(|(name, _)| if name.is_empty() { "/" } else { name }).collect();
        if names.is_empty() { String::new() } else { format!(" of control group {}", names.join(", ")) }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    const MIB: u64 = 1 << 20;
    const TWO: &str = "31 25 0:27 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const ONE: &str = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
        31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    /// Adds files to a root.
    pub fn put(sysroot: &Sysroot, files: &[(&str, String)]) {
        for (name, text) in files {
            let path = sysroot.path(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, text).expect("a file");
        }
    }

    fn root(mounts: &str) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        put(&sysroot, &[("proc/self/mountinfo", mounts.to_owned())]);
        (root, sysroot)
    }

    /// A group of the second version: limit, memory, and swapped-out memory in MiB.
    pub fn group(sysroot: &Sysroot, name: &str, [limit, used, swapped]: [u64; 3]) {
        let folder = format!("sys/fs/cgroup{name}");
        let number = |mib: u64| if mib == u64::MAX { "max\n".into() } else { format!("{}\n", mib * MIB) };
        put(
            sysroot,
            &[
                (&format!("{folder}/memory.max"), number(limit)),
                (&format!("{folder}/memory.current"), number(used)),
                (&format!("{folder}/memory.swap.current"), number(swapped)),
                (&format!("{folder}/memory.events.local"), "oom 9\noom_kill 3\n".into()),
            ],
        );
    }

    /// Makes a root with a hierarchy of the second version.
    pub fn mount(sysroot: &Sysroot) {
        put(sysroot, &[("proc/self/mountinfo", TWO.to_owned())]);
    }

    fn names(sysroot: &Sysroot, most: u64) -> Vec<String> {
        tight(most * MIB, sysroot).into_iter().map(|one| one.group).collect()
    }

    #[test]
    fn a_limit_holds_for_what_is_swapped_out() {
        let (_root, sysroot) = root(TWO);
        group(&sysroot, "/db", [512, 212, 300]);
        group(&sysroot, "/web", [u64::MAX, 900, 900]);
        group(&sysroot, "/idle", [100, 99, 0]);
        assert_eq!(names(&sysroot, 1000), ["/db"]);
        let found = &tight(1000 * MIB, &sysroot)[0];
        assert_eq!(found.file, "/sys/fs/cgroup/db/memory.max");
        assert_eq!(found.wanted, 544 * MIB);
        assert_eq!(
            found.describe(),
            "control group /db may have 512 MiB, cannot drop 212 MiB of what it has, and 300 MiB of it are \
             swapped out"
        );
        group(&sysroot, "/db", [512, 180, 300]);
        assert!(names(&sysroot, 1000).is_empty(), "a sixteenth stays free");
        group(&sysroot, "/db", [512, 181, 300]);
        assert_eq!(names(&sysroot, 1000), ["/db"]);
        // Pages in zram stay there: no more is read back than disks have.
        assert!(names(&sysroot, 299).is_empty());
    }

    #[test]
    fn a_limit_holds_for_all_groups_below() {
        let (_root, sysroot) = root(TWO);
        group(&sysroot, "/a.slice", [512, 400, 100]);
        group(&sysroot, "/a.slice/b.service", [u64::MAX, 400, 100]);
        assert_eq!(names(&sysroot, 1000), ["/a.slice"]);
    }

    /// Data of files can be dropped, unless it has to be written first, or is promised to a group.
    #[test]
    fn data_of_files_gives_way() {
        let (_root, sysroot) = root(TWO);
        group(&sysroot, "/db", [512, 500, 300]);
        group(&sysroot, "/db/part", [u64::MAX, 0, 0]);
        let stat = |files: u64, dirty: u64| {
            let text = format!(
                "anon 1\nfile 1\nfile_dirty {}\ninactive_file {}\nactive_file 0\n",
                dirty * MIB,
                files * MIB
            );
            put(&sysroot, &[("sys/fs/cgroup/db/memory.stat", text)]);
            names(&sysroot, 1000).is_empty()
        };
        assert!(stat(320, 0) && !stat(319, 0) && !stat(320, 1) && stat(321, 1));
        put(&sysroot, &[("sys/fs/cgroup/db/part/memory.min", MIB.to_string())]);
        assert!(!stat(320, 0) && stat(321, 0));
    }

    #[test]
    fn without_accounting_any_page_may_be_a_group_s() {
        let (_root, sysroot) = root(TWO);
        group(&sysroot, "/db", [512, 400, 0]);
        fs::remove_file(sysroot.path("sys/fs/cgroup/db/memory.swap.current")).expect("a file");
        assert!(names(&sysroot, 80).is_empty());
        assert_eq!(names(&sysroot, 81), ["/db"]);
    }

    #[test]
    fn the_first_version_has_two_limits() {
        let (_root, sysroot) = root(ONE);
        let group = |[limit, used, both_limit, both]: [u64; 4]| {
            let file = |name: &str, mib: u64| {
                let number = if mib == u64::MAX { 9_223_372_036_854_771_712 } else { mib * MIB };
                put(&sysroot, &[(&format!("sys/fs/cgroup/memory/db/memory.{name}"), format!("{number}\n"))]);
            };
            file("limit_in_bytes", limit);
            file("usage_in_bytes", used);
            file("memsw.limit_in_bytes", both_limit);
            file("memsw.usage_in_bytes", both);
            tight(1000 * MIB, &sysroot).pop().map(|found| found.file)
        };
        assert_eq!(group([u64::MAX, 400, u64::MAX, 900]), None);
        assert_eq!(group([512, 200, u64::MAX, 480]), None);
        let memory = Some("/sys/fs/cgroup/memory/db/memory.limit_in_bytes".to_owned());
        assert_eq!(group([512, 200, u64::MAX, 481]), memory);
        let both = Some("/sys/fs/cgroup/memory/db/memory.memsw.limit_in_bytes".to_owned());
        assert_eq!(group([512, 200, 300, 300]), both);
        assert_eq!(group([512, 200, 300, 299]), None);
        assert_eq!(group([512, 200, 300, 200]), None, "nothing is swapped out");
        let stat = "total_active_file 1048576\ntotal_inactive_file 0\ntotal_dirty 0\n".to_owned();
        put(&sysroot, &[("sys/fs/cgroup/memory/db/memory.stat", stat)]);
        assert_eq!(group([512, 200, 300, 300]), None);
    }

    #[test]
    fn tasks_that_the_kernel_ends_are_noticed() {
        let (_root, sysroot) = root(TWO);
        group(&sysroot, "/db", [512, 400, 300]);
        assert!(!Kills::now(&sysroot).rose(&sysroot), "a kernel that does not count");
        put(&sysroot, &[("proc/vmstat", "pgfault 7\noom_kill 3\n".into())]);
        let before = Kills::now(&sysroot);
        assert!(!before.rose(&sysroot));
        put(&sysroot, &[("proc/vmstat", "pgfault 8\noom_kill 4\n".into())]);
        assert!(before.rose(&sysroot));
        assert_eq!(before.named(&sysroot), "");
        put(&sysroot, &[("sys/fs/cgroup/db/memory.events.local", "oom 9\noom_kill 4\n".into())]);
        assert_eq!(before.named(&sysroot), " of control group /db");
    }

    /// The kernel's rule, as a model: it drops clean data of files, and then ends a task.
    fn ends_a_task(limit: u64, memory: u64, files: u64, swapped: u64) -> bool {
        memory - files + swapped > limit
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A group that is let through never loses a task.
        #[test]
        fn no_task_is_ended(
            limit in 1_u64..200,
            memory in 0_u64..200,
            files in 0_u64..200,
            swapped in 0_u64..200,
        ) {
            let (memory, files) = (memory.min(limit), files.min(memory.min(limit)));
            let (_root, sysroot) = root(TWO);
            group(&sysroot, "/x", [limit, memory, swapped]);
            put(&sysroot, &[("sys/fs/cgroup/x/memory.stat", format!("active_file {}\n", files * MIB))]);
            let refused = !names(&sysroot, 1000).is_empty();
            prop_assert!(refused || swapped == 0 || !ends_a_task(limit, memory, files, swapped));
            // It is not refused with plenty of room.
            prop_assert!(!refused || memory - files + swapped + limit / RESERVE_PART + 1 > limit);
        }
    }
}
