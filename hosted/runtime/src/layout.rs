//! Where things are in the process.
//!
//! A kernel expects to live in the upper half of the address space, where a process can have nothing. It is moved down as a
//! whole: its image, which must lie below 2 GiB because its code has 32-bit addresses, into its own direct map; what it
//! finds through variables (vmalloc, the array of pages) to addresses of the lower half that neither the host nor its
//! programs use; and what it has as numbers in its code (see [`crate::constants`]) to the same addresses without their
//! upper bits.
//!
//! | from | what |
//! |------|------|
//! | 0x10000 | the guest's programs, up to [`USER_END`], except for what is next |
//! | [`THUNKS`] | the monitor's code for slots |
//! | [`STUB`] | in programs' own processes: the code that they have besides the program's, and what they share with the monitor |
//! | [`CELLS`] | the monitor's code for programs' system calls |
//! | [`BLOCK`] | the processor's block, which that code addresses by its number |
//! | [`FIXMAP`] | the kernel's fixed addresses |
//! | [`POINTERS`] | pointers into [`CELLS`] |
//! | [`DIRECT_MAP`] | the guest's memory, with the kernel's image in it; behind it the guest's programs again |
//! | [`USER_END`] | the host's program: monitor, its heap |
//! | [`VMALLOC`], [`VMEMMAP`], [`ENTRY_AREA`] | what the kernel maps for itself |
//! | 0x7F00_0000_0000 | the host's libraries and stack |

use std::ops::Range;

use crate::memory::Memory;

/// Code for slots: jumps reach it from the kernel's image.
pub const THUNKS: u64 = 0x3800_0000;
/// At most as much of it.
pub const THUNKS_SIZE: u64 = 0x0200_0000;
/// The one page of code that is in the processes of programs ([`crate::isolation`]) besides the program.
pub const STUB: u64 = 0x3B00_0000;
/// What such a process shares with the monitor.
pub const STUB_STATE: u64 = 0x3B01_0000;
/// Bytes of it.
pub const STUB_STATE_SIZE: u64 = 0x1_0000;
/// The end of it.
const STUB_STATE_END: u64 = STUB_STATE + STUB_STATE_SIZE;
/// The processor's block.
pub const BLOCK: u64 = 0x3E00_0000;
/// Where the kernel's constants for fixed addresses go: the same low 30 bits. Kernels clear what is left of a gigabyte of
/// their direct map's tables, so these are in another one.
pub const FIXMAP: u64 = 0x3F00_0000;
/// Pointers to the code of rewritten sites. Their addresses' upper bytes are no instructions (see [`crate::sites`]); kernels'
/// fixed addresses end below.
pub const POINTERS: u64 = 0x3FEA_0000;
/// Bytes of them.
pub const POINTERS_SIZE: u64 = 0x1_0000;
/// Behind them: the addresses that programs have copies of their pages at.
pub const VIRTUALS: u64 = POINTERS + POINTERS_SIZE;
/// Code of rewritten sites.
pub const CELLS: u64 = 0x3C00_0000;
/// Bytes of it.
pub const CELLS_SIZE: u64 = 0x8_0000;
/// Guest-physical address 0.
pub const DIRECT_MAP: u64 = 0x4000_0000;
/// The guest's programs live below.
pub const USER_END: u64 = 0x5000_0000_0000;
/// The kernel's own limit, a page less.
pub const TASK_SIZE: u64 = USER_END - 0x1000;
/// The first entry of a top-level table that belongs to the kernel, as an address.
pub const KERNEL_TABLES: u64 = USER_END;
/// Of the kernel.
pub const VMALLOC: u64 = 0x5700_0000_0000;
/// Of the kernel.
pub const VMEMMAP: u64 = 0x7700_0000_0000;
/// Of the kernel; a constant without its upper bits.
pub const ENTRY_AREA: u64 = 0x7E00_0000_0000;
/// Behind it.
pub const ENTRY_AREA_END: u64 = 0x7E80_0000_0000;
/// Lowest address that a process may map on most hosts, and that the guest's programs use.
pub const USER_START: u64 = 0x1_0000;
/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Whether the guest maps this address by its page tables.
#[must_use]
pub fn is_translated(address: u64) -> bool {
    is_user(address) || is_kernel_translated(address)
}

/// Whether it is one of the addresses that only the kernel maps.
#[must_use]
pub fn is_kernel_translated(address: u64) -> bool {
    matches!(address, FIXMAP..POINTERS | VMALLOC..ENTRY_AREA_END)
}

/// Whether one of the guest's programs may have it, if the direct map does not reach so far.
#[must_use]
pub fn is_user(address: u64) -> bool {
    matches!(address, USER_START..THUNKS | DIRECT_MAP..USER_END)
}

/// Addresses among programs' that none of them can have: the monitor's code, and the guest's memory.
#[must_use]
pub fn hole(memory: &Memory) -> Range<u64> {
    THUNKS..DIRECT_MAP + memory.size()
}

/// Whether it is the code that a program's process has of its own.
#[must_use]
pub fn is_stub(address: u64) -> bool {
    matches!(address, STUB..STUB_STATE_END)
}
