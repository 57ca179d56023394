//! A disk with a stock QEMU, for virtual machines within the lab's machines. The lab keeps the disk
//! under `target/lab/tools/`, beside the QEMU from which it is made.

use std::{fs, path::PathBuf};

use crate::{
    emulator::newer_qemu,
    error::{Context, Error, Result},
    image,
    lock::Lock,
};

/// The disk's label.
const LABEL: &str = "mercury-guests";
const SIZE: &str = "700M";

/// Returns QEMU's arguments for the disk.
///
/// # Errors
/// If the disk cannot be made.
pub fn arguments() -> Result<[String; 4]> {
    let disk = ensure()?.to_string_lossy().replace(',', ",,");
    let drive = format!("if=none,id=guests,file={disk},format=raw,read-only=on");
    Ok(["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=guests".into()])
}

fn ensure() -> Result<PathBuf> {
    let program = newer_qemu::ensure()?;
    let tree = program.ancestors().nth(2).ok_or_else(|| Error::Host("QEMU has no folder".into()))?;
    let disk = tree.with_extension("guests.img");
    if !disk.exists() {
        let _lock = Lock::wait("guests")?;
        let unfinished = tree.with_extension("guests.new");
        image::make_disk("a disk with QEMU for virtual machines", tree, &unfinished, LABEL, SIZE)?;
        fs::rename(&unfinished, &disk).context(|| "name the disk".into())?;
    }
    Ok(disk)
}
