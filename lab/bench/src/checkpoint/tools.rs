//! A disk with the programs that others use for the same job: CRIU and makedumpfile, from Debian's
//! packages and with that release's own libraries. The lab keeps it under `target/lab/tools/` by
//! the hash of its recipe.

use std::{fs, path::PathBuf};

use mercury_lab::{
    apt::Packages,
    error::{Context, Result},
    hash::Ingredients,
    host, image,
    lock::Lock,
    paths,
};

const PACKAGES: Packages = Packages { release: "bookworm", backports: false, names: "criu,makedumpfile" };
const LABEL: &str = "mercury-peers";
const SIZE: &str = "1500M";

/// Functions for a machine's shell: one finds a disk by its serial number, one calls a program of
/// the tools' disk.
pub const SHELL: &str = r#"
disk() {
    for d in /sys/block/vd*; do test "$(cat $d/serial)" = "mercury-$1" && echo /dev/${d##*/}; done
    true
}
tool() {
    program=$1
    shift
    LD_LIBRARY_PATH=/run/peers/usr/lib/x86_64-linux-gnu:/run/peers/lib/x86_64-linux-gnu \
        /run/peers/usr/$program "$@"
}
mkdir -p /run/peers; mountpoint -q /run/peers || mount -o ro $(disk peers) /run/peers
"#;

/// Returns QEMU's arguments for the disk.
///
/// # Errors
/// If the disk cannot be made.
pub fn arguments() -> Result<[String; 4]> {
    let disk = ensure()?.to_string_lossy().replace(',', ",,");
    let drive = format!("if=none,id=peers,file={disk},format=raw,read-only=on");
    Ok(["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=peers,serial=mercury-peers".into()])
}

fn ensure() -> Result<PathBuf> {
    let recipe = Ingredients::default().with(format!("{PACKAGES:?}")).with(SIZE).name();
    let dir = paths::lab_dir("tools")?.join(format!("peers-{recipe}"));
    let disk = dir.join("peers.img");
    if !disk.exists() {
        let _lock = Lock::wait("peers")?;
        host::remove_tree(&dir)?;
        fs::create_dir_all(&dir).context(|| format!("make {}", dir.display()))?;
        let tree = dir.join("tree");
        PACKAGES.extract("CRIU and makedumpfile from Debian's packages", "peers", &tree)?;
        let unfinished = dir.join("peers.new");
        image::make_disk("a disk with CRIU and makedumpfile", &tree, &unfinished, LABEL, SIZE)?;
        host::remove_tree(&tree)?;
        fs::rename(&unfinished, &disk).context(|| "name the disk".into())?;
    }
    Ok(disk)
}
