//! The guest's memory as devices see it.
//!
//! Processors of the guest, the host's kernel and a disk's ring write to the memory at any time. So
//! nothing here makes a reference to it: bytes are copied out and in.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const PAGE: usize = 4096;

/// A view of the guest's memory: regions, each at its physical addresses. The memory stays mapped as
/// long as a view of it is there.
pub type View = GuestMemoryMmap<()>;

/// Returns the host's address of a range that lies in one region.
#[must_use]
pub fn pointer(view: &View, at: u64, length: u64) -> Option<*mut u8> {
    let slice = view.get_slice(GuestAddress(at), usize::try_from(length).ok()?).ok()?;
    Some(slice.ptr_guard_mut().as_ptr())
}

/// Returns the host's address of a range to which the host's kernel is going to write. A write to memory that
/// several machines share is a fault, which the monitor answers; the host's kernel would return an error. So
/// each page is written to here, without a change.
#[must_use]
pub fn buffer(view: &View, at: u64, length: u64) -> Option<*mut u8> {
    let start = pointer(view, at, length)?;
    let first = start.addr() & !(PAGE - 1);
    for page in (first..start.addr() + length as usize).step_by(PAGE) {
        touch(start.with_addr(page.max(start.addr())));
    }
    Some(start)
}

/// Gives the whole pages of a range back to the host: they are zero when they are used again. Pages that the
/// guest does not have stay, and so do those that several machines share.
pub fn give_back(view: &View, at: u64, length: u64) {
    let Some(start) = pointer(view, at, length) else { return };
    let first = start.addr().next_multiple_of(PAGE);
    let end = (start.addr() + length as usize) & !(PAGE - 1);
    if first < end && !remove(start.with_addr(first), end - first) {
        // A part is shared, or has gone already.
        (first..end).step_by(PAGE).for_each(|page| _ = remove(start.with_addr(page), PAGE));
    }
}

/// Makes a hole in the file that is mapped at a range of whole pages. Returns true if the host has done so.
fn remove(at: *mut u8, length: usize) -> bool {
    // SAFETY: The guest's memory is mapped there, to which Rust has no reference. The host does not do it
    // where the mapping is not for writing.
    unsafe { libc::madvise(at.cast(), length, libc::MADV_REMOVE) == 0 }
}

/// Writes to a byte of the guest's memory without a change, in one step: the guest may write there.
fn touch(at: *mut u8) {
    #[cfg(miri)]
    let _ = at;
    #[cfg(not(miri))]
    // SAFETY: The caller has checked that the guest's memory has the byte. An addition of nothing would be
    // left out by the compiler.
    unsafe {
        std::arch::asm!("lock or byte ptr [{}], 0", in(reg) at, options(nostack));
    }
}

/// Returns true if the guest has this memory, in one region.
#[must_use]
pub fn contains(view: &View, at: u64, length: u64) -> bool {
    pointer(view, at, length).is_some()
}

/// Copies into the memory. Returns nothing if a part of the range is no memory.
#[must_use]
pub fn write(view: &View, at: u64, bytes: &[u8]) -> Option<()> {
    view.write_slice(bytes, GuestAddress(at)).ok()
}

/// Copies out of the memory. Returns nothing if a part of the range is no memory.
#[must_use]
pub fn read(view: &View, at: u64, into: &mut [u8]) -> Option<()> {
    view.read_slice(into, GuestAddress(at)).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_copied_across_regions_and_pointed_to_within_one() {
        let view = View::from_ranges(&[
            (GuestAddress(0), 0x1000),
            (GuestAddress(0x1000), 0x1000),
            (GuestAddress(0x10_0000), 0x1000),
        ])
        .unwrap();
        let mut read_back = [0; 16];
        write(&view, 0xFF8, &[7; 16]).unwrap();
        read(&view, 0xFF8, &mut read_back).unwrap();
        assert_eq!(read_back, [7; 16]);
        assert!(contains(&view, 0xFF8, 8) && !contains(&view, 0xFF8, 9));
        assert!(contains(&view, 0x10_0FFF, 1) && !contains(&view, 0x2000, 1));
        assert!(!contains(&view, u64::MAX, 2) && !contains(&view, 0, u64::MAX));
        assert!(write(&view, 0x1FF8, &[0; 16]).is_none());
        assert!(read(&view, u64::MAX - 3, &mut read_back).is_none());
    }
}
