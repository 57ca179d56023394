//! Regions: memory that several machines of a user have in common, to which all of them may write.
//!
//! A region is a file in memory. A process, its *keeper*, gives the file to each machine that names the
//! region, and ends when the last of them has ended. A machine holds its connection to the keeper for its
//! life. The file's size is sealed, so no machine can cut it off under the others. The first machine of a
//! name starts the keeper.
//!
//! ```text
//! NAME.socket   the keeper's socket
//! NAME.start    locked by a machine that comes, and by a keeper that ends
//! ```
//!
//! The files are in `/run/mercury/regions`, and in `$XDG_RUNTIME_DIR/mercury/regions` for users other than
//! root. Only the user may open the folder.

use std::{
    ffi::CStr,
    fs::{File, OpenOptions},
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::OpenOptionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use mercury_hosted_options::region::RegionOption;
use mercury_subnet::place;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FlockOperation, SealFlags, fcntl_add_seals, flock},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};

use crate::{
    error::{Error, Result},
    memory,
};

/// The command of this program that keeps a region.
const KEEP: &str = "keep-region";
/// The name of the file, for `/proc`.
const FILE: &CStr = c"mercury-region";
/// The time that a keeper has for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time in which a machine has taken its region, and started the keeper if there is none.
const LOCK_PATIENCE: Duration = Duration::from_secs(30);
/// The time after which a keeper without machines tries again to end.
const MOMENT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A region that a machine has.
#[derive(Debug)]
pub struct Region {
    pub file: File,
    /// The connection to the keeper, which is held for the machine's life.
    pub connection: OwnedFd,
}

impl Region {
    /// Has the same region once more.
    ///
    /// # Errors
    /// The error of the host.
    pub fn again(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, connection: self.connection.try_clone()? })
    }
}

/// The folder of a user's regions.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    /// The time in which another machine has taken its region.
    patience: Duration,
}

impl Folder {
    /// Returns the folder of this process's user.
    #[must_use]
    pub fn own() -> Self {
        Self::at(place::run_folder().join("regions"))
    }

    fn at(path: PathBuf) -> Self {
        Self { path, patience: LOCK_PATIENCE }
    }

    /// Makes the folder if it is missing, and checks that only this user may open it.
    fn make(&self) -> Result<()> {
        place::make_own(&self.path).map_err(|error| {
            let plain = Error::new(error.message());
            match error.remedy() {
                Some(hint) => plain.hint(hint),
                None => plain,
            }
        })
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.socket"))
    }

    fn start_lock(&self, name: &str) -> Result<File> {
        let path = self.path.join(format!("{name}.start"));
        let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        opened.map_err(|error| Error::file("open", &path, error))
    }

    /// Takes a region. If nobody keeps it, `start` starts a keeper, and returns when it can be reached.
    ///
    /// # Errors
    /// If the region has another size, or the host refuses a part of it.
    pub fn take(&self, option: &RegionOption, start: impl FnOnce() -> io::Result<()>) -> Result<Region> {
        let RegionOption { name, bytes } = option;
        let wrong = |error: io::Error| Error::host(format!("cannot take the region {name}: {error}"));
        self.make()?;
        let lock = self.start_lock(name.as_str())?;
        if !place::lock_within(&lock, self.patience).map_err(wrong)? {
            let error = format!(
                "cannot take the region {name}: another machine that begins has held its lock for {} s",
                self.patience.as_secs()
            );
            return Err(Error::host(error).hint(format!(
                "a process of mercury-hosted that has {name}.start open may be stopped: end it, or let it go \
                 on"
            )));
        }
        let path = self.socket(name.as_str());
        let connection = match reach(&path).map_err(wrong)? {
            Some(connection) => connection,
            None => {
                start().map_err(wrong)?;
                let gone = || wrong(io::Error::other("its keeper has ended at once"));
                reach(&path).map_err(wrong)?.ok_or_else(gone)?
            }
        };
        let file = receive(&connection).map_err(wrong)?;
        let size = file.metadata().map_err(wrong)?.len();
        if size != *bytes {
            return Err(Error::new(format!("the region {name} has {} MiB, not {}", size >> 20, bytes >> 20))
                .hint("all machines with a region give it the same size"));
        }
        Ok(Region { file, connection: connection.into() })
    }
}

/// Takes a region. This program keeps it in another process, if none does.
///
/// # Errors
/// As for [`Folder::take`].
pub(crate) fn take(option: &RegionOption) -> Result<Region> {
    let words = [KEEP.into(), option.name.as_str().into(), option.bytes.to_string().into()];
    Folder::own().take(option, || mercury_devices::start_keeper(&words))
}

/// Connects to a keeper. `None` if there is none.
fn reach(path: &Path) -> io::Result<Option<UnixStream>> {
    match UnixStream::connect(path) {
        Ok(connection) => {
            connection.set_read_timeout(Some(PATIENCE))?;
            Ok(Some(connection))
        }
        Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused].contains(&error.kind()) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Receives the file.
fn receive(connection: &UnixStream) -> io::Result<File> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut extra = RecvAncillaryBuffer::new(&mut space);
    recvmsg(connection, &mut [IoSliceMut::new(&mut [0])], &mut extra, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = extra.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut sent) => sent.next(),
        _ => None,
    });
    files.next().map(File::from).ok_or_else(|| io::Error::other("its keeper has sent no file"))
}

fn send(connection: &UnixStream, file: &File) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut extra = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    if !extra.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(connection, &[IoSlice::new(&[0])], &mut extra, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The process that keeps a region.
#[derive(Debug)]
pub struct Keeper {
    listener: UnixListener,
    socket: PathBuf,
    lock: File,
    file: File,
    machines: Vec<UnixStream>,
}

impl Keeper {
    /// Makes the region, and its socket. The machine that starts the keeper has the lock.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn start(folder: &Folder, option: &RegionOption) -> Result<Self> {
        let RegionOption { name, bytes } = option;
        let wrong = |error: io::Error| Error::host(format!("cannot make the region {name}: {error}"));
        let socket = folder.socket(name.as_str());
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(wrong(error)),
            _ => {}
        }
        let file = File::from(memory::create(FILE, libc::MFD_ALLOW_SEALING).map_err(wrong)?);
        file.set_len(*bytes).map_err(wrong)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| wrong(error.into()))?;
        let listener = UnixListener::bind(&socket).map_err(wrong)?;
        listener.set_nonblocking(true).map_err(wrong)?;
        let lock = folder.start_lock(name.as_str())?;
        Ok(Self { listener, socket, lock, file, machines: Vec::new() })
    }

    /// Gives the region to machines until the last of them has ended. The first must come in time.
    ///
    /// # Errors
    /// If the host refuses to wait.
    pub fn serve(mut self) -> io::Result<()> {
        self.wait(Some(&Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 }))?;
        loop {
            self.accept();
            if !self.machines.is_empty() {
                self.wait(None)?;
            } else if flock(&self.lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                // No machine comes while the lock is held. One that came before has its connection here.
                self.accept();
                if self.machines.is_empty() {
                    return std::fs::remove_file(&self.socket);
                }
                flock(&self.lock, FlockOperation::Unlock)?;
            } else {
                self.wait(Some(&MOMENT))?;
            }
        }
    }

    fn accept(&mut self) {
        while let Ok((machine, _)) = self.listener.accept() {
            if send(&machine, &self.file).is_ok() {
                self.machines.push(machine);
            }
        }
    }

    /// Waits until a machine comes or goes, and forgets those that have gone.
    fn wait(&mut self, limit: Option<&Timespec>) -> io::Result<()> {
        let mut all = vec![PollFd::new(&self.listener, PollFlags::IN)];
        all.extend(self.machines.iter().map(|machine| PollFd::new(machine, PollFlags::IN)));
        match poll(&mut all, limit) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // A machine sends nothing: if something is there, it is the end.
        let gone: Vec<bool> = all[1..].iter().map(|one| !one.revents().is_empty()).collect();
        let mut gone = gone.into_iter();
        self.machines.retain(|_| !gone.next().unwrap_or(false));
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{os::unix::fs::FileExt, thread};

    use super::*;

    fn option(bytes: u64) -> RegionOption {
        RegionOption { name: "pool".parse().unwrap(), bytes }
    }

    /// Machines have one file, whose size none can change. It goes with the last of them.
    #[test]
    fn a_region_lives_as_long_as_one_machine_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(directory.path().join("regions"));
        let mut keepers = Vec::new();
        let mut take = |bytes: u64| {
            folder.take(&option(bytes), || {
                let keeper = Keeper::start(&folder, &option(bytes)).unwrap();
                keepers.push(thread::spawn(|| keeper.serve().unwrap()));
                Ok(())
            })
        };
        let first = take(2 << 20).unwrap();
        let second = take(2 << 20).unwrap();
        first.file.write_all_at(b"common", 4096).unwrap();
        let read = |region: &Region| {
            let mut word = [0; 6];
            region.file.read_exact_at(&mut word, 4096).unwrap();
            word
        };
        assert_eq!(read(&second), *b"common");
        assert!(first.file.set_len(0).is_err() && second.file.set_len(4 << 20).is_err());
        assert!(take(4 << 20).unwrap_err().message().contains("has 2 MiB, not 4"));
        let copy = first.again().unwrap();
        drop((first, second));
        // A machine that has begun as a copy of another process holds it, too.
        thread::sleep(Duration::from_millis(200));
        let third = take(2 << 20).unwrap();
        assert_eq!(read(&third), *b"common");
        drop((copy, third));
        let socket = folder.socket("pool");
        while socket.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        let last = take(4 << 20).unwrap();
        assert_eq!(read(&last), [0; 6], "it is another region");
        drop(last);
        assert_eq!(keepers.len(), 2);
        keepers.into_iter().for_each(|keeper| keeper.join().unwrap());
    }

    /// A machine was stopped as it took the region.
    #[test]
    fn a_lock_that_another_machine_holds_is_not_waited_for_without_end() {
        let directory = tempfile::tempdir().unwrap();
        let patience = Duration::from_millis(100);
        let folder = Folder { patience, ..Folder::at(directory.path().join("regions")) };
        folder.make().unwrap();
        let held = folder.start_lock("pool").unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let refused = folder.take(&option(2 << 20), || panic!("it has no lock")).unwrap_err();
        assert!(refused.message().contains("has held its lock"), "{}", refused.message());
        assert!(refused.remedy().is_some_and(|hint| hint.contains("pool.start")));
    }

    #[test]
    fn a_folder_that_others_may_open_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("regions");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let refused = Folder::at(path).take(&option(2 << 20), || Ok(())).unwrap_err();
        assert!(refused.message().contains("open to other users"));
    }
}
