//! The root for kernels as a disk, and a second disk for a build's products. Another machine so
//! builds a kernel by the same commands, with the same compiler and at the same paths as this host.

use std::{
    fs,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use super::{
    build::{self, Built, Flavour},
    root,
};
use crate::{
    error::{Context, Result},
    host, image,
    image::Release,
    lock::Lock,
    paths,
};

const TOOLS_SIZE: &str = "3G";
const OBJECTS_SIZE: &str = "1G";

/// Returns a read-only disk with a release's compiler and the kernel's source. The disk is made
/// first if it is missing.
///
/// # Errors
/// If the disk cannot be made; the error names the log.
pub fn tools(release: Release) -> Result<PathBuf> {
    let tree = root::ensure(release)?;
    let name = format!("disk-{}", root::name(release));
    let disk = paths::lab_dir("tools")?.join(&name).with_extension("img");
    let _lock = Lock::wait(&format!("kernel-{release}"))?;
    if disk.exists() {
        return Ok(disk);
    }
    let (copy, unfinished) = (disk.with_extension("tree"), disk.with_extension("new"));
    host::remove_tree(&copy)?;
    // Hard links suffice: nothing is written there.
    host::run("a tree for builds elsewhere", &name, host::as_root("cp").arg("-al").arg(&tree).arg(&copy))?;
    let source = root::source(release);
    let build = copy.join("build");
    for entry in fs::read_dir(&build).context(|| format!("list {}", build.display()))?.flatten() {
        if entry.file_name() != source {
            host::remove_tree(&entry.path())?;
        }
    }
    host::remove_tree(&copy.join(format!("usr/src/{source}.tar.xz")))?;
    image::make_disk("a disk for builds elsewhere", &copy, &unfinished, "mercury-tools", TOOLS_SIZE)?;
    host::remove_tree(&copy)?;
    fs::rename(&unfinished, &disk).context(|| format!("name {}", disk.display()))?;
    Ok(disk)
}

/// The part of a kernel that is to be built.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// The whole kernel, from its configuration on.
    All,
    /// The files in these directories, separated by blanks, and the link of the kernel. The rest is
    /// built already.
    Directories(&'static str),
}

/// The script that removes earlier products of the second argument's directories, in the first
/// argument's directory, so that they are built again.
const REMOVE: &str = "\
set -e
cd \"$1\"
for directory in $2; do
	find \"$directory\" -name '*.o' -delete -o -name '*.a' -delete -o -name '.*.cmd' -delete
done
rm -f vmlinux vmlinux.o vmlinux.a System.map .tmp_vmlinux* lab.stamp";

/// Makes a disk at `to` for a build's products, with the files from which it begins. `directory` is
/// for intermediate files.
///
/// # Errors
/// If the disk cannot be made; the error names the log.
pub fn objects(
    release: Release,
    (flavour, built): (Flavour, &Built),
    part: Part,
    directory: &Path,
    to: &Path,
) -> Result<()> {
    let tree = directory.join("objects");
    let source = tree.join(root::source(release));
    fs::create_dir_all(&source).context(|| format!("make {}", source.display()))?;
    let there = built.vmlinux.parent().unwrap_or(Path::new("/"));
    // The afterburner of the first build: another one would build everything anew.
    host::copy(&there.with_file_name("afterburner"), &tree.join("afterburner"))?;
    let texts = [(flavour.configuration_file(), flavour.configuration().0), ("build".into(), build::BUILD)];
    for (name, text) in texts {
        fs::write(tree.join(&name), text).context(|| format!("write {name}"))?;
    }
    if let Part::Directories(parts) = part {
        let copy = tree.join(flavour.directory());
        let run = |what, command: &mut std::process::Command| host::run(what, "objects", command);
        run("what was built before", host::as_root("cp").arg("-a").arg(there).arg(&copy))?;
        run("what is built", host::as_root("sh").args(["-c", REMOVE, "sh"]).arg(&copy).arg(parts))?;
    }
    // The file is the caller's own, although root fills it.
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(to);
    let kept = file.and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o600)));
    kept.context(|| format!("make {}", to.display()))?;
    image::make_disk("a disk for objects", &tree, to, "mercury-objects", OBJECTS_SIZE)
}

/// Returns the build's commands, for a shell in a machine whose root is the first of these disks.
/// `device` is the second disk. The output of make is in `/build/log`.
#[must_use]
pub fn commands(release: Release, flavour: Flavour, device: &str) -> String {
    let (source, make) = (root::source(release), flavour.make());
    let (directory, targets) = (flavour.directory(), flavour.targets());
    format!(
        "mount -t tmpfs t /tmp && mount --bind /build/{source} /mnt && mount {device} /build && \
         mount --bind /mnt /build/{source} && \
         sh /build/build {source} {directory} '{make}' '{targets}' > /build/log 2>&1"
    )
}
