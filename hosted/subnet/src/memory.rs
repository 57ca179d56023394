//! Memory that several processes map.

use std::{fs::File, os::fd::AsFd, ptr};

use rustix::mm::{MapFlags, ProtFlags};
use vm_memory::{AtomicInteger, VolatileMemory, VolatileSlice};

/// A part of a file in memory. The file may be closed afterwards.
#[derive(Debug)]
pub struct Memory {
    start: *mut u8,
    length: usize,
}

// SAFETY: The memory belongs to no thread. Other processes write to it at any time, so all access goes
// through `VolatileSlice` and atomic numbers.
unsafe impl Send for Memory {}
// SAFETY: As above.
unsafe impl Sync for Memory {}

/// The rights on mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

impl Memory {
    /// Maps a range of a file.
    ///
    /// # Errors
    /// If the host refuses the mapping.
    pub fn map(file: impl AsFd, at: u64, length: usize, access: Access) -> rustix::io::Result<Self> {
        let rights = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: The host chooses an address that is free.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), length, rights, MapFlags::SHARED, file, at) }?;
        Ok(Self { start: start.cast(), length })
    }

    /// Returns all of the memory.
    #[must_use]
    pub fn all(&self) -> VolatileSlice<'_> {
        // SAFETY: The range is mapped as long as this value is there. Its file was sealed against shrinking,
        // or is this process's own.
        unsafe { VolatileSlice::new(self.start, self.length) }
    }

    /// Returns a number that processes read and write at any time. It has to lie within the memory, at a
    /// multiple of its size.
    ///
    /// # Panics
    /// If it does not.
    #[must_use]
    pub fn number<T: AtomicInteger>(&self, at: usize) -> &T {
        assert!(at.checked_add(size_of::<T>()).is_some_and(|end| end <= self.length));
        let place: *const T = self.start.wrapping_add(at).cast_const().cast();
        assert!(place.is_aligned());
        // SAFETY: The place is within the memory and aligned, both checked above. An atomic number may change
        // under a shared reference, and each value is valid.
        unsafe { &*place }
    }
}

impl VolatileMemory for Memory {
    type B = ();

    fn len(&self) -> usize {
        self.length
    }

    fn get_slice(
        &self,
        offset: usize,
        count: usize,
    ) -> vm_memory::volatile_memory::Result<VolatileSlice<'_>> {
        self.all().subslice(offset, count)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: The range was mapped by `map`, and no reference outlives this value.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.length) };
    }
}

/// Makes a file in memory, whose size never changes.
///
/// # Errors
/// If the host refuses it.
pub fn make_file(name: &str, length: u64) -> rustix::io::Result<File> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match rustix::fs::memfd_create(name, flags) {
        // The host refuses files from which a program could be started (vm.memfd_noexec=2).
        Err(rustix::io::Errno::ACCESS) => rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)?,
        made => made?,
    };
    rustix::fs::ftruncate(&file, length)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}
