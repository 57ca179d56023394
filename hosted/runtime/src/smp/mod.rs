//! Several processors. Each is a process of the host, with its own block, its own mappings and its
//! own timer. They share the guest's memory, and one page with requests to each other.
//!
//! The first processor's process has the devices; the others ask it ([`bus`]). An interrupt from
//! one processor to another ([`apic`]) is a bit in the page, and a signal if the other may not have
//! seen it yet.
//!
//! A processor that is not started, or that halts with interrupts off, waits until it is started.
//! So a kernel can take one offline and back. If all of them wait so, the machine has halted.

pub mod apic;
pub mod bus;

use std::{
    ptr,
    sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering},
};

use crate::{
    block,
    error::{Error, Result},
    layout::PAGE,
    process::{self, Fork},
    signal,
};

/// Processors at most: an identifier is a bit of eight in kernels' usual mode of addressing.
pub const MOST: usize = 8;
/// The signal by which one processor calls another.
pub const CALL: i32 = libc::SIGUSR2;

/// States of a processor, as others see them.
pub mod state {
    /// It waits to be started.
    pub const WAITING: u32 = 0;
    /// It has been told to start.
    pub const STARTING: u32 = 1;
    pub const RUNNING: u32 = 2;
}

/// The part of the page for one processor.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Cpu {
    process: AtomicI32,
    state: AtomicU32,
    /// It sleeps, and no interrupt wakes it.
    parked: AtomicU32,
    /// It has been called for an interrupt, and has not looked yet.
    called: AtomicU32,
    /// The register by which it is addressed.
    logical: AtomicU32,
    /// Its process is prepared.
    ready: AtomicU32,
    requested: [AtomicU64; 4],
    /// The processor's question to the first one.
    question: bus::Mailbox,
}

/// The page that all processors share.
#[repr(C)]
#[derive(Debug)]
pub struct Shared {
    cpus: [Cpu; MOST],
    /// All processes are there.
    complete: AtomicU32,
}

const _: () = assert!(size_of::<Shared>() <= PAGE as usize);

/// One of several processors.
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    /// Its number, which is its identifier, too.
    pub number: usize,
    /// The number of processors.
    pub count: usize,
    shared: &'static Shared,
}

impl Processor {
    /// The first one of so many.
    ///
    /// # Errors
    /// If the host refuses a page of memory.
    pub fn first(count: usize) -> Result<Self> {
        debug_assert!((1..=MOST).contains(&count));
        let page = process::map_common(PAGE as usize)?;
        // SAFETY: The page is never unmapped and large enough. It is zero, which is a valid value,
        // and all of it is atomic.
        let shared: &'static Shared = unsafe { &*page.cast::<Shared>() };
        let first = Self { number: 0, count, shared };
        for number in 0..count {
            first.cpu(number).parked.store(u32::from(number > 0), Ordering::Relaxed);
        }
        // SAFETY: It takes nothing.
        first.own().process.store(unsafe { libc::getpid() }, Ordering::Relaxed);
        first.own().state.store(state::RUNNING, Ordering::Release);
        Ok(first)
    }

    /// Makes the other processors' processes, as copies of this one, which must have one thread.
    /// Returns its own number in each process.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn multiply(self) -> Result<Self> {
        for number in 1..self.count {
            match process::fork() {
                Fork::Child => return Self { number, ..self }.begin(),
                Fork::Parent(pid) => {
                    self.cpu(number).process.store(pid, Ordering::Release);
                    signal::watch_child(pid);
                }
                Fork::Refused => {
                    return Err(Error::system("start a process for a processor").hint(
                        "the host limits your processes: raise ulimit -u, or give the guest fewer processors",
                    ));
                }
            }
        }
        self.shared.complete.store(1, Ordering::Release);
        process::wake(&self.shared.complete);
        Ok(self)
    }

    /// Begins the new process. It ends with the first one, and leaves signals of the terminal to
    /// it.
    fn begin(self) -> Result<Self> {
        process::begin(self.cpu(0).process.load(Ordering::Acquire), c"mercury-cpu")?;
        while self.shared.complete.load(Ordering::Acquire) == 0 {
            process::wait(&self.shared.complete, 0);
        }
        Ok(self)
    }

    /// Says that this process is prepared.
    pub fn is_ready(&self) {
        self.own().ready.store(1, Ordering::Release);
        process::wake(&self.own().ready);
    }

    /// Waits until all others are prepared.
    ///
    /// # Errors
    /// If one of them has ended before.
    pub fn await_others(&self) -> Result<()> {
        for number in 1..self.count {
            let cpu = self.cpu(number);
            if !process::await_ready(&cpu.ready, &cpu.process) {
                return Err(Error::host(format!("processor {number} could not be started")));
            }
        }
        Ok(())
    }

    /// Returns the process numbers of all processors.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let process = |number| self.cpu(number).process.load(Ordering::Acquire).cast_unsigned();
        (0..self.count).map(process).collect()
    }

    /// Returns true for the first processor, which has the devices.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.number == 0
    }

    fn cpu(&self, number: usize) -> &'static Cpu {
        &self.shared.cpus[number]
    }

    fn own(&self) -> &'static Cpu {
        self.cpu(self.number)
    }

    /// Calls another one: it stops whatever it does, and looks.
    pub fn call(&self, number: usize) {
        let process = self.cpu(number).process.load(Ordering::Acquire);
        // SAFETY: It takes numbers; a processor's thread has its process' number.
        unsafe { libc::syscall(libc::SYS_tgkill, process, process, CALL) };
    }

    /// Asks a processor for an interrupt, and calls it if it may not have seen the last request. A
    /// processor does not call itself.
    pub fn request(&self, number: usize, vector: u8) {
        let cpu = self.cpu(number);
        cpu.requested[usize::from(vector / 64)].fetch_or(1 << (vector % 64), Ordering::SeqCst);
        if number != self.number && cpu.called.swap(1, Ordering::SeqCst) == 0 {
            self.call(number);
        }
    }

    /// Records that this processor now reads the requests to it.
    pub fn acknowledge_call(&self) {
        self.own().called.store(0, Ordering::SeqCst);
    }

    /// Resets another one: it waits to be started.
    pub fn reset(&self, number: usize) {
        if number != 0 && number != self.number {
            self.cpu(number).state.store(state::WAITING, Ordering::SeqCst);
            self.call(number);
        }
    }

    /// Starts another one, if it waits for that.
    pub fn start(&self, number: usize) {
        let cpu = self.cpu(number);
        let waits = cpu.state.load(Ordering::SeqCst) == state::WAITING;
        if waits && number != self.number {
            cpu.parked.store(0, Ordering::SeqCst);
            cpu.state.store(state::STARTING, Ordering::SeqCst);
            self.call(number);
        }
    }

    /// Returns true if this processor was reset, or never started.
    #[must_use]
    pub fn is_reset(&self) -> bool {
        self.own().state.load(Ordering::SeqCst) != state::RUNNING
    }

    /// Returns true if this processor was told to start. It is running from then on.
    #[must_use]
    pub fn starts(&self) -> bool {
        let (from, to) = (state::STARTING, state::RUNNING);
        self.own().state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// This one sleeps, and no interrupt wakes it. The first one gets to know.
    pub fn park(&self) {
        self.own().parked.store(1, Ordering::SeqCst);
        if !self.is_first() {
            self.call(0);
        }
    }

    /// Returns true if all processors sleep so.
    #[must_use]
    pub fn are_all_parked(&self) -> bool {
        (0..self.count).all(|number| self.cpu(number).parked.load(Ordering::SeqCst) == 1)
    }
}

/// Sleeps until a signal comes, unless one has come since the block's byte was cleared.
pub fn sleep() {
    // SAFETY: The sets are initialized by the calls; the thread's mask is put back.
    unsafe {
        let (mut all, mut none, mut before) = (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        if crate::machine::pending().load(Ordering::Acquire) == 0 {
            libc::ppoll(ptr::null_mut(), 0, ptr::null(), &raw const none);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
    }
}

/// Returns the block's byte for calls of other processors.
#[must_use]
pub fn called() -> &'static std::sync::atomic::AtomicU8 {
    &block::get().called
}
