//! Programs in processes of their own (`--isolation=process`): one for each address space of the guest.
//!
//! Guest kernel and monitor stay in their process. A program reaches only the memory that its
//! kernel has mapped for it ([`stub`]). Its process keeps its mappings while others run. When the
//! guest's kernel makes the processor forget translations, the effect comes late here: before a
//! program runs again, the mappings of its process are compared with the page tables
//! ([`mappings`]). Only mappings that the tables no longer allow are removed.
//!
//! [`Tags`] decides when that comparison is needed, by the rules for a processor with
//! process-context identifiers.

pub mod filter;
pub mod mappings;
pub mod stub;

use crate::{
    block::Block,
    error::Result,
    layout::{self, PAGE, STUB, STUB_STATE, STUB_STATE_SIZE},
    memory::{Memory, Rights},
    mmu::{self, Access, Privilege, TableReader, Translation},
    process::tags::{self, Found, Tags},
};
use mappings::Mappings;
use stub::{Common, Order, Stop, Stub};

/// The number of processes. More address spaces take turns.
pub const PROCESSES: usize = tags::MOST;
/// The largest number of adjacent pages mapped to each side of a missing one.
const NEIGHBOURS: u64 = 64;
/// The size of the block of pages around a missing one. Pages in it that the program has used are
/// mapped, too.
const AROUND: u64 = 16;
/// The largest range whose pages the host fills in at once. Of larger ranges it fills in the pages
/// that are used.
const AT_ONCE: u64 = 32;
/// If more changes than this are needed, all mappings go.
const MOST_CHANGES: usize = 64;
/// The number of the kernel's uses of pages that are remembered.
const MOST_USED: usize = 8;

/// Events that are counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Entries into programs.
    pub entries: u64,
    /// System calls that their processes made for the monitor.
    pub orders: u64,
    /// Times that a process' mappings were compared with the page tables.
    pub revalidated: u64,
    /// Address spaces that got another's process.
    pub taken_over: u64,
    /// Interruptions of programs.
    pub interrupted: u64,
    /// Programs found in their process' own code.
    pub astray: u64,
}

/// The orders for a program's process, and its mappings.
#[derive(Debug, Default)]
struct ProgramSpace {
    mappings: Mappings,
    orders: Vec<Order>,
}

impl ProgramSpace {
    fn map(&mut self, address: u64, length: u64, physical: u64, rights: Rights, file: u64) {
        // An earlier order to unmap the same range is superfluous.
        if self.orders.last() == Some(&stub::unmap(address, length)) {
            self.orders.pop();
        }
        let populate = if length <= AT_ONCE * PAGE { libc::MAP_POPULATE } else { 0 };
        let how = (libc::MAP_SHARED | libc::MAP_FIXED | populate) as u64;
        self.orders.push([libc::SYS_mmap as u64, address, length, flags(rights), how, file, physical]);
        self.mappings.insert(address, length, physical, rights);
    }

    fn unmap(&mut self, address: u64, length: u64) {
        self.orders.push(stub::unmap(address, length));
        self.mappings.remove(address, length);
    }

    fn unmap_all(&mut self) {
        self.orders = vec![
            stub::unmap(0, STUB),
            stub::unmap(STUB_STATE + STUB_STATE_SIZE, layout::USER_END - STUB_STATE - STUB_STATE_SIZE),
        ];
        self.mappings.clear();
    }

    fn revalidate(&mut self, memory: &Memory, cr3: u64) {
        let mut tables = TableReader::new(memory, cr3);
        let changes = self.mappings.revalidate(|page| tables.page(page));
        if changes.len() > MOST_CHANGES {
            return self.unmap_all();
        }
        for change in changes {
            self.orders.push(match change.rights {
                None => stub::unmap(change.address, change.length),
                Some(rights) => {
                    let number = libc::SYS_mprotect as u64;
                    [number, change.address, change.length, flags(rights), 0, 0, 0]
                }
            });
        }
    }
}

fn flags(rights: Rights) -> u64 {
    let write = if rights.write { libc::PROT_WRITE } else { 0 };
    let execute = if rights.execute { libc::PROT_EXEC } else { 0 };
    (libc::PROT_READ | write | execute) as u64
}

/// A fault that the guest's kernel was given for its program.
#[derive(Clone, Copy, Debug)]
struct Asked {
    cr3: u64,
    address: u64,
    access: Access,
}

/// The processes of isolated programs.
#[derive(Debug)]
pub struct ProgramProcesses {
    stubs: Vec<Stub>,
    spaces: Vec<ProgramSpace>,
    tags: Tags,
    file: u64,
    /// The number of mappings that the host allows a process.
    most_mapped: u64,
    asked: Option<Asked>,
    /// The pages that the kernel has used since CR3 was written.
    used: Vec<u64>,
    /// True if orders were refused, and no program has run since.
    refused: bool,
    /// Events that are counted.
    pub counters: Counters,
    _common: Common,
}

impl ProgramProcesses {
    /// Starts the processes.
    ///
    /// # Errors
    /// If the host lacks something that the processes need.
    pub fn start(memory: &Memory, most_mapped: u64) -> Result<Self> {
        let file = memory.descriptor();
        let common = Common::new(PROCESSES, file)?;
        let start = |index| Stub::start(&common, index);
        Ok(Self {
            stubs: (0..PROCESSES).map(start).collect::<Result<_>>()?,
            spaces: (0..PROCESSES).map(|_| ProgramSpace::default()).collect(),
            tags: Tags::new(PROCESSES),
            file: file as u64,
            most_mapped,
            asked: None,
            used: Vec::new(),
            refused: false,
            counters: Counters::default(),
            _common: common,
        })
    }

    /// Records a write of CR3. Translations are kept unless `flush` is set.
    pub fn load(&mut self, cr3: u64, flush: bool) {
        self.used.clear();
        self.tags.load(cr3, flush);
    }

    /// Returns true if the kernel uses a page of the program for the first time.
    pub fn is_first_use(&mut self, page: u64) -> bool {
        let is_first = !self.used.contains(&page) && self.used.len() < MOST_USED;
        if is_first {
            self.used.push(page);
        }
        is_first
    }

    /// Records that all translations were dropped.
    pub fn flush_all(&mut self) {
        self.tags.flush_all();
    }

    /// Records that the translation of a page was dropped.
    pub fn flush_page(&mut self, cr3: u64, page: u64) {
        let Some(index) = self.tags.own(cr3) else { return };
        let space = &mut self.spaces[index];
        for (address, length) in space.mappings.drop_large_page(page) {
            space.unmap(address, length);
        }
        if space.mappings.page(page).is_some() {
            space.unmap(page, PAGE);
        }
    }

    /// Records a fault that the guest's kernel is given. The page that it maps then is mapped
    /// before the program goes on.
    pub fn ask(&mut self, cr3: u64, address: u64, access: Access) {
        self.asked = Some(Asked { cr3, address, access });
    }

    /// Maps the page that the page tables have at an address for the program.
    pub fn map(&mut self, memory: &Memory, cr3: u64, address: u64, found: &Translation) {
        let index = self.index(cr3);
        let space = &mut self.spaces[index];
        if space.mappings.count() > self.most_mapped {
            space.unmap_all();
        }
        let page = address & !(PAGE - 1);
        let physical = found.physical & !(PAGE - 1);
        let rights = Rights { write: found.write, execute: found.execute };
        if found.size > PAGE {
            let size = found.size.min(2 << 20);
            let (whole, start) = (found.physical & !(size - 1), address & !(size - 1));
            let is_whole = memory.contains(whole, size) && memory.has_room(start, size);
            match is_whole {
                true => space.map(start, size, whole, rights, self.file),
                false => space.map(page, PAGE, physical, rights, self.file),
            }
            space.mappings.insert_large_page(address, found.size);
            return;
        }
        let (before, after) = mmu::neighbours(memory, found, NEIGHBOURS);
        let (start, length) = (page - before * PAGE, (before + after) * PAGE);
        space.map(start, length, physical - before * PAGE, rights, self.file);
        Self::map_around(space, memory, cr3, page, self.file);
    }

    /// Maps the pages around a page that the program has used.
    fn map_around(space: &mut ProgramSpace, memory: &Memory, cr3: u64, page: u64, file: u64) {
        let mut tables = TableReader::new(memory, cr3);
        let start = page & !(AROUND * PAGE - 1);
        let mut run: Option<(u64, u64, u64, Rights)> = None;
        for at in (0..AROUND).map(|number| start + number * PAGE) {
            let found = tables
                .page(at)
                .filter(|(physical, _)| memory.contains(*physical, PAGE))
                .filter(|_| layout::is_user(at) && memory.direct(at).is_none())
                .filter(|_| space.mappings.page(at).is_none());
            run = match (run, found) {
                (Some((begin, length, physical, rights)), Some((to, allowed)))
                    if begin + length == at && physical + length == to && rights == allowed =>
                {
                    Some((begin, length + PAGE, physical, rights))
                }
                (before, found) => {
                    if let Some((begin, length, physical, rights)) = before {
                        space.map(begin, length, physical, rights, file);
                    }
                    found.map(|(to, allowed)| (at, PAGE, to, allowed))
                }
            };
        }
        if let Some((begin, length, physical, rights)) = run {
            space.map(begin, length, physical, rights, file);
        }
    }

    /// Returns the index of an address space's process.
    fn index(&mut self, cr3: u64) -> usize {
        match self.tags.choose(cr3) {
            Found::Own(index) => index,
            Found::Other(index) => {
                self.counters.taken_over += 1;
                self.spaces[index].unmap_all();
                self.stubs[index].wipe();
                index
            }
        }
    }

    /// Runs the program of the block's registers until it stops.
    ///
    /// # Errors
    /// If its process has ended.
    pub fn run(&mut self, memory: &Memory, cr3: u64, block: &Block) -> Result<Stop> {
        let index = self.index(cr3);
        if self.tags.take_stale(index) {
            self.counters.revalidated += 1;
            self.spaces[index].revalidate(memory, cr3);
        }
        if let Some(asked) = self.asked.take_if(|asked| asked.cr3 == cr3) {
            let found = mmu::walk(memory, cr3, asked.address, asked.access, Privilege::User);
            if let Ok(found) = found
                && memory.contains(found.physical & !(PAGE - 1), PAGE)
            {
                self.map(memory, cr3, asked.address, &found);
            }
        }
        let space = &mut self.spaces[index];
        self.counters.entries += 1;
        self.counters.orders += space.orders.len() as u64;
        let stop = self.stubs[index].run(&mut space.orders, block)?;
        match stop {
            Stop::Astray | Stop::Refused => space.unmap_all(),
            _ => {}
        }
        let again = stop_again(stop, &mut self.refused);
        match again {
            Stop::Interrupted => self.counters.interrupted += 1,
            Stop::Astray => self.counters.astray += 1,
            _ => {}
        }
        Ok(again)
    }
}

/// Decides about refused orders. The process gets fewer orders next. If these are refused too, the
/// program cannot go on.
fn stop_again(stop: Stop, refused: &mut bool) -> Stop {
    let before = std::mem::replace(refused, matches!(stop, Stop::Refused));
    if before && *refused { Stop::Astray } else { stop }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_refused_twice_are_the_program_s_fault() {
        let mut refused = false;
        assert!(matches!(stop_again(Stop::Refused, &mut refused), Stop::Refused));
        assert!(matches!(stop_again(Stop::Refused, &mut refused), Stop::Astray));
        assert!(matches!(stop_again(Stop::Interrupted, &mut refused), Stop::Interrupted));
        assert!(matches!(stop_again(Stop::Refused, &mut refused), Stop::Refused));
    }
}
