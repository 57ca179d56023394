//! The options of `mercury merge`.

use crate::shared::LevelArgs;
use clap::Args;
use mercury_relocation::{options::MergeOptions, values::Name};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// The new image: a file, a block device, - for standard output, or ssh://[user@]host/path
    pub out: Name,
    /// The images in their order, a full one first. Earlier images that are missing are searched in
    /// the folder of the first
    #[arg(required = true)]
    pub images: Vec<PathBuf>,
    /// Write over a block device that holds something else than an image
    #[arg(long)]
    pub overwrite: bool,
    #[command(flatten)]
    pub level: LevelArgs,
}

impl From<&MergeArgs> for MergeOptions {
    fn from(args: &MergeArgs) -> Self {
        Self {
            out: args.out.clone(),
            images: args.images.clone(),
            overwrite: args.overwrite,
            level: args.level.level,
        }
    }
}
