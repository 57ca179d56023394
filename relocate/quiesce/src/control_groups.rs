//! Memory limits of control groups: Documentation/admin-guide/cgroup-v2.rst, and cgroup-v1/memory.rst.
//!
//! swapoff(2) charges each page that it reads back to the control group that the page belonged to.
//! If the group has no room, and no file data that it can drop, the kernel ends one of its tasks.

use super::mounts::unescaped;
use mercury_control::{output::bytes, sysroot::Sysroot};
use std::{collections::BTreeMap, os::unix::fs::MetadataExt};

/// Most of a limit that stays free for growth while swap is off.
const RESERVE_MOST: u64 = 64 << 20;
/// Part of a limit that stays free for growth.
const RESERVE_PART: u64 = 16;
/// Times that the counts of ended tasks are read if they change meanwhile.
const READS_MAX: usize = 5;
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
            // The first version ends the charge of swap when a page comes to memory.
            Version::One => both.map(|both| both.saturating_sub(used)),
            Version::Two => self.swapped(),
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

    /// Returns the bytes that are swapped out, and not in memory as well: the second version charges pages
    /// in the swap cache to both.
    fn swapped(&self) -> Option<u64> {
        let cached = keyed(&self.text("memory.stat").unwrap_or_default(), "swapcached").unwrap_or(0);
        Some(self.number("memory.swap.current")?.saturating_sub(cached))
    }

    /// Reads the kernel's counts of ended tasks.
    fn losses(&self) -> Option<Losses> {
        let identity = std::fs::metadata(self.sysroot.path(&self.folder)).ok()?.ino();
        if self.version == Version::One {
            let kills = keyed(&self.text("memory.oom_control")?, "oom_kill")?;
            return Some(Losses { identity, kills_here: kills, ..Losses::default() });
        }
        let (here, all) = (self.text("memory.events.local")?, self.text("memory.events").unwrap_or_default());
        Some(Losses {
            identity,
            kills_here: keyed(&here, "oom_kill")?,
            limits_here: keyed(&here, "oom").unwrap_or(0),
            kills: keyed(&all, "oom_kill").unwrap_or(0),
            limits: keyed(&all, "oom").unwrap_or(0),
            is_swapped: self.number("memory.swap.current") != Some(0),
        })
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

/// The kernel's counts of tasks of a group that it has ended for lack of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Losses {
    /// The folder's number, which another group of the same name does not have.
    identity: u64,
    /// Tasks of the group itself.
    kills_here: u64,
    /// Times that the group's own limit had no room. The machine's own lack of memory is not among them.
    limits_here: u64,
    /// Both, with all groups below, and those that are gone. The second version counts them.
    kills: u64,
    limits: u64,
    /// False if the group, and those below it, have no swapped-out pages.
    is_swapped: bool,
}

impl Losses {
    /// Returns true if the group was made anew since then.
    fn is_new(&self, before: &Self) -> bool {
        self.identity != before.identity || self.kills < before.kills || self.limits < before.limits
    }

    /// Returns the growth since then. A group that was made anew has begun at zero, without swapped-out
    /// pages.
    fn since(&self, before: &Self) -> Self {
        let before = if self.is_new(before) { &Self::default() } else { before };
        Self {
            identity: self.identity,
            kills_here: self.kills_here.saturating_sub(before.kills_here),
            limits_here: self.limits_here.saturating_sub(before.limits_here),
            kills: self.kills.saturating_sub(before.kills),
            limits: self.limits.saturating_sub(before.limits),
            is_swapped: before.is_swapped,
        }
    }
}

/// The numbers of tasks that the kernel has ended for lack of memory, until now.
#[derive(Debug)]
pub struct Kills {
    all: Option<u64>,
    /// By the groups' paths.
    groups: BTreeMap<String, Losses>,
}

impl Kills {
    /// Reads the numbers.
    #[must_use]
    pub fn now(sysroot: &Sysroot) -> Self {
        let mut kills = Self::read(sysroot);
        // The numbers belong together only if no task was ended between them.
        for _ in 0..READS_MAX {
            if Self::in_all(sysroot) == kills.all {
                break;
            }
            kills = Self::read(sysroot);
        }
        kills
    }

    fn read(sysroot: &Sysroot) -> Self {
        let all = Self::in_all(sysroot);
        let mut groups = BTreeMap::new();
        for hierarchy in Hierarchy::all(sysroot) {
            hierarchy.visit(sysroot, &mut |group| {
                groups.extend(group.losses().map(|losses| (group.name.to_owned(), losses)));
            });
        }
        Self { all, groups }
    }

    /// The kernel counts those of groups here, too, and here first.
    fn in_all(sysroot: &Sysroot) -> Option<u64> {
        keyed(&sysroot.text("proc/vmstat")?, "oom_kill")
    }

    /// Returns true if a task was ended since, and the reason may be pages that came from swap. It is not
    /// if the task's group has reached a limit below which nothing was swapped out.
    #[must_use]
    pub fn rose(&self, sysroot: &Sysroot) -> bool {
        if Self::in_all(sysroot) == self.all {
            return false;
        }
        let now = Self::now(sysroot);
        let (Some(before), Some(all)) = (self.all, now.all) else { return false };
        all.saturating_sub(before) > self.explained(&now).values().sum()
    }

    /// Names the groups that have lost a task since for which swap may be the reason.
    #[must_use]
    pub fn named(&self, sysroot: &Sysroot) -> String {
        let now = Self::now(sysroot);
        let explained = self.explained(&now);
        let lost = now
            .groups
            .keys()
            .filter(|name| self.growth(&now, name).kills_here > explained.get(*name).copied().unwrap_or(0));
        let names: Vec<_> = lost.map(|name| if name.is_empty() { "/" } else { name }).collect();
        if names.is_empty() { String::new() } else { format!(" of control group {}", names.join(", ")) }
    }

    fn growth(&self, now: &Self, name: &str) -> Losses {
        let before = self.groups.get(name).copied().unwrap_or_default();
        now.groups.get(name).map(|losses| losses.since(&before)).unwrap_or_default()
    }

    /// Returns the kills of each group, and of those below it that are gone, for which swap is not the
    /// reason.
    fn explained(&self, now: &Self) -> BTreeMap<String, u64> {
        let explained = |name: &String| {
            let own = self.growth(now, name);
            if own.kills == 0 {
                return None;
            }
            let (kills, limits) = self.own(now, name);
            let mut is_swapped = Vec::new();
            is_swapped.extend((own.limits_here > 0).then_some(own.is_swapped));
            is_swapped.extend((limits > own.limits_here).then(|| self.has_lost_swapped(now, name)));
            let above = parents(name).map(|above| self.growth(now, above));
            is_swapped.extend(above.filter(|above| above.limits_here > 0).map(|above| above.is_swapped));
            let is_other = !is_swapped.is_empty() && !is_swapped.contains(&true);
            (kills > 0 && is_other).then(|| (name.clone(), kills))
        };
        now.groups.keys().filter_map(explained).collect()
    }

    /// Returns kills and reached limits of a group and of those below it that are gone.
    fn own(&self, now: &Self, name: &str) -> (u64, u64) {
        let all = self.growth(now, name);
        let below = now.groups.keys().filter(|one| parents(one).next() == Some(name));
        below.map(|one| self.growth(now, one)).fold((all.kills, all.limits), |(kills, limits), one| {
            (kills.saturating_sub(one.kills), limits.saturating_sub(one.limits))
        })
    }

    /// Returns true if a group below this one had swapped-out pages, and is gone or was made anew.
    fn has_lost_swapped(&self, now: &Self, name: &str) -> bool {
        let is_gone = |one: &str, before: &Losses| now.groups.get(one).is_none_or(|now| now.is_new(before));
        let mut below = self.groups.iter().filter(|(one, _)| parents(one).any(|above| above == name));
        below.any(|(one, before)| before.is_swapped && is_gone(one, before))
    }
}

/// Lists the groups above a group, the closest first, without the root of the hierarchy.
fn parents(name: &str) -> impl Iterator<Item = &str> {
    fn above<'a>(name: &&'a str) -> Option<&'a str> {
        name.rsplit_once('/').map(|(above, _)| above)
    }
    std::iter::successors(Some(name), above).skip(1).filter(|above| !above.is_empty())
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

    /// The second version charges a page of the swap cache to memory and to swap.
    #[test]
    fn the_swap_cache_is_in_memory_already() {
        let (_root, sysroot) = root(TWO);
        group(&sysroot, "/db", [512, 300, 300]);
        let cached = |mib: u64, most: u64| {
            let text = format!("anon 1\nswapcached {}\n", mib * MIB);
            put(&sysroot, &[("sys/fs/cgroup/db/memory.stat", text)]);
            names(&sysroot, most).is_empty()
        };
        assert!(cached(120, 1000) && !cached(119, 1000) && cached(301, 1000));
        assert!(!cached(100, 181) && cached(100, 180), "those may be pages of zram");
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

    /// Counts of tasks that were ended, and of limits without room, with those below, and of this group.
    fn lose(sysroot: &Sysroot, name: &str, all: [u64; 2], here: [u64; 2]) {
        for (file, [limits, kills]) in [("memory.events", all), ("memory.events.local", here)] {
            let text = format!("oom {limits}\noom_kill {kills}\n");
            put(sysroot, &[(&format!("sys/fs/cgroup{name}/{file}"), text)]);
        }
    }

    fn ended(sysroot: &Sysroot, number: u64) {
        put(sysroot, &[("proc/vmstat", format!("pgfault 7\noom_kill {number}\n"))]);
    }

    #[test]
    fn tasks_that_the_kernel_ends_are_noticed() {
        let (_root, sysroot) = root(TWO);
        group(&sysroot, "/db", [512, 400, 300]);
        assert!(!Kills::now(&sysroot).rose(&sysroot), "a kernel that does not count");
        ended(&sysroot, 3);
        let before = Kills::now(&sysroot);
        assert!(!before.rose(&sysroot));
        ended(&sysroot, 4);
        assert!(before.rose(&sysroot));
        assert_eq!(before.named(&sysroot), "");
        lose(&sysroot, "/db", [10, 4], [10, 4]);
        assert!(before.rose(&sysroot), "its limit, and it had swapped-out pages");
        assert_eq!(before.named(&sysroot), " of control group /db");
    }

    /// A machine with a slice that has swapped-out pages, and a container in it that has none.
    fn crowd() -> (tempfile::TempDir, Sysroot, Kills) {
        let (root, sysroot) = root(TWO);
        group(&sysroot, "/a.slice", [u64::MAX, 400, 300]);
        group(&sysroot, "/a.slice/db", [512, 400, 300]);
        group(&sysroot, "/a.slice/loop", [64, 60, 0]);
        lose(&sysroot, "/a.slice", [8, 8], [0, 0]);
        lose(&sysroot, "/a.slice/db", [0, 0], [0, 0]);
        lose(&sysroot, "/a.slice/loop", [7, 7], [7, 7]);
        ended(&sysroot, 8);
        let before = Kills::now(&sysroot);
        (root, sysroot, before)
    }

    #[test]
    fn a_container_at_its_own_limit_is_no_matter_of_swap() {
        let (_root, sysroot, before) = crowd();
        ended(&sysroot, 9);
        assert!(before.rose(&sysroot), "no group can be named");
        lose(&sysroot, "/a.slice", [9, 9], [0, 0]);
        lose(&sysroot, "/a.slice/loop", [8, 8], [8, 8]);
        assert!(!before.rose(&sysroot));
        assert_eq!(before.named(&sysroot), "");
        ended(&sysroot, 10);
        assert!(before.rose(&sysroot), "another one outside of groups");
        lose(&sysroot, "/a.slice", [10, 10], [0, 0]);
        lose(&sysroot, "/a.slice/db", [1, 1], [1, 1]);
        assert!(before.rose(&sysroot));
        assert_eq!(before.named(&sysroot), " of control group /a.slice/db");
    }

    #[test]
    fn a_container_that_is_gone_or_made_anew_has_lost_its_task() {
        let (_root, sysroot, before) = crowd();
        ended(&sysroot, 9);
        lose(&sysroot, "/a.slice", [9, 9], [0, 0]);
        lose(&sysroot, "/a.slice/loop", [0, 0], [0, 0]);
        assert!(!before.rose(&sysroot), "made anew");
        fs::remove_dir_all(sysroot.path("sys/fs/cgroup/a.slice/loop")).expect("a folder");
        assert!(!before.rose(&sysroot), "gone");
        let db = sysroot.path("sys/fs/cgroup/a.slice/db");
        fs::rename(&db, sysroot.path("old")).expect("a folder");
        assert!(before.rose(&sysroot), "it may have been the database");
        group(&sysroot, "/a.slice/db", [512, 10, 0]);
        lose(&sysroot, "/a.slice/db", [0, 0], [0, 0]);
        assert!(before.rose(&sysroot), "started again");
    }

    #[test]
    fn a_task_without_swap_is_ended_for_others() {
        // The limit of the slice, which has swapped-out pages.
        let (_root, sysroot, before) = crowd();
        ended(&sysroot, 9);
        lose(&sysroot, "/a.slice", [9, 9], [1, 0]);
        lose(&sysroot, "/a.slice/loop", [7, 8], [7, 8]);
        assert!(before.rose(&sysroot));
        assert_eq!(before.named(&sysroot), " of control group /a.slice/loop");
        // The machine's memory, which has no limit that is reached.
        let (_root, sysroot, before) = crowd();
        ended(&sysroot, 9);
        lose(&sysroot, "/a.slice", [8, 9], [0, 0]);
        lose(&sysroot, "/a.slice/loop", [7, 8], [7, 8]);
        assert!(before.rose(&sysroot));
        // Swap that is not accounted may be any group's.
        let (_root, sysroot, _) = crowd();
        fs::remove_file(sysroot.path("sys/fs/cgroup/a.slice/loop/memory.swap.current")).expect("a file");
        let before = Kills::now(&sysroot);
        ended(&sysroot, 9);
        lose(&sysroot, "/a.slice", [9, 9], [0, 0]);
        lose(&sysroot, "/a.slice/loop", [8, 8], [8, 8]);
        assert!(before.rose(&sysroot));
    }

    #[test]
    fn groups_above_are_listed() {
        assert_eq!(parents("/a/b/c").collect::<Vec<_>>(), ["/a/b", "/a"]);
        assert_eq!(parents("/a").count() + parents("").count(), 0);
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
