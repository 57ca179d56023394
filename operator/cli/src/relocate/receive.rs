//! The options of `mercury receive`.

use crate::shared::ModuleArgs;
use clap::Args;
use mercury_control::{size::mebibytes, span::Span};
use mercury_guests::LifeArgs;
use mercury_migration::session::MachineName;
use mercury_relocation::{identity, options::ReceiveOptions, restore::MEMORY_LEAST_MIB, values::Listen};
use std::path::PathBuf;

#[derive(Debug, Default, Args)]
#[command(mut_group("LifeArgs", |group| group.requires("beside")))]
pub struct ReceiveArgs {
    /// Address to wait at: an IPv4 address of this machine, with or without a port (4747) [default:
    /// the address on the network with a gateway, or the only one]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<Listen>,
    /// Only write the restore environment's kernel and initial RAM disk into this folder, and print
    /// the command line that they need. A user who can read the files can receive machines in this
    /// one's place; see --boot-menu
    #[arg(long, value_name = "FOLDER", conflicts_with = "here")]
    pub prepare: Option<PathBuf>,
    /// Also make an entry in the boot menu: GRUB's or systemd-boot's, which must be able to read
    /// the folder
    #[arg(long, requires = "prepare")]
    pub boot_menu: bool,
    /// Lifetime of the pairing token
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub lifetime: Span,
    /// Machine that may move here, by the name that `mercury identity` prints there. The pairing token is
    /// then told to these machines alone, and does not expire; may be given more than once
    #[arg(long, value_name = "NAME", conflicts_with_all = ["lifetime", "beside"])]
    pub source: Vec<MachineName>,
    /// File with this machine's identity, for --source; it is made if it is not there
    #[arg(long, value_name = "FILE", default_value = identity::PATH)]
    pub identity: PathBuf,
    /// Delay before this system ends, in which you can read the pairing token
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub delay: Span,
    /// Keep a complete arrival for ever if its source falls silent, not only for ten minutes
    #[arg(long)]
    pub hold_for_ever: bool,
    /// Give this disk to the machine that arrives, which overwrites all of it with its own
    /// (--with-disk there). It must be the disk at the same place, and of the same size; may be
    /// given more than once
    #[arg(long, value_name = "DISK")]
    pub disk: Vec<PathBuf>,
    /// Give disks although they are in use or hold data: their contents are lost, and with them
    /// this system if it is on them
    #[arg(long, requires = "disk")]
    pub force_disk: bool,
    /// Memory for the restore environment: 256M, 1G [default: by the size of this machine]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(MEMORY_LEAST_MIB..=65536))]
    pub memory: Option<u64>,
    /// Wait now: this is the restore environment
    #[arg(long, hide = true)]
    pub here: bool,
    /// Let the machine go on as a virtual machine of this system, which stays as it is and in use. Needs KVM,
    /// and no root if you may open /dev/kvm
    #[arg(
        long,
        conflicts_with_all = ["prepare", "boot_menu", "delay", "disk", "force_disk", "memory", "here"]
    )]
    pub beside: bool,
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Refuse a machine with more memory: 4G
    #[arg(long, value_name = "SIZE", requires = "beside", value_parser = mebibytes(1..=1 << 30))]
    #[arg(help_heading = "Options with --beside")]
    pub memory_limit: Option<u64>,
    /// Folder for the disks that the machine brings (`mercury migrate --with-disk`). Each becomes a file
    /// there of its name, such as nvme0n1. A file that is there must be empty and as large as the disk; it
    /// may be a link to a block device
    #[arg(long, value_name = "FOLDER", requires = "beside", help_heading = "Options with --beside")]
    pub disk_folder: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Options with --beside")]
    pub life: LifeArgs,
}

impl From<&ReceiveArgs> for ReceiveOptions {
    fn from(args: &ReceiveArgs) -> Self {
        Self {
            listen: args.listen,
            prepare: args.prepare.clone(),
            boot_menu: args.boot_menu,
            lifetime: args.lifetime,
            source: args.source.clone(),
            identity: args.identity.clone(),
            delay: args.delay,
            hold_for_ever: args.hold_for_ever,
            disk: args.disk.clone(),
            force_disk: args.force_disk,
            memory: args.memory,
            here: args.here,
            module: args.module.module.clone(),
        }
    }
}
