//! Tombstones that survive a power cut. This machine's own hardware remembers a move, so that the
//! machine does not boot from disks that the destination uses by then. docs/migration.md gives the
//! reasons.
//!
//! A tombstone has one of two places: a variable of the firmware ([`firmware`]), or two blocks of a
//! local disk ([`disk`]) that `mercury tombstone --prepare` has made and whose position the initial RAM
//! disk knows. Both hold the same record ([`record`]). A starting system reads it before it touches
//! any other disk or the network ([`boot`]), if its initial RAM disk has the package's script
//! ([`initramfs`]). [`Tombstones`] is the source's handle, with all that it needs open.

pub mod boot;
pub mod command;
pub mod disk;
pub mod firmware;
pub mod initramfs;
pub mod record;
pub mod when;

use disk::{Blocks, Spot};
use firmware::Variables;
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    monitor::is_guest,
    sysroot::Sysroot,
};
use mercury_migration::protocol::{Attempt, Tombstone};
use record::{Record, State};
use rustix::fs::{CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::{
    fmt, io,
    os::fd::{AsFd, OwnedFd},
};

/// The list of places on disks that `mercury tombstone --prepare` has made. A machine that moves has the
/// places of all hardware that it is on.
const SPOTS: &str = "etc/mercury/tombstone.places";
/// The hint for a machine without a place.
const WITHOUT: &str = "--without-tombstone moves without a tombstone: then make sure that this machine does \
    not start by itself when its power comes back";

/// What starts this machine after its power comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartedBy {
    /// The hardware itself, from the disks that it finds.
    Hardware,
    /// An operator of the host whose monitor runs this machine. Nothing would read a tombstone.
    Operator,
}

impl StartedBy {
    /// Returns what starts this machine.
    #[must_use]
    pub fn of_this_machine() -> Self {
        if is_guest() { Self::Operator } else { Self::Hardware }
    }
}

/// A place for a tombstone by name, for a process that reaches it by descriptors that are open
/// already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Named {
    /// A variable of the firmware.
    Firmware,
    /// Two blocks of the device with this name in /dev.
    Disk(String, [u64; 2]),
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Firmware => f.write_str("a variable of the firmware"),
            Self::Disk(device, _) => write!(f, "two blocks of /dev/{device}"),
        }
    }
}

/// A place for a tombstone, open.
#[derive(Debug)]
enum Place {
    Firmware(Variables),
    Disk(Blocks),
}

impl Place {
    fn read(&self) -> std::result::Result<Option<Record>, String> {
        match self {
            Self::Disk(blocks) => blocks.read(),
            Self::Firmware(variables) => match variables.read(firmware::TOMBSTONE) {
                Ok(None) => Ok(None),
                Ok(Some(bytes)) => {
                    let found = Record::unpack(&bytes)?;
                    found.map(Some).ok_or_else(|| "the variable holds other data".into())
                }
                Err(error) => Err(error.to_string()),
            },
        }
    }

    /// Writes a record. It survives a power cut when this returns.
    fn write(&self, record: &Record) -> std::result::Result<(), String> {
        let bytes = record.pack()?;
        let written = match self {
            Self::Disk(blocks) => blocks.write(&bytes),
            Self::Firmware(variables) => variables.write(firmware::TOMBSTONE, &bytes),
        };
        written.map_err(|error| error.to_string())?;
        match self.read()? {
            Some(found) if found == *record => Ok(()),
            _ => Err("the place does not hold the data that was written to it".into()),
        }
    }
}

/// Folders for looking up names when the root cannot be used: opened while everything runs.
#[derive(Debug, Default)]
pub struct Folders {
    variables: Option<Variables>,
}

impl Folders {
    /// Opens the folders that exist.
    #[must_use]
    pub fn open(sysroot: &Sysroot) -> Self {
        Self { variables: Variables::at(&sysroot.path(firmware::FOLDER)).ok() }
    }
}

/// A place that holds this machine's tombstone, and the tombstone.
#[derive(Debug)]
pub struct Tombstones {
    place: Place,
    named: Named,
    record: Record,
}

impl Tombstones {
    /// Chooses a place that works, and proves it by writing to it.
    ///
    /// # Errors
    ///
    /// Returns an error if there is none, or it holds another system's tombstone.
    pub fn choose(to: &str, sysroot: &Sysroot) -> Result<Self> {
        Self::first(to, sysroot, |tombstones| tombstones.write(Tombstone::Cleared))
    }

    /// Chooses a place, if a tombstone keeps anything from starting this machine.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no place and a tombstone is wanted.
    pub fn choose_against(starter: StartedBy, to: &str, sysroot: &Sysroot) -> Result<Option<Self>> {
        match starter {
            StartedBy::Hardware => Self::choose(to, sysroot).map(Some),
            StartedBy::Operator => Ok(None),
        }
    }

    /// Returns the first place that `works` and that no other tombstone occupies.
    fn first(
        to: &str,
        sysroot: &Sysroot,
        works: impl Fn(&mut Self) -> std::result::Result<(), String>,
    ) -> Result<Self> {
        let spots = spots(sysroot).map_err(|why| refusal(&why))?;
        let found = all(&spots, sysroot);
        let mut whys: Vec<String> = Vec::new();
        for (named, place) in found {
            let place = match place {
                Ok(place) => place,
                Err(why) => {
                    whys.push(format!("{named}: {why}"));
                    continue;
                }
            };
            let mut tombstones =
                Self { place, named, record: Record::new(Attempt([0; 16]), to, system(sysroot)) };
            tombstones.refuse_anothers()?;
            match works(&mut tombstones) {
                Ok(()) => {
                    initramfs::refuse_blind(&tombstones.named, &spots, sysroot)?;
                    return Ok(tombstones);
                }
                Err(why) => whys.push(format!("{}: {why}", tombstones.named)),
            }
        }
        if whys.is_empty() {
            whys.push(
                "the kernel reaches no variables of the firmware (no UEFI), and no place on a local disk \
                 was prepared"
                    .into(),
            );
        }
        Err(refusal(&whys.join("; ")))
    }

    /// Sets the attempt of the tombstone from now on.
    #[must_use]
    pub fn of(mut self, attempt: Attempt) -> Self {
        self.record.attempt = attempt.to_string();
        self
    }

    /// Notes in the tombstone if disks go with the system.
    #[must_use]
    pub fn with_disks(mut self, disks_go: bool) -> Self {
        self.record.disks_went = disks_go;
        self
    }

    /// Writes the tombstone. It survives a power cut when this returns.
    ///
    /// # Errors
    ///
    /// Returns the reason if this is uncertain. The tombstone may be there anyway.
    pub fn write(&mut self, tombstone: Tombstone) -> std::result::Result<(), String> {
        self.record.state = State::from(tombstone);
        self.record.at = when::now();
        self.record.number += 1;
        self.place.write(&self.record)
    }

    /// Returns true if the place holds this state.
    #[must_use]
    pub fn says(&self, tombstone: Tombstone) -> bool {
        let found = self.place.read().ok().flatten();
        found.is_some_and(|found| {
            found.attempt == self.record.attempt && found.state == State::from(tombstone)
        })
    }

    /// Returns the tombstone for another process that has to write it.
    #[must_use]
    pub fn standing(&self) -> Standing {
        Standing { named: self.named.clone(), record: self.record.clone() }
    }

    /// Refuses a tombstone that forbids another system to start. One of this system's own is over,
    /// because the system runs.
    fn refuse_anothers(&mut self) -> Result<()> {
        let Ok(Some(found)) = self.place.read() else { return Ok(()) };
        self.record.number = found.number;
        if !found.forbids() || found.system == self.record.system {
            return Ok(());
        }
        Err(Error::new(
            Exit::Impossible,
            format!(
                "this hardware has the tombstone of another system, which has moved to {} ({})",
                found.to,
                found.when()
            ),
        )
        .hint("if that system will never start here: `mercury tombstone --clear`"))
    }
}

/// A tombstone, for a process that has the folders open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    named: Named,
    record: Record,
}

impl Standing {
    /// Opens its place, without looking up a name from the root.
    ///
    /// # Errors
    ///
    /// Returns an error if the place cannot be opened.
    pub fn open(&self, folders: &Folders, devices: Option<&OwnedFd>) -> io::Result<Tombstones> {
        let place = match &self.named {
            Named::Firmware => {
                let variables = folders.variables.as_ref().ok_or(io::ErrorKind::NotFound)?;
                Place::Firmware(variables.again()?)
            }
            Named::Disk(device, offsets) => {
                let devices = devices.ok_or(io::ErrorKind::NotFound)?;
                Place::Disk(Blocks::open(devices, device, *offsets)?)
            }
        };
        let mut record = self.record.clone();
        // Another process may have written the tombstone since.
        if let Ok(Some(found)) = place.read() {
            record.number = record.number.max(found.number);
        }
        Ok(Tombstones { place, named: self.named.clone(), record })
    }
}

/// Refuses a machine without a place for a tombstone that it wants, as far as this shows without writing to
/// one.
///
/// # Errors
///
/// Returns an error with the reason why there is none.
pub fn refuse_placeless(starter: StartedBy, sysroot: &Sysroot) -> Result<()> {
    match starter {
        StartedBy::Hardware => Tombstones::first("", sysroot, |_| Ok(())).map(drop),
        StartedBy::Operator => Ok(()),
    }
}

fn refusal(why: &str) -> Error {
    Error::coded(
        Code::NoPlaceForTombstone,
        format!(
            "there is no place for a tombstone that keeps this machine from starting after a power cut \
             while it runs at the destination: {why}"
        ),
    )
}

/// Returns the prepared places on disks.
fn spots(sysroot: &Sysroot) -> std::result::Result<Vec<Spot>, String> {
    let Some(text) = sysroot.bytes(SPOTS) else { return Ok(Vec::new()) };
    serde_json::from_slice(&text).map_err(|error| format!("/{SPOTS}: {error}"))
}

/// Returns all places of this machine, each with the reason if it cannot be used. A place on a disk
/// of other hardware is not listed.
fn all(spots: &[Spot], sysroot: &Sysroot) -> Vec<(Named, std::result::Result<Place, String>)> {
    let mut found = Vec::new();
    match Variables::of_this_machine(&sysroot.path("")) {
        Ok(None) => {}
        Ok(Some(variables)) => found.push((Named::Firmware, Ok(Place::Firmware(variables)))),
        Err(error) => found.push((Named::Firmware, Err(error.to_string()))),
    }
    let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
    let Ok(devices) = rustix::fs::openat(CWD, sysroot.path("dev"), flags, Mode::empty()) else {
        return found;
    };
    for spot in spots {
        let Ok(device) = spot.device(sysroot) else { continue };
        let place = Blocks::open(devices.as_fd(), &device, spot.offsets).map_err(|error| error.to_string());
        let place = place.and_then(|blocks| match blocks.read()? {
            Some(_) => Ok(Place::Disk(blocks)),
            // The blocks may belong to another file now.
            None => Err(format!("{} is not at its position any more; prepare it again", spot.file)),
        });
        found.push((Named::Disk(device, spot.offsets), place));
    }
    found
}

/// Returns the identity of this system for tombstones. A system without one counts as any.
fn system(sysroot: &Sysroot) -> Option<String> {
    let id = sysroot.text("etc/machine-id")?;
    let id = id.trim();
    if id.len() != 32 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let hash = blake3::derive_key("mercury 2026-11 the system that a tombstone is of", id.as_bytes());
    Some(hash[..16].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Clears this system's tombstones on this hardware, because this machine has arrived on it and
/// runs here. Another system that has moved away from this hardware runs elsewhere: its tombstone
/// stays. Returns the failures.
#[must_use]
pub fn clear_here(sysroot: &Sysroot) -> Vec<String> {
    let spots = spots(sysroot).unwrap_or_default();
    let own = system(sysroot);
    let mut failed = Vec::new();
    for (named, place) in all(&spots, sysroot) {
        let Ok(place) = place else { continue };
        if let Ok(Some(found)) = place.read()
            && found.system.is_some()
            && own.is_some()
            && found.system != own
        {
            continue;
        }
        if let Err(why) = clear(&place) {
            failed.push(format!(
                "the tombstone of an earlier move cannot be cleared ({named}: {why}): this machine will \
                 not start here by itself; `mercury tombstone --clear` tries again"
            ));
        }
    }
    failed
}

/// Clears a place. Returns true if there was a tombstone.
fn clear(place: &Place) -> std::result::Result<bool, String> {
    let mut record = match place.read() {
        Ok(Some(found)) if found.forbids() => found,
        Ok(_) => return Ok(false),
        // A damaged tombstone keeps the machine from starting, too.
        Err(_) => Record::new(Attempt([0; 16]), "", None),
    };
    record.state = State::Cleared;
    record.at = when::now();
    record.number = record.number.saturating_add(1);
    place.write(&record).map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    const ATTEMPT: Attempt = Attempt([7; 16]);

    /// Makes a machine with firmware variables, whose initial RAM disk has run the check.
    fn machine(id: &str) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, text).expect("a file");
        };
        put("etc/machine-id", id);
        // The file keeps the code from mounting efivarfs.
        put(&format!("{}/BootOrder-x", firmware::FOLDER), "");
        put(initramfs::CHECKED, &initramfs::digest(&[]));
        let sysroot = Sysroot::at(root.path());
        (root, sysroot)
    }

    fn variable(root: &Path) -> Record {
        let bytes = fs::read(root.join(firmware::FOLDER).join(firmware::TOMBSTONE)).expect("a variable");
        Record::unpack(&bytes[4..]).expect("whole").expect("a tombstone")
    }

    const ONE: &str = "00112233445566778899aabbccddeeff\n";

    #[test]
    fn a_move_is_marked() {
        let (root, sysroot) = machine(ONE);
        let mut tombstones = Tombstones::choose("b:4747", &sysroot).expect("a place").of(ATTEMPT);
        assert_eq!(variable(root.path()).state, State::Cleared, "that it can be written is shown before");
        assert!(!tombstones.says(Tombstone::Committed));
        tombstones.write(Tombstone::Committed).expect("written");
        assert!(tombstones.says(Tombstone::Committed) && !tombstones.says(Tombstone::Cleared));
        let found = variable(root.path());
        assert_eq!((found.attempt, found.to.as_str()), (ATTEMPT.to_string(), "b:4747"));
        assert_eq!(found.system, system(&sysroot));
        assert!(!found.disks_went);
        // The undo process writes on from where the source was, and its record counts.
        let standing = serde_json::to_string(&tombstones.standing()).expect("JSON");
        let standing: Standing = serde_json::from_str(&standing).expect("a tombstone");
        let mut guards = standing.open(&Folders::open(&sysroot), None).expect("open");
        assert!(guards.says(Tombstone::Committed));
        guards.write(Tombstone::Cleared).expect("written");
        let mut with_disks = tombstones.with_disks(true);
        with_disks.write(Tombstone::Committed).expect("written");
        assert!(variable(root.path()).disks_went);
        guards.write(Tombstone::Cleared).expect("written");
        assert_eq!(variable(root.path()).state, State::Cleared);
        assert!(variable(root.path()).number > found.number);
    }

    #[test]
    fn an_arrival_clears_its_own_tombstone() {
        let (root, sysroot) = machine(ONE);
        assert!(clear_here(&sysroot).is_empty());
        assert!(!root.path().join(firmware::FOLDER).join(firmware::TOMBSTONE).exists(), "there was none");
        let mut tombstones = Tombstones::choose("b", &sysroot).expect("a place").of(ATTEMPT);
        tombstones.write(Tombstone::GivenUp).expect("written");
        assert!(variable(root.path()).forbids());
        assert!(clear_here(&sysroot).is_empty());
        assert!(!variable(root.path()).forbids());
        // A damaged tombstone would keep the machine from starting just the same.
        fs::write(
            root.path().join(firmware::FOLDER).join(firmware::TOMBSTONE),
            b"\x07\0\0\0MERCURY-MOVED-1\0",
        )
        .expect("a file");
        assert!(clear_here(&sysroot).is_empty());
        assert!(!variable(root.path()).forbids());
    }

    /// Another system's tombstone is not written over.
    #[test]
    fn a_tombstone_of_another_system_stays() {
        let (root, sysroot) = machine(ONE);
        Tombstones::choose("b", &sysroot).expect("a place").write(Tombstone::GivenUp).expect("written");
        // A tombstone of this system is over, because the system runs.
        Tombstones::choose("c", &sysroot).expect("a place").write(Tombstone::GivenUp).expect("written");
        fs::write(root.path().join("etc/machine-id"), ONE.replace('0', "1")).expect("a file");
        let error = Tombstones::choose("d", &sysroot).expect_err("refused");
        assert!(error.message.contains("another system, which has moved to c"), "{error}");
        assert!(variable(root.path()).forbids());
        // Nor is it cleared when this system arrives: that one may run elsewhere.
        assert!(clear_here(&sysroot).is_empty());
        assert!(variable(root.path()).forbids());
        // Its own arrival ends it.
        fs::write(root.path().join("etc/machine-id"), ONE).expect("a file");
        assert!(clear_here(&sysroot).is_empty());
        assert!(!variable(root.path()).forbids());
    }

    #[test]
    fn a_move_without_a_checked_place_is_refused() {
        let (root, sysroot) = machine(ONE);
        fs::remove_file(root.path().join(initramfs::CHECKED)).expect("gone");
        let error = Tombstones::choose("b", &sysroot).expect_err("no check at a start");
        assert!(error.message.contains("initial RAM disk"), "{error}");
        fs::remove_dir_all(root.path().join("sys")).expect("gone");
        let error = Tombstones::choose("b", &sysroot).expect_err("no place");
        assert!(error.message.contains("no UEFI"), "{error}");
        fs::create_dir_all(root.path().join("etc/mercury")).expect("a folder");
        fs::write(root.path().join(SPOTS), "[").expect("a file");
        assert!(Tombstones::choose("b", &sysroot).is_err());
    }

    /// The firmware cannot be called in a guest, so a guest on UEFI has no place.
    #[test]
    fn a_guest_needs_no_place() {
        let (root, sysroot) = machine(ONE);
        fs::remove_dir_all(root.path().join("sys")).expect("gone");
        for (starter, is_refused) in [(StartedBy::Hardware, true), (StartedBy::Operator, false)] {
            assert_eq!(refuse_placeless(starter, &sysroot).is_err(), is_refused);
            assert_eq!(Tombstones::choose_against(starter, "b", &sysroot).is_err(), is_refused);
        }
        let (root, sysroot) = machine(ONE);
        let none = Tombstones::choose_against(StartedBy::Operator, "b", &sysroot).expect("not refused");
        assert!(none.is_none() && !root.path().join(firmware::FOLDER).join(firmware::TOMBSTONE).exists());
        let one = Tombstones::choose_against(StartedBy::Hardware, "b", &sysroot).expect("not refused");
        assert!(one.is_some());
    }

    #[test]
    fn systems_without_an_identity_have_none() {
        for id in ["", "uninitialized\n", "0011"] {
            assert_eq!(system(&machine(id).1), None);
        }
        let id = system(&machine(ONE).1).expect("one");
        assert!(id.len() == 32 && id != ONE.trim());
    }
}
