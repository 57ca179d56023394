//! The second fault of two that is spared: an instruction faults, the guest's kernel maps the page and returns to the
//! instruction, which would fault again, for the host knows nothing of the page yet. It is mapped at the return.

use crate::{
    machine::Machine,
    mmu::{Access, Privilege},
};

/// A fault that the guest's kernel was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faulted {
    /// Whose instruction.
    pub privilege: Privilege,
    /// Where the instruction is.
    pub rip: u64,
    /// The address space.
    pub cr3: u64,
    /// What it is about.
    pub address: u64,
    /// How it was used.
    pub access: Access,
}

impl Machine {
    /// The kernel is about to get a fault of the instruction at which the guest is.
    pub fn note_fault(&mut self, address: u64, access: Access) {
        let (privilege, rip) = (self.privilege(), self.block().registers.rip.get());
        self.faulted = Some(Faulted { privilege, rip, cr3: self.vcpu.cr3, address, access });
    }

    /// The kernel has returned from a fault or an interrupt. If it is to the last instruction that has faulted, what that is
    /// about is mapped if the page tables have it now. If they have not, it will fault again.
    pub fn map_what_faulted(&mut self) {
        let Some(last) = self.faulted else { return };
        let now = Faulted {
            privilege: self.privilege(),
            rip: self.block().registers.rip.get(),
            cr3: self.vcpu.cr3,
            ..last
        };
        if now == last {
            self.faulted = None;
            self.fill_ahead(last.address, last.access);
        }
    }
}
