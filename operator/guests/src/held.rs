//! Folders that a process holds as long as it lives, by a lock in them.

use std::{
    env,
    fmt::{self, Display},
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// The file that is locked.
pub const LOCK: &str = "lock";
/// Attempts to lock a folder, and the time between two of them.
const ATTEMPTS: u32 = 10;
const MOMENT: Duration = Duration::from_millis(10);
/// The kernel's list of locks.
const LOCKS: &str = "/proc/locks";

/// Returns the folder for what runs of this process's user: `/run/mercury`, and `$XDG_RUNTIME_DIR/mercury`
/// for users.
#[must_use]
pub fn run_folder() -> PathBuf {
    let user = rustix::process::geteuid();
    let run = match env::var_os("XDG_RUNTIME_DIR") {
        _ if user.is_root() => "/run".into(),
        Some(run) => PathBuf::from(run),
        None => Path::new("/run/user").join(user.as_raw().to_string()),
    };
    run.join("mercury")
}

/// Makes the folder, and locks it. Returns `None` if another process holds the lock.
///
/// # Errors
/// If the folder cannot be made or locked.
pub fn take_lock(folder: &Path) -> io::Result<Option<File>> {
    for _ in 0..ATTEMPTS {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let path = folder.join(LOCK);
        let lock = match File::options().create(true).truncate(false).write(true).open(&path) {
            // The guest before has just removed its folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            lock => lock?,
        };
        match lock.try_lock() {
            Ok(()) if is_same(&lock, &path)? => return Ok(Some(lock)),
            Ok(()) => {}
            // A reader locks it for a moment.
            Err(TryLockError::WouldBlock) => thread::sleep(MOMENT),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(None)
}

/// Returns true if the path still leads to the open file.
fn is_same(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a file if it is there.
///
/// # Errors
/// If it cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns true if a process holds the lock of a folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn is_locked(folder: &Path) -> io::Result<bool> {
    let lock = match File::open(folder.join(LOCK)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        lock => lock?,
    };
    match lock.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Locks an open file or folder for this process alone. Returns false if another process has kept the lock
/// for all of this time.
///
/// # Errors
/// If it cannot be locked.
pub fn lock_within(file: &File, limit: Duration) -> io::Result<bool> {
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if start.elapsed() >= limit => return Ok(false),
            Err(TryLockError::WouldBlock) => thread::sleep(MOMENT),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// A process that holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    /// The kernel's name of the program.
    pub program: String,
    /// True if a signal or a debugger has stopped the process.
    pub is_stopped: bool,
}

impl Holder {
    /// Returns the process that holds the lock of an open file or folder. `None` if the kernel does not name
    /// it, as on a file system of several layers.
    #[must_use]
    pub fn of(file: &File) -> Option<Self> {
        let there = file.metadata().ok()?;
        let (major, minor) = (rustix::fs::major(there.dev()), rustix::fs::minor(there.dev()));
        let wanted = format!("{major:02x}:{minor:02x}:{}", there.ino());
        let pid = pid_in(&fs::read_to_string(LOCKS).ok()?, &wanted)?;
        let (program, is_stopped) = parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        Some(Self { pid, program, is_stopped })
    }

    /// Returns the process that holds the lock of a folder, as [`Holder::of`] does.
    #[must_use]
    pub fn of_folder(folder: &Path) -> Option<Self> {
        Self::of(&File::open(folder.join(LOCK)).ok()?)
    }
}

impl Display for Holder {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stopped = if self.is_stopped { ", stopped" } else { "" };
        write!(to, "process {} ({}{stopped})", self.pid, self.program)
    }
}

/// Finds the holder of a lock in the kernel's list. Lines with an arrow are those of processes that wait.
fn pid_in(locks: &str, wanted: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let is_flock = words.next() == Some("FLOCK");
        let (pid, file) = (words.nth(2)?, words.next()?);
        if is_flock && file == wanted { pid.parse().ok() } else { None }
    })
}

/// Parses the state of a process. Its name may have any characters.
fn parse_stat(stat: &str) -> Option<(String, bool)> {
    let (before, after) = stat.rsplit_once(") ")?;
    let program = before.split_once('(')?.1.replace(|one: char| one.is_control(), "?");
    Some((program, after.starts_with(['T', 't'])))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Lets one test at a time make processes or let locks go: a new process has the locks of all tests.
    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn the_holder_of_a_lock_is_found_among_those_that_wait() {
        let locks = "1: POSIX  ADVISORY  WRITE 6 00:19:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 7 00:19:77 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 8 00:19:78 0 EOF\n\
                     3: FLOCK  ADVISORY  READ  9 fd:01:5 0 EOF\n";
        let found = ["00:19:77", "00:19:78", "fd:01:5", ""].map(|wanted| pid_in(locks, wanted));
        assert_eq!(found, [Some(7), None, Some(9), None]);
        for cut in 0..locks.len() {
            let _ = pid_in(&locks[..cut], "00:19:77");
        }
        assert_eq!(parse_stat("7 (a) b) T 1 7"), Some(("a) b".into(), true)));
        assert_eq!(parse_stat("7 (a\u{1b}) S 1 7"), Some(("a?".into(), false)));
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_lock_is_waited_for_as_long_as_is_said_and_its_holder_has_a_name() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        let [own, other] = [0, 1].map(|_| File::open(place.path()).unwrap());
        let limit = Duration::from_millis(50);
        assert!(lock_within(&own, limit).unwrap());
        let start = Instant::now();
        assert!(!lock_within(&other, limit).unwrap());
        assert!(start.elapsed() >= limit);
        // File systems of several layers have other numbers.
        if let Some(holder) = Holder::of(&other) {
            assert_eq!((holder.pid, holder.is_stopped), (std::process::id(), false));
            assert!(holder.to_string().starts_with(&format!("process {} (", holder.pid)), "{holder}");
        }
        drop(own);
        assert!(lock_within(&other, Duration::ZERO).unwrap());
    }

    #[test]
    fn a_process_that_is_stopped_with_a_lock_is_named_as_stopped() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        // SAFETY: The child makes files only, stops itself, and is killed.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let _lock = take_lock(place.path());
            // SAFETY: It stops and ends the process.
            unsafe {
                libc::raise(libc::SIGSTOP);
                libc::_exit(0)
            }
        }
        // SAFETY: The process is a child, and no status is wanted.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::WUNTRACED) };
        assert!(take_lock(place.path()).unwrap().is_none());
        // File systems of several layers have other numbers.
        if let Some(holder) = Holder::of_folder(place.path()) {
            assert_eq!((holder.pid, holder.is_stopped), (child.cast_unsigned(), true));
            assert!(holder.to_string().ends_with(", stopped)"), "{holder}");
        }
        // SAFETY: The process is a child that was not waited for to its end.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(Holder::of_folder(place.path()), None);
    }
}
