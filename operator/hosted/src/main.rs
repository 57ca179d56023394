//! The program `mercury-hosted`, which `mercury hosted` and `mercury disco` execute. `run` turns this process
//! into a pre-virtualized kernel (see the crate `mercury-hosted`), and `gdb` into a gdb that is connected to
//! such a kernel. [`disco`] makes templates of saved machines, and machines as copies of them.

mod disco;
mod subnet;

use std::{
    io::ErrorKind,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{self, Format, Render, Text},
    say::{Say, fail},
};
use mercury_hosted::{
    control,
    devices::{NetOption, SubnetOption},
    heap,
    load::DISTANCE,
    run::{self, Isolation, Options, Report},
};
use mercury_hosted_options::{
    GdbArgs, HostedCommand, RunArgs, SaveArgs, disco::DiscoCommand, gdb::Address, net::Network,
};
use serde::Serialize;

/// Runs a pre-virtualized Linux as an ordinary process
#[derive(Debug, Parser)]
#[command(name = "mercury-hosted", version, max_term_width = 100)]
struct Cli {
    /// Print one JSON object instead of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

/// The commands of this program.
#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Hosted(HostedCommand),
    /// Many machines that begin as copies of one
    #[command(subcommand)]
    Disco(DiscoCommand),
}

fn main() -> ExitCode {
    let cli = heap::apart(Cli::parse);
    let format = if cli.json { Format::Json } else { Format::Text };
    let command = match &cli.command {
        Command::Hosted(command) => command,
        Command::Disco(command) => {
            let (name, format) = (disco::name(command), disco::format(cli.json, command));
            let result = disco::run(command, Say { format, name });
            return result.unwrap_or_else(|error| fail(&error, format, name)).into();
        }
    };
    let (name, result) = match command {
        HostedCommand::Run(args) => ("hosted run", run(args, None, Say { format, name: "hosted run" })),
        HostedCommand::Restore(args) => {
            let say = Say { format, name: "hosted restore" };
            ("hosted restore", run(&args.run, Some(&args.file), say))
        }
        HostedCommand::Save(args) => ("hosted save", save(args, Say { format, name: "hosted save" })),
        HostedCommand::Gdb(args) => ("hosted gdb", gdb(args)),
        HostedCommand::Net(args) => {
            ("hosted net", subnet::list(args.name.as_ref(), Say { format, name: "hosted net" }))
        }
        HostedCommand::KeepSubnet(args) => ("hosted keep-subnet", subnet::keep(&args.name)),
        HostedCommand::KeepRegion(args) => ("hosted keep-region", subnet::keep_region(args)),
    };
    result.unwrap_or_else(|error| fail(&error, format, name)).into()
}

/// Starts the machine, which this process is from then on. Returns if the kernel was only checked,
/// or cannot be started.
fn run(args: &RunArgs, restore: Option<&Path>, say: Say<'_>) -> Result<Exit> {
    let options = options(args, restore)?;
    if args.check {
        return run::check(&options).map(|report| say.done(&Found::from(report))).map_err(refused);
    }
    match run::run(&options) {
        Ok(never) => match never {},
        Err(error) => Err(refused(error)),
    }
}

/// Returns the options of a machine.
fn options(args: &RunArgs, restore: Option<&Path>) -> Result<Options> {
    let (net, subnet) = cards(args)?;
    Ok(Options {
        kernel: args.kernel.clone(),
        initramfs: args.initramfs.clone(),
        disks: args.disk.iter().map(|disk| disk.as_str().into()).collect(),
        regions: args.region.clone(),
        net,
        subnet,
        gdb: args.gdb.clone(),
        memory: args.memory << 20,
        cpus: args.cpus.into(),
        append: args.append.clone(),
        isolation: match args.isolation {
            mercury_hosted_options::Isolation::None => Isolation::None,
            mercury_hosted_options::Isolation::Process => Isolation::Process,
        },
        rewrite: !args.no_rewrite,
        verbose: args.verbose,
        control: args.control.clone(),
        restore: restore.map(Path::to_owned),
        identity: None,
    })
}

/// Returns the card to the outside, and the one on a subnet.
fn cards(args: &RunArgs) -> Result<(Option<NetOption>, Option<SubnetOption>)> {
    let (mut net, mut subnet) = (None, None);
    let mut macs = args.mac.iter().copied();
    for network in args.net.iter().cloned() {
        let mac = macs.next();
        let is_second = match network {
            Network::Uplink(uplink) => {
                net.replace(NetOption { uplink, mac, forwards: args.forward.clone() }).is_some()
            }
            Network::Subnet(name) => subnet.replace(SubnetOption { name, mac, is_copy: false }).is_some(),
        };
        if is_second {
            let text = "a machine has one card to the outside and one on a subnet at most";
            return Err(Error::new(Exit::Usage, text).hint("leave out a --net"));
        }
    }
    if macs.next().is_some() {
        let text = "there are more --mac than --net";
        return Err(Error::new(Exit::Usage, text).hint("give each card one address, in the order of --net"));
    }
    if net.is_none() && !args.forward.is_empty() {
        let text = "only passt forwards ports";
        return Err(Error::new(Exit::Usage, text).hint("add --net passt, or leave out --forward"));
    }
    Ok((net, subnet))
}

/// Writes a machine into a file.
fn save(args: &SaveArgs, say: Say<'_>) -> Result<Exit> {
    let saved = control::save(&args.machine, &args.file);
    saved.map(|bytes| say.done(&Saved { file: args.file.clone(), bytes })).map_err(refused)
}

/// A machine that was saved.
#[derive(Debug, Serialize)]
struct Saved {
    file: PathBuf,
    /// Size of the file.
    bytes: u64,
}

impl Render for Saved {
    fn render(&self, text: &mut Text) {
        let (file, size) = (self.file.display(), output::bytes(self.bytes));
        text.line(format!(
            "the machine is in {file} ({size}) and has ended; `mercury hosted restore` lets it go on"
        ));
    }
}

/// Replaces this process by gdb.
fn gdb(args: &GdbArgs) -> Result<Exit> {
    let kernel = args.kernel.to_string_lossy().replace('\\', "\\\\").replace('"', "\\\"");
    let target = match &args.address {
        Address::Path(path) => path.display().to_string(),
        Address::Port(port) => format!("127.0.0.1:{port}"),
    };
    let mut command = std::process::Command::new("gdb");
    command.args(["-q", "-ex", &format!("symbol-file -o {DISTANCE:#x} \"{kernel}\"")]);
    command.args(["-ex", &format!("target remote {target}")]).args(&args.arguments);
    let error = command.exec();
    let refused = Error::new(Exit::Failed, format!("cannot start gdb: {error}"));
    Err(match error.kind() {
        ErrorKind::NotFound => refused.hint("Debian's package is called gdb"),
        _ => refused.hint("make sure that you may execute gdb, and that enough memory is free"),
    })
}

fn refused(error: mercury_hosted::error::Error) -> Error {
    let exit = if error.is_hosts() { Exit::Impossible } else { Exit::Failed };
    let plain = Error::new(exit, error.message());
    match error.remedy() {
        Some(hint) => plain.hint(hint),
        None => plain,
    }
}

/// The findings in a kernel.
#[derive(Debug, Serialize)]
struct Found {
    slots_filled: usize,
    slots_left: usize,
    exits: usize,
    code_bytes: usize,
    relocations: usize,
    constants: usize,
}

impl From<Report> for Found {
    fn from(report: Report) -> Self {
        Self {
            slots_filled: report.filled,
            slots_left: report.left,
            exits: report.exits,
            code_bytes: report.code_bytes,
            relocations: report.relocations,
            constants: report.constants,
        }
    }
}

impl Render for Found {
    fn render(&self, text: &mut Text) {
        text.line(format!(
            "{} slots are filled with {} bytes of code that leaves the kernel in {} places; \
             {} are left as they are",
            self.slots_filled, self.code_bytes, self.exits, self.slots_left
        ));
        text.line(format!(
            "{} places are relocated, {} addresses in code changed",
            self.relocations, self.constants
        ));
    }
}
