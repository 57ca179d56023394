//! The host's jobs: programs to run, and files to write and to read.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, PipeReader, Read, Seek, SeekFrom, Write},
    os::{
        fd::AsFd,
        unix::{
            fs::OpenOptionsExt,
            process::{CommandExt, ExitStatusExt},
        },
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use mercury_lab_agent::protocol::{CHUNK, End, Event, Exec, Exit, Request};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, Signal, kill_process_group},
};

use crate::{environment, serve::Host};

/// Time for which a pipe may stay silent after its program has ended. A daemon may hold the pipe
/// open for ever.
const PIPE_GRACE: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// A running program, with the parts that requests about it need.
struct Running {
    group: Pid,
    stdin: Sender<Vec<u8>>,
}

type Table = Arc<Mutex<HashMap<u32, Running>>>;

pub struct Jobs {
    host: Host,
    running: Table,
}

impl Jobs {
    pub fn new(host: Host) -> Self {
        Self { host, running: Table::default() }
    }

    /// Carries out a request, or starts it.
    pub fn take(&mut self, request: Request) {
        match request {
            Request::Hello => {}
            Request::Exec(exec) => self.exec(exec),
            Request::Stdin { id, data } => {
                self.with(id, |job| drop(job.stdin.send(data)));
            }
            Request::Kill { id, signal } => self.with(id, |job| kill(job.group, signal)),
            Request::Put { id, path, mode, offset, data, end } => match put(&path, mode, offset, &data) {
                Err(error) => self.fail(id, &format!("cannot write {path}: {error}")),
                Ok(()) if end == End::Last => self.host.tell(&Event::Done { id }),
                Ok(()) => {}
            },
            Request::Get { id, path } => {
                let host = self.host.clone();
                thread::spawn(move || get(&host, id, &path));
            }
        }
    }

    fn exec(&mut self, exec: Exec) {
        let id = exec.id;
        match start(&exec) {
            Err(error) => {
                let program = exec.argv.first().map_or("nothing", String::as_str);
                self.fail(id, &format!("cannot start {program}: {error}"));
            }
            Ok((child, group)) => {
                if let Err(error) = self.follow(child, group, &exec) {
                    self.fail(id, &format!("cannot follow it: {error}"));
                }
            }
        }
    }

    /// Starts the threads of a program: one for each pipe, one that waits, one that reports.
    fn follow(&mut self, mut child: Child, group: Pid, exec: &Exec) -> io::Result<()> {
        let id = exec.id;
        // This pipe closes when the program has ended. The readers of its outputs see that.
        let (end_of_out, ended) = io::pipe()?;
        let end_of_err = end_of_out.try_clone()?;
        self.host.tell(&Event::Started { id, pid: child.id() });
        let (stdin, input) = channel();
        let (news, reports) = sync_channel(16);
        if let Some(pipe) = child.stdin.take() {
            thread::spawn(move || feed(pipe, &input));
        }
        let pipes = [
            child.stdout.take().map(|pipe| pump(pipe, end_of_out, Stream::Out, news.clone())),
            child.stderr.take().map(|pipe| pump(pipe, end_of_err, Stream::Err, news.clone())),
        ];
        thread::spawn(move || {
            let status = child.wait();
            drop(ended);
            news.send(News::Ended(status))
        });
        self.table().insert(id, Running { group, stdin });
        let deadline = exec.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
        let follower =
            Follower { id, group, host: self.host.clone(), deadline, pipes: pipes.iter().flatten().count() };
        let running = Arc::clone(&self.running);
        thread::spawn(move || {
            let last = follower.follow(&reports);
            lock(&running).remove(&id);
            follower.host.tell(&last);
        });
        Ok(())
    }

    fn with(&self, id: u32, act: impl FnOnce(&Running)) {
        if let Some(job) = self.table().get(&id) {
            act(job);
        }
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Running>> {
        lock(&self.running)
    }

    fn fail(&self, id: u32, error: &str) {
        self.host.tell(&Event::Failed { id, error: error.to_owned() });
    }
}

fn lock(table: &Table) -> std::sync::MutexGuard<'_, HashMap<u32, Running>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a program in a process group of its own, with pipes.
fn start(exec: &Exec) -> io::Result<(Child, Pid)> {
    let (program, args) = exec.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let child = Command::new(program)
        .args(args)
        .envs(environment::variables())
        .envs(exec.env.iter().map(|(key, value)| (key, value)))
        .current_dir(exec.cwd.as_deref().unwrap_or("/root"))
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let group = Pid::from_child(&child);
    Ok((child, group))
}

fn kill(group: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        let _ = kill_process_group(group, signal);
    }
}

/// An output of a program.
#[derive(Clone, Copy)]
enum Stream {
    Out,
    Err,
}

/// A report from a job's threads.
enum News {
    Output(Stream, Vec<u8>),
    Closed,
    Ended(io::Result<ExitStatus>),
}

/// Writes the host's data to a program's standard input. An empty piece closes the input.
fn feed(mut pipe: impl Write, input: &Receiver<Vec<u8>>) {
    for data in input {
        if data.is_empty() || pipe.write_all(&data).is_err() {
            return;
        }
    }
}

/// Reads one of a program's outputs until the output is closed, or silent after the program's end.
fn pump(
    mut pipe: impl Read + AsFd + Send + 'static,
    end: PipeReader,
    stream: Stream,
    news: SyncSender<News>,
) {
    thread::spawn(move || {
        let mut piece = vec![0; CHUNK];
        while wait_for_output(&pipe, &end)
            && let Ok(count @ 1..) = pipe.read(&mut piece)
        {
            if news.send(News::Output(stream, piece[..count].to_vec())).is_err() {
                return;
            }
        }
        let _ = news.send(News::Closed);
    });
}

/// Waits for output. Returns false if none will come. All output of a program is in its pipe when
/// the program ends. A pipe that is empty after that has no more, however late this thread is.
fn wait_for_output(pipe: &impl AsFd, end: &PipeReader) -> bool {
    let mut both = [PollFd::new(pipe, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
    while poll(&mut both, None) == Err(Errno::INTR) {}
    !both[0].revents().is_empty() || poll(&mut both[..1], Some(&PIPE_GRACE)) != Ok(0)
}

/// Orders a job's reports for the host.
struct Follower {
    id: u32,
    group: Pid,
    host: Host,
    deadline: Option<Instant>,
    pipes: usize,
}

impl Follower {
    /// Forwards output until the program has ended and its pipes are empty. Returns the job's last
    /// event.
    fn follow(&self, news: &Receiver<News>) -> Event {
        let id = self.id;
        let mut open = self.pipes;
        let mut exit = None;
        let mut deadline = self.deadline;
        while exit.is_none() || open > 0 {
            match news.recv_timeout(patience(deadline)) {
                Ok(News::Output(Stream::Out, data)) => self.host.tell(&Event::Stdout { id, data }),
                Ok(News::Output(Stream::Err, data)) => self.host.tell(&Event::Stderr { id, data }),
                Ok(News::Closed) => open -= 1,
                Ok(News::Ended(status)) => {
                    exit = Some(exit_of(status, self.deadline, deadline));
                    deadline = None;
                }
                Err(RecvTimeoutError::Timeout) if exit.is_some() => {}
                Err(RecvTimeoutError::Timeout) => {
                    deadline = None;
                    let _ = kill_process_group(self.group, Signal::KILL);
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Event::Exited { id, exit: exit.unwrap_or(Exit::TimedOut) }
    }
}

/// Returns the time to wait for the next report.
fn patience(deadline: Option<Instant>) -> Duration {
    let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
    deadline.map_or(Duration::from_secs(3600), left)
}

/// Returns how a program ended. A program whose deadline was set and then removed was killed at the
/// deadline.
fn exit_of(status: io::Result<ExitStatus>, set: Option<Instant>, left: Option<Instant>) -> Exit {
    if set.is_some() && left.is_none() {
        return Exit::TimedOut;
    }
    match status {
        Ok(status) => {
            status.code().map(Exit::Code).or(status.signal().map(Exit::Signal)).unwrap_or(Exit::Code(-1))
        }
        Err(_) => Exit::Code(-1),
    }
}

fn put(path: &str, mode: u32, offset: u64, data: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create(true).truncate(offset == 0).mode(mode);
    let mut file = options.open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(data)
}

fn get(host: &Host, id: u32, path: &str) {
    let last = match stream_file(host, id, path) {
        Ok(()) => Event::Done { id },
        Err(error) => Event::Failed { id, error: format!("cannot read {path}: {error}") },
    };
    host.tell(&last);
}

fn stream_file(host: &Host, id: u32, path: &str) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut piece = vec![0; CHUNK];
    while let count @ 1.. = file.read(&mut piece)? {
        host.tell(&Event::Data { id, data: piece[..count].to_vec() });
    }
    Ok(())
}
