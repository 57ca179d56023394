//! Patched copies of programs' pages, in which system calls are rewritten ([`crate::sites`]).
//!
//! The guest's memory itself is not changed. The program gets a copy of the page mapped in its
//! place where it executes it. Readers of the file, or of the page by its physical address, see the
//! original. A copy is valid as long as the page is unchanged:
//!
//! - Only pages that the program cannot write to are copied.
//! - The kernel's own mapping of the page is made read-only. A write there, or a mapping that
//!   allows one, drops the copy.
//! - Before a copy is mapped it is compared with the page.
//!
//! A copy is mapped when the program has trapped in its page twice since a change of the address
//! space last dropped a copy. A mapping costs about as much as two traps.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    error::{Error, Result},
    isolation::mappings::Mappings,
    layout::{CELLS, CELLS_SIZE, DIRECT_MAP, POINTERS, POINTERS_SIZE, VIRTUALS},
    memory::{Memory, Rights, create},
    process::{
        self,
        per_space::{Event, SpaceProcess},
    },
    sites::{self, PAGE, Plan},
    thunks,
};

/// The largest number of copies. Each takes two mappings of the host.
const MOST_PAGES: usize = 512;
/// The room for a site's code, in bytes.
const CELL: u64 = 64;
/// The number of traps that make rewriting a site pay.
const WORTH: u32 = 3;
/// The number of traps, since a change of the address space dropped copies, that make a mapping
/// pay.
const WORTH_MAPPING: u32 = 2;
/// The largest number of sites whose traps are counted.
const MOST_COUNTED: usize = 1 << 16;
/// A page that has changed so often gets no copy any more.
const MOST_CHANGES: u32 = 4;

/// Events that are counted.
#[derive(Debug, Default)]
pub struct Counters {
    /// Sites that were rewritten.
    pub rewritten: AtomicU64,
    /// Sites that were left as they are.
    pub refused: AtomicU64,
    pub mapped: AtomicU64,
    /// Copies dropped because their page was changed, or could be.
    pub dropped: AtomicU64,
    /// Traps at an instruction that lies below a jump.
    pub recovered: AtomicU64,
}

/// The patched copy of one page.
#[derive(Debug)]
struct Copy {
    /// The place of the copy in the file, and of its address in the list.
    index: usize,
    original: Box<[u8; PAGE]>,
    sites: Vec<Site>,
    refused: Vec<usize>,
    /// The current generation, and the traps in it.
    traps: (u64, u32),
}

#[derive(Debug)]
struct Site {
    plan: Plan,
    cell: u64,
}

/// The site to which a cell belongs.
#[derive(Clone, Copy, Debug)]
struct Cell {
    index: usize,
    start: usize,
    /// The number of bytes of displaced instructions in the cell.
    displaced: usize,
}

/// The patched copies of this process.
#[derive(Debug)]
pub struct PatchedCopies {
    room: Room,
    copies: BTreeMap<u64, Copy>,
    /// This process, if other processes have copies, too.
    space: Option<SpaceProcess>,
    /// Pages of which only other processes have copies.
    foreign: BTreeSet<u64>,
    cells: Vec<Cell>,
    pointers: Pointers,
    /// The page whose copy is mapped, by the program's address.
    mapped: BTreeMap<u64, u64>,
    /// Ranges that the kernel, and programs, have mapped writable.
    writable: [Vec<Range<u64>>; 2],
    /// Traps by physical address, for sites without a copy.
    traps: HashMap<u64, u32>,
    changes: HashMap<u64, u32>,
    generation: u64,
    /// The address at which the code of all sites goes on.
    system_call: u64,
    /// Events that are counted.
    pub counters: &'static Counters,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn at<T>(address: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn page_of(address: u64) -> u64 {
    address & !(PAGE as u64 - 1)
}

/// Addresses for pointers that are still free: of any kind, and of the kind of which each relevant byte is
/// a trap.
#[derive(Clone, Copy, Debug, Default)]
struct Pointers {
    /// The offsets in the pointers' area from which on they are free.
    next: [u32; 2],
}

impl Pointers {
    fn find(self, all_trap: bool) -> Option<u32> {
        const ROW: u32 = 256;
        let is_one = |at: &u32| {
            let (row, low) = ((at / ROW) as u8, (at % ROW) as u8);
            match all_trap {
                false => !sites::is_trap(row) && low.is_multiple_of(8),
                true => sites::is_trap(row) && sites::is_trap(low) && u32::from(low) + 8 <= ROW,
            }
        };
        (self.next[usize::from(all_trap)]..POINTERS_SIZE as u32).find(is_one)
    }

    fn take(&mut self, all_trap: bool) -> Option<u32> {
        let found = self.find(all_trap)?;
        self.next[usize::from(all_trap)] = found + 8;
        Some(POINTERS as u32 + found)
    }

    /// Returns true if one of the kinds is used up.
    fn is_used_up(self) -> bool {
        [false, true].into_iter().any(|all_trap| self.find(all_trap).is_none())
    }
}

/// The memory for a process's patched copies: the file, and the address at which the monitor writes
/// copies. Nothing is written there yet.
#[derive(Debug)]
pub struct Room {
    file: OwnedFd,
    window: usize,
}

impl Room {
    /// Maps the memory, and that for the code of sites.
    ///
    /// # Errors
    /// If the host refuses the memory.
    pub fn new() -> Result<Self> {
        let file = create(c"mercury-hosted-copies", 0)
            .map_err(|_| Error::system("make memory for patched copies of programs"))?;
        let size = MOST_PAGES * PAGE;
        // SAFETY: It takes a descriptor and a number.
        if unsafe { libc::ftruncate(file.as_raw_fd(), size as i64) } != 0 {
            return Err(Error::system("set the size of the memory for patched copies of programs"));
        }
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: A new mapping where the host likes.
        let window =
            unsafe { libc::mmap(ptr::null_mut(), size, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if window == libc::MAP_FAILED {
            return Err(Error::system("map the patched copies of programs"));
        }
        process::map_private(POINTERS, POINTERS_SIZE + PAGE as u64, rights)?;
        process::map_private(CELLS, CELLS_SIZE, rights | libc::PROT_EXEC)?;
        Ok(Self { file, window: window.expose_provenance() })
    }
}

impl PatchedCopies {
    /// Starts without copies. Sites go on at `system_call`.
    #[must_use]
    pub fn new(
        room: Room,
        system_call: u64,
        space: Option<SpaceProcess>,
        counters: &'static Counters,
    ) -> Self {
        Self {
            room,
            copies: BTreeMap::new(),
            space,
            foreign: BTreeSet::new(),
            cells: Vec::new(),
            pointers: Pointers::default(),
            mapped: BTreeMap::new(),
            writable: [Vec::new(), Vec::new()],
            traps: HashMap::new(),
            changes: HashMap::new(),
            generation: 0,
            system_call,
            counters,
        }
    }

    /// Counts a program's trap at a site, and rewrites the site after enough of them. Returns true
    /// if a copy was mapped.
    pub fn trapped(&mut self, memory: &Memory, address: u64, physical: u64) -> bool {
        let (page, offset) = (page_of(physical), physical as usize % PAGE);
        let generation = self.generation;
        let is_mapped = self.mapped.get(&page_of(address)) == Some(&page);
        if let Some(copy) = self.copies.get_mut(&page) {
            if copy.refused.contains(&offset) {
                return false;
            }
            if copy.sites.iter().any(|site| site.plan.site == offset) {
                let before = if copy.traps.0 == generation { copy.traps.1 } else { 0 };
                copy.traps = (generation, before + 1);
                return !is_mapped && before + 1 >= WORTH_MAPPING && self.map(memory, page_of(address), page);
            }
        }
        if self.changes.get(&page).is_some_and(|changes| *changes >= MOST_CHANGES) {
            return false;
        }
        if self.traps.len() == MOST_COUNTED {
            self.traps.clear();
        }
        let traps = self.traps.entry(physical).or_default();
        *traps += 1;
        if *traps < WORTH {
            return false;
        }
        self.traps.remove(&physical);
        self.rewrite(memory, page, offset).is_some() && !is_mapped && self.map(memory, page_of(address), page)
    }

    fn rewrite(&mut self, memory: &Memory, page: u64, offset: usize) -> Option<()> {
        let is_full = self.copies.len() == MOST_PAGES || self.cells.len() as u64 == CELLS_SIZE / CELL;
        if is_full || self.pointers.is_used_up() {
            self.drop_all(memory);
        }
        if !self.copies.contains_key(&page) {
            self.copy(memory, page)?;
        }
        let copy = self.copies.get_mut(&page)?;
        let taken: Vec<Range<usize>> = copy.sites.iter().flat_map(|site| site.plan.ranges()).collect();
        let planned = sites::plan(&copy.original, offset, &taken).ok();
        let pointer = planned.as_ref().and_then(|plan| self.pointers.take(plan.all_trap));
        let (Some(plan), Some(pointer)) = (planned, pointer) else {
            copy.refused.push(offset);
            count(&self.counters.refused);
            return None;
        };
        let cell = CELLS + self.cells.len() as u64 * CELL;
        let displaced = &copy.original[plan.start..plan.site];
        let virtual_at = VIRTUALS + copy.index as u64 * 8;
        let behind = (offset + 2) as u32;
        let code = thunks::site(displaced, virtual_at, behind, cell, self.system_call).ok()?;
        assert!(code.len() as u64 <= CELL, "a site's code is too long");
        // SAFETY: The cell and the pointer are mapped for as long as the process lives, and no
        // other site uses them. The guest does not run.
        unsafe {
            ptr::copy_nonoverlapping(code.as_ptr(), at::<u8>(cell), code.len());
            at::<u64>(pointer.into()).write_unaligned(cell);
        }
        for (from, bytes) in plan.edits(pointer) {
            // SAFETY: The copy's page is in the window, and an edit in its page, as the plan has made sure.
            unsafe {
                let to = ptr::with_exposed_provenance_mut::<u8>(self.room.window + copy.index * PAGE + from);
                ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            }
        }
        self.cells.push(Cell { index: copy.index, start: plan.start, displaced: displaced.len() });
        copy.sites.push(Site { plan, cell });
        count(&self.counters.rewritten);
        Some(())
    }

    fn copy(&mut self, memory: &Memory, page: u64) -> Option<()> {
        let mut original = Box::new([0; PAGE]);
        memory.read(page, &mut original[..])?;
        let used: Vec<usize> = self.copies.values().map(|copy| copy.index).collect();
        let index = (0..MOST_PAGES).find(|index| !used.contains(index))?;
        let to = ptr::with_exposed_provenance_mut::<u8>(self.room.window + index * PAGE);
        // SAFETY: The place is in the window, and no copy's.
        unsafe { ptr::copy_nonoverlapping(original.as_ptr(), to, PAGE) };
        if !protect(page, libc::PROT_READ | libc::PROT_EXEC) {
            return None;
        }
        let copy = Copy { index, original, sites: Vec::new(), refused: Vec::new(), traps: (0, 0) };
        self.copies.insert(page, copy);
        self.foreign.remove(&page);
        if let Some(space) = self.space {
            space.tell(Event::Copied(page));
        }
        Some(())
    }

    /// Maps the copy of a page at the program's address.
    fn map(&mut self, memory: &Memory, address: u64, page: u64) -> bool {
        let Some(copy) = self.copies.get(&page) else { return false };
        let mut now = [0; PAGE];
        if memory.read(page, &mut now).is_none() || now != *copy.original {
            self.drop_copy(memory, page);
            return false;
        }
        let is_writable = self.writable.iter().flatten().any(|range| range.contains(&page))
            || self.space.is_some_and(|space| space.has_other_writer(page));
        let is_elsewhere = self.mapped.iter().any(|(at, of)| *of == page && *at != address);
        if is_writable || is_elsewhere {
            return false;
        }
        // SAFETY: The address is the program's, of which the monitor keeps nothing (layout).
        let mapped = unsafe {
            libc::mmap(
                at(address),
                PAGE,
                libc::PROT_READ | libc::PROT_EXEC,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.room.file.as_raw_fd(),
                (copy.index * PAGE) as i64,
            )
        };
        if mapped == libc::MAP_FAILED {
            return false;
        }
        // SAFETY: The list of addresses is mapped, and has one for each copy.
        unsafe { at::<u64>(VIRTUALS + copy.index as u64 * 8).write(address) };
        self.mapped.insert(address, page);
        count(&self.counters.mapped);
        true
    }

    /// Maps the program's own page in place of the copy.
    pub fn show_original(&mut self, memory: &Memory, address: u64) {
        let address = page_of(address);
        let Some(page) = self.mapped.remove(&address) else { return };
        let rights = Rights { write: false, execute: true };
        if memory.map(address, PAGE as u64, page, rights).is_err() {
            memory.unmap(address, PAGE as u64);
        }
    }

    /// Records that a range has been mapped, writable by the program or the kernel, or not.
    pub fn range_mapped(&mut self, memory: &Memory, address: u64, physical: Range<u64>, how: Mapped) {
        if let Mapped::Writable { by_program } = how {
            self.drop_copies(memory, physical.clone());
            self.writable[usize::from(by_program)].push(physical.clone());
            if let Some(space) = self.space {
                space.set_writer(physical.clone(), true);
            }
        }
        let end = address + (physical.end - physical.start);
        let over: Vec<(u64, u64)> = self.mapped.range(address..end).map(|(at, page)| (*at, *page)).collect();
        for (at, page) in over {
            self.mapped.remove(&at);
            if how == Mapped::Code && physical.start + (at - address) == page {
                self.map(memory, at, page);
            }
        }
    }

    /// Drops the copy of a page to which the kernel writes by its own mapping. Returns true if a
    /// copy has forbidden that write.
    pub fn written(&mut self, memory: &Memory, physical: u64) -> bool {
        let page = page_of(physical);
        let known = self.copies.contains_key(&page) || self.foreign.contains(&page);
        self.drop_copy(memory, page);
        known
    }

    /// Drops the copies of a range's pages, in all processes.
    fn drop_copies(&mut self, memory: &Memory, physical: Range<u64>) {
        let own = self.copies.range(physical.clone()).map(|(page, _)| *page);
        let changed: Vec<u64> = own.chain(self.foreign.range(physical).copied()).collect();
        changed.into_iter().for_each(|page| self.drop_copy(memory, page));
    }

    /// Drops the copies of a page, in all processes.
    fn drop_copy(&mut self, memory: &Memory, page: u64) {
        if !self.copies.contains_key(&page) && !self.foreign.contains(&page) {
            return;
        }
        if let Some(space) = self.space {
            space.tell(Event::Written(page));
        }
        *self.changes.entry(page).or_default() += u32::from(self.copies.contains_key(&page));
        self.drop_own(memory, page);
    }

    /// Records that another process has a copy of a page, and makes the kernel's writes to the page
    /// fault.
    pub fn copied_elsewhere(&mut self, page: u64) {
        if self.copies.contains_key(&page) || self.foreign.contains(&page) {
            return;
        }
        if protect(page, libc::PROT_READ | libc::PROT_EXEC) {
            self.foreign.insert(page);
        } else if let Some(space) = self.space {
            // The host has no room for that change, so all processes drop their copies.
            space.tell(Event::Written(page));
        }
    }

    /// Records that pages were mapped anew in the direct map: the kernel's writes to those with copies must
    /// fault as before.
    pub fn replaced(&mut self, physical: Range<u64>) {
        let own = self.copies.range(physical.clone()).map(|(page, _)| *page);
        let known: Vec<u64> = own.chain(self.foreign.range(physical).copied()).collect();
        for page in known {
            protect(page, libc::PROT_READ | libc::PROT_EXEC);
        }
    }

    /// Records that another process has noticed a write to a page.
    pub fn written_elsewhere(&mut self, memory: &Memory, page: u64) {
        *self.changes.entry(page).or_default() += u32::from(self.copies.contains_key(&page));
        self.drop_own(memory, page);
    }

    /// Begins anew, because the events of other processes are not known. All copies of this process
    /// go. The kernel's writes fault for all pages of which other processes may have copies.
    pub fn begin_anew(&mut self, memory: &Memory) {
        let pages: Vec<u64> = self.copies.keys().chain(&self.foreign).copied().collect();
        pages.into_iter().for_each(|page| self.drop_own(memory, page));
        // No program is in a cell. One that was interrupted there is shown to its kernel at its own
        // address.
        self.cells.clear();
        self.pointers = Pointers::default();
        if let Some(space) = self.space {
            space.copied().for_each(|page| self.copied_elsewhere(page));
        }
    }

    /// Drops this process's copy of a page, or forgets that other processes have one.
    fn drop_own(&mut self, memory: &Memory, page: u64) {
        if self.copies.remove(&page).is_none() {
            if self.foreign.remove(&page) {
                protect(page, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
            }
            return;
        }
        count(&self.counters.dropped);
        let places: Vec<u64> = self.mapped.iter().filter(|(_, of)| **of == page).map(|(at, _)| *at).collect();
        for place in places {
            self.mapped.remove(&place);
            memory.unmap(place, PAGE as u64);
        }
        protect(page, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    }

    /// Drops all copies, because all places are used.
    fn drop_all(&mut self, memory: &Memory) {
        self.begin_anew(memory);
        self.changes.clear();
    }

    /// Records that the mapping of a page was dropped.
    pub fn page_dropped(&mut self, address: u64) {
        self.mapped.remove(&page_of(address));
    }

    /// Records that only these mappings of programs were kept.
    pub fn kept(&mut self, memory: &Memory, programs: &Mappings) {
        let before = self.mapped.len();
        self.mapped.retain(|at, page| {
            programs.page(*at).is_some_and(|(to, rights)| to == *page && rights.execute && !rights.write)
        });
        if self.mapped.len() < before {
            self.generation += 1;
        }
        self.set_writable(1, programs.writable().collect());
        if self.space.is_some() {
            // Other processes have run meanwhile. Their kernel may have read another file into the
            // page, and mapped it here.
            let changed = |page: &u64| {
                let mut now = [0; PAGE];
                let copy = self.copies.get(page);
                copy.is_some_and(|copy| memory.read(*page, &mut now).is_none() || now != *copy.original)
            };
            let changed: Vec<u64> = self.mapped.values().copied().filter(changed).collect();
            changed.into_iter().for_each(|page| self.drop_copy(memory, page));
        }
    }

    /// Replaces the ranges that programs, or the kernel, have mapped writable.
    fn set_writable(&mut self, by_program: usize, ranges: Vec<Range<u64>>) {
        let before = std::mem::replace(&mut self.writable[by_program], ranges);
        if let Some(space) = self.space {
            before.into_iter().for_each(|range| space.set_writer(range, false));
            self.writable.iter().flatten().for_each(|range| space.set_writer(range.clone(), true));
        }
    }

    /// Records that all mappings of the kernel were dropped.
    pub fn kernel_dropped(&mut self) {
        self.set_writable(0, Vec::new());
    }

    /// Records that all mappings of programs were dropped, and those of the kernel if `kernel` is
    /// set.
    pub fn all_dropped(&mut self, kernel: bool) {
        self.generation += 1;
        self.mapped.clear();
        self.set_writable(1, Vec::new());
        if kernel {
            self.set_writable(0, Vec::new());
        }
    }

    /// Returns the address at which a program goes on that has trapped below a jump.
    pub fn below_a_jump(&mut self, memory: &Memory, address: u64) -> Option<u64> {
        let page = *self.mapped.get(&page_of(address))?;
        let offset = address as usize % PAGE;
        let below = |site: &&Site| (site.plan.jump + 1..site.plan.jump + sites::LONG_JUMP).contains(&offset);
        let site = self.copies.get(&page)?.sites.iter().find(below)?;
        count(&self.counters.recovered);
        if site.plan.inside.contains(&offset) {
            return Some(site.cell + (offset - site.plan.start) as u64);
        }
        // The program is at an address that the plan did not take for an instruction's beginning.
        // It gets its own page back for good.
        self.changes.insert(page, MOST_CHANGES);
        self.drop_copy(memory, page);
        Some(address)
    }

    /// Returns the program's own address for one between the short jump of a site and the long jump
    /// in the padding nearby. The long jump is missing when the copy has gone.
    fn start_of_jump(&self, address: u64) -> Option<u64> {
        let page = self.mapped.get(&page_of(address))?;
        let offset = address as usize % PAGE;
        let is_there = |site: &&Site| site.plan.jump == offset && site.plan.jump != site.plan.start;
        let site = self.copies.get(page)?.sites.iter().find(is_there)?;
        Some(page_of(address) + site.plan.start as u64)
    }

    /// Returns the address that the guest is to see for an address in a site's code: the program's
    /// own.
    #[must_use]
    pub fn visible(&self, address: u64) -> u64 {
        if let Some(start) = self.start_of_jump(address) {
            return start;
        }
        let offset = address.wrapping_sub(CELLS);
        let Some(cell) = self.cells.get((offset / CELL) as usize) else { return address };
        let within = (offset % CELL) as usize;
        if within > cell.displaced {
            // Interrupts are off there, and nothing faults.
            return address;
        }
        // SAFETY: The list of addresses is mapped, and has one for each copy.
        let page = unsafe { at::<u64>(VIRTUALS + cell.index as u64 * 8).read() };
        page + (cell.start + within) as u64
    }
}

/// The way in which a range was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// The range is writable.
    Writable {
        /// True if a program can write, false if the kernel can.
        by_program: bool,
    },
    /// The range can be executed.
    Code,
    /// The range can only be read.
    Data,
}

/// Sets the kernel's rights to a page in the direct map. Returns true if the host has done so.
fn protect(page: u64, rights: i32) -> bool {
    // SAFETY: The page is in the direct map, which the monitor itself does not use.
    unsafe { libc::mprotect(at(DIRECT_MAP + page), PAGE, rights) == 0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pointers_do_not_overlap_and_trap_where_they_must() {
        let mut free = Pointers::default();
        assert!(!free.is_used_up());
        let [any, traps] =
            [false, true].map(|kind| std::iter::from_fn(|| free.take(kind)).collect::<Vec<u32>>());
        assert!(free.is_used_up());
        let mut all: Vec<u32> = any.iter().chain(&traps).copied().collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[1] - two[0] >= 8) && all.len() > 6000 && traps.len() > 200);
        for pointer in all {
            let bytes = pointer.to_le_bytes();
            assert!(sites::is_trap(bytes[2]) && sites::is_trap(bytes[3]), "{pointer:#x}");
        }
        assert!(traps.iter().all(|one| one.to_le_bytes().into_iter().all(sites::is_trap)));
    }
}
