//! A machine that runs: QEMU, its monitor, its agent, its logs. It ends when this is dropped, and when
//! the process ends, however that happens.

use std::{
    fs::{self, File},
    net::TcpListener,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command as Program, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use mercury_lab_agent::protocol::{CHUNK, End, Event, Hello, Request};
use regex::Regex;

use crate::{
    artefacts, autopsy,
    client::{Client, next_event},
    command::{Background, Command, LIMIT, Link, Output, patient},
    error::{Context, Error, Result, wait_for},
    host, hung,
    image::Image,
    lock::Reservation,
    newer_qemu, owner,
    qmp::Qmp,
    repaired_qemu,
    scene::Scene,
    spec::{Console, Files, QEMU, Qemu as QemuVersion, Spec, file, qemu_arguments},
};

/// A running machine.
#[derive(Debug)]
pub struct Machine {
    spec: Spec,
    arguments: Vec<String>,
    process: Qemu,
    qmp: Qmp,
    link: Link,
    kernel: String,
    boot_time: Duration,
    _slot: Option<Reservation>,
}

impl Machine {
    /// Boots a machine and waits until it takes commands. Builds what it needs first; waits for its turn
    /// when two machines run already.
    ///
    /// # Errors
    /// If something does not build, or the machine does not come up; the error shows its console.
    pub fn boot(spec: Spec) -> Result<Self> {
        let prepared = Prepared::new(spec)?;
        let slot = Reservation::wait(1)?;
        prepared.start_first(Some(slot))
    }

    /// Boots a machine on a reservation that its caller holds for several.
    ///
    /// # Errors
    /// As for [`Machine::boot`].
    pub fn boot_reserved(spec: Spec, _reservation: &Reservation) -> Result<Self> {
        Prepared::new(spec)?.start_first(None)
    }

    /// Boots a machine with a shell on this terminal, and waits for its end.
    ///
    /// # Errors
    /// If something does not build or QEMU does not start.
    pub fn shell(spec: Spec) -> Result<()> {
        let prepared = Prepared::new(spec.console(Console::Terminal))?;
        let terminal = Terminal::save();
        let mut process = prepared.start_qemu()?;
        let status = watch(&mut process, &terminal);
        drop(terminal);
        let status = status?;
        if status.success() {
            return Ok(());
        }
        Err(prepared.scene.blame(Error::Gone(format!("QEMU ended with {status}"))))
    }

    /// Cuts the power if it is still on, and starts the machine again with the disks as they are.
    ///
    /// # Errors
    /// As for [`Machine::boot`].
    pub fn start_again(self) -> Result<Self> {
        self.power_cut()?;
        let Self { spec, arguments, link, _slot, .. } = self;
        Prepared { spec, arguments, scene: link.scene }.start(_slot)
    }

    /// The release of the kernel that runs.
    #[must_use]
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// From QEMU's start to the agent's first word, in wall time.
    #[must_use]
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// What QEMU was started with.
    #[must_use]
    pub fn qemu_arguments(&self) -> &[String] {
        &self.arguments
    }

    /// QEMU's process ID on this host.
    #[must_use]
    pub fn qemu_pid(&self) -> u32 {
        self.process.lock().id()
    }

    /// A command line for the machine's shell.
    #[must_use]
    pub fn command(&self, line: &str) -> Command {
        Command::shell(self.link.clone(), line)
    }

    /// A program for the machine, with no shell in between.
    #[must_use]
    pub fn program(&self, argv: &[&str]) -> Command {
        Command::program(self.link.clone(), argv)
    }

    /// Runs a command line to its end, however it ends.
    ///
    /// # Errors
    /// If it takes too long or the machine goes away.
    pub fn run(&self, line: &str) -> Result<Output> {
        self.command(line).run()
    }

    /// Runs a command line that must succeed; returns its standard output without the last newline.
    ///
    /// # Errors
    /// If it does not succeed.
    pub fn sh(&self, line: &str) -> Result<String> {
        let output = self.run(line)?.check()?;
        Ok(output.stdout.trim_end_matches('\n').to_owned())
    }

    /// Starts a command line and leaves it running.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(&self, line: &str) -> Result<Background> {
        self.command(line).spawn()
    }

    /// Starts PostgreSQL, with the pgbench database `bench`.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_postgres(&self) -> Result<()> {
        self.sh("lab-postgres start").map(drop)
    }

    /// Writes a file in the machine.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn put(&self, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let (id, events) = self.link.client.begin();
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
    /// If it cannot be read.
    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        let (id, events) = self.link.client.begin();
        self.ask(&Request::Get { id, path: path.to_owned() })?;
        self.finish_file_job(id, &events, &format!("read {path}"))
    }

    fn finish_file_job(
        &self,
        id: u32,
        events: &std::sync::mpsc::Receiver<Event>,
        what: &str,
    ) -> Result<Vec<u8>> {
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
        self.link.client.end(id);
        result.map_err(|error| self.link.scene.blame(error))
    }

    fn ask(&self, request: &Request) -> Result<()> {
        self.link.client.send(request).map_err(|error| self.link.scene.blame(error))
    }

    /// QEMU's monitor.
    #[must_use]
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// The port on 127.0.0.1 for `target remote`, if the machine was asked to have one.
    #[must_use]
    pub fn gdb_port(&self) -> Option<u16> {
        self.spec.gdb_port
    }

    /// All that the serial console has said.
    #[must_use]
    pub fn serial_log(&self) -> String {
        self.link.scene.serial_log()
    }

    /// Waits until the serial console matches a regular expression; returns what matched.
    ///
    /// # Errors
    /// If `limit` passes, or the pattern is none.
    pub fn wait_serial(&self, pattern: &str, limit: Duration) -> Result<String> {
        let regex = Regex::new(pattern).map_err(|error| Error::Spec(error.to_string()))?;
        let what = format!("/{pattern}/ on the serial console");
        let found = wait_for(&what, patient(limit), || {
            Ok(regex.find(&self.serial_log()).map(|found| found.as_str().to_owned()))
        });
        found.map_err(|error| self.link.scene.blame(error))
    }

    /// Waits until the agent of the machine's next boot is there: after a reset or a reboot.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn wait_reboot(&self, boots_before: u32) -> Result<()> {
        let what = "the machine to come up again";
        let up = wait_for(what, patient(self.spec.boot_limit), || {
            self.link.client.hello_after(boots_before, Duration::from_millis(100))
        });
        up.map(drop).map_err(|error| self.blame_silent(error))
    }

    /// How often this machine has booted since QEMU started.
    #[must_use]
    pub fn boots(&self) -> u32 {
        self.link.client.boots()
    }

    /// Ends QEMU at once, as a power cut does; the disks stay as they are.
    ///
    /// # Errors
    /// If QEMU cannot be killed.
    pub fn power_cut(&self) -> Result<()> {
        self.process.kill()
    }

    /// Waits until the machine has ended by itself.
    ///
    /// # Errors
    /// If `limit` passes.
    pub fn wait_shutdown(&self, limit: Duration) -> Result<ExitStatus> {
        let ended = wait_for("the machine to end", patient(limit), || {
            self.process.lock().try_wait().context(|| "wait for QEMU".into())
        });
        ended.map_err(|error| self.blame_silent(error))
    }

    /// Powers the machine off from inside.
    ///
    /// # Errors
    /// If it does not end.
    pub fn shut_down(self) -> Result<()> {
        // The agent ends with the machine, so there may be no answer.
        let _background = self.spawn("poweroff");
        self.wait_shutdown(Duration::from_secs(60)).map(drop)
    }

    /// Adds to an error what was booted and the last that it said, and keeps the evidence.
    pub(crate) fn blame(&self, error: Error) -> Error {
        self.link.scene.blame(error)
    }

    /// For what did not happen in time: finds out what the machine is doing.
    fn blame_silent(&self, error: Error) -> Error {
        if matches!(error, Error::Timeout { .. }) {
            autopsy::perform(&self.qmp, &self.link.scene, u64::from(self.spec.memory_mib) << 20);
        }
        self.link.scene.blame(error)
    }

    /// The failure that was seen on this machine was expected: nothing of it needs to be kept.
    pub fn forgive(&self) {
        self.link.scene.forgive();
    }
}

/// QEMU's process, which ends with this.
#[derive(Debug)]
struct Qemu(Mutex<Child>);

impl Qemu {
    fn lock(&self) -> MutexGuard<'_, Child> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kill(&self) -> Result<()> {
        let mut process = self.lock();
        process.kill().context(|| "kill QEMU".into())?;
        process.wait().context(|| "wait for QEMU".into()).map(drop)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// A machine with everything in place, not started yet.
struct Prepared {
    spec: Spec,
    arguments: Vec<String>,
    scene: Arc<Scene>,
}

impl Prepared {
    fn new(mut spec: Spec) -> Result<Self> {
        spec.check()?;
        let image = Image::ensure(spec.kernel.release())?;
        let artefacts = artefacts::ensure(spec.kernel.release())?;
        let kernel = spec.kernel.files(&image)?;
        let initramfs = kernel.initramfs(&artefacts.agent)?;
        if spec.wants_gdb {
            spec.gdb_port = Some(free_port()?);
        }
        if let Some(program) = emulator(&spec)? {
            spec.qemu = program.to_string_lossy().into_owned();
        }
        let scene = Scene::new(&spec)?;
        make_overlay(&scene, file::ROOT, &["-F", "raw", "-b", &image.disk().to_string_lossy()])?;
        for (index, (_, mib)) in spec.disks.iter().enumerate() {
            make_overlay(&scene, &file::disk(index), &[&format!("{mib}M")])?;
        }
        let files = Files { vmlinuz: &kernel.vmlinuz, initramfs: &initramfs, lab_disk: &artefacts.disk };
        let arguments = qemu_arguments(&spec, &files);
        Ok(Self { spec, arguments, scene: Arc::new(scene) })
    }

    /// Starts a machine that has not run yet. Nothing of Mercury's is in it before it has come up, so the
    /// emulator's or the kernel's hang on the way there is recorded, and the machine gets a second try.
    fn start_first(self, slot: Option<Reservation>) -> Result<Machine> {
        let spec = self.spec.clone();
        let started = or_again(self.start(None), |error| {
            hung::record(error)?;
            Self::new(spec)?.start(None)
        });
        started.map(|machine| Machine { _slot: slot, ..machine })
    }

    fn start(self, slot: Option<Reservation>) -> Result<Machine> {
        let started = Instant::now();
        let (process, (qmp, client, hello)) = self.start_and_connect()?;
        Ok(Machine {
            link: Link { client: Arc::new(client), scene: self.scene },
            spec: self.spec,
            arguments: self.arguments,
            process: Qemu(Mutex::new(process)),
            qmp,
            kernel: hello.kernel,
            boot_time: started.elapsed(),
            _slot: slot,
        })
    }

    fn start_and_connect(&self) -> Result<(Child, (Qmp, Client, Hello))> {
        let mut process = self.start_qemu()?;
        match self.connect(&mut process) {
            Ok(connected) => Ok((process, connected)),
            Err(error) => {
                let _ = process.kill();
                let _ = process.wait();
                Err(self.scene.blame(error))
            }
        }
    }

    fn start_qemu(&self) -> Result<Child> {
        let dir = self.scene.dir();
        let record = format!("{} {}\n", self.spec.qemu, host::quoted(&self.arguments));
        fs::write(dir.join("qemu.args"), record).context(|| "record QEMU's arguments".into())?;
        let log = File::create(dir.join("qemu.log")).context(|| "make QEMU's log".into())?;
        let mut qemu = Program::new(&self.spec.qemu);
        qemu.args(&self.arguments).current_dir(dir);
        if self.spec.console == Console::Log {
            let copy = log.try_clone().context(|| "share QEMU's log".into())?;
            qemu.stdin(Stdio::null()).stdout(copy);
        }
        qemu.stderr(log);
        owner::spawn(qemu).context(|| format!("start {}", self.spec.qemu))
    }

    fn connect(&self, process: &mut Child) -> Result<(Qmp, Client, Hello)> {
        let monitor = self.connect_socket(process, file::MONITOR)?;
        let qmp = Qmp::new(monitor, Some(Arc::clone(&self.scene)))?;
        let client = Client::new(self.connect_socket(process, file::AGENT)?)?;
        let hello = wait_for("the machine to boot", patient(self.spec.boot_limit), || {
            refuse_ended(process)?;
            client.hello_after(0, Duration::from_millis(100))
        });
        if matches!(hello, Err(Error::Timeout { .. })) {
            autopsy::perform(&qmp, &self.scene, u64::from(self.spec.memory_mib) << 20);
        }
        Ok((qmp, client, hello?))
    }

    fn connect_socket(&self, process: &mut Child, name: &str) -> Result<UnixStream> {
        wait_for("QEMU to listen", patient(Duration::from_secs(30)), || {
            refuse_ended(process)?;
            Ok(self.scene.connect(name).ok())
        })
    }
}

/// What did not come in time gets a second try; what failed otherwise has failed.
fn or_again<T>(first: Result<T>, again: impl FnOnce(&Error) -> Result<T>) -> Result<T> {
    match first {
        Err(error) if error.is_timeout() => again(&error),
        first => first,
    }
}

/// The program of a version of QEMU, unless the machine names one of its own.
fn emulator(spec: &Spec) -> Result<Option<PathBuf>> {
    match spec.qemu_version {
        QemuVersion::Newer => newer_qemu::ensure().map(Some),
        QemuVersion::Host if spec.qemu == QEMU => repaired_qemu::ensure(QEMU).map(Some),
        QemuVersion::Host => Ok(None),
    }
}

fn refuse_ended(process: &mut Child) -> Result<()> {
    match process.try_wait().context(|| "look after QEMU".into())? {
        Some(status) => Err(Error::Gone(format!("QEMU ended while the machine booted ({status})"))),
        None => Ok(()),
    }
}

fn make_overlay(scene: &Scene, name: &str, arguments: &[&str]) -> Result<()> {
    let mut command = Program::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]);
    let (options, size): (Vec<&str>, Vec<&str>) =
        if arguments.len() > 1 { (arguments.to_vec(), vec![]) } else { (vec![], arguments.to_vec()) };
    command.args(options).arg(scene.dir().join(name)).args(size);
    host::run("making a disk", "qemu-img", &mut command)
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context(|| "find a free port".into())?;
    Ok(listener.local_addr().context(|| "find a free port".into())?.port())
}

/// Waits for QEMU's end, and ends it when the terminal has been closed: not everything that may stand
/// between the terminal and us passes the hang-up on.
fn watch(process: &mut Child, terminal: &Terminal) -> Result<ExitStatus> {
    loop {
        if let Some(status) = process.try_wait().context(|| "wait for QEMU".into())? {
            return Ok(status);
        }
        if terminal.is_closed() {
            let _ = process.kill();
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// QEMU sets the terminal to raw, and may be killed before it sets it back.
struct Terminal(Option<rustix::termios::Termios>);

impl Terminal {
    fn save() -> Self {
        Self(rustix::termios::tcgetattr(rustix::stdio::stdin()).ok())
    }

    /// Whether there was a terminal, and it is gone.
    fn is_closed(&self) -> bool {
        self.0.is_some() && rustix::termios::tcgetattr(rustix::stdio::stdin()).is_err()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(saved) = &self.0 {
            let now = rustix::termios::OptionalActions::Now;
            let _ = rustix::termios::tcsetattr(rustix::stdio::stdin(), now, saved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silence() -> Error {
        let source = Error::Timeout { what: "the machine to boot".into(), limit: Duration::ZERO };
        Error::Scene { source: Box::new(source), scene: String::new() }
    }

    #[test]
    fn only_silence_gets_a_second_try() {
        assert!(matches!(or_again(Err(silence()), |error| Ok(error.is_timeout())), Ok(true)));
        assert!(or_again::<()>(Err(silence()), |_| Err(silence())).is_err_and(|error| error.is_timeout()));
        let gone = Err(Error::Gone("panic".into()));
        assert!(matches!(or_again(gone, |_| Ok(true)), Err(Error::Gone(_))));
        assert!(matches!(or_again(Ok(false), |_| Ok(true)), Ok(false)));
    }
}
