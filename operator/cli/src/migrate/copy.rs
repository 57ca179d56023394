//! Copying memory: one thread reads frames, others hash them, leave out what has been sent so, and compress. What goes by the
//! first stream is sent by the caller's thread, and what goes by another one by whoever has compressed it.
//!
//! Which frames may have changed since they were sent is told by the driver's log of writes, where there is one; otherwise
//! all are read. Whether one of these is to be sent is told by its hash.
//!
//! A frame that was free and is in use now is in the log: who takes it writes to it or has a device do so. What it held
//! before matters to nobody, so it may as well be what was sent of it.

use super::{lane::Lane, link::Link};
use crate::{
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

/// Frames that are read at once. What holds them is written to, too, and so goes over again in the next round: few.
const BATCH: u64 = 32;
/// Batches that wait for each worker, and behind it.
const QUEUE: usize = 1;
/// The other end may take silence for an end: something is sent so often.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// Who watches is asked so often while the bandwidth limit makes it wait.
const PIECE: Duration = Duration::from_millis(200);
/// By how much who copies gives way to the load.
const NICENESS: i32 = 10;

const _: () = assert!(STRIPE == BATCH * PAGE as u64, "frames that are read at once mostly go by one stream");

/// What frames are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// Memory as it is now, while everything runs.
    Now,
    /// Memory as it was at the instant.
    Instant,
}

/// What a pass over memory has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Frames that were read.
    pub looked: u64,
    /// Pages that were sent: those that are not what was sent before.
    pub sent: u64,
    /// Pages that are not what was sent before; to be heard of, another one is sent now and then.
    pub changed: u64,
    /// Of those that were sent, all zeros.
    pub zeros: u64,
    /// Bytes that this took on the wire.
    pub bytes: u64,
    /// How long it took.
    pub took: Duration,
    /// Of that, waiting for the bandwidth limit's sake.
    pub waited: Duration,
}

/// Reads frames from a place on, so many at most.
pub type Read<'a> = dyn Fn(&mut Cursor, usize) -> Result<Frames> + Sync + 'a;

/// What is read, and how.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// Who reads.
    pub read: &'a Read<'a>,
    /// Which memory.
    pub from: From,
    /// zstd's level.
    pub level: i32,
    /// How many threads hash and compress.
    pub workers: usize,
}

/// That frames are what they were at the instant, by hashes that the hypervisor has made with no CPU in the system. So what
/// the other end has, by the digest, is that as well.
#[derive(Debug, Default)]
pub struct Proof {
    compared: AtomicU64,
    wrong: AtomicU64,
}

impl Proof {
    /// Compares frames with what they were.
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

    /// How many frames were compared, and how many of them are not what they were.
    #[must_use]
    pub fn found(&self) -> (u64, u64) {
        (self.compared.load(Ordering::Relaxed), self.wrong.load(Ordering::Relaxed))
    }
}

/// What it goes by.
#[derive(Debug)]
pub struct Ways<'a> {
    /// The first stream.
    pub link: &'a mut Link,
    /// The others.
    pub lanes: &'a [Lane],
}

/// Why a pass came to no end.
#[derive(Debug)]
pub enum Stopped {
    /// Frames could not be read.
    Failed(Error),
    /// The connection is gone.
    Gone(String),
    /// Whoever watches wants it so.
    Wanted,
}

/// What goes out of a worker.
#[derive(Default)]
struct Record {
    /// What goes by the first stream.
    packed: Vec<u8>,
    /// Bytes that went by others.
    elsewhere: u64,
    looked: u64,
    sent: u64,
    changed: u64,
    zeros: u64,
}

/// Sends every page that is not what was sent before. `watch` is told of how far it is, again and again, and says
/// whether to go on.
///
/// # Errors
/// If it came to no end.
pub fn pass(
    reading: &Reading<'_>,
    ledger: &mut Ledger,
    limits: &Limits,
    Ways { link, lanes }: Ways<'_>,
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
                    let done = digest(&frames, ledger, level, hurry, lanes);
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
            // The attempt is over: nobody waits for who takes nothing.
            lanes.iter().for_each(Lane::cut);
        }
        // Whoever still has something to send ends by that.
        drop(records);
        sent
    });
    ended?;
    lanes.iter().try_for_each(Lane::flush).map_err(gone)?;
    total.took = begun.elapsed();
    Ok(total)
}

fn gone(error: std::io::Error) -> Stopped {
    Stopped::Gone(error.to_string())
}

/// While the load runs.
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

/// So many that those of a full stripe are read at once.
fn count(cursor: Cursor) -> usize {
    let is_in = cursor.next_phys / PAGE as u64 % BATCH;
    // At most 32.
    (BATCH - is_in) as usize
}

/// Packs what of some frames has to be sent, and sends what does not go by the first stream.
fn digest(
    frames: &Frames,
    ledger: &Mutex<&mut Ledger>,
    level: i32,
    hurry: &AtomicBool,
    lanes: &[Lane],
) -> std::result::Result<Record, Stopped> {
    let failed =
        |why: String| Stopped::Failed(Error::new(Exit::Failed, why).hint("nothing was changed; try again"));
    let (all, _) = frames.data.as_chunks::<PAGE>();
    let is_zero: Vec<bool> = all.iter().map(|page| page.iter().all(|byte| *byte == 0)).collect();
    let hashes: Vec<_> =
        all.iter().zip(&is_zero).map(|(page, zero)| (!zero).then(|| hash_of(page))).collect();
    // There are no more than can be counted so.
    let streams = 1 + lanes.len() as u32;
    let mut pages = vec![Pages::default(); 1 + lanes.len()];
    let mut record = Record { looked: all.len() as u64, ..Record::default() };
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
    for (lane, pages) in lanes.iter().zip(&pages[1..]).filter(|(_, pages)| !pages.is_empty()) {
        let packed = pack(pages)?;
        lane.pages(&packed).map_err(gone)?;
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
        total.looked += record.looked;
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

/// Waits until what was sent keeps to the bandwidth limit; whether to go on then. In pieces, so that whoever watches is not
/// kept waiting.
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
        // It may have been longer, on a host with much to do.
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

    /// What goes over at once may be more than a limit allows in several pieces of waiting.
    #[test]
    fn the_limit_is_kept() {
        let limits = Limits { max_bytes_per_second: Some(1 << 20), ..Limits::default() };
        let begun = Instant::now();
        let mut total = Pass { bytes: 1 << 19, ..Pass::default() };
        assert!(keep_to(&limits, begun, &mut total, &mut |_| true));
        assert!(begun.elapsed() >= Duration::from_millis(500), "{:?}", begun.elapsed());
        assert!(total.waited >= 2 * PIECE, "{total:?}");
        total.bytes = 1 << 40;
        assert!(!keep_to(&limits, begun, &mut total, &mut |_| false), "nobody is asked");
    }
}
