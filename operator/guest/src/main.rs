//! The program `mercury-guest`: it runs a machine as a guest of KVM on this host, one of a checkpoint or one
//! that moves here. It needs no root if the user may open `/dev/kvm`.

/// Prints a line for the operator. A reader that is gone is no reason to fail.
macro_rules! note {
    ($($text:tt)*) => {{
        // A part may be another machine's.
        let text = mercury_relocation::plain::plain(&format!($($text)*));
        // The tests' harness keeps what is printed by the macro.
        #[cfg(test)]
        eprintln!("{text}");
        #[cfg(not(test))]
        {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }};
}

mod beside;
mod group;
mod receive;
mod signals;

use clap::{Args, Parser, Subcommand};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    exit::{Exit, TABLE},
    output::{Format, Render, Text},
    say::{Say, fail},
};
use mercury_devices::NetOption;
use mercury_guest::{
    disks::{self, OwnDisk},
    fit::{CpuLimit, Limits, MemoryLimit, ServerDisks},
    platform::End,
    run::{self, Disk, Guest, Options, Running},
};
use mercury_guests::{Console, Folder, GuestArgs, Keeper, LifeArgs, Name, Phase, Root, Status, held::Holder};
use mercury_hosted_options::net::Uplink;
use mercury_image::Machine;
use receive::ReceiveArgs;
use serde::Serialize;
use signals::{SIGNALS, Signals};
use std::{
    fs, io,
    path::PathBuf,
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

/// Runs a machine as a guest on this host
#[derive(Debug, Parser)]
#[command(name = "mercury-guest", version, max_term_width = 100, after_help = TABLE)]
struct Cli {
    /// Print one JSON object instead of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: GuestCommand,
}

#[derive(Debug, Subcommand)]
enum GuestCommand {
    /// Lets the machine of an image go on as a guest, until it powers itself off or is stopped
    Run(RunArgs),
    /// Waits for a machine that moves here, and lets it go on as a guest, until it powers itself off or is
    /// stopped
    Receive(ReceiveArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The image: a file, or the block device that `mercury checkpoint` wrote
    image: PathBuf,
    #[command(flatten)]
    guest: GuestArgs,
}

/// The consequence of a start from an image whose machine goes on with its connections.
const KEEPS_CONNECTIONS: &str = "note: the machine goes on with its connections and keys. Its image notes \
    that, if you may write to it: a later return to hardware ends connections with other machines, also \
    after a trial or a clone";

fn main() -> ExitCode {
    one_heap();
    let cli = Cli::parse();
    let format = if cli.json { Format::Json } else { Format::Text };
    let (name, ended) = match &cli.command {
        GuestCommand::Run(args) => ("guest run", run(args, format)),
        GuestCommand::Receive(args) => ("receive", receive::run(args, format)),
    };
    let result = ended.map(|ended| {
        Say { format, name }.done(&ended);
        ended.exit()
    });
    result.unwrap_or_else(|error| fail(&error, format, name)).into()
}

fn run(args: &RunArgs, format: Format) -> Result<Ended> {
    // Before any thread, so that each has the signals blocked.
    let signals = Signals::block(ending(args.guest.console))?;
    let life = &args.guest.life;
    let own = own_disks(&args.guest.disk);
    let drivers = drivers(life.net.is_some(), own.len() < args.guest.disk.len());
    let limits = Limits {
        memory: MemoryLimit::Available,
        cpus: CpuLimit::of(life.overcommit_cpus),
        servers: ServerDisks::of(args.guest.force_server_disks),
    };
    let guest = Guest::prepare(&args.image, &drivers, &own, limits)?;
    if guest.keeps_connections() {
        note!("{KEEPS_CONNECTIONS}");
    }
    let name = life.name.clone().unwrap_or_else(|| Name::of_machine(&guest.machine().host));
    let root = Root::own();
    let mut status = status(&name, guest.machine(), guest.memory());
    status.image = Some(fs::canonicalize(&args.image).unwrap_or_else(|_| args.image.clone()));
    status.identity = Some(guest.identity().to_string());
    // Two guests that start at once see each other.
    let admitting = root.admit_one().map_err(beside::not_admitted)?;
    if limits.servers == ServerDisks::Guarded {
        refuse_second_life(&root, &status, guest.machine())?;
    }
    let mut folder = claim(&root, &name)?;
    folder.entrust(start_keeper()?).map_err(no_keeper)?;
    tell(&folder, &status)?;
    drop(admitting);
    group::enter(&mut status, args.guest.memory_file.is_some());
    tell(&folder, &status)?;
    let stopping = signals.watch()?;
    let disks = args.guest.disk.iter().filter(|disk| disks::parse(disk).is_none());
    let disks = disks.map(|disk| disk_of(disk)).collect();
    let options = options(life, args.guest.console, disks, &folder)?;
    let running = guest.start(&options, args.guest.memory_file.as_deref())?;
    stopping.hold().hand_over(running.handle());
    status.phase = Phase::Running;
    tell_of_running(&folder, &status);
    say_that_it_goes_on(&name, args.guest.console, format);
    running.confine()?;
    Ok(finish(running, name))
}

/// Refuses a guest whose image another guest runs from, if both would write to disks or file systems of one
/// server.
fn refuse_second_life(root: &Root, status: &Status, machine: &Machine) -> Result<()> {
    let places = machine.on_servers();
    if places.is_empty() {
        return Ok(());
    }
    let guests = root.guests().map_err(beside::unreadable)?;
    let other = guests.iter().find(|other| other.status.identity == status.identity);
    let Some(other) = other.map(|other| &other.status.name) else { return Ok(()) };
    let text = format!(
        "the guest {other} runs from this image, and both would write to what the machine has on servers: {}",
        places.join(", ")
    );
    Err(Error::coded(Code::GuestDisks, text).hint(format!(
        "end the other one first (`mercury guests stop {other}`), or start this one with \
         --force-server-disks, if both may write there"
    )))
}

/// Returns the signals that end a guest which runs. One whose console is a socket outlives its terminal.
fn ending(console: Console) -> &'static [libc::c_int] {
    match console {
        Console::Terminal => &SIGNALS,
        Console::Socket => &[libc::SIGTERM, libc::SIGINT],
    }
}

/// Lets all threads have one heap. A heap of a thread's own that shrinks has the C library open a file, which
/// the monitor may not do any more.
fn one_heap() {
    // SAFETY: It takes numbers, and no other thread is there yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

fn say_that_it_goes_on(name: &Name, console: Console, format: Format) {
    if format == Format::Text && console == Console::Socket {
        note!("{name} goes on as a guest; `mercury guests console {name}` is its console");
    }
}

/// Waits for the guest's end.
fn finish(running: Running, name: Name) -> Ended {
    let monitor = running.handle();
    let end = running.wait();
    Ended::new(name, &end, monitor.own_memory())
}

/// Starts the process that removes the guest's folder. This process must have one thread.
fn start_keeper() -> Result<Keeper> {
    Keeper::start().map_err(no_keeper)
}

fn no_keeper(error: io::Error) -> Error {
    let text = format!("cannot start a process that looks after the guest's folder: {error}");
    Error::new(Exit::Impossible, text).hint(mercury_guest::SHORT_OF)
}

/// Returns the state of a guest that is about to be loaded.
fn status(name: &Name, machine: &Machine, memory_bytes: u64) -> Status {
    Status {
        name: name.clone(),
        pid: std::process::id(),
        phase: Phase::Loading,
        image: None,
        identity: None,
        machine: machine.host.clone(),
        kernel: machine.release.clone(),
        cpus: machine.cpus.len() as u32,
        memory_bytes,
        since: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        unit: None,
        group: None,
    }
}

fn tell(folder: &Folder, status: &Status) -> Result<()> {
    let wrong = |error| {
        Error::new(Exit::Failed, format!("cannot write the state of the guest: {error}"))
            .hint("make room in /run, or in $XDG_RUNTIME_DIR")
    };
    folder.write(status).map_err(wrong)
}

/// Writes the state of a guest that runs. The state is for other commands only, and the guest is more.
fn tell_of_running(folder: &Folder, status: &Status) {
    if let Err(error) = tell(folder, status) {
        note!(
            "mercury: {error}; the guest runs on, and `mercury guests list` may have nothing or an older \
             state"
        );
    }
}

/// Makes the folder of the guest.
fn claim(root: &Root, name: &Name) -> Result<Folder> {
    let claimed = root.claim(name).map_err(|error| {
        Error::new(Exit::Failed, format!("cannot make the folder of the guest {name}: {error}"))
            .hint("make the folder /run/mercury/guests, or $XDG_RUNTIME_DIR, writable")
    })?;
    claimed.ok_or_else(|| taken(name, Holder::of_folder(&root.path().join(name.as_str()))))
}

/// Returns the error of a name that is taken: by a guest, or by a process that has been reading the folder of
/// such a guest for longer than a moment.
fn taken(name: &Name, holder: Option<Holder>) -> Error {
    if let Some(holder) = holder.filter(|holder| holder.is_stopped) {
        let text = format!("{holder} holds the folder of a guest {name}");
        let hint = format!("let it go on with `kill -CONT {}`, or name this guest with --name", holder.pid);
        return Error::new(Exit::Busy, text).hint(hint);
    }
    Error::new(Exit::Busy, format!("a guest of the name {name} runs here"))
        .hint(format!("name this one with --name, or stop the other one with `mercury guests stop {name}`"))
}

fn options(args: &LifeArgs, console: Console, disks: Vec<Disk>, folder: &Folder) -> Result<Options> {
    let net = |uplink: Uplink| NetOption { uplink, mac: args.mac, forwards: args.forward.clone() };
    let second = folder.second_port();
    let words = folder.decision().map_err(|error| {
        Error::new(Exit::Failed, format!("cannot make a pipe for the operator's word: {error}"))
            .hint(mercury_guest::FOLDER)
    })?;
    Ok(Options {
        orders: folder.orders(),
        words,
        disks,
        net: args.net.clone().map(net),
        console: match console {
            Console::Terminal => run::Console::Terminal { second },
            Console::Socket => run::Console::Sockets { first: folder.console(), second },
        },
    })
}

/// Returns the drivers that a guest's kernel needs for a network card and for new disks.
fn drivers(has_card: bool, has_disks: bool) -> Vec<&'static str> {
    let needed =
        [(has_card || has_disks, "virtio_mmio"), (has_card, "virtio_net"), (has_disks, "virtio_blk")];
    needed.into_iter().filter_map(|(is_needed, name)| is_needed.then_some(name)).collect()
}

/// Returns the contents of the machine's own disks.
fn own_disks(given: &[String]) -> Vec<OwnDisk> {
    given.iter().filter_map(|text| disks::parse(text)).collect()
}

fn disk_of(text: &str) -> Disk {
    let (path, read_only) = text.strip_suffix(",ro").map_or((text, false), |path| (path, true));
    Disk { path: path.into(), read_only }
}

/// The end of the guest.
#[derive(Debug, Serialize)]
struct Ended {
    name: Name,
    end: &'static str,
    /// The reason for which it could not go on.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Memory that the monitor took at the end beside the guest's.
    #[serde(skip_serializing_if = "Option::is_none")]
    monitor_bytes: Option<u64>,
}

impl Ended {
    fn new(name: Name, end: &End, monitor_bytes: Option<u64>) -> Self {
        let (end, reason) = match end {
            End::PoweredOff => ("powered-off", None),
            End::Reset => ("reset", None),
            End::Stopped => ("stopped", None),
            End::Failed(why) => ("failed", Some(why.clone())),
        };
        Self { name, end, reason, monitor_bytes }
    }

    fn exit(&self) -> Exit {
        if self.reason.is_some() { Exit::Failed } else { Exit::Done }
    }
}

impl Render for Ended {
    fn render(&self, text: &mut Text) {
        let name = &self.name;
        text.line(match (self.end, &self.reason) {
            (_, Some(why)) => format!("{name} has ended: {why}"),
            ("powered-off", _) => format!("{name} has powered itself off"),
            ("reset", _) => {
                format!(
                    "{name} has ended: it asked for a restart, and a guest has no firmware that starts it"
                )
            }
            _ => format!("{name} was stopped"),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound_and_read() {
        Cli::command().debug_assert();
        let parse = |words: &[&str]| {
            let all = ["mercury-guest", "run", "image"].iter().chain(words);
            Cli::try_parse_from(all).map(|cli| match cli.command {
                GuestCommand::Run(args) => args,
                GuestCommand::Receive(_) => panic!("another command"),
            })
        };
        assert_eq!(parse(&[]).expect("options").guest.console, Console::Terminal);
        let args =
            parse(&["--net", "tap=tap0", "--console", "socket", "--disk", "a,ro"]).expect("options").guest;
        assert_eq!(
            (args.console, args.life.net.clone()),
            (Console::Socket, Some(Uplink::Tap("tap0".into())))
        );
        assert_eq!(disk_of(&args.disk[0]), Disk { path: "a".into(), read_only: true });
        assert_eq!(disk_of("/dev/sdb"), Disk { path: "/dev/sdb".into(), read_only: false });
        assert!(parse(&["--net", "bridge"]).is_err() && parse(&["--console", "vga"]).is_err());
    }

    #[test]
    fn a_second_guest_of_an_image_gets_no_disk_on_a_server() {
        let place = tempfile::tempdir().expect("a folder");
        let root = Root::at(place.path());
        let (one, two) = (Name::of_machine("one"), Name::of_machine("two"));
        let machine = Machine { served: vec!["/".into()], ..Machine::default() };
        let of = |name: &Name, image: &str| {
            let status = status(name, &machine, 1);
            Status { identity: Some(image.into()), ..status }
        };
        let folder = root.claim(&one).expect("a folder").expect("no other guest");
        tell(&folder, &of(&one, "0a")).expect("told");
        let error = refuse_second_life(&root, &of(&two, "0a"), &machine).expect_err("refused");
        assert!(error.message.contains("the guest one runs") && error.hint.is_some(), "{error}");
        assert_eq!(error.code, Some(Code::GuestDisks));
        assert!(refuse_second_life(&root, &of(&two, "0b"), &machine).is_ok(), "another image");
        assert!(
            refuse_second_life(&root, &of(&two, "0a"), &Machine::default()).is_ok(),
            "nothing on servers"
        );
        drop(folder);
        assert!(refuse_second_life(&root, &of(&two, "0a"), &machine).is_ok());
    }

    #[test]
    fn the_end_of_a_terminal_ends_no_guest_whose_console_is_a_socket() {
        assert!(ending(Console::Terminal).contains(&libc::SIGHUP));
        assert!(!ending(Console::Socket).contains(&libc::SIGHUP));
        assert!(
            [Console::Terminal, Console::Socket].map(ending).iter().all(|all| all.contains(&libc::SIGTERM))
        );
    }

    #[test]
    fn a_stopped_process_that_holds_a_name_is_named() {
        let name = Name::of_machine("node7");
        let holder = Holder { pid: 77, program: "mercury".into(), is_stopped: false };
        for holder in [None, Some(holder.clone())] {
            let error = taken(&name, holder);
            assert!(error.message.contains("a guest of the name node7 runs here"), "{error}");
        }
        let error = taken(&name, Some(Holder { is_stopped: true, ..holder }));
        assert!(error.message.contains("process 77 (mercury, stopped) holds the folder"), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.contains("kill -CONT 77")));
    }

    /// The state of a guest that runs cannot be written: nothing panics, and nobody ends the guest for it.
    #[test]
    fn a_guest_runs_on_if_its_state_cannot_be_written() {
        let place = tempfile::tempdir().expect("a folder");
        let name = Name::of_machine("node7");
        let folder = Root::at(place.path()).claim(&name).expect("a folder").expect("no other guest");
        let status = status(&name, &Machine::default(), 1);
        fs::remove_dir_all(place.path()).expect("removed");
        assert!(tell(&folder, &status).is_err());
        tell_of_running(&folder, &status);
    }

    #[test]
    fn each_end_has_its_words_and_its_status() {
        let ended = |end| {
            let ended = Ended::new(Name::of_machine("node7"), &end, None);
            let text = serde_json::to_string(&ended).expect("JSON");
            (ended.exit(), text)
        };
        assert_eq!(ended(End::PoweredOff), (Exit::Done, r#"{"name":"node7","end":"powered-off"}"#.into()));
        assert_eq!(ended(End::Stopped).0, Exit::Done);
        let failed = ended(End::Failed("KVM has stopped".into()));
        assert_eq!(failed.0, Exit::Failed);
        assert!(failed.1.contains(r#""reason":"KVM has stopped""#));
    }
}
