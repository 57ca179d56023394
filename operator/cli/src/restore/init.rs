//! This program as the first process of the small system: it mounts what it needs, puts in drivers, waits for the
//! image, and brings the machine back, trying again until it has; or waits for a machine that moves here.

use super::place::Place;
use rustix::{
    fs::{Mode, OFlags},
    mount::{MountFlags, mount},
};
use std::{
    fs, io,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
    thread,
    time::{Duration, Instant},
};

/// Names the image on the kernel's command line.
pub const WORD: &str = "mercury.restore";
/// On the command line instead: a machine is taken in. How is in a file.
pub const RECEIVE: &str = "mercury.receive";
/// On the command line too: see `--force-disks`.
pub const FORCE_DISKS: &str = "mercury.force-disks";
/// On the command line too: a failure is the end, and the machine restarts. Otherwise it is tried again.
pub const GIVE_UP: &str = "mercury.give-up";
/// Where the image lies: a [`Place`].
pub const PLACE: &str = "place.json";
/// A list of modules, one file a line, in the order in which they are put in.
pub const MODULES: &str = "modules/list";

/// How long the disk may take to appear.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the reason can be read before the machine restarts, or it is tried again.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Whether this process is the first, of the small system.
#[must_use]
pub fn is_init() -> bool {
    std::process::id() == 1 && Path::new("/").join(MODULES).exists()
}

/// The first process.
#[must_use]
pub fn run() -> ExitCode {
    for (source, target, kind) in
        [("proc", "/proc", "proc"), ("sysfs", "/sys", "sysfs"), ("dev", "/dev", "devtmpfs")]
    {
        // One that the kernel has mounted itself is there.
        let _ = mount(source, target, kind, MountFlags::empty(), None::<&std::ffi::CStr>);
    }
    insert_modules();
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let image = line.split_whitespace().find_map(|word| word.strip_prefix(WORD)?.strip_prefix('='));
    let is_said = |wanted: &str| line.split_whitespace().any(|word| word == wanted);
    match image {
        None if is_said(RECEIVE) => receive(),
        Some(image) if is_said(GIVE_UP) => restore(image, is_said(FORCE_DISKS)),
        Some(image) => restore_at_last(image, is_said(FORCE_DISKS)),
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

/// The disk with the image: the one of that name, or the only one that has one. Names change from boot to boot.
fn find(image: &str) -> Option<PathBuf> {
    let has_one = |device: &PathBuf| {
        let mut magic = [0; mercury_image::MAGIC.len()];
        let read = fs::File::open(device).and_then(|mut file| io::Read::read_exact(&mut file, &mut magic));
        read.is_ok() && magic == mercury_image::MAGIC
    };
    let named = PathBuf::from(image);
    if has_one(&named) {
        return Some(named);
    }
    let names = fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    let mut found = names.map(|entry| Path::new("/dev").join(entry.file_name())).filter(has_one);
    found.next().filter(|_| found.next().is_none())
}

/// Tries for as long as it takes: what this machine boots otherwise may write to disks that the image must find as they were.
/// A disk or a server may come late; for what remains as it is there is the key to restart.
fn restore_at_last(image: &str, force_disks: bool) -> ! {
    for pause in pauses() {
        restore(image, force_disks);
        eprintln!(
            "mercury: the machine could not be brought back; it is tried again in {} s (Ctrl-Alt-Del restarts)",
            pause.as_secs()
        );
        thread::sleep(pause);
    }
    unreachable!("pauses never end")
}

/// Between attempts: each twice as long as the one before, up to the longest.
fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(LAST_WORDS), |pause| Some((*pause * 2).min(LONGEST_PAUSE)))
}

fn restore(image: &str, force_disks: bool) {
    let Some(path) = reach(image) else { return };
    let path = path.to_string_lossy();
    let force = force_disks.then_some("--force-disks");
    let _ = run_again(&["restore", "--here", &path].into_iter().chain(force).collect::<Vec<_>>());
}

/// The image: in its file, or on its disk, which the command line names.
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
        eprintln!("mercury: there is no image on {image}, nor on any other disk alone");
    }
    device
}

/// Waits for machines. Where whoever does that is killed, what had come is gone with him, and its source goes on or asks; the next one
/// may come. The kernel kills him first if this system has no memory left, and never this process.
fn receive() {
    for pause in pauses() {
        if !run_again(&["receive", "--here"]).is_some_and(was_killed) {
            return;
        }
        eprintln!(
            "mercury: who received was killed: this small system may have run out of memory (above), and `mercury receive --memory` gives \
             it more. Nothing runs here; another one waits in {} s",
            pause.as_secs()
        );
        thread::sleep(pause);
    }
}

fn was_killed(status: ExitStatus) -> bool {
    status.signal().is_some()
}

/// Runs this program as a process of its own, and says how it ended.
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
    fn who_was_killed_is_told_from_who_has_failed() {
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
