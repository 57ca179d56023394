//! `mercury tombstone`: shows the tombstone that keeps a system that has moved from starting here,
//! clears it, and prepares a place for it on a disk.

use super::{Named, SPOTS, all, boot, clear, disk, initramfs, record::Record, spots, when};
use crate::options::TombstoneOptions;
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text},
    say::Say,
    sysroot::Sysroot,
};
use mercury_migration::protocol::Attempt;
use serde::Serialize;
use std::{fs, io, path::Path};

/// All places of this machine.
#[derive(Debug, Serialize)]
struct Report {
    places: Vec<Shown>,
    /// True if a system that starts here does not go on.
    forbids: bool,
}

/// A place and its contents.
#[derive(Debug, Serialize)]
struct Shown {
    place: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tombstone: Option<Record>,
    /// Reason why the place cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// True if the place was cleared just now.
    cleared: bool,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        if self.places.is_empty() {
            to.line(
                "this machine has no place for a tombstone: no UEFI, and none on a disk (`mercury \
                tombstone --prepare FILE` makes one)",
            );
        }
        for shown in &self.places {
            let state = match (&shown.tombstone, &shown.error) {
                (_, Some(error)) => error.clone(),
                (None, None) => "no tombstone".into(),
                (Some(tombstone), None) => describe(tombstone, shown.cleared),
            };
            to.line(format!("{}: {state}", shown.place));
        }
        if self.forbids {
            to.line(
                "a system that starts here does not go on; if it never runs elsewhere again: `mercury \
                tombstone --clear`",
            );
        }
    }
}

fn describe(tombstone: &Record, cleared: bool) -> String {
    let name = serde_json::to_value(tombstone.state).unwrap_or_default();
    let name = name.as_str().unwrap_or_default().to_owned();
    let attempt = if tombstone.attempt.bytes().all(|digit| digit == b'0') {
        String::new()
    } else {
        format!(", to {} (attempt {})", tombstone.to, tombstone.attempt)
    };
    let now = if cleared { " now" } else { "" };
    format!("{name}{now}{attempt}, {}", tombstone.when())
}

/// Shows, clears or prepares places.
///
/// # Errors
///
/// Returns an error if this cannot be done.
pub fn run(args: &TombstoneOptions, say: Say<'_>) -> Result<Exit> {
    let sysroot = Sysroot::default();
    access::need_root("tombstone")?;
    if args.at_boot {
        return Ok(boot::check(&sysroot));
    }
    let known = spots(&sysroot)
        .map_err(|why| failed(&why).hint("`mercury tombstone --prepare FILE` writes it again"));
    if let Some(folder) = &args.initramfs {
        initramfs::furnish(folder, &known?, &sysroot)
            .map_err(|error| failed(&format!("{}: {error}", folder.display())))?;
        return Ok(Exit::Done);
    }
    let mut known =
        known.or_else(|error| if args.prepare.is_some() { Ok(Vec::new()) } else { Err(error) })?;
    if let Some(file) = &args.prepare {
        let first = Record { at: when::now(), number: 1, ..Record::new(Attempt([0; 16]), "", None) };
        let spot = disk::prepare(file, &first, &sysroot).map_err(|why| {
            failed(&why).hint(
                "name a file on a local ext4 or XFS on a disk of its own, such as /boot/mercury.tombstone",
            )
        })?;
        known.retain(|other| other.uuid != spot.uuid);
        known.push(spot);
        write_spots(&known, &sysroot).map_err(|error| failed(&format!("/{SPOTS}: {error}")))?;
        eprintln!("mercury: now let the initial RAM disk know the place: update-initramfs -u -k all");
    }
    let report = Report::of(args.clear, &known, &sysroot)?;
    say.done(&report);
    Ok(Exit::Done)
}

impl Report {
    fn of(clears: bool, spots: &[disk::Spot], sysroot: &Sysroot) -> Result<Self> {
        let mut places = Vec::new();
        for (named, place) in all(spots, sysroot) {
            let cleared = match &place {
                Ok(place) if clears => clear(place).map_err(|why| {
                    failed(&format!("{named}: {why}"))
                        .hint("the tombstone may still keep this machine from starting")
                })?,
                _ => false,
            };
            places.push(Shown::of(&named, place.and_then(|place| place.read()), cleared));
        }
        let forbids = places.iter().any(|shown| shown.tombstone.as_ref().is_some_and(Record::forbids));
        Ok(Self { places, forbids })
    }
}

impl Shown {
    fn of(named: &Named, read: std::result::Result<Option<Record>, String>, cleared: bool) -> Self {
        let (tombstone, error) = match read {
            Ok(tombstone) => (tombstone, None),
            Err(why) => (None, Some(why)),
        };
        Self { place: named.to_string(), tombstone, error, cleared }
    }
}

fn failed(why: &str) -> Error {
    Error::new(Exit::Failed, why.to_owned())
        .hint("make sure that root can write there, and repeat the command")
}

/// Writes the list of places. The old list stays until the new one is complete.
fn write_spots(spots: &[disk::Spot], sysroot: &Sysroot) -> io::Result<()> {
    let path = sysroot.path(SPOTS);
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    let new = path.with_extension("new");
    fs::write(&new, serde_json::to_vec(spots)?)?;
    fs::File::open(&new)?.sync_all()?;
    fs::rename(&new, &path)
}

#[cfg(test)]
mod tests {
    use super::{
        super::record::{State, tests::record},
        *,
    };
    use mercury_control::output::{Format, text};

    #[test]
    fn tombstones_are_shown_and_cleared() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join(super::super::firmware::FOLDER);
        fs::create_dir_all(&folder).expect("folders");
        let sysroot = Sysroot::at(root.path());
        let bytes = [&[7, 0, 0, 0][..], &record(State::Committed, 3).pack().expect("it fits")].concat();
        fs::write(folder.join(super::super::firmware::TOMBSTONE), bytes).expect("a file");
        let shown = |clears| Report::of(clears, &[], &sysroot).expect("shown");
        let said = |report: &Report| text(Format::Text, "tombstone", report);
        let before = shown(false);
        assert!(before.forbids && said(&before).contains("committed, to 10.9.0.3:4747"), "{}", said(&before));
        let cleared = shown(true);
        assert!(!cleared.forbids && said(&cleared).contains("cleared now"), "{}", said(&cleared));
        let after = shown(true);
        assert!(!after.places[0].cleared && !after.forbids);
        let json: serde_json::Value =
            serde_json::from_str(&text(Format::Json, "tombstone", &after)).expect("JSON");
        assert!(json.to_string().contains("\"state\":\"cleared\""), "{json}");
    }

    #[test]
    fn a_machine_without_a_place_says_so() {
        let root = tempfile::tempdir().expect("a folder");
        let report = Report::of(false, &[], &Sysroot::at(root.path())).expect("shown");
        assert!(text(Format::Text, "tombstone", &report).contains("--prepare FILE"));
    }
}
