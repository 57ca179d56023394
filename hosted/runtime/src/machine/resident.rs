//! The mappings that stay in a process when the guest changes the address space, or comes back to
//! one that had to be forgotten ([`crate::process::per_space`]).
//!
//! The mappings are compared with the new page tables. A mapping that is the same stays, as for the
//! text of programs that are copies of each other. A mapping that leads elsewhere, as for stacks,
//! is changed. The rest goes.

use crate::{
    isolation::mappings::Mappings,
    layout::{self, PAGE},
    machine::Machine,
    memory::reverse::Reverse,
    mmu::TableReader,
    patched::PatchedCopies,
    process::per_space::Event,
};

/// The largest number of pages that are compared. More pages go all at once.
const MOST_COMPARED: u64 = 2048;
/// The largest number of pieces that are mapped again.
const MOST_EXCHANGED: usize = 16;

/// The guest's memory that is mapped in this process, besides the direct map.
#[derive(Debug)]
pub struct Resident {
    /// The number of mappings made since all were dropped.
    mapped: u64,
    /// The number of mappings that the host allows.
    most_mapped: u64,
    /// The mappings of programs' addresses.
    pub(super) programs: Mappings,
    /// None if programs' system calls are not rewritten here.
    pub(super) copies: Option<PatchedCopies>,
    /// The mappings of pages of the base, besides the direct map.
    pub(super) base: Reverse,
    /// The number of pages that had become the machine's own when this process last mapped them.
    pub(super) caught_up: u32,
}

impl Resident {
    /// Describes a process without mappings.
    #[must_use]
    pub fn new(most_mapped: u64, copies: Option<PatchedCopies>) -> Self {
        let programs = Mappings::default();
        Self { mapped: 0, most_mapped, programs, copies, base: Reverse::default(), caught_up: 0 }
    }

    /// Counts mappings. Returns true if the host may refuse the next one.
    pub(super) fn count_mappings(&mut self, count: u64) -> bool {
        self.mapped += count;
        self.mapped > self.most_mapped
    }
}

impl Machine {
    /// Loads CR3. Translations are kept unless `flush` is set.
    pub fn load_tables(&mut self, cr3: u64, flush: bool) {
        let is_same = self.vcpu.cr3 == cr3;
        self.vcpu.cr3 = cr3;
        if let Some(isolated) = self.placement.isolated_mut() {
            isolated.load(cr3, flush);
        }
        if !flush && is_same {
            return;
        }
        if let Some(space) = self.placement.per_space() {
            return space.load(cr3, flush);
        }
        self.compare_with_tables();
    }

    /// Removes all mappings of programs that the page tables do not have.
    pub(crate) fn compare_with_tables(&mut self) {
        // A process of isolated programs' kernel has few mappings of programs.
        if self.placement.isolated().is_some() || self.resident.programs.pages() > MOST_COMPARED {
            self.drop_programs();
        } else {
            self.exchange_programs();
        }
    }

    /// Changes the mappings of programs to those of the page tables. The next program will use most
    /// of them, too.
    fn exchange_programs(&mut self) {
        let mut tables = TableReader::new(&self.memory, self.vcpu.cr3);
        let translate =
            |page| tables.page(page).filter(|(physical, _)| self.memory.contains(*physical, PAGE));
        let changes = self.resident.programs.exchange(MOST_EXCHANGED, layout::THUNKS, translate);
        if let Some(copies) = &mut self.resident.copies {
            copies.kept(&self.memory, &self.resident.programs);
        }
        for change in changes {
            match change.to {
                Some((physical, rights)) => self.place(change.address, change.length, physical, rights),
                None => self.memory.unmap(change.address, change.length),
            }
        }
    }

    /// Drops the mappings of programs' memory.
    fn drop_programs(&mut self) {
        if self.resident.programs.count() == 0 {
            return;
        }
        self.memory.unmap(layout::USER_START, layout::THUNKS - layout::USER_START);
        let above = layout::DIRECT_MAP + self.memory.size();
        self.memory.unmap(above, layout::USER_END - above);
        self.resident.programs.clear();
        if let Some(copies) = &mut self.resident.copies {
            copies.all_dropped(false);
        }
    }

    /// Drops all translations.
    pub fn flush_all(&mut self) {
        let Some(space) = self.placement.per_space() else { return self.drop_all() };
        space.flush_all();
        space.tell(Event::KernelDropped);
        self.drop_kernel();
    }

    /// Drops the mappings of the kernel, except the direct map.
    pub(crate) fn drop_kernel(&mut self) {
        self.memory.unmap(layout::FIXMAP, layout::POINTERS - layout::FIXMAP);
        self.memory.unmap(layout::VMALLOC, layout::ENTRY_AREA_END - layout::VMALLOC);
        if let Some(copies) = &mut self.resident.copies {
            copies.kernel_dropped();
        }
    }

    /// Drops all mappings, except the direct map.
    pub fn drop_all(&mut self) {
        self.drop_programs();
        self.drop_kernel();
        self.resident.mapped = 0;
        self.resident.base.clear();
        if let Some(isolated) = self.placement.isolated_mut() {
            isolated.flush_all();
        }
        if let Some(copies) = &mut self.resident.copies {
            copies.all_dropped(true);
        }
    }

    /// Drops the mapping of a page.
    pub fn drop_page(&mut self, address: u64) {
        let page = address & !(PAGE - 1);
        for (start, length) in self.resident.programs.drop_large_page(page) {
            self.memory.unmap(start, length);
            if let Some(copies) = &mut self.resident.copies {
                (start..start + length).step_by(PAGE as usize).for_each(|page| copies.page_dropped(page));
            }
        }
        if layout::is_translated(page) && self.memory.direct(page).is_none() {
            self.memory.unmap(page, PAGE);
            self.resident.programs.remove(page, PAGE);
            if let Some(space) = self.placement.per_space().filter(|_| layout::is_kernel_translated(page)) {
                space.tell(Event::KernelPageDropped(page));
            }
            if let Some(isolated) = self.placement.isolated_mut() {
                isolated.flush_page(self.vcpu.cr3, page);
            }
            if let Some(copies) = &mut self.resident.copies {
                copies.page_dropped(page);
            }
        }
    }
}
