//! The options of `mercury snapshot`.

use crate::shared::ModuleArgs;
use clap::Args;
use mercury_control::size::mebibytes;
use mercury_relocation::options::SnapshotOptions;

#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Memory for copies of pages that are written to: 512M, 4G; when it is full the snapshot is
    /// lost [default: a quarter of the available memory, and 4G at most]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 24))]
    pub pool: Option<u64>,
    /// Give up the snapshot that is kept
    #[arg(long, conflicts_with_all = ["pool", "hook", "put_back", "force_disks", "force_devices"])]
    pub drop: bool,
    /// Command to run at the instant, with applications held still and file systems frozen, to make
    /// snapshots of disks. If it fails there is no snapshot
    #[arg(long, value_name = "COMMAND")]
    pub hook: Option<String>,
    /// Command to run when the machine has been put back, with applications held still and file
    /// systems frozen, to put disks back to the snapshots that --hook has made. If it fails the
    /// machine restarts at once
    #[arg(long, value_name = "COMMAND", requires = "force_disks")]
    pub put_back: Option<String>,
    /// Give the snapshot up when the machine has been put back to it; --put-back implies that, as it
    /// uses the disks' snapshots up
    #[arg(long, conflicts_with = "drop")]
    pub once: bool,
    /// Keep a snapshot although local file systems are mounted for writing. If a file system has
    /// changed after a rollback, and --put-back has not put it back, the machine restarts at once,
    /// as after a power cut
    #[arg(long)]
    pub force_disks: bool,
    /// Keep a snapshot although devices write to memory that the driver cannot see
    #[arg(long)]
    pub force_devices: bool,
    /// Compare all of memory after a rollback (test builds only)
    #[arg(long, hide = true)]
    pub compare: bool,
    #[command(flatten)]
    pub module: ModuleArgs,
}

impl From<&SnapshotArgs> for SnapshotOptions {
    fn from(args: &SnapshotArgs) -> Self {
        Self {
            pool: args.pool,
            drop: args.drop,
            hook: args.hook.clone(),
            put_back: args.put_back.clone(),
            once: args.once,
            force_disks: args.force_disks,
            force_devices: args.force_devices,
            compare: args.compare,
            module: args.module.module.clone(),
        }
    }
}
