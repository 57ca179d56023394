//! Checks if a system that starts on this machine looks for the tombstone. The package's script in
//! the initial RAM disk (packaging/initramfs) does so, and leaves a file that says so. Without that
//! file, the initial RAM disk from which the running kernel would be started again is searched for
//! the script.

use super::{Named, Spot, WITHOUT, system};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_quiesce::patient::{self, PROGRAM_PATIENCE};
use std::{fs, io, path::Path, process::Command};

/// The file in which a system that has checked says so, with [`digest`].
pub const CHECKED: &str = "run/mercury/tombstone-checked";
/// The script, in an initial RAM disk.
const SCRIPT: &str = "scripts/init-premount/mercury-tombstone";
/// Folder in an initial RAM disk with the places on disks that it knows, and the identity of its
/// system.
const FOLDER: &str = "etc/mercury";

/// Returns the digest of these places for an initial RAM disk.
#[must_use]
pub fn digest(spots: &[Spot]) -> String {
    let text = serde_json::to_vec(spots).unwrap_or_default();
    blake3::hash(&text).to_hex()[..16].to_owned()
}

/// Refuses a place that no initial RAM disk checks.
///
/// # Errors
///
/// Returns an error if nothing checks this place at a start.
pub fn refuse_blind(named: &Named, spots: &[Spot], sysroot: &Sysroot) -> Result<()> {
    let Err(why) = looks(named, spots, sysroot) else { return Ok(()) };
    Err(Error::new(
        Exit::Impossible,
        format!(
            "nothing in the initial RAM disk checks this machine's tombstone when it starts again \
            after a power cut: {why}"
        ),
    )
    .hint(format!(
        "`update-initramfs -u` puts the check into the initial RAM disk (package initramfs-tools); {WITHOUT}"
    )))
}

fn looks(named: &Named, spots: &[Spot], sysroot: &Sysroot) -> std::result::Result<(), String> {
    let wanted = digest(spots);
    let needs_place = matches!(named, Named::Disk(..));
    // A kernel that was booted by the network may have no file of its initial RAM disk here.
    if let Some(looked) = sysroot.text(CHECKED)
        && (!needs_place || looked.trim() == wanted)
    {
        return Ok(());
    }
    let release = sysroot.text("proc/sys/kernel/osrelease").unwrap_or_default();
    let file = sysroot.path(&format!("boot/initrd.img-{}", release.trim()));
    if !file.exists() {
        return Err(format!("the check did not run at this start, and there is no {}", file.display()));
    }
    let mut lsinitramfs = Command::new("lsinitramfs");
    lsinitramfs.arg(&file);
    let listed = patient::output(lsinitramfs, PROGRAM_PATIENCE);
    let listed = listed.map_err(|error| format!("lsinitramfs: {error}"))?;
    holds(&String::from_utf8_lossy(&listed.stdout), needs_place.then_some(&*wanted))
        .map_err(|why| format!("{} {why}", file.display()))
}

/// Returns an error unless a list of an initial RAM disk's files has all that the check needs.
fn holds(list: &str, digest: Option<&str>) -> std::result::Result<(), &'static str> {
    let has = |name: &str| list.lines().any(|line| line.trim_start_matches("./") == name);
    if !has(SCRIPT) {
        return Err("has no script for the check");
    }
    if digest.is_some_and(|digest| !has(&format!("{FOLDER}/tombstone.places.{digest}"))) {
        return Err("does not know the place that was prepared on a disk");
    }
    Ok(())
}

/// Writes the files of the hook into a folder that becomes an initial RAM disk.
///
/// # Errors
///
/// Returns an error if they cannot be written.
pub fn furnish(folder: &Path, spots: &[Spot], sysroot: &Sysroot) -> io::Result<()> {
    let to = folder.join(FOLDER);
    fs::create_dir_all(&to)?;
    fs::write(to.join("tombstone.places"), serde_json::to_vec(spots)?)?;
    fs::write(to.join(format!("tombstone.places.{}", digest(spots))), "")?;
    fs::write(to.join("tombstone.system"), system(sysroot).unwrap_or_default())
}

/// Returns the system that an initial RAM disk belongs to, if it knows.
#[must_use]
pub fn whose(sysroot: &Sysroot) -> Option<String> {
    let text = sysroot.text(&format!("{FOLDER}/tombstone.system"))?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Notes that the check has run.
///
/// # Errors
///
/// Returns an error if the note cannot be written.
pub fn say_checked(spots: &[Spot], sysroot: &Sysroot) -> io::Result<()> {
    let path = sysroot.path(CHECKED);
    fs::create_dir_all(path.parent().unwrap_or(&path))?;
    fs::write(path, digest(spots))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spot(uuid: &str) -> Spot {
        Spot { uuid: uuid.into(), kind: "ext4".into(), file: "/boot/tombstone".into(), offsets: [4096, 8192] }
    }

    #[test]
    fn contents_of_an_initial_ram_disk_are_judged() {
        let digest = digest(&[spot("a")]);
        let list = format!("./bin/sh\n{SCRIPT}\n{FOLDER}/tombstone.places.{digest}\n");
        assert_eq!(holds(&list, None), Ok(()));
        assert_eq!(holds(&list, Some(&digest)), Ok(()));
        assert!(holds(&list, Some(&super::digest(&[spot("b")]))).is_err());
        assert!(holds("scripts/init-premount/ORDER\n", None).is_err());
        assert!(holds("", None).is_err());
    }

    #[test]
    fn one_that_is_furnished_knows() {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        let to = root.path().join("new");
        fs::create_dir_all(root.path().join("etc")).expect("a folder");
        fs::write(root.path().join("etc/machine-id"), "0".repeat(32)).expect("a file");
        let spots = [spot("a")];
        furnish(&to, &spots, &sysroot).expect("written");
        let inside = Sysroot::at(&to);
        assert_eq!(whose(&inside), system(&sysroot));
        assert_eq!(super::super::spots(&inside).as_deref(), Ok(&spots[..]));
        assert!(to.join(FOLDER).join(format!("tombstone.places.{}", digest(&spots))).exists());
        // The check has run, which counts even if there is no file of the initial RAM disk.
        let disk = Named::Disk("sda1".into(), [4096, 8192]);
        assert!(looks(&disk, &spots, &sysroot).is_err());
        say_checked(&spots, &sysroot).expect("written");
        assert_eq!(looks(&disk, &spots, &sysroot), Ok(()));
        assert!(looks(&disk, &[spot("b")], &sysroot).is_err());
        assert_eq!(looks(&Named::Firmware, &[spot("b")], &sysroot), Ok(()));
        fs::write(root.path().join("etc/machine-id"), "").expect("a file");
        furnish(&to, &spots, &sysroot).expect("written");
        assert_eq!(whose(&inside), None);
    }
}
