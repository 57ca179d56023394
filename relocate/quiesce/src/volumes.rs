//! Volumes whose kernel threads write to disks: device mapper's, and bcache. No thread of them can be
//! held, so most of them are refused by name. Two types of device mapper's come to rest by themselves:
//!
//! * A thin pool commits its metadata if something has changed: a second after the last commit, and its
//!   worker wakes each second. So it is at rest 2 s after the last write.
//! * RAID (LVM's, too) writes while it is in use or out of sync. Otherwise only marks of clean regions are
//!   left, which are the same on all its disks.
//!
//! A cache is not one of them. It writes its metadata each second, and dirty blocks when nothing else does.
//!
//! The kernel's memory holds metadata of a volume as long as the volume is active. A kernel that comes back
//! with disks that were written to after the instant would destroy a thin pool on them.

use super::layers::{self, Answer, Question};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use std::{
    io,
    ops::Range,
    thread,
    time::{Duration, Instant},
};

/// Targets of device mapper that write only when they are told to. Others have threads that copy, note
/// or write back what they have (mirror, cache, writecache, clone, integrity, vdo).
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
const POOL: &str = "thin-pool";
const RAID: &str = "raid";
/// Words in the state of a thin pool that has lost its metadata or its room.
const POOL_FAILURES: [&str; 4] = ["Fail", "Error", "out_of_data_space", "needs_check"];
/// Limit of volumes on volumes; a cycle is impossible, but the search must end.
const DEPTH_MAX: usize = 8;
/// Time without a write after which a thin pool is at rest, with half a second for a late worker.
const REST: Duration = Duration::from_millis(2500);
/// Time for a volume to come to rest.
const PATIENCE: Duration = Duration::from_secs(15);

/// The disks that the kernel of the instant finds when it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disks {
    /// The disks as it left them: the machine is off, or goes on elsewhere.
    AsLeft,
    /// Disks that were written to, and that the operator has put back.
    PutBack,
    /// Disks that were written to after the instant: a rollback puts back memory only.
    LeftBehind,
}

/// The block devices of a machine, and device mapper's answers about them.
struct Volumes<'a> {
    sysroot: &'a Sysroot,
    ask: &'a dyn Fn(&str, Question) -> io::Result<Answer>,
}

impl Volumes<'_> {
    fn text(&self, disk: &str, file: &str) -> String {
        self.sysroot.text(&format!("sys/block/{disk}/{file}")).unwrap_or_default()
    }

    /// Lists device mapper's devices. The threads of a suspended one stand still until it is resumed.
    fn mapped(&self, disks: Disks) -> Vec<String> {
        let mut found = self.sysroot.names("sys/block");
        let is_still = |disk: &str| disks != Disks::LeftBehind && self.text(disk, "dm/suspended") == "1";
        found.retain(|disk| disk.starts_with("dm-") && !is_still(disk));
        found
    }

    fn ask(&self, disk: &str, question: Question) -> io::Result<Answer> {
        (self.ask)(&self.text(disk, "dev"), question)
    }

    /// Returns true if a program, a file system or a layer other than device mapper has the volume open, or
    /// one above it.
    fn is_used(&self, disk: &str, depth: usize) -> bool {
        let Some(depth) = depth.checked_sub(1) else { return true };
        let Ok(answer) = self.ask(disk, Question::Table) else { return true };
        let above = self.sysroot.names(&format!("sys/block/{disk}/holders"));
        // Each volume above opens it once.
        answer.opens != above.len()
            || above.iter().any(|holder| !holder.starts_with("dm-") || self.is_used(holder, depth))
    }

    /// Returns the reason why a volume writes by itself, such as "raid, in use".
    fn unrest(&self, disk: &str, disks: Disks) -> Option<String> {
        let Ok(table) = self.ask(disk, Question::Table) else { return Some("of an unknown type".into()) };
        let mut kinds = table.targets.iter().map(|(_, _, kind, _)| &**kind);
        if disks == Disks::LeftBehind {
            return kinds.find(|kind| !QUIET.contains(kind) && *kind != RAID).map(Into::into);
        }
        let kind = kinds.find(|kind| !QUIET.contains(kind))?;
        let is_whole = table.targets.len() == 1;
        if !is_whole || !matches!(kind, POOL | RAID) || disks == Disks::PutBack {
            return Some(kind.into());
        }
        let Some(state) = self.state(disk) else { return Some(format!("{kind}, whose state is unknown")) };
        let why = if kind == POOL { pool_failure(&state) } else { raid_unrest(&state) };
        let used = || (kind == RAID && self.is_used(disk, DEPTH_MAX)).then(|| "in use".to_owned());
        why.or_else(used).map(|why| format!("{kind}, {why}"))
    }

    /// Returns the state of a volume with one target.
    fn state(&self, disk: &str) -> Option<String> {
        let targets = self.ask(disk, Question::State).ok()?.targets;
        let [(_, _, _, state)] = &targets[..] else { return None };
        Some(state.clone())
    }

    /// Lists the volumes that write to disks by themselves, such as "vg-data (dm-3, raid, in use)".
    fn restless(&self, disks: Disks) -> Vec<String> {
        let mapped = self.mapped(disks).into_iter().filter_map(|disk| {
            let why = self.unrest(&disk, disks)?;
            Some(format!("{} ({disk}, {why})", self.text(&disk, "dm/name")))
        });
        let mut found: Vec<_> = mapped.collect();
        let all = self.sysroot.names("sys/block");
        let writes_back = |disk: &&String| self.text(disk, "md/journal_mode").contains("[write-back]");
        let journals = all.iter().filter(writes_back);
        found.extend(journals.map(|disk| format!("{disk} (md, with a journal that is written back)")));
        found.extend(all.iter().filter(|disk| disk.starts_with("bcache")).cloned());
        let is_set = |name: &String| self.sysroot.exists(&format!("sys/fs/bcache/{name}/cache0"));
        let sets = self.sysroot.names("sys/fs/bcache").into_iter().filter(is_set);
        found.extend(sets.map(|set| format!("cache set {set} (bcache)")));
        found
    }

    /// Lists the volumes that come to rest.
    fn resting(&self) -> Vec<Resting> {
        let resting = |disk: String| {
            let targets = self.ask(&disk, Question::Table).ok()?.targets;
            let mut own = targets.iter().filter(|(_, _, kind, _)| matches!(&**kind, POOL | RAID)).peekable();
            own.peek()?;
            let below = own.flat_map(|(_, _, _, parameters)| device_numbers(parameters)).collect();
            let name = self.text(&disk, "dm/name");
            Some(Resting { disk, name, below, sample: None, since: Duration::ZERO })
        };
        self.mapped(Disks::AsLeft).into_iter().filter_map(resting).collect()
    }

    /// Returns the state of a volume with the writes to the devices below it; `None` while one of them is
    /// at work, or unknown.
    fn sample(&self, volume: &Resting) -> Option<Vec<String>> {
        let writes = volume.below.iter().map(|number| {
            let text = self.sysroot.text(&format!("sys/dev/block/{number}/stat"))?;
            writes_of(&text)
        });
        let mut sample: Vec<_> = writes.collect::<Option<_>>()?;
        if sample.is_empty() {
            return None;
        }
        sample.push(self.state(&volume.disk)?);
        Some(sample)
    }
}

/// Returns the failure in the state of a thin pool, such as `1 15/1024 77/8192 - rw discard_passdown
/// queue_if_no_space - 1024`.
fn pool_failure(state: &str) -> Option<String> {
    let failure = state.split(' ').find(|word| POOL_FAILURES.contains(word))?;
    Some(failure.into())
}

/// Returns the reason why an array writes although it is not in use, from its state, such as `raid1 2 AA
/// 8192/8192 idle 0 0 -`.
fn raid_unrest(state: &str) -> Option<String> {
    let words: Vec<_> = state.split(' ').collect();
    let is_whole = words.get(2).is_some_and(|health| health.bytes().all(|byte| byte == b'A'));
    let is_synced = words.get(3).and_then(|ratio| ratio.split_once('/')).is_some_and(|(a, b)| a == b);
    let is_idle = words.get(4).is_some_and(|action| *action == "idle");
    (!(is_whole && is_synced && is_idle)).then(|| "not in sync".into())
}

/// Returns the numbers of devices among the parameters of a target.
fn device_numbers(parameters: &str) -> Vec<String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_device =
        |word: &&str| word.split_once(':').is_some_and(|(major, minor)| is_number(major) && is_number(minor));
    parameters.split(' ').filter(is_device).map(str::to_owned).collect()
}

/// Returns the numbers of a device's stat that change with each write, discard and flush; `None` if a
/// request is in flight.
fn writes_of(stat: &str) -> Option<String> {
    let fields: Vec<_> = stat.split_whitespace().collect();
    let field = |number: usize| fields.get(number).copied().unwrap_or_default();
    (field(8) == "0").then(|| [4, 6, 11, 13, 15].map(field).join(" "))
}

/// A volume that comes to rest.
#[derive(Debug)]
struct Resting {
    disk: String,
    name: String,
    /// Numbers of the devices that it writes to.
    below: Vec<String>,
    sample: Option<Vec<String>>,
    /// Time of the last change.
    since: Duration,
}

impl Resting {
    /// Notes a sample that was taken within a range of time. Returns true if nothing has changed for long
    /// enough.
    fn rests(&mut self, sample: Option<Vec<String>>, taken: &Range<Duration>) -> bool {
        if sample.is_none() || self.sample != sample {
            (self.sample, self.since) = (sample, taken.end);
        }
        self.sample.is_some() && taken.start >= self.since + REST
    }
}

/// Refuses volumes whose threads write to disks by themselves, and that cannot be held.
///
/// # Errors
///
/// Returns an error that names them.
pub fn refuse_restless(disks: Disks, sysroot: &Sysroot) -> Result<()> {
    refuse(&Volumes { sysroot, ask: &layers::ask }, disks)
}

fn refuse(volumes: &Volumes<'_>, disks: Disks) -> Result<()> {
    let found = volumes.restless(disks);
    if found.is_empty() {
        return Ok(());
    }
    if disks == Disks::LeftBehind {
        let text = format!(
            "volumes keep metadata of their own in memory, and a rollback puts back memory only: {}",
            found.join(", ")
        );
        return Err(Error::coded(Code::DisksStayBehind, text).hint(
            "unmount and deactivate them (`vgchange -an`, `dmsetup remove`; for bcache, its `stop` in /sys); \
             if the disks below them can go back too (by --hook and --put-back), use --force-disks",
        ));
    }
    let as_left = volumes.restless(Disks::AsLeft);
    if as_left.is_empty() {
        let text = format!("the image would hold metadata of volumes that change on: {}", found.join(", "));
        return Err(Error::coded(Code::DisksUnheld, text).hint(
            "deactivate them (`vgchange -an`), or use --poweroff; use --force-devices if the hook's snapshot \
             has all disks below them, as a storage array's has",
        ));
    }
    let text = format!("volumes write to their disks by themselves: {}", as_left.join(", "));
    Err(Error::coded(Code::DisksUnheld, text).hint(
        "unmount and deactivate them (`vgchange -an`, `dmsetup remove`; for bcache, its `stop` in /sys); a \
         cache can be taken off in use (`lvconvert --splitcache`)",
    ))
}

/// Waits until thin pools, and arrays that are not in use, have nothing left to write. File systems are
/// frozen.
///
/// # Errors
///
/// Returns an error that names a volume with remaining writes.
pub fn wait(sysroot: &Sysroot) -> Result<()> {
    let volumes = Volumes { sysroot, ask: &layers::ask };
    let begun = Instant::now();
    wait_for(&volumes, &|| begun.elapsed(), &|| thread::sleep(Duration::from_millis(50)))
}

fn wait_for(volumes: &Volumes<'_>, elapsed: &dyn Fn() -> Duration, pause: &dyn Fn()) -> Result<()> {
    let mut left = volumes.resting();
    loop {
        let now = elapsed();
        left.retain_mut(|volume| {
            let sample = volumes.sample(volume);
            !volume.rests(sample, &(now..elapsed()))
        });
        let Some(first) = left.first() else { return Ok(()) };
        if now > PATIENCE {
            let text = format!("the volume {} ({}) does not come to rest", first.name, first.disk);
            return Err(Error::new(Exit::Failed, text)
                .hint("nothing was kept; look at `dmsetup status` for what it does, and try again"));
        }
        pause();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        cell::{Cell, RefCell},
        collections::BTreeMap,
    };

    /// A machine with volumes: number, opens, and type with parameters and state of each target.
    #[derive(Default)]
    struct Scene {
        root: Option<tempfile::TempDir>,
        answers: RefCell<BTreeMap<String, Given>>,
    }

    type Given = (usize, Vec<[String; 3]>);

    impl Scene {
        fn new() -> Self {
            Self { root: Some(tempfile::tempdir().expect("a folder")), ..Self::default() }
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.root.as_ref().expect("a folder").path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        }

        fn volume(&self, disk: u32, opens: usize, targets: &[[&str; 3]]) {
            self.put(&format!("sys/block/dm-{disk}/dm/name"), &format!("vg-{disk}"));
            self.put(&format!("sys/block/dm-{disk}/dev"), &format!("253:{disk}"));
            let targets = targets.iter().map(|target| target.map(str::to_owned)).collect();
            self.answers.borrow_mut().insert(format!("253:{disk}"), (opens, targets));
        }

        fn with<T>(&self, see: impl FnOnce(&Volumes<'_>) -> T) -> T {
            let sysroot = Sysroot::at(self.root.as_ref().expect("a folder").path());
            let ask = |number: &str, question| {
                let answers = self.answers.borrow();
                let (opens, targets) = answers.get(number).ok_or(io::ErrorKind::NotFound)?;
                let target = |[kind, parameters, state]: &[String; 3]| {
                    let text = if question == Question::Table { parameters } else { state };
                    (0, 8, kind.clone(), text.clone())
                };
                Ok(Answer { opens: *opens, targets: targets.iter().map(target).collect() })
            };
            see(&Volumes { sysroot: &sysroot, ask: &ask })
        }

        fn restless(&self, disks: Disks) -> Vec<String> {
            self.with(|volumes| volumes.restless(disks))
        }
    }

    const LINEAR: [&str; 3] = ["linear", "8:2 0", ""];
    const CACHE: [&str; 3] = ["cache", "253:7 253:8 253:9 128 1 writethrough smq 0", ""];
    const THIN_POOL: [&str; 3] = [
        "thin-pool",
        "253:5 253:6 128 0 0",
        "1 15/1024 77/8192 - rw discard_passdown queue_if_no_space - 1024",
    ];
    const MIRROR: [&str; 3] = ["raid", "raid1 1 128 2 253:5 253:6 253:7 253:8", "raid1 2 AA 8/8 idle 0 0 -"];

    #[test]
    fn volumes_with_threads_are_named() {
        let scene = Scene::new();
        scene.volume(0, 1, &[LINEAR, ["crypt", "aes-xts :64:logon:x 0 8:2 0", ""]]);
        scene.volume(1, 0, &[LINEAR, CACHE]);
        scene.put("sys/block/dm-2/dm/name", "odd");
        assert_eq!(
            scene.restless(Disks::AsLeft),
            ["vg-1 (dm-1, cache)", "odd (dm-2, of an unknown type)"],
            "a cache writes each second, in use or not"
        );
        let error = scene.with(|volumes| refuse(volumes, Disks::PutBack)).expect_err("refused");
        assert_eq!(error.code, Some(Code::DisksUnheld));
        assert!(error.message.starts_with("volumes write to their disks by themselves: vg-1"), "{error}");
        scene.put("sys/block/dm-1/dm/suspended", "1");
        scene.put("sys/block/dm-2/dm/suspended", "1");
        assert!(scene.restless(Disks::AsLeft).is_empty());
        scene.put("sys/block/md0/md/journal_mode", "[write-through] write-back\n");
        scene.put("sys/fs/bcache/register", "");
        assert!(scene.restless(Disks::AsLeft).is_empty());
        scene.put("sys/block/md0/md/journal_mode", "write-through [write-back]\n");
        scene.put("sys/block/bcache0/size", "1");
        scene.put("sys/fs/bcache/1234/cache0/written", "1");
        assert_eq!(
            scene.restless(Disks::AsLeft),
            ["md0 (md, with a journal that is written back)", "bcache0", "cache set 1234 (bcache)"]
        );
    }

    #[test]
    fn a_thin_pool_comes_to_rest_unless_its_metadata_would_be_stale() {
        let scene = Scene::new();
        scene.volume(3, 2, &[THIN_POOL]);
        assert!(scene.restless(Disks::AsLeft).is_empty(), "in use or not");
        assert_eq!(scene.restless(Disks::PutBack), ["vg-3 (dm-3, thin-pool)"]);
        let error = scene.with(|volumes| refuse(volumes, Disks::PutBack)).expect_err("refused");
        assert!(error.message.starts_with("the image would hold metadata of volumes that change on: vg-3"));
        assert!(error.hint.is_some_and(|hint| hint.contains("--force-devices")));
        let error = scene.with(|volumes| refuse(volumes, Disks::LeftBehind)).expect_err("refused");
        assert_eq!(error.code, Some(Code::DisksStayBehind));
        assert!(error.message.contains("back memory only: vg-3 (dm-3, thin-pool)"), "{error}");
        scene.put("sys/block/dm-3/dm/suspended", "1");
        assert_eq!(scene.restless(Disks::LeftBehind).len(), 1, "it may be resumed after the instant");
        scene.put("sys/block/dm-3/dm/suspended", "0");
        for state in ["Fail", "1 15/1024 8192/8192 - out_of_data_space discard_passdown queue_if_no_space -"]
        {
            scene.volume(3, 2, &[[THIN_POOL[0], THIN_POOL[1], state]]);
            assert_eq!(scene.restless(Disks::AsLeft).len(), 1, "{state}");
        }
        scene.volume(3, 2, &[LINEAR, THIN_POOL]);
        assert_eq!(scene.restless(Disks::AsLeft).len(), 1, "no pool that is known");
    }

    #[test]
    fn raid_is_refused_in_use_or_out_of_sync() {
        let scene = Scene::new();
        scene.volume(1, 0, &[MIRROR]);
        assert!(scene.restless(Disks::AsLeft).is_empty());
        assert_eq!(scene.restless(Disks::PutBack), ["vg-1 (dm-1, raid)"]);
        scene.volume(1, 1, &[MIRROR]);
        assert_eq!(scene.restless(Disks::AsLeft), ["vg-1 (dm-1, raid, in use)"], "mounted");
        assert!(scene.restless(Disks::LeftBehind).is_empty(), "its disks get the same old metadata");
        // A volume above it, which is not in use, in use, and then of another layer.
        scene.put("sys/block/dm-1/holders/dm-2", "");
        scene.volume(2, 0, &[LINEAR]);
        assert!(scene.restless(Disks::AsLeft).is_empty());
        scene.volume(2, 1, &[LINEAR]);
        assert_eq!(scene.restless(Disks::AsLeft), ["vg-1 (dm-1, raid, in use)"]);
        scene.volume(2, 0, &[LINEAR]);
        scene.volume(1, 2, &[MIRROR]);
        scene.put("sys/block/dm-1/holders/md0", "");
        assert_eq!(scene.restless(Disks::AsLeft), ["vg-1 (dm-1, raid, in use)"]);
        for state in
            ["raid1 2 Aa 4/8 resync 0 0 -", "raid1 2 AA 8/8 check 0 0 -", "raid1 2 AD 8/8 idle 0 0 -"]
        {
            let scene = Scene::new();
            scene.volume(1, 0, &[[MIRROR[0], MIRROR[1], state]]);
            assert_eq!(scene.restless(Disks::AsLeft), ["vg-1 (dm-1, raid, not in sync)"], "{state}");
        }
    }

    /// Waits for a pool that writes until `until`, on a clock that goes 50 ms at a time.
    fn waits_for(until: Duration) -> (Result<()>, Duration) {
        let scene = Scene::new();
        scene.volume(3, 1, &[THIN_POOL]);
        let now = Cell::new(Duration::ZERO);
        let write = || {
            let count = now.get().min(until).as_millis();
            scene.put("sys/dev/block/253:5/stat", &format!("9 9 9 9 {count} 0 8 0 0 0 0 0 0 0 0 {count} 0"));
            scene.put("sys/dev/block/253:6/stat", "9 9 9 9 1 0 8 0 0 0 0 0 0 0 0 0 0");
        };
        write();
        let pause = || {
            now.set(now.get() + Duration::from_millis(50));
            write();
        };
        let result = scene.with(|volumes| wait_for(volumes, &|| now.get(), &pause));
        (result, now.get())
    }

    #[test]
    fn a_pool_is_waited_for() {
        assert_eq!(waits_for(Duration::ZERO), (Ok(()), REST));
        let second = Duration::from_secs(1);
        assert_eq!(waits_for(second), (Ok(()), second + REST));
        let (result, elapsed) = waits_for(Duration::MAX);
        let error = result.expect_err("it writes on");
        assert!(error.message.contains("the volume vg-3 (dm-3) does not come to rest"), "{error}");
        assert!(elapsed < PATIENCE + second);
        let none = Scene::new();
        none.volume(0, 1, &[LINEAR]);
        assert_eq!(none.with(|volumes| wait_for(volumes, &|| Duration::ZERO, &|| panic!("waits"))), Ok(()));
    }

    #[test]
    fn requests_in_flight_are_no_rest() {
        let mut volume = Scene::new().with(|_| Resting {
            disk: String::new(),
            name: String::new(),
            below: Vec::new(),
            sample: None,
            since: Duration::ZERO,
        });
        assert!(!volume.rests(None, &(REST..REST)) && !volume.rests(None, &(2 * REST..2 * REST)));
        assert_eq!(writes_of("9 9 9 9 1 2 3 4 1 6 7 8 9 10 11 12 13"), None);
        assert_eq!(writes_of("9 9 9 9 1 2 3 4 0 6 7 8 9 10 11 12 13").as_deref(), Some("1 3 8 10 12"));
        assert_eq!(writes_of(""), None);
        assert_eq!(device_numbers(MIRROR[1]), ["253:5", "253:6", "253:7", "253:8"]);
        assert_eq!(device_numbers("aes-xts :64:logon:x 8:a"), [""; 0]);
    }
}
