//! The systems like a hosted kernel, for comparison. They are made from Debian's packages and kept
//! under `target/lab/tools/`.
//!
//! - User Mode Linux with seccomp instead of ptrace, built from the newest source of the kernel in
//!   Debian 13's backports (Linux has it since 6.16).
//! - gVisor, from its own package.
//! - Debian 12's User Mode Linux is installed on the host.

use std::{
    fs,
    path::{Path, PathBuf},
};

use mercury_lab::{
    apt::Packages,
    error::{Context, Error, Result},
    hash::Ingredients,
    host,
    image::Release,
    lock::Lock,
    paths,
    previrtualization::root,
};

/// The package that depends on the package of the newest version.
const SOURCE: Packages = Packages { release: "trixie", backports: true, names: "linux-source" };
const GVISOR: Packages = Packages { release: "trixie", backports: false, names: "runsc" };
/// The lines of the configuration on top of `allnoconfig`.
const CONFIGURATION: &str = include_str!("../../../guest/hosted/uml.config");
/// Options without which the kernel is not the intended one. A newer version may have other names
/// for the rest.
const NEEDED: &[&str] = &[
    "CONFIG_STATIC_LINK=y",
    "CONFIG_HIGH_RES_TIMERS=y",
    "CONFIG_BLK_DEV_INITRD=y",
    "CONFIG_BLK_DEV_UBD=y",
    "CONFIG_EXT4_FS=y",
    "CONFIG_TMPFS=y",
    "CONFIG_DEVTMPFS=y",
    "CONFIG_UNIX=y",
    "CONFIG_SYSVIPC=y",
];
/// The script that builds in the root for kernels, so that the compiler is that of the other
/// kernels.
const BUILD: &str = "\
set -e
cd /build/uml
make -s -C source ARCH=um O=/build/uml/objects KCONFIG_ALLCONFIG=/build/uml/config allnoconfig
exec make -C source ARCH=um O=/build/uml/objects -j1 linux";

/// The program of Debian's package of User Mode Linux, which uses ptrace.
pub const UML: &str = "linux.uml";

/// The paths of the systems, or the reason for which one is missing.
pub struct Peers {
    /// User Mode Linux with seccomp.
    pub uml_seccomp: Result<PathBuf>,
    pub gvisor: Result<PathBuf>,
}

/// Finds the systems, and makes those that are missing.
///
/// # Errors
/// If Debian's User Mode Linux is not installed: the promises compare with it.
pub fn find(release: Release) -> Result<Peers> {
    if host::find_program(UML).is_none() {
        return Err(Error::Host(format!("{UML} is missing: apt install user-mode-linux")));
    }
    Ok(Peers { uml_seccomp: uml_seccomp(release), gvisor: gvisor() })
}

fn gvisor() -> Result<PathBuf> {
    let recipe = Ingredients::default().with(format!("{GVISOR:?}")).name();
    let dir = paths::lab_dir("tools")?.join(format!("gvisor-{recipe}"));
    once("gvisor", &dir, |new| GVISOR.extract("gVisor from Debian's packages", "gvisor", &new.join("tree")))?;
    Ok(dir.join("tree/usr/bin/runsc"))
}

fn uml_seccomp(release: Release) -> Result<PathBuf> {
    let recipe = Ingredients::default().with(format!("{SOURCE:?}")).with(CONFIGURATION).with(BUILD);
    let dir = paths::lab_dir("tools")?.join(format!("uml-{}", recipe.with(release.codename()).name()));
    let root = root::ensure(release)?;
    once(&format!("kernel-{release}"), &dir, |new| build_uml(&root, new))?;
    Ok(dir.join("linux"))
}

/// Makes a directory under a lock, if it is missing. An unfinished directory has another name.
pub(super) fn once(lock: &str, dir: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if dir.exists() {
        return Ok(());
    }
    let _lock = Lock::wait(lock)?;
    if dir.exists() {
        return Ok(());
    }
    let new = dir.with_extension("new");
    host::remove_tree(&new)?;
    fs::create_dir_all(&new).context(|| format!("make {}", new.display()))?;
    make(&new)?;
    fs::rename(&new, dir).context(|| format!("name {}", dir.display()))
}

fn build_uml(root: &Path, new: &Path) -> Result<()> {
    let packages = new.join("packages");
    SOURCE.extract("the newest source of the kernel, from Debian's backports", "uml-source", &packages)?;
    let archive = source_in(&packages.join("usr/src"))?;
    let place = root.join("build/uml");
    host::remove_tree(&place)?;
    let run = |what: &str, log: &str, program: &str, words: &[&Path]| {
        host::run(what, log, host::as_root(program).args(words))
    };
    let source = place.join("source");
    run("a place for User Mode Linux", "uml-place", "mkdir", &[Path::new("-p"), &source])?;
    let mut unpack = host::as_root("tar");
    unpack.arg("-xJf").arg(&archive).arg("-C").arg(&source).arg("--strip-components=1");
    host::run("unpacking the kernel's source", "uml-unpack", &mut unpack)?;
    let configuration = new.join("config");
    fs::write(&configuration, CONFIGURATION).context(|| format!("write {}", configuration.display()))?;
    run("configuring User Mode Linux", "uml-place", "cp", &[&configuration, &place.join("config")])?;
    let mut build = host::as_root("chroot");
    build.arg(root).args(["/bin/sh", "-c", BUILD]);
    host::run("building User Mode Linux", "uml-build", &mut build)?;
    let objects = place.join("objects");
    check(&objects.join(".config"))?;
    run("keeping User Mode Linux", "uml-place", "cp", &[&objects.join("linux"), &new.join("linux")])?;
    host::remove_tree(&place)?;
    host::remove_tree(&packages)
}

/// Returns the archive that the package of the source has brought.
fn source_in(dir: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).context(|| format!("list {}", dir.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths
        .find(|path| path.to_string_lossy().ends_with(".tar.xz"))
        .ok_or_else(|| Error::Host(format!("{} has no source of the kernel", dir.display())))
}

fn check(configuration: &Path) -> Result<()> {
    let text = fs::read_to_string(configuration).context(|| format!("read {}", configuration.display()))?;
    let missing = NEEDED.iter().copied().filter(|line| !text.lines().any(|one| one == *line));
    let missing: Vec<&str> = missing.collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Host(format!("User Mode Linux' configuration lacks {}", missing.join(", "))))
}
