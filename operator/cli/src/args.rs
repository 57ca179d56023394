//! The command line. Manual pages and completions are generated from this definition.

use crate::{
    checkpoint::{series::Interval, target::Name},
    cpus::CpuSet,
    explain::Codes,
    receive::Listen,
    restore::MEMORY_LEAST_MIB,
    size::mebibytes,
    span::Span,
};
use clap::{Args, Parser, Subcommand};
use mercury_hosted::{
    devices::{Forward, Mac, Uplink},
    gdb::{Address, GdbOption},
};
use mercury_migration::streams::STREAMS_MAX;
use std::{ffi::OsString, path::PathBuf};

/// Slips a hypervisor beneath the running Linux, and takes it out again
#[derive(Debug, Parser)]
#[command(name = "mercury", version, max_term_width = 100, propagate_version = true)]
#[command(
    long_about = "Slips a hypervisor beneath the running Linux and takes it out again, without a reboot \
    and without disturbing what runs.\n\n`mercury doctor` says whether this machine can do it, `mercury attach` \
    and `mercury detach` switch, `mercury status` shows where each CPU is."
)]
pub struct Cli {
    /// Print one JSON object instead of text (`status --watch`, `log --follow`, `migrate` and `maintenance`: one a line)
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check whether this machine can attach, and say how to mend what is in the way
    #[command(
        long_about = "Runs attach's own checks on every CPU and compares the CPUs, then looks at what only \
        user space can see: kernel, module signing, other hypervisors, memory. Then it asks what checkpoint, snapshot and migrate ask \
        before they begin, and says what they would refuse on this machine as it is.\n\nExits with 0 if attach will \
        work and with 3 if it will not, or if that cannot be told."
    )]
    Doctor(DoctorArgs),
    /// Put the driver and the hypervisor into memory, so that attach takes microseconds
    Load(ModuleArgs),
    /// Free the hypervisor's memory and remove the driver
    Unload(UnloadArgs),
    /// Slip the hypervisor beneath the running system
    #[command(
        long_about = "Slips the hypervisor beneath the running system, on each CPU by itself, and loads \
        driver and hypervisor first if needed. If any CPU refuses, all of them are native again afterwards."
    )]
    Attach(AttachArgs),
    /// Take the hypervisor out; the machine is native again
    Detach(DetachArgs),
    /// Show the mode of each CPU, exits by reason, switch times, memory, and the last crash
    Status(StatusArgs),
    /// Show the status again each second (the same as `status --watch`)
    Top,
    /// Measure the mode switch, or the operating system above it
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Write the whole machine into a file, while it runs on
    #[command(
        long_about = "Writes the whole machine into a file, while it runs on: kernel, processes, connections. \
        Applications stand still while the kernel stops its devices, and not for the length of the writing.\n\n\
        What is in memory must never meet a disk that has moved on. On a machine with local disks an image can be \
        restored only if they are as they were at the instant: --poweroff leaves them so; --hook runs a command \
        that makes a snapshot of them at the same moment."
    )]
    Checkpoint(CheckpointArgs),
    /// Keep what memory holds now, so that the machine can be put back to it
    #[command(
        long_about = "Keeps what all of memory holds now: kernel, processes, connections. The machine runs on; \
        whatever is written to is copied before. `mercury rollback` puts the machine back to this instant within \
        milliseconds; so does the hypervisor by itself when the kernel panics, and when a processor shuts down. \
        Then the snapshot is used up, and this command ends a second time, saying so.\n\nDisks are not put back. \
        On a machine that has local ones mounted for writing a rollback would destroy their file systems, so it \
        gets no snapshot: see --force-disks."
    )]
    Snapshot(SnapshotArgs),
    /// Put the machine back to the snapshot that is kept
    #[command(
        long_about = "Puts the machine back to the instant of `mercury snapshot`. Everything that has happened \
        since is lost, in memory; what others were told in the meantime is not taken back."
    )]
    Rollback,
    /// Bring a machine back from its image
    #[command(
        long_about = "Brings a machine back from its image, in place of this one: every page at its own address, \
        and on from the instant. A small kernel does it, in memory that the image leaves free; by default this \
        command checks the image, prepares that kernel and starts it. This system ends then; save your work."
    )]
    Restore(RestoreArgs),
    /// Make this machine a spare that takes another one in (see migrate)
    #[command(
        long_about = "Makes this machine a spare that takes another one in: prints the line that `mercury migrate` needs \
        there, and starts a small kernel that waits for it. This system ends then, without being shut down; save your \
        work. The machine that comes must be equal: processor, memory map, devices. It is refused with every reason if it \
        is not, and after that the next one may come.\n\nThe network is that of one Ethernet card, as it is now. Both \
        machines must be on the same network, and reach the same disks or network file systems; or disks of this one are given \
        for those that the other one brings along (--disk), which overwrites them."
    )]
    Receive(ReceiveArgs),
    /// Move this machine, with all that runs on it, to another one
    #[command(
        long_about = "Moves this machine, with all that runs on it, to another one that waits in `mercury receive`: kernel, \
        processes, connections, addresses. Memory is sent while everything runs; then applications stand still while the \
        rest is sent, and go on there. This machine is powered off when the other one says that it runs.\n\nWhatever \
        goes wrong before the other machine is told to start, this one goes on as if nothing had been tried; so it does \
        after Ctrl-C. If the other one was told to start and does not answer, this machine stands still and says on its \
        console what to do.\n\nFile systems on disks must be on disks that both machines reach, and not be mounted there, \
        or on such that go along (--with-disk): these are copied while everything runs, too."
    )]
    Migrate(MigrateArgs),
    /// Show the mark that keeps a system which has moved from starting here, and clear it
    #[command(
        long_about = "Shows the mark that keeps a system which has moved from starting here again: after a power cut this machine \
        would otherwise start from disks that it shares with the one that it moved to. A system that comes back by `mercury \
        migrate` clears it. --clear is for one that will not: only if it does not run elsewhere, and never will.\n\nThe mark is a \
        variable of the firmware's (UEFI). For a machine without UEFI --prepare makes a file for it on a local disk, such as \
        /boot/mercury.mark; have the initial RAM disk know it then (update-initramfs -u).\n\nAt a start, on the kernel's command \
        line: mercury.mark=clear starts the system and clears the mark, mercury.mark=ignore starts it and leaves the mark, \
        mercury.mark=poweroff powers off at once if there is one."
    )]
    Mark(MarkArgs),
    /// Move this machine to another one, and back when its own hardware has been seen to
    #[command(
        long_about = "Moves this machine to another one that waits in `mercury receive`, as `mercury migrate` does, and \
        then waits there: the machine that it came from is powered off, and can be repaired. When that is running again, start \
        `mercury receive` on it and type what it says (HOST --key LINE) here: the machine moves back.\n\nThis command goes \
        along with the machine, and so does the session that it runs in. End of input or Ctrl-C while it waits leaves the \
        machine where it is; `mercury migrate` can bring it back at any time."
    )]
    Maintenance(MaintenanceArgs),
    /// Order this machine to leave for the spare that mercuryd was told of, before it fails
    #[command(
        long_about = "Orders this machine to leave for the spare that mercuryd was told of: for scripts that see a failure \
        come, such as Slurm's HealthCheckProgram. The order is given, not waited for; --status says what has come of it. \
        Where there is no mercuryd, or it does not take the order, the exit status says so."
    )]
    Evacuate(EvacuateArgs),
    /// Wait for the order to leave this machine: what mercuryd.service runs
    #[command(
        long_about = "Waits for the order to leave this machine, by `mercury evacuate` or SIGUSR1, and then moves it by \
        `mercury migrate`. The line of the spare is read from its file at each order.\n\nmercuryd.service runs this, once \
        /etc/mercury/spare.key is there, with what /etc/default/mercuryd says: a line MERCURY_SPARE=HOST, and one \
        MIGRATE_OPTIONS=... with options for `mercury migrate`, if any are wanted."
    )]
    Daemon(DaemonArgs),
    /// Show what is in an image, and whether it is whole
    Inspect(InspectArgs),
    /// Put incremental images together with the full one that they were made on
    #[command(
        long_about = "Puts incremental images together with the full one that they were made on: into one image, \
        which is the last of them, full. All of them are read and checked first, and every page that is written has the \
        hash that it had when the last one was made.\n\nThe new image takes the last one's place: what was made on that \
        goes on from this, and those before are no longer needed."
    )]
    Merge(MergeArgs),
    /// Run a pre-virtualized Linux as an ordinary process
    #[command(subcommand)]
    Hosted(HostedCommand),
    /// Show what the hypervisor logged, all CPUs in the order of time
    Log(LogArgs),
    /// Print state and counters for Prometheus, or write them for node_exporter's textfile collector
    #[command(
        long_about = "Prints state and counters in Prometheus' text format: the mode of each CPU, attaches, detaches and exits, \
        the snapshot, and the outcomes of checkpoints and moves since the start. With --textfile the file is replaced \
        as a whole.\n\nEach call asks every CPU for its mode: one exit on each attached CPU. mercury-metrics.timer runs \
        this every 15 seconds."
    )]
    Metrics(MetricsArgs),
    /// Explain a code: what it means, why it matters, what to do
    Explain(ExplainArgs),
    /// Generate manual pages or shell completions
    #[command(hide = true)]
    Generate(GenerateArgs),
    /// Undo what a checkpoint did if it is killed
    #[command(hide = true)]
    Guard,
    /// Say that a machine has arrived, to whoever asks
    #[command(hide = true)]
    Answer,
    /// Print everything that is read of each CPU
    #[command(hide = true)]
    Facts(CpusArgs),
    /// Switch each CPU in turn to the other mode and back, and compare its whole state before, between and after
    #[command(
        long_about = "Switches each CPU in turn to the other mode and back (attach and detach where it is native, detach and \
        attach where it is attached), and compares its whole state before, between and after. Each CPU is left in the mode in \
        which it was. While there is a snapshot of memory the command is refused, for a detach would end that.\n\nExits with 1 \
        if anything differs but what changes with the task that runs."
    )]
    Verify(VerifyArgs),
    /// Arm a fault point (test builds only)
    #[command(hide = true)]
    Fault(FaultArgs),
}

/// Where the driver is.
#[derive(Clone, Debug, Default, Args)]
pub struct ModuleArgs {
    /// Load the driver from this file instead of by modprobe
    #[arg(long, env = "MERCURY_MODULE", value_name = "FILE")]
    pub module: Option<PathBuf>,
}

/// Arguments of doctor.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Show only what is not in order
    #[arg(short, long)]
    pub quiet: bool,
}

/// Arguments of unload.
#[derive(Debug, Args)]
pub struct UnloadArgs {
    /// Detach first if CPUs are attached
    #[arg(long)]
    pub detach: bool,
    /// Leave the driver in, free only the hypervisor
    #[arg(long)]
    pub keep_driver: bool,
}

/// Arguments of attach.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Only these CPUs, such as 0-3,8 [default: all that are online]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Unload KVM without asking if it holds the hardware and no virtual machine uses it
    #[arg(long)]
    pub unload_kvm: bool,
    /// Attach on a kernel of a major version on which Mercury was never tested
    #[arg(long)]
    pub force: bool,
}

/// Arguments of detach.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Only these CPUs, such as 0-3,8 [default: all]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
}

/// A choice of CPUs.
#[derive(Debug, Args)]
pub struct CpusArgs {
    /// Only these CPUs, such as 0-3,8 [default: all that are online]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
}

/// Arguments of verify.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Which CPUs.
    #[command(flatten)]
    pub cpus: CpusArgs,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Arguments of status.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show it again each second until Ctrl-C
    #[arg(short, long)]
    pub watch: bool,
}

/// Arguments of checkpoint.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// The image: a file, a block device, - for standard output, or ssh://[user@]host/path
    pub image: Name,
    /// Power the machine off when the image is complete, with the disks as they were at the instant
    #[arg(long)]
    pub poweroff: bool,
    /// With --poweroff: let peers talk to the machine until it is off. They will not know it any more afterwards
    #[arg(long, requires = "poweroff")]
    pub no_fence: bool,
    /// Run this command at the instant, with applications held still and file systems frozen: to make snapshots of
    /// disks. If it fails there is no image
    #[arg(long, value_name = "COMMAND")]
    pub hook: Option<String>,
    /// Memory for pages that are written to before they have been streamed: 512M, 4G; it grows if it runs low [default: a
    /// quarter of what is available, and 1G at most]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 24))]
    pub pool: Option<u64>,
    /// Make one image after the other, so much time apart: 90s, 10m, 6h; FILE gets the time behind its name
    #[arg(long, value_name = "TIME", conflicts_with = "poweroff")]
    pub every: Option<Interval>,
    /// With --every: so many images are kept
    #[arg(long, value_name = "COUNT", default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..), requires = "every")]
    pub keep: u16,
    /// Write only what has changed since another image, which this one then needs (see `mercury merge`). With --every it
    /// is the image before, and the first one is full unless IMAGE is given
    #[arg(long, value_name = "IMAGE", num_args = 0..=1, require_equals = true)]
    pub incremental: Option<Option<PathBuf>>,
    /// With --every and --incremental: each so many images is a full one
    #[arg(long, value_name = "COUNT", default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=256), requires_all = ["every", "incremental"])]
    pub full_every: u16,
    /// Write over a block device that holds something else than an image
    #[arg(long)]
    pub overwrite: bool,
    /// Make an image although devices write to memory where the driver cannot see it
    #[arg(long)]
    pub force_devices: bool,
    /// Make an image although CPUs are offline: it can be looked into, and not be brought back where they are there
    #[arg(long)]
    pub force_offline: bool,
    /// Also write what the hypervisor has hashed at the instant: address and hash of each frame, 16 bytes (test builds only)
    #[arg(long, value_name = "FILE", hide = true, conflicts_with = "every")]
    pub hashes: Option<PathBuf>,
    /// How hard to compress: zstd's levels
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(-7..=19), allow_hyphen_values = true)]
    pub level: i32,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Arguments of snapshot.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Memory for copies of what is written to: 512M, 4G; when it is full the snapshot is lost [default: a quarter of what
    /// is available, and 4G at most]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 24))]
    pub pool: Option<u64>,
    /// Give up the snapshot that is kept
    #[arg(long, conflicts_with_all = ["pool", "hook", "put_back", "force_disks", "force_devices"])]
    pub drop: bool,
    /// Run this command at the instant, with applications held still and file systems frozen: to make snapshots of
    /// disks. If it fails there is no snapshot
    #[arg(long, value_name = "COMMAND")]
    pub hook: Option<String>,
    /// Run this command when the machine has been put back, with applications held still and file systems frozen: to put
    /// disks back to the snapshots that --hook has made. If it fails the machine restarts at once
    #[arg(long, value_name = "COMMAND", requires = "force_disks")]
    pub put_back: Option<String>,
    /// Keep a snapshot although local file systems are mounted for writing. Those that are not what they were after a
    /// rollback, by themselves or by --put-back, have the machine restart at once, as after a power cut
    #[arg(long)]
    pub force_disks: bool,
    /// Keep a snapshot although devices write to memory where the driver cannot see it
    #[arg(long)]
    pub force_devices: bool,
    /// Compare all of memory after a rollback (test builds only)
    #[arg(long, hide = true)]
    pub compare: bool,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Arguments of restore.
#[derive(Debug, Default, Args)]
pub struct RestoreArgs {
    /// The image: a block device, or a file on NFS, or on ext4, XFS, btrfs or FAT on a partition
    pub image: PathBuf,
    /// Only write the kernel and the initial RAM disk that would do it into this folder, with the command line that
    /// they want; see --boot-menu
    #[arg(long, value_name = "FOLDER", conflicts_with = "here")]
    pub prepare: Option<PathBuf>,
    /// Make an entry of it in the boot menu, too: GRUB's or systemd-boot's, which must be able to read the folder
    #[arg(long, requires = "prepare")]
    pub boot_menu: bool,
    /// Memory for the small kernel: 128M, 1G
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = mebibytes(MEMORY_LEAST_MIB..=1024))]
    pub memory: u64,
    /// This is the small kernel: bring the machine back now
    #[arg(long)]
    pub here: bool,
    /// Restore although disks are not as they were at the instant. This destroys file systems
    #[arg(long)]
    pub force_disks: bool,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Arguments of receive.
#[derive(Debug, Default, Args)]
pub struct ReceiveArgs {
    /// Where to wait: an IPv4 address of this machine, with a port or without (4747) [default: that of the network that
    /// has a gateway, or of the only one]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<Listen>,
    /// Only write the kernel and the initial RAM disk that would do it into this folder, with the command line that
    /// they want. Whoever can read them can take machines in in this one's place
    #[arg(long, value_name = "FOLDER", conflicts_with = "here")]
    pub prepare: Option<PathBuf>,
    /// How long the line is good for
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub lifetime: Span,
    /// How long to wait before this system ends, so that the line can be read
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub delay: Span,
    /// Keep an arrival that is whole for ever if its source falls silent, and not for ten minutes
    #[arg(long)]
    pub hold_for_ever: bool,
    /// Give this disk to the machine that comes, which overwrites all of it with its own (--with-disk there). It is the disk at
    /// the same place, and of the same size; may be given more than once
    #[arg(long, value_name = "DISK")]
    pub disk: Vec<PathBuf>,
    /// Give disks that are in use or hold something, too: with all that is on them, this system itself if it is
    #[arg(long, requires = "disk")]
    pub force_disk: bool,
    /// Memory for the small kernel: 256M, 1G [default: by the size of this machine]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(MEMORY_LEAST_MIB..=65536))]
    pub memory: Option<u64>,
    /// This is the small kernel: wait now
    #[arg(long, hide = true)]
    pub here: bool,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Arguments of mark.
#[derive(Debug, Args)]
pub struct MarkArgs {
    /// Clear it: the system does not run elsewhere, and never will
    #[arg(long)]
    pub clear: bool,
    /// Make a file on a local disk for it, where a starting system finds it
    #[arg(long, value_name = "FILE", conflicts_with = "clear")]
    pub prepare: Option<PathBuf>,
    /// This is an initial RAM disk: look, and return only if the system may start
    #[arg(long, hide = true, conflicts_with_all = ["clear", "prepare"])]
    pub at_boot: bool,
    /// Write what an initial RAM disk has to know into this folder
    #[arg(long, hide = true, value_name = "FOLDER", conflicts_with_all = ["clear", "prepare", "at_boot"])]
    pub initramfs: Option<PathBuf>,
}

/// Arguments of maintenance.
#[derive(Debug, Args)]
pub struct MaintenanceArgs {
    /// How to move, both times.
    #[command(flatten)]
    pub migrate: MigrateArgs,
}

/// Where the daemon takes orders.
const SOCKET: &str = "/run/mercury/control";

/// Arguments of evacuate.
#[derive(Debug, Args)]
pub struct EvacuateArgs {
    /// Why, for the log and for those who ask
    #[arg(long, value_name = "TEXT", default_value = "by order")]
    pub reason: String,
    /// Give no order: say what the daemon is at
    #[arg(long, conflicts_with = "reason")]
    pub status: bool,
    /// Where the daemon takes orders
    #[arg(long, value_name = "FILE", default_value = SOCKET)]
    pub socket: PathBuf,
}

/// Arguments of daemon.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The spare that waits in `mercury receive`: HOST or HOST:PORT
    #[arg(long, env = "MERCURY_SPARE", value_name = "HOST")]
    pub to: String,
    /// The file with the line that `mercury receive` has printed there; nobody but root may read it
    #[arg(long, env = "MERCURY_KEY_FILE", value_name = "FILE", default_value = "/etc/mercury/spare.key")]
    pub key_file: PathBuf,
    /// Where to take orders
    #[arg(long, value_name = "FILE", default_value = SOCKET)]
    pub socket: PathBuf,
    /// Options for `mercury migrate`
    #[arg(last = true, value_name = "OPTION")]
    pub migrate: Vec<String>,
}

/// Arguments of migrate.
#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// The machine that waits in `mercury receive`: HOST or HOST:PORT
    #[arg(default_value = "", hide_default_value = true, required_unless_present = "dry_run")]
    pub host: String,
    /// The line that `mercury receive` has printed; - reads it from standard input, where `ps` does not show it
    #[arg(
        long,
        env = "MERCURY_KEY",
        hide_env_values = true,
        value_name = "LINE",
        allow_hyphen_values = true
    )]
    pub key: Option<String>,
    /// Measure what a move would come to, on this machine alone: no spare is asked, and the driver stays loaded
    #[arg(long)]
    pub dry_run: bool,
    /// Copy on until applications need stand still for no longer than this, as far as that helps; 450 ms and more
    /// are reckoned for the instant and the arrival alone [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub max_downtime: Option<Span>,
    /// If that cannot be had: give the move up, instead of letting them stand still for longer; not with --rounds 0
    #[arg(long)]
    pub or_give_up: bool,
    /// So many rounds at most while everything runs; 0: stop first, then copy
    #[arg(long, value_name = "COUNT", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub rounds: u32,
    /// Where rounds do not help because more is written than goes over: hold applications back step by step, for so much of
    /// their time at most, in percent; 0: not at all
    #[arg(long, value_name = "PERCENT", default_value_t = 75, value_parser = clap::value_parser!(u8).range(0..=99))]
    pub max_throttle: u8,
    /// Send no more than this in a second while everything runs: 10M, 1G; a number alone is MiB, for all sizes
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 20))]
    pub bandwidth: Option<u64>,
    /// By how many connections pages go, each of which is encrypted and decrypted by itself; 1 to 16 [default: as many as
    /// there are CPUs, and 4 at most]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=i64::from(STREAMS_MAX)))]
    pub streams: Option<u32>,
    /// TCP's congestion control for the connection, one of the kernel's: bbr goes on over a link that loses packets
    #[arg(long, value_name = "NAME")]
    pub congestion_control: Option<String>,
    /// Memory for pages that are written to after the instant, and for what of this machine's memory the other one's
    /// small kernel occupies: 512M, 4G [default: a quarter of what is available, 192M at least and
    /// 1G at most]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 24))]
    pub pool: Option<u64>,
    /// Take this disk along: a whole one, which the other machine cannot reach. It goes to the disk at the same place there, which
    /// `mercury receive --disk` gives; may be given more than once
    #[arg(long, value_name = "DISK")]
    pub with_disk: Vec<PathBuf>,
    /// Move although devices write to memory where the driver cannot see it
    #[arg(long)]
    pub force_devices: bool,
    /// Move although nothing that outlasts a power cut will keep this machine from starting while it runs at the other one: see to
    /// it that it does not start by itself when its power comes back
    #[arg(long)]
    pub without_mark: bool,
    /// How hard to compress: zstd's levels
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(-7..=19), allow_hyphen_values = true)]
    pub level: i32,
    /// Find what has changed by hashes of all memory, as where there can be no log of writes
    #[arg(long, hide = true, conflicts_with = "verify_log")]
    pub hash: bool,
    /// At the end, read what is not in the log of writes as well, and count what should have been
    #[arg(long, hide = true)]
    pub verify_log: bool,
    /// Hold still at this step for a while, so that a test can have something fail there
    #[arg(long, hide = true, value_name = "STEP")]
    pub pause_at: Option<String>,
    /// At the end, read all that was not free, and compare it with hashes that the hypervisor has made at the instant: for a driver
    /// with fault points
    #[arg(long, hide = true)]
    pub verify_instant: bool,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Arguments of inspect.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The image: a file, a block device, or - for standard input
    pub image: PathBuf,
    /// Only read what it says of its machine; do not check the rest
    #[arg(long, conflicts_with = "core")]
    pub quick: bool,
    /// Write its memory into this file as an ELF core, for crash and gdb
    #[arg(long, value_name = "FILE")]
    pub core: Option<PathBuf>,
}

/// Arguments of merge.
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// The new image: a file, a block device, - for standard output, or ssh://[user@]host/path
    pub out: Name,
    /// The images in their order, a full one first. What is missing before the first is looked for in its folder
    #[arg(required = true)]
    pub images: Vec<PathBuf>,
    /// Write over a block device that holds something else than an image
    #[arg(long)]
    pub overwrite: bool,
    /// How hard to compress: zstd's levels
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(-7..=19), allow_hyphen_values = true)]
    pub level: i32,
}

/// What to do with a hosted machine.
#[derive(Debug, Subcommand)]
pub enum HostedCommand {
    /// Start a kernel in this process, with its console on this terminal
    #[command(
        long_about = "Starts a kernel that was built with the afterburner in this process: without root, without hardware \
        virtualization. Its first serial port is this terminal; Ctrl-A x ends it.\n\nThe guest's kernel, its programs and \
        this program share one address space: what runs there is not kept apart from each other, unless --isolation=process \
        puts the programs into processes of their own.\n\nThe exit status is 0 \
        when the guest has halted, 10 when it has asked for a reset (as after a panic), 11 when it cannot go on."
    )]
    Run(HostedArgs),
    /// Start gdb at a machine that was started with --gdb
    #[command(
        long_about = "Starts gdb with a kernel's symbols, moved to where the kernel is, and connects it to a machine that was \
        started with --gdb. The machine stops for it; gdb's `detach` lets it go on, `kill` ends it."
    )]
    Gdb(HostedGdbArgs),
}

/// Arguments of hosted gdb.
#[derive(Debug, Args)]
pub struct HostedGdbArgs {
    /// The machine's socket, or its port
    #[arg(value_name = "SOCKET|:PORT")]
    pub address: Address,
    /// The vmlinux that runs there
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// More for gdb, behind --
    #[arg(last = true)]
    pub arguments: Vec<OsString>,
}

/// What keeps a guest's programs apart from its kernel.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Isolation {
    /// Nothing: they share one address space
    None,
    /// Each address space is a process of its own; slower for system calls, faster for switches
    Process,
}

/// Arguments of hosted run.
#[derive(Debug, Args)]
pub struct HostedArgs {
    /// The vmlinux that the build with the afterburner has left, not stripped
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// Its first file system, a cpio archive
    #[arg(long, value_name = "FILE")]
    pub initramfs: Option<PathBuf>,
    /// A disk: a file or a block device, with `,ro` behind it if the guest may only read it. The first one is /dev/vda
    #[arg(long, value_name = "FILE[,ro]")]
    pub disk: Vec<String>,
    /// A network card, connected to a passt of its own or to a tap interface of yours. With `passt,host` the guest reaches
    /// this host's 127.0.0.1 at its gateway's address
    #[arg(long, value_name = "passt[,host]|tap=NAME")]
    pub net: Option<Uplink>,
    /// The card's address, if not one that is always the same on this host
    #[arg(long, value_name = "MAC", requires = "net")]
    pub mac: Option<Mac>,
    /// A port of this host's that leads to the guest's, in passt's words: 8080:80, udp:5353:53, 127.0.0.1/2222:22
    #[arg(long, value_name = "[udp:]PORT[:PORT]", requires = "net")]
    pub forward: Vec<Forward>,
    /// Where gdb may connect to: a socket, or a port of 127.0.0.1. With `,wait` behind it the kernel does not start before
    #[arg(long, value_name = "SOCKET|:PORT[,wait]")]
    pub gdb: Option<GdbOption>,
    /// Memory: 512M, 4G; a number alone is MiB
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = mebibytes(1..=1 << 20))]
    pub memory: u64,
    /// Processors, each of them a process of this host's; 8 at most
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub cpus: u8,
    /// Words for the kernel's command line
    #[arg(long, value_name = "WORDS", default_value = "", allow_hyphen_values = true)]
    pub append: String,
    /// What keeps the guest's programs apart from its kernel and from this program: nothing, or processes of their own
    #[arg(long, value_enum, default_value_t = Isolation::None)]
    pub isolation: Isolation,
    /// Leave programs as they are: each of their system calls is a signal (it always is with --isolation=process)
    #[arg(long)]
    pub no_rewrite: bool,
    /// Say what the guest does that is strange, and at its end what was counted
    #[arg(long)]
    pub verbose: bool,
    /// Load the kernel and say what was found, but do not start it
    #[arg(long)]
    pub check: bool,
}

/// Arguments of log.
#[derive(Debug, Args)]
pub struct LogArgs {
    /// Go on showing what comes until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
}

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Attach and detach again and again: switch times, exit round trip, longest pause of a spinning thread
    Switch(BenchSwitchArgs),
    /// Nine operations of lmbench, those of the papers' tables, and two more: fork, exec, context switch, faults
    Os(BenchOsArgs),
}

/// Arguments of bench switch.
#[derive(Debug, Args)]
pub struct BenchSwitchArgs {
    /// How often to attach and detach
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub cycles: u32,
    /// Where the driver is.
    #[command(flatten)]
    pub module: ModuleArgs,
}

/// Arguments of bench os.
#[derive(Debug, Args)]
pub struct BenchOsArgs {
    /// Samples of each benchmark; their median is shown
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub samples: u32,
    /// Only benchmarks whose name contains this
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
}

/// Arguments of metrics.
#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Write this file instead; node_exporter reads files that end in .prom
    #[arg(long, value_name = "FILE")]
    pub textfile: Option<PathBuf>,
    /// Let this group alone read the file, besides root [default: everybody may]
    #[arg(long, value_name = "GROUP", requires = "textfile")]
    pub group: Option<String>,
}

/// Arguments of explain.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A code by name or number, such as svm-disabled or 43 [default: list them all]
    #[arg(value_parser = Codes, hide_possible_values = true)]
    pub code: Option<String>,
}

/// Arguments of generate.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// What to generate
    pub what: Generated,
    /// Where to put it
    pub directory: PathBuf,
}

/// What can be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Generated {
    /// Manual pages
    Man,
    /// Completions for bash, zsh and fish
    Completions,
}

/// Arguments of fault.
#[derive(Debug, Args)]
pub struct FaultArgs {
    /// Number of the fault point; 0 disarms all and tells how many have fired
    pub point: u32,
    /// Only on this CPU
    #[arg(long)]
    pub cpu: Option<u32>,
    /// At this passage, counting from 1
    #[arg(long, default_value_t = 1)]
    pub passage: u32,
    /// For altered facts: byte offset of the word
    #[arg(long, default_value_t = 0)]
    pub offset: u32,
    /// For altered facts: the word to put there
    #[arg(long, default_value = "0", value_parser = word)]
    pub value: u32,
}

/// A 32-bit number, decimal or with 0x.
fn word(text: &str) -> Result<u32, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn examples_parse() {
        for line in [
            "mercury doctor --json",
            "mercury attach --cpus 0-3,8 --unload-kvm",
            "mercury --json status --watch",
            "mercury bench switch --cycles 200",
            "mercury checkpoint --every 10m --keep 6 --incremental --full-every 4 /net/node7",
            "mercury checkpoint --incremental=/net/base /net/next",
            "mercury merge /dev/sdb1 /net/base /net/next",
            "mercury receive --listen 10.9.0.3",
            "mercury receive --listen 10.9.0.3:99 --delay 10s --prepare /run/x",
            "mercury migrate 10.9.0.3 --key - --max-downtime 300ms --or-give-up",
            "mercury migrate --dry-run",
            "mercury fault 4 --cpu 1 --offset 0x10",
        ] {
            let parsed = Cli::try_parse_from(line.split(' '));
            assert_eq!(parsed.is_ok(), !line.contains("0x10"), "{line}");
        }
        let wrong = [
            "attach --cpus 3-1",
            "merge out",
            "migrate",
            "receive --listen ::1",
            "checkpoint --full-every 3 x",
            "checkpoint --incremental base new",
        ];
        for line in wrong {
            assert!(Cli::try_parse_from(format!("mercury {line}").split(' ')).is_err(), "{line}");
        }
    }

    #[test]
    fn words() {
        assert_eq!(word("0x10"), Ok(16));
        assert_eq!(word("10"), Ok(10));
        assert!(word("x").is_err());
    }
}
