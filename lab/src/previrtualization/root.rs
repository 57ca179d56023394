//! A root of each release with the tools for a kernel's build, and the kernel's source in it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    apt,
    error::{Context, Result},
    hash::Ingredients,
    host,
    image::Release,
    lock::Lock,
    paths,
};

/// Packages for building a kernel, besides Debian's essential packages.
const PACKAGES: &[&str] =
    &["gcc", "libc6-dev", "make", "flex", "bison", "bc", "libelf-dev", "libssl-dev", "kmod", "xz-utils"];

const EXCLUDED: &[&str] = &["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"];

/// Returns Debian's package of the kernel's source, and the directory beneath `/build` to which the
/// package is unpacked.
#[must_use]
pub fn source(release: Release) -> &'static str {
    match release {
        Release::Bookworm => "linux-source-6.1",
        Release::Trixie => "linux-source-6.12",
    }
}

/// Returns the root. The root is made first if it is missing.
///
/// # Errors
/// If the root cannot be made; the error names the log.
pub fn ensure(release: Release) -> Result<PathBuf> {
    let dir = paths::lab_dir("tools")?.join(name(release));
    if !dir.exists() {
        let _lock = Lock::wait(&format!("kernel-{release}"))?;
        if !dir.exists() {
            make(release, &dir)?;
        }
    }
    Ok(dir.join("tree"))
}

/// Returns the root's name, by its recipe.
pub(super) fn name(release: Release) -> String {
    format!("kernel-{release}-{}", recipe(release))
}

fn recipe(release: Release) -> String {
    Ingredients::default().with(source(release)).with(PACKAGES.join(" ")).with(EXCLUDED.join(" ")).name()
}

fn make(release: Release, dir: &Path) -> Result<()> {
    let new = dir.with_extension("new");
    host::remove_tree(&new)?;
    fs::create_dir_all(&new).context(|| format!("make {}", new.display()))?;
    let (sources, tree) = (new.join("sources.list"), new.join("tree"));
    let lines = apt::host_sources_for(release.codename())?;
    fs::write(&sources, lines.join("\n") + "\n").context(|| "write the list of sources".into())?;
    let package = source(release);
    let mut command = host::as_root_with_own_mounts("mmdebstrap");
    command.args(["--mode=root", "--variant=minbase", "--skip=check/qemu"]);
    command.args(EXCLUDED.iter().map(|path| format!("--dpkgopt=path-exclude={path}")));
    command.args(apt::fetch_options().iter().map(|option| format!("--aptopt={option}")));
    command.arg(format!("--include={},{package}", PACKAGES.join(",")));
    command.arg(release.codename()).arg(&tree).arg(&sources);
    host::run(
        &format!("{release}: what builds kernels, and {package}"),
        &format!("kernel-{release}"),
        &mut command,
    )?;
    let mut unpack = host::as_root("chroot");
    let line = format!("mkdir -p /build && tar -xJf /usr/src/{package}.tar.xz -C /build");
    unpack.arg(&tree).args(["/bin/sh", "-c", &line]);
    host::run(&format!("unpacking {package}"), &format!("kernel-{release}-unpack"), &mut unpack)?;
    fs::rename(&new, dir).context(|| "name the root for kernels".into())
}
