//! `mercury migrate --dry-run`: an estimate of a move, measured on this machine alone. Nothing is
//! sent, and nothing stands still.

use super::{
    copy::Pass,
    course::{self, Course},
    log::prepare,
};
use crate::{
    migrate::{mirror::Mirror, offer::kept},
    options::MigrateOptions,
};
use mercury_control::{
    access,
    device::{Cursor, Device},
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::{Render, Text, bytes, thousands},
    progress,
    say::Say,
    sysroot::Sysroot,
};
use mercury_image::Machine;
use mercury_migration::{
    rounds::Next,
    wire::{Content, Ledger, PAGE, Page, Pages},
};
use mercury_quiesce::{attached::Attached, describe, patient, pool, undo::UndoProcess};
use serde::Serialize;
use std::{
    thread,
    time::{Duration, Instant},
};

const BATCH: usize = 128;
/// Rate of the wire if the operator sets none: a gigabit a second.
const WIRE: u64 = 125_000_000;
/// Least time for which writes of the load are counted: as long as a round of a move takes.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time for which disks and servers may write back file data.
const SYNC_PATIENCE: Duration = Duration::from_secs(600);

/// The estimate of a move.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Prediction {
    /// Source of the changed pages: a dirty log, or hashes of all memory and the reason.
    found_by: String,
    /// Bytes of memory.
    memory: u64,
    /// Bytes that the first round sends.
    first_round_bytes: u64,
    /// Seconds for reading and hashing pages that may have changed.
    reading_seconds: f64,
    /// Pages that the load writes in a second.
    dirty_pages_per_second: f64,
    /// Bytes of a page on the wire.
    bytes_per_page: f64,
    /// Rate of the wire that the estimate uses, in bytes a second.
    wire: u64,
    /// Bytes of the disks that would move too. All of them are sent first.
    disks: u64,
    /// Bytes a second in chunks of these disks that the load writes to.
    dirty_disk_bytes_per_second: f64,
    /// Number of rounds.
    rounds: u32,
    /// Pages that are left for the time in which applications stand still.
    last_pages: u64,
    /// True if the move would be given up because of `--or-give-up`.
    gives_up: bool,
    /// Expected downtime in milliseconds.
    downtime_ms: f64,
    /// Duration of the whole move in seconds.
    seconds: f64,
}

impl Render for Prediction {
    fn render(&self, to: &mut Text) {
        to.line(format!(
            "{} of memory, of which {} go over the wire in the first round",
            bytes(self.memory),
            bytes(self.first_round_bytes)
        ));
        to.line(format!(
            "{} pages a second are written to, as found by {}; reading them takes {:.1} s",
            thousands(self.dirty_pages_per_second as u64),
            self.found_by,
            self.reading_seconds
        ));
        if self.disks > 0 {
            to.line(format!(
                "{} of disks move too, before memory; {}/s of them are written to",
                bytes(self.disks),
                bytes(self.dirty_disk_bytes_per_second as u64)
            ));
        }
        let end = if self.gives_up { "after which it would be given up, for" } else { "of which" };
        to.line(format!(
            "with {}/s on the wire: about {:.0} s in all, {} rounds, {end} applications {} still for about \
             {:.1} s",
            bytes(self.wire),
            self.seconds,
            self.rounds,
            if self.gives_up { "would stand" } else { "stand" },
            self.downtime_ms / 1e3
        ));
    }
}

/// The measurements on this machine.
#[derive(Clone, Copy, Debug)]
struct Measured {
    first: Scan,
    /// Pages that were written to since the first scan.
    second: Scan,
    /// Time between the two scans.
    between: Duration,
    has_log: bool,
    wire: u64,
}

impl Measured {
    fn per_second(&self) -> f64 {
        self.second.changed as f64 / self.between.as_secs_f64().max(0.001)
    }

    fn per_page(&self) -> f64 {
        self.second.packed as f64 / self.second.changed.max(1) as f64
    }

    /// Makes a round that sends so many bytes, after a scan of memory.
    fn round(&self, scan: &Scan, sent: u64, packed: u64) -> Pass {
        let on_the_wire = Duration::from_secs_f64(packed as f64 / self.wire as f64);
        let took = scan.took.max(on_the_wire);
        Pass { scanned: scan.scanned, sent, changed: sent, bytes: packed, took, ..Pass::default() }
    }

    /// Computes the rounds as the policy of a move decides: each sends the pages that were written
    /// to during the one before.
    fn course(&self, mut course: Course, most: u32) -> (u32, Pass, Duration, Next) {
        let mut pass = self.round(&self.first, self.first.changed, self.first.packed);
        let mut total = pass.took;
        let mut outlook = course.after(&pass, self.has_log, Duration::ZERO);
        let mut rounds = 1;
        let mut share = 1.0;
        while let Next::Copy { throttle_percent } = outlook.next
            && rounds < most
        {
            let written = self.per_second() * share * pass.took.as_secs_f64();
            share = 1.0 - f64::from(throttle_percent) / 100.0;
            // The load cannot write to more pages than there are.
            let sent = (written as u64).min(self.first.scanned);
            // The duration of a scan is proportional to the pages that it reads.
            let part = sent as f64 / self.second.changed.max(1) as f64;
            let took = if self.has_log { self.second.took.mul_f64(part.min(1e3)) } else { self.second.took };
            let scan = Scan { took, ..self.second };
            pass = self.round(&scan, sent, (sent as f64 * self.per_page()) as u64);
            total += pass.took;
            outlook = course.after(&pass, self.has_log, Duration::ZERO);
            rounds += 1;
        }
        pass.took = total;
        (rounds, pass, outlook.downtime, outlook.next)
    }
}

/// The result of a scan of memory.
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    scanned: u64,
    changed: u64,
    packed: u64,
    took: Duration,
}

pub fn run(args: &MigrateOptions, say: Say<'_>, sysroot: &Sysroot, deferred: &Deferred) -> Result<Exit> {
    super::course::refuse_hopeless(args)?;
    super::refuse_unmovable(args, sysroot)?;
    let device = access::loaded_for_move(args.module.as_deref(), "migrate")?;
    let mut guard = UndoProcess::start()?;
    let attached = Attached::for_move(&device, &mut guard)?;
    let predicted = predict(args, &device, sysroot, deferred);
    let detached = attached.undo();
    say.done(&predicted?);
    detached?;
    guard.is_undone();
    Ok(Exit::Done)
}

/// Adds disks to an estimate: they are sent first, and written chunks are sent again.
fn with_disks(memory: Prediction, disks: u64, dirty_disk: f64) -> Prediction {
    // During the time for the written chunks more are written. Their compression is unknown, so
    // none is assumed.
    let last = 2.0 * dirty_disk / memory.wire as f64;
    Prediction {
        disks,
        dirty_disk_bytes_per_second: dirty_disk,
        downtime_ms: memory.downtime_ms + last * 1e3,
        seconds: memory.seconds + disks as f64 / memory.wire as f64 + last,
        ..memory
    }
}

fn predict(
    args: &MigrateOptions,
    device: &Device,
    sysroot: &Sysroot,
    deferred: &Deferred,
) -> Result<Prediction> {
    let mut log = prepare(device, pool::pages(args.pool, pool::GROWING_MOST_MIB, sysroot)?, args.hash, 0)?;
    let mut machine = Machine::default();
    describe::add_restart(&mut machine, &device.snapshot_machine()?);
    let mut ledger = Ledger::new(kept(&machine));
    let disks = Mirror::open(&args.with_disk, device, sysroot)?;
    disks.watch()?;
    let begun = Instant::now();
    log.begin(device);
    let first = scan(device, &mut ledger, args, 0, deferred, "all memory")?;
    // The first scan of all memory takes long, so pages written during it would give a wrong rate.
    // The measurement begins here.
    let from = Instant::now();
    scan(device, &mut ledger, args, log.collect(device), deferred, "pages written during the scan")?;
    wait(INTERVAL, deferred)?;
    let only = log.collect(device);
    let between = from.elapsed();
    let second = scan(device, &mut ledger, args, only, deferred, "pages written in a second")?;
    // File data in memory will be written to the disk too, so it is counted.
    patient::sync_everything(SYNC_PATIENCE).map_err(|error| {
        Error::new(Exit::Failed, format!("file data cannot be written back to disk: {error}")).hint(
            "find the disk or server that does not answer: a process in state D waits for it (ps, \
                 /proc/PID/stack)",
        )
    })?;
    let dirty_disk = disks.written()? as f64 / begun.elapsed().as_secs_f64().max(0.001);
    disks.unwatch();
    // If this fails, closing the device ends the prepared snapshot.
    let _ = device.snapshot_end();
    let measured = Measured {
        first,
        second,
        between,
        has_log: only != 0,
        wire: args.bandwidth.map_or(WIRE, |mib| mib << 20).max(1),
    };
    let memory = predicted(args, &measured, log.found_by(), machine.kept_pages() * PAGE as u64);
    Ok(with_disks(memory, disks.bytes(), dirty_disk))
}

fn predicted(args: &MigrateOptions, measured: &Measured, found_by: String, memory: u64) -> Prediction {
    let limits = course::limits(args);
    let (rounds, last, downtime, next) = if args.rounds == 0 {
        // Everything is sent while applications stand still.
        let all = measured.round(&measured.first, measured.first.changed, measured.first.packed);
        (0, Pass { took: Duration::ZERO, ..all }, course::guess(Duration::ZERO).sum() + all.took, None)
    } else {
        let (rounds, last, downtime, next) = measured.course(Course::new(limits), args.rounds);
        (rounds, last, downtime, Some(next))
    };
    let gives_up = matches!(next, Some(Next::GiveUp { .. }));
    Prediction {
        found_by,
        memory,
        first_round_bytes: measured.first.packed,
        reading_seconds: measured.second.took.as_secs_f64(),
        dirty_pages_per_second: measured.per_second(),
        bytes_per_page: measured.per_page(),
        wire: measured.wire,
        rounds,
        last_pages: last.sent,
        gives_up,
        disks: 0,
        dirty_disk_bytes_per_second: 0.0,
        downtime_ms: downtime.as_secs_f64() * 1e3,
        seconds: (last.took + if gives_up { Duration::ZERO } else { downtime }).as_secs_f64(),
    }
}

fn wait(interval: Duration, deferred: &Deferred) -> Result<()> {
    let end = Instant::now() + interval;
    while Instant::now() < end {
        refuse_interrupted(deferred)?;
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn refuse_interrupted(deferred: &Deferred) -> Result<()> {
    if deferred.requested() {
        return Err(Error::new(Exit::Interrupted, "interrupted: nothing was changed"));
    }
    Ok(())
}

/// Scans the frames that `MERCURY_READ_*` name.
fn scan(
    device: &Device,
    ledger: &mut Ledger,
    args: &MigrateOptions,
    only: u64,
    deferred: &Deferred,
    what: &str,
) -> Result<Scan> {
    let (begun, mut shown) = (Instant::now(), Instant::now());
    let mut scan = Scan::default();
    let mut cursor = Cursor { next_phys: 0, end_phys: u64::MAX };
    while !cursor.is_done() {
        refuse_interrupted(deferred)?;
        let frames = device.snapshot_read_present_some(&mut cursor, BATCH, only)?;
        scan.scanned += frames.phys.len() as u64;
        let mut pages = Pages::default();
        let (all, _) = frames.data.as_chunks::<PAGE>();
        for (phys, page) in frames.phys.iter().zip(all) {
            let is_zero = page.iter().all(|byte| *byte == 0);
            let content = if is_zero { Content::Zero } else { Content::Data(page) };
            let noted = ledger.note(Page { phys: *phys, content });
            if noted.map_err(Error::fault)? {
                pages.add(*phys, page);
            }
        }
        if !pages.is_empty() {
            scan.changed += pages.len() as u64;
            let packed = pages.pack(args.level).map_err(|error| Error::fault(error.to_string()))?;
            scan.packed += packed.len() as u64;
        }
        if shown.elapsed() > Duration::from_millis(500) {
            shown = Instant::now();
            progress::line(&format!("{what}: {} so far", bytes(scan.packed)));
        }
    }
    progress::line("");
    scan.took = begun.elapsed();
    Ok(scan)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Estimates the move of a machine of 2 GiB that writes so many pages a second.
    fn predict(options: &str, per_second: u64) -> Prediction {
        let args = MigrateOptions::of(options);
        let all = 500_000;
        let measured = Measured {
            first: Scan { scanned: all, changed: all, packed: all * 2048, took: Duration::from_secs(2) },
            second: Scan {
                scanned: per_second + 4000,
                changed: per_second,
                packed: per_second * 2048,
                took: Duration::from_millis(50),
            },
            between: INTERVAL,
            has_log: true,
            wire: args.bandwidth.map_or(WIRE, |mib| mib << 20),
        };
        predicted(&args, &measured, "a dirty log".into(), all * PAGE as u64)
    }

    #[test]
    fn a_higher_write_rate_predicts_a_longer_downtime() {
        let mut before = predict("", 0);
        assert!(before.rounds <= 3 && before.downtime_ms < 600.0, "{before:?}");
        for rate in [1_000, 10_000, 100_000, 1_000_000] {
            let next = predict("--max-throttle 0", rate);
            assert!(next.downtime_ms >= before.downtime_ms - 1.0, "{before:?} {next:?}");
            before = next;
        }
        assert!(before.downtime_ms > 2000.0, "{before:?}");
    }

    #[test]
    fn a_dry_run_gives_up_as_a_move_would() {
        assert!(predict("--or-give-up --max-throttle 0", 1_000_000).gives_up);
        assert!(!predict("--or-give-up", 1_000).gives_up);
        assert!(!predict("--max-throttle 0", 1_000_000).gives_up);
    }

    #[test]
    fn without_rounds_all_goes_over_at_the_end() {
        let all = predict("--rounds 0 --bandwidth 100", 1_000);
        assert!(all.rounds == 0 && all.downtime_ms > 9_000.0 && all.last_pages == 500_000, "{all:?}");
    }
}
