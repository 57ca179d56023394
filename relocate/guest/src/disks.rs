//! The machine's own disks on NVMe and AHCI, whose contents an operator gives. The kernel finds each of them
//! at its old place, under its old name.
//!
//! Everything is checked before the guest starts. A file system that was mounted must be on a given disk,
//! and must be as the instant left it.

pub(crate) mod ahci;
pub(crate) mod nvme;

use crate::platform::place;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::bytes,
};
use mercury_controllers::{
    ahci::{Drive, Properties},
    disk::RawDisk,
    nvme::{Identity, Limits, Namespace},
    pci::Function,
};
use mercury_image::{Device, FileSystem, Machine, SwapArea};
use mercury_quiesce::{block_devices::ReadAt, disks::fingerprint_elsewhere};
use std::{
    collections::BTreeSet,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// Name of the kernel's driver of controllers on AHCI.
const DRIVER_OF_AHCI: &str = "ahci";

/// The reason against a controller that Intel's VMD hides, or that has a host bridge of its own.
const NO_PLACE: &str = "it is not in PCI's first domain (0000), which is the only one that a guest has; \
                        switch VMD off in the firmware's setup";

/// The content of a disk, given for the machine's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnDisk {
    /// Name that the machine's kernel has for the disk.
    pub name: String,
    /// A raw image or a block device.
    pub path: PathBuf,
    /// True if the guest only reads it.
    pub read_only: bool,
    /// True if the content arrives with the machine, and is compared then.
    pub arrives: bool,
}

/// A disk whose content is open.
#[derive(Debug)]
pub(crate) struct Opened<'a> {
    given: &'a OwnDisk,
    file: File,
    bytes: u64,
}

/// A controller that the guest will find at its place.
#[derive(Debug)]
pub struct Controller {
    /// Address of the PCI device.
    pub address: String,
    /// The PCI device.
    pub function: Function,
    /// What the driver finds there.
    pub kind: Kind,
}

/// The kind of a controller, with its disks.
#[derive(Debug)]
pub enum Kind {
    Nvme {
        /// What the controller says of itself.
        identity: Identity,
        /// Its disks.
        namespaces: Vec<Namespace>,
        /// Its limits.
        limits: Limits,
    },
    Ahci {
        properties: Properties,
        /// Its disks, by the numbers of their ports.
        drives: Vec<(usize, Drive)>,
        /// Global system interrupt, if it does without messages.
        line: Option<u32>,
    },
}

/// The machine's own disks, and the reasons against them.
#[derive(Debug, Default)]
pub struct Plan {
    /// Controllers with the disks that were given.
    pub controllers: Vec<Controller>,
    /// Reasons for which the machine cannot go on with these disks.
    pub reasons: Vec<String>,
    /// The open contents once more: each is locked as long as one of both is open.
    pub locks: Vec<File>,
}

impl Plan {
    /// Opens the contents, and compares them with the image. `taken` is where the guest has memory, and `end`
    /// the end of its addresses.
    ///
    /// # Errors
    /// A content cannot be opened, or is for no disk of the machine.
    pub fn of(machine: &Machine, own: &[OwnDisk], taken: &[Range<u64>], end: u64) -> Result<Self> {
        let opened = open(machine, own)?;
        let mut plan = Self { locks: locks(&opened)?, ..Self::default() };
        let content = |name: &str| {
            let one = given(&opened, name)?;
            Some(one as &dyn ReadAt)
        };
        let arrives = |name: &str| given(&opened, name).is_some_and(|one| one.given.arrives);
        let reasons =
            machine.file_systems.iter().filter_map(|one| obstacle(one, machine, &content, &arrives));
        plan.reasons.extend(reasons);
        plan.reasons.extend(machine.swap.iter().filter_map(|one| absent_swap(one, machine, &content)));
        for theirs in &machine.nvme {
            let planned = nvme::plan(machine, theirs, &opened);
            plan.add(&theirs.name, &theirs.address, planned, taken, end);
        }
        for theirs in &machine.ahci {
            let planned = ahci::plan(machine, theirs, &opened);
            plan.add(DRIVER_OF_AHCI, &theirs.address, planned, taken, end);
        }
        Ok(plan)
    }

    /// Adds a controller, or the reason against it. One without disks that were given is none.
    fn add(
        &mut self,
        name: &str,
        address: &str,
        planned: Option<std::result::Result<Controller, String>>,
        taken: &[Range<u64>],
        end: u64,
    ) {
        let Some(planned) = planned else { return };
        let checked = planned.and_then(|controller| {
            if place(&controller.address).is_none() {
                return Err(NO_PLACE.into());
            }
            refuse_overlap(&controller.function, taken, end)?;
            Ok(controller)
        });
        match checked {
            Ok(controller) => self.controllers.push(controller),
            Err(why) => {
                self.reasons.push(format!("a guest cannot have its controller {name} ({address}): {why}"))
            }
        }
    }
}

/// A disk that the image names.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    name: &'a str,
    /// Model, serial number and size, as far as they are known.
    label: String,
}

fn open<'a>(machine: &Machine, given: &'a [OwnDisk]) -> Result<Vec<Opened<'a>>> {
    let mut names = BTreeSet::new();
    let mut all = Vec::new();
    for one in given {
        if !names.insert(&one.name) {
            return Err(Error::new(Exit::Usage, format!("--disk gives {} twice", one.name))
                .hint("name each disk of the machine once"));
        }
        if find(machine, &one.name).is_none() {
            let known: Vec<_> = disks(machine).map(|disk| disk.label).collect();
            let text = format!("the machine of the image has no disk {} on NVMe or AHCI", one.name);
            let hint = match known.as_slice() {
                [] => "its image names no such disk: make the checkpoint again with this release".into(),
                known => format!("its disks are {}", known.join(", ")),
            };
            return Err(Error::new(Exit::Impossible, text).hint(hint));
        }
        let (file, bytes) =
            mercury_devices::open_disk(&one.path, one.read_only).map_err(crate::run::failed)?;
        all.push(Opened { given: one, file, bytes });
    }
    Ok(all)
}

fn locks(opened: &[Opened<'_>]) -> Result<Vec<File>> {
    let locks = opened.iter().map(|one| one.file.try_clone());
    locks.collect::<io::Result<_>>().map_err(|error| {
        Error::new(Exit::Failed, format!("cannot keep the disks locked: {error}")).hint(crate::SHORT_OF)
    })
}

fn disks(machine: &Machine) -> impl Iterator<Item = Known<'_>> {
    machine.nvme.iter().flat_map(nvme::disks).chain(machine.ahci.iter().flat_map(ahci::disks))
}

fn find<'a>(machine: &'a Machine, name: &str) -> Option<Known<'a>> {
    disks(machine).find(|disk| disk.name == name)
}

/// Finds the content that was given for a disk.
fn given<'a>(opened: &'a [Opened<'a>], name: &str) -> Option<&'a Opened<'a>> {
    opened.iter().find(|one| one.given.name == name)
}

/// Returns the reason for which a file system could not go on.
fn obstacle<'a>(
    one: &FileSystem,
    machine: &Machine,
    content: &dyn Fn(&str) -> Option<&'a dyn ReadAt>,
    arrives: &dyn Fn(&str) -> bool,
) -> Option<String> {
    if one.goes_along {
        return None;
    }
    let FileSystem { mounted_at, device, .. } = one;
    let places = one.place.iter().chain(one.pieces.iter().filter_map(|piece| piece.place.as_ref()));
    let names: BTreeSet<&str> = places.map(|place| place.disk.as_str()).collect();
    let known: Vec<_> = names.iter().filter_map(|name| find(machine, name)).collect();
    if known.is_empty() || known.len() < names.len() {
        return Some(format!(
            "{mounted_at} is mounted from {device}, and a guest can have only disks on NVMe and AHCI that \
             its image names: unmount it before the checkpoint"
        ));
    }
    if let Some(disk) = known.into_iter().find(|disk| content(disk.name).is_none()) {
        return Some(format!(
            "{mounted_at} is mounted from {device}, which needs the disk {}: {}",
            disk.label,
            remedy(disk.name)
        ));
    }
    if names.iter().all(|name| arrives(name)) {
        return None;
    }
    let Some(fingerprint) = &one.fingerprint else {
        return Some(format!(
            "{mounted_at} has no fingerprint of the instant: it is unknown if {device} has changed"
        ));
    };
    match fingerprint_elsewhere(one, content) {
        Ok(found) if found == *fingerprint => None,
        Ok(_) => Some(format!(
            "the content that is given for {device} is not what it was at the instant: {mounted_at} is \
             another file system, or was written to"
        )),
        Err(why) => Some(format!("{mounted_at} cannot be compared with the image: {why}")),
    }
}

/// Returns the reason for which a swap area could not go on. Its content does not matter.
fn absent_swap<'a>(
    one: &SwapArea,
    machine: &Machine,
    content: &dyn Fn(&str) -> Option<&'a dyn ReadAt>,
) -> Option<String> {
    let is_absent = |name: &&String| content(name).is_none();
    if one.goes_along || (!one.disks.is_empty() && !one.disks.iter().any(|name| is_absent(&name))) {
        return None;
    }
    let device = &one.device;
    let given = match one.disks.iter().find(is_absent).and_then(|name| find(machine, name)) {
        Some(disk) => format!("which needs the disk {}: {}", disk.label, remedy(disk.name)),
        None => "and a guest can have only disks on NVMe and AHCI that its image names".into(),
    };
    Some(format!("swap is on {device}, {given}; or switch it off before (`swapoff {device}`)"))
}

/// Returns the remedy for a disk that is missing.
fn remedy(name: &str) -> String {
    format!("give its content with --disk {name}=FILE, or in a move take it along (--with-disk /dev/{name})")
}

/// Finds the PCI device of a controller.
fn device<'a>(machine: &'a Machine, address: &str) -> std::result::Result<&'a Device, String> {
    let device = machine.devices.iter().find(|one| one.address == address);
    device.ok_or_else(|| "the image does not describe its PCI device".into())
}

fn function(device: &Device) -> std::result::Result<Function, String> {
    let lengths: Vec<_> = device.bars.iter().map(|bar| (bar.number, bar.length)).collect();
    Function::new(&device.config, &lengths)
}

impl Opened<'_> {
    /// Takes the content for a disk that has some size.
    fn content(&self, theirs: Option<u64>) -> std::result::Result<Box<RawDisk>, String> {
        let OwnDisk { name, path, read_only, .. } = self.given;
        let of = |why: String| format!("{name}: {}{why}", path.display());
        let file = self.file.try_clone().map_err(|error| of(format!(": {error}")))?;
        let content = RawDisk::new(file, *read_only).map_err(|error| of(format!(": {error}")))?;
        match theirs {
            Some(theirs) if theirs <= self.bytes => Ok(Box::new(content)),
            Some(theirs) => Err(format!(
                "{name}: it has {}, and {} has {}",
                bytes(theirs),
                path.display(),
                bytes(self.bytes)
            )),
            None => Err(format!("{name}: it says that it has more bytes than there are numbers")),
        }
    }
}

/// Refuses registers where the guest has memory, or beyond the addresses that this host's processor has.
fn refuse_overlap(function: &Function, taken: &[Range<u64>], end: u64) -> std::result::Result<(), String> {
    for range in function.ranges() {
        if range.end > end {
            return Err(format!("its registers at {:#x} are beyond this host's addresses", range.start));
        }
        if taken.iter().any(|other| range.start < other.end && other.start < range.end) {
            return Err(format!("its registers at {:#x} are where the guest has others", range.start));
        }
    }
    Ok(())
}

impl ReadAt for Opened<'_> {
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut read = vec![0; length];
        let mut done = 0;
        while done < length {
            match self.file.read_at(&mut read[done..], offset + done as u64)? {
                0 => break,
                count => done += count,
            }
        }
        read.truncate(done);
        Ok(read)
    }
}

/// Parses a disk with a name before its file: `nvme0n1=FILE[,ro]`. Returns nothing for a file alone.
#[must_use]
pub fn parse(text: &str) -> Option<OwnDisk> {
    let (name, file) = text.split_once('=')?;
    let is_name = name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if !is_name || file.is_empty() {
        return None;
    }
    let (path, read_only) = file.strip_suffix(",ro").map_or((file, false), |path| (path, true));
    Some(OwnDisk { name: name.to_owned(), path: Path::new(path).to_owned(), read_only, arrives: false })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use mercury_image::{Bar, DiskPart, NvmeController, NvmeDisk, Piece};

    pub const START: u32 = 0xFEBD_0000;
    const SIZE: usize = 1 << 20;
    const OFFSET: usize = 64 << 10;

    /// Returns a machine with a disk of 1 MiB on NVMe, and ext4 on its first partition.
    fn machine() -> Machine {
        let mut config = vec![0; 256];
        config[4] = 6;
        config[0x10..0x14].copy_from_slice(&(START | 4).to_le_bytes());
        config[0x34] = 0x40;
        config[0x40..0x4C].copy_from_slice(&[0x11, 0, 7, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
        let bars = vec![Bar { number: 0, start: u64::from(START), length: 0x4000, flags: 0x200 }];
        let address = "0000:01:00.0".to_owned();
        let device = Device { address: address.clone(), config, bars, ..Device::default() };
        let mut identify = vec![0; 128];
        identify[4..10].copy_from_slice(b"SERIAL");
        identify[24..29].copy_from_slice(b"MODEL");
        identify[80..84].copy_from_slice(&0x0001_0400_u32.to_le_bytes());
        let mut disk = vec![0; 132];
        disk[..8].copy_from_slice(&(SIZE as u64 / 512).to_le_bytes());
        disk[130] = 9;
        let disk = NvmeDisk { name: "nvme0n1".into(), namespace: 1, identify: disk, identifiers: Vec::new() };
        let nvme = NvmeController {
            address,
            name: "nvme0".into(),
            identify,
            has_messages: true,
            disks: vec![disk],
            ..NvmeController::default()
        };
        let length = (SIZE - OFFSET) as u64;
        let root = FileSystem {
            mounted_at: "/".into(),
            kind: "ext4".into(),
            device: "/dev/nvme0n1p1".into(),
            place: Some(DiskPart { disk: "nvme0n1".into(), offset: OFFSET as u64, length }),
            ..FileSystem::default()
        };
        Machine { devices: vec![device], nvme: vec![nvme], file_systems: vec![root], ..Machine::default() }
    }

    fn content() -> (tempfile::NamedTempFile, OwnDisk) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at % 253) as u8).collect();
        std::fs::write(file.path(), bytes).unwrap();
        let disk =
            OwnDisk { name: "nvme0n1".into(), path: file.path().into(), read_only: false, arrives: false };
        (file, disk)
    }

    /// Gives the machine's file system the fingerprint of a content.
    fn with_fingerprint(mut machine: Machine, disk: &OwnDisk) -> Machine {
        let given = std::slice::from_ref(disk);
        let opened = open(&machine, given).unwrap();
        let found = fingerprint_elsewhere(&machine.file_systems[0], &|_| Some(&opened[0] as &dyn ReadAt));
        machine.file_systems[0].fingerprint = Some(found.unwrap());
        machine
    }

    /// Returns the controller of a disk with some content.
    pub fn planned() -> (tempfile::NamedTempFile, Controller) {
        let (file, disk) = content();
        let machine = with_fingerprint(machine(), &disk);
        (file, plan(&machine, &[disk]).controllers.remove(0))
    }

    fn plan(machine: &Machine, given: &[OwnDisk]) -> Plan {
        Plan::of(machine, given, &[0..0x10_0000], 1 << 40).unwrap()
    }

    fn reason(machine: &Machine, given: &[OwnDisk]) -> String {
        let plan = plan(machine, given);
        assert_eq!(plan.reasons.len(), 1, "{plan:?}");
        plan.reasons[0].clone()
    }

    #[test]
    fn a_machine_goes_on_with_the_content_that_its_disk_had() {
        let (file, disk) = content();
        let machine = with_fingerprint(machine(), &disk);
        let plan = plan(&machine, std::slice::from_ref(&disk));
        assert_eq!(plan.reasons, [""; 0]);
        let [controller] = plan.controllers.as_slice() else { panic!("{:?}", plan.controllers) };
        let Kind::Nvme { limits, namespaces, .. } = &controller.kind else { panic!("{controller:?}") };
        assert_eq!((limits.pairs, limits.entries, limits.vectors), (256, 1024, 8));
        assert_eq!(namespaces[0].bytes(), SIZE as u64);
        // Only while the plan is there is the content in use.
        let given = std::slice::from_ref(&disk);
        let error = Plan::of(&machine, given, &[], u64::MAX).unwrap_err();
        assert!(error.message.contains("in use"), "{}", error.message);
        // A file that was made for an arrival is removed while the locks are held.
        let Plan { controllers, locks, .. } = plan;
        drop(controllers);
        assert!(Plan::of(&machine, given, &[], u64::MAX).unwrap_err().message.contains("in use"));
        drop(locks);
        let mut bytes = std::fs::read(file.path()).unwrap();
        bytes[OFFSET + 0x438] ^= 1;
        std::fs::write(file.path(), &bytes).unwrap();
        assert!(reason(&machine, given).contains("not what it was at the instant"));
        bytes[OFFSET + 0x438] ^= 1;
        bytes[0] ^= 1;
        std::fs::write(file.path(), &bytes).unwrap();
        assert_eq!(self::plan(&machine, given).reasons, [""; 0], "it is outside of the file system");
    }

    /// Compares the content of a disk that arrives with the source's disk then, and not with the offer.
    #[test]
    fn a_disk_that_arrives_needs_no_fingerprint() {
        let (_file, mut disk) = content();
        let machine = machine();
        assert!(reason(&machine, std::slice::from_ref(&disk)).contains("no fingerprint"));
        disk.arrives = true;
        assert_eq!(plan(&machine, &[disk]).controllers.len(), 1);
    }

    #[test]
    fn each_disk_that_is_missing_or_unfit_is_named() {
        let (file, disk) = content();
        let whole = with_fingerprint(machine(), &disk);
        let given = std::slice::from_ref(&disk);
        let missing = reason(&whole, &[]);
        let expected =
            "nvme0n1 (MODEL, serial number SERIAL, 1.00 MiB): give its content with --disk nvme0n1=";
        assert!(missing.contains(expected), "{missing}");
        type Change = fn(&mut Machine);
        let changes: [(Change, &str); 11] = [
            (|one| one.file_systems[0].place = None, "only disks on NVMe and AHCI"),
            (
                |one| one.file_systems[0].place.as_mut().unwrap().disk = "sda".into(),
                "only disks on NVMe and AHCI",
            ),
            (|one| one.file_systems[0].fingerprint = None, "no fingerprint"),
            (|one| one.devices.clear(), "does not describe its PCI device"),
            (|one| one.devices[0].config.truncate(64), "64 bytes of its configuration"),
            (|one| one.devices[0].bars[0].length = 0x1000, "its table of messages is outside"),
            (|one| one.nvme[0].has_messages = false, "without messages"),
            (|one| one.nvme[0].has_memory = true, "CMB"),
            (|one| one.nvme[0].identify[80] = 0, "a guest"),
            (|one| one.devices[0].config[0x13] = 0, "where the guest has others"),
            (
                |one| {
                    one.devices[0].address = "10000:e1:00.0".into();
                    one.nvme[0].address = "10000:e1:00.0".into();
                },
                "not in PCI's first domain",
            ),
        ];
        for (number, (change, expected)) in changes.into_iter().enumerate() {
            let mut machine = whole.clone();
            change(&mut machine);
            if number == 8 {
                machine.nvme[0].identify[81] = 0;
            }
            if number == 9 {
                machine.devices[0].config[0x12] = 0;
            }
            let text = reason(&machine, given);
            assert!(text.contains(expected), "{expected}: {text}");
        }
        let far = Plan::of(&whole, given, &[], 1 << 31).unwrap();
        assert!(far.reasons[0].contains("beyond this host's addresses"), "{:?}", far.reasons);
        drop(far);
        file.as_file().set_len(SIZE as u64 - 512).unwrap();
        assert!(reason(&whole, given).contains("it has 1.00 MiB, and"));
    }

    #[test]
    fn swap_needs_its_disks_or_a_server() {
        let (_file, disk) = content();
        let mut machine = with_fingerprint(machine(), &disk);
        let given = std::slice::from_ref(&disk);
        let area = |disks: &[&str]| SwapArea {
            device: "/dev/dm-1".into(),
            disks: disks.iter().copied().map(str::to_owned).collect(),
            goes_along: false,
        };
        machine.swap = vec![area(&["nvme0n1"])];
        assert_eq!(plan(&machine, given).reasons, [""; 0]);
        for unknown in [area(&[]), area(&["sdb"]), area(&["nvme0n1", "sdb"])] {
            machine.swap = vec![unknown];
            let text = reason(&machine, given);
            assert!(text.starts_with("swap is on /dev/dm-1, and a guest can have only"), "{text}");
        }
        machine.swap[0].goes_along = true;
        assert_eq!(plan(&machine, given).reasons, [""; 0]);
        machine.file_systems.clear();
        machine.swap = vec![area(&["nvme0n1"])];
        let text = reason(&machine, &[]);
        assert!(text.contains("SERIAL") && text.contains("--disk nvme0n1=FILE, or in a move"), "{text}");
    }

    #[test]
    fn a_disk_of_a_server_needs_no_content() {
        let mut machine = machine();
        machine.file_systems[0].place = None;
        machine.file_systems[0].goes_along = true;
        assert_eq!(plan(&machine, &[]).reasons, [""; 0]);
    }

    #[test]
    fn volumes_need_all_their_disks() {
        let (_file, disk) = content();
        let mut machine = machine();
        let place = machine.file_systems[0].place.take();
        let piece = Piece { disk: "lvm 7".into(), offset: 4096, length: 4096, place: place.clone() };
        machine.file_systems[0].pieces = vec![piece.clone()];
        let mut machine = with_fingerprint(machine, &disk);
        let given = std::slice::from_ref(&disk);
        assert_eq!(plan(&machine, given).reasons, [""; 0]);
        let other = place.map(|place| DiskPart { disk: "nvme1n1".into(), ..place });
        machine.file_systems[0].pieces.push(Piece { place: other, ..piece });
        assert!(reason(&machine, given).contains("only disks on NVMe and AHCI"));
    }

    #[test]
    fn a_disk_that_the_machine_has_not_is_refused_with_those_that_it_has() {
        let (_file, disk) = content();
        let wrong = OwnDisk { name: "nvme1n1".into(), ..disk.clone() };
        let error = Plan::of(&machine(), &[wrong], &[], u64::MAX).unwrap_err();
        assert_eq!(error.exit, Exit::Impossible);
        assert!(error.message.contains("no disk nvme1n1"), "{}", error.message);
        let twice = Plan::of(&machine(), &[disk.clone(), disk], &[], u64::MAX).unwrap_err();
        assert!(twice.message.contains("twice"));
    }

    #[test]
    fn a_name_before_a_file_is_that_of_an_own_disk() {
        let disk = |name: &str, path: &str, read_only| {
            Some(OwnDisk { name: name.into(), path: path.into(), read_only, arrives: false })
        };
        assert_eq!(parse("nvme0n1=/dev/sdb"), disk("nvme0n1", "/dev/sdb", false));
        assert_eq!(parse("nvme1n1=a=b,ro"), disk("nvme1n1", "a=b", true));
        for alone in ["/dev/sdb", "./a=b", "disk", "=x", "nvme0n1=", "Disk=x"] {
            assert_eq!(parse(alone), None, "{alone}");
        }
    }
}
