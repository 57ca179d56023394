//! The program `mercury-guest`: it runs the machine of a checkpoint as a guest of KVM on this host. It needs
//! no root if the user may open `/dev/kvm`.

mod control;
mod signals;
mod state;

use clap::{Args, Parser, Subcommand, ValueEnum};
use control::Control;
use mercury_control::{
    error::{Error, Result},
    exit::{Exit, TABLE},
    output::{Format, Render, Text},
    say::{Say, fail},
};
use mercury_devices::NetOption;
use mercury_guest::{
    platform::End,
    run::{Console, Disk, Guest, Options},
};
use mercury_hosted_options::net::{Forward, Mac, Uplink};
use serde::Serialize;
use signals::Signals;
use state::{Facts, State};
use std::{path::PathBuf, process::ExitCode};

/// Runs the machine of a checkpoint as a guest on this host
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
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The image: a file, or the block device that `mercury checkpoint` wrote
    image: PathBuf,
    /// Name of the guest [default: the host name in the image]
    #[arg(long)]
    name: Option<String>,
    /// Network card: passt, `passt,host`, tap=NAME or none
    #[arg(long, value_parser = network, default_value = "none")]
    net: Network,
    /// Ethernet address of the network card
    #[arg(long)]
    mac: Option<Mac>,
    /// Port of this host that passt forwards to the guest, such as 8080:80
    #[arg(long)]
    forward: Vec<Forward>,
    /// Disk of the guest: a raw image or a block device, with `,ro` if the guest only reads it
    #[arg(long)]
    disk: Vec<String>,
    /// The other end of the first serial port
    #[arg(long, value_enum, default_value_t = ConsoleKind::Socket)]
    console: ConsoleKind,
    /// Folder for the sockets and the status [default: /run/mercury/guests/NAME, or below XDG_RUNTIME_DIR]
    #[arg(long)]
    state: Option<PathBuf>,
}

/// The other end of the first serial port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ConsoleKind {
    /// Standard input and output
    Stdio,
    /// A socket in the folder of the guest
    Socket,
}

/// The network card, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Network(Option<Uplink>);

fn network(text: &str) -> std::result::Result<Network, String> {
    if text == "none" { Ok(Network(None)) } else { text.parse().map(|uplink| Network(Some(uplink))) }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let format = if cli.json { Format::Json } else { Format::Text };
    let GuestCommand::Run(args) = &cli.command;
    let name = "guest run";
    let result = run(args, format).map(|ended| {
        Say { format, name }.done(&ended);
        ended.exit()
    });
    result.unwrap_or_else(|error| fail(&error, format, name)).into()
}

fn run(args: &RunArgs, format: Format) -> Result<Ended> {
    if args.net.0.is_none() && (args.mac.is_some() || !args.forward.is_empty()) {
        return Err(Error::new(Exit::Usage, "--mac and --forward need a network card")
            .hint("add --net passt or --net tap=NAME"));
    }
    // Before any thread, so that each has the signals blocked.
    let signals = Signals::block()?;
    let guest = Guest::prepare(&args.image)?;
    let machine = guest.machine();
    let name = args.name.clone().unwrap_or_else(|| machine.host.clone());
    let state = State::make(&name, args.state.as_deref())?;
    let mut facts = Facts::new(&name, &args.image, machine);
    state.write(&facts)?;
    let stopping = signals.watch(&state)?;
    let options = Options {
        disks: args.disk.iter().map(|disk| disk_of(disk)).collect(),
        net: args.net.0.clone().map(|uplink| NetOption {
            uplink,
            mac: args.mac,
            forwards: args.forward.clone(),
        }),
        console: console(args.console, &state),
    };
    let running = guest.start(&options)?;
    let control = Control::new(running.handle(), facts.running());
    stopping.hand_over(running.handle());
    control.listen(&state)?;
    state.write(&control.facts())?;
    if format == Format::Text {
        eprintln!("{name} goes on as a guest; its sockets are in {}", state.folder().display());
    }
    let end = running.wait();
    drop(state);
    Ok(Ended::new(name, &end))
}

fn disk_of(text: &str) -> Disk {
    let (path, read_only) = text.strip_suffix(",ro").map_or((text, false), |path| (path, true));
    Disk { path: path.into(), read_only }
}

fn console(kind: ConsoleKind, state: &State) -> Console {
    let second = state.folder().join("serial1.sock");
    match kind {
        ConsoleKind::Stdio => Console::Terminal { second },
        ConsoleKind::Socket => Console::Sockets { first: state.folder().join("console.sock"), second },
    }
}

/// The end of the guest.
#[derive(Debug, Serialize)]
struct Ended {
    name: String,
    /// How it ended.
    end: &'static str,
    /// Why it could not go on.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl Ended {
    fn new(name: String, end: &End) -> Self {
        let (end, reason) = match end {
            End::PoweredOff => ("powered-off", None),
            End::Reset => ("reset", None),
            End::Stopped => ("stopped", None),
            End::Failed(why) => ("failed", Some(why.clone())),
        };
        Self { name, end, reason }
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
            })
        };
        let args = parse(&[]).expect("options");
        assert_eq!((args.net, args.console), (Network(None), ConsoleKind::Socket));
        let args = parse(&["--net", "tap=tap0", "--console", "stdio", "--disk", "a,ro"]).expect("options");
        assert_eq!(args.net, Network(Some(Uplink::Tap("tap0".into()))));
        assert_eq!(disk_of(&args.disk[0]), Disk { path: "a".into(), read_only: true });
        assert_eq!(disk_of("/dev/sdb"), Disk { path: "/dev/sdb".into(), read_only: false });
        assert!(parse(&["--net", "bridge"]).is_err() && parse(&["--console", "vga"]).is_err());
    }

    #[test]
    fn each_end_has_its_words_and_its_status() {
        let ended = |end| {
            let ended = Ended::new("node7".into(), &end);
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
