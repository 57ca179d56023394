//! A close look at blocks that differ from the copy: which bytes are nobody's?
//!
//! The kernel may change its code all the time. So a byte counts as foreign only if no change of the kernel's
//! can explain it:
//!
//! 1. Records of the kernel's changes begin. Then nobody holds `text_mutex`.
//! 2. The bytes are read.
//! 3. All places that the kernel changes are collected, twice. By neither collection are the bytes a form
//!    that the kernel writes there.
//! 4. The bytes are read again, and are the same.
//! 5. Nobody holds `text_mutex`. Nor does anybody hold a lock of what code should be ([`Lock::CLAIMS`]).
//! 6. No record has a place near the bytes, and none is missing.
//!
//! A change that had begun before the first step, or ends after the fifth one, holds `text_mutex` at that
//! step. One that begins and ends between them leaves a record. So the bytes stood still. If the kernel had
//! changed what they should be, it would have changed them too before it left the lock, and left a record.
//!
//! Bytes for which this cannot be said are *busy*. They are counted, and left to the next pass.

use super::{
    copy::Block,
    pokes::Lock,
    sites::{Sites, Verdict, View},
};
use std::{io, ops::Range, time::Duration};

/// Bytes that have to be as they were when they are mended: the byte and its neighbours.
const WINDOW: u64 = 16;
/// Bytes before and behind a window on which the verdicts depend.
const AROUND: u64 = 8;
/// Time between the two readings at least.
pub const SECOND_READING: Duration = Duration::from_millis(200);
/// Time between two tries to find a lock free.
const WAIT: Duration = Duration::from_millis(1);
/// Tries to find a lock free.
const TRIES: usize = 1000;

/// A block that differs.
#[derive(Clone, Debug)]
pub struct Suspect {
    pub part: String,
    pub block: Block,
    pub old: Vec<u8>,
    pub now: Vec<u8>,
}

/// Neighbouring bytes that differ and are nobody's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Odd {
    pub start: u64,
    pub now: Vec<u8>,
    pub wanted: Vec<u8>,
    pub unclaimed: bool,
}

/// A verdict on a suspect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    pub odd: Vec<Odd>,
    /// Windows of which nothing can be said, because the kernel may be changing them.
    pub busy: u64,
    /// Bytes that the kernel has changed.
    pub own: u64,
}

impl Judged {
    /// Returns true if all that differs is the kernel's own.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.odd.is_empty() && self.busy == 0
    }

    /// Counts odd bytes as busy, but for those that are kept.
    fn keep(&mut self, is_kept: impl Fn(&Odd) -> bool) {
        let before = self.odd.len();
        self.odd.retain(is_kept);
        self.busy += (before - self.odd.len()) as u64;
    }
}

/// The running kernel.
pub trait Kernel {
    /// Records the kernel's changes of code from now on.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses.
    fn record(&mut self) -> io::Result<()>;

    /// Returns the places of all changes since then; none if some may be missing.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses.
    fn recorded(&mut self) -> io::Result<Option<Vec<Range<u64>>>>;

    /// Returns true if nobody holds a lock.
    ///
    /// # Errors
    ///
    /// Returns an error if memory cannot be read.
    fn is_free(&mut self, lock: Lock) -> io::Result<bool>;

    /// Reads a block.
    ///
    /// # Errors
    ///
    /// Returns an error if memory cannot be read.
    fn read(&mut self, block: &Block) -> io::Result<Vec<u8>>;

    /// Collects the places that the kernel changes.
    ///
    /// # Errors
    ///
    /// Returns an error if a table cannot be read.
    fn sites(&mut self) -> io::Result<Sites>;

    /// Lets time pass.
    fn pause(&mut self, time: Duration);
}

/// Looks closely at suspects. Their bytes are then those of this look.
///
/// # Errors
///
/// Returns an error if memory or a table cannot be read.
pub fn look(kernel: &mut impl Kernel, suspects: &mut [Suspect]) -> io::Result<Vec<Judged>> {
    kernel.record()?;
    let was_free = becomes_free(kernel, Lock::Text)?;
    for suspect in suspects.iter_mut() {
        suspect.now = kernel.read(&suspect.block)?;
    }
    let mut judged = judge_all(kernel, suspects)?;
    if judged.iter().all(Judged::is_well) {
        return Ok(judged);
    }
    // Symbols that come and go while they are read may hide others. Hardly the same ones again.
    for (judged, again) in judged.iter_mut().zip(judge_all(kernel, suspects)?) {
        judged.keep(|odd| again.odd.contains(odd));
    }
    kernel.pause(SECOND_READING);
    let again: Vec<_> =
        suspects.iter().map(|suspect| kernel.read(&suspect.block)).collect::<io::Result<_>>()?;
    let mut is_settled = was_free && becomes_free(kernel, Lock::Text)?;
    for lock in Lock::CLAIMS {
        is_settled = is_settled && becomes_free(kernel, lock)?;
    }
    let places = kernel.recorded()?.filter(|_| is_settled);
    for ((judged, suspect), again) in judged.iter_mut().zip(suspects.iter()).zip(&again) {
        judged.keep(|odd| places.as_ref().is_some_and(|places| stood_still(odd, suspect, again, places)));
    }
    Ok(judged)
}

fn judge_all(kernel: &mut impl Kernel, suspects: &[Suspect]) -> io::Result<Vec<Judged>> {
    let sites = kernel.sites()?;
    Ok(suspects.iter().map(|suspect| judge(&sites, suspect)).collect())
}

/// Waits until nobody holds a lock. Returns false if that takes long.
fn becomes_free(kernel: &mut impl Kernel, lock: Lock) -> io::Result<bool> {
    for _ in 0..TRIES {
        if kernel.is_free(lock)? {
            return Ok(true);
        }
        kernel.pause(WAIT);
    }
    Ok(false)
}

/// Returns true if odd bytes and those round them were the same twice, and the kernel has recorded no change.
fn stood_still(odd: &Odd, suspect: &Suspect, again: &[u8], places: &[Range<u64>]) -> bool {
    let block = &suspect.block;
    let start = block.from.max(odd.start - AROUND);
    let end = block.until.min(odd.start + odd.now.len() as u64 + AROUND);
    let range = offset(block, start)..offset(block, end);
    let is_near = |place: &Range<u64>| place.start < end && start < place.end;
    suspect.now[range.clone()] == again[range] && !places.iter().any(is_near)
}

fn offset(block: &Block, address: u64) -> usize {
    usize::try_from(address - block.from).unwrap_or_default()
}

/// Returns the window round an address, of memory.
fn window(suspect: &Suspect, address: u64) -> (u64, Vec<u8>) {
    let start = (address & !(WINDOW - 1)).max(suspect.block.from);
    let end = ((address & !(WINDOW - 1)) + WINDOW).min(suspect.block.until);
    (start, suspect.now[offset(&suspect.block, start)..offset(&suspect.block, end)].to_vec())
}

fn unclaimed(suspect: &Suspect, address: u64) -> Odd {
    let (start, now) = window(suspect, address);
    Odd { start, wanted: now.clone(), now, unclaimed: true }
}

/// Judges each byte of a block that differs.
#[must_use]
pub fn judge(sites: &Sites, suspect: &Suspect) -> Judged {
    let Suspect { block, old, now, .. } = suspect;
    let view = View { start: block.from, old, now };
    let mut judged = Judged::default();
    let differ = (block.from..).zip(old.iter().zip(now)).filter(|(_, (old, now))| old != now);
    for (address, (old, _)) in differ.filter(|(address, _)| (block.start..block.end).contains(address)) {
        let verdict = if block.is_code { sites.judge(&view, address) } else { Verdict::Foreign(*old) };
        match verdict {
            Verdict::Own => judged.own += 1,
            Verdict::Unclaimed => add(&mut judged.odd, unclaimed(suspect, address)),
            Verdict::Foreign(byte) => {
                let (start, now) = window(suspect, address);
                let mut wanted = now.clone();
                wanted[usize::try_from(address - start).unwrap_or_default()] = byte;
                add(&mut judged.odd, Odd { start, now, wanted, unclaimed: false });
            }
        }
    }
    judged
}

/// Adds odd bytes. Those of one window are one; if one of them is unclaimed, all are.
fn add(all: &mut Vec<Odd>, odd: Odd) {
    let Some(known) = all.last_mut().filter(|known| known.start == odd.start) else { return all.push(odd) };
    known.unclaimed |= odd.unclaimed;
    for (at, byte) in odd.wanted.iter().enumerate().filter(|(at, byte)| odd.now[*at] != **byte) {
        known.wanted[at] = *byte;
    }
}

#[cfg(test)]
mod simulated;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::integrity::{
        copy::{self, Copy, hash},
        layout::{Part, Range as Area},
        memory::Memory,
    };
    use std::cell::RefCell;

    const START: u64 = 0xFFFF_FFFF_8100_0000;

    /// Memory of the test's.
    struct Bytes(RefCell<Vec<u8>>);

    impl Memory for Bytes {
        fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(address - START).map_err(io::Error::other)?;
            to.copy_from_slice(&self.0.borrow()[at..at + to.len()]);
            Ok(())
        }
    }

    /// Copies 200 KB, changes them, and judges all blocks that differ.
    fn odd(change: impl FnOnce(&mut [u8])) -> Vec<Odd> {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = Bytes(RefCell::new((0..200_000_u32).map(|at| (at % 251) as u8 | 1).collect()));
        let mut copy = Copy::open(folder.path(), "boot").expect("a copy");
        let range = Area { start: START, end: START + 200_000, is_code: true };
        let part = Part { name: "kernel".into(), ranges: vec![range], jumps: (0, 0), calls: (0, 0) };
        copy.add(part, &memory, || Ok(true)).expect("a copy");
        change(&mut memory.0.borrow_mut());
        // As another process reads it.
        let copy = Copy::open(folder.path(), "boot").expect("the copy");
        let mut all = Vec::new();
        for block in &copy.parts["kernel"].blocks {
            let now = copy::read(&memory, block).expect("bytes");
            if hash(&now) != block.hash {
                let old = copy.content("kernel", block).expect("the copy");
                let suspect = Suspect { part: "kernel".into(), block: block.clone(), old, now };
                all.extend(judge(&Sites::default(), &suspect).odd);
            }
        }
        all
    }

    #[test]
    fn nothing_is_odd_about_the_same_bytes() {
        assert_eq!(odd(|_| ()), []);
    }

    /// At the edge of two blocks, which both hold the byte.
    #[test]
    fn each_byte_is_found_once() {
        for at in [0, 5, 0xFFFF, 0x1_0000, 0x1_0001, 199_999] {
            let found = odd(|bytes| bytes[at] ^= 0x20);
            assert_eq!(found.len(), 1, "{at:#x}: {found:?}");
            let (odd, place) = (&found[0], START + at as u64);
            assert!(odd.start <= place && place < odd.start + odd.now.len() as u64, "{odd:?}");
            let wrong = usize::try_from(place - odd.start).expect("an offset");
            assert_eq!(odd.wanted[wrong], odd.now[wrong] ^ 0x20);
            assert_eq!(odd.now.iter().zip(&odd.wanted).filter(|(a, b)| a != b).count(), 1);
        }
    }

    #[test]
    fn neighbours_are_one_and_a_breakpoint_keeps_its_neighbours() {
        let found = odd(|bytes| bytes[0x100..0x104].copy_from_slice(&[2, 4, 6, 8]));
        assert_eq!((found.len(), found[0].unclaimed), (1, false));
        let found = odd(|bytes| bytes[0x100..0x102].copy_from_slice(&[0xCC, 2]));
        assert_eq!((found.len(), found[0].unclaimed), (1, true));
    }
}
