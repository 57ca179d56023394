//! Watchdogs, which reset the machine when they are not fed. While applications stand still, so
//! does the program that feeds one. [`Feeder`] feeds the watchdog in its place, by a copy of that
//! program's own descriptor: a watchdog can be opened only once.

use super::openers::{self, Openers};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    sysroot::Sysroot,
};
use rustix::{
    ioctl::{Getter, NoArg, Opcode, Updater, ioctl},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    sync::mpsc::{RecvTimeoutError, Sender, TryRecvError, channel},
    thread,
    time::Duration,
};

/// Least timeout of a watchdog that can be fed in time. During the instant itself, and while the
/// kernel stops and starts devices, no process runs. This has taken some hundred milliseconds.
const LEAST_SECONDS: u64 = 5;
/// Time between two feedings.
const PERIOD: Duration = Duration::from_millis(500);
/// Feedings after which new watchdogs are searched for.
const FEEDINGS: u32 = 10;

/// `WDIOC_KEEPALIVE` and others of the kernel's watchdog interface.
const KEEPALIVE: Opcode = 0x8004_5705;
const SET_OPTIONS: Opcode = 0x8004_5704;
const SET_TIMEOUT: Opcode = 0xc004_5706;
const GET_TIMEOUT: Opcode = 0x8004_5707;
const DISABLE: i32 = 1;
const ENABLE: i32 = 2;

/// Returns armed watchdogs, each with its timeout in seconds.
#[must_use]
pub fn armed(sysroot: &Sysroot) -> Vec<(String, Option<u64>)> {
    let text = |name: &str, file: &str| sysroot.text(&format!("sys/class/watchdog/{name}/{file}"));
    let number = |name: &str, file: &str| text(name, file)?.parse::<u64>().ok();
    let names = sysroot.names("sys/class/watchdog").into_iter();
    let active = names.filter(|name| text(name, "state").as_deref() == Some("active"));
    active
        .map(|name| {
            // A panic may come this long before the reset.
            let early = number(&name, "pretimeout").unwrap_or(0);
            let seconds = number(&name, "timeout").map(|seconds| seconds.saturating_sub(early));
            (name, seconds)
        })
        .collect()
}

/// Refuses a watchdog whose timeout is too short, or that cannot be fed.
///
/// # Errors
///
/// Returns an error that names it.
pub fn refuse(sysroot: &Sysroot) -> Result<()> {
    let armed = armed(sysroot);
    let is_short = |seconds: &Option<u64>| seconds.is_some_and(|seconds| seconds < LEAST_SECONDS);
    if let Some((name, seconds)) = armed.iter().find(|(_, seconds)| is_short(seconds)) {
        let seconds = seconds.unwrap_or_default();
        let text = format!(
            "{name} resets the machine after {seconds} s without its program, and during the instant no \
             program runs: the timeout must be at least {LEAST_SECONDS} s"
        );
        return Err(Error::coded(Code::WatchdogUnfed, text));
    }
    let openers = if armed.is_empty() { Openers::default() } else { Openers::read(sysroot) };
    for open in openers.all(is_watchdog) {
        if let Err(error) = copy(open.process().pid, open.descriptor) {
            let who = openers::names([open.process()]);
            let text =
                format!("{} cannot be fed in place of {who}, which will stand still: {error}", open.target);
            return Err(Error::coded(Code::WatchdogUnfed, text));
        }
    }
    Ok(())
}

fn is_watchdog(target: &str) -> bool {
    target.starts_with("/dev/watchdog")
}

/// Feeds all watchdogs that a program has open, until this is dropped.
#[derive(Debug)]
pub struct Feeder {
    /// Dropping this ends the thread.
    end: Option<Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Feeder {
    /// Starts feeding at once.
    #[must_use]
    pub fn start(sysroot: Sysroot) -> Self {
        Self::of(move || held(&sysroot), feed)
    }

    fn of<Held: 'static>(find: impl Fn() -> Vec<Held> + Send + 'static, feed: fn(&mut Held)) -> Self {
        let (end, ended) = channel();
        let thread = thread::spawn(move || {
            // A throttled program may open a watchdog, or close it.
            while ended.try_recv() == Err(TryRecvError::Empty) {
                let mut watchdogs = find();
                for _ in 0..FEEDINGS {
                    watchdogs.iter_mut().for_each(feed);
                    if ended.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                }
            }
        });
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// Copies the descriptors by which programs feed watchdogs.
fn held(sysroot: &Sysroot) -> Vec<File> {
    let openers = Openers::read(sysroot);
    let watchdogs = openers.all(|target| target.starts_with("/dev/watchdog"));
    watchdogs.filter_map(|open| copy(open.process().pid, open.descriptor).ok()).map(File::from).collect()
}

/// Copies another process's descriptor.
fn copy(pid: u32, descriptor: i32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty())?)
}

fn feed(watchdog: &mut File) {
    // SAFETY: the number is that of a request without an argument.
    let request = unsafe { NoArg::<KEEPALIVE>::new() };
    // SAFETY: the request reads and writes no memory of this process.
    let fed = unsafe { ioctl(watchdog.as_fd(), request) };
    if fed.is_err() {
        // Any byte feeds a watchdog except 'V', which lets it stop when it is closed.
        let _ = watchdog.write_all(b"\0");
    }
}

/// Arms the watchdogs again in a restored machine, with the same timeouts. The kernel believes that
/// the hardware is armed, and few drivers set it again by themselves.
pub fn arm_again(sysroot: &Sysroot) {
    for watchdog in held(sysroot) {
        // A watchdog that must never stop (nowayout) refuses this.
        let stopped = set::<SET_OPTIONS>(&watchdog, DISABLE).is_ok();
        if let Some(seconds) = timeout(&watchdog) {
            let _ = set::<SET_TIMEOUT>(&watchdog, seconds);
        }
        if stopped {
            let _ = set::<SET_OPTIONS>(&watchdog, ENABLE);
        }
    }
}

/// Makes a request that reads, and may write, one `int`.
fn set<const REQUEST: Opcode>(watchdog: &File, mut value: i32) -> rustix::io::Result<()> {
    // SAFETY: all requests that this is called with take the address of one `int`, and `value` is
    // one.
    let request = unsafe { Updater::<REQUEST, i32>::new(&mut value) };
    // SAFETY: the request touches no other memory.
    unsafe { ioctl(watchdog.as_fd(), request) }
}

/// Returns the timeout of a watchdog in seconds, as the kernel knows it.
fn timeout(watchdog: &File) -> Option<i32> {
    // SAFETY: the request writes one `int`.
    let request = unsafe { Getter::<GET_TIMEOUT, i32>::new() };
    // SAFETY: the request touches no other memory.
    unsafe { ioctl(watchdog.as_fd(), request) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        sync::Arc,
        sync::atomic::{AtomicU32, Ordering},
    };

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (file, text) in files {
            let path = root.path().join("sys/class/watchdog").join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        root
    }

    #[test]
    fn only_short_ones_that_are_armed_are_refused() {
        let refused = |files: &[(&str, &str)]| refuse(&Sysroot::at(machine(files).path()));
        assert!(refused(&[]).is_ok());
        assert!(refused(&[("watchdog0/state", "inactive\n"), ("watchdog0/timeout", "2\n")]).is_ok());
        assert!(refused(&[("watchdog0/state", "active\n"), ("watchdog0/timeout", "60\n")]).is_ok());
        let short = refused(&[("watchdog0/state", "active\n"), ("watchdog0/timeout", "2\n")]);
        let early = refused(&[
            ("watchdog1/state", "active\n"),
            ("watchdog1/timeout", "30\n"),
            ("watchdog1/pretimeout", "27\n"),
        ]);
        for (refused, name) in [(short, "watchdog0 "), (early, "watchdog1 ")] {
            let error = refused.expect_err("too short");
            assert!(error.code == Some(Code::WatchdogUnfed) && error.message.starts_with(name), "{error}");
        }
    }

    /// The descriptors of this process number cannot be copied.
    #[test]
    fn one_that_cannot_be_fed_is_refused() {
        let root = machine(&[("watchdog0/state", "active\n"), ("watchdog0/timeout", "60\n")]);
        super::super::openers::tests::process(root.path(), 999_999_999, "systemd", &["/dev/watchdog0"]);
        let error = refuse(&Sysroot::at(root.path())).expect_err("it cannot be fed");
        assert!(
            error.message.starts_with("/dev/watchdog0 cannot be fed in place of systemd (999999999)"),
            "{error}"
        );
    }

    #[test]
    fn a_watchdog_is_fed_until_the_feeder_ends() {
        let fed = Arc::new(AtomicU32::new(0));
        let found = Arc::clone(&fed);
        let count = |fed: &mut Arc<AtomicU32>| {
            fed.fetch_add(1, Ordering::Relaxed);
        };
        let feeder = Feeder::of(move || vec![Arc::clone(&found)], count);
        thread::sleep(PERIOD * 3);
        drop(feeder);
        let times = fed.load(Ordering::Relaxed);
        assert!(times >= 2, "{times}");
        thread::sleep(PERIOD * 2);
        assert_eq!(fed.load(Ordering::Relaxed), times);
    }

    /// The copy is the same open file, although another process has it.
    #[test]
    fn a_descriptor_of_another_process_is_copied() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("file");
        let file = File::create(&path).expect("a file");
        let mut child = std::process::Command::new("sleep");
        let mut child = child.arg("60").stdin(file).spawn().expect("a process");
        let copied = copy(child.id(), 0);
        let written = copied.map(File::from).and_then(|mut file| file.write_all(b"x"));
        let _ = child.kill();
        let _ = child.wait();
        match written {
            Ok(()) => assert_eq!(fs::read(&path).expect("read"), b"x"),
            // Tracing other processes is forbidden here.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}"),
        }
    }
}
