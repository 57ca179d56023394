//! The kernel functions that tasks wait in, and the processes that they wait for there: a server of
//! FUSE answers tasks that use its file system, a handler of userfaultfd gives pages to tasks that
//! touch its memory.

use super::{mounts::unescaped, patient};
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Functions that a frozen, stopped or traced task waits in. Kernels that have the first of them
/// inlined show `get_signal`.
const AT_REST: [&str; 5] = ["do_freezer_trap", "get_signal", "do_signal_stop", "ptrace_stop", "do_exit"];
/// Flag of kernel threads in /proc/PID/stat.
const PF_KTHREAD: u64 = 0x0020_0000;
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";
/// Tasks that are named at most.
const TASKS_MAX: usize = 3;

/// A task that does not come to rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    name: String,
    number: u32,
    /// State as in /proc/PID/stat, such as `D`.
    state: char,
    /// Function of the kernel that it waits in; empty if it runs.
    function: String,
}

/// The reason why a task waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    Fuse,
    Userfaultfd,
    Nfs,
    Disk,
    Nothing,
    Other,
}

impl Task {
    fn waits_for(&self) -> For {
        let begins = |words: &[&str]| words.iter().any(|word| self.function.starts_with(word));
        match &*self.function {
            "" | "0" => For::Nothing,
            "handle_userfault" => For::Userfaultfd,
            "request_wait_answer" => For::Fuse,
            _ if begins(&["fuse_", "__fuse"]) => For::Fuse,
            _ if begins(&["rpc_", "nfs", "nfs4_"]) => For::Nfs,
            _ if begins(&[
                "io_schedule",
                "bit_wait_io",
                "folio_wait",
                "wait_on_page",
                "blk_",
                "__blkdev_",
                "blkdev_",
                "bio_",
                "submit_bio",
                "iomap_dio_",
                "__iomap_dio_",
                "__wait_on_buffer",
                "__lock_buffer",
                "dm_",
                "md_",
                "jbd2_",
                "xfs_",
                "rq_qos",
            ]) =>
            {
                For::Disk
            }
            _ => For::Other,
        }
    }

    /// Returns the remedy that brings the task to rest.
    #[must_use]
    pub fn remedy(&self) -> Option<&'static str> {
        match self.waits_for() {
            For::Fuse => Some(
                "they run on; the FUSE server does not answer: find out what it waits for, end the \
                 programs that use its file system, or unmount it (fusermount -u)",
            ),
            For::Userfaultfd => Some(
                "they run on; try again when the handler has given the page, \
                 or end the process (a virtual machine in the midst of a migration, a restore by CRIU)",
            ),
            For::Nfs => Some(Silent::REMEDY),
            For::Disk => Some(
                "they run on; try again when the disk is less busy, and look at the kernel log for its \
                 errors",
            ),
            For::Nothing | For::Other => None,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, number, state, function } = self;
        let what = match self.waits_for() {
            For::Fuse => "waits for the answer of a FUSE server",
            For::Userfaultfd => "waits for a page of a userfaultfd",
            For::Nfs => "waits for an NFS server",
            For::Disk => "waits for a disk",
            For::Nothing => return write!(f, "{name} ({number}), state {state}, which runs in the kernel"),
            For::Other => "waits",
        };
        write!(f, "{name} ({number}), state {state}, which {what} ({function})")
    }
}

/// Time for a file system's server to tell its free space.
const SERVER_PATIENCE: Duration = Duration::from_secs(3);
/// File systems that are on another machine.
const ON_SERVERS: [&str; 6] = ["nfs", "nfs4", "cifs", "smb3", "ceph", "9p"];

/// A file system on another machine, which does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silent {
    at: PathBuf,
    source: String,
}

impl Silent {
    /// The remedy that lets its users go on.
    pub const REMEDY: &str =
        "they run on; make the server answer again, or unmount its file systems (umount -f)";
}

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.at.display(), self.source)
    }
}

/// Asks the servers of all mounted file systems at the same time. Returns those that do not answer.
#[must_use]
pub fn silent_servers() -> Vec<Silent> {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    silent(&table, |at| patient::ask_server(at, SERVER_PATIENCE))
}

fn silent(table: &str, ask: impl Fn(&Path) -> io::Result<()> + Sync) -> Vec<Silent> {
    let mounts = table.lines().filter_map(|line| {
        let fields: Vec<_> = line.split(' ').collect();
        let is_on_server = fields.get(2).is_some_and(|kind| ON_SERVERS.contains(kind));
        is_on_server.then(|| Silent { at: unescaped(fields[1]).into(), source: unescaped(fields[0]) })
    });
    let is_silent = |one: &Silent| ask(&one.at).is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
    thread::scope(|scope| {
        let asked = mounts.map(|one| scope.spawn(|| is_silent(&one).then_some(one)));
        let asked: Vec<_> = asked.collect();
        asked.into_iter().filter_map(|one| one.join().ok().flatten()).collect()
    })
}

/// Returns the first few tasks in a group, and in those below it, that are not at rest.
#[must_use]
pub fn restless(group: &Path) -> Vec<Task> {
    let mut found = Vec::new();
    let mut groups = vec![group.to_owned()];
    while let Some(group) = groups.pop() {
        let processes = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        for process in processes.lines() {
            let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
            found.extend(threads.filter_map(|thread| task(&thread.path())));
        }
        let below = fs::read_dir(&group).into_iter().flatten().flatten().map(|entry| entry.path());
        groups.extend(below.filter(|path| path.is_dir()));
    }
    found.truncate(TASKS_MAX);
    found
}

/// Returns the first few programs' tasks that wait in the kernel without hearing signals, or threads of the
/// kernel if there are none. The task that a freeze has waited for in vain may be one of them.
#[must_use]
pub fn uninterruptible() -> Vec<Task> {
    uninterruptible_in(Path::new("/proc"))
}

fn uninterruptible_in(proc: &Path) -> Vec<Task> {
    let folders = |at: &Path| fs::read_dir(at).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_number = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit())
    };
    let threads = folders(proc).filter(is_number).flat_map(|process| folders(&process.join("task")));
    let mut found: Vec<_> = threads
        .filter_map(|thread| {
            let task = task(&thread).filter(|task| task.state == 'D')?;
            let flags = fields(&thread)?.get(6)?.parse::<u64>().ok()?;
            Some((flags & PF_KTHREAD != 0, task))
        })
        .collect();
    // The kernel's threads wait for disks all the time.
    let has_programs = found.iter().any(|(is_kernels, _)| !is_kernels);
    found.retain(|(is_kernels, _)| !is_kernels || !has_programs);
    found.truncate(TASKS_MAX);
    found.into_iter().map(|(_, task)| task).collect()
}

/// Returns the first fields of a task's stat, from its state on.
fn fields(folder: &Path) -> Option<Vec<String>> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    // The name, in parentheses, may contain any character.
    Some(stat.rsplit_once(')')?.1.split_whitespace().take(7).map(str::to_owned).collect())
}

/// Watches tasks that wait in the kernel for something that a freeze would wait for too, while
/// everything runs. Returns those that have waited for all of `patience`, without the processes in
/// `but`. Takes no time if there are none.
#[must_use]
pub fn stuck(but: &[u32], patience: Duration) -> Vec<Task> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    let folders = numbers.filter(|number| !but.contains(number)).map(|number| format!("/proc/{number}/task"));
    let threads = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let mut watched: Vec<_> = threads.filter_map(|thread| Waiting::found(thread.path())).collect();
    let end = Instant::now() + patience;
    while !watched.is_empty() && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
        watched.retain(Waiting::goes_on);
    }
    watched.truncate(TASKS_MAX);
    watched.into_iter().map(|waiting| waiting.task).collect()
}

/// A task that waits for something, other than a signal can end.
#[derive(Debug, PartialEq, Eq)]
struct Waiting {
    folder: PathBuf,
    task: Task,
    /// Numbers of the task's context switches: it has not run while they are the same.
    switches: String,
}

impl Waiting {
    fn found(folder: PathBuf) -> Option<Self> {
        let rest = fields(&folder)?;
        let is_kernels = rest.get(6)?.parse::<u64>().ok()? & PF_KTHREAD != 0;
        // Most tasks are left out here, after one small read.
        if is_kernels || !matches!(&*rest[0], "D" | "S") {
            return None;
        }
        let task = task(&folder)?;
        let is_stuck = match (task.waits_for(), task.state) {
            (For::Fuse | For::Nfs | For::Disk | For::Userfaultfd, 'D') => true,
            // A task that has touched the page in user mode can be frozen there.
            (For::Userfaultfd, 'S') => {
                let call = fs::read_to_string(folder.join("syscall")).unwrap_or_default();
                call.starts_with(|first: char| first.is_ascii_digit())
            }
            _ => false,
        };
        let status = fs::read_to_string(folder.join("status")).ok()?;
        let switches = status.lines().filter(|line| line.contains("ctxt_switches")).collect();
        is_stuck.then_some(Self { folder, task, switches })
    }

    fn goes_on(&self) -> bool {
        Self::found(self.folder.clone()).as_ref() == Some(self)
    }
}

/// Reads a task that is not at rest, from its folder in /proc.
fn task(folder: &Path) -> Option<Task> {
    let text = |file: &str| Some(fs::read_to_string(folder.join(file)).ok()?.trim().to_owned());
    let mut function = text("wchan")?;
    let stat = text("stat")?;
    // The name, in parentheses, may contain any character.
    let state = stat.rsplit_once(')')?.1.trim_start().chars().next()?;
    if AT_REST.contains(&&*function) || matches!(state, 'T' | 't' | 'X' | 'Z') {
        return None;
    }
    // A task that is to be frozen does not wait for its page: it touches the page again and again,
    // and is found running.
    let runs = state == 'R' && matches!(&*function, "" | "0");
    if runs && files_of(folder).any(|file| file == Path::new(USERFAULTFD)) {
        function = "handle_userfault".into();
    }
    let number = folder.file_name()?.to_str()?.parse().ok()?;
    Some(Task { name: text("comm")?, number, state, function })
}

/// Returns the processes that others may wait for in the kernel.
#[must_use]
pub fn servers() -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    numbers.filter(|number: &u32| *number != std::process::id() && serves(*number)).collect()
}

fn serves(process: u32) -> bool {
    files_of(&Path::new("/proc").join(process.to_string())).any(|file| is_served_by(&file))
}

/// Returns the open files of a process or task, from its folder in /proc.
fn files_of(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let descriptors = fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
    descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok())
}

fn is_served_by(file: &Path) -> bool {
    let text = file.to_string_lossy();
    matches!(&*text, "/dev/fuse" | "/dev/cuse" | USERFAULTFD) || text.starts_with("/dev/ublkc")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn waiting(function: &str) -> Task {
        Task { name: "dd".into(), number: 7, state: 'D', function: function.into() }
    }

    #[test]
    fn tasks_say_what_they_wait_for() {
        let said = |function| waiting(function).to_string();
        assert_eq!(
            said("request_wait_answer"),
            "dd (7), state D, which waits for the answer of a FUSE server (request_wait_answer)"
        );
        assert!(said("handle_userfault").contains("waits for a page of a userfaultfd"));
        assert!(said("rpc_wait_bit_killable").contains("an NFS server"));
        for function in ["folio_wait_bit_common", "__blkdev_direct_IO_simple", "__wait_on_buffer"] {
            assert!(said(function).contains("waits for a disk"), "{function}");
        }
        assert_eq!(said("0"), "dd (7), state D, which runs in the kernel");
        assert!(said("pipe_read").ends_with("which waits (pipe_read)"));
        assert!(waiting("request_wait_answer").remedy().is_some() && waiting("pipe_read").remedy().is_none());
    }

    #[test]
    fn file_systems_of_silent_servers_are_named() {
        let table = "/dev/sda1 / ext4 rw 0 0\n10.9.0.1:/ /mnt nfs4 rw 0 0\n\
            //files/all /with\\040space cifs rw 0 0\n10.9.0.2:/ /other nfs rw 0 0\n";
        let asked = std::sync::Mutex::new(Vec::new());
        let found = silent(table, |at| {
            asked.lock().expect("a list").push(at.to_owned());
            match at.to_str() {
                Some("/other") => Ok(()),
                // An error is an answer.
                Some("/with space") => Err(io::ErrorKind::PermissionDenied.into()),
                _ => Err(io::ErrorKind::TimedOut.into()),
            }
        });
        assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), ["/mnt (10.9.0.1:/)"]);
        let mut asked = asked.into_inner().expect("a list");
        asked.sort();
        assert_eq!(asked, ["/mnt", "/other", "/with space"].map(PathBuf::from));
        assert!(patient::ask_server(Path::new("/proc"), SERVER_PATIENCE).is_ok());
        let error = patient::ask_server(Path::new("/no/such/place"), SERVER_PATIENCE).expect_err("none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn tasks_at_rest_are_left_out() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("77");
        fs::create_dir(&folder).expect("a folder");
        let task_with = |wchan: &str, stat: &str| {
            for (file, text) in [("wchan", wchan), ("stat", stat), ("comm", "a) b\n")] {
                fs::write(folder.join(file), text).expect("a file");
            }
            task(&folder)
        };
        let found = task_with("pipe_read", "77 (a) b) S 1 77").expect("a task");
        assert_eq!((found.name.as_str(), found.number, found.state), ("a) b", 77, 'S'));
        assert_eq!(task_with("do_freezer_trap", "77 (a) b) S 1 77"), None);
        assert_eq!(task_with("get_signal", "77 (a) b) S 1 77"), None);
        assert_eq!(task_with("0", "77 (a) b) Z 1 77"), None);
        assert_eq!(task_with("0", "77 (a) b) R 1 77").expect("a task").waits_for(), For::Nothing);
        fs::create_dir(folder.join("fd")).expect("a folder");
        std::os::unix::fs::symlink(USERFAULTFD, folder.join("fd/3")).expect("a link");
        assert_eq!(task_with("0", "77 (a) b) R 1 77").expect("a task").waits_for(), For::Userfaultfd);
    }

    #[test]
    fn tasks_that_wait_are_known_before_a_freeze() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("77");
        fs::create_dir(&folder).expect("a folder");
        let put = |file: &str, text: &str| fs::write(folder.join(file), text).expect("a file");
        let task_with = |wchan: &str, state: char, flags: u64, call: &str| {
            put("wchan", wchan);
            put("stat", &format!("77 (a) b) {state} 1 77 77 0 -1 {flags} 0"));
            put("comm", "a) b\n");
            put("syscall", call);
            put("status", "Name:\ta\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t0\n");
            Waiting::found(folder.clone())
        };
        let reads = "19 0x3 0x7f 0x1\n";
        assert!(
            task_with("pipe_read", 'S', 0, reads).is_none()
                && task_with("wait_for_vfork", 'D', 0, reads).is_none()
        );
        assert!(task_with("handle_userfault", 'S', 0, "-1 0x7f 0x55\n").is_none(), "it waits in user mode");
        assert!(task_with("folio_wait_bit_common", 'D', PF_KTHREAD, reads).is_none());
        for (wchan, state) in [("handle_userfault", 'S'), ("request_wait_answer", 'D'), ("rpc_wait_bit", 'D')]
        {
            let waiting = task_with(wchan, state, 0, reads).expect("it waits");
            assert!(waiting.goes_on(), "{wchan}");
            put("status", "voluntary_ctxt_switches:\t6\n");
            assert!(!waiting.goes_on(), "it has run");
        }
        assert_eq!(stuck(&[], Duration::ZERO).iter().filter(|task| task.name == "a) b").count(), 0);
    }

    #[test]
    fn tasks_that_kept_the_kernel_s_freezer_waiting_are_named() {
        let root = tempfile::tempdir().expect("a folder");
        let add = |number: u32, state: char, flags: u64, wchan: &str| {
            let folder = root.path().join(format!("{number}/task/{number}"));
            fs::create_dir_all(&folder).expect("a folder");
            let stat = format!("{number} (a) b) {state} 1 77 77 0 -1 {flags} 0");
            for (file, text) in [("stat", &*stat), ("comm", "a) b\n"), ("wchan", wchan)] {
                fs::write(folder.join(file), text).expect("a file");
            }
        };
        add(5, 'D', PF_KTHREAD, "worker_thread");
        add(6, 'S', 0, "pipe_read");
        assert_eq!(uninterruptible_in(root.path()).len(), 1, "only one hears no signals");
        add(77, 'D', 0, "blk_io_schedule");
        let named: Vec<_> = uninterruptible_in(root.path()).iter().map(ToString::to_string).collect();
        assert_eq!(
            named,
            ["a) b (77), state D, which waits for a disk (blk_io_schedule)"],
            "a thread of the kernel is left out"
        );
    }

    #[test]
    fn servers_are_known_by_what_they_hold() {
        for (file, expected) in [
            ("/dev/fuse", true),
            ("anon_inode:[userfaultfd]", true),
            ("/dev/ublkc3", true),
            ("anon_inode:[eventfd]", false),
            ("/dev/null", false),
        ] {
            assert_eq!(is_served_by(Path::new(file)), expected, "{file}");
        }
        assert!(!servers().contains(&std::process::id()));
    }
}
