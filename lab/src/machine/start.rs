//! The start of a machine: its files, its emulator, and the connections to the monitor and the agent.

use std::{
    fs::{self, File},
    io,
    net::{TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    path::Path,
    process::{Child, Command as Program, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use mercury_lab_agent::protocol::{Hello, Request};
use rustix::process::Signal;

use super::{Emulator, Machine, meaning_of};
use crate::{
    artefacts, autopsy,
    client::Client,
    command::patient,
    emulator::{self, AgentSocket, Files, Start, file, qmp::Qmp},
    error::{Context, Error, Result, wait_for},
    host, hung,
    image::Image,
    kernel::{self, Kernel},
    link::Link,
    owner,
    reservation::Reservation,
    scene::Scene,
    spec::{self, Console, Platform, Spec},
};

/// The connections into a machine that has started.
struct Connected {
    qmp: Option<Qmp>,
    client: Client,
    hello: Hello,
}

/// A machine with everything in place that has not started yet.
pub(super) struct Prepared {
    pub(super) spec: Spec,
    pub(super) start: Start,
    pub(super) scene: Arc<Scene>,
}

/// Waits until the kernel's clock counts by the TSC, half a minute at most.
const COUNTS_BY_TSC: &str = "for i in $(seq 300); do \
    grep -q tsc /sys/devices/system/clocksource/clocksource0/current_clocksource && break; sleep 0.1; done";

impl Prepared {
    pub(super) fn new(spec: Spec) -> Result<Self> {
        Self::at(spec, None)
    }

    /// Prepares a machine, with the disks of another machine if `other` names one.
    pub(super) fn at(mut spec: Spec, other: Option<Arc<Scene>>) -> Result<Self> {
        spec.check()?;
        let image = Image::ensure(spec.kernel.release())?;
        let artefacts = artefacts::ensure(spec.kernel.release())?;
        let debians = spec.kernel.files(&image)?;
        if spec.own_kernel.is_none() && spec.kernel == Kernel::BookwormCloud {
            spec.own_kernel = spec::checked_kernel(spec.kernel.release())?;
        }
        let initramfs = match &spec.own_kernel {
            Some(_) => kernel::initramfs_without_modules(&artefacts.agent)?,
            None => debians.initramfs(&artefacts.agent)?,
        };
        if spec.wants_gdb {
            spec.gdb_port = Some(host::free_port()?);
        }
        let files = Files {
            vmlinuz: spec.own_kernel.as_ref().unwrap_or(&debians.vmlinuz),
            initramfs: &initramfs,
            root_disk: &image.disk(),
            lab_disk: &artefacts.disk,
        };
        let (start, scene) = match other {
            Some(scene) => (emulator::prepare_again(&spec, files)?, scene),
            None => {
                let scene = Scene::new(&spec)?;
                (emulator::prepare(&spec, files, &scene)?, Arc::new(scene))
            }
        };
        Ok(Self { spec, start, scene })
    }

    /// Starts a machine that has not run yet.
    ///
    /// Nothing of Mercury's is in the machine before it has come up. A hang of the emulator or the
    /// kernel on the way, or a crash of the emulator, is therefore recorded, and the machine gets a
    /// second try.
    pub(super) fn start_first(self, slot: Option<Reservation>) -> Result<Machine> {
        let spec = self.spec.clone();
        let started = or_again(self.start(None), |error| {
            hung::record(error)?;
            Self::new(spec)?.start(None)
        });
        let machine = started.map(|machine| Machine { _slot: slot, ..machine })?;
        if spec::checks(machine.spec.kernel.release())?.is_some() {
            // Such a kernel starts slowly, and loses ticks until its clock counts by the TSC.
            machine.sh(COUNTS_BY_TSC)?;
            let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
            machine.sh(&format!("date -s @{now:.3} > /dev/null"))?;
        }
        Ok(machine)
    }

    pub(super) fn start(self, slot: Option<Reservation>) -> Result<Machine> {
        self.start_with(slot, |_| Ok(()))
    }

    /// Starts a machine that brings back one whose agent has introduced itself before. The host
    /// asks the agent again and again.
    pub(super) fn start_asking(self, slot: Option<Reservation>) -> Result<Machine> {
        self.start_with(slot, |client| client.send(&Request::Hello))
    }

    pub(super) fn start_with(
        self,
        slot: Option<Reservation>,
        ask: impl Fn(&Client) -> Result<()>,
    ) -> Result<Machine> {
        let started = Instant::now();
        let (process, Connected { qmp, client, hello }) = self.start_and_connect(&ask)?;
        Ok(Machine {
            link: Link::new(client, self.scene, qmp, self.spec.memory_mib),
            spec: self.spec,
            start: self.start,
            process: Emulator(Mutex::new(process)),
            kernel: hello.kernel,
            boot_time: started.elapsed(),
            _slot: slot,
        })
    }

    /// Starts a machine and waits for no agent.
    pub(super) fn start_silent(self, slot: Option<Reservation>, kernel: String) -> Result<Machine> {
        let mut process = Emulator(Mutex::new(self.start_emulator()?));
        let (qmp, client) = self.reach(process.0.get_mut().unwrap_or_else(PoisonError::into_inner))?;
        Ok(Machine {
            link: Link::new(client, self.scene, qmp, self.spec.memory_mib),
            spec: self.spec,
            start: self.start,
            process,
            kernel,
            boot_time: Duration::ZERO,
            _slot: slot,
        })
    }

    pub(super) fn meaning_of(&self, status: ExitStatus) -> ExitStatus {
        meaning_of(self.spec.platform, &self.scene, status)
    }

    fn start_and_connect(&self, ask: &impl Fn(&Client) -> Result<()>) -> Result<(Child, Connected)> {
        let mut process = self.start_emulator()?;
        match self.connect(&mut process, ask) {
            Ok(connected) => Ok((process, connected)),
            Err(error) => {
                let error = crash_of(&mut process).map_or(error, Error::Crashed);
                let _ = process.kill();
                let _ = process.wait();
                Err(self.scene.blame(error))
            }
        }
    }

    pub(super) fn start_emulator(&self) -> Result<Child> {
        start_emulator(&self.scene, &self.spec, &self.start.program, &self.start.arguments)
    }

    /// Connects to a machine, whatever system runs there.
    fn reach(&self, process: &mut Child) -> Result<(Option<Qmp>, Client)> {
        let qmp = match self.spec.platform {
            Platform::Qemu => {
                let monitor = self.connect_socket(process, |scene| scene.connect(file::MONITOR))?;
                Some(Qmp::new(monitor, Some(Arc::clone(&self.scene)))?)
            }
            Platform::Bochs(_) => None,
        };
        let agent: OwnedFd = match &self.start.agent {
            AgentSocket::Unix(name) => self.connect_socket(process, |scene| scene.connect(name))?.into(),
            AgentSocket::Tcp(listener) => self.connect_socket(process, |_| accept(listener))?.into(),
        };
        Ok((qmp, Client::new(agent)?))
    }

    fn connect(&self, process: &mut Child, ask: &impl Fn(&Client) -> Result<()>) -> Result<Connected> {
        let (qmp, client) = self.reach(process)?;
        let hello = wait_for("the machine to boot", patient(self.spec.boot_limit), || {
            refuse_ended(process)?;
            ask(&client)?;
            client.hello_after(0, Duration::from_millis(500))
        });
        if let (Err(Error::Timeout { .. }), Some(qmp)) = (&hello, &qmp) {
            autopsy::perform(qmp, &self.scene, u64::from(self.spec.memory_mib) << 20);
        }
        Ok(Connected { qmp, client, hello: hello? })
    }

    fn connect_socket<S>(&self, process: &mut Child, connect: impl Fn(&Scene) -> io::Result<S>) -> Result<S> {
        wait_for("the emulator to be there", patient(Duration::from_secs(30)), || {
            refuse_ended(process)?;
            Ok(connect(&self.scene).ok())
        })
    }
}

pub(super) fn start_emulator(
    scene: &Scene,
    spec: &Spec,
    program: &Path,
    arguments: &[String],
) -> Result<Child> {
    let dir = scene.dir();
    let record = format!("{} {}\n", program.display(), host::quoted(arguments));
    fs::write(dir.join(file::COMMAND), record).context(|| "record the emulator's arguments".into())?;
    let log = File::create(dir.join(file::EMULATOR)).context(|| "make the emulator's log".into())?;
    let mut emulator = Program::new(program);
    emulator.args(arguments).current_dir(dir);
    if spec.console != Console::Terminal {
        let copy = log.try_clone().context(|| "share the emulator's log".into())?;
        emulator.stdin(Stdio::null()).stdout(copy);
    }
    emulator.stderr(log);
    owner::spawn(emulator).context(|| format!("start {}", program.display()))
}

/// Accepts a connection that is there already, for ordinary reads and writes.
fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Gives a start that ran out of time, or in which the emulator crashed, a second try. Any other
/// failure is final.
fn or_again<T>(first: Result<T>, again: impl FnOnce(&Error) -> Result<T>) -> Result<T> {
    match first {
        Err(error) if matches!(error.cause(), Error::Timeout { .. } | Error::Crashed(_)) => again(&error),
        first => first,
    }
}

/// Returns how the emulator crashed, if a signal that no process sent ended it. The emulator may be
/// about to end.
fn crash_of(process: &mut Child) -> Option<String> {
    const OWN_FAULTS: [Signal; 3] = [Signal::ABORT, Signal::BUS, Signal::SEGV];
    let ended = wait_for("the emulator's end", Duration::from_secs(1), || {
        process.try_wait().context(|| "look after the emulator".into())
    });
    let status = ended.ok()?;
    let signal = status.signal().and_then(Signal::from_named_raw)?;
    OWN_FAULTS.contains(&signal).then(|| status.to_string())
}

fn refuse_ended(process: &mut Child) -> Result<()> {
    match process.try_wait().context(|| "look after the emulator".into())? {
        Some(status) => Err(Error::Gone(format!("the emulator ended while the machine booted ({status})"))),
        None => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn silence() -> Error {
        let source = Error::Timeout { what: "the machine to boot".into(), limit: Duration::ZERO };
        Error::Scene { source: Box::new(source), scene: String::new() }
    }

    #[test]
    fn silence_and_crashes_get_a_second_try() {
        let in_time = |error: &Error| !matches!(error.cause(), Error::Timeout { .. });
        let crashed =
            Error::Scene { source: Box::new(Error::Crashed("SIGSEGV".into())), scene: String::new() };
        assert!(matches!(or_again(Err(crashed), |error| Ok(in_time(error))), Ok(true)));
        assert!(matches!(or_again(Err(silence()), |error| Ok(in_time(error))), Ok(false)));
        assert!(or_again::<()>(Err(silence()), |_| Err(silence())).is_err_and(|error| !in_time(&error)));
        let gone = Err(Error::Gone("panic".into()));
        assert!(matches!(or_again(gone, |_| Ok(true)), Err(Error::Gone(_))));
        assert!(matches!(or_again(Ok(false), |_| Ok(true)), Ok(false)));
    }

    #[test]
    fn a_crash_is_told_from_an_end() {
        let ended = |line: &str| {
            let mut shell = Program::new("sh").args(["-c", line]).spawn().unwrap();
            let crash = crash_of(&mut shell);
            let _ = shell.kill();
            let _ = shell.wait();
            crash
        };
        assert!(ended("kill -SEGV $$").is_some_and(|crash| crash.contains("11")));
        assert_eq!(ended("kill -TERM $$"), None);
        assert_eq!(ended("exit 1"), None);
        assert_eq!(ended("sleep 10"), None, "it hangs");
    }
}
