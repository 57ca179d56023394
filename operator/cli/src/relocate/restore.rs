//! The options of `mercury restore`.

use crate::shared::ModuleArgs;
use clap::Args;
use mercury_control::size::mebibytes;
use mercury_guests::GuestArgs;
use mercury_relocation::{options::RestoreOptions, restore::MEMORY_LEAST_MIB};
use std::path::PathBuf;

#[derive(Debug, Default, Args)]
#[command(mut_arg("disk", |arg| arg.requires("as_guest")))]
#[command(mut_arg("memory_file", |arg| arg.requires("as_guest")))]
#[command(mut_arg("force_server_disks", |arg| arg.requires("as_guest")))]
#[command(mut_arg("console", |arg| arg.requires("as_guest")))]
#[command(mut_group("LifeArgs", |group| group.requires("as_guest")))]
pub struct RestoreArgs {
    /// The image: a block device, or a file on NFS, or on ext4, XFS, btrfs or FAT on a partition
    pub image: PathBuf,
    /// Only write the restore environment's kernel and initial RAM disk into this folder, and print
    /// the command line that they need; see --boot-menu
    #[arg(long, value_name = "FOLDER", conflicts_with = "here")]
    pub prepare: Option<PathBuf>,
    /// Also make an entry in the boot menu: GRUB's or systemd-boot's, which must be able to read
    /// the folder
    #[arg(long, requires = "prepare")]
    pub boot_menu: bool,
    /// Memory for the restore environment: 256M, 1G [default: what it needs, and at least 128M]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(MEMORY_LEAST_MIB..=1024))]
    pub memory: Option<u64>,
    /// Bring the machine back now: this is the restore environment
    #[arg(long)]
    pub here: bool,
    /// Restore although disks are not as they were at the instant. This destroys file systems
    #[arg(long)]
    pub force_disks: bool,
    /// Let the machine go on as a virtual machine of this system, which stays as it is. Needs KVM, and no
    /// root if you may open /dev/kvm
    #[arg(long, conflicts_with_all = ["prepare", "here", "force_disks", "memory"])]
    pub as_guest: bool,
    #[command(flatten)]
    pub module: ModuleArgs,
    #[command(flatten, next_help_heading = "Options with --as-guest")]
    pub guest: GuestArgs,
}

impl From<&RestoreArgs> for RestoreOptions {
    fn from(args: &RestoreArgs) -> Self {
        Self {
            image: args.image.clone(),
            prepare: args.prepare.clone(),
            boot_menu: args.boot_menu,
            memory: args.memory,
            here: args.here,
            force_disks: args.force_disks,
            module: args.module.module.clone(),
        }
    }
}
