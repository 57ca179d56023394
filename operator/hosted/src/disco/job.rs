//! Processes beside a template that write and read machines, and their ends.
//!
//! A process that waits for a disk cannot be killed until the disk answers, and a call that waits for its end
//! waits as long. So each has a limit, and the template waits for none: what has not ended at once is left,
//! and collected when it has.

use std::{
    fs::{self, File},
    io::{Read, Seek, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_guests::Name;
use mercury_hosted::{
    asleep::{Room, start_helper},
    memory::new_file,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid},
};

use super::{
    asleep::{Asleep, part_of},
    folder::Folder,
    server::failed,
};
use crate::refused;

/// The time for which a process that writes or reads a machine counts as one that makes room.
const MAKES_ROOM: Duration = Duration::from_secs(60);
/// A process that writes or reads a machine has this time, and more for each byte of the machine's memory: a
/// disk that is slower than so many bytes a second does not answer.
const AT_LEAST: Duration = Duration::from_secs(60);
const SLOWEST: u64 = 2 << 20;
/// The time between a signal that ends a process and its end, unless it waits for a disk.
const DYING: Duration = Duration::from_millis(500);
/// The time after which a process that should have ended waits for a disk.
const WAITS: Duration = Duration::from_secs(2);

/// The work of another process.
pub struct Job {
    helper: Helper,
    /// Where the process says why it has failed.
    note: File,
    pub what: Work,
    begun: Instant,
    most: Duration,
}

pub enum Work {
    /// Write a machine that stands still, with this first process.
    Sleep(Asleep, File, Pid),
    /// Read a machine. Its folder is locked.
    Wake(Asleep, Room, File),
}

impl Job {
    /// Watches a process that writes or reads a machine with memory of this size.
    pub fn watch(pid: i32, note: File, what: Work, memory_bytes: u64) -> Result<Self> {
        let most = AT_LEAST + Duration::from_secs(memory_bytes / SLOWEST);
        Ok(Self { helper: Helper::watch(pid)?, note, what, begun: Instant::now(), most })
    }

    pub fn is_of(&self, name: &Name) -> bool {
        let (Work::Sleep(asleep, ..) | Work::Wake(asleep, ..)) = &self.what;
        asleep.name == *name
    }

    /// Returns the descriptor that is readable when the process has ended.
    pub fn end(&self) -> BorrowedFd<'_> {
        self.helper.end.as_fd()
    }

    /// Returns true if the process still counts as one that makes room.
    pub fn makes_room(&self) -> bool {
        self.begun.elapsed() < MAKES_ROOM
    }

    /// Returns true if the disk does not answer.
    pub fn is_overdue(&self) -> bool {
        self.begun.elapsed() > self.most
    }

    /// Gives the process as much time again.
    pub fn extend(&mut self) {
        self.begun = Instant::now();
    }

    /// Returns what the process has done, after its end.
    pub fn finish(self) -> (Work, Result<()>) {
        let status = waitpid(Some(self.helper.pid), WaitOptions::empty()).ok().flatten();
        let done = match status.and_then(|(_, status)| status.exit_status()) {
            Some(0) => Ok(()),
            _ => Err(why(self.note)),
        };
        (self.what, done)
    }

    pub fn into_parts(self) -> (Helper, Work) {
        (self.helper, self.what)
    }
}

/// A process beside the template.
pub struct Helper {
    pid: Pid,
    end: OwnedFd,
}

impl Helper {
    fn watch(pid: i32) -> Result<Self> {
        let pid = Pid::from_raw(pid).ok_or_else(|| failed("start a process", "it has no number"))?;
        let end = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
            failed("watch a process", error)
        })?;
        Ok(Self { pid, end })
    }

    /// Ends the process. Returns it if it has not ended in a moment.
    fn kill(self) -> Option<Self> {
        let _ = kill_process(self.pid, Signal::KILL);
        if is_ready_within(&self.end, DYING) {
            let _ = waitpid(Some(self.pid), WaitOptions::empty());
            return None;
        }
        Some(self)
    }
}

/// Processes that are to end.
#[derive(Default)]
pub struct Abandoned(Vec<Left>);

struct Left {
    helper: Helper,
    /// The machine whose file the process leaves behind, or removes.
    file: Option<Asleep>,
    since: Instant,
}

impl Abandoned {
    /// Ends a process, and has another one remove the file that it was writing: the disk may not answer.
    pub fn take(&mut self, helper: Helper, file: Option<Asleep>) {
        let helper = match (helper.kill(), &file) {
            (None, Some(asleep)) => remover(asleep).ok(),
            (left, _) => left,
        };
        // What no process removes is still announced in the machine's folder.
        self.0.extend(helper.map(|helper| Left { helper, file, since: Instant::now() }));
    }

    /// Forgets those that have ended.
    pub fn collect(&mut self, machines: &Folder) {
        self.0.retain(|left| {
            let has_ended = is_ready_within(&left.helper.end, Duration::ZERO);
            if has_ended {
                let _ = waitpid(Some(left.helper.pid), WaitOptions::empty());
                // The disk answers.
                left.file.iter().for_each(|asleep| machines.remove_attempt(asleep));
            }
            !has_ended
        });
    }

    /// Waits for a moment until all have ended.
    pub fn await_all(&mut self, machines: &Folder) {
        let begun = Instant::now();
        while !self.0.is_empty() && begun.elapsed() < DYING {
            let ended = |left: &Left| is_ready_within(&left.helper.end, Duration::from_millis(10));
            let _ = self.0.first().is_some_and(ended);
            self.collect(machines);
        }
    }

    /// Returns true if one waits for a disk.
    pub fn wait_for_disk(&self) -> bool {
        self.0.iter().any(|left| left.since.elapsed() > WAITS)
    }
}

/// Starts a process that removes the file of a machine, and the part of it.
fn remover(asleep: &Asleep) -> Result<Helper> {
    let remove = || {
        for path in [&asleep.file, &part_of(&asleep.file)] {
            let _ = fs::remove_file(path);
        }
        Ok(())
    };
    let pid = start_helper(std::iter::empty(), remove, |_| 1).map_err(refused)?;
    Helper::watch(pid)
}

/// Returns true if a pipe has input in time, or if the process of a descriptor has ended then.
pub fn is_ready_within(end: &impl AsFd, time: Duration) -> bool {
    let time = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
    poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&time)).is_ok_and(|count| count > 0)
}

/// Makes a file in which another process says why it has failed.
pub fn make_note() -> Result<File> {
    new_file(c"mercury-note", 0, 0).map(File::from).map_err(refused)
}

pub fn say_why(mut note: &File, error: mercury_hosted::error::Error) -> i32 {
    let _ = note.write_all(refused(error).message.as_bytes());
    1
}

fn why(mut note: File) -> Error {
    let mut text = String::new();
    let read = note.rewind().and_then(|()| note.read_to_string(&mut text));
    if read.is_err() || text.is_empty() {
        "the process that was to do it has ended".clone_into(&mut text);
    }
    Error::new(Exit::Failed, text)
        .hint("see that the folder of --sleep-in has room, and that the host has memory")
}

/// The reason for which nothing is written or read.
pub fn silent_disk() -> Error {
    Error::new(Exit::Failed, "the disk with the folder of --sleep-in does not answer")
        .hint("look at the disk (`dmesg`); machines can sleep and wake again when it answers")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        path::Path,
        process::{Child, Command},
    };

    use super::*;

    fn sleep() -> Child {
        Command::new("sleep").arg("60").spawn().unwrap()
    }

    fn asleep(folder: &Path) -> Asleep {
        Asleep {
            number: 1,
            name: "web-1".parse().unwrap(),
            template: "web".parse().unwrap(),
            file: folder.join("web-1-07.asleep"),
            life: [7; 16],
            forward: Vec::new(),
            own_bytes: 5,
            balloon_pages: 0,
            at_work: false,
            since: 0,
        }
    }

    /// A machine that is killed while its file becomes known has ended, and its file stays.
    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut child = sleep();
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        assert!(!is_ready_within(&end, Duration::ZERO));
        child.kill().unwrap();
        assert!(is_ready_within(&end, Duration::from_secs(10)));
        child.wait().unwrap();
    }

    /// A disk that does not answer holds nothing up for ever, and one that is slow may be slow.
    #[test]
    fn a_job_has_a_limit_that_grows_with_the_machine() {
        let mut child = sleep();
        let work = Work::Sleep(asleep(Path::new("/")), make_note().unwrap(), Pid::from_child(&child));
        let mut job = Job::watch(child.id().cast_signed(), make_note().unwrap(), work, 256 << 20).unwrap();
        assert!(!job.is_overdue() && job.makes_room());
        assert_eq!(job.most, Duration::from_secs(60 + 128));
        job.begun = Instant::now().checked_sub(Duration::from_secs(187)).unwrap();
        assert!(!job.is_overdue() && !job.makes_room());
        job.begun = Instant::now().checked_sub(Duration::from_secs(189)).unwrap();
        assert!(job.is_overdue());
        job.extend();
        assert!(!job.is_overdue());
        assert!(job.into_parts().0.kill().is_none(), "an ordinary process ends at once");
        assert!(child.wait().is_err(), "it was waited for");
    }

    /// Here another process's end stands for that of one that waits for a disk.
    #[test]
    fn a_process_that_cannot_be_killed_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let one = asleep(directory.path());
        let _lock = folder.claim(&one.name).unwrap().unwrap();
        folder.announce_file(&one).unwrap();
        let (mut killed, mut other) = (sleep(), sleep());
        let end = pidfd_open(Pid::from_child(&other), PidfdFlags::empty()).unwrap();
        let helper = Helper { pid: Pid::from_child(&killed), end };
        let (mut abandoned, begun) = (Abandoned::default(), Instant::now());
        abandoned.take(helper, Some(one.clone()));
        assert!(begun.elapsed() < Duration::from_secs(5));
        abandoned.collect(&folder);
        assert!(!abandoned.wait_for_disk(), "it may end at any moment");
        abandoned.0[0].since = begun.checked_sub(WAITS).unwrap();
        assert!(abandoned.wait_for_disk());
        // The disk answers, and the process has just given the file its name.
        fs::write(&one.file, "machine").unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        abandoned.collect(&folder);
        assert!(!abandoned.wait_for_disk() && abandoned.0.is_empty());
        assert!(!one.file.exists(), "the file of a machine that goes on");
        assert!(killed.wait().is_err(), "it was waited for");
    }
}
