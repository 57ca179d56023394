//! Saving of second faults. An instruction faults, and the guest's kernel maps the page and returns
//! to the instruction. It would fault again, because the host does not know the page yet. So the
//! page is mapped at the return.

use crate::{
    machine::Machine,
    mmu::{Access, Privilege},
};

/// A fault that the guest's kernel was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faulted {
    /// The privilege of the instruction.
    pub privilege: Privilege,
    /// The address of the instruction.
    pub rip: u64,
    pub cr3: u64,
    /// The address that the instruction used.
    pub address: u64,
    /// The kind of the access.
    pub access: Access,
}

impl Machine {
    /// Records that the kernel gets a fault of the current instruction.
    pub fn note_fault(&mut self, address: u64, access: Access) {
        let (privilege, rip) = (self.privilege(), self.block().registers.rip.get());
        self.faulted = Some(Faulted { privilege, rip, cr3: self.vcpu.cr3, address, access });
    }

    /// Maps the page of the last fault, if the kernel returns to its instruction and the page
    /// tables have the page now. Otherwise the instruction faults again.
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
