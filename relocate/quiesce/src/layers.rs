//! The disks beneath logical, encrypted and mirrored volumes. The restore environment assembles no
//! volumes, so a file system's fingerprint is read from the disks below, encrypted as it is there.
//!
//! Known layers are device mapper's linear and crypt targets (LVM, LUKS) and RAID 1 of md, in any
//! combination. A disk is identified by the identity that LVM, LUKS or md have written on it,
//! because its name may change with each boot.

use super::block_devices;
use mercury_control::sysroot::Sysroot;
use mercury_image::Piece;
use std::{
    collections::BTreeSet,
    fs::File,
    io,
    ops::Range,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

const SECTOR: u64 = 512;
/// Limit of volumes on volumes; a cycle is impossible, but the search must end.
const DEPTH_MAX: usize = 8;

/// A range of one device, in bytes, that holds a range of another device.
type Stretch = (String, Range<u64>);

/// Returns the disk ranges that hold `ranges` of a device, in bytes; empty if the device is a disk,
/// or a part of one.
///
/// # Errors
///
/// Returns the reason as a clause if they are unknown.
pub fn pieces(device: &Path, ranges: &[Range<u64>], sysroot: &Sysroot) -> Result<Vec<Piece>, String> {
    if !block_devices::is_composed(device, sysroot) {
        return Ok(Vec::new());
    }
    let number = std::fs::metadata(device).map_err(|error| error.to_string())?.rdev();
    let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let mut pieces = Vec::new();
    for range in ranges {
        for (name, range) in resolve(&number, range, DEPTH_MAX, &|number| layer(number, sysroot))? {
            let disk = identity(&block_devices::device_file(&name))?
                .ok_or_else(|| format!("{name}, which it is on, has no identity of LVM, LUKS or md"))?;
            let place = block_devices::place_of(&name, sysroot);
            pieces.push(Piece { disk, offset: range.start, length: range.end - range.start, place });
        }
    }
    Ok(pieces)
}

/// Returns the disks that hold a device, by the kernel's names.
///
/// # Errors
///
/// Returns the reason as a clause if they are unknown.
pub fn disks(device: &Path, sysroot: &Sysroot) -> Result<BTreeSet<String>, String> {
    let number = std::fs::metadata(device).map_err(|error| error.to_string())?.rdev();
    let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    // One sector would do for a partition, and not for a volume on several disks.
    let sectors = sysroot.text(&format!("sys/dev/block/{number}/size"));
    let sectors: u64 = sectors.and_then(|text| text.trim().parse().ok()).ok_or("its size is unknown")?;
    let whole = 0..sectors.saturating_mul(SECTOR);
    let parts = resolve(&number, &whole, DEPTH_MAX, &|number| layer(number, sysroot))?;
    let disk = |(name, _): Stretch| {
        let place = block_devices::place_of(&name, sysroot);
        place.map(|place| place.disk).ok_or_else(|| format!("the place of {name} is unknown"))
    };
    parts.into_iter().map(disk).collect()
}

/// The structure of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Layer {
    /// A disk, or a part of one, by name.
    Disk(String),
    /// Parts one after the other: start in this device and length, in bytes, and the place below.
    Joined(Vec<(u64, u64, Below)>),
    /// The same data on each device.
    Mirrored(Vec<Below>),
}

/// A place on another device, by its number, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Below {
    number: String,
    offset: u64,
}

fn resolve(
    number: &str,
    range: &Range<u64>,
    depth: usize,
    layer: &dyn Fn(&str) -> Result<Layer, String>,
) -> Result<Vec<Stretch>, String> {
    let depth = depth.checked_sub(1).ok_or("it is on too many layers")?;
    let below = |at: &Below, range: Range<u64>| {
        resolve(&at.number, &(range.start + at.offset..range.end + at.offset), depth, layer)
    };
    let mut found = Vec::new();
    match layer(number)? {
        Layer::Disk(name) => found.push((name, range.clone())),
        Layer::Mirrored(legs) => {
            for leg in &legs {
                found.extend(below(leg, range.clone())?);
            }
        }
        Layer::Joined(parts) => {
            // Bytes beyond the end are never read.
            for (start, length, at) in &parts {
                let overlap = range.start.max(*start)..range.end.min(start + length);
                if !overlap.is_empty() {
                    found.extend(below(at, overlap.start - start..overlap.end - start)?);
                }
            }
        }
    }
    Ok(found)
}

fn layer(number: &str, sysroot: &Sysroot) -> Result<Layer, String> {
    let place = std::fs::canonicalize(sysroot.path(&format!("sys/dev/block/{number}")));
    let place = place.map_err(|error| format!("{number}: {error}"))?;
    let name = place.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !place.to_string_lossy().contains("/devices/virtual/block/") {
        return Ok(Layer::Disk(name));
    }
    let folder = format!("sys/dev/block/{number}");
    if sysroot.exists(&format!("{folder}/dm")) {
        let answer = ask(number, Question::Table).map_err(|error| format!("the table of {name}: {error}"))?;
        return mapped(&answer.targets).map_err(|why| format!("{name} is {why}"));
    }
    if sysroot.exists(&format!("{folder}/md")) {
        return mirrored(&folder, sysroot).map_err(|why| format!("{name} is {why}"));
    }
    if name.starts_with("nbd") {
        return Err(format!(
            "{name} is a disk on a network (NBD), which moves with a machine only if no process waits in \
             it: nbd-client without -nonetlink"
        ));
    }
    Err(format!("{name} is neither of device mapper nor of md"))
}

/// A target of device mapper: start and length in sectors, type, and parameters or state.
pub type Target = (u64, u64, String, String);

/// A question to device mapper about one of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// The parameters of the device's targets.
    Table,
    /// The state of the targets, without a commit of their metadata.
    State,
}

/// Device mapper's answer about one of its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Number of times that the device is open.
    pub opens: usize,
    pub targets: Vec<Target>,
}

fn mapped(table: &[Target]) -> Result<Layer, String> {
    let part = |(start, length, kind, parameters): &Target| {
        let words: Vec<_> = parameters.split(' ').collect();
        // "DEVICE OFFSET"; after a cipher, a key and the offset of its initial vector the same.
        let words = match kind.as_str() {
            "linear" => words.get(..2),
            "crypt" => words.get(3..5),
            _ => return Err(format!("of the type {kind}")),
        };
        let (number, offset) = words
            .and_then(|words| Some((words[0].to_owned(), words[1].parse::<u64>().ok()?)))
            .ok_or_else(|| format!("of the type {kind}, and its table is not understood"))?;
        Ok((start * SECTOR, length * SECTOR, Below { number, offset: offset * SECTOR }))
    };
    table.iter().map(part).collect::<Result<_, _>>().map(Layer::Joined)
}

fn mirrored(folder: &str, sysroot: &Sysroot) -> Result<Layer, String> {
    let text = |name: &str| sysroot.text(&format!("{folder}/md/{name}")).unwrap_or_default();
    let level = text("level");
    if level != "raid1" {
        return Err(format!("of the type {level}"));
    }
    let members = sysroot.names(&format!("{folder}/md"));
    let members = members.into_iter().filter(|name| name.starts_with("dev-"));
    let leg = |name: String| {
        let state = text(&format!("{name}/state"));
        if !state.split(',').any(|word| word == "in_sync") {
            // A spare, or a device that is not yet synchronized, is not read.
            return None;
        }
        let place = (text(&format!("{name}/block/dev")), text(&format!("{name}/offset")).parse::<u64>());
        Some(match place {
            (number, Ok(offset)) if !number.is_empty() => Ok(Below { number, offset: offset * SECTOR }),
            _ => Err(format!("on {name}, which is unknown")),
        })
    };
    members.filter_map(leg).collect::<Result<_, _>>().map(Layer::Mirrored)
}

/// `struct dm_ioctl` of linux/dm-ioctl.h, with room for an answer after it.
#[repr(C)]
struct Request {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event: u32,
    padding: u32,
    device: u64,
    name: [u8; 128],
    uuid: [u8; 129],
    unused: [u8; 7],
    answer: [u8; ANSWER],
}

const ANSWER: usize = 256 << 10;
const HEAD: usize = size_of::<Request>() - ANSWER;
/// Size of `struct dm_target_spec`.
const SPECIFICATION: usize = 40;

/// Asks device mapper about a device by the ioctl DM_TABLE_STATUS. The kernel leaves keys out of tables
/// unless they are asked for.
///
/// # Errors
///
/// Returns an error if the kernel does not tell.
pub fn ask(number: &str, question: Question) -> io::Result<Answer> {
    const DM_TABLE_STATUS: libc::c_ulong = 0xC138_FD0C;
    const DM_STATUS_TABLE_FLAG: u32 = 1 << 4;
    const DM_BUFFER_FULL_FLAG: u32 = 1 << 8;
    const DM_NOFLUSH_FLAG: u32 = 1 << 11;
    let (major, minor) = number.split_once(':').unwrap_or_default();
    let [major, minor] = [major, minor].map(|text| text.parse::<u64>().unwrap_or(0));
    let control = File::options().read(true).write(true).open("/dev/mapper/control")?;
    let mut request = Box::new(Request {
        version: [4, 0, 0],
        data_size: size_of::<Request>() as u32,
        data_start: HEAD as u32,
        target_count: 0,
        open_count: 0,
        flags: match question {
            Question::Table => DM_STATUS_TABLE_FLAG,
            Question::State => DM_NOFLUSH_FLAG,
        },
        event: 0,
        padding: 0,
        // The kernel's 64-bit encoding of device numbers.
        device: (minor & 0xFF) | major << 8 | (minor & !0xFF) << 12,
        name: [0; 128],
        uuid: [0; 129],
        unused: [0; 7],
        answer: [0; ANSWER],
    });
    // SAFETY: the kernel reads and writes at most `data_size` bytes of the request, all of which
    // belong to it.
    let result =
        unsafe { libc::ioctl(control.as_raw_fd(), DM_TABLE_STATUS as _, std::ptr::from_mut(&mut *request)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let answer = (request.data_start as usize).checked_sub(HEAD).and_then(|at| request.answer.get(at..));
    let full = request.flags & DM_BUFFER_FULL_FLAG != 0;
    answer
        .filter(|_| !full)
        .and_then(|answer| targets(answer, request.target_count))
        .map(|targets| Answer { opens: request.open_count.max(0) as usize, targets })
        .ok_or_else(|| io::Error::other("the answer is too long, or not understood"))
}

/// Parses the targets in an answer: each has the offset of the next one, counted from the first.
fn targets(answer: &[u8], count: u32) -> Option<Vec<Target>> {
    let text = |bytes: &[u8]| {
        let end = bytes.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    };
    let mut at = 0;
    let mut found = Vec::new();
    for _ in 0..count {
        let one = answer.get(at..)?;
        let long = |at: usize| Some(u64::from_le_bytes(one.get(at..at + 8)?.try_into().ok()?));
        let next = u32::from_le_bytes(one.get(20..24)?.try_into().ok()?);
        found.push((
            long(0)?,
            long(8)?,
            text(one.get(24..SPECIFICATION)?)?,
            text(one.get(SPECIFICATION..)?)?,
        ));
        at = next as usize;
    }
    Some(found)
}

/// Returns the identity that LVM, LUKS or md have written on a disk, with the kind before it.
///
/// # Errors
///
/// Returns an error if the disk does not answer.
pub fn identity(device: &Path) -> Result<Option<String>, String> {
    Ok(block_devices::head(device, 8192)?.and_then(|first| identity_in(&first)))
}

/// Returns the identity of a disk that begins with these bytes.
fn identity_in(first: &[u8]) -> Option<String> {
    let at = |range: Range<usize>| first.get(range);
    if at(0..6)? == b"LUKS\xBA\xBE" {
        let uuid = at(168..208)?.split(|byte| *byte == 0).next()?;
        return Some(format!("luks {}", String::from_utf8_lossy(uuid)));
    }
    for sector in 0..4 {
        let label = at(sector * 512..(sector + 1) * 512)?;
        if label.starts_with(b"LABELONE") && &label[24..32] == b"LVM2 001" {
            let header = u32::from_le_bytes(label[20..24].try_into().ok()?) as usize;
            return Some(format!("lvm {}", String::from_utf8_lossy(label.get(header..header + 32)?)));
        }
    }
    // At the beginning (1.1), or after 4 KiB (1.2).
    for start in [0, 4096] {
        let superblock = at(start..start + 256)?;
        if superblock.starts_with(&[0xFC, 0x4E, 0x2B, 0xA9, 1, 0, 0, 0]) {
            let uuid: String = superblock[168..184].iter().map(|byte| format!("{byte:02x}")).collect();
            return Some(format!("md {uuid}"));
        }
    }
    None
}

/// Finds the disk with this identity.
///
/// # Errors
///
/// Returns an error if it is not there, or several have it.
pub fn find(disk: &str, sysroot: &Sysroot) -> Result<PathBuf, String> {
    let mut found = Vec::new();
    for device in block_devices::readable(sysroot).iter().map(|name| block_devices::device_file(name)) {
        if identity(&device)?.as_deref() == Some(disk) {
            found.push(device);
        }
    }
    match &found[..] {
        [] => Err(format!("a part of it, {disk}, is not there")),
        [device] => Ok(device.clone()),
        several => Err(format!("{} disks have the identity of a part of it, {disk}", several.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn below(number: &str, offset: u64) -> Below {
        Below { number: number.into(), offset }
    }

    fn target(start: u64, length: u64, kind: &str, parameters: &str) -> Target {
        (start, length, kind.into(), parameters.into())
    }

    #[test]
    fn layers_are_followed_to_disks() {
        let layers = |number: &str| {
            Ok(match number {
                "253:1" => Layer::Joined(vec![(0, 1000, below("253:0", 100)), (1000, 500, below("8:2", 0))]),
                "253:0" => Layer::Joined(vec![(0, 10_000, below("9:0", 4096))]),
                "9:0" => Layer::Mirrored(vec![below("8:0", 7), below("8:16", 9)]),
                "8:0" => Layer::Disk("sda".into()),
                "8:16" => Layer::Disk("sdb".into()),
                "8:2" => Layer::Disk("sda2".into()),
                _ => Layer::Joined(vec![(0, 1, below(number, 0))]),
            })
        };
        let found = resolve("253:1", &(900..1200), DEPTH_MAX, &layers).expect("known");
        let stretch = |name: &str, range| (name.to_owned(), range);
        assert_eq!(
            found,
            [
                stretch("sda", 900 + 100 + 4096 + 7..1000 + 100 + 4096 + 7),
                stretch("sdb", 900 + 100 + 4096 + 9..1000 + 100 + 4096 + 9),
                stretch("sda2", 0..200),
            ]
        );
        assert!(resolve("1:1", &(0..1), DEPTH_MAX, &layers).expect_err("a cycle").contains("too many"));
    }

    #[test]
    fn tables_of_device_mapper() {
        let table = [target(0, 8, "linear", "8:2 2048"), target(8, 4, "linear", "8:3 0")];
        let expected = vec![(0, 4096, below("8:2", 1 << 20)), (4096, 2048, below("8:3", 0))];
        assert_eq!(mapped(&table), Ok(Layer::Joined(expected)));
        let crypt =
            [target(0, 8, "crypt", "aes-xts-plain64 :64:logon:cryptsetup:x 0 8:2 32768 1 allow_discards")];
        assert_eq!(mapped(&crypt), Ok(Layer::Joined(vec![(0, 4096, below("8:2", 16 << 20))])));
        assert_eq!(mapped(&[target(0, 8, "thin", "253:2 1")]), Err("of the type thin".into()));
        assert!(mapped(&[target(0, 8, "linear", "8:2")]).is_err());
    }

    #[test]
    fn answers_of_device_mapper() {
        let mut answer = Vec::new();
        for (start, next, parameters) in [(0_u64, 56_u32, &b"8:2 2048"[..]), (8, 112, b"8:3 0")] {
            answer.extend(start.to_le_bytes());
            answer.extend(8_u64.to_le_bytes());
            answer.extend(0_u32.to_le_bytes());
            answer.extend(next.to_le_bytes());
            answer.extend(b"linear\0\0\0\0\0\0\0\0\0\0");
            answer.extend(parameters);
            answer.resize(next as usize, 0);
        }
        assert_eq!(
            targets(&answer, 2),
            Some(vec![target(0, 8, "linear", "8:2 2048"), target(8, 8, "linear", "8:3 0")])
        );
        assert_eq!(targets(&answer, 3), None);
        assert_eq!(targets(&answer[..100], 2), None);
        assert_eq!(targets(&[], 0), Some(Vec::new()));
    }

    #[test]
    fn mirrors_of_md() {
        let root = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| {
            let path = root.path().join("sys/dev/block/9:0/md").join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        };
        let sysroot = Sysroot::at(root.path());
        let layer = || mirrored("sys/dev/block/9:0", &sysroot);
        put("level", "raid1\n");
        for (name, number, state) in
            [("dev-sda1", "8:1", "in_sync"), ("dev-sdb1", "8:17", "in_sync,write_mostly")]
        {
            put(&format!("{name}/state"), state);
            put(&format!("{name}/offset"), "2048\n");
            put(&format!("{name}/block/dev"), number);
        }
        put("dev-sdc1/state", "spare\n");
        assert_eq!(layer(), Ok(Layer::Mirrored(vec![below("8:1", 1 << 20), below("8:17", 1 << 20)])));
        put("dev-sdb1/offset", "");
        assert!(layer().expect_err("unknown").contains("dev-sdb1"));
        put("level", "raid5\n");
        assert_eq!(layer(), Err("of the type raid5".into()));
    }

    #[test]
    fn disks_say_who_they_are() {
        let of = |at: usize, bytes: &[u8]| {
            let mut whole = vec![0; 8192];
            whole[at..at + bytes.len()].copy_from_slice(bytes);
            identity_in(&whole)
        };
        assert_eq!(of(0, &[]), None);
        let mut luks = b"LUKS\xBA\xBE\0\x02".to_vec();
        luks.resize(168, 0);
        luks.extend(b"f00d-1");
        assert_eq!(of(0, &luks).as_deref(), Some("luks f00d-1"));
        let mut lvm = b"LABELONE".to_vec();
        lvm.resize(20, 0);
        lvm.extend([32, 0, 0, 0]);
        lvm.extend(b"LVM2 001");
        lvm.extend(b"0123456789abcdef0123456789ABCDEF");
        assert_eq!(of(512, &lvm).as_deref(), Some("lvm 0123456789abcdef0123456789ABCDEF"));
        let mut md = vec![0xFC, 0x4E, 0x2B, 0xA9, 1, 0, 0, 0];
        md.resize(168, 0);
        md.extend([0xAB; 16]);
        assert_eq!(of(4096, &md), Some(format!("md {}", "ab".repeat(16))));
    }
}
