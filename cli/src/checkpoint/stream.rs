//! Takes a snapshot's memory and writes it: one thread takes and finds what need not be written, others compress, and
//! this one writes, in order.

use crate::{
    device::{Cursor, Device},
    error::{Error, Result},
    exit::Exit,
};
use mercury_image::{Chunk, Compressed, Frame, PAGE, Source, Writer};
use std::{
    io::Write,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
};

/// Frames that are taken at once.
const BATCH: usize = 128;
/// Chunks that wait for each compressor, and behind it.
const QUEUE: usize = 2;
/// Remembered pages: a power of two.
const TWINS: usize = 1 << 16;
/// The kernel that brings a machine back lies below. What is above comes first in an image: there it finds homes of
/// zeros, where what is below can wait.
const RESTORE_END_PHYS: u64 = 256 << 20;

/// What is told while it goes on.
pub struct Watch<'a> {
    /// Frames written so far, and bytes of the image.
    pub progress: &'a mut dyn FnMut(u64, u64),
    /// Whether to give up.
    pub stop: &'a dyn Fn() -> bool,
}

/// Writes all of a snapshot's memory.
pub fn stream<W: Write>(
    device: &Device,
    to: &mut Writer<W>,
    level: i32,
    watch: &mut Watch<'_>,
) -> Result<()> {
    let compressors = thread::available_parallelism().map_or(1, |count| count.get().saturating_sub(1).max(1));
    thread::scope(|scope| {
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for _ in 0..compressors {
            let (input, chunks) = sync_channel::<Chunk>(QUEUE);
            let (compressed, output) = sync_channel(QUEUE);
            scope.spawn(move || compress(&chunks, &compressed, level));
            inputs.push(input);
            outputs.push(output);
        }
        let taker = scope.spawn(move || take(device, &inputs));
        let written = write(to, &outputs, watch);
        // Whoever still sends to a writer that has failed ends by that.
        drop(outputs);
        let taken = taker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // Where both failed the cause is the taker's only if the writer went on to the end.
        match written {
            Err(error) => Err(error),
            Ok(()) => taken,
        }
    })
}

fn compress(chunks: &Receiver<Chunk>, to: &SyncSender<mercury_image::Result<Compressed>>, level: i32) {
    for chunk in chunks {
        if to.send(chunk.compress(level)).is_err() {
            break;
        }
    }
}

/// Takes everything, and deals it out to the compressors in turn.
fn take(device: &Device, to: &[SyncSender<Chunk>]) -> Result<()> {
    let mut deal = to.iter().cycle();
    // The writer ends when nothing comes any more, and says itself if it could not go on.
    let mut send = |chunk: Chunk| deal.next().is_some_and(|to| to.send(chunk).is_ok());
    let mut twins = Twins::new();
    let mut chunk = Chunk::default();
    let parts = [(RESTORE_END_PHYS, u64::MAX), (0, RESTORE_END_PHYS)];
    for (next_phys, end_phys) in parts {
        let mut cursor = Cursor { next_phys, end_phys };
        while !cursor.is_done() {
            let frames = device.snapshot_take(&mut cursor, BATCH)?;
            for (phys, page) in frames.phys.iter().zip(frames.data.chunks(PAGE)) {
                if chunk.is_full() && !send(std::mem::take(&mut chunk)) {
                    return Ok(());
                }
                add(&mut chunk, *phys, page, &mut twins);
            }
        }
    }
    send(chunk);
    Ok(())
}

fn add(chunk: &mut Chunk, phys: u64, page: &[u8], twins: &mut Twins) {
    let source = if is_zero(page) { Source::Zero } else { twins.find(phys, page) };
    if source == Source::Data {
        chunk.data.extend_from_slice(page);
    }
    chunk.frames.push(Frame { phys, source });
}

fn is_zero(page: &[u8]) -> bool {
    page.chunks_exact(8).all(|word| word == [0; 8])
}

/// Pages that were seen, by their hash: the last of each slot.
struct Twins {
    slots: Vec<([u8; 32], u64)>,
}

impl Twins {
    fn new() -> Self {
        Self { slots: vec![([0; 32], u64::MAX); TWINS] }
    }

    /// A frame before this one with the same content, by BLAKE3; or this one's own data.
    fn find(&mut self, phys: u64, page: &[u8]) -> Source {
        let hash = *blake3::hash(page).as_bytes();
        let slot = usize::from(u16::from_le_bytes([hash[0], hash[1]])) % TWINS;
        let (known, frame) = self.slots[slot];
        if frame != u64::MAX && known == hash {
            return Source::Frame(frame);
        }
        self.slots[slot] = (hash, phys);
        Source::Data
    }
}

fn write<W: Write>(
    to: &mut Writer<W>,
    from: &[Receiver<mercury_image::Result<Compressed>>],
    watch: &mut Watch<'_>,
) -> Result<()> {
    let mut frames = 0;
    for from in from.iter().cycle() {
        if (watch.stop)() {
            return Err(Error::new(
                Exit::Interrupted,
                "interrupted: there is no image, and the machine runs on",
            ));
        }
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
        error => Error::new(Exit::Failed, format!("the image is refused: {error}"))
            .hint("nothing was changed; use another image"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_and_twins_are_found() {
        let mut data = vec![0; 4 * PAGE];
        data[PAGE + 7] = 1;
        data[3 * PAGE + 7] = 1;
        let (mut chunk, mut twins) = (Chunk::default(), Twins::new());
        for (number, page) in data.chunks(PAGE).enumerate() {
            add(&mut chunk, 0x1000 * (number as u64 + 1), page, &mut twins);
        }
        let sources: Vec<_> = chunk.frames.iter().map(|frame| frame.source).collect();
        assert_eq!(sources, [Source::Zero, Source::Data, Source::Zero, Source::Frame(0x2000)]);
        assert_eq!(chunk.data.len(), PAGE);
    }
}
