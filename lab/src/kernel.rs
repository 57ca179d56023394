//! The kernels that machines boot, and an initramfs for each. The initramfs has the agent as
//! `/init`, and the modules that this kernel needs to see its disks and the port to the host (none,
//! for the cloud kernel).

use std::{
    collections::HashMap,
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
    str::FromStr,
};

use mercury_initramfs::Archive;

use crate::{
    error::{Context, Error, Result},
    hash::Ingredients,
    image::{Image, Release},
    lock::Lock,
    paths,
};

/// Modules that lead to the root disk and to the host, unless the kernel has them built in.
const BOOT_MODULES: &[&str] =
    &["nvme", "virtio_pci", "virtio_blk", "ahci", "ata_piix", "sd_mod", "ext4", "virtio_console"];

/// Modules that the kernel would request by alias. An initramfs has no modprobe, so these modules
/// are loaded first. Some kernels have them built in, or not at all.
const CRYPTO_MODULES: &[&str] =
    &["crc32c_generic", "crct10dif_generic", "crc64_rocksoft_generic", "crc64-rocksoft-generic"];

/// A stock Debian kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Debian 12, for virtual machines: 6.1, few drivers, no machine check.
    BookwormCloud,
    /// Debian 12, for any machine: 6.1.
    BookwormGeneric,
    /// Debian 13, for virtual machines: 6.12.
    TrixieCloud,
    /// Debian 13, for any machine: 6.12.
    TrixieGeneric,
}

impl Kernel {
    /// All kernels.
    pub const ALL: [Self; 4] =
        [Self::BookwormCloud, Self::BookwormGeneric, Self::TrixieCloud, Self::TrixieGeneric];

    /// Returns the release to which the kernel belongs.
    #[must_use]
    pub fn release(self) -> Release {
        match self {
            Self::BookwormCloud | Self::BookwormGeneric => Release::Bookworm,
            Self::TrixieCloud | Self::TrixieGeneric => Release::Trixie,
        }
    }

    fn is_cloud(self) -> bool {
        matches!(self, Self::BookwormCloud | Self::TrixieCloud)
    }

    /// Returns the kernel's name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BookwormCloud => "bookworm-cloud",
            Self::BookwormGeneric => "bookworm-generic",
            Self::TrixieCloud => "trixie-cloud",
            Self::TrixieGeneric => "trixie-generic",
        }
    }

    /// Finds this kernel's files in an image.
    ///
    /// # Errors
    /// If the image does not hold the kernel.
    pub fn files(self, image: &Image) -> Result<Files> {
        let boot = image.tree().join("boot");
        let names = fs::read_dir(&boot).context(|| format!("list {}", boot.display()))?;
        let versions = names
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("vmlinuz-").map(str::to_owned))
            .filter(|version| version.ends_with("-amd64"))
            .filter(|version| version.ends_with("-cloud-amd64") == self.is_cloud());
        let version = versions
            .max()
            .ok_or_else(|| Error::Host(format!("{} holds no {self} kernel", boot.display())))?;
        Ok(Files {
            vmlinuz: boot.join(format!("vmlinuz-{version}")),
            modules: image.tree().join("lib/modules").join(&version),
            version,
        })
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kernel {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let all = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|kernel| kernel.name() == name);
        found.ok_or_else(|| format!("unknown kernel; the kernels are {}", all()))
    }
}

#[derive(Clone, Debug)]
pub struct Files {
    /// The version that `uname -r` prints.
    pub version: String,
    /// The bootable image.
    pub vmlinuz: PathBuf,
    /// The directory of the kernel's modules.
    pub modules: PathBuf,
}

impl Files {
    /// Returns an initramfs with `agent` as its first program. The initramfs is made first if it is
    /// missing.
    ///
    /// # Errors
    /// If a module cannot be read or the file not be written.
    pub fn initramfs(&self, agent: &Path) -> Result<PathBuf> {
        let name = Ingredients::default()
            .with(BOOT_MODULES.join(" "))
            .with(CRYPTO_MODULES.join(" "))
            .with_path(&self.modules.join("modules.dep"))?
            .with_path(&self.vmlinuz)?
            .with_path(agent)?
            .name();
        let path = paths::lab_dir("initramfs")?.join(format!("{}-{name}.cpio", self.version));
        ensure_initramfs(&path, || self.pack(agent))?;
        Ok(path)
    }

    fn pack(&self, agent: &Path) -> Result<Vec<u8>> {
        let mut archive = with_agent(agent)?;
        let dependencies = self.modules.join("modules.dep");
        let dependencies =
            fs::read_to_string(&dependencies).context(|| format!("read {}", dependencies.display()))?;
        let mut names = String::new();
        for module in load_order(&dependencies, CRYPTO_MODULES.iter().chain(BOOT_MODULES).copied()) {
            let name = format!("lib/{}.ko", module_name(module));
            archive.file(&name, &read_module(&self.modules.join(module))?);
            names += &(name + "\n");
        }
        archive.file("modules", names.as_bytes());
        Ok(archive.finish())
    }
}

/// Returns an initramfs with `agent` as its first program and nothing else. The initramfs is made
/// first if it is missing.
///
/// # Errors
/// If the file cannot be written.
pub fn initramfs_without_modules(agent: &Path) -> Result<PathBuf> {
    let name = Ingredients::default().with("no modules").with_path(agent)?.name();
    let path = paths::lab_dir("initramfs")?.join(format!("own-{name}.cpio"));
    ensure_initramfs(&path, || {
        let mut archive = with_agent(agent)?;
        archive.file("modules", b"");
        Ok(archive.finish())
    })?;
    Ok(path)
}

fn ensure_initramfs(path: &Path, pack: impl FnOnce() -> Result<Vec<u8>>) -> Result<()> {
    let _lock = Lock::wait("initramfs")?;
    if path.exists() {
        return Ok(());
    }
    let unfinished = path.with_extension("new");
    fs::write(&unfinished, pack()?).context(|| "write the initramfs".into())?;
    fs::rename(&unfinished, path).context(|| "name the initramfs".into())
}

/// Returns an archive with the agent and the folders that every initramfs has.
fn with_agent(agent: &Path) -> Result<Archive> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", "lib"] {
        archive.directory(directory);
    }
    archive.char_device("dev/console", (5, 1));
    let program = fs::read(agent).context(|| format!("read {}", agent.display()))?;
    archive.file("init", &program);
    Ok(archive)
}

/// Returns the paths of the wanted modules and of all their dependencies, each after its own
/// dependencies. Modules that the table does not list are built in.
fn load_order<'a>(modules_dep: &'a str, wanted: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let table: HashMap<&str, (&str, &str)> = modules_dep
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needs)| (module_name(path), (path, needs)))
        .collect();
    let mut order: Vec<&str> = Vec::new();
    for (path, needs) in wanted.filter_map(|name| table.get(name)) {
        // depmod lists dependencies with the most basic one last.
        for module in needs.split_whitespace().rev().chain([*path]) {
            if !order.contains(&module) {
                order.push(module);
            }
        }
    }
    order
}

/// Returns the name of a module from its path: `kernel/fs/ext4/ext4.ko.xz` is the module `ext4`.
fn module_name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file)
}

/// Reads a module's ELF file, unpacked.
fn read_module(path: &Path) -> Result<Vec<u8>> {
    let what = || format!("read {}", path.display());
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path).context(what);
    }
    let unpacked = Command::new("xz").arg("-dc").arg(path).output().context(what)?;
    Ok(unpacked.stdout)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need() {
        let table = "\
kernel/fs/ext4/ext4.ko.xz: kernel/lib/crc16.ko.xz kernel/fs/jbd2/jbd2.ko.xz
kernel/fs/jbd2/jbd2.ko.xz:
kernel/lib/crc16.ko.xz:
kernel/a/top.ko: kernel/a/middle.ko kernel/a/bottom.ko
";
        let order: Vec<&str> = load_order(table, ["top", "ext4", "built_in", "jbd2"].into_iter())
            .into_iter()
            .map(module_name)
            .collect();
        assert_eq!(order, ["bottom", "middle", "top", "jbd2", "crc16", "ext4"]);
    }

    #[test]
    fn kernels_have_names() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.name().parse::<Kernel>().unwrap(), kernel);
        }
        assert!("sid".parse::<Kernel>().is_err());
    }
}
