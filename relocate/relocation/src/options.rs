//! The options of each work, as the command line or a test gives them.

use crate::values::{Interval, Listen, Name};
use mercury_control::span::Span;
use mercury_migration::session::MachineName;
use std::path::PathBuf;

/// The options of a checkpoint.
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// The image: a file, a block device, - for standard output, or ssh://[user@]host/path
    pub image: Name,
    /// Power the machine off when the image is complete, with the disks as they were at the instant
    pub poweroff: bool,
    /// With --poweroff: let peers talk to the machine until it is off. Their connections are broken
    /// afterwards
    pub no_fence: bool,
    /// Command to run at the instant, with applications held still and file systems frozen, to make
    /// snapshots of disks. If it fails there is no image
    pub hook: Option<String>,
    /// Memory for pages that are written to before they have been streamed: 512M, 4G; it grows if
    /// it runs low
    pub pool: Option<u64>,
    /// Make one image after the other, at this interval: 90s, 10m, 6h; the time is appended to
    /// FILE's name
    pub every: Option<Interval>,
    /// With --every: number of images to keep
    pub keep: u16,
    /// Write only the pages that have changed since another image, which the new one then needs
    /// (see `mercury merge`). With --every the other image is the previous one, and the first image
    /// is full unless IMAGE is given
    pub incremental: Option<Option<PathBuf>>,
    /// With --every and --incremental: one full image in so many
    pub full_every: u16,
    /// Write over a block device that holds something else than an image
    pub overwrite: bool,
    /// Make an image although devices write to memory that the driver cannot see
    pub force_devices: bool,
    /// Make an image although CPUs are offline: it can be inspected, but not be restored on a
    /// machine that has those CPUs
    pub force_offline: bool,
    /// Also write the hypervisor's hashes of the instant: address and hash of each frame, 16 bytes
    /// (test builds only)
    pub hashes: Option<PathBuf>,
    /// Level of compression, one of zstd's
    pub level: i32,
    /// The driver's module, if it is not the installed one.
    pub module: Option<PathBuf>,
}

/// The options of a snapshot in memory.
#[derive(Clone, Debug, Default)]
pub struct SnapshotOptions {
    /// Memory for copies of pages that are written to: 512M, 4G; when it is full the snapshot is
    /// lost
    pub pool: Option<u64>,
    /// Give up the snapshot that is kept
    pub drop: bool,
    /// Command to run at the instant, with applications held still and file systems frozen, to make
    /// snapshots of disks. If it fails there is no snapshot
    pub hook: Option<String>,
    /// Command to run when the machine has been put back, with applications held still and file
    /// systems frozen, to put disks back to the snapshots that --hook has made. If it fails the
    /// machine restarts at once
    pub put_back: Option<String>,
    /// Give the snapshot up when the machine has been put back to it; --put-back implies that, as it
    /// uses the disks' snapshots up
    pub once: bool,
    /// Keep a snapshot although local file systems are mounted for writing. If a file system has
    /// changed after a rollback, and --put-back has not put it back, the machine restarts at once,
    /// as after a power cut
    pub force_disks: bool,
    /// Keep a snapshot although devices write to memory that the driver cannot see
    pub force_devices: bool,
    /// Compare all of memory after a rollback (test builds only)
    pub compare: bool,
    /// The driver's module, if it is not the installed one.
    pub module: Option<PathBuf>,
}

/// The options of a restore.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    /// The image: a block device, or a file on NFS, or on ext4, XFS, btrfs or FAT on a partition
    pub image: PathBuf,
    /// Only write the restore environment's kernel and initial RAM disk into this folder, and print
    /// the command line that they need; see --boot-menu
    pub prepare: Option<PathBuf>,
    /// Also make an entry in the boot menu: GRUB's or systemd-boot's, which must be able to read
    /// the folder
    pub boot_menu: bool,
    /// Memory for the restore environment: 128M, 1G
    pub memory: Option<u64>,
    /// Bring the machine back now: this is the restore environment
    pub here: bool,
    /// Restore although disks are not as they were at the instant. This destroys file systems
    pub force_disks: bool,
    /// The driver's module, if it is not the installed one.
    pub module: Option<PathBuf>,
}

/// The options of a destination that waits for a machine.
#[derive(Clone, Debug, Default)]
pub struct ReceiveOptions {
    /// Address to wait at: an IPv4 address of this machine, with or without a port (4747)
    pub listen: Option<Listen>,
    /// Only write the restore environment's kernel and initial RAM disk into this folder, and print
    /// the command line that they need. A user who can read the files can receive machines in this
    /// one's place
    pub prepare: Option<PathBuf>,
    /// Also make an entry in the boot menu: GRUB's or systemd-boot's, which must be able to read
    /// the folder
    pub boot_menu: bool,
    /// Lifetime of the pairing token
    pub lifetime: Span,
    /// Machine that may move here, by the name that `mercury identity` prints there. The pairing token is
    /// then told to these machines alone, and does not expire
    pub source: Vec<MachineName>,
    /// File with this machine's identity, for --source
    pub identity: PathBuf,
    /// Delay before this system ends, in which you can read the pairing token
    pub delay: Span,
    /// Keep a complete arrival for ever if its source falls silent, not only for ten minutes
    pub hold_for_ever: bool,
    /// Give this disk to the machine that arrives, which overwrites all of it with its own
    /// (--with-disk there). It must be the disk at the same place, and of the same size; may be
    /// given more than once
    pub disk: Vec<PathBuf>,
    /// Give disks although they are in use or hold data: their contents are lost, and with them
    /// this system if it is on them
    pub force_disk: bool,
    /// Memory for the restore environment: 256M, 1G
    pub memory: Option<u64>,
    /// Wait now: this is the restore environment
    pub here: bool,
    /// The driver's module, if it is not the installed one.
    pub module: Option<PathBuf>,
}

/// The options of a merge of incremental images.
#[derive(Clone, Debug)]
pub struct MergeOptions {
    /// The new image: a file, a block device, - for standard output, or ssh://[user@]host/path
    pub out: Name,
    /// The images in their order, a full one first. Earlier images that are missing are searched in
    /// the folder of the first
    pub images: Vec<PathBuf>,
    /// Write over a block device that holds something else than an image
    pub overwrite: bool,
    /// Level of compression, one of zstd's
    pub level: i32,
}

/// The options of a look at the tombstone, or of its removal.
#[derive(Clone, Debug, Default)]
pub struct TombstoneOptions {
    /// Clear the tombstone: the system does not run elsewhere, and never will
    pub clear: bool,
    /// Make a file for the tombstone on a local disk, where a starting system finds it
    pub prepare: Option<PathBuf>,
    /// Check for a tombstone in an initial RAM disk, and return only if the system may start
    pub at_boot: bool,
    /// Write the files that an initial RAM disk needs into this folder
    pub initramfs: Option<PathBuf>,
}

/// The options of a move.
#[derive(Clone, Debug, Default)]
pub struct MigrateOptions {
    /// The destination that waits in `mercury receive`: HOST or HOST:PORT
    pub host: String,
    /// Pairing token that `mercury receive` has printed; - reads it from standard input, where `ps`
    /// does not show it
    pub key: Option<String>,
    /// The destination's name, as `mercury identity` prints it there, instead of a pairing token. The
    /// destination must know this machine (`mercury receive --source`)
    pub spare: Option<MachineName>,
    /// File with this machine's identity, for --spare
    pub identity: PathBuf,
    /// Estimate a move by measurements on this machine alone: no destination is asked, and the
    /// driver stays loaded
    pub dry_run: bool,
    /// Copy in rounds until applications need stand still for no longer than this, if rounds can
    /// achieve it; the instant and the arrival alone are estimated at 450 ms and more
    pub max_downtime: Option<Span>,
    /// Give the move up if --max-downtime cannot be met, instead of a longer standstill; not with
    /// --rounds 0
    pub or_give_up: bool,
    /// Number of rounds at most while everything runs; 0: stop applications first, then copy
    pub rounds: u32,
    /// Throttle of applications at most, in percent of their time, if more is written than the
    /// network carries; it rises step by step; 0: no throttle
    pub max_throttle: u8,
    /// Bandwidth a second at most while everything runs: 10M, 1G; a number alone is MiB, for all
    /// sizes
    pub bandwidth: Option<u64>,
    /// Number of connections for pages, each of which is encrypted and decrypted by itself; 1 to 16
    pub streams: Option<u32>,
    /// TCP's congestion control for the connection, one of the kernel's: bbr keeps its rate over a
    /// link that loses packets
    pub congestion_control: Option<String>,
    /// Memory for pages that are written to after the instant, and for pages of this machine at
    /// addresses that the destination's restore environment occupies: 512M, 4G
    pub pool: Option<u64>,
    /// Move this disk too: a whole disk that the destination cannot reach. It goes to the disk at
    /// the same place there, which `mercury receive --disk` gives; may be given more than once
    pub with_disk: Vec<PathBuf>,
    /// Move although devices write to memory that the driver cannot see
    pub force_devices: bool,
    /// Move although no tombstone that survives a power cut will keep this machine from starting
    /// while it runs at the destination: make sure that it does not start by itself when its power
    /// comes back
    pub without_tombstone: bool,
    /// Level of compression, one of zstd's
    pub level: i32,
    /// Find changed pages by hashes of all memory, as on machines without a dirty log
    pub hash: bool,
    /// At the end, also read the pages outside the dirty log, and count those that should have been
    /// in it
    pub verify_log: bool,
    /// Hold still at this step for a while, so that a test can make something fail there
    pub pause_at: Option<String>,
    /// At the end, read all memory that was not free, and compare it with the hashes that the
    /// hypervisor has made at the instant: for a driver with fault points
    pub verify_instant: bool,
    /// The host of this guest has ordered the move, by this name: tell its operator what happens
    pub ordered: Option<String>,
    /// The driver's module, if it is not the installed one.
    pub module: Option<PathBuf>,
}

#[cfg(test)]
impl MigrateOptions {
    /// Reads options as the command line has them, with the command line's defaults.
    pub fn of(text: &str) -> Self {
        let mut options =
            Self { host: "there".into(), rounds: 30, max_throttle: 75, level: 1, ..Self::default() };
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            let mut value = || words.next().expect("a value");
            match word {
                "--max-downtime" => options.max_downtime = Some(value().parse().expect("a span")),
                "--or-give-up" => options.or_give_up = true,
                "--rounds" => options.rounds = value().parse().expect("a number"),
                "--max-throttle" => options.max_throttle = value().parse().expect("a number"),
                "--bandwidth" => options.bandwidth = Some(value().parse().expect("a number")),
                _ => panic!("{word} is no option of these tests"),
            }
        }
        options
    }
}
