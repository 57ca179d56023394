//! Copying memory. One thread reads frames; others hash them, skip frames that were sent with the
//! same contents, and compress the rest. Pages of the first stream are sent by the caller's thread.
//! Pages of another stream are sent by the worker that has compressed them.
//!
//! The driver's dirty log, if there is one, names the frames that may have changed since they were
//! sent; without it all frames are read. The hash of such a frame decides if it is sent.
//!
//! A frame that was free and is in use now is in the log, because its new user writes to it or lets
//! a device write to it. Its earlier contents do not matter, so they may equal what was sent.

use super::{link::Link, page_stream::PageStream};
use mercury_control::{
    device::{Cursor, Frames},
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::{
    rounds::{Limits, wait},
    streams::{STRIPE, stream_of},
    wire::{Content, Ledger, PAGE, Page, Pages, hash_of},
};
use rustix::process::setpriority_process;
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Frames that are read at once. Few, because the buffer itself is memory that is written to and so
/// is sent again in the next round.
const BATCH: u64 = 32;
/// Batches that wait before each worker, and after it.
const QUEUE: usize = 1;
/// Interval of signs of life: without them the other end may take silence for an end.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// Interval at which `watch` is called while the bandwidth limit makes the sender wait.
const PIECE: Duration = Duration::from_millis(200);
/// Niceness of copying threads, so that the load goes first.
const NICENESS: i32 = 10;

const _: () = assert!(STRIPE == BATCH * PAGE as u64, "frames that are read at once mostly go by one stream");

/// The version of memory that frames are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// Memory as it is now, while everything runs.
    Now,
    /// Memory as it was at the instant.
    Instant,
}

/// The result of a pass over memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Frames that were read.
    pub scanned: u64,
    /// Pages that were sent because their contents had changed.
    pub sent: u64,
    /// Pages whose contents had changed since they were sent. An unchanged page that is sent as a
    /// sign of life does not count.
    pub changed: u64,
    /// Pages of zeros among those that were sent.
    pub zeros: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Duration of the pass.
    pub took: Duration,
    /// Time of it that was spent waiting for the bandwidth limit.
    pub waited: Duration,
}

/// Reads frames from a cursor on, up to a number.
pub type Read<'a> = dyn Fn(&mut Cursor, usize) -> Result<Frames> + Sync + 'a;

/// The source of frames, and the settings of a pass.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// Function that reads frames.
    pub read: &'a Read<'a>,
    /// Version of memory that it reads.
    pub from: From,
    pub level: i32,
    /// Threads that hash and compress.
    pub workers: usize,
}

/// The proof that frames are as they were at the instant: the hypervisor has hashed them then, with
/// no CPU in the system. The digest extends the proof to the frames of the other end.
#[derive(Debug, Default)]
pub struct Proof {
    compared: AtomicU64,
    wrong: AtomicU64,
}

impl Proof {
    /// Compares frames with the hashes of the instant.
    pub fn compare(&self, frames: &Frames, hashes: &[u64]) {
        let (pages, _) = frames.data.as_chunks::<PAGE>();
        let is_wrong = |(page, expected): (&[u8; PAGE], &u64)| {
            let (words, _) = page.as_chunks::<8>();
            let words: Vec<_> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
            mercury_abi::snapshot::hash(&words) != *expected
        };
        let wrong = pages.iter().zip(hashes).filter(|pair| is_wrong(*pair)).count();
        self.compared.fetch_add(pages.len() as u64, Ordering::Relaxed);
        self.wrong.fetch_add(wrong as u64, Ordering::Relaxed);
    }

    /// Returns the number of frames that were compared, and how many of them differ.
    #[must_use]
    pub fn found(&self) -> (u64, u64) {
        (self.compared.load(Ordering::Relaxed), self.wrong.load(Ordering::Relaxed))
    }
}

/// The connections of a pass.
#[derive(Debug)]
pub struct Ways<'a> {
    /// The first stream.
    pub link: &'a mut Link,
    /// The other streams.
    pub page_streams: &'a [PageStream],
}

/// The reason why a pass was broken off.
#[derive(Debug)]
pub enum Stopped {
    /// Frames could not be read.
    Failed(Error),
    /// The connection is gone.
    Gone(String),
    /// `watch` wants the pass to stop.
    Wanted,
}

/// The output of a worker for one batch.
#[derive(Default)]
struct Record {
    /// Packed pages for the first stream.
    packed: Vec<u8>,
    /// Bytes that were sent by other streams.
    elsewhere: u64,
    scanned: u64,
    sent: u64,
    changed: u64,
    zeros: u64,
}

/// Sends every page that has changed since it was sent. Reports progress to `watch` again and
/// again, and stops if `watch` says so.
///
/// # Errors
///
/// Returns the reason if the pass was broken off.
pub fn pass(
    reading: &Reading<'_>,
    ledger: &mut Ledger,
    limits: &Limits,
    Ways { link, page_streams }: Ways<'_>,
    watch: &mut dyn FnMut(&Pass, &mut Link) -> bool,
) -> std::result::Result<Pass, Stopped> {
    let begun = Instant::now();
    let ledger = Mutex::new(ledger);
    let (hurry, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let Reading { read, from, level, workers } = *reading;
    let mut total = Pass::default();
    let ended = thread::scope(|scope| {
        let (out, records) = sync_channel::<std::result::Result<Record, Stopped>>(QUEUE * workers);
        let mut inputs = Vec::new();
        for _ in 0..workers {
            let (input, frames) = sync_channel::<Frames>(QUEUE);
            let (out, ledger, hurry) = (out.clone(), &ledger, &hurry);
            scope.spawn(move || {
                give_way(from);
                for frames in frames {
                    let done = digest(&frames, ledger, level, hurry, page_streams);
                    if out.send(done).is_err() {
                        break;
                    }
                }
            });
            inputs.push(input);
        }
        let stop = &stop;
        scope.spawn(move || {
            give_way(from);
            if let Err(error) = hand_out(read, &inputs, stop) {
                let _ = out.send(Err(Stopped::Failed(error)));
            }
        });
        let sent = send(&records, limits, link, &hurry, begun, &mut total, watch);
        stop.store(true, Ordering::Relaxed);
        if sent.is_err() {
            // The attempt is over, so no thread may wait for an end that accepts nothing.
            page_streams.iter().for_each(PageStream::cut);
        }
        // A worker that still has something to send stops because of the closed channel.
        drop(records);
        sent
    });
    ended?;
    page_streams.iter().try_for_each(PageStream::flush).map_err(gone)?;
    total.took = begun.elapsed();
    Ok(total)
}

fn gone(error: std::io::Error) -> Stopped {
    Stopped::Gone(error.to_string())
}

/// Lowers the thread's priority while the load runs.
pub fn give_way(from: From) {
    if from == From::Now {
        // For Linux, no process is the calling thread.
        let _ = setpriority_process(None, NICENESS);
    }
}

fn hand_out(read: &Read<'_>, to: &[SyncSender<Frames>], stop: &AtomicBool) -> Result<()> {
    let mut cursor = Cursor { next_phys: 0, end_phys: u64::MAX };
    for to in to.iter().cycle() {
        if cursor.is_done() || stop.load(Ordering::Relaxed) {
            break;
        }
        let count = count(cursor);
        if to.send(read(&mut cursor, count)?).is_err() {
            break;
        }
    }
    Ok(())
}

/// Returns the number of frames to read so that those of a full stripe are read at once.
fn count(cursor: Cursor) -> usize {
    let is_in = cursor.next_phys / PAGE as u64 % BATCH;
    // At most 32.
    (BATCH - is_in) as usize
}

/// Packs those of some frames that have to be sent, and sends them unless they go by the first
/// stream.
fn digest(
    frames: &Frames,
    ledger: &Mutex<&mut Ledger>,
    level: i32,
    hurry: &AtomicBool,
    page_streams: &[PageStream],
) -> std::result::Result<Record, Stopped> {
    let failed =
        |why: String| Stopped::Failed(Error::new(Exit::Failed, why).hint("nothing was changed; try again"));
    let (all, _) = frames.data.as_chunks::<PAGE>();
    let is_zero: Vec<bool> = all.iter().map(|page| page.iter().all(|byte| *byte == 0)).collect();
    let hashes: Vec<_> =
        all.iter().zip(&is_zero).map(|(page, zero)| (!zero).then(|| hash_of(page))).collect();
    // The cast loses nothing, because there are at most 16 streams.
    let streams = 1 + page_streams.len() as u32;
    let mut pages = vec![Pages::default(); 1 + page_streams.len()];
    let mut record = Record { scanned: all.len() as u64, ..Record::default() };
    {
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        for (((phys, page), zero), hash) in frames.phys.iter().zip(all).zip(&is_zero).zip(&hashes) {
            let is_other = match hash {
                Some(hash) => ledger.note_hash(*phys, *hash),
                None => ledger.note(Page { phys: *phys, content: Content::Zero }),
            };
            let is_other = is_other.map_err(|why| failed(why.to_owned()))?;
            record.changed += u64::from(is_other);
            if is_other || hurry.swap(false, Ordering::Relaxed) {
                pages[stream_of(*phys, streams) as usize].add(*phys, page);
                record.sent += 1;
                record.zeros += u64::from(*zero);
            }
        }
    }
    let pack = |pages: &Pages| pages.pack(level).map_err(|error| failed(error.to_string()));
    for (page_stream, pages) in page_streams.iter().zip(&pages[1..]).filter(|(_, pages)| !pages.is_empty()) {
        let packed = pack(pages)?;
        page_stream.pages(&packed).map_err(gone)?;
        record.elsewhere += packed.len() as u64;
    }
    if !pages[0].is_empty() {
        record.packed = pack(&pages[0])?;
    }
    Ok(record)
}

fn send(
    records: &Receiver<std::result::Result<Record, Stopped>>,
    limits: &Limits,
    link: &mut Link,
    hurry: &AtomicBool,
    begun: Instant,
    total: &mut Pass,
    watch: &mut dyn FnMut(&Pass, &mut Link) -> bool,
) -> std::result::Result<(), Stopped> {
    let mut sent_at = Instant::now();
    loop {
        if !watch(total, link) {
            return Err(Stopped::Wanted);
        }
        let record = match records.recv_timeout(Duration::from_millis(100)) {
            Ok(record) => record?,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        total.scanned += record.scanned;
        if record.sent == 0 {
            if sent_at.elapsed() > SIGN_OF_LIFE {
                hurry.store(true, Ordering::Relaxed);
            }
            continue;
        }
        if !record.packed.is_empty() {
            link.pages(&record.packed).map_err(gone)?;
        }
        sent_at = Instant::now();
        total.sent += record.sent;
        total.changed += record.changed;
        total.zeros += record.zeros;
        total.bytes += record.packed.len() as u64 + record.elsewhere;
        if !keep_to(limits, begun, total, &mut |total| watch(total, link)) {
            return Err(Stopped::Wanted);
        }
    }
    link.flush().map_err(gone)
}

/// Waits until the average rate is within the bandwidth limit. Waits in pieces, so that `watch` is
/// called in time. Returns false if `watch` wants the pass to stop.
pub fn keep_to(
    limits: &Limits,
    begun: Instant,
    total: &mut Pass,
    watch: &mut dyn FnMut(&Pass) -> bool,
) -> bool {
    loop {
        let pause = wait(limits, total.bytes, begun.elapsed()).min(PIECE);
        if pause.is_zero() {
            return true;
        }
        let slept = Instant::now();
        thread::sleep(pause);
        // On a busy host the wait may have been longer than asked for.
        total.waited += slept.elapsed();
        if !watch(total) {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_changed_is_found() {
        let (mut data, phys) = (vec![0; 2 * PAGE], vec![0, PAGE as u64]);
        data[PAGE + 7] = 1;
        let word = |value: u64| {
            let mut words = [0; PAGE / 8];
            words[0] = value;
            mercury_abi::snapshot::hash(&words)
        };
        let frames = Frames { phys, data, hurry: false };
        let proof = Proof::default();
        proof.compare(&frames, &[word(0), word(1 << 56)]);
        assert_eq!(proof.found(), (2, 0));
        proof.compare(&frames, &[word(0), word(0)]);
        assert_eq!(proof.found(), (4, 1));
    }

    /// A batch may need several pieces of waiting under a low limit.
    #[test]
    fn the_limit_is_kept() {
        let limits = Limits { max_bytes_per_second: Some(1 << 20), ..Limits::default() };
        let begun = Instant::now();
        let mut total = Pass { bytes: 1 << 19, ..Pass::default() };
        assert!(keep_to(&limits, begun, &mut total, &mut |_| true));
        assert!(begun.elapsed() >= Duration::from_millis(500), "{:?}", begun.elapsed());
        assert!(total.waited >= 2 * PIECE, "{total:?}");
        total.bytes = 1 << 40;
        assert!(!keep_to(&limits, begun, &mut total, &mut |_| false), "`watch` is not asked");
    }
}
