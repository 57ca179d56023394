//! The target of an image: a file, a block device, standard output, or a file on another host.

use crate::values::Name;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_quiesce::patient::{self, Sink};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Seek, Write},
    os::unix::{
        fs::{FileTypeExt, OpenOptionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
};

/// An image under construction. It is removed if it is dropped before [`Target::finish`].
#[derive(Debug)]
pub struct Target {
    place: Place,
}

/// Notes a file that is about to be made.
pub type Announce<'a> = dyn FnMut(&Path) -> io::Result<()> + 'a;

#[derive(Debug)]
enum Place {
    Stdout(io::Stdout),
    Device(Sink),
    File { file: Sink, part: PathBuf, path: PathBuf },
    Remote { data: Connection, end: Connection },
    Finished,
}

/// A command on another host.
#[derive(Debug)]
struct Connection {
    child: Child,
    input: Option<ChildStdin>,
}

impl Connection {
    fn open(host: &str, script: &str) -> io::Result<Self> {
        let mut command = Command::new("ssh");
        // With these options a host that stops answering is an error, not a pause.
        command.args(["-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]);
        command.args(["-o", "ConnectTimeout=20"]);
        // No shared connection, because its owner may have to stand still.
        command.args(["-o", "ControlPath=none"]);
        command.args(["--", host, script]).stdin(Stdio::piped()).stdout(io::stderr());
        // Signals of a key at the terminal are for the command, which ends these processes after
        // its clean-up.
        command.process_group(0);
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        Ok(Self { child, input })
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write(bytes);
        match sent {
            // The exit status says more.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                Err(self.finish().err().unwrap_or(error))
            }
            sent => sent,
        }
    }

    /// Ends the input, and waits for a successful end.
    fn finish(&mut self) -> io::Result<()> {
        drop(self.input.take());
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("ssh ended with {status}"))) }
    }
}

/// Word that the other host's second command waits for.
const COMMIT: &[u8] = b"commit\n";

impl Target {
    /// Opens the target. The file at a path stays there until the image is complete. `before` is told
    /// of the file that exists until then, before it is made: a process that is killed at any moment
    /// leaves nothing behind that nobody knows of.
    ///
    /// # Errors
    ///
    /// Returns an error if the target cannot be written to, a device holds data that is no image
    /// and `overwrite` is not set, or `before` fails.
    pub fn open(name: &Name, overwrite: bool, before: &mut Announce<'_>) -> Result<Self> {
        let result = match name {
            Name::Stdout => Ok(Place::Stdout(io::stdout())),
            Name::Remote { host, path } => Self::open_remote(host, path, crate::random::random()?),
            Name::Path(path) => Self::open_path(path, overwrite, before),
        };
        result.map(|place| Self { place }).map_err(|error| {
            Error::new(Exit::Failed, format!("{name} cannot be written to: {error}"))
                .hint("name a file in a folder that exists, an empty block device, - or ssh://host/path")
        })
    }

    fn open_path(path: &Path, overwrite: bool, before: &mut Announce<'_>) -> io::Result<Place> {
        let found = fs::metadata(path).ok();
        if found.as_ref().is_some_and(|found| found.file_type().is_block_device()) {
            patient::answers(path)?;
            let mut options = OpenOptions::new();
            let mut file = options.read(true).write(true).custom_flags(libc::O_EXCL).open(path)?;
            if !overwrite && !is_free(&mut file)? {
                return Err(io::Error::other(
                    "it holds data that is no image (--overwrite if the data may be lost)",
                ));
            }
            file.rewind()?;
            return Ok(Place::Device(Sink::new(file, path)?));
        }
        if found.is_some_and(|found| !found.is_file()) || path.starts_with("/dev/") {
            return Err(io::Error::other("it is neither a file nor a block device"));
        }
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        // A file that is left over has no owner, unless its writer still holds it.
        let held =
            File::open(&part).is_ok_and(|left| matches!(left.try_lock(), Err(TryLockError::WouldBlock)));
        if held {
            return Err(io::Error::other("another process is writing it"));
        }
        let _ = fs::remove_file(&part);
        before(&part)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
        // Not every file system has locks.
        let _ = file.try_lock();
        let file = Sink::new(file, path)?;
        Ok(Place::File { file, part, path: path.to_owned() })
    }

    /// Opens both connections at the start, because later the needed programs may stand still.
    fn open_remote(host: &str, path: &str, key: [u8; 8]) -> io::Result<Place> {
        let scripts = Scripts::new(path, key);
        let data = Connection::open(host, &scripts.data)?;
        let end = Connection::open(host, &scripts.end)?;
        Ok(Place::Remote { data, end })
    }

    /// Returns the processes whose connections carry the image to another host.
    #[must_use]
    pub fn carriers(&self) -> Vec<u32> {
        match &self.place {
            Place::Remote { data, end } => vec![data.child.id(), end.child.id()],
            _ => Vec::new(),
        }
    }

    /// Returns the processes that must not be held still.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        match &self.place {
            Place::Device(file) | Place::File { file, .. } => vec![file.process()],
            _ => self.carriers(),
        }
    }

    /// Completes the image: it is durable, and at its place, when this returns.
    ///
    /// # Errors
    ///
    /// Returns an error if that fails; there is no image then.
    pub fn finish(mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.place, Place::Finished) {
            Place::Stdout(mut stdout) => stdout.flush(),
            Place::Device(mut file) => file.finish(),
            Place::File { mut file, part, path } => {
                let result = file.finish().and_then(|()| patient::rename(&part, &path));
                if result.is_err() {
                    let _ = patient::remove(&part);
                }
                result
            }
            Place::Remote { mut data, mut end } => {
                // A connection that breaks looks like the end of the file. Only the word on the
                // second one means that it is complete.
                data.finish()?;
                end.send(COMMIT)?;
                end.finish()
            }
            Place::Finished => Ok(()),
        }
    }

    /// Returns the file that exists until the image is complete.
    #[must_use]
    pub fn part(&self) -> Option<&Path> {
        if let Place::File { part, .. } = &self.place { Some(part) } else { None }
    }

    /// Leaves everything as it is: this is not the machine that writes the image.
    pub fn forget(mut self) {
        self.place = Place::Finished;
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.place {
            Place::Stdout(stdout) => stdout.write(bytes),
            Place::Device(file) | Place::File { file, .. } => file.write(bytes),
            Place::Remote { data, .. } => data.send(bytes),
            Place::Finished => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        match &mut self.place {
            Place::File { part, .. } => drop(patient::remove(part)),
            Place::Remote { data, end } => {
                let _ = data.child.kill();
                let _ = data.child.wait();
                // Without the word the host removes the file.
                let _ = end.finish();
            }
            Place::Stdout(_) | Place::Device(_) | Place::Finished => {}
        }
    }
}

/// Returns true if a device is zeros at its beginning, or holds an image.
fn is_free(device: &mut File) -> io::Result<bool> {
    let mut first = vec![0; 128 << 10];
    let length = io::Read::read(device, &mut first)?;
    Ok(first[..length].iter().all(|byte| *byte == 0) || first.starts_with(&mercury_image::MAGIC))
}

/// The scripts for the other host's shell, for two connections.
struct Scripts {
    /// Writes the data to a file of its own name.
    data: String,
    /// Waits for the word, makes the image durable, and then renames it and makes the folder
    /// durable.
    end: String,
}

impl Scripts {
    fn new(path: &str, key: [u8; 8]) -> Self {
        let folder = Path::new(path).parent().unwrap_or(Path::new("/"));
        // Two writers to one path use two files, and the last one to end stays.
        let part = quoted(&format!("{path}.{:016x}.part", u64::from_be_bytes(key)));
        let (folder, path) = (quoted(&folder.to_string_lossy()), quoted(path));
        let data = format!(
            "if test -d {path}; then echo {path} is a folder >&2; exit 1; fi; \
             set -C && umask 077 && cat > {part}"
        );
        let safe = format!("sync {part} && mv -f {part} {path} && sync {folder}");
        let end =
            format!("read word; test \"$word\" = commit && {safe} && exit; rm -f {part}; test -z \"$word\"");
        Self { data, end }
    }
}

/// Quotes text for the other host's shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!("-".parse(), Ok(Name::Stdout));
        assert_eq!("a/b".parse(), Ok(Name::Path("a/b".into())));
        let remote = Name::Remote { host: "root@spare".into(), path: "/var/x".into() };
        assert_eq!("ssh://root@spare/var/x".parse(), Ok(remote));
        assert!("ssh://-oProxyCommand=x/y".parse::<Name>().is_err());
        assert!("ssh://host".parse::<Name>().is_err());
    }

    /// Opens a file of which nobody has to know.
    fn open(path: &Path) -> Result<Target> {
        Target::open(&Name::Path(path.to_owned()), false, &mut |_| Ok(()))
    }

    /// A process that is killed between the two leaves no file: the killed command of a lab test
    /// once left one.
    #[test]
    fn a_file_is_announced_before_it_is_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("image");
        let files = || fs::read_dir(folder.path()).expect("a folder").count();
        let mut announced = Vec::new();
        let target = Target::open(&Name::Path(path.clone()), false, &mut |part| {
            announced.push((part.to_owned(), files()));
            Ok(())
        });
        assert_eq!((announced, files()), (vec![(folder.path().join("image.part"), 0)], 1));
        drop(target);
        let failed = Target::open(&Name::Path(path), false, &mut |_| Err(io::ErrorKind::BrokenPipe.into()));
        assert_eq!((failed.expect_err("refused").exit, files()), (Exit::Failed, 0));
    }

    /// The fence waits for a connection of each carrier, and gives up without one.
    #[test]
    fn no_connection_carries_an_image_to_a_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = open(&folder.path().join("image")).expect("a file");
        assert_eq!((target.carriers().len(), target.processes().len()), (0, 1));
    }

    /// A shell of this host runs the other host's scripts.
    #[test]
    fn another_host_keeps_an_image_only_when_it_has_the_word() {
        let run = |script: &str, input: &str| {
            let mut child =
                Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().expect("a shell");
            // A script that refuses reads nothing, and may be gone before this is written.
            match child.stdin.take().expect("its input").write_all(input.as_bytes()) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                written => written.expect("written"),
            }
            child.wait().expect("its end").success()
        };
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it's");
        let scripts = |key: u8| Scripts::new(path.to_str().expect("a name"), [key; 8]);
        let names = || fs::read_dir(folder.path()).expect("a folder").count();
        // Two at a time, of which one breaks off.
        assert!(run(&scripts(1).data, "one") && run(&scripts(2).data, "two"));
        assert!(!run(&scripts(1).data, "another"), "a file that is there is not written over");
        assert_eq!((names(), path.exists()), (2, false));
        assert!(run(&scripts(2).end, ""));
        assert!(run(&scripts(1).end, "commit\n"));
        assert_eq!((names(), fs::read(&path).expect("read")), (1, b"one".to_vec()));
        // If the file cannot be made durable there is no image.
        assert!(!run(&scripts(3).end, "commit\n"));
        fs::remove_file(&path).expect("gone");
        fs::create_dir(&path).expect("a folder");
        assert!(!run(&scripts(4).data, "x"));
        assert_eq!(names(), 1);
    }

    #[test]
    fn a_file_appears_when_it_is_complete() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("image");
        fs::write(&path, "old").expect("a file");
        let mut target = open(&path).expect("opened");
        target.write_all(b"half").expect("written");
        let second = open(&path).expect_err("refused");
        assert!(second.message.contains("another process"), "{second}");
        assert_eq!(fs::read(&path).expect("read"), b"old");
        drop(target);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        let mut target = open(&path).expect("opened");
        target.write_all(b"new").expect("written");
        target.finish().expect("finished");
        assert_eq!(fs::read(&path).expect("read"), b"new");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}
