//! Commands in a machine. A command runs to its end, or is left running while the test goes on.

use std::{
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};

use mercury_lab_agent::protocol::{CHUNK, Event, Exec, Exit, Request};

use crate::{
    client::next_event,
    error::{Error, Result},
    link::Link,
    scene::Scene,
};

/// The time that a command may take unless the test says otherwise, in wall time. Emulation is
/// slow, and so are shared runners.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Multiplies a time limit by `MERCURY_LAB_PATIENCE`. The limits in the tests suit machines like
/// the developers'.
#[must_use]
pub fn patient(limit: Duration) -> Duration {
    let factor = std::env::var("MERCURY_LAB_PATIENCE").ok().and_then(|text| text.parse::<f32>().ok());
    limit.mul_f32(factor.filter(|factor| *factor > 0.0).unwrap_or(1.0))
}

/// An output of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// A command that a test gives to a machine.
#[derive(Debug)]
pub struct Command {
    link: Link,
    exec: Exec,
    stdin: Vec<u8>,
    limit: Duration,
}

impl Command {
    /// Returns a command that the machine's shell runs as a line.
    pub(crate) fn shell(link: Link, line: &str) -> Self {
        Self::program(link, &["/bin/bash", "-c", line])
    }

    /// Returns a command that runs a program with its arguments, without a shell.
    pub(crate) fn program(link: Link, argv: &[&str]) -> Self {
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        Self { link, exec: Exec { argv, ..Exec::default() }, stdin: Vec::new(), limit: LIMIT }
    }

    /// Adds a variable to the command's environment.
    #[must_use]
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.exec.env.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Sets the working directory; the default is `/root`.
    #[must_use]
    pub fn cwd(mut self, directory: &str) -> Self {
        self.exec.cwd = Some(directory.to_owned());
        self
    }

    /// Sets the bytes that the command reads from its standard input.
    #[must_use]
    pub fn stdin(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.stdin = bytes.as_ref().to_vec();
        self
    }

    /// Sets the command's time limit in wall time. At the limit the command is killed, which is an
    /// error.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets the command's time limit in the machine's time. The agent kills the command then, and
    /// the command ends with `Exit::TimedOut`.
    #[must_use]
    pub fn guest_timeout(mut self, limit: Duration) -> Self {
        self.exec.timeout_ms = u64::try_from(limit.as_millis()).ok();
        self
    }

    /// Runs the command to its end, successful or not.
    ///
    /// # Errors
    /// If the command cannot be started or takes too long, or the machine goes away.
    pub fn run(self) -> Result<Output> {
        self.run_streaming(|_, _| {})
    }

    /// Runs the command to its end, and shows the output as it comes.
    ///
    /// # Errors
    /// As for [`Command::run`].
    pub fn run_streaming(self, show: impl FnMut(Stream, &[u8])) -> Result<Output> {
        let limit = self.limit;
        let mut running = self.start(true)?;
        running.wait_showing(limit, show)
    }

    /// Starts the command and leaves it running. Its standard input stays open if the test gave
    /// none.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn spawn(self) -> Result<Background> {
        let close = !self.stdin.is_empty();
        self.start(close)
    }

    fn start(self, close_stdin: bool) -> Result<Background> {
        let Self { link, mut exec, stdin, .. } = self;
        let (id, events) = link.client.begin();
        exec.id = id;
        let name = exec.argv.last().cloned().unwrap_or_default();
        let mut job =
            Background { id, pid: 0, name, events, stdout: Vec::new(), stderr: Vec::new(), exit: None, link };
        job.ask(&Request::Exec(exec))?;
        job.wait_started()?;
        if !stdin.is_empty() {
            job.write_stdin(&stdin)?;
        }
        if close_stdin {
            job.close_stdin()?;
        }
        Ok(job)
    }
}

/// A command that runs in a machine. Dropping this value does not end the command.
#[derive(Debug)]
pub struct Background {
    link: Link,
    id: u32,
    pid: u32,
    name: String,
    events: Receiver<Event>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    exit: Option<Exit>,
}

impl Background {
    /// Returns the command's process ID in the machine.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Writes to the command's standard input.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn write_stdin(&self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(CHUNK) {
            self.ask(&Request::Stdin { id: self.id, data: piece.to_vec() })?;
        }
        Ok(())
    }

    /// Closes the command's standard input.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn close_stdin(&self) -> Result<()> {
        self.ask(&Request::Stdin { id: self.id, data: Vec::new() })
    }

    /// Sends a signal to the command and to all processes in its process group.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn kill(&self, signal: i32) -> Result<()> {
        self.ask(&Request::Kill { id: self.id, signal })
    }

    /// Returns true if the command has ended.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.exit_so_far()?.is_some())
    }

    /// Returns the way in which the command has ended, if it has.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn exit_so_far(&mut self) -> Result<Option<Exit>> {
        while self.exit.is_none() {
            if self.next(Instant::now(), &mut |_, _| {})?.is_none() {
                return Ok(None);
            }
        }
        Ok(self.exit)
    }

    /// Returns the command's standard output so far.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn output_so_far(&mut self) -> Result<String> {
        self.has_ended()?;
        Ok(String::from_utf8_lossy(&self.stdout).into_owned())
    }

    /// Returns the command's standard error so far.
    ///
    /// # Errors
    /// If the machine has gone.
    pub fn errors_so_far(&mut self) -> Result<String> {
        self.has_ended()?;
        Ok(String::from_utf8_lossy(&self.stderr).into_owned())
    }

    /// Waits until the command's standard output contains `text`.
    ///
    /// # Errors
    /// If the command ends without the text, or `limit` passes.
    pub fn wait_output(&mut self, text: &str, limit: Duration) -> Result<()> {
        self.wait_output_times(text, 1, limit)
    }

    /// Waits until the command's standard output contains `text` so many times.
    ///
    /// # Errors
    /// If the command ends without the text, or `limit` passes.
    pub fn wait_output_times(&mut self, text: &str, times: usize, limit: Duration) -> Result<()> {
        let end = Instant::now() + patient(limit);
        while String::from_utf8_lossy(&self.stdout).matches(text).count() < times {
            let more = self.exit.is_none() && self.next(end, &mut |_, _| {})?.is_some();
            if !more {
                let said = said_so_far(&self.stdout, &self.stderr);
                let what = format!("`{}` to say {text:?}{said}", self.name);
                return Err(self.link.blame_silent(Error::Timeout { what, limit }));
            }
        }
        Ok(())
    }

    /// Waits for the command's end, for at most `limit` of wall time. At the limit the command is
    /// killed, which is an error.
    ///
    /// # Errors
    /// If the time is up or the machine has gone.
    pub fn wait(mut self, limit: Duration) -> Result<Output> {
        self.wait_showing(limit, |_, _| {})
    }

    fn wait_showing(&mut self, limit: Duration, mut show: impl FnMut(Stream, &[u8])) -> Result<Output> {
        let limit = patient(limit);
        let end = Instant::now() + limit;
        while self.exit.is_none() {
            if self.next(end, &mut show)?.is_none() {
                let what = format!("`{}`{}", self.name, said_so_far(&self.stdout, &self.stderr));
                let error = self.link.blame_silent(Error::Timeout { what, limit });
                let _ = self.kill(9);
                return Err(error);
            }
        }
        Ok(Output {
            exit: self.exit.unwrap_or(Exit::TimedOut),
            stdout: String::from_utf8_lossy(&self.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            command: self.name.clone(),
            scene: Arc::clone(&self.link.scene),
        })
    }

    fn wait_started(&mut self) -> Result<()> {
        let end = Instant::now() + patient(LIMIT);
        while self.pid == 0 && self.exit.is_none() {
            if self.next(end, &mut |_, _| {})?.is_none() {
                let what = format!("`{}` to start", self.name);
                return Err(self.link.blame_silent(Error::Timeout { what, limit: LIMIT }));
            }
        }
        Ok(())
    }

    /// Takes in one event. Returns `None` if there is no event until `end`.
    fn next(&mut self, end: Instant, show: &mut impl FnMut(Stream, &[u8])) -> Result<Option<()>> {
        let event = next_event(&self.events, end, &format!("running `{}`", self.name));
        let Some(event) = event.map_err(|error| self.link.scene.blame(error))? else { return Ok(None) };
        match event {
            Event::Started { pid, .. } => self.pid = pid,
            Event::Stdout { data, .. } => {
                show(Stream::Stdout, &data);
                self.stdout.extend_from_slice(&data);
            }
            Event::Stderr { data, .. } => {
                show(Stream::Stderr, &data);
                self.stderr.extend_from_slice(&data);
            }
            Event::Exited { exit, .. } => self.exit = Some(exit),
            Event::Failed { error, .. } => {
                let what = format!("run `{}`", self.name);
                return Err(self.link.scene.blame(Error::Agent { what, reason: error }));
            }
            Event::Hello(_) | Event::Data { .. } | Event::Done { .. } => {}
        }
        Ok(Some(()))
    }

    fn ask(&self, request: &Request) -> Result<()> {
        self.link.client.send(request).map_err(|error| self.link.scene.blame(error))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.link.client.end(self.id);
    }
}

fn said_so_far(stdout: &[u8], stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stdout) + String::from_utf8_lossy(stderr);
    if text.trim().is_empty() { String::new() } else { format!(" (it said: {})", text.trim_end()) }
}

/// The result of a command.
#[derive(Clone, Debug)]
pub struct Output {
    /// The way in which the command ended.
    pub exit: Exit,
    pub stdout: String,
    pub stderr: String,
    command: String,
    scene: Arc<Scene>,
}

impl Output {
    /// Returns the command's exit code, if the command ended by itself.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self.exit {
            Exit::Code(code) => Some(code),
            Exit::Signal(_) | Exit::TimedOut => None,
        }
    }

    /// Returns true if the command ended with code 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.exit == Exit::Code(0)
    }

    /// Returns the output of a successful command.
    ///
    /// # Errors
    /// If the command was not successful, with all that it printed and the machine's last words.
    pub fn check(self) -> Result<Self> {
        if self.success() {
            return Ok(self);
        }
        let ended = match self.exit {
            Exit::Code(code) => format!("ended with code {code}"),
            Exit::Signal(signal) => format!("was killed by signal {signal}"),
            Exit::TimedOut => "took too long".to_owned(),
        };
        let output = format!("{}{}", self.stdout, self.stderr).trim_end().to_owned();
        Err(self.scene.blame(Error::Command { command: self.command, ended, output }))
    }
}
