//! The guest's memory: a file without a name, mapped once as the kernel's direct map, and in parts wherever the guest's page
//! tables say.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    error::{Error, Result},
    layout::{self, DIRECT_MAP, PAGE},
};

/// What may be done with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Written to.
    pub write: bool,
    /// Executed.
    pub execute: bool,
}

impl Rights {
    /// Whether they are no more than others.
    #[must_use]
    pub fn are_within(self, others: Self) -> bool {
        self.write <= others.write && self.execute <= others.execute
    }

    fn flags(self) -> i32 {
        let write = if self.write { libc::PROT_WRITE } else { 0 };
        let execute = if self.execute { libc::PROT_EXEC } else { 0 };
        libc::PROT_READ | write | execute
    }
}

/// All of the guest's memory.
#[derive(Debug)]
pub struct Memory {
    file: OwnedFd,
    size: u64,
    /// Where the monitor sees it: it may write to what it has made read-only for the kernel.
    window: usize,
}

impl Memory {
    /// Makes it, and maps it where [`crate::layout`] says.
    ///
    /// # Errors
    /// If the host has not so much, or the addresses are taken.
    pub fn new(size: u64) -> Result<Self> {
        // SAFETY: The name is a string with its end, and the descriptor is checked.
        let file = unsafe { libc::memfd_create(c"mercury-hosted".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(Error::system("make the guest's memory"));
        }
        // SAFETY: The descriptor was made above and belongs to nobody else.
        let mut memory = Self { file: unsafe { OwnedFd::from_raw_fd(file) }, size, window: 0 };
        // SAFETY: It takes a descriptor and a number.
        if unsafe { libc::ftruncate(file, size.cast_signed()) } != 0 {
            return Err(Error::system("give the guest its memory")
                .hint("choose less with --memory, or raise ulimit -f"));
        }
        memory.map_new(DIRECT_MAP, size, 0, Rights { write: true, execute: true })?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: A new mapping where the host likes.
        let window = unsafe { libc::mmap(ptr::null_mut(), size as usize, rights, libc::MAP_SHARED, file, 0) };
        if window == libc::MAP_FAILED {
            return Err(Error::system("map the guest's memory for the monitor")
                .hint("the guest's memory is mapped twice: choose less with --memory, or raise ulimit -v"));
        }
        memory.window = window.expose_provenance();
        Ok(memory)
    }

    fn map_new(&self, address: u64, length: u64, physical: u64, rights: Rights) -> Result<()> {
        // SAFETY: What is mapped already is not replaced: the flag forbids it.
        let mapped = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(address as usize),
                length as usize,
                rights.flags(),
                libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
                self.file.as_raw_fd(),
                physical.cast_signed(),
            )
        };
        if mapped.addr() as u64 == address {
            return Ok(());
        }
        let what = format!("map the guest's memory at {address:#x}");
        Err(Error::system(&what).hint(
            "something else of this process is there, or the host forbids memory that can be \
            written and executed (SELinux: deny_execmem)",
        ))
    }

    /// Maps a part of it where the guest wants it, over what was there.
    ///
    /// # Errors
    /// What the host said.
    pub fn map(&self, address: u64, length: u64, physical: u64, rights: Rights) -> io::Result<()> {
        debug_assert!(layout::is_translated(address) && self.contains(physical, length));
        // SAFETY: The addresses are the guest's own, of which the monitor keeps nothing (layout).
        let mapped = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(address as usize),
                length as usize,
                rights.flags(),
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.file.as_raw_fd(),
                physical.cast_signed(),
            )
        };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Removes mappings of a range that the guest translates. If the host has no room for what would be left on both sides, all
    /// that lies between the same borders goes: the guest's faults bring back what it uses.
    ///
    /// # Panics
    /// If the host lets nothing go: the guest must not go on with what it has.
    pub fn unmap(&self, address: u64, length: u64) {
        debug_assert!(layout::is_translated(address));
        let all = self.translated_around(address);
        let is_done = unmap(address, length) || unmap(all.start, all.end - all.start);
        assert!(is_done, "the host does not unmap {address:#x}: {}", io::Error::last_os_error());
    }

    /// What the guest translates around an address, up to what it does not.
    fn translated_around(&self, address: u64) -> Range<u64> {
        match address {
            layout::USER_START..layout::THUNKS => layout::USER_START..layout::THUNKS,
            layout::FIXMAP..layout::POINTERS => layout::FIXMAP..layout::POINTERS,
            ..layout::USER_END => DIRECT_MAP + self.size..layout::USER_END,
            _ => layout::VMALLOC..layout::ENTRY_AREA_END,
        }
    }

    /// Whether the guest has this memory.
    #[must_use]
    pub fn contains(&self, physical: u64, length: u64) -> bool {
        physical < self.size && length <= self.size - physical
    }

    /// The file's number in this process.
    #[must_use]
    pub fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Where the monitor sees it.
    #[must_use]
    pub fn pointer(&self, physical: u64, length: u64) -> Option<*mut u8> {
        self.contains(physical, length)
            .then(|| ptr::with_exposed_provenance_mut(self.window + physical as usize))
    }

    /// Whether an address lies in the direct map, and the physical one if so.
    #[must_use]
    pub fn direct(&self, address: u64) -> Option<u64> {
        let physical = address.checked_sub(DIRECT_MAP)?;
        self.contains(physical, 1).then_some(physical)
    }

    /// Whether all of a large page lies where the guest translates addresses: its direct map may end in the midst of one.
    #[must_use]
    pub fn has_room(&self, address: u64, size: u64) -> bool {
        let is_free = |at| layout::is_translated(at) && self.direct(at).is_none();
        is_free(address) && is_free(address + size - 1)
    }

    /// How much it is.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Copies into it. `None` if it is not there.
    #[must_use]
    pub fn write(&self, physical: u64, bytes: &[u8]) -> Option<()> {
        let to = self.pointer(physical, bytes.len() as u64)?;
        // SAFETY: The range was checked, and the guest does not run while the monitor does.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Some(())
    }

    /// Copies out of it. `None` if it is not there.
    #[must_use]
    pub fn read(&self, physical: u64, into: &mut [u8]) -> Option<()> {
        let from = self.pointer(physical, into.len() as u64)?;
        // SAFETY: As for `write`.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// A number of 64 bits.
    #[must_use]
    pub fn read_long(&self, physical: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(physical, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// A number of 64 bits.
    #[must_use]
    pub fn write_long(&self, physical: u64, value: u64) -> Option<()> {
        self.write(physical, &value.to_le_bytes())
    }

    /// Sets bits of an entry of a page table if it is still what it was. Other processors may clear it at any time. Says
    /// whether it was.
    #[must_use]
    pub fn mark(&self, physical: u64, was: u64, bits: u64) -> bool {
        let Some(at) = self.pointer(physical, 8) else { return false };
        // SAFETY: The range was checked; entries lie at multiples of eight.
        let entry = unsafe { AtomicU64::from_ptr(at.cast()) };
        entry.compare_exchange(was, was | bits, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Bytes of a page that are left behind an address.
    #[must_use]
    pub fn rest_of_page(address: u64) -> u64 {
        PAGE - address % PAGE
    }
}

/// Removes mappings of addresses that the guest translates. Says whether the host did.
fn unmap(address: u64, length: u64) -> bool {
    // SAFETY: The addresses are the guest's own, of which the monitor keeps nothing (layout).
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(address as usize), length as usize) == 0 }
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process::Command};

    use super::*;

    /// Whether the host has anything mapped at an address.
    fn is_mapped(address: u64) -> bool {
        let maps = fs::read_to_string("/proc/self/maps").expect("the host's list");
        maps.lines().any(|line| {
            let mut ends =
                line.split(['-', ' ']).map(|text| u64::from_str_radix(text, 16).expect("a number"));
            let (start, end) = (ends.next().expect("a start"), ends.next().expect("an end"));
            (start..end).contains(&address)
        })
    }

    /// Takes all mappings that the host has for this process: pages that cannot be one with their neighbours.
    fn take_all_mappings() {
        let rights = [libc::PROT_READ, libc::PROT_NONE];
        for count in 0.. {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: A new mapping where the host likes.
            let mapped =
                unsafe { libc::mmap(ptr::null_mut(), PAGE as usize, rights[count % 2], flags, -1, 0) };
            if mapped == libc::MAP_FAILED {
                return;
            }
        }
    }

    /// In a process of its own, for it leaves the host no mapping.
    #[test]
    fn a_page_goes_though_the_host_has_no_room_for_the_rest() {
        const NAME: &str = "memory::tests::a_page_goes_though_the_host_has_no_room_for_the_rest";
        const INSIDE: &str = "MERCURY_TEST_WITHOUT_MAPPINGS";
        const AT: u64 = 0x10_0000_0000;
        if env::var_os(INSIDE).is_none() {
            let program = env::current_exe().expect("this program");
            let mut again = Command::new(program);
            let output = again.args(["--exact", NAME]).env(INSIDE, "1").output().expect("the test");
            assert!(output.status.success(), "{output:?}");
            return;
        }
        let memory = Memory::new(1 << 20).expect("memory");
        let rights = Rights { write: true, execute: false };
        memory.map(AT, 3 * PAGE, 0, rights).expect("a mapping");
        memory.map(layout::VMALLOC, PAGE, 0, rights).expect("a mapping");
        take_all_mappings();
        assert!(!unmap(AT + PAGE, PAGE), "the host had room");
        memory.unmap(AT + PAGE, PAGE);
        assert!(!is_mapped(AT + PAGE) && is_mapped(layout::VMALLOC) && is_mapped(DIRECT_MAP));
    }
}
