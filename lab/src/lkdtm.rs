//! The build of LKDTM, the kernel's own module of crashes (`drivers/misc/lkdtm`). Debian's kernels do not
//! have it. It is built out of tree, from Debian's package of the source, with the release's compiler
//! and headers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    driver::For,
    error::{Context, Result},
    hash::Ingredients,
    host,
    kernel::Kernel,
    lock::Lock,
    paths,
    previrtualization::root,
};

/// The directory inside the build root.
const DIRECTORY: &str = "build-lkdtm";
/// The command that builds the module inside the build root. Its argument is the kernel's headers.
const BUILD: &str = r#"exec make -C "$1" M=/build-lkdtm CONFIG_LKDTM=m modules"#;

/// Builds the module for a stock kernel unless it exists already. Returns its path.
///
/// # Errors
/// If the kernel's source cannot be fetched, or the module does not build; the error names the log.
pub fn build(kernel: Kernel) -> Result<PathBuf> {
    let built_for = For::stock(kernel)?;
    let module = paths::lab_dir("lkdtm")?.join(&built_for.version).join("lkdtm.ko");
    let stamp = module.with_extension("stamp");
    let _lock = Lock::wait(&built_for.lock("lkdtm"))?;
    let inputs = Ingredients::default()
        .with(&built_for.version)
        .with(root::source(kernel.release()))
        .with(BUILD)
        .with_path(&additions())?
        .name();
    if module.exists() && fs::read_to_string(&stamp).is_ok_and(|built| built == inputs) {
        return Ok(module);
    }
    make_for(kernel, &built_for)?;
    let built = built_for.root().join(DIRECTORY).join("lkdtm.ko");
    let directory = module.parent().unwrap_or(&module);
    fs::create_dir_all(directory).context(|| format!("make {}", directory.display()))?;
    fs::copy(&built, &module).context(|| format!("copy {}", built.display()))?;
    fs::write(&stamp, inputs).context(|| format!("write {}", stamp.display()))?;
    Ok(module)
}

/// Returns the folder of the files that the kernel's sources lack.
fn additions() -> PathBuf {
    paths::root().join("lab/lkdtm")
}

/// Copies the kernel's sources of the module into the build root, adds the lab's files, and runs make there.
fn make_for(kernel: Kernel, built_for: &For) -> Result<()> {
    let tree = root::ensure(kernel.release())?;
    let sources = tree.join("build").join(root::source(kernel.release())).join("drivers/misc/lkdtm");
    let (root, version) = (built_for.root(), &built_for.version);
    let build = root.join(DIRECTORY);
    host::remove_tree(&build)?;
    as_root("cp", &[Path::new("-r"), &sources, &build])?;
    as_root("mv", &[&build.join("Makefile"), &build.join("Makefile.kernel")])?;
    for file in ["Makefile", "cr4.c"] {
        as_root("cp", &[&additions().join(file), &build.join(file)])?;
    }
    let mut make = host::as_root("chroot");
    make.arg(root).args(["/bin/sh", "-c", BUILD, "build", built_for.headers()]);
    host::run(&format!("LKDTM for {version}"), &format!("lkdtm-{version}"), &mut make)
}

fn as_root(program: &str, words: &[&Path]) -> Result<()> {
    host::run("copying LKDTM", "lkdtm-copy", host::as_root(program).args(words))
}
