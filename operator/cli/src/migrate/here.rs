//! This machine, which moves: what [`System`] wants done is done by the driver, the guard, control groups and file systems.

use super::{
    copy::Proof,
    doubt::{Doubt, Hails, Silence},
    link::Link,
    log::{Log, prepare},
    marks::Marks,
    mirror::Mirror,
    mover::Departure,
    no_way_back,
    offer::Offer,
    operator::Operator,
    report::Told,
    system::{After, System},
};
use crate::{
    args::MigrateArgs,
    checkpoint::{
        self,
        applications::{Brake, Frozen},
        arrays::Arrays,
        describe,
        disks::{self, Mounted, Still},
        fence,
        guard::{Guard, Undo},
        patient, pool, swap,
    },
    commands::Say,
    device::{Device, Silent},
    error::{Error, Result},
    ethernet::{self, made},
    exit::Exit,
    interrupt::Deferred,
    output::Format,
    progress,
    sysroot::Sysroot,
};
use mercury_abi::ioctl::{MERCURY_SNAPSHOT_HASH, MERCURY_SNAPSHOT_TRACK};
use mercury_image::FileSystem;
use mercury_migration::{
    protocol::{Attempt, Mark},
    session::Line,
};
use std::{
    fs::File,
    net::SocketAddr,
    thread::{self, JoinHandle},
    time::Duration,
};

/// The pool has room for what the small kernel of the other end occupies, in MiB.
const POOL_LEAST: u64 = 192;

/// What stands still, and what is off, until it is dropped.
#[derive(Debug, Default)]
pub struct Held {
    // In the order in which they go on.
    still: Option<Still>,
    arrays: Option<Arrays>,
    frozen: Option<Frozen>,
    swap: Option<swap::Off>,
}

/// What the machine is moved with.
pub struct With<'a> {
    /// What the operator wants.
    pub args: &'a MigrateArgs,
    /// Who is told.
    pub say: Say<'a>,
    /// What is known of it.
    pub sysroot: &'a Sysroot,
    /// Who wants it stopped.
    pub deferred: &'a Deferred,
    /// The driver.
    pub device: &'a Device,
    /// Who sets it going if this process does not.
    pub guard: &'a mut Guard,
}

/// This machine.
pub struct Here<'a> {
    with: With<'a>,
    marks: Option<Marks>,
    pool: u64,
    /// The snapshot's.
    flags: u64,
    mounts: Vec<Mounted>,
    held: Held,
    /// Where the load outruns the connection.
    brake: Option<Brake>,
    silence: Silence,
    /// How often a device had not stopped, before the instant.
    quiesce_failures: u64,
    /// Whether standard output can be written to when everything stands still.
    may_write: bool,
}

fn failed(what: &str, error: &std::io::Error) -> Error {
    Error::new(Exit::Failed, format!("{what}: {error}")).hint("nothing was changed")
}

impl<'a> Here<'a> {
    /// Makes everything ready, with `marks` where a mark outlasts a power cut; nothing stands still yet.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn make_ready(
        with: With<'a>,
        marks: Option<Marks>,
        (to, line, link): (SocketAddr, Line, Link),
    ) -> Result<(Self, Departure<'a>)> {
        let With { args, sysroot, device, .. } = with;
        // Whoever calls it off is heard, and the machine goes on, though the server of its files has gone silent.
        checkpoint::keep_in_memory()?;
        let attempt = Attempt(checkpoint::random()?);
        let secret = checkpoint::random()?;
        let hails = Hails::open(&line, attempt, &secret, ethernet::cards(sysroot))
            .map_err(|error| failed("frames on the network", &error))?;
        let doubt = Doubt::of(&line, attempt, secret, hails.cards());
        with.guard.will(&Undo::CallOff(Box::new(doubt))).map_err(|error| failed("the guard", &error))?;
        let mirror = Mirror::open(&args.with_disk, device, sysroot)?;
        let pool = pool::pages(args.pool, pool::GROWING_MOST_MIB, sysroot)?;
        let least = POOL_LEAST + mirror.memory_there();
        let pool = if args.pool.is_some() { pool } else { pool.max(least << 8) };
        // Before the first page is sent: what is read back is sent, too.
        let swap = swap::Off::switch(with.guard, sysroot)?;
        let proof = args.verify_instant.then(Proof::default);
        let hashes = if proof.is_some() { MERCURY_SNAPSHOT_HASH } else { 0 };
        let log = prepare(device, pool, args.hash, hashes)?;
        let mounts = disks::all(sysroot)?;
        let mut machine = describe::describe(sysroot);
        describe::add_restart(&mut machine, &device.snapshot_machine()?);
        let compared = disks::to_be_compared(&mounts, sysroot);
        machine.file_systems = compared.iter().map(disks::name).collect();
        let disks = mirror.offered(&mounts);
        let cpus = sysroot.online_cpus().iter().count();
        let offer = Offer { machine, cpus, disks, hails: secret, streams: streams(args) };
        let here = Self {
            marks: marks.map(|marks| marks.of(attempt)),
            pool,
            flags: hashes | if matches!(log, Log::Prepared) { MERCURY_SNAPSHOT_TRACK } else { 0 },
            mounts,
            held: Held { swap: Some(swap), ..Held::default() },
            brake: None,
            silence: Silence::prepare(),
            quiesce_failures: 0,
            may_write: checkpoint::may_be_written(sysroot),
            with,
        };
        let operator = Operator::at_console();
        let departure = Departure {
            attempt,
            to,
            line,
            link,
            hails,
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

    /// What still stands still, and whether standard output can be written to then.
    #[must_use]
    pub fn into_rest(self) -> (Held, bool) {
        (self.held, self.may_write)
    }
}

/// By how many streams pages go.
fn streams(args: &MigrateArgs) -> u32 {
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
    }

    fn tell(&mut self, told: &Told) {
        if !matches!(told, Told::Doubt { .. }) {
            self.with.say.one_of_many(told);
        } else if self.may_write && self.with.say.format == Format::Json {
            // A person reads of a doubt at the console. Nobody may hold this up who stands still, or is behind the fence.
            super::say_if_anybody_reads(serde_json::to_string(told).unwrap_or_default() + "\n");
        }
    }

    fn show(&self, line: &str) {
        if self.with.say.format == Format::Text {
            progress::line(line);
        }
    }

    fn begin_sync(&mut self) -> JoinHandle<()> {
        // So that little is left to be locked when everything stands still. Where it cannot be, that is told then.
        let _ = checkpoint::keep_in_memory();
        // Whoever waits for it has a limit of its own.
        const LIMIT: Duration = Duration::from_secs(3600);
        thread::spawn(|| drop(patient::sync_everything(LIMIT)))
    }

    fn hold_back(&mut self, percent: u8) -> Result<()> {
        if percent > 0 && self.brake.is_none() {
            self.brake = Some(Brake::new(self.with.guard)?);
        }
        if let Some(brake) = &self.brake {
            brake.set(percent);
        }
        Ok(())
    }

    fn fence_off(&mut self, but: SocketAddr) -> Result<()> {
        // What has come since the move began, too.
        checkpoint::keep_in_memory()?;
        let peer: fence::Peer = but.into();
        self.with.device.fence(&[peer.into()], Silent::First)
    }

    fn hold_still(&mut self) -> Result<()> {
        let With { args, sysroot, guard, .. } = &mut self.with;
        let frozen = match self.brake.take() {
            Some(brake) => brake.hold(guard)?,
            None => Frozen::hold(guard, &[])?,
        };
        // What was there when the move began may have changed.
        let mounts = disks::all(sysroot)?;
        if mounts != self.mounts {
            return Err(Error::new(Exit::Failed, "file systems were mounted or unmounted meanwhile")
                .hint("try again"));
        }
        // Nobody who runs can open one any more.
        if !args.force_devices {
            checkpoint::refuse_untracked(sysroot)?;
        }
        self.quiesce_failures = checkpoint::quiesce_failures(sysroot);
        let arrays = Arrays::hold(guard, sysroot)?;
        let still = Still::hold(&mounts, guard)?;
        arrays.wait(sysroot)?;
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
        let begin = device
            .snapshot_begin(self.pool, self.flags, swap_pages)
            .map_err(|error| checkpoint::name_culprit(error, self.quiesce_failures, sysroot))?;
        if begin.restored != 0 {
            return Ok(After::Arrived);
        }
        self.held.swap.as_ref().map_or(Ok(()), |swap| checkpoint::end_if_swap_changed(device, swap))?;
        Ok(After::Source)
    }

    fn end_instant(&mut self) -> Result<()> {
        self.with.device.snapshot_end().map(drop)
    }

    fn commit(&mut self, doubt: Doubt, console: Option<File>) -> Result<()> {
        self.with.device.fence_stays()?;
        no_way_back::begin(console);
        let doubt = Doubt { mark: self.marks.as_ref().map(Marks::standing), ..doubt };
        let guard = &mut *self.with.guard;
        guard.will(&Undo::Open).and_then(|()| guard.will(&Undo::Decide(Box::new(doubt)))).map_err(
            |error| {
                Error::new(Exit::Failed, format!("the guard process is gone: {error}"))
                    .hint("see in `dmesg` what has killed it, such as a lack of memory, and try again")
            },
        )?;
        self.silence.keep();
        Ok(())
    }

    fn mark(&mut self, mark: Mark) -> Result<(), String> {
        self.marks.as_mut().map_or(Ok(()), |marks| marks.write(mark))
    }

    fn go_on(&mut self) {
        no_way_back::end();
        self.with.guard.is_decided();
        // Who was silent must not be so when applications run.
        let _ = self.with.device.fence_down();
        self.silence.end();
        self.held = Held::default();
        self.brake = None;
        self.with.guard.is_released();
    }
}
