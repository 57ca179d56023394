//! A running machine: the emulator, its monitor, the agent and the logs. The machine ends when this
//! value is dropped, and when the process ends, however that happens.

use std::{
    cell::OnceCell,
    fs,
    os::unix::{net::UnixStream, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, ExitStatus},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use mercury_lab_agent::protocol::Request;
use regex::Regex;
use serde_json::Value;

use rustix::process::Signal;

use crate::{
    command::{Background, Command, LIMIT, Output, patient},
    disks::{self, Disk, Disks},
    emulator::{Start, bochs, file, qmp::Qmp},
    error::{Context, Error, Result, wait_for},
    host,
    iommu::Iommu,
    link::{Link, System},
    reservation::Reservation,
    scene::Scene,
    spec::{Console, Platform, Spec, Vendor},
    terminal::Terminal,
};

mod start;

use start::{Prepared, start_emulator};

#[derive(Debug)]
pub struct Machine {
    spec: Spec,
    start: Start,
    process: Emulator,
    link: Link,
    kernel: String,
    boot_time: Duration,
    _slot: Option<Reservation>,
}

impl Machine {
    /// Boots a machine and waits until it takes commands. Builds the artefacts first if needed.
    /// Waits for a slot if two machines run already.
    ///
    /// # Errors
    /// If an artefact does not build, or the machine does not come up; the error shows its console.
    pub fn boot(spec: Spec) -> Result<Self> {
        let prepared = Prepared::new(spec)?;
        let slot = Reservation::of_built()?;
        prepared.start_first(Some(slot))
    }

    /// Boots a machine on a reservation of several machines, which its caller holds.
    ///
    /// # Errors
    /// As for [`Machine::boot`].
    pub fn boot_reserved(spec: Spec, _reservation: &Reservation) -> Result<Self> {
        Prepared::new(spec)?.start_first(None)
    }

    /// Boots another machine on this one's slot, while this machine is off.
    ///
    /// # Errors
    /// As for [`Machine::boot`], or if this machine runs.
    pub fn boot_in_its_place(&self, spec: Spec) -> Result<Self> {
        if !self.is_off()? {
            return Err(Error::Spec("two machines on one slot, and the first one runs".into()));
        }
        Prepared::new(spec)?.start_first(None)
    }

    /// Boots a machine with a shell on this terminal, and waits for its end.
    ///
    /// # Errors
    /// If an artefact does not build or QEMU does not start.
    pub fn shell(spec: Spec) -> Result<()> {
        let prepared = Prepared::new(spec.console(Console::Terminal))?;
        let terminal = Terminal::save();
        let mut process = prepared.start_emulator()?;
        let status = watch(&mut process, &terminal);
        drop(terminal);
        let status = status?;
        if prepared.meaning_of(status).success() {
            return Ok(());
        }
        Err(prepared.scene.blame(Error::Gone(format!("the emulator ended with {status}"))))
    }

    /// Cuts the power if it is still on, and starts the machine again with the disks as they are.
    ///
    /// # Errors
    /// As for [`Machine::boot`].
    pub fn start_again(self) -> Result<Self> {
        self.power_cut()?;
        let Self { spec, start, link, _slot, .. } = self;
        Prepared { spec, start, scene: link.scene }.start(_slot)
    }

    /// Cuts the power if it is still on, and starts another system on the disks as they are. That
    /// system brings back a machine with the agent in it. Returns when that agent answers.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn start_other(self, other: &Boot) -> Result<Self> {
        let _ = self.power_cut();
        let Self { spec, mut start, link, _slot, .. } = self;
        other.replace(&mut start.arguments);
        Prepared { spec, start, scene: link.scene }.start_asking(_slot)
    }

    /// Adds arguments to each later emulator of this machine, for hardware that was plugged in
    /// while the machine ran.
    pub fn keep_plugged(&mut self, arguments: &[&str]) {
        self.start.arguments.extend(arguments.iter().map(ToString::to_string));
    }

    /// Cuts the power if it is still on, and starts another system on the disks as they are: the
    /// destination of a move, in which no agent answers yet. The machine that arrives later may
    /// have the agent in it.
    ///
    /// # Errors
    /// If the emulator does not start.
    pub fn start_destination(self, other: &Boot) -> Result<Self> {
        let _ = self.power_cut();
        let Self { spec, mut start, link, kernel, _slot, .. } = self;
        other.replace(&mut start.arguments);
        Prepared { spec, start, scene: link.scene }.start_silent(_slot, kernel)
    }

    /// Cuts the power if it is still on, and starts the machine as its owner would: its firmware
    /// finds a boot loader on this disk. All later starts do the same.
    ///
    /// # Errors
    /// As for [`Machine::boot`].
    pub fn start_by_itself(self, from: Disk) -> Result<Self> {
        let _ = self.power_cut();
        let Self { spec, mut start, link, _slot, .. } = self;
        boot_from(from, &mut start.arguments);
        Prepared { spec, start, scene: link.scene }.start(_slot)
    }

    /// Cuts the power if it is still on, and starts the machine again with the disks as they are.
    /// The system that boots then brings back a machine with the agent in it. Returns when that
    /// agent answers.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn start_to_be_brought_back(self) -> Result<Self> {
        let _ = self.power_cut();
        let Self { spec, start, link, _slot, .. } = self;
        Prepared { spec, start, scene: link.scene }.start_asking(_slot)
    }

    /// Makes the kernel panic, and waits until the firmware has reset the machine.
    ///
    /// # Errors
    /// If the machine is not reset.
    pub fn crash(&self) -> Result<()> {
        let resets = || {
            let events = self.qmp()?.events();
            Ok(events.iter().filter(|event| event.name == "RESET").count())
        };
        let before = resets()?;
        let _panic = self.spawn("echo c > /proc/sysrq-trigger")?;
        wait_for("the machine to be reset", patient(LIMIT), || Ok((resets()? > before).then_some(())))
            .map_err(|error| self.blame_silent(error))
    }

    /// Cuts the power if it is still on, and boots another machine with the disks as they are. The
    /// other machine must have as many disks, on the same buses.
    ///
    /// # Errors
    /// As for [`Machine::boot`].
    pub fn start_as(self, spec: Spec) -> Result<Self> {
        let _ = self.power_cut();
        let Self { link, _slot, .. } = self;
        Prepared::at(spec, Some(link.scene))?.start(_slot)
    }

    /// Cuts the power if it is still on, and starts another system on the disks as they are, with
    /// no agent in it. The system runs until it ends by itself, or `limit` passes and the power is
    /// cut. Returns the console's text.
    ///
    /// # Errors
    /// If the emulator does not start.
    pub fn try_other(&self, other: &Boot, limit: Duration) -> Result<String> {
        let _ = self.power_cut();
        let before = self.serial_log().len();
        let mut arguments = self.start.arguments.clone();
        other.replace(&mut arguments);
        let started = Instant::now();
        let mut process = start_emulator(&self.link.scene, &self.spec, &self.start.program, &arguments)?;
        while started.elapsed() < limit
            && process.try_wait().context(|| "wait for the emulator".into())?.is_none()
        {
            thread::sleep(Duration::from_millis(1));
        }
        Emulator(Mutex::new(process)).kill()?;
        Ok(self.serial_log().get(before..).unwrap_or_default().to_owned())
    }

    /// Moves the machine into a new emulator by QEMU's own live migration, with these parameters.
    /// The old emulator stands still from then on. Also returns QEMU's report of the migration.
    ///
    /// # Errors
    /// If the new emulator does not start, or QEMU does not move the machine.
    pub fn migrate_by_qemu(&self, to: Spec, parameters: Value) -> Result<(Self, Value)> {
        let address = format!("tcp:127.0.0.1:{}", host::free_port()?);
        let prepared = Prepared::new(to.qemu_arg("-incoming").qemu_arg(&address))?;
        let qmp = self.qmp()?;
        qmp.execute("migrate-set-parameters", parameters)?;
        let moved = OnceCell::new();
        let machine = prepared.start_with(None, |client| {
            if moved.get().is_none() {
                let _ = moved.set(qmp.migrate(&address)?);
            }
            client.send(&Request::Hello)
        })?;
        Ok((machine, moved.into_inner().unwrap_or_default()))
    }

    /// Cuts the power if it is still on, and keeps the disks as they are.
    ///
    /// # Errors
    /// If a file cannot be renamed or made.
    pub fn keep_disks(&self) -> Result<Disks> {
        let _ = self.power_cut();
        Disks::keep(self.link.scene.dir(), self.spec.disks.len())
    }

    /// Copies the disks as a power cut would leave them now, and lets the machine run on. The
    /// emulator's process is stopped meanwhile.
    ///
    /// # Errors
    /// If the emulator cannot be stopped, or a file not be copied.
    pub fn copy_disks(&self, disks: &Disks, to: &Path) -> Result<Disks> {
        let pid = rustix::process::Pid::from_child(&self.process.lock());
        let send = |signal| {
            rustix::process::kill_process(pid, signal)
                .map_err(std::io::Error::from)
                .context(|| "stop the emulator".into())
        };
        send(Signal::STOP)?;
        let copied = disks.copy_to(to);
        send(Signal::CONT)?;
        copied
    }

    /// Returns the vendor of the machine's processor.
    #[must_use]
    pub fn vendor(&self) -> Vendor {
        self.spec.platform.vendor()
    }

    /// Returns true if the machine has a network card.
    #[must_use]
    pub fn has_network(&self) -> bool {
        self.spec.nic.is_some()
    }

    /// Returns the IOMMU in front of the machine's devices.
    #[must_use]
    pub fn iommu(&self) -> Option<Iommu> {
        self.spec.iommu
    }

    /// Returns the release of the running kernel.
    #[must_use]
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// Returns the file of the running kernel, if that is one of the lab's own.
    pub(crate) fn own_kernel(&self) -> Option<&Path> {
        self.spec.own_kernel.as_deref()
    }

    /// Returns the time from the emulator's start to the agent's first word, in wall time.
    #[must_use]
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Returns the arguments with which the emulator was started.
    #[must_use]
    pub fn arguments(&self) -> &[String] {
        &self.start.arguments
    }

    /// Returns the emulator's process ID on this host.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.lock().id()
    }

    /// Returns the emulator's processor time on this host, divided by the number of the machine's
    /// CPUs. This is the time that counts while the host has other work.
    ///
    /// # Errors
    /// If the emulator has ended.
    pub fn worked(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.pid());
        let stat = fs::read_to_string(&path).context(|| format!("read {path}"))?;
        let ticks =
            ticks_of(&stat).ok_or_else(|| Error::Host(format!("{path} has an unknown format: `{stat}`")))?;
        let seconds = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
        Ok(Duration::from_secs_f64(seconds / f64::from(self.spec.cpus)))
    }

    /// Returns a command line for the machine's shell.
    #[must_use]
    pub fn command(&self, line: &str) -> Command {
        self.link.command(line)
    }

    /// Returns a program for the machine, with no shell in between.
    #[must_use]
    pub fn program(&self, argv: &[&str]) -> Command {
        self.link.program(argv)
    }

    /// Runs a command line to its end, successful or not.
    ///
    /// # Errors
    /// If the command takes too long or the machine goes away.
    pub fn run(&self, line: &str) -> Result<Output> {
        self.link.run(line)
    }

    /// Runs a command line that must succeed. Returns its standard output without the last newline.
    ///
    /// # Errors
    /// If the command does not succeed.
    pub fn sh(&self, line: &str) -> Result<String> {
        self.link.sh(line)
    }

    /// Starts a command line and leaves it running.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn spawn(&self, line: &str) -> Result<Background> {
        self.link.spawn(line)
    }

    /// Starts PostgreSQL, with the pgbench database `bench`.
    ///
    /// # Errors
    /// If PostgreSQL does not start.
    pub fn start_postgres(&self) -> Result<()> {
        self.sh("lab-postgres start").map(drop)
    }

    /// Writes a file in the machine.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn put(&self, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
        self.link.put(path, bytes, mode)
    }

    /// Reads a file in the machine.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        self.link.get(path)
    }

    /// Returns QEMU's monitor.
    ///
    /// # Errors
    /// If the machine does not run in QEMU.
    pub fn qmp(&self) -> Result<&Qmp> {
        self.link.monitor.as_deref().ok_or(Error::Unsupported { reason: "Bochs has no monitor" })
    }

    /// Returns the port on 127.0.0.1 for `target remote`, if the machine's description asked for
    /// one.
    #[must_use]
    pub fn gdb_port(&self) -> Option<u16> {
        self.spec.gdb_port
    }

    /// Connects to the serial console of a machine whose console goes to a socket. Text that the
    /// machine prints without a connection is in its log only.
    ///
    /// # Errors
    /// If the machine's console goes elsewhere, or another connection exists.
    pub fn console(&self) -> Result<UnixStream> {
        self.link.scene.connect(file::CONSOLE).context(|| "connect to the machine's console".into())
    }

    /// Returns the whole text of the serial console.
    #[must_use]
    pub fn serial_log(&self) -> String {
        self.link.scene.serial_log()
    }

    /// Waits until the serial console matches a regular expression. Returns the match.
    ///
    /// # Errors
    /// If `limit` passes, or the pattern is not valid.
    pub fn wait_serial(&self, pattern: &str, limit: Duration) -> Result<String> {
        let regex = Regex::new(pattern).map_err(|error| Error::Spec(error.to_string()))?;
        let what = format!("/{pattern}/ on the serial console");
        let found = wait_for(&what, patient(limit), || {
            Ok(regex.find(&self.serial_log()).map(|found| found.as_str().to_owned()))
        });
        found.map_err(|error| self.link.scene.blame(error))
    }

    /// Waits until the agent of the machine's next boot answers, after a reset or a reboot.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn wait_reboot(&self, boots_before: u32) -> Result<()> {
        let what = "the machine to come up again";
        let up = wait_for(what, patient(self.spec.boot_limit), || {
            self.link.client.hello_after(boots_before, Duration::from_millis(100))
        });
        up.map(drop).map_err(|error| self.blame_silent(error))
    }

    /// Waits until the agent of a machine that was brought back answers. That agent has introduced
    /// itself before the checkpoint, so the host has to ask it.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn wait_other(&self, boots_before: u32) -> Result<()> {
        let what = "the machine to be brought back";
        let up = wait_for(what, patient(self.spec.boot_limit), || {
            self.link.ask(&Request::Hello)?;
            self.link.client.hello_after(boots_before, Duration::from_secs(1))
        });
        up.map(drop).map_err(|error| self.blame_silent(error))
    }

    /// Returns how often this machine has booted since the emulator started.
    #[must_use]
    pub fn boots(&self) -> u32 {
        self.link.client.boots()
    }

    /// Ends the emulator at once, as a power cut does. The disks stay as they are.
    ///
    /// # Errors
    /// If the emulator cannot be killed.
    pub fn power_cut(&self) -> Result<()> {
        self.process.kill()
    }

    /// Returns true if the emulator has ended.
    ///
    /// # Errors
    /// If the emulator's state cannot be read.
    pub fn is_off(&self) -> Result<bool> {
        let ended = self.process.lock().try_wait().context(|| "look after the emulator".into())?;
        Ok(ended.is_some())
    }

    /// Waits until the machine has ended by itself.
    ///
    /// # Errors
    /// If `limit` passes.
    pub fn wait_shutdown(&self, limit: Duration) -> Result<ExitStatus> {
        let ended = wait_for("the machine to end", patient(limit), || {
            self.process.lock().try_wait().context(|| "wait for the emulator".into())
        });
        let meaning = |status| meaning_of(self.spec.platform, &self.link.scene, status);
        ended.map(meaning).map_err(|error| self.blame_silent(error))
    }

    /// Waits until the machine is off, which this command moves elsewhere.
    ///
    /// # Errors
    /// If `limit` passes, or the command ends and the machine runs on.
    pub fn wait_moved(&self, moving: &mut Background, limit: Duration) -> Result<()> {
        /// The machine powers itself off after the command's end.
        const GOES: Duration = Duration::from_secs(20);
        let mut ended = None;
        let moved = wait_for("the machine to move", patient(limit), || {
            if self.process.lock().try_wait().context(|| "wait for the emulator".into())?.is_some() {
                return Ok(Some(()));
            }
            let since: &mut Option<Instant> = &mut ended;
            if moving.has_ended().unwrap_or(true)
                && since.get_or_insert_with(Instant::now).elapsed() > patient(GOES)
            {
                let said = moving.output_so_far()? + &moving.errors_so_far()?;
                return Err(Error::Unhealthy(format!("the machine has not moved: {said}")));
            }
            Ok(None)
        });
        moved.map_err(|error| self.blame_silent(error))
    }

    /// Powers the machine off from inside.
    ///
    /// # Errors
    /// If the machine does not end.
    pub fn shut_down(self) -> Result<()> {
        self.end()
    }

    fn end(&self) -> Result<()> {
        // The agent ends with the machine, so there may be no answer.
        let _background = self.spawn("poweroff");
        self.wait_shutdown(Duration::from_secs(60)).map(drop)
    }

    /// Powers the machine off from inside, and checks its root disk from outside: nothing may need
    /// repair.
    ///
    /// # Errors
    /// If the machine does not end, or with what is to be repaired.
    pub fn ends_clean(&self) -> Result<()> {
        let is_own = self.sh("findmnt -no FSTYPE /")? == "ext4";
        self.end()?;
        if is_own {
            disks::root_is_clean(self.link.scene.dir()).map_err(|error| self.blame(error))
        } else {
            Ok(())
        }
    }

    /// Adds to an error the machine's description and its last words, and keeps the evidence.
    #[must_use]
    pub fn blame(&self, error: Error) -> Error {
        self.link.scene.blame(error)
    }

    /// Adds the evidence to an error about something that did not happen in time: what the machine
    /// is doing.
    fn blame_silent(&self, error: Error) -> Error {
        self.link.blame_silent(error)
    }

    /// Finds out what this machine is doing, and adds the evidence to an error. Another machine's
    /// evidence may be in the error already.
    #[must_use]
    pub fn blame_examined(&self, error: Error) -> Error {
        self.link.blame_examined(error)
    }

    /// Marks the failure on this machine as expected, so that its evidence is not kept.
    pub fn forgive(&self) {
        self.link.scene.forgive();
    }
}

impl System for Machine {
    fn link(&self) -> &Link {
        &self.link
    }

    fn worked(&self) -> Result<Duration> {
        self.worked()
    }
}

/// A system to boot in place of the lab's own.
#[derive(Clone, Debug)]
pub struct Boot {
    /// The kernel's file on this host.
    pub kernel: PathBuf,
    /// The file of the initial RAM disk on this host.
    pub initramfs: PathBuf,
    pub command_line: String,
}

impl Boot {
    /// Returns the system with one more word on its command line.
    #[must_use]
    pub fn with(&self, word: &str) -> Self {
        Self { command_line: format!("{} {word}", self.command_line), ..self.clone() }
    }

    /// Replaces the kernel, initial RAM disk and command line among QEMU's arguments.
    fn replace(&self, arguments: &mut [String]) {
        let words = [
            ("-kernel", self.kernel.to_string_lossy().into_owned()),
            ("-initrd", self.initramfs.to_string_lossy().into_owned()),
            ("-append", self.command_line.clone()),
        ];
        for (flag, value) in words {
            if let Some(at) = arguments.iter().position(|argument| argument == flag) {
                arguments[at + 1] = value;
            }
        }
    }
}

/// Removes the kernel from QEMU's arguments, and makes this disk the boot disk.
fn boot_from(disk: Disk, arguments: &mut Vec<String>) {
    for flag in ["-kernel", "-initrd", "-append"] {
        if let Some(at) = arguments.iter().position(|argument| argument == flag) {
            arguments.drain(at..at + 2);
        }
    }
    // UEFI's firmware knows only the disks that it is told to try.
    let disks = if disk == Disk::Root { vec![disk] } else { vec![disk, Disk::Root] };
    for (index, disk) in disks.into_iter().enumerate() {
        let drive = format!("drive={},", disk.id());
        if let Some(device) = arguments.iter_mut().find(|argument| argument.contains(&drive)) {
            *device += &format!(",bootindex={index}");
        }
    }
}

/// Returns the exit status by its meaning. Bochs reports a power-off as a failure.
fn meaning_of(platform: Platform, scene: &Scene, status: ExitStatus) -> ExitStatus {
    match platform {
        Platform::Bochs(_) if bochs::has_powered_off(scene) => ExitStatus::from_raw(0),
        _ => status,
    }
}

/// The emulator's process, which ends when this value is dropped.
#[derive(Debug)]
struct Emulator(Mutex<Child>);

impl Emulator {
    fn lock(&self) -> MutexGuard<'_, Child> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kill(&self) -> Result<()> {
        let mut process = self.lock();
        process.kill().context(|| "kill the emulator".into())?;
        process.wait().context(|| "wait for the emulator".into()).map(drop)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Returns the user and system time of a process, from its `stat` (proc(5)). The process's name may
/// contain spaces and parentheses.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut times = rest.split_whitespace().skip(11).map(|ticks| ticks.parse::<u64>().ok());
    Some(times.next()?? + times.next()??)
}

/// Waits for QEMU's end, and ends QEMU if the terminal has been closed. Not every program between
/// the terminal and this process passes the hang-up on.
fn watch(process: &mut Child, terminal: &Terminal) -> Result<ExitStatus> {
    loop {
        if let Some(status) = process.try_wait().context(|| "wait for the emulator".into())? {
            return Ok(status);
        }
        if terminal.is_closed() {
            let _ = process.kill();
        }
        thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_of_a_process_is_parsed() {
        let stat = "42 (qemu (x) y) S 1 1 1 0 -1 4194560 100 0 0 0 1500 250 0 0 20 0 5 0 100 1000 10";
        assert_eq!(ticks_of(stat), Some(1750));
        assert_eq!(ticks_of("42 (qemu) S 1"), None);
    }
}
