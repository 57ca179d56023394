//! The guest's memory as devices see it.
//!
//! Processors of the guest, the host's kernel and a disk's ring write to the memory at any time. So
//! nothing here makes a reference to it: bytes are copied out and in.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// A view of the guest's memory: regions, each at its physical addresses. The memory stays mapped as
/// long as a view of it is there.
pub type View = GuestMemoryMmap<()>;

/// Returns the host's address of a range that lies in one region.
#[must_use]
pub fn pointer(view: &View, at: u64, length: u64) -> Option<*mut u8> {
    let slice = view.get_slice(GuestAddress(at), usize::try_from(length).ok()?).ok()?;
    Some(slice.ptr_guard_mut().as_ptr())
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
