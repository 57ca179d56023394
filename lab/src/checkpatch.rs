//! The kernel's own style checker, taken out of Debian's package of the kernel's source, since no
//! header package has it. The lab keeps it under `target/lab/tools/`.

use std::{fs, path::Path, process::Command};

use crate::{
    apt::Packages,
    error::{Context, Result},
    hash::Ingredients,
    host,
    lock::Lock,
    paths,
};

const SOURCE: Packages = Packages { release: "bookworm", backports: false, names: "linux-source-6.1" };
/// The checker and the two files that it reads from its own directory.
const FILES: &[&str] = &["checkpatch.pl", "spelling.txt", "const_structs.checkpatch"];

const INCLUDE: &str = "include";

/// Returns the command that checks files which are to be added to the kernel. The checker is
/// fetched first if it is missing.
///
/// # Errors
/// If the checker cannot be fetched; the error names the log.
pub fn ensure() -> Result<Command> {
    let recipe = Ingredients::default().with(format!("{SOURCE:?}")).with(FILES.concat()).name();
    let dir = paths::lab_dir("tools")?.join(format!("checkpatch-{recipe}"));
    if !dir.exists() {
        let _lock = Lock::wait("checkpatch")?;
        if !dir.exists() {
            make(&dir)?;
        }
    }
    let mut command = Command::new("perl");
    command.arg(dir.join(FILES[0])).arg("--root").arg(dir);
    Ok(command)
}

fn make(dir: &Path) -> Result<()> {
    let new = dir.with_extension("new");
    host::remove_tree(&new)?;
    fs::create_dir_all(&new).context(|| format!("make {}", new.display()))?;
    let tree = new.join("tree");
    SOURCE.extract("the kernel's source, for checkpatch", "checkpatch", &tree)?;
    let mut tar = Command::new("tar");
    tar.arg("-xJf").arg(tree.join(format!("usr/src/{}.tar.xz", SOURCE.names))).arg("-C").arg(&new);
    tar.args(["--strip-components=2", "--occurrence=1"]);
    tar.args(FILES.iter().map(|file| format!("{}/scripts/{file}", SOURCE.names)));
    host::run("taking checkpatch out of it", "checkpatch-tar", &mut tar)?;
    host::remove_tree(&tree)?;
    // The checker looks in this directory for the names of more types.
    fs::create_dir(new.join(INCLUDE)).context(|| "complete checkpatch".into())?;
    fs::rename(&new, dir).context(|| "name checkpatch".into())
}
