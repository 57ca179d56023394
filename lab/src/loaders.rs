//! Boot loaders for machines that start by themselves. A disk carries the contents of Debian's
//! packages of GRUB and systemd-boot, and a machine installs one of them with the loader's own
//! tools. No root image has them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    apt::Packages,
    error::{Context, Error, Result},
    hash::Ingredients,
    host,
    image::{self, Release},
    lock::Lock,
    machine::Machine,
    paths,
    spec::{Bus, Spec},
};

/// The disk's label.
const LABEL: &str = "mercury-loaders";
const SIZE: &str = "200M";
const NAMES: &str = "grub-efi-amd64-bin,grub-pc-bin,grub2-common,systemd-boot,systemd-boot-efi";
/// Size of the firmware's partition, in MiB.
const FIRMWARE_MIB: u32 = 256;
const INSTALL: &[u8] = include_bytes!("../guest/boot/install");
/// The installer's path in the machine.
const INSTALLER: &str = "/root/install";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loader {
    /// GRUB for UEFI.
    GrubEfi,
    /// GRUB for a BIOS.
    GrubPc,
    /// systemd-boot.
    SystemdBoot,
}

impl Loader {
    fn name(self) -> &'static str {
        match self {
            Self::GrubEfi => "grub-efi",
            Self::GrubPc => "grub-pc",
            Self::SystemdBoot => "systemd-boot",
        }
    }

    /// Adds to this machine the disk with the loader's packages, the firmware that the loader is
    /// for, and one more virtio disk for the firmware's partition.
    ///
    /// # Errors
    /// If the packages cannot be fetched.
    pub fn with(self, spec: Spec) -> Result<Spec> {
        let disk = ensure(spec.kernel.release())?.to_string_lossy().replace(',', ",,");
        let drive = format!("if=none,id=loaders,file={disk},format=raw,read-only=on");
        let words = ["-drive", &drive, "-device", "virtio-blk-pci,drive=loaders"];
        let spec = words.into_iter().fold(spec.disk(Bus::Virtio, FIRMWARE_MIB), Spec::qemu_arg);
        Ok(if self == Self::GrubPc { spec } else { spec.uefi_with_variables() })
    }

    /// Installs the loader in a machine that the lab has started, with `firmware` as the firmware's
    /// partition.
    ///
    /// # Errors
    /// If the loader cannot be installed.
    pub fn install(self, machine: &Machine, firmware: &str) -> Result<()> {
        let arguments = machine.arguments();
        let at = arguments.iter().position(|word| word == "-initrd");
        let initramfs = at.and_then(|at| arguments.get(at + 1)).map(PathBuf::from);
        let initramfs = initramfs.ok_or_else(|| {
            Error::Host(
                "the lab has not started this machine, which so has no initial RAM disk to copy".into(),
            )
        })?;
        let bytes = fs::read(&initramfs).context(|| format!("read {}", initramfs.display()))?;
        machine.put(&format!("/boot/initrd.img-{}", machine.kernel()), &bytes, 0o600)?;
        machine.put(INSTALLER, INSTALL, 0o755)?;
        machine.sh(&format!("{INSTALLER} {} {firmware}", self.name())).map(drop)
    }
}

fn ensure(release: Release) -> Result<PathBuf> {
    let packages = Packages { release: release.codename(), backports: false, names: NAMES };
    let recipe = Ingredients::default().with(format!("{packages:?}")).with(SIZE).name();
    let dir = paths::lab_dir("tools")?.join(format!("loaders-{release}-{recipe}"));
    let disk = dir.join("disk.img");
    if !disk.exists() {
        let _lock = Lock::wait("loaders")?;
        if !disk.exists() {
            make(packages, &dir, &disk)?;
        }
    }
    Ok(disk)
}

fn make(packages: Packages, dir: &Path, disk: &Path) -> Result<()> {
    host::remove_tree(dir)?;
    fs::create_dir_all(dir).context(|| format!("make {}", dir.display()))?;
    let tree = dir.join("tree");
    packages.extract("boot loaders from Debian's packages", "loaders", &tree)?;
    let unfinished = disk.with_extension("new");
    image::make_disk("a disk with boot loaders", &tree, &unfinished, LABEL, SIZE)?;
    host::remove_tree(&tree)?;
    fs::rename(&unfinished, disk).context(|| "name the disk".into())
}
