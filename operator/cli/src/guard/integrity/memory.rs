//! The kernel's memory by its own addresses, as `/proc/kcore` shows it.

use std::{
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt,
};

/// Access to the kernel's memory.
pub trait Memory {
    /// Reads memory. What the kernel does not map is read as zeros.
    ///
    /// # Errors
    ///
    /// Returns an error if the address is no part of the kernel's, or the kernel refuses.
    fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()>;
}

/// Size of an ELF header, and of a program header.
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const LOAD: u32 = 1;

/// `/proc/kcore`: an ELF core file of the running kernel.
#[derive(Debug)]
pub struct Kcore {
    file: File,
    /// First address, end, and place in the file.
    segments: Vec<(u64, u64, u64)>,
}

impl Kcore {
    /// Opens the file.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel is locked down, or has no such file.
    pub fn open(path: &std::path::Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0)?;
        if !header.starts_with(b"\x7fELF") {
            return Err(io::Error::new(ErrorKind::InvalidData, "this is no core file"));
        }
        let (at, count) = (number(&header, 32), usize::from(u16::from_le_bytes([header[56], header[57]])));
        let mut table = vec![0; count * PROGRAM_HEADER];
        file.read_exact_at(&mut table, at)?;
        let segments = table.chunks_exact(PROGRAM_HEADER).filter_map(segment).collect();
        Ok(Self { file, segments })
    }
}

/// Returns the number at an offset.
pub fn number(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// Parses a program header.
fn segment(header: &[u8]) -> Option<(u64, u64, u64)> {
    let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let (offset, start, size) = (number(header, 8), number(header, 16), number(header, 32));
    (kind == LOAD).then(|| (start, start.saturating_add(size), offset))
}

impl Memory for Kcore {
    fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
        let end = address.saturating_add(to.len() as u64);
        let found = self.segments.iter().find(|(start, until, _)| *start <= address && end <= *until);
        let (start, _, offset) =
            found.ok_or_else(|| io::Error::new(ErrorKind::NotFound, format!("no memory at {address:#x}")))?;
        self.file.read_exact_at(to, offset + (address - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_file_is_read_by_address() {
        let mut core = vec![0; HEADER + 2 * PROGRAM_HEADER];
        core[..4].copy_from_slice(b"\x7fELF");
        core[32..40].copy_from_slice(&64_u64.to_le_bytes());
        core[56] = 2;
        // The first is a note.
        core[HEADER] = 4;
        let header = &mut core[HEADER + PROGRAM_HEADER..];
        header[0] = 1;
        header[8..16].copy_from_slice(&176_u64.to_le_bytes());
        header[16..24].copy_from_slice(&0xFFFF_FFFF_8100_0000_u64.to_le_bytes());
        header[32..40].copy_from_slice(&4_u64.to_le_bytes());
        core.extend([1, 2, 3, 4]);
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), &core).expect("a core");
        let core = Kcore::open(file.path()).expect("a core");
        let mut bytes = [0; 2];
        core.read(0xFFFF_FFFF_8100_0002, &mut bytes).expect("bytes");
        assert_eq!(bytes, [3, 4]);
        for outside in [0xFFFF_FFFF_8100_0003, 0xFFFF_FFFF_80FF_FFFF] {
            assert!(core.read(outside, &mut bytes).is_err(), "{outside:#x}");
        }
    }
}
