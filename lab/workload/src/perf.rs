//! Performance events: counters, and rings of samples.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    Result,
    attr::{Attr, flag, kind},
    cpus::check,
};

const PAGE: usize = 4096;
const DATA_PAGES: usize = 16;
/// Offsets in the first page of a ring (`struct perf_event_mmap_page`).
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;
const ENABLE: libc::c_ulong = 0x2400;
const DISABLE: libc::c_ulong = 0x2401;
const RESET: libc::c_ulong = 0x2403;
const RECORD_LOST: u32 = 2;
const RECORD_SAMPLE: u32 = 9;
/// Bits of `perf_event_header::misc`.
const MODE_MASK: u16 = 7;
const MODE_KERNEL: u16 = 1;
const MODE_USER: u16 = 2;

#[derive(Debug)]
pub struct Event(OwnedFd);

/// The subject of an event.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    /// The calling thread, on any CPU.
    ThisThread,
    /// All tasks on a CPU.
    Cpu(usize),
}

impl Event {
    /// Opens an event.
    pub fn open(attr: &Attr, target: Target) -> io::Result<Self> {
        let (pid, cpu) = match target {
            Target::ThisThread => (0, -1),
            Target::Cpu(cpu) => (-1, cpu as i32),
        };
        let attr = Attr { size: size_of::<Attr>() as u32, ..*attr };
        const CLOEXEC: u64 = 8;
        // SAFETY: the kernel reads `attr`.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attr, pid, cpu, -1, CLOEXEC) };
        let fd = check(fd as i32)?;
        // SAFETY: a new descriptor with no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Opens a breakpoint in user mode, off at first.
    pub fn breakpoint(target: Target, kind_of_access: u32, address: u64, length: u64) -> io::Result<Self> {
        let attr = Attr {
            kind: kind::BREAKPOINT,
            sample_period: 0,
            flags: flag::DISABLED | flag::EXCLUDE_KERNEL | flag::EXCLUDE_HV,
            breakpoint_type: kind_of_access,
            breakpoint_addr: address,
            breakpoint_len: length,
            ..Attr::default()
        };
        Self::open(&attr, target)
    }

    fn control(&self, request: libc::c_ulong) -> Result<()> {
        // SAFETY: these requests take no pointer.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), request, 0) })?;
        Ok(())
    }

    /// Starts counting from zero.
    pub fn start(&self) -> Result<()> {
        self.control(RESET)?;
        self.control(ENABLE)
    }

    /// Stops counting, and returns the count.
    pub fn finish(&self) -> Result<u64> {
        self.control(DISABLE)?;
        self.count()
    }

    /// Returns the count so far.
    pub fn count(&self) -> Result<u64> {
        let mut count = [0; 8];
        // SAFETY: the buffer has the size that is passed.
        let size = unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        if size != 8 {
            return Err(io::Error::last_os_error().into());
        }
        Ok(u64::from_ne_bytes(count))
    }
}

/// Samples since the last reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Samples {
    /// Samples in the kernel.
    pub kernel: u64,
    /// Samples in user mode.
    pub user: u64,
    /// Samples in neither.
    pub elsewhere: u64,
    /// Samples on another CPU than the event's.
    pub astray: u64,
    /// Samples for which there was no room.
    pub lost: u64,
}

impl Samples {
    /// Returns the number of all samples taken.
    pub fn taken(&self) -> u64 {
        self.kernel + self.user + self.elsewhere
    }
}

/// A ring to which the kernel writes samples, each with its instruction and its CPU.
pub struct Ring {
    event: Event,
    pages: *mut u8,
    cpu: usize,
}

impl Ring {
    /// Begins to sample a CPU.
    pub fn start(attr: &Attr, cpu: usize) -> io::Result<Self> {
        let event = Event::open(attr, Target::Cpu(cpu))?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = event.0.as_raw_fd();
        // SAFETY: a new mapping.
        let pages =
            unsafe { libc::mmap(ptr::null_mut(), (DATA_PAGES + 1) * PAGE, access, libc::MAP_SHARED, fd, 0) };
        if pages == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { event, pages: pages.cast(), cpu })
    }

    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: aligned words of the first page, which the kernel accesses atomically.
        unsafe { AtomicU64::from_ptr(self.pages.add(offset).cast()) }
    }

    fn byte(&self, position: u64) -> u8 {
        let offset = PAGE + position as usize % (DATA_PAGES * PAGE);
        // SAFETY: within the mapping; the kernel does not write between tail and head.
        unsafe { self.pages.add(offset).read_volatile() }
    }

    fn bytes<const N: usize>(&self, position: u64) -> [u8; N] {
        std::array::from_fn(|index| self.byte(position + index as u64))
    }

    /// Takes all samples out of the ring.
    pub fn take(&self) -> Samples {
        let mut samples = Samples::default();
        let head = self.position(DATA_HEAD).load(Ordering::Acquire);
        let mut tail = self.position(DATA_TAIL).load(Ordering::Relaxed);
        while tail < head {
            let size = u16::from_ne_bytes(self.bytes(tail + 6));
            self.count(tail, &mut samples);
            tail += u64::from(size.max(8));
        }
        self.position(DATA_TAIL).store(tail, Ordering::Release);
        samples
    }

    fn count(&self, record: u64, samples: &mut Samples) {
        match u32::from_ne_bytes(self.bytes(record)) {
            RECORD_SAMPLE => {
                let mode = u16::from_ne_bytes(self.bytes(record + 4)) & MODE_MASK;
                let cpu = u32::from_ne_bytes(self.bytes(record + 16));
                samples.astray += u64::from(cpu as usize != self.cpu);
                match mode {
                    MODE_KERNEL => samples.kernel += 1,
                    MODE_USER => samples.user += 1,
                    _ => samples.elsewhere += 1,
                }
            }
            RECORD_LOST => samples.lost += u64::from_ne_bytes(self.bytes(record + 16)),
            _ => {}
        }
    }

    /// Returns the ring's event.
    pub fn event(&self) -> &Event {
        &self.event
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped in `start`.
        unsafe { libc::munmap(self.pages.cast(), (DATA_PAGES + 1) * PAGE) };
    }
}
