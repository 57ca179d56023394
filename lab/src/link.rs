//! The connection to a system with the lab's agent: a machine, or a guest in a machine.

use std::{
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};

use mercury_lab_agent::protocol::{CHUNK, End, Event, Request};

use crate::{
    autopsy,
    client::{Client, next_event},
    command::{Background, Command, LIMIT, Output, patient},
    emulator::qmp::Qmp,
    error::{Error, Result},
    scene::Scene,
};

/// A system with the lab's agent in it.
pub trait System {
    /// Returns the connection to the system's agent.
    fn link(&self) -> &Link;

    /// Returns the processor time that the system's emulator took on this host, divided by the
    /// number of the machine's CPUs.
    ///
    /// # Errors
    /// If the emulator has ended.
    fn worked(&self) -> Result<Duration>;
}

/// The connection to a machine, shared by all commands that run in the machine.
#[derive(Clone, Debug)]
pub struct Link {
    pub(crate) client: Arc<Client>,
    pub(crate) scene: Arc<Scene>,
    /// The connection to QEMU's monitor; Bochs has none.
    pub(crate) monitor: Option<Arc<Qmp>>,
    memory_bytes: u64,
}

impl Link {
    pub(crate) fn new(client: Client, scene: Arc<Scene>, monitor: Option<Qmp>, memory_mib: u32) -> Self {
        let memory_bytes = u64::from(memory_mib) << 20;
        Self { client: Arc::new(client), scene, monitor: monitor.map(Arc::new), memory_bytes }
    }

    /// Adds to an error the machine's description and its last words, and keeps the evidence.
    #[must_use]
    pub fn blame(&self, error: Error) -> Error {
        self.scene.blame(error)
    }

    /// Adds the evidence to an error. After a timeout, first finds out what the machine is doing.
    pub(crate) fn blame_silent(&self, error: Error) -> Error {
        match error {
            Error::Timeout { .. } => self.blame_examined(error),
            _ => self.scene.blame(error),
        }
    }

    /// Finds out what the machine is doing, and adds the evidence to an error. Another machine's
    /// evidence may be in the error already.
    pub(crate) fn blame_examined(&self, error: Error) -> Error {
        if let Some(qmp) = &self.monitor {
            autopsy::perform(qmp, &self.scene, self.memory_bytes);
        }
        self.scene.blame_also(error)
    }

    /// Returns a command line for the machine's shell.
    #[must_use]
    pub fn command(&self, line: &str) -> Command {
        Command::shell(self.clone(), line)
    }

    /// Returns a program for the machine, with no shell in between.
    #[must_use]
    pub fn program(&self, argv: &[&str]) -> Command {
        Command::program(self.clone(), argv)
    }

    /// Runs a command line to its end, successful or not.
    ///
    /// # Errors
    /// If the command takes too long or the machine goes away.
    pub fn run(&self, line: &str) -> Result<Output> {
        self.command(line).run()
    }

    /// Runs a command line that must succeed. Returns its standard output without the last newline.
    ///
    /// # Errors
    /// If the command does not succeed.
    pub fn sh(&self, line: &str) -> Result<String> {
        let output = self.run(line)?.check()?;
        Ok(output.stdout.trim_end_matches('\n').to_owned())
    }

    /// Starts a command line and leaves it running.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn spawn(&self, line: &str) -> Result<Background> {
        self.command(line).spawn()
    }

    /// Writes a file in the machine.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn put(&self, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let (id, events) = self.client.begin();
        let mut pieces: Vec<&[u8]> = bytes.chunks(CHUNK).collect();
        if pieces.is_empty() {
            pieces.push(&[]);
        }
        let count = pieces.len();
        let mut offset = 0;
        for (index, piece) in pieces.into_iter().enumerate() {
            let end = if index + 1 == count { End::Last } else { End::More };
            let (path, data) = (path.to_owned(), piece.to_vec());
            self.ask(&Request::Put { id, path, mode, offset, data, end })?;
            offset += piece.len() as u64;
        }
        self.finish_file_job(id, &events, &format!("write {path}")).map(drop)
    }

    /// Reads a file in the machine.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        let (id, events) = self.client.begin();
        self.ask(&Request::Get { id, path: path.to_owned() })?;
        self.finish_file_job(id, &events, &format!("read {path}"))
    }

    fn finish_file_job(&self, id: u32, events: &Receiver<Event>, what: &str) -> Result<Vec<u8>> {
        let limit = patient(LIMIT);
        let end = Instant::now() + limit;
        let mut bytes = Vec::new();
        let result = loop {
            match next_event(events, end, what) {
                Ok(Some(Event::Data { data, .. })) => bytes.extend_from_slice(&data),
                Ok(Some(Event::Failed { error, .. })) => {
                    break Err(Error::Agent { what: what.to_owned(), reason: error });
                }
                Ok(Some(_)) => break Ok(bytes),
                Ok(None) => break Err(Error::Timeout { what: what.to_owned(), limit }),
                Err(error) => break Err(error),
            }
        };
        self.client.end(id);
        result.map_err(|error| self.scene.blame(error))
    }

    pub(crate) fn ask(&self, request: &Request) -> Result<()> {
        self.client.send(request).map_err(|error| self.scene.blame(error))
    }
}
