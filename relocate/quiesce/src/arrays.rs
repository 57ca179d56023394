//! Holds arrays of md (software RAID), whose threads the kernel does not freeze. They go on with a
//! resync, and record clean regions, after applications and file systems stand still. A machine
//! that goes on elsewhere, or later, must not meet disks that were written to after its instant. So
//! arrays are brought to rest before the instant.
//!
//! md writes three things by itself: the copies of a resync or a check; the clean state in its
//! superblocks, a moment after the last write; and the bits of regions that have become equal in
//! its bitmap. A resync is held. For the other two a wait is enough, because there are no more
//! writes.

use super::{layers, patient};
use crate::undo::{Array, Undo, UndoProcess};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use std::{
    io, thread,
    time::{Duration, Instant},
};

/// Targets of device mapper that write only when they are told to. Others have threads that copy, note
/// or write back what they have (raid, mirror, cache, writecache, clone, thin-pool, integrity, vdo).
const QUIET: [&str; 15] = [
    "linear",
    "striped",
    "unstriped",
    "crypt",
    "verity",
    "multipath",
    "switch",
    "thin",
    "snapshot",
    "snapshot-origin",
    "error",
    "zero",
    "delay",
    "flakey",
    "dust",
];
/// Time for an array to become clean when there are no writes; md takes 0.2 s.
const CLEAN_PATIENCE: Duration = Duration::from_secs(10);
/// Interval in seconds at which md checks its bitmap while everything waits; it is 5 otherwise.
const HASTE: &str = "0.05";

impl Array {
    fn put(&self, file: &str, text: &str) -> io::Result<()> {
        patient::write(&self.folder.join(file), text)
    }

    fn says(&self, file: &str) -> String {
        std::fs::read_to_string(self.folder.join(file)).unwrap_or_default().trim().to_owned()
    }

    /// Lets the array go on with its action.
    pub fn release(&self) {
        if let Some(time_base) = &self.time_base {
            let _ = self.put("bitmap/time_base", time_base);
        }
        if let Some(action) = &self.action {
            // A resync or a recovery goes on by itself; other actions need to be set.
            let _ = self.put("sync_action", "idle");
            if matches!(&**action, "check" | "repair") {
                let _ = self.put("sync_action", action);
            }
        }
    }

    fn hold(&self) -> io::Result<()> {
        if self.action.is_some() {
            self.put("sync_action", "frozen")?;
        }
        if self.time_base.is_some() { self.put("bitmap/time_base", HASTE) } else { Ok(()) }
    }

    /// Returns the remaining writes of the array as a clause.
    fn unrest(&self, sysroot: &Sysroot) -> Option<String> {
        let state = self.says("array_state");
        if matches!(&*state, "active" | "write-pending") {
            return Some(format!("its state is {state}"));
        }
        let doing = self.says("sync_action");
        if !matches!(&*doing, "" | "idle" | "frozen") {
            return Some(format!("its thread goes on ({doing})"));
        }
        let pages = dirty_pages(&sysroot.text("proc/mdstat").unwrap_or_default(), &self.name);
        (pages > 0).then(|| format!("{pages} pages of its bitmap are not clear"))
    }
}

/// Returns the pages of an array's bitmap that are in use, from /proc/mdstat: `bitmap: 1/8 pages
/// [4KB], 65536KB chunk`.
fn dirty_pages(mdstat: &str, name: &str) -> u64 {
    let mut lines = mdstat.lines().skip_while(|line| line.split(' ').next() != Some(name)).skip(1);
    let own = lines.by_ref().take_while(|line| line.starts_with(' '));
    let mut pages =
        own.filter_map(|line| line.trim().strip_prefix("bitmap: ")?.split_once('/')?.0.parse().ok());
    pages.next().unwrap_or(0)
}

/// Lists the arrays that write by themselves.
fn all(sysroot: &Sysroot) -> Vec<Array> {
    let names = sysroot.names("sys/block").into_iter().filter(|name| name.starts_with("md"));
    let array = |name: String| {
        let folder = format!("sys/block/{name}/md");
        let state = sysroot.text(&format!("{folder}/array_state"))?;
        if matches!(&*state, "clear" | "inactive" | "suspended" | "readonly") {
            return None;
        }
        // Arrays without copies have neither a thread nor a bitmap.
        let action = sysroot.text(&format!("{folder}/sync_action")).filter(|action| action != "frozen");
        let time_base = sysroot.text(&format!("{folder}/bitmap/time_base"));
        Some(Array { name, folder: sysroot.path(&folder), action, time_base })
    };
    names.filter_map(array).collect()
}

/// Returns the volumes that write to their disks by themselves and cannot be held, such as "vg-data
/// (dm-3, raid)".
fn restless_volumes(sysroot: &Sysroot, kinds: &dyn Fn(&str) -> io::Result<Vec<String>>) -> Vec<String> {
    let disks = sysroot.names("sys/block");
    let mapped = |disk: &String| {
        let text = |file: &str| sysroot.text(&format!("sys/block/{disk}/{file}")).unwrap_or_default();
        // The threads of a suspended one stand still.
        if !disk.starts_with("dm-") || text("dm/suspended") == "1" {
            return None;
        }
        let found = kinds(&text("dev")).unwrap_or_else(|_| vec!["of an unknown type".into()]);
        let kind = found.into_iter().find(|kind| !QUIET.contains(&kind.as_str()))?;
        Some(format!("{} ({disk}, {kind})", text("dm/name")))
    };
    let writes_back = |disk: &String| {
        let mode = sysroot.text(&format!("sys/block/{disk}/md/journal_mode")).unwrap_or_default();
        mode.contains("[write-back]").then(|| format!("{disk} (md, with a journal that is written back)"))
    };
    let mut found: Vec<_> = disks.iter().filter_map(mapped).collect();
    found.extend(disks.iter().filter_map(writes_back));
    found.extend(disks.iter().filter(|disk| disk.starts_with("bcache")).cloned());
    let is_set = |name: &String| sysroot.exists(&format!("sys/fs/bcache/{name}/cache0"));
    let sets = sysroot.names("sys/fs/bcache").into_iter().filter(is_set);
    found.extend(sets.map(|set| format!("cache set {set} (bcache)")));
    found
}

/// Refuses volumes whose threads write to disks by themselves, and that cannot be held.
///
/// # Errors
///
/// Returns an error that names them.
pub fn refuse_restless(sysroot: &Sysroot) -> Result<()> {
    let found = restless_volumes(sysroot, &layers::kinds);
    if found.is_empty() {
        return Ok(());
    }
    let text = format!("volumes write to their disks by themselves: {}", found.join(", "));
    Err(Error::coded(Code::DisksUnheld, text)
        .hint("deactivate them (`vgchange -an`, `dmsetup remove`; for bcache, its `stop` in /sys)"))
}

/// Arrays whose threads are held until this is dropped.
#[derive(Debug, Default)]
pub struct Arrays {
    held: Vec<Array>,
}

impl Arrays {
    /// Holds the threads of all arrays; the undo process releases them if this process does not.
    ///
    /// # Errors
    ///
    /// Returns an error if one cannot be held; the others are released then.
    pub fn hold(guard: &mut UndoProcess, sysroot: &Sysroot) -> Result<Self> {
        let mut arrays = Self::default();
        for array in all(sysroot) {
            let failed = |error: io::Error| restless(&array, &error.to_string());
            guard.will(&Undo::Release(array.clone())).map_err(failed)?;
            arrays.held.push(array.clone());
            array.hold().map_err(failed)?;
        }
        Ok(arrays)
    }

    /// Waits until no array has anything left to write, when file systems are frozen.
    ///
    /// # Errors
    ///
    /// Returns an error that names an array with remaining writes.
    pub fn wait(&self, sysroot: &Sysroot) -> Result<()> {
        let end = Instant::now() + CLEAN_PATIENCE;
        for array in &self.held {
            while let Some(why) = array.unrest(sysroot) {
                if Instant::now() > end {
                    return Err(restless(array, &why));
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }
}

fn restless(array: &Array, why: &str) -> Error {
    let text = format!("the array {} does not come to rest: {why}", array.name);
    Error::new(Exit::Failed, text).hint(
        "see /proc/mdstat: stop the program that writes to the array, or wait for the end of its resync, \
         and try again",
    )
}

impl Drop for Arrays {
    fn drop(&mut self) {
        self.held.drain(..).for_each(|array| array.release());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MDSTAT: &str = "Personalities : [raid1]\nmd127 : active raid1 sdc1[0]\n      1 blocks\n\n\
        md0 : active raid1 sdb[1] sda[0]\n      1046528 blocks super 1.2 [2/2] [UU]\n      \
        bitmap: 2/8 pages [8KB], 65536KB chunk\n\nunused devices: <none>\n";

    #[test]
    fn volumes_with_threads_are_named() {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        };
        for (disk, name, number) in
            [("dm-0", "vg-root", "253:0"), ("dm-1", "vg-data", "253:1"), ("dm-2", "odd", "253:2")]
        {
            put(&format!("sys/block/{disk}/dm/name"), name);
            put(&format!("sys/block/{disk}/dev"), number);
        }
        let found = || {
            restless_volumes(&sysroot, &|number| match number {
                "253:0" => Ok(vec!["linear".into(), "crypt".into()]),
                "253:1" => Ok(vec!["linear".into(), "raid".into()]),
                _ => Err(io::ErrorKind::NotFound.into()),
            })
        };
        assert_eq!(found(), ["vg-data (dm-1, raid)", "odd (dm-2, of an unknown type)"]);
        put("sys/block/dm-1/dm/suspended", "1");
        put("sys/block/dm-2/dm/suspended", "1");
        assert!(found().is_empty());
        put("sys/block/md0/md/journal_mode", "[write-through] write-back\n");
        put("sys/fs/bcache/register", "");
        assert!(found().is_empty());
        put("sys/block/md0/md/journal_mode", "write-through [write-back]\n");
        put("sys/block/bcache0/size", "1");
        put("sys/fs/bcache/1234/cache0/written", "1");
        assert_eq!(
            found(),
            ["md0 (md, with a journal that is written back)", "bcache0", "cache set 1234 (bcache)"]
        );
        let error = refuse_restless(&sysroot).expect_err("refused");
        assert_eq!(error.code, Some(Code::DisksUnheld));
    }

    #[test]
    fn bitmaps() {
        assert_eq!(dirty_pages(MDSTAT, "md0"), 2);
        assert_eq!(dirty_pages(MDSTAT, "md127"), 0, "it has none");
        assert_eq!(dirty_pages("", "md0"), 0);
    }

    #[test]
    fn arrays_are_held_and_go_on() {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        let path = |file: &str| root.path().join("sys/block/md0/md").join(file);
        let put = |file: &str, text: &str| std::fs::write(path(file), text).expect("a file");
        let says = |file: &str| std::fs::read_to_string(path(file)).expect("a file");
        std::fs::create_dir_all(path("bitmap")).expect("folders");
        for (file, text) in
            [("array_state", "active\n"), ("sync_action", "check\n"), ("bitmap/time_base", "5\n")]
        {
            put(file, text);
        }
        let found = all(&sysroot);
        assert_eq!((found.len(), found[0].action.as_deref()), (1, Some("check")));
        found[0].hold().expect("held");
        assert_eq!((says("sync_action"), says("bitmap/time_base")), ("frozen".into(), HASTE.into()));
        assert_eq!(found[0].unrest(&sysroot).as_deref(), Some("its state is active"));
        put("array_state", "clean\n");
        assert_eq!(found[0].unrest(&sysroot), None);
        std::fs::create_dir(root.path().join("proc")).expect("a folder");
        std::fs::write(root.path().join("proc/mdstat"), MDSTAT).expect("a file");
        assert_eq!(found[0].unrest(&sysroot).as_deref(), Some("2 pages of its bitmap are not clear"));
        put("sync_action", "resync\n");
        assert_eq!(found[0].unrest(&sysroot).as_deref(), Some("its thread goes on (resync)"));
        found[0].release();
        assert_eq!((says("sync_action"), says("bitmap/time_base")), ("check".into(), "5".into()));
        put("array_state", "inactive\n");
        assert_eq!(all(&sysroot), []);
    }
}
