//! The options of `mercury migrate`.

use crate::shared::{LevelArgs, ModuleArgs, TokenArg};
use clap::Args;
use mercury_control::{size::mebibytes, span::Span};
use mercury_migration::{session::MachineName, streams::STREAMS_MAX};
use mercury_relocation::{identity, options::MigrateOptions};
use std::path::PathBuf;

#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// The destination that waits in `mercury receive`: HOST or HOST:PORT
    #[arg(default_value = "", hide_default_value = true, required_unless_present = "dry_run")]
    pub host: String,
    #[command(flatten)]
    pub token: TokenArg,
    /// The destination's name, as `mercury identity` prints it there, instead of a pairing token. The
    /// destination must know this machine (`mercury receive --source`)
    #[arg(long, value_name = "NAME", conflicts_with = "key")]
    pub spare: Option<MachineName>,
    /// File with this machine's identity, for --spare
    #[arg(long, value_name = "FILE", default_value = identity::PATH)]
    pub identity: PathBuf,
    /// Estimate a move by measurements on this machine alone: no destination is asked, and the
    /// driver stays loaded
    #[arg(long)]
    pub dry_run: bool,
    /// Copy in rounds until applications need stand still for no longer than this, if rounds can
    /// achieve it; the instant and the arrival alone are estimated at 450 ms and more [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub max_downtime: Option<Span>,
    /// Give the move up if --max-downtime cannot be met, instead of a longer standstill; not with
    /// --rounds 0
    #[arg(long)]
    pub or_give_up: bool,
    /// Number of rounds at most while everything runs; 0: stop applications first, then copy
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 30,
        value_parser = clap::value_parser!(u32).range(0..=1000)
    )]
    pub rounds: u32,
    /// Throttle of applications at most, in percent of their time, if more is written than the
    /// network carries; it rises step by step; 0: no throttle
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 75,
        value_parser = clap::value_parser!(u8).range(0..=99)
    )]
    pub max_throttle: u8,
    /// Bandwidth a second at most while everything runs: 10M, 1G; a number alone is MiB, for all
    /// sizes
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 20))]
    pub bandwidth: Option<u64>,
    /// Number of connections for pages, each of which is encrypted and decrypted by itself; 1 to 16
    /// [default: the number of CPUs, and 4 at most]
    #[arg(
        long,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(STREAMS_MAX))
    )]
    pub streams: Option<u32>,
    /// TCP's congestion control for the connection, one of the kernel's: bbr keeps its rate over a
    /// link that loses packets
    #[arg(long, value_name = "NAME")]
    pub congestion_control: Option<String>,
    /// Memory for pages that are written to after the instant, and for pages of this machine at
    /// addresses that the destination's restore environment occupies: 512M, 4G [default: a quarter
    /// of the available memory, 192M at least and 1G at most]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 24))]
    pub pool: Option<u64>,
    /// Move this disk too: a whole disk that the destination cannot reach. It goes to the disk at
    /// the same place there, which `mercury receive --disk` gives; may be given more than once
    #[arg(long, value_name = "DISK")]
    pub with_disk: Vec<PathBuf>,
    /// Move although devices write to memory that the driver cannot see
    #[arg(long)]
    pub force_devices: bool,
    /// Move although no tombstone that survives a power cut will keep this machine from starting
    /// while it runs at the destination: make sure that it does not start by itself when its power
    /// comes back
    #[arg(long)]
    pub without_tombstone: bool,
    #[command(flatten)]
    pub level: LevelArgs,
    /// Find changed pages by hashes of all memory, as on machines without a dirty log
    #[arg(long, hide = true, conflicts_with = "verify_log")]
    pub hash: bool,
    /// At the end, also read the pages outside the dirty log, and count those that should have been
    /// in it
    #[arg(long, hide = true)]
    pub verify_log: bool,
    /// Hold still at this step for a while, so that a test can make something fail there
    #[arg(long, hide = true, value_name = "STEP")]
    pub pause_at: Option<String>,
    /// At the end, read all memory that was not free, and compare it with the hashes that the
    /// hypervisor has made at the instant: for a driver with fault points
    #[arg(long, hide = true)]
    pub verify_instant: bool,
    /// The host of this guest has ordered the move, by this name: tell its operator what happens
    #[arg(long, hide = true, value_name = "ORDER", conflicts_with = "dry_run")]
    pub ordered: Option<String>,
    #[command(flatten)]
    pub module: ModuleArgs,
}

impl From<&MigrateArgs> for MigrateOptions {
    fn from(args: &MigrateArgs) -> Self {
        Self {
            host: args.host.clone(),
            key: args.token.key.clone(),
            spare: args.spare,
            identity: args.identity.clone(),
            dry_run: args.dry_run,
            max_downtime: args.max_downtime,
            or_give_up: args.or_give_up,
            rounds: args.rounds,
            max_throttle: args.max_throttle,
            bandwidth: args.bandwidth,
            streams: args.streams,
            congestion_control: args.congestion_control.clone(),
            pool: args.pool,
            with_disk: args.with_disk.clone(),
            force_devices: args.force_devices,
            without_tombstone: args.without_tombstone,
            level: args.level.level,
            hash: args.hash,
            verify_log: args.verify_log,
            pause_at: args.pause_at.clone(),
            verify_instant: args.verify_instant,
            ordered: args.ordered.clone(),
            module: args.module.module.clone(),
        }
    }
}
