//! The real machine that moves. Implements [`System`] by the driver, the undo process, control
//! groups and file systems.

use super::{
    by_host::HostLine,
    copy::Proof,
    doubt::{Announcements, Doubt, Silence},
    link::Link,
    log::{Log, prepare},
    mirror::Mirror,
    mover::Departure,
    no_way_back,
    offer::Offer,
    report::MoveEvent,
    system::{After, System},
};
use crate::{operator::Operator, options::MigrateOptions, random::random, tombstone::Tombstones};
use mercury_abi::ioctl::{MERCURY_SNAPSHOT_HASH, MERCURY_SNAPSHOT_TRACK};
use mercury_control::{
    device::{Device, Silent},
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::Format,
    progress,
    say::Say,
    sysroot::Sysroot,
};
use mercury_image::FileSystem;
use mercury_migration::{
    protocol::{Attempt, Tombstone},
    session::PairingToken,
};
use mercury_quiesce::{
    applications::{Frozen, Throttle},
    arrays::Arrays,
    culprit, describe, devices,
    disks::{self, Still},
    ethernet::{self, made},
    fence,
    freezer::Limited,
    guest::{Readiness, is_guest},
    hardware,
    mounts::Mounted,
    patient, pool, swap, this_process,
    undo::{Step, Undo, UndoProcess},
    volumes::{self, Disks},
};
use std::{
    fs::File,
    net::SocketAddr,
    thread::{self, JoinHandle},
    time::Duration,
};

/// Least size of the pool in MiB: room for pages at addresses that the destination's restore
/// environment occupies.
const POOL_LEAST: u64 = 192;

/// Applications, disks and swap that are held until this is dropped.
#[derive(Debug, Default)]
pub struct Held {
    // In the order in which they go on.
    still: Option<Still>,
    arrays: Option<Arrays>,
    frozen: Option<Frozen>,
    swap: Option<swap::Off>,
}

/// The means of a move.
pub struct With<'a> {
    /// Options of the operator.
    pub args: &'a MigrateOptions,
    /// Output of the command.
    pub say: Say<'a>,
    /// Root of sysfs and procfs.
    pub sysroot: &'a Sysroot,
    /// Signals that stop the move.
    pub deferred: &'a Deferred,
    pub device: &'a Device,
    /// Undo process, which lets the machine go on if this process dies.
    pub guard: &'a mut UndoProcess,
    /// The host's operator, who may have ordered the move.
    pub host: &'a HostLine,
}

/// The real machine that moves.
pub struct Here<'a> {
    with: With<'a>,
    tombstones: Option<Tombstones>,
    pool: u64,
    /// Flags of the snapshot.
    flags: u64,
    mounts: Vec<Mounted>,
    held: Held,
    /// Throttle of the load, if it writes more than the connection carries.
    throttle: Option<Throttle>,
    silence: Silence,
    /// Failures of devices to stop, counted before the instant.
    quiesce_failures: u64,
    /// True if standard output can be written to while everything stands still.
    may_write: bool,
    /// What the machine needs if its destination runs it as a guest.
    readiness: Readiness,
}

fn failed(what: &str, error: &std::io::Error) -> Error {
    Error::new(Exit::Failed, format!("{what}: {error}")).hint("nothing was changed")
}

impl<'a> Here<'a> {
    /// Prepares the move, with `tombstones` if there is a tombstone that survives a power cut; nothing
    /// stands still yet.
    ///
    /// # Errors
    ///
    /// Returns the reason if the move cannot be prepared.
    pub fn make_ready(
        with: With<'a>,
        tombstones: Option<Tombstones>,
        (to, token, link): (SocketAddr, PairingToken, Link),
    ) -> Result<(Self, Departure<'a>)> {
        let With { args, sysroot, device, .. } = with;
        // The process that calls the move off must get the announcements through, and the machine
        // must go on, even if the server of its files has gone silent.
        this_process::keep_in_memory()?;
        let attempt = Attempt(random()?);
        let secret = random()?;
        let announcements = Announcements::open(&token, attempt, &secret, ethernet::cards(sysroot))
            .map_err(|error| failed("announcements on the network", &error))?;
        let doubt = Doubt::of(&token, attempt, secret, announcements.cards());
        Step::of(&doubt)
            .and_then(|step| with.guard.will(&Undo::CallOff(step)))
            .map_err(|error| failed("the undo process", &error))?;
        let mirror = Mirror::open(&args.with_disk, device, sysroot)?;
        let pool = pool::pages(args.pool, pool::GROWING_MOST_MIB, sysroot)?;
        let least = POOL_LEAST + mirror.memory_there();
        let pool = if args.pool.is_some() { pool } else { pool.max(least << 8) };
        // Before the first page is sent: a guest may not be able to read drivers.
        let readiness = Readiness::prepare(sysroot);
        // Before the first page is sent, because pages that are read back are sent too.
        let swap = swap::Off::switch(with.guard, sysroot)?;
        let proof = args.verify_instant.then(Proof::default);
        let hashes = if proof.is_some() { MERCURY_SNAPSHOT_HASH } else { 0 };
        let log = prepare(device, pool, args.hash, hashes)?;
        let mounts = disks::all(sysroot)?;
        let mut machine = describe::describe(sysroot);
        describe::add_restart(&mut machine, &device.snapshot_machine()?);
        hardware::add_hardware(&mut machine, sysroot, device)?;
        machine.swap = swap.describe(sysroot);
        machine.missing_drivers = readiness.missing().to_vec();
        let compared = disks::to_be_compared(&mounts, sysroot);
        machine.file_systems = compared.iter().map(disks::name).collect();
        let disks = mirror.offered(&mounts);
        let cpus = sysroot.online_cpus().iter().count();
        let offer = Offer { machine, cpus, disks, secret, streams: streams(args), is_guest: is_guest() };
        let here = Self {
            tombstones: tombstones
                .map(|tombstones| tombstones.of(attempt).with_disks(!args.with_disk.is_empty())),
            pool,
            flags: hashes | if matches!(log, Log::Prepared) { MERCURY_SNAPSHOT_TRACK } else { 0 },
            mounts,
            held: Held { swap: Some(swap), ..Held::default() },
            throttle: None,
            silence: Silence::prepare(),
            quiesce_failures: 0,
            may_write: this_process::may_be_written(sysroot),
            readiness,
            with,
        };
        let operator = Operator::at_console();
        let departure = Departure {
            attempt,
            to,
            token,
            link,
            announcements,
            offer,
            bridges: made::given_bridges(sysroot),
            memory: device,
            log,
            proof,
            mirror,
            operator,
        };
        Ok((here, departure))
    }

    /// Returns what is still held, true if standard output can be written to then, and what a guest needs.
    #[must_use]
    pub fn into_remains(self) -> (Held, bool, Readiness) {
        (self.held, self.may_write, self.readiness)
    }
}

/// Returns the number of streams for pages.
fn streams(args: &MigrateOptions) -> u32 {
    const USUAL_MOST: usize = 4;
    let usual = thread::available_parallelism().map_or(1, usize::from).min(USUAL_MOST);
    args.streams.unwrap_or(usual as u32)
}

impl System for Here<'_> {
    fn is_interrupted(&self) -> bool {
        self.with.deferred.requested()
    }

    fn is_alive(&mut self) {
        self.with.guard.hear();
        self.with.host.alive();
    }

    fn tell(&mut self, told: &MoveEvent) {
        self.with.host.event(told);
        if !matches!(told, MoveEvent::Doubt { .. }) {
            self.with.say.one_of_many(told);
        } else if self.may_write && self.with.say.format == Format::Json {
            // People read of a doubt at the console. A reader that stands still, or is behind the
            // fence, must not block this process.
            super::print_if_possible(serde_json::to_string(told).unwrap_or_default() + "\n");
        }
    }

    fn show(&self, line: &str) {
        if self.with.say.format == Format::Text {
            progress::line(line);
        }
    }

    fn begin_sync(&mut self) -> JoinHandle<()> {
        // Locks memory early, so that little is left to be locked when everything stands still. A
        // failure is reported then.
        let _ = this_process::keep_in_memory();
        // The callers of this have limits of their own.
        const LIMIT: Duration = Duration::from_secs(3600);
        thread::spawn(|| drop(patient::sync_everything(LIMIT)))
    }

    fn hold_back(&mut self, percent: u8) -> Result<()> {
        if percent > 0 && self.throttle.is_none() {
            self.throttle = Some(Throttle::new(self.with.guard)?);
        }
        if let Some(throttle) = &self.throttle {
            throttle.set(percent);
        }
        Ok(())
    }

    fn fence_off(&mut self, but: SocketAddr) -> Result<()> {
        // Memory that was mapped since the move began is locked too.
        this_process::keep_in_memory()?;
        let peer: fence::Peer = but.into();
        self.with.device.fence(&[peer.into()], Silent::First)
    }

    fn hold_still(&mut self) -> Result<()> {
        let With { args, sysroot, guard, .. } = &mut self.with;
        let frozen = match self.throttle.take() {
            Some(throttle) => throttle.hold(guard)?,
            None => Frozen::hold(guard, &[])?,
        };
        // The mounts may have changed since the move began.
        let mounts = disks::all(sysroot)?;
        if mounts != self.mounts {
            return Err(Error::new(Exit::Failed, "file systems were mounted or unmounted during the move")
                .hint("try again"));
        }
        // Applications stand still now, so no process can open a device any more.
        if !args.force_devices {
            devices::refuse_untracked(sysroot)?;
        }
        self.quiesce_failures = culprit::quiesce_failures(sysroot);
        volumes::refuse_restless(Disks::AsLeft, sysroot)?;
        let arrays = Arrays::hold(guard, sysroot)?;
        let still = Still::hold(&mounts, guard)?;
        arrays.wait(sysroot)?;
        volumes::wait(sysroot)?;
        self.held.still = Some(still);
        self.held.arrays = Some(arrays);
        self.held.frozen = Some(frozen);
        Ok(())
    }

    fn file_systems(&mut self) -> Vec<FileSystem> {
        let With { sysroot, guard, .. } = &mut self.with;
        let compared = disks::to_be_compared(&self.mounts, sysroot);
        guard.hear_during(|| disks::describe_all(&compared))
    }

    fn take_instant(&mut self) -> Result<After> {
        let With { sysroot, device, guard, .. } = &mut self.with;
        guard.hear();
        let swap_pages = self.held.swap.as_mut().map_or(Ok(0), |swap| swap.pages(sysroot))?;
        let _limited = Limited::set(guard, sysroot)?;
        let begin = device
            .snapshot_begin(self.pool, self.flags, swap_pages)
            .map_err(|error| culprit::name_culprit(error, self.quiesce_failures, sysroot))?;
        if begin.restored != 0 {
            return Ok(After::Arrived);
        }
        self.held.swap.as_ref().map_or(Ok(()), |swap| swap::end_if_swap_changed(device, swap))?;
        Ok(After::Source)
    }

    fn end_instant(&mut self) -> Result<()> {
        self.with.device.snapshot_end().map(drop)
    }

    fn commit(&mut self, doubt: Doubt, console: Option<File>) -> Result<()> {
        self.with.device.fence_stays()?;
        no_way_back::begin(console);
        let doubt = Doubt { tombstone: self.tombstones.as_ref().map(Tombstones::standing), ..doubt };
        let guard = &mut *self.with.guard;
        guard.will(&Undo::Open).and_then(|()| guard.will(&Undo::Decide(Step::of(&doubt)?))).map_err(
            |error| {
                Error::new(Exit::Failed, format!("the undo process is gone: {error}"))
                    .hint("see in `dmesg` what has killed it, such as a lack of memory, and try again")
            },
        )?;
        self.silence.keep();
        Ok(())
    }

    fn tombstone(&mut self, tombstone: Tombstone) -> Result<(), String> {
        self.tombstones.as_mut().map_or(Ok(()), |tombstones| tombstones.write(tombstone))
    }

    fn go_on(&mut self) {
        no_way_back::end();
        self.with.guard.is_decided();
        // The network must be open again when applications run.
        let _ = self.with.device.fence_down();
        self.silence.end();
        self.held = Held::default();
        self.throttle = None;
        self.with.guard.is_released();
    }
}
