//! The build of a release's kernel, with the afterburner or without.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::root;
use crate::{
    artefacts,
    error::{Context, Error, Result},
    hash::Ingredients,
    host,
    image::Release,
    lock::Lock,
    paths,
};

/// The lines of configurations on top of `allnoconfig`.
const SMALL: &str = include_str!("../../guest/kernel/small.config");
const TINY: &str = include_str!("../../guest/kernel/tiny.config");
const CHECKED: &str = concat!(
    include_str!("../../guest/kernel/small.config"),
    include_str!("../../guest/kernel/checked.config")
);
/// A later line wins: the name of the checked kernel is replaced.
const SANITIZED: &str = concat!(
    include_str!("../../guest/kernel/small.config"),
    include_str!("../../guest/kernel/checked.config"),
    include_str!("../../guest/kernel/sanitized.config")
);

/// Options without which the kernel is not the intended one. The release may have other names for
/// the rest.
const NEEDED_SMALL: &[&str] = &[
    "CONFIG_X86_MPPARSE=y",
    "CONFIG_SMP=y",
    "CONFIG_MODULES=y",
    "CONFIG_RANDOMIZE_MEMORY=y",
    "CONFIG_DYNAMIC_MEMORY_LAYOUT=y",
    "CONFIG_JUMP_LABEL=y",
    "CONFIG_VIRTIO_CONSOLE=y",
    "CONFIG_PAGE_REPORTING=y",
    "CONFIG_BLK_DEV_NVME=y",
    "CONFIG_EXT4_FS=y",
    "CONFIG_INET=y",
    "CONFIG_BLK_DEV_LOOP=m",
    "CONFIG_VIRTIO_PMEM=y",
    "CONFIG_ND_PFN=y",
    "CONFIG_FS_DAX=y",
];

const NEEDED_TINY: &[&str] = &[
    "CONFIG_SMP=y",
    "CONFIG_X86_MPPARSE=y",
    "CONFIG_RANDOMIZE_MEMORY=y",
    "CONFIG_DYNAMIC_MEMORY_LAYOUT=y",
    "CONFIG_JUMP_LABEL=y",
    "CONFIG_SERIAL_8250_CONSOLE=y",
    "CONFIG_BLK_DEV_INITRD=y",
];

const NEEDED_CHECKED: &[&str] = &[
    "CONFIG_PROVE_LOCKING=y",
    "CONFIG_DEBUG_ATOMIC_SLEEP=y",
    "CONFIG_DEBUG_PREEMPT=y",
    "CONFIG_HIBERNATION=y",
    "CONFIG_MEMORY_HOTREMOVE=y",
    "CONFIG_DYNAMIC_FTRACE_WITH_REGS=y",
    "CONFIG_KPROBES=y",
    "CONFIG_KEXEC=y",
    "CONFIG_MODULE_FORCE_UNLOAD=y",
    "CONFIG_NETFILTER=y",
    "CONFIG_DM_SNAPSHOT=y",
    "CONFIG_MACSEC=y",
    "CONFIG_DUMMY=y",
    "CONFIG_SATA_AHCI=y",
    "CONFIG_E1000E=y",
    "CONFIG_VIRTIO_CONSOLE=y",
    "CONFIG_BLK_DEV_NVME=y",
    "CONFIG_EXT4_FS=y",
    "CONFIG_KEXEC_FILE=y",
    "CONFIG_NET_NS=y",
    "CONFIG_MEMCG=y",
    "CONFIG_KVM_AMD=y",
    "CONFIG_WIREGUARD=y",
    "CONFIG_INET_ESP=y",
    "CONFIG_MEMORY_FAILURE=y",
];

const NEEDED_SANITIZED: &[&str] = &[
    "CONFIG_KASAN=y",
    "CONFIG_KASAN_GENERIC=y",
    "CONFIG_KASAN_VMALLOC=y",
    "CONFIG_PROVE_LOCKING=y",
    "CONFIG_HIBERNATION=y",
    "CONFIG_KPROBES=y",
    "CONFIG_VIRTIO_CONSOLE=y",
    "CONFIG_BLK_DEV_NVME=y",
    "CONFIG_EXT4_FS=y",
];

/// A way to build a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// Without the afterburner.
    Plain,
    /// With the afterburner.
    PreVirtualized,
    /// With the afterburner, and with no more than a hosted shell needs, in a fraction of the time.
    /// There is no image to boot.
    Tiny,
    /// Without the afterburner, with the kernel's own checks of its locks, and all that the driver
    /// needs.
    Checked,
    /// The checked kernel with KASAN, which checks each access to memory.
    Sanitized,
}

impl Flavour {
    /// Returns the build's directory, beneath `/build` in the root for kernels.
    #[must_use]
    pub fn directory(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::PreVirtualized => "previrtualized",
            Self::Tiny => "tiny",
            Self::Checked => "checked",
            Self::Sanitized => "sanitized",
        }
    }

    /// Returns the name of the configuration, beside that directory.
    pub(super) fn configuration_file(self) -> String {
        format!("{}.config", self.directory())
    }

    /// Returns the configuration, and the options that must result from it.
    pub(crate) fn configuration(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Plain | Self::PreVirtualized => (SMALL, NEEDED_SMALL),
            Self::Tiny => (TINY, NEEDED_TINY),
            Self::Checked => (CHECKED, NEEDED_CHECKED),
            Self::Sanitized => (SANITIZED, NEEDED_SANITIZED),
        }
    }

    /// Returns the command that builds the kernel there.
    pub(super) fn make(self) -> &'static str {
        match self {
            Self::Plain | Self::Checked | Self::Sanitized => "make",
            Self::PreVirtualized | Self::Tiny => "/build/afterburner make",
        }
    }

    /// Returns the number of lines, about, that a whole build prints: one for each compiled file,
    /// and some more.
    fn lines(self) -> u64 {
        match self {
            Self::Plain | Self::PreVirtualized => 1700,
            Self::Tiny => 900,
            Self::Checked | Self::Sanitized => 1800,
        }
    }

    /// Describes the cost of a whole build.
    fn cost(self) -> &'static str {
        match self {
            Self::Plain | Self::PreVirtualized | Self::Checked | Self::Sanitized => {
                "some 15 minutes on two processors, and 2 GB of disk"
            }
            Self::Tiny => "some 5 minutes on two processors, and 2 GB of disk",
        }
    }

    /// Returns true if the afterburner builds the kernel.
    fn has_slots(self) -> bool {
        matches!(self, Self::PreVirtualized | Self::Tiny)
    }

    /// Returns the lock that a build holds. Flavours that the afterburner builds share its copy in
    /// the root.
    fn lock(self, release: Release) -> String {
        match self {
            Self::Checked | Self::Sanitized => format!("kernel-{release}-{}", self.directory()),
            _ => format!("kernel-{release}"),
        }
    }

    pub(super) fn targets(self) -> &'static str {
        match self {
            Self::Plain | Self::PreVirtualized | Self::Checked | Self::Sanitized => "bzImage modules",
            Self::Tiny => "vmlinux",
        }
    }
}

/// The products of a build.
#[derive(Clone, Debug)]
pub struct Built {
    /// The root in which the kernel was built, and which holds the build.
    pub root: PathBuf,
    pub directory: PathBuf,
    /// The kernel with symbols, and the records of slots.
    pub vmlinux: PathBuf,
    /// The bootable image.
    pub image: PathBuf,
    pub modules: Vec<PathBuf>,
    /// The afterburner that has built the kernel, or could have.
    pub afterburner: PathBuf,
}

/// The build script, the same for all flavours except for the assembler and the configuration. A
/// kernel's statement about its own build is always the same.
pub(super) const BUILD: &str = r#"set -e
source=$1 flavour=$2 make=$3 targets=$4
export KBUILD_BUILD_TIMESTAMP=@0 KBUILD_BUILD_USER=lab KBUILD_BUILD_HOST=lab KBUILD_BUILD_VERSION=1
cd /build
if ! cmp -s $flavour.config $flavour/lab.config; then
	rm -rf $flavour
	mkdir $flavour
	make -s -C $source O=/build/$flavour KCONFIG_ALLCONFIG=/build/$flavour.config allnoconfig
	cp $flavour.config $flavour/lab.config
fi
exec $make -C $source O=/build/$flavour -j2 $targets"#;

/// Builds the kernel, unless it has been built already.
///
/// # Errors
/// If the kernel does not build; the error names the log.
pub fn build(release: Release, flavour: Flavour) -> Result<Built> {
    let afterburner = artefacts::build_program("mercury-afterburner", "afterburner")?;
    let tree = root::ensure(release)?;
    let _lock = Lock::wait(&flavour.lock(release))?;
    let directory = tree.join("build").join(flavour.directory());
    let stamp = directory.join("lab.stamp");
    let inputs = inputs(flavour)?;
    if !fs::read_to_string(&stamp).is_ok_and(|built| built == inputs) {
        make(release, &tree, flavour, &afterburner)?;
        check(flavour, &directory.join(".config"))?;
        put(&inputs, &stamp)?;
    }
    Ok(Built {
        vmlinux: directory.join("vmlinux"),
        image: directory.join("arch/x86/boot/bzImage"),
        modules: modules(&directory)?,
        root: tree,
        directory,
        afterburner,
    })
}

/// Names all inputs that decide how a kernel comes out.
///
/// The afterburner counts by its sources and those of its dependencies. The program itself differs
/// in every clone, since it names the directory in which it was built, and a kernel takes a quarter
/// of an hour.
fn inputs(flavour: Flavour) -> Result<String> {
    let all = Ingredients::default().with(flavour.configuration().0).with(BUILD);
    if !flavour.has_slots() {
        return Ok(all.name());
    }
    let root = paths::root();
    let lock = fs::read_to_string(root.join("Cargo.lock")).context(|| "read Cargo.lock".into())?;
    Ok(all.with(versions(&DECIDING, &lock).join(" ")).with_path(&root.join("hosted/afterburner/src"))?.name())
}

/// Crates that decide the afterburner's treatment of code.
const DECIDING: [&str; 2] = ["iced-x86", "object"];

/// Returns crates with their versions, from a lock file.
fn versions(crates: &[&str], lock: &str) -> Vec<String> {
    let value = |package: &str, key: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(key));
        line.map(|rest| rest.trim_matches([' ', '=', '"']).to_owned())
    };
    let packages =
        lock.split("[[package]]").filter_map(|one| Some((value(one, "name")?, value(one, "version")?)));
    packages
        .filter(|(name, _)| crates.contains(&name.as_str()))
        .map(|(name, version)| format!("{name} {version}"))
        .collect()
}

fn make(release: Release, tree: &Path, flavour: Flavour, afterburner: &Path) -> Result<()> {
    let build = tree.join("build");
    put(flavour.configuration().0, &build.join(flavour.configuration_file()))?;
    if flavour.has_slots() {
        let mut copy = host::as_root("cp");
        copy.arg("--remove-destination").arg(afterburner).arg(build.join("afterburner"));
        host::run("copying the afterburner", "kernel-copy", &mut copy)?;
    }
    let mut command = host::as_root("chroot");
    command.arg(tree).args([
        "/bin/sh",
        "-c",
        BUILD,
        "build",
        root::source(release),
        flavour.directory(),
        flavour.make(),
        flavour.targets(),
    ]);
    if !build.join(flavour.directory()).join("vmlinux").exists() {
        eprintln!("A kernel is built from its source, this time only: {}.", flavour.cost());
    }
    let what = format!("{release}'s kernel, {}", flavour.directory());
    let log = format!("kernel-{release}-{}", flavour.directory());
    host::run_counted(&what, &log, &mut command, flavour.lines())
}

/// Writes a file that may belong to root.
fn put(text: &str, to: &Path) -> Result<()> {
    let own = tempfile(text)?;
    let mut copy: Command = host::as_root("cp");
    host::run("writing into the root for kernels", "kernel-copy", copy.arg(&own).arg(to))?;
    fs::remove_file(&own).context(|| format!("remove {}", own.display()))
}

fn tempfile(text: &str) -> Result<PathBuf> {
    let path = paths::lab_dir("tools")?.join(format!("put-{}", std::process::id()));
    fs::write(&path, text).context(|| format!("write {}", path.display()))?;
    Ok(path)
}

fn check(flavour: Flavour, configuration: &Path) -> Result<()> {
    let text = fs::read_to_string(configuration).context(|| format!("read {}", configuration.display()))?;
    let missing: Vec<&str> = flavour
        .configuration()
        .1
        .iter()
        .copied()
        .filter(|line| !text.lines().any(|one| one == *line))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Host(format!("the kernel's configuration lacks {}", missing.join(", "))))
}

/// Returns all modules beneath a directory.
fn modules(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(directory).context(|| format!("list {}", directory.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(modules(&path)?),
            Ok(_) if path.extension().is_some_and(|ending| ending == "ko") => found.push(path),
            _ => {}
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_named_by_the_versions_of_what_the_afterburner_depends_on() {
        let lock = "version = 4\n\n[[package]]\nname = \"iced-x86\"\nversion = \
                    \"1.21.0\"\n\n[[package]]\nname = \"other\"\n\
                    version = \"2.0.0\"\n\n[[package]]\nname = \"object\"\nversion = \"0.39.1\"\n";
        assert_eq!(versions(&DECIDING, lock), ["iced-x86 1.21.0", "object 0.39.1"]);
    }

    #[test]
    fn the_afterburner_decides_how_a_kernel_comes_out_where_it_builds_it() {
        let names =
            [Flavour::Plain, Flavour::PreVirtualized, Flavour::Tiny].map(|flavour| inputs(flavour).ok());
        assert!(names.iter().all(Option::is_some));
        assert!(names[0] != names[1] && names[1] != names[2]);
    }
}
