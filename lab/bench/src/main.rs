//! `lab`: the one command for developers.

#![allow(missing_docs)]

use std::{
    ffi::OsString,
    io::{IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{
    Args, Parser, Subcommand, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};
use mercury_lab::{
    Bus, Error, Exit, Icount, Image, Init, Kernel, Machine, Nic, Qemu, Release, Result, Spec, Stream,
    Variant, artefacts, check, deb, host, hosted, image, pair,
    previrtualization::{self, Flavour},
    testing,
};
use mercury_lab_bench::{
    self as bench, Depth, Part,
    campaign::{self, Load, Moment, fault::Class},
    demo, ltp, soak, times,
};

#[derive(Parser)]
#[command(name = "lab", about = "Makes and boots the machines that Mercury is developed on")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make the root images
    Image {
        /// Make only this release's image: bookworm or trixie
        #[arg(long, value_parser = release)]
        release: Option<Release>,
        /// Make the image anew, from today's packages
        #[arg(long)]
        refresh: bool,
    },
    /// Build the artefacts that machines carry
    Build {
        /// Build only for this release: bookworm or trixie
        #[arg(long, value_parser = release)]
        release: Option<Release>,
    },
    /// Build the kernel module for a kernel, or for all of them
    BuildDriver {
        /// Build only for this kernel
        #[arg(long)]
        kernel: Option<Kernel>,
    },
    /// Build a small kernel from Debian's sources with the afterburner, verify its slots, and print
    /// its path
    Kernel {
        /// Take the sources of this release: bookworm or trixie
        #[arg(long, value_parser = release, default_value = "bookworm")]
        release: Release,
        /// Build without the afterburner
        #[arg(long)]
        plain: bool,
        /// Build without the afterburner, and with the kernel's own checks of locks (lockdep)
        #[arg(long, conflicts_with = "plain")]
        checked: bool,
        /// Build as with --checked, with checks of each access to memory as well (KASAN)
        #[arg(long, conflicts_with_all = ["plain", "checked"])]
        sanitized: bool,
    },
    /// Start a hosted Debian on this terminal: a shell in a process, on a kernel that the afterburner has
    /// built
    Hosted {
        /// Arguments for `mercury hosted run`: --isolation=process, --cpus 2, --net passt and
        /// others
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Boot a machine with a shell on this terminal
    #[command(visible_alias = "boot")]
    Shell {
        #[command(flatten)]
        machine: MachineArgs,
        /// Put the root in RAM, so that a restore or a rollback meets no disk that has changed
        /// since, or on the machine's disk
        #[arg(long, value_enum, default_value_t = Root::Ram)]
        root: Root,
        /// Size of an additional empty disk for the image of a checkpoint, in MiB or with the unit
        /// M or G; 0: no such disk
        #[arg(long, value_name = "SIZE", value_parser = size_mib, default_value = "2G")]
        disk: u32,
    },
    /// Boot two machines on one network, with a shell on this terminal that moves from one to the other
    Pair {
        /// bookworm-cloud or trixie-cloud
        #[arg(long, default_value = "bookworm-cloud")]
        kernel: Kernel,
        /// Processors of each
        #[arg(long, default_value_t = 2)]
        cpus: u32,
        /// Memory of each, in MiB
        #[arg(long, default_value_t = 512)]
        memory: u32,
    },
    /// Boot a machine, run a command in it, and power it off
    Run {
        #[command(flatten)]
        machine: MachineArgs,
        /// Time limit of the command, in seconds
        #[arg(long, default_value_t = 600)]
        timeout: u64,
        /// The command; several words are quoted for the machine's shell
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run the tests
    Test {
        /// A file of lab/tests or lab/bench/tests (without .rs), or a part of tests' names
        filter: Option<String>,
    },
    /// Check formatting, lints, and the driver's style
    Check,
    /// Show what Mercury does
    Demo {
        /// The subject: attach and detach; a checkpoint and a restore; a driver that corrupts memory; a bare
        /// machine as a guest; or two live moves
        #[arg(value_enum, default_value_t = demo::Subject::Switch)]
        subject: demo::Subject,
    },
    /// Run the demonstrations and the machines for people, and show the time and the space of each
    Times {
        /// Names of targets of make; all, if none is given
        #[arg(value_parser = times::names())]
        targets: Vec<String>,
    },
    /// Measure the numbers that Mercury promises; the part `papers` has the tables of both papers
    Bench {
        /// Measure only this part, and replace only its section in docs/
        #[arg(value_parser = parts())]
        part: Option<Part>,
        /// Take a quick measurement of a few minutes, and leave docs/ alone
        #[arg(long)]
        quick: bool,
    },
    /// Attach and detach for hours under all kinds of work
    Soak {
        /// The number of cycles: 10,000 times, 2,000 with --guests, or 100 with --checkpoint
        #[arg(long)]
        cycles: Option<u64>,
        /// Instead, checkpoint machines to a disk, end them and restore them
        #[arg(long)]
        checkpoint: bool,
        /// Instead, attach and detach under virtual machines that are reset and crash
        #[arg(long, conflicts_with = "checkpoint")]
        guests: bool,
        /// Instead, move a machine whose PostgreSQL has clients outside, there and back
        #[arg(long, conflicts_with_all = ["checkpoint", "guests", "cycles"])]
        migration: bool,
        /// The moves of --migration
        #[command(flatten)]
        moves: MovesArgs,
    },
    /// Inject faults into a machine, which has to go back to its snapshot with right sums
    Campaign(CampaignArgs),
    /// Run the Linux Test Project's tests of system calls in a hosted machine and on a bare one, and show
    /// the tests that differ
    Ltp(LtpArgs),
    /// Make the Debian packages
    Deb,
}

#[derive(Args)]
struct LtpArgs {
    /// A clone of the Linux Test Project, in which the tests are built
    #[arg(long, value_name = "DIRECTORY")]
    source: PathBuf,
    /// The machines: bare, none and process (hosted with that isolation); all, if not given
    #[arg(long, value_name = "MACHINE", value_parser = ["bare", "none", "process"])]
    only: Vec<String>,
    /// Processors of each machine
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    cpus: u32,
    /// Names of tests, as in runtest/syscalls; all, if none is given
    tests: Vec<String>,
}

impl LtpArgs {
    fn plan(self) -> ltp::Plan {
        let Self { source, only, cpus, tests } = self;
        let hosted = ltp::ISOLATIONS.map(|isolation| (isolation, ltp::Place::Hosted { isolation, cpus }));
        // The bare machine runs what has not passed in the others.
        let all = hosted.into_iter().chain([("bare", ltp::Place::Bare { cpus })]);
        let is_asked_for = |name: &str| only.is_empty() || only.iter().any(|one| one == name);
        let places = all.filter(|(name, _)| is_asked_for(name)).map(|(_, place)| place).collect();
        ltp::Plan { source, places, tests }
    }
}

#[derive(Args)]
struct MovesArgs {
    /// With --migration: the number of moves
    #[arg(long, default_value_t = 12, requires = "migration")]
    moves: u64,
    /// With --migration: the time in minutes after which no further move begins
    #[arg(long, requires = "migration")]
    minutes: Option<u64>,
    /// With --migration: processors of the machine that moves
    #[arg(long, default_value_t = 2, requires = "migration")]
    cpus: u32,
    /// With --migration: its memory, in MiB
    #[arg(long, default_value_t = 512, requires = "migration")]
    memory: u32,
    /// With --migration: its kernel
    #[arg(long, default_value = "bookworm-cloud", requires = "migration")]
    kernel: Kernel,
    /// With --migration: move nothing; write docs/soak-migration.md and the figures from all runs
    /// so far
    #[arg(
        long,
        requires = "migration",
        conflicts_with_all = ["moves", "minutes", "cpus", "memory", "kernel"]
    )]
    page: bool,
}

impl MovesArgs {
    fn run(self) -> Result<()> {
        if self.page {
            return soak::migration::write_page();
        }
        let Self { kernel, cpus, memory: memory_mib, moves, .. } = self;
        let time = self.minutes.map(|minutes| Duration::from_secs(60 * minutes));
        soak::migration::command(soak::migration::Plan { kernel, cpus, memory_mib, moves, time })
    }
}

#[derive(Args)]
struct CampaignArgs {
    /// bookworm-cloud, bookworm-generic, trixie-cloud or trixie-generic
    #[arg(long, default_value = "bookworm-cloud")]
    kernel: Kernel,
    /// Processors
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// The machine's work, besides the computation whose sums are known
    #[arg(long, value_enum, default_value_t = Load::Idle)]
    load: Load,
    /// The time of a fault
    #[arg(long, value_enum, default_value_t = Moment::JustBefore)]
    moment: Moment,
    /// Classes of faults, by turns [default: all but `control`, which injects nothing]
    #[arg(long, value_enum, value_delimiter = ',')]
    classes: Vec<Class>,
    /// Faults in all, with those of earlier runs of the same campaign
    #[arg(long, default_value_t = 2000)]
    count: usize,
    /// Another seed is another campaign
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The time in minutes after which no further fault is injected
    #[arg(long)]
    minutes: Option<u64>,
    /// Inject nothing; write the results of all campaigns so far to docs/campaign.md
    #[arg(long, exclusive = true)]
    page: bool,
}

impl CampaignArgs {
    fn run(self) -> Result<()> {
        if self.page {
            return campaign::write_page();
        }
        let Self { kernel, cpus, load, moment, count, seed, .. } = self;
        let faults = Class::value_variants().iter().copied().filter(|class| *class != Class::Control);
        let classes = if self.classes.is_empty() { faults.collect() } else { self.classes.clone() };
        let time = self.minutes.map(|minutes| Duration::from_secs(60 * minutes));
        campaign::command(&campaign::Plan { kernel, cpus, load, moment, classes, count, seed, time })
    }
}

#[derive(Args)]
struct MachineArgs {
    /// bookworm-cloud, bookworm-generic, trixie-cloud or trixie-generic
    #[arg(long, default_value = "bookworm-cloud")]
    kernel: Kernel,
    /// A kernel that was built elsewhere (a bzImage with its drivers built in), in place of the
    /// release's
    #[arg(long, value_name = "FILE")]
    own_kernel: Option<PathBuf>,
    /// Processors
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Memory, in MiB: 1024, or 1536 with its root in RAM
    #[arg(long)]
    memory: Option<u32>,
    /// Processor, in QEMU's terms
    #[arg(long, default_value = mercury_lab::spec::CPU)]
    cpu: String,
    /// Start systemd instead of the lab's own init
    #[arg(long)]
    systemd: bool,
    /// Use the driver with fault points
    #[arg(long)]
    faults: bool,
    /// Run it with a newer QEMU instead of this host's
    #[arg(long)]
    newer_qemu: bool,
    /// Count instructions instead of time: an instruction is a nanosecond of the machine's time;
    /// needs --cpus 1
    #[arg(long)]
    icount: bool,
    /// Add a network card
    #[arg(long)]
    net: bool,
    /// Give it devices as bare metal has them, none of virtio's
    #[arg(long)]
    metal: bool,
    /// One more word on the kernel's command line; may be repeated
    #[arg(long = "append", value_name = "WORD")]
    kernel_args: Vec<String>,
    /// One more argument for QEMU; may be repeated
    #[arg(long = "qemu", value_name = "ARGUMENT", allow_hyphen_values = true)]
    qemu_args: Vec<String>,
}

/// The place of the root file system of a shell's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Root {
    Ram,
    /// On the machine's own disk.
    Disk,
}

/// Memory of a machine whose root lies on its disk, in MiB.
const MEMORY_MIB: u32 = 1024;
/// Memory of a machine whose root lies in RAM, in MiB.
const MEMORY_WITH_ROOT_MIB: u32 = 1536;

impl MachineArgs {
    /// Describes the machine of a shell, in which a person can try checkpoints and snapshots.
    fn shell_spec(&self, root: Root, disk_mib: u32) -> Spec {
        let mut spec = self.spec();
        // This host's QEMU runs stale copies of code that the kernel has patched, and the kernel
        // patches code around a snapshot.
        spec = spec.qemu_version(Qemu::Newer);
        if root == Root::Ram {
            spec = spec.kernel_arg("lab.root=ram").memory_mib(self.memory.unwrap_or(MEMORY_WITH_ROOT_MIB));
        }
        if disk_mib != 0 {
            spec = spec.disk(if self.metal { Bus::Nvme } else { Bus::Virtio }, disk_mib);
        }
        with_terminal(spec)
    }

    fn spec(&self) -> Spec {
        let memory = self.memory.unwrap_or(MEMORY_MIB);
        let mut spec = Spec::new(self.kernel).cpus(self.cpus).memory_mib(memory).cpu(&self.cpu);
        if let Some(image) = &self.own_kernel {
            spec = spec.own_kernel(image);
        }
        if self.systemd {
            spec = spec.init(Init::Systemd);
        }
        if self.faults {
            spec = spec.modules(Variant::Faults);
        }
        if self.newer_qemu {
            spec = spec.qemu_version(Qemu::Newer);
        }
        if self.icount {
            spec = spec.icount(Icount::Exact);
        }
        if self.metal {
            spec = spec.metal();
        }
        if self.net {
            spec = spec.nic(if self.metal { Nic::E1000e } else { Nic::Virtio });
        }
        spec = self.kernel_args.iter().fold(spec, |spec, word| spec.kernel_arg(word));
        self.qemu_args.iter().fold(spec, |spec, argument| spec.qemu_arg(argument))
    }
}

/// Reads a size in MiB: `2G`, `512M`, or a number of MiB.
fn size_mib(text: &str) -> Result<u32, String> {
    let (number, unit) = match text.strip_suffix(['G', 'g']) {
        Some(number) => (number, 1024),
        None => (text.strip_suffix(['M', 'm']).unwrap_or(text), 1),
    };
    let size = number.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
    size.ok_or_else(|| "a number of MiB, or one with the unit M or G".to_owned())
}

fn release(name: &str) -> Result<Release, String> {
    let found = Release::ALL.into_iter().find(|release| release.codename() == name);
    found.ok_or_else(|| "there are bookworm and trixie".to_owned())
}

/// Reads the name of a part. clap lists the names in its help and in its error.
fn parts() -> impl TypedValueParser<Value = Part> {
    PossibleValuesParser::new(Part::NAMED.map(|(name, _)| name)).map(|name| {
        let named = Part::NAMED.into_iter().find(|(one, _)| *one == name);
        named.map_or(Part::All, |(_, part)| part)
    })
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("lab: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Image { release, refresh } => images(release, refresh)?,
        Command::Build { release } => {
            for release in chosen(release) {
                println!("{}", artefacts::ensure(release)?.disk.display());
            }
        }
        Command::Kernel { release, plain, checked, sanitized } => {
            let flavour = match (plain, checked, sanitized) {
                (true, ..) => Flavour::Plain,
                (_, true, _) => Flavour::Checked,
                (_, _, true) => Flavour::Sanitized,
                _ => Flavour::PreVirtualized,
            };
            let built = previrtualization::build(release, flavour)?;
            if flavour == Flavour::PreVirtualized {
                println!("{}", previrtualization::account(&built)?);
            }
            println!("{}", built.image.display());
        }
        Command::Hosted { arguments } => return hosted::shell(&arguments),
        Command::BuildDriver { kernel } => build_driver(kernel)?,
        Command::Shell { machine, root, disk } => Machine::shell(machine.shell_spec(root, disk))?,
        Command::Pair { kernel, cpus, memory } => pair::run(kernel, cpus, memory, with_terminal)?,
        Command::Run { machine, timeout, command } => {
            return run_once(machine.spec(), Duration::from_secs(timeout), &command);
        }
        Command::Test { filter } => {
            let tally = testing::run(filter.as_deref())?;
            return Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Check => {
            let failed = check::run();
            if !failed.is_empty() {
                return Err(Error::Host(format!("these checks failed: {}", failed.join(", "))));
            }
        }
        Command::Demo { subject } => demo::run(subject)?,
        Command::Bench { part, quick } => {
            bench::run(part.unwrap_or(Part::All), if quick { Depth::Quick } else { Depth::Full })?;
        }
        Command::Soak { migration: true, moves, .. } => moves.run()?,
        Command::Soak { cycles, guests: true, .. } => soak::guests::command(cycles.unwrap_or(2000))?,
        Command::Soak { cycles, checkpoint: true, .. } => soak::restart::command(cycles.unwrap_or(100))?,
        Command::Soak { cycles, .. } => soak::command(cycles.unwrap_or(10_000))?,
        Command::Campaign(arguments) => arguments.run()?,
        Command::Times { targets } => times::run(&targets)?,
        Command::Ltp(arguments) => {
            let explained = ltp::run(&arguments.plan())?;
            return Ok(if explained { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Deb => deb::run()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn chosen(release: Option<Release>) -> Vec<Release> {
    release.map_or(Release::ALL.to_vec(), |release| vec![release])
}

fn images(release: Option<Release>, refresh: bool) -> Result<()> {
    for release in chosen(release) {
        if refresh {
            image::forget(release)?;
        }
        println!("{}", Image::ensure(release)?.disk().display());
    }
    Ok(())
}

fn build_driver(kernel: Option<Kernel>) -> Result<()> {
    if !mercury_lab::driver::exists() {
        return Err(Error::Host("the sources contain no driver to build".into()));
    }
    for kernel in kernel.map_or(Kernel::ALL.to_vec(), |kernel| vec![kernel]) {
        for (_, module) in artefacts::build_modules(kernel)? {
            println!("{}", module.display());
        }
    }
    Ok(())
}

/// Tells the machine the type and size of its terminal.
fn with_terminal(spec: Spec) -> Spec {
    let term = std::env::var("TERM").unwrap_or_else(|_| "linux".into());
    let spec = spec.kernel_arg(&format!("lab.term={term}"));
    match rustix::termios::tcgetwinsize(rustix::stdio::stdout()) {
        Ok(size) => spec
            .kernel_arg(&format!("lab.rows={}", size.ws_row))
            .kernel_arg(&format!("lab.columns={}", size.ws_col)),
        Err(_) => spec,
    }
}

/// Runs a command in a machine once. Ends with the command's own exit code.
fn run_once(spec: Spec, timeout: Duration, words: &[String]) -> Result<ExitCode> {
    let line = if let [line] = words { line.clone() } else { host::quoted(words) };
    let machine = Machine::boot(spec)?;
    if std::io::stderr().is_terminal() {
        eprintln!("{} is up after {:.1} s", machine.kernel(), machine.boot_time().as_secs_f32());
    }
    let output = machine.command(&line).timeout(timeout).run_streaming(show)?;
    machine.shut_down()?;
    Ok(match output.exit {
        Exit::Code(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Exit::Signal(signal) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)),
        Exit::TimedOut => ExitCode::FAILURE,
    })
}

fn show(stream: Stream, bytes: &[u8]) {
    let _ = match stream {
        Stream::Stdout => std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush()),
        Stream::Stderr => std::io::stderr().write_all(bytes),
    };
}
