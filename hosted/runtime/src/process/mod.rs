//! The seam between the machine and the processes that it is made of.
//!
//! A machine is one process of the host or several. All kinds of processes use the functions of
//! this file: [`fork`], [`begin`], [`await_ready`], the futex ([`wait_for`], [`wake`]) and shared
//! memory ([`map_common`], [`Common`]).
//!
//! | kind | made by |
//! |---|---|
//! | a processor | [`crate::smp`], for `--cpus` |
//! | an address space of the guest, with its kernel and the monitor | [`per_space`], without isolation |
//! | the programs of an address space | [`crate::isolation`], for `--isolation=process` |
//!
//! [`Placement`] says which of the last two a machine has. [`tags`] assigns address spaces to
//! processes in both. [`apart`] does work in a process of its own before there is a machine.

pub mod apart;
pub mod per_space;
pub mod tags;

use std::{
    ffi::{CStr, c_void},
    ops::{Deref, DerefMut},
    ptr::{self, NonNull},
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

use crate::{
    error::{Error, Result},
    isolation::ProgramProcesses,
    layout::PAGE,
    signal,
};
use per_space::SpaceProcess;

/// The processes in which programs run.
#[derive(Debug)]
pub enum Placement {
    /// One process shows all address spaces.
    One,
    /// Each address space has a process, with programs, kernel and monitor in it. The value is this process.
    PerSpace(SpaceProcess),
    /// Programs run in processes of their own; kernel and monitor stay in this one.
    Isolated(Box<ProgramProcesses>),
}

impl Placement {
    /// Returns this process if each address space has one.
    #[must_use]
    pub fn per_space(&self) -> Option<SpaceProcess> {
        match self {
            Self::PerSpace(space) => Some(*space),
            Self::One | Self::Isolated(_) => None,
        }
    }

    /// Returns the processes of programs if programs are isolated.
    #[must_use]
    pub fn isolated(&self) -> Option<&ProgramProcesses> {
        match self {
            Self::Isolated(programs) => Some(programs),
            Self::One | Self::PerSpace(_) => None,
        }
    }

    /// Returns the processes of programs, to change them, if programs are isolated.
    pub fn isolated_mut(&mut self) -> Option<&mut ProgramProcesses> {
        match self {
            Self::Isolated(programs) => Some(programs),
            Self::One | Self::PerSpace(_) => None,
        }
    }

    /// Returns true if the guest's kernel runs in this process.
    #[must_use]
    pub fn runs_guest(&self) -> bool {
        self.per_space().is_none_or(|space| !space.is_first())
    }

    /// Returns true if this process prepares the processor's first state.
    #[must_use]
    pub fn prepares_processor(&self) -> bool {
        self.per_space().is_none_or(|space| space.is_first())
    }
}

/// Ends the C library's restartable sequences in this thread. The host writes the number of the thread's
/// processor there at any time: each process made afterwards would have a page for it, and a process of
/// programs would no longer have the place.
pub fn end_restartable_sequences() {
    const UNREGISTER: u64 = 1;
    const SIGNATURE: u64 = 0x5305_3053;
    // SAFETY: It looks up a symbol, which is a number of this type.
    let offset = unsafe {
        libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>().as_ref().copied()
    };
    let Some(offset) = offset else { return };
    let base: u64;
    // SAFETY: The start requires that processes may read it.
    unsafe { std::arch::asm!("rdfsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    // The area can be unregistered only with its registered length.
    for length in (20..=256_u64).step_by(4) {
        // SAFETY: It takes numbers, and has no effect unless these are the area's.
        unsafe {
            libc::syscall(
                libc::SYS_rseq,
                base.wrapping_add_signed(offset as i64),
                length,
                UNREGISTER,
                SIGNATURE,
            )
        };
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Fork {
    /// This is the new process.
    Child,
    /// This is the old process; the new one has this number.
    Parent(i32),
    Refused,
}

/// Forks this process, which must have one thread.
pub(crate) fn fork() -> Fork {
    // SAFETY: The caller has one thread, so no lock is held by another one.
    match unsafe { libc::fork() } {
        0 => {
            signal::forget_children();
            Fork::Child
        }
        pid if pid > 0 => Fork::Parent(pid),
        _ => Fork::Refused,
    }
}

/// Forks this process as [`fork`] does, but without the C library's preparations, which would write to
/// many pages of each process. In the new process the library does not know the number of its thread,
/// which it needs for threads and for `abort` only. `descriptor` is for the new process's, if one is wanted.
fn clone(flags: libc::c_int, descriptor: *mut i32) -> Fork {
    #[cfg(miri)]
    return fork();
    let (flags, none) = (libc::c_long::from(flags), ptr::null::<c_void>());
    // SAFETY: The caller has one thread, so no lock is held by another one. The new process has a copy of
    // all memory and goes on from here. There is room for the descriptor.
    match unsafe { libc::syscall(libc::SYS_clone, flags, none, descriptor, none, none) } {
        0 => {
            signal::forget_children();
            Fork::Child
        }
        pid if pid > 0 => Fork::Parent(pid as i32),
        _ => Fork::Refused,
    }
}

/// Forks this process, which must have one thread. The new process has the same table of descriptors.
pub(crate) fn fork_with_files() -> Fork {
    clone(libc::CLONE_FILES | libc::SIGCHLD, ptr::null_mut())
}

/// A process that was made beside this one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sibling {
    /// This is the new process.
    Child,
    /// This is the old process. The new one has this number and this descriptor (pidfd).
    Made {
        process: i32,
        descriptor: i32,
    },
    Refused,
}

/// The flags of `clone` for a sibling.
pub const SIBLING: libc::c_int = libc::CLONE_PARENT | libc::CLONE_PIDFD | libc::SIGCHLD;

/// Forks this process, which must have one thread. The new process is a child of this one's parent.
pub(crate) fn fork_sibling() -> Sibling {
    let mut descriptor = -1;
    match clone(SIBLING, &raw mut descriptor) {
        Fork::Child => Sibling::Child,
        Fork::Parent(process) => Sibling::Made { process, descriptor },
        Fork::Refused => Sibling::Refused,
    }
}

/// Begins a process that the first process of a machine has made. The new process ends with the
/// first one, and leaves signals of the terminal to it.
///
/// # Errors
/// If the first process has ended.
pub(crate) fn begin(first: i32, name: &CStr) -> Result<()> {
    // SAFETY: All of these take numbers, or a string with its end.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 || libc::getppid() != first {
            return Err(Error::system("begin as a process of the machine"));
        }
        libc::setpgid(0, 0);
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
    Ok(())
}

/// Waits until a process is prepared. Returns false if it has ended before.
pub(crate) fn await_ready(ready: &AtomicU32, process: &AtomicI32) -> bool {
    while ready.load(Ordering::Acquire) == 0 {
        let pid = process.load(Ordering::Acquire);
        // A signal may have reported its end already. Then the process is no child any more.
        // SAFETY: The call is not asked for the status.
        if unsafe { libc::waitpid(pid, ptr::null_mut(), libc::WNOHANG) } != 0 {
            return false;
        }
        wait(ready, 0);
    }
    true
}

/// Waits while a word has this value, for 10 ms at most.
pub(crate) fn wait(word: &AtomicU32, value: u32) {
    wait_for(word, value, 10_000_000);
}

/// Waits while a word has this value, for so many nanoseconds at most, which must be below a
/// second. Other processes may share the word.
pub(crate) fn wait_for(word: &AtomicU32, value: u32, nanoseconds: i64) {
    let moment = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    // SAFETY: The word stays, and so does the time during the call.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const moment, 0, 0);
    }
}

/// Waits while a word has this value, until a signal comes at the latest.
pub(crate) fn wait_for_long(word: &AtomicU32, value: u32) {
    let forever = ptr::null::<libc::timespec>();
    // SAFETY: The word stays.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, forever, 0, 0) };
}

/// Wakes all processes that wait for a word.
pub(crate) fn wake(word: &AtomicU32) {
    let none = ptr::null::<c_void>();
    // SAFETY: The word stays.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, none, none, 0) };
}

/// Maps memory that processes made afterwards share. It is zero, and is never unmapped.
///
/// # Errors
/// If the host refuses.
pub fn map_common(length: usize) -> Result<*mut c_void> {
    #[cfg(miri)]
    return Ok(crate::memory::without_host(length).cast());
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let how = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: A new mapping where the host likes.
    let memory = unsafe { libc::mmap(ptr::null_mut(), length, rights, how, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Err(Error::system("map the memory that processes share"));
    }
    Ok(memory)
}

/// A value that processes made afterwards share. Only the process that has the turn uses it.
#[derive(Debug)]
pub struct Common<T>(NonNull<T>);

impl<T> Common<T> {
    /// Maps memory for a value, and writes the value there. It is never dropped.
    ///
    /// # Errors
    /// If the host refuses the memory.
    pub fn new(value: T) -> Result<Self> {
        let memory = map_common(size_of::<T>())?.cast::<T>();
        // SAFETY: The memory was mapped above, is large enough, starts at a page, and has no other
        // owner.
        unsafe { memory.write(value) };
        NonNull::new(memory).map(Self).ok_or_else(|| Error::bug("the host maps memory at 0"))
    }

    /// Turns the value into a shared reference.
    #[must_use]
    pub fn share(self) -> &'static T
    where
        T: Sync,
    {
        // SAFETY: The memory holds a value and is never unmapped; there is no other way to it any more.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Deref for Common<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: The memory holds a value and is never unmapped. No other process writes to it
        // while this one has the turn, and the turn is not handed over while a reference is in use.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Common<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: As above, and in this process this is the only way to it.
        unsafe { self.0.as_mut() }
    }
}

/// Maps a stack that grows down, with a page below it that nothing may touch. Pages that are never
/// used take no memory, and each process made afterwards has its own. Returns the lowest address.
///
/// # Errors
/// If the host refuses.
pub fn map_stack(length: usize) -> Result<*mut c_void> {
    const GUARD: usize = PAGE as usize;
    #[cfg(miri)]
    return Ok(crate::memory::without_host(length).cast());
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: A new mapping where the host likes, of which a part is given other rights.
    let stack = unsafe {
        let all = libc::mmap(ptr::null_mut(), GUARD + length, rights, how, -1, 0);
        if all == libc::MAP_FAILED || libc::mprotect(all, GUARD, libc::PROT_NONE) != 0 {
            return Err(Error::system("map a stack"));
        }
        all.byte_add(GUARD)
    };
    Ok(stack)
}

/// Maps private memory at a free address.
///
/// # Errors
/// If the address is not free.
pub fn map_private(address: u64, length: u64, protection: i32) -> Result<()> {
    map_new(address, length, protection, libc::MAP_PRIVATE)
}

/// Maps anonymous memory at a free address.
///
/// # Errors
/// If the address is not free.
pub(crate) fn map_new(address: u64, length: u64, protection: i32, how: i32) -> Result<()> {
    match map_free(address, length, protection, how | libc::MAP_ANONYMOUS, (-1, 0)) {
        true => Ok(()),
        false => Err(Error::system(&format!("map memory at {address:#x}"))
            .hint("another mapping of this process is at that address")),
    }
}

/// Maps memory or a file from an offset on, at a free address. Returns true if the host has done so.
pub(crate) fn map_free(address: u64, length: u64, protection: i32, how: i32, file: (i32, u64)) -> bool {
    // SAFETY: What is mapped already is not replaced: the flag forbids it.
    let mapped = unsafe {
        libc::mmap(
            ptr::with_exposed_provenance_mut(address as usize),
            length as usize,
            protection,
            how | libc::MAP_FIXED_NOREPLACE,
            file.0,
            file.1.cast_signed(),
        )
    };
    mapped.addr() as u64 == address
}
