//! What the guest's kernel does with a program's memory by functions of its own. Done here, with the page tables and the
//! guest's memory, it costs neither a mapping nor a signal. Whatever is not plain is left to the function.

use std::ptr;

use crate::{
    block::{RAX, RCX, RDI, RDX, RSI},
    layout,
    machine::Machine,
    memory::Memory,
    mmu::{Access, Privilege},
    thunks::Use,
};

impl Machine {
    /// A function was called: does it, and returns from it, if all of its memory is there.
    pub fn use_program(&mut self, what: Use) {
        let general = self.block().registers.general;
        let done = match what {
            Use::Copy => {
                self.copy(general[RDI], general[RSI], general[RDX] & 0xFFFF_FFFF).map(|()| (RAX, None))
            }
            Use::Get(size) => self.get_user(general[RAX], size).map(|value| (RAX, Some((RDX, value)))),
            Use::Put(size) => self.put_user(general[RCX], general[RAX], size).map(|()| (RCX, None)),
        };
        let Some((result, value)) = done else { return };
        let Ok(back) = self.pop() else { return };
        let registers = &mut self.block().registers;
        registers.rip = back;
        registers.general[result] = 0;
        if let Some((register, value)) = value {
            registers.general[register] = value;
        }
    }

    fn find(&self, address: u64, length: u64, access: Access) -> Option<*mut u8> {
        let found = self.translate(address, access, Privilege::Kernel).ok()?;
        self.memory.pointer(found.physical, length)
    }

    fn copy(&self, to: u64, from: u64, length: u64) -> Option<()> {
        let mut done = 0;
        while done < length {
            let (to, from) = (to.wrapping_add(done), from.wrapping_add(done));
            let some = Memory::rest_of_page(to).min(Memory::rest_of_page(from)).min(length - done);
            let (target, source) =
                (self.find(to, some, Access::Write)?, self.find(from, some, Access::Read)?);
            // SAFETY: Both ranges are in the guest's memory, which the monitor has mapped; the guest does not run.
            unsafe { ptr::copy(source, target, some as usize) };
            done += some;
        }
        Some(())
    }

    fn get_user(&self, address: u64, size: usize) -> Option<u64> {
        let mut bytes = [0; 8];
        layout::is_user(address).then_some(())?;
        self.read(address, &mut bytes[..size]).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    fn put_user(&self, address: u64, value: u64, size: usize) -> Option<()> {
        layout::is_user(address).then_some(())?;
        self.write(address, &value.to_le_bytes()[..size]).ok()
    }
}
