//! Streams a snapshot's memory into an image. One thread reads frames and finds those that need not
//! be written, others compress, and the calling thread writes in order.

use super::incremental::Before;
use crate::{images::image_error, restore::fit::Room};
use mercury_control::{
    device::{Cursor, Device, Frames},
    error::{Error, Result},
    exit::Exit,
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

/// Frames that are read at once.
const BATCH: usize = 128;
/// Parts that wait before each compressor, and after it.
const QUEUE: usize = 2;

/// Level of zstd when time matters more than the image's size.
const FASTEST: i32 = -7;

/// Niceness of the reading and compressing threads.
const NICENESS: i32 = 10;

/// The effort of the threads: other programs go first, until the pool runs low.
#[derive(Debug)]
pub struct Pace {
    level: i32,
    niceness: i32,
    hurry: AtomicBool,
}

impl Pace {
    /// Always uses this level of zstd, at normal niceness.
    #[must_use]
    pub const fn steady(level: i32) -> Self {
        Self { level, niceness: 0, hurry: AtomicBool::new(false) }
    }

    fn hurry(&self, hurry: bool) {
        self.hurry.store(hurry, Ordering::Relaxed);
    }

    /// Returns the level of zstd for now, and sets the calling thread's niceness, which was
    /// `niceness`.
    fn keep(&self, niceness: &mut i32) -> i32 {
        let hurry = self.hurry.load(Ordering::Relaxed);
        let wanted = if hurry { 0 } else { self.niceness };
        // For Linux, no process is the calling thread. Without the right to change it, the niceness
        // stays.
        if *niceness != wanted && setpriority_process(None, wanted).is_ok() {
            *niceness = wanted;
        }
        if hurry { self.level.min(FASTEST) } else { self.level }
    }
}

/// Sends a part; returns false if the receiver is gone.
pub type Send<'a> = dyn FnMut(Part) -> bool + 'a;

/// The callbacks of a stream.
pub struct Watch<'a> {
    /// Gets the number of frames written so far, and the bytes of the image.
    pub progress: &'a mut dyn FnMut(u64, u64),
    /// Returns an error to stop the stream.
    pub stop: &'a dyn Fn() -> Result<()>,
}

/// The source of the stream.
#[derive(Debug)]
pub struct Source<'a> {
    /// Device that has the snapshot's memory.
    pub device: &'a Device,
    /// Parent, whose pages need not be written.
    pub before: Before,
    /// Output for the hypervisor's own hashes, if it has made any.
    pub hashes: Option<BufWriter<File>>,
}

impl Source<'_> {
    fn take(&mut self, cursor: &mut Cursor) -> Result<Frames> {
        let Some(to) = &mut self.hashes else { return self.device.snapshot_read(cursor, BATCH) };
        let (frames, hashes) = self.device.snapshot_read_hashed(cursor, BATCH, 0)?;
        let mut words = frames.phys.iter().zip(&hashes).flat_map(|(phys, hash)| [*phys, *hash]);
        let written = words.try_for_each(|word| to.write_all(&word.to_le_bytes())).and_then(|()| to.flush());
        written.map_err(|error| {
            Error::new(Exit::Failed, format!("--hashes: {error}")).hint("name a file that can be written")
        })?;
        Ok(frames)
    }
}

/// Writes all memory of a snapshot, except pages that equal the parent's. `room` counts frames that
/// would find no room at a restore.
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

/// Writes everything that `produce` sends, in its order; `produce` runs in a thread of its own.
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
            // Parts go to the compressors in turn. The writer ends when no more parts come, and
            // reports its own errors.
            let mut deal = inputs.iter().cycle();
            produce(&mut |part| deal.next().is_some_and(|to| to.send(part).is_ok()))
        });
        let written = write(to, &outputs, watch);
        // A compressor that still sends to a failed writer stops because of the closed channel.
        drop(outputs);
        let produced = producer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // If both failed, the producer's error is the cause only if the writer went on to the end.
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

/// Reads all frames, in the image's order.
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

/// Sends parts that are full. Returns false if the receiver is gone.
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
