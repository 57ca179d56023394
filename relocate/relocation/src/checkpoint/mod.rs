//! `mercury checkpoint`: the whole machine into a file, while it runs on.
//!
//! 1. The hypervisor is slipped beneath the machine, if it is not there.
//! 2. If there are local disks, applications are held still and file systems frozen
//!    ([`mercury_quiesce::applications`], [`disks`]).
//! 3. The driver lets the kernel stop its devices. All CPUs meet in the hypervisor, and the
//!    contents of memory at this instant are kept.
//! 4. Everything runs on, unless the machine is to be powered off. Memory is streamed into the
//!    image ([`stream`], [`target`]), with a description of the machine ([`describe`]).
//! 5. The hypervisor is taken out again, if it was not there before.
//!
//! Pages that have not changed since a parent's instant may be left out: [`incremental`]. Several
//! images one after the other: [`series`].
//!
//! The parts of the story have files of their own: [`still`] holds everything for the instant, [`fenced`]
//! keeps the network silent, [`refuse`] has the refusals that depend on options, [`report`] the report.
//!
//! If the process is killed, [`mercury_quiesce::undo`] undoes its changes to the machine.
//!
//! A machine that is restored from the image goes on after step 3, too: see [`Instant`].

mod fenced;
pub mod incremental;
mod once;
mod refuse;
pub mod report;
pub mod series;
mod still;
pub mod stream;
pub mod target;

use crate::{
    images::image_error,
    options::CheckpointOptions,
    random::random,
    refusals::{self, Lifted, Operation},
    restore::{
        MEMORY_LEAST_MIB,
        fit::{Room, refuse_unrestorable},
        memory_of_environment,
    },
    values::Name,
};
use fenced::{Fenced, raise_fence};
use incremental::Before;
use mercury_abi::{
    code::Code,
    ioctl::{MERCURY_SNAPSHOT_HASH, SnapshotRequest},
};
use mercury_control::{
    access,
    device::Device,
    error::{Error, Result},
    exit::Exit,
    history::{Action, Attempt, Figures, Outcome},
    interrupt::Deferred,
    output::{Render, Text, thousands},
    progress,
    say::Say,
    sysroot::Sysroot,
};
use mercury_image::{Identity, Machine, Writer};
use mercury_quiesce::{
    applications,
    attached::Attached,
    culprit, describe, devices, disks, fence,
    freezer::Limited,
    guest, hardware, hook, mounts, patient,
    phases::Phases,
    pool, returned,
    stillness::{Extent, Stillness},
    swap, this_process,
    undo::{Undo, UndoProcess},
    volumes, waits, watchdogs,
};
use refuse::{
    below, next_disks, no_parent, path_of, refuse_blind, refuse_crowded, refuse_outdated, refuse_unreachable,
};
use report::{Report, how_far};
use series::Series;
use std::{
    fs::File,
    io::{self, BufWriter},
    path::Path,
    time,
};
use still::Held;
use stream::{Source, Watch, stream};
use target::Target;

const PAGE: u64 = 4096;

/// Interval at which the line of progress changes.
const INTERVAL: time::Duration = time::Duration::from_millis(500);

/// Makes one checkpoint, or a series.
///
/// # Errors
///
/// Returns an error if there is no image in the end; the machine runs on.
pub fn run(args: &CheckpointOptions, say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    let sysroot = Sysroot::default();
    access::need_root("checkpoint")?;
    this_process::stay_in_the_foreground();
    // Later no path may be looked up: the root's server may be behind the fence.
    let may_tell = !args.poweroff || this_process::may_be_written(&sysroot);
    match (args.every, &args.image) {
        (None, image) => {
            let before = match &args.incremental {
                Some(None) => return Err(no_parent()),
                Some(Some(parent)) => Before::open(parent)?,
                None => Before::default(),
            };
            let (report, held) = recorded(|| one(args, image, before, &sysroot, &deferred))?;
            finish(args, say, may_tell, &report, held)
        }
        (Some(interval), Name::Path(path)) if !path.starts_with("/dev/") => {
            series(args, say, path, interval.0, &sysroot, &deferred)
        }
        (Some(_), _) => Err(Error::new(Exit::Usage, "--every makes files, one after the other")
            .hint("name a file on a file system that may change, such as a network file system")),
    }
}

/// Makes one image after the other until Ctrl-C. A failed image does not end the series.
fn series(
    args: &CheckpointOptions,
    say: Say<'_>,
    path: &Path,
    interval: time::Duration,
    sysroot: &Sysroot,
    deferred: &Deferred,
) -> Result<Exit> {
    let mut made = 0_u64;
    let mut series = Series::new(args);
    while !deferred.requested() {
        let begun = time::Instant::now();
        let next = series::next(path, time::SystemTime::now());
        let made_one = next.and_then(|next| {
            let image = Name::Path(next.clone());
            let before = series.before(made == 0)?;
            Ok((recorded(|| one(args, &image, before, sysroot, deferred))?.0, next))
        });
        match made_one {
            Ok((report, next)) => {
                made += 1;
                say.one_of_many(&report);
                // The next round may succeed in removing them.
                if let Err(error) = series::prune(path, &next, args.keep.into()) {
                    eprintln!("mercury checkpoint: {error}");
                }
                series.add(next, report.parent.is_some());
            }
            Err(error) if made == 0 || error.exit == Exit::Interrupted => return Err(error),
            Err(error) => eprintln!("mercury checkpoint: {error}; trying again"),
        }
        deferred.sleep(interval.saturating_sub(begun.elapsed()));
    }
    Ok(Exit::Done)
}

/// Reports the result, and powers the machine off if that is wanted.
fn finish(
    args: &CheckpointOptions,
    say: Say<'_>,
    may_tell: bool,
    report: &Report,
    held: Held,
) -> Result<Exit> {
    let off = args.poweroff && !report.restored;
    if args.image == Name::Stdout {
        // The image went to standard output.
        let mut text = Text::new(false);
        report.render(&mut text);
        eprint!("{}", text.finish());
    } else if !off || may_tell {
        say.done(report);
    }
    if !off {
        return Ok(Exit::Done);
    }
    // No dirty data is written to the disks any more, and frozen file systems cannot be unmounted.
    // SAFETY: touches no memory of this process.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    let error = std::io::Error::last_os_error();
    let text = format!("the machine could not be powered off: {error}");
    let hint = "it runs on, so its disks change: the image can be restored only with the disks as they were";
    // The machine uses its connections again as soon as nothing holds it.
    let noted = match &args.image {
        Name::Path(path) => returned::note_at(path, None),
        Name::Remote { .. } | Name::Stdout => Err(std::io::ErrorKind::Unsupported.into()),
    };
    drop(held);
    let end = if noted.is_ok() { ". Its connections end then" } else { ". Remove it: its keys are used on" };
    Err(Error::new(Exit::Failed, text).hint(format!("{hint}{end}")))
}

/// Makes an image, and records the outcome for `mercury metrics`.
fn recorded(make: impl FnOnce() -> Result<(Report, Held)>) -> Result<(Report, Held)> {
    let attempt = Attempt::begin(Action::Checkpoint);
    let made = make();
    attempt.end(made.as_ref().map(|(report, _)| match report.restored {
        true => (Outcome::Continued, None),
        false => (Outcome::Done, Some(Figures { pause_seconds: report.pause_us / 1e6, bytes: report.image })),
    }));
    made
}

/// Makes one image; with --poweroff the machine stands still after it.
fn one(
    args: &CheckpointOptions,
    image: &Name,
    before: Before,
    sysroot: &Sysroot,
    deferred: &Deferred,
) -> Result<(Report, Held)> {
    let begun = time::Instant::now();
    if let Name::Path(path) = image {
        patient::reach(path)?;
    }
    let lifted =
        refusals::lifted(&[(args.force_devices, Lifted::Devices), (args.force_offline, Lifted::Offline)]);
    let operation = if args.poweroff { Operation::PowerOff } else { Operation::Checkpoint };
    refusals::refuse(operation, &lifted, sysroot)?;
    refuse_unreachable(args, image, sysroot)?;
    refuse_outdated(args, image, sysroot)?;
    before.refuse_loss(image)?;
    // Only the process that controls the driver writes images.
    let (device, _) = access::loaded(args.module.as_deref(), "checkpoint")?;
    // The undo process knows of the file before it is made: a killed command leaves none behind.
    let mut guard = UndoProcess::start()?;
    let mut announce = |part: &Path| {
        guard
            .will(&Undo::Remove(part.to_owned()))
            .map_err(|error| io::Error::other(format!("the undo process is gone: {error}")))
    };
    // Another command may have made the same file meanwhile: it stays.
    let target = Target::open(image, args.overwrite, &mut announce).inspect_err(|_| guard.is_undone())?;
    let attached = Attached::make(&device, &mut guard)?;
    let (mut report, rest) = match checkpoint(args, &device, target, before, sysroot, deferred, &mut guard) {
        Ok((report, rest)) if report.restored => {
            watchdogs::arm_again(sysroot);
            attached.forget();
            (report, rest)
        }
        result => {
            let detached = attached.undo();
            let done = result?;
            detached?;
            done
        }
    };
    if !report.restored {
        report.seconds = begun.elapsed().as_secs_f64();
    }
    let (still, swap) = rest;
    if still.is_none() {
        guard.is_undone();
    }
    Ok((report, Held { _device: device, _still: still, _swap: swap, _guard: guard }))
}

/// Everything that stays held until the machine is off.
type HeldUntilOff = (Option<Stillness>, Option<swap::Off>);

/// The image that is to be made.
struct New {
    identity: Identity,
    before: Before,
}

/// The instant, and everything that is held still for it.
struct Instant {
    machine: Machine,
    restored: bool,
    pause: time::Duration,
    phases: Phases,
    /// The memory of the environment that restores the machine, in MiB.
    environment_mib: u64,
    still: Option<Stillness>,
    /// Switched on again when file systems can be written to.
    swap: Option<swap::Off>,
    fenced: Fenced,
    readiness: guest::Readiness,
    /// What the machine did not get back as a guest.
    missing: Vec<String>,
}

fn checkpoint(
    args: &CheckpointOptions,
    device: &Device,
    mut target: Target,
    before: Before,
    sysroot: &Sysroot,
    deferred: &Deferred,
    guard: &mut UndoProcess,
) -> Result<(Report, HeldUntilOff)> {
    let new = New { identity: Identity(random()?), before };
    let pool = pool::pages(args.pool, pool::GROWING_MOST_MIB, sysroot)?;
    let mut instant = reach(args, device, &target, new.identity, sysroot, pool, guard)?;
    let mut report = Report {
        identity: new.identity.to_string(),
        parent: new.before.lineage().last().map(Identity::to_string),
        restored: instant.restored,
        memory: 0,
        image: 0,
        zero_pages: 0,
        duplicate_pages: 0,
        unchanged_pages: 0,
        copied_pages: 0,
        added_pages: 0,
        returned_pages: 0,
        hurries: 0,
        waits: 0,
        pause_us: instant.pause.as_secs_f64() * 1e6,
        phases: std::mem::take(&mut instant.phases),
        stream_seconds: 0.0,
        seconds: 0.0,
        warning: None,
    };
    if instant.restored {
        report.warning = (!instant.missing.is_empty()).then(|| instant.missing.join("; "));
        target.forget();
        return Ok((report, HeldUntilOff::default()));
    }
    report.warning = instant.fenced.unfenced.take();
    if !args.poweroff {
        let has_disks = instant.machine.file_systems.iter().any(|one| one.frozen);
        if has_disks && args.hook.is_none() {
            report.warning = Some(WARNING.to_owned());
        }
        instant.still = None;
        instant.swap = None;
        guard.is_released();
        instant.fenced.runs_on(device)?;
    } else {
        instant.readiness.stay();
    }
    instant.machine.parents = new.before.lineage();
    instant.machine.ends_connections = Some(instant.fenced.ends_connections());
    instant.machine.ran_on = !args.poweroff;
    let streaming = time::Instant::now();
    let begun = Writer::begin(&mut target, new.identity, &instant.machine).map_err(image_error);
    let written = begun.and_then(|mut writer| {
        write(args, device, &mut writer, new.before, &instant, deferred, guard).map(|()| writer)
    });
    // The machine gets the pool back in any case. Only the end of the snapshot proves that all
    // frames were those of the instant: without the commit record there is no image.
    let status = device.snapshot_end();
    report.stream_seconds = streaming.elapsed().as_secs_f64();
    let writer = written.map_err(|error| tell_of_pool(error, status.as_ref().ok()))?;
    let status = status?;
    if !args.poweroff && !args.force_devices {
        devices::refuse_begun(sysroot)?;
    }
    let (commit, image) = writer.commit().map_err(image_error)?;
    guard.hear_during(|| target.finish()).map_err(|error| image_error(error.into()))?;
    report.memory = commit.frames * PAGE;
    report.image = image;
    report.zero_pages = commit.zeros;
    report.duplicate_pages = commit.duplicates;
    report.unchanged_pages = commit.unchanged;
    report.copied_pages = status.status.copied;
    (report.added_pages, report.returned_pages) = (status.added_pages, status.returned_pages);
    (report.hurries, report.waits) = (status.status.hurries, status.status.waits);
    Ok((report, (instant.still.take(), instant.swap.take())))
}

/// Adds the pool's history to the error if the snapshot was given up because the pool was empty.
fn tell_of_pool(mut error: Error, ended: Option<&SnapshotRequest>) -> Error {
    if error.code == Some(Code::SnapshotPool)
        && let Some(SnapshotRequest { status, added_pages, returned_pages, .. }) = ended
    {
        error.message += &format!(
            "; before that, streaming was told {} times to hurry, writers waited {} times, and the pool \
             got {} pages more and gave {} back",
            thousands(status.hurries),
            thousands(status.waits),
            thousands(*added_pages),
            thousands(*returned_pages)
        );
    }
    error
}

const WARNING: &str = "this machine has local disks, which go on changing; the image can only be restored \
    with the disks as they were at the instant. --poweroff leaves them so, --hook makes a snapshot of \
    them at the same moment.";

/// Holds everything still, and takes the instant.
fn reach(
    args: &CheckpointOptions,
    device: &Device,
    target: &Target,
    identity: Identity,
    sysroot: &Sysroot,
    pool: u64,
    guard: &mut UndoProcess,
) -> Result<Instant> {
    let mounts = disks::all(sysroot)?;
    refuse_blind(args, &mounts, sysroot)?;
    if let Some(mount) = below(&mounts, target, sysroot).filter(|mount| mount.writable) {
        let text = format!(
            "the image would lie on the file system at {}, which must not change",
            mount.at.display()
        );
        return Err(Error::new(Exit::Failed, text)
            .hint("write it to a block device of its own, a network file system, or ssh://host/path"));
    }
    let mut readiness = guest::Readiness::prepare(sysroot);
    let mut machine = describe::describe(sysroot);
    hardware::add_hardware(&mut machine, sysroot, device)?;
    // Everything that needs no standstill is done before it, with most of the writing.
    let flags = if args.hashes.is_some() { MERCURY_SNAPSHOT_HASH } else { 0 };
    let mut swap = swap::Off::switch(guard, sysroot)?;
    machine.swap = swap.describe(sysroot);
    machine.missing_drivers = readiness.missing().to_vec();
    machine.served = mounts::served(sysroot);
    device.snapshot_prepare(pool, flags)?;
    describe::add_restart(&mut machine, &device.snapshot_machine()?);
    if args.poweroff && !args.force_devices {
        refuse_unrestorable(&machine, sysroot)?;
    }
    let environment_mib = match args.poweroff && !args.force_devices {
        true => memory_of_environment(path_of(&args.image), args.module.as_deref(), sysroot)?,
        false => MEMORY_LEAST_MIB,
    };
    disks::sync(&mounts, sysroot)?;
    let _limited = Limited::set(guard, sysroot)?;
    let mut fenced = raise_fence(args, device, target, identity, sysroot)?;
    // Applications that go on after the instant would act on the world, and their actions would be
    // lost with the machine's first life. The kernel's own freezer knows no order, and would wait
    // in vain: for a FUSE server, or for the lock of an NFS directory whose holder it has frozen.
    let must_rest = args.poweroff
        || mounts.iter().any(|mount| mount.writable)
        || fence::has_servers(sysroot)
        || !waits::servers().is_empty();
    if !must_rest {
        applications::refuse_stuck(&[])?;
    }
    let begun = time::Instant::now();
    let (needed, volumes) = (target.processes(), next_disks(args));
    let extent = Extent { needed: &needed, mounts: &mounts, arrays: volumes.is_some(), volumes };
    let still = if must_rest { Some(Stillness::hold(extent, sysroot, guard)?) } else { None };
    disks::are_still(&mounts, sysroot)?;
    // A process may have opened a device since the first question.
    if !args.force_devices {
        devices::refuse_untracked(sysroot)?;
    }
    // A fingerprint may need many reads, so all disks are read at once.
    machine.file_systems = guard.hear_during(|| disks::describe_all(&mounts));
    // A hook's snapshot is useless, too, if a restore cannot tell that it was put back.
    if (args.poweroff || args.hook.is_some()) && !args.force_devices {
        disks::refuse_without_fingerprint(&machine.file_systems)?;
    }
    guard.hear();
    if let Some(hook) = &args.hook {
        hook::run_hook(hook)?;
        guard.hear();
        // The hook may have told a thin pool to make a snapshot.
        volumes::wait(sysroot)?;
    }
    guard.hear();
    let held = begun.elapsed();
    let failures = culprit::quiesce_failures(sysroot);
    let begin = device
        .snapshot_begin(pool, flags, swap.pages(sysroot)?)
        .map_err(|error| culprit::name_culprit(error, failures, sysroot))?;
    hardware::note_instant(&mut machine);
    let pause = begun.elapsed();
    let restored = begin.restored != 0;
    let mut missing = if restored { readiness.arrive().unwrap_or_default() } else { Vec::new() };
    if restored {
        // A server of files may take a minute to answer the restored machine.
        missing.extend(guard.hear_during(|| fenced.has_returned(device, sysroot))?);
        missing.extend(guard.hear_during(|| readiness.note(sysroot)));
    } else {
        swap::end_if_swap_changed(device, &swap)?;
    }
    let phases = Phases::of(held, &begin, device)?;
    Ok(Instant {
        machine,
        restored,
        pause,
        phases,
        environment_mib,
        still,
        swap: Some(swap),
        fenced,
        readiness,
        missing,
    })
}

fn write(
    args: &CheckpointOptions,
    device: &Device,
    writer: &mut Writer<&mut Target>,
    before: Before,
    instant: &Instant,
    deferred: &Deferred,
    guard: &mut UndoProcess,
) -> Result<()> {
    let total = instant.machine.kept_pages();
    // A program that shows the terminal's lines may stand still, and then writing them would block.
    let silent = instant.still.is_some();
    let begun = time::Instant::now();
    let mut shown = begun;
    let mut progress = |frames: u64, image: u64| {
        guard.hear();
        if !silent && shown.elapsed() >= INTERVAL {
            shown = time::Instant::now();
            progress::line(&how_far(frames, total, image, begun.elapsed()));
        }
    };
    let stop = || match deferred.requested() {
        true => Err(Error::new(Exit::Interrupted, "interrupted: there is no image, and the machine runs on")),
        false => Ok(()),
    };
    let mut watch = Watch { progress: &mut progress, stop: &stop };
    let mut room = Room::new(&instant.machine.ranges, instant.environment_mib);
    let hashes = args.hashes.as_ref().map(File::create).transpose();
    let hashes = hashes.map_err(|error| {
        Error::new(Exit::Failed, format!("--hashes: {error}")).hint("name a file that can be written")
    })?;
    let source = Source { device, before, hashes: hashes.map(BufWriter::new) };
    let result = stream(source, writer, args.level, &mut room, &mut watch);
    if !silent {
        progress::line("");
    }
    result?;
    // The image may have zeros where the parent has a page.
    let is_whole = instant.machine.parents.is_empty();
    let must_fit = args.poweroff && is_whole && !args.force_devices;
    if must_fit { refuse_crowded(room, instant.environment_mib) } else { Ok(()) }
}
