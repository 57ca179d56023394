//! The options of `mercury checkpoint`.

use crate::shared::{LevelArgs, ModuleArgs};
use clap::Args;
use mercury_control::size::mebibytes;
use mercury_relocation::{
    options::CheckpointOptions,
    values::{Interval, Name},
};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// The image: a file, a block device, - for standard output, or ssh://[user@]host/path
    pub image: Name,
    /// Power the machine off when the image is complete, with the disks as they were at the instant
    #[arg(long)]
    pub poweroff: bool,
    /// With --poweroff: let peers talk to the machine until it is off. Their connections are broken
    /// afterwards
    #[arg(long, requires = "poweroff")]
    pub no_fence: bool,
    /// Command to run at the instant, with applications held still and file systems frozen, to make
    /// snapshots of disks. If it fails there is no image
    #[arg(long, value_name = "COMMAND")]
    pub hook: Option<String>,
    /// Memory for pages that are written to before they have been streamed: 512M, 4G; it grows if
    /// it runs low [default: a quarter of the available memory, and 1G at most]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 24))]
    pub pool: Option<u64>,
    /// Make one image after the other, at this interval: 90s, 10m, 6h; the time is appended to
    /// FILE's name
    #[arg(long, value_name = "TIME", conflicts_with = "poweroff")]
    pub every: Option<Interval>,
    /// With --every: number of images to keep
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 6,
        value_parser = clap::value_parser!(u16).range(1..),
        requires = "every"
    )]
    pub keep: u16,
    /// Write only the pages that have changed since another image, which the new one then needs
    /// (see `mercury merge`). With --every the other image is the previous one, and the first image
    /// is full unless IMAGE is given
    #[arg(long, value_name = "IMAGE", num_args = 0..=1, require_equals = true)]
    pub incremental: Option<Option<PathBuf>>,
    /// With --every and --incremental: one full image in so many
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 12,
        value_parser = clap::value_parser!(u16).range(1..=256),
        requires_all = ["every", "incremental"]
    )]
    pub full_every: u16,
    /// Write over a block device that holds something else than an image
    #[arg(long)]
    pub overwrite: bool,
    /// Make an image although devices write to memory that the driver cannot see
    #[arg(long)]
    pub force_devices: bool,
    /// Make an image although CPUs are offline: it can be inspected, but not be restored on a
    /// machine that has those CPUs
    #[arg(long)]
    pub force_offline: bool,
    /// Also write the hypervisor's hashes of the instant: address and hash of each frame, 16 bytes
    /// (test builds only)
    #[arg(long, value_name = "FILE", hide = true, conflicts_with = "every")]
    pub hashes: Option<PathBuf>,
    #[command(flatten)]
    pub level: LevelArgs,
    #[command(flatten)]
    pub module: ModuleArgs,
}

impl From<&CheckpointArgs> for CheckpointOptions {
    fn from(args: &CheckpointArgs) -> Self {
        Self {
            image: args.image.clone(),
            poweroff: args.poweroff,
            no_fence: args.no_fence,
            hook: args.hook.clone(),
            pool: args.pool,
            every: args.every,
            keep: args.keep,
            incremental: args.incremental.clone(),
            full_every: args.full_every,
            overwrite: args.overwrite,
            force_devices: args.force_devices,
            force_offline: args.force_offline,
            hashes: args.hashes.clone(),
            level: args.level.level,
            module: args.module.module.clone(),
        }
    }
}
