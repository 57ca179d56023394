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
//! machines/NAME/falling.json  the file that is about to be written
//! machines/NAME/void          the life of a saved file that counts no longer
//! ```

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use mercury_guests::{
    Name,
    held::{self, is_locked, run_folder, take_lock},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

const STATUS: &str = "status.json";
/// The state before it has its name.
const NEW_STATUS: &str = "status.new";
pub const SOCKET: &str = "socket";
pub const LOG: &str = "log";
pub const CONSOLE_LOG: &str = "console.log";
pub const CONSOLE_INPUT: &str = "console.in";
pub const ASLEEP: &str = "asleep.json";
pub const FALLING: &str = "falling.json";
pub const VOID: &str = "void";
/// The files of a thing, besides its lock.
const FILES: [&str; 9] = [STATUS, NEW_STATUS, SOCKET, LOG, CONSOLE_LOG, CONSOLE_INPUT, ASLEEP, FALLING, VOID];

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
    /// The machines whose files its start has removed, because the host had restarted since they slept.
    #[serde(default)]
    pub lost_machines: usize,
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
        self.remove_void_files(name);
        for left in FILES {
            held::remove(&folder.join(left))?;
        }
        Ok(Some(lock))
    }

    /// Takes the folder of a new thing as [`Self::claim`] does, but does not wait for one that lives. Readers
    /// lock a folder for a moment, and a machine for its life.
    ///
    /// # Errors
    /// As for [`Self::claim`].
    pub fn claim_at_once(&self, name: &Name) -> io::Result<Option<File>> {
        if self.lives(name)? { Ok(None) } else { self.claim(name) }
    }

    /// Takes the folder of a machine that is asleep. Returns `None` if it lives.
    ///
    /// # Errors
    /// As for [`Self::claim`].
    pub fn claim_asleep(&self, name: &Name) -> io::Result<Option<File>> {
        take_lock(&self.of(name))
    }

    /// Takes the folder of a machine that has ended. Returns `None` if it lives, or is another machine's by
    /// now, with another first process.
    pub fn claim_ended(&self, name: &Name, pid: u32) -> Option<File> {
        let lock = take_lock(&self.of(name)).ok().flatten()?;
        let status = fs::read(self.of(name).join(STATUS)).ok()?;
        let status: MachineStatus = serde_json::from_slice(&status).ok()?;
        (status.pid == pid).then_some(lock)
    }

    /// Removes the folder of a thing that has ended, unless another one of its name lives or is asleep.
    pub fn remove_ended(&self, name: &Name) {
        if let Ok(Some(_lock)) = take_lock(&self.of(name))
            && self.file_of(name).is_ok_and(|file| file.is_none())
        {
            self.remove(name);
        }
    }

    /// Removes the folder of a thing, whose lock the caller has.
    pub fn remove(&self, name: &Name) {
        self.remove_void_files(name);
        let folder = self.of(name);
        for left in FILES.into_iter().chain([held::LOCK]) {
            let _ = held::remove(&folder.join(left));
        }
        let _ = fs::remove_dir(folder);
    }

    /// Makes room for the state of a thing that is about to begin. A state that is no longer can be written
    /// then, however full the file system is.
    ///
    /// # Errors
    /// If there is no room.
    pub fn make_room(&self, name: &Name, status: &impl Serialize) -> io::Result<()> {
        fs::write(self.of(name).join(NEW_STATUS), serde_json::to_vec(status)?)
    }

    /// Writes the state of a thing.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, name: &Name, status: &impl Serialize) -> io::Result<()> {
        let (new, text) = (self.of(name).join(NEW_STATUS), serde_json::to_vec(status)?);
        // The room that was made is used, and not given back first.
        let file = File::options().create(true).truncate(false).write(true).open(&new)?;
        file.write_all_at(&text, 0)?;
        file.set_len(text.len() as u64)?;
        fs::rename(new, self.of(name).join(STATUS))
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, Folder, Name) {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        (directory, folder, "web-1".parse().unwrap())
    }

    fn status(name: &Name, pid: u32) -> MachineStatus {
        let (name, template) = (name.clone(), "web".parse().unwrap());
        MachineStatus { name, template, number: 1, pid, is_detached: true, images: Vec::new(), since: 0 }
    }

    #[test]
    fn the_room_for_a_state_is_used() {
        let (_kept, folder, name) = folder();
        let _lock = folder.claim(&name).unwrap().unwrap();
        folder.make_room(&name, &status(&name, u32::MAX)).unwrap();
        let room = fs::metadata(folder.of(&name).join(NEW_STATUS)).unwrap().len();
        assert_eq!(folder.find::<MachineStatus>(&name).unwrap().map(|one| one.pid), None);
        folder.write(&name, &status(&name, 7)).unwrap();
        assert_eq!(folder.find::<MachineStatus>(&name).unwrap().unwrap().pid, 7);
        assert!(room > fs::metadata(folder.of(&name).join(STATUS)).unwrap().len());
    }

    #[test]
    fn the_folder_of_another_of_its_name_stays() {
        let (_kept, folder, name) = folder();
        let lock = folder.claim(&name).unwrap().unwrap();
        folder.write(&name, &status(&name, 7)).unwrap();
        folder.remove_ended(&name);
        assert!(
            folder.find::<MachineStatus>(&name).unwrap().is_some() && folder.claim_ended(&name, 7).is_none()
        );
        drop(lock);
        assert!(folder.claim_ended(&name, 8).is_none() && folder.claim_ended(&name, 7).is_some());
        folder.remove_ended(&name);
        assert!(!folder.of(&name).exists());
    }

    /// Machines outlive their template. A new one finds their names taken.
    #[test]
    fn names_of_machines_that_live_cost_no_time() {
        let (_kept, folder, _) = folder();
        let name = |number: u32| -> Name { format!("web-{number}").parse().unwrap() };
        let _locks: Vec<File> = (0..40).map(|number| folder.claim(&name(number)).unwrap().unwrap()).collect();
        let begun = std::time::Instant::now();
        assert!((0..40).all(|number| folder.claim_at_once(&name(number)).unwrap().is_none()));
        assert!(begun.elapsed() < std::time::Duration::from_secs(1), "{:?}", begun.elapsed());
        assert!(folder.claim_at_once(&name(40)).unwrap().is_some());
    }
}
