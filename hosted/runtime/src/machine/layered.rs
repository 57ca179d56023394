//! Pages of a clone that become its own ([`crate::memory::layers`]).

use super::{BROKEN_STATUS, End, Machine};
use crate::{
    layout::{self, PAGE},
    memory::layers::Layers,
    mmu::Access,
};

/// The number of recorded mappings of the base from which all mappings are dropped.
const MOST_RECORDED: usize = 1 << 15;

/// The processes in which pages may have become the machine's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// This one. The monitor's window has the pages already.
    This,
    /// Others, too.
    Any,
}

impl Machine {
    /// Makes a page the machine's own to which the kernel writes by its direct map. Returns true if the guest
    /// goes on now.
    pub(super) fn own_direct(&mut self, address: u64, access: Access) -> bool {
        let physical = self.memory.direct(address).filter(|_| access == Access::Write);
        physical.is_some_and(|physical| self.own(physical))
    }

    /// Makes a page the machine's own before a write. Returns true if it was not.
    pub(super) fn own(&mut self, physical: u64) -> bool {
        let Some(layers) = self.memory.layers() else { return false };
        let page = physical / PAGE;
        if layers.is_own(page) {
            return false;
        }
        if layers.is_read_only(page) {
            self.end_for_a_shared_disk(page);
        }
        if !layers.make_own(page) {
            self.drop_all();
            if !layers.make_own(page) {
                self.end(End::Broken, "the host has no room for a page of the machine's own");
            }
        }
        self.catch_up_with_layers(Writer::This);
        true
    }

    /// Ends the machine, whose guest writes to a disk that is shared.
    #[cold]
    fn end_for_a_shared_disk(&mut self, page: u64) -> ! {
        let disks = self.memory.disks();
        let found =
            disks.iter().enumerate().find(|(_, disk)| (disk.pages().start..disk.end()).contains(&page));
        let (number, path) =
            found.map_or((0, ""), |(number, disk)| (number, disk.path().to_str().unwrap_or("")));
        let why = format!(
            "the guest writes to /dev/pmem{number}, which is {path},shared: mount it read-only, or use \
             {path},private"
        );
        self.end(End::Broken, &why);
    }

    /// Maps the pages that have become the machine's own since this function was called. Must be called
    /// before the guest runs here.
    pub fn catch_up_with_layers(&mut self, by: Writer) {
        let Some(layers) = self.memory.layers() else { return };
        if layers.is_behind() {
            self.follow();
        }
        let (from, to) = (self.resident.caught_up, layers.logged());
        if from != to {
            self.map_own_pages(layers, from, to, by);
        }
    }

    /// Maps the machine's pages again after a fork. Another process may have the turn.
    #[cold]
    #[inline(never)]
    pub(crate) fn follow(&mut self) {
        let Some(layers) = self.memory.layers().filter(|layers| layers.is_behind()) else { return };
        self.drop_all();
        // What comes to the log from here on is mapped when this process has the turn.
        let (level, logged) = layers.now();
        self.resident.caught_up = logged;
        if !layers.follow(level, self.placement.runs_guest()) {
            const WHY: &str = "the host has no room for the machine's pages after a fork";
            if self.placement.per_space().is_some_and(|space| !space.is_first()) {
                // Another process may have the turn, so this one only ends. The first one notices it.
                eprintln!("mercury hosted: {WHY}");
                // SAFETY: It ends the process.
                unsafe { libc::_exit(BROKEN_STATUS) }
            }
            self.end(End::Broken, WHY);
        }
        if let Some(copies) = &mut self.resident.copies {
            copies.replaced(0..self.memory.size());
        }
    }

    #[cold]
    #[inline(never)]
    fn map_own_pages(&mut self, layers: &Layers, from: u32, to: u32, by: Writer) {
        self.resident.caught_up = to;
        for pages in layers.since(from, to) {
            if !self.map_own(layers, &pages, by) {
                // The host has a limit of mappings.
                self.drop_all();
                if !self.map_own(layers, &pages, by) {
                    self.end(End::Broken, "the host has no room for the machine's own pages");
                }
            }
            if let Some(copies) = &mut self.resident.copies {
                copies.replaced(pages.start * PAGE..pages.end * PAGE);
            }
            pages.for_each(|page| self.drop_old(page));
        }
    }

    fn map_own(&self, layers: &Layers, pages: &std::ops::Range<u64>, by: Writer) -> bool {
        let (first, length) = (pages.start, (pages.end - pages.start) * PAGE);
        (by == Writer::This || layers.map_window(first, length))
            && (!self.placement.runs_guest() || layers.map_direct(first, length))
    }

    /// Drops the mappings of a page of the base, besides the direct map.
    fn drop_old(&mut self, page: u64) {
        for address in self.resident.base.addresses(page) {
            self.memory.unmap(address, PAGE);
            if layout::is_user(address) {
                self.resident.programs.remove(address, PAGE);
            }
            if let Some(copies) = &mut self.resident.copies {
                copies.page_dropped(address);
            }
        }
    }

    /// Records that ranges of the base are mapped, of which the first begins at an address.
    pub(super) fn note_base(&mut self, address: u64, physical: u64, base: Vec<std::ops::Range<u64>>) {
        for range in base {
            let count = (range.end - range.start) / PAGE;
            self.resident.base.note(range.start / PAGE, address + (range.start - physical), count);
        }
        if self.resident.base.recorded() > MOST_RECORDED {
            self.drop_all();
        }
    }
}
