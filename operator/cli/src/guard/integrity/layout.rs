//! The places of code and constants: of the kernel itself, and of each module.

use super::memory::{Memory, number};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fs, io, os::unix::fs::MetadataExt, path::PathBuf};

pub const PAGE: u64 = 4096;
/// Bytes of a module's section at most, where no other section tells its end.
const SECTION_MAX: u64 = 64 << 20;

/// A range of memory that the kernel does not change, or only at places that it lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    pub start: u64,
    pub end: u64,
    /// True for code, false for constants.
    pub is_code: bool,
}

/// A part of the kernel that comes and goes as a whole: the kernel itself, or a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Name; a module's is followed by `@` and the number of its folder, which is new with each load.
    pub name: String,
    pub ranges: Vec<Range>,
    /// Table of places where code jumps or not: start and end.
    pub jumps: (u64, u64),
    /// Table of calls whose target changes: start and end.
    pub calls: (u64, u64),
}

/// The system's files that describe the kernel.
#[derive(Clone, Debug)]
pub struct Files {
    pub proc: PathBuf,
    pub modules: PathBuf,
}

impl Default for Files {
    fn default() -> Self {
        Self { proc: "/proc".into(), modules: "/sys/module".into() }
    }
}

impl Files {
    /// Returns the kernel's symbols as text.
    ///
    /// # Errors
    ///
    /// Returns an error if they cannot be read.
    pub fn symbols(&self) -> io::Result<String> {
        fs::read_to_string(self.proc.join("kallsyms"))
    }

    /// Finds code and constants of the kernel itself.
    ///
    /// # Errors
    ///
    /// Returns an error that names the symbol that is missing.
    pub fn kernel(&self) -> io::Result<Part> {
        let wanted = [
            "_text",
            "_etext",
            "__start_rodata",
            "__end_rodata",
            "__start___jump_table",
            "__stop___jump_table",
            "__start_static_call_sites",
            "__stop_static_call_sites",
            "idt_table",
        ];
        let mut found = BTreeMap::new();
        for line in self.symbols()?.lines() {
            let mut words = line.split_whitespace();
            let (Some(address), Some(_), Some(name), None) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                continue;
            };
            if let (true, Ok(address)) = (wanted.contains(&name), u64::from_str_radix(address, 16)) {
                found.insert(name.to_owned(), address);
            }
        }
        let get = |name: &str| {
            let address = found.get(name).copied().filter(|address| *address != 0);
            address.ok_or_else(|| io::Error::other(format!("the kernel hides the address of {name}")))
        };
        let mut ranges = vec![
            Range { start: get("_text")?, end: get("_etext")?, is_code: true },
            Range { start: get("__start_rodata")?, end: get("__end_rodata")?, is_code: false },
        ];
        // The kernel has filled the table and made it read-only before it starts the first program.
        if let Ok(start) = get("idt_table") {
            ranges.push(Range { start, end: start + PAGE, is_code: false });
        }
        Ok(Part {
            name: "kernel".to_owned(),
            ranges,
            jumps: (get("__start___jump_table")?, get("__stop___jump_table")?),
            calls: (get("__start_static_call_sites")?, get("__stop_static_call_sites")?),
        })
    }

    /// Returns the names of the modules that run. Those of live patches are left out: the kernel relocates
    /// their code when a module comes that they patch.
    ///
    /// # Errors
    ///
    /// Returns an error if the list cannot be read.
    pub fn modules(&self) -> io::Result<Vec<String>> {
        let module = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            let [name, _, _, _, "Live", _, rest @ ..] = words.as_slice() else { return None };
            let is_patch = rest.first().is_some_and(|taints| taints.contains('K'));
            let id = fs::metadata(self.modules.join(name)).ok()?.ino();
            (!is_patch).then(|| format!("{name}@{id}"))
        };
        let text = fs::read_to_string(self.proc.join("modules"))?;
        Ok(text.lines().filter_map(module).collect())
    }

    /// Finds code and constants of a module.
    ///
    /// # Errors
    ///
    /// Returns an error if its sections cannot be read.
    pub fn module(&self, name: &str, memory: &impl Memory) -> io::Result<Part> {
        let folder = self.modules.join(short(name)).join("sections");
        let mut sections = Vec::new();
        for file in fs::read_dir(&folder)? {
            let file = file?;
            let text = fs::read_to_string(file.path())?;
            let address = u64::from_str_radix(text.trim().trim_start_matches("0x"), 16);
            let address = address.map_err(io::Error::other)?;
            sections.push((address, file.file_name().to_string_lossy().into_owned()));
        }
        sections.sort();
        let mut part = Part { name: name.to_owned(), ranges: Vec::new(), jumps: (0, 0), calls: (0, 0) };
        for (at, (start, section)) in sections.iter().enumerate() {
            let next = sections[at + 1..].iter().map(|(address, _)| *address).find(|next| next > start);
            let limit = next.unwrap_or(start + SECTION_MAX);
            match section.as_str() {
                "__jump_table" => part.jumps = (*start, limit),
                ".static_call_sites" => part.calls = (*start, limit),
                section if is_code(section) || section.starts_with(".rodata") => {
                    let end = end_of(memory, *start, limit)?;
                    part.ranges.push(Range { start: *start, end, is_code: is_code(section) });
                }
                _ => {}
            }
        }
        part.ranges.retain(|range| range.start < range.end);
        Ok(part)
    }
}

/// Returns a module's name without the number of its folder.
#[must_use]
pub fn short(name: &str) -> &str {
    name.split_once('@').map_or(name, |(name, _)| name)
}

fn is_code(section: &str) -> bool {
    [".text", ".noinstr.text", ".exit.text", ".static_call.text", ".sched.text", ".cpuidle.text"]
        .iter()
        .any(|known| section.starts_with(known))
}

/// Returns the end of a section: its limit, or the first page of zeros. Such a page follows each of the areas
/// that a module's sections lie in.
fn end_of(memory: &impl Memory, start: u64, limit: u64) -> io::Result<u64> {
    let mut page = [0; PAGE as usize];
    let mut at = start & !(PAGE - 1);
    while at < limit {
        memory.read(at, &mut page)?;
        if page.iter().all(|byte| *byte == 0) {
            return Ok(at.max(start));
        }
        at += PAGE;
    }
    Ok(limit)
}

/// Returns the entries of a table of the part, each as its words.
///
/// # Errors
///
/// Returns an error if the table cannot be read.
pub fn table(
    memory: &impl Memory,
    (start, end): (u64, u64),
    entry: usize,
) -> io::Result<Vec<(u64, Vec<u8>)>> {
    let mut entries = Vec::new();
    let mut at = start;
    let mut page = vec![0; PAGE as usize / entry * entry];
    while at < end {
        let size = page.len().min(usize::try_from(end - at).unwrap_or(usize::MAX)) / entry * entry;
        let page = &mut page[..size];
        if size == 0 {
            break;
        }
        memory.read(at, page)?;
        for (index, bytes) in page.chunks_exact(entry).enumerate() {
            // The table of a module may have room behind it.
            if number(bytes, 0) == 0 {
                return Ok(entries);
            }
            entries.push((at + (index * entry) as u64, bytes.to_vec()));
        }
        at += size as u64;
    }
    Ok(entries)
}

/// Returns the address that a relative word at `at` names.
#[must_use]
pub fn relative(at: u64, word: &[u8]) -> u64 {
    let offset = i32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    at.wrapping_add_signed(i64::from(offset))
}

/// Returns the symbol at or before an address, with the offset and the module.
#[must_use]
pub fn name(symbols: &str, address: u64) -> String {
    let mut best: Option<(u64, &str, &str)> = None;
    for line in symbols.lines() {
        let mut words = line.split_whitespace();
        let Some(at) = words.next().and_then(|word| u64::from_str_radix(word, 16).ok()) else { continue };
        let (Some(_), Some(name)) = (words.next(), words.next()) else { continue };
        if at <= address && best.is_none_or(|(before, ..)| at > before) {
            best = Some((at, name, words.next().unwrap_or_default()));
        }
    }
    match best {
        Some((at, name, "")) => format!("{name}+{:#x}", address - at),
        Some((at, name, module)) => format!("{name}+{:#x} {module}", address - at),
        None => "an unknown place".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory from an address on; zeros elsewhere.
    struct At(u64, Vec<u8>);

    impl Memory for At {
        fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
            for (at, byte) in (address..).zip(to) {
                let inside = at.checked_sub(self.0).and_then(|at| usize::try_from(at).ok());
                *byte = inside.and_then(|at| self.1.get(at).copied()).unwrap_or(0);
            }
            Ok(())
        }
    }

    fn files(root: &std::path::Path) -> Files {
        Files { proc: root.join("proc"), modules: root.join("module") }
    }

    fn put(root: &std::path::Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }

    #[test]
    fn sections_of_a_module() {
        let root = tempfile::tempdir().expect("a folder");
        for (section, address) in [
            (".text", "0xffffffffc0000000"),
            (".text.unlikely", "0xffffffffc0000ff0"),
            (".rodata", "0xffffffffc0002000"),
            (".data", "0xffffffffc0003000"),
            ("__jump_table", "0xffffffffc0002800"),
            (".init.text", "0xffffffffc0009000"),
        ] {
            put(root.path(), &format!("module/some/sections/{section}"), &format!("{address}\n"));
        }
        // Code ends with its page; a page that is not mapped follows.
        let memory = At(0xFFFF_FFFF_C000_0000, vec![1; 0x1000]);
        let part = files(root.path()).module("some@7", &memory).expect("a part");
        let code = |start, end| Range { start, end, is_code: true };
        let base = 0xFFFF_FFFF_C000_0000_u64;
        assert_eq!(part.ranges, [code(base, base + 0xFF0), code(base + 0xFF0, base + 0x1000)]);
        assert_eq!((part.jumps, part.calls), ((base + 0x2800, base + 0x3000), (0, 0)));
    }

    #[test]
    fn modules_that_are_compared() {
        let root = tempfile::tempdir().expect("a folder");
        let list = "some 16384 0 - Live 0xffffffffc0000000 (OE)\n\
            coming 16384 1 some, Loading 0xffffffffc0010000\n\
            patch 16384 0 - Live 0xffffffffc0020000 (OEK)\ngone 1 0 - Live 0xffffffffc0030000\n";
        put(root.path(), "proc/modules", list);
        for module in ["some", "coming", "patch"] {
            put(root.path(), &format!("module/{module}/refcnt"), "0\n");
        }
        let names = files(root.path()).modules().expect("names");
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(short(&names[0]), "some");
        assert_ne!(names[0], "some", "each load has another name");
    }

    #[test]
    fn a_kernel_that_hides_addresses_is_named() {
        let root = tempfile::tempdir().expect("a folder");
        put(root.path(), "proc/kallsyms", "0000000000000000 T _text\n0000000000000000 T _etext\n");
        let error = files(root.path()).kernel().expect_err("no address");
        assert!(error.to_string().contains("_text"), "{error}");
        let symbols = [
            "_text",
            "_etext",
            "__start_rodata",
            "__end_rodata",
            "__start___jump_table",
            "__stop___jump_table",
            "__start_static_call_sites",
            "__stop_static_call_sites",
        ];
        let line = |(at, name): (usize, &&str)| format!("{:x} T {name}\n", 0x1000 * (at + 1));
        let mut text: String = symbols.iter().enumerate().map(line).collect();
        put(root.path(), "proc/kallsyms", &text);
        assert_eq!(files(root.path()).kernel().expect("a part").ranges.len(), 2);
        text += "ffffffff83000000 b idt_table\n1000 t _text\t[some]\n";
        put(root.path(), "proc/kallsyms", &text);
        let part = files(root.path()).kernel().expect("a part");
        let idt = 0xFFFF_FFFF_8300_0000;
        assert_eq!(part.ranges[2], Range { start: idt, end: idt + PAGE, is_code: false });
        assert_eq!((part.ranges[0].start, part.calls), (0x1000, (0x7000, 0x8000)));
    }

    #[test]
    fn the_nearest_symbol_has_the_name() {
        let symbols = "ffffffff81000100 t b\nffffffff81000000 T a\nffffffffc0000000 t c\t[m]\n";
        assert_eq!(name(symbols, 0xFFFF_FFFF_8100_00FF), "a+0xff");
        assert_eq!(name(symbols, 0xFFFF_FFFF_8100_0100), "b+0x0");
        assert_eq!(name(symbols, 0xFFFF_FFFF_C000_0003), "c+0x3 [m]");
        assert_eq!(name(symbols, 5), "an unknown place");
    }

    #[test]
    fn a_table_ends_with_its_last_entry() {
        let mut bytes = vec![0; 64];
        bytes[0] = 4;
        bytes[8] = 8;
        let entries = table(&At(0x1000, bytes), (0x1000, 0x1040), 8).expect("entries");
        assert_eq!(entries.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [0x1000, 0x1008]);
        assert_eq!(relative(0x1008, &entries[1].1), 0x1010);
    }
}
