//! Refusals of a checkpoint that depend on its options: where the image lies, and what a restore would say.

use super::target::Target;
use crate::{
    options::CheckpointOptions,
    restore::{fit::Room, prepared},
    values::Name,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::bytes,
    sysroot::Sysroot,
};
use mercury_quiesce::{
    disks, mounts, reachable,
    volumes::{self, Disks},
};
use std::{os::unix::fs::FileTypeExt, path::Path};

pub(super) fn no_parent() -> Error {
    Error::new(Exit::Usage, "--incremental needs the name of the image that was made before")
        .hint("name it: --incremental=IMAGE; with --every it is known")
}

/// Returns the file system that a file target is on, if it is one that is held still.
pub(super) fn below<'a>(
    mounts: &'a [mounts::Mounted],
    target: &Target,
    sysroot: &Sysroot,
) -> Option<&'a mounts::Mounted> {
    let part = target.part()?.canonicalize().ok()?;
    mounts::holder(mounts, &part, sysroot)
}

/// Returns the disks that a restore will find; `None` if disks are not held still for the instant. A machine
/// that runs on after a hook writes to them. With --force-devices the hook's snapshot is taken to have all
/// disks below volumes.
pub(super) fn next_disks(args: &CheckpointOptions) -> Option<Disks> {
    let are_as_left = args.poweroff || args.force_devices;
    (args.poweroff || args.hook.is_some()).then_some(if are_as_left { Disks::AsLeft } else { Disks::PutBack })
}

/// Refuses to power off a machine that could not be brought back, and a hook for disks that change by
/// themselves.
pub(super) fn refuse_blind(
    args: &CheckpointOptions,
    mounts: &[mounts::Mounted],
    sysroot: &Sysroot,
) -> Result<()> {
    if let Some(disks) = next_disks(args) {
        volumes::refuse_restless(disks, sysroot)?;
    }
    if !args.poweroff {
        return Ok(());
    }
    if args.image == Name::Stdout {
        return Err(Error::new(Exit::Usage, "a reader of standard output would stand still like all others")
            .hint("write to a block device, or to ssh://host/path"));
    }
    if !args.force_devices {
        disks::refuse_unreadable(mounts, sysroot)?;
    }
    Ok(())
}

/// Refuses to power off a machine whose image lies where the restore environment cannot reach it.
pub(super) fn refuse_unreachable(args: &CheckpointOptions, image: &Name, sysroot: &Sysroot) -> Result<()> {
    let Name::Path(path) = image else { return Ok(()) };
    let is_device = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    if !args.poweroff || args.force_devices || !is_device {
        return Ok(());
    }
    let Some(why) = reachable::obstacle(path, sysroot) else { return Ok(()) };
    let text = format!("the restore environment cannot reach {}, which {why}", path.display());
    Err(Error::new(Exit::Impossible, text).hint(
        "write the image to a disk or a partition of its own; or go on with --force-devices, and copy it \
         to one before it is restored",
    ))
}

/// Returns the path of an image on this machine.
pub(super) fn path_of(image: &Name) -> Option<&Path> {
    match image {
        Name::Path(path) => Some(path),
        Name::Remote { .. } | Name::Stdout => None,
    }
}

/// Refuses to power off a machine whose prepared restore environment would refuse the image.
pub(super) fn refuse_outdated(args: &CheckpointOptions, image: &Name, sysroot: &Sysroot) -> Result<()> {
    let Some(path) = path_of(image).filter(|_| args.poweroff && !args.force_devices) else { return Ok(()) };
    prepared::memory_mib(path, sysroot).map(drop)
}

/// Refuses an image that the restore environment, which has so many MiB, could not load, if the machine is to
/// be off.
pub(super) fn refuse_crowded(room: Room, memory_mib: u64) -> Result<()> {
    let missing = room.missing();
    if missing == 0 {
        return Ok(());
    }
    let text = format!(
        "{} of memory would find no room in a restore environment of {memory_mib} MiB: there is no image, \
         and the machine runs on",
        bytes(missing)
    );
    Err(Error::new(Exit::Failed, text).hint(
        "use a larger --pool, which leaves more room; or prepare a smaller environment for this image \
         (`mercury restore --prepare FOLDER --memory SIZE IMAGE`)",
    ))
}
