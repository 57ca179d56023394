//! QEMU 10 beside this host's own QEMU: extracted from Debian 13's packages into a directory of its own
//! and run with that release's own libraries, so that nothing of the host changes.
//!
//! QEMU 7.2 (Debian 12) goes astray where VMRUN refuses a control block, has no x2APIC, and executes stale
//! text of kernels that patch themselves while several CPUs run; 10.0 does not. Made when a machine first
//! asks for it; kept under `target/lab/tools/` by the hash of its recipe.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::{
    apt,
    error::{Context, Result},
    hash::Ingredients,
    host,
    lock::Lock,
    paths,
};

const RELEASE: &str = "trixie";
const PACKAGES: &str = "qemu-system-x86,qemu-utils,seabios";
const EXCLUDED: &str = "/usr/share/doc/*";

/// Starts the program that it is called like. `exec`: the process that the lab started is QEMU itself.
const START: &str = r#"#!/bin/sh
tree=$(dirname "$(dirname "$(readlink -f "$0")")")/tree
lib=$tree/usr/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$lib/qemu"
exec "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$tree/usr/bin/qemu-system-x86_64" \
	-L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" "$@"
"#;

/// The program to start in place of `qemu-system-x86_64`; made now if it is not there.
///
/// # Errors
/// If it cannot be made; the error names the log.
pub fn ensure() -> Result<PathBuf> {
    let dir = paths::lab_dir("tools")?.join(format!("qemu10-{}", recipe()));
    let program = dir.join("bin/qemu-system-x86_64");
    if !program.exists() {
        let _lock = Lock::wait("qemu10")?;
        if !program.exists() {
            make(&dir, &program)?;
        }
    }
    Ok(program)
}

fn recipe() -> String {
    Ingredients::default().with(RELEASE).with(PACKAGES).with(EXCLUDED).with(START).name()
}

fn make(dir: &Path, program: &Path) -> Result<()> {
    host::remove_tree(dir)?;
    fs::create_dir_all(dir.join("bin")).context(|| format!("make {}", dir.display()))?;
    apt::extract("QEMU 10 from Debian's packages", "qemu10", RELEASE, PACKAGES, EXCLUDED, &dir.join("tree"))?;
    // Last, for it says that all is there.
    let unfinished = dir.join("start.new");
    fs::write(&unfinished, START).context(|| "write QEMU 10's starter".into())?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&unfinished, executable).context(|| "mark QEMU 10's starter".into())?;
    fs::rename(&unfinished, program).context(|| "name QEMU 10's starter".into())
}
