//! Machines that are asleep: where they are, and since when.
//!
//! A machine is in a file if three things are true: `asleep.json` in its folder names the file, no process
//! has the folder's lock, and `void` does not have the file's life. A machine that goes on writes that life
//! to `void` first ([`mercury_hosted::fork`]). So what is left after any process was killed is the machine or
//! its file, and never both.
//!
//! The template writes `falling.json` before it has a file made. So the file is known to all that clean up,
//! whatever is killed meanwhile.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use mercury_guests::Name;
use mercury_hosted::saved::Life;
use serde::{Deserialize, Serialize};

use super::folder::{ASLEEP, FALLING, Folder, VOID};

/// A machine in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asleep {
    pub name: Name,
    pub template: Name,
    /// The number that it has among the template's machines.
    #[serde(default)]
    pub number: u32,
    pub file: PathBuf,
    /// The number by which the file is known.
    pub life: Life,
    /// The ports that led to it.
    pub forward: Vec<String>,
    /// The memory of its own that it had.
    pub own_bytes: u64,
    /// The size that it is to have, if its user has chosen one: the pages in its balloon.
    pub balloon_pages: u32,
    /// True if it was at work, and comes back when the host has memory.
    #[serde(default)]
    pub at_work: bool,
    /// The time at which it fell asleep, in seconds since 1970.
    pub since: u64,
}

impl Folder {
    /// Returns the file that counts if no process has the machine.
    ///
    /// # Errors
    /// If the machine's folder cannot be read.
    pub fn file_of(&self, name: &Name) -> io::Result<Option<Asleep>> {
        let Some(asleep) = self.named_file(name)? else { return Ok(None) };
        Ok(if self.has_left(name, &asleep.life)? { None } else { Some(asleep) })
    }

    /// Returns the file that the machine's folder names, whether it counts or not.
    ///
    /// # Errors
    /// If the machine's folder cannot be read.
    pub fn named_file(&self, name: &Name) -> io::Result<Option<Asleep>> {
        self.read_asleep(name, ASLEEP)
    }

    fn read_asleep(&self, name: &Name, file: &str) -> io::Result<Option<Asleep>> {
        match fs::read(self.of(name).join(file)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            text => Ok(Some(serde_json::from_slice(&text?)?)),
        }
    }

    /// Returns the machine if it is asleep.
    ///
    /// # Errors
    /// If the machine's folder cannot be read.
    pub fn asleep(&self, name: &Name) -> io::Result<Option<Asleep>> {
        // In this order: a machine that wakes has the lock, then makes the file void, and then may end.
        let file = self.file_of(name)?;
        Ok(if file.is_some() && !self.lives(name)? { self.file_of(name)? } else { None })
    }

    /// Returns all machines that are asleep, by name.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn all_asleep(&self) -> io::Result<Vec<Asleep>> {
        self.names()?.iter().filter_map(|name| self.asleep(name).transpose()).collect()
    }

    /// Writes where a machine is.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_asleep(&self, asleep: &Asleep) -> io::Result<()> {
        self.write_as(asleep, ASLEEP)?;
        let _ = fs::remove_file(self.of(&asleep.name).join(FALLING));
        Ok(())
    }

    /// Says that a machine's file is about to be made.
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn announce_file(&self, asleep: &Asleep) -> io::Result<()> {
        self.write_as(asleep, FALLING)
    }

    /// Takes back what [`Self::announce_file`] has said, before a file was made.
    pub fn retract_file(&self, asleep: &Asleep) {
        let _ = fs::remove_file(self.of(&asleep.name).join(FALLING));
    }

    fn write_as(&self, asleep: &Asleep, file: &str) -> io::Result<()> {
        let (new, folder) = ("asleep.new", self.of(&asleep.name));
        fs::write(folder.join(new), serde_json::to_vec(asleep)?)?;
        fs::rename(folder.join(new), folder.join(file))
    }

    /// Removes the file that was announced, and the part of it, unless the machine's folder names it by now.
    pub fn remove_attempt(&self, asleep: &Asleep) {
        let is_named = |named: Option<Asleep>| named.is_some_and(|named| named.life == asleep.life);
        if self.named_file(&asleep.name).map(is_named).unwrap_or(true) {
            return;
        }
        for path in [&asleep.file, &part_of(&asleep.file)] {
            let _ = fs::remove_file(path);
        }
        if self.read_asleep(&asleep.name, FALLING).is_ok_and(is_named) {
            self.retract_file(asleep);
        }
    }

    /// Removes files of this user's machines that slept when the host went down. Returns how many there were.
    /// Such a machine cannot wake ([`mercury_hosted::saved`]), and no machine's folder names its file: those
    /// folders were in memory.
    ///
    /// # Errors
    /// If a folder cannot be read, or a file cannot be removed.
    pub fn remove_lost_files(&self, sleep_in: &Path, host_started: SystemTime) -> io::Result<usize> {
        let mut named = Vec::new();
        for name in self.names()? {
            named.extend(self.named_file(&name)?);
            named.extend(self.read_asleep(&name, FALLING)?);
        }
        let user = rustix::process::geteuid().as_raw();
        let mut removed = 0;
        for entry in fs::read_dir(sleep_in)?.flatten() {
            let (path, about) = (entry.path(), entry.metadata()?);
            if about.is_file()
                && about.uid() == user
                && path.extension().is_some_and(|extension| extension == "asleep")
                && about.modified()? < host_started
                && named.iter().all(|one| one.file != path)
            {
                fs::remove_file(path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Ends what an earlier process of a template has left undone. A whole file is the machine if no process
    /// has the machine. Others go, and so do those of machines that have gone on.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn end_attempts(&self, template: &Name) -> io::Result<()> {
        let of_template = |asleep: &Asleep| asleep.template == *template;
        for name in self.names()? {
            if let Some(asleep) = self.named_file(&name).ok().flatten().filter(of_template)
                && self.has_left(&name, &asleep.life).unwrap_or(false)
            {
                self.forget_file(&asleep);
            }
            let announced = self.read_asleep(&name, FALLING).ok().flatten();
            if let Some(attempt) = announced.filter(of_template) {
                // If nobody knows what the machine is, its file stays.
                let _ = self.end_attempt(&attempt);
            }
        }
        Ok(())
    }

    fn end_attempt(&self, attempt: &Asleep) -> io::Result<()> {
        let name = &attempt.name;
        if attempt.file.exists()
            && !self.lives(name)?
            && let Some(_lock) = self.claim_asleep(name)?
            && !self.has_left(name, &attempt.life)?
        {
            self.write_asleep(attempt)?;
        }
        self.remove_attempt(attempt);
        Ok(())
    }

    /// Opens the file in a machine's folder for the life that is void. It has the length of a life, so that
    /// the machine can always write there, however full the file system is then.
    ///
    /// # Errors
    /// If the file system has no room.
    pub fn open_mark(&self, name: &Name) -> io::Result<File> {
        let path = self.of(name).join(VOID);
        let mark =
            File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)?;
        if mark.metadata()?.len() < size_of::<Life>() as u64 {
            mark.write_all_at(&[0; size_of::<Life>()], 0)?;
        }
        Ok(mark)
    }

    /// Removes a machine's file that does not count any more.
    pub fn forget_file(&self, asleep: &Asleep) {
        let _ = fs::remove_file(&asleep.file);
        // It may name a later file.
        if self.named_file(&asleep.name).is_ok_and(|named| named.is_none_or(|one| one.life == asleep.life)) {
            let _ = fs::remove_file(self.of(&asleep.name).join(ASLEEP));
        }
    }

    /// Removes the files that a machine's folder names or announces, and that do not count.
    pub(super) fn remove_void_files(&self, name: &Name) {
        if let Ok(Some(asleep)) = self.named_file(name)
            && self.has_left(name, &asleep.life).unwrap_or(false)
        {
            let _ = fs::remove_file(asleep.file);
        }
        if let Ok(Some(attempt)) = self.read_asleep(name, FALLING) {
            self.remove_attempt(&attempt);
        }
    }

    /// Returns true if the file with this life does not count.
    ///
    /// # Errors
    /// If the machine's folder cannot be read. Both the file and the machine may count then.
    pub fn has_left(&self, name: &Name, life: &Life) -> io::Result<bool> {
        match fs::read(self.of(name).join(VOID)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            void => Ok(void? == life),
        }
    }
}

/// Returns the time at which the host has started.
pub fn host_start() -> SystemTime {
    let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let up = Duration::new(up.tv_sec.cast_unsigned(), u32::try_from(up.tv_nsec).unwrap_or_default());
    SystemTime::now() - up
}

/// Returns the name that a machine's file has until it is whole.
pub fn part_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asleep(folder: &Path) -> Asleep {
        Asleep {
            number: 1,
            name: "web-1".parse().unwrap(),
            template: "web".parse().unwrap(),
            file: folder.join("file"),
            life: [7; 16],
            forward: vec!["8080:80".into()],
            own_bytes: 5,
            balloon_pages: 0,
            at_work: false,
            since: 0,
        }
    }

    /// A machine can always write that a file is void.
    #[test]
    fn a_mark_has_its_room_from_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let name: Name = "web-1".parse().unwrap();
        let _lock = folder.claim(&name).unwrap().unwrap();
        let void = || fs::read(folder.of(&name).join(VOID)).unwrap();
        let mark = folder.open_mark(&name).unwrap();
        assert_eq!(void(), [0; 16]);
        mark.write_all_at(&[7; 16], 0).unwrap();
        drop(folder.open_mark(&name).unwrap());
        assert_eq!(void(), [7; 16], "what is void stays so");
    }

    #[test]
    fn a_later_file_is_not_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let (one, file) = (asleep(directory.path()), directory.path().join("later"));
        let later = Asleep { life: [8; 16], file, ..one.clone() };
        let _lock = folder.claim(&one.name).unwrap().unwrap();
        folder.write_asleep(&later).unwrap();
        folder.forget_file(&one);
        assert_eq!(folder.file_of(&one.name).unwrap(), Some(later.clone()));
        folder.forget_file(&later);
        assert_eq!(folder.named_file(&one.name).unwrap(), None);
    }

    #[test]
    fn files_of_an_earlier_start_of_the_host_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let paths =
            ["lost.asleep", "named.asleep", "new.asleep", "image"].map(|name| directory.path().join(name));
        let files = paths.each_ref().map(|path| File::create(path).unwrap());
        let started = host_start();
        for (file, at) in files.iter().zip([1, 1, 3, 1]) {
            file.set_modified(started + Duration::from_secs(at)).unwrap();
        }
        let named = Asleep { file: paths[1].clone(), ..asleep(directory.path()) };
        let _lock = folder.claim(&named.name).unwrap().unwrap();
        folder.write_asleep(&named).unwrap();
        let later = started + Duration::from_secs(2);
        assert_eq!(folder.remove_lost_files(directory.path(), started).unwrap(), 0);
        assert_eq!(folder.remove_lost_files(directory.path(), later).unwrap(), 1);
        assert_eq!(paths.each_ref().map(|path| path.exists()), [false, true, true, true]);
    }

    /// Files are known before they are made, so none is left over, whatever is killed. One that is whole is
    /// the machine if nothing else is.
    #[test]
    fn a_file_is_not_left_over() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let one = asleep(directory.path());
        let paths = [one.file.clone(), part_of(&one.file)];
        let make = || paths.iter().for_each(|path| fs::write(path, "machine").unwrap());
        let are_there = || paths.each_ref().map(|path| path.exists());
        let [web, other] = ["web", "other"].map(|name| name.parse().unwrap());
        // The template was killed while it wrote a machine, which goes on.
        let lock = folder.claim(&one.name).unwrap().unwrap();
        folder.announce_file(&one).unwrap();
        make();
        folder.end_attempts(&other).unwrap();
        assert_eq!(are_there(), [true; 2], "another template's");
        folder.end_attempts(&web).unwrap();
        assert_eq!(are_there(), [false; 2]);
        assert!(!folder.of(&one.name).join(FALLING).exists() && folder.file_of(&one.name).unwrap().is_none());
        // The machine was killed as well, when its file was whole.
        folder.announce_file(&one).unwrap();
        fs::write(&one.file, "machine").unwrap();
        drop(lock);
        folder.end_attempts(&web).unwrap();
        assert_eq!(folder.asleep(&one.name).unwrap(), Some(one.clone()));
        assert!(!folder.of(&one.name).join(FALLING).exists());
        // It wakes, and the template is killed before it has removed the file.
        let lock = folder.claim_asleep(&one.name).unwrap().unwrap();
        fs::write(folder.of(&one.name).join(VOID), one.life).unwrap();
        folder.end_attempts(&web).unwrap();
        assert!(!one.file.exists() && folder.named_file(&one.name).unwrap().is_none());
        // It is told to end, while nobody knows of a file of which a part was written.
        let next = Asleep { life: [8; 16], ..one.clone() };
        folder.announce_file(&next).unwrap();
        make();
        drop(lock);
        folder.remove_ended(&one.name);
        assert_eq!((are_there(), folder.of(&one.name).exists()), ([false; 2], false));
        // A file that counts is no attempt.
        let _lock = folder.claim(&one.name).unwrap().unwrap();
        folder.write_asleep(&next).unwrap();
        make();
        folder.remove_attempt(&next);
        assert_eq!(are_there(), [true; 2]);
    }

    /// The machine's folder cannot be read: nobody knows if its file counts, so nothing is removed.
    #[test]
    fn a_mark_that_cannot_be_read_is_no_mark() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let one = asleep(directory.path());
        let lock = folder.claim(&one.name).unwrap().unwrap();
        folder.write_asleep(&one).unwrap();
        fs::write(&one.file, "machine").unwrap();
        fs::create_dir(folder.of(&one.name).join(VOID)).unwrap();
        drop(lock);
        assert!(folder.has_left(&one.name, &one.life).is_err() && folder.file_of(&one.name).is_err());
        assert!(folder.claim(&one.name).is_err());
        folder.end_attempts(&one.template).unwrap();
        let next = Asleep { life: [8; 16], file: directory.path().join("next"), ..one.clone() };
        folder.announce_file(&next).unwrap();
        fs::write(&next.file, "machine").unwrap();
        folder.end_attempts(&one.template).unwrap();
        assert!(one.file.exists() && next.file.exists());
    }

    /// Follows a machine through its lives, as processes leave the folder when they are killed.
    #[test]
    fn there_is_a_machine_or_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let one = asleep(directory.path());
        let lock = folder.claim(&one.name).unwrap().unwrap();
        assert_eq!(folder.asleep(&one.name).unwrap(), None);
        // The file is whole, and the machine stands still.
        folder.write_asleep(&one).unwrap();
        fs::write(&one.file, "machine").unwrap();
        assert_eq!(folder.asleep(&one.name).unwrap(), None, "the machine is what counts");
        // The machine has ended.
        drop(lock);
        assert_eq!(folder.all_asleep().unwrap(), std::slice::from_ref(&one));
        assert!(folder.claim(&one.name).unwrap().is_none(), "the name is taken");
        // It wakes, and its process is killed before it goes on.
        let lock = folder.claim_asleep(&one.name).unwrap().unwrap();
        assert_eq!(folder.asleep(&one.name).unwrap(), None);
        drop(lock);
        assert_eq!(folder.asleep(&one.name).unwrap(), Some(one.clone()));
        // It wakes and goes on, and is killed then.
        let lock = folder.claim_asleep(&one.name).unwrap().unwrap();
        fs::write(folder.of(&one.name).join(VOID), one.life).unwrap();
        drop(lock);
        assert!(folder.all_asleep().unwrap().is_empty() && folder.has_left(&one.name, &one.life).unwrap());
        // What counts no longer goes with the folder.
        folder.remove_ended(&one.name);
        assert!(!one.file.exists() && folder.claim(&one.name).unwrap().is_some());
    }
}
