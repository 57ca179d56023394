//! The layout of the process's address space.
//!
//! A kernel expects to live in the upper half of the address space, where a process can have
//! nothing. All of the kernel is moved down:
//!
//! - Its image goes into its own direct map, below 2 GiB, because its code has 32-bit addresses.
//! - Areas that it finds through variables (vmalloc, the array of pages) go to addresses of the
//!   lower half that neither the host nor its programs use.
//! - Addresses that are numbers in its code (see [`crate::constants`]) lose their upper bits.
//!
//! | from | content |
//! |------|------|
//! | 0x10000 | the guest's programs, up to [`USER_END`], except the rows below |
//! | [`THUNKS`] | the monitor's code for slots |
//! | [`STUB`] | in program processes: their own page of code, and memory shared with the monitor |
//! | [`CELLS`] | the monitor's code for programs' system calls |
//! | [`BLOCK`] | the processor's block |
//! | [`FIXMAP`] | the kernel's fixed addresses |
//! | [`POINTERS`] | pointers into [`CELLS`] |
//! | [`DIRECT_MAP`] | the guest's memory with the kernel's image, then the guest's programs again |
//! | [`USER_END`] | the host's program: monitor, its heap |
//! | [`VMALLOC`], [`VMEMMAP`], [`ENTRY_AREA`] | areas that the kernel maps for itself |
//! | 0x7F00_0000_0000 | the host's libraries and stack |

use std::ops::Range;

use crate::memory::Memory;

/// The code for slots. Jumps reach it from the kernel's image.
pub const THUNKS: u64 = 0x3800_0000;
/// The largest size of the code for slots, in bytes.
pub const THUNKS_SIZE: u64 = 0x0200_0000;
/// The page of code that a program's process has besides the program ([`crate::isolation`]).
pub const STUB: u64 = 0x3B00_0000;
/// The memory that a program's process shares with the monitor.
pub const STUB_STATE: u64 = 0x3B01_0000;
/// The size of the shared memory, in bytes.
pub const STUB_STATE_SIZE: u64 = 0x1_0000;
const STUB_STATE_END: u64 = STUB_STATE + STUB_STATE_SIZE;
/// The processor's block.
pub const BLOCK: u64 = 0x3E00_0000;
/// The place of the kernel's constants for fixed addresses; they keep their low 30 bits. Kernels
/// clear the rest of a gigabyte of their direct map's tables, so these addresses are in another
/// gigabyte.
pub const FIXMAP: u64 = 0x3F00_0000;
/// Pointers to the code of rewritten sites. The upper bytes of their addresses are no instructions
/// (see [`crate::sites`]). Kernels' fixed addresses end below.
pub const POINTERS: u64 = 0x3FEA_0000;
/// The size of the pointers' area, in bytes.
pub const POINTERS_SIZE: u64 = 0x1_0000;
/// Addresses at which programs have patched copies of their pages, one for each copy.
pub const VIRTUALS: u64 = POINTERS + POINTERS_SIZE;
/// The code of rewritten sites.
pub const CELLS: u64 = 0x3C00_0000;
/// The size of that code, in bytes.
pub const CELLS_SIZE: u64 = 0x8_0000;
/// The address of guest-physical address 0.
pub const DIRECT_MAP: u64 = 0x4000_0000;
/// The end of the addresses of the guest's programs.
pub const USER_END: u64 = 0x5000_0000_0000;
/// The limit of programs' addresses in the kernel: a page less.
pub const TASK_SIZE: u64 = USER_END - 0x1000;
/// The first entry of a top-level table that belongs to the kernel, as an address.
pub const KERNEL_TABLES: u64 = USER_END;
/// The kernel's vmalloc area.
pub const VMALLOC: u64 = 0x5700_0000_0000;
/// The kernel's array of pages.
pub const VMEMMAP: u64 = 0x7700_0000_0000;
/// The kernel's entry areas of processors: a constant without its upper bits.
pub const ENTRY_AREA: u64 = 0x7E00_0000_0000;
pub const ENTRY_AREA_END: u64 = 0x7E80_0000_0000;
/// The lowest address of the guest's programs. Most hosts let a process map nothing below.
pub const USER_START: u64 = 0x1_0000;
/// The size of a page, in bytes.
pub const PAGE: u64 = 4096;

/// Returns true if the guest maps this address by its page tables.
#[must_use]
pub fn is_translated(address: u64) -> bool {
    is_user(address) || is_kernel_translated(address)
}

/// Returns true if only the kernel maps this address.
#[must_use]
pub fn is_kernel_translated(address: u64) -> bool {
    matches!(address, FIXMAP..POINTERS | VMALLOC..ENTRY_AREA_END)
}

/// Returns true if one of the guest's programs may have this address, as far as the direct map does
/// not take it.
#[must_use]
pub fn is_user(address: u64) -> bool {
    matches!(address, USER_START..THUNKS | DIRECT_MAP..USER_END)
}

/// Returns the addresses among programs' that no program can have: the monitor's code, and the
/// guest's memory.
#[must_use]
pub fn hole(memory: &Memory) -> Range<u64> {
    THUNKS..DIRECT_MAP + memory.size()
}

/// Returns true if the address is in the code or memory that a program's process has of its own.
#[must_use]
pub fn is_stub(address: u64) -> bool {
    matches!(address, STUB..STUB_STATE_END)
}
