//! The builds of the tests' kernel modules (lab/testmod) for the lab's kernels. They are built as
//! the driver is: in each release's own build root, with warnings as errors. They are not shipped.

use std::{fs, path::PathBuf};

use crate::{
    driver::For,
    error::{Context, Result},
    host,
    lock::Lock,
    paths,
};

/// The modules' files: the one that acts for tests in the kernel, the one that poses as another
/// hypervisor, and a driver with a bug.
pub const FILES: [&str; 3] = ["mercury_test.ko", "vboxdrv.ko", "faulty.ko"];
/// The directory inside the build root.
const DIRECTORY: &str = "build-test";
/// The command that builds the modules inside the build root. Its argument is the kernel's headers.
const BUILD: &str = r#"exec make -C /build-test KDIR="$1" KCFLAGS=-Werror"#;

/// Builds the modules for `kernel` unless they exist already. Returns their directory.
///
/// # Errors
/// If a module does not build; the error names the log.
pub fn build(kernel: &For) -> Result<PathBuf> {
    let directory = paths::lab_dir("modules-test")?.join(&kernel.version);
    let stamp = directory.join("stamp");
    let _lock = Lock::wait(&kernel.lock("testmod"))?;
    let inputs = inputs(kernel)?;
    if fs::read_to_string(&stamp).is_ok_and(|built| built == inputs) {
        return Ok(directory);
    }
    make_for(kernel)?;
    fs::create_dir_all(&directory).context(|| format!("make {}", directory.display()))?;
    for file in FILES {
        let built = kernel.root().join(DIRECTORY).join(file);
        fs::copy(&built, directory.join(file)).context(|| format!("copy {}", built.display()))?;
    }
    fs::write(&stamp, inputs).context(|| format!("write {}", stamp.display()))?;
    Ok(directory)
}

fn sources() -> PathBuf {
    paths::root().join("lab/testmod")
}

/// Returns the header of the interface with the driver and the hypervisor.
fn header() -> PathBuf {
    paths::root().join("switch/driver/mercury_abi.h")
}

fn inputs(kernel: &For) -> Result<String> {
    let all = kernel.ingredients().with(BUILD);
    Ok(all.with_path(&sources())?.with_path(&header())?.name())
}

/// Copies the sources into the build root afresh, and runs make there.
fn make_for(kernel: &For) -> Result<()> {
    let (root, version) = (kernel.root(), &kernel.version);
    let build = root.join(DIRECTORY);
    host::remove_tree(&build)?;
    let copy = |from: &PathBuf, to: &PathBuf| {
        let mut copy = host::as_root("cp");
        host::run("copying the test modules", "testmod-copy", copy.arg("-r").arg(from).arg(to))
    };
    copy(&sources(), &build)?;
    copy(&header(), &build)?;
    let mut make = host::as_root("chroot");
    make.arg(root).args(["/bin/sh", "-c", BUILD, "build", kernel.headers()]);
    host::run(&format!("the test modules for {version}"), &format!("testmod-{version}"), &mut make)
}
