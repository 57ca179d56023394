//! The options of `mercury tombstone`.

use clap::Args;
use mercury_relocation::options::TombstoneOptions;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct TombstoneArgs {
    /// Clear the tombstone: the system does not run elsewhere, and never will
    #[arg(long)]
    pub clear: bool,
    /// Make a file for the tombstone on a local disk, where a starting system finds it
    #[arg(long, value_name = "FILE", conflicts_with = "clear")]
    pub prepare: Option<PathBuf>,
    /// Check for a tombstone in an initial RAM disk, and return only if the system may start
    #[arg(long, hide = true, conflicts_with_all = ["clear", "prepare"])]
    pub at_boot: bool,
    /// Write the files that an initial RAM disk needs into this folder
    #[arg(long, hide = true, value_name = "FOLDER", conflicts_with_all = ["clear", "prepare", "at_boot"])]
    pub initramfs: Option<PathBuf>,
}

impl From<&TombstoneArgs> for TombstoneOptions {
    fn from(args: &TombstoneArgs) -> Self {
        Self {
            clear: args.clear,
            prepare: args.prepare.clone(),
            at_boot: args.at_boot,
            initramfs: args.initramfs.clone(),
        }
    }
}
