//! `mercury migrate --dry-run`: what a move would come to, measured on this machine alone. Nothing is sent, and nothing
//! stands still.

use super::course::guess;
use crate::{
    args::MigrateArgs,
    checkpoint::{self, Attached, describe, guard::Guard},
    commands::{self, Say},
    device::{Cursor, Device},
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    migrate::{mirror::Mirror, offer::kept},
    output::{Render, Text, bytes, thousands},
    progress,
    sysroot::Sysroot,
};
use mercury_image::Machine;
use mercury_migration::wire::{Content, Ledger, PAGE, Page, Pages};
use serde::Serialize;
use std::time::{Duration, Instant};

const BATCH: usize = 128;
/// What a wire carries if nothing else is said: a gigabit a second.
const WIRE: u64 = 125_000_000;

/// What a move would come to.
#[derive(Clone, Debug, Serialize)]
struct Prediction {
    /// How what has changed was found. A move goes by a log of writes where there can be one, and stands still for less then.
    found_by: &'static str,
    /// Bytes of memory.
    memory: u64,
    /// Bytes that the first round sends.
    first_round_bytes: u64,
    /// Seconds for reading and hashing all of memory.
    reading_seconds: f64,
    /// Pages that the load writes in a second.
    dirty_pages_per_second: f64,
    /// What a page takes on the wire.
    bytes_per_page: f64,
    /// The wire that was reckoned with, in bytes a second.
    wire: u64,
    /// Bytes of the disks that would go along, all of which are sent first.
    disks: u64,
    /// Of these, what the load writes to in a second, by chunks.
    dirty_disk_bytes_per_second: f64,
    /// The downtime that is to be expected.
    downtime_ms: f64,
    /// All of it.
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
            "reading all of it takes {:.1} s; {} pages a second are written meanwhile",
            self.reading_seconds,
            thousands(self.dirty_pages_per_second as u64)
        ));
        if self.disks > 0 {
            to.line(format!(
                "{} of disks go along, before memory; {}/s of them are written to",
                bytes(self.disks),
                bytes(self.dirty_disk_bytes_per_second as u64)
            ));
        }
        to.line(format!(
            "with {}/s on the wire: about {:.0} s in all, of which applications stand still for about {:.1} s",
            bytes(self.wire),
            self.seconds,
            self.downtime_ms / 1e3
        ));
        to.line(format!(
            "this is by {}; where there can be a log of writes a move goes by that, and applications stand still for less",
            self.found_by
        ));
    }
}

/// A look at all of memory.
struct Look {
    changed: u64,
    packed: u64,
    took: Duration,
}

pub fn run(args: &MigrateArgs, say: Say<'_>, sysroot: &Sysroot, deferred: &Deferred) -> Result<Exit> {
    let (device, _) = commands::loaded(args.module.module.as_deref(), "migrate")?;
    let mut guard = Guard::start()?;
    let attached = Attached::make(&device, &mut guard)?;
    let predicted = predict(args, &device, sysroot, deferred);
    let detached = attached.undo();
    say.done(&predicted?);
    detached?;
    guard.is_undone();
    Ok(Exit::Done)
}

fn predict(
    args: &MigrateArgs,
    device: &Device,
    sysroot: &Sysroot,
    deferred: &Deferred,
) -> Result<Prediction> {
    device.snapshot_prepare(checkpoint::pool_pages(args.pool, sysroot), 0)?;
    let mut machine = Machine::default();
    describe::add_restart(&mut machine, &device.snapshot_machine()?);
    let mut ledger = Ledger::new(kept(&machine));
    let disks = Mirror::open(&args.with_disk, sysroot)?;
    disks.watch(device)?;
    let begun = Instant::now();
    let first = look(device, &mut ledger, args.level, deferred, "what there is")?;
    let second = look(device, &mut ledger, args.level, deferred, "what is written")?;
    // Where it was written but to memory, it will be written to the disk.
    rustix::fs::sync();
    let dirty_disk = disks.written(device)? as f64 / begun.elapsed().as_secs_f64().max(0.001);
    disks.unwatch(device);
    let wire = args.bandwidth.map_or(WIRE, |mib| mib << 20).max(1);
    let reading = second.took.as_secs_f64();
    let rate = second.changed as f64 / first.took.as_secs_f64().max(0.001);
    let per_page = second.packed as f64 / second.changed.max(1) as f64;
    let last = rate * reading * per_page / wire as f64;
    let fixed = guess(second.took);
    let fixed = (fixed.quiesce + fixed.hand_over + fixed.start).as_secs_f64();
    // As long as what was written to disks takes, more of it is; nothing is known of how it can be compressed.
    let last_disk = 2.0 * dirty_disk / wire as f64;
    let downtime = fixed + last + last_disk;
    let first_round = first.took.as_secs_f64().max(first.packed as f64 / wire as f64);
    Ok(Prediction {
        found_by: "hashes of all memory",
        memory: machine.kept_pages() * PAGE as u64,
        first_round_bytes: first.packed,
        reading_seconds: reading,
        dirty_pages_per_second: rate,
        bytes_per_page: per_page,
        wire,
        disks: disks.bytes(),
        dirty_disk_bytes_per_second: dirty_disk,
        downtime_ms: downtime * 1e3,
        seconds: disks.bytes() as f64 / wire as f64 + first_round + reading + downtime,
    })
}

fn look(device: &Device, ledger: &mut Ledger, level: i32, deferred: &Deferred, what: &str) -> Result<Look> {
    let (begun, mut shown) = (Instant::now(), Instant::now());
    let mut look = Look { changed: 0, packed: 0, took: Duration::ZERO };
    let mut cursor = Cursor { next_phys: 0, end_phys: u64::MAX };
    while !cursor.is_done() {
        if deferred.requested() {
            return Err(Error::new(Exit::Interrupted, "interrupted: nothing was changed"));
        }
        let frames = device.snapshot_look(&mut cursor, BATCH)?;
        let mut pages = Pages::default();
        let (all, _) = frames.data.as_chunks::<PAGE>();
        for (phys, page) in frames.phys.iter().zip(all) {
            let is_zero = page.iter().all(|byte| *byte == 0);
            let content = if is_zero { Content::Zero } else { Content::Data(page) };
            let noted = ledger.note(Page { phys: *phys, content });
            if noted.map_err(|why| Error::new(Exit::Failed, why))? {
                pages.add(*phys, page);
            }
        }
        if !pages.is_empty() {
            look.changed += pages.len() as u64;
            let packed = pages.pack(level).map_err(|error| Error::new(Exit::Failed, error.to_string()))?;
            look.packed += packed.len() as u64;
        }
        if shown.elapsed() > Duration::from_millis(500) {
            shown = Instant::now();
            progress::line(&format!("{what}: {} so far", bytes(look.packed)));
        }
    }
    progress::line("");
    look.took = begun.elapsed();
    Ok(look)
}
