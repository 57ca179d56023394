//! The first process of the restore environment: mounts file systems, loads drivers, waits for the
//! image, and brings the machine back, trying again until it succeeds; or waits for a machine that
//! moves here.

use super::place::Place;
use mercury_control::sysroot::Sysroot;
use mercury_quiesce::block_devices;
use rustix::{
    fs::{Mode, OFlags},
    mount::{MountFlags, mount},
};
use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
    thread,
    time::{Duration, Instant},
};

/// Word on the kernel's command line that names the image.
pub const WORD: &str = "mercury.restore";
/// Word on the command line for receiving a machine instead. The settings are in a file.
pub const RECEIVE: &str = "mercury.receive";
/// Word on the command line: see `--force-disks`.
pub const FORCE_DISKS: &str = "mercury.force-disks";
/// Word on the command line: after a failure the machine restarts. Without it the restore is tried
/// again.
pub const GIVE_UP: &str = "mercury.give-up";
/// File with the place of the image: a [`Place`].
pub const PLACE: &str = "place.json";
/// File with a list of modules, one file a line, in the order of loading.
pub const MODULES: &str = "modules/list";

/// Time for the disk to appear.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for people to read the reason before a restart or another attempt.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Returns true if this process is the first one of a restore environment.
#[must_use]
pub fn is_init() -> bool {
    std::process::id() == 1 && Path::new("/").join(MODULES).exists()
}

/// The task of a restore environment, by its kernel's command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task<'a> {
    /// Name of the image to restore.
    pub image: Option<&'a str>,
    /// True if a machine is to be received.
    pub receives: bool,
    /// True if a failure is not followed by another attempt.
    pub gives_up: bool,
    /// True if disks may have changed.
    pub force_disks: bool,
}

impl<'a> Task<'a> {
    /// Reads the task from a command line.
    #[must_use]
    pub fn of(line: &'a str) -> Self {
        let is_said = |wanted: &str| line.split_whitespace().any(|word| word == wanted);
        Self {
            image: line.split_whitespace().find_map(|word| word.strip_prefix(WORD)?.strip_prefix('=')),
            receives: is_said(RECEIVE),
            gives_up: is_said(GIVE_UP),
            force_disks: is_said(FORCE_DISKS),
        }
    }
}

/// Runs the first process.
#[must_use]
pub fn run() -> ExitCode {
    for (source, target, kind) in
        [("proc", "/proc", "proc"), ("sysfs", "/sys", "sysfs"), ("dev", "/dev", "devtmpfs")]
    {
        // Fails if the kernel has mounted it already.
        let _ = mount(source, target, kind, MountFlags::empty(), None::<&std::ffi::CStr>);
    }
    insert_modules();
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let task = Task::of(&line);
    match task.image {
        None if task.receives => receive(),
        Some(image) if task.gives_up => restore(image, task.force_disks),
        Some(image) => restore_at_last(image, task.force_disks),
        None => eprintln!("mercury: the command line has no {WORD}=IMAGE"),
    }
    eprintln!("mercury: the machine could not be brought back; it restarts in {} s", LAST_WORDS.as_secs());
    thread::sleep(LAST_WORDS);
    // SAFETY: touches no memory of this process.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    ExitCode::FAILURE
}

fn insert_modules() {
    let list = fs::read_to_string(Path::new("/").join(MODULES)).unwrap_or_default();
    for name in list.lines() {
        let file = rustix::fs::open(format!("/{name}"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let result = file.and_then(|file| rustix::system::finit_module(&file, c"", 0));
        if let Err(error) = result
            && error != rustix::io::Errno::EXIST
        {
            eprintln!("mercury: {name}: {error}");
        }
    }
}

/// Finds the disk with the image: the one of that name, or the only one that has an image. Names
/// change from boot to boot.
fn find(image: &str) -> Option<PathBuf> {
    let has_one = |device: &PathBuf| {
        let first = block_devices::head(device, 4096).ok().flatten();
        first.is_some_and(|first| first.starts_with(&mercury_image::MAGIC))
    };
    let named = PathBuf::from(image);
    if has_one(&named) {
        return Some(named);
    }
    let names = block_devices::readable(&Sysroot::default());
    let mut found = names.iter().map(|name| block_devices::device_file(name)).filter(has_one);
    found.next().filter(|_| found.next().is_none())
}

/// Tries again until the restore succeeds: the machine's usual system might write to disks that the
/// image must find unchanged. A disk or a server may come late. For a permanent failure there is
/// the key to restart.
fn restore_at_last(image: &str, force_disks: bool) -> ! {
    for pause in pauses() {
        restore(image, force_disks);
        eprintln!(
            "mercury: the machine could not be brought back; the next attempt is in {} s (Ctrl-Alt-Del \
             restarts)",
            pause.as_secs()
        );
        thread::sleep(pause);
    }
    unreachable!("pauses never end")
}

/// Returns the pauses between attempts: each twice as long as the one before, up to the longest.
fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(LAST_WORDS), |pause| Some((*pause * 2).min(LONGEST_PAUSE)))
}

fn restore(image: &str, force_disks: bool) {
    let Some(path) = reach(image) else { return };
    let path = path.to_string_lossy();
    let force = force_disks.then_some("--force-disks");
    let _ = run_again(&["restore", "--here", &path].into_iter().chain(force).collect::<Vec<_>>());
}

/// Finds the image: in its file, or on the disk that the command line names.
fn reach(image: &str) -> Option<PathBuf> {
    let place = fs::read(Path::new("/").join(PLACE)).ok();
    let place = place.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(Place::File(mount)) = place {
        let reached = mount.reach();
        return reached.inspect_err(|error| eprintln!("mercury: the image cannot be reached: {error}")).ok();
    }
    let end = Instant::now() + PATIENCE;
    let mut device = find(image);
    while device.is_none() && Instant::now() < end {
        thread::sleep(Duration::from_millis(50));
        device = find(image);
    }
    if device.is_none() {
        eprintln!("mercury: there is no image on {image}, and not exactly one other disk has one");
    }
    device
}

/// Waits for machines in a child process. If the kernel kills the child, the pages that had arrived
/// are gone, its source goes on or asks, and the next machine may come. Without free memory the
/// kernel kills the child first, and never this process.
fn receive() {
    for pause in pauses() {
        if !run_again(&["receive", "--here"]).is_some_and(was_killed) {
            return;
        }
        eprintln!(
            "mercury: the receiver was killed: this restore environment may have run out of memory \
             (above), and `mercury receive --memory` gives it more. Nothing runs here; another receiver \
             waits in {} s",
            pause.as_secs()
        );
        thread::sleep(pause);
    }
}

fn was_killed(status: ExitStatus) -> bool {
    status.signal().is_some()
}

/// Runs this program as a child process, and reports its end.
fn run_again(arguments: &[&str]) -> Option<ExitStatus> {
    let ended = Command::new("/init").args(arguments).status();
    match &ended {
        Ok(status) => eprintln!("mercury: {status}"),
        Err(error) => eprintln!("mercury: {error}"),
    }
    ended.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_receiver_is_told_from_a_failed_one() {
        let ended = |script| Command::new("sh").args(["-c", script]).status().expect("it runs");
        assert!(was_killed(ended("kill -KILL $$")) && was_killed(ended("kill -ABRT $$")));
        assert!(!was_killed(ended("exit 1")) && !was_killed(ended("true")));
    }

    #[test]
    fn pauses_become_longer_up_to_a_point() {
        let seconds: Vec<_> = pauses().take(7).map(|pause| pause.as_secs()).collect();
        assert_eq!(seconds, [10, 20, 40, 80, 160, 300, 300]);
    }
}
