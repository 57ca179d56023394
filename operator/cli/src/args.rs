//! The command line. Manual pages and completions are generated from this definition.

use crate::explain::Codes;
use clap::{Args, Parser, Subcommand};
use mercury_control::{cpus::CpuSet, size::mebibytes, span::Span};
use mercury_hosted_options::HostedCommand;
use mercury_migration::streams::STREAMS_MAX;
use mercury_relocation::{
    restore::MEMORY_LEAST_MIB,
    values::{Interval, Listen, Name},
};
use std::path::PathBuf;

/// Slip a hypervisor beneath the running Linux, and take it out again
#[derive(Debug, Parser)]
#[command(name = "mercury", version, max_term_width = 100, propagate_version = true)]
#[command(
    long_about = "Slips a hypervisor beneath the running Linux and takes it out again, without a reboot \
    and without disturbing the applications.\n\n`mercury doctor` says if this machine can be attached. \
    `mercury attach` and `mercury detach` switch its CPUs. `mercury status` shows the mode of each CPU."
)]
pub struct Cli {
    /// Print one JSON object instead of text (`status --watch`, `log --follow`, `migrate` and
    /// `maintenance`: one a line)
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check if this machine can attach, and say how to remove each obstacle
    #[command(
        long_about = "Runs attach's own checks on every CPU and compares the CPUs. Then reads what only \
        user space can see: kernel, module signing, other hypervisors, memory. Finally runs the checks \
        that checkpoint, snapshot and migrate make before they begin, and says what those commands would \
        refuse on this machine as it is.\n\nExits with 0 if attach will work. Exits with 3 if attach will \
        not work, or if the checks cannot decide it."
    )]
    Doctor(DoctorArgs),
    /// Load the driver and the hypervisor into memory, so that attach takes microseconds
    Load(ModuleArgs),
    /// Free the hypervisor's memory and remove the driver
    Unload(UnloadArgs),
    /// Slip the hypervisor beneath the running system
    #[command(long_about = "Slips the hypervisor beneath the running system. Each CPU switches by itself. \
        Driver and hypervisor are loaded first if needed. If any CPU refuses, all CPUs are native again \
        afterwards.")]
    Attach(AttachArgs),
    /// Take the hypervisor out, so that the machine is native again
    Detach(DetachArgs),
    /// Show the mode of each CPU, exits by reason, switch times, memory, and the last crash
    Status(StatusArgs),
    /// Show the status again each second (the same as `status --watch`)
    Top,
    /// Measure the mode switch, or the operating system above it
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Write the whole machine into a file, while it goes on running
    #[command(
        long_about = "Writes the whole machine into a file: kernel, processes, connections. The machine \
        goes on running. Applications stand still while the kernel stops its devices, not while the file \
        is written.\n\nMemory must never be restored beside a disk that has changed since. A machine with \
        local disks can be restored only if the disks are as they were at the instant: --poweroff leaves \
        them so; --hook runs a command that makes snapshots of them at the same moment."
    )]
    Checkpoint(CheckpointArgs),
    /// Keep the contents of memory, so that the machine can be put back to this instant
    #[command(
        long_about = "Keeps the contents of all memory at this instant: kernel, processes, connections. \
        The machine goes on running; each page is copied before it is written to. `mercury rollback` puts \
        the machine back to this instant within milliseconds. So does the hypervisor by itself when the \
        kernel panics or when a processor shuts down. Then the snapshot is used up, and this command ends \
        a second time and says so.\n\nA rollback does not put disks back. On a machine with local disks \
        mounted for writing it would destroy their file systems, so such a machine gets no snapshot: see \
        --force-disks."
    )]
    Snapshot(SnapshotArgs),
    /// Put the machine back to the snapshot that is kept
    #[command(
        long_about = "Puts the machine back to the instant of `mercury snapshot`. Everything that has \
        happened in memory since then is lost. Messages that peers have received in the meantime are not \
        taken back."
    )]
    Rollback,
    /// Bring a machine back from its image
    #[command(
        long_about = "Brings a machine back from its image, in place of this one. Every page goes to its \
        own address, and the machine goes on from the instant of the image. A restore environment (a \
        small kernel in memory that the image leaves free) loads the image. By default this command \
        checks the image, prepares that environment and starts it. This system ends then, without being \
        shut down; save your work."
    )]
    Restore(RestoreArgs),
    /// Make this machine a destination that receives another one (see migrate)
    #[command(long_about = "Makes this machine the destination of a move: prints the pairing token that \
        `mercury migrate` needs, and starts a restore environment that waits for the source. This system \
        ends then, without being shut down; save your work. The machine that arrives must be equal: \
        processor, memory map, devices. If it is not equal it is refused with every reason, and after \
        that the next one may come.\n\nThe network is that of one Ethernet card, as it is now. Both \
        machines must be on the same network, and reach the same disks or network file systems. Local \
        disks of the source can move too: give disks of this machine for them (--disk), which overwrites \
        the given disks.")]
    Receive(ReceiveArgs),
    /// Move this machine, with everything that runs on it, to another one
    #[command(
        long_about = "Moves this machine, with everything that runs on it, to another one that waits in \
        `mercury receive`: kernel, processes, connections, addresses. Memory is sent while everything \
        runs. Then applications stand still while the rest is sent, and go on at the destination. This \
        machine is powered off when the destination says that it runs.\n\nIf anything goes wrong before \
        the destination is told to start, this machine goes on as if nothing had been tried. The same \
        holds after Ctrl-C. If the destination was told to start and does not answer, this machine stands \
        still and says on its console what to do.\n\nFile systems must be on disks that both machines \
        reach and that the destination has not mounted, or on disks that move too (--with-disk). Such \
        disks are copied while everything runs."
    )]
    Migrate(MigrateArgs),
    /// Show the tombstone that keeps a system that has moved from starting here, and clear it
    #[command(
        long_about = "Shows the tombstone that keeps a system that has moved from starting here again. \
        Without it, this machine would start after a power cut from disks that it shares with the machine \
        that it moved to. A system that comes back by `mercury migrate` clears the tombstone. --clear is \
        for a system that will not come back: use it only if the system does not run elsewhere, and never \
        will.\n\nThe tombstone is a UEFI variable of the firmware. For a machine without UEFI, --prepare \
        makes a file for it on a local disk, such as /boot/mercury.mark; let the initial RAM disk know \
        the file then (update-initramfs -u).\n\nAt a start, on the kernel's command line: \
        mercury.mark=clear starts the system and clears the tombstone, mercury.mark=ignore starts it and \
        leaves the tombstone, mercury.mark=poweroff powers off at once if there is a tombstone."
    )]
    Mark(MarkArgs),
    /// Move this machine to another one, and back when its own hardware has been repaired
    #[command(long_about = "Moves this machine to another one that waits in `mercury receive`, as `mercury \
        migrate` does, and then waits there. The source is powered off, and can be repaired. When the \
        source runs again, start `mercury receive` on it and type what it prints (HOST --key TOKEN) here: \
        the machine moves back.\n\nThis command moves with the machine, and so does the session that it \
        runs in. End of input or Ctrl-C during the wait leaves the machine where it is; `mercury migrate` \
        can bring it back at any time.")]
    Maintenance(MaintenanceArgs),
    /// Order this machine to move to mercuryd's destination, before its hardware fails
    #[command(
        long_about = "Orders this machine to move to the destination that mercuryd was told of. Scripts \
        that see a failure come, such as Slurm's HealthCheckProgram, call it. The command gives the order \
        and does not wait; --status says what has come of the order. If there is no mercuryd, or if it \
        does not accept the order, the exit status says so."
    )]
    Evacuate(EvacuateArgs),
    /// Wait for the order to move this machine: the program of mercuryd.service
    #[command(
        long_about = "Waits for the order to move this machine, by `mercury evacuate` or SIGUSR1, and \
        then moves it by `mercury migrate`. The pairing token of the destination is read from its file at \
        each order.\n\nmercuryd.service runs this command when /etc/mercury/spare.key exists, with the \
        settings of /etc/default/mercuryd: a line MERCURY_SPARE=HOST, and if needed a line \
        MIGRATE_OPTIONS=... with options for `mercury migrate`."
    )]
    Daemon(DaemonArgs),
    /// Show the contents of an image, and check if it is whole
    Inspect(InspectArgs),
    /// Merge incremental images and the full image that they were made on
    #[command(
        long_about = "Merges incremental images and the full image that they were made on into one full \
        image, equal to the last of them. All images are read and checked first, and every page that is \
        written has the hash that it had when the last one was made.\n\nThe new image takes the last \
        one's place: incremental images that were made on the last one go on from the new one, and the \
        earlier images are no longer needed."
    )]
    Merge(MergeArgs),
    /// Run a pre-virtualized Linux as an ordinary process
    #[command(subcommand)]
    Hosted(HostedCommand),
    /// Show the hypervisor's log, all CPUs in the order of time
    Log(LogArgs),
    /// Print state and counters for Prometheus, or write them for node_exporter's textfile
    /// collector
    #[command(long_about = "Prints state and counters in Prometheus' text format: the mode of each CPU, \
        attaches, detaches and exits, the snapshot, and the outcomes of checkpoints and moves since the \
        start. With --textfile the file is replaced as a whole.\n\nEach call asks every CPU for its mode: \
        one exit on each attached CPU. mercury-metrics.timer runs this command every 15 seconds.")]
    Metrics(MetricsArgs),
    /// Explain a code: its meaning, the reason, the remedy
    Explain(ExplainArgs),
    /// Generate manual pages or shell completions
    #[command(hide = true)]
    Generate(GenerateArgs),
    /// Undo the changes of a checkpoint that was killed
    #[command(hide = true)]
    Guard,
    /// Tell peers that ask that this machine has arrived
    #[command(hide = true)]
    Answer,
    /// Print every fact that is read of each CPU
    #[command(hide = true)]
    Facts(CpusArgs),
    /// Switch each CPU in turn to the other mode and back, and compare its whole state before,
    /// between and after
    #[command(
        long_about = "Switches each CPU in turn to the other mode and back (attach and detach if it is \
        native, detach and attach if it is attached), and compares its whole state before, between and \
        after. Each CPU is left in its first mode. While there is a snapshot of memory the command is \
        refused, because a detach would end the snapshot.\n\nExits with 1 if anything differs except \
        state of the task that runs."
    )]
    Verify(VerifyArgs),
    /// Arm a fault point (test builds only)
    #[command(hide = true)]
    Fault(FaultArgs),
}

#[derive(Clone, Debug, Default, Args)]
pub struct ModuleArgs {
    /// Load the driver from this file instead of by modprobe
    #[arg(long, env = "MERCURY_MODULE", value_name = "FILE")]
    pub module: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Show only findings that are not in order
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct UnloadArgs {
    /// Detach first if CPUs are attached
    #[arg(long)]
    pub detach: bool,
    /// Leave the driver loaded and free only the hypervisor
    #[arg(long)]
    pub keep_driver: bool,
}

#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Only these CPUs, such as 0-3,8 [default: all online CPUs]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Unload KVM without asking if it holds the hardware and no virtual machine uses it
    #[arg(long)]
    pub unload_kvm: bool,
    /// Attach on a kernel of a major version that Mercury was never tested on
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Only these CPUs, such as 0-3,8 [default: all]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
}

#[derive(Debug, Args)]
pub struct CpusArgs {
    /// Only these CPUs, such as 0-3,8 [default: all online CPUs]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub cpus: CpusArgs,
    #[command(flatten)]
    pub module: ModuleArgs,
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show the status again each second until Ctrl-C
    #[arg(short, long)]
    pub watch: bool,
}

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
    #[arg(long, value_name = "COUNT", default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..), requires = "every")]
    pub keep: u16,
    /// Write only the pages that have changed since another image, which the new one then needs
    /// (see `mercury merge`). With --every the other image is the previous one, and the first image
    /// is full unless IMAGE is given
    #[arg(long, value_name = "IMAGE", num_args = 0..=1, require_equals = true)]
    pub incremental: Option<Option<PathBuf>>,
    /// With --every and --incremental: one full image in so many
    #[arg(long, value_name = "COUNT", default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=256), requires_all = ["every", "incremental"])]
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
    /// Level of compression, one of zstd's
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(-7..=19), allow_hyphen_values = true)]
    pub level: i32,
    #[command(flatten)]
    pub module: ModuleArgs,
}

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

#[derive(Debug, Default, Args)]
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
    /// Memory for the restore environment: 128M, 1G
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = mebibytes(MEMORY_LEAST_MIB..=1024))]
    pub memory: u64,
    /// Bring the machine back now: this is the restore environment
    #[arg(long)]
    pub here: bool,
    /// Restore although disks are not as they were at the instant. This destroys file systems
    #[arg(long)]
    pub force_disks: bool,
    #[command(flatten)]
    pub module: ModuleArgs,
}

#[derive(Debug, Default, Args)]
pub struct ReceiveArgs {
    /// Address to wait at: an IPv4 address of this machine, with or without a port (4747) [default:
    /// the address on the network with a gateway, or the only one]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<Listen>,
    /// Only write the restore environment's kernel and initial RAM disk into this folder, and print
    /// the command line that they need. A user who can read the files can receive machines in this
    /// one's place
    #[arg(long, value_name = "FOLDER", conflicts_with = "here")]
    pub prepare: Option<PathBuf>,
    /// Lifetime of the pairing token
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub lifetime: Span,
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
    #[command(flatten)]
    pub module: ModuleArgs,
}

#[derive(Debug, Args)]
pub struct MarkArgs {
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

#[derive(Debug, Args)]
pub struct MaintenanceArgs {
    /// Options of the move, the same in both directions.
    #[command(flatten)]
    pub migrate: MigrateArgs,
}

/// The daemon's control socket.
const SOCKET: &str = "/run/mercury/control";

#[derive(Debug, Args)]
pub struct EvacuateArgs {
    /// Reason, for the log and for `--status`
    #[arg(long, value_name = "TEXT", default_value = "by order")]
    pub reason: String,
    /// Give no order: show the daemon's state
    #[arg(long, conflicts_with = "reason")]
    pub status: bool,
    /// Control socket of the daemon
    #[arg(long, value_name = "FILE", default_value = SOCKET)]
    pub socket: PathBuf,
}

#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The destination that waits in `mercury receive`: HOST or HOST:PORT
    #[arg(long, env = "MERCURY_SPARE", value_name = "HOST")]
    pub to: String,
    /// File with the pairing token that `mercury receive` has printed there; only root may be able
    /// to read it
    #[arg(long, env = "MERCURY_KEY_FILE", value_name = "FILE", default_value = "/etc/mercury/spare.key")]
    pub key_file: PathBuf,
    /// Control socket to create
    #[arg(long, value_name = "FILE", default_value = SOCKET)]
    pub socket: PathBuf,
    /// Options for `mercury migrate`
    #[arg(last = true, value_name = "OPTION")]
    pub migrate: Vec<String>,
}

#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// The destination that waits in `mercury receive`: HOST or HOST:PORT
    #[arg(default_value = "", hide_default_value = true, required_unless_present = "dry_run")]
    pub host: String,
    /// Pairing token that `mercury receive` has printed; - reads it from standard input, where `ps`
    /// does not show it
    #[arg(
        long,
        env = "MERCURY_KEY",
        hide_env_values = true,
        value_name = "TOKEN",
        allow_hyphen_values = true
    )]
    pub key: Option<String>,
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
    #[arg(long, value_name = "COUNT", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub rounds: u32,
    /// Throttle of applications at most, in percent of their time, if more is written than the
    /// network carries; it rises step by step; 0: no throttle
    #[arg(long, value_name = "PERCENT", default_value_t = 75, value_parser = clap::value_parser!(u8).range(0..=99))]
    pub max_throttle: u8,
    /// Bandwidth a second at most while everything runs: 10M, 1G; a number alone is MiB, for all
    /// sizes
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 20))]
    pub bandwidth: Option<u64>,
    /// Number of connections for pages, each of which is encrypted and decrypted by itself; 1 to 16
    /// [default: the number of CPUs, and 4 at most]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=i64::from(STREAMS_MAX)))]
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
    pub without_mark: bool,
    /// Level of compression, one of zstd's
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(-7..=19), allow_hyphen_values = true)]
    pub level: i32,
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
    #[command(flatten)]
    pub module: ModuleArgs,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The image: a file, a block device, or - for standard input
    pub image: PathBuf,
    /// Only read the description of the machine; do not check the rest
    #[arg(long, conflicts_with = "core")]
    pub quick: bool,
    /// Write the memory of the image into this file as an ELF core, for crash and gdb
    #[arg(long, value_name = "FILE")]
    pub core: Option<PathBuf>,
}

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
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(-7..=19), allow_hyphen_values = true)]
    pub level: i32,
}

#[derive(Debug, Args)]
pub struct LogArgs {
    /// Go on and show new entries until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
}

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Attach and detach again and again: switch times, exit round trip, longest pause of a
    /// spinning thread
    Switch(BenchSwitchArgs),
    /// Nine operations of lmbench, those of the papers' tables, and two more: fork, exec, context
    /// switch, faults
    Os(BenchOsArgs),
}

#[derive(Debug, Args)]
pub struct BenchSwitchArgs {
    /// Number of attaches and detaches
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub cycles: u32,
    #[command(flatten)]
    pub module: ModuleArgs,
}

#[derive(Debug, Args)]
pub struct BenchOsArgs {
    /// Samples of each benchmark; their median is shown
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub samples: u32,
    /// Only benchmarks whose name contains this text
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
}

#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Write this file instead; node_exporter reads files that end in .prom
    #[arg(long, value_name = "FILE")]
    pub textfile: Option<PathBuf>,
    /// Let only this group read the file, besides root [default: every user may]
    #[arg(long, value_name = "GROUP", requires = "textfile")]
    pub group: Option<String>,
}

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A code by name or number, such as svm-disabled or 43 [default: list them all]
    #[arg(value_parser = Codes, hide_possible_values = true)]
    pub code: Option<String>,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Kind of files to generate
    pub what: Generated,
    /// Folder to write to
    pub directory: PathBuf,
}

/// The kinds of files that can be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Generated {
    /// Manual pages
    Man,
    /// Completions for bash, zsh and fish
    Completions,
}

#[derive(Debug, Args)]
pub struct FaultArgs {
    /// Number of the fault point; 0 disarms all and tells how many have fired
    pub point: u32,
    /// Only on this CPU
    #[arg(long)]
    pub cpu: Option<u32>,
    /// Passage at which to fire, counting from 1
    #[arg(long, default_value_t = 1)]
    pub passage: u32,
    /// For altered facts: byte offset of the word
    #[arg(long, default_value_t = 0)]
    pub offset: u32,
    /// For altered facts: new value of the word
    #[arg(long, default_value = "0", value_parser = word)]
    pub value: u32,
}

/// Parses a 32-bit number, decimal or with 0x.
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
            "mercury migrate 10.9.0.3 --key - --max-downtime 800ms --or-give-up",
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
