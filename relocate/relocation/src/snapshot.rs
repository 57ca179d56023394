//! `mercury snapshot` and `mercury rollback`: a rollback of the whole machine, in memory.
//!
//! The snapshot is kept in the hypervisor and outlives this command. After each rollback everything
//! goes on inside this command, which therefore ends once more.

use crate::{
    options::SnapshotOptions,
    refusals::{self, Lifted, Operation, is_left_behind, is_on_disk},
};
use mercury_abi::ioctl::{
    MERCURY_SNAPSHOT_HASH, MERCURY_SNAPSHOT_KEEP, MERCURY_SNAPSHOT_ONCE, SnapshotRequest,
};
use mercury_control::{
    access,
    device::{Access, Device, Silent},
    driver::Driver,
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::{Render, Text, bytes, duration, thousands},
    rollback::Rollback,
    say::Say,
    status::nul_padded,
    sysroot::Sysroot,
};
use mercury_quiesce::{
    applications,
    attached::Attached,
    culprit, devices, disks, fence,
    freezer::Limited,
    hook,
    mounts::Mounted,
    phases::Phases,
    pool,
    stale::{Connections, Stale},
    stillness::{Extent, Stillness},
    swap, this_process,
    undo::UndoProcess,
    waits,
};
use serde::Serialize;
use std::time;

const PAGE: u64 = 4096;

/// The result of `mercury snapshot`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Report {
    /// A snapshot is kept.
    Kept {
        /// Bytes of memory in the snapshot.
        memory: u64,
        /// Bytes for copies.
        pool: u64,
        /// Microseconds for which everything stood still.
        pause_us: f64,
        /// Parts of that time.
        phases: Phases,
    },
    /// This machine was put back to the snapshot.
    RolledBack {
        /// How that went.
        #[serde(flatten)]
        rollback: Rollback,
        /// True if the snapshot is kept, so that the machine can go back again.
        again: bool,
    },
    /// The snapshot was given up.
    Dropped {
        /// Pages that had been copied.
        copied_pages: u64,
    },
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        match self {
            Self::Kept { memory, pool, pause_us, phases } => {
                to.line(format!("a snapshot of {} of memory is kept", bytes(*memory)));
                to.line(format!(
                    "everything stood still for {}; {} may be written to before it is lost",
                    duration(*pause_us),
                    bytes(*pool)
                ));
                phases.render(to);
            }
            Self::RolledBack { rollback, again } => {
                to.line(format!("this machine was put back to its snapshot: {}", rollback.text()));
                to.line(match again {
                    true => "the snapshot is kept for the next time; `mercury postmortem` shows what ended",
                    false => "the snapshot is gone; `mercury snapshot` keeps another one",
                });
            }
            Self::Dropped { copied_pages } => {
                to.line(format!(
                    "the snapshot was given up; {} pages had been copied",
                    thousands(*copied_pages)
                ));
            }
        }
    }
}

/// Keeps a snapshot, or gives it up.
///
/// # Errors
///
/// Returns an error if there is no snapshot in the end; the machine runs on.
pub fn run(args: &SnapshotOptions, say: Say<'_>) -> Result<Exit> {
    access::need_root("snapshot")?;
    if args.drop {
        let status = Device::open(Access::Control)?.snapshot_end()?.status;
        return Ok(say.done(&Report::Dropped { copied_pages: status.copied }));
    }
    let _deferred = Deferred::begin();
    this_process::stay_in_the_foreground();
    let sysroot = Sysroot::default();
    let lifted =
        refusals::lifted(&[(args.force_devices, Lifted::Devices), (args.force_disks, Lifted::Disks)]);
    refusals::refuse(Operation::Snapshot, &lifted, &sysroot)?;
    let mounts = disks::all(&sysroot)?;
    let (device, _) = access::loaded(args.module.as_deref(), "snapshot")?;
    let mut guard = UndoProcess::start()?;
    let attached = Attached::make(&device, &mut guard)?;
    let report = keep(args, &device, &mounts, &sysroot, &mut guard)?;
    // The hypervisor stays beneath the machine, because it holds the snapshot.
    attached.forget();
    drop(guard);
    Ok(say.done(&report))
}

/// Puts the machine back.
///
/// # Errors
///
/// Always returns an error if it returns.
pub fn rollback() -> Result<Exit> {
    access::need_root("rollback")?;
    Device::open(Access::Control)?.rollback()?;
    Err(Error::new(Exit::Failed, "the machine was not put back")
        .hint("`mercury status` shows if the snapshot is still there, `mercury log` what has happened"))
}

fn keep(
    args: &SnapshotOptions,
    device: &Device,
    mounts: &[Mounted],
    sysroot: &Sysroot,
    guard: &mut UndoProcess,
) -> Result<Report> {
    let pool = pool::pages(args.pool, pool::KEPT_MOST_MIB, sysroot)?;
    let hash = if args.compare { MERCURY_SNAPSHOT_HASH } else { 0 };
    let once = if args.once || args.put_back.is_some() { MERCURY_SNAPSHOT_ONCE } else { 0 };
    let flags = MERCURY_SNAPSHOT_KEEP | hash | once;
    let mut swap = swap::Off::switch(guard, sysroot)?;
    device.snapshot_prepare(pool, flags)?;
    let limited = Limited::set(guard, sysroot)?;
    let mut stale = connections(sysroot)?;
    let has_servers = fence::has_servers(sysroot);
    let has_left_behind = mounts.iter().any(is_left_behind);
    let compared = compared(mounts);
    // If disks are put back too, they must be in the state that memory expects. The kernel's own
    // freezer fails if a task waits for one that it has frozen already: for a FUSE server, or for
    // the lock of an NFS directory, whose holder was frozen while it waited for an answer.
    let has_disks = has_left_behind || args.hook.is_some() || args.put_back.is_some();
    let is_held = has_disks || has_servers || !waits::servers().is_empty();
    // A kernel without hooks for packets ends connections as early as it can. So does a machine
    // whose files come from a server: even a look-up of /proc may ask the server of the root.
    let fenced = !has_servers && device.fence(&[], Silent::Second).is_ok();
    if !is_held {
        applications::refuse_stuck(&[])?;
    }
    let begun = time::Instant::now();
    let still = if is_held {
        disks::sync(mounts, sysroot)?;
        let mounts = if has_left_behind { mounts } else { &[] };
        Some(Stillness::hold(
            Extent { needed: &[], mounts, arrays: has_disks, volumes: None },
            sysroot,
            guard,
        )?)
    } else {
        None
    };
    disks::are_still(mounts, sysroot)?;
    // A process may have opened a device or a disk since the first question.
    if !args.force_devices {
        devices::refuse_untracked(sysroot)?;
    }
    if !args.force_disks {
        refusals::refuse_disk_writers(sysroot)?;
    }
    let were = guard.hear_during(|| fingerprints(&compared));
    if let Some(hook) = &args.hook {
        hook::run_hook(hook)?;
    }
    guard.hear();
    let held = begun.elapsed();
    let failures = culprit::quiesce_failures(sysroot);
    let swap_pages = swap.pages(sysroot)?;
    let begin = device.snapshot_begin(pool, flags, swap_pages);
    drop(limited);
    let is_back = begin.as_ref().is_ok_and(|begin| begin.rolled_back != 0);
    // These disks need no command and no network, so they are compared first of all.
    let is_compared_first = !has_disks && !has_servers;
    if is_back && is_compared_first {
        put_disks_back(args, &compared, &were, guard).unwrap_or_else(|why| restart(&why));
    }
    // Without disks to put back, applications wait for nothing. A server of files that the machine
    // talked to after the instant may take minutes to answer, and this process waits for it below.
    if has_servers
        && !has_disks
        && let Some(still) = &still
    {
        still.thaw_applications(guard);
    }
    if is_back {
        if let Some(stale) = &mut stale {
            guard.hear_during(|| stale.end(sysroot));
        }
        let opened = device.fence_down_afresh();
        if !is_compared_first {
            put_disks_back(args, &compared, &were, guard).unwrap_or_else(|why| restart(&why));
        }
        opened?;
    }
    drop(still);
    // Applications run again here. Taking the fence down takes the kernel some time, but holds back
    // packets only.
    let pause_us = begun.elapsed().as_secs_f64() * 1e6;
    if fenced && begin.is_ok() && !is_back {
        device.fence_down()?;
    }
    let begin = begin.map_err(|error| culprit::name_culprit(error, failures, sysroot))?;
    if begin.rolled_back == 0 {
        swap::end_if_swap_changed(device, &swap)?;
    }
    drop(swap);
    if begin.rolled_back != 0 {
        let tsc_khz = device.system()?.tsc_khz;
        let rollback = Rollback::new(&begin.status.rollback, message(&begin), tsc_khz);
        return Ok(Report::RolledBack { rollback, again: begin.status.kept != 0 });
    }
    let phases = Phases::of(held, &begin, device)?;
    Ok(Report::Kept {
        memory: begin.memory_pages * PAGE,
        pool: begin.status.free_pages * PAGE,
        pause_us,
        phases,
    })
}

/// Prepares to end connections with peers, which will have gone on; programs make new ones. Without
/// this they end after minutes, but encryption would use its counters twice.
fn connections(sysroot: &Sysroot) -> Result<Option<Stale>> {
    if fence::has_servers(sysroot) {
        // Until then no part of this program may have to be read over the network.
        this_process::keep_in_memory()?;
    }
    Ok(Stale::prepare(Connections::All).ok())
}

/// Returns the file systems that must be the same after a rollback. A read-only one may be remounted and
/// written to after the instant, and the kernel of the instant remembers what it has read.
fn compared(mounts: &[Mounted]) -> Vec<Mounted> {
    mounts.iter().filter(|mount| is_on_disk(mount)).cloned().collect()
}

/// Returns the fingerprints of frozen or read-only file systems; `None` if there is none.
fn fingerprints(mounts: &[Mounted]) -> Vec<Option<String>> {
    mounts.iter().map(|mount| disks::fingerprint(&mount.device, &mount.kind).ok()).collect()
}

/// Puts the disks of a rolled-back machine back; returns the reason as a clause if that failed.
fn put_disks_back(
    args: &SnapshotOptions,
    mounts: &[Mounted],
    were: &[Option<String>],
    guard: &mut UndoProcess,
) -> std::result::Result<(), String> {
    if let Some(command) = &args.put_back {
        let run = || hook::run_still(command);
        guard.hear_during(run).map_err(|why| format!("the command of --put-back failed: {why}"))?;
    }
    match moved_on(mounts, were, &guard.hear_during(|| fingerprints(mounts))) {
        Some(mount) => Err(format!("{} was written to after the instant", mount.at.display())),
        None => Ok(()),
    }
}

/// Returns the first file system that has changed. One without a fingerprint is not compared.
fn moved_on<'a>(
    mounts: &'a [Mounted],
    were: &[Option<String>],
    are: &[Option<String>],
) -> Option<&'a Mounted> {
    let pairs = were.iter().zip(are);
    mounts.iter().zip(pairs).find(|(_, (was, is))| was.is_some() && was != is).map(|(mount, _)| mount)
}

/// Restarts this machine before any program writes to its disks, like a power cut.
fn restart(why: &str) -> ! {
    let text = format!("<2>mercury: this machine was put back, and its disks were not: {why}; it restarts\n");
    let _ = std::fs::write("/dev/kmsg", text);
    loop {
        // No sync, because the contents of memory do not belong on these disks.
        let _ = rustix::system::reboot(rustix::system::RebootCommand::Restart);
        std::thread::sleep(time::Duration::from_secs(1));
    }
}

/// Returns the last message of the kernel.
fn message(begin: &SnapshotRequest) -> String {
    let bytes: Vec<u8> = begin.message.iter().flat_map(|word| word.to_le_bytes()).collect();
    nul_padded(&bytes).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(device: &str, writable: bool) -> Mounted {
        let (number, kind) = ("8:1".to_owned(), "ext4".to_owned());
        Mounted { number, at: "/mnt".into(), kind, device: device.into(), writable }
    }

    #[test]
    fn writable_disks_are_left_behind_by_a_rollback() {
        assert!(is_left_behind(&mount("/dev/sda1", true)));
        assert!(is_left_behind(&mount("/dev/mapper/root", true)));
        assert!(!is_left_behind(&mount("/dev/sda1", false)));
        assert!(!is_left_behind(&mount("/dev/ram0", true)));
        assert!(!is_left_behind(&mount("/dev/zram1", true)));
    }

    #[test]
    fn read_only_disks_are_compared_too() {
        let disks = [mount("/dev/sda1", true), mount("/dev/sdb1", false)];
        let ram = [mount("/dev/ram0", false), mount("/dev/zram1", true)];
        assert_eq!(compared(&[&disks[..], &ram].concat()), disks);
    }

    #[test]
    fn a_changed_file_system_is_found() {
        let mounts = [mount("/dev/sda1", true), mount("/dev/sdb1", true)];
        let fingerprints = |all: [Option<&str>; 2]| all.map(|one| one.map(str::to_owned));
        let were = fingerprints([None, Some("1")]);
        assert_eq!(moved_on(&mounts, &were, &were), None);
        assert_eq!(
            moved_on(&mounts, &were, &fingerprints([Some("1"), Some("1")])),
            None,
            "it had no fingerprint"
        );
        for is in [Some("2"), None] {
            assert_eq!(moved_on(&mounts, &were, &fingerprints([None, is])), Some(&mounts[1]));
        }
    }
}
