//! The socket by which a person saves a machine (`--control`). A thread waits for connections, one after the
//! other; the processor sends the machine there and waits for the answer that it has arrived.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, ErrorKind, Read, Write},
    mem::ManuallyDrop,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, OpenOptionsExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
    thread,
    time::Duration,
};

use mercury_devices::signals::{Waker, start_thread};

use crate::{
    error::{Error, Result},
    fork::Image,
    gdb,
    generator::random,
    saved::{self, Head, Life, Saved},
    signal::is_end_wanted,
};

/// The first byte that the machine sends: the machine follows, or the reason for which it does not.
pub const SAVED: u8 = b'S';
pub const REFUSED: u8 = b'R';
/// The answer: all of it is on the disk.
pub const KEPT: u8 = b'K';
/// The time after which a signal that may have been missed is sent again.
const AGAIN: Duration = Duration::from_millis(50);
const NOBODY: i32 = -1;

/// The processor's part of the socket.
#[derive(Debug)]
pub struct Control {
    socket: RawFd,
    /// The connection of the person who wants the machine, or a negative number.
    wanted: Arc<AtomicI32>,
    life: Life,
}

/// A socket that is open, without a thread that listens.
#[derive(Debug)]
pub struct Opened(OwnedFd);

/// Opens the socket, to which only its user may connect.
///
/// # Errors
/// If the path cannot have one.
pub fn open(path: &Path) -> Result<Opened> {
    gdb::listen_at(path).map(Opened)
}

impl Control {
    /// Begins to listen.
    ///
    /// # Errors
    /// If there can be no thread, or the host has no random numbers.
    pub fn new(opened: Opened, waker: Waker) -> Result<Self> {
        let (socket, wanted) = (opened.0.as_raw_fd(), Arc::new(AtomicI32::new(NOBODY)));
        let shared = Arc::clone(&wanted);
        start_thread("control", move || listen(&opened.0, &shared, &waker))
            .map_err(|error| Error::thread("--control", &error))?;
        Ok(Self { socket, wanted, life: random()? })
    }

    /// Returns the descriptor of the listening socket.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.socket
    }

    /// Returns the number by which this machine is known until it ends.
    #[must_use]
    pub fn life(&self) -> Life {
        self.life
    }

    /// Returns the connection of a person who wants the machine.
    #[must_use]
    pub fn wanted(&self) -> Option<Wanted> {
        let descriptor = self.wanted.load(Ordering::Acquire);
        (descriptor >= 0).then(|| Wanted { descriptor, wanted: Arc::clone(&self.wanted) })
    }
}

fn listen(socket: &OwnedFd, wanted: &AtomicI32, waker: &Waker) {
    loop {
        // SAFETY: The address of the other end is not wanted.
        let descriptor = unsafe {
            libc::accept4(socket.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC)
        };
        if descriptor < 0 {
            thread::park_timeout(AGAIN);
            continue;
        }
        wanted.store(descriptor, Ordering::Release);
        while wanted.load(Ordering::Acquire) >= 0 {
            waker();
            thread::park_timeout(AGAIN);
        }
    }
}

/// A connection. It ends when this is dropped.
#[derive(Debug)]
pub struct Wanted {
    descriptor: RawFd,
    wanted: Arc<AtomicI32>,
}

impl Wanted {
    fn file(&self) -> ManuallyDrop<File> {
        // SAFETY: The descriptor is open until this is dropped, and the file does not close it.
        ManuallyDrop::new(unsafe { File::from_raw_fd(self.descriptor) })
    }

    /// Tells the person why the machine is not saved.
    pub fn refuse(&self, why: &str) {
        let _ = self.file().write_all(&[&[REFUSED], why.as_bytes()].concat());
    }

    /// Sends the machine. Returns true if the person has kept all of it.
    pub fn send(&self, write: impl FnOnce(&mut io::BufWriter<&File>) -> io::Result<()>) -> bool {
        let file = self.file();
        let mut to = io::BufWriter::with_capacity(1 << 20, &*file);
        let sent = to.write_all(&[SAVED]).and_then(|()| write(&mut to)).and_then(|()| to.flush());
        // What could not be sent must not be sent again when the buffer is dropped.
        let _ = to.into_parts();
        sent.is_ok() && self.is_kept()
    }

    fn is_kept(&self) -> bool {
        let mut answer = [0];
        loop {
            match self.file().read(&mut answer) {
                Ok(1) => return answer[0] == KEPT,
                Err(error) if error.kind() == ErrorKind::Interrupted && !is_end_wanted() => {}
                _ => return false,
            }
        }
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        self.wanted.store(NOBODY, Ordering::Release);
        // The library's own function first checks if the descriptor is open, by a forbidden call.
        // SAFETY: The descriptor has no other owner.
        unsafe { libc::close(self.descriptor) };
    }
}

/// Saves the machine with this socket into a new file, and ends the machine.
///
/// The file has its name when the machine is gone. Until then the name ends with `.part`. If this program is
/// killed the machine goes on, or the file with `.part` is whole: it is checked, and on the disk, before the
/// machine is told to end. If both are true, the next save replaces that file. Returns the file's size in
/// bytes.
///
/// # Errors
/// If there is no machine, it cannot be saved, or the file cannot be written. The machine goes on then.
pub fn save(socket: &Path, file: &Path) -> Result<u64> {
    refuse_if_there(file)?;
    let part = with_part(file);
    let left = clear(&part)?;
    let mut machine = match (UnixStream::connect(socket), &left) {
        (Ok(machine), _) => machine,
        (Err(_), Some(left)) => return Err(left.is_another()),
        (Err(error), None) => {
            return Err(Error::file("connect to the machine at", socket, error)
                .hint("start the machine with --control, and save it as the same user"));
        }
    };
    let head = begin(&mut machine)?;
    if let Some(left) = left {
        left.give_way_to(&head)?;
    }
    let mut kept = make(&part)?;
    let bytes = receive(&head, &mut machine, &mut kept, &part).inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })?;
    let gone = || {
        Error::new("the machine has gone away, and may have ended")
            .hint(format!("all of it is in {}, which can be restored", part.display()))
    };
    machine.write_all(&[KEPT]).map_err(|_| gone())?;
    // The machine ends now. Its disks are free when it has.
    let _ = machine.read(&mut [0]);
    rename(&part, file).map_err(|error| Error::file("name", file, error).hint(part.display().to_string()))?;
    sync_folder(file)?;
    Ok(bytes)
}

/// Writes a machine that was forked into a new file. The machine goes on meanwhile. The file has its name
/// when it is whole and on the disk. Until then the name ends with `.part`. Returns the file's size in bytes.
///
/// # Errors
/// If the file cannot be written.
pub fn save_image(image: &Image, file: &Path) -> Result<u64> {
    save_image_as(image, file, &random()?)
}

/// Does the work of [`save_image`], with the life that the file gets.
///
/// # Errors
/// As for [`save_image`].
pub fn save_image_as(image: &Image, file: &Path, life: &Life) -> Result<u64> {
    refuse_if_there(file)?;
    let part = with_part(file);
    if let Some(left) = clear(&part)? {
        return Err(left.is_another());
    }
    let kept = make(&part)?;
    let written = write_image(image, &kept, &part, life).inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })?;
    rename(&part, file).map_err(|error| Error::file("name", file, error).hint(part.display().to_string()))?;
    sync_folder(file)?;
    Ok(written)
}

/// A file that is on the disk after each piece: a host without memory could not hold much of it.
struct InPieces<'a> {
    file: &'a File,
    unsynced: usize,
}

impl Write for InPieces<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        const PIECE: usize = 4 << 20;
        let written = self.file.write(bytes)?;
        self.unsynced += written;
        if self.unsynced >= PIECE {
            self.file.sync_data()?;
            self.unsynced = 0;
            // SAFETY: It takes a descriptor and numbers. The host may keep the pages all the same.
            unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn write_image(image: &Image, file: &File, part: &Path, life: &Life) -> Result<u64> {
    let wrong = |error| Error::file("write", part, error);
    let mut to = io::BufWriter::with_capacity(1 << 20, InPieces { file, unsynced: 0 });
    let state = image.state().map_err(wrong)?;
    saved::write(&mut to, life, &state, image).map_err(wrong)?;
    drop(to);
    file.sync_all().map_err(wrong)?;
    Saved::open(part)?;
    file.metadata().map(|of| of.len()).map_err(wrong)
}

/// Checks that a name for a new file is free.
///
/// # Errors
/// If there is a file.
pub fn refuse_if_there(file: &Path) -> Result<()> {
    match file.symlink_metadata() {
        Err(_) => Ok(()),
        Ok(_) => Err(Error::new(format!("{} is there already", file.display())).hint("choose another name")),
    }
}

fn with_part(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// A whole machine that a save has left when it was killed at its end. It is locked until this is dropped, so
/// that no other save begins on it.
#[derive(Debug)]
struct Left {
    part: PathBuf,
    life: Life,
    _locked: File,
}

impl Left {
    fn is_another(&self) -> Error {
        Error::new(format!("{} is there already", self.part.display())).hint(
            "it is a whole machine that has ended, whose save was killed at its end: restore it, or move it \
             away",
        )
    }

    /// Removes the file if the machine that it has goes on, and is about to be saved anew.
    fn give_way_to(&self, head: &Head) -> Result<()> {
        if head.life() != self.life {
            return Err(self.is_another());
        }
        fs::remove_file(&self.part).map_err(|error| Error::file("remove", &self.part, error))
    }
}

/// Removes what a save that was killed has left. Returns it instead if it is a whole machine.
///
/// # Errors
/// If another save is at work on it, or it cannot be read.
fn clear(part: &Path) -> Result<Option<Left>> {
    let wrong = |error| Error::file("read", part, error);
    let is_file = match part.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        kind => kind.map_err(wrong)?.is_file(),
    };
    let busy = || {
        Error::new(format!("{} is there already", part.display()))
            .hint("another save writes there: choose another name")
    };
    if !is_file {
        return Err(busy());
    }
    // Locked until it is removed, so that no save begins on it meanwhile.
    let left = File::open(part).map_err(wrong)?;
    left.try_lock().map_err(|_| busy())?;
    if let Some(life) = saved::life_if_whole(&left).map_err(wrong)? {
        return Ok(Some(Left { part: part.to_owned(), life, _locked: left }));
    }
    fs::remove_file(part).map_err(|error| Error::file("remove", part, error))?;
    Ok(None)
}

/// Waits for the machine. Returns the head of what it sends.
fn begin(machine: &mut UnixStream) -> Result<Head> {
    let lost = |error: io::Error| {
        Error::new(format!("the machine does not answer: {error}"))
            .hint("nothing was saved; see what the machine has written, if it runs, and try again")
    };
    let mut first = [0];
    machine.read_exact(&mut first).map_err(lost)?;
    if first[0] != SAVED {
        let mut why = String::new();
        machine.read_to_string(&mut why).map_err(lost)?;
        return Err(Error::new(why).hint("nothing was saved, and the machine runs on"));
    }
    Head::read(machine).map_err(lost)
}

/// Makes the new file.
fn make(part: &Path) -> Result<File> {
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(part);
    let file = file.map_err(|error| Error::file("write", part, error))?;
    file.try_lock().map_err(|error| Error::file("lock", part, io::Error::from(error)))?;
    // Another save may have taken it for what a killed one has left, before it was locked.
    let number = |of: io::Result<fs::Metadata>| of.map(|of| of.ino()).ok();
    if number(file.metadata()) != number(part.symlink_metadata()) {
        return Err(
            Error::new(format!("another save writes to {}", part.display())).hint("choose another name")
        );
    }
    Ok(file)
}

/// Writes what the machine sends to a file, down to the disk, and checks it. Returns the number of bytes.
fn receive(head: &Head, machine: &mut UnixStream, file: &mut File, part: &Path) -> Result<u64> {
    let wrong = |error| Error::file("write", part, error);
    saved::copy(head, machine, file).map_err(wrong)?;
    file.sync_all().map_err(wrong)?;
    sync_folder(part)?;
    Saved::open(part)?;
    file.metadata().map(|of| of.len()).map_err(wrong)
}

/// Gives the file its name, which nothing else has.
fn rename(part: &Path, file: &Path) -> io::Result<()> {
    let [from, to] = [part, file].map(|path| CString::new(path.as_os_str().as_bytes()));
    let (from, to) = (from?, to?);
    // SAFETY: The names are strings that outlive the call.
    let renamed = unsafe {
        libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::RENAME_NOREPLACE)
    };
    if renamed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn sync_folder(file: &Path) -> Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::file("write", folder, error))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LIFE: Life = [1; 16];

    fn write(part: &Path, life: Life) {
        crate::testing::with_memory(|memory| {
            saved::write(File::create(part).unwrap(), &life, b"state", memory).unwrap();
        });
    }

    #[test]
    fn what_a_killed_save_has_left_goes_unless_it_is_a_machine() {
        let directory = tempfile::tempdir().unwrap();
        let part = directory.path().join("saved.part");
        assert!(clear(&part).unwrap().is_none());
        fs::write(&part, "a part of a machine").unwrap();
        assert!(clear(&part).unwrap().is_none() && !part.exists());
        write(&part, LIFE);
        assert_eq!(clear(&part).unwrap().unwrap().life, LIFE);
        // One of another version of this program is whole, too.
        let mut older = fs::read(&part).unwrap();
        older[8] ^= 1;
        let end = older.len() - blake3::OUT_LEN;
        let seal = blake3::hash(&older[..end]);
        older[end..].copy_from_slice(seal.as_bytes());
        fs::write(&part, older).unwrap();
        assert!(Saved::open(&part).is_err() && clear(&part).unwrap().is_some() && part.exists());
        let other = File::create(directory.path().join("other.part")).unwrap();
        other.try_lock().unwrap();
        assert!(clear(&directory.path().join("other.part")).is_err(), "another save is at work");
        let link = directory.path().join("link.part");
        std::os::unix::fs::symlink(&part, &link).unwrap();
        assert!(clear(&link).is_err() && part.exists());
    }

    /// Stands for a machine that is saved again after a save that was killed when its file was whole.
    #[test]
    fn a_whole_file_gives_way_only_to_the_machine_that_wrote_it() {
        let directory = tempfile::tempdir().unwrap();
        let [socket, file, part, sent] =
            ["socket", "saved", "saved.part", "sent"].map(|name| directory.path().join(name));
        write(&sent, LIFE);
        write(&part, [2; 16]);
        assert!(save(&socket, &file).unwrap_err().message().contains("saved.part is there already"));
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let machine = thread::spawn(move || {
            [(); 2].map(|()| {
                let (mut person, _) = listener.accept().unwrap();
                let _ = person.write_all(&[&[SAVED], &*fs::read(&sent).unwrap()].concat());
                person.read(&mut [0]).is_ok_and(|count| count == 1)
            })
        });
        assert!(save(&socket, &file).unwrap_err().message().contains("saved.part is there already"));
        write(&part, LIFE);
        save(&socket, &file).unwrap();
        assert_eq!(machine.join().unwrap(), [false, true], "the machine is told to end once");
        assert!(file.exists() && !part.exists());
    }

    #[test]
    fn a_file_that_came_meanwhile_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let [part, file] = ["part", "file"].map(|name| directory.path().join(name));
        fs::write(&part, "new").unwrap();
        fs::write(&file, "old").unwrap();
        assert_eq!(rename(&part, &file).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&file).unwrap(), "old");
        fs::remove_file(&file).unwrap();
        rename(&part, &file).unwrap();
        assert!(!part.exists() && file.exists());
    }
}
