//! Machines that go on as guests of this system: `mercury restore --as-guest`, and `mercury guests`.
//!
//! The monitor is a program of its own, `mercury-guest`, for the reason that hosted machines have one
//! ([`crate::hosted`]). It keeps the guest's state in a folder ([`mercury_guests::Folder`]).

pub mod console;
pub mod migrate;

use crate::hosted::become_program;
use clap::{Args, Subcommand};
use console::Left;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Format, Render, Text},
    say::Say,
};
use mercury_guests::{Guest, Name, Phase, Root, Status, held::Holder};
use mercury_relocation::plain::plain;
use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::Serialize;
use std::{
    ffi::{OsStr, OsString},
    io,
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

/// The monitor's program.
const PROGRAM: &str = "mercury-guest";
/// Time in which a guest ends, and the interval between two checks of that.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time in which a guest that is in doubt reads a word: it asks several times a second.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Time in which a monitor follows the operator's word.
const DECIDED_WITHIN: Duration = Duration::from_secs(30);

/// The commands below `mercury guests`.
#[derive(Debug, Subcommand)]
pub enum GuestsCommand {
    /// List your guests: state, size, kernel, image
    #[command(long_about = "Lists your guests: state, size, kernel, image. Root sees root's guests, \
        and other users their own.")]
    List,
    /// Join this terminal to a guest's console; Ctrl-A x leaves
    #[command(
        long_about = "Joins this terminal to a guest's first serial port, until the guest ends or you \
        leave. Ctrl-A x leaves; Ctrl-A Ctrl-A types Ctrl-A. One terminal at a time can have the console."
    )]
    Console(GuestArgs),
    /// Let a machine go on that has arrived whole, and whose source is silent
    #[command(
        long_about = "Lets a machine go on that has arrived whole, and whose source has fallen silent \
        before it said if the machine is to go on here. First make sure that the machine does not run at \
        its source and never will: its console says that it waits for this host, or it is off and its \
        tombstone says `committed`. A source that is only dead may have gone on before it died. One that was \
        a guest of another host leaves no tombstone: adopt it only if it waits there, or if nobody outside \
        has heard of it since it stopped."
    )]
    Adopt(ArrivalArgs),
    /// Discard a machine that arrives; it goes on at its source
    Discard(ArrivalArgs),
    /// Move a guest back to its hardware, or on to another host in use
    #[command(
        long_about = "Moves a guest that runs to the hardware that it came from, to equal hardware, or to \
        another host in use, which waits in `mercury receive`. It starts `mercury migrate` in the guest, \
        says what that says, and returns when the machine runs at the destination. Until the destination is \
        told to start the machine, any failure lets the guest go on here. Ctrl-C ends the wait, and not the \
        move. If the destination falls silent in between, the guest stands still, until `mercury guests \
        resume` or `abandon` decides, or a word at its console."
    )]
    Migrate(migrate::MigrateArgs),
    /// Let a guest go on here that is in doubt about its move
    #[command(
        long_about = "Lets a guest go on here that stands still, because it has told its destination to \
        start it and hears nothing. First make sure that it does not run at the destination and never will: see \
        the destination's console and what clients have seen, and switch the destination off, or end its \
        guest there. The word reaches the guest by its monitor, whatever its console is. Fails if the guest \
        asks for no word."
    )]
    Resume(GuestArgs),
    /// End a guest here that is in doubt about its move, and runs at its destination
    #[command(
        long_about = "Ends a guest here that stands still, because it has told its destination to start it \
        and hears nothing. First make sure that it runs at the destination: its memory here is lost. The \
        word reaches the guest by its monitor, whatever its console is. Fails if the guest asks for no word."
    )]
    Abandon(GuestArgs),
    /// End a guest at once, as a power cut would
    #[command(
        long_about = "Ends a guest at once, as a power cut would end a machine. To shut it down in order, \
        power it off from inside."
    )]
    Stop(GuestArgs),
}

#[derive(Debug, Args)]
pub struct GuestArgs {
    /// The guest
    pub name: Name,
}

#[derive(Debug, Args)]
pub struct ArrivalArgs {
    /// The guest that is to be
    pub name: Name,
}

/// Replaces this process by `mercury-guest`, which runs the machine of an image, or one that moves here. The
/// options have been checked.
///
/// # Errors
/// If the program cannot be started.
pub fn start() -> Result<Exit> {
    become_program(PROGRAM, monitors_words(std::env::args_os().skip(1)))
}

/// Returns the words for `mercury-guest`: `run` in place of `restore`, without `--as-guest` or `--beside`. No
/// option before the command has a value.
fn monitors_words(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    let is_command = |word: &&mut OsString| *word == OsStr::new("restore") || *word == OsStr::new("receive");
    let Some(command) = words.iter_mut().find(is_command) else { return words };
    let mut option = "--beside";
    if *command == OsStr::new("restore") {
        *command = "run".into();
        option = "--as-guest";
    }
    if let Some(at) = words.iter().position(|word| word == OsStr::new(option)) {
        words.remove(at);
    }
    words
}

/// Runs a command below `mercury guests`.
///
/// # Errors
/// If no guest has the name, or the guest does not answer.
pub fn run(command: &GuestsCommand, say: Say<'_>) -> Result<Exit> {
    let root = Root::own();
    match command {
        GuestsCommand::List => list(&root).map(|guests| say.done(&guests)),
        GuestsCommand::Console(args) => visit(&root, &args.name, say),
        GuestsCommand::Adopt(args) => {
            decide(&root, &args.name, Word::Adopt, DECIDED_WITHIN).map(|decided| say.done(&decided))
        }
        GuestsCommand::Discard(args) => {
            decide(&root, &args.name, Word::Discard, DECIDED_WITHIN).map(|decided| say.done(&decided))
        }
        GuestsCommand::Migrate(args) => migrate::migrate(&root, args, say).map(|moved| say.done(&moved)),
        GuestsCommand::Resume(args) => {
            answer(&root, &args.name, "resume", ANSWERED_WITHIN).map(|answered| say.done(&answered))
        }
        GuestsCommand::Abandon(args) => {
            answer(&root, &args.name, "abandon", ANSWERED_WITHIN).map(|answered| say.done(&answered))
        }
        GuestsCommand::Stop(args) => stop(&root, &args.name).map(|stopped| say.done(&stopped)),
    }
}

fn list(root: &Root) -> Result<Guests> {
    let guests = root.guests().map_err(|error| unreadable(root, &error))?;
    let listed = |guest: Guest| Listed { used_bytes: guest.status.used_bytes(), status: guest.status };
    Ok(Guests { guests: guests.into_iter().map(listed).collect() })
}

fn find(root: &Root, name: &Name) -> Result<Guest> {
    let found = root.find(name).map_err(|error| unreadable(root, &error))?;
    found.ok_or_else(|| {
        Error::new(Exit::State, format!("no guest of the name {name} runs"))
            .hint("`mercury guests list` shows your guests; other users have guests of their own")
    })
}

/// Finds a guest whose monitor can answer.
fn find_awake(root: &Root, name: &Name) -> Result<Guest> {
    let guest = find(root, name)?;
    guest.stopped_monitor().map_or(Ok(guest), |monitor| Err(is_stopped(name, &monitor)))
}

fn is_stopped(name: &Name, monitor: &Holder) -> Error {
    Error::new(Exit::Busy, format!("the monitor of {name} answers nothing: {monitor}"))
        .hint(format!("let it go on with `kill -CONT {}`", monitor.pid))
}

fn unreadable(root: &Root, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("cannot read the state of guests in {}: {error}", root.path().display()))
        .hint("run this as the user who runs the guests")
}

fn visit(root: &Root, name: &Name, say: Say<'_>) -> Result<Exit> {
    let guest = find_awake(root, name)?;
    let failed = |error: io::Error| {
        Error::new(Exit::Failed, format!("cannot reach the console of {name}: {error}"))
            .hint("a guest has a console here if it was started with --console socket")
    };
    let socket = UnixStream::connect(guest.console()).map_err(failed)?;
    if say.format == Format::Text {
        eprintln!("this is the console of {name}; Ctrl-A x leaves");
    }
    match console::visit(&socket).map_err(failed)? {
        Left::ByUser => eprintln!("\r\nleft; {name} goes on"),
        Left::ByGuest => eprintln!("\r\n{name} has ended"),
    }
    Ok(Exit::Done)
}

/// Passes the operator's word about a machine that arrives, and waits until its monitor has followed it.
fn decide(root: &Root, name: &Name, word: Word, limit: Duration) -> Result<Decided> {
    let guest = find_awake(root, name)?;
    match (guest.status.phase, word) {
        (Phase::Complete, _) | (Phase::Arriving, Word::Discard) => {}
        (Phase::Arriving, Word::Adopt) => {
            return Err(Error::new(Exit::State, format!("{name} has not arrived whole: it cannot run yet"))
                .hint("wait until `mercury guests list` says `complete`, or discard it"));
        }
        (Phase::Loading | Phase::Running, _) => {
            let text = format!("{name} is not on its way here: it is {}", phase(guest.status.phase));
            return Err(Error::new(Exit::State, text).hint("`mercury guests list` shows what arrives"));
        }
    }
    guest.decide(word.text()).map_err(|error| {
        Error::new(Exit::Failed, format!("cannot tell the monitor of {name}: {error}"))
            .hint("the machine may just have begun to run: see `mercury guests list`")
    })?;
    let start = Instant::now();
    loop {
        // Another machine of the same name may arrive by the same command.
        let now = root.find(name).map_err(|error| unreadable(root, &error))?;
        let now =
            now.filter(|now| (now.status.pid, now.status.since) == (guest.status.pid, guest.status.since));
        match (now.map(|now| now.status.phase), word) {
            (Some(Phase::Running), Word::Adopt) | (None, Word::Discard) => {
                return Ok(Decided { name: name.clone(), word: word.text() });
            }
            (Some(Phase::Running), Word::Discard) => {
                let text =
                    format!("{name} runs here: its source's word came first, and nothing was discarded");
                return Err(Error::new(Exit::State, text)
                    .hint(format!("`mercury guests stop {name}` ends it, as a power cut would")));
            }
            (None, Word::Adopt) => {
                let text = format!("{name} does not run here: it was discarded, or could not be started");
                return Err(Error::new(Exit::Failed, text)
                    .hint("the terminal of `mercury receive` says why; the machine's source may go on"));
            }
            (Some(_), _) if start.elapsed() > limit => return Err(not_followed(name, word, limit)),
            (Some(_), _) => thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Returns the error of a word that a monitor has read and not followed.
fn not_followed(name: &Name, word: Word, limit: Duration) -> Error {
    let within = format!("within {} s", limit.as_secs());
    match word {
        Word::Adopt => {
            let text =
                format!("{name} was not adopted {within}: its source is not silent, or its start hangs");
            Error::new(Exit::State, text).hint(format!(
                "ten seconds after a source's last word it counts as silent: try again then. `mercury guests \
                 list` says `running` when {name} runs"
            ))
        }
        Word::Discard => Error::new(Exit::State, format!("{name} was not discarded {within}"))
            .hint(format!("see the terminal of `mercury receive`, or end it: `mercury guests stop {name}`")),
    }
}

/// Passes the operator's word to a guest in doubt, and waits until the guest has read it.
fn answer(root: &Root, name: &Name, word: &'static str, limit: Duration) -> Result<Decided> {
    let guest = find_awake(root, name)?;
    if guest.status.phase != Phase::Running {
        let text = format!("{name} does not run yet: it is {}", phase(guest.status.phase));
        return Err(
            Error::new(Exit::State, text).hint("`mercury guests adopt` and `discard` decide on arrivals")
        );
    }
    let is_read = guest.answer(word, limit).map_err(|error| {
        Error::new(Exit::Failed, format!("cannot tell the monitor of {name}: {error}")).hint(format!(
            "a monitor of an earlier version takes no word: type `{word}` at `mercury guests console {name}`"
        ))
    })?;
    if !is_read {
        let text = format!("{name} asks for no word: it is in no doubt about a move. Nothing was done");
        return Err(Error::new(Exit::State, text).hint(format!(
            "if it stands still all the same, its Mercury is of an earlier version, or may not read ports \
             (lockdown): type `{word}` at its console, `mercury guests console {name}`"
        )));
    }
    if word == "abandon" && !ends(root, &guest)? {
        let text = format!("{name} has read the word, and has not ended within {} s", ENDS_WITHIN.as_secs());
        return Err(Error::new(Exit::Failed, text).hint(format!(
            "if it runs at its destination for certain, end it here: `mercury guests stop {name}`"
        )));
    }
    Ok(Decided { name: name.clone(), word })
}

/// Waits for the end of a guest. Returns false if it goes on for too long.
fn ends(root: &Root, guest: &Guest) -> Result<bool> {
    let start = Instant::now();
    while guest.lives().map_err(|error| unreadable(root, &error))? {
        if start.elapsed() > ENDS_WITHIN {
            return Ok(false);
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}

fn stop(root: &Root, name: &Name) -> Result<Stopped> {
    let guest = find(root, name)?;
    let failed = |reason: String| {
        let pid = guest.status.pid;
        Error::new(Exit::Failed, format!("cannot stop {name}: {reason}"))
            .hint(format!("`kill -KILL {pid}` ends its monitor whatever it does"))
    };
    signal(&guest).map_err(|error| failed(error.to_string()))?;
    if !ends(root, &guest)? {
        return Err(failed(format!("its monitor has not ended within {} s", ENDS_WITHIN.as_secs())));
    }
    Ok(Stopped { stopped: name.clone() })
}

/// Asks a guest's monitor to end. A process that has got the monitor's ID since then gets no signal.
fn signal(guest: &Guest) -> io::Result<()> {
    let gone = || io::Error::other("its state names no process");
    let pid = i32::try_from(guest.status.pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    let monitor = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(()),
        monitor => monitor?,
    };
    if guest.lives()? {
        pidfd_send_signal(monitor, Signal::TERM)?;
    }
    Ok(())
}

/// All guests of a user.
#[derive(Debug, Serialize)]
struct Guests {
    guests: Vec<Listed>,
}

#[derive(Debug, Serialize)]
struct Listed {
    #[serde(flatten)]
    status: Status,
    /// Memory of the host that the guest uses. `None`: it has no control group of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    used_bytes: Option<u64>,
}

impl Render for Guests {
    fn render(&self, text: &mut Text) {
        if self.guests.is_empty() {
            text.line("no guest runs: `mercury restore --as-guest IMAGE` starts one, and");
            text.line("`mercury receive --beside` waits for a machine that moves here");
            return;
        }
        let heading = ["guest", "state", "CPUs", "memory", "used", "kernel", "PID", "unit", "image"]
            .map(str::to_owned)
            .to_vec();
        let row = |Listed { status: one, used_bytes }: &Listed| {
            let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
            let used = used_bytes.map_or("-".into(), mib);
            let unit = one.unit.clone().unwrap_or("-".into());
            let image = one.image.as_ref().map_or("moved here".into(), |image| image.display().to_string());
            let (cpus, pid) = (one.cpus.to_string(), one.pid.to_string());
            let state = phase(one.phase).to_owned();
            // Its machine has said it.
            let kernel = plain(&one.kernel).replace('\n', "");
            vec![one.name.to_string(), state, cpus, mib(one.memory_bytes), used, kernel, pid, unit, image]
        };
        let rows: Vec<_> = [heading].into_iter().chain(self.guests.iter().map(row)).collect();
        text.table(&rows);
    }
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Loading => "loading",
        Phase::Arriving => "arriving",
        Phase::Complete => "complete",
        Phase::Running => "running",
    }
}

/// The operator's word about a machine that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Adopt,
    Discard,
}

impl Word {
    fn text(self) -> &'static str {
        match self {
            Self::Adopt => "adopt",
            Self::Discard => "discard",
        }
    }
}

/// The operator's word, which a monitor has followed, or a guest in doubt has read.
#[derive(Debug, Serialize)]
struct Decided {
    name: Name,
    word: &'static str,
}

impl Render for Decided {
    fn render(&self, text: &mut Text) {
        let name = &self.name;
        text.line(match self.word {
            "adopt" => format!("{name} runs here; `mercury guests console {name}` is its console"),
            "discard" => format!("{name} was discarded"),
            "resume" => format!("{name} goes on here"),
            _ => format!("{name} has ended here: it runs at its destination"),
        });
    }
}

/// A guest that was stopped.
#[derive(Debug, Serialize)]
struct Stopped {
    stopped: Name,
}

impl Render for Stopped {
    fn render(&self, text: &mut Text) {
        text.line(format!("stopped {}", self.stopped));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mercury_guests::Folder;
    use std::process::{Child, Command};

    fn held(root: &Root, pid: u32) -> Folder {
        let folder = root.claim(&"db".parse().unwrap()).unwrap().unwrap();
        let status = Status {
            name: "db".parse().unwrap(),
            pid,
            phase: Phase::Running,
            image: Some("/net/db".into()),
            identity: None,
            machine: "db1".into(),
            kernel: "6.1.0-56-amd64".into(),
            cpus: 2,
            memory_bytes: 1 << 30,
            since: 1,
            unit: Some("mercury-guest-db.scope".into()),
            group: None,
        };
        folder.write(&status).unwrap();
        folder
    }

    #[test]
    fn a_monitor_that_is_stopped_is_named() {
        let monitor = Holder { pid: 77, program: "mercury-guest".into(), is_stopped: true };
        let error = is_stopped(&"db".parse().unwrap(), &monitor);
        assert_eq!(error.exit, Exit::Busy);
        assert!(
            error.message.contains("of db answers nothing: process 77 (mercury-guest, stopped)"),
            "{error}"
        );
        assert!(error.hint.unwrap().contains("kill -CONT 77"));
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let _held = held(&root, 7);
        assert!(find_awake(&root, &"db".parse().unwrap()).is_ok());
    }

    #[test]
    fn the_monitor_gets_the_words_of_restore() {
        let passed = |line: &str| monitors_words(line.split(' ').map(OsString::from)).join(OsStr::new(" "));
        assert_eq!(passed("restore --as-guest --net passt x"), "run --net passt x");
        assert_eq!(passed("--json restore restore --as-guest"), "--json run restore");
        assert_eq!(passed("receive --beside --net tap=restore"), "receive --net tap=restore");
        assert_eq!(passed("restore --as-guest -- --as-guest"), "run -- --as-guest");
    }

    #[test]
    fn only_a_machine_that_arrives_is_decided_about() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let name: Name = "db".parse().unwrap();
        let decides = |word| decide(&root, &name, word, Duration::from_millis(200));
        assert_eq!(decides(Word::Adopt).unwrap_err().exit, Exit::State);
        let held = held(&root, 7);
        let refused = decides(Word::Adopt).unwrap_err();
        assert!(refused.message.contains("it is running"), "{refused}");
        let tell = |phase| {
            let status = root.find(&name).unwrap().unwrap().status;
            held.write(&Status { phase, ..status }).unwrap();
        };
        tell(Phase::Arriving);
        assert!(decides(Word::Adopt).unwrap_err().message.contains("not arrived whole"));
        tell(Phase::Complete);
        assert_eq!(decides(Word::Adopt).unwrap_err().exit, Exit::Failed, "no monitor listens");
    }

    /// A monitor may read the word and do nothing, because the source is not silent or the start fails: the
    /// command must not say that it is done.
    #[test]
    fn a_word_is_followed_or_the_command_fails() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let name: Name = "db".parse().unwrap();
        let decides = |word| decide(&root, &name, word, Duration::from_millis(300));
        let held = held(&root, 7);
        let status = Status { phase: Phase::Complete, ..root.find(&name).unwrap().unwrap().status };
        held.write(&status).unwrap();
        let pipe = held.decision().unwrap();
        let _monitors = std::fs::File::options().read(true).write(true).open(pipe).unwrap();
        for (word, says) in [(Word::Adopt, "its source is not silent"), (Word::Discard, "not discarded")] {
            let error = decides(word).unwrap_err();
            assert_eq!(error.exit, Exit::State);
            assert!(error.message.contains(says) && error.hint.is_some(), "{error}");
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                held.write(&Status { phase: Phase::Running, ..status.clone() }).unwrap();
            });
            assert_eq!(decides(Word::Adopt).unwrap().word, "adopt");
        });
        held.write(&status).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                held.write(&Status { phase: Phase::Running, ..status.clone() }).unwrap();
            });
            assert!(decides(Word::Discard).unwrap_err().message.contains("nothing was discarded"));
        });
        held.write(&status).unwrap();
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(held);
        });
        assert_eq!(decides(Word::Discard).unwrap().word, "discard");
        ends.join().unwrap();
    }

    #[test]
    fn only_a_guest_that_asks_gets_a_word() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let name: Name = "db".parse().unwrap();
        let says = |word| answer(&root, &name, word, Duration::from_millis(200));
        assert_eq!(says("resume").unwrap_err().exit, Exit::State);
        let held = held(&root, 7);
        assert_eq!(says("resume").unwrap_err().exit, Exit::Failed, "a monitor of an earlier version");
        let pipe = held.decision().unwrap();
        let error = says("resume").unwrap_err();
        assert!(error.message.contains("asks for no word") && error.hint.is_some(), "{error}");
        let mut monitors = std::fs::File::options().read(true).write(true).open(pipe).unwrap();
        let reads = thread::spawn(move || {
            let mut read = [0; 64];
            let count = io::Read::read(&mut monitors, &mut read).unwrap();
            String::from_utf8_lossy(&read[..count]).into_owned()
        });
        assert_eq!(answer(&root, &name, "resume", Duration::from_secs(10)).unwrap().word, "resume");
        assert!(reads.join().unwrap().starts_with("resume "));
        let status = Status { phase: Phase::Arriving, ..root.find(&name).unwrap().unwrap().status };
        held.write(&status).unwrap();
        assert!(says("abandon").unwrap_err().message.contains("it is arriving"));
    }

    /// The kernel's name comes from the machine's image, and perhaps from its source.
    #[test]
    fn names_of_kernels_reach_no_terminal_raw() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let held = held(&root, 7);
        let mut status = root.find(&"db".parse().unwrap()).unwrap().unwrap().status;
        status.kernel = "6.1\u{1b}]0;x\u{7}\n".into();
        held.write(&status).unwrap();
        let mut text = Text::new(false);
        list(&root).unwrap().render(&mut text);
        assert!(text.finish().contains(" 6.1]0;x "));
    }

    #[test]
    fn guests_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let text = |root: &Root| {
            let mut text = Text::new(false);
            list(root).unwrap().render(&mut text);
            text.finish()
        };
        assert!(text(&root).contains("no guest runs"));
        let _held = held(&root, 7);
        let shown = text(&root);
        let words: Vec<&str> = shown.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            words,
            [
                "db",
                "running",
                "2",
                "1024",
                "MiB",
                "-",
                "6.1.0-56-amd64",
                "7",
                "mercury-guest-db.scope",
                "/net/db"
            ]
        );
    }

    /// Ends the folder with the process that stands for its monitor.
    fn end_with(mut monitor: Child, folder: Folder) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            monitor.wait().unwrap();
            thread::sleep(Duration::from_millis(100));
            drop(folder);
        })
    }

    #[test]
    fn a_guest_that_is_stopped_has_ended_when_the_command_ends() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let name: Name = "db".parse().unwrap();
        assert_eq!(stop(&root, &name).unwrap_err().exit, Exit::State);
        let monitor = Command::new("sleep").arg("100").spawn().unwrap();
        let folder = held(&root, monitor.id());
        let ended = end_with(monitor, folder);
        assert_eq!(stop(&root, &name).unwrap().stopped, name);
        assert!(root.find(&name).unwrap().is_none());
        ended.join().unwrap();
    }

    #[test]
    fn a_process_with_the_id_of_a_monitor_that_has_gone_gets_no_signal() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let mut other = Command::new("sleep").arg("100").spawn().unwrap();
        let folder = held(&root, other.id());
        let guest = root.find(&"db".parse().unwrap()).unwrap().unwrap();
        drop(folder);
        signal(&guest).unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
