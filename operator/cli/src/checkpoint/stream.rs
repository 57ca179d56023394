//! Takes a snapshot's memory and writes it: one thread takes and finds what need not be written, others compress, and
//! this one writes, in order.

use super::incremental::Before;
use crate::{
    device::{Cursor, Device, Frames},
    error::{Error, Result},
    exit::Exit,
    restore::fit::Room,
};
use mercury_image::{Compressed, LOW_END_PHYS, PAGE, Packer, Part, Writer};
use rustix::process::setpriority_process;
use std::{
    fs::File,
    io::{BufWriter, Write},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

/// Frames that are taken at once.
const BATCH: usize = 128;
/// Parts that wait for each compressor, and behind it.
const QUEUE: usize = 2;

/// The level of zstd when time matters more than the image's size.
const FASTEST: i32 = -7;

/// By how much who takes and compresses gives way to others.
const NICENESS: i32 = 10;

/// How hard the threads work: they give way to whatever else runs, until the pool runs low.
#[derive(Debug)]
pub struct Pace {
    level: i32,
    niceness: i32,
    hurry: AtomicBool,
}

impl Pace {
    /// Always at this level of zstd, and nobody gives way.
    #[must_use]
    pub const fn steady(level: i32) -> Self {
        Self { level, niceness: 0, hurry: AtomicBool::new(false) }
    }

    fn hurry(&self, hurry: bool) {
        self.hurry.store(hurry, Ordering::Relaxed);
    }

    /// The level of zstd for now. The calling thread's niceness is as it should be after that, if it was `niceness`.
    fn keep(&self, niceness: &mut i32) -> i32 {
        let hurry = self.hurry.load(Ordering::Relaxed);
        let wanted = if hurry { 0 } else { self.niceness };
        // For Linux, no process is the calling thread. Without the right to it, it stays as it is.
        if *niceness != wanted && setpriority_process(None, wanted).is_ok() {
            *niceness = wanted;
        }
        if hurry { self.level.min(FASTEST) } else { self.level }
    }
}

/// Takes parts; false if nobody wants any more.
pub type Send<'a> = dyn FnMut(Part) -> bool + 'a;

/// What is told while it goes on.
pub struct Watch<'a> {
    /// Frames written so far, and bytes of the image.
    pub progress: &'a mut dyn FnMut(u64, u64),
    /// Says whether to go on.
    pub stop: &'a dyn Fn() -> Result<()>,
}

/// What is written.
#[derive(Debug)]
pub struct Source<'a> {
    /// Takes the snapshot's memory.
    pub device: &'a Device,
    /// What need not be written.
    pub before: Before,
    /// Where the hypervisor's own hashes go, if it has made any.
    pub hashes: Option<BufWriter<File>>,
}

impl Source<'_> {
    fn take(&mut self, cursor: &mut Cursor) -> Result<Frames> {
        let Some(to) = &mut self.hashes else { return self.device.snapshot_take(cursor, BATCH) };
        let (frames, hashes) = self.device.snapshot_take_hashed(cursor, BATCH, 0)?;
        let mut words = frames.phys.iter().zip(&hashes).flat_map(|(phys, hash)| [*phys, *hash]);
        let written = words.try_for_each(|word| to.write_all(&word.to_le_bytes())).and_then(|()| to.flush());
        written.map_err(|error| {
            Error::new(Exit::Failed, format!("--hashes: {error}")).hint("name a file that can be written")
        })?;
        Ok(frames)
    }
}

/// Writes all of a snapshot's memory, but for what the parent has. What finds no room when it is loaded is seen by `room`.
pub fn stream<W: Write>(
    source: Source<'_>,
    to: &mut Writer<W>,
    level: i32,
    room: &mut Room,
    watch: &mut Watch<'_>,
) -> Result<()> {
    let packer = Packer::new(source.before.key()?);
    let pace = Pace { niceness: NICENESS, ..Pace::steady(level) };
    let produce = |send: &mut Send<'_>| {
        let mut counted = |part: Part| {
            if let Part::Frames(chunk) = &part {
                chunk.frames.iter().for_each(|frame| room.add(frame));
            }
            send(part)
        };
        take(source, packer, &pace, &mut counted)
    };
    pipe(produce, to, &pace, watch)
}

/// Writes all that `produce` sends, in its order; that runs on a thread of its own.
pub fn pipe<W: Write>(
    produce: impl FnOnce(&mut Send<'_>) -> Result<()> + std::marker::Send,
    to: &mut Writer<W>,
    pace: &Pace,
    watch: &mut Watch<'_>,
) -> Result<()> {
    let compressors = thread::available_parallelism().map_or(1, |count| count.get().saturating_sub(1).max(1));
    thread::scope(|scope| {
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for _ in 0..compressors {
            let (input, parts) = sync_channel::<Part>(QUEUE);
            let (compressed, output) = sync_channel(QUEUE);
            scope.spawn(move || compress(&parts, &compressed, pace));
            inputs.push(input);
            outputs.push(output);
        }
        let producer = scope.spawn(move || {
            // Dealt out to the compressors in turn. The writer ends when nothing comes any more, and says itself if it
            // could not go on.
            let mut deal = inputs.iter().cycle();
            produce(&mut |part| deal.next().is_some_and(|to| to.send(part).is_ok()))
        });
        let written = write(to, &outputs, watch);
        // Whoever still sends to a writer that has failed ends by that.
        drop(outputs);
        let produced = producer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // Where both failed the cause is the producer's only if the writer went on to the end.
        match written {
            Err(error) => Err(error),
            Ok(()) => produced,
        }
    })
}

fn compress(parts: &Receiver<Part>, to: &SyncSender<mercury_image::Result<Compressed>>, pace: &Pace) {
    let mut niceness = 0;
    for part in parts {
        if to.send(part.compress(pace.keep(&mut niceness))).is_err() {
            break;
        }
    }
}

/// Takes everything, in the image's order.
fn take(mut source: Source<'_>, mut packer: Packer, pace: &Pace, send: &mut Send<'_>) -> Result<()> {
    let mut niceness = 0;
    for (next_phys, end_phys) in [(LOW_END_PHYS, u64::MAX), (0, LOW_END_PHYS)] {
        let mut cursor = Cursor { next_phys, end_phys };
        while !cursor.is_done() {
            let frames = source.take(&mut cursor)?;
            pace.hurry(frames.hurry);
            pace.keep(&mut niceness);
            for (phys, page) in frames.phys.iter().zip(frames.data.chunks(PAGE)) {
                packer.add(*phys, page, source.before.hash_of(*phys)?);
                if !send_full(&mut packer, send) {
                    return Ok(());
                }
            }
        }
    }
    packer.finish().into_iter().all(send);
    Ok(())
}

/// Sends what is full. False if nobody wants any more.
pub fn send_full(packer: &mut Packer, send: &mut Send<'_>) -> bool {
    while let Some(part) = packer.full() {
        if !send(part) {
            return false;
        }
    }
    true
}

fn write<W: Write>(
    to: &mut Writer<W>,
    from: &[Receiver<mercury_image::Result<Compressed>>],
    watch: &mut Watch<'_>,
) -> Result<()> {
    let mut frames = 0;
    for from in from.iter().cycle() {
        (watch.stop)()?;
        let Ok(compressed) = from.recv() else { break };
        let compressed = compressed.map_err(image_error)?;
        frames += compressed.frames();
        to.add(&compressed).map_err(image_error)?;
        (watch.progress)(frames, to.bytes());
    }
    Ok(())
}

/// An image's error in the command's words.
pub fn image_error(error: mercury_image::Error) -> Error {
    match error {
        mercury_image::Error::Io(error) => {
            let full = error.raw_os_error() == Some(libc::ENOSPC);
            let hint = if full { "make room, or write to another place" } else { "`dmesg` may say more" };
            Error::new(Exit::Failed, format!("the image could not be read or written: {error}")).hint(hint)
        }
        error => {
            let hint = match error {
                mercury_image::Error::Unfit(_) => "name the images in their order, the full one first",
                _ => "nothing was changed; use another image",
            };
            Error::new(Exit::Failed, format!("the image is refused: {error}")).hint(hint)
        }
    }
}
