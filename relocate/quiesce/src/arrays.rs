//! Holds arrays of md (software RAID), whose threads the kernel does not freeze. They go on with a
//! resync, and record clean regions, after applications and file systems stand still. A machine
//! that goes on elsewhere, or later, must not meet disks that were written to after its instant. So
//! arrays are brought to rest before the instant.
//!
//! md writes three things by itself: the copies of a resync or a check; the clean state in its
//! superblocks, a moment after the last write; and the bits of regions that have become equal in
//! its bitmap. A resync is held. For the other two a wait is enough, because there are no more
//! writes.
//!
//! A program (mdmon) writes the superblocks of arrays whose metadata is the firmware's (IMSM, DDF). The
//! kernel holds the first write after a pause until mdmon has answered, and mdmon is an application: it
//! stands still with the others. So such arrays are refused ([`refuse_external`]).

use super::patient;
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

/// Lists the names of arrays that may be written to.
fn writable(sysroot: &Sysroot) -> impl Iterator<Item = String> {
    let names = sysroot.names("sys/block").into_iter().filter(|name| name.starts_with("md"));
    names.filter(|name| {
        let state = sysroot.text(&format!("sys/block/{name}/md/array_state"));
        state.is_some_and(|state| !matches!(&*state, "clear" | "inactive" | "suspended" | "readonly"))
    })
}

/// Lists arrays whose superblocks a program writes, such as "md126 (external:/md127/0)".
fn external(sysroot: &Sysroot) -> Vec<String> {
    let found = |name: String| {
        // Arrays without copies are never unclean, so no program needs to answer.
        let has_copies = sysroot.exists(&format!("sys/block/{name}/md/sync_action"));
        let kind = sysroot.text(&format!("sys/block/{name}/md/metadata_version"))?;
        (has_copies && kind.starts_with("external:")).then(|| format!("{name} ({kind})"))
    };
    writable(sysroot).filter_map(found).collect()
}

/// Refuses arrays whose superblocks a program writes, because that program would stand still, too.
///
/// # Errors
///
/// Returns an error that names the arrays.
pub fn refuse_external(sysroot: &Sysroot) -> Result<()> {
    let found = external(sysroot);
    if found.is_empty() {
        return Ok(());
    }
    let text = format!(
        "a program (mdmon) writes the metadata of arrays, and writes to them would wait for it while all \
         programs stand still: {}",
        found.join(", ")
    );
    Err(Error::coded(Code::DisksUnheld, text).hint(
        "unmount what is on them, and stop them (`mdadm --stop`) or make them read-only (`mdadm \
         --readonly`); or have the data on arrays with Linux's own metadata (`mdadm --create \
         --metadata=1.2`), for a root or a boot disk in the next installation",
    ))
}

/// Lists the arrays that write by themselves.
fn all(sysroot: &Sysroot) -> Vec<Array> {
    let array = |name: String| {
        let folder = format!("sys/block/{name}/md");
        // Arrays without copies have neither a thread nor a bitmap.
        let action = sysroot.text(&format!("{folder}/sync_action")).filter(|action| action != "frozen");
        let time_base = sysroot.text(&format!("{folder}/bitmap/time_base"));
        Array { name, folder: sysroot.path(&folder), action, time_base }
    };
    writable(sysroot).map(array).collect()
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
        // One may have been assembled since the first question.
        refuse_external(sysroot)?;
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

    #[test]
    fn an_array_whose_metadata_a_program_writes_is_refused() {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        let put = |array: &str, file: &str, text: &str| {
            let folder = root.path().join("sys/block").join(array).join("md");
            std::fs::create_dir_all(&folder).expect("folders");
            std::fs::write(folder.join(file), text).expect("a file");
        };
        let array = |name: &str, state: &str, metadata: &str, action: Option<&str>| {
            put(name, "array_state", state);
            put(name, "metadata_version", metadata);
            action.into_iter().for_each(|action| put(name, "sync_action", action));
        };
        array("md0", "clean\n", "1.2\n", Some("idle\n"));
        // The whole of the disks, an array without copies, and one that nothing writes to.
        array("md127", "inactive\n", "external:imsm\n", None);
        array("md125", "clean\n", "external:/md127/1\n", None);
        array("md124", "readonly\n", "external:-md127/2\n", Some("idle\n"));
        assert_eq!(refuse_external(&sysroot), Ok(()));
        array("md126", "active-idle\n", "external:/md127/0\n", Some("idle\n"));
        let refused = refuse_external(&sysroot).expect_err("refused");
        assert_eq!(refused.code, Some(Code::DisksUnheld));
        assert!(refused.message.contains("mdmon") && refused.message.contains(": md126 (external:/md127/0)"));
    }
}
