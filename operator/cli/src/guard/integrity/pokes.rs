//! Changes that the kernel makes to its own code, while it makes them: the locks that it holds meanwhile, and
//! its own records of them.
//!
//! The kernel changes code under `text_mutex` only. It changes the function of a static call, and then the
//! code, under `static_call_mutex`. A kprobe is in the kernel's list before code changes for it, until the
//! code is as before. One that is a jump may leave the list earlier. It is in `unoptimizing_list` then.
//!
//! Each change is a record of perf's (`PERF_RECORD_TEXT_POKE`), with its address, for events that ask for
//! them. No counter of the processor's is needed. The kernel makes the record while it holds `text_mutex`, on
//! the CPU that changes the code.

use super::memory::{Memory, number};
use rustix::{
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use std::{
    ffi::c_void,
    fs, io,
    ops::Range,
    os::fd::{FromRawFd, OwnedFd},
    path::Path,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
};

/// What the kernel holds while it changes code, or what code should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Code changes.
    Text,
    /// The function of a static call changes.
    Calls,
    /// Jumps of kprobes that have left the list are still there.
    OldProbes,
}

impl Lock {
    /// Locks of what code should be.
    pub const CLAIMS: [Self; 2] = [Self::Calls, Self::OldProbes];

    fn symbol(self) -> &'static str {
        match self {
            Self::Text => "text_mutex",
            Self::Calls => "static_call_mutex",
            Self::OldProbes => "unoptimizing_list",
        }
    }
}

/// Addresses of the locks.
#[derive(Clone, Debug, Default)]
pub struct Locks {
    words: Vec<(Lock, u64)>,
}

/// Offset of a mutex's owner. Its lowest bits are flags.
const OWNER: u64 = 0;
/// The same with PREEMPT_RT: behind a spin lock and the root of a tree.
const OWNER_RT: u64 = 24;
const FLAGS: u64 = 7;

impl Locks {
    /// Finds the locks. A kernel without kprobes has none for them.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel hides where `text_mutex` is.
    pub fn find(symbols: &str) -> io::Result<Self> {
        let owner = if Path::new("/sys/kernel/realtime").exists() { OWNER_RT } else { OWNER };
        let mut words = Vec::new();
        for line in symbols.lines() {
            let mut parts = line.split_whitespace();
            let (Some(address), Some(_), Some(name), None) =
                (parts.next(), parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let lock = [Lock::Text].into_iter().chain(Lock::CLAIMS).find(|lock| lock.symbol() == name);
            if let (Some(lock), Ok(address)) = (lock, u64::from_str_radix(address, 16)) {
                words.push((lock, if lock == Lock::OldProbes { address } else { address + owner }));
            }
        }
        let is_text = |(lock, address): &(Lock, u64)| *lock == Lock::Text && *address > OWNER_RT;
        if !words.iter().any(is_text) {
            return Err(io::Error::other("the kernel hides the address of text_mutex"));
        }
        Ok(Self { words })
    }

    /// Returns true if nobody holds a lock.
    ///
    /// # Errors
    ///
    /// Returns an error if memory cannot be read.
    pub fn is_free(&self, memory: &impl Memory, lock: Lock) -> io::Result<bool> {
        for (_, address) in self.words.iter().filter(|(of, _)| *of == lock) {
            let mut word = [0; 8];
            memory.read(*address, &mut word)?;
            let word = u64::from_le_bytes(word);
            // An empty list names itself.
            let is_free = if lock == Lock::OldProbes { word == *address } else { word & !FLAGS == 0 };
            if !is_free {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// `struct perf_event_attr` of the first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    address: u64,
}
const _: () = assert!(size_of::<Attributes>() == 64);

const SOFTWARE: u32 = 1;
/// An event that counts nothing.
const DUMMY: u64 = 9;
/// The flag `text_poke`.
const TEXT_POKE: u64 = 1 << 33;
const CLOSE_ON_EXEC: u64 = 1 << 3;
/// The record's type.
const RECORD: u32 = 20;
/// Offset of a record's fields: address, sizes of the bytes before and after.
const ADDRESS: usize = 8;
const OLD_SIZE: usize = 16;
const NEW_SIZE: usize = 18;
const PAGE: usize = 4096;
/// Size of a CPU's records: some 8,000.
const RING: usize = 256 << 10;
/// Offset of the number of bytes that were written, in the page before the records.
const HEAD: usize = 1024;
/// File with the CPUs that are online.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// The records of all CPUs since a moment.
#[derive(Debug)]
pub struct Records {
    rings: Vec<Ring>,
    online: String,
}

impl Records {
    /// Begins to record the kernel's changes on all CPUs.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses.
    pub fn begin() -> io::Result<Self> {
        let online = fs::read_to_string(ONLINE)?;
        let rings = cpus(&online).map(Ring::begin).collect::<io::Result<_>>();
        let rings =
            rings.map_err(|error| io::Error::new(error.kind(), format!("perf_event_open: {error}")))?;
        Ok(Self { rings, online })
    }

    /// Returns the places that the kernel has changed since then; none if some may be missing.
    ///
    /// # Errors
    ///
    /// Returns an error if the list of CPUs cannot be read.
    pub fn places(&self) -> io::Result<Option<Vec<Range<u64>>>> {
        let mut places = Vec::new();
        for ring in &self.rings {
            let Some(bytes) = ring.bytes() else { return Ok(None) };
            places.extend(parse(&bytes));
        }
        Ok((fs::read_to_string(ONLINE)? == self.online).then_some(places))
    }
}

/// Returns the CPUs in a list such as `0-3,7`.
fn cpus(list: &str) -> impl Iterator<Item = i32> {
    list.trim().split(',').flat_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        // An empty range for what is no number.
        first.parse().unwrap_or(0)..=last.parse().unwrap_or(-1)
    })
}

/// Returns the places in records.
fn parse(bytes: &[u8]) -> Vec<Range<u64>> {
    let (mut places, mut at) = (Vec::new(), 0);
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    while at + ADDRESS <= bytes.len() {
        let header = number(bytes, at);
        let size = usize::from(half(at + 6));
        if header as u32 == RECORD && size > NEW_SIZE + 1 && at + size <= bytes.len() {
            let address = number(bytes, at + ADDRESS);
            let longest = half(at + OLD_SIZE).max(half(at + NEW_SIZE));
            places.push(address..address.saturating_add(u64::from(longest)));
        }
        at += size.max(ADDRESS);
    }
    places
}

/// The records of a CPU. The mapping keeps the event.
#[derive(Debug)]
struct Ring(NonNull<c_void>);

// SAFETY: The mapping belongs to the process, and the kernel writes to it whichever thread reads.
unsafe impl Send for Ring {}

impl Ring {
    fn begin(cpu: i32) -> io::Result<Self> {
        let attributes = Attributes {
            kind: SOFTWARE,
            size: size_of::<Attributes>() as u32,
            config: DUMMY,
            flags: TEXT_POKE,
            ..Attributes::default()
        };
        let every: libc::pid_t = -1;
        let alone: i32 = -1;
        // SAFETY: The kernel reads as many bytes of the attributes as `size` says. The result is a file of
        // this process or -1.
        let event = unsafe {
            let number =
                libc::syscall(libc::SYS_perf_event_open, &attributes, every, cpu, alone, CLOSE_ON_EXEC);
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(i32::try_from(number).map_err(io::Error::other)?)
        };
        // Records that do not fit are dropped if the mapping can be written to; else old ones would be.
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: A new mapping, at an address of the kernel's choice.
        let ring = unsafe { mmap(ptr::null_mut(), PAGE + RING, protection, MapFlags::SHARED, &event, 0) }?;
        Ok(Self(NonNull::new(ring).ok_or(Errno::NOMEM)?))
    }

    /// Returns the records; none if one may have been dropped.
    fn bytes(&self) -> Option<Vec<u8>> {
        let start = self.0.as_ptr().cast::<u8>();
        // SAFETY: The word lies in the mapping's first page, aligned, and the kernel writes it atomically.
        let head = unsafe { &*self.0.as_ptr().cast::<AtomicU64>().add(HEAD / 8) }.load(Ordering::Acquire);
        // No record is larger than a page.
        let size = usize::try_from(head).ok().filter(|size| size + PAGE <= RING)?;
        let mut bytes = vec![0; size];
        // SAFETY: `size` bytes follow the first page. The kernel does not write to them again before records
        // are marked as read, which they never are.
        unsafe { ptr::copy_nonoverlapping(start.add(PAGE), bytes.as_mut_ptr(), size) };
        Some(bytes)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: The mapping was made by `begin`, and nothing refers to it any more.
        let _ = unsafe { munmap(self.0.as_ptr(), PAGE + RING) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory whose words are all the same, but for one.
    struct Words(u64, u64);

    impl Memory for Words {
        fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
            let word = if address == self.0 { self.1 } else { 0 };
            to.copy_from_slice(&word.to_le_bytes());
            Ok(())
        }
    }

    const SYMBOLS: &str = "1000 D text_mutex\n2000 d static_call_mutex\n3000 d unoptimizing_list\n\
        4000 d text_mutex\t[some]\n";

    #[test]
    fn locks_are_free_or_held() {
        let locks = Locks::find(SYMBOLS).expect("locks");
        assert_eq!(locks.words.len(), 3, "a module's variable is no lock: {locks:?}");
        let (_, text) = locks.words[0];
        let is_free = |lock, at, word| locks.is_free(&Words(at, word), lock).expect("memory");
        assert!(is_free(Lock::Text, text, 0));
        assert!(is_free(Lock::Text, text, 1), "a task waits, and none holds it");
        assert!(!is_free(Lock::Text, text, 0xFFFF_8881_0000_0001));
        assert!(is_free(Lock::OldProbes, 0x3000, 0x3000) && !is_free(Lock::OldProbes, 0x3000, 0x9000));
        assert!(is_free(Lock::Calls, 0x2000, 0), "nobody holds it");
        assert!(Locks::find("0 D text_mutex\n").is_err() && Locks::find("1000 D other\n").is_err());
    }

    #[test]
    fn records_have_places() {
        let mut bytes = Vec::new();
        let mut record = |kind: u32, size: u16, rest: &[u8]| {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0, 0]);
            bytes.extend(size.to_le_bytes());
            bytes.extend(rest);
        };
        let poke = |address: u64, old: u16, new: u16| {
            [&address.to_le_bytes()[..], &old.to_le_bytes(), &new.to_le_bytes(), &[0; 12]].concat()
        };
        record(RECORD, 32, &poke(0x5000, 5, 5));
        record(9, 16, &[0xFF; 8]);
        record(RECORD, 32, &poke(0x6000, 0, 1));
        assert_eq!(parse(&bytes), [0x5000..0x5005, 0x6000..0x6001]);
        assert_eq!(parse(&bytes[..40]), std::slice::from_ref(&(0x5000..0x5005)));
        assert!(parse(&[0; 64]).is_empty());
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(cpus("0-2,5\n").collect::<Vec<_>>(), [0, 1, 2, 5]);
        assert_eq!(cpus("0\n").collect::<Vec<_>>(), [0]);
        assert_eq!(cpus("\n").count(), 0);
    }
}
