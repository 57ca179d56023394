//! `mercury hosted run`: a pre-virtualized kernel becomes this process (see the crate `mercury-hosted`). `mercury hosted gdb`: gdb
//! at such a kernel.

use std::{io::ErrorKind, os::unix::process::CommandExt, process::Command};

use mercury_hosted::{
    devices::NetOption,
    gdb::Address,
    load::DISTANCE,
    run::{self, Isolation, Options, Report},
};
use serde::Serialize;

use crate::{
    args::{self, HostedArgs, HostedGdbArgs},
    commands::Say,
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text},
};

/// Starts it: this process is the machine from then on. Comes back if it was only to be checked, or cannot be started.
pub fn run(args: &HostedArgs, say: Say<'_>) -> Result<Exit> {
    let options = Options {
        kernel: args.kernel.clone(),
        initramfs: args.initramfs.clone(),
        disks: args.disk.iter().map(|disk| disk.as_str().into()).collect(),
        net: args.net.clone().map(|uplink| NetOption {
            uplink,
            mac: args.mac,
            forwards: args.forward.clone(),
        }),
        gdb: args.gdb.clone(),
        memory: args.memory << 20,
        cpus: args.cpus.into(),
        append: args.append.clone(),
        isolation: match args.isolation {
            args::Isolation::None => Isolation::None,
            args::Isolation::Process => Isolation::Process,
        },
        rewrite: !args.no_rewrite,
        verbose: args.verbose,
    };
    if args.check {
        return run::check(&options).map(|report| say.done(&Found::from(report))).map_err(refused);
    }
    match run::run(&options) {
        Ok(never) => match never {},
        Err(error) => Err(refused(error)),
    }
}

/// Becomes gdb.
pub fn gdb(args: &HostedGdbArgs) -> Result<Exit> {
    let kernel = args.kernel.to_string_lossy().replace('\\', "\\\\").replace('"', "\\\"");
    let target = match &args.address {
        Address::Path(path) => path.display().to_string(),
        Address::Port(port) => format!("127.0.0.1:{port}"),
    };
    let mut command = Command::new("gdb");
    command.args(["-q", "-ex", &format!("symbol-file -o {DISTANCE:#x} \"{kernel}\"")]);
    command.args(["-ex", &format!("target remote {target}")]).args(&args.arguments);
    let error = command.exec();
    let refused = Error::new(Exit::Failed, format!("cannot start gdb: {error}"));
    Err(match error.kind() {
        ErrorKind::NotFound => refused.hint("Debian's package is called gdb"),
        _ => refused.hint("see to it that you may execute gdb, and that there is memory for it"),
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

/// What was found in a kernel.
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
            "{} slots are filled with {} bytes of code that leaves the kernel in {} places; {} are left as they are",
            self.slots_filled, self.code_bytes, self.exits, self.slots_left
        ));
        text.line(format!(
            "{} places are relocated, {} addresses in code changed",
            self.relocations, self.constants
        ));
    }
}
