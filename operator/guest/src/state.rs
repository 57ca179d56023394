//! The folder of a guest: its process, its status and its sockets. It is removed with the guest.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_guest::layout::Layout;
use serde::Serialize;
use std::{
    env,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// Folder of all guests, if root runs them.
const OF_ROOT: &str = "/run/mercury/guests";
const NAME_MAX: usize = 64;
const FILES: [&str; 6] =
    ["pid", "status.json", "status.json.new", "control.sock", "console.sock", "serial1.sock"];

/// The facts about a guest, as `status.json` and the control socket show them.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    pub name: String,
    /// `loading` or `running`.
    pub state: &'static str,
    pub pid: u32,
    pub image: PathBuf,
    /// Host name of the machine in the image.
    pub host: String,
    /// Release of its kernel.
    pub kernel: String,
    pub cpus: usize,
    /// Memory of the guest, in bytes.
    pub memory_bytes: u64,
    /// Memory that the monitor takes beside it, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor_bytes: Option<u64>,
    /// Time of its start in seconds since 1970.
    pub since: u64,
}

impl Facts {
    pub fn new(name: &str, image: &Path, machine: &mercury_image::Machine) -> Self {
        Self {
            name: name.to_owned(),
            state: "loading",
            pid: std::process::id(),
            image: image.to_owned(),
            host: machine.host.clone(),
            kernel: machine.release.clone(),
            cpus: machine.cpus.len(),
            memory_bytes: Layout::of(machine).map_or(0, |layout| layout.bytes()),
            monitor_bytes: None,
            since: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        }
    }

    /// Returns the facts of a guest that runs.
    pub fn running(&mut self) -> Self {
        self.state = "running";
        self.clone()
    }
}

/// The folder of a guest.
#[derive(Debug)]
pub struct State {
    folder: PathBuf,
    /// Locked as long as the guest lives.
    _pid: File,
}

impl State {
    /// Makes the folder, and keeps another guest from having its name.
    ///
    /// # Errors
    /// The name is taken or impossible, or the folder cannot be made.
    pub fn make(name: &str, folder: Option<&Path>) -> Result<Self> {
        check(name)?;
        let folder = folder.map_or_else(|| all_guests().join(name), Path::to_owned);
        let wrong = |error: io::Error| {
            Error::new(Exit::Failed, format!("cannot make the guest's folder {}: {error}", folder.display()))
                .hint("name another one with --state")
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(wrong)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut pid = options.open(folder.join("pid")).map_err(wrong)?;
        // SAFETY: It takes a descriptor that is open.
        if unsafe { libc::flock(pid.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(Error::new(Exit::Busy, format!("a guest of the name {name} runs"))
                .hint("name this one otherwise with --name, or stop the other one first"));
        }
        pid.set_len(0).and_then(|()| writeln!(pid, "{}", std::process::id())).map_err(wrong)?;
        Ok(Self { folder, _pid: pid })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes the facts, all at once.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, facts: &Facts) -> Result<()> {
        let path = self.folder.join("status.json");
        let new = self.folder.join("status.json.new");
        let text = serde_json::to_string(facts).unwrap_or_default() + "\n";
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|error| Error::new(Exit::Failed, format!("cannot write {}: {error}", path.display())))
    }
}

impl Drop for State {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

/// Removes the folder of a guest, and nothing that it does not know.
pub fn remove(folder: &Path) {
    for file in FILES {
        let _ = fs::remove_file(folder.join(file));
    }
    let _ = fs::remove_dir(folder);
}

/// Returns the folder of all guests of this user.
fn all_guests() -> PathBuf {
    // SAFETY: It takes nothing.
    let is_root = unsafe { libc::geteuid() } == 0;
    match env::var_os("XDG_RUNTIME_DIR") {
        Some(own) if !is_root => Path::new(&own).join("mercury/guests"),
        _ => OF_ROOT.into(),
    }
}

fn check(name: &str) -> Result<()> {
    let is_known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if (1..=NAME_MAX).contains(&name.len()) && name.chars().all(is_known) && !name.starts_with('.') {
        return Ok(());
    }
    Err(Error::new(Exit::Usage, format!("“{name}” cannot be the name of a guest"))
        .hint("choose letters, digits, `-`, `_` and `.` with --name, at most 64"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_as_long_as_its_guest_lives() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join("guests/node7");
        let state = State::make("node7", Some(&folder)).expect("made");
        let error = State::make("node7", Some(&folder)).expect_err("taken");
        assert_eq!(error.exit, Exit::Busy);
        let machine = mercury_image::Machine { host: "node7".into(), ..mercury_image::Machine::default() };
        state.write(&Facts::new("node7", Path::new("/image"), &machine)).expect("written");
        let text = fs::read_to_string(folder.join("status.json")).expect("a file");
        assert!(text.contains(r#""state":"loading""#) && text.contains(r#""host":"node7""#), "{text}");
        let pid = fs::read_to_string(folder.join("pid")).expect("a file");
        assert_eq!(pid.trim(), std::process::id().to_string());
        drop(state);
        assert!(!folder.exists());
    }

    #[test]
    fn names_that_are_paths_are_refused() {
        for wrong in ["", ".", "..", ".x", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert_eq!(check(wrong).expect_err("refused").exit, Exit::Usage, "{wrong}");
        }
        assert!(check("node-7.example_1").is_ok());
    }
}
