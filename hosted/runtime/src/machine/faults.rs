//! Page faults: mappings that the guest's page tables demand, and the memory of devices.

use super::{End, Exception, Machine};
use crate::{
    layout::{self, PAGE},
    memory::Rights,
    mmu::{self, Access, Privilege, Translation},
    patched::Mapped,
    process::per_space::Request,
    smp::apic,
};

/// The largest number of pages mapped to each side of a missing one.
const NEIGHBOURS: u64 = 64;

impl Machine {
    /// Answers a fault at an address: maps the page that the guest's page tables have there, or
    /// gives the guest the fault.
    pub fn page_fault(&mut self, address: u64, code: u64) {
        let access = match code {
            _ if code & 16 != 0 => Access::Execute,
            _ if code & 2 != 0 => Access::Write,
            _ => Access::Read,
        };
        if self.privilege() == Privilege::User && !self.may_belong_to_program(address) {
            // The kernel gives no program these addresses, and finds nothing there.
            self.counters.faults += 1;
            return self.inject(Exception::page(mmu::missing(access), address));
        }
        if self.own_direct(address, access) || self.is_for_a_copy(address, access) {
            return;
        }
        if self.is_a_single_use(address) && self.emulate_moves() {
            return;
        }
        match self.fill(address, access) {
            Ok(()) => self.counters.fills += 1,
            Err(exception) => {
                self.counters.faults += 1;
                if self.is_program_elsewhere()
                    && let Some(isolated) = self.placement.isolated_mut()
                {
                    isolated.ask(self.vcpu.cr3, address, access);
                } else if self.placement.isolated().is_none() {
                    self.note_fault(address, access);
                }
                self.inject(exception);
            }
        }
    }

    /// Reads a byte where a program has found no page of the host. The monitor finds none there, either, and
    /// says so: a program's own word for it must not end the machine.
    pub fn touch(&mut self, address: u64) {
        if let Ok(found) = self.translate(address, Access::Read, self.privilege()) {
            let mut byte = [0];
            let read = self.memory.read(found.physical, &mut byte);
            std::hint::black_box((read, byte));
        }
    }

    /// Returns true if the kernel writes to a page by its direct map, and only a patched copy
    /// forbade that.
    fn is_for_a_copy(&mut self, address: u64, access: Access) -> bool {
        let physical = self.memory.direct(address).filter(|_| access == Access::Write);
        let (Some(physical), Some(copies)) = (physical, &mut self.resident.copies) else { return false };
        copies.written(&self.memory, physical)
    }

    /// Returns true if the kernel could give this address to a program.
    fn may_belong_to_program(&self, address: u64) -> bool {
        const ANYWHERE: std::ops::Range<u64> = layout::USER_START..layout::USER_END;
        !ANYWHERE.contains(&address) || layout::is_user(address) && self.memory.direct(address).is_none()
    }

    /// Returns true if all of these addresses may be a program's. None belongs to the kernel's
    /// memory or the monitor.
    #[must_use]
    pub fn are_program_addresses(&self, address: u64, length: u64) -> bool {
        let Some(last) = address.checked_add(length.saturating_sub(1)) else { return false };
        let below = layout::USER_START..layout::THUNKS;
        let above = layout::DIRECT_MAP + self.memory.size()..layout::USER_END;
        [below, above].iter().any(|range| range.contains(&address) && range.contains(&last))
    }

    /// Returns true if the kernel uses a page of an isolated program for the first time since the
    /// address space was changed. A mapping pays only for more uses.
    fn is_a_single_use(&mut self, address: u64) -> bool {
        let is_kernel = self.privilege() == Privilege::Kernel && layout::is_user(address);
        match self.placement.isolated_mut() {
            Some(isolated) if is_kernel => isolated.is_first_use(address & !(PAGE - 1)),
            _ => false,
        }
    }

    fn fill(&mut self, address: u64, access: Access) -> Result<(), Exception> {
        let found = self.translate(address, access, self.privilege())?;
        if self.memory.direct(address).is_some() || !layout::is_translated(address) {
            if self.privilege() == Privilege::User {
                return Err(Exception::PROTECTION);
            }
            if address < layout::USER_END {
                // It is a program's address that its process cannot have. The kernel takes this
                // fault as a fault of the program's memory.
                return Err(Exception::page(0, layout::USER_END));
            }
            let why = format!("the guest cannot have the address {address:#x}");
            self.end(End::Broken, &why);
        }
        let page = address & !(PAGE - 1);
        let physical = found.physical & !(PAGE - 1);
        if !self.memory.contains(physical, PAGE) || self.local.is_some() && physical == apic::BASE {
            return self.touch_device(found.physical);
        }
        if self.is_program_elsewhere()
            && let Some(isolated) = self.placement.isolated_mut()
        {
            isolated.map(&self.memory, self.vcpu.cr3, address, &found);
            return Ok(());
        }
        if access == Access::Write {
            self.own(physical);
        }
        self.map_found(page, &found);
        Ok(())
    }

    /// Maps the page at an address before its use, if the guest's tables lead to memory.
    pub(crate) fn fill_ahead(&mut self, address: u64, access: Access) {
        if !layout::is_translated(address) || self.memory.direct(address).is_some() {
            return;
        }
        let Ok(found) = self.translate(address, access, self.privilege()) else { return };
        let physical = found.physical & !(PAGE - 1);
        let is_controller = self.local.is_some() && physical == apic::BASE;
        if self.memory.contains(physical, PAGE) && !is_controller {
            if access == Access::Write {
                self.own(physical);
            }
            self.map_found(address & !(PAGE - 1), &found);
        }
    }

    fn map_found(&mut self, page: u64, found: &Translation) {
        let physical = found.physical & !(PAGE - 1);
        let rights = Rights { write: found.write, execute: found.execute };
        let size = found.size.min(2 << 20);
        let (aligned, whole) = (page & !(size - 1), found.physical & !(size - 1));
        let is_large = found.size > PAGE;
        let (start, from, length) = match is_large {
            true if self.memory.contains(whole, size) && self.memory.has_room(aligned, size) => {
                (aligned, whole, size)
            }
            true => (page, physical, PAGE),
            false => {
                let (before, after) = mmu::neighbours(&self.memory, found, NEIGHBOURS);
                (page - before * PAGE, physical - before * PAGE, (before + after) * PAGE)
            }
        };
        let same = self.memory.same_file(physical, from..from + length);
        let (start, from, length) = (start + (same.start - from), same.start, same.end - same.start);
        if is_large && layout::is_user(page) {
            self.resident.programs.insert_large_page(page, found.size);
        }
        self.place(start, length, from, rights);
    }

    /// Maps a range, and records the mapping.
    pub(crate) fn place(&mut self, start: u64, length: u64, physical: u64, rights: Rights) {
        self.map(start, length, physical, rights);
        let by_program = layout::is_user(start);
        if by_program {
            self.resident.programs.insert(start, length, physical, rights);
        }
        if let Some(copies) = &mut self.resident.copies {
            let how = match rights {
                Rights { write: true, .. } => Mapped::Writable { by_program },
                Rights { execute: true, .. } => Mapped::Code,
                _ => Mapped::Data,
            };
            copies.range_mapped(&self.memory, start, physical..physical + length, how);
        }
    }

    /// Emulates an access to a device's registers in memory. They are never mapped.
    pub(crate) fn touch_device(&mut self, physical: u64) -> Result<(), Exception> {
        if self.ask_first_process(Request::Access(physical)) {
            return Ok(());
        }
        if self.emulate_device_access(physical)?.is_none() {
            let rip = self.block().registers.rip.get();
            let why = format!(
                "the guest uses the physical address {physical:#x}, without memory or a device there, \
                 at {rip:#x}"
            );
            self.end(End::Broken, &why);
        }
        Ok(())
    }

    fn map(&mut self, address: u64, length: u64, physical: u64, rights: Rights) {
        if self.resident.count_mappings(1) {
            self.drop_all();
        }
        let mapped = self.memory.map(address, length, physical, rights).or_else(|_| {
            self.drop_all();
            self.memory.map(address, length, physical, rights)
        });
        match mapped {
            Ok(base) if base.is_empty() => {}
            Ok(base) => {
                // Each range of the base may have one of the machine's own beside it.
                self.resident.count_mappings(2 * base.len() as u64);
                self.note_base(address, physical, base);
            }
            Err(error) => self.end(End::Broken, &format!("cannot map the guest's memory: {error}")),
        }
    }
}
