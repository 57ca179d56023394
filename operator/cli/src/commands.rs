//! The commands: each opens the driver, does one thing and returns a report.

use crate::{
    args::{
        AttachArgs, BenchCommand, Cli, Command, CpusArgs, DetachArgs, DoctorArgs, FaultArgs, GenerateArgs,
        Generated, LogArgs, ModuleArgs, UnloadArgs, VerifyArgs,
    },
    bench, daemon,
    doctor::{self, machine::Machine},
    explain, generate, hosted, inspect, maintenance, metrics,
};
use mercury_abi::{code::Code, ioctl::FaultRequest};
use mercury_control::{
    access::{control_if_loaded, controlled, current_status, load_hypervisor, loaded, need_root, observe},
    cpus::CpuSet,
    device::{Access, Device},
    driver::{Direction, Driver},
    error::{Error, Result},
    exit::Exit,
    facts,
    interrupt::Deferred,
    log::{self, Reader},
    module,
    output::{Format, Render},
    progress,
    say::{Say, fail, print},
    status::{self, Status},
    switch::{self, LoadReport, Prepared, UnloadReport},
    sysroot::{Module, Sysroot},
    tsc,
};
use mercury_hosted_options::HostedCommand;
use mercury_quiesce::undo;
use mercury_relocation::{
    checkpoint, merge,
    migrate::{self, doubt::Reach},
    receive, restore, snapshot, tombstone,
};
use serde::Serialize;
use std::{
    io::IsTerminal,
    sync::Arc,
    time::{Duration, Instant},
};

/// The interval at which `status --watch` reads the status.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The interval at which `log --follow` reads the rings, which hold 64 records each.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

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
        Command::Doctor(args) => doctor(args, say),
        Command::Load(args) => load(args).map(|report| say.done(&report)),
        Command::Unload(args) => unload(args).map(|report| say.done(&report)),
        Command::Attach(args) => attach(args, format).map(|report| say.done(&report)),
        Command::Detach(args) => detach(args).map(|report| say.done(&report)),
        Command::Status(args) if args.watch => watch(say),
        Command::Status(_) => current_status().map(|status| say.done(&status)),
        Command::Top => watch(say),
        Command::Bench(args) => bench::run(args, say),
        Command::Checkpoint(args) => checkpoint::run(&args.into(), say),
        Command::Snapshot(args) => snapshot::run(&args.into(), say),
        Command::Rollback => snapshot::rollback(),
        Command::Restore(args) => restore::run(&args.into(), say),
        Command::Receive(args) => receive::run(&args.into(), say),
        Command::Migrate(args) => migrate::run(&args.into(), say),
        Command::Mark(args) => tombstone::command::run(&args.into(), say),
        Command::Maintenance(args) => maintenance::run(args, say),
        Command::Evacuate(args) => daemon::evacuate::run(args, say),
        Command::Daemon(args) => daemon::run(args),
        Command::Inspect(args) => inspect::run(args, say),
        Command::Merge(args) => merge::run(&args.into(), say),
        Command::Answer => Ok(migrate::arrival::answer()),
        Command::Guard => Ok(undo::run(|| Arc::new(Reach::open()))),
        Command::Hosted(_) => hosted::run(),
        Command::Log(args) => show_log(args, say),
        Command::Metrics(args) => metrics::run(args, say),
        Command::Explain(args) => explain::explain(args.code.as_deref()).map(|found| say.done(&found)),
        Command::Generate(args) => generate_files(args),
        Command::Facts(args) => facts::collect(&observe()?, &chosen(args)).map(|all| say.done(&all)),
        Command::Verify(args) => verify(args, say),
        Command::Fault(args) => fault(args).map(|report| say.done(&report)),
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
        Command::Restore(_) => "restore",
        Command::Receive(_) => "receive",
        Command::Migrate(_) => "migrate",
        Command::Mark(_) => "mark",
        Command::Maintenance(_) => "maintenance",
        Command::Evacuate(_) => "evacuate",
        Command::Daemon(_) => "daemon",
        Command::Inspect(_) => "inspect",
        Command::Merge(_) => "merge",
        Command::Answer => "answer",
        Command::Guard => "guard",
        Command::Hosted(HostedCommand::Run(_)) => "hosted run",
        Command::Hosted(HostedCommand::Gdb(_)) => "hosted gdb",
        Command::Log(_) => "log",
        Command::Metrics(_) => "metrics",
        Command::Explain(_) => "explain",
        Command::Generate(_) => "generate",
        Command::Facts(_) => "facts",
        Command::Verify(_) => "verify",
        Command::Fault(_) => "fault",
    }
}

fn doctor(args: &DoctorArgs, say: Say<'_>) -> Result<Exit> {
    let module = args.module.module.as_deref();
    let machine = progress::during("examining the machine", || Machine::read(module, &Sysroot::default()));
    let report = doctor::examine(&machine, args.quiet);
    say.done(&report);
    Ok(report.exit())
}

/// Refuses a CPU that cannot be switched, before the switch begins.
fn all_online(action: &str, cpus: Option<&CpuSet>) -> Result<()> {
    let online = Sysroot::default().online_cpus();
    let missing = cpus.and_then(|cpus| cpus.iter().find(|cpu| !online.contains(*cpu)));
    missing.map_or(Ok(()), |cpu| Err(Error::refused(action, Code::CpuOffline, Some(cpu), [0; 2])))
}

fn load(args: &ModuleArgs) -> Result<LoadReport> {
    let deferred = Deferred::begin();
    let (device, prepared) = loaded(args.module.as_deref(), "load")?;
    drop(deferred);
    LoadReport::collect(&device, prepared)
}

fn unload(args: &UnloadArgs) -> Result<UnloadReport> {
    need_root("unload")?;
    let _deferred = Deferred::begin();
    let Some(device) = control_if_loaded()? else {
        return Ok(UnloadReport { detached: 0, hypervisor_freed: false, driver_removed: false });
    };
    let mut report = progress::during("unloading", || switch::free(&device, args.detach))?;
    drop(device);
    if !args.keep_driver {
        module::remove()?;
        report.driver_removed = true;
    }
    Ok(report)
}

fn attach(args: &AttachArgs, format: Format) -> Result<switch::SwitchReport> {
    need_root("attach")?;
    all_online("attach", args.cpus.as_ref())?;
    let version = doctor::machine::version_code(&doctor::machine::release()).unwrap_or(0);
    if let Some(error) = doctor::system::refused_kernel(version).filter(|_| !args.force) {
        return Err(error);
    }
    let (device, mut prepared) = controlled(args.module.module.as_deref(), "attach")?;
    let report = match load_and_attach(&device, args.cpus.as_ref(), &mut prepared) {
        Err(error) if error.code == Some(Code::VirtualizationInUse) => {
            make_kvm_let_go(args, format, error)?;
            prepared.kvm_unloaded = true;
            load_and_attach(&device, args.cpus.as_ref(), &mut prepared)
        }
        result => result,
    };
    let sysroot = Sysroot::default();
    match report {
        Ok(report) => Ok(report.note(module::departure(&module::kvm_departs(&sysroot)))),
        Err(error) if error.code == Some(Code::VirtualizationInUse) && prepared.kvm_unloaded => {
            Err(held_by(&module::holders(&sysroot), error))
        }
        Err(error) => Err(error),
    }
}

/// Loads and attaches. Either step can fail because another hypervisor uses the hardware.
fn load_and_attach(
    device: &Device,
    cpus: Option<&CpuSet>,
    prepared: &mut Prepared,
) -> Result<switch::SwitchReport> {
    prepared.hypervisor_loaded |= load_hypervisor(device)?;
    switch_deferred(device, Direction::Attach, cpus, *prepared)
}

/// Runs a switch to its end even after Ctrl-C, so that it is never done in part.
fn switch_deferred(
    device: &Device,
    direction: Direction,
    cpus: Option<&CpuSet>,
    prepared: Prepared,
) -> Result<switch::SwitchReport> {
    let _deferred = Deferred::begin();
    let label = format!("{}ing", direction.name());
    progress::during(&label, || switch::switch(device, direction, cpus, prepared))
}

/// Unloads a KVM without virtual machines, if the operator wants that. Otherwise returns the error,
/// with the modules that may hold the hardware.
fn make_kvm_let_go(args: &AttachArgs, format: Format, error: Error) -> Result<()> {
    let holders = module::holders(&Sysroot::default());
    let unused = holders.iter().find(|module| module::is_unused_kvm(module));
    let can_ask = format == Format::Text && !holders.iter().any(module::is_rival);
    match unused.filter(|kvm| args.unload_kvm || (can_ask && agreed(&kvm.name))) {
        Some(kvm) => module::remove_kvm(kvm),
        None => Err(held_by(&holders, error)),
    }
}

/// Adds the modules that hold the hardware to the error, and how to unload them.
fn held_by(holders: &[Module], error: Error) -> Error {
    let Some(names) = module::names(holders) else { return error };
    Error { message: format!("{}; {names} holds it", error.message), hint: module::release(holders), ..error }
}

/// Asks the operator on the terminal, if there is one.
fn agreed(holder: &str) -> bool {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return false;
    }
    eprint!("{holder} holds the hardware, and no virtual machine uses it. Unload it? [y/N] ");
    let mut answer = String::new();
    let read = std::io::stdin().read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

fn detach(args: &DetachArgs) -> Result<switch::SwitchReport> {
    need_root("detach")?;
    all_online("detach", args.cpus.as_ref())?;
    let Some(device) = control_if_loaded()? else { return Ok(switch::nothing_to_detach()) };
    switch_deferred(&device, Direction::Detach, args.cpus.as_ref(), Prepared::default())
}

fn watch(say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    let mut before: Option<(Instant, Status)> = None;
    while !deferred.requested() {
        let (now, status) = (Instant::now(), current_status()?);
        if say.format == Format::Text && std::io::stdout().is_terminal() {
            print("\x1b[H\x1b[J");
        }
        if !say.one_of_many(&status) {
            break;
        }
        if let (Some((then, old)), Format::Text) = (&before, say.format) {
            let rate = status::Rate::between(old, &status, now.duration_since(*then).as_secs_f64());
            print(&format!("\n{rate}. Ctrl-C ends.\n"));
        }
        before = Some((now, status));
        pause(&deferred, WATCH_INTERVAL);
    }
    Ok(Exit::Done)
}

/// Sleeps until the interval ends or Ctrl-C comes.
fn pause(deferred: &Deferred, interval: Duration) {
    let end = Instant::now() + interval;
    while !deferred.requested() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50).min(interval));
    }
}

fn show_log(args: &LogArgs, say: Say<'_>) -> Result<Exit> {
    let device = observe()?;
    let mut reader = Reader::default();
    let read = |reader: &mut Reader| -> Result<log::Events> {
        let clock = tsc::clock(device.system()?.tsc_khz);
        Ok(reader.read(&device.shared()?, &clock))
    };
    if !args.follow {
        return read(&mut reader).map(|events| say.done(&events));
    }
    let deferred = Deferred::begin();
    while !deferred.requested() {
        let events = read(&mut reader)?;
        if !follow(&events, say) {
            break;
        }
        pause(&deferred, FOLLOW_INTERVAL);
    }
    Ok(Exit::Done)
}

/// Shows new events, each on a line of its own.
fn follow(events: &log::Events, say: Say<'_>) -> bool {
    match say.format {
        Format::Text => say.one_of_many(events),
        Format::Json => {
            let lines = events.events.iter().filter_map(|event| serde_json::to_string(event).ok());
            print(&lines.map(|line| line + "\n").collect::<String>())
        }
    }
}

fn generate_files(args: &GenerateArgs) -> Result<Exit> {
    let result = match args.what {
        Generated::Man => generate::man(&args.directory),
        Generated::Completions => generate::completions(&args.directory),
    };
    result.map(|()| Exit::Done).map_err(|error| {
        Error::new(Exit::Failed, format!("writing to {} failed: {error}", args.directory.display()))
            .hint("name a directory that can be written")
    })
}

/// Returns the named CPUs, or all that are online.
fn chosen(args: &CpusArgs) -> CpuSet {
    args.cpus.clone().unwrap_or_else(|| Sysroot::default().online_cpus())
}

fn verify(args: &VerifyArgs, say: Say<'_>) -> Result<Exit> {
    let (device, _) = loaded(args.module.module.as_deref(), "verify")?;
    let _deferred = Deferred::begin();
    let report = facts::verify(&device, &chosen(&args.cpus))?;
    say.done(&report);
    Ok(if report.equal { Exit::Done } else { Exit::Failed })
}

/// The result of `mercury fault`.
#[derive(Serialize)]
struct Fired {
    fired: u32,
}

impl Render for Fired {
    fn render(&self, to: &mut mercury_control::output::Text) {
        to.line(format!("fault points have fired {} times since load", self.fired));
    }
}

fn fault(args: &FaultArgs) -> Result<Fired> {
    let request = FaultRequest {
        point: args.point,
        cpu: args.cpu.unwrap_or(u32::MAX),
        passage: args.passage,
        offset: args.offset,
        value: args.value,
        ..FaultRequest::default()
    };
    Device::open(Access::Control)?.fault(request).map(|fired| Fired { fired })
}
