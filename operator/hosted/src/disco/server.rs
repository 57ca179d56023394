//! The process of a template: starts machines on request, and tells how they have ended.
//!
//! It has one thread, because machines begin as copies of it. Machines are its children, but do not depend on
//! it: they go on if it ends. It also watches the host's memory ([`super::keeper`]).

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{
            fs::OpenOptionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::Format,
    say::fail,
};
use mercury_guests::Name;
use mercury_hosted::{
    asleep::new_life,
    fork::{Forked, Image, Source},
    run::{Identity, Options},
    template::{Origin, Started, Template},
};
use mercury_hosted_options::net::Forward;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{CWD, FileType, Mode, mknodat},
    io::Errno,
    process::{
        Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process, pidfd_open,
        setrlimit, setsid, waitpid,
    },
    stdio::{dup2_stderr, dup2_stdin, dup2_stdout},
};

use super::{
    asleep::Asleep,
    asleep::host_start,
    folder::{CONSOLE_INPUT, CONSOLE_LOG, Folder, ImageStatus, MachineStatus, SOCKET, TemplateStatus},
    keeper::{Keeper, Kept},
    protocol::{self, Answer, CONSOLE, Request},
};
use crate::refused;

/// The time in which a client must have sent its request.
const PATIENCE: Duration = Duration::from_secs(1);
/// The time between two looks if the images of disks in memory are still as they were.
const LOOK: Duration = Duration::from_millis(500);

/// A template that takes requests.
pub struct Server {
    pub(super) template: Template,
    pub(super) name: Name,
    listener: UnixListener,
    pub(super) machines: Vec<Machine>,
    pub(super) memory_bytes: u64,
    pub(super) keeper: Keeper,
    /// The number of the machine that was started last.
    last_number: u32,
    /// The lock of the template's folder.
    _lock: File,
}

/// A machine that this process has started.
pub(super) struct Machine {
    pub(super) name: Name,
    /// Its number among the template's machines.
    pub(super) number: u32,
    pub(super) pid: Pid,
    /// Becomes readable at the end of the machine's first process.
    pub(super) end: OwnedFd,
    /// True if the machine runs in the background.
    pub(super) is_detached: bool,
    /// The client on whose terminal the machine has its console.
    client: Option<UnixStream>,
    /// True until the client is told that the machine has begun.
    is_awaited: bool,
    /// The way to the machine, by which it can be forked.
    pub(super) source: Source,
    /// The ports that lead to it.
    pub(super) forward: Vec<String>,
    pub(super) kept: Kept,
}

/// What has happened.
#[derive(Default)]
struct Ready {
    /// True if a client has connected.
    is_asked: bool,
    /// The indices of machines that have ended.
    ended: Vec<usize>,
    /// The indices of machines whose client is gone.
    clients: Vec<usize>,
    /// True if the keeper's process has ended.
    is_job_done: bool,
}

/// The things from which a machine begins.
pub(super) struct Beginning<'a> {
    pub(super) image: Arc<Image>,
    /// The machine's own file, and where it was asleep.
    pub(super) woken: Option<(OwnedFd, Asleep)>,
    pub(super) forward: &'a [String],
    pub(super) is_attached: bool,
}

/// Returns the seconds since 1970.
pub(super) fn seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub(super) fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    Error::new(Exit::Failed, format!("cannot {what}: {error}"))
        .hint("see that the user's folder (XDG_RUNTIME_DIR) has room, and that the host has memory")
}

impl Server {
    /// Opens the template's socket, and says that the template is ready.
    pub fn new(
        template: Template,
        (name, lock): (Name, File),
        file: PathBuf,
        memory_bytes: u64,
        sleep_in: Option<PathBuf>,
    ) -> Result<Self> {
        let folder = Folder::templates();
        let listener =
            UnixListener::bind(folder.of(&name).join(SOCKET)).map_err(|error| failed("listen", error))?;
        let lost_machines = match &sleep_in {
            Some(sleep_in) => Folder::machines()
                .remove_lost_files(sleep_in, host_start())
                .map_err(|error| failed("look into the folder for sleep", error))?,
            None => 0,
        };
        let status = TemplateStatus {
            name: name.clone(),
            pid: std::process::id(),
            file,
            memory_bytes,
            images: images(&template),
            since: seconds(),
            lost_machines,
        };
        folder.write(&name, &status).map_err(|error| failed("write the template's state", error))?;
        raise_limit();
        let keeper = Keeper::new(&name, sleep_in)?;
        let last_number =
            Folder::machines().largest_number(&name).map_err(|error| failed("find machines", error))?;
        let machines = Vec::new();
        Ok(Self { template, name, listener, machines, memory_bytes, keeper, last_number, _lock: lock })
    }

    /// Serves until a client asks for the end. The machines go on.
    pub fn serve(mut self) -> Result<Exit> {
        loop {
            let ready = self.wait().map_err(|error| failed("wait for requests", error))?;
            // A program that wants to write waits until this process has ended. Machines end by themselves.
            if let Err(error) = self.template.check_disks() {
                Folder::templates().remove(&self.name);
                return Err(refused(error));
            }
            for index in ready.clients {
                // The client is gone, and its terminal with it.
                let _ = kill_process(self.machines[index].pid, Signal::HUP);
                self.machines[index].client = None;
            }
            for index in ready.ended.into_iter().rev() {
                let machine = self.machines.remove(index);
                self.bury(machine);
            }
            if ready.is_job_done {
                self.finish_job();
            }
            if ready.is_asked
                && let Ok((client, _)) = self.listener.accept()
                && self.answer(client)
            {
                self.end_job();
                Folder::templates().remove(&self.name);
                return Ok(Exit::Done);
            }
            self.keep();
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        let mut all = vec![PollFd::new(&self.listener, PollFlags::IN)];
        all.extend(self.machines.iter().map(|machine| PollFd::new(&machine.end, PollFlags::IN)));
        let clients: Vec<(usize, &UnixStream)> = self
            .machines
            .iter()
            .enumerate()
            .filter_map(|(index, machine)| Some((index, machine.client.as_ref()?)))
            .collect();
        all.extend(clients.iter().map(|(_, client)| PollFd::new(*client, PollFlags::IN)));
        let more = all.len();
        all.extend(self.keeper.watched().map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)));
        let look = self.template.has_disks().then_some(LOOK);
        let timeout = [self.patience(), look].into_iter().flatten().min().map(|time| Timespec {
            tv_sec: time.as_secs().cast_signed(),
            tv_nsec: time.subsec_nanos().into(),
        });
        match poll(&mut all, timeout.as_ref()) {
            Err(Errno::INTR) => return Ok(Ready::default()),
            result => result?,
        };
        let is_ready = |at: usize| !all[at].revents().is_empty();
        let count = self.machines.len();
        Ok(Ready {
            is_asked: is_ready(0),
            ended: (0..count).filter(|index| is_ready(1 + index)).collect(),
            clients: (0..clients.len())
                .filter(|at| is_ready(1 + count + at))
                .map(|at| clients[at].0)
                .collect(),
            is_job_done: self.keeper.has_job() && is_ready(more),
        })
    }

    /// Tells a machine's client how the machine has ended, and removes what it leaves.
    fn bury(&mut self, mut machine: Machine) {
        let status =
            waitpid(Some(machine.pid), WaitOptions::empty()).ok().flatten().map(|(_, status)| status);
        let ended = Answer::Ended {
            status: status.and_then(|status| status.exit_status()),
            signal: status.and_then(|status| status.terminating_signal()),
        };
        if self.has_fallen_asleep(&mut machine) {
            return;
        }
        match machine.client {
            Some(client) => {
                Folder::machines().remove_ended(&machine.name);
                // The client may be gone.
                let _ = protocol::send(&client, &ended);
            }
            None => {
                let _ = note_end(&machine.name, &ended);
            }
        }
    }

    /// Answers a request. Returns true if it asks for the end.
    fn answer(&mut self, client: UnixStream) -> bool {
        let is_set = client.set_read_timeout(Some(PATIENCE)).is_ok()
            && client.set_write_timeout(Some(PATIENCE)).is_ok();
        let Some((request, console)) = protocol::receive(&client).ok().flatten().filter(|_| is_set) else {
            return false;
        };
        match &request {
            Request::Freeze { machine } => {
                self.give(&client, machine);
                return false;
            }
            Request::Sleep { machine } => {
                self.sleep_for(client, machine);
                return false;
            }
            Request::Wake { machine } => {
                self.wake_for(client, machine);
                return false;
            }
            Request::Resize { machine, bytes } => {
                reply(&client, self.resize(machine, *bytes));
                return false;
            }
            Request::Discard { machine } => {
                reply(&client, self.discard(machine));
                return false;
            }
            _ => {}
        }
        let (mut machines, mut pause_us) = (Vec::new(), None);
        let started = match request {
            Request::End => return true,
            Request::Freeze { .. }
            | Request::Sleep { .. }
            | Request::Wake { .. }
            | Request::Resize { .. }
            | Request::Discard { .. } => Ok(()),
            Request::Attached { name, forward } => {
                self.start_attached(name, &forward, console, &mut machines)
            }
            Request::Detached { name, count, numbered, forward } => {
                let names = (name.as_ref(), numbered || name.is_none());
                self.start_detached(None, names, count, &forward, &mut machines)
            }
            Request::Fork { machine, name, count, numbered, forward } => {
                let names = (name.as_ref().unwrap_or(&machine), numbered || name.is_none());
                self.freeze(&machine).and_then(|Forked { image, pause }| {
                    pause_us = u64::try_from(pause.as_micros()).ok();
                    self.start_detached(
                        Some(&image),
                        (Some(names.0), names.1),
                        count,
                        &forward,
                        &mut machines,
                    )
                })
            }
        };
        let answer = match started {
            Ok(()) => Answer::Started { machines, pause_us },
            Err(error) => Answer::Refused { message: error.message, hint: error.hint, machines },
        };
        let is_told = protocol::send(&client, &answer).is_ok();
        if let Some(machine) = self.machines.last_mut().filter(|machine| machine.is_awaited && is_told) {
            (machine.client, machine.is_awaited) = (Some(client), false);
        }
        false
    }

    fn start_attached(
        &mut self,
        name: Option<Name>,
        forward: &[String],
        console: Vec<OwnedFd>,
        started: &mut Vec<Name>,
    ) -> Result<()> {
        let console: [OwnedFd; CONSOLE] = console.try_into().map_err(|_| {
            Error::new(Exit::Failed, "the request came without a console").hint("report this bug")
        })?;
        let (name, lock) = self.claim(name.as_ref(), name.is_none())?;
        let image = Arc::clone(self.template.image());
        self.start((name, lock), console, Beginning { image, woken: None, forward, is_attached: true })?;
        started.extend(self.machines.last().map(|machine| machine.name.clone()));
        Ok(())
    }

    /// Takes a machine as it is now.
    fn freeze(&mut self, machine: &Name) -> Result<Forked> {
        let index = self.find_at_work(machine)?;
        self.machines[index].source.freeze().map_err(refused)
    }

    /// Returns the index of a machine that is not on its way to sleep.
    pub(super) fn find_at_work(&self, machine: &Name) -> Result<usize> {
        let index = self.machines.iter().position(|one| one.name == *machine).ok_or_else(|| {
            Error::new(Exit::State, format!("the machine {machine} is not this template's"))
                .hint("a machine whose template has ended cannot be forked, resized or put to sleep")
        })?;
        if self.falls_asleep(&self.machines[index]) {
            return Err(Error::new(Exit::State, format!("{machine} is falling asleep"))
                .hint(format!("`mercury disco wake {machine}` lets it go on")));
        }
        Ok(index)
    }

    /// Gives a client a machine as it is now.
    fn give(&mut self, client: &UnixStream, machine: &Name) {
        let given = self.freeze(machine).and_then(|Forked { image, pause }| {
            let places = image.places_file().map_err(refused)?;
            let answer = Answer::Frozen { pause_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX) };
            let first = [image.state_file().as_fd(), places.as_fd()].into_iter();
            let files: Vec<_> = first.chain(image.files().iter().map(|file| file.as_fd())).collect();
            protocol::send_with(client, &answer, &files).map_err(|error| failed("answer", error))
        });
        let sent = given.or_else(|Error { message, hint, .. }| {
            protocol::send(client, &Answer::Refused { message, hint, machines: Vec::new() })
        });
        // The client may be gone.
        let _ = sent;
    }

    /// Starts machines in the background: copies of the saved machine, or of this one. `names` has the name,
    /// or the beginning of names that end with a number.
    fn start_detached(
        &mut self,
        image: Option<&Arc<Image>>,
        names: (Option<&Name>, bool),
        count: u32,
        forward: &[String],
        started: &mut Vec<Name>,
    ) -> Result<()> {
        for _ in 0..count {
            let (name, lock) = self.claim(names.0, names.1)?;
            let console = open_console(&name).map_err(|error| failed("make the machine's console", error))?;
            let image = Arc::clone(image.unwrap_or_else(|| self.template.image()));
            let beginning = Beginning { image, woken: None, forward, is_attached: false };
            self.start((name.clone(), lock), console, beginning)?;
            started.push(name);
        }
        Ok(())
    }

    /// Takes a name: this one, or one with a number.
    fn claim(&self, name: Option<&Name>, is_numbered: bool) -> Result<(Name, File)> {
        const MOST: u32 = 100_000;
        let folder = Folder::machines();
        let wrong = |error| failed("make the machine's folder", error);
        // The file of one that was killed while it was written is all that is left of it.
        let is_written = |name: &Name| self.keeper.is_busy_with(name);
        let stem = name.unwrap_or(&self.name);
        if !is_numbered {
            if is_written(stem) {
                return Err(Error::new(
                    Exit::Busy,
                    format!("{stem} is being written to a file, or read from it"),
                )
                .hint("try again in a moment, or choose another name with --name"));
            }
            let lock = folder.claim(stem).map_err(wrong)?.ok_or_else(|| {
                Error::new(Exit::State, format!("a machine has the name {stem} already"))
                    .hint("choose another name with --name, or `mercury disco stop` that machine")
            })?;
            return Ok((stem.clone(), lock));
        }
        for number in 1..MOST {
            let name: Name = format!("{stem}-{number}").parse().map_err(|error| {
                Error::new(Exit::Failed, format!("cannot name the machine: {error}"))
                    .hint("give it a shorter name with --name")
            })?;
            if self.machines.iter().all(|machine| machine.name != name)
                && !is_written(&name)
                && let Some(lock) = folder.claim_at_once(&name).map_err(wrong)?
            {
                return Ok((name, lock));
            }
        }
        Err(Error::new(Exit::Failed, "there are too many machines")
            .hint("end some with `mercury disco stop`"))
    }

    pub(super) fn start(
        &mut self,
        (name, lock): (Name, File),
        console: [OwnedFd; CONSOLE],
        beginning: Beginning<'_>,
    ) -> Result<()> {
        let Beginning { image, woken, forward, is_attached } = beginning;
        let forwards: Vec<Forward> =
            forward.iter().map(|text| text.parse()).collect::<std::result::Result<_, _>>().map_err(
                |error: String| Error::new(Exit::Usage, error).hint("see `mercury disco run --help`"),
            )?;
        let (own, asleep) = woken.unzip();
        let number = asleep.as_ref().map_or(self.last_number + 1, |asleep| asleep.number);
        // A machine that wakes is the one that it was.
        let identity = match asleep {
            Some(_) => None,
            None => Some(self.new_identity(&name, number)?),
        };
        let begin = |options: &mut Options| begin(options, &console, forwards, identity);
        let in_clone = |error| fail(&refused(error), Format::Text, "disco run") as i32;
        let folder = Folder::machines();
        let mark = folder.open_mark(&name).map_err(|error| failed("make the machine's files", error))?;
        let life = asleep.as_ref().map(|asleep| asleep.life);
        let origin = Origin { image, own, mark, life };
        let mut status = MachineStatus {
            name: name.clone(),
            template: self.name.clone(),
            number,
            pid: u32::MAX,
            is_detached: !is_attached,
            images: images(&self.template),
            since: seconds(),
        };
        // Nothing may fail once the machine has begun: it would run, and nobody would know it.
        folder.make_room(&name, &status).map_err(|error| failed("write the machine's state", error))?;
        let spare = lock.try_clone().map_err(|error| failed("watch the machine", error))?;
        let started = self.template.start(origin, lock.as_raw_fd(), begin, in_clone).map_err(refused)?;
        self.last_number = self.last_number.max(number);
        let Started { process, source } = started;
        let pid = Pid::from_raw(process).ok_or_else(|| failed("start a machine", "it has no number"))?;
        drop(spare);
        let end = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed("watch the machine", error))?;
        status.pid = pid.as_raw_nonzero().get().cast_unsigned();
        self.machines.push(Machine {
            name,
            number,
            pid,
            end,
            is_detached: !is_attached,
            client: None,
            is_awaited: is_attached,
            source,
            forward: forward.to_vec(),
            kept: Kept::new(asleep),
        });
        // Many machines may be started at once, and forks of one at work are at work.
        self.divide_memory(Instant::now());
        let written = folder.write(&status.name, &status);
        written.map_err(|error| failed("write the machine's state", error))
    }

    /// Makes an identity for a copy.
    fn new_identity(&self, name: &Name, number: u32) -> Result<Identity> {
        let id = new_life().map_err(refused)?;
        Ok(Identity { number, name: name.to_string(), template: self.name.to_string(), id })
    }
}

/// Returns the images of a template's disks in memory.
fn images(template: &Template) -> Vec<ImageStatus> {
    template.images().into_iter().map(|(file, inode)| ImageStatus { file, inode }).collect()
}

/// Sends an answer or the reason for which there is none. The client may be gone.
pub(super) fn reply(client: &UnixStream, answer: Result<Answer>) {
    reply_all(std::slice::from_ref(client), &answer);
}

/// Does the same for several clients.
pub(super) fn reply_all(clients: &[UnixStream], answer: &Result<Answer>) {
    let refused;
    let answer = match answer {
        Ok(answer) => answer,
        Err(Error { message, hint, .. }) => {
            refused = Answer::Refused { message: message.clone(), hint: hint.clone(), machines: Vec::new() };
            &refused
        }
    };
    for client in clients {
        let _ = protocol::send(client, answer);
    }
}

/// Gives a new machine its console, its ports and its identity. It is called in the machine's process.
fn begin(
    options: &mut Options,
    console: &[OwnedFd; CONSOLE],
    forwards: Vec<Forward>,
    identity: Option<Identity>,
) -> std::result::Result<(), mercury_hosted::error::Error> {
    let wrong = |error: Errno| {
        mercury_hosted::error::Error::new(format!("cannot take the console: {error}")).hint("report this bug")
    };
    let [input, output, errors] = console;
    dup2_stdin(input).and_then(|()| dup2_stdout(output)).and_then(|()| dup2_stderr(errors)).map_err(wrong)?;
    // A signal of the template's terminal is not for the machine.
    setsid().map_err(wrong)?;
    if let (Some(subnet), Some(identity)) = (&mut options.subnet, &identity) {
        (subnet.mac, subnet.is_copy) = (Some(identity.address()), true);
    }
    options.identity = identity;
    if forwards.is_empty() {
        return Ok(());
    }
    let net = options.net.as_mut().ok_or_else(|| {
        mercury_hosted::error::Error::new(
            "the template has no network card, so no port leads to its machines",
        )
        .hint("start the saved machine with --net passt")
    })?;
    net.forwards = forwards;
    Ok(())
}

/// Makes the console of a machine in the background: a file for its output, and a pipe for its input, which
/// stays open.
pub(super) fn open_console(name: &Name) -> io::Result<[OwnedFd; CONSOLE]> {
    let folder = Folder::machines().of(name);
    // The machine reads its log to shorten it.
    let mut options = OpenOptions::new();
    let log = options.create(true).read(true).append(true).mode(0o600).open(folder.join(CONSOLE_LOG))?;
    let pipe = folder.join(CONSOLE_INPUT);
    match mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
        // A machine that was asleep has its pipe.
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let input = OpenOptions::new().read(true).write(true).open(pipe)?;
    Ok([input.into(), log.try_clone()?.into(), log.into()])
}

/// Writes the end of a machine in the background into its log.
fn note_end(name: &Name, ended: &Answer) -> io::Result<()> {
    let how = match ended {
        Answer::Ended { signal: Some(signal), .. } => format!("was ended by signal {signal}"),
        Answer::Ended { status: Some(status), .. } => format!("has ended with status {status}"),
        _ => "has ended".to_owned(),
    };
    note(name, &how)
}

/// Writes what has happened to a machine in the background into its log.
pub(super) fn note(name: &Name, what: &str) -> io::Result<()> {
    note_in(&Folder::machines(), name, what)
}

fn note_in(folder: &Folder, name: &Name, what: &str) -> io::Result<()> {
    use io::Write;
    /// The machine shortens its log long before, unless it is stopped.
    const MOST: u64 = 8 << 20;
    let mut log = OpenOptions::new().append(true).open(folder.of(name).join(CONSOLE_LOG))?;
    if log.metadata()?.len() >= MOST {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    writeln!(log, "mercury disco: {name} {what}")
}

/// Lets this process have as many descriptors as it may: each machine needs some.
fn raise_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A machine that is stopped does not shorten its log.
    #[test]
    fn notes_do_not_fill_the_hosts_memory() {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("machines"));
        let name: Name = "web-1".parse().unwrap();
        let _lock = folder.claim(&name).unwrap().unwrap();
        let log = folder.of(&name).join(CONSOLE_LOG);
        std::fs::write(&log, "first\n").unwrap();
        note_in(&folder, &name, "sleeps on").unwrap();
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "first\nmercury disco: web-1 sleeps on\n");
        std::fs::write(&log, vec![b'x'; 8 << 20]).unwrap();
        assert!(note_in(&folder, &name, "sleeps on").is_err());
        assert_eq!(std::fs::metadata(&log).unwrap().len(), 8 << 20);
    }
}
