//! The state of guests, in a folder for each: `/run/mercury/guests/NAME`, and
//! `$XDG_RUNTIME_DIR/mercury/guests/NAME` for users.
//!
//! ```text
//! lock          locked as long as the guest's monitor lives
//! status.json   the guest's state
//! console.sock  the guest's first serial port, unless that is a terminal
//! serial1.sock  the guest's second serial port
//! orders.sock   orders for a command in the guest, and its answers
//! decision      a pipe for the operator's word about a machine that arrives, or a guest in doubt
//! ```

use std::{
    ffi::OsStr,
    fs,
    fs::{DirBuilder, File},
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{
    Name,
    held::{self, Holder, LOCK, is_locked, lock_within, remove, take_lock},
};

const STATUS: &str = "status.json";
const CONSOLE: &str = "console.sock";
const SECOND_PORT: &str = "serial1.sock";
const ORDERS: &str = "orders.sock";
const DECISION: &str = "decision";
const PAGE: u64 = 4096;
/// Interval at which a word that was said is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest wait for other machines that are about to be admitted. A machine takes a moment, and its source
/// waits half a minute for the answer to its offer.
const ADMISSION: Duration = Duration::from_secs(10);

/// The phase of a guest's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The monitor reads the image.
    Loading,
    /// The machine moves here.
    Arriving,
    /// The machine has arrived whole, and its source has not said yet that it is to start.
    Complete,
    /// The guest's processors run.
    Running,
}

/// The state of a guest, as its monitor tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub name: Name,
    /// The process ID of the monitor.
    pub pid: u32,
    pub phase: Phase,
    /// The image's file. `None`: the machine has moved here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// The image's identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The host name in the image.
    pub machine: String,
    pub kernel: String,
    /// The number of processors.
    pub cpus: u32,
    /// The size of the guest's memory.
    pub memory_bytes: u64,
    /// The start of the monitor, in seconds since 1970.
    pub since: u64,
    /// The unit of systemd that holds the guest. `None`: it has no control group of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// The folder of the unit's control group of version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<PathBuf>,
}

impl Status {
    /// Returns the memory of the host that the guest uses with all that belongs to it. `None` if it has no
    /// control group of its own.
    #[must_use]
    pub fn used_bytes(&self) -> Option<u64> {
        fs::read_to_string(self.group.as_ref()?.join("memory.current")).ok()?.trim().parse().ok()
    }

    /// Returns the memory that the guest has and does not use yet. What its monitor maps of files is not
    /// counted as used, and neither is the page cache of its disks.
    #[must_use]
    pub fn unused_bytes(&self) -> u64 {
        self.memory_bytes.saturating_sub(anonymous_bytes(self.pid).unwrap_or(0))
    }
}

/// Returns the memory of a process that is in no file.
fn anonymous_bytes(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = text.split_whitespace().skip(1).map_while(|pages| pages.parse::<u64>().ok());
    let (resident, of_files) = (pages.next()?, pages.next()?);
    Some(resident.saturating_sub(of_files).saturating_mul(PAGE))
}

/// The folder of all guests of one user.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// Returns the folder for the user of this process.
    #[must_use]
    pub fn own() -> Self {
        Self(held::run_folder().join("guests"))
    }

    /// Returns a folder of a test.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns all guests that run, by name.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn guests(&self) -> io::Result<Vec<Guest>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut guests: Vec<Guest> =
            names.filter_map(|name| self.find(&name).transpose()).collect::<Result<_, _>>()?;
        guests.sort_by(|a, b| a.status.name.cmp(&b.status.name));
        Ok(guests)
    }

    /// Returns the memory that the guests have and do not use yet.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn promised_bytes(&self) -> io::Result<u64> {
        let guests = self.guests()?;
        Ok(guests.iter().map(|guest| guest.status.unused_bytes()).fold(0, u64::saturating_add))
    }

    /// Waits until no other machine is about to be admitted, and lets none be admitted before the value is
    /// dropped. Each then sees the memory of those before.
    ///
    /// # Errors
    /// If the folder cannot be made or locked, or another machine is not admitted in time.
    pub fn admit_one(&self) -> Result<File, NotAdmitted> {
        self.admit_one_within(ADMISSION)
    }

    fn admit_one_within(&self, limit: Duration) -> Result<File, NotAdmitted> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let folder = File::open(&self.0)?;
        if lock_within(&folder, limit)? {
            return Ok(folder);
        }
        Err(NotAdmitted::Busy { limit, holder: Holder::of(&folder) })
    }

    /// Returns the guest of this name, if it runs.
    ///
    /// # Errors
    /// If the guest's folder cannot be read.
    pub fn find(&self, name: &Name) -> io::Result<Option<Guest>> {
        let path = self.0.join(name.as_str());
        if !is_locked(&path)? {
            return Ok(None);
        }
        match fs::read(path.join(STATUS)) {
            Ok(text) => Ok(Some(Guest { status: serde_json::from_slice(&text)?, path })),
            // The monitor is about to write its state, or has just removed its folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes the folder of a new guest. Returns `None` if a guest of this name runs. What a killed monitor
    /// has left is removed.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn claim(&self, name: &Name) -> io::Result<Option<Folder>> {
        let path = self.0.join(name.as_str());
        let Some(lock) = take_lock(&path)? else { return Ok(None) };
        for left in [STATUS, CONSOLE, SECOND_PORT, ORDERS, DECISION] {
            remove(&path.join(left))?;
        }
        Ok(Some(Folder { path, _lock: lock, keeper: None }))
    }
}

/// The reason for which a machine cannot be admitted.
#[derive(Debug)]
pub enum NotAdmitted {
    /// Another process was about to admit a machine for all of this time.
    Busy {
        limit: Duration,
        /// `None`: the kernel does not name the process.
        holder: Option<Holder>,
    },
    /// The folder of guests cannot be made or locked.
    Unreadable(io::Error),
}

impl From<io::Error> for NotAdmitted {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

#[derive(Clone, Debug)]
pub struct Guest {
    pub status: Status,
    path: PathBuf,
}

impl Guest {
    /// Returns the socket of the first serial port.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.path.join(CONSOLE)
    }

    /// Returns the socket for orders to the guest.
    #[must_use]
    pub fn orders(&self) -> PathBuf {
        self.path.join(ORDERS)
    }

    /// Passes the operator's word about a machine that arrives to the monitor.
    ///
    /// # Errors
    /// If no machine arrives.
    pub fn decide(&self, word: &str) -> io::Result<()> {
        // Without a reader the pipe cannot be opened, and nothing waits.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let mut pipe = File::options().write(true).custom_flags(flags).open(self.path.join(DECISION))?;
        pipe.write_all(format!("{word}\n").as_bytes())
    }

    /// Passes the operator's word to a guest that stands still in doubt about its move, and asks for it. If
    /// the guest has not read it within the limit, it does not ask: takes the word back and returns false.
    ///
    /// # Errors
    /// If the monitor has no pipe.
    pub fn answer(&self, word: &str, limit: Duration) -> io::Result<bool> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let mut pipe =
            File::options().read(true).write(true).custom_flags(flags).open(self.path.join(DECISION))?;
        // A word that a killed command leaves here counts for some seconds only.
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now = u64::try_from(now.tv_sec).unwrap_or(0) * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000;
        pipe.write_all(format!("{word} {now}\n").as_bytes())?;
        let end = Instant::now() + limit;
        while rustix::io::ioctl_fionread(&pipe)? > 0 {
            if Instant::now() > end {
                return Ok(pipe.read(&mut [0; 4096]).unwrap_or(0) == 0);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Returns the guest's monitor if a signal or a debugger has stopped it: it answers nothing then.
    #[must_use]
    pub fn stopped_monitor(&self) -> Option<Holder> {
        Holder::of_folder(&self.path).filter(|holder| holder.is_stopped)
    }

    /// Returns true if the guest's monitor lives.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn lives(&self) -> io::Result<bool> {
        is_locked(&self.path)
    }
}

/// The folder of a guest, which this process runs. It goes with this value, or with this process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    _lock: File,
    keeper: Option<Keeper>,
}

impl Folder {
    /// Returns the place for the socket of the first serial port.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.path.join(CONSOLE)
    }

    /// Returns the place for the socket of the second serial port.
    #[must_use]
    pub fn second_port(&self) -> PathBuf {
        self.path.join(SECOND_PORT)
    }

    /// Returns the place for the socket of orders.
    #[must_use]
    pub fn orders(&self) -> PathBuf {
        self.path.join(ORDERS)
    }

    /// Makes the pipe for the operator's word, and returns its path.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn decision(&self) -> io::Result<PathBuf> {
        let path = self.path.join(DECISION);
        remove(&path)?;
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0)?;
        Ok(path)
    }

    /// Writes the guest's state. A reader finds the old state or the new one.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, status: &Status) -> io::Result<()> {
        let new = self.path.join("status.new");
        fs::write(&new, serde_json::to_vec(status)?)?;
        fs::rename(new, self.path.join(STATUS))
    }
}

impl Folder {
    /// Lets the keeper remove the folder. This process may have lost the right to do it by then.
    ///
    /// # Errors
    /// If the keeper has ended.
    pub fn entrust(&mut self, mut keeper: Keeper) -> io::Result<()> {
        keeper.tell(self.path.as_os_str().as_bytes())?;
        self.keeper = Some(keeper);
        Ok(())
    }

    /// Removes the folder now, and returns its keeper for another one.
    pub fn dismiss(mut self) -> Option<Keeper> {
        let mut keeper = self.keeper.take()?;
        keeper.tell(b"").ok()?;
        Some(keeper)
    }

    fn remove(&self) {
        for file in [STATUS, "status.new", CONSOLE, SECOND_PORT, ORDERS, DECISION, LOCK] {
            let _ = remove(&self.path.join(file));
        }
        let _ = fs::remove_dir(&self.path);
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.keeper.is_none() {
            self.remove();
        }
    }
}

/// A process that removes the folder of a guest when this process has ended, however it ends.
#[derive(Debug)]
pub struct Keeper(PipeWriter);

impl Keeper {
    /// Starts the process. Call it before this process has a second thread.
    ///
    /// # Errors
    /// If there can be no process.
    pub fn start() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        // SAFETY: The child calls what a process with one thread may call, and ends without the parent's
        // destructors.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                drop(writer);
                close_others(&reader);
                let _ = keep(reader);
                // SAFETY: It ends the process.
                unsafe { libc::_exit(0) }
            }
            _ => Ok(Self(writer)),
        }
    }

    /// Names the folder to be removed, or none.
    fn tell(&mut self, path: &[u8]) -> io::Result<()> {
        self.0.write_all(&[path, &[0]].concat())
    }
}

/// Closes all descriptors of this process but one: readers of the parent's output wait for the output's end,
/// and the parent's locks are the parent's.
fn close_others(one: &PipeReader) {
    let kept = one.as_raw_fd().cast_unsigned();
    // SAFETY: The child uses none of these descriptors.
    unsafe {
        if let Some(before) = kept.checked_sub(1) {
            libc::close_range(0, before, 0);
        }
        libc::close_range(kept + 1, u32::MAX, 0);
    }
}

/// Waits for the parent's end, and removes the folder that it named last, unless another guest has it.
fn keep(mut from: PipeReader) -> io::Result<()> {
    let mut named = Vec::new();
    from.read_to_end(&mut named)?;
    let last = named.split(|byte| *byte == 0).rev().nth(1).unwrap_or_default();
    let path = Path::new(OsStr::from_bytes(last));
    if last.is_empty() || !path.exists() {
        return Ok(());
    }
    if let Some(lock) = take_lock(path)? {
        Folder { path: path.to_owned(), _lock: lock, keeper: None }.remove();
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::held::tests::alone;

    /// A guest that is not in doubt reads nothing, and must not find the word in a later doubt.
    #[test]
    fn a_word_that_no_guest_reads_is_taken_back() {
        let _alone = alone();
        let (place, name) = (tempfile::tempdir().unwrap(), "db".parse::<Name>().unwrap());
        let root = Root::at(place.path());
        let folder = root.claim(&name).unwrap().unwrap();
        let path = folder.decision().unwrap();
        folder.write(&status(&name)).unwrap();
        let guest = root.find(&name).unwrap().unwrap();
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let mut monitors = File::options().read(true).write(true).custom_flags(flags).open(path).unwrap();
        assert!(!guest.answer("resume", Duration::from_millis(100)).unwrap());
        let mut read = [0; 64];
        assert!(monitors.read(&mut read).is_err(), "nothing is left");
        let reads = thread::spawn(move || {
            while monitors.read(&mut read).is_err() {
                thread::sleep(POLL_INTERVAL);
            }
            read
        });
        assert!(guest.answer("abandon", Duration::from_secs(10)).unwrap());
        let read = String::from_utf8_lossy(&reads.join().unwrap()).into_owned();
        let at = read.strip_prefix("abandon ").unwrap().split('\n').next().unwrap();
        assert!(at.parse::<u64>().is_ok(), "{read}");
    }

    fn status(name: &Name) -> Status {
        Status {
            name: name.clone(),
            pid: 7,
            phase: Phase::Running,
            image: Some("/x".into()),
            identity: None,
            machine: "db".into(),
            kernel: "6.1".into(),
            cpus: 2,
            memory_bytes: 1 << 30,
            since: 1,
            unit: None,
            group: None,
        }
    }

    #[test]
    fn a_guest_is_found_as_long_as_its_folder_is_held() {
        let _alone = alone();
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(&folder.path().join("guests"));
        let name: Name = "db".parse().unwrap();
        assert!(root.guests().unwrap().is_empty());
        let held = root.claim(&name).unwrap().unwrap();
        assert!(root.find(&name).unwrap().is_none(), "it has not told its state");
        held.write(&status(&name)).unwrap();
        assert!(root.claim(&name).unwrap().is_none(), "the name is taken");
        let guests = root.guests().unwrap();
        assert_eq!(guests.len(), 1);
        assert_eq!(guests[0].status, status(&name));
        assert!(guests[0].lives().unwrap());
        drop(held);
        assert!(!guests[0].lives().unwrap());
        assert!(root.guests().unwrap().is_empty());
        assert!(root.claim(&name).unwrap().is_some());
    }

    #[test]
    fn the_memory_of_a_guest_is_that_of_its_group() {
        let _alone = alone();
        let group = tempfile::tempdir().unwrap();
        let mut status = status(&"db".parse().unwrap());
        assert_eq!(status.used_bytes(), None);
        status.group = Some(group.path().to_owned());
        assert_eq!(status.used_bytes(), None, "the group is gone");
        fs::write(group.path().join("memory.current"), "4096\n").unwrap();
        assert_eq!(status.used_bytes(), Some(4096));
    }

    #[test]
    fn memory_that_guests_do_not_use_yet_is_promised() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(&place.path().join("guests"));
        assert_eq!(root.promised_bytes().unwrap(), 0);
        let mut folders = Vec::new();
        for name in ["a", "b"] {
            let name = name.parse().unwrap();
            let folder = root.claim(&name).unwrap().unwrap();
            let own = Status { pid: std::process::id(), memory_bytes: 1 << 40, ..status(&name) };
            folder.write(&own).unwrap();
            folders.push(folder);
        }
        let promised = root.promised_bytes().unwrap();
        assert!(promised < 2 << 40 && promised > 2 << 39, "{promised}");
        // More is used than the guest has.
        let small = Status { pid: std::process::id(), memory_bytes: 1, ..status(&"a".parse().unwrap()) };
        assert_eq!(small.unused_bytes(), 0);
    }

    #[test]
    fn machines_are_admitted_one_after_the_other() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(&place.path().join("guests"));
        let first = root.admit_one().unwrap();
        let moment = Duration::from_millis(50);
        let Err(NotAdmitted::Busy { limit, holder }) = root.admit_one_within(moment) else {
            panic!("two are admitted at once");
        };
        assert_eq!(limit, moment);
        assert!(holder.is_none_or(|holder| holder.pid == std::process::id()));
        drop(first);
        root.admit_one_within(moment).unwrap();
    }

    #[test]
    fn a_process_that_is_stopped_while_it_admits_holds_others_up_for_a_limited_time() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(&place.path().join("guests"));
        let folder = root.admit_one().unwrap();
        // The child has the lock as well, and keeps it when this process lets go.
        // SAFETY: The child stops itself, and ends without destructors.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: It stops and ends the process.
            unsafe {
                libc::raise(libc::SIGSTOP);
                libc::_exit(0)
            }
        }
        // SAFETY: The process is a child, and no status is wanted.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::WUNTRACED) };
        drop(folder);
        let refused = root.admit_one_within(Duration::from_millis(50)).unwrap_err();
        assert!(matches!(refused, NotAdmitted::Busy { .. }), "{refused:?}");
        // SAFETY: The process is a child that was not waited for to its end.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        root.admit_one_within(Duration::ZERO).unwrap();
    }

    /// Two arrivals at once: the second waits for the first, and sees the memory that it has promised.
    #[test]
    fn of_two_arrivals_at_once_the_second_sees_the_memory_of_the_first() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(&place.path().join("guests"));
        let arrive = |name: &str| {
            let admitting = root.admit_one().unwrap();
            let promised = root.promised_bytes().unwrap();
            // Without the lock both would see nothing.
            thread::sleep(Duration::from_millis(100));
            let name = name.parse().unwrap();
            let folder = root.claim(&name).unwrap().unwrap();
            let own = Status { pid: std::process::id(), memory_bytes: 1 << 40, ..status(&name) };
            folder.write(&Status { phase: Phase::Arriving, ..own }).unwrap();
            drop(admitting);
            (promised, folder)
        };
        let (first, second) = thread::scope(|scope| {
            let both = ["a", "b"].map(|name| scope.spawn(move || arrive(name)));
            let [first, second] = both.map(|one| one.join().unwrap());
            (first, second)
        });
        let mut seen = [first.0, second.0];
        seen.sort_unstable();
        assert_eq!(seen[0], 0);
        assert!(seen[1] > 1 << 39, "{seen:?}");
        // One that was refused or discarded takes nothing from those that follow.
        drop((first.1, second.1));
        assert_eq!(root.promised_bytes().unwrap(), 0);
    }

    #[test]
    fn a_folder_that_is_dismissed_goes_at_once() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(place.path());
        let name: Name = "db".parse().unwrap();
        let mut first = root.claim(&name).unwrap().unwrap();
        first.entrust(Keeper::start().unwrap()).unwrap();
        let keeper = first.dismiss().unwrap();
        assert!(!place.path().join("db").exists());
        let mut again = root.claim(&name).unwrap().unwrap();
        again.entrust(keeper).unwrap();
        drop(again);
        assert!(comes(|| !place.path().join("db").exists()), "the folder is left");
    }

    #[test]
    fn the_operator_s_word_reaches_the_monitor() {
        let _alone = alone();
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let name: Name = "db".parse().unwrap();
        let held = root.claim(&name).unwrap().unwrap();
        held.write(&status(&name)).unwrap();
        let guest = root.find(&name).unwrap().unwrap();
        assert!(guest.decide("adopt").is_err(), "no machine arrives");
        let path = held.decision().unwrap();
        assert!(guest.decide("adopt").is_err(), "the monitor does not wait");
        let mut monitors = File::options().read(true).write(true).open(path).unwrap();
        guest.decide("adopt").unwrap();
        let mut word = [0; 6];
        monitors.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"adopt\n");
    }

    #[test]
    fn what_a_killed_monitor_has_left_is_no_guest() {
        let _alone = alone();
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let name: Name = "db".parse().unwrap();
        let left = folder.path().join("db");
        fs::create_dir(&left).unwrap();
        for file in [LOCK, CONSOLE] {
            fs::write(left.join(file), "").unwrap();
        }
        fs::write(left.join(STATUS), serde_json::to_vec(&status(&name)).unwrap()).unwrap();
        assert!(root.guests().unwrap().is_empty());
        let _held = root.claim(&name).unwrap().unwrap();
        assert!(!left.join(CONSOLE).exists() && !left.join(STATUS).exists());
    }

    /// Waits until a condition holds.
    fn comes(condition: impl Fn() -> bool) -> bool {
        (0..2000).any(|_| {
            condition() || {
                thread::sleep(Duration::from_millis(10));
                false
            }
        })
    }

    #[test]
    fn the_folder_of_a_process_that_is_killed_goes_with_it() {
        let _alone = alone();
        let place = tempfile::tempdir().unwrap();
        let name: Name = "killed".parse().unwrap();
        let root = Root::at(place.path());
        // SAFETY: The child makes files and processes only, and is killed or exits without destructors.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let mut folder = root.claim(&name).unwrap().unwrap();
            folder.entrust(Keeper::start().unwrap()).unwrap();
            fs::write(folder.console(), "a socket").unwrap();
            thread::sleep(Duration::from_secs(60));
            // SAFETY: It ends the process.
            unsafe { libc::_exit(0) };
        }
        let path = place.path().join("killed");
        assert!(comes(|| path.join(CONSOLE).exists()));
        assert!(is_locked(&path).unwrap() && root.claim(&name).unwrap().is_none());
        let guest = Guest { status: status(&name), path: path.clone() };
        assert_eq!(guest.stopped_monitor(), None);
        // SAFETY: The process is a child that was not waited for.
        unsafe { libc::kill(child, libc::SIGSTOP) };
        // File systems of several layers have other numbers.
        let is_named = |holder: Holder| holder.pid == child.cast_unsigned();
        let is_seen = || guest.stopped_monitor().is_some_and(is_named);
        assert!(Holder::of_folder(&path).is_none() || comes(is_seen));
        // SAFETY: The process is a child that was not waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        assert!(comes(|| !path.exists()), "the folder is left");
        // SAFETY: No status is wanted.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    }
}
