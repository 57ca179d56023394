//! The throttle of a machine whose host has little memory: the machine grows up to a limit, and stands still
//! there until its template gives it more.
//!
//! The template writes the limit to memory that both have mapped. The machine compares it with the pages of
//! its own files, in its first process, whenever that process has the turn. The timer of a guest that works
//! brings it there some hundred times a second. A machine that stands still says so in the same memory, and
//! answers its template meanwhile: it can be forked, saved, put to sleep and ended.
//!
//! Two other ways were weighed:
//!
//! - *The template stops processes* (SIGSTOP) when it sees that memory is short. It would have to look a
//!   hundred times a second on every host, also if nothing grows. A look that came late on a busy host would
//!   be too late. If the template was killed, somebody else would have to let the machine go on. A machine
//!   that is stopped answers nobody.
//! - *The monitor waits where it makes a page the machine's own.* It does not come by there for pages that
//!   the saved machine never used: those are the host's faults alone, and most memory that machines fill is
//!   such. A fault for each of them would cost more than the memory is worth.
//!
//! With a limit the template may be late: what machines can take without asking is what it has given them.
//! A machine passes its limit by what it fills between two ticks of its timer, which the host's reserve is for.
//!
//! No machine stands still for ever. It goes on if its template has ended, because their socket says so at
//! once. It also goes on if the template has not looked for [`LEASE`], as one that was stopped itself.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mercury_devices::Size;

use crate::devices::now;

/// The time for which a limit holds after the template's last look. A look takes up to 20 s, if a machine
/// does not answer.
pub const LEASE: Duration = Duration::from_secs(30);

/// The words that a machine and its template share.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Words {
    pub balloon: Size,
    /// The bytes of its own that the machine may have. Zero if there is no limit.
    limit: AtomicU64,
    /// The time at which the template has looked last (`CLOCK_MONOTONIC`), in nanoseconds.
    looked: AtomicU64,
    /// The bytes that the machine has, as it last counted them under a limit.
    used: AtomicU64,
    /// 1 while the machine stands still.
    waits: AtomicU64,
}

/// The place of the limit in the words' file.
const LIMIT: u64 = size_of::<Size>() as u64;

impl Words {
    /// Returns true if the machine must count what it has.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.limit.load(Ordering::Relaxed) != 0
    }

    /// Returns true if a machine that has so many bytes must stand still now.
    #[must_use]
    pub fn holds(&self, used: u64) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        self.used.store(used, Ordering::Relaxed);
        limit != 0
            && used > limit
            && now().saturating_sub(self.looked.load(Ordering::Relaxed)) < LEASE.as_nanos() as u64
    }

    /// Removes the limit: there is no template any more.
    pub fn lift(&self) {
        self.limit.store(0, Ordering::Relaxed);
    }

    /// Says if the machine stands still.
    pub fn set_waits(&self, waits: bool) {
        self.waits.store(waits.into(), Ordering::Relaxed);
    }
}

/// The account of a machine, as its template reads it. A program that has taken over its machine can write
/// anything there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub used: u64,
    pub waits: bool,
}

/// Reads a machine's account.
///
/// # Errors
/// The error of the host.
pub fn read_account(file: &File) -> io::Result<Account> {
    let mut bytes = [0; 16];
    file.read_exact_at(&mut bytes, LIMIT + 16)?;
    let [used, waits] = [0, 8].map(|at| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes));
    Ok(Account { used, waits: waits != 0 })
}

/// Writes a machine's limit. Nothing is no limit.
///
/// # Errors
/// The error of the host.
pub fn write_limit(file: &File, limit: Option<u64>) -> io::Result<()> {
    let limit = limit.map_or(0, |limit| limit.max(1));
    let bytes = [limit, now()].map(u64::to_le_bytes).concat();
    file.write_all_at(&bytes, LIMIT)
}

/// Writes what a machine has, before it counts itself.
///
/// # Errors
/// The error of the host.
pub fn write_used(file: &File, used: u64) -> io::Result<()> {
    file.write_all_at(&used.to_le_bytes(), LIMIT + 16)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_file_and_the_words_are_the_same() {
        use std::mem::offset_of;
        assert_eq!(LIMIT as usize, offset_of!(Words, limit));
        assert_eq!(offset_of!(Words, looked), LIMIT as usize + 8);
        assert_eq!(offset_of!(Words, used), LIMIT as usize + 16);
        assert_eq!(offset_of!(Words, waits), LIMIT as usize + 24);
        let file = tempfile::tempfile().unwrap();
        file.set_len(size_of::<Words>() as u64).unwrap();
        write_limit(&file, Some(5)).unwrap();
        write_used(&file, 7).unwrap();
        assert_eq!(read_account(&file).unwrap(), Account { used: 7, waits: false });
    }

    #[test]
    fn a_machine_stands_still_above_its_limit_while_its_template_looks() {
        let words = Words::default();
        assert!(!words.is_limited() && !words.holds(u64::MAX), "there is no limit");
        words.limit.store(100, Ordering::Relaxed);
        words.looked.store(now(), Ordering::Relaxed);
        assert!(!words.holds(100) && words.holds(101));
        assert_eq!(words.used.load(Ordering::Relaxed), 101);
        let late = now().saturating_sub(LEASE.as_nanos() as u64 + 1);
        words.looked.store(late, Ordering::Relaxed);
        assert!(!words.holds(101), "the lease has run out");
    }
}
