//! Builds the kernel module for the lab's kernels, in each release's own build root, with the compiler
//! and the headers that its users have. Warnings are errors.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{Context, Result},
    hash::Ingredients,
    host,
    image::Image,
    kernel::Kernel,
    lock::Lock,
    paths,
};

/// What the module is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// As users get it.
    Production,
    /// With points at which tests make it fail.
    Faults,
}

impl Variant {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Production, Self::Faults];

    /// The directory under `target/lab/`, and under `lib/` on the artefacts' disk.
    #[must_use]
    pub fn directory(self) -> &'static str {
        match self {
            Self::Production => "modules",
            Self::Faults => "modules-faults",
        }
    }

    fn make_value(self) -> &'static str {
        match self {
            Self::Production => "",
            Self::Faults => "1",
        }
    }
}

/// Builds inside of the build root; the arguments are the kernel's version and `FAULTS`' value.
const BUILD: &str =
    r#"exec make -j2 -C /build/driver KDIR="/lib/modules/$1/build" FAULTS="$2" KCFLAGS=-Werror"#;

/// Whether there is a driver to build.
#[must_use]
pub fn exists() -> bool {
    sources().join("Makefile").exists()
}

fn sources() -> PathBuf {
    paths::root().join("driver")
}

/// Builds the module for `kernel`, with the hypervisor `image` embedded, unless it is there already.
/// Returns the module: `target/lab/modules/<kernel version>/mercury.ko`.
///
/// # Errors
/// If it does not build, or builds with warnings; the error names the log.
pub fn build(kernel: Kernel, variant: Variant, hypervisor: &Path) -> Result<PathBuf> {
    let root = Image::ensure(kernel.release())?;
    let version = kernel.files(&root)?.version;
    let module = paths::lab_dir(variant.directory())?.join(&version).join("mercury.ko");
    let stamp = module.with_extension("stamp");
    let _lock = Lock::wait(&format!("driver-{}", kernel.release()))?;
    let inputs = inputs(&version, variant, hypervisor)?;
    if module.exists() && fs::read_to_string(&stamp).is_ok_and(|built| built == inputs) {
        return Ok(module);
    }
    make_in(&root.tree(), &version, variant, hypervisor)?;
    let built = root.tree().join("build/driver/mercury.ko");
    let directory = module.parent().unwrap_or(&module);
    fs::create_dir_all(directory).context(|| format!("make {}", directory.display()))?;
    fs::copy(&built, &module).context(|| format!("copy {}", built.display()))?;
    fs::write(&stamp, inputs).context(|| format!("write {}", stamp.display()))?;
    Ok(module)
}

fn inputs(version: &str, variant: Variant, hypervisor: &Path) -> Result<String> {
    Ok(Ingredients::default()
        .with(version)
        .with(variant.directory())
        .with(BUILD)
        .with_path(&sources())?
        .with_path(hypervisor)?
        .name())
}

/// Copies the sources into the build root afresh, and runs make there.
fn make_in(root: &Path, version: &str, variant: Variant, hypervisor: &Path) -> Result<()> {
    let build = root.join("build");
    host::remove_tree(&build)?;
    host::run("copying the driver", "driver-copy", host::as_root("mkdir").arg(&build))?;
    let copy = |from: &Path, to: &Path| {
        host::run("copying the driver", "driver-copy", host::as_root("cp").arg("-r").arg(from).arg(to))
    };
    copy(&sources(), &build.join("driver"))?;
    copy(hypervisor, &build.join("driver/hypervisor.bin"))?;
    let mut make = host::as_root("chroot");
    make.arg(root).args(["/bin/sh", "-c", BUILD, "build", version, variant.make_value()]);
    let what = format!("mercury.ko for {version} ({})", variant.directory());
    host::run(&what, &format!("driver-{version}-{}", variant.directory()), &mut make)
}
