//! The commands: each opens the driver, does one thing and returns a report.

use crate::{
    args::{Cli, Command},
    bench::{self, BenchCommand},
    daemon, doctor, explain, facts, fault, generate,
    guard::{self, GuardCommand},
    guests,
    guests::GuestsCommand,
    hosted, identity, inspect, log, maintenance, metrics, postmortem, status, switch,
};
use clap::CommandFactory;
use mercury_control::{
    error::Result,
    exit::Exit,
    output::Format,
    say::{Say, fail},
};
use mercury_hosted_options::{HostedCommand, disco::DiscoCommand};
use mercury_quiesce::guard as undo_process;
use mercury_relocation::{
    checkpoint, merge,
    migrate::{self, doubt::Reach},
    receive, restore, snapshot, tombstone,
};
use std::sync::Arc;

/// Runs the command line and returns its exit status. Failures are reported.
#[must_use]
pub fn run(cli: &Cli) -> Exit {
    let format = if cli.json { Format::Json } else { Format::Text };
    let name = command_name(&cli.command);
    dispatch(&cli.command, format, name).unwrap_or_else(|error| fail(&error, format, name))
}

fn dispatch(command: &Command, format: Format, name: &str) -> Result<Exit> {
    let say = Say { format, name };
    match command {
        Command::Doctor(args) => doctor::run(args, say),
        Command::Load(args) => switch::load(args).map(|report| say.done(&report)),
        Command::Unload(args) => switch::unload(args).map(|report| say.done(&report)),
        Command::Attach(args) => switch::attach(args, format).map(|report| say.done(&report)),
        Command::Detach(args) => switch::detach(args).map(|report| say.done(&report)),
        Command::Status(args) => status::run(args, say),
        Command::Top => status::watch(say),
        Command::Bench(args) => bench::run(args, say),
        Command::Checkpoint(args) => checkpoint::run(&args.into(), say),
        Command::Snapshot(args) => snapshot::run(&args.into(), say),
        Command::Rollback => snapshot::rollback(),
        Command::Postmortem(args) => postmortem::run(args, say),
        Command::Restore(args) if args.as_guest => guests::start(),
        Command::Receive(args) if args.beside => guests::start(),
        Command::Restore(args) => restore::run(&args.into(), say),
        Command::Receive(args) => receive::run(&args.into(), say),
        Command::Migrate(args) => migrate::run(&args.into(), say),
        Command::Identity(args) => identity::run(args, say),
        Command::Tombstone(args) => tombstone::command::run(&args.into(), say),
        Command::Maintenance(args) => maintenance::run(args, say),
        Command::Evacuate(args) => daemon::evacuate::run(args, say),
        Command::Daemon(args) => daemon::run(args),
        Command::Inspect(args) => inspect::run(args, say),
        Command::Merge(args) => merge::run(&args.into(), say),
        Command::Answer => Ok(migrate::arrival::answer()),
        Command::Guard(command) => guard::run(command, say),
        Command::Undo => Ok(undo_process::run(|| Arc::new(Reach::open()))),
        Command::Guests(command) => guests::run(command, say),
        Command::Hosted(_) => hosted::run(),
        Command::Disco(_) => hosted::disco(),
        Command::Log(args) => log::run(args, say),
        Command::Metrics(args) => metrics::run(args, say),
        Command::Explain(args) => explain::explain(args.code.as_deref()).map(|found| say.done(&found)),
        Command::Generate(args) => generate::run(args, Cli::command()),
        Command::Facts(args) => facts::show(args, say),
        Command::Verify(args) => facts::verify(args, say),
        Command::Fault(args) => fault::arm(args).map(|report| say.done(&report)),
    }
}

fn command_name(command: &Command) -> &'static str {
    match command {
        Command::Doctor(_) => "doctor",
        Command::Load(_) => "load",
        Command::Unload(_) => "unload",
        Command::Attach(_) => "attach",
        Command::Detach(_) => "detach",
        Command::Status(_) | Command::Top => "status",
        Command::Bench(BenchCommand::Switch(_)) => "bench switch",
        Command::Bench(BenchCommand::Os(_)) => "bench os",
        Command::Checkpoint(_) => "checkpoint",
        Command::Snapshot(_) => "snapshot",
        Command::Rollback => "rollback",
        Command::Postmortem(_) => "postmortem",
        Command::Restore(_) => "restore",
        Command::Receive(_) => "receive",
        Command::Migrate(_) => "migrate",
        Command::Identity(_) => "identity",
        Command::Tombstone(_) => "tombstone",
        Command::Maintenance(_) => "maintenance",
        Command::Evacuate(_) => "evacuate",
        Command::Daemon(_) => "daemon",
        Command::Inspect(_) => "inspect",
        Command::Merge(_) => "merge",
        Command::Answer => "answer",
        Command::Guard(GuardCommand::On(_)) => "guard on",
        Command::Guard(GuardCommand::Off) => "guard off",
        Command::Guard(GuardCommand::Status(_)) => "guard status",
        Command::Guard(GuardCommand::Scrub(_)) => "guard scrub",
        Command::Guard(GuardCommand::Check(_)) => "guard check",
        Command::Guard(GuardCommand::Drill(_)) => "guard drill",
        Command::Undo => "undo",
        Command::Guests(GuestsCommand::List) => "guests list",
        Command::Guests(GuestsCommand::Console(_)) => "guests console",
        Command::Guests(GuestsCommand::Adopt(_)) => "guests adopt",
        Command::Guests(GuestsCommand::Discard(_)) => "guests discard",
        Command::Guests(GuestsCommand::Migrate(_)) => "guests migrate",
        Command::Guests(GuestsCommand::Resume(_)) => "guests resume",
        Command::Guests(GuestsCommand::Abandon(_)) => "guests abandon",
        Command::Guests(GuestsCommand::Stop(_)) => "guests stop",
        Command::Hosted(HostedCommand::Run(_)) => "hosted run",
        Command::Hosted(HostedCommand::Gdb(_)) => "hosted gdb",
        Command::Hosted(HostedCommand::Save(_)) => "hosted save",
        Command::Hosted(HostedCommand::Restore(_)) => "hosted restore",
        Command::Hosted(HostedCommand::Net(_)) => "hosted net",
        Command::Hosted(HostedCommand::KeepSubnet(_)) => "hosted keep-subnet",
        Command::Hosted(HostedCommand::KeepRegion(_)) => "hosted keep-region",
        Command::Disco(DiscoCommand::Template(_)) => "disco template",
        Command::Disco(DiscoCommand::Run(_)) => "disco run",
        Command::Disco(DiscoCommand::Fork(_)) => "disco fork",
        Command::Disco(DiscoCommand::Save(_)) => "disco save",
        Command::Disco(DiscoCommand::Resize(_)) => "disco resize",
        Command::Disco(DiscoCommand::Sleep(_)) => "disco sleep",
        Command::Disco(DiscoCommand::Wake(_)) => "disco wake",
        Command::Disco(DiscoCommand::List) => "disco list",
        Command::Disco(DiscoCommand::Map) => "disco map",
        Command::Disco(DiscoCommand::Console(_)) => "disco console",
        Command::Disco(DiscoCommand::Stop(_)) => "disco stop",
        Command::Disco(DiscoCommand::Rm(_)) => "disco rm",
        Command::Log(_) => "log",
        Command::Metrics(_) => "metrics",
        Command::Explain(_) => "explain",
        Command::Generate(_) => "generate",
        Command::Facts(_) => "facts",
        Command::Verify(_) => "verify",
        Command::Fault(_) => "fault",
    }
}
