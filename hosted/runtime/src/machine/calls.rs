//! System calls of programs, and the rewriting of their sites.

use super::{Machine, VISIBLE};
use crate::{
    block::{self, IF},
    layout::{self, PAGE},
    memory::Rights,
    mmu::{Access, Privilege},
    vcpu::TRAP,
};

impl Machine {
    /// Takes a program's system call to the kernel.
    pub fn system_call(&mut self) {
        const LENGTH: u64 = 2;
        self.counters.system_calls += 1;
        self.rewrite(self.block().registers.rip.get().wrapping_sub(LENGTH));
        let flags = self.flags();
        let registers = &self.block().registers;
        registers.general[block::RCX].set(registers.rip.get());
        registers.general[block::R11].set(flags);
        registers.rip.set(self.block().lstar.get());
        self.block().segments.set(self.block().call_segments.get());
        self.set_flags(flags & !self.vcpu.syscall_mask);
    }

    /// Gives the kernel the fault of a call to the host's page of virtual system calls. The host has
    /// refused the call and returned from it.
    pub fn virtual_call(&mut self, address: u64) {
        const FETCH_BY_PROGRAM: u64 = 0x14;
        const RETURN_ADDRESS: u64 = 8;
        let registers = &self.block().registers;
        let stack = &registers.general[block::RSP];
        stack.set(stack.get().wrapping_sub(RETURN_ADDRESS));
        registers.rip.set(address);
        self.page_fault(address, FETCH_BY_PROGRAM);
    }

    /// Rewrites a site after enough traps, if the program cannot write there.
    fn rewrite(&mut self, site: u64) {
        let mask = VISIBLE | IF;
        let is_stepped = self.block().registers.rflags.get() & TRAP != 0 || self.has_breakpoints();
        if is_stepped
            || self.resident.copies.is_none()
            || self.vcpu.syscall_mask & mask != mask
            || !layout::is_user(site)
        {
            return;
        }
        let Ok(found) = self.translate(site, Access::Execute, Privilege::User) else { return };
        if found.may_write || found.size != PAGE || !self.memory.contains(found.physical, 2) {
            return;
        }
        if let Some(copies) = &mut self.resident.copies
            && copies.trapped(&self.memory, site, found.physical)
        {
            let rights = Rights { write: false, execute: true };
            self.resident.programs.insert(site & !(PAGE - 1), PAGE, found.physical & !(PAGE - 1), rights);
            self.resident.count_mappings(1);
        }
    }

    /// Answers an undefined instruction below the jump of a rewritten site: the program goes on
    /// where it would have. Returns true if that was the case.
    pub fn resume_below_a_jump(&mut self) -> bool {
        let registers = &self.block().registers;
        let copies = self.resident.copies.as_mut().filter(|_| layout::is_user(registers.rip.get()));
        let found = copies.and_then(|copies| copies.below_a_jump(&self.memory, registers.rip.get()));
        if let Some(to) = found {
            registers.rip.set(to);
        }
        found.is_some()
    }

    /// Gives a stepped program its own code at the next instruction, not a patched copy, when the
    /// kernel goes back to it. The program must not be trapped in the code that replaces a system
    /// call.
    pub(crate) fn show_stepped_code(&mut self) {
        const LONGEST: u64 = 15;
        let registers = &self.block().registers;
        if registers.rflags.get() & TRAP == 0 || self.privilege() == Privilege::Kernel {
            return;
        }
        let Some(copies) = &mut self.resident.copies else { return };
        let rip = registers.rip.get();
        for address in [rip, rip.wrapping_add(LONGEST - 1)] {
            copies.show_original(&self.memory, address);
        }
    }

    /// Completes the return from a system call. An interrupt waits, and the guest has already
    /// checked for one.
    pub fn finish_return(&mut self) {
        if self.code.returning.contains(&self.block().registers.rip.get()) {
            self.block().registers.general[block::RSP].set(self.block().scratch.get());
            self.system_return();
        }
    }

    /// Returns the instruction pointer that the guest is to see.
    pub(crate) fn visible(&self, rip: u64) -> u64 {
        match (self.placement.per_space(), &self.resident.copies) {
            (Some(space), _) if space.is_first() => space.visible(rip),
            (_, Some(copies)) => copies.visible(rip),
            _ => rip,
        }
    }
}
