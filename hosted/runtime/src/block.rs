//! The processor's block: what code in slots, the way into the monitor and the way out of it address by its number.
//!
//! Code in slots, signal handlers and other processes of the machine write to it. So Rust has shared references to it alone, to
//! cells and atomic bytes: a reference may stay while another one is used to write.

use std::{array, cell::Cell, mem::offset_of, ptr, sync::atomic::AtomicU8};

use crate::{
    error::Result,
    layout::{BLOCK, PAGE},
    process,
};

/// The interrupt flag.
pub const IF: u64 = 1 << 9;

/// General registers in the order of their numbers, then instruction pointer and flags.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Registers {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub general: [Cell<u64>; 16],
    /// Where the guest goes on.
    pub rip: Cell<u64>,
    /// What the processor really has; the guest's interrupt flag is in [`Block::flags`].
    pub rflags: Cell<u64>,
}

impl Registers {
    /// Returns the values of the general registers.
    #[must_use]
    pub fn values(&self) -> [u64; 16] {
        array::from_fn(|at| self.general[at].get())
    }
}

/// RAX
pub const RAX: usize = 0;
/// RCX
pub const RCX: usize = 1;
/// RDX
pub const RDX: usize = 2;
/// RBX
pub const RBX: usize = 3;
/// RSP
pub const RSP: usize = 4;
/// RSI
pub const RSI: usize = 6;
/// RDI
pub const RDI: usize = 7;
/// R8
pub const R8: usize = 8;
/// R11
pub const R11: usize = 11;

/// Selectors, which say whether a program runs, or the kernel.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    /// CS
    pub cs: u16,
    /// SS
    pub ss: u16,
}

/// The block.
#[repr(C)]
#[derive(Debug)]
pub struct Block {
    /// Flags as PUSHF in the kernel shows them: the guest's interrupt flag, and bit 1.
    pub flags: Cell<u64>,
    /// Something waits for the guest to take interrupts. Signals set it.
    pub pending: AtomicU8,
    /// Another processor has called, and is answered whether the guest takes interrupts or not. Signals set it.
    pub called: AtomicU8,
    reserved: [u8; 2],
    /// Which slot the guest left by.
    pub exit: Cell<u32>,
    /// Where slots jump to.
    pub entry: Cell<u64>,
    /// The monitor's stack.
    pub stack: Cell<u64>,
    /// The monitor's base of FS.
    pub monitor_fs: Cell<u64>,
    /// The guest's base of FS.
    pub fs: Cell<u64>,
    /// The guest's base of GS.
    pub gs: Cell<u64>,
    /// What SWAPGS exchanges it with.
    pub gs_other: Cell<u64>,
    /// A register is kept here for a moment.
    pub scratch: Cell<u64>,
    /// Where the floating-point registers are kept.
    pub extended: Cell<u64>,
    /// The guest's registers while the monitor runs.
    pub registers: Registers,
    /// Of the guest.
    pub segments: Cell<Segments>,
    /// Those that a system call loads.
    pub call_segments: Cell<Segments>,
    /// Those that its return loads.
    pub return_segments: Cell<Segments>,
    /// Selectors that mean nothing in 64-bit mode, by the segment registers' numbers: ES, CS, SS, DS, FS, GS.
    pub data: [Cell<u16>; 6],
    /// CR2: the address of the last page fault that the guest was given.
    pub cr2: Cell<u64>,
    /// Where system calls go.
    pub lstar: Cell<u64>,
    /// Where slots jump to return from one.
    pub system_return: Cell<u64>,
    /// A stack for what needs one while the guest's is a program's; interrupts are off.
    pub small_stack: [Cell<u64>; 4],
}

impl Block {
    /// Sets CS of the guest.
    pub fn set_code_segment(&self, cs: u16) {
        self.segments.set(Segments { cs, ..self.segments.get() });
    }

    /// Sets SS of the guest.
    pub fn set_stack_segment(&self, ss: u16) {
        self.segments.set(Segments { ss, ..self.segments.get() });
    }
}

/// Offsets for what is written in assembler.
pub mod at {
    use super::{BLOCK, Block, PAGE, offset_of};

    /// [`Block::flags`]
    pub const FLAGS: u64 = BLOCK + offset_of!(Block, flags) as u64;
    /// The byte of it with the interrupt flag, which is its bit 1.
    pub const IF_BYTE: u64 = FLAGS + 1;
    /// [`Block::pending`]
    pub const PENDING: u64 = BLOCK + offset_of!(Block, pending) as u64;
    /// Whether system calls are the guest's: a byte that the host's kernel reads. It is each process' own.
    pub const SELECTOR: u64 = BLOCK + PAGE;
    /// [`Block::called`]
    pub const CALLED: u64 = BLOCK + offset_of!(Block, called) as u64;
    /// [`Block::exit`]
    pub const EXIT: u64 = BLOCK + offset_of!(Block, exit) as u64;
    /// [`Block::entry`]
    pub const ENTRY: u64 = BLOCK + offset_of!(Block, entry) as u64;
    /// [`Block::stack`]
    pub const STACK: u64 = BLOCK + offset_of!(Block, stack) as u64;
    /// [`Block::monitor_fs`]
    pub const MONITOR_FS: u64 = BLOCK + offset_of!(Block, monitor_fs) as u64;
    /// [`Block::fs`]
    pub const FS: u64 = BLOCK + offset_of!(Block, fs) as u64;
    /// [`Block::gs`]
    pub const GS: u64 = BLOCK + offset_of!(Block, gs) as u64;
    /// [`Block::gs_other`]
    pub const GS_OTHER: u64 = BLOCK + offset_of!(Block, gs_other) as u64;
    /// [`Block::scratch`]
    pub const SCRATCH: u64 = BLOCK + offset_of!(Block, scratch) as u64;
    /// [`Block::extended`]
    pub const EXTENDED: u64 = BLOCK + offset_of!(Block, extended) as u64;
    /// [`Block::segments`]
    pub const SEGMENTS: u64 = BLOCK + offset_of!(Block, segments) as u64;
    /// [`Block::data`]
    pub const DATA: u64 = BLOCK + offset_of!(Block, data) as u64;
    /// [`Block::cr2`]
    pub const CR2: u64 = BLOCK + offset_of!(Block, cr2) as u64;
    /// [`Block::call_segments`]
    pub const CALL_SEGMENTS: u64 = BLOCK + offset_of!(Block, call_segments) as u64;
    /// [`Block::return_segments`]
    pub const RETURN_SEGMENTS: u64 = BLOCK + offset_of!(Block, return_segments) as u64;
    /// [`Block::lstar`]
    pub const LSTAR: u64 = BLOCK + offset_of!(Block, lstar) as u64;
    /// [`Block::system_return`]
    pub const SYSTEM_RETURN: u64 = BLOCK + offset_of!(Block, system_return) as u64;
    /// The end of [`Block::small_stack`]
    pub const SMALL_STACK_END: u64 = BLOCK + offset_of!(Block, small_stack) as u64 + 32;
    /// [`Block::registers`]
    pub const REGISTERS: u64 = BLOCK + offset_of!(Block, registers) as u64;
    /// The instruction pointer in them.
    pub const RIP: u64 = REGISTERS + 16 * 8;
    /// The flags in them.
    pub const RFLAGS: u64 = RIP + 8;
}

/// Maps the block, which processes that are made afterwards have in common, and the selector.
///
/// # Errors
/// If something is there.
pub fn map() -> Result<()> {
    const RIGHTS: i32 = libc::PROT_READ | libc::PROT_WRITE;
    process::map_new(BLOCK, PAGE, RIGHTS, libc::MAP_SHARED)?;
    process::map_private(at::SELECTOR, PAGE, RIGHTS)
}

/// Returns the block of a thread, which stands for a process here: Miri has no memory at addresses of one's own choice.
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
    // SAFETY: `map` has mapped the page, which is never unmapped; it began as zeros, a valid block. All fields are cells or atomic. One
    // thread of a process uses the cells, and of several processes the one that has the turn (`crate::process::per_space`); only atomic
    // fields are for signal handlers.
    unsafe { &*ptr::with_exposed_provenance(BLOCK as usize) }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Once;

    use super::*;

    /// Maps it once for all tests, which share the process. The caller keeps other tests from it.
    pub fn ensure() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            if !cfg!(miri) {
                map().expect("the block's address is free");
            }
        });
    }
}
