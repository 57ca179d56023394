//! The driver's builds for the lab's kernels. Each build runs in its release's own build root, with
//! the compiler and the headers that users have. Warnings are errors.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{Context, Result},
    hash::Ingredients,
    host,
    image::{Image, Release},
    kernel::Kernel,
    lock::Lock,
    paths,
    previrtualization::{self, Flavour},
};

/// A variant of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// The driver as users get it.
    Production,
    /// The driver with fault points, at which tests make it fail.
    Faults,
}

impl Variant {
    /// Both variants.
    pub const ALL: [Self; 2] = [Self::Production, Self::Faults];

    /// Returns the variant's directory under `target/lab/`, and under `lib/` on the artefacts'
    /// disk.
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

/// A kernel for which modules are built.
#[derive(Clone, Debug)]
pub struct For {
    /// The release in whose build root the modules are built.
    release: Release,
    root: PathBuf,
    /// The version that `uname -r` prints.
    pub version: String,
    /// The kernel's headers and configuration, inside the build root.
    headers: String,
    /// The configuration of a kernel that the lab builds. Structures depend on it, and the version does not.
    configuration: &'static str,
}

impl For {
    /// Returns a stock kernel.
    ///
    /// # Errors
    /// If its image cannot be made.
    pub fn stock(kernel: Kernel) -> Result<Self> {
        let image = Image::ensure(kernel.release())?;
        let version = kernel.files(&image)?.version;
        let headers = format!("/lib/modules/{version}/build");
        Ok(Self { release: kernel.release(), root: image.tree(), version, headers, configuration: "" })
    }

    /// Returns a kernel with checks of its own. The kernel is built first if it is missing.
    ///
    /// # Errors
    /// If the kernel does not build.
    pub fn checked(release: Release, flavour: Flavour) -> Result<Self> {
        let built = previrtualization::build(release, flavour)?;
        let headers = built.directory.clone();
        let named = headers.join("include/config/kernel.release");
        let version = fs::read_to_string(&named).context(|| format!("read {}", named.display()))?;
        let (root, version) = (built.root, version.trim().to_owned());
        let headers = format!("/build/{}", flavour.directory());
        Ok(Self { release, root, version, headers, configuration: flavour.configuration().0 })
    }

    /// Returns the name of a lock: modules of one release are built one after the other.
    pub(crate) fn lock(&self, what: &str) -> String {
        format!("{what}-{}", self.release)
    }

    /// Returns the build root.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns what modules for this kernel are made from, apart from their sources.
    pub(crate) fn ingredients(&self) -> Ingredients {
        Ingredients::default().with(&self.version).with(self.configuration)
    }

    /// Returns the path of the kernel's headers, inside the build root.
    pub(crate) fn headers(&self) -> &str {
        &self.headers
    }
}

/// The command that builds the driver inside the build root. Its arguments are the kernel's headers
/// and the value of `FAULTS`.
const BUILD: &str = r#"exec make -j2 -C /build/driver KDIR="$1" FAULTS="$2" KCFLAGS=-Werror"#;

/// Returns true if the sources contain a driver.
#[must_use]
pub fn exists() -> bool {
    sources().join("Makefile").exists()
}

fn sources() -> PathBuf {
    paths::root().join("switch/driver")
}

/// Builds the module for `kernel`, with the hypervisor `image` embedded, unless the module exists
/// already. Returns the module's path: `target/lab/modules/<kernel version>/mercury.ko`.
///
/// # Errors
/// If the module does not build, or builds with warnings; the error names the log.
pub fn build(kernel: &For, variant: Variant, hypervisor: &Path) -> Result<PathBuf> {
    let module = paths::lab_dir(variant.directory())?.join(&kernel.version).join("mercury.ko");
    let stamp = module.with_extension("stamp");
    let _lock = Lock::wait(&kernel.lock("driver"))?;
    let inputs = inputs(kernel, variant, hypervisor)?;
    if module.exists() && fs::read_to_string(&stamp).is_ok_and(|built| built == inputs) {
        return Ok(module);
    }
    make_for(kernel, variant, hypervisor)?;
    let built = kernel.root.join("build/driver/mercury.ko");
    let directory = module.parent().unwrap_or(&module);
    fs::create_dir_all(directory).context(|| format!("make {}", directory.display()))?;
    fs::copy(&built, &module).context(|| format!("copy {}", built.display()))?;
    fs::write(&stamp, inputs).context(|| format!("write {}", stamp.display()))?;
    Ok(module)
}

fn inputs(kernel: &For, variant: Variant, hypervisor: &Path) -> Result<String> {
    Ok(kernel
        .ingredients()
        .with(variant.directory())
        .with(BUILD)
        .with_path(&sources())?
        .with_path(hypervisor)?
        .name())
}

/// Copies the sources into the build root afresh, and runs make there.
fn make_for(kernel: &For, variant: Variant, hypervisor: &Path) -> Result<()> {
    let (root, version) = (&kernel.root, &kernel.version);
    let build = root.join("build");
    host::remove_tree(&build.join("driver"))?;
    host::run("copying the driver", "driver-copy", host::as_root("mkdir").arg("-p").arg(&build))?;
    let copy = |from: &Path, to: &Path| {
        host::run("copying the driver", "driver-copy", host::as_root("cp").arg("-r").arg(from).arg(to))
    };
    copy(&sources(), &build.join("driver"))?;
    copy(hypervisor, &build.join("driver/hypervisor.bin"))?;
    let mut make = host::as_root("chroot");
    make.arg(root).args(["/bin/sh", "-c", BUILD, "build", kernel.headers(), variant.make_value()]);
    let what = format!("mercury.ko for {version} ({})", variant.directory());
    host::run(&what, &format!("driver-{version}-{}", variant.directory()), &mut make)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_for_one_configuration() {
        let with = |configuration| {
            let (root, headers) = (PathBuf::new(), String::new());
            let version = "6.1".to_owned();
            let kernel = For { release: Release::Bookworm, root, version, headers, configuration };
            kernel.ingredients().name()
        };
        assert_eq!(with("CONFIG_NFS_FS=y\n"), with("CONFIG_NFS_FS=y\n"));
        assert_ne!(with("CONFIG_NFS_FS=y\n"), with(""));
    }
}
