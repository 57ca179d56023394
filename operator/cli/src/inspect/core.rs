//! The memory of an image, or of a life that ended, as an ELF core for debuggers: the form of
//! `/proc/vmcore` (ELF-64, `ET_CORE`).
//!
//! Every range of memory is a segment at its physical address, and at the address at which the
//! kernel maps all memory. The kernel's own text and data have a second segment at their own
//! address. Notes hold the registers of each CPU (`NT_PRSTATUS`), and the kernel's information for
//! such tools (`VMCOREINFO`). Zeros are holes in the file.

use mercury_abi::{restart::SavedCpu, snapshot::EndedCpu};
use mercury_control::error::{Error, Result};
use mercury_image::{Chunk, Kind, Machine, PAGE, Source};
use std::{
    fs::{self, File, OpenOptions},
    io,
    mem::offset_of,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

const EHDR: usize = 64;
const PHDR: usize = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const NT_PRSTATUS: u32 = 1;
/// Name of the notes' owner.
const CORE: &[u8] = b"CORE\0";
/// Length of `struct elf_prstatus`, and offset of its registers.
const PRSTATUS: usize = 336;
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGISTERS: usize = 112;
/// Address at which the kernel maps its text and data (`__START_KERNEL_map`).
const KERNEL_MAP: u64 = 0xFFFF_FFFF_8000_0000;
/// Upper limit of the size of a kernel's text and data.
const KERNEL_BYTES: u64 = 64 << 20;
/// Upper limit of the size of `VMCOREINFO`.
const VMCOREINFO_MAX: u64 = 1 << 20;

/// A range of memory in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    phys: u64,
    bytes: u64,
    offset: u64,
}

/// A core that is being written.
#[derive(Debug)]
pub struct Core {
    file: File,
    part: PathBuf,
    path: PathBuf,
    /// Offset of the notes, between the headers and memory, where crash reads them.
    notes: u64,
    segments: Vec<Segment>,
}

impl Core {
    /// Begins a core in a new file.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be made.
    pub fn create(path: &Path, machine: &Machine) -> Result<Self> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&part);
        let file = file.map_err(|error| failed(&error))?;
        let kept: Vec<_> = machine.ranges.iter().filter(|range| range.kind == Kind::Kept).collect();
        // One header for the notes, one for each range, and a second one for the kernel. A larger
        // number needs another encoding.
        let headers = 1 + 2 * kept.len();
        if headers >= usize::from(u16::MAX) {
            let text = format!("memory is in {} pieces, too many for a core", kept.len());
            return Err(
                Error::new(mercury_control::exit::Exit::Failed, text).hint("the image itself is whole")
            );
        }
        let notes = (EHDR + PHDR * headers) as u64;
        let told = machine.vmcoreinfo.map_or(0, |place| place.bytes.min(VMCOREINFO_MAX));
        let end = notes + (machine.cpus.len() * note(CORE, NT_PRSTATUS, &[0; PRSTATUS]).len()) as u64 + told;
        let mut offset = end.next_multiple_of(PAGE as u64);
        let mut segments = Vec::with_capacity(kept.len());
        for range in kept {
            let bytes = range.pages * PAGE as u64;
            segments.push(Segment { phys: range.start_phys, bytes, offset });
            offset += bytes;
        }
        file.set_len(offset).map_err(|error| failed(&error))?;
        Ok(Self { file, part, path: path.to_owned(), notes, segments })
    }

    /// Returns the offset of physical memory in the file.
    fn offset_of(&self, phys: u64) -> io::Result<u64> {
        let after = self.segments.partition_point(|segment| segment.phys <= phys);
        let segment = after.checked_sub(1).map(|at| self.segments[at]);
        segment
            .filter(|segment| phys - segment.phys < segment.bytes)
            .map(|segment| segment.offset + (phys - segment.phys))
            .ok_or_else(|| io::Error::other(format!("{phys:#x} is not part of the image's memory")))
    }

    /// Adds frames. The originals of duplicates have been added before.
    ///
    /// # Errors
    ///
    /// Returns an error if writing fails.
    pub fn add(&mut self, chunk: &Chunk) -> Result<()> {
        self.add_frames(chunk).map_err(|error| failed(&error))
    }

    /// Has what was written go to the disk, and frees the memory that caches it.
    ///
    /// # Errors
    ///
    /// Returns an error if that fails.
    pub fn settle(&self) -> Result<()> {
        self.file.sync_data().map_err(|error| failed(&error))?;
        // Not every file system has a cache to free.
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        Ok(())
    }

    fn add_frames(&mut self, chunk: &Chunk) -> io::Result<()> {
        let mut pages = chunk.data.chunks(PAGE);
        let mut twin = [0; PAGE];
        for frame in &chunk.frames {
            let offset = self.offset_of(frame.phys)?;
            match frame.source {
                Source::Zero => {}
                Source::Parent(_) => {
                    return Err(io::Error::other(format!("{:#x} is in another image", frame.phys)));
                }
                Source::Data => self.file.write_all_at(pages.next().unwrap_or(&[0; PAGE]), offset)?,
                Source::Frame(phys) => {
                    self.file.read_exact_at(&mut twin, self.offset_of(phys)?)?;
                    self.file.write_all_at(&twin, offset)?;
                }
            }
        }
        Ok(())
    }

    /// Adds headers and notes, which completes the core. The CPUs are those of the machine's instant, or
    /// `ended` ones with the numbers of their threads.
    ///
    /// # Errors
    ///
    /// Returns an error if the image lacks the data for them.
    pub fn finish(self, machine: &Machine, ended: &[(EndedCpu, u32)]) -> Result<()> {
        let written = self.write_headers(machine, ended).and_then(|()| fs::rename(&self.part, &self.path));
        written.map_err(|error| failed(&error))
    }

    fn read(&self, phys: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, self.offset_of(phys)?)
    }

    fn word(&self, phys: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(phys, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn write_headers(&self, machine: &Machine, ended: &[(EndedCpu, u32)]) -> io::Result<()> {
        let first = machine.cpus.first().ok_or_else(|| io::Error::other("the image has no CPU"))?;
        // Each CPU's state begins with its own address in the kernel.
        let direct_map = self.word(first.saved_phys)?.wrapping_sub(first.saved_phys);
        let mut notes = Vec::new();
        for (number, cpu) in machine.cpus.iter().enumerate() {
            let status = match ended.get(number) {
                Some((cpu, thread)) => status_of(*thread, &registers_of(cpu)),
                None => self.status(cpu.saved_phys)?,
            };
            notes.extend(note(CORE, NT_PRSTATUS, &status));
        }
        let mut kernel = Vec::new();
        if let Some(place) = machine.vmcoreinfo {
            let mut bytes = vec![0; place.bytes.min(VMCOREINFO_MAX) as usize];
            self.read(place.phys, &mut bytes)?;
            kernel = self.kernel(&String::from_utf8_lossy(&bytes));
            bytes.truncate(note_length(&bytes));
            notes.extend(bytes);
        }
        self.file.write_all_at(&notes, self.notes)?;

        let mut table = header(PT_NOTE, 0, self.notes, 0, 0, notes.len() as u64).to_vec();
        for segment in &self.segments {
            let virt = direct_map.wrapping_add(segment.phys);
            table.extend(header(PT_LOAD, 7, segment.offset, virt, segment.phys, segment.bytes));
        }
        for (segment, virt) in kernel {
            table.extend(header(PT_LOAD, 7, segment.offset, virt, segment.phys, segment.bytes));
        }
        self.file.write_all_at(&file_header((table.len() / PHDR) as u16), 0)?;
        self.file.write_all_at(&table, EHDR as u64)?;
        self.file.sync_all()
    }

    /// Returns the kernel's text and data, and their addresses, from its information for tools.
    /// Memory that it needed only at its start is reused by now, and may be missing in between.
    fn kernel(&self, told: &str) -> Vec<(Segment, u64)> {
        let value = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        let text = || u64::from_str_radix(value("SYMBOL(_stext)")?, 16).ok();
        let base = || value("NUMBER(phys_base)")?.parse::<i64>().ok();
        let Some((text, base)) = text().zip(base()) else { return Vec::new() };
        let text = text & !0x1F_FFFF;
        let phys = text.wrapping_sub(KERNEL_MAP).wrapping_add_signed(base);
        let part = |segment: &Segment| {
            let start = segment.phys.max(phys);
            let end = (segment.phys + segment.bytes).min(phys.saturating_add(KERNEL_BYTES));
            let offset = segment.offset + start.checked_sub(segment.phys)?;
            let bytes = end.checked_sub(start).filter(|bytes| *bytes > 0)?;
            Some((Segment { phys: start, bytes, offset }, text + (start - phys)))
        };
        self.segments.iter().filter_map(part).collect()
    }

    /// Returns the note with a CPU's registers and thread: in the order of CPUs, as in
    /// `/proc/vmcore`.
    fn status(&self, saved: u64) -> io::Result<Vec<u8>> {
        let word = |offset: usize| self.word(saved + offset as u64);
        let register = |number: usize| word(offset_of!(SavedCpu, registers) + 8 * number);
        let thread = word(offset_of!(SavedCpu, thread))? as u32;
        // In the order of `struct user_regs_struct`.
        let registers = [
            (0, register(5)?),
            (1, register(4)?),
            (2, register(3)?),
            (3, register(2)?),
            (4, register(1)?),
            (5, register(0)?),
            (16, word(offset_of!(SavedCpu, rip))?),
            (17, 0x10),
            (18, word(offset_of!(SavedCpu, rflags))?),
            (19, word(offset_of!(SavedCpu, rsp))?),
            (20, 0x18),
            (21, word(offset_of!(SavedCpu, fs_base))?),
            (22, word(offset_of!(SavedCpu, gs_base))?),
        ];
        Ok(status_of(thread, &registers))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // A core that is complete has been renamed.
        let _ = fs::remove_file(&self.part);
    }
}

/// Returns a note's content: a thread, and registers by their number in `struct user_regs_struct`.
fn status_of(thread: u32, registers: &[(usize, u64)]) -> Vec<u8> {
    let mut status = vec![0; PRSTATUS];
    status[PRSTATUS_PID..PRSTATUS_PID + 4].copy_from_slice(&thread.to_le_bytes());
    for (number, value) in registers {
        let at = PRSTATUS_REGISTERS + 8 * number;
        status[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    status
}

/// Returns all registers of a CPU that ended.
fn registers_of(cpu: &EndedCpu) -> Vec<(usize, u64)> {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] = cpu.registers;
    // In the order of `struct user_regs_struct`. The second RAX would be the number of a system call.
    let none = u64::MAX;
    let all = [r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, none];
    let rest = [cpu.rip, cpu.cs, cpu.rflags, rsp, cpu.ss];
    all.into_iter().chain(rest).enumerate().collect()
}

fn failed(error: &io::Error) -> Error {
    Error::new(mercury_control::exit::Exit::Failed, format!("the core could not be written: {error}"))
        .hint("it needs as much room as the machine had memory, except for zeros")
}

fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [name.len() as u32, content.len() as u32, kind] {
        bytes.extend(word.to_le_bytes());
    }
    for part in [name, content] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// Returns the length of the note at the beginning, for which the kernel reserves more room. 0
/// means that there is none.
fn note_length(bytes: &[u8]) -> usize {
    let word = |at: usize| {
        let mut word = [0; 4];
        word.copy_from_slice(bytes.get(at..at + 4)?);
        Some(u32::from_le_bytes(word) as usize)
    };
    let parts = |name: usize, content: usize| 12 + name.next_multiple_of(4) + content.next_multiple_of(4);
    let length = word(0).zip(word(4)).map_or(0, |(name, content)| parts(name, content));
    if length > 12 && length <= bytes.len() { length } else { 0 }
}

fn header(kind: u32, flags: u32, offset: u64, virt: u64, phys: u64, bytes: u64) -> [u8; PHDR] {
    let mut header = [0; PHDR];
    header[0..4].copy_from_slice(&kind.to_le_bytes());
    header[4..8].copy_from_slice(&flags.to_le_bytes());
    for (index, word) in [offset, virt, phys, bytes, bytes, 0].into_iter().enumerate() {
        header[8 + 8 * index..16 + 8 * index].copy_from_slice(&word.to_le_bytes());
    }
    header
}

fn file_header(segments: u16) -> [u8; EHDR] {
    const ET_CORE: u16 = 4;
    const EM_X86_64: u16 = 62;
    let mut header = [0; EHDR];
    header[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    header[16..18].copy_from_slice(&ET_CORE.to_le_bytes());
    header[18..20].copy_from_slice(&EM_X86_64.to_le_bytes());
    header[20..24].copy_from_slice(&1_u32.to_le_bytes());
    header[32..40].copy_from_slice(&(EHDR as u64).to_le_bytes());
    header[52..54].copy_from_slice(&(EHDR as u16).to_le_bytes());
    header[54..56].copy_from_slice(&(PHDR as u16).to_le_bytes());
    header[56..58].copy_from_slice(&segments.to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{Cpu, Frame, Range, VmCoreInfo};

    #[test]
    fn notes_end_where_they_say() {
        let mut bytes = note(b"VMCOREINFO\0", 0, b"OSRELEASE=6.1");
        let length = bytes.len();
        bytes.resize(100, 0);
        assert_eq!(note_length(&bytes), length);
        assert_eq!(note_length(&[0; 64]), 0);
        assert_eq!(note_length(&[255; 64]), 0);
        assert_eq!(note_length(&[]), 0);
    }

    #[test]
    fn memory_has_its_addresses_in_the_core() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("core");
        let kept = |start_phys, pages| Range { start_phys, pages, kind: Kind::Kept };
        let machine = Machine {
            ranges: vec![kept(0x1000, 2), kept(0x40_0000, 2), kept(0x40_3000, 1), kept(0x800_0000, 1)],
            cpus: vec![Cpu { cpu: 3, apic_id: 0, saved_phys: 0x2000 }],
            vmcoreinfo: Some(VmCoreInfo { phys: 0x1000, bytes: 64 }),
            ..Machine::default()
        };
        let told = b"SYMBOL(_stext)=ffffffff80200000\nNUMBER(phys_base)=2097152\n";
        let mut data = vec![0; 3 * PAGE];
        data[..told.len()].copy_from_slice(told);
        data[PAGE..PAGE + 8].copy_from_slice(&0xFFFF_8880_0000_2000_u64.to_le_bytes());
        data[PAGE + offset_of!(SavedCpu, thread)] = 16;
        data[2 * PAGE] = 9;
        let frame = |phys, source| Frame { phys, source };
        let frames = vec![
            frame(0x1000, Source::Data),
            frame(0x2000, Source::Data),
            frame(0x40_0000, Source::Data),
            frame(0x40_1000, Source::Frame(0x40_0000)),
            frame(0x40_3000, Source::Zero),
            frame(0x800_0000, Source::Zero),
        ];
        let mut core = Core::create(&path, &machine).expect("begun");
        core.add(&Chunk { frames, data }).expect("added");
        core.finish(&machine, &[]).expect("finished");

        let bytes = std::fs::read(&path).expect("a file");
        let header = |number: usize| &bytes[EHDR + PHDR * number..][..PHDR];
        let field = |number: usize, at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&header(number)[at..at + 8]);
            u64::from_le_bytes(word)
        };
        assert_eq!(u16::from_le_bytes([bytes[56], bytes[57]]), 7);
        assert_eq!((field(2, 16), field(2, 24)), (0xFFFF_8880_0040_0000, 0x40_0000));
        // The kernel, with a hole in it, and only up to its end.
        assert_eq!((field(5, 16), field(5, 24), field(5, 32)), (0xFFFF_FFFF_8020_0000, 0x40_0000, 0x2000));
        assert_eq!((field(6, 16), field(6, 24), field(6, 32)), (0xFFFF_FFFF_8020_3000, 0x40_3000, 0x1000));
        assert_eq!((field(6, 8), field(5, 8)), (field(3, 8), field(2, 8)));
        let offset = field(2, 8) as usize;
        assert_eq!((bytes[offset], bytes[offset + PAGE]), (9, 9));
        let notes = field(0, 8) as usize;
        assert!(notes >= EHDR + 7 * PHDR && notes + field(0, 32) as usize <= field(1, 8) as usize);
        assert_eq!(&bytes[notes + 12..notes + 16], b"CORE");
        assert_eq!(bytes[notes + 20 + PRSTATUS_PID], 16);
    }
}
