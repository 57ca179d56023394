//! Holds all applications still except this process, with the control groups' freezer, which they
//! do not notice.
//!
//! Processes that others wait for in the kernel (servers of FUSE, handlers of userfaultfd:
//! [`waits`]) are frozen last, because a task that waits for a frozen server does not come to rest.
//! Tasks that would not come to rest are looked for first, while everything runs ([`waits::stuck`]).
//! If a task does not come to rest nevertheless, all go on and the attempt is repeated, a few times
//! for less than 2 s in all. Then the error names the task.
//!
//! Groups at the top are frozen with all groups below. The root group cannot be frozen, so its
//! processes are moved into a group of Mercury's meanwhile. This process and those that it needs
//! are moved into a group that is not frozen. [`Throttle`] throttles applications: it freezes them for
//! a part of each period of time.

use super::waits;
use crate::undo::{Undo, UndoProcess};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Mount point for the hierarchy if it is not mounted.
const OWN_MOUNT: &str = "/run/mercury/cgroup";
const SELF: &str = "mercury.self";
const REST: &str = "mercury.rest";
const SERVERS: &str = "mercury.servers";
/// Rounds in which the root group is emptied before the remaining processes count as immovable.
const ROUNDS: u32 = 100;
/// Period of the throttle; throttled applications stand still for a part of it.
const PERIOD: Duration = Duration::from_millis(100);
/// Time for applications to come to rest in each attempt: a task may wait for a disk.
const ATTEMPTS: [Duration; 3] =
    [Duration::from_millis(300), Duration::from_millis(500), Duration::from_millis(1000)];
/// Time for which applications run between two attempts, so that waiting tasks get their answers.
const INTERVAL: Duration = Duration::from_millis(500);

/// Applications in groups that can be frozen, until this is dropped.
#[derive(Debug)]
struct Gathered {
    root: PathBuf,
    groups: Vec<PathBuf>,
    /// The groups, or groups below, that are frozen first: they have no servers.
    first: Vec<PathBuf>,
    /// The group that this process was in.
    own_group: PathBuf,
    mounted: bool,
}

/// Applications that are held still until this is dropped.
#[derive(Debug)]
pub struct Frozen {
    /// The open `cgroup.freeze` files: a path may lead over a server that does not answer yet.
    switches: Vec<File>,
    _gathered: Gathered,
}

/// Applications that are throttled until this is dropped.
#[derive(Debug)]
pub struct Throttle {
    // In the order of dropping.
    pulse: Pulse,
    gathered: Gathered,
}

/// Moves all processes of a group back, and removes the group.
pub fn give_back(from: &Path, to: &Path) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
    loop {
        // A process that has ended cannot be moved; the rest is tried anyway.
        for pid in processes(from).unwrap_or_default() {
            let _ = move_process(pid, to);
        }
        // A process may have been born there meanwhile, or a dead one may still be listed.
        match fs::remove_dir(from) {
            Err(error) if error.kind() != io::ErrorKind::NotFound && std::time::Instant::now() < end => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            _ => return,
        }
    }
}

impl Gathered {
    fn new(guard: &mut UndoProcess, needed: &[u32]) -> Result<Self> {
        let (root, mounted) = hierarchy()?;
        let own_group = own_group(&root)?;
        let mut gathered = Self { root, groups: Vec::new(), first: Vec::new(), own_group, mounted };
        gathered.gather(guard, needed).map_err(still_failed)?;
        Ok(gathered)
    }

    /// Gathers all processes. A repeated call also gathers those that were born since.
    fn gather(&mut self, guard: &mut UndoProcess, needed: &[u32]) -> io::Result<()> {
        let [own, rest, last] = [SELF, REST, SERVERS].map(|name| self.root.join(name));
        guard.will(&Undo::Return { from: own.clone(), to: self.own_group.clone() })?;
        make(&own)?;
        move_process(std::process::id(), &own)?;
        move_process(guard.pid(), &own)?;
        // Programs that they have started are needed too: ssh may reach its host through another
        // program.
        with_descendants(needed).into_iter().try_for_each(|pid| move_process(pid, &own))?;
        let servers = waits::servers();
        for group in [&rest, &last] {
            guard.will(&Undo::Return { from: group.clone(), to: self.root.clone() })?;
            make(group)?;
        }
        // Repeats until the group is empty, because processes fork meanwhile.
        for _ in 0..ROUNDS {
            let left: Vec<_> =
                processes(&self.root)?.into_iter().filter(|pid| !is_kernel_thread(*pid)).collect();
            if left.is_empty() {
                break;
            }
            // A process that has ended need not be moved.
            let group = |pid| if servers.contains(&pid) { &last } else { &rest };
            left.into_iter().for_each(|pid| drop(move_process(pid, group(pid))));
        }
        let left = processes(&self.root)?.into_iter().find(|pid| !is_kernel_thread(*pid));
        if let Some(pid) = left {
            return Err(io::Error::other(format!("process {pid} cannot be moved to a control group")));
        }
        for entry in fs::read_dir(&self.root)? {
            let group = entry?.path();
            // A group that is frozen already stays frozen.
            let state = fs::read_to_string(group.join("cgroup.freeze"));
            let is_free = state.is_ok_and(|state| state.trim() == "0") && !group.ends_with(SELF);
            if is_free && !self.groups.contains(&group) {
                guard.will(&Undo::Unfreeze(group.clone()))?;
                self.groups.push(group);
            }
        }
        let servers: Vec<_> =
            servers.iter().filter_map(|pid| group_of(&self.root, &pid.to_string())).collect();
        self.first = self.groups.iter().flat_map(|group| without(group, &servers)).collect();
        for group in self.first.iter().filter(|group| !self.groups.contains(group)) {
            guard.will(&Undo::Unfreeze(group.clone()))?;
        }
        Ok(())
    }

    /// Freezes the groups, and waits until all are frozen.
    fn freeze(self) -> Result<Frozen> {
        refuse_stuck(&processes(&self.root.join(SELF)).unwrap_or_default())?;
        let mut attempts = ATTEMPTS.iter().peekable();
        while let Some(patience) = attempts.next() {
            let frozen = self.freeze_within(*patience).map_err(still_failed)?;
            let Some(group) = frozen else { return Frozen::new(self).map_err(still_failed) };
            // The tasks are examined before the groups are thawed.
            let tasks = if attempts.peek().is_none() { waits::restless(&group) } else { Vec::new() };
            self.thaw();
            if attempts.peek().is_none() {
                return Err(restless(&group, &tasks));
            }
            thread::sleep(INTERVAL);
        }
        Err(still_failed(io::ErrorKind::TimedOut.into()))
    }

    /// Makes one attempt; returns the first group that does not come to rest.
    fn freeze_within(&self, patience: Duration) -> io::Result<Option<PathBuf>> {
        let end = Instant::now() + patience;
        for groups in [&self.first, &self.groups] {
            freeze(groups)?;
            while let Some(group) = groups.iter().find(|group| !is_frozen(group)) {
                if Instant::now() > end {
                    return Ok(Some(group.clone()));
                }
                thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(None)
    }

    fn thaw(&self) {
        thaw(&self.groups);
        thaw(&self.first);
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        self.thaw();
        give_back(&self.root.join(SERVERS), &self.root);
        give_back(&self.root.join(REST), &self.root);
        give_back(&self.root.join(SELF), &self.own_group);
        if self.mounted {
            let _ = rustix::mount::unmount(OWN_MOUNT, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

impl Frozen {
    /// Holds all applications except the processes that are `needed`; the undo process releases
    /// them if this process does not.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no control groups, or not all tasks come to rest in time;
    /// applications then run on.
    pub fn hold(guard: &mut UndoProcess, needed: &[u32]) -> Result<Self> {
        Gathered::new(guard, needed)?.freeze()
    }

    fn new(gathered: Gathered) -> io::Result<Self> {
        let groups = gathered.groups.iter().chain(&gathered.first);
        let open = |group: &PathBuf| File::options().write(true).open(group.join("cgroup.freeze"));
        let switches = groups.map(open).collect::<io::Result<_>>()?;
        Ok(Self { switches, _gathered: gathered })
    }

    /// Lets applications run again without a look-up of any path. The processes stay in Mercury's
    /// groups until this is dropped.
    pub fn thaw(&self, guard: &mut UndoProcess) {
        let results: Vec<_> = self.switches.iter().map(|switch| switch.write_all_at(b"0", 0)).collect();
        // A group that is gone needs no thaw. After another failure the undo process must try again.
        let gone = |error: &io::Error| error.raw_os_error() == Some(libc::ENODEV);
        if results.iter().all(|result| result.as_ref().err().is_none_or(gone)) {
            guard.is_thawed();
        }
    }
}

impl Throttle {
    /// Prepares a throttle of 0 %. The undo process must hear of this process while the throttle
    /// exists.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no control groups, or a process cannot be moved.
    pub fn new(guard: &mut UndoProcess) -> Result<Self> {
        let gathered = Gathered::new(guard, &[])?;
        let pulse = Pulse::new(gathered.groups.clone());
        Ok(Self { pulse, gathered })
    }

    /// Sets the percentage of time for which applications stand still from now on, at most 99.
    pub fn set(&self, percent: u8) {
        self.pulse.percent.store(percent.min(99), Ordering::Relaxed);
    }

    /// Holds the applications for good.
    ///
    /// # Errors
    ///
    /// Fails as [`Frozen::hold`] does.
    pub fn hold(self, guard: &mut UndoProcess) -> Result<Frozen> {
        let Self { pulse, mut gathered } = self;
        drop(pulse);
        gathered.gather(guard, &[]).map_err(still_failed)?;
        gathered.freeze()
    }
}

/// A thread that freezes groups for a part of each period.
#[derive(Debug)]
struct Pulse {
    percent: Arc<AtomicU8>,
    /// Dropping this ends the thread.
    end: Option<Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Pulse {
    fn new(groups: Vec<PathBuf>) -> Self {
        let percent = Arc::new(AtomicU8::new(0));
        let (end, ended) = channel();
        let current = Arc::clone(&percent);
        let thread = thread::spawn(move || {
            loop {
                let still = PERIOD * u32::from(current.load(Ordering::Relaxed)) / 100;
                if !still.is_zero() {
                    // A group that cannot be frozen is not throttled.
                    let _ = freeze(&groups);
                    let waited = ended.recv_timeout(still);
                    thaw(&groups);
                    if waited != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                }
                if ended.recv_timeout(PERIOD - still) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Self { percent, end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        drop(self.end.take());
        // The thread thaws all groups before it ends.
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// Refuses while a task waits that would not come to rest. Nothing needs to stand still to find that out.
/// The processes that are `needed` do not count.
///
/// # Errors
///
/// Returns an error that names the tasks.
pub fn refuse_stuck(needed: &[u32]) -> Result<()> {
    let tasks = waits::stuck(needed, ATTEMPTS.iter().sum());
    if tasks.is_empty() { Ok(()) } else { Err(restless(Path::new("/"), &tasks)) }
}

fn still_failed(error: io::Error) -> Error {
    Error::new(Exit::Failed, format!("applications could not be held still: {error}"))
        .hint("nothing was changed; see /sys/fs/cgroup, and try again")
}

/// Makes the error that names the tasks of a group that do not come to rest, and file systems whose
/// servers do not answer. Applications run meanwhile.
fn restless(group: &Path, tasks: &[waits::Task]) -> Error {
    restless_with(group, tasks, &waits::silent_servers())
}

fn restless_with(group: &Path, tasks: &[waits::Task], silent: &[waits::Silent]) -> Error {
    let name = group.file_name().unwrap_or_default().to_string_lossy();
    let named: Vec<_> = tasks.iter().map(ToString::to_string).collect();
    let who = match &named[..] {
        [] => format!("a task of the control group {name} does not come to rest"),
        some => format!("these tasks do not come to rest: {}", some.join("; ")),
    };
    let of = silent.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let servers = match of.is_empty() {
        true => of,
        false => format!("; the servers of these file systems do not answer: {of}"),
    };
    let of_server = (!silent.is_empty()).then_some(waits::Silent::REMEDY);
    let hint = of_server.or_else(|| tasks.iter().find_map(waits::Task::remedy));
    Error::new(Exit::Failed, format!("applications could not be held still: {who}{servers}"))
        .hint(hint.unwrap_or("they run on; try again when these tasks have what they wait for, or end them"))
}

fn freeze(groups: &[PathBuf]) -> io::Result<()> {
    groups.iter().try_for_each(|group| fs::write(group.join("cgroup.freeze"), "1"))
}

fn thaw(groups: &[PathBuf]) {
    // A group that is gone needs no thaw.
    groups.iter().for_each(|group| drop(fs::write(group.join("cgroup.freeze"), "0")));
}

/// Returns the mount point of the version 2 hierarchy; mounts it if it is nowhere.
fn hierarchy() -> Result<(PathBuf, bool)> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    if let Some(found) = fields.find(|fields| fields.get(2) == Some(&"cgroup2")) {
        return Ok((PathBuf::from(found[1]), false));
    }
    let mounted = fs::create_dir_all(OWN_MOUNT).and_then(|()| {
        let flags = rustix::mount::MountFlags::empty();
        Ok(rustix::mount::mount("none", OWN_MOUNT, "cgroup2", flags, None::<&std::ffi::CStr>)?)
    });
    mounted.map(|()| (PathBuf::from(OWN_MOUNT), true)).map_err(|error| {
        Error::new(Exit::Impossible, format!("control groups are not available: {error}")).hint(
            "boot a kernel with CONFIG_CGROUPS, and without cgroup_no_v1=… options that take version 2 away",
        )
    })
}

/// Returns the group of this process.
fn own_group(root: &Path) -> Result<PathBuf> {
    group_of(root, "self").ok_or_else(|| {
        Error::new(
            Exit::Impossible,
            "applications cannot be held still: this process is in no control group of version 2",
        )
        .hint("boot with systemd.unified_cgroup_hierarchy=1, or mount a cgroup2 file system")
    })
}

/// Returns the group of a process, from its cgroup file.
fn group_of(root: &Path, process: &str) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("0::/")).map(|path| root.join(path))
}

/// Returns the group, or the largest groups below it, that contain no group of `servers`. Groups
/// that are frozen already are left out.
fn without(group: &Path, servers: &[PathBuf]) -> Vec<PathBuf> {
    if !servers.iter().any(|server| server.starts_with(group)) {
        let state = fs::read_to_string(group.join("cgroup.freeze"));
        return state.is_ok_and(|state| state.trim() == "0").then(|| group.to_owned()).into_iter().collect();
    }
    let below = fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
    below.filter(|path| path.is_dir()).flat_map(|path| without(&path, servers)).collect()
}

fn make(group: &Path) -> io::Result<()> {
    match fs::create_dir(group) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

fn processes(group: &Path) -> io::Result<Vec<u32>> {
    let text = fs::read_to_string(group.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Returns the processes with all their descendants.
fn with_descendants(pids: &[u32]) -> Vec<u32> {
    let mut all = pids.to_vec();
    let mut next = 0;
    while let Some(pid) = all.get(next) {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let lists = threads.map(|thread| fs::read_to_string(thread.path().join("children")));
        let children: Vec<u32> = lists
            .flat_map(|list| {
                list.unwrap_or_default().split_whitespace().flat_map(str::parse).collect::<Vec<_>>()
            })
            .collect();
        all.extend(children);
        next += 1;
    }
    all
}

/// Returns true for a kernel thread. A group with one never comes to rest.
fn is_kernel_thread(pid: u32) -> bool {
    const PF_KTHREAD: u64 = 0x0020_0000;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may contain any character.
    let flags = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(6)?.parse().ok());
    flags.is_none_or(|flags: u64| flags & PF_KTHREAD != 0)
}

fn move_process(pid: u32, group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), pid.to_string())
}

/// Returns true if a group is frozen. Older kernels do not call a group without processes frozen.
fn is_frozen(group: &Path) -> bool {
    let events = fs::read_to_string(group.join("cgroup.events")).unwrap_or_default();
    events.lines().any(|line| line == "frozen 1" || line == "populated 0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    /// Any folder has such files.
    #[test]
    fn a_pulse_leaves_no_process_frozen() {
        let group = tempfile::tempdir().expect("a folder");
        let state = group.path().join("cgroup.freeze");
        fs::write(&state, "0").expect("written");
        let is_frozen = || fs::read_to_string(&state).expect("read") == "1";
        let share = |pulse: &Pulse, percent: u8| {
            pulse.percent.store(percent, Ordering::Relaxed);
            thread::sleep(PERIOD * 2);
            let looks = 400;
            let frozen = (0..looks).filter(|_| {
                thread::sleep(Duration::from_millis(2));
                is_frozen()
            });
            frozen.count() * 100 / looks
        };
        let pulse = Pulse::new(vec![group.path().to_owned()]);
        assert_eq!(share(&pulse, 0), 0);
        let shares = [20, 80].map(|percent| share(&pulse, percent));
        // A busy host measures late, and sees less of either state.
        assert!(0 < shares[0] && shares[0] < shares[1] && shares[1] < 100, "{shares:?}");
        drop(pulse);
        assert!(!is_frozen());
    }

    #[test]
    fn groups_of_servers_are_left_for_last() {
        let root = tempfile::tempdir().expect("a folder");
        let group = |path: &str, state: &str| {
            let group = root.path().join(path);
            fs::create_dir_all(&group).expect("folders");
            fs::write(group.join("cgroup.freeze"), state).expect("a file");
            group
        };
        let system = group("system", "0\n");
        let server = group("system/fuse.service", "0\n");
        let [client, nested] =
            ["system/client.service", "system/slice/x.service"].map(|path| group(path, "0\n"));
        group("system/slice", "0\n");
        group("system/frozen.service", "1\n");
        let mut found = without(&system, std::slice::from_ref(&server));
        found.sort();
        assert_eq!(found, [client, root.path().join("system/slice")]);
        assert_eq!(without(&system, &[]), [system.as_path()]);
        assert_eq!(without(&server, std::slice::from_ref(&server)), Vec::<PathBuf>::new());
        assert!(nested.starts_with(&found[1]));
    }

    #[test]
    fn children_of_children_are_found() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sh -c 'sleep 60 & echo $!; wait' & wait"]).stdout(Stdio::piped());
        let mut shell = shell.spawn().expect("a shell");
        let mut last = String::new();
        let said = shell.stdout.take().expect("its output");
        BufReader::new(said).read_line(&mut last).expect("a number");
        let last: u32 = last.trim().parse().expect("a number");
        let found = with_descendants(&[shell.id()]);
        for pid in [last, shell.id()] {
            let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process");
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let _ = shell.wait();
        assert_eq!((found.len(), found.first(), found.last()), (3, Some(&shell.id()), Some(&last)));
    }
}
