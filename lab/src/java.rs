//! A disk with Debian 12's Java, for programs that choose the addresses of much memory by themselves.

use std::{fs, path::PathBuf};

use crate::{
    apt::Packages,
    error::{Context, Result},
    hash::Ingredients,
    host, image,
    lock::Lock,
    paths,
};

/// The disk's label.
const LABEL: &str = "mercury-java";
const SIZE: &str = "1G";
/// The packages, with a compiler.
const PACKAGES: Packages =
    Packages { release: "bookworm", backports: false, names: "openjdk-17-jdk-headless,zlib1g" };
/// The command on the disk.
pub const JAVA: &str = "/usr/lib/jvm/java-17-openjdk-amd64/bin/java";

/// Returns the disk: a root in which [`JAVA`] runs.
///
/// # Errors
/// If the packages cannot be fetched; the error names the log.
pub fn disk() -> Result<PathBuf> {
    let name = Ingredients::default().with(format!("{PACKAGES:?}")).with(SIZE).name();
    let disk = paths::lab_dir("tools")?.join(format!("java-{name}.img"));
    let _lock = Lock::wait("java")?;
    if !disk.exists() {
        let (tree, unfinished) = (disk.with_extension("tree"), disk.with_extension("new"));
        host::remove_tree(&tree)?;
        PACKAGES.extract("Debian's Java", "java-packages", &tree)?;
        let mut command = host::as_root("mkdir");
        host::run("a place for /proc", "mkdir", command.arg("-p").arg(tree.join("proc")))?;
        image::make_disk("a disk with it", &tree, &unfinished, LABEL, SIZE)?;
        host::remove_tree(&tree)?;
        fs::rename(&unfinished, &disk).context(|| "name the disk".into())?;
    }
    Ok(disk)
}
