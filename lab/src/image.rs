//! Root images of Debian releases, made from Debian's packages by a script. The lab keeps them
//! under `target/lab/images/` by the hash of their recipe.
//!
//! One tree serves two purposes. The lab turns it into the disk that the machines boot from. It
//! also stays as the build root, in which the kernel module is built with the release's own
//! compiler and headers.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    apt,
    error::{Context, Result},
    hash::Ingredients,
    host,
    lock::Lock,
    paths, progress,
};

/// The script that runs outside the new tree, after the packages are in. Its argument is the tree's
/// path.
const CUSTOMIZE: &str = include_str!("../guest/customize");

/// Size of the root disk's file system. The file is sparse.
const DISK_SIZE: &str = "4G";

/// The packages of every image besides Debian's essential packages.
const PACKAGES: &[&str] = &[
    // The system: kernels, init, and tools to look around.
    "systemd-sysv",
    "udev",
    "dbus",
    "kmod",
    "iproute2",
    "iputils-ping",
    "procps",
    "psmisc",
    "util-linux",
    "less",
    "kexec-tools",
    "linux-image-cloud-amd64",
    "linux-image-amd64",
    // Tools for building the module, here and by DKMS in the machine.
    "linux-headers-cloud-amd64",
    "linux-headers-amd64",
    "gcc",
    "make",
    "libc6-dev",
    "libelf-dev",
    "dkms",
    // Work for the machine, and instruments.
    "postgresql",
    "postgresql-contrib",
    "stress-ng",
    "iperf3",
    "dbench",
    "gdb",
    "strace",
    "linux-perf",
    // File systems besides ext4, and volumes: logical, encrypted, mirrored.
    "xfsprogs",
    "btrfs-progs",
    "dosfstools",
    "lvm2",
    "cryptsetup-bin",
    "mdadm",
    "python3-minimal",
    // For people at a shell: the manual pages and the completion of `mercury`.
    "man-db",
    "bash-completion",
];

/// Paths that the machines do not need.
const EXCLUDED: &[&str] = &["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"];

/// A Debian release that machines run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Release {
    /// Debian 12, kernel 6.1.
    Bookworm,
    /// Debian 13, kernel 6.12.
    Trixie,
}

impl Release {
    /// All releases.
    pub const ALL: [Self; 2] = [Self::Bookworm, Self::Trixie];

    /// Returns the release's name in Debian's archive.
    #[must_use]
    pub fn codename(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.codename())
    }
}

/// A finished image.
#[derive(Clone, Debug)]
pub struct Image {
    dir: PathBuf,
}

impl Image {
    /// Returns the image of `release`. The image is made first if it is missing.
    ///
    /// # Errors
    /// If the image cannot be made; the error names the log.
    pub fn ensure(release: Release) -> Result<Self> {
        let dir = paths::lab_dir("images")?.join(format!("{release}-{}", recipe(release)));
        let image = Self { dir };
        if !image.is_complete() {
            let _lock = Lock::wait(&format!("image-{release}"))?;
            if !image.is_complete() {
                image.make(release)?;
                remove_older(release, &image.dir)?;
            }
        }
        Ok(image)
    }

    /// Returns the path of the tree from which the image was made, which is also the build root.
    #[must_use]
    pub fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }

    /// Returns the path of the root disk, a raw image that the lab never writes to.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.dir.join("root.img")
    }

    fn is_complete(&self) -> bool {
        self.disk().exists()
    }

    fn make(&self, release: Release) -> Result<()> {
        host::remove_tree(&self.dir)?;
        fs::create_dir_all(&self.dir).context(|| format!("make {}", self.dir.display()))?;
        let tree = self.tree();
        make_tree(release, &tree)?;
        let unfinished = self.dir.join("root.img.new");
        make_disk(&format!("{release}: root disk"), &tree, &unfinished, "mercury-root", DISK_SIZE)?;
        fs::rename(&unfinished, self.disk()).context(|| "name the root disk".into())
    }
}

/// Returns everything that decides an image's contents, except for the archive's state on the day.
fn recipe(release: Release) -> String {
    Ingredients::default()
        .with(release.codename())
        .with(PACKAGES.join(" "))
        .with(EXCLUDED.join(" "))
        .with(DISK_SIZE)
        .with(CUSTOMIZE)
        .name()
}

fn make_tree(release: Release, tree: &Path) -> Result<()> {
    let sources = tree.with_extension("list");
    let lines = apt::host_sources_for(release.codename())?;
    fs::write(&sources, lines.join("\n") + "\n").context(|| "write the list of sources".into())?;
    let hook = tree.with_extension("customize");
    fs::write(&hook, CUSTOMIZE).context(|| "write the customization".into())?;
    let what = format!("{release}: root tree from Debian's packages");
    host::run(&what, &format!("image-{release}"), &mut mmdebstrap(release, tree, &hook, &sources))
}

fn mmdebstrap(release: Release, tree: &Path, hook: &Path, sources: &Path) -> Command {
    // Debian's kernels come without an initramfs. The lab makes its own, which saves a minute.
    let mut command = host::as_root_with_own_mounts("env");
    command.args(["INITRD=No", "mmdebstrap", "--mode=root", "--variant=minbase", "--skip=check/qemu"]);
    command.arg(format!("--include={}", PACKAGES.join(",")));
    for path in EXCLUDED {
        command.arg(format!("--dpkgopt=path-exclude={path}"));
    }
    // An unfinished tree is thrown away. So no package has to be on the disk before the next one.
    command.arg("--dpkgopt=force-unsafe-io");
    for option in apt::fetch_options() {
        command.arg(format!("--aptopt={option}"));
    }
    command.arg(format!("--customize-hook=sh '{}' \"$1\"", hook.display()));
    command.arg(release.codename()).arg(tree).arg(sources);
    command
}

/// Makes an ext4 disk from a directory's contents.
///
/// # Errors
/// If mke2fs fails.
pub fn make_disk(what: &str, tree: &Path, disk: &Path, label: &str, size: &str) -> Result<()> {
    let mut command = host::as_root("mke2fs");
    command.args(["-q", "-F", "-t", "ext4", "-m", "0", "-L", label]);
    // Write all inode tables now. A machine should not spend its first minute on them.
    command.args(["-E", "lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0"]);
    command.arg("-d").arg(tree).arg(disk).arg(size);
    host::run(what, "mke2fs", &mut command)
}

/// Removes a release's image, so that the next image is made from the packages of its day.
///
/// # Errors
/// If a part of the image stays.
pub fn forget(release: Release) -> Result<()> {
    let _lock = Lock::wait(&format!("image-{release}"))?;
    remove_older(release, Path::new(""))
}

fn remove_older(release: Release, current: &Path) -> Result<()> {
    let prefix = format!("{release}-");
    let entries = fs::read_dir(paths::lab_dir("images")?).context(|| "list the images".into())?;
    for entry in entries.flatten() {
        let old = entry.file_name().to_string_lossy().starts_with(&prefix);
        if old && entry.path() != current {
            progress::step("removing an older image", || host::remove_tree(&entry.path()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_have_recipes_of_their_own() {
        assert_ne!(recipe(Release::Bookworm), recipe(Release::Trixie));
        assert_eq!(recipe(Release::Trixie), recipe(Release::Trixie));
    }
}
