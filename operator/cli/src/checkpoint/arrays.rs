//! Arrays of md (software RAID), whose threads the kernel does not freeze: they go on with a resync, and note what is clean,
//! after applications and file systems stand still. A machine that goes on elsewhere, or later, must not meet disks that
//! were written to after its instant; so arrays are brought to rest before it.
//!
//! What md writes by itself is: copies of a resync or a check; in its superblocks, that the array is clean, a moment after
//! the last write; and in its bitmap, which parts have become the same. A resync is held. For the other two it is enough to
//! wait, for there are no more writes.

use super::{
    guard::{Guard, Undo},
    patient,
};
use crate::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use serde::{Deserialize, Serialize};
use std::{
    io,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

/// How long an array may take to become clean when nobody writes to it: by itself it takes 0.2 s.
const CLEAN_PATIENCE: Duration = Duration::from_secs(10);
/// How often md looks whether its bitmap can be cleared, in seconds, while everything waits for it; it is 5 otherwise.
const HASTE: &str = "0.05";

/// An array, as it was before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Array {
    name: String,
    /// Its folder in /sys.
    folder: PathBuf,
    /// What its thread was doing, such as "resync"; `None` if it was held already.
    action: Option<String>,
    /// How often md looked at its bitmap.
    time_base: Option<String>,
}

impl Array {
    fn put(&self, file: &str, text: &str) -> io::Result<()> {
        patient::write(&self.folder.join(file), text)
    }

    fn says(&self, file: &str) -> String {
        std::fs::read_to_string(self.folder.join(file)).unwrap_or_default().trim().to_owned()
    }

    /// Has it go on with what it did.
    pub fn release(&self) {
        if let Some(time_base) = &self.time_base {
            let _ = self.put("bitmap/time_base", time_base);
        }
        if let Some(action) = &self.action {
            // It goes on with a resync or a recovery by itself, with others if it is told.
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

    /// Returns what it still has to write, as a clause.
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

/// Pages of an array's bitmap that are in use, of /proc/mdstat: `bitmap: 1/8 pages [4KB], 65536KB chunk`.
fn dirty_pages(mdstat: &str, name: &str) -> u64 {
    let mut lines = mdstat.lines().skip_while(|line| line.split(' ').next() != Some(name)).skip(1);
    let own = lines.by_ref().take_while(|line| line.starts_with(' '));
    let mut pages =
        own.filter_map(|line| line.trim().strip_prefix("bitmap: ")?.split_once('/')?.0.parse().ok());
    pages.next().unwrap_or(0)
}

/// Arrays that write by themselves.
fn all(sysroot: &Sysroot) -> Vec<Array> {
    let names = sysroot.names("sys/block").into_iter().filter(|name| name.starts_with("md"));
    let array = |name: String| {
        let folder = format!("sys/block/{name}/md");
        let state = sysroot.text(&format!("{folder}/array_state"))?;
        if matches!(&*state, "clear" | "inactive" | "suspended" | "readonly") {
            return None;
        }
        // Those without copies have neither.
        let action = sysroot.text(&format!("{folder}/sync_action")).filter(|action| action != "frozen");
        let time_base = sysroot.text(&format!("{folder}/bitmap/time_base"));
        Some(Array { name, folder: sysroot.path(&folder), action, time_base })
    };
    names.filter_map(array).collect()
}

/// Arrays whose threads are held until this is dropped.
#[derive(Debug, Default)]
pub struct Arrays {
    held: Vec<Array>,
}

impl Arrays {
    /// Holds the threads of all; `guard` releases them if this process does not.
    ///
    /// # Errors
    /// If one cannot be held; the others are released then.
    pub fn hold(guard: &mut Guard, sysroot: &Sysroot) -> Result<Self> {
        let mut arrays = Self::default();
        for array in all(sysroot) {
            let failed = |error: io::Error| restless(&array, &error.to_string());
            guard.will(&Undo::Release(array.clone())).map_err(failed)?;
            arrays.held.push(array.clone());
            array.hold().map_err(failed)?;
        }
        Ok(arrays)
    }

    /// Waits until none has anything left to write, when file systems are still.
    ///
    /// # Errors
    /// Naming one that has.
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
        "see /proc/mdstat: stop what writes to the array, or wait for the end of its resync, and try again",
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
}
