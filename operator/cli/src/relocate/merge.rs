//! The options of `mercury merge`.

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
    /// Level of compression, one of zstd's
    #[arg(
        long,
        default_value_t = 1,
        value_parser = clap::value_parser!(i32).range(-7..=19),
        allow_hyphen_values = true
    )]
    pub level: i32,
}

impl From<&MergeArgs> for MergeOptions {
    fn from(args: &MergeArgs) -> Self {
        Self {
            out: args.out.clone(),
            images: args.images.clone(),
            overwrite: args.overwrite,
            level: args.level,
        }
    }
}
