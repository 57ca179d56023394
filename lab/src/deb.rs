//! The Debian package: the command, the unit, the documentation, and the driver's sources for DKMS
//! with the production hypervisor beside them. `packaging/build-deb` says what goes where.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    artefacts,
    driver::Variant,
    error::{Context, Error, Result},
    host, hypervisor,
    lock::Lock,
    paths,
};

/// Builds the package and prints its path.
///
/// # Errors
/// If something does not build.
pub fn run() -> Result<()> {
    println!("{}", build()?.display());
    Ok(())
}

/// Builds the package after its contents. Returns `target/deb/mercury_<version>_amd64.deb`.
///
/// # Errors
/// If something does not build; the error names the log.
pub fn build() -> Result<PathBuf> {
    package(&paths::root().join("target/deb"), None)
}

/// Builds the same package with another version, to which the first can be upgraded.
///
/// # Errors
/// As for [`build`].
pub fn build_as(version: &str) -> Result<PathBuf> {
    package(&paths::lab_dir("deb")?, Some(version))
}

fn package(folder: &Path, version: Option<&str>) -> Result<PathBuf> {
    let _lock = Lock::wait("deb")?;
    let command = artefacts::build_hosted()?;
    let hosted = command.with_file_name(artefacts::HOSTED);
    let guest = artefacts::build_program("mercury-guest-command", artefacts::GUEST)?;
    let afterburner = artefacts::build_program("mercury-afterburner", "afterburner")?;
    let hypervisor = hypervisor::build(Variant::Production)?;
    let fresh = folder.join("new");
    host::remove_tree(&fresh)?;
    let mut build = Command::new(paths::root().join("packaging/build-deb"));
    build.arg("--command").arg(command).arg("--hosted").arg(hosted).arg("--afterburner").arg(afterburner);
    build.arg("--guest").arg(guest).arg("--hypervisor").arg(hypervisor).arg("--output").arg(&fresh);
    if let Some(version) = version {
        build.args(["--version", version]);
    }
    host::run("building the Debian package", "deb", &mut build)?;
    let built = only_package(&fresh)?;
    // A reader of the previous package finds a whole package at all times.
    let package = folder.join(built.file_name().unwrap_or_default());
    fs::rename(&built, &package).context(|| format!("name {}", package.display()))?;
    host::remove_tree(&fresh)?;
    Ok(package)
}

fn only_package(folder: &Path) -> Result<PathBuf> {
    let files = fs::read_dir(folder).context(|| format!("read {}", folder.display()))?;
    let mut paths = files.flatten().map(|file| file.path());
    let package = paths.find(|path| path.extension().is_some_and(|kind| kind == "deb"));
    package.ok_or_else(|| Error::Host(format!("no package in {}", folder.display())))
}
