//! The processor's block. Code in slots, the way into the monitor and the way out of it use its
//! fixed address.
//!
//! Code in slots, signal handlers and other processes of the machine write to the block. So Rust
//! has only shared references to its cells and atomic bytes. A shared reference may stay while
//! another one is used to write.

use std::{array, cell::Cell, mem::offset_of, ptr, sync::atomic::AtomicU8};

use crate::{
    error::Result,
    layout::{BLOCK, PAGE},
    process,
    selectors::Selectors,
};

/// EFLAGS.IF, the interrupt flag.
pub const IF: u64 = 1 << 9;

/// General registers in the order of their numbers, then instruction pointer and flags.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Registers {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub general: [Cell<u64>; 16],
    /// The address at which the guest goes on.
    pub rip: Cell<u64>,
    /// The flags that the CPU really has. The guest's interrupt flag is in [`Block::flags`].
    pub rflags: Cell<u64>,
}

impl Registers {
    /// Returns the values of the general registers.
    #[must_use]
    pub fn values(&self) -> [u64; 16] {
        array::from_fn(|at| self.general[at].get())
    }
}

pub const RAX: usize = 0;
pub const RCX: usize = 1;
pub const RDX: usize = 2;
pub const RBX: usize = 3;
pub const RSP: usize = 4;
pub const RSI: usize = 6;
pub const RDI: usize = 7;
pub const R8: usize = 8;
pub const R11: usize = 11;

/// Selectors of code and stack. They tell a program from the kernel.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    pub cs: u16,
    pub ss: u16,
}

/// The block: the part of a processor that slots, signal handlers and the monitor share.
#[repr(C)]
#[derive(Debug)]
pub struct Block {
    /// Flags as PUSHF in the kernel shows them: the guest's interrupt flag, and bit 1.
    pub flags: Cell<u64>,
    /// Set if an interrupt waits until the guest takes interrupts. Signal handlers set the byte.
    pub pending: AtomicU8,
    /// Set if another processor has called. The call is answered even if the guest takes no
    /// interrupts. Signal handlers set the byte.
    pub called: AtomicU8,
    reserved: [u8; 2],
    /// The number of the exit by which the guest left.
    pub exit: Cell<u32>,
    /// The address to which exits jump.
    pub entry: Cell<u64>,
    pub stack: Cell<u64>,
    /// The monitor's base of FS.
    pub monitor_fs: Cell<u64>,
    /// The guest's base of FS.
    pub fs: Cell<u64>,
    /// The guest's base of GS.
    pub gs: Cell<u64>,
    /// The value that SWAPGS exchanges with the guest's base of GS.
    pub gs_other: Cell<u64>,
    /// Room for one register while a thunk works.
    pub scratch: Cell<u64>,
    /// The address of the area that keeps the floating-point registers.
    pub extended: Cell<u64>,
    /// The guest's registers while the monitor runs.
    pub registers: Registers,
    /// The guest's selectors.
    pub segments: Cell<Segments>,
    /// The selectors that a system call loads.
    pub call_segments: Cell<Segments>,
    /// The selectors that the return from a system call loads.
    pub return_segments: Cell<Segments>,
    /// The selectors of ES, DS, FS and GS, while the guest goes from one process to another.
    pub data: Cell<Selectors>,
    /// CR2: the address of the last page fault that the guest was given.
    pub cr2: Cell<u64>,
    /// The address at which the kernel takes system calls.
    pub lstar: Cell<u64>,
    /// The address to which slots jump to return from a system call.
    pub system_return: Cell<u64>,
    /// A stack for code that needs one while the guest's stack is a program's. Interrupts are off
    /// then.
    pub small_stack: [Cell<u64>; 4],
}

impl Block {
    pub fn set_code_segment(&self, cs: u16) {
        self.segments.set(Segments { cs, ..self.segments.get() });
    }

    pub fn set_stack_segment(&self, ss: u16) {
        self.segments.set(Segments { ss, ..self.segments.get() });
    }
}

/// Addresses of the block's fields for assembler code.
pub mod at {
    use super::{BLOCK, Block, PAGE, offset_of};

    pub const FLAGS: u64 = BLOCK + offset_of!(Block, flags) as u64;
    /// The byte of [`Block::flags`] that holds the interrupt flag, as its bit 1.
    pub const IF_BYTE: u64 = FLAGS + 1;
    pub const PENDING: u64 = BLOCK + offset_of!(Block, pending) as u64;
    /// The selector of Syscall User Dispatch, which the host's kernel reads: set while system calls
    /// are the guest's. Each process has its own.
    pub const SELECTOR: u64 = BLOCK + PAGE;
    pub const CALLED: u64 = BLOCK + offset_of!(Block, called) as u64;
    pub const EXIT: u64 = BLOCK + offset_of!(Block, exit) as u64;
    pub const ENTRY: u64 = BLOCK + offset_of!(Block, entry) as u64;
    pub const STACK: u64 = BLOCK + offset_of!(Block, stack) as u64;
    pub const MONITOR_FS: u64 = BLOCK + offset_of!(Block, monitor_fs) as u64;
    pub const FS: u64 = BLOCK + offset_of!(Block, fs) as u64;
    pub const GS: u64 = BLOCK + offset_of!(Block, gs) as u64;
    pub const GS_OTHER: u64 = BLOCK + offset_of!(Block, gs_other) as u64;
    pub const SCRATCH: u64 = BLOCK + offset_of!(Block, scratch) as u64;
    pub const EXTENDED: u64 = BLOCK + offset_of!(Block, extended) as u64;
    pub const SEGMENTS: u64 = BLOCK + offset_of!(Block, segments) as u64;
    pub const CR2: u64 = BLOCK + offset_of!(Block, cr2) as u64;
    pub const CALL_SEGMENTS: u64 = BLOCK + offset_of!(Block, call_segments) as u64;
    pub const RETURN_SEGMENTS: u64 = BLOCK + offset_of!(Block, return_segments) as u64;
    pub const LSTAR: u64 = BLOCK + offset_of!(Block, lstar) as u64;
    pub const SYSTEM_RETURN: u64 = BLOCK + offset_of!(Block, system_return) as u64;
    /// The end of [`Block::small_stack`].
    pub const SMALL_STACK_END: u64 = BLOCK + offset_of!(Block, small_stack) as u64 + 32;
    pub const REGISTERS: u64 = BLOCK + offset_of!(Block, registers) as u64;
    /// The instruction pointer in [`Block::registers`].
    pub const RIP: u64 = REGISTERS + 16 * 8;
    /// The flags in [`Block::registers`].
    pub const RFLAGS: u64 = RIP + 8;
}

/// Maps the block, which processes made afterwards share, and the selector, which they do not.
///
/// # Errors
/// If another mapping is at one of the addresses.
pub fn map() -> Result<()> {
    const RIGHTS: i32 = libc::PROT_READ | libc::PROT_WRITE;
    process::map_new(BLOCK, PAGE, RIGHTS, libc::MAP_SHARED)?;
    process::map_private(at::SELECTOR, PAGE, RIGHTS)
}

/// Returns the block of a thread. A thread stands for a process in Miri, which cannot map memory at
/// a given address.
#[cfg(miri)]
#[must_use]
pub fn get() -> &'static Block {
    thread_local! {
        // SAFETY: Zeros are a valid block.
        static BLOCK: &'static Block = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    }
    BLOCK.with(|block| *block)
}

/// Returns the block, after [`map`].
#[cfg(not(miri))]
#[must_use]
pub fn get() -> &'static Block {
    // SAFETY: `map` has mapped the page, which is never unmapped. The page began as zeros, a valid
    // block. All fields are cells or atomic. One thread of a process uses the cells, and of several
    // processes the one that has the turn (`crate::process::per_space`). Signal handlers use atomic
    // fields only.
    unsafe { &*ptr::with_exposed_provenance(BLOCK as usize) }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Once;

    use super::*;

    /// Maps the block once for all tests, which share the process. The caller keeps other tests
    /// from the block.
    pub fn ensure() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            if !cfg!(miri) {
                map().expect("the block's address is free");
            }
        });
    }
}
