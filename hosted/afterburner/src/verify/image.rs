//! A linked kernel or module: code, symbols, records, and pointers into code.
//!
//! The sections of a module have no addresses yet. They get addresses here, far apart.

use std::{collections::HashMap, fs, path::Path};

use object::{
    Architecture, Object, ObjectKind, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex,
    SectionKind, SymbolKind, SymbolSection, elf,
};

use crate::{
    error::{Error, Result},
    record::{self, Record, SECTION},
};

/// A section of code, or of data that contains code.
#[derive(Clone, Debug)]
pub struct Code {
    /// Name of the section.
    pub name: String,
    /// Address of the section, or the one that it was given here.
    pub address: u64,
    /// Contents of the section.
    pub bytes: Vec<u8>,
}

impl Code {
    /// Returns the address after the section.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.address + self.bytes.len() as u64
    }

    /// Returns true if the section holds the address.
    #[must_use]
    pub fn holds(&self, address: u64) -> bool {
        (self.address..self.end()).contains(&address)
    }
}

/// A symbol in code.
#[derive(Clone, Debug)]
pub struct Symbol {
    /// Address of the symbol.
    pub address: u64,
    /// Size in bytes; 0 if the symbol has none.
    pub size: u64,
    /// Name of the symbol.
    pub name: String,
    /// True for data among code.
    pub is_data: bool,
}

/// A pointer into code that is not an instruction's operand.
#[derive(Clone, Debug)]
pub struct Pointer {
    /// Address to which it points.
    pub to: u64,
    /// Section that holds the pointer.
    pub section: String,
}

/// The relevant contents of a file.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// Sections of code, by address.
    pub code: Vec<Code>,
    /// Sections of data with a recorded instruction, which is copied or run by firmware.
    pub data: Vec<Code>,
    /// Symbols in these sections, by address.
    pub symbols: Vec<Symbol>,
    /// Source files, by the address of the first symbol that is known to be theirs.
    pub sources: Vec<(u64, String)>,
    /// Records by address of their slots, without those of dropped code.
    pub records: Vec<Record>,
    /// True if there is a section of records. A file without sensitive instructions has none.
    pub has_records: bool,
    /// Other pointers into code.
    pub pointers: Vec<Pointer>,
}

/// Distance between the addresses of sections that get theirs here.
const APART: u64 = 1 << 32;

/// Sections that describe code without leading execution there. They hold return addresses and
/// states of the stack, which are looked up for the place of execution.
const DESCRIPTIVE: &[&str] =
    &[".orc_unwind", ".debug", ".stab", ".eh_frame", ".discard", ".comment", ".note", ".gnu"];

/// The remedy for a file that is damaged, or that another version has built.
const AGAIN: &str = "build it again with `afterburner make` of this version";

impl Image {
    /// Reads a kernel or module from a file.
    ///
    /// # Errors
    /// The file cannot be read, is no x86-64 ELF file, or has records of another version.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).map_err(|error| Error::file("read", path, error))?;
        Self::parse(&bytes).map_err(|error| error.about(path.display()))
    }

    /// Parses a kernel or module in memory.
    ///
    /// # Errors
    /// As for [`Image::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        const KIND: &str = "name a vmlinux or a .ko file for x86-64; a bzImage is compressed";
        let not_elf = |error| Error::new(format!("the file is no kernel and no module: {error}")).hint(KIND);
        let file = object::File::parse(bytes).map_err(not_elf)?;
        if file.architecture() != Architecture::X86_64 || file.format() != object::BinaryFormat::Elf {
            return Err(Error::new("the file is no ELF file for x86-64").hint(KIND));
        }
        let placed = Placed::new(&file);
        let records = placed.records(&file)?;
        let mut image = Self {
            code: placed.sections(&file, is_code)?,
            data: placed.sections(&file, is_data)?,
            records,
            has_records: file.section_by_name(SECTION).is_some(),
            pointers: placed.pointers(&file),
            ..Self::default()
        };
        let Self { data, records, .. } = &mut image;
        data.retain(|section| records.iter().any(|record| section.holds(record.instruction())));
        placed.symbols(&file, &mut image);
        Ok(image)
    }

    /// Returns the function and the source file at an address, as far as the symbols tell.
    #[must_use]
    pub fn name(&self, address: u64) -> (String, String) {
        let symbol = self.symbols[..self.symbols.partition_point(|symbol| symbol.address <= address)].last();
        let source = self.sources[..self.sources.partition_point(|(first, _)| *first <= address)].last();
        let function = symbol.map_or_else(String::new, |symbol| match address - symbol.address {
            0 => symbol.name.clone(),
            offset => format!("{}+{offset:#x}", symbol.name),
        });
        (function, source.map_or_else(String::new, |(_, name)| name.clone()))
    }

    /// Returns the section at an address.
    #[must_use]
    pub fn section(&self, address: u64) -> Option<&Code> {
        self.code.iter().chain(&self.data).find(|section| section.holds(address))
    }
}

/// The addresses of the sections.
struct Placed {
    linked: bool,
    bases: HashMap<SectionIndex, u64>,
}

impl Placed {
    fn new(file: &object::File<'_>) -> Self {
        let linked = file.kind() != ObjectKind::Relocatable;
        let base = |section: &object::Section<'_, '_>| match linked {
            true => section.address(),
            false => (section.index().0 as u64) * APART,
        };
        let bases = file.sections().map(|section| (section.index(), base(&section))).collect();
        Self { linked, bases }
    }

    fn base(&self, section: SectionIndex) -> u64 {
        self.bases.get(&section).copied().unwrap_or(0)
    }

    fn address(&self, symbol: &object::Symbol<'_, '_>) -> Option<u64> {
        match symbol.section() {
            SymbolSection::Section(_) if self.linked => Some(symbol.address()),
            SymbolSection::Section(section) => Some(self.base(section).wrapping_add(symbol.address())),
            _ => None,
        }
    }

    fn sections(
        &self,
        file: &object::File<'_>,
        wanted: fn(&object::Section<'_, '_>) -> bool,
    ) -> Result<Vec<Code>> {
        let mut all = Vec::new();
        for section in file.sections().filter(wanted) {
            let unreadable = |error| Error::new(format!("a section cannot be read: {error}")).hint(AGAIN);
            let bytes = section.data().map_err(unreadable)?;
            let name = section.name().unwrap_or_default().to_owned();
            let address = self.base(section.index());
            if address.checked_add(bytes.len() as u64).is_none() {
                return Err(
                    Error::new(format!("the section {name} ends beyond the address space")).hint(AGAIN)
                );
            }
            all.push(Code { name, address, bytes: bytes.to_vec() });
        }
        all.sort_by_key(|code| code.address);
        Ok(all)
    }

    fn symbols(&self, file: &object::File<'_>, image: &mut Image) {
        let mut source: Option<String> = None;
        for symbol in file.symbols() {
            let name = symbol.name().unwrap_or_default();
            if symbol.kind() == SymbolKind::File {
                source = Some(name.to_owned());
                continue;
            }
            let Some(address) = self.address(&symbol) else { continue };
            if image.section(address).is_none() || symbol.kind() == SymbolKind::Section || name.is_empty() {
                continue;
            }
            if let (true, Some(source)) = (symbol.is_local(), &source) {
                image.sources.push((address, source.clone()));
            }
            let is_data = symbol.kind() == SymbolKind::Data;
            image.symbols.push(Symbol { address, size: symbol.size(), name: name.to_owned(), is_data });
        }
        image.symbols.sort_by_key(|symbol| symbol.address);
        image.sources.sort();
    }

    fn records(&self, file: &object::File<'_>) -> Result<Vec<Record>> {
        let Some(section) = file.section_by_name(SECTION) else { return Ok(Vec::new()) };
        let bad = || Error::new(format!("{SECTION} does not hold records of this version")).hint(AGAIN);
        let unreadable = |error| Error::new(format!("{SECTION} cannot be read: {error}")).hint(AGAIN);
        let mut bytes = section.uncompressed_data().map_err(unreadable)?.into_owned();
        if !self.linked {
            self.relocate(file, &section, &mut bytes)?;
        }
        let (records, rest) = bytes.as_chunks::<{ record::SIZE }>();
        if !rest.is_empty() {
            return Err(bad());
        }
        let records: Option<Vec<Record>> = records.iter().map(Record::read).collect();
        let mut records = records.ok_or_else(bad)?;
        if records.iter().any(|record| record.slot.checked_add(2 * u64::from(u8::MAX)).is_none()) {
            return Err(bad());
        }
        records.retain(|record| record.slot != 0);
        records.sort_by_key(|record| (record.slot, record.offset));
        Ok(records)
    }

    /// Applies the relocations of the records, as the linker would.
    fn relocate(
        &self,
        file: &object::File<'_>,
        section: &object::Section<'_, '_>,
        bytes: &mut [u8],
    ) -> Result<()> {
        for (offset, relocation) in section.relocations() {
            let place = bytes.get_mut(offset as usize..).and_then(|rest| rest.first_chunk_mut::<8>());
            let target = self.target(file, &relocation, 0);
            match (place, target) {
                (Some(place), Some(target)) => *place = target.to_le_bytes(),
                _ => {
                    let text = format!("{SECTION} has an unknown relocation at {offset:#x}");
                    return Err(Error::new(text).hint(AGAIN));
                }
            }
        }
        Ok(())
    }

    /// Returns the target of a relocation. `place` is its own address, if its addend counts from
    /// there.
    fn target(&self, file: &object::File<'_>, relocation: &object::Relocation, place: i64) -> Option<u64> {
        let base = match relocation.target() {
            RelocationTarget::Symbol(symbol) => {
                let symbol = file.symbol_by_index(symbol).ok()?;
                match symbol.kind() {
                    SymbolKind::Section if self.linked => symbol.address(),
                    SymbolKind::Section => self.base(symbol.section_index()?),
                    _ => self.address(&symbol)?,
                }
            }
            RelocationTarget::Section(section) => self.base(section),
            _ => return None,
        };
        Some(base.wrapping_add_signed(relocation.addend().wrapping_add(place)))
    }

    /// Returns the pointers that the linker knows of, from sections other than code.
    fn pointers(&self, file: &object::File<'_>) -> Vec<Pointer> {
        let mut all = Vec::new();
        for section in file.sections() {
            let name = section.name().unwrap_or_default().to_owned();
            if is_code(&section) || DESCRIPTIVE.iter().any(|prefix| name.starts_with(prefix)) {
                continue;
            }
            for (_, relocation) in section.relocations() {
                all.extend(self.target(file, &relocation, 0).map(|to| Pointer { to, section: name.clone() }));
            }
        }
        all
    }
}

fn is_code(section: &object::Section<'_, '_>) -> bool {
    is_loaded(section) == Some(true)
}

fn is_data(section: &object::Section<'_, '_>) -> bool {
    is_loaded(section) == Some(false)
}

/// Returns `Some` for a section whose contents get into memory: true if it is executable.
fn is_loaded(section: &object::Section<'_, '_>) -> Option<bool> {
    let object::SectionFlags::Elf { sh_flags } = section.flags() else { return None };
    let has = |flag: u32| sh_flags & u64::from(flag) != 0;
    (has(elf::SHF_ALLOC) && section.kind() != SectionKind::UninitializedData).then(|| has(elf::SHF_EXECINSTR))
}
