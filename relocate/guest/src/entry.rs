//! The state in which a processor begins: the resume code of the kernel in the image, mapped at its own
//! address, with the saved registers at their physical address.
//!
//! The resume code needs long mode, page tables that map itself and the saved registers, the physical
//! address of the saved registers in RDI, and its own address in RIP (`switch/driver/snapshot/resume.S`).

use crate::{
    fit::{Unfit, unfit},
    layout::{Layout, MONITOR, PAGE_BYTES},
};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use mercury_devices::memory::{self, View};
use mercury_image::Machine;

/// Bits of an entry of a page table: present and writable; a page of 2 MiB (AMD64 manual, volume 2, 5.3).
const TABLE: u64 = 3;
const LARGE: u64 = 0x83;
const LARGE_BYTES: u64 = 2 << 20;
/// Bits of an entry that are an address.
const ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;
/// CR0: paging, protection, write protection, and the coprocessor's bits as Linux has them.
const CR0: u64 = 0x8005_0033;
/// CR4: physical addresses of more than 32 bits; five levels of page tables.
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
/// EFER: system calls, long mode enabled and active, pages that are not executable.
const EFER: u64 = 0xD01;
/// The local APIC's base: x2APIC mode.
const X2APIC: u64 = 0xC00;
/// Types of segments: code that may be read, data that may be written; both accessed.
const CODE: u8 = 11;
const DATA: u8 = 3;

/// Page tables in the monitor's memory.
#[derive(Debug)]
pub struct Tables<'a> {
    view: &'a View,
    levels: u32,
    root: u64,
    free: u64,
}

impl<'a> Tables<'a> {
    /// Makes tables that map what the resume code needs.
    ///
    /// # Errors
    /// The image has impossible addresses, or more processors than the tables have room for.
    pub fn make(view: &'a View, machine: &Machine) -> Result<Self, Unfit> {
        // The first page is the description of devices.
        let root = MONITOR.start + PAGE_BYTES;
        let levels = levels(machine);
        let mut tables = Self { view, levels, root, free: root + PAGE_BYTES };
        for cpu in &machine.cpus {
            let last = cpu.saved_phys.saturating_add(PAGE_BYTES);
            for page in [cpu.saved_phys, last] {
                let page = page & !(LARGE_BYTES - 1);
                tables.map(page, 21, page | LARGE)?;
            }
        }
        let is_memory = |phys| memory::pointer(view, phys, PAGE_BYTES).is_some();
        for (virt, phys) in resume_pages(machine, is_memory)? {
            tables.map(virt, 12, phys | TABLE)?;
        }
        Ok(tables)
    }

    /// Returns the physical address of the root.
    #[must_use]
    pub fn root(&self) -> u64 {
        self.root
    }

    fn map(&mut self, virt: u64, shift: u32, entry: u64) -> Result<(), Unfit> {
        let mut table = self.root;
        for level in (shift..12 + 9 * self.levels).rev().filter(|level| (level - 12).is_multiple_of(9)) {
            let at = table + (virt >> level & 511) * 8;
            if level == shift {
                return self.put(at, entry);
            }
            let mut next = self.get(at)?;
            if next == 0 {
                next = self.new_table()? | TABLE;
                self.put(at, next)?;
            }
            table = next & ADDRESS;
        }
        Ok(())
    }

    fn new_table(&mut self) -> Result<u64, Unfit> {
        let table = self.free;
        if table >= MONITOR.end {
            return Err(unfit("it has too many processors"));
        }
        self.free += PAGE_BYTES;
        Ok(table)
    }

    fn get(&self, at: u64) -> Result<u64, Unfit> {
        let mut bytes = [0; 8];
        memory::read(self.view, at, &mut bytes).ok_or_else(|| unfit("its page tables have no memory"))?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn put(&self, at: u64, entry: u64) -> Result<(), Unfit> {
        memory::write(self.view, at, &entry.to_le_bytes())
            .ok_or_else(|| unfit("its page tables have no memory"))
    }

    /// Sets the system registers of a processor.
    pub fn enter(&self, machine: &Machine, registers: &mut kvm_sregs) {
        registers.cs = segment(0x10, CODE);
        for data in
            [&mut registers.ds, &mut registers.es, &mut registers.ss, &mut registers.fs, &mut registers.gs]
        {
            *data = segment(0x18, DATA);
        }
        registers.cr0 = CR0;
        registers.cr3 = self.root;
        registers.cr4 = CR4_PAE | if self.levels == 5 { CR4_LA57 } else { 0 };
        registers.efer = EFER;
        if machine.resume.x2apic {
            registers.apic_base |= X2APIC;
        }
    }
}

/// Returns the general registers with which a processor begins.
#[must_use]
pub fn registers(machine: &Machine, saved_phys: u64) -> kvm_regs {
    kvm_regs { rip: machine.resume.virt, rdi: saved_phys, rflags: 2, ..kvm_regs::default() }
}

/// Checks the addresses of the resume code, before memory is touched.
///
/// # Errors
/// The image has impossible addresses.
pub fn check(machine: &Machine, layout: &Layout) -> Result<(), Unfit> {
    resume_pages(machine, |phys| layout.contains(phys, PAGE_BYTES)).map(drop)
}

/// Returns the pages of the resume code, each with its virtual and its physical address.
fn resume_pages(machine: &Machine, is_memory: impl Fn(u64) -> bool) -> Result<Vec<(u64, u64)>, Unfit> {
    let levels = levels(machine);
    let text = machine.resume.virt & !(PAGE_BYTES - 1);
    if !is_kernel(text, levels) || !is_kernel(text.wrapping_add(2 * PAGE_BYTES - 1), levels) {
        return Err(unfit("its resume code has no address of a kernel"));
    }
    let [first, second] = machine.resume.phys;
    let mut pages = vec![(text, first)];
    // The code may end on its first page.
    if second != 0 {
        pages.push((text + PAGE_BYTES, second));
    }
    if pages.iter().any(|&(_, phys)| phys & !ADDRESS != 0 || !is_memory(phys)) {
        return Err(unfit("its resume code is not in its memory"));
    }
    Ok(pages)
}

fn levels(machine: &Machine) -> u32 {
    if machine.resume.five_level { 5 } else { 4 }
}

/// Returns true for an address in the upper half.
fn is_kernel(virt: u64, levels: u32) -> bool {
    let half = 11 + 9 * levels;
    virt >> half == u64::MAX >> half
}

fn segment(selector: u16, kind: u8) -> kvm_segment {
    let is_code = u8::from(kind == CODE);
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        db: 1 - is_code,
        s: 1,
        l: is_code,
        g: 1,
        ..kvm_segment::default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use mercury_image::{Cpu, Kind, Range, Resume};

    fn machine(five_level: bool) -> Machine {
        let ranges = vec![Range { start_phys: 0x10_0000, pages: 0x1000, kind: Kind::Kept }];
        let virt = 0xFFFF_FFFF_C012_3F80;
        let resume = Resume { virt, phys: [0x20_0000, 0x31_0000], five_level, x2apic: true };
        let cpus = vec![Cpu { cpu: 0, apic_id: 0, saved_phys: 0x3F_F900 }];
        Machine { ranges, resume, cpus, ..Machine::default() }
    }

    /// Walks the tables as a processor does.
    fn translate(tables: &Tables<'_>, virt: u64) -> Option<u64> {
        let mut table = tables.root;
        for level in (0..tables.levels).rev() {
            let shift = 12 + 9 * level;
            let entry = tables.get(table + (virt >> shift & 511) * 8).unwrap();
            if entry & 1 == 0 {
                return None;
            }
            if level == 0 || entry & 0x80 != 0 {
                let offset = virt & ((1 << shift) - 1);
                return Some((entry & ADDRESS & !((1 << shift) - 1)) + offset);
            }
            table = entry & ADDRESS;
        }
        None
    }

    #[test]
    fn the_resume_code_and_the_saved_registers_are_mapped_and_nothing_else() {
        for five_level in [false, true] {
            let machine = machine(five_level);
            let view = crate::memory::map(&Layout::of(&machine).unwrap()).unwrap();
            let tables = Tables::make(&view, &machine).unwrap();
            let resume = machine.resume.virt;
            assert_eq!(translate(&tables, resume), Some(0x20_0F80));
            assert_eq!(translate(&tables, (resume & !0xFFF) + 0x1008), Some(0x31_0008));
            assert_eq!(translate(&tables, (resume & !0xFFF) + 0x2000), None);
            // The saved registers lie across two large pages.
            assert_eq!(translate(&tables, 0x3F_F900), Some(0x3F_F900));
            assert_eq!(translate(&tables, 0x40_0010), Some(0x40_0010));
            assert_eq!(translate(&tables, 0x60_0000), None);
            let mut registers = kvm_sregs::default();
            tables.enter(&machine, &mut registers);
            assert_eq!((registers.cr3, registers.apic_base), (MONITOR.start + 0x1000, X2APIC));
            assert_eq!(registers.cr4 & CR4_LA57 != 0, five_level);
        }
    }

    #[test]
    fn impossible_addresses_and_too_many_processors_are_refused() {
        let refused = |change: fn(&mut Machine)| {
            let mut machine = machine(false);
            let view = crate::memory::map(&Layout::of(&machine).unwrap()).unwrap();
            change(&mut machine);
            Tables::make(&view, &machine).unwrap_err().0
        };
        assert!(refused(|machine| machine.resume.virt = 0x1000).contains("no address of a kernel"));
        assert!(refused(|machine| machine.resume.virt = u64::MAX).contains("no address of a kernel"));
        assert!(refused(|machine| machine.resume.phys[1] = 0x5000_0000).contains("not in its memory"));
        assert!(refused(|machine| machine.resume.phys[0] = 1).contains("not in its memory"));
        let many = |machine: &mut Machine| {
            machine.cpus =
                (0..300).map(|cpu| Cpu { cpu, apic_id: cpu, saved_phys: u64::from(cpu) << 30 }).collect();
        };
        assert!(refused(many).contains("too many processors"));
    }
}
