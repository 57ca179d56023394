//! The command line: all commands. The options of each are beside its code. Manual pages and
//! completions are generated from this definition.

use crate::{
    bench::BenchCommand,
    daemon::{DaemonArgs, evacuate::EvacuateArgs},
    doctor::DoctorArgs,
    explain::ExplainArgs,
    facts::VerifyArgs,
    fault::FaultArgs,
    generate::GenerateArgs,
    guard::GuardCommand,
    guests::GuestsCommand,
    identity::IdentityArgs,
    inspect::InspectArgs,
    log::LogArgs,
    maintenance::MaintenanceArgs,
    metrics::MetricsArgs,
    postmortem::PostmortemArgs,
    relocate::{
        checkpoint::CheckpointArgs, merge::MergeArgs, migrate::MigrateArgs, receive::ReceiveArgs,
        restore::RestoreArgs, snapshot::SnapshotArgs, tombstone::TombstoneArgs,
    },
    shared::{CpusArgs, ModuleArgs},
    status::StatusArgs,
    switch::{AttachArgs, DetachArgs, UnloadArgs},
};
use clap::{Parser, Subcommand};
use mercury_hosted_options::{HostedCommand, disco::DiscoCommand};

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
        kernel panics or when a processor shuts down. This command then ends once more and says so. The \
        snapshot stays, so that the machine can go back to the same instant again, and `mercury \
        postmortem` shows what ended.\n\nA rollback does not put disks back. On a machine with local disks \
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
    /// Show what ended at the last rollback: its log, its stacks, its memory
    #[command(
        long_about = "Shows the life of this machine that ended at the last rollback: what it died of, where \
        each CPU was, how much time is lost, and the end of the kernel's log. All of that is read from the \
        memory of that life, which is kept with the snapshot while the machine runs on. --core writes that \
        memory into a file in the form of /proc/vmcore, for crash and drgn.\n\nThe next rollback replaces \
        it. If the snapshot needs the memory itself, or the system has none left, it is given back."
    )]
    Postmortem(PostmortemArgs),
    /// Bring a machine back from its image
    #[command(
        long_about = "Brings a machine back from its image, in place of this one. Every page goes to its \
        own address, and the machine goes on from the instant of the image. A restore environment (a \
        small kernel in memory that the image leaves free) loads the image. By default this command \
        checks the image, prepares that environment and starts it. This system ends then, without being \
        shut down; save your work.\n\nWith --as-guest this system stays as it is, and the machine goes on \
        in it as a virtual machine: on virtual devices, with its processes. The processor must be one that \
        this host's KVM can offer. The command ends with the guest; `mercury guests` shows and stops it."
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
        the given disks.\n\nWith --source NAME no token is printed. The named machines are told the token \
        when they come (mercury migrate HOST --spare NAME). They know this one by the name that `mercury \
        identity` \
        prints here.\n\nWith --beside this system stays as it is and in use, and the machine goes on in \
        it as a virtual machine. It need not be equal then: its processor must be one that this host's KVM \
        can offer. File systems on NVMe and AHCI come along (`migrate --with-disk`, and --disk-folder \
        here). No other local one may be mounted. The command ends with the guest; \
        `mercury guests` shows and stops it.")]
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
    /// Show this machine's name, by which a destination knows it without a pairing token
    #[command(
        long_about = "Shows this machine's name: the public half of a long-lived key, which is made if there \
        is none. Two machines that know each other's names need no pairing token: the spare waits in \
        `mercury receive --source NAME`, and the source moves by `mercury migrate HOST --spare NAME`. A name \
        is no secret. The file with the key is: who has it can move machines to each spare that knows this \
        machine, or receive machines in this one's place."
    )]
    Identity(IdentityArgs),
    /// Show the tombstone that keeps a system that has moved from starting here, and clear it
    #[command(
        long_about = "Shows the tombstone that keeps a system that has moved from starting here again. \
        Without it, this machine would start after a power cut from disks that it shares with the machine \
        that it moved to. A system that comes back by `mercury migrate` clears the tombstone. --clear is for \
        a system that will not come back: use it only if the system does not run elsewhere, and never \
        will.\n\nThe tombstone is a UEFI variable of the firmware. For a machine without UEFI, --prepare \
        makes a file for it on a local disk, such as /boot/mercury.tombstone; let the initial RAM disk know \
        the file then (update-initramfs -u).\n\nAt a start, on the kernel's command line: \
        mercury.tombstone=clear starts the system and clears the tombstone, mercury.tombstone=ignore starts \
        it and leaves the tombstone, mercury.tombstone=poweroff powers off at once if there is a tombstone."
    )]
    Tombstone(TombstoneArgs),
    /// Move this machine to another one, and back when its own hardware has been repaired
    #[command(long_about = "Moves this machine to another one that waits in `mercury receive`, as `mercury \
        migrate` does, and then waits there. The source is powered off, and can be repaired. When the \
        source runs again, start `mercury receive` on it and type what it prints (HOST --key TOKEN) here: \
        the machine moves back.\n\nThis command moves with the machine, and so does the session that it \
        runs in. End of input or Ctrl-C during the wait leaves the machine where it is; `mercury migrate` \
        can bring it back at any time.")]
    Maintenance(MaintenanceArgs),
    /// Notice a machine that hangs, and turn the hang into a panic or a rollback
    #[command(
        subcommand,
        long_about = "Notices CPUs that hang, also all of them at once, within two seconds. A hang becomes a \
            panic, so that a crash kernel or a restart follows. If a snapshot is kept, the machine goes back \
            to it instead. No hypervisor is needed for the watch, and a machine at work has no exits.\n\n\
            NMIs come from the HPET and from counters of cycles. The rules are in \
            /etc/mercury/guard.toml.\n\n\
            By the same rules mercuryd reads sensors of the hardware and watches services, and reports an \
            alarm, or moves the machine to its destination."
    )]
    Guard(GuardCommand),
    /// Order this machine to move to mercuryd's destination, before its hardware fails
    #[command(
        long_about = "Orders this machine to move to the destination that mercuryd was told of. Scripts \
        that see a failure come, such as Slurm's HealthCheckProgram, call it. The command gives the order \
        and does not wait; --status says what has come of the order. If there is no mercuryd, or if it \
        does not accept the order, the exit status says so."
    )]
    Evacuate(EvacuateArgs),
    /// Guard this machine, and wait for the order to move it: the program of mercuryd.service
    #[command(
        long_about = "Guards this machine by the rules in /etc/mercury/guard.toml, if there are any (see \
        `mercury guard`). Waits for the order to move this machine, by `mercury evacuate` or SIGUSR1, and \
        then moves it by `mercury migrate`. The pairing token of the destination is read from its file at \
        each order.\n\nmercuryd.service runs this command when /etc/mercury/guard.toml or \
        /etc/mercury/destination.key exists, with the \
        settings of /etc/default/mercuryd: a line MERCURY_DESTINATION=HOST, and if needed a line \
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
    /// List the machines that go on as guests of this one, reach their consoles, move them, stop them
    #[command(subcommand)]
    Guests(GuestsCommand),
    /// Run a pre-virtualized Linux as an ordinary process
    #[command(subcommand)]
    Hosted(HostedCommand),
    /// Start many hosted machines as copies of one, in milliseconds, sharing memory
    #[command(subcommand)]
    Disco(DiscoCommand),
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
    Undo,
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
