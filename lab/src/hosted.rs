//! A hosted Debian on this terminal: `lab hosted`.

use std::{
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt,
    process::{Command, ExitCode},
};

use crate::{
    artefacts,
    error::{Context, Result},
    host,
    image::{Image, Release},
    paths,
    previrtualization::{self, Flavour},
};

const RELEASE: Release = Release::Bookworm;
const MEMORY: &str = "512M";
const APPEND: &str = "quiet root=/dev/vda rw init=/bin/bash";

/// Starts it, with more arguments for `mercury hosted run`: the small pre-virtualized kernel, and a disk of Debian's that stays.
///
/// # Errors
/// If something does not build.
pub fn shell(arguments: &[OsString]) -> Result<ExitCode> {
    let image = Image::ensure(RELEASE)?;
    let built = previrtualization::build(RELEASE, Flavour::PreVirtualized)?;
    let mercury = artefacts::build_program("mercury-cli", "mercury")?;
    let disk = paths::lab_dir("hosted")?
        .join(image.disk().parent().and_then(|all| all.file_name()).unwrap_or_default());
    if !disk.exists() {
        host::copy(&image.disk(), &disk)?;
        let all = fs::Permissions::from_mode(0o666);
        fs::set_permissions(&disk, all).context(|| format!("let {} be written to", disk.display()))?;
    }
    println!("Debian's disk is {}. Ctrl-A x ends the machine.", disk.display());
    let mut command = Command::new(mercury);
    command.args(["hosted", "run", "--memory", MEMORY, "--append", APPEND, "--kernel"]).arg(built.vmlinux);
    let status = command.arg("--disk").arg(disk).args(arguments).status();
    let status = status.context(|| "start a hosted machine".into())?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
