//! The folders of templates and machines: `/run/mercury/disco`, and `$XDG_RUNTIME_DIR/mercury/disco` for
//! users.
//!
//! ```text
//! templates/NAME/lock         locked as long as the template lives
//! templates/NAME/socket       takes requests for machines
//! templates/NAME/log          the template's own messages
//! templates/NAME/status.json  the template's state
//! machines/NAME/lock          locked as long as the machine lives
//! machines/NAME/status.json   the machine's state
//! machines/NAME/console.log   what a machine in the background has printed
//! machines/NAME/console.in    what it reads, a pipe
//! machines/NAME/asleep.json   where the machine is if no process has it ([`super::asleep`])
//! machines/NAME/void          the life of a saved file that counts no longer
//! ```

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use mercury_guests::{
    Name,
    held::{self, is_locked, run_folder, take_lock},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

const STATUS: &str = "status.json";
pub const SOCKET: &str = "socket";
pub const LOG: &str = "log";
pub const CONSOLE_LOG: &str = "console.log";
pub const CONSOLE_INPUT: &str = "console.in";
pub const ASLEEP: &str = "asleep.json";
pub const VOID: &str = "void";
/// The files of a thing, besides its lock.
const FILES: [&str; 7] = [STATUS, SOCKET, LOG, CONSOLE_LOG, CONSOLE_INPUT, ASLEEP, VOID];

/// The image of a disk in machines' memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageStatus {
    pub file: PathBuf,
    /// The number by which the host's kernel knows the file.
    pub inode: u64,
}

/// The state of a template.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TemplateStatus {
    pub name: Name,
    pub pid: u32,
    /// The file from which it was made.
    pub file: PathBuf,
    /// The size of its memory.
    pub memory_bytes: u64,
    /// The images of disks in its memory.
    pub images: Vec<ImageStatus>,
    /// Its start, in seconds since 1970.
    pub since: u64,
}

/// The state of a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineStatus {
    pub name: Name,
    pub template: Name,
    /// A number that no other machine of the template has.
    #[serde(default)]
    pub number: u32,
    /// The first process of the machine.
    pub pid: u32,
    /// True if its console is in the folder.
    pub is_detached: bool,
    /// The images of disks in its memory.
    pub images: Vec<ImageStatus>,
    /// Its start, in seconds since 1970.
    pub since: u64,
}

/// The folder of one kind of things, each with a folder of its name.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    #[must_use]
    pub fn templates() -> Self {
        Self(run_folder().join("disco/templates"))
    }

    #[must_use]
    pub fn machines() -> Self {
        Self(run_folder().join("disco/machines"))
    }

    /// Returns a folder at a path.
    #[cfg(test)]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    #[must_use]
    pub fn of(&self, name: &Name) -> PathBuf {
        self.0.join(name.as_str())
    }

    /// Takes the folder of a new thing, and removes what an earlier one has left. Returns `None` if one of
    /// this name lives or is asleep. The lock is held as long as the file is open in any process.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn claim(&self, name: &Name) -> io::Result<Option<File>> {
        let folder = self.of(name);
        let Some(lock) = take_lock(&folder)? else { return Ok(None) };
        if self.file_of(name)?.is_some() {
            return Ok(None);
        }
        for left in FILES {
            held::remove(&folder.join(left))?;
        }
        Ok(Some(lock))
    }

    /// Takes the folder of a machine that is asleep. Returns `None` if it lives.
    ///
    /// # Errors
    /// As for [`Self::claim`].
    pub fn claim_asleep(&self, name: &Name) -> io::Result<Option<File>> {
        take_lock(&self.of(name))
    }

    /// Removes the folder of a thing, whose lock the caller has or nobody.
    pub fn remove(&self, name: &Name) {
        let folder = self.of(name);
        for left in FILES.into_iter().chain([held::LOCK]) {
            let _ = held::remove(&folder.join(left));
        }
        let _ = fs::remove_dir(folder);
    }

    /// Writes the state of a thing.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, name: &Name, status: &impl Serialize) -> io::Result<()> {
        let (new, folder) = ("status.new", self.of(name));
        fs::write(folder.join(new), serde_json::to_vec(status)?)?;
        fs::rename(folder.join(new), folder.join(STATUS))
    }

    /// Returns the state of a thing that lives.
    ///
    /// # Errors
    /// If its folder cannot be read.
    pub fn find<T: DeserializeOwned>(&self, name: &Name) -> io::Result<Option<T>> {
        let folder = self.of(name);
        if !is_locked(&folder)? {
            return Ok(None);
        }
        match fs::read(folder.join(STATUS)) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            // It begins or ends at this moment.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns true if the thing lives.
    ///
    /// # Errors
    /// If its folder cannot be read.
    pub fn lives(&self, name: &Name) -> io::Result<bool> {
        is_locked(&self.of(name))
    }

    /// Returns the largest number of a template's machines that have left their state here, whether they live
    /// or not.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn largest_number(&self, template: &Name) -> io::Result<u32> {
        let status = |name: &Name| -> Option<MachineStatus> {
            serde_json::from_slice(&fs::read(self.of(name).join(STATUS)).ok()?).ok()
        };
        let all = self.names()?;
        let of_template = all.iter().filter_map(status).filter(|status| status.template == *template);
        Ok(of_template.map(|status| status.number).max().unwrap_or(0))
    }

    /// Returns all names in the folder, in order.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn names(&self) -> io::Result<Vec<Name>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names: Vec<Name> =
            entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// Returns the states of all things that live, by name.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn living<T: DeserializeOwned>(&self) -> io::Result<Vec<T>> {
        self.names()?.iter().filter_map(|name| self.find(name).transpose()).collect()
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}
