//! The workloads of the benchmarks. Unsafe code is needed for processes, mappings and faults. Each
//! function sets up one workload and returns a closure that runs rounds of it.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
};

const PAGE: usize = 4096;

/// Size of the file that lmbench maps.
const MAPPED_BYTES: usize = 64 << 20;
/// Bytes that lmbench touches: a tenth of the file.
const TOUCHED_BYTES: usize = MAPPED_BYTES / 10;
/// Distance between two touches.
const TOUCH_STRIDE: usize = 16 << 10;

/// Pages of the page-fault workload.
const FAULT_PAGES: usize = 1024;

/// A workload that can be repeated.
pub struct Workload {
    /// Runs so many rounds.
    pub run: Box<dyn FnMut(u64) -> io::Result<()>>,
    /// Operations in a round.
    pub operations_per_round: u64,
    /// Part of an operation's time that does not belong to the operation, in microseconds.
    pub overhead_us: f64,
}

impl Workload {
    fn new(mut round: impl FnMut() -> io::Result<()> + 'static) -> Self {
        let run = Box::new(move |rounds| (0..rounds).try_for_each(|_| round()));
        Self { run, operations_per_round: 1, overhead_us: 0.0 }
    }
}

/// Returns the result of a system call, or its error.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Makes the shortest system call.
pub fn null_call() -> io::Result<Workload> {
    Ok(Workload::new(|| {
        // SAFETY: getppid has no arguments and touches no memory. By number, so that no library
        // answers from a cache.
        unsafe { libc::syscall(libc::SYS_getppid) };
        Ok(())
    }))
}

/// Forks a child that runs `child` and never returns from it; waits for it and expects status 0.
fn fork_and_wait(child: impl FnOnce()) -> io::Result<()> {
    let pid = fork_child(child)?;
    wait(pid)
}

fn fork_child(child: impl FnOnce()) -> io::Result<libc::pid_t> {
    // SAFETY: the child runs only `child` and _exit. In this module `child` makes only system calls
    // on memory that was allocated before, so no lock and no allocator of the parent is used.
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        child();
        // SAFETY: ends the child at once, without the parent's exit handlers.
        unsafe { libc::_exit(127) };
    }
    Ok(pid)
}

fn wait(pid: libc::pid_t) -> io::Result<()> {
    let mut status = 0;
    // SAFETY: waits for a child of this process; the status is written to a live variable.
    while check(unsafe { libc::waitpid(pid, &mut status, 0) })
        .is_err_and(|e| e.kind() == io::ErrorKind::Interrupted)
    {}
    if status == 0 { Ok(()) } else { Err(io::Error::other("a child process failed")) }
}

fn exit_child() {
    // SAFETY: ends the child at once.
    unsafe { libc::_exit(0) };
}

/// Forks, exits, waits.
pub fn fork() -> io::Result<Workload> {
    Ok(Workload::new(|| fork_and_wait(exit_child)))
}

/// Forks, executes a small program, waits.
pub fn exec() -> io::Result<Workload> {
    Ok(Workload::new(|| fork_and_wait(|| execute(&[c"/bin/true".as_ptr(), ptr::null()]))))
}

/// Forks, executes a shell that runs a small program, waits.
pub fn sh() -> io::Result<Workload> {
    let arguments = [c"/bin/sh".as_ptr(), c"-c".as_ptr(), c"/bin/true".as_ptr(), ptr::null()];
    Ok(Workload::new(move || fork_and_wait(|| execute(&arguments))))
}

/// Replaces the process; returns only if that fails.
fn execute(arguments: &[*const libc::c_char]) {
    let environment = [ptr::null()];
    let Some(path) = arguments.first() else { return };
    // SAFETY: path and arguments are string literals, and both arrays end with a null pointer.
    unsafe { libc::execve(*path, arguments.as_ptr(), environment.as_ptr()) };
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((read, write))
}

/// Passes a token on.
fn pass(from: &OwnedFd, to: &OwnedFd, memory: &mut [u64]) -> io::Result<()> {
    let mut token = [0_u8; 1];
    // SAFETY: one byte into and out of a live buffer, on descriptors that `from` and `to` own.
    let read = unsafe { libc::read(from.as_raw_fd(), token.as_mut_ptr().cast(), 1) };
    if read != 1 {
        return Err(io::Error::other("the ring of processes is broken"));
    }
    touch(memory);
    // SAFETY: as above.
    let written = unsafe { libc::write(to.as_raw_fd(), token.as_ptr().cast(), 1) };
    if written == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads all of a process's data, as lmbench does.
fn touch(memory: &mut [u64]) {
    std::hint::black_box(memory.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
}

/// Makes a ring of processes on one CPU, joined by pipes, that pass a token on; each touches `kib`
/// of data of its own in between. The children end when the ring is broken by closing its pipes.
pub fn context_switch(processes: usize, kib: usize) -> io::Result<Workload> {
    let mut memory = vec![1_u64; kib * 128];
    let affinity = rustix::thread::sched_getaffinity(None)?;
    let pipes: Vec<_> = (0..processes).map(|_| pipe()).collect::<io::Result<_>>()?;
    let mut ring = Ring { children: Vec::new(), pipes, affinity };
    stay_here()?;
    let overhead_us = pipe_overhead(&mut memory)?;
    for index in 1..processes {
        let child = ring.fork_member(index, &mut memory)?;
        ring.children.push(child);
    }
    let run = move |rounds| (0..rounds).try_for_each(|_| ring.turn(&mut memory));
    Ok(Workload { run: Box::new(run), operations_per_round: processes as u64, overhead_us })
}

/// Measures a token's way through a pipe to another process, writing and reading included.
pub fn pipe_latency() -> io::Result<Workload> {
    Ok(Workload { overhead_us: 0.0, ..context_switch(2, 0)? })
}

/// The processes of a ring: process `i` reads pipe `i` and writes pipe `i + 1`.
struct Ring {
    children: Vec<libc::pid_t>,
    pipes: Vec<(OwnedFd, OwnedFd)>,
    /// Affinity of this process before, which is put back at the end.
    affinity: rustix::thread::CpuSet,
}

/// Binds this process, and the children that it forks from now on, to its present CPU.
fn stay_here() -> io::Result<()> {
    // rustix asks only the vDSO, and panics if that lacks the function, as in the newest User Mode
    // Linux.
    // SAFETY: the call has no arguments.
    let cpu = unsafe { libc::sched_getcpu() };
    let cpu = usize::try_from(cpu).map_err(|_| io::Error::last_os_error())?;
    let mut here = rustix::thread::CpuSet::new();
    here.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &here)?)
}

impl Ring {
    fn ends(&self, index: usize) -> Option<(&OwnedFd, &OwnedFd)> {
        let next = (index + 1) % self.pipes.len();
        Some((&self.pipes.get(index)?.0, &self.pipes.get(next)?.1))
    }

    fn fork_member(&self, index: usize, memory: &mut [u64]) -> io::Result<libc::pid_t> {
        let Some((from, to)) = self.ends(index) else { return Err(io::Error::other("no such process")) };
        fork_child(|| while pass(from, to, memory).is_ok() {})
    }

    /// Passes one token round the ring.
    fn turn(&self, memory: &mut [u64]) -> io::Result<()> {
        let Some((from, to)) = self.ends(0) else { return Ok(()) };
        // SAFETY: writes one byte of a literal to a pipe that this process owns.
        let written = unsafe { libc::write(to.as_raw_fd(), [0_u8].as_ptr().cast(), 1) };
        if written != 1 {
            return Err(io::Error::last_os_error());
        }
        touch(memory);
        let mut token = [0_u8; 1];
        // SAFETY: reads one byte into a live buffer.
        let read = unsafe { libc::read(from.as_raw_fd(), token.as_mut_ptr().cast(), 1) };
        if read == 1 { Ok(()) } else { Err(io::Error::other("the ring of processes is broken")) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for child in &self.children {
            // SAFETY: children of this process that were not waited for yet, so the numbers are
            // still theirs.
            unsafe { libc::kill(*child, libc::SIGKILL) };
            let _ = wait(*child);
        }
        let _ = rustix::thread::sched_setaffinity(None, &self.affinity);
    }
}

/// Measures the cost of passing a token to oneself, touching the data included. It is not the cost
/// of a switch.
fn pipe_overhead(memory: &mut [u64]) -> io::Result<f64> {
    const PASSES: u32 = 2000;
    let (read, write) = pipe()?;
    // SAFETY: writes one byte of a literal to a pipe that this process owns.
    check(unsafe { libc::write(write.as_raw_fd(), [0_u8].as_ptr().cast(), 1) } as i32)?;
    let start = std::time::Instant::now();
    for _ in 0..PASSES {
        pass(&read, &write, memory)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(PASSES))
}

/// Makes a file in memory of so many bytes.
fn memory_file(bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a literal; the returned descriptor is new and has no other owner.
    let file = unsafe {
        OwnedFd::from_raw_fd(check(libc::memfd_create(c"mercury-bench".as_ptr(), libc::MFD_CLOEXEC))?)
    };
    // SAFETY: sets the length of a file that this process owns.
    check(unsafe { libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t) })?;
    Ok(file)
}

/// A mapping that ends with its owner.
struct Mapping {
    base: *mut u8,
    bytes: usize,
}

impl Mapping {
    fn new(bytes: usize, protection: i32, flags: i32, file: i32) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, file, 0) };
        if base == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { base: base.cast(), bytes })
        }
    }

    fn of_file(file: &OwnedFd, bytes: usize) -> io::Result<Self> {
        Self::new(bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn read(&self, offset: usize) {
        assert!(offset < self.bytes);
        // SAFETY: inside the mapping (asserted), which is readable and backed to its end.
        std::hint::black_box(unsafe { self.base.add(offset).read_volatile() });
    }

    fn write(&self, offset: usize) {
        assert!(offset < self.bytes);
        // SAFETY: as in `read`; mappings written here are writable.
        unsafe { self.base.add(offset).write_volatile(1) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made, and no pointer into it is left.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// Maps a file, touches some of it, unmaps it.
pub fn map_file() -> io::Result<Workload> {
    let file = memory_file(MAPPED_BYTES)?;
    Ok(Workload::new(move || {
        let mapping = Mapping::of_file(&file, MAPPED_BYTES)?;
        (0..TOUCHED_BYTES).step_by(TOUCH_STRIDE).for_each(|offset| mapping.read(offset));
        Ok(())
    }))
}

/// Touches pages that are in memory but not mapped. A round also needs a mapping and an unmapping,
/// which are measured apart and subtracted.
pub fn page_fault() -> io::Result<Workload> {
    let file = memory_file(FAULT_PAGES * PAGE)?;
    let touch_all = |mapping: &Mapping| order().for_each(|page| mapping.write(page * PAGE));
    touch_all(&Mapping::of_file(&file, FAULT_PAGES * PAGE)?);
    let overhead_us = mapping_overhead(&file)?;
    let round = Workload::new(move || {
        touch_all(&Mapping::of_file(&file, FAULT_PAGES * PAGE)?);
        Ok(())
    });
    Ok(Workload { operations_per_round: FAULT_PAGES as u64, overhead_us, ..round })
}

/// Returns all pages in an order that no readahead guesses: a stride that shares no factor with
/// their number.
fn order() -> impl Iterator<Item = usize> {
    (0..FAULT_PAGES).map(|index| index * 389 % FAULT_PAGES)
}

/// Measures the cost of mapping and unmapping, spread over the pages of a round.
fn mapping_overhead(file: &OwnedFd) -> io::Result<f64> {
    const ROUNDS: u32 = 200;
    let start = std::time::Instant::now();
    for _ in 0..ROUNDS {
        Mapping::of_file(file, FAULT_PAGES * PAGE)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS) / FAULT_PAGES as f64)
}

/// Writes to a page that may only be read: fault, signal, return. lmbench subtracts the cost of a
/// signal to oneself; on a present processor that is more than the fault, so it stays in.
pub fn protection_fault() -> io::Result<Workload> {
    let page = Mapping::new(PAGE, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
    let handler = SkipFaults::install();
    Ok(Workload::new(move || {
        let _ = &handler;
        faulting_write(page.base);
        Ok(())
    }))
}

/// Bytes of the instruction in [`faulting_write`].
const FAULTING_WRITE_BYTES: i64 = 3;

fn faulting_write(address: *mut u8) {
    // SAFETY: `mov byte ptr [rdi], 0` (C6 07 00) on a page of this process that is mapped
    // read-only. It faults, and the handler that is installed meanwhile continues after it; memory
    // and registers stay as they are.
    unsafe {
        std::arch::asm!(".byte 0xc6, 0x07, 0x00", in("rdi") address, options(nostack, preserves_flags))
    };
}

/// A guard during whose life SIGSEGV continues after the faulting instruction of
/// [`faulting_write`].
struct SkipFaults {
    before: libc::sigaction,
}

extern "C" fn skip(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a SA_SIGINFO handler a valid ucontext, and no other code uses it
    // now.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    if let Some(rip) = context.uc_mcontext.gregs.get_mut(libc::REG_RIP as usize) {
        *rip += FAULTING_WRITE_BYTES;
    }
}

impl SkipFaults {
    fn install() -> Self {
        // SAFETY: all zeroes is a valid sigaction.
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
        action.sa_sigaction = skip as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the handler only writes to the context that it is given.
        unsafe { libc::sigaction(libc::SIGSEGV, &action, &mut before) };
        Self { before }
    }
}

impl Drop for SkipFaults {
    fn drop(&mut self) {
        // SAFETY: puts back the action that the kernel returned.
        unsafe { libc::sigaction(libc::SIGSEGV, &self.before, ptr::null_mut()) };
    }
}
