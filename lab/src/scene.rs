//! A machine's own directory under `target/lab/run/`, with its disks, sockets and logs. The
//! directory goes with the machine. After a failure it is kept for a day.

use std::{
    fs, io,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};

use crate::{
    autopsy,
    emulator::file,
    error::{Context, Error, Result},
    host,
    lock::Lock,
    paths,
    spec::Spec,
};

/// The time for which evidence is kept.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// The number of lines of the serial console that an error shows.
const SERIAL_LINES: usize = 40;
/// The number of lines, about, that a processor's registers take in QEMU's log.
const REGISTER_LINES: usize = 40;
const OWNER: &str = "owner.lock";
const KEPT: &str = "kept";

/// The directory of a machine, and the evidence in it after a failure.
#[derive(Debug)]
pub struct Scene {
    dir: PathBuf,
    summary: String,
    keep: AtomicBool,
    _owner: Lock,
}

impl Scene {
    /// Makes a directory for a new machine. Removes the directories of machines whose owner has
    /// died.
    ///
    /// # Errors
    /// If the directory cannot be made.
    pub fn new(spec: &Spec) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let all = paths::lab_dir("run")?;
        sweep(&all);
        let name = format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let dir = all.join(name);
        let _ = fs::remove_dir_all(&dir);
        // The directory is made and locked under another name, so that no removal comes in between.
        let unborn = all.join(format!(".{}", dir.file_name().unwrap_or_default().display()));
        fs::create_dir_all(&unborn).context(|| format!("make {}", unborn.display()))?;
        let owner = Lock::take(&unborn.join(OWNER))?
            .ok_or_else(|| Error::Host(format!("another process holds {}", dir.display())))?;
        fs::rename(&unborn, &dir).context(|| format!("make {}", dir.display()))?;
        Ok(Self { dir, summary: spec.summary(), keep: AtomicBool::new(false), _owner: owner })
    }

    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the whole text of the serial console.
    #[must_use]
    pub fn serial_log(&self) -> String {
        let bytes = fs::read(self.dir.join(file::SERIAL)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Connects to a socket in the directory. The socket's path may be longer than a socket's
    /// address can be, so the connection goes through a descriptor of the directory.
    ///
    /// # Errors
    /// If no process listens there (yet).
    pub fn connect(&self, socket: &str) -> io::Result<UnixStream> {
        let dir = fs::File::open(&self.dir)?;
        UnixStream::connect(format!("/proc/self/fd/{}/{socket}", dir.as_raw_fd()))
    }

    /// Adds to an error the machine's description and its last words, and keeps the evidence.
    pub fn blame(&self, error: Error) -> Error {
        if matches!(error, Error::Scene { .. }) {
            return error;
        }
        self.blame_also(error)
    }

    /// Adds this machine to the evidence of an error, which may have that of another machine.
    pub fn blame_also(&self, error: Error) -> Error {
        self.keep();
        let (source, before) = match error {
            Error::Scene { source, scene } => (source, scene + "\n"),
            error => (Box::new(error), String::new()),
        };
        Error::Scene { source, scene: before + &self.describe() }
    }

    /// Keeps the directory after the machine.
    pub fn keep(&self) {
        self.keep.store(true, Ordering::Relaxed);
        let _ = fs::write(self.dir.join(KEPT), "");
    }

    /// Gives up the evidence after an expected failure.
    pub fn forgive(&self) {
        self.keep.store(false, Ordering::Relaxed);
        let _ = fs::remove_file(self.dir.join(KEPT));
    }

    fn describe(&self) -> String {
        let serial = host::tail(&self.dir.join(file::SERIAL), SERIAL_LINES);
        let said = fs::read_to_string(self.dir.join(file::EMULATOR)).unwrap_or_default();
        // QEMU lists at each start the features of the processor that it does not emulate.
        let said: Vec<&str> = said.lines().filter(|line| !line.contains("TCG doesn't support")).collect();
        let said = said.join("\n");
        let mut text = format!("  machine: {}\n  kept in: {}", self.summary, self.dir.display());
        let guest = host::tail(&self.dir.join(file::GUEST_CONSOLE).with_extension("log"), SERIAL_LINES);
        let autopsy = fs::read_to_string(self.dir.join(autopsy::REPORT)).unwrap_or_default();
        let resets = fs::read_to_string(self.dir.join(file::RESETS)).unwrap_or_default();
        let all = [
            ("the last of its serial console", serial),
            ("the last of the emulator", said),
            ("the last of its guest's console", guest),
            ("from outside", autopsy),
            ("a triple fault", last_triple_fault(&resets).to_owned()),
        ];
        for (name, said) in all {
            if !said.trim().is_empty() {
                text += &format!("\n  {name}:\n{}", indent(&said));
            }
        }
        text
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.keep.load(Ordering::Relaxed) {
            self.keep();
            eprintln!("{}", self.describe());
        }
        if !self.keep.load(Ordering::Relaxed) {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

/// Returns the registers of the processors at the last triple fault, which ends the emulator
/// without a message.
fn last_triple_fault(resets: &str) -> &str {
    let Some(at) = resets.rfind("Triple fault") else { return "" };
    // The lines after that describe the machine as it begins.
    let end = resets[at..].match_indices('\n').nth(REGISTER_LINES).map_or(resets.len(), |(end, _)| at + end);
    &resets[at..end]
}

/// Removes old evidence, and what machines have left whose owner died without removing it.
fn sweep(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let dir = entry.path();
        let named = !entry.file_name().as_encoded_bytes().starts_with(b".");
        if named && !is_kept(&dir) && matches!(Lock::take(&dir.join(OWNER)), Ok(Some(_))) {
            let _ = fs::remove_dir_all(&dir);
        }
    }
}

fn is_kept(dir: &Path) -> bool {
    let age = fs::metadata(dir.join(KEPT)).and_then(|meta| meta.modified()).map(|time| time.elapsed());
    age.is_ok_and(|age| age.is_ok_and(|age| age < KEPT_FOR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_triple_fault_is_found_among_resets() {
        assert_eq!(last_triple_fault("CPU Reset (CPU 0)\nRAX=0\n"), "");
        let registers = "RAX=1\n".repeat(2 * REGISTER_LINES);
        let log = format!("CPU Reset (CPU 0)\nTriple fault\nRAX=0\nTriple fault\n{registers}");
        let found = last_triple_fault(&log);
        assert!(found.starts_with("Triple fault\nRAX=1"), "{found}");
        assert_eq!(found.lines().count(), REGISTER_LINES + 1);
        assert_eq!(last_triple_fault("Triple fault\n"), "Triple fault\n");
    }
}
