//! The kernel's functions that use a program's memory, done by the monitor. With the page tables
//! and the guest's memory they need neither a mapping nor a signal. No address can be reached that
//! is not a program's. Unusual cases are left to the function.

use crate::{
    block::{R8, RAX, RCX, RDI, RDX, RSI},
    layout,
    machine::Machine,
    memory::Memory,
    mmu::{Access, Privilege},
    thunks::{Giving, Use},
};

/// `-EFAULT`.
const FAULT: u64 = (-(libc::EFAULT as i64)).cast_unsigned();
/// The largest pointer or length.
const ALL: u64 = u64::MAX;

impl Machine {
    /// Does the work of a called function and returns from it, if all of its memory is mapped by
    /// the guest.
    pub fn use_program(&mut self, what: Use) {
        let done = match what {
            Use::Give(how) => self.refuse_addresses(how).map(|result| (RAX, result)),
            _ => self.use_memory(what),
        };
        let Some((result, value)) = done else { return };
        let Ok(back) = self.pop() else { return };
        let registers = &self.block().registers;
        registers.rip.set(back);
        registers.general[result].set(value);
    }

    /// Returns the register for the result, and the result, if the work is done or must be refused.
    fn use_memory(&mut self, what: Use) -> Option<(usize, u64)> {
        let general = self.block().registers.values();
        let copied = general[RDX] & 0xFFFF_FFFF;
        let (address, length) = match what {
            // One of the two addresses is the kernel's.
            Use::Copy if self.are_program_addresses(general[RDI], copied) => (general[RDI], copied),
            Use::Copy => (general[RSI], copied),
            Use::Get(size) => (general[RAX], size as u64),
            Use::Put(size) => (general[RCX], size as u64),
            Use::Clear => (general[RDI], general[RCX]),
            Use::CopyString => (general[RSI], 1),
            Use::MeasureString => (general[RDI], 1),
            // A negative number of bytes is refused, as the functions do.
            Use::Sum(register) if copied > ALL >> 33 => (general[register], ALL),
            Use::Sum(register) => (general[register], copied),
            Use::Give(_) => return None,
        };
        let is_reached = length == 0 || self.are_program_addresses(address, length);
        self.counters.refused += u64::from(!is_reached);
        match what {
            Use::Copy if !is_reached => Some((RAX, copied)),
            Use::Copy => self.copy(general[RDI], general[RSI], copied).map(|()| (RAX, 0)),
            Use::Get(_) if !is_reached => Some((RAX, FAULT)),
            Use::Get(size) => self.get_user(address, size).map(|()| (RAX, 0)),
            Use::Put(_) if !is_reached => Some((RCX, FAULT & 0xFFFF_FFFF)),
            Use::Put(size) => self.put_user(address, general[RAX], size).map(|()| (RCX, 0)),
            Use::Clear if !is_reached => Some((RCX, length)),
            Use::Clear => self.clear(address, length).map(|()| (RCX, 0)),
            Use::CopyString if !is_reached => Some((RAX, FAULT)),
            Use::CopyString => self.copy_string(general[RDI], address, general[RDX]).map(|to| (RAX, to)),
            Use::MeasureString if !is_reached => Some((RAX, 0)),
            Use::MeasureString => self.find_zero(address, general[RSI]).map(|at| (RAX, at + 1)),
            Use::Sum(_) if !is_reached => Some((RAX, 0)),
            Use::Sum(_) | Use::Give(_) => None,
        }
    }

    /// Refuses addresses that a program cannot have: those of the kernel's memory and of the
    /// monitor. Neither the program nor its kernel could use them, and both would repeat for ever
    /// an access that the page tables allow. A hint for such an address is ignored.
    fn refuse_addresses(&mut self, how: Giving) -> Option<u64> {
        const FIXED: u64 = libc::MAP_FIXED as u64;
        const NO_MEMORY: u64 = (-(libc::ENOMEM as i64)).cast_unsigned();
        let general = self.block().registers.values();
        let start = general[RSI];
        let length = match how {
            // The first field of a mapping is its beginning.
            Giving::Grow => self.read_long(general[RDI]).ok()?.saturating_sub(start),
            _ => general[RDX],
        };
        let hole = layout::hole(&self.memory);
        if start >= hole.end || start.saturating_add(length) <= hole.start {
            return None;
        }
        match how {
            Giving::Find if general[R8] & FIXED == 0 => {
                self.block().registers.general[RSI].set(0);
                None
            }
            Giving::Find | Giving::Map | Giving::Grow => Some(NO_MEMORY),
            Giving::Move => Some(0),
        }
    }

    fn find(&self, address: u64, access: Access) -> Option<u64> {
        self.translate(address, access, Privilege::Kernel).ok().map(|found| found.physical)
    }

    fn copy(&self, to: u64, from: u64, length: u64) -> Option<()> {
        let mut done = 0;
        while done < length {
            let (to, from) = (to.wrapping_add(done), from.wrapping_add(done));
            let some = Memory::rest_of_page(to).min(Memory::rest_of_page(from)).min(length - done);
            self.memory.copy(self.find(to, Access::Write)?, self.find(from, Access::Read)?, some)?;
            done += some;
        }
        Some(())
    }

    fn clear(&self, address: u64, length: u64) -> Option<()> {
        let mut done = 0;
        while done < length {
            let at = address + done;
            let some = Memory::rest_of_page(at).min(length - done);
            self.memory.clear(self.find(at, Access::Write)?, some)?;
            done += some;
        }
        Some(())
    }

    /// Returns the number of a program's bytes before the first zero, if there is a zero among so
    /// many.
    fn find_zero(&self, address: u64, most: u64) -> Option<u64> {
        let mut done = 0;
        // A negative number is left to the function.
        while done < most && most <= ALL >> 1 {
            let at = address.checked_add(done)?;
            let some = Memory::rest_of_page(at).min(most - done);
            self.are_program_addresses(at, some).then_some(())?;
            let before = self.memory.before_zero(self.find(at, Access::Read)?, some)?;
            done += before;
            if before < some {
                return Some(done);
            }
        }
        None
    }

    /// Copies a string with its zero. Returns the number of bytes before the zero.
    fn copy_string(&self, to: u64, from: u64, most: u64) -> Option<u64> {
        let length = self.find_zero(from, most)?;
        self.copy(to, from, length)?;
        // The program's own zero is not copied: another of its threads may have written over it.
        self.write(to + length, &[0]).ok()?;
        Some(length)
    }

    fn get_user(&self, address: u64, size: usize) -> Option<()> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes[..size]).ok()?;
        self.block().registers.general[RDX].set(u64::from_le_bytes(bytes));
        Some(())
    }

    fn put_user(&self, address: u64, value: u64, size: usize) -> Option<()> {
        self.write(address, &value.to_le_bytes()[..size]).ok()
    }
}
