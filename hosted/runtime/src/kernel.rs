//! Reads a pre-virtualized `vmlinux`: what is to be loaded where, its relocations, its symbols and its slots.
//!
//! The file is the one that boots the bare machine. Its link has kept the relocations (with
//! `RELOCATABLE` and `RANDOMIZE_BASE`), so that a loader can move it.

use std::collections::{BTreeMap, HashMap, HashSet};

use mercury_afterburner::record::{self, Flags, Record};
use object::{
    LittleEndian, Object, ObjectSection, ObjectSymbol, RelocationTarget, SymbolSection,
    elf::{self, PF_X, SHF_ALLOC, SHF_EXECINSTR},
    read::elf::{ElfFile64, ProgramHeader, SectionHeader},
};

use crate::{
    error::{Error, Result},
    thunks,
};

/// Linked there, moved elsewhere.
const SECTION_PERCPU: &str = ".data..percpu";
/// Code that the kernel copies over other code when it starts.
const SECTION_REPLACEMENTS: &str = ".altinstr_replacement";
/// No kernel is linked for physical addresses beyond.
const HIGHEST: u64 = 1 << 40;
/// The remedy for a kernel without relocations.
const HOW_TO_BUILD: &str = "build it with `afterburner make`, RELOCATABLE=y, RANDOMIZE_BASE=y, \
    RANDOMIZE_MEMORY=y and without X86_5LEVEL, and use the build's vmlinux, not stripped";

/// A part of the file that goes into memory.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Its address as linked; 0 for the part with the processors' own variables.
    pub address: u64,
    pub physical: u64,
    pub bytes: Vec<u8>,
    /// The size in memory, in bytes.
    pub size: u64,
}

/// The change of a place when the image moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// 32 bits grow by the distance.
    Word,
    /// 64 bits grow by the distance.
    Long,
    /// 32 bits, relative to their own address, of something that does not move.
    Backwards,
}

/// A place that changes when the image moves.
#[derive(Clone, Copy, Debug)]
pub struct Relocation {
    pub physical: u64,
    /// The kind of change.
    pub change: Change,
}

/// A section with code.
#[derive(Clone, Debug)]
pub struct Code {
    pub name: String,
    /// Its address as linked.
    pub address: u64,
    pub physical: u64,
    pub size: u64,
}

/// A kernel's file.
#[derive(Debug)]
pub struct Kernel {
    /// The parts that are loaded.
    pub segments: Vec<Segment>,
    /// The places that change when the image moves.
    pub relocations: Vec<Relocation>,
    /// The sections with code.
    pub code: Vec<Code>,
    /// Slots, by their addresses as linked.
    pub slots: BTreeMap<u64, Vec<Record>>,
    symbols: HashMap<String, (u64, u64)>,
}

type File<'a> = ElfFile64<'a, LittleEndian>;

fn not_loadable(why: impl Into<String>) -> Error {
    Error::new(why).hint(HOW_TO_BUILD)
}

impl Kernel {
    /// Reads it from a file's bytes.
    ///
    /// # Errors
    /// If it is no kernel, has not been pre-virtualized, or lacks relocations or records.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let file = File::parse(bytes).map_err(|error| {
            let image = bytes.get(0x202..0x206) == Some(b"HdrS");
            let what =
                if image { "this is a boot image, not a vmlinux" } else { "this is no ELF file for x86-64" };
            not_loadable(format!("{what}: {error}"))
        })?;
        if file.elf_header().e_machine.get(LittleEndian) != elf::EM_X86_64 {
            return Err(not_loadable("this is no kernel for x86-64"));
        }
        let mut kernel = Self {
            segments: segments(&file)?,
            relocations: Vec::new(),
            code: Vec::new(),
            slots: slots(&file)?,
            symbols: symbols(&file),
        };
        for name in
            ["start_kernel", "init_top_pgt", "page_offset_base", "vmalloc_base", "vmemmap_base", "phys_base"]
        {
            kernel.symbol(name)?;
        }
        has_four_levels(&kernel.symbols)?;
        kernel.read_sections(&file)?;
        if kernel.relocations.is_empty() {
            return Err(not_loadable("the kernel has no relocations, so that it cannot be moved"));
        }
        Ok(kernel)
    }

    /// A symbol's address as linked.
    ///
    /// # Errors
    /// If there is none of the name.
    pub fn symbol(&self, name: &str) -> Result<u64> {
        self.find(name).map(|(address, _)| address)
    }

    /// A symbol's address and size.
    ///
    /// # Errors
    /// If there is none of the name.
    pub fn find(&self, name: &str) -> Result<(u64, u64)> {
        let missing = || {
            not_loadable(format!(
                "the kernel has no symbol {name}: it has another configuration, or is stripped"
            ))
        };
        self.symbols.get(name).copied().ok_or_else(missing)
    }

    /// Returns the ranges of the functions with these names, as far as there are any.
    pub fn functions<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = std::ops::Range<u64>> + 'a {
        names
            .iter()
            .filter_map(|name| self.symbols.get(*name))
            .map(|(address, size)| *address..address + size)
    }

    /// Returns true if the kernel executes this address only until there are programs.
    #[must_use]
    pub fn is_initial(&self, address: u64) -> bool {
        let is_in = |code: &&Code| (code.address..code.address + code.size).contains(&address);
        self.code.iter().find(is_in).is_some_and(|code| code.name.starts_with(".init"))
    }

    /// Returns the symbols in code, by their linked addresses.
    #[must_use]
    pub fn code_symbols(&self) -> BTreeMap<u64, Vec<&str>> {
        let mut names: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
        for (name, (address, _)) in &self.symbols {
            let is_in = |code: &Code| (code.address..code.address + code.size).contains(address);
            if self.code.iter().any(is_in) {
                names.entry(*address).or_default().push(name);
            }
        }
        names
    }

    /// Returns the physical address of a linked one, if it is loaded.
    #[must_use]
    pub fn physical(&self, address: u64) -> Option<u64> {
        let of = |segment: &Segment| {
            let offset = address.checked_sub(segment.address)?;
            (segment.address != 0 && offset < segment.size).then_some(segment.physical + offset)
        };
        self.segments.iter().find_map(of)
    }

    /// Returns the physical address after the image.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.segments.iter().map(|segment| segment.physical + segment.size).max().unwrap_or(0)
    }

    /// Forgets what is needed to load it, which is most of it. Its symbols and where it lies are left.
    pub fn is_loaded(&mut self) {
        self.segments.iter_mut().for_each(|segment| segment.bytes = Vec::new());
        (self.relocations, self.code, self.slots) = (Vec::new(), Vec::new(), BTreeMap::new());
    }

    fn read_sections(&mut self, file: &File<'_>) -> Result<()> {
        let percpu = file.section_by_name(SECTION_PERCPU).map(|section| section.index());
        let names = Names::default();
        for section in file.sections() {
            let header = section.elf_section_header();
            let flags = header.sh_flags(LittleEndian);
            if flags & u64::from(SHF_ALLOC) == 0 || section.size() == 0 {
                continue;
            }
            let Some(base) = self.section_physical(&section, percpu) else { continue };
            if section.size() > self.end().saturating_sub(base) {
                return Err(not_loadable("the kernel's file has sections that are not loaded"));
            }
            if flags & u64::from(SHF_EXECINSTR) != 0 {
                self.code.push(Code {
                    name: section.name().unwrap_or_default().to_owned(),
                    address: section.address(),
                    physical: base,
                    size: section.size(),
                });
            }
            for (offset, relocation) in section.relocations() {
                let physical = base.wrapping_add(offset.wrapping_sub(section.address()));
                let object::RelocationFlags::Elf { r_type } = relocation.flags() else { continue };
                let RelocationTarget::Symbol(index) = relocation.target() else { continue };
                let symbol = file.symbol_by_index(index).map_err(|error| not_loadable(error.to_string()))?;
                let name = symbol.name().unwrap_or_default();
                let is_percpu = percpu.is_some() && symbol.section_index() == percpu && !names.moves(name);
                if let Some(change) = change(r_type, is_percpu, fixed(&symbol, &names, name))? {
                    self.relocations.push(Relocation { physical, change });
                }
            }
        }
        Ok(())
    }

    fn section_physical(
        &self,
        section: &object::read::elf::ElfSection64<'_, '_, LittleEndian>,
        percpu: Option<object::SectionIndex>,
    ) -> Option<u64> {
        if Some(section.index()) == percpu {
            return self.segments.iter().find(|segment| segment.address == 0).map(|segment| segment.physical);
        }
        self.physical(section.address())
    }
}

/// Returns true if a symbol stays at its address when the image moves.
fn fixed<'a>(symbol: &impl ObjectSymbol<'a>, names: &Names, name: &str) -> bool {
    match symbol.section() {
        SymbolSection::Undefined => true,
        SymbolSection::Absolute => !names.moves(name),
        _ => false,
    }
}

fn change(kind: u32, is_percpu: bool, is_fixed: bool) -> Result<Option<Change>> {
    Ok(match kind {
        elf::R_X86_64_NONE | elf::R_X86_64_PC64 => None,
        elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => is_percpu.then_some(Change::Backwards),
        elf::R_X86_64_32 | elf::R_X86_64_32S => (!is_percpu && !is_fixed).then_some(Change::Word),
        elf::R_X86_64_64 => (!is_percpu && !is_fixed).then_some(Change::Long),
        other => {
            return Err(not_loadable(format!("the kernel has a relocation of the unknown type {other}")));
        }
    })
}

/// Symbols that move although the linker calls them absolute, or puts them beside the processors'
/// variables.
struct Names {
    exact: HashSet<&'static str>,
}

impl Default for Names {
    fn default() -> Self {
        let exact = [
            "__init_begin",
            "__init_end",
            "__x86_cpu_dev_start",
            "__x86_cpu_dev_end",
            "__parainstructions",
            "__parainstructions_end",
            "__alt_instructions",
            "__alt_instructions_end",
            "__apicdrivers",
            "__apicdrivers_end",
            "__smp_locks",
            "__smp_locks_end",
            "__start___ksymtab",
            "__stop___ksymtab",
            "__start___ksymtab_gpl",
            "__stop___ksymtab_gpl",
            "__start___param",
            "__stop___param",
            "__start___modver",
            "__stop___modver",
            "__start___bug_table",
            "__stop___bug_table",
            "__start_notes",
            "__stop_notes",
            "__end_rodata",
            "__end_rodata_aligned",
            "__initramfs_start",
            "jiffies",
            "jiffies_64",
            "__per_cpu_load",
            "__end_rodata_hpage_align",
            "__vvar_page",
            "_end",
        ];
        Self { exact: exact.into_iter().collect() }
    }
}

impl Names {
    fn moves(&self, name: &str) -> bool {
        self.exact.contains(name)
            || name.starts_with("init_per_cpu__")
            || name.starts_with("__start_pci_")
            || name.starts_with("__end_pci_")
    }
}

fn segments(file: &File<'_>) -> Result<Vec<Segment>> {
    let endian = LittleEndian;
    let mut segments = Vec::new();
    for header in file.elf_program_headers() {
        if header.p_type(endian) != elf::PT_LOAD || header.p_memsz(endian) == 0 {
            continue;
        }
        let bytes =
            header.data(endian, file.data()).map_err(|()| not_loadable("the kernel's file is cut off"))?;
        let end = header.p_paddr(endian).checked_add(header.p_memsz(endian));
        if end.is_none_or(|end| end > HIGHEST) || (bytes.len() as u64) > header.p_memsz(endian) {
            return Err(not_loadable("the kernel's file has parts of impossible size"));
        }
        segments.push(Segment {
            address: header.p_vaddr(endian),
            physical: header.p_paddr(endian),
            bytes: bytes.to_vec(),
            size: header.p_memsz(endian),
        });
    }
    let executable = file.elf_program_headers().iter().any(|header| header.p_flags(endian) & PF_X != 0);
    let high = segments.iter().any(|segment| segment.address >= 0xFFFF_FFFF_8000_0000);
    if !executable || !high {
        return Err(not_loadable("this is a program or a part of one, not a kernel"));
    }
    Ok(segments)
}

fn slots(file: &File<'_>) -> Result<BTreeMap<u64, Vec<Record>>> {
    let none = || {
        not_loadable(format!(
            "the kernel has no section {}: it was not pre-virtualized, or has been stripped",
            record::SECTION
        ))
    };
    let section = file.section_by_name(record::SECTION).ok_or_else(none)?;
    let bytes = section.uncompressed_data().map_err(|error| not_loadable(error.to_string()))?;
    let (records, rest) = bytes.as_chunks::<{ record::SIZE }>();
    let mut slots: BTreeMap<u64, Vec<Record>> = BTreeMap::new();
    for bytes in records {
        let read = Record::read(bytes);
        let read =
            read.ok_or_else(|| not_loadable("the kernel's records are of another afterburner's version"))?;
        if read.slot != 0 {
            slots.entry(read.slot).or_default().push(read);
        }
    }
    if slots.is_empty() || !rest.is_empty() {
        return Err(none());
    }
    let replacements = file.sections().filter(|section| section.name() == Ok(SECTION_REPLACEMENTS));
    for section in replacements {
        mark_replacements(&mut slots, section.address()..section.address() + section.size());
    }
    if let Some(record) = slots.values().flatten().find(|record| !thunks::may_be_put_elsewhere(record)) {
        return Err(not_loadable(format!(
            "the kernel may put {} in place of other code when it starts (an alternative)",
            record.kind.name()
        ))
        .hint("build it without PARAVIRT"));
    }
    for slot in slots.values_mut() {
        slot.sort_by_key(|record| record.offset);
    }
    Ok(slots)
}

/// Marks the slots in replacements of alternatives. The record of an instruction in a macro of the
/// assembler does not say so if the macro is used in a replacement only later.
fn mark_replacements(slots: &mut BTreeMap<u64, Vec<Record>>, replacements: std::ops::Range<u64>) {
    for record in slots.range_mut(replacements).flat_map(|(_, records)| records) {
        record.flags = record.flags.and(Flags::ALTERNATIVE);
    }
}

/// Refuses a kernel that asks at its start for the number of levels. Its later behaviour is not
/// known here.
fn has_four_levels(symbols: &HashMap<String, (u64, u64)>) -> Result<()> {
    match symbols.contains_key("pgdir_shift") {
        true => Err(not_loadable("the kernel is for five levels of page tables, too (X86_5LEVEL=y)")),
        false => Ok(()),
    }
}

fn symbols(file: &File<'_>) -> HashMap<String, (u64, u64)> {
    let named = |symbol: object::read::elf::ElfSymbol64<'_, '_, LittleEndian>| {
        let name = symbol.name().ok().filter(|name| !name.is_empty())?;
        Some((name.to_owned(), (symbol.address(), symbol.size())))
    };
    file.symbols().filter_map(named).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mercury_afterburner::kind::Kind;
    use proptest::prelude::*;

    /// This test itself is an ELF file with relocations and symbols, and no kernel.
    fn program() -> Vec<u8> {
        let mut bytes = std::fs::read("/proc/self/exe").unwrap();
        bytes.truncate(1 << 20);
        bytes
    }

    #[test]
    fn an_invalid_kernel_is_refused_with_the_reason() {
        let refused = |bytes: &[u8]| Kernel::parse(bytes).unwrap_err().message().to_owned();
        assert!(refused(b"#!/bin/sh").contains("no ELF file"));
        let mut image = vec![0; 0x400];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        assert!(refused(&image).contains("boot image"));
        let whole = std::fs::read("/proc/self/exe").unwrap();
        assert!(refused(&whole).contains("not a kernel"));
    }

    #[test]
    fn a_slot_of_a_macro_in_a_replacement_is_an_alternative() {
        let operands = [mercury_afterburner::operand::Operand::NONE; 2];
        let record = |slot| {
            let flags = Flags::BORROWED;
            vec![Record { slot, length: 5, offset: 0, size: 2, kind: Kind::LoadSegment, flags, operands }]
        };
        let mut slots: BTreeMap<_, _> =
            [0x0FFB, 0x1000, 0x1FFF, 0x2000].map(|slot| (slot, record(slot))).into();
        mark_replacements(&mut slots, 0x1000..0x2000);
        let marked: Vec<_> =
            slots.values().flatten().map(|record| record.flags.has(Flags::ALTERNATIVE)).collect();
        assert_eq!(marked, [false, true, true, false]);
        assert!(slots.values().flatten().all(|record| record.flags.has(Flags::BORROWED)));
    }

    #[test]
    fn a_kernel_for_five_levels_is_refused_with_the_reason() {
        let with = |name: &str| has_four_levels(&HashMap::from([(name.to_owned(), (0, 4))]));
        assert!(with("page_offset_base").is_ok());
        assert!(with("pgdir_shift").unwrap_err().message().contains("X86_5LEVEL"));
    }

    #[test]
    fn relocations_are_those_that_move() {
        assert_eq!(change(elf::R_X86_64_32S, false, false).unwrap(), Some(Change::Word));
        assert_eq!(change(elf::R_X86_64_64, true, false).unwrap(), None);
        assert_eq!(change(elf::R_X86_64_64, false, true).unwrap(), None);
        assert_eq!(change(elf::R_X86_64_PC32, true, false).unwrap(), Some(Change::Backwards));
        assert_eq!(change(elf::R_X86_64_PLT32, false, false).unwrap(), None);
        assert!(change(elf::R_X86_64_COPY, false, false).is_err());
    }

    proptest! {
        #[test]
        fn no_file_makes_it_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
            header in any::<bool>(),
        ) {
            let mut bytes = bytes;
            if header && bytes.len() > 20 {
                bytes[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0");
            }
            let _ = Kernel::parse(&bytes);
        }

        #[test]
        fn no_damage_makes_it_panic(
            places in proptest::collection::vec((0_usize..0x1000, any::<u8>()), 1..20),
        ) {
            let mut bytes = program();
            for (at, value) in places {
                bytes[at] = value;
            }
            let _ = Kernel::parse(&bytes);
        }
    }
}
