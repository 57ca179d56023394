//! The commands that talk to templates and machines.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write, stderr, stdin, stdout},
    os::{fd::AsFd, unix::net::UnixStream},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text},
};
use mercury_devices::terminal::Keys;
use mercury_guests::Name;
use mercury_hosted::{
    control::{refuse_if_there, save_image},
    fork::Image,
};
use mercury_hosted_options::{
    disco::{DiscoRunArgs, ForkArgs, ResizeArgs, SaveArgs},
    net::Forward,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
    termios::{OptionalActions, Termios, tcgetattr, tcsetattr},
};
use serde::Serialize;

use super::{
    asleep,
    folder::{CONSOLE_INPUT, CONSOLE_LOG, Folder, MachineStatus, SOCKET, TemplateStatus},
    map::{self, Files},
    protocol::{self, Answer, Request},
};
use crate::refused;

/// The time between two looks.
const MOMENT: Duration = Duration::from_millis(20);
/// The time in which a kernel usually has given the memory that it was asked for.
const BALLOON_PATIENCE: Duration = Duration::from_secs(2);
/// The time in which a machine that was told to end has ended.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn unreadable(folder: &Folder, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("cannot read {}: {error}", folder.path().display()))
        .hint("make sure that XDG_RUNTIME_DIR is a folder of yours")
}

/// Connects to a template.
pub(super) fn connect(name: &Name) -> Result<UnixStream> {
    let folder = Folder::templates();
    UnixStream::connect(folder.of(name).join(SOCKET)).map_err(|_| {
        Error::new(Exit::State, format!("there is no template {name}"))
            .hint("`mercury disco list` shows the templates, and `mercury disco template` makes one")
    })
}

/// Starts machines.
pub fn run(args: &DiscoRunArgs) -> Result<Outcome> {
    let template = connect(&args.template)?;
    let forward = texts(&args.forward);
    if args.detach || args.count.is_some() {
        let (count, numbered) = (args.count.unwrap_or(1), args.count.is_some());
        let request = Request::Detached { name: args.name.clone(), count, numbered, forward };
        protocol::send(&template, &request).map_err(|error| lost(&args.template, &error))?;
        return started(&template, &args.template).map(Outcome::Started);
    }
    let request = Request::Attached { name: args.name.clone(), forward };
    let (input, output, errors) = (stdin(), stdout(), stderr());
    let console = [input.as_fd(), output.as_fd(), errors.as_fd()];
    let _settings = Settings::keep();
    protocol::send_with(&template, &request, &console).map_err(|error| lost(&args.template, &error))?;
    let names = started(&template, &args.template)?.machines;
    match protocol::receive::<Answer>(&template) {
        Ok(Some((Answer::Ended { status: Some(status), .. }, _))) => Ok(Outcome::Ended(status)),
        Ok(Some((Answer::Ended { signal: Some(signal), .. }, _))) => {
            Err(Error::new(Exit::Failed, format!("the machine was ended by signal {signal}"))
                .hint("a person has ended it, or the host had no memory for it (`dmesg`)"))
        }
        _ => outlive(&names),
    }
}

/// Saves a machine that runs.
pub fn save(args: &SaveArgs) -> Result<Saved> {
    let machine = find(&args.machine)?;
    refuse_if_there(&args.file).map_err(refused)?;
    let template = connect(&machine.template)?;
    protocol::send(&template, &Request::Freeze { machine: machine.name })
        .map_err(|error| lost(&machine.template, &error))?;
    let (pause_us, files) = match protocol::receive(&template) {
        Ok(Some((Answer::Frozen { pause_us }, files))) => (pause_us, files),
        Ok(Some((Answer::Refused { message, hint, .. }, _))) => {
            let hint = hint.unwrap_or_else(|| "`mercury disco list` shows what runs".to_owned());
            return Err(Error::new(Exit::Failed, message).hint(hint));
        }
        Ok(_) => return Err(lost(&machine.template, &io::ErrorKind::UnexpectedEof.into())),
        Err(error) => return Err(lost(&machine.template, &error)),
    };
    let image = Image::from_files(files).map_err(refused)?;
    let bytes = save_image(&image, &args.file).map_err(refused)?;
    Ok(Saved { machine: args.machine.clone(), file: args.file.clone(), bytes, pause_us })
}

/// Sends a template a request. Returns its answer.
fn ask(template: &Name, request: &Request) -> Result<Answer> {
    let stream = connect(template)?;
    protocol::send(&stream, request).map_err(|error| lost(template, &error))?;
    match protocol::receive(&stream) {
        Ok(Some((Answer::Refused { message, hint, .. }, _))) => {
            let hint = hint.unwrap_or_else(|| "`mercury disco list` shows what runs".to_owned());
            Err(Error::new(Exit::Failed, message).hint(hint))
        }
        Ok(Some((answer, _))) => Ok(answer),
        Ok(None) => Err(lost(template, &io::ErrorKind::UnexpectedEof.into())),
        Err(error) => Err(lost(template, &error)),
    }
}

fn no_answer(template: &Name) -> Error {
    lost(template, &io::ErrorKind::InvalidData.into())
}

/// Lets a machine have less memory, or more.
pub fn resize(args: &ResizeArgs) -> Result<Resized> {
    let machine = find(&args.machine)?;
    let bytes = args.memory.saturating_mul(1 << 20);
    let request = Request::Resize { machine: machine.name.clone(), bytes };
    let Answer::Resized { balloon_bytes, zero_bytes } = ask(&machine.template, &request)? else {
        return Err(no_answer(&machine.template));
    };
    // The machine's kernel needs a moment. One that has nothing to give goes on trying.
    let start = Instant::now();
    let given = || map::balloon(machine.pid).map_or(0, |[_, actual]| actual);
    while given() != balloon_bytes && start.elapsed() < BALLOON_PATIENCE {
        thread::sleep(MOMENT);
    }
    Ok(Resized { machine: machine.name, bytes, balloon_bytes, given_bytes: given(), zero_bytes })
}

/// A machine whose memory was changed.
#[derive(Debug, Serialize)]
pub struct Resized {
    machine: Name,
    /// The memory that it is to have.
    bytes: u64,
    /// The memory that its kernel was asked for, and what it has given.
    balloon_bytes: u64,
    given_bytes: u64,
    /// Pages of zeros that went to the host.
    zero_bytes: u64,
}

impl Render for Resized {
    fn render(&self, text: &mut Text) {
        let mib = |bytes: u64| bytes >> 20;
        let (wanted, given) = (mib(self.balloon_bytes), mib(self.given_bytes));
        text.line(format!("{} is to have {} MiB; it has given {given} MiB", self.machine, mib(self.bytes)));
        if self.given_bytes < self.balloon_bytes {
            text.line(format!(
                "its kernel was asked for {wanted} MiB, and gives more when it can; one without \
                 CONFIG_VIRTIO_BALLOON never does"
            ));
        }
    }
}

/// The time in which all processes of a machine have ended, unless somebody wakes it meanwhile.
const DYING: Duration = Duration::from_secs(5);

/// Puts a machine to sleep.
pub fn sleep(name: &Name) -> Result<Asleep> {
    let machine = find(name)?;
    let request = Request::Sleep { machine: name.clone() };
    match ask(&machine.template, &request)? {
        Answer::Asleep { file } => {
            // Its last processes end after the first one. Until then it would still be listed as awake.
            let (begun, folder) = (Instant::now(), Folder::machines());
            while begun.elapsed() < DYING && folder.lives(name).unwrap_or(false) {
                thread::sleep(MOMENT);
            }
            Ok(Asleep { machine: name.clone(), file })
        }
        _ => Err(no_answer(&machine.template)),
    }
}

/// A machine that was put to sleep.
#[derive(Debug, Serialize)]
pub struct Asleep {
    machine: Name,
    file: PathBuf,
}

impl Render for Asleep {
    fn render(&self, text: &mut Text) {
        let name = &self.machine;
        text.line(format!("{name} is asleep, in {}", self.file.display()));
        text.line(format!("a key on its console or `mercury disco wake {name}` lets it go on"));
    }
}

/// Lets a machine go on that is asleep.
pub fn wake(name: &Name) -> Result<Started> {
    let template = match asleep(name)? {
        Some(asleep) => asleep.template,
        // It may be falling asleep, which its template knows.
        None => find(name)?.template,
    };
    if !Folder::templates().lives(&template).unwrap_or(false) && asleep(name)?.is_none() {
        return Err(Error::new(Exit::State, format!("{name} is awake"))
            .hint("`mercury disco list` shows the machines"));
    }
    match ask(&template, &Request::Wake { machine: name.clone() })? {
        Answer::Started { machines, pause_us } => Ok(Started { machines, pause_us }),
        _ => Err(no_answer(&template)),
    }
}

/// Returns a machine if it is asleep.
fn asleep(name: &Name) -> Result<Option<asleep::Asleep>> {
    let folder = Folder::machines();
    folder.asleep(name).map_err(|error| unreadable(&folder, &error))
}

/// Removes a machine that is asleep, whether its template lives or not.
fn discard(asleep: &asleep::Asleep) -> Result<()> {
    if Folder::templates().lives(&asleep.template).unwrap_or(false) {
        return ask(&asleep.template, &Request::Discard { machine: asleep.name.clone() }).map(drop);
    }
    let folder = Folder::machines();
    let lock = folder.claim_asleep(&asleep.name).map_err(|error| unreadable(&folder, &error))?;
    let is_it = folder.file_of(&asleep.name).ok().flatten().is_some_and(|one| one.life == asleep.life);
    if lock.is_none() || !is_it {
        return Err(Error::new(Exit::State, format!("{} is not asleep any more", asleep.name))
            .hint("`mercury disco list` shows the machines"));
    }
    folder.forget_file(asleep);
    folder.remove(&asleep.name);
    Ok(())
}

/// A machine that was saved, and goes on.
#[derive(Debug, Serialize)]
pub struct Saved {
    machine: Name,
    file: PathBuf,
    bytes: u64,
    /// The time in which the machine stood still, in microseconds.
    pause_us: u64,
}

impl Render for Saved {
    fn render(&self, text: &mut Text) {
        let (mib, pause) = (self.bytes as f64 / f64::from(1 << 20), self.pause_us as f64 / 1e3);
        text.line(format!(
            "{} is saved in {} ({mib:.1} MiB), and goes on",
            self.machine,
            self.file.display()
        ));
        text.line(format!("it stood still for {pause:.1} ms"));
    }
}

/// Returns ports as a template reads them.
fn texts(forward: &[Forward]) -> Vec<String> {
    let text = |one: &Forward| format!("{}{}", if one.is_udp() { "udp:" } else { "" }, one.ports());
    forward.iter().map(text).collect()
}

/// Starts copies of a machine that runs.
pub fn fork(args: &ForkArgs) -> Result<Started> {
    let machine = find(&args.machine)?;
    let template = connect(&machine.template)?;
    let (count, numbered) = (args.count.unwrap_or(1), args.count.is_some());
    let (name, forward) = (args.name.clone(), texts(&args.forward));
    let request = Request::Fork { machine: machine.name, name, count, numbered, forward };
    protocol::send(&template, &request).map_err(|error| lost(&machine.template, &error))?;
    started(&template, &machine.template)
}

/// Waits for the end of a machine whose template has ended.
fn outlive(names: &[Name]) -> Result<Outcome> {
    let folder = Folder::machines();
    for name in names {
        while folder.lives(name).map_err(|error| unreadable(&folder, &error))? {
            thread::sleep(MOMENT);
        }
    }
    Err(Error::new(Exit::Failed, "the template has ended before the machine, whose exit status is lost")
        .hint("`mercury disco template` makes the template again"))
}

fn lost(template: &Name, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("the template {template} does not answer: {error}"))
        .hint("`mercury disco list` shows if it lives")
}

/// Waits for the beginning of machines.
fn started(template: &UnixStream, name: &Name) -> Result<Started> {
    match protocol::receive(template) {
        Ok(Some((Answer::Started { machines, pause_us }, _))) => Ok(Started { machines, pause_us }),
        Ok(Some((Answer::Refused { message, hint, machines }, _))) => {
            let before = match machines.len() {
                0 => String::new(),
                some => format!("{some} machines run, and the next one does not: "),
            };
            let hint = hint.unwrap_or_else(|| "`mercury disco list` shows what runs".to_owned());
            Err(Error::new(Exit::Failed, before + &message).hint(hint))
        }
        Ok(_) => Err(lost(name, &io::ErrorKind::UnexpectedEof.into())),
        Err(error) => Err(lost(name, &error)),
    }
}

/// The result of [`run`].
#[derive(Debug)]
pub enum Outcome {
    /// Machines run in the background.
    Started(Started),
    /// The machine on this terminal has ended with this status.
    Ended(i32),
}

/// Machines that have begun.
#[derive(Debug, Serialize)]
pub struct Started {
    machines: Vec<Name>,
    /// The time in which a machine that was copied stood still, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_us: Option<u64>,
}

impl Render for Started {
    fn render(&self, text: &mut Text) {
        match &self.machines[..] {
            [one] => text.line(format!("{one} runs; `mercury disco console {one}` shows its console")),
            [first, .., last] => text.line(format!(
                "{} machines run, {first} to {last}; `mercury disco map` shows their memory",
                self.machines.len()
            )),
            [] => {}
        }
        if let Some(pause) = self.pause_us {
            text.line(format!("the machine that was copied stood still for {:.1} ms", pause as f64 / 1e3));
        }
    }
}

/// The terminal's settings, which are put back when this value is dropped. A machine that was killed has not
/// put them back.
struct Settings(Option<Termios>);

impl Settings {
    fn keep() -> Self {
        Self(tcgetattr(stdin()).ok())
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        if let Some(settings) = &self.0 {
            let _ = tcsetattr(stdin(), OptionalActions::Now, settings);
        }
    }
}

/// Templates and machines.
#[derive(Debug, Serialize)]
pub struct Listed {
    templates: Vec<TemplateStatus>,
    machines: Vec<ListedAny>,
}

#[derive(Debug, Serialize)]
struct ListedMachine {
    #[serde(flatten)]
    status: MachineStatus,
    state: &'static str,
    /// Memory of the guest that is the machine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    own_bytes: Option<u64>,
    /// Memory that its kernel was asked for by the balloon, and what it has given.
    #[serde(skip_serializing_if = "Option::is_none")]
    balloon: Option<Balloon>,
}

#[derive(Debug, Serialize)]
struct Balloon {
    wanted_bytes: u64,
    given_bytes: u64,
}

/// A machine that is in a file.
#[derive(Debug, Serialize)]
struct ListedSleeper {
    name: Name,
    template: Name,
    state: &'static str,
    file: PathBuf,
    since: u64,
}

/// A machine, of either kind.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum ListedAny {
    Awake(ListedMachine),
    Asleep(ListedSleeper),
}

impl ListedAny {
    fn template(&self) -> &Name {
        match self {
            Self::Awake(machine) => &machine.status.template,
            Self::Asleep(sleeper) => &sleeper.template,
        }
    }
}

/// Reads the machines that run and those that are asleep. A machine that falls asleep or wakes meanwhile is
/// in one of both lists.
fn all_machines(folder: &Folder) -> io::Result<(Vec<MachineStatus>, Vec<asleep::Asleep>)> {
    let before: Vec<MachineStatus> = folder.living()?;
    let mut sleepers = folder.all_asleep()?;
    let mut living: Vec<MachineStatus> = folder.living()?;
    sleepers.retain(|asleep| living.iter().all(|one| one.name != asleep.name));
    let is_listed = |one: &MachineStatus| {
        living.iter().any(|other| other.name == one.name)
            || sleepers.iter().any(|other| other.name == one.name)
    };
    let missed: Vec<MachineStatus> = before.into_iter().filter(|one| !is_listed(one)).collect();
    living.extend(missed);
    Ok((living, sleepers))
}

/// Lists templates and machines.
pub fn list() -> Result<Listed> {
    let (templates, machines) = (Folder::templates(), Folder::machines());
    let (living, sleepers) = all_machines(&machines).map_err(|error| unreadable(&machines, &error))?;
    let templates: Vec<TemplateStatus> =
        templates.living().map_err(|error| unreadable(&templates, &error))?;
    let shared = map::shared(&templates, &living);
    let of = |status: MachineStatus| {
        let own_bytes = Files::of(status.pid).map(|files| files.without(&shared).bytes());
        let balloon =
            map::balloon(status.pid).map(|[wanted_bytes, given_bytes]| Balloon { wanted_bytes, given_bytes });
        ListedAny::Awake(ListedMachine { status, state: "runs", own_bytes, balloon })
    };
    let asleep = sleepers.into_iter().map(|asleep::Asleep { name, template, file, since, .. }| {
        ListedAny::Asleep(ListedSleeper { name, template, state: "asleep", file, since })
    });
    Ok(Listed { templates, machines: living.into_iter().map(of).chain(asleep).collect() })
}

impl Render for Listed {
    fn render(&self, text: &mut Text) {
        if self.templates.is_empty() && self.machines.is_empty() {
            text.line("there is no template: `mercury disco template` makes one from a saved machine");
            return;
        }
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let heading = ["template", "machines", "memory", "PID", "saved machine"].map(str::to_owned).to_vec();
        let row = |one: &TemplateStatus| {
            let count = self.machines.iter().filter(|machine| *machine.template() == one.name).count();
            let (memory, pid) = (mib(one.memory_bytes), one.pid.to_string());
            vec![one.name.to_string(), count.to_string(), memory, pid, one.file.display().to_string()]
        };
        text.table(&[heading].into_iter().chain(self.templates.iter().map(row)).collect::<Vec<_>>());
        if self.machines.is_empty() {
            return;
        }
        text.line("");
        let heading = ["machine", "template", "state", "own memory", "balloon", "PID", "console"];
        let row = |one: &ListedAny| match one {
            ListedAny::Asleep(ListedSleeper { name, template, state, .. }) => {
                let row = [name.as_str(), template.as_str(), state, "-", "-", "-", "mercury disco console"];
                row.map(str::to_owned).to_vec()
            }
            ListedAny::Awake(ListedMachine { status, state, own_bytes, balloon }) => {
                let console = if status.is_detached { "mercury disco console" } else { "a terminal" };
                let own = own_bytes.map_or("-".to_owned(), mib);
                let balloon = balloon.as_ref().map_or("-".to_owned(), |one| mib(one.given_bytes));
                let (name, template, state) = (status.name.to_string(), status.template.to_string(), *state);
                vec![name, template, state.into(), own, balloon, status.pid.to_string(), console.to_owned()]
            }
        };
        let heading = heading.map(str::to_owned).to_vec();
        text.table(&[heading].into_iter().chain(self.machines.iter().map(row)).collect::<Vec<_>>());
    }
}

fn find(name: &Name) -> Result<MachineStatus> {
    let folder = Folder::machines();
    let found = folder.find(name).map_err(|error| unreadable(&folder, &error))?;
    if found.is_none() && asleep(name)?.is_some() {
        return Err(Error::new(Exit::State, format!("{name} is asleep"))
            .hint(format!("`mercury disco wake {name}` lets it go on")));
    }
    found.ok_or_else(|| {
        Error::new(Exit::State, format!("no machine {name} runs"))
            .hint("`mercury disco list` shows the machines")
    })
}

/// Ends a machine.
pub fn stop(name: &Name) -> Result<Stopped> {
    if let Some(asleep) = asleep(name)? {
        return discard(&asleep).map(|()| Stopped { stopped: vec![name.clone()] });
    }
    let machine = find(name)?;
    end(machine.pid, || Folder::machines().lives(name).unwrap_or(false), &format!("the machine {name}"))?;
    // It may have fallen asleep as it was told to end.
    if let Some(asleep) = asleep(name)? {
        discard(&asleep)?;
    }
    Folder::machines().remove_ended(name);
    Ok(Stopped { stopped: vec![name.clone()] })
}

/// Ends a template, after its machines.
pub fn remove(name: &Name) -> Result<Stopped> {
    let folder = Folder::machines();
    connect(name)?;
    let mut stopped = Vec::new();
    let machines: Vec<MachineStatus> = folder.living().map_err(|error| unreadable(&folder, &error))?;
    for machine in machines.iter().filter(|machine| machine.template == *name) {
        stop(&machine.name)?;
        stopped.push(machine.name.clone());
    }
    let sleepers = folder.all_asleep().map_err(|error| unreadable(&folder, &error))?;
    for asleep in sleepers.iter().filter(|asleep| asleep.template == *name) {
        discard(asleep)?;
        stopped.push(asleep.name.clone());
    }
    let mut template = connect(name)?;
    protocol::send(&template, &Request::End).map_err(|error| lost(name, &error))?;
    protocol::await_end(&mut template);
    stopped.push(name.clone());
    Ok(Stopped { stopped })
}

/// Asks a process to end, and waits until it has. A process that has got its number since gets no signal.
fn end(pid: u32, lives: impl Fn() -> bool, what: &str) -> Result<()> {
    let failed = |why: String| {
        Error::new(Exit::Failed, format!("cannot end {what}: {why}"))
            .hint(format!("`kill -KILL {pid}` ends it whatever it does"))
    };
    let process =
        i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| failed("no number".into()))?;
    let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else { return Ok(()) };
    if !lives() {
        return Ok(());
    }
    pidfd_send_signal(&process, Signal::TERM).map_err(|error| failed(error.to_string()))?;
    // One that is stopped would end only after it was let go on.
    let _ = pidfd_send_signal(&process, Signal::CONT);
    let start = Instant::now();
    while lives() {
        if start.elapsed() > PATIENCE {
            return Err(failed(format!("it has not ended within {} s", PATIENCE.as_secs())));
        }
        thread::sleep(MOMENT);
    }
    Ok(())
}

/// Machines and templates that have ended.
#[derive(Debug, Serialize)]
pub struct Stopped {
    stopped: Vec<Name>,
}

impl Render for Stopped {
    fn render(&self, text: &mut Text) {
        self.stopped.iter().for_each(|name| text.line(format!("ended {name}")));
    }
}

/// Joins this terminal to the console of a machine in the background.
pub fn console(name: &Name) -> Result<Exit> {
    let asleep = asleep(name)?;
    if let Some(asleep) = &asleep {
        // Its template wakes it at the first key.
        connect(&asleep.template)?;
        eprintln!("{name} is asleep: a key wakes it");
    }
    if asleep.is_none() && !find(name)?.is_detached {
        return Err(Error::new(Exit::State, format!("{name} has its console on another terminal"))
            .hint("`mercury disco run --detach` starts a machine in the background"));
    }
    let folder = Folder::machines().of(name);
    let failed = |error: io::Error| {
        Error::new(Exit::Failed, format!("cannot join the console: {error}"))
            .hint("`mercury disco list` shows if the machine still runs")
    };
    let log = File::open(folder.join(CONSOLE_LOG)).map_err(failed)?;
    let pipe = OpenOptions::new().write(true).open(folder.join(CONSOLE_INPUT)).map_err(failed)?;
    eprintln!("the console of {name}; Ctrl-A x leaves it");
    let _settings = Settings::keep();
    if let Ok(mut settings) = tcgetattr(stdin()) {
        settings.make_raw();
        let _ = tcsetattr(stdin(), OptionalActions::Now, &settings);
    }
    let is_left = visit(name, log, pipe).map_err(failed)?;
    eprintln!("\r\n{name} {}\r", if is_left { "goes on" } else { "has ended" });
    Ok(Exit::Done)
}

/// Passes bytes to and fro. Returns true if the user has left, and false if the machine has ended.
fn visit(name: &Name, mut log: File, mut pipe: File) -> io::Result<bool> {
    const SHOWN: u64 = 4096;
    let length = log.metadata()?.len();
    log.seek(SeekFrom::Start(length.saturating_sub(SHOWN)))?;
    let (mut piece, mut keys) = ([0; 4096], Keys::default());
    loop {
        let folder = Folder::machines();
        let lives = folder.lives(name)? || folder.asleep(name)?.is_some();
        // The machine may have removed the older part.
        let length = log.metadata()?.len();
        if log.stream_position()? > length {
            log.seek(SeekFrom::Start(length.saturating_sub(SHOWN)))?;
        }
        let count = log.read(&mut piece)?;
        stdout().write_all(&piece[..count])?;
        stdout().flush()?;
        if count > 0 {
            continue;
        }
        if !lives {
            return Ok(false);
        }
        let input = stdin();
        let mut ready = [PollFd::new(&input, PollFlags::IN)];
        let moment = Timespec { tv_sec: 0, tv_nsec: MOMENT.as_nanos() as i64 };
        if rustix::io::retry_on_intr(|| poll(&mut ready, Some(&moment)))? == 0 {
            continue;
        }
        let count = rustix::io::retry_on_intr(|| rustix::io::read(&input, &mut piece))?;
        let (typed, leaves) = keys.read(&piece[..count]);
        pipe.write_all(&typed)?;
        if leaves || count == 0 {
            return Ok(true);
        }
    }
}
