//! QEMU 11 beside this host's own QEMU. It is extracted from Debian 13's backports into a directory
//! of its own and runs with that release's own libraries. Nothing on the host changes.
//!
//! QEMU 7.2 (Debian 12) errs where VMRUN refuses a control block, has no x2APIC, and executes stale
//! text of kernels that patch themselves while several CPUs run. QEMU 10.0 (Debian 13) does not,
//! but one of its machines in thirty dies of an assertion when it is reset (docs/lab.md).
//!
//! The lab makes QEMU 11 when a machine first asks for it, and keeps it under `target/lab/tools/`
//! by the hash of its recipe.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use super::repaired_qemu;
use crate::{
    apt::Packages,
    error::{Context, Result},
    hash::Ingredients,
    host,
    lock::Lock,
    paths,
};

const PACKAGES: Packages =
    Packages { release: "trixie", backports: true, names: "qemu-system-x86,qemu-utils,seabios" };

/// The script that starts the program of the same name. `exec`: the process that the lab started is
/// QEMU itself.
const START: &str = r#"#!/bin/sh
tree=$(dirname "$(dirname "$(readlink -f "$0")")")/tree
lib=$tree/usr/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$lib/qemu"
exec "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$(dirname "$tree")/qemu-system-x86_64" \
	-L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" "$@"
"#;

/// Returns the program to start in place of `qemu-system-x86_64`. The program is made first if it
/// is missing.
///
/// # Errors
/// If the program cannot be made; the error names the log.
pub fn ensure() -> Result<PathBuf> {
    let dir = paths::lab_dir("tools")?.join(format!("qemu-{}", recipe()));
    let program = dir.join("bin/qemu-system-x86_64");
    if !program.exists() {
        let _lock = Lock::wait("newer-qemu")?;
        if !program.exists() {
            make(&dir, &program)?;
        }
    }
    Ok(program)
}

fn recipe() -> String {
    Ingredients::default().with(format!("{PACKAGES:?}")).with(START).with(repaired_qemu::RECIPE).name()
}

fn make(dir: &Path, program: &Path) -> Result<()> {
    host::remove_tree(dir)?;
    fs::create_dir_all(dir.join("bin")).context(|| format!("make {}", dir.display()))?;
    PACKAGES.extract("a newer QEMU from Debian's backports", "newer-qemu", &dir.join("tree"))?;
    let repaired = dir.join("qemu-system-x86_64");
    fs::copy(dir.join("tree/usr/bin/qemu-system-x86_64"), &repaired).context(|| "copy QEMU".into())?;
    repaired_qemu::repair(&repaired)?;
    // This file comes last: it says that the installation is complete.
    let unfinished = dir.join("start.new");
    fs::write(&unfinished, START).context(|| "write QEMU's starter".into())?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&unfinished, executable).context(|| "mark QEMU's starter".into())?;
    fs::rename(&unfinished, program).context(|| "name QEMU's starter".into())
}
